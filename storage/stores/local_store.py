"""A folder as a store: files that are written under a temporary name, synced, and then renamed.

A file that is being written is called ``.ckptd-<random>`` and lies in the folder of its object. A put ends
when the file and its name are on disk (fsync of both). A create is exclusive, because a hard link never
replaces a file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ckptd.private_files import sync_folder
from ckptd.storage.stores.objects import (
    RESERVED,
    ContainerMissing,
    Damaged,
    NoSpace,
    ObjectExists,
    ObjectInfo,
    ObjectMissing,
    StoreError,
    StoreRefused,
    Unavailable,
    is_reserved,
)
from ckptd.storage.stores.store_base import RangeRequest, StoreBase, StoreOptions, check_limit, cut, run_all

_MAX_VECTORS = 512  # the kernel takes 1024
_FOLDER_TRIES = 20
_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
_IN_THE_WAY = (errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
_THREADS_FROM = 32 << 20  # one thread reads less than this as fast
# Stored bytes are not read again on this node: in the page cache they would evict the training data, and each
# new page costs more than the copy into it (2.7 against 0.4 CPU seconds per GiB in a virtual machine that
# returns free memory to its host).
_UNCACHE_BYTES = 32 << 20


class LocalStore(StoreBase):
    """Objects are files below a folder, which is created when the store is opened and never again.

    Raises:
        ValueError: the path is not absolute.
        StoreError: the folder does not exist and cannot be created.
    """

    def __init__(self, folder: str, options: StoreOptions) -> None:
        if not folder.startswith("/"):
            raise ValueError(f"{folder!r} is not an absolute path")
        self._base = os.path.normpath(folder)
        super().__init__(
            "local",
            f"file://{self._base}",
            piece_bytes=options.part_bytes,
            multipart=False,
            conditional=True,
        )
        self._pool = ThreadPoolExecutor(options.concurrency, thread_name_prefix="ckptd-local")
        with self._mapped(""):
            Path(self._base).mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        self._pool.shutdown()

    def _put(self, key: str, views: Sequence[memoryview], size: int, *, if_absent: bool) -> None:
        with self._mapped(key):
            path = self._path(key)
            folder = os.path.dirname(path)
            aside = os.path.join(folder, RESERVED + secrets.token_hex(8))
            file = self._create(folder, aside)
            try:
                try:
                    _write(file, views)
                finally:
                    os.close(file)
                if if_absent:
                    os.link(aside, path)
                else:
                    os.rename(aside, path)
            finally:
                with contextlib.suppress(FileNotFoundError):  # it was renamed
                    os.unlink(aside)
            sync_folder(folder)

    def _read(self, key: str, limit: int) -> bytes:
        with self._mapped(key), _opened(self._path(key)) as file:
            size = os.fstat(file).st_size
            check_limit(key, size, limit)
            data = bytearray(size)
            _fill(key, file, 0, [memoryview(data)])
            return bytes(data)

    def _read_pieces(self, key: str, pieces: Sequence[RangeRequest]) -> None:
        with self._mapped(key), _opened(self._path(key)) as file:
            jobs: list[Callable[[], None]] = [
                partial(_fill, key, file, piece.offset, list(piece.into)) for piece in pieces
            ]
            if sum(piece.size for piece in pieces) < _THREADS_FROM:
                for job in jobs:
                    job()
            else:
                run_all(self._pool, jobs)

    def _info(self, key: str) -> ObjectInfo | None:
        with self._mapped(key):
            try:
                found = os.stat(self._path(key))
            except (FileNotFoundError, NotADirectoryError):
                self._check_base(key)
                return None
            if not stat.S_ISREG(found.st_mode):
                return None
            return ObjectInfo(key, found.st_size, found.st_mtime_ns, "")

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._mapped(prefix):
            for key, found in self._walk(prefix):
                if not is_reserved(key):
                    yield ObjectInfo(key, found.st_size, found.st_mtime_ns, "")

    def _delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            with self._mapped(key):
                try:
                    os.unlink(self._path(key))
                except (FileNotFoundError, NotADirectoryError):
                    self._check_base(key)
                except IsADirectoryError:
                    continue  # a folder is not an object
                self._drop_empty_folders(key)

    def _abort_uploads(self, prefix: str, older_than_s: float) -> int:
        """Remove the files of dead writers; a living writer updates the time of its file."""
        aborted = 0
        with self._mapped(prefix):
            now_s = self._clock_s()
            for key, found in self._walk(prefix):
                if is_reserved(key) and now_s - found.st_mtime >= older_than_s:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(self._path(key))
                        aborted += 1
        return aborted

    def _clock_s(self) -> float:
        """The time by the clock that dates the files; the folder may belong to another machine."""
        path = os.path.join(self._base, f"{RESERVED}{secrets.token_hex(8)}")
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            return os.fstat(fd).st_mtime
        finally:
            os.close(fd)
            with contextlib.suppress(FileNotFoundError):  # another process removed it
                os.unlink(path)

    def _path(self, key: str) -> str:
        return os.path.join(self._base, key)

    def _walk(self, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
        """The files below a folder, with their paths relative to the base."""
        self._check_base(prefix)
        waiting = [prefix.removesuffix("/")]
        while waiting:
            folder = waiting.pop()
            for entry in self._entries(folder):
                key = f"{folder}/{entry.name}" if folder else entry.name
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(key)
                    continue
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat()
                    if stat.S_ISREG(found.st_mode):
                        yield key, found

    def _entries(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(os.path.join(self._base, folder)) as entries:
                return [*entries]
        except (FileNotFoundError, NotADirectoryError):  # removed meanwhile, or never created
            return []

    def _check_base(self, key: str) -> None:
        if not os.path.isdir(self._base):
            raise ContainerMissing(key, f"the folder {self._base} is not there")

    def _create(self, folder: str, aside: str) -> int:
        """Create the temporary file, and its folder."""
        for _ in range(_FOLDER_TRIES):
            with contextlib.suppress(FileNotFoundError):  # another process removed the empty folder
                self._make_folders(folder)
                return os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        raise OSError(errno.EAGAIN, "the folder is removed again and again")

    def _make_folders(self, folder: str) -> None:
        """Create the missing folders below the base; the base itself may be a mount that disappeared."""
        self._check_base("")
        missing: list[str] = []
        while folder != self._base and not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for each in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(each)
            sync_folder(os.path.dirname(each))

    def _drop_empty_folders(self, key: str) -> None:
        """Remove the folders of a deleted object that are empty now."""
        folder = os.path.dirname(self._path(key))
        while folder != self._base:
            try:
                os.rmdir(folder)
            except OSError:
                return  # not empty, or another process removed it
            folder = os.path.dirname(folder)

    @contextlib.contextmanager
    def _mapped(self, key: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except FileNotFoundError as error:
            self._check_base(key)
            raise ObjectMissing(key, "is not there") from error
        except FileExistsError as error:
            raise ObjectExists(key, "exists already") from error
        except OSError as error:
            raise _fault(key, error) from error


def _fault(key: str, error: OSError) -> StoreError:
    what = error.strerror or str(error)
    if error.errno in _FULL:
        return NoSpace(key, what)
    if error.errno in _REFUSED:
        return StoreRefused(key, what)
    if error.errno in _IN_THE_WAY:
        return StoreRefused(key, f"{what}: an object and a folder cannot have one name here")
    return Unavailable(key, what)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except NotADirectoryError as error:
        raise FileNotFoundError(errno.ENOENT, "below a file", path) from error
    try:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise FileNotFoundError(errno.ENOENT, "is a folder", path)
        yield file
    finally:
        os.close(file)


def _write(file: int, views: Sequence[memoryview]) -> None:
    """Write and sync the file, and drop it from the page cache."""
    offset = 0
    for group in cut(views, _UNCACHE_BYTES):
        left = group
        while left:
            written = os.pwritev(file, left[:_MAX_VECTORS], offset)
            offset += written
            left = _behind(left, written)
        # Starts the writeback of dirty pages, and drops the clean ones.
        os.posix_fadvise(file, 0, offset, os.POSIX_FADV_DONTNEED)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def _fill(key: str, file: int, offset: int, views: list[memoryview]) -> None:
    left = views
    while left:
        got = os.preadv(file, left[:_MAX_VECTORS], offset)
        if not got:
            if not any(left):
                return
            raise Damaged(key, f"ends at {offset}, and more was asked for")
        offset += got
        left = _behind(left, got)


def _behind(views: list[memoryview], done: int) -> list[memoryview]:
    """The buffers without their first ``done`` bytes."""
    count = 0
    while count < len(views) and done >= len(views[count]):
        done -= len(views[count])
        count += 1
    left = views[count:]
    if done:
        left[0] = left[0][done:]
    return left
