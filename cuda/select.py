"""Which engine serves a device."""

from __future__ import annotations

import torch

from ckptd.cuda.engine import CopyEngine, CpuEngine

__all__ = ["make_engine"]


def make_engine(device: torch.device, *, inline: bool = False) -> CopyEngine:
    """The engine for tensors on ``device``.

    Raises:
        ValueError: there is none for this kind of device.
    """
    if device.type == "cpu":
        return CpuEngine(inline=inline)
    if device.type == "cuda":
        from ckptd.cuda.cuda_streams import CudaEngine

        return CudaEngine(device)
    raise ValueError(f"no copy engine for device {device}: supported are cpu and cuda")
