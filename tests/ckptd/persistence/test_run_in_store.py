"""One listing for all ranks of a node: how often the store is asked, and that nobody relies on what
a listing is too old to show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptd.core.slots.segment_format import encode_descriptor
from ckptd.core.slots.slots import SnapshotKey
from ckptd.memory.segment_file import Segment
from ckptd.persistence import keeper, run_in_store
from ckptd.persistence import keeper_wire as w
from ckptd.persistence.run_in_store import SharedLook
from ckptd.storage.checkpoints.catalog import Views, see
from ckptd.storage.stores.local_store import LocalStore
from ckptd.storage.stores.objects import ObjectInfo, ObjectStore, Unavailable
from ckptd.storage.stores.store_base import StoreOptions
from tests.ckptd.persistence.slots import WINDOW, descriptor, fill, segment_store
from tests.ckptd.persistence.test_keeper import Desk

RANKS = 8


class Counting(LocalStore):
    """A folder that remembers what of it was listed; something may happen just before a put."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), StoreOptions())
        self.listed: list[str] = []
        self.before_put: dict[str, Callable[[], None]] = {}  # by a part of the key; once

    def put(self, key: str, parts: Sequence[memoryview], *, if_absent: bool = False) -> ObjectInfo:
        for part in [part for part in self.before_put if part in key]:
            self.before_put.pop(part)()
        return super().put(key, parts, if_absent=if_absent)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self.listed.append(prefix)
        return super().list(prefix)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counting:
    """What every keeper of this test opens."""
    made = Counting(tmp_path / "store")

    def opened(*_: object) -> ObjectStore:
        return made

    monkeypatch.setattr(keeper, "open_store", opened)
    return made


@pytest.fixture
def desk(store: Counting) -> Desk:
    """A keeper of eight ranks."""
    made = Desk("file:///counted", settle_s=0.0)
    for rank in range(RANKS):
        made.open(rank)
    return made


@pytest.fixture
def segments(tmp_path: Path) -> Iterator[list[Segment]]:
    folder = segment_store(tmp_path / "shm")
    made = [folder.create(descriptor(r, world_size=RANKS), 6, 1 << 20) for r in range(RANKS)]
    yield made
    for segment in made:
        segment.close()


def put(desk: Desk, segment: Segment, end: int) -> list[SnapshotKey]:
    """The suffix of one rank that ends there."""
    snapshots = [fill(segment, i % 6, i) for i in (end - 1, end)]
    for snapshot in snapshots:
        assert isinstance(desk.put(segment, snapshot.iteration % 6, snapshot), w.StoredSlot)
    return snapshots


def wait_settled(desk: Desk, number: int) -> None:
    """Until so many ranks were told that all are there, and what is replaced is gone."""
    for _ in range(number):
        assert desk.wait_settled().complete
    desk.keeper._aside.submit(lambda: None).result(30)


def test_a_checkpoint_of_eight_ranks_takes_three_listings(
    desk: Desk, segments: list[Segment], store: Counting
) -> None:
    """Each rank listed the run before its manifest and the iteration after it, and rank 0 the run
    twice more: 18, or more where ranks looked in vain for the manifests of those after them.
    """
    for end in (2, 4, 6):
        snapshots = [put(desk, segment, end) for segment in segments]
        store.listed.clear()
        for segment, pair in zip(segments, snapshots, strict=True):
            assert isinstance(desk.commit(segment, *pair), w.Answer)
        wait_settled(desk, RANKS)
        assert store.listed == ["job/run/", f"job/run/{end:012d}/", "job/run/"]
    assert [found.end for found in desk.find(0)] == [6, 4]


def test_a_rank_that_is_late_is_not_refused_by_a_listing_older_than_what_it_relies_on(
    desk: Desk, segments: list[Segment], store: Counting
) -> None:
    """While rank 7 writes its manifest of checkpoint 2, the others list the run for checkpoint 4.
    What rank 7 refers to in its 4 is named by that very manifest, which their listing does not
    show: to rank 7 it said that all of that may be deleted.
    """
    *early, late = segments
    twos = {segment: put(desk, segment, 2) for segment in (*early, late)}
    for segment in early:
        assert isinstance(desk.commit(segment, *twos[segment]), w.Answer)
    fours = {segment: put(desk, segment, 4) for segment in early}
    run = desk.keeper._runs["job", "run"]

    def others_commit() -> None:
        for rank, segment in enumerate(early):
            found = run.rank(rank)
            assert found is not None
            found.commit(commit_message(segment, fours[segment]))

    store.before_put["/000000000002/commit"] = others_commit
    assert isinstance(desk.commit(late, *twos[late]), w.Answer)
    four = put(desk, late, 4)
    store.listed.clear()
    assert isinstance(desk.commit(late, *four), w.Answer)
    assert store.listed.count("job/run/") == 1, "the others' listing was not enough"
    assert [found.end for found in desk.find(7)] == [4, 2]


def commit_message(segment: Segment, snapshots: list[SnapshotKey]) -> w.CommitRank:
    told = segment.descriptor
    return w.CommitRank(
        id=0,
        rank=w.RankName("job", "run", told.rank),
        world_size=RANKS,
        end=snapshots[-1].iteration,
        stride=1,
        snapshots=snapshots,
        descriptor=encode_descriptor(told),
        slot_bytes=segment.geometry.slot_bytes,
        window=WINDOW,
        num_slots=segment.geometry.num_slots,
    )


def views(*keys: str) -> Views:
    infos = [ObjectInfo(key, 1, 1, "") for key in keys]
    return see(infos, "job", "run", known_epochs={})


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_listing_is_as_old_as_its_beginning_and_is_forgotten_when_all_have_seen_it() -> None:
    clock, looks = Clock(), list[float]()
    shared = SharedLook(clock=clock)

    def look() -> Views:
        looks.append(clock.now_s)
        clock.now_s += 20.0  # it takes so long
        return views()

    first = shared.get("4", look, sharers=3)
    assert (first.begun_s, first.shared) == (1000.0, False)
    clock.now_s += 5.0
    second = shared.get("4", look, sharers=3)
    assert (second.begun_s, second.shared, second.views is first.views) == (1000.0, True, True)
    clock.now_s += 6.0  # 31 s after it was begun, though 11 s after it was there
    third = shared.get("4", look, sharers=3)
    assert (third.begun_s, third.shared) == (1031.0, False)
    assert shared.get("4", look, sharers=3).shared
    assert shared.get("4", look, sharers=3).shared
    assert shared._seen is None
    assert not shared.get("4", look, sharers=3).shared
    assert not shared.get("5", look, sharers=3).shared
    assert not shared.get("5", look, sharers=3, fresh=True).shared
    assert len(looks) == 5


def test_a_listing_that_failed_is_nobodys() -> None:
    shared = SharedLook()

    def fail() -> Views:
        raise Unavailable("job/run/", "away")

    for _ in range(2):
        with pytest.raises(Unavailable):
            shared.get("4", fail, sharers=8)
    assert not shared.get("4", views, sharers=8).shared


def test_ranks_that_ask_at_once_wait_for_one_listing() -> None:
    shared, looks = SharedLook(), list[int]()

    def look() -> Views:
        looks.append(1)
        return views()

    with ThreadPoolExecutor(RANKS) as pool:
        found = list(pool.map(lambda _: shared.get("4", look, sharers=RANKS), range(RANKS)))
    assert (len(looks), sum(seen.shared for seen in found)) == (1, RANKS - 1)


def test_a_listing_that_may_be_shared_is_young_enough_to_act_upon() -> None:
    """A manifest is put within half the settle time after the listing was begun (docs/format.md
    §7): the listing must have been begun a minute before at most, and what follows takes a minute
    of attempts and three requests' time.
    """
    from ckptd.persistence import rank_store

    last_attempt_s = 3 * StoreOptions().request_timeout_s
    assert run_in_store._SHARE_S < rank_store._LIST_WITHIN_S
    assert rank_store._LIST_WITHIN_S + run_in_store._PROMPT_S + last_attempt_s <= keeper._SETTLE_S / 2
