"""How often a rank's snapshots go to storage (pure; no clock: times are given in).

A checkpoint needs the same iteration on all ranks, and there is no leader. So every rank takes the
iterations that are multiples of its *stride*, and a stride is ``base * 2**j``: the multiples of a
larger one are among those of a smaller one, so ranks that measured different things still meet at
the multiples of the largest, and nobody has to be asked. What a faster rank uploads in between is
never committed and is collected later; that this happens tells it to take longer strides, too.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

__all__ = ["Cadence"]

_MAX_DOUBLINGS = 40
_HEADROOM = 1.25  # uploads shall take at most 1 / 1.25 of the time there is
_SHRINK_AT = 0.4  # a shorter stride must fit so well, or strides would go to and fro
_REMEMBERED = 9
_STRIKES = 2
_FOLLOW = 16  # so many checkpoints a rank keeps the longer stride of the others before it tries its own again


@dataclass(slots=True)
class Cadence:
    """Which iterations are persisted.

    Args:
        every: iterations between checkpoints that the user wants at least (1: as often as can be sustained).
        every_s: seconds between checkpoints that the user wants at least.
    """

    every: int = 1
    every_s: float = 0.0
    _doublings: int = 0
    _followed: int = 0  # the doublings that the other ranks seem to need
    _follow_left: int = 0
    _strikes: int = 0
    _iterations_s: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    _uploads_s: deque[float] = field(default_factory=lambda: deque(maxlen=3))

    def __post_init__(self) -> None:
        if self.every < 1 or self.every_s < 0:
            raise ValueError(f"every {self.every} iterations, {self.every_s} s")

    @property
    def stride(self) -> int:
        """Multiples of it are persisted."""
        return self.every << max(self._doublings, self._followed)

    def due(self, iteration: int) -> bool:
        """Whether the suffix that ends at this iteration shall be persisted."""
        return iteration > 0 and iteration % self.stride == 0

    @property
    def iteration_s(self) -> float:
        """Seconds per iteration; 0 until measured."""
        return median(self._iterations_s) if self._iterations_s else 0.0

    def note_iterations(self, count: int, seconds: float) -> None:
        """``count`` iterations took so long."""
        if count > 0 and seconds > 0:
            self._iterations_s.append(seconds / count)
            self._adapt()

    def note_upload(self, seconds: float) -> None:
        """A checkpoint took so long, from its first byte to its manifest."""
        self._uploads_s.append(max(0.0, seconds))
        self._adapt()

    def note_committed(self, iteration: int) -> None:
        """All ranks have this checkpoint."""
        self._strikes = 0
        if self._follow_left:
            self._follow_left -= 1
            if not self._follow_left:
                self._followed = 0

    def note_left_alone(self, iteration: int) -> None:
        """The others did not persist this iteration, although they had the time."""
        current = max(self._doublings, self._followed)
        if iteration % (self.every << (current + 1)) == 0:
            return  # a longer stride would have taken it, too: their trouble is another
        self._strikes += 1
        if self._strikes >= _STRIKES:
            self._strikes = 0
            self._followed = min(current + 1, _MAX_DOUBLINGS)
            self._follow_left = _FOLLOW

    def _adapt(self) -> None:
        iteration_s = self.iteration_s
        if not iteration_s:
            return
        needed_s = max(self.every_s, _HEADROOM * max(self._uploads_s, default=0.0))
        while self._spacing_s(self._doublings) < needed_s and self._doublings < _MAX_DOUBLINGS:
            self._doublings += 1
        while self._doublings and needed_s <= self._shorter_fits_s():
            self._doublings -= 1

    def _shorter_fits_s(self) -> float:
        """What has to be at least needed for a stride half as long not to be taken."""
        shorter = self._spacing_s(self._doublings - 1)
        # The wish of the user is exact; what is measured varies.
        return shorter if not self._uploads_s else shorter * 2 * _SHRINK_AT

    def _spacing_s(self, doublings: int) -> float:
        return (self.every << doublings) * self.iteration_s
