"""``ReroutedTraining``: pipelines train on while workers die and come back, with an undisturbed job's bits.

Every iteration runs a plan (`ckptd.core.reroute`) that all workers compute alike from who is missing. If one
dies, the host tells the others (``python -m ckptd.host --reroute``). They

1. leave the iteration, and connect anew without the dead one;
2. roll back to the same iteration's top. Optimizers' steps are staggered, so one worker may have made a step
   that another cannot make any more. It is one step at most: before a step each worker has heard from all
   that they have made the one before. So each keeps a copy of what it had before its last step;
3. plan, and go on. Whatever fails meanwhile begins the same anew.

A worker that comes back takes the state of its stage from another pipeline, between two iterations.

After ``protect`` one worker of each stage captures it (`ckptd.client.rerouting.stage_snapshots`). A stage
without a worker, or the whole job, comes back from that.

Source: SlipStream (arXiv:2405.14009), of which the abstract was available: what is here is our own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from ckptd.client.capture.step_state import Stateful
from ckptd.client.checkpointer import Checkpointer
from ckptd.client.log_lines import get_logger
from ckptd.client.options import DaemonOptions, RunOptions, SnapshotOptions
from ckptd.client.pipeline.rerouted_stage import MicroBatch, ReroutedStage
from ckptd.client.rerouting.epoch_group import OF_CALLS, EpochGroup, EpochSeat
from ckptd.client.rerouting.stage_snapshots import StageSnapshots, checked_options
from ckptd.client.rerouting.stage_state import StageState, check_not_tied
from ckptd.client.rng_state import capture_rng, restore_rng
from ckptd.core.reroute.pipeline_grid import PipelineGrid, Worker
from ckptd.core.reroute.reroute_plan import ReroutePlan, plan_reroute
from ckptd.errors import ElasticError
from ckptd.progress_page import inherited_page
from ckptd.restart_line import EndLoop, NextEpoch

logger = get_logger(__name__)

_UNKNOWN = -1  # the iterations of a worker that has no state yet: it has come back, or the job begins
_SIZE, _STATE = 0, 1  # tags


class _Told(NamedTuple):
    """What a worker says of itself at an epoch's begin.

    Attributes:
        done: iterations; `_UNKNOWN`: it has no state.
        stepped: it has made a step in this life.
        captured: it captured its stage in the epoch before.
    """

    done: int
    stepped: bool
    captured: bool


class ReroutedTraining:
    """The loop of one worker of a grid of pipelines. Rank r has stage r % P of pipeline r // P.

    The process needs no process group of its own; the constructor makes one of this process alone if there
    is none, because torch's stages ask for one.

    Args:
        module: of this worker's stage, on the CPU.
        optimizer: of its parameters. After a return to an earlier state it is as it was, so it may have no
            hidden state beside ``state`` and ``param_groups``.
        grid: with nobody missing.
        examples: of what the stage gets and of what it returns for a micro-batch (``input_args`` and
            ``output_args`` of torch's stage).
        loss_fn: of the last stage's output and a target.
        state: what changes with iterations beside module and optimizer, the same in all pipelines, such as a
            schedule of learning rates.
        seed: of random numbers in forwards; the same on all ranks.
        plan: of a grid with missing workers; the same on all ranks.
    Attributes:
        stage: torch's.
        done: iterations; negative: this worker has no state yet.
    Raises:
        ValueError: there is no host with ``--reroute``, the number of ranks is not that of the grid's
            workers, or as `ReroutedStage`.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        grid: PipelineGrid,
        *,
        examples: tuple[Any, Any],
        loss_fn: Callable[[Any, Any], Tensor],
        state: Mapping[str, Stateful] | None = None,
        seed: int = 0,
        plan: Callable[[PipelineGrid], ReroutePlan] = plan_reroute,
    ) -> None:
        self._seat = seat = EpochSeat()
        self.rank, stages = seat.rank, grid.stages
        if grid.pipelines * stages != seat.world_size:
            raise ValueError(f"{grid.pipelines} pipelines of {stages} stages are not {seat.world_size} ranks")
        if grid.failed:
            raise ValueError(f"{len(grid.failed)} workers are missing in the grid: pass one with all of them")
        self._grid = grid
        self._plan_of, self._plans = plan, dict[frozenset[int], ReroutePlan]()
        _be_in_a_group()
        index = self.rank % stages
        stage = PipelineStage(module, index, stages, torch.device("cpu"), *examples)
        ranks = [[d * stages + s for s in range(stages)] for d in range(grid.pipelines)]
        self.stage = stage
        self._runner = ReroutedStage(stage, ranks, loss_fn, seed=seed, me=self.rank)
        self._state, self._optimizer = StageState(module, optimizer, state), optimizer
        self._agreed = seat.first_epoch
        self._top: dict[str, Any] | None = None  # generators
        self._before: tuple[dict[str, Any], dict[str, Any]] | None = None  # the last step: state, generators
        self._begun, self._stepped, self._total = False, False, 0
        self._trained = module, optimizer, state
        self._snapshots: StageSnapshots | None = None
        self._captors: list[int] = []  # by stage
        self._again = False  # one of them should start again
        self._page = inherited_page()
        self.done = 0 if seat.first_epoch == 0 else _UNKNOWN
        seat.take()
        self._line = seat.line

    def protect(
        self,
        run: str | RunOptions | None = None,
        *,
        daemon: str | DaemonOptions | None = "auto",
        snapshots: SnapshotOptions = SnapshotOptions(policy="dense"),
    ) -> None:
        """Take snapshots, whoever is missing; a job that is started again goes on from them.

        Call it once, before ``iterations``, on all ranks with the same arguments, which are those of
        `Checkpointer`. ``daemon=None``: do nothing.

        Raises:
            ValueError: something cannot be captured, or combined; says what to pass.
            TypeError: an argument is of another type.
        """
        options = checked_options(run, daemon, snapshots)
        if self._snapshots is not None or self._begun:
            raise ValueError("protect() comes once, before iterations()")
        if options is None:
            return
        module, optimizer, state = self._trained
        self._snapshots = StageSnapshots(
            module,
            optimizer,
            state,
            options,
            stage=self.stage.stage_index,
            stages=self._grid.stages,
        )
        self.done = _UNKNOWN  # until all know where the snapshots end

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks whose work others do now."""
        return tuple(sorted(self._seat.absent))

    @property
    def checkpointer(self) -> Checkpointer | None:
        """Of this worker, while it captures its stage: for its counters."""
        return None if self._snapshots is None else self._snapshots.checkpointer

    def iterations(
        self,
        total: int,
        inputs: Callable[[int, int, int], tuple[Any, ...]],
        targets: Callable[[int, int, int], Any],
    ) -> Iterator[tuple[int, dict[MicroBatch, Tensor]]]:
        """Train; after each step, the iteration's number and the losses that this worker has computed.

        An iteration may come once more, after a loss or a return: then the later one counts, and is the
        same. All workers leave the loop when all have done all iterations. With snapshots, a job that is
        started again begins at the newest iteration of which each stage has one (`protect`).

        Args:
            total: iterations.
            inputs, targets: of an iteration, a pipeline and a micro-batch, whoever asks; called by the first
                and the last stage.
        Yields:
            Number, and losses by (pipeline, micro-batch); none but on the last stage.
        Raises:
            ElasticError: a stage has no worker left.
            RuntimeError: of gloo, if no loss of another worker explains it; the worker should end.
            ValueError: an embedding is tied over stages (`check_not_tied`).
            ValueError, CkptdError: of the start with snapshots, as `Checkpointer`.
        """
        self._begun, self._total = True, total
        try:
            yield from self._iterations(inputs, targets)
        finally:
            if self._snapshots is not None:
                self._snapshots.leave()
            self._is_between_iterations()

    def _iterations(
        self,
        inputs: Callable[[int, int, int], tuple[Any, ...]],
        targets: Callable[[int, int, int], Any],
    ) -> Iterator[tuple[int, dict[MicroBatch, Tensor]]]:
        self._enter(None)
        while True:
            if self.done == self._total:
                if self._snapshots is not None:
                    self._snapshots.finish()
                self._is_between_iterations()
                self._line.say("finished")
                news = self._line.next_epoch()
                if isinstance(news, EndLoop):
                    return
                self._enter(news)
                continue
            try:
                losses = self._iterate(inputs, targets)
            except OF_CALLS as error:
                self._enter(self._seat.epoch_after(error))
                continue
            yield self.done - 1, losses
            if self._agreed > self._line.epoch:  # all know of it, and are here
                self._enter(self._line.next_epoch())
            elif self._again and self._snapshots is not None:  # the same holds for this
                try:
                    self._snapshots.leave()
                    self._snapshots.go_on(self._seat.group, self._captors, self.done, self._total)
                except OF_CALLS as error:
                    self._enter(self._seat.epoch_after(error))

    def _enter(self, news: NextEpoch | EndLoop | None) -> None:
        self._is_between_iterations()
        self._seat.enter(news, self._settle)

    def _is_between_iterations(self) -> None:
        """The host waits for none to end."""
        if self._page is not None:
            self._page.left(self.done)

    def _iterate(
        self,
        inputs: Callable[[int, int, int], tuple[Any, ...]],
        targets: Callable[[int, int, int], Any],
    ) -> dict[MicroBatch, Tensor]:
        if self._snapshots is not None:
            self._snapshots.top(self.done)
            self._snapshots.forward_begins()
        if self._page is not None and self.checkpointer is None:  # which shows the host its steps
            self._page.begins(self.done)
        self._top = capture_rng()
        self._runner.begin(self.done)
        again = self._snapshots is not None and self._snapshots.waits
        told, everyone = self._seat.group.begin_gather([self._line.heard(), again])
        losses = self._runner.run(
            self._plan(), partial(inputs, self.done), partial(targets, self.done), epoch=self._line.epoch
        )
        self._seat.group.finish(told)  # so all have made the step before this one
        self._agreed = max(int(newest) for newest, _ in everyone)
        self._again = any(bool(waits) for _, waits in everyone)
        before = self._state.copy(), self._top
        self._stepped = True
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._before, self._top = before, None
        self.done += 1
        return losses

    def _plan(self) -> ReroutePlan:
        absent = self._seat.absent
        if absent not in self._plans:
            plan = self._plan_of(self._grid_now)
            logger.info("rank %d: iteration %d: %s", self.rank, self.done, plan.reason)
            self._plans[absent] = plan
        return self._plans[absent]

    @property
    def _grid_now(self) -> PipelineGrid:
        return replace(self._grid, failed=frozenset(self._worker(rank) for rank in self._seat.absent))

    def _worker(self, rank: int) -> Worker:
        return Worker(*divmod(rank, self._grid.stages))

    # -- from one epoch to the next ---------------------------------------------------------------

    def _settle(self, group: EpochGroup) -> None:
        """All come to the same iteration's top, and those that have no state get their stage's."""
        self._agreed = self._line.epoch
        snapshots = self._snapshots
        if snapshots is not None:
            snapshots.leave()  # before another worker captures this stage
        self._runner.use(group.group, group.numbers, group.finish)
        told = self._tell(group)
        if not self._seat.absent and all(each.done <= 0 for each in told.values()):  # as the job begins
            begin, stages = self.rank - self.rank % self._grid.stages, self._grid.stages
            check_not_tied(self._trained[0], partial(group.exchange, ranks=range(begin, begin + stages)))
        if snapshots is None:
            self._come_to_one_top(group, told)
            return
        snapshots.agree_on_names(group)
        if self._lost_stages(_with_state(told)) and not any(each.stepped for each in told.values()):
            self._check_stages(told)
            self._restore(group, snapshots, sorted(told))
            self._come_to_one_top(group, self._tell(group))
            return
        top = self._come_to_one_top(group, told)
        # Whoever captured before has the snapshots on its node.
        first = [rank for rank in _with_state(told) if told[rank].captured]
        self._captors = self._one_of_each_stage([*first, *_with_state(told)])
        snapshots.go_on(group, self._captors, top, self._total)

    def _tell(self, group: EpochGroup) -> dict[int, _Told]:
        """What all say of themselves, by rank; a collective call."""
        captured = self._snapshots is not None and self._snapshots.captured
        found = group.gather([self.done, self._stepped, captured])
        return {rank: _Told(done, bool(stepped), bool(had)) for rank, (done, stepped, had) in found.items()}

    def _restore(self, group: EpochGroup, snapshots: StageSnapshots, present: Sequence[int]) -> None:
        """Begin where the snapshots of all stages end; the other workers of each stage have no state then."""
        self.done, self._top, self._before = _UNKNOWN, None, None
        captors = self._one_of_each_stage(present)
        if self.rank in captors:
            self.done = snapshots.restore(group, captors, self._total)
        else:
            snapshots.captured = False

    def _one_of_each_stage(self, ranks: Sequence[int]) -> list[int]:
        """Of each stage, the first of these."""
        stages = range(self._grid.stages)
        return [next(rank for rank in ranks if self._worker(rank).stage == stage) for stage in stages]

    def _come_to_one_top(self, group: EpochGroup, told: Mapping[int, _Told]) -> int:
        """To that of the worker that has done the fewest iterations; returns its number."""
        keepers = _with_state(told)
        self._check_stages(keepers)
        top = min(told[rank].done for rank in keepers)
        if self.done != _UNKNOWN:
            self._roll_back(top)
        for rank in sorted(told.keys() - set(keepers)):
            keeper = next(k for k in keepers if self._worker(k).stage == self._worker(rank).stage)
            if self.rank == keeper:
                packed = self._state.pack()
                group.send(torch.tensor([len(packed)]), rank, _SIZE)
                group.send(packed, rank, _STATE)
            elif self.rank == rank:
                self._take_state(group, keeper)
                self.done = top
                logger.info("rank %d: has its state from rank %d: iteration %d", rank, keeper, top)
        if top > self._total:
            raise ValueError(
                f"the snapshots of this run reach iteration {top}, beyond total={self._total}; pass run= a "
                "new name to start over"
            )
        return top

    def _check_stages(self, keepers: Iterable[int]) -> None:
        if self._lost_stages(keepers):
            reason = plan_reroute(self._grid_with(keepers)).reason
            self._line.say("recover", reason)
            raise ElasticError(reason, operation="reroute", hint="start the job again, from snapshots")

    def _lost_stages(self, ranks: Iterable[int]) -> bool:
        """Whether these leave out a stage."""
        return bool(self._grid_with(ranks).lost_stages)

    def _grid_with(self, ranks: Iterable[int]) -> PipelineGrid:
        without = frozenset(range(self._grid.pipelines * self._grid.stages)) - set(ranks)
        return replace(self._grid, failed=frozenset(map(self._worker, without)))

    def _roll_back(self, top: int) -> None:
        """To what this worker had before the step of iteration ``top``; and no half iteration."""
        if self.done > top:
            assert self._before is not None, "a step was made, and nothing kept of the time before"
            assert self.done == top + 1, f"{self.done - top} steps ahead of another worker"
            state, self._top = self._before
            self._state.restore(state)
            self.done, self._before = top, None
            logger.info("rank %d: its step of iteration %d does not count", self.rank, top)
        if self._top is not None:
            restore_rng(self._top)
        self._optimizer.zero_grad()

    def _take_state(self, group: EpochGroup, keeper: int) -> None:
        size = torch.zeros(1, dtype=torch.int64)
        group.receive(size, keeper, _SIZE)
        packed = torch.zeros(int(size), dtype=torch.uint8)
        group.receive(packed, keeper, _STATE)
        self._state.unpack(packed)


def _with_state(told: Mapping[int, _Told]) -> list[int]:
    return [rank for rank, each in sorted(told.items()) if each.done != _UNKNOWN]


def _be_in_a_group() -> None:
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
