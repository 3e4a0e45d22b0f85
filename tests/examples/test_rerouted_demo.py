"""`make demo-reroute`, shortened: who is lost, and that all bits are those of an undisturbed run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from examples.moe_pipeline.rerouted_demo import plan_victims, spans
from tests.examples.playing import play
from tests.long import long


@pytest.mark.parametrize(("pipelines", "stages"), [(2, 2), (2, 4), (3, 4)])
def test_two_are_lost_at_different_stages_of_different_pipelines(pipelines: int, stages: int) -> None:
    for seed in range(50):
        draw = random.Random(seed)
        losses = plan_victims(draw, pipelines=pipelines, stages=stages, iterations=60)
        first, second = losses.victims
        assert 0 not in losses.victims
        assert first % stages != second % stages
        assert first // stages != second // stages
        assert max(losses.after) < losses.back_after


def test_too_small_a_grid_is_refused() -> None:
    with pytest.raises(ValueError, match="1 pipelines of 4 stages, 60 iterations: needs 2, 2 and 20"):
        plan_victims(random.Random(0), pipelines=1, stages=4, iterations=60)


def test_an_iteration_lasts_from_one_end_to_the_next() -> None:
    steps = [{"time_s": at, "missing": missing} for at, missing in ((1.0, []), (1.5, [3]), (3.0, [3, 1]))]
    assert spans(steps) == [(1.5, 0.5, 1), (3.0, 1.5, 2)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@long
def test_the_demo_is_exact(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the demo draws a picture (extra: demo)")
    options = ["--stages", "2", "--iterations", "60", "--phase-ms", "10", "--seed", "1"]
    output = play("examples.moe_pipeline.rerouted_demo", *options, "--out", str(tmp_path))
    assert "IDENTICAL: every tensor" in output
    assert output.count("SIGKILL to rank") == 3
    assert (tmp_path / "demo_reroute.png").exists()
