"""A job played through failures that somebody has drawn, or taken from a trace. Pure.

It checks the closed form of `ckptd.core.advice.outlook`, and adds what that leaves out: failures that come
while the job recovers from the last one, which begin the recovery again, and whole iterations and intervals.

Of partial snapshots a failure loses what experts have learnt since they were in a snapshot, but no more than
since the last failure: what that has lost is lost already. Ages of experts are taken to be even, from nothing
to twice their mean (`PolicyOutlook.older_iterations`).
"""

from __future__ import annotations

import heapq
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ckptd.core.advice.outlook import PolicyOutlook


@dataclass(frozen=True, slots=True)
class PlayedRun:
    """The time of a run by what it was spent on, in seconds; together they are its length.

    Attributes:
        useful_s: iterations that count, without their stalls.
        stall_s: of these iterations.
        lost_s: iterations that were done, and lost.
        recovery_s: restarts, loads and replays.
        failures: how many there were, losses of all copies in memory included.
        iterations: that count, and of partial snapshots those of all experts' updates that are lost.
    """

    useful_s: float
    stall_s: float
    lost_s: float
    recovery_s: float
    failures: int
    iterations: int = 0
    lost_updates: float = 0.0

    @property
    def ettr(self) -> float:
        """The part of the time that counts."""
        total = self.useful_s + self.stall_s + self.lost_s + self.recovery_s
        return self.useful_s / total if total else 1.0

    @property
    def lost_share(self) -> float:
        """Of all experts' updates, those that are lost (the PLT, if tokens are even)."""
        return self.lost_updates / self.iterations if self.iterations else 0.0


def play(
    outlook: PolicyOutlook,
    iteration_s: float,
    failures_s: Iterable[float],
    length_s: float,
    losses_s: Iterable[float] = (),
) -> PlayedRun:
    """Play a run of that length.

    Args:
        iteration_s: without snapshots.
        failures_s: ascending; those that come after the end do not count.
        losses_s: the same, of failures that take a state with all of its copies in memory. The job goes back
            to the last durable checkpoint, and without one to its beginning.
    """
    step_s = iteration_s + outlook.stall_s
    done, durable, lost_s, recovery_s, failures = 0, 0, 0.0, 0.0, 0
    failed_s = trains_s = 0.0  # since when the job recovers, and since when it trains
    began = -math.inf  # where the process that trains went on from
    compares = True  # it repeats iterations only to compare
    from_storage = False  # what it recovers from, until it trains
    lost = [(0, 0.0)]  # by recovery, ascending: its iteration, and of all experts' updates those lost so far
    for failure_s, is_loss in _merged(failures_s, losses_s):
        if failure_s >= length_s:
            break
        failures += 1
        recovery_s += min(failure_s, trains_s) - failed_s
        worked_s = max(0.0, failure_s - trains_s)
        reached = done + int(worked_s / step_s)
        durable = max(durable, _stored(outlook, reached, step_s))
        kept = durable if is_loss else max(done, _restorable(outlook, done, worked_s, step_s))
        lost_s += worked_s - (kept - done) * step_s
        if kept > began:
            compares = kept - began >= 2 * outlook.choice.every
        # A history that is abandoned takes its checkpoints along, and what it had lost.
        while lost[-1][0] > kept:
            lost.pop()
        last, before = lost[-1]
        lost.append((kept, before + _older_iterations(outlook, kept - last, is_loss=is_loss)))
        done, durable, began = kept, min(durable, kept), kept
        # A failure while a recovery loads from storage leaves it nothing but storage.
        from_storage = is_loss or (from_storage and not worked_s)
        failed_s = failure_s
        trains_s = failure_s + _recovers_s(outlook, from_storage=from_storage, compares=compares)
    recovery_s += min(length_s, trains_s) - failed_s
    worked_s = max(0.0, length_s - trains_s)
    new = int(worked_s / step_s)
    done += new
    lost_s += worked_s - new * step_s
    useful_s, stall_s = done * iteration_s, done * outlook.stall_s
    return PlayedRun(useful_s, stall_s, lost_s, recovery_s, failures, done, lost[-1][1])


@dataclass(frozen=True, slots=True)
class RecordedFailures:
    """When a job failed, in seconds from the start of a record of that length."""

    failures_s: tuple[float, ...]
    length_s: float

    @property
    def mtbf_s(self) -> float:
        """The mean time between two of them."""
        return self.length_s / len(self.failures_s)


def recorded_failures(text: str, unit_s: float = 1.0) -> RecordedFailures:
    """Read a record: each line has the time at which a failure came, ascending; the last line ends it.

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
    return RecordedFailures(tuple(each * unit_s for each in found), length_s * unit_s)


def _row(line: str, number: int, before: tuple[float, ...] | None) -> tuple[float, ...]:
    try:
        row = tuple(float(each) for each in line.split(","))
    except ValueError:
        row = ()
    if len(row) not in (1, 2) or (before is not None and len(row) != len(before)):
        raise ValueError(f"line {number}, {line[:40]!r}, is no time, or time and nodes")
    if not all(each >= 0 and math.isfinite(each) for each in row):
        raise ValueError(f"line {number}, {line[:40]!r}: must be 0 or more")
    if before is not None and row[0] < before[0]:
        raise ValueError(f"line {number}, {line[:40]!r}: is before the line above it")
    return row


def mean_shares(
    outlook: PolicyOutlook,
    iteration_s: float,
    drawn: Iterable[Iterable[float]],
    length_s: float,
    losses_s: Iterable[Iterable[float]] | None = None,
) -> tuple[float, float]:
    """The part of the time that counts, and of all experts' updates the part that is lost, over runs of that
    length.

    Args:
        drawn: the failures of each run.
        losses_s: as of `play`, of each run; None: there are none.
    """
    runs = zip(drawn, itertools.repeat(()) if losses_s is None else losses_s, strict=False)
    played = [play(outlook, iteration_s, failures_s, length_s, lost) for failures_s, lost in runs]
    return statistics.fmean(run.ettr for run in played), statistics.fmean(run.lost_share for run in played)


def _merged(failures_s: Iterable[float], losses_s: Iterable[float]) -> Iterator[tuple[float, bool]]:
    """In the order of time, each with whether it is a loss."""
    return heapq.merge(((each, False) for each in failures_s), ((each, True) for each in losses_s))


def _recovers_s(outlook: PolicyOutlook, *, from_storage: bool, compares: bool) -> float:
    """From a failure until the job trains.

    A snapshot that has everything is replayed to only for comparison, from an older one of the same process.
    The first one of a process has none.
    """
    found = outlook.storage
    if found is not None and from_storage:
        return outlook.restart_s + found.load_s + found.replay_s
    whole = outlook.choice.window == 1 and not outlook.localized
    return outlook.restart_s + outlook.load_s + (0.0 if whole and not compares else outlook.replay_s)


def _older_iterations(outlook: PolicyOutlook, since: int, *, is_loss: bool) -> float:
    """The mean of what experts lose, in iterations, of the last ``since``: of no age more than there are."""
    stored = outlook.storage.lost_iterations if outlook.storage and is_loss else 0.0
    mean = max(outlook.older_iterations, stored)
    return mean if since >= 2 * mean else since - since * since / (4 * mean)


def _stored(outlook: PolicyOutlook, reached: int, step_s: float) -> int:
    """The newest durable checkpoint after so many iterations without an interruption."""
    found = outlook.storage
    if found is None:
        return 0
    return max(0, reached - math.ceil(found.upload_s / step_s)) // found.every * found.every


def _restorable(outlook: PolicyOutlook, done: int, worked_s: float, step_s: float) -> int:
    """The newest iteration to which the job can go back after so many, and so many seconds more."""
    if outlook.localized:
        return done + int(worked_s / step_s)  # what the lost stage does again is its replay
    choice = outlook.choice
    arrived = max(0, done + math.floor((worked_s - outlook.lag_s) / step_s))
    whole = {"sliding": 1, "aligned": choice.window}.get(choice.policy, choice.every)
    return arrived // whole * whole
