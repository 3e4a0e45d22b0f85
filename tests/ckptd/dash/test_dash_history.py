"""The pace of runs and the stalls of trainers, from counters that grow."""

from __future__ import annotations

import math

from ckptd.dash.dash_history import PaceHistory, RunPace
from ckptd.transport import messages as m


def session(step: int, stall_ms: float, rank: int = 0, run: str = "run") -> m.SessionStatus:
    metrics = {"steps": float(step), "stall_ms_sum": stall_ms}
    return m.SessionStatus("job", run, rank, 2, 1, step, metrics, 0, 0, 0, 1.0, "pidfd")


def test_the_stall_per_iteration_is_that_of_the_rank_that_waited_longest() -> None:
    history = PaceHistory()
    history.add([session(10, 50.0), session(10, 50.0, 1)], 100.0)
    assert history.paces() == {("job", "run"): RunPace()}
    history.add([session(14, 52.0), session(14, 58.0, 1)], 102.0)
    assert history.paces() == {("job", "run"): RunPace(0.5, ((102.0, 2.0, 0.004),))}


def test_a_poll_without_a_new_report_adds_nothing() -> None:
    history = PaceHistory()
    for at_s in (100.0, 101.0, 102.0):
        history.add([session(10, 50.0)], at_s)
    history.add([session(12, 53.0)], 103.0)
    # The share of time counts from the report before.
    assert history.paces()["job", "run"].stalls == ((103.0, 1.5, 0.001),)


def test_a_restarted_trainer_counts_anew() -> None:
    history = PaceHistory()
    history.add([session(100, 50.0)], 100.0)
    history.add([session(90, 1.0)], 101.0)
    history.add([session(92, 2.0)], 102.0)
    pace = history.paces()["job", "run"]
    assert (pace.step_s, pace.stalls) == (0.5, ((102.0, 0.5, 0.001),))


def test_runs_without_trainers_are_forgotten() -> None:
    history = PaceHistory()
    history.add([session(1, 0.0)], 100.0)
    history.add([session(2, 1.0)], 101.0)
    history.add([], 102.0)
    assert history.paces()["job", "run"].stalls == ((101.0, 1.0, 0.001),)
    history.add([], 500.0)
    assert history.paces() == {}


def test_numbers_that_are_none_do_no_harm() -> None:
    history = PaceHistory()
    history.add([session(1, 0.0)], 100.0)
    for step, stall in ((2, math.nan), (3, math.inf), (4, math.inf), (5, -math.inf)):
        history.add([session(step, stall)], 99.0 + step)
    stalls = history.paces()["job", "run"].stalls
    assert len(stalls) == 4
    assert all(math.isfinite(ms) and ms >= 0 for _, ms, _ in stalls)
