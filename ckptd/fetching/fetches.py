"""The fetches of this node: what trainers wait for, and rehearsals (docs/replication.md §7)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckptd.events import EventLog
from ckptd.fetching.copies_here import with_copies_here
from ckptd.fetching.descriptor_search import DescriptorSearch, FoundDescriptor
from ckptd.fetching.drill import DrillRun
from ckptd.fetching.job import FetchJob
from ckptd.fetching.tools import Doubt
from ckptd.memory.segments import Segment, SegmentStore
from ckptd.peers.replica_store import ReplicaStore
from ckptd.recovery.holder import Holder
from ckptd.sessions import RankKey
from ckptd.storage.image import MapFunction
from ckptd.transport.messages import DrillReport, FetchPiece, FetchSource, RunSeen
from ckptd.workers import Workers

__all__ = ["Fetches"]


class Fetches:
    """Jobs by rank and generation, and drills.

    Args:
        link: the connection to a node, None if its address is not known.
        doubt: told which slots of this node did not match their digests.
        verifiers: workers that digest; `map_fn`, if given, spreads one image over threads.
        slow: workers for making memory.
    """

    def __init__(
        self,
        store: SegmentStore,
        replicas: ReplicaStore,
        events: EventLog,
        *,
        link: Callable[[str], Holder | None],
        doubt: Doubt,
        verifiers: Workers,
        slow: Workers,
        map_fn: MapFunction | None,
        clock: Callable[[], float],
    ) -> None:
        self._store, self._replicas, self._events = store, replicas, events
        self._link, self._doubt, self._verifiers, self._slow = link, doubt, verifiers, slow
        self._map, self._clock = map_fn, clock
        self._jobs: dict[tuple[RankKey, int], FetchJob] = {}
        self._drills: list[FetchJob] = []

    def find_descriptor(
        self,
        key: RankKey,
        sources: Sequence[FetchSource],
        found: Callable[[FoundDescriptor | str], None],
    ) -> None:
        """The descriptor of a segment that one of these holds; calls back with it, or with why there is none."""
        DescriptorSearch(self._store.node_id, key, sources, self._link, self._local_segment, found)

    def fetch(self, segment: Segment, pieces: Sequence[FetchPiece]) -> FetchJob:
        """Fill a new segment with these pieces.

        A copy on this node that no plan names, because it is in quarantine, is used all the same: what of it is right need not
        travel, and may be what nobody else has.
        """
        here = (*self._store.of_rank(segment.key), *self._replicas)
        job = self._make(segment, with_copies_here(pieces, self._store.node_id, segment.key, here))
        self._jobs[segment.key, segment.generation] = job
        job.start()
        return job

    def of(self, key: RankKey, generation: int) -> FetchJob | None:
        """The job that fills a generation of a rank."""
        return self._jobs.get((key, generation))

    def drill(
        self, key: RankKey, answer: Callable[[DrillReport], None]
    ) -> Callable[[RunSeen], None]:
        """A rehearsal of a rank's recovery; it begins when it is told what the nodes hold."""
        rehearsal = DrillRun(
            key,
            self._store,
            self._replicas,
            self._slow,
            find_descriptor=self.find_descriptor,
            start_fetch=self._start_drill,
            answer=answer,
            clock=self._clock,
        )
        return rehearsal.seen

    def peer_lost(self, node: str) -> None:
        """What it was to deliver is asked of others."""
        for job in (*self._jobs.values(), *self._drills):
            job.peer_lost(node)

    def leave(self, key: RankKey) -> None:
        """The trainer of a rank ended: nobody waits any more."""
        for owner, generation in list(self._jobs):
            if owner == key:
                self._jobs.pop((owner, generation)).close("its trainer ended")

    def tick(self) -> None:
        """Take over from slow holders; forget what is over and gone."""
        for drill in self._drills:
            drill.tick()
        for key, job in list(self._jobs.items()):
            job.tick()
            if job.over and self._store.get(*key) is None:
                del self._jobs[key]

    def close(self) -> None:
        """End all."""
        for job in (*self._jobs.values(), *self._drills):
            job.close("the daemon stops")

    def _start_drill(
        self, segment: Segment, pieces: Sequence[FetchPiece], finished: Callable[[str], None]
    ) -> FetchJob:
        # What is rehearsed is the loss of a node with all that lies on it, and whether memory elsewhere is enough.
        job = self._make(segment, pieces, finished, stored=False)
        self._drills = [d for d in self._drills if not d.over] + [job]
        job.start()
        return job

    def _make(
        self,
        segment: Segment,
        pieces: Sequence[FetchPiece],
        finished: Callable[[str], None] = lambda reason: None,
        *,
        stored: bool = True,
    ) -> FetchJob:
        return FetchJob(
            segment,
            pieces,
            node=self._store.node_id,
            link=self._link,
            local=self._local_segment,
            doubt=self._doubt,
            verifiers=self._verifiers,
            map_fn=self._map,
            events=self._events,
            clock=self._clock,
            stored=stored,
            finished=finished,
        )

    def _local_segment(self, name: str) -> Segment | None:
        replica = self._replicas.get(name)
        if replica is not None:
            return replica
        return next((s for s in self._store if s.path.name == name), None)
