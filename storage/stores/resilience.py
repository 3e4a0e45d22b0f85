"""Retries and a circuit breaker for any store (`Resilient`).

The decisions are pure: `RetryPolicy`, `Backoff` and `Circuit` take the time as an argument. The circuit::

    CLOSED ──`threshold` failures in a row──► OPEN ──`open_s` later──► HALF_OPEN (one call is let through)
       ▲                                        ▲                          │
       │                                        └──────── it fails ────────┤
       └───────────────────────────────────── it succeeds ─────────────────┘
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from ckptd.storage.stores.objects import (
    Cancelled,
    CircuitOpen,
    ObjectExists,
    ObjectInfo,
    ObjectStore,
    Range,
    StoreError,
    StoreFacts,
)
from ckptd.storage.stores.store_base import flat, total

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays that double up to a cap; each is drawn between zero and that ("full jitter")."""

    base_s: float
    cap_s: float
    rng: random.Random

    def delay_s(self, attempt: int) -> float:
        """The delay after attempt number ``attempt`` (from 0) failed."""
        ceiling = min(self.cap_s, self.base_s * 2.0 ** min(attempt, 62))
        return self.rng.uniform(0.0, ceiling)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how long one call is retried."""

    attempts: int = 6
    deadline_s: float = 300.0
    """No attempt begins later than this after the first; a running attempt is not interrupted."""
    base_s: float = 0.2
    cap_s: float = 20.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.deadline_s <= 0 or not 0 < self.base_s <= self.cap_s:
            raise ValueError(f"a retry policy cannot be {self}")

    def again(self, attempt: int, elapsed_s: float, delay_s: float) -> bool:
        """Whether to retry in ``delay_s``, after attempt number ``attempt`` (from 0) failed."""
        return attempt + 1 < self.attempts and elapsed_s + delay_s < self.deadline_s


class CircuitState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Circuit:
    """Decides whether calls may go to the store; an allowed caller must report the result of its call.

    ``threshold`` failures in a row open the circuit for ``open_s``.
    """

    def __init__(self, threshold: int = 5, open_s: float = 30.0) -> None:
        if threshold < 1 or open_s <= 0:
            raise ValueError(f"a circuit cannot open after {threshold} failures for {open_s} s")
        self._threshold = threshold
        self._open_s = open_s
        self.failures = 0  # in a row
        self._opened_s = 0.0
        self.state = CircuitState.CLOSED

    def wait_s(self, now_s: float) -> float:
        """The time until an open circuit lets a call through; 0 if it is not open."""
        if self.state is not CircuitState.OPEN:
            return 0.0
        return max(0.0, self._opened_s + self._open_s - now_s)

    def allows(self, now_s: float) -> bool:
        """Whether to call now; after ``open_s``, exactly one caller is allowed."""
        if self.state is CircuitState.OPEN and now_s >= self._opened_s + self._open_s:
            self.state = CircuitState.HALF_OPEN
            return True
        return self.state is CircuitState.CLOSED

    def succeeded(self) -> bool:
        """The store answered; returns whether this closed the circuit."""
        closes = self.state is not CircuitState.CLOSED
        self.state = CircuitState.CLOSED
        self.failures = 0
        return closes

    def failed(self, now_s: float) -> bool:
        """The store did not answer; returns whether this opened the circuit, which a probe does not."""
        self.failures += 1
        was_closed = self.state is CircuitState.CLOSED
        if was_closed and self.failures < self._threshold:
            return False
        if self.state is not CircuitState.OPEN:
            self._opened_s = now_s
        self.state = CircuitState.OPEN
        return was_closed

    def abandoned(self) -> None:
        """The allowed call ended without an answer or failure of the store: let the next one through."""
        if self.state is CircuitState.HALF_OPEN:
            self.state = CircuitState.OPEN


_T = TypeVar("_T")
_WHOLE_BYTES = 1 << 20  # objects up to this size are compared whole, larger ones at both ends
_EDGE_BYTES = 64 << 10


class NoticeKind(StrEnum):
    PAUSED = "paused"
    RESUMED = "resumed"


@dataclass(frozen=True, slots=True)
class StoreNotice:
    """The circuit opened or closed; an operator should see this once."""

    kind: NoticeKind
    url: str
    text: str


@dataclass(frozen=True, slots=True)
class RetryTiming:
    """The clock and the random generator of retries."""

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    rng: random.Random = dataclasses.field(default_factory=random.Random)


def _never() -> bool:
    return False


def _log(notice: StoreNotice) -> None:
    logger.warning("%s", notice.text)


class Resilient:
    """Implements `ObjectStore` in front of another store.

    Retriable errors are retried as `RetryPolicy` allows. The circuit counts attempts that ended with a
    retriable error; any other error is an answer of the store.

    Args:
        cancelled: called before each attempt and after each pause; if it returns True, the call ends.
        notify: called once when the circuit opens and once when it closes, from any thread.
    """

    def __init__(
        self,
        store: ObjectStore,
        policy: RetryPolicy | None = None,
        circuit: Circuit | None = None,
        *,
        url: str = "",
        timing: RetryTiming | None = None,
        cancelled: Callable[[], bool] = _never,
        notify: Callable[[StoreNotice], None] = _log,
    ) -> None:
        self._store = store
        self._policy = policy or RetryPolicy()
        self._circuit = circuit or Circuit()
        self._url = url or repr(store)
        timing = timing or RetryTiming()
        self._clock, self._sleep = timing.clock, timing.sleep
        self._backoff = Backoff(self._policy.base_s, self._policy.cap_s, timing.rng)
        self._cancelled = cancelled
        self._notify = notify
        self._lock = threading.Lock()
        self._errors: Counter[str] = Counter()

    def counters(self) -> Mapping[str, int]:
        """The number of failed attempts by the name of the error."""
        with self._lock:
            return dict(self._errors)

    def within(self, deadline_s: float) -> Resilient:
        """The same store, circuit and counters with a shorter deadline."""
        prompt = copy.copy(self)
        least = min(deadline_s, self._policy.deadline_s)
        prompt._policy = dataclasses.replace(self._policy, deadline_s=least)
        return prompt

    @property
    def facts(self) -> StoreFacts:
        return self._call("", lambda: self._store.facts)

    def put(self, key: str, parts: Sequence[memoryview], *, if_absent: bool = False) -> ObjectInfo:
        """As `ObjectStore.put`. An attempt whose answer got lost may have succeeded. If the next attempt
        finds an object with our size and content (both ends of a large one), the put has succeeded: a key
        stands for one content.
        """
        failed = False

        def attempt() -> ObjectInfo:
            nonlocal failed
            try:
                return self._store.put(key, parts, if_absent=if_absent)
            except ObjectExists:
                stored = self._ours(key, parts) if failed else None
                if stored is None:
                    raise
                return stored
            except StoreError:
                failed = True
                raise

        return self._call(key, attempt)

    def read(self, key: str, *, limit: int) -> bytes:
        return self._call(key, lambda: self._store.read(key, limit=limit))

    def read_ranges(self, key: str, ranges: Sequence[Range]) -> None:
        self._call(key, lambda: self._store.read_ranges(key, ranges))

    def info(self, key: str) -> ObjectInfo | None:
        return self._call(key, lambda: self._store.info(key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """As `ObjectStore.list`, but lists everything at once: half a listing is useless."""
        return iter(self._call(prefix, lambda: [*self._store.list(prefix)]))

    def delete(self, keys: Sequence[str]) -> None:
        self._call(keys[0] if keys else "", lambda: self._store.delete(keys))

    def abort_uploads(self, prefix: str, older_than_s: float) -> int:
        return self._call(prefix, lambda: self._store.abort_uploads(prefix, older_than_s))

    def close(self) -> None:
        self._store.close()

    def _call(self, key: str, attempt: Callable[[], _T]) -> _T:
        begun_s = self._clock()
        number = 0
        while True:
            self._check_cancelled(key)
            self._check_circuit(key)
            try:
                return self._watched(attempt)
            except StoreError as error:
                delay_s = self._backoff.delay_s(number)
                elapsed_s = self._clock() - begun_s
                if not error.retriable or not self._policy.again(number, elapsed_s, delay_s):
                    raise
                if self._circuit.state != "closed":
                    raise  # the circuit just opened: calls fail at once, and so does this one
            self._sleep(delay_s)
            number += 1

    def _watched(self, attempt: Callable[[], _T]) -> _T:
        """One attempt, whose result is reported to the circuit."""
        try:
            result = attempt()
        except StoreError as error:
            with self._lock:
                self._errors[type(error).__name__] += 1
            if error.retriable:
                self._failed(error)
            else:
                self._succeeded()
            raise
        except BaseException:
            with self._lock:
                self._circuit.abandoned()
            raise
        self._succeeded()
        return result

    def _check_cancelled(self, key: str) -> None:
        if self._cancelled():
            raise Cancelled(key, "cancelled by the caller")

    def _check_circuit(self, key: str) -> None:
        now_s = self._clock()
        with self._lock:
            if self._circuit.allows(now_s):
                return
            wait_s = self._circuit.wait_s(now_s)
            self._errors[CircuitOpen.__name__] += 1
        raise CircuitOpen(key, f"not tried: the store failed too often (again in {wait_s:.0f} s)")

    def _failed(self, error: StoreError) -> None:
        with self._lock:
            paused = self._circuit.failed(self._clock())
            failures = self._circuit.failures
        if paused:
            text = f"requests to storage {self._url} pause after {failures} failures in a row: {error}"
            self._notify(StoreNotice(NoticeKind.PAUSED, self._url, text))

    def _succeeded(self) -> None:
        with self._lock:
            closed = self._circuit.succeeded()
        if closed:
            text = f"storage {self._url} answers again"
            self._notify(StoreNotice(NoticeKind.RESUMED, self._url, text))

    def _ours(self, key: str, parts: Sequence[memoryview]) -> ObjectInfo | None:
        """The stored object if it has the content of ``parts``, else None."""
        stored = self._store.info(key)
        views = flat(parts)
        size = total(views)
        if stored is None or stored.size != size:
            return None
        if size <= _WHOLE_BYTES:
            same = self._store.read(key, limit=size) == b"".join(views)
            return stored if same else None
        head, tail = bytearray(_EDGE_BYTES), bytearray(_EDGE_BYTES)
        edges = [Range(0, memoryview(head)), Range(size - _EDGE_BYTES, memoryview(tail))]
        self._store.read_ranges(key, edges)
        same = head == _slice(views, 0, _EDGE_BYTES)
        same = same and tail == _slice(views, size - _EDGE_BYTES, size)
        return stored if same else None


def _slice(views: Sequence[memoryview], begin: int, end: int) -> bytes:
    """Bytes ``begin`` to ``end`` of the views together."""
    found = []
    for view in views:
        found.append(view[max(begin, 0) : max(end, 0)])
        begin -= len(view)
        end -= len(view)
    return b"".join(found)
