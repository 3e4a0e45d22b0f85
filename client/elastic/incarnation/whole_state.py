"""The whole state that a rank of an elastic job protects: the user's model, optimizers and objects, the
job's load history, and the shapes of sharded experts.

With the experts' optimizer on shards (`ExpertShards`), each rank trains and captures a shard of
every expert, once. The replicas' weights are the shards, rounded to their dtype; no snapshot
contains them. An incarnation with another number of ranks cuts the shards elsewhere
(`ckptd.core.elastic.incarnations`), loads them, and sends the weights to its placement's replicas.

Shapes: ``L`` layers, ``E`` experts of each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn

from ckptd.client.capture.step_state import Stateful
from ckptd.client.elastic import ElasticExperts, ExpertShards
from ckptd.client.elastic.incarnation.optimizer_extras import OptimizerExtras
from ckptd.client.model.live_state import LiveState
from ckptd.client.optimizers.optimizer_probe import unwrap_optimizer
from ckptd.client.ranks.collectives import Collectives
from ckptd.client.training_state import check_state
from ckptd.core.elastic.elastic_types import Loads
from ckptd.core.elastic.incarnations import SHARDS, ExpertLayers, shard_length

# Names in the user's state of what the job records itself.
LOADS = "ckptd.loads"
SHAPES = "ckptd.shards"


@dataclass(frozen=True, slots=True, eq=False)
class WholeState:
    """What the checkpointer protects.

    Args:
        model: with shards, the user's model and the shards as one.
        stateful: the user's objects and the job's.
        extras: the rules for state of the optimizers besides tensors.
        dense: the names of the parameters that belong to no expert.
    """

    model: nn.Module
    optimizers: list[Any]
    stateful: dict[str, Stateful]
    binding: LiveState
    extras: OptimizerExtras
    dense: tuple[str, ...]

    @property
    def dense_params(self) -> list[Tensor]:
        return [self.binding.params[name] for name in self.dense]

    @property
    def replicated(self) -> dict[str, Any]:
        """The parameters that are equal on all ranks, each with the group of all."""
        return {name: dist.group.WORLD for name in self.dense if not name.startswith("extra/")}


def whole_state_of(
    model: nn.Module,
    optimizer: Any,
    state: Mapping[str, Stateful] | None,
    masters: Mapping[str, Tensor] | None,
    layers: ExpertLayers,
    history: LoadHistory,
    shards: ExpertShards | None,
) -> WholeState:
    """Compose the whole state.

    Args:
        optimizer: one, or a list of them.
        masters: as for ``Checkpointer``.
        shards: None: each replica of an expert has its optimizer.
    Raises:
        ValueError: ``state`` cannot be captured or uses a name of the job's; or two optimizers
            update the same parameter.
    """
    own: dict[str, Stateful] = {LOADS: history}
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    if shards is not None:
        own[SHAPES] = ShardShapes(shards.layers)
    if taken := [name for name in own if name in (state or {})]:
        raise ValueError(f"state[{taken[0]!r}] is the ElasticJob's own: take another name")
    stateful = {**check_state(state), **own}
    if shards is not None:
        model, optimizers = _with_shards(model, optimizers, shards)
    binding = LiveState(model, [unwrap_optimizer(o) for o in optimizers], masters, optimizers)
    owner_of = (layers.expert_of, layers.shard_of)
    dense = tuple(name for name in binding.params if not any(of(name) for of in owner_of))
    return WholeState(model, optimizers, stateful, binding, OptimizerExtras(binding, layers), dense)


def _with_shards(
    model: nn.Module, optimizers: Sequence[Any], shards: ExpertShards
) -> tuple[nn.Module, list[Any]]:
    """The model and the shards as one, and all optimizers."""
    replicas = {id(p) for layer in shards.layers.values() for p in layer.experts.parameters()}
    for optimizer in optimizers:
        groups = unwrap_optimizer(optimizer).param_groups
        if any(id(p) in replicas for group in groups for p in group["params"]):
            raise ValueError(
                f"{type(optimizer).__name__} updates replicas of experts, which get their weights "
                "from the shards: make it after shards(), of model.parameters() as they are then"
            )
    both = nn.ModuleDict({"model": model, SHARDS.partition(".")[0]: shards})
    return both, [*optimizers, shards.optimizer]


class LoadHistory:
    """``[L, E]`` tokens routed to each expert, halved every ``half_life`` steps; the same on all ranks.

    Every snapshot contains it, as an object of ``state=``.
    """

    def __init__(self, num_layers: int, num_experts: int, half_life: int = 50) -> None:
        self._loads = np.zeros((num_layers, num_experts), dtype=np.int64)
        self._half_life, self._steps = half_life, 0
        self._layers: Sequence[ElasticExperts] = ()

    def watch(self, layers: Sequence[ElasticExperts]) -> None:
        """Count in these layers from now on."""
        self._layers = tuple(layers)

    def step_over(self) -> None:
        """Add the counts of the layers."""
        if not self._layers:
            return
        self._steps += 1
        if self._steps % self._half_life == 0:
            self._loads //= 2
        self._loads += np.stack([layer.take_loads() for layer in self._layers])

    @property
    def loads(self) -> Loads:
        """A copy."""
        return self._loads.copy()

    def state_dict(self) -> dict[str, Any]:
        return {"loads": self._loads.copy(), "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loads = np.array(state["loads"], dtype=np.int64)
        self._steps = int(state["steps"])


# -- experts on shards -------------------------------------------------------------------------------


class ShardShapes:
    """Names and shapes of the parameters of sharded experts, in every snapshot as an object of ``state=``.

    Args:
        layers: by name. One entry serves all experts of a layer if these are alike: it stays small.
    """

    def __init__(self, layers: Mapping[str, ElasticExperts]) -> None:
        self._shapes: dict[str, Any] = {}
        for layer, module in layers.items():
            experts = [
                [[shape.name, list(shape.size)] for shape in shapes] for shapes in module.agreed.shapes_E
            ]
            equal = all(one == experts[0] for one in experts)
            self._shapes[layer] = experts[:1] if equal else experts

    def state_dict(self) -> dict[str, Any]:
        return self._shapes

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing: `check_strategy` compared it before anything was loaded."""


def numels_of(shapes: Mapping[str, Any] | None, layers: ExpertLayers) -> dict[str, int]:
    """The elements of each parameter with shards, by the shards' name, from the state of a `ShardShapes`."""
    found: dict[str, int] = {}
    for layer, experts in (shapes or {}).items():
        for expert in range(layers.num_experts):
            for name, size in experts[expert if len(experts) > 1 else 0]:
                found[f"{SHARDS}{layer}.{expert}.{name}"] = math.prod(size)
    return found


def firsts_of(
    binding: LiveState, shards: ExpertShards | None, layers: ExpertLayers, rank: int, ranks: int
) -> dict[str, int]:
    """The first element of this rank's shard of each parameter, by the shard's name."""
    if shards is None:
        return {}
    numels = numels_of(ShardShapes(shards.layers).state_dict(), layers)
    assert numels.keys() <= binding.params.keys(), "the names of shards follow from those of layers"
    return {name: rank * shard_length(numel, ranks) for name, numel in numels.items()}


def check_strategy(
    recorded: Mapping[str, Any] | None, shards: ExpertShards | None, layers: ExpertLayers
) -> None:
    """Check that the state has the experts' optimizer where this job has it, and experts of these shapes.

    Args:
        recorded: the state of a `ShardShapes`; None: there were no shards.
    Raises:
        ValueError: names the difference.
    """
    anew = "or pass run= a new name to begin anew"
    if shards is None and recorded is not None:
        raise ValueError(
            "the state of this run has the experts' optimizer on shards: call shards() before "
            f"checkpointer(), {anew}"
        )
    if shards is None:
        return
    if recorded is None:
        raise ValueError(
            f"the state of this run has the experts' optimizer on each replica: leave shards() out, {anew}"
        )
    here = ShardShapes(shards.layers).state_dict()
    for layer in layers.names:
        if recorded.get(layer) != here[layer]:
            raise ValueError(
                f"the state of this run is of another model: the experts of {layer} have the "
                f"parameters {_first(here[layer])} here, and "
                f"{_first(recorded.get(layer, [[]]))} in the state; pass run= a new name to begin anew"
            )


def _first(experts: Sequence[Any]) -> str:
    """The parameters of the first expert, and the number of other entries."""
    more = "" if len(experts) == 1 else f" (and {len(experts) - 1} others like or unlike it)"
    return ", ".join(f"{name} {size}" for name, size in experts[0]) + more


def same_call(ranks: Collectives, call: str) -> None:
    """Check that all ranks have made the same call; a collective call.

    Raises:
        ValueError: on all ranks: some have not.
    """
    calls = ranks.gather(call, str)
    other = [rank for rank, name in enumerate(calls) if name != calls[0]]
    if other:
        raise ValueError(
            f"rank 0 called {calls[0]}, rank {other[0]} {calls[other[0]]}: either all ranks have "
            "their experts' optimizer on shards, and call shards() before checkpointer(), or none does"
        )
