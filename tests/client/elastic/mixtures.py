"""Small mixture layers for tests: experts, batches, and the layer that holds all experts and all
tokens in one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

__all__ = ["WIDTH", "Batch", "Block", "Case", "batches", "descend", "expert", "reference_output"]

WIDTH = 6


@dataclass(frozen=True)
class Case:
    """A placement and what the ranks bring.

    Args:
        replicas: ``[R, E]``.
        tokens: of each rank.
        shares: the relative load of each expert; empty: all alike.
        learns: on which ranks tokens need gradients; empty: on all.
        twice: both choices of a token are one expert.
    """

    replicas: Sequence[Sequence[int]]
    tokens: Sequence[int]
    choices: int = 2
    shares: Sequence[float] = ()
    nodes: Sequence[int] | None = None
    dtype: torch.dtype = torch.float64
    reduce: Literal["mean", "sum"] = "sum"
    learns: Sequence[bool] = ()
    trained: bool = True
    twice: bool = False
    micro_batches: int = 1
    layers: int = 1
    checkpointed: bool = False
    members: Sequence[int] = field(default=(0, 1, 2, 3))

    @property
    def num_experts(self) -> int:
        return len(self.replicas[0])


@dataclass
class Batch:
    """What one rank brings to one forward, and what its output is multiplied with to make a loss."""

    tokens: Tensor
    experts: Tensor
    weights: Tensor
    target: Tensor


def expert(number: int, dtype: torch.dtype, *, trained: bool = True) -> nn.Module:
    """An expert whose weights follow from its number."""
    generator = torch.Generator().manual_seed(1000 + number)
    module = nn.Sequential(nn.Linear(WIDTH, 8, bias=False), nn.GELU(), nn.Linear(8, WIDTH))
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) / 2)
    return module.to(dtype).requires_grad_(trained)


class Block(nn.Module):
    """A dense part, a gate, and experts that are called as ``ElasticExperts`` is."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.dense = nn.Linear(WIDTH, WIDTH).double()
        self.gate = nn.Linear(WIDTH, 5, bias=False).double()
        self.experts: Any = experts
        with torch.no_grad():
            for param in [*self.dense.parameters(), *self.gate.parameters()]:
                param.copy_(torch.randn(param.shape, generator=generator))

    def forward(self, tokens: Tensor) -> Tensor:
        """Two choices of the gate."""
        inside = self.dense(tokens)
        weights, experts = self.gate(inside).softmax(-1).topk(2, dim=-1)
        out: Tensor = inside + self.experts(inside, experts, weights)
        return out


def batches(case: Case, micro_batch: int = 0) -> list[Batch]:
    """What each rank brings."""
    generator = torch.Generator().manual_seed(7 + micro_batch)
    shares = torch.tensor(case.shares or [1.0] * case.num_experts, dtype=torch.float64)
    out = []
    for rank, count in enumerate(case.tokens):
        tokens, target = torch.randn(2, count, WIDTH, generator=generator).to(case.dtype)
        weights = torch.rand(count, case.choices, generator=generator).to(case.dtype)
        drawn = torch.multinomial(shares.repeat(max(1, count), 1), case.choices, generator=generator)[:count]
        experts = drawn[:, :1].repeat(1, case.choices) if case.twice else drawn
        learns = not case.learns or case.learns[rank]
        out.append(Batch(tokens.clone().requires_grad_(learns), experts, weights.requires_grad_(), target))
    return out


def descend(module: nn.Module) -> None:
    """A step of gradient descent: an optimizer of torch's would import its compiler, seconds on each rank."""
    with torch.no_grad():
        for param in module.parameters():
            if param.grad is not None:
                param.sub_(0.05 * param.grad)


def reference_output(experts: Sequence[nn.Module], batch: Batch, tokens: Tensor) -> Tensor:
    """Every token through its experts, expert by expert."""
    # Zeros that have gradients, also where there is no token.
    out = 0 * tokens + 0 * batch.weights.sum(1, keepdim=True)
    for number, module in enumerate(experts):
        where, choice = (batch.experts == number).nonzero(as_tuple=True)
        if len(where):
            rows = module(tokens[where]) * batch.weights[where, choice].unsqueeze(-1)
            out = out.index_add(0, where, rows)
    return out
