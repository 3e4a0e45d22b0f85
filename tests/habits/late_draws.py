"""A training on two ranks whose optimizer begins to draw random numbers once there are snapshots."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckptd.client import Checkpointer
from tests.habits.life import Life
from tests.habits.optimizers import Dithered

__all__ = ["main"]

_AFTER = 5  # steps that are trained with draws


def main(argv: Sequence[str]) -> None:
    life = Life(argv)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(6, 6))
    optimizer = Dithered(model.parameters())
    optimizer.draws = False
    ckpt = Checkpointer(model, optimizer, **life.options())
    since = 0
    for step in ckpt.steps(life.steps):
        # All ranks together: what one of them does, the others do in the same step.
        ready = torch.tensor(float(ckpt.stats()["snapshots"] > 1))
        dist.all_reduce(ready, dist.ReduceOp.MIN)
        if ready and not optimizer.draws:
            optimizer.draws = True
            life.note({"draws from": step})
        since += optimizer.draws
        if since > _AFTER:
            break
        if not ready:
            time.sleep(0.05)
        optimizer.zero_grad()
        model(torch.ones(2, 6)).square().mean().backward()
        optimizer.step()
    life.note({"taken": ckpt.stats()["snapshots"]})
    ckpt.close()
    dist.destroy_process_group()
