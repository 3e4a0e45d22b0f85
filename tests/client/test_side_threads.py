"""No thread of ours may form an OpenMP team of its own.

A NaN check that ran `tensor.sum` beside training once did: with two teams in a process, libgomp
stops spinning at barriers, the trainer's threads slept at every one of them, and each iteration
took 65 % longer on two cores. Nothing failed, so nothing but counting the process' threads tells.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

JOB = textwrap.dedent(
    """
    import json, os, sys, threading
    from pathlib import Path
    import torch
    from torch import nn
    from ckptd.client import Checkpointer, RunOptions, SnapshotOptions

    def native_threads():
        names = [(p / "comm").read_text() for p in Path("/proc/self/task").iterdir()]
        return sum(not name.startswith("ZMQ") for name in names) - threading.active_count()

    torch.set_num_threads(2)
    model = nn.Sequential(nn.Linear(300, 300), nn.Conv2d(64, 64, 5)).to(memory_format=torch.channels_last)
    model[0].weight = nn.Parameter(torch.randn(300, 300).t())
    model.register_buffer("half_t", torch.zeros(400, 400, dtype=torch.float16).t())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train():
        loss = model[0](torch.randn(500, 300)).square().mean()
        loss = loss + model[1](torch.randn(4, 64, 32, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    before = native_threads()
    ckpt = Checkpointer(model, optimizer, run=RunOptions(job="threads", name=sys.argv[2]), daemon=sys.argv[1], snapshots=SnapshotOptions(window=2))
    for _ in ckpt.steps(8):
        train()
    print(json.dumps({"before": before, "after": native_threads(), "snapshots": ckpt.stats()["snapshots"]}))
    """
)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core: torch makes no team at all")
def test_no_second_openmp_team(endpoint: str) -> None:
    run = f"r{os.getpid()}"
    done = subprocess.run(
        [sys.executable, "-c", JOB, endpoint, run],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["before"] >= 1  # the trainer's own team: the count means something
    assert found["snapshots"] >= 5
    assert found["after"] == found["before"]
