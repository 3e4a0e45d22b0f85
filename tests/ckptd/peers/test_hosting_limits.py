"""The host of replicas and peers that say nonsense, say too much, or say nothing any more."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from ckptd.core.slots.segment_format import decode_descriptor, encode_descriptor, origin_of
from ckptd.core.slots.slots import SlotState
from ckptd.core.users import UserQuotas
from ckptd.memory.segment_store import SegmentStore
from ckptd.memory.user_files import readers_of
from ckptd.peers.replica_store import ReplicaStore
from ckptd.transport import peer_messages as p
from tests.ckptd.hosted import Setting, hosted
from tests.ckptd.puppet import begin_slot, open_replica
from tests.ckptd.snapshots import snapshot_of, states_in

RETAIN_S = 3600.0
MIB = 1 << 20


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    with hosted(tmp_path, retain_s=RETAIN_S) as setting:
        yield setting


def told(message: p.PeerMessage) -> p.PeerMessage:
    """As it arrives."""
    return p.decode_peer(p.encode_peer(message))


# -- numbers that cannot be ----------------------------------------------------------------------


def with_descriptor(**changes: int) -> p.OpenReplica:
    """A request with a descriptor that has these numbers."""
    message = open_replica("away")
    descriptor = msgspec.structs.replace(decode_descriptor(message.descriptor), **changes)
    origin, encoded = origin_of(descriptor), encode_descriptor(descriptor)
    return msgspec.structs.replace(message, origin=origin, descriptor=encoded)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_operators": -100},
        {"num_operators": 1 << 43},
        {"window": 0},
        {"window": 1 << 40},
        {"world_size": 0},
        {"generation": 10**11},
        {"created_at_ns": (1 << 64) - 1},
    ],
)
def test_a_descriptor_with_numbers_that_cannot_be_is_refused(
    setting: Setting, changes: dict[str, int]
) -> None:
    """Once entered, it broke every tick of the host from then on, or was memory outside the quota
    after a restart.
    """
    setting.open(generation=1)
    refused = setting.ask(with_descriptor(**changes))
    assert isinstance(refused, p.PeerRefused)
    assert refused.code == "bad_message"
    assert len(setting.replicas) == 1
    setting.host.tick(setting.now_s)


def test_no_ring_is_made_that_a_restart_could_not_read(setting: Setting) -> None:
    """The wider one is a nanosecond later than the last there can be: put aside at a restart, it
    would be outside the quota.
    """
    message = with_descriptor(created_at_ns=(1 << 63) - 1)
    for span in (1, 8):
        refused = setting.ask(msgspec.structs.replace(message, span=span))
        assert isinstance(refused, p.PeerRefused)
        assert refused.code == "bad_message"
    adopted = setting.next_replicas().adopt()
    found, bad = adopted.segments, adopted.bad
    assert len(found) == 1
    assert bad == []


@pytest.mark.parametrize("changes", [{"epoch": 1 << 40}, {"epoch": -1}, {"epoch_start": -2}])
def test_an_epoch_that_holdings_cannot_tell_is_no_message(changes: dict[str, int]) -> None:
    """A node that noted it could not tell anybody any more what it holds."""
    message = msgspec.structs.replace(open_replica("away"), **changes)
    with pytest.raises(ValueError, match="not a message between daemons"):
        told(message)
    assert told(open_replica("away", epoch=(1 << 32) - 1))


@pytest.mark.parametrize(
    "changes", [{"floor": -2}, {"horizon": 1 << 62}, {"span": (1 << 15) + 1}, {"span": -1}]
)
def test_a_promise_that_cannot_be_is_no_message(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="not a message between daemons"):
        told(begin_slot(1, snapshot_of(1), **changes))
    floor = p.Floor("job", "run", "tree", "floor", 1, 1)
    with pytest.raises(ValueError, match="not a message between daemons"):
        told(
            msgspec.structs.replace(floor, **{"value" if k == "floor" else k: v for k, v in changes.items()})
        )
    assert told(begin_slot(1, snapshot_of(1), floor=5, horizon=7, span=1 << 15))
    assert told(floor)


@pytest.mark.parametrize("wrong", ["descriptor", "origin", "rank"])
def test_who_is_refused_frees_nothing(setting: Setting, wrong: str) -> None:
    """A later epoch, in a message that is not what its descriptor says: what is sealed here is not
    abandoned by it.
    """
    setting.fill(setting.open().lease, snapshot_of(5))
    changes = {"descriptor": b"nonsense", "origin": "nonsense", "rank": 3}
    message = open_replica("away", epoch=7)
    refused = setting.ask(msgspec.structs.replace(message, **{wrong: changes[wrong]}), "stranger")
    assert isinstance(refused, p.PeerRefused)
    assert refused.code == "bad_message"
    assert states_in(setting.only.path)[0] is SlotState.SEALED
    assert setting.holdings("job", "run").epoch == 1
    answer = setting.ask(message)
    assert isinstance(answer, p.ReplicaOpened)
    assert answer.held == (), "a message that is right frees it, before it is told what is held"


def test_an_epoch_near_the_last_one_kills_no_run(setting: Setting) -> None:
    """One message made all that lay here stale, and left the run without a next epoch: by the epoch
    itself, a snapshot's, or a promise's.
    """
    lease = setting.open().lease
    setting.fill(lease, snapshot_of(5))
    last = (1 << 32) - 1
    header = dataclasses.replace(snapshot_of(6).header, epoch=last, epoch_start=-1)
    for message in (
        open_replica("away", epoch=last),
        begin_slot(lease, dataclasses.replace(snapshot_of(6), header=header)),
        begin_slot(lease, snapshot_of(6), epoch=last, floor=1 << 40, horizon=1 << 40),
    ):
        refused = setting.ask(message)
        assert isinstance(refused, p.PeerRefused)
        assert refused.code == "bad_message"
    assert states_in(setting.only.path)[0] is SlotState.SEALED
    assert setting.holdings("job", "run").epoch == 1
    assert isinstance(setting.ask(begin_slot(lease, snapshot_of(6))), p.SlotGranted)


# -- who is gone ---------------------------------------------------------------------------------


def tick_for(setting: Setting, seconds: float, *, hello: str = "") -> bool:
    """Let time pass, with hellos of this boot of the peer; whether the replica is still there."""
    for _ in range(int(seconds // 20)):
        setting.now_s += 20
        if hello:
            setting.host.leases.heard("p", hello)
        setting.host.tick(setting.now_s)
    return bool(list(setting.replicas))


def test_a_replica_expires_though_nobody_ended_its_lease(setting: Setting) -> None:
    """Its sender never came back, and a node without ranks does not meet its senders: nobody says
    that it is gone.
    """
    setting.fill(setting.open(boot_id="b1").lease, snapshot_of(5))
    assert tick_for(setting, RETAIN_S), "not before its time"
    assert not tick_for(setting, 200)


def test_a_replica_whose_sender_is_there_stays_though_nothing_is_sent(setting: Setting) -> None:
    """A trainer that hangs for hours must not lose what its node may lose next."""
    lease = setting.open(boot_id="b1").lease
    setting.fill(lease, snapshot_of(5))
    assert tick_for(setting, 3 * RETAIN_S, hello="b1")
    setting.begin(lease, snapshot_of(6))
    setting.host.serve("p", p.EndRun("job", "run"), lambda reply: None)
    assert not tick_for(setting, RETAIN_S + 200, hello="b1"), "its run is over"


def test_another_boot_of_the_sender_does_not_keep_what_this_one_had_open(setting: Setting) -> None:
    setting.fill(setting.open(boot_id="b1").lease, snapshot_of(5))
    assert not tick_for(setting, RETAIN_S + 200, hello="b2")


# -- doubts --------------------------------------------------------------------------------------


class Doubts:
    """A replica with sealed slots, and what is to be verified of it."""

    def __init__(self, setting: Setting, slots: int) -> None:
        self.setting = setting
        lease = setting.open(num_slots=slots).lease
        for iteration in range(slots):
            setting.fill(lease, snapshot_of(iteration))

    def tell(self, slot: int, sequence: int | None = None) -> None:
        header = self.setting.only.header(slot)
        assert header is not None
        told = header.sequence if sequence is None else sequence
        message = p.DoubtSlot("job", "run", self.setting.only.path.name, slot, told)
        assert isinstance(self.setting.ask(message), p.PeerDone)


def test_a_peer_with_a_new_name_for_its_boot_each_time_fills_no_table(setting: Setting) -> None:
    """After 65,536 leases every other peer was refused, and each made the next one slower."""
    other = setting.open("q", run="theirs", boot_id="q1").lease
    leases = [setting.open(boot_id=f"boot {number}").lease for number in range(20)]
    kept = [lease for lease in leases if setting.host.leases.use(lease, "p") is not None]
    assert kept == leases[-4:]
    assert setting.host.leases.use(other, "q") is not None
    assert len(setting.host.leases._leases) == 5


def test_a_doubt_about_what_a_slot_no_longer_holds_is_not_followed(setting: Setting) -> None:
    doubts = Doubts(setting, 2)
    doubts.tell(0, sequence=99)
    assert doubts.setting.doubted == []


def test_replicas_belong_to_the_user_of_the_job_and_count_for_its_quota() -> None:
    """A refusal is final: room that others have is not for this user, and nobody waits for it."""
    folder = Path(tempfile.mkdtemp(prefix="ckptd-hosted-", dir="/dev/shm"))
    try:
        with hosted(folder, users=UserQuotas(8 * MIB)) as setting:
            setting.open(job="u1002.job")
            assert readers_of(setting.only.fd) == {1002: 4}
            refused = setting.ask(open_replica("away", job="u1002.job", run="second"))
            assert isinstance(refused, p.PeerRefused)
            assert refused.code == "quota"
            assert refused.message == (
                "the replica of u1002.job/second rank 0 needs 6 MiB, and of the memory that user 1002 may have "
                "here 2 MiB is free"
            )
            assert not setting.host.leases._short, "logs of others are not refused"
            setting.open(job="u1003.job")
            setting.open(job="job")
            assert [readers_of(s.fd) for s in setting.replicas] == [{}, {1002: 4}, {1003: 4}]
            for segment in setting.replicas:
                segment.path.chmod(0o666)
            found = ReplicaStore(
                SegmentStore(folder, 40 * MIB, "host", mlock="off", hugepages="off", users=UserQuotas())
            )
            found.adopt()
            assert [readers_of(s.fd) for s in found] == [{}, {1002: 4}, {1003: 4}]
            for segment in found:
                segment.close()
    finally:
        shutil.rmtree(folder)
