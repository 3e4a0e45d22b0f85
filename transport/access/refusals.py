"""Refused connections and messages: counted by reason and address, and logged at a bounded rate.

The first refusal of a kind is logged at once. After that there is at most one line in `SUMMARY_S`, with the
numbers since the line before: an attacker who knocks ten thousand times fills no disk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from ckptd.transport.verbs import FabricCounters

logger = logging.getLogger(__name__)

SUMMARY_S = 60.0
FIRST_S = 10.0  # after the first refusal of a kind the first summary comes sooner
MAX_SOURCES = 1024  # addresses with a count of their own; the others share one
MAX_DETAIL = 300
SHOWN = 3
OTHERS = "others"


class RefusalLog:
    """Any thread. ``tell`` gets each line; default: the log."""

    def __init__(
        self,
        counters: FabricCounters,
        tell: Callable[[str], None] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counters = counters
        self._tell = logger.warning if tell is None else tell
        self._clock = clock
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()  # by reason, since the start
        self.sources: Counter[str] = Counter()  # by address, since the start
        self._new: Counter[str] = Counter()
        self._new_sources: Counter[str] = Counter()
        self._logged_at_s = float("-inf")

    def seen(self, what: str, source: str = "") -> None:
        """Refuse a message that is none of ours."""
        with self._lock:
            self._counters.garbage += 1
        self.refused("garbage", source, what)

    def stranger(self, reason: str, source: str, detail: str) -> None:
        """Refuse a connection that did not show who it is, or is not trusted."""
        with self._lock:
            self._counters.unauthenticated += 1
        self.refused(reason, source, detail)

    def refused(self, reason: str, source: str, detail: str) -> None:
        """Count a refusal, and log it if it is the first of its kind."""
        now_s = self._clock()
        with self._lock:
            first = reason not in self.counts
            self.counts[reason] += 1
            self._new[reason] += 1
            if source:
                self._count_source(self.sources, source)
                self._count_source(self._new_sources, source)
            if first:
                self._new[reason] -= 1  # logged below
                self._logged_at_s = max(self._logged_at_s, now_s - SUMMARY_S + FIRST_S)
        if first:
            where = f" from {source}" if source else ""
            self._tell(f"refused{where} ({reason}): {detail[:MAX_DETAIL]}")
        self.flush(now_s)

    def flush(self, now_s: float) -> None:
        """Log the summary if it is due."""
        with self._lock:
            new = +self._new
            if not new or now_s - self._logged_at_s < SUMMARY_S:
                return
            self._logged_at_s = now_s
            sources = self._new_sources.most_common(SHOWN)
            self._new.clear()
            self._new_sources.clear()
        reasons = ", ".join(f"{count} {reason}" for reason, count in new.most_common())
        most = ", ".join(f"{source} ({count})" for source, count in sources)
        where = f"; most from {most}" if most else ""
        self._tell(f"refused since the last such line: {reasons}{where}")

    def shown(self) -> dict[str, int]:
        """Counters for ``ckptctl`` and metrics: by reason, and of the addresses with the most."""
        with self._lock:
            reasons = {f"turned_away.{reason}": count for reason, count in self.counts.items()}
            most = self.sources.most_common(SHOWN)
            return reasons | {f"turned_away_from.{source}": count for source, count in most}

    @staticmethod
    def _count_source(counter: Counter[str], source: str) -> None:
        known = source in counter or len(counter) < MAX_SOURCES
        counter[source if known else OTHERS] += 1


class ForgeryLog:
    """Bytes that somebody between us and a peer changed, repeated or made up. Any thread. ``newest``
    describes the last one.
    """

    def __init__(self, counters: FabricCounters) -> None:
        self.newest = ""
        self._counters = counters
        self._lock = threading.Lock()
        self._logged_at = float("-inf")

    def seen(self, what: str) -> None:
        with self._lock:
            self._counters.forged += 1
            self.newest = what
            now = time.monotonic()
            if now - self._logged_at < FIRST_S:
                return
            self._logged_at = now
        logger.warning("%d streams were forged so far and broken off; now: %s", self._counters.forged, what)
