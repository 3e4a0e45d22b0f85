"""What `ckptctl audit` found about the steps of this node's runs: marks on slots, events, counts.

The mark is in the slot's header page, so that it lasts as long as the snapshot does. The counts are for the
operator, and end with this process.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ckptd.core.sessions import RankKey
from ckptd.core.slots.segment_format import slot_lock_byte
from ckptd.core.slots.slots import SlotState
from ckptd.event_log import EventLog
from ckptd.memory import locks
from ckptd.memory.segment_file import Segment
from ckptd.transport import messages as m

_RUNS_MAX = 256


@dataclass(slots=True)
class _Counts:
    """The audits of one run."""

    passed: int = 0
    failed: int = 0
    newest: int = -1
    newest_failed: int = -1
    verdict: str = ""
    at_s: float = 0.0


class StepAudits:
    """The audits of all runs. On the daemon's loop thread.

    Args:
        segments: every segment of a run here, replicas included.
    """

    def __init__(self, events: EventLog, *, segments: Callable[[str, str], Iterable[Segment]]) -> None:
        self._events, self._segments = events, segments
        self._runs: OrderedDict[tuple[str, str], _Counts] = OrderedDict()

    def tell(self, told: m.TellAudit, now_s: float) -> m.Done:
        """A step was computed again: mark the snapshots with the bits that it came to."""
        counts = self._runs.setdefault((told.job, told.run), _Counts())
        self._runs.move_to_end((told.job, told.run))
        while len(self._runs) > _RUNS_MAX:
            self._runs.popitem(last=False)
        counts.verdict, counts.at_s = told.verdict, now_s
        key = RankKey(told.job, told.run, min(told.differing, default=0))
        if told.passed:
            counts.passed += 1
            counts.newest = max(counts.newest, told.end)
            marked = self._mark(told)
            text = f"{marked} slots of this node are marked as audited"
            self._events.add("info", "step_audited", f"{told.verdict}; {text}", key)
            return m.Done(text)
        if told.certain:
            counts.failed += 1
            counts.newest_failed = max(counts.newest_failed, told.end)
            self._events.add("error", "audit_failed", told.verdict, key)
        else:
            self._events.add("warning", "audit_unclear", told.verdict, key)
        return m.Done("noted")

    def reports(self, now_s: float) -> tuple[m.RunAudit, ...]:
        """For `ckptctl status`."""
        return tuple(
            m.RunAudit(
                *key,
                counts.passed,
                counts.failed,
                counts.newest,
                counts.newest_failed,
                counts.verdict,
                now_s - counts.at_s,
            )
            for key, counts in sorted(self._runs.items())
        )

    def forget(self, job: str, run: str) -> None:
        """Drop the counts of a run that is over."""
        self._runs.pop((job, run), None)

    def _mark(self, told: m.TellAudit) -> int:
        """Mark the slots here that hold these very snapshots; most may have been overwritten meanwhile."""
        digests = {snapshot.rank: snapshot.header_digest for snapshot in told.snapshots}
        marked = 0
        for segment in self._segments(told.job, told.run):
            if not segment.holds_snapshots:
                continue
            wanted = (SlotState.SEALED, told.end, told.epoch, digests.get(segment.descriptor.rank))
            for index, seen in segment.headers():
                if (seen.state, seen.iteration, seen.epoch, seen.header_digest) != wanted:
                    continue
                with locks.lock_file(segment.path, slot_lock_byte(index), exclusive=False) as taken:
                    if taken and segment.header(index) == seen:
                        segment.mark_audited(index, seen)
                        marked += 1
        return marked
