"""The transfers to one peer: whose turn it is, and which have ended but wait for an engine to let
go of their buffer.

All on the fabric's thread.
"""

from __future__ import annotations

from collections import deque

from ckptd.transport.fabric.chunks import ChunkedTransfer
from ckptd.transport.verbs import Fault

__all__ = ["DRAIN_POLL_S", "Transfers"]

DRAIN_POLL_S = 0.001
DRAIN_GRACE_S = 0.5  # then the connections that still hold a buffer are broken off


class Transfers:
    """RUNNING ones take turns; those that have ended are DRAINING until their buffer is free, and
    complete then.
    """

    def __init__(self) -> None:
        self._running: deque[ChunkedTransfer] = deque()
        self._draining: list[ChunkedTransfer] = []

    @property
    def draining(self) -> bool:
        return bool(self._draining)

    @property
    def some_ended(self) -> bool:
        """Whether `settle` has something to do."""
        return any(transfer.outcome is not None for transfer in self._running)

    def add(self, transfer: ChunkedTransfer) -> None:
        self._running.append(transfer)

    def end(self, fault: Fault, detail: str) -> None:
        for transfer in self._running:
            transfer.end(fault, detail)

    def expire(self, now_s: float, detail: str) -> None:
        for transfer in self._running:
            if transfer.outcome is None and now_s >= transfer.deadline_at:
                transfer.end(Fault.DEADLINE, f"not complete in time; {detail}")

    def due_s(self, now_s: float) -> float:
        """Seconds until the first deadline."""
        return min((t.deadline_at for t in self._running), default=float("inf")) - now_s

    def settle(self, now_s: float) -> bool:
        """Complete what has ended and is free; whether connections must be broken off to free the rest."""
        if self.some_ended:
            self._draining += [t for t in self._running if t.outcome is not None]
            self._running = deque(t for t in self._running if t.outcome is None)
        waiting: list[ChunkedTransfer] = []
        for transfer in self._draining:
            if transfer.is_free():
                transfer.complete()
            else:
                waiting.append(transfer)
        self._draining = waiting
        stuck = [t for t in waiting if not t.broken_off and now_s - t.ended_at > DRAIN_GRACE_S]
        for transfer in stuck:
            transfer.broken_off = True
        return bool(stuck)

    def complete_all(self) -> None:
        """The end, whatever the engine still holds."""
        draining, self._draining = self._draining, []
        for transfer in draining:
            transfer.complete()

    # --- turns ---

    def next(self) -> ChunkedTransfer | None:
        """The one whose turn it is, of those with chunks to send."""
        for _ in range(len(self._running)):
            if self._running[0].has_more:
                return self._running[0]
            self._running.rotate(-1)
        return None

    def next_get(self) -> ChunkedTransfer | None:
        """Puts wait; the turn goes to a get, if one has chunks to ask for."""
        for _ in range(len(self._running)):
            self._running.rotate(-1)
            if self._running[0].has_more and not self._running[0].is_put:
                return self._running[0]
        return None

    def turn(self) -> None:
        """The one whose turn it was has sent a chunk."""
        self._running.rotate(-1)
