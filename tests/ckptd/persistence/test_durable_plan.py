"""Checkpoints that store one of two experts each, by a keeper over a real folder: what is listed is what a
restore needs, wherever it was stored first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ckptd.memory.segment_file import Segment
from ckptd.persistence import keeper_wire as w
from ckptd.persistence.durable_plan import read_newest
from ckptd.storage.checkpoints.manifest import RankManifest
from ckptd.storage.checkpoints.reader import read_catalog, read_manifest, restore_snapshot
from ckptd.storage.checkpoints.verifier import verify_run
from ckptd.storage.image import ImageView
from ckptd.storage.stores.open_store import open_store
from tests.ckptd.persistence.slots import FRESH_BYTES, FROZEN_BYTES, WINDOW, descriptor, fill, segment_store
from tests.ckptd.persistence.test_keeper import Desk

SLOTS = 6
OPERATORS: list[list[Any]] = [
    ["e0", "expert", "l", None, ["l", 0], [["expert.0", None, None]]],
    ["e1", "expert", "l", None, ["l", 1], [["expert.1", None, None]]],
    ["rest", "dense", "l", None, None, [["frozen", None, None], ["fresh", None, None]]],
]


def client(*, policy: str = "partial", names: str = "") -> bytes:
    operators = [[f"{names}{op[0]}", *op[1:]] for op in OPERATORS]
    return msgspec.msgpack.encode({"policy": policy, "operators": operators})


def scalars(*, lost: float = 0.0, limit: float | None = None, experts: int = 1) -> bytes:
    durable = {"experts": experts, "of": 2, "limit": limit}
    return msgspec.msgpack.encode({"rng": [1], "experts": {"lost_iterations": lost, "durable": durable}})


class Rank:
    """A rank whose checkpoints a keeper stores."""

    def __init__(
        self, desk: Desk, folder: Path, rank: int = 0, world_size: int = 1, *, slots: int = SLOTS, **told: Any
    ) -> None:
        self.desk, self.slots = desk, slots
        made = descriptor(rank, world_size=world_size, partial=True, client=client(**told))
        self.segment: Segment = segment_store(folder).create(made, slots, 1 << 20)
        self.name = w.RankName("job", "run", rank)

    def store(
        self,
        end: int,
        says: bytes,
        *,
        epoch: int = 1,
        without: int = -1,
        damaged: int = -1,
        newest_first: bool = False,
    ) -> list[Any]:
        """Take the last window of snapshots before ``end``, and store them; ``without``: not this one."""
        taken = [
            fill(self.segment, i % self.slots, i, epoch=epoch, partial=True, scalars=says)
            for i in range(end - WINDOW + 1, end + 1)
        ]
        if damaged >= 0:
            header = self.segment.header(damaged % self.slots)
            assert header is not None
            self.segment.image(damaged % self.slots, header)[:8] = b"\xff" * 8
        self.taken = taken
        path = str(self.segment.path)
        places = [w.SlotPlace(each, path, each.iteration % self.slots) for each in taken]
        checkpoint = tuple((each, each.iteration % WINDOW) for each in taken)
        found = [
            self.desk.ask(
                w.StoreSlot,
                *(self.name, place.snapshot, path, place.index),
                *(tuple(places[number + 1 :]), checkpoint, places[-1], places[0]),
            )
            for number, place in sorted(enumerate(places), reverse=newest_first)
            if place.snapshot.iteration != without
        ]
        return found[::-1] if newest_first else found

    def commit(self) -> Any:
        return self.desk.commit(self.segment, *self.taken)

    def checkpoint(self, end: int, says: bytes | None = None, **changes: Any) -> list[int]:
        """Store and commit; returns how many bytes were uploaded of each snapshot."""
        done = self.store(end, scalars() if says is None else says, **changes)
        answer = self.commit()
        assert isinstance(answer, w.Answer), answer
        return [each.uploaded_bytes for each in done]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def desk(folder: Path) -> Desk:
    made = Desk(f"file://{folder}")
    made.open()
    return made


@pytest.fixture
def rank(desk: Desk, tmp_path: Path) -> Iterator[Rank]:
    made = Rank(desk, tmp_path / "memory")
    yield made
    made.segment.close()


def listed(folder: Path, end: int, rank: int = 0) -> list[tuple[int, int, set[str]]]:
    """Of each image of a checkpoint: iteration, the one before it, and the tensors that are read back."""
    store = open_store(f"file://{folder}")
    manifest = manifest_at(folder, end, rank)
    found = []
    for snapshot in manifest.snapshots:
        into = memoryview(bytearray(snapshot.image_len))
        restore_snapshot(store, snapshot, into)
        found.append(
            (snapshot.iteration, snapshot.previous, set(ImageView(into).names()) - {"ckptd.scalars"})
        )
    return found


def manifest_at(folder: Path, end: int, rank: int = 0) -> RankManifest:
    store = open_store(f"file://{folder}")
    (found,) = [c for c in read_catalog(store, "job", "run").checkpoints if c.id.end == end]
    return read_manifest(store, found.manifests[rank].key)


REST = {"frozen", "fresh"}


def test_each_checkpoint_stores_an_expert_and_lists_where_the_other_one_is(
    rank: Rank, desk: Desk, folder: Path
) -> None:
    assert rank.checkpoint(2)[0] > FRESH_BYTES  # the first one has to store both
    assert listed(folder, 2) == [(1, 0, {"expert.1"}), (2, 1, {*REST, "expert.0"})]

    older, newest = rank.checkpoint(5)
    assert FRESH_BYTES < older < FRESH_BYTES + 5_000
    assert FRESH_BYTES < newest < FRESH_BYTES + 20_000  # what is frozen is stored already
    assert listed(folder, 5) == [(1, 0, {"expert.1"}), (4, 1, {"expert.0"}), (5, 4, REST)]

    # The turn of the newest snapshot's own experts: nothing but it is stored.
    older, newest = rank.checkpoint(7)
    assert older == 0
    assert 2 * FRESH_BYTES < newest < 2 * FRESH_BYTES + 20_000
    assert listed(folder, 7) == [(4, 1, {"expert.0"}), (7, 4, {*REST, "expert.1"})]
    assert verify_run(open_store(f"file://{folder}"), "job", "run").ok
    assert [len(found.headers) for found in desk.find(0)] == [2, 3, 2]


def test_a_keeper_that_was_restarted_continues_from_what_is_in_storage(rank: Rank, folder: Path) -> None:
    rank.checkpoint(2)
    rank.desk = Desk(f"file://{folder}")
    rank.desk.open()
    rank.checkpoint(5)
    assert [iteration for iteration, *_ in listed(folder, 5)] == [1, 4, 5]


@pytest.mark.parametrize(
    "says",
    [
        scalars(limit=0.1),
        scalars(limit=0.9, lost=10.0),
        scalars(experts=2),
        msgspec.msgpack.encode({"experts": {"lost_iterations": 0.0}}),
        msgspec.msgpack.encode({"rng": 1}),
        b"\xc1",  # no msgpack
    ],
)
def test_all_experts_are_stored_where_less_would_exceed_the_limit_or_was_not_asked_for(
    rank: Rank, folder: Path, says: bytes
) -> None:
    rank.checkpoint(2)
    rank.checkpoint(5, says)
    assert [iteration for iteration, *_ in listed(folder, 5)] == [4, 5]


def test_within_the_limit_some_are_stored(rank: Rank, folder: Path) -> None:
    rank.checkpoint(2)
    rank.checkpoint(5, scalars(limit=0.5, lost=0.0))  # 1 and 4 of 5: 2.5 iterations are lost
    assert [iteration for iteration, *_ in listed(folder, 5)] == [1, 4, 5]


def test_all_experts_are_stored_where_the_operators_or_the_policy_were_others(
    desk: Desk, tmp_path: Path, folder: Path
) -> None:
    several: list[dict[str, Any]] = [{}, {"names": "other."}, {"policy": "sliding"}]
    for end, told in zip((2, 5, 8), several, strict=True):
        rank = Rank(desk, tmp_path / f"memory-{end}", **told)
        rank.checkpoint(end)
        assert [iteration for iteration, *_ in listed(folder, end)] == [end - 1, end]
        rank.segment.close()


def test_ranks_that_do_not_have_the_last_checkpoint_go_by_the_one_that_all_have(
    desk: Desk, tmp_path: Path, folder: Path
) -> None:
    first, second = (Rank(desk, tmp_path / f"memory{i}", i, 2) for i in range(2))
    desk.open(1)
    for each in (first, second):
        each.checkpoint(2)
    first.checkpoint(5)  # the other one has given it up
    for each in (first, second):
        each.checkpoint(7)
    assert sorted(found.end for found in desk.find(0, 1)) == [2, 2, 7, 7]
    for number in range(2):
        assert [iteration for iteration, *_ in listed(folder, 7, number)] == [1, 6, 7]
    # One that was late is the last one, too, although a further one was stored meanwhile.
    first.checkpoint(9)
    first.checkpoint(10)
    second.checkpoint(9)
    for each in (first, second):
        each.checkpoint(12)
    assert 12 in {found.end for found in desk.find(0, 1)}
    # And after a restart, too.
    first.checkpoint(14)
    for each in (first, second):
        each.desk = Desk(f"file://{folder}")
        for number in range(2):
            each.desk.open(number)
        each.checkpoint(16)
    assert second.desk.find(0)[0].end == 16
    assert all([i for i, *_ in listed(folder, 16, number)] < [15, 16] for number in range(2))
    for each in (first, second):
        each.segment.close()


def test_the_choice_does_not_depend_on_which_snapshot_is_stored_first(
    desk: Desk, tmp_path: Path, folder: Path
) -> None:
    """The daemon asks for two at a time, and the threads of a keeper take either one first."""
    ranks = [Rank(desk, tmp_path / f"memory{i}", i, 2) for i in range(2)]
    desk.open(1)
    for end in (2, 5, 7):
        for number, each in enumerate(ranks):
            each.checkpoint(end, newest_first=number == 1)
    assert {found.end for found in desk.find(0, 1)} == {2, 5, 7}
    for number in range(2):
        assert listed(folder, 5, number) == [(1, 0, {"expert.1"}), (4, 1, {"expert.0"}), (5, 4, REST)]
        assert listed(folder, 7, number) == [(4, 1, {"expert.0"}), (7, 4, {*REST, "expert.1"})]
    for each in ranks:
        each.segment.close()


def test_ranks_that_chose_differently_have_no_checkpoint_in_common(
    desk: Desk, tmp_path: Path, folder: Path
) -> None:
    """Replicas of an expert would be of different iterations. The next one counts again."""
    first, second = (Rank(desk, tmp_path / f"memory{i}", i, 2) for i in range(2))
    desk.open(1)
    for each in (first, second):
        each.checkpoint(2)
    first.checkpoint(5)
    second.checkpoint(5, scalars(experts=2))
    assert {found.end for found in desk.find(0, 1)} == {2}
    for each in (first, second):
        each.checkpoint(7)
    assert {found.end for found in desk.find(0, 1)} == {2, 7}
    for each in (first, second):
        each.segment.close()


def test_a_rank_whose_ring_is_too_small_to_go_on_from_old_copies_stores_all_and_so_do_the_others(
    desk: Desk, tmp_path: Path, folder: Path
) -> None:
    """Until a window of new snapshots is there, a ring has to keep them. They disagree once."""
    wide, narrow = (Rank(desk, tmp_path / f"memory{i}", i, 2, slots=SLOTS - i) for i in range(2))
    desk.open(1)
    store = open_store(f"file://{folder}")
    for end in range(2, 30, 3):
        for each in (wide, narrow):
            each.checkpoint(end)
        newest = read_catalog(store, "job", "run").committed[0].id.end
        assert newest == (2 if end == 5 else end)
    for each in (wide, narrow):
        each.segment.close()


@pytest.mark.parametrize("says", [scalars(), msgspec.msgpack.encode({"rng": 1})])
@pytest.mark.parametrize("newest_first", [False, True])
def test_a_damaged_older_snapshot_is_refused_as_such(rank: Rank, says: bytes, newest_first: bool) -> None:
    """It was an internal error of the keeper."""
    rank.checkpoint(2)
    older, newest = rank.store(5, says, damaged=4, newest_first=newest_first)
    assert (older.code, "iteration 4 is damaged in memory" in older.reason) == (w.FailureCode.LOST, True)
    assert newest.uploaded_bytes > 2 * FRESH_BYTES  # with its expert


def test_a_history_that_was_abandoned_is_not_referred_to(rank: Rank, folder: Path) -> None:
    """A recovery went back to iteration 3: what was stored of 4 and 5 belongs to no expert any more."""
    rank.checkpoint(2)
    rank.checkpoint(5)
    rank.desk.open(epoch=2, start=3)
    # A collector that does not know of it may be deleting checkpoint 2.
    rank.checkpoint(7, epoch=2)
    assert [iteration for iteration, *_ in listed(folder, 7)] == [6, 7]
    rank.desk.open(epoch=3, start=8)
    rank.checkpoint(9, epoch=3)
    found = [(each.iteration, each.epoch) for each in manifest_at(folder, 9).snapshots]
    assert found == [(6, 2), (9, 3)]


def test_what_a_manifest_refers_to_is_never_deleted_and_nothing_else_stays(rank: Rank, folder: Path) -> None:
    """Retention keeps two checkpoints; all files are older than any time that protects them."""
    rank.desk = Desk(f"file://{folder}", settle_s=0.0)
    rank.desk.open()
    store = open_store(f"file://{folder}")
    for number, end in enumerate(range(2, 24, 3)):
        rank.store(end, scalars())
        for path in (p for p in folder.rglob("*") if p.is_file()):
            old = time.time() - 3 * 86400 + number
            os.utime(path, (old, old))
        assert isinstance(rank.commit(), w.Answer)
        assert rank.desk.wait_settled().complete
        rank.desk.keeper._aside.submit(lambda: None).result(30)
        catalog = read_catalog(store, "job", "run")
        assert len(catalog.committed) <= 2
        assert verify_run(store, "job", "run").ok
        needed = {key for c in catalog.checkpoints for key in manifest_at(folder, c.id.end).object_keys}
        there = {each.info.key for objects in catalog.objects.values() for each in objects}
        assert needed <= there
    # What the last manifest made superfluous goes with the next collection.
    rank.desk.keeper._run("job", "run").retention.collect()
    catalog = read_catalog(store, "job", "run")
    kept = [manifest_at(folder, c.id.end) for c in catalog.committed]
    needed = {key for manifest in kept for key in manifest.object_keys}
    left = {o.info.key for objects in catalog.objects.values() for o in objects if o.name.iteration < 20}
    assert {key for key in needed if key in left} == left
    assert len({manifest.start for manifest in kept}) == 2


def test_what_is_not_stored_does_not_count_as_spared(rank: Rank) -> None:
    rank.checkpoint(2)
    rank.checkpoint(5)
    older, newest = rank.store(7, scalars())
    assert (older.size_bytes, older.uploaded_bytes) == (0, 0)
    assert newest.size_bytes > 2 * FRESH_BYTES


def test_what_was_stored_for_one_checkpoint_is_asked_for_again(rank: Rank) -> None:
    """The newest snapshot of the last checkpoint has no experts in storage, and now it is their turn."""
    rank.checkpoint(2)
    stored = rank.store(5, scalars())
    assert [each.for_later for each in stored] == [True, False]
    rank.commit()
    again = rank.store(6, scalars())
    assert [each.uploaded_bytes > FRESH_BYTES for each in again] == [True, True]
    assert isinstance(rank.commit(), w.Answer)


def test_a_newest_snapshot_that_was_stored_whole_is_stored_bare_all_the_same(
    rank: Rank, folder: Path
) -> None:
    """Other ranks may have replicas of its experts, and have stored it bare."""
    rank.checkpoint(2)
    whole = fill(rank.segment, 5, 5, partial=True, scalars=scalars())
    assert rank.desk.put(rank.segment, 5, whole).for_later
    assert rank.checkpoint(5)[1] > 0
    assert listed(folder, 5)[-1] == (5, 4, REST)


def test_a_newest_snapshot_that_is_damaged_says_nothing(rank: Rank) -> None:
    rank.store(2, scalars())
    header = rank.segment.header(2)
    assert header is not None
    image = rank.segment.image(2, header)
    says = read_newest(image, header, rank.segment.descriptor, SLOTS)
    assert says is not None
    assert (says.turns.experts, says.window, says.experts) == (1, WINDOW, 0b011)
    assert says.parameters == {"expert.0", "expert.1"}
    image[100] ^= 1
    assert read_newest(image, header, rank.segment.descriptor, SLOTS) is None
    assert FROZEN_BYTES > FRESH_BYTES
