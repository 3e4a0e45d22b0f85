"""Connections of a ROUTER, watched from outside: real sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import urlsplit

import pytest
import zmq

from ckptd.transport.admission import AdmissionLimits
from ckptd.transport.doorkeeper import Doorkeeper
from ckptd.transport.refusals import RefusalLog
from ckptd.transport.verbs import FabricCounters
from tests.transport.fabric_pairs import until


class Port:
    """A ROUTER with a doorkeeper."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = self._context.socket(zmq.ROUTER)
        self.refusals = RefusalLog(FabricCounters(), lambda line: None)
        self.door = Doorkeeper("test", self.router, AdmissionLimits(), self.refusals)
        self.router.bind("tcp://127.0.0.1:0")
        self._port = urlsplit(self.router.getsockopt_string(zmq.LAST_ENDPOINT)).port or 0
        self.door.start(self._port)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._port))

    def close(self) -> None:
        self.door.stop()
        self.router.close(linger=0)
        self._context.term()


@pytest.fixture
def port() -> Iterator[Port]:
    with closing(Port()) as port:
        yield port


def test_a_connection_that_is_gone_before_it_is_looked_at_is_counted(port: Port) -> None:
    """On a busy machine libzmq had closed it again before the thread of the door came to look at it: nobody counted it,
    and whoever knocked and ran was never seen."""
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
