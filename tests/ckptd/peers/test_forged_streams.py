"""Two daemons and somebody between them who changes what passes."""

from __future__ import annotations

import pytest

from tests.ckptd.nodes import Net
from tests.ckptd.peers_harness import Job
from tests.ckptd.running import eventually

pytestmark = pytest.mark.timeout(90)


def test_replication_waits_out_a_man_in_the_middle_and_names_him() -> None:
    """He changes a bit in every 20 KB: no snapshot can be sealed on the other node, an event says
    why, and when he is gone replication catches up by itself. Before streams were encrypted nothing
    but a counter knew, and who did better than single bits was not seen.
    """
    with Net(2, proxied=True, curve=True).up() as net:
        here, there = net.nodes
        job = Job(net, net.nodes, replicas=1)
        job.start()
        job.record(0)
        job.await_replicas(0, 1)
        assert there.counters().get("fabric.forged", 0) == 0
        assert not there.events("plaintext")
        net.path(here, there).corrupt_every = 20_000
        job[0].record(1)
        eventually(lambda: there.saw("stream_forged", here.name), "the attack is named")
        assert there.counters()["fabric.forged"] > 0
        assert not job.holders(0, 1), "nothing of it was sealed"
        net.path(here, there).heal()
        job.await_replicas(1, 1, ranks=[0])
        job[1].record(1)
        job.record(2, 3)
        job.await_replicas(3, 1)
        job.check_all()
        job.end()


def test_plaintext_is_said_at_the_start_and_in_the_status() -> None:
    plain = {"peer_data": "stream-plaintext"}
    with Net(2, curve=True, of={"n0": plain}).up() as net:
        asked, usual = net.nodes
        assert asked.saw("plaintext", "peer_data = stream-plaintext")
        assert not usual.events("plaintext")
        assert "plaintext" in asked.ctl("peers").stdout
        assert "plaintext" not in usual.ctl("peers").stdout
        assert "encryption of snapshots sent to peers: " in usual.ctl("peers").stdout
