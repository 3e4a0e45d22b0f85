"""A job that re-routes (`ckptd.host --reroute`) is started by torchrun, more than once, on two nodes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.cluster.hosts import Cluster, Host
from tests.cluster.torchrun import TorchrunJob

pytestmark = pytest.mark.slow

SOON_S = 150.0

# Two pipelines of one stage. In an iteration it waits for a file `stop`.
TRAINS = """
import os, sys, time
from pathlib import Path
import torch
from torch import nn
from ckptd.client.rerouting.rerouted_training import ReroutedTraining
from ckptd.core.reroute.pipeline_grid import PipelineGrid, StageCosts

folder = Path(sys.argv[1])
torch.manual_seed(0)
module, rows = nn.Linear(4, 4), torch.zeros(2, 4)
training = ReroutedTraining(
    module,
    torch.optim.SGD(module.parameters(), lr=1e-3),
    PipelineGrid(2, (StageCosts(1, 1, 1),), 2),
    examples=(rows, rows.clone().requires_grad_()),
    loss_fn=lambda output, target: (output - target).square().mean(),
)
batch = torch.ones(2, 4)
for iteration, _ in training.iterations(30, lambda *_: (batch,), lambda *_: batch):
    (folder / f"{os.environ['RANK']}-{os.getpid()}-{len(training.missing)}").touch()
    while iteration == 20 and not (folder / "stop").exists():
        time.sleep(0.02)
"""


def test_ranks_meet_although_one_agent_has_been_started_anew(tmp_path: Path) -> None:
    """It counts its own restarts, from 0 on, and the other agent has counted one."""
    script, found = tmp_path / "trains.py", tmp_path / "found"
    script.write_text(TRAINS)
    found.mkdir()
    with Cluster(2) as cluster:
        job = TorchrunJob(
            cluster,
            ["-m", "--", "ckptd.host", "--reroute", str(script), str(found)],
            nnodes=2,
            folder=tmp_path,
            env=lambda node: {"CKPTD_RUNTIME_DIR": str(node.runtime_dir)},
        )

        def log(node: Host) -> str:
            return (tmp_path / f"{node.name}.log").read_text()

        def seen() -> set[Path]:
            return set(found.iterdir())

        def train(since: set[Path]) -> None:
            def both() -> bool:
                return {p.name[0] for p in seen() - since if p.name.endswith("-0")} == {"0", "1"}

            job.until(both, "both ranks", timeout_s=SOON_S)

        try:
            job.start()
            train(set())
            first = next(node for node in cluster.hosts if "all 2 hosts have joined" in log(node))
            other = next(node for node in cluster.hosts if node is not first)
            before = seen()
            hosts = [pid for pid in first.pids() if _name(pid) == "ckptd-host"]
            os.kill(hosts[0], signal.SIGKILL)
            train(before)
            before = seen()
            other.destroy()
            job.lost(other)
            job.until(
                lambda since=before: any(path.name.endswith("-1") for path in seen() - since),  # type: ignore[misc]
                "one goes on",
                timeout_s=SOON_S,
            )
            before = seen()
            other.boot()
            job.join(other)
            train(before)
            (found / "stop").touch()
            job.wait(timeout_s=SOON_S)
        finally:
            job.stop()


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
