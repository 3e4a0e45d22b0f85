"""Segment files: made whole or not at all, adopted or put aside, never half believed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from ckptd.config.runtime_dir import (
    AlreadyRunning,
    UnusableFolder,
    claim,
    node_name,
    private_folder,
)
from ckptd.core.sessions import AttachWish, RankKey
from ckptd.core.slots.segment_format import Kind, slot_lock_byte
from ckptd.core.slots.slots import SlotState
from ckptd.event_log import EventLog
from ckptd.memory import locks
from ckptd.memory.pages import filesystem_kind, is_in_memory
from ckptd.memory.segment_file import Adopted, Segment, open_segment, settle
from ckptd.memory.segment_store import (
    CannotReserve,
    FolderListener,
    Purpose,
    SegmentMaker,
    SegmentPlan,
    SegmentStore,
)
from ckptd.memory.slot_digests import SealVerdict, scrub_slot, seal_slot
from ckptd.transport.messages import RefusalCode, Refused
from ckptd.workers import Workers
from tests.ckptd.running import MIB, descriptor, eventually, fill, own, small_tmpfs, state_of

KEY = RankKey("job", "run", 0)


def make_store(folder: Path, quota_bytes: int = 64 * MIB, mlock: str = "off") -> SegmentStore:
    return SegmentStore(folder, quota_bytes, "node-1", mlock=mlock, hugepages="auto")


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(f"/dev/shm/ckptd-test-segments-{os.getpid()}")
    path.mkdir(mode=0o700)
    yield path
    for left in path.iterdir():
        left.unlink()
    path.rmdir()


def test_a_segment_has_its_pages_and_its_identity(folder: Path) -> None:
    store = make_store(folder)
    segment = store.create(descriptor(), 3, MIB)
    info = segment.path.stat()
    assert info.st_blocks * 512 >= 3 * MIB  # allocated now, not at first touch
    assert info.st_mode & 0o777 == 0o600
    again = open_segment(segment.path)
    assert again.descriptor.node_id == "node-1"
    assert again.descriptor.created_at_ns > 0
    assert [header.state for _, header in again.headers()] == [SlotState.FREE] * 3
    assert store.used_bytes == segment.file_bytes


def test_generations_count_up_also_over_what_is_still_being_made(folder: Path) -> None:
    store = make_store(folder)
    plan = store.plan(descriptor(), 1, 4096)
    store.promise(plan)
    assert store.create(descriptor(), 1, 4096).generation == 1
    assert store.create(descriptor(rank=1, world_size=2), 1, 4096).generation == 0
    store.enter(plan, store.build(plan))
    assert [segment.generation for segment in store.of_rank(KEY)] == [0, 1]


def test_adopting_finds_what_was_there(folder: Path) -> None:
    first = make_store(folder).create(descriptor(), 2, MIB)
    fill(first, 0, 5)
    second = make_store(folder)
    found = second.adopt(now_s=1.0)
    adopted, bad = found.segments, found.bad
    assert bad == []
    assert [segment.key for segment in adopted] == [KEY]
    assert state_of(adopted[0], 0) is SlotState.FILLED
    assert adopted[0].detached_at_s == 1.0


def test_segments_are_kept_from_when_they_are_entered_until_they_are_removed(folder: Path) -> None:
    told: list[tuple[str, bool]] = []

    class Listener(FolderListener):
        def keep_file(self, name: str, fd: int | None) -> None:
            told.append((name, fd is not None))

    store = SegmentStore(folder, MIB * 64, "n", mlock="off", hugepages="off", listener=Listener())
    segment = store.create(descriptor(), 2, MIB)
    store.remove(segment)
    assert told == [(segment.path.name, True), (segment.path.name, False)]


def test_what_was_kept_of_a_removed_segment_is_put_back(folder: Path) -> None:
    segment = make_store(folder).create(descriptor(), 2, MIB)
    fill(segment, 0, 5)
    store, name, before = make_store(folder), segment.path.name, bytes(segment.buffer)
    assert not store.put_back(name, segment.fd), "its file is there"
    segment.path.unlink()
    assert not store.put_back("../other.seg", segment.fd)
    assert not store.put_back("job~run~r0~g0.bad", segment.fd)
    assert list(folder.iterdir()) == []
    (folder / f".{name}.{os.getpid()}.tmp").write_bytes(b"of a daemon that died")
    assert store.put_back(name, segment.fd)
    assert list(folder.iterdir()) == [segment.path]
    (found,) = store.adopt(now_s=1.0).segments
    assert bytes(found.buffer) == before
    assert found.path.stat().st_ino != os.fstat(segment.fd).st_ino
    with pytest.raises(FileExistsError):
        store.put_back(name, segment.fd)


def test_the_record_of_a_run_is_put_back_to_the_byte(folder: Path) -> None:
    record = folder / "job~run.run"
    record.write_bytes(b"who takes part")
    with record.open("rb") as kept:
        record.unlink()
        assert make_store(folder).put_back(record.name, kept.fileno())
    assert record.read_bytes() == b"who takes part"


@pytest.mark.parametrize(("kind", "end"), [("log", "boundary"), ("parked", "parked"), ("kv", "kv")])
def test_what_lies_beside_snapshots_counts_and_is_adopted_and_is_not_found_where_they_are(
    folder: Path, kind: Kind, end: str
) -> None:
    store = make_store(folder)
    snapshots, log = (
        store.create(descriptor(), 2, MIB),
        store.create(descriptor(kind=kind), 3, MIB),
    )
    assert log.path.name == f"job~run~r0~g1.{end}"  # generations count over all kinds
    assert store.used_bytes == snapshots.file_bytes + log.file_bytes
    assert len(store.facts()) == 2
    fill(log, 0, 5)
    again = make_store(folder)
    taken = again.adopt(now_s=1.0)
    adopted, bad = taken.segments, taken.bad
    assert ([s.holds_snapshots for s in adopted], bad) == ([True, False], [])
    for found in (list(again), again.of_rank(KEY), again.of_run("job", "run")):
        assert [s.path for s in found] == [snapshots.path]
    assert len(again) == 1
    logs, parks = again.logs_of_run("job", "run"), again.parks_of_run("job", "run")
    assert [s.path for s in logs] == [log.path] * (kind == "log")
    assert [s.path for s in parks] == [log.path] * (kind == "parked")
    for every in (again.everything(), again.all_of_rank(KEY), again.all_of_run("job", "run")):
        assert [s.path for s in every] == [snapshots.path, log.path]
    assert again.create(descriptor(), 1, MIB).generation == 2


def test_what_there_is_of_a_rank_and_of_a_run_follows_what_comes_and_goes(folder: Path) -> None:
    """They are found by tables of their own. A search of all segments for every rank took a daemon
    with a hundred runs most of its time.
    """
    store = make_store(folder)

    def check() -> None:
        everything = store.everything()
        for run in ("a", "b", "c"):
            of_run = [s for s in everything if s.key.run == run]
            assert store.all_of_run("job", run) == of_run
            for rank in range(2):
                of_rank = [s for s in of_run if s.key.rank == rank]
                assert store.all_of_rank(RankKey("job", run, rank)) == of_rank

    for run in ("b", "a", "b"):
        for rank in (1, 0):
            store.create(descriptor(run=run, rank=rank, world_size=2), 1, 4096)
            check()
    assert len(store.all_of_run("job", "b")) == 4
    for segment in store.everything()[::2] + store.everything()[1::2]:
        store.remove(segment)
        store.discard(segment)  # once more changes nothing
        check()
    assert store.everything() == []
    store.create(descriptor(run="a"), 1, 4096)
    check()


@pytest.mark.parametrize("name", ["job~run~r0~g0.seg", "job~run~r0~g0~0123456789abcdef.rep"])
@pytest.mark.parametrize("kind", ["log", "parked", "kv"])
def test_another_kind_under_a_name_of_snapshots_is_not_believed(folder: Path, kind: Kind, name: str) -> None:
    log = make_store(folder).create(descriptor(kind=kind), 1, MIB)
    log.path.rename(folder / name)
    with pytest.raises(ValueError, match="is not <job>"):
        open_segment(folder / name)


def test_a_segment_whose_trainer_lives_is_adopted_as_owned(folder: Path) -> None:
    fd = own(make_store(folder).create(descriptor(), 1, MIB))
    try:
        (adopted,) = make_store(folder).adopt(now_s=1.0).segments
        assert adopted.detached_at_s is None
    finally:
        os.close(fd)


def damage_nothing(path: Path) -> None:
    path.rename(path.with_name("job~run~r5~g0.seg"))


def damage_length(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def damage_all(path: Path) -> None:
    os.truncate(path, 0)


def damage_magic(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"SOMETHING ELSE")


def damage_descriptor(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff\xff\xff")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_nothing, "its name says"),
        (damage_length, "truncated"),
        (damage_all, "empty"),
        (damage_magic, "CKPTDSEG"),
        (damage_descriptor, "descriptor"),
    ],
)
def test_what_cannot_be_believed_is_put_aside_with_the_reason(
    folder: Path, damage: object, reason: str
) -> None:
    segment = make_store(folder).create(descriptor(), 2, MIB)
    assert callable(damage)
    damage(segment.path)
    store = make_store(folder)
    found = store.adopt(now_s=0.0)
    ((aside, why),) = found.bad
    assert found.segments == []
    assert reason in why
    assert aside.name.endswith(".seg.bad")
    assert aside.exists()
    assert store.remove_bad("job", "run") == 1


def test_a_link_is_not_followed(folder: Path) -> None:
    target = make_store(folder).create(descriptor(), 1, 4096).path.rename(folder / "elsewhere")
    (folder / "job~run~r0~g0.seg").symlink_to(target)
    found = make_store(folder).adopt(now_s=0.0)
    assert (found.segments, len(found.bad)) == ([], 1)


def test_leftovers_of_a_crash_are_removed(folder: Path) -> None:
    (folder / ".job~run~r0~g0.seg.123.tmp").write_bytes(b"half")
    assert make_store(folder).adopt(now_s=0.0) == Adopted()
    assert list(folder.iterdir()) == []


def test_a_full_filesystem_is_an_error_with_numbers_and_leaves_nothing() -> None:
    with small_tmpfs("8m") as folder:
        store = make_store(folder)
        plan = store.plan(descriptor(), 10, MIB)
        with pytest.raises(CannotReserve, match=r"10 slots of 1 MiB.*has 8 MiB.*No space") as caught:
            store.build(plan)
        assert caught.value.code == "segment_fs"
        assert "--shm-size" in caught.value.hint
        assert list(folder.iterdir()) == []
        assert store.create(descriptor(), 4, MIB).geometry.num_slots == 4


def test_create_that_fails_is_not_counted() -> None:
    with small_tmpfs("8m") as folder:
        store = make_store(folder)
        with pytest.raises(CannotReserve):
            store.create(descriptor(), 10, MIB)
        assert store.used_bytes == 0
        memory = store.memory
        assert memory.fs_total_bytes == 8 * MIB
        assert memory.fs_available_bytes == 8 * MIB


def test_settling_frees_what_was_being_filled_and_reports_what_was_filled(folder: Path) -> None:
    segment = make_store(folder).create(descriptor(), 4, MIB)
    fill(segment, 0, 3)
    fill(segment, 1, 4, state=SlotState.FILLING)
    fill(segment, 2, 5, state=SlotState.FILLING)
    offset = segment.geometry.header_offset(3)
    segment.buffer[offset + 8 : offset + 12] = b"torn"
    writer = os.open(segment.path, os.O_RDWR)
    try:
        assert locks.try_lock(writer, slot_lock_byte(2), True)
        report = settle(segment)
    finally:
        os.close(writer)
    assert (report.freed, report.to_seal, report.damaged) == ((1,), (0,), (3,))
    states = [state_of(segment, index) for index in range(4)]
    assert states == [SlotState.FILLED, SlotState.FREE, SlotState.FILLING, SlotState.FREE]


def test_sealing_makes_a_slot_verifiable(folder: Path) -> None:
    segment = make_store(folder).create(descriptor(), 1, MIB)
    fill(segment, 0, 3)
    assert seal_slot(segment, 0).verdict is SealVerdict.SEALED
    header = segment.header(0)
    assert header is not None
    assert header.state is SlotState.SEALED
    assert header.sealed_at_ns > 0
    assert scrub_slot(segment, 0, header.sequence).verdict is SealVerdict.INTACT
    assert seal_slot(segment, 0).verdict is SealVerdict.CHANGED


def test_sealing_garbage_frees_the_slot_and_says_why(folder: Path) -> None:
    segment = make_store(folder).create(descriptor(), 1, MIB)
    fill(segment, 0, 3)
    segment.buffer[segment.geometry.slot_offset(0) + 8] = 0
    outcome = seal_slot(segment, 0)
    assert outcome.verdict is SealVerdict.DAMAGED
    assert outcome.reason
    assert state_of(segment, 0) is SlotState.FREE


def test_a_flipped_bit_is_found_and_its_tensor_named(folder: Path) -> None:
    segment = make_store(folder).create(descriptor(), 1, MIB)
    fill(segment, 0, 3, tensors=(("layer.weight", "F32", (4,), b"\x01" * 16),))
    seal_slot(segment, 0)
    header = segment.header(0)
    assert header is not None
    segment.buffer[segment.geometry.slot_offset(0) + header.image_len - 1] ^= 1
    outcome = scrub_slot(segment, 0, header.sequence)
    assert outcome.verdict is SealVerdict.DAMAGED
    assert "'layer.weight'" in outcome.reason
    assert state_of(segment, 0) is SlotState.QUARANTINED


def test_a_slot_that_is_being_written_is_not_scrubbed(folder: Path) -> None:
    segment = make_store(folder).create(descriptor(), 1, MIB)
    fill(segment, 0, 3)
    seal_slot(segment, 0)
    with locks.lock_file(segment.path, slot_lock_byte(0), exclusive=True):
        assert scrub_slot(segment, 0, 4).verdict is SealVerdict.BUSY
    assert scrub_slot(segment, 0, sequence=99).verdict is SealVerdict.CHANGED


def test_a_file_that_was_removed_or_replaced_is_noticed(folder: Path) -> None:
    segment = make_store(folder).create(descriptor(), 1, 4096)
    assert segment.in_place()
    segment.path.rename(folder / "elsewhere")
    assert not segment.in_place()
    segment.path.write_bytes(b"another file")
    assert not segment.in_place()


def test_locking_in_memory_is_recorded(folder: Path) -> None:
    segment = make_store(folder, mlock="auto").create(descriptor(), 1, 4096)
    if os.geteuid() == 0:
        assert segment.mlocked
    assert not make_store(folder, mlock="off").create(descriptor(rank=1), 1, 4096).mlocked


def test_the_filesystem_is_recognised(folder: Path) -> None:
    assert filesystem_kind(folder) == "tmpfs"
    assert is_in_memory("tmpfs")
    assert not is_in_memory(filesystem_kind(Path("/proc")))


def test_a_folder_must_be_ours_alone(tmp_path: Path) -> None:
    assert private_folder(str(tmp_path / "new"), "test folder").stat().st_mode & 0o777 == 0o700
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(UnusableFolder, match="chmod 700"):
        private_folder(str(open_to_all), "test folder")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "new")
    with pytest.raises(UnusableFolder, match="not a folder"):
        private_folder(str(link), "test folder")
    (tmp_path / "file").write_text("")
    with pytest.raises(UnusableFolder, match="cannot create"):
        private_folder(str(tmp_path / "file"), "test folder")


def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 12345, -1)
    with pytest.raises(UnusableFolder, match="belongs to user 12345"):
        private_folder(str(theirs), "test folder")


def test_a_folder_is_claimed_once_and_the_holder_is_named(tmp_path: Path) -> None:
    fd = claim(tmp_path, "test folder")
    with pytest.raises(AlreadyRunning, match=f"process {os.getpid()}"):
        claim(tmp_path, "test folder")
    os.close(fd)
    os.close(claim(tmp_path, "test folder"))


def test_the_node_keeps_its_name(tmp_path: Path) -> None:
    name = node_name(tmp_path)
    assert node_name(tmp_path) == name
    (tmp_path / "node-id").write_text("not a name!\n")
    assert node_name(tmp_path) != name


READER = AttachWish(RankKey("job", "run", 3), 4, "", 1, 0, "")


@dataclass
class Setting:
    store: SegmentStore
    workers: Workers
    events: EventLog = field(default_factory=lambda: EventLog(100))
    made: list[Segment] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.maker = SegmentMaker(self.store, self.events, self.workers)

    def plan(self, purpose: Purpose, slots: int = 2) -> SegmentPlan:
        found = self.store.plan(descriptor(), slots, MIB)
        reader = READER if purpose is Purpose.COPY else None
        path = found.path.with_suffix(f".{purpose}")
        return replace(found, purpose=purpose, path=path, reader=reader, number=7)

    def make(self, plan: SegmentPlan) -> Refused | None:
        return self.maker.make(plan, made=self.made.append, refused=self.refused.append)

    def ended(self) -> bool:
        self.workers.collect()
        return bool(self.made or self.refused)

    def told(self) -> list[str]:
        return [event.kind for event in self.events.page(0, 100).events]


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    folder = tmp_path / "segments"
    folder.mkdir()
    workers = Workers("test", 1, 1, lambda: None)
    yield Setting(SegmentStore(folder, 16 * MIB, "n", mlock="off", hugepages="off"), workers)
    workers.close(5.0)


@pytest.mark.parametrize("purpose", Purpose)
def test_memory_of_every_purpose_counts_from_the_promise_until_it_is_given_back(
    setting: Setting, purpose: Purpose
) -> None:
    """What a copy or a replica had yet to allocate was counted in some of the numbers only."""
    store, plan = setting.store, setting.plan(purpose)
    charged = plan.charged_to
    assert setting.make(plan) is None
    total = plan.geometry.total_bytes
    facts = {fact.key: fact.total_bytes for fact in store.facts()}
    assert facts == ({} if charged is None else {charged: total})
    assert store.used_bytes == total
    assert store.memory.replica_bytes == (total if charged is None else 0)
    eventually(setting.ended, "it is built")
    (segment,) = setting.made
    assert store.all_for(purpose) == [segment]
    assert store.named(plan.path.name, purpose) is segment
    assert store.everything() == ([segment] if purpose is Purpose.RANK else [])
    assert (segment.detached_at_s is not None) is (purpose is Purpose.RANK)
    assert store.used_bytes == segment.file_bytes == plan.path.stat().st_size
    setting.maker.give_back(segment)
    assert (store.used_bytes, store.facts(), plan.path.exists()) == (0, [], False)
    eventually(lambda: bool(setting.ended()) and segment.fd < 0, "a worker closes it")
    assert setting.told() == []


@pytest.mark.parametrize(
    ("purpose", "kind"),
    [
        (Purpose.RANK, ["refused.quota"]),
        (Purpose.COPY, ["refused.quota"]),
        (Purpose.REPLICA, ["replica_refused"]),
        (Purpose.DRILL, []),
    ],
)
def test_what_finds_no_room_is_refused_at_once(setting: Setting, purpose: Purpose, kind: list[str]) -> None:
    refused = setting.make(setting.plan(purpose, slots=20))
    assert refused is not None
    assert refused.code == RefusalCode.QUOTA
    assert "22 MiB" in refused.message
    assert setting.store.used_bytes == 0
    assert setting.told() == kind
    assert not setting.ended()


def test_what_was_promised_to_ranks_is_not_for_replicas(setting: Setting) -> None:
    setting.store.promised = lambda: {READER.key: 15 * MIB}
    refused = setting.make(setting.plan(Purpose.REPLICA))
    assert refused is not None
    assert "15 MiB is promised to its own ranks" in refused.message
    assert setting.make(setting.plan(Purpose.COPY)) is None, "it is a part of the promise"


def test_a_worker_that_is_not_free_leaves_nothing_promised(setting: Setting) -> None:
    assert setting.make(setting.plan(Purpose.RANK)) is None
    used = setting.store.used_bytes
    refused = setting.make(setting.plan(Purpose.REPLICA))
    assert refused is not None
    assert refused.code == RefusalCode.IN_USE
    assert setting.store.used_bytes == used
    eventually(setting.ended, "the first one is built")


def test_what_cannot_be_built_is_cancelled_and_told(setting: Setting) -> None:
    plan = setting.plan(Purpose.COPY)
    plan = replace(plan, path=plan.path.parent / "no" / plan.path.name)
    assert setting.make(plan) is None
    eventually(setting.ended, "it fails")
    (refused,) = setting.refused
    assert refused.code == RefusalCode.SEGMENT_FS
    assert setting.store.used_bytes == 0
    assert setting.told() == ["refused.segment_fs"]
