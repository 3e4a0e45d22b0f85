"""A process without descriptors cannot connect: what it asks of peers waits, and goes on when there
are some again.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from ckptd.transport.fabric.zmq_fabric import ZmqFabric
from ckptd.transport.tcp.stream_fabric import StreamFabric
from ckptd.transport.verbs import Access, Completion, Fault, Scope
from tests.transport.fabric_pairs import CHUNK, WAIT_S, echo, settings, until


@contextmanager
def no_descriptors() -> Iterator[None]:
    """No descriptor can be opened in this process, for a while."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/dev/null", os.O_RDONLY)  # all below it are taken
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("kind", [ZmqFabric, StreamFabric])
def test_what_is_asked_waits_until_there_are_descriptors(kind: type[ZmqFabric]) -> None:
    """It ended at once, as refused by the peer, which had not been asked."""
    told: list[str] = []
    here = kind("here", "tcp://127.0.0.1:0", serve=echo, tell=told.append, **settings())
    there = kind("there", "tcp://127.0.0.1:0", serve=echo, **settings())
    with closing(here), closing(there):
        target = bytearray(3 * CHUNK)
        region = there.register(memoryview(target), access=Access.WRITE, scope=Scope(""))
        peer = here.peer(there.address)
        answers: list[bytes | Fault] = []
        with no_descriptors():
            done: list[Completion] = []
            data = memoryview(b"\7" * len(target))
            put = peer.put(data, region.key, deadline_s=10 * WAIT_S, done=done.append)
            peer.request(b"?", timeout_s=10 * WAIT_S, answered=answers.append)
            until(lambda: here.refusals.counts["descriptors"] > 0)
            assert not done
            assert not answers
        assert "Too many open files" in told[0]
        assert put.wait(WAIT_S).ok
        until(lambda: answers == [b"here:?"])
        assert target == b"\7" * len(target)
