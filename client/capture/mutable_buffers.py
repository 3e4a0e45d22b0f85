"""Buffers that a forward changes: they cannot be copied beside it. Which they are is found out
while the first steps are measured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ckptd.client.model.live_state import LiveState

__all__ = ["RestlessBuffers"]


class RestlessBuffers:
    """Of one model.

    Attributes:
        names: of those that are known to change before the optimizer's step; it grows.
    """

    def __init__(self, binding: LiveState) -> None:
        self._binding = binding
        self._watched: list[_WatchedBuffer] = []
        self.names: set[str] = set()

    def watch(self) -> None:
        """The top of a step."""
        self._watched = [_WatchedBuffer(n, b) for n, b in self._binding.buffers().items()]

    def look(self) -> None:
        """The optimizer's step is about to run."""
        if self._watched:
            now = self._binding.buffers()
            self.names |= {w.name for w in self._watched if w.changed(now.get(w.name))}
            self._watched = []


class _WatchedBuffer:
    """A buffer as it was at the top of a step.

    Its version counter is not enough: batch norm's kernel updates the running statistics without
    counting them up.
    """

    def __init__(self, name: str, buffer: Tensor) -> None:
        self.name, self._buffer, self._version = name, buffer, buffer._version
        self._was = buffer.detach().clone()

    def changed(self, now: Tensor | None) -> bool:
        same = now is self._buffer and self._buffer._version == self._version
        return not same or not torch.equal(self._was, self._buffer)
