"""What bench.localized makes of the ranks' logs, and its model, by hand."""

from __future__ import annotations

import pytest

from bench.localized import Model, recovery_of
from ckptd.demo.lab import Event


def test_the_model_is_that_of_the_papers_figure() -> None:
    """Three stages, six micro-batches: 6 turns of 8, so a quarter of a replayed iteration is bubbles."""
    model = Model(stage_s=6.0, micro_batches=6, replayed=3, begin_s=10.0)
    assert model.together_s(3) == pytest.approx(8.0)
    assert model.replay_ratio(3) == pytest.approx(0.75)
    assert model.global_s(3) == pytest.approx(10 + 4 * 8)
    assert model.localized_s(3) == pytest.approx(10 + 3 * 6 + 8)


def life(attaches_s: float, *steps: tuple[int, float, float]) -> list[Event]:
    """Attached at a time, then each step with when it began and ended."""
    events: list[Event] = [{"event": "attaches", "time_s": attaches_s}]
    for step, began_s, ended_s in steps:
        events.append({"event": "begins", "step": step, "time_s": began_s})
        took_s = ended_s - began_s
        events.append({"event": "step", "step": step, "time_s": ended_s, "iteration_s": took_s})
    return events


def test_a_recovery_is_read_from_the_logs() -> None:
    """Rank 0 had ended step 5, rank 1 step 4 only. Rank 1 replays 3 and 4, and does 5, which was
    cut off, for the first time.
    """
    before = [(step, float(step), step + 0.5) for step in range(5)]
    events = [
        life(0.0, *before, (5, 5.0, 5.5)) + life(20.0, (6, 25.0, 26.0), (7, 26.0, 27.0)),
        life(0.0, *before) + life(21.0, (3, 22.0, 22.2), (4, 22.2, 22.8), (5, 23.0, 24.0), (6, 25.0, 26.5)),
    ]
    found = recovery_of(6.0, events, lost=1)
    assert (found.again_lost, found.again_others) == (2, 0)
    times = (found.recovery_s, found.attach_s, found.begin_s, found.iteration_ms)
    assert times == pytest.approx((20.5, 5.5, 1.0, 400.0))


def test_what_the_others_did_again_is_counted() -> None:
    before = [(step, float(step), step + 0.5) for step in range(5)]
    again = [(step, 20.0 + step, 20.5 + step) for step in range(3, 6)]
    found = recovery_of(6.0, [life(0.0, *before) + life(20.0, *again)] * 3, lost=1)
    assert (found.again_lost, found.again_others) == (2, 2)
