"""The job in docs/elastic.md runs as it is printed there, with two ranks and with three.

All other blocks: tests/docs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

from tests.docs.code_blocks import blocks_of
from tests.e2e.harness import DaemonProcess
from tests.long import long

PAGE = Path(__file__).resolve().parents[2] / "docs/elastic.md"
JOB = "dist.init_process_group("


def program_of_a_job() -> str:
    """The block that is a whole program."""
    (found,) = [block.text for block in blocks_of(PAGE) if JOB in block.text]
    return found


@long
def test_a_job_goes_on_with_more_ranks(tmp_path: Path, daemon: DaemonProcess) -> None:
    """Two ranks that end in the middle, then three: each step is done once, and the loss falls."""
    run = uuid.uuid4().hex[:8]
    program = program_of_a_job().replace(
        'run=RunOptions(name="elastic", job="first")',
        f'run=RunOptions(name="{run}", job="docs"), daemon="{daemon.endpoint}"',
    )
    assert run in program
    path = tmp_path / "elastic.py"
    first = program.replace(
        "    loss.backward()", "    if step == 30: raise KeyboardInterrupt\n    loss.backward()"
    )
    assert first != program
    told = ""
    for text, ranks, steps in ((first, 2, 400), (program, 3, 60)):
        path.write_text(text.replace("STEPS = 6, 16, 32, 400", f"STEPS = 6, 16, 32, {steps}"))
        told += torchrun(path, ranks)
    done = re.findall(r"^step (\d+) on (\d) ranks: loss ([\d.]+)", told, re.MULTILINE)
    by = {int(step): int(ranks) for step, ranks, _ in done}
    assert len(done) == len(by) == 60, told
    assert [by[step] for step in range(60)] == [2] * 30 + [3] * 30, told
    losses = [float(loss) for _, _, loss in done]
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10]), losses


def torchrun(path: Path, ranks: int) -> str:
    """What it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(path)]
    settings = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "PYTHONPATH": str(PAGE.parents[1]),
    }
    done = subprocess.run(
        command,
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
        check=False,
    )
    return done.stdout
