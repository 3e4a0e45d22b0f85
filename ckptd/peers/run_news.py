"""Who takes part in a run, told to nodes that have no rank of it, and learned from them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ckptd.core.sessions import wrong_members
from ckptd.core.slots.slots import epoch_can_follow
from ckptd.node_context import NodeContext
from ckptd.peers.peer_link import PeerLink
from ckptd.peers.run_records import RunRecords
from ckptd.transport.control import peer_messages as p
from ckptd.transport.control.messages import (
    GetHoldings,
    Holdings,
    Member,
    NodeCard,
    RunRecord,
    RunSeen,
)

__all__ = ["RecordUpdates", "RunNews", "RunSurvey"]

logger = logging.getLogger(__name__)


_MAX_WORLD = 1 << 24  # ranks; of a run of others the size is not known


class RunNews:
    """Tells members, and former ones, who takes part; learns it from them.

    Args:
        link: the connection to a node, None if its address is not known.
        note_epoch: told of the epoch of each record that was learned.
    """

    def __init__(
        self,
        node: NodeContext,
        records: RunRecords,
        *,
        link: Callable[[str], PeerLink | None],
        note_epoch: Callable[[str, str, int, int], None],
    ) -> None:
        self._node, self._records, self._link = node, records, link
        self._note_epoch = note_epoch
        # By run and node: the epoch that it was told of.
        self._told: dict[tuple[str, str], dict[str, int]] = {}

    def tell(self, job: str, run: str) -> None:
        """Tell members without ranks, and former ones, until they have answered.

        Whoever recovers without us must know of this epoch, or its own would get a number that is
        not above ours.
        """
        record = self._records.of(job, run)
        if record is None:
            return
        known = self._told.setdefault((job, run), {})
        working = {member.card.node for member in record.members if member.ranks}
        for card in record.cards:
            node = card.node
            link = self._link(node)
            if node in working or link is None or known.get(node, -1) >= record.epoch:
                continue
            link.ask(
                p.TellRun(record),
                p.PeerDone,
                partial(self._knows, known, node, record.epoch),
                partial(self._does_not_know, node),
            )

    def ended(self, job: str, run: str) -> None:
        """The run is over here: nobody is told of it any more."""
        self._told.pop((job, run), None)

    def _knows(self, known: dict[str, int], node: str, epoch: int, _: p.PeerDone) -> None:
        known[node] = max(epoch, known.get(node, -1))

    def _does_not_know(self, node: str, code: str, reason: str) -> None:
        self._node.events.count(f"tell_run.{code}")
        logger.debug("%s was not told who takes part: %s", node, reason)

    def learn_from_member(self, peer: str, record: RunRecord) -> p.PeerReply:
        """One of its members tells who takes part in a run of which no rank is here."""
        if peer not in {member.card.node for member in record.members}:
            return p.PeerRefused("bad_message", f"{peer} does not take part in it")
        return self.learn(peer, record)

    def learn(self, peer: str, record: RunRecord) -> p.PeerReply:
        """A member, of now or before, tells who takes part in a run."""
        if self._node.node_id not in {card.node for card in record.cards}:
            return p.PeerRefused("bad_message", f"{peer} and this node do not both take part in it")
        if wrong := wrong_members(record.members, _MAX_WORLD):
            return p.PeerRefused("bad_message", wrong)
        known = self._records.of(record.job, record.run)
        newest = -1 if known is None else known.newest_epoch
        if not epoch_can_follow(record.newest_epoch, newest):
            return p.PeerRefused("bad_message", f"epoch {record.newest_epoch} after {newest}")
        if known is None or record.epoch >= known.epoch:
            self._records.told(record)
            self._note_epoch(record.job, record.run, record.epoch, record.epoch_start)
        return p.PeerDone()


# Of these nodes those that can be asked, and for how many seconds an answer of each is worth waiting.
Reach = Callable[[Sequence[NodeCard]], Sequence[tuple[NodeCard, PeerLink, float]]]


class RunSurvey:
    """Answers once, when everybody has answered or has had the time to.

    Args:
        here: what this node holds, and knows of the run.
        others: whom to ask besides those of whom a record tells.
        known: nodes that are not to be asked.
        refused: told who did not want to tell, and why.
    """

    def __init__(
        self,
        question: GetHoldings,
        here: Holdings,
        others: Iterable[NodeCard],
        reach: Reach,
        answer: Callable[[RunSeen], None],
        *,
        known: Iterable[str] = (),
        refused: Callable[[str, str], None] = lambda node, reason: None,
    ) -> None:
        self._question, self._reach, self._answer = question, reach, answer
        self._refused = refused
        self._found, self._cards = [here], list[NodeCard]()
        self._silent = list[str]()
        self._asked = {here.node, *known}
        self._left = 1  # this call itself
        self._ask([*(() if here.record is None else here.record.cards), *others])
        self._one_less()

    def _ask(self, cards: Iterable[NodeCard]) -> None:
        fresh = {card.node: card for card in cards if card.node not in self._asked}
        self._asked |= fresh.keys()
        reached = self._reach(list(fresh.values()))
        self._left += len(reached)
        self._silent += sorted(fresh.keys() - {card.node for card, _, _ in reached})
        for card, link, patience_s in reached:
            link.ask(
                self._question,
                Holdings,
                partial(self._told, card),
                partial(self._no_answer, card),
                timeout_s=patience_s,
            )

    def _told(self, card: NodeCard, holdings: Holdings) -> None:
        if holdings.node != card.node:
            self._no_answer(card, "", "another node is there")
            return
        self._found.append(holdings)
        self._cards.append(card)
        if holdings.record is not None:
            self._ask(holdings.record.cards)
        self._one_less()

    def _no_answer(self, card: NodeCard, code: str, reason: str) -> None:
        if code == "forbidden":
            self._refused(card.node, reason)
        self._silent.append(card.node)
        self._one_less()

    def _one_less(self) -> None:
        self._left -= 1
        if self._left == 0:
            records = [held.record for held in self._found if held.record is not None]
            self._answer(
                RunSeen(
                    tuple(self._found),
                    tuple(self._cards),
                    _members_of(records),
                    tuple(sorted(self._silent)),
                )
            )


def _members_of(records: Sequence[RunRecord]) -> tuple[Member, ...]:
    """Everybody of whom a record tells; ranks are those of the newest epoch."""
    found: dict[str, Member] = {}
    newest_first = sorted(records, key=lambda record: record.epoch, reverse=True)
    for record in newest_first[:1]:
        found = {member.card.node: member for member in record.members}
    for record in newest_first:
        for card in record.cards:
            found.setdefault(card.node, Member(card, ()))
    return tuple(found.values())


_EVERY_S = 5.0  # for one run: whoever is refused may ask as often as it likes
_AT_A_TIME = 4  # of hundreds of members one that lives is enough, and each tells everything that it holds
_MAX_RUNS = 4096
_TRIES = 12  # after a start; members that are down for longer ask this node themselves when they are back


class RecordUpdates:
    """Asks members of a run for its record, after a start and after a stranger was refused.

    Args:
        node: this node.
        record_of: what is recorded here of a run; None: nothing.
        reach: connects to nodes; which of them can be asked.
        learn: told the node that was asked and the record that it has.
    """

    def __init__(
        self,
        node: str,
        *,
        record_of: Callable[[str, str], RunRecord | None],
        reach: Reach,
        learn: Callable[[str, RunRecord], object],
        clock: Callable[[], float],
    ) -> None:
        self._node, self._record_of = node, record_of
        self._reach, self._learn, self._clock = reach, learn, clock
        self._asked: dict[tuple[str, str], tuple[float, int]] = {}  # when, and how often
        self._left: dict[tuple[str, str], int] = {}  # how often to ask of its own accord

    def adopted(self, names: Iterable[tuple[str, str]]) -> None:
        """Records of an earlier daemon: what became of these runs meanwhile is not known."""
        self._left.update(dict.fromkeys(names, _TRIES))

    def tick(self) -> None:
        """Ask again whom nobody has answered."""
        for name, left in list(self._left.items()):
            if left:
                self._ask_in_turn(name)
            else:
                del self._left[name]

    def refused(self, message: p.PeerMessage) -> None:
        """Somebody was refused as no member: what is recorded here may be old."""
        if isinstance(message, p.TellRun):
            name = message.record.job, message.record.run
        elif isinstance(message, GetHoldings):
            name = message.job, message.run
        else:
            return  # comes after one of these
        self._ask_in_turn(name)

    def _ask_in_turn(self, name: tuple[str, str]) -> None:
        """Ask some of those who take part, unless some were asked just now."""
        now_s = self._clock()
        last_s, times = self._asked.get(name, (float("-inf"), 0))
        if now_s - last_s < _EVERY_S:
            return
        if len(self._asked) >= _MAX_RUNS:
            self._asked.clear()
        self._asked[name] = now_s, times + 1
        if name in self._left:
            self._left[name] -= 1
        record = self._record_of(*name)
        others = [] if record is None else [c for c in record.cards if c.node != self._node]
        if others:
            self._ask(name, _turn(others, times))

    def _ask(self, name: tuple[str, str], cards: Sequence[NodeCard]) -> None:
        for card, link, patience_s in self._reach(cards):
            link.ask(
                GetHoldings(*name),
                Holdings,
                partial(self._told, name, card.node),
                _no_answer,
                timeout_s=patience_s,
            )

    def _told(self, name: tuple[str, str], node: str, holdings: Holdings) -> None:
        record = holdings.record
        if holdings.node == node and record is not None and (record.job, record.run) == name:
            self._left.pop(name, None)
            self._learn(node, record)


def _turn(cards: Sequence[NodeCard], times: int) -> list[NodeCard]:
    """Other members each time, until all had their turn."""
    first = times * _AT_A_TIME % len(cards)
    return [*cards[first:], *cards[:first]][:_AT_A_TIME]


def _no_answer(code: str, reason: str) -> None:
    """Others are asked next."""
