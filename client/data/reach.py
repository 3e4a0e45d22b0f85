"""The state that determines a loader's batches, besides their indices and the global random generators.

It consists of the random generators that a dataset, sampler, collate function or transform holds as an
attribute, in a closure, or as a global of its module; of the epoch numbers and seeds of samplers; and of
plain attributes of the user's own samplers that change during iteration. They are found by inspecting
objects; nothing is called.
"""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckptd.client.data.after import After

__all__ = ["Reach"]

_LIBRARIES = frozenset(
    {
        "accelerate",
        "builtins",
        "collections",
        "functools",
        "lightning",
        "numpy",
        "pytorch_lightning",
        "torch",
        "torchdata",
        "transformers",
    }
)
# Only these attributes of a library's objects are inspected; the others are internal to it.
_FOLLOWED = (
    "base_dataloader",
    "batch_sampler",
    "sampler",
    "dataset",
    "datasets",
    "data_source",
    "collate_fn",
    "worker_init_fn",
    "generator",
    "synchronized_generator",
    "func",
    "args",
    "keywords",
)
# `_epoch` belongs to a stream of Hugging Face's datasets: a tensor that its workers share.
_COUNTS = ("epoch", "_epoch", "iteration", "initial_seed", "seed")
_SAMPLERS = ("sampler", "batch_sampler")
_DEPTH = 8
_ITEMS = 64
_PLAIN = (type(None), bool, int, float, str)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
# `SystemRandom` has no state: its numbers cannot be repeated.
_STATELESS = random.SystemRandom
_GLOBAL = {id(torch.default_generator), id(np.random.mtrand._rand), id(random._inst)}


@dataclass(slots=True)
class _Found:
    """An object at a path: a generator, or a plain attribute of ``owner`` with its value when it
    was found.
    """

    value: Any
    owner: Any = None
    name: str = ""

    @property
    def now(self) -> Any:
        value = _plain(getattr(self.owner, self.name, None))
        return value if isinstance(value, _PLAIN) else None


class Reach:
    """The state that a loader reaches.

    Args:
        counts: include epoch numbers and seeds; False if the loop itself sets them for each epoch.
    """

    def __init__(self, loader: Any, *, counts: bool = True) -> None:
        self._loader, self._counts = loader, counts
        self._known = list(self._find())
        # A restarted job builds unchanged attributes itself; its seeds and epochs may differ.
        self._built = {
            path: found.value for path, found in self._known if found.name and found.name not in _COUNTS
        }

    @property
    def generators(self) -> list[str]:
        """The paths of the random generators."""
        return [path for path, found in self._known if not found.name]

    def look(self) -> None:
        """Search again at the start of an epoch, to find objects created since."""
        self._known = list(self._find())

    def capture(self) -> dict[str, Any]:
        """The states of the generators, and the plain attributes that have changed since the loader was
        built; of types that ``state=`` accepts.
        """
        state: dict[str, Any] = {}
        for path, found in self._known:
            if not found.name:
                state[path] = _state_of(found.value)
            elif path not in self._built or self._built[path] != found.now:
                state[path] = found.now
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the result of ``capture``; objects that it does not name keep their initial state."""
        self.look()
        late = [f for p, f in self._known if f.value is None and isinstance(state.get(p), torch.Tensor)]
        for found in late:  # the first iterator creates it
            setattr(found.owner, found.name, torch.Generator())
        if late:
            self.look()
        # Objects that an iterator has created since then are not part of the recorded state.
        self._known = [(p, f) for p, f in self._known if p in state or p in self._built]
        for path, found in self._known:
            if not found.name:
                if path in state:
                    _set_state(found.value, state[path])
                continue
            value = state.get(path, self._built.get(path, found.value))
            if isinstance(value, _PLAIN):
                _put(found.owner, found.name, value)

    def _find(self) -> Iterator[tuple[str, _Found]]:
        found = _walk(self._loader, "loader", 0, {id(self._loader)}, sampler=False)
        return ((p, f) for p, f in found if self._counts or f.name not in _COUNTS)


def _walk(
    value: Any, path: str, depth: int, seen: set[int], *, sampler: bool
) -> Iterator[tuple[str, _Found]]:
    if depth > _DEPTH:
        return
    if isinstance(value, After):
        value = value.inner
    for name, child in _children(value):
        if name in _COUNTS:
            child = _plain(child)
        at = f"{path}.{name}"
        inside = sampler or name in _SAMPLERS
        if isinstance(child, _PLAIN):
            own = inside and not _of_library(value) and not isinstance(value, list | tuple | dict)
            counts = name in _COUNTS and isinstance(child, int)
            if (own or counts) and name in getattr(value, "__dict__", ()):
                yield at, _Found(child, value, name)
        elif id(child) not in seen and id(child) not in _GLOBAL:
            seen.add(id(child))
            if isinstance(child, _GENERATORS):
                if not isinstance(child, _STATELESS):
                    yield at, _Found(child)
            else:
                yield from _walk(child, at, depth + 1, seen, sampler=inside)


def _plain(value: Any) -> Any:
    """The number in a tensor without dimensions; other values unchanged."""
    if isinstance(value, torch.Tensor) and value.dim() == 0 and not value.is_floating_point():
        return int(value)
    return value


def _put(owner: Any, name: str, value: Any) -> None:
    """Set an attribute; a tensor is changed in place, because workers share it."""
    live = getattr(owner, name, None)
    if isinstance(live, torch.Tensor):
        live.fill_(value)
    else:
        setattr(owner, name, value)


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, types.FunctionType | types.MethodType):
        yield from _used_by(value)
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, list | tuple):
        yield from ((str(at), part) for at, part in enumerate(value[:_ITEMS]))
    elif type(value) is dict:
        if len(value) <= _ITEMS:
            yield from ((str(key), part) for key, part in value.items())
    elif isinstance(value, types.ModuleType | type | torch.Tensor | np.ndarray):
        return
    else:
        attributes: dict[str, Any] = getattr(value, "__dict__", {})
        library = _of_library(value)
        # Only instance attributes: a property may have side effects.
        yield from ((n, v) for n, v in list(attributes.items()) if not library or n in (*_FOLLOWED, *_COUNTS))
        if not library:
            yield from _used_by_methods(type(value))


def _used_by_methods(kind: type) -> Iterator[tuple[str, Any]]:
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] not in _LIBRARIES:
            for name, method in vars(base).items():
                if isinstance(method, types.FunctionType):
                    yield from ((f"{name}().{n}", v) for n, v in _used_by(method))


def _used_by(function: Any) -> Iterator[tuple[str, Any]]:
    """The generators and the user's functions that a function uses as globals or in its closure."""
    plain = function.__func__ if isinstance(function, types.MethodType) else function
    if (plain.__module__ or "").partition(".")[0] in _LIBRARIES:
        return
    for name, cell in zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=False):
        if cell != types.CellType():
            yield name, cell.cell_contents
    names = set(_names(plain.__code__))
    for name in sorted(names & plain.__globals__.keys()):
        used = plain.__globals__[name]
        if isinstance(used, types.ModuleType) and used.__name__.partition(".")[0] not in _LIBRARIES:
            for inner in sorted(names & vars(used).keys()):
                if isinstance(vars(used)[inner], _GENERATORS):
                    yield f"{name}.{inner}", vars(used)[inner]
        elif isinstance(used, (*_GENERATORS, types.FunctionType, functools.partial)):
            yield name, used


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _of_library(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in _LIBRARIES


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    version, internal, gauss = generator.getstate()
    return [version, np.asarray(internal, dtype=np.uint32).tobytes(), gauss]


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        version, internal, gauss = state
        generator.setstate((version, tuple(np.frombuffer(internal, dtype=np.uint32).tolist()), gauss))
