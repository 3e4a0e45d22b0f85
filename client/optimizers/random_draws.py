"""Optimizers that draw random numbers in their steps: ranks whose generators differ get other
values, whatever they had alike before.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

__all__ = ["Draws"]


class Draws:
    """Looks at the global generators before and after each update.

    Not seen: generators that an optimizer keeps, and draws before the closure of ``step(closure)``
    is through.

    Attributes:
        found: the optimizer that drew, by its number; -1: none was seen to. Nothing is looked at any more once one was.
    """

    def __init__(self, *, watches: bool) -> None:
        self.watches = watches
        self.found = -1
        self._before: tuple[Any, ...] | None = None

    def before(self) -> None:
        """An update begins."""
        if self.watches and self.found < 0:
            self._before = _generators()

    def after(self, optimizer: int) -> None:
        """Optimizer number ``optimizer`` has updated its parameters."""
        before, self._before = self._before, None
        if before is not None and before != _generators():
            self.found = optimizer


def _generators() -> tuple[Any, ...]:
    """Equal as long as nobody draws. As `capture_rng`, without the packing, which takes five times as long."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    numpy = (kind, np.asarray(keys).tobytes(), position, has_gauss, cached)
    devices = []
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        devices = [s.numpy().tobytes() for s in torch.cuda.get_rng_state_all()]
    return torch.get_rng_state().numpy().tobytes(), numpy, random.getstate(), devices
