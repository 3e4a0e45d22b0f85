"""The start of a localized recovery: who keeps a parked state, who copies one, who replays apart;
and all of it had here, or no plan.

``begin_localized`` is tried before the recovery of all ranks together
(``ckptd.client.recovery.global_recovery``). What one rank lacks changes the plan of all, so a plan
counts when every rank has what it needs. Where no plan holds, or localized recoveries have not come
to their end twice in a row, all ranks recover together: that is always possible while there are
snapshots.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

from ckptd.client.daemon_link.communication_facts import LogFacts, recorded_facts
from ckptd.client.daemon_link.rank_memory import RankMemory
from ckptd.client.daemon_link.retrieval import Attempt
from ckptd.client.daemon_link.run_inventory import RunView
from ckptd.client.daemon_link.snapshot_image import SnapshotImage
from ckptd.client.log_lines import get_logger
from ckptd.client.parking.park_memory import parked_image
from ckptd.client.parking.parked_copy import CopiedImage, ParkedCopy
from ckptd.client.pipeline.upstream_feed import FedLogs
from ckptd.client.pipeline.value_logs import ValueLogs
from ckptd.client.ranks.collectives import Collectives, TryAgain
from ckptd.client.recovery.global_recovery import Recovered
from ckptd.client.recovery.verification import Replayed
from ckptd.client.schedule.same_schedule import ScheduleStart, differing, of_parked
from ckptd.core.recovery.held import RunHoldings
from ckptd.core.recovery.localized_plan import (
    LocalizedPlan,
    NotLocalized,
    RankKind,
    RankPlan,
    plan_localized,
)
from ckptd.core.recovery.log_facts import facts_from_logs
from ckptd.core.recovery.quarantine import open_failures, snapshots_used
from ckptd.core.recovery.recovery_facts import RankFacts
from ckptd.core.recovery.snapshot_sources import SnapshotCopy, SnapshotToLoad
from ckptd.core.slots.segment_hints import HINT_APART, HINT_APART_AGAIN
from ckptd.errors import AttachRefused, CorruptionError, DaemonUnavailable
from ckptd.holdings import operators_id
from ckptd.transport.control.messages import NodeCard

__all__ = ["ApartStart", "begin_localized", "end_localized", "recovered_locally"]

logger = get_logger(__name__)

_PLANS = 4  # what is found damaged changes the plan
# Of these the first: what is only for comparing must not make all ranks recover together.
_VERIFIED_PLANS = 2
_TRIES = 2  # of the same plan: a node may have been slow


@dataclass(slots=True)
class ApartStart:
    """A localized plan that every rank can follow, and what this rank begins with.

    Attributes:
        mine: this rank's part of the plan.
        images: for a replay: the one dense image, or the snapshots from ``mine.start`` on.
        feeds: what neighbours sent that start later.
        values: logs in which shared values are looked up.
    """

    plan: LocalizedPlan
    mine: RankPlan
    images: list[SnapshotImage]
    feeds: FedLogs
    values: ValueLogs

    @property
    def replays(self) -> bool:
        """Whether this rank goes back to snapshots."""
        return self.mine.kind is RankKind.REPLAYS

    def close(self) -> None:
        """Give back what was brought here to run apart; a peer's parked state is as large as the model."""
        self.images = []
        self.values.close()
        self.feeds.close()


def begin_localized(
    memory: RankMemory,
    ranks: Collectives,
    alike: tuple[int, ...],
    *,
    verify_iterations: int = 0,
) -> ApartStart | None:
    """The localized recovery of this run, where there is one; None on all ranks where all recover
    together. A collective call.

    Args:
        alike: ranks with which this one has all operators alike, values too.
        verify_iterations: how many iterations more than necessary may be replayed to compare what is loaded: here one at most.
    Raises:
        AttachRefused: the run was recovered again meanwhile.
        DaemonUnavailable: a daemon is away, or a rank cannot go on.
    """
    found = _try_plans(memory, ranks, alike, verify_iterations)
    if not isinstance(found, str):
        return found
    if found:
        _report_global(memory, found)
    memory.take_back_hint(HINT_APART | HINT_APART_AGAIN)
    return None


def _try_plans(
    memory: RankMemory, ranks: Collectives, alike: tuple[int, ...], verify_iterations: int
) -> ApartStart | str:
    """The first plan of which every rank has what it needs; or why there is none, nothing if nobody
    was parked. A collective call.
    """
    unusable: tuple[SnapshotCopy, ...] = ()
    tried: list[LocalizedPlan] = []
    wanted = min(ranks.gather(verify_iterations, int))
    for attempt in range(_PLANS):
        view = _look(memory, ranks, alike, unusable)
        if not view.parked:
            return ""
        plan = _plan(view, memory.identity.world_size, wanted if attempt < _VERIFIED_PLANS else 0)
        if isinstance(plan, NotLocalized):
            return plan.reason
        if tried.count(plan) == _TRIES:
            break
        tried.append(plan)
        mine = plan.per_rank[memory.identity.rank]
        trial = _Trial(memory, mine, view, len({*plan.bases.values()}) > 1)
        with ExitStack() as undo:
            undo.callback(trial.forsake)
            try:
                schedules = ranks.agree(trial.require, ScheduleStart)
            except TryAgain:
                unusable += trial.unusable
                continue
            if why := differing(schedules):
                return why
            undo.pop_all()
        return _begin(memory, ranks, trial, plan)
    return f"not every rank could have what it needs, in {len(tried)} attempts"


def _begin(
    memory: RankMemory, ranks: Collectives, trial: _Trial, plan: LocalizedPlan
) -> ApartStart:
    """All ranks have what they need: the new history begins. A collective call."""
    with ExitStack() as undo:
        undo.callback(trial.feeds.close)
        with ranks.all_or_none():
            images = trial.resume(plan)
            again_in_a_row = memory.hint & HINT_APART
            memory.leave_hint(HINT_APART_AGAIN if again_in_a_row else HINT_APART)
        undo.pop_all()
    values = ValueLogs(memory.session, trial.mine, trial.feeds, trial.view.everybody)
    return ApartStart(plan, trial.mine, images, trial.feeds, values)


def recovered_locally(start: ApartStart) -> Recovered:
    """What this rank begins with; each of those that replay decides for itself."""
    replayed = Replayed(snapshots_used(start.mine.snapshots), everybody=False, localized=True)
    unverified = start.mine.unverified
    if not start.replays:
        copied = start.mine.kind is RankKind.COPIED
        whose = "a peer's" if copied else "its"
        rest = "; random state, scalars and buffers are those of its own snapshot" if copied else ""
        unverified = (
            f"this rank goes on from {whose} parked state, which was read from the live tensors when the step was cut off, and whose digests "
            f"fit{rest}"
        )
    return Recovered(start.images, start.plan.reason, replayed, unverified)


def end_localized(memory: RankMemory, start: ApartStart) -> None:
    """The localized recovery is over."""
    start.close()
    memory.take_back_hint(HINT_APART | HINT_APART_AGAIN)


def _look(
    memory: RankMemory,
    ranks: Collectives,
    alike: tuple[int, ...],
    unusable: tuple[SnapshotCopy, ...],
) -> RunView:
    """What there is, and what ranks tell of themselves. A collective call.

    Of a rank that runs on another node now its log there has told; it goes on telling that.
    """
    here = recorded_facts(segment.descriptor.client for segment in memory.logs)
    found, facts = memory.brought_facts or here, None
    if found is not None:
        both = tuple(rank for rank in found.alike if rank in alike)
        facts = RankFacts(found.neighbours, found.domain, both)
    view = memory.see(ranks, facts=facts, alike=alike, unusable=unusable)
    if found is None:
        rank = memory.identity.rank
        left_behind = facts_from_logs((rank,), view.logs, view.parked).get(rank)
        if left_behind is not None:
            others = tuple(other for other in left_behind.alike if other != rank)
            memory.brought_facts = LogFacts(left_behind.neighbours, left_behind.domain, others)
    return view


def _plan(view: RunView, world_size: int, verify_iterations: int) -> LocalizedPlan | NotLocalized:
    if any(hint & HINT_APART_AGAIN for hint in view.hints):
        return NotLocalized("two localized recoveries in a row have not come to their end")
    if open_failures(view.failures):
        return NotLocalized("a replay of this run did not reproduce what was recorded")
    return plan_localized(
        RunHoldings(view.usable, view.parked, view.logs, view.begun),
        view.facts,
        world_size,
        homes=view.homes,
        verify_iterations=verify_iterations,
    )


def _report_global(memory: RankMemory, reason: str) -> None:
    text = f"all ranks recover together, though some were parked: {reason}"
    logger.info("%s", text)
    if memory.identity.rank == 0:
        memory.session.notice("info", "not_localized", text)


@dataclass(slots=True)
class _Trial:
    """This rank tries to have what its part of a plan needs; ``again`` if it cannot: another plan
    may do, or the recovery of all ranks.
    """

    memory: RankMemory
    mine: RankPlan
    view: RunView
    apart: bool  # some ranks begin before others
    again: bool = False
    feeds: FedLogs = field(init=False)
    schedule: ScheduleStart = field(default_factory=ScheduleStart)  # by which it would go on
    unusable: tuple[SnapshotCopy, ...] = ()  # copies of parked state that it could not have
    _parked: SnapshotImage | None = None
    _attempt: Attempt = field(default_factory=lambda: Attempt([]))

    def __post_init__(self) -> None:
        self.feeds = FedLogs(self.memory.session, {})
        try:
            self._have()
        except (AttachRefused, CorruptionError, DaemonUnavailable) as error:
            # Another plan asks for something else, and the recovery of all ranks together for none of this.
            logger.warning("this localized recovery cannot be: %s", error)
            self.again = True
        except Exception:
            # The other ranks wait for our vote. And what is raised would be raised again at each start.
            logger.exception("this localized recovery cannot be")
            self.again = True

    def _have(self) -> None:
        memory, mine, cards = self.memory, self.mine, self.view.everybody
        if mine.snapshots:
            self.schedule = ScheduleStart(
                [(p.record.iteration, p.record.phase) for p in mine.snapshots]
            )
            self._attempt = memory.attempt(mine.snapshots, self.view)
            self.again = self._attempt.again or self._attempt.fatal is not None
            if self.again:
                return
        if mine.kind is not RankKind.REPLAYS:
            self._parked = parked = self._read_parked(mine.pieces[0], cards)
            if mine.kind is not RankKind.COPIED:
                self._goes_on_as_parked(parked)
        self.feeds = FedLogs(memory.session, mine.logs, cards)

    def _read_parked(self, piece: SnapshotToLoad, cards: tuple[NodeCard, ...]) -> SnapshotImage:
        """A parked state, this rank's or a peer's; what cannot be had is `unusable` for the next plan."""
        try:
            if self.mine.kind is RankKind.PARKED:
                return self._own_parked(piece)
            return ParkedCopy.read(self.memory.session, piece, cards)
        except (AttachRefused, CorruptionError, DaemonUnavailable) as error:
            self.unusable = piece.sources
            where = ", ".join(f"{source.segment} on {source.node}" for source in piece.sources)
            text = f"planning without the parked state of iteration {piece.record.iteration} ({where}): {error}"
            self.memory.session.notice("error", "parked_unusable", text)
            raise

    def _own_parked(self, piece: SnapshotToLoad) -> SnapshotImage:
        """In this rank's own segment, beside a ring with the same operators.

        Raises:
            CorruptionError: it is damaged, and in quarantine now.
            DaemonUnavailable: it is of no use here.
        """
        memory = self.memory
        record = memory.parks.own_copy(memory.session.node_id, piece)
        if record is None or memory.descriptor is None:
            raise DaemonUnavailable(
                "what this rank parked is not in its memory any more", operation="read parked state"
            )
        parked = memory.parks.of(record).descriptor
        if operators_id(parked) != operators_id(memory.descriptor):
            raise DaemonUnavailable(
                "the parked state has other operators than the newest snapshots",
                operation="read parked state",
            )
        return parked_image(memory, record)

    def _goes_on_as_parked(self, image: SnapshotImage) -> None:
        """By which schedule, and whether it can run apart.

        Raises:
            DaemonUnavailable: its stages would ask neighbours that are not there.
        """
        scalars = image.scalars()
        if self.apart and None in scalars.get("stages", {}).values():
            raise DaemonUnavailable(
                "what a stage sends is not known (DTensors?): it would ask its neighbours, which are not there",
                operation="run apart",
            )
        ring = self.memory.descriptor
        if self.mine.kind is RankKind.MOVED:
            ring = self.memory.descriptor_of(self._attempt)
        assert ring is not None
        self.schedule = of_parked(image.iteration, image.phase, scalars, ring.client)

    def require(self) -> ScheduleStart:
        """By which schedule this rank would go on.

        Raises:
            TryAgain: it could not have what it needs.
        """
        if self.again:
            raise TryAgain
        return self.schedule

    def forsake(self) -> None:
        """Give back what was brought here for this plan."""
        self.feeds.close()
        self.memory.forsake(self._attempt)

    def resume(self, plan: LocalizedPlan) -> list[SnapshotImage]:
        """Begin the new history; the images that this rank begins with."""
        images = self.memory.resume(
            self.mine.snapshots, self._attempt, self.view, epoch=plan.epoch, end=plan.resume
        )
        if self._parked is None:
            return images
        if isinstance(self._parked, ParkedCopy) and self.mine.kind is RankKind.COPIED:
            return [CopiedImage(self._parked, images[0])]
        return [self._parked]
