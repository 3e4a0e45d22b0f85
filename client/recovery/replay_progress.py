"""How far a replay is: which snapshot it has reached, and what may happen next.

`Replay` does what belongs to each event; here is nothing but the order of them. Whether a replay is
*dense* depends on its position alone: one of a single snapshot is from the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from ckptd.core.state_machine import MachineState, Transitions

__all__ = ["TRANSITIONS", "ReplayEvent", "ReplayProgress", "ReplayState"]


class ReplayState(MachineState):
    """How far a replay is."""

    FOUND = "found", "the snapshots are there, verified; nothing is loaded"
    PREPARED = "prepared", "group options and the user's state are those of the oldest snapshot"
    LOADED = "loaded", "so are the tensors; the loop has not begun"
    REPLAYING = "replaying", "the loop runs the iterations between the snapshots"
    DENSE = "dense", "the newest snapshot is reached: every operator is active"
    ABANDONED = "abandoned", "given up; no patch of it is left, and the model may be half restored"


class ReplayEvent(StrEnum):
    """What happens to a replay."""

    LOAD_STATE = "load state"
    LOAD_TENSORS = "load tensors"
    BEGIN = "begin"
    ADVANCE = "advance"
    REACH_END = "reach end"
    ABANDON = "abandon"


TRANSITIONS = Transitions(
    "replay",
    {
        (ReplayState.FOUND, ReplayEvent.LOAD_STATE): ReplayState.PREPARED,
        (ReplayState.PREPARED, ReplayEvent.LOAD_TENSORS): ReplayState.LOADED,
        (ReplayState.LOADED, ReplayEvent.BEGIN): ReplayState.REPLAYING,
        (ReplayState.REPLAYING, ReplayEvent.ADVANCE): ReplayState.REPLAYING,
        (ReplayState.REPLAYING, ReplayEvent.REACH_END): ReplayState.DENSE,
        # The user's program has caught the mismatch, and enters the loop again.
        (ReplayState.ABANDONED, ReplayEvent.ADVANCE): ReplayState.REPLAYING,
        # A failure at any point, the end of the checkpointer, or a verification that is over.
        **{(state, ReplayEvent.ABANDON): ReplayState.ABANDONED for state in ReplayState},
    },
)


class ReplayProgress:
    """The position of a replay among its snapshots.

    Args:
        iterations: of the snapshots, oldest first.
    Attributes:
        position: the number of the snapshot that was reached; 0 until the first boundary.
    """

    def __init__(self, iterations: Sequence[int]) -> None:
        self._iterations = tuple(iterations)
        self.position = 0
        self.state = ReplayState.FOUND

    @property
    def start(self) -> int:
        """The first iteration to run."""
        return self._iterations[0]

    @property
    def end(self) -> int:
        """The iteration from which on the state is dense."""
        return self._iterations[-1]

    @property
    def reached(self) -> int:
        """The boundary up to which everything was replayed; the first iteration where nothing was yet."""
        return self._iterations[self.position]

    @property
    def next_iteration(self) -> int:
        """The boundary that comes next; -1 at the newest snapshot."""
        return -1 if self.at_end else self._iterations[self.position + 1]

    @property
    def begun(self) -> bool:
        """Whether the loop has begun to run it."""
        before = (ReplayState.FOUND, ReplayState.PREPARED, ReplayState.LOADED)
        return self.state not in before

    @property
    def at_end(self) -> bool:
        """Whether the newest snapshot is reached."""
        return self.position == len(self._iterations) - 1

    def on(self, event: ReplayEvent) -> None:
        """Every transition goes through here; who begins at the newest snapshot has reached it."""
        self.state = TRANSITIONS.after(self.state, event, start=self.start, end=self.end)
        if event is ReplayEvent.ADVANCE:
            self.position += 1
        if self.state is ReplayState.REPLAYING and self.at_end:
            self.on(ReplayEvent.REACH_END)

    def validate(self) -> None:
        """The snapshots are in order, and the state is dense at the newest of them."""
        ascending = list(self._iterations)
        assert ascending == sorted({*ascending}), f"not in order: {ascending}"
        if self.state in (ReplayState.REPLAYING, ReplayState.DENSE):
            assert (self.state is ReplayState.DENSE) == self.at_end, f"{self.state} at {self.reached}"
        elif self.state is not ReplayState.ABANDONED:
            assert self.position == 0, f"{self.state} at {self.reached}"
