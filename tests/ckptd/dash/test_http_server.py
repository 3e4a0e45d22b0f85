"""The server of pages: what it answers to whom, on several addresses, and to what is no HTTP."""

from __future__ import annotations

import asyncio
import errno
import gzip
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from email.message import Message
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPResponse
from operator import contains

import pytest

from ckptd.dash import http_server
from ckptd.dash.http_server import HttpServer, Page, Site, listener_at, shown_address
from tests.ckptd.running import eventually

LONG = Page(b"long " * 1000, "text/plain", {"X-Of": "long"})


async def short() -> Page:
    return Page(b"short", "text/plain")


async def long() -> Page:
    return LONG


def refuse(path: str, headers: Message) -> tuple[HTTPStatus, str] | None:
    return (HTTPStatus.UNAUTHORIZED, "not for you") if headers.get("X-Who") == "nobody" else None


@pytest.fixture
def served() -> Iterator[tuple[HttpServer, str, str]]:
    sites = [
        Site(listener_at("127.0.0.1:0"), {"/short": short, "/long": long}, refuse),
        Site(listener_at("127.0.0.1:0"), {"/": long}),
    ]
    one, other = (shown_address(site.listener) for site in sites)
    server = HttpServer("test", sites, connections=4)
    yield server, one, other
    server.close()
    for address in (one, other):
        host, _, port = address.rpartition(":")
        with socket.socket() as trial:
            assert trial.connect_ex((host, int(port))) != 0, "it listens no more"


def get(address: str, path: str, method: str = "GET", **headers: str) -> tuple[HTTPResponse, bytes]:
    connection = HTTPConnection(address, timeout=20)
    try:
        connection.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


def test_each_address_has_pages_of_its_own(served: tuple[HttpServer, str, str]) -> None:
    _, one, other = served
    assert get(one, "/short?query")[1] == b"short"
    answer, body = get(other, "/")
    assert (body, answer.getheader("X-Of"), answer.getheader("Cache-Control")) == (
        LONG.body,
        "long",
        "no-store",
    )
    assert get(other, "/short")[0].status == 404


def test_long_pages_are_compressed_for_those_who_understand_it(served: tuple[HttpServer, str, str]) -> None:
    _, one, _ = served
    answer, body = get(one, "/long", Accept_Encoding="br, gzip")
    assert answer.getheader("Content-Encoding") == "gzip"
    assert gzip.decompress(body) == LONG.body
    assert get(one, "/short", Accept_Encoding="gzip")[1] == b"short"
    assert get(one, "/long")[1] == LONG.body


def test_what_is_refused_has_its_status_and_reason(served: tuple[HttpServer, str, str]) -> None:
    _, one, _ = served
    answer, body = get(one, "/short", X_Who="nobody")
    assert (answer.status, body) == (401, b"Unauthorized: not for you\n")
    assert get(one, "/short", "POST")[0].status == 405
    assert get(one, "/nothing", X_Who="nobody")[0].status == 404


@pytest.mark.parametrize(
    "request_",
    [b"\r\n\r\n", b"\x16\x03\x01\r\n\r\n", b"GET\r\n\r\n", b"GET /short HTTP/1.1\r\n: : :\r\n\r\n"],
)
def test_what_is_no_http_harms_nobody(served: tuple[HttpServer, str, str], request_: bytes) -> None:
    server, one, _ = served
    host, _, port = one.rpartition(":")
    with socket.create_connection((host, int(port)), 20) as strange:
        strange.sendall(request_)
        strange.settimeout(20)
        while strange.recv(4096):
            pass
    assert get(one, "/short")[1] == b"short"
    eventually(lambda: server.open == 0, "nothing stays open")


def test_more_headers_than_anybody_sends_end_the_connection(served: tuple[HttpServer, str, str]) -> None:
    _, one, _ = served
    host, _, port = one.rpartition(":")
    with socket.create_connection((host, int(port)), 20) as strange:
        strange.sendall(b"GET /short HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n")
        assert strange.recv(1) == b""
    assert get(one, "/short")[1] == b"short"


def test_a_silent_client_is_closed_at_the_deadline(
    served: tuple[HttpServer, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_DEADLINE_S", 0.1)
    _, one, _ = served
    host, _, port = one.rpartition(":")
    with socket.create_connection((host, int(port)), 20) as silent:
        assert silent.recv(1) == b""


def test_connections_that_are_open_at_the_end_are_no_errors(caplog: pytest.LogCaptureFixture) -> None:
    listener = listener_at("127.0.0.1:0")
    server = HttpServer("test", [Site(listener, {"/": long})], connections=4)
    host, _, port = shown_address(listener).rpartition(":")
    with socket.create_connection((host, int(port)), 20) as silent:
        silent.sendall(b"GET / HTTP/1.1\r\n")
        eventually(lambda: server.open == 1, "the connection")
        server.close()
    assert not caplog.records


def test_what_makes_a_page_for_a_closed_connection_ends(caplog: pytest.LogCaptureFixture) -> None:
    making: list[int] = []
    ended: list[int] = []

    async def waits() -> Page:
        making.append(len(making))
        try:
            return await asyncio.Future()
        finally:
            ended.append(len(ended))

    listener = listener_at("127.0.0.1:0")
    server = HttpServer("test", [Site(listener, {"/": waits, "/short": short})], connections=3)
    host, _, port = shown_address(listener).rpartition(":")
    with ExitStack() as stack:
        for number in range(8):
            client = stack.enter_context(socket.create_connection((host, int(port)), 20))
            client.sendall(b"GET / HTTP/1.1\r\n\r\n")
            eventually(partial(contains, making, number), "it is asked for")
        eventually(lambda: len(ended) == 5, "the oldest five are given up")
        assert server.open == 3
        assert get(shown_address(listener), "/short")[1] == b"short"
        server.close()
    assert len(ended) == 8
    assert not caplog.records


def test_an_error_of_the_start_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: socket.socket) -> socket.socket:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(socket.socket, "dup", full)
    with listener_at("127.0.0.1:0") as listener, pytest.raises(OSError, match="too many open files"):
        HttpServer("test", [Site(listener, {"/": long})])


def test_a_server_whose_thread_has_ended_can_be_closed() -> None:
    server = HttpServer("test", [])
    server.close()
    server.close()
