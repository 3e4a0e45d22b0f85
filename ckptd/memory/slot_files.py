"""Slots as files that other daemons of this host may reach by themselves
(`ckptd.transport.fabric.short_cut`), and how peers are told.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from ckptd.memory.segment_file import Segment
from ckptd.transport.fabric.short_cut import is_being_filled
from ckptd.transport.peer_messages import PeerRefused, ReadOpened, RegionFile, SlotGranted
from ckptd.transport.verbs import FileRange, Region, RegionKey

__all__ = ["described_file", "left_behind", "lend_slot", "region_of", "slot_file"]


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
