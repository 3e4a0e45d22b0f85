"""A TCP proxy that damages what goes through it, in ways that are switched while it runs.

    with FaultProxy((host.address, 7000), listen=(cluster.address, 0)) as proxy:
        connect(proxy.address)
        proxy.delay_s = 0.2          # both directions; applies to what comes from now on
        proxy.cut()                  # reset every connection now; new ones are accepted

Bytes can be delayed, throttled, swallowed, changed and cut short; they cannot be duplicated or
reordered, since either side's kernel would see to it that they are not. Counting of bytes is per
direction of a connection.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Protocol, Self

__all__ = ["FaultProxy", "LastBytes", "Meddler"]

CHUNK_BYTES = 64 << 10
CONNECT_TIMEOUT_S = 10.0
JOIN_TIMEOUT_S = 10.0
LOOK_S = 0.2  # a blocked thread looks so often whether its connection was cut
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, zero seconds; `close` then sends RST


class LastBytes(bytes):
    """These are passed on, and the connection ends with them."""


class Meddler(Protocol):
    """One connection, as its attacker sees it. Each direction has a thread."""

    def up(self, data: bytes) -> bytes | None:
        """What is passed on to the target, of what came from the client; None ends the connection."""

    def down(self, data: bytes) -> bytes | None:
        """The other direction."""


class FaultProxy:
    """Forwards every connection to `target`, subject to the switches below; threads, two per connection.

    Args:
        target: (address, port) to forward to; looked up at each connection.
        listen: (address, port) to listen on; port 0 takes a free one.
    """

    delay_s: float = 0.0
    """Seconds that each chunk waits before it is passed on (latency of a long wire; order is kept)."""

    bytes_per_s: float | None = None
    """Throttle of each direction of each connection."""

    blackhole: bool = False
    """Accept connections and read what comes, and pass nothing on, either way."""

    refuse: bool = False
    """Reset new connections as soon as they are accepted."""

    corrupt_every: int | None = None
    """Flip a bit in every so-manieth byte of a direction, counted from when it was switched on."""

    truncate_after: int | None = None
    """Pass so many more bytes on in a direction, then end the connection in the middle of a chunk. Every
    connection counts from zero, at its beginning or, for those that exist, at the switch."""

    meddle: Callable[[], Meddler] | None = None
    """Called for each new connection: somebody who reads what passes and chooses what is passed on."""

    def __init__(self, target: tuple[str, int], *, listen: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.target = target
        self.num_connections = 0
        self.num_corrupted = 0
        self._listener = socket.create_server(listen)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._spawn(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Reset every connection and end the threads."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in `accept`
        self._listener.close()
        self.cut()
        for thread in list(self._threads):
            thread.join(JOIN_TIMEOUT_S)
            assert not thread.is_alive(), "a thread of the proxy does not end"

    def take(self, near: socket.socket, target: tuple[str, int]) -> None:
        """Forward a connection that was accepted elsewhere to `target`, subject to the same switches."""
        self.num_connections += 1
        if self.refuse:
            _reset(near)
        else:
            self._spawn(self._connect, near, target)

    def cut(self) -> None:
        """Reset all connections that exist now."""
        with self._lock:
            connections, self._open = self._open, set()
        for connection in connections:
            _reset(connection)

    def heal(self) -> None:
        """Switch everything off; what was swallowed stays lost."""
        self.delay_s, self.bytes_per_s = 0.0, None
        self.blackhole = self.refuse = False
        self.corrupt_every = self.truncate_after = None
        self.meddle = None

    def _spawn(self, target: object, *args: object) -> None:
        assert callable(target)
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError:
                return  # closed
            self.take(near, self.target)

    def _connect(self, near: socket.socket, target: tuple[str, int]) -> None:
        try:
            far = socket.create_connection(target, timeout=CONNECT_TIMEOUT_S)
        except OSError:
            _reset(near)  # as the target would have done itself
            return
        for end in (near, far):
            end.settimeout(LOOK_S)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._open |= {near, far}
        if self._closed.is_set():
            self.cut()
        meddler = self.meddle() if self.meddle is not None else None
        self._spawn(self._pump, near, far, None if meddler is None else meddler.up)
        self._spawn(self._pump, far, near, None if meddler is None else meddler.down)

    def _pump(
        self,
        source: socket.socket,
        sink: socket.socket,
        meddle: Callable[[bytes], bytes | None] | None,
    ) -> None:
        """One direction of one connection, to its end."""
        faults = _Direction(self)
        try:
            while data := self._receive(source, faults.chunk_bytes()):
                if self._closed.wait(faults.seconds_for(len(data))):
                    return
                if self.blackhole:
                    continue
                passed = faults.damaged(data)
                if meddle is not None:
                    chosen = meddle(data)
                    if chosen is None:
                        self._end(source, sink)
                        return
                    self._send(sink, chosen)
                    if isinstance(chosen, LastBytes):
                        self._end(source, sink)
                        return
                    continue
                self._send(sink, passed)
                if len(passed) < len(data):
                    self._end(source, sink)
                    return
            if self._is_open(source):  # else it was cut: no orderly end is passed on
                sink.shutdown(socket.SHUT_WR)
        except OSError:
            self._end(source, sink)  # one side was reset: so is the other

    def _is_open(self, connection: socket.socket) -> bool:
        with self._lock:
            return connection in self._open

    def _receive(self, source: socket.socket, size: int) -> bytes:
        """What comes next; empty at the end, and when the connection was cut meanwhile."""
        while self._is_open(source):
            with contextlib.suppress(TimeoutError):
                return source.recv(size)
        return b""

    def _send(self, sink: socket.socket, data: bytes) -> None:
        """All of it, however slowly the peer reads, unless the connection is cut meanwhile."""
        left = memoryview(data)
        while left and self._is_open(sink):
            with contextlib.suppress(TimeoutError):
                left = left[sink.send(left) :]

    def _end(self, *connections: socket.socket) -> None:
        with self._lock:
            ends = self._open.intersection(connections)  # what is being cut gets no orderly end
            self._open -= ends
        for connection in ends:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # what was sent still arrives, unlike with RST
            connection.close()


class _Direction:
    """The counters of one direction of a connection: what its next bytes suffer."""

    def __init__(self, proxy: FaultProxy) -> None:
        self._proxy = proxy
        self._corrupt_every: int | None = None
        self._until_corrupt = 0
        self._truncate_after: int | None = None
        self._left = 0
        self._free_at_s = 0.0

    def chunk_bytes(self) -> int:
        """Small chunks where bytes are throttled, so that they flow instead of jumping."""
        rate = self._proxy.bytes_per_s
        return CHUNK_BYTES if rate is None else max(1, min(CHUNK_BYTES, int(rate / 20)))

    def seconds_for(self, num_bytes: int) -> float:
        """How long this chunk has to wait."""
        rate, now_s = self._proxy.bytes_per_s, time.monotonic()
        if rate is None:
            return self._proxy.delay_s
        self._free_at_s = max(self._free_at_s, now_s) + num_bytes / rate
        return self._free_at_s - now_s + self._proxy.delay_s

    def damaged(self, data: bytes) -> bytes:
        """The chunk as it is passed on; shorter than it came where the connection shall end."""
        return self._truncated(self._corrupted(data))

    def _corrupted(self, data: bytes) -> bytes:
        every = self._proxy.corrupt_every
        if every != self._corrupt_every:
            self._corrupt_every, self._until_corrupt = every, (every or 1) - 1
        if every is None:
            return data
        changed = bytearray(data)
        for position in range(self._until_corrupt, len(changed), every):
            changed[position] ^= 0x20
            self._proxy.num_corrupted += 1
        self._until_corrupt = (self._until_corrupt - len(changed)) % every
        return bytes(changed)

    def _truncated(self, data: bytes) -> bytes:
        limit = self._proxy.truncate_after
        if limit != self._truncate_after:
            self._truncate_after, self._left = limit, limit or 0
        if limit is None:
            return data
        kept = data[: self._left]
        self._left -= len(kept)
        return kept


def _reset(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    # A thread that sits in recv() keeps the socket alive: this wakes it, and only then does `close` count.
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RD)
    connection.close()
