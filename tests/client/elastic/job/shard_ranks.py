"""What each of some ranks of gloo does with the shards of an elastic job that keeps nothing;
results go to files, which the tests read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ckptd.client import RunOptions
from ckptd.client.elastic import ExpertShards, full_state_dict
from ckptd.client.elastic.job import ElasticJob, PlacementOptions

__all__ = ["RANKS", "WORK", "run_all"]

RANKS, EXPERTS, WIDTH = 3, 4, 4
Found = dict[str, Any]


class Expert(nn.Module):
    def __init__(self, number: int, *, buffer: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64))
        if buffer:
            self.register_buffer("seen", torch.zeros(1))

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.up(rows)
        return found


class Model(nn.Module):
    def __init__(self, job: ElasticJob, *, buffer: bool = False) -> None:
        super().__init__()
        self.moe = job.layer("moe", lambda number: Expert(number, buffer=buffer))
        torch.manual_seed(1)
        self.gate = nn.Linear(WIDTH, EXPERTS, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        weights, chosen = self.gate(tokens).softmax(-1).topk(2)
        found: Tensor = self.moe(tokens, chosen, weights)
        return found


class ByNorm(torch.optim.Optimizer):
    """Not element by element: a step is as long as the gradient's norm says."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param -= group["lr"] * param.grad / (1 + param.grad.norm())


class Odd(torch.optim.SGD):
    """Element by element, with a tensor beside that is not as long as the parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("pair", torch.zeros(2))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def begin(run: str, *, slots: int = 3, buffer: bool = False) -> tuple[ElasticJob, Model]:
    job = ElasticJob(
        {"moe": EXPERTS},
        slots=slots,
        run=RunOptions(job="shards", name=run, rank=dist.get_rank(), world_size=dist.get_world_size()),
        daemon=None,
        placement=PlacementOptions(threshold=1),
    )
    return job, Model(job, buffer=buffer)


def run_all(rank: int, folder: str) -> None:
    found = {name: work(name, rank) for name, work in WORK.items()}
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def refused(work: Callable[[], object]) -> str:
    """The error's type and text; empty if there was none."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - the tests read what it was
        return f"{type(error).__name__}: {error}"
    return ""


# -- what is refused on all ranks ----------------------------------------------------------------------


def one_has_shards(run: str, rank: int) -> str:
    job, model = begin(run)
    if rank == 1:
        return refused(lambda: job.shards(model, sgd))
    return refused(lambda: job.checkpointer(model, sgd(model.parameters())))


def not_by_element(run: str, rank: int) -> str:
    job, model = begin(run)
    return refused(lambda: job.shards(model, lambda shards: ByNorm(shards)))


def a_tensor_that_cannot_be_cut(run: str, rank: int) -> str:
    job, model = begin(run)
    return refused(lambda: job.shards(model, lambda shards: Odd(shards, lr=0.1)))


def other_masters(run: str, rank: int) -> str:
    job, model = begin(run)
    return refused(lambda: job.shards(model, sgd, masters=torch.float32 if rank == 2 else None))


def buffers(run: str, rank: int) -> str:
    job, model = begin(run, buffer=True)
    return refused(lambda: job.shards(model, sgd))


def twice(run: str, rank: int) -> str:
    job, model = begin(run)
    job.shards(model, sgd)
    return refused(lambda: job.shards(model, sgd))


def an_optimizer_that_knows_the_experts(run: str, rank: int) -> str:
    job, model = begin(run)
    before = sgd(model.parameters())
    job.shards(model, sgd)
    return refused(lambda: job.checkpointer(model, before))


# -- what it does --------------------------------------------------------------------------------------


def trained(run: str, rank: int) -> Found:
    """Three steps with shards, the experts placed by load after the first; and each step's norm
    before it is clipped.
    """
    job, model = begin(run)
    shards: ExpertShards = job.shards(model, sgd)
    optimizer = sgd(model.parameters())
    job.checkpointer(model, optimizer)
    norms, placements = [], [job.replicas("moe").copy()]
    for step in job.steps(3):
        loss_of(model, step, rank).backward()
        job.sum_gradients()
        norms.append(float(job.clip_grad_norm_(0.5)))
        optimizer.step()
        optimizer.zero_grad()
        # Before any step is over nothing was counted, and all experts share evenly.
        wanted = job.placements_by_load() if step else {"moe": crowded()}
        shards.step(wanted)
        placements.append(job.replicas("moe").copy())
        assert (job.replicas("moe") == wanted["moe"]).all()
        assert job.experts("moe") == sorted(model.moe.held_experts())
    job.check_replicas()
    job.close()
    full = full_state_dict(model)
    return {
        "full": {name: tensor.clone() for name, tensor in full.items()},
        "norms": norms,
        "placements": placements,
        "gate": model.gate.weight.detach(),
        "experts": {n: e.up.weight.detach() for n, e in held(model).items()},
    }


def held(model: Model) -> dict[int, Expert]:
    return {n: e for n, e in model.moe.held_experts().items() if isinstance(e, Expert)}


def crowded() -> Tensor:
    """``[R, E]``: other places than any plan's."""
    return torch.tensor([[0, 0, 0, 1], [0, 1, 1, 0], [1, 0, 0, 0]])


def loss_of(model: Model, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randn(5, WIDTH, generator=generator, dtype=torch.float64)
    found: Tensor = model(tokens).square().sum()
    return found


WORK: dict[str, Callable[[str, int], Any]] = {
    work.__name__: work
    for work in (
        one_has_shards,
        not_by_element,
        a_tensor_that_cannot_be_cut,
        other_masters,
        buffers,
        twice,
        an_optimizer_that_knows_the_experts,
        trained,
    )
}
