"""Trees of plain values that stand for what an object keeps, and their way back into a live object.

A ``TreeWriter`` makes a tree of a live object (an optimizer, an entry of its state); a ``TreeReader`` puts
it into one of another process: in place, wherever a value of the same kind exists already, so that other
holders of it see what was restored. A value in two places stays one value. Nodes are plain values, or
lists that begin with one of these tags:

=====  ==========================================================================================
``l``  list; ``t`` tuple; ``q`` deque; ``s`` set or frozenset of plain values
``N``  named tuple: its class by name, and its parts
``m``  set or frozenset of tensors that are captured elsewhere: their references, sorted
``d``  dict: pairs of nodes
``x``  tensor, whether it requires grad, and its strides if it is not contiguous: a product of
       matrices may have other bits with other strides
``w``  tensor made of others, such as an 8-bit one of codes and scales: its class, these, and the
       rest of what it says about itself
``p``  this rank's part (a ``w``) of a tensor that is sharded as its parameter is
``k``  reference to a tensor that is captured elsewhere
``g``  random number generator: its kind and state
``o``  object: its attributes. One that exists in a fresh process, too, is filled; none is made
``n``  in a key, the identity (``id()``) of a tensor that is captured elsewhere; ``a`` an address in
       it; ``T`` a tuple with some; ``v`` a plain value
``r``  the n-th of these nodes once more
``?``  left as it is in the reading process: functions, classes, locks, what never changed
=====  ==========================================================================================
"""

from __future__ import annotations

import ctypes
import enum
import functools
import logging
import operator
import pickle
import random
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ckptd.client import values

MAX_DEPTH = 16
MAX_NODES = 100_000
_LEAST_ADDRESS = 1 << 16

_SIMPLE = (type(None), bool, int, float, str, bytes)
_VALUES = (*_SIMPLE, torch.dtype, torch.device, torch.Size, np.ndarray)
_IGNORED = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    type,
    functools.partial,
    property,
    logging.Logger,
    weakref.ref,
    weakref.WeakSet,
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
    threading.Event,
    type(threading.Lock()),
    type(threading.RLock()),
    ctypes.CDLL,
)
# Communication, compiled code, handles of devices: of the process, not of the run.
_IGNORED_MODULES = (
    "torch._C",
    "torch._dynamo",
    "torch._inductor",
    "torch._ops",
    "torch.cuda",
    "torch.distributed",
    "torch.jit",
    "torch.utils",
    "accelerate",
    "ckptd",
    "contextlib",
    "triton",
)
# But these count steps, or keep what gradients have left.
_OF_THE_RUN = (
    "accelerate.local_sgd",
    "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook",
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
    "torch.distributed.algorithms.model_averaging",
    "torch.distributed.optim.post_localSGD_optimizer",
)
_DICTS = (dict, OrderedDict, defaultdict)
_CONTAINERS = (*_DICTS, list, tuple, deque, set, frozenset)


class NotCapturable(Exception):
    """No snapshot can hold the value at ``path``."""

    def __init__(self, path: str, why: str) -> None:
        self.path, self.why = path, why
        super().__init__(f"{path} ({why})")


class Baseline:
    """State before training, by path: types of objects, fingerprints of values that no tree can hold."""

    def __init__(self) -> None:
        self.objects: dict[str, type] = {}
        self.opaque: dict[str, object] = {}


def plain(value: object) -> bool:
    """True if a snapshot can hold this value as it is (``ckptd.client.values``), without any object in it."""
    if type(value) in _VALUES or isinstance(value, np.generic):
        return not (isinstance(value, np.ndarray) and value.dtype.hasobject)
    if type(value) in (list, tuple):
        return all(map(plain, value))  # type: ignore[call-overload]
    if type(value) in (set, frozenset):  # a tensor in a set is meant itself, not what it contains
        return all(plain(v) and not isinstance(v, Tensor) for v in value)  # type: ignore[attr-defined]
    if type(value) in _DICTS:
        return all(plain(k) and plain(v) for k, v in value.items())  # type: ignore[attr-defined]
    return isinstance(value, Tensor) and plain_tensor(value)


def plain_tensor(tensor: Tensor) -> bool:
    """True if the tensor consists of its strided memory and nothing else."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and tensor.device.type != "meta"
    )


class TreeWriter:
    """Makes one tree.

    Args:
        known: returns the reference of a tensor that is captured elsewhere, or of a number that is its
            identity; of an address in it ``a``, the offset, and the reference; None for others.
        baseline: decides what may be left out and which objects may be filled; None while it is made.
        skipped: True for values that must not be looked into.
        made: collects a new baseline.
    """

    def __init__(
        self,
        known: Callable[[Tensor | int], list[str] | None],
        baseline: Baseline | None,
        skipped: Callable[[object], bool],
        made: Baseline | None = None,
    ) -> None:
        self._known, self._baseline, self._skipped = known, baseline, skipped
        self.made = Baseline() if made is None else made
        self._seen: dict[int, int] = {}
        self._kept_alive: list[object] = []
        self._nodes = 0
        self.num_generators = 0

    def node(self, value: Any, path: str, depth: int = 0) -> Any:
        """The node of a value.

        Raises:
            NotCapturable: no snapshot can hold it.
        """
        if type(value) in _VALUES or isinstance(value, np.generic):
            if isinstance(value, np.ndarray) and value.dtype.hasobject:
                raise NotCapturable(path, "an array of objects")
            return value
        if id(value) in self._seen:
            return ["r", self._seen[id(value)]]
        if self._skipped(value) or is_ignored(value):
            return ["?"]
        self._nodes += 1
        if depth > MAX_DEPTH:
            raise NotCapturable(path, f"nested deeper than {MAX_DEPTH}")
        if self._nodes > MAX_NODES:
            raise NotCapturable(path, f"more than {MAX_NODES} values")
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        found = None if type(value) in _CONTAINERS else _generator_state(value)
        if found is not None:
            self._note(value)
            self.num_generators += 1
            return ["g", *found]
        return self._container(value, path, depth)

    def _note(self, value: object) -> None:
        self._seen[id(value)] = len(self._seen)
        self._kept_alive.append(value)

    def _tensor(self, value: Tensor, path: str) -> Any:
        known = self._known(value)
        if known is not None:
            return ["k", *known]
        if _made_of_others(value):
            return self._wrapper(value, path)
        shard = getattr(value, "_local_tensor", None)
        if shard is not None and _made_of_others(shard):
            return ["p", self._wrapper(shard, path)]
        if not plain_tensor(value):
            what = type(value).__name__ if type(value) is not Tensor else str(value.layout)
            raise NotCapturable(path, f"type {what}: a tensor whose memory is not all there is of it")
        self._note(value)
        return ["x", value.detach(), value.requires_grad and value.is_leaf, strides_of(value)]

    def _wrapper(self, value: Any, path: str) -> Any:
        names, context = value.__tensor_flatten__()
        if not plain(context):
            raise NotCapturable(path, f"type {_name(value)}, made with {type(context).__name__}")
        self._note(value)
        parts = [[n, self.node(getattr(value, n), f"{path}.{n}")] for n in names]
        kind = type(value)
        shape, stride = list(value.shape), list(value.stride())
        return ["w", kind.__module__, kind.__qualname__, context, shape, stride, parts]

    def _container(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if kind in (list, tuple, deque):
            self._note(value)
            parts = [self.node(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]
            return ["q", value.maxlen, parts] if kind is deque else ["l" if kind is list else "t", parts]
        if kind in (set, frozenset):
            self._note(value)
            if plain(value):
                return ["s", value]
            members = [
                known for v in value if isinstance(v, Tensor) and (known := self._known(v)) is not None
            ]
            if len(members) < len(value):
                raise NotCapturable(path, f"type {kind.__name__} of objects")
            return ["m", kind is frozenset, sorted(members)]
        if isinstance(value, tuple) and hasattr(kind, "_fields") and _named(kind) is kind:
            self._note(value)
            parts = [self.node(v, f"{path}.{n}", depth + 1) for n, v in zip(kind._fields, value, strict=True)]
            return ["N", kind.__module__, kind.__qualname__, parts]
        if isinstance(value, dict) and (kind in _DICTS or self._was_there(value, path)):
            self._note(value)
            return ["d", [self.pair(k, v, path, depth) for k, v in value.items()]]
        if next(_attributes(value), None) is None:
            return self._opaque(value, path)
        if not self._was_there(value, path):
            raise NotCapturable(path, f"type {_name(value)}, made in a step")
        return ["o", self.attributes(value, path, depth)]

    def pair(self, key: Any, value: Any, path: str, depth: int = 0) -> list[Any]:
        """The nodes of an item of the dict at ``path``."""
        made = self._key(key, path)
        if type(value) in _SIMPLE:  # as most are: no path is needed
            return [made, value]
        where = f"{path}[{made[2] if made[0] == 'k' else repr(key)}]"
        return [made, self.node(value, where, depth + 1)]

    def _key(self, key: Any, path: str) -> list[Any]:
        """The node of a dict's key; tensors, their identities and addresses differ between processes."""
        if type(key) is str:
            return ["v", key]
        known = self._known(key) if isinstance(key, Tensor) or _is_large(key) else None
        if known is not None:
            return [*known] if known[0] == "a" else ["k" if isinstance(key, Tensor) else "n", *known]
        if isinstance(key, Tensor) or not plain(key):
            raise NotCapturable(f"{path}[...]", f"a key of type {type(key).__qualname__}")
        if type(key) is tuple and any(map(_is_large, key)):
            return ["T", [self._key(part, path) for part in key]]
        return ["v", key]

    def _was_there(self, value: object, path: str) -> bool:
        self.made.objects[path] = type(value)
        return self._baseline is None or self._baseline.objects.get(path) is type(value)

    def attributes(self, value: Any, path: str, depth: int = 0) -> list[list[Any]]:
        """The nodes of an object's attributes, by name."""
        self._note(value)
        return [
            [k, v if type(v) in _SIMPLE else self.node(v, f"{path}.{k}" if path else k, depth + 1)]
            for k, v in dict(_attributes(value)).items()
        ]

    def _opaque(self, value: Any, path: str) -> Any:
        if hasattr(value, "__next__"):
            raise NotCapturable(path, f"type {_name(value)}, whose position cannot be told")
        fingerprint = _fingerprint(value)
        self.made.opaque[path] = fingerprint
        if self._baseline is not None and self._baseline.opaque.get(path) != fingerprint:
            raise NotCapturable(path, f"type {_name(value)}, which has changed")
        return ["?"]


class TreeReader:
    """Puts one tree into live objects.

    Args:
        known: returns the live tensor of a ``k`` node's reference.
        param: the parameter whose state is read.
    """

    def __init__(self, known: Callable[[list[str]], Any], param: Tensor | None = None) -> None:
        self._known, self._param = known, param
        self._made: list[Any] = []

    def begin(self, root: object) -> None:
        """The next attributes belong to ``root``."""
        self._made.append(root)

    def put(self, node: Any, live: Any = None) -> Any:
        """The value of a node: ``live`` itself, filled, if it is of that kind."""
        if not isinstance(node, list):
            return node
        match node[0]:
            case "?":
                return live
            case "k":
                return self._known(node[1:])
            case "v":
                return node[1]
            case "n":
                return id(self._known(node[1:]))
            case "a":
                return self._known(node[2:]).data_ptr() + node[1]
            case "T":
                return tuple(self.put(part) for part in node[1])
            case "r":
                return self._made[node[1]]
        place = len(self._made)
        self._made.append(live)
        made = self._make(node, live, place)
        self._made[place] = made
        return made

    def _make(self, node: Any, live: Any, place: int) -> Any:
        match node[0]:
            case "x":
                return self._tensor(node, live)
            case "w":
                return self._wrapper(node, live)
            case "p":
                return self._sharded(node, live)
            case "l" | "t" | "q":
                return self._sequence(node, live, place)
            case "N":
                return self._named_tuple(node)
            case "d":
                return self._dict(node, live, place)
            case "g":
                return _put_generator(node[1], node[2], live)
            case "s":
                return _put_set(node[1], live)
            case "m":
                return _put_set((frozenset if node[1] else set)(map(self._known, node[2])), live)
            case "o":
                if live is not None:
                    self.put_attributes(live, node[1])
                return live
        raise KeyError(node[0])

    def put_attributes(self, live: Any, attributes: list[list[Any]]) -> None:
        """Fill an object."""
        own = dict(_attributes(live))
        for name, node in attributes:
            now = own.get(name)
            found = self.put(node, now)
            if left_alone(node) or (found is now and name in own):
                continue
            if hasattr(live, "__dict__"):
                live.__dict__[name] = found
            else:
                object.__setattr__(live, name, found)

    @staticmethod
    def _tensor(node: Any, live: Any) -> Tensor:
        recorded, wants_grad, strides = node[1:]
        with torch.no_grad():
            if (
                isinstance(live, Tensor)
                and plain_tensor(live)
                and (live.shape, live.dtype) == (recorded.shape, recorded.dtype)
                and strides_of(live) == strides
            ):
                live.copy_(recorded)
                return live
            made: Tensor = recorded.to(live.device) if isinstance(live, Tensor) else recorded
            if strides:
                strided = torch.empty_strided(made.shape, strides, dtype=made.dtype, device=made.device)
                made = strided.copy_(made)
        return made.requires_grad_(wants_grad)

    def _wrapper(self, node: Any, live: Any) -> Any:
        _, module, name, context, shape, stride, parts = node
        kind = getattr(sys.modules.get(module), name, None)
        # The optimizer exists, so its tensors' class does. Nothing is imported, and nothing else called.
        if not (
            isinstance(kind, type) and issubclass(kind, Tensor) and hasattr(kind, "__tensor_unflatten__")
        ):
            raise ValueError(f"the snapshot has a tensor of {module}.{name}, which is not imported here")
        same = type(live) is kind and list(live.shape) == shape
        inner = {n: self.put(part, getattr(live, n) if same else None) for n, part in parts}
        if same and all(getattr(live, n) is part for n, part in inner.items()):
            return live
        return kind.__tensor_unflatten__(inner, context, torch.Size(shape), tuple(stride))

    def _sharded(self, node: Any, live: Any) -> Any:
        shard = getattr(live, "_local_tensor", None)
        made, param = self.put(node[1], shard), cast("Any", self._param)
        if made is shard:
            return live
        return type(param.data).from_local(
            made,
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )

    def _sequence(self, node: Any, live: Any, place: int) -> Any:
        old = list(live) if type(live) in (list, tuple, deque) else []
        target: Any = live if type(live) is (list if node[0] == "l" else deque) else None
        if target is None:
            target = [] if node[0] != "q" else deque(maxlen=node[1])
        self._made[place] = target
        parts = [self.put(part, old[i] if i < len(old) else None) for i, part in enumerate(node[-1])]
        if node[0] == "t":
            return tuple(parts)
        target.clear()
        target.extend(parts)
        return target

    def _named_tuple(self, node: Any) -> Any:
        module, name, parts = node[1:]
        kind = _find(module, name)
        # Nothing is imported, and nothing but a named tuple is made.
        if not (isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")):
            raise ValueError(f"the snapshot has a named tuple {module}.{name}, which is not defined here")
        return tuple.__new__(kind, [self.put(part) for part in parts])

    def _dict(self, node: Any, live: Any, place: int) -> Any:
        target: Any = live if isinstance(live, dict) else {}
        self._made[place] = target
        parts = []
        for key_node, value_node in node[1]:
            key = self.put(key_node)
            if left_alone(value_node) and key not in target:
                continue
            parts.append((key, self.put(value_node, target.get(key))))
        kept = [(k, v) for k, v in target.items() if is_ignored(v)]
        target.clear()
        target.update(parts)
        for key, value in kept:
            target.setdefault(key, value)
        return target


def _find(module: str, name: str) -> Any:
    """What a module that is imported calls so; None if there is no such thing."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _named(kind: type) -> Any:
    return _find(kind.__module__, kind.__qualname__)


def _put_set(members: set[Any] | frozenset[Any], live: Any) -> Any:
    if type(live) is not set or type(members) is not set:
        return members
    live.clear()
    live.update(members)
    return live


def left_alone(node: Any) -> bool:
    """True if the node stands for a value that stays as it is."""
    return isinstance(node, list) and node[0] == "?"


def unlike(a: Any, b: Any, path: str = "") -> str:
    """The path of the first difference of two trees; empty if they are equal to the bit."""
    if values.equal(a, b):
        return ""
    for name, x, y in _children(a, b):
        found = unlike(x, y, path + name)
        if found:
            return found
    return path or "what it keeps"


def _children(a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    """The parts of two nodes with the same structure, and how a path names them."""
    if not (isinstance(a, list) and isinstance(b, list) and a and b and a[0] == b[0]):
        return
    if a[0] not in ("l", "t", "q", "d", "o") or len(a[-1]) != len(b[-1]):
        return
    parts = list(zip(a[-1], b[-1], strict=True))
    if a[0] in ("l", "t", "q"):
        yield from ((f"[{i}]", x, y) for i, (x, y) in enumerate(parts))
    elif all(values.equal(x[0], y[0]) for x, y in parts):
        for x, y in parts:
            yield _step(a[0], x[0]), x[1], y[1]


def _step(tag: str, key: Any) -> str:
    if tag == "o":
        return f".{key}"
    return f"[{key[2]}]" if key[0] in ("k", "n") else f"[{key[1]!r}]"


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """The object's own attributes, without hooks that were put on it: those belong to the process."""
    for name, part in getattr(value, "__dict__", {}).items():
        if not name.endswith("_hooks") and not name.startswith("_optimizer_"):
            yield name, part
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def is_ignored(value: object) -> bool:
    """True for code, locks, and what libraries keep for the process: it is no state of the run."""
    if type(value) in _CONTAINERS:
        return False
    if isinstance(value, _IGNORED):
        return True
    if isinstance(value, Tensor | torch.Generator):
        return False
    return _is_of(value, _IGNORED_MODULES) and not counts_steps(value)


def counts_steps(value: object) -> bool:
    """True for an object of a library that counts steps without a ``state_dict`` (local SGD)."""
    return _is_of(value, _OF_THE_RUN)


def _is_of(value: object, packages: Sequence[str]) -> bool:
    module = f"{type(value).__module__ or ''}."
    return any(module.startswith(f"{package}.") for package in packages)


def _made_of_others(tensor: Tensor) -> bool:
    """Like torch's ``is_traceable_wrapper_subclass``, without DTensors, which are captured as their shard."""
    return (
        hasattr(tensor, "__tensor_flatten__")
        and hasattr(type(tensor), "__tensor_unflatten__")
        and not hasattr(tensor, "to_local")
    )


def plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that this one is made of (codes and scales of an 8-bit one), or itself."""
    return (part for _, part in _named_parts("", tensor))


def _named_parts(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    here = getattr(value, "_local_tensor", value)  # of a DTensor its shard
    if not (isinstance(here, Tensor) and _made_of_others(here)):
        yield key, value
        return
    made: Any = here
    for name in made.__tensor_flatten__()[0]:
        yield from _named_parts(f"{key}:{name}", getattr(made, name))


def flat_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """The same with each tensor that is made of others replaced by these, as ``exp_avg:codes``."""
    return {name: part for key, value in state.items() for name, part in _named_parts(key, value)}


def part_of(state: Mapping[str, Any], key: str) -> Any:
    """What `flat_state` has under this key; None if there is nothing."""
    if key in state or ":" not in key:
        return state.get(key)
    name, *path = key.split(":")
    value = state.get(name)
    for attribute in path:
        value = getattr(getattr(value, "_local_tensor", value), attribute, None)
    return value


def with_parts(values_now: Iterable[Any]) -> Iterator[Any]:
    """The values, and what those are made of that are no plain tensors."""
    for value in values_now:
        yield value
        if isinstance(value, Tensor) and type(value) is not Tensor:
            yield from plain_parts(value)


def state_values(keepers: Iterable[torch.optim.Optimizer], *, parts: bool) -> list[Any]:
    """All values in their state, and the dictionaries that hold them, to see at each step by `same_objects`
    whether any was replaced.

    Args:
        parts: also what values are made of that are no plain tensors.
    """
    found: list[Any] = []
    for keeper in keepers:
        states = list(keeper.state.values())
        found += states
        of_states = chain.from_iterable(s.values() if isinstance(s, dict) else (s,) for s in states)
        found += with_parts(of_states) if parts else of_states
    return found


def same_objects(now: Sequence[object], before: Sequence[object]) -> bool:
    """True if both hold the very same objects."""
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _is_large(key: object) -> bool:
    """True if it may be an identity or an address."""
    return type(key) is int and key >= _LEAST_ADDRESS


def strides_of(tensor: Tensor) -> list[int]:
    """The strides, in elements, of a dense tensor with its dimensions in another order; empty for others."""
    if tensor.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return []
    return list(tensor.stride())


# -- generators and opaque values ------------------------------------------------------------------

_GENERATORS: dict[str, tuple[Any, Callable[[Any, Any], Any]]] = {
    "torch": (torch.Generator, lambda made, state: made.set_state(state)),
    "python": (random.Random, lambda made, state: made.setstate(state)),
    "numpy_legacy": (np.random.RandomState, lambda made, state: made.set_state(state)),
    "numpy": (np.random.Generator, lambda made, state: setattr(made.bit_generator, "state", state)),
}
_BIT_GENERATORS = {
    kind.__name__: kind
    for kind in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
}


def _generator_state(value: object) -> tuple[str, Any] | None:
    if isinstance(value, torch.Generator):
        return "torch", value.get_state()
    if isinstance(value, random.Random):
        return "python", value.getstate()
    if isinstance(value, np.random.RandomState):
        return "numpy_legacy", value.get_state(legacy=False)
    if isinstance(value, np.random.Generator):
        state = value.bit_generator.state
        return ("numpy", state) if state["bit_generator"] in _BIT_GENERATORS else None
    return None


def _put_generator(kind: str, state: Any, live: Any) -> Any:
    make, put = _GENERATORS[kind]
    made = live if isinstance(live, make) else None
    if made is None and kind == "numpy":
        made = np.random.Generator(_BIT_GENERATORS[state["bit_generator"]]())
    made = make() if made is None else made
    put(made, state)
    return made


def _name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _fingerprint(value: object) -> object:
    """Equal while the value is unchanged, as far as this is visible from outside."""
    if isinstance(value, enum.Enum | complex | range | slice):
        return repr(value)
    try:
        return pickle.dumps(value)
    except Exception:  # noqa: BLE001 - whatever a type of somebody else's raises, its changes are invisible
        return f"type {_name(value)}"
