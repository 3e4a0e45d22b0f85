"""Chunks over one ZeroMQ connection: which are unanswered, how many may be, and which were lost.

Answers come in the order of the questions, so an answer makes every earlier unanswered chunk lost.
When nothing is heard for a while a `Probe` is sent, whose answer does the same for the last ones:
no guess about the speed of the link is made. A connection that is really dead is found by ZeroMQ's
heartbeats.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ckptd.transport.fabric.chunks import BufferUse, Chunk
from ckptd.transport.fabric.frames import (
    Ack,
    Answer,
    Data,
    FaultReply,
    Probe,
    Probed,
    Read,
    Write,
    encode,
)
from ckptd.transport.fabric.lanes import Lane, LaneState
from ckptd.transport.fabric.payloads import Payload

__all__ = ["ChunkEvents", "ChunkLane", "ZmqChunkLane"]

PROBE_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class ChunkEvents:
    """What becomes of chunks; on the fabric's thread."""

    done: Callable[[Chunk], None]
    lost: Callable[[Chunk], None]
    damaged: Callable[[Chunk], None]
    failed: Callable[[Chunk, str, str], None]
    garbage: Callable[[str], None]


class ChunkLane(Protocol):
    """A connection that carries chunks; used on the fabric's thread only."""

    @property
    def room(self) -> int:
        """How many more chunks may be sent now; 0 while not connected."""

    @property
    def started(self) -> bool: ...

    def start(self) -> None:
        """Begin to connect; ValueError if the address is none."""

    def stop(self) -> None:
        """Break the connection off: no buffer is referred to any more soon afterwards. Its chunks
        are lost.
        """

    def send(self, chunk: Chunk) -> bool:
        """Send a chunk, or ask for it; false if it could not be, and the chunk is the caller's again."""

    def due_s(self, now_s: float) -> float:
        """Do what is to be done at this time; seconds until there may be more."""


class Unanswered:
    """Chunks of one connection, in the order in which they were sent."""

    def __init__(self, events: ChunkEvents) -> None:
        self._events = events
        self._numbers = itertools.count(1)
        self._chunks: dict[int, Chunk] = {}

    def __len__(self) -> int:
        return len(self._chunks)

    def number(self) -> int:
        return next(self._numbers)

    def add(self, op: int, chunk: Chunk) -> None:
        self._chunks[op] = chunk

    def get(self, op: int) -> Chunk | None:
        return self._chunks.get(op)

    def take(self, op: int) -> Chunk | None:
        """The chunk that is answered; those before it are lost. None if it is not known (any more)."""
        if op not in self._chunks:
            return None
        self.lose_before(op)
        return self._chunks.pop(op)

    def lose_before(self, op: int) -> None:
        for earlier in [number for number in self._chunks if number < op]:
            self._events.lost(self._chunks.pop(earlier))

    def lose_all(self) -> None:
        chunks, self._chunks = self._chunks, {}
        for chunk in chunks.values():
            self._events.lost(chunk)


class ZmqChunkLane:
    """Chunks as ZeroMQ messages. ``lane`` is made by the owner, who hands us its messages and its end."""

    def __init__(self, lane: Lane, events: ChunkEvents) -> None:
        self.lane = lane
        self.window = 1
        self._events = events
        self._unanswered = Unanswered(events)
        self._heard_at = 0.0

    @property
    def room(self) -> int:
        up = self.lane.state is LaneState.UP
        return max(0, self.window - len(self._unanswered)) if up else 0

    @property
    def started(self) -> bool:
        return self.lane.started

    def start(self) -> None:
        self.lane.start()

    def stop(self) -> None:
        self.lane.stop()
        self.down()

    def down(self) -> None:
        """The connection broke."""
        self._unanswered.lose_all()

    def send(self, chunk: Chunk) -> bool:
        op = self._unanswered.number()
        if not (self._write(op, chunk) if chunk.transfer.is_put else self._read(op, chunk)):
            return False
        if not len(self._unanswered):
            self._heard_at = time.monotonic()
        self._unanswered.add(op, chunk)
        return True

    def _write(self, op: int, chunk: Chunk) -> bool:
        key = chunk.transfer.key
        digest = chunk.compute_digest()
        header = Write(op, key.region, key.token, chunk.offset, chunk.length, digest)
        view = chunk.view()
        gone = self.lane.send_view(encode(header), view)
        if gone is None:
            view.release()
            return False
        chunk.transfer.hold(BufferUse(view, gone))
        return True

    def _read(self, op: int, chunk: Chunk) -> bool:
        key = chunk.transfer.key
        header = Read(op, key.region, key.token, chunk.offset, chunk.length)
        return self.lane.send(encode(header))

    def answer(self, answer: Answer, payload: Payload | None) -> None:
        """An answer on this connection, and what came with it."""
        self._heard_at = time.monotonic()
        if isinstance(answer, Ack):
            self.window = max(1, answer.window)
            self._acked(answer)
        elif isinstance(answer, Data):
            self.window = max(1, answer.window)
            self._arrived(answer, payload)
        elif isinstance(answer, FaultReply):
            if answer.fault == "open":
                self._unanswered.lose_all()
                self.lane.reopen()
            else:
                self._failed(answer)
        elif isinstance(answer, Probed):
            self._unanswered.lose_before(answer.op)
        else:
            self._events.garbage("an answer that nobody asked for")

    def _acked(self, answer: Ack) -> None:
        chunk = self._unanswered.get(answer.op)
        if chunk is None:
            return  # late: it was given up
        if not chunk.transfer.is_put or chunk.digest != answer.digest:
            self._events.garbage("an acknowledgement of something else")
            return
        self._unanswered.take(answer.op)
        self._events.done(chunk)

    def _arrived(self, answer: Data, payload: Payload | None) -> None:
        chunk = self._unanswered.take(answer.op)
        if chunk is None or chunk.transfer.outcome is not None:
            return
        if chunk.transfer.is_put or payload is None or payload.size_bytes != chunk.length:
            self._events.damaged(chunk)
            return
        if payload.digest(chunk.transfer.key.region, chunk.offset) != answer.digest:
            self._events.damaged(chunk)
            return
        payload.copy_into(chunk.view())
        self._events.done(chunk)

    def _failed(self, answer: FaultReply) -> None:
        chunk = self._unanswered.take(answer.op)
        if chunk is not None:
            self._events.failed(chunk, answer.fault, answer.detail)

    def due_s(self, now_s: float) -> float:
        if not len(self._unanswered):
            return float("inf")
        quiet_s = now_s - self._heard_at
        if quiet_s >= PROBE_AFTER_S:
            self._heard_at, quiet_s = now_s, 0.0
            self.lane.send(encode(Probe(self._unanswered.number())))
        return PROBE_AFTER_S - quiet_s
