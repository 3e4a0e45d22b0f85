"""Low precision, killed and resumed: FP8 weights with scales, FP8 moments, and moments that are made of
several tensors come back to the bit, and no snapshot has more bytes than their dtypes.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest

from tests.e2e.compare import differences
from tests.e2e.harness import Jobs
from tests.e2e.precision_cases import PRECISION_CASES
from tests.long import long

TOTAL, KILL_AT = 14, 10
SLIDING: dict[str, Any] = {"window": 4}
DENSE: dict[str, Any] = {"policy": "dense"}
QUICK = {"precision_fp8_lm", "precision_early", "precision_delayed", "precision_blocks"}


@pytest.mark.parametrize(
    ("case", "options"),
    [
        pytest.param(case, options, marks=[] if options is SLIDING and case in QUICK else long)
        for case in PRECISION_CASES
        for options in (SLIDING, DENSE)
    ],
)
def test_resumes_at_the_exact_bits(jobs: Jobs, case: str, options: dict[str, Any]) -> None:
    """The scale of a weight is computed from its master, which a replay does not know while it is frozen: the
    first replay of such a job ended with a mismatch of buffers.
    """
    options = {"window": None, **options}
    told = [part for key, value in options.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    told += ["--total", str(TOTAL), "--run", uuid.uuid4().hex[:8]]
    reference = jobs.run(case, "--total", str(TOTAL), daemon="none")
    kill = ("--kill-at", str(KILL_AT), "--kill-point", "backward", "--kill-sealed")
    jobs.run(case, *told, *kill, expect_killed=True)
    resumed = jobs.run(case, *told, "--seed", "77", "--verify")
    report = jobs.report(resumed)
    assert report["resumed_from"] is not None, jobs.log(resumed)
    assert report["replayed_steps"] >= (options["window"] or 1) - 1
    assert differences(reference, resumed) == []
    assert report["identical"], report["certificate"]
