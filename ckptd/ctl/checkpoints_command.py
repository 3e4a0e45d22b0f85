"""`ckptctl checkpoints` and `ckptctl verify`: checkpoints in object storage. They need no daemon.

The store is the configured one (environment, TOML) unless `--store` names another; `verify URL`
needs no configuration.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from ckptd.config.settings import DaemonConfig
from ckptd.ctl.command import (
    EXIT_FAILED,
    EXIT_REFUSED,
    TIME,
    CommandError,
    CommandOutcome,
    Commands,
    add_run,
    add_store_options,
    records,
)
from ckptd.ctl.stores.store_access import STORE_TIMEOUT_S, OpenedStore, configured_place, named_place, opened
from ckptd.ctl.stores.store_changes import Collected, Gone, Pinned, collect, pin, policy_of, remove, unpin
from ckptd.ctl.stores.store_checks import Advised, Checked, check_checkpoint, check_run, check_store
from ckptd.ctl.stores.store_lookup import (
    CheckpointRow,
    CheckpointShown,
    Family,
    RankShown,
    RunShown,
    choose_checkpoint,
    families_of,
    find_catalog,
    read_manifests_of,
    rows_of,
    runs_in,
    show_checkpoint,
    standing_of,
)
from ckptd.printable import for_terminal
from ckptd.storage.checkpoints.catalog import Catalog
from ckptd.storage.checkpoints.names import MAX_ITERATION
from ckptd.storage.checkpoints.reader import read_catalog
from ckptd.storage.checkpoints.retention import RetentionPolicy
from ckptd.units import count_of, format_age, format_bytes, format_table

_GRACE_S, _SETTLE_S = RetentionPolicy().grace_ns / 1e9, RetentionPolicy().settle_ns / 1e9
_MAX_RANKS = 64
_MAX_FINDINGS = 50

_StoreCommand = Callable[[OpenedStore, argparse.Namespace, DaemonConfig], CommandOutcome]


# -- arguments ------------------------------------------------------------------------------------


def add_checkpoints_commands(commands: Commands) -> None:
    """Add `checkpoints` with its subcommands, and `verify`."""
    text = "list, verify, pin and remove checkpoints in object storage"
    where = argparse.ArgumentParser(add_help=False)
    add_store_options(where, "a URL or folder (default: as configured)")
    actions = commands.of(commands.add("checkpoints", None, text), "ACTION", where)

    def add(
        name: str, function: _StoreCommand, text: str, *, changes: bool = False
    ) -> argparse.ArgumentParser:
        def run(args: argparse.Namespace) -> CommandOutcome:
            place, config = configured_place(args, changes=changes)
            with opened(place, args.timeout) as store:
                return function(store, args, config)

        return actions.add(name, run, text, timeout_s=STORE_TIMEOUT_S)

    some = add("list", _list, "list checkpoints, newest first: committed, incomplete or stale")
    add_run(some, nargs="?")
    some.add_argument("--fast", action="store_true", help="read no manifest, and show no sizes")
    text = "show one checkpoint: its ranks, snapshots and sizes, and the replay of a restore"
    show = add("show", _show, text)
    _add_checkpoint(show)
    show.add_argument("--rank", type=int, help="show only this rank, with its objects")
    verify = add("verify", _verify, "verify the newest checkpoint, the named one, or all")
    _add_checkpoint(verify, nargs="?")
    verify.add_argument("--all", action="store_true", help="verify all checkpoints of the run")
    _add_fast(verify)
    _add_checkpoint(add("pin", _pin, "pin a checkpoint: retention does not delete it", changes=True))
    _add_checkpoint(add("unpin", _unpin, "remove the pin of a checkpoint", changes=True))
    text = "remove a checkpoint and the objects that no other checkpoint needs"
    rm = add("rm", _rm, text, changes=True)
    _add_checkpoint(rm)
    rm.add_argument(
        "--force",
        action="store_true",
        help="remove even the newest checkpoint, and all its objects at once; safe only if no job writes",
    )
    _add_grace(rm)
    text = "delete the checkpoints that retention does not keep, and unreferenced objects"
    _add_policy(add("gc", _gc, text, changes=True))

    text = "verify every checkpoint in a store; needs no daemon"
    verify = commands.add("verify", _verify_store, text, timeout_s=STORE_TIMEOUT_S)
    verify.add_argument("url", metavar="URL", help="a store, such as s3://bucket/prefix or a folder")
    add_store_options(verify)
    _add_fast(verify)


def _add_fast(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fast", action="store_true", help="compare sizes with the listing; read no tensors")


def _add_checkpoint(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    add_run(parser)
    parser.add_argument("iteration", metavar="ITERATION", type=_iteration, nargs=nargs)
    parser.add_argument("--epoch", type=int, help="epoch of the checkpoint, if several end at that iteration")
    parser.add_argument(
        "--agreement",
        default="",
        metavar="HEX",
        help="first digits of its agreement, if several end at that iteration",
    )


def _add_policy(parser: argparse.ArgumentParser) -> None:
    add_run(parser, nargs="?")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, and delete nothing")
    parser.add_argument(
        "--keep-last", type=_positive, metavar="N", help="keep the newest N (default: as configured)"
    )
    parser.add_argument(
        "--keep-every",
        type=_natural,
        metavar="M",
        help="keep the first of every M iterations (default: as configured)",
    )
    parser.add_argument(
        "--keep-for",
        **TIME,
        help="keep those younger than TIME, such as 7d or 12h (default: as configured)",
    )
    _add_grace(parser)
    parser.add_argument(
        "--settle",
        **TIME,
        default=_SETTLE_S,
        help="a checkpoint replaces older ones when it has been committed for this long (default: 10m); "
        "writers and readers may not see it earlier",
    )


def _add_grace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--grace",
        **TIME,
        default=_GRACE_S,
        help="do not delete unfinished objects younger than this (default: 24h); a job may be writing them",
    )


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


# -- list -----------------------------------------------------------------------------------------


def _list(store: OpenedStore, args: argparse.Namespace, _: DaemonConfig) -> CommandOutcome:
    families = families_of(store, args.job, args.run)
    runs = [run for family in families for run in _family_shown(store, family, args)]
    url = store.place.shown
    text = "\n\n".join([f"store {url}", *map(_run_text, runs)]) if runs else f"{url} contains no checkpoints"
    return CommandOutcome({"store": url, "runs": runs}, text)


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


def _run_text(run: RunShown) -> str:
    name = f"{run.job}/{run.run}"
    if run.elastic:
        name += f" (elastic run {run.elastic}, {run.standing})"
    if not run.checkpoints:
        return f"{name}\nno checkpoint yet"
    damaged = [f"damaged: {why}" for why in run.unreadable.values()]
    return "\n".join([name, records([_row(row) for row in run.checkpoints]), *damaged])


def _row(row: CheckpointRow) -> Mapping[str, object]:
    return {
        "iteration": row.iteration,
        "state": row.state,
        "epoch": row.epoch,
        "ranks": row.world_size,
        "size": _size(row.size_bytes),
        "only here": _size(row.own_bytes),
        "age": format_age(row.age_s),
        "pinned": "yes" if row.pinned else "-",
        "note": "-" if row.state == "committed" else row.reason,
    }


def _size(size: int | None) -> str:
    return "?" if size is None else format_bytes(size)


# -- show -----------------------------------------------------------------------------------------


def _show(store: OpenedStore, args: argparse.Namespace, _: DaemonConfig) -> CommandOutcome:
    catalog = find_catalog(store, args.job, args.run)
    chosen = choose_checkpoint(catalog, args.iteration, args.epoch, args.agreement, prefer_committed=True)
    manifests = read_manifests_of(store, catalog.checkpoints)
    rows = rows_of(catalog, manifests, time.time_ns())
    shown = show_checkpoint(rows[catalog.checkpoints.index(chosen)], chosen, manifests)
    if args.rank is not None and args.rank not in [rank.rank for rank in shown.ranks]:
        raise CommandError(f"{chosen.id} has no manifest of rank {args.rank}: {chosen.reason}", EXIT_REFUSED)
    return CommandOutcome(shown, _checkpoint_text(shown, args.rank), EXIT_FAILED if shown.damaged else 0)


def _checkpoint_text(shown: CheckpointShown, only_rank: int | None) -> str:
    """The ranks and snapshots of a checkpoint, and its use by a restore; the objects of ``only_rank``."""
    row = shown.checkpoint
    lines = [
        f"{row.job}/{row.run} iteration {row.iteration} (epoch {row.epoch}, agreement {row.agreement}):"
        f" {row.state}, {row.reason}; written {format_age(row.age_s)} ago"
        + (", pinned" if row.pinned else ""),
        f"{_size(row.size_bytes)} in all, {_size(row.own_bytes)} in no other checkpoint",
        _restore_text(shown),
        "",
    ]
    ranks = [rank for rank in shown.ranks if only_rank in (None, rank.rank)]
    lines.append(records([_rank_row(rank) for rank in ranks[:_MAX_RANKS]]))
    if len(ranks) > _MAX_RANKS:
        lines.append(f"… and {len(ranks) - _MAX_RANKS} more ranks (--json has all)")
    lines += ["", _snapshots_text(ranks[:_MAX_RANKS])]
    if only_rank is not None:
        sizes = {k: n for rank in ranks for s in rank.snapshots for k, n in s.objects.items()}
        objects = [(key, format_bytes(size)) for key, size in sorted(sizes.items())]
        lines += ["", format_table(("object", "size"), objects)]
    return "\n".join(lines)


def _restore_text(shown: CheckpointShown) -> str:
    end = shown.checkpoint.iteration
    if shown.checkpoint.state != "committed":
        return f"a restore does not use it: {shown.checkpoint.reason}"
    if shown.replayed < 0:
        return "a restore cannot use it: no manifest can be read"
    if shown.damaged:
        return "a restore does not use it: a manifest is damaged"
    if shown.partial:
        return f"a restore loads iteration {end}, and experts from {shown.start} on, without a replay"
    replayed = count_of(shown.replayed, "iteration")
    return f"a restore loads snapshots {shown.start} to {end}, and replays {replayed}"


def _rank_row(rank: RankShown) -> Mapping[str, object]:
    known = not rank.damage
    return {
        "rank": rank.rank,
        "window": rank.window if known else "-",
        "snapshots": len(rank.snapshots) if known else "-",
        "image": format_bytes(rank.image_bytes) if known else "-",
        "uploaded": format_bytes(rank.uploaded_bytes) if known else "-",
        "shared": format_bytes(rank.shared_bytes) if known else "-",
        "objects": rank.num_objects if known else "-",
        "manifest": f"by {rank.tool}" if known else f"DAMAGED: {rank.damage}",
    }


def _snapshots_text(ranks: Iterable[RankShown]) -> str:
    rows = [
        (
            rank.rank,
            snapshot.iteration,
            snapshot.phase,
            f"{snapshot.num_anchors} of {snapshot.num_operators}",
            format_bytes(snapshot.image_bytes),
            format_bytes(snapshot.uploaded_bytes),
            format_bytes(snapshot.shared_bytes),
            len(snapshot.objects),
        )
        for rank in ranks
        for snapshot in rank.snapshots
    ]
    header = ("rank", "snapshot", "phase", "anchored", "image", "uploaded", "shared", "objects")
    return format_table(header, rows)


# -- verify ---------------------------------------------------------------------------------------


def _verify(store: OpenedStore, args: argparse.Namespace, _: DaemonConfig) -> CommandOutcome:
    if args.all and args.iteration is not None:
        raise CommandError("give an ITERATION or --all, not both")
    catalog = find_catalog(store, args.job, args.run)
    how = {"full": not args.fast, "quiet": args.json}
    if args.all:
        return _checked(check_run(store, args.job, args.run, **how))
    if args.iteration is None:
        chosen = catalog.newest
        if chosen is None:
            raise CommandError(
                f"no checkpoint of {args.job}/{args.run} is committed; --all verifies the others",
                EXIT_REFUSED,
            )
    else:
        chosen = choose_checkpoint(catalog, args.iteration, args.epoch, args.agreement, prefer_committed=True)
    objects = read_manifests_of(store, [chosen]).objects_of(chosen) or {}
    checked = check_checkpoint(store, catalog, chosen, total_bytes=sum(objects.values()), **how)
    if checked.ok and not checked.whole:
        raise CommandError(f"{chosen.id} was removed while it was verified", EXIT_REFUSED)
    return _checked(checked)


def _verify_store(args: argparse.Namespace) -> CommandOutcome:
    """`ckptctl verify URL`."""
    place = named_place(args)
    with opened(place, args.timeout) as store:
        checked = check_store(store, full=not args.fast, quiet=args.json)
        if not checked.whole and not runs_in(store.store.list("")):
            raise CommandError(
                f"no checkpoint of any job exists below {place.shown}: pass the URL of the daemon's "
                "store, the folder above those of the jobs",
                EXIT_REFUSED,
            )
    return _checked(checked)


def _checked(found: Checked) -> CommandOutcome:
    """The findings, each with its advice, and the whole checkpoints."""
    lines = [line for finding in found.findings[:_MAX_FINDINGS] for line in _finding_lines(finding)]
    if len(found.findings) > _MAX_FINDINGS:
        lines.append(f"… and {len(found.findings) - _MAX_FINDINGS} more findings (--json has all)")
    lines += [f"whole: {each}" for each in found.whole]
    how = f"{format_bytes(found.read_bytes)} read" if found.full else "only sizes were compared"
    errors = sum(finding.severity == "error" for finding in found.findings)
    verdict = "nothing is damaged" if found.ok else f"DAMAGED: {count_of(errors, 'error')}"
    whole = f"{count_of(len(found.whole), 'checkpoint')} whole"
    lines.append(f"{verdict}; {whole}, {count_of(found.num_objects, 'object')}, {how}")
    return CommandOutcome(found, "\n".join(lines), 0 if found.ok else EXIT_FAILED)


def _finding_lines(finding: Advised) -> list[str]:
    tensor = f" (tensor {finding.tensor!r})" if finding.tensor else ""
    lines = [f"{finding.severity.upper():<7}  {finding.key}: {finding.what}{tensor}"]
    return [*lines, f"         -> {finding.advice}"] if finding.advice else lines


# -- changes --------------------------------------------------------------------------------------


def _pin(store: OpenedStore, args: argparse.Namespace, _: DaemonConfig) -> CommandOutcome:
    return _pinned(pin(store, args))


def _unpin(store: OpenedStore, args: argparse.Namespace, _: DaemonConfig) -> CommandOutcome:
    return _pinned(unpin(store, args))


def _pinned(done: Pinned) -> CommandOutcome:
    state = "pinned" if done.pinned else "not pinned"
    return CommandOutcome(done, f"{done} is {state}" + ("" if done.changed else ", as before"))


def _rm(store: OpenedStore, args: argparse.Namespace, _: DaemonConfig) -> CommandOutcome:
    done = remove(store, args)
    text = (
        f"removed {done}: {count_of(done.num_manifests, 'manifest')} and "
        f"{count_of(done.num_objects, 'object')}, {format_bytes(done.freed_bytes)}"
    )
    if done.left:
        text += (
            f"\n{count_of(done.left, 'object')} that no other checkpoint needs stay for now, because "
            f"{done.reason}; `ckptctl checkpoints gc` deletes them later"
        )
    return CommandOutcome(done, text)


def _gc(store: OpenedStore, args: argparse.Namespace, config: DaemonConfig) -> CommandOutcome:
    def planned(plan: Collected) -> None:
        if not args.json:
            print(for_terminal(_plan_text(plan)), flush=True)

    found = collect(store, args, policy_of(args, config), planned)
    refused = any(each.refused for each in found)
    answer = {"dry_run": args.dry_run, "runs": found}
    return CommandOutcome(answer, _collected_text(found, args.dry_run), EXIT_REFUSED if refused else 0)


def _plan_text(plan: Collected) -> str:
    """The keys of a run that stay and those that are deleted, with reasons."""
    name = f"{plan.job}/{plan.run}"
    if plan.refused:
        return f"{name}: nothing is deleted: {plan.refused}"
    lines = [name]
    lines += [f"  keep    iteration {k.iteration} (epoch {k.epoch}): {k.reason}" for k in plan.kept]
    going = _going("manifest", plan.manifests) + _going("object", plan.objects) + _going("name", plan.names)
    return "\n".join(lines + (going or ["  nothing to delete"]))


def _going(what: str, going: Iterable[Gone]) -> list[str]:
    """The number of deleted keys for each reason."""
    by_reason: dict[str, list[int]] = {}
    for gone in going:
        by_reason.setdefault(gone.reason, []).append(gone.size)
    return [
        f"  delete  {count_of(len(sizes), what)}, {format_bytes(sum(sizes))}: {reason}"
        for reason, sizes in by_reason.items()
    ]


def _collected_text(found: Sequence[Collected], dry_run: bool) -> str:
    """A summary in one line."""
    freed = format_bytes(sum(plan.freed_bytes for plan in found))
    num = sum(len(plan.manifests) + len(plan.objects) + len(plan.names) for plan in found)
    if dry_run:
        return f"would delete {count_of(num, 'key')}, {freed}; nothing was deleted"
    ended = sum(max(0, plan.uploads_ended) for plan in found)
    uploads = f"; ended {count_of(ended, 'half-finished upload')}" if ended else ""
    return f"deleted {count_of(num, 'key')}, {freed}{uploads}"
