"""Slots of one rank that stay as they are while they are read: each under a read lock of a
description of its own.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

from ckptd.core.sessions import RankKey
from ckptd.core.slots.ring import SlotRecord, SlotState
from ckptd.core.slots.segment_format import slot_lock_byte
from ckptd.core.slots.snapshot_events import SnapshotKey
from ckptd.memory import locks
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_store import SegmentStore
from ckptd.transport.control.peer_messages import PeerRefused, ReadOpened, RegionFile, SlotGranted
from ckptd.transport.fabric.short_cut import is_being_filled
from ckptd.transport.verbs import FileRange, Region, RegionKey

__all__ = [
    "HeldSnapshot",
    "SlotHolds",
    "described_file",
    "left_behind",
    "lend_slot",
    "region_of",
    "slot_file",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeldSnapshot:
    """Where a held snapshot lies; ``fd`` is the description that has the lock."""

    segment: Segment
    index: int
    fd: int


class SlotHolds:
    """What one user of a rank's slots holds: the trainer passes over these slots until they are released."""

    def __init__(self, store: SegmentStore, rank: RankKey) -> None:
        self._store, self._rank = store, rank
        self._held: dict[SnapshotKey, HeldSnapshot] = {}

    def hold(self, key: SnapshotKey, record: SlotRecord) -> bool:
        """Hold the slot if it has this snapshot still; false if the trainer was quicker."""
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
        """Where it lies; None if it is not held."""
        return self._held.get(key)

    def release(self, key: SnapshotKey) -> None:
        """Let the slot go, if it is held."""
        held = self._held.pop(key, None)
        if held is not None:
            os.close(held.fd)

    def release_all(self) -> None:
        """Let everything go."""
        for key in list(self._held):
            self.release(key)


def _is_there(segment: Segment, index: int, key: SnapshotKey) -> bool:
    header = segment.header(index)
    if header is None or header.state is not SlotState.SEALED:
        return False
    return (header.iteration, header.epoch, header.sequence) == key[1:]


def lend_slot(
    segment: Segment, lend: Callable[[int], Region | PeerRefused], *, writable: bool
) -> tuple[int, Region] | PeerRefused:
    """The region that ``lend`` makes, and the descriptor for its lock that it is given; or what the
    peer is told.

    A file that cannot be opened or locked (it is gone, no descriptor is left) is an answer, too:
    silence would be waited for.
    """
    fd, lent = -1, None
    try:
        fd = os.open(segment.path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        lent = lend(fd)
    except FileNotFoundError:
        return PeerRefused("unknown", f"{segment.path.name} is gone")
    except OSError as error:
        return PeerRefused("busy", f"{segment.path.name} cannot be used now: {error.strerror}")
    finally:
        if fd >= 0 and (lent is None or isinstance(lent, PeerRefused)):
            os.close(fd)
    return lent if isinstance(lent, PeerRefused) else (fd, lent)


def slot_file(segment: Segment, index: int) -> FileRange:
    """Where a slot's content lies."""
    status = os.fstat(segment.fd)
    offset = segment.geometry.slot_offset(index)
    return FileRange(str(segment.path), status.st_dev, status.st_ino, offset)


def left_behind(segment: Segment, index: int) -> bool:
    """Whether a peer still writes to this slot by itself, on behalf of a daemon that was killed meanwhile."""
    geometry = segment.geometry
    return is_being_filled(segment.fd, geometry.slot_offset(index), geometry.slot_bytes)


def described_file(key: RegionKey) -> RegionFile | None:
    """The file of a region, for its peer."""
    file = key.file
    return None if file is None else RegionFile(file.path, file.device, file.inode, file.offset)


def region_of(reply: SlotGranted | ReadOpened) -> RegionKey:
    """The region that a peer granted."""
    told = reply.file
    file = None if told is None else FileRange(told.path, told.device, told.inode, told.offset)
    return RegionKey(reply.region, reply.token, reply.length, file)
