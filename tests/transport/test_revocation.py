"""A key that is taken back ends what its node has open, within a second; by fabric, with real sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from ckptd.transport.access.keys import Keys, trust, untrust
from ckptd.transport.fabric.frames import PROTOCOL, Open, encode
from ckptd.transport.fabric.zmq_fabric import ZmqFabric
from ckptd.transport.tcp.stream_fabric import StreamFabric
from ckptd.transport.verbs import Access, Fault, Scope
from tests.transport.fabric_pairs import CHUNK, WAIT_S, echo, settings, until

MakeFabric = Callable[..., ZmqFabric]


@pytest.fixture(params=[ZmqFabric, StreamFabric])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeFabric]:
    """Starts a fabric with keys in the folder of its name."""
    fabrics: list[ZmqFabric] = []

    def make(node: str, **options: float) -> ZmqFabric:
        keys = Keys.create(tmp_path / node)
        fabrics.append(request.param(node, "tcp://127.0.0.1:0", serve=echo, keys=keys, **settings(**options)))
        return fabrics[-1]

    yield make
    for fabric in fabrics:
        fabric.close()


def introduce(tmp_path: Path, here: ZmqFabric, there: ZmqFabric) -> None:
    trust(tmp_path / here.node, there.node, there.address.public_key)
    trust(tmp_path / there.node, here.node, here.address.public_key)


def test_a_node_that_is_untrusted_loses_its_connections(tmp_path: Path, make: MakeFabric) -> None:
    """Before, CURVE looked at a key once, at the handshake: a node whose key was deleted went on
    reading and writing for as long as its connections lasted.
    """
    here, there = make("here"), make("there")
    introduce(tmp_path, here, there)
    target = bytearray(2 * CHUNK)
    region = there.register(memoryview(target), access=Access.WRITE, scope=Scope("here"))
    data = memoryview(bytearray(b"\7" * len(target)))
    peer = here.peer(there.address)
    assert peer.put(data, region.key).wait(WAIT_S).ok

    untrust(tmp_path / "there", "here")
    # They are silent now: nothing but the look at the keys ends them. A stream ends at its own next
    # look, or with the control connection beside it.
    until(lambda: there.counters.revoked >= 1)
    until(lambda: not peer.put(data, region.key, deadline_s=3).wait(WAIT_S).ok)
    target[:] = bytes(len(target))
    put = peer.put(data, region.key, deadline_s=3).wait(WAIT_S)
    assert put.fault in (Fault.REFUSED, Fault.DEADLINE)
    answers: list[bytes | Fault] = []
    peer.request(b"?", timeout_s=2, answered=answers.append)
    until(lambda: bool(answers))
    assert isinstance(answers[0], Fault)
    assert target == bytes(len(target))

    trust(tmp_path / "there", "here", here.address.public_key)
    until(lambda: peer.put(data, region.key).wait(WAIT_S).ok)


def test_a_transfer_to_a_node_that_is_untrusted_ends(tmp_path: Path, make: MakeFabric) -> None:
    """What we were sending to a node goes no further once we do not trust it, though it still lets us in."""
    here, there = make("here", rate_bytes_per_s=CHUNK * 4), make("there")
    introduce(tmp_path, here, there)
    target = bytearray(1000 * CHUNK)
    region = there.register(memoryview(target), access=Access.WRITE, scope=Scope("here"))
    put = here.peer(there.address).put(
        memoryview(bytearray(b"\7" * len(target))), region.key, deadline_s=10 * WAIT_S
    )
    until(lambda: there.counters.received_bytes > 0)
    untrust(tmp_path / "here", "there")
    assert put.wait(WAIT_S).fault is Fault.REFUSED
    assert target[-1] == 0


def test_another_key_of_a_node_ends_what_its_old_key_has_open(tmp_path: Path, make: MakeFabric) -> None:
    """Whoever stole the key of a node must not stay in because the node got a new one."""
    here, there = make("here"), make("there")
    introduce(tmp_path, here, there)
    target = bytearray(1)
    region = there.register(memoryview(target), access=Access.WRITE, scope=Scope("here"))
    peer = here.peer(there.address)
    assert peer.put(memoryview(b"1"), region.key).wait(WAIT_S).ok
    trust(tmp_path / "there", "here", Keys.create(tmp_path / "new").public)
    until(lambda: there.counters.revoked >= 1)
    until(lambda: not peer.put(memoryview(b"1"), region.key, deadline_s=3).wait(WAIT_S).ok)
    put = peer.put(memoryview(b"2"), region.key, deadline_s=3).wait(WAIT_S)
    assert put.fault in (Fault.REFUSED, Fault.DEADLINE)
    assert target == b"1"


def test_the_connection_of_a_node_that_is_untrusted_is_cut(tmp_path: Path, make: MakeFabric) -> None:
    """It was only not served any more: whoever has a key that was taken back kept descriptors and
    memory here for as long as it liked.
    """
    there = make("there")
    keys = Keys.create(tmp_path / "here")
    trust(tmp_path / "there", "here", keys.public)
    with zmq.Context() as context, context.socket(zmq.DEALER) as here:
        here.linger = 0
        here.curve_publickey, here.curve_secretkey = keys.public.encode(), keys.secret.encode()
        here.curve_serverkey = there.address.public_key.encode()
        with here.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
            here.connect(there.address.endpoint)
            here.send(encode(Open(PROTOCOL, "here", "there", False)))
            assert here.poll(int(WAIT_S * 1000)), "it is not let in"
            here.recv()
            untrust(tmp_path / "there", "here")
            until(lambda: there.counters.revoked == 1)
            assert monitor.poll(int(WAIT_S * 1000)), "it is still connected"
            assert recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED
            until(lambda: there.refusals.counts["key"] >= 1)  # it knocks again, in vain
            here.disable_monitor()
