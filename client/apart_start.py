"""The start of a localized recovery: who keeps a parked state, who copies one, who replays apart; and all of it had here, or no plan.

``begin_apart`` is tried before the recovery of all ranks together (``RankMemory.recover``). What one rank lacks changes the plan of all, so
a plan counts when every rank has what it needs. Where no plan holds, or localized recoveries have not come to their end
twice in a row, all ranks recover together: that is always possible while there are snapshots.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass, field

import msgspec

from ckptd.client.agreement import Exchange, all_or_none, vote
from ckptd.client.facts import told_facts
from ckptd.client.fed_logs import FedLogs
from ckptd.client.membership import RunView
from ckptd.client.memory import RankMemory
from ckptd.client.park_memory import parked_image
from ckptd.client.parked_copy import CopiedImage, ParkedCopy
from ckptd.client.replay import SnapshotImage
from ckptd.client.retrieval import Attempt
from ckptd.client.same_schedule import Told, differing, of_parked
from ckptd.client.value_logs import ValueLogs
from ckptd.errors import AttachRefused, CorruptionError, DaemonUnavailable
from ckptd.memory.segment_format import HINT_APART, HINT_APART_AGAIN
from ckptd.recovery.facts import RankFacts
from ckptd.recovery.holdings import operators_id
from ckptd.recovery.localized import LocalizedPlan, NotLocalized, RankKind, RankPlan, plan_localized

__all__ = ["ApartStart", "begin_apart", "come_together"]

logger = logging.getLogger(__name__)

_PLANS = 2  # what is found damaged changes the plan


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


def begin_apart(
    memory: RankMemory, exchange: Exchange, alike: tuple[int, ...]
) -> ApartStart | None:
    """The localized recovery of this run, where there is one; None on all ranks where all recover together. A collective call.

    Args:
        alike: ranks with which this one has all operators alike, values too.
    Raises:
        AttachRefused: the run was recovered again meanwhile.
        DaemonUnavailable: a daemon is away, or a rank cannot go on.
    """
    found = told_facts(segment.descriptor.client for segment in memory.logs)
    facts = None
    if found is not None:
        both = tuple(rank for rank in found.alike if rank in alike)
        facts = RankFacts(found.neighbours, found.domain, both)
    identity, node = memory.identity, memory.session.node_id
    for _ in range(_PLANS):
        view = memory.see(exchange, facts=facts, alike=alike)
        if not view.parked:
            break
        plan = _plan(view, identity.world_size)
        if isinstance(plan, NotLocalized):
            _tell_together(memory, plan.reason)
            break
        trial = _Trial(memory, plan.per_rank[identity.rank], view, len({*plan.bases.values()}) > 1)
        again = True
        try:
            again = vote(exchange, node, again=trial.again)
        finally:
            if again:
                trial.forsake()
        if not again and (why := differing(_schedules(exchange, trial))):
            trial.forsake()
            _tell_together(memory, why)
            break
        if not again:
            with ExitStack() as undo:
                undo.callback(trial.feeds.close)
                with all_or_none(exchange, node):
                    images = trial.resume(plan)
                    again_in_a_row = memory.hint & HINT_APART
                    memory.leave_hint(HINT_APART_AGAIN if again_in_a_row else HINT_APART)
                undo.pop_all()
            values = ValueLogs(memory.session, trial.mine, trial.feeds, view.everybody)
            return ApartStart(plan, trial.mine, images, trial.feeds, values)
    memory.take_back_hint(HINT_APART | HINT_APART_AGAIN)
    return None


def come_together(memory: RankMemory, start: ApartStart) -> None:
    """The localized recovery is over."""
    start.close()
    memory.take_back_hint(HINT_APART | HINT_APART_AGAIN)


def _plan(view: RunView, world_size: int) -> LocalizedPlan | NotLocalized:
    if any(hint & HINT_APART_AGAIN for hint in view.hints):
        return NotLocalized("two localized recoveries in a row have not come to their end")
    return plan_localized(
        view.held, view.parked, view.logs, view.facts, world_size, homes=view.homes
    )


def _schedules(exchange: Exchange, trial: _Trial) -> list[Told]:
    """By rank: by which schedule it would go on. A collective call."""
    return [
        msgspec.msgpack.decode(said, type=Told)
        for said in exchange(msgspec.msgpack.encode(trial.schedule))
    ]


def _tell_together(memory: RankMemory, reason: str) -> None:
    text = f"all ranks recover together, though some were parked: {reason}"
    logger.info("%s", text)
    if memory.identity.rank == 0:
        memory.session.notice("info", "not_localized", text)


@dataclass(slots=True)
class _Trial:
    """This rank tries to have what its part of a plan needs; ``again`` if it cannot: another plan may do, or the recovery of all ranks."""

    memory: RankMemory
    mine: RankPlan
    view: RunView
    apart: bool  # some ranks begin before others
    again: bool = False
    feeds: FedLogs = field(init=False)
    schedule: Told = field(default_factory=Told)  # by which it would go on
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
        if mine.kind is RankKind.PARKED:
            self._parked = self._own_parked()
        else:
            snapshots = mine.pieces[1:] if mine.kind is RankKind.COPIED else mine.pieces
            self.schedule = Told([(p.record.iteration, p.record.phase) for p in snapshots])
            self._attempt = memory.attempt(snapshots, self.view)
            self.again = self._attempt.again or self._attempt.fatal is not None
            if self.again:
                return
            if mine.kind is RankKind.COPIED:
                self._parked = ParkedCopy.read(memory.session, mine.pieces[0], cards)
        self.feeds = FedLogs(memory.session, mine.logs, cards)

    def _own_parked(self) -> SnapshotImage:
        """In this rank's own segment, beside a ring with the same operators.

        Raises:
            CorruptionError: it is damaged, and in quarantine now.
            DaemonUnavailable: it is not here: this rank has moved to another node.
        """
        memory = self.memory
        record = memory.parks.own_copy(memory.session.node_id, self.mine.pieces[0])
        if record is None or memory.descriptor is None:
            raise DaemonUnavailable(
                "this rank was parked on another node", operation="read parked state"
            )
        parked = memory.parks.of(record).descriptor
        if operators_id(parked) != operators_id(memory.descriptor):
            raise DaemonUnavailable(
                "the parked state has other operators than the newest snapshots",
                operation="read parked state",
            )
        image = parked_image(memory, record)
        scalars = image.scalars()
        if self.apart and None in scalars.get("stages", {}).values():
            raise DaemonUnavailable(
                "what a stage sends is not known (DTensors?): it would ask its neighbours, which are not there",
                operation="run apart",
            )
        of = memory.descriptor.client
        self.schedule = of_parked(record.iteration, record.phase, scalars, of)
        return image

    def forsake(self) -> None:
        """Give back what was brought here for this plan."""
        self.feeds.close()
        self.memory.forsake(self._attempt)

    def resume(self, plan: LocalizedPlan) -> list[SnapshotImage]:
        """Begin the new history; the images that this rank begins with."""
        snapshots = self.mine.pieces[1:] if self.mine.kind is RankKind.COPIED else self.mine.pieces
        if self.mine.kind is RankKind.PARKED:
            snapshots = ()
        images = self.memory.resume(
            snapshots, self._attempt, self.view, epoch=plan.epoch, end=plan.resume
        )
        if self.mine.kind is RankKind.REPLAYS:
            return images
        assert self._parked is not None
        if isinstance(self._parked, ParkedCopy):
            return [CopiedImage(self._parked, images[0])]
        return [self._parked]
