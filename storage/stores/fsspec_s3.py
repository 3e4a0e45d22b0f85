"""S3 by way of fsspec and s3fs: what `FsspecStore` does, and what S3 has and fsspec has no word for.

That is creating only what is not there, parts that travel several at a time and are repeated alone, deletes
in batches, reads of a whole object in one answer, and uploads that somebody left half-finished. Each is a
request of S3's own (``call_s3``). s3fs' own retries are off: ours know the deadline.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from ckptd.storage.stores.cutting import RangeRequest, cut, part_size
from ckptd.storage.stores.fsspec_store import FsspecStore
from ckptd.storage.stores.objects import (
    RESERVED,
    ObjectExists,
    ObjectMissing,
    StoreError,
    TooLarge,
)
from ckptd.storage.stores.s3_faults import UploadGone, s3_fault
from ckptd.storage.stores.store_base import run_all
from ckptd.storage.stores.store_options import StoreOptions

__all__ = ["FsspecS3Store"]

_DELETE_BATCH = 1000  # S3's limit


class FsspecS3Store(FsspecStore):
    """Objects below the path of an ``s3://bucket/path`` URL."""

    def __init__(self, url: str, options: StoreOptions) -> None:
        """Set up the file system; the first call connects.

        Raises:
            ImportError: s3fs is not installed.
        """
        import s3fs  # noqa: F401 - fsspec would import it, and does not say how to get it

        parts = urlsplit(url)
        self._bucket = parts.netloc.rpartition("@")[2]
        path = parts.path.strip("/")
        own = replace(options, fsspec=_arguments(options))
        super().__init__(f"s3://{self._bucket}/{path}", own, multipart=True, conditional=None)
        self._fs.retries = 1
        self._top = f"{path}/" if path else ""
        self._closed = False

    def close(self) -> None:
        """End the threads and close the connections; whatever still runs fails."""
        super().close()
        if not self._closed and self._fs._s3 is not None:
            self._run(self._fs._s3.close())
        self._closed = True

    # --- the seam ---

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
                if size > limit:
                    raise TooLarge(key, f"has {size} bytes, of which {limit} are allowed")
                return bytes(await body.read())

        return self._again(key, lambda: self._run(get()))

    def _check_ends(self, key: str, pieces: Sequence[RangeRequest]) -> None:
        """S3 answers with what there is of a range."""

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
        """One request of S3's own, in time, with the errors of the seam."""
        with self._mapped(key):
            return self._call("call_s3", method, **arguments)

    # --- puts ---

    def _put_whole(
        self, key: str, views: Sequence[memoryview], size: int, condition: Mapping[str, str]
    ) -> None:
        data = b"".join(views)
        body = _Counted(data)
        try:
            self._request(key, "put_object", **self._at(key), Body=body, **condition)
        except ObjectExists:
            # aiohttp sends a PUT again whose connection broke, and says nothing of it: then this
            # may be our own.
            begun_for_signing = 1 if self._options.signs_payload else 0
            if body.begun <= 1 + begun_for_signing or self._stored(key, size) != data:
                raise

    def _stored(self, key: str, size: int) -> bytes | None:
        """The object, if it has this size."""
        with contextlib.suppress(ObjectMissing, TooLarge):
            return self._read(key, size)
        return None

    def _put_parts(
        self, key: str, views: Sequence[memoryview], size: int, condition: Mapping[str, str]
    ) -> None:
        upload = self._request(key, "create_multipart_upload", **self._at(key))["UploadId"]
        etags: dict[int, str] = {}

        def send(number: int, group: Sequence[memoryview]) -> None:
            body = b"".join(group)  # this copy is what bounds the memory: one per request in flight

            def request() -> str:
                data = io.BytesIO(body)  # sent in small writes; bytes of this size would be copied
                part = {"UploadId": upload, "PartNumber": number, "Body": data}
                etag: str = self._request(key, "upload_part", **self._at(key), **part)["ETag"]
                return etag

            etags[number] = self._again(key, request)

        groups = enumerate(cut(views, part_size(size, self._options.part_bytes)), start=1)
        try:
            run_all(self._pool, [partial(send, number, group) for number, group in groups])
            self._complete(key, size, upload, etags, condition)
        except BaseException as error:
            self._abort(key, upload, error)
            raise

    def _complete(
        self,
        key: str,
        size: int,
        upload: str,
        etags: Mapping[int, str],
        condition: Mapping[str, str],
    ) -> None:
        """Make an object of the parts. An answer may get lost: then the object itself tells."""
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

    def _abort(self, key: str, upload: str, cause: BaseException) -> None:
        """End an upload that failed; if that fails, too, `abort_uploads` will find it."""
        try:
            self._request(key, "abort_multipart_upload", **self._at(key), UploadId=upload)
        except (ObjectMissing, UploadGone):
            return
        except StoreError as error:
            cause.add_note(f"and its parts could not be removed: {error}")

    # --- what dead writers left ---

    def _abort_uploads(self, prefix: str, older_than_s: float) -> int:
        aborted = self._drop_old_probes(older_than_s)
        asked = {"Bucket": self._bucket, "Prefix": self._top + prefix}
        while True:
            page = self._request(prefix, "list_multipart_uploads", **asked)
            for upload in page.get("Uploads", ()):
                if _age_s(page, upload["Initiated"]) >= older_than_s:
                    aborted += self._abort_one(upload)
            if not page.get("IsTruncated"):
                return aborted
            asked["KeyMarker"] = page["NextKeyMarker"]
            asked["UploadIdMarker"] = page.get("NextUploadIdMarker", "")

    def _abort_one(self, upload: Mapping[str, Any]) -> int:
        key = upload["Key"][len(self._top) :]
        try:
            self._request(key, "abort_multipart_upload", **self._at(key), UploadId=upload["UploadId"])
        except (ObjectMissing, UploadGone):
            return 0  # somebody else ended it
        return 1

    def _drop_old_probes(self, older_than_s: float) -> int:
        """Probes whose prober died between asking and deleting."""
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
    """A body that knows how often it was read from its beginning."""

    begun = 0

    def read(self, size: int | None = -1, /) -> bytes:
        """See `io.BytesIO.read`."""
        data_begins = self.tell() == 0
        data = super().read(size)
        self.begun += data_begins and bool(data)
        return data


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


def _arguments(options: StoreOptions) -> dict[str, Any]:
    """What s3fs is called with."""
    own = dict(options.fsspec)
    config = {
        "connect_timeout": options.connect_timeout_s,
        "read_timeout": options.request_timeout_s,
        "retries": {"total_max_attempts": 1},
        "max_pool_connections": 16 * options.concurrency,
        "s3": {"payload_signing_enabled": options.signs_payload},
        # Checksums that only some servers know, at the price of a CRC-32 in Python's zlib.
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
