"""Snapshots of a grid of pipelines: one worker of each stage captures it, and another one if that is lost.

All workers of a stage hold the same state, to the bit. So the ranks of the run, as daemons and recoveries
know it, are the *stages*: rank s of P is whichever worker captures stage s now. An iteration is complete when
each stage was captured once, by whomever; that two workers capture the same iteration of a stage, one after
the other, makes no difference. So nothing of the agreement on what is complete, of replication, storage and
recovery knows of re-routing, and D may be another number in the next start.

With each epoch of the job the workers that capture start anew (`Checkpointer`), together: only then is it
known who is there. The run goes on from the newest iteration that is complete, as after a failure, but
nothing is loaded: the live state is whole. If a worker dies meanwhile, the next epoch begins the same anew.
If the start fails, training goes on without snapshots, and all start again later, between two iterations.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import msgspec
import torch
from torch import nn

from ckptd.client.capture.program import Program, this_program
from ckptd.client.capture.step_state import Stateful
from ckptd.client.checkpointer import Checkpointer
from ckptd.client.daemon_link.rank_memory import RankMemory
from ckptd.client.log_lines import get_logger
from ckptd.client.options import (
    CheckpointerOptions,
    DaemonOptions,
    LayoutOptions,
    OptionGroups,
    RecoveryOptions,
    RunOptions,
    SnapshotOptions,
    check_keywords,
    daemon_options,
    run_options,
)
from ckptd.client.phase_clock import PhaseClock
from ckptd.client.ranks.job_link import JobLink, use_job_link
from ckptd.client.rerouting.epoch_group import EpochGroup
from ckptd.client.training_state import examine
from ckptd.errors import CkptdError

logger = get_logger(__name__)

# A replay would need an iteration of all pipelines with some operators frozen; attributes of modules are not
# among what a worker that comes back gets.
_RECOVERY = RecoveryOptions(verify_iterations=0, rehearse=False, park=False)
_LAYOUT = LayoutOptions(attributes=False)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 300.0  # between starts that fail; each may hold up training


def checked_options(
    run: str | RunOptions | None,
    daemon: str | DaemonOptions | None,
    snapshots: SnapshotOptions,
) -> CheckpointerOptions | None:
    """The options of `ReroutedTraining.protect`; None: off.

    Raises:
        ValueError: says what cannot be combined, and what to pass.
        TypeError: an argument is of another type.
    """
    given = OptionGroups(run=run, daemon=daemon, snapshots=snapshots, recovery=_RECOVERY, layout=_LAYOUT)
    check_keywords("protect()", given)
    if daemon_options(daemon).off:
        return None
    if not snapshots.dense or not isinstance(snapshots.every, int):
        raise ValueError(
            f"policy={snapshots.policy!r}, every={snapshots.every!r}: snapshots of re-routed pipelines are "
            "dense, since no iteration is replayed with some operators frozen: pass "
            "snapshots=SnapshotOptions(policy='dense', every=N), N a number of iterations"
        )
    if snapshots.to_peers != "state":
        raise ValueError(
            f"to_peers={snapshots.to_peers!r}: the worker that captures next has no snapshot before that a "
            "peer could compute from; pass to_peers='state'"
        )
    named = run_options(run)
    if named.rank is not None or named.world_size is not None:
        raise ValueError(
            f"rank={named.rank}, world_size={named.world_size}: the ranks of the run are the stages, which "
            "ReroutedTraining numbers; pass run=RunOptions(name=..., job=...) alone"
        )
    return CheckpointerOptions.of(given)


class StageSnapshots:
    """This worker's part in the snapshots of its stage.

    Args:
        state: what changes with iterations beside module and optimizer.
        stage: this worker's, of ``stages``.
    Attributes:
        captured: this worker captured its stage in the last epoch.
        checkpointer: that of this worker, if it captures now.
    Raises:
        ValueError: something cannot be captured; says what.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, Stateful] | None,
        options: CheckpointerOptions,
        *,
        stage: int,
        stages: int,
    ) -> None:
        self._trained = module, optimizer, dict(state or {})
        run = replace(options.run, rank=stage, world_size=stages)
        self._options, self._stage, self._stages = replace(options, run=run), stage, stages
        subject = examine(module, optimizer, self._trained[2], self._options)
        self._program = this_program(subject.binding, subject.stateful)
        named = subject.identity
        self._names, self._chosen, self._agreed = (named.job, named.run), not named.origin, False
        self._steps: Generator[int, None, None] | None = None
        self._next, self._total = 0, 0
        self._pause_s, self._again_s = _FIRST_PAUSE_S, math.inf
        self.captured = False
        self.checkpointer: Checkpointer | None = None

    def leave(self) -> None:
        """What was captured is whole and stays; whoever captures next comes to the same run."""
        with ExitStack() as closing:
            closing.callback(use_job_link, None)
            if self.checkpointer is not None:
                closing.callback(self.checkpointer.close)
            if self._steps is not None:
                closing.callback(self._steps.close)
            self._steps = self.checkpointer = None
            self._again_s = math.inf

    def agree_on_names(self, group: EpochGroup) -> None:
        """All workers know the run by the same names, wherever their scripts lie; a collective call.

        Raises:
            ValueError: they were given different ones.
        """
        mine = [*self._names, self._chosen, self._agreed]
        told = group.exchange(msgspec.msgpack.encode(mine), sorted(group.numbers))
        heard = [msgspec.msgpack.decode(each, type=tuple[str, str, bool, bool]) for each in told]
        job, run, _, _ = next((one for one in heard if one[3]), heard[0])
        for rank, (other_job, other_run, chosen, _) in zip(sorted(group.numbers), heard, strict=True):
            if chosen and (other_job, other_run) != (job, run):
                raise ValueError(
                    f"rank {rank} is of job {other_job}, run {other_run}, and others are of job {job}, run "
                    f"{run}: pass all ranks the same run=RunOptions(name=..., job=...)"
                )
        self._names, self._agreed = (job, run), True

    def restore(self, group: EpochGroup, ranks: Sequence[int], total: int) -> int:
        """Begin where the run was, or at its beginning; a collective call of those that capture.

        Args:
            ranks: by stage, who captures it.
            total: iterations.
        Returns:
            The iteration to run next. Its snapshot is there, or has begun.
        Raises:
            ValueError, CkptdError: as `Checkpointer`.
        """
        self.captured = True
        self.checkpointer = found = Checkpointer(*self._trained, **self._begin(group, ranks))
        reached = found.resumed_from or 0
        if reached <= total:
            self._follow(found, reached, total)
            self.top(reached)  # now: the stage's other workers get the generators of this top, too
        return reached

    def go_on(self, group: EpochGroup, ranks: Sequence[int], top: int, total: int) -> None:
        """Go on capturing, in the live state of iteration ``top``; a collective call of those that capture.

        Training does not depend on it: if it fails, an error is logged, and `waits` says when to try again.
        """
        self.captured = ranks[self._stage] == group.rank
        if not self.captured:
            return
        try:
            found = _GoingOn(*self._trained, self._begin(group, ranks), top=top, program=self._program)
        except (CkptdError, ValueError) as error:
            use_job_link(None)
            self._again_s = time.monotonic() + self._pause_s
            text = (
                "stage %d is not captured: %s; trying again in %.0f s, or when workers are lost or come back"
            )
            logger.error(text, self._stage, error, self._pause_s)
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            return
        self.checkpointer, self._pause_s = found, _FIRST_PAUSE_S
        self._follow(found, found.begins, total)

    @property
    def waits(self) -> bool:
        """Whether this worker should start to capture again, which all that capture do together."""
        return time.monotonic() >= self._again_s

    def top(self, iteration: int) -> None:
        """The top of an iteration: it is captured here, unless it was before."""
        if self._steps is not None and iteration == self._next:
            self._next += 1
            next(self._steps, None)  # none after the last: its top alone

    def forward_begins(self) -> None:
        """The iteration begins. What a snapshot takes of the generators then is not of a micro-batch."""
        if self.checkpointer is not None:
            with self.checkpointer.forward():
                pass

    def finish(self) -> None:
        """All iterations are done: capture the last state, too."""
        self.top(self._total)

    def _begin(self, group: EpochGroup, ranks: Sequence[int]) -> OptionGroups:
        """From here on the workers that capture are the ranks of the run."""
        use_job_link(JobLink(self._stages, lambda payload: group.exchange(payload, ranks), group.store))
        job, run = self._names
        return replace(self._options, run=replace(self._options.run, job=job, name=run)).keywords()

    def _follow(self, checkpointer: Checkpointer, iteration: int, total: int) -> None:
        self._steps = checkpointer.steps(total, start=iteration)
        self._next, self._total = iteration, total


class _GoingOn(Checkpointer):
    """Continues a run with the live state, which is not older than any snapshot.

    Args:
        top: whose state is live.
        program: as the script began.
    Attributes:
        begins: the first iteration whose snapshot is to be taken.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, Stateful],
        options: OptionGroups,
        *,
        top: int,
        program: Program,
    ) -> None:
        self.begins, self._begun_as = top, program
        super().__init__(module, optimizer, state, **options)

    def _start(self, model: nn.Module, phases: PhaseClock) -> None:
        self._program = self._begun_as
        super()._start(model, phases)

    def _restore(self, memory: RankMemory) -> None:
        found = self._recovery.find(memory, self._ranks, whole=True)
        if found is None:  # not yet any, or those of a stage were lost with its node: the run begins here
            return
        with self._ranks.all_or_none():
            # All stages have `end` already. It may be one step ahead of those that roll back, as it will be.
            self.begins = max(self.begins, found.replay.end + 1)
            self._loop.go_on(found, self.begins)
        self._operators = found.plan.operators
        self.resumed_from = found.replay.end
