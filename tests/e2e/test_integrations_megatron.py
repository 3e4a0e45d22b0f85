"""Megatron-Core's optimizers through SIGKILL: every bit of each rank's weights, main weights, moments, random states.

Megatron itself is real; CUDA is not (``megatron_on_cpu``).
"""

from __future__ import annotations

import signal
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.harness import DaemonProcess
from tests.e2e.lives import Parent
from tests.e2e.two_ranks import TwoRanks
from tests.long import long

pytestmark = pytest.mark.skipif(
    find_spec("megatron") is None, reason="megatron-core is not installed: pip install 'ckptd[megatron]'"
)

JOB, KILL_AT = "tests.e2e.megatron_job", 10
KILLED = -signal.SIGKILL
EP, ZERO = ("--expert-parallel", "2"), "--distributed-optimizer"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((*EP, ZERO), id="experts apart, distributed optimizer"),
        pytest.param((ZERO, "--precision", "fp16"), marks=long, id="fp16, distributed optimizer"),
        pytest.param((*EP, ZERO, "--precision", "fp32"), marks=long, id="fp32, distributed optimizer"),
        pytest.param((*EP,), marks=long, id="experts apart"),
        pytest.param(("--precision", "fp32", "--optimizer", "sgd"), marks=long, id="fp32, sgd"),
        pytest.param(("--tensor-parallel", "2", ZERO), marks=long, id="tensor parallel"),
        pytest.param(("--pipeline", "2", ZERO), marks=long, id="pipeline"),
        pytest.param((*EP, ZERO, "--policy", "dense"), marks=long, id="dense"),
        pytest.param((ZERO, "--capture-each"), marks=long, id="captured by each"),
    ],
)
def test_resumes_at_the_exact_bits(tmp_path: Path, daemon: DaemonProcess, options: tuple[str, ...]) -> None:
    """The seed of the second life is another one: whatever was not restored shows."""
    ranks = TwoRanks(tmp_path, daemon, KILL_AT, *options, again=("--seed", "9"))
    with Parent(JOB, ends_with_one=True) as parent:
        ranks.live(parent)
    ranks.check(range(1, KILL_AT + 1))
    alone = {
        "--capture-each",
        "--tensor-parallel",
        "--pipeline",
    }  # no data-parallel rank holds the same weights
    table = ranks.resumed[0].log.rpartition("captured by")[2]
    assert ("rank 1" in table) == alone.isdisjoint(options), table
