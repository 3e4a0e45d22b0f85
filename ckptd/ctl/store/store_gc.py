"""`ckptctl checkpoints gc`: what the policy does not keep is deleted, of ordinary runs and of the
worlds of elastic ones.

An ordinary run is collected by itself. The worlds of an elastic run are collected together, by the
rule of the daemon's keeper (`ckptd.storage.checkpoints.incarnation_retention`): the latest world
that has a verified checkpoint that has settled takes the place of all before it. That one, and any
later one of which nothing is whole yet, are collected as ordinary runs are.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptd.ctl.store.store_access import EXIT_REFUSED, OpenedStore, StoreProblem, store_clock_ns
from ckptd.ctl.store.store_lookup import (
    Family,
    families_of,
    read_manifests_of,
    references_of,
    whole_ones,
)
from ckptd.ctl.store.store_views import Manifests
from ckptd.storage.checkpoints.catalog import Catalog
from ckptd.storage.checkpoints.incarnation_retention import (
    IncarnationRemoval,
    StoredWorld,
    plan_worlds,
    replacing_world,
)
from ckptd.storage.checkpoints.manifest import RankManifest
from ckptd.storage.checkpoints.names import CheckpointId, run_of_world
from ckptd.storage.checkpoints.reader import read_catalog
from ckptd.storage.checkpoints.retention import Deletion, RetentionPolicy, plan_retention
from ckptd.storage.stores.objects import ObjectStore

__all__ = ["Collected", "Gone", "KeptCheckpoint", "collect", "delete_soon"]

_BATCH = 500
# What was decided is done so soon after the listing was begun, or not at all: writers count on it
# (docs/format.md section 8).
_DELETE_WITHIN_S = RetentionPolicy().settle_ns / 2e9
_READ_WITHIN_S = (
    60.0  # of these; manifests never change, so they are read before the listing that counts
)


@dataclass(frozen=True, slots=True)
class KeptCheckpoint:
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
        names: of a world of which nothing is left: its mark and ``run.json``.
        uploads_ended: half-finished uploads of dead writers; -1: the store does not tell.
    """

    job: str
    run: str
    refused: str = ""
    kept: tuple[KeptCheckpoint, ...] = ()
    manifests: tuple[Gone, ...] = ()
    objects: tuple[Gone, ...] = ()
    names: tuple[Gone, ...] = ()
    freed_bytes: int = 0
    uploads_ended: int = 0
    done: bool = False


@dataclass(frozen=True, slots=True)
class _Seen:
    """One run as it was listed, with its manifests."""

    catalog: Catalog
    manifests: Manifests
    verified: set[CheckpointId]

    @property
    def world(self) -> StoredWorld:
        return StoredWorld(self.catalog, self.verified, references_of(self.manifests))


def collect(
    opened: OpenedStore,
    args: argparse.Namespace,
    policy: RetentionPolicy,
    planned: Callable[[Collected], None],
) -> list[Collected]:
    """Delete what the policy does not keep, run by run; ``planned`` hears of each before anything
    of it is done.

    A world that is named itself is collected alone, by what there is of the others.

    Raises:
        StoreProblem: a job or run is named of which nothing is stored; or the store is too slow.
    """
    found = []
    for family in families_of(opened, args.job, args.run):
        listed_s, seen = _look(opened, family)
        for plan in _plans(opened, family, seen, policy, dry_run=args.dry_run):
            planned(plan)
            if args.dry_run or plan.refused:
                found.append(plan)
                continue
            steps = (plan.manifests, plan.objects, plan.names)
            delete_soon(opened.store, [[gone.key for gone in each] for each in steps], listed_s)
            prefix = f"{plan.job}/{plan.run}/"
            ended = opened.store.abort_uploads(prefix, policy.grace_ns / 1e9)
            found.append(replace(plan, done=True, uploads_ended=ended))
    return found


def delete_soon(store: ObjectStore, steps: Iterable[Sequence[str]], listed_s: float) -> None:
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


# -- looking -------------------------------------------------------------------------------------


def _look(opened: OpenedStore, family: Family) -> tuple[float, dict[str, _Seen]]:
    """All runs of a family by name, and when the listing of them was begun; again where reading took long."""
    known: dict[str, RankManifest] = {}
    listed_s, seen = _survey(opened, family, known)
    if len(family.runs) > 1 and time.monotonic() - listed_s > _READ_WITHIN_S:
        listed_s, seen = _survey(opened, family, known)
    return listed_s, seen


def _survey(
    opened: OpenedStore, family: Family, known: dict[str, RankManifest]
) -> tuple[float, dict[str, _Seen]]:
    listed_s, seen = time.monotonic(), {}
    for run in family.runs:
        catalog = read_catalog(opened.store, family.job, run)
        manifests = read_manifests_of(opened, catalog.checkpoints, known)
        known.update(manifests.read)
        seen[run] = _Seen(catalog, manifests, whole_ones(catalog, manifests))
    return listed_s, seen


# -- deciding ------------------------------------------------------------------------------------


def _plans(
    opened: OpenedStore,
    family: Family,
    seen: Mapping[str, _Seen],
    policy: RetentionPolicy,
    *,
    dry_run: bool,
) -> list[Collected]:
    """Of the chosen runs of a family, the latest first."""
    # A dry run writes nothing, not even to learn the time.
    clock = family.chosen[0]
    now_ns = time.time_ns() if dry_run else store_clock_ns(opened.store, family.job, clock)
    worlds = {number: seen[run].world for number, run in family.worlds.items()}
    replaced: dict[str, IncarnationRemoval] = {}
    by = replacing_world(worlds, policy, now_ns=now_ns)
    if by is not None:
        earlier = {number: world for number, world in worlds.items() if number < by}
        for plan in plan_worlds(worlds[by], earlier, policy, now_ns=now_ns):
            replaced[run_of_world(family.elastic, plan.world)] = plan
    return [_plan_of(seen[run], replaced.get(run), policy, now_ns) for run in family.chosen]


def _plan_of(
    seen: _Seen, replaced: IncarnationRemoval | None, policy: RetentionPolicy, now_ns: int
) -> Collected:
    """Of one run.

    Args:
        replaced: what goes of a world whose place a later one took.
    """
    catalog, unreadable = seen.catalog, seen.manifests.unreadable
    if unreadable:
        why = min(unreadable.values())
        others = len(unreadable) - 1
        more = f" (and {others} more manifests)" if others else ""
        refused = f"what it refers to is not known: {why}{more}"
        return Collected(catalog.job, catalog.run, refused)
    if replaced is not None:
        return _collected(
            catalog, replaced.kept, replaced.manifests, replaced.objects, replaced.names
        )
    plan = plan_retention(
        catalog,
        policy,
        verified=seen.verified,
        references=references_of(seen.manifests),
        now_ns=now_ns,
    )
    return _collected(catalog, plan.kept, plan.manifests, plan.objects)


def _collected(
    catalog: Catalog, kept: Mapping[CheckpointId, str], *steps: Sequence[Deletion]
) -> Collected:
    manifests, objects, names = (*steps, ())[:3]
    return Collected(
        catalog.job,
        catalog.run,
        "",
        tuple([KeptCheckpoint(c.end, c.epoch, c.agreement, reason) for c, reason in kept.items()]),
        _gone(manifests),
        _gone(objects),
        _gone(names),
        sum(deletion.size for step in steps for deletion in step),
    )


def _gone(deletions: Iterable[Deletion]) -> tuple[Gone, ...]:
    return tuple([Gone(*deletion) for deletion in deletions])
