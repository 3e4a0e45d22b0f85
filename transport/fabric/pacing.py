"""How fast we put: a rate limit shared by all peers of a fabric, and a gate that somebody else may
hold closed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

__all__ = ["Pacer"]

logger = logging.getLogger(__name__)

GATE_POLL_S = 0.002
GATE_HOLD_S = 0.5  # a gate is a hint: whoever forgets to open it costs us this long, not the replica
BURST_S = 0.05


class Pacer:
    """Token bucket and gate; one thread, time is an argument.

    A chunk goes when the bucket is not in debt, and may put it into debt: so chunks larger than the
    burst pass, and the average keeps to the rate.
    """

    def __init__(self, bytes_per_s: float | None = None, gate: Callable[[], bool] | None = None) -> None:
        self._rate: float | None = None
        self._tokens = 0.0
        self._filled_at = 0.0
        self._gate = gate
        self._held_since: float | None = None
        self.set_rate(bytes_per_s)

    def set_rate(self, bytes_per_s: float | None) -> None:
        """None: no limit.

        Raises:
            ValueError: not positive.
        """
        if bytes_per_s is not None and not bytes_per_s > 0:
            raise ValueError(f"a rate is positive, not {bytes_per_s}")
        self._rate = bytes_per_s
        self._tokens = min(self._tokens, 0.0)

    def delay_s(self, now_s: float) -> float:
        """Seconds until the next chunk may go; 0: now."""
        held = self._held_s(now_s)
        if held:
            return held
        rate = self._rate
        if rate is None:
            return 0.0
        filled = self._tokens + rate * max(0.0, now_s - self._filled_at)
        self._tokens = min(filled, rate * BURST_S)
        self._filled_at = now_s
        return 0.0 if self._tokens >= 0 else -self._tokens / rate

    def spend(self, size_bytes: int) -> None:
        """A chunk went."""
        if self._rate is not None:
            self._tokens -= size_bytes

    def _held_s(self, now_s: float) -> float:
        if self._gate is None or self._is_open(self._gate):
            self._held_since = None
            return 0.0
        if self._held_since is None:
            self._held_since = now_s
        return GATE_POLL_S if now_s - self._held_since < GATE_HOLD_S else 0.0

    def _is_open(self, gate: Callable[[], bool]) -> bool:
        try:
            return gate()
        except Exception:  # a user's callback: the loop that carries all transfers must survive it
            logger.exception("the gate failed and is not asked again")
            self._gate = None
            return True
