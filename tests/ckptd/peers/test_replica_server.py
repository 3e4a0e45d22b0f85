"""The host of replicas: what it grants, when it takes back, and that no peer makes it wait."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.core.replication.replicas import Promise
from ckptd.core.sessions import RankKey
from ckptd.core.slots.segment_format import slot_lock_byte, unpack_slot_header
from ckptd.core.slots.slots import SlotState
from ckptd.memory import locks
from ckptd.memory.segment_file import Segment
from ckptd.peers.peer_link import region_of
from ckptd.peers.replica_leases import Loan, RegionLoans
from ckptd.storage.strong_digest import strong_digest
from ckptd.transport import peer_messages as p
from ckptd.transport.messages import GetHoldings, Holdings
from ckptd.transport.verbs import Access, Scope
from ckptd.workers import Workers
from tests.ckptd.forging import forged
from tests.ckptd.hosted import MIB, Setting, hosted, never
from tests.ckptd.puppet import begin_slot, open_replica
from tests.ckptd.running import descriptor
from tests.ckptd.snapshots import snapshot_of, states_in

RANK = RankKey("job", "run", 0)


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    with hosted(tmp_path) as setting:
        yield setting


def locked(segment: Segment, index: int) -> bool:
    return locks.is_locked(segment.fd, slot_lock_byte(index), exclusive=True)


def iterations(opened: p.ReplicaOpened) -> list[int]:
    headers = [unpack_slot_header(slot.header) for slot in opened.held]
    return sorted(header.iteration for header in headers if header is not None)


# -- transfers that do not end -------------------------------------------------------------------


@pytest.mark.parametrize("how", ["abort", "gone", "expired"])
def test_a_slot_is_given_up_only_when_nothing_can_land_in_it(setting: Setting, how: str) -> None:
    """A peer stopped in the middle of a chunk: nobody waits for it, and nobody else gets its slot."""
    lease = setting.open().lease
    granted = setting.begin(lease, snapshot_of(5))
    let_go = setting.holding(granted.region)
    begun_s = time.monotonic()
    if how == "abort":
        setting.ask(p.AbortSlot(granted.ticket))
    elif how == "gone":
        setting.host.peer_gone("p")
    else:
        setting.now_s += 30
        setting.host.tick(setting.now_s)
    assert time.monotonic() - begun_s < 4.0, "the loop thread waited"  # peers have 5 s
    assert not setting.fabric.regions[granted.region].hold(never), "nothing new begins"
    segment = setting.only
    assert states_in(segment.path)[0] is SlotState.FILLING
    assert locked(segment, 0)
    other = setting.begin(setting.open().lease, snapshot_of(6))
    assert states_in(segment.path)[:2] == [SlotState.FILLING] * 2, "it got another slot"
    let_go()
    setting.until(lambda: not locked(segment, 0), "the slot is unlocked")
    assert states_in(segment.path)[0] is SlotState.FREE
    setting.ask(p.AbortSlot(other.ticket))


def test_a_wait_that_finds_no_worker_is_begun_again_later(setting: Setting) -> None:
    segment = setting.store.create(descriptor(world_size=2, topology="dp2"), 2, MIB)
    fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
    assert locks.try_lock(fd, slot_lock_byte(1), exclusive=True)
    region = setting.fabric.register(
        segment.image(1, snapshot_of(5).header), access=Access.WRITE, scope=Scope("p")
    )
    failures: list[BaseException] = []
    lending = RegionLoans(
        Workers("none", 0, 0, lambda: None),
        still_here=lambda s: True,
        failed=lambda what, error: failures.append(error),
    )
    assert region.hold(never)
    lending.end(Loan(segment, 1, fd, region), SlotState.FREE)
    lending.tick()
    assert lending.slots_of(segment) == {1}
    assert locked(segment, 1)
    region.release(never)
    lending.tick()
    assert lending.slots_of(segment) == set()
    assert not locked(segment, 1)
    assert not failures


def test_a_slot_is_verified_only_when_nothing_can_land_in_it(setting: Setting) -> None:
    snapshot = snapshot_of(5)
    granted = setting.begin(setting.open().lease, snapshot)
    setting.fabric.regions[granted.region].buffer[:] = snapshot.image
    let_go = setting.holding(granted.region)
    answers = setting.say(p.SealSlot(granted.ticket, snapshot.digest))
    time.sleep(0.05)
    setting.workers.collect()
    assert answers.empty()
    let_go()
    setting.until(lambda: not answers.empty(), "it is verified")
    assert isinstance(answers.get_nowait(), p.PeerDone)
    assert states_in(setting.only.path)[0] is SlotState.SEALED
    assert not locked(setting.only, 0)


def test_a_slot_that_is_being_read_is_locked_until_the_last_byte_has_left(setting: Setting) -> None:
    snapshot = snapshot_of(5)
    setting.fill(setting.open().lease, snapshot)
    segment = setting.only
    message = p.OpenRead("job", "run", segment.path.name, 0, snapshot.header.sequence)
    opened = setting.ask(message, "q")
    assert isinstance(opened, p.ReadOpened)
    let_go = setting.holding(opened.region)
    setting.ask(p.CloseRead(opened.region), "q")
    assert locked(segment, 0)
    let_go()
    setting.until(lambda: not locked(segment, 0), "the slot is unlocked")


def test_a_replica_is_removed_under_a_transfer_that_does_not_end(setting: Setting) -> None:
    snapshot = snapshot_of(5)
    granted = setting.begin(setting.open().lease, snapshot)
    let_go = setting.holding(granted.region)
    path = setting.only.path
    setting.host.remove(setting.only, "a test")
    assert not path.exists()
    refused = setting.ask(p.SealSlot(granted.ticket, snapshot.digest))
    assert isinstance(refused, p.PeerRefused)
    let_go()
    setting.until(lambda: setting.workers.pending == 0, "all is given back")
    assert not setting.events.counters.get("internal", 0)
    setting.open()


def test_the_end_of_the_daemon_waits_for_no_peer(setting: Setting) -> None:
    lease = setting.open().lease
    busy, quiet = setting.begin(lease, snapshot_of(5)), setting.begin(lease, snapshot_of(6))
    let_go = setting.holding(busy.region)
    begun_s = time.monotonic()
    setting.host.close()
    assert time.monotonic() - begun_s < 0.2
    assert not setting.fabric.regions[quiet.region].hold(never)
    assert states_in(setting.only.path)[:2] == [SlotState.FILLING, SlotState.FREE]
    assert locked(setting.only, 0), "until the process ends"
    let_go()


def test_a_slot_that_somebody_still_writes_for_an_earlier_daemon_is_not_granted(
    setting: Setting,
) -> None:
    """The copier of another process holds its lock until its chunk is done; by the end of that one
    slot is free.
    """
    lease = setting.open().lease
    segment = setting.only
    fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
    at = (1 << 61) + segment.geometry.slot_offset(0) + 1000
    assert locks.try_lock(fd, at, exclusive=False)
    refused = setting.ask(begin_slot(lease, snapshot_of(5)))
    assert isinstance(refused, p.PeerRefused)
    assert refused.code == "busy"
    assert states_in(segment.path)[0] is SlotState.FREE
    assert not locked(segment, 0)
    os.close(fd)
    setting.begin(lease, snapshot_of(5))


def test_a_grant_names_the_file_and_the_place(setting: Setting) -> None:
    granted = setting.begin(setting.open().lease, snapshot_of(5))
    segment, told = setting.only, granted.file
    assert told is not None
    found = segment.path.stat()
    assert (told.path, told.device, told.inode) == (str(segment.path), found.st_dev, found.st_ino)
    assert told.offset == segment.geometry.slot_offset(0)
    assert region_of(granted).file == setting.fabric.regions[granted.region].key.file


# -- boots ---------------------------------------------------------------------------------------


def test_what_a_restarted_peer_has_begun_survives_that_we_notice_it_late(setting: Setting) -> None:
    old_lease = setting.open(boot_id="b1").lease
    old = setting.begin(old_lease, snapshot_of(5))
    lease = setting.open(boot_id="b2").lease
    assert lease != old_lease
    new = setting.begin(lease, snapshot_of(6))
    setting.host.peer_gone("p", but_boot="b2")
    assert not setting.fabric.regions[old.region].hold(never)
    assert states_in(setting.only.path)[:2] == [SlotState.FREE, SlotState.FILLING]
    refused = setting.ask(begin_slot(old_lease, snapshot_of(7)))
    assert isinstance(refused, p.PeerRefused)
    assert refused.code == "unknown"
    setting.fabric.regions[new.region].buffer[:] = snapshot_of(6).image
    assert isinstance(setting.ask(p.SealSlot(new.ticket, snapshot_of(6).digest)), p.PeerDone)
    setting.begin(lease, snapshot_of(7))


def test_reads_end_with_the_boot_that_opened_them(setting: Setting) -> None:
    snapshot = snapshot_of(5)
    setting.fill(setting.open("q").lease, snapshot, "q")
    name, sequence = setting.only.path.name, snapshot.header.sequence
    regions = []
    for boot_id in ("b1", "b2"):
        opened = setting.ask(p.OpenRead("job", "run", name, 0, sequence, boot_id))
        assert isinstance(opened, p.ReadOpened)
        regions.append(setting.fabric.regions[opened.region])
    setting.host.peer_gone("p", but_boot="b2")
    assert [region.hold(never) for region in regions] == [False, True]
    regions[1].release(never)
    setting.host.peer_gone("p")
    assert not regions[1].hold(never), "lost, whatever its boot"


# -- rings ---------------------------------------------------------------------------------------


def test_a_ring_has_room_for_two_suffixes_of_the_longest_rank(setting: Setting) -> None:
    setting.open(num_slots=3, window=2, span=5)
    assert setting.only.geometry.num_slots == 10


def test_a_ring_that_became_too_narrow_gets_a_wider_one_beside_it(setting: Setting) -> None:
    """The span grew; the old ring goes when no promise needs it, and a restarted host knows both."""
    narrow = setting.open(num_slots=3)
    for iteration in (1, 2, 3):
        setting.fill(narrow.lease, snapshot_of(iteration))
    setting.promise = Promise(2, 2)
    wide = setting.open(num_slots=3, span=4)
    assert iterations(wide) == [1, 2, 3], "what the first one holds counts"
    first, second = setting.replicas
    if first.geometry.num_slots == 8:
        first, second = second, first
    assert (first.geometry.num_slots, second.geometry.num_slots) == (3, 8)
    assert setting.open(num_slots=3, span=4).lease == wide.lease, "there is one now"
    assert setting.open(num_slots=3, span=2).lease == wide.lease, "it is wide enough"
    refused = setting.ask(begin_slot(narrow.lease, snapshot_of(4)))
    assert isinstance(refused, p.PeerRefused)
    assert refused.code == "unknown"
    setting.fill(wide.lease, snapshot_of(4))
    assert iterations(setting.open(num_slots=3, span=4)) == [1, 2, 3, 4]
    setting.host.tick(setting.now_s)
    assert first in list(setting.replicas), "the floor is in it"
    assert {s.path for s in setting.next_replicas().adopt().segments} == {
        first.path,
        second.path,
    }
    setting.promise = Promise(4, 4)
    setting.host.tick(setting.now_s)
    assert list(setting.replicas) == [second]


def test_a_ring_that_is_too_narrow_when_it_is_made_is_not_taken(setting: Setting) -> None:
    """The span grew again while the memory was being made."""
    asked = [setting.say(open_replica("away", num_slots=2, span=span)) for span in (1, 3)]
    setting.until(lambda: not any(answers.empty() for answers in asked), "both are answered")
    replies = [answers.get_nowait() for answers in asked]
    assert all(isinstance(reply, p.ReplicaOpened) for reply in replies)
    assert sorted(s.geometry.num_slots for s in setting.replicas) == [2, 6]


def test_a_replica_is_opened_by_the_boot_that_answers(setting: Setting) -> None:
    """Also when it was open already."""
    assert [setting.open().boot_id, setting.open().boot_id] == ["here", "here"]


def test_damage_in_either_ring_is_told_to_the_sender(setting: Setting) -> None:
    narrow = setting.open(num_slots=2)
    setting.fill(narrow.lease, snapshot_of(1))
    damaged = setting.only
    wide = setting.open(num_slots=2, span=4)
    setting.host.leases.damaged(damaged)
    refused = setting.ask(begin_slot(wide.lease, snapshot_of(2)))
    assert isinstance(refused, p.PeerRefused)
    assert refused.code == "unknown"


def test_a_replica_that_nothing_needs_goes_though_its_sender_lives(setting: Setting) -> None:
    """The generation before: its sender has a lease, and no use for it any more."""
    old = setting.open(generation=0)
    setting.fill(old.lease, snapshot_of(1))
    before = setting.only
    new = setting.open(generation=1)
    setting.fill(new.lease, snapshot_of(2))
    setting.promise = Promise(2, 2)
    setting.host.tick(setting.now_s)
    assert before in list(setting.replicas), "it was used just now"
    setting.now_s += 120
    setting.begin(new.lease, snapshot_of(3))
    setting.host.tick(setting.now_s)
    assert before not in list(setting.replicas)
    assert len(list(setting.replicas)) == 1
    setting.open(generation=0)


# -- memory --------------------------------------------------------------------------------------


def test_a_replica_takes_nothing_that_was_promised_to_a_rank_of_this_node(setting: Setting) -> None:
    """The rank is attached and has reserved a part; the rest of its promise is no room for replicas."""
    setting.store.create(descriptor(world_size=2, topology="dp2"), 4, MIB)
    setting.store.promised = lambda: {RANK: 30 * MIB}
    assert 9 * MIB < setting.replicas.free_bytes <= 10 * MIB
    refused = setting.ask(open_replica("away", num_slots=12))
    assert isinstance(refused, p.PeerRefused)
    assert refused.code == "quota"
    assert "30 MiB is promised to its own ranks" in refused.message
    setting.open(num_slots=8)
    setting.store.promised = dict
    setting.open(generation=1, num_slots=12)


def test_replicas_are_in_the_numbers_that_ranks_are_admitted_by(setting: Setting) -> None:
    setting.open(num_slots=8)
    memory = setting.store.memory
    assert memory.replica_bytes == setting.only.file_bytes
    before = os.statvfs(setting.store.folder)
    plan = setting.replicas.plan(setting.only.descriptor, 4, MIB, origin_in(setting.only))
    setting.store.promise(plan)  # not made yet
    planned = setting.store.memory
    assert planned.replica_bytes == memory.replica_bytes + plan.geometry.total_bytes
    missing = before.f_bavail * before.f_frsize - planned.fs_available_bytes
    assert missing >= plan.geometry.total_bytes - MIB


def origin_in(segment: Segment) -> str:
    return segment.path.name.rpartition("~")[2].removesuffix(".rep")


# -- epochs --------------------------------------------------------------------------------------


def test_holdings_tell_the_highest_epoch_though_nothing_is_sealed_in_it(setting: Setting) -> None:
    def told() -> Holdings:
        answers: queue.SimpleQueue[object] = queue.SimpleQueue()
        assert setting.host.serve("p", GetHoldings("job", "run"), answers.put)
        reply = answers.get_nowait()
        assert isinstance(reply, Holdings)
        return reply

    assert told().epoch == -1
    setting.open(epoch=3)
    assert (told().epoch, told().segments) == (3, ())
    setting.host.note_epoch("job", "run", 7, 2)
    setting.host.note_epoch("job", "other", 9, 2)
    setting.open(epoch=5)
    assert told().epoch == 7


def test_what_was_agreed_on_counts_also_when_it_comes_with_a_snapshot_of_an_earlier_epoch(
    setting: Setting,
) -> None:
    """After a recovery the first snapshots that are sent are older than it: the ring would be full for good."""
    lease = setting.open().lease
    setting.host.note_epoch("job", "run", 2, 5)
    granted = setting.ask(begin_slot(lease, snapshot_of(5), floor=3, horizon=7, epoch=2))
    assert isinstance(granted, p.SlotGranted)
    promise, _ = setting.host._known.promise("job", "run")
    assert (promise.floor, promise.horizon) == (3, 7)


def test_bytes_that_were_forged_on_the_way_are_not_sealed(setting: Setting) -> None:
    """Somebody changes two words of a tensor so that its xxh3 digest stays. Every digest of before
    agrees; the cryptographic one that the sender told over the control session does not. The
    replica is refused, an event names who sent it, and the slot is free for the next try, which is
    kept with its digest.
    """
    snapshot = snapshot_of(5)
    lease = setting.open().lease
    granted = setting.begin(lease, snapshot)
    image = forged(snapshot.image, snapshot.header.header_digest)
    setting.fabric.regions[granted.region].buffer[:] = image
    refused = setting.ask(p.SealSlot(granted.ticket, snapshot.digest))
    assert isinstance(refused, p.PeerRefused)
    assert refused.code == "digest"
    told = [e for e in setting.events.page(0, 100).events if e.kind == "replica_forged"]
    assert [e.level for e in told] == ["error"]
    assert "iteration 5" in told[0].message
    assert " p " in told[0].message
    assert {h.state for _, h in setting.only.headers()} == {SlotState.FREE}
    setting.fill(lease, snapshot)
    (index,) = [i for i, h in setting.only.headers() if h.state is SlotState.SEALED]
    sealed = setting.only.header(index)
    assert sealed is not None
    assert setting.only.kept_digest(index, sealed) == snapshot.digest


@pytest.mark.parametrize("algorithm", ["blake3", "sha256"])
def test_the_sender_says_which_digest_it_is(setting: Setting, algorithm: str) -> None:
    """Each machine makes the one that it makes faster; who compares takes what it is told."""
    snapshot = snapshot_of(5)
    granted = setting.begin(setting.open().lease, snapshot)
    setting.fabric.regions[granted.region].buffer[:] = snapshot.image
    digest = strong_digest(snapshot.image, algorithm)
    assert isinstance(setting.ask(p.SealSlot(granted.ticket, digest)), p.PeerDone)
