"""Any fsspec file system as a store, by URL. Plain: for S3 there are `S3fsStore` and `ObstoreStore`.

What is promised here is what the file system keeps: an object appears when its file is closed (true
of the object stores of fsspec), and ``if_absent`` looks first, so two writers may both win
(`StoreFacts.conditional_create`).
"""

from __future__ import annotations

import contextlib
import errno
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from typing import Any

from ckptd.storage.stores.cutting import Filler, RangeRequest, cut
from ckptd.storage.stores.objects import (
    Damaged,
    NoSpace,
    ObjectExists,
    ObjectInfo,
    ObjectMissing,
    StoreError,
    StoreRefused,
    TooLarge,
    Unavailable,
)
from ckptd.storage.stores.store_base import StoreBase, run_all
from ckptd.storage.stores.store_options import StoreOptions

__all__ = ["FsspecStore"]

_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")
_ETAGS = ("ETag", "etag")


class FsspecStore(StoreBase):
    """Objects are files of an fsspec file system below the URL's path."""

    def __init__(self, url: str, options: StoreOptions) -> None:
        """Open the file system; imports what speaks to it.

        Raises:
            ImportError: that is not installed.
        """
        import fsspec

        super().__init__(
            "fsspec", url, piece_bytes=options.part_bytes, multipart=False, conditional=False
        )
        own = {"use_listings_cache": False, "skip_instance_cache": True, **options.fsspec}
        self._fs, path = fsspec.url_to_fs(url, **own)
        self._base = path.rstrip("/")
        self._options = options
        # One object in memory: the file system would show it from its first byte on if it were streamed.
        self._at_once = "memory" in _protocols(self._fs.protocol)
        self._pool = ThreadPoolExecutor(options.concurrency, thread_name_prefix="ckptd-fsspec")

    def close(self) -> None:
        """End the threads; the file system ends with its last user."""
        self._pool.shutdown()

    def _put(self, key: str, views: Sequence[memoryview], size: int, *, if_absent: bool) -> None:
        path = self._path(key)
        with self._mapped(key):
            if self._at_once:
                self._fs.pipe_file(path, b"".join(views))
                return
            self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
            file = self._fs.open(path, "wb", block_size=self._options.part_bytes)
            try:
                # In pieces: the file keeps what it is given until it has a block.
                for group in cut(views, self._options.part_bytes):
                    for view in group:
                        file.write(view)
            except BaseException:
                self._give_up(file, path)
                raise
            file.close()

    def _give_up(self, file: Any, path: str) -> None:
        """End an upload that failed: closing the file would commit what it has."""
        if hasattr(file, "discard"):
            file.discard()
            file.closed = True  # or the garbage collector closes, and commits, it
        else:
            file.close()
            self._fs.rm_file(path)

    def _read(self, key: str, limit: int) -> bytes:
        with self._mapped(key):
            size = self._size(key)
            if size > limit:
                raise TooLarge(key, f"has {size} bytes, of which {limit} are allowed")
            data = bytes(self._fs.cat_file(self._path(key), start=0, end=size)) if size else b""
        if len(data) != size:
            raise Damaged(key, f"{len(data)} bytes came of {size}")
        return data

    def _read_pieces(self, key: str, pieces: Sequence[RangeRequest]) -> None:
        size = self._size(key)  # what lies beyond the end, file systems answer each in its own way
        short = next((piece for piece in pieces if piece.offset + piece.size > size), None)
        if short is not None:
            raise Damaged(key, f"has {size} bytes, not {short.size} at {short.offset}")
        with self._mapped(key):
            jobs: list[Callable[[], None]] = [partial(self._fetch, key, piece) for piece in pieces]
            run_all(self._pool, jobs)

    def _fetch(self, key: str, piece: RangeRequest) -> None:
        end = piece.offset + piece.size
        data = self._fs.cat_file(self._path(key), start=piece.offset, end=end)
        if len(data) != piece.size:
            raise Damaged(key, f"{len(data)} bytes came of {piece.size} at {piece.offset}")
        Filler(piece).take(memoryview(data))

    def _info(self, key: str) -> ObjectInfo | None:
        with self._mapped(key):
            self._fs.invalidate_cache()
            try:
                found = self._fs.info(self._path(key))
            except FileNotFoundError:
                return None
            return _object(key, found) if found["type"] == "file" else None

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._mapped(prefix):
            self._fs.invalidate_cache()
            folder = f"{self._base}/{prefix}".rstrip("/")
            found = self._fs.find(folder, withdirs=False, detail=True)
        skip = len(self._base.lstrip("/")) + 1 if self._base.strip("/") else 0
        for name, details in found.items():
            key = name.lstrip("/")[skip:]
            if key.startswith(prefix):
                yield _object(key, details)

    def _delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            with self._mapped(key), contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path(key))

    def _abort_uploads(self, prefix: str, older_than_s: float) -> int:
        return -1  # fsspec has no word for them

    def _path(self, key: str) -> str:
        return f"{self._base}/{key}"

    def _size(self, key: str) -> int:
        found = self._info(key)
        if found is None:
            raise ObjectMissing(key, "is not there")
        return found.size

    @contextlib.contextmanager
    def _mapped(self, key: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except FileNotFoundError as error:
            raise ObjectMissing(key, "is not there") from error
        except FileExistsError as error:
            raise ObjectExists(key, "exists already") from error
        except PermissionError as error:
            raise StoreRefused(key, self._options.hide(str(error))) from error
        except Exception as error:  # each file system has errors of its own: none gets lost
            detail = self._options.hide(f"{type(error).__name__}: {error}")
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise (NoSpace if full else Unavailable)(key, detail) from error


def _protocols(protocol: str | Sequence[str]) -> tuple[str, ...]:
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def _object(key: str, details: Mapping[str, Any]) -> ObjectInfo:
    modified = next((details[name] for name in _TIMES if details.get(name)), 0)
    etag = next((str(details[name]) for name in _ETAGS if details.get(name)), "")
    return ObjectInfo(key, int(details["size"] or 0), _nanoseconds(modified), etag.strip('"'))


def _nanoseconds(moment: object) -> int:
    """Whatever a file system tells as a time, since the epoch."""
    if isinstance(moment, str):
        with contextlib.suppress(ValueError):
            moment = datetime.fromisoformat(moment)
    if isinstance(moment, datetime):
        moment = moment.timestamp()
    return int(moment * 1e9) if isinstance(moment, int | float) else 0
