"""A limit for what is uploaded on average: whoever has spent too much waits before the next upload."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["UploadPacer"]


class UploadPacer:
    """At most ``bytes_per_s`` on average over uploads (0: no limit); safe from several threads."""

    def __init__(
        self, bytes_per_s: float, *, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        self._rate, self._clock, self._sleep = bytes_per_s, clock, sleep
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def wait(self) -> None:
        """Until what was spent is paid off."""
        if self._rate > 0:
            with self._lock:
                left_s = self._free_at_s - self._clock()
            if left_s > 0:
                self._sleep(left_s)

    def spend(self, size_bytes: int) -> None:
        """So much was uploaded."""
        if self._rate > 0:
            with self._lock:
                self._free_at_s = max(self._free_at_s, self._clock()) + size_bytes / self._rate
