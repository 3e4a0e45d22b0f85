"""ZeroRedundancyOptimizer: every case is exact through SIGKILL and replay, on every rank;
``CKPTD_LONG=1`` plays all of them.
"""

from __future__ import annotations

import pytest

from tests.e2e.harness import DaemonProcess, Jobs
from tests.e2e.parallel.checks import assert_exact_through_a_kill, assert_noticed_when_left_out
from tests.e2e.parallel.registry import Case
from tests.e2e.parallel.zero import CASES


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.parameters())
def test_exact_through_a_kill(jobs: Jobs, daemon: DaemonProcess, case: Case) -> None:
    assert_exact_through_a_kill(jobs, daemon, case)


@pytest.mark.slow
def test_what_is_left_out_is_noticed(jobs: Jobs, daemon: DaemonProcess) -> None:
    """The negative control: one rank takes what another updates for its own, and believes its anchors.

    The ranks' schedules differ, so the owner sends old weights after this rank's anchor was reached.
    """
    assert_noticed_when_left_out(jobs, daemon, CASES.cases["plain"], "elsewhere", rank=1)
