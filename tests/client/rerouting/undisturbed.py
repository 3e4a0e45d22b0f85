"""What a job of `rerouted_job` comes to if nothing happens: by autograd alone, in one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ckptd.client.pipeline.rerouted_stage import micro_batch_seed
from tests.client.rerouting.rerouted_job import MICRO_BATCHES, SEED, batch, loss_of, optimizer_of, stage_of

__all__ = ["Losses", "assert_equal", "undisturbed"]

Losses = list[dict[tuple[int, int], float]]


def undisturbed(iterations: int) -> tuple[list[dict[str, Any]], Losses]:
    """Both stages' model and optimizer, and the losses of each iteration."""
    stages = [stage_of(0), stage_of(1)]
    optimizers = [optimizer_of(stage) for stage in stages]
    params = [p for stage in stages for p in stage.parameters()]
    losses: Losses = []
    for iteration in range(iterations):
        losses.append({})
        sums = []
        for d in range(2):
            for m in range(MICRO_BATCHES):
                x = data = batch(iteration, d, m)
                for s, stage in enumerate(stages):
                    torch.manual_seed(micro_batch_seed(SEED, iteration, d, m, s))
                    x = stage(x)
                loss = loss_of(x, -data)
                loss.backward()
                losses[-1][d, m] = float(loss.detach())
            sums.append([p.grad.clone() for p in params if p.grad is not None])
            for optimizer, _ in optimizers:
                optimizer.zero_grad()
        for p, first, second in zip(params, *sums, strict=True):
            p.grad = (first / MICRO_BATCHES + second / MICRO_BATCHES) / 2
        for optimizer, schedule in optimizers:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    states = [
        {"model": stage.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        for stage, (optimizer, schedule) in zip(stages, optimizers, strict=True)
    ]
    return states, losses


def assert_equal(found: Any, wanted: Any, where: str) -> None:
    """To the bit, at any depth."""
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted), where
    elif isinstance(wanted, Mapping):
        assert found.keys() == wanted.keys(), where
        for key in wanted:
            assert_equal(found[key], wanted[key], f"{where} {key}")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), where
        for number, pair in enumerate(zip(found, wanted, strict=True)):
            assert_equal(*pair, f"{where} {number}")
    else:
        assert found == wanted, where
