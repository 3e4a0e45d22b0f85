"""Connections between hosts, over real sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ckptd.host.host_links import Link, LinkError, accept, connect, listen, remove_dead_sockets


@pytest.fixture
def pair() -> Iterator[tuple[Link, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Link(ours), theirs


def receive_in_pieces(link: Link, other: socket.socket, data: bytes) -> None:
    for start in range(0, len(data), 10_000):
        other.send(data[start : start + 10_000])
        link.receive()


def send_often(link: Link) -> None:
    for _ in range(100_000):
        link.send({"text": "x" * 1000})


def test_messages_arrive_whole_and_in_order(pair: tuple[Link, socket.socket]) -> None:
    link, other = pair
    sender = Link(other)
    for number in range(3):
        sender.send({"number": number, "text": "ä\n"})
    assert [m["number"] for m in link.receive()] == [0, 1, 2]
    assert link.receive() == []


def test_a_message_in_pieces(pair: tuple[Link, socket.socket]) -> None:
    link, other = pair
    other.send(b'{"a"')
    assert link.receive() == []
    other.send(b': 1}\n{"b": 2}\n{"c"')
    assert link.receive() == [{"a": 1}, {"b": 2}]


@pytest.mark.parametrize("data", [b"nonsense\n", b"[1]\n", b"\n", b"[" * 100_000 + b"\n", b"x" * 200_000])
def test_what_is_no_message_ends_the_connection(data: bytes, pair: tuple[Link, socket.socket]) -> None:
    link, other = pair
    other.setblocking(False)
    with pytest.raises(LinkError):
        receive_in_pieces(link, other, data)


def test_the_end_of_the_other_side_is_noticed(pair: tuple[Link, socket.socket]) -> None:
    link, other = pair
    other.close()
    with pytest.raises(LinkError, match="closed"):
        link.receive()
    with pytest.raises(LinkError, match="cannot send"):
        link.send({})


def test_an_end_that_does_not_read_blocks_nobody(pair: tuple[Link, socket.socket]) -> None:
    with pytest.raises(LinkError, match="cannot send"):
        send_often(pair[0])


def test_a_path_longer_than_a_socket_may_have(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 100) / ("e" * 100)
    folder.mkdir(parents=True, mode=0o700)
    assert connect(folder, "job.sock") is None
    with listen(folder, "job.sock") as listener:
        link = connect(folder, "job.sock")
        assert link is not None
        other = accept(listener)
        assert other is not None
        with closing(link), closing(other):
            link.send({"rank": 1})
            assert other.receive() == [{"rank": 1}]


def test_sockets_of_dead_hosts_are_removed_and_live_ones_stay(tmp_path: Path) -> None:
    listen(tmp_path, "dead.sock").close()
    with listen(tmp_path, "live.sock"):
        remove_dead_sockets(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["live.sock"]


def test_a_socket_of_a_dead_host_is_replaced(tmp_path: Path) -> None:
    listen(tmp_path, "job.sock").close()
    assert connect(tmp_path, "job.sock") is None
    with listen(tmp_path, "job.sock"):
        link = connect(tmp_path, "job.sock")
        assert link is not None
        link.close()
