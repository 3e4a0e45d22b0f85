"""Messages between two fabrics: header frames (msgpack arrays with a small tag), digests, and payload frames.

A message is a header frame and, for `Write`, `Data`, `Request` and `Reply`, a payload. Frames of one
connection stay in order and are handled in order, in both directions; so an answer shows that every earlier
unanswered operation was lost. ``op`` is chosen by the asking side and means nothing to the other.

A digest is xxh3_64 of the chunk, seeded with the chunk's place. A header whose offset or region was damaged
fails the comparison too, and an `Ack` repeats the digest, so that it cannot be taken for another's.

A payload travels in frames of at most `FRAME_BYTES`. libzmq makes room for a whole frame as soon as its
length is announced, and has one limit for all frames of a socket, also for those that come before anybody has
shown a key. So the largest frame is what a stranger can have us keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, TypeVar

import msgspec
import xxhash
import zmq
from msgspec import Meta, Struct

from ckptd.unpacking import unpack

PROTOCOL = 2
MAX_HEADER_BYTES = 1024
MAX_CHUNK_BYTES = 16 << 20
MAX_BODY_BYTES = 32 << 20
FRAME_BYTES = 256 << 10
MAX_WIRE_FRAME_BYTES = FRAME_BYTES + 1024  # leaves room for what CURVE adds, and for a header frame
MAX_FRAMES = 1 + MAX_BODY_BYTES // FRAME_BYTES  # of a message, its header included
MAX_NUMBER = 1 << 62  # the first number that is too large

Number = Annotated[int, Meta(ge=0, lt=MAX_NUMBER)]
Size = Annotated[int, Meta(ge=0, le=MAX_CHUNK_BYTES)]
Digest = Annotated[int, Meta(ge=0)]
Token = Annotated[bytes, Meta(min_length=16, max_length=16)]
Node = Annotated[str, Meta(max_length=128)]
Short = Annotated[str, Meta(max_length=500)]
Slot = Annotated[bytes, Meta(min_length=16, max_length=16)]
Random = Annotated[bytes, Meta(min_length=32, max_length=32)]


class Open(Struct, frozen=True, array_like=True, gc=False, tag=1):
    """First on a connection: who asks, whom it means to reach, and whether chunks will follow."""

    protocol: int
    node: Node
    target: Node
    data: bool


class Write(Struct, frozen=True, array_like=True, gc=False, tag=2):
    """The payload belongs at ``offset``."""

    op: Number
    region: Number
    token: Token
    offset: Number
    length: Size
    digest: Digest


class Read(Struct, frozen=True, array_like=True, gc=False, tag=3):
    op: Number
    region: Number
    token: Token
    offset: Number
    length: Size


class Probe(Struct, frozen=True, array_like=True, gc=False, tag=4):
    """Answered in its turn: every earlier operation that is unanswered by then was lost."""

    op: Number


class Request(Struct, frozen=True, array_like=True, gc=False, tag=5):
    op: Number


class Opened(Struct, frozen=True, array_like=True, gc=False, tag=6):
    """The peer may ask, and have ``window`` unanswered chunks on this connection."""

    protocol: int
    node: Node
    window: Number


class Refuse(Struct, frozen=True, array_like=True, gc=False, tag=7):
    """The peer may not ask; the connection is of no use."""

    protocol: int
    detail: Short


class Ack(Struct, frozen=True, array_like=True, gc=False, tag=8):
    op: Number
    digest: Digest
    window: Number


class Data(Struct, frozen=True, array_like=True, gc=False, tag=9):
    op: Number
    digest: Digest
    window: Number


class FaultReply(Struct, frozen=True, array_like=True, gc=False, tag=10):
    """Not done. ``fault`` is a `Fault`, or "open": the server does not know this connection (any more)."""

    op: Number
    fault: Short
    detail: Short


class Probed(Struct, frozen=True, array_like=True, gc=False, tag=11):
    op: Number


class Reply(Struct, frozen=True, array_like=True, gc=False, tag=12):
    op: Number


class Dial(Struct, frozen=True, array_like=True, gc=False, tag=13):
    """Ask for a stream for chunks. ``slot`` names it; an earlier stream of that name is ended before the
    answer.

    ``ciphers`` are those that the asker accepts (`sealing.Cipher`), ``secret`` is its part of the keys.
    """

    op: Number
    slot: Slot
    ciphers: Annotated[tuple[Annotated[int, Meta(ge=0, lt=256)], ...], Meta(max_length=16)]
    secret: Random


class Ticket(Struct, frozen=True, array_like=True, gc=False, tag=14):
    """Where to connect, and the 32 random bytes to show there, once, within seconds. ``cipher`` is one of the
    offered ones.
    """

    op: Number
    host: Node
    port: Annotated[int, Meta(ge=1, lt=1 << 16)]
    ticket: Random
    cipher: Annotated[int, Meta(ge=0, lt=256)]
    secret: Random


Ask = Open | Write | Read | Probe | Request | Dial
Answer = Opened | Refuse | Ack | Data | FaultReply | Probed | Reply | Ticket

_encoder = msgspec.msgpack.Encoder()
_asks: msgspec.msgpack.Decoder[Ask] = msgspec.msgpack.Decoder(Ask)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)

encode = _encoder.encode
T = TypeVar("T")


def decode_ask(header: bytes | memoryview) -> Ask:
    """Decode a message of the asking side.

    Raises:
        ValueError: it is none of the messages above.
    """
    return _decode(_asks, header)


def decode_answer(header: bytes | memoryview) -> Answer:
    """Decode a message of the answering side.

    Raises:
        ValueError: it is none of the messages above.
    """
    return _decode(_answers, header)


def _decode(decoder: msgspec.msgpack.Decoder[T], header: bytes | memoryview) -> T:
    try:
        return unpack(decoder, header, max_bytes=MAX_HEADER_BYTES)
    except ValueError as error:
        raise ValueError(f"not a header: {error}") from error


def digest_of(data: memoryview, region: int, offset: int) -> int:
    """xxh3_64 of a chunk that belongs at ``offset`` of ``region``."""
    return xxhash.xxh3_64_intdigest(data, seed=seed_of(region, offset, len(data)))


def seed_of(region: int, offset: int, length: int) -> int:
    return (region * 0x9E3779B97F4A7C15 + offset * 0xC2B2AE3D27D4EB4F + length) & (1 << 64) - 1


# -- Payloads ------------------------------------------------------------------------------------


class Payload:
    """The bytes behind a header. Its frames are libzmq's memory."""

    __slots__ = ("_frames", "size_bytes")

    def __init__(self, frames: Sequence[zmq.Frame]) -> None:
        self._frames = frames
        self.size_bytes = sum(map(len, frames))

    def join(self) -> bytes:
        return b"".join(frame.buffer for frame in self._frames)

    def digest(self, region: int, offset: int) -> int:
        """Like `digest_of`."""
        made = xxhash.xxh3_64(seed=seed_of(region, offset, self.size_bytes))
        for frame in self._frames:
            made.update(frame.buffer)
        return made.intdigest()

    def copy_into(self, target: memoryview) -> None:
        """Copy into ``target``, which has the same length and is released."""
        at = 0
        with target, target.cast("B") as flat:
            for frame in self._frames:
                flat[at : at + len(frame)] = frame.buffer
                at += len(frame)


class BufferUse:
    """An engine's use of a part of a buffer. ``view`` is released once ``gone`` returns true."""

    __slots__ = ("_gone", "_view", "ended")

    def __init__(self, view: memoryview, gone: Callable[[], bool]) -> None:
        self._view = view
        self._gone = gone
        self.ended = False

    def over(self) -> bool:
        if not self.ended and self._gone():
            try:
                self._view.release()
                self.ended = True
            except BufferError:  # the engine reported it a moment before it let go
                return False
        return self.ended


def bytes_of(buffer: memoryview, *, writable: bool) -> memoryview:
    """The same memory as a flat view of bytes.

    Raises:
        ValueError: not contiguous, or read-only although it is to be written.
    """
    if not buffer.c_contiguous:
        raise ValueError("a buffer must be contiguous")
    if writable and buffer.readonly:
        raise ValueError("a buffer that is to be written is read-only")
    if buffer.nbytes == 0:
        return memoryview(bytearray())
    return buffer.cast("B")


def send_copy(socket: zmq.Socket[bytes], head: Sequence[bytes], body: bytes) -> None:
    """Send the frames of ``head``, then the body, which libzmq copies.

    Raises:
        zmq.ZMQError: there is no room, or no peer. Nothing of the message is sent.
    """
    _send_all(socket, [*head, *_payload_frames(memoryview(body))], socket.send)


def send_view(
    socket: zmq.Socket[bytes], head: Sequence[bytes], view: memoryview, *, encrypted: bool
) -> BufferUse:
    """Send the frames of ``head``, then ``view`` without a copy; the result says when ``view`` is free again.

    Without encryption libzmq has the kernel read the payload, and aborts the process if the payload is in a
    file that was truncated meanwhile. Then a copy is sent.

    Raises:
        zmq.ZMQError: as `send_copy`.
    """
    frames = list(_payload_frames(view if encrypted else memoryview(bytes(view))))
    trackers: list[zmq.MessageTracker] = []

    def send(part: bytes | memoryview, flags: int) -> None:
        if isinstance(part, bytes):
            socket.send(part, flags)
            return
        tracker = socket.send(part, flags, copy=False, track=True)
        assert tracker is not None
        trackers.append(tracker)

    def gone() -> bool:
        if not all(tracker.done for tracker in trackers):
            return False
        try:
            for frame in frames:
                frame.release()
        except BufferError:  # libzmq reported it a moment before it let go
            return False
        return True

    _send_all(socket, [*head, *frames], send)
    return BufferUse(view, gone)


def _payload_frames(view: memoryview) -> Iterator[memoryview]:
    """At least one, which may be empty."""
    for at in range(0, max(1, len(view)), FRAME_BYTES):
        yield view[at : at + FRAME_BYTES]


def _send_all(
    socket: zmq.Socket[bytes],
    parts: Sequence[bytes | memoryview],
    send: Callable[[bytes | memoryview, int], object],
) -> None:
    failed: zmq.ZMQError | None = None
    for index, part in enumerate(parts):
        more = zmq.SNDMORE if index + 1 < len(parts) else 0
        try:
            send(part, zmq.DONTWAIT | more)
        except zmq.ZMQError as error:
            if index == 0:
                raise
            # The connection broke in the middle. libzmq drops the rest of the message, but must be given it.
            failed = failed or error
    if failed is not None:
        raise failed
