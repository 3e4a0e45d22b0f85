"""The fetches of this node: what trainers wait for, and rehearsals (docs/replication.md §7)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckptd.core.sessions import RankKey
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_maker import SegmentMaker
from ckptd.memory.segment_store import Purpose
from ckptd.memory.slot_doubts import Doubt
from ckptd.node_context import NodeContext, NodeWorkers
from ckptd.peers.holder import Holder
from ckptd.peers.replicas.replica_store import ReplicaStore
from ckptd.restore.descriptor_search import DescriptorSearch, FoundDescriptor
from ckptd.restore.drill import DrillRun
from ckptd.restore.fetch_job import FetchJob
from ckptd.restore.fetch_tools import CopyDoubts, FetchTools
from ckptd.restore.local_copies import with_copies_here
from ckptd.restore.remote_copy_files import ReadingCopies
from ckptd.transport.messages import DrillReport, FetchPiece, FetchSource, RunSeen
from ckptd.units import format_bytes

__all__ = ["Fetches"]


class Fetches:
    """Jobs by rank and generation, and drills.

    Args:
        link: the connection to a node, None if its address is not known.
        doubt: told which slots of this node did not match their digests.
    """

    def __init__(
        self,
        node: NodeContext,
        maker: SegmentMaker,
        replicas: ReplicaStore,
        workers: NodeWorkers,
        *,
        link: Callable[[str], Holder | None],
        doubt: Doubt,
    ) -> None:
        self._node, self._store = node, node.store
        self._maker, self._replicas = maker, replicas
        self.copies = ReadingCopies(node.store)
        self._workers, self._link = workers, link
        self._doubts = CopyDoubts(doubt, link, node.events)
        self._jobs: dict[tuple[RankKey, int], FetchJob] = {}
        self._drills: list[FetchJob] = []

    def find_descriptor(
        self,
        key: RankKey,
        sources: Sequence[FetchSource],
        found: Callable[[FoundDescriptor | str], None],
    ) -> None:
        """The descriptor of a segment that one of these holds; calls back with it, or with why
        there is none.
        """
        DescriptorSearch(self._store.node_id, key, sources, self._link, self._local_segment, found)

    def fetch(self, segment: Segment, pieces: Sequence[FetchPiece]) -> FetchJob:
        """Fill a new segment with these pieces.

        A copy on this node that no plan names, because it is in quarantine, is used all the same:
        what of it is right need not travel, and may be what nobody else has.
        """
        return self._start((segment.key, segment.generation), segment, pieces)

    def fetch_for_reading(
        self, reader: RankKey, number: int, segment: Segment, pieces: Sequence[FetchPiece]
    ) -> FetchJob:
        """Fill a copy that a trainer of this node reads; what is asked for is in memory, or nowhere."""
        return self._start((reader, number), segment, pieces, stored=False)

    def of(self, key: RankKey, generation: int) -> FetchJob | None:
        """The job that fills a generation of a rank."""
        return self._jobs.get((key, generation))

    def drill(self, key: RankKey, answer: Callable[[DrillReport], None]) -> Callable[[RunSeen], None]:
        """A rehearsal of a rank's recovery; it begins when it is told what the nodes hold."""
        rehearsal = DrillRun(
            key,
            self._store,
            self._maker,
            self._workers.slow,
            find_descriptor=self.find_descriptor,
            start_fetch=self._start_drill,
            answer=answer,
            clock=self._node.clock,
        )
        return rehearsal.seen

    def peer_lost(self, node: str) -> None:
        """What it was to deliver is asked of others."""
        for job in (*self._jobs.values(), *self._drills):
            job.peer_lost(node)

    def leave(self, key: RankKey) -> None:
        """The trainer of a rank ended: nobody waits any more, and nobody reads."""
        for owner, generation in list(self._jobs):
            if owner == key:
                self._jobs.pop((owner, generation)).close("its trainer ended")
        for copy in self.copies.of(key).values():
            self._remove_copy(key, copy, "its trainer ended")

    def drop_copy(self, reader: RankKey, number: int) -> int | None:
        """A trainer has read what was brought for it; returns the bytes that are free, None if this
        is no copy of it.
        """
        copy = self.copies.get(reader, number)
        if copy is None:
            return None
        job = self._jobs.pop((reader, number), None)
        if job is not None:
            job.close("it is no longer needed", wanted=False)
        return self._remove_copy(reader, copy, "its trainer no longer needs it")

    def tick(self) -> None:
        """Take over from slow holders; forget what is over and gone."""
        self._doubts.tick()
        for drill in self._drills:
            drill.tick()
        for key, job in list(self._jobs.items()):
            job.tick()
            if job.over and self._store.get(*key) is None and self.copies.get(*key) is None:
                del self._jobs[key]

    def close(self) -> None:
        """End all."""
        for job in (*self._jobs.values(), *self._drills):
            job.close("the daemon stops")

    def _start(
        self,
        name: tuple[RankKey, int],
        segment: Segment,
        pieces: Sequence[FetchPiece],
        *,
        stored: bool = True,
    ) -> FetchJob:
        here = (*self._store.all_of_rank(segment.key), *self._replicas)
        there = with_copies_here(pieces, self._store.node_id, segment.key, here)
        job = self._jobs[name] = self._make(segment, there, stored=stored)
        job.start()
        return job

    def _remove_copy(self, reader: RankKey, copy: Segment, why: str) -> int:
        text = f"{reader}: a copy of {copy.key} ({format_bytes(copy.file_bytes)}): {why}"
        self._node.events.add("info", "removed", text, reader)
        self._maker.give_back(copy)
        return copy.file_bytes

    def _start_drill(
        self, segment: Segment, pieces: Sequence[FetchPiece], finished: Callable[[str], None]
    ) -> FetchJob:
        # What is rehearsed is the loss of a node with all that lies on it, and whether memory
        # elsewhere is enough.
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
        tools = FetchTools(
            segment,
            node=self._node.node_id,
            link=self._link,
            local=self._local_segment,
            doubts=self._doubts,
            verifiers=self._workers.sealers,
            digests=self._workers.digests,
            events=self._node.events,
            clock=self._node.clock,
            stored=stored,
        )
        return FetchJob(tools, pieces, finished)

    def _local_segment(self, name: str) -> Segment | None:
        return self._store.named(name, Purpose.RANK, Purpose.REPLICA, Purpose.COPY)
