"""Hooks into torch that stack, end in any order, and stay with the object they were put on."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Called with the function below it, then with the arguments of the patched function.
Layer = Callable[..., Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_MARK = "_ckptd_stand_in"
_ABSENT = object()
# Users come and go rarely; calls do not take it, they read one tuple. Reentrant, because a user may
# also end by being collected.
_lock = threading.RLock()


@contextmanager
def layered(holder: Any, name: str, layer: Layer) -> Iterator[None]:
    """In the body, call ``layer(below, *args, **kwargs)`` for ``holder.name``; the newest layer is outermost.

    A patch that restores what it found undoes the patches that came after it, and those then bring it
    back for good: two checkpointers that live at once, as in adversarial training, end in any order.
    Here one stand-in holds the layers of all users; it comes with the first and goes with the last.

    Args:
        holder: a module, a class (the attribute may be a static method), or an object with a bound
            method of this name.
    """
    token = functools.partial(layer)  # one user's, should the same function be given twice
    with _lock:
        stand_in = _stand_in_of(holder, name) or _StandIn(holder, name)
        stand_in.layers = (*stand_in.layers, token)
    try:
        yield
    finally:
        with _lock:
            stand_in.layers = tuple(each for each in stand_in.layers if each is not token)
            if not stand_in.layers:
                stand_in.remove()


class _StandIn:
    """The one function in place of ``holder.name``, and the layers it calls."""

    def __init__(self, holder: Any, name: str) -> None:
        self._holder, self._name = holder, name
        self._found = vars(holder).get(name, _ABSENT)
        self.layers: tuple[Layer, ...] = ()
        original = getattr(holder, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            below = original
            for layer in self.layers:
                below = functools.partial(layer, below)
            return below(*args, **kwargs)

        setattr(call, _MARK, self)
        self.function = call
        setattr(holder, name, staticmethod(call) if isinstance(self._found, staticmethod) else call)

    def remove(self) -> None:
        """Restore what was found. Below somebody else's patch the stand-in stays, doing nothing."""
        if _stand_in_of(self._holder, self._name) is not self:
            return
        if self._found is _ABSENT:
            delattr(self._holder, self._name)
        else:
            setattr(self._holder, self._name, self._found)


def _stand_in_of(holder: Any, name: str) -> _StandIn | None:
    """Ours, if nothing lies above it: ``functools.wraps`` copies the mark to other people's wrappers, too."""
    function = getattr(holder, name)
    stand_in: _StandIn | None = getattr(function, _MARK, None)
    return stand_in if stand_in is not None and stand_in.function is function else None


class ModuleHook:
    """Calls ``call``, but not from its copies and pickles, nor while ``torch.compile`` traces.

    ``copy.deepcopy(model)`` (averaged weights begin so) and ``torch.save(model)`` take a module's hooks
    along, and with a bound method everything behind it: sessions, locks, threads. A copy's forward is
    not the model's, and a compiled graph cannot hold us.
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


def before_update(
    args: tuple[Any, ...], kwargs: dict[str, Any], work: Callable[[Any], None]
) -> Arguments | None:
    """Call ``work`` when gradients are complete and weights are unchanged: now, or after the step's closure.

    In ``optimizer.step(closure)`` forward and backward run within the step.

    Args:
        args, kwargs: as a pre-hook of ``Optimizer.step`` receives them (the optimizer is the first).
        work: called with the closure's result; with None if there is no closure.
    Returns:
        What the pre-hook must return: arguments with the closure wrapped, or None to leave them as they are.
    """
    closure = closure_of(args, kwargs)
    if closure is None:
        work(None)
        return None

    def followed() -> Any:
        result = closure()
        work(result)
        return result

    return with_closure(args, kwargs, followed)


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """The closure among the arguments of a step; None if there is none."""
    named = kwargs.get("closure")
    closure = named if named is not None else args[1] if len(args) > 1 else None
    return closure if callable(closure) else None


def with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], closure: Callable[[], Any]) -> Arguments:
    """The arguments of a step with another closure."""
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs
