"""Daemons that share a host: snapshots go from file to file, and are what was written whatever dies
meanwhile.
"""

from __future__ import annotations

import random
import time

import pytest

from tests.ckptd.nodes import Net, Node
from tests.ckptd.peers_harness import Job
from tests.ckptd.running import eventually
from tests.ckptd.snapshots import IMAGE_BYTES

pytestmark = pytest.mark.timeout(90)


def networked(node: Node) -> int:
    """Bytes of snapshots that peers sent to it or got from it over a network."""
    counters = node.counters()
    return counters.get("fabric.received_bytes", 0) + counters.get("fabric.served_bytes", 0)


def copied(node: Node) -> int:
    return node.counters()["fabric.short_cut_bytes"]


@pytest.mark.parametrize("data", ["stream", "zmq"])
def test_no_snapshot_takes_a_socket(data: str) -> None:
    """Neither to a replica nor back from it."""
    with Net(2, data=data, peer_short_cut="true").up() as net:
        job = Job(net, net.nodes, window=2, replicas=1)
        job.start()
        for iteration in range(4):
            job.record(iteration)
            job.await_replicas(iteration, 1)
        assert all(copied(node) >= 4 * IMAGE_BYTES for node in net.nodes)
        job.end()
        net[0].lose()
        net[0].launch()
        assert job.resume() == 3
        assert copied(net[0]) >= 2 * IMAGE_BYTES
        job.check_all()
        job.end()
        assert [networked(node) for node in net.nodes] == [0, 0]
        for node in net.nodes:
            assert not node.saw("internal")


def test_where_one_node_does_not_want_it_sockets_are_taken() -> None:
    """What one lends no file of, and what it looks for none in, goes over the network: so in both directions."""
    with Net(2, peer_short_cut="true", of={"n1": {"peer_short_cut": "false"}}).up() as net:
        job = Job(net, net.nodes, replicas=1)
        job.start()
        job.record(0)
        job.await_replicas(0, 1)
        assert [copied(node) for node in net.nodes] == [0, 0]
        assert all(networked(node) >= IMAGE_BYTES for node in net.nodes)
        shown = net[0].ctl("peers").stdout
        assert "fabric.short_cut_bytes 0" in shown
        job.check_all()
        job.end()


@pytest.mark.parametrize("dying", [0, 1])
def test_a_daemon_that_dies_at_any_moment_of_a_copy_harms_nothing(dying: int) -> None:
    """The one that copies, or the one that it copies to; both are back in their next life."""
    moments = random.Random(dying)
    with Net(2, peer_short_cut="true").up() as net:
        victim = net[dying]
        job = Job(net, net.nodes, replicas=1, slot_bytes=16 << 20)
        job.start()
        job.record(0)
        job.await_replicas(0, 1)
        for iteration in range(1, 4):
            job[0].record(iteration, size=15_000_000)
            time.sleep(moments.uniform(0, 0.03))
            victim.kill()
            job.check_all()
            victim.launch()
            job.await_replicas(iteration, 1, ranks=[0])
            job.check_all()
        eventually(lambda: not any(node.saw("internal") for node in net.nodes), "no mishap")
        job.end()
