"""Two nodes, one of which has a wrong clock, commit, collect and restore over one store: what
decides is the store's clock.

Real keepers and a real folder, whose files the kernel dates: that is the store's clock, and tests
make things old by it. What a node believes is injected where its keeper asks for it
(`Keeper.wall_ns`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptd.core.slots.segment_format import unpack_slot_header
from ckptd.core.slots.slots import SnapshotKey
from ckptd.memory.segment_file import Segment
from ckptd.persistence import keeper_wire as w
from ckptd.storage.checkpoints.names import ManifestName, ObjectName, parse
from ckptd.storage.checkpoints.reader import read_catalog, read_manifest
from ckptd.storage.checkpoints.verifier import verify_run
from ckptd.storage.image import verify
from ckptd.storage.stores.open_store import open_store
from tests.ckptd.persistence.slots import descriptor, fill, segment_store
from tests.ckptd.persistence.test_keeper import Desk

HOUR = 3600.0
DAY = 24 * HOUR


def clock(off_s: float) -> Callable[[], int]:
    return lambda: time.time_ns() + int(off_s * 1e9)


class Node:
    """One rank and its keeper; rank 0 collects."""

    def __init__(self, folder: Path, rank: int, off_s: float) -> None:
        self.url, self.rank, self.off_s = f"file://{folder}/store", rank, off_s
        shm = segment_store(folder / f"shm-{rank}")
        self.segment: Segment = shm.create(descriptor(rank, world_size=2), 6, 1 << 20)
        self.start()

    def start(self) -> None:
        """Another life of the keeper."""
        self.desk = Desk(self.url, settle_s=0.0, wall_ns=clock(self.off_s))
        assert isinstance(self.desk.open(self.rank), w.RunOpened)

    def put(self, iteration: int) -> SnapshotKey:
        snapshot = fill(self.segment, iteration % 6, iteration)
        assert isinstance(self.desk.put(self.segment, iteration % 6, snapshot), w.StoredSlot)
        return snapshot

    def commit(self, end: int) -> None:
        snapshots = [self.put(end - 1), self.put(end)]
        assert isinstance(self.desk.commit(self.segment, *snapshots), w.Answer)

    def settle(self) -> None:
        """Until both manifests were seen, and what is replaced is gone."""
        assert self.desk.wait_settled().complete
        self.desk.keeper._aside.submit(lambda: None).result(30)

    def restore(self) -> list[int]:
        """The ends that are offered, newest first; the newest one's images are those that were sealed."""
        offered = self.desk.find(self.rank)
        target = segment_store(Path(self.segment.path).parent / "back").create(
            descriptor(self.rank, world_size=2), 6, 1 << 20
        )
        newest = offered[0]
        for index, (raw, length) in enumerate(zip(newest.headers, newest.lengths, strict=True)):
            header = unpack_slot_header(raw)
            assert header is not None
            at = target.geometry.slot_offset(index)
            reply = self.desk.ask(w.ReadRange, newest.name, index, 0, length, str(target.path), at)
            assert isinstance(reply, w.Answer), reply
            image = target.image(index, header)
            verify(image, header.header_digest)
            assert image == self.segment.image(header.iteration % 6, header)
        target.close()
        return [found.end for found in offered]


class Nodes:
    """Rank 0 has the wrong clock, rank 1 the right one; or the other way round."""

    def __init__(self, folder: Path, *off_s: float) -> None:
        self.folder = folder / "store"
        self.each = [Node(folder, rank, off) for rank, off in enumerate(off_s)]

    def commit(self, end: int) -> None:
        for node in self.each:
            node.commit(end)
        for node in self.each:
            node.settle()

    def keys(self, kind: type[ObjectName | ManifestName]) -> set[str]:
        found = [info.key for info in open_store(str(self.folder)).list("")]
        return {key for key in found if isinstance(parse(key), kind)}

    def age(self, seconds: float) -> None:
        """So much time has passed for what lies in the store, by its clock."""
        for path in [p for p in self.folder.rglob("*") if p.is_file()]:
            then = path.stat().st_mtime - seconds
            os.utime(path, (then, then))

    def check(self) -> None:
        """No byte of what is committed is missing or changed."""
        report = verify_run(open_store(str(self.folder)), "job", "run")
        assert report.ok, report.findings


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., Nodes]]:
    """Nodes whose clocks are so far off."""
    every: list[Nodes] = []

    def make(*off_s: float) -> Nodes:
        every.append(Nodes(tmp_path, *off_s))
        return every[-1]

    yield make
    for nodes in every:
        for node in nodes.each:
            node.segment.close()


@pytest.fixture(params=[(HOUR, 0.0), (-HOUR, 0.0), (0.0, HOUR), (HOUR, -HOUR)])
def nodes(request: pytest.FixtureRequest, made: Callable[..., Nodes]) -> Nodes:
    """An hour off, in each direction: the collector, the other one, both."""
    return made(*request.param)


def test_a_node_with_a_wrong_clock_deletes_nothing_young_and_damages_nothing(nodes: Nodes) -> None:
    """An object that no manifest names goes when it is a day old, by the clock of the store: not
    half an hour before, as the clock of whoever collects may say, and not later.
    """
    for end in (2, 4, 6):
        nodes.commit(end)
    store = open_store(str(nodes.folder))
    old, young = (ObjectName("job", "run", 3, 1, 1, 4, digit * 16).key for digit in "ef")
    store.put(old, [memoryview(b"stored by a life before")])
    nodes.age(DAY - HOUR / 2)
    nodes.commit(8)
    assert read_ends(nodes) == [8, 6]
    assert old in nodes.keys(ObjectName)
    assert "000000000003" in {key.split("/")[2] for key in nodes.keys(ObjectName)}
    nodes.check()

    store.put(young, [memoryview(b"stored just now")])
    nodes.age(HOUR)
    nodes.commit(10)
    assert read_ends(nodes) == [10, 8]
    left = nodes.keys(ObjectName)
    assert (old in left, young in left) == (False, True)
    # The tensor that never changes lies in the objects of iteration 1.
    assert {int(key.split("/")[2]) for key in left - {young}} == {1, 7, 8, 9, 10}
    nodes.check()


def test_what_is_restored_is_the_newest_whatever_the_clocks_say(
    made: Callable[..., Nodes],
) -> None:
    """By the times that its manifests tell, rank 0 wrote the older checkpoint four hours after the newer one."""
    nodes = made(2 * HOUR, 0.0)
    nodes.commit(2)
    nodes.each[0].off_s = -2 * HOUR
    nodes.each[0].start()
    nodes.commit(4)
    store = open_store(str(nodes.folder))
    written_ns = {
        manifest.end: manifest.written_at_ns
        for manifest in (read_manifest(store, key) for key in nodes.keys(ManifestName))
        if manifest.rank == 0
    }
    assert written_ns[2] - written_ns[4] > 3 * HOUR * 1e9
    for node in nodes.each:
        assert node.restore() == [4, 2]


def test_what_was_uploaded_before_a_restart_is_not_relied_on_when_it_is_nearly_garbage(
    nodes: Nodes,
) -> None:
    """A life ago a snapshot was stored, and no manifest names it: it may go when it is a day old,
    by the clock of the store.
    """
    nodes.commit(2)
    for node in nodes.each:
        node.put(3)
    nodes.age(DAY - HOUR / 2)
    for node in nodes.each:
        node.start()
    nodes.commit(4)
    again = [key for key in nodes.keys(ObjectName) if "/000000000003/" in key]
    assert len(again) == 2
    for key in again:
        assert time.time() - (nodes.folder / key).stat().st_mtime < HOUR / 2
    nodes.age(HOUR)
    nodes.commit(6)
    nodes.check()


def read_ends(nodes: Nodes) -> list[int]:
    return [c.id.end for c in read_catalog(open_store(str(nodes.folder)), "job", "run").committed]
