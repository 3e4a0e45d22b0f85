"""Headers of safetensors files, read and written: of images, of stored parts, and of models that come
from elsewhere or leave.

The safetensors library reads a header only together with its file, which it maps, and writes only what
lies in memory as a whole. Ours are read by themselves, from memory that others write to and from stores,
and written before the bytes that follow are there. Whoever reads a header has bounded its length before.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeGuard

from ckptd.storage.images.image_format import (
    DATA_ALIGNMENT,
    DTYPE_SIZE,
    LENGTH_BYTES,
    MAX_DIMS,
    MAX_HEADER_BYTES,
    ImageTensor,
    TensorEntry,
)

__all__ = ["HeaderError", "SafetensorsHeader", "parse_safetensors_header", "render_header"]


class HeaderError(ValueError):
    """The bytes are not the header of a safetensors file."""


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """What a header says; ``tensors`` are in data order, without gaps, and end at ``end``."""

    metadata: Mapping[str, str] | None
    tensors: tuple[ImageTensor, ...]
    end: int


def parse_safetensors_header(text: bytes | bytearray) -> SafetensorsHeader:
    """What the JSON of a header says, which stands behind its length. Offsets count from the
    beginning of the file.

    Raises:
        HeaderError: it is no header; tensors overlap, leave gaps or are not as long as their shapes say.
    """
    fields = _decoded(text)
    metadata = fields.pop("__metadata__", None)
    if metadata is not None and not _texts(metadata):
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
    """The header of ``tensors``, one behind the other in this order, up to where data begins.

    An ``offset`` counts for nothing: they are put where there is room for them.

    Raises:
        ValueError: it is longer than headers may be.
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
    if not _naturals(shape) or len(shape) > MAX_DIMS:
        raise HeaderError(f"tensor {name!r} has a bad shape")
    if not _naturals(offsets) or len(offsets) != 2:
        raise HeaderError(f"tensor {name!r} has bad offsets")
    nbytes = offsets[1] - offsets[0]
    if math.prod(shape) * DTYPE_SIZE[dtype] != nbytes:
        raise HeaderError(f"tensor {name!r} is {nbytes} bytes long, not as its shape says")
    return ImageTensor(name, dtype, tuple(shape), data_offset + offsets[0], nbytes)


def _texts(value: object) -> TypeGuard[dict[str, str]]:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _naturals(value: object) -> bool:
    """Whether it is a list of integers from 0 to 2^63."""
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in value)
