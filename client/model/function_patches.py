"""Standing in for functions of torch, such that any number of users stack and leave in any order.

A patch that puts back what it found undoes the patches that came after it, and those then bring it
back for good: two checkpointers that live at once, as in adversarial training, end in any order.
Here one stand-in holds the *layers* of all users: it comes with the first and goes with the last.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["layered"]

# Called with what is below it, then with the arguments of the function it is around.
Layer = Callable[..., Any]

_MARK = "_ckptd_stand_in"
_ABSENT = object()
# Users come and go rarely; calls do not take it, they read one tuple. Reentrant, as a user may also
# go by being collected.
_lock = threading.RLock()


@contextmanager
def layered(holder: Any, name: str, layer: Layer) -> Iterator[None]:
    """Call ``layer(below, *args, **kwargs)`` in place of ``holder.name`` during the body; the last
    to come is outermost.

    Args:
        holder: a module, a class (the attribute may be a static method), or an object whose bound
            method is meant.
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
                stand_in.go()


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

    def go(self) -> None:
        """Put back what was found, unless somebody else's patch lies above: then stay below it,
        doing nothing.
        """
        if _stand_in_of(self._holder, self._name) is not self:
            return
        if self._found is _ABSENT:
            delattr(self._holder, self._name)
        else:
            setattr(self._holder, self._name, self._found)


def _stand_in_of(holder: Any, name: str) -> _StandIn | None:
    """Ours, if nothing lies above it. The mark alone does not tell: ``functools.wraps`` copies it
    to other people's wrappers.
    """
    function = getattr(holder, name)
    stand_in: _StandIn | None = getattr(function, _MARK, None)
    return stand_in if stand_in is not None and stand_in.function is function else None
