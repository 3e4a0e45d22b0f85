"""Which earlier worlds are freed: those of this run alone, and never what was promised or is being read."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.client.elastic.incarnation.image_inventory import Inventory
from ckptd.client.elastic.job.garbage_collection import GarbageCollection, needless
from ckptd.core.elastic.incarnations import ExpertLayers
from ckptd.core.slots.segment_format import WORLD_TOPOLOGY, RingHint
from ckptd.memory.segment_store import SegmentStore
from tests.ckptd.running import MIB, descriptor


class Node:
    """A folder with segments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._store = SegmentStore(folder, 64 * MIB, "n", mlock="off", hugepages="off")

    def holds(self, run: str, *, floor: int = -1, topology: str = WORLD_TOPOLOGY) -> None:
        segment = self._store.create(descriptor("job", run, topology=topology), 2, 1 << 16)
        segment.protect(RingHint(floor, floor, 1, False, 0, 0))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_worlds_that_came_to_nothing_are_needless(node: Node) -> None:
    """Starts that failed one after the other left a world each, until there was no memory: the next
    one trained unprotected, and freed none.
    """
    node.holds("run.w10", floor=5)
    for number in (11, 12, 13):
        node.holds(f"run.w{number}")
    assert needless(node.folder, "job", "run", 10) == ["run.w11", "run.w12", "run.w13"]
    # Parked by one that was cut off: it is read from, and what was promised before it stays.
    assert needless(node.folder, "job", "run", 13) == ["run.w11", "run.w12"]


def test_the_newest_promise_is_kept_whatever_is_chosen(node: Node) -> None:
    """Nodes may be away that hold the rest of it."""
    for number, floor in ((10, 5), (11, 7), (12, -1)):
        node.holds(f"run.w{number}", floor=floor)
    assert needless(node.folder, "job", "run", 10) == ["run.w12"]
    assert needless(node.folder, "job", "run", 12) == ["run.w10"]
    assert needless(node.folder, "job", "run", -1) == ["run.w10", "run.w12"]


def test_runs_of_the_user_are_no_worlds(node: Node) -> None:
    """A run that somebody named as if it were a world was counted as one, and freed."""
    node.holds("run.w10")
    node.holds("run.w5", topology="")
    node.holds("run.w6.w7")
    assert needless(node.folder, "job", "run", -1) == ["run.w10"]
    retiring = GarbageCollection(lambda: "", node.folder, "job", "run", 20, 0, 0)
    assert retiring.earlier() == ["run.w10"]
    found = Inventory(node.folder, "job", "run", ExpertLayers(("a",), 1))
    assert found.of_node.worlds == (10,)


def test_a_file_that_holds_nothing_is_left_out(node: Node) -> None:
    """Opening it raised something that nobody expected, and no start came through."""
    node.holds("run.w10")
    (node.folder / "job~run.w11~r0~g0.seg").touch()
    assert needless(node.folder, "job", "run", -1) == ["run.w10"]
