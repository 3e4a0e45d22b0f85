"""Slots that peers may touch through a region: locked while lent, and given back without waiting for anybody.

A loan is LENT → ENDING (peers cannot reach it any more, but one of them may still be writing or reading a chunk) → over. Only
then its slot is unlocked and gets its state: a peer that has stopped in the middle of a chunk holds up a worker, never the loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from ckptd.ring import SlotState
from ckptd.segment_format import set_slot_state
from ckptd.segments import Segment
from ckptd.transport.verbs import Region
from ckptd.workers import Workers

__all__ = ["Lending", "Loan"]


@dataclass(slots=True, eq=False)
class Loan:
    """A slot and the region over it; ``fd`` holds the slot's lock."""

    segment: Segment
    index: int
    fd: int
    region: Region


class Lending:
    """All loans of this node that are ending.

    Args:
        settlers: workers that wait for peers, and do nothing else: making memory must not wait behind them.
        still_here: whether a segment has not been removed meanwhile.
        failed: told what did not work, and why.
    """

    def __init__(
        self,
        settlers: Workers,
        *,
        still_here: Callable[[Segment], bool],
        failed: Callable[[str, BaseException], None],
    ) -> None:
        self._settlers, self._still_here, self._failed = settlers, still_here, failed
        self._ending: set[Loan] = set()
        self._postponed: list[tuple[Loan, Callable[[], None]]] = []

    def quiet(self, loan: Loan, then: Callable[[], None]) -> None:
        """Let nobody reach the slot any more; ``then`` is called when nobody touches it, now or later."""
        if loan.region.revoke():
            then()
        else:
            self._wait(loan, then)

    def end(self, loan: Loan, state: SlotState | None) -> None:
        """Give the slot up in this state (None: as it is), and unlock it, as soon as nobody touches it."""
        self._ending.add(loan)
        self.quiet(loan, lambda: self._over(loan, state))

    def abandon(self, loan: Loan, state: SlotState | None) -> None:
        """`end` without a later: who still touches the slot keeps it locked until this process ends."""
        if loan.region.revoke():
            self._over(loan, state)

    def slots_of(self, segment: Segment) -> set[int]:
        """Slots of a segment whose loans are ending."""
        return {loan.index for loan in self._ending if loan.segment is segment}

    def tick(self) -> None:
        """Try again what found all workers taken."""
        postponed, self._postponed = self._postponed, []
        for loan, then in postponed:
            self.quiet(loan, then)

    def _wait(self, loan: Loan, then: Callable[[], None]) -> None:
        def failed(error: BaseException) -> None:
            # The slot stays locked and filling: better lost until the next start than written under a reader.
            self._failed("waiting for the end of a transfer", error)

        if not self._settlers.submit(loan.region.close, lambda _: then(), failed):
            self._postponed.append((loan, then))

    def _over(self, loan: Loan, state: SlotState | None) -> None:
        self._ending.discard(loan)
        if state is not None and self._still_here(loan.segment):
            set_slot_state(loan.segment.buffer, loan.segment.geometry, loan.index, state)
        os.close(loan.fd)
