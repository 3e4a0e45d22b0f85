"""Nodes come and go for months: a daemon does not remember the ones that were replaced."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator

import pytest

from ckptd.core.slots.segment_format import encode_descriptor
from ckptd.transport.messages import (
    Done,
    GetPeers,
    Join,
    Member,
    NodeCard,
    Peers,
    Reserve,
    Reserved,
)
from tests.ckptd.nodes import Net, Node
from tests.ckptd.running import attach, descriptor, eventually

pytestmark = pytest.mark.timeout(90)
REPLACED, AT_ONCE = 300, 100
DESCRIPTORS = 500


def descriptors(node: Node) -> int:
    assert node.process is not None
    return len(os.listdir(f"/proc/{node.process.pid}/fd"))


@pytest.fixture
def listeners() -> Iterator[list[str]]:
    """Addresses where connections are accepted, and nobody answers: hosts that hang."""
    opened = [socket.create_server(("127.0.0.1", 0)) for _ in range(5)]
    yield [f"tcp://127.0.0.1:{each.getsockname()[1]}" for each in opened]
    for each in opened:
        each.close()


def test_hundreds_of_replaced_nodes_leave_no_descriptors(listeners: list[str]) -> None:
    """Each of them left three descriptors behind: after 330 a daemon with the usual 1,024 was at its end."""
    with Net(2).up() as net, net[0].client() as client:
        here, other = net.nodes
        assert here.process is not None
        resource.prlimit(here.process.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
        attach(client, world_size=3, topology="dp3")
        with other.client() as there:
            cards = [c.ask(GetPeers(), Peers) for c in (client, there)]
        us, them = (NodeCard(c.node, c.endpoint, c.public_key) for c in cards)

        def join(epoch: int, third: NodeCard) -> None:
            members = (Member(us, (0,)), Member(them, (1,)), Member(third, (2,)))
            client.ask(Join(epoch, -1, members), Done)

        def known() -> set[str]:
            return {status.node for status in client.ask(GetPeers(), Peers).peers}

        join(0, NodeCard("first", listeners[0]))
        eventually(lambda: here.counters().get("event.peer_lost", 0) > 0, "the first is lost")
        before, most = descriptors(here), 0
        for number in range(REPLACED):
            dead = number % 2 == 0
            endpoint = "tcp://127.0.0.1:9" if dead else listeners[number % len(listeners)]
            join(number + 1, NodeCard(f"replaced-{number}", endpoint))
            if number % AT_ONCE == AT_ONCE - 1:  # it connects at its next beat
                lost = f"replaced-{number}: "
                eventually(lambda: here.saw("peer_lost", lost), lost)  # noqa: B023
                most = max(most, descriptors(here))
        assert before < most < DESCRIPTORS
        last = f"replaced-{REPLACED - 1}"
        eventually(lambda: known() == {"n1", last}, "only those with a part in the run are known")
        eventually(lambda: descriptors(here) <= before + 6, "their descriptors are closed")
        assert here.saw("peer_forgotten", "replaced-7 has no part in any run here")
        assert not here.saw("internal")
        assert not here.saw("too_many_peers")
        told = encode_descriptor(descriptor(world_size=3, topology="dp3"))
        client.ask(Reserve(1 << 20, 4, told), Reserved)
