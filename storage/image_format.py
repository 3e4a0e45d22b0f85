"""The parts of the image format that are needed without an image: dtypes, tensors, and headers.

Images, stored parts and models are safetensors files. The safetensors library reads a header only together
with its file, which it maps, and writes only data that are complete in memory. This module reads a header
alone (from memory that another process writes to, or from a store) and writes one before its data exist.

`ckptd.storage.image` is about whole images; ``docs/architecture.md`` section 3 is the specification.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

import msgspec
import xxhash

FORMAT = "ckptd/1"
SCALARS = "ckptd.scalars"
"""The tensor with the step's scalars, packed; ``scalars_len`` of its bytes are used."""

DTYPE_SIZE: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
    "C64": 8,
}

LENGTH_BYTES = 8  # of the length field in front of the header
DATA_ALIGNMENT = 64
MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors
MAX_DIMS = 64
DIGEST_HEX = 32
# Step scalars, and what describes and packs small optimizer state: each snapshot needs its own.
OWN_PREFIX = "ckptd."


class ImageError(ValueError):
    """The bytes are not an image, or not a whole one."""


class HeaderError(ValueError):
    """The bytes are not the header of a safetensors file."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor to lay out; ``nbytes`` is 0 if its dtype is unknown."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        # Kept: images of many tensors are laid out while training waits.
        nbytes = math.prod(self.shape) * DTYPE_SIZE.get(self.dtype, 0)
        object.__setattr__(self, "nbytes", nbytes)


@dataclass(frozen=True, slots=True)
class ImageTensor:
    """A tensor of an image; ``offset`` counts from the beginning of the image."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


# -- any safetensors file ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The contents of a header; ``tensors`` are in data order, without gaps, and end at ``end``."""

    metadata: Mapping[str, str] | None
    tensors: tuple[ImageTensor, ...]
    end: int


def parse_safetensors_header(text: bytes | bytearray) -> SafetensorsHeader:
    """Parse the JSON that follows the length field; offsets count from the beginning of the file.

    Raises:
        HeaderError: it is not a header; tensors overlap, leave gaps, or do not have the size of their shapes.
    """
    fields = _decoded(text)
    metadata = fields.pop("__metadata__", None)
    if metadata is not None and not _are_texts(metadata):
        raise HeaderError("the metadata of the header are not strings")
    data_offset = LENGTH_BYTES + len(text)
    found = [_tensor(name, value, data_offset) for name, value in fields.items()]
    found.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    end = data_offset
    for tensor in found:
        if tensor.offset != end:
            raise HeaderError(f"tensor {tensor.name!r} overlaps its neighbour or leaves a gap")
        end += tensor.nbytes
    return SafetensorsHeader(metadata, tuple(found), end)


def render_header(metadata: Mapping[str, str], tensors: Iterable[ImageTensor | TensorEntry]) -> bytes:
    """The bytes before the data of ``tensors``, which follow each other in this order.

    Ignores the ``offset`` of an `ImageTensor`. Raises ValueError if the header is longer than allowed.
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
    text = msgspec.json.encode(header)
    text += b" " * (-(LENGTH_BYTES + len(text)) % DATA_ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"the header has {len(text)} bytes, limit {MAX_HEADER_BYTES}")
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _decoded(text: bytes | bytearray) -> dict[str, object]:
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


def _tensor(name: str, value: object, data_offset: int) -> ImageTensor:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise HeaderError(f"tensor {name!r} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_SIZE:
        raise HeaderError(f"tensor {name!r} has unknown dtype {str(dtype)[:20]!r}")
    if not _are_naturals(shape) or len(shape) > MAX_DIMS:
        raise HeaderError(f"tensor {name!r} has a bad shape")
    if not _are_naturals(offsets) or len(offsets) != 2:
        raise HeaderError(f"tensor {name!r} has bad offsets")
    nbytes = offsets[1] - offsets[0]
    if math.prod(shape) * DTYPE_SIZE[dtype] != nbytes:
        raise HeaderError(f"tensor {name!r} is {nbytes} bytes long, not as its shape says")
    return ImageTensor(name, dtype, tuple(shape), data_offset + offsets[0], nbytes)


def _are_texts(value: object) -> TypeGuard[dict[str, str]]:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _are_naturals(value: object) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in value)


# -- stored objects: images and parts ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ObjectHeader:
    """The header of a stored object: ``tensors`` in data order, and their xxh3_128 ``digests``."""

    metadata: Mapping[str, str]
    tensors: tuple[ImageTensor, ...]
    digests: tuple[bytes, ...]
    data_offset: int
    size: int


def data_offset_of(length: bytes) -> int:
    """The offset of the data, from an object's first 8 bytes; raises HeaderError if it is impossible."""
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
    """Parse an object's bytes before its data.

    Raises:
        HeaderError: they are not a header, tensors overlap or leave gaps, or a digest is missing.
    """
    data_offset = data_offset_of(header[:LENGTH_BYTES])
    if len(header) != data_offset:
        raise HeaderError(f"the header has {len(header)} bytes, but gives its length as {data_offset}")
    found = parse_safetensors_header(header[LENGTH_BYTES:])
    if found.metadata is None:
        raise HeaderError("the metadata are missing")
    text, count = found.metadata.get("digests", ""), len(found.tensors)
    if len(text) != count * DIGEST_HEX or not re.fullmatch("[0-9a-f]*", text):
        raise HeaderError(f"the header does not contain a digest for each of {count} tensors")
    digests = tuple([bytes.fromhex(text[at : at + DIGEST_HEX]) for at in range(0, len(text), DIGEST_HEX)])
    return ObjectHeader(found.metadata, found.tensors, digests, data_offset, found.end)
