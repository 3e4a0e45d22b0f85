"""The interface to object storage: what every store offers, and the errors that it raises.

A store is synchronous and may be called from several threads at once; its calls release the GIL while they
wait. Keys are relative to the URL of the store. Once a call has returned or raised, the store does not touch
the caller's buffers any more.

Names that begin with ``.ckptd-`` are reserved for the stores (files being written, probes): no key may
contain one, and no listing shows one.

The errors; the retriable ones are worth another attempt::

    StoreError                   .key, .retriable
    ├── ObjectMissing
    ├── ObjectExists             of a put that must not replace
    ├── ContainerMissing         the bucket or base folder does not exist
    ├── StoreRefused             credentials, permissions, or a key that the store cannot hold
    ├── NoSpace                  the store is full, or a quota is
    ├── Damaged                  the stored object is too short, or has another size
    ├── TooLarge                 the object is larger than the caller's limit
    ├── NotInstalled             a Python package is missing
    ├── Cancelled                the caller cancelled between two attempts
    ├── Throttled                retriable: the store asks for fewer requests
    ├── Unavailable              retriable: connection, timeout, 5xx, and every unknown error
    └── CircuitOpen              retriable: not tried, because the store failed too often just now
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

MAX_KEY_BYTES = 800  # S3 allows 1024, including the path of the URL
MAX_NAME_BYTES = 200  # file systems allow 255
RESERVED = ".ckptd-"

# Printable ASCII without the backslash, which some stores treat as a separator. Tested with each store.
_NAME = re.compile(r"[ -\[\]-~]+")


class StoreError(RuntimeError):
    """A store cannot do what it was asked to do with ``key`` (a key or prefix); see the module."""

    retriable: ClassVar[bool] = False

    def __init__(self, key: str, detail: str) -> None:
        super().__init__(key, detail)
        self.key = key
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.key or 'the store'}: {self.detail}"


class ObjectMissing(StoreError): ...


class ObjectExists(StoreError): ...


class ContainerMissing(StoreError): ...


class StoreRefused(StoreError): ...


class NoSpace(StoreError): ...


class Damaged(StoreError): ...


class TooLarge(StoreError): ...


class NotInstalled(StoreError): ...


class Cancelled(StoreError): ...


class Throttled(StoreError):
    retriable = True


class Unavailable(StoreError):
    retriable = True


class CircuitOpen(StoreError):
    retriable = True


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object, as its store describes it."""

    key: str
    size: int
    modified_ns: int
    """Unix time by the store's clock; many stores have a resolution of seconds."""
    etag: str
    """Empty if the store has none."""


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """The kind of a store and its capabilities."""

    backend: str
    url: str
    """Without user and password."""
    conditional_create: bool
    """Exactly one of several writers with ``if_absent`` wins; probed, not assumed.

    With obstore this holds for objects that travel whole: a multipart upload only checks once more before it
    completes.
    """
    multipart: bool
    """Large objects travel in parts, several at a time; a part that fails is repeated alone."""


@dataclass(frozen=True, slots=True)
class Range:
    """The ``len(into)`` bytes of an object from ``offset`` on."""

    offset: int
    into: memoryview


class ObjectStore(Protocol):
    """A store of objects; the module docstring holds for all its calls."""

    @property
    def facts(self) -> StoreFacts:
        """The store's capabilities; the first call may send requests, and raise `StoreError`."""

    def put(self, key: str, parts: Sequence[memoryview], *, if_absent: bool = False) -> ObjectInfo:
        """Store the concatenated parts as one object, which becomes visible as a whole.

        Returns:
            The store's own description, requested after the put.
        Raises:
            ObjectExists: ``if_absent``, and the object exists already.
            Damaged: the stored object has another size.
        """

    def read(self, key: str, *, limit: int) -> bytes:
        """Read a small object as a whole.

        Raises:
            TooLarge: it has more than ``limit`` bytes.
        """

    def read_ranges(self, key: str, ranges: Sequence[Range]) -> None:
        """Fill every buffer, with several requests at a time.

        Raises:
            Damaged: the object ends before a range does; the contents of the buffers are then undefined.
        """

    def info(self, key: str) -> ObjectInfo | None:
        """The description of an object; None if it does not exist."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects below a folder (``"a/b/"``, or ``""`` for all), at any depth, in any order."""

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; missing ones are not an error."""

    def abort_uploads(self, prefix: str, older_than_s: float) -> int:
        """Abort unfinished uploads of dead writers below ``prefix``; returns their number, -1 if unknown."""

    def close(self) -> None:
        """Release connections and threads; may be called twice."""


def check_key(key: str) -> str:
    """Return ``key`` if every store can hold it; raises ValueError with the reason otherwise."""
    if not key or len(key) > MAX_KEY_BYTES:
        raise ValueError(f"a key has 1 to {MAX_KEY_BYTES} characters, not {len(key)}")
    for name in key.split("/"):
        if name in ("", ".", "..") or not _NAME.fullmatch(name):
            raise ValueError(f"key {key!r} has the part {name!r}, which not every store can hold")
        if len(name) > MAX_NAME_BYTES:
            raise ValueError(f"a part of key {key[:40]!r}… has more than {MAX_NAME_BYTES} bytes")
        if name.startswith(RESERVED):
            raise ValueError(f"key {key!r} has a part that begins with {RESERVED!r}, which is reserved")
    return key


def check_prefix(prefix: str) -> str:
    """Return ``prefix`` if it is "" or a folder of keys; raises ValueError otherwise."""
    if prefix:
        if not prefix.endswith("/"):
            raise ValueError(f"prefix {prefix!r} does not end with a slash: it is a folder")
        check_key(prefix[:-1])
    return prefix


def is_reserved(key: str) -> bool:
    """Whether a listed name is no user's object: a reserved name, or the marker of a folder."""
    return key == "" or key.endswith("/") or key.startswith(RESERVED) or f"/{RESERVED}" in key
