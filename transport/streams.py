"""Bytes over a TCP connection whose both ends are ours: whole headers, and payloads that are hashed while they pass.

Calls block, up to `STALL_S` without a byte moving. Any other thread may break the connection off with `shut`, which wakes
them. Payloads go straight from and into the buffer that they belong to; no call keeps a view of it.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from contextlib import suppress

import xxhash

from ckptd.transport.frames import seed_of
from ckptd.transport.stream_frames import TRAILER

__all__ = [
    "STALL_S",
    "PayloadDigest",
    "configure",
    "drain",
    "receive_header",
    "receive_into",
    "receive_payload",
    "send_buffers",
    "send_payload",
    "set_patience",
    "shut",
]

STALL_S = 10.0  # a peer that takes or gives nothing for so long is gone
# A piece is hashed and sent, or received and hashed, while it lies in the second level cache. Pieces of 64 KiB cost more in
# calls, those of 4 MiB fall out of it: 2.5, 2.9 and 2.2 GB/s with 64, 512 and 4096 KiB (digests on both sides, two cores).
PIECE_BYTES = 512 << 10


def configure(connection: socket.socket) -> None:
    """Send at once, notice a peer that is gone. Buffers are left to the kernel, which grows them further than it lets us."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALL_S * 1000))
    set_patience(connection, STALL_S)


def set_patience(connection: socket.socket, seconds: float) -> None:
    """How long a call may wait for the peer. Not Python's timeout, which makes each call two."""
    limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1_000_000))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def shut(connection: socket.socket) -> None:
    """Break it off, from any thread: whoever waits for it wakes up. Its owner still has to close it."""
    with suppress(OSError):  # it was never connected, or is gone already
        connection.shutdown(socket.SHUT_RDWR)


class PayloadDigest:
    """The digest of a chunk whose bytes pass piece by piece."""

    __slots__ = ("_hash",)

    def __init__(self, region: int, offset: int, length: int) -> None:
        self._hash = xxhash.xxh3_64(seed=seed_of(region, offset, length))

    def update(self, piece: memoryview) -> None:
        self._hash.update(piece)

    @property
    def value(self) -> int:
        return self._hash.intdigest()


# --- sending ---------------------------------------------------------------------------------------------


def send_buffers(connection: socket.socket, buffers: Sequence[bytes | memoryview]) -> None:
    """All of them, in order.

    Raises:
        OSError: the connection is gone, or its peer takes nothing.
    """
    size = sum(len(buffer) for buffer in buffers)
    sent = connection.sendmsg(buffers)
    if sent == size:
        return
    for buffer in buffers:
        if sent < len(buffer):
            with memoryview(buffer)[sent:] as rest:
                connection.sendall(rest)
        sent = max(0, sent - len(buffer))


def send_payload(
    connection: socket.socket, header: bytes, payload: memoryview, digest: PayloadDigest
) -> None:
    """A header, the bytes behind it, and their digest.

    Raises:
        OSError: the connection is gone, or its peer takes nothing.
    """
    head: list[bytes] = [header]
    for at in range(0, len(payload), PIECE_BYTES):
        with payload[at : at + PIECE_BYTES] as piece:
            digest.update(piece)
            if at + PIECE_BYTES >= len(payload):
                send_buffers(connection, [*head, piece, TRAILER.pack(digest.value)])
                return
            send_buffers(connection, [*head, piece])
        head = []
    send_buffers(connection, [*head, TRAILER.pack(digest.value)])


# --- receiving -------------------------------------------------------------------------------------------


def receive_header(connection: socket.socket, header: memoryview) -> bool:
    """Fill ``header``, however long the first byte of it takes; false if the peer ended the connection before.

    Raises:
        OSError: the connection is gone, or a header began and does not end.
    """
    while True:
        try:
            count = connection.recv_into(header, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            continue  # nobody asks for anything; a peer that is gone is found by keep-alives
        if count == 0:
            return False
        if count < len(header):
            with header[count:] as rest:
                receive_into(connection, rest)
        return True


def receive_into(connection: socket.socket, target: memoryview) -> None:
    """Fill ``target``.

    Raises:
        OSError: the connection ended, or nothing comes.
    """
    at = 0
    while at < len(target):
        with target[at:] as rest:
            count = connection.recv_into(rest, 0, socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionResetError("the connection ended within a message")
        at += count


def receive_payload(connection: socket.socket, target: memoryview, digest: PayloadDigest) -> bool:
    """Fill ``target``; whether it matches the digest that follows.

    Raises:
        OSError: the connection ended, or nothing comes; ``target`` holds a part.
    """
    for at in range(0, len(target), PIECE_BYTES):
        with target[at : at + PIECE_BYTES] as piece:
            receive_into(connection, piece)
            digest.update(piece)
    trailer = bytearray(TRAILER.size)
    receive_into(connection, memoryview(trailer))
    return TRAILER.pack(digest.value) == trailer


def drain(connection: socket.socket, length: int, scratch: memoryview) -> None:
    """Throw away a payload and its digest.

    Raises:
        OSError: the connection ended, or nothing comes.
    """
    left = length + TRAILER.size
    while left:
        with scratch[: min(left, len(scratch))] as piece:
            receive_into(connection, piece)
            left -= len(piece)
