"""The image: the bytes of a snapshot in a slot and in a store, one valid safetensors file per snapshot.

``docs/architecture.md`` section 3 is the specification. The layout of an image is planned once
(`ckptd.storage.images.image_layout`); sealing computes the digests of bytes that are already in
place, and a view reads the image in place.

A buffer may be longer than its image (as a slot is); bytes after the image are never touched.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

import xxhash

from ckptd.storage.images.image_format import (
    AT_DIGESTS,
    AT_ITERATION,
    AT_PREVIOUS,
    AT_SCALARS,
    DIGEST_HEX,
    ITERATION_WIDTH,
    LENGTH_BYTES,
    SCALARS_WIDTH,
    ImageError,
    ImageTensor,
)
from ckptd.storage.images.image_header import (
    Batch,
    ParsedHeader,
    find_data_offset,
    parse_image_header,
    read_number,
)

__all__ = [
    "DigestMap",
    "DigestMismatch",
    "ImageView",
    "Mismatch",
    "mismatches",
    "seal",
    "verify",
]


class DigestMismatch(ImageError):
    """The bytes differ from the sealed ones; ``tensor`` is the first tensor that differs."""

    def __init__(self, tensor: str) -> None:
        super().__init__(f"the digest of {tensor!r} does not match: its bytes were changed")
        self.tensor = tensor
        self.args = (tensor,)  # arguments from which pickle rebuilds it

    def __str__(self) -> str:
        """The tensor that does not match."""
        return f"the digest of {self.tensor!r} does not match: its bytes were changed"


class DigestMap(Protocol):
    """``map``, or the ``map`` of a thread pool: results in the order of the arguments."""

    def __call__(
        self, function: Callable[[Batch], list[bytes]], arguments: Iterable[Batch], /
    ) -> Iterable[list[bytes]]:
        """Call ``function`` for each argument."""


class Mismatch(NamedTuple):
    """A range ``[start, stop)`` of an image that differs from the sealed bytes: of a tensor, or of
    the ``"header"``.
    """

    name: str
    start: int
    stop: int


class ImageView:
    """An image in a buffer, with a checked header; `verify` checks the digests.

    Iterating yields the tensors in data order. Nothing is copied; the view is valid as long as the
    buffer is.

    Raises:
        ImageError: the header is not an image header, or the buffer ends before the image.
    """

    __slots__ = ("_buf", "_parsed", "iteration", "layout_id", "previous", "scalars_len")

    def __init__(self, buf: memoryview) -> None:
        self._parsed, self.layout_id = parse_image_header(buf)
        self._buf = buf
        self.iteration = read_number(buf, "iteration", AT_ITERATION, ITERATION_WIDTH)
        self.previous = read_number(buf, "previous", AT_PREVIOUS, ITERATION_WIDTH)
        self.scalars_len = read_number(buf, "scalars_len", AT_SCALARS, SCALARS_WIDTH)
        if self.iteration < 0 or self.previous < -1 or self.scalars_len < 0:
            raise ImageError("a number in the image header is negative")

    @property
    def entries(self) -> tuple[ImageTensor, ...]:
        """The tensors in data order, with offsets from the beginning of the image."""
        return self._parsed.tensors

    @property
    def identity(self) -> Mapping[str, str]:
        """The metadata that was passed to `ImageLayout.build`."""
        return self._parsed.identity

    @property
    def num_operators(self) -> int:
        """The number of operators of the model."""
        return self._parsed.num_operators

    @property
    def anchors(self) -> int:
        """Bitmask over operator ids: the operators with an anchor in this image."""
        return self._parsed.anchors

    @property
    def data_offset(self) -> int:
        """The offset of the tensor data."""
        return self._parsed.data_offset

    @property
    def image_len(self) -> int:
        """The length of the image."""
        return self._parsed.image_len

    def names(self) -> tuple[str, ...]:
        """The names of the tensors in data order."""
        return tuple(self._parsed.by_name)

    def tensor(self, name: str) -> ImageTensor:
        """The description of tensor ``name``; KeyError if the image has none."""
        return self._parsed.by_name[name]

    def data(self, name: str) -> memoryview:
        """The bytes of tensor ``name``, in place; KeyError if the image has none."""
        tensor = self._parsed.by_name[name]
        return self._buf[tensor.offset : tensor.offset + tensor.nbytes]

    def __iter__(self) -> Iterator[ImageTensor]:
        return iter(self._parsed.tensors)

    def __len__(self) -> int:
        return len(self._parsed.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._parsed.by_name


def seal(buf: memoryview, *, map_fn: DigestMap | None = None) -> bytes:
    """Digest every tensor, write the digests into the header, return the header's digest.

    Args:
        buf: the image, complete except for its digests; only the digests field is written.
        map_fn: the ``map`` of a thread pool; digesting releases the GIL.
    Raises:
        ImageError: the header is not an image header.
    """
    parsed, _ = parse_image_header(buf)
    digests = b"".join(_digests(buf, parsed, map_fn))
    buf[AT_DIGESTS : AT_DIGESTS + 2 * len(digests)] = binascii.hexlify(digests)
    return xxhash.xxh3_128_digest(buf[: parsed.data_offset])


def verify(buf: memoryview, header_digest: bytes, *, map_fn: DigestMap | None = None) -> None:
    """Check that the image is, bit for bit, the one that was sealed with ``header_digest``.

    Raises:
        DigestMismatch: names the first damaged tensor, or ``"header"``.
        ImageError: the header is truncated, or not an image header.
    """
    if xxhash.xxh3_128_digest(buf[: find_data_offset(buf)]) != header_digest:
        raise DigestMismatch("header")
    first = next(_changed(buf, map_fn), None)
    if first is not None:
        raise DigestMismatch(first.name)


def mismatches(buf: memoryview, header_digest: bytes, *, map_fn: DigestMap | None = None) -> list[Mismatch]:
    """All ranges of the image that differ from the one sealed with ``header_digest``, in order and in
    one pass.

    If the header is damaged, the tensors cannot be checked: the result is the header alone, as far as
    its length is known (8 bytes, if the length itself is damaged). Repair it and call again.

    Raises:
        ImageError: the sealed bytes are not an image, or do not fit into the buffer; this cannot be repaired.
    """
    if len(buf) < LENGTH_BYTES:
        raise ImageError(f"{len(buf)} bytes are too few for an image")
    try:
        data_offset = find_data_offset(buf)
    except ImageError:
        return [Mismatch("header", 0, LENGTH_BYTES)]
    if xxhash.xxh3_128_digest(buf[:data_offset]) != header_digest:
        return [Mismatch("header", 0, data_offset)]
    return [Mismatch(t.name, t.offset, t.offset + t.nbytes) for t in _changed(buf, map_fn)]


def _digests(buf: memoryview, parsed: ParsedHeader, map_fn: DigestMap | None) -> list[bytes]:
    """The digest of each tensor in data order."""

    def digest(batch: Batch) -> list[bytes]:
        return [xxhash.xxh3_128_digest(buf[t.offset : t.offset + t.nbytes]) for t in batch.tensors]

    results = (map if map_fn is None else map_fn)(digest, parsed.batches)
    in_order = sorted(zip(parsed.batches, results, strict=True), key=lambda pair: pair[0].order)
    return [one for _, group in in_order for one in group]


def _changed(buf: memoryview, map_fn: DigestMap | None) -> Iterator[ImageTensor]:
    """The tensors whose bytes do not match the digests in the header."""
    parsed, _ = parse_image_header(buf)
    stored = binascii.unhexlify(buf[AT_DIGESTS : AT_DIGESTS + DIGEST_HEX * len(parsed.tensors)])
    at = 0
    for tensor, digest in zip(parsed.tensors, _digests(buf, parsed, map_fn), strict=True):
        if stored[at : at + len(digest)] != digest:
            yield tensor
        at += len(digest)
