"""One ZeroMQ connection to a peer: connects, and connects again, and says when it may be used.

States: DOWN (not connected) → OPENING (connected, `Open` sent) → UP (`Opened` came) → DOWN when the
connection breaks; REFUSED when the peer does not want us, until `restart`. Everything runs on the
fabric's thread.
"""

from __future__ import annotations

import errno
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from ckptd.transport.fabric.frames import (
    MAX_WIRE_FRAME_BYTES,
    PROTOCOL,
    Ack,
    Answer,
    Data,
    FaultReply,
    Open,
    Payload,
    Probe,
    Probed,
    Read,
    Write,
    encode,
    send_copy,
    send_view,
)
from ckptd.transport.fabric.transfers import BufferUse, Chunk

__all__ = [
    "HEARTBEAT_MS",
    "HEARTBEAT_TIMEOUT_MS",
    "ChunkEvents",
    "ChunkLane",
    "Lane",
    "LaneEvents",
    "LaneState",
    "Wiring",
    "ZmqChunkLane",
]

logger = logging.getLogger(__name__)


HEARTBEAT_MS = 1_000
HEARTBEAT_TIMEOUT_MS = 8_000  # a peer whose process hangs is cut off then; what it held is ours again
QUEUE = 4096  # messages; the window is the real bound, this one stops a peer that ignores it
RECEIVE_BATCH = 16  # messages of one connection before others get their turn
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)  # may be over soon
MONITORED = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH

Frames = Sequence[zmq.Frame]


class LaneState(StrEnum):
    DOWN = "down"
    OPENING = "opening"
    UP = "up"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Wiring:
    """What a lane needs of its fabric."""

    context: zmq.Context[zmq.Socket[bytes]]
    node: str
    watch: Callable[[zmq.Socket[bytes], Callable[[], None]], None]
    unwatch: Callable[[zmq.Socket[bytes]], None]
    curve: tuple[str, str] | None  # our public and secret key


@dataclass(frozen=True, slots=True)
class LaneEvents:
    """What a lane tells its owner."""

    down: Callable[[Lane], None]
    refused: Callable[[Lane, str], None]
    message: Callable[[Lane, Frames], None]


class Lane:
    """A DEALER and its monitor."""

    def __init__(
        self,
        wiring: Wiring,
        events: LaneEvents,
        *,
        endpoint: str,
        target: str,
        server_key: str,
        data: bool,
    ) -> None:
        self.state = LaneState.DOWN
        self.data = data
        self.opened_times = 0
        self._wiring = wiring
        self._events = events
        self._endpoint = endpoint
        self._target = target
        self._server_key = server_key
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None

    @property
    def started(self) -> bool:
        return self._socket is not None

    def start(self) -> None:
        """Begin to connect.

        Raises:
            ValueError: the endpoint or the key is none.
            OSError: this process has no descriptors or no memory left for it.
        """
        try:
            socket = self._wiring.context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise self._not_started(error) from error
        try:
            self._configure(socket)
            monitor = socket.get_monitor_socket(MONITORED)
            socket.connect(self._endpoint)
        except (zmq.ZMQError, ValueError) as error:
            socket.disable_monitor()
            socket.close(linger=0)
            raise self._not_started(error) from error
        self.state = LaneState.DOWN
        self._socket, self._monitor = socket, monitor
        self._wiring.watch(monitor, self._monitored)
        self._wiring.watch(socket, self._readable)

    def _not_started(self, error: Exception) -> Exception:
        text = f"cannot connect to {self._endpoint}: {error}"
        number = getattr(error, "errno", None)
        return OSError(number, text) if number in EXHAUSTED else ValueError(text)

    def _configure(self, socket: zmq.Socket[bytes]) -> None:
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = QUEUE
        socket.immediate = True  # nothing is queued for a connection that is not there
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, 5_000)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_WIRE_FRAME_BYTES)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.ipv6 = "[" in self._endpoint
        if self._wiring.curve is not None:
            public, secret = self._wiring.curve
            socket.curve_publickey = public.encode()
            socket.curve_secretkey = secret.encode()
            socket.curve_serverkey = self._server_key.encode()

    def stop(self) -> None:
        """Give up the connection and everything queued in it."""
        socket, monitor = self._socket, self._monitor
        self._socket = self._monitor = None
        self.state = LaneState.DOWN
        if socket is None or monitor is None:
            return
        self._wiring.unwatch(monitor)
        self._wiring.unwatch(socket)
        socket.disable_monitor()
        monitor.close(linger=0)
        socket.close(linger=0)

    def restart(self) -> None:
        self.stop()
        self.start()

    def opened(self) -> None:
        """The peer's answer came and is to our liking."""
        self.state = LaneState.UP
        self.opened_times += 1

    def reopen(self) -> None:
        """The peer does not know this connection: introduce ourselves again."""
        if self.state is LaneState.UP:
            self._introduce()

    def send(self, header: bytes, body: bytes | None = None) -> bool:
        """Queue a message; false if there is no connection or no room."""
        if self._socket is None:
            return False
        try:
            if body is None:
                self._socket.send(header, zmq.DONTWAIT)
            else:
                send_copy(self._socket, [header], body)
        except zmq.Again:
            return False
        return True

    def send_view(self, header: bytes, view: memoryview) -> Callable[[], bool] | None:
        """Queue a message whose payload is not copied; says when it is let go, or None if there is no room.

        Without encryption libzmq has the kernel read the payload, and aborts the process if it is
        in a file that was cut short meanwhile: then a copy is sent.
        """
        if self._socket is None:
            return None
        payload = bytes(view) if self._wiring.curve is None else view
        try:
            return send_view(self._socket, [header], memoryview(payload))
        except zmq.Again:
            return None

    def _introduce(self) -> None:
        self.state = LaneState.OPENING
        hello = Open(PROTOCOL, self._wiring.node, self._target, self.data)
        if not self.send(encode(hello)):
            self.state = LaneState.DOWN  # gone again; the monitor says so too

    def _monitored(self) -> None:
        monitor = self._monitor
        while monitor is not None and monitor is self._monitor:
            try:
                event = recv_monitor_message(monitor, zmq.DONTWAIT)["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._introduce()
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.state = LaneState.REFUSED
                self._events.refused(self, "the peer does not trust our key")
            elif event == zmq.EVENT_DISCONNECTED and self.state is not LaneState.REFUSED:
                self.state = LaneState.DOWN
                self._events.down(self)

    def _readable(self) -> None:
        socket = self._socket
        for _ in range(RECEIVE_BATCH):
            if socket is None or socket is not self._socket:
                return  # an answer made the owner give up this connection
            try:
                frames = socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            self._events.message(self, frames)


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
