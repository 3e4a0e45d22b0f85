"""Pipelines of which one stage can come back without the others: boundaries are logged, what all
compute together is shared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.nn.utils import clip_grad_norm_

from ckptd.client.pipeline.stage_hooks import stages_of
from tests.e2e.cases import Job
from tests.e2e.parallel.pipeline import (
    MICRO,
    build,
    loss_of,
    one_stage_job,
    replicated_job,
    two_stages_job,
)
from tests.e2e.parallel.registry import Family, job_of

__all__ = ["CASES"]

CASES = Family("localized")

WIDE, ROWS = 24, 2


def apart(job: Job, *, replicate: bool = False) -> Job:
    """Two lines of ckptd's: the log, and the norm of all stages' gradients as a shared value."""

    def start(job: Job) -> None:
        job.ckpt.log_boundaries(job.extra["schedule"], replicate=replicate)
        job.extra["record"] = lambda compute: job.ckpt.shared_value("squared norm", compute)

    job.on_start = start
    return _with_scheduler(job)


def _with_scheduler(job: Job) -> Job:
    body, scheduler = job.body, torch.optim.lr_scheduler.CosineAnnealingLR(job.optimizers[0], 40)

    def scheduled(job: Job, step: int, at: Callable[[str], None]) -> None:
        body(job, step, at)
        scheduler.step()

    job.state["scheduler"], job.body = scheduler, scheduled
    return job


@CASES.case(ranks=4)
def chain(seed: int) -> Job:
    """Dropout, noisy gates, a schedule of learning rates."""
    return apart(one_stage_job(seed, Schedule1F1B, blocks=1))


@CASES.case(ranks=4)
def fused(seed: int) -> Job:
    return apart(one_stage_job(seed, ScheduleGPipe, fused=True, blocks=1))


@CASES.case(ranks=3)
def interleaved(seed: int) -> Job:
    """Two virtual stages on each rank: the last rank sends to the first, too."""
    return apart(two_stages_job(seed, ScheduleInterleaved1F1B))


@CASES.case(ranks=3)
def zero_bubble(seed: int) -> Job:
    return apart(two_stages_job(seed, ScheduleInterleavedZeroBubble))


@CASES.case(ranks=4)
def replicas(seed: int) -> Job:
    """Two replicas of two stages, each stage under DDP with its twin: rank r has stage r % 2."""
    return _replicas(seed)


@CASES.case(ranks=4)
def replicated_logs(seed: int) -> Job:
    """The same, and what is sent between the stages has replicas on other nodes."""
    return _replicas(seed, replicate=True)


def _replicas(seed: int, *, replicate: bool = False) -> Job:
    job = replicated_job(seed)
    body, (stage,) = job.body, stages_of(job.extra["schedule"])

    def inside(job: Job, step: int, at: Callable[[str], None]) -> None:
        with _last_backward(stage, lambda: at("inside")):
            body(job, step, at)

    job.body = inside
    return apart(job, replicate=replicate)


@CASES.case(ranks=4)
def own_norm(seed: int) -> Job:
    """Each stage clips by a norm of its own: nothing but boundaries holds the stages together, and
    they end their steps one by one.
    """
    return _own_norm(seed)


@CASES.case(ranks=3)
def accumulating(seed: int) -> Job:
    """The schedule runs twice before the optimizer's step."""
    return _own_norm(seed, rounds=2)


@CASES.case(ranks=3)
def autocast(seed: int) -> Job:
    return _own_norm(seed, autocast=True)


def _own_norm(seed: int, *, rounds: int = 1, autocast: bool = False) -> Job:
    rank, count = dist.get_rank(), dist.get_world_size()
    model = build(seed, rank, count, blocks=1)
    stage = PipelineStage(model, rank, count, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=MICRO, loss_fn=loss_of)
    job = job_of(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    job.state["data"].position = 0
    job.extra["schedule"] = schedule

    def body(job: Job, step: int, at: Callable[[str], None]) -> None:
        data = job.state["data"]
        with _last_backward(stage, lambda: at("inside")), _precision(autocast):
            for _ in range(rounds):
                batch = torch.cat([next(data), next(data)])
                inputs = (batch[:, :-1],) if rank == 0 else ()
                schedule.step(*inputs, target=batch[:, 1:] if rank == count - 1 else None)
        at("backward")
        clip_grad_norm_(job.model.parameters(), 0.5)
        job.optimizers[0].step()
        at("step")
        job.optimizers[0].zero_grad()

    job.body = body
    return apart(job)


def _precision(autocast: bool) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()


@contextlib.contextmanager
def _last_backward(stage: Any, then: Callable[[], None]) -> Iterator[None]:
    """Call this when the stage has received all of the step, and has yet to send its last gradient upstream."""
    plain = stage.backward_one_chunk

    def backward_one_chunk(chunk: int, *args: Any, **kwargs: Any) -> Any:
        if chunk == MICRO - 1:
            then()
        return plain(chunk, *args, **kwargs)

    stage.backward_one_chunk = backward_one_chunk
    try:
        yield
    finally:
        stage.backward_one_chunk = plain


@CASES.case(ranks=3)
def by_hand(seed: int) -> Job:
    """Sends and receives of one's own, with the plain interface; updates depend on the loss, a shared value."""
    rank = dist.get_rank()
    torch.manual_seed(1000 * seed + rank)
    model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.GELU(), nn.Dropout(0.2), nn.Linear(WIDE, WIDE))
    job = job_of(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    job.body = _step_by_hand

    def start(job: Job) -> None:
        job.extra["log"] = job.ckpt.boundary_log()

    job.on_start = start
    return _with_scheduler(job)


def _step_by_hand(job: Job, step: int, at: Callable[[str], None]) -> None:
    rank, last, log = dist.get_rank(), dist.get_world_size() - 1, job.extra["log"]
    inputs, outputs = [], []
    for m in range(MICRO):
        inputs.append(_inputs_by_hand(job, m))
        outputs.append(job.model(inputs[-1]))
        if rank < last and log.activation(outputs[-1], micro_batch=m, dest=rank + 1):
            dist.send(outputs[-1].detach(), rank + 1)
    loss = torch.zeros(())
    for m, out in enumerate(outputs):
        if rank == last:
            loss += out.square().mean().detach()
            out.square().mean().backward()
        else:
            grad = torch.empty_like(out)
            if not log.receive_gradient(grad, source=rank + 1, micro_batch=m):
                dist.recv(grad, rank + 1)
            out.backward(grad)
        upstream = inputs[m].grad
        if upstream is not None and log.gradient(upstream, micro_batch=m, dest=rank - 1):
            dist.send(upstream, rank - 1)
    at("backward")
    total = job.ckpt.shared_value("loss", lambda: _summed(loss))
    for param in job.model.parameters():
        assert param.grad is not None
        param.grad /= 1 + total
    job.optimizers[0].step()
    at("step")
    job.optimizers[0].zero_grad()


def _inputs_by_hand(job: Job, micro_batch: int) -> Tensor:
    rank = dist.get_rank()
    if rank == 0:
        tokens = next(job.state["data"])[:ROWS, :WIDE]
        return F.pad(tokens, (0, WIDE - tokens.shape[1])).float() / 64
    buffer = torch.empty(ROWS, WIDE)
    log = job.extra["log"]
    if not log.receive_activation(buffer, source=rank - 1, micro_batch=micro_batch):
        dist.recv(buffer, rank - 1)
    return buffer.requires_grad_()


def _summed(loss: Tensor) -> Tensor:
    dist.all_reduce(loss)
    return loss
