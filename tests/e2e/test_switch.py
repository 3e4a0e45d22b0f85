"""Ranks that change their schedule while training do so at one iteration, and come back exactly
from before and after it.
"""

from __future__ import annotations

import re

import pytest

from tests.e2e.compare import differences
from tests.e2e.harness import DaemonProcess, Jobs
from tests.e2e.ranks import Ranks, story
from tests.long import long

TOTAL = 800
# Rank 1's copies stall it: dense ones for a good part of a step, half of them for less.
SLOW = {1: ("--slow-copies", "5")}
AUTO = ("--set", "window=null", "--step-ms", "10")


def changed_at(daemon: DaemonProcess, run: str, why: str) -> list[int]:
    """The iterations from which on each rank went by another schedule, in the order in which the ranks told."""
    told = [text for text in daemon.events("schedule_changed", run) if why in text]
    return [int(re.findall(r"from iteration (\d+)", text)[0]) for text in told]


@pytest.mark.slow
@long  # whether copies are slow enough, and who hears of it before rank 0 dies, is a matter of the machine
@pytest.mark.parametrize("later", [1, 12])
def test_both_widen_at_one_iteration_and_resume_exactly(
    jobs: Jobs, daemon: DaemonProcess, run: str, later: int
) -> None:
    """Killed right after the change both go back to before it; a little later, to a suffix of the
    wider window.
    """
    dies = ("--kill-after-wider-window", str(later))
    each = {0: dies, 1: SLOW[1]}
    before = Ranks(jobs, run, *AUTO, case="table", each=each, total=TOTAL)
    before.end_by_the_death_of(0)
    changes = changed_at(daemon, run, "copies take too long")
    assert len(changes) == 2, story(daemon, run, before)
    assert len(set(changes)) == 1, story(daemon, run, before)
    total = changes[0] + 40
    references = Ranks(jobs, run, case="table", daemon="none", total=total).end()
    after = Ranks(jobs, run, *AUTO, "--seed", "7", case="table", each=SLOW, total=total)
    outs = after.end()
    reports = [jobs.report(out) for out in outs]
    resumed = {report["resumed_from"] for report in reports}
    assert len(resumed) == 1, story(daemon, run, before, after)
    (iteration,) = resumed
    if later == 1:
        assert changes[0] - 3 <= iteration <= changes[0] + 1, story(daemon, run, before, after)
    else:
        assert iteration > changes[0], story(daemon, run, before, after)
        assert all(report["window"] >= 2 for report in reports)
    for reference, out in zip(references, outs, strict=True):
        assert differences(reference, out) == []


@pytest.mark.slow
@long
def test_an_order_by_popularity_is_the_same_on_both_and_resumes_exactly(
    jobs: Jobs, daemon: DaemonProcess, run: str
) -> None:
    """The chain goes on across it: what is replayed begins under the order before."""
    options = ("--step-ms", "20")
    before = Ranks(jobs, run, *options, killed=0, kill_at=200, total=210)
    before.end_by_the_death_of(0)
    changes = changed_at(daemon, run, "popularity")
    assert len(changes) >= 2, story(daemon, run, before)
    assert changes[0] == changes[1], story(daemon, run, before)
    references = Ranks(jobs, run, daemon="none", total=210).end()
    after = Ranks(jobs, run, *options, "--seed", "7", total=210)
    outs = after.end()
    resumed = {jobs.report(out)["resumed_from"] for out in outs}
    assert len(resumed) == 1, story(daemon, run, before, after)
    for reference, out in zip(references, outs, strict=True):
        assert differences(reference, out) == []
