"""What happens to one rank alone does not shift its phase against the others: they come back
together, exactly.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.e2e.compare import differences
from tests.e2e.harness import DaemonProcess, Jobs
from tests.e2e.ranks import Ranks, story
from tests.e2e.test_switch import changed_at
from tests.long import long

ODD_AT = 6


def come_back(
    jobs: Jobs,
    daemon: DaemonProcess,
    run: str,
    before: Ranks,
    *,
    total: int,
    each: Mapping[int, tuple[str, ...]],
) -> int:
    """Restart after the death of rank 0; the iteration to which both come back, at the exact bits."""
    references = Ranks(jobs, run, each=each, daemon="none", total=total).end()
    after = Ranks(jobs, run, "--seed", "7", each=each, total=total)
    outs = after.end()
    resumed = {jobs.report(out)["resumed_from"] for out in outs}
    assert len(resumed) == 1, story(daemon, run, before, after)
    (iteration,) = resumed
    assert iteration is not None, story(daemon, run, before, after)
    for reference, out in zip(references, outs, strict=True):
        assert differences(reference, out) == []
    return int(iteration)


@pytest.mark.slow
def test_a_rank_that_holds_gradients_at_one_boundary_stays_in_phase(
    jobs: Jobs, daemon: DaemonProcess, run: str
) -> None:
    """Its loss scaler skipped a step, say. Counting boundaries, it was a phase behind for good, and
    nothing could be resumed.
    """
    # The replicas are unlike from then on: what one of them captured for both would not be the other's.
    each = {
        0: ("--set", "capture_once=false"),
        1: ("--set", "capture_once=false", "--odd-step", f"{ODD_AT}:skip"),
    }
    before = Ranks(jobs, run, each=each, killed=0, kill_at=18, total=30)
    before.end_by_the_death_of(0)
    resumed = come_back(jobs, daemon, run, before, total=24, each=each)
    # Rank 1 lacks the snapshot after the odd step; the four that follow are enough.
    assert resumed in range(ODD_AT + 5, 19), story(daemon, run, before)


@pytest.mark.slow
@long
def test_all_take_dense_snapshots_where_one_rank_must(jobs: Jobs, daemon: DaemonProcess, run: str) -> None:
    """It updated twice within a step: with sparse snapshots of the others no replay of both would be exact."""
    # As above, the replicas are unlike from then on.
    own = ("--set", "capture_once=false")
    odd = (*own, "--odd-step", f"{ODD_AT}:twice")
    life = {0: (*own, "--kill-after-new-window", "4"), 1: odd}
    before = Ranks(jobs, run, "--step-ms", "20", each=life, total=800)
    before.end_by_the_death_of(0)
    changes = changed_at(daemon, run, "second update")
    assert len(changes) == 2, story(daemon, run, before)
    assert len(set(changes)) == 1, story(daemon, run, before)
    each = {0: own, 1: odd}
    resumed = come_back(jobs, daemon, run, before, total=changes[0] + 10, each=each)
    assert resumed >= changes[0], story(daemon, run, before)


@pytest.mark.slow
@long
def test_one_that_accumulates_gradients_over_steps_anchors_everything(
    jobs: Jobs, daemon: DaemonProcess, run: str
) -> None:
    """Snapshots can be taken at every third iteration only: in a window of three all of them would
    fall on one phase.
    """
    case, kill_at, total, three = "spread", 29, 33, ("--set", "window=3")
    references = Ranks(jobs, run, *three, case=case, daemon="none", total=total).end()
    before = Ranks(jobs, run, *three, case=case, killed=0, kill_at=kill_at, total=total)
    before.end_by_the_death_of(0)
    after = Ranks(jobs, run, *three, "--seed", "7", case=case, total=total)
    outs = after.end()
    resumed = {jobs.report(out)["resumed_from"] for out in outs}
    assert len(resumed) == 1, story(daemon, run, before, after)
    assert resumed <= set(range(kill_at - 6, kill_at + 1)), story(daemon, run, before, after)
    for reference, out in zip(references, outs, strict=True):
        assert differences(reference, out) == []
