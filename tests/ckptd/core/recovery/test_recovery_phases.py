"""How long each phase of a recovery took follows from when the phases ended, and adds up to the whole."""

from __future__ import annotations

import math
import random

import pytest

from ckptd.core.recovery.recovery_phases import (
    RecoveryPhase,
    RecoveryTrace,
    describe_phases,
    parse_phases,
    phase_metrics,
    phases_in_metrics,
)

Phase = RecoveryPhase


def traced(**ends_s: float) -> RecoveryTrace:
    trace = RecoveryTrace()
    for name, at_s in ends_s.items():
        trace.note(Phase(name), at_s)
    return trace


def test_a_phase_lasts_from_the_end_of_the_one_before() -> None:
    trace = traced(detected=100.0, others_stopped=101.5, process_there=102.0, imports=105.0)
    assert trace.durations == {Phase.OTHERS_STOPPED: 1.5, Phase.PROCESS_THERE: 0.5, Phase.IMPORTS: 3.0}


def test_what_is_not_known_is_absent_and_its_time_in_the_next_phase() -> None:
    """The daemon was restarted: nobody knows when the others ended. And there was nothing to replay."""
    trace = traced(process_there=102.0, imports=105.0, loaded=106.0, first_new_step=106.25)
    assert trace.durations == {Phase.IMPORTS: 3.0, Phase.LOADED: 1.0, Phase.FIRST_NEW_STEP: 0.25}


@pytest.mark.parametrize("known", [0, 1])
def test_one_point_in_time_is_no_duration(known: int) -> None:
    trace = traced(**{"imports": 5.0} if known else {})
    assert trace.durations == {}
    assert len(trace.ends) == known
    assert trace.describe() == ("0.000 s from imports to imports: -" if known else "no phase is known")


def test_the_durations_add_up_to_the_whole() -> None:
    draw = random.Random(7)
    for _ in range(200):
        trace, times = RecoveryTrace(), sorted(draw.uniform(0, 100) for _ in Phase)
        known = [phase for phase in Phase if draw.random() < 0.7]
        at_s = dict(zip(Phase, times, strict=True))
        for phase in draw.sample(known, len(known)):
            trace.note(phase, at_s[phase])
        assert list(trace.ends) == known
        assert list(trace.durations) == known[1:]
        whole = at_s[known[-1]] - at_s[known[0]] if known else 0.0
        assert sum(trace.durations.values()) == pytest.approx(whole)


def test_an_end_after_that_of_a_later_phase_is_left_out() -> None:
    """A daemon that was busy found the old process dead when the new one was there already."""
    trace = traced(detected=103.0, others_stopped=101.0, process_there=102.0, imports=105.0)
    assert trace.durations == {Phase.PROCESS_THERE: 1.0, Phase.IMPORTS: 3.0}


def test_the_plan_that_counts_is_the_last_one() -> None:
    """One rank could not have what the first plan wanted: all ask again what there is, and plan again."""
    trace = traced(attach=1.0)
    for phase, at_s in ((Phase.INVENTORY, 2.0), (Phase.PLAN, 3.0), (Phase.FIRST_BYTES, 4.0)):
        trace.reach(phase, at_s)
    trace.reach(Phase.INVENTORY, 7.0)
    assert trace.durations == {Phase.INVENTORY: 6.0}, "nothing of the first plan is left"
    trace.reach(Phase.PLAN, 8.5)
    assert trace.durations == {Phase.INVENTORY: 6.0, Phase.PLAN: 1.5}


def test_a_line_names_the_whole_and_each_phase() -> None:
    trace = traced(detected=100.0, process_there=100.5, first_new_step=103.25)
    text = "3.250 s from detected to first_new_step: process_there 0.500 s, first_new_step 2.750 s"
    assert trace.describe() == text


def test_phases_are_found_again_among_other_counters() -> None:
    durations = {Phase.IMPORTS: 3.0, Phase.PLAN: 0.5}
    metrics = {"steps": 7.0, **dict(reversed(phase_metrics(durations).items())), "phase_of_the_moon_s": 1.0}
    assert list(phases_in_metrics(metrics).items()) == list(durations.items())
    assert describe_phases(phases_in_metrics({})) == "-"


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_a_duration_that_can_be_none_is_left_out(seconds: float) -> None:
    """A trainer may report anything; a histogram would keep it for as long as the daemon runs."""
    metrics = phase_metrics({Phase.IMPORTS: seconds, Phase.PLAN: 0.5})
    assert phases_in_metrics(metrics) == {Phase.PLAN: 0.5}


def test_described_phases_can_be_read_again() -> None:
    durations = {Phase.IMPORTS: 3.365, Phase.PLAN: 0.0, Phase.FIRST_NEW_STEP: 12.5}
    text = f"the first new iteration is 61: 15.865 s from process_there to first_new_step: {describe_phases(durations)}"
    assert parse_phases(text) == durations
    assert parse_phases("-") == parse_phases("reimports 1.000 s, plan 3 s") == {}
