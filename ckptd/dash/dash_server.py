"""The page over HTTP: one HTML file, and the newest view as JSON, for all viewers the same.

Read-only, and safe to leave open. On a loopback address the Host header must name it, so that no page of
another site reads it by a name that resolves to this address (DNS rebinding). Elsewhere, and wherever a token
is given, the view is given for that token only; the page has it after the # of its address, which browsers do
not send. The page loads nothing from elsewhere (Content-Security-Policy). Whoever reaches a unix socket may
have it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable
from email.message import Message
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Self

import msgspec

from ckptd.dash.dash_view import DashView
from ckptd.dash.http_server import HttpServer, Page, Site, listener_at

_CONNECTIONS = 32
_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,}")


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches the address.

    Raises:
        ValueError: it is no IP address.
    """
    return ipaddress.ip_address(address).is_loopback


@cache
def _page() -> Page:
    """The page, with its policy, which names the page's own script and style by their hashes."""
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
    policy = f"default-src 'none'; {allowed}; {rest}"
    return Page(html, "text/html; charset=utf-8", {"Content-Security-Policy": policy})


async def _static_page() -> Page:
    return _page()


def view_page(view: DashView) -> Page:
    """What the page asks for again and again."""
    return Page(msgspec.json.encode(view), "application/json")


def dash_site(listener: socket.socket, view: Callable[[], Awaitable[Page]], token: str = "") -> Site:
    """The page, and its view.

    Args:
        view: makes a `view_page`.
        token: that a viewer must have; "": none.
    """
    names = () if listener.family == socket.AF_UNIX else _names(listener)

    def refuse(path: str, headers: Message) -> tuple[HTTPStatus, str] | None:
        if not token and names and headers.get("Host", "") not in names:
            return HTTPStatus.MISDIRECTED_REQUEST, "this name is not that of the page"
        if path != "/" and token and not _has(token, headers):
            return HTTPStatus.UNAUTHORIZED, "the address of the page ends with #viewer=..."
        return None

    return Site(listener, {"/": _static_page, "/view.json": view}, refuse)


def read_token(path: Path) -> str:
    """The token in a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds none.
    """
    token = path.read_text(encoding="ascii", errors="replace").strip()
    if not _TOKEN.fullmatch(token):
        raise ValueError(f"{path} holds no token: at least 16 letters, digits, - or _ are expected")
    return token


def page_url(listener: socket.socket, token: str = "") -> str:
    """Where the page is, with the token; of a TCP listener."""
    # Not "token=": `ckptd.printable` would hide what follows, and this is printed to be used.
    fragment = f"#viewer={token}" if token else ""
    return f"http://{_names(listener)[0]}/{fragment}"


def _has(token: str, headers: Message) -> bool:
    given = headers.get("Authorization", "").removeprefix("Bearer ")
    return hmac.compare_digest(given.encode(errors="replace"), token.encode())


def _names(listener: socket.socket) -> tuple[str, ...]:
    """What may stand for its address in a URL."""
    address, port = listener.getsockname()[:2]
    host = f"[{address}]" if ":" in address else address
    if ipaddress.ip_address(address).is_unspecified:
        host = socket.gethostname()
    return tuple(f"{name}:{port}" for name in (host, "localhost"))


class DashServer:
    """Serves views that are published, until it is closed; a context manager.

    Args:
        token: that a viewer must have; "": none.
    Attributes:
        url: where the page is, with the token.
    Raises:
        OSError: the address or the port cannot be used.
    """

    def __init__(self, address: str, port: int, token: str = "") -> None:
        host = f"[{address}]" if ":" in address else address
        listener = listener_at(f"{host}:{port}")
        self._view = Page(b"null", "application/json")
        self.url = page_url(listener, token)
        self._server = HttpServer(
            "dash", [dash_site(listener, self._current, token)], connections=_CONNECTIONS
        )

    async def _current(self) -> Page:
        return self._view

    def publish(self, view: DashView) -> None:
        """Show this view from now on."""
        self._view = view_page(view)

    def close(self) -> None:
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
