"""Any fsspec file system as a store (`FsspecStore`), and S3 through s3fs (`FsspecS3Store`).

The guarantees are those of the file system: an object becomes visible when its file is closed (true for
the object stores of fsspec), and ``if_absent`` only checks first, so two writers may both win
(`StoreFacts.conditional_create`).

An asynchronous file system is called on its event loop, each request with a time limit: no part of a call
continues after the call has ended. Errors keep the server's answer as their cause if fsspec does.

For S3, requests of its own API (``call_s3``) add what fsspec does not offer: exclusive creates, parallel
parts that are repeated alone, batched deletes, reads of a whole object in one answer, and listing of
unfinished uploads. The retries of s3fs are off, because ours observe the deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import io
import posixpath
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from ckptd.storage.stores.objects import (
    RESERVED,
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
from ckptd.storage.stores.store_base import (
    Filler,
    RangeRequest,
    StoreBase,
    StoreOptions,
    UploadGone,
    check_limit,
    cut,
    part_size,
    run_all,
    s3_fault,
)

_DELETE_BATCH = 1000  # S3's limit
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")
_ETAGS = ("ETag", "etag")
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError")

_T = TypeVar("_T")


class FsspecStore(StoreBase):
    """Objects are files of an fsspec file system below the path of the URL.

    Args:
        multipart: whether large objects travel in parts (`StoreFacts.multipart`).
        conditional: whether a create is exclusive; None: probe the store.
    Raises:
        ImportError: the file system's package is not installed.
    """

    def __init__(
        self,
        url: str,
        options: StoreOptions,
        *,
        multipart: bool = False,
        conditional: bool | None = False,
    ) -> None:
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
        # The memory file system would show a streamed object from its first byte on.
        self._at_once = "memory" in _protocols(self._fs.protocol)
        self._pool = ThreadPoolExecutor(options.concurrency, thread_name_prefix="ckptd-fsspec")

    def close(self) -> None:
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
                # In pieces, because the file buffers them until it has a block.
                for group in cut(views, self._options.part_bytes):
                    for view in group:
                        file.write(view)
            except BaseException:
                self._give_up(file, path)
                raise
            file.close()

    def _give_up(self, file: Any, path: str) -> None:
        """Abort a failed upload: closing the file would commit its part of the data."""
        if hasattr(file, "discard"):
            file.discard()
            file.closed = True  # otherwise the garbage collector closes, and so commits, the file
        else:
            file.close()
            self._fs.rm_file(path)

    def _read(self, key: str, limit: int) -> bytes:
        size = self._size(key)
        check_limit(key, size, limit)
        data = self._again(key, lambda: self._bytes(key, 0, size)) if size else b""
        if len(data) != size:
            raise Damaged(key, f"{len(data)} bytes came of {size}")
        return data

    def _read_pieces(self, key: str, pieces: Sequence[RangeRequest]) -> None:
        self._check_ends(key, pieces)
        jobs: list[Callable[[], None]] = [partial(self._fetch, key, piece) for piece in pieces]
        run_all(self._pool, jobs)

    def _check_ends(self, key: str, pieces: Sequence[RangeRequest]) -> None:
        """Check before reading, because each file system answers a read beyond the end differently."""
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
        return -1  # fsspec cannot list them

    def _path(self, key: str) -> str:
        return f"{self._base}/{key}"

    def _size(self, key: str) -> int:
        found = self._info(key)
        if found is None:
            raise ObjectMissing(key, "is not there")
        return found.size

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the file system; an asynchronous one has the time limit of one request."""
        if not self._fs.async_impl:
            return getattr(self._fs, name)(*args, **kwargs)
        return self._run(getattr(self._fs, f"_{name}")(*args, **kwargs))

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run ``work`` on the event loop; it has ended when this returns or raises."""
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
            if future.cancel():  # an exception interrupted this thread
                over.wait()

    def _again(self, key: str, request: Callable[[], _T]) -> _T:
        """Retry a repeatable request, so that one failed part does not fail the whole object."""
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
        except Exception as error:  # each file system has errors of its own
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
    """The S3 server's answer, which s3fs keeps in its error or in a cause of it."""
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
    """Unix time, from any form of time that a file system uses."""
    if isinstance(moment, str):
        with contextlib.suppress(ValueError):
            moment = datetime.fromisoformat(moment)
    if isinstance(moment, datetime):
        moment = moment.timestamp()
    return int(moment * 1e9) if isinstance(moment, int | float) else 0


class FsspecS3Store(FsspecStore):
    """Objects below the path of an ``s3://bucket/path`` URL; the first call connects.

    Raises:
        ImportError: s3fs is not installed.
    """

    def __init__(self, url: str, options: StoreOptions) -> None:
        import s3fs  # noqa: F401 - the error of fsspec would not say how to install it

        parts = urlsplit(url)
        self._bucket = parts.netloc.rpartition("@")[2]
        path = parts.path.strip("/")
        own = replace(options, fsspec=_arguments(options))
        super().__init__(f"s3://{self._bucket}/{path}", own, multipart=True, conditional=None)
        self._fs.retries = 1
        self._top = f"{path}/" if path else ""
        self._closed = False

    def close(self) -> None:
        super().close()
        if not self._closed and self._fs._s3 is not None:
            self._run(self._fs._s3.close())
        self._closed = True

    def _put(self, key: str, views: Sequence[memoryview], size: int, *, if_absent: bool) -> None:
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        if size <= self._options.threshold_bytes:
            self._put_whole(key, views, size, condition)
        else:
            self._put_parts(key, views, size, condition)

    def _read(self, key: str, limit: int) -> bytes:
        async def get() -> bytes:
            answer = await self._fs._call_s3("get_object", **self._at(key))
            with contextlib.closing(answer["Body"]) as body:
                size = answer["ContentLength"]
                check_limit(key, size, limit)
                return bytes(await body.read())

        return self._again(key, lambda: self._run(get()))

    def _check_ends(self, key: str, pieces: Sequence[RangeRequest]) -> None:
        """Not needed: S3 answers with the existing part of a range."""

    def _delete(self, keys: Sequence[str]) -> None:
        for begin in range(0, len(keys), _DELETE_BATCH):
            batch = keys[begin : begin + _DELETE_BATCH]
            objects = {"Objects": [{"Key": self._top + key} for key in batch], "Quiet": True}
            answer = self._request(batch[0], "delete_objects", Bucket=self._bucket, Delete=objects)
            for error in answer.get("Errors", ()):
                key = str(error.get("Key", ""))[len(self._top) :]
                fault = s3_fault(key, error.get("Code", ""), 0, error.get("Message", "not deleted"))
                if not isinstance(fault, ObjectMissing):
                    raise fault

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._top + key}

    def _request(self, key: str, method: str, **arguments: Any) -> Any:
        with self._mapped(key):
            return self._call("call_s3", method, **arguments)

    def _put_whole(
        self, key: str, views: Sequence[memoryview], size: int, condition: Mapping[str, str]
    ) -> None:
        data = b"".join(views)
        body = _Counted(data)
        try:
            self._request(key, "put_object", **self._at(key), Body=body, **condition)
        except ObjectExists:
            # aiohttp silently repeats a PUT whose connection broke, so the existing object may be ours.
            begun_for_signing = 1 if self._options.signs_payload else 0
            if body.begun <= 1 + begun_for_signing or self._stored(key, size) != data:
                raise

    def _stored(self, key: str, size: int) -> bytes | None:
        """The stored bytes; None if the object is missing or larger than ``size``."""
        with contextlib.suppress(ObjectMissing, TooLarge):
            return self._read(key, size)
        return None

    def _put_parts(
        self, key: str, views: Sequence[memoryview], size: int, condition: Mapping[str, str]
    ) -> None:
        upload = self._request(key, "create_multipart_upload", **self._at(key))["UploadId"]
        etags: dict[int, str] = {}

        def send(number: int, group: Sequence[memoryview]) -> None:
            body = b"".join(group)  # one copy per request in flight, which bounds the memory

            def request() -> str:
                data = io.BytesIO(body)  # is sent in small writes; bytes of this size would be copied
                part = {"UploadId": upload, "PartNumber": number, "Body": data}
                etag: str = self._request(key, "upload_part", **self._at(key), **part)["ETag"]
                return etag

            etags[number] = self._again(key, request)

        groups = enumerate(cut(views, part_size(size, self._options.part_bytes)), start=1)
        try:
            run_all(self._pool, [partial(send, number, group) for number, group in groups])
            self._complete(key, size, upload, etags, condition)
        except BaseException as error:
            try:
                self._abort_upload(key, upload)
            except StoreError as fault:  # `abort_uploads` will find the upload
                error.add_note(f"and its parts could not be removed: {fault}")
            raise

    def _complete(
        self,
        key: str,
        size: int,
        upload: str,
        etags: Mapping[int, str],
        condition: Mapping[str, str],
    ) -> None:
        """Complete the upload; if an answer got lost, compare the stored object's ETag."""
        numbers = sorted(etags)
        parts = [{"PartNumber": number, "ETag": etags[number]} for number in numbers]
        made = {"UploadId": upload, "MultipartUpload": {"Parts": parts}, **condition}
        etag = _etag_of_parts(etags[number] for number in numbers)
        doubtful = False
        for attempt in range(self._options.attempts):
            try:
                self._request(key, "complete_multipart_upload", **self._at(key), **made)
                return
            except StoreError as fault:
                gone = isinstance(fault, UploadGone)
                if gone or (doubtful and isinstance(fault, ObjectExists)):
                    stored = self._info(key)
                    if stored and (stored.size, stored.etag) == (size, etag):
                        return
                if gone or not fault.retriable or attempt + 1 == self._options.attempts:
                    raise
                doubtful = True
            time.sleep(self._backoff.delay_s(attempt))

    def _abort_uploads(self, prefix: str, older_than_s: float) -> int:
        aborted = self._drop_old_probes(older_than_s)
        asked = {"Bucket": self._bucket, "Prefix": self._top + prefix}
        while True:
            page = self._request(prefix, "list_multipart_uploads", **asked)
            for upload in page.get("Uploads", ()):
                if _age_s(page, upload["Initiated"]) >= older_than_s:
                    aborted += self._abort_upload(upload["Key"][len(self._top) :], upload["UploadId"])
            if not page.get("IsTruncated"):
                return aborted
            asked["KeyMarker"] = page["NextKeyMarker"]
            asked["UploadIdMarker"] = page.get("NextUploadIdMarker", "")

    def _abort_upload(self, key: str, upload: str) -> bool:
        """Abort an upload; False if it does not exist any more."""
        try:
            self._request(key, "abort_multipart_upload", **self._at(key), UploadId=upload)
        except (ObjectMissing, UploadGone):
            return False
        return True

    def _drop_old_probes(self, older_than_s: float) -> int:
        """Delete the probes of processes that died while probing."""
        where = {"Bucket": self._bucket, "Prefix": self._top + RESERVED}
        page = self._request("", "list_objects_v2", **where)
        old = [
            each["Key"][len(self._top) :]
            for each in page.get("Contents", ())
            if _age_s(page, each["LastModified"]) >= older_than_s
        ]
        self._delete(old)
        return len(old)


class _Counted(io.BytesIO):
    """A request body that counts how often it was read from its beginning."""

    begun = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data_begins = self.tell() == 0
        data = super().read(size)
        self.begun += data_begins and bool(data)
        return data


def _etag_of_parts(etags: Iterable[str]) -> str:
    """The ETag that S3 gives to an object of these parts (servers that encrypt give another one)."""
    parts = [etag.strip('"') for etag in etags]
    with contextlib.suppress(ValueError):
        digest = hashlib.md5(b"".join(map(bytes.fromhex, parts)), usedforsecurity=False)
        return f"{digest.hexdigest()}-{len(parts)}"
    return ""


def _age_s(page: Mapping[str, Any], since: datetime) -> float:
    """The age by the server's own clock."""
    date = page["ResponseMetadata"]["HTTPHeaders"].get("date")
    now = parsedate_to_datetime(date) if date else datetime.now(UTC)
    return (now - since).total_seconds()


def _arguments(options: StoreOptions) -> dict[str, Any]:
    own = dict(options.fsspec)
    config = {
        "connect_timeout": options.connect_timeout_s,
        "read_timeout": options.request_timeout_s,
        "retries": {"total_max_attempts": 1},
        "max_pool_connections": 16 * options.concurrency,
        "s3": {"payload_signing_enabled": options.signs_payload},
        # Off by default: only some servers support these checksums, and they cost a CRC-32 in zlib.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        **own.pop("config_kwargs", {}),
    }
    client = dict(own.pop("client_kwargs", {}))
    if options.region:
        client.setdefault("region_name", options.region)
    return {
        "key": options.key,
        "secret": options.secret,
        "token": options.token,
        "endpoint_url": options.endpoint_url,
        "anon": options.anon,
        "client_kwargs": client,
        "config_kwargs": config,
        **own,
    }
