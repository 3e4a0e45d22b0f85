"""The worlds of elastic runs in a store: marked as such, found by a start, and collected when a
later one has taken their place.

Each world is a run of its own (`ckptd.storage.checkpoints.incarnation_retention`), so everything
but this is done by its `RunStore`. That a run is a world its trainers tell by the topology that
they attach with, which is in every segment's descriptor, so that a daemon that was restarted knows
it as well. The mark lies in the store before rank 0's manifest does: a checkpoint that counts is
found.

In the store keeper's process; called by several of its threads.
"""

from __future__ import annotations

from collections.abc import Callable

from ckptd.core.slots.segment_format import WORLD_TOPOLOGY, decode_descriptor
from ckptd.persistence import keeper_wire as w
from ckptd.persistence.run_retention import Surveyed, newest_ns
from ckptd.persistence.run_store import RunStore
from ckptd.storage.checkpoints.catalog import Catalog, StoredCheckpoint
from ckptd.storage.checkpoints.incarnation_retention import StoredIncarnation, plan_incarnations
from ckptd.storage.checkpoints.names import (
    IncarnationName,
    incarnation_of_run,
    incarnations_prefix,
    parse,
    run_of_incarnation,
)
from ckptd.storage.checkpoints.retention import RetentionPolicy
from ckptd.storage.stores.objects import ObjectStore

__all__ = ["StoredWorlds"]

_OFFERED = 16  # checkpoints that a start is told of: the newest, and what it falls back to


class StoredWorlds:
    """What several runs of one store have to do with each other.

    Args:
        run_of: the run of these names.
    """

    def __init__(
        self,
        store: ObjectStore,
        run_of: Callable[[str, str], RunStore],
        policy: RetentionPolicy,
    ) -> None:
        self._store, self._run_of, self._policy = store, run_of, policy
        self._marked: set[IncarnationName] = set()

    def mark(self, job: str, run: str, descriptor: bytes) -> None:
        """Before a rank's manifest: if its run is a world, the store shall show it.

        Raises:
            StoreError: the store does not take the mark.
        """
        name = _name(job, run)
        if name is None or name in self._marked:
            return
        if decode_descriptor(descriptor).topology == WORLD_TOPOLOGY:
            self._store.put(name.key, [])
            self._marked.add(name)

    def find(self, message: w.FindWorlds) -> w.FoundWorlds:
        """The newest committed checkpoints of all worlds.

        Raises:
            StoreError: the store cannot be read.
        """
        job, numbers = message.job, self._numbers(message.job, message.run)
        found: list[w.WholeWorld] = []
        damaged: list[tuple[int, int]] = []
        for number in numbers:
            run = self._run_of(job, run_of_incarnation(message.run, number))
            if not message.again:
                run.trust_again()
            catalog, passed_over = run.offered()
            for checkpoint in catalog.committed:
                if checkpoint.id in passed_over:
                    damaged.append((number, checkpoint.id.end))
                else:
                    sizes = _sizes(catalog, checkpoint)
                    found.append(w.WholeWorld(number, checkpoint.id.end, sizes))
            if len(found) >= _OFFERED:
                break
        return w.FoundWorlds(message.id, numbers, found[:_OFFERED], damaged)

    def retain(self, job: str, run: str) -> None:
        """A checkpoint of this run is complete: if it is a world, what is left of earlier ones may go.

        Raises:
            StoreError: the store cannot be read, or does not delete; what was begun goes on the next time.
        """
        name = _name(job, run)
        numbers = [] if name is None else self._numbers(job, name.run)
        if name is None or name.number not in numbers:
            return  # it is called like a world, and is none
        runs = {n: self._run_of(job, run_of_incarnation(name.run, n)) for n in numbers if n < name.number}
        if not runs:
            return
        newest = _world(self._run_of(job, run).retention.survey())
        seen = {number: each.retention.survey() for number, each in runs.items()}
        earlier = {number: _world(one) for number, one in seen.items()}
        now_ns = max(newest_ns(world.catalog) for world in (newest, *earlier.values()))
        for plan in plan_incarnations(newest, earlier, self._policy, now_ns=now_ns):
            runs[plan.number].retention.delete(
                plan.manifests, plan.objects, plan.names, listed_s=seen[plan.number].listed_s
            )

    def _numbers(self, job: str, run: str) -> list[int]:
        """Of all worlds that are marked, the latest first."""
        names = [parse(info.key) for info in self._store.list(incarnations_prefix(job, run))]
        return sorted({n.number for n in names if isinstance(n, IncarnationName)}, reverse=True)


def _name(job: str, run: str) -> IncarnationName | None:
    found = incarnation_of_run(run)
    return None if found is None else IncarnationName(job, *found)


def _sizes(catalog: Catalog, checkpoint: StoredCheckpoint) -> list[int]:
    return [
        sum(found.info.size for found in catalog.objects.get((rank, checkpoint.id.end), ()))
        for rank in range(checkpoint.world_size)
    ]


def _world(seen: Surveyed) -> StoredIncarnation:
    return StoredIncarnation(seen.catalog, seen.verified, seen.references)
