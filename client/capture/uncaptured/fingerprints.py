"""Whether an object of a program changes: a look at a bounded number of its parts."""

from __future__ import annotations

import gc
import operator
import site
import sys
import sysconfig
import time
import types
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ckptd.client.optimizers.value_trees import counts_steps
from ckptd.client.rng_state import GENERATORS

_SCALARS = (type(None), bool, int, float, complex, str, bytes)
_MOST_PARTS = 2000
_OF_ONE = 64
_DEPTH = 4
_ARRAY_BYTES = 1 << 20
# Folders of classes that are not the user's.
_INSTALLED = tuple({*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages()})
_CLOCKS = (time.time, time.monotonic, time.perf_counter)
# What they showed when the process began, or an hour before.
_BEGAN = [clock() - 3600 for clock in _CLOCKS]


def fingerprint(value: object, skips: Callable[[object], bool] = lambda part: False) -> object:
    """Another one if a part that is looked at has changed. Clock times do not count.

    Args:
        skips: True for parts that are not looked at.
    """
    return list(_Look(skips).parts(value, _DEPTH))


def of_user(kind: type) -> bool:
    """True for a class that is neither Python's nor a library's."""
    if kind.__module__ == "__main__":
        return True
    path = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return (
        path is not None and not path.startswith(_INSTALLED) and kind.__module__.partition(".")[0] != "ckptd"
    )


def is_iterator(value: object) -> bool:
    """True for what gives one item after the other once: a generator, ``itertools.cycle``."""
    kind = type(value)
    return isinstance(value, types.GeneratorType) or (
        kind.__module__ in ("itertools", "builtins") and hasattr(kind, "__next__")
    )


def is_time(value: object) -> bool:
    """True for a number that a clock has shown since the process began."""
    if type(value) is not float or value.is_integer():
        return False
    return any(began < value <= clock() for began, clock in zip(_BEGAN, _CLOCKS, strict=True))


def _has_parts(value: object) -> bool:
    if isinstance(value, dict | list | tuple | deque | set | frozenset):
        return True
    own = of_user(type(value)) and not isinstance(value, nn.Module | type)
    return own or counts_steps(value)


class _Look:
    def __init__(self, skips: Callable[[object], bool]) -> None:
        self._skips, self._left = skips, _MOST_PARTS

    def parts(self, value: Any, depth: int) -> Iterator[object]:
        self._left -= 1
        if self._left < 0 or self._skips(value):
            return
        if isinstance(value, _SCALARS):
            if not is_time(value):
                yield repr(value) if isinstance(value, float) else value
        elif isinstance(value, Tensor):
            yield id(value), value._version, tuple(value.shape)
        elif isinstance(value, np.ndarray):
            if not value.dtype.hasobject and value.nbytes <= _ARRAY_BYTES:
                yield value.tobytes()
        elif isinstance(value, GENERATORS):
            yield repr(_state_of(value))
        elif isinstance(value, _BaseDataLoaderIter):
            yield value._num_yielded
        elif is_iterator(value):
            yield from self._of_iterator(value, depth)
        elif depth and _has_parts(value):
            yield from self._inside(value, depth - 1)

    def _inside(self, value: Any, depth: int) -> Iterator[object]:
        if isinstance(value, dict):
            yield len(value)
            for key, part in islice(value.items(), _OF_ONE):
                yield key if isinstance(key, str) else id(key)
                yield from self.parts(part, depth)
        elif isinstance(value, list | tuple | deque):
            yield len(value)
            for part in islice(reversed(value), _OF_ONE):  # where they grow
                yield from self.parts(part, depth)
        elif isinstance(value, set | frozenset):
            yield len(value)
        else:
            slots = {n: getattr(value, n, None) for n in getattr(type(value), "__slots__", ())}
            for name, part in islice((slots | getattr(value, "__dict__", {})).items(), _OF_ONE):
                yield name
                yield from self.parts(part, depth)

    def _of_iterator(self, value: Any, depth: int) -> Iterator[object]:
        """Its position, as far as that can be seen from outside; nothing is taken out of it."""
        if isinstance(value, types.GeneratorType):
            frame = value.gi_frame
            yield frame and frame.f_lasti
            found = list(frame.f_locals.values()) if frame else []
        else:
            if type(value).__module__ == "itertools" and type(value).__name__ == "count":
                yield repr(value)
            yield operator.length_hint(value, -1)
            found = gc.get_referents(value)
        for part in found:
            if depth and (is_iterator(part) or isinstance(part, _BaseDataLoaderIter | int | Tensor)):
                yield from self.parts(part, depth - 1)


def _state_of(generator: Any) -> object:
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state() if isinstance(generator, np.random.RandomState) else generator.getstate()
