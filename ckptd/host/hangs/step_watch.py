"""Whether the running step of a trainer hangs, as its host sees it: nothing of it has changed for too long.
Pure.

The deadline is learned from the steps before, or given. It is generous: an evaluation or a save within a step
must not look like a hang. Where one did all the same, and the job comes back to that step, the deadline is
multiplied (``patience``), so that a deadline that is too short costs one restart, and not the job.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

from ckptd.progress_page import StepProgress

_LEAST_DEADLINE_S = 300.0
_MEDIANS = 20
_LONGEST = 3
# The first steps of a life compile, allocate and replay.
_UNTIMED_STEPS = 3
_REMEMBERED = 50


class StepWatch:
    """Watches the steps of a rank over the lives of its trainers.

    Args:
        deadline_s: None: learned; infinite: none.
    Attributes:
        patience: the deadline counts so many times.
        progress: what was seen last.
    """

    def __init__(self, deadline_s: float | None) -> None:
        self._given_s = deadline_s
        self._durations: deque[float] = deque(maxlen=_REMEMBERED)
        self._longest_s = 0.0
        self.patience = 1
        self.begin_life(0.0)

    def begin_life(self, now_s: float) -> None:
        """Another trainer is started."""
        self.progress = StepProgress()
        self._begun_s = self._since_s = self._told_s = now_s

    @property
    def deadline_s(self) -> float:
        """How long nothing of a step may change; infinite: it is not known yet, or there is none."""
        if self.progress.beats <= _UNTIMED_STEPS:
            return math.inf
        if self._given_s is not None:
            return self._given_s * self.patience
        if not self._durations:
            return math.inf
        learned_s = max(_MEDIANS * statistics.median(self._durations), _LONGEST * self._longest_s)
        return max(_LEAST_DEADLINE_S, learned_s) * self.patience

    def idle_s(self, now_s: float) -> float:
        """For how long nothing of the running step has changed; 0: none runs."""
        return now_s - self._since_s if self.progress.running else 0.0

    def look(self, progress: StepProgress, now_s: float) -> bool:
        """What the trainer shows now; returns whether its step is overdue. That is said again only after as
        long again.
        """
        if progress != self.progress:
            self._note(progress, now_s)
            return False
        if not progress.running or now_s - self._told_s < self.deadline_s:
            return False
        self._told_s = now_s
        return True

    def _note(self, progress: StepProgress, now_s: float) -> None:
        begun = progress.beats - self.progress.beats
        if begun > 0:
            if self.progress.running and self.progress.beats >= _UNTIMED_STEPS:
                # Several steps may have begun since the last look.
                each_s = (now_s - self._begun_s) / begun
                self._durations.append(each_s)
                self._longest_s = max(self._longest_s, each_s)
            self._begun_s = now_s
        self.progress = progress
        self._since_s = self._told_s = now_s
