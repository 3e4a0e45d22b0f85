"""Targets that a process reads from a socket."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import msgspec

from ckptd.core.recovery.held import _WireHeld, from_wire, to_wire
from ckptd.core.recovery.recovery_facts import RankFacts, facts_from_wire, facts_to_wire
from ckptd.dash.dash_server import dash_site
from ckptd.dash.http_server import Page, _answer
from ckptd.errors import RemoteProtocolError
from ckptd.host.coordinator import Coordinator
from ckptd.host.host_links import Link, LinkError, connect
from ckptd.host.host_loop import HostLoop
from ckptd.host.host_options import options_from
from ckptd.host.remote_links import RemoteLink
from ckptd.persistence import keeper_wire
from ckptd.transport import messages, peer_messages
from ckptd.transport.fabric import frames
from ckptd.transport.tcp import stream_frames
from ckptd.transport.verbs import Fault
from ckptd.transport.wire import WireError, decode, encode
from tests.fuzz.examples import examples_of
from tests.fuzz.mutations import in_json, in_msgpack, packed, xxh3
from tests.fuzz.target import Target, scratch

__all__ = ["WIRE_TARGETS", "host_lines", "http_requests", "mutate_lines"]

_WORLD = 3
_TOKEN = b"t" * 32
_POSITION = {"step": 3, "stage": 1, "state": "in_step", "idle_s": 9.5, "deadline_s": 5.0, "inquiry": 1}


def _encoded(union: Any, encode: Callable[[Any], bytes]) -> Callable[[], list[bytes]]:
    return lambda: [encode(message) for message in examples_of(union)]


def _control(data: bytes) -> None:
    envelope = encode(1, messages.Ping())[0]
    _, message = decode([envelope, data])
    assert decode(encode(1, message))  # what was accepted can be passed on


def _peer(data: bytes) -> None:
    message = peer_messages.decode_peer(data)
    assert peer_messages.decode_peer(peer_messages.encode_peer(message))


# -- streams -------------------------------------------------------------------------------------------


def _stream_seeds() -> list[bytes]:
    ask = stream_frames.StreamAsk(stream_frames.StreamKind.WRITE, 1, 2, bytes(16), 3, 4)
    data = stream_frames.StreamAnswer(stream_frames.StreamKind.DATA, 1, 8, 4096, 7)
    fault = stream_frames.encode_fault(1, 8, Fault.BOUNDS, "no such bytes")
    return [
        stream_frames.encode_preamble(bytes(32)),
        stream_frames.encode_ask(ask),
        stream_frames.encode_answer(data),
        fault[: stream_frames.ANSWER_BYTES],
    ]


def _stream(data: bytes) -> None:
    if len(data) == stream_frames.PREAMBLE_BYTES:
        stream_frames.decode_preamble(data)
    elif len(data) == stream_frames.ASK_BYTES:
        stream_frames.decode_ask(data)
    else:
        stream_frames.decode_answer(data[: stream_frames.ANSWER_BYTES].ljust(stream_frames.ANSWER_BYTES))


def _stream_mutate(form: struct.Struct) -> Any:
    return packed(form, seal=lambda packed: packed[:-8] + xxh3(packed[:-8]), body=False)


_mutate_ask, _mutate_answer = _stream_mutate(stream_frames.ASK), _stream_mutate(stream_frames.ANSWER)


# -- hosts of a job -----------------------------------------------------------------------------------


@cache
def _host_options() -> Any:
    world = str(_WORLD)
    environ = {"RANK": "0", "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    return options_from(["--max-restarts", "9", "train.py"], environ)


def host_lines() -> list[bytes]:
    """What a host says to that of rank 0: two greetings, and news of its trainer."""
    hellos = [{"rank": rank, "world_size": _WORLD, "node": rank} for rank in (1, 2)]
    told = [
        {"told": what, "epoch": 0, "why": "SIGKILL", **_POSITION}
        for what in ("started", "failed", "completed", "leaving", "overdue", "position")
    ]
    return [json.dumps(each).encode() + b"\n" for each in (*hellos, *told)]


def _host_seeds() -> list[bytes]:
    lines = host_lines()
    return [*lines, *(lines[0] + each for each in lines[2:]), lines[0] + lines[2] + lines[3]]


def _coordinate(data: bytes) -> None:
    """The coordinator of three hosts, one of which says what it likes; it must go on after that."""
    loop = HostLoop()
    coordinator = Coordinator(_host_options(), scratch(), loop, _obey)
    links: list[Link] = []
    try:
        coordinator.begin()
        lines = data.split(b"\n")
        if len(lines) < 2:
            return
        links += [_connected(), _connected()]
        links[0]._send_line(b"\n".join(lines[:-1]))
        links[1].send({"rank": 2, "world_size": _WORLD})
        for _ in range(4):
            loop.after(0.0, _nothing)
            loop.turn()
    finally:
        for link in links:
            link.close()
        coordinator.close()
        loop.close()


def _obey(order: dict[str, Any]) -> None:
    assert json.dumps(order)  # as the other hosts get it


def _connected() -> Link:
    link = connect(scratch(), f"{_host_options().job}.sock")
    assert link is not None, "it does not listen"
    return link


def _nothing() -> None:
    """The loop looks at its sockets."""


def mutate_lines(random: Any, data: bytes) -> bytes:
    lines = data.split(b"\n")
    at = random.randrange(len(lines))
    lines[at] = in_json(random, lines[at]).replace(b"\n", b"") if lines[at] else lines[at]
    return b"\n".join(lines)


def _remote(data: bytes) -> None:
    """A stranger at the port of a host on another machine."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs:
        link = RemoteLink(ours, _TOKEN, connects=False)
        try:
            theirs.sendall(data[:8192])
            assert link.receive() == []
            assert not link.proven
        finally:
            link.close()


# -- HTTP ---------------------------------------------------------------------------------------------


@cache
def _site() -> tuple[asyncio.AbstractEventLoop, Any]:
    async def current() -> Page:
        return Page(b"{}" * 1000, "application/json")

    listener = socket.create_server(("127.0.0.1", 0))
    return asyncio.new_event_loop(), dash_site(listener, current, "a-token-of-tests-4711")


class _Sink:
    """Takes what a connection would."""

    def write(self, data: bytes) -> None:
        assert data

    def close(self) -> None:
        """Nothing to close."""

    async def wait_closed(self) -> None:
        """It is."""


def _http(data: bytes) -> None:
    loop, site = _site()

    async def answered() -> None:
        reader = asyncio.StreamReader(limit=8192)
        reader.feed_data(data)
        reader.feed_eof()
        await _answer(site, reader, cast(asyncio.StreamWriter, _Sink()))

    loop.run_until_complete(answered())


def http_requests() -> list[bytes]:
    host = b"Host: localhost:80\r\nAccept-Encoding: gzip\r\n"
    token = b"Authorization: Bearer a-token-of-tests-4711\r\n"
    return [
        b"GET / HTTP/1.1\r\n" + host + b"\r\n",
        b"GET /view.json?x=1 HTTP/1.1\r\n" + host + token + b"\r\n",
        b"POST /metrics HTTP/1.0\r\n\r\n",
    ]


# -- what ranks tell each other ----------------------------------------------------------------------


def _fact_seeds() -> list[bytes]:
    ranks = tuple(range(0, 64, 2))
    return [facts_to_wire({rank: RankFacts(ranks, ranks, ranks) for rank in ranks}), to_wire([])]


def _facts(data: bytes) -> None:
    facts_from_wire([data])


def _held(data: bytes) -> None:
    to_wire(from_wire(data))


def _held_seeds() -> list[bytes]:
    return [b"\x91" + msgspec.msgpack.encode(each) for each in examples_of(_WireHeld)]


WIRE_TARGETS = (
    Target(
        "control", _encoded(messages.Message, lambda m: encode(1, m)[1]), _control, (WireError,), in_msgpack
    ),
    Target(
        "envelope",
        lambda: [encode(1, messages.Ping())[0]],
        lambda data: decode([data, b"\x81\xa4type\xa4Ping"]),
        (WireError,),
        in_msgpack,
    ),
    Target(
        "peer",
        _encoded(peer_messages.PeerMessage, peer_messages.encode_peer),
        _peer,
        (ValueError,),
        in_msgpack,
    ),
    Target("fabric_ask", _encoded(frames.Ask, frames.encode), frames.decode_ask, (ValueError,), in_msgpack),
    Target(
        "fabric_answer",
        _encoded(frames.Answer, frames.encode),
        frames.decode_answer,
        (ValueError,),
        in_msgpack,
    ),
    Target(
        "stream",
        _stream_seeds,
        _stream,
        (ValueError,),
        lambda random, data: (_mutate_ask if len(data) == stream_frames.ASK_BYTES else _mutate_answer)(
            random, data
        ),
    ),
    Target(
        "to_keeper",
        _encoded(keeper_wire.ToKeeper, msgspec.msgpack.encode),
        keeper_wire.decode_to_keeper,
        (ValueError,),
        in_msgpack,
    ),
    Target(
        "from_keeper",
        _encoded(keeper_wire.FromKeeper, msgspec.msgpack.encode),
        keeper_wire.decode_from_keeper,
        (ValueError,),
        in_msgpack,
    ),
    Target("coordinator", _host_seeds, _coordinate, (), mutate_lines),
    Target(
        "remote_host",
        lambda: [b"a" * 64 + b"\n", b"a" * 64 + b"\n" + b"b" * 64 + b"\n"],
        _remote,
        (LinkError,),
    ),
    Target("http", http_requests, _http, (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)),
    Target("rank_facts", _fact_seeds, _facts, (RemoteProtocolError,), in_msgpack),
    Target("held_records", _held_seeds, _held, (RemoteProtocolError,), in_msgpack),
)
