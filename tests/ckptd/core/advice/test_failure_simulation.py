"""Runs that are played agree with the closed form, and their times add up."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from ckptd.core.advice.failure_simulation import (
    RecordedFailures,
    mean_shares,
    play,
    recorded_failures,
)
from ckptd.core.advice.job_shape import RankShape
from ckptd.core.advice.outlook import (
    Conditions,
    PolicyOutlook,
    dense_outlook,
    partial_outlook,
    persisting,
    selected_outlook,
    window_outlook,
)
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
    selected_outlook(EIGHT, replace(CONDITIONS, skew=0.2), 4, every=3),
]


@pytest.mark.parametrize("outlook", OUTLOOKS, ids=lambda each: f"{each.choice}, localized {each.localized}")
def test_played_runs_have_the_ettr_of_the_closed_form(outlook: PolicyOutlook) -> None:
    hours = 400 * 3600.0
    drawn = [list(failures_at_random(CONDITIONS.mtbf_s, hours, seed)) for seed in range(10)]
    assert statistics.mean(map(len, drawn)) == pytest.approx(800, rel=0.05)
    assert play(outlook, 2.0, drawn[0], hours).failures == len(drawn[0])
    assert mean_shares(outlook, 2.0, drawn, hours)[0] == pytest.approx(outlook.ettr, abs=0.002)


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


def test_a_first_snapshot_since_a_failure_has_none_to_be_compared_with() -> None:
    """Every 2 iterations of 2 s a snapshot; 3 iterations, 1 and 5 between the failures."""
    outlook = dense_outlook(
        EIGHT, replace(CONDITIONS, link_Bps=1e9, network_Bps=1e9, verify_iterations=16), 2
    )
    assert outlook.replay_s == 4.0
    step_s, restart_s = 2.0 + outlook.stall_s, outlook.restart_s + outlook.load_s
    first_s = 7.0 * step_s + 1.0
    second_s = first_s + restart_s + 4.0 + 3 * step_s + 1.0
    third_s = second_s + restart_s + 1 * step_s + 1.0
    fourth_s = third_s + restart_s + 5 * step_s + 1.0
    run = play(outlook, 2.0, [first_s, second_s, third_s, fourth_s], fourth_s + restart_s + 4.0 + 1.0)
    # Iterations 6, 8 (the first of its process), again 8, and 12.
    assert run.useful_s == 12 * 2.0
    assert run.recovery_s == pytest.approx(4 * restart_s + 2 * 4.0)


@pytest.mark.parametrize("mtbf_s", [120.0, 1800.0])
@pytest.mark.parametrize("every", [1, 3])
def test_played_runs_lose_the_updates_of_the_closed_form(mtbf_s: float, every: int) -> None:
    """Where iterations count: the formula counts lost updates in all of the time, and this leaves recoveries
    out of it.
    """
    quick = replace(CONDITIONS, mtbf_s=mtbf_s, restart_s=0.0, link_Bps=1e9, network_Bps=1e9)
    outlook = partial_outlook(EIGHT, quick, 4, every)
    hours = 100 * 3600.0
    drawn = [list(failures_at_random(mtbf_s, hours, seed)) for seed in range(6)]
    lost_share = mean_shares(outlook, 2.0, drawn, hours)[1]
    assert lost_share == pytest.approx(outlook.lost_share, rel=0.08)
    assert mean_shares(dense_outlook(EIGHT, quick, 4), 2.0, drawn, hours)[1] == 0.0


def test_lost_updates_by_hand() -> None:
    """Experts of ages 0 to 6 lose 3 iterations; 2 iterations after another failure, what 2 leave of that."""
    quick = replace(CONDITIONS, restart_s=0.0, link_Bps=1e9, network_Bps=1e9)
    outlook = partial_outlook(EIGHT, quick, 7)
    assert outlook.older_iterations == 3.0
    step_s = 2.0 + outlook.stall_s
    again_s = outlook.restart_s + outlook.load_s
    first_s = 20.5 * step_s
    second_s = first_s + again_s + 2.5 * step_s
    assert play(outlook, 2.0, [first_s], 40 * step_s).lost_updates == 3.0
    run = play(outlook, 2.0, [first_s, second_s], second_s + again_s + 8.5 * step_s)
    # Of ages from 0 to 6: those below 2 lose their own, 1 on average, and the others 2.
    assert run.lost_updates == pytest.approx(3.0 + 1 / 3 * 1 + 2 / 3 * 2)
    assert run.iterations == 20 + 2 + 8
    assert run.lost_share == run.lost_updates / 30
    assert play(outlook, 2.0, [first_s, first_s + again_s / 2], 40 * step_s).lost_updates == 3.0


def test_what_an_abandoned_history_has_lost_does_not_count() -> None:
    """A loss goes back to a checkpoint from before the failures; what they took was learnt after it."""
    storing = replace(CONDITIONS, storage_Bps=1e6, loss_mtbf_s=1e6, link_Bps=1e9, network_Bps=1e9)
    outlook = persisting(partial_outlook(EIGHT, storing, 7, parts=1), storing, 21)
    assert outlook.storage is not None
    step_s = 2.0 + outlook.stall_s
    failures = [(25 + 7 * n) * step_s for n in range(2)]
    both = play(outlook, 2.0, failures, 50 * step_s, [40 * step_s])
    assert both.iterations < 40
    alone = play(outlook, 2.0, [], 50 * step_s, [40 * step_s])
    mean = outlook.storage.lost_iterations
    assert both.lost_updates == alone.lost_updates == pytest.approx(21 - 21 * 21 / (4 * mean))


LOSSES = replace(CONDITIONS, storage_Bps=1e3, loss_mtbf_s=9000.0)


@pytest.mark.parametrize(
    "outlook",
    [
        dense_outlook(EIGHT, LOSSES, 20),
        window_outlook(EIGHT, LOSSES, "sliding", 4),
        window_outlook(EIGHT, LOSSES, "aligned", 4),
        partial_outlook(EIGHT, LOSSES, 4, parts=2),
        window_outlook(EIGHT, replace(LOSSES, alone=0.5), "sliding", 4),
    ],
    ids=lambda each: f"{each.choice}, localized {each.localized}",
)
def test_played_losses_have_the_ettr_of_the_closed_form(outlook: PolicyOutlook) -> None:
    hours = 400 * 3600.0
    drawn, lost = (
        [list(failures_at_random(mtbf_s, hours, seed)) for seed in seeds]
        for mtbf_s, seeds in ((LOSSES.mtbf_s, range(10)), (LOSSES.loss_mtbf_s, range(10, 20)))
    )
    for every in (outlook.storage.shortest, 12 * outlook.storage.every) if outlook.storage else ():
        found = persisting(outlook, LOSSES, every)
        assert mean_shares(found, 2.0, drawn, hours, lost)[0] == pytest.approx(found.ettr, abs=0.003)
        run = play(found, 2.0, drawn[0], hours, lost[0])
        assert run.failures == len(drawn[0]) + len(lost[0])
        assert run.useful_s + run.stall_s + run.lost_s + run.recovery_s == pytest.approx(hours)
    assert mean_shares(outlook, 2.0, drawn, hours)[0] > mean_shares(outlook, 2.0, drawn, hours, lost)[0]


def test_losses_by_hand() -> None:
    """A checkpoint every 20 iterations of 2 s, each stored within 5.6 s."""
    storing = replace(CONDITIONS, storage_Bps=1e3, loss_mtbf_s=1e6)
    found = persisting(dense_outlook(EIGHT, storing, 10), storing, 20)
    storage = found.storage
    assert storage is not None
    assert storage.upload_s == storage.load_s == 5.6
    # 84.1 s are 42 iterations, of which 40 are in memory, but only 20 in storage: the upload needs 3 of them.
    run = play(found, 2.0, [], 84.1, [84.1 - 1e-6])
    assert (run.useful_s, run.failures) == (40.0, 1)
    assert play(found, 2.0, [84.1 - 1e-6], 84.1).useful_s == 80.0
    assert play(found, 2.0, [], 86.1, [86.1 - 1e-6]).useful_s == 80.0
    # A failure during a recovery from storage: loading begins again.
    run = play(found, 2.0, [86.0], 98.0, [84.0])
    assert (run.useful_s, run.failures) == (40.0, 2)
    assert run.recovery_s == pytest.approx(2.0 + 5.0 + 5.6)
    # Without storage a loss leaves nothing.
    assert play(OUTLOOKS[1], 2.0, [], 84.1, [84.0]).useful_s == 0.0


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
    assert recorded_failures(text, 3600.0) == RecordedFailures((36_000.0, 108_000.0), 144_000.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the record has no failure"),
        ("0\n", "the record has no failure"),
        ("0,0\n9,0\n", "the record has no failure"),
        ("0,2\n9,3\n", "the record has no failure"),
        ("1\nsoon\n", "line 2, 'soon', is no time, or time and nodes"),
        ("1,2,3\n", "line 1, '1,2,3', is no time, or time and nodes"),
        ("1,2\n3\n", "line 2, '3', is no time, or time and nodes"),
        ("-1\n", "line 1, '-1': must be 0 or more"),
        ("nan\n", "line 1, 'nan': must be 0 or more"),
        ("5\n4\n", "line 2, '4': is before the line above it"),
    ],
)
def test_what_is_no_record(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recorded_failures(text)
