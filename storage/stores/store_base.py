"""What all stores have in common: checks of keys and sizes, the probe, threads that fill buffers."""

from __future__ import annotations

import ipaddress
import math
import re
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, wait
from dataclasses import dataclass, field, fields, replace
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import msgspec

from ckptd.storage.stores.objects import (
    RESERVED,
    ContainerMissing,
    Damaged,
    NoSpace,
    ObjectExists,
    ObjectInfo,
    ObjectMissing,
    Range,
    StoreError,
    StoreFacts,
    StoreRefused,
    Throttled,
    Unavailable,
    check_key,
    check_prefix,
    is_reserved,
)

__all__ = [
    "MIN_PART_BYTES",
    "Filler",
    "RangeRequest",
    "StoreBase",
    "StoreOptions",
    "UploadGone",
    "cut",
    "flat",
    "part_size",
    "plan_reads",
    "public_url",
    "run_all",
    "s3_fault",
    "secrets_in",
    "total",
]


MIN_PART_BYTES = 5 << 20  # S3 refuses smaller parts (but the last)
_SECRET_NAME = re.compile(r"key|secret|token|passw|credential|sas", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How to reach a store and how to treat it. What is secret shows in no repr and no error text."""

    key: str | None = field(default=None, repr=False)
    secret: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    """Credentials; without them those of the environment (``AWS_…``) are used."""
    endpoint_url: str | None = None
    """Of an S3 server that is not Amazon's."""
    region: str | None = None
    anon: bool = False
    """Sign nothing: a public bucket."""
    sign_payload: bool | None = None
    """Whether S3 requests sign the bytes, too, so that the server refuses what was changed on the way.

    It costs a SHA-256 (about 0.7 CPU seconds per GiB, taken from training). TLS protects the bytes
    as well, and nothing happens to them on loopback, so None means: only over plain http to another
    host. Digests of our own are checked whenever something is read.
    """
    part_bytes: int = 16 << 20
    """Size of a part of a multipart upload, and of a request when reading."""
    threshold_bytes: int = 16 << 20
    """Larger objects are put in parts."""
    concurrency: int = 4
    """Requests in flight within one call. A call needs up to ``part_bytes * concurrency`` of memory."""
    attempts: int = 3
    """How often one part or one range is tried before the call fails."""
    connect_timeout_s: float = 5.0
    request_timeout_s: float = 60.0
    """Bound of one request: a part, a range, a page of a listing. Nothing is retried within a call after so
    long, so a call to a server that stopped answering ends within about three times this."""
    fsspec: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Further arguments of the fsspec file system."""
    obstore: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Further configuration of the obstore store; within it, ``client_options`` are its HTTP client's, and
    ``credential_provider`` is called for credentials."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if self.part_bytes < MIN_PART_BYTES or self.threshold_bytes < 0:
            raise ValueError(f"part_bytes must be at least {MIN_PART_BYTES}, and no size negative")
        if self.concurrency < 1 or self.attempts < 1:
            raise ValueError("concurrency and attempts must be at least 1")
        if self.connect_timeout_s <= 0 or self.request_timeout_s <= 0:
            raise ValueError("timeouts must be more than 0 seconds")
        if (self.key is None) != (self.secret is None):
            raise ValueError("key and secret are given together or not at all")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> StoreOptions:
        """The options of a mapping.

        Raises:
            ValueError: a name that is not one of ours, or a value that cannot work.
        """
        unknown = options.keys() - {each.name for each in fields(cls)}
        if unknown:
            names = ", ".join(sorted(unknown))
            raise ValueError(
                f"unknown storage options: {names} (a backend's own belong under 'fsspec' or 'obstore')"
            )
        try:
            return msgspec.convert(dict(options), cls)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, ValueError):  # of `__post_init__`
                raise error.__cause__ from None
            raise ValueError(f"an option has a value of another kind: {error}") from error

    def for_s3(self, environment: Mapping[str, str]) -> StoreOptions:
        """With what the environment says of the server: the clients read more of it, each its own part."""
        endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
        region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
        return replace(self, endpoint_url=self.endpoint_url or endpoint, region=self.region or region)

    @property
    def signs_payload(self) -> bool:
        """What ``sign_payload`` comes to for this endpoint."""
        if self.sign_payload is not None:
            return self.sign_payload
        url = urlsplit(self.endpoint_url or "https:")
        return url.scheme == "http" and not _is_loopback(url.hostname or "")

    def hide(self, text: str) -> str:
        """The text without what is secret."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        for secret in secrets_in(own):
            text = text.replace(secret, "***")
        return text


def secrets_in(options: Mapping[str, Any], secret: bool = False) -> Iterator[str]:
    """The values that no text may show, by the names of the options; ``secret``: all of them."""
    for name, value in options.items():
        named = secret or _SECRET_NAME.search(name) is not None
        if isinstance(value, Mapping):
            yield from secrets_in(value, named)
        elif isinstance(value, str) and value and named:
            yield value


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


MAX_PARTS = 10_000  # S3's limit
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class RangeRequest:
    """One request: neighbouring bytes of an object, and the buffers they go to, in order."""

    offset: int
    size: int
    into: tuple[memoryview, ...]


class Filler:
    """Fills the buffers of a piece from a stream of chunks."""

    __slots__ = ("_left", "_views")

    def __init__(self, piece: RangeRequest) -> None:
        self._views = list(reversed(piece.into))
        self._left = piece.size

    @property
    def left(self) -> int:
        """How many bytes are still missing."""
        return self._left

    def take(self, chunk: memoryview) -> None:
        """The next bytes.

        Raises:
            ValueError: more than are missing.
        """
        if len(chunk) > self._left:
            raise ValueError(f"{len(chunk)} bytes came where {self._left} are missing")
        self._left -= len(chunk)
        while chunk:
            view = self._views.pop()
            size = min(len(view), len(chunk))
            view[:size] = chunk[:size]
            chunk = chunk[size:]
            if size < len(view):
                self._views.append(view[size:])


def flat(parts: Sequence[memoryview]) -> list[memoryview]:
    """The parts as plain bytes, without empty ones.

    Raises:
        ValueError: one is not contiguous.
    """
    if not all(part.c_contiguous for part in parts):
        raise ValueError("what is stored must lie in one piece of memory")
    return [part.cast("B") for part in parts if part.nbytes]


def total(views: Iterable[memoryview]) -> int:
    """Bytes in all."""
    return sum(view.nbytes for view in views)


def part_size(size: int, wanted: int) -> int:
    """Bytes per part: those wanted, or more where an object would have too many parts."""
    return max(wanted, math.ceil(size / MAX_PARTS / _MIB) * _MIB)


def cut(views: Iterable[memoryview], size: int) -> Iterator[list[memoryview]]:
    """Groups of exactly ``size`` bytes (the last one may have fewer), in order."""
    group: list[memoryview] = []
    room = size
    for each in views:
        view = each
        while view:
            head, view = view[:room], view[room:]
            group.append(head)
            room -= len(head)
            if room == 0:
                yield group
                group, room = [], size
    if group:
        yield group


def plan_reads(ranges: Sequence[Range], size: int) -> list[RangeRequest]:
    """The fewest requests of at most ``size`` bytes; ranges that adjoin share one.

    Raises:
        ValueError: a range that begins before the object, or a buffer that cannot be written.
    """
    pieces: list[RangeRequest] = []
    for offset, run in _runs(ranges):
        at = offset
        for group in cut(run, size):
            pieces.append(RangeRequest(at, total(group), tuple(group)))
            at += pieces[-1].size
    return pieces


def _runs(ranges: Sequence[Range]) -> Iterator[tuple[int, list[memoryview]]]:
    """Buffers whose ranges adjoin, with the offset of the first."""
    begin = end = 0
    run: list[memoryview] = []
    for each in sorted(ranges, key=lambda each: each.offset):
        if each.offset < 0 or each.into.readonly or not each.into.c_contiguous:
            raise ValueError(f"range at {each.offset} is not one that can be read into")
        if not each.into.nbytes:
            continue
        if run and each.offset != end:
            yield begin, run
            run = []
        if not run:
            begin = each.offset
        run.append(each.into.cast("B"))
        end = each.offset + each.into.nbytes
    if run:
        yield begin, run


class UploadGone(Unavailable):
    """The multipart upload is not there: ended, aborted, or complete although nobody was told."""


_BY_CODE: dict[str, type[StoreError]] = {
    "NoSuchBucket": ContainerMissing,
    "NoSuchKey": ObjectMissing,
    "NoSuchUpload": UploadGone,
    "PreconditionFailed": ObjectExists,
    "InvalidRange": Damaged,
    "ConditionalRequestConflict": Unavailable,  # two creates at once: ask again
    "OperationAborted": Unavailable,
    "RequestTimeout": Unavailable,
    "BadDigest": Unavailable,  # changed on the way
    "XAmzContentSHA256Mismatch": Unavailable,
    "IncompleteBody": Unavailable,
    "InternalError": Unavailable,
    "SlowDown": Throttled,
    "ServiceUnavailable": Throttled,
    "Throttling": Throttled,
    "ThrottlingException": Throttled,
    "RequestLimitExceeded": Throttled,
    "TooManyRequests": Throttled,
    "QuotaExceeded": NoSpace,
    "InsufficientStorage": NoSpace,
    "XMinioStorageFull": NoSpace,
    "ExpiredToken": StoreRefused,
    "InvalidToken": StoreRefused,
    "TokenRefreshRequired": StoreRefused,
    "InvalidAccessKeyId": StoreRefused,
    "SignatureDoesNotMatch": StoreRefused,
    "AccessDenied": StoreRefused,
}

_BY_STATUS: dict[int, type[StoreError]] = {
    401: StoreRefused,
    403: StoreRefused,
    404: ObjectMissing,
    412: ObjectExists,
    416: Damaged,
    429: Throttled,
    503: Throttled,
    507: NoSpace,
}


def s3_fault(key: str, code: str, status: int, detail: str) -> StoreError:
    """The error for an answer; ``code`` decides where it is known, the HTTP status elsewhere."""
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status, Unavailable)
    return kind(key, detail)


_PROBE = f"{RESERVED}probe-"


class StoreBase(ABC):
    """The seam's promises, kept once; what a backend does itself begins with an underscore."""

    def __init__(
        self, backend: str, url: str, *, piece_bytes: int, multipart: bool, conditional: bool | None
    ) -> None:
        """``conditional``: whether creating is exclusive; None: the store must be asked."""
        self._backend = backend
        self._url = public_url(url)
        self._piece_bytes = piece_bytes
        self._multipart = multipart
        self._conditional = conditional
        self._probing = threading.Lock()

    def __repr__(self) -> str:
        """Which store it is; nothing secret."""
        return f"<{self._backend} store {self._url}>"

    @property
    def facts(self) -> StoreFacts:
        """What the store is; asks it, once, whether a conditional create is one."""
        return StoreFacts(self._backend, self._url, self._is_conditional(), self._multipart)

    def put(self, key: str, parts: Sequence[memoryview], *, if_absent: bool = False) -> ObjectInfo:
        """See `ObjectStore.put`."""
        check_key(key)
        views = flat(parts)
        size = total(views)
        if if_absent and not self._is_conditional() and self._info(key) is not None:
            raise ObjectExists(key, "exists already")
        self._put(key, views, size, if_absent=if_absent)
        stored = self._info(key)
        if stored is None:
            raise Unavailable(key, "was put, and the store does not show it")
        if stored.size != size:
            raise Damaged(key, f"{size} bytes were put, the store has {stored.size}")
        return stored

    def read(self, key: str, *, limit: int) -> bytes:
        """See `ObjectStore.read`."""
        return self._read(check_key(key), limit)

    def read_ranges(self, key: str, ranges: Sequence[Range]) -> None:
        """See `ObjectStore.read_ranges`."""
        pieces = plan_reads(ranges, self._piece_bytes)
        check_key(key)
        if pieces:
            self._read_pieces(key, pieces)

    def info(self, key: str) -> ObjectInfo | None:
        """See `ObjectStore.info`."""
        return self._info(check_key(key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`."""
        found = self._list(check_prefix(prefix))
        return (each for each in found if not is_reserved(each.key))

    def delete(self, keys: Sequence[str]) -> None:
        """See `ObjectStore.delete`."""
        checked = [check_key(key) for key in keys]
        if checked:
            self._delete(checked)

    def abort_uploads(self, prefix: str, older_than_s: float) -> int:
        """See `ObjectStore.abort_uploads`."""
        return self._abort_uploads(check_prefix(prefix), older_than_s)

    @abstractmethod
    def close(self) -> None:
        """See `ObjectStore.close`."""

    # --- what a backend does ---

    @abstractmethod
    def _put(self, key: str, views: Sequence[memoryview], size: int, *, if_absent: bool) -> None:
        """Store it; where creating is exclusive, ``if_absent`` decides in the store itself."""

    @abstractmethod
    def _read(self, key: str, limit: int) -> bytes: ...

    @abstractmethod
    def _read_pieces(self, key: str, pieces: Sequence[RangeRequest]) -> None: ...

    @abstractmethod
    def _info(self, key: str) -> ObjectInfo | None: ...

    @abstractmethod
    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Reserved names may be among them."""

    @abstractmethod
    def _delete(self, keys: Sequence[str]) -> None: ...

    @abstractmethod
    def _abort_uploads(self, prefix: str, older_than_s: float) -> int: ...

    # --- the probe ---

    def _is_conditional(self) -> bool:
        with self._probing:
            if self._conditional is None:
                self._conditional = self._probe()
            return self._conditional

    def _probe(self) -> bool:
        """Whether a second create is refused: some servers ignore the condition, and say nothing."""
        key = f"{_PROBE}{secrets.token_hex(8)}"
        self._put(key, [memoryview(b"1")], 1, if_absent=True)
        try:
            try:
                self._put(key, [memoryview(b"2")], 1, if_absent=True)
            except ObjectExists:
                return True
            return False
        finally:
            self._delete([key])


def public_url(url: str) -> str:
    """The URL without user, password, query and fragment; of what is no URL at most the scheme."""
    try:
        parts = urlsplit(url)
    except ValueError:
        scheme, found, _ = url.partition("://")
        return f"{scheme}://…" if found else "…"
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def run_all(pool: Executor, jobs: Sequence[Callable[[], None]]) -> None:
    """Run the jobs; returns or raises only when none of them runs any more."""
    futures = [pool.submit(job) for job in jobs]
    try:
        wait(futures, return_when=FIRST_EXCEPTION)
    finally:
        for future in futures:
            future.cancel()
        wait(futures)
    for future in futures:
        if not future.cancelled():
            future.result()
