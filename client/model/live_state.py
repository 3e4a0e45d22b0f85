"""The live training state by name: parameters, master weights, optimizer state, buffers, modules.

``LiveState`` is the only place that knows where a tensor lives. A parameter's *held* tensor is the one
that the optimizer updates: the parameter itself, or its separate fp32 master. Parameters that an
optimizer holds and the model does not know appear as ``extra/<optimizer>.<group>.<index>``.

A ``ZeroRedundancyOptimizer`` updates some parameters here and gets the others from the ranks that update
those. The others are in ``elsewhere``: this rank keeps no state for them and cannot recompute their
update.

Names are those of the model inside its wrappers, so that a snapshot reads the same with and without
them: ``DistributedDataParallel``, ``torch.compile`` and activation checkpointing put a module around
another and a component into its names (``module.``, ``_orig_mod.``, ``_checkpoint_wrapped_module.``).
``fully_shard`` changes no names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from ckptd.client import values
from ckptd.client.optimizers.optimizer_audit import KeptState
from ckptd.client.optimizers.optimizer_probe import (
    ProbeResult,
    StateSpec,
    observe_state,
    probe_optimizer,
    state_keeper,
    state_specs,
)
from ckptd.client.optimizers.value_trees import flat_state, plain_parts, same_objects

_LOW = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
_OF_MASTERS = (torch.float32, torch.bfloat16, torch.float16)
# As a power of two: elements of a tensor that 8-bit optimizers do not leave in full precision (bitsandbytes
# and torchao do so below 4,096).
_LARGER = 13
_PLAIN = (Tensor, nn.Parameter)
_CHILDREN = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")

_NO_MASTER = torch.empty(0)

_T = TypeVar("_T", bound=Tensor)


def local(tensor: Tensor) -> Tensor:
    """The plain tensor behind a DTensor (its local shard), or behind one that is made of it alone (a weight
    that FP8 training casts in its own way), without autograd.
    """
    return _behind(tensor).detach()


def whole(tensor: Tensor, name: str) -> Tensor:
    """Like `local`, for a tensor that is captured as a whole.

    Raises:
        ValueError: it is made of several tensors.
    """
    here = _behind(tensor)
    if type(here) not in _PLAIN and next(plain_parts(here)) is not here:
        raise ValueError(
            f"{name} is a {type(here).__name__}, made of several tensors, and a snapshot can hold this of "
            "optimizer state alone: keep the codes in a parameter and their scales in a buffer"
        )
    return here.detach()


def _behind(tensor: Tensor) -> Tensor:
    to_local = getattr(tensor, "to_local", None)
    here: Tensor = tensor if to_local is None else to_local()
    if type(here) in _PLAIN:
        return here
    parts = list(plain_parts(here))
    return parts[0] if len(parts) == 1 and parts[0].shape == here.shape else here


def buffer_spec(buffer: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a buffer on this rank."""
    shard = getattr(buffer, "_local_tensor", buffer)
    return tuple(shard.shape), buffer.dtype


# -- names without wrappers ------------------------------------------------------------------------


def named_modules(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
    """Like ``model.named_modules()``, without the wrappers."""
    seen: set[int] = set()

    def walk(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
        if remove_duplicate and id(module) in seen:
            return
        seen.add(id(module))
        child = _wrapped(module)
        if child:
            yield from walk(module.get_submodule(child), path)
            return
        yield path, module
        for name, part in module._modules.items():
            if part is not None:
                yield from walk(part, f"{path}.{name}" if path else name)

    return walk(model, "")


def named_parameters(
    model: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """Like ``model.named_parameters()``, without the wrappers' names."""
    return _members(model, lambda module: module._parameters, remove_duplicate)


def named_buffers(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Like ``model.named_buffers()``, without the wrappers' names."""
    return _members(model, lambda module: module._buffers, remove_duplicate)


def names_with_wrappers(model: nn.Module) -> dict[str, str]:
    """``{name in model.named_parameters(): name without wrappers}``."""
    plain = {id(p): name for name, p in named_parameters(model)}
    return {name: plain[id(p)] for name, p in model.named_parameters() if id(p) in plain}


def is_compiled(model: nn.Module) -> bool:
    """True if ``torch.compile`` is around the whole model, inside or outside other wrappers."""
    while child := _wrapped(model):
        if child == "_orig_mod":
            return True
        model = model.get_submodule(child)
    return False


def _wrapped(module: nn.Module) -> str:
    """The name of the child that this module wraps; empty if it is no wrapper."""
    if isinstance(module, DistributedDataParallel | DataParallel):
        return "module"
    return next((name for name in _CHILDREN if name in module._modules), "")


def _members(
    model: nn.Module, members: Callable[[nn.Module], Mapping[str, _T | None]], remove_duplicate: bool
) -> Iterator[tuple[str, _T]]:
    seen: set[int] = set()
    for path, module in named_modules(model, remove_duplicate=remove_duplicate):
        for name, tensor in members(module).items():
            if tensor is None or (remove_duplicate and id(tensor) in seen):
                continue
            seen.add(id(tensor))
            yield f"{path}.{name}" if path else name, tensor


# -- the live state --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class LivePlaces:
    """The dictionaries in which live tensors are looked up; another tensor may replace one in its place.

    Attributes:
        held: by what they are known to be the same: who owns the parameters, and what holds their state.
        states: the optimizer state of each parameter.
        buffers: by name, the dictionary that holds a buffer, and its key there.
    """

    held: list[Any]
    states: Mapping[str, dict[str, Any]]
    buffers: Mapping[str, tuple[Mapping[str, Tensor | None], str]]


class LiveState:
    """Names for everything that a bit-exact repeat needs.

    They are resolved anew each time, because state dicts may be replaced.

    Args:
        optimizers: torch optimizers that together update the parameters.
        masters: ``{parameter name: fp32 master tensor}``; None finds them by value.
        given: the optimizers as the user passed them, with wrappers; None: without wrappers.
    Raises:
        ValueError: a master's name or shape is wrong, two optimizers update a parameter, one keeps what
            cannot be captured, or a weight is made of several tensors.

    Attributes:
        masters_in_order: the master of each of ``params``, in their order; where there is none, a tensor
            without gradient.
        buffer_specs: shape and dtype of each buffer at the start, for which plans are made. One that has
            others later is in snapshots by value (`buffer_shapes`).
        keepers: the objects that hold the optimizers' state, which may be spread over ranks.
        owner: (optimizer, group) of each parameter.
        elsewhere: parameters that another rank updates.
        kept: what the optimizers keep besides the tensors per parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        masters: Mapping[str, Tensor] | None,
        given: Sequence[Any] | None = None,
    ) -> None:
        self.model = model
        self.optimizers = list(optimizers)
        self.keepers = [state_keeper(o) for o in self.optimizers]
        _check_initialized(model)
        self.params: dict[str, Tensor] = dict(named_parameters(model))
        self.buffer_specs = {name: buffer_spec(buffer) for name, buffer in self.buffers().items()}
        owner = self._owners()
        held = ((f"a parameter of optimizer {oi}", t) for t, oi, _ in owner.values())
        for name, tensor in (*self.params.items(), *self.buffers().items(), *held):
            whole(tensor, name)
        if masters is None:
            self.masters = find_masters(self.params, owner.values())
        else:
            plain = names_with_wrappers(model)
            self.masters = {plain.get(name, name): master for name, master in masters.items()}
        self._check_masters(masters is not None, set(owner))
        self._recorded: dict[str, tuple[StateSpec, ...]] = {}
        self._places: LivePlaces | None = None
        self._bind(owner)
        self.kept = KeptState(self, self.optimizers if given is None else given)

    def group_key(self) -> tuple[int, ...]:
        """Changes when parameters are added to, or taken from, the optimizers' groups."""
        return tuple(len(g["params"]) for o in self.optimizers for g in o.param_groups)

    def refresh(self) -> list[str]:
        """Read the optimizers' groups again after ``add_param_group``.

        Returns:
            The parameters that are new, and that the model did not have at the start.
        Raises:
            ValueError: a parameter is in two groups.
        """
        known = set(self.params)
        self._bind(self._owners())
        return [name for name in self.params if name not in known]

    def see_groups(self) -> None:
        """Read the groups again if there are others."""
        if self._bound != self.group_key():
            self.refresh()

    def add_groups(self, recorded: Mapping[str, Sequence[int]]) -> None:
        """Add the groups that the program had added while it trained: no process does that twice.

        Args:
            recorded: optimizer and group of each parameter. Nothing is added if one is unknown, or owned.
        """
        here = [len(o.param_groups) for o in self.optimizers]
        added: dict[tuple[int, int], list[str]] = {}
        for name, (optimizer, group) in recorded.items():
            if optimizer < len(here) and group >= here[optimizer]:
                added.setdefault((optimizer, group), []).append(name)
        names = [name for found in added.values() for name in found]
        if not names or any(name not in self.params or name in self.owner for name in names):
            return
        for optimizer, group in sorted(added):
            params = [self.held(name) for name in added[optimizer, group]]
            self.optimizers[optimizer].add_param_group({"params": params})
        self.refresh()

    def drop_groups(self, counts: Sequence[int]) -> None:
        """Take away the last groups, if there are more than these: they were added later."""
        if any(len(o.param_groups) > n for o, n in zip(self.optimizers, counts, strict=True)):
            for optimizer, count in zip(self.optimizers, counts, strict=True):
                del optimizer.param_groups[count:]
            self.refresh()

    def _bind(self, owner: dict[int, tuple[Tensor, int, tuple[int, int]]]) -> None:
        self._bound = self.group_key()
        claimed = {id(p) for p in self.params.values()} | {id(m) for m in self.masters.values()}
        for tensor, oi, (gi, pi) in list(owner.values()):
            if id(tensor) not in claimed:
                self.params.setdefault(f"extra/{oi}.{gi}.{pi}", tensor)
        self.masters_in_order = [self.masters.get(name, _NO_MASTER) for name in self.params]
        self.owner: dict[str, tuple[int, int]] = {}
        for name in self.params:
            found = owner.get(id(self.held(name)))
            if found is not None:
                self.owner[name] = (found[1], found[2][0])
        kept = {id(t) for k in self.keepers for g in k.param_groups for t in g["params"]}
        self.elsewhere = frozenset(n for n in self.owner if id(self.held(n)) not in kept)
        self._probes: dict[tuple[object, ...], ProbeResult] = {}
        self._larger: dict[tuple[object, ...], tuple[StateSpec, ...]] = {}
        self._inseparable: frozenset[str] | None = None
        self._observed: dict[str, tuple[StateSpec, ...]] = {}

    def _owners(self) -> dict[int, tuple[Tensor, int, tuple[int, int]]]:
        """By identity: each held tensor, its optimizer, its group and its place in the group."""
        owner: dict[int, tuple[Tensor, int, tuple[int, int]]] = {}
        for oi, optimizer in enumerate(self.optimizers):
            for gi, group in enumerate(optimizer.param_groups):
                for pi, tensor in enumerate(group["params"]):
                    if id(tensor) in owner:
                        raise ValueError(
                            f"a parameter of shape {tuple(tensor.shape)} is held by two optimizers or groups"
                        )
                    owner[id(tensor)] = (tensor, oi, (gi, pi))
        return owner

    def _check_masters(self, given: bool, owned: set[int]) -> None:
        for name, master in self.masters.items():
            if name not in self.params:
                raise ValueError(
                    f"masters[{name!r}]: the model has no such parameter; names look like "
                    f"{next(iter(self.params))!r}"
                )
            if master.shape != self.params[name].shape:
                raise ValueError(
                    f"masters[{name!r}] has shape {tuple(master.shape)}, the parameter "
                    f"{tuple(self.params[name].shape)}"
                )
            if given and id(master) not in owned:
                raise ValueError(
                    f"masters[{name!r}] is in no optimizer's param_groups; pass the tensor that "
                    "the optimizer updates"
                )

    def num_rows(self, name: str) -> int:
        """Rows of this parameter on this rank; 1 if it is 0-dimensional."""
        shape = local(self.params[name]).shape
        return int(shape[0]) if shape else 1

    def held(self, name: str) -> Tensor:
        """The tensor that the optimizer updates for this parameter."""
        return self.masters.get(name, self.params[name])

    def state(self, name: str) -> dict[str, Any]:
        """The live optimizer state of this parameter; empty before its first update."""
        if name not in self.owner:
            return {}
        found: dict[str, Any] = self.keeper(name).state.get(self.held(name), {})
        return found

    def keeper(self, name: str) -> torch.optim.Optimizer:
        """The optimizer whose ``state`` has this parameter's."""
        return self.keepers[self.owner[name][0]]

    def group(self, name: str) -> dict[str, Any]:
        oi, gi = self.owner[name]
        group: dict[str, Any] = self.optimizers[oi].param_groups[gi]
        return group

    def probe(self, name: str) -> ProbeResult | None:
        """How the optimizer treats this parameter; None if no optimizer holds it."""
        owner = self.owner.get(name)
        if owner is None:
            return None
        held = local(self.held(name))
        key = (*owner, held.ndim, held.dtype, held.device)
        if key not in self._probes:
            self._probes[key] = probe_optimizer(
                self.keeper(name), self.group(name), ndim=held.ndim, dtype=held.dtype, device=held.device
            )
        return self._probes[key]

    def rows_allowed(self, name: str) -> bool:
        """True if rows of this parameter can be captured and replayed separately."""
        probe = self.probe(name)
        if self.params[name].ndim == 0 or not (probe is None or probe.rowwise):
            return False
        # The live state counts more than a probe of small tensors: 8-bit state has scales for
        # blocks of many rows.
        state = self._local_state(name)
        specs = state_specs(local(self.held(name)), state)
        if probe is not None and not any(s.is_tensor for s in specs):
            specs = self._specs_of_larger(name, probe)
        return all(s.kind != "tensor" and not isinstance(state.get(s.key), list | dict) for s in specs)

    def _specs_of_larger(self, name: str, probe: ProbeResult) -> tuple[StateSpec, ...]:
        """What the optimizer keeps for a tensor like this one, of up to some ten thousand elements.

        8-bit optimizers keep full precision for smaller ones, such as those of the probe.
        """
        held = local(self.held(name))
        side = 2 ** -(-_LARGER // max(held.ndim, 1))
        shape = tuple(held.shape) if held.numel() < 2**_LARGER or held.ndim < 2 else (side,) * held.ndim
        key = (*self.owner[name], shape, held.dtype, held.device)
        if key not in self._larger:
            stand_in = torch.empty(shape, dtype=held.dtype, device=held.device)
            self._larger[key] = observe_state(self.keeper(name), self.group(name), stand_in, probe.state)
        return self._larger[key]

    def _local_state(self, name: str) -> dict[str, Any]:
        flat = flat_state(self.state(name))
        return {k: local(v) if isinstance(v, Tensor) else v for k, v in flat.items()}

    @property
    def inseparable(self) -> frozenset[str]:
        """Sharded parameters whose update needs all shards, and communicates within ``step()``.

        Ranks freeze operators at different iterations, so one rank's update would lack another's
        state, or wait for it. They are anchored in every snapshot, and never frozen.
        """
        if self._inseparable is None:
            self._inseparable = frozenset(
                n for n in self.owner if hasattr(self.held(n), "to_local") and not self.rows_allowed(n)
            )
        return self._inseparable

    def dependent(self) -> list[str]:
        """Why parts of the model cannot be captured at different iterations; empty if they can."""
        probes = filter(None, map(self.probe, self.params))
        reasons = [probe.reason for probe in probes if not probe.independent]
        return list(dict.fromkeys(reasons + self.kept.wrappers()))

    def specs(self, name: str) -> tuple[StateSpec, ...]:
        """The optimizer state to keep for this parameter.

        The live state; before there is any, the recorded one, or what the probe saw.
        """
        if name not in self.owner or name in self.elsewhere:
            return ()
        live = state_specs(local(self.held(name)), self._local_state(name))
        if any(s.is_tensor for s in live):
            if all(s.kind != "none" for s in live):
                return live
            later = {s.key: s for s in self._expected(name)}
            return tuple(later.get(s.key, s) if s.kind == "none" else s for s in live)
        return live or self._expected(name)

    def recall(self, recorded: Mapping[str, tuple[StateSpec, ...]]) -> None:
        """Set the recorded state of each parameter, which tells more of the expected state than a probe."""
        self._recorded = dict(recorded)

    def _expected(self, name: str) -> tuple[StateSpec, ...]:
        probe = self.probe(name)
        assert probe is not None
        known = {s.key: s for s in probe.state}
        if name in self._recorded:
            found = {s.key: s for s in self._recorded[name]}
            found.update({k: s for k, s in known.items() if not s.is_tensor and k not in found})
            found.update({k: s for k, s in known.items() if s.kind == "scalar" and k not in found})
            return tuple(found.values())
        if any(s.kind == "tensor" for s in probe.state):
            if name not in self._observed:
                self._observed[name] = observe_state(
                    self.keeper(name), self.group(name), local(self.held(name)), probe.state
                )
            known.update({s.key: s for s in self._observed[name]})
        return tuple(known.values())

    def buffers(self) -> dict[str, Tensor]:
        """All buffers that hold data, persistent or not."""
        return dict(named_buffers(self.model))

    def planned_buffers(self) -> dict[str, Tensor]:
        """The buffers that are of the shape and dtype that they had at the start."""
        specs = self.buffer_specs
        return {n: b for n, b in self.buffers().items() if specs.get(n) == buffer_spec(b)}

    def places(self, *, again: bool = True) -> LivePlaces:
        """The dictionaries that hold the live tensors: the same object until one of an optimizer is another.

        Args:
            again: see whether one was replaced (training thread).
        """
        known = self._places
        if known is not None and not again:
            return known
        held = [self.owner, *(part for o in self.keepers for part in (o.state, *o.state.values()))]
        if known is None or not same_objects(held, known.held):
            states = {name: self.state(name) for name in self.owner}
            known = self._places = LivePlaces(held, states, self.buffer_places())
        return known

    def buffer_places(self) -> dict[str, tuple[Mapping[str, Tensor | None], str]]:
        """The dictionary that holds each buffer, and its key there: another tensor may replace it."""
        return {
            f"{path}.{leaf}" if path else leaf: (module._buffers, leaf)
            for path, module in named_modules(self.model)
            for leaf in module._buffers
        }

    def named_held(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.owner:
            yield name, self.held(name)


def _check_initialized(model: nn.Module) -> None:
    lazy = [name for name, t in (*named_parameters(model), *named_buffers(model)) if is_lazy(t)]
    if lazy:
        raise ValueError(
            f"{lazy[0]} has no shape yet: call the model once (a batch of zeros will do) before the "
            "optimizer and Checkpointer are made"
        )


def find_masters(
    params: Mapping[str, Tensor], owned: Iterable[tuple[Tensor, int, tuple[int, int]]]
) -> dict[str, Tensor]:
    """Pair low-precision parameters that no optimizer holds with tensors of more precision that one does.

    Pairs have equal shapes and follow the order of both sides; the master, rounded to the parameter's
    dtype, equals the parameter to the bit.
    """
    tensors = [t for t, _, _ in owned]
    held_ids = {id(t) for t in tensors}
    known = {id(p) for p in params.values()}
    free = [t for t in tensors if id(t) not in known and t.dtype in _OF_MASTERS]
    pairs: dict[str, Tensor] = {}
    for name, param in params.items():
        if id(param) in held_ids or param.dtype not in _LOW:
            continue
        for i, master in enumerate(free):
            if master.shape == param.shape and _rounds_to(local(master), local(param)):
                pairs[name] = free.pop(i)
                break
    return pairs


def _rounds_to(master: Tensor, param: Tensor) -> bool:
    if master.dtype.itemsize <= param.dtype.itemsize:
        return False
    return torch.equal(*(values.bytes_of(t) for t in (master.to(param.dtype), param)))
