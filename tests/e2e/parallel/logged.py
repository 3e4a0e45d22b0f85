"""Pipelines whose boundaries are logged, and whose receiving ends write down, by themselves, what
has reached them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from ckptd.client.pipeline.stage_hooks import stages_of
from tests.e2e.cases import Job
from tests.e2e.parallel.pipeline import one_stage_job, two_stages_job
from tests.e2e.parallel.registry import Family, job_of

__all__ = ["CASES", "Received"]

CASES = Family("logged")

# Kind, the sender's stage, micro-batch, index.
Received = dict[tuple[str, int, int, int], Tensor]

WIDE, ROWS, MICRO_BATCHES = 24, 2, 3


@CASES.case(ranks=3)
def one_f_one_b(seed: int) -> Job:
    """The norm of all stages' gradients is a shared value: no stage needs the others to run a step again."""
    job = logged(one_stage_job(seed, Schedule1F1B))
    start = job.on_start

    def share(job: Job) -> None:
        assert start is not None
        start(job)
        job.extra["record"] = lambda compute: job.ckpt.shared_value("squared norm", compute)

    job.on_start = share
    return job


@CASES.case()
def gpipe(seed: int) -> Job:
    return logged(one_stage_job(seed, ScheduleGPipe, static=True))


@CASES.case()
def interleaved(seed: int) -> Job:
    return logged(two_stages_job(seed, ScheduleInterleaved1F1B))


@CASES.case()
def zero_bubble(seed: int) -> Job:
    return logged(two_stages_job(seed, ScheduleInterleavedZeroBubble))


def logged(job: Job) -> Job:
    """One call logs the schedule's boundaries."""
    received: Received = {}
    for stage in stages_of(job.extra["schedule"]):
        _listen(stage, received)

    def start(job: Job) -> None:
        job.ckpt.log_boundaries(job.extra["schedule"])

    job.on_start = start
    return _writing_down(job, received)


def _listen(stage: Any, received: Received) -> None:
    """Note what lies in the buffers that a stage received into, right before it is used."""
    forward, backward = stage.forward_one_chunk, stage.backward_one_chunk

    def note(kind: str, sender: int, chunk: int, infos: Any) -> None:
        buffers = [info.buffer for info in infos if getattr(info, "buffer", None) is not None]
        for index, buffer in enumerate(buffers):
            received[kind, sender, chunk, index] = buffer.detach().clone()

    def forward_one_chunk(chunk: int, *args: Any, **kwargs: Any) -> Any:
        if not stage.is_first:
            note("activation", stage.stage_index - 1, chunk, stage.args_recv_info[chunk])
        return forward(chunk, *args, **kwargs)

    def backward_one_chunk(chunk: int, *args: Any, **kwargs: Any) -> Any:
        if not stage.is_last:
            note("gradient", stage.stage_index + 1, chunk, stage.grad_recv_info[chunk])
        return backward(chunk, *args, **kwargs)

    stage.forward_one_chunk, stage.backward_one_chunk = forward_one_chunk, backward_one_chunk


def _writing_down(job: Job, received: Received) -> Job:
    """After each step, a file of what this rank received in it."""
    body = job.body

    def writing(job: Job, step: int, at: Callable[[str], None]) -> None:
        received.clear()
        body(job, step, at)
        folder: Path | None = job.extra["received"]
        if folder is not None:
            path = folder / f"{step}-r{dist.get_rank()}.pt"
            torch.save(dict(received), path.with_suffix(".tmp"))
            os.replace(path.with_suffix(".tmp"), path)

    job.body = writing
    return job


@CASES.case()
def by_hand(seed: int) -> Job:
    """Two ranks that send and receive by themselves, and log with the plain interface."""
    rank = dist.get_rank()
    torch.manual_seed(1000 * seed + rank)
    model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.GELU(), nn.Dropout(0.2), nn.Linear(WIDE, WIDE))
    job = job_of(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    job.body = _first_half if rank == 0 else _second_half

    def start(job: Job) -> None:
        job.extra["log"] = job.ckpt.boundary_log()

    job.on_start = start
    received: Received = {}
    job.extra["keep"] = received
    return _writing_down(job, received)


def _first_half(job: Job, step: int, at: Callable[[str], None]) -> None:
    log, data = job.extra["log"], job.state["data"]
    outputs = []
    for m in range(MICRO_BATCHES):
        tokens = next(data)[:ROWS, :WIDE]
        out = job.model(F.pad(tokens, (0, WIDE - tokens.shape[1])).float() / 64)
        if log.activation(out, micro_batch=m, dest=1):
            dist.send(out.detach(), 1)
        outputs.append(out)
    for m, out in enumerate(outputs):
        grad = torch.empty_like(out)
        if not log.receive_gradient(grad, source=1, micro_batch=m, stage=1):
            dist.recv(grad, 1)
        job.extra["keep"]["gradient", 1, m, 0] = grad.clone()
        out.backward(grad)
    at("backward")
    _update(job, at)


def _second_half(job: Job, step: int, at: Callable[[str], None]) -> None:
    log = job.extra["log"]
    inputs = []
    for m in range(MICRO_BATCHES):
        inputs.append(torch.empty(ROWS, WIDE))
        if not log.receive_activation(inputs[-1], source=0, micro_batch=m):
            dist.recv(inputs[-1], 0)
        job.extra["keep"]["activation", 0, m, 0] = inputs[-1].clone()
    for m, each in enumerate(inputs):
        each.requires_grad_()
        job.model(each).square().mean().backward()
        assert each.grad is not None
        if log.gradient(each.grad, micro_batch=m, stage=1, dest=0):
            dist.send(each.grad, 0)
    at("backward")
    _update(job, at)


def _update(job: Job, at: Callable[[str], None]) -> None:
    job.optimizers[0].step()
    at("step")
    job.optimizers[0].zero_grad()
