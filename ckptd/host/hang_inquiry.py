"""Who hangs: when a rank reports that its step is overdue, all ranks are asked where they are. Pure.

Usually all ranks are overdue, since they wait for the one that hangs. That one is stopped, or has come less
far, or its host does not answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["HangInquiry", "Position", "TrainerState"]

_SHOWN = 8


class TrainerState(StrEnum):
    """What a host can see of its trainer."""

    IN_STEP = "in_step"
    OUTSIDE = "outside"  # before or after its loop
    STOPPED = "stopped"  # by a signal
    TRACED = "traced"  # by a debugger
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank is.

    Attributes:
        step: that it began last; -1: none.
    """

    state: TrainerState
    step: int


class HangInquiry:
    """One inquiry of the coordinator.

    Args:
        rank, step, lasts_s, deadline_s: of the report that began it.
    """

    def __init__(self, world_size: int, *, rank: int, step: int, lasts_s: float, deadline_s: float) -> None:
        self._world_size = world_size
        self.step = step
        self._report = f"rank {rank} is in step {step} for {lasts_s:.1f} s (deadline {deadline_s:.1f} s)"
        self._found: dict[int, Position] = {}

    def answer(self, rank: int, position: Position) -> bool:
        """A rank tells where it is; returns whether all have."""
        self._found[rank] = position
        return len(self._found) == self._world_size

    @property
    def debugged(self) -> list[int]:
        """Ranks that a debugger holds: then nothing hangs that a restart would mend."""
        return self._in_state(TrainerState.TRACED)

    def verdict(self) -> str:
        """In words: who hangs, as far as is known."""
        return f"{self._report}: {self._culprits()}"

    def _culprits(self) -> str:
        if stopped := self._in_state(TrainerState.STOPPED):
            return f"{_ranks(stopped)} stopped by a signal"
        if silent := [rank for rank in range(self._world_size) if rank not in self._found]:
            return f"the {'host' if len(silent) == 1 else 'hosts'} of {_ranks(silent)} silent"
        steps = {r: p.step for r, p in self._found.items() if p.state is TrainerState.IN_STEP}
        last = min(steps.values(), default=self.step)
        behind = [rank for rank, step in steps.items() if step == last]
        if outside := self._in_state(TrainerState.OUTSIDE):
            return f"{_ranks(outside)} outside the loop"
        if len(behind) < len(steps):
            return f"{_ranks(behind)} in step {last} still, and the others are further"
        return f"all ranks are in step {last}, and wait for each other or for something else"

    def _in_state(self, state: TrainerState) -> list[int]:
        return sorted(rank for rank, position in self._found.items() if position.state is state)


def _ranks(ranks: Iterable[int]) -> str:
    """``rank 3 is`` or ``ranks 3, 5 are``."""
    found = sorted(ranks)
    if len(found) == 1:
        return f"rank {found[0]} is"
    more = ", …" if len(found) > _SHOWN else ""
    return f"ranks {', '.join(map(str, found[:_SHOWN]))}{more} are"
