"""A node that was away asks the members that it knows who takes part in a run now: when it is back,
and when somebody else acts on the run.

The one that speaks for a new epoch may be a node of which this one has never heard, or which has
never heard of this one. Its word is not enough: whoever has a trusted key could say that it speaks.
A member that both know can tell, and what it tells is believed as if it had come by itself
(`TellRun`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ckptd.peers import survey
from ckptd.transport import peer_messages as p
from ckptd.transport.messages import GetHoldings, Holdings, NodeCard, RunRecord

__all__ = ["RecordUpdates"]

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
        reach: survey.Reach,
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
