"""`ckptctl checkpoints pin`, `unpin`, `rm` and `gc`: what changes a store."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ckptd.ctl.store_access import EXIT_REFUSED, OpenedStore, StoreProblem, store_clock_ns
from ckptd.ctl.store_lookup import (
    catalogs_of,
    choose_checkpoint,
    choose_pin,
    find_catalog,
    read_manifests_of,
    references_of,
    whole_ones,
)
from ckptd.ctl.store_removal import objection, plan_removal
from ckptd.settings import DaemonConfig
from ckptd.storage.catalog import Catalog
from ckptd.storage.names import CheckpointId, PinName
from ckptd.storage.objects import ObjectStore
from ckptd.storage.reader import read_catalog
from ckptd.storage.retention import (
    Deletion,
    RetentionPlan,
    RetentionPolicy,
    plan_retention,
    run_of,
)

__all__ = [
    "Collected",
    "Gone",
    "Kept",
    "Pinned",
    "Removed",
    "collect",
    "pin",
    "policy_of",
    "remove",
    "unpin",
]

_BATCH = 500
# What was decided is done so soon after the listing was begun, or not at all: writers count on it (docs/format.md section 8).
_DELETE_WITHIN_S = RetentionPolicy().settle_ns / 2e9


@dataclass(frozen=True, slots=True)
class Pinned:
    """Whether a checkpoint is pinned now; ``changed``: it was not so before."""

    job: str
    run: str
    iteration: int
    epoch: int
    agreement: str
    pinned: bool
    changed: bool


@dataclass(frozen=True, slots=True)
class Removed:
    """What went with a checkpoint; ``left`` objects that only it referred to stay for now, and why."""

    job: str
    run: str
    iteration: int
    epoch: int
    agreement: str
    num_manifests: int
    num_objects: int
    freed_bytes: int
    left: int
    reason: str


@dataclass(frozen=True, slots=True)
class Kept:
    """A checkpoint that stays, and why."""

    iteration: int
    epoch: int
    agreement: str
    reason: str


@dataclass(frozen=True, slots=True)
class Gone:
    """A key that goes, and why."""

    key: str
    size: int
    reason: str


@dataclass(frozen=True, slots=True)
class Collected:
    """The plan for one run; ``refused`` says why nothing of it is done, ``done`` that it was done.

    Attributes:
        uploads_ended: half-finished uploads of dead writers; -1: the store does not tell.
    """

    job: str
    run: str
    refused: str = ""
    kept: tuple[Kept, ...] = ()
    manifests: tuple[Gone, ...] = ()
    objects: tuple[Gone, ...] = ()
    freed_bytes: int = 0
    uploads_ended: int = 0
    done: bool = False


def pin(opened: OpenedStore, args: argparse.Namespace) -> Pinned:
    """Let retention leave a checkpoint alone."""
    catalog = find_catalog(opened, args.job, args.run)
    chosen = choose_checkpoint(
        catalog, args.iteration, args.epoch, args.agreement, prefer_committed=False
    )
    name = _pin_of(catalog, chosen.id)
    if not chosen.pinned:
        opened.store.put(name.key, [])
        now = read_catalog(opened.store, args.job, args.run)
        there = next((c for c in now.checkpoints if c.id == chosen.id), None)
        if there is None or len(there.manifests) < len(chosen.manifests):
            opened.store.delete([name.key])
            raise StoreProblem(f"{chosen.id} was removed before it was pinned", EXIT_REFUSED)
    return _pinned(name, pinned=True, changed=not chosen.pinned)


def unpin(opened: OpenedStore, args: argparse.Namespace) -> Pinned:
    """Take the mark away again."""
    catalog = find_catalog(opened, args.job, args.run)
    name = choose_pin(catalog, args.iteration, args.epoch, args.agreement)
    if name is not None:
        opened.store.delete([name.key])
        return _pinned(name, pinned=False, changed=True)
    chosen = choose_checkpoint(
        catalog, args.iteration, args.epoch, args.agreement, prefer_committed=True
    )
    return _pinned(_pin_of(catalog, chosen.id), pinned=False, changed=False)


def remove(opened: OpenedStore, args: argparse.Namespace) -> Removed:
    """Remove one checkpoint, and the objects that nobody else refers to.

    Raises:
        StoreProblem: it must stay.
    """
    listed_s = time.monotonic()
    catalog = find_catalog(opened, args.job, args.run)
    chosen = choose_checkpoint(
        catalog, args.iteration, args.epoch, args.agreement, prefer_committed=False
    )
    manifests = read_manifests_of(opened, catalog.checkpoints)
    verified = whole_ones(catalog, manifests)
    references = references_of(manifests)
    # What is left of another run is no replacement.
    mine = run_of(catalog, chosen.id, references)
    named = next(c for c in mine.checkpoints if c.id == chosen.id)
    reason = objection(mine, named, verified=verified, force=args.force)
    if reason:
        raise StoreProblem(f"{chosen.id} is not removed: {reason}", EXIT_REFUSED)
    now_ns = store_clock_ns(opened.store, args.job, args.run)
    plan = plan_removal(
        catalog,
        chosen,
        manifests,
        policy=RetentionPolicy(grace_ns=int(args.grace * 1e9)),
        now_ns=now_ns,
        force=args.force,
    )
    _delete(opened.store, (plan.manifests, plan.objects), listed_s)
    return Removed(
        args.job,
        args.run,
        chosen.id.end,
        chosen.id.epoch,
        chosen.id.agreement,
        len(plan.manifests),
        len(plan.objects),
        plan.freed_bytes,
        len(plan.left),
        plan.reason,
    )


def collect(
    opened: OpenedStore,
    args: argparse.Namespace,
    policy: RetentionPolicy,
    planned: Callable[[Collected], None],
) -> list[Collected]:
    """Delete what the policy does not keep, run by run; ``planned`` hears of each before anything of it is done."""
    found = []
    for seen in catalogs_of(opened, args.job, args.run):
        listed_s = time.monotonic()
        catalog = read_catalog(opened.store, seen.job, seen.run)  # it may be late for this run
        plan = _planned(opened, catalog, policy, dry_run=args.dry_run)
        planned(plan)
        if not args.dry_run and not plan.refused:
            keys = [[gone.key for gone in going] for going in (plan.manifests, plan.objects)]
            _delete(opened.store, keys, listed_s)
            prefix = f"{plan.job}/{plan.run}/"
            ended = opened.store.abort_uploads(prefix, policy.grace_ns / 1e9)
            plan = replace(plan, done=True, uploads_ended=ended)
        found.append(plan)
    return found


def policy_of(args: argparse.Namespace, config: DaemonConfig) -> RetentionPolicy:
    """What shall stay: as given, else as configured."""
    last, every, keep_s = args.keep_last, args.keep_every, args.keep_for
    return RetentionPolicy(
        keep_last=config.persist_keep_last if last is None else last,
        keep_every=config.persist_keep_every if every is None else every,
        keep_younger_than_ns=int((config.persist_keep_for_s if keep_s is None else keep_s) * 1e9),
        grace_ns=int(args.grace * 1e9),
        settle_ns=int(args.settle * 1e9),
    )


def _planned(
    opened: OpenedStore, catalog: Catalog, policy: RetentionPolicy, *, dry_run: bool
) -> Collected:
    job, run = catalog.job, catalog.run
    manifests = read_manifests_of(opened, catalog.checkpoints)
    if manifests.unreadable:
        why = min(manifests.unreadable.values())
        others = len(manifests.unreadable) - 1
        more = f" (and {others} more manifests)" if others else ""
        return Collected(job, run, f"what it refers to is not known: {why}{more}")
    # A dry run writes nothing, not even to learn the time.
    now_ns = time.time_ns() if dry_run else store_clock_ns(opened.store, job, run)
    plan = plan_retention(
        catalog,
        policy,
        verified=whole_ones(catalog, manifests),
        references=references_of(manifests),
        now_ns=now_ns,
    )
    return _collected(job, run, plan)


def _collected(job: str, run: str, plan: RetentionPlan) -> Collected:
    kept = [Kept(c.end, c.epoch, c.agreement, reason) for c, reason in plan.kept.items()]
    return Collected(
        job,
        run,
        "",
        tuple(kept),
        _gone(plan.manifests),
        _gone(plan.objects),
        plan.freed_bytes,
    )


def _gone(deletions: Iterable[Deletion]) -> tuple[Gone, ...]:
    return tuple([Gone(*deletion) for deletion in deletions])


def _pin_of(catalog: Catalog, chosen: CheckpointId) -> PinName:
    return PinName(catalog.job, catalog.run, chosen.end, chosen.epoch, chosen.agreement)


def _pinned(name: PinName, *, pinned: bool, changed: bool) -> Pinned:
    return Pinned(name.job, name.run, name.end, name.epoch, name.agreement, pinned, changed)


def _delete(store: ObjectStore, steps: Iterable[Sequence[str]], listed_s: float) -> None:
    """One step after the other.

    Raises:
        StoreProblem: that takes too long after the listing on which it was decided.
    """
    for keys in steps:
        for begin in range(0, len(keys), _BATCH):
            if time.monotonic() - listed_s > _DELETE_WITHIN_S:
                raise StoreProblem(
                    f"not all was deleted: it took more than {_DELETE_WITHIN_S:.0f} s, in which a job "
                    "may have begun to need it; `ckptctl checkpoints gc` goes on",
                    EXIT_REFUSED,
                )
            store.delete(keys[begin : begin + _BATCH])
