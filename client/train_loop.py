"""Our side of the user's loop: at the top of a step, before its first forward, around the optimizer's step.

The top is the snapshot boundary. An unprotected loop has all of this, too, and only counts its steps.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import sys
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ckptd.client.capture.ddp_buckets import Buckets
from ckptd.client.capture.program import Program, apply_options, differences, options_differ
from ckptd.client.capture.recorder import Recorder
from ckptd.client.capture.uncaptured.left_behind import LeftBehind, variables_of
from ckptd.client.daemon_link.rank_memory import RankMemory
from ckptd.client.daemon_link.session import Session
from ckptd.client.data import BatchLedger
from ckptd.client.log_lines import get_logger
from ckptd.client.model.freezing import Tape, clip_norm_tap, scaler_tap
from ckptd.client.model.hooks import ModuleHook, before_update
from ckptd.client.model.module_tree import ModuleTree
from ckptd.client.model.waiting_gradients import WaitingGradients
from ckptd.client.optimizers.foreign_optimizers import ForeignOptimizers
from ckptd.client.options import RecoveryOptions
from ckptd.client.parking.parker import Parking
from ckptd.client.phase_clock import PhaseClock
from ckptd.client.pipeline.stage_hooks import callables_of, rehearsal_tap, without_trace
from ckptd.client.pipeline_support import PipelinePart
from ckptd.client.ranks.collectives import Collectives
from ckptd.client.recovery.rehearsal import Rehearsal
from ckptd.client.recovery.replay import Replay
from ckptd.client.recovery.start import ReplayPart, Resumption
from ckptd.client.schedule.planner import RankContext
from ckptd.client.schedule.snapshot_plan import SnapshotPlan
from ckptd.client.stats import Stats
from ckptd.client.training_state import TrainingState
from ckptd.core.recovery.recovery_phases import RecoveryPhase
from ckptd.progress_page import StepStage, inherited_page
from ckptd.units import count_of

logger = get_logger(__name__)

SEAL_WAIT_S = 5.0
RECORDED_COUNTS = (
    "What was recorded counts. To go on with the script's options, pass "
    'recovery=RecoveryOptions(param_groups="script"); to begin anew, run= a new name'
)
_FAILURES_IN_A_ROW = 3


class LoopSide:
    """Follows the loop.

    Attributes:
        step: the running step, or the next one.
        stepping: True while the body of a recorded step runs.
        ledger: the batches of the steps.
        recorder: None if snapshots were given up, or nothing is protected (any more).
        parking: None if nothing is parked.
        rehearsal: compares what a resume makes of the optimizers; None when it is over, or not wanted.
        left_behind: looks for what was not passed to be captured; None when it is over.
        over: another one follows the loop in its place: the process has restarted.
        resumed: what a resume has replayed and compared, in words; empty before, and without one.
    """

    def __init__(self, stats: Stats, ledger: BatchLedger | None = None) -> None:
        self._stats = stats
        self._waiting: WaitingGradients | None = None
        self._failures = 0  # of our side of a step, in a row
        self._memory: RankMemory | None = None
        self._session: Session | None = None  # outlives `close`: what fails then must be reported, too
        self._owner: object = None
        self._updated = False
        self._rehearses = self._verifies = False
        self.tape = Tape()
        self.ledger = ledger or BatchLedger()
        self.pipeline = PipelinePart(stats)
        self.replaying = ReplayPart(stats)
        self.recorder: Recorder | None = None
        self.parking: Parking | None = None
        self.rehearsal: Rehearsal | None = None
        self.left_behind: LeftBehind | None = None
        self._when_exact: Callable[[], None] | None = None
        self._phases: PhaseClock | None = None  # None once the first new step is done
        self._new_from = 0
        self._page = inherited_page()
        self.step = 0
        self.stepping = False
        self.over = False
        self.resumed = ""

    def protect(
        self,
        subject: TrainingState,
        context: RankContext,
        recorder: Recorder,
        *,
        ranks: Collectives,
    ) -> None:
        """Protect the loop from here on."""
        self._binding, self._stateful = subject.binding, subject.stateful
        self._waiting = recorder.scalars.waiting
        self._memory, self.recorder = context.memory, recorder
        self._session, self._phases = context.memory.session, context.memory.phases
        self._engine = context.engine
        binding = subject.binding
        known = (*binding.kept.given, *binding.optimizers, *binding.keepers)
        self._foreign = ForeignOptimizers(known, (*binding.params.values(), *binding.masters.values()))
        self._tree = ModuleTree(binding)
        self._counter, self._precision, self._ranks = context.counter, context.precision, ranks

    def park_with(self, parking: Parking) -> None:
        """From the next top on the state of a step can be parked."""
        assert self.recorder is not None
        self.parking = parking
        self.recorder.set_top_listener(parking)

    def rehearse(self) -> None:
        """See what a resume would make of the optimizers; call it before anything is restored."""
        if self.recorder is not None and self._memory is not None:
            self.rehearsal = Rehearsal(self._binding, self._memory, self.recorder, self._engine)

    def install(self, model: nn.Module, keep: contextlib.ExitStack, owner: object) -> None:
        """Install hooks and taps; closing ``keep`` removes them.

        Args:
            owner: kept alive by the hooks, though the user may have dropped it: it must be closed at
                the interpreter's end.
        """
        self._owner = owner
        for optimizer in self._binding.optimizers:
            keep.callback(optimizer.register_step_pre_hook(self._before_optimizer_step).remove)
            keep.callback(optimizer.register_step_post_hook(self._after_optimizer_step).remove)
        keep.callback(register_optimizer_step_post_hook(self._after_any_step).remove)
        self._tree.watch(keep)
        begins, ended = ModuleHook(self.forward_begins), ModuleHook(self.forward_ended)
        for module in callables_of(model):
            keep.callback(module.register_forward_pre_hook(begins).remove)
            keep.callback(module.register_forward_hook(ended, always_call=True).remove)
        keep.enter_context(rehearsal_tap(self._rehearsing))
        keep.enter_context(clip_norm_tap(self.tape))
        for item in self._stateful.values():
            if hasattr(item, "_unscale_grads_"):
                keep.enter_context(scaler_tap(item, self.tape))

    @property
    def silent(self) -> bool:
        """True if what runs is no step: a rehearsal of a pipeline's schedule, or a verification."""
        return self._rehearses or self._verifies

    # -- resuming --------------------------------------------------------------------------------

    def restore(self, found: Resumption, buckets: Buckets, *, started_s: float) -> None:
        """Load what a start has found; its replay begins at the first top. A collective call.

        Args:
            started_s: the beginning of the start (performance counter).
        Raises:
            DaemonUnavailable: another rank cannot resume; here it is that rank's own error.
        """
        replay, recorder, memory = found.replay, self.recorder, self._memory
        assert recorder is not None
        assert memory is not None
        # First: a device's copies out of memory that is registered take a tenth of the time.
        for segment in memory.table.segments:
            self._engine.register(segment.memory, segment.regions())
        self._load(replay, buckets)
        self.replaying.resume(found)
        self._counter.enabled = False
        ordinal = found.plan.ordinal_of(found.phase)
        recorder.resume(found.plan, last=replay.end, ordinal=ordinal, sharing=found.sharing)
        if found.apart is not None:
            stages = replay.oldest_scalars.get("stages", {})
            with self._ranks.all_or_none():
                shapes = self.pipeline.run_isolated(memory.identity.rank, found.apart, stages)
                recorder.scalars.know_stages(shapes)
        self._new_from = found.new_from
        lost = "" if found.plan.scope is None else self._note_losses(recorder, replay, found.plan)
        memory.phases.reach(RecoveryPhase.LOADED)
        stats = self._stats
        stats.restore_s = time.perf_counter() - started_s
        stats.restored_bytes = replay.bytes_loaded
        stats.redone_iterations += max(0, found.new_from - replay.end)
        compared = ""
        if found.unverified:
            what = "nothing" if replay.start == replay.end else "not all of the newest snapshot"
            compared = f"; {what} can be compared with a replay ({found.unverified})"
        text = (
            f"{memory.identity}: resuming at iteration {replay.end}, replay begins at {replay.start}: "
            f"{found.reason}; loaded {replay.bytes_loaded} bytes in {stats.restore_s:.3f} s, "
            f"freezing: {replay.freezing}{compared}{lost}"
        )
        # A warning, so that it is seen without any logging set-up: the run does not begin at its beginning.
        logger.warning("%s", text)
        memory.session.notice("info", "restored", text)

    def go_on(self, found: Resumption, step: int) -> None:
        """The live state is whole, and at least as new as the snapshots: these are not loaded.

        Args:
            step: whose top comes next.
        """
        recorder, memory = self.recorder, self._memory
        assert recorder is not None
        assert memory is not None
        for segment in memory.table.segments:
            self._engine.register(segment.memory, segment.regions())
        ordinal = found.plan.ordinal_of(found.phase)
        recorder.resume(found.plan, last=found.replay.end, ordinal=ordinal, sharing=found.sharing)
        self._follow(found)
        recorder.scalars.go_by(found.replay.newest_scalars["program"])
        recorder.break_chain()  # no replay leads from what was recorded to the live state
        self.step = step
        text = (
            f"{memory.identity}: snapshots go on at iteration {step}; the newest of all ranks is "
            f"{found.replay.end}: {found.reason}"
        )
        logger.info("%s", text)
        memory.session.notice("info", "went_on", text)

    def _follow(self, found: Resumption) -> None:
        """Snapshots go on as the newest one says."""
        scalars, plan = found.replay.newest_scalars, found.plan
        plan.use_phases(scalars["phases"])
        plan.use_interval(scalars.get("every", plan.every))  # absent in what 0.4 recorded
        if self.recorder is not None:
            ordinal = plan.ordinal_of(found.phase)
            self.recorder.go_on(found.replay.end, ordinal, scalars.get("stride", 1))

    def _note_losses(self, recorder: Recorder, replay: Replay, plan: SnapshotPlan) -> str:
        """For the log: what this recovery loses; a collective call."""
        losses, scope = recorder.scalars.losses, plan.scope
        assert scope is not None
        lost = losses.resume(plan.operators, *replay.sources, self._ranks, scope)
        recorder.know_losses(losses.lost_iterations)
        self._stats.lost_tokens = sum(lost.tokens.values())
        self._stats.older_experts, self._stats.lost_tokens_share = len(lost.iterations), lost.cumulative_plt
        return f". {lost.text}"

    def _load(self, replay: Replay, buckets: Buckets) -> None:
        with self._ranks.all_or_none():
            replay.load_state()
        # Ranks broadcast tensors from here on: a rank that fails before must not leave the others waiting.
        with self._ranks.all_or_none():
            replay.load_tensors()
            layouts = replay.bucket_layouts
        buckets.put_back(layouts, self._ranks)
        if replay.buffer_senders is not None:
            buckets.send_next(replay.buffer_senders)

    def heed_program(self, replay: Replay, here: Program, options: RecoveryOptions) -> None:
        """Report how this program differs from the one that began the run, and apply the right options."""
        recorded: Program = replay.oldest_scalars.get("program", {})  # absent in what 0.4 recorded
        recorder = self.recorder
        assert recorder is not None
        assert self._memory is not None
        if not recorded:
            return
        what = RECORDED_COUNTS
        if options.param_groups == "script":
            what = f"The script's options count from iteration {replay.end} on"
            if options_differ(recorded, here):
                self._when_exact = partial(self._apply_options, recorded, here)
        recorder.scalars.go_by(recorded)
        tell_differences(recorded, here, what, rank=self._memory.identity.rank)

    def _apply_options(self, recorded: Program, here: Program) -> None:
        """The state is exact: from here on the script's options of parameter groups count."""
        assert self.recorder is None or self.recorder.scalars.program is recorded
        apply_options(self._binding, self._stateful, recorded, here)
        if self.recorder is not None:
            self.recorder.scalars.go_by(here)
            # Later states do not follow from the snapshots before by a replay.
            self.recorder.break_chain()

    # -- the steps -------------------------------------------------------------------------------

    def run(self, steps: range) -> Generator[int, None, None]:
        """The steps of a protected loop, each after its top; a last top takes the last step's snapshot."""
        for step in self.bodies(steps):
            self._top(step)
            # A job that comes back must not wait for it.
            if self.left_behind is not None and (self._phases is None or self._new_from == 0):
                self.left_behind = self.left_behind.look(partial(variables_of, sys._getframe()))
            self.pipeline.begin(step, replaying=self.replaying.replay is not None)
            yield step
        if not self.over:
            self._top(self.step)
            self._finish()

    def bodies(self, steps: range) -> Iterator[int]:
        """Count the steps whose body is complete, also if the loop is left in the middle of one."""
        try:
            for step in steps:
                if self._page is not None:
                    self._page.begins(step)
                yield from self._body(step)
                if self.over:
                    return
        finally:
            if self._page is not None:
                self._page.left(self.step)

    def _body(self, step: int) -> Iterator[int]:
        self.step, self._updated = step, False
        self.ledger.begin(step)
        try:
            yield step
        except GeneratorExit:
            if self.parking is not None:
                self.parking.leave(f"the loop is left in the middle of step {step}")
            # A body that has updated the weights counts as done: the next loop must not do it again.
            self.step += self._updated or self._memory is None
            done = self._updated and self.replaying.replay is None
            (self.pipeline.end if done else self.pipeline.abandon)()
            raise
        self.step = step + 1

    def _top(self, step: int) -> None:
        self.replaying.check_whole()
        if self.rehearsal is not None:
            self.rehearsal.top()
        sent = self.pipeline.end()
        if self._memory is not None:
            self.pipeline.end_localized(step, self._memory, self._wait_for_all)
        recorder = self.recorder
        if self.replaying.top(step, sent):
            if recorder is not None:
                recorder.replayed()
            if not self.replaying.frozen:
                self._recovered()
        elif recorder is not None:
            self.stepping = False
            self._look_for_foreign_optimizers(recorder, step)
            self._look_for_new_modules(recorder, step)
            if self._survive(recorder, recorder.top, step):
                self._failures = 0
            self.stepping = True
        else:
            self.tape.take()  # given up: nobody needs what the taps still record
        if self._waiting is not None and self.replaying.replay is None:
            self._waiting.begin()

    def _look_for_foreign_optimizers(self, recorder: Recorder, step: int) -> None:
        foreign, recorder.in_doubt = self._foreign.top()
        if foreign and not recorder.refused:
            recorder.refuse(
                f"optimizer {foreign} updates the model's weights, and Checkpointer does not know it: no "
                f"snapshot has its state. None is taken any more (step {step}); after a failure this run "
                "goes on from the last one. Pass all optimizers in a list. Where one takes the place of "
                "another, close this Checkpointer and make another one with a run= of its own "
                "(docs/integration.md#stages)"
            )

    def _look_for_new_modules(self, recorder: Recorder, step: int) -> None:
        change = self._tree.top()
        if change is None or recorder.refused:
            return
        if change.ends:
            recorder.refuse(
                f"{change.text}. No snapshot is taken any more (step {step}); after a failure this run goes "
                "on from the last one"
            )
        else:
            logger.warning("%s", change.text)

    def _wait_for_all(self) -> None:
        if self.parking is not None:
            # A park request must not wait for a top that may be far; what was parked before stays.
            self.parking.closed_because("not all ranks have come to where they run together")
        self._ranks.barrier()

    def _survive(self, recorder: Recorder, work: Callable[..., object], *args: object) -> bool:
        """Run our side of a step: its errors must not reach the user's loop. True if it succeeded.

        What is sealed stays; after a few failures in a row snapshots are given up for this run.
        """
        try:
            work(*args)
        except Exception as error:  # whatever it is, it is logged, and training goes on
            self._failures += 1
            step = self.step
            logger.error("snapshots failed at step %d (%d in a row)", step, self._failures, exc_info=error)
            if self._session is not None:
                text = f"step {step}: {type(error).__name__}: {error}"
                self._session.notice("error", "snapshot_failed", text)
            recorder.abort()
            self._stats.failed += 1
            if self._failures >= _FAILURES_IN_A_ROW:
                logger.error("no more snapshots are taken in this run; training goes on unprotected")
                recorder.give_up()
                self.recorder = None
            return False
        return True

    def _recovered(self) -> None:
        """The state is dense again."""
        replay, recorder, stats = self.replaying.replay, self.recorder, self._stats
        assert replay is not None
        found = self.replaying.end()
        if found is not None:
            # Only now is the newest snapshot certain to be here: it may have come from another node
            # meanwhile.
            self._follow(found)
        self._counter.enabled = True
        if recorder is not None:
            recorder.forget_updates()
            if replay.mismatches:
                recorder.break_chain()
        if self._when_exact is not None:
            self._when_exact()
            self._when_exact = None
            if recorder is not None:
                recorder.break_chain()
        if recorder is not None:
            rng_forward = replay.newest_scalars.get("rng_forward")
            self._survive(recorder, recorder.recovered, replay.end, rng_forward)
        if self._phases is not None and replay.start < replay.end:
            self._phases.reach(RecoveryPhase.REPLAYED)
        stats.replay_s = self.replaying.took_s
        stats.verified_tensors += replay.compared
        unverified = "" if found is None else found.unverified
        text = (
            f"resumed at iteration {replay.end}: replayed {count_of(stats.replayed_steps, 'iteration')} in "
            f"{stats.replay_s:.2f} s (freezing: {replay.freezing}), compared "
            f"{count_of(replay.compared, 'tensor')}, {len(replay.mismatches)} mismatches"
            + (f" (of the newest snapshot not all: {unverified})" if unverified else "")
        )
        self.resumed = text
        logger.info("%s", text)
        if self._memory is not None:
            self._memory.session.notice("info", "recovered", text)

    def _finish(self) -> None:
        self.stepping = False
        if self.parking is not None:
            self.parking.closed_because("the loop is over")
        if self.recorder is not None:
            self.recorder.finish()
        if self._memory is not None:
            # The last snapshot must not depend on how soon the process ends now.
            if not self._memory.session.flush(SEAL_WAIT_S):
                logger.warning("the last snapshot was not finished within %.0f s", SEAL_WAIT_S)
            self._memory.session.report(self.step, self._stats.as_dict())

    # -- in a step -------------------------------------------------------------------------------

    def _before_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        rehearse = None
        # A job that comes back must not wait for it: the first new step is without.
        new = self._phases is None and self.step > self._new_from and self.replaying.replay is None
        if new and self.rehearsal is not None and self.recorder is not None:
            if self.rehearsal.over:
                self.rehearsal = None
            elif self.rehearsal.enter(number := self._number_of(optimizer)):
                rehearse = partial(self.rehearsal.before_update, number, args, kwargs)
        work = partial(self._weights_are_about_to_change, self._number_of(optimizer), rehearse)
        return before_update(args, kwargs, work)

    def _weights_are_about_to_change(
        self, optimizer: int, rehearse: Callable[[Any], None] | None, loss: Any
    ) -> None:
        self._shows(StepStage.UPDATE)
        self.replaying.before_optimizer_step()
        if self.recorder is not None:
            self._survive(self.recorder, self.recorder.before_optimizer_step, optimizer)
        # In a replay there is no moment that could end, and the next top opens none: nobody must
        # wait for it.
        if self.parking is not None and self.replaying.replay is None:
            self.parking.before_update()
        if rehearse is not None:
            rehearse(loss)

    def _after_any_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """A step of any optimizer of the process: an error of ours must not reach it."""
        try:
            self._foreign.stepped(optimizer)
        except Exception as error:  # noqa: BLE001 - logged, and training goes on
            logger.warning("whether %s is known was not found out: %s", type(optimizer).__name__, error)

    def _number_of(self, optimizer: Any) -> int:
        return next(i for i, o in enumerate(self._binding.optimizers) if o is optimizer)

    def _after_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._updated = True
        index = self._number_of(optimizer)
        if self._waiting is not None:
            self._waiting.updated(index)
        if self.rehearsal is not None:
            self.rehearsal.after_update(index)
        self.replaying.after_optimizer_step(index)
        if self.recorder is not None:
            self.recorder.after_optimizer_step(index)
        if self._phases is not None and self.step >= self._new_from and self.replaying.replay is None:
            phases, self._phases = self._phases, None
            self._first_new_step(phases)

    def _first_new_step(self, phases: PhaseClock) -> None:
        """The start is over: tell how long its phases took."""
        phases.reach(RecoveryPhase.FIRST_NEW_STEP)
        memory, stats = self._memory, self._stats
        stats.phases, stats.first_new_step_at = phases.durations, time.time()
        if memory is None:
            return
        kind = "recovery_phases" if RecoveryPhase.LOADED in stats.phases else "start_phases"
        text = f"the first new iteration is {self.step}: {phases.describe()}"
        logger.info("%s: %s", memory.identity, text)
        memory.session.notice("info", kind, text)
        memory.session.report(self.step, stats.as_dict())

    def forward_begins(self, *called: Any) -> None:
        """The model is called."""
        if not self._in_step():
            return
        self._shows(StepStage.FORWARD)
        if self.recorder is not None:
            self._survive(self.recorder, self.recorder.first_forward)
        self.replaying.first_forward()
        if self.parking is not None:
            self.parking.first_forward()
        self._precision.enter()

    def forward_ended(self, *called: Any) -> None:
        """The call ended."""
        self._precision.leave()
        if not self._in_step():
            return
        self._shows(StepStage.BACKWARD)
        if self.recorder is not None:
            self._survive(self.recorder, self.recorder.forward_ended)

    def _shows(self, stage: StepStage) -> None:
        if self._page is not None:
            self._page.reaches(stage)

    def _in_step(self) -> bool:
        """False for a forward that rehearses a pipeline, and for recomputation inside a backward."""
        return not self._rehearses and torch._C._current_graph_task_id() == -1

    @contextlib.contextmanager
    def _rehearsing(self) -> Iterator[None]:
        """A pipeline's schedule runs its stages to learn their shapes, in the first step of every process."""
        resumed = self.replaying.before_first_forward
        self._rehearses = True
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(self.pipeline.aside())
                if resumed:
                    stack.enter_context(without_trace(self._binding))
                yield
        finally:
            self._rehearses = False

    # -- verification and the end ----------------------------------------------------------------

    @contextlib.contextmanager
    def verifying(self, replay: Replay) -> Iterator[None]:
        """The steps of the body are those of ``replay``; nothing in them is recorded."""
        recorder, self.recorder = self.recorder, None
        self._verifies, self._counter.enabled = True, False
        try:
            with self.replaying.instead(replay):
                yield
        finally:
            self._counter.enabled = True
            self.recorder = recorder
            self._verifies = False

    def close(self) -> None:
        """The loop may go on unprotected, unless it is being replayed."""
        if self.parking is not None:
            self.parking.close()
            self.parking = None
        self.rehearsal = None
        self.pipeline.close()
        self.replaying.abandon()
        if self.recorder is not None:
            self.recorder.close()
            self.recorder = None
        self._memory = self._owner = None


def tell_differences(recorded: Program, here: Program, what: str, *, rank: int) -> None:
    """Log how two programs differ, with both values; rank 0 warns, the others inform.

    Args:
        what: the consequence.
    """
    if text := "; ".join(differences(recorded, here)):
        level = logging.INFO if rank else logging.WARNING
        logger.log(level, "THIS PROGRAM DIFFERS from the one that began the run: %s. %s", text, what)


def number_of_steps(name: str, value: Any) -> int:
    """A whole number, of numpy's, too.

    Raises:
        ValueError: it is none.
    """
    with contextlib.suppress(TypeError):
        if (number := operator.index(value)) >= 0:
            return number
    raise ValueError(f"steps({name}={value!r}): pass a whole number of steps, from 0 on")
