"""Boundary logs among nodes: a peer reads one as it reads snapshots, and keeps a replica of one
whose rank asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgpack
import msgspec
import pytest

from ckptd.core.recovery.recovery_facts import RankFacts, facts_from_wire
from ckptd.core.replication.replicas import Promise
from ckptd.core.slots.segment_format import (
    Kind,
    decode_descriptor,
    encode_descriptor,
    origin_of,
    unpack_slot_header,
)
from ckptd.core.slots.slots import SlotState
from ckptd.memory.slot_digests import SealVerdict, seal_slot
from ckptd.storage.image import verify
from ckptd.transport import peer_messages as p
from ckptd.transport.messages import GetHoldings, Holdings
from tests.ckptd.hosted import MIB, Setting, hosted
from tests.ckptd.puppet import begin_slot, open_replica
from tests.ckptd.running import descriptor, fill, state_of
from tests.ckptd.snapshots import Snapshot, snapshot_of


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    with hosted(tmp_path) as setting:
        yield setting


def test_a_peer_is_told_of_a_log_apart_and_reads_it(setting: Setting) -> None:
    log = setting.store.create(descriptor(kind="log"), 2, MIB)
    sent = bytes(range(64))
    fill(log, 1, 7, anchors=0, tensors=(("activation/0/0/0/0", "U8", (64,), sent),))
    assert seal_slot(log, 1).verdict is SealVerdict.SEALED
    told = setting.ask(GetHoldings("job", "run"))
    assert isinstance(told, Holdings)
    assert told.segments == ()
    ((held,),) = [segment.slots for segment in told.logs]
    header = unpack_slot_header(held.header)
    assert header is not None
    assert header.iteration == 7
    opened = setting.ask(p.OpenRead("job", "run", told.logs[0].name, held.slot, header.sequence))
    assert isinstance(opened, p.ReadOpened)
    image = memoryview(bytes(setting.fabric.regions[opened.region].buffer))
    verify(image, header.header_digest)
    assert sent in bytes(image)
    setting.ask(p.CloseRead(opened.region))
    described = setting.ask(p.GetDescriptor("job", "run", told.logs[0].name))
    assert isinstance(described, p.Descriptor)
    assert decode_descriptor(described.descriptor).is_log
    assert state_of(log, 1) is SlotState.SEALED


@pytest.mark.parametrize(("kind", "asked"), [("log", False), ("parked", True)])
def test_who_does_not_ask_is_not_replicated(setting: Setting, kind: Kind, asked: bool) -> None:
    """Nor is parked state, whatever it says."""
    refused = setting.ask(opening(kind=kind, replicated=asked))
    assert isinstance(refused, p.PeerRefused)
    assert refused.code == "bad_message"
    assert "not replicated" in refused.message
    assert setting.replicas.everything() == []


# -- replicas of logs -----------------------------------------------------------------------------


FACTS = RankFacts((1,), (0,), (0,))


def opening(
    *,
    kind: Kind = "log",
    replicated: bool = True,
    num_slots: int = 4,
    epoch: int = 1,
    start: int = -1,
) -> p.OpenReplica:
    """Asks for a replica of rank 0's log."""
    message = open_replica("away", num_slots=num_slots, epoch=epoch)
    told = {"neighbours": [1], "domain": [0], "alike": [0], "reasons": []}
    log = msgspec.structs.replace(
        decode_descriptor(message.descriptor),
        kind=kind,
        replicated=replicated,
        client=msgpack.packb({"data_offset": 4096, "facts": told}),
    )
    packed, origin = encode_descriptor(log), origin_of(log)
    return msgspec.structs.replace(message, descriptor=packed, origin=origin, epoch_start=start)


def beginning(lease: int, log: Snapshot, oldest: int) -> p.BeginSlot:
    return msgspec.structs.replace(begin_slot(lease, log), anchors=b"\0", oldest=oldest)


def send(setting: Setting, lease: int, *iterations: int, oldest: int) -> None:
    for iteration in iterations:
        log = snapshot_of(iteration, anchors=0)
        granted = setting.ask(beginning(lease, log, oldest))
        assert isinstance(granted, p.SlotGranted), granted
        setting.fabric.regions[granted.region].buffer[:] = log.image
        assert isinstance(setting.ask(p.SealSlot(granted.ticket, log.digest)), p.PeerDone)


def opened(setting: Setting, *, epoch: int = 1, start: int = -1) -> int:
    reply = setting.ask(opening(epoch=epoch, start=start))
    assert isinstance(reply, p.ReplicaOpened), reply
    return reply.lease


def test_a_log_makes_room_for_snapshots_only_of_who_may_act_on_its_run(setting: Setting) -> None:
    """Any node with a trusted key could end the replicas of the logs of any run, by bringing snapshots of its own."""
    opened(setting)
    (log,) = setting.replicas.logs()
    setting.strangers.add(("p", "run"))
    fits = setting.replicas.free_bytes // MIB + 1
    asked = open_replica("away", run="other", num_slots=fits)
    refused = setting.ask(asked)
    assert isinstance(refused, p.PeerRefused)
    assert (refused.code, setting.replicas.logs()) == ("quota", [log])
    assert isinstance(setting.ask(opening(num_slots=2)), p.ReplicaOpened), "its logs do not wait for others"
    setting.strangers.clear()
    refused = setting.ask(asked)
    assert isinstance(refused, p.PeerRefused)
    assert (refused.code, setting.replicas.logs()) == ("busy", [])
    refused = setting.ask(opening())
    assert isinstance(refused, p.PeerRefused)
    assert "come first" in refused.message
    assert isinstance(setting.ask(asked), p.ReplicaOpened)


def held_here(setting: Setting) -> list[int]:
    """The iterations of the only replica of a log."""
    (replica,) = setting.replicas.logs()
    return sorted(h.iteration for _, h in replica.headers() if h.state is SlotState.SEALED)


def test_a_replica_of_a_log_is_told_of_apart_with_its_facts_and_is_no_snapshot(
    setting: Setting,
) -> None:
    send(setting, opened(setting), 4, 5, oldest=4)
    (replica,) = setting.replicas.logs()
    assert replica.path.suffix == ".logrep"
    assert replica.geometry.num_slots == 4, "as many as its primary: it need not hold two suffixes"
    told = setting.ask(GetHoldings("job", "run"))
    assert isinstance(told, Holdings)
    assert told.segments == ()
    assert [(log.own, len(log.slots)) for log in told.logs] == [(False, 2)]
    assert facts_from_wire([told.logs[0].facts]) == {0: FACTS}
    assert (list(setting.replicas), list(setting.replicas.groups())) == ([], [])
    slot, header = next((i, h) for i, h in replica.headers() if h.iteration == 5)
    read = setting.ask(p.OpenRead("job", "run", replica.path.name, slot, header.sequence))
    assert isinstance(read, p.ReadOpened)


def test_a_replica_of_a_log_follows_its_primary(setting: Setting) -> None:
    """What the primary has given away goes, oldest first; nothing else, though the run's promise
    knows nothing of it.
    """
    setting.promise, setting.span = Promise(100, 100), 2
    lease = opened(setting)
    send(setting, lease, 4, 5, 6, 7, oldest=4)
    refused = setting.ask(beginning(lease, snapshot_of(8, anchors=0), 4))
    assert isinstance(refused, p.PeerRefused)
    assert refused.code == "busy"
    send(setting, lease, 8, oldest=5)
    assert held_here(setting) == [5, 6, 7, 8]
    again = setting.ask(beginning(lease, snapshot_of(7, anchors=0), 5))
    assert isinstance(again, p.PeerRefused)
    assert again.code == "held"


def test_a_recovery_frees_what_is_sent_again_from_its_iteration_on(setting: Setting) -> None:
    send(setting, opened(setting), 4, 5, 6, oldest=4)
    opened(setting, epoch=2, start=5)
    assert held_here(setting) == [4]


def test_a_replica_of_a_log_goes_when_the_floor_has_left_it_behind(setting: Setting) -> None:
    send(setting, opened(setting), 4, 5, oldest=4)
    setting.now_s += 120  # its peer sends nothing any more
    for floor, stays in ((9, True), (10, False)):
        setting.promise = Promise(floor, floor)
        setting.host.tick(setting.now_s)
        assert bool(setting.replicas.logs()) is stays
    assert not list(setting.store.folder.glob("*.logrep"))


def test_a_replica_of_a_log_is_found_again_by_the_next_daemon(setting: Setting) -> None:
    send(setting, opened(setting), 4, 5, oldest=4)
    next_store = setting.next_replicas()
    adopted = next_store.adopt()
    found = adopted.segments
    assert (adopted.bad, adopted.damaged) == ([], [])
    assert [segment.is_log for segment in found] == [True]
    assert next_store.used_bytes == setting.replicas.used_bytes > 0
    for segment in found:
        segment.close()


def test_a_log_under_the_name_of_a_replica_of_snapshots_is_put_aside(setting: Setting) -> None:
    opened(setting)
    (replica,) = setting.replicas.logs()
    replica.path.rename(replica.path.with_suffix(".rep"))
    found = setting.next_replicas().adopt()
    assert found.segments == []
    assert [path.name.endswith(".rep.bad") for path, _ in found.bad] == [True]


def test_snapshots_come_before_logs(setting: Setting) -> None:
    """The replica of a log goes for one of snapshots that would find no memory; and none comes in
    while that is so. Of 40 MiB.
    """
    told = setting.ask(opening(num_slots=20))
    assert isinstance(told, p.ReplicaOpened)
    refused = setting.ask(open_replica("away", num_slots=60))
    assert isinstance(refused, p.PeerRefused)
    assert (refused.code, len(setting.replicas.logs())) == ("quota", 1), "it would not have helped"
    setting.now_s += 300
    wanted = open_replica("away", num_slots=30)
    refused = setting.ask(wanted)
    assert isinstance(refused, p.PeerRefused)
    assert refused.code == "busy", "its sender comes again at once, and counts as having a target"
    assert setting.replicas.logs() == []
    again = setting.ask(opening(num_slots=4))
    assert isinstance(again, p.PeerRefused)
    assert (again.code, "come first" in again.message) == ("quota", True)
    assert isinstance(setting.ask(wanted), p.ReplicaOpened)
    setting.now_s += 300
    assert isinstance(setting.ask(opening(num_slots=4)), p.ReplicaOpened)
