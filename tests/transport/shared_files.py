"""Regions that lie in files, and two fabrics on one host that share them."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckptd.transport.fabric import short_cut
from ckptd.transport.fabric.zmq_fabric import ZmqFabric
from ckptd.transport.tcp.stream_fabric import StreamFabric
from ckptd.transport.verbs import Access, Fabric, FileRange, Peer, Region, Scope
from tests.transport.fabric_pairs import BOTH, WAIT_S, Make, echo, settings

__all__ = ["BEFORE", "Brake", "Host", "Shared", "brake", "host", "make"]

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
