"""Capture: one snapshot, from the top of the loop to a filled slot.

The training thread chooses the slot, gathers the step scalars and hands a prepared list of copies to the engine; everything
else happens beside it. A snapshot is complete when two parties have arrived: the copies, and the model's first forward of
the step, at which the random state is recorded once more (a data iterator created in the first step of a resumed run draws
from the global generators, and replay must undo exactly that). The later one finishes the slot.

If a source changed while it was copied (its version counter moved before the optimizer's step), the snapshot is discarded,
not sealed: a torn copy must never be recoverable.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ckptd.client import values
from ckptd.client.binding import Binding, local
from ckptd.client.layout import PhasePlan
from ckptd.client.segment import MappedSegment, SlotTable
from ckptd.client.sources import LiveSources
from ckptd.cuda.engine import CopyEngine, CopyItem, CopyList
from ckptd.memory.ring import SlotState, choose_slot
from ckptd.memory.segment_format import SlotHeader

if TYPE_CHECKING:
    from ckptd.client.stats import Stats

__all__ = ["SMALL_BUFFER_BYTES", "Capture", "Fill", "write_image", "zero_missing"]

logger = logging.getLogger(__name__)

_DRAIN_S = 1.0
# Buffers up to this size are copied by the training thread: a native kernel may change them in the forward without
# counting up their version (batch norm does), so that a copy beside it could be torn and nobody would notice.
SMALL_BUFFER_BYTES = 1 << 20


def write_image(
    segment: MappedSegment, index: int, plan: PhasePlan, header: SlotHeader, packed: bytes
) -> None:
    """Complete an image whose tensors are in their places, with its step scalars, and declare its slot filled."""
    slot = segment.slot(index)[: plan.layout.image_len]
    slot[plan.scalars_offset : plan.scalars_offset + len(packed)] = packed
    slot[plan.static_offset : plan.static_offset + len(plan.static)] = plan.static
    plan.layout.write_header(
        slot, iteration=header.iteration, previous=header.previous, scalars_len=len(packed)
    )
    filled = replace(header, state=SlotState.FILLED, filled_at_ns=time.time_ns())
    segment.write_header(index, filled)


def zero_missing(segment: MappedSegment, index: int, sources: LiveSources) -> None:
    """State that does not exist yet is recorded as absent; its bytes are zero, not those of an older image."""
    base, plan = segment.slot_base(index), sources.plan
    for i in sources.missing() if sources.absent else ():
        start = base + plan.offsets[i]
        segment.memory.tensor[start : start + plan.layout.entries[i].nbytes].zero_()


class Fill:
    """A snapshot in the making: the slot it goes to, and who has yet to arrive."""

    def __init__(
        self,
        segment: MappedSegment,
        index: int,
        plan: PhasePlan,
        header: SlotHeader,
        scalars: dict[str, Any],
        awaited: set[str],
    ) -> None:
        self.segment, self.index, self.plan, self.header, self.scalars = (
            segment,
            index,
            plan,
            header,
            scalars,
        )
        self.versions: list[tuple[Tensor, int, str]] = []
        self.torn = ""
        self.error: BaseException | None = None
        self.told = False  # the error was counted
        self._lock = threading.Lock()
        self._awaited = awaited

    def arrive(self, party: str) -> bool:
        """Note an arrival; True for the one that completes the fill."""
        with self._lock:
            if party not in self._awaited:
                return False
            self._awaited.discard(party)
            return not self._awaited

    def check_versions(self) -> None:
        for tensor, version, name in self.versions:
            if tensor._version != version:
                self.torn = name
                return


@dataclass(frozen=True, slots=True)
class _Split:
    """One phase's copies: those that run beside training, and those of restless tensors, which do not; kept while they are the same."""

    items: CopyList
    at_once: set[str]
    steady: CopyList
    restless: list[CopyItem]
    named: list[tuple[Tensor, str]]

    @classmethod
    def of(cls, items: CopyList, named: list[tuple[Tensor, str]], at_once: set[str]) -> _Split:
        if not at_once:
            return cls(items, at_once, items, [], named)
        addresses = {local(t).data_ptr() for t, n in named if n in at_once}
        steady = CopyList(i for i in items if i.tensor.data_ptr() not in addresses)
        restless = [i for i in items if i.tensor.data_ptr() in addresses]
        return cls(items, at_once, steady, restless, [(t, n) for t, n in named if n not in at_once])


class Capture:
    """Fills slots, one at a time.

    Args:
        binding: where the live tensors are.
        table: this rank's segments; the newest generation is filled.
        engine: copies for the device of the parameters.
        num_operators: how many operators a suffix must cover.
        stats: counters to keep.
        finish: runs a closure off the training thread (the session's thread); False if it cannot take it.
        drain: waits until what ``finish`` was given is done, at most so many seconds.
        filled: called, off the training thread, when a slot is filled.
        connected: whether the daemon is there: while it is away, it cannot tell what the other ranks still need.
        restless: names of what is known to change before the optimizer's step (large buffers that a forward updates); added to.
    """

    def __init__(
        self,
        binding: Binding,
        table: SlotTable,
        engine: CopyEngine,
        *,
        num_operators: int,
        stats: Stats,
        finish: Callable[[Callable[[], None]], bool],
        drain: Callable[[float], object],
        filled: Callable[[MappedSegment, int, int], None],
        connected: Callable[[], bool],
        restless: set[str],
    ) -> None:
        self._binding, self._table, self._engine = binding, table, engine
        self._num_operators, self._stats = num_operators, stats
        self._finish, self._drain, self._filled = finish, drain, filled
        self._connected = connected
        self._fill: Fill | None = None
        self._sequence = table.next_sequence()
        self._sources: dict[int, LiveSources] = {}
        self._splits: dict[int, _Split] = {}
        self._state_size = -1
        # Buffers seen to change while they were copied are copied by the training thread instead.
        self._restless = restless
        self._small = {
            name
            for name, buffer in binding.buffers().items()
            if buffer.numel() * buffer.element_size() <= SMALL_BUFFER_BYTES
        }
        self._claimed: tuple[MappedSegment, int] | None = None
        self._broken = False
        self._sealing_s = 0.0
        self.need_generation = ""
        self.outgrown = 0
        # The ring was filled up by what the other ranks need: the next snapshot may find no slot.
        self.crowded = False

    def begin(self, step: int, plan: PhasePlan, previous: int, scalars: dict[str, Any]) -> bool:
        """Start the snapshot of ``step``; False if no slot can be had (``need_generation`` may say why)."""
        self.settle()
        segment = self._table.segments[-1]
        if plan.layout.image_len > segment.geometry.slot_bytes:
            self._stats.no_slot += 1
            self.need_generation = f"a snapshot of {plan.layout.image_len} bytes does not fit slots of {segment.geometry.slot_bytes}"
            return False
        index = self._claim(segment)
        if index is None:
            return False
        header = SlotHeader(
            state=SlotState.FILLING,
            iteration=step,
            previous=previous,
            image_len=plan.layout.image_len,
            sequence=self._sequence,
            layout_id=plan.layout.layout_id,
            writer_pid=os.getpid(),
            phase=plan.phase,
            epoch=self._table.epoch,
            epoch_start=self._table.epoch_start,
        )
        self._sequence += 1
        self._claimed = segment, index
        segment.begin_filling(index, header)
        mask = sum(1 << i for i in plan.anchored)
        self._table.note_anchors(segment.generation, index, header.sequence, mask)
        # Where the host runs ahead of the device, only the training thread can say whether a source changed too early.
        parties = {"copies", "forward"} | (set() if self._engine.host_waits else {"sources"})
        fill = Fill(segment, index, plan, header, scalars, parties)
        items, sources, kept = self._items(plan, fill)
        self._fill = fill
        self._claimed = None
        self._engine.begin(
            items,
            segment.memory,
            segment.slot_base(index),
            lambda error: self._copied(fill, error),
            lambda: [*sources.packed_items(), *kept],
        )
        return True

    def abort(self) -> None:
        """Give up the slot that was claimed, if its copy has not begun; wait for one that has."""
        claimed, self._claimed = self._claimed, None
        self.settle()
        if claimed is not None:
            segment, index = claimed
            segment.set_state(index, SlotState.FREE)
            segment.unlock_slot(index)

    def take_broken(self) -> bool:
        """Whether a snapshot that was begun came to nothing since the last call: the chain is broken there."""
        broken, self._broken = self._broken, False
        return broken

    def take_sealing_s(self) -> float:
        """Seconds since the last call that the training thread spent on sealing what the daemon had not come to."""
        taken, self._sealing_s = self._sealing_s, 0.0
        return taken

    def first_forward(self, rng: Callable[[], dict[str, Any]]) -> None:
        """The step's first forward of the model is about to run (training thread)."""
        fill = self._fill
        if fill is not None and "rng_forward" not in fill.scalars and "forward" in fill._awaited:
            fill.scalars["rng_forward"] = rng()
            self._arrive(fill, "forward")

    def settle(self) -> float:
        """Wait until the sources may change again; returns the seconds waited (training thread)."""
        fill = self._fill
        if fill is None:
            return 0.0
        waited = self._engine.wait()
        if not self._engine.host_waits:
            fill.check_versions()
            self._arrive(fill, "sources")
        # A step without a forward of the model has nothing more to record.
        self._arrive(fill, "forward")
        self._fill = None
        if fill.error is not None:
            self._failed(fill)
        elif fill.torn:
            self._restless.add(fill.torn)
            logger.warning(
                "snapshot of step %d discarded: %s changed before the optimizer's step; it is copied synchronously from now on",
                fill.header.iteration,
                fill.torn,
            )
            self._stats.torn += 1
            self._broken = True
        return waited

    # -- beside the training thread --------------------------------------------------------------

    def _copied(self, fill: Fill, error: BaseException | None) -> None:
        fill.error = error
        if self._engine.host_waits:
            fill.check_versions()
        self._arrive(fill, "copies")

    def _arrive(self, fill: Fill, party: str) -> None:
        if fill.arrive(party) and not self._finish(lambda: self._complete(fill)):
            self._complete(fill)

    def _complete(self, fill: Fill) -> None:
        """Declare the slot filled, or free if what was copied cannot be used."""
        try:
            usable = fill.error is None and not fill.torn and self._write_image(fill)
        except Exception as error:  # noqa: BLE001 - the slot must be given back whatever was wrong with its content
            usable = self._refuse(fill, f"{type(error).__name__}: {error}")
        if fill.error is not None:
            self._failed(fill)  # a device may tell of its error only now
        if not usable:
            fill.segment.set_state(fill.index, SlotState.FREE)
        fill.segment.unlock_slot(fill.index)
        if usable:
            self._stats.snapshots += 1
            self._stats.snapshot_bytes = fill.plan.layout.image_len
            if self._engine.last_copy_s:
                self._stats.capture_gb_per_s = (
                    fill.plan.layout.image_len / self._engine.last_copy_s / 1e9
                )
            self._filled(fill.segment, fill.index, fill.header.iteration)

    def _failed(self, fill: Fill) -> None:
        """Count a copy that failed, once: told again after the chain has begun anew, it would break that, too."""
        if fill.told:
            return
        fill.told = True
        logger.error(
            "snapshot of step %d failed while copying: %s", fill.header.iteration, fill.error
        )
        self._stats.failed += 1
        self._broken = True

    def _write_image(self, fill: Fill) -> bool:
        plan = fill.plan
        try:
            packed = values.pack(fill.scalars, "step scalars")
        except values.UnsupportedValue as error:
            return self._refuse(fill, str(error))
        if len(packed) > plan.scalars_capacity:
            self.outgrown = len(packed)
            return self._refuse(
                fill,
                f"step scalars grew to {len(packed)} bytes, {plan.scalars_capacity} are reserved",
            )
        write_image(fill.segment, fill.index, plan, fill.header, packed)
        return True

    def _refuse(self, fill: Fill, reason: str) -> bool:
        logger.error("snapshot of step %d dropped: %s", fill.header.iteration, reason)
        self._stats.failed += 1
        self._broken = True
        return False

    # -- choosing --------------------------------------------------------------------------------

    def _claim(self, segment: MappedSegment) -> int | None:
        busy: set[tuple[int, int]] = set()
        drained = False
        self.need_generation = ""
        hard = self._table.is_hard(connected=self._connected())
        for _ in range(segment.geometry.num_slots + 2):
            records = self._table.records()
            choice = choose_slot(
                records,
                self._num_operators,
                busy=busy,
                generation=segment.generation,
                protected=self._table.promised(records, self._num_operators, hard=hard),
                hard=hard,
                epochs=self._table.epochs,
            )
            if choice.index is None:
                waiting = [
                    r
                    for r in records
                    if r.state is SlotState.FILLED and (r.generation, r.index) not in busy
                ]
                if waiting:
                    # The daemon is away or behind. Sealing takes milliseconds; a broken chain would cost a window.
                    oldest = min(waiting, key=lambda r: r.sequence)
                    started = time.perf_counter()
                    self._table.segment(oldest.generation).seal(oldest.index)
                    self._sealing_s += time.perf_counter() - started
                    self._stats.sealed_here += 1
                    continue
                if not drained and any(r.state is SlotState.FILLING for r in records):
                    # Steps shorter than a thread switch outrun whoever finishes the snapshots: let it catch up.
                    drained = True
                    self._drain(_DRAIN_S)
                    continue
                self._stats.no_slot += 1
                self.need_generation = choice.reason
                return None
            if segment.try_lock_slot(choice.index):
                self._stats.floor_overrides += choice.overrides_floor
                self.crowded = hard and not choice.left
                return choice.index
            busy.add((segment.generation, choice.index))
        self._stats.no_slot += 1
        self.need_generation = "every slot is being read"
        return None

    # -- sources ---------------------------------------------------------------------------------

    def _items(self, plan: PhasePlan, fill: Fill) -> tuple[CopyList, LiveSources, list[CopyItem]]:
        """What is copied beside training, where it comes from, and copies made here and now of what is restless."""
        sources = self._sources.get(plan.phase)
        if sources is None or sources.plan is not plan:
            sources = self._sources[plan.phase] = LiveSources(self._binding, plan)
        items = sources.items()
        fill.scalars["absent"] = sources.absent
        zero_missing(fill.segment, fill.index, sources)
        at_once = self._restless | self._small
        split = self._splits.get(plan.phase)
        if split is None or split.items is not items or split.at_once != at_once:
            split = self._splits[plan.phase] = _Split.of(items, sources.named, at_once)
        fill.versions = [(t, t._version, n) for t, n in split.named]
        return split.steady, sources, [replace(i, tensor=i.tensor.clone()) for i in split.restless]

    def unknown_state(self) -> str:
        """Optimizer state that the current plans do not capture; empty if there is none."""
        sources = next(
            iter(self._sources.values()), None
        )  # every phase knows the same: one of them can tell
        if sources is None or (size := sources.state_size()) == self._state_size:
            return ""
        self._state_size = size
        return sources.unknown_state()
