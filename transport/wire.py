"""Framing of control messages, and the small synchronous client that speaks it.

A message is two frames: an envelope, msgpack of ``{"protocol": int, "id": int}``, whose shape never changes,
and a body, msgpack of one tagged struct of `ckptd.transport.messages`. A reply carries the id of its request.
Nothing read from a socket is trusted: whatever is not one of our messages raises `WireError`, never anything
else.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import Self, TypeVar

import msgspec
import zmq

from ckptd.transport.access.local_trust import LocalFileError, find_listener, own_users
from ckptd.transport.messages import (
    PROTOCOL_VERSION,
    Message,
    OneWay,
    Ping,
    Pong,
    Refused,
    Reply,
    Request,
)
from ckptd.unpacking import unpack

MAX_BODY_BYTES = 32 << 20  # a slot table with 100,000 operator names is about 10 MB
MAX_ENVELOPE_BYTES = 64
SEND_QUEUE = 256  # one-way messages kept while the daemon does not read
MAX_REFUSALS = 64
_LONG_S = 30.0  # who waits longer for an answer looks whether the daemon is the one that was asked
_ALIVE_S = 10.0
_LOOK_S = 0.02  # between two checks whether a daemon listens

ReplyT = TypeVar("ReplyT", bound=msgspec.Struct)


class WireError(ValueError):
    """Bytes that are none of our messages.

    ``code`` is one of: frames, envelope, protocol, oversize, body, unexpected, endpoint, or untrusted
    (nothing was read, because another process than the daemon may be behind the endpoint). ``envelope`` is
    set if it could be read, so that the peer can be answered.
    """

    def __init__(self, code: str, text: str, envelope: Envelope | None = None) -> None:
        super().__init__(text)
        self.code = code
        self.envelope = envelope


class RefusedError(RuntimeError):
    """The daemon understood the request, and refused it."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.code = code
        self.message = message
        self.hint = hint


class RequestTimeout(TimeoutError):
    """No answer in time; names the endpoint and the request.

    Args:
        why: why there will be none, if it was given up before ``timeout_s``.
    """

    def __init__(self, endpoint: str, request: str, timeout_s: float, why: str = "") -> None:
        how = f": {why}" if why else f" within {timeout_s:g} s"
        super().__init__(f"no answer from {endpoint} to {request}{how}")
        self.endpoint = endpoint
        self.request = request
        self.timeout_s = timeout_s


class Envelope(msgspec.Struct, frozen=True):
    """The first frame of every message, in every version of the protocol."""

    protocol: int
    id: int


_encoder = msgspec.msgpack.Encoder()
_envelope_decoder = msgspec.msgpack.Decoder(Envelope)
_body_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message_id: int, message: Message, *, protocol: int = PROTOCOL_VERSION) -> list[bytes]:
    """The frames of one message; ``message_id`` ties a reply to its request."""
    body = _encoder.encode(message)
    if len(body) > MAX_BODY_BYTES:
        raise WireError(
            "oversize",
            f"{type(message).__name__} of {len(body)} bytes; at most {MAX_BODY_BYTES} may be sent",
        )
    return [_encoder.encode(Envelope(protocol, message_id)), body]


def decode_envelope(frames: Sequence[bytes]) -> Envelope:
    """The envelope alone, also of another protocol version.

    Raises:
        WireError: not two frames, or the first is no envelope.
    """
    if len(frames) != 2:
        raise WireError("frames", f"a message has 2 frames, this one has {len(frames)}")
    if len(frames[0]) > MAX_ENVELOPE_BYTES:
        raise WireError("envelope", f"the envelope has {len(frames[0])} bytes")
    try:
        return unpack(_envelope_decoder, frames[0])
    except ValueError as error:
        raise WireError("envelope", f"not an envelope: {error}") from error


def decode(frames: Sequence[bytes]) -> tuple[Envelope, Message]:
    """The envelope and the message.

    Raises:
        WireError: this is no valid message of this protocol version.
    """
    envelope = decode_envelope(frames)
    if envelope.protocol != PROTOCOL_VERSION:
        text = (
            f"the peer speaks protocol version {envelope.protocol}, "
            f"this side speaks version {PROTOCOL_VERSION}"
        )
        raise WireError("protocol", text, envelope)
    body = frames[1]
    if len(body) > MAX_BODY_BYTES:
        text = f"a message of {len(body)} bytes; at most {MAX_BODY_BYTES} are read"
        raise WireError("oversize", text, envelope)
    try:
        return envelope, unpack(_body_decoder, body, max_bytes=MAX_BODY_BYTES)
    except ValueError as error:
        raise WireError("body", f"not a message: {error}", envelope) from error


def peer_process(frame: zmq.Frame) -> int:
    """The process that connected to the ipc socket on which this came, as the kernel says (``SO_PEERCRED``).

    0: it has no number in our pid namespace. -1: libzmq does not say. (It says "<host>:<uid>:<gid>:<pid>".)
    """
    return _credential(frame, -1)


def peer_user(frame: zmq.Frame) -> int:
    """The user of that process when it connected, likewise; -1: libzmq does not say."""
    return _credential(frame, -3)


def _credential(frame: zmq.Frame, place: int) -> int:
    try:
        address = frame.get("Peer-Address")
    except (KeyError, zmq.ZMQError):  # a libzmq that was built without it
        return -1
    parts = str(address).split(":")
    return int(parts[place]) if len(parts) >= 4 and parts[place].isdecimal() else -1


class ControlClient:
    """One connection to a daemon, for use from one thread.

    Nothing is said before the owner of the socket, of the folders on the way to it, and of the process behind
    it was checked (`ckptd.transport.access.local_trust`).

    Requests are answered in order or time out; a late answer to a request that timed out is dropped. While no
    daemon listens nothing is queued, so nothing stale arrives when one comes back. The connection then renews
    itself, but its session is gone (`Pong.attached`).

    Args:
        users: who may run the daemon; default: root and the user of this process.
    Raises:
        WireError: the endpoint cannot be used, or not be trusted.
    """

    def __init__(
        self,
        endpoint: str,
        timeout_s: float = 5.0,
        *,
        protocol: int = PROTOCOL_VERSION,
        users: Collection[int] = (),
    ) -> None:
        self.endpoint = endpoint
        self._users = frozenset(users) or own_users()
        self._connected = False
        self.timeout_s = timeout_s
        self._protocol = protocol
        self._ids = itertools.count(1)
        self._refusals: deque[RefusedError] = deque(maxlen=MAX_REFUSALS)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = SEND_QUEUE
        self._socket.immediate = True
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_BODY_BYTES)
        self._socket.setsockopt(zmq.ROUTING_ID, b"c" + secrets.token_bytes(15))
        try:
            self.try_connect()
        except BaseException:
            self.close()
            raise

    def request(
        self,
        message: Request,
        *,
        timeout_s: float | None = None,
        alive_s: float | None = None,
        boot_id: str = "",
    ) -> Reply:
        """Send a request, and wait for its answer.

        With ``alive_s``, for requests that take long, the daemon has to answer a ping in every such interval.
        So a daemon that hangs, or was restarted and does not know the request, is noticed: by the session
        that it does not know, or by another boot than ``boot_id``, for who has no session.

        Raises:
            RefusedError: the daemon refused.
            RequestTimeout: no answer in time (default: the client's ``timeout_s``).
            WireError: the answer is not a message of this protocol.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        name = type(message).__name__
        message_id = next(self._ids)
        if not self._send(message_id, message, deadline):
            raise RequestTimeout(self.endpoint, name, limit_s)
        ping_id, why = 0, ""
        while True:
            until = deadline if alive_s is None else min(deadline, time.monotonic() + alive_s)
            received = self._receive(until)
            if received is None:
                if until >= deadline or alive_s is None:
                    why = ""
                    break
                why = f"nor to a ping within {alive_s:g} s"
                if ping_id:
                    break
                ping_id = next(self._ids)
                if not self._send(ping_id, Ping(), until + alive_s):
                    break
                continue
            envelope, answer = received
            if ping_id and envelope.id == ping_id:
                ping_id, why = 0, ""
                if not isinstance(answer, Pong) or not (
                    answer.boot_id == boot_id if boot_id else answer.attached
                ):
                    why = "the daemon was restarted"
                    break
            elif envelope.id != message_id:
                self._keep_refusal(answer)
            elif isinstance(answer, Refused):
                raise RefusedError(answer.code, answer.message, answer.hint)
            elif isinstance(answer, Reply):
                return answer
            else:
                raise WireError(
                    "unexpected",
                    f"{self.endpoint} answered {name} with {type(answer).__name__}, not a reply",
                )
        raise RequestTimeout(self.endpoint, name, limit_s, why)

    def ask(self, message: Request, reply_type: type[ReplyT], *, timeout_s: float | None = None) -> ReplyT:
        """Like `request`, for an answer of the given type; if it may take long, for who has no session."""
        boot_id, alive_s = "", None
        if timeout_s is not None and timeout_s > _LONG_S:
            pong = self.ask(Ping(), Pong)
            boot_id, alive_s = pong.boot_id, _ALIVE_S
        answer = self.request(message, timeout_s=timeout_s, alive_s=alive_s, boot_id=boot_id)
        if not isinstance(answer, reply_type):
            raise WireError(
                "unexpected",
                f"{self.endpoint} answered {type(message).__name__} with {type(answer).__name__}",
            )
        return answer

    def send(self, message: OneWay) -> bool:
        """Send without waiting; false if no daemon is connected, or it has stopped reading."""
        return self._send(next(self._ids), message, time.monotonic())

    def refusals(self) -> list[RefusedError]:
        """Refusals of one-way messages that have arrived since the last call; never waits."""
        while (received := self._receive(time.monotonic())) is not None:
            self._keep_refusal(received[1])
        found = list(self._refusals)
        self._refusals.clear()
        return found

    def close(self) -> None:
        """Close the connection; unsent messages are dropped."""
        self._socket.close(linger=0)
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def try_connect(self) -> bool:
        """Connect once a trusted process listens; false while none does.

        From then on libzmq renews the connection by itself: the path was checked, and only root and trusted
        users can put another socket there.

        Raises:
            WireError: the endpoint cannot be used; ``untrusted``: another user may have made it.
        """
        try:
            if not self._connected and find_listener(self.endpoint, self._users):
                self._socket.connect(self.endpoint)
                self._connected = True
        except LocalFileError as error:
            raise WireError("untrusted", str(error)) from error
        except (OSError, ValueError, zmq.ZMQError) as error:
            text = f"cannot connect to {self.endpoint!r}: {error}"
            raise WireError("endpoint", text) from error
        return self._connected

    def _send(self, message_id: int, message: Message, deadline: float) -> bool:
        while not self.try_connect():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_S)
        frames = encode(message_id, message, protocol=self._protocol)
        wait_ms = max(0, round((deadline - time.monotonic()) * 1000))
        if not self._socket.poll(wait_ms, zmq.POLLOUT):
            return False
        try:
            self._socket.send_multipart(frames, flags=zmq.DONTWAIT)
        except zmq.Again:
            return False  # the connection went away between the poll and the send
        return True

    def _receive(self, deadline: float) -> tuple[Envelope, Message] | None:
        """The next message, or None at the deadline."""
        wait_ms = max(0, round((deadline - time.monotonic()) * 1000))
        if not self._socket.poll(wait_ms, zmq.POLLIN):
            return None
        return decode(self._socket.recv_multipart())

    def _keep_refusal(self, message: Message) -> None:
        """Drop a late answer, except a refusal: it may belong to a one-way message."""
        if isinstance(message, Refused):
            self._refusals.append(RefusedError(message.code, message.message, message.hint))
