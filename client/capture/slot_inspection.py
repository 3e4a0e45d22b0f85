"""Looking into a filled slot: which of its weights hold NaN."""

from __future__ import annotations

import numpy as np
import torch

from ckptd.client.daemon_link.mapped_segment import MappedSegment
from ckptd.client.model.snapshot_layout import SAFETENSORS_DTYPES
from ckptd.storage.image import ImageView
from ckptd.storage.image_format import ImageError

__all__ = ["nan_tensors"]

_FLOATS = {
    name: dtype
    for dtype, name in SAFETENSORS_DTYPES.items()
    if dtype.is_floating_point and dtype.itemsize > 1
}

# Read as integers, positive NaNs are what exceeds +inf as signed, negative ones what exceeds -inf
# as unsigned.
_SIGNED = {2: np.int16, 4: np.int32, 8: np.int64}
_UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}
_INFINITY = {
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF0000000000000,
}
_CHUNK_BYTES = 256 << 10  # stays in a core's cache for the second look


def nan_tensors(segment: MappedSegment, index: int) -> list[str]:
    """Names of the weights in this slot that hold at least one NaN; empty if the slot was reused
    meanwhile.
    """
    header = segment.header(index)
    if header is None:
        return []
    try:
        view = ImageView(segment.slot(index)[: header.image_len])
    except ImageError:
        return []  # being overwritten: there is nothing to look at any more
    found = []
    for entry in view:
        dtype = _FLOATS.get(entry.dtype)
        if dtype is None or entry.name.startswith(("optim/", "buffer/", "ckptd.")) or not entry.nbytes:
            continue
        if dtype in _INFINITY and _holds_nan(view.data(entry.name), dtype):
            found.append(entry.name)
    now = segment.header(index)
    return found if now is not None and now.sequence == header.sequence else []


def _holds_nan(data: memoryview, dtype: torch.dtype) -> bool:
    # numpy, not torch: a second OpenMP team in this process makes the trainer's threads sleep at
    # every barrier.
    infinity, size = _INFINITY[dtype], dtype.itemsize
    negative_infinity = infinity | 1 << (8 * size - 1)
    for start in range(0, len(data), _CHUNK_BYTES):
        part = data[start : start + _CHUNK_BYTES]
        if (
            int(np.frombuffer(part, _SIGNED[size]).max()) > infinity
            or int(np.frombuffer(part, _UNSIGNED[size]).max()) > negative_infinity
        ):
            return True
    return False
