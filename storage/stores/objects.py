"""The seam to object storage: what every store offers, what it tells, how it fails.

A store is synchronous and may be called from several threads at once; its calls let other threads run while
they wait. Keys are relative to the URL that the store was opened with. When a call has returned or raised,
nobody touches the buffers any more that it was given.

Names that begin with ``.ckptd-`` are the stores' own (files that are being written, probes): no key may
contain one, and no listing shows one.

The errors::

    StoreError                   .key, .retriable
    ├── ObjectMissing
    ├── ObjectExists             (of a put that must not replace)
    ├── ContainerMissing         the bucket, or the base folder, is not there
    ├── Refused                  credentials, permissions, or a key that the store cannot hold
    ├── NoSpace
    ├── Damaged                  what is stored is not what it should be: too short, of another size
    ├── TooLarge                 more than the caller's limit
    ├── NotInstalled             a Python package is missing
    ├── Cancelled                between attempts, by whoever asked
    ├── Throttled                retriable: the store asks for patience
    ├── Unavailable              retriable: connection, timeout, 5xx, and whatever nobody knows
    └── CircuitOpen              retriable: the store failed so often that it is left in peace for a while
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

__all__ = [
    "MAX_KEY_BYTES",
    "RESERVED",
    "Cancelled",
    "CircuitOpen",
    "ContainerMissing",
    "Damaged",
    "NoSpace",
    "NotInstalled",
    "ObjectExists",
    "ObjectInfo",
    "ObjectMissing",
    "ObjectStore",
    "Range",
    "StoreError",
    "StoreFacts",
    "StoreRefused",
    "Throttled",
    "TooLarge",
    "Unavailable",
    "check_key",
    "check_prefix",
    "is_reserved",
]

MAX_KEY_BYTES = 800  # S3 allows 1024, and the URL's own path comes in front
MAX_NAME_BYTES = 200  # file systems allow 255
RESERVED = ".ckptd-"

# Printable ASCII; a backslash is a separator to some stores. Tried with each of them.
_NAME = re.compile(r"[ -\[\]-~]+")


class StoreError(RuntimeError):
    """What a store could not do, and with which key (or prefix)."""

    retriable: ClassVar[bool] = False

    def __init__(self, key: str, detail: str) -> None:
        super().__init__(key, detail)
        self.key = key
        self.detail = detail

    def __str__(self) -> str:
        """The key and what is wrong with it."""
        return f"{self.key or 'the store'}: {self.detail}"


class ObjectMissing(StoreError):
    """There is no such object."""


class ObjectExists(StoreError):
    """There is such an object, and it must not be replaced."""


class ContainerMissing(StoreError):
    """The bucket, or the base folder, is not there (any more)."""


class StoreRefused(StoreError):
    """The store understood, and said no: credentials, permissions, an impossible key."""


class NoSpace(StoreError):
    """The store is full, or a quota is."""


class Damaged(StoreError):
    """What is stored is not what it should be."""


class TooLarge(StoreError):
    """The object is larger than the caller allowed."""


class NotInstalled(StoreError):
    """The Python package that speaks to this store is missing."""


class Cancelled(StoreError):
    """Given up between two attempts, because somebody asked for it."""


class Throttled(StoreError):
    """The store asks for fewer requests."""

    retriable = True


class Unavailable(StoreError):
    """The store was not reached, did not answer in time, or failed."""

    retriable = True


class CircuitOpen(StoreError):
    """Not tried: the store failed too often just now."""

    retriable = True


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store says of one object."""

    key: str
    size: int
    modified_ns: int
    """Since the epoch, by the store's clock; many stores know seconds only."""
    etag: str
    """Empty where the store has none."""


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """What a store is and can do."""

    backend: str
    url: str
    """Without user and password."""
    conditional_create: bool
    """Of several writers with ``if_absent`` exactly one wins; tried out, not believed. (By obstore
    that holds for objects that travel whole: one that is put in parts is looked for once more just
    before the last of them.)
    """
    multipart: bool
    """Large objects travel in parts, several at a time, and a part that fails is repeated alone."""


@dataclass(frozen=True, slots=True)
class Range:
    """The bytes of an object from ``offset`` on, as many as fit ``into``."""

    offset: int
    into: memoryview


class ObjectStore(Protocol):
    """A place for objects; see the module for what holds for all its calls."""

    @property
    def facts(self) -> StoreFacts:
        """What the store is; the first call may ask the store, and raise `StoreError`."""

    def put(self, key: str, parts: Sequence[memoryview], *, if_absent: bool = False) -> ObjectInfo:
        """Store the parts, one after the other, as one object; others see all of it or nothing.

        The returned info is the store's own, asked after the put.

        Raises:
            ObjectExists: ``if_absent``, and there is one already.
            Damaged: the store has another size than was put.
        """

    def read(self, key: str, *, limit: int) -> bytes:
        """A small object, whole.

        Raises:
            TooLarge: it has more than ``limit`` bytes.
        """

    def read_ranges(self, key: str, ranges: Sequence[Range]) -> None:
        """Fill every buffer, several at a time.

        Raises:
            Damaged: the object ends before a range does. What the buffers hold then is undefined.
        """

    def info(self, key: str) -> ObjectInfo | None:
        """What the store says of an object; None if there is none."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Everything below a folder (``"a/b/"``, or ``""`` for all), at any depth, in any order."""

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that are not there are fine."""

    def abort_uploads(self, prefix: str, older_than_s: float) -> int:
        """End what dead writers left half-finished below ``prefix``; how many, or -1: cannot know."""

    def close(self) -> None:
        """Let go of connections and threads. Closing twice is fine."""


def check_key(key: str) -> str:
    """The key, if every store can hold it.

    Raises:
        ValueError: it cannot be a key, and why.
    """
    if not key or len(key) > MAX_KEY_BYTES:
        raise ValueError(f"a key has 1 to {MAX_KEY_BYTES} characters, not {len(key)}")
    for name in key.split("/"):
        if name in ("", ".", "..") or not _NAME.fullmatch(name):
            raise ValueError(f"key {key!r} has the part {name!r}, which not every store can hold")
        if len(name) > MAX_NAME_BYTES:
            raise ValueError(f"a part of key {key[:40]!r}… has more than {MAX_NAME_BYTES} bytes")
        if name.startswith(RESERVED):
            raise ValueError(f"key {key!r} has a part that begins with {RESERVED!r}: those are ours")
    return key


def check_prefix(prefix: str) -> str:
    """The prefix, if it is a folder of keys.

    Raises:
        ValueError: it is not.
    """
    if prefix:
        if not prefix.endswith("/"):
            raise ValueError(f"prefix {prefix!r} does not end with a slash: it is a folder")
        check_key(prefix[:-1])
    return prefix


def is_reserved(key: str) -> bool:
    """Whether a listed name is not an object of anybody's: a store's own, or a folder's marker."""
    return key == "" or key.endswith("/") or key.startswith(RESERVED) or f"/{RESERVED}" in key
