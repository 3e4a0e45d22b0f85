"""The fetches of this node: what trainers wait for, and rehearsals (docs/replication.md §7)."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from ckptd.core.recovery.global_plan import NoRecovery, RecoveryPlan, SnapshotToLoad, plan_recovery
from ckptd.core.sessions import AttachWish, RankKey
from ckptd.core.slots.ring import SlotState
from ckptd.core.slots.segment_format import (
    SegmentDescriptor,
    encode_descriptor,
    plan_geometry,
    slot_lock_byte,
    unpack_slot_header,
)
from ckptd.errors import RemoteProtocolError
from ckptd.holdings import fetch_piece, newest_history
from ckptd.memory import locks
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_store import Purpose, SegmentMaker, SegmentPlan, SegmentStore
from ckptd.memory.slot_digests import Doubt
from ckptd.node_context import NodeContext, NodeWorkers
from ckptd.peers.peer_link import Holder
from ckptd.peers.replica_store import ReplicaStore
from ckptd.restore.puller import CopyDoubts, DescriptorSearch, FetchTools, FoundDescriptor
from ckptd.restore.slot_fetch import FetchJob
from ckptd.transport.control.messages import DrillReport, FetchPiece, FetchSource, Refused, RunSeen
from ckptd.units import format_bytes
from ckptd.workers import Workers

__all__ = ["DrillRun", "Fetches", "ReadingCopies", "with_copies_here"]


_SUFFIX = ".fetched"
_FIRST_NUMBER = 1 << 30  # a rank has not so many generations


class ReadingCopies:
    """The names and numbers of copies; their memory is the store's."""

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        # Not the same numbers after a restart: a trainer that asks for what an earlier daemon made
        # must learn that it is gone.
        self._numbers = itertools.count(_FIRST_NUMBER + secrets.randbelow(_FIRST_NUMBER // 2))

    def sweep(self) -> None:
        """Remove what an earlier daemon left: whoever reads it has it mapped, and who waits for
        more must ask again.
        """
        for path in self._store.folder.glob(f"*{_SUFFIX}"):
            path.unlink(missing_ok=True)

    def plan(
        self, wish: AttachWish, descriptor: SegmentDescriptor, num_slots: int, slot_bytes: int
    ) -> SegmentPlan:
        """Lay out a copy for the rank that attached so; nothing is promised yet.

        Raises:
            ValueError: numbers that no segment can have.
        """
        geometry = plan_geometry(num_slots, slot_bytes, len(encode_descriptor(descriptor)))
        number, reader = next(self._numbers), wish.key
        name = f"{reader.job}~{reader.run}~r{reader.rank}~c{number}{_SUFFIX}"
        path = self._store.folder / name
        return SegmentPlan(descriptor, geometry, path, Purpose.COPY, wish, number)

    def get(self, reader: RankKey, number: int) -> Segment | None:
        """A copy that is there."""
        return self.of(reader).get(number)

    def of(self, reader: RankKey) -> dict[int, Segment]:
        """A reader's copies that are there, by number."""
        return {
            plan.number: segment
            for plan, segment in self._store.plans_for(Purpose.COPY)
            if plan.charged_to == reader and segment is not None
        }


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


_USABLE = (SlotState.SEALED, SlotState.QUARANTINED)


def with_copies_here(
    pieces: Sequence[FetchPiece], node: str, key: RankKey, segments: Iterable[Segment]
) -> list[FetchPiece]:
    """The pieces, with the copies of them in this node's segments as further sources.

    No plan names a copy in quarantine: it is not whole, and so is nothing to rely on. Beside a copy
    that the plan names it can only help, since nothing counts that does not verify.
    """
    found: dict[bytes, list[FetchSource]] = {}
    for segment in segments:
        if segment.key == key:
            for index, header in segment.headers():
                if header.state in _USABLE:
                    source = FetchSource(node, segment.path.name, index)
                    found.setdefault(header.header_digest, []).append(source)
    return [_with(piece, found) for piece in pieces]


def _with(piece: FetchPiece, found: dict[bytes, list[FetchSource]]) -> FetchPiece:
    header = unpack_slot_header(piece.header)
    here = [] if header is None else found.get(header.header_digest, [])
    sources = tuple(dict.fromkeys((*piece.sources, *here)))
    return msgspec.structs.replace(piece, sources=sources)


_PIECE_BYTES = 1 << 20

# Begins to fill a segment with pieces; calls back with the reason of a failure, or "".
StartFetch = Callable[[Segment, list[FetchPiece], Callable[[str], None]], FetchJob]
FindDescriptor = Callable[[RankKey, tuple[FetchSource, ...], Callable[[FoundDescriptor | str], None]], None]


class DrillRun:
    """One rehearsal, from the survey of the run to the report. Lives on the daemon's loop thread."""

    def __init__(
        self,
        key: RankKey,
        store: SegmentStore,
        maker: SegmentMaker,
        comparers: Workers,
        *,
        find_descriptor: FindDescriptor,
        start_fetch: StartFetch,
        answer: Callable[[DrillReport], None],
        clock: Callable[[], float],
    ) -> None:
        self._key, self._store, self._maker, self._comparers = key, store, maker, comparers
        self._find_descriptor, self._start_fetch = find_descriptor, start_fetch
        self._answer, self._clock = answer, clock
        self._plan: RecoveryPlan | None = None
        self._pieces: tuple[SnapshotToLoad, ...] = ()
        self._job: FetchJob | None = None
        self._began_s = 0.0

    def seen(self, seen: RunSeen) -> None:
        """What the nodes of the run hold: plan, without the rank's own node."""
        try:
            held = newest_history(seen)
        except RemoteProtocolError as error:
            self._fail(str(error))
            return
        homes = {rank: member.card.node for member in seen.members for rank in member.ranks}
        if not held.world_size or self._key.rank not in homes:
            self._fail(f"no rank {self._key.rank} of {self._key.job}/{self._key.run} is known here")
            return
        plan = plan_recovery(
            held.snapshots,
            held.world_size,
            homes=homes,
            lost={homes[self._key.rank]},
            epochs=held.history.begun,
        )
        if isinstance(plan, NoRecovery):
            self._fail(plan.reason)
            return
        self._plan, self._pieces = plan, plan.per_rank[self._key.rank]
        sources = tuple(FetchSource(s.node, s.segment, s.index) for s in self._pieces[0].sources)
        self._find_descriptor(self._key, sources, self._described)

    def _described(self, found: FoundDescriptor | str) -> None:
        if isinstance(found, str):
            self._fail(found)
            return
        plan = self._store.plan(found.descriptor, len(self._pieces), found.slot_bytes)
        # A name that the next start of the daemon takes for a leftover.
        path = self._store.folder / f".drill-{secrets.token_hex(4)}.tmp"
        plan = replace(plan, path=path, purpose=Purpose.DRILL)
        refusal = self._maker.make(plan, made=self._made, refused=self._refused)
        if refusal is not None:
            self._refused(refusal)

    def _refused(self, refusal: Refused) -> None:
        self._fail(refusal.message)

    def _made(self, segment: Segment) -> None:
        self._began_s = self._clock()
        self._job = self._start_fetch(
            segment,
            [fetch_piece(piece, sealed_at_ns=time.time_ns()) for piece in self._pieces],
            partial(self._fetched, segment),
        )

    def _fetched(self, segment: Segment, reason: str) -> None:
        took_s = self._clock() - self._began_s
        assert self._plan is not None
        done = partial(self._finish, segment, took_s)
        if reason:
            done((reason, 0))
            return
        primaries = self._store.of_rank(self._key)
        pieces = self._pieces
        if not self._comparers.submit(
            lambda: _compare(segment, pieces, primaries),
            done,
            lambda error: done((f"comparing failed: {error!r}", 0)),
        ):
            done(("", 0))

    def _finish(self, segment: Segment, took_s: float, outcome: tuple[str, int]) -> None:
        reason, compared = outcome
        self._maker.give_back(segment)
        assert self._plan is not None
        state = self._job.state if self._job is not None else None
        self._answer(
            DrillReport(
                recoverable=not reason,
                reason=reason or self._plan.reason,
                start=self._plan.start,
                end=self._plan.end,
                seconds=took_s,
                bytes=state.bytes_done if state is not None else 0,
                compared=compared,
                by_node={n: b for n, b in state.by_node.items() if b} if state is not None else {},
            )
        )

    def _fail(self, reason: str) -> None:
        self._answer(DrillReport(False, reason))


def _compare(
    segment: Segment, pieces: tuple[SnapshotToLoad, ...], primaries: list[Segment]
) -> tuple[str, int]:
    """What differs from the primary ("" for nothing), and how many bytes were compared."""
    compared = 0
    for index, piece in enumerate(pieces):
        for primary in primaries:
            for slot, header in primary.headers():
                if header.header_digest != piece.record.header_digest:
                    continue
                with locks.lock_file(primary.path, slot_lock_byte(slot), exclusive=False) as taken:
                    if not taken or primary.header(slot) != header:
                        continue
                    size = header.image_len
                    fetched = segment.header(index)
                    if fetched is None or not _same(
                        segment.image(index, fetched), primary.image(slot, header)
                    ):
                        return f"iteration {header.iteration} differs from the primary", compared
                    compared += size
    return "", compared


def _same(a: memoryview, b: memoryview) -> bool:
    """In small pieces: comparing views is slow and holds up every other thread meanwhile."""
    if len(a) != len(b):
        return False
    return all(
        bytes(a[at : at + _PIECE_BYTES]) == bytes(b[at : at + _PIECE_BYTES])
        for at in range(0, len(a), _PIECE_BYTES)
    )
