"""What goes on beside the steps of a world: earlier worlds give their memory back, the node's
daemon is told of it, experts may be placed anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ckptd.client.elastic import ElasticExperts
from ckptd.client.elastic.incarnation.discovery import Here, Wishes
from ckptd.client.elastic.incarnation.incarnation_start import Started
from ckptd.client.elastic.job.garbage_collection import GarbageCollection, forget, needless
from ckptd.client.elastic.job.incarnation_report import WorldTeller
from ckptd.client.elastic.job.rebalancing import Rebalancing
from ckptd.client.ranks.collectives import Collectives
from ckptd.core.elastic.elastic_types import ExpertPlacement, Loads
from ckptd.core.elastic.incarnation_plan import IncarnationPlan
from ckptd.core.elastic.placement.rebalance_policy import TimesConfig
from ckptd.transport.messages import Elastic

__all__ = ["BackgroundTasks", "make_room"]


def make_room(here: Here, wishes: Wishes, world: Started, rank: int) -> None:
    """Free what nobody needs any more, for this world needs memory. To be called when all ranks
    have what they need.
    """
    if here.folder is None or here.endpoint is None or not _speaks(world.plan, rank):
        return
    chosen = -1 if world.chosen is None else world.chosen.world
    runs = needless(here.folder, wishes.job, wishes.run, chosen)
    if runs:
        forget(here.endpoint, wishes.job, runs)


class BackgroundTasks:
    """Begins when this world's checkpointer is there.

    Args:
        send: sends a report to the daemon without blocking; None: no daemon.
        when: experts are placed anew by load; None: never.
        layers: whose forwards are timed for that.
    """

    def __init__(
        self,
        here: Here,
        wishes: Wishes,
        world: Started,
        ranks: Collectives,
        *,
        send: Callable[[Elastic], None] | None,
        when: TimesConfig | None,
        layers: Sequence[ElasticExperts],
    ) -> None:
        self._retiring: GarbageCollection | None = None
        self._teller: WorldTeller | None = None
        self._rebalancing: Rebalancing | None = None
        if _speaks(world.plan, ranks.rank):
            self._retiring = _retiring(here, wishes, world.plan, ranks.rank)
            self._teller = None if send is None else _teller(send, wishes, world)
        if when is not None:
            self._rebalancing = Rebalancing(world.plan, wishes, when, layers, ranks)

    def why_anew(
        self,
        step: int,
        total: int,
        placement: Callable[[], ExpertPlacement],
        loads_LE: Callable[[], Loads],
        seconds: Mapping[str, float],
    ) -> str | None:
        """Why experts are to be placed anew before this step; None: they are not. As
        `Rebalancing.look`, a collective call now and then.
        """
        if self._rebalancing is None:
            return None
        return self._rebalancing.look(step, total, placement(), loads_LE(), seconds)

    def step_over(
        self, step: int, placement: Callable[[], ExpertPlacement], loads_LE: Callable[[], Loads]
    ) -> None:
        """A step is done."""
        if self._rebalancing is not None:
            self._rebalancing.step_over()
        if self._retiring is not None:
            self._retiring.step_over()
        if self._teller is not None:
            self._teller.step_over(step, placement, loads_LE)

    def close(self) -> None:
        """End all of it."""
        if self._rebalancing is not None:
            self._rebalancing.close()
        if self._retiring is not None:
            self._retiring.close()


def _speaks(plan: IncarnationPlan, rank: int) -> bool:
    """Whether this is the first rank of its node."""
    return plan.node_of.index(plan.node_of[rank]) == rank


def _retiring(here: Here, wishes: Wishes, plan: IncarnationPlan, rank: int) -> GarbageCollection | None:
    if here.folder is None or here.endpoint is None:
        return None
    return GarbageCollection(
        here.endpoint, here.folder, wishes.job, wishes.run, plan.number, plan.start, rank
    )


def _teller(send: Callable[[Elastic], None], wishes: Wishes, world: Started) -> WorldTeller:
    return WorldTeller(
        send,
        world.plan,
        wishes.layers,
        world.chosen,
        world.loads_LE,
        threshold=wishes.placement.threshold,
        max_straggler=wishes.placement.max_straggler,
    )
