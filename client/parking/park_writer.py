"""Writing of one parked image: the live tensors of a moment are copied to a slot, which is sealed by this
process or by the daemon.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ckptd.client import values
from ckptd.client.capture.live_tensors import CopySplit, LiveSources, PackedState
from ckptd.client.capture.slot_writer import write_image, zero_missing
from ckptd.client.daemon_link.mapped_segment import MappedSegment
from ckptd.client.model.live_state import LiveState
from ckptd.client.model.snapshot_layout import PhasePlan
from ckptd.client.parking.park_memory import ParkMemory
from ckptd.core.slots.segment_format import SlotHeader
from ckptd.core.slots.slots import SlotState
from ckptd.cuda.engine import CopyEngine, CopyItem
from ckptd.cuda.samples import Samples
from ckptd.units import first_of

# A device that does not deliver within this time hangs; what it may still write to is not used again.
_NAMED = 3  # of what was written to meanwhile
_COPY_S = 60.0


class CopyFailed(RuntimeError):
    """The state could not be parked; says why."""


@dataclass(frozen=True, slots=True, eq=False)
class TopTensors:
    """The live tensors at the top of a step, and the means to tell later that none was written to since.

    ``versions``: of what is copied, in the order of ``split``. ``errors``: of reading their samples.
    """

    sources: LiveSources
    split: CopySplit
    packed: Sequence[PackedState]
    absent: list[str]
    missing: Sequence[int]
    versions: list[int]
    samples: Samples
    errors: list[BaseException] = field(default_factory=list)

    def changed(self) -> set[str]:
        """The tensors that were written to, by their version or by samples that were read again."""
        return self.split.written(self.versions) | self.split.names_of(self.samples.changed())[0]

    def unlike(self, segment: MappedSegment, index: int) -> set[str]:
        """The tensors whose copy in this slot differs from their samples at the top."""
        numbers = self.samples.unlike(segment.memory.words, segment.slot_base(index))
        return self.split.names_of(numbers)[0]


@dataclass(slots=True, eq=False)
class Moment:
    """The state at the top of a step: what must be kept separately; the rest is live.

    ``recorded``: the dictionary that the step's snapshot is written from, to which the first
    forward adds. ``marks``: what must not change: where it is, and its version. ``tensors``: all that
    is copied, with samples of it. ``ready``: the device has reached the top.
    """

    step: int
    phase: int
    scalars: dict[str, Any]
    recorded: Mapping[str, Any]
    buffers: dict[str, Tensor]
    marks: list[tuple[Mapping[str, Any], str, Tensor, int]]
    tensors: TopTensors | None
    ready: torch.cuda.Event | None
    begun_s: float = field(default_factory=time.monotonic)
    rng_forward: dict[str, Any] | None = None
    parked: bool = False
    late: bool = False

    def changed(self) -> str:
        """The name of something that was written to or replaced since the top; empty if nothing was."""
        for place, key, tensor, version in self.marks:
            if place.get(key) is not tensor or tensor._version != version:
                return key
        return ""


@dataclass(frozen=True, slots=True)
class ParkFill:
    """A slot with all tensors in their places; nothing counts before `seal`."""

    segment: MappedSegment
    index: int
    header: SlotHeader
    layout: PhasePlan
    packed: bytes

    def seal(self) -> None:
        """Complete the image and seal it. If the process dies between the two, the daemon seals it.

        Raises:
            CopyFailed: it is no image; the slot is free again.
        """
        write_image(self.segment, self.index, self.layout, self.header, self.packed)
        self.segment.seal(self.index)
        header = self.segment.header(self.index)
        if header is None or header.state is not SlotState.SEALED:
            raise CopyFailed("what was copied is no image")


class ParkCopy:
    """Copies moments into slots."""

    def __init__(
        self, binding: LiveState, engine: CopyEngine, slots: ParkMemory, device: torch.device
    ) -> None:
        self._binding, self._engine, self._slots = binding, engine, slots
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._sources: LiveSources | None = None
        self._split: CopySplit | None = None
        self._hangs = False

    def look(self, step: int) -> TopTensors | None:
        """The live tensors at the top of a step (training thread); None while nothing can be parked."""
        layout = self._slots.layout
        if layout is None:
            return None
        if self._sources is None or self._sources.plan is not layout:
            self._sources, self._split = LiveSources(self._binding, layout), None
        sources, split = self._sources, self._split
        items, packed = sources.items(), sources.packed_now()
        if split is None or not split.is_of(items, packed, set()):
            split = self._split = CopySplit(sources, items, packed, set())
        versions, samples = split.versions(), split.sample(step, self._engine)
        absent, missing = sources.absent, sources.missing()
        found = TopTensors(sources, split, packed, absent, missing, versions, samples)
        self._engine.read(samples, lambda error: found.errors.append(error) if error else None)
        return found

    @contextmanager
    def of(self, moment: Moment, rng_forward: dict[str, Any] | None) -> Iterator[ParkFill]:
        """A slot with a copy of all of ``moment``; it is freed again if the body does not seal it.

        Raises:
            CopyFailed: there is no room, something changed while it was copied, or the device does
                not answer.
        """
        layout = self._slots.layout
        if self._hangs:
            raise CopyFailed("an earlier copy never ended")
        claimed = self._slots.claim(moment.step, moment.phase)
        if isinstance(claimed, str):
            raise CopyFailed(claimed)
        assert layout is not None
        segment, index, header = claimed
        try:
            packed = self._fill(moment, layout, segment, index, rng_forward)
            yield ParkFill(segment, index, header, layout, packed)
        finally:
            if not self._hangs:
                now = segment.header(index)
                if now is not None and now.state is SlotState.FILLING:
                    segment.set_state(index, SlotState.FREE)
                segment.unlock_slot(index)

    def _fill(
        self,
        moment: Moment,
        layout: PhasePlan,
        segment: MappedSegment,
        index: int,
        rng_forward: dict[str, Any] | None,
    ) -> bytes:
        """Copy all tensors; returns the packed step scalars."""
        tensors = moment.tensors
        if tensors is None or tensors.sources.plan is not layout:
            raise CopyFailed("another copy was under way at the top of this step")
        items = _from_the_top(tensors.split.steady, layout, moment.buffers)
        packed = _packed_scalars(moment, layout, tensors.absent, rng_forward)
        zero_missing(segment, index, layout, tensors.missing)
        self._copy(moment.ready, segment, index, items, tensors)
        written = tensors.changed() - moment.buffers.keys() | tensors.unlike(segment, index)
        changed = moment.changed() or first_of(sorted(written), _NAMED)
        if changed:
            raise CopyFailed(f"{changed} changed since the top of step {moment.step}")
        return packed

    def _copy(
        self,
        ready: torch.cuda.Event | None,
        segment: MappedSegment,
        index: int,
        items: list[CopyItem],
        tensors: TopTensors,
    ) -> None:
        """Copy, and read the samples again; both must arrive."""
        awaited, errors = threading.Semaphore(0), tensors.errors

        def done(error: BaseException | None) -> None:
            if error is not None:
                errors.append(error)
            awaited.release()

        # Not after later work of the device: that may wait for a rank that is gone.
        own_stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with own_stream:
            if self._stream is not None and ready is not None:
                self._stream.wait_event(ready)
            base, packed = segment.slot_base(index), tensors.packed
            self._engine.begin(
                items, segment.memory, base, done, lambda: tensors.sources.packed_items(packed)
            )
            self._engine.wait()
            self._engine.read(tensors.samples, done)
        deadline = time.monotonic() + _COPY_S
        for _ in range(2):
            if not awaited.acquire(timeout=max(0.0, deadline - time.monotonic())):
                self._hangs = True
                raise CopyFailed(f"the device has not delivered it within {_COPY_S:g} s")
        if errors:
            raise CopyFailed(f"copying failed: {errors[0]}")


def _packed_scalars(
    moment: Moment, layout: PhasePlan, absent: list[str], rng_forward: dict[str, Any] | None
) -> bytes:
    scalars = {**moment.scalars, "absent": absent}
    if rng_forward is not None:
        scalars["rng_forward"] = rng_forward
    packed = values.pack(scalars, "step scalars")
    if len(packed) > layout.scalars_capacity:
        raise CopyFailed(f"step scalars grew to {len(packed)} bytes, {layout.scalars_capacity} are reserved")
    return packed


def _from_the_top(items: Sequence[CopyItem], layout: PhasePlan, kept: Mapping[str, Tensor]) -> list[CopyItem]:
    """The same copies, but of buffers as they were at the top; those of another size are in the scalars."""
    buffers = {
        layout.offsets[i]: kept[s.name]
        for i, s in enumerate(layout.sources)
        if s is not None
        if s.kind == "buffer" and s.name in kept
        if 0 < kept[s.name].nbytes == layout.layout.entries[i].nbytes
    }
    return [replace(i, tensor=buffers[i.offset]) if i.nbytes and i.offset in buffers else i for i in items]
