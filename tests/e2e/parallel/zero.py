"""``ZeroRedundancyOptimizer``: each rank updates a part of the parameters and broadcasts it within
``step()``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_

from tests.e2e.cases import Job, loss_of
from tests.e2e.parallel.registry import Family, build, job_of

with warnings.catch_warnings():
    # torch builds the functional optimizers in this package with its own deprecated torch.jit.script.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer

__all__ = ["CASES"]

CASES = Family("zero")


def zero_job(seed: int, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> Job:
    """The model with fused experts under DDP, its optimizer's state spread over the ranks."""
    model = DDP(build(seed, fused=True))
    options = {"lr": 3e-3, **options}
    zero = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=optimizer, **options)
    return job_of(model, zero)


@CASES.case()
def plain(seed: int) -> Job:
    return zero_job(seed)


@CASES.case(quick=True)
def bucket_view(seed: int) -> Job:
    """Parameters are views into the buckets that are broadcast."""
    return zero_job(seed, parameters_as_bucket_view=True)


@CASES.case(ranks=3)
def three_ranks(seed: int) -> Job:
    """Each rank's schedule follows from what it keeps, so an operator is frozen at other times on
    other ranks.
    """
    return zero_job(seed)


@CASES.case()
def momentum(seed: int) -> Job:
    return zero_job(seed, torch.optim.SGD, momentum=0.9)


@CASES.case()
def whole_tensors(seed: int) -> Job:
    """Adafactor: rows of one tensor cannot be updated apart, so a fused tensor is one operator."""
    return zero_job(seed, torch.optim.Adafactor)


@CASES.case()
def scheduled(seed: int) -> Job:
    """The scheduler changes the options of the wrapper, which hands them on to its part at each step."""
    job = zero_job(seed)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(job.optimizers[0], T_max=20)
    job.state["sched"] = sched
    return job


@CASES.case()
def groups(seed: int) -> Job:
    model = DDP(build(seed, fused=True))
    flat = [p for p in model.parameters() if p.ndim < 2]
    deep = [p for p in model.parameters() if p.ndim >= 2]
    options: list[Any] = [{"params": deep, "weight_decay": 0.1}, {"params": flat, "lr": 1e-2}]
    return job_of(model, ZeroRedundancyOptimizer(options, torch.optim.AdamW, lr=3e-3))


@CASES.case()
def aligned(seed: int) -> Job:
    """Within an aligned window, later snapshots leave out what was anchored; what another rank
    updates must be in each.
    """
    job = zero_job(seed)
    job.options["policy"] = "aligned"
    return job


@CASES.case()
def autocast(seed: int) -> Job:
    """What is not anchored is recorded in bf16; what another rank updates must keep its fp32 bits."""
    job = zero_job(seed)

    def body(job: Job, step: int, at: Callable[[str], None]) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(job.model, next(job.state["data"]))
        loss.backward()
        at("backward")
        clip_grad_norm_(job.model.parameters(), 0.5)
        job.optimizers[0].step()
        at("step")
        job.optimizers[0].zero_grad()

    job.body = body
    return job


@CASES.case()
def masters(seed: int) -> Job:
    """fp32 masters are what is spread and broadcast; the model itself is bf16."""
    inner = build(seed, fused=True)
    kept = {n: p.detach().clone().requires_grad_() for n, p in inner.named_parameters()}
    inner.bfloat16()
    model = DDP(inner)
    zero = ZeroRedundancyOptimizer(list(kept.values()), torch.optim.AdamW, lr=3e-3)
    named = {f"module.{n}": master for n, master in kept.items()}
    return job_of(model, zero, masters_body(named), masters=named)


def masters_body(
    masters: Mapping[str, Tensor],
) -> Callable[[Job, int, Callable[[str], None]], None]:
    def body(job: Job, step: int, at: Callable[[str], None]) -> None:
        loss_of(job.model, next(job.state["data"])).backward()
        at("backward")
        for name, param in job.model.named_parameters():
            masters[name].grad = None if param.grad is None else param.grad.float()
        clip_grad_norm_(masters.values(), 0.5)
        job.optimizers[0].step()
        at("step")
        with torch.no_grad():
            for name, param in job.model.named_parameters():
                param.copy_(masters[name])
        job.model.zero_grad()

    return body
