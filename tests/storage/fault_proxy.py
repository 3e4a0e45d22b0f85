"""An HTTP proxy in front of an S3 server that does what networks and busy servers do."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

__all__ = [
    "Answer",
    "Duplicate",
    "FaultProxy",
    "LoseAnswer",
    "Request",
    "Reset",
    "Stall",
    "Truncate",
    "completes",
    "is_put",
    "method",
    "uploads_part",
]

_BLOCK = 64 << 10


@dataclass(frozen=True)
class Request:
    """What a fault may ask of a request."""

    method: str
    path: str
    query: dict[str, str]


@dataclass(frozen=True)
class Answer:
    """Answer at once, with an S3 error; the server never hears of the request."""

    status: int = 503
    code: str = "SlowDown"


@dataclass(frozen=True)
class Reset:
    """Break the connection after so many bytes of the request's body."""

    after: int


@dataclass(frozen=True)
class Stall:
    """Take the request, and say nothing any more."""


@dataclass(frozen=True)
class Truncate:
    """Promise the whole body of the answer, send so many bytes of it, and close."""

    after: int


@dataclass(frozen=True)
class LoseAnswer:
    """Let the server do it, and break the connection instead of telling."""


@dataclass(frozen=True)
class Duplicate:
    """Send the request twice; the client gets the first or the second answer."""

    answer: int = 1


Fault = Answer | Reset | Stall | Truncate | LoseAnswer | Duplicate
Match = Callable[[Request], bool]


@dataclass
class FaultProxy:
    """Faults are used up in their order, each by requests that match it, ``times`` times."""

    upstream: int
    requests: list[Request] = field(default_factory=list)
    _faults: list[tuple[Fault, Match, int]] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._lock = threading.Lock()
        self.ended = threading.Event()
        self._server = _Server(self)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.ended.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def inject(self, fault: Fault, match: Match = lambda request: True, times: int = 1) -> None:
        """Do this to the next requests that match."""
        with self._lock:
            self._faults.append((fault, match, times))

    def count(self, match: Match) -> int:
        """How many such requests came."""
        with self._lock:
            return sum(1 for request in self.requests if match(request))

    def met(self, request: Request) -> Fault | None:
        """Note the request; what is to happen to it."""
        with self._lock:
            self.requests.append(request)
            for index, (fault, match, times) in enumerate(self._faults):
                if match(request):
                    if times > 1:
                        self._faults[index] = (fault, match, times - 1)
                    else:
                        del self._faults[index]
                    return fault
        return None


def method(name: str) -> Match:
    return lambda request: request.method == name


def is_put(request: Request) -> bool:
    """A whole object."""
    return request.method == "PUT" and "partNumber" not in request.query


def uploads_part(number: int | None = None) -> Match:
    wanted = None if number is None else str(number)
    return lambda request: "partNumber" in request.query and wanted in (None, request.query["partNumber"])


def completes(request: Request) -> bool:
    return request.method == "POST" and "uploadId" in request.query


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, proxy: FaultProxy) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.proxy = proxy

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Broken connections are this proxy's trade."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def _handle(self) -> None:
        url = urlsplit(self.path)
        request = Request(self.command, url.path, dict(parse_qsl(url.query, keep_blank_values=True)))
        fault = self.server.proxy.met(request)
        length = int(self.headers.get("Content-Length", 0))
        if isinstance(fault, Reset):
            self._receive(min(fault.after, length))
            self._reset()
            return
        body = self._receive(length)
        match fault:
            case Stall():
                self.server.proxy.ended.wait(60)
                self.close_connection = True
            case Answer(status, code):
                # An answer to HEAD has no body: it would be taken for the beginning of the next answer.
                text = "" if self.command == "HEAD" else f"<Error><Code>{code}</Code></Error>"
                self._tell(status, [], text.encode())
            case LoseAnswer():
                self._forward(body)
                self._reset()
            case Truncate(after):
                status, headers, data = self._forward(body)
                self._tell(status, headers, data, send=after)
                self.close_connection = True
            case Duplicate(answer):
                answers = [self._forward(body), self._forward(body)]
                self._tell(*answers[answer])
            case None:
                self._tell(*self._forward(body))

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _handle

    def _receive(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            block = self.rfile.read(min(_BLOCK, length - len(data)))
            if not block:
                raise ConnectionError("the client went away")
            data += block
        return bytes(data)

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.proxy.upstream, timeout=60)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("expect", "connection"):
                    upstream.putheader(name, value)
            upstream.endheaders(body)
            answer = upstream.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            upstream.close()

    def _tell(
        self, status: int, headers: list[tuple[str, str]], data: bytes, send: int | None = None
    ) -> None:
        self.send_response_only(status)
        length = str(len(data))
        for name, value in headers:
            if name.lower() == "content-length":
                length = value  # that of HEAD is not the body's
            elif name.lower() not in ("connection", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(data[:send])
        self.wfile.flush()

    def _reset(self) -> None:
        """Close without a goodbye (RST)."""
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.close_connection = True
        self.connection.close()
