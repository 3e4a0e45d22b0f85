"""Slots as the store keeper reads them: mapped, under a lock of its own, and looked at again under it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckptd.core.slots.ring import SlotState
from ckptd.core.slots.segment_format import SegmentDescriptor, SlotHeader, slot_lock_byte
from ckptd.errors import SegmentError
from ckptd.memory import locks
from ckptd.memory.segment_file import Segment, open_segment
from ckptd.persistence.keeper_wire import SnapshotId

__all__ = ["LockedSlot", "SlotFiles", "SlotLost"]


class SlotLost(RuntimeError):
    """The slot holds something else, or its segment is gone."""


@dataclass(frozen=True, slots=True)
class LockedSlot:
    """A slot that stays as it is for as long as it is held."""

    header: SlotHeader
    image: memoryview
    descriptor: SegmentDescriptor
    digest: str = ""  # the cryptographic one that was kept of it; "": it was not made yet


class SlotFiles:
    """The segment files that were asked for, mapped once; safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readable: dict[str, Segment] = {}
        self._writable: dict[str, Segment] = {}

    @contextmanager
    def hold(self, path: str, index: int, snapshot: SnapshotId) -> Iterator[LockedSlot]:
        """The slot, if it is sealed and still of this snapshot.

        Raises:
            SlotLost: it is not.
        """
        segment = self._open(path, self._readable, readonly=True)
        with ExitStack() as stack:
            try:
                taken = stack.enter_context(
                    locks.lock_file(segment.path, slot_lock_byte(index), exclusive=False)
                )
            except OSError as error:
                raise SlotLost(f"{segment.path.name} is gone: {error}") from error
            header = segment.header(index) if taken else None
            if header is None or header.state is not SlotState.SEALED:
                raise SlotLost(f"slot {index} of {segment.path.name} is being filled again")
            found = (header.iteration, header.epoch, header.sequence)
            if found != (snapshot.iteration, snapshot.epoch, snapshot.sequence):
                raise SlotLost(f"slot {index} of {segment.path.name} holds iteration {found[0]}")
            kept = segment.kept_digest(index, header)
            yield LockedSlot(header, segment.image(index, header), segment.descriptor, kept)

    def writable(self, path: str, offset: int, length: int) -> memoryview:
        """Bytes of a segment file, to be written.

        Raises:
            SlotLost: the file is gone, or ends before.
        """
        segment = self._open(path, self._writable, readonly=False)
        if not 0 <= offset <= offset + length <= len(segment.buffer):
            raise SlotLost(f"{segment.path.name} has no bytes {offset} to {offset + length}")
        return segment.buffer[offset : offset + length]

    def forget_removed(self) -> None:
        """Unmap files that are no longer there: their memory is free only then."""
        with self._lock:
            for known in (self._readable, self._writable):
                for path, segment in list(known.items()):
                    if not segment.in_place():
                        del known[path]
                        segment.close()

    def _open(self, path: str, known: dict[str, Segment], *, readonly: bool) -> Segment:
        with self._lock:
            segment = known.get(path)
            if segment is not None and segment.in_place():
                return segment
            if segment is not None:
                del known[path]
                segment.close()
            try:
                known[path] = open_segment(Path(path), readonly=readonly)
            except (OSError, ValueError, SegmentError) as error:
                raise SlotLost(f"{path} cannot be opened: {error}") from error
            return known[path]
