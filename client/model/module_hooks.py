"""Hooks that stay with the module they were put on: a copy or a pickle of the module carries an inert one.

``copy.deepcopy(model)`` (averaged weights begin so) and ``torch.save(model)`` take a module's hooks
along, and with a bound method everything behind it: sessions, locks, threads. And a copy's forward
is not the model's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["ModuleHook"]


class ModuleHook:
    """Calls ``call``; its copies and pickles do nothing, nor does it within what ``torch.compile``
    traces: a graph cannot hold us.
    """

    def __init__(self, call: Callable[..., None] | None) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self._call is not None and not torch.compiler.is_compiling():
            self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleHook:
        return ModuleHook(None)

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[None]]:
        return ModuleHook, (None,)
