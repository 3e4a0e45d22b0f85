"""Ranks whose replicas are alike at first, and part later: local SGD behind a warm-up, and a bit that flips."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from ckptd.client import Checkpointer, RunOptions, SnapshotOptions

with warnings.catch_warnings():
    # torch's own code uses what torch has deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import PostLocalSGDOptimizer

__all__ = ["main"]

WARM_UP, PERIOD = 10, 7
FLIPS_AT = 20
MOST_STEPS = 100_000
ENOUGH = 4


class _Said(logging.Handler):
    """Counts what was said of replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.apart = self.unlike = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.apart += "train apart" in record.getMessage()
        self.unlike += "hold different values" in record.getMessage()


def _largest(number: int) -> int:
    """Of all ranks, which also makes them wait for each other."""
    found = torch.tensor(number)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def train(endpoint: str, run: str, what: str, rank: int, steps: int, window: int) -> dict[str, Any]:
    """Train ``steps`` steps; with 0 until ranks that part have taken snapshots each for itself, and one dies, or
    until a flipped bit was noticed, and snapshots go on.
    """
    torch.manual_seed(5)
    torch.set_num_threads(1)
    said = _Said()
    logging.getLogger("ckptd").addHandler(said)
    layers = [nn.Linear(4, 4) for _ in range(8)]
    model = nn.Sequential(*layers)
    ddp = nn.parallel.DistributedDataParallel(model)
    inner = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    optimizer: torch.optim.Optimizer = inner
    state: dict[str, Any] = {}
    if what == "local SGD":
        alone, _ = dist.new_subgroups(1)
        hook = local_sgd.PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=WARM_UP)
        ddp.register_comm_hook(hook, local_sgd.post_localSGD_hook)
        averager = PeriodicModelAverager(period=PERIOD, warmup_steps=WARM_UP)
        optimizer, state = PostLocalSGDOptimizer(inner, averager), {"hook": hook}
    who = RunOptions(name=run, job="parting", rank=rank, world_size=2)
    daemon = None if endpoint == "off" else endpoint
    snapshots, given = SnapshotOptions(policy="dense"), optimizer
    if window > 1:  # around an optimizer, another one may do anything, and snapshots must be dense
        snapshots, given = SnapshotOptions(window=window), inner
        state |= {"averager": averager} if what == "local SGD" else {}
    ckpt = Checkpointer(ddp, given, state=state, run=who, daemon=daemon, snapshots=snapshots)
    told_at = 0
    done = 0
    for step in ckpt.steps(steps or MOST_STEPS):
        batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * rank + step))
        optimizer.zero_grad()
        ddp(batch).square().mean().backward()
        optimizer.step()
        if what == "flip" and step == FLIPS_AT and rank == 1:
            with torch.no_grad():
                layers[4].weight.view(torch.int32)[1, 2] ^= 1
        done = step + 1
        taken = -_largest(-int(ckpt.stats()["snapshots"])) if daemon else 0
        if not steps and daemon:
            time.sleep(0.02)
            told = -_largest(-said.apart) if what == "local SGD" else _largest(said.unlike)
            told_at = told_at or (taken if told else 0)
            if told_at and taken >= told_at + ENOUGH * window:
                if what == "local SGD" and rank == 1:
                    sys.stdout.write(json.dumps({"steps": done}) + "\n")
                    sys.stdout.flush()
                    os.kill(os.getpid(), signal.SIGKILL)
                if what == "flip":
                    break
    weights = [p.detach().flatten().tolist() for p in model.parameters()]
    ckpt.close()
    return {"resumed": ckpt.resumed_from, "weights": weights, "steps": done}


def main(endpoint: str, run: str, what: str, rank: int, steps: int, window: int, port: str) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    sys.stdout.write(json.dumps(train(endpoint, run, what, rank, steps, window)) + "\n")
    # gloo's threads abort a process that ends while its peer is gone, as long as a wrapper holds the group.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
