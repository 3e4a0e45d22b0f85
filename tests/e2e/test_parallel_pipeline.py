"""Pipeline parallelism: every case is exact through SIGKILL and replay, on every rank;
``CKPTD_LONG=1`` plays all of them.
"""

from __future__ import annotations

import uuid

import pytest

from tests.e2e.compare import differences
from tests.e2e.harness import DaemonProcess, Jobs
from tests.e2e.parallel.checks import assert_exact_through_a_kill, assert_noticed_when_left_out
from tests.e2e.parallel.pipeline import CASES
from tests.e2e.parallel.registry import Case
from tests.e2e.ranks import Ranks
from tests.long import long_since


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.parameters())
def test_exact_through_a_kill(jobs: Jobs, daemon: DaemonProcess, case: Case) -> None:
    reports = assert_exact_through_a_kill(jobs, daemon, case)
    if case is CASES.cases["in_bubbles"]:
        for report in reports:
            assert report["in_bubbles"], report["describe"]
            assert report["bubble_bytes"] > 0, report["describe"]
            assert "bubbles of Schedule1F1B: " in report["describe"]


@pytest.mark.slow
def test_a_norm_that_is_not_recorded_is_noticed_and_the_next_start_computes_it(jobs: Jobs) -> None:
    """A norm over all stages, computed by hand, and ``freeze="inputs"``: frozen weights' gradients
    are missing in it.

    The rank that notices leaves a hint, and all ranks heed it: were it only that rank, the next
    replay would be wrong again, on the others' part of the norm.
    """
    run = uuid.uuid4().hex[:8]
    references = Ranks(jobs, run, case="forgotten/record", daemon="none").end()
    Ranks(jobs, run, case="forgotten/record", killed=1).end_by_the_death_of(1)
    logs = Ranks(jobs, run, "--seed", "7", case="forgotten/record").end_by_a_failure()
    assert "ReplayMismatch: replay of iteration" in logs, logs
    after = Ranks(jobs, run, "--seed", "8", case="forgotten/record")
    for reference, out in zip(references, after.end(), strict=True):
        report = jobs.report(out)
        assert report["replayed_with_frozen"] > 0, after.logs
        assert "freezing in replay: drop (an earlier replay" in report["describe"]
        assert differences(reference, out) == [], after.logs


@pytest.mark.slow
@long_since("ZeRO's and DDP's stand for it")
def test_what_is_left_out_is_noticed(jobs: Jobs, daemon: DaemonProcess) -> None:
    """The negative control: a frozen weight of the first stage is missing."""
    assert_noticed_when_left_out(jobs, daemon, CASES.cases["interleaved"], "frozen weights")
