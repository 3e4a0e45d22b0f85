"""What a world tells its node's daemon of its placement and its loads, for `ckptctl elastic`.
Nothing depends on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ckptd.client.elastic.job.placement_report import PlacementTeller, Placing
from ckptd.client.log_lines import get_logger
from ckptd.core.elastic.elastic_types import ExpertPlacement, Loads
from ckptd.core.elastic.incarnation_plan import IncarnationPlan
from ckptd.core.elastic.incarnations import Chosen, ExpertLayers
from ckptd.errors import ElasticError
from ckptd.transport.messages import Elastic

__all__ = ["WorldTeller"]

logger = get_logger(__name__)

_EVERY_STEPS = 50


class WorldTeller:
    """Tells the placement when it is in use, and the loads now and then.

    Args:
        send: takes what is told, and does not wait.
        chosen: tells how large experts are; None: not known before they are trained.
    """

    def __init__(
        self,
        send: Callable[[Elastic], None],
        plan: IncarnationPlan,
        layers: ExpertLayers,
        chosen: Chosen | None,
        loads_LE: Loads,
        *,
        threshold: int,
        max_straggler: float | None,
    ) -> None:
        self._teller = PlacementTeller(send)
        self._steps = 0
        sizes = np.zeros_like(loads_LE) if chosen is None else chosen.expert_bytes_LE
        self._placing = Placing(
            plan.placement,
            plan.cluster,
            plan.nodes,
            sizes,
            threshold,
            max_straggler,
            layers.names,
            reason=plan.reason,
        )
        self._tell_placement(plan.start, loads_LE)

    def _tell_placement(self, step: int, loads_LE: Loads) -> None:
        try:
            self._teller.placed(step, self._placing, loads_LE)
        except (ValueError, ElasticError) as error:  # `ckptctl` shows less; training goes on
            logger.warning("the daemon is not told of the placement: %s", error)

    def step_over(
        self, step: int, placement: Callable[[], ExpertPlacement], loads_LE: Callable[[], Loads]
    ) -> None:
        """A step is done. Where the experts are may change in any step with shards: it is told
        where it is not what was told last.
        """
        self._steps += 1
        if self._steps % _EVERY_STEPS:
            return
        now = placement()
        if not np.array_equal(now.counts, self._placing.placement.counts):
            self._placing = replace(self._placing, placement=now)
            self._tell_placement(step, loads_LE())
            return
        try:
            self._teller.measured(step, loads_LE())
        except ValueError as error:
            logger.warning("the daemon is not told of the loads: %s", error)
