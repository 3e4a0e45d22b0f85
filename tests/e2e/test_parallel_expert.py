"""Expert parallelism by hand: every case is exact through SIGKILL and replay, on every rank;
``CKPTD_LONG=1`` plays all of them.
"""

from __future__ import annotations

import pytest

from tests.e2e.harness import DaemonProcess, Jobs
from tests.e2e.parallel.checks import assert_exact_through_a_kill, assert_noticed_when_left_out
from tests.e2e.parallel.expert import CASES
from tests.e2e.parallel.registry import Case
from tests.long import long_since


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.parameters())
def test_exact_through_a_kill(jobs: Jobs, daemon: DaemonProcess, case: Case) -> None:
    assert_exact_through_a_kill(jobs, daemon, case)


@pytest.mark.slow
@long_since("ZeRO's and DDP's stand for it")
def test_what_is_left_out_is_noticed(jobs: Jobs, daemon: DaemonProcess) -> None:
    """The negative control: each rank has noise of its own in gates and dropout; one draws other numbers."""
    assert_noticed_when_left_out(jobs, daemon, CASES.cases["by_hand"], "random state", rank=1)
