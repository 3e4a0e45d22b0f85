"""What the stores have in common: options, S3's error codes, cutting buffers into requests, and the checks
around every call (`StoreBase`).
"""

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
    TooLarge,
    Unavailable,
    check_key,
    check_prefix,
    is_reserved,
)

_MIB = 1 << 20
_MIN_PART_BYTES = 5 * _MIB  # S3 refuses smaller parts, except the last one
_MAX_PARTS = 10_000  # S3's limit
_SECRET_NAME = re.compile(r"key|secret|token|passw|credential|sas", re.IGNORECASE)
_PROBE = f"{RESERVED}probe-"


# -- options -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How to reach and use a store, the same for all backends. Secrets appear in no repr and no error."""

    key: str | None = field(default=None, repr=False)
    secret: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    """Credentials; None: those of the environment (``AWS_…``)."""
    endpoint_url: str | None = None
    """The URL of an S3 server that is not Amazon's."""
    region: str | None = None
    anon: bool = False
    """Sign no requests: for a public bucket."""
    sign_payload: bool | None = None
    """Whether signatures of S3 requests cover the payload, so that the server detects changed bytes.

    This costs a SHA-256 (about 0.7 CPU seconds per GiB, taken from training). TLS protects the bytes too,
    and loopback does not change them. So None means: only over plain http to another host. Every read
    checks our own digests in any case.
    """
    part_bytes: int = 16 * _MIB
    """Size of a part of a multipart upload, and of a read request."""
    threshold_bytes: int = 16 * _MIB
    """Larger objects are uploaded in parts."""
    concurrency: int = 4
    """Parallel requests of one call. A call needs up to ``part_bytes * concurrency`` of memory."""
    attempts: int = 3
    """Attempts for one part or range before the call fails."""
    connect_timeout_s: float = 5.0
    request_timeout_s: float = 60.0
    """Limit of one request: a part, a range, a page of a listing. A call retries nothing after this time, so
    a call to a server that stops answering ends within about three times this."""
    fsspec: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Further arguments of the fsspec file system."""
    obstore: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Further configuration of the obstore store. ``client_options`` in it configures the HTTP client, and
    ``credential_provider`` is called for credentials."""

    def __post_init__(self) -> None:
        if self.part_bytes < _MIN_PART_BYTES or self.threshold_bytes < 0:
            raise ValueError(f"part_bytes must be at least {_MIN_PART_BYTES}, and no size negative")
        if self.concurrency < 1 or self.attempts < 1:
            raise ValueError("concurrency and attempts must be at least 1")
        if self.connect_timeout_s <= 0 or self.request_timeout_s <= 0:
            raise ValueError("timeouts must be more than 0 seconds")
        if (self.key is None) != (self.secret is None):
            raise ValueError("key and secret are given together or not at all")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> StoreOptions:
        """The options of a mapping; raises ValueError for an unknown name or an invalid value."""
        unknown = options.keys() - {each.name for each in fields(cls)}
        if unknown:
            names = ", ".join(sorted(unknown))
            known = ", ".join(each.name for each in fields(cls))
            raise ValueError(f"unknown storage options: {names}; known are {known}")
        try:
            return msgspec.convert(dict(options), cls)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, ValueError):  # of `__post_init__`
                raise error.__cause__ from None
            raise ValueError(f"an option has a value of another kind: {error}") from error

    def for_s3(self, environment: Mapping[str, str]) -> StoreOptions:
        """The same options, with the endpoint and region of the environment as defaults.

        The clients read these variables too, but each only some of them.
        """
        endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
        region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
        return replace(self, endpoint_url=self.endpoint_url or endpoint, region=self.region or region)

    @property
    def signs_payload(self) -> bool:
        """``sign_payload``, decided for this endpoint."""
        if self.sign_payload is not None:
            return self.sign_payload
        url = urlsplit(self.endpoint_url or "https:")
        return url.scheme == "http" and not _is_loopback(url.hostname or "")

    def hide(self, text: str) -> str:
        """The text with all secrets replaced by ``***``."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        for secret in secrets_in(own):
            text = text.replace(secret, "***")
        return text


def secrets_in(options: Mapping[str, Any], secret: bool = False) -> Iterator[str]:
    """The secret values, found by the names of the options; all values if ``secret``."""
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


def public_url(url: str) -> str:
    """The URL without user, password, query and fragment; at most the scheme if it is malformed."""
    try:
        parts = urlsplit(url)
    except ValueError:
        scheme, found, _ = url.partition("://")
        return f"{scheme}://…" if found else "…"
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


# -- errors --------------------------------------------------------------------------------------


class UploadGone(Unavailable):
    """The multipart upload does not exist: aborted, or completed although the answer got lost."""


_BY_CODE: dict[str, type[StoreError]] = {
    "NoSuchBucket": ContainerMissing,
    "NoSuchKey": ObjectMissing,
    "NoSuchUpload": UploadGone,
    "PreconditionFailed": ObjectExists,
    "InvalidRange": Damaged,
    "ConditionalRequestConflict": Unavailable,  # two concurrent creates: try again
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
    """The error for an S3 server's answer: by its error code if that is known, else by the HTTP status."""
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status, Unavailable)
    return kind(key, detail)


def check_limit(key: str, size: int, limit: int) -> None:
    """Raise `TooLarge` if the object has more than ``limit`` bytes."""
    if size > limit:
        raise TooLarge(key, f"has {size} bytes, of which {limit} are allowed")


# -- cutting buffers into parts and requests, without a copy ---------------------------------------


@dataclass(frozen=True, slots=True)
class RangeRequest:
    """One read request: adjacent bytes of an object, and the buffers that they fill, in order."""

    offset: int
    size: int
    into: tuple[memoryview, ...]


class Filler:
    """Fills the buffers of a request from a stream of chunks; ``left`` bytes are missing."""

    __slots__ = ("_views", "left")

    def __init__(self, piece: RangeRequest) -> None:
        self._views = list(reversed(piece.into))
        self.left = piece.size

    def take(self, chunk: memoryview) -> None:
        """Add the next bytes; raises ValueError if they are more than the missing ones."""
        if len(chunk) > self.left:
            raise ValueError(f"{len(chunk)} bytes came where {self.left} are missing")
        self.left -= len(chunk)
        while chunk:
            view = self._views.pop()
            size = min(len(view), len(chunk))
            view[:size] = chunk[:size]
            chunk = chunk[size:]
            if size < len(view):
                self._views.append(view[size:])


def flat(parts: Sequence[memoryview]) -> list[memoryview]:
    """The non-empty parts as views of bytes; raises ValueError if one is not contiguous."""
    if not all(part.c_contiguous for part in parts):
        raise ValueError("what is stored must lie in one piece of memory")
    return [part.cast("B") for part in parts if part.nbytes]


def total(views: Iterable[memoryview]) -> int:
    return sum(view.nbytes for view in views)


def part_size(size: int, wanted: int) -> int:
    """Bytes per part of a multipart upload: ``wanted``, or more if there would be too many parts."""
    return max(wanted, math.ceil(size / _MAX_PARTS / _MIB) * _MIB)


def cut(views: Iterable[memoryview], size: int) -> Iterator[list[memoryview]]:
    """Groups of exactly ``size`` bytes, in order; the last one may be smaller."""
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
    """The fewest requests of at most ``size`` bytes; adjacent ranges share one.

    Raises:
        ValueError: a range begins before the object, or its buffer is read-only or not contiguous.
    """
    pieces: list[RangeRequest] = []
    for offset, run in _runs(ranges):
        at = offset
        for group in cut(run, size):
            pieces.append(RangeRequest(at, total(group), tuple(group)))
            at += pieces[-1].size
    return pieces


def _runs(ranges: Sequence[Range]) -> Iterator[tuple[int, list[memoryview]]]:
    """The buffers of adjacent ranges, with the offset of the first."""
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


def run_all(pool: Executor, jobs: Sequence[Callable[[], None]]) -> None:
    """Run the jobs in parallel; returns or raises only after every job has ended."""
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


# -- the base class ------------------------------------------------------------------------------


class StoreBase(ABC):
    """Implements `ObjectStore` with the checks of keys, sizes and conditions; a backend implements the
    methods that begin with an underscore.

    Args:
        conditional: whether a create is exclusive; None: probe the store.
    """

    def __init__(
        self, backend: str, url: str, *, piece_bytes: int, multipart: bool, conditional: bool | None
    ) -> None:
        self._backend = backend
        self._url = public_url(url)
        self._piece_bytes = piece_bytes
        self._multipart = multipart
        self._conditional = conditional
        self._probing = threading.Lock()

    def __repr__(self) -> str:
        return f"<{self._backend} store {self._url}>"

    @property
    def facts(self) -> StoreFacts:
        return StoreFacts(self._backend, self._url, self._is_conditional(), self._multipart)

    def put(self, key: str, parts: Sequence[memoryview], *, if_absent: bool = False) -> ObjectInfo:
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
        return self._read(check_key(key), limit)

    def read_ranges(self, key: str, ranges: Sequence[Range]) -> None:
        pieces = plan_reads(ranges, self._piece_bytes)
        check_key(key)
        if pieces:
            self._read_pieces(key, pieces)

    def info(self, key: str) -> ObjectInfo | None:
        return self._info(check_key(key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        found = self._list(check_prefix(prefix))
        return (each for each in found if not is_reserved(each.key))

    def delete(self, keys: Sequence[str]) -> None:
        checked = [check_key(key) for key in keys]
        if checked:
            self._delete(checked)

    def abort_uploads(self, prefix: str, older_than_s: float) -> int:
        return self._abort_uploads(check_prefix(prefix), older_than_s)

    @abstractmethod
    def close(self) -> None:
        """Release connections and threads; may be called twice."""

    @abstractmethod
    def _put(self, key: str, views: Sequence[memoryview], size: int, *, if_absent: bool) -> None:
        """Store the views; if creates are exclusive, the store itself decides about ``if_absent``."""

    @abstractmethod
    def _read(self, key: str, limit: int) -> bytes: ...

    @abstractmethod
    def _read_pieces(self, key: str, pieces: Sequence[RangeRequest]) -> None: ...

    @abstractmethod
    def _info(self, key: str) -> ObjectInfo | None: ...

    @abstractmethod
    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        """May include reserved names."""

    @abstractmethod
    def _delete(self, keys: Sequence[str]) -> None: ...

    @abstractmethod
    def _abort_uploads(self, prefix: str, older_than_s: float) -> int: ...

    def _is_conditional(self) -> bool:
        with self._probing:
            if self._conditional is None:
                self._conditional = self._probe()
            return self._conditional

    def _probe(self) -> bool:
        """Whether the store refuses a second create: some servers silently ignore the condition."""
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
