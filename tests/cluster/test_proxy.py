"""The fault proxy does what its switches say: a fault test is worth as much as the fault is real."""

from __future__ import annotations

import contextlib
import hashlib
import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.ckptd.running import eventually
from tests.cluster.proxy import FaultProxy
from tests.ports import free_port


@pytest.fixture
def echo() -> Iterator[tuple[str, int]]:
    """A server that sends back what it gets, and ends when its peer does."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError):
            while data := peer.recv(1 << 16):
                peer.sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield listener.getsockname()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(10)


@pytest.fixture
def proxy(echo: tuple[str, int]) -> Iterator[FaultProxy]:
    with FaultProxy(echo) as made:
        yield made


def _connect(proxy: FaultProxy) -> socket.socket:
    return socket.create_connection(proxy.address, timeout=10)


def _read(peer: socket.socket, size: int) -> bytes:
    """Up to `size` bytes; fewer if the connection ends."""
    found = bytearray()
    while len(found) < size:
        data = peer.recv(size - len(found))
        if not data:
            break
        found += data
    return bytes(found)


def _echoed(peer: socket.socket, data: bytes) -> bytes:
    sender = threading.Thread(target=peer.sendall, args=(data,))
    sender.start()
    found = _read(peer, len(data))
    sender.join(10)
    return found


def test_without_faults_every_byte_and_the_end_pass(proxy: FaultProxy) -> None:
    data = random.Random(1).randbytes(3 << 20)
    with _connect(proxy) as peer:
        assert hashlib.sha256(_echoed(peer, data)).digest() == hashlib.sha256(data).digest()
        peer.shutdown(socket.SHUT_WR)
        assert peer.recv(1) == b""
    assert proxy.num_connections == 1


def test_a_delay_is_paid_in_each_direction(proxy: FaultProxy) -> None:
    with _connect(proxy) as peer:
        assert _echoed(peer, b"first") == b"first"
        proxy.delay_s = 0.15
        begun = time.monotonic()
        assert _echoed(peer, b"later") == b"later"
        assert 0.3 <= time.monotonic() - begun < 5


def test_throttling_bounds_the_rate_and_is_switched_off(proxy: FaultProxy) -> None:
    data = bytes(200_000)
    with _connect(proxy) as peer:
        proxy.bytes_per_s = 400_000
        begun = time.monotonic()
        assert _echoed(peer, data) == data
        assert time.monotonic() - begun >= 0.45
        proxy.heal()
        begun = time.monotonic()
        assert _echoed(peer, data) == data
        assert time.monotonic() - begun < 0.45


def test_a_cut_resets_what_exists_and_lets_new_connections_in(proxy: FaultProxy) -> None:
    with _connect(proxy) as peer:
        assert _echoed(peer, b"x") == b"x"
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            assert peer.recv(1) != b"", "an orderly end is not a cut"
    with _connect(proxy) as peer:
        assert _echoed(peer, b"y") == b"y"


def test_a_connection_that_nobody_reads_can_be_cut(proxy: FaultProxy) -> None:
    """The proxy's threads sit in send then, with both kernels' buffers full."""
    with _connect(proxy) as peer:
        peer.settimeout(0.5)
        with pytest.raises(TimeoutError):
            peer.sendall(bytes(64 << 20))
        proxy.cut()
        peer.settimeout(10)
        with pytest.raises(ConnectionError):
            peer.sendall(bytes(64 << 20))


def test_refused_connections_are_reset(proxy: FaultProxy) -> None:
    proxy.refuse = True
    with pytest.raises(ConnectionError), _connect(proxy) as peer:
        assert peer.recv(1) != b""
    proxy.refuse = False
    with _connect(proxy) as peer:
        assert _echoed(peer, b"x") == b"x"


def test_a_blackhole_swallows_until_it_is_healed(proxy: FaultProxy) -> None:
    """Bytes of that time are lost: the stream goes on with what comes later."""
    with _connect(proxy) as peer:
        proxy.blackhole = True
        peer.sendall(b"lost")
        peer.settimeout(0.3)
        with pytest.raises(TimeoutError):
            peer.recv(1)
        proxy.heal()
        peer.settimeout(10)
        assert _echoed(peer, b"kept") == b"kept"


@pytest.mark.parametrize("every", [1, 1000, 65_536, 100_003])
def test_every_nth_byte_is_corrupted_over_chunk_boundaries(proxy: FaultProxy, every: int) -> None:
    """Once on the way there and once on the way back, at the same places: what came back is whole
    again, so look in between.
    """
    data, size = bytes(300_000), 300_000
    with socket.create_server(("127.0.0.1", 0)) as sink:
        proxy.target = sink.getsockname()
        with _connect(proxy) as peer, sink.accept()[0] as end:
            proxy.corrupt_every = every
            sender = threading.Thread(target=peer.sendall, args=(data,))
            sender.start()
            found = _read(end, size)
            sender.join(10)
    wrong = [index for index, byte in enumerate(found) if byte]
    assert wrong == list(range(every - 1, size, every))
    assert proxy.num_corrupted == len(wrong)


def test_truncation_ends_in_the_middle_of_a_chunk(proxy: FaultProxy) -> None:
    """Exactly so many bytes arrive, then an end; the next connection begins to count anew."""
    with socket.create_server(("127.0.0.1", 0)) as sink:
        proxy.target = sink.getsockname()
        proxy.truncate_after = 100_001
        for _ in range(2):
            with _connect(proxy) as peer, sink.accept()[0] as end:
                end.settimeout(10)
                with contextlib.suppress(ConnectionError):  # the sender may learn of it as a reset
                    peer.sendall(bytes(300_000))
                assert len(_read(end, 300_000)) == 100_001


def test_a_dead_target_resets_and_a_new_one_is_found(proxy: FaultProxy, echo: tuple[str, int]) -> None:
    proxy.target = ("127.0.0.1", free_port())
    with pytest.raises(ConnectionError), _connect(proxy) as peer:
        assert peer.recv(1) != b""
    proxy.target = echo
    with _connect(proxy) as peer:
        assert _echoed(peer, b"x") == b"x"


def test_closing_ends_every_thread(echo: tuple[str, int]) -> None:
    before = set(threading.enumerate())
    with FaultProxy(echo) as proxy, _connect(proxy) as peer:
        assert _echoed(peer, b"x") == b"x"
        proxy.close()
        eventually(
            lambda: not [t for t in threading.enumerate() if t not in before and "serve" not in t.name],
            "the proxy's threads end",
        )
