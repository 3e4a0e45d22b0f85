"""The example in torchtitan's manner: a rank is killed, torchrun starts all again, and they end at
the bits of an undisturbed run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

from tests.e2e.compare import differences
from tests.e2e.harness import DaemonProcess
from tests.e2e.lives import resumed_at
from tests.long import long

REPOSITORY = Path(__file__).resolve().parents[2]


def torchrun(folder: Path, *options: str) -> subprocess.Popen[str]:
    folder.mkdir()
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    command += ["--max-restarts", "1", "-m", "--", "examples.torchtitan_style.train"]
    command += ["--output.folder", str(folder), "--training.steps", "18", *options]
    settings = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    return subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@long
def test_it_comes_back_at_the_exact_bits(tmp_path: Path, daemon: DaemonProcess) -> None:
    off = ("--checkpoint.daemon", "none")
    on = ("--checkpoint.daemon", daemon.endpoint, "--checkpoint.run", uuid.uuid4().hex[:8])
    jobs = {
        "killed": torchrun(tmp_path / "killed", *on, "--checkpoint.window", "4", "--fault.at_step", "13"),
        "plain": torchrun(tmp_path / "plain", *off),
    }
    told = {}
    try:
        for name, job in jobs.items():
            told[name], _ = job.communicate(timeout=240)
            assert job.returncode == 0, told[name]
    finally:
        for job in jobs.values():
            if job.poll() is None:
                job.terminate()  # torchrun ends its workers
                job.communicate(timeout=60)
    assert 5 <= resumed_at(told["killed"]) <= 13, told  # steps that outrun the daemon leave snapshots out
    for rank in ("rank0.pt", "rank1.pt"):
        assert differences(tmp_path / "plain" / rank, tmp_path / "killed" / rank) == []
    # The control: that the shards of two ranks differ is seen.
    assert differences(tmp_path / "plain" / "rank0.pt", tmp_path / "plain" / "rank1.pt") != []
    # Whatever was printed of a step, the first time or in replay, is what is printed without a fault.
    assert _steps(told["killed"]) == _steps(told["plain"])


def _steps(told: str) -> set[str]:
    return set(re.findall(r"step \d+: loss .*", told))
