"""Asking several nodes what they hold of a run; whoever is slow or gone is left out, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ckptd.peers.peer_link import PeerLink
from ckptd.transport.messages import GetHoldings, Holdings, Member, NodeCard, RunSeen

__all__ = ["RunSurvey"]


class RunSurvey:
    """Answers once, when everybody has answered or has had the time to.

    Args:
        here: what this node holds.
        others: whom to ask, and for how many seconds to wait.
        members: of the run, as far as this node was told.
    """

    def __init__(
        self,
        question: GetHoldings,
        here: Holdings,
        others: Sequence[tuple[NodeCard, PeerLink, float]],
        answer: Callable[[RunSeen], None],
        members: tuple[Member, ...] = (),
    ) -> None:
        self._found, self._cards = [here], list[NodeCard]()
        self._silent = list[str]()
        self._answer, self._left, self._members = answer, len(others), members
        for card, link, patience_s in others:
            link.ask(
                question,
                Holdings,
                partial(self._told, card),
                partial(self._no_answer, card),
                timeout_s=patience_s,
            )
        if not others:
            self._finish()

    def _told(self, card: NodeCard, holdings: Holdings) -> None:
        if holdings.node != card.node:
            self._no_answer(card, "", "another node is there")
            return
        self._found.append(holdings)
        self._cards.append(card)
        self._one_less()

    def _no_answer(self, card: NodeCard, _code: str, _reason: str) -> None:
        self._silent.append(card.node)
        self._one_less()

    def _one_less(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._finish()

    def _finish(self) -> None:
        seen = RunSeen(
            tuple(self._found), tuple(self._cards), self._members, tuple(sorted(self._silent))
        )
        self._answer(seen)
