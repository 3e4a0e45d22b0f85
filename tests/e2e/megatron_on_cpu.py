"""A stand-in: Megatron-Core 0.16 asks for CUDA in many places; here the CPU answers, and streams are empty.

Its modules, optimizers, buffers, pipeline schedules and random states are the real ones. Imported before Megatron.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["install"]


def _cpu(device: Any) -> Any:
    if isinstance(device, str | torch.device) and torch.device(device).type == "cuda":
        return torch.device("cpu")
    return device


class _OnCpu(TorchFunctionMode):
    """Tensors that are wanted on a CUDA device are made on the CPU, and say that they are CUDA tensors."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1:  # the optimizers look at the type's name
            return func(*args).replace("torch.", "torch.cuda.")
        if "device" in named:
            named["device"] = _cpu(named["device"])
        if func is torch.Tensor.to:
            args = (args[0], *(_cpu(arg) if isinstance(arg, str | torch.device) else arg for arg in args[1:]))
        return func(*args, **named)


class _NoStream:
    """A stream or an event: all has been done when a call on the CPU returns."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def record_event(self, *_: Any) -> _NoStream:
        return _NoStream()

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def install() -> None:
    """Let Megatron-Core run in this process."""
    _OnCpu().__enter__()
    vars(torch.cuda).update(
        current_device=lambda: torch.device("cpu"),
        synchronize=lambda *_: None,
        get_rng_state=lambda *_: torch.get_rng_state(),
        manual_seed=torch.manual_seed,
        Stream=_NoStream,
        Event=_NoStream,
        current_stream=_NoStream,
        stream=_NoStream,
    )
    vars(importlib.import_module("megatron.core.tensor_parallel.random")).update(
        _get_cuda_rng_state=lambda *_, **__: torch.get_rng_state(),
        _set_cuda_rng_state=lambda state, *_, **__: torch.set_rng_state(state),
    )
    # Megatron-Core 0.16.1 defines it only where Transformer Engine is installed, and reads it everywhere.
    vars(importlib.import_module("megatron.core.transformer.moe.moe_utils")).setdefault(
        "te_general_gemm", None
    )
