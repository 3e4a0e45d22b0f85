"""One ZeroMQ connection to a peer: connects, and connects again, and says when it may be used.

States: DOWN (not connected) → OPENING (connected, `Open` sent) → UP (`Opened` came) → DOWN when the
connection breaks; REFUSED when the peer does not want us, until `restart`. Everything runs on the
fabric's thread.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import zmq
from zmq.utils.monitor import recv_monitor_message

from ckptd.transport.fabric.frames import PROTOCOL, Open, encode
from ckptd.transport.fabric.payloads import MAX_WIRE_FRAME_BYTES, send_copy, send_view

__all__ = ["HEARTBEAT_MS", "HEARTBEAT_TIMEOUT_MS", "Lane", "LaneEvents", "LaneState", "Wiring"]

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
