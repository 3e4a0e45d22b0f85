"""Values of attributes as a snapshot has them, and their way back (`object_attributes`)."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgpack
import numpy as np
import torch
from torch import Tensor, nn

from ckptd.client import values
from ckptd.client.optimizers.value_trees import NotCapturable, TreeReader, TreeWriter, plain_tensor
from ckptd.client.rng_state import GENERATORS

# Of one attribute, its tensors not counted.
MOST_BYTES = 256 << 10
OF_A_GRAPH = "a tensor of a graph"
# In place of the value of an attribute that is not there.
MISSING = object()

# Containers, tensors and generators in one attribute; numbers and text do not count.
_MOST_PARTS = 500
# A number beyond it is an address or a time.
_MOST_NUMBER = 1 << 40
# Of a module, one element each of as many tensors: one wait for the device.
_SAMPLES = 64
_BUFFER = "a buffer (register_buffer) is captured"
_SCALARS = (type(None), bool, int, float, str)
_SIZED = (list, tuple, dict, set, deque)
_CONTAINERS = frozenset[type]({*_SIZED, OrderedDict, defaultdict, frozenset, np.ndarray})


class AttributeRecord(NamedTuple):
    """A value as a snapshot has it.

    Attributes:
        tag: ``v`` a number or text, ``p`` packed numbers and text, ``n`` a packed node of `value_trees`,
            ``m`` the packed tensors of a module, None if these are as at the start.
        key: another one if the value has changed. Tensors count with their versions, because reading one on
            a device would wait for it.
        parts: of a node, so that no other tensor gets the memory of one.
    """

    tag: str
    value: Any
    key: object = None
    parts: object = None

    @property
    def nbytes(self) -> int:
        return len(self.value) if isinstance(self.value, bytes) else 0


class LeftOut(Exception):
    """The reason why there is no record."""


class AttributeRecorder:
    """Makes records.

    Args:
        most_tensors: bytes of the tensors in one value.
        everything: also tensors on devices, and modules.
        trained: parameters that a snapshot has anyway, by identity.
    """

    def __init__(self, most_tensors: int, *, everything: bool, trained: frozenset[int]) -> None:
        self._most_tensors, self._everything, self._trained = most_tensors, everything, trained

    def record(self, value: Any, before: AttributeRecord | None, *, first: bool) -> AttributeRecord:
        """The record of a value; ``before`` itself if it has not changed since.

        Args:
            first: this is the start; a module's tensors are not packed before they change.
        Raises:
            LeftOut: there is none.
        """
        if type(value) in _SCALARS:
            if type(value) is int and abs(value) > _MOST_NUMBER:
                raise LeftOut("an address or a time")
            return AttributeRecord("v", value)
        if isinstance(value, nn.Module) and self._everything:
            return self._of_module(value, before, first)
        if not _may_be_recorded(value):
            raise LeftOut("it is not there" if value is MISSING else f"a {type(value).__qualname__}")
        if type(value) in _SIZED and len(value) > MOST_BYTES:  # each takes a byte at least
            raise LeftOut(f"{len(value)} values")
        try:
            packed = msgpack.packb(value, default=_refuse, strict_types=True)
        except (TypeError, ValueError, OverflowError):
            return self._of_parts(value, before)
        if len(packed) > MOST_BYTES:
            raise LeftOut(f"{len(packed)} bytes")
        return AttributeRecord("p", packed, packed)

    def _of_module(self, module: nn.Module, before: AttributeRecord | None, first: bool) -> AttributeRecord:
        tensors = _tensors(module)
        if any(id(tensor) in self._trained for tensor in tensors.values()):
            raise LeftOut("it is trained")
        key = [(id(tensor), tensor._version) for tensor in tensors.values()], _samples([*tensors.values()])
        if first:
            return AttributeRecord("m", None, key)
        if before is not None and before.key == key:
            return before
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        if nbytes > self._most_tensors or not all(map(plain_tensor, tensors.values())):
            kind, most = type(module).__qualname__, self._most_tensors
            raise LeftOut(f"a {kind} of {nbytes} bytes; {most} at most, in plain tensors")
        return AttributeRecord(
            "m", values.pack({name: tensor.detach() for name, tensor in tensors.items()}), key
        )

    def _of_parts(self, value: Any, before: AttributeRecord | None) -> AttributeRecord:
        parts = _Parts(self._most_tensors, on_devices=self._everything)
        try:
            node = TreeWriter(_unknown, None, parts.check).node(value, "")
            key = values.pack(_key(node))
            if before is not None and before.key == key:
                return before
            packed = values.pack(node)
        except (NotCapturable, values.UnsupportedValue) as error:
            raise LeftOut(str(error).lstrip()) from error
        except RuntimeError as error:  # another thread adds to a dict meanwhile, for example
            raise LeftOut(f"it cannot be read: {error}") from error
        if len(packed) > MOST_BYTES + self._most_tensors:
            raise LeftOut(f"{len(packed)} bytes")
        return AttributeRecord("n", packed, key, node)


class _Parts:
    """Looks at each part of a value before the value is recorded."""

    def __init__(self, most_tensors: int, *, on_devices: bool) -> None:
        self._bytes_left, self._on_devices = most_tensors, on_devices
        self._parts_left = _MOST_PARTS

    def check(self, part: object) -> bool:
        """False: it is looked into."""
        self._parts_left -= 1
        if self._parts_left < 0:
            raise LeftOut(f"more than {_MOST_PARTS} parts")
        if isinstance(part, Tensor):
            self._check_tensor(part)
        elif not _may_be_recorded(part):
            raise LeftOut(f"a {type(part).__qualname__}")
        return False

    def _check_tensor(self, tensor: Tensor) -> None:
        if tensor.requires_grad:
            raise LeftOut("a parameter" if tensor.is_leaf else OF_A_GRAPH)
        if not plain_tensor(tensor) or isinstance(tensor._base, nn.Parameter):
            raise LeftOut("part of a parameter, or no plain tensor")
        if tensor.device.type != "cpu" and not self._on_devices:
            raise LeftOut(f"a tensor on {tensor.device.type}: {_BUFFER}")
        self._bytes_left -= tensor.nbytes
        if self._bytes_left < 0:
            raise LeftOut(f"large tensors: {_BUFFER}")


def restored(tag: str, value: Any, live: Any) -> Any:
    """The value of a record: ``live`` itself, filled, if it can be.

    Raises:
        ValueError: the tensors of a module are others here.
    """
    if tag == "v":
        return value
    found = values.unpack(value)
    if tag == "m":
        return _filled(live, found)
    if tag == "n":
        return TreeReader(_unknown).put(found, live)
    if type(live) is list and type(found) is list:
        live[:] = found
        return live
    if type(live) is dict and type(found) is dict:
        live.clear()
        live.update(found)
        return live
    return found


def _filled(live: Any, recorded: Mapping[str, Tensor]) -> Any:
    here = _tensors(live) if isinstance(live, nn.Module) else {}
    if {n: t.shape for n, t in here.items()} != {n: t.shape for n, t in recorded.items()}:
        raise ValueError(
            f"the snapshot has a module of {len(recorded)} tensors where this process has a "
            f"{type(live).__qualname__} with others: create it before training begins"
        )
    with torch.no_grad():
        for name, tensor in recorded.items():
            here[name].copy_(tensor)
    return live


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(chain(module.named_parameters(), module.named_buffers()))


def _may_be_recorded(value: object) -> bool:
    return type(value) in _CONTAINERS or isinstance(value, (Tensor, np.generic, *GENERATORS))


def _samples(tensors: Sequence[Tensor]) -> list[str]:
    """An element of each of some tensors: what changes them by ``.data`` changes no version."""
    chosen = [t for t in tensors[:: len(tensors) // _SAMPLES + 1] if plain_tensor(t) and t.numel()]
    elements = [t.detach().reshape(-1)[t.numel() // 2].double() for t in chosen]
    if not elements:
        return []
    # As text: NaN is NaN again.
    return list(map(repr, torch.stack([e.to(elements[0].device) for e in elements]).tolist()))


def _key(node: Any) -> Any:
    """The node with versions in place of tensors."""
    if isinstance(node, Tensor):
        return [node.data_ptr(), node._version, list(node.shape), str(node.dtype)]
    return [_key(part) for part in node] if isinstance(node, list) else node


def _unknown(_: object) -> None:
    """No tensor is captured elsewhere."""


def _refuse(value: object) -> Any:
    raise TypeError(type(value).__name__)
