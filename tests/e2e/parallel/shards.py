"""Experts on shards of all ranks (``ExpertShards``), whose placement is another one in every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ckptd.client.elastic import ExpertShards, HandWritten, replace_moe_blocks
from tests.e2e.cases import Job, ListExperts, loss_of
from tests.e2e.parallel.expert import reduce_by_hand
from tests.e2e.parallel.registry import Family, build, job_of

__all__ = ["CASES"]

CASES = Family("shards")

# Of two layers, 4 experts on 2 ranks; one after the other.
_PLACES = [
    [[[1, 0, 1, 1], [0, 1, 1, 0]], [[1, 1, 0, 0], [0, 0, 1, 1]]],
    [[[0, 1, 1, 0], [1, 1, 0, 1]], [[1, 1, 1, 1], [1, 0, 0, 0]]],
    [[[1, 1, 0, 0], [1, 0, 1, 1]], [[0, 1, 0, 1], [1, 0, 1, 0]]],
]


def _places(step: int) -> list[list[list[int]]]:
    return _PLACES[step % len(_PLACES)]


def _forward(block: Any, x: Tensor) -> Tensor:
    """As ``ListExperts``, without its loads."""
    flat = x.reshape(-1, x.shape[-1])
    scores = block.gate(flat) + torch.randn(len(flat), 4) * block.noise
    chosen = torch.topk(scores, 2, dim=-1).indices
    weights = torch.softmax(scores, -1).gather(1, chosen)
    out: Tensor = block.experts(flat, chosen, weights)
    return out.reshape(x.shape)


def _clip(params: list[nn.Parameter], shards: ExpertShards) -> None:
    """By the norm over the dense parameters and all experts."""
    square = sum((p.grad.square().sum() for p in shards.parameters() if p.grad is not None), torch.zeros(()))
    dist.all_reduce(square)
    square = square + sum(p.grad.square().sum() for p in params if p.grad is not None)
    scale = (0.5 / (square.sqrt() + 1e-6)).clamp(max=1.0)
    for param in (*params, *shards.parameters()):
        if param.grad is not None:
            param.grad *= scale


def _job(seed: int) -> Job:
    model = build(seed)
    told = {ListExperts: HandWritten(forward=_forward)}
    layers = replace_moe_blocks(model, _places(0), blocks=told)
    shards = ExpertShards(layers, lambda named: torch.optim.AdamW(named, lr=3e-3))
    dense = list(model.parameters())
    optimizer = torch.optim.AdamW(dense, lr=3e-3)
    begun: list[int] = []

    def body(job: Job, step: int, at: Callable[[str], None]) -> None:
        if not begun:  # what was restored are the shards, and where the experts were
            shards.send_weights()
            begun.append(step)
        loss_of(model, next(job.state["data"])).backward()
        reduce_by_hand(dense, None, dist.get_world_size())
        shards.reduce_gradients()
        at("backward")
        _clip(dense, shards)
        optimizer.step()
        shards.optimizer.step()
        at("step")
        shards.send_weights(_places(step + 1))
        optimizer.zero_grad()
        shards.optimizer.zero_grad()

    both = nn.ModuleDict({"model": model, "experts": shards})
    job = job_of(both, [optimizer, shards.optimizer], body)
    job.state["placed"] = shards.placed
    return job


@CASES.case()
def moving(seed: int) -> Job:
    return _job(seed)
