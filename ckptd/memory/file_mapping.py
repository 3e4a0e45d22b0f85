"""Files mapped so that whoever cuts one short does not end this process.

Trainers may write to their segments, hence also truncate them, and the kernel answers an access to
a page that is gone with SIGBUS, which kills. Here it is caught: the handler puts fresh zeroed
memory in the place of the whole mapping and marks it as ``cut``; the access goes on and reads
zeros, which match no checksum. (libwayland guards compositors against their clients in the same
way.)

Why a handler, and not reads through the kernel (``pread``): headers, hints and images are shared
with other processes byte by byte. The handler costs nothing until it runs.

It is Python, called through `ctypes`, and it is sound because the signal is synchronous: the thread
that faults stands at an instruction that reads or writes mapped memory, so it holds none of the
locks of ``malloc`` or of the interpreter but, perhaps, the GIL, which the callback takes or finds
taken. A fault elsewhere, and one that hardware reports, gets the default action: the process ends,
as before.
"""

from __future__ import annotations

import ctypes
import mmap
import signal
import threading
import weakref
from typing import Any

__all__ = ["FileMapping"]

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
_libc = ctypes.PyDLL(None)  # keeps the GIL: nobody else runs while a mapping is replaced
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]


class _Region:
    """Addresses that a mapping takes."""

    __slots__ = ("cut", "length", "start")

    def __init__(self, start: int, length: int) -> None:
        self.start, self.length = start, length
        self.cut = False


class FileMapping:
    """``size`` bytes of an open file, mapped as ``view`` until the last view of it goes.

    Raises:
        OSError: it cannot be mapped.
    """

    def __init__(self, fd: int, size: int, *, readonly: bool = False) -> None:
        _install()
        mapped = mmap.mmap(fd, size, access=mmap.ACCESS_READ if readonly else mmap.ACCESS_WRITE)
        self._region = _Region(_address(mapped), size)
        _regions.insert(0, self._region)
        weakref.finalize(mapped, _forget, self._region)
        self.view = memoryview(mapped)

    @property
    def cut(self) -> bool:
        """Whether an access has found a page gone: since then the view is of zeroed memory, and no
        longer of the file.
        """
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
        if _libc.sigaction(int(signal.SIGBUS), ctypes.byref(action), None) != 0:
            raise OSError("the handler of SIGBUS cannot be set")
        _kept.append(handler)


def _faulted(_number: int, info: Any, _context: int) -> None:
    """The handler: on the thread that touched the page, which then does so again."""
    try:
        if info.contents.code == _BUS_ADRERR and _replaced(info.contents.address or 0):
            return
    except Exception:  # noqa: BLE001, S110 - nobody is there to be told; what follows ends the process
        pass
    _libc.signal(int(signal.SIGBUS), None)  # SIG_DFL


def _replaced(address: int) -> bool:
    for region in _regions:
        if region.start <= address < region.start + region.length:
            if region.cut:
                return True  # by another thread, just now
            region.cut = True
            found = _libc.mmap(region.start, region.length, _PROT, _MAP, -1, 0)
            return bool(found != _FAILED)
    return False


def _forget(region: _Region) -> None:
    _regions.remove(region)


def _address(mapped: mmap.mmap) -> int:
    """Where it begins; also of a mapping that must not be written to."""
    buffer = (ctypes.c_void_p * 16)()  # struct Py_buffer, which begins with the address
    get, release = ctypes.pythonapi.PyObject_GetBuffer, ctypes.pythonapi.PyBuffer_Release
    if get(ctypes.py_object(mapped), buffer, 0) != 0:
        raise BufferError("its address is not told")
    try:
        return int(buffer[0] or 0)
    finally:
        release(buffer)
