"""Who hangs: when a rank reports that its step is overdue, all ranks are asked where they are. Pure.

Usually all ranks are overdue, since they wait for the one that hangs. That one is stopped, or has come less
far, or its host does not answer. Who is behind need not be at fault: ranks of a pipeline are in different
stages of a step by design. So the verdict says what was seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from ckptd.progress_page import StepStage

__all__ = ["HangInquiry", "Position", "TrainerState"]

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
    STOPPED = "stopped"  # by a signal
    TRACED = "traced"  # by a debugger
    ENDED = "ended"


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
        rank, step, idle_s, deadline_s: of the report that began it.
    """

    def __init__(self, world_size: int, *, rank: int, step: int, idle_s: float, deadline_s: float) -> None:
        self._world_size = world_size
        self.step = step
        self._report = (
            f"step {step} of rank {rank} has not gone on for {idle_s:.1f} s (deadline {deadline_s:.1f} s)"
        )
        self._found: dict[int, Position] = {}

    def answer(self, rank: int, position: Position) -> bool:
        """A rank tells where it is; returns whether all have."""
        self._found[rank] = position
        return len(self._found) == self._world_size

    @property
    def debugged(self) -> list[int]:
        """Ranks that a debugger holds: then nothing hangs that a restart would mend."""
        return self._in_state(TrainerState.TRACED)

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
        if outside := self._in_state(TrainerState.OUTSIDE):
            return f"{_ranks(outside)} outside the loop"
        stepping = {r: p for r, p in self._found.items() if p.state is TrainerState.IN_STEP}
        last = min(stepping.values(), default=None)
        if last is None:
            return "no trainer is in a step any more"
        behind = [rank for rank, position in stepping.items() if position == last]
        where = f"in step {last.step} {_STAGES[last.stage]}"
        if len(behind) == len(stepping):
            return f"all ranks are {where}"
        return f"{_ranks(behind)} {where}, and the others have come further"

    def _in_state(self, state: TrainerState) -> list[int]:
        return sorted(rank for rank, position in self._found.items() if position.state is state)


def _ranks(ranks: Iterable[int]) -> str:
    """``rank 3 is`` or ``ranks 3, 5 are``."""
    found = sorted(ranks)
    if len(found) == 1:
        return f"rank {found[0]} is"
    more = ", …" if len(found) > _SHOWN else ""
    return f"ranks {', '.join(map(str, found[:_SHOWN]))}{more} are"
