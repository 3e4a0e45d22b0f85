"""`ckptctl checkpoints gc`: deletes the checkpoints that the policy does not keep, of ordinary runs and
of the incarnations of elastic runs.

An ordinary run is collected by itself. The incarnations of an elastic run are collected together,
by the rule of the daemon's keeper (`ckptd.storage.checkpoints.retention`): the latest
incarnation with a verified and settled checkpoint replaces all earlier ones. That incarnation, and
later ones without a whole checkpoint, are collected like ordinary runs.
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
from ckptd.storage.checkpoints.manifest import RankManifest
from ckptd.storage.checkpoints.names import CheckpointId, run_of_incarnation
from ckptd.storage.checkpoints.reader import read_catalog
from ckptd.storage.checkpoints.retention import (
    Deletion,
    IncarnationRemoval,
    RetentionPolicy,
    StoredIncarnation,
    plan_incarnations,
    plan_retention,
    replacing_incarnation,
)
from ckptd.storage.stores.objects import ObjectStore

__all__ = ["Collected", "Gone", "KeptCheckpoint", "collect", "delete_soon"]

_BATCH = 500
# Deletions happen within this time after the start of the listing, or not at all: writers rely on it
# (docs/format.md section 8).
_DELETE_WITHIN_S = RetentionPolicy().settle_ns / 2e9
_READ_WITHIN_S = 60.0  # rounds; manifests never change, so they are read before the listing that decides


@dataclass(frozen=True, slots=True)
class KeptCheckpoint:
    """A checkpoint that stays, with the reason."""

    iteration: int
    epoch: int
    agreement: str
    reason: str


@dataclass(frozen=True, slots=True)
class Gone:
    """A key that is deleted, with the reason."""

    key: str
    size: int
    reason: str


@dataclass(frozen=True, slots=True)
class Collected:
    """The plan for one run; ``refused`` is the reason why it is not carried out, ``done`` is true
    after it was.

    Attributes:
        names: the mark and ``run.json`` of an incarnation without any other object.
        uploads_ended: number of ended uploads of dead writers; -1: the store does not report it.
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
    """The listing and the manifests of one run."""

    catalog: Catalog
    manifests: Manifests
    verified: set[CheckpointId]

    @property
    def incarnation(self) -> StoredIncarnation:
        return StoredIncarnation(self.catalog, self.verified, references_of(self.manifests))


def collect(
    opened: OpenedStore,
    args: argparse.Namespace,
    policy: RetentionPolicy,
    planned: Callable[[Collected], None],
) -> list[Collected]:
    """Delete the checkpoints that the policy does not keep, run by run; calls ``planned`` with each
    plan before it is carried out.

    An incarnation that is named itself is collected alone, with the state of the others as input.

    Raises:
        StoreProblem: the store contains nothing of the named job or run, or is too slow.
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
    """Delete the keys, one step after the other.

    Raises:
        StoreProblem: the deletion takes too long after the listing on which the plan is based.
    """
    for keys in steps:
        for begin in range(0, len(keys), _BATCH):
            if time.monotonic() - listed_s > _DELETE_WITHIN_S:
                raise StoreProblem(
                    f"stopped after {_DELETE_WITHIN_S:.0f} s with objects left: a job may need "
                    "them meanwhile; run `ckptctl checkpoints gc` again",
                    EXIT_REFUSED,
                )
            store.delete(keys[begin : begin + _BATCH])


# -- listing -------------------------------------------------------------------------------------


def _look(opened: OpenedStore, family: Family) -> tuple[float, dict[str, _Seen]]:
    """All runs of a family by name, and the start time of their listing; listed again if reading
    took long.
    """
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
    """The plans of the chosen runs of a family, the latest first."""
    # A dry run writes nothing, not even to read the store's clock.
    clock = family.chosen[0]
    now_ns = time.time_ns() if dry_run else store_clock_ns(opened.store, family.job, clock)
    incarnations = {number: seen[run].incarnation for number, run in family.incarnations.items()}
    replaced: dict[str, IncarnationRemoval] = {}
    by = replacing_incarnation(incarnations, policy, now_ns=now_ns)
    if by is not None:
        earlier = {number: incarnation for number, incarnation in incarnations.items() if number < by}
        for plan in plan_incarnations(incarnations[by], earlier, policy, now_ns=now_ns):
            replaced[run_of_incarnation(family.elastic, plan.number)] = plan
    return [_plan_of(seen[run], replaced.get(run), policy, now_ns) for run in family.chosen]


def _plan_of(
    seen: _Seen, replaced: IncarnationRemoval | None, policy: RetentionPolicy, now_ns: int
) -> Collected:
    """The plan of one run.

    Args:
        replaced: the deletions in an incarnation that a later one replaced.
    """
    catalog, unreadable = seen.catalog, seen.manifests.unreadable
    if unreadable:
        why = min(unreadable.values())
        others = len(unreadable) - 1
        more = f" (and {others} more manifests)" if others else ""
        refused = f"its references are not known: {why}{more}"
        return Collected(catalog.job, catalog.run, refused)
    if replaced is not None:
        return _collected(catalog, replaced.kept, replaced.manifests, replaced.objects, replaced.names)
    plan = plan_retention(
        catalog,
        policy,
        verified=seen.verified,
        references=references_of(seen.manifests),
        now_ns=now_ns,
    )
    return _collected(catalog, plan.kept, plan.manifests, plan.objects)


def _collected(catalog: Catalog, kept: Mapping[CheckpointId, str], *steps: Sequence[Deletion]) -> Collected:
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
