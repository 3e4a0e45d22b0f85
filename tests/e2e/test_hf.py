"""Mixture-of-experts models of Hugging Face transformers, unmodified, through kill and replay."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.compare import differences
from tests.e2e.harness import DaemonProcess
from tests.e2e.lives import Life, Parent, Run
from tests.long import long

pytest.importorskip("transformers", reason="transformers is not installed: pip install ckptd[test]")

TOTAL, KILL_AT = 13, 10
LAYERS, EXPERTS = 2, 4


@pytest.fixture(scope="module")
def parent() -> Iterator[Parent]:
    """It has the models imported, which takes longer than a life."""
    families = [
        f"transformers.models.{name}.modeling_{name}" for name in ("mixtral", "deepseek_v3", "gpt_oss")
    ]
    with Parent("tests.e2e.job", "tests.e2e.hf_cases", *families) as made:
        yield made


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("hf_mixtral", marks=long),
        "hf_mixtral_autocast",
        pytest.param("hf_qwen3_moe", marks=long),
        pytest.param("hf_olmoe", marks=long),
        "hf_deepseek_v3",
        "hf_gpt_oss",
    ],
)
def test_resumes_at_the_exact_bits(parent: Parent, daemon: DaemonProcess, tmp_path: Path, case: str) -> None:
    """Found without help as slices of fused tensors, replayed with weight gradients skipped,
    identical to the bit.
    """
    total = ("--total", str(TOTAL))
    plain, run = Life(tmp_path / "plain.pt", case, *total), Run(tmp_path, daemon, case, *total)
    killed = run.life("--kill-at", str(KILL_AT), "--kill-point", "step", "--kill-sealed")
    resumed = run.life("--seed", "77", "--verify")
    codes = parent.live([[plain, killed], [resumed]])
    assert codes == [[0, -signal.SIGKILL], [0]], plain.log + killed.log + resumed.log
    report = json.loads(resumed.out.with_suffix(".json").read_text())
    assert report["resumed_from"] == KILL_AT, resumed.log
    assert report["replayed_steps"] == 4
    assert differences(plain.out, resumed.out) == []
    assert report["identical"], report["certificate"]
    assert _kinds(report["describe"])["expert"] == LAYERS * EXPERTS, report["describe"]
    assert _kinds(report["describe"])["gate"] == LAYERS, report["describe"]
    assert "freezing in replay: inputs" in report["describe"]


def _kinds(table: str) -> dict[str, int]:
    """How many operators of each kind the printed table has."""
    rows = [line.split() for line in table.splitlines()]
    kinds = [row[1] for row in rows if len(row) > 6]
    return {kind: kinds.count(kind) for kind in ("expert", "gate", "dense")}
