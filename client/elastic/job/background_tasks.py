"""Tasks besides the steps of an incarnation: garbage collection, reports to the daemon, rebalancing.

**Garbage collection.** The memory of earlier incarnations is freed once the state of this one is
held without them, or at once if their replicas were never complete. Otherwise a series of failed
starts would fill the memory, and the incarnation that comes through at last would have none.

**Rebalancing** decides whether to place experts anew by load while the ranks stay; the decision is
the same on all ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from ckptd.client.daemon_link.mapped_segment import SlotFile
from ckptd.client.elastic import ElasticExperts
from ckptd.client.elastic.incarnation.image_inventory import incarnation_files
from ckptd.client.elastic.incarnation.incarnation_start import JobSettings, LocalNode, Started
from ckptd.client.elastic.job.placement_report import IncarnationReporter
from ckptd.client.log_lines import get_logger
from ckptd.client.ranks.collectives import Collectives
from ckptd.core.elastic.allocation import allocate, straggler_factor
from ckptd.core.elastic.elastic_types import ExpertPlacement, Loads
from ckptd.core.elastic.expert_placement import place
from ckptd.core.elastic.incarnation_plan import IncarnationPlan
from ckptd.core.elastic.rebalance_policy import Action, Forecast, PlacementTimes, StepDone, TimesConfig
from ckptd.core.slots.segment_format import FILE_ENDS
from ckptd.errors import DaemonUnavailable, SegmentError
from ckptd.launch import connect
from ckptd.storage.checkpoints.names import run_of_incarnation
from ckptd.transport.messages import Done, Elastic, Forget
from ckptd.transport.wire import ControlClient, RefusedError, RequestTimeout, WireError

logger = get_logger(__name__)

_TIMEOUT_S = 10.0
_LOOK_STEPS = 5


class BackgroundTasks:
    """The tasks of one incarnation, from the creation of its checkpointer on.

    Args:
        send: sends a report to the daemon without blocking; None: no daemon.
        when: when experts are placed anew by load; None: never.
        layers: whose forwards are timed for that.
    """

    def __init__(
        self,
        node: LocalNode,
        settings: JobSettings,
        started: Started,
        ranks: Collectives,
        *,
        send: Callable[[Elastic], None] | None,
        when: TimesConfig | None,
        layers: Sequence[ElasticExperts],
    ) -> None:
        plan, rank = started.plan, ranks.rank
        self._collection: GarbageCollection | None = None
        self._reporter: IncarnationReporter | None = None
        self._rebalancing: Rebalancing | None = None
        if _is_first_of_node(plan, rank):
            if node.folder is not None and node.endpoint is not None:
                self._collection = GarbageCollection(
                    node.endpoint, node.folder, settings.job, settings.run, plan.number, plan.start, rank
                )
            if send is not None:
                self._reporter = IncarnationReporter(
                    send,
                    plan,
                    settings.layers,
                    started.chosen,
                    started.loads_LE,
                    threshold=settings.placement.threshold,
                    max_straggler=settings.placement.max_straggler,
                )
        if when is not None:
            self._rebalancing = Rebalancing(plan, settings, when, layers, ranks)

    def why_anew(
        self,
        step: int,
        total: int,
        placement: Callable[[], ExpertPlacement],
        loads_LE: Callable[[], Loads],
        seconds: Mapping[str, float],
    ) -> str | None:
        """The reason to place experts anew before this step, or None. At some steps, as
        `Rebalancing.look`, a collective call.
        """
        if self._rebalancing is None:
            return None
        return self._rebalancing.look(step, total, placement(), loads_LE(), seconds)

    def step_over(
        self, step: int, placement: Callable[[], ExpertPlacement], loads_LE: Callable[[], Loads]
    ) -> None:
        if self._rebalancing is not None:
            self._rebalancing.clock.step_over()
        if self._collection is not None:
            self._collection.step_over()
        if self._reporter is not None:
            self._reporter.step_over(step, placement, loads_LE)

    def close(self) -> None:
        if self._rebalancing is not None:
            self._rebalancing.clock.close()
        if self._collection is not None:
            self._collection.close()


def _is_first_of_node(plan: IncarnationPlan, rank: int) -> bool:
    return plan.node_of.index(plan.node_of[rank]) == rank


# -- garbage collection ------------------------------------------------------------------------------


def make_room(node: LocalNode, settings: JobSettings, started: Started, rank: int) -> None:
    """Free memory that no incarnation needs, before this one allocates its own. To be called when all
    ranks have loaded their state.
    """
    if node.folder is None or node.endpoint is None or not _is_first_of_node(started.plan, rank):
        return
    chosen = -1 if started.chosen is None else started.chosen.world
    runs = unneeded_runs(node.folder, settings.job, settings.run, chosen)
    if runs:
        _forget(node.endpoint, settings.job, runs)


def unneeded_runs(folder: Path, job: str, run: str, chosen: int) -> list[str]:
    """The runs of incarnations that may be freed while another one begins.

    Two are kept: ``chosen``, from which it continues (-1: none), and the newest whose replicas were
    complete. The state of the first may be parked in one place only; its loss must not lose
    what was promised before.
    """
    floors: dict[int, int] = {}
    for number, file in incarnation_files(folder, job, run):
        # Replicas and parked states have no floor.
        own = file.path.suffix == FILE_ENDS["snapshots"]
        floors[number] = max(floors.get(number, -1), file.ring_hint.floor if own else -1)
    promised = max((number for number, floor in floors.items() if floor >= 0), default=-1)
    return [run_of_incarnation(run, one) for one in sorted(floors) if one not in (chosen, promised)]


def floor_of(folder: Path, job: str, run: str, rank: int) -> int:
    """The newest iteration at which every rank of a run has all its replicas, according to this rank's
    daemon; -1: none.
    """
    found = -1
    for path in folder.glob(f"{job}~{run}~r{rank}~g*{FILE_ENDS['snapshots']}"):
        try:
            found = max(found, SlotFile(path, "snapshots").ring_hint.floor)
        except (OSError, SegmentError) as error:
            logger.info("%s has no floor: %s", path.name, error)
    return found


def _forget(find_endpoint: Callable[[], str], job: str, runs: Sequence[str]) -> None:
    """Free this node's memory of these runs; if the daemon cannot, it expires."""
    try:
        with connect(find_endpoint(), _TIMEOUT_S) as client:
            for run in runs:
                _forget_one(client, job, run)
    except (RequestTimeout, WireError, DaemonUnavailable, OSError) as error:
        logger.warning("memory of earlier incarnations is not freed: %s; it expires by itself", error)


def _forget_one(client: ControlClient, job: str, run: str) -> None:
    try:
        client.ask(Forget(job, run), Done)
        logger.info("this node's memory of %s is freed", run)
    except RefusedError as error:  # others may be freed all the same
        logger.warning("the memory of %s is not freed: %s; it expires by itself", run, error)


class GarbageCollection:
    """Frees this node's memory of earlier incarnations; one rank of each node does so.

    Args:
        number: of the present incarnation.
        start: its first iteration: the earlier ones are unneeded once every rank has a newer
            state with all its replicas.
    """

    def __init__(
        self,
        find_endpoint: Callable[[], str],
        folder: Path,
        job: str,
        run: str,
        number: int,
        start: int,
        rank: int,
    ) -> None:
        self._find_endpoint, self._folder = find_endpoint, folder
        self._job, self._run, self._number, self._start, self._rank = job, run, number, start, rank
        self._looked = 0
        self._thread: threading.Thread | None = None
        self.over = not self.earlier()

    def earlier(self) -> list[str]:
        """The runs of earlier incarnations that have files here."""
        numbers = {number for number, _ in incarnation_files(self._folder, self._job, self._run)}
        return [run_of_incarnation(self._run, one) for one in sorted(numbers) if one < self._number]

    def step_over(self) -> None:
        """Look at some steps whether they are unneeded; a thread frees them."""
        self._looked += 1
        if self._looked % _LOOK_STEPS == 0:
            self._look()

    def close(self) -> None:
        """Look once more, and wait for the thread."""
        self._look()
        if self._thread is not None:
            self._thread.join(_TIMEOUT_S)

    def _look(self) -> None:
        if self.over:
            return
        run = run_of_incarnation(self._run, self._number)
        if floor_of(self._folder, self._job, run, self._rank) > self._start:
            self.over = True
            self._thread = threading.Thread(target=self._forget, name="ckptd-retire", daemon=True)
            self._thread.start()

    def _forget(self) -> None:
        _forget(self._find_endpoint, self._job, self.earlier())


# -- rebalancing -------------------------------------------------------------------------------------


class _LayerClock:
    """The time of the layers' forwards, which includes waiting for the busiest rank."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._began_s = 0.0
        self._spent_s = 0.0
        self._steps = 0
        self._handles = [layer.register_forward_pre_hook(self._begins) for layer in layers]
        self._handles += [layer.register_forward_hook(self._ended) for layer in layers]

    def step_over(self) -> None:
        self._steps += 1

    def take_s(self) -> float:
        """The mean time of a step in the layers since the last call: backward takes about twice as
        long as forward.
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


class _Measured(msgspec.Struct, frozen=True):
    """A rank's measurements, in seconds."""

    now_s: float
    expert_s: float
    move_s: float


class Rebalancing:
    """Drives `PlacementTimes` in one incarnation, whose nodes stay: others are the launcher's affair.

    Args:
        layers: whose forwards are timed.
    """

    def __init__(
        self,
        plan: IncarnationPlan,
        settings: JobSettings,
        config: TimesConfig,
        layers: Sequence[ElasticExperts],
        ranks: Collectives,
    ) -> None:
        self._cluster, self._placement, self._ranks = plan.cluster, settings.placement, ranks
        self.clock = _LayerClock(layers)
        self._times = PlacementTimes(
            config,
            plan.nodes,
            plan.cluster,
            num_experts=settings.layers.num_experts,
            step=plan.start,
        )

    def look(
        self,
        step: int,
        total: int,
        placement: ExpertPlacement,
        loads_LE: Loads,
        seconds: Mapping[str, float],
    ) -> str | None:
        """The reason to place experts anew before this step, or None. A collective call at the steps
        that `PlacementTimes` chooses.

        Args:
            placement: of the experts now.
            seconds: durations of the last start: the next one costs about as much.
        """
        if not self._times.wants_forecast(step):
            return None
        move_s = sum(seconds.get(name, 0.0) for name in ("start_s", "load_s", "attach_s"))
        mine = _Measured(time.monotonic(), self.clock.take_s(), move_s)
        measured = self._ranks.gather(mine, _Measured)
        allocation = allocate(loads_LE, self._cluster, self._placement.threshold)
        bound = self._placement.max_straggler
        better = place(allocation, loads_LE, self._cluster, max_straggler=bound).placement
        forecast = Forecast(
            max(one.expert_s for one in measured),
            straggler_factor(placement, loads_LE, self._cluster),
            straggler_factor(better, loads_LE, self._cluster),
            total - step,
            max(one.move_s for one in measured),
        )
        decision = self._times.handle(StepDone(step, forecast), now_s=measured[0].now_s)
        return decision.reason if decision.action is Action.PLACE else None
