"""The fixed parts of the image format: the mutable header fields, the dtypes, and the description of tensors.

``docs/architecture.md`` section 3 is the specification. Every header begins with the same bytes, so
that the mutable fields are found without parsing::

    {"__metadata__":{"format":"ckptd/1","iteration":"<20>","previous":"<20>","scalars_len":"<12>",
    "digests":"<32 per tensor>", …

(in one line). The *layout id* is the xxh3_64 of bytes [0, 8 + header_len) with the first three fields
blanked to spaces and the digests to zeros; headers are parsed once per layout id.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = [
    "AT_DIGESTS",
    "AT_ITERATION",
    "AT_PREVIOUS",
    "AT_SCALARS",
    "DATA_ALIGNMENT",
    "DIGEST_HEX",
    "DTYPE_SIZE",
    "FORMAT",
    "ITERATION_WIDTH",
    "LENGTH_BYTES",
    "MAX_DIMS",
    "MAX_HEADER_BYTES",
    "OWN_KEYS",
    "PREFIX",
    "SCALARS_WIDTH",
    "ImageError",
    "ImageTensor",
    "TensorEntry",
]

FORMAT = "ckptd/1"

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
ITERATION_WIDTH = 20
SCALARS_WIDTH = 12
DIGEST_HEX = 32
# Metadata keys that ``identity`` must not contain.
OWN_KEYS = frozenset(
    {"format", "iteration", "previous", "scalars_len", "digests", "num_operators", "anchors"}
)

AT_ITERATION = LENGTH_BYTES + len(f'{{"__metadata__":{{"format":"{FORMAT}","iteration":"')
AT_PREVIOUS = AT_ITERATION + ITERATION_WIDTH + len('","previous":"')
AT_SCALARS = AT_PREVIOUS + ITERATION_WIDTH + len('","scalars_len":"')
AT_DIGESTS = AT_SCALARS + SCALARS_WIDTH + len('","digests":"')
# The first bytes of every header with blanked mutable fields.
PREFIX = (
    f'{{"__metadata__":{{"format":"{FORMAT}","iteration":"{" " * ITERATION_WIDTH}"'
    f',"previous":"{" " * ITERATION_WIDTH}","scalars_len":"{" " * SCALARS_WIDTH}","digests":"'
).encode("ascii")
assert LENGTH_BYTES + len(PREFIX) == AT_DIGESTS


class ImageError(ValueError):
    """The bytes are not an image, or not a whole one."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor to lay out."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * DTYPE_SIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class ImageTensor:
    """A tensor of an image; ``offset`` counts from the beginning of the image."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
