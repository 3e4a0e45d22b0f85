"""Connections of a ROUTER, watched from outside: real sockets."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from urllib.parse import urlsplit

import pytest
import zmq

from ckptd.transport.access.admission import AdmissionLimits
from ckptd.transport.access.doorkeeper import Doorkeeper
from ckptd.transport.access.refusals import RefusalLog
from ckptd.transport.verbs import FabricCounters
from tests.transport.fabric_pairs import until

LIMITS = AdmissionLimits()
HURRIED = AdmissionLimits(patience_s=0.0)  # whoever is a stranger at a look is cut


class Port:
    """A ROUTER with a doorkeeper, whose thread does not run unless it is started."""

    def __init__(self, limits: AdmissionLimits = LIMITS, *, start: bool = True) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = self._context.socket(zmq.ROUTER)
        self.refusals = RefusalLog(FabricCounters(), lambda line: None)
        self.door = Doorkeeper("test", self.router, limits, self.refusals)
        self.router.bind("tcp://127.0.0.1:0")
        self._port = urlsplit(self.router.getsockopt_string(zmq.LAST_ENDPOINT)).port or 0
        self.door._port = self._port
        if start:
            self.door.start(self._port)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._port))

    def accepted(self, connection: socket.socket) -> int:
        """Connect it; returns the descriptor that libzmq has for it then."""
        connection.connect(("127.0.0.1", self._port))
        found: list[int] = []

        def look() -> bool:
            found[:] = [fd for fd in range(2048) if end_of(fd) == connection.getsockname()]
            return bool(found)

        until(look)
        return found[0]

    def hear(self, num_events: int) -> None:
        """Do what the door's thread does, until it has read so many events."""
        heard = 0
        accepted, disconnected = self.door._accepted, self.door._disconnected

        def count(fd: int) -> None:
            nonlocal heard
            heard += 1

        def on_accepted(fd: int) -> None:
            accepted(fd)
            count(fd)

        def on_disconnected(fd: int) -> None:
            disconnected(fd)
            count(fd)

        self.door._accepted, self.door._disconnected = on_accepted, on_disconnected  # type: ignore[method-assign]
        until(lambda: self.door._read_events() and heard >= num_events)
        self.door._look_after(time.monotonic() + 1)

    def close(self) -> None:
        self.door.stop()
        self.router.close(linger=0)
        self._context.term()


def open_descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def end_of(fd: int) -> object:
    """Who is at the other end of this descriptor; None if it is no connection. Opens nothing, which
    could take a number.
    """
    try:
        connection = socket.socket(fileno=fd)
    except OSError:
        return None
    try:
        return connection.getpeername()
    except OSError:
        return None
    finally:
        connection.detach()


def take_all_below(number: int, stack: ExitStack) -> None:
    """So that the next descriptor that is opened has this number, once it is free."""
    fd = -1
    while fd < number:
        fd = os.open(os.devnull, os.O_RDONLY)
        stack.callback(os.close, fd)


def is_cut(connection: socket.socket) -> bool:
    """Whether the other side has shut it down by now."""
    connection.setblocking(False)
    try:
        while said := connection.recv(4096):
            assert said
    except BlockingIOError:
        return False
    return True


@pytest.fixture
def port() -> Iterator[Port]:
    with closing(Port()) as port:
        yield port


def test_a_connection_that_is_gone_before_it_is_looked_at_is_counted(port: Port) -> None:
    """On a busy machine libzmq had closed it again before the thread of the door came to look at
    it: nobody counted it, and whoever knocked and ran was never seen.
    """
    with port.door._lock:  # the thread stops at the first
        first = port.connect()
        for _ in range(50):
            port.connect().close()
    until(lambda: port.refusals.counts["left"] == 50)
    first.close()
    until(lambda: port.refusals.counts["left"] == 51)


def test_an_end_that_was_not_seen_uses_up_the_refusal_of_its_key(port: Port) -> None:
    """Else the end of the next connection from that address would be taken for that of the refused key."""
    with port.door._lock:
        first = port.connect()
        port.connect().close()
        port.door._denied["127.0.0.1"] += 1
    until(lambda: not port.door._denied)
    first.close()
    until(lambda: port.refusals.counts["left"] == 1)


def test_an_event_that_is_heard_late_costs_the_next_with_its_descriptor_nothing() -> None:
    """A connection came and went, another one got its descriptor and said who it is, and only then
    the door heard of the first. It took the second for the first, heard that the first had ended,
    took the second for a new stranger when its arrival was told, and cut it when the time for
    strangers was over.
    """
    with (
        closing(Port(HURRIED, start=False)) as port,
        socket.socket() as gone,
        socket.socket() as friend,
    ):
        number = port.accepted(gone)
        gone.shutdown(socket.SHUT_RDWR)  # its own descriptor stays open: libzmq's is the lowest that is free
        until(lambda: not is_open(number))
        assert port.accepted(friend) == number
        port.door.identified(number, "friend", "127.0.0.1")
        port.hear(3)
        assert not is_cut(friend)
        assert not port.door._admission._strangers
        assert port.refusals.counts == {"left": 1}
        friend.shutdown(socket.SHUT_RDWR)
        until(lambda: not is_open(number))
        port.hear(1)
        assert len(port.door._admission) == 0
        assert port.refusals.counts == {"left": 1}


def test_an_end_that_is_heard_late_is_not_that_of_the_next_with_its_descriptor() -> None:
    """It was seen, and its end was heard when another connection had its descriptor and had said who it is."""
    with ExitStack() as stack:
        port = stack.enter_context(closing(Port(start=False)))
        gone, friend = (stack.enter_context(socket.socket()) for _ in range(2))
        number = port.accepted(gone)
        take_all_below(number, stack)
        port.hear(1)
        assert len(port.door._admission._strangers) == 1
        gone.shutdown(socket.SHUT_RDWR)
        until(lambda: not is_open(number))
        assert port.accepted(friend) == number
        port.door.identified(number, "friend", "127.0.0.1")
        port.hear(2)
        assert len(port.door._admission) == 1
        assert not port.door._admission._strangers
        assert port.refusals.counts == {"left": 1}


def test_a_message_of_a_connection_that_is_gone_lets_nobody_in() -> None:
    """Its descriptor was another's by then, who was let in for it. What tells them apart is the address."""
    with closing(Port(HURRIED, start=False)) as port, socket.socket() as stranger:
        number = port.accepted(stranger)
        port.door.identified(number, "friend", "10.0.0.7")
        port.hear(1)
        assert is_cut(stranger)


def test_looking_at_what_is_no_connection_costs_no_descriptor(port: Port) -> None:
    """The number may be a file's or a local socket's by the time one looks. A copy of each such
    file stayed open, and a local socket without a name raised.
    """
    near, far = socket.socketpair()
    with near, far, open(os.devnull) as file:
        before = len(open_descriptors())
        for fd in (file.fileno(), near.fileno(), 1 << 19):
            assert port.door._look(fd) is None
        assert len(open_descriptors()) == before
