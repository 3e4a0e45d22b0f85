"""Every kind of job: killed abruptly, resumed by a fresh process with another initialisation,
identical to the bit.
"""

from __future__ import annotations

import uuid

import pytest

from tests.e2e.cases import CASES
from tests.e2e.compare import differences
from tests.e2e.harness import Jobs
from tests.long import long

TOTAL = 15
# Where a snapshot is taken only at every third boundary, a window is longer; measured on so small a
# model, too.
_TOTALS = {"auto_window": 34, "spread": 30, "dense_every": 15, "aligned": 18, "growing_state": 26}
# They hold an iterator of their own, which no one can take back within the process.
_CANNOT_REWIND = ("loader_early", "loader_late")
# What differs from another case in the optimizer's arithmetic alone, joins two others, or has a
# quicker test in tests/client.
_OFF_DIAGONAL = {
    "adadelta",
    "adagrad",
    "adamax",
    "adafactor_fused",
    "asgd",
    "autocast_fused",
    "fused_drop",
    "nadam",
    "radam",
    "rmsprop",
    "rprop",
    "moved_storage_dense",
    "masters_given",
    "window1",
    "dense_every",
    "amsgrad",
    "adamw_fused",
    "loader_early",
    "reentrant",
    "sgd",
    "drop",
    "checkpoint",
    "plateau",
    "adafactor",
    "sgd_slices",
    "own_optimizer",
    "alternating",
    "moved_storage",
    "uneven",
    "failing_state",
    "growing_state",
    "groups",
    "bf16",
    "zero_first",
}
_KILLS = {"auto_window": 30, "late_state": 13, "growing_state": 22, "spread": 25}


def test_user_code_that_reads_all_gradients_falls_back_to_dropping_them(jobs: Jobs) -> None:
    """With ``freeze="inputs"`` a norm computed by hand misses the frozen gradients: noticed, not
    trained on, and the next start of the run replays with gradients dropped instead, exactly.
    """
    run = uuid.uuid4().hex[:8]
    reference = jobs.run("own_norm", "--total", "15", daemon="none")
    jobs.run(
        "own_norm", "--total", "15", "--run", run, "--kill-at", "11", "--kill-sealed", expect_killed=True
    )
    process, out = jobs.start("own_norm", "--total", "15", "--run", run, "--seed", "77")
    process.join(60)
    assert process.exitcode == 1
    assert "ReplayMismatch: replay of iteration" in jobs.log(out)
    resumed = jobs.run("own_norm", "--total", "15", "--run", run, "--seed", "78")
    assert jobs.report(resumed)["resumed_from"] == 11
    assert differences(reference, resumed) == []


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=long) if c in _OFF_DIAGONAL else c
        for c in CASES
        if c not in ("own_norm", "large_table")
    ],
)
def test_resumes_at_the_exact_bits(jobs: Jobs, case: str) -> None:
    """Killed inside a step, the job goes on as if nothing had happened: torch.equal on everything,
    random state included.
    """
    total, kill = str(_TOTALS.get(case, TOTAL)), str(_KILLS.get(case, 11))
    run = uuid.uuid4().hex[:8]
    reference = jobs.run(case, "--total", total, daemon="none")
    jobs.run(
        case,
        "--total",
        total,
        "--run",
        run,
        "--kill-at",
        kill,
        "--kill-point",
        "backward",
        expect_killed=True,
    )
    verify = [] if case in _CANNOT_REWIND else ["--verify"]
    resumed = jobs.run(case, "--total", total, "--run", run, "--seed", "77", *verify)
    report = jobs.report(resumed)
    assert report["resumed_from"] is not None, jobs.log(resumed)
    assert differences(reference, resumed) == []
    assert not verify or report["identical"], report["certificate"]


def test_a_verification_in_mid_run_leaves_no_trace(jobs: Jobs) -> None:
    """What the running step recorded for replay (its norm) is kept through ``verify`` and still
    there after a kill.
    """
    run = uuid.uuid4().hex[:8]
    options = ("--total", "15", "--run", run, "--verify-at", "9")
    reference = jobs.run("plain", "--total", "15", daemon="none")
    jobs.run("plain", *options, "--kill-at", "11", expect_killed=True)
    resumed = jobs.run("plain", "--total", "15", "--run", run, "--seed", "77")
    # On a busy machine the copies of its last snapshot may not have been complete.
    assert jobs.report(resumed)["resumed_from"] in (10, 11)
    assert differences(reference, resumed) == []


def test_a_loop_that_is_left_and_entered_again_goes_on(jobs: Jobs) -> None:
    """The boundary between two loops is seen twice; its snapshot is replaced, not linked to itself."""
    run = uuid.uuid4().hex[:8]
    reference = jobs.run("plain", "--total", "15", daemon="none")
    jobs.run(
        "plain",
        "--total",
        "15",
        "--run",
        run,
        "--split",
        "9",
        "--kill-at",
        "10",
        "--kill-sealed",
        expect_killed=True,
    )
    resumed = jobs.run("plain", "--total", "15", "--run", run, "--seed", "77")
    assert jobs.report(resumed)["resumed_from"] == 10
    assert differences(reference, resumed) == []
