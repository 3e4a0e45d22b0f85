"""The answering side of a fabric: checks who asks, and reads or writes the regions that the peer may touch.

A connection must be opened before anything else (`Open`). With keys, the key of the connection decides who
the peer is, and is compared again with every message. A peer whose connection was dropped from the table
opens it again when it gets the fault "open", so the table may be bounded.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from ckptd.transport.access.doorkeeper import Doorkeeper, fd_of_frame, source_of_frame
from ckptd.transport.fabric import frames as f
from ckptd.transport.fabric.frames import MAX_FRAMES, BufferUse, Payload, send_copy, send_view
from ckptd.transport.fabric.lanes import FabricParts
from ckptd.transport.fabric.regions import Refusal
from ckptd.transport.verbs import Access, Fault, Serve

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 4096
MAX_WINDOW = 8  # chunks; more make no connection faster, and fall out of the cache
ACTIVE_S = 5.0

Frames = Sequence[zmq.Frame]
# Grants a stream: the asking connection, its request, and how to answer (any thread). Raises `Refusal`.
GrantDial = Callable[["Connection", f.Dial, Callable[[f.Ticket], None]], None]


@dataclass(slots=True)
class Connection:
    """The peer of a connection. ``key`` is "" without authentication, ``source`` the address as `source_of`
    returns it.
    """

    node: str
    key: str
    data: bool
    heard_at: float
    source: str = ""
    fd: int = -1


class Server:
    """Answers messages, one at a time, on the fabric's thread; never raises.

    Args:
        serve: answers the requests of peers.
        dial: grants streams; None: chunks come over ZeroMQ only.
    """

    def __init__(
        self,
        parts: FabricParts,
        router: zmq.Socket[bytes],
        door: Doorkeeper,
        serve: Serve,
        dial: GrantDial | None,
    ) -> None:
        self.dial = dial
        self._parts, self._router, self._door, self._serve = parts, router, door, serve
        self._connections: OrderedDict[bytes, Connection] = OrderedDict()
        self._window = MAX_WINDOW
        self._window_until = 0.0

    def message(self, frames: Frames) -> None:
        """Handle one message from the network."""
        if len(frames) > 1 + MAX_FRAMES:
            self._door.cut(fd_of_frame(frames[1]), f"a message of {len(frames)} frames")
            return
        identity = frames[0].bytes
        try:
            ask = _ask(frames)
        except ValueError as error:
            self._parts.refusals.seen(str(error), source_of_frame(frames[-1]))
            return
        payload = Payload(frames[2:]) if len(frames) > 2 else None
        key = _user_of(frames[1])
        if isinstance(ask, f.Open):
            self._open(frames[1], identity, key, ask)
            return
        connection = self._connections.get(identity)
        if connection is None or connection.key != key:
            self._answer(identity, f.FaultReply(ask.op, "open", "this connection was not opened"))
            return
        if not self._parts.trusts(connection.node, connection.key):
            self._revoke(identity, connection)
            return
        connection.heard_at = time.monotonic()
        self._asked(identity, connection, ask, payload)

    def _asked(self, identity: bytes, connection: Connection, ask: f.Ask, payload: Payload | None) -> None:
        try:
            if isinstance(ask, f.Write):
                self._write(identity, connection, ask, payload)
            elif isinstance(ask, f.Read):
                self._read(identity, connection, ask)
            elif isinstance(ask, f.Probe):
                self._answer(identity, f.Probed(ask.op))
            elif isinstance(ask, f.Request):
                self._request(identity, connection, ask, payload)
            elif isinstance(ask, f.Dial):
                self._dial(identity, connection, ask)
        except Refusal as refusal:
            self._parts.counters.refused += 1
            assert not isinstance(ask, f.Open)
            self._answer(identity, f.FaultReply(ask.op, refusal.fault.value, refusal.detail))

    def _open(self, header: zmq.Frame, identity: bytes, key: str, ask: f.Open) -> None:
        detail, source = self._objection(key, ask), source_of_frame(header)
        if detail:
            text = f"a peer that says it is {ask.node[:64]!r}: {detail}"
            self._parts.refusals.stranger("identity", source, text)
            self._answer(identity, f.Refuse(f.PROTOCOL, detail))
            return
        now_s = time.monotonic()
        fd = fd_of_frame(header)
        self._connections[identity] = Connection(ask.node, key, ask.data, now_s, source, fd)
        self._connections.move_to_end(identity)
        self._door.identified(fd, ask.node, source)
        if len(self._connections) > MAX_CONNECTIONS:
            self._connections.popitem(last=False)
        self._window_until = 0.0
        self._answer(identity, f.Opened(f.PROTOCOL, self._parts.node, self.window()))

    def _objection(self, key: str, ask: f.Open) -> str:
        """Why this peer is not let in; "" if it is."""
        if ask.protocol != f.PROTOCOL:
            return f"it speaks protocol version {ask.protocol}, this node version {f.PROTOCOL}"
        if ask.target not in ("", self._parts.node):
            return f"this is {self._parts.node}, not {ask.target}"
        if not self._parts.trusts(ask.node, key):
            return f"its key is not that of {ask.node}"
        return ""

    def revoke_untrusted(self) -> None:
        """End connections, also silent ones, whose key is not trusted any more."""
        for identity, connection in list(self._connections.items()):
            if not self._parts.trusts(connection.node, connection.key):
                self._revoke(identity, connection)

    def _revoke(self, identity: bytes, connection: Connection) -> None:
        del self._connections[identity]
        self._parts.counters.revoked += 1
        logger.warning("a connection of %s ended: its key is not trusted any more", connection.node)
        detail = f"the key of {connection.node} is not trusted any more"
        self._answer(identity, f.Refuse(f.PROTOCOL, detail))
        # The answer may come too late: then the peer is refused when it connects again.
        self._door.cut_node(connection.fd, connection.node)

    def window(self) -> int:
        """Unanswered chunks of each connection; all connections together stay within the credits."""
        now = time.monotonic()
        if now >= self._window_until:
            active = sum(
                connection.data and now - connection.heard_at < ACTIVE_S
                for connection in self._connections.values()
            )
            self._window = max(1, min(MAX_WINDOW, self._parts.credits // max(1, active)))
            self._window_until = now + 1.0
        return self._window

    def _write(self, identity: bytes, connection: Connection, ask: f.Write, payload: Payload | None) -> None:
        use = self._parts.regions.use(
            ask.region, ask.token, connection.node, Access.WRITE, ask.offset, ask.length
        )
        with use as (_, target):
            if payload is None or payload.size_bytes != ask.length:
                self._damaged(identity, ask.op)
                return
            if payload.digest(ask.region, ask.offset) != ask.digest:
                self._damaged(identity, ask.op)
                return
            payload.copy_into(target)
        self._parts.counters.received_bytes += ask.length
        self._answer(identity, f.Ack(ask.op, ask.digest, self.window()))

    def _damaged(self, identity: bytes, op: int) -> None:
        self._parts.counters.bad_digests += 1
        self._answer(identity, f.FaultReply(op, Fault.DIGEST.value, "the digest does not match"))

    def _read(self, identity: bytes, connection: Connection, ask: f.Read) -> None:
        use = self._parts.regions.use(
            ask.region, ask.token, connection.node, Access.READ, ask.offset, ask.length
        )
        with use as (region, view):
            digest = f.digest_of(view, ask.region, ask.offset)
            header = f.encode(f.Data(ask.op, digest, self.window()))
            sent = self._send_view(identity, header, view)
            if sent is not None:
                region.leaves(sent)
                self._parts.counters.served_bytes += ask.length

    def _request(
        self, identity: bytes, connection: Connection, ask: f.Request, payload: Payload | None
    ) -> None:
        if payload is None:
            self._parts.refusals.seen("a request without a body")
            return
        op = ask.op
        answered = False

        def answer(body: bytes) -> None:
            nonlocal answered
            if len(body) > f.MAX_BODY_BYTES:
                raise ValueError(f"an answer of {len(body)} bytes; at most {f.MAX_BODY_BYTES}")
            if not answered:
                answered = True
                header = f.encode(f.Reply(op))
                self._parts.call(lambda: self._send(identity, header, body))

        try:
            self._serve(connection.node, payload.join(), answer)
        except Exception:  # a user's callback: the loop that carries all transfers must survive it
            logger.exception("serving a request of %s failed", connection.node)

    def _dial(self, identity: bytes, connection: Connection, ask: f.Dial) -> None:
        if self.dial is None:
            raise Refusal(Fault.REFUSED, "this node has no data port")

        def answer(granted: f.Ticket) -> None:
            self._parts.call(lambda: self._answer(identity, granted))

        self.dial(connection, ask, answer)

    def _answer(self, identity: bytes, answer: f.Answer) -> None:
        self._send(identity, f.encode(answer), None)

    def _send(self, identity: bytes, header: bytes, body: bytes | None) -> None:
        """Dropped if the connection is gone or full: the peer asks again for what is lost."""
        try:
            if body is None:
                self._router.send(identity, zmq.DONTWAIT | zmq.SNDMORE)
                self._router.send(header, zmq.DONTWAIT)
            else:
                send_copy(self._router, [identity, header], body)
        except zmq.ZMQError as error:
            logger.debug("an answer was dropped: %s", error)

    def _send_view(self, identity: bytes, header: bytes, view: memoryview) -> BufferUse | None:
        try:
            encrypted = self._parts.curve is not None
            return send_view(self._router, [identity, header], view, encrypted=encrypted)
        except zmq.ZMQError as error:
            logger.debug("an answer was dropped: %s", error)
            return None


def _ask(frames: Frames) -> f.Ask:
    if len(frames) < 2:
        raise ValueError(f"{len(frames)} frames")
    return f.decode_ask(frames[1].buffer)


def _user_of(frame: zmq.Frame) -> str:
    """The public key that ZAP vouched for; "" without keys."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""
