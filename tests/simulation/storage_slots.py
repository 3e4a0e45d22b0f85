"""The slots of a machine, as the daemon and the store keeper read and hold them
(`ckptd.memory.slot_holds`, `ckptd.persistence.rank_store.SlotFiles`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ckptd.core.sessions import RankKey
from ckptd.core.slots.segment_format import SegmentDescriptor, SlotHeader, encode_descriptor
from ckptd.core.slots.slots import SlotRecord, SlotState, SnapshotKey, key_of
from ckptd.persistence.rank_store import LockedSlot, SlotLost
from ckptd.storage.reduced_image import NewerSnapshots
from tests.storage.samples import Sample

__all__ = ["Memory", "PlayedFiles", "PlayedHolds", "Segment", "Slot"]

_SLOT_BYTES = 1 << 20


@dataclass(eq=False)
class Slot:
    record: SlotRecord
    readers: int = 0


@dataclass(eq=False)
class Segment:
    """One generation of a rank's slots, as `ckptd.memory.segment_file.Segment` shows it."""

    rank: int
    generation: int
    slots: list[Slot]
    descriptor: SegmentDescriptor
    path: Path
    slot_bytes: int = _SLOT_BYTES

    @property
    def geometry(self) -> Segment:
        return self

    @property
    def num_slots(self) -> int:
        return len(self.slots)

    @property
    def records(self) -> list[SlotRecord]:
        return [slot.record for slot in self.slots]

    def add(self, record: SlotRecord, most: int) -> None:
        """A copy of a snapshot; the oldest one goes."""
        self.slots.append(Slot(record))
        del self.slots[:-most]
        for index, slot in enumerate(self.slots):
            slot.record = replace(slot.record, generation=self.generation, index=index)

    def grow(self) -> None:
        """By two slots."""
        for _ in range(2):
            self.slots.append(Slot(SlotRecord(self.generation, len(self.slots), SlotState.FREE)))

    def raw_descriptor(self) -> bytes:
        return encode_descriptor(self.descriptor)


class Memory(Protocol):
    """The segments of a machine."""

    segments: list[Segment]
    buffers: dict[str, bytearray]

    def get(self, key: RankKey, generation: int) -> Segment | None: ...
    def sample(self, rank: int, record: SlotRecord) -> Sample: ...


class PlayedFiles:
    """`ckptd.persistence.rank_store.SlotFiles`."""

    def __init__(self, machine: Memory) -> None:
        self._machine = machine

    @contextmanager
    def hold(self, path: str, index: int, snapshot: SnapshotKey) -> Iterator[LockedSlot]:
        segment = next((s for s in self._machine.segments if str(s.path) == path), None)
        if segment is None:
            raise SlotLost(f"{path} is gone")
        slot = segment.slots[index]
        record = slot.record
        if not record.sealed or key_of(record) != snapshot:
            raise SlotLost(f"slot {index} of {path} holds iteration {record.iteration}")
        sample = self._machine.sample(segment.rank, record)
        header = SlotHeader(
            state=record.state,
            iteration=record.iteration,
            previous=record.previous,
            image_len=sample.view.image_len,
            sequence=record.sequence,
            layout_id=sample.view.layout_id,
            phase=record.phase,
            header_digest=sample.header_digest,
            epoch_start=record.epoch_start,
            epoch=record.epoch,
        )
        slot.readers += 1
        try:
            yield LockedSlot(header, sample.image, segment.descriptor, len(segment.slots))
        finally:
            slot.readers -= 1

    def newer(self, places: object) -> NewerSnapshots:
        return NewerSnapshots()

    def of_checkpoint(self, newest: object, another: object) -> None:
        return None

    def writable(self, path: str, offset: int, length: int) -> memoryview:
        return memoryview(self._machine.buffers[path])[offset : offset + length]

    def forget_removed(self) -> None:
        """Nothing is mapped."""


@dataclass(frozen=True)
class _Held:
    segment: Segment
    index: int
    slot: Slot


class PlayedHolds:
    """`ckptd.memory.slot_holds.SlotHolds`."""

    def __init__(self, store: Memory, rank: RankKey) -> None:
        self._store, self._rank = store, rank
        self._held: dict[SnapshotKey, _Held] = {}

    def hold(self, key: SnapshotKey, record: SlotRecord) -> bool:
        segment = self._store.get(self._rank, key.generation)
        if key in self._held or segment is None:
            return segment is not None
        slot = segment.slots[record.index]
        if not slot.record.sealed or key_of(slot.record) != key:
            return False
        slot.readers += 1
        self._held[key] = _Held(segment, record.index, slot)
        return True

    def get(self, key: SnapshotKey) -> _Held | None:
        return self._held.get(key)

    def release(self, key: SnapshotKey) -> None:
        if (held := self._held.pop(key, None)) is not None:
            held.slot.readers -= 1

    def release_all(self) -> None:
        for key in list(self._held):
            self.release(key)
