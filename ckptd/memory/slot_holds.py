"""Slots of one rank that do not change while they are read: each has a read lock of its own description."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from ckptd.core.sessions import RankKey
from ckptd.core.slots.segment_format import slot_lock_byte
from ckptd.core.slots.slots import SlotRecord, SnapshotKey
from ckptd.memory import locks
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_store import SegmentStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeldSnapshot:
    """Where a held snapshot is; ``fd`` is the description with the lock."""

    segment: Segment
    index: int
    fd: int


class SlotHolds:
    """The slots that one reader of a rank's snapshots holds; the trainer passes them over."""

    def __init__(self, store: SegmentStore, rank: RankKey) -> None:
        self._store, self._rank = store, rank
        self._held: dict[SnapshotKey, HeldSnapshot] = {}

    def hold(self, key: SnapshotKey, record: SlotRecord) -> bool:
        """Hold the slot if it still has this snapshot; false if the trainer has reused it."""
        if key in self._held:
            return True
        segment = self._store.get(self._rank, key.generation)
        if segment is None:
            return False
        try:
            fd = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:  # somebody removed the file; its memory goes when it is unmapped
            logger.warning("a slot of %s cannot be held: %s", segment.path, error)
            return False
        if locks.try_lock(fd, slot_lock_byte(record.index), exclusive=False) and _is_there(
            segment, record.index, key
        ):
            self._held[key] = HeldSnapshot(segment, record.index, fd)
            return True
        os.close(fd)
        return False

    def get(self, key: SnapshotKey) -> HeldSnapshot | None:
        return self._held.get(key)

    def release(self, key: SnapshotKey) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            os.close(held.fd)

    def release_all(self) -> None:
        for key in list(self._held):
            self.release(key)


def _is_there(segment: Segment, index: int, key: SnapshotKey) -> bool:
    header = segment.sealed(index, key.sequence)
    return header is not None and (header.iteration, header.epoch) == (key.iteration, key.epoch)
