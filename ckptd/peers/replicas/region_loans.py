"""Slots that peers may touch through a region: locked while lent, and given back without waiting for anybody.

A loan is LENT → ENDING (peers cannot reach it any more, but one of them may still be writing or
reading a chunk) → over. Only then its slot is unlocked and gets its state. A worker breaks off what
is in our hands, which takes a second at most; the rest (another process in the middle of a copy,
libzmq) is looked at again at each tick: a peer that has stopped holds up neither the loop nor a
worker.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from ckptd.core.slots.ring import SlotState
from ckptd.core.slots.segment_format import set_slot_state
from ckptd.memory.segment_file import Segment
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


@dataclass(slots=True, eq=False)
class _Waiting:
    """What is to be done when nobody touches the slot any more."""

    loan: Loan
    then: Callable[[], None]
    broken_off: bool = False  # a worker has it to do, or has done it


class Lending:
    """All loans of this node that are ending.

    Args:
        settlers: workers that break off what peers do, and do nothing else: making memory must not
            wait behind them.
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
        self._waiting: list[_Waiting] = []

    def quiet(self, loan: Loan, then: Callable[[], None]) -> None:
        """Let nobody reach the slot any more; ``then`` is called when nobody touches it, now or later."""
        if loan.region.revoke():
            then()
            return
        waiting = _Waiting(loan, then)
        self._waiting.append(waiting)
        self._break_off(waiting)

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
        """Look again; begin what found all workers taken."""
        for waiting in list(self._waiting):
            self._look(waiting)
            if not waiting.broken_off and waiting in self._waiting:
                self._break_off(waiting)

    def _break_off(self, waiting: _Waiting) -> None:
        # An error leaves the slot locked and filling until nobody touches it: not written under a reader.
        waiting.broken_off = self._settlers.submit(
            waiting.loan.region.break_off,
            lambda _: self._look(waiting),
            lambda error: self._failed("breaking off a transfer", error),
        )

    def _look(self, waiting: _Waiting) -> None:
        """Go on, once, if nobody touches the slot any more."""
        if waiting in self._waiting and waiting.loan.region.revoke():
            self._waiting.remove(waiting)
            waiting.then()

    def _over(self, loan: Loan, state: SlotState | None) -> None:
        self._ending.discard(loan)
        if state is not None and self._still_here(loan.segment):
            set_slot_state(loan.segment.buffer, loan.segment.geometry, loan.index, state)
        os.close(loan.fd)
