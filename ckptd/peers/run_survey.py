"""Asking other nodes about a run: what they hold of it, and who takes part in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ckptd.peers.peer_nodes import AskNode
from ckptd.transport import peer_messages as p
from ckptd.transport.messages import (
    GetHoldings,
    Holdings,
    Member,
    NodeCard,
    RunRecord,
    RunSeen,
)

# Connects to nodes; returns those that can be asked, and how to ask each.
Reach = Callable[[Sequence[NodeCard]], Sequence[tuple[NodeCard, AskNode]]]


class RunSurvey:
    """Asks nodes what they hold of a run; answers once, when each has answered or its time is over.

    A node may name further members: these are asked, too.

    Args:
        here: what this node holds, and knows of the run.
        others: nodes to ask besides those in records.
        known: nodes that are not asked.
        refused: called with each node that refuses to answer, and its reason.
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
        self._silent += sorted(fresh.keys() - {card.node for card, _ in reached})
        for card, ask in reached:
            ask(self._question, partial(self._answered, card), partial(self._no_answer, card))

    def _answered(self, card: NodeCard, holdings: Holdings) -> None:
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
            silent = tuple(sorted(self._silent))
            self._answer(RunSeen(tuple(self._found), tuple(self._cards), _members_of(records), silent))


def _members_of(records: Sequence[RunRecord]) -> tuple[Member, ...]:
    """Every node in a record, with its ranks of the newest epoch."""
    found: dict[str, Member] = {}
    newest_first = sorted(records, key=lambda record: record.epoch, reverse=True)
    for record in newest_first[:1]:
        found = {member.card.node: member for member in record.members}
    for record in newest_first:
        for card in record.cards:
            found.setdefault(card.node, Member(card, ()))
    return tuple(found.values())


_EVERY_S = 5.0  # between two questions about one run: a node that is refused may ask as often as it likes
_AT_A_TIME = 4  # one living member of hundreds is enough, and each sends everything that it holds
_MAX_RUNS = 4096
_TRIES = 12  # after a start; members that are away for longer ask this node themselves when they are back


class RecordUpdates:
    """Asks members of a run for its record: after a start of the daemon, and after a refusal.

    The node that speaks for a new epoch may be unknown here, or may not know this node. Its word is
    not enough: every node with a trusted key could claim to speak. A member that both know is asked
    instead, and its record is believed as if the member had sent it (`TellRun`).

    Args:
        node: this node.
        record_of: the record of a run here, or None.
        learn: called with the node that answered, and its record.
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
        self._left: dict[tuple[str, str], int] = {}  # tries that are left after the start

    def adopted(self, names: Iterable[tuple[str, str]]) -> None:
        """Ask about these runs: their records are those of an earlier daemon, and may be old."""
        self._left.update(dict.fromkeys(names, _TRIES))

    def tick(self) -> None:
        """Ask again about runs for which no member has answered."""
        for name, left in list(self._left.items()):
            if left:
                self._ask_in_turn(name)
            else:
                del self._left[name]

    def refused(self, message: p.PeerMessage) -> None:
        """Ask about the run of a message that was refused: the record here may be old."""
        if isinstance(message, p.TellRun):
            self._ask_in_turn((message.record.job, message.record.run))
        elif isinstance(message, GetHoldings):
            self._ask_in_turn((message.job, message.run))
        # Other messages come after one of these.

    def _ask_in_turn(self, name: tuple[str, str]) -> None:
        """Ask the next few members, at most once every 5 s for each run."""
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
        for card, ask in self._reach(_turn(others, times)) if others else ():
            ask(GetHoldings(*name), partial(self._answered, name, card.node), _ask_others)

    def _answered(self, name: tuple[str, str], node: str, holdings: Holdings) -> None:
        record = holdings.record
        if holdings.node == node and record is not None and (record.job, record.run) == name:
            self._left.pop(name, None)
            self._learn(node, record)


def _turn(cards: Sequence[NodeCard], times: int) -> list[NodeCard]:
    first = times * _AT_A_TIME % len(cards)
    return [*cards[first:], *cards[:first]][:_AT_A_TIME]


def _ask_others(code: str, reason: str) -> None:
    """Do nothing: other members are asked next."""
