"""What goes on beside the steps of a world: earlier worlds give their memory back, the node's
daemon is told of it, experts may be placed anew.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from ckptd.client.daemon_link.slot_file import SlotFile
from ckptd.client.elastic import ElasticExperts
from ckptd.client.elastic.incarnation.image_inventory import run_of_incarnation, world_files
from ckptd.client.elastic.incarnation.incarnation_start import Here, Started, Wishes
from ckptd.client.elastic.job.placement_report import WorldTeller
from ckptd.client.log_lines import get_logger
from ckptd.client.ranks.collectives import Collectives
from ckptd.core.elastic.allocation import allocate, straggler_factor
from ckptd.core.elastic.elastic_types import Cluster, ExpertPlacement, Loads
from ckptd.core.elastic.expert_placement import place
from ckptd.core.elastic.incarnation_plan import IncarnationPlan
from ckptd.core.elastic.rebalance_policy import (
    Action,
    Forecast,
    PlacementTimes,
    StepDone,
    TimesConfig,
)
from ckptd.core.slots.segment_names import FILE_ENDS
from ckptd.errors import DaemonUnavailable, SegmentError
from ckptd.launch import connect
from ckptd.transport.control.messages import Done, Elastic, Forget
from ckptd.transport.control.wire import ControlClient, RefusedError, RequestTimeout, WireError

__all__ = [
    "BackgroundTasks",
    "GarbageCollection",
    "Rebalancing",
    "floor_of",
    "forget",
    "make_room",
    "needless",
]

logger = get_logger(__name__)


_TIMEOUT_S = 10.0
_LOOK_STEPS = 5


def floor_of(folder: Path, job: str, run: str, rank: int) -> int:
    """The newest iteration at which every rank of a run has what was promised, as this rank's
    daemon has told; -1: none.
    """
    found = -1
    for path in folder.glob(f"{job}~{run}~r{rank}~g*{FILE_ENDS['snapshots']}"):
        try:
            found = max(found, SlotFile(path, "snapshots").ring_hint.floor)
        except (OSError, SegmentError) as error:
            logger.info("%s tells no floor: %s", path.name, error)
    return found


def needless(folder: Path, job: str, run: str, chosen: int) -> list[str]:
    """The runs of worlds that need not be kept while another one begins.

    Kept are the world ``chosen`` from which it goes on (-1: from none), and the newest one that was
    held as often as it was to be: the first may be parked in one place only, and the loss of that
    is not to lose what was promised before.
    """
    floors: dict[int, int] = {}
    for world, file in world_files(folder, job, run):
        own = (
            file.path.suffix == FILE_ENDS["snapshots"]
        )  # nobody tells floors to replicas, or to what is parked
        floors[world] = max(floors.get(world, -1), file.ring_hint.floor if own else -1)
    promised = max((world for world, floor in floors.items() if floor >= 0), default=-1)
    return [run_of_incarnation(run, world) for world in sorted(floors) if world not in (chosen, promised)]


def forget(find_endpoint: Callable[[], str], job: str, runs: Sequence[str]) -> None:
    """Free what this node holds of these runs; where the daemon cannot, they expire by themselves."""
    try:
        with connect(find_endpoint(), _TIMEOUT_S) as client:
            for run in runs:
                _forget_one(client, job, run)
    except (RequestTimeout, WireError, DaemonUnavailable, OSError) as error:
        logger.warning("memory of earlier worlds is not freed: %s; it expires by itself", error)


def _forget_one(client: ControlClient, job: str, run: str) -> None:
    try:
        client.ask(Forget(job, run), Done)
        logger.info("what this node held of %s is freed", run)
    except RefusedError as error:  # the others may be freed all the same
        logger.warning("the memory of %s is not freed: %s; it expires by itself", run, error)


class GarbageCollection:
    """Frees what this node holds of earlier worlds; of the ranks on a node one does so.

    Args:
        world: the one that goes on.
        start: where it began: a state of it that every rank has beyond there makes the worlds
            before needless.
    """

    def __init__(
        self,
        find_endpoint: Callable[[], str],
        folder: Path,
        job: str,
        run: str,
        world: int,
        start: int,
        rank: int,
    ) -> None:
        self._find_endpoint, self._folder = find_endpoint, folder
        self._job, self._run, self._world, self._start, self._rank = job, run, world, start, rank
        self._looked = 0
        self._thread: threading.Thread | None = None
        self.over = not self.earlier()

    def earlier(self) -> list[str]:
        """The runs of earlier worlds of which there are files here."""
        worlds = {world for world, _ in world_files(self._folder, self._job, self._run)}
        return [run_of_incarnation(self._run, world) for world in sorted(worlds) if world < self._world]

    def step_over(self) -> None:
        """Look, now and then, whether they are needless; what is to be done then is done beside training."""
        self._looked += 1
        if self._looked % _LOOK_STEPS == 0:
            self._look()

    def close(self) -> None:
        """Look once more, and wait for what is under way."""
        self._look()
        if self._thread is not None:
            self._thread.join(_TIMEOUT_S)

    def _look(self) -> None:
        if self.over:
            return
        run = run_of_incarnation(self._run, self._world)
        if floor_of(self._folder, self._job, run, self._rank) > self._start:
            self.over = True
            self._thread = threading.Thread(target=self._forget, name="ckptd-retire", daemon=True)
            self._thread.start()

    def _forget(self) -> None:
        forget(self._find_endpoint, self._job, self.earlier())


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
