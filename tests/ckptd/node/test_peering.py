"""Replication between real daemons: what was sealed lies on its targets, byte for byte, whatever
dies or is cut off meanwhile.
"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import zmq

from ckptd.core.slots.slots import SlotState
from ckptd.errors import AttachRefused
from ckptd.transport.access.keys import Keys, trust
from ckptd.transport.messages import GetHoldings, Holdings, Join
from ckptd.transport.peer_messages import PeerDone, PeerRefused, SealSlot, SlotGranted
from tests.ckptd.nodes import PORT, Net, Node
from tests.ckptd.peers_harness import Job, Trainer
from tests.ckptd.puppet import Puppet
from tests.ckptd.running import eventually
from tests.ckptd.snapshots import Snapshot, flip, snapshot_of, states_in
from tests.long import long

pytestmark = pytest.mark.timeout(90)
both = pytest.mark.parametrize("data", ["stream", pytest.param("zmq", marks=long)])


def is_filling(node: Node, rank: int = 0) -> bool:
    return any(SlotState.FILLING in states_in(path) for path in node.replicas(rank))


def holds_nothing_unsealed(node: Node, rank: int = 0) -> bool:
    """Every slot of its replicas is free or sealed."""
    usual = {SlotState.FREE, SlotState.SEALED}
    return all(set(states_in(path)) <= usual for path in node.replicas(rank))


# -- in good times -------------------------------------------------------------------------------


@pytest.mark.parametrize(("curve", "copies", "window"), [(True, 1, 1), (False, 2, 3)])
def test_after_every_seal_the_replicas_equal_the_primary(curve: bool, copies: int, window: int) -> None:
    """With two ranks on one node, over generations and epochs."""
    with Net(3, curve=curve).up() as net:
        homes = [net[0], net[0], net[1], net[2]]
        job = Job(net, homes, window=window, replicas=copies)
        job.start()
        for iteration in range(2 * window + 6):
            job.record(iteration)
            job.await_replicas(iteration, copies)
            job.check_all()
        at = 2 * window + 6
        job.slot_bytes *= 2
        job.together(Trainer.reserve)  # another geometry
        for iteration in range(at, at + 2 * window):
            job.record(iteration)
            job.await_replicas(iteration, copies)
        at += 2 * window
        assert job.check_all() >= 4 * copies * window
        job.end()
        assert job.resume() == at - 1
        job.record(at)
        job.await_replicas(at, copies)
        job.end()
        job.check_all()
        for node in net.nodes:
            assert not node.saw("internal")


def test_replicas_have_room_for_the_suffix_of_the_rank_with_the_largest_window() -> None:
    """All ranks load from one start, so a rank with a small window must keep as much as the one
    with the largest.
    """
    with Net(2).up() as net:
        job = Job(net, net.nodes, window=[1, 5], replicas=1)
        job.start()
        for iteration in range(14):
            job.record(iteration)
            job.await_replicas(iteration, 1)
        rings = [slots for path in net[1].replicas(0) if (slots := len(states_in(path))) >= 10]
        assert rings, "room for two suffixes of five"
        job.end()
        assert job.resume() == 13
        job.check_all()
        job.end()


def test_an_abandoned_history_is_freed_on_every_holder() -> None:
    """One rank went further than the others before all were restarted: that iteration happens
    again, differently.
    """
    with Net(3).up() as net:
        job = Job(net, net.nodes, replicas=2)
        job.start()
        job.record(0, 1, 2)
        job[0].record(3)
        job.await_replicas(3, 2, ranks=[0])
        old = job[0].memory.epoch
        job.end()
        assert job.resume() == 2
        assert job[0].memory.epoch > old
        eventually(lambda: not job.holders(0, 3), "the stale iteration 3 is freed everywhere")
        assert all(node.counters().get("replica.stale_freed", 0) for node in net.nodes[1:])
        job.record(3)
        job.await_replicas(3, 2)
        job.check_all()
        job.end()


# -- deaths in the middle ------------------------------------------------------------------------


@both
def test_the_receiver_dies_while_it_receives(data: str) -> None:
    """Its half-filled slot is free in its next life, its sealed ones are adopted, and it gets what it missed."""
    with Net(2, data=data, proxied=True).up() as net:
        here, there = net.nodes
        job = Job(net, net.nodes, replicas=1)
        job.start()
        job.record(0)
        job.await_replicas(0, 1)
        net.path(here, there).bytes_per_s = 100_000.0
        job[0].record(1)
        eventually(lambda: is_filling(there), "a slot there is being filled")
        there.kill()
        assert is_filling(there)
        there.launch()
        assert there.saw("replica_adopted")
        assert job.holders(0, 0) == [there], "what was sealed is still there"
        net.path(here, there).heal()
        job.await_replicas(1, 1, ranks=[0])
        assert holds_nothing_unsealed(there), "nobody fills it any more"
        job[1].record(1)
        job.record(2, 3, 4)
        job.await_replicas(4, 1)
        job.check_all()
        job.end()


@both
def test_the_sender_dies_while_it_sends(data: str) -> None:
    """Its slot there is free after the deadline; its next life goes on, for a trainer that never stopped."""
    with Net(2, data=data, proxied=True, curve=True).up() as net:
        here, there = net.nodes
        job = Job(net, net.nodes, replicas=1)
        job.start()
        job.record(0)
        job.await_replicas(0, 1)
        net.path(here, there).bytes_per_s = 100_000.0
        job[0].record(1)
        eventually(lambda: is_filling(there), "a slot there is being filled")
        here.kill()
        eventually(lambda: not is_filling(there), "the ticket ends with its sender")
        assert there.saw("peer_lost", here.name)
        assert holds_nothing_unsealed(there)
        job[0].record(2)  # sealed by the trainer itself
        net.path(here, there).heal()
        here.launch()
        job.await_replicas(2, 1, ranks=[0])
        job[1].record(1)
        job[1].record(2)
        job.record(3, 4)
        job.await_replicas(4, 1)
        assert here.saw("run_joined"), "the trainer told the new daemon who takes part"
        job.check_all()
        job.end()


@pytest.fixture
def filled() -> Snapshot:
    return snapshot_of(5)


@both
def test_the_receiver_dies_between_the_last_byte_and_the_seal(filled: Snapshot, data: str) -> None:
    with Net(1, data=data).up() as net, Puppet("p", data) as puppet:
        (node,) = net.nodes
        granted = puppet.begin(node, puppet.open(node).lease, filled)
        assert isinstance(granted, SlotGranted)
        assert puppet.put(node, filled.image, granted).ok
        node.kill()
        node.launch()
        assert holds_nothing_unsealed(node)
        refused = puppet.ask(node, SealSlot(granted.ticket, filled.digest))
        assert isinstance(refused, PeerRefused)
        assert refused.code == "unknown", "a ticket of an earlier life means nothing"
        again = puppet.open(node)
        assert again.held == (), "what was never verified is not shown"
        granted = puppet.begin(node, again.lease, filled)
        assert isinstance(granted, SlotGranted)
        assert puppet.put(node, filled.image, granted).ok
        assert isinstance(puppet.ask(node, SealSlot(granted.ticket, filled.digest)), PeerDone)
        assert len(puppet.open(node).held) == 1


@both
def test_the_sender_never_seals(filled: Snapshot, data: str) -> None:
    """What it has put is never shown, and its slot is free after the deadline."""
    with Net(1, data=data).up() as net, Puppet("p", data) as puppet:
        (node,) = net.nodes
        lease = puppet.open(node).lease
        granted = puppet.begin(node, lease, filled)
        assert isinstance(granted, SlotGranted)
        assert puppet.put(node, filled.image, granted).ok
        holdings = puppet.ask(node, GetHoldings("job", "run"))
        assert isinstance(holdings, Holdings)
        assert holdings.segments == ()
        eventually(lambda: node.counters().get("replica.ticket_expired", 0) == 1, "the ticket expires")
        assert set(states_in(node.replicas()[0])) == {SlotState.FREE}
        late = puppet.ask(node, SealSlot(granted.ticket, filled.digest))
        assert isinstance(late, PeerRefused)
        assert not puppet.put(node, filled.image, granted).ok, "the region went with the ticket"


@both
def test_a_replayed_put_changes_nothing(filled: Snapshot, data: str) -> None:
    """The key of a region is worth nothing once its slot is sealed."""
    with Net(1, data=data).up() as net, Puppet("p", data) as puppet, Puppet("q", data) as other:
        (node,) = net.nodes
        lease = puppet.open(node).lease
        granted = puppet.begin(node, lease, filled)
        assert isinstance(granted, SlotGranted)
        assert not other.put(node, filled.image, granted).ok, "it was granted to another node"
        assert isinstance(other.ask(node, SealSlot(granted.ticket, filled.digest)), PeerRefused)
        assert puppet.put(node, filled.image, granted).ok
        assert isinstance(puppet.ask(node, SealSlot(granted.ticket, filled.digest)), PeerDone)
        before = node.replicas()[0].read_bytes()
        for peer in (puppet, other):
            assert not peer.put(node, bytes(len(filled.image)), granted).ok
            assert isinstance(peer.ask(node, SealSlot(granted.ticket, filled.digest)), PeerRefused)
        held = puppet.begin(node, lease, filled)
        assert isinstance(held, PeerRefused)
        assert held.code == "held"
        assert node.replicas()[0].read_bytes() == before


@both
def test_an_image_that_is_not_what_was_announced_is_not_sealed(filled: Snapshot, data: str) -> None:
    with Net(1, data=data).up() as net, Puppet("p", data) as puppet:
        (node,) = net.nodes
        lease = puppet.open(node).lease
        granted = puppet.begin(node, lease, filled)
        assert isinstance(granted, SlotGranted)
        damaged = bytearray(filled.image)
        damaged[-1] ^= 1
        assert puppet.put(node, bytes(damaged), granted).ok
        refused = puppet.ask(node, SealSlot(granted.ticket, filled.digest))
        assert isinstance(refused, PeerRefused)
        assert refused.code == "digest"
        assert node.saw("replica_damaged", "iteration 5")
        assert set(states_in(node.replicas()[0])) == {SlotState.FREE}


# -- partitions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "data"), [("blackhole", "stream"), ("blackhole", "zmq"), ("refuse", "stream")]
)
def test_a_partition_makes_replicas_elsewhere_and_heals(how: str, data: str) -> None:
    with Net(3, data=data, proxied=True).up() as net:
        job = Job(net, net.nodes, replicas=1)
        job.start()
        job.record(0)
        job.await_replicas(0, 1)
        (target,) = job.holders(0, 0)
        (third,) = [n for n in net.nodes[1:] if n is not target]
        for path in net.paths(target):
            setattr(path, how, True)
            if how == "refuse":
                path.cut()
        job[0].record(1)
        eventually(lambda: net[0].saw("peer_lost", target.name), "the loss is noticed")
        eventually(lambda: job.holders(0, 1) == [third], "the newest suffix has another home")
        for path in net.paths(target):
            path.heal()
            path.cut()
        eventually(lambda: net[0].saw("peer_back", target.name), "it is back")
        for rank in (1, 2):
            job[rank].record(1)
        job.record(2, 3, 4, 5)
        job.await_replicas(5, 1)
        eventually(lambda: target in job.holders(0, 5), "the first choice has it again")
        job.check_all()
        job.end()


# -- who is not to be trusted --------------------------------------------------------------------


def test_a_node_whose_key_is_not_trusted_takes_no_part_until_it_is(tmp_path: Path) -> None:
    net = Net(3, curve=True)
    stranger = net[2]
    wrong = Keys.create(tmp_path / "wrong").public

    def distrust() -> None:
        trust(net[0].keys_dir, stranger.name, wrong)
        (net[1].keys_dir / "trusted" / f"{stranger.name}.key").unlink()

    with net.up(distrust):
        job = Job(net, net.nodes, replicas=2)
        job.start()
        job.record(0)
        job.await_replicas(0, 1, ranks=[0, 1])
        for node in net.nodes[:2]:
            eventually(lambda n=node: n.saw("peer_lost", stranger.name), "it is not reached")  # type: ignore[misc]
            assert node.counters().get("hello.refused", 0) > 0
        assert not stranger.replicas()
        assert not job.holders(2, 0)
        for node in net.nodes[:2]:
            trust(node.keys_dir, stranger.name, Keys.load(stranger.keys_dir).public)
        job.record(1, 2)
        job.await_replicas(2, 2)
        job.check_all()
        job.end()


def test_garbage_on_the_port_disturbs_nobody() -> None:
    with Net(2).up() as net:
        job = Job(net, net.nodes, replicas=1)
        job.start()
        for node in net.nodes:
            for data in (b"\0" * 5000, b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 40):
                with socket.create_connection((node.address, PORT), timeout=5) as connection:
                    connection.sendall(data)
            with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
                stranger.linger = 200
                stranger.connect(f"tcp://{node.address}:{PORT}")
                for frames in ([b""], [b"\xc1", b""], [b"x" * 5000], [b"1"] * 9):
                    stranger.send_multipart(frames)
        job.record(0, 1, 2)
        job.await_replicas(2, 1)
        job.check_all()
        job.end()


def test_a_join_of_an_older_epoch_is_refused() -> None:
    with Net(2).up() as net:
        job = Job(net, net.nodes, replicas=1)
        job.start()
        job.record(0)
        job.await_replicas(0, 1)
        joined = len(net[0].events("run_joined"))
        memory = job[0].memory
        with pytest.raises(AttachRefused, match=r"stale_epoch.*epoch \d+ has begun here"):
            memory.session.join(Join(memory.epoch - 1, -1, (), 0))
        job.record(1, 2)
        job.await_replicas(2, 1)
        assert len(net[0].events("run_joined")) == joined
        job.check_all()
        job.end()


# -- memory, restarts, damage --------------------------------------------------------------------


def test_a_node_without_memory_refuses_with_numbers_and_the_others_replicate() -> None:
    """What another job has taken of it is not known to those who choose their targets."""
    with Net(3, of={"n2": {"memory": "24MiB"}}).up() as net:
        full = net[2]
        other = Job(net, [full], run="other", replicas=0, slot_bytes=2 << 20)
        other.start()
        job = Job(net, net.nodes, replicas=2)
        job.start()
        job.record(0, 1, 2, 3)
        job.await_replicas(3, 1)
        eventually(lambda: full.saw("replica_refused", "of 24 MiB here"), "it says why")
        for node in net.nodes[:2]:
            eventually(lambda n=node: n.saw("replication_refused", full.name), "and its peers know")  # type: ignore[misc]
        assert not full.replicas()
        job.record(*range(4, 12))
        job.await_replicas(11, 1)
        job.check_all()
        job.end()
        other.end()


def test_a_damaged_replica_is_quarantined_and_sent_again() -> None:
    """The sender learns of it with its next snapshot, whose suffix needs the damaged one."""
    with Net(2, scrub_interval_s="0.2").up() as net:
        there = net[1]
        job = Job(net, net.nodes, replicas=1, window=2)
        job.start()
        job.record(0, 1)
        job.await_replicas(1, 1)
        assert flip(there.replicas(0), [1]) == 1
        eventually(lambda: there.saw("slot_quarantined", "rank 0"), "the scrub finds it")
        assert not job.holders(0, 1)
        job.record(2)
        job.await_replicas(2, 1)
        assert job.holders(0, 1) == [there]
        job.check_all()
        job.end()


def test_a_run_that_is_over_leaves_no_replicas() -> None:
    with Net(2).up() as net:
        job = Job(net, net.nodes, replicas=1)
        job.start()
        job.record(0)
        job.await_replicas(0, 1)
        job.together(lambda t: t.memory.close(final=True))
        job.trainers = []
        for node in net.nodes:
            eventually(lambda n=node: not n.files(), "everything of the run is gone")  # type: ignore[misc]


@both
def test_a_job_that_starts_while_a_member_cannot_be_reached_goes_on_with_the_others(
    data: str,
) -> None:
    """Who was lost before the new epoch began is still lost in it."""
    with Net(3, data=data, proxied=True).up() as net:
        job = Job(net, net.nodes, replicas=1)
        job.start()
        job.record(0)
        job.await_replicas(0, 1)
        (target,) = job.holders(0, 0)
        (third,) = [n for n in net.nodes[1:] if n is not target]
        for path in net.paths(target):
            path.blackhole = True
        eventually(lambda: net[0].saw("peer_lost", target.name), "the loss is noticed")
        job.end()
        job.resume()
        job[0].record(1)
        eventually(lambda: third in job.holders(0, 1), "it is replicated to who can be reached")
        job.end()
