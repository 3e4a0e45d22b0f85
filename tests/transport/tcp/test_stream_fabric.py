"""The fabric over TCP streams: the contract, with and without keys, and what the data port lets in."""

from __future__ import annotations

import os
import random
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest

from ckptd.transport.access.keys import Keys, trust
from ckptd.transport.fabric.frames import Dial, Ticket
from ckptd.transport.fabric.serving import Connection
from ckptd.transport.fabric.zmq_fabric import ZmqFabric
from ckptd.transport.tcp import sealing, streams
from ckptd.transport.tcp.sealing import Cipher
from ckptd.transport.tcp.stream_fabric import StreamFabric, StreamOptions
from ckptd.transport.tcp.stream_frames import (
    ANSWER_BYTES,
    PREAMBLE_BYTES,
    StreamAsk,
    StreamKind,
    decode_answer,
    encode_ask,
    encode_preamble,
)
from ckptd.transport.tcp.streams import PayloadDigest
from ckptd.transport.verbs import (
    Access,
    Fabric,
    Fault,
    PeerAddress,
    RegionKey,
    Scope,
    Serve,
    Transfer,
)
from tests.transport.contract import FabricContract
from tests.transport.fabric_pairs import CHUNK, WAIT_S, Make, Pair, TcpProxy, settings, until

LOOPBACK = "tcp://127.0.0.1:0"
BOTH = Access.READ | Access.WRITE


def nobody(node: str, body: bytes, answer: Callable[[bytes], None]) -> None:
    """Serves nothing."""


def start(node: str, endpoint: str) -> Fabric:
    return StreamFabric(node, endpoint, serve=nobody, **settings())


def knock(address: tuple[str, int], *data: bytes) -> bytes:
    """Send these, then nothing more; what comes until the other side ends."""
    with socket.create_connection(address) as stranger:
        stranger.settimeout(WAIT_S)
        heard = b""
        try:
            for part in data:
                stranger.sendall(part)
            stranger.shutdown(socket.SHUT_WR)
            while part := stranger.recv(4096):
                heard += part
        except OSError:
            return heard  # closed with something unread: the same end
        return heard


class BehindProxies(StreamFabric):
    """Tells peers another data port than its own."""

    told: tuple[str, int] | None = None

    @property
    def data_address(self) -> tuple[str, int]:
        return self.told or super().data_address


class TwoProxies(TcpProxy):
    """In front of the data port, and with another in front of the control port, which damages nothing."""

    def __init__(self, fabric: BehindProxies) -> None:
        host, port = fabric.data_address
        super().__init__(PeerAddress(fabric.node, f"tcp://{host}:{port}"))
        fabric.told = ("127.0.0.1", int(self.address.endpoint.rpartition(":")[2]))
        self._control = TcpProxy(fabric.address)
        self.address = self._control.address

    def cut_data(self) -> None:
        super().cut()

    def cut(self) -> int:
        return super().cut() + self._control.cut()

    def close(self) -> None:
        super().close()
        self._control.close()


class TestStreamFabric(FabricContract):
    start_in_process = staticmethod(start)
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture
    def make(self, tmp_path: Path) -> Iterator[Make]:
        fabrics: list[StreamFabric] = []

        def make(node: str, serve: Serve = nobody, **options: Any) -> Fabric:
            given = settings(**self.security(tmp_path, node) | self.options | options)
            fabrics.append(BehindProxies(node, LOOPBACK, serve=serve, **given))
            return fabrics[-1]

        yield make
        for fabric in fabrics:
            fabric.close()

    def security(self, folder: Path, node: str) -> dict[str, Any]:
        return {}

    @pytest.fixture
    def proxied(self, make: Make) -> Iterator[tuple[Pair, TcpProxy]]:
        here, there = make("here"), make("there")
        assert isinstance(there, BehindProxies)
        proxy = TwoProxies(there)
        yield Pair(here, there, here.peer(proxy.address)), proxy
        proxy.close()

    def test_chunks_do_not_pass_the_control_port(self, proxied: tuple[Pair, TcpProxy]) -> None:
        pair, proxy = proxied
        target = bytearray(20 * CHUNK)
        assert pair.peer.put(memoryview(bytes(len(target))), pair.expose(target)).wait(WAIT_S).ok
        assert proxy.passed > len(target)

    def test_only_the_data_connection_breaks(self, proxied: tuple[Pair, TcpProxy]) -> None:
        pair, proxy = proxied
        assert isinstance(proxy, TwoProxies)
        data = random.Random(1).randbytes(300 * CHUNK)
        target = bytearray(len(data))
        put = pair.peer.put(memoryview(data), pair.expose(target))
        for _ in range(3):
            seen = proxy.passed
            until(lambda seen=seen: proxy.passed > seen + CHUNK)  # type: ignore[misc]
            proxy.cut_data()
        assert put.wait(WAIT_S).ok
        assert target == data
        assert pair.here.counters.reconnects >= 1

    @pytest.mark.parametrize("put", [True, False])
    def test_a_peer_that_hangs_keeps_no_buffer(self, make: Make, put: bool) -> None:
        """Its kernel still takes bytes and answers packets; our threads wait in the middle of a chunk."""
        here = make("here", chunk_bytes=16 << 20)
        process, address, key = self._spawn(LOOPBACK)
        buffer = bytearray(48 << 20)
        peer = here.peer(address)
        assert peer.put(memoryview(b"1"), key).wait(WAIT_S).ok
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        begin = peer.put if put else partial(flipped, peer.get)
        done = begin(memoryview(buffer), key, deadline_s=0.5).wait(WAIT_S)
        assert done.fault is Fault.DEADLINE
        assert done.seconds < 5
        buffer.append(0)  # nothing refers to it any more
        os.kill(process.pid, signal.SIGCONT)
        buffer = bytearray(1 << 20)
        assert peer.put(memoryview(buffer), key).wait(WAIT_S).ok
        process.kill()
        process.join(WAIT_S)

    def test_a_key_that_no_header_can_carry_is_refused(self, pair: Pair) -> None:
        key = pair.expose(bytearray(1))
        for region in (-1, 1 << 64):
            put = pair.peer.put(memoryview(b"1"), replace(key, region=region))
            assert put.wait(WAIT_S).fault is Fault.REGION
        put = pair.peer.put(memoryview(b"1"), key, offset=1 << 64)
        assert put.wait(WAIT_S).fault is Fault.BOUNDS


def flipped(get: Callable[..., Transfer], target: memoryview, key: RegionKey, **options: Any) -> Transfer:
    """A get with its arguments in the order of a put."""
    return get(key, target, **options)


class TestSeveralStreams(TestStreamFabric):
    options: ClassVar[dict[str, Any]] = {"connections_per_peer": 3}


class TestStreamsWithKeys(TestStreamFabric):
    """All contract nodes trust each other; the node in another process has no keys, so it is left out."""

    def security(self, folder: Path, node: str) -> dict[str, Any]:
        names = ("here", "there")
        for name in names:
            if not (folder / name).exists():
                Keys.create(folder / name)
        for name in names:
            for other in names:
                trust(folder / name, other, Keys.load(folder / other).public)
        return {"keys": Keys.load(folder / node)}

    # Keys of another process belong to its folder, not to this test's.
    test_a_server_killed_and_restarted_is_no_hang = None  # type: ignore[assignment]
    test_a_peer_that_hangs_keeps_no_buffer = None  # type: ignore[assignment]

    def test_a_link_that_always_damages_ends_in_a_digest_fault(self, proxied: tuple[Pair, TcpProxy]) -> None:
        """Nobody can find the bytes that he means to damage, but he can damage all that are many."""
        pair, proxy = proxied
        key = pair.expose(bytearray(CHUNK))
        assert pair.peer.put(memoryview(b"1"), key).wait(WAIT_S).ok

        def damage(passing: bytearray) -> None:
            if len(passing) > 1024:
                passing[-1] ^= 1

        proxy.damage = damage
        done = pair.peer.put(memoryview(b"damage-this-one-" * 128), key).wait(WAIT_S)
        assert done.fault is Fault.DIGEST
        assert pair.there.counters.forged >= 2

    def test_garbage_on_the_port_is_counted_and_harmless(self, pair: Pair) -> None:
        """On both ports; libzmq says nothing of strangers that a control port with keys turns away."""
        assert isinstance(pair.there, StreamFabric)
        url = urlsplit(pair.there.address.endpoint)
        for address in ((url.hostname or "", url.port or 0), pair.there.data_address):
            for size in (1, 9, 64, 70_000):
                assert len(knock(address, random.Random(size).randbytes(size))) < 100
        until(lambda: pair.there.counters.garbage == 4)
        key = pair.expose(bytearray(8))
        assert pair.peer.put(memoryview(b"12345678"), key).wait(WAIT_S).ok


class TestSmallRecordsWithKeys(TestStreamsWithKeys):
    """Chunks of many records, keys for a few records each, and the cipher for processors without AES."""

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(streams, "RECORD_BYTES", 10_000)
        monkeypatch.setattr(sealing, "RECORDS_PER_KEY", 5)
        monkeypatch.setattr(sealing, "_has_aes_instructions", lambda: False)


# --- the data port -----------------------------------------------------------------------------------------


@pytest.fixture
def fabric() -> Iterator[StreamFabric]:
    fabric = StreamFabric("there", LOOPBACK, serve=nobody, **settings())
    yield fabric
    fabric.close()


def ticket_of(fabric: StreamFabric, node: str = "here", slot: bytes = bytes(16)) -> bytes:
    """What the control connection of ``node`` would be answered."""
    tickets: list[Ticket] = []
    peer = Connection(node, "", data=True, heard_at=0.0)
    fabric._dial(peer, Dial(1, slot, (Cipher.PLAINTEXT,), bytes(32)), tickets.append)
    until(lambda: bool(tickets))
    return tickets[0].ticket


def ask(key: RegionKey, offset: int, length: int, kind: StreamKind = StreamKind.WRITE) -> bytes:
    return encode_ask(StreamAsk(kind, 1, key.region, key.token, offset, length))


def digest(key: RegionKey, offset: int, data: bytes) -> bytes:
    made = PayloadDigest(key.region, offset, len(data))
    made.update(memoryview(data))
    return made.value.to_bytes(8, "little")


@pytest.mark.parametrize("junk", [b"", b"GET / HTTP/1.1\r\n\r\n", b"CKT2" + bytes(51), bytes(9999)])
def test_junk_is_counted_and_closed(fabric: StreamFabric, junk: bytes) -> None:
    assert knock(fabric.data_address, junk) == b""
    until(lambda: fabric.counters.garbage == 1)


def test_a_wrong_ticket_is_not_let_in(fabric: StreamFabric) -> None:
    buffer = bytearray(4)
    key = fabric.register(memoryview(buffer), access=BOTH, scope=Scope("")).key
    preamble = encode_preamble(secrets.token_bytes(32))
    assert knock(fabric.data_address, preamble, ask(key, 0, 4), b"1234", digest(key, 0, b"1234")) == b""
    until(lambda: fabric.counters.unauthenticated == 1)
    assert buffer == bytes(4)


def test_a_ticket_is_good_for_one_stream(fabric: StreamFabric) -> None:
    ticket = ticket_of(fabric)
    assert decode_answer(knock(fabric.data_address, encode_preamble(ticket))).kind is StreamKind.WELCOME
    assert knock(fabric.data_address, encode_preamble(ticket)) == b""
    assert fabric.counters.unauthenticated == 1


def test_a_new_ticket_takes_the_old_ones_place(fabric: StreamFabric) -> None:
    old, new = ticket_of(fabric), ticket_of(fabric)
    assert knock(fabric.data_address, encode_preamble(old)) == b""
    assert len(knock(fabric.data_address, encode_preamble(new))) == ANSWER_BYTES


def test_a_new_ticket_waits_for_the_end_of_the_stream_before(fabric: StreamFabric) -> None:
    """Half a chunk lies in its region; nothing of it may be written after the ticket was granted."""
    key = fabric.register(memoryview(bytearray(CHUNK)), access=BOTH, scope=Scope("")).key
    with socket.create_connection(fabric.data_address) as stream:
        stream.settimeout(WAIT_S)
        stream.sendall(encode_preamble(ticket_of(fabric)) + ask(key, 0, CHUNK) + bytes(CHUNK // 2))
        assert len(stream.recv(ANSWER_BYTES, socket.MSG_WAITALL)) == ANSWER_BYTES
        other = ticket_of(fabric, slot=b"another slot....")
        new = ticket_of(fabric)
        assert stream.recv(1) == b""  # it was ended for that
    assert len({other, new}) == 2
    assert len(knock(fabric.data_address, encode_preamble(new))) == ANSWER_BYTES


def test_a_stream_belongs_to_whom_the_ticket_was_given(fabric: StreamFabric) -> None:
    buffer = bytearray(4)
    key = fabric.register(memoryview(buffer), access=BOTH, scope=Scope("friend")).key
    payload = (ask(key, 0, 4), b"1234", digest(key, 0, b"1234"))
    heard = knock(fabric.data_address, encode_preamble(ticket_of(fabric, "here")), *payload)
    assert decode_answer(heard[ANSWER_BYTES : 2 * ANSWER_BYTES]).fault is Fault.ACCESS
    assert buffer == bytes(4)
    heard = knock(fabric.data_address, encode_preamble(ticket_of(fabric, "friend")), *payload)
    assert decode_answer(heard[ANSWER_BYTES:]).kind is StreamKind.ACK
    assert buffer == b"1234"


def test_a_damaged_header_ends_the_stream_and_touches_nothing(fabric: StreamFabric) -> None:
    """Else a damaged offset would overwrite bytes that were acknowledged."""
    buffer = bytearray(64)
    key = fabric.register(memoryview(buffer), access=BOTH, scope=Scope("")).key
    for position in range(64):
        header = bytearray(ask(key, 8, 4))
        header[position] ^= 1
        heard = knock(
            fabric.data_address,
            encode_preamble(ticket_of(fabric)),
            bytes(header),
            b"1234" + bytes(8),
        )
        assert len(heard) <= ANSWER_BYTES
    assert buffer == bytes(64)
    assert fabric.counters.garbage == 64


def test_a_refused_put_is_read_to_its_end(fabric: StreamFabric) -> None:
    """The next operation of the stream is found behind it."""
    buffer = bytearray(CHUNK)
    key = fabric.register(memoryview(buffer), access=BOTH, scope=Scope("")).key
    heard = knock(
        fabric.data_address,
        encode_preamble(ticket_of(fabric)),
        ask(key, 1, CHUNK) + b"x" * (CHUNK + 8),
        ask(key, 5, 3) + b"yes" + digest(key, 5, b"yes"),
    )
    answer = decode_answer(heard[ANSWER_BYTES : 2 * ANSWER_BYTES])
    assert answer.fault is Fault.BOUNDS
    assert decode_answer(heard[2 * ANSWER_BYTES + answer.length :]).kind is StreamKind.ACK
    assert buffer == bytes(5) + b"yes" + bytes(CHUNK - 8)
    assert fabric.counters.refused == 1


@pytest.mark.parametrize("kind", [StreamKind.WRITE, StreamKind.READ])
def test_a_region_is_closed_under_a_peer_that_stopped(fabric: StreamFabric, kind: StreamKind) -> None:
    """It sends or takes half a chunk and then nothing: the stream is broken off, not waited for."""
    buffer = bytearray(16 << 20)
    region = fabric.register(memoryview(buffer), access=BOTH, scope=Scope(""))
    with socket.create_connection(fabric.data_address) as stream:
        stream.sendall(encode_preamble(ticket_of(fabric)))
        stream.sendall(ask(region.key, 0, len(buffer), kind) + b"x" * CHUNK)
        if kind is StreamKind.WRITE:
            until(lambda: bool(buffer[0]))
        else:
            stream.recv(ANSWER_BYTES + 1, socket.MSG_WAITALL)
        closer = threading.Thread(target=region.close)
        closer.start()
        closer.join(WAIT_S)
        assert not closer.is_alive()
        buffer.append(0)  # nothing refers to it any more


# --- what is put to, and got from, others ------------------------------------------------------------------


class FakePeer:
    """A data port that says what a test has it say."""

    def __init__(self, *answers: bytes) -> None:
        self._answers = answers
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with closing(connection):
                connection.settimeout(WAIT_S)
                connection.recv(PREAMBLE_BYTES, socket.MSG_WAITALL)
                for answer in self._answers:
                    connection.sendall(answer)
                connection.recv(1)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(WAIT_S)


@pytest.mark.parametrize("answers", [(b"x" * ANSWER_BYTES,), (), (b"HTTP/1.1 400 Bad",)])
def test_a_data_port_of_somebody_else_ends_at_the_deadline(answers: tuple[bytes, ...]) -> None:
    fake = FakePeer(*answers)
    there = BehindProxies("there", LOOPBACK, serve=nobody)
    there.told = fake.address
    here = StreamFabric("here", LOOPBACK, serve=nobody)
    try:
        key = there.register(memoryview(bytearray(4)), access=BOTH, scope=Scope("")).key
        done = here.peer(there.address).put(memoryview(b"1234"), key, deadline_s=0.5).wait(WAIT_S)
        assert done.fault is Fault.DEADLINE
    finally:
        here.close()
        there.close()
        fake.close()


@pytest.mark.parametrize("asks", [StreamFabric, ZmqFabric])
def test_fabrics_of_both_kinds_understand_each_other(asks: type[ZmqFabric]) -> None:
    """While a cluster's configuration is being changed."""
    answers = ZmqFabric if asks is StreamFabric else StreamFabric
    here = asks("here", LOOPBACK, serve=nobody, **settings())
    there = answers("there", LOOPBACK, serve=nobody, **settings())
    try:
        data, target = random.Random(2).randbytes(9 * CHUNK), bytearray(9 * CHUNK)
        region = there.register(memoryview(target), access=BOTH, scope=Scope("here"))
        assert here.peer(there.address).put(memoryview(data), region.key).wait(WAIT_S).ok
        back = bytearray(len(data))
        assert here.peer(there.address).get(region.key, memoryview(back)).wait(WAIT_S).ok
        assert target == back == data
    finally:
        here.close()
        there.close()


def test_a_fixed_data_port_is_listened_on_or_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match="cannot listen"):
            StreamFabric("x", LOOPBACK, serve=nobody, streams=StreamOptions(port))
    fabric = StreamFabric("x", LOOPBACK, serve=nobody, streams=StreamOptions(port))
    try:
        assert fabric.data_address == ("127.0.0.1", port)
    finally:
        fabric.close()
