"""Ranks of a grid of pipelines, each a process, that train twice: undisturbed, and without some workers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import uuid
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from ckptd.client.pipeline.rerouted_stage import ReroutedStage
from ckptd.core.reroute.pipeline_grid import PipelineGrid, StageCosts, Worker
from ckptd.core.reroute.reroute_plan import ReroutePlan, drop_pipelines, plan_reroute

__all__ = ["ROWS", "WIDTH", "Life", "Part", "loss_of", "played"]

WIDTH, ROWS = 8, 3
SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


@dataclass(frozen=True)
class Life:
    """A training.

    Attributes:
        failed: workers that are killed at the top of iteration ``hole``.
        plan: "reroute"; "drop": whole pipelines only.
    """

    pipelines: int
    stages: int
    micro_batches: int = 4
    failed: tuple[tuple[int, int], ...] = ()
    hole: int = 2
    iterations: int = 5
    schedule: str = "1f1b"
    plan: str = "reroute"
    exact: bool = True
    counts: bool = False


class Part(nn.Module):
    """A stage: dropout, a parameter that is used twice, and one that only some micro-batches use."""

    def __init__(self, index: int, counts: bool) -> None:
        super().__init__()
        torch.manual_seed(100 + index)
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.3)
        self.twice = nn.Linear(WIDTH, WIDTH, bias=False)
        self.rare = nn.Linear(WIDTH, WIDTH)
        self.counts = counts
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.calls += 1
        x = x + self.drop(self.second(torch.tanh(self.first(self.norm(x)))))
        x = self.twice(torch.tanh(self.twice(x)))
        if float(torch.rand(())) < 0.4:
            x = x + self.rare(x)
        return x


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def batch(iteration: int, pipeline: int, micro_batches: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * iteration + pipeline)
    return torch.randn(micro_batches * ROWS, WIDTH, generator=generator)


def played(life: Life, folder: Path) -> tuple[dict[tuple[int, int], dict[str, Any]], ...]:
    """What each worker has after an undisturbed training, and after one with losses: the survivors."""
    folder = folder / uuid.uuid4().hex
    folder.mkdir()
    context = multiprocessing.get_context("spawn")
    ranks = range(life.pipelines * life.stages)
    processes = [context.Process(target=_work, args=(life, rank, str(folder))) for rank in ranks]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(240)
        for rank, process in enumerate(processes):
            dies = divmod(rank, life.stages) in life.failed
            log = folder / f"error{rank}"
            told = log.read_text() if log.exists() else ""
            assert process.exitcode == (-signal.SIGKILL if dies else 0), (
                f"rank {rank}: {process.exitcode} {told}"
            )
    finally:
        for process in processes:
            process.kill()
            process.join()
    files = [
        {divmod(rank, life.stages): folder / f"{kind}{rank}.pt" for rank in ranks}
        for kind in ("before", "after")
    ]
    return tuple(
        {w: torch.load(path, weights_only=False) for w, path in found.items() if path.exists()}
        for found in files
    )


def _work(life: Life, rank: int, folder: str) -> None:
    try:
        torch.set_num_threads(1)
        D, P = life.pipelines, life.stages
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meet",
            rank=rank,
            world_size=D * P,
            timeout=timedelta(seconds=120),
        )
        grid = [[d * P + s for s in range(P)] for d in range(D)]
        rows = [dist.new_group(row) for row in grid]
        columns = [dist.new_group([row[s] for row in grid]) for s in range(P)]
        groups = (rows[rank // P], columns[rank % P])
        torch.save(_train(replace(life, failed=()), grid, groups, ours=False), f"{folder}/before{rank}.pt")
        torch.save(_train(life, grid, groups, ours=True), f"{folder}/after{rank}.pt")
        os._exit(0)  # groups with a dead member are not taken down in order
    except Exception as error:
        Path(folder, f"error{rank}").write_text(repr(error))
        raise


def _train(life: Life, grid: list[list[int]], groups: tuple[Any, Any], *, ours: bool) -> dict[str, Any]:
    """Undisturbed as long as nobody is missing: by torch's schedule.

    Args:
        groups: of the pipeline, and of the stage.
        ours: gradients are averaged by `ReroutedStage`; else by torch alone, in the order of pipelines.
    """
    D, P, M = life.pipelines, life.stages, life.micro_batches
    pipeline, index = divmod(dist.get_rank(), P)
    part = Part(index, life.counts)
    stage = PipelineStage(part, index, P, torch.device("cpu"), group=groups[0], **_shapes(index))
    schedule = SCHEDULES[life.schedule](stage, M, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-2)
    runner = ReroutedStage(stage, grid, loss_of, seed=3, exact=life.exact)
    losses: list[dict[tuple[int, int], float]] = []
    torch.manual_seed(dist.get_rank())
    plan = None
    for iteration in range(life.iterations):
        runner.begin(iteration)
        if iteration == life.hole and life.failed:
            if (pipeline, index) in life.failed:
                os.kill(os.getpid(), signal.SIGKILL)
            missing = frozenset(Worker(*w) for w in life.failed)
            made = PipelineGrid(D, (StageCosts(1, 1, 1, 0.5, 0.1),) * P, M, missing)
            plan = drop_pipelines(made) if life.plan == "drop" else plan_reroute(made)
        if plan is not None:
            losses.append(_rerouted(runner, plan, iteration))
        else:
            losses.append(_undisturbed(schedule, stage, batch(iteration, pipeline, M), pipeline))
            if ours:
                runner.average_gradients()
            else:
                _average(part, groups[1], D)
        optimizer.step()
        optimizer.zero_grad()
    runner.close()
    state = {"model": part.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
    return state | {"draw": torch.rand(4)}


def _shapes(index: int) -> dict[str, Any]:
    """The schedule need not find them out."""
    rows = torch.zeros(ROWS, WIDTH)
    return {
        "input_args": rows.clone().requires_grad_(index > 0),
        "output_args": rows.clone().requires_grad_(),
    }


def _rerouted(runner: ReroutedStage, plan: ReroutePlan, iteration: int) -> dict[tuple[int, int], float]:
    count = plan.grid.micro_batches
    micro = [batch(iteration, d, count).chunk(count) for d in range(plan.grid.pipelines)]
    found = runner.run(plan, lambda d, m: (micro[d][m],), lambda d, m: micro[d][m].neg())
    return {each: float(loss) for each, loss in found.items()}


def _undisturbed(schedule: Any, stage: Any, data: Tensor, pipeline: int) -> dict[tuple[int, int], float]:
    losses: list[Tensor] = []
    args = (data,) if stage.is_first else ()
    if stage.is_last:
        schedule.step(*args, target=data.neg(), losses=losses)
    else:
        schedule.step(*args)
    return {(pipeline, m): float(loss) for m, loss in enumerate(losses)}


def _average(part: nn.Module, group: Any, pipelines: int) -> None:
    """By torch alone: gathered, and added by pipeline."""
    for param in part.parameters():
        has = [torch.zeros(()) for _ in range(pipelines)]
        dist.all_gather(has, torch.tensor(float(param.grad is not None)), group)
        own = torch.zeros_like(param) if param.grad is None else param.grad
        grads = [torch.zeros_like(param) for _ in range(pipelines)]
        dist.all_gather(grads, own.detach().contiguous(), group)
        there = [g for g, h in zip(grads, has, strict=True) if h]
        param.grad = None
        if there:
            total = there[0]
            for grad in there[1:]:
                total = total + grad
            param.grad = total / pipelines
