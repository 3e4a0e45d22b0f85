"""Trainings in processes of their own: one that dies while a resume is rehearsed, and ranks whose
optimizer communicates in its step.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ckptd.client import Checkpointer, RunOptions, SnapshotOptions

__all__ = ["main"]

MOST_STEPS = 10_000
ENOUGH = 3


class DiesInTheCopy(torch.optim.AdamW):
    """Its process is killed in the middle of the step of a copy, once."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        whole = len(self.param_groups[0]["params"]) == 4  # not of parameters that ckptd made up
        if whole and os.environ["ORIGINAL"] != str(id(self)) and not Path(os.environ["DIED"]).exists():
            Path(os.environ["DIED"]).touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Communicates(torch.optim.SGD):
    """Averages its gradients over the ranks itself."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            dist.all_reduce(p.grad)
        return super().step(closure)


def train(endpoint: str, run: str, what: str, rank: int, world_size: int, steps: int) -> None:
    """Train ``steps`` steps; with 0 until all ranks have taken some snapshots."""
    torch.manual_seed(5)
    torch.set_num_threads(1)
    model: nn.Module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    optimizer: torch.optim.Optimizer
    if what == "communicates":
        optimizer = Communicates(model.parameters(), lr=0.1, momentum=0.9)
    elif what == "dies":
        optimizer = DiesInTheCopy(model.parameters(), lr=0.1)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    trained = nn.parallel.DistributedDataParallel(model) if what == "ddp" else model
    os.environ["ORIGINAL"] = str(id(optimizer))
    daemon = None if endpoint == "off" else endpoint
    who = RunOptions(name=run, job="rehearsed", rank=rank, world_size=world_size)
    dense = SnapshotOptions(policy="dense")
    ckpt = Checkpointer(trained, optimizer, run=who, daemon=daemon, snapshots=dense)
    done = 0
    for step in ckpt.steps(steps or MOST_STEPS):
        batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * rank + step))
        optimizer.zero_grad()
        trained(batch).square().mean().backward()
        optimizer.step()
        done = step + 1
        if not steps:
            taken = torch.tensor(ckpt.stats()["snapshots"])
            dist.all_reduce(taken, dist.ReduceOp.MIN)
            if taken >= ENOUGH:
                break
            time.sleep(0.02)
    weights = [p.detach().flatten().tolist() for p in model.parameters()]
    told = {"resumed": ckpt.resumed_from, "weights": weights, "steps": done}
    sys.stdout.write(json.dumps(told) + "\n")
    ckpt.close()


def main(endpoint: str, run: str, what: str, rank: int, world_size: int, steps: int, port: str) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    if world_size > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
    train(endpoint, run, what, rank, world_size, steps)
    if world_size > 1:
        # gloo's threads abort a process that ends while its peer is gone, as long as a wrapper holds the group.
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()
