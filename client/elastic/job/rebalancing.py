"""Whether experts are placed anew by load while the ranks stay: looked at now and then; the decision
is the same on all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec

from ckptd.client.elastic import ElasticExperts
from ckptd.client.elastic.incarnation.discovery import Wishes
from ckptd.client.elastic.load_history import LayerClock, forecast
from ckptd.client.ranks.collectives import Collectives
from ckptd.core.elastic.elastic_types import ExpertPlacement, Loads
from ckptd.core.elastic.incarnation_plan import IncarnationPlan
from ckptd.core.elastic.placement.rebalance_policy import (
    Action,
    PlacementTimes,
    StepDone,
    TimesConfig,
)

__all__ = ["Rebalancing"]


class _Measured(msgspec.Struct, frozen=True):
    """What a rank has measured, in seconds."""

    now_s: float
    expert_s: float
    move_s: float


class Rebalancing:
    """Drives `PlacementTimes` in one world. Which nodes there are is the launcher's affair: here they stay.

    Args:
        layers: whose forwards are timed.
    """

    def __init__(
        self,
        plan: IncarnationPlan,
        wishes: Wishes,
        config: TimesConfig,
        layers: Sequence[ElasticExperts],
        ranks: Collectives,
    ) -> None:
        self._plan, self._wishes, self._ranks = plan, wishes, ranks
        self._clock = LayerClock(layers)
        self._times = PlacementTimes(
            config,
            plan.nodes,
            plan.cluster,
            num_experts=wishes.layers.num_experts,
            step=plan.start,
        )

    def step_over(self) -> None:
        """A step is done."""
        self._clock.step_over()

    def look(
        self,
        step: int,
        total: int,
        placement: ExpertPlacement,
        loads_LE: Loads,
        seconds: Mapping[str, float],
    ) -> str | None:
        """Why to place anew before this step; None: not now. A collective call at the steps where
        the load is looked at.

        Args:
            placement: where the experts are now.
            seconds: what the last change has taken: the next one costs about as much.
        """
        if not self._times.wants_forecast(step):
            return None
        move_s = sum(seconds.get(name, 0.0) for name in ("start_s", "load_s", "attach_s"))
        mine = _Measured(time.monotonic(), self._clock.take_s(), move_s)
        measured = self._ranks.gather(mine, _Measured)
        coming = forecast(
            placement,
            self._plan.cluster,
            loads_LE,
            threshold=self._wishes.placement.threshold,
            max_straggler=self._wishes.placement.max_straggler,
            expert_s=max(one.expert_s for one in measured),
            remaining_steps=total - step,
            move_s=max(one.move_s for one in measured),
        )
        decision = self._times.handle(StepDone(step, coming), now_s=measured[0].now_s)
        return decision.reason if decision.action is Action.PLACE else None

    def close(self) -> None:
        """Time no more."""
        self._clock.close()
