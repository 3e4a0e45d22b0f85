"""HTTP for Prometheus: ``GET /metrics``, on a thread of its own.

The daemon's loop only collects what `ckptctl` would get, at most once in `_FRESH_S` and for at most
`_SHARE` of its time; the thread makes the page and waits for the network. A scraper that is slow, silent or
hostile occupies one of `_CONNECTIONS` for `_DEADLINE_S`, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ckptd.config.runtime_dir import UnusableFolder, give_to_group
from ckptd.node.admin import NodeView
from ckptd.node.metrics import metric_families
from ckptd.node_context import NodeContext
from ckptd.transport.access.local_trust import check_way, own_users

__all__ = ["MetricsListener"]

logger = logging.getLogger(__name__)

_FRESH_S = 1.0  # a page that is asked for again within this time is the same
# With 8 ranks of 34 slots, each an image of 600 tensors, the loop is busy for 50 ms.
_SHARE = 0.05
_DEADLINE_S = 10.0  # Prometheus' own default for a scrape
_CONNECTIONS = 8
_REQUEST_MAX = 8192
_PAGE_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ANSWERS = {200: "OK", 404: "Not Found", 405: "Method Not Allowed"}


class MetricsListener:
    """Listens at the configured address.

    Args:
        group: its members may connect to a unix socket besides this user; None: nobody else.
        view: describes the node; called on the daemon's loop thread.
    Attributes:
        address: where it listens, with the port that was chosen.
    Raises:
        UnusableFolder: the address cannot be used.
    """

    def __init__(self, node: NodeContext, group: int | None, view: Callable[[], NodeView]) -> None:
        self._node, self._view = node, view
        where = node.config.metrics
        self._path = Path(where.removeprefix("unix:")) if where.startswith("unix:") else None
        try:
            self._socket = _bind_tcp(where) if self._path is None else _bind_unix(self._path, group)
        except OSError as error:
            raise UnusableFolder(f"metrics cannot be served at {where}: {error}") from error
        self.address = where if self._path is not None else _shown(self._socket)
        self._open = 0
        self._page, self._page_until_s, self._took_s = b"", 0.0, 0.0
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._making = asyncio.Lock()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; scrapes in progress end without an answer."""
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(1.0)
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    # -- on the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, sock=self._socket, limit=_REQUEST_MAX)
        await self._stopped.wait()
        server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= _CONNECTIONS:
                async with asyncio.timeout(_DEADLINE_S):
                    await self._answer(reader, writer)
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            logger.debug("a scrape was not answered: %r", error)
        finally:
            self._open -= 1
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        method, _, rest = request.partition(b" ")
        target = rest.partition(b" ")[0].partition(b"?")[0]
        code = 405 if method != b"GET" else 200 if target == b"/metrics" else 404
        body = await self._current_page() if code == 200 else f"{_ANSWERS[code]}\n".encode()
        kind = _PAGE_TYPE if code == 200 else "text/plain"
        head = (
            f"HTTP/1.1 {code} {_ANSWERS[code]}\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        writer.close()
        await writer.wait_closed()

    async def _current_page(self) -> bytes:
        async with self._making:
            if time.monotonic() >= self._page_until_s:
                view = await asyncio.wrap_future(self._ask())
                self._page = generate_latest(_registry(view))
                self._page_until_s = time.monotonic() + max(_FRESH_S, self._took_s / _SHARE)
            return self._page

    def _ask(self) -> Future[NodeView]:
        """Have the daemon's loop describe the node."""
        asked: Future[NodeView] = Future()

        def describe() -> None:
            if not asked.set_running_or_notify_cancel():
                return  # the scraper is gone
            begun_s = time.monotonic()
            try:
                view = self._view()
                self._took_s = time.monotonic() - begun_s
                asked.set_result(view)
            except Exception as error:
                asked.set_exception(error)
                raise

        self._node.post(describe)
        return asked


class _OneView(Collector):
    def __init__(self, view: NodeView) -> None:
        self._view = view

    def collect(self) -> Iterable[Metric]:
        return metric_families(self._view)


def _registry(view: NodeView) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_OneView(view))
    return registry


def _bind_tcp(where: str) -> socket.socket:
    host, _, port = where.rpartition(":")
    family, _, _, _, address = socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    return socket.create_server(address[:2], family=family, backlog=_CONNECTIONS)


def _bind_unix(path: Path, group: int | None) -> socket.socket:
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


def _shown(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
