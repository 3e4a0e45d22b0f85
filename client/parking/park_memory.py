"""Where a rank's parked state lies: a segment of its own with two slots, each large enough for
everything the rank has.

The state that was parked before stays until the next one is sealed. Memory is asked for in the
background when the plan is known, and again when a plan has other operators or larger images; two
generations at most exist at a time. What is parked counts like a snapshot of its iteration: a
recovery to an earlier one outdates it. It is given up when every rank has a complete newer suffix.
"""

from __future__ import annotations

import os

from ckptd.client.daemon_link.auxiliary_segments import AuxiliarySegments
from ckptd.client.daemon_link.mapped_segment import MappedSegment
from ckptd.client.daemon_link.rank_memory import RankMemory
from ckptd.client.daemon_link.snapshot_image import SnapshotImage
from ckptd.client.log_lines import get_logger
from ckptd.client.model.live_state import LiveState
from ckptd.client.model.snapshot_layout import PhasePlan
from ckptd.client.schedule.snapshot_plan import SnapshotPlan, human
from ckptd.client.stats import Stats
from ckptd.core.slots.ring import NoSuffix, SlotRecord, SlotState, find_suffix
from ckptd.core.slots.segment_format import SlotHeader
from ckptd.core.slots.slots import epoch_table, is_stale
from ckptd.cuda.engine import CopyEngine
from ckptd.errors import AttachRefused, CorruptionError, DaemonUnavailable
from ckptd.holdings import header_record, operators_id
from ckptd.storage.images.image import ImageView, verify
from ckptd.storage.images.image_format import ImageError

__all__ = ["ParkMemory", "parked_image", "parked_records"]

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
        self._stats.park_memory_bytes = self._total_bytes

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
