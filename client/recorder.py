"""The cadence of snapshots: what to do at the top of each step while training (not while replaying).

Life: measuring (the first steps: how long is a step, which precision suffices) → recording (one snapshot per clean boundary).
A boundary is *clean* if no gradients are pending: in the middle of an accumulation over several loop steps nothing is taken,
and the chain goes on, because weights do not change in between. The chain *breaks* when a boundary after an update is missed;
then a new generation of slots is reserved, so that the old suffix stays until a new one is complete.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptd.client import values
from ckptd.client.binding import Binding, local
from ckptd.client.capture import Capture
from ckptd.client.copymode import CopyModeChooser
from ckptd.client.freeze import Tape
from ckptd.client.memory import RankMemory
from ckptd.client.operators import Operator
from ckptd.client.pace import Pace
from ckptd.client.planning import MAX_WINDOW, Plan, TrainingSpeed, make_plan
from ckptd.client.popularity import TokenCounter
from ckptd.client.precision import PrecisionProbe
from ckptd.client.rng import capture_rng
from ckptd.client.scalars import Stateful, gather_groups, gather_state, grad_flags, python_state
from ckptd.client.segment import MappedSegment
from ckptd.client.stats import Stats
from ckptd.cuda.engine import CopyEngine, CpuEngine, measure_bandwidth
from ckptd.errors import AttachRefused, DaemonUnavailable
from ckptd.schedule import Ordering

__all__ = ["Options", "Recorder"]

logger = logging.getLogger(__name__)

MIN_SCALARS = 64 << 10
_MEASURED_STEPS = 3
_WATCHED_STEPS = 4
_RETRY_STEPS = 50
_REORDER_STEPS = 50
_REPORT_S = 1.0
_PENDING_LIMIT = 100
# A median stall above this share of a step is not noise.
_TOLERATED_STALL = 0.05


@dataclass(frozen=True, slots=True)
class Options:
    """What the user may set about cadence and size."""

    policy: str = "sliding"
    window: int | None = None
    every: int = 1
    ordering: Ordering = Ordering.HARD
    capacities: Mapping[str, float] | None = None
    # On CPU, copies take the trainer's own cores: at most this share of an iteration may go into them.
    max_overhead: float = 0.01
    nan_check_every: int = 16
    # Copy in the training thread (True), beside it (False), or whichever is measured to be faster (None); CPU only.
    inline_copy: bool | None = None


@dataclass(frozen=True, slots=True)
class _Taken:
    """The newest snapshot: its step, its predecessor, its place in the window, and the tape it was given."""

    step: int = -1
    previous: int = -1
    ordinal: int = 0
    tape: tuple[tuple[str, Any], ...] = ()


class Recorder:
    """Takes snapshots into ``memory`` at the pace that ``options`` and the measurements allow."""

    def __init__(
        self,
        binding: Binding,
        operators: Sequence[Operator],
        memory: RankMemory,
        engine: CopyEngine,
        *,
        stateful: Mapping[str, Stateful],
        tape: Tape,
        stats: Stats,
        options: Options,
        counter: TokenCounter,
        precision: PrecisionProbe,
    ) -> None:
        self._binding, self._operators, self._memory, self._engine = (
            binding,
            list(operators),
            memory,
            engine,
        )
        self._stateful, self._tape, self._stats, self._options = stateful, tape, stats, options
        self._counter, self._precision = counter, precision
        self.plan: Plan | None = None
        self._capture: Capture | None = None
        self._ordinal = 0
        self._previous = -1
        self._stepped = False
        self._updates_missed = False
        self._pace = Pace()
        self._retry_at = 0
        self._reported_at = 0.0
        # Buffers that a forward changes cannot be copied beside it: found while measuring, by version counter.
        self._buffer_versions: dict[str, tuple[int, int]] = {}
        self._restless: set[str] = set()
        self._coming: Plan | None = None
        self._coming_why = ""
        self._last = _Taken()
        self._chooser = CopyModeChooser() if options.inline_copy is None else None
        self._updates: dict[int, int] = {}
        self._uncaptured = self._announced = ""
        self._policy = options.policy
        self._group_key = binding.group_key()
        self._widen_at = 0

    # -- the life of a step ----------------------------------------------------------------------

    def top(self, step: int) -> None:
        """The top of ``step``: take its snapshot if this boundary is clean."""
        pace = self._pace
        stall = pace.boundary_s, pace.wait_s
        inline = isinstance(self._engine, CpuEngine) and self._engine.inline
        last = pace.top(
            time.perf_counter(), inline_copy_s=self._engine.last_copy_s if inline else 0.0
        )
        if last is not None:
            self._stats.note_stall(*stall)
            self._choose_copy_mode(last)
        if self._capture is not None:
            pace.waited(self._capture.settle())
            if self._capture.take_broken():
                self._previous = -1
                self._stats.chain_breaks += 1
        if self._pending_gradients():
            self._pend()
        else:
            self._take(step)
        if pace.steps <= _WATCHED_STEPS:
            self.watch()
        self._stepped = False
        self._updates.clear()
        self._report(step)
        pace.boundary_over(time.perf_counter())

    def _choose_copy_mode(self, iteration_s: float) -> None:
        chooser = self._chooser
        if chooser is None or self._capture is None or not isinstance(self._engine, CpuEngine):
            return
        before = chooser.decided
        self._engine.inline = chooser.note(iteration_s)
        if chooser.decided and not before:
            logger.info(
                "copies run %s (%s)",
                "in the training thread" if chooser.inline else "beside training",
                chooser.reason,
            )
        self._stats.inline_copy = int(chooser.inline)

    def first_forward(self) -> None:
        """The model's first forward of this step is about to run."""
        if self._capture is not None:
            self._capture.first_forward(capture_rng)

    def before_optimizer_step(self) -> None:
        """The optimizer is about to change what is being copied."""
        if self._capture is not None:
            self._pace.waited(self._capture.settle())
        self._note_restless()
        if self._pace.steps and not self._stepped:
            self._pace.optimizer_begins(time.perf_counter())

    def _note_restless(self) -> None:
        if self._buffer_versions:
            now = _versions(self._binding)
            self._restless |= {n for n, v in now.items() if self._buffer_versions.get(n) != v}
            self._buffer_versions = {}

    def after_optimizer_step(self, optimizer: int) -> None:
        """Optimizer number ``optimizer`` has updated its parameters."""
        self._stepped = True
        self._updates[optimizer] = self._updates.get(optimizer, 0) + 1

    def abort(self) -> None:
        """Something failed in the middle: forget the snapshot in the making, and let the chain begin anew."""
        self._previous = -1
        if self._capture is not None:
            self._capture.abort()

    def finish(self) -> None:
        """Wait for the snapshot in flight."""
        if self._capture is not None:
            self._pace.waited(self._capture.settle())

    def resume(self, plan: Plan, *, last: int, phase: int) -> None:
        """Go on after a restore: snapshot ``last`` exists, the next one follows it in the chain."""
        self.plan = plan
        self._previous, self._ordinal = last, phase + 1
        self._start_capture()

    def replayed(self) -> None:
        """The state is dense again: what the replayed steps did is no update since the last boundary."""
        self._stepped = False
        self._updates.clear()

    def break_chain(self) -> None:
        """The state is not what the recorded snapshots lead to: no suffix may span this point."""
        self._previous = -1
        self._stats.chain_breaks += 1

    def watch(self) -> None:
        """The top of a step without a snapshot: see which buffers change before the optimizer's step."""
        self._buffer_versions = _versions(self._binding)

    # -- taking ----------------------------------------------------------------------------------

    def _pending_gradients(self) -> bool:
        """Whether an optimizer has yet to use gradients that exist: those are in no snapshot."""
        binding = self._binding
        return any(
            owner[0] not in self._updates
            and (binding.params[n].grad is not None or binding.held(n).grad is not None)
            for n, owner in binding.owner.items()
        )

    def _pend(self) -> None:
        """A boundary in the middle of an accumulation: no snapshot, and the chain goes on unless weights changed."""
        self._stats.pending_gradients += 1
        if self._stepped:
            self._previous = -1
            self._tape.take()
            if self._policy != "dense":
                # Between two clean boundaries one optimizer steps several times, as in a step with several updates.
                self._policy = "dense"
                self._uncaptured = "gradients that wait while another optimizer steps (only dense snapshots can be exact)"
        if self._stats.pending_gradients == _PENDING_LIMIT and not self._stats.snapshots:
            text = f"no snapshot in {_PENDING_LIMIT} steps: at the top of each, an optimizer holds gradients that it has not used; call zero_grad() within the step"
            logger.error("%s", text)
            self._memory.session.notice("error", "not_protected", text)

    def _take(self, step: int) -> None:
        self._collect(step)
        if self._capture is None and not self._prepare(step):
            return
        assert self.plan is not None
        if self._ordinal % self.plan.schedule.window == 0:
            self._maybe_reorder(self.plan)
            self._maybe_widen(self.plan, step)
        if not self._captures_everything(step):
            self._tape.take()
            self._previous = -1
            return
        if self._last.step == step:
            self._take_again()
        capture, plan = self._capture, self.plan
        assert capture is not None
        phase = plan.phase_plan(self._binding, self._ordinal)
        if phase is None:  # a policy that skips steps: its snapshots need no chain
            self._ordinal += 1
            self._tape.take()
            return
        layout, begins = phase
        previous = -1 if begins else self._previous
        if capture.begin(step, layout, previous, self._scalars(plan)):
            self._last = _Taken(step, previous, self._ordinal, self._tape.last)
            self._previous = step
            self._ordinal += 1
            self._after_begin()
            return
        self._missed(step, capture.need_generation)

    def _take_again(self) -> None:
        """The loop was left and entered again at the same step: its snapshot is taken anew, in the place of the first."""
        last = self._last
        self._previous, self._ordinal = last.previous, last.ordinal
        self._tape.put_back(last.tape)

    def _after_begin(self) -> None:
        for segment in self._memory.drop_unneeded():
            self._engine.release(segment.memory)

    def _missed(self, step: int, reason: str) -> None:
        """No slot: the chain breaks here. With a new generation the old suffix can stay while a new one is built."""
        self._previous = -1
        self._stats.chain_breaks += 1
        self._tape.take()
        logger.warning("no snapshot of step %d: %s", step, reason)
        if self._coming is not None or self._previous_generation_pending() or step < self._retry_at:
            return
        assert self.plan is not None
        self._begin_generation(self.plan, step, reason)

    def _previous_generation_pending(self) -> bool:
        return len(self._memory.table.segments) > 1

    def _scalars(self, plan: Plan) -> dict[str, Any]:
        return {
            "rng": capture_rng(),
            "groups": gather_groups(self._binding),
            "state": gather_state(self._stateful),
            "python": python_state(self._binding),
            "grads": grad_flags(self._binding),
            "tape": [list(pair) for pair in self._tape.take()],
            "phases": [list(p) for p in plan.schedule.phases],
        }

    # -- getting ready ---------------------------------------------------------------------------

    def _prepare(self, step: int) -> bool:
        """Choose the window and reserve the ring, once enough was measured; True if snapshots can be taken."""
        needed = (
            1
            if self._options.window is not None or self._options.policy == "dense"
            else _MEASURED_STEPS
        )
        if max(self._updates.values(), default=0) > 1:
            self._policy = (
                "dense"  # between two updates in a step, frozen operators would have to change
            )
        if (
            self._pace.steps <= needed
            or step < self._retry_at
            # After the first update the state that the optimizer keeps is there (plain SGD keeps none).
            or not (self._stepped or any(self._binding.state(n) for n in self._binding.owner))
        ):
            self._tape.take()
            return False
        self._tape.take()
        if self._coming is None and not self._replan("no ring yet", step):
            return False
        return self._capture is not None

    def _replan(self, why: str, step: int, *, window: int | None = None) -> bool:
        """Make a new plan and ask for its memory; False if there can be none now."""
        if step < self._retry_at or not self._memory.session.connected:
            return False
        try:
            plan = self._make_plan(window=window)
        except ValueError as error:
            self._no_generation(step, why, error)
            return False
        self._begin_generation(plan, step, why)
        return True

    def _begin_generation(self, plan: Plan, step: int, why: str) -> None:
        """Ask for a further generation of slots; it is used from the boundary on at which it is there."""
        self._coming, self._coming_why = plan, why
        self._collect(step)

    def _collect(self, step: int) -> None:
        """Go over to the generation that was asked for, if it is there."""
        if self._coming is None or self._memory.session.reserving:
            return
        coming = self._coming
        try:
            self._reserve(coming)
        except TimeoutError as error:
            logger.info("new slots come later: %s", error)
            return
        except (AttachRefused, DaemonUnavailable) as error:
            self._coming = None
            self._no_generation(step, self._coming_why, error)
            return
        self._coming, self._uncaptured, self._announced = None, "", ""

    def _no_generation(self, step: int, why: str, error: Exception) -> None:
        """No memory for new slots: what is complete stays recoverable, what comes is not protected."""
        # A daemon that went away is worth another try as soon as it is back; a refusal is not.
        self._retry_at = step + (1 if isinstance(error, DaemonUnavailable) else _RETRY_STEPS)
        kept = (
            "the last complete suffix is kept, newer steps are not protected"
            if self._capture
            else "nothing is protected yet"
        )
        text = f"no slots ({why}): {error}; {kept}; trying again at step {self._retry_at}"
        logger.error("%s", text)
        self._memory.session.notice("error", "not_protected", text)

    def _make_plan(self, window: int | None = None) -> Plan:
        started = time.perf_counter()
        options = self._options
        speed = self.speed()
        on_cpu = all(local(p).device.type == "cpu" for p in self._binding.params.values())
        budget = speed.budget_bytes(options.max_overhead if on_cpu else None)
        packed = len(values.pack(self._scalars_sample(), "step scalars"))
        available = self._memory.session.available_bytes
        plan = make_plan(
            self._binding,
            self._operators,
            policy=self._policy,
            window=None if self._policy == "dense" else window or options.window,
            every=options.every,
            budget_bytes=budget,
            available_bytes=available,
            popularity=self._counter.popularity(self._operators),
            ordering=options.ordering,
            compute_dtypes=self._precision.sufficient(),
            identity=self._memory.identity.metadata(),
            scalars_capacity=max(MIN_SCALARS, 2 * packed),
            slack=self._memory.slack,
        )
        logger.info(
            "window W=%d, %d slots of %.1f MiB (dense %.1f MiB); measured %.1f ms to the optimizer's step, %.1f GB/s; %s",
            plan.schedule.window,
            plan.num_slots,
            plan.slot_bytes / 2**20,
            plan.schedule.dense_bytes / 2**20,
            speed.copy_window_s * 1e3,
            speed.bandwidth / 1e9,
            plan.schedule.reason,
        )
        self._note_prepared(started)
        return plan

    def speed(self) -> TrainingSpeed:
        """Medians of what was measured so far."""
        tensors = [local(p) for p in self._binding.params.values()]
        return TrainingSpeed(
            copy_window_s=self._pace.copy_window_s,
            iteration_s=self._pace.iteration_s,
            bandwidth=measure_bandwidth(tensors),
        )

    def _scalars_sample(self) -> dict[str, Any]:
        return {
            "rng": [capture_rng()] * 2,
            "groups": gather_groups(self._binding),
            "state": gather_state(self._stateful),
            "python": python_state(self._binding),
            "phases": list(range(len(self._operators) * 2)),
        }

    def _reserve(self, plan: Plan) -> None:
        started = time.perf_counter()
        segment = self._memory.reserve(
            plan.slot_bytes,
            plan.num_slots,
            window=plan.schedule.window,
            num_operators=len(plan.operators),
            payload=plan.payload(self._binding),
        )
        self._engine.register(segment.memory, segment.regions())
        if plan is not self.plan:
            self._ordinal, self._previous = 0, -1
        self.plan = plan
        self._start_capture()
        self._note_prepared(started)
        logger.info("protected once %d snapshots from here on are sealed", plan.policy.window)

    def _note_prepared(self, started: float) -> None:
        took = time.perf_counter() - started
        self._pace.prepared(took)
        self._stats.prepare_ms += took * 1e3

    def _start_capture(self) -> None:
        plan = self.plan
        assert plan is not None
        self._stats.window = plan.schedule.window
        self._stats.dense_bytes = plan.schedule.dense_bytes
        session = self._memory.session
        self._capture = Capture(
            self._binding,
            self._memory.table,
            self._engine,
            num_operators=len(plan.operators),
            stats=self._stats,
            finish=session.submit,
            drain=session.flush,
            filled=self._was_filled,
            restless=self._restless,
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
        every = self._options.nan_check_every
        if every and self._stats.snapshots % every == 1 % every:
            self._count_nans(segment, index, step)

    def _count_nans(self, segment: MappedSegment, index: int, step: int) -> None:
        """NaN in weights is data, not an error; that it is there is worth knowing."""
        from ckptd.client.inspect import nan_tensors

        found = nan_tensors(segment, index)
        if found:
            self._stats.nan_snapshots += 1
            self._memory.session.notice(
                "warning",
                "nan_in_weights",
                f"step {step}: {len(found)} tensors hold NaN, first {found[0]}",
            )

    def _maybe_reorder(self, plan: Plan) -> None:
        if plan.schedule.window == 1 or plan.policy_name == "dense":
            return
        schedule = self._counter.reordered(plan, plan.slot_bytes, every=_REORDER_STEPS)
        if schedule is not None:
            plan.use(schedule)
            self._stats.reorders += 1

    def _captures_everything(self, step: int) -> bool:
        """Whether the plan knows all state there is; plans anew where an optimizer began to keep or to update more.

        False while that is not possible: an inexact snapshot is worse than none.
        """
        assert self.plan is not None
        assert self._capture is not None
        key = self._binding.group_key()
        outgrown = self._capture.outgrown
        found = (
            self._uncaptured
            or self._capture.unknown_state()
            or (f"step scalars of {outgrown} bytes" if outgrown else "")
        )
        if key != self._group_key:
            found = "a parameter group"
            self._binding.refresh()
        if self._policy != "dense" and max(self._updates.values(), default=0) > 1:
            # Frozen operators would need the weights between the two updates, which no snapshot holds.
            found, self._policy = (
                "a second update by one optimizer within a step (only dense snapshots can be exact)",
                "dense",
            )
        if not found:
            return True
        if found != self._announced:
            self._announced = found
            self._coming = None  # what is on its way was planned without it
            logger.warning("found %s after the snapshots were planned: planning anew", found)
        self._uncaptured, self._group_key = found, key
        if self._coming is None:
            dense = self._policy == "dense"
            self._replan(found, step, window=None if dense else self.plan.schedule.window)
        return not self._uncaptured

    def _maybe_widen(self, plan: Plan, step: int) -> None:
        """Copies that stall the trainer mean that the window was chosen too small: widen it (DESIGN 5.3)."""
        if self._options.window is not None or plan.policy_name == "dense" or step < self._widen_at:
            return
        self._widen_at = step + _RETRY_STEPS
        share = self._pace.stall_share
        if share <= _TOLERATED_STALL or self._previous_generation_pending():
            return
        wider = plan.schedule.window + max(1, plan.schedule.window // 2)
        try:
            wide = self._make_plan(window=min(wider, MAX_WINDOW))
        except ValueError as error:
            logger.warning("the window stays at %d: %s", plan.schedule.window, error)
            return
        if wide.schedule.window > plan.schedule.window and wide.slot_bytes < plan.slot_bytes:
            logger.info(
                "copies stall training for %.1f %% of a step: window %d -> %d",
                share * 1e2,
                plan.schedule.window,
                wide.schedule.window,
            )
            self._pace.forget_stalls()
            self._begin_generation(wide, step, "a wider window")

    def _report(self, step: int) -> None:
        now = time.monotonic()
        if now - self._reported_at >= _REPORT_S:
            self._reported_at = now
            self._stats.daemon_outages = self._memory.session.outages
            self._memory.session.report(step, self._stats.as_dict())


def _versions(binding: Binding) -> dict[str, tuple[int, int]]:
    """Identity and version counter of every buffer."""
    return {n: (id(b), b._version) for n, b in binding.buffers().items()}
