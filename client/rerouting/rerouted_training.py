"""``ReroutedTraining``: pipelines train on while workers die and come back, with an undisturbed job's bits.

Every iteration runs a plan (`ckptd.core.reroute`) that all workers compute alike from who is missing. If one
dies, the host tells the others (``python -m ckptd.host --reroute``). They

1. leave the iteration, and connect anew without the dead one;
2. roll back to the same iteration's top. Optimizers' steps are staggered, so one worker may have made a step
   that another cannot make any more. It is one step at most: before a step each worker has heard from all
   that they have made the one before. So each keeps a copy of what it had before its last step;
3. plan, and go on. Whatever fails meanwhile begins the same anew.

A worker that comes back takes the state of its stage from another pipeline, between two iterations.

Source: SlipStream (arXiv:2405.14009), of which the abstract was available: what is here is our own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from ckptd.client.capture.step_state import Stateful
from ckptd.client.log_lines import get_logger
from ckptd.client.pipeline.rerouted_stage import MicroBatch, ReroutedStage
from ckptd.client.rerouting.epoch_group import EpochGroup, EpochLine, Interrupted, meet
from ckptd.client.rerouting.stage_state import StageState
from ckptd.client.rng_state import capture_rng, restore_rng
from ckptd.core.reroute.pipeline_grid import PipelineGrid, Worker
from ckptd.core.reroute.reroute_plan import ReroutePlan, plan_reroute
from ckptd.errors import ElasticError
from ckptd.restart_line import EPOCH_VARIABLE, EndLoop, NextEpoch, epoch_and_absent, inherited_line

__all__ = ["ReroutedTraining"]

logger = get_logger(__name__)

# What a call raises if another worker has died; and for how long the reason may be unknown. On another
# machine it is known after CKPTD_HOST_SILENCE_S.
_OF_CALLS = (RuntimeError, OSError, Interrupted)
_REASON_S = 20.0
_TIMEOUT_S = 1800.0  # of connecting, and of each message, as in torch
_UNKNOWN = -1  # the iterations of a worker that has come back: it has no state yet
_SIZE, _STATE = 0, 1  # tags


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
        done: iterations; negative: it is back, and has no state yet.
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
        line, place = inherited_line(), os.environ.get(EPOCH_VARIABLE, "")
        if line is None or not place:
            raise ValueError(
                "this process has no host that would tell it of lost workers: start it with "
                "python -m ckptd.host --reroute script.py"
            )
        self.rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        stages = grid.stages
        if grid.pipelines * stages != world_size:
            raise ValueError(f"{grid.pipelines} pipelines of {stages} stages are not {world_size} ranks")
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
        epoch, self._absent = epoch_and_absent(place)
        self._agreed = epoch
        self._top: dict[str, Any] | None = None  # generators
        self._before: tuple[dict[str, Any], dict[str, Any]] | None = None  # the last step: state, generators
        self.done = 0 if epoch == 0 else _UNKNOWN
        self._group = EpochGroup(self.rank)
        self._line = EpochLine(line, epoch)

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks whose work others do now."""
        return tuple(sorted(self._absent))

    def iterations(
        self,
        total: int,
        inputs: Callable[[int, int, int], tuple[Any, ...]],
        targets: Callable[[int, int, int], Any],
    ) -> Iterator[tuple[int, dict[MicroBatch, Tensor]]]:
        """Train; after each step, the iteration's number and the losses that this worker has computed.

        An iteration may come once more, after a loss or a return: then the later one counts, and is the
        same. All workers leave the loop when all have done all iterations.

        Args:
            total: iterations.
            inputs, targets: of an iteration, a pipeline and a micro-batch, whoever asks; called by the first
                and the last stage.
        Yields:
            Number, and losses by (pipeline, micro-batch); none but on the last stage.
        Raises:
            ElasticError: a stage has no worker left.
            RuntimeError: of gloo, if no loss of another worker explains it; the worker should end.
        """
        self._enter(None)
        while True:
            if self.done == total:
                self._line.say("finished")
                news = self._line.next_epoch()
                if isinstance(news, EndLoop):
                    return
                self._enter(news)
                continue
            try:
                losses = self._iterate(inputs, targets)
            except _OF_CALLS as error:
                self._enter(self._epoch_after(error))
                continue
            yield self.done - 1, losses
            if self._agreed > self._line.epoch:  # all know of it, and are here
                self._enter(self._line.next_epoch())

    def _iterate(
        self,
        inputs: Callable[[int, int, int], tuple[Any, ...]],
        targets: Callable[[int, int, int], Any],
    ) -> dict[MicroBatch, Tensor]:
        self._top = capture_rng()
        self._runner.begin(self.done)
        told, everyone = self._group.begin_gather([self._line.heard()])
        losses = self._runner.run(
            self._plan(), partial(inputs, self.done), partial(targets, self.done), epoch=self._line.epoch
        )
        told.wait()  # so all have made the step before this one
        self._agreed = max(int(newest) for newest in everyone)
        before = self._state.copy(), self._top
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._before, self._top = before, None
        self.done += 1
        return losses

    def _plan(self) -> ReroutePlan:
        if self._absent not in self._plans:
            plan = self._plan_of(self._grid_now)
            logger.info("rank %d: iteration %d: %s", self.rank, self.done, plan.reason)
            self._plans[self._absent] = plan
        return self._plans[self._absent]

    @property
    def _grid_now(self) -> PipelineGrid:
        return replace(self._grid, failed=frozenset(self._worker(rank) for rank in self._absent))

    def _worker(self, rank: int) -> Worker:
        return Worker(*divmod(rank, self._grid.stages))

    # -- from one epoch to the next ---------------------------------------------------------------

    def _epoch_after(self, error: BaseException) -> NextEpoch:
        """The epoch that begins because of what has caused this error, too; else the error is raised."""
        news = self._line.next_epoch(_REASON_S)
        if not isinstance(news, NextEpoch):
            raise error
        return news

    def _enter(self, news: NextEpoch | EndLoop | None) -> None:
        """Take part in an epoch, or in a later one; None: the one that this process began with."""
        while True:
            if news is not None:
                logger.info("rank %d: epoch %d", self.rank, self._line.epoch)
                _, self._absent = epoch_and_absent(os.environ[EPOCH_VARIABLE])
                self._group = EpochGroup(self.rank)
            if self.rank in self._absent:  # the others do not know yet that this worker is back
                news = self._line.next_epoch()
                continue
            present = sorted(set(range(self._grid.pipelines * self._grid.stages)) - self._absent)
            try:
                self._group = meet(self._line, self.rank, present, _TIMEOUT_S)
                self._settle()
                return
            except _OF_CALLS as error:
                news = self._epoch_after(error)

    def _settle(self) -> None:
        """All come to the same iteration's top, and those that are back get their state."""
        self._agreed = self._line.epoch
        self._runner.use(self._group.group, self._group.numbers)
        done = {rank: number for rank, (number,) in self._group.gather([self.done]).items()}
        keepers = {rank: number for rank, number in done.items() if number != _UNKNOWN}
        self._check_stages(keepers)
        top = min(keepers.values())
        if self.done != _UNKNOWN:
            self._roll_back(top)
        for rank in sorted(done.keys() - keepers.keys()):
            keeper = next(k for k in sorted(keepers) if self._worker(k).stage == self._worker(rank).stage)
            if self.rank == keeper:
                packed = self._state.pack()
                self._group.send(torch.tensor([len(packed)]), rank, _SIZE)
                self._group.send(packed, rank, _STATE)
            elif self.rank == rank:
                self._take_state(keeper)
                self.done = top
                logger.info("rank %d: has its state from rank %d: iteration %d", rank, keeper, top)

    def _check_stages(self, keepers: Iterable[int]) -> None:
        without = frozenset(range(self._grid.pipelines * self._grid.stages)) - set(keepers)
        plan = replace(self._grid, failed=frozenset(map(self._worker, without)))
        if plan.lost_stages:
            reason = plan_reroute(plan).reason
            self._line.say("recover", reason)
            raise ElasticError(reason, operation="reroute", hint="start the job again, from snapshots")

    def _roll_back(self, top: int) -> None:
        """To what this worker had before the step of iteration ``top``, if it has made that; and no half
        iteration."""
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

    def _take_state(self, keeper: int) -> None:
        size = torch.zeros(1, dtype=torch.int64)
        self._group.receive(size, keeper, _SIZE)
        packed = torch.zeros(int(size), dtype=torch.uint8)
        self._group.receive(packed, keeper, _STATE)
        self._state.unpack(packed)


def _be_in_a_group() -> None:
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
