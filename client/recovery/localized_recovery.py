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
from ckptd.client.daemon_link.retrieval import Retrieved
from ckptd.client.daemon_link.run_inventory import RunView
from ckptd.client.daemon_link.snapshot_image import SnapshotImage
from ckptd.client.log_lines import get_logger
from ckptd.client.parking.park_memory import parked_image
from ckptd.client.parking.parked_copy import CopiedImage, ParkedCopy
from ckptd.client.pipeline.upstream_feed import FedLogs
from ckptd.client.pipeline.value_logs import ValueLogs
from ckptd.client.ranks.collectives import Collectives, TryAgain
from ckptd.client.recovery.global_recovery import Recovered
from ckptd.client.recovery.start_procedure import agree_on_plan
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
from ckptd.core.recovery.log_facts import facts_from_logs
from ckptd.core.recovery.quarantine import open_failures, snapshots_used
from ckptd.core.recovery.recovery_facts import RankFacts
from ckptd.core.recovery.snapshot_sources import SnapshotCopy, SnapshotToLoad
from ckptd.core.slots.segment_hints import HINT_APART, HINT_APART_AGAIN
from ckptd.errors import AttachRefused, CorruptionError, DaemonUnavailable
from ckptd.holdings import operators_id
from ckptd.transport.control.messages import NodeCard

__all__ = ["LocalizedStart", "begin_localized", "end_localized", "recovered_locally"]

logger = get_logger(__name__)

_PLANS = 4  # what is found damaged changes the plan
# Of these the first: what is only for comparing must not make all ranks recover together.
_VERIFIED_PLANS = 2
_TRIES = 2  # of the same plan: a node may have been slow


@dataclass(slots=True)
class LocalizedStart:
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
) -> LocalizedStart | None:
    """The localized recovery of this run, where there is one; None on all ranks where all recover
    together. A collective call.

    Args:
        alike: ranks with which this one has all operators alike, values too.
        verify_iterations: how many iterations more than necessary may be replayed to compare what
            is loaded: here one at most.
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
) -> LocalizedStart | str:
    """The first plan of which every rank has what it needs; or why there is none, nothing if nobody
    was parked. A collective call.
    """
    procedure = _Procedure(memory, ranks, alike, min(ranks.gather(verify_iterations, int)))
    agreed = agree_on_plan(ranks, procedure)
    if agreed is None:
        return procedure.not_held
    with agreed.undo as undo:
        if isinstance(agreed.plan, NotLocalized):
            return agreed.plan.reason
        if why := differing(agreed.votes):
            return why
        undo.pop_all()
    return _begin(memory, ranks, procedure.part, agreed.plan)


def _begin(memory: RankMemory, ranks: Collectives, part: _Part, plan: LocalizedPlan) -> LocalizedStart:
    """All ranks have what they need: the new history begins. A collective call."""
    with ExitStack() as undo:
        undo.callback(part.feeds.close)
        with ranks.all_or_none():
            images = part.resume(plan)
            again_in_a_row = memory.hint & HINT_APART
            memory.leave_hint(HINT_APART_AGAIN if again_in_a_row else HINT_APART)
        undo.pop_all()
    values = ValueLogs(memory.session, part.mine, part.feeds, part.view.everybody)
    return LocalizedStart(plan, part.mine, images, part.feeds, values)


def recovered_locally(start: LocalizedStart) -> Recovered:
    """What this rank begins with; each of those that replay decides for itself."""
    replayed = Replayed(snapshots_used(start.mine.snapshots), everybody=False, localized=True)
    unverified = start.mine.unverified
    if not start.replays:
        copied = start.mine.kind is RankKind.COPIED
        whose = "a peer's" if copied else "its"
        rest = "; random state, scalars and buffers are those of its own snapshot" if copied else ""
        unverified = (
            f"this rank goes on from {whose} parked state, which was read from the live tensors "
            "when the step was cut off, and whose digests "
            f"fit{rest}"
        )
    return Recovered(start.images, start.plan.reason, replayed, unverified)


def end_localized(memory: RankMemory, start: LocalizedStart) -> None:
    """The localized recovery is over."""
    start.close()
    memory.take_back_hint(HINT_APART | HINT_APART_AGAIN)


class _Procedure:
    """The start of a run of which only some ranks go back to snapshots.

    Attributes:
        part: what this rank has of the last plan that was tried.
    """

    attempts = _PLANS
    vote = ScheduleStart
    part: _Part

    def __init__(
        self,
        memory: RankMemory,
        ranks: Collectives,
        alike: tuple[int, ...],
        verify_iterations: int,
    ) -> None:
        self._memory, self._ranks, self._alike = memory, ranks, alike
        self._verify_iterations = verify_iterations
        self._unusable: tuple[SnapshotCopy, ...] = ()
        self._tried: list[LocalizedPlan] = []

    @property
    def not_held(self) -> str:
        """That no plan could be followed."""
        return f"not every rank could have what it needs, in {len(self._tried)} attempts"

    def inventory(self, undo: ExitStack) -> RunView:
        """What there is, and what ranks tell of themselves. A collective call.

        Of a rank that runs on another node now its log there has told; it goes on telling that.
        """
        memory = self._memory
        here = recorded_facts(segment.descriptor.client for segment in memory.logs)
        found, facts = memory.brought_facts or here, None
        if found is not None:
            both = tuple(rank for rank in found.alike if rank in self._alike)
            facts = RankFacts(found.neighbours, found.domain, both)
        view = memory.see(self._ranks, facts=facts, alike=self._alike, unusable=self._unusable)
        if found is None:
            rank = memory.identity.rank
            left_behind = facts_from_logs((rank,), view.logs, view.parked).get(rank)
            if left_behind is not None:
                others = tuple(other for other in left_behind.alike if other != rank)
                memory.brought_facts = LogFacts(left_behind.neighbours, left_behind.domain, others)
        return view

    def plan(self, view: RunView) -> LocalizedPlan | NotLocalized:
        """Who keeps its parked state, who copies one, who replays."""
        if not view.parked:
            return NotLocalized("")
        if any(hint & HINT_APART_AGAIN for hint in view.hints):
            return NotLocalized("two localized recoveries in a row have not come to their end")
        if open_failures(view.failures):
            return NotLocalized("a replay of this run did not reproduce what was recorded")
        verified = len(self._tried) < _VERIFIED_PLANS
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
        """Have what this rank's part needs; returns by which schedule it would go on.

        Raises:
            TryAgain: another plan may do, or the recovery of all ranks.
        """
        assert isinstance(plan, LocalizedPlan), "without a plan nothing is retrieved"
        mine = plan.per_rank[self._memory.identity.rank]
        self.part = part = _Part(self._memory, mine, view, len({*plan.bases.values()}) > 1)
        try:
            return part.retrieve(undo)
        except TryAgain:
            raise
        except (AttachRefused, CorruptionError, DaemonUnavailable) as error:
            # Another plan asks for something else, and the recovery of all ranks for none of this.
            logger.warning("this localized recovery cannot be: %s", error)
            raise TryAgain from error
        except Exception as error:
            # What is raised here would be raised again at each start.
            logger.exception("this localized recovery cannot be")
            raise TryAgain from error
        finally:
            self._unusable += part.unusable


def _report_global(memory: RankMemory, reason: str) -> None:
    text = f"all ranks recover together, though some were parked: {reason}"
    logger.info("%s", text)
    if memory.identity.rank == 0:
        memory.session.notice("info", "not_localized", text)


@dataclass(slots=True)
class _Part:
    """What this rank has of its part of a plan.

    Attributes:
        unusable: copies of parked state that it could not have.
    """

    memory: RankMemory
    mine: RankPlan
    view: RunView
    apart: bool  # some ranks begin before others
    feeds: FedLogs = field(init=False)
    unusable: tuple[SnapshotCopy, ...] = ()
    _parked: SnapshotImage | None = None
    _retrieved: Retrieved = field(default_factory=lambda: Retrieved([]))

    def retrieve(self, undo: ExitStack) -> ScheduleStart:
        """Have it; returns by which schedule this rank would go on.

        Raises:
            TryAgain, AttachRefused, CorruptionError, DaemonUnavailable: it cannot be had.
        """
        memory, mine, cards = self.memory, self.mine, self.view.everybody
        schedule = ScheduleStart()
        if mine.snapshots:
            records = [piece.record for piece in mine.snapshots]
            schedule = ScheduleStart([(r.iteration, r.phase) for r in records])
            self._retrieved = memory.retrieve(mine.snapshots, self.view, undo)
        if mine.kind is not RankKind.REPLAYS:
            self._parked = parked = self._read_parked(mine.pieces[0], cards)
            if mine.kind is not RankKind.COPIED:
                schedule = self._schedule_as_parked(parked)
        self.feeds = FedLogs(memory.session, mine.logs, cards)
        undo.callback(self.feeds.close)
        return schedule

    def _read_parked(self, piece: SnapshotToLoad, cards: tuple[NodeCard, ...]) -> SnapshotImage:
        """A parked state, this rank's or a peer's; what cannot be had is `unusable` for the next plan."""
        try:
            if self.mine.kind is RankKind.PARKED:
                return self._own_parked(piece)
            return ParkedCopy.read(self.memory.session, piece, cards)
        except (AttachRefused, CorruptionError, DaemonUnavailable) as error:
            self.unusable = piece.sources
            where = ", ".join(f"{source.segment} on {source.node}" for source in piece.sources)
            text = (
                f"planning without the parked state of iteration {piece.record.iteration} ({where}): {error}"
            )
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

    def _schedule_as_parked(self, image: SnapshotImage) -> ScheduleStart:
        """By which schedule it goes on, if it can run apart.

        Raises:
            DaemonUnavailable: its stages would ask neighbours that are not there.
        """
        scalars = image.scalars()
        if self.apart and None in scalars.get("stages", {}).values():
            raise DaemonUnavailable(
                "what a stage sends is not known (DTensors?): it would ask its neighbours, which "
                "are not there",
                operation="run isolated",
            )
        ring = self.memory.descriptor
        if self.mine.kind is RankKind.MOVED:
            ring = self.memory.descriptor_of(self._retrieved)
        assert ring is not None
        return of_parked(image.iteration, image.phase, scalars, ring.client)

    def resume(self, plan: LocalizedPlan) -> list[SnapshotImage]:
        """Begin the new history; the images that this rank begins with."""
        images = self.memory.resume(
            self.mine.snapshots, self._retrieved, self.view, epoch=plan.epoch, end=plan.resume
        )
        if self._parked is None:
            return images
        if isinstance(self._parked, ParkedCopy) and self.mine.kind is RankKind.COPIED:
            return [CopiedImage(self._parked, images[0])]
        return [self._parked]
