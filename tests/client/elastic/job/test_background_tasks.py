"""What goes on beside the steps: a world that ends early on all ranks at once; memory that one rank
of a node frees.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ckptd.client.elastic.incarnation.discovery import Here, Wishes
from ckptd.client.elastic.incarnation.incarnation_start import Started
from ckptd.client.elastic.job.background_tasks import make_room
from ckptd.client.options import PlacementOptions
from ckptd.core.elastic.incarnation_plan import Seat, plan_world
from ckptd.core.elastic.incarnations import ExpertLayers
from ckptd.errors import DaemonUnavailable
from tests.client.elastic.job.placing_ranks import EVERY, work
from tests.client.elastic.job.test_garbage_collection import Node
from tests.client.gloo_ranks import run_in_ranks

LAYERS = ExpertLayers(("moe",), 2)
WISHES = Wishes("job", "run", LAYERS, PlacementOptions(threshold=1, max_straggler=None))


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
    plan = plan_world(20, seats, LAYERS, loads_LE, None, threshold=1, max_straggler=None)
    world = Started(plan, None, loads_LE, None)
    make_room(Here(seats[rank], tmp_path, endpoint), WISHES, world, rank)
    assert len(calls) == asked
    assert ("memory of earlier worlds is not freed" in caplog.text) == bool(asked)
