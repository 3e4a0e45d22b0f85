"""The memory of a rank's boundary log; writing one iteration's log, or comparing it with a replay.

Segments are requested from the daemon when the size of an iteration is known. States: none (not requested,
or refused: training continues without a log), requested, available. Another generation is requested when
iterations outgrow the slots, or windows their number; at most two exist at a time.

A fill appends records: each is copied to the slot when it is sent, and the image's header is written at
the end of the step. Only the total size of an iteration must be known before, and iterations may differ.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ckptd.client.capture.comparison import Differences
from ckptd.client.daemon_link.mapped_segment import MappedSegment, SlotTable
from ckptd.client.daemon_link.rank_memory import RETRY_STEPS, AuxiliarySegments, RankMemory
from ckptd.client.log_lines import get_logger
from ckptd.client.model.snapshot_layout import SAFETENSORS_DTYPES
from ckptd.client.pipeline.log_reader import (
    LogFacts,
    data_offset_of,
    facts_of,
    log_payload,
)
from ckptd.client.schedule.snapshot_plan import SnapshotPlan, human
from ckptd.client.stats import Stats
from ckptd.core.slots.boundary import (
    DATA_ALIGNMENT,
    RecordKey,
    choose_log_slot,
    logged_iterations,
    needed_from,
    padding_name,
    parse_record_name,
    record_name,
    slots_for_log,
)
from ckptd.core.slots.segment_format import SlotHeader
from ckptd.core.slots.slots import SlotRecord, SlotState
from ckptd.cuda.engine import CopyEngine, CopyItem
from ckptd.errors import AttachRefused, DaemonUnavailable
from ckptd.storage.image import ImageLayout, ImageView, verify
from ckptd.storage.image_format import ImageError, TensorEntry

logger = get_logger(__name__)


# Sizes in the JSON of a header: of a record without its name but with its digest; and of a header without
# records.
_RECORD_HEADER_BYTES = 160
_FIXED_HEADER_BYTES = 2048
_PAGE = 4096
_KEPT_LAYOUTS = 8


def header_room(num_records: int) -> int:
    """The bytes that a slot reserves for the header of an image with this many records, including padding."""
    wanted = _FIXED_HEADER_BYTES + 2 * num_records * _RECORD_HEADER_BYTES
    return -(-wanted // _PAGE) * _PAGE


@dataclass(slots=True)
class Room:
    """The size of an iteration: its records, and their bytes with each record aligned."""

    num_records: int = 0
    data_bytes: int = 0

    def add(self, nbytes: int) -> None:
        self.num_records += 1
        self.data_bytes += -(-nbytes // DATA_ALIGNMENT) * DATA_ALIGNMENT

    def at_least(self, other: Room) -> Room:
        """The maximum of both sizes."""
        return Room(max(self.num_records, other.num_records), max(self.data_bytes, other.data_bytes))

    @property
    def slot_bytes(self) -> int:
        return header_room(self.num_records) + self.data_bytes


# Builds the image layout of some records whose data are in place, at this offset.
Layouts = Callable[[tuple[TensorEntry, ...], int], ImageLayout]


def make_layouts(identity: Mapping[str, str]) -> Layouts:
    """The layouts of a rank's logs. Recent ones are kept: most iterations are equal, and then a header is a
    copy with three patches.
    """

    @functools.lru_cache(_KEPT_LAYOUTS)
    def layout(entries: tuple[TensorEntry, ...], data_offset: int) -> ImageLayout:
        """Raises ValueError if the header does not fit before ``data_offset``."""
        return ImageLayout.build(
            entries,
            identity={**identity, "holds": "boundary log"},
            num_operators=1,
            anchors=0,  # even if a reader mistook it for a snapshot, nothing could be recovered from it
            data_offset=data_offset,
        )

    return layout


class LogFill:
    """A claimed slot: filled record by record, completed when the step has ended and all copies have arrived.

    Args:
        header: the header that was written when filling began.
        data_offset: the offset of the records in a slot of this segment.
        complete: called once, by the last of the training thread and the thread that watches copies.
    """

    def __init__(
        self,
        segment: MappedSegment,
        index: int,
        header: SlotHeader,
        data_offset: int,
        complete: Callable[[LogFill], None],
    ) -> None:
        self.segment, self.index, self.header = segment, index, header
        self._data_offset = self._end = data_offset
        self._complete = complete
        self._entries: list[TensorEntry] = []
        self._lock = threading.Lock()
        self._awaited = 1  # the end of the step, and each copy in flight
        self.num_records = self.data_bytes = 0
        # Out of room: for records, or for the header that names them.
        self.full = self.crowded = False
        self.spoilt = ""
        self._dropped = False

    @property
    def iteration(self) -> int:
        return self.header.iteration

    @property
    def base(self) -> int:
        """The offset of the slot in the mapped memory."""
        return self.segment.slot_base(self.index)

    def place(self, key: RecordKey, tensor: Tensor) -> CopyItem | None:
        """The place of this record; None if it, or an earlier one, does not fit."""
        nbytes = tensor.numel() * tensor.element_size()
        padding = -self._end % DATA_ALIGNMENT
        if self._end + padding + nbytes > self.segment.geometry.slot_bytes:
            self.full = True
        if self.full:
            return None
        if padding:
            name = padding_name(len(self._entries))
            self._entries.append(TensorEntry(name, "U8", (padding,)))
        name = record_name(key)
        self._entries.append(TensorEntry(name, SAFETENSORS_DTYPES[tensor.dtype], tuple(tensor.shape)))
        item = CopyItem(tensor, None, None, tensor.dtype, self._end + padding, nbytes)
        self._end += padding + nbytes
        self.num_records += 1
        self.data_bytes += nbytes
        return item

    def copying(self) -> None:
        """A copy starts; `copied` reports its end."""
        with self._lock:
            self._awaited += 1

    def copied(self, why_not: str = "") -> None:
        """A copy has ended; ``why_not`` is the reason why its bytes are not valid ("": they are)."""
        with self._lock:
            self.spoilt = self.spoilt or why_not
            self._awaited -= 1
            last = self._awaited == 0
        if last:
            self._complete(self)

    def end(self, *, keep: bool = True) -> None:
        """End the step."""
        self._dropped = not keep
        self.copied()

    def write(self, layouts: Layouts) -> bool:
        """Write the header of the image and release the slot; False if there is nothing to keep."""
        try:
            layout = None if self.spoilt or self._dropped else self._layout(layouts)
            if layout is None:
                self.segment.set_state(self.index, SlotState.FREE)
                return False
            slot = self.segment.slot(self.index)
            layout.write_header(slot, iteration=self.iteration, previous=self.header.previous, scalars_len=0)
            filled = replace(
                self.header,
                state=SlotState.FILLED,
                image_len=layout.image_len,
                layout_id=layout.layout_id,
                filled_at_ns=time.time_ns(),
            )
            self.segment.write_header(self.index, filled)
            return True
        finally:
            self.segment.unlock_slot(self.index)

    def _layout(self, layouts: Layouts) -> ImageLayout | None:
        try:
            return layouts(tuple(self._entries), self._data_offset)
        except ValueError as error:
            self.crowded, self.spoilt = True, str(error)
            return None


class Comparison:
    """Compares the tensors of a replayed iteration with its log; ``view`` is verified and constant."""

    def __init__(self, view: ImageView, iteration: int) -> None:
        self._view, self.iteration = view, iteration
        self._missing = {n for n in view.names() if parse_record_name(n) is not None}
        self.compared = 0
        self.differences = Differences()

    def add(self, key: RecordKey, tensor: Tensor) -> None:
        """Compare a record that was sent again."""
        name = record_name(key)
        if name not in self._missing:
            self.differences.add(f"{name} was not sent before")
            return
        self._missing.discard(name)
        self.compared += 1
        was = self._view.tensor(name)
        if (was.dtype, was.shape) != (SAFETENSORS_DTYPES[tensor.dtype], tuple(tensor.shape)):
            now = f"{SAFETENSORS_DTYPES[tensor.dtype]} {list(tensor.shape)}"
            self.differences.add(f"{name} was {was.dtype} {list(was.shape)}, is {now}")
            return
        sent, logged = _bytes_of(tensor), self._view.data(name)
        if sent != logged:
            self.differences.add(f"{name} has other bits", logged, sent)

    def end(self) -> Differences:
        """End the step; returns all differences."""
        for name in sorted(self._missing):
            self.differences.add(f"{name} was not sent again")
        return self.differences


def _bytes_of(tensor: Tensor) -> bytes:
    """The bytes of a tensor; copied and compared by numpy, on the calling thread alone."""
    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


# A log that was outgrown once may be outgrown again in small steps.
_GROWTH = 1.25
# Digesting this much takes the training thread about 4 ms.
_QUICKLY_SEALED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _LogSize:
    """The requested size of a log."""

    num_slots: int
    room: Room

    @property
    def total_bytes(self) -> int:
        return self.num_slots * self.room.slot_bytes

    def __str__(self) -> str:
        """For logs and ``describe()``."""
        each = f"{self.num_slots} iterations of at most {human(self.room.slot_bytes)}"
        return f"{human(self.total_bytes)} ({each}, {self.room.num_records} records)"


class LogMemory(AuxiliarySegments):
    """The segments of this rank's log.

    Args:
        memory: the rank's memory; segments of an earlier trainer are in its ``logs``.
        engine: copies into them.
        limit_bytes: the largest size of all slots; None: limited by the daemon's quota.
        replicate: whether the log has replicas on other nodes.
    """

    def __init__(
        self,
        memory: RankMemory,
        engine: CopyEngine,
        stats: Stats,
        limit_bytes: int | None,
        *,
        replicate: bool = False,
    ) -> None:
        super().__init__(memory, memory.logs, engine)
        self._stats, self._limit_bytes, self._replicate = stats, limit_bytes, replicate
        self._asked = _LogSize(0, Room())
        self._facts: LogFacts | None = None  # what is asked for tells them
        self._misleading = False  # the present log has fewer facts, and no other can be had
        for segment in memory.logs:
            try:
                self._register(segment)
            except RuntimeError as error:
                logger.warning("discarding the boundary log of an earlier trainer: %s", error)
        self._update_stats()

    @property
    def data_offset(self) -> int:
        """The offset of the records in a slot."""
        assert self.newest is not None
        return data_offset_of(self.newest.descriptor.client)

    # -- size ------------------------------------------------------------------------------------

    def fit(self, plan: SnapshotPlan, room: Room, step: int, facts: LogFacts | None = None) -> None:
        """Request a log with slots for ``room``, as many as ``plan`` may have to replay, and with ``facts``.

        Does nothing if such a log exists.
        """
        if self._misleading:
            self._drop_all()
        busy = self._coming is not None or self._full
        if busy or not room.num_records or step < self._retry_at:
            return
        num_slots = self._slots_for(plan)
        newest = self.newest
        if newest is not None:
            holds = self._holds(newest, room)
            enough = holds and newest.geometry.num_slots >= num_slots
            as_asked = newest.descriptor.replicated == self._replicate
            if enough and as_asked and not self._behind(facts):
                return
            if not holds:
                room = Room(int(_GROWTH * room.num_records), int(_GROWTH * room.data_bytes))
        size = _LogSize(num_slots, room)
        if self._limit_bytes is not None and size.total_bytes > self._limit_bytes:
            self._refuse(
                f"the log needs {size}, but limit_bytes is {human(self._limit_bytes)}: raise "
                "limit_bytes, or use smaller windows"
            )
            self._retry_at = step + RETRY_STEPS
            self._misleading = self._behind(facts)
            return
        self._asked = size
        payload = log_payload(header_room(room.num_records), facts)
        self._facts = facts
        try:
            self._coming = self._memory.reserve_auxiliary(
                "log", room.slot_bytes, num_slots, payload, replicated=self._replicate
            )
        except DaemonUnavailable as error:
            self._not_reserved(step, error)

    def collect(self, step: int) -> None:
        """Switch to the requested segment, if it is available."""
        try:
            if self._collect_segment() is None:
                return
        except (AttachRefused, DaemonUnavailable, RuntimeError) as error:
            self._misleading = isinstance(error, AttachRefused) and self._behind(self._facts)
            self._not_reserved(step, error)
            return
        self.refused = ""
        self._update_stats()
        logger.info("boundary log: %s", self._asked)

    def drop_older(self, first_needed: int | None) -> None:
        """Free generations that contain no log that is needed."""
        older = list(self._memory.logs)[:-1]
        if not older:
            return
        counts = logged_iterations(self.records(), self._memory.table.epochs).values()
        for segment in older:
            held = [r.iteration for r in counts if r.generation == segment.generation]
            if not held or (first_needed is not None and max(held) < first_needed):
                self._give_back(segment)
                self._update_stats()

    def _behind(self, facts: LogFacts | None) -> bool:
        """Whether the newest log lacks facts: plans would isolate ranks that must recover together."""
        if self.newest is None or facts is None:
            return False
        known = facts_of(self.newest.descriptor.client)
        return known is None or not known.same_as(facts)

    def _drop_all(self) -> None:
        """Discard the log: none is better than one with wrong facts. The next attempt can use its memory."""
        if any(r.state is SlotState.FILLING for r in self.records()):
            return  # copies are in flight: discard it at the top of the next step
        self._misleading = False
        for segment in list(self._memory.logs):
            self._give_back(segment)
        self._update_stats()

    def _slots_for(self, plan: SnapshotPlan) -> int:
        """Enough slots for the snapshots to which a recovery may return, and the iterations between."""
        span = max(plan.schedule.window, self._memory.table.ring_hint.span)
        every = plan.every if plan.policy_name == "dense" else 1
        return max(slots_for_log(span, every, plan.slack), plan.num_slots - plan.upload_slots)

    def _holds(self, segment: MappedSegment, room: Room) -> bool:
        header = header_room(room.num_records)
        fits = header <= self.data_offset
        return fits and self.data_offset + room.data_bytes <= segment.geometry.slot_bytes

    def _not_reserved(self, step: int, error: Exception) -> None:
        self._put_off(step, error)
        self._refuse(f"no memory for {self._asked}: {error}; retrying at step {self._retry_at}")

    def _refuse(self, why: str) -> None:
        """Do not log boundaries (or keep the present log). Logs each reason once."""
        kind = why.split(":", 1)[0]
        if kind != self.refused.split(":", 1)[0]:
            logger.warning("boundary log: %s; training continues without it", why)
            self._memory.session.notice("warning", "boundaries_not_logged", why)
        self.refused = why

    def _update_stats(self) -> None:
        segments = list(self._memory.logs)
        self._stats.log_slots = segments[-1].geometry.num_slots if segments else 0
        self._stats.log_memory_bytes = self._generations.total_bytes

    # -- slots -----------------------------------------------------------------------------------

    def records(self) -> list[SlotRecord]:
        """Every slot of every generation."""
        return [record for segment in self._memory.logs for record in segment.records()]

    def first_needed(self, *, promised: bool = True) -> int | None:
        """The first iteration that a recovery of this run may replay; if that is not known, the first one of
        this rank's newest suffix.
        """
        table: SlotTable = self._memory.table
        records, operators = table.records(), self._memory.num_operators
        if not operators:
            return None
        kept = table.promised(records, operators) if promised else ()
        return needed_from(records, operators, promised=kept, epochs=table.epochs)

    def verified(self, iteration: int) -> ImageView | None:
        """The complete log of an iteration, or None; a damaged log is quarantined."""
        found = logged_iterations(self.records(), self._memory.table.epochs).get(iteration)
        if found is None:
            return None
        segment = self._memory.logs.of(found)
        segment.seal(found.index)  # seal it first, if it is only filled
        header = segment.header(found.index)
        if header is None or header.state is not SlotState.SEALED:
            return None
        image = segment.slot(found.index)[: header.image_len]
        try:
            verify(image, header.header_digest)
            return ImageView(image)
        except ImageError as error:
            logger.error("the log of iteration %d is damaged: %s", iteration, error)
            segment.set_state(found.index, SlotState.QUARANTINED)
            return None

    def claim(self, iteration: int) -> tuple[int, SlotHeader] | str:
        """A claimed slot of the newest generation, locked, and its header; or the reason why none is free."""
        while True:
            first_needed = self.first_needed()
            self.drop_older(first_needed)
            claimed = self._claim(iteration, first_needed)
            if isinstance(claimed, str):
                # A gap in the logs would last until the promise moves on. If logs are missing, the recovery
                # is global, and no state is lost.
                claimed = self._claim(iteration, self.first_needed(promised=False))
                self._stats.log_overrides += not isinstance(claimed, str)
            if not isinstance(claimed, str) or not self._seal_a_snapshot():
                return claimed

    def _seal_a_snapshot(self) -> bool:
        """Try to seal a snapshot here: steps may outrun the daemon, and only sealed ones free slots."""
        table = self._memory.table
        waiting = [
            r for r in table.records() if r.state is SlotState.FILLED and r.image_len <= _QUICKLY_SEALED_BYTES
        ]
        if not waiting:
            return False
        oldest = min(waiting, key=lambda r: r.sequence)
        table.segment(oldest.generation).seal(oldest.index)
        self._stats.sealed_here += 1
        return True

    def _claim(self, iteration: int, first_needed: int | None) -> tuple[int, SlotHeader] | str:
        segment, table = self.newest, self._memory.table
        assert segment is not None
        records, busy = self.records(), set[tuple[int, int]]()
        while True:
            choice = choose_log_slot(
                records,
                segment.generation,
                needed_from=first_needed,
                busy=busy,
                epochs=table.epochs,
            )
            if choice.record is None:
                return choice.reason
            index = choice.record.index
            if segment.try_lock_slot(index):
                break
            busy.add(choice.record.key)
        if choice.record.state is SlotState.FILLED:
            segment.set_state(index, SlotState.FREE)  # an unneeded log is not sealed either
        header = SlotHeader(
            state=SlotState.FILLING,
            iteration=iteration,
            sequence=1 + max(r.sequence for r in records),
            writer_pid=os.getpid(),
            epoch=table.epoch,
            epoch_start=table.epoch_start,
        )
        segment.begin_filling(index, header)
        return index, header
