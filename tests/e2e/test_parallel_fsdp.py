"""FSDP2 and HSDP: every case is exact through SIGKILL and replay, on every rank; ``CKPTD_LONG=1``
plays all of them.
"""

from __future__ import annotations

import pytest

from tests.e2e.harness import DaemonProcess, Jobs
from tests.e2e.parallel.checks import assert_exact_through_a_kill, assert_noticed_when_left_out
from tests.e2e.parallel.fsdp import CASES
from tests.e2e.parallel.registry import Case
from tests.e2e.ranks import Ranks


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.parameters())
def test_exact_through_a_kill(jobs: Jobs, daemon: DaemonProcess, case: Case) -> None:
    assert_exact_through_a_kill(jobs, daemon, case)


@pytest.mark.slow
def test_what_is_left_out_is_noticed(jobs: Jobs, daemon: DaemonProcess) -> None:
    """The negative control of the tests above."""
    assert_noticed_when_left_out(jobs, daemon, CASES.cases["plain"], "frozen weights", rank=1)


@pytest.mark.slow
def test_the_table_tells_what_is_sharded(jobs: Jobs) -> None:
    life = Ranks(jobs, "layout-fsdp", case="fsdp/hsdp", world_size=4, total=6)
    told = jobs.report(life.end()[3])["describe"]
    placed = "replicated over 2 ranks (replicate), sharded along 0 over 2 ranks (shard)"
    assert f"parameters {placed}: 21 (embed.weight)" in told
