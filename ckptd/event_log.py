"""What happened on this node: a bounded, numbered log for `ckptctl events`."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque

from ckptd.core.sessions import RankKey
from ckptd.printable import one_line
from ckptd.transport.messages import EventInfo, Events

__all__ = ["EventLog"]

logger = logging.getLogger(__name__)

_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_MAX_MESSAGE = 4096
_MAX_KINDS = 256  # trainers may name kinds of their own; the table of counters stays small


class EventLog:
    """The newest events, each also written to the log. On the daemon's loop thread."""

    def __init__(self, limit: int) -> None:
        self._events: deque[EventInfo] = deque(maxlen=limit)
        self._last_seq = 0
        self.counters: Counter[str] = Counter()

    def add(self, level: str, kind: str, message: str, key: RankKey | None = None) -> None:
        """Record one event, made safe to print; level is info, warning or error."""
        kind, message = one_line(kind), one_line(message)
        self._last_seq += 1
        self._events.append(
            EventInfo(
                seq=self._last_seq,
                time_ns=time.time_ns(),
                level=level,
                kind=kind,
                message=message[:_MAX_MESSAGE],
                job=key.job if key else "",
                run=key.run if key else "",
                rank=key.rank if key else -1,
            )
        )
        self.count(f"event.{kind}")
        logger.log(_LEVELS[level], "%s: %s", kind, message)

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter without recording an event."""
        if name not in self.counters and len(self.counters) >= _MAX_KINDS:
            name = "other"
        self.counters[name] += amount

    def page(self, since: int, limit: int) -> Events:
        """Events with `seq` above `since`, oldest first."""
        first = self._events[0].seq if self._events else self._last_seq + 1
        skip = max(0, since + 1 - first)
        found = [self._events[i] for i in range(skip, min(skip + limit, len(self._events)))]
        return Events(events=tuple(found), first_seq=first, last_seq=self._last_seq)
