"""Asking several nodes what they hold of a run; whoever is slow or gone is left out, by name.

Each of them may know of further nodes that took part: these are asked, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ckptd.peers.peer_link import PeerLink
from ckptd.transport.messages import (
    GetHoldings,
    Holdings,
    Member,
    NodeCard,
    RunRecord,
    RunSeen,
)

__all__ = ["RunSurvey"]

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
