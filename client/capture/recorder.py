"""The cadence of snapshots: what happens at the top of each step while training (not while replaying).

The recorder first measures (how long is a step, which precision suffices), then takes one snapshot per
clean boundary. A boundary is *clean* if no gradients are pending: in the middle of an accumulation over
several loop steps nothing is taken, and the chain continues, because weights do not change in between. Where
they do, because another optimizer steps meanwhile, the snapshot has the gradients that wait.

A chain links each snapshot to its predecessor; a replay goes through it. It *breaks* where a boundary
after an update is missed: the state no longer follows from the newest snapshot, and the next one begins
a new chain. A new generation of slots is then reserved, so that the old suffix stays until a new one is
complete.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from ckptd.client.capture.gradient_recorder import GradientCopy, GradientRecorder
from ckptd.client.capture.live_tensors import RestlessBuffers, RestlessWeights
from ckptd.client.capture.slot_writer import Capture, nan_tensors
from ckptd.client.capture.step_state import StepScalars
from ckptd.client.daemon_link.mapped_segment import MappedSegment
from ckptd.client.log_lines import get_logger
from ckptd.client.model.replicated_params import ReplicatedParams
from ckptd.client.model.snapshot_layout import PhasePlan
from ckptd.client.optimizers.optimizer_audit import cannot_be_captured
from ckptd.client.optimizers.value_trees import NotCapturable
from ckptd.client.rng_state import Draws, capture_rng
from ckptd.client.schedule.expert_losses import RECORDED
from ckptd.client.schedule.expert_selection import ExpertSelection
from ckptd.client.schedule.measurements import CopyMode, CopyModeChooser, StepTiming
from ckptd.client.schedule.planner import RankContext
from ckptd.client.schedule.provision import Provision
from ckptd.client.schedule.schedule_change import ScheduleChanges
from ckptd.client.schedule.snapshot_plan import SnapshotPlan
from ckptd.core.slots.segment_format import HINT_COPIES_BESIDE, HINT_COPIES_INLINE
from ckptd.core.state_machine import MachineState, Transitions, validated
from ckptd.core.window_control import SnapshotReading
from ckptd.cuda.engine import CopyGate, CpuEngine

logger = get_logger(__name__)

_WATCHED_STEPS = 4
_REPORT_S = 1.0
_PENDING_LIMIT = 100
_WRITTEN = "weights that the loop changes outside of the optimizer's step (only dense snapshots can be exact)"
# Bubbles need a schedule, which a trainer passes later: they are tried again.
_HINTS = {CopyMode.BESIDE: HINT_COPIES_BESIDE, CopyMode.INLINE: HINT_COPIES_INLINE}


class ChainState(MachineState):
    """What the top of a step means for the snapshots of a rank."""

    MEASURING = "measuring", "the first steps: nothing is planned, and there is no ring"
    UNCHAINED = "unchained", "the next snapshot follows none"
    CHAINED = "chained", "the next snapshot follows the newest one"
    REFUSED = "refused", "an optimizer keeps what cannot be captured: no snapshot is taken any more"


class ChainEvent(StrEnum):
    """An event of the chain."""

    RESUME = "resume"  # after a restore
    PLAN = "plan"  # a ring of another plan is in use
    GROW = "grow"  # another ring of the same plan is
    TAKE = "take"
    REPEAT = "repeat"  # the newest snapshot is taken anew, in the place of the first
    BREAK = "break"  # a boundary after an update was missed, or the state does not follow
    REFUSE = "refuse"


TRANSITIONS = Transitions(
    "recorder",
    {
        (ChainState.MEASURING, ChainEvent.PLAN): ChainState.UNCHAINED,
        (ChainState.MEASURING, ChainEvent.RESUME): ChainState.CHAINED,
        (ChainState.UNCHAINED, ChainEvent.PLAN): ChainState.UNCHAINED,
        (ChainState.UNCHAINED, ChainEvent.GROW): ChainState.UNCHAINED,
        (ChainState.UNCHAINED, ChainEvent.TAKE): ChainState.CHAINED,
        (ChainState.UNCHAINED, ChainEvent.REPEAT): ChainState.CHAINED,
        (ChainState.CHAINED, ChainEvent.PLAN): ChainState.UNCHAINED,
        (ChainState.CHAINED, ChainEvent.GROW): ChainState.CHAINED,
        (ChainState.CHAINED, ChainEvent.TAKE): ChainState.CHAINED,
        (ChainState.CHAINED, ChainEvent.REPEAT): ChainState.CHAINED,
        (ChainState.CHAINED, ChainEvent.BREAK): ChainState.UNCHAINED,
        **{
            (state, ChainEvent.BREAK): state
            for state in (ChainState.MEASURING, ChainState.UNCHAINED, ChainState.REFUSED)
        },
        **{(state, ChainEvent.REFUSE): ChainState.REFUSED for state in ChainState},
    },
)


@dataclass(frozen=True, slots=True)
class Taken:
    """The newest snapshot: its step, its predecessor, and the tape it was given."""

    step: int = -1
    previous: int = -1
    tape: tuple[tuple[str, Any], ...] = ()


class SnapshotChain:
    """The chain of one rank's snapshots.

    Attributes:
        previous: the snapshot that the next one follows; -1: none.
        last: the newest snapshot that was begun in this life.
    """

    def __init__(self) -> None:
        self.state = ChainState.MEASURING
        self.previous = -1
        self.last = Taken()

    @property
    def refused(self) -> bool:
        """True if no snapshot is taken any more."""
        return self.state is ChainState.REFUSED

    def resume(self, last: int) -> None:
        """Snapshot ``last`` exists, and the state follows from it."""
        self._on(ChainEvent.RESUME, last)

    def use(self, *, other_plan: bool) -> None:
        """Another ring is in use."""
        self._on(ChainEvent.PLAN if other_plan else ChainEvent.GROW, self.previous)

    def take(self, taken: Taken) -> None:
        """A snapshot was begun."""
        self.last = taken
        self._on(ChainEvent.TAKE, taken.step)

    def repeat(self) -> None:
        """The newest snapshot is about to be taken anew: it follows what the first one followed."""
        before = self.last.previous
        self._on(ChainEvent.BREAK if before < 0 else ChainEvent.REPEAT, before)

    def cut(self) -> None:
        """The next snapshot does not follow from the newest one."""
        self._on(ChainEvent.BREAK, -1)

    def refuse(self) -> None:
        """No snapshot is taken any more."""
        self._on(ChainEvent.REFUSE, -1)

    def _on(self, event: ChainEvent, previous: int) -> None:
        """Every transition goes through here."""
        self.state = TRANSITIONS.after(self.state, event, newest=self.last.step)
        self.previous = previous if self.state is ChainState.CHAINED else -1

    def validate(self, *, captures: bool) -> None:
        """Assert that a snapshot follows an earlier one or none, and that a plan has a ring.

        Args:
            captures: there is a ring to capture into.
        """
        state = self.state
        assert (state is ChainState.CHAINED) == (self.previous >= 0), f"{state}, {self.previous}"
        assert self.last.previous < self.last.step or self.last.step < 0, self.last
        assert captures == (state is not ChainState.MEASURING) or self.refused, f"{state}, no ring"


class TopListener(Protocol):
    """Hears of the tops of steps, to copy the state as it is there."""

    def top(self, step: int, plan: SnapshotPlan, phase: int, scalars: dict[str, Any]) -> None: ...

    def again(self) -> None:
        """The top of a further step of an accumulation: the weights are those of the top before."""


class Bubbles(Protocol):
    """Knows when this rank of a pipeline waits for others."""

    @property
    def pacer(self) -> CopyGate: ...

    @property
    def measured_fraction(self) -> float: ...

    @property
    def bytes_inside(self) -> int: ...

    def top(self, *, lagging: bool) -> None:
        """The top of a step; ``lagging``: a peer lacks more than the newest snapshot."""


class Recorder:
    """Takes snapshots at the pace that the options and the measurements allow.

    Args:
        scalars: gathers the step scalars of a top.
    """

    def __init__(self, context: RankContext, scalars: StepScalars) -> None:
        self._binding, self._memory = context.binding, context.memory
        self._engine, self._stats, self._options = context.engine, context.stats, context.options
        self._tape, self.scalars = scalars.tape, scalars
        self._capture: Capture | None = None
        # The number of the snapshot in the schedule. One rank counts its clean boundaries; several
        # ranks, which must be in the same phase, derive it from the iteration
        # (`ckptd.core.snapshot_policy`).
        self._ordinal = -1
        self._counted = -1
        self._chain = SnapshotChain()
        self._stepped = False
        self._updates: dict[int, int] = {}  # of this step, by optimizer
        self._idle = 0  # tops before the first step of an optimizer; -1: there was one
        self._pace = StepTiming()
        self._reported_at = 0.0
        self._restless = RestlessBuffers(context.binding)
        self._weights = RestlessWeights(context.binding)
        self._chooser = CopyModeChooser() if context.options.inline_copy is None else None
        self._taken_bytes = 0  # of the snapshot of this step
        self._waits = self._longest_wait = 0  # steps in a row at whose top gradients wait
        # An optimizer that nobody passed has stepped; whether it stays is not known yet.
        self.in_doubt = False
        self._in_a_row = 0  # steps whose snapshot found no slot
        self._provision = Provision(
            context,
            self._pace,
            scalars_sample=lambda: scalars.sample(
                len(context.operators), lossy=context.options.of_experts is not None
            ),
            switched=self._switched,
        )
        self._changes = self._provision.changes
        self._draws = Draws(watches=bool(context.sharing.replicas))
        self._parking: TopListener | None = None
        self._selection: ExpertSelection | None = None  # of partial snapshots
        self._bubbles: Bubbles | None = None
        gives = context.options.to_peers == "gradients"
        self._gradients = GradientRecorder(context.binding) if gives else None

    def set_top_listener(self, listener: TopListener) -> None:
        """From now on ``listener`` hears of the top of each step."""
        self._parking = listener

    @property
    def restless(self) -> set[str]:
        """Names of buffers that are known to change before the optimizer's step; it grows."""
        return self._restless.names

    @property
    def refused(self) -> bool:
        """True if no snapshot is taken any more."""
        return self._chain.refused

    @property
    def plan(self) -> SnapshotPlan | None:
        """The snapshot plan; None before the first steps are measured."""
        return self._provision.plan

    @property
    def _peers_lag(self) -> bool:
        """True if a peer lacks more than the newest snapshot, as far as the daemon has said."""
        every = self.plan.every if self.plan is not None else 1
        return self._memory.table.ring_hint.behind > every

    @property
    def copy_window_s(self) -> float:
        """From the end of a boundary to the optimizer's step, as a rule; 0: not known yet."""
        return self._pace.copy_window_s

    def newest_of(self, optimizer: int) -> int:
        """The iteration of the snapshot that optimizer number ``optimizer`` is about to update; -1: none."""
        newest = self._chain.last.step
        fresh = newest == self._counted and not self._chain.refused
        return newest if fresh and optimizer not in self._updates else -1

    def close(self) -> None:
        """Finish, and stop waiting for other ranks."""
        self.finish()
        self.give_up()

    def give_up(self) -> None:
        """Stop waiting for other ranks."""
        self._provision.close()

    # -- the life of a step ----------------------------------------------------------------------

    @validated
    def top(self, step: int) -> None:
        """Take the snapshot of ``step`` if this boundary is clean."""
        pace = self._pace
        boundary, waited, sealing = pace.boundary_s, pace.wait_s + pace.device_s, pace.sealing_s
        last = pace.top(time.perf_counter())
        if last is not None:
            self._stats.note_stall(boundary, waited)
            if self._memory.session.connected:
                self._provision.note(self._reading(last, waited, sealing))
            self._choose_copy_mode(last)
        if self._bubbles is not None:
            self._bubbles.top(lagging=self._peers_lag)
            self._stats.bubble_bytes = self._bubbles.bytes_inside
        self._taken_bytes = 0
        pending = self._pending_gradients() and not self._gradients_captured()
        if not pending and step != self._counted:  # a boundary that is seen again counts once
            self._counted = step
            self._ordinal += 1
            if self._changes is not None:
                self._changes.strides.note(step)
        if self._capture is not None:
            self._settle(self._capture)
            if self._capture.take_broken():
                self.break_chain()
        if self._sparse:
            self._look_at_weights()
        else:  # what was seen before is old when a window becomes wider
            self._weights.forget()
        self._take_or_wait(step, pending=pending)
        if self._gradients is not None and not (pending or self._taken_bytes):
            self._gradients.drop()
        self._note_idle()
        if pace.steps <= _WATCHED_STEPS:
            self.watch()
        self.forget_updates()
        self._report(step)
        pace.boundary_over(time.perf_counter())

    @property
    def _sparse(self) -> bool:
        """True if snapshots are sparse, or may become so."""
        return self.plan is None or (self.plan.schedule.window > 1 and not self.plan.lossy)

    def _look_at_weights(self) -> None:
        """See whether weights change outside of their optimizers' steps."""
        found, unknown = self._weights.found, self._weights.top()
        if unknown:
            self.break_chain()
        if self._weights.found:
            self._provision.only_dense(_WRITTEN)
            if not found and self._options.window != 1 and not self._options.dense:
                logger.warning("found %s", _WRITTEN)
        if self._pace.steps == _WATCHED_STEPS:
            self._weights.samples = False

    def _take_or_wait(self, step: int, *, pending: bool) -> None:
        self._note_pending(pending)
        if pending:
            self._pend()
        elif self.in_doubt:
            self._leave_out()
        elif not self._chain.refused:
            try:
                self._take(step)
            except NotCapturable as refused:
                # Before anything was begun. It does not go away by itself, so it is not tried again.
                self.refuse(cannot_be_captured(self._binding.kept.whose, refused))

    def _reading(self, iteration_s: float, waited_s: float, sealing_s: float) -> SnapshotReading:
        """What the step that ended took, and its snapshot's part in that."""
        inline, copy_s = self._engine.inline, self._engine.last_copy_s
        return SnapshotReading(
            iteration_s,
            self._taken_bytes,
            copy_s=0.0 if inline else copy_s,
            copy_wait_s=waited_s + (copy_s if inline else 0.0),
            seal_wait_s=sealing_s,
            seal_s=self._capture.seal_s if self._capture is not None else 0.0,
        )

    def _choose_copy_mode(self, iteration_s: float) -> None:
        chooser = self._chooser
        if chooser is None or self._capture is None or not isinstance(self._engine, CpuEngine):
            return
        before = chooser.decided
        self._copy_as(chooser.note(iteration_s))
        if chooser.decided and not before:
            logger.info("copies run %s (%s)", chooser.mode, chooser.reason)
            self._memory.take_back_hint(HINT_COPIES_BESIDE | HINT_COPIES_INLINE)
            self._memory.leave_hint(_HINTS.get(chooser.mode, 0))

    def _take_over_copy_mode(self) -> None:
        """What the trainer before this one has found need not be tried again after each failure."""
        chooser = self._chooser
        if chooser is None or chooser.decided or not isinstance(self._engine, CpuEngine):
            return
        for mode, hint in _HINTS.items():
            if self._memory.hint & hint and chooser.take_over(mode):
                self._copy_as(chooser.mode)
                logger.info("copies run %s (%s)", chooser.mode, chooser.reason)

    def _copy_as(self, mode: CopyMode) -> None:
        assert isinstance(self._engine, CpuEngine)
        self._engine.inline = mode is CopyMode.INLINE
        if self._bubbles is not None:
            self._bubbles.pacer.enabled = mode is CopyMode.IN_BUBBLES
        self._stats.inline_copy = int(mode is CopyMode.INLINE)
        self._stats.in_bubbles = int(mode is CopyMode.IN_BUBBLES)

    def use_bubbles(self, bubbles: Bubbles, *, always: bool) -> None:
        """Copy in bubbles: always, or if that is measured to be faster.

        Raises:
            ValueError: copies run in the training thread by option.
        """
        assert isinstance(self._engine, CpuEngine)
        if self._options.inline_copy:
            raise ValueError("copy_in_bubbles(): with inline_copy=True no copy runs beside training")
        self._bubbles, self._engine.pacer = bubbles, bubbles.pacer
        if always:
            self._chooser = None
            self._copy_as(CopyMode.IN_BUBBLES)
        else:
            inline = () if self._options.inline_copy is False else (CopyMode.INLINE,)
            self._chooser = CopyModeChooser((CopyMode.BESIDE, *inline, CopyMode.IN_BUBBLES))

    def first_forward(self) -> None:
        """The model's first forward of this step begins."""
        if self._capture is not None:
            self._capture.first_forward(capture_rng)

    def forward_ended(self) -> None:
        """A forward of the model ended."""
        if self._sparse:
            self._weights.forward()
        if self._capture is not None:
            self._capture.forward_ended()

    def before_optimizer_step(self, optimizer: int) -> None:
        """Optimizer number ``optimizer`` is about to change what is being copied."""
        self.finish()
        if self._gradients is not None:
            self._gradients.hold(optimizer)
        self._restless.look()
        if self._sparse:
            self._weights.before_update(optimizer)
        if self._pace.steps and not self._stepped:
            self._pace.optimizer_begins(time.perf_counter())
        self._draws.before()

    def after_optimizer_step(self, optimizer: int) -> None:
        """Optimizer number ``optimizer`` has updated its parameters."""
        self._draws.after(optimizer)
        if self._sparse:
            self._weights.after_update(optimizer)
        self._stepped = True
        self._updates[optimizer] = self._updates.get(optimizer, 0) + 1

    @validated
    def abort(self) -> None:
        """Something failed in the middle: drop the open snapshot, and let the chain begin anew."""
        self._chain.cut()
        # After a failed top, the next one would count its optimizer's updates together with this one's.
        self.forget_updates()
        if self._capture is not None:
            self._capture.abort()

    def finish(self) -> None:
        """Wait for the snapshot in flight."""
        if self._capture is not None:
            self._settle(self._capture)

    def _settle(self, capture: Capture) -> None:
        waited = capture.settle()
        if self._engine.host_waits:
            self._pace.waited(waited)
        else:
            self._pace.device_waited(waited)

    def resume(self, plan: SnapshotPlan, *, last: int, ordinal: int, sharing: ReplicatedParams) -> None:
        """Continue after a restore: snapshot ``last`` exists, the next one follows it in the chain.

        Args:
            ordinal: the number of ``last`` in the schedule.
        """
        self._provision.resume(plan, sharing)
        self._take_over_copy_mode()
        self._draws.watches = plan.shares
        self.go_on(last, ordinal, stride=1)
        self._start_capture()
        self._chain.resume(last)

    def know_losses(self, lost_iterations: float) -> None:
        """What failures have lost of partial snapshots, as iterations of all experts' tokens."""
        self._provision.lost_iterations = lost_iterations

    def go_on(self, last: int, ordinal: int, stride: int) -> None:
        """The recorded iterations between two snapshots are known; ``last`` had this number."""
        self._ordinal = ordinal
        if self._changes is not None:
            self._changes.resume(last, ordinal, stride)

    def forget_updates(self) -> None:
        """Updates so far count no more: a step has ended or failed, or a replay has made the state dense."""
        self._stepped = False
        self._updates.clear()

    def recovered(self, step: int, rng_forward: dict[str, Any] | None) -> None:
        """A replay ended at the top of ``step``, whose snapshot is there and can be parked.

        Args:
            rng_forward: recorded random state at the first forward of ``step``. A park before that
                forward must not know less than the recording.
        """
        if self._parking is not None and self.plan is not None:
            self._binding.kept.look(self.plan.state_specs(self._binding))
            scalars = self._scalars(self.plan)
            if rng_forward is not None:
                scalars["rng_forward"] = rng_forward
            self._parking.top(step, self.plan, self._ordinal % self.plan.span, scalars)

    def break_chain(self) -> None:
        """The state does not follow from the recorded snapshots: no suffix may span this point."""
        self._chain.cut()
        self._stats.chain_breaks += 1

    def _validate(self) -> None:
        self._chain.validate(captures=self._capture is not None)
        assert self._capture is None or self.plan is not None

    def replayed(self) -> None:
        """The top of a replayed step: weights are about to be loaded."""
        self.watch()
        self._weights.forget()

    def undone(self) -> AbstractContextManager[None]:
        """Steps in the block are undone at its end: no weights have changed outside of a step."""
        return self._weights.undone()

    def watch(self) -> None:
        """The top of a step without a snapshot: see which buffers change before the optimizer's step."""
        self._restless.watch()

    # -- taking ----------------------------------------------------------------------------------

    def _pending_gradients(self) -> bool:
        """True if an optimizer has not used some gradients yet: those are in no snapshot."""
        binding = self._binding
        if self.scalars.gradients_wait:
            return True
        if self._updates.keys() >= set(range(len(binding.optimizers))):
            return False
        if self._updates and self.scalars.waiting is not None:
            return self.scalars.waiting.there_are
        return any(
            owner[0] not in self._updates
            and (binding.params[n].grad is not None or binding.held(n).grad is not None)
            for n, owner in binding.owner.items()
        )

    def _gradients_captured(self) -> bool:
        """True if gradients wait while another optimizer steps, and this top's snapshot can have them."""
        waiting = self.scalars.waiting
        if not self._stepped or self.scalars.gradients_wait or waiting is None or not waiting.can_be_captured:
            return False
        # Gradients of frozen operators would be missing in a replay.
        self._provision.only_dense(
            "gradients that wait while another optimizer steps (only dense snapshots can be exact)"
        )
        return True

    def _note_pending(self, pending: bool) -> None:
        """Say once that gradients wait much longer than they ever did."""
        if not pending:
            self._longest_wait, self._waits = max(self._longest_wait, self._waits), 0
            return
        self._waits += 1
        if self._stats.snapshots and self._waits == max(_PENDING_LIMIT, 2 * self._longest_wait):
            self._not_protected(
                f"no snapshot since {self._waits} steps: at the top of each, an optimizer holds gradients "
                "that it has not used. Does another one update the weights (pass all of them), or does the "
                "loop never call zero_grad()?"
            )

    def _pend(self) -> None:
        """In the middle of an accumulation: no snapshot, and the chain continues unless weights changed."""
        self._stats.pending_gradients += 1
        if self._parking is not None:
            self._parking.again()
        if self._stepped:
            self._leave_out()
            # Between two clean boundaries one optimizer steps several times, as in a step with
            # several updates.
            self._provision.only_dense(
                "gradients that wait while another optimizer steps (only dense snapshots can be exact)"
            )
        if self._stats.pending_gradients == _PENDING_LIMIT and not self._stats.snapshots:
            self._not_protected(
                f"no snapshot in {_PENDING_LIMIT} steps: at the top of each, an optimizer holds "
                "gradients that it has not used; call zero_grad() within the step"
            )

    def _note_idle(self) -> None:
        """No snapshot is taken before a step of an optimizer; if none comes, another one trains the model."""
        if self._idle < 0 or self._stepped or self._stats.snapshots:
            self._idle = -1
            return
        self._idle += 1
        if self._idle > _PENDING_LIMIT:
            self._idle = -1
            self._not_protected(
                f"no snapshot in {_PENDING_LIMIT} steps: no optimizer that Checkpointer got has stepped; "
                "pass the optimizer whose step() the loop calls"
            )

    def _leave_out(self) -> None:
        """Take no snapshot here; the next one begins a new chain."""
        self._tape.take()
        self._chain.cut()

    def refuse(self, text: str) -> None:
        """Take no snapshot any more; ``text`` says why."""
        self._chain.refuse()
        self._not_protected(text)
        self._stats.failed += 1

    def _not_protected(self, text: str) -> None:
        logger.error("%s", text)
        self._memory.session.notice("error", "not_protected", text)

    def _take(self, step: int) -> None:
        provision = self._provision
        provision.collect(step)
        if self._capture is None and not self._prepare(step):
            return
        assert self.plan is not None
        if self._draws.found >= 0 and self.plan.shares:
            self.refuse(_replicas_differ(self._binding.kept.names[self._draws.found], step))
            return
        provision.watch_replicas(step)
        if self._changes is not None and not self._in_step(self._changes, step):
            self._leave_out()
            return
        if self._ordinal % self.plan.schedule.window == 0:
            provision.maybe_reorder()
        self._ordinal = provision.maybe_change_interval(step, self._ordinal)
        provision.maybe_change(step)
        self._stats.every = self.plan.every
        if not self._captures_everything(step):
            self._leave_out()
            return
        if self._chain.last.step == step:  # the loop was left and entered again
            self._chain.repeat()
            self._tape.put_back(self._chain.last.tape)
        capture, plan = self._capture, self.plan
        assert capture is not None
        started = time.perf_counter()
        phase = plan.phase_plan(self._binding, self._ordinal, self._selected(plan))
        self._stats.copy_plans_ms += (time.perf_counter() - started) * 1e3
        if phase is None and self._parking is None:
            self._tape.take()
            return
        scalars = self._scalars(plan)
        if self._parking is not None:
            self._parking.top(step, plan, self._ordinal % plan.span, scalars)
        if phase is None:  # a policy that skips steps: its snapshots need no chain
            return
        layout, begins = phase
        previous = -1 if begins else self._chain.previous
        begun = capture.begin(step, layout, previous, scalars, self._gradients_of(step, layout))
        self._pace.sealed(capture.take_sealing_s())
        if not begun:
            self._missed(step, capture.need_generation)
            return
        if plan.lossy:
            assert self._selection is not None
            given = scalars[RECORDED]["given"]
            self._selection.begun(step, self._ordinal, layout.anchored, given, follows=previous >= 0)
        self._chain.take(Taken(step, previous, self._tape.last))
        self._taken_bytes = layout.layout.image_len
        self._in_a_row = 0
        self._drop_unneeded()
        provision.maybe_grow(step, crowded=capture.crowded)

    def _gradients_of(self, step: int, layout: PhasePlan) -> GradientCopy | None:
        """What leads from the snapshot before to that of ``step``, for peers."""
        if self._gradients is None:
            return None
        slot_bytes = self._memory.table.segments[-1].geometry.slot_bytes
        return self._gradients.take(step, layout, self._chain.previous, slot_bytes)

    def _selected(self, plan: SnapshotPlan) -> frozenset[int] | None:
        """The experts of this top's snapshot; None: those whose turn it is, if it is partial."""
        if not plan.lossy:
            return None
        if self._selection is None or self._selection.plan is not plan:
            self._selection = ExpertSelection(plan, self.scalars.losses.captured)
        return self._selection.experts(self._ordinal)

    def _in_step(self, changes: ScheduleChanges, step: int) -> bool:
        """Make agreed changes of the schedule; True if this rank knows the schedule of ``step``."""
        knows = changes.boundary(step)
        self._ordinal = changes.calendar.ordinal(step)
        changes.wish_for_stride()
        return knows

    def _drop_unneeded(self) -> None:
        for segment in self._memory.drop_unneeded():
            self._engine.release(segment.memory)

    def _missed(self, step: int, reason: str) -> None:
        """No slot: the chain breaks. A new generation lets the old suffix stay while a new one is built."""
        self.break_chain()
        self._tape.take()
        # The floor may have moved since: no more generations are made while these are here.
        self._drop_unneeded()
        self._in_a_row += 1
        # A rank that lags behind for long would fill the log: log at 1, 2, 4, 8, …
        if self._in_a_row & (self._in_a_row - 1) == 0:
            logger.warning("no snapshot of step %d (%d in a row): %s", step, self._in_a_row, reason)
        self._provision.missed(step, reason)

    def _scalars(self, plan: SnapshotPlan) -> dict[str, Any]:
        return self.scalars.gather(plan, 1 if self._changes is None else self._changes.calendar.stride)

    def _captures_everything(self, step: int) -> bool:
        assert self._capture is not None
        assert self.plan is not None
        return self._provision.captures_everything(
            step,
            unknown=self._binding.kept.look(self.plan.state_specs(self._binding)),
            outgrown=self._capture.outgrown,
            most_updates=max(self._updates.values(), default=0),
        )

    # -- getting ready ---------------------------------------------------------------------------

    def _prepare(self, step: int) -> bool:
        """True if snapshots can be taken. What the tape holds from before the first one has no use."""
        self._tape.take()
        ready = self._provision.prepare(
            step,
            stepped=self._stepped,
            most_updates=max(self._updates.values(), default=0),
            draws=self._draws.found >= 0,
        )
        return ready and self._capture is not None

    def _switched(self, other_plan: bool) -> None:
        """A further generation is in use."""
        if other_plan and self._changes is None:
            self._ordinal = 0
        self._start_capture()
        self._chain.use(other_plan=other_plan)

    def _start_capture(self) -> None:
        plan = self.plan
        assert plan is not None
        self._stats.window = plan.schedule.window
        self._stats.dense_bytes = plan.schedule.dense_bytes
        self._stats.selectable_experts = len(plan.selectable)
        self._capture = Capture(
            self._binding,
            self._memory.table,
            self._engine,
            self._memory.session,
            num_operators=len(plan.operators),
            stats=self._stats,
            filled=self._was_filled,
            restless=self._restless.names,
        )

    # -- beside training -------------------------------------------------------------------------

    def _was_filled(self, segment: MappedSegment, index: int, step: int) -> None:
        """A slot is filled (session's thread): the daemon seals it, or we do while it is away."""
        session = self._memory.session
        if session.connected:
            session.filled(segment.generation, index, step)
        if not session.connected:
            segment.seal(index)
            self._stats.sealed_here += 1
        if self._selection is not None:
            self._prepare_next(self._selection, step)
        every = self._options.nan_check_every
        if every and self._stats.snapshots % every == 1 % every and (found := nan_tensors(segment, index)):
            # NaN in weights is data, not an error; the user wants to know.
            self._stats.nan_snapshots += 1
            text = f"step {step}: {len(found)} tensors hold NaN, first {found[0]}"
            session.notice("warning", "nan_in_weights", text)

    def _prepare_next(self, selection: ExpertSelection, step: int) -> None:
        """Choose the experts of the next snapshot, and plan its copies, so that training finds all of it."""
        following = selection.filled(step)
        planned = following and selection.plan.phase_plan(self._binding, *following)
        if planned and self._capture is not None:
            self._capture.prepare(planned[0])

    def _report(self, step: int) -> None:
        now = time.monotonic()
        if now - self._reported_at >= _REPORT_S:
            self._reported_at = now
            if self._bubbles is not None:
                self._stats.bubble_fraction = self._bubbles.measured_fraction
            self._stats.daemon_outages = self._memory.session.outages
            self._stats.daemon_changes = self._memory.session.changes
            self._memory.session.report(step, self._stats.as_dict())


def _replicas_differ(optimizer: str, step: int) -> str:
    return (
        f"optimizer {optimizer} drew random numbers before step {step}, for the first time: ranks whose "
        "generators differ have other values from here on, and one of them only captures what they had "
        "in common. No snapshot is taken any more; after a failure this run goes on from the last one. "
        "Begin a new run with Checkpointer(..., layout=LayoutOptions(capture_once=False))"
    )
