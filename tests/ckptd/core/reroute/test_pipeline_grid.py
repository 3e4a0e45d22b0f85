"""Grids that make no sense are refused, with the numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ckptd.core.reroute.pipeline_grid import StageCosts
from tests.ckptd.core.reroute.grids import grid


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
