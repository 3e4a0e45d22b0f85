"""Optimizers that update the model's weights, and that nobody passed.

Where training has stages, a second optimizer may take the place of the first. No snapshot has its state, so
those that are taken while it steps lead nowhere. One that lives for a step only (an inner loop that starts
from the weights and goes back to them) leaves nothing behind.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

_DEPTH = 4
_MOST_PARTS = 1000


class ForeignOptimizers:
    """Watches the steps of all optimizers.

    Args:
        known: the optimizers that are captured, with wrappers; what is inside of them is theirs.
        weights: the tensors that are captured.
    """

    def __init__(self, known: Iterable[Any], weights: Iterable[torch.Tensor]) -> None:
        self._known = list(known)
        self._known_ids = set(map(id, self._known))
        self._weights = frozenset(map(id, weights))
        self._stepped: dict[int, weakref.ref[Any]] = {}  # in this step of the loop
        self._before: dict[int, weakref.ref[Any]] = {}
        self._temporary = False

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """This optimizer has updated its parameters."""
        if id(optimizer) in self._known_ids or not optimizer.state:
            return
        if not any(id(p) in self._weights for group in optimizer.param_groups for p in group["params"]):
            return
        if any(part is optimizer for part in _inside(self._known)):
            self._known_ids.add(id(optimizer))
            return
        self._stepped[id(optimizer)] = weakref.ref(optimizer)

    def top(self) -> tuple[str, bool]:
        """The top of a step.

        Returns:
            The kind of one that stays (empty: there is none), and whether it is not known yet.
        """
        alive = {key: ref for key, ref in self._stepped.items() if ref() is not None}
        stays = [ref() for key, ref in alive.items() if key in self._before and self._before[key]() is ref()]
        # What stepped in the step before, and not in this one: each step makes one of its own.
        self._temporary = self._temporary or bool(self._before.keys() - alive.keys())
        self._before, self._stepped = alive, {}
        if stays:
            return type(stays[0]).__name__, False
        return "", bool(alive) and not self._temporary


def _inside(roots: Iterable[Any]) -> Iterator[Any]:
    """What these objects keep in attributes and containers."""
    seen, level = set[int](), list(roots)
    for _ in range(_DEPTH):
        below: list[Any] = []
        for value in level:
            if id(value) in seen or len(seen) > _MOST_PARTS:
                continue
            seen.add(id(value))
            yield value
            if isinstance(value, dict):
                below += value.values()
            elif isinstance(value, list | tuple):
                below += value
            elif not isinstance(value, torch.Tensor):
                below += getattr(value, "__dict__", {}).values()
        level = below
