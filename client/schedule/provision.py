"""The plan that the recorder snapshots by, and the generations of slots for it.

Planning and reserving run in the training thread and take milliseconds. The daemon makes the memory
meanwhile; a generation is used from the first boundary at which it is there. Several ranks first
agree on what their plans follow from (`FirstPlan`), so that all have one window, and change it
together (`ScheduleChanges`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckptd.client.log_lines import get_logger
from ckptd.client.model.replicated_params import NOTHING_SHARED, ReplicatedParams
from ckptd.client.options import MAX_WINDOW
from ckptd.client.schedule.initial_schedule import FirstPlan
from ckptd.client.schedule.measurements import ReorderPace, StepTiming
from ckptd.client.schedule.partial_schedule import PartialTurns
from ckptd.client.schedule.planner import Planner, RankContext, note_prepared
from ckptd.client.schedule.replica_watch import ReplicaWatch
from ckptd.client.schedule.schedule_change import ScheduleChanges
from ckptd.client.schedule.snapshot_plan import SnapshotPlan
from ckptd.core.interval_control import IntervalControl
from ckptd.core.slots.ring import most_slots, slots_for_window
from ckptd.core.switching import Change
from ckptd.core.window_control import Shortage, SnapshotReading, WindowControl
from ckptd.errors import AttachRefused, DaemonUnavailable

logger = get_logger(__name__)

# Steps before the first plan: more on a device, where later ones are compared with them.
_MEASURED_STEPS, _MEASURED_ON_DEVICE = 3, 6
_RETRY_STEPS = 50
_REORDER_STEPS = 50
# Of the time, for the copy plans of another order: with thousands of parameters a phase takes a tenth of a
# second of the training thread, and another order saves but a part of a replay.
_REORDER_SHARE = 0.002
_MORE_SLOTS = 2
# A peer that is behind by more than a window in so many looks in a row cannot keep up.
_LAGGING_LOOKS = 2
# A median stall above this share of a step is not noise: where copies share the trainer's cores, and on a
# device, whose iterations are regular.
_TOLERATED_STALL, _TOLERATED_ON_DEVICE = 0.05, 0.01


@dataclass(frozen=True, slots=True)
class _Request:
    """Slots that were requested for a plan; ``optional``: snapshots continue without them."""

    plan: SnapshotPlan
    why: str
    slots: int
    optional: bool


class NewSlots:
    """Requests further generations of slots from the daemon, one at a time.

    If no memory is left, what is complete stays recoverable, later snapshots are not protected, and
    the request is repeated later.

    Args:
        in_use: returns the current plan; None: there is none yet.
        use: called when a generation is there: snapshots follow this plan from now on.

    Attributes:
        retry_at: the first step at which a new request makes sense.
        optional_at: the same for slots that snapshots can do without.
    """

    def __init__(
        self,
        context: RankContext,
        pace: StepTiming,
        *,
        in_use: Callable[[], SnapshotPlan | None],
        use: Callable[[SnapshotPlan], None],
    ) -> None:
        self._binding, self._memory, self._engine = context.binding, context.memory, context.engine
        self._pace, self._stats = pace, context.stats
        self._in_use, self._use = in_use, use
        self._request: _Request | None = None
        self.retry_at = self.optional_at = 0

    @property
    def coming(self) -> bool:
        """True while a request is open."""
        return self._request is not None

    @property
    def pending(self) -> bool:
        """True if there are as many generations as allowed.

        With several ranks one may hold what they agreed on, one what they may agree on next, and
        one the chain that is being built.
        """
        most = 2 if self._memory.identity.world_size == 1 else 3
        return len(self._memory.table.segments) >= most

    def ask(
        self,
        plan: SnapshotPlan,
        step: int,
        why: str,
        *,
        slots: int | None = None,
        optional: bool = False,
    ) -> None:
        """Request a generation; it may be there at once.

        Args:
            slots: None: as many as the plan has.
            optional: snapshots continue without it.
        """
        self._request = _Request(plan, why, slots or plan.num_slots, optional)
        self.collect(step)

    def collect(self, step: int) -> None:
        """Use the requested generation if it is there."""
        request = self._request
        if request is None or self._memory.session.reserving:
            return
        try:
            self._reserve(request)
        except TimeoutError as error:
            logger.info("new slots come later: %s", error)
            return
        except (AttachRefused, DaemonUnavailable) as error:
            self._refused(request, step, error)
            return
        self._request = None

    def forget(self) -> None:
        """Drop the open request."""
        self._request = None

    def failed(self, step: int, why: str, error: Exception) -> None:
        """Report that there are no new slots; a later step tries again."""
        # A daemon that went away is worth another try as soon as it is back; a refusal is not.
        self.retry_at = step + (1 if isinstance(error, DaemonUnavailable) else _RETRY_STEPS)
        kept = (
            "the last complete suffix is kept, newer steps are not protected"
            if self._in_use() is not None
            else "nothing is protected yet"
        )
        text = f"no slots ({why}): {error}; {kept}; trying again at step {self.retry_at}"
        logger.error("%s", text)
        self._memory.session.notice("error", "not_protected", text)

    def _reserve(self, request: _Request) -> None:
        started, plan = time.perf_counter(), request.plan
        segment = self._memory.reserve(
            plan.slot_bytes,
            request.slots,
            patient=self._in_use() is None,
            window=plan.policy.window,
            num_operators=len(plan.operators),
            payload=plan.payload(self._binding),
        )
        self._engine.register(segment.memory, segment.regions())
        plan.num_slots = request.slots
        self._use(plan)
        note_prepared(self._pace, self._stats, started)
        logger.info("protected once %d snapshots from here on are sealed", plan.policy.window)

    def _refused(self, request: _Request, step: int, error: Exception) -> None:
        self._request = None
        plan = request.plan
        if isinstance(error, AttachRefused) and plan.upload_slots:
            slots = request.slots - plan.upload_slots
            plan.leave_no_room_for_uploads()
            logger.warning("no memory for slots that wait to be uploaded: %s", error)
            self.ask(plan, step, request.why, slots=slots, optional=request.optional)
        elif request.optional:
            self.optional_at = step + _RETRY_STEPS
            logger.info("%s: no memory for more slots (%s)", request.why, error)
        else:
            self.failed(step, request.why, error)


class Provision:
    """Decides when to plan, and when to request slots.

    Args:
        scalars_sample: returns step scalars of the expected size.
        switched: called when a further generation is in use, with True if its plan is another one.

    Attributes:
        control: judges the size of the snapshots that are taken.
        lost_iterations: what failures have lost of partial snapshots, as iterations of all experts.
    """

    def __init__(
        self,
        context: RankContext,
        pace: StepTiming,
        *,
        scalars_sample: Callable[[], dict[str, Any]],
        switched: Callable[[bool], None],
    ) -> None:
        self._binding, self._memory = context.binding, context.memory
        self._stats, self._options, self._counter = context.stats, context.options, context.counter
        self._pace, self._switched = pace, switched
        self.plan: SnapshotPlan | None = None
        self._planner = Planner(context, pace, scalars_sample)
        self._slots = NewSlots(context, pace, in_use=lambda: self.plan, use=self._use)
        self._first = FirstPlan(context.binding, context.memory, self._planner, self._slots.failed)
        self._watch = ReplicaWatch(context.binding, context.memory)
        # Several ranks change their schedule together, or not at all; one by itself, whenever it wants to.
        self.changes = None if context.alone else ScheduleChanges(self, context, pace)
        on_device = not context.engine.host_waits
        self._measured_steps = _MEASURED_ON_DEVICE if on_device else _MEASURED_STEPS
        self.control = WindowControl(
            bound=_TOLERATED_ON_DEVICE if on_device else _TOLERATED_STALL, regular=on_device
        )
        options = context.options
        rule = options.interval_rule
        # Of dense snapshots whose interval follows a rule.
        self._interval = (
            None if rule is None else IntervalControl(rule, bound=options.max_stall, mtbf_s=options.mtbf_s)
        )
        self._reorders = ReorderPace(_REORDER_SHARE)
        self._told_misfit = False
        self._uncaptured = self._announced = self._announced_policy = ""
        self._group_key = self._binding.group_key()
        self._lagging = 0
        self.lost_iterations = 0.0
        self._look_again_at = self._interval_at = 0
        self._suffices_for = 0  # the window that the limit allows, and that copies do not need

    def resume(self, plan: SnapshotPlan, sharing: ReplicatedParams) -> None:
        """Continue with the plan of an earlier life.

        Args:
            sharing: as recorded then. If operators were cut otherwise from now on, other ranks would
                not find what they leave to this one.
        """
        self.plan = plan
        self._group_key = self._binding.group_key()
        if plan.group_key != self._group_key:  # a group came after these snapshots, in what is replayed
            self._uncaptured = "a parameter group"
        plan.with_gradients = self._options.to_peers == "gradients"
        # Where each rank has captured its own, values differ that are alike when a script begins.
        self._planner.sharing = sharing if plan.shares else NOTHING_SHARED

    def note(self, reading: SnapshotReading) -> None:
        """Add what the step that ended cost."""
        self.control.note(reading)
        if self._interval is not None and self.plan is not None:
            behind = self._memory.table.ring_hint.behind
            self._interval.note(reading, behind=behind, every=self.plan.every)

    def close(self) -> None:
        """Stop waiting for other ranks."""
        self._first.close()
        self._watch.close()
        if self.changes is not None:
            self.changes.close()

    def watch_replicas(self, step: int) -> None:
        """See whether ranks still hold the same values of what one of them captures; call it at each clean
        boundary. If they train apart, this rank captures all of its own as soon as there is memory for it.
        """
        if self.plan is None or not self.plan.shares or not self._planner.sharing.replicas:
            return
        if apart := self._watch.look(step, self._planner.sharing):
            logger.warning("%s", apart)
            self._memory.session.notice("warning", "not_shared", apart)
            self._watch.close()
            self._planner.sharing = NOTHING_SHARED
            self._uncaptured = "parameters that differ between ranks"

    # -- the first plan --------------------------------------------------------------------------

    def prepare(self, step: int, *, stepped: bool, most_updates: int, draws: bool = False) -> bool:
        """Choose the window and reserve the ring after enough measurements; True if snapshots can be taken.

        Args:
            stepped: the last step had an update.
            most_updates: the most updates of one optimizer within it.
            draws: an optimizer draws random numbers.
        """
        if stepped:
            self._first.look(draws=draws)
        fixed = self._planner.window is not None or self._options.dense
        if most_updates > 1 and not self._planner.lossy:
            # Between two updates in a step, frozen operators would have to change.
            self._planner.policy = "dense"
        if (
            self._pace.steps <= (1 if fixed else self._measured_steps)
            or step < self._slots.retry_at
            # After the first update the optimizer's state is there (plain SGD keeps none).
            or not (stepped or any(self._binding.state(n) for n in self._binding.owner))
            or not self._first.looked
        ):
            return False
        if not self._slots.coming:
            why = "no ring yet"

            def make(window: int | None) -> SnapshotPlan | None:
                return self._try_plan(why, step, window=window)

            plan = make(None) if self.changes is None else self._first.find(step, why, self.changes, make)
            if plan is None:
                return False
            self._slots.ask(plan, step, why)
        return self.plan is not None

    # -- plans -----------------------------------------------------------------------------------

    def _try_plan(self, why: str, step: int, *, window: int | None) -> SnapshotPlan | None:
        if step < self._slots.retry_at or not self._memory.session.connected:
            return None
        try:
            if self.plan is None and window is None and (turns := self._planner.turns) is not None:
                return self._first_partial(turns, step)
            return self._planner.make(self.plan, window=window)
        except ValueError as error:
            self._slots.failed(step, why, error)
            return None

    def _first_partial(self, turns: PartialTurns, step: int) -> SnapshotPlan:
        """The first plan of partial snapshots; with a longer window if there is no memory for the best."""
        wanted = self._planner.window or turns.longest
        within = turns.window_within(step, 0.0, wanted, every=self._options.first_every)
        if within < wanted:
            try:
                return self._planner.make(None, window=within)
            except ValueError as error:
                logger.warning("the limit of lost tokens needs a window of %d: %s", within, error)
        return self._planner.make(None)

    def maybe_reorder(self) -> None:
        """Move one step closer to today's popularity; call it where a window begins."""
        plan, now_s, spent_s = self.plan, time.monotonic(), self._stats.copy_plans_ms / 1e3
        if plan is None or plan.schedule.window == 1 or plan.policy_name == "dense" or plan.lossy:
            return
        if not self._reorders.due(now_s, spent_s):
            return
        if self.changes is not None:
            if self.changes.wish_for_order(every=_REORDER_STEPS):
                self._reorders.begins(now_s, spent_s)
            return
        schedule = self._counter.reordered(plan, plan.slot_bytes, every=_REORDER_STEPS)
        if schedule is not None:
            plan.use(schedule)
            self._stats.reorders += 1
            self._reorders.begins(now_s, spent_s)

    def maybe_change(self, step: int) -> None:
        """Change the policy or the window if there is a reason to."""
        plan = self.plan
        if plan is None or self._slots.coming or self._slots.pending:
            return
        if plan.asked not in ("", self._options.asked):
            self._change_policy(plan, step)
        elif plan.lossy and (turns := self._planner.turns) is not None:
            self._keep_within_limit(plan, turns, step)
        elif self._planner.window is None and plan.policy_name != "dense":
            self._maybe_widen(plan, step, min(MAX_WINDOW, self._first.longest))

    def _change_policy(self, plan: SnapshotPlan, step: int) -> None:
        """The script asks for another policy than the one with which the run began."""
        policy = self._options.planned
        why = f"the script asks for {self._options.asked} snapshots, and they are {plan.asked} so far"
        if plan.lossy:
            why += (
                "; until a whole window of the new ones is there, a failure goes back to those, and loses "
                "updates of experts"
            )
        self._replace(plan, step, why, policy=policy)

    def maybe_change_interval(self, step: int, ordinal: int) -> int:
        """Change the interval if there is a reason to; it needs no memory.

        Returns the number of this step's snapshot in the schedule: ``ordinal``, or another one if the
        interval changes now. Several ranks change it later, together.
        """
        plan = self.plan
        if plan is None or step < self._interval_at or plan.policy_name != self._options.planned:
            return ordinal  # of another policy until that changes, or because only dense snapshots are exact
        every = self._interval_wanted(plan)
        if every == plan.every:
            return ordinal
        self._interval_at = step + _RETRY_STEPS
        why = self._why_interval(plan, every)
        if self.changes is not None:
            if not self.changes.wish(Change(why, every=every)):
                self._interval_at = step + 1
            return ordinal
        logger.info("%s", why)
        self._memory.session.notice("info", "schedule_changed", why)
        number = plan.next_ordinal(ordinal, every)
        self.use_interval(every)
        return number

    def _interval_wanted(self, plan: SnapshotPlan) -> int:
        """What the rule, or the script, asks for now."""
        if self._interval is None:  # if ranks ask for different ones, that of rank 0 counts
            return self._options.first_every if self._memory.identity.rank == 0 else plan.every
        wanted = self._interval.needed(plan.every)
        # Where one rank needs a longer interval, all get it; rank 0 asks whether a shorter one will do.
        return wanted if self._memory.identity.rank == 0 else max(wanted, plan.every)

    def _why_interval(self, plan: SnapshotPlan, every: int) -> str:
        by = f"every={self._options.every!r}"
        cost = None if self._interval is None else self._interval.cost
        if cost is not None:
            by += (
                f": a snapshot stalls training for {cost.stall_s * 1e3:.1f} ms, and takes "
                f"{cost.busy_s * 1e3:.1f} ms; an iteration takes {cost.iteration_s * 1e3:.1f} ms"
            )
        return f"a snapshot every {every} iterations instead of {plan.every} ({by})"

    def _keep_within_limit(self, plan: SnapshotPlan, turns: PartialTurns, step: int) -> None:
        """Anchor more experts per snapshot while a failure could exceed the limit of lost tokens."""
        window, chosen = plan.schedule.window, self._planner.window
        within = turns.window_within(step, self.lost_iterations, chosen or turns.longest, every=plan.every)
        if chosen is None and within > window:
            self._maybe_widen(plan, step, within)
        if within not in (window, self._suffices_for) and not self._slots.coming:
            why = f"as far as a failure now stays within the limit of lost tokens: window {window} -> "
            self._replace(plan, step, why, window=within, smallest=within > window and chosen is None)

    def _replace(
        self,
        plan: SnapshotPlan,
        step: int,
        why: str,
        *,
        window: int | None = None,
        policy: str = "",
        smallest: bool = False,
    ) -> None:
        """Change to another policy or window once in a while, if there is memory for it."""
        if step < self._look_again_at:
            return
        self._look_again_at = step + _RETRY_STEPS
        try:
            if smallest and window is not None:
                allowed, window = window, min(window, self._planner.make(plan).schedule.window)
                if window <= plan.schedule.window:
                    self._suffices_for = allowed
                    return
            self._change_to(self._planner.make(plan, window=window, policy=policy), step, why, policy)
        except ValueError as error:
            logger.warning("%s: %s", why, error)

    def _change_to(self, other: SnapshotPlan, step: int, why: str, policy: str = "") -> None:
        """Use this plan as soon as its slots are there, on all ranks at once if there are several."""
        window = other.schedule.window
        if not policy:
            why += str(window)
        elif why != self._announced_policy:
            self._announced_policy = why
            level = logging.INFO if self._memory.identity.rank else logging.WARNING
            logger.log(level, "%s", why)
        if self.changes is not None:
            if not self.changes.wish(Change(why, window=window, policy=policy)):
                self._look_again_at = step + 1
            return
        logger.info("%s", why)
        self._memory.session.notice("info", "schedule_changed", why)
        self._planner.policy = other.policy_name
        self._slots.ask(other, step, why, optional=True)

    def _maybe_widen(self, plan: SnapshotPlan, step: int, longest: int) -> None:
        """Make snapshots smaller if they cost training time or peers cannot keep up (DESIGN 5.3)."""
        if not self.control.due(step):
            return
        shortage = self.control.shortage()
        wide = self._wider(plan, shortage, longest)
        self.control.looked(step, in_vain=shortage is not None and wide is None)
        if wide is None:
            return
        self._change_to(wide, step, f"snapshots cost too much: window {plan.schedule.window} -> ")

    def _wider(self, plan: SnapshotPlan, shortage: Shortage | None, longest: int) -> SnapshotPlan | None:
        """The plan of a wider window, if there is a reason for one, and it helps."""
        window, behind = plan.schedule.window, self._memory.table.ring_hint.behind
        self._lagging = self._lagging + 1 if behind > window else 0
        try:
            if shortage is not None:
                why = str(shortage)
                wide = self._planner.make(plan, shortage=shortage)
                self._tell_misfit(wide, shortage)
                if wide.schedule.window > longest:
                    wide = self._planner.make(plan, window=longest)
            elif self._lagging >= _LAGGING_LOOKS:
                why = f"a peer is {behind} iterations behind, and was when last looked at"
                wide = self._planner.make(plan, window=min(window + max(1, window // 2), longest))
            else:
                return None
        except ValueError as error:
            logger.warning("%s, but the window stays: %s", why, error)
            return None
        if wide.schedule.window <= window or wide.slot_bytes >= plan.slot_bytes:
            return None
        logger.info("%s: a wider window would help", why)
        self._lagging = 0
        return wide

    def _tell_misfit(self, plan: SnapshotPlan, shortage: Shortage) -> None:
        """Say once that no window is without cost: the user must choose what gives way."""
        if plan.schedule.fits or self._told_misfit:
            return
        self._told_misfit = True
        text = (
            f"{shortage}, and no window has snapshots that small ({plan.schedule.reason}); the window is "
            f'{plan.schedule.window}. policy="dense" with every=n takes fewer snapshots and loses up to n '
            "iterations"
        )
        logger.warning("%s", text)
        self._memory.session.notice("warning", "snapshots_too_large", text)

    def captures_everything(self, step: int, *, unknown: str, outgrown: int, most_updates: int) -> bool:
        """True if the plan covers all state; plans anew if an optimizer began to keep or to update more.

        False until the new plan is in use: an inexact snapshot is worse than none.

        Args:
            unknown: optimizer state that no plan captures.
            outgrown: the size of step scalars that no longer fit, or 0.
            most_updates: the most updates of one optimizer within the last step.
        """
        assert self.plan is not None
        key = self._binding.group_key()
        found = self._uncaptured or unknown or (f"step scalars of {outgrown} bytes" if outgrown else "")
        if key != self._group_key:
            found = "a parameter group"
            if made := self._binding.refresh():
                logger.warning(
                    "NOT RECOVERABLE: %s: the program has made it in a step and given it to an optimizer, "
                    "and a process that starts again has no such parameter: make it before Checkpointer, and "
                    "add its group when its time has come",
                    ", ".join(made[:3]),
                )
        if not (self._planner.dense or self._planner.lossy) and most_updates > 1:
            # Frozen operators would need the weights between the two updates, which no snapshot holds.
            found = "a second update by one optimizer within a step (only dense snapshots can be exact)"
            self._planner.policy = "dense"
        if not found:
            return True
        if found != self._announced:
            self._announced = found
            self._slots.forget()  # what is on its way was planned without it
            logger.warning("found %s after the snapshots were planned: planning anew", found)
        self._uncaptured, self._group_key = found, key
        if self.changes is not None:
            self._replan_together(self.plan, self.changes, found, step)
        elif not self._slots.coming:
            window = None if self._planner.dense else self.plan.schedule.window
            plan = self._try_plan(found, step, window=window)
            if plan is not None:
                self._slots.ask(plan, step, found)
        return not self._uncaptured

    def _replan_together(self, plan: SnapshotPlan, changes: ScheduleChanges, why: str, step: int) -> None:
        """Plan anew by the schedule of all ranks; to dense snapshots they change together."""
        if self._planner.dense and plan.policy_name != "dense":
            changes.wish(Change(why, policy="dense"))
            return
        if changes.open:
            changes.unable(f"a rank must plan anew: {why}")
            return
        slots = self._slots
        if not slots.coming and step >= slots.retry_at and self._memory.session.connected:
            slots.ask(self._planner.make_common(plan, changes.calendar.orders), step, why)

    # -- for `ScheduleChanges` -------------------------------------------------------------------

    @property
    def reserves(self) -> bool:
        """True while memory for something else is on its way."""
        return self._slots.coming

    def plan_for(self, change: Change) -> SnapshotPlan:
        """A plan with another window or policy.

        Raises:
            ValueError: no such plan is possible.
        """
        return self._planner.make(self.plan, window=change.window or None, policy=change.policy)

    def check_interval(self, every: int) -> None:
        """Whether this rank can take snapshots so often.

        Raises:
            ValueError: they would cost it too much.
        """
        assert self.plan is not None
        now = self.plan.every
        needed = 1 if self._interval is None else self._interval.needed(now)
        if every < min(needed, now):
            raise ValueError(
                f"here snapshots cost too much to take one every {every} iterations, not {needed}"
            )

    def use_interval(self, every: int) -> None:
        """Take a snapshot every so many iterations, as all ranks do from now on."""
        assert self.plan is not None
        self.plan.use_interval(every)
        if self._interval is not None:
            self._interval.changed()

    def adopt(self, plan: SnapshotPlan) -> None:
        """Use this plan, as all ranks do from now on; its memory is the newest generation."""
        self.plan, self._planner.policy = plan, plan.policy_name
        self._slots.forget()
        self._uncaptured = self._announced = ""
        self.control.changed()
        self._switched(True)

    def only_dense(self, why: str) -> None:
        """Plan dense snapshots next time: no sparse one could be exact."""
        if not (self._planner.dense or self._planner.lossy):
            self._planner.policy, self._uncaptured = "dense", why

    # -- generations -----------------------------------------------------------------------------

    def missed(self, step: int, reason: str) -> None:
        """No slot was free: a new generation lets the old suffix stay while a new one is built."""
        slots = self._slots
        if slots.coming or self._making_room() or slots.pending or step < slots.retry_at:
            return
        assert self.plan is not None
        slots.ask(self.plan, step, reason)

    def maybe_grow(self, step: int, *, crowded: bool) -> None:
        """Request more slots before there are too few, if this ring must hold more than its own suffix.

        It must while another rank lags behind, and if another rank's window is longer: all ranks
        replay from one start (docs/replication.md §6).

        Args:
            crowded: the ring is full of what the other ranks need.
        """
        plan, request = self.plan, self._slots
        if plan is None or step < request.optional_at or plan.policy_name == "dense" or self.changes is None:
            return
        table = self._memory.table
        span = table.ring_hint.span
        needed = slots_for_window(span, plan.slack)
        longer = needed > table.segments[-1].geometry.num_slots
        if not (longer or crowded) or request.coming or self._making_room() or request.pending:
            return
        most = most_slots(plan.policy.window, span, plan.slack, returned=table.returned)
        more = max(plan.num_slots, min(plan.num_slots + _MORE_SLOTS, most))
        slots = needed if longer else more
        why = "another rank's window is longer" if longer else "another rank lags behind"
        logger.info("%s: a ring of %d slots", why, slots)
        self._stats.grown += 1
        request.ask(plan, step, why, slots=slots, optional=True)

    def collect(self, step: int) -> None:
        """Use the requested generation if it is there."""
        self._slots.collect(step)

    def _use(self, plan: SnapshotPlan) -> None:
        other = plan is not self.plan
        if other:
            self.control.changed()
        self.plan = plan
        self._uncaptured = self._announced = ""
        self._switched(other)

    def _making_room(self) -> bool:
        """True while memory for a schedule change is on its way: one request at a time."""
        return self.changes is not None and self.changes.reserving
