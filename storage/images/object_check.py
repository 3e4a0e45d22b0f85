"""One stored object, checked by itself from its first byte to its last, in bounded memory.

An object needs nobody else to be checked: its key names the hash of its header, its header holds the
digests of its tensors, and the tensors are all that follows.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import xxhash

from ckptd.storage.images.image_format import LENGTH_BYTES, ImageTensor
from ckptd.storage.images.stored_headers import (
    HeaderError,
    ObjectHeader,
    data_offset_of,
    parse_header,
    tag_of,
)
from ckptd.storage.stores.objects import Damaged, ObjectStore, Range

__all__ = ["ObjectDamaged", "StreamBuffers", "check_tensors", "read_object_header"]

_BUFFER_BYTES = 16 << 20
_NUM_BUFFERS = 4
_HEADER_GUESS = 256 << 10


class ObjectDamaged(ValueError):
    """The object is not what its key says; ``tensor`` is the one that differs, "" for its header."""

    def __init__(self, what: str, tensor: str = "") -> None:
        super().__init__(what, tensor)
        self.what = what
        self.tensor = tensor

    def __str__(self) -> str:
        """What is wrong."""
        return self.what


@dataclass(frozen=True, slots=True)
class StreamBuffers:
    """The memory through which objects are streamed; for one thread at a time."""

    buffers: tuple[memoryview, ...]

    @classmethod
    def allocate(cls, size: int = _BUFFER_BYTES, count: int = _NUM_BUFFERS) -> StreamBuffers:
        """So much of it; the system gives it only when it is used."""
        return cls(tuple([memoryview(mmap.mmap(-1, size)) for _ in range(count)]))


def read_object_header(store: ObjectStore, key: str, size: int, tag: str) -> ObjectHeader:
    """The header of an object of ``size`` bytes whose key ends with ``tag``.

    Raises:
        ObjectDamaged: it is not that header, or the object has another length than it says.
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
        raise ObjectDamaged(f"the object has {size} bytes, by its header {parsed.size}")
    return parsed


def check_tensors(
    store: ObjectStore,
    key: str,
    header: ObjectHeader,
    memory: StreamBuffers,
    told: Callable[[int], None],
) -> list[str]:
    """Read all of an object's tensors and compare their digests.

    Args:
        told: called with the number of bytes whenever some were read.
    Returns:
        The names of the tensors whose bytes are not those of their digests.
    """
    check = _Check(header.tensors, header.digests)
    for filled in _stream(store, key, header.data_offset, header.size, memory):
        check.feed(filled)
        told(len(filled))
    return check.end()


class _Check:
    """Digests tensors that follow one another, whatever pieces their bytes come in."""

    def __init__(self, tensors: Sequence[ImageTensor], digests: Sequence[bytes]) -> None:
        self._tensors, self._digests = tensors, digests
        self._number = 0
        self._seen = 0  # bytes of the current tensor
        self._hash = xxhash.xxh3_128()
        self._bad: list[str] = []

    def feed(self, data: memoryview) -> None:
        """The bytes that come next."""
        while len(data):
            self._finish()
            piece = data[: self._tensors[self._number].nbytes - self._seen]
            self._hash.update(piece)
            self._seen += len(piece)
            data = data[len(piece) :]

    def end(self) -> list[str]:
        """What did not match, when all was fed."""
        self._finish()
        return self._bad

    def _finish(self) -> None:
        """Go on to the next tensor of which bytes are missing."""
        while (
            self._number < len(self._tensors) and self._seen == self._tensors[self._number].nbytes
        ):
            if self._hash.digest() != self._digests[self._number]:
                self._bad.append(self._tensors[self._number].name)
            self._number += 1
            self._seen = 0
            self._hash.reset()


def _stream(
    store: ObjectStore, key: str, begin: int, end: int, memory: StreamBuffers
) -> Iterator[memoryview]:
    """Bytes [begin, end) in order, as many buffers at once as there are."""
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
