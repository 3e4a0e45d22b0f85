"""Which fp32 parameters are read only after rounding, under autocast: for them the rounded weights
suffice in replay.

Decided by watching one real forward at the dispatcher: a parameter's storage that is consumed only
by casts to the autocast dtype (views of it aside) can be recorded in that dtype while it is frozen,
2 bytes instead of 4. Everything else keeps its own dtype: embeddings, norms, and fused experts
whose kernel is not autocast are typical.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ckptd.client.model.live_state import local

__all__ = ["PrecisionProbe"]


class PrecisionProbe:
    """Watches the first forward that runs under autocast; ``sufficient()`` is empty until (and
    unless) one did.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._params = {n: p for n, p in params.items() if local(p).dtype is torch.float32}
        self._mode: _Watch | None = None
        # Forwards that have begun and not ended: a container's children may call each other.
        self._depth = 0
        self._found: dict[str, torch.dtype] = {}
        self.done = not self._params

    def enter(self) -> None:
        """A forward of the model begins (training thread); it may be inside another one, which then
        goes on being watched.
        """
        if self.done:
            return
        self._depth += 1
        # Only the outermost is watched: what it still reads after an inner one ended would be missed.
        if self._depth > 1:
            return
        device = local(next(iter(self._params.values()))).device.type
        if not torch.is_autocast_enabled(device):
            return
        storages = {local(p).untyped_storage().data_ptr(): n for n, p in self._params.items()}
        self._mode = _Watch(storages, torch.get_autocast_dtype(device))
        self._mode.__enter__()

    def leave(self) -> None:
        """A forward of the model ended, however it ended; more often than ``enter`` if some did not
        count as forwards.
        """
        self._depth = max(0, self._depth - 1)
        if self._depth or self._mode is None:
            return
        mode, self._mode = self._mode, None
        mode.__exit__(None, None, None)
        self.done = True
        self._found = {n: mode.dtype for n in mode.cast if n not in mode.read}

    def sufficient(self) -> dict[str, torch.dtype]:
        """Parameter name → the dtype that suffices while frozen."""
        return dict(self._found)


class _Watch(TorchDispatchMode):
    """Notes how parameter storages are consumed; changes nothing."""

    def __init__(self, storages: Mapping[int, str], dtype: torch.dtype) -> None:
        super().__init__()
        self._storages, self.dtype = storages, dtype
        self.cast: set[str] = set()
        self.read: set[str] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        names = {n for t in _tensors((args, kwargs)) if (n := self._name(t)) is not None}
        if names and not func.is_view:
            rounded = func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is self.dtype
            (self.cast if rounded else self.read).update(names)
        return func(*args, **kwargs)

    def _name(self, tensor: Tensor) -> str | None:
        try:
            return self._storages.get(tensor.untyped_storage().data_ptr())
        except (NotImplementedError, RuntimeError):
            return None  # a wrapper without storage is not one of the parameters


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in _tensors(v)]
    if isinstance(value, list | tuple):
        return [t for v in value for t in _tensors(v)]
    return []
