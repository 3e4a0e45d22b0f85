"""Trainings with state of which no snapshot knows. It lies where nobody who looks at model,
optimizer and ``state=`` can see it, so a resume without a replay is silently different.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.e2e.cases import Job

__all__ = ["HIDDEN"]


def _gradients(optimizer: Any) -> list[Tensor]:
    params = (param for group in optimizer.param_groups for param in group["params"])
    return [param.grad for param in params if param.grad is not None]


def count_updates(job: Job) -> None:
    """Gradients are weighted by a counter that begins anew in each process."""
    updates = itertools.count(1)

    def weigh(optimizer: Any, *called: Any) -> None:
        weight = 1.0 + 1.0 / next(updates)
        for grad in _gradients(optimizer):
            grad.mul_(weight)

    for optimizer in job.optimizers:
        optimizer.register_step_pre_hook(weigh)


def own_generator(job: Job) -> None:
    """Noise on the gradients comes from a generator that is in no snapshot; it has the same seed in
    each process.
    """
    _noise(job, 5)


def clock(job: Job) -> None:
    """The same with another seed in each process."""
    _noise(job, int.from_bytes(os.urandom(7), "little"))


def _noise(job: Job, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def disturb(optimizer: Any, *called: Any) -> None:
        for grad in _gradients(optimizer):
            grad.add_(torch.randn(grad.shape, generator=generator) * 0.01)

    for optimizer in job.optimizers:
        optimizer.register_step_pre_hook(disturb)


HIDDEN: dict[str, Callable[[Job], None]] = {
    "count_updates": count_updates,
    "own_generator": own_generator,
    "clock": clock,
}
