"""Headers of stored objects: of verbatim images and of parts.

Both are safetensors headers whose metadata contain one xxh3_128 digest per tensor, in the order of the
data offsets. `ckptd.storage.images.image` reads complete images in memory. This module reads a header
alone, with the same checks, so that an object can be verified while it is streamed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import xxhash

from ckptd.storage.images.image_format import (
    DATA_ALIGNMENT,
    DIGEST_HEX,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    ImageTensor,
)
from ckptd.storage.images.safetensors_header import HeaderError, parse_safetensors_header

__all__ = [
    "ObjectHeader",
    "data_offset_of",
    "parse_header",
    "tag_of",
]


@dataclass(frozen=True, slots=True)
class ObjectHeader:
    """The contents of a header: ``tensors`` in data order, and their ``digests``."""

    metadata: Mapping[str, str]
    tensors: tuple[ImageTensor, ...]
    digests: tuple[bytes, ...]
    data_offset: int
    size: int


def data_offset_of(length: bytes) -> int:
    """The offset of the data, from an object's first 8 bytes; raises HeaderError if it is not possible."""
    if len(length) != LENGTH_BYTES:
        raise HeaderError(f"{len(length)} bytes are too few for a header")
    header_len = int.from_bytes(length, "little")
    if header_len > MAX_HEADER_BYTES or (LENGTH_BYTES + header_len) % DATA_ALIGNMENT:
        raise HeaderError(f"a header cannot have {header_len} bytes")
    return LENGTH_BYTES + header_len


def tag_of(header: bytes | memoryview) -> str:
    """The hash of an object's header, which its key contains."""
    return xxhash.xxh3_64_hexdigest(header)


def parse_header(header: bytes) -> ObjectHeader:
    """Parse the bytes before the data.

    Raises:
        HeaderError: they are not a header, tensors overlap or leave gaps, or a digest is missing.
    """
    data_offset = data_offset_of(header[:LENGTH_BYTES])
    if len(header) != data_offset:
        raise HeaderError(f"the header has {len(header)} bytes, but gives its length as {data_offset}")
    found = parse_safetensors_header(header[LENGTH_BYTES:])
    if found.metadata is None:
        raise HeaderError("the metadata are missing")
    digests = _digests(found.metadata.get("digests", ""), len(found.tensors))
    return ObjectHeader(found.metadata, found.tensors, digests, data_offset, found.end)


def _digests(text: str, count: int) -> tuple[bytes, ...]:
    if len(text) != count * DIGEST_HEX or not re.fullmatch("[0-9a-f]*", text):
        raise HeaderError(f"the header does not contain a digest for each of {count} tensors")
    return tuple([bytes.fromhex(text[at : at + 32]) for at in range(0, len(text), DIGEST_HEX)])
