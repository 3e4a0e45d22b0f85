"""Copies of optimizers, and of what they keep, that can be stepped without a trace in the original.

An optimizer is more than ``copy.deepcopy`` makes of it: that leaves attributes out, and parameters
must be those of the copy. So it is copied attribute by attribute. What two places have in common
stays common. Functions and classes are shared with the original; what these keep is the affair of
`ckptd.client.optimizers.hidden_state`.
"""

from __future__ import annotations

import copy
import ctypes
import enum
import functools
import re
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ckptd.client.optimizers.value_trees import is_ignored, plain_tensor

__all__ = ["CannotCopy", "OptimizerCopier"]

_DEPTH = 12
_FUNCTION_OF_C: type = ctypes.CFUNCTYPE(None).__mro__[1]  # of which ctypes makes no name
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
_SEQUENCES = (list, tuple, set, frozenset)
# Of the process, or of a scheduler that wraps the original.
_NOT_ITS_OWN = ("step", "zero_grad")


class CannotCopy(Exception):
    """No copy can be made that leaves the original alone."""


class OptimizerCopier:
    """Makes copies that belong together.

    Args:
        known: what is in the place of an object in the copies, by the identity of the object.
        whole: optimizers that are met are copied, and modules cannot be. Otherwise the one that is
            copied keeps no other, and a module is shared.
    """

    def __init__(self, known: Mapping[int, Any] | None = None, *, whole: bool = False) -> None:
        self._made: dict[int, Any] = dict(known or {})
        self._ids = {key: id(made) for key, made in self._made.items()}
        self._whole = whole
        self._kept_alive: list[object] = []

    def note(self, original: object, made: object) -> None:
        """This is the copy of that."""
        self._made[id(original)] = made
        self._kept_alive.append(original)

    def optimizer(self, original: torch.optim.Optimizer, *, state: bool) -> torch.optim.Optimizer:
        """One without hooks; ``state``: with its state per parameter.

        Raises:
            CannotCopy: so it is, with the reason.
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
            CannotCopy: so it is, with the path.
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
            return self._inner(value, path)
        if type(value) in (list, dict, OrderedDict, defaultdict, deque):
            return self._container(value, path, depth)
        made = self._other(value, path, depth)
        self.note(value, made)
        return made

    def _inner(self, value: torch.optim.Optimizer, path: str) -> torch.optim.Optimizer:
        if self._whole:
            return self.optimizer(value, state=True)
        raise CannotCopy(f"it keeps another optimizer in `.{path}`, whose step updates your parameters")

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
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self.value(value.__self__, f"{path}.__self__", depth + 1))
        if type(value) is functools.partial:
            args = [self.value(part, path, depth + 1) for part in value.args]
            named = {k: self.value(v, path, depth + 1) for k, v in value.keywords.items()}
            return functools.partial(self.value(value.func, path, depth + 1), *args, **named)
        if isinstance(value, torch.Generator):
            return value.clone_state()
        if isinstance(value, nn.Module):
            if self._whole:
                raise CannotCopy(f"it keeps a module in `.{path}`, whose parameters are the model's")
            return value
        if is_ignored(value):
            return value
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.value(part, path, depth + 1) for part in value))
        if type(value) in _SEQUENCES:
            return type(value)(self.value(part, path, depth + 1) for part in value)
        return self._object(value, path, depth)

    def _tensor(self, value: Tensor, path: str) -> Tensor:
        if plain_tensor(value):
            return value.detach().clone().requires_grad_(value.requires_grad and value.is_leaf)
        return self._deep(value, path) if self._whole else value

    def _object(self, value: Any, path: str, depth: int) -> Any:
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is not dict or not _is_plain_class(type(value)):
            return self._deep(value, path)
        try:
            made = object.__new__(type(value))
        except TypeError:  # of a class that is not made of attributes alone
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
    """Whether its objects consist of attributes, and say nothing else of how they are copied."""
    own = ("__reduce__", "__reduce_ex__", "__getstate__")
    return (
        not hasattr(kind, "__deepcopy__")
        and not any(getattr(kind, name) is not getattr(object, name) for name in own)
        and not any("__slots__" in vars(base) for base in kind.__mro__[:-1])
    )
