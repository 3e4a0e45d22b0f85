"""What a state with shards of experts must tell beside them: how large the parameters are of which
they are shards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ckptd.client.elastic.layer.elastic_layer import ElasticExperts
from ckptd.core.elastic.incarnations import SHARDS, ExpertLayers

__all__ = ["SHAPES", "ShardShapes", "numels_of"]

SHAPES = "ckptd.shards"
"""The name in the user's state under which it is recorded."""


class ShardShapes:
    """Recorded in every snapshot, as an object of ``state=``; of layers whose experts are all alike
    once, so that it stays small.

    Args:
        layers: by name.
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
        """Of each layer the names and shapes of every expert's parameters; one expert's, if all are alike."""
        return self._shapes

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing: it was compared before anything was loaded."""


def numels_of(shapes: Mapping[str, Any] | None, layers: ExpertLayers) -> dict[str, int]:
    """The elements of each parameter of which there are shards, by the shards' name; of what a
    `ShardShapes` told.
    """
    found: dict[str, int] = {}
    for layer, experts in (shapes or {}).items():
        for expert in range(layers.num_experts):
            for name, size in experts[expert if len(experts) > 1 else 0]:
                found[f"{SHARDS}{layer}.{expert}.{name}"] = math.prod(size)
    return found
