"""When the phases of this process's start end (`ckptd.core.recovery.recovery_phases`).

Within the process the monotonic clock counts. What happened before it is known by its age: the kernel counts
for how long the process has been there, and the daemon for how long it has known of a failure. So nothing
depends on clocks of several nodes, nor on a clock that is set meanwhile.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Self

from ckptd.client.log_lines import get_logger
from ckptd.core.recovery.recovery_phases import RecoveryPhase, RecoveryTrace

logger = get_logger(__name__)

_imported_s = -1.0
# The process that has begun a trace; a forked child is another one.
_traced_in = -1


def note_imported() -> None:
    """The package is imported: called once, at its end."""
    global _imported_s
    _imported_s = time.monotonic()


def _process_age_s() -> float | None:
    """The least age of this process; None: the kernel does not tell.

    It counts starts in hundredths of a second, rounded down. An age that was too high would put the
    start before ends of other processes that came first.
    """
    try:
        stat = Path("/proc/self/stat").read_text(errors="replace")
        ticks = int(stat.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError) as error:
        logger.info("the start of this process is not known: %s", error)
        return None
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - (ticks + 1) / os.sysconf("SC_CLK_TCK"))


class PhaseClock:
    """The trace of one start, which begins now: the program has come to its Checkpointer.

    Only the first one of a process has phases before that. They are not those of a later Checkpointer:
    training lies in between.
    """

    def __init__(self) -> None:
        global _traced_in
        self._trace = RecoveryTrace()
        self._first = _traced_in != os.getpid()
        _traced_in = os.getpid()
        now_s = time.monotonic()
        age_s = _process_age_s() if self._first else None
        if age_s is not None:
            self._trace.note(RecoveryPhase.PROCESS_THERE, now_s - age_s)
            # Otherwise it was forked from a process that had imported it.
            if _imported_s >= now_s - age_s:
                self._trace.note(RecoveryPhase.IMPORTS, _imported_s)
        self._trace.note(RecoveryPhase.PROCESS_GROUPS, now_s)
        self._begun_s = now_s

    @classmethod
    def of_restart(cls, told_s: float) -> Self:
        """The trace of a start within a process.

        Args:
            told_s: when the process heard of the failure (monotonic clock).
        """
        clock = cls()
        clock._trace.note(RecoveryPhase.DETECTED, told_s)
        return clock

    def failed(self, failure_ago_s: float, others_ended_ago_s: float) -> None:
        """What the daemon has just told of the failure before this start; -1: it knows of none."""
        now_s = time.monotonic()
        if self._first and failure_ago_s >= 0.0:
            self._trace.note(RecoveryPhase.DETECTED, self._ended_s(failure_ago_s, now_s))
            if others_ended_ago_s >= 0.0:
                self._trace.note(RecoveryPhase.OTHERS_STOPPED, self._ended_s(others_ended_ago_s, now_s))

    def _ended_s(self, ago_s: float, now_s: float) -> float:
        """The end of a phase of which the daemon tells how long ago it was. The daemon looked between its
        being asked and now: where this process may have been there before or after, it came after.
        """
        earliest_s, latest_s = self._begun_s - ago_s, now_s - ago_s
        there_s = self._trace.ends.get(RecoveryPhase.PROCESS_THERE, latest_s)
        return max(earliest_s, min(latest_s, there_s))

    def reach(self, phase: RecoveryPhase) -> None:
        """The phase ends now; see `RecoveryTrace.reach`."""
        self._trace.reach(phase, time.monotonic())

    @property
    def durations(self) -> dict[RecoveryPhase, float]:
        """Seconds of each phase so far."""
        return self._trace.durations

    def describe(self) -> str:
        """The phases so far, in one line."""
        return self._trace.describe()
