"""What the service tells the rest of the daemon, in one process and without a socket."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from ckptd.config.settings import DaemonConfig
from ckptd.core.sessions import RankKey
from ckptd.core.slots.segment_format import (
    Kind,
    SegmentDescriptor,
    SlotHeader,
    encode_descriptor,
    pack_slot_header,
)
from ckptd.core.slots.slots import SlotState
from ckptd.ctl import daemon_commands
from ckptd.memory.housekeeping import SlotListener
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_store import Purpose
from ckptd.memory.slot_digests import SealVerdict, seal_slot
from ckptd.transport import messages as m
from ckptd.units import format_bytes
from tests.ckptd.memory.fresh import put_header
from tests.ckptd.node.one_service import OneService
from tests.ckptd.running import descriptor, eventually, fill, state_of
from tests.ckptd.snapshots import snapshot_of

MIB = 1 << 20
RANK = RankKey("job", "run", 0)

TOKEN = b"of this process"


class Heard(SlotListener):
    """Remembers what was sealed."""

    def __init__(self) -> None:
        self.snapshots: list[Segment] = []
        self.logs: list[Segment] = []

    def snapshot_sealed(self, segment: Segment) -> None:
        self.snapshots.append(segment)

    def log_sealed(self, segment: Segment) -> None:
        self.logs.append(segment)


class Setting(OneService):
    def __init__(self, folder: Path, config: DaemonConfig) -> None:
        self.heard = Heard()
        super().__init__(folder, config, self.heard)

    def attach(self, needed_bytes: int = 8 * MIB) -> m.Reply:
        self.ask(m.Hello("1", os.getpid()))
        return self.ask(m.Attach("job", "run", 0, 1, "dp1", 1, needed_bytes, "2 slots", (), TOKEN))

    def reserve(self, num_slots: int = 2) -> Segment:
        reply = self.ask(m.Reserve(MIB, num_slots, encode_descriptor(descriptor_of())))
        assert isinstance(reply, m.Reserved), reply
        segment = self.store.get(RANK, reply.segment.generation)
        assert segment is not None
        return segment


def descriptor_of(run: str = "run", kind: Kind = "snapshots") -> SegmentDescriptor:
    """Of a rank with one operator, which each of its snapshots anchors."""
    return descriptor(run=run, window=1, num_operators=1, kind=kind)


@pytest.fixture
def setting(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Setting]:
    """With a parameter: whether users are kept apart."""
    with closing(Setting(tmp_path, DaemonConfig(isolate_users=getattr(request, "param", False)))) as found:
        yield found


def test_a_generation_that_is_given_back_is_told_at_once(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a target is sent it until the next tick, and the floor believes in it."""
    told: list[tuple[RankKey, int]] = []  # whose snapshots changed, and how many generations there were then
    changed = setting.peering.runs.changed

    def watched(key: RankKey) -> None:
        told.append((key, len(setting.store.of_rank(key))))
        changed(key)

    monkeypatch.setattr(setting.peering.runs, "changed", watched)
    setting.attach()
    setting.reserve()
    dropped = setting.reserve()
    assert isinstance(setting.ask(m.Drop(dropped.generation)), m.Done)
    assert told == [(RANK, 1)]


def test_a_join_of_an_older_epoch_is_refused_and_changes_nothing(setting: Setting) -> None:
    setting.attach()
    members = (m.Member(m.NodeCard("here"), (0,)),)
    assert isinstance(setting.ask(m.Join(7, 3, members)), m.Done)
    refused = setting.ask(m.Join(6, 1, members))
    assert isinstance(refused, m.Refused)
    assert refused.code is m.RefusalCode.STALE_EPOCH
    assert "epoch 7 has begun here" in refused.message
    assert refused.hint
    assert setting.peering.holdings("job", "run").epoch == 7
    assert setting.peering.holdings("job", "other").epoch == -1


def test_what_is_promised_at_attach_is_kept_from_replicas(setting: Setting) -> None:
    before = setting.peering.replicas.free_bytes
    setting.attach(12 * MIB)
    assert before - setting.peering.replicas.free_bytes == 12 * MIB
    setting.reserve()
    assert before - setting.peering.replicas.free_bytes == 12 * MIB, "it is a part of its promise"


def test_a_rank_that_does_not_fit_beside_replicas_is_told_so(setting: Setting) -> None:
    replicas = setting.peering.replicas
    plan = setting.store.plan(descriptor_of("other"), 30, MIB)
    setting.store.promise(replace(plan, purpose=Purpose.REPLICA))
    refused = setting.attach(40 * MIB)
    assert isinstance(refused, m.Refused)
    assert refused.code is m.RefusalCode.QUOTA
    assert f"{format_bytes(replicas.used_bytes)} of it by replicas" in refused.message
    assert isinstance(setting.attach(4 * MIB), m.Attached)
    assert isinstance(setting.reserve(), Segment)
    again = setting.ask(m.Reserve(MIB, 40, encode_descriptor(descriptor_of())))
    assert isinstance(again, m.Refused)
    assert again.code is m.RefusalCode.QUOTA


def fetch_from(segment: Segment, header: SlotHeader) -> m.Fetch:
    source = m.FetchSource("here", segment.path.name, 0)
    return m.Fetch((m.FetchPiece(pack_slot_header(header), (source,)),))


@pytest.mark.parametrize("image_len", [0, MIB + 1, (1 << 62) - 1])
def test_an_image_that_no_slot_of_its_segment_can_hold_is_not_fetched(
    setting: Setting, image_len: int
) -> None:
    """Headers come from other nodes. No memory is made for what cannot be."""
    setting.attach()
    segment = setting.reserve()
    header = replace(snapshot_of(3).header, image_len=image_len)
    refused = setting.ask(fetch_from(segment, header))
    assert isinstance(refused, m.Refused)
    assert refused.code is m.RefusalCode.BAD_MESSAGE
    assert refused.hint
    assert len(setting.store) == 1


@pytest.mark.parametrize(("held", "made"), [(2, 3), (20, 20), (40, 3)])
def test_a_fetch_gets_as_much_room_as_its_holder_has_or_as_little_as_will_do(
    setting: Setting, held: int, made: int
) -> None:
    """64 MiB are not enough for twice 40 slots of 1 MiB; nobody is told of a refusal that was none."""
    setting.attach()
    segment, snapshot = setting.reserve(held), snapshot_of(3)
    segment.image(0, snapshot.header)[:] = snapshot.image
    put_header(segment.buffer, segment.geometry, 0, snapshot.header)
    reply = setting.ask(fetch_from(segment, snapshot.header))
    assert isinstance(reply, m.Reserved), reply
    assert reply.segment.num_slots == made
    told = setting.peering._events.page(0, 100).events
    assert not [event for event in told if event.kind.startswith("refused")]


def test_a_copy_on_this_node_that_a_fetch_finds_damaged_is_verified(setting: Setting) -> None:
    """And quarantined: the next plan must not want it again. No peer tells us of our own slots."""
    setting.attach()
    segment, snapshot = setting.reserve(), snapshot_of(3)
    segment.image(0, snapshot.header)[:] = snapshot.image
    segment.image(0, snapshot.header)[snapshot.header.image_len // 2] ^= 1
    put_header(segment.buffer, segment.geometry, 0, snapshot.header)
    assert isinstance(setting.ask(fetch_from(segment, snapshot.header)), m.Reserved)

    def quarantined() -> bool:
        setting.workers.collect()
        header = segment.header(0)
        return header is not None and header.state is SlotState.QUARANTINED

    eventually(quarantined, "the damaged slot is quarantined")


def reserve_log(setting: Setting, num_slots: int = 3, kind: Kind = "log") -> Segment:
    told = encode_descriptor(descriptor_of(kind=kind))
    reply = setting.ask(m.ReserveBeside(MIB, num_slots, told))
    assert isinstance(reply, m.Reserved), reply
    segment = setting.store.get(RANK, reply.segment.generation)
    assert segment is not None
    return segment


def put(segment: Segment, index: int, iteration: int) -> None:
    """A sealed slot that anchors everything: were it taken for a snapshot, it could be recovered from."""
    fill(segment, index, iteration, anchors=1)
    assert seal_slot(segment, index).verdict is SealVerdict.SEALED


def test_a_log_is_asked_for_by_a_message_of_its_own(setting: Setting) -> None:
    """A daemon that knows no logs ignores what it does not know of a descriptor, and would make a
    segment for snapshots.
    """
    setting.attach()
    wrong = (
        m.Reserve(MIB, 2, encode_descriptor(descriptor_of(kind="log"))),
        m.ReserveBeside(MIB, 2, encode_descriptor(descriptor_of())),
    )
    for message in wrong:
        refused = setting.ask(message)
        assert isinstance(refused, m.Refused)
        assert refused.code is m.RefusalCode.BAD_DESCRIPTOR
    assert list(setting.store.everything()) == []


def test_a_log_that_exceeds_the_quota_is_refused_with_numbers(setting: Setting) -> None:
    setting.attach()
    setting.reserve()
    told = encode_descriptor(descriptor_of(kind="log"))
    refused = setting.ask(m.ReserveBeside(MIB, 70, told))
    assert isinstance(refused, m.Refused)
    assert refused.code is m.RefusalCode.QUOTA
    assert "70 slots of 1 MiB" in refused.message
    assert "the quota is 64 MiB" in refused.message


def test_a_trainer_is_told_of_its_log_apart_from_its_snapshots(setting: Setting) -> None:
    setting.attach()
    snapshots, log = setting.reserve(), reserve_log(setting)
    fresh = setting.attach(0)
    assert isinstance(fresh, m.Attached)
    assert [info.generation for info in fresh.segments] == [snapshots.generation]
    assert [info.generation for info in fresh.logs] == [log.generation]
    assert fresh.available_bytes == 64 * MIB - log.file_bytes


def test_parked_state_is_told_held_and_shown_apart_from_snapshots_and_logs(
    setting: Setting,
) -> None:
    """It anchors everything, as a snapshot may: were it taken for one, the run would go back to it for ever."""
    setting.attach()
    snapshots, log = setting.reserve(), reserve_log(setting)
    parked = reserve_log(setting, 2, "parked")
    put(snapshots, 0, 3)
    fill(parked, 1, 7)
    setting.service.handle(b"t", m.Filled(parked.generation, 1, 7), setting.answers.append)
    eventually(lambda: _sealed_now(setting, parked, 1), "the parked state is sealed")
    assert setting.heard.snapshots == []  # nothing is replicated or stored because of it
    fresh = setting.attach(0)
    assert isinstance(fresh, m.Attached)
    assert [info.generation for info in fresh.segments] == [snapshots.generation]
    assert [info.generation for info in fresh.parked] == [parked.generation]
    assert fresh.available_bytes == 64 * MIB - log.file_bytes - parked.file_bytes
    holdings = setting.peering.holdings("job", "run")
    assert [held.name for held in holdings.segments] == [snapshots.path.name]
    assert holdings.logs == ()
    assert [held.name for held in holdings.parked] == [parked.path.name]
    shown = setting.ask(m.GetSnapshots())
    assert isinstance(shown, m.Snapshots)
    (rank,) = shown.ranks
    assert rank.suffix == (3, 3)
    assert "parked: iteration 7 (" in daemon_commands.snapshots_text(shown, operators=False)
    backup = reserve_log(setting, 2, "kv")
    again = setting.attach(0)
    assert isinstance(again, m.Attached)
    assert [info.generation for info in again.kv] == [backup.generation]
    assert [info.generation for info in again.parked] == [parked.generation]
    assert setting.peering.holdings("job", "run") == holdings  # it is no state of a run
    status = setting.ask(m.GetStatus())
    assert isinstance(status, m.Status)
    assert [segment.kind for segment in status.segments] == ["snapshots", "log", "parked", "kv"]


def parked_events(setting: Setting) -> list[str]:
    page = setting.ask(m.GetEvents(limit=100))
    assert isinstance(page, m.Events)
    return [event.message for event in page.events if event.kind == "parked"]


def test_what_a_trainer_parked_and_had_no_time_to_tell_is_told_once(setting: Setting) -> None:
    """By the daemon, when it is sealed. What the trainer has told, and what lay there before it
    came, is not told again.
    """
    setting.attach()
    parked = reserve_log(setting, 2, "parked")
    put(parked, 0, 6)
    setting.service.handle(b"t", m.Notice("info", "parked", "parked at iteration 6"), setting.answers.append)
    fill(parked, 1, 7)  # and the process ends
    session = setting.service.sessions.of_rank(RANK)
    assert session is not None
    setting.service.trainers.gone(session, "its process ended")
    eventually(lambda: _sealed_now(setting, parked, 1), "the parked state is sealed")
    setting.service.tick()
    ours = f"parked at iteration 7: process {os.getpid()} ended before it could report it"
    assert parked_events(setting) == ["parked at iteration 6", ours]
    setting.attach(0)  # in a container the next process has the same number
    setting.ask(m.Detach(final=False))
    setting.service.tick()
    assert parked_events(setting) == ["parked at iteration 6", ours]


def test_what_was_parked_while_no_daemon_was_there_is_told_by_the_next_one(
    setting: Setting,
) -> None:
    setting.attach()
    parked = reserve_log(setting, 2, "parked")
    put(parked, 0, 6)
    held = (parked.generation,)
    goes_on = m.Attach("job", "run", 0, 1, "dp1", 1, 0, "2 slots", held, TOKEN)
    (session,) = setting.service.sessions
    setting.service.sessions.remove(session)  # as a daemon that was restarted knows none
    assert isinstance(setting.ask(goes_on), m.Attached)
    assert isinstance(setting.ask(goes_on), m.Attached)
    setting.ask(m.Detach(final=False))
    assert parked_events(setting) == [
        f"parked at iteration 6: process {os.getpid()} ended before it could report it"
    ]


def _sealed_now(setting: Setting, segment: Segment, index: int) -> bool:
    setting.workers.collect()
    return state_of(segment, index) is SlotState.SEALED


def test_what_is_logged_is_held_and_shown_and_no_snapshot(setting: Setting) -> None:
    setting.attach()
    snapshots, log = setting.reserve(), reserve_log(setting)
    put(snapshots, 0, 3)
    put(log, 0, 7)
    holdings = setting.peering.holdings("job", "run")
    assert [held.name for held in holdings.segments] == [snapshots.path.name]
    assert [held.name for held in holdings.logs] == [log.path.name]
    shown = setting.ask(m.GetSnapshots())
    assert isinstance(shown, m.Snapshots)
    (rank,) = shown.ranks
    assert {slot.iteration for slot in rank.slots if slot.state == "sealed"} == {3}
    assert {slot.iteration for slot in rank.log if slot.state == "sealed"} == {7}
    assert rank.suffix == (3, 3)
    assert "boundary log: iterations 7, " in daemon_commands.snapshots_text(shown, operators=False)
    status = setting.ask(m.GetStatus())
    assert isinstance(status, m.Status)
    assert [segment.kind for segment in status.segments] == ["snapshots", "log"]
    assert status.used_bytes == snapshots.file_bytes + log.file_bytes


def test_a_log_is_sealed_on_announcement_and_nobody_takes_that_for_a_snapshot(
    setting: Setting,
) -> None:
    setting.attach()
    log = reserve_log(setting)
    fill(log, 1, 4)
    setting.service.handle(b"t", m.Filled(log.generation, 1, 4), setting.answers.append)

    def sealed() -> bool:
        setting.workers.collect()
        return setting.heard.logs == [log]  # it may have to go to peers

    eventually(sealed, "the logged iteration is sealed, and told of")
    assert state_of(log, 1) is SlotState.SEALED
    assert (setting.heard.snapshots, setting.answers) == ([], [])


@pytest.mark.parametrize("message", [m.Detach(final=True), m.Forget("job", "run")])
def test_a_log_goes_with_its_run(setting: Setting, message: m.Message) -> None:
    setting.attach()
    log = reserve_log(setting)
    if isinstance(message, m.Forget):
        setting.ask(m.Detach())
    assert isinstance(setting.ask(message), m.Done)
    assert not log.path.exists()
    assert setting.store.used_bytes == 0


@pytest.mark.parametrize("setting", [False, True], indirect=True, ids=["together", "apart"])
def test_runs_that_a_user_may_see_are_named_if_there_is_none_to_forget(
    setting: Setting, request: pytest.FixtureRequest
) -> None:
    """Where users are not kept apart a job that looks like a user's is a job like any other."""
    user = 1002
    for job in ("job", f"u{user}.job"):
        setting.store.create(descriptor(job=job, window=1, num_operators=1), 2, MIB)
    setting.service.handle(b"t", m.Forget(f"u{user}.gone", "run"), setting.answers.append, user=user)
    (refused,) = setting.answers
    assert isinstance(refused, m.Refused)
    seen = f"u{user}.job/run" if "apart" in request.node.name else f"job/run, u{user}.job/run"
    assert refused.message == f"no segments of u{user}.gone/run; in memory are {seen}"


def test_a_dead_trainers_half_filled_log_is_freed(setting: Setting) -> None:
    setting.attach()
    log = reserve_log(setting)
    fill(log, 0, 4, state=SlotState.FILLING)
    (session,) = setting.service.sessions
    setting.service.trainers.gone(session, "a test says so")
    assert state_of(log, 0) is SlotState.FREE


@pytest.mark.parametrize("message", [m.Detach(final=True), m.Forget("job", "run")])
def test_a_told_placement_is_kept_while_its_run_is(setting: Setting, message: m.Message) -> None:
    """A refused message changes nothing: neither a trainer's that is not attached, nor a request to
    forget a run that is.
    """
    told = m.TellElastic(m.Elastic(((1,),), (m.ElasticNode("here", 1),)))
    assert isinstance(setting.ask(told), m.Refused)
    assert setting.ask(m.GetElastic()) == m.SeenElastic(())
    setting.attach()
    setting.reserve()
    setting.service.handle(b"t", told, setting.answers.append)
    assert not setting.answers, "it is not answered"
    assert isinstance(setting.ask(m.Forget("job", "run")), m.Refused)

    def seen() -> list[m.Elastic]:
        reply = setting.ask(m.GetElastic("job", ""))
        assert isinstance(reply, m.SeenElastic)
        return [one.elastic for one in reply.told]

    assert seen() == [told.elastic]
    if isinstance(message, m.Forget):
        setting.ask(m.Detach())
        assert seen() == [told.elastic]
    assert isinstance(setting.ask(message), m.Done)
    assert seen() == []


def test_who_attaches_after_a_death_is_told_for_how_long_it_is_known(setting: Setting) -> None:
    first = setting.attach()
    assert isinstance(first, m.Attached)
    assert (first.failure_ago_s, first.others_ended_ago_s) == (-1.0, -1.0)
    (session,) = setting.service.sessions
    setting.service.trainers.gone(session, "a test says so")
    second = setting.attach()
    assert isinstance(second, m.Attached)
    assert 0.0 <= second.failure_ago_s < 600.0, "seconds, and not a time of the day"
    assert second.others_ended_ago_s == -1.0, "there was no other"
    setting.ask(m.Detach())
    third = setting.attach()
    assert isinstance(third, m.Attached)
    assert third.failure_ago_s == -1.0, "the run was back, and ended in order"


def test_a_run_under_a_forgotten_name_has_not_failed(setting: Setting) -> None:
    setting.attach()
    setting.reserve()
    (session,) = setting.service.sessions
    setting.service.trainers.gone(session, "a test says so")
    assert isinstance(setting.ask(m.Forget("job", "run")), m.Done)
    again = setting.attach()
    assert isinstance(again, m.Attached)
    assert again.failure_ago_s == -1.0


def test_a_recovery_is_counted_once_by_the_report_that_follows_its_notice(setting: Setting) -> None:
    setting.attach()
    start = {"phase_attach_s": 0.5, "first_new_step_at": 1.0}
    for told in (
        m.Notice("info", "start_phases", "the first start"),
        m.Report(3, start),
        m.Notice("info", "recovery_phases", "after a failure"),
        m.Report(9, {"phase_loaded_s": 0.25, "phase_replayed_s": 1.0}),
        m.Report(10, {"phase_loaded_s": 0.25, "phase_replayed_s": 1.0}),
    ):
        setting.service.handle(b"t", told, setting.answers.append)
    found = setting.service.view(0).recoveries
    assert setting.answers == []
    assert (found.whole.count, found.whole.total) == (1, 1.25)
    assert {phase for phase, histogram in found.phases.items() if histogram.count} == {"loaded", "replayed"}


def test_a_view_stays_as_it_was(setting: Setting) -> None:
    """Another thread reads it while the daemon goes on."""
    before = setting.service.view(0)
    setting.attach()
    setting.service.handle(b"t", m.Notice("info", "recovery_phases", ""), setting.answers.append)
    setting.service.handle(b"t", m.Report(9, {"phase_loaded_s": 0.25}), setting.answers.append)
    assert (before.recoveries.whole.count, before.status.sessions) == (0, ())
