"""Pages of shared memory: mapped, allocated, touched and locked; and which filesystem they come from.

Calls go through `ctypes`, which lets other Python threads run meanwhile (`mmap.madvise` does not), in
chunks.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import signal
import threading
import weakref
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module has no name for it
_CHUNK_BYTES = 256 << 20  # so that one call never holds a worker for long
_MEMORY_FILESYSTEMS = {0x01021994: "tmpfs", 0x958458F6: "hugetlbfs", 0x858458F6: "ramfs"}
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def allocate(fd: int, size: int) -> int:
    """Give the file its size and its pages, so that ENOSPC comes now rather than SIGBUS later."""
    block = os.fstatvfs(fd).f_bsize  # 2 MiB on hugetlbfs, whose mappings need whole pages
    size = -(-size // block) * block
    for offset in range(0, size, _CHUNK_BYTES):
        os.posix_fallocate(fd, offset, min(_CHUNK_BYTES, size - offset))
    return size


def populate(buffer: memoryview, *, hugepages: bool) -> None:
    """Touch every page for writing: a copy that touches pages first runs at a tenth of its speed."""
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
    """Lock the buffer in memory; returns None, or why it cannot be locked."""
    if _libc.mlock(_address(buffer), len(buffer)) == 0:
        return None
    return os.strerror(ctypes.get_errno())


def filesystem_kind(folder: Path) -> str:
    """ "tmpfs", "hugetlbfs", "ramfs", or the magic number of another filesystem."""
    buffer = ctypes.create_string_buffer(256)  # struct statfs is 120 bytes, f_type comes first
    if _libc.statfs(os.fsencode(folder), buffer) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(folder))
    magic = ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF
    return _MEMORY_FILESYSTEMS.get(magic, f"type {magic:#x}")


def is_in_memory(kind: str) -> bool:
    return kind in _MEMORY_FILESYSTEMS.values()


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy between mapped buffers of one length, without the interpreter's lock."""
    if len(target) != len(source):
        raise ValueError(f"{len(source)} bytes do not fit {len(target)}")
    if len(target):
        ctypes.memmove(_address(target), _address(source), len(target))


def _address(buffer: memoryview) -> int:
    holder: Any = ctypes.c_char.from_buffer(buffer)
    return ctypes.addressof(holder)


_BUS_ADRERR = 2  # the page is beyond the end of the file; other codes are memory that failed
_SA_SIGINFO = 4
_PROT = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MAP = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
_FAILED = ctypes.c_void_p(-1).value


class _Action(ctypes.Structure):
    """struct sigaction of 64-bit Linux (glibc and musl)."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_uint64 * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class _Info(ctypes.Structure):
    """The beginning of siginfo_t."""

    _fields_ = (
        ("number", ctypes.c_int),
        ("error", ctypes.c_int),
        ("code", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("address", ctypes.c_void_p),
    )


_Handler: Any = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.POINTER(_Info), ctypes.c_void_p)
_libc_with_gil = ctypes.PyDLL(None)  # keeps the GIL: nobody else runs while a mapping is replaced
_libc_with_gil.mmap.restype = ctypes.c_void_p
_libc_with_gil.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc_with_gil.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]


class _Region:
    __slots__ = ("cut", "length", "replaced", "start")

    def __init__(self, start: int, length: int) -> None:
        self.start, self.length = start, length
        self.cut = self.replaced = False


class FileMapping:
    """A mapped file that may be cut short without ending this process.

    ``view`` is ``size`` bytes of an open file, until the last view of it is gone. Trainers may write to
    their segments, so they may truncate them, and the kernel answers an access to a page that is gone with
    SIGBUS, which kills. This class catches it: the handler replaces the whole mapping with fresh zeroed
    memory and marks it as ``cut``; the access continues and reads zeros, which match no checksum.
    (libwayland protects compositors from their clients in the same way.)

    Reads through the kernel (``pread``) are no alternative: other processes share headers, hints and images
    byte by byte. The handler costs nothing until it runs.

    The handler is Python, called through `ctypes`. It is sound because the signal is synchronous: the
    faulting thread is at an instruction that accesses mapped memory, so it holds none of the locks of
    ``malloc`` or the interpreter except, perhaps, the GIL, which the callback takes or has. A fault
    elsewhere, and one that hardware reports, gets the default action: the process ends.

    Raises:
        OSError: it cannot be mapped.
    """

    def __init__(self, fd: int, size: int, *, readonly: bool = False) -> None:
        _install()
        mapped = mmap.mmap(fd, size, access=mmap.ACCESS_READ if readonly else mmap.ACCESS_WRITE)
        self._region = _Region(_mapped_at(mapped), size)
        _regions.insert(0, self._region)
        weakref.finalize(mapped, _forget, self._region)
        self.view = memoryview(mapped)

    @property
    def cut(self) -> bool:
        """True once an access has found a page gone: from then on the view is zeroed memory, not the file."""
        return self._region.cut


_regions: list[_Region] = []  # the newest first: an address may be taken again before `_forget` has run
_installing = threading.Lock()
_kept: list[Any] = []  # what the kernel calls must stay


def _install() -> None:
    with _installing:
        if _kept:
            return
        handler = _Handler(_faulted)
        action = _Action()
        action.handler = ctypes.cast(handler, ctypes.c_void_p).value
        action.flags = _SA_SIGINFO
        if _libc_with_gil.sigaction(int(signal.SIGBUS), ctypes.byref(action), None) != 0:
            raise OSError("the handler of SIGBUS cannot be set")
        _kept.append(handler)


def _faulted(_number: int, info: Any, _context: int) -> None:
    """The handler, on the thread that touched the page; that thread then repeats the access."""
    try:
        if info.contents.code == _BUS_ADRERR and _replaced(info.contents.address or 0):
            return
    except Exception:  # noqa: BLE001, S110 - nobody can be informed; the next line ends the process
        pass
    _libc_with_gil.signal(int(signal.SIGBUS), None)  # SIG_DFL


def _replaced(address: int) -> bool:
    for region in tuple(_regions):  # `_forget` on another thread would let this loop skip one
        if region.start <= address < region.start + region.length:
            if region.replaced:
                return True  # by another thread, just now
            region.cut = True  # before anybody can read a zero
            found = _libc_with_gil.mmap(region.start, region.length, _PROT, _MAP, -1, 0)
            region.replaced = found != _FAILED  # last: an interrupt may end this handler anywhere
            return region.replaced
    return False


def _forget(region: _Region) -> None:
    _regions.remove(region)


def _mapped_at(mapped: mmap.mmap) -> int:
    """The address of a mapping, also of a read-only one."""
    buffer = (ctypes.c_void_p * 16)()  # struct Py_buffer, which begins with the address
    get, release = ctypes.pythonapi.PyObject_GetBuffer, ctypes.pythonapi.PyBuffer_Release
    if get(ctypes.py_object(mapped), buffer, 0) != 0:
        raise BufferError("its address is unknown")
    try:
        return int(buffer[0] or 0)
    finally:
        release(buffer)
