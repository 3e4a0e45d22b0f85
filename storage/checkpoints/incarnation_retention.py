"""Which objects of the earlier incarnations of an elastic run may be deleted. Pure, like
`ckptd.storage.checkpoints.retention`.

An incarnation is one life of an elastic job; in the store it is a run of its own, marked by an
`IncarnationName`. The newest incarnation with a committed checkpoint is the history of the job. Once
that checkpoint is verified and has settled, earlier incarnations are not needed any more, whatever
iterations they reached. Checkpoints that retention keeps for other reasons (pins, ``keep_every``, age)
stay, and ``keep_last`` counts over all incarnations: while the newest one has fewer, the newest whole
checkpoints of the one before stay as a fallback.

A node that does not know yet that an incarnation is over may still write into it. Therefore objects
are deleted only when they are older than the grace time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ckptd.storage.checkpoints.catalog import Catalog, CheckpointState, StoredCheckpoint
from ckptd.storage.checkpoints.names import (
    CheckpointId,
    IncarnationName,
    RunName,
    incarnation_of_run,
)
from ckptd.storage.checkpoints.retention import Deletion, References, RetentionPolicy, wanted_by

__all__ = ["IncarnationRemoval", "StoredIncarnation", "plan_incarnations", "replacing_incarnation"]


@dataclass(frozen=True, slots=True)
class StoredIncarnation:
    """One incarnation as the store shows it.

    Args:
        verified: the checkpoints whose objects are all listed and not known to be damaged.
        references: the references of its manifests by key; a missing manifest could not be read.
    """

    catalog: Catalog
    verified: Collection[CheckpointId]
    references: Mapping[str, References]

    @property
    def name(self) -> IncarnationName:
        """The name of its mark in the store."""
        found = incarnation_of_run(self.catalog.run)
        assert found is not None, "the run has the name of an incarnation"
        return IncarnationName(self.catalog.job, *found)


@dataclass(frozen=True, slots=True)
class IncarnationRemoval:
    """The deletions in one incarnation: first ``manifests``, then ``objects``, and its ``names`` at
    the end if nothing else is left.

    Args:
        number: the number of the incarnation.
        kept: the checkpoints that stay, with the reason.
    """

    number: int
    manifests: tuple[Deletion, ...]
    objects: tuple[Deletion, ...]
    names: tuple[Deletion, ...]
    kept: Mapping[CheckpointId, str]


def replacing_incarnation(
    incarnations: Mapping[int, StoredIncarnation], policy: RetentionPolicy, *, now_ns: int
) -> int | None:
    """The latest incarnation that replaces all earlier ones: it has a verified and settled checkpoint.
    None if there is none.

    Args:
        incarnations: the incarnations by number.
    """
    return max((n for n, each in incarnations.items() if _replaces(each, policy, now_ns)), default=None)


def plan_incarnations(
    newest: StoredIncarnation,
    earlier: Mapping[int, StoredIncarnation],
    policy: RetentionPolicy,
    *,
    now_ns: int,
) -> list[IncarnationRemoval]:
    """Plan the deletions in earlier incarnations; none while the newest has no verified and settled
    checkpoint.

    Args:
        earlier: the earlier incarnations by number.
        now_ns: the time of the store's clock.
    """
    if not _replaces(newest, policy, now_ns):
        return []
    left = policy.keep_last - len(newest.catalog.committed)
    plans = []
    for _, incarnation in sorted(earlier.items(), reverse=True):
        whole = [c for c in incarnation.catalog.committed if c.id in incarnation.verified]
        wanted = wanted_by(policy, whole, now_ns, last=max(0, left))
        left -= len(whole)
        plans.append(_plan(incarnation, wanted, newest.name.number, policy.grace_ns, now_ns))
    return plans


def _replaces(incarnation: StoredIncarnation, policy: RetentionPolicy, now_ns: int) -> bool:
    settled = [c for c in incarnation.catalog.committed if now_ns - c.modified_ns >= policy.settle_ns]
    return any(c.id in incarnation.verified for c in settled)


def _why_it_stays(
    checkpoint: StoredCheckpoint, wanted: Mapping[CheckpointId, str], grace_ns: int, now_ns: int
) -> str:
    """The reason why a checkpoint stays; "" if it is deleted."""
    if checkpoint.pinned:
        return "pinned"
    unfinished = checkpoint.state is CheckpointState.INCOMPLETE
    if unfinished and now_ns - checkpoint.modified_ns < grace_ns:
        return "incomplete, within the grace time"
    return wanted.get(checkpoint.id, "")


def _plan(
    incarnation: StoredIncarnation,
    wanted: Mapping[CheckpointId, str],
    by: int,
    grace_ns: int,
    now_ns: int,
) -> IncarnationRemoval:
    catalog, why = incarnation.catalog, f"incarnation {by} replaced it"
    reasons = {c.id: _why_it_stays(c, wanted, grace_ns, now_ns) for c in catalog.checkpoints}
    kept = [c for c in catalog.checkpoints if reasons[c.id]]
    manifests = [
        Deletion(info.key, info.size, why)
        for c in catalog.checkpoints
        if not reasons[c.id]
        for _, info in sorted(c.manifests.items())
    ]
    keys = [info.key for c in kept for info in c.manifests.values()]
    listed = [found.info for each in catalog.objects.values() for found in each]
    objects: list[Deletion] = []
    if all(key in incarnation.references for key in keys):
        used = frozenset[str]().union(*(incarnation.references[key].objects for key in keys))
        objects = [
            Deletion(info.key, info.size, why)
            for info in listed
            if info.key not in used and now_ns - info.modified_ns >= grace_ns
        ]
    names: list[Deletion] = []
    if not (kept or catalog.pins or catalog.foreign) and len(objects) == len(listed):
        run = RunName(catalog.job, catalog.run).key
        sizes = {} if catalog.identity is None else {run: catalog.identity.size}
        names = [Deletion(key, sizes.get(key, 0), why) for key in (run, incarnation.name.key)]
    stays = {checkpoint.id: reasons[checkpoint.id] for checkpoint in kept}
    return IncarnationRemoval(
        incarnation.name.number, tuple(manifests), tuple(sorted(objects)), tuple(names), stays
    )
