"""The short cut within one host: a peer that can open the file under a region copies by itself, without a
socket.

The owner of a region may say in which file its buffer lies (`FileRange`). A peer that holds the key and finds
that very file under that path (same device, inode and user) reads or writes its bytes with one system call a
chunk. Where it cannot, the chunk goes over the network, which refuses what the key does not grant.

Nothing is written down for this. Both sides use open-file-description locks on bytes far beyond the end of
the file; the kernel drops them with their holder, so a process that dies leaves nothing behind:

* A **lease** byte for each allowed operation: locked by the owner from `register` to `revoke`. Its number is
  a digest of everything that was
granted (region, token, peer, operation, place, length). So a peer with a wrong value finds it unlocked, and
so does a peer on another host that has a file of this name, and every peer after the owner has revoked or
died.
* A **copy** byte next to it: held (shared) by the peer for one chunk, taken *before* it looks for the lease.
  The owner looks at it *after* it
gave up the lease. So either the peer finds no lease, or the owner finds the copy and waits.
* For puts, the **bytes of the file** themselves, moved beyond its end, held (shared) by the peer, also taken
  *before* it looks for the lease. An owner
that was killed and restarted does not know its old leases. Before it grants a slot it asks whether somebody
still writes there (`is_being_filled`); a peer whose lock it does not find will find the lease gone.

Files are read and written, not mapped: a truncated file is then an error, and not the end of the process.

One thread copies for a whole fabric, so that copies take at most one processor from training; a
`CopyLane` is one link's way to it. A chunk that cannot be copied goes back to its transfer, which then stays
on the network.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

from ckptd.transport.fabric.transfers import Chunk, ChunkedTransfer, ChunkUse
from ckptd.transport.verbs import Access, FabricCounters, FileRange, RegionKey

logger = logging.getLogger(__name__)

# No file reaches the first of these offsets, so these locks touch no byte of it.
_RANGES = 1 << 61
_LEASES = 1 << 62
_GRANT = struct.Struct("<QQQ")
# struct flock on 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid; l_pid must be 0 for these locks.
_FLOCK = struct.Struct("@hhqqi4x")
MAX_COPIES = 2  # of one link: one in progress, and the next


class FileLease:
    """The owner's side: while it lasts, ``peer`` ("" for any) may copy. Any thread; the region's lock is
    held.

    Raises:
        OSError: the file is not (any more) where the key says, or cannot be locked.
    """

    def __init__(self, key: RegionKey, access: Access, peer: str) -> None:
        assert key.file is not None
        self._bytes = [_lease_byte(key, key.file, one, peer) for one in access]
        self._fd = _open(key.file, writable=True)
        try:
            for byte in self._bytes:
                _set_lock(self._fd, fcntl.F_WRLCK, byte)
        except OSError:
            os.close(self._fd)
            raise

    def end(self) -> None:
        """Let no further copy begin."""
        for byte in self._bytes:
            _set_lock(self._fd, fcntl.F_UNLCK, byte)

    @property
    def in_use(self) -> bool:
        """Whether a copy that began before is still in progress."""
        return any(_is_locked(self._fd, byte + 1) for byte in self._bytes)

    def close(self) -> None:
        os.close(self._fd)


def is_being_filled(fd: int, offset: int, length: int) -> bool:
    """Whether a peer still copies into this part of a file, though its lease may have ended with an earlier
    process.
    """
    return length > 0 and _is_locked(fd, _RANGES + offset, length)


def note_filling(fd: int, offset: int, length: int) -> None:
    """From now on `is_being_filled` is true for this part of a file, until ``fd`` is closed."""
    if length > 0:
        _set_lock(fd, fcntl.F_RDLCK, _RANGES + offset, length)


def copy_chunk(node: str, key: RegionKey, access: Access, offset: int, view: memoryview) -> bool:
    """Fill the region from ``view``, or ``view`` from the region; false if the network has to carry the
    chunk, or to refuse it.

    Args:
        node: our node id, for which the key was granted.
        access: WRITE puts, READ gets.
        offset: from the start of the region.
    """
    if key.file is None or not 0 <= offset <= key.length - len(view):
        return False
    at = key.file.offset + offset
    try:
        fd = _open(key.file, writable=access is Access.WRITE)
        try:
            if access is Access.WRITE:
                note_filling(fd, at, len(view))
            for peer in (node, ""):
                with _copying(fd, _lease_byte(key, key.file, access, peer)) as allowed:
                    if allowed:
                        return _copy(fd, access, at, view)
            return False
        finally:
            os.close(fd)
    except (OSError, ValueError, struct.error) as error:  # the last two: an invalid path or number
        logger.debug("region %d is not copied: %s", key.region, error)
        return False


@contextmanager
def _copying(fd: int, lease: int) -> Iterator[bool]:
    """Yields whether the lease exists; while the context lasts, its owner sees our copy."""
    _set_lock(fd, fcntl.F_RDLCK, lease + 1)
    try:
        # Only an exclusive lock counts: it takes the right to write the file, which a mere reader lacks.
        yield _is_locked(fd, lease, by=fcntl.F_RDLCK)
    finally:
        _set_lock(fd, fcntl.F_UNLCK, lease + 1)


def _copy(fd: int, access: Access, at: int, view: memoryview) -> bool:
    """Copy all of it; false if the file ends before."""
    if access is Access.WRITE and at + len(view) > os.fstat(fd).st_size:
        return False
    done = 0
    while done < len(view):
        with view[done:] as rest:
            if access is Access.WRITE:
                moved = os.pwritev(fd, [rest], at + done)
            else:
                moved = os.preadv(fd, [rest], at + done)
        if moved == 0:
            return False
        done += moved
    return True


def _open(file: FileRange, *, writable: bool) -> int:
    """Open that very file, of our own user: a path from a peer is not to be believed."""
    _check(file, os.stat(file.path, follow_symlinks=False))  # before it is opened: devices have effects
    flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(file.path, flags)
    try:
        _check(file, os.fstat(fd))
    except OSError:
        os.close(fd)
        raise
    return fd


def _check(file: FileRange, found: os.stat_result) -> None:
    if (found.st_dev, found.st_ino) != (file.device, file.inode):
        raise FileNotFoundError(f"{file.path} is another file on this host")
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{file.path} is not a file of this user")


def _lease_byte(key: RegionKey, file: FileRange, access: Access, peer: str) -> int:
    """The lease byte of one operation of one grant; the next byte is its copy byte."""
    grant = _GRANT.pack(key.region, file.offset, key.length) + key.token
    text = grant + bytes([access.value]) + peer.encode()
    digest = hashlib.blake2b(text, digest_size=8, person=b"ckptd lease").digest()
    return _LEASES + (int.from_bytes(digest, "little") >> 3) * 2


def _set_lock(fd: int, kind: int, first: int, length: int = 1) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, first, length, 0))


def _is_locked(fd: int, first: int, length: int = 1, *, by: int = fcntl.F_WRLCK) -> bool:
    """Whether another description has a conflicting lock there; with F_RDLCK only exclusive ones do."""
    asked = _FLOCK.pack(by, os.SEEK_SET, first, length, 0)
    found: int = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0]
    return found != fcntl.F_UNLCK


class CopyLane:
    """On the fabric's thread, except `_copy`.

    Args:
        node: our node id.
        copier: None if the short cut is switched off.
        call: runs a function on the fabric's thread; false if that has ended.
        done: called when a chunk was copied.
    """

    def __init__(
        self,
        node: str,
        copier: Executor | None,
        counters: FabricCounters,
        call: Callable[[Callable[[], None]], bool],
        done: Callable[[Chunk], None],
    ) -> None:
        self._node, self._copier, self._counters = node, copier, counters
        self._call, self._done = call, done
        self._lock = threading.Lock()
        self._pending = 0

    def takes(self, transfer: ChunkedTransfer) -> bool:
        """Whether this transfer's chunks may be tried here."""
        return self._copier is not None and not transfer.network_only

    @property
    def room(self) -> int:
        return MAX_COPIES - self._pending

    def send(self, chunk: Chunk) -> None:
        """Copy the chunk soon; requires ``room``."""
        assert self._copier is not None
        self._pending += 1
        use = ChunkUse(chunk, self._lock)
        try:
            self._copier.submit(self._copy, use)
        except RuntimeError:  # the interpreter ends before the fabric was closed
            use.finish()
            self._ended(chunk, False)

    def _copy(self, use: ChunkUse) -> None:
        """On the copier's thread."""
        if not use.claim():  # its transfer has ended
            self._call(lambda: self._ended(use.chunk, None))
            return
        chunk, copied = use.chunk, False
        transfer = chunk.transfer
        access = Access.WRITE if transfer.is_put else Access.READ
        try:
            copied = copy_chunk(self._node, transfer.key, access, chunk.offset, use.view)
        except Exception:  # the thread's task: the chunk must not be lost
            logger.exception("a copy failed")
        finally:
            use.finish()
        self._call(lambda: self._ended(chunk, copied))

    def _ended(self, chunk: Chunk, copied: bool | None) -> None:
        self._pending -= 1
        if copied:
            self._counters.short_cut_bytes += chunk.length
            self._done(chunk)
        elif copied is False:
            chunk.transfer.network_only = True
            chunk.transfer.give_back(chunk)
