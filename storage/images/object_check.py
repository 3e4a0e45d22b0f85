"""Verification of one stored object, from its first byte to its last, in bounded memory.

An object can be verified by itself: its key contains the hash of its header, its header contains the
digests of its tensors, and the tensors are the rest of the object.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import xxhash

from ckptd.storage.images.image_format import LENGTH_BYTES, ImageTensor
from ckptd.storage.images.safetensors_header import HeaderError
from ckptd.storage.images.stored_headers import ObjectHeader, data_offset_of, parse_header, tag_of
from ckptd.storage.stores.objects import Damaged, ObjectStore, Range

__all__ = ["ObjectDamaged", "StreamBuffers", "check_tensors", "read_object_header"]

_BUFFER_BYTES = 16 << 20
_NUM_BUFFERS = 4
_HEADER_GUESS = 256 << 10


class ObjectDamaged(ValueError):
    """The object does not match its key; ``tensor`` is the tensor that differs, "" for the header."""

    def __init__(self, what: str, tensor: str = "") -> None:
        super().__init__(what, tensor)
        self.what = what
        self.tensor = tensor

    def __str__(self) -> str:
        """The description of the damage."""
        return self.what


@dataclass(frozen=True, slots=True)
class StreamBuffers:
    """The buffers through which objects are streamed; for one thread at a time."""

    buffers: tuple[memoryview, ...]

    @classmethod
    def allocate(cls, size: int = _BUFFER_BYTES, count: int = _NUM_BUFFERS) -> StreamBuffers:
        """Allocate the buffers; the system commits their pages at first use."""
        return cls(tuple([memoryview(mmap.mmap(-1, size)) for _ in range(count)]))


def read_object_header(store: ObjectStore, key: str, size: int, tag: str) -> ObjectHeader:
    """The header of an object of ``size`` bytes whose key ends with ``tag``.

    Raises:
        ObjectDamaged: the header has another hash, or gives another length than ``size``.
    """
    head = memoryview(bytearray(min(_HEADER_GUESS, size)))
    _read(store, key, [Range(0, head)])
    try:
        data_offset = data_offset_of(bytes(head[:LENGTH_BYTES]))
        if data_offset > size:
            raise HeaderError(f"the header would end at {data_offset}, the object ends at {size}")
        if data_offset > len(head):
            rest = memoryview(bytearray(data_offset - len(head)))
            _read(store, key, [Range(len(head), rest)])
            head = memoryview(bytes(head) + bytes(rest))
        header = bytes(head[:data_offset])
        if tag_of(header) != tag:
            raise ObjectDamaged("the header is not the one that the key names")
        parsed = parse_header(header)
    except HeaderError as error:
        raise ObjectDamaged(str(error)) from error
    if parsed.size != size:
        raise ObjectDamaged(f"the object has {size} bytes, but its header says {parsed.size}")
    return parsed


def check_tensors(
    store: ObjectStore,
    key: str,
    header: ObjectHeader,
    memory: StreamBuffers,
    count: Callable[[int], None],
) -> list[str]:
    """Read all of an object's tensors and compare their digests.

    Args:
        count: called with the number of bytes after each read.
    Returns:
        The names of the tensors whose digests do not match.
    """
    check = _Check(header.tensors, header.digests)
    for filled in _stream(store, key, header.data_offset, header.size, memory):
        check.feed(filled)
        count(len(filled))
    return check.end()


class _Check:
    """Digests consecutive tensors from chunks of any size."""

    def __init__(self, tensors: Sequence[ImageTensor], digests: Sequence[bytes]) -> None:
        self._tensors, self._digests = tensors, digests
        self._number = 0
        self._seen = 0  # bytes of the current tensor
        self._hash = xxhash.xxh3_128()
        self._bad: list[str] = []

    def feed(self, data: memoryview) -> None:
        """Add the next bytes."""
        while len(data):
            self._finish()
            chunk = data[: self._tensors[self._number].nbytes - self._seen]
            self._hash.update(chunk)
            self._seen += len(chunk)
            data = data[len(chunk) :]

    def end(self) -> list[str]:
        """Return the tensors that did not match; call it after the last `feed`."""
        self._finish()
        return self._bad

    def _finish(self) -> None:
        """Advance to the next tensor with missing bytes."""
        while self._number < len(self._tensors) and self._seen == self._tensors[self._number].nbytes:
            if self._hash.digest() != self._digests[self._number]:
                self._bad.append(self._tensors[self._number].name)
            self._number += 1
            self._seen = 0
            self._hash.reset()


def _stream(
    store: ObjectStore, key: str, begin: int, end: int, memory: StreamBuffers
) -> Iterator[memoryview]:
    """Bytes [begin, end) in order; fills all buffers at once."""
    while begin < end:
        ranges: list[Range] = []
        for buffer in memory.buffers:
            into = buffer[: min(len(buffer), end - begin)]
            if len(into):
                ranges.append(Range(begin, into))
                begin += len(into)
        _read(store, key, ranges)
        for filled in ranges:
            yield filled.into


def _read(store: ObjectStore, key: str, ranges: Sequence[Range]) -> None:
    try:
        store.read_ranges(key, ranges)
    except Damaged as error:
        raise ObjectDamaged(f"the object is shorter than listed ({error.detail})") from error
