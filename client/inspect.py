"""Looking into a filled slot: which of its weights hold NaN."""

from __future__ import annotations

import numpy as np
import torch

from ckptd.client.layout import SAFETENSORS_DTYPES
from ckptd.client.segment import MappedSegment
from ckptd.storage.image import ImageError, ImageView

__all__ = ["nan_tensors"]

_FLOATS = {
    name: dtype
    for dtype, name in SAFETENSORS_DTYPES.items()
    if dtype.is_floating_point and dtype.itemsize > 1
}

_BITS = {2: np.uint16, 4: np.uint32, 8: np.uint64}
# The bits of infinity: a larger magnitude is a NaN.
_INFINITY = {
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF0000000000000,
}


def nan_tensors(segment: MappedSegment, index: int) -> list[str]:
    """Names of the weights in this slot that hold at least one NaN; empty if the slot was reused meanwhile."""
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
        if (
            dtype is None
            or entry.name.startswith(("optim/", "buffer/", "ckptd."))
            or not entry.nbytes
        ):
            continue
        # numpy, not torch: a second OpenMP team in this process makes the trainer's threads sleep at every barrier.
        bits = np.frombuffer(view.data(entry.name), dtype=_BITS[dtype.itemsize])
        size, infinity = dtype.itemsize, _INFINITY.get(dtype)
        if infinity is not None and bool(
            ((bits & _BITS[size]((1 << (8 * size - 1)) - 1)) > infinity).any()
        ):
            found.append(entry.name)
    return found
