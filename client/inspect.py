"""Looking into a filled slot: which of its weights hold NaN."""

from __future__ import annotations

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
        tensor = segment.memory.view(
            segment.slot_base(index) + entry.offset, entry.nbytes, dtype, entry.shape
        )
        # A sum is one pass without a temporary; only a NaN sum (or inf - inf) deserves the exact look.
        if torch.isnan(tensor.sum(dtype=torch.float32)) and torch.isnan(tensor).any():
            found.append(entry.name)
    return found
