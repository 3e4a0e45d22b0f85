"""What the recorder takes snapshots with: the plan, and the generations of slots that it needs; made once enough was measured.

Planning and reserving happen in the training thread and take milliseconds; memory is made by the daemon meanwhile, and is used
from the boundary on at which it is there. Several ranks first agree on what their plans follow from (see ``Windows``), so
that all have one window.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptd.client import values
from ckptd.client.binding import Binding, local
from ckptd.client.changes import Changes
from ckptd.client.memory import RankMemory
from ckptd.client.operators import Operator
from ckptd.client.pace import Pace
from ckptd.client.plan import Plan
from ckptd.client.planning import MAX_WINDOW, TrainingSpeed, make_plan, most_pieces, plan_alike
from ckptd.client.popularity import TokenCounter
from ckptd.client.precision import PrecisionProbe
from ckptd.client.sharing import Replicas, Sharing
from ckptd.client.stats import Stats
from ckptd.client.windows import Windows
from ckptd.cuda.engine import CopyEngine, measure_bandwidth
from ckptd.errors import AttachRefused, DaemonUnavailable
from ckptd.schedules.calendar import Calendar
from ckptd.schedules.schedule import Ordering
from ckptd.schedules.switching import Change

__all__ = ["MIN_SCALARS", "Options", "Provision"]

logger = logging.getLogger(__name__)

MIN_SCALARS = 64 << 10
_MEASURED_STEPS = 3
_RETRY_STEPS = 50
# Where much of each step is lost, the next look comes sooner, and the window grows by as much as that asks for, but by this factor at most.
_SEVERE_STEPS = 8
_MOST_WIDER = 8.0
_REORDER_STEPS = 50
# What one rank has sealed the others hear of a little later: slots for the meantime, where no peers ask for some anyway.
_RANKS_SLACK = 2
_MORE_SLOTS = 2
_NUMBER_BYTES = 5  # msgpack's longest for an operator's number
# A peer that is behind by more than a window that often in a row, _RETRY_STEPS apart, cannot keep up.
_LAGGING_LOOKS = 2
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


class Provision:
    """Plans and reserves.

    Args:
        scalars_sample: step scalars of the size that they will have.
        switched: called when a further generation is in use; told whether its plan is another than before.
    """

    def __init__(
        self,
        binding: Binding,
        operators: Sequence[Operator],
        memory: RankMemory,
        engine: CopyEngine,
        *,
        stats: Stats,
        options: Options,
        counter: TokenCounter,
        precision: PrecisionProbe,
        pace: Pace,
        sharing: Sharing,
        scalars_sample: Callable[[], dict[str, Any]],
        switched: Callable[[bool], None],
    ) -> None:
        self._binding, self._operators, self._memory, self._engine = (
            binding,
            list(operators),
            memory,
            engine,
        )
        self._stats, self._options, self._counter, self._precision = (
            stats,
            options,
            counter,
            precision,
        )
        self._pace, self._scalars_sample, self._switched = pace, scalars_sample, switched
        self.plan: Plan | None = None
        self._policy = options.policy
        self._coming: Plan | None = None
        self._coming_why, self._coming_slots, self._coming_optional = "", 0, False
        self._retry_at = self._widen_at = self._severe_at = self._optional_at = 0
        self._uncaptured = self._announced = ""
        self._group_key = binding.group_key()
        self._ranks = memory.identity.world_size
        self._windows = Windows(memory)
        # Several ranks change their schedule together, or not at all; one by itself, whenever it wants to.
        self.changes = (
            None
            if self._ranks == 1
            else Changes(self, binding, memory, engine, counter=counter, pace=pace, stats=stats)
        )
        self._own_plan: Plan | None = None
        # The plan that was told to the ranks with which it shares, and whether they have answered. It is kept until it is in
        # use: what they leave to this rank goes by it.
        self._shared_plan: Plan | None = None
        self._settled = False
        self._sharing = sharing
        # Of what is shared, after the first update: alike at the start says little.
        self._values: Mapping[Replicas, str] | None = None
        self._longest = MAX_WINDOW
        self._lagging = 0
        self._budget: int | None = None
        self._available: int | None = None

    def resume(self, plan: Plan, sharing: Sharing) -> None:
        """Go on with the plan of an earlier life.

        Args:
            sharing: as it was told then. Were operators cut in another way from now on, other ranks would look in vain for
                what they leave to this one.
        """
        self.plan = plan
        if plan.shares:
            self._sharing = sharing

    def close(self) -> None:
        """Stop waiting for other ranks."""
        self._windows.close()
        if self.changes is not None:
            self.changes.close()

    # -- the first plan --------------------------------------------------------------------------

    def prepare(self, step: int, *, stepped: bool, most_updates: int) -> bool:
        """Choose the window and reserve the ring, once enough was measured; True if snapshots can be taken."""
        if self._values is None and stepped:
            self._values = self._sharing.checksums(self._binding)
        fixed = self._options.window is not None or self._options.policy == "dense"
        if most_updates > 1:
            self._policy = (
                "dense"  # between two updates in a step, frozen operators would have to change
            )
        if (
            self._pace.steps <= (1 if fixed else _MEASURED_STEPS)
            or step < self._retry_at
            # After the first update the state that the optimizer keeps is there (plain SGD keeps none).
            or not (stepped or any(self._binding.state(n) for n in self._binding.owner))
            or (self._values is None and self._sharing.replicas)
        ):
            return False
        if self._coming is None and not self._plan_first(step):
            return False
        return self.plan is not None

    def _plan_first(self, step: int) -> bool:
        why = "no ring yet"
        if self._ranks == 1:
            return self._replan(why, step)
        if self._shared_plan is not None:
            connected = self._memory.session.connected
            return connected and self._share(self._shared_plan, step, why)
        windows = self._windows
        if self._budget is None:
            agreed = windows.limits(self._measured)
            if agreed is None:
                windows.waits(step)
                return False
            self._budget, self._available, self._longest = agreed
        if self._own_plan is None:
            self._own_plan = self._try_plan(why, step, window=None)
            if self._own_plan is None:
                return False
            self._planned_alike(self._own_plan)
        plan: Plan | None = self._own_plan
        assert self.changes is not None
        agreed_on = windows.first(
            min(self._own_plan.schedule.window, self._longest),
            dense=self._policy == "dense",
            stride=self.changes.strides.shortest,
        )
        if agreed_on is None:
            windows.waits(step)
            return False
        window, dense, stride = agreed_on
        self.changes.calendar = Calendar(stride=stride)
        if dense and self._policy != "dense":
            logger.info("dense snapshots, since on another rank no others are exact")
            self._policy, window = "dense", 1
            plan = self._try_plan(why, step, window=None)
        elif dense:
            window = 1
        elif window != self._own_plan.schedule.window:
            logger.info("the ranks agreed on a window of %d", window)
            plan = self._try_plan(why, step, window=window)
        if plan is None:
            return False
        if plan.schedule.window != window:
            error = ValueError(
                f"the ranks agreed on {window}, this one can only have {plan.schedule.window}"
            )
            self._no_generation(step, why, error)
            return False
        return self._share(plan, step, why)

    def _share(self, plan: Plan, step: int, why: str) -> bool:
        """Go on with a plan once all with whom it shares have the same; if they have not, with all of it captured here."""
        self._shared_plan = plan
        if not self._settled:
            alike = self._planned_alike(plan)
            if alike is None:
                self._windows.waits(step)
                return False
            self._settled = True
            if not alike:
                self._capture_all(plan)
        self._begin_generation(plan, step, why)
        return True

    def _capture_all(self, plan: Plan) -> None:
        text = "not all ranks have, or plan, alike what they should have in common: each captures all of it"
        logger.warning("%s", text)
        self._memory.session.notice("warning", "not_shared", text)
        # The same operators in the same phases: in another group, ranks that plan alike may rely on this one.
        plan.capture_all(self._binding)
        if self._memory.persists:
            plan.make_room_for_uploads(self._memory.session.available_bytes)

    def _planned_alike(self, plan: Plan) -> bool | None:
        told = self._sharing.fingerprints(
            plan.operators, plan.schedule.phases, plan.owners, self._values or {}
        )
        return self._windows.planned_alike(plan.schedule.window, told)

    def _measured(self) -> tuple[int, int, int]:
        budget, available = self._measured_budget(), self._memory.session.available_bytes
        return budget, available, len(self._operators)

    def _measured_budget(self) -> int:
        on_cpu = all(local(p).device.type == "cpu" for p in self._binding.params.values())
        return self.speed().budget_bytes(self._options.max_overhead if on_cpu else None)

    def speed(self) -> TrainingSpeed:
        """Medians of what was measured so far."""
        tensors = [local(p) for p in self._binding.params.values()]
        return TrainingSpeed(
            copy_window_s=self._pace.copy_window_s,
            iteration_s=self._pace.iteration_s,
            bandwidth=measure_bandwidth(tensors),
        )

    # -- plans -----------------------------------------------------------------------------------

    def _replan(self, why: str, step: int, *, window: int | None = None) -> bool:
        """Make a new plan and ask for its memory; False if there can be none now."""
        plan = self._try_plan(why, step, window=window)
        if plan is None:
            return False
        self._begin_generation(plan, step, why)
        return True

    def _try_plan(self, why: str, step: int, *, window: int | None) -> Plan | None:
        if step < self._retry_at or not self._memory.session.connected:
            return None
        try:
            return self._make_plan(window)
        except ValueError as error:
            self._no_generation(step, why, error)
            return None

    def _make_plan(self, window: int | None = None, *, policy: str = "") -> Plan:
        started = time.perf_counter()
        options, alone = self._options, self._ranks == 1
        budget = self._budget
        if budget is None and not alone and self.plan is not None:  # agreed on in an earlier life
            budget = self.plan.budget_bytes
        if budget is None:
            budget = self._measured_budget()
        available = self._memory.session.available_bytes
        if self._available is not None and self.plan is None:
            available = min(available, self._available)
        plan = make_plan(
            self._binding,
            self._operators,
            policy=policy or self._policy,
            window=None if "dense" in (policy, self._policy) else window or options.window,
            every=options.every,
            budget_bytes=budget,
            available_bytes=available,
            # Each rank counts its own tokens, and all must have one order.
            popularity=self._counter.popularity(self._operators) if alone else None,
            ordering=options.ordering,
            compute_dtypes=self._precision.sufficient(),
            identity=self._memory.identity.metadata(),
            scalars_capacity=self._scalars_capacity(),
            slack=max(self._memory.slack, 0 if alone else _RANKS_SLACK),
            sharing=self._sharing,
            before=self.plan,
        )
        if self._memory.persists:
            plan.make_room_for_uploads(available)
        logger.info(
            "window W=%d, %d slots of %.1f MiB (dense %.1f MiB); %.1f MiB may be copied per step; %s",
            plan.schedule.window,
            plan.num_slots,
            plan.slot_bytes / 2**20,
            plan.schedule.dense_bytes / 2**20,
            budget / 2**20,
            plan.schedule.reason,
        )
        self._note_prepared(started)
        return plan

    def _scalars_capacity(self) -> int:
        """Room for step scalars. Each operator's number is in them, of what is shared that of each piece."""
        packed = len(values.pack(self._scalars_sample(), "step scalars"))
        pieces = most_pieces(self._sharing, self._operators)
        return max(MIN_SCALARS, 2 * packed + _NUMBER_BYTES * pieces)

    def maybe_reorder(self) -> None:
        """Where a window begins: go one step closer to today's popularity."""
        plan = self.plan
        if plan is None or plan.schedule.window == 1 or plan.policy_name == "dense":
            return
        if self.changes is not None:
            self.changes.wish_for_order(every=_REORDER_STEPS)
            return
        schedule = self._counter.reordered(plan, plan.slot_bytes, every=_REORDER_STEPS)
        if schedule is not None:
            plan.use(schedule)
            self._stats.reorders += 1

    def maybe_widen(self, step: int) -> None:
        """A wider window makes snapshots smaller: where copies stall the trainer, or peers cannot keep up (DESIGN 5.3)."""
        plan = self.plan
        if plan is None or self._options.window is not None or plan.policy_name == "dense":
            return
        soon = self._pace.stalls_severely and step >= self._severe_at
        if not (soon or step >= self._widen_at):
            return
        if self.reserves() or self._previous_generation_pending():
            return
        self._severe_at = step + _SEVERE_STEPS
        self._widen_at = step + _RETRY_STEPS
        wide = self._worth_widening(plan)
        if wide is None:
            self._severe_at = self._widen_at  # to plan again soon would find the same
            return
        if self.changes is not None:
            why = f"copies take too long: window {plan.schedule.window} -> {wide.schedule.window}"
            self.changes.wish(Change(why, window=wide.schedule.window))
        else:
            logger.info("window %d -> %d", plan.schedule.window, wide.schedule.window)
            self._pace.forget_stalls()
            self._begin_generation(wide, step, "a wider window", optional=True)

    def _worth_widening(self, plan: Plan) -> Plan | None:
        """The plan of a wider window, if there is a reason for one, and it helps."""
        behind = self._memory.table.ring_hint.behind
        self._lagging = self._lagging + 1 if behind > plan.schedule.window else 0
        share = self._pace.stall_share
        if share > _TOLERATED_STALL:
            why = f"snapshots hold training up for {share:.1%} of a step"
        elif self._lagging >= _LAGGING_LOOKS:
            why = f"a peer is {behind} iterations behind, and was when last looked at"
        else:
            return None
        # What is lost of a step is lost by bytes: as many times fewer of them would do.
        factor = min(_MOST_WIDER, 1.0 / (1.0 - min(share, 0.99)))
        window = plan.schedule.window
        wider = max(window + max(1, window // 2), math.ceil(window * factor))
        try:
            wide = self._make_plan(min(wider, MAX_WINDOW, self._longest))
        except ValueError as error:
            logger.warning("%s, but the window stays: %s", why, error)
            return None
        if wide.schedule.window <= window or wide.slot_bytes >= plan.slot_bytes:
            return None
        logger.info("%s: a wider window would help", why)
        self._lagging = 0
        return wide

    def captures_everything(
        self, step: int, *, unknown: str, outgrown: int, most_updates: int
    ) -> bool:
        """Whether the plan knows all state there is; plans anew where an optimizer began to keep or to update more.

        False while that is not possible: an inexact snapshot is worse than none.

        Args:
            unknown: optimizer state that no plan captures.
            outgrown: the size of step scalars that no longer fit, or 0.
            most_updates: how often one optimizer updated within the last step.
        """
        assert self.plan is not None
        key = self._binding.group_key()
        found = (
            self._uncaptured or unknown or (f"step scalars of {outgrown} bytes" if outgrown else "")
        )
        if key != self._group_key:
            found = "a parameter group"
            self._binding.refresh()
        if self._policy != "dense" and most_updates > 1:
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
        if self.changes is not None:
            self._replan_alike(found, step)
        elif self._coming is None:
            dense = self._policy == "dense"
            self._replan(found, step, window=None if dense else self.plan.schedule.window)
        return not self._uncaptured

    def _replan_alike(self, why: str, step: int) -> None:
        """Plan anew by the schedule that all ranks have; to dense snapshots they go over together."""
        plan, changes = self.plan, self.changes
        assert plan is not None
        assert changes is not None
        if self._policy == "dense" and plan.policy_name != "dense":
            changes.wish(Change(why, dense=True))
            return
        if changes.open:
            changes.unable(f"a rank must plan anew: {why}")
            return
        if self._coming is None and step >= self._retry_at and self._memory.session.connected:
            alike = plan_alike(
                plan,
                self._binding,
                self._scalars_capacity(),
                changes.calendar.orders,
                self._sharing,
            )
            if self._memory.persists:
                alike.make_room_for_uploads(self._memory.session.available_bytes)
            self._begin_generation(alike, step, why)

    # -- together with the other ranks (see `ckptd.client.changes.Plans`) --------------------------

    def reserves(self) -> bool:
        """Whether memory for something else is on its way."""
        return self._coming is not None

    def plan_for(self, change: Change) -> Plan:
        """A plan with another window, or of dense snapshots.

        Raises:
            ValueError: there can be none.
        """
        return self._make_plan(change.window or None, policy="dense" if change.dense else "")

    def adopt(self, plan: Plan) -> None:
        """All ranks go over to this plan; its memory is the newest generation."""
        self.plan, self._policy = plan, plan.policy_name
        self._coming, self._uncaptured, self._announced = None, "", ""
        self._pace.forget_stalls()
        self._switched(True)

    def only_dense(self, why: str) -> None:
        """From the next plan on: no sparse snapshot could be exact."""
        if self._policy != "dense":
            self._policy, self._uncaptured = "dense", why

    # -- generations -----------------------------------------------------------------------------

    def missed(self, step: int, reason: str) -> None:
        """No slot was free. With a new generation the old suffix can stay while a new one is built."""
        if self.reserves() or self._making_room() or self._previous_generation_pending():
            return
        if step < self._retry_at:
            return
        assert self.plan is not None
        self._begin_generation(self.plan, step, reason)

    def maybe_grow(self, step: int, *, crowded: bool) -> None:
        """More slots, before there are too few, where this ring must hold more than its own suffix.

        That is so while another rank lags behind, and where another rank's window is longer: all ranks replay from one
        start (docs/replication.md §6).

        Args:
            crowded: the ring is full of what the other ranks need.
        """
        plan = self.plan
        if (
            plan is None
            or step < self._optional_at
            or plan.policy_name == "dense"
            or self._ranks == 1
        ):
            return
        needed = self._memory.table.ring_hint.span + 2 + plan.slack
        longer = needed > self._memory.table.segments[-1].geometry.num_slots
        if not (longer or crowded) or self._coming is not None or self._making_room():
            return
        if self._previous_generation_pending():
            return
        # Never more than two suffixes need: a floor that is further behind is stuck, and a further generation helps then.
        most = max(plan.num_slots, 2 * plan.schedule.window + 2 + plan.slack)
        slots = needed if longer else min(plan.num_slots + _MORE_SLOTS, most)
        why = "another rank's window is longer" if longer else "another rank lags behind"
        logger.info("%s: a ring of %d slots", why, slots)
        self._stats.grown += 1
        self._begin_generation(plan, step, why, slots=slots, optional=True)

    def collect(self, step: int) -> None:
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
            self._refused(coming, step, error)
            return
        self._coming, self._uncaptured, self._announced = None, "", ""

    def _refused(self, coming: Plan, step: int, error: Exception) -> None:
        self._coming = None
        if isinstance(error, AttachRefused) and coming.upload_slots:
            slots = self._coming_slots - coming.upload_slots
            coming.leave_no_room_for_uploads()
            logger.warning("no memory for slots that wait to be uploaded: %s", error)
            self._begin_generation(
                coming, step, self._coming_why, slots=slots, optional=self._coming_optional
            )
        elif self._coming_optional:
            self._optional_at = step + _RETRY_STEPS
            logger.info("%s: no memory for more slots (%s)", self._coming_why, error)
        else:
            self._no_generation(step, self._coming_why, error)

    def _begin_generation(
        self, plan: Plan, step: int, why: str, *, slots: int | None = None, optional: bool = False
    ) -> None:
        """Ask for a further generation of slots; it is used from the boundary on at which it is there.

        Args:
            slots: how many, if not as many as the plan has.
            optional: snapshots go on without it.
        """
        self._coming, self._coming_why = plan, why
        self._coming_slots, self._coming_optional = slots or plan.num_slots, optional
        self.collect(step)

    def _reserve(self, plan: Plan) -> None:
        started = time.perf_counter()
        segment = self._memory.reserve(
            plan.slot_bytes,
            self._coming_slots,
            patient=self.plan is None,
            window=plan.schedule.window,
            num_operators=len(plan.operators),
            payload=plan.payload(self._binding),
        )
        self._engine.register(segment.memory, segment.regions())
        other = plan is not self.plan
        self.plan, plan.num_slots = plan, self._coming_slots
        self._switched(other)
        self._note_prepared(started)
        logger.info("protected once %d snapshots from here on are sealed", plan.policy.window)

    def _no_generation(self, step: int, why: str, error: Exception) -> None:
        """No memory for new slots: what is complete stays recoverable, what comes is not protected."""
        # A daemon that went away is worth another try as soon as it is back; a refusal is not.
        self._retry_at = step + (1 if isinstance(error, DaemonUnavailable) else _RETRY_STEPS)
        kept = (
            "the last complete suffix is kept, newer steps are not protected"
            if self.plan is not None
            else "nothing is protected yet"
        )
        text = f"no slots ({why}): {error}; {kept}; trying again at step {self._retry_at}"
        logger.error("%s", text)
        self._memory.session.notice("error", "not_protected", text)

    def _making_room(self) -> bool:
        """Whether memory for a change of the schedule is on its way: one request at a time."""
        return self.changes is not None and self.changes.reserving

    def _previous_generation_pending(self) -> bool:
        """Whether there are as many generations as may be.

        With several ranks one may hold what they agreed on, one what they may agree on next, and one the chain that is built.
        """
        return len(self._memory.table.segments) >= (2 if self._ranks == 1 else 3)

    def _note_prepared(self, started: float) -> None:
        took = time.perf_counter() - started
        self._pace.prepared(took)
        self._stats.prepare_ms += took * 1e3
