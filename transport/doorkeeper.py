"""Who stands at the door of a ROUTER: libzmq accepts by itself, so its connections are watched, and cut, from outside.

A thread of its own reads the socket's monitor: each connection that was accepted is a visitor of an `Admission`, found by its
descriptor and by who is at the other end. Who may not stay has its TCP connection shut down, through a duplicate of
the descriptor that was compared with the visitor first (the number may be another's by now); libzmq then closes its own.

libzmq's I/O thread waits while nobody reads its events, so it cannot run ahead of this thread by more than a thousand connections
(the queue of the monitor). Nothing may call into the socket from here: its calls wait for that I/O thread.

Connections that were let in are watched as well: libzmq puts parts of one message, of which no end comes, into memory without a
bound. What a node's connections have received and nobody has taken may not grow beyond `MAX_QUEUED_BYTES`.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from ckptd.transport.admission import (
    Admission,
    AdmissionLimits,
    TurnedAway,
    TurnReason,
    source_of,
)
from ckptd.transport.refusals import RefusalLog

__all__ = ["MAX_QUEUED_BYTES", "TOLD", "Doorkeeper", "fd_of_frame", "source_of_frame"]

logger = logging.getLogger(__name__)

MAX_QUEUED_BYTES = (
    256 << 20
)  # more than the largest message and a full window of the largest chunks
LOOK_S = 0.2  # between two looks at what is queued
KEPT_ALIVE_BYTES = 64  # between two looks: more than heartbeats take
TCP_INFO_RECEIVED = 128  # offset of tcpi_bytes_received in struct tcp_info
EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
BATCH = 256  # events between two looks at the clock


class _Visitor(NamedTuple):
    """A connection: its descriptor in this process, and both ends."""

    fd: int
    here: tuple[Any, ...]
    there: tuple[Any, ...]

    @property
    def source(self) -> str:
        return source_of(self.there[0])


@dataclass(slots=True)
class _Queue:
    """What came in on a connection of a node, and what of it was taken; the latter is written by the thread of the socket alone."""

    node: str
    accounted: int
    taken: int = 0
    taken_before: int = 0  # at the last look


class Doorkeeper:
    """Made before the socket is bound, so that nothing is missed; works from `start` to `stop`."""

    def __init__(
        self, name: str, router: zmq.Socket[bytes], limits: AdmissionLimits, refusals: RefusalLog
    ) -> None:
        self._router = router
        self._refusals = refusals
        self._lock = threading.Lock()
        self._admission = Admission(limits)
        self._by_fd: dict[int, _Visitor] = {}
        self._early: dict[_Visitor, str] = {}  # identified before their arrival was heard of
        self._denied: Counter[str] = (
            Counter()
        )  # by address: keys refused, whose end is not heard of yet
        self._unseen: set[int] = (
            set()
        )  # closed before they were looked at; their end is not heard of yet
        self._queues: dict[int, _Queue] = {}
        self._port = 0
        self._monitor = router.get_monitor_socket(EVENTS)
        self._thread = threading.Thread(target=self._run, name=f"door-{name}", daemon=True)

    def start(self, port: int) -> None:
        self._port = port
        self._thread.start()

    def stop(self) -> None:
        """Watch no more. The thread that owns the socket calls this; the monitor is read until libzmq has stopped it."""
        self._router.disable_monitor()
        if self._thread.is_alive():
            self._thread.join()
        self._monitor.close(linger=0)

    # --- for the thread of the socket ---

    def identified(self, fd: int, node: str) -> None:
        """The connection with this descriptor has shown that it is of ``node``."""
        visitor = self._look(fd)
        if visitor is None:
            return  # closed meanwhile
        with self._lock:
            if self._by_fd.get(fd) != visitor:
                self._early[visitor] = node
                return
            turned = self._identify(visitor, node)
        self._turn(turned)

    def denied(self, source: str) -> None:
        """A key that came from this address was refused, and counted: the end of the connection is not counted again."""
        with self._lock:
            self._denied[source_of(source)] += 1

    def cut(self, fd: int, why: str) -> None:
        """End a connection that breaks the protocol."""
        visitor = self._look(fd)
        if visitor is not None:
            self._refusals.refused("flood", visitor.source, why)
            self._shut(visitor)

    def cut_node(self, fd: int, node: str) -> None:
        """End a connection of a node that is not trusted any more; one of another node with this descriptor stays."""
        with self._lock:
            visitor, queue = self._by_fd.get(fd), self._queues.get(fd)
        if visitor is not None and queue is not None and queue.node == node:
            self._shut(visitor)

    def took(self, fd: int, size_bytes: int) -> None:
        """So much of what this connection received was taken from the socket."""
        queue = self._queues.get(fd)
        if queue is not None:
            queue.taken += size_bytes

    # --- the thread ---

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._monitor, zmq.POLLIN)
        look_at_s = 0.0
        while True:
            poller.poll(int(LOOK_S * 1000))
            try:
                if not self._read_events():
                    return
                now_s = time.monotonic()
                with self._lock:
                    turned = self._admission.overdue(now_s)
                self._turn(turned)
                if now_s >= look_at_s:
                    look_at_s = now_s + LOOK_S
                    self._look_at_queues()
                    self._refusals.flush(now_s)
            except Exception:  # the thread's main: libzmq stands still when nobody reads its events
                logger.exception("watching the connections of a port failed")

    def _read_events(self) -> bool:
        """False: there will be no more."""
        for _ in range(BATCH):
            try:
                event = recv_monitor_message(self._monitor, zmq.DONTWAIT)
            except zmq.Again:
                return True
            if event["event"] == zmq.EVENT_MONITOR_STOPPED:
                return False
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._accepted(event["value"])
            else:
                self._disconnected(event["value"])
        return True

    def _accepted(self, fd: int) -> None:
        visitor = self._look(fd)
        if visitor is None:
            self._unseen.add(fd)
            return
        with self._lock:
            self._by_fd[fd] = visitor
            turned = self._admission.arrived(visitor, visitor.source, now_s=time.monotonic())
            node = self._early.pop(visitor, None)
            if node is not None:
                turned += self._identify(visitor, node)
        self._turn(turned)

    def _disconnected(self, fd: int) -> None:
        with self._lock:
            visitor = self._by_fd.pop(fd, None)
            self._queues.pop(fd, None)
            if visitor is None:
                source, unknown = "", fd in self._unseen
                self._unseen.discard(fd)
            else:
                source, unknown = visitor.source, self._admission.gone(visitor)
            denied = unknown and self._was_denied(source)
        if unknown and not denied:
            self._refusals.stranger("left", source, "it went without saying who it is")

    def _was_denied(self, source: str) -> bool:
        """Whether this end is that of a connection whose key was refused; "": of one whose address was never seen."""
        found = source or next(iter(self._denied), "")
        if self._denied[found] <= 0:
            return False
        self._denied[found] -= 1
        self._denied = +self._denied
        return True

    def _identify(self, visitor: _Visitor, node: str) -> list[TurnedAway]:
        self._queues[visitor.fd] = _Queue(node, _received(visitor.fd))
        return self._admission.identified(visitor, node)

    def _turn(self, turned: list[TurnedAway]) -> None:
        for each in turned:
            self._refusals.stranger(each.reason, each.source, TOLD[each.reason])
            assert isinstance(each.visitor, _Visitor)
            self._shut(each.visitor)

    # --- descriptors ---

    def _look(self, fd: int) -> _Visitor | None:
        """What has this number now, if it is a connection of ours."""
        try:
            with socket.socket(fileno=os.dup(fd)) as connection:
                return self._visitor(fd, connection)
        except OSError:
            return None

    def _visitor(self, fd: int, connection: socket.socket) -> _Visitor | None:
        visitor = _Visitor(fd, connection.getsockname(), connection.getpeername())
        return visitor if visitor.here[1] == self._port else None

    def _shut(self, visitor: _Visitor) -> None:
        with suppress(OSError), socket.socket(fileno=os.dup(visitor.fd)) as connection:
            if self._visitor(visitor.fd, connection) == visitor:
                connection.shutdown(socket.SHUT_RDWR)

    # --- what is queued ---

    def _look_at_queues(self) -> None:
        with self._lock:
            queues = list(self._queues.items())
        waiting: Counter[str] = Counter()
        largest: dict[str, tuple[int, int]] = {}
        for fd, queue in queues:
            size = _queued(fd, queue)
            waiting[queue.node] += size
            largest[queue.node] = max(largest.get(queue.node, (-1, -1)), (size, fd))
        for node, size in waiting.items():
            if size > MAX_QUEUED_BYTES:
                self._cut(node, largest[node][1], size)

    def _cut(self, node: str, fd: int, size_bytes: int) -> None:
        with self._lock:
            visitor = self._by_fd.get(fd)
        if visitor is not None:
            text = f"{size_bytes >> 20} MiB of {node} wait for the end of their message"
            self._refusals.refused("flood", visitor.source, text)
            self._shut(visitor)


def _queued(fd: int, queue: _Queue) -> int:
    """Bytes that libzmq holds of a connection; too few rather than too many."""
    received, taken = _received(fd), queue.taken
    queue.accounted += taken - queue.taken_before + KEPT_ALIVE_BYTES
    queue.accounted = min(queue.accounted, received)
    queue.taken_before = taken
    return received - queue.accounted


def _received(fd: int) -> int:
    """What the kernel has received on a connection since it began; 0 where it does not say (before Linux 4.1)."""
    try:
        with socket.socket(fileno=os.dup(fd)) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
    except OSError:
        return 0
    if len(info) < TCP_INFO_RECEIVED + 8:
        return 0
    return int(struct.unpack_from("=Q", info, TCP_INFO_RECEIVED)[0])


TOLD = {
    TurnReason.RATE: "connections come too fast from there",
    TurnReason.ADDRESS: "too many connections from there have not said who they are",
    TurnReason.STRANGERS: "too many connections have not said who they are",
    TurnReason.SILENT: "it did not say in time who it is",
    TurnReason.FULL: "no more connections are taken",
    TurnReason.PEER: "its node has too many connections, of which the oldest was closed",
}


def fd_of_frame(frame: zmq.Frame) -> int:
    """The descriptor that a message came over; -1 where libzmq does not say: whoever speaks its oldest protocol has none."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


def source_of_frame(frame: zmq.Frame) -> str:
    """The address that a message came from; "" where libzmq does not say."""
    try:
        return source_of(str(frame.get("Peer-Address")))
    except zmq.ZMQError:
        return ""
