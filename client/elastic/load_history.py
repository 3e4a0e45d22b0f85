"""How many tokens each expert got, as it is kept over worlds; and when experts are placed anew
while the ranks stay.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from ckptd.client.elastic.layer.elastic_layer import ElasticExperts
from ckptd.core.elastic.elastic_types import Cluster, ExpertPlacement, Loads
from ckptd.core.elastic.placement.allocation import allocate
from ckptd.core.elastic.placement.balance import straggler_factor
from ckptd.core.elastic.placement.expert_placement import place
from ckptd.core.elastic.placement.rebalance_policy import Forecast

__all__ = ["LayerClock", "LoadHistory", "forecast"]


class LoadHistory:
    """``[L, E]`` tokens, older ones counting half as much after every ``half_life`` steps; the same
    on all ranks.

    It is in every snapshot, as an object of ``state=``.
    """

    def __init__(self, num_layers: int, num_experts: int, half_life: int = 50) -> None:
        self._loads = np.zeros((num_layers, num_experts), dtype=np.int64)
        self._half_life, self._steps = half_life, 0
        self._layers: Sequence[ElasticExperts] = ()

    def watch(self, layers: Sequence[ElasticExperts]) -> None:
        """Count in these layers from now on."""
        self._layers = tuple(layers)

    def step_over(self) -> None:
        """Add what the layers have counted."""
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


class LayerClock:
    """How long the forwards of the layers take, waiting for the busiest rank included."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._began_s = 0.0
        self._spent_s = 0.0
        self._steps = 0
        self._handles = [layer.register_forward_pre_hook(self._begins) for layer in layers]
        self._handles += [layer.register_forward_hook(self._ended) for layer in layers]

    def step_over(self) -> None:
        """A step is done."""
        self._steps += 1

    def take_s(self) -> float:
        """The mean time of a step in them since the last call: backward takes about twice as long
        as forward.
        """
        mean_s = 3 * self._spent_s / max(1, self._steps)
        self._spent_s, self._steps = 0.0, 0
        return mean_s

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _begins(self, *_: Any) -> None:
        self._began_s = time.perf_counter()

    def _ended(self, *_: Any) -> None:
        self._spent_s += time.perf_counter() - self._began_s


def forecast(
    placement: ExpertPlacement,
    cluster: Cluster,
    loads_LE: Loads,
    *,
    threshold: int,
    max_straggler: float | None,
    expert_s: float,
    remaining_steps: int,
    move_s: float,
) -> Forecast:
    """What placing the experts anew for these loads would change."""
    plan = place(allocate(loads_LE, cluster, threshold), loads_LE, cluster, max_straggler=max_straggler)
    return Forecast(
        expert_s,
        straggler_factor(placement, loads_LE, cluster),
        straggler_factor(plan.placement, loads_LE, cluster),
        remaining_steps,
        move_s,
    )
