"""Who hangs: when a rank reports that its step is overdue, all ranks are asked where they are. Pure.

Usually all ranks are overdue, since they wait for the one that hangs. That one is stopped, or has come less
far, or its host does not answer. Who is behind need not be at fault: ranks of a pipeline are in different
stages of a step by design. So the verdict says what was seen. If the rank that reported has gone on
meanwhile, nothing hangs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from ckptd.progress_page import StepStage

_SHOWN = 8
_STAGES = {
    StepStage.TOP: "before its first forward",
    StepStage.FORWARD: "in a forward",
    StepStage.BACKWARD: "after a forward",
    StepStage.UPDATE: "in or after the optimizer's step",
}


class TrainerState(StrEnum):
    """What a host can see of its trainer."""

    IN_STEP = "in_step"
    OUTSIDE = "outside"  # before or after its loop
    ENDED = "ended"
    STOPPED = "stopped"  # by a signal
    TRACED = "traced"  # by a debugger


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """Where a rank is.

    Attributes:
        step: that it began last; -1: none.
    """

    step: int
    stage: StepStage
    state: TrainerState = TrainerState.IN_STEP


class HangInquiry:
    """One inquiry of the coordinator.

    Args:
        rank, at, idle_s, deadline_s: of the report that began it.
    """

    def __init__(self, world_size: int, rank: int, at: Position, *, idle_s: float, deadline_s: float) -> None:
        self._world_size, self._rank, self._at = world_size, rank, at
        self._report = (
            f"step {at.step} of rank {rank} has not gone on for {idle_s:.1f} s (deadline {deadline_s:.1f} s)"
        )
        self._found: dict[int, Position] = {}

    def answer(self, rank: int, position: Position) -> bool:
        """A rank tells where it is; returns whether all have."""
        self._found[rank] = position
        return len(self._found) == self._world_size

    @property
    def step(self) -> int:
        """That has not ended."""
        return self._at.step

    @property
    def settled(self) -> str:
        """Why nothing hangs that a restart would mend; "" if that is not so."""
        now = self._found.get(self._rank, self._at)
        if (now.step, now.stage) != (self._at.step, self._at.stage):
            return f"rank {self._rank} has gone on"
        if traced := self._in_state(TrainerState.TRACED):
            return f"{_ranks(traced)} held by a debugger"
        return ""

    @property
    def silent(self) -> list[int]:
        """Ranks whose hosts have not answered."""
        return [rank for rank in range(self._world_size) if rank not in self._found]

    def verdict(self) -> str:
        """In words: who hangs, as far as is known."""
        return f"{self._report}: {self._seen()}"

    def _seen(self) -> str:
        if self.silent:
            return f"{_ranks(self.silent)} not answered for by a host"
        if stopped := self._in_state(TrainerState.STOPPED):
            return f"{_ranks(stopped)} stopped by a signal"
        if outside := self._in_state(TrainerState.OUTSIDE, TrainerState.ENDED):
            return f"{_ranks(outside)} outside the loop"
        last = min(self._found.values())
        behind = [rank for rank, position in self._found.items() if position == last]
        where = f"in step {last.step} {_STAGES[last.stage]}"
        if len(behind) == self._world_size:
            return f"all ranks are {where}"
        return f"{_ranks(behind)} {where}, and the others have come further"

    def _in_state(self, *states: TrainerState) -> list[int]:
        return sorted(rank for rank, position in self._found.items() if position.state in states)


def _ranks(ranks: Iterable[int]) -> str:
    """``rank 3 is`` or ``ranks 3, 5 are``."""
    found = sorted(ranks)
    if len(found) == 1:
        return f"rank {found[0]} is"
    more = ", …" if len(found) > _SHOWN else ""
    return f"ranks {', '.join(map(str, found[:_SHOWN]))}{more} are"
