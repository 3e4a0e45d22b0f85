"""The localized recovery: some ranks keep their parked state or copy a peer's, and only the others replay,
fed from boundary logs (docs/localized_recovery.md).

``begin_localized`` is tried before the global recovery (`global_recovery`), by the same procedure. If no
plan holds, or two localized recoveries in a row have not come to their end, all ranks recover together:
that is always possible while there are snapshots.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from ckptd.client.daemon_link.rank_memory import RankMemory
from ckptd.client.daemon_link.retrieval import Retrieved
from ckptd.client.daemon_link.run_inventory import RunView
from ckptd.client.daemon_link.snapshot_image import SnapshotImage
from ckptd.client.log_lines import get_logger
from ckptd.client.parking.park_memory import CopiedImage, ParkedCopy, parked_image
from ckptd.client.pipeline.log_reader import LogFacts, recorded_facts
from ckptd.client.pipeline.upstream_feed import FedLogs, ValueLogs
from ckptd.client.ranks.collectives import Collectives, TryAgain
from ckptd.client.recovery.global_recovery import Recovered, agree_on_plan
from ckptd.client.recovery.verification import Replayed
from ckptd.client.schedule.schedule_change import ScheduleStart, differing, of_parked
from ckptd.core.recovery.held import RunHoldings
from ckptd.core.recovery.localized_plan import (
    LocalizedPlan,
    NotLocalized,
    RankKind,
    RankPlan,
    plan_localized,
)
from ckptd.core.recovery.quarantine import open_failures, snapshots_used
from ckptd.core.recovery.recovery_facts import RankFacts, facts_from_logs
from ckptd.core.recovery.recovery_phases import RecoveryPhase
from ckptd.core.recovery.snapshot_tables import SnapshotCopy, SnapshotToLoad
from ckptd.core.slots.segment_format import HINT_APART, HINT_APART_AGAIN
from ckptd.errors import AttachRefused, CorruptionError, DaemonUnavailable
from ckptd.holdings import operators_id

logger = get_logger(__name__)

_PLANS = 6  # what is found damaged changes the plan
# The first plans; snapshots for comparison alone must not make all ranks recover together.
_VERIFIED_PLANS = 2
_TRIES = 2  # of the same plan: a node may have been slow


@dataclass(slots=True)
class LocalizedStart:
    """A localized plan that every rank can follow, and what this rank begins with.

    Attributes:
        mine: this rank's part of the plan.
        images: for a replay: the one dense image, or the snapshots from ``mine.start`` on.
        feeds: the logs of neighbours that start later.
        values: logs in which shared values are looked up.
        new_from: no snapshot shows that this iteration, or a later one, was done before.
    """

    plan: LocalizedPlan
    mine: RankPlan
    images: list[SnapshotImage]
    feeds: FedLogs
    values: ValueLogs
    new_from: int

    @property
    def replays(self) -> bool:
        """Whether this rank goes back to snapshots."""
        return self.mine.kind is RankKind.REPLAYS

    def close(self) -> None:
        """Release images and logs; a peer's parked state is as large as the model."""
        self.images = []
        self.values.close()
        self.feeds.close()


def begin_localized(
    memory: RankMemory,
    ranks: Collectives,
    same_operators: tuple[int, ...],
    *,
    at: int | None = None,
    verify_iterations: int = 0,
) -> LocalizedStart | RunView | None:
    """The localized recovery of this run. A collective call.

    Returns:
        On all ranks the inventory if all recover together, from what was just seen; None if what was seen
        has changed since.
    Args:
        same_operators: ranks whose operators all equal those of this rank, in their values too.
        at: the iteration to go back to, as of `recover_global`: then all recover together.
        verify_iterations: how many iterations more than necessary may be replayed to compare what
            is loaded, the same on all ranks: here one at most.
    Raises:
        AttachRefused: the run was recovered again meanwhile.
        DaemonUnavailable: a daemon is away, or a rank cannot go on.
    """
    procedure = _LocalizedProcedure(memory, ranks, same_operators, verify_iterations, at)
    agreed = agree_on_plan(ranks, procedure)
    seen = None
    if agreed is None:
        reason = procedure.not_held
    else:
        with agreed.undo as undo:
            if isinstance(agreed.plan, LocalizedPlan):
                reason = differing(agreed.votes)
                if not reason:
                    undo.pop_all()
                    return procedure.begin(agreed.plan)
            else:
                reason, seen = agreed.plan.reason, agreed.inventory
    if reason:
        text = f"all ranks recover together, though some were parked: {reason}"
        logger.info("%s", text)
        if memory.identity.rank == 0:
            memory.session.notice("info", "not_localized", text)
    memory.take_back_hint(HINT_APART | HINT_APART_AGAIN)
    return seen


def recovered_locally(start: LocalizedStart) -> Recovered:
    """What this rank begins with; each rank that replays decides for itself."""
    replayed = Replayed(snapshots_used(start.mine.snapshots), everybody=False, localized=True)
    unverified = start.mine.unverified
    if not start.replays:
        copied = start.mine.kind is RankKind.COPIED
        whose = "a peer's" if copied else "its"
        rest = "; random state, scalars and buffers are those of its own snapshot" if copied else ""
        unverified = (
            f"this rank goes on from {whose} parked state, which was read from the live tensors "
            f"when the step was cut off, and whose digests fit{rest}"
        )
    return Recovered(start.images, start.plan.reason, replayed, unverified, new_from=start.new_from)


def end_localized(memory: RankMemory, start: LocalizedStart) -> None:
    """All ranks run together again."""
    start.close()
    memory.take_back_hint(HINT_APART | HINT_APART_AGAIN)


class _LocalizedProcedure:
    """The procedure of a start in which only some ranks go back to snapshots.

    After `retrieve`, it holds what this rank needs for its part of that plan.
    """

    attempts = _PLANS
    vote = ScheduleStart
    _view: RunView
    _mine: RankPlan
    _feeds: FedLogs

    def __init__(
        self,
        memory: RankMemory,
        ranks: Collectives,
        same_operators: tuple[int, ...],
        verify_iterations: int,
        at: int | None = None,
    ) -> None:
        self._memory, self._ranks, self._same_operators = memory, ranks, same_operators
        self._at, self._verify_iterations = at, verify_iterations
        self._unusable: tuple[SnapshotCopy, ...] = ()  # parked states that this rank could not have
        self._out_of_reach = set[SnapshotCopy]()  # tried once: a node may have been slow
        self._tried: list[LocalizedPlan] = []
        self._parked: SnapshotImage | None = None
        self._retrieved = Retrieved([])

    @property
    def not_held(self) -> str:
        """The reason, if no plan could be followed."""
        return f"not every rank could have what it needs, in {len(self._tried)} attempts"

    def inventory(self, undo: ExitStack) -> RunView:
        """What the nodes hold, and what the ranks know of themselves. A collective call."""
        memory = self._memory
        here = recorded_facts(segment.descriptor.client for segment in memory.logs)
        found, facts = memory.brought_facts or here, None
        if found is not None:
            both = tuple(rank for rank in found.alike if rank in self._same_operators)
            facts = RankFacts(found.neighbours, found.domain, both)
        view = memory.see(
            self._ranks, facts=facts, same_operators=self._same_operators, unusable=self._unusable
        )
        if found is None:
            # A rank that moved to another node takes over the facts that its log there holds.
            rank = memory.identity.rank
            left_behind = facts_from_logs((rank,), view.logs, view.parked).get(rank)
            if left_behind is not None:
                others = tuple(other for other in left_behind.alike if other != rank)
                memory.brought_facts = LogFacts(left_behind.neighbours, left_behind.domain, others)
        return view

    def plan(self, view: RunView) -> LocalizedPlan | NotLocalized:
        """Which rank keeps its parked state, which copies one, which replays."""
        if not view.parked or view.still_wanted(self._at) is not None:  # what is parked is newer
            return NotLocalized("")
        if any(hint & HINT_APART_AGAIN for hint in view.hints):
            return NotLocalized("two localized recoveries in a row have not come to their end")
        if open_failures(view.failures):
            return NotLocalized("a replay of this run did not reproduce what was recorded")
        verified = len(self._tried) < _VERIFIED_PLANS
        with self._memory.planning(RecoveryPhase.PLAN):
            plan = plan_localized(
                RunHoldings(view.usable, view.parked, view.logs, view.begun),
                view.facts,
                self._memory.identity.world_size,
                homes=view.homes,
                verify_iterations=self._verify_iterations if verified else 0,
            )
        if isinstance(plan, LocalizedPlan):
            if self._tried.count(plan) == _TRIES:
                return NotLocalized(self.not_held)
            self._tried.append(plan)
        return plan

    def retrieve(self, view: RunView, plan: LocalizedPlan | NotLocalized, undo: ExitStack) -> ScheduleStart:
        """Verify or request what this rank's part needs; returns the schedule by which it would go on."""
        assert isinstance(plan, LocalizedPlan), "without a plan nothing is retrieved"
        self._view, self._mine = view, plan.per_rank[self._memory.identity.rank]
        self._parked, self._retrieved = None, Retrieved([])
        try:
            return self._retrieve(plan, undo)
        except TryAgain:
            raise
        except (AttachRefused, CorruptionError, DaemonUnavailable) as error:
            # Another plan needs something else, and the recovery of all ranks none of this.
            logger.warning("this localized recovery cannot be: %s", error)
            raise TryAgain from error
        except Exception as error:
            # What is raised here would be raised again at each start.
            logger.exception("this localized recovery cannot be")
            raise TryAgain from error

    def _retrieve(self, plan: LocalizedPlan, undo: ExitStack) -> ScheduleStart:
        memory, mine, schedule = self._memory, self._mine, ScheduleStart()
        if mine.snapshots:
            records = [piece.record for piece in mine.snapshots]
            schedule = ScheduleStart([(r.iteration, r.phase) for r in records])
            self._retrieved = memory.retrieval.retrieve(mine.snapshots, self._view.everybody, undo)
        if mine.kind is not RankKind.REPLAYS:
            self._parked = self._read_parked(mine.pieces[0])
            if mine.kind is not RankKind.COPIED:
                isolated = len({*plan.bases.values()}) > 1
                schedule = self._schedule_of_parked(self._parked, isolated=isolated)
        self._feeds = FedLogs(memory.session, mine.logs, self._view.everybody)
        undo.callback(self._feeds.close)
        return schedule

    def _read_parked(self, piece: SnapshotToLoad) -> SnapshotImage:
        """A parked state, this rank's or a peer's; a later plan does without it if it cannot be had."""
        session = self._memory.session
        try:
            if self._mine.kind is RankKind.PARKED:
                return self._own_parked(piece)
            return ParkedCopy.read(session, piece, self._view.everybody)
        except (AttachRefused, CorruptionError, DaemonUnavailable) as error:
            where = ", ".join(f"{source.segment} on {source.node}" for source in piece.sources)
            text = f"the parked state of iteration {piece.record.iteration} ({where}): {error}"
            elsewhere = isinstance(error, DaemonUnavailable) and self._mine.kind is not RankKind.PARKED
            if elsewhere and self._out_of_reach.isdisjoint(piece.sources):
                self._out_of_reach.update(piece.sources)
                session.notice("warning", "parked_unusable", f"looking once more for {text}")
            else:
                self._unusable += piece.sources
                session.notice("error", "parked_unusable", f"planning without {text}")
            raise

    def _own_parked(self, piece: SnapshotToLoad) -> SnapshotImage:
        """The parked state in this rank's own segment."""
        memory = self._memory
        record = memory.parks.own_copy(memory.session.node_id, piece)
        if record is None or memory.descriptor is None:
            raise DaemonUnavailable(
                "what this rank parked is not in its memory any more", operation="read parked state"
            )
        if operators_id(memory.parks.of(record).descriptor) != operators_id(memory.descriptor):
            raise DaemonUnavailable(
                "the parked state has other operators than the newest snapshots",
                operation="read parked state",
            )
        return parked_image(memory, record)

    def _schedule_of_parked(self, image: SnapshotImage, *, isolated: bool) -> ScheduleStart:
        """The schedule by which a parked state goes on; ``isolated``: some ranks begin before others."""
        scalars = image.scalars()
        if isolated and None in scalars.get("stages", {}).values():
            raise DaemonUnavailable(
                "what a stage sends is not known (DTensors?): it would ask its neighbours, which "
                "are not there",
                operation="run isolated",
            )
        ring = self._memory.descriptor
        if self._mine.kind is RankKind.MOVED:
            ring = self._memory.retrieval.descriptor_of(self._retrieved)
        assert ring is not None
        return of_parked(image.iteration, image.phase, scalars, ring.client)

    def begin(self, plan: LocalizedPlan) -> LocalizedStart:
        """Begin the new history: all ranks have what they need. A collective call."""
        memory = self._memory
        with ExitStack() as undo:
            undo.callback(self._feeds.close)
            with self._ranks.all_or_none():
                images = self._resume(plan)
                again_in_a_row = memory.hint & HINT_APART
                memory.leave_hint(HINT_APART_AGAIN if again_in_a_row else HINT_APART)
            undo.pop_all()
        values = ValueLogs(memory.session, self._mine, self._feeds, self._view.everybody)
        new_from = max(plan.resume, self._view.newest)
        return LocalizedStart(plan, self._mine, images, self._feeds, values, new_from)

    def _resume(self, plan: LocalizedPlan) -> list[SnapshotImage]:
        images, _ = self._memory.resume(
            self._mine.snapshots, self._retrieved, self._view, epoch=plan.epoch, end=plan.resume
        )
        if self._parked is None:
            return images
        if isinstance(self._parked, ParkedCopy) and self._mine.kind is RankKind.COPIED:
            return [CopiedImage(self._parked, images[0])]
        return [self._parked]
