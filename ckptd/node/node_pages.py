"""What the daemon serves over HTTP: ``/metrics`` for Prometheus, and the page of `ckptctl dash`.

Both are made of the same description of the node. The daemon's loop makes it, only when somebody asks, at
most once in `_FRESH_S`, and so that it and the pages take at most `_SHARE` of the time; the server's thread
makes the pages of it and waits for the network.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from ckptd.config.runtime_dir import UnusableFolder
from ckptd.dash.dash_poll import SELDOM_S, DashMemory
from ckptd.dash.dash_server import dash_site, is_loopback, page_url, read_token, view_page
from ckptd.dash.dash_view import view_of
from ckptd.dash.http_server import HttpServer, Page, Site, close_listener, listener_at, shown_address
from ckptd.node.admin import NodeView
from ckptd.node_context import NodeContext
from ckptd.private_files import new_private_file

logger = logging.getLogger(__name__)

_FRESH_S = 1.0  # a page that is asked for again within this time is the same
# With 8 ranks of 34 slots, each an image of 600 tensors, the loop is busy for 50 ms.
_SHARE = 0.05
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_NO_EVENTS = 1 << 62  # no event has a higher number


class NodePages:
    """Serves at the addresses of the settings `metrics` and `dash`.

    Args:
        group: its members may connect to a unix socket besides this user, unless the daemon keeps them apart:
            pages show the jobs of all; None: nobody else.
        view: describes the node, with the events after one; called on the daemon's loop thread.
    Attributes:
        said: where each is, by the name of the setting, in words.
        addresses: where each listens, with the port that was chosen.
    Raises:
        UnusableFolder: an address cannot be used, or the page's token.
        ModuleNotFoundError: the library for metrics is not installed.
    """

    def __init__(self, node: NodeContext, group: int | None, view: Callable[[int], NodeView]) -> None:
        self._node, self._view_of = node, view
        self._isolated = node.config.isolate_users
        self._group = None if self._isolated else group
        self._describing: asyncio.Task[NodeView] | None = None
        self._until_s = self._seldom_due_s = 0.0
        self._memory = DashMemory()
        self._made: dict[str, tuple[NodeView, Page]] = {}
        self.said: dict[str, str] = {}
        self.addresses: dict[str, str] = {}
        self._listeners: list[socket.socket] = []
        try:
            sites = [*self._metrics_site(), *self._dash_site()]
            self.server = HttpServer("pages", sites)
        except BaseException as error:
            for listener in self._listeners:
                close_listener(listener)
            if isinstance(error, OSError):
                raise UnusableFolder(
                    f"the server of metrics and of the page cannot start: {error}"
                ) from error
            raise

    def close(self) -> None:
        """Stop listening; requests in progress end without an answer."""
        self.server.close()

    # -- sites -----------------------------------------------------------------------------------

    def _metrics_site(self) -> list[Site]:
        if not self._node.config.metrics:
            return []
        # Only here: its library takes memory that most daemons do not need.
        from ckptd.node.metrics import metrics_text

        def make(view: NodeView) -> Page:
            return Page(metrics_text(view), _METRICS_TYPE)

        async def metrics() -> Page:
            return await self._current("metrics", make)

        listener = self._listen("metrics", self._node.config.metrics)
        self.said["metrics"] = f"metrics are served at {self.addresses['metrics']}"
        return [Site(listener, {"/metrics": metrics})]

    def _dash_site(self) -> list[Site]:
        if not self._node.config.dash:
            return []

        async def dash() -> Page:
            return await self._current("dash", self._dash_page)

        listener = self._listen("dash", self._node.config.dash)
        unix = listener.family == socket.AF_UNIX
        if unix or (is_loopback(listener.getsockname()[0]) and not self._isolated):
            token, needed = "", ""
        else:
            path = Path(self._node.config.runtime_dir) / "dash.token"
            token, needed = _token_in(path), f"; viewers add #viewer= and the token in {path}"
        where = self.addresses["dash"] if unix else page_url(listener)
        self.said["dash"] = f"the page is served at {where}{needed}"
        return [dash_site(listener, dash, token)]

    def _listen(self, name: str, where: str) -> socket.socket:
        try:
            listener = listener_at(where, self._group)
        except OSError as error:
            raise UnusableFolder(f"{name} cannot be served at {where}: {error}") from error
        self._listeners.append(listener)
        self.addresses[name] = shown_address(listener)
        return listener

    # -- on the server's thread ------------------------------------------------------------------

    async def _current(self, name: str, make: Callable[[NodeView], Page]) -> Page:
        """The page as it was made of the newest description."""
        view = await self._description()
        of, page = self._made.get(name, (None, None))
        if page is None or of is not view:
            begun_s = time.monotonic()
            page = make(view)
            self._made[name] = view, page
            self._until_s += (time.monotonic() - begun_s) / _SHARE  # the loop waits for the interpreter
        return page

    def _dash_page(self, view: NodeView) -> Page:
        if time.monotonic() >= self._seldom_due_s:
            self._memory.place(view.elastic)
            self._seldom_due_s = time.monotonic() + SELDOM_S
        answers = self._memory.take(view.status, view.snapshots, view.peers, view.events, time.time())
        return view_page(view_of(answers))

    async def _description(self) -> NodeView:
        """The newest one. All requests share it: one that is cancelled has it not made again for the next."""
        made = self._describing
        if made is None or (made.done() and time.monotonic() >= self._until_s):
            made = self._describing = asyncio.create_task(self._describe())
        return await asyncio.shield(made)

    async def _describe(self) -> NodeView:
        since = self._memory.events_since(self._node.boot_id)
        asked_s, asked = self._ask(since if self._node.config.dash else _NO_EVENTS)
        view = await asyncio.wrap_future(asked)
        self._until_s = time.monotonic() + max(_FRESH_S, asked_s[0] / _SHARE)
        return view

    def _ask(self, since: int) -> tuple[list[float], Future[NodeView]]:
        """Have the daemon's loop describe the node; and how long that took, once it is done."""
        asked: Future[NodeView] = Future()
        took_s = [0.0]

        def describe() -> None:
            if not asked.set_running_or_notify_cancel():
                return  # who asked is gone
            begun_s = time.monotonic()
            try:
                view = self._view_of(since)
                took_s[0] = time.monotonic() - begun_s
                asked.set_result(view)
            except Exception as error:
                asked.set_exception(error)
                raise

        self._node.post(describe)
        return took_s, asked


def _token_in(path: Path) -> str:
    """The token in a file; a new one if there is no file. It stays the same over restarts."""
    try:
        with suppress(FileExistsError):
            new_private_file(path, secrets.token_urlsafe(24).encode())
        return read_token(path)
    except OSError as error:
        raise UnusableFolder(f"the token of the page cannot be kept in {path}: {error}") from error
    except ValueError as error:
        raise UnusableFolder(f"{error}; remove it for a new one") from error
