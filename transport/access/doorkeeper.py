"""Watches and cuts the connections of a ROUTER from outside: libzmq accepts them by itself.

A thread reads the socket's monitor. An event only says that something happened at a descriptor, and may come
late, when the number belongs to another connection. So an event is only a reason to look: a connection is
what has the number now (`Visitor`: its inode and both ends). It arrives when it is first seen, by an event or
because a message came over it, and it is gone when something else, or nothing, has its number. A connection
that may not stay (`Admission`) is shut down after it was compared with the visitor; libzmq then closes its
own end.

libzmq's I/O thread waits while nobody reads its events, so it cannot run ahead of this thread by more than
`AHEAD` connections (the queue of the monitor). Nothing here may call into the socket: its calls wait for that
I/O thread.

Connections over the network are measured as well: libzmq keeps the parts of an unfinished message in memory
without a bound. The bytes that a node's connections have received and nobody has taken may not exceed
`MAX_QUEUED_BYTES`, and those of the strangers of one address not `MAX_STRANGER_BYTES`.

On a local (ipc) socket (`LocalDoor`) processes of this host take the place of addresses. Strangers may be
silent there for as long as they like: a trainer's connection renews itself after a restart of the daemon, and
is silent until the trainer has something to say. They are bounded in number, for each process and together,
so a process that opens thousands of connections makes room for itself alone. libzmq aborts the process when
it cannot accept on such a socket for want of descriptors; so the process needs `AHEAD` spare descriptors
(`ENOUGH_DESCRIPTORS`).
"""

from __future__ import annotations

import logging
import math
import os
import resource
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from ckptd.transport.access.admission import (
    Admission,
    AdmissionLimits,
    TurnedAway,
    source_of,
)
from ckptd.transport.access.local_trust import peer_credentials, peer_groups
from ckptd.transport.access.refusals import RefusalLog

logger = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 256 << 20  # more than the largest message and a full window of the largest chunks
MAX_STRANGER_BYTES = 16 << 20  # a handshake and an `open` take less than a thousandth of it
LOOK_S = 0.2  # between two looks at the queues
SOON_S = 0.02  # the same when much is queued: a fast sender brings tens of MiB meanwhile
MUCH_BYTES = 16 << 20
AHEAD = 1001  # libzmq's own 1,000, and one: a queue of 0 has no bound
KEPT_ALIVE_BYTES = 64  # between two looks: more than heartbeats take
TCP_INFO_RECEIVED = 128  # offset of tcpi_bytes_received in struct tcp_info
EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
BATCH = 256  # events between two looks at the clock
ENOUGH_DESCRIPTORS = 4096  # two doors' `AHEAD`, and as many again for what is let in
assert ENOUGH_DESCRIPTORS > 3 * AHEAD


class Pin:
    """Looks at a descriptor of this process that another thread may close at any time. Any thread; one look
    at a time.

    The number of a closed descriptor goes to the next one that is opened. So each look is at a copy (`dup2`).
    The copy takes the place of a reserved descriptor, so it succeeds even when no descriptors are free, which
    is when connections have to be ended most.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._place = os.dup(self._nothing)

    @contextmanager
    def hold(self, fd: int) -> Iterator[socket.socket]:
        """The socket that has this number now.

        Raises:
            OSError: nothing has it, or something that is no socket.
        """
        with self._lock:
            os.dup2(fd, self._place, inheritable=False)
            try:
                connection = socket.socket(fileno=self._place)
                try:
                    yield connection
                finally:
                    connection.detach()
            finally:
                os.dup2(self._nothing, self._place, inheritable=False)

    def close(self) -> None:
        with self._lock:
            os.close(self._place)
            os.close(self._nothing)


class Visitor(NamedTuple):
    """A connection: its descriptor, what distinguishes it from earlier and later ones with that number, and
    its `source_of`.
    """

    fd: int
    inode: int
    ends: tuple[Any, ...]
    source: str


@dataclass(slots=True)
class _Queue:
    """Bytes that came in and bytes taken; the socket's thread alone writes ``taken``."""

    node: str  # "": a stranger's
    accounted: int
    taken: int = 0
    taken_before: int = 0  # at the last look

    def waiting(self, received: int) -> int:
        """Bytes that libzmq holds of a connection that has received so many; rather too few than too many."""
        taken = self.taken
        if self.node:
            self.accounted += taken - self.taken_before + KEPT_ALIVE_BYTES
        self.accounted = min(self.accounted, received)
        self.taken_before = taken
        return received - self.accounted


class Doorkeeper:
    """Made before the socket is bound, so that nothing is missed; works from `start` to `stop`."""

    def __init__(
        self, name: str, router: zmq.Socket[bytes], limits: AdmissionLimits, refusals: RefusalLog
    ) -> None:
        self._router = router
        self._refusals = refusals
        self._lock = threading.Lock()
        self._admission = Admission(limits)
        self._by_fd: dict[int, Visitor] = {}
        self._suspects: set[int] = set()  # open descriptors whose end was reported
        self._ended: Counter[int] = Counter()  # reported ends of connections that are not known yet
        self._early_ends: Counter[int] = Counter()  # ends that were seen before they were reported
        self._denied: Counter[str] = Counter()  # by address: refused keys whose end was not reported yet
        self._queues: dict[int, _Queue] = {}
        self._port = 0
        self._look_at_s = 0.0
        self._pin = Pin()
        self._monitor = _monitor_of(router)
        self._thread = threading.Thread(target=self._run, name=f"door-{name}", daemon=True)

    def start(self, port: int) -> None:
        """``port``: where the socket listens; 0 if that is no TCP port."""
        self._port = port
        self._thread.start()

    def stop(self) -> None:
        """Watch no more. Called by the socket's thread; reads the monitor until libzmq has stopped it."""
        self._router.disable_monitor()
        if self._thread.is_alive():
            self._thread.join()
        self._monitor.close(linger=0)
        self._pin.close()

    # --- for the thread of the socket ---

    def identified(self, fd: int, node: str, source: str) -> None:
        """A message from ``source`` has shown that the connection with this descriptor belongs to
        ``node``.
        """
        visitor = self._look(fd)
        if visitor is None or (source and visitor.source != source):
            return  # closed meanwhile
        with self._lock:
            turned = self._met(visitor)
            if self._admission.is_stranger(visitor):
                self._measure(visitor, node)
                turned += self._admission.identified(visitor, node)
        self._turn(turned)

    def denied(self, source: str) -> None:
        """A key from this address was refused, and counted: the end of its connection is not counted
        again.
        """
        with self._lock:
            self._denied[source_of(source)] += 1

    def cut(self, fd: int, why: str) -> None:
        """End a connection that breaks the protocol."""
        visitor = self._look(fd)
        if visitor is not None:
            self._refusals.refused("flood", visitor.source, why)
            self._shut(visitor)

    def cut_node(self, fd: int, node: str) -> None:
        """End a connection of a node that is not trusted any more, if this descriptor is still that
        node's.
        """
        with self._lock:
            visitor, queue = self._by_fd.get(fd), self._queues.get(fd)
        if visitor is not None and queue is not None and queue.node == node:
            self._shut(visitor)

    def took(self, fd: int, size_bytes: int) -> None:
        """So many received bytes of this connection were taken from the socket."""
        queue = self._queues.get(fd)
        if queue is not None:
            queue.taken += size_bytes

    # --- the thread ---

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._monitor, zmq.POLLIN)
        while True:
            wait_s = min(LOOK_S, max(0.0, self._look_at_s - time.monotonic()))
            poller.poll(math.ceil(wait_s * 1000))
            try:
                if not self._read_events():
                    return
                self._look_after(time.monotonic())
            except Exception:  # the thread's main: libzmq stands still when nobody reads its events
                logger.exception("watching the connections of a port failed")

    def _look_after(self, now_s: float) -> None:
        with self._lock:
            turned = self._admission.overdue(now_s)
        self._turn(turned)
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_S
            self._look_at_suspects()
            if self._look_at_queues() > MUCH_BYTES:
                self._look_at_s = now_s + SOON_S
            self._refusals.flush(now_s)

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
        """Somebody connected, who may be gone by now, or may have been met before."""
        visitor = self._look(fd)
        if visitor is None:
            return
        with self._lock:
            turned = self._met(visitor)
        self._turn(turned)

    def _disconnected(self, fd: int) -> None:
        """libzmq reports an end before it closes the descriptor; another may have the number by now."""
        with self._lock:
            if self._early_ends[fd] > 0:
                self._early_ends[fd] -= 1
            else:
                self._ended[fd] += 1
            self._suspects.add(fd)
        self._settle(fd)

    def _settle(self, fd: int, *, late: bool = False) -> None:
        """Compare who had a descriptor with who has it now; ``late``: a reported end should show."""
        now = self._look(fd)
        with self._lock:
            before = self._by_fd.get(fd)
            if before is None or before != now:
                self._suspects.discard(fd)
                if before is not None:
                    self._gone(before)
            elif not late:
                return
            for _ in range(self._ended.pop(fd, 0)):  # they came and went between two looks
                self._left("")

    def _look_at_suspects(self) -> None:
        with self._lock:
            suspects = list(self._suspects)
        for fd in suspects:
            self._settle(fd, late=True)

    # --- with the lock ---

    def _met(self, visitor: Visitor) -> list[TurnedAway]:
        """This connection exists. The one that had its descriptor before is gone, reported or not."""
        before = self._by_fd.get(visitor.fd)
        if before == visitor:
            return []
        if before is not None:
            self._gone(before)
        self._by_fd[visitor.fd] = visitor
        self._measure(visitor, "")
        return self._admission.arrived(visitor, visitor.source, now_s=time.monotonic())

    def _gone(self, visitor: Visitor) -> None:
        del self._by_fd[visitor.fd]
        self._queues.pop(visitor.fd, None)
        if self._ended[visitor.fd] > 0:
            self._ended[visitor.fd] -= 1
        else:
            self._early_ends[visitor.fd] += 1
        if self._admission.gone(visitor):
            self._left(visitor.source)

    def _left(self, source: str) -> None:
        """A stranger has gone without being turned away; "": its address was never seen."""
        if not self._was_denied(source):
            self._refusals.stranger(
                "left", source, "it left before it showed a key: it may have a wrong key of this node"
            )

    def _was_denied(self, source: str) -> bool:
        """Whether this is the end of a connection whose key was refused."""
        found = source or next(iter(self._denied), "")
        if self._denied[found] <= 0:
            return False
        self._denied[found] -= 1
        self._denied = +self._denied
        return True

    def _measure(self, visitor: Visitor, node: str) -> None:
        self._queues[visitor.fd] = _Queue(node, self._received(visitor.fd) if node else 0)

    # --- descriptors ---

    def _turn(self, turned: list[TurnedAway]) -> None:
        for each in turned:
            self._refusals.stranger(each.reason, each.source, each.reason.text)
            assert isinstance(each.visitor, Visitor)
            self._shut(each.visitor)

    def _look(self, fd: int) -> Visitor | None:
        """What has this number now, if it is a connection of ours."""
        try:
            with self._pin.hold(fd) as connection:
                return self._visitor(fd, connection)
        except OSError:
            return None

    def _visitor(self, fd: int, connection: socket.socket) -> Visitor | None:
        """Who is connected by this socket; None if it is not a connection of ours."""
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        here, there = connection.getsockname(), connection.getpeername()
        if here[1] != self._port:
            return None
        inode = os.fstat(connection.fileno()).st_ino
        return Visitor(fd, inode, (here, there), source_of(there[0]))

    def _shut(self, visitor: Visitor) -> None:
        with suppress(OSError), self._pin.hold(visitor.fd) as connection:
            if self._visitor(visitor.fd, connection) == visitor:
                connection.shutdown(socket.SHUT_RDWR)

    # --- what is queued ---

    def _look_at_queues(self) -> int:
        """Cut senders of endless messages; returns the bytes that wait, of all connections."""
        with self._lock:
            queues = [
                (fd, queue, visitor)
                for fd, queue in self._queues.items()
                if (visitor := self._by_fd.get(fd)) is not None
            ]
        waiting: Counter[tuple[bool, str]] = Counter()
        largest: dict[tuple[bool, str], tuple[int, Visitor]] = {}
        for fd, queue, visitor in queues:
            size = queue.waiting(self._received(fd))
            whose = (bool(queue.node), queue.node or visitor.source)
            waiting[whose] += size
            if whose not in largest or size > largest[whose][0]:
                largest[whose] = (size, visitor)
        for (known, name), size in waiting.items():
            if size > (MAX_QUEUED_BYTES if known else MAX_STRANGER_BYTES):
                what = "the end of a message" if known else "its sender to identify itself"
                visitor = largest[known, name][1]
                text = f"{size >> 20} MiB of {name} wait for {what}"
                self._refusals.refused("flood", visitor.source, text)
                self._shut(visitor)
        return waiting.total()

    def _received(self, fd: int) -> int:
        """The bytes received on a connection; 0 where the kernel does not say (before Linux 4.1)."""
        try:
            with self._pin.hold(fd) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
        except OSError:
            return 0
        if len(info) < TCP_INFO_RECEIVED + 8:
            return 0
        return int(struct.unpack_from("=Q", info, TCP_INFO_RECEIVED)[0])


def _monitor_of(router: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """Like `zmq.Socket.get_monitor_socket`, with the shortest queue that libzmq allows."""
    endpoint = f"inproc://door-{id(router):x}"
    router.monitor(endpoint, EVENTS)
    monitor: zmq.Socket[bytes] = router.context.socket(zmq.PAIR)
    monitor.linger = 0
    monitor.rcvhwm = 1  # on top of the 1,000 of the other end, which are fixed
    monitor.connect(endpoint)
    return monitor


def fd_of_frame(frame: zmq.Frame) -> int:
    """The descriptor that a message came over; -1 where libzmq does not say, as with its oldest protocol."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


def source_of_frame(frame: zmq.Frame) -> str:
    """The `source_of` of a message; "" where libzmq does not say."""
    try:
        return source_of(str(frame.get("Peer-Address")))
    except zmq.ZMQError:
        return ""


def local_limits(descriptors: int) -> AdmissionLimits:
    """The limits of local connections in a process with this many descriptors: an eighth of them."""
    if descriptors == resource.RLIM_INFINITY:
        descriptors = 1 << 20
    connections = max(32, min(2048, descriptors // 8))
    return AdmissionLimits(
        connections=connections,
        strangers=min(256, connections // 2),
        strangers_per_address=min(64, connections // 4),
        arrivals_per_s=500.0,  # no key is exchanged: it costs a tenth of a peer's
        arrivals_burst=1000.0,
        per_peer=min(256, connections // 2),
        patience_s=math.inf,
    )


class LocalDoor(Doorkeeper):
    """``path``: of the socket."""

    def __init__(
        self,
        router: zmq.Socket[bytes],
        limits: AdmissionLimits,
        refusals: RefusalLog,
        *,
        path: str,
    ) -> None:
        super().__init__("local", router, limits, refusals)
        self._path = path

    def heard(self, fd: int, process: int) -> None:
        """A message came over this connection, from this process (0 or less: it has no number here)."""
        self.identified(fd, _source(process), _source(process) if process > 0 else "")

    def groups_of(self, fd: int, process: int, user: int) -> frozenset[int]:
        """All groups of the process that sent a message over this connection, when it connected; none if the
        descriptor belongs to another process by now.

        Args:
            process, user: as the message says (`peer_process`, `peer_user`).
        """
        try:
            with self._pin.hold(fd) as connection:
                if self._visitor(fd, connection) is None:
                    return frozenset()
                pid, uid, gid = peer_credentials(connection)
                return peer_groups(connection) | {gid} if (pid, uid) == (process, user) else frozenset()
        except OSError:
            return frozenset()

    def _visitor(self, fd: int, connection: socket.socket) -> Visitor | None:
        if connection.family != socket.AF_UNIX or connection.getsockname() != self._path:
            return None
        pid = peer_credentials(connection)[0]
        return Visitor(fd, os.fstat(connection.fileno()).st_ino, (pid,), _source(pid))

    def _measure(self, visitor: Visitor, node: str) -> None:
        """The kernel does not say how much came over such a connection."""

    def _left(self, source: str) -> None:
        """Not worth a line: every client of ours connects once just to see whether a daemon listens."""


def _source(process: int) -> str:
    return f"process {process}" if process > 0 else "processes of other pid namespaces"
