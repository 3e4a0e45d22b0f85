"""A training job on nodes that come and go: discrete events, no clock, no randomness.

The job is in one of three modes: it *trains* (iterations pass at an even rate), it *pauses* (to
recover, or to be placed anew), or it *halts* (there is nothing to train on). A strategy is asked at
every change of the nodes and whenever it wanted to be woken; what it answers starts another pause,
a halt, or nothing.

- An iteration that is cut off is lost. A switch says from which iteration the job goes on: at most
  as many as were completed.
- Iterations count as *useful* the first time they are completed; *computed* are all, also those
  that are repeated or cut off.
- A change during a pause is a new question: the pause that was begun is over, and what it was for
  is not in place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from bench.spot.trace import Membership

__all__ = ["Halt", "Mode", "Period", "Result", "Strategy", "Switch", "View", "simulate"]

_ROUNDING = 1e-9  # of an iteration: what sums of times may be off


class Mode(StrEnum):
    """What the job does."""

    TRAIN = "train"
    PAUSE = "pause"
    HALT = "halt"


@dataclass(frozen=True, slots=True)
class View:
    """What a strategy may know.

    Args:
        alive: after the change.
        lost, came: with it; both empty when the strategy is woken.
        completed: iterations that the job has, or will have as soon as the pause is over.
        mode: before the change.
        ready_s: when the pause is over that is going on; else now.
    """

    now_s: float
    alive: frozenset[int]
    lost: frozenset[int]
    came: tuple[int, ...]
    completed: int
    mode: Mode
    ready_s: float


@dataclass(frozen=True, slots=True)
class Switch:
    """Pause, and go on from iteration ``resume`` at another speed.

    Args:
        nodes: how many train then.
        iteration_s: of one iteration, with all that interrupts training regularly.
    """

    pause_s: float
    resume: int
    nodes: int
    iteration_s: float
    why: str


@dataclass(frozen=True, slots=True)
class Halt:
    """Stop until asked again."""

    why: str


class Strategy(Protocol):
    """How a job reacts."""

    def react(self, view: View) -> Switch | Halt | None:
        """Answer a change; None: go on as before."""

    def settled(self, now_s: float) -> None:
        """The pause of the last switch is over, and training goes on as it said."""

    def wake_s(self) -> float:
        """When to be asked next, if nothing happens before; infinite: never."""


@dataclass(frozen=True, slots=True)
class Period:
    """A time in one mode.

    Args:
        used: nodes that train.
        first, last: iterations completed at its begin and end; ``last`` is whole but for what was cut off.
        useful: iterations completed in it for the first time; the last ones of it.
        useful_until_s: when the last of these was complete.
    """

    start_s: float
    end_s: float
    mode: Mode
    used: int
    first: int
    last: float
    useful: int
    useful_until_s: float
    iteration_s: float
    why: str

    def useful_between(self, start_s: float, end_s: float) -> float:
        """Useful iterations within a time, spread evenly over those in which they were computed."""
        if not self.useful:
            return 0.0
        begun_s = self.useful_until_s - self.useful * self.iteration_s
        inside = min(end_s, self.useful_until_s) - max(start_s, begun_s)
        return max(0.0, inside) / self.iteration_s


@dataclass(frozen=True, slots=True)
class Result:
    """What came of it: periods without a gap from the first change to the end of the trace."""

    periods: tuple[Period, ...]

    @property
    def useful(self) -> int:
        """Iterations that the job has at the most."""
        return sum(period.useful for period in self.periods)

    @property
    def computed(self) -> float:
        """Iterations that were computed, repeated and cut-off ones, too."""
        return sum(period.last - period.first for period in self.periods)

    def seconds(self, mode: Mode) -> float:
        """Time in a mode."""
        return sum(p.end_s - p.start_s for p in self.periods if p.mode is mode)

    def useful_between(self, start_s: float, end_s: float) -> float:
        """Useful iterations within a time."""
        return sum(period.useful_between(start_s, end_s) for period in self.periods)


def simulate(events: Sequence[Membership], end_s: float, strategy: Strategy) -> Result:
    """Run a job from the first event to ``end_s``.

    Raises:
        ValueError: events out of order or behind the end; a node that comes twice, or goes without having been there; a switch that
            resumes behind what was completed, takes less than no time or trains at no speed.
    """
    job = _Job(strategy, events[0].at_s if events else end_s)
    for event in events:
        if not job.now_s <= event.at_s <= end_s:
            raise ValueError(f"an event at {event.at_s:g} s, after {job.now_s:g} and until {end_s:g} s")
        job.wake_until(event.at_s)
        job.change(event)
    job.wake_until(end_s)
    job.advance(end_s)
    job.close("the trace ends")
    return Result(tuple(job.periods))


class _Job:
    def __init__(self, strategy: Strategy, start_s: float) -> None:
        self._strategy = strategy
        self.now_s = self._since_s = self._ready_s = start_s
        self._mode, self._why = Mode.HALT, "no node yet"
        self._alive: set[int] = set()
        self._gone: set[int] = set()
        self._position = 0  # completed when the present mode began, or will be when the pause is over
        self._high = 0
        self._switch: Switch | None = None
        self.periods: list[Period] = []

    def wake_until(self, until_s: float) -> None:
        """Let time pass, with all that the strategy wants to be woken for."""
        while (wake_s := max(self._strategy.wake_s(), self.now_s)) < until_s:
            self.advance(wake_s)
            self._ask(frozenset(), ())
            if self._strategy.wake_s() <= wake_s:
                raise ValueError(f"a strategy that was woken at {wake_s:g} s wants to be woken then again")
        self.advance(until_s)

    def advance(self, to_s: float) -> None:
        if self._mode is Mode.PAUSE and self._ready_s <= to_s:
            self.now_s = self._ready_s
            self.close(self._why)
            self._mode = Mode.TRAIN
            self._strategy.settled(self.now_s)
        self.now_s = to_s

    def change(self, event: Membership) -> None:
        if event.lost - self._alive or (set(event.came) & (self._alive | self._gone)):
            raise ValueError(f"{event}: nodes go that are not there, or come twice")
        self._alive = (self._alive - event.lost) | set(event.came)
        self._gone |= event.lost
        self._ask(event.lost, event.came)

    def _ask(self, lost: frozenset[int], came: tuple[int, ...]) -> None:
        ready_s = self._ready_s if self._mode is Mode.PAUSE else self.now_s
        completed = self._completed()
        view = View(self.now_s, frozenset(self._alive), lost, came, completed, self._mode, ready_s)
        answer = self._strategy.react(view)
        if answer is None:
            return
        self.close(answer.why)
        self._why = answer.why
        if isinstance(answer, Halt):
            self._mode, self._switch, self._position = Mode.HALT, None, completed
            return
        if not (0 <= answer.resume <= completed and answer.pause_s >= 0 and answer.iteration_s > 0):
            raise ValueError(f"{answer} with {completed} iterations completed")
        self._mode, self._switch, self._position = Mode.PAUSE, answer, answer.resume
        self._ready_s = self.now_s + answer.pause_s

    def _reached(self) -> float:
        if self._mode is not Mode.TRAIN or self._switch is None:
            return float(self._position)
        return self._position + (self.now_s - self._since_s) / self._switch.iteration_s

    def _completed(self) -> int:
        return math.floor(self._reached() + _ROUNDING)

    def close(self, why: str) -> None:
        """End the present period."""
        if self.now_s <= self._since_s:
            return
        switch, first, reached, done = (
            self._switch,
            self._position,
            self._reached(),
            self._completed(),
        )
        train = self._mode is Mode.TRAIN and switch is not None
        useful = max(0, done - max(first, self._high)) if train else 0
        iteration_s = switch.iteration_s if switch is not None and train else 0.0
        self.periods.append(
            Period(
                self._since_s,
                self.now_s,
                self._mode,
                switch.nodes if switch is not None and train else 0,
                first,
                max(reached, done) if train else first,
                useful,
                self._since_s + (done - first) * iteration_s,
                iteration_s,
                self._why if self._mode is not Mode.TRAIN else why,
            )
        )
        self._high = max(self._high, done)
        self._since_s = self.now_s
