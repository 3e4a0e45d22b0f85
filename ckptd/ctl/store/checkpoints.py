"""`ckptctl checkpoints` and `ckptctl verify`: checkpoints in object storage. They need no daemon.

The store is the configured one (environment, TOML) unless `--store` names another; `verify URL`
needs no configuration.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ckptd.config.settings import DaemonConfig
from ckptd.ctl.store import render_store as render
from ckptd.ctl.store.store_access import (
    EXIT_REFUSED,
    OpenedStore,
    StoreProblem,
    configured_place,
    named_place,
    opened,
)
from ckptd.ctl.store.store_changes import pin, policy_of, remove, unpin
from ckptd.ctl.store.store_checks import Checked, check_checkpoint, check_run, check_store
from ckptd.ctl.store.store_gc import Collected, collect
from ckptd.ctl.store.store_lookup import (
    Family,
    choose_checkpoint,
    families_of,
    find_catalog,
    read_manifests_of,
)
from ckptd.ctl.store.store_views import RunShown, rows_of, runs_in, show_checkpoint, standing_of
from ckptd.printable import for_terminal
from ckptd.storage.checkpoints.catalog import Catalog
from ckptd.storage.checkpoints.names import MAX_ITERATION, check_name
from ckptd.storage.checkpoints.reader import read_catalog
from ckptd.storage.checkpoints.retention import RetentionPolicy
from ckptd.storage.stores.open_store import BACKENDS

__all__ = [
    "CommandOutcome",
    "add_checkpoints_commands",
    "add_verify_arguments",
    "run_checkpoints",
    "run_verify",
]

_DAMAGED = 1
_UNITS_S = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_GRACE_S, _SETTLE_S = RetentionPolicy().grace_ns / 1e9, RetentionPolicy().settle_ns / 1e9


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """The result of a command: the answer for ``--json``, its text, and the exit status."""

    answer: Any
    text: str
    code: int = 0


def run_checkpoints(args: argparse.Namespace) -> CommandOutcome:
    """Perform a subcommand of `ckptctl checkpoints`.

    Raises:
        StoreProblem: the command cannot be done; the message gives the reason.
        ConfigError: a setting cannot be used.
    """
    place, config = configured_place(args.store, args.store_options, args.store_backend)
    with opened(place, args.timeout) as store:
        found: CommandOutcome = args.stored(store, args, config)
        return found


def run_verify(args: argparse.Namespace) -> CommandOutcome:
    """`ckptctl verify URL`.

    Raises:
        StoreProblem: the store cannot be read, or contains no checkpoint.
    """
    place = named_place(args.url, args.store_options, args.store_backend)
    with opened(place, args.timeout) as store:
        checked = check_store(store, full=not args.fast, quiet=args.json)
        if not checked.whole and not runs_in(store.store.list("")):
            raise StoreProblem(
                f"no checkpoint of any job exists below {place.shown}: pass the URL of the daemon's "
                "store, the folder above those of the jobs"
            )
    return _checked(checked)


# -- the commands --------------------------------------------------------------------------------


def _list(store: OpenedStore, args: argparse.Namespace, _: DaemonConfig) -> CommandOutcome:
    families = families_of(store, args.job, args.run)
    shown = [each for family in families for each in _family_shown(store, family, args)]
    return CommandOutcome({"store": store.place.shown, "runs": shown}, render.runs(shown, store.place.shown))


def _family_shown(store: OpenedStore, family: Family, args: argparse.Namespace) -> list[RunShown]:
    """The chosen runs of a family; incarnations with the latest first."""
    catalogs = {run: read_catalog(store.store, family.job, run) for run in family.runs}
    committed = {number: len(catalogs[run].committed) for number, run in family.incarnations.items()}
    standing = {run: standing_of(number, committed) for number, run in family.incarnations.items()}
    found = []
    for run in family.chosen:
        shown = _run_shown(store, catalogs[run], args)
        found.append(replace(shown, elastic=family.elastic, standing=standing.get(run, "")))
    return found


def _run_shown(store: OpenedStore, catalog: Catalog, args: argparse.Namespace) -> RunShown:
    manifests = None if args.fast else read_manifests_of(store, catalog.checkpoints)
    rows = rows_of(catalog, manifests, time.time_ns())
    unreadable = {} if manifests is None else manifests.unreadable
    return RunShown(catalog.job, catalog.run, rows, unreadable)


def _show(store: OpenedStore, args: argparse.Namespace, _: DaemonConfig) -> CommandOutcome:
    catalog = find_catalog(store, args.job, args.run)
    chosen = choose_checkpoint(catalog, args.iteration, args.epoch, args.agreement, prefer_committed=True)
    manifests = read_manifests_of(store, catalog.checkpoints)
    rows = rows_of(catalog, manifests, time.time_ns())
    row = rows[catalog.checkpoints.index(chosen)]
    shown = show_checkpoint(row, chosen, manifests)
    if args.rank is not None and args.rank not in [rank.rank for rank in shown.ranks]:
        raise StoreProblem(f"{chosen.id} has no manifest of rank {args.rank}: {chosen.reason}")
    text = render.checkpoint(shown, only_rank=args.rank)
    return CommandOutcome(shown, text, _DAMAGED if shown.damaged else 0)


def _verify(store: OpenedStore, args: argparse.Namespace, _: DaemonConfig) -> CommandOutcome:
    if args.all and args.iteration is not None:
        raise StoreProblem("give an ITERATION or --all, not both")
    catalog = find_catalog(store, args.job, args.run)
    if args.all:
        checked = check_run(store, args.job, args.run, full=not args.fast, quiet=args.json)
        return _checked(checked)
    if args.iteration is None:
        chosen = catalog.newest
        if chosen is None:
            raise StoreProblem(
                f"no checkpoint of {args.job}/{args.run} is committed; --all verifies the others"
            )
    else:
        chosen = choose_checkpoint(catalog, args.iteration, args.epoch, args.agreement, prefer_committed=True)
    objects = read_manifests_of(store, [chosen]).objects_of(chosen) or {}
    checked = check_checkpoint(
        store,
        catalog,
        chosen,
        total_bytes=sum(objects.values()),
        full=not args.fast,
        quiet=args.json,
    )
    if checked.ok and not checked.whole:
        raise StoreProblem(f"{chosen.id} was removed while it was verified", EXIT_REFUSED)
    return _checked(checked)


def _checked(checked: Checked) -> CommandOutcome:
    return CommandOutcome(checked, render.checked(checked), 0 if checked.ok else _DAMAGED)


def _pin(store: OpenedStore, args: argparse.Namespace, _: DaemonConfig) -> CommandOutcome:
    done = pin(store, args) if args.action == "pin" else unpin(store, args)
    return CommandOutcome(done, render.pinned(done))


def _rm(store: OpenedStore, args: argparse.Namespace, _: DaemonConfig) -> CommandOutcome:
    done = remove(store, args)
    return CommandOutcome(done, render.removed(done))


def _gc(store: OpenedStore, args: argparse.Namespace, config: DaemonConfig) -> CommandOutcome:
    def planned(plan: Collected) -> None:
        if not args.json:
            print(for_terminal(render.planned(plan)), flush=True)

    found = collect(store, args, policy_of(args, config), planned)
    refused = any(each.refused for each in found)
    answer = {"dry_run": args.dry_run, "runs": found}
    return CommandOutcome(
        answer, render.collected(found, dry_run=args.dry_run), EXIT_REFUSED if refused else 0
    )


# -- arguments -----------------------------------------------------------------------------------


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ckptctl verify`."""
    parser.add_argument("url", metavar="URL", help="a store, such as s3://bucket/prefix or a folder")
    _add_store_options(parser)
    _add_fast(parser)


def add_checkpoints_commands(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    """Add the subcommands of `ckptctl checkpoints`."""
    commands = parser.add_subparsers(required=True, metavar="ACTION")
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument("--store", metavar="URL", help="a URL or folder (default: as configured)")
    _add_store_options(where)

    def add(
        name: str,
        function: Callable[[OpenedStore, argparse.Namespace, DaemonConfig], CommandOutcome],
        text: str,
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, parents=[common, where])
        sub.set_defaults(stored=function, action=name)
        return sub

    some = add("list", _list, "list checkpoints, newest first: committed, incomplete or stale")
    _add_run(some, nargs="?")
    some.add_argument("--fast", action="store_true", help="read no manifest, and show no sizes")
    show = add(
        "show",
        _show,
        "show one checkpoint: its ranks, snapshots and sizes, and the replay of a restore",
    )
    _add_checkpoint(show)
    show.add_argument("--rank", type=int, help="show only this rank, with its objects")
    verify = add("verify", _verify, "verify the newest checkpoint, the named one, or all")
    _add_checkpoint(verify, nargs="?")
    verify.add_argument("--all", action="store_true", help="verify all checkpoints of the run")
    _add_fast(verify)
    _add_checkpoint(add("pin", _pin, "pin a checkpoint: retention does not delete it"))
    _add_checkpoint(add("unpin", _pin, "remove the pin of a checkpoint"))
    rm = add("rm", _rm, "remove a checkpoint and the objects that no other checkpoint needs")
    _add_checkpoint(rm)
    rm.add_argument(
        "--force",
        action="store_true",
        help="remove even the newest checkpoint, and all its objects at once; safe only if no job writes",
    )
    _add_grace(rm)
    _add_policy(
        add(
            "gc",
            _gc,
            "delete the checkpoints that retention does not keep, and unreferenced objects",
        )
    )


def _add_store_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--store-options", metavar="JSON", help='such as \'{"region": "eu-1"}\'')
    parser.add_argument("--store-backend", choices=BACKENDS, help="library that accesses the store")


def _add_fast(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fast", action="store_true", help="compare sizes with the listing; read no tensors")


def _add_run(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    parser.add_argument("job", metavar="JOB", type=partial(_name, "job"), nargs=nargs)
    parser.add_argument("run", metavar="RUN", type=partial(_name, "run"), nargs=nargs)


def _add_checkpoint(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    _add_run(parser)
    parser.add_argument("iteration", metavar="ITERATION", type=_iteration, nargs=nargs)
    parser.add_argument("--epoch", type=int, help="epoch of the checkpoint, if several end at that iteration")
    parser.add_argument(
        "--agreement",
        default="",
        metavar="HEX",
        help="first digits of its agreement, if several end at that iteration",
    )


def _add_policy(parser: argparse.ArgumentParser) -> None:
    _add_run(parser, nargs="?")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, and delete nothing")
    parser.add_argument(
        "--keep-last",
        type=_positive,
        metavar="N",
        help="keep the newest N (default: as configured)",
    )
    parser.add_argument(
        "--keep-every",
        type=_natural,
        metavar="M",
        help="keep the first of every M iterations (default: as configured)",
    )
    parser.add_argument(
        "--keep-for",
        type=_duration,
        metavar="TIME",
        help="keep those younger than TIME, such as 7d or 12h (default: as configured)",
    )
    _add_grace(parser)
    parser.add_argument(
        "--settle",
        type=_duration,
        default=_SETTLE_S,
        metavar="TIME",
        help="a checkpoint replaces older ones when it has been committed for this long (default: 10m); "
        "writers and readers may not see it earlier",
    )


def _add_grace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--grace",
        type=_duration,
        default=_GRACE_S,
        metavar="TIME",
        help="do not delete unfinished objects younger than this (default: 24h); a job may be writing them",
    )


def _name(what: str, text: str) -> str:
    try:
        return check_name(text, what)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _iteration(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > MAX_ITERATION:
        raise argparse.ArgumentTypeError(f"{text!r} is not an iteration number")
    return int(text)


def _natural(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return int(text)


def _positive(text: str) -> int:
    if _natural(text) < 1:
        raise argparse.ArgumentTypeError("at least one checkpoint must be kept")
    return int(text)


def _duration(text: str) -> float:
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)([a-z]*)", text)
    if found is None or found[2] not in _UNITS_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 30s, 10m, 6h or 7d")
    return float(found[1]) * _UNITS_S[found[2]]
