"""The first plan of a rank among several: no rank takes a snapshot before all have agreed on the schedule.

The ranks first agree on what may be copied per step and on the memory, from which equal models get
equal plans; then on the window; last, ranks with operators in common check that their plans agree on
them. Nothing here blocks: each call gets as far as the other ranks' answers allow. If one rank
changed its window before the others, the recordings in between could not be replayed together: later
changes happen at one iteration (`ckptd.client.schedule.schedule_change`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ckptd.client.daemon_link.rank_memory import RankMemory
from ckptd.client.log_lines import get_logger
from ckptd.client.model.live_state import LiveState
from ckptd.client.model.replicated_params import Replicas
from ckptd.client.options import MAX_WINDOW
from ckptd.client.ranks.store_agreement import StoreAgreement
from ckptd.client.ranks.store_barrier import job_store
from ckptd.client.schedule.planner import Planner
from ckptd.client.schedule.schedule_change import ScheduleChanges
from ckptd.client.schedule.snapshot_plan import SnapshotPlan
from ckptd.core.snapshot_policy import Calendar

logger = get_logger(__name__)

_WAIT_STEPS = 100

# Makes a plan with a window (None: the rank's own choice); None if no plan is possible now.
MakePlan = Callable[[int | None], SnapshotPlan | None]


class InitialSchedule:
    """One rank's part in the agreement; None means that other ranks have not answered yet."""

    def __init__(self, memory: RankMemory) -> None:
        self._memory = memory
        self._agreement: StoreAgreement | None = None
        self._proposed: set[str] = set()
        self._waits_since: int | None = None
        self._warned = False

    def limits(self, measure: Callable[[], tuple[int, int, int]]) -> tuple[int, int, int] | None:
        """The minimum over all ranks of bytes per step, of memory in bytes, and of the number of operators.

        A window is never longer than a rank's number of operators.

        Args:
            measure: returns this rank's numbers; called once.
        """
        if "limits" not in self._proposed:
            self._propose("limits", *(-number for number in measure()))
        found = self._agreed().largest("limits")
        return None if found is None else (-found[0], -found[1], -found[2])

    def first(self, mine: int, *, dense: bool, stride: int, every: int) -> tuple[int, bool, int, int] | None:
        """The first window of all ranks, whether snapshots are dense, their stride, and their interval.

        Args:
            dense: only dense snapshots are exact on this rank; then all ranks take dense ones.
            stride: iterations between two boundaries, as seen by this rank; the shortest counts, since a
                rank may have missed a boundary.
            every: iterations between two snapshots; the longest counts.
        """
        self._propose("window", mine, int(dense), -stride, every)
        found = self._agreed().largest("window")
        return None if found is None else (found[0], bool(found[1]), -found[2], found[3])

    def shares_agree(self, window: int, fingerprints: Mapping[Replicas, int]) -> bool | None:
        """True if, in each group, the plans of all members have this rank's fingerprint.

        Ask before the window is agreed on to have the answer in time. All members of a group get
        the same answer about their first fingerprints. A rank that plans otherwise later gets
        False: it must capture everything itself, and so has whatever the others leave to it.
        """
        agree: bool | None = True
        for group, fingerprint in fingerprints.items():
            what = f"shares-{group.key}-{window}"
            self._propose(what, fingerprint, -fingerprint, among=len(group.ranks))
            found = self._agreed().largest(what)
            if found is None:
                agree = None if agree else agree
            elif found != (fingerprint, -fingerprint):
                agree = False
        return agree

    def waits(self, step: int) -> None:
        """Warn once if other ranks take long: their logs have the reason, not this one."""
        self._waits_since = step if self._waits_since is None else self._waits_since
        if step >= self._waits_since + _WAIT_STEPS and not self._warned:
            self._warned = True
            text = (
                f"no snapshots for {_WAIT_STEPS} steps: not every rank has proposed a window yet; "
                "the logs of the others say why"
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
        """The agreement of the ranks of this epoch."""
        if self._agreement is None:
            identity = self._memory.identity
            prefix = f"ckptd/{identity.job}/{identity.run}/{self._memory.epoch}"
            self._agreement = StoreAgreement(job_store(), identity, prefix=prefix)
        return self._agreement


class FirstPlan:
    """One rank's first plan, on which all ranks have agreed.

    Args:
        failed: called with step, reason and error if this rank cannot have the plan.

    Attributes:
        longest: the longest window that every rank can have.
    """

    def __init__(
        self,
        binding: LiveState,
        memory: RankMemory,
        planner: Planner,
        failed: Callable[[int, str, Exception], None],
    ) -> None:
        self._binding, self._memory, self._planner, self._failed = binding, memory, planner, failed
        self._windows = InitialSchedule(memory)
        # Checksums of the replicated parameters after the first update: before it, equal values
        # say little.
        self._values: Mapping[Replicas, str] | None = None
        self._own: SnapshotPlan | None = None
        self._own_is_dense = False
        # The plan that the sharing ranks compare, and whether they have answered. It stays until it
        # is in use, because they leave operators to this rank by it.
        self._shared: SnapshotPlan | None = None
        self._settled = False
        self.longest = MAX_WINDOW

    def close(self) -> None:
        """Stop waiting for other ranks."""
        self._windows.close()

    def look(self, *, draws: bool) -> None:
        """The first update is over: take the checksums by which ranks compare replicated parameters.

        Args:
            draws: an optimizer draws random numbers, so that equal values will not stay equal: they
                count as different. A generator kept by an optimizer has the same effect.
        Raises:
            NotCapturable: an optimizer keeps something that no snapshot can hold.
        """
        if self._values is None:
            found = self._planner.sharing.checksums(self._binding)
            rank = self._memory.identity.rank
            draws = draws or (bool(found) and self._binding.kept.keeps_generators())
            self._values = dict.fromkeys(found, f"{rank} draws") if draws else found

    @property
    def looked(self) -> bool:
        """True once the checksums are taken, or if no parameters are replicated."""
        return self._values is not None or not self._planner.sharing.replicas

    def find(self, step: int, why: str, changes: ScheduleChanges, make: MakePlan) -> SnapshotPlan | None:
        """The plan with which this rank begins, once all have agreed; None until then."""
        if self._shared is None:
            self._shared = self._agreed(step, why, changes, make)
        elif not self._memory.session.connected:
            return None
        plan = self._shared
        if plan is None or self._settled:
            return plan
        agree = self._compare(plan)
        if agree is None:
            self._windows.waits(step)
            return None
        self._settled = True
        if not agree:
            self._capture_all(plan)
        return plan

    def _agreed(self, step: int, why: str, changes: ScheduleChanges, make: MakePlan) -> SnapshotPlan | None:
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
            self._compare(self._own)
        agreed_on = windows.first(
            min(self._own.schedule.window, self.longest),
            dense=planner.dense,
            stride=changes.strides.shortest,
            every=self._own.every,
        )
        if agreed_on is None:
            windows.waits(step)
            return None
        window, dense, stride, every = agreed_on
        if dense:
            window = 1
        changes.calendar = Calendar(stride=stride)
        plan = self._with_window(self._own, window, dense, make)
        if plan is not None and plan.schedule.window != window:
            error = ValueError(f"the ranks agreed on {window}, this one can only have {plan.schedule.window}")
            self._failed(step, why, error)
            return None
        if plan is not None:
            plan.use_interval(every)
        return plan

    def _with_window(
        self, own: SnapshotPlan, window: int, dense: bool, make: MakePlan
    ) -> SnapshotPlan | None:
        """This rank's own plan, or another one if the ranks agreed on something else."""
        if dense and not self._own_is_dense:
            # This rank may have found out by itself, too, after it had made its plan.
            logger.info("dense snapshots, since no others are exact on every rank")
            self._planner.policy = "dense"
            return make(None)
        if not dense and window != own.schedule.window:
            logger.info("the ranks agreed on a window of %d", window)
            return make(window)
        return own

    def _compare(self, plan: SnapshotPlan) -> bool | None:
        prints = self._planner.sharing.fingerprints(
            plan.operators, plan.schedule.phases, plan.owners, self._values or {}, plan.selectable
        )
        return self._windows.shares_agree(plan.schedule.window, prints)

    def _capture_all(self, plan: SnapshotPlan) -> None:
        selected = plan.selectable
        # The same operators in the same phases: ranks of another group may rely on this one.
        plan.capture_all(self._binding)
        text = "the ranks' plans for their replicated parameters differ: each rank captures all of them"
        if plan.selectable != selected:
            text += ", and experts among them take turns"
        logger.warning("%s", text)
        self._memory.session.notice("warning", "not_shared", text)
        if self._memory.persists:
            plan.make_room_for_uploads(self._memory.session.available_bytes)
