"""What happened on this node: a bounded, numbered log for `ckptctl events`."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from itertools import islice

from ckptd.core.sessions import RankKey
from ckptd.printable import one_line
from ckptd.transport.messages import EventInfo, Events

logger = logging.getLogger(__name__)

_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_MAX_MESSAGE = 4096
_MAX_KINDS = 256  # that trainers name, and as many that peers do; the table of counters stays small


class EventLog:
    """The newest events, each also written to the log. On the daemon's loop thread.

    Attributes:
        last_seq: the number of the newest one.
    """

    def __init__(self, limit: int) -> None:
        self._events: deque[EventInfo] = deque(maxlen=limit)
        self.last_seq = 0
        self.counters: Counter[str] = Counter()
        self._of_trainers: set[str] = set()
        self._of_peers: set[str] = set()

    def add(
        self,
        level: str,
        kind: str,
        message: str,
        key: RankKey | None = None,
        *,
        by_trainer: bool = False,
    ) -> None:
        """Record one event, made safe to print; level is info, warning or error.

        Args:
            by_trainer: a trainer chose the kind. Of these only so many are counted by name.
        """
        kind, message = one_line(kind), one_line(message)
        self.last_seq += 1
        self._events.append(
            EventInfo(
                seq=self.last_seq,
                time_ns=time.time_ns(),
                level=level,
                kind=kind,
                message=message[:_MAX_MESSAGE],
                job=key.job if key else "",
                run=key.run if key else "",
                rank=key.rank if key else -1,
            )
        )
        self.count(f"event.{kind}" if not by_trainer or _is_known(kind, self._of_trainers) else "other")
        logger.log(_LEVELS[level], "%s: %s", kind, message)

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter without recording an event."""
        self.counters[name] += amount

    def count_refusal(self, what: str, code: str) -> None:
        """Count what a peer refused, by its code. A peer may name any: only so many are counted by name."""
        name = one_line(f"{what}.{code}")
        self.count(name if _is_known(name, self._of_peers) else f"{what}.other")

    def page(self, since: int, limit: int, sees: Callable[[str], bool] | None = None) -> Events:
        """Events with `seq` above `since`, oldest first, at most ``limit``.

        Args:
            sees: leaves out events of other jobs than those for which it is true.
        """
        first = self._events[0].seq if self._events else self.last_seq + 1
        skip = max(0, since + 1 - first)
        found = islice(self._events, skip, None)
        wanted = found if sees is None else (event for event in found if sees(event.job))
        return Events(events=tuple(islice(wanted, limit)), first_seq=first, last_seq=self.last_seq)


def _is_known(kind: str, known: set[str]) -> bool:
    if len(known) < _MAX_KINDS:
        known.add(kind)
    return kind in known
