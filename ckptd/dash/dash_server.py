"""The page of `ckptctl dash` over HTTP: one HTML file, and the newest view as JSON, for all viewers the same.

Read-only, and safe to leave open. Only GET is served. On a loopback address the Host header must name it, so
that no page of another site reads it by a name that resolves to this address (DNS rebinding). Elsewhere, and
wherever a token is given, the view is given for that token only; the page has it after the # of its address,
which browsers do not send. The page loads nothing from elsewhere (Content-Security-Policy). A client that is
slow or silent is one thread; beyond a number of connections the oldest one is closed.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import hmac
import ipaddress
import re
import socket
import threading
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import msgspec

from ckptd.dash.dash_view import DashView

__all__ = ["DashServer", "is_loopback"]

_CONNECTIONS = 32
_SOCKET_S = 5.0  # for a request, and for its answer
_SMALL_BYTES = 1024  # below, compression is no gain


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches the address.

    Raises:
        ValueError: it is no IP address.
    """
    return ipaddress.ip_address(address).is_loopback


@cache
def _page() -> tuple[bytes, str]:
    """The page, and its policy, which names the page's own script and style by their hashes."""
    html = Path(__file__).with_name("page.html").read_bytes()
    parts = {
        kind: re.search(rb"<%b>(.*?)</%b>" % (kind, kind), html, re.DOTALL) for kind in (b"script", b"style")
    }
    hashes = {
        kind.decode(): base64.b64encode(hashlib.sha256(found[1]).digest()).decode()
        for kind, found in parts.items()
        if found is not None
    }
    allowed = "; ".join(f"{kind}-src 'sha256-{digest}'" for kind, digest in hashes.items())
    rest = "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return html, f"default-src 'none'; {allowed}; {rest}"


class DashServer:
    """Serves in threads of its own until it is closed; a context manager.

    Args:
        token: that a viewer must have; "": none.
    Raises:
        OSError: the address or the port cannot be used.
    """

    def __init__(self, address: str, port: int, token: str = "") -> None:
        self._server = _Server(address, port, token)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where the page is, with the token."""
        # Not "token=": `ckptd.printable` would hide what follows, and this is printed to be used.
        fragment = f"#viewer={self._server.token}" if self._server.token else ""
        return f"http://{self._server.names[0]}/{fragment}"

    def publish(self, view: DashView) -> None:
        """Show this view from now on."""
        self._server.view = msgspec.json.encode(view)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: str, port: int, token: str) -> None:
        self.view, self.token = b"null", token
        self._open: dict[Any, None] = {}
        self._lock = threading.Lock()
        if ipaddress.ip_address(address).version == 6:
            self.address_family = socket.AF_INET6
        super().__init__((address, port), _Handler)
        host = f"[{address}]" if ":" in address else address
        if ipaddress.ip_address(address).is_unspecified:
            host = socket.gethostname()
        self.names = [f"{name}:{self.server_address[1]}" for name in (host, "localhost")]

    def server_bind(self) -> None:
        """As the base of the base does: a name of this host from the network's servers is of no use."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[request] = None
            oldest = next(iter(self._open)) if len(self._open) > _CONNECTIONS else None
            self._open.pop(oldest, None)
        if oldest is not None:
            oldest.shutdown(socket.SHUT_RDWR)  # its thread ends with an error, and closes it
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client went away, or was too slow: nobody needs to know."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _SOCKET_S
    server_version, sys_version = "ckptd", ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if not self.server.token and self.headers.get("Host", "") not in self.server.names:
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST, "this name is not that of the page")
        elif path == "/":
            html, policy = _page()
            self._send(html, "text/html; charset=utf-8", {"Content-Security-Policy": policy})
        elif path != "/view.json":
            self.send_error(HTTPStatus.NOT_FOUND)
        elif not self._has_token():
            self.send_error(HTTPStatus.UNAUTHORIZED, "the address of the page ends with #viewer=...")
        else:
            self._send(self.server.view, "application/json", {})

    def _has_token(self) -> bool:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        wanted = self.server.token
        return not wanted or hmac.compare_digest(given.encode(errors="replace"), wanted.encode())

    def _send(self, body: bytes, kind: str, headers: dict[str, str]) -> None:
        if len(body) > _SMALL_BYTES and "gzip" in self.headers.get("Accept-Encoding", ""):
            body = gzip.compress(body, 1)
            headers = headers | {"Content-Encoding": "gzip"}
        self.send_response(HTTPStatus.OK)
        common = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        for name, value in (common | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a viewer asks once a second."""
