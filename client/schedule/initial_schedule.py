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
from ckptd.client.ranks.store_agreement import StoreAgreement
from ckptd.client.ranks.store_connection import job_store
from ckptd.client.schedule.planner import MAX_WINDOW, Planner
from ckptd.client.schedule.provision import NewSlots
from ckptd.client.schedule.schedule_change import ScheduleChanges
from ckptd.client.schedule.snapshot_plan import SnapshotPlan
from ckptd.core.schedules.calendar import Calendar

__all__ = ["FirstPlan", "InitialSchedule"]

logger = get_logger(__name__)


_WAIT_STEPS = 100


class InitialSchedule:
    """One rank's part; nothing here blocks, and None means that other ranks have yet to tell."""

    def __init__(self, memory: RankMemory) -> None:
        self._memory = memory
        self._agreement: StoreAgreement | None = None
        self._proposed: set[str] = set()
        self._waits_since: int | None = None
        self._warned = False

    def limits(self, measure: Callable[[], tuple[int, int, int]]) -> tuple[int, int, int] | None:
        """The smallest over all ranks of what can be copied per step, of the memory (bytes), and of
        the number of operators.

        From equal limits equal models get equal plans; and no rank can have a window longer than
        its operators are many.

        Args:
            measure: the same of this rank, asked once.
        """
        if "limits" not in self._proposed:
            self._propose("limits", *(-number for number in measure()))
        found = self._agreed().largest("limits")
        return None if found is None else (-found[0], -found[1], -found[2])

    def first(self, mine: int, *, dense: bool, stride: int) -> tuple[int, bool, int] | None:
        """The first window of all ranks, whether their snapshots are dense, and how many iterations
        lie between two.

        Args:
            dense: for this rank only dense snapshots are exact; then all take dense ones.
            stride: as this rank has seen it; the shortest counts, since one rank may have missed a
                boundary by itself.
        """
        self._propose("window", mine, int(dense), -stride)
        found = self._agreed().largest("window")
        return None if found is None else (found[0], bool(found[1]), -found[2])

    def shares_agree(self, window: int, fingerprints: Mapping[Replicas, int]) -> bool | None:
        """Whether in each group all members have planned what they share with the same fingerprint
        as this rank.

        It may be asked before that window is agreed on, so that the answer is there when it is. All
        members of a group come to the same answer about what they told first. Whoever plans
        otherwise later hears False: it must capture everything itself, and whatever the others
        leave to it is then there.
        """
        alike: bool | None = True
        for group, fingerprint in fingerprints.items():
            what = f"shares-{group.key}-{window}"
            self._propose(what, fingerprint, -fingerprint, among=len(group.ranks))
            found = self._agreed().largest(what)
            if found is None:
                alike = None if alike else alike
            elif found != (fingerprint, -fingerprint):
                alike = False
        return alike

    def waits(self, step: int) -> None:
        """Tell once if other ranks take long: the reason stands in their logs, not here."""
        self._waits_since = step if self._waits_since is None else self._waits_since
        if step >= self._waits_since + _WAIT_STEPS and not self._warned:
            self._warned = True
            text = (
                f"no snapshots for {_WAIT_STEPS} steps: not every rank has told yet which "
                "window it needs; the logs of the others say why"
            )
            logger.warning("%s", text)
            self._memory.session.notice("warning", "not_protected", text)

    def close(self) -> None:
        """Stop waiting for other ranks."""
        if self._agreement is not None:
            self._agreement.close()

    def _propose(self, what: str, *numbers: int, among: int | None = None) -> None:
        if what not in self._proposed:
            self._proposed.add(what)
            self._agreed().propose(what, numbers, among=among)

    def _agreed(self) -> StoreAgreement:
        """Where the ranks of this epoch agree."""
        if self._agreement is None:
            identity = self._memory.identity
            prefix = f"ckptd/{identity.job}/{identity.run}/{self._memory.epoch}"
            self._agreement = StoreAgreement(job_store(), identity, prefix=prefix)
        return self._agreement


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
