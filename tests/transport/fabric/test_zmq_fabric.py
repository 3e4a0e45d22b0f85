"""The fabric over ZeroMQ: the contract, with one and with several connections, and what keys add."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import zmq

from ckptd.transport.access.keys import Keys, trust
from ckptd.transport.fabric.zmq_fabric import ZmqFabric
from ckptd.transport.verbs import Access, Fabric, Fault, RegionKey, Scope, Serve
from tests.transport.contract import FabricContract
from tests.transport.fabric_pairs import CHUNK, WAIT_S, Make, Pair, echo, settings, until

LOOPBACK = "tcp://127.0.0.1:0"


def nobody(node: str, body: bytes, answer: Callable[[bytes], None]) -> None:
    """Serves nothing."""


def start(node: str, endpoint: str) -> Fabric:
    return ZmqFabric(node, endpoint, serve=nobody, **settings())


class TestZmqFabric(FabricContract):
    start_in_process = staticmethod(start)
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture
    def make(self) -> Iterator[Make]:
        fabrics: list[ZmqFabric] = []

        def make(node: str, serve: Serve = nobody, **options: Any) -> Fabric:
            given = settings(**self.options | options)
            fabrics.append(ZmqFabric(node, LOOPBACK, serve=serve, **given))
            return fabrics[-1]

        yield make
        for fabric in fabrics:
            fabric.close()

    def test_messages_that_are_none_are_counted(self, pair: Pair) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            stranger.connect(pair.there.address.endpoint)
            for frames in ([b""], [b"\xc1", b""], [b"x" * 5000], [b"1"] * 9):
                stranger.send_multipart(frames)
            until(lambda: pair.there.counters.garbage >= 4)
        key = pair.expose(bytearray(1))
        assert pair.peer.put(memoryview(b"1"), key).wait(WAIT_S).ok

    def test_a_source_that_cannot_be_sent_is_the_callers_mistake(self, pair: Pair) -> None:
        with pytest.raises(ValueError, match="contiguous"):
            pair.peer.put(memoryview(bytearray(8))[::2], RegionKey(1, bytes(16), 8))
        with pytest.raises(ValueError, match="read-only"):
            pair.peer.get(RegionKey(1, bytes(16), 8), memoryview(b"12345678"))

    def test_an_address_that_is_taken_says_so(self, pair: Pair) -> None:
        with pytest.raises(ValueError, match="cannot listen"):
            ZmqFabric("x", pair.there.address.endpoint, serve=nobody)


class TestSeveralConnections(TestZmqFabric):
    options: ClassVar[dict[str, Any]] = {"connections_per_peer": 3}


# --- keys ------------------------------------------------------------------------------------------------


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[Callable[..., ZmqFabric]]:
    """Starts fabrics with keys of their own; they trust each other after ``introduce``."""
    fabrics: list[ZmqFabric] = []

    def make(node: str, folder: str = "") -> ZmqFabric:
        path = tmp_path / (folder or node)
        keys = Keys.load(path) if path.exists() else Keys.create(path)
        fabrics.append(ZmqFabric(node, LOOPBACK, serve=echo, keys=keys, **settings()))
        return fabrics[-1]

    yield make
    for fabric in fabrics:
        fabric.close()


def introduce(tmp_path: Path, one: str, other: str) -> None:
    for folder, name in ((one, other), (other, one)):
        trust(tmp_path / folder, name, Keys.load(tmp_path / name).public)


def test_trusted_nodes_transfer(tmp_path: Path, keyed: Callable[..., ZmqFabric]) -> None:
    here, there = keyed("here"), keyed("there")
    introduce(tmp_path, "here", "there")
    target = bytearray(5 * CHUNK)
    region = there.register(memoryview(target), access=Access.WRITE, scope=Scope("here"))
    data = bytearray(b"\7" * len(target))
    assert here.peer(there.address).put(memoryview(data), region.key).wait(WAIT_S).ok
    assert target == data
    answers: list[bytes | Fault] = []
    here.peer(there.address).request(b"?", timeout_s=WAIT_S, answered=answers.append)
    until(lambda: answers == [b"here:?"])


def test_a_stranger_is_refused_and_counted_until_it_is_trusted(
    tmp_path: Path, keyed: Callable[..., ZmqFabric]
) -> None:
    """The change is picked up without a restart."""
    here, there = keyed("here"), keyed("there")
    trust(tmp_path / "here", "there", there.address.public_key)
    region = there.register(memoryview(bytearray(1)), access=Access.WRITE, scope=Scope(""))
    done = here.peer(there.address).put(memoryview(b"1"), region.key, deadline_s=8).wait(WAIT_S)
    assert done.fault is Fault.REFUSED
    assert there.counters.unauthenticated >= 1
    trust(tmp_path / "there", "here", here.address.public_key)
    until(lambda: here.peer(there.address).put(memoryview(b"1"), region.key).wait(WAIT_S).ok)


def test_who_claims_another_name_than_its_key_has_is_refused(
    tmp_path: Path, keyed: Callable[..., ZmqFabric]
) -> None:
    there = keyed("there")
    Keys.create(tmp_path / "here")
    introduce(tmp_path, "here", "there")
    liar = keyed("liar", folder="here")
    region = there.register(memoryview(bytearray(1)), access=Access.WRITE, scope=Scope("liar"))
    done = liar.peer(there.address).put(memoryview(b"1"), region.key, deadline_s=8).wait(WAIT_S)
    assert done.fault is Fault.REFUSED
    assert there.counters.received_bytes == 0


def test_an_address_with_another_key_is_refused_before_connecting(
    tmp_path: Path, keyed: Callable[..., ZmqFabric]
) -> None:
    here, there = keyed("here"), keyed("there")
    introduce(tmp_path, "here", "there")
    for key in ("", zmq.curve_keypair()[0].decode()):
        peer = here.peer(replace(there.address, public_key=key))
        done = peer.put(memoryview(b"1"), RegionKey(1, bytes(16), 1)).wait(WAIT_S)
        assert done.fault is Fault.REFUSED


def test_without_keys_nobody_gets_into_a_fabric_with_keys(
    keyed: Callable[..., ZmqFabric],
) -> None:
    there = keyed("there")
    plain = ZmqFabric("here", LOOPBACK, serve=nobody)
    try:
        peer = plain.peer(replace(there.address, public_key=""))
        done = peer.put(memoryview(b"1"), RegionKey(1, bytes(16), 1), deadline_s=1).wait(WAIT_S)
        assert done.fault in (Fault.DEADLINE, Fault.REFUSED)
        until(lambda: there.counters.unauthenticated > 0)
    finally:
        plain.close()


def test_requests_from_callbacks_and_closing_there_do_not_hang(
    keyed: Callable[..., ZmqFabric],
) -> None:
    here = keyed("here")
    closed = threading.Event()

    def close_there(answer: bytes | Fault) -> None:
        here.close()
        closed.set()

    here.peer(here.address).request(b"?", timeout_s=WAIT_S, answered=close_there)
    assert closed.wait(WAIT_S)
