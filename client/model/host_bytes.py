"""Tensors on the host and their bytes."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ckptd.client.model.snapshot_layout import SAFETENSORS_DTYPES

__all__ = ["DTYPES", "buffer_of"]

DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}


def buffer_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, in place, for as long as the tensor lives.

    Unlike through numpy its storage can be resized afterwards, and every dtype will do.

    Raises:
        ValueError: it is not contiguous: its bytes would be those of others.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of {tuple(tensor.shape)} is not contiguous")
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
