"""A job played through failures that somebody has drawn, or taken from a trace. Pure.

It checks the closed form of `ckptd.core.advice.outlook`, and adds what that leaves out: failures that come
while the job recovers from the last one, which begin the recovery again, and whole iterations and intervals.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from ckptd.core.advice.outlook import PolicyOutlook

__all__ = ["PlayedRun", "mean_ettr", "play"]


@dataclass(frozen=True, slots=True)
class PlayedRun:
    """The time of a run by what it was spent on, in seconds; together they are its length.

    Attributes:
        useful_s: iterations that count, without their stalls.
        stall_s: of these iterations.
        lost_s: iterations that were done, and lost.
        recovery_s: restarts, loads and replays.
        failures: how many there were.
    """

    useful_s: float
    stall_s: float
    lost_s: float
    recovery_s: float
    failures: int

    @property
    def ettr(self) -> float:
        """The part of the time that counts."""
        total = self.useful_s + self.stall_s + self.lost_s + self.recovery_s
        return self.useful_s / total if total else 1.0


def play(
    outlook: PolicyOutlook, iteration_s: float, failures_s: Iterable[float], length_s: float
) -> PlayedRun:
    """Play a run of that length.

    Args:
        iteration_s: without snapshots.
        failures_s: ascending; those that come after the end do not count.
    """
    step_s = iteration_s + outlook.stall_s
    after_s = outlook.restart_s + outlook.load_s + outlook.replay_s
    done, lost_s, recovery_s, failures = 0, 0.0, 0.0, 0
    failed_s = trains_s = 0.0  # since when the job recovers, and since when it trains
    for failure_s in failures_s:
        if failure_s >= length_s:
            break
        failures += 1
        recovery_s += min(failure_s, trains_s) - failed_s
        if failure_s > trains_s:
            worked_s = failure_s - trains_s
            kept = max(done, _restorable(outlook, done + int(worked_s / step_s), step_s))
            lost_s += worked_s - (kept - done) * step_s
            done = kept
        failed_s, trains_s = failure_s, failure_s + after_s
    recovery_s += min(length_s, trains_s) - failed_s
    worked_s = max(0.0, length_s - trains_s)
    new = int(worked_s / step_s)
    done += new
    lost_s += worked_s - new * step_s
    return PlayedRun(done * iteration_s, done * outlook.stall_s, lost_s, recovery_s, failures)


def mean_ettr(
    outlook: PolicyOutlook, iteration_s: float, drawn: Iterable[Iterable[float]], length_s: float
) -> float:
    """The part of the time that counts, over runs of that length.

    Args:
        drawn: the failures of each run.
    """
    return statistics.fmean(play(outlook, iteration_s, failures_s, length_s).ettr for failures_s in drawn)


def _restorable(outlook: PolicyOutlook, done: int, step_s: float) -> int:
    """The newest iteration to which the job can go back after so many."""
    if outlook.localized:
        return done  # what the lost stage does again is its replay
    choice = outlook.choice
    arrived = max(0, done - round(outlook.lag_s / step_s))
    whole = {"sliding": 1, "aligned": choice.window, "dense": choice.every, "partial": choice.every}[
        choice.policy
    ]
    return arrived // whole * whole
