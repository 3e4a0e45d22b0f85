"""Snapshots that somebody changed together with their xxh3 digests, between daemons: nobody seals them, and nobody resumes from them."""

from __future__ import annotations

import pytest

from ckptd.transport.peer_messages import PeerDone, PeerRefused, SealSlot, SlotGranted
from tests.ckptd.forging import forge_slot, forged
from tests.ckptd.nodes import Net
from tests.ckptd.peers_harness import Job
from tests.ckptd.puppet import Puppet
from tests.ckptd.running import eventually
from tests.ckptd.snapshots import sealed_in, snapshot_of

pytestmark = pytest.mark.timeout(120)


def test_what_a_man_in_the_middle_forges_is_not_sealed() -> None:
    """Bytes that arrive over the stream were changed together with their digests, so that all of xxh3 agrees: of the chunks, of the tensor, of the header. What the
    sender tells over the control session does not agree. Its next try, with the true bytes, is sealed. Before, the first was."""
    with Net(1).up() as net, Puppet("puppet") as puppet:
        node, snapshot = net[0], snapshot_of(5)
        lease = puppet.open(node).lease
        image = forged(snapshot.image, snapshot.header.header_digest)
        for data, expected in ((image, PeerRefused), (snapshot.image, PeerDone)):
            granted = puppet.begin(node, lease, snapshot)
            assert isinstance(granted, SlotGranted)
            assert puppet.put(node, data, granted).ok
            answer = puppet.ask(node, SealSlot(granted.ticket, snapshot.digest))
            assert isinstance(answer, expected), answer
        assert node.saw("replica_forged", "from puppet")
        (path,) = node.replicas()
        assert [found.image for found in sealed_in(path).values()] == [snapshot.image]


def test_a_snapshot_forged_in_its_senders_memory_does_not_spread() -> None:
    """Its digest was made when it was sent first. Then somebody changes it in the memory of its node, together with its xxh3 digests, and the node that has the
    replica is lost. The one that takes its place is sent the forgery with the digest of before, and refuses it; the sender suspects its own copy."""
    with Net(2).up() as net:
        here, there = net.nodes
        job = Job(net, [here, there], replicas=1)
        job.start()
        job.record(0, 1)
        job.await_replicas(1, 1)
        (path,) = here.segment_dir.glob("*~r0~*.seg")
        assert here.counters()["image_digests"] >= 2
        there.lose()
        forge_slot(path, 1)
        there.launch()
        eventually(lambda: there.saw("replica_forged", "iteration 1"), "the forgery is refused")
        eventually(lambda: here.saw("snapshot_suspected", "iteration 1"), "the copy is suspected")
        for replica in there.replicas(0):
            assert 1 not in {found.header.iteration for found in sealed_in(replica).values()}
        job.end()
