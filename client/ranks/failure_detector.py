"""Detects that a rank is gone, for those that wait for it at a barrier: each rank watches the next one.

A rank whose host is lost before it comes to a barrier (`store_barrier`) would be waited for until
the deadline: its launcher is gone with it, the launchers of the others see healthy workers, and no
collective is under way whose connections would break.

There are two signs. The ranks form a ring, so a rank watches one other, whatever the world size:

- *a connection that breaks*, and cannot be made again. Nothing is sent on it, the kernel keeps it:
  it breaks at once when the process ends, and within some ten seconds (keepalive) when the host
  loses power; a process that computes for minutes, or that a debugger stopped, still has it;
- where it never could be made (a firewall, say): *a counter in the job's store* that stands still
  for a minute.

The rank that sees it writes it where all waiting ranks look, and takes it back when the other is found again.
"""

from __future__ import annotations

import contextlib
import ipaddress
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from ckptd.client.log_lines import get_logger
from ckptd.client.ranks.store_connection import own_connection

__all__ = ["FailureDetector"]

logger = get_logger(__name__)

_BEAT_S, _SILENT_S = 5.0, 60.0
_LOOK_S = 0.5
_CONNECT_S, _TRIES = 2.0, 2
# Broken after 3 + 3 x 2 seconds without an answer of the other kernel.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 3, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3}


class FailureDetector:
    """This rank's part of the ring; it begins when it is made, and needs a `TCPStore` (with another
    store nobody is watched).

    Args:
        store: of the job; a connection of its own is made.
        prefix: of the keys: the same on all ranks, and of this process group alone.
    Attributes:
        gone_key: there while a rank is gone: which, and how it is known.
    """

    def __init__(self, store: Any, prefix: str, *, rank: int, world_size: int) -> None:
        self.gone_key = f"{prefix}/gone"
        self._prefix, self._rank, self._world_size = prefix, rank, world_size
        self._next = (rank + 1) % world_size
        self._closed, self._wake = False, threading.Event()
        self._connection: socket.socket | None = None
        self._watched_by: socket.socket | None = None
        self._reported = ""
        server = _tcp_store(store)
        if server is not None:
            thread = threading.Thread(
                target=self._run, args=(store, server), name="ckptd-rank-watch", daemon=True
            )
            thread.start()

    def close(self) -> None:
        """End it soon; the rank before this one will find it gone."""
        self._closed = True
        self._wake.set()

    def all_are_here(self) -> None:
        """All ranks were here a moment ago: the next one can be found."""
        self._wake.set()

    def _run(self, store: Any, server: Any) -> None:
        try:
            own = own_connection(store)
            with _listener(server.host, server.port) as (host, listening):
                # A launcher may keep one store for all lives of a job: nothing of an earlier one counts.
                own.delete_key(self.gone_key)
                own.set(f"{self._prefix}/at/{self._rank}", f"{host} {listening.getsockname()[1]}")
                self._watch(own, listening)
        except Exception as error:  # noqa: BLE001 - see the next line
            # The store ends with the job, in many ways; a rank that waits at it finds that there.
            logger.debug("rank %d is not watched any more: %s", self._next, error)
        finally:
            self._drop()
            if self._watched_by is not None:
                self._watched_by.close()

    def _watch(self, store: Any, listening: socket.socket) -> None:
        beats = _Beats(store, f"{self._prefix}/beats", self._rank, self._next)
        address: tuple[str, int] | None = None
        was_there, failed = False, 0
        while not self._closed:
            if not self._is_watched(listening):
                beats.beat()
            if address is None:
                address = _address(store, f"{self._prefix}/at/{self._next}")
                if address is None:
                    self._pause(_LOOK_S)
            elif self._connection is None and not self._connect(address):
                failed += 1
                address = _address(store, f"{self._prefix}/at/{self._next}") or address
                if was_there and failed >= _TRIES:
                    self._report(store, address[0], "its connection broke")
                elif not was_there and beats.silent_s() > _SILENT_S:
                    self._report(store, address[0], f"no sign of it for {_SILENT_S:.0f} s")
                self._pause(_LOOK_S if was_there and failed < _TRIES else _BEAT_S)
            else:
                was_there, failed = True, 0
                self._report(store, "", "")
                self._wait_for_end(_BEAT_S)

    def _is_watched(self, listening: socket.socket) -> bool:
        """Whether the rank before this one has connected: it needs no beats then, and the store is
        left alone.
        """
        with contextlib.suppress(BlockingIOError):
            came, _ = listening.accept()
            if self._watched_by is not None:
                self._watched_by.close()
            self._watched_by = came
        return self._watched_by is not None

    def _pause(self, most_s: float) -> None:
        self._wake.wait(most_s)
        self._wake.clear()

    def _report(self, store: Any, host: str, how: str) -> None:
        """Write what all ranks should know of the next one; no text: it is there."""
        text = f"rank {self._next} of {self._world_size} ({host}) is gone: {how}" if how else ""
        if text:
            if text != self._reported:
                logger.info("%s", text)
            store.set(self.gone_key, text)  # each time: another rank may have taken back what it said there
        elif (
            self._reported
            and store.check([self.gone_key])
            and store.get(self.gone_key).decode() == self._reported
        ):
            store.delete_key(self.gone_key)
        self._reported = text

    # -- the connection ----------------------------------------------------------------------------

    def _connect(self, address: tuple[str, int]) -> bool:
        try:
            made = socket.create_connection(address, timeout=_CONNECT_S)
        except OSError as error:
            logger.debug("rank %d cannot be reached: %s", self._next, error)
            return False
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            made.setsockopt(socket.IPPROTO_TCP, option, value)
        self._connection = made
        return True

    def _wait_for_end(self, most_s: float) -> None:
        """Wait until the connection ends, which is dropped then; at most so long."""
        assert self._connection is not None
        poll = select.poll()  # descriptors may be above what select() takes
        poll.register(self._connection, select.POLLIN)
        if not poll.poll(most_s * 1e3):
            return
        with contextlib.suppress(OSError):  # it broke: that is what is asked here
            if self._connection.recv(1):
                return
        self._drop()

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


class _Beats:
    """Counters in the store: of this rank, and of the one that it watches."""

    def __init__(self, store: Any, prefix: str, mine: int, other: int) -> None:
        self._store, self._mine, self._other = store, f"{prefix}/{mine}", f"{prefix}/{other}"
        self._next_s = 0.0
        self._heard, self._heard_s = -1, time.monotonic()

    def beat(self) -> None:
        """Count on, if it is time to."""
        if time.monotonic() >= self._next_s:
            self._store.add(self._mine, 1)
            self._next_s = time.monotonic() + _BEAT_S

    def silent_s(self) -> float:
        """Seconds since the other's was seen to change."""
        heard = self._store.add(self._other, 0)
        if heard != self._heard:
            self._heard, self._heard_s = heard, time.monotonic()
        return time.monotonic() - self._heard_s


@contextlib.contextmanager
def _listener(host: str, port: int) -> Iterator[tuple[str, socket.socket]]:
    """Listen on the way to there: by what name or address others reach this host, and the socket,
    which does not block.

    It is the kernel that completes connections, keeps them, and ends them with the process.
    """
    family, here = _way_to(host, port)
    # Where the store's own host has its name at a loopback address, the others know it by that name only.
    by_name = _is_loopback(here) and host != "localhost" and not _is_loopback(host)
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.bind(("" if by_name else here, 0))
        listening.listen()
        listening.setblocking(False)
        yield host if by_name else here, listening


def _way_to(host: str, port: int) -> tuple[socket.AddressFamily, str]:
    """This host's address on the way there, and its family."""
    failed: OSError | None = None
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(address)  # sends nothing: the kernel chooses the way
            except OSError as error:
                failed = error
                continue
            return family, str(probe.getsockname()[0])
    raise OSError(f"no way to {host}") from failed


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:  # a name
        return False


def _address(store: Any, key: str) -> tuple[str, int] | None:
    if not store.check([key]):
        return None
    host, port = store.get(key).decode().split()
    return host, int(port)


def _tcp_store(store: Any) -> Any:
    """The `TCPStore` under its prefixes; None if it is another kind of store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store if isinstance(store, dist.TCPStore) else None  # type: ignore[attr-defined]
