"""All that a rank of a world protects: the user's model, optimizers and objects, and what the job
records beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ckptd.client.capture.step_state import Stateful
from ckptd.client.elastic import ExpertShards
from ckptd.client.elastic.incarnation.optimizer_extras import KeptApart
from ckptd.client.elastic.incarnation.recorded_loads import LOADS
from ckptd.client.elastic.incarnation.sharded_job import with_shards
from ckptd.client.elastic.load_history import LoadHistory
from ckptd.client.elastic.sharded.shard_shapes import SHAPES, ShardShapes
from ckptd.client.model.live_state import LiveState
from ckptd.client.optimizers.optimizer_probe import unwrap_optimizer
from ckptd.client.training_state import check_state
from ckptd.core.elastic.incarnations import ExpertLayers

__all__ = ["WholeState", "whole_state_of"]


@dataclass(frozen=True, slots=True, eq=False)
class WholeState:
    """What the checkpointer is given, and its parameters by name.

    Args:
        model: with shards the user's model and the shards as one.
        stateful: the user's objects and the job's.
        binding: of the model and the optimizers.
        kept: what the optimizers may keep for a world of other ranks to go on from it.
        dense: the names of the parameters that belong to no expert.
    """

    model: nn.Module
    optimizers: list[Any]
    stateful: dict[str, Stateful]
    binding: LiveState
    kept: KeptApart
    dense: tuple[str, ...]

    @property
    def dense_params(self) -> list[Tensor]:
        return [self.binding.params[name] for name in self.dense]

    @property
    def replicated(self) -> dict[str, Any]:
        """What all ranks have alike, each with the group of all."""
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
    """Put together what a snapshot is to hold.

    Args:
        optimizer: one, or a list of them.
        masters: as for ``Checkpointer``.
        shards: None: each replica of an expert has its optimizer.
    Raises:
        ValueError: ``state`` cannot be captured, or has a name that is the job's; or something is
            updated by two optimizers.
    """
    _check_names(state, LOADS)
    stateful = {**check_state(state), LOADS: history}
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    if shards is not None:
        _check_names(state, SHAPES)
        model, optimizers = with_shards(model, optimizers, shards)
        stateful[SHAPES] = ShardShapes(shards.layers)
    binding = LiveState(model, [unwrap_optimizer(o) for o in optimizers], masters, optimizers)
    owner_of = (layers.expert_of, layers.shard_of)
    dense = tuple(name for name in binding.params if not any(of(name) for of in owner_of))
    return WholeState(model, optimizers, stateful, binding, KeptApart(binding, layers), dense)


def _check_names(state: Mapping[str, Stateful] | None, own: str) -> None:
    if own in (state or {}):
        raise ValueError(f"state[{own!r}] is the ElasticJob's own: take another name")
