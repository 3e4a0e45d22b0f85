"""The memory of a rank's parked state: a segment with two slots, each large enough for everything the rank
has; and the reading of parked state, this rank's or a peer's.

The last parked state stays until the next one is sealed. Memory is requested in the background when
the plan is known, and again when a plan has other operators or larger images. Parked state counts like
a snapshot of its iteration: a recovery to an earlier one outdates it. It is freed when every rank has a
complete newer suffix.

A rank that *moved* to another node takes its own parked state along. A *copied* rank has the same operators
as a peer that was parked: it takes tensors from there, and what is its own (buffers, random state, the
user's state, all step scalars) from its own snapshot of the same iteration.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptd.client.daemon_link.mapped_segment import MappedSegment, SlotFile
from ckptd.client.daemon_link.rank_memory import AuxiliarySegments, RankMemory
from ckptd.client.daemon_link.retrieval import wait_until_sealed
from ckptd.client.daemon_link.session import Session
from ckptd.client.daemon_link.snapshot_image import SnapshotImage
from ckptd.client.log_lines import get_logger
from ckptd.client.model.live_state import LiveState
from ckptd.client.model.snapshot_layout import PhasePlan
from ckptd.client.schedule.snapshot_plan import SnapshotPlan, human
from ckptd.client.stats import Stats
from ckptd.core.recovery.snapshot_tables import SnapshotCopy, SnapshotToLoad
from ckptd.core.slots.ring import NoSuffix, find_suffix
from ckptd.core.slots.segment_format import SlotHeader, parse_segment_file_name
from ckptd.core.slots.slots import SlotRecord, SlotState, epoch_table, is_stale
from ckptd.cuda.engine import CopyEngine, HostMemory
from ckptd.errors import AttachRefused, CorruptionError, DaemonUnavailable, SegmentError
from ckptd.holdings import fetch_piece, operators_id
from ckptd.storage.image import ImageView, verify
from ckptd.storage.image_format import ImageError
from ckptd.transport.messages import NodeCard

logger = get_logger(__name__)

_SLOTS = 2
_PAGE = 4096
_GRANT_S = 700.0  # longer than the session waits for memory to be made


def parked_records(memory: RankMemory) -> list[SlotRecord]:
    """The parked states of this rank here that count, oldest first; anchors are those of a dense image."""
    records = [r for r in _records(memory) if r.sealed]
    known = epoch_table(records, memory.table.epochs)
    counts = [r for r in records if not is_stale(r, known)]
    return sorted(counts, key=lambda r: (r.epoch, r.iteration, r.sequence))


def _records(memory: RankMemory) -> list[SlotRecord]:
    """Every slot of every generation."""
    found = []
    for segment in memory.parks:
        everything = (1 << segment.descriptor.num_operators) - 1
        found += [
            replace(r, anchors=everything) if r.state in (SlotState.FILLED, SlotState.SEALED) else r
            for r in segment.records()
        ]
    return found


def parked_image(memory: RankMemory, record: SlotRecord) -> SnapshotImage:
    """A parked state as the only image of a replay, which is dense at once.

    Raises:
        CorruptionError: it differs from what was sealed; the slot is in quarantine now.
    """
    segment = memory.parks.of(record)
    image = segment.slot(record.index)[: record.image_len]
    try:
        view = _verified(image, record, generation=record.generation, slot=record.index)
    except CorruptionError:
        segment.set_state(record.index, SlotState.QUARANTINED)
        raise
    base = segment.slot_base(record.index)
    return SnapshotImage(record.iteration, view, segment.memory, base, record.phase)


def _verified(image: memoryview, record: SlotRecord, **ids: object) -> ImageView:
    try:
        verify(image, record.header_digest)
        return ImageView(image)
    except ImageError as error:
        raise CorruptionError(
            f"the state parked at iteration {record.iteration} is damaged: {error}",
            operation="read parked state",
            ids=ids,
        ) from error


class ParkMemory(AuxiliarySegments):
    """The segments for this rank's parked state. `fit` and `tidy` are called while nothing is being parked.

    Args:
        memory: the rank's memory; segments of an earlier trainer are in its ``parks``.
        engine: copies into them.
    """

    def __init__(self, memory: RankMemory, binding: LiveState, engine: CopyEngine, stats: Stats) -> None:
        super().__init__(memory, memory.parks, engine)
        self._binding, self._stats = binding, stats
        self._plan: SnapshotPlan | None = None
        self._layout: PhasePlan | None = None
        self._refused_before = False
        # Whether parked state and ring have the same operators, for a pair of generations.
        self._compared, self._same_operators = (-1, -1), False
        for segment in memory.parks:
            try:
                self._register(segment)
            except RuntimeError as error:
                self._refuse(str(error))
        self._update_stats()

    @property
    def layout(self) -> PhasePlan | None:
        """The layout of the next parked image; None while there is no room for it."""
        return self._layout if self._layout is not None and self._fits(self._layout) else None

    # -- size ------------------------------------------------------------------------------------

    def fit(self, plan: SnapshotPlan, step: int) -> None:
        """Request room for the state as ``plan`` knows it, unless it exists. Does not block."""
        if plan is not self._plan:
            self._plan, self._layout = plan, plan.everything(self._binding)
        self._collect(step)
        layout = self._layout
        assert layout is not None
        if self._coming is not None or step < self._retry_at or self._fits(layout):
            return
        if self._stats.snapshots < plan.schedule.window:
            return  # first what protects this run at all: slots for a suffix, and a boundary log
        if self._full:
            self.refused = "two generations hold parked state that is needed"
            return
        slot_bytes = -(-layout.layout.image_len // _PAGE) * _PAGE
        try:
            self._coming = self._memory.reserve_auxiliary(
                "parked",
                slot_bytes,
                _SLOTS,
                plan.payload(self._binding),
                window=plan.schedule.window,
                num_operators=len(plan.operators),
            )
        except DaemonUnavailable as error:
            self._not_reserved(step, error)

    def _collect(self, step: int) -> None:
        try:
            segment = self._collect_segment()
        except (AttachRefused, DaemonUnavailable, RuntimeError) as error:
            self._not_reserved(step, error)
            return
        if segment is None:
            return
        self.refused = ""
        self._update_stats()
        logger.info(
            "parking: %s for 2 states of at most %s",
            human(segment.geometry.total_bytes),
            human(segment.geometry.slot_bytes),
        )

    def _fits(self, layout: PhasePlan) -> bool:
        """Whether the newest generation has room, and its operator ids mean what they mean in the ring."""
        newest, ring = self.newest, self._memory.descriptor
        if newest is None or layout.layout.image_len > newest.geometry.slot_bytes or ring is None:
            return False
        compared = newest.generation, ring.generation
        if compared != self._compared:  # it takes a while for many operators
            self._compared = compared
            self._same_operators = operators_id(newest.descriptor) == operators_id(ring)
        return self._same_operators

    def _not_reserved(self, step: int, error: Exception) -> None:
        self._put_off(step, error)
        size = 0 if self._layout is None else self._layout.layout.image_len
        self._refuse(f"no memory for 2 states of {human(size)}: {error}")

    def _refuse(self, why: str) -> None:
        self.refused = why
        if not self._refused_before:
            self._refused_before = True
            logger.warning("parking: %s; training goes on without", why)
            self._memory.session.notice("warning", "not_parking", why)

    def _update_stats(self) -> None:
        self._stats.park_memory_bytes = self._generations.total_bytes

    # -- giving up -------------------------------------------------------------------------------

    def tidy(self) -> None:
        """Free states that are outdated or older than every rank's newest suffix, and empty generations."""
        held = [r for r in _records(self._memory) if r.sealed]
        if held:
            outlived = self._outlived()
            counts = {r.key for r in parked_records(self._memory) if r.iteration >= outlived}
            for record in held:
                if record.key not in counts:
                    self._memory.parks.of(record).free_slot(record.index)
        for segment in list(self._memory.parks)[:-1]:
            if segment.states() <= {SlotState.FREE}:
                self._give_back(segment)
                self._update_stats()

    def _outlived(self) -> int:
        """The first iteration to which a recovery of this run may go back."""
        table = self._memory.table
        own = find_suffix(table.records(), self._memory.num_operators, epochs=table.epochs)
        if isinstance(own, NoSuffix):
            return -1
        # The floor may still be that of an abandoned history, and this rank's own suffix is of this one.
        return min(own.end, table.ring_hint.floor)

    # -- slots -----------------------------------------------------------------------------------

    def claim(self, iteration: int, phase: int) -> tuple[MappedSegment, int, SlotHeader] | str:
        """A locked slot in state filling, never that of the newest parked state; or why there is none."""
        segment, table, layout = self.newest, self._memory.table, self.layout
        if segment is None or layout is None:
            return f"there is no room for it: {self.refused or 'the daemon is still making it'}"
        for index in range(segment.geometry.num_slots):
            segment.seal(index)  # what an earlier trainer had filled, if the daemon has not done it yet
        records = _records(self._memory)
        for record in self._in_order(segment, records):
            if not segment.try_lock_slot(record.index):
                continue
            header = SlotHeader(
                state=SlotState.FILLING,
                iteration=iteration,
                image_len=layout.layout.image_len,
                sequence=1 + max(r.sequence for r in records),
                layout_id=layout.layout.layout_id,
                writer_pid=os.getpid(),
                phase=phase,
                epoch=table.epoch,
                epoch_start=table.epoch_start,
            )
            segment.begin_filling(record.index, header)
            return segment, record.index, header
        return "its slots are being read"

    def _in_order(self, segment: MappedSegment, records: list[SlotRecord]) -> list[SlotRecord]:
        """The slots of the newest generation that may be overwritten, the best choice first."""
        counts = [r.key for r in parked_records(self._memory)]
        kept = set(counts[-1:])
        own = [r for r in records if r.generation == segment.generation and r.key not in kept]
        return sorted(own, key=lambda r: (r.key in counts, r.sequence))


# -- in other memory -------------------------------------------------------------------------------


class ParkedCopy(SnapshotImage):
    """A parked image, copied to private memory.

    Raises:
        CorruptionError: it differs from what was sealed.
    """

    def __init__(self, image: memoryview, record: SlotRecord) -> None:
        # Anonymous memory, aligned as in a segment: tensors are viewed in it.
        private = memoryview(mmap.mmap(-1, max(len(image), 1)))
        private[: len(image)] = image
        view = _verified(private[: len(image)], record)
        super().__init__(record.iteration, view, HostMemory(private), 0, record.phase)

    @classmethod
    def read(cls, session: Session, piece: SnapshotToLoad, cards: tuple[NodeCard, ...]) -> ParkedCopy:
        """Copy it from a file on this node, or have the daemon fetch it; blocks until it has arrived.

        A damaged local copy is left to the daemon: it repairs it from other copies, or quarantines it.

        Raises:
            CorruptionError: what was fetched differs from what was sealed.
            AttachRefused: there is no memory for it, or no node holds it any more.
            DaemonUnavailable: the daemon is away, or no intact copy can be reached.
        """
        for source in piece.sources:
            if source.node != session.node_id:
                continue
            try:
                found = cls._here(session, piece.record, source)
            except CorruptionError as error:
                text = f"{source.segment}: {error}; another copy is asked for"
                logger.error("%s", text)
                session.notice("error", "digest_mismatch", text)
                continue
            if found is not None:
                return found
        return cls._fetched(session, piece, cards)

    @classmethod
    def _here(cls, session: Session, record: SlotRecord, source: SnapshotCopy) -> ParkedCopy | None:
        """None if this process cannot read it in place; the daemon may be able to."""
        name = source.segment
        if name != os.path.basename(name):  # the name comes from another node
            return None
        try:
            file = SlotFile(Path(session.segment_dir, name), "parked")
            if (file.descriptor.job, file.descriptor.run) != session.run:
                return None
            with file.held(replace(record, index=source.index)) as image:
                return None if image is None else cls(image, record)
        except (OSError, SegmentError) as error:
            logger.info("%s is not read directly: %s", name, error)
            return None

    @classmethod
    def _fetched(cls, session: Session, piece: SnapshotToLoad, cards: tuple[NodeCard, ...]) -> ParkedCopy:
        record = piece.record
        rank = parse_segment_file_name(piece.sources[0].segment, "parked").rank
        wanted = (fetch_piece(piece, sealed_at_ns=0),)
        try:
            info = session.fetch_for_reading(rank, "parked", wanted, cards).result(_GRANT_S)
        except TimeoutError as error:
            raise DaemonUnavailable(
                "the daemon makes no memory for it", operation="read parked state"
            ) from error
        message = f"the copy of the state parked at iteration {record.iteration} was taken away"
        try:
            file = SlotFile(Path(info.path), "parked")
            wait_until_sealed(session, info.generation, record.iteration, lambda: file.header(0))
            # Nobody overwrites it; and the daemon may hold its slot for a moment after it is sealed.
            image = file.image(replace(record, index=0))
            if image is not None:
                return cls(image, record)
        except (OSError, SegmentError) as error:  # a daemon that is restarted removes it
            raise DaemonUnavailable(message, operation="read parked state") from error
        finally:
            session.drop(info.generation)
        raise DaemonUnavailable(message, operation="read parked state")


class CopiedImage(SnapshotImage):
    """A peer's tensors and this rank's own rest as one dense image; made at the first look at its view.

    Args:
        peer: its parked image, into which this rank's buffers are copied.
        own: this rank's snapshot of the same iteration, which may be on its way.
    """

    def __init__(self, peer: ParkedCopy, own: SnapshotImage) -> None:
        super().__init__(peer.iteration, self._joined, peer.memory, peer.base, peer.phase)
        self._peer, self._own = peer, own

    def scalars(self) -> dict[str, Any]:
        """This rank's own; but the peer knows which of its parameters have no optimizer state."""
        return {**self._own.scalars(), "absent": self._peer.scalars()["absent"]}

    def _joined(self) -> ImageView:
        self._take_buffers()
        return self._peer.view

    def _take_buffers(self) -> None:
        for source, entry in self._own.sources():
            if source.kind == "buffer":
                self._peer.tensor(entry).copy_(self._own.tensor(entry))
