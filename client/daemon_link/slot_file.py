"""A segment of somebody, mapped for reading: another rank's of this node, a copy that was brought
here, or of a trainer that is gone.

Nothing in it is owned or changed: whoever may open the file can read it. What is in a slot stays as
it is while somebody locks the slot.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptd.config.daemon_config import trusted_users
from ckptd.core.slots.ring import SlotRecord, SlotState
from ckptd.core.slots.segment_format import (
    Kind,
    RingHint,
    SegmentDescriptor,
    SegmentGeometry,
    SlotHeader,
    read_prologue,
    read_ring_hint,
    read_slot_header,
    slot_lock_byte,
    slot_view,
)
from ckptd.errors import SegmentError
from ckptd.memory import locks
from ckptd.transport.access.local_trust import open_file

__all__ = ["SlotFile"]


class SlotFile:
    """One generation; ``descriptor`` says what it is of.

    Args:
        kind: what it must hold.
    Raises:
        SegmentError: it holds something else, or is no segment.
        OSError: it cannot be opened, or is neither this user's nor the daemon's.
    """

    def __init__(self, path: Path, kind: Kind) -> None:
        self.path = path
        fd = open_file(path, os.O_RDONLY, trusted_users())
        try:
            self._map = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(fd)
        self._buffer = memoryview(self._map)
        self._geometry: SegmentGeometry
        self.descriptor: SegmentDescriptor
        self._geometry, self.descriptor = read_prologue(self._buffer)
        if self.descriptor.kind != kind:
            raise SegmentError(f"{path.name} holds {self.descriptor.kind}", operation=f"read {kind}")

    def keep_from_children(self) -> None:
        """A forked child does not have it mapped: a data loader's worker would keep its memory for
        as long as it lives.
        """
        self._map.madvise(mmap.MADV_DONTFORK)

    @property
    def num_slots(self) -> int:
        return self._geometry.num_slots

    @property
    def ring_hint(self) -> RingHint:
        """What the daemon has told the trainer of the other ranks."""
        return read_ring_hint(self._buffer)

    def header(self, index: int) -> SlotHeader | None:
        """Of a slot; None if it is damaged."""
        return read_slot_header(self._buffer, self._geometry, index)

    def image(self, record: SlotRecord) -> memoryview | None:
        """The image of a slot; None if it holds something else by now."""
        header = self.header(record.index)
        if header is None or header.state is not SlotState.SEALED:
            return None
        if header.sequence != record.sequence:
            return None
        return slot_view(self._buffer, self._geometry, record.index)[: header.image_len]

    @contextmanager
    def held(self, record: SlotRecord) -> Iterator[memoryview | None]:
        """The image of a slot that stays as it is in the body; None if the slot holds something
        else by now.
        """
        byte = slot_lock_byte(record.index)
        with locks.lock_file(self.path, byte, exclusive=False) as taken:
            yield self.image(record) if taken else None
