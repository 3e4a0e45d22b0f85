"""Whom `ckptctl park` has asked to park, and who has yet to say what came of it.

A trainer hears of it in the answer to its next ping: nothing is ever sent to one that did not ask.
A request ends when everybody has spoken, is gone, or time is out; whoever asked is then answered
once. Time is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ckptd.core.sessions import RankKey
from ckptd.transport.messages import Parks, RankParked

__all__ = ["ParkRequests"]


@dataclass(slots=True)
class _Request:
    number: int
    until_s: float
    answer: Callable[[Parks], None]
    waits_for: set[RankKey]
    heard: dict[RankKey, RankParked] = field(default_factory=dict)


class ParkRequests:
    """All requests that are open."""

    def __init__(self) -> None:
        self._open: list[_Request] = []
        self._last = 0

    def ask(self, ranks: Iterable[RankKey], until_s: float, answer: Callable[[Parks], None]) -> None:
        """Ask these ranks; ``answer`` is called once, at once if there are none."""
        self._last += 1
        self._open.append(_Request(self._last, until_s, answer, set(ranks)))
        self._end_complete()

    def number_for(self, rank: RankKey) -> int:
        """The newest request that this rank has not answered; 0 if there is none."""
        return max((r.number for r in self._open if rank in r.waits_for), default=0)

    def outcome(self, rank: RankKey, number: int, iteration: int, reason: str) -> None:
        """A rank says at which iteration it is parked (-1: not at all, and why). It answers older
        requests, too.
        """
        for request in self._open:
            if request.number <= number:
                self._hear(request, rank, iteration, reason)
        self._end_complete()

    def gone(self, rank: RankKey) -> None:
        """A rank has left; what it parked before is not known here."""
        for request in self._open:
            self._hear(request, rank, -1, "its process ended before it said anything")
        self._end_complete()

    def tick(self, now_s: float) -> None:
        """Answer what waited long enough."""
        for request in self._open:
            if now_s >= request.until_s:
                for rank in list(request.waits_for):
                    why = "no answer: it hangs, or its ckptd knows no parking"
                    self._hear(request, rank, -1, why)
        self._end_complete()

    @staticmethod
    def _hear(request: _Request, rank: RankKey, iteration: int, reason: str) -> None:
        if rank in request.waits_for:
            request.waits_for.discard(rank)
            told = RankParked(rank.job, rank.run, rank.rank, iteration, reason)
            request.heard[rank] = told

    def _end_complete(self) -> None:
        ended = [request for request in self._open if not request.waits_for]
        self._open = [request for request in self._open if request.waits_for]
        for request in ended:
            request.answer(Parks(tuple(request.heard[rank] for rank in sorted(request.heard))))
