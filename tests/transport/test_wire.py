"""Framing, and the client against a peer that does as it likes."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from ckptd.transport import messages as m
from ckptd.transport import wire
from ckptd.transport.wire import (
    MAX_BODY_BYTES,
    ControlClient,
    RefusedError,
    RequestTimeout,
    WireError,
    decode,
    encode,
    peer_process,
    peer_user,
)


def test_a_message_and_its_id_come_back() -> None:
    envelope, message = decode(encode(7, m.Forget("j", "r")))
    assert (envelope.id, envelope.protocol) == (7, m.PROTOCOL_VERSION)
    assert message == m.Forget("j", "r")


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([], "frames"),
        ([b"x"], "frames"),
        ([b"", b"", b""], "frames"),
        ([b"", b""], "envelope"),
        ([b"\xc1", b""], "envelope"),
        ([b"x" * 1000, b""], "envelope"),
        ([encode(1, m.Ping())[0], b""], "body"),
        ([encode(1, m.Ping())[0], b"\x81\xa4type\xa4Nope"], "body"),
        ([encode(1, m.Ping())[0], b"\x91" * 100_000], "body"),
        ([encode(1, m.Ping())[0], bytes(MAX_BODY_BYTES + 1)], "oversize"),
        (encode(1, m.Ping(), protocol=99), "protocol"),
    ],
)
def test_what_is_not_a_message_raises_a_wire_error(frames: list[bytes], code: str) -> None:
    with pytest.raises(WireError) as caught:
        decode(frames)
    assert caught.value.code == code


def test_another_protocol_version_names_both_and_keeps_the_id() -> None:
    with pytest.raises(WireError, match=r"version 99.*version 3") as caught:
        decode(encode(5, m.Ping(), protocol=99))
    assert caught.value.envelope is not None
    assert caught.value.envelope.id == 5


def test_random_bytes_never_raise_anything_else() -> None:
    source = random.Random(20240501)
    envelope, body = encode(1, m.Attach("j", "r", 0, 1, "t", 1, 0))
    for _ in range(3000):
        damaged = bytearray(body)
        damaged[source.randrange(len(damaged))] = source.randrange(256)
        noise = source.randbytes(source.randrange(40))
        for frames in ([envelope, bytes(damaged)], [noise, body], [envelope, noise]):
            try:
                decode(frames)
            except WireError:
                continue


def test_an_oversize_message_is_not_sent() -> None:
    with pytest.raises(WireError, match="at most"):
        encode(1, m.Done("x" * (MAX_BODY_BYTES + 1)))


Script = Callable[["zmq.Socket[bytes]"], None]


@contextmanager
def peer(tmp_path: Path, script: Script) -> Iterator[str]:
    """A ROUTER socket that a thread serves by `script`."""
    endpoint = f"ipc://{tmp_path}/s"
    context = zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.RCVTIMEO, 10_000)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(endpoint)
    thread = threading.Thread(target=script, args=(socket,))
    thread.start()
    try:
        yield endpoint
    finally:
        thread.join(15)
        socket.close(linger=0)
        context.term()


def answer(
    socket: zmq.Socket[bytes], reply: m.Reply, *, protocol: int = m.PROTOCOL_VERSION, late: int = 0
) -> None:
    identity, envelope, body = socket.recv_multipart()
    message_id = decode([envelope, body])[0].id
    socket.send_multipart([identity, *encode(message_id - late, reply, protocol=protocol)])


def test_the_answer_to_a_request_is_returned(tmp_path: Path) -> None:
    with (
        peer(tmp_path, lambda s: answer(s, m.Pong("b", True))) as endpoint,
        ControlClient(endpoint) as client,
    ):
        assert client.ask(m.Ping(), m.Pong) == m.Pong("b", True)


def test_a_refusal_raises_with_code_and_hint(tmp_path: Path) -> None:
    with (
        peer(tmp_path, lambda s: answer(s, m.Refused("quota", "no", "buy more"))) as endpoint,
        ControlClient(endpoint) as client,
        pytest.raises(RefusedError, match=r"no \(buy more\)") as caught,
    ):
        client.request(m.Ping())
    assert caught.value.code == "quota"


def test_an_answer_of_another_type_is_an_error(tmp_path: Path) -> None:
    with (
        peer(tmp_path, lambda s: answer(s, m.Done())) as endpoint,
        ControlClient(endpoint) as client,
        pytest.raises(WireError, match="Ping with Done"),
    ):
        client.ask(m.Ping(), m.Pong)


def test_an_answer_of_another_protocol_version_says_so(tmp_path: Path) -> None:
    with (
        peer(tmp_path, lambda s: answer(s, m.Done(), protocol=99)) as endpoint,
        ControlClient(endpoint) as client,
        pytest.raises(WireError, match="version 99"),
    ):
        client.request(m.Ping())


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next(tmp_path: Path) -> None:
    def script(socket: zmq.Socket[bytes]) -> None:
        identity, envelope, body = socket.recv_multipart()
        first = decode([envelope, body])[0].id
        identity, envelope, body = socket.recv_multipart()
        second = decode([envelope, body])[0].id
        socket.send_multipart([identity, *encode(first, m.Done("late"))])
        socket.send_multipart([identity, *encode(second, m.Done("right"))])

    with peer(tmp_path, script) as endpoint, ControlClient(endpoint) as client:
        with pytest.raises(RequestTimeout):
            client.request(m.Ping(), timeout_s=0.2)
        assert client.request(m.Ping()) == m.Done("right")


def test_a_refusal_of_a_one_way_message_is_kept_for_who_asks(tmp_path: Path) -> None:
    def script(socket: zmq.Socket[bytes]) -> None:
        answer(socket, m.Pong("b", False))
        answer(socket, m.Refused("no_session", "who are you"))
        answer(socket, m.Pong("b", False))

    with peer(tmp_path, script) as endpoint, ControlClient(endpoint) as client:
        client.request(m.Ping())
        assert client.send(m.Filled(0, 0, 0))
        client.request(m.Ping())
        assert [refusal.code for refusal in client.refusals()] == ["no_session"]
        assert client.refusals() == []


def test_without_a_daemon_a_request_times_out_and_names_the_endpoint(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/nobody"
    with ControlClient(endpoint) as client:
        with pytest.raises(RequestTimeout, match=r"nobody.*Ping.*0.1 s") as caught:
            client.request(m.Ping(), timeout_s=0.1)
        assert isinstance(caught.value, TimeoutError)
        assert not client.send(m.Filled(0, 0, 0))


def test_an_endpoint_that_cannot_be_is_named() -> None:
    with pytest.raises(WireError, match="nonsense"):
        ControlClient("nonsense")


def test_a_long_request_to_a_peer_that_hangs_says_so_soon(tmp_path: Path) -> None:
    """It swallows the request and the ping."""

    def silent(socket: zmq.Socket[bytes]) -> None:
        socket.recv_multipart()
        socket.recv_multipart()

    with (
        peer(tmp_path, silent) as endpoint,
        ControlClient(endpoint, timeout_s=60.0) as client,
        pytest.raises(RequestTimeout, match=r"to GetStatus: nor to a ping within 0.2 s"),
    ):
        client.request(m.GetStatus(), timeout_s=60.0, alive_s=0.2)


def test_a_long_request_to_a_peer_that_was_restarted_says_so_soon(tmp_path: Path) -> None:
    """It answers pings, and does not know who asks."""

    def restarted(socket: zmq.Socket[bytes]) -> None:
        socket.recv_multipart()  # the request
        answer(socket, m.Pong("b", False))

    with (
        peer(tmp_path, restarted) as endpoint,
        ControlClient(endpoint, timeout_s=60.0) as client,
        pytest.raises(RequestTimeout, match=r"to GetStatus: the daemon was restarted"),
    ):
        client.request(m.GetStatus(), timeout_s=60.0, alive_s=0.2)


def test_who_has_no_session_hears_soon_that_the_daemon_was_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon that answers the second ping is another one than that which was asked."""
    monkeypatch.setattr(wire, "_ALIVE_S", 1.0)

    def restarted(socket: zmq.Socket[bytes]) -> None:
        answer(socket, m.Pong("first", False))
        socket.recv_multipart()  # the request
        answer(socket, m.Pong("first", False))
        answer(socket, m.Pong("second", False))

    with (
        peer(tmp_path, restarted) as endpoint,
        ControlClient(endpoint) as client,
        pytest.raises(RequestTimeout, match=r"to GetStatus: the daemon was restarted"),
    ):
        client.ask(m.GetStatus(), m.Status, timeout_s=600.0)


def test_a_client_cannot_say_whose_process_it_is(tmp_path: Path) -> None:
    """By its own metadata in the handshake: what the kernel says counts."""
    path = str(tmp_path / "s")
    claimed = b":1002:1002:77"
    ready = b"\x05READY"
    for name, value in ((b"Socket-Type", b"DEALER"), (b"Identity", b"x"), (b"Peer-Address", claimed)):
        ready += bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.bind(f"ipc://{path}")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as liar:
            liar.settimeout(20)
            liar.connect(path)
            liar.sendall(greeting)
            answer = b""
            while b"READY" not in answer:
                answer += liar.recv(1024)
            liar.sendall(bytes([4, len(ready)]) + ready + b"\x00\x05hello")
            assert router.poll(20_000)
            frames = router.recv_multipart(copy=False)
            assert frames[-1].bytes == b"hello"
            assert (peer_user(frames[0]), peer_process(frames[0])) == (os.getuid(), os.getpid())
