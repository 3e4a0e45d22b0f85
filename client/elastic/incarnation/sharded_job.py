"""An elastic job whose experts have their optimizer on shards: what the job does otherwise then.

Each rank trains a shard of every expert (`ExpertShards`), and captures that, once; the replicas'
weights are the shards, rounded to their dtype, and are in no snapshot. A world of another number of
ranks cuts the shards elsewhere (`ckptd.core.elastic.shard_owners`), loads them, and sends the
weights to wherever its placement has the experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ckptd.client.elastic import ExpertShards
from ckptd.client.elastic.sharded.shard_shapes import ShardShapes, numels_of
from ckptd.client.model.live_state import LiveState
from ckptd.client.optimizers.optimizer_probe import unwrap_optimizer
from ckptd.client.ranks.collectives import Collectives
from ckptd.core.elastic.incarnations import SHARDS, ExpertLayers
from ckptd.core.elastic.shard_owners import shard_length

__all__ = ["check_strategy", "firsts_of", "same_call", "with_shards"]

_MODEL, _SHARDS = "model", SHARDS.partition(".")[0]


def with_shards(
    model: nn.Module, optimizers: Sequence[Any], shards: ExpertShards
) -> tuple[nn.Module, list[Any]]:
    """The model and the shards as one, and all optimizers: what a snapshot is to hold.

    Raises:
        ValueError: another optimizer than that of the shards updates experts.
    """
    replicas = {id(p) for layer in shards.layers.values() for p in layer.experts.parameters()}
    for optimizer in optimizers:
        groups = unwrap_optimizer(optimizer).param_groups
        if any(id(p) in replicas for group in groups for p in group["params"]):
            raise ValueError(
                f"{type(optimizer).__name__} updates replicas of experts, which get their weights "
                "from the shards: make it after shards(), of "
                "model.parameters() as they are then"
            )
    return nn.ModuleDict({_MODEL: model, _SHARDS: shards}), [*optimizers, shards.optimizer]


def same_call(ranks: Collectives, call: str) -> None:
    """A collective call: all ranks have come to the same.

    Raises:
        ValueError: on all ranks: some have not.
    """
    said = ranks.gather(call, str)
    other = [rank for rank, word in enumerate(said) if word != said[0]]
    if other:
        raise ValueError(
            f"rank 0 called {said[0]}, rank {other[0]} {said[other[0]]}: either all ranks have "
            "their experts' optimizer on shards, and call "
            "shards() before checkpointer(), or none does"
        )


def check_strategy(
    recorded: Mapping[str, Any] | None, shards: ExpertShards | None, layers: ExpertLayers
) -> None:
    """What is held has the experts' optimizer where this job has it, and experts of these shapes.

    Args:
        recorded: what a `ShardShapes` told; None: there were no shards.
    Raises:
        ValueError: says what differs.
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
    """Of the first expert; if others are not like it, with their number."""
    more = "" if len(experts) == 1 else f" (and {len(experts) - 1} others like or unlike it)"
    return ", ".join(f"{name} {size}" for name, size in experts[0]) + more


def firsts_of(
    binding: LiveState, shards: ExpertShards | None, layers: ExpertLayers, rank: int, ranks: int
) -> dict[str, int]:
    """Of each parameter of which this rank has a shard, by the shard's name: the element with which
    it begins.
    """
    if shards is None:
        return {}
    numels = numels_of(ShardShapes(shards.layers).state_dict(), layers)
    assert numels.keys() <= binding.params.keys(), "the names of shards follow from those of layers"
    return {name: rank * shard_length(numel, ranks) for name, numel in numels.items()}
