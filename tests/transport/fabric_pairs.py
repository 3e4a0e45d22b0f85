"""Two fabrics that a test connects, a proxy between them, and what else the contract's tests share."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol
from urllib.parse import urlsplit

import pytest

from ckptd.transport.fabric.zmq_fabric import FabricOptions
from ckptd.transport.tcp.stream_fabric import StreamOptions
from ckptd.transport.verbs import Access, Fabric, Peer, PeerAddress, RegionKey, Scope, Serve

__all__ = [
    "BOTH",
    "CHUNK",
    "SIZES",
    "WAIT_S",
    "FabricTests",
    "Make",
    "Pair",
    "TcpProxy",
    "content",
    "echo",
    "settings",
    "until",
]

CHUNK = 64 << 10
WAIT_S = 15.0
BOTH = Access.READ | Access.WRITE
SIZES = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 7 * CHUNK + 13]


class Make(Protocol):
    """Start a fabric; the fixture closes it. ``endpoint`` is loopback and a free port unless given."""

    def __call__(self, node: str, serve: Serve = ..., **options: Any) -> Fabric: ...


def settings(**given: Any) -> dict[str, Any]:
    """The arguments of a fabric with small chunks; what `FabricOptions` and `StreamOptions` have goes into these."""
    own = {field.name for field in fields(FabricOptions)}
    streams = {field.name for field in fields(StreamOptions)} - own
    options = {"chunk_bytes": CHUNK} | {name: given.pop(name) for name in own & given.keys()}
    if chosen := {name: given.pop(name) for name in streams & given.keys()}:
        given["streams"] = StreamOptions(**chosen)
    return {"options": FabricOptions(**options), **given}


def echo(node: str, body: bytes, answer: Callable[[bytes], None]) -> None:
    answer(node.encode() + b":" + body)


def until(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    """Poll, with a deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def content(size: int, seed: int = 0) -> bytearray:
    return bytearray(random.Random(seed).randbytes(size))


@dataclass
class Pair:
    """``here`` asks ``there``."""

    here: Fabric
    there: Fabric
    peer: Peer

    def expose(self, buffer: bytearray, access: Access = BOTH, peer: str = "") -> RegionKey:
        return self.there.register(memoryview(buffer), access=access, scope=Scope(peer)).key


class TcpProxy:
    """Forwards connections; can cut them, hold what passes, and damage what passes towards the server."""

    def __init__(self, address: PeerAddress) -> None:
        url = urlsplit(address.endpoint)
        self._target = (url.hostname or "", url.port or 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.passed = 0
        self._forwarded = 0
        self._limit = float("inf")
        self._moving = threading.Event()
        self._moving.set()
        self.damage: Callable[[bytearray], None] = lambda data: None
        self.address = replace(address, endpoint=f"tcp://127.0.0.1:{self._listener.getsockname()[1]}")
        threading.Thread(target=self._accept, daemon=True).start()

    def hold_after(self, size: int) -> None:
        """When so many more bytes have passed, in either direction, nothing passes any more;
        connections stay.
        """
        self._limit = self._forwarded + size

    @property
    def holding(self) -> bool:
        return not self._moving.is_set()

    def move_on(self) -> None:
        """End of `hold_after`."""
        self._limit = float("inf")
        self._moving.set()

    def cut(self) -> int:
        """Break all connections; how many there were."""
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        return len(sockets) // 2

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.move_on()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
            except OSError:
                return
            with self._lock:
                self._sockets |= {client, server}
            for source, target, up in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._pump, args=(source, target, up), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, up: bool) -> None:
        with suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if up:
                    self.passed += len(data)
                    self.damage(data)
                self._forwarded += len(data)
                if self._forwarded > self._limit:
                    self._moving.clear()
                self._moving.wait()
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class FabricTests:
    """The fixtures; `make` is the backend's."""

    @pytest.fixture
    def make(self) -> Iterator[Make]:
        raise NotImplementedError

    @pytest.fixture
    def pair(self, make: Make) -> Pair:
        here, there = make("here"), make("there", echo)
        return Pair(here, there, here.peer(there.address))

    @pytest.fixture
    def proxied(self, make: Make) -> Iterator[tuple[Pair, TcpProxy]]:
        here, there = make("here"), make("there", echo)
        proxy = TcpProxy(there.address)
        yield Pair(here, there, here.peer(proxy.address)), proxy
        proxy.close()
