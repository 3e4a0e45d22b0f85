"""The chain of snapshots of one rank: whether there is one, and which snapshot the next one follows.

What links back from the newest snapshot is what a replay goes through. The chain *breaks* where the
state no longer follows from the newest snapshot by the steps between them: the next one begins anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ckptd.core.state_machine import MachineState, Transitions

__all__ = ["TRANSITIONS", "ChainEvent", "ChainState", "SnapshotChain", "Taken"]


class ChainState(MachineState):
    """What the top of a step means for the snapshots of a rank."""

    MEASURING = "measuring", "the first steps: nothing is planned, and there is no ring"
    UNCHAINED = "unchained", "the next snapshot follows none"
    CHAINED = "chained", "the next snapshot follows the newest one"
    REFUSED = "refused", "an optimizer keeps what cannot be captured: no snapshot is taken any more"


class ChainEvent(StrEnum):
    """What happens to it."""

    RESUME = "resume"  # after a restore
    PLAN = "plan"  # a ring of another plan is in use
    GROW = "grow"  # another ring of the same plan is
    TAKE = "take"
    REPEAT = "repeat"  # the newest snapshot is taken anew, in the place of the first
    BREAK = "break"  # a boundary after an update was missed, or the state does not follow
    REFUSE = "refuse"


TRANSITIONS = Transitions(
    "recorder",
    {
        (ChainState.MEASURING, ChainEvent.PLAN): ChainState.UNCHAINED,
        (ChainState.MEASURING, ChainEvent.RESUME): ChainState.CHAINED,
        (ChainState.UNCHAINED, ChainEvent.PLAN): ChainState.UNCHAINED,
        (ChainState.UNCHAINED, ChainEvent.GROW): ChainState.UNCHAINED,
        (ChainState.UNCHAINED, ChainEvent.TAKE): ChainState.CHAINED,
        (ChainState.UNCHAINED, ChainEvent.REPEAT): ChainState.CHAINED,
        (ChainState.CHAINED, ChainEvent.PLAN): ChainState.UNCHAINED,
        (ChainState.CHAINED, ChainEvent.GROW): ChainState.CHAINED,
        (ChainState.CHAINED, ChainEvent.TAKE): ChainState.CHAINED,
        (ChainState.CHAINED, ChainEvent.REPEAT): ChainState.CHAINED,
        (ChainState.CHAINED, ChainEvent.BREAK): ChainState.UNCHAINED,
        **{
            (state, ChainEvent.BREAK): state
            for state in (ChainState.MEASURING, ChainState.UNCHAINED, ChainState.REFUSED)
        },
        **{(state, ChainEvent.REFUSE): ChainState.REFUSED for state in ChainState},
    },
)


@dataclass(frozen=True, slots=True)
class Taken:
    """The newest snapshot: its step, its predecessor, and the tape it was given."""

    step: int = -1
    previous: int = -1
    tape: tuple[tuple[str, Any], ...] = ()


class SnapshotChain:
    """One rank's chain.

    Attributes:
        previous: the snapshot that the next one follows; -1: none.
        last: the newest snapshot that was begun in this life.
    """

    def __init__(self) -> None:
        self.state = ChainState.MEASURING
        self.previous = -1
        self.last = Taken()

    @property
    def refused(self) -> bool:
        """Whether no snapshot is taken any more."""
        return self.state is ChainState.REFUSED

    def resume(self, last: int) -> None:
        """Snapshot ``last`` exists, and the state follows from it."""
        self._on(ChainEvent.RESUME, last)

    def use(self, *, other_plan: bool) -> None:
        """Another ring is in use."""
        self._on(ChainEvent.PLAN if other_plan else ChainEvent.GROW, self.previous)

    def take(self, taken: Taken) -> None:
        """A snapshot was begun."""
        self.last = taken
        self._on(ChainEvent.TAKE, taken.step)

    def repeat(self) -> None:
        """The newest snapshot is about to be taken anew: it follows what the first one followed."""
        before = self.last.previous
        self._on(ChainEvent.BREAK if before < 0 else ChainEvent.REPEAT, before)

    def cut(self) -> None:
        """The next snapshot does not follow from the newest one."""
        self._on(ChainEvent.BREAK, -1)

    def refuse(self) -> None:
        """No snapshot is taken any more."""
        self._on(ChainEvent.REFUSE, -1)

    def _on(self, event: ChainEvent, previous: int) -> None:
        """Every transition goes through here."""
        self.state = TRANSITIONS.after(self.state, event, newest=self.last.step)
        self.previous = previous if self.state is ChainState.CHAINED else -1

    def validate(self, *, captures: bool) -> None:
        """A snapshot follows an earlier one or none, and there is a ring from the first plan on.

        Args:
            captures: there is a ring to capture into.
        """
        state = self.state
        assert (state is ChainState.CHAINED) == (self.previous >= 0), f"{state}, {self.previous}"
        assert self.last.previous < self.last.step or self.last.step < 0, self.last
        assert captures == (state is not ChainState.MEASURING) or self.refused, f"{state}, no ring"
