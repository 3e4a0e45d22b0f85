"""Where a rank's parked state lies: a segment of its own with two slots, each large enough for
everything the rank has.

The state that was parked before stays until the next one is sealed. Memory is asked for in the
background when the plan is known, and again when a plan has other operators or larger images; two
generations at most exist at a time. What is parked counts like a snapshot of its iteration: a
recovery to an earlier one outdates it. It is given up when every rank has a complete newer suffix.
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
from ckptd.client.daemon_link.snapshot_image import SnapshotImage
from ckptd.client.log_lines import get_logger
from ckptd.client.model.live_state import LiveState
from ckptd.client.model.snapshot_layout import PhasePlan
from ckptd.client.pipeline.upstream_feed import BringsLogs
from ckptd.client.schedule.describe import human
from ckptd.client.schedule.snapshot_plan import SnapshotPlan
from ckptd.client.stats import Stats
from ckptd.core.recovery.snapshot_sources import SnapshotCopy, SnapshotToLoad
from ckptd.core.slots.ring import NoSuffix, SlotRecord, SlotState, find_suffix
from ckptd.core.slots.segment_format import SlotHeader
from ckptd.core.slots.segment_names import parse_segment_file_name
from ckptd.core.slots.slots import epoch_table, is_stale
from ckptd.cuda.engine import CopyEngine, HostMemory
from ckptd.errors import AttachRefused, CorruptionError, DaemonUnavailable, SegmentError
from ckptd.holdings import fetch_piece, header_record, operators_id
from ckptd.storage.images.image import ImageView, verify
from ckptd.storage.images.image_format import ImageError
from ckptd.transport.control.messages import NodeCard

__all__ = ["CopiedImage", "ParkMemory", "ParkedCopy", "parked_image", "parked_records"]

logger = get_logger(__name__)


_SLOTS = 2
_PAGE = 4096


def parked_records(memory: RankMemory) -> list[SlotRecord]:
    """What this rank has parked here and what still counts, oldest first; anchors are those of a
    dense image.
    """
    records = [r for r in _records(memory) if r.sealed]
    known = epoch_table(records, memory.table.epochs)
    counts = [r for r in records if not is_stale(r, known)]
    return sorted(counts, key=lambda r: (r.epoch, r.iteration, r.sequence))


def parked_image(memory: RankMemory, record: SlotRecord) -> SnapshotImage:
    """A parked state as the only image of a replay, which is dense at once.

    Raises:
        CorruptionError: what was sealed is not what is there; the slot is in quarantine now.
    """
    segment = memory.parks.of(record)
    image = segment.slot(record.index)[: record.image_len]
    try:
        verify(image, record.header_digest)
        view = ImageView(image)
    except ImageError as error:
        segment.set_state(record.index, SlotState.QUARANTINED)
        raise CorruptionError(
            f"the state parked at iteration {record.iteration} is damaged: {error}",
            operation="read parked state",
            ids={"generation": record.generation, "slot": record.index},
        ) from error
    base = segment.slot_base(record.index)
    return SnapshotImage(record.iteration, view, segment.memory, base, record.phase)


def _records(memory: RankMemory) -> list[SlotRecord]:
    """Every slot that is not damaged, of every generation."""
    found = []
    for segment in memory.parks:
        everything = (1 << segment.descriptor.num_operators) - 1
        anchors = everything.to_bytes((everything.bit_length() + 7) // 8, "little")
        for index in range(segment.geometry.num_slots):
            header = segment.header(index)
            if header is None:
                found.append(SlotRecord(segment.generation, index, SlotState.FREE))
            else:
                held = header.state in (SlotState.FILLED, SlotState.SEALED)
                of = anchors if held else b""
                found.append(header_record(header, segment.generation, index, of))
    return found


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
        self._told = False
        self._compared, self._alike = (-1, -1), False
        for segment in memory.parks:
            try:
                self._register(segment)
            except RuntimeError as error:
                self._refuse(str(error))
        self._tell()

    @property
    def layout(self) -> PhasePlan | None:
        """What is parked, and into which bytes; None as long as there is no room for it."""
        fits = self._layout is not None and self._fits(self._layout)
        return self._layout if fits else None

    # -- size ------------------------------------------------------------------------------------

    def fit(self, plan: SnapshotPlan, step: int) -> None:
        """Have room for the state as ``plan`` knows it; where that is there, do nothing. Waits for
        nothing.
        """
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
        self._tell()
        logger.info(
            "parking: %s for 2 states of at most %s",
            human(segment.geometry.total_bytes),
            human(segment.geometry.slot_bytes),
        )

    def _fits(self, layout: PhasePlan) -> bool:
        newest = self.newest
        fits = newest is not None and layout.layout.image_len <= newest.geometry.slot_bytes
        return fits and self._of_the_rings_operators()

    def _of_the_rings_operators(self) -> bool:
        """Whether operator ids mean in the newest generation what they mean in the ring."""
        newest, ring = self.newest, self._memory.descriptor
        if newest is None or ring is None:
            return False
        compared = newest.generation, ring.generation
        if compared != self._compared:  # it takes a while where there are many operators
            self._compared = compared
            self._alike = operators_id(newest.descriptor) == operators_id(ring)
        return self._alike

    def _not_reserved(self, step: int, error: Exception) -> None:
        self._put_off(step, error)
        size = 0 if self._layout is None else self._layout.layout.image_len
        self._refuse(f"no memory for 2 states of {human(size)}: {error}")

    def _refuse(self, why: str) -> None:
        self.refused = why
        if not self._told:
            self._told = True
            logger.warning("parking: %s; training goes on without", why)
            self._memory.session.notice("warning", "not_parking", why)

    def _tell(self) -> None:
        self._stats.park_memory_bytes = self._generations.total_bytes

    # -- giving up -------------------------------------------------------------------------------

    def tidy(self) -> None:
        """Give up what is outdated, what every rank has a complete newer suffix for, and
        generations that hold nothing any more.
        """
        held = [r for r in _records(self._memory) if r.sealed]
        if held:
            outlived = self._outlived()
            counts = {r.key for r in parked_records(self._memory) if r.iteration >= outlived}
            for record in held:
                segment = self._memory.parks.of(record)
                if record.key not in counts and segment.try_lock_slot(record.index):
                    segment.set_state(record.index, SlotState.FREE)
                    segment.unlock_slot(record.index)
        for segment in list(self._memory.parks)[:-1]:
            headers = map(segment.header, range(segment.geometry.num_slots))
            if all(h is None or h.state is SlotState.FREE for h in headers):
                self._give_back(segment)
                self._tell()

    def _outlived(self) -> int:
        """No recovery of this run goes back before this iteration."""
        table = self._memory.table
        own = find_suffix(table.records(), self._memory.num_operators, epochs=table.epochs)
        if isinstance(own, NoSuffix):
            return -1
        # The floor may still be that of an abandoned history, and this rank's own suffix is of this one.
        return min(own.end, table.ring_hint.floor)

    # -- slots -----------------------------------------------------------------------------------

    def claim(self, iteration: int, phase: int) -> tuple[MappedSegment, int, SlotHeader] | str:
        """A locked slot that is being filled now; what was sealed last stays. Or why there is none."""
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


_GRANT_S = 700.0  # longer than the session waits for memory to be made


class ParkedCopy(SnapshotImage):
    """A parked image in private memory.

    Raises:
        CorruptionError: it is not what was sealed.
    """

    def __init__(self, image: memoryview, record: SlotRecord) -> None:
        # Anonymous memory, aligned as in a segment: tensors are viewed in it.
        private = memoryview(mmap.mmap(-1, max(len(image), 1)))
        private[: len(image)] = image
        try:
            verify(private[: len(image)], record.header_digest)
            view = ImageView(private[: len(image)])
        except ImageError as error:
            raise CorruptionError(
                f"the state parked at iteration {record.iteration} is damaged: {error}",
                operation="read parked state",
            ) from error
        super().__init__(record.iteration, view, HostMemory(private), 0, record.phase)

    @classmethod
    def read(cls, session: BringsLogs, piece: SnapshotToLoad, cards: tuple[NodeCard, ...]) -> ParkedCopy:
        """From a file on this node, or brought here by the daemon; waits until it is here.

        What is damaged here is left to the daemon: it mends it from other copies, or puts it in quarantine.

        Raises:
            CorruptionError: what was brought is not what was sealed.
            AttachRefused: there is no memory for it, or nobody holds it any more.
            DaemonUnavailable: the daemon is away, or it cannot be brought here: no copy of it is
                whole, or can be reached.
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
        return cls._brought(session, piece, cards)

    @classmethod
    def _here(cls, session: BringsLogs, record: SlotRecord, source: SnapshotCopy) -> ParkedCopy | None:
        """None if it cannot be read in place; the daemon may be able to."""
        name = source.segment
        if name != os.path.basename(name):  # a node has told this name
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
    def _brought(cls, session: BringsLogs, piece: SnapshotToLoad, cards: tuple[NodeCard, ...]) -> ParkedCopy:
        record = piece.record
        rank = parse_segment_file_name(piece.sources[0].segment, "parked").rank
        wanted = (fetch_piece(piece, sealed_at_ns=0),)
        try:
            info = session.fetch_for_reading(rank, "parked", wanted, cards).result(_GRANT_S)
        except TimeoutError as error:
            raise DaemonUnavailable(
                "the daemon makes no memory for it", operation="read parked state"
            ) from error
        try:
            file = SlotFile(Path(info.path), "parked")
            wait_until_sealed(session, info.generation, record.iteration, lambda: file.header(0))
            # Nobody overwrites it; and the daemon may hold its slot for a moment after it is sealed.
            image = file.image(replace(record, index=0))
            if image is not None:
                return cls(image, record)
        except (OSError, SegmentError) as error:  # a daemon that is restarted removes it
            raise _taken_away(record) from error
        finally:
            session.drop(info.generation)
        raise _taken_away(record)


def _taken_away(record: SlotRecord) -> DaemonUnavailable:
    return DaemonUnavailable(
        f"the copy of the state parked at iteration {record.iteration} was taken away",
        operation="read parked state",
    )


class CopiedImage(SnapshotImage):
    """A peer's tensors with what is this rank's own, as one dense image; made when it is looked at first.

    Args:
        peer: its parked image, which is changed: this rank's buffers go where the peer's are.
        own: this rank's snapshot of the same iteration, which may be on its way.
    """

    def __init__(self, peer: ParkedCopy, own: SnapshotImage) -> None:
        super().__init__(peer.iteration, self._joined, peer.memory, peer.base, peer.phase)
        self._peer, self._own = peer, own

    def scalars(self) -> dict[str, Any]:
        """Our own; but which parameters have no optimizer state is told with the tensors."""
        theirs, ours = self._peer.scalars(), self._own.scalars()
        return {**ours, "absent": theirs["absent"]}

    def _joined(self) -> ImageView:
        self._take_buffers()
        return self._peer.view

    def _take_buffers(self) -> None:
        for source, entry in self._own.sources():
            if source.kind == "buffer":
                self._peer.tensor(entry).copy_(self._own.tensor(entry))
