"""Writing of images: the layout is planned once; a header is then one copy of a template and three
patches, without serialization.

Invariants: tensor data is contiguous, begins at a multiple of 64, and lies in order of item size
(descending), so every tensor is aligned to its items.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import xxhash

from ckptd.storage.images.image_format import (
    AT_ITERATION,
    AT_PREVIOUS,
    AT_SCALARS,
    DATA_ALIGNMENT,
    DIGEST_HEX,
    DTYPE_SIZE,
    FORMAT,
    ITERATION_WIDTH,
    LENGTH_BYTES,
    MAX_DIMS,
    OWN_KEYS,
    SCALARS_WIDTH,
    TensorEntry,
)
from ckptd.storage.images.safetensors_header import render_header

__all__ = ["ImageLayout"]


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """The offsets of all parts of an image, and its header as a template."""

    entries: tuple[TensorEntry, ...]
    header_len: int
    data_offset: int
    image_len: int
    layout_id: int
    num_operators: int
    anchors: int
    _offsets: Mapping[str, int]
    _template: bytes

    @classmethod
    def build(
        cls,
        entries: Iterable[TensorEntry],
        *,
        identity: Mapping[str, str],
        num_operators: int,
        anchors: int,
        data_offset: int | None = None,
    ) -> ImageLayout:
        """Plan the image of ``entries``, ordered by item size (descending, stable).

        Args:
            identity: further metadata of the header: job, run, rank, world_size.
            num_operators: number of operators of the model.
            anchors: bitmask over operator ids: the operators with an anchor in this image.
            data_offset: offset of the data (a multiple of 64) that is already in place, in the order of
                ``entries``; None: the data follow the header, ordered by item size.
        Raises:
            ValueError: a duplicate name, an unknown dtype, a bad shape, an anchor out of range, or
                a header that does not fit before ``data_offset``.
        """
        checked = _checked(entries)
        if data_offset is None:
            checked = sorted(checked, key=lambda entry: -DTYPE_SIZE[entry.dtype])
        ordered = tuple(checked)
        metadata = _metadata(identity, len(ordered), num_operators, anchors)
        ends = list(itertools.accumulate((entry.nbytes for entry in ordered), initial=0))
        template = _padded(render_header(metadata, ordered), data_offset)
        data_offset = len(template)
        return cls(
            entries=ordered,
            header_len=data_offset - LENGTH_BYTES,
            data_offset=data_offset,
            image_len=data_offset + ends[-1],
            layout_id=xxhash.xxh3_64_intdigest(template),
            num_operators=num_operators,
            anchors=anchors,
            _offsets={e.name: data_offset + at for e, at in zip(ordered, ends, strict=False)},
            _template=template,
        )

    def offset_of(self, name: str) -> int:
        """The offset of tensor ``name`` in the image; KeyError if unknown."""
        return self._offsets[name]

    def write_header(self, buf: memoryview, *, iteration: int, previous: int, scalars_len: int) -> None:
        """Write the header to the beginning of ``buf``, with blank digests.

        Raises:
            ValueError: ``buf`` is shorter than the image, or a number does not fit its field.
        """
        if len(buf) < self.image_len:
            raise ValueError(f"the buffer has {len(buf)} bytes, the image needs {self.image_len}")
        fields = (
            (AT_ITERATION, _field("iteration", iteration, ITERATION_WIDTH)),
            (AT_PREVIOUS, _field("previous", previous, ITERATION_WIDTH)),
            (AT_SCALARS, _field("scalars_len", scalars_len, SCALARS_WIDTH)),
        )
        buf[: self.data_offset] = self._template
        for at, text in fields:
            buf[at : at + len(text)] = text


def _checked(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    seen: set[str] = set()
    checked = list(entries)
    for entry in checked:
        if entry.name in seen or entry.name == "__metadata__":
            raise ValueError(f"two tensors have the name {entry.name!r}")
        seen.add(entry.name)
        if entry.dtype not in DTYPE_SIZE:
            raise ValueError(f"tensor {entry.name!r} has unknown dtype {entry.dtype!r}")
        if len(entry.shape) > MAX_DIMS or any(size < 0 for size in entry.shape):
            raise ValueError(f"tensor {entry.name!r} has bad shape {entry.shape}")
    return checked


def _metadata(
    identity: Mapping[str, str], num_tensors: int, num_operators: int, anchors: int
) -> dict[str, str]:
    taken = OWN_KEYS.intersection(identity)
    if taken:
        raise ValueError(f"identity must not contain {', '.join(sorted(taken))}")
    if anchors < 0 or anchors >> num_operators:
        raise ValueError(f"anchors name operators beyond the model's {num_operators}")
    bitmap = anchors.to_bytes((num_operators + 7) // 8, "little")
    return {
        "format": FORMAT,
        "iteration": " " * ITERATION_WIDTH,
        "previous": " " * ITERATION_WIDTH,
        "scalars_len": " " * SCALARS_WIDTH,
        "digests": "0" * (DIGEST_HEX * num_tensors),
        **identity,
        "num_operators": str(num_operators),
        "anchors": base64.b64encode(bitmap).decode("ascii"),
    }


def _padded(header: bytes, data_offset: int | None) -> bytes:
    """The header, padded so that the data begin at ``data_offset``."""
    if data_offset is None or len(header) == data_offset:
        return header
    if data_offset % DATA_ALIGNMENT or len(header) > data_offset:
        raise ValueError(f"a header of {len(header)} bytes cannot be padded to {data_offset} bytes")
    text = header[LENGTH_BYTES:] + b" " * (data_offset - len(header))
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _field(name: str, value: int, width: int) -> bytes:
    text = b"%*d" % (width, value)
    if len(text) > width:
        raise ValueError(f"{name} {value} has more than {width} digits")
    return text
