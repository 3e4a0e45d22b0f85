"""The bytes behind a header, on their way through ZeroMQ: in frames of `FRAME_BYTES` at most.

libzmq makes room for a whole frame as soon as its length is announced, and it has one limit for all
frames of a socket, also for those that come before anybody has shown a key. So the largest frame is
what a stranger can have us keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import xxhash
import zmq

from ckptd.transport.fabric.frames import MAX_BODY_BYTES, seed_of

__all__ = ["FRAME_BYTES", "MAX_FRAMES", "MAX_WIRE_FRAME_BYTES", "Payload", "send_copy", "send_view"]

FRAME_BYTES = 256 << 10
MAX_WIRE_FRAME_BYTES = FRAME_BYTES + 1024  # what CURVE adds, and a header frame, fit in
MAX_FRAMES = 1 + MAX_BODY_BYTES // FRAME_BYTES  # of a message, its header included

Gone = Callable[[], bool]


class Payload:
    """What came behind a header. Its frames are libzmq's memory."""

    __slots__ = ("_frames", "size_bytes")

    def __init__(self, frames: Sequence[zmq.Frame]) -> None:
        self._frames = frames
        self.size_bytes = sum(map(len, frames))

    def join(self) -> bytes:
        return b"".join(frame.buffer for frame in self._frames)

    def digest(self, region: int, offset: int) -> int:
        """As `frames.digest_of`."""
        made = xxhash.xxh3_64(seed=seed_of(region, offset, self.size_bytes))
        for frame in self._frames:
            made.update(frame.buffer)
        return made.intdigest()

    def copy_into(self, target: memoryview) -> None:
        """``target`` has the same length, and is used up."""
        at = 0
        with target, target.cast("B") as flat:
            for frame in self._frames:
                flat[at : at + len(frame)] = frame.buffer
                at += len(frame)


def send_copy(socket: zmq.Socket[bytes], head: Sequence[bytes], body: bytes) -> None:
    """A message that libzmq keeps a copy of: the frames of ``head``, then the body.

    Raises:
        zmq.ZMQError: there is no room, or nobody there. Nothing of the message is sent.
    """
    view = memoryview(body)
    _send_all(socket, [*head, *_pieces(view)], lambda part, flags: socket.send(part, flags))


def send_view(socket: zmq.Socket[bytes], head: Sequence[bytes], view: memoryview) -> Gone:
    """A message whose payload is not copied. What is returned says when nothing refers to ``view`` any more.

    Raises:
        zmq.ZMQError: as `send_copy`.
    """
    pieces = list(_pieces(view))
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
            for piece in pieces:
                piece.release()
        except BufferError:  # libzmq said so a moment before it let go
            return False
        return True

    _send_all(socket, [*head, *pieces], send)
    return gone


def _pieces(view: memoryview) -> Iterator[memoryview]:
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
            # The connection went in the middle. libzmq drops what is left of the message, but wants
            # to be given it.
            failed = failed or error
    if failed is not None:
        raise failed
