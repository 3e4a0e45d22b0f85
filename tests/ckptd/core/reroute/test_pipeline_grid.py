"""Grids that make no sense are refused, with the numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ckptd.core.reroute.pipeline_grid import StageCosts, Worker, grid_of_pipelines
from tests.ckptd.core.reroute.grids import UNIT, grid


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"forward_s": math.nan}, "forward_s is nan"),
        ({"input_s": -1.0}, "input_s is -1.0"),
        ({"forward_s": 0.0, "input_s": 0.0, "weight_s": 0.0}, "takes no time"),
        ({"activation_bytes": 1, "kept_bytes": 2}, "is a part of the activations"),
        ({"activation_bytes": 10, "memory_bytes": 5}, "no micro-batch could run"),
    ],
)
def test_costs(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        StageCosts(**({"forward_s": 1.0, "input_s": 1.0, "weight_s": 1.0} | wrong))


def test_grids() -> None:
    with pytest.raises(ValueError, match="0 pipelines of 2 stages with 4 micro-batches"):
        grid(0, 2, 4)
    with pytest.raises(ValueError, match=r"worker \(2, 0\) failed, but the grid has 2 pipelines of 3 stages"):
        grid(2, 3, 4, (2, 0))
    found = grid(3, 2, 4, (0, 1), (2, 1))
    assert (found.survivors(1), found.whole, found.lost_stages) == ((1,), (1,), ())
    assert grid(1, 2, 4, (0, 1)).lost_stages == (1,)


def test_pipelines_must_be_alike() -> None:
    found = grid_of_pipelines([[UNIT, UNIT]] * 2, [4, 4], [(0, 1)])
    assert found == grid(2, 2, 4, (0, 1))
    assert Worker(0, 1) in found.failed
    with pytest.raises(ValueError, match="pipeline 0 has 2 stages, pipeline 1 has 1"):
        grid_of_pipelines([[UNIT, UNIT], [UNIT]], [4, 4])
    with pytest.raises(ValueError, match="pipeline 0 has 4 micro-batches, pipeline 1 has 5"):
        grid_of_pipelines([[UNIT], [UNIT]], [4, 5])
    with pytest.raises(ValueError, match="stage 0 costs"):
        grid_of_pipelines([[UNIT], [StageCosts(2, 1, 1)]], [4, 4])
    with pytest.raises(ValueError, match="2 pipelines, and 1 numbers"):
        grid_of_pipelines([[UNIT], [UNIT]], [4])
