"""Expert parallelism by hand: each rank has experts of its own, tokens travel by
``all_to_all_single`` with uneven splits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.e2e.cases import VOCAB, WIDTH, Job, loss_of
from tests.e2e.parallel.registry import Family, job_of
from tests.e2e.parallel.registry import build as replicated_model

__all__ = ["CASES"]

CASES = Family("expert")

LOCAL, LAYERS, HIDDEN = 2, 2, 24


class Exchange(torch.autograd.Function):
    """Rows go to other ranks, as many to each as ``sends`` says; their gradients come back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sends: list[int], gets: list[int], group: Any) -> Tensor:
        ctx.way = sends, gets, group
        return _exchanged(rows, sends, gets, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        sends, gets, group = ctx.way
        return _exchanged(grads[0], gets, sends, group), None, None, None


def _exchanged(rows: Tensor, sends: list[int], gets: list[int], group: Any) -> Tensor:
    received = rows.new_empty((sum(gets), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), gets, sends, group=group)
    return received


class ListedExperts(nn.ModuleList):
    """This rank's experts; each is called with its tokens only, and not at all without any."""

    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(LOCAL)
        )

    def forward(self, rows: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for index, expert in enumerate(self):
            (where,) = (chosen == index).nonzero(as_tuple=True)
            if where.numel():
                out = out.index_add(0, where, expert(rows[where]))
        return out


class FusedExperts(nn.Module):
    """This rank's experts as rows of fused parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = LOCAL
        self.up = nn.Parameter(torch.randn(LOCAL, WIDTH, HIDDEN) * 0.2)
        self.down = nn.Parameter(torch.randn(LOCAL, HIDDEN, WIDTH) * 0.2)

    def forward(self, rows: Tensor, chosen: Tensor) -> Tensor:
        every = torch.einsum("tef,efd->ted", F.gelu(torch.einsum("td,edf->tef", rows, self.up)), self.down)
        return every[torch.arange(len(rows)), chosen]


class ParallelMoE(nn.Module):
    """Top-1 of all ranks' experts, with a noisy gate."""

    def __init__(self, group: Any, *, fused: bool) -> None:
        super().__init__()
        self.group, self.ranks = group, dist.get_world_size(group)
        self.gate = nn.Linear(WIDTH, LOCAL * self.ranks, bias=False)
        self.experts = FusedExperts() if fused else ListedExperts()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        scores = self.gate(flat)
        chosen = (scores + torch.randn_like(scores) * 0.3).argmax(-1)
        order = torch.argsort(chosen, stable=True)
        sends = torch.bincount(chosen // LOCAL, minlength=self.ranks)
        gets = torch.empty_like(sends)
        dist.all_to_all_single(gets, sends, group=self.group)
        way = sends.tolist(), gets.tolist()
        rows = Exchange.apply(flat[order], *way, self.group)
        local = _exchanged(chosen[order] % LOCAL, *way, self.group)
        done = Exchange.apply(self.experts(rows, local), *reversed(way), self.group)
        weight = torch.softmax(scores, -1).gather(1, chosen[:, None])
        return (torch.zeros_like(flat).index_add(0, order, done) * weight).reshape(x.shape)


class Model(nn.Module):
    def __init__(self, group: Any, *, fused: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.drop = nn.Dropout(0.1)
        self.moes = nn.ModuleList(ParallelMoE(group, fused=fused) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for norm, moe in zip(self.norms, self.moes, strict=True):
            x = x + self.drop(moe(norm(x)))
        logits: Tensor = self.head(x)
        return logits


def build(seed: int, group: Any = None, *, fused: bool = False) -> Model:
    """Dense parts and gates alike on all ranks, experts alike on those that hold the same."""
    group = group or dist.group.WORLD
    torch.manual_seed(seed)
    model = Model(group, fused=fused)
    torch.manual_seed(1000 * seed + dist.get_rank(group))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if ".experts." in name:
                param.copy_(torch.randn_like(param) * 0.2)
    return model


def parts(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Dense parameters and experts."""
    named = list(model.named_parameters())
    return [p for n, p in named if ".experts." not in n], [p for n, p in named if ".experts." in n]


def reduce_by_hand(params: list[nn.Parameter], group: Any, share: int) -> None:
    """The sum of the gradients over ``group``, divided by ``share``; an expert without tokens adds zero."""
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        dist.all_reduce(param.grad, group=group)
        param.grad /= share


def clip_by_hand(model: nn.Module, group: Any, limit: float = 0.5) -> None:
    """By the norm over all ranks' gradients: experts of this rank and of the others, dense parts once."""
    dense, experts = parts(model)
    squares = torch.zeros(2)
    for i, params in enumerate((dense, experts)):
        squares[i] = sum((p.grad.pow(2).sum() for p in params if p.grad is not None), torch.zeros(()))
    dist.all_reduce(squares[1:], group=group)
    scale = (limit / (squares.sum().sqrt() + 1e-6)).clamp(max=1.0)
    for param in (*dense, *experts):
        if param.grad is not None:
            param.grad *= scale


def expert_job(seed: int, *, fused: bool = False) -> Job:
    model = build(seed, fused=fused)
    world = dist.get_world_size()

    def body(job: Job, step: int, at: Callable[[str], None]) -> None:
        loss_of(job.model, next(job.state["data"])).backward()
        dense, experts = parts(job.model)
        reduce_by_hand(dense, None, world)
        for param in experts:
            if param.grad is not None:
                param.grad /= world
        at("backward")
        clip_by_hand(job.model, None)
        job.optimizers[0].step()
        at("step")
        job.optimizers[0].zero_grad()

    return job_of(model, torch.optim.AdamW(model.parameters(), lr=3e-3), body)


@CASES.case()
def by_hand(seed: int) -> Job:
    """Which experts get no tokens, and so no gradient, differs by rank and step."""
    return expert_job(seed)


@CASES.case()
def fused(seed: int) -> Job:
    return expert_job(seed, fused=True)


@CASES.case(ranks=3)
def three_ranks(seed: int) -> Job:
    return expert_job(seed)


@CASES.case()
def ddp_for_dense(seed: int) -> Job:
    """DDP reduces the dense parts and is told to leave the experts alone."""
    model = build(seed)
    ignored = [n for n, _ in model.named_parameters() if ".experts." in n]
    DDP._set_params_and_buffers_to_ignore_for_model(model, ignored)
    wrapped = DDP(model)

    def body(job: Job, step: int, at: Callable[[str], None]) -> None:
        loss_of(job.model, next(job.state["data"])).backward()
        at("backward")
        clip_by_hand(job.model, None)
        job.optimizers[0].step()
        at("step")
        job.optimizers[0].zero_grad()

    return job_of(wrapped, torch.optim.AdamW(wrapped.parameters(), lr=3e-3), body)


@CASES.case()
def uneven(seed: int) -> Job:
    """Rank 0 has a second optimizer's worth of state in its experts: the ranks' schedules differ."""
    job = expert_job(seed)
    dense, experts = parts(job.model)
    expert_class = torch.optim.AdamW if dist.get_rank() == 0 else torch.optim.SGD
    job.optimizers = [torch.optim.AdamW(dense, lr=3e-3), expert_class(experts, lr=3e-3)]
    body = job.body

    def both(job: Job, step: int, at: Callable[[str], None]) -> None:
        body(job, step, at)
        job.optimizers[1].step()
        job.optimizers[1].zero_grad()

    # The experts' gradients must outlive the first optimizer's zero_grad.
    job.body = both
    return job


@CASES.case(ranks=4, quick=True)
def with_replicas(seed: int) -> Job:
    """Two replicas of two expert-parallel ranks: experts are reduced over the replicas, dense parts over all."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "expert"))
    group, replicas = mesh.get_group("expert"), mesh.get_group("replicate")
    model = build(seed, group)
    world = dist.get_world_size()

    def body(job: Job, step: int, at: Callable[[str], None]) -> None:
        loss_of(job.model, next(job.state["data"])).backward()
        dense, experts = parts(job.model)
        reduce_by_hand(dense, None, world)
        reduce_by_hand(experts, replicas, world)
        at("backward")
        clip_by_hand(job.model, group)
        job.optimizers[0].step()
        at("step")
        job.optimizers[0].zero_grad()

    told = {"*": dist.group.WORLD, "*.experts.*": mesh["replicate"]}
    return job_of(model, torch.optim.AdamW(model.parameters(), lr=3e-3), body, replicated=told)


@CASES.case(ranks=4)
def uneven_replicas(seed: int) -> Job:
    """The same, and the first of a rank's experts is given most of its tokens. Each rank keeps, in a buffer
    of each layer, how many tokens its experts were given in the last step.
    """
    job = with_replicas(seed)
    for moe in job.model.moes:  # type: ignore[union-attr]
        # Every rank needs some: without any, its part of the exchange has no backward.
        favoured = torch.tensor([0.7, 0.0]).repeat(moe.gate.out_features // LOCAL)
        moe.gate.register_forward_hook(lambda _gate, _inputs, scores, favoured=favoured: scores + favoured)
        moe.register_buffer("load", torch.zeros(LOCAL), persistent=False)

        def count(_experts: Any, inputs: tuple[Tensor, Tensor], load: Tensor = moe.load) -> None:
            load.copy_(torch.bincount(inputs[1], minlength=LOCAL))

        moe.experts.register_forward_pre_hook(count)
    return job


@CASES.case()
def uneven_told(seed: int) -> Job:
    """The ranks' schedules differ, so they cannot share: each captures all of what both have."""
    job = uneven(seed)
    dense = [n for n, _ in job.model.named_parameters() if ".experts." not in n]
    job.options["replicated"] = dict.fromkeys(dense, dist.group.WORLD)
    return job


@CASES.case()
def own_pace(seed: int) -> Job:
    """Dense parts are shared. The experts' optimizer steps on rank 0 always, on rank 1 every second
    time (a loss scaler, say).
    """
    model = build(seed)
    dense, experts = parts(model)
    world, rank = dist.get_world_size(), dist.get_rank()
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(experts, lr=3e-3),
        torch.optim.AdamW(dense, lr=3e-3),
    ]

    def body(job: Job, step: int, at: Callable[[str], None]) -> None:
        loss_of(job.model, next(job.state["data"])).backward()
        reduce_by_hand(dense, None, world)
        at("backward")
        if rank == 0 or step % 2:
            job.optimizers[0].step()
        job.optimizers[1].step()
        at("step")
        job.model.zero_grad()

    names = [n for n, _ in model.named_parameters() if ".experts." not in n]
    told = dict.fromkeys(names, dist.group.WORLD)
    return job_of(model, optimizers, body, replicated=told)


@CASES.case(ranks=4)
def wrongly_told(seed: int) -> Job:
    """Block 0 is told to be replicated over pairs of ranks, and begins alike; but ranks 0 and 1
    train theirs apart.

    They must capture it each; and ranks 2 and 3 must still find what they leave to 0 and 1 of the
    rest, which is alike.
    """
    pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pairs", "pair"))["pair"]
    model = replicated_model(seed)
    named = list(model.named_parameters())
    first = [p for n, p in named if n.startswith("blocks.0.")]
    rest = [p for n, p in named if not n.startswith("blocks.0.")]
    world, rank = dist.get_world_size(), dist.get_rank()

    def body(job: Job, step: int, at: Callable[[str], None]) -> None:
        loss_of(job.model, next(job.state["data"])).backward()
        reduce_by_hand(rest, None, world)
        if rank >= 2:
            reduce_by_hand(first, pair.get_group(), 2)
        at("backward")
        job.optimizers[0].step()
        at("step")
        job.model.zero_grad()

    told = {"*": dist.group.WORLD, "blocks.0.*": pair}
    return job_of(model, torch.optim.AdamW(model.parameters(), lr=3e-3), body, replicated=told)
