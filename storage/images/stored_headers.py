"""Headers of stored objects: of verbatim images and of parts.

Both are safetensors headers whose metadata contain one xxh3_128 digest per tensor, in the order of the
data offsets. `ckptd.storage.images.image` reads complete images in memory. This module reads a header
alone, with the same checks, so that an object can be verified while it is streamed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import xxhash

from ckptd.storage.images.image_format import (
    DATA_ALIGNMENT,
    DIGEST_HEX,
    DTYPE_SIZE,
    LENGTH_BYTES,
    MAX_DIMS,
    MAX_HEADER_BYTES,
    ImageTensor,
)

__all__ = [
    "HeaderError",
    "ObjectHeader",
    "data_offset_of",
    "parse_header",
    "render_header",
    "tag_of",
]


class HeaderError(ValueError):
    """The bytes are not the header of a stored object."""


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


def render_header(metadata: Mapping[str, str], tensors: Iterable[ImageTensor]) -> bytes:
    """The header of an object with ``tensors``, stored one after the other in this order.

    Ignores their ``offset``.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-(LENGTH_BYTES + len(text)) % DATA_ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def parse_header(header: bytes) -> ObjectHeader:
    """Parse the bytes before the data.

    Raises:
        HeaderError: they are not a header, tensors overlap or leave gaps, or a digest is missing.
    """
    data_offset = data_offset_of(header[:LENGTH_BYTES])
    if len(header) != data_offset:
        raise HeaderError(
            f"the header has {len(header)} bytes, but gives its length as {data_offset}"
        )
    fields = _decoded(header[LENGTH_BYTES:])
    metadata = fields.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise HeaderError("the metadata are missing, or are not strings")
    found = [_tensor(name, value, data_offset) for name, value in fields.items()]
    tensors = tuple(sorted(found, key=lambda tensor: (tensor.offset, tensor.nbytes)))
    end = data_offset
    for tensor in tensors:
        if tensor.offset != end:
            raise HeaderError(
                f"tensor {tensor.name!r} overlaps the previous tensor or leaves a gap"
            )
        end += tensor.nbytes
    digests = _digests(metadata.get("digests", ""), len(tensors))
    return ObjectHeader(metadata, tensors, digests, data_offset, end)


def _decoded(text: bytes) -> dict[str, object]:
    try:
        fields = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except HeaderError:
        raise
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"the header is not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise HeaderError("the header is not an object")
    return fields


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise HeaderError("the header has a key twice")
    return found


def _digests(text: str, count: int) -> tuple[bytes, ...]:
    if len(text) != count * DIGEST_HEX or not re.fullmatch("[0-9a-f]*", text):
        raise HeaderError(f"the header does not contain a digest for each of {count} tensors")
    return tuple([bytes.fromhex(text[at : at + 32]) for at in range(0, len(text), DIGEST_HEX)])


def _tensor(name: str, value: object, data_offset: int) -> ImageTensor:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise HeaderError(f"tensor {name!r} must be described by dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_SIZE:
        raise HeaderError(f"tensor {name!r} has unknown dtype {str(dtype)[:20]!r}")
    if not _naturals(shape) or len(shape) > MAX_DIMS:
        raise HeaderError(f"tensor {name!r} has a bad shape")
    if not _naturals(offsets) or len(offsets) != 2:
        raise HeaderError(f"tensor {name!r} has bad offsets")
    nbytes = offsets[1] - offsets[0]
    if math.prod(shape) * DTYPE_SIZE[dtype] != nbytes:
        raise HeaderError(f"tensor {name!r} has {nbytes} bytes, which do not match its shape")
    return ImageTensor(name, dtype, tuple(shape), data_offset + offsets[0], nbytes)


def _naturals(value: object) -> bool:
    """Whether ``value`` is a list of integers from 0 to 2^63."""
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in value)
