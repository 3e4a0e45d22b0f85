"""The event `parked`, told by the daemon where a trainer ended before it could.

A trainer seals what it parks by itself, and is in a hurry then: its process may be gone before its
notice is read. What it left lies in its segment. So when a session ends, each state that its
process parked and did not tell of is told once; one that is only filled, when it is sealed. All on
the daemon's loop thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckptd.core.sessions import TrainerSession
from ckptd.core.slots.ring import SlotState
from ckptd.core.slots.segment_format import SlotHeader
from ckptd.event_log import EventLog
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_store import SegmentStore

__all__ = ["ParkEvents"]

_THERE = (SlotState.FILLED, SlotState.SEALED)


@dataclass(frozen=True, slots=True)
class _Left:
    """A parked state that nobody has told of."""

    session: TrainerSession
    segment: Segment
    index: int
    sequence: int


class ParkEvents:
    """Each parked state is told once in the life of a daemon."""

    def __init__(self, store: SegmentStore, events: EventLog) -> None:
        self._store, self._events = store, events
        self._left: list[_Left] = []

    def begun(self, session: TrainerSession, before: TrainerSession | None) -> None:
        """A session begins; ``before``: of the same process, on another connection.

        What lies there already is of an earlier process, which may have had the same number; unless
        this one says that it goes on.
        """
        if before is not None:
            session.parked_told = before.parked_told
        elif not session.wish.held:
            self.heard(session)

    def heard(self, session: TrainerSession) -> None:
        """The trainer tells itself what it has parked; it was sealed before."""
        found = [header.sequence for _, _, header in self._parked_by(session)]
        session.parked_told = max(found, default=session.parked_told)

    def ended(self, session: TrainerSession) -> None:
        """Its trainer is gone, or has left: what it parked since it was heard is told."""
        self._left += [
            _Left(session, segment, index, header.sequence)
            for segment, index, header in self._parked_by(session)
            if header.sequence > session.parked_told
        ]
        self.tick()

    def tick(self) -> None:
        """Tell of what is sealed by now."""
        self._left = [left for left in self._left if self._waits(left)]

    def _waits(self, left: _Left) -> bool:
        if left.segment not in self._store.all_of_rank(left.session.key):
            return False
        header = left.segment.header(left.index)
        if header is None or header.sequence != left.sequence or header.state not in _THERE:
            return False
        if header.state is SlotState.FILLED:
            return True
        text = (
            f"parked at iteration {header.iteration}: process {left.session.pid} ended before it could tell"
        )
        self._events.add("info", "parked", text, left.session.key)
        return False

    def _parked_by(self, session: TrainerSession) -> Iterator[tuple[Segment, int, SlotHeader]]:
        """What this process has parked, and has not overwritten since."""
        for segment in self._store.all_of_rank(session.key):
            if segment.descriptor.kind == "parked":
                for index, header in segment.headers():
                    if header.state in _THERE and header.writer_pid == session.writer_pid:
                        yield segment, index, header
