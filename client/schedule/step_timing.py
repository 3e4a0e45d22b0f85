"""How long steps take, and how much of that is ours: fed with clock readings in seconds, decides
nothing (pure).
"""

from __future__ import annotations

import statistics
from collections import deque

__all__ = ["StepTiming"]

_KEPT = 20
# So many readings are enough where more than this share of a step is lost.
_FEW, _SEVERE = 6, 0.3


class StepTiming:
    """Readings of the last steps; ``now_s`` is any monotonic clock."""

    def __init__(self) -> None:
        self.steps = 0
        self.boundary_s = 0.0
        self.wait_s = 0.0
        self.device_s = 0.0
        self._sealing_s = 0.0
        self._top_at = 0.0
        self._prepare_s = 0.0
        self._to_optimizer: deque[float] = deque(maxlen=_KEPT)
        self._iterations: deque[float] = deque(maxlen=_KEPT)
        self._stalls: deque[float] = deque(maxlen=_KEPT)

    def top(self, now_s: float, *, inline_copy_s: float = 0.0) -> float | None:
        """A step begins; returns how long the last one took, None for the first.

        Args:
            inline_copy_s: what the last boundary spent on copying in the training thread.
        """
        last = now_s - self._top_at if self.steps else None
        if last is not None:
            self._iterations.append(last)
            self._stalls.append(inline_copy_s + self.wait_s + self.device_s + self._sealing_s)
        self.steps += 1
        self._top_at = now_s
        self.wait_s = self.device_s = self._sealing_s = self._prepare_s = 0.0
        return last

    def boundary_over(self, now_s: float) -> None:
        """The user's code goes on. Planning and reserving happen once (or after a change) and are
        no step's stall.
        """
        self.boundary_s = now_s - self._top_at - self._prepare_s

    def prepared(self, seconds: float) -> None:
        """So much of this boundary went into planning and reserving."""
        self._prepare_s += seconds

    def waited(self, seconds: float) -> None:
        """The training thread waited for copies."""
        self.wait_s += seconds

    def device_waited(self, seconds: float) -> None:
        """The device waited for copies, while the training thread went on."""
        self.device_s += seconds

    def sealed(self, seconds: float) -> None:
        """So much of this boundary went into sealing what the daemon had not come to."""
        self._sealing_s += seconds

    def optimizer_begins(self, now_s: float) -> None:
        """The first optimizer step of this loop step: until here copies may run unnoticed."""
        self._to_optimizer.append(now_s - self._top_at - self.boundary_s - self.wait_s)

    @property
    def copy_window_s(self) -> float:
        """Median time from the end of the boundary to the optimizer's step."""
        return statistics.median(self._to_optimizer) if self._to_optimizer else 0.0

    @property
    def iteration_s(self) -> float:
        """Median duration of a step."""
        return statistics.median(self._iterations) if self._iterations else 0.0

    @property
    def stall_share(self) -> float:
        """Median share of a step that training waited for snapshots; 0 until enough steps were
        seen, fewer where it is severe.
        """
        if len(self._stalls) < _FEW or not self.iteration_s:
            return 0.0
        share = statistics.median(self._stalls) / self.iteration_s
        return share if len(self._stalls) >= _KEPT or share > _SEVERE else 0.0

    @property
    def stalls_severely(self) -> bool:
        """Whether so much is lost that a remedy must not wait."""
        return self.stall_share > _SEVERE

    def forget_stalls(self) -> None:
        """What was measured under another window says nothing about this one."""
        self._stalls.clear()
