"""``torch.distributed.pipelining``: each rank's model is its own stage, or its own virtual stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from tests.e2e.cases import BATCH, LENGTH, VOCAB, WIDTH, Block, Job
from tests.e2e.parallel.registry import Family, job_of

__all__ = ["CASES", "recorded_norm"]

CASES = Family("pipeline")

MICRO = 2 * BATCH  # micro-batches of one row


class Stage(nn.Module):
    """One of ``count`` stages: the embedding is in the first, the head in the last, blocks are in each."""

    def __init__(self, index: int, count: int, *, fused: bool = False, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH) if index == 0 else None
        self.blocks = nn.ModuleList(Block(fused, 0.3) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCAB) if index == count - 1 else None
        # Both tell a rehearsal, in which all but the first stage get whatever is in memory; `seen`
        # is another on each replica.
        self.calls: Tensor
        self.seen: Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 0 if self.embed is None else x.sum()
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def build(seed: int, index: int, count: int, **options: Any) -> Stage:
    """Weights that follow from the stage, not from who holds it."""
    torch.manual_seed(1000 * seed + index)
    return Stage(index, count, **options)


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, VOCAB), target.reshape(-1))


def clip_by_hand(
    model: nn.Module,
    group: Any,
    record: Callable[[Callable[[], Tensor]], Tensor],
    limit: float = 0.5,
) -> None:
    """By the norm of all stages' gradients, which no stage can compute alone."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]

    def total() -> Tensor:
        square = torch.stack([g.pow(2).sum() for g in grads]).sum()
        dist.all_reduce(square, group=group)
        return square

    scale = (limit / (record(total).sqrt() + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad *= scale


def untouched(compute: Callable[[], Tensor]) -> Tensor:
    return compute()


def pipeline_job(model: nn.Module, schedule: Any, group: Any = None, *, feeds: bool, ends: bool) -> Job:
    """All stages draw the same batches; the first uses the tokens, the last the targets."""
    job = job_of(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    replica = dist.get_rank() // dist.get_world_size(group)
    job.state["data"].position = 10_000 * replica
    job.extra["record"], job.extra["schedule"] = untouched, schedule

    def body(job: Job, step: int, at: Callable[[str], None]) -> None:
        data = job.state["data"]
        batch = torch.cat([next(data), next(data)])
        inputs = (batch[:, :-1],) if feeds else ()
        schedule.step(*inputs, target=batch[:, 1:] if ends else None)
        at("backward")
        clip_by_hand(job.model, group, job.extra["record"])
        job.optimizers[0].step()
        at("step")
        job.optimizers[0].zero_grad()

    job.body = body
    return job


def one_stage_job(seed: int, kind: Any, *, static: bool = False, **options: Any) -> Job:
    """Two ranks, one stage on each."""
    rank, count = dist.get_rank(), dist.get_world_size()
    model = build(seed, rank, count, **options)
    stage = PipelineStage(model, rank, count, torch.device("cpu"), **(shapes(rank) if static else {}))
    schedule = kind(stage, n_microbatches=MICRO, loss_fn=loss_of)
    return pipeline_job(model, schedule, feeds=rank == 0, ends=rank == count - 1)


def shapes(rank: int) -> dict[str, Any]:
    """Example input and output of one micro-batch: the schedule need not find them out."""
    between = torch.zeros(1, LENGTH, WIDTH, requires_grad=True)
    tokens, logits = torch.zeros(1, LENGTH, dtype=torch.int64), torch.zeros(1, LENGTH, VOCAB)
    if rank == 0:
        return {"input_args": tokens, "output_args": between}
    return {"input_args": between, "output_args": logits.requires_grad_()}


def two_stages_job(seed: int, kind: Any) -> Job:
    """Two ranks, two virtual stages on each; the model is a list, which is never called itself."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    indices = [rank, rank + ranks]
    model = nn.ModuleList(build(seed, i, 2 * ranks, blocks=1) for i in indices)
    stages = [
        PipelineStage(part, i, 2 * ranks, torch.device("cpu")) for part, i in zip(model, indices, strict=True)
    ]
    schedule = kind(stages, n_microbatches=MICRO, loss_fn=loss_of)
    return pipeline_job(model, schedule, feeds=rank == 0, ends=rank == ranks - 1)


@CASES.case()
def gpipe(seed: int) -> Job:
    return one_stage_job(seed, ScheduleGPipe)


@CASES.case()
def one_f_one_b(seed: int) -> Job:
    return one_stage_job(seed, Schedule1F1B)


@CASES.case()
def static_shapes(seed: int) -> Job:
    return one_stage_job(seed, Schedule1F1B, static=True)


@CASES.case()
def fused(seed: int) -> Job:
    return one_stage_job(seed, Schedule1F1B, fused=True)


@CASES.case(ranks=3, victim=2)
def three_stages(seed: int) -> Job:
    return one_stage_job(seed, Schedule1F1B)


@CASES.case(quick=True)
def interleaved(seed: int) -> Job:
    return with_loader(two_stages_job(seed, ScheduleInterleaved1F1B))


@CASES.case()
def zero_bubble(seed: int) -> Job:
    """Gradients of inputs and of weights are computed apart."""
    return two_stages_job(seed, ScheduleInterleavedZeroBubble)


def with_loader(job: Job) -> Job:
    """A loader's iterator is created in the first step of each process, and draws from the global generator."""
    body, data = job.body, job.state["data"]
    started: list[Iterator[Any]] = []

    def loading(job: Job, step: int, at: Callable[[str], None]) -> None:
        if not started:
            started.append(iter(DataLoader([data.position])))  # type: ignore[arg-type]
        body(job, step, at)

    job.body = loading
    return job


@CASES.case()
def loader(seed: int) -> Job:
    return with_loader(one_stage_job(seed, Schedule1F1B))


@CASES.case()
def recorded_norm(seed: int) -> Job:
    """Frozen weights' gradients are not computed in replay: the norm over all of them comes from the record."""
    job = one_stage_job(seed, Schedule1F1B)
    job.options["freeze"] = "inputs"
    job.on_start = _record_norm
    return job


def _record_norm(job: Job) -> None:
    job.extra["record"] = lambda compute: job.ckpt.record("squared norm", compute())


def replicated_job(seed: int, *, static: bool = False) -> Job:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "stage"))
    group, rank = mesh.get_group("stage"), mesh.get_local_rank("stage")
    model = DDP(build(seed, rank, 2, fused=True), process_group=mesh.get_group("replicate"))
    known = shapes(rank) if static else {}
    stage = PipelineStage(model, rank, 2, torch.device("cpu"), group=group, **known)
    schedule = Schedule1F1B(stage, n_microbatches=MICRO, loss_fn=loss_of)
    return pipeline_job(model, schedule, group, feeds=rank == 0, ends=rank == 1)


@CASES.case(ranks=4)
def with_replicas(seed: int) -> Job:
    """Two replicas of two stages, each stage under DDP with its twin."""
    return replicated_job(seed)


@CASES.case(ranks=4)
def with_replicas_static(seed: int) -> Job:
    """Forwards of a pipeline are in ``no_sync``, but for what DDP carries over from its
    construction: it then sends buffers.
    """
    return replicated_job(seed, static=True)


@CASES.case(quick=True, total=22)
def in_bubbles(seed: int) -> Job:
    """Snapshots are copied while a stage waits for the other one, which takes some milliseconds."""
    job = one_stage_job(seed, Schedule1F1B)
    job.model.register_forward_hook(lambda *_: time.sleep(4e-3))
    job.on_start = lambda job: job.ckpt.copy_in_bubbles(job.extra["schedule"], always=True)
    return job
