"""Ranks that do not hold the same: one lost its chain, or needs a longer window. What all of them
hold must stay.
"""

from __future__ import annotations

import pytest

from tests.e2e.compare import differences
from tests.e2e.harness import DaemonProcess, Jobs
from tests.e2e.ranks import KILL_AT, Ranks

_BROKEN_AT = KILL_AT - 3


def _resumed(jobs: Jobs, run: str, life: Ranks, *options: str, daemon: DaemonProcess) -> int:
    """Restart after the death of rank 0; returns the iteration to which both came back, at the exact bits."""
    references = Ranks(jobs, run, *options, daemon="none").end()
    life.end_by_the_death_of(0)
    outs = Ranks(jobs, run, "--seed", "7", *options).end()
    resumed = {jobs.report(out)["resumed_from"] for out in outs}
    logs = "\n".join(jobs.log(out) for _, out in life.started) + str(daemon.events("placement", run))
    assert len(resumed) == 1, (resumed, logs)
    for reference, out in zip(references, outs, strict=True):
        assert differences(reference, out) == []
    (iteration,) = resumed
    assert iteration is not None, logs
    return int(iteration)


@pytest.mark.slow
@pytest.mark.parametrize("broken", [0, 1])
def test_where_one_rank_lost_its_chain_the_others_keep_what_it_still_has(
    jobs: Jobs, daemon: DaemonProcess, run: str, broken: int
) -> None:
    """Its newest suffix ends at the break; the other rank's ring would have moved on by now."""
    life = Ranks(jobs, run, killed=0, each={broken: ("--break-at", str(_BROKEN_AT)), 1 - broken: ()})
    assert _resumed(jobs, run, life, daemon=daemon) in (_BROKEN_AT - 1, _BROKEN_AT)


@pytest.mark.slow
def test_ranks_with_different_windows_come_back_together(jobs: Jobs, daemon: DaemonProcess, run: str) -> None:
    """The one with the short window keeps as much as the one with the long window needs to replay."""
    windows = {0: ("--set", "window=5"), 1: ("--set", "window=1")}
    life = Ranks(jobs, run, each=windows, killed=0)
    assert _resumed(jobs, run, life, daemon=daemon) in range(KILL_AT - 5, KILL_AT + 1)
