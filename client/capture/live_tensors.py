"""The live tensors of a phase plan, and the copies of them.

Parameters, buffers and optimizer state can be replaced under us (``load_state_dict``, a re-registered
buffer), so tensors are not held. The dictionaries that hold them are, for one look-up per tensor at
each boundary, and are themselves looked up again when an optimizer's state object changes.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ckptd.client.model.live_state import LivePlaces, LiveState, local, whole
from ckptd.client.model.snapshot_layout import EntrySource, PhasePlan
from ckptd.client.optimizers.value_trees import part_of, plain_parts, plain_tensor, same_objects, state_values
from ckptd.cuda.engine import CopyEngine, CopyItem, CopyList
from ckptd.cuda.samples import SamplePlan, Samples

# Types without a wrapped shard: their own address is that of the data.
_PLAIN = (Tensor, torch.nn.Parameter)
_NOWHERE: Mapping[str, Any] = {}
_version_of = attrgetter("_version")
# Of weights, one element each is compared.
_MOST_ELEMENTS = 64


class _Parts:
    """Looks up parts of tensors that are made of others, in the state of one parameter."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state

    def get(self, key: str) -> Any:
        return part_of(self._state, key)


_Place = tuple[Mapping[str, Any] | _Parts, str]


def _place(state: Mapping[str, Any], key: str) -> _Place:
    return (_Parts(state) if ":" in key else state), key


@dataclass(frozen=True, slots=True)
class PackedState:
    """0-dimensional optimizer state of one dtype: its entry in the plan, its values (None: not there yet)."""

    entry: int
    values: list[Any]


class LiveSources:
    """Resolves one plan's sources.

    Attributes:
        named: tensor and name of each copy that ``items`` returned last, in the same order.
        counted: the tensors whose versions count the writes to those, at the same moment.
        absent: parameters without the planned optimizer state, at the same moment.
    """

    def __init__(self, binding: LiveState, plan: PhasePlan) -> None:
        self._binding, self.plan = binding, plan
        keys = [s.key for s in plan.sources if s is not None] + [
            k for p in plan.packed.values() for _, k in p
        ]
        self._composed = any(":" in key for key in keys)
        # All values in the optimizers' state when it was read, and the dictionaries to which these places
        # lead.
        self._values: list[Any] | None = None
        self._where: LivePlaces | None = None
        self._places: list[_Place] = []
        self._packed_places: list[tuple[int, list[_Place]]] = []  # by entry
        # Those of buffers, which a module may replace as well (the binding's parameters stay), and what was
        # there.
        self._buffer_places: list[_Place] = []
        self._buffers: list[Any] = []
        # All tensors that were found, and those of them that can be copied as planned.
        self._found: list[Any] = []
        self._live: list[Tensor | None] = []
        self._addressed: tuple[list[Any], list[Any]] = [], []  # plain tensors, and others
        self._addresses: list[int] = []
        self._items = CopyList()
        self._found_packed: list[list[Any]] | None = None
        self._packed: list[PackedState] = []
        self.named: list[tuple[Tensor, str]] = []
        self.counted: list[Tensor] = []
        self.absent: list[str] = []
        self._lacks = False

    def prepare(self) -> CopyList:
        """Like `items`, beside training, which may replace tensors meanwhile: the first call of `items` looks
        everything up again, and keeps what is still there.
        """
        self._place(self._binding.places(again=False))
        self._find_packed()
        return self._copies(self._find())

    def items(self) -> CopyList:
        """Copies of everything but packed state (training thread)."""
        same = self._read_state()
        buffers = [place.get(key) for place, key in self._buffer_places]
        if same and same_objects(buffers, self._buffers):
            return self._copies(replaced=False)
        self._buffers = buffers
        return self._copies(self._find())

    def _find(self) -> bool:
        """Look all tensors up; True if any was replaced."""
        live = [place.get(key) for place, key in self._places]
        if same_objects(live, self._found):
            return False
        self._found = live
        plain = [t for t in live if type(t) in _PLAIN]
        self._addressed = plain, [t for t in live if type(t) not in _PLAIN]
        return True

    def _copies(self, replaced: bool) -> CopyList:
        # The object may stay while its storage changes (`p.data = x`, vector_to_parameters, swapped
        # weights).
        plain, others = self._addressed
        addresses = [*map(Tensor.data_ptr, plain), *map(_address, others)]
        if replaced or addresses != self._addresses:
            self._addresses = addresses
            self._rebuild([t if self._fits(i, t) else None for i, t in enumerate(self._found)])
        return self._items

    def packed_now(self) -> list[PackedState]:
        """The 0-dimensional state that ``items`` has just seen, so that a later copy does not see its
        replacement; the same list while nothing is replaced.
        """
        return self._packed

    def packed_items(self, packed: Sequence[PackedState]) -> list[CopyItem]:
        """One copy per dtype of the stacked values: thousands of four-byte copies would be slower."""
        return [self._item(p.entry, _stack(p.values, self._source(p.entry).dtype)) for p in packed]

    def packed_separately(self, packed: Sequence[PackedState]) -> list[tuple[CopyItem, str]]:
        """One copy per value, with its name."""
        found = []
        for p in packed:
            dtype, offset = self._source(p.entry).dtype, self.plan.offsets[p.entry]
            for nth, (name, key) in enumerate(self.plan.packed[dtype]):
                value, size = p.values[nth], dtype.itemsize
                if isinstance(value, Tensor):
                    item = CopyItem(local(value), None, None, dtype, offset + nth * size, size)
                    found.append((item, f"optim/{key}/{name}"))
        return found

    def missing(self) -> list[int]:
        """Indices of entries without a live tensor (yet)."""
        if not self._lacks:
            return []
        pairs = zip(self.plan.sources, self._live, strict=True)
        return [i for i, (s, t) in enumerate(pairs) if s is not None and s.kind != "packed" and t is None]

    def _source(self, entry: int) -> EntrySource:
        source = self.plan.sources[entry]
        assert source is not None
        return source

    def _read_state(self) -> bool:
        """True if no value in the optimizers' state was replaced since the last call."""
        keepers = self._binding.keepers
        now = [o.state for o in keepers] + state_values(keepers, parts=self._composed)
        if self._values is not None and same_objects(now, self._values):
            return True
        self._place(self._binding.places())
        self._find_packed()
        self._values = now
        return False

    def _find_packed(self) -> None:
        found = [[place.get(key) for place, key in places] for _, places in self._packed_places]
        if self._found_packed is None or not all(map(same_objects, found, self._found_packed)):
            self._found_packed = found
            pairs = zip(self._packed_places, found, strict=True)
            self._packed = [
                PackedState(i, [_scalar(v, self._source(i).dtype) for v in of]) for (i, _), of in pairs
            ]

    def _place(self, where: LivePlaces) -> None:
        """Let each source's place be in these dictionaries."""
        if where is self._where:
            return
        self._where, self._places, binding = where, [], self._binding
        for source in self.plan.sources:
            if source is None or source.kind == "packed":
                self._places.append((_NOWHERE, ""))
            elif source.kind == "param":
                self._places.append((binding.params, source.name))
            elif source.kind == "master":
                self._places.append((binding.masters, source.name))
            elif source.kind == "optim":
                self._places.append(_place(where.states[source.name], source.key))
            else:
                self._places.append(where.buffers.get(source.name, (_NOWHERE, "")))
        kinds = [None if source is None else source.kind for source in self.plan.sources]
        pairs = zip(kinds, self._places, strict=True)
        self._buffer_places = [place for kind, place in pairs if kind == "buffer"]
        self._packed_places = [
            (i, [_place(where.states[name], key) for name, key in self.plan.packed[self._source(i).dtype]])
            for i, kind in enumerate(kinds)
            if kind == "packed"
        ]

    def _rebuild(self, live: list[Tensor | None]) -> None:
        self._live = live
        self._items = CopyList(
            self._item(i, tensor) for i, tensor in enumerate(live) if isinstance(tensor, Tensor)
        )
        pairs = list(zip(self.plan.sources, live, strict=True))
        names = [s.tensor_name for s, t in pairs if s is not None and isinstance(t, Tensor)]
        # Watch the tensors that are copied: a write to a DTensor's shard counts there, not in the DTensor.
        self.named = [(i.tensor, name) for i, name in zip(self._items, names, strict=True)]
        # A plain tensor shares its counter with what is copied, and `items` has just had it in hand: of
        # thousands the training thread need not fetch those copied from memory, too.
        found = (t for t in live if isinstance(t, Tensor))
        self.counted = [t if type(t) in _PLAIN else of for t, (of, _) in zip(found, self.named, strict=True)]
        kept = [(s.name, t) for s, t in pairs if s is not None and s.kind == "optim"]
        # Parameters without any of their state had no update yet. `KeptState` records which keys exist.
        self.absent = sorted({n for n, _ in kept} - {n for n, t in kept if t is not None})
        self._lacks = any(t is None for s, t in pairs if s is not None and s.kind != "packed")

    def _fits(self, index: int, tensor: Tensor | None) -> bool:
        """False if optimizer state or a buffer has another shape, dtype or kind of tensor than planned."""
        source = self.plan.sources[index]
        if source is None or source.kind not in ("optim", "buffer") or not isinstance(tensor, Tensor):
            return isinstance(tensor, Tensor)
        here, planned = getattr(tensor, "_local_tensor", tensor), self.plan.layout.entries[index].shape
        if source.kind == "buffer":
            return here.dtype is source.dtype and tuple(here.shape) == tuple(planned)
        if not plain_tensor(here) or here.dtype is not source.dtype:
            return False
        if source.start is None or source.stop is None:
            return tuple(here.shape) == tuple(planned)
        return tuple(here.shape[1:]) == tuple(planned[1:]) and here.shape[0] >= source.stop

    def _item(self, index: int, tensor: Tensor) -> CopyItem:
        source, plan = self.plan.sources[index], self.plan
        assert source is not None
        return CopyItem(
            whole(tensor, source.tensor_name),
            source.start,
            source.stop,
            source.dtype,
            plan.offsets[index],
            plan.layout.entries[index].nbytes,
        )


def _address(tensor: Any) -> int:
    """Of a tensor that is made of another, or 0."""
    shard = getattr(tensor, "_local_tensor", tensor)
    if type(shard) in _PLAIN:
        address: int = shard.data_ptr()
        return address
    return next(plain_parts(shard)).data_ptr() if isinstance(shard, Tensor) else 0


def _scalar(value: Any, dtype: torch.dtype) -> Any:
    return value if isinstance(value, Tensor) and value.dtype is dtype and not value.ndim else None


def _stack(values: list[Any], dtype: torch.dtype) -> Tensor:
    tensors = [local(v) if isinstance(v, Tensor) else None for v in values]
    devices = {t.device for t in tensors if t is not None}
    device = devices.pop() if len(devices) == 1 else torch.device("cpu")
    zero = torch.zeros((), dtype=dtype, device=device)
    with torch.no_grad():
        return torch.stack([zero if t is None else t.to(device) for t in tensors])


class CopySplit:
    """One phase's copies, kept while their tensors are the same: those beside training, and those at once.

    Attributes:
        steady: copies that run beside training.
        restless: copies of tensors that change before the optimizer's step; they run at the top.
        watched: the tensors of ``steady``, which training must not write to before the copy is complete.
        packed_at_once: True if packed state is copied at the top, too.
    """

    def __init__(
        self, sources: LiveSources, items: CopyList, packed: list[PackedState], at_once: set[str]
    ) -> None:
        named = sources.named
        self._items, self._at_once, self._packed = items, at_once, packed
        # By address: a tensor under another name is the same memory.
        addresses = {t.data_ptr() for t, name in named if name in at_once}
        pairs = [(item, of, of[0].data_ptr() in addresses) for item, of in zip(items, named, strict=True)]
        self.steady = CopyList(item for item, _, is_restless in pairs if not is_restless)
        self.restless = CopyList(item for item, _, is_restless in pairs if is_restless)
        self.watched = [tensor for _, (tensor, _), is_restless in pairs if not is_restless]
        counted = zip(sources.counted, pairs, strict=True)
        self._counted = [tensor for tensor, (_, _, is_restless) in counted if not is_restless]
        scalars = sources.packed_separately(packed)
        self.packed_at_once = any(name in at_once for _, name in scalars)
        self._names = [name for _, (_, name), is_restless in pairs if not is_restless]
        self._names += [name for _, name in scalars]
        self._num_beside = len(self.watched if self.packed_at_once else self._names)
        self._names += [name for _, (_, name), is_restless in pairs if is_restless]
        self._sampled = [*self.steady, *(item for item, _ in scalars), *self.restless]
        self._plan: SamplePlan | None = None

    def is_of(self, items: CopyList, packed: list[PackedState], at_once: set[str]) -> bool:
        """True if this is the split of these copies."""
        return self._items is items and self._packed is packed and self._at_once == at_once

    def versions(self) -> list[int]:
        """The version of each tensor in ``watched`` at this moment, right after ``items``, for `written`."""
        return list(map(_version_of, self._counted))

    def written(self, since: list[int]) -> set[str]:
        """The names of those that were written to since they had these versions."""
        now = list(map(_version_of, self.watched))
        if now == since:
            return set()
        return {self._names[i] for i, (a, b) in enumerate(zip(now, since, strict=True)) if a != b}

    def sample(self, number: int, engine: CopyEngine) -> Samples:
        """The elements to sample in snapshot ``number``."""
        if self._plan is None:
            self._plan = SamplePlan(self._sampled, engine.device)
            self._sampled = []
        # `LiveSources.items` has just asked each tensor for its address, and would have made another split.
        return self._plan.draw(number, in_place=len(self.steady))

    def names_of(self, numbers: Iterable[int]) -> tuple[set[str], set[str]]:
        """The names of sampled copies: of those beside training, and of those at once."""
        beside = {self._names[n] for n in numbers if n < self._num_beside}
        return beside, {self._names[n] for n in numbers if n >= self._num_beside}


class RestlessBuffers:
    """Finds buffers that a forward changes, in the first steps: they cannot be copied beside it.

    Attributes:
        names: buffers that are known to change before the optimizer's step; it grows.
    """

    def __init__(self, binding: LiveState) -> None:
        self._binding = binding
        # Name, buffer, version and content at the top of a step. The version is not enough: batch
        # norm's kernel updates the running statistics without incrementing it.
        self._watched: list[tuple[str, Tensor, int, Tensor]] = []
        self.names: set[str] = set()

    def watch(self) -> None:
        """Note all buffers at the top of a step."""
        self._watched = [
            (name, b, b._version, b.detach().clone()) for name, b in self._binding.buffers().items()
        ]

    def look(self) -> None:
        """Compare them before the optimizer's step."""
        if not self._watched:
            return
        now = self._binding.buffers()
        for name, buffer, version, was in self._watched:
            same = now.get(name) is buffer and buffer._version == version
            if not same or not torch.equal(was, buffer):
                self.names.add(name)
        self._watched = []


class RestlessWeights:
    """Finds weights that change outside of their optimizer's step: a perturbation before it (SAM), a decay by
    hand after it. While an operator is frozen in a replay, its weights move from top to top, and whatever the
    loop does with them in between it would do with other values: only dense snapshots are exact then.

    A write moves a tensor's version. One that is undone before the step is over (averaged weights that are
    put in for an evaluation) does no harm, and `p.data` moves no version, so elements are compared: in the
    first steps, and from the first such write on.
    """

    def __init__(self, binding: LiveState) -> None:
        self._binding = binding
        self._tensors: tuple[object, dict[int, list[Tensor]]] = (None, {})
        self._marks: dict[int, tuple[list[int], Tensor | None]] = {}
        self.samples = True
        self.found = False

    def top(self) -> bool:
        """The top of a step; True if weights were written to since the update, and it is not known how."""
        unknown = [self._unlike(number) is None for number in self._of()]
        for number in self._of():
            self.after_update(number)
        return any(unknown)

    def forward(self) -> None:
        """A forward has ended. If gradients follow from weights that were written to (SAM's second pass), it
        does not matter that this is undone before the update.
        """
        if self.found or not torch.is_grad_enabled():
            return
        for number, tensors in self._of().items():
            if number in self._marks:
                # A step that accumulates has many forwards, and a perturbation is one of most weights.
                every = len(tensors) // _MOST_ELEMENTS + 1
                now = list(map(_version_of, tensors[::every]))
                self.found |= now != self._marks[number][0][::every]

    def before_update(self, optimizer: int) -> None:
        """Optimizer number ``optimizer`` is about to step."""
        self._unlike(optimizer)

    def after_update(self, optimizer: int) -> None:
        """It has."""
        tensors = self._of().get(optimizer, [])
        self._marks[optimizer] = list(map(_version_of, tensors)), _elements(tensors) if self.samples else None

    def forget(self) -> None:
        """What follows is compared with the next top."""
        self._marks = {}

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """What is written in the block is undone at its end."""
        known = [self._unlike(number) is not None for number in self._of()]
        yield
        for number, seen in zip(self._of(), known, strict=True):
            if seen:
                self.after_update(number)

    def _unlike(self, optimizer: int) -> bool | None:
        """Whether they are otherwise than they were; None: not known, because no elements were kept."""
        if self.found or optimizer not in self._marks:
            return self.found
        tensors, (versions, elements) = self._of().get(optimizer, []), self._marks[optimizer]
        if elements is not None:
            self.found = not torch.equal(elements, _elements(tensors))
            return self.found
        if list(map(_version_of, tensors)) == versions:
            return False
        self.samples = True
        return None

    def _of(self) -> dict[int, list[Tensor]]:
        """The tensors that each optimizer of this rank updates."""
        binding, key = self._binding, self._binding.group_key()
        if self._tensors[0] != key:
            found = defaultdict[int, list[Tensor]](list)
            for name, (optimizer, _) in binding.owner.items():
                if name not in binding.elsewhere:
                    found[optimizer].append(binding.held(name))
            self._tensors, self._marks = (key, found), {}
        return self._tensors[1]


def _elements(tensors: list[Tensor]) -> Tensor:
    """An element of each of up to 64 tensors."""
    parts = [local(t).detach() for t in tensors[:: len(tensors) // _MOST_ELEMENTS + 1]]
    found = [t.reshape(-1)[t.numel() // 2] for t in parts if t.numel() and plain_tensor(t)]
    found = [(torch.view_as_real(t)[0] if t.is_complex() else t).double() for t in found]
    if not found:
        return torch.zeros(0)
    return torch.nan_to_num(torch.stack([each.to(found[0].device) for each in found]))
