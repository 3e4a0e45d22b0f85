"""`make demo-pipeline`, shortened: with hosts and without, exact, and with the phases of each recovery."""

from __future__ import annotations

import random
import re

import pytest

from ckptd.core.recovery.recovery_phases import RecoveryPhase
from examples.moe_pipeline.demo import plan_losses
from tests.examples.playing import play
from tests.long import long

SHORT = ["--stages", "2", "--replicas", "1", "--steps", "32", "--window", "2", "--seed", "3"]


@pytest.mark.parametrize("seed", range(20))
def test_losses_come_in_order_and_take_whole_stages(seed: int) -> None:
    plan = plan_losses(random.Random(seed), steps=90, window=4, num_stages=4, num_replicas=2)
    steps = [planned.step for planned in plan]
    assert steps == sorted(steps)
    assert steps[0] >= 4 * 4
    assert steps[-1] < 90
    assert [len(planned.ranks(4)) for planned in plan] == [1, 2, 4]


@pytest.mark.slow
@pytest.mark.timeout(600)
@long
@pytest.mark.parametrize("plain", [False, True])
def test_the_demo_is_exact_and_names_the_phases(plain: bool) -> None:
    output = play("examples.moe_pipeline.demo", *SHORT, *["--plain"] * plain)
    assert "IDENTICAL: every tensor" in output
    assert output.count("--> SIGKILL to rank") == 6
    assert output.count(" came last: ") == 6
    rows = re.findall(r"^(\w+) +[\d -]+$", output.partition("phase, ms")[2], re.MULTILINE)
    assert rows[-2:] == ["rest", "back"]
    assert set(rows[:-2]) <= {*map(str, RecoveryPhase)}
    assert {RecoveryPhase.ATTACH, RecoveryPhase.LOADED, RecoveryPhase.FIRST_NEW_STEP} <= set(rows)
    assert (RecoveryPhase.IMPORTS in rows) == plain
