"""When to try again, and when to leave a store in peace. Pure: time is an argument, chance a `random.Random`.

The circuit::

    CLOSED ──`threshold` failures in a row──► OPEN ──`open_s` later──► HALF_OPEN (one call is let through)
       ▲                                        ▲                          │
       │                                        └──────── it fails ────────┤
       └───────────────────────────────────── it succeeds ─────────────────┘
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Backoff", "Circuit", "CircuitState", "RetryPolicy"]


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waiting times that double up to a cap, each drawn from zero to there ("full jitter")."""

    base_s: float
    cap_s: float
    rng: random.Random

    def delay_s(self, attempt: int) -> float:
        """How long to wait after attempt number ``attempt`` (from 0) failed."""
        ceiling = min(self.cap_s, self.base_s * 2.0 ** min(attempt, 62))
        return self.rng.uniform(0.0, ceiling)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long one call goes on."""

    attempts: int = 6
    deadline_s: float = 300.0
    """No attempt begins later than this after the first; one that runs is not interrupted."""
    base_s: float = 0.2
    cap_s: float = 20.0

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if self.attempts < 1 or self.deadline_s <= 0 or not 0 < self.base_s <= self.cap_s:
            raise ValueError(f"a retry policy cannot be {self}")

    def again(self, attempt: int, elapsed_s: float, delay_s: float) -> bool:
        """Whether to try once more, ``delay_s`` from now, after attempt ``attempt`` (from 0) failed."""
        return attempt + 1 < self.attempts and elapsed_s + delay_s < self.deadline_s


class CircuitState(StrEnum):
    """See the module."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Circuit:
    """Whether calls may go to the store; whoever was allowed to call reports how it went."""

    def __init__(self, threshold: int = 5, open_s: float = 30.0) -> None:
        """``threshold`` failures in a row open it, for ``open_s``."""
        if threshold < 1 or open_s <= 0:
            raise ValueError(f"a circuit cannot open after {threshold} failures for {open_s} s")
        self._threshold = threshold
        self._open_s = open_s
        self._failures = 0
        self._opened_s = 0.0
        self._state = CircuitState.CLOSED

    @property
    def state(self) -> CircuitState:
        """Where it stands; an open one becomes half-open when somebody asks to call."""
        return self._state

    @property
    def failures(self) -> int:
        """Failures in a row."""
        return self._failures

    def wait_s(self, now_s: float) -> float:
        """How long an open circuit stays so; 0 where it is not open."""
        if self._state is not CircuitState.OPEN:
            return 0.0
        return max(0.0, self._opened_s + self._open_s - now_s)

    def allows(self, now_s: float) -> bool:
        """Whether to call now; after an open time exactly one caller hears yes."""
        if self._state is CircuitState.OPEN and now_s >= self._opened_s + self._open_s:
            self._state = CircuitState.HALF_OPEN
            return True
        return self._state is CircuitState.CLOSED

    def succeeded(self) -> bool:
        """The store answered; whether that closed the circuit."""
        closes = self._state is not CircuitState.CLOSED
        self._state = CircuitState.CLOSED
        self._failures = 0
        return closes

    def failed(self, now_s: float) -> bool:
        """The store did not answer; whether that opened the circuit (a failed probe only keeps it open)."""
        self._failures += 1
        was_closed = self._state is CircuitState.CLOSED
        if was_closed and self._failures < self._threshold:
            return False
        if self._state is not CircuitState.OPEN:
            self._opened_s = now_s
        self._state = CircuitState.OPEN
        return was_closed

    def abandoned(self) -> None:
        """The call that was let through ended without telling anything of the store: the next one
        may probe.
        """
        if self._state is CircuitState.HALF_OPEN:
            self._state = CircuitState.OPEN
