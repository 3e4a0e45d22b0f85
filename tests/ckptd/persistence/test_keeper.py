"""The store keeper in this process, over a real folder: what it stores, finds, reads back, refuses."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import safe_open

from ckptd.core.slots.segment_format import encode_descriptor, slot_lock_byte, unpack_slot_header
from ckptd.core.slots.slots import SnapshotKey
from ckptd.memory import locks
from ckptd.memory.segment_file import Segment
from ckptd.persistence import keeper, rank_store
from ckptd.persistence import keeper_wire as w
from ckptd.persistence.keeper import Keeper
from ckptd.storage.checkpoints.manifest import RankManifest
from ckptd.storage.checkpoints.reader import read_catalog, read_manifest, restore_snapshot
from ckptd.storage.checkpoints.signing import Signers, create_signer
from ckptd.storage.checkpoints.verifier import verify_run
from ckptd.storage.image import ImageView, verify
from ckptd.storage.stores.local_store import LocalStore
from ckptd.storage.stores.objects import ObjectInfo, StoreRefused
from ckptd.storage.stores.open_store import open_store
from ckptd.storage.strong_digest import strong_digest
from tests.ckptd.persistence.slots import (
    FRESH_BYTES,
    FROZEN_BYTES,
    WINDOW,
    descriptor,
    fill,
    segment_store,
)

RANK = w.RankName("job", "run", 0)


class Desk:
    """Asks a keeper, and waits for what it says."""

    def __init__(
        self,
        url: str,
        *,
        settle_s: float = 600.0,
        wall_ns: Callable[[], int] = time.time_ns,
        **settings: Any,
    ) -> None:
        given = {
            "options": {},
            "backend": "auto",
            "threads": 2,
            "bytes_per_s": 0.0,
            "deadline_s": 20.0,
            "read_back": False,
            "retain": w.Retain(2, 0, 0.0),
        }
        self.said: queue.Queue[Any] = queue.Queue()
        configure = w.Configure(url, **{**given, **settings})
        self.keeper = Keeper(configure, self.said.put, settle_s=settle_s, wall_ns=wall_ns)
        self.told: list[w.KeeperEvent] = []
        self.settled: list[w.Settled] = []
        self.fenced: list[w.RankFenced] = []
        self._ids = 0

    def ask(self, kind: Any, *fields: Any) -> Any:
        self._ids += 1
        self.keeper.handle(kind(self._ids, *fields))
        while True:
            found = self.said.get(timeout=30)
            if not self._heard(found):
                assert found.id == self._ids
                return found

    def _heard(self, found: Any) -> bool:
        """Whether it was told without a question."""
        if isinstance(found, w.KeeperEvent):
            self.told.append(found)
        elif isinstance(found, w.Settled):
            self.settled.append(found)
        elif isinstance(found, w.RankFenced):
            self.fenced.append(found)
        else:
            return False
        return True

    def hear_until(self, done: Callable[[], object]) -> None:
        while not done():
            assert self._heard(self.said.get(timeout=30))

    def open(self, rank: int = 0, *, epoch: int = 1, start: int = -1) -> Any:
        return self.ask(w.OpenRank, w.RankName("job", "run", rank), epoch, start)

    def put(self, segment: Segment, index: int, snapshot: SnapshotKey, *newer: SnapshotKey) -> Any:
        name, path = w.RankName("job", "run", segment.descriptor.rank), str(segment.path)
        places = tuple(w.SlotPlace(each, path, each.iteration % 6) for each in newer)
        return self.ask(w.StoreSlot, name, snapshot, path, index, places)

    def commit(self, segment: Segment, *snapshots: SnapshotKey) -> Any:
        told = segment.descriptor
        return self.ask(
            w.CommitRank,
            w.RankName("job", "run", told.rank),
            told.world_size,
            snapshots[-1].iteration,
            1,
            list(snapshots),
            encode_descriptor(told),
            segment.geometry.slot_bytes,
            WINDOW,
            segment.geometry.num_slots,
        )

    def wait_settled(self) -> w.Settled:
        self.hear_until(lambda: self.settled)
        return self.settled.pop()

    def look(self, *ranks: int) -> w.Found:
        found = self.ask(w.FindStored, "job", "run", list(ranks))
        assert isinstance(found, w.Found), found
        return found

    def find(self, *ranks: int) -> list[w.CommittedCheckpoint]:
        return self.look(*ranks).checkpoints


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def desk(folder: Path) -> Desk:
    return Desk(f"file://{folder}")


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[Segment]:
    made = segment_store(tmp_path / "shm").create(descriptor(), 6, 1 << 20)
    yield made
    made.close()


def checkpoint(desk: Desk, segment: Segment, end: int, **content: Any) -> list[SnapshotKey]:
    """The suffix that ends there, stored and committed by one rank."""
    snapshots = [fill(segment, i % 6, i, **content) for i in (end - 1, end)]
    for snapshot in snapshots:
        assert isinstance(desk.put(segment, snapshot.iteration % 6, snapshot), w.StoredSlot)
    assert isinstance(desk.commit(segment, *snapshots), w.Answer)
    return snapshots


def test_objects_of_a_history_without_a_checkpoint_show_its_epoch(desk: Desk, segment: Segment) -> None:
    """All memory was lost before the first checkpoint. A history that began anew below that epoch left the
    objects in storage for ever: they might have been those of a later one.
    """
    desk.open()
    assert desk.look(0).epoch == -1
    lost = fill(segment, 1, 1, epoch=7)
    assert isinstance(desk.put(segment, 1, lost), w.StoredSlot)
    assert desk.look(0).epoch == 7
    assert desk.find(0) == []
    checkpoint(desk, segment, 4)
    assert desk.look(0).epoch == 7


def test_what_is_stored_is_found_and_read_back_bit_for_bit(
    desk: Desk, segment: Segment, tmp_path: Path
) -> None:
    assert desk.open().committed == -1
    checkpoint(desk, segment, 4)
    assert desk.wait_settled() == w.Settled(RANK, 4, 1, True, "")
    (found,) = desk.find(0)
    assert (found.end, found.window, found.descriptor) == (
        4,
        WINDOW,
        encode_descriptor(segment.descriptor),
    )
    target = segment_store(tmp_path / "other").create(descriptor(), 6, 1 << 20)
    for index, (raw, length) in enumerate(zip(found.headers, found.lengths, strict=True)):
        header = unpack_slot_header(raw)
        assert header is not None
        at = target.geometry.slot_offset(index)
        for begin in range(0, length, 150_000):
            size = min(150_000, length - begin)
            reply = desk.ask(w.ReadRange, found.name, index, begin, size, str(target.path), at + begin)
            assert isinstance(reply, w.Answer), reply
        image = target.image(index, header)
        verify(image, header.header_digest)
        assert image == segment.image((3 + index) % 6, header)
    target.close()


def test_stock_tools_open_what_is_stored(desk: Desk, segment: Segment, folder: Path) -> None:
    desk.open()
    checkpoint(desk, segment, 4)
    objects = sorted(folder.rglob("*.safetensors"))
    assert len(objects) == 2
    with safe_open(objects[0], framework="np") as opened:
        assert set(opened.keys()) == {"frozen", "fresh"}


def test_what_did_not_change_is_not_uploaded_again(desk: Desk, segment: Segment) -> None:
    desk.open()
    first, second = (fill(segment, i % 6, i) for i in (3, 4))
    whole = desk.put(segment, 3, first)
    part = desk.put(segment, 4, second)
    assert whole.uploaded_bytes == whole.size_bytes
    assert FRESH_BYTES < part.uploaded_bytes < FRESH_BYTES + 20_000
    assert isinstance(desk.commit(segment, first, second), w.Answer)
    desk.wait_settled()
    third = fill(segment, 5, 5)
    assert desk.put(segment, 5, third).uploaded_bytes < FRESH_BYTES + 20_000
    assert isinstance(desk.commit(segment, second, third), w.Answer)
    desk.wait_settled()
    for found in desk.find(0):
        manifest = read_manifest(open_store(desk.keeper._configure.url), found.name)
        assert manifest.end == found.end


def test_a_keeper_that_was_restarted_spares_what_its_last_manifest_refers_to(
    desk: Desk, segment: Segment, folder: Path
) -> None:
    desk.open()
    checkpoint(desk, segment, 4)
    again = Desk(f"file://{folder}")
    assert again.open().committed == 4
    fifth = fill(segment, 5, 5)
    assert again.put(segment, 5, fifth).uploaded_bytes < FRESH_BYTES + 20_000


def test_an_upload_that_was_not_committed_is_not_repeated(desk: Desk, segment: Segment, folder: Path) -> None:
    desk.open()
    snapshot = fill(segment, 3, 3)
    desk.put(segment, 3, snapshot)
    again = Desk(f"file://{folder}")
    again.open()
    assert again.put(segment, 3, snapshot).uploaded_bytes == 0


def test_replicas_of_the_same_state_on_one_node_are_uploaded_once(desk: Desk, tmp_path: Path) -> None:
    store = segment_store(tmp_path / "two")
    ranks = [store.create(descriptor(rank, world_size=2), 6, 1 << 20) for rank in (0, 1)]
    for rank in (0, 1):
        desk.open(rank)
    uploaded = []
    for iteration in (3, 4):
        for segment in ranks:
            snapshot = fill(segment, iteration, iteration)
            uploaded.append(desk.put(segment, iteration, snapshot).uploaded_bytes)
    assert uploaded[1] < 20_000
    assert uploaded[3] < 20_000
    ids = [SnapshotKey(0, i, 1, i + 1) for i in (3, 4)]
    desk.commit(ranks[0], *ids)
    assert desk.find(0, 1) == []  # one of two ranks is not a checkpoint
    desk.commit(ranks[1], *ids)
    assert [c.rank for c in desk.find(0, 1)] == [0, 1]
    for segment in ranks:
        segment.close()


@pytest.fixture
def partial(tmp_path: Path) -> Iterator[Segment]:
    """With partial snapshots of two experts and the rest."""
    made = segment_store(tmp_path / "partial").create(descriptor(partial=True), 6, 1 << 20)
    yield made
    made.close()


def manifest_at(desk: Desk, end: int) -> RankManifest:
    (found,) = [found for found in desk.find(0) if found.end == end]
    return read_manifest(open_store(desk.keeper._configure.url), found.name)


def test_of_an_older_snapshot_only_what_no_newer_one_has_is_stored(
    desk: Desk, partial: Segment, folder: Path
) -> None:
    """The manifest tells of an image with less, which is read back and verified as any other."""
    desk.open()
    older, newer = (fill(partial, i % 6, i, partial=True) for i in (3, 4))
    assert FRESH_BYTES < desk.put(partial, 3, older, newer).size_bytes < FRESH_BYTES + 5_000
    assert desk.put(partial, 4, newer).size_bytes > FROZEN_BYTES + 2 * FRESH_BYTES
    assert isinstance(desk.commit(partial, older, newer), w.Answer)
    manifest = manifest_at(desk, 4)
    assert [snapshot.anchors for snapshot in manifest.snapshots] == [0b010, 0b101]
    store, header = open_store(f"file://{folder}"), partial.header(3)
    assert verify_run(store, "job", "run").ok
    assert header is not None
    into = memoryview(bytearray(manifest.snapshots[0].image_len))
    restore_snapshot(store, manifest.snapshots[0], into)
    view, was = ImageView(into), ImageView(partial.image(3, header))
    assert view.names() == ("expert.1",)
    assert view.data("expert.1") == was.data("expert.1")


def test_checkpoints_that_overlap_share_what_is_stored(desk: Desk, partial: Segment, folder: Path) -> None:
    """The newest snapshot of one is an older one of the next, and is not stored again."""
    desk.open()
    first, second, third = (fill(partial, i % 6, i, partial=True) for i in (3, 4, 5))
    for snapshot, newer in ((first, [second]), (second, [])):
        desk.put(partial, snapshot.iteration % 6, snapshot, *newer)
    desk.commit(partial, first, second)
    assert desk.put(partial, 4, second, third).uploaded_bytes == 0
    part = desk.put(partial, 5, third)
    assert 2 * FRESH_BYTES < part.uploaded_bytes < 2 * FRESH_BYTES + 20_000
    assert isinstance(desk.commit(partial, second, third), w.Answer)
    assert manifest_at(desk, 5).snapshots[0] == manifest_at(desk, 4).snapshots[1]
    assert verify_run(open_store(f"file://{folder}"), "job", "run").ok


def test_a_snapshot_is_stored_again_if_a_new_history_needs_more_of_it(desk: Desk, partial: Segment) -> None:
    """It was reduced for a checkpoint of a history that was abandoned, whose newest snapshot had the rest."""
    desk.open()
    older, newer = (fill(partial, i % 6, i, partial=True) for i in (2, 3))
    desk.put(partial, 2, older, newer)
    assert desk.put(partial, 2, older, newer).uploaded_bytes == 0
    whole = desk.put(partial, 2, older)
    assert whole.size_bytes > FROZEN_BYTES + 2 * FRESH_BYTES
    assert desk.put(partial, 2, older, newer).size_bytes == whole.size_bytes


def test_what_cannot_be_seen_in_a_newer_snapshot_is_stored_with_the_older_one(
    desk: Desk, partial: Segment
) -> None:
    desk.open()
    older, newer = (fill(partial, i % 6, i, partial=True) for i in (3, 4))
    header = partial.header(4)
    assert header is not None
    partial.image(4, header)[200] ^= 1  # in its header
    assert desk.put(partial, 3, older, newer).size_bytes > FROZEN_BYTES
    fill(partial, 4, 10, partial=True)
    assert desk.put(partial, 3, older, newer).size_bytes > FROZEN_BYTES


def test_a_slot_that_is_not_what_was_asked_for_is_lost(desk: Desk, segment: Segment) -> None:
    desk.open()
    snapshot = fill(segment, 3, 3)
    fill(segment, 3, 9)
    assert desk.put(segment, 3, snapshot).code == w.FailureCode.LOST
    other = fill(segment, 4, 4)
    with locks.lock_file(segment.path, slot_lock_byte(4), exclusive=True) as taken:
        assert taken
        assert desk.put(segment, 4, other).code == w.FailureCode.LOST
    damaged = fill(segment, 5, 5)
    header = segment.header(5)
    assert header is not None
    segment.image(5, header)[200_000] ^= 1
    reply = desk.put(segment, 5, damaged)
    assert (reply.code, "damaged in memory" in reply.reason) == (w.FailureCode.LOST, True)
    segment.path.unlink()
    assert desk.put(segment, 4, other).code == w.FailureCode.LOST


def test_a_commit_of_what_was_not_stored_is_unknown(desk: Desk, segment: Segment) -> None:
    desk.open()
    snapshot = fill(segment, 3, 3)
    assert desk.commit(segment, snapshot).code == w.FailureCode.UNKNOWN


def test_what_is_older_than_a_committed_checkpoint_is_not_committed(desk: Desk, segment: Segment) -> None:
    desk.open()
    early = [fill(segment, i, i) for i in (1, 2)]
    for snapshot in early:
        desk.put(segment, snapshot.iteration, snapshot)
    checkpoint(desk, segment, 4)
    reply = desk.commit(segment, *early)
    assert (reply.code, "is committed" in reply.reason) == (w.FailureCode.STORE, True)


def test_what_relied_on_a_manifest_that_may_be_deleted_is_stored_anew(
    desk: Desk, segment: Segment, folder: Path
) -> None:
    """Another life of this rank has committed a newer checkpoint meanwhile, which replaces the one
    that was relied on.
    """
    desk.open()
    checkpoint(desk, segment, 2)
    snapshots = [fill(segment, i, i) for i in (3, 4)]
    for snapshot in snapshots:
        assert desk.put(segment, snapshot.iteration, snapshot).uploaded_bytes < FRESH_BYTES + 20_000
    other = Desk(f"file://{folder}")
    other.open()
    pair = [SnapshotKey(0, 2, 1, 3), snapshots[0]]
    for snapshot in pair:
        other.put(segment, snapshot.iteration, snapshot)
    assert isinstance(other.commit(segment, *pair), w.Answer)
    reply = desk.commit(segment, *snapshots)
    assert (reply.code, "may be deleted" in reply.reason) == (w.FailureCode.UNKNOWN, True)
    assert desk.put(segment, 3, snapshots[0]).uploaded_bytes > FRESH_BYTES + 100_000
    desk.put(segment, 4, snapshots[1])
    assert isinstance(desk.commit(segment, *snapshots), w.Answer)


def test_what_refers_to_an_object_that_no_manifest_names_is_as_old_as_that_object(
    desk: Desk, segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else snapshots that refer to one another could keep garbage in use for longer than its grace time."""
    desk.open()
    forget_s, begun_s = rank_store._FORGET_S, time.monotonic()
    clock = SimpleNamespace(monotonic=lambda: begun_s, time_ns=time.time_ns)
    monkeypatch.setattr(rank_store, "time", clock)
    first, second = (fill(segment, i, i) for i in (3, 4))
    assert isinstance(desk.put(segment, 3, first), w.StoredSlot)
    clock.monotonic = lambda: begun_s + 0.4 * forget_s
    assert desk.put(segment, 4, second).uploaded_bytes < FRESH_BYTES + 20_000
    clock.monotonic = lambda: begun_s + 1.2 * forget_s
    assert desk.commit(segment, second).code == w.FailureCode.UNKNOWN


def test_a_job_that_does_not_know_of_a_later_history_is_fenced(
    desk: Desk, segment: Segment, folder: Path
) -> None:
    desk.open(epoch=7)
    checkpoint(desk, segment, 4, epoch=7)
    late = Desk(f"file://{folder}")
    reply = late.open(epoch=3)
    assert reply.code == w.FailureCode.FENCED
    assert "another job writes under these names" in reply.reason


@pytest.fixture
def wide(tmp_path: Path) -> Iterator[Segment]:
    """Rank 0 of two."""
    made = segment_store(tmp_path / "wide").create(descriptor(world_size=2), 6, 1 << 20)
    yield made
    made.close()


def test_an_epoch_is_told_of_which_nothing_is_complete(desk: Desk, wide: Segment, folder: Path) -> None:
    """All memory was lost before the first checkpoint of an epoch was complete. Nobody knew of that epoch, the next
    one was lower half of the time, and then nothing was made durable any more.
    """
    desk.open(epoch=7)
    checkpoint(desk, wide, 4, epoch=7)
    found = Desk(f"file://{folder}").ask(w.FindStored, "job", "run", [0])
    assert (found.checkpoints, found.epoch) == ([], 7)


def test_what_was_left_for_a_history_of_which_nothing_is_complete_is_offered_if_there_is_nothing_else(
    desk: Desk, segment: Segment, wide: Segment, folder: Path
) -> None:
    """All memory was lost before the first checkpoint of an epoch was complete; the run began anew."""
    desk.open(epoch=3)
    checkpoint(desk, segment, 2, epoch=3)
    checkpoint(desk, segment, 4, epoch=3)
    desk.open(epoch=7)  # from the beginning
    checkpoint(desk, wide, 3, epoch=7)
    late = Desk(f"file://{folder}")
    found = late.ask(w.FindStored, "job", "run", [0])
    assert ([(c.end, c.epoch) for c in found.checkpoints], found.epoch) == ([(4, 3)], 7)
    assert "abandoned_offered" in [told.kind for told in late.told]


def test_what_the_nodes_know_decides_what_is_offered_and_not_what_this_one_knows(
    desk: Desk, segment: Segment, folder: Path
) -> None:
    """A run had gone back, and a node was replaced before anything of the new epoch was stored. The new node offered
    the newest three, the others the newest three that count; none was among both, and the run could not go on.
    """
    desk.open(epoch=3)
    for end in (2, 4, 6, 8, 10):
        checkpoint(desk, segment, end, epoch=3)
    desk.open(epoch=7, start=4)
    for each in (desk, Desk(f"file://{folder}")):
        assert [c.end for c in each.find(0)] == [10, 8, 6]
        found = each.ask(w.FindStored, "job", "run", [0], [], {3: -1, 7: 4})
        assert [c.end for c in found.checkpoints] == [4, 2]


def test_a_later_history_that_appears_after_opening_fences_the_commit(
    desk: Desk, segment: Segment, folder: Path
) -> None:
    """It was answered like a store that refuses: the rank went on to upload, every few minutes,
    until its end.
    """
    desk.open(epoch=3)
    late = [fill(segment, i, i, epoch=3) for i in (3, 4)]
    for snapshot in late:
        desk.put(segment, snapshot.iteration, snapshot)
    other = Desk(f"file://{folder}")
    other.open(epoch=7)
    checkpoint(other, segment, 2, epoch=7)
    reply = desk.commit(segment, *late)
    assert reply.code == w.FailureCode.FENCED
    assert "another job writes under these names" in reply.reason


def test_a_later_history_that_appears_after_the_manifest_fences_the_rank(
    folder: Path, tmp_path: Path
) -> None:
    """The event log told of it, and the rank went on."""
    store = segment_store(tmp_path / "shm")
    segment = store.create(descriptor(world_size=2), 6, 1 << 20)
    desk, other = Desk(f"file://{folder}"), Desk(f"file://{folder}")
    desk.open(epoch=3)
    checkpoint(desk, segment, 4, epoch=3)  # the other rank's manifest is looked for
    other.open(epoch=7)
    checkpoint(other, segment, 4, epoch=7)
    desk.hear_until(lambda: desk.fenced)
    (told,) = desk.fenced
    assert (told.rank, told.epoch) == (RANK, 7)
    assert "another job writes under these names" in told.reason
    segment.close()


@pytest.mark.parametrize("failures", [1, 30])
def test_a_checkpoint_is_told_of_although_the_store_failed_when_it_was_looked_for(
    desk: Desk, segment: Segment, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """It was durable, and nobody ever learned of it: neither `ckptctl status`, nor the next start."""
    monkeypatch.setattr(keeper, "_LOOKS_S", (0.01,) * 9)
    list_of, left = LocalStore._list, [failures]

    def failing(store: LocalStore, prefix: str) -> Iterator[ObjectInfo]:
        if committed and left[0]:
            left[0] -= 1
            raise StoreRefused(prefix, "forbidden for a moment")
        return list_of(store, prefix)

    committed: list[bool] = []
    monkeypatch.setattr(LocalStore, "_list", failing)
    desk.open()
    stored = [fill(segment, iteration, iteration) for iteration in (1, 2)]
    for index, snapshot in enumerate(stored, 1):
        desk.put(segment, index, snapshot)
    settle = desk.keeper._settle

    def settled(*args: Any) -> None:
        committed.append(True)
        settle(*args)

    monkeypatch.setattr(desk.keeper, "_settle", settled)
    desk.commit(segment, *stored)
    assert desk.wait_settled().complete
    assert left == [0]
    assert any(event.kind == "store_trouble" for event in desk.told)


def test_an_epoch_that_another_rank_of_the_node_has_joined_already_fences_nobody(
    desk: Desk, segment: Segment, folder: Path
) -> None:
    desk.open(epoch=3)
    mine = [fill(segment, i, i, epoch=3) for i in (3, 4)]
    for snapshot in mine:
        desk.put(segment, snapshot.iteration, snapshot)
    other = Desk(f"file://{folder}")
    other.open(epoch=7)
    checkpoint(other, segment, 2, epoch=7)
    desk.open(1, epoch=7)
    reply = desk.commit(segment, *mine)
    assert (reply.code, "a later history began" in reply.reason) == (w.FailureCode.STORE, True)


def test_a_damaged_checkpoint_is_offered_no_more_and_the_older_one_is(
    desk: Desk, segment: Segment, folder: Path
) -> None:
    desk.open()
    checkpoint(desk, segment, 2)
    checkpoint(desk, segment, 4)
    newest, older = desk.find(0)
    assert (newest.end, older.end) == (4, 2)
    desk.keeper.handle(w.DoubtStored(newest.name))
    assert [c.end for c in desk.find(0)] == [2]
    assert any(t.kind == "checkpoint_damaged" for t in desk.told)
    path = folder / older.name
    path.write_bytes(path.read_bytes()[:-9])
    assert [c.end for c in Desk(f"file://{folder}").find(0)] == [4]


def test_retention_leaves_what_it_shall_and_no_orphans(segment: Segment, folder: Path) -> None:
    desk = Desk(f"file://{folder}", settle_s=0.0)
    desk.open()
    for end in (2, 4, 6, 8):
        checkpoint(desk, segment, end)
        assert desk.wait_settled().complete
    desk.keeper._aside.submit(lambda: None).result(30)  # after what followed the last manifest
    catalog = read_catalog(open_store(f"file://{folder}"), "job", "run")
    assert [c.id.end for c in catalog.committed] == [8, 6]
    assert [c.end for c in desk.find(0)] == [8, 6]


def test_what_was_stored_is_read_back_where_that_is_wanted(segment: Segment, folder: Path) -> None:
    desk = Desk(f"file://{folder}", read_back=True)
    desk.open()
    assert isinstance(desk.put(segment, 3, fill(segment, 3, 3)), w.StoredSlot)


def test_only_what_a_trusted_signer_signed_is_believed(
    tmp_path: Path, segment: Segment, folder: Path
) -> None:
    """Whoever can write to the store could put other bytes there, with xxh3 digests that fit, and a
    job resumed with them.
    """
    keys = tmp_path / "keys"
    create_signer(keys)
    signing = Desk(f"file://{folder}", sign_with=str(keys), signers=str(keys))
    signing.open()
    checkpoint(signing, segment, 4)
    (found,) = signing.find(0)
    good = read_manifest(open_store(f"file://{folder}"), found.name)
    assert Signers.load(keys).objection(good.signer, good.signature, good.signed_bytes) == ""

    forged = replace(
        good, snapshots=(replace(good.snapshots[0], header_digest=bytes(16)), *good.snapshots[1:])
    )
    (folder / found.name).write_bytes(forged.to_bytes())
    assert Desk(f"file://{folder}").find(0)[0].headers != found.headers, "without the setting it counts"
    strict = Desk(f"file://{folder}", signers=str(keys))
    strict.ask(w.FindStored, "job", "run", [0])
    assert any("bytes were changed" in told.message for told in strict.told)

    (folder / found.name).write_bytes(replace(good, signer="", signature=b"").to_bytes())
    strict = Desk(f"file://{folder}", signers=str(keys))
    strict.ask(w.FindStored, "job", "run", [0])
    assert any("it is not signed" in told.message for told in strict.told)


def test_the_digest_that_was_kept_beside_the_slot_is_not_made_again(segment: Segment, folder: Path) -> None:
    """It was made when the snapshot was replicated. An image that does not have it (because
    somebody changed it in memory since) is no good checkpoint.
    """
    desk = Desk(f"file://{folder}")
    desk.open()
    kept = "blake3:" + 64 * "a"
    snapshots = [fill(segment, index, index) for index in (3, 4)]
    header = segment.header(4)
    assert header is not None
    segment.keep_digest(4, header, kept)
    for index, snapshot in zip((3, 4), snapshots, strict=True):
        assert isinstance(desk.put(segment, index, snapshot), w.StoredSlot)
    desk.commit(segment, *snapshots)
    manifest = read_manifest(open_store(f"file://{folder}"), desk.find(0)[0].name)
    made = segment.header(3)
    assert made is not None
    assert [s.image_digest for s in manifest.snapshots] == [
        strong_digest(segment.image(3, made)),
        kept,
    ]
    assert desk.find(0)[0].digests == [s.image_digest for s in manifest.snapshots]
