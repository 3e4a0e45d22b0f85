"""Nodes that have another address than before, and others that only say so, from real daemons."""

from __future__ import annotations

import pytest

from ckptd.transport import peer_messages as p
from ckptd.transport.access.keys import Keys, trust
from ckptd.transport.messages import GetHoldings, GetPeers, Member, NodeCard, Peers, RunRecord
from tests.ckptd.nodes import PORT, Net, Node
from tests.ckptd.peers_harness import Job
from tests.ckptd.puppet import Puppet
from tests.ckptd.running import eventually

pytestmark = pytest.mark.timeout(90)


def endpoint_of(node: Node, other: str) -> str:
    """Where a node looks for another one that answers; "" if it does not."""
    with node.client() as client:
        peers = client.ask(GetPeers(), Peers).peers
    return next((peer.endpoint for peer in peers if peer.node == other and peer.alive), "")


def test_a_daemon_that_comes_back_at_another_address_gets_replicas_again() -> None:
    """As a pod does whose daemon is upgraded while a job runs. The other nodes heard of it from the job's
    ranks only, at the next start: until then it was lost to them.
    """
    with Net(2).up() as net:
        job, (here, moves) = Job(net, net.nodes, replicas=1), net.nodes
        job.start()
        job.record(0, 1)
        job.await_replicas(1, 1)
        moves.kill()
        moves.address = moves.address.rsplit(".", 1)[0] + ".77"
        moves.settings["CKPTD_PEER_LISTEN"] = f"tcp://{moves.address}:{PORT}"
        moves.launch()
        eventually(lambda: here.saw("peer_moved", moves.address), "it is found")
        job.record(2)
        job.await_replicas(2, 1)
        job.check_all()
        job.end()


def test_a_daemon_that_comes_back_with_another_key_gets_replicas_again() -> None:
    """Its card, with the key, came from the job's ranks, at the next start."""
    with Net(2, curve=True).up() as net:
        job, (here, other) = Job(net, net.nodes, replicas=1), net.nodes
        job.start()
        job.record(0, 1)
        job.await_replicas(1, 1)
        trust(here.keys_dir, other.name, Keys.rotate(other.keys_dir).public, keep_previous_s=3600)
        other.kill()
        other.launch()
        eventually(lambda: here.saw("peer_moved", "with another key"), "it is found")
        job.record(2)
        job.await_replicas(2, 1)
        job.check_all()
        job.end()


def test_nobody_moves_another_node() -> None:
    """A node that brings a run of its own says who takes part in it. What it said of their addresses was
    believed for all runs: the node that it named was lost to them.
    """
    with Net(2).up() as net, Puppet("liar") as liar, Puppet("other") as other:
        job, (here, named) = Job(net, net.nodes, replicas=1), net.nodes
        job.start()
        job.record(0, 1)
        job.await_replicas(1, 1)
        liar.open(here, run="own")
        members = (
            Member(NodeCard("liar", "tcp://127.0.0.1:1"), (0,)),
            Member(NodeCard(named.name, "tcp://127.0.0.1:9"), (1,)),
            Member(NodeCard(here.name, f"tcp://{here.address}:{PORT}"), ()),
        )
        record = RunRecord("job", "own", epoch=1, epoch_start=-1, members=members, epochs=((1, -1, -1),))
        assert liar.ask(here, p.TellRun(record)) == p.PeerDone()
        refused = other.ask(here, GetHoldings("job", "own"))  # so that the members are asked
        assert isinstance(refused, p.PeerRefused)
        eventually(lambda: here.saw("peer_lost", "liar"), "the addresses of the members were tried")
        assert endpoint_of(here, named.name) == f"tcp://{named.address}:{PORT}"
        assert not here.saw("peer_lost", named.name)
        job.record(2)
        job.await_replicas(2, 1)
        job.end()
