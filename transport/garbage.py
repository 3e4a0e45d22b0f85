"""What arrives and is nothing of ours: counted, and logged now and then."""

from __future__ import annotations

import logging
import threading
import time

from ckptd.transport.verbs import FabricCounters

__all__ = ["ForgeryLog", "GarbageLog"]

logger = logging.getLogger(__name__)

LOG_EVERY_S = 10.0


class GarbageLog:
    """Any thread."""

    def __init__(self, counters: FabricCounters) -> None:
        self._counters = counters
        self._logged_at = float("-inf")

    def seen(self, what: str) -> None:
        self._counters.garbage += 1
        now = time.monotonic()
        if now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            logger.warning(
                "%d messages were not ours so far; now: %s", self._counters.garbage, what
            )


class ForgeryLog:
    """What somebody between us and a peer changed, repeated or made up. Any thread.

    ``newest`` says what the last one was.
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
            if now - self._logged_at < LOG_EVERY_S:
                return
            self._logged_at = now
        logger.warning(
            "%d streams were forged so far and broken off; now: %s", self._counters.forged, what
        )
