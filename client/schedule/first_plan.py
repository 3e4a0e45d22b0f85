"""The first plan of a rank among several: nobody takes a snapshot before all have agreed on what
their plans follow from.

First they agree on what may be copied per step and on the memory, from which equal models get equal
plans; then on the window; last, those that have operators in common make sure that they have
planned them alike. Nothing here waits: each call comes as far as the others have told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ckptd.client.daemon_link.rank_memory import RankMemory
from ckptd.client.log_lines import get_logger
from ckptd.client.model.live_state import LiveState
from ckptd.client.model.replicated_params import Replicas
from ckptd.client.schedule.initial_schedule import InitialSchedule
from ckptd.client.schedule.planner import Planner
from ckptd.client.schedule.planning import MAX_WINDOW
from ckptd.client.schedule.schedule_change import ScheduleChanges
from ckptd.client.schedule.slot_reservation import NewSlots
from ckptd.client.schedule.snapshot_plan import SnapshotPlan
from ckptd.core.snapshot_policy import Calendar

__all__ = ["FirstPlan"]

logger = get_logger(__name__)


class FirstPlan:
    """One rank's part.

    Attributes:
        longest: no rank can have a longer window.
    """

    def __init__(self, binding: LiveState, memory: RankMemory, planner: Planner, slots: NewSlots) -> None:
        self._binding, self._memory = binding, memory
        self._planner, self._slots = planner, slots
        self._windows = InitialSchedule(memory)
        # Of what is shared, after the first update: alike at the start says little.
        self._values: Mapping[Replicas, str] | None = None
        self._own: SnapshotPlan | None = None
        self._own_is_dense = False
        # The plan that was told to the ranks with which it shares, and whether they have answered.
        # It is kept until it is in use: what they leave to this rank goes by it.
        self._shared: SnapshotPlan | None = None
        self._settled = False
        self.longest = MAX_WINDOW

    def close(self) -> None:
        """Stop waiting for other ranks."""
        self._windows.close()

    def look(self, *, draws: bool) -> None:
        """The first update is over: what is shared has the values by which it is compared.

        Args:
            draws: an optimizer draws random numbers, so equal values will not stay equal: they
                count as different. So it is where one keeps a generator.
        Raises:
            Refused: an optimizer keeps something that no snapshot can hold.
        """
        if self._values is None:
            found = self._planner.sharing.checksums(self._binding)
            rank = self._memory.identity.rank
            draws = draws or (bool(found) and self._binding.kept.keeps_generators())
            self._values = dict.fromkeys(found, f"{rank} draws") if draws else found

    @property
    def looked(self) -> bool:
        """Whether what is shared, if anything is, was looked at."""
        return self._values is not None or not self._planner.sharing.replicas

    def find(
        self,
        step: int,
        why: str,
        changes: ScheduleChanges,
        make: Callable[[int | None], SnapshotPlan | None],
    ) -> SnapshotPlan | None:
        """The plan with which this rank begins, once all have agreed; None until then.

        Args:
            make: makes a plan with a window (None: of the rank's own choice); None where there can
                be none now.
        """
        if self._shared is not None:
            return self._alike(self._shared, step) if self._memory.session.connected else None
        plan = self._agreed(step, why, changes, make)
        if plan is None:
            return None
        self._shared = plan
        return self._alike(plan, step)

    def _agreed(
        self,
        step: int,
        why: str,
        changes: ScheduleChanges,
        make: Callable[[int | None], SnapshotPlan | None],
    ) -> SnapshotPlan | None:
        """A plan with the window of all ranks."""
        planner, windows = self._planner, self._windows
        if planner.limits is None:
            limits = windows.limits(planner.measured)
            if limits is None:
                windows.waits(step)
                return None
            planner.limits, self.longest = limits[:2], limits[2]
        if self._own is None:
            self._own = make(None)
            if self._own is None:
                return None
            self._own_is_dense = planner.dense
            self._common_plan(self._own)
        agreed_on = windows.first(
            min(self._own.schedule.window, self.longest),
            dense=planner.dense,
            stride=changes.strides.shortest,
        )
        if agreed_on is None:
            windows.waits(step)
            return None
        window, dense, stride = agreed_on
        if dense:
            window = 1
        changes.calendar = Calendar(stride=stride)
        plan = self._with_window(self._own, window, dense, make)
        if plan is not None and plan.schedule.window != window:
            error = ValueError(f"the ranks agreed on {window}, this one can only have {plan.schedule.window}")
            self._slots.failed(step, why, error)
            return None
        return plan

    def _with_window(
        self,
        own: SnapshotPlan,
        window: int,
        dense: bool,
        make: Callable[[int | None], SnapshotPlan | None],
    ) -> SnapshotPlan | None:
        """This rank's own plan, or another one where the ranks agreed on something else."""
        if dense and not self._own_is_dense:
            # This rank may have found out by itself, too, after it had made its plan.
            logger.info("dense snapshots, since no others are exact on every rank")
            self._planner.policy = "dense"
            return make(None)
        if not dense and window != own.schedule.window:
            logger.info("the ranks agreed on a window of %d", window)
            return make(window)
        return own

    def _alike(self, plan: SnapshotPlan, step: int) -> SnapshotPlan | None:
        """The plan, once all with whom it shares have the same; if they have not, with all of it
        captured here.
        """
        if not self._settled:
            alike = self._common_plan(plan)
            if alike is None:
                self._windows.waits(step)
                return None
            self._settled = True
            if not alike:
                self._capture_all(plan)
        return plan

    def _common_plan(self, plan: SnapshotPlan) -> bool | None:
        prints = self._planner.sharing.fingerprints(
            plan.operators, plan.schedule.phases, plan.owners, self._values or {}
        )
        return self._windows.shares_agree(plan.schedule.window, prints)

    def _capture_all(self, plan: SnapshotPlan) -> None:
        text = "not all ranks have, or plan, alike what they should have in common: each captures all of it"
        logger.warning("%s", text)
        self._memory.session.notice("warning", "not_shared", text)
        # The same operators in the same phases: in another group, ranks that plan alike may rely on this one.
        plan.capture_all(self._binding)
        if self._memory.persists:
            plan.make_room_for_uploads(self._memory.session.available_bytes)
