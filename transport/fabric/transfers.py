"""Puts and gets on the asking side: their chunks, whose turn it is, and how fast chunks are put.

A transfer is RUNNING until its last chunk is done or something ends it, then DRAINING while an engine still
refers to the caller's buffer, then COMPLETE. It changes on the fabric's thread only; `ChunkedTransfer.cancel`
and ``wait`` are for any thread. A chunk is TO SEND, then SENT under an operation number, and TO SEND again
when its connection or its digest fails.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ckptd.transport.fabric.frames import BufferUse, bytes_of, digest_of
from ckptd.transport.verbs import Completion, Done, Fault, RegionKey

logger = logging.getLogger(__name__)

PRUNE_HOLDS = 64
DIGEST_TRIES = 4  # a link that damages a chunk this often will not carry it
DRAIN_POLL_S = 0.001
DRAIN_GRACE_S = 0.5  # after this, connections that still hold a buffer are broken off
GATE_POLL_S = 0.002
GATE_HOLD_S = 0.5  # a gate is a hint: a caller that forgets to open it delays the replica, and no more
BURST_S = 0.05


@dataclass(slots=True, eq=False)
class Chunk:
    """``start`` counts from the start of the transfer, ``offset`` from the start of the region."""

    transfer: ChunkedTransfer
    start: int
    offset: int
    length: int
    digest: int = -1
    bad_digests: int = 0

    def view(self) -> memoryview:
        """A view of its own, which can be released separately."""
        return self.transfer.buffer[self.start : self.start + self.length]

    def compute_digest(self) -> int:
        if self.digest < 0:
            with self.view() as data:
                self.digest = digest_of(data, self.transfer.key.region, self.offset)
        return self.digest


class ChunkUse:
    """The use of a chunk's part of the buffer by a thread of an engine; ``lock`` is the engine's.

    WAITING, then BUSY while the thread touches the buffer, then OVER. A transfer that wants its buffer back
    makes a waiting use OVER, and waits for a busy one.
    """

    __slots__ = ("_busy", "_lock", "_over", "chunk", "view")

    def __init__(self, chunk: Chunk, lock: threading.Lock) -> None:
        self.chunk = chunk
        self.view = chunk.view()
        self._lock = lock
        self._busy = False
        self._over = False
        chunk.transfer.hold(BufferUse(self.view, self._let_go))

    def claim(self) -> bool:
        """Begin to touch the buffer; false if the transfer has ended."""
        with self._lock:
            self._busy = not self._over
            return self._busy

    def finish(self) -> None:
        """The thread does not touch the buffer any more."""
        with self._lock:
            self._busy, self._over = False, True

    def _let_go(self) -> bool:
        """Whether the buffer is free. A transfer that has ended takes it from a thread that has not begun."""
        if self._over or self.chunk.transfer.outcome is None:
            return self._over
        with self._lock:
            self._over = self._over or not self._busy
            return self._over


class ChunkedTransfer:
    """One put or get. ``on_cancel`` is called in the cancelling thread and must end the transfer on the
    fabric's.
    """

    def __init__(
        self,
        buffer: memoryview,
        key: RegionKey,
        *,
        is_put: bool,
        offset: int,
        chunk_bytes: int,
        deadline_s: float,
        done: Done | None,
        on_cancel: Callable[[ChunkedTransfer], None],
    ) -> None:
        self.buffer = bytes_of(buffer, writable=not is_put)
        self.key = key
        self.is_put = is_put
        self.begun_at = time.monotonic()
        self.deadline_at = self.begun_at + deadline_s
        self.retries = 0
        self.outcome: tuple[Fault | None, str] | None = None
        self.ended_at = 0.0
        self.broken_off = False  # its connections were closed, so that its buffer becomes free
        self.network_only = key.file is None  # or the short cut was tried in vain
        self._offset = offset
        self._chunk_bytes = chunk_bytes
        self._next = 0
        self._again: deque[Chunk] = deque()
        self._size = len(self.buffer)
        # A transfer of no bytes is one empty chunk, which checks the key.
        self._left = max(1, -(-self._size // chunk_bytes))
        self._left_to_cut = self._left
        self._holds: list[BufferUse] = []
        self._done = done
        self._on_cancel = on_cancel
        self._completion: Completion | None = None
        self._completed = threading.Event()

    # --- for the caller, any thread ---

    def cancel(self) -> None:
        """Complete with ``CANCELLED``, unless it ended already."""
        self._on_cancel(self)

    def wait(self, timeout_s: float) -> Completion:
        """The completion.

        Raises:
            TimeoutError: not complete within ``timeout_s`` (the transfer goes on).
        """
        if not self._completed.wait(timeout_s):
            raise TimeoutError(f"not complete within {timeout_s:g} s")
        assert self._completion is not None
        return self._completion

    # --- for the fabric's thread ---

    @property
    def has_more(self) -> bool:
        return self.outcome is None and bool(self._again or self._left_to_cut)

    def next_chunk(self) -> Chunk:
        """A chunk to send; requires ``has_more``."""
        if self._again:
            return self._again.popleft()
        start = self._next
        length = min(self._chunk_bytes, self._size - start)
        self._next += length
        self._left_to_cut -= 1
        return Chunk(self, start, self._offset + start, length)

    def give_back(self, chunk: Chunk) -> None:
        """The chunk was not sent."""
        self._again.appendleft(chunk)

    def lost(self, chunk: Chunk) -> None:
        """No answer will come: send the chunk again."""
        if self.outcome is None:
            self.retries += 1
            self._again.append(chunk)

    def damaged(self, chunk: Chunk) -> None:
        """The digest did not match: send the chunk again, `DIGEST_TRIES` times in all."""
        chunk.bad_digests += 1
        if chunk.bad_digests < DIGEST_TRIES:
            self.lost(chunk)
        else:
            self.end(
                Fault.DIGEST, f"the chunk at byte {chunk.offset} arrived damaged {chunk.bad_digests} times"
            )

    def chunk_done(self) -> None:
        self._left -= 1
        if self._left == 0:
            self.end(None, "")

    def end(self, fault: Fault | None, detail: str) -> None:
        """Set the outcome; the first one counts."""
        if self.outcome is None:
            self.outcome = (fault, detail)
            self.ended_at = time.monotonic()
            self._again.clear()

    def hold(self, hold: BufferUse) -> None:
        """An engine begins to use a part of the buffer; completion waits for it."""
        if len(self._holds) >= PRUNE_HOLDS:
            self.is_free()
        self._holds.append(hold)

    def is_free(self) -> bool:
        """Whether no engine refers to the buffer any more."""
        self._holds = [hold for hold in self._holds if not hold.over()]
        return not self._holds

    def complete(self) -> None:
        """Give the buffer back and call ``done``, once."""
        assert self.outcome is not None
        if self._completion is not None:
            return
        fault, detail = self.outcome
        seconds = time.monotonic() - self.begun_at
        self.buffer = memoryview(b"")
        self._completion = Completion(fault, detail, self._size, self.retries, seconds)
        self._completed.set()
        if self._done is not None:
            try:
                self._done(self._completion)
            except Exception:  # a user's callback: the loop that carries all transfers must survive it
                logger.exception("the callback of a transfer failed")


class Transfers:
    """The transfers to one peer, on the fabric's thread. RUNNING ones take turns; DRAINING ones complete when
    their buffer is free.
    """

    def __init__(self) -> None:
        self._running: deque[ChunkedTransfer] = deque()
        self._draining: list[ChunkedTransfer] = []

    @property
    def draining(self) -> bool:
        return bool(self._draining)

    @property
    def some_ended(self) -> bool:
        """Whether `settle` has something to do."""
        return any(transfer.outcome is not None for transfer in self._running)

    def add(self, transfer: ChunkedTransfer) -> None:
        self._running.append(transfer)

    def end(self, fault: Fault, detail: str) -> None:
        for transfer in self._running:
            transfer.end(fault, detail)

    def expire(self, now_s: float, detail: str) -> None:
        for transfer in self._running:
            if transfer.outcome is None and now_s >= transfer.deadline_at:
                transfer.end(Fault.DEADLINE, f"not complete in time; {detail}")

    def due_s(self, now_s: float) -> float:
        """Seconds until the first deadline."""
        return min((t.deadline_at for t in self._running), default=float("inf")) - now_s

    def settle(self, now_s: float) -> bool:
        """Complete what has ended and is free; returns whether connections must be broken off to free the
        rest.
        """
        if self.some_ended:
            self._draining += [t for t in self._running if t.outcome is not None]
            self._running = deque(t for t in self._running if t.outcome is None)
        waiting: list[ChunkedTransfer] = []
        for transfer in self._draining:
            if transfer.is_free():
                transfer.complete()
            else:
                waiting.append(transfer)
        self._draining = waiting
        stuck = [t for t in waiting if not t.broken_off and now_s - t.ended_at > DRAIN_GRACE_S]
        for transfer in stuck:
            transfer.broken_off = True
        return bool(stuck)

    def complete_all(self) -> None:
        """Complete at the end of the fabric, whatever an engine still holds."""
        draining, self._draining = self._draining, []
        for transfer in draining:
            transfer.complete()

    # --- turns ---

    def next(self) -> ChunkedTransfer | None:
        """The transfer whose turn it is, of those with chunks to send."""
        for _ in range(len(self._running)):
            if self._running[0].has_more:
                return self._running[0]
            self._running.rotate(-1)
        return None

    def next_get(self) -> ChunkedTransfer | None:
        """While puts wait: give the turn to a get with chunks to ask for, if there is one."""
        for _ in range(len(self._running)):
            self._running.rotate(-1)
            if self._running[0].has_more and not self._running[0].is_put:
                return self._running[0]
        return None

    def turn(self) -> None:
        """The transfer whose turn it was has sent a chunk."""
        self._running.rotate(-1)


class Pacer:
    """Limits the puts of all peers: a token bucket, and a gate that the owner may hold closed. One thread;
    time is an argument.

    A chunk may go when the bucket is not in debt, and may put it into debt. So chunks larger than the burst
    pass, and the average keeps to the rate.

    Raises:
        ValueError: the rate is not positive.
    """

    def __init__(self, bytes_per_s: float | None = None, gate: Callable[[], bool] | None = None) -> None:
        if bytes_per_s is not None and not bytes_per_s > 0:
            raise ValueError(f"the rate must be positive, not {bytes_per_s}")
        self._rate = bytes_per_s
        self._tokens = 0.0
        self._filled_at = 0.0
        self._gate = gate
        self._held_since: float | None = None

    def delay_s(self, now_s: float) -> float:
        """Seconds until the next chunk may go; 0: now."""
        held = self._held_s(now_s)
        if held:
            return held
        if self._rate is None:
            return 0.0
        filled = self._tokens + self._rate * max(0.0, now_s - self._filled_at)
        self._tokens = min(filled, self._rate * BURST_S)
        self._filled_at = now_s
        return 0.0 if self._tokens >= 0 else -self._tokens / self._rate

    def spend(self, size_bytes: int) -> None:
        """A chunk was sent."""
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
            logger.exception("the gate failed and is ignored from now on")
            self._gate = None
            return True
