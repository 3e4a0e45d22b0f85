"""Slots as files that other daemons of this host may reach by themselves (`ckptd.transport.short_cut`), and how peers are told."""

from __future__ import annotations

import os

from ckptd.segments import Segment
from ckptd.transport.peer_messages import ReadOpened, RegionFile, SlotGranted
from ckptd.transport.short_cut import is_being_filled
from ckptd.transport.verbs import FileRange, RegionKey

__all__ = ["file_told", "left_behind", "region_of", "slot_file"]


def slot_file(segment: Segment, index: int) -> FileRange:
    """Where a slot's content lies."""
    status = os.fstat(segment.fd)
    offset = segment.geometry.slot_offset(index)
    return FileRange(str(segment.path), status.st_dev, status.st_ino, offset)


def left_behind(segment: Segment, index: int) -> bool:
    """Whether a peer still writes to this slot by itself, on behalf of a daemon that was killed meanwhile."""
    geometry = segment.geometry
    return is_being_filled(segment.fd, geometry.slot_offset(index), geometry.slot_bytes)


def file_told(key: RegionKey) -> RegionFile | None:
    """The file of a region, for its peer."""
    file = key.file
    return None if file is None else RegionFile(file.path, file.device, file.inode, file.offset)


def region_of(reply: SlotGranted | ReadOpened) -> RegionKey:
    """The region that a peer granted."""
    told = reply.file
    file = None if told is None else FileRange(told.path, told.device, told.inode, told.offset)
    return RegionKey(reply.region, reply.token, reply.length, file)
