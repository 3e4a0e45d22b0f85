"""What `make demo-nodes` plans and concludes; the demo itself takes minutes and is run as one."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from ckptd.demo.report import KillRecovery, NodeLoss, node_recovery
from examples.moe_text.nodes import NUM_RANKS, plan_losses

LOSS = NodeLoss(time_s=100.0, hosts=("host1",), ranks=(1,), last_step=20)


def _attached(time_s: float) -> dict[str, Any]:
    return {"event": "attached", "time_s": time_s}


def _step(time_s: float, step: int) -> dict[str, Any]:
    return {"event": "step", "time_s": time_s, "step": step}


@pytest.mark.parametrize("seed", range(50))
def test_losses_come_in_order_with_a_window_between_and_one_takes_two_hosts(seed: int) -> None:
    plan = plan_losses(random.Random(seed), steps=160, window=4, count=5)
    steps = [planned.step for planned in plan]
    assert steps[0] >= 3 * 4
    assert steps[-1] < 160
    assert all(after - before >= 4 for before, after in itertools.pairwise(steps))
    assert [len(set(planned.ranks)) for planned in plan] == [1, 1, 2, 1, 1]
    assert all(set(planned.ranks) <= set(range(NUM_RANKS)) for planned in plan)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="more --steps"):
        plan_losses(random.Random(1), steps=40, window=4, count=5)


def test_a_recovery_begins_with_the_next_life_and_ends_with_the_first_new_iteration() -> None:
    """The step that a survivor finished after the loss began is none of the new life's."""
    before = [_attached(1.0), _step(99.0, 19), _step(100.1, 20)]
    after = [_attached(106.0), _step(108.0, 17), _step(108.5, 18), _step(109.0, 19)]
    fresh = [_step(109.5, 20), _step(110.0, 21), _step(110.5, 22)]
    found = node_recovery(LOSS, before + after + fresh)
    assert found == KillRecovery(resumed_at=17, redone=4, start_s=6.0, back_s=10.0)


def test_a_recovery_that_has_not_happened_has_no_numbers() -> None:
    assert node_recovery(LOSS, [_step(100.1, 20)]) == KillRecovery(None, 0, None, None)
    found = node_recovery(LOSS, [_attached(106.0), _step(107.0, 17)])
    assert found == KillRecovery(resumed_at=17, redone=1, start_s=6.0, back_s=None)
