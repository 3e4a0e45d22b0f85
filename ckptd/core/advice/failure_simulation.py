"""A job played through failures that somebody has drawn, or taken from a trace. Pure.

It checks the closed form of `ckptd.core.advice.outlook`, and adds what that leaves out: failures that come
while the job recovers from the last one, which begin the recovery again, and whole iterations and intervals.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from ckptd.core.advice.outlook import PolicyOutlook

__all__ = ["PlayedRun", "RecordedFailures", "mean_ettr", "play", "recorded_failures"]


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


@dataclass(frozen=True, slots=True)
class RecordedFailures:
    """When a job failed, in seconds from the start of a record of that length."""

    failures_s: tuple[float, ...]
    length_s: float

    @property
    def mtbf_s(self) -> float:
        """The mean time between two of them."""
        return self.length_s / len(self.failures_s)


def recorded_failures(text: str) -> RecordedFailures:
    """Read a record: each line has the seconds at which a failure came, ascending; the last line ends it.

    With a second column, after a comma, the number of nodes that are alive from then on: a failure is a line
    on which it is less than before, and the record begins with the first node. Empty lines, and those that
    begin with ``#``, do not count.

    Raises:
        ValueError: a line is none of this, or there is no failure.
    """
    rows: list[tuple[float, ...]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.startswith("#"):
            rows.append(_row(line, number, rows[-1] if rows else None))
    if rows and len(rows[0]) == 2:
        rows = rows[next((n for n, row in enumerate(rows) if row[1] > 0), len(rows)) :]
        found = [after[0] - rows[0][0] for before, after in itertools.pairwise(rows) if after[1] < before[1]]
        length_s = rows[-1][0] - rows[0][0] if rows else 0.0
    else:
        found = [row[0] for row in rows]
        length_s = found[-1] if found else 0.0
    if not found or length_s <= 0:
        raise ValueError("the record has no failure")
    return RecordedFailures(tuple(found), length_s)


def _row(line: str, number: int, before: tuple[float, ...] | None) -> tuple[float, ...]:
    try:
        row = tuple(float(each) for each in line.split(","))
    except ValueError:
        row = ()
    if len(row) not in (1, 2) or (before is not None and len(row) != len(before)):
        raise ValueError(f"line {number}, {line[:40]!r}, is no time in seconds, or time and nodes")
    if not all(each >= 0 and math.isfinite(each) for each in row):
        raise ValueError(f"line {number}, {line[:40]!r}: must be 0 or more")
    if before is not None and row[0] < before[0]:
        raise ValueError(f"line {number}, {line[:40]!r}: is before the line above it")
    return row


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
