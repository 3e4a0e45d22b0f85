"""Making memory, and giving it back: the one way in which a segment comes to be on this node.

A plan is admitted or refused, its bytes are promised, a worker builds the file, and it is entered in
the store or the promise is cancelled. Whoever asks hears of it once: of a refusal at once by what
`SegmentMaker.make` returns, of anything later by one of two callbacks, on the daemon's loop thread.

A rank of this node is admitted by what it was promised when it attached, and by what it has. What is
charged to no rank (replicas, rehearsals) gets memory only where that leaves room.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial

from ckptd.core.sessions import RankKey, reject_if_too_large, room_for_replicas
from ckptd.event_log import EventLog
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_store import CannotReserve, Purpose, SegmentPlan, SegmentStore
from ckptd.transport.messages import RefusalCode, Refused
from ckptd.units import format_bytes
from ckptd.workers import Workers

__all__ = ["SegmentMaker"]

logger = logging.getLogger(__name__)


class SegmentMaker:
    """Admits, builds and enters segments of any purpose; gives their memory back.

    Args:
        slow: workers for what touches every page.
    """

    def __init__(
        self,
        store: SegmentStore,
        events: EventLog,
        slow: Workers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._events, self._slow, self._clock = store, events, slow, clock

    def make(
        self,
        plan: SegmentPlan,
        *,
        made: Callable[[Segment], None],
        refused: Callable[[Refused], None],
        what: str = "",
        final: bool = True,
    ) -> Refused | None:
        """Begin to make the segment of a plan; ``made`` or ``refused`` follows later. Or it is
        refused now, and neither does.

        Args:
            what: describes it in the text of a refusal.
            final: whether to tell of a refusal, because less is not asked for afterwards.
        """
        if (refusal := self.refusal(plan, what)) is not None:
            if final:
                self._tell(plan, refusal)
            return refusal
        self._store.promise(plan)
        started = self._slow.submit(
            partial(self._store.build, plan),
            partial(self._built, plan, made),
            partial(self._not_built, plan, refused),
        )
        if not started:
            self._store.cancel(plan)
            return Refused(RefusalCode.IN_USE, "too many segments are being made", "try again")
        return None

    def refusal(self, plan: SegmentPlan, what: str = "") -> Refused | None:
        """Why there is no memory for it; None if there is."""
        facts, memory = self._store.facts(), self._store.memory
        needed = plan.geometry.total_bytes
        if (rank := plan.charged_to) is not None:
            own = sum(fact.total_bytes for fact in facts if fact.key == rank)
            beside = f" beside {format_bytes(own)} that it has" if own else ""
            no = reject_if_too_large(rank, own + needed, what + beside, facts, memory)
            return None if no is None else Refused(no.code, no.message, no.hint)
        free = room_for_replicas(facts, memory)
        if needed <= free:
            return None
        text = (
            f"the replica of {plan.key} needs {format_bytes(needed)}, and of "
            f"{format_bytes(memory.quota_bytes)} here {format_bytes(free)} is free"
            f"{_promised(memory.promised)}"
        )
        return Refused(RefusalCode.QUOTA, text, "raise its CKPTD_MEMORY")

    def give_back(self, segment: Segment) -> None:
        """Unlink and forget a segment now, and let a worker give its pages back."""
        self._store.remove(segment)
        self.close(segment)

    def close(self, segment: Segment) -> None:
        """Let a worker give the pages of a removed segment back: that may take long."""
        self._slow.submit(segment.close, _nothing, partial(self._not_closed, segment.path.name))

    def _built(self, plan: SegmentPlan, made: Callable[[Segment], None], segment: Segment) -> None:
        if plan.purpose is Purpose.RANK:
            segment.detached_at_s = self._clock()  # until its trainer takes the owner lock
        self._store.enter(plan, segment)
        made(segment)

    def _not_built(self, plan: SegmentPlan, refused: Callable[[Refused], None], error: BaseException) -> None:
        self._store.cancel(plan)
        if isinstance(error, CannotReserve):
            refusal = Refused(error.code, error.message, error.hint)
            self._tell(plan, refusal)
        else:
            logger.error("making %s failed", plan.path.name, exc_info=error)
            self._events.add("error", "reserve_failed", f"{plan.key}: {error!r}", plan.charged_to)
            refusal = Refused(RefusalCode.INTERNAL, f"making the segment failed: {error!r}")
        refused(refusal)

    def _tell(self, plan: SegmentPlan, refusal: Refused) -> None:
        if plan.purpose is Purpose.REPLICA:
            self._events.add("warning", "replica_refused", refusal.message, plan.key)
        elif plan.purpose is not Purpose.DRILL:  # a rehearsal's report says it
            kind = f"refused.{refusal.code}"
            self._events.add("warning", kind, refusal.message, plan.charged_to)

    def _not_closed(self, name: str, error: BaseException) -> None:
        logger.error("closing %s failed", name, exc_info=error)
        self._events.add("error", "background_failed", f"closing {name}: {error!r}")


def _promised(promised: Mapping[RankKey, int]) -> str:
    total = sum(promised.values())
    return f" ({format_bytes(total)} is promised to its own ranks)" if total else ""


def _nothing(_: object) -> None:
    """The result is not needed."""
