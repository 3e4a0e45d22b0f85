"""Tensors on the host and their bytes; and how much memory is free."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

import torch
from torch import Tensor

from ckptd.client.model.snapshot_layout import SAFETENSORS_DTYPES

__all__ = ["DTYPES", "buffer_of", "free_bytes"]

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


def free_bytes(device: torch.device) -> int:
    """Bytes that this process may still take on a device: of the host what is available, or less if
    its memory cgroup says so.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch has taken and does not use serves as well.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    told = re.search(r"^MemAvailable:\s+(\d+) kB", _text_of("/proc/meminfo"), re.MULTILINE)
    free = int(told[1]) * 1024 if told else sys.maxsize
    limit, used = (_text_of(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if limit.isdigit() and used.isdigit():
        free = min(free, int(limit) - int(used))
    return max(free, 0)


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:  # no such file on this system, so no such limit
        return ""
