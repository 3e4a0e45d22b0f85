"""Two fabrics that a test connects, a proxy between them, regions that lie in files, and what else the
contract's tests share.
"""

from __future__ import annotations

import mmap
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import pytest

from ckptd.transport.fabric import short_cut
from ckptd.transport.fabric.zmq_fabric import FabricOptions, ZmqFabric
from ckptd.transport.tcp.stream_fabric import StreamFabric, StreamOptions
from ckptd.transport.verbs import (
    Access,
    Fabric,
    FileRange,
    Peer,
    PeerAddress,
    Region,
    RegionKey,
    Scope,
    Serve,
)

__all__ = [
    "BEFORE",
    "BOTH",
    "CHUNK",
    "SIZES",
    "WAIT_S",
    "Brake",
    "FabricTests",
    "Host",
    "Make",
    "Pair",
    "Shared",
    "TcpProxy",
    "brake",
    "content",
    "echo",
    "host",
    "make",
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


BEFORE = 5000  # bytes of the file before the region: not a multiple of a page


class Shared:
    """A mapped file whose bytes, from `BEFORE` on, are to be a region."""

    def __init__(self, path: Path, data: bytes | bytearray) -> None:
        self.path, self.size = path, len(data)
        path.write_bytes(b"<" * BEFORE + data + b">" * 100)
        with path.open("r+b") as file:
            self.mapping = mmap.mmap(file.fileno(), 0)
            status = os.fstat(file.fileno())
        self.range = FileRange(str(path), status.st_dev, status.st_ino, BEFORE)

    @property
    def buffer(self) -> memoryview:
        return memoryview(self.mapping)[BEFORE : BEFORE + self.size]

    @property
    def inside(self) -> bytes:
        return bytes(self.buffer)

    def untouched_outside(self) -> bool:
        return self.path.read_bytes()[:BEFORE] == b"<" * BEFORE and self.path.read_bytes()[
            BEFORE + self.size :
        ] == (b">" * 100)


@dataclass
class Host:
    """Two fabrics on one host; ``here`` asks ``there``."""

    here: Fabric
    there: Fabric
    folder: Path

    @property
    def peer(self) -> Peer:
        return self.here.peer(self.there.address)

    def share(self, data: bytes | bytearray, access: Access = BOTH, peer: str = "") -> tuple[Shared, Region]:
        shared = Shared(self.folder / f"{time.monotonic_ns()}", data)
        region = self.there.register(shared.buffer, access=access, scope=Scope(peer), file=shared.range)
        return shared, region

    @property
    def copied(self) -> int:
        return self.here.counters.short_cut_bytes

    @property
    def networked(self) -> int:
        return self.there.counters.received_bytes + self.there.counters.served_bytes


@pytest.fixture(params=[StreamFabric, ZmqFabric])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    fabrics: list[Fabric] = []

    def make(node: str, serve: Any = echo, **options: Any) -> Fabric:
        fabrics.append(request.param(node, "tcp://127.0.0.1:0", serve=serve, **settings(**options)))
        return fabrics[-1]

    yield make
    for fabric in fabrics:
        fabric.close()


@pytest.fixture
def host(make: Make, tmp_path: Path) -> Host:
    return Host(make("here"), make("there"), tmp_path)


class Brake:
    """Stops the copier's thread in the middle of its copies, with their locks held."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self._go = threading.Event(), threading.Event()
        real = short_cut._copy

        def copy(fd: int, access: Access, at: int, view: memoryview) -> bool:
            with view[: len(view) // 2] as half:
                assert real(fd, access, at, half)
            self.reached.set()
            assert self._go.wait(WAIT_S)
            return real(fd, access, at, view)

        monkeypatch.setattr(short_cut, "_copy", copy)

    def release(self) -> None:
        self._go.set()


@pytest.fixture
def brake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Brake]:
    brake = Brake(monkeypatch)
    yield brake
    brake.release()
