"""Bytes over a TCP connection between two of our nodes: whole headers, and payloads that are sealed or hashed
on the way.

Each direction has a `StreamSender` at one end and a `StreamReceiver` at the other, of the same kind: records
of `ckptd.transport.tcp.sealing`, or plaintext with digests. Calls block, up to `STALL_S` without a byte
moving. Any other thread may break the connection off with `shut`, which wakes them. Payloads go straight from
and into their buffer; no call keeps a view of it.

All calls raise OSError if the connection ended or nothing moves in time, and `Forged` if an attacker's bytes
came.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import xxhash

from ckptd.transport.fabric.frames import seed_of
from ckptd.transport.tcp.sealing import RECORD_BYTES, TAG_BYTES, StreamKey
from ckptd.transport.tcp.stream_frames import TRAILER

STALL_S = 10.0  # a peer that takes or sends nothing for so long is gone
# A piece is hashed and sent, or received and hashed, while it is in the second level cache. Pieces of 64 KiB
# cost more in calls, those of 4 MiB fall out of the cache: 2.5, 2.9 and 2.2 GB/s with 64, 512 and 4096 KiB
# (digests on both sides, two cores).
PIECE_BYTES = 512 << 10
SCRATCH_BYTES = 64 << 10


def configure(connection: socket.socket) -> None:
    """Send at once, notice a peer that is gone. The kernel sizes the buffers: it grows them further than it
    lets us.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALL_S * 1000))
    set_patience(connection, STALL_S)


def set_patience(connection: socket.socket, seconds: float) -> None:
    """How long a call may wait for the peer. Not Python's timeout, which makes two calls of each."""
    limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1_000_000))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def shut(connection: socket.socket) -> None:
    """Break the connection off, from any thread, and wake its users. Its owner still has to close it."""
    with suppress(OSError):  # never connected, or gone already
        connection.shutdown(socket.SHUT_RDWR)


class PayloadDigest:
    """The digest of a chunk whose bytes pass piece by piece. Of a sealed chunk it covers only the place, no
    bytes.
    """

    __slots__ = ("_hash",)

    def __init__(self, region: int, offset: int, length: int) -> None:
        self._hash = xxhash.xxh3_64(seed=seed_of(region, offset, length))

    def update(self, piece: memoryview) -> None:
        self._hash.update(piece)

    @property
    def value(self) -> int:
        return self._hash.intdigest()


class StreamSender(Protocol):
    """The sending end of one direction. One thread."""

    def send(self, header: bytes, detail: bytes = b"") -> None:
        """Send a header, and the short detail that it announces."""

    def send_payload(self, header: bytes, payload: memoryview, digest: PayloadDigest) -> None:
        """Send a header and its payload."""


class StreamReceiver(Protocol):
    """The receiving end of one direction: the same lengths in the same order. One thread."""

    def receive_header(self, header: memoryview) -> bool:
        """Fill ``header``, however long its first byte takes; false if the peer ended the connection
        before.
        """

    def receive(self, length: int) -> bytes:
        """Receive a header or a detail that has to come now."""

    def receive_payload(self, target: memoryview, digest: PayloadDigest) -> bool:
        """Fill ``target``; returns whether it arrived undamaged.

        If this raises, ``target`` holds a part, of authenticated bytes only if the stream is sealed.
        """

    def drain(self, length: int) -> None:
        """Throw a payload away."""


def sender_of(connection: socket.socket, key: StreamKey | None) -> StreamSender:
    return PlainSender(connection) if key is None else SealedSender(connection, key)


def receiver_of(connection: socket.socket, key: StreamKey | None) -> StreamReceiver:
    return PlainReceiver(connection) if key is None else SealedReceiver(connection, key)


# --- plaintext -------------------------------------------------------------------------------------------


class PlainSender:
    """Implements `StreamSender`: a payload is followed by its digest."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, header: bytes, detail: bytes = b"") -> None:
        self._connection.sendall(header + detail)

    def send_payload(self, header: bytes, payload: memoryview, digest: PayloadDigest) -> None:
        head: list[bytes] = [header]
        for at in range(0, len(payload), PIECE_BYTES):
            with payload[at : at + PIECE_BYTES] as piece:
                digest.update(piece)
                if at + PIECE_BYTES >= len(payload):
                    _send_buffers(self._connection, [*head, piece, TRAILER.pack(digest.value)])
                    return
                _send_buffers(self._connection, [*head, piece])
            head = []
        _send_buffers(self._connection, [*head, TRAILER.pack(digest.value)])


class PlainReceiver:
    """Implements `StreamReceiver`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))

    def receive_header(self, header: memoryview) -> bool:
        return _receive_first(self._connection, header)

    def receive(self, length: int) -> bytes:
        detail = bytearray(length)
        receive_into(self._connection, memoryview(detail))
        return bytes(detail)

    def receive_payload(self, target: memoryview, digest: PayloadDigest) -> bool:
        for at in range(0, len(target), PIECE_BYTES):
            with target[at : at + PIECE_BYTES] as piece:
                receive_into(self._connection, piece)
                digest.update(piece)
        return TRAILER.pack(digest.value) == self.receive(TRAILER.size)

    def drain(self, length: int) -> None:
        left = length + TRAILER.size
        while left:
            with self._scratch[: min(left, len(self._scratch))] as piece:
                receive_into(self._connection, piece)
                left -= len(piece)


# --- sealed ----------------------------------------------------------------------------------------------


class SealedSender:
    """Implements `StreamSender`: a record for a header, one for a detail, one for each `RECORD_BYTES` of a
    payload.

    Only headers contain lengths, so the receiver knows the end of each record before it comes.
    """

    def __init__(self, connection: socket.socket, key: StreamKey) -> None:
        self._connection, self._key = connection, key
        self._record = memoryview(b"")

    def send(self, header: bytes, detail: bytes = b"") -> None:
        self._connection.sendall(self._sealed(header) + (self._sealed(detail) if detail else b""))

    def send_payload(self, header: bytes, payload: memoryview, digest: PayloadDigest) -> None:
        head: list[bytes | memoryview] = [self._sealed(header)]
        if not self._record:
            self._record = memoryview(bytearray(RECORD_BYTES + TAG_BYTES))
        for at in range(0, len(payload), RECORD_BYTES):
            with payload[at : at + RECORD_BYTES] as piece:
                record = self._record[: len(piece) + TAG_BYTES]
                self._key.seal(piece, record)
            _send_buffers(self._connection, [*head, record])
            head = []
        if head:
            _send_buffers(self._connection, head)

    def _sealed(self, content: bytes) -> bytes:
        record = bytearray(len(content) + TAG_BYTES)
        self._key.seal(content, memoryview(record))
        return bytes(record)


class SealedReceiver:
    """Implements `StreamReceiver`. No part of a record is used before all of it was authenticated."""

    def __init__(self, connection: socket.socket, key: StreamKey) -> None:
        self._connection, self._key = connection, key
        self._record = memoryview(b"")

    def receive_header(self, header: memoryview) -> bool:
        record = memoryview(bytearray(len(header) + TAG_BYTES))
        if not _receive_first(self._connection, record):
            return False
        self._key.open(record, header)
        return True

    def receive(self, length: int) -> bytes:
        if not length:
            return b""
        record = memoryview(bytearray(length + TAG_BYTES))
        receive_into(self._connection, record)
        self._key.open(record, record[:length])
        return bytes(record[:length])

    def receive_payload(self, target: memoryview, digest: PayloadDigest) -> bool:
        for at in range(0, len(target), RECORD_BYTES):
            with target[at : at + RECORD_BYTES] as piece:
                self._key.open(self._receive_record(len(piece)), piece)
        return True

    def drain(self, length: int) -> None:
        for at in range(0, length, RECORD_BYTES):
            size = min(RECORD_BYTES, length - at)
            record = self._receive_record(size)
            self._key.open(record, record[:size])

    def _receive_record(self, size: int) -> memoryview:
        if not self._record:
            self._record = memoryview(bytearray(RECORD_BYTES + TAG_BYTES))
        record = self._record[: size + TAG_BYTES]
        receive_into(self._connection, record)
        return record


# --- bytes -----------------------------------------------------------------------------------------------


def _send_buffers(connection: socket.socket, buffers: Sequence[bytes | memoryview]) -> None:
    """Send all of them, in order."""
    size = sum(len(buffer) for buffer in buffers)
    sent = connection.sendmsg(buffers)
    if sent == size:
        return
    for buffer in buffers:
        if sent < len(buffer):
            with memoryview(buffer)[sent:] as rest:
                connection.sendall(rest)
        sent = max(0, sent - len(buffer))


def _receive_first(connection: socket.socket, target: memoryview) -> bool:
    """Fill ``target``, however long its first byte takes; false if the connection ended before."""
    while True:
        try:
            count = connection.recv_into(target, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            continue  # no ask came; keep-alives find a peer that is gone
        if count == 0:
            return False
        if count < len(target):
            with target[count:] as rest:
                receive_into(connection, rest)
        return True


def receive_into(connection: socket.socket, target: memoryview) -> None:
    """Fill ``target``."""
    at = 0
    while at < len(target):
        with target[at:] as rest:
            count = connection.recv_into(rest, 0, socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionResetError("the connection ended within a message")
        at += count
