"""A small HTTP server for pages that are only read: metrics, and the view for a person on call.

It serves GET on a thread of its own. A client that is slow, silent or hostile occupies one connection until
its deadline, and nothing else: beyond a number of connections the oldest one is closed. So its memory is
bounded, too. Clients are trusted with nothing: a request is at most 8 KiB, and each has a connection of its
own.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import logging
import os
import socket
import stat
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from email.message import Message
from functools import cached_property
from http import HTTPStatus
from http.client import HTTPException, parse_headers
from pathlib import Path

from ckptd.config.runtime_dir import give_to_group
from ckptd.transport.access.local_trust import check_way, own_users

logger = logging.getLogger(__name__)

_DEADLINE_S = 10.0  # Prometheus' own default for a scrape
_END_S = 0.5  # for connections that are open when the server ends
_CONNECTIONS = 8
_REQUEST_MAX = 8192
_PORT_MAX = 65_535
_SMALL_BYTES = 1024  # below, compression is no gain
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Connection": "close",
}


@dataclass(frozen=True)
class Page:
    """What a GET is answered with."""

    body: bytes
    kind: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def compressed(self) -> bytes:
        """The body for those who understand gzip."""
        return gzip.compress(self.body, 1)


@dataclass(frozen=True, slots=True)
class Site:
    """The pages at one address.

    Args:
        listener: a socket that listens.
        pages: by path, called on the server's thread.
        refuse: sees path and headers of a request before its page is made; None: it may have it.
    """

    listener: socket.socket
    pages: Mapping[str, Callable[[], Awaitable[Page]]]
    refuse: Callable[[str, Message], tuple[HTTPStatus, str] | None] = lambda _path, _headers: None


class HttpServer:
    """Serves sites until it is closed.

    Args:
        connections: open at a time, at most.
    Attributes:
        open: the number of open connections.
    Raises:
        OSError: there are too few file descriptors.
    """

    def __init__(self, name: str, sites: Sequence[Site], *, connections: int = _CONNECTIONS) -> None:
        self._sites, self._connections = sites, connections
        self._writers: dict[asyncio.StreamWriter, asyncio.Task[object]] = {}  # oldest first
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._serving: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._serving.result()

    @property
    def open(self) -> int:
        return len(self._writers)

    def close(self) -> None:
        """Stop listening; requests in progress end without an answer."""
        with suppress(RuntimeError):  # the thread has ended, and has closed the loop
            self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(1.0)
        for site in self._sites:
            close_listener(site.listener)

    # -- on the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except BaseException as error:  # for the thread that waits for the start
            if self._serving.done():
                raise
            self._serving.set_exception(error)

    async def _serve(self) -> None:
        servers = [await self._open_site(site) for site in self._sites]
        self._serving.set_result(None)
        await self._stopped.wait()
        for server in servers:
            server.close()
        tasks = list(self._writers.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_END_S)

    async def _open_site(self, site: Site) -> asyncio.Server:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._connected(site, reader, writer)

        # A duplicate: the loop closes its own, and the address is looked at when all is over.
        return await asyncio.start_server(connected, sock=site.listener.dup(), limit=_REQUEST_MAX)

    async def _connected(
        self, site: Site, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._writers[writer] = task
        if len(self._writers) > self._connections:
            self._writers.pop(next(iter(self._writers))).cancel()
        try:
            async with asyncio.timeout(_DEADLINE_S):
                await _answer(site, reader, writer)
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            logger.debug("a request was not answered: %r", error)
        except asyncio.CancelledError:  # by this server; Python 3.11 logs a traceback of each that leaves
            logger.debug("a request has ended without an answer")
        finally:
            self._writers.pop(writer, None)
            writer.transport.abort()


async def _answer(site: Site, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    request = io.BytesIO(await reader.readuntil(b"\r\n\r\n"))
    method, _, rest = request.readline().partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0].decode("latin-1")
    try:
        headers = parse_headers(request)
    except HTTPException:
        return  # no HTTP: not even an error is understood
    make = site.pages.get(path)
    refused: tuple[HTTPStatus, str] | None
    if method != b"GET":
        refused = HTTPStatus.METHOD_NOT_ALLOWED, "only GET is served"
    elif make is None:
        refused = HTTPStatus.NOT_FOUND, "there is no such page"
    else:
        refused = site.refuse(path, headers)
    if refused is not None or make is None:
        status, text = refused or (HTTPStatus.NOT_FOUND, "")
        page = Page(f"{status.phrase}: {text}\n".encode(), "text/plain; charset=utf-8")
    else:
        status, page = HTTPStatus.OK, await make()
    await _send(writer, status, page, compressed="gzip" in headers.get("Accept-Encoding", ""))


async def _send(writer: asyncio.StreamWriter, status: HTTPStatus, page: Page, *, compressed: bool) -> None:
    small = compressed and len(page.body) > _SMALL_BYTES
    body = page.compressed if small else page.body
    told = {"Content-Type": page.kind, "Content-Length": str(len(body)), **_HEADERS, **page.headers}
    told |= {"Content-Encoding": "gzip"} if small else {}
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{k}: {v}" for k, v in told.items())]
    writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
    writer.write(body)
    writer.close()
    await writer.wait_closed()


# -- addresses ------------------------------------------------------------------------------------


def listener_at(where: str, group: int | None = None) -> socket.socket:
    """A socket that listens at ``address:port`` or ``unix:/path``.

    Args:
        group: its members may connect to a unix socket besides this user; None: nobody else.
    Raises:
        OSError, UnusableFolder: the address cannot be used.
    """
    if where.startswith("unix:"):
        return _unix_listener(Path(where.removeprefix("unix:")), group)
    host, _, port = where.rpartition(":")
    if int(port) > _PORT_MAX:  # which the look-up would take for another one
        raise OSError(f"port {port} is above {_PORT_MAX}")
    family, _, _, _, address = socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    return socket.create_server(address[:2], family=family, backlog=_CONNECTIONS)


def close_listener(listener: socket.socket) -> None:
    """End what `listener_at` has made."""
    name = listener.getsockname()
    listener.close()
    if listener.family == socket.AF_UNIX:
        Path(name).unlink(missing_ok=True)


def shown_address(listener: socket.socket) -> str:
    """Where it listens, with the port that was chosen, as `listener_at` takes it."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{name}"
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _unix_listener(path: Path, group: int | None) -> socket.socket:
    """Listen at a path that no other user can change; replaces a socket on which nobody listens any more."""
    check_way(str(path.parent), own_users())
    if path.exists() and stat.S_ISSOCK(path.lstat().st_mode):
        with socket.socket(socket.AF_UNIX) as trial:
            if trial.connect_ex(str(path)) != 0:
                path.unlink()
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)  # nobody else connects, not even before the mode is set
    try:
        listener.bind(str(path))
        if group is not None:
            give_to_group(path, group, 0o660)
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(before)
    listener.listen(_CONNECTIONS)
    return listener
