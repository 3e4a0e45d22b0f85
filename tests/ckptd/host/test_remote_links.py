"""Connections between the hosts of several machines, over real sockets, with those that do not belong to the job."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ckptd.host.host_links import LinkError
from ckptd.host.remote_links import (
    TOKEN_BYTES,
    RemoteLink,
    accept_remote,
    address_towards,
    listen_remotely,
    start_connecting,
)
from tests.ckptd.host.hosting import until

TOKEN = bytes(range(TOKEN_BYTES))


class Wire:
    """Two ends, and a third that carries lines from one to the other and can change them.

    Attributes:
        carried: the lines of each direction.
    """

    def __init__(self, token: bytes = TOKEN) -> None:
        ours, self._near = socket.socketpair()
        theirs, self._far = socket.socketpair()
        self.listens = RemoteLink(theirs, TOKEN, connects=False)
        self.connects = RemoteLink(ours, token, connects=True)
        self.to_listener: list[bytes] = []
        self.to_connector: list[bytes] = []
        self.sockets = (ours, self._near, theirs, self._far)

    def carry(self, change: Callable[[bytes], bytes] = lambda data: data) -> None:
        """What the connecting side has sent."""
        data = self._near.recv(1 << 16)
        self.to_listener.append(data)
        self._far.send(change(data))

    def carry_back(self, change: Callable[[bytes], bytes] = lambda data: data) -> None:
        data = self._far.recv(1 << 16)
        self.to_connector.append(data)
        self._near.send(change(data))

    def inject(self, data: bytes) -> None:
        """Into the listening side."""
        self._far.send(data)

    def inject_back(self, data: bytes) -> None:
        self._near.send(data)

    def prove(self) -> None:
        self.carry()
        self.listens.receive()
        self.carry_back()
        self.connects.receive()
        self.carry()
        assert self.listens.receive() == []
        assert self.listens.proven
        assert self.connects.proven

    def close(self) -> None:
        for each in self.sockets:
            each.close()


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    yield made
    made.close()


@pytest.fixture
def proven(wire: Wire) -> Wire:
    wire.prove()
    return wire


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def test_messages_pass_both_ways_once_both_sides_are_proven(proven: Wire) -> None:
    for number in range(3):
        proven.connects.send({"number": number, "text": "ä\n"})
        proven.listens.send({"order": number})
    proven.carry()
    proven.carry_back()
    assert [m["number"] for m in proven.listens.receive()] == [0, 1, 2]
    assert [m["order"] for m in proven.connects.receive()] == [0, 1, 2]


def test_nothing_can_be_said_before(wire: Wire) -> None:
    for link in (wire.connects, wire.listens):
        with pytest.raises(LinkError, match="belongs to the job"):
            link.send({"rank": 1})


def test_the_token_is_never_sent(proven: Wire) -> None:
    said = b"".join(proven.to_listener + proven.to_connector)
    assert TOKEN not in said
    assert TOKEN.hex().encode() not in said


def test_who_connects_with_another_token_learns_it_first() -> None:
    """The one that listens has proven itself; a stranger cannot check that, and has nothing to prove with."""
    wire = Wire(os.urandom(TOKEN_BYTES))
    wire.carry()
    wire.listens.receive()
    wire.carry_back()
    with pytest.raises(LinkError, match="does not know the token"):
        wire.connects.receive()
    wire.inject(b"0" * 64 + b"\n")
    with pytest.raises(LinkError, match="does not know the token"):
        wire.listens.receive()
    assert not wire.listens.proven
    assert not wire.connects.proven
    wire.close()


@pytest.mark.parametrize(
    "data", [b"\n", b"GET / HTTP/1.1\r\n", b'{"rank": 1}\n', b"0" * 63 + b"\n", b"A" * 64 + b"\n"]
)
def test_garbage_ends_the_connection(data: bytes, wire: Wire) -> None:
    wire.inject(data)
    with pytest.raises(LinkError, match="no host"):
        wire.listens.receive()


def test_a_line_without_an_end_is_not_collected(wire: Wire) -> None:
    wire.inject(b"0" * 5000)
    with pytest.raises(LinkError, match="no end"):
        receive_often(wire.listens)


def receive_often(link: RemoteLink) -> None:
    for _ in range(4):
        link.receive()


def test_a_proof_that_was_changed_is_none(wire: Wire) -> None:
    wire.carry()
    wire.listens.receive()
    wire.carry_back()
    wire.connects.receive()
    wire.carry(flipped)
    with pytest.raises(LinkError, match="token"):
        wire.listens.receive()


def test_a_proof_cannot_be_sent_back_to_who_gave_it(wire: Wire) -> None:
    """Somebody without the token answers the listening side with its own words."""
    wire.carry()
    wire.listens.receive()
    wire.carry_back()
    theirs, _, proof = wire.to_connector[0].partition(b" ")
    assert len(theirs) == 64
    wire.inject(proof)
    with pytest.raises(LinkError, match="token"):
        wire.listens.receive()


def test_an_exchange_that_was_recorded_opens_no_other_connection(proven: Wire) -> None:
    proven.connects.send({"rank": 1})
    proven.carry()
    other = Wire()
    other.inject(proven.to_listener[0])
    other.listens.receive()
    other.inject(b"".join(proven.to_listener[1:]))
    with pytest.raises(LinkError, match="token"):
        other.listens.receive()
    other.close()


@pytest.mark.parametrize("what", ["again", "changed", "back", "plain", "skipped"])
def test_a_message_that_is_not_the_next_one_of_the_other_side_ends_the_connection(
    what: str, proven: Wire
) -> None:
    proven.listens.send({"order": "first"})
    proven.carry_back()
    assert proven.connects.receive() == [{"order": "first"}]
    first = proven.to_connector[-1]
    proven.connects.send({"told": "mine"})
    proven.carry()
    mine = proven.to_listener[-1]
    proven.listens.send({"order": "skipped"})
    proven.listens.send({"order": "third"})
    rest = proven.sockets[3].recv(1 << 16).splitlines(keepends=True)
    data = {
        "again": first,
        "changed": rest[0].replace(b"skipped", b"release"),
        "back": mine,
        "plain": json.dumps({"order": "release"}).encode() + b"\n",
        "skipped": rest[1],
    }[what]
    proven.inject_back(data)
    with pytest.raises(LinkError, match="not from the other side"):
        proven.connects.receive()


def test_what_comes_with_the_proof_is_read(wire: Wire) -> None:
    wire.carry()
    wire.listens.receive()
    wire.carry_back()
    wire.connects.receive()
    wire.connects.send({"rank": 1})
    wire.carry()
    assert wire.listens.receive() == [{"rank": 1}]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", ""])
def test_hosts_meet_over_tcp(address: str) -> None:
    try:
        listener = listen_remotely(address)
    except OSError as error:
        pytest.skip(f"no socket on {address!r} here: {error}")
    with listener:
        connection = start_connecting(address or "127.0.0.1", listener.getsockname()[1], 2)
        ours = RemoteLink(connected(connection), TOKEN, connects=True)
        theirs = accepted(listener)
        for name in (socket.SO_KEEPALIVE,):
            assert connection.getsockopt(socket.SOL_SOCKET, name)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 2000

        def proven() -> bool:
            return theirs.receive() == ours.receive() == [] and theirs.proven and ours.proven

        until(proven, "the first exchange")
        ours.send({"rank": 1})
        got: list[dict[str, Any]] = []

        def heard() -> bool:
            got.extend(theirs.receive())
            return bool(got)

        until(heard, "a message")
        assert got == [{"rank": 1}]
        ours.close()
        theirs.close()


def connected(connection: socket.socket) -> socket.socket:
    until(lambda: is_connected(connection), "a connection")
    return connection


def is_connected(connection: socket.socket) -> bool:
    try:
        connection.getpeername()
    except OSError:
        return False
    return True


def accepted(listener: socket.socket) -> RemoteLink:
    deadline = time.monotonic() + 60
    while (link := accept_remote(listener, TOKEN, 2)) is None:
        assert time.monotonic() < deadline
    return link


def test_where_nobody_listens() -> None:
    with listen_remotely("127.0.0.1") as listener:
        port = listener.getsockname()[1]
    with start_connecting("127.0.0.1", port, 2) as connection:
        until(lambda: connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), "a refusal")


def test_the_address_is_the_one_towards_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address_towards("127.0.0.1", 29500) == ("127.0.0.1", "127.0.0.1")
    assert address_towards("localhost", 29500)[0] == "localhost"

    def as_debian_has_it(host: str, port: int, **more: int) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.1.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", as_debian_has_it)
    assert address_towards("node0", 29500) == ("node0", "")
