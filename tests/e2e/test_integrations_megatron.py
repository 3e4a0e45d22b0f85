"""Megatron-Core's optimizers through SIGKILL: every bit of each rank's weights, main weights, moments, random states.

Megatron itself is real; CUDA is not (``megatron_on_cpu``).
"""

from __future__ import annotations

import signal
import uuid
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.compare import differences
from tests.e2e.harness import DaemonProcess
from tests.e2e.lives import Life, Parent, Run, resumed_at
from tests.long import long
from tests.ports import free_ports

pytestmark = pytest.mark.skipif(
    find_spec("megatron") is None, reason="megatron-core is not installed: pip install 'ckptd[megatron]'"
)

JOB, KILL_AT = "tests.e2e.megatron_job", 10
KILLED = -signal.SIGKILL
EP, ZERO = ("--expert-parallel", "2"), "--distributed-optimizer"


def played(folder: Path, daemon: DaemonProcess, *options: str) -> tuple[list[Life], list[Life]]:
    """Both ranks of an undisturbed training, and of one that came back after rank 1 was killed."""
    name, ports = uuid.uuid4().hex[:8], free_ports(3)
    plain_ends, first, second = (
        [("--rank", str(rank), "--port", str(port), *options) for rank in (0, 1)] for port in ports
    )
    plain = [Life(folder / f"plain{rank}.pt", *end) for rank, end in enumerate(plain_ends)]
    runs = [Run(folder, daemon, name=name) for _ in (0, 1)]
    killed = [runs[0].life(*first[0]), runs[1].life(*first[1], "--kill-at", str(KILL_AT))]
    resumed = [run.life(*end, "--seed", "9") for run, end in zip(runs, second, strict=True)]
    with Parent(JOB, ends_with_one=True) as parent:
        codes = parent.live([plain, killed, resumed])
    told = "\n".join(life.log for life in (*plain, *killed, *resumed))
    assert codes[0] == [0, 0], told
    assert codes[1][1] == KILLED, told
    assert codes[2] == [0, 0], told
    return plain, resumed


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
    plain, resumed = played(tmp_path, daemon, *options)
    for reference, life in zip(plain, resumed, strict=True):
        assert 0 < resumed_at(life.log) <= KILL_AT, life.log
        assert differences(reference.out, life.out) == [], life.log
    alone = {
        "--capture-each",
        "--tensor-parallel",
        "--pipeline",
    }  # no data-parallel rank holds the same weights
    table = resumed[0].log.rpartition("captured by")[2]
    assert ("rank 1" in table) == alone.isdisjoint(options), table
