"""Experts trained on shards of all ranks: each shard is captured by the rank that owns it, and
exact through SIGKILL and replay.
"""

from __future__ import annotations

import pytest

from tests.e2e.harness import DaemonProcess, Jobs
from tests.e2e.parallel.checks import assert_exact_through_a_kill
from tests.e2e.parallel.registry import Case
from tests.e2e.parallel.shards import CASES


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.parameters())
def test_exact_through_a_kill(jobs: Jobs, daemon: DaemonProcess, case: Case) -> None:
    assert_exact_through_a_kill(jobs, daemon, case)
