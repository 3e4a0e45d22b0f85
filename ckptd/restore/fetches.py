"""The fetches of this node, on the daemon's loop thread (docs/replication.md §7).

They fill trainers' segments, copies that trainers read, and the segments of drills.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from ckptd.core.recovery.global_plan import NoRecovery, RecoveryPlan, plan_recovery
from ckptd.core.recovery.snapshot_tables import SnapshotToLoad
from ckptd.core.sessions import AttachWish, RankKey
from ckptd.core.slots.segment_format import (
    SegmentDescriptor,
    decode_descriptor,
    encode_descriptor,
    plan_geometry,
    slot_lock_byte,
    unpack_slot_header,
)
from ckptd.core.slots.slots import SlotState
from ckptd.errors import RemoteProtocolError, SegmentError
from ckptd.holdings import fetch_piece, newest_history
from ckptd.memory import locks
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_store import Purpose, SegmentMaker, SegmentPlan, SegmentStore
from ckptd.memory.slot_digests import Doubt
from ckptd.node_context import NodeContext, NodeWorkers
from ckptd.peers.peer_link import Holder
from ckptd.peers.replica_store import ReplicaStore
from ckptd.restore.puller import CopyDoubts, FetchTools
from ckptd.restore.slot_fetch import FetchJob
from ckptd.transport import peer_messages as p
from ckptd.transport.messages import DrillReport, FetchPiece, FetchSource, Refused, RunSeen
from ckptd.units import format_bytes

_SUFFIX = ".fetched"
_FIRST_NUMBER = 1 << 30  # above the generations of any rank
_USABLE = (SlotState.SEALED, SlotState.QUARANTINED)
_COMPARED_BYTES = 1 << 20  # at a time


@dataclass(frozen=True, slots=True)
class FoundDescriptor:
    """The layout of a segment that another node holds."""

    descriptor: SegmentDescriptor
    num_slots: int
    slot_bytes: int


class ReaderCopies:
    """Names and numbers of copies that trainers of this node read; the store has their memory.

    A rank that replays alone reads its neighbours' boundary logs. A copy has the layout of the
    segment that it is a copy of, descriptor and magic included; only its name is its own,

        <job>~<run>~r<rank of the reader>~c<number>.fetched

    and no kind of segment has this suffix. So it is no generation of any rank: it is neither part
    of a ring or log, nor reported or served to other nodes, nor scrubbed, nor adopted. It counts as
    its reader's memory, and goes when the reader drops it or is gone. In messages its number stands
    in the place of a generation.
    """

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        # Random, so that a trainer that asks for a copy of an earlier daemon learns that it is gone.
        self._numbers = itertools.count(_FIRST_NUMBER + secrets.randbelow(_FIRST_NUMBER // 2))

    def sweep(self) -> None:
        """Remove an earlier daemon's copies; whoever reads one has it mapped."""
        for path in self._store.folder.glob(f"*{_SUFFIX}"):
            path.unlink(missing_ok=True)

    def plan(
        self, wish: AttachWish, descriptor: SegmentDescriptor, num_slots: int, slot_bytes: int
    ) -> SegmentPlan:
        """Lay out a copy for a rank; no memory is promised yet.

        Raises:
            ValueError: numbers that no segment can have.
        """
        geometry = plan_geometry(num_slots, slot_bytes, len(encode_descriptor(descriptor)))
        number, reader = next(self._numbers), wish.key
        name = f"{reader.job}~{reader.run}~r{reader.rank}~c{number}{_SUFFIX}"
        path = self._store.folder / name
        return SegmentPlan(descriptor, geometry, path, Purpose.COPY, wish, number)

    def of(self, reader: RankKey) -> dict[int, Segment]:
        """A reader's copies, by number."""
        return {
            plan.number: segment
            for plan, segment in self._store.plans_for(Purpose.COPY)
            if plan.charged_to == reader and segment is not None
        }


class Fetches:
    """Fetch jobs by rank and generation (or number of a copy), and drills.

    Args:
        link: the connection to a node, None if its address is not known.
        doubt: has a slot of this node verified.
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
        self.node, self.maker, self.workers = node, maker, workers
        self._store, self._replicas, self._link = node.store, replicas, link
        self.copies = ReaderCopies(node.store)
        self._doubts = CopyDoubts(doubt, link, node.events)
        self._jobs: dict[tuple[RankKey, int], FetchJob] = {}
        self._drills: list[FetchJob] = []

    def find_descriptor(
        self,
        key: RankKey,
        sources: Sequence[FetchSource],
        found: Callable[[FoundDescriptor | str], None],
    ) -> None:
        """Ask the sources in turn for their segment's layout; ``found`` gets it, or why there is none."""
        self._ask_descriptor(key, list(sources), [], found)

    def _ask_descriptor(
        self,
        key: RankKey,
        left: list[FetchSource],
        reasons: list[str],
        found: Callable[[FoundDescriptor | str], None],
    ) -> None:
        def failed(node: str, _code: str, reason: str) -> None:
            reasons.append(f"{node}: {reason}")
            self._ask_descriptor(key, left, reasons, found)

        def answered(node: str, reply: p.Descriptor) -> None:
            try:
                descriptor = decode_descriptor(reply.descriptor)
            except SegmentError as error:
                failed(node, "", str(error))
                return
            found(FoundDescriptor(descriptor, reply.num_slots, reply.slot_bytes))

        while left:
            source = left.pop(0)
            segment = self._segment(source.segment) if source.node == self._store.node_id else None
            link = self._link(source.node)
            if segment is not None:
                geometry = segment.geometry
                found(FoundDescriptor(segment.descriptor, geometry.num_slots, geometry.slot_bytes))
                return
            if link is not None:
                message = p.GetDescriptor(key.job, key.run, source.segment)
                done, refused = partial(answered, source.node), partial(failed, source.node)
                link.ask(message, p.Descriptor, done, refused)
                return
            reasons.append(f"{source.node}: its address is not known")
        found(f"no holder of {key} answers ({'; '.join(reasons)})")

    def fetch(self, segment: Segment, pieces: Sequence[FetchPiece]) -> FetchJob:
        """Fill a new segment with these pieces.

        Quarantined copies on this node, which no plan names, are used as well: their undamaged
        parts need not travel, and may be what no other node has.
        """
        return self._start((segment.key, segment.generation), segment, pieces)

    def fetch_copy(
        self, reader: RankKey, number: int, segment: Segment, pieces: Sequence[FetchPiece]
    ) -> FetchJob:
        """Fill a copy that a trainer of this node reads. Its content is in memory, or nowhere."""
        return self._start((reader, number), segment, pieces, stored=False)

    def _start(
        self,
        name: tuple[RankKey, int],
        segment: Segment,
        pieces: Sequence[FetchPiece],
        *,
        stored: bool = True,
    ) -> FetchJob:
        here = (*self._store.all_of_rank(segment.key), *self._replicas)
        there = _with_copies_here(pieces, self._store.node_id, segment.key, here)
        job = self._jobs[name] = self._make(segment, there, stored=stored)
        job.start()
        return job

    def _make(
        self,
        segment: Segment,
        pieces: Sequence[FetchPiece],
        finished: Callable[[str], None] = lambda reason: None,
        *,
        stored: bool,
    ) -> FetchJob:
        tools = FetchTools(
            segment,
            node=self.node.node_id,
            link=self._link,
            local=self._segment,
            doubts=self._doubts,
            verifiers=self.workers.sealers,
            digests=self.workers.digests,
            events=self.node.events,
            clock=self.node.clock,
            stored=stored,
        )
        return FetchJob(tools, pieces, finished)

    def _segment(self, name: str) -> Segment | None:
        return self._store.named(name, Purpose.RANK, Purpose.REPLICA, Purpose.COPY)

    def of(self, key: RankKey, generation: int) -> FetchJob | None:
        return self._jobs.get((key, generation))

    def drill(self, key: RankKey, answer: Callable[[DrillReport], None]) -> Callable[[RunSeen], None]:
        """Rehearse a rank's recovery; the returned function begins it, given what the nodes hold."""
        return _Drill(key, self, answer).seen

    def start_drill(
        self, segment: Segment, pieces: Sequence[FetchPiece], finished: Callable[[str], None]
    ) -> FetchJob:
        """Fill a drill's segment from other nodes' memory alone; its rank's node counts as lost."""
        job = self._make(segment, pieces, finished, stored=False)
        self._drills = [d for d in self._drills if not d.over] + [job]
        job.start()
        return job

    def peer_lost(self, node: str) -> None:
        for job in (*self._jobs.values(), *self._drills):
            job.peer_lost(node)

    def leave(self, key: RankKey) -> None:
        """The trainer of a rank ended: end its fetches, remove its copies."""
        for owner, generation in list(self._jobs):
            if owner == key:
                self._jobs.pop((owner, generation)).close("its trainer ended")
        for copy in self.copies.of(key).values():
            self._remove_copy(key, copy, "its trainer ended")

    def drop_copy(self, reader: RankKey, number: int) -> int | None:
        """Remove a copy that its reader has read; returns its bytes, None if there is no such copy."""
        copy = self.copies.of(reader).get(number)
        if copy is None:
            return None
        job = self._jobs.pop((reader, number), None)
        if job is not None:
            job.close("it is no longer needed", wanted=False)
        return self._remove_copy(reader, copy, "its trainer no longer needs it")

    def _remove_copy(self, reader: RankKey, copy: Segment, why: str) -> int:
        text = f"{reader}: a copy of {copy.key} ({format_bytes(copy.file_bytes)}): {why}"
        self.node.events.add("info", "removed", text, reader)
        self.maker.give_back(copy)
        return copy.file_bytes

    def tick(self) -> None:
        """Take parts over from slow holders; forget jobs that are over and whose segment is gone."""
        self._doubts.tick()
        for drill in self._drills:
            drill.tick()
        for (key, number), job in list(self._jobs.items()):
            job.tick()
            if job.over and self._store.get(key, number) is None and number not in self.copies.of(key):
                del self._jobs[key, number]

    def close(self) -> None:
        for job in (*self._jobs.values(), *self._drills):
            job.close("the daemon stops")


def _with_copies_here(
    pieces: Sequence[FetchPiece], node: str, key: RankKey, segments: Iterable[Segment]
) -> list[FetchPiece]:
    """The pieces, with the copies of them in this node's segments as further sources.

    No plan names a quarantined copy, because it is not whole. As a further source it can only help:
    nothing counts that does not verify.
    """
    here: dict[bytes, list[FetchSource]] = {}
    for segment in segments:
        if segment.key == key:
            for index, header in segment.headers():
                if header.state in _USABLE:
                    source = FetchSource(node, segment.path.name, index)
                    here.setdefault(header.header_digest, []).append(source)
    found = []
    for piece in pieces:
        wanted = unpack_slot_header(piece.header)
        more = [] if wanted is None else here.get(wanted.header_digest, [])
        sources = tuple(dict.fromkeys((*piece.sources, *more)))
        found.append(msgspec.structs.replace(piece, sources=sources))
    return found


class _Drill:
    """`ckptctl drill`: one rehearsal of a rank's recovery, from other nodes' memory.

    What a node that lost everything would fetch goes into memory that no other part of the daemon
    sees, is verified against its digests, compared byte for byte with the primary where that is on
    this node, and dropped.
    """

    def __init__(self, key: RankKey, fetches: Fetches, answer: Callable[[DrillReport], None]) -> None:
        self._key, self._fetches, self._answer = key, fetches, answer
        self._store, self._clock = fetches.node.store, fetches.node.clock
        self._plan: RecoveryPlan | None = None
        self._pieces: tuple[SnapshotToLoad, ...] = ()
        self._job: FetchJob | None = None
        self._began_s = 0.0

    def seen(self, seen: RunSeen) -> None:
        """Plan from what the nodes of the run hold, without the rank's own node."""
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
        self._fetches.find_descriptor(self._key, sources, self._described)

    def _described(self, found: FoundDescriptor | str) -> None:
        if isinstance(found, str):
            self._fail(found)
            return
        plan = self._store.plan(found.descriptor, len(self._pieces), found.slot_bytes)
        # The next start of the daemon removes files with such a name.
        path = self._store.folder / f".drill-{secrets.token_hex(4)}.tmp"
        plan = replace(plan, path=path, purpose=Purpose.DRILL)
        refusal = self._fetches.maker.make(plan, made=self._made, refused=self._refused)
        if refusal is not None:
            self._refused(refusal)

    def _refused(self, refusal: Refused) -> None:
        self._fail(refusal.message)

    def _made(self, segment: Segment) -> None:
        self._began_s = self._clock()
        pieces = [fetch_piece(piece, sealed_at_ns=time.time_ns()) for piece in self._pieces]
        self._job = self._fetches.start_drill(segment, pieces, partial(self._fetched, segment))

    def _fetched(self, segment: Segment, reason: str) -> None:
        done = partial(self._finish, segment, self._clock() - self._began_s)
        if reason:
            done((reason, 0))
            return
        primaries = self._store.of_rank(self._key)
        compare = partial(_compare, segment, self._pieces, primaries)
        if not self._fetches.workers.slow.submit(
            compare, done, lambda error: done((f"comparing failed: {error!r}", 0))
        ):
            done(("", 0))

    def _finish(self, segment: Segment, took_s: float, outcome: tuple[str, int]) -> None:
        reason, compared = outcome
        self._fetches.maker.give_back(segment)
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
                    fetched = segment.header(index)
                    if fetched is None or not _same(
                        segment.image(index, fetched), primary.image(slot, header)
                    ):
                        return f"iteration {header.iteration} differs from the primary", compared
                    compared += header.image_len
    return "", compared


def _same(a: memoryview, b: memoryview) -> bool:
    """Compare in small pieces: comparing views is slow and blocks all other threads meanwhile."""
    if len(a) != len(b):
        return False
    step = _COMPARED_BYTES
    return all(bytes(a[at : at + step]) == bytes(b[at : at + step]) for at in range(0, len(a), step))
