"""DistributedDataParallel: every case is exact through SIGKILL and replay, on every rank;
``CKPTD_LONG=1`` plays all of them.
"""

from __future__ import annotations

import uuid

import pytest

from tests.e2e.harness import DaemonProcess, Jobs
from tests.e2e.parallel.checks import assert_exact_through_a_kill, assert_noticed_when_left_out
from tests.e2e.parallel.ddp import CASES
from tests.e2e.parallel.registry import Case
from tests.e2e.ranks import Ranks, story
from tests.long import long


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.parameters())
def test_exact_through_a_kill(jobs: Jobs, daemon: DaemonProcess, case: Case) -> None:
    assert_exact_through_a_kill(jobs, daemon, case)


@pytest.mark.slow
def test_what_is_left_out_is_noticed(jobs: Jobs, daemon: DaemonProcess) -> None:
    """The negative control of the tests above."""
    assert_noticed_when_left_out(jobs, daemon, CASES.cases["plain"], "frozen weights", rank=1)


@pytest.mark.slow
@long
def test_what_is_not_handed_over_is_noticed(jobs: Jobs, daemon: DaemonProcess) -> None:
    """Rank 1 keeps one wrong weight that rank 0 has recorded for both: the mean gradient is another."""
    assert_noticed_when_left_out(jobs, daemon, CASES.cases["plain"], "handed weights", rank=1)


@pytest.mark.slow
@long
def test_random_state_that_is_left_out_is_noticed(jobs: Jobs, daemon: DaemonProcess) -> None:
    """Dropout then drops others than it did."""
    assert_noticed_when_left_out(jobs, daemon, CASES.cases["plain"], "random state", rank=1)


@pytest.mark.slow
@long
def test_what_is_damaged_on_the_way_is_noticed(jobs: Jobs, daemon: DaemonProcess) -> None:
    """Rank 1 has not recorded it, and nothing is recomputed from it before replay ends: only rank 0
    has the same to compare.
    """
    assert_noticed_when_left_out(jobs, daemon, CASES.cases["plain"], "handed state", rank=1)


@pytest.mark.slow
@long
def test_a_rank_that_cannot_load_leaves_nobody_waiting(jobs: Jobs, daemon: DaemonProcess) -> None:
    """The other would wait for its broadcasts, for half an hour."""
    run = uuid.uuid4().hex[:8]
    Ranks(jobs, run, case="ddp/plain", killed=1).end_by_the_death_of(1)
    life = Ranks(jobs, run, case="ddp/plain", each={1: ("--leave-out", "group options")})
    try:
        for process, _ in life.started:
            process.join(60)
        assert [process.exitcode for process, _ in life.started] == [1, 1], story(daemon, run, life)
    finally:
        life.kill()
    assert "rank 1 on node" in jobs.log(life.started[0][1])


@pytest.mark.slow
def test_the_table_tells_what_is_replicated(jobs: Jobs) -> None:
    life = Ranks(jobs, "layout-ddp", "--step-ms", "100", case="ddp/plain", total=16)
    told = jobs.report(life.end()[1])["describe"]
    assert "parameters replicated over 2 ranks (DistributedDataParallel): 21 (embed.weight)" in told
    captured = [line.split()[-1] for line in told.splitlines() if line.startswith("blocks.")]
    assert set(captured) == {"0", "1"}, told
