"""Which phase an iteration has: a function of the iteration and of what the ranks have agreed on,
and of nothing else (pure).

A rank that counted its own snapshots, or its own boundaries, would be shifted against the others
for good by whatever happens to it alone: a snapshot that failed, a step that its loss scaler
skipped, gradients that it still holds. Where ranks must be in the same phases, phases therefore
follow from the number of the iteration.

Where gradients are accumulated over several iterations of the loop, only every ``stride``-th
boundary can have a snapshot; those boundaries must not all fall on the same few phases, so
iterations are counted in strides. An accumulation that is irregular once repeats or skips a phase;
the next window has all of them again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

__all__ = ["Calendar", "Strides"]

Phases = tuple[tuple[int, ...], ...]

_SEEN = 8


@dataclass(frozen=True, slots=True)
class Calendar:
    """Phase 0 begins at iteration ``base``, each phase lasts ``stride`` iterations.

    ``orders``: the schedules that follow one another, one at each window's beginning from iteration
    ``since`` on; the last one stays.
    Empty: the schedule stays as it is.
    """

    base: int = 0
    stride: int = 1
    orders: tuple[Phases, ...] = ()
    since: int = 0

    def ordinal(self, iteration: int) -> int:
        """Which snapshot of the schedule this is; its phase is the remainder by the window."""
        return (iteration - self.base) // self.stride

    def phases(self, iteration: int, window: int) -> Phases | None:
        """The schedule that counts at ``iteration``; None: the one from before ``orders``."""
        if not self.orders:
            return None
        first_whole = -(-(self.since - self.base) // self.stride)
        begun = self.ordinal(iteration) // window - -(-first_whole // window)
        return None if begun < 0 else self.orders[min(begun, len(self.orders) - 1)]

    def from_here(self, iteration: int, *, phase: int = 0, stride: int = 0) -> Calendar:
        """Begin anew: ``iteration`` has this phase."""
        stride = stride or self.stride
        return Calendar(iteration - phase * stride, stride)

    def ordered(self, orders: tuple[Phases, ...], since: int) -> Calendar:
        """Go on with these schedules, from the first window that begins at ``since`` or later."""
        return replace(self, orders=orders, since=since)


class Strides:
    """How many iterations lie between clean boundaries: what was seen lately."""

    def __init__(self) -> None:
        self._last = -1
        self._seen: deque[int] = deque(maxlen=_SEEN)

    def note(self, iteration: int) -> None:
        """This boundary is clean."""
        if 0 <= self._last < iteration:
            self._seen.append(iteration - self._last)
        self._last = iteration

    def forget(self) -> None:
        """What comes next does not follow on what was seen."""
        self._last = -1
        self._seen.clear()

    @property
    def shortest(self) -> int:
        """The shortest seen; 1 if nothing was."""
        return min(self._seen, default=1)

    def settled(self) -> int:
        """The one that is seen now, each time; 0 if they differ, or too few were seen."""
        same = len(self._seen) == _SEEN and len(set(self._seen)) == 1
        return self._seen[0] if same else 0
