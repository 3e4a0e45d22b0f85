"""Byte-range locks that end with their holder: Linux open-file-description (OFD) locks.

An OFD lock belongs to the open file description, not to the process: two `os.open` of one file exclude each
other even inside one process, and closing one of them releases only its own locks. `fork` and `dup` share a
description, so a child that inherits it keeps the lock; it must close it. Nothing here blocks.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# struct flock on 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid; l_pid must be 0 for OFD.
_FLOCK = struct.Struct("@hhqqi4x")
_MAX_HOLDERS = 8  # in one message


def try_lock(fd: int, byte: int, exclusive: bool) -> bool:
    """Take the lock on one byte now; false if another description holds it.

    Taking a lock that this description holds succeeds, and converts it. ``exclusive`` needs a descriptor
    that is open for writing, a shared lock one that is open for reading.
    """
    kind = fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(kind, byte))
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: POSIX allows both
        return False
    return True


def unlock(fd: int, byte: int) -> None:
    """Release the lock on one byte; nothing happens if it is not held."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, byte))


def is_locked(fd: int, byte: int, exclusive: bool) -> bool:
    """Whether taking this lock would fail now; locks of this description do not count.

    The kernel does not say who holds an OFD lock; `holders_of` finds candidates.
    """
    kind = fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(kind, byte))
    found: int = _FLOCK.unpack(answer)[0]
    return found != fcntl.F_UNLCK


@contextmanager
def held(fd: int, byte: int, exclusive: bool) -> Iterator[bool]:
    """Hold the lock in the block if it was free; yields whether it was."""
    taken = try_lock(fd, byte, exclusive)
    try:
        yield taken
    finally:
        if taken:
            unlock(fd, byte)


@contextmanager
def lock_file(path: str | os.PathLike[str], byte: int, exclusive: bool) -> Iterator[bool]:
    """Like `held`, on a description of its own, so that no other thread can release it."""
    fd = os.open(path, (os.O_RDWR if exclusive else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        yield try_lock(fd, byte, exclusive)
    finally:
        os.close(fd)


def holders_of(path: str | os.PathLike[str]) -> list[int]:
    """Processes that have the file open, as far as this user can see them; for messages only."""
    try:
        wanted = os.stat(path)
    except FileNotFoundError:
        return []
    found: list[int] = []
    for entry in sorted(Path("/proc").glob("[0-9]*"), key=lambda entry: int(entry.name)):
        if len(found) == _MAX_HOLDERS:
            break
        if _has_open(entry / "fd", wanted):
            found.append(int(entry.name))
    return found


def other_holders_of(path: str | os.PathLike[str]) -> list[int]:
    """`holders_of` without this process and those that it has started, such as the store keeper."""
    own = os.getpid()
    return [pid for pid in holders_of(path) if own not in (pid, _parent_of(pid))]


def _parent_of(pid: int) -> int:
    """0 if the process has just ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(stat.rpartition(")")[2].split()[1])  # a name may contain anything


def _has_open(fd_folder: Path, wanted: os.stat_result) -> bool:
    try:
        for fd in fd_folder.iterdir():
            have = os.stat(fd)
            if (have.st_dev, have.st_ino) == (wanted.st_dev, wanted.st_ino):
                return True
    except (PermissionError, FileNotFoundError, ProcessLookupError):
        return False  # another user's process, or one that has just ended
    return False


def _flock(kind: int, byte: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)
