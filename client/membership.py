"""Who takes part in the run, and what their nodes hold: what every rank learns at the start of a recovery."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from ckptd.client.session import Session
from ckptd.held import HeldRecords, from_wire, to_wire
from ckptd.holdings import held_from_segments
from ckptd.transport.messages import Member, NodeCard

__all__ = ["Exchange", "RunView", "agree_that_any", "see_run"]

# Gives what this rank says, gets what every rank said, in the order of ranks. A collective call.
Exchange = Callable[[bytes], list[bytes]]

_NO, _YES = b"n", b"y"


@dataclass(frozen=True, slots=True)
class RunView:
    """The same on every rank."""

    cards: tuple[NodeCard, ...]  # by rank
    held: tuple[HeldRecords, ...]
    idle: tuple[NodeCard, ...] = ()  # nodes that hold something and have no rank now
    clock_s: int = 0  # unix time, as rank 0 has it

    def next_epoch(self, highest: int) -> int:
        """Above every epoch that was seen, and above those that lie on a node that did not answer."""
        return max(1 + highest, self.clock_s)

    @property
    def homes(self) -> dict[int, str]:
        """The node of each rank."""
        return {rank: card.node for rank, card in enumerate(self.cards)}

    @property
    def members(self) -> tuple[Member, ...]:
        """The nodes, in the order of their first ranks."""
        ranks: dict[str, list[int]] = {}
        for rank, card in enumerate(self.cards):
            ranks.setdefault(card.node, []).append(rank)
        working = [Member(self.cards[of[0]], tuple(of)) for of in ranks.values()]
        return (*working, *(Member(card, ()) for card in self.idle))

    @property
    def everybody(self) -> tuple[NodeCard, ...]:
        """How to reach each node."""
        return tuple(member.card for member in self.members)


def see_run(session: Session, job: str, run: str, rank: int, exchange: Exchange) -> RunView:
    """Every rank's node, and what all these nodes hold; one rank per node asks its daemon.

    Raises:
        DaemonUnavailable: this node's daemon is away.
        RemoteProtocolError: a node tells what cannot be.
    """
    told = exchange(msgspec.msgpack.encode(session.card))
    cards = tuple(msgspec.msgpack.decode(card, type=NodeCard) for card in told)
    speaks = min(r for r, card in enumerate(cards) if card.node == session.card.node)
    now_s = int(time.time())
    mine, idle = _Told(now_s, [], []), list[NodeCard]()
    if rank == speaks:
        seen = session.see_run(job, run, tuple(sorted({card.node for card in cards})))
        mine = _Told(
            now_s,
            [msgspec.msgpack.encode(card) for card in seen.cards],
            [to_wire(held_from_segments(h.node, h.segments)) for h in seen.holdings],
        )
    held: dict[tuple[str, str], HeldRecords] = {}
    everybody = [
        msgspec.msgpack.decode(data, type=_Told) for data in exchange(msgspec.msgpack.encode(mine))
    ]
    for theirs in everybody:
        idle += [msgspec.msgpack.decode(card, type=NodeCard) for card in theirs.cards]
        for records in theirs.held:
            held.update({(h.node, h.segment): h for h in from_wire(records)})
    # Several nodes may know of the same idle one.
    apart = {card.node: card for card in idle}
    return RunView(
        cards,
        tuple(held.values()),
        tuple(apart[name] for name in sorted(apart)),
        everybody[0].clock_s,
    )


class _Told(msgspec.Struct, frozen=True):
    """What one rank tells of its node and of idle ones."""

    clock_s: int
    cards: list[bytes]
    held: list[bytes]


def agree_that_any(exchange: Exchange, mine: bool) -> bool:
    """Whether it is so on any rank."""
    return _YES in exchange(_YES if mine else _NO)
