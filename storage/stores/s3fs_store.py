"""S3 by way of s3fs: its session, credentials and options, and requests of our own.

s3fs' file interface would copy an object once more, repeat whole objects where one part failed, and
hide which error it was; so parts, ranges and listings are asked for here, of the client that s3fs
made (`S3Client`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from ckptd.storage.stores.cutting import Filler, RangeRequest, cut, part_size
from ckptd.storage.stores.objects import (
    RESERVED,
    ContainerMissing,
    Damaged,
    ObjectExists,
    ObjectInfo,
    ObjectMissing,
    StoreError,
    TooLarge,
    Unavailable,
)
from ckptd.storage.stores.s3_faults import UploadGone, s3_fault
from ckptd.storage.stores.s3fs_client import PART_BACKOFF, S3Client, bounded
from ckptd.storage.stores.store_base import StoreBase
from ckptd.storage.stores.store_options import StoreOptions

__all__ = ["S3fsStore"]

_DELETE_BATCH = 1000  # S3's limit
_CHUNK_BYTES = 1 << 20
_ABORT_TIMEOUT_S = 10.0


class S3fsStore(StoreBase):
    """Objects below the path of an ``s3://bucket/path`` URL."""

    def __init__(self, url: str, options: StoreOptions) -> None:
        """Set up the file system; the first call connects.

        Raises:
            ImportError: s3fs is not installed.
        """
        super().__init__(
            "s3fs", url, piece_bytes=options.part_bytes, multipart=True, conditional=None
        )
        self._options = options
        parts = urlsplit(url)
        path = parts.path.strip("/")
        self._base = f"{path}/" if path else ""
        self._client = S3Client(parts.netloc.rpartition("@")[2], options)
        self._closed = False

    def close(self) -> None:
        """Close the connections; whatever still runs fails."""
        if not self._closed:
            self._closed = True
            self._client.run("", self._client.close())

    # --- the seam ---

    def _put(self, key: str, views: Sequence[memoryview], size: int, *, if_absent: bool) -> None:
        small = size <= self._options.threshold_bytes
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        put = self._put_small if small else self._put_parts
        self._client.run(key, put(key, views, size, condition))

    def _read(self, key: str, limit: int) -> bytes:
        return self._client.run(key, self._client.again(key, lambda: self._get(key, limit)))

    def _read_pieces(self, key: str, pieces: Sequence[RangeRequest]) -> None:
        async def fetch(piece: RangeRequest) -> None:
            await self._client.again(key, lambda: self._get_piece(key, piece))

        self._client.run(key, bounded(self._options.concurrency, fetch, pieces))

    def _info(self, key: str) -> ObjectInfo | None:
        return self._client.run(key, self._head(key))

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        token: dict[str, str] = {}
        while True:
            asked = {"Prefix": self._base + prefix, **token}
            page = self._client.run(prefix, self._client.once(prefix, "list_objects_v2", **asked))
            for each in page.get("Contents", ()):
                yield _object(each["Key"][len(self._base) :], each["Size"], each)
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def _delete(self, keys: Sequence[str]) -> None:
        for begin in range(0, len(keys), _DELETE_BATCH):
            batch = keys[begin : begin + _DELETE_BATCH]
            objects = {"Objects": [{"Key": self._base + key} for key in batch], "Quiet": True}
            answer = self._client.run(
                batch[0], self._client.once(batch[0], "delete_objects", Delete=objects)
            )
            for error in answer.get("Errors", ()):
                key = str(error.get("Key", ""))[len(self._base) :]
                fault = s3_fault(key, error.get("Code", ""), 0, error.get("Message", "not deleted"))
                if not isinstance(fault, ObjectMissing):
                    raise fault

    def _abort_uploads(self, prefix: str, older_than_s: float) -> int:
        return self._client.run(prefix, self._abort_old(prefix, older_than_s))

    # --- puts ---

    async def _put_small(
        self, key: str, views: Sequence[memoryview], size: int, condition: Mapping[str, str]
    ) -> None:
        data = b"".join(views)
        body = _Counted(data)
        try:
            await self._client.once(key, "put_object", Key=self._base + key, Body=body, **condition)
        except ObjectExists:
            # aiohttp sends a PUT again whose connection broke, and says nothing of it: then this
            # may be our own.
            begun_for_signing = 1 if self._options.signs_payload else 0
            if body.begun <= 1 + begun_for_signing or await self._stored(key, size) != data:
                raise

    async def _stored(self, key: str, size: int) -> bytes | None:
        """The object, if it has this size."""
        with contextlib.suppress(ObjectMissing, TooLarge):
            return await self._client.again(key, lambda: self._get(key, size))
        return None

    async def _put_parts(
        self, key: str, views: Sequence[memoryview], size: int, condition: Mapping[str, str]
    ) -> None:
        path = self._base + key
        upload = (await self._client.once(key, "create_multipart_upload", Key=path))["UploadId"]
        etags: dict[int, str] = {}

        async def send(part: tuple[int, Sequence[memoryview]]) -> None:
            number, group = part
            body = b"".join(group)  # this copy is what bounds the memory: one per request in flight

            def request() -> Awaitable[Mapping[str, Any]]:
                data = io.BytesIO(body)  # sent in small writes; bytes of this size would be copied
                return self._client.call(
                    "upload_part", Key=path, UploadId=upload, PartNumber=number, Body=data
                )

            etags[number] = (await self._client.again(key, request))["ETag"]

        groups = enumerate(cut(views, part_size(size, self._options.part_bytes)), start=1)
        try:
            await bounded(self._options.concurrency, send, groups)
            await self._complete(key, size, upload, etags, condition)
        except BaseException as error:
            await asyncio.shield(self._abort(key, upload, error))
            raise

    async def _complete(
        self,
        key: str,
        size: int,
        upload: str,
        etags: Mapping[int, str],
        condition: Mapping[str, str],
    ) -> None:
        """Make an object of the parts. An answer may get lost: then the object itself tells."""
        parts = [{"PartNumber": number, "ETag": etags[number]} for number in sorted(etags)]
        etag = _etag_of_parts([etags[number] for number in sorted(etags)])
        doubtful = False
        for attempt in range(self._options.attempts):
            try:
                await self._client.once(
                    key,
                    "complete_multipart_upload",
                    Key=self._base + key,
                    UploadId=upload,
                    MultipartUpload={"Parts": parts},
                    **condition,
                )
                return
            except StoreError as fault:
                gone = isinstance(fault, UploadGone)
                if gone or (doubtful and isinstance(fault, ObjectExists)):
                    stored = await self._head(key)
                    if stored and (stored.size, stored.etag) == (size, etag):
                        return
                if gone or not fault.retriable or attempt + 1 == self._options.attempts:
                    raise
                doubtful = True
            await asyncio.sleep(PART_BACKOFF.delay_s(attempt))

    async def _abort(self, key: str, upload: str, cause: BaseException) -> None:
        """End an upload that failed; if that fails, too, `abort_uploads` will find it."""
        try:
            async with asyncio.timeout(_ABORT_TIMEOUT_S):
                await self._client.once(
                    key, "abort_multipart_upload", Key=self._base + key, UploadId=upload
                )
        except (StoreError, TimeoutError) as error:
            if not isinstance(error, ObjectMissing | UploadGone):
                cause.add_note(f"and its parts could not be removed: {error}")

    # --- reads ---

    async def _get(self, key: str, limit: int) -> bytes:
        answer = await self._client.call("get_object", Key=self._base + key)
        size = answer["ContentLength"]
        async with contextlib.aclosing(_Body(answer["Body"])) as body:
            if size > limit:
                raise TooLarge(key, f"has {size} bytes, of which {limit} are allowed")
            data = bytearray(size)
            filler = Filler(RangeRequest(0, size, (memoryview(data),)))
            await body.fill(key, filler)
        return bytes(data)

    async def _get_piece(self, key: str, piece: RangeRequest) -> None:
        asked = f"bytes={piece.offset}-{piece.offset + piece.size - 1}"
        answer = await self._client.call("get_object", Key=self._base + key, Range=asked)
        async with contextlib.aclosing(_Body(answer["Body"])) as body:
            if answer["ContentLength"] != piece.size:
                raise Damaged(
                    key, f"{answer['ContentLength']} bytes of {piece.size} at {piece.offset}"
                )
            await body.fill(key, Filler(piece))

    async def _head(self, key: str) -> ObjectInfo | None:
        try:
            answer = await self._client.once(key, "head_object", Key=self._base + key)
        except ObjectMissing:
            await self._check_bucket(key)
            return None
        return _object(key, answer["ContentLength"], answer)

    async def _check_bucket(self, key: str) -> None:
        """An answer to HEAD has no room to say what is missing: the object or the bucket."""
        try:
            await self._client.once(key, "head_bucket")
        except ObjectMissing as error:
            raise ContainerMissing(key, f"bucket {self._client.bucket} is not there") from error

    # --- what dead writers left ---

    async def _abort_old(self, prefix: str, older_than_s: float) -> int:
        aborted = await self._drop_old_probes(older_than_s)
        marker: dict[str, str] = {}
        while True:
            asked = {"Prefix": self._base + prefix, **marker}
            page = await self._client.once(prefix, "list_multipart_uploads", **asked)
            for upload in page.get("Uploads", ()):
                if _age_s(page, upload["Initiated"]) >= older_than_s:
                    aborted += await self._abort_one(upload)
            if not page.get("IsTruncated"):
                return aborted
            marker = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page.get("NextUploadIdMarker", ""),
            }

    async def _abort_one(self, upload: Mapping[str, Any]) -> int:
        key = upload["Key"][len(self._base) :]
        try:
            await self._client.once(
                key, "abort_multipart_upload", Key=upload["Key"], UploadId=upload["UploadId"]
            )
        except (ObjectMissing, UploadGone):
            return 0  # somebody else ended it
        return 1

    async def _drop_old_probes(self, older_than_s: float) -> int:
        """Probes whose prober died between asking and deleting."""
        dropped = 0
        page = await self._client.once("", "list_objects_v2", Prefix=self._base + RESERVED)
        for each in page.get("Contents", ()):
            if _age_s(page, each["LastModified"]) >= older_than_s:
                await self._client.once("", "delete_object", Key=each["Key"])
                dropped += 1
        return dropped


class _Counted(io.BytesIO):
    """A body that knows how often it was read from its beginning."""

    begun = 0

    def read(self, size: int | None = -1, /) -> bytes:
        """See `io.BytesIO.read`."""
        data_begins = self.tell() == 0
        data = super().read(size)
        self.begun += data_begins and bool(data)
        return data


class _Body:
    """The body of an answer: read to its end, or the connection goes with it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def fill(self, key: str, filler: Filler) -> None:
        """Everything the filler misses, and then the end."""
        while chunk := await self._stream.read(_CHUNK_BYTES):
            filler.take(memoryview(chunk))
        if filler.left:
            raise Unavailable(key, f"the answer ended {filler.left} bytes too early")

    async def aclose(self) -> None:
        """Let go of the connection."""
        self._stream.close()


def _etag_of_parts(etags: Iterable[str]) -> str:
    """The ETag that S3 gives an object of these parts (servers that encrypt give another one)."""
    parts = [etag.strip('"') for etag in etags]
    with contextlib.suppress(ValueError):
        digest = hashlib.md5(b"".join(map(bytes.fromhex, parts)), usedforsecurity=False)
        return f"{digest.hexdigest()}-{len(parts)}"
    return ""


def _age_s(page: Mapping[str, Any], since: datetime) -> float:
    """How old something is by the server's own clock."""
    date = page["ResponseMetadata"]["HTTPHeaders"].get("date")
    now = parsedate_to_datetime(date) if date else datetime.now(UTC)
    return (now - since).total_seconds()


def _object(key: str, size: int, details: Mapping[str, Any]) -> ObjectInfo:
    modified_ns = int(details["LastModified"].timestamp() * 1e9)
    return ObjectInfo(key, size, modified_ns, details.get("ETag", "").strip('"'))
