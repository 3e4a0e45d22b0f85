"""``DistributedDataParallel``: every way of it that changes when or in which buckets gradients are reduced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_

from tests.e2e.cases import VOCAB, Job, loss_of
from tests.e2e.parallel.registry import KILL_AT, Family, build, job_of

__all__ = ["CASES"]

CASES = Family("ddp")


def ddp_job(seed: int, model_args: dict[str, Any] | None = None, **ddp_args: Any) -> Job:
    """AdamW on the model with fused experts (all get gradients in each step), in a wrapper with
    these options.
    """
    model = DDP(build(seed, **(model_args or {"fused": True})), **ddp_args)
    return job_of(model, torch.optim.AdamW(model.parameters(), lr=3e-3))


@CASES.case()
def plain(seed: int) -> Job:
    return ddp_job(seed)


@CASES.case(ranks=3, quick=True)
def three_ranks(seed: int) -> Job:
    """With three, the order of a sum shows in its bits: it follows from where in which bucket a
    gradient lies.

    DDP rebuilds its buckets after its first iteration; these are small, so that there are several.
    """
    return ddp_job(seed, bucket_cap_mb=0.002)


@CASES.case(ranks=3)
def three_ranks_static_graph(seed: int) -> Job:
    return ddp_job(seed, bucket_cap_mb=0.002, static_graph=True)


@CASES.case(ranks=3)
def three_ranks_find_unused(seed: int) -> Job:
    return ddp_job(seed, {"fused": False}, bucket_cap_mb=0.002, find_unused_parameters=True)


@CASES.case(ranks=3)
def three_ranks_bucket_view(seed: int) -> Job:
    return ddp_job(seed, bucket_cap_mb=0.002, gradient_as_bucket_view=True)


@CASES.case(ranks=3, total=12, kill_at=8)
def three_ranks_killed_early(seed: int) -> Job:
    """Replay begins at one of the first snapshots there can be: the slowest rank's first is of step 5."""
    return ddp_job(seed, bucket_cap_mb=0.002)


@CASES.case()
def no_sync(seed: int) -> Job:
    """Three micro-batches, of which the last one's backward reduces all gradients."""
    job = ddp_job(seed)

    def body(job: Job, step: int, at: Callable[[str], None]) -> None:
        model: Any = job.model
        with model.no_sync():
            for _ in range(2):
                (loss_of(model, next(job.state["data"])) / 3).backward()
        (loss_of(model, next(job.state["data"])) / 3).backward()
        at("backward")
        clip_grad_norm_(model.parameters(), 0.5)
        job.optimizers[0].step()
        at("step")
        job.optimizers[0].zero_grad()

    job.body = body
    return job


@CASES.case()
def static_graph(seed: int) -> Job:
    return ddp_job(seed, static_graph=True)


@CASES.case()
def batch_norm(seed: int) -> Job:
    """Rank 0's running statistics are broadcast at the start of each forward."""
    return ddp_job(seed, {"fused": True, "batch_norm": True}, broadcast_buffers=True)


@CASES.case()
def bucket_view(seed: int) -> Job:
    """Gradients are views into the buckets; frozen ones are taken away from under them."""
    return ddp_job(seed, gradient_as_bucket_view=True)


@CASES.case()
def find_unused(seed: int) -> Job:
    """Experts without tokens on any rank get no gradient."""
    return ddp_job(seed, {"fused": False}, find_unused_parameters=True)


@CASES.case()
def checkpointed(seed: int) -> Job:
    return ddp_job(seed, {"fused": True, "ckpt_mode": "nonreentrant"})


@CASES.case()
def tied(seed: int) -> Job:
    return ddp_job(seed, {"fused": True, "tied": True})


@CASES.case()
def module_given(seed: int) -> Job:
    """The ``Checkpointer`` gets the module inside the wrapper."""
    job = ddp_job(seed)
    wrapper, job.model = job.model, job.model.module  # type: ignore[assignment]
    plain_body = job.body

    def body(job: Job, step: int, at: Callable[[str], None]) -> None:
        inner, job.model = job.model, wrapper
        try:
            plain_body(job, step, at)
        finally:
            job.model = inner

    job.body = body
    return job


@CASES.case()
def late_gradients(seed: int) -> Job:
    """A head that is used after the restart only: until then no optimizer state is there for it, on any rank."""
    model = build(seed, fused=True)
    late = model.late = torch.nn.Linear(VOCAB, VOCAB)
    wrapper = DDP(model, find_unused_parameters=True)
    job = job_of(wrapper, torch.optim.AdamW(model.parameters(), lr=3e-3))
    plain = job.body
    used = False

    def through_the_head(module: Any, args: Any, logits: Any) -> Any:
        return late(logits) if used else logits

    model.register_forward_hook(through_the_head)

    def body(job: Job, step: int, at: Callable[[str], None]) -> None:
        nonlocal used
        used = step > KILL_AT
        plain(job, step, at)

    job.body = body
    return job


@CASES.case(ranks=3)
def lost_before_its_gradients(seed: int) -> Job:
    """The others wait for them, and have not updated: where they park, the step is cut off for all."""
    job = ddp_job(seed, bucket_cap_mb=0.002)

    def body(job: Job, step: int, at: Callable[[str], None]) -> None:
        loss = loss_of(job.model, next(job.state["data"]))
        at("backward")
        loss.backward()
        clip_grad_norm_(job.model.parameters(), 0.5)
        job.optimizers[0].step()
        job.optimizers[0].zero_grad()

    job.body = body
    return job
