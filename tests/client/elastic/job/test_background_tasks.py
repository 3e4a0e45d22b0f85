"""Background tasks: an incarnation that ends early on all ranks at once, and memory that one rank of a node frees."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ckptd.client.elastic.incarnation.image_inventory import Inventory
from ckptd.client.elastic.incarnation.incarnation_start import JobSettings, LocalNode, Started
from ckptd.client.elastic.job.background_tasks import GarbageCollection, make_room, unneeded_runs
from ckptd.client.options import PlacementOptions
from ckptd.core.elastic.incarnation_plan import Seat, plan_incarnation
from ckptd.core.elastic.incarnations import ExpertLayers
from ckptd.core.slots.segment_format import WORLD_TOPOLOGY, RingHint
from ckptd.errors import DaemonUnavailable
from ckptd.memory.segment_store import SegmentStore
from tests.ckptd.running import MIB, descriptor
from tests.client.elastic.job.placing_ranks import EVERY, work
from tests.client.gloo_ranks import run_in_ranks


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
    assert unneeded_runs(node.folder, "job", "run", 10) == ["run.w11", "run.w12", "run.w13"]
    # Parked by one that was cut off: it is read from, and what was promised before it stays.
    assert unneeded_runs(node.folder, "job", "run", 13) == ["run.w11", "run.w12"]


def test_the_newest_promise_is_kept_whatever_is_chosen(node: Node) -> None:
    """Nodes may be away that hold the rest of it."""
    for number, floor in ((10, 5), (11, 7), (12, -1)):
        node.holds(f"run.w{number}", floor=floor)
    assert unneeded_runs(node.folder, "job", "run", 10) == ["run.w12"]
    assert unneeded_runs(node.folder, "job", "run", 12) == ["run.w10"]
    assert unneeded_runs(node.folder, "job", "run", -1) == ["run.w10", "run.w12"]


def test_runs_of_the_user_are_no_worlds(node: Node) -> None:
    """A run that somebody named as if it were a world was counted as one, and freed."""
    node.holds("run.w10")
    node.holds("run.w5", topology="")
    node.holds("run.w6.w7")
    assert unneeded_runs(node.folder, "job", "run", -1) == ["run.w10"]
    retiring = GarbageCollection(lambda: "", node.folder, "job", "run", 20, 0, 0)
    assert retiring.earlier() == ["run.w10"]
    found = Inventory(node.folder, "job", "run", ExpertLayers(("a",), 1))
    assert found.of_node.worlds == (10,)


def test_a_file_that_holds_nothing_is_left_out(node: Node) -> None:
    """Opening it raised something that nobody expected, and no start came through."""
    node.holds("run.w10")
    (node.folder / "job~run.w11~r0~g0.seg").touch()
    assert unneeded_runs(node.folder, "job", "run", -1) == ["run.w10"]


LAYERS = ExpertLayers(("moe",), 2)
WISHES = JobSettings("job", "run", LAYERS, PlacementOptions(threshold=1, max_straggler=None))


def test_all_ranks_leave_a_world_at_the_same_step(tmp_path: Path) -> None:
    """Experts are to be placed anew: the step has not begun on any of them."""
    run_in_ranks(work, 2, tmp_path, str(tmp_path))
    told = [json.loads(Path(tmp_path, f"{rank}.json").read_text()) for rank in range(2)]
    assert told == [{"done": list(range(EVERY)), "again": True}] * 2


@pytest.mark.parametrize(("rank", "earlier", "asked"), [(0, -1, 1), (1, -1, 0), (2, -1, 1), (0, 5, 0)])
def test_one_rank_of_a_node_frees_what_came_to_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rank: int, earlier: int, asked: int
) -> None:
    """Of three ranks on two nodes the second is not its node's first; what was promised of an
    earlier world stays.
    """
    Node(tmp_path).holds("run.w10", floor=earlier)
    calls = []

    def endpoint() -> str:
        calls.append(rank)
        raise DaemonUnavailable("nobody answers", operation="forget")

    seats = [Seat(node, node, 2) for node in "xxy"]
    loads_LE = np.zeros((1, 2), dtype=np.int64)
    plan = plan_incarnation(20, seats, LAYERS, loads_LE, None, threshold=1, max_straggler=None)
    world = Started(plan, None, loads_LE, None)
    make_room(LocalNode(seats[rank], tmp_path, endpoint), WISHES, world, rank)
    assert len(calls) == asked
    assert ("memory of earlier incarnations is not freed" in caplog.text) == bool(asked)
