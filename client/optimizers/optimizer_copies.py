"""Copies of optimizers that can be stepped without a trace in the original.

``copy.deepcopy`` does not suffice: it leaves attributes of an optimizer out, and parameters must be those
of the copy. So `OptimizerCopier` copies attribute by attribute; a value in two places stays one value.
Functions and classes are shared with the original.

Their state is `HiddenState`: attributes of an optimizer's classes, variables that functions have closed
over, defaults of arguments, and globals that they name. No snapshot holds it, and a fresh process has it
as it was at the start. It is found here, so that code can run as in a fresh process, and leaves no trace
there. State of torch, numpy and Python themselves does not count, nor does state in native code.
"""

from __future__ import annotations

import copy
import ctypes
import enum
import functools
import re
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ckptd.client import values
from ckptd.client.optimizers.value_trees import is_ignored, plain_tensor

_DEPTH = 12
_FUNCTION_OF_C: type = ctypes.CFUNCTYPE(None).__mro__[1]  # ctypes exports no name for it
_AS_THEY_ARE = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    slice,
    enum.Enum,
    np.generic,
    re.Pattern,
    _FUNCTION_OF_C,
    torch.dtype,
    torch.device,
    torch.Size,
    types.CodeType,
    type(Ellipsis),
)
# Attributes that belong to the process, or to a scheduler that wraps the original.
_NOT_ITS_OWN = ("step", "zero_grad")

_MOST_LOOKED_AT = 20_000
# Modules that keep nothing of a run.
_SHARED = {
    "accelerate",
    "ckptd",
    "torch",
    "triton",
    "numpy",
    "__future__",
    *sys.stdlib_module_names,
} - {"__main__"}
_NONE = object()
_DATA = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    list,
    tuple,
    dict,
    set,
    frozenset,
)
_FUNCTIONS = (
    types.FunctionType,
    types.MethodType,
    functools.partial,
    staticmethod,
    classmethod,
    property,
)


class CannotCopy(Exception):
    """No copy is possible that leaves the original alone."""


class OptimizerCopier:
    """Makes copies that belong together.

    Args:
        known: the copy's replacement of an object, by the object's identity.
        whole: copy inner optimizers, and refuse modules. Otherwise the optimizer must keep no other
            one, and a module is shared.
    """

    def __init__(self, known: Mapping[int, Any] | None = None, *, whole: bool = False) -> None:
        self._made: dict[int, Any] = dict(known or {})
        self._ids = {key: id(made) for key, made in self._made.items()}
        self._whole = whole
        self._kept_alive: list[object] = []

    def note(self, original: object, made: object) -> None:
        """Register ``made`` as the copy of ``original``."""
        self._made[id(original)] = made
        self._kept_alive.append(original)

    def optimizer(self, original: torch.optim.Optimizer, *, state: bool) -> torch.optim.Optimizer:
        """A copy without hooks; ``state``: with its state per parameter.

        Raises:
            CannotCopy: with the reason.
        """
        made: torch.optim.Optimizer = object.__new__(type(original))
        self.note(original, made)
        for name, value in vars(original).items():
            if name.startswith("_optimizer_"):
                made.__dict__[name] = OrderedDict()
            elif name == "state" and not state:
                made.state = defaultdict(dict)
            elif name not in _NOT_ITS_OWN:
                made.__dict__[name] = self.value(value, name)
        return made

    def value(self, value: Any, path: str, depth: int = 0) -> Any:
        """A copy that a step may change.

        Raises:
            CannotCopy: with the path.
        """
        if id(value) in self._made:
            return self._made[id(value)]
        if isinstance(value, _AS_THEY_ARE):
            return value
        if depth > _DEPTH:
            raise CannotCopy(f"what it keeps in `.{path}` is nested deeper than {_DEPTH}")
        if isinstance(value, nn.Parameter):
            name = path.partition(".")[0]
            raise CannotCopy(f"it keeps parameters in `.{name}`, which a step may update")
        if isinstance(value, torch.optim.Optimizer):
            if self._whole:
                return self.optimizer(value, state=True)
            raise CannotCopy(f"it keeps another optimizer in `.{path}`, whose step updates your parameters")
        if type(value) in (list, dict, OrderedDict, defaultdict, deque):
            return self._container(value, path, depth)
        made = self._other(value, path, depth)
        self.note(value, made)
        return made

    def _container(self, value: Any, path: str, depth: int) -> Any:
        made: Any
        if type(value) is defaultdict:
            made = defaultdict(self.value(value.default_factory, path, depth + 1))
        else:
            made = deque(maxlen=value.maxlen) if type(value) is deque else type(value)()
        self.note(value, made)
        if isinstance(value, dict):
            for key, part in value.items():
                made[self._key(key)] = self.value(part, path, depth + 1)
        else:
            made.extend(self.value(part, path, depth + 1) for part in value)
        return made

    def _key(self, key: Any) -> Any:
        """An optimizer may keep tables by parameters, or by their identities."""
        if type(key) is tuple:
            return tuple(map(self._key, key))
        return self._ids.get(key, key) if type(key) is int else self._made.get(id(key), key)

    def _other(self, value: Any, path: str, depth: int) -> Any:
        def part(each: Any) -> Any:
            return self.value(each, path, depth + 1)

        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self.value(value.__self__, f"{path}.__self__", depth + 1))
        if type(value) is functools.partial:
            args = [part(each) for each in value.args]
            named = {k: part(v) for k, v in value.keywords.items()}
            return functools.partial(part(value.func), *args, **named)
        if isinstance(value, torch.Generator):
            return value.clone_state()
        if isinstance(value, nn.Module):
            if self._whole:
                raise CannotCopy(f"it keeps a module in `.{path}`, whose parameters are the model's")
            return value
        if is_ignored(value):
            return value
        if isinstance(value, Tensor):
            if plain_tensor(value):
                return value.detach().clone().requires_grad_(value.requires_grad and value.is_leaf)
            return self._deep(value, path) if self._whole else value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(part, value))
        if type(value) in (tuple, set, frozenset):
            return type(value)(map(part, value))
        return self._object(value, path, depth)

    def _object(self, value: Any, path: str, depth: int) -> Any:
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is not dict or not _is_plain_class(type(value)):
            return self._deep(value, path)
        try:
            made = object.__new__(type(value))
        except TypeError:  # its class has more than attributes
            return self._deep(value, path)
        self.note(value, made)
        for name, part in attributes.items():
            made.__dict__[name] = self.value(part, f"{path}.{name}", depth + 1)
        return made

    def _deep(self, value: Any, path: str) -> Any:
        try:
            return copy.deepcopy(value, dict(self._made))
        except Exception as error:
            raise CannotCopy(
                f"no copy can be made of `.{path}` ({type(value).__name__}): {type(error).__name__}: {error}"
            ) from error


def _is_plain_class(kind: type) -> bool:
    """True if its objects consist of attributes, and define no other way to copy them."""
    own = ("__reduce__", "__reduce_ex__", "__getstate__")
    return (
        not hasattr(kind, "__deepcopy__")
        and not any(getattr(kind, name) is not getattr(object, name) for name in own)
        and not any("__slots__" in vars(base) for base in kind.__mro__[:-1])
    )


class _Place(NamedTuple):
    """A value's place outside of any object of the optimizer.

    ``by_name``: all attributes of an owner, in a dict that is made anew each time.
    """

    path: str
    get: Callable[[], Any]
    put: Callable[[Any], None]
    by_name: bool = False


class HiddenState:
    """The state that is reachable from the code of some objects.

    Args:
        objects: optimizers, and the objects around them.
    """

    def __init__(self, objects: Iterable[object]) -> None:
        self._places: dict[tuple[int, str], _Place] = {}
        self._seen: set[int] = set()
        self._left: list[Any] = []
        for each in objects:
            self._look_at_object(each)
        while self._left and len(self._seen) < _MOST_LOOKED_AT:
            self._look_at(self._left.pop())

    @property
    def is_compiled(self) -> bool:
        """True if `torch.compile` is around some of that code."""
        return any(hasattr(place.get(), "_torchdynamo_orig_callable") for place in self._places.values())

    def copied(self, copier: OptimizerCopier) -> list[Any]:
        """A copy of each value.

        Raises:
            CannotCopy: a value cannot be copied.
        """
        found = []
        for place in self._places.values():
            try:
                found.append(copier.value(place.get(), place.path))
            except CannotCopy as error:
                raise CannotCopy(f"{place.path} is state outside of it: {error}") from error
        return found

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Undo changes that the body makes, as far as copies are possible."""
        try:
            copies = self.copied(OptimizerCopier())
        except CannotCopy:
            copies = [place.get() for place in self._places.values()]
        with self.replaced(copies):
            yield

    def changed_since(self, before: Sequence[Any]) -> list[str]:
        """The paths of values that differ from these copies."""
        found = []
        for place, was in zip(self._places.values(), before, strict=True):
            now = place.get()
            if not place.by_name:
                found += [] if _same(now, was) else [place.path]
                continue
            names = dict.fromkeys([*was, *now])
            found += [place.path + n for n in names if not _same(now.get(n, _NONE), was.get(n, _NONE))]
        return found

    @contextmanager
    def replaced(self, by: Sequence[Any]) -> Iterator[None]:
        """In the body these values are in the places; afterwards the previous ones."""
        places = list(self._places.values())
        saved = [place.get() for place in places]
        try:
            _put_all(places, by)
            yield
        finally:
            _put_all(places, saved)

    # -- finding it ----------------------------------------------------------------------------------

    def _look_at(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, staticmethod | classmethod):
            self._left.append(value.__func__)
        elif isinstance(value, types.MethodType):
            self._left += [value.__func__, type(value.__self__)]
        elif isinstance(value, property):
            self._left += [f for f in (value.fget, value.fset, value.fdel) if f is not None]
        elif isinstance(value, functools.partial):
            self._left += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, types.FunctionType):
            self._look_at_function(value)
        elif isinstance(value, type):
            self._look_at_class(value)
        elif type(value) in (list, tuple, dict):
            parts = value.values() if isinstance(value, dict) else value
            self._left += [p for p in parts if isinstance(p, (type, *_FUNCTIONS))]
        elif hasattr(value, "__dict__") and not isinstance(value, Tensor | nn.Module | types.ModuleType):
            self._look_at_object(value)

    def _look_at_object(self, value: object) -> None:
        self._left.append(type(value))
        self._left += list(vars(value).values())

    def _look_at_class(self, kind: type) -> None:
        if _is_shared(kind.__module__):
            return
        self._left += [base for base in kind.__mro__ if base is not kind]
        self._left += vars(kind).values()

        def put(table: dict[str, Any]) -> None:
            for name in _attributes(vars(kind)).keys() - table.keys():
                delattr(kind, name)
            for name, value in table.items():
                if vars(kind).get(name) is not value:
                    setattr(kind, name, value)

        path = f"class attribute {kind.__qualname__}."
        self._places[id(kind), ""] = _Place(path, lambda: _attributes(vars(kind)), put, True)

    def _look_at_function(self, function: types.FunctionType) -> None:
        who = function.__qualname__
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            path = f"closure variable {name} of {who}"
            self._note(cell, "", path, functools.partial(_content, cell), functools.partial(_fill, cell))
        if _is_shared(function.__globals__.get("__name__", "")):
            return
        for place in ("__defaults__", "__kwdefaults__"):
            if getattr(function, place):
                get = functools.partial(getattr, function, place)
                put_back = functools.partial(setattr, function, place)
                self._note(function, place, f"default arguments of {who}", get, put_back)
        self._left += vars(function).values()

        def put(table: dict[str, Any]) -> None:
            for name in _attributes(vars(function)):
                del vars(function)[name]
            vars(function).update(table)

        self._places[id(function), ""] = _Place(
            f"attribute {who}.", lambda: _attributes(vars(function)), put, True
        )
        names = set(_names_in(function.__code__))
        for name in sorted(names & function.__globals__.keys()):
            value = function.__globals__[name]
            if not isinstance(value, types.ModuleType):
                self._note_global(function.__globals__, name, function.__module__)
            elif not _is_shared(value.__name__):
                for inner in sorted(names & vars(value).keys()):
                    if not isinstance(vars(value)[inner], types.ModuleType):
                        self._note_global(vars(value), inner, value.__name__)

    def _note_global(self, table: dict[str, Any], name: str, module: str) -> None:
        path = f"global variable {name} of {module}"
        self._note(table, name, path, lambda: table.get(name), lambda v: table.__setitem__(name, v))

    def _note(
        self,
        owner: object,
        name: str,
        path: str,
        get: Callable[[], Any],
        put: Callable[[Any], None],
    ) -> None:
        value = get()
        self._left.append(value)
        if _may_be_state(value) or hasattr(value, "_torchdynamo_orig_callable"):
            self._places.setdefault((id(owner), name), _Place(path, get, put))


def _put_all(places: Sequence[_Place], by: Sequence[Any]) -> None:
    for place, value in zip(places, by, strict=True):
        if value is not place.get():
            place.put(value)


def _attributes(table: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a class or function that may be state."""
    return {
        name: value
        for name, value in table.items()
        if not (name.startswith("__") and name.endswith("__"))
        and not name.startswith("_abc_")
        and _may_be_state(value)
    }


def _may_be_state(value: object) -> bool:
    """False for code, and for objects of libraries that keep nothing of a run."""
    if isinstance(value, (type, *_FUNCTIONS)) or (value is not None and is_ignored(value)):
        return False
    return not _is_shared(type(value).__module__) or _is_data(value)


def _is_shared(module: str | None) -> bool:
    """True for modules of torch, of Python, or of another library that keeps nothing of a run."""
    return (module or "").partition(".")[0] in _SHARED


def _is_data(value: object) -> bool:
    """True for library types that may hold somebody else's state, iterators included."""
    kind = type(value)
    if kind.__module__ == "builtins":
        return kind in _DATA or hasattr(value, "__next__")
    return isinstance(value, Tensor | torch.Generator) or kind.__module__.startswith(
        ("collections", "itertools", "numpy", "random")
    )


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _names_in(part)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty so far
        return None


def _fill(cell: types.CellType, value: Any) -> None:
    cell.cell_contents = value


def _same(now: Any, before: Any) -> bool:
    if now is before:
        return True
    try:
        return values.equal(now, before)
    except values.UnsupportedValue:
        # Of objects only the number of attributes can be compared.
        return type(now) is type(before) and len(getattr(now, "__dict__", ())) == len(
            getattr(before, "__dict__", ())
        )
