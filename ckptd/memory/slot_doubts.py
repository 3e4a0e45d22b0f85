"""Slots that somebody doubts: each is verified out of turn, and remembered until it was.

A doubt is over when its slot was found intact, was quarantined, or holds something else. A slot that
cannot be examined now (its lock is held, the workers are full, there is no descriptor left) is examined
at a later tick. One slot is examined at a time, so that seals need not wait for many, and a slot that
was just examined waits before it is examined again: a peer may doubt as often as it likes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ckptd.core.slots.ring import SlotState
from ckptd.event_log import EventLog
from ckptd.memory.sealer import SealOutcome, SealVerdict, scrub_slot
from ckptd.memory.segment_file import Segment
from ckptd.storage.image import DigestMap
from ckptd.workers import Workers

__all__ = ["Doubt", "SlotDoubts"]

logger = logging.getLogger(__name__)

_PAUSE_S = 10.0  # between two examinations of a slot
_BYTES_PER_S = 64 << 20  # and longer for large ones; verifying is not slower than this

# Has a slot of this node verified soon, if it still holds the snapshot of this sequence.
Doubt = Callable[[Segment, int, int], None]
_Slot = tuple[Segment, int]


@dataclass(slots=True)
class _Doubt:
    """Of what was sealed under ``sequence``; ``told`` once a failure was reported."""

    sequence: int
    told: bool = False


class SlotDoubts:
    """Slots of segments and replicas of this node; all on the daemon's loop thread.

    Args:
        workers: threads that digest; `map_fn`, if given, spreads one image over threads.
        examined: told what became of a slot.
    """

    def __init__(
        self,
        workers: Workers,
        events: EventLog,
        map_fn: DigestMap | None,
        examined: Callable[[Segment, int, SealOutcome], None],
    ) -> None:
        self._workers, self._events, self._map = workers, events, map_fn
        self._tell_examined = examined
        self._now_s = 0.0  # of the last tick
        self._open: dict[_Slot, _Doubt] = {}
        self._rest_until_s: dict[_Slot, float] = {}
        self._examining = False

    def add(self, segment: Segment, index: int, sequence: int) -> None:
        """Verify this slot as soon as possible, if it still holds what has this sequence."""
        self._open[segment, index] = _Doubt(sequence)
        self._next()

    def tick(self, now_s: float) -> None:
        """Examine what could not be examined before."""
        self._now_s = now_s
        rests = self._rest_until_s.items()
        self._rest_until_s = {slot: until_s for slot, until_s in rests if now_s < until_s}
        self._next()

    def _next(self) -> None:
        if self._examining:
            return
        for (segment, index), doubt in list(self._open.items()):
            if not _holds(segment, index, doubt.sequence):
                del self._open[segment, index]
            elif (segment, index) not in self._rest_until_s:
                self._examine(segment, index, doubt)
                return

    def _examine(self, segment: Segment, index: int, doubt: _Doubt) -> None:
        # If the workers are full the next tick tries again.
        self._examining = self._workers.submit(
            partial(scrub_slot, segment, index, doubt.sequence, self._map, strong=True),
            partial(self._examined, segment, index, doubt),
            partial(self._failed, segment, index, doubt),
        )

    def _examined(self, segment: Segment, index: int, doubt: _Doubt, outcome: SealOutcome) -> None:
        self._examining = False
        if outcome.verdict in (SealVerdict.INTACT, SealVerdict.DAMAGED):
            self._rest(segment, index)
            # What was doubted again meanwhile is examined again, after the pause.
            if self._open.get((segment, index)) is doubt:
                del self._open[segment, index]
            self._tell_examined(segment, index, outcome)
        else:  # its lock is held, or it changed in that moment: the next tick looks at it again
            self._rest_until_s[segment, index] = self._now_s
        self._next()

    def _failed(self, segment: Segment, index: int, doubt: _Doubt, error: BaseException) -> None:
        self._examining = False
        if not _is_there(segment):  # it was removed while it waited
            self._next()
            return
        self._rest(segment, index)
        self._events.count("examine_again")
        if not doubt.told:
            doubt.told = True
            text = f"{segment.path.name} slot {index} cannot be examined now, and is later: {error!r}"
            logger.error("%s", text, exc_info=error)
            self._events.add("error", "scrub_failed", text, segment.key)
        self._next()

    def _rest(self, segment: Segment, index: int) -> None:
        pause_s = _PAUSE_S + segment.geometry.slot_bytes / _BYTES_PER_S
        self._rest_until_s[segment, index] = self._now_s + pause_s


def _is_there(segment: Segment) -> bool:
    return segment.fd >= 0 and segment.in_place()


def _holds(segment: Segment, index: int, sequence: int) -> bool:
    """Whether a slot may still hold what is doubted; a header that cannot be read may be half written."""
    if not _is_there(segment):
        return False
    header = segment.header(index)
    return header is None or (header.state, header.sequence) == (SlotState.SEALED, sequence)
