"""Snapshots that somebody changed together with their xxh3 digests, between daemons: nobody seals
them, and nobody resumes from them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.errors import DaemonUnavailable
from ckptd.memory.segment_file import open_segment
from ckptd.transport.peer_messages import PeerDone, PeerRefused, SealSlot, SlotGranted
from tests.ckptd.forging import forge_slot, forged
from tests.ckptd.nodes import Net
from tests.ckptd.peers_harness import Job
from tests.ckptd.puppet import Puppet
from tests.ckptd.running import eventually
from tests.ckptd.snapshots import sealed_in, snapshot_of

pytestmark = pytest.mark.timeout(120)


def test_what_a_man_in_the_middle_forges_is_not_sealed() -> None:
    """Bytes that arrive over the stream were changed together with their digests, so that all of
    xxh3 agrees: of the chunks, of the tensor, of the header. What the sender tells over the control
    session does not agree. Its next try, with the true bytes, is sealed. Before, the first was.
    """
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
    """Its digest was made when it was sent first. Then somebody changes it in the memory of its
    node, together with its xxh3 digests, and the node that has the replica is lost. The one that
    takes its place is sent the forgery with the digest of before, and refuses it; the sender
    suspects its own copy.
    """
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


def resumable(net: Net) -> Job:
    """A job of three nodes of which each holds replicas of the others; the first node is lost, and
    empty again. One snapshot is all that anybody holds: a job resumes from an older one where the newest is
    forged.
    """
    job = Job(net, net.nodes, replicas=2)
    job.start()
    job.record(1)
    job.await_replicas(1, 2)
    job.end()
    net[0].lose()
    net[0].launch()
    return job


def test_a_holder_whose_memory_was_changed_together_with_its_digests_is_not_accepted_at_resume() -> None:
    """What it vouches for was kept apart when the replica came. Who resumes names the holder, takes
    the true bytes from another one, and has the holder look at its copy, which is quarantined.
    Before, the job went on with the forgery where that holder was asked first.
    """
    with Net(3).up() as net:
        job = resumable(net)
        back, holder, other = net.nodes
        for node in (holder, other):
            (path,) = node.replicas(0)
            if node is holder:
                forge_slot(path, 1)
        assert job.resume() == 1
        told = [n for n in (holder, other) if back.saw("fetch_forged", n.name)]
        if told:  # else the other one was asked for all of it
            assert told == [holder]
            eventually(lambda: holder.saw("slot_quarantined", "cryptographic"), "it is quarantined")
        job.record(2)
        job.await_replicas(2, 2)
        job.end()


def test_where_every_holder_was_forged_nobody_resumes_from_it() -> None:
    """The job stops with the reason. Both copies are quarantined, so that the next start does not
    ask for them again; that one stops, too, for want of any other.
    """
    with Net(3).up() as net:
        job = resumable(net)
        for node in net.nodes[1:]:
            forge_slot(node.replicas(0)[0], 1)
        with pytest.raises(Exception, match="in no copy that was reached is the image right"):
            job.resume()
        assert net[0].saw("fetch_forged", "iteration 1")
        job.end()
        for node in net.nodes[1:]:
            eventually(
                lambda n=node: n.saw("slot_quarantined", "cryptographic"),  # type: ignore[misc]
                "the copy is quarantined",
            )
        with pytest.raises(DaemonUnavailable, match="no node holds a snapshot of rank 0"):
            job.resume()
        job.end()


def test_replicas_of_before_the_upgrade_are_resumed_from() -> None:
    """A daemon of before kept no digests: its successor makes them when it is asked, of what
    matches its xxh3 digests.
    """
    with Net(3).up() as net:
        job = resumable(net)
        for node in net.nodes[1:]:
            node.kill()
            for path in node.files():
                forget_digests(path)
            node.launch()
        assert job.resume() == 1
        assert any(node.counters().get("image_digests", 0) for node in net.nodes[1:])
        job.record(2)
        job.await_replicas(2, 2)
        job.end()


def forget_digests(path: Path) -> None:
    segment = open_segment(path)
    for index, header in segment.headers():
        segment.keep_digest(index, header, "")
    segment.close()
