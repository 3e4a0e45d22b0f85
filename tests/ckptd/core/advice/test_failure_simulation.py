"""Runs that are played agree with the closed form, and their times add up."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from ckptd.core.advice.failure_simulation import (
    RecordedFailures,
    mean_ettr,
    play,
    recorded_failures,
)
from ckptd.core.advice.job_shape import RankShape
from ckptd.core.advice.outlook import Conditions, PolicyOutlook, dense_outlook, window_outlook
from ckptd.core.snapshot_policy import OperatorCost, OperatorKind
from ckptd.ctl.advise_command import failures_at_random

EIGHT = RankShape(tuple(OperatorCost(f"e{i}", OperatorKind.EXPERT, 700, 100) for i in range(8)), (1.0,) * 8)
CONDITIONS = Conditions(2.0, 1800.0, link_Bps=4e3, network_Bps=4e3, restart_s=5.0)
OUTLOOKS = [
    dense_outlook(EIGHT, CONDITIONS, 1),
    dense_outlook(EIGHT, CONDITIONS, 20),
    window_outlook(EIGHT, CONDITIONS, "sliding", 4),
    window_outlook(EIGHT, CONDITIONS, "aligned", 4),
    window_outlook(EIGHT, replace(CONDITIONS, alone=0.5), "aligned", 4),
]


@pytest.mark.parametrize("outlook", OUTLOOKS, ids=lambda each: f"{each.choice}, localized {each.localized}")
def test_played_runs_have_the_ettr_of_the_closed_form(outlook: PolicyOutlook) -> None:
    hours = 400 * 3600.0
    drawn = [list(failures_at_random(CONDITIONS.mtbf_s, hours, seed)) for seed in range(10)]
    assert statistics.mean(map(len, drawn)) == pytest.approx(800, rel=0.05)
    assert play(outlook, 2.0, drawn[0], hours).failures == len(drawn[0])
    assert mean_ettr(outlook, 2.0, drawn, hours) == pytest.approx(outlook.ettr, abs=0.002)


@pytest.mark.parametrize("outlook", OUTLOOKS, ids=lambda each: f"{each.choice}, localized {each.localized}")
@pytest.mark.parametrize("seed", range(5))
def test_times_add_up_whatever_comes(outlook: PolicyOutlook, seed: int) -> None:
    """Failures every 20 seconds: most recoveries are cut short."""
    run = play(outlook, 2.0, failures_at_random(20.0, 5_000.0, seed), 5_000.0)
    assert run.useful_s + run.stall_s + run.lost_s + run.recovery_s == pytest.approx(5_000.0)
    assert min(run.useful_s, run.stall_s, run.lost_s, run.recovery_s) >= 0
    assert run.ettr < outlook.ettr + 0.2


def test_a_run_by_hand() -> None:
    """Every 20 iterations of 2 s a snapshot. A failure after 101 s leaves 40 iterations; 11 are done again."""
    outlook = dense_outlook(EIGHT, CONDITIONS, 20)
    step_s = 2.0 + outlook.stall_s
    run = play(outlook, 2.0, [101.0, 103.0], 200.0)
    after_s = outlook.restart_s + outlook.load_s
    assert run.failures == 2
    assert run.recovery_s == pytest.approx(2.0 + after_s)
    again = int((200.0 - 103.0 - after_s) / step_s)
    assert run.useful_s == (40 + again) * 2.0
    assert run.lost_s == pytest.approx(101.0 - 40 * step_s + (97.0 - after_s - again * step_s))


def test_without_failures_nothing_is_lost_but_the_last_iteration() -> None:
    run = play(OUTLOOKS[2], 2.0, [], 1001.0)
    assert (run.failures, run.recovery_s) == (0, 0.0)
    assert run.useful_s == 1000.0
    assert play(OUTLOOKS[0], 2.0, [5.0], 1.0).failures == 0, "it comes after the end"


def test_a_record_of_failures_is_played() -> None:
    record = recorded_failures("# seconds\n101\n\n103\n200.0\n")
    assert record == RecordedFailures((101.0, 103.0, 200.0), 200.0)
    assert record.mtbf_s == pytest.approx(200 / 3)
    run = play(OUTLOOKS[1], 2.0, record.failures_s, record.length_s)
    assert run == play(OUTLOOKS[1], 2.0, [101.0, 103.0], 200.0), "the last one ends it"


def test_a_record_of_nodes() -> None:
    """It begins with the first node. Two are lost at once, then one; that three come is no failure."""
    text = "0,0\n50,0\n50,4\n60,4\n60,2\n70,5\n80,4\n90,4\n"
    assert recorded_failures(text) == RecordedFailures((10.0, 30.0), 40.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the record has no failure"),
        ("0\n", "the record has no failure"),
        ("0,0\n9,0\n", "the record has no failure"),
        ("0,2\n9,3\n", "the record has no failure"),
        ("1\nsoon\n", "line 2, 'soon', is no time in seconds"),
        ("1,2,3\n", "line 1, '1,2,3', is no time in seconds"),
        ("1,2\n3\n", "line 2, '3', is no time in seconds, or time and nodes"),
        ("-1\n", "line 1, '-1': must be 0 or more"),
        ("nan\n", "line 1, 'nan': must be 0 or more"),
        ("5\n4\n", "line 2, '4': is before the line above it"),
    ],
)
def test_what_is_no_record(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recorded_failures(text)
