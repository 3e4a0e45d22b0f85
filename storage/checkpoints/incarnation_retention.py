"""What of the earlier worlds of an elastic run may be deleted. Pure, as
`ckptd.storage.checkpoints.retention` is.

A world is one life of an elastic job, and for the store a run of its own (`WorldName` marks it as
such). The newest world of which a checkpoint is committed is the history of the job: worlds before
it are needed no more, whichever iterations they came to, once that checkpoint is verified and has
settled. What retention leaves anyway (pins, ``keep_every``, what is young) stays in them as well,
and ``keep_last`` counts over all worlds: while the newest one has fewer, the newest whole ones of
the world before stay, to fall back to.

Who still writes into a world that is over may be a node that has not heard of it; so objects go
when they are older than the grace time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ckptd.storage.checkpoints.catalog import Catalog, CheckpointState, StoredCheckpoint
from ckptd.storage.checkpoints.names import CheckpointId, RunName, WorldName, world_of_run
from ckptd.storage.checkpoints.retention import Deletion, References, RetentionPolicy, wanted_by

__all__ = ["IncarnationRemoval", "StoredWorld", "plan_worlds", "replacing_world"]


@dataclass(frozen=True, slots=True)
class StoredWorld:
    """One world as the store shows it.

    Args:
        verified: the checkpoints whose objects are all listed, and of which none is known to be damaged.
        references: by key what its manifests say; a missing one could not be read.
    """

    catalog: Catalog
    verified: Collection[CheckpointId]
    references: Mapping[str, References]

    @property
    def name(self) -> WorldName:
        """Its mark."""
        found = world_of_run(self.catalog.run)
        assert found is not None, "it is named as a world"
        return WorldName(self.catalog.job, *found)


@dataclass(frozen=True, slots=True)
class IncarnationRemoval:
    """What goes of one world: first ``manifests``, then ``objects``; and where nothing is left, at
    last its ``names``.

    Args:
        kept: the checkpoints that stay, and why.
    """

    world: int
    manifests: tuple[Deletion, ...]
    objects: tuple[Deletion, ...]
    names: tuple[Deletion, ...]
    kept: Mapping[CheckpointId, str]


def replacing_world(
    worlds: Mapping[int, StoredWorld], policy: RetentionPolicy, *, now_ns: int
) -> int | None:
    """The latest world that takes the place of those before it: that has a verified checkpoint that
    has settled. None: no world has.

    Args:
        worlds: by number.
    """
    return max((n for n, each in worlds.items() if _replaces(each, policy, now_ns)), default=None)


def plan_worlds(
    newest: StoredWorld, earlier: Mapping[int, StoredWorld], policy: RetentionPolicy, *, now_ns: int
) -> list[IncarnationRemoval]:
    """What goes of earlier worlds; nothing while the newest one has no verified checkpoint that has settled.

    Args:
        earlier: by number, all below that of the newest.
        now_ns: by the store's clock.
    """
    if not _replaces(newest, policy, now_ns):
        return []
    left = policy.keep_last - len(newest.catalog.committed)
    plans = []
    for _, world in sorted(earlier.items(), reverse=True):
        whole = [c for c in world.catalog.committed if c.id in world.verified]
        wanted = wanted_by(policy, whole, now_ns, last=max(0, left))
        left -= len(whole)
        plans.append(_plan(world, wanted, newest.name.world, policy.grace_ns, now_ns))
    return plans


def _replaces(world: StoredWorld, policy: RetentionPolicy, now_ns: int) -> bool:
    settled = [c for c in world.catalog.committed if now_ns - c.modified_ns >= policy.settle_ns]
    return any(c.id in world.verified for c in settled)


def _why_it_stays(
    checkpoint: StoredCheckpoint, wanted: Mapping[CheckpointId, str], grace_ns: int, now_ns: int
) -> str:
    """ "" if it goes."""
    if checkpoint.pinned:
        return "pinned"
    unfinished = checkpoint.state is CheckpointState.INCOMPLETE
    if unfinished and now_ns - checkpoint.modified_ns < grace_ns:
        return "incomplete, within the grace time"
    return wanted.get(checkpoint.id, "")


def _plan(
    world: StoredWorld, wanted: Mapping[CheckpointId, str], by: int, grace_ns: int, now_ns: int
) -> IncarnationRemoval:
    catalog, why = world.catalog, f"world {by} took its place"
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
    if all(key in world.references for key in keys):
        used = frozenset[str]().union(*(world.references[key].objects for key in keys))
        objects = [
            Deletion(info.key, info.size, why)
            for info in listed
            if info.key not in used and now_ns - info.modified_ns >= grace_ns
        ]
    names: list[Deletion] = []
    if not (kept or catalog.pins or catalog.foreign) and len(objects) == len(listed):
        run = RunName(catalog.job, catalog.run).key
        sizes = {} if catalog.identity is None else {run: catalog.identity.size}
        names = [Deletion(key, sizes.get(key, 0), why) for key in (run, world.name.key)]
    stays = {checkpoint.id: reasons[checkpoint.id] for checkpoint in kept}
    return IncarnationRemoval(
        world.name.world, tuple(manifests), tuple(sorted(objects)), tuple(names), stays
    )
