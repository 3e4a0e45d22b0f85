"""Mixture-of-experts models of Hugging Face transformers, unmodified, through kill and replay."""

from __future__ import annotations

import signal
import uuid

import pytest

from tests.e2e.compare import differences
from tests.e2e.harness import Jobs
from tests.long import long

pytest.importorskip("transformers", reason="transformers is not installed: pip install ckptd[test]")

TOTAL, KILL_AT = 13, 10
LAYERS, EXPERTS = 2, 4


@pytest.mark.parametrize(
    "case",
    [
        "hf_mixtral",
        "hf_mixtral_autocast",
        pytest.param("hf_qwen3_moe", marks=long),
        pytest.param("hf_olmoe", marks=long),
        "hf_deepseek_v3",
        "hf_gpt_oss",
    ],
)
def test_resumes_at_the_exact_bits(jobs: Jobs, case: str) -> None:
    """Found without help as slices of fused tensors, replayed with weight gradients skipped,
    identical to the bit.
    """
    total, run = ("--total", str(TOTAL)), ("--run", uuid.uuid4().hex[:8])
    # Most of a job's time is importing transformers: the undisturbed and the killed one run side by side.
    killed, _ = jobs.start(case, *total, *run, "--kill-at", str(KILL_AT), "--kill-point", "step")
    reference = jobs.run(case, *total, daemon="none")
    killed.join(120)
    assert killed.exitcode == -signal.SIGKILL
    resumed = jobs.run(case, *total, *run, "--seed", "77", "--verify")
    report = jobs.report(resumed)
    assert report["resumed_from"] == KILL_AT, jobs.log(resumed)
    assert report["replayed_steps"] == 4
    assert differences(reference, resumed) == []
    assert report["identical"], report["certificate"]
    assert _kinds(report["describe"])["expert"] == LAYERS * EXPERTS, report["describe"]
    assert _kinds(report["describe"])["gate"] == LAYERS, report["describe"]
    assert "freezing in replay: inputs" in report["describe"]


def _kinds(table: str) -> dict[str, int]:
    """How many operators of each kind the printed table has."""
    rows = [line.split() for line in table.splitlines()]
    kinds = [row[1] for row in rows if len(row) > 6]
    return {kind: kinds.count(kind) for kind in ("expert", "gate", "dense")}
