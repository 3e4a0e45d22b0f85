"""One parked image in the making: the live tensors of a moment, copied to a slot, and sealed by whoever comes first, us or the daemon."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ckptd.client import values
from ckptd.client.binding import Binding
from ckptd.client.capture import write_image, zero_missing
from ckptd.client.layout import PhasePlan
from ckptd.client.park_memory import ParkMemory
from ckptd.client.segment import MappedSegment
from ckptd.client.sources import LiveSources
from ckptd.cuda.engine import CopyEngine, CopyItem
from ckptd.memory.ring import SlotState
from ckptd.memory.segment_format import SlotHeader

__all__ = ["CopyFailed", "ParkCopy", "ParkFill"]

# A device that does not deliver within this time hangs; what it may still write to is not used again.
_COPY_S = 60.0


class CopyFailed(RuntimeError):
    """It could not be parked; says why."""


class TopState(Protocol):
    """What is needed of the moment that is parked (see ``parking.Moment``)."""

    @property
    def step(self) -> int: ...
    @property
    def phase(self) -> int: ...
    @property
    def scalars(self) -> Mapping[str, Any]: ...
    @property
    def buffers(self) -> Mapping[str, Tensor]: ...
    @property
    def ready(self) -> torch.cuda.Event | None: ...
    def changed(self) -> str: ...


@dataclass(frozen=True, slots=True)
class ParkFill:
    """A slot with all tensors in their places; nothing counts before `seal`."""

    segment: MappedSegment
    index: int
    header: SlotHeader
    layout: PhasePlan
    packed: bytes

    def seal(self) -> None:
        """Complete the image and seal it. A process that dies between the two leaves the sealing to the daemon.

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
        self, binding: Binding, engine: CopyEngine, slots: ParkMemory, device: torch.device
    ) -> None:
        self._binding, self._engine, self._slots = binding, engine, slots
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._sources: LiveSources | None = None
        self._hangs = False

    @contextmanager
    def of(self, moment: TopState, rng_forward: dict[str, Any] | None) -> Iterator[ParkFill]:
        """A slot into which everything of ``moment`` has been copied; free again if the body does not seal it.

        Raises:
            CopyFailed: there is no room, something changed while it was copied, or the device does not answer.
        """
        layout = self._slots.layout
        claimed = "an earlier copy never ended" if self._hangs else self._claim(moment)
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

    def _claim(self, moment: TopState) -> tuple[MappedSegment, int, SlotHeader] | str:
        return self._slots.claim(moment.step, moment.phase)

    def _fill(
        self,
        moment: TopState,
        layout: PhasePlan,
        segment: MappedSegment,
        index: int,
        rng_forward: dict[str, Any] | None,
    ) -> bytes:
        """Copy all tensors; the packed step scalars."""
        if self._sources is None or self._sources.plan is not layout:
            self._sources = LiveSources(self._binding, layout)
        sources = self._sources
        items = self._from_the_top(sources.items(), layout, moment.buffers)
        packed = self._pack(moment, layout, sources, rng_forward)
        versions = [(tensor, tensor._version, name) for tensor, name in sources.named]
        zero_missing(segment, index, sources)
        self._copy(moment, segment, index, items, sources)
        changed = moment.changed() or next(
            (n for t, v, n in versions if _moved(t, v, n, moment)), ""
        )
        if changed:
            raise CopyFailed(f"{changed} changed since the top of step {moment.step}")
        return packed

    def _copy(
        self,
        moment: TopState,
        segment: MappedSegment,
        index: int,
        items: list[CopyItem],
        sources: LiveSources,
    ) -> None:
        over, errors = threading.Event(), list[BaseException]()

        def done(error: BaseException | None) -> None:
            if error is not None:
                errors.append(error)
            over.set()

        # Not after what the device was given since: that may wait for a rank that is gone.
        beside = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with beside:
            if self._stream is not None and moment.ready is not None:
                self._stream.wait_event(moment.ready)
            base = segment.slot_base(index)
            self._engine.begin(items, segment.memory, base, done, sources.packed_items)
        if not over.wait(_COPY_S):
            self._hangs = True
            raise CopyFailed(f"the device has not delivered it within {_COPY_S:g} s")
        if errors:
            raise CopyFailed(f"copying failed: {errors[0]}")

    def _pack(
        self,
        moment: TopState,
        layout: PhasePlan,
        sources: LiveSources,
        rng_forward: dict[str, Any] | None,
    ) -> bytes:
        scalars = {**moment.scalars, "absent": sources.absent}
        if rng_forward is not None:
            scalars["rng_forward"] = rng_forward
        packed = values.pack(scalars, "step scalars")
        if len(packed) > layout.scalars_capacity:
            raise CopyFailed(
                f"step scalars grew to {len(packed)} bytes, {layout.scalars_capacity} are reserved"
            )
        return packed

    @staticmethod
    def _from_the_top(
        items: list[CopyItem], layout: PhasePlan, kept: Mapping[str, Tensor]
    ) -> list[CopyItem]:
        """The same copies, but of buffers as they were at the top."""
        offsets = {
            layout.offsets[i]: (kept[s.name], layout.layout.entries[i].nbytes)
            for i, s in enumerate(layout.sources)
            if s is not None
            and s.kind == "buffer"
            and s.name in kept
            and layout.layout.entries[i].nbytes
        }
        for tensor, nbytes in offsets.values():
            if tensor.numel() * tensor.element_size() != nbytes:
                raise CopyFailed("a buffer has another size than when this was planned")
        return [
            replace(i, tensor=offsets[i.offset][0]) if i.nbytes and i.offset in offsets else i
            for i in items
        ]


def _moved(tensor: Tensor, version: int, name: str, moment: TopState) -> bool:
    """Whether a live tensor was written to while it was copied; buffers that are kept from the top may be."""
    return name not in moment.buffers and tensor._version != version
