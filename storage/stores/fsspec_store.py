"""Any fsspec file system as a store, by URL. `FsspecS3Store` adds what S3 has and fsspec has no word for.

What is promised here is what the file system keeps: an object appears when its file is closed (true
of the object stores of fsspec), and ``if_absent`` looks first, so two writers may both win
(`StoreFacts.conditional_create`).

A file system with an event loop is called there, each request in its time: nothing of a call goes on when
the call has ended. Errors keep the server's answer as their cause where fsspec does.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import posixpath
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

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
from ckptd.storage.stores.resilience import Backoff, RetryPolicy
from ckptd.storage.stores.s3_faults import s3_fault
from ckptd.storage.stores.store_base import StoreBase, run_all
from ckptd.storage.stores.store_options import StoreOptions

__all__ = ["FsspecStore"]

_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")
_ETAGS = ("ETag", "etag")
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError")

_T = TypeVar("_T")


class FsspecStore(StoreBase):
    """Objects are files of an fsspec file system below the URL's path."""

    def __init__(
        self,
        url: str,
        options: StoreOptions,
        *,
        multipart: bool = False,
        conditional: bool | None = False,
    ) -> None:
        """Open the file system; imports what speaks to it.

        Args:
            multipart: whether large objects travel in parts (`StoreFacts.multipart`).
            conditional: whether creating is exclusive; None: the store must be asked.
        Raises:
            ImportError: that is not installed.
        """
        import fsspec

        super().__init__(
            "fsspec",
            url,
            piece_bytes=options.part_bytes,
            multipart=multipart,
            conditional=conditional,
        )
        own = {"use_listings_cache": False, "skip_instance_cache": True, **options.fsspec}
        self._fs, path = fsspec.url_to_fs(url, **own)
        self._base = path.rstrip("/")
        self._options = options
        self._policy = RetryPolicy(options.attempts, options.request_timeout_s, cap_s=5.0)
        self._backoff = Backoff(self._policy.base_s, self._policy.cap_s, random.Random())
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
        size = self._size(key)
        if size > limit:
            raise TooLarge(key, f"has {size} bytes, of which {limit} are allowed")
        data = self._again(key, lambda: self._bytes(key, 0, size)) if size else b""
        if len(data) != size:
            raise Damaged(key, f"{len(data)} bytes came of {size}")
        return data

    def _read_pieces(self, key: str, pieces: Sequence[RangeRequest]) -> None:
        self._check_ends(key, pieces)
        jobs: list[Callable[[], None]] = [partial(self._fetch, key, piece) for piece in pieces]
        run_all(self._pool, jobs)

    def _check_ends(self, key: str, pieces: Sequence[RangeRequest]) -> None:
        """What lies beyond the end, file systems answer each in its own way."""
        size = self._size(key)
        short = next((piece for piece in pieces if piece.offset + piece.size > size), None)
        if short is not None:
            raise Damaged(key, f"has {size} bytes, not {short.size} at {short.offset}")

    def _fetch(self, key: str, piece: RangeRequest) -> None:
        end = piece.offset + piece.size
        data = self._again(key, lambda: self._bytes(key, piece.offset, end))
        if len(data) != piece.size:
            raise Damaged(key, f"{len(data)} bytes came of {piece.size} at {piece.offset}")
        Filler(piece).take(memoryview(data))

    def _bytes(self, key: str, begin: int, end: int) -> bytes:
        return bytes(self._call("cat_file", self._path(key), start=begin, end=end))

    def _info(self, key: str) -> ObjectInfo | None:
        self._fs.invalidate_cache()
        try:
            with self._mapped(key):
                found = self._call("info", self._path(key))
        except ObjectMissing:
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
            with contextlib.suppress(ObjectMissing), self._mapped(key):
                self._call("rm_file", self._path(key))

    def _abort_uploads(self, prefix: str, older_than_s: float) -> int:
        return -1  # fsspec has no word for them

    def _path(self, key: str) -> str:
        return f"{self._base}/{key}"

    def _size(self, key: str) -> int:
        found = self._info(key)
        if found is None:
            raise ObjectMissing(key, "is not there")
        return found.size

    # --- requests ---

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A method of the file system; one that is a coroutine gets the time of one request."""
        if not self._fs.async_impl:
            return getattr(self._fs, name)(*args, **kwargs)
        return self._run(getattr(self._fs, f"_{name}")(*args, **kwargs))

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Do it on the event loop; nothing of it goes on when this ends, whatever ends it."""
        over = threading.Event()

        async def watched() -> _T:
            try:
                async with asyncio.timeout(self._options.request_timeout_s):
                    return await work
            finally:
                over.set()

        future = asyncio.run_coroutine_threadsafe(watched(), self._fs.loop)
        try:
            return future.result()
        finally:
            if future.cancel():  # this thread was interrupted
                over.wait()

    def _again(self, key: str, request: Callable[[], _T]) -> _T:
        """A request that may be repeated: a part that fails is not yet an object that fails."""
        begun_s = time.monotonic()
        attempt = 0
        while True:
            try:
                with self._mapped(key):
                    return request()
            except StoreError as error:
                delay_s = self._backoff.delay_s(attempt)
                elapsed_s = time.monotonic() - begun_s
                if not error.retriable or not self._policy.again(attempt, elapsed_s, delay_s):
                    raise
            time.sleep(delay_s)
            attempt += 1

    @contextlib.contextmanager
    def _mapped(self, key: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except Exception as error:  # each file system has errors of its own: none gets lost
            raise self._fault(key, error) from error

    def _fault(self, key: str, error: Exception) -> StoreError:
        detail = self._options.hide(f"{type(error).__name__}: {error}")
        answer = _answer(error)
        if answer is not None:
            code = str(answer.get("Error", {}).get("Code", ""))
            status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return s3_fault(key, code, status, detail)
        if isinstance(error, FileNotFoundError):
            return ObjectMissing(key, "is not there")
        if isinstance(error, FileExistsError):
            return ObjectExists(key, "exists already")
        if isinstance(error, PermissionError) or type(error).__name__ in _NO_CREDENTIALS:
            return StoreRefused(key, detail)
        if isinstance(error, TimeoutError):
            limit = f" (at most {self._options.request_timeout_s:g} s)"
            return Unavailable(key, f"no answer in time{limit}: {detail}")
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return NoSpace(key, detail)
        return Unavailable(key, detail)


def _answer(error: BaseException | None) -> Mapping[str, Any] | None:
    """What an S3 server answered, which a file system keeps with its error or with the cause of it."""
    while error is not None:
        answer = getattr(error, "response", None)
        if isinstance(answer, Mapping):
            return answer
        error = error.__cause__
    return None


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
