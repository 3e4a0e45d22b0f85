"""What `make demo-storage` plans; the demo itself takes minutes and is run as one."""

from __future__ import annotations

import itertools
import random

import pytest

from examples.moe_text.storage import plan_losses


@pytest.mark.parametrize("seed", range(50))
def test_losses_come_in_order_with_time_between_them_to_store_something(seed: int) -> None:
    steps = [each.step for each in plan_losses(random.Random(seed), steps=120, every=4, count=3)]
    assert len(steps) == 3
    assert steps[0] >= 3 * 4
    assert steps[-1] < 120
    assert all(after - before >= 4 for before, after in itertools.pairwise(steps))


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="more --steps"):
        plan_losses(random.Random(1), steps=30, every=4, count=3)
