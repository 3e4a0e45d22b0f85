"""Live tensors of a phase plan, found again at every boundary at the price of one dictionary look-up each.

Parameters, buffers and optimizer state can be replaced under us (``load_state_dict``, a
re-registered buffer), so tensors are not held; the dictionaries that hold them are, and are looked
up afresh when an optimizer's state object changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ckptd.client.model.live_state import LiveState, local
from ckptd.client.model.snapshot_layout import EntrySource, PhasePlan
from ckptd.client.optimizers.value_trees import plain_tensor
from ckptd.cuda.engine import CopyItem, CopyList

__all__ = ["LiveSources", "PackedState", "RestlessBuffers"]


# What lies where it says: a wrapper's shard has to be asked.
_PLAIN = (Tensor, torch.nn.Parameter)
_NOWHERE: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class PackedState:
    """0-dimensional optimizer state of one dtype: which entry of the plan it goes to, and its
    values; None where there is none yet.
    """

    entry: int
    values: list[Any]


class LiveSources:
    """Resolves one plan's sources."""

    def __init__(self, binding: LiveState, plan: PhasePlan) -> None:
        self._binding, self.plan = binding, plan
        self._state_key: tuple[tuple[int, ...], ...] = ()
        self._held: list[tuple[Any, list[Any]]] = []
        self._places: list[tuple[Mapping[str, Any], str]] = []
        self._packed_places: dict[torch.dtype, list[tuple[Mapping[str, Any], str]]] = {}
        self._states: dict[str, dict[str, Any]] = {}
        # What is there, and of it what can be copied to where it was planned.
        self._found: list[Tensor | None] = []
        self._live: list[Tensor | None] = []
        self._addresses: list[int] = []
        self._items = CopyList()
        self.named: list[tuple[Tensor, str]] = []
        self.absent: list[str] = []
        self._lacks = False

    def items(self) -> CopyList:
        """Copies of everything but packed state; ``named`` (what each is of, in their order) and
        ``absent`` are of the same moment.
        """
        self._refresh()
        live: list[Tensor | None] = [place.get(key) for place, key in self._places]
        # The object may stay and its storage be another (`p.data = x`, vector_to_parameters,
        # swapped weights).
        addresses = [_address(t) for t in live]
        if addresses != self._addresses or any(a is not b for a, b in zip(live, self._found, strict=True)):
            self._addresses, self._found = addresses, live
            self._rebuild([t if self._fits(i, t) else None for i, t in enumerate(live)])
        return self._items

    def packed_now(self) -> list[PackedState]:
        """0-dimensional state as it is kept now: who copies it later must not find what has taken
        its place.
        """
        return [
            PackedState(
                i,
                [_scalar(place.get(key), source.dtype) for place, key in self._packed_places[source.dtype]],
            )
            for i, source in enumerate(self.plan.sources)
            if source is not None and source.kind == "packed"
        ]

    def packed_items(self, packed: Sequence[PackedState]) -> list[CopyItem]:
        """Its values, stacked afresh: thousands of four-byte copies would be slower."""
        return [self._item(p.entry, _stack(p.values, self._source(p).dtype)) for p in packed]

    def packed_separately(self, packed: Sequence[PackedState]) -> list[tuple[CopyItem, str]]:
        """Each of those values as a copy of its own, with its name."""
        found = []
        for p in packed:
            dtype, offset = self._source(p).dtype, self.plan.offsets[p.entry]
            for nth, (name, key) in enumerate(self.plan.packed[dtype]):
                value, size = p.values[nth], dtype.itemsize
                if isinstance(value, Tensor):
                    item = CopyItem(local(value), None, None, dtype, offset + nth * size, size)
                    found.append((item, f"optim/{key}/{name}"))
        return found

    def _source(self, packed: PackedState) -> EntrySource:
        source = self.plan.sources[packed.entry]
        assert source is not None
        return source

    def _refresh(self) -> None:
        # Ids are unique because what they are of is held below: the state objects and every parameter's own.
        key = tuple((id(o.state), *map(id, o.state.values())) for o in self._binding.keepers)
        if key == self._state_key:
            return
        self._state_key = key
        self._held = [(o.state, list(o.state.values())) for o in self._binding.keepers]
        binding = self._binding
        buffers = binding.buffer_places()
        states = self._states = {name: binding.state(name) for name in binding.owner}
        self._places = []
        for source in self.plan.sources:
            if source is None or source.kind == "packed":
                self._places.append((_NOWHERE, ""))
            elif source.kind == "param":
                self._places.append((binding.params, source.name))
            elif source.kind == "master":
                self._places.append((binding.masters, source.name))
            elif source.kind == "optim":
                self._places.append((states[source.name], source.key))
            else:
                self._places.append(buffers[source.name])
        self._packed_places = {
            dtype: [(states[name], key) for name, key in pairs] for dtype, pairs in self.plan.packed.items()
        }

    def _rebuild(self, live: list[Tensor | None]) -> None:
        self._live = live
        self._items = CopyList(
            self._item(i, tensor) for i, tensor in enumerate(live) if isinstance(tensor, Tensor)
        )
        pairs = list(zip(self.plan.sources, live, strict=True))
        names = [s.tensor_name for s, t in pairs if s is not None and isinstance(t, Tensor)]
        # What is watched is what is copied: a write to a DTensor's shard counts there, not in the DTensor.
        self.named = [(i.tensor, name) for i, name in zip(self._items, names, strict=True)]
        kept = [(s.name, t) for s, t in pairs if s is not None and s.kind == "optim"]
        # Those that have none of it: there was no update yet. What else is not there is told by the
        # keys (`KeptState`).
        self.absent = sorted({n for n, _ in kept} - {n for n, t in kept if t is not None})
        self._lacks = any(t is None for _, t in kept)

    def missing(self) -> list[int]:
        """Indices of entries that have no live tensor (yet)."""
        if not self._lacks:
            return []
        pairs = zip(self.plan.sources, self._live, strict=True)
        return [i for i, (s, t) in enumerate(pairs) if s is not None and s.kind != "packed" and t is None]

    def _fits(self, index: int, tensor: Tensor | None) -> bool:
        """Whether this is what was planned: optimizer state may take another shape or dtype, or
        another kind of tensor its place.
        """
        source = self.plan.sources[index]
        if source is None or source.kind != "optim" or not isinstance(tensor, Tensor):
            return isinstance(tensor, Tensor)
        here, planned = (
            getattr(tensor, "_local_tensor", tensor),
            self.plan.layout.entries[index].shape,
        )
        if not plain_tensor(here) or here.dtype is not source.dtype:
            return False
        if source.start is None or source.stop is None:
            return tuple(here.shape) == tuple(planned)
        return tuple(here.shape[1:]) == tuple(planned[1:]) and here.shape[0] >= source.stop

    def _item(self, index: int, tensor: Tensor) -> CopyItem:
        source, plan = self.plan.sources[index], self.plan
        assert source is not None
        return CopyItem(
            local(tensor),
            source.start,
            source.stop,
            source.dtype,
            plan.offsets[index],
            plan.layout.entries[index].nbytes,
        )


def _address(tensor: Tensor | None) -> int:
    if type(tensor) in _PLAIN:
        return cast("Tensor", tensor).data_ptr()
    shard = getattr(tensor, "_local_tensor", tensor)
    return shard.data_ptr() if isinstance(shard, Tensor) else 0


def _scalar(value: Any, dtype: torch.dtype) -> Any:
    return value if isinstance(value, Tensor) and value.dtype is dtype and not value.ndim else None


def _stack(values: list[Any], dtype: torch.dtype) -> Tensor:
    tensors = [local(v) if isinstance(v, Tensor) else None for v in values]
    devices = {t.device for t in tensors if t is not None}
    device = devices.pop() if len(devices) == 1 else torch.device("cpu")
    zero = torch.zeros((), dtype=dtype, device=device)
    if devices:
        tensors = [None if t is None else t.to(device) for t in tensors]
    with torch.no_grad():
        return torch.stack([zero if t is None else t for t in tensors])


class RestlessBuffers:
    """Of one model.

    Attributes:
        names: of those that are known to change before the optimizer's step; it grows.
    """

    def __init__(self, binding: LiveState) -> None:
        self._binding = binding
        self._watched: list[_WatchedBuffer] = []
        self.names: set[str] = set()

    def watch(self) -> None:
        """The top of a step."""
        self._watched = [_WatchedBuffer(n, b) for n, b in self._binding.buffers().items()]

    def look(self) -> None:
        """The optimizer's step is about to run."""
        if self._watched:
            now = self._binding.buffers()
            self.names |= {w.name for w in self._watched if w.changed(now.get(w.name))}
            self._watched = []


class _WatchedBuffer:
    """A buffer as it was at the top of a step.

    Its version counter is not enough: batch norm's kernel updates the running statistics without
    counting them up.
    """

    def __init__(self, name: str, buffer: Tensor) -> None:
        self.name, self._buffer, self._version = name, buffer, buffer._version
        self._was = buffer.detach().clone()

    def changed(self, now: Tensor | None) -> bool:
        same = now is self._buffer and self._buffer._version == self._version
        return not same or not torch.equal(self._was, self._buffer)
