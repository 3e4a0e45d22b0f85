"""Another placement of a layer on this rank: which experts stay, which go, and what modules the new
ones get; and where they were when all was saved.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ckptd.client.elastic.layer.elastic_layer import ElasticExperts
from ckptd.client.elastic.layer.layer_check import shapes_of

__all__ = ["LayerMove", "MakeExpert", "PlacementState", "plan_moves"]

MakeExpert: TypeAlias = Callable[[str, int], nn.Module]
"""``(layer, expert) -> module``; its weights will be overwritten."""


@dataclass(frozen=True, slots=True)
class LayerMove:
    """A layer's next placement, and the modules for this rank's experts of it; new ones have
    weights of something else yet.
    """

    name: str
    replicas_RE: NDArray[np.int64]
    experts: dict[int, nn.Module]


class PlacementState:
    """Placements as state that is saved and loaded; what was loaded waits until somebody takes it.

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
        """Keep it for ``loaded``."""
        self._loaded = dict(state)

    def loaded(self) -> dict[str, Any]:
        """What was loaded and not taken yet; empty: nothing."""
        return dict(self._loaded)

    def forget(self) -> None:
        """It was taken, or is not wanted."""
        self._loaded = {}


def plan_moves(
    wanted: Mapping[str, NDArray[np.int64]],
    layers: Mapping[str, ElasticExperts],
    rank: int,
    device: torch.device,
    make_expert: MakeExpert | None,
) -> list[LayerMove]:
    """What it takes to go to these placements; nothing is changed yet.

    Args:
        device: of this rank's experts.
    Raises:
        ValueError: a placement is of another number of experts, or there is no module that fits an expert.
    """
    moves = []
    for name, replicas_RE in wanted.items():
        layer = layers[name]
        if replicas_RE.shape != layer.replicas_RE.shape:
            raise ValueError(
                f"the placement of {name!r} has the shape {replicas_RE.shape}, and the layer "
                f"{layer.replicas_RE.shape}"
            )
        held = layer.held_experts()
        numbers = np.nonzero(replicas_RE[rank])[0].tolist()
        spare = [module for expert, module in held.items() if expert not in numbers]
        experts = {}
        for expert in numbers:
            module = held.get(expert)
            if module is None:
                module = _new(name, layer, expert, spare, make_expert).to(device)
            experts[expert] = module
        moves.append(LayerMove(name, replicas_RE, experts))
    return moves


def _new(
    name: str,
    layer: ElasticExperts,
    expert: int,
    spare: list[nn.Module],
    make_expert: MakeExpert | None,
) -> nn.Module:
    """A module for an expert that was not here; ``spare``: those of experts that go, of which one
    may be taken.
    """
    if make_expert is not None:
        module = make_expert(name, expert)
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
    return module
