"""Ranks of an elastic job that is told to place its experts anew often; every rank writes which steps it did."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from ckptd.client import RunOptions
from ckptd.client.elastic.job import ElasticJob, PlacementOptions
from ckptd.core.elastic.rebalance_policy import TimesConfig
from tests.client.elastic.job.wrong_ranks import make

__all__ = ["EVERY", "TOTAL", "work"]

EVERY, TOTAL = 3, 8


class Unbalanced(nn.Module):
    """All tokens go to the experts of one rank."""

    def __init__(self, experts: nn.Module, busy: list[int]) -> None:
        super().__init__()
        self.moe, self._busy = experts, torch.tensor(busy)

    def forward(self, tokens: Tensor) -> Tensor:
        chosen = self._busy[torch.arange(len(tokens)) % len(self._busy)].unsqueeze(1)
        found: Tensor = self.moe(tokens, chosen, torch.ones(len(tokens), 1))
        return found


def work(rank: int, folder: str) -> None:
    eager = TimesConfig(threshold=1, every_steps=EVERY, check_steps=EVERY, margin=0.0)
    with ElasticJob(
        {"moe": 4},
        slots=2,
        run=RunOptions(job="j", name="r", rank=rank, world_size=2),
        daemon=None,
        placement=PlacementOptions(threshold=1, when=eager),
    ) as job:
        busy: list[int] = job.replicas("moe")[0].nonzero()[0].tolist()
        model = Unbalanced(job.layer("moe", make), busy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job.checkpointer(model, optimizer)
        done = []
        for step in job.steps(TOTAL):
            model(torch.ones(4, 2)).sum().backward()
            job.sum_gradients()
            optimizer.step()
            optimizer.zero_grad()
            done.append(step)
        told = {"done": done, "again": job.again}
        Path(folder, f"{rank}.json").write_text(json.dumps(told))
