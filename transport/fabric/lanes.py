"""Connections to a peer over ZeroMQ, for messages (`Lane`) and for chunks (`ZmqChunkLane`). On the fabric's
thread.

A lane is DOWN (not connected) → OPENING (connected, `Open` sent) → UP (`Opened` came) → DOWN when the
connection breaks; REFUSED when the peer's ZAP handler rejects our key.

Answers come in the order of the questions, so an answer shows that every earlier unanswered chunk was lost.
After a quiet while a `Probe` is sent, whose answer does the same for the last chunks: no guess about the
speed of the link is made. ZeroMQ's heartbeats find a connection that is dead.
"""

from __future__ import annotations

import errno
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from ckptd.transport.access.refusals import RefusalLog
from ckptd.transport.fabric.frames import (
    MAX_WIRE_FRAME_BYTES,
    PROTOCOL,
    Ack,
    Answer,
    BufferUse,
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
from ckptd.transport.fabric.regions import Regions
from ckptd.transport.fabric.transfers import Chunk
from ckptd.transport.verbs import FabricCounters

HEARTBEAT_MS = 1_000
HEARTBEAT_TIMEOUT_MS = 8_000  # then a peer whose process hangs is cut off, and its buffers are free again
QUEUE = 4096  # messages; the window is the real bound, this one stops a peer that ignores it
RECEIVE_BATCH = 16  # messages of one connection before others get their turn
PROBE_AFTER_S = 1.0
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)  # may be over soon
MONITORED = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH

Frames = Sequence[zmq.Frame]


class LaneState(StrEnum):
    DOWN = "down"
    OPENING = "opening"
    UP = "up"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class FabricParts:
    """The parts of a fabric that its connections share.

    Args:
        curve: our public and secret key; None: nothing is authenticated or encrypted.
        node_of: the trusted node of a public key; None without keys.
        credits: chunks that may be in flight towards us, all peers together.
        call: runs a function on the fabric's thread, from any thread; false if that has ended.
        watch: calls a function whenever a socket is readable. The fabric's thread only, like ``unwatch``.
    """

    node: str
    context: zmq.Context[zmq.Socket[bytes]]
    curve: tuple[str, str] | None
    node_of: Callable[[str], str | None] | None
    credits: int
    regions: Regions
    counters: FabricCounters
    refusals: RefusalLog
    call: Callable[[Callable[[], None]], bool]
    watch: Callable[[zmq.Socket[bytes], Callable[[], None]], None]
    unwatch: Callable[[zmq.Socket[bytes]], None]

    def trusts(self, node: str, public_key: str) -> bool:
        """Whether ``public_key`` is trusted as that node's; always without keys."""
        return self.node_of is None or self.node_of(public_key) == node


class LaneOwner(Protocol):
    """Receives the events of lanes, on the fabric's thread."""

    def lane_down(self, lane: Lane) -> None: ...

    def lane_refused(self, lane: Lane, detail: str) -> None: ...

    def message(self, lane: Lane, frames: Frames) -> None: ...

    def chunk_done(self, chunk: Chunk) -> None: ...

    def chunk_lost(self, chunk: Chunk) -> None: ...

    def chunk_damaged(self, chunk: Chunk) -> None: ...

    def chunk_failed(self, chunk: Chunk, fault: str, detail: str) -> None: ...

    def garbage(self, what: str) -> None: ...


class Lane:
    """A DEALER and its monitor. Reconnects by itself."""

    def __init__(
        self,
        parts: FabricParts,
        owner: LaneOwner,
        *,
        endpoint: str,
        target: str,
        server_key: str,
        data: bool,
    ) -> None:
        self.state = LaneState.DOWN
        self.opened_times = 0
        self._parts = parts
        self._owner = owner
        self._endpoint = endpoint
        self._server_key = server_key
        self._hello = encode(Open(PROTOCOL, parts.node, target, data))
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None

    @property
    def started(self) -> bool:
        return self._socket is not None

    def start(self) -> None:
        """Begin to connect.

        Raises:
            ValueError: the endpoint or the key is invalid.
            OSError: this process has no descriptors or no memory left for it.
        """
        try:
            socket = self._parts.context.socket(zmq.DEALER)
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
        self._parts.watch(monitor, self._monitored)
        self._parts.watch(socket, self._readable)

    def _not_started(self, error: Exception) -> Exception:
        text = f"cannot connect to {self._endpoint}: {error}"
        number = getattr(error, "errno", None)
        return OSError(number, text) if number in EXHAUSTED else ValueError(text)

    def _configure(self, socket: zmq.Socket[bytes]) -> None:
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = QUEUE
        socket.immediate = True  # nothing is queued without a connection
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, 5_000)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_WIRE_FRAME_BYTES)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.ipv6 = "[" in self._endpoint
        if self._parts.curve is not None:
            public, secret = self._parts.curve
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
        self._parts.unwatch(monitor)
        self._parts.unwatch(socket)
        socket.disable_monitor()
        monitor.close(linger=0)
        socket.close(linger=0)

    def opened(self) -> None:
        """The owner accepts the peer's answer."""
        self.state = LaneState.UP
        self.opened_times += 1

    def reopen(self) -> None:
        """The peer does not know this connection: send `Open` again."""
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

    def send_view(self, header: bytes, view: memoryview) -> BufferUse | None:
        """Queue a message whose payload is not copied; None if there is no connection or no room."""
        if self._socket is None:
            return None
        try:
            return send_view(self._socket, [header], view, encrypted=self._parts.curve is not None)
        except zmq.Again:
            return None

    def _introduce(self) -> None:
        self.state = LaneState.OPENING
        if not self.send(self._hello):
            self.state = LaneState.DOWN  # broken again; the monitor will report it too

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
                self._owner.lane_refused(self, "the peer does not trust our key")
            elif event == zmq.EVENT_DISCONNECTED and self.state is not LaneState.REFUSED:
                self.state = LaneState.DOWN
                self._owner.lane_down(self)

    def _readable(self) -> None:
        socket = self._socket
        for _ in range(RECEIVE_BATCH):
            if socket is None or socket is not self._socket:
                return  # an answer made the owner give up this connection
            try:
                frames = socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            self._owner.message(self, frames)


class ChunkLane(Protocol):
    """A connection that carries chunks; used on the fabric's thread only."""

    @property
    def room(self) -> int:
        """How many more chunks may be sent now; 0 while not connected."""

    @property
    def started(self) -> bool: ...

    def start(self) -> None:
        """Begin to connect; raises what `Lane.start` raises."""

    def stop(self) -> None:
        """Break the connection off; soon afterwards it refers to no buffer. Its chunks are lost."""

    def send(self, chunk: Chunk) -> bool:
        """Put a chunk, or ask for it; false if it could not be sent, and is the caller's again."""

    def due_s(self, now_s: float) -> float:
        """Do what is due; returns the seconds until there may be more."""


class ZmqChunkLane:
    """Implements `ChunkLane`. The owner makes ``lane`` and passes on its messages and its end."""

    def __init__(self, lane: Lane, owner: LaneOwner) -> None:
        self.lane = lane
        self.window = 1
        self._owner = owner
        self._numbers = itertools.count(1)
        self._unanswered: dict[int, Chunk] = {}  # in the order in which they were sent
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
        self.lose_all()

    def lose_all(self) -> None:
        """The connection broke, or the peer has forgotten it."""
        chunks, self._unanswered = self._unanswered, {}
        for chunk in chunks.values():
            self._owner.chunk_lost(chunk)

    def send(self, chunk: Chunk) -> bool:
        op = next(self._numbers)
        if not (self._write(op, chunk) if chunk.transfer.is_put else self._read(op, chunk)):
            return False
        if not self._unanswered:
            self._heard_at = time.monotonic()
        self._unanswered[op] = chunk
        return True

    def _write(self, op: int, chunk: Chunk) -> bool:
        key = chunk.transfer.key
        digest = chunk.compute_digest()
        header = Write(op, key.region, key.token, chunk.offset, chunk.length, digest)
        view = chunk.view()
        use = self.lane.send_view(encode(header), view)
        if use is None:
            view.release()
            return False
        chunk.transfer.hold(use)
        return True

    def _read(self, op: int, chunk: Chunk) -> bool:
        key = chunk.transfer.key
        header = Read(op, key.region, key.token, chunk.offset, chunk.length)
        return self.lane.send(encode(header))

    def answer(self, answer: Answer, payload: Payload | None) -> None:
        """Handle an answer on this connection, and its payload."""
        self._heard_at = time.monotonic()
        if isinstance(answer, Ack):
            self.window = max(1, answer.window)
            self._acked(answer)
        elif isinstance(answer, Data):
            self.window = max(1, answer.window)
            self._arrived(answer, payload)
        elif isinstance(answer, FaultReply) and answer.fault == "open":
            self.lose_all()
            self.lane.reopen()
        elif isinstance(answer, FaultReply):
            chunk = self._take(answer.op)
            if chunk is not None:
                self._owner.chunk_failed(chunk, answer.fault, answer.detail)
        elif isinstance(answer, Probed):
            self._lose_before(answer.op)
        else:
            self._owner.garbage("an unexpected answer")

    def _take(self, op: int) -> Chunk | None:
        """The chunk that is answered; those before it are lost. None if it is not known (any more)."""
        if op not in self._unanswered:
            return None
        self._lose_before(op)
        return self._unanswered.pop(op)

    def _lose_before(self, op: int) -> None:
        for earlier in [number for number in self._unanswered if number < op]:
            self._owner.chunk_lost(self._unanswered.pop(earlier))

    def _acked(self, answer: Ack) -> None:
        chunk = self._unanswered.get(answer.op)
        if chunk is None:
            return  # late: the chunk was given up
        if not chunk.transfer.is_put or chunk.digest != answer.digest:
            self._owner.garbage("an acknowledgement with another digest")
            return
        self._take(answer.op)
        self._owner.chunk_done(chunk)

    def _arrived(self, answer: Data, payload: Payload | None) -> None:
        chunk = self._take(answer.op)
        if chunk is None or chunk.transfer.outcome is not None:
            return
        if chunk.transfer.is_put or payload is None or payload.size_bytes != chunk.length:
            self._owner.chunk_damaged(chunk)
            return
        if payload.digest(chunk.transfer.key.region, chunk.offset) != answer.digest:
            self._owner.chunk_damaged(chunk)
            return
        payload.copy_into(chunk.view())
        self._owner.chunk_done(chunk)

    def due_s(self, now_s: float) -> float:
        if not self._unanswered:
            return float("inf")
        quiet_s = now_s - self._heard_at
        if quiet_s >= PROBE_AFTER_S:
            self._heard_at, quiet_s = now_s, 0.0
            self.lane.send(encode(Probe(next(self._numbers))))
        return PROBE_AFTER_S - quiet_s
