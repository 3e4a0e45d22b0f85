"""Pages of shared memory: allocate, touch and lock them; tell what filesystem they come from.

The calls go through `ctypes`, which lets other Python threads run meanwhile (`mmap.madvise` does
not), and are cut into chunks.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from pathlib import Path
from typing import Any

__all__ = [
    "allocate",
    "copy_bytes",
    "filesystem_kind",
    "is_in_memory",
    "populate",
    "try_mlock",
]

logger = logging.getLogger(__name__)

_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module has no name for it
_CHUNK_BYTES = 256 << 20  # so that one call never holds a worker for long
_MEMORY_FILESYSTEMS = {0x01021994: "tmpfs", 0x958458F6: "hugetlbfs", 0x858458F6: "ramfs"}
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def allocate(fd: int, size: int) -> int:
    """Give the file its size and its pages; ENOSPC comes now rather than SIGBUS later."""
    block = os.fstatvfs(fd).f_bsize  # 2 MiB on hugetlbfs, whose mappings need whole pages
    size = -(-size // block) * block
    for offset in range(0, size, _CHUNK_BYTES):
        os.posix_fallocate(fd, offset, min(_CHUNK_BYTES, size - offset))
    return size


def populate(buffer: memoryview, *, hugepages: bool) -> None:
    """Touch every page for writing: first touch by a copy would run at a tenth of its speed."""
    start = _address(buffer)
    if hugepages and _libc.madvise(start, len(buffer), _MADV_HUGEPAGE) != 0:
        logger.debug("no huge pages: %s", os.strerror(ctypes.get_errno()))
    for offset in range(0, len(buffer), _CHUNK_BYTES):
        size = min(_CHUNK_BYTES, len(buffer) - offset)
        if _libc.madvise(start + offset, size, _MADV_POPULATE_WRITE) == 0:
            continue
        number = ctypes.get_errno()
        if number != errno.EINVAL:
            raise OSError(number, os.strerror(number))
        ctypes.memset(start + offset, 0, size)  # an older kernel; the file is all zeros anyway


def try_mlock(buffer: memoryview) -> str | None:
    """None if the buffer is now locked in memory, else why not."""
    if _libc.mlock(_address(buffer), len(buffer)) == 0:
        return None
    return os.strerror(ctypes.get_errno())


def filesystem_kind(folder: Path) -> str:
    """ "tmpfs", "hugetlbfs", "ramfs", or the magic number of any other filesystem."""
    buffer = ctypes.create_string_buffer(256)  # struct statfs is 120 bytes, f_type comes first
    if _libc.statfs(os.fsencode(folder), buffer) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(folder))
    magic = ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF
    return _MEMORY_FILESYSTEMS.get(magic, f"type {magic:#x}")


def is_in_memory(kind: str) -> bool:
    """Is this `filesystem_kind` one whose files live in memory?"""
    return kind in _MEMORY_FILESYSTEMS.values()


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy between mapped buffers of the same length, without holding the interpreter's lock."""
    if len(target) != len(source):
        raise ValueError(f"{len(source)} bytes do not fit {len(target)}")
    if len(target):
        ctypes.memmove(_address(target), _address(source), len(target))


def _address(buffer: memoryview) -> int:
    holder: Any = ctypes.c_char.from_buffer(buffer)
    return ctypes.addressof(holder)
