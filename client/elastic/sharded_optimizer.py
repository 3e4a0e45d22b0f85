"""Optimizers of experts on shards: each rank keeps a shard of every expert, wherever its replicas
are (SwiftMoE).

The other strategy, an optimizer on each replica (Lazarus), moves the optimizer's state with the
expert. Shards never move. In a step

1. the gradients of an expert's replicas are summed at the owners of its shards: all ranks, an equal
   part each;
2. each rank updates its shards, with any optimizer that updates element by element;
3. the new weights are sent to the ranks that hold the expert. The placement may change in every step
   at no cost: as many weights are sent as there are replicas, under any placement.

The shards are trained, so the replicas are no longer parameters of the model.

Source: SwiftMoE (arXiv 2504.19925), its abstract: optimizers partitioned statically over all nodes,
placement adjusted by the weight updates.

Shapes: ``L`` layers, ``R`` ranks, ``E`` experts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from ckptd.client.elastic.layer.elastic_layer import ElasticExperts, common_device
from ckptd.client.elastic.layer.expert_tensors import cut, expert_tensors_of, joined, rounds_by_dtype
from ckptd.client.elastic.layer.layer_check import check_replicas_RE, shapes_of
from ckptd.client.optimizers.optimizer_probe import probe_optimizer
from ckptd.client.ranks.collectives import Collectives

MakeExpert: TypeAlias = Callable[[str, int], nn.Module]
"""``(layer, expert) -> module``; its weights will be overwritten."""

Placements: TypeAlias = ArrayLike | Sequence[ArrayLike] | Mapping[str, ArrayLike]
"""``[L, R, E]`` in the order of the layers, or ``[R, E]`` by the name of a layer; those not named stay."""

_Shards: TypeAlias = list[tuple[str, nn.Parameter]]
_WHAT = "ExpertShards cannot be made"


class PlacementState:
    """Placements as state of a checkpoint; a loaded placement waits for the next ``send_weights``.

    Args:
        layers: by name.
    """

    def __init__(self, layers: Mapping[str, ElasticExperts]) -> None:
        self._layers = dict(layers)
        self._loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """``[R, E]`` by the name of the layer."""
        return {name: layer.replicas_RE.tolist() for name, layer in self._layers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loaded = dict(state)

    def loaded(self) -> dict[str, Any]:
        """Loaded and not in use yet; may be empty."""
        return dict(self._loaded)

    def forget(self) -> None:
        """The loaded placement is in use, or another one."""
        self._loaded = {}


@dataclass(frozen=True, slots=True)
class _Move:
    """A layer's next placement, and this rank's experts in it; new ones still have other weights."""

    layer: ElasticExperts
    name: str
    replicas_RE: NDArray[np.int64]
    experts: dict[int, nn.Module]


@dataclass(frozen=True, slots=True)
class _Owned:
    """A layer, and this rank's shard of each parameter of its experts, by expert and index."""

    name: str
    layer: ElasticExperts
    shards: dict[tuple[int, int], nn.Parameter]

    @property
    def names(self) -> dict[tuple[int, int], str]:
        """The name of each shard as a parameter of `ExpertShards`."""
        shapes_E = self.layer.agreed.shapes_E
        return {
            (expert, index): f"shards.{self.name}.{expert}.{shapes_E[expert][index].name}"
            for expert, index in self.shards
        }


class ExpertShards(nn.Module):
    """This rank's shards of all experts of some layers, and their optimizer; making it is a collective call.

    The layers' experts leave the model's parameters. This module is never called: its parameters
    are the shards, named ``shards.<layer>.<expert>.<parameter>``, flat, ``ceil(numel / R)`` long,
    padded with zeros.

    Args:
        layers: by name, as ``replace_moe_blocks`` returns them, or one. All of one process group.
        make_optimizer: makes the optimizer of the shards ``[(name, shard), ...]``, such as
            ``lambda shards: torch.optim.AdamW(shards, lr=1e-3)``. The same on all ranks.
        masters: the dtype of the shards if it is not that of the weights: float32 under weights of
            16 bits. They begin with the values of the weights.
        make_expert: ``(layer, expert) -> module``, for the weights of an expert that a rank gets.
            Default: the module of an expert that the rank gives away, or a copy of one that it keeps.
    Raises:
        ValueError: on all ranks, if any of them: replicas differ; ranks name other layers; experts
            have buffers, which would not move; gradients were not used; the optimizer does not
            update element by element.
    """

    def __init__(
        self,
        layers: Mapping[str, ElasticExperts] | ElasticExperts,
        make_optimizer: Callable[[_Shards], torch.optim.Optimizer],
        *,
        masters: torch.dtype | None = None,
        make_expert: MakeExpert | None = None,
    ) -> None:
        super().__init__()
        named = {"experts": layers} if isinstance(layers, ElasticExperts) else dict(layers)
        if not all(isinstance(layer, ElasticExperts) for layer in named.values()) or not named:
            raise ValueError(
                "layers must be an ElasticExperts or a dict of them, such as replace_moe_blocks() returns"
            )
        self._group = next(iter(named.values())).group
        self._ranks, self._rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        self._make_expert = make_expert
        self.placed = PlacementState(named)
        Collectives.of_group(self._group).check(
            lambda: _described(named, masters, self._group),
            bytes,
            what=_WHAT,
            unlike="other layers or masters than rank 0",
        )
        self._device = common_device(named.values(), self._group, what=_WHAT)
        anew = [layer.agree_anew() for layer in named.values()]
        for layer, agreed in zip(named.values(), anew, strict=True):
            layer.hide_experts(agreed)
        try:
            self._make(named, masters, make_optimizer)
        except BaseException:
            for layer in named.values():
                layer.show_experts()
            raise

    @property
    def layers(self) -> dict[str, ElasticExperts]:
        """By name."""
        return {owned.name: owned.layer for owned in self._owned}

    @property
    def placements(self) -> dict[str, NDArray[np.int64]]:
        """``[R, E]`` by the name of the layer, as they are now."""
        return {owned.name: owned.layer.replicas_RE for owned in self._owned}

    def step(self, placements: Placements | None = None) -> None:
        """One step of the optimizer, then the experts' next placement if given; a collective call.

        It is ``reduce_gradients``, ``optimizer.step``, ``send_weights`` and ``optimizer.zero_grad``.

        Raises:
            ValueError: on all ranks and before anything is changed: placements are impossible or
                differ between ranks.
        """
        moves = self._agreed_moves(placements)
        self.reduce_gradients()
        self.optimizer.step()
        self._send(moves)
        self.optimizer.zero_grad(set_to_none=True)

    def reduce_gradients(self) -> None:
        """Sum the gradients of the replicas into the shards' ``grad``; a collective call, or nothing
        without a backward.

        For loops that use gradients before the step: every element of every expert is in the shards
        of one rank, once, so the square of the global norm is the sum over the ranks. A shard
        without a gradient on any rank stays without.
        """
        for owned in self._owned:
            for key, part in owned.layer.reduce_to_owners(self._device).items():
                shard = owned.shards[key]
                part = part.to(shard.dtype)
                shard.grad = part if shard.grad is None else shard.grad + part

    def send_weights(self, placements: Placements | None = None) -> None:
        """Send the weights of the shards to every replica, of the next placement if given; a
        collective call.

        For loops that do the parts of ``step`` themselves, and after shards were loaded. Without
        ``placements``, the one that ``placed`` has loaded counts, if any.

        Raises:
            ValueError: as ``step``.
        """
        self._send(self._agreed_moves(placements))

    def get_extra_state(self) -> dict[str, Any]:
        """For ``recut``: ranks, lengths of the whole tensors, and each shard's index in the optimizer."""
        places = {
            id(param): index
            for index, param in enumerate(
                param for group in self.optimizer.param_groups for param in group["params"]
            )
        }
        return {
            "ranks": self._ranks,
            "rank": self._rank,
            "numels": {
                name: owned.layer.agreed.shapes_E[expert][index].numel
                for owned in self._owned
                for (expert, index), name in owned.names.items()
            },
            "places": {name: places.get(id(param), -1) for name, param in self.named_parameters()},
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Check that loaded shards are this rank's.

        Raises:
            ValueError: they were cut for another number of ranks, or are another rank's.
        """
        if state["ranks"] != self._ranks:
            raise ValueError(
                f"these shards were cut for {state['ranks']} ranks, and there are {self._ranks}: "
                "recut() them from the states of all ranks"
            )
        if state["rank"] != self._rank:
            raise ValueError(f"these are the shards of rank {state['rank']}, not of {self._rank}")

    # -- making ------------------------------------------------------------------------------------------

    def _make(
        self,
        layers: Mapping[str, ElasticExperts],
        masters: torch.dtype | None,
        make_optimizer: Callable[[_Shards], torch.optim.Optimizer],
    ) -> None:
        with torch.no_grad():
            self._owned = [
                _Owned(name, layer, self._first_shards(layer, masters)) for name, layer in layers.items()
            ]
        self.shards = nn.Module()
        for owned in self._owned:
            self._name(owned)
        self.optimizer: torch.optim.Optimizer
        Collectives.of_group(self._group).check(
            lambda: self._set_up(make_optimizer),
            bytes,
            what=_WHAT,
            unlike="other options of the optimizer than rank 0",
        )

    def _first_shards(
        self, layer: ElasticExperts, masters: torch.dtype | None
    ) -> dict[tuple[int, int], nn.Parameter]:
        """This rank's shards of the weights of each expert's first holder."""
        params = _params(layer)
        first = [replace(entry, holders=entry.holders[:1]) for entry in expert_tensors_of(layer.agreed)]
        found: dict[tuple[int, int], nn.Parameter] = {}
        for exchange, entries in rounds_by_dtype(first, layer.agreed, self._device, self._group):
            own = [params[entry.expert][entry.index] for entry in exchange.held(entries)]
            parts = exchange.sums_to_owners(entries, [param.reshape(-1) for param in own])
            for entry, part in zip(entries, parts, strict=True):
                # A part may be a view of all that was received.
                found[entry.key] = nn.Parameter(part.to(masters or part.dtype, copy=True))
        return {key: found[key] for key in sorted(found)}

    def _name(self, owned: _Owned) -> None:
        """Put the shards into the module tree, the experts of a layer into a ``ModuleDict``."""
        shapes_E = owned.layer.agreed.shapes_E
        experts = nn.ModuleDict({str(expert): nn.Module() for expert in range(len(shapes_E))})
        _put(self.shards, owned.name, experts)
        for (expert, index), shard in owned.shards.items():
            _put(experts[str(expert)], shapes_E[expert][index].name, shard)

    def _set_up(self, make_optimizer: Callable[[_Shards], torch.optim.Optimizer]) -> bytes:
        self.optimizer = make_optimizer(list(self.shards.named_parameters()))
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"make_optimizer returned a {type(self.optimizer).__name__}, not a torch.optim.Optimizer"
            )
        own = {id(shard) for owned in self._owned for shard in owned.shards.values()}
        for group in self.optimizer.param_groups:
            if strange := [p for p in group["params"] if id(p) not in own]:
                raise ValueError(
                    f"the optimizer of the shards holds {len(strange)} other parameters: give "
                    "these an optimizer of their own"
                )
        for ndim in sorted({1} | self._ndims()):
            self._check_elementwise(ndim)
        options = [
            {key: repr(value) for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        counts = [len(group["params"]) for group in self.optimizer.param_groups]
        return f"{type(self.optimizer).__name__} {counts} {options}".encode()

    def _ndims(self) -> set[int]:
        return {
            len(shape.size)
            for owned in self._owned
            for shapes in owned.layer.agreed.shapes_E
            for shape in shapes
            if shape.size
        }

    def _check_elementwise(self, ndim: int) -> None:
        """The optimizer must treat a shard, separate from its tensor, like the same elements within it."""
        shard = next(self.parameters())
        for group in self.optimizer.param_groups:
            found = probe_optimizer(self.optimizer, group, ndim=ndim, dtype=shard.dtype, device=shard.device)
            if not (found.independent and found.rowwise):
                raise ValueError(
                    f"the optimizer must update each element by itself, and does not: {found.reason}"
                )

    # -- a step ------------------------------------------------------------------------------------------

    def _agreed_moves(self, placements: Placements | None) -> list[_Move]:
        """The changes of placement, the same on all ranks; nothing is changed yet. A collective call."""
        moves: list[_Move] = []

        def plan() -> bytes:
            moves.extend(self._move(*wanted) for wanted in self._wanted(placements).items())
            return b"".join([move.name.encode() + move.replicas_RE.tobytes() + b"\0" for move in moves])

        Collectives.of_group(self._group).check(
            plan,
            bytes,
            what="the experts were not placed anew, and nothing was updated",
            unlike="other placements than rank 0",
        )
        return moves

    def _wanted(self, placements: Placements | None) -> dict[str, NDArray[np.int64]]:
        if placements is None:
            placements = self.placed.loaded()
        names = [owned.name for owned in self._owned]
        if not isinstance(placements, Mapping):
            each: Any = placements
            if len(each) != len(names):
                raise ValueError(f"placements of {len(each)} layers, and there are {len(names)}")
            placements = dict(zip(names, each, strict=True))
        if strange := [name for name in placements if name not in names]:
            raise ValueError(f"there is no layer {strange[0]!r}; names are like {names[0]!r}")
        return {
            name: check_replicas_RE(placements[name], self._ranks) for name in names if name in placements
        }

    def _move(self, name: str, replicas_RE: NDArray[np.int64]) -> _Move:
        layer = self.layers[name]
        if replicas_RE.shape != layer.replicas_RE.shape:
            raise ValueError(
                f"the placement of {name!r} has the shape {replicas_RE.shape}, and the layer "
                f"{layer.replicas_RE.shape}"
            )
        held = layer.held_experts()
        numbers = np.nonzero(replicas_RE[self._rank])[0].tolist()
        spare = [module for expert, module in held.items() if expert not in numbers]
        experts = {
            expert: held[expert] if expert in held else self._module(name, layer, expert, spare)
            for expert in numbers
        }
        return _Move(layer, name, replicas_RE, experts)

    def _module(self, name: str, layer: ElasticExperts, expert: int, spare: list[nn.Module]) -> nn.Module:
        """A module for an expert that this rank gets; ``spare``: those it gives away, for reuse."""
        if self._make_expert is not None:
            module = self._make_expert(name, expert)
        elif spare:
            module = spare.pop()
        elif len(layer.experts):
            module = copy.deepcopy(next(iter(layer.experts.values())))
        else:
            raise ValueError(
                f"there is no expert of {name!r} of which the module could be copied: pass make_expert="
            )
        if shapes_of(module) != layer.agreed.shapes_E[expert]:
            raise ValueError(
                f"the module for expert {expert} of {name!r} has other parameters than the expert: "
                "pass make_expert="
            )
        return module.to(self._device)

    @torch.no_grad()
    def _send(self, moves: Sequence[_Move]) -> None:
        for move in moves:
            move.layer.adopt(move.experts, move.replicas_RE)
        self.placed.forget()
        for owned in self._owned:
            agreed, params = owned.layer.agreed, _params(owned.layer)
            tensors = expert_tensors_of(agreed)
            for exchange, entries in rounds_by_dtype(tensors, agreed, self._device, self._group):
                shards = [owned.shards[entry.key].to(exchange.dtype) for entry in entries]
                flats = exchange.shards_to_holders(entries, shards)
                for entry, flat in zip(exchange.held(entries), flats, strict=True):
                    param = params[entry.expert][entry.index]
                    param.copy_(flat.view(param.shape))


def _params(layer: ElasticExperts) -> dict[int, list[nn.Parameter]]:
    return {expert: list(one.parameters()) for expert, one in layer.held_experts().items()}


def _put(module: nn.Module, name: str, value: Any) -> None:
    """Set ``value`` under a dotted name."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    setattr(module, leaf, value)


def _described(layers: Mapping[str, ElasticExperts], masters: torch.dtype | None, group: Any) -> bytes:
    """The facts that must be equal on all ranks, after a check of this rank's layers."""
    for name, layer in layers.items():
        if layer.group is not group:
            raise ValueError(f"layer {name!r} is of another process group than the first one")
        if layer.is_sharded:
            raise ValueError(f"layer {name!r} has ExpertShards already")
        for expert, module in layer.held_experts().items():
            if any(True for _ in module.buffers()):
                raise ValueError(
                    f"expert {expert} of {name!r} has buffers, which have no optimizer and would "
                    "not move with it: use sync_gradients() and an optimizer on each replica"
                )
            for param in module.parameters():
                if param.is_meta:
                    raise ValueError(f"expert {expert} of {name!r} has no weights yet (meta device)")
                if param.grad is not None and bool(param.grad.count_nonzero()):
                    raise ValueError(f"expert {expert} of {name!r} has a gradient: call zero_grad() before")
    return "\n".join([str(masters), *layers]).encode()


# -- shards for another number of ranks --------------------------------------------------------------

_EXTRA = "_extra_state"


def recut(
    weights: Sequence[Mapping[str, Any]], optimizers: Sequence[Mapping[str, Any]], ranks: int
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """For each of ``ranks`` ranks, the states that its ``ExpertShards`` and their optimizer load; pure.

    No element changes, and its optimizer state goes with it.

    Args:
        weights: by rank, the state of its shards.
        optimizers: by rank, the state of their optimizer. Tensors as long as a shard are cut like
            it; anything else (the number of steps) must be equal on all ranks.
    Raises:
        ValueError: states of some ranks are missing or twice, or they are not of one job.
    """
    _check(weights, optimizers, ranks)
    extra = weights[0][_EXTRA]
    new_weights: list[dict[str, Any]] = [{} for _ in range(ranks)]
    new_states: list[dict[int, Any]] = [{} for _ in range(ranks)]
    for name, numel in extra["numels"].items():
        shards = [one[name] for one in weights]
        for to, shard in zip(new_weights, _recut(shards, numel, ranks), strict=True):
            to[name] = shard
        place = extra["places"][name]
        states = [one["state"].get(place) for one in optimizers]
        if any(state is not None for state in states):
            for rank, state in enumerate(_states(name, states, shards, numel, ranks)):
                new_states[rank][place] = state
    for rank, one in enumerate(new_weights):
        one[_EXTRA] = {**extra, "ranks": ranks, "rank": rank}
    return [
        (one, {**optimizers[0], "state": state}) for one, state in zip(new_weights, new_states, strict=True)
    ]


def _check(weights: Sequence[Mapping[str, Any]], optimizers: Sequence[Mapping[str, Any]], ranks: int) -> None:
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: there is at least one")
    if not weights or len(weights) != len(optimizers):
        raise ValueError(f"{len(weights)} states of shards, and {len(optimizers)} of optimizers")
    extras = [one[_EXTRA] for one in weights]
    if [extra["rank"] for extra in extras] != list(range(extras[0]["ranks"])):
        raise ValueError(
            f"the states are of the ranks {[extra['rank'] for extra in extras]}: all "
            f"{extras[0]['ranks']} are needed, in their order"
        )
    for rank, extra in enumerate(extras):
        if any(extra[key] != extras[0][key] for key in ("ranks", "numels", "places")):
            raise ValueError(f"the state of rank {rank} is of other shards than that of rank 0")


def _recut(shards: Sequence[Tensor], numel: int, ranks: int) -> list[Tensor]:
    # Copies: a view would keep the tensor of all ranks alive, and a file would contain it.
    return [row.clone() for row in cut(joined(shards, numel), ranks)]


def _states(
    name: str,
    states: Sequence[Mapping[str, Any] | None],
    shards: Sequence[Tensor],
    numel: int,
    ranks: int,
) -> list[dict[str, Any]]:
    """The optimizer's state of one parameter, by rank."""
    known = [state for state in states if state is not None]
    if len(known) < len(states) or any(state.keys() != known[0].keys() for state in known):
        raise ValueError(f"the optimizer states of {name} are not of one step")
    found: list[dict[str, Any]] = [{} for _ in range(ranks)]
    for key, value in known[0].items():
        values = [state[key] for state in known]
        if isinstance(value, Tensor) and value.shape == shards[0].shape:
            parts: Sequence[Any] = _recut(values, numel, ranks)
        elif all(_same(one, value) for one in values):
            parts = [value.clone() if isinstance(value, Tensor) else value for _ in found]
        else:
            raise ValueError(
                f"{key} in the optimizer's state of {name} differs between ranks and is not as "
                "long as a shard"
            )
        for state, part in zip(found, parts, strict=True):
            state[key] = part
    return found


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
