"""Small models with mixture blocks of the forms that are met: experts fused as in transformers 5,
and a list that the block walks itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ckptd.client.elastic import HandWritten

__all__ = [
    "HAND_WRITTEN",
    "PLACEMENT",
    "WIDTH",
    "FusedBlock",
    "FusedExperts",
    "ListBlock",
    "Model",
    "batch",
    "loss",
]

WIDTH, INSIDE, EXPERTS = 8, 6, 4
# Two fused blocks and one of a list, on three ranks; rank 2 has nothing of the last one.
PLACEMENT = [
    [[1, 0, 2, 0], [1, 1, 0, 0], [0, 1, 0, 1]],
    [[1, 1, 1, 1], [0, 0, 1, 0], [1, 0, 0, 1]],
    [[1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]],
]


class FusedExperts(nn.Module):
    """``gate_up_proj [E, 2F, H]`` and ``down_proj [E, H, F]``."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(EXPERTS, 2 * INSIDE, WIDTH))
        self.down_proj = nn.Parameter(torch.empty(EXPERTS, WIDTH, INSIDE))
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Every token through its experts."""
        out = torch.zeros_like(hidden_states)
        for number in range(EXPERTS):
            where, choice = (top_k_index == number).nonzero(as_tuple=True)
            if len(where):
                rows = functional.linear(hidden_states[where], self.gate_up_proj[number])
                gate, up = rows.chunk(2, dim=-1)
                rows = functional.linear(self.act_fn(gate) * up, self.down_proj[number])
                out = out.index_add(0, where, rows * top_k_weights[where, choice, None])
        return out


class Gate(nn.Module):
    """Logits, and the weights and numbers of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(EXPERTS, WIDTH))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``[T, E]``, ``[T, 2]``, ``[T, 2]``."""
        logits = functional.linear(tokens, self.weight)
        weights, experts = logits.softmax(-1).topk(2, dim=-1)
        return logits, weights / weights.sum(-1, keepdim=True), experts


class FusedBlock(nn.Module):
    """Calls its experts with tokens, experts and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.experts: Any = FusedExperts()

    def forward(self, hidden: Tensor) -> Tensor:
        """``[B, S, H]`` of ``[B, S, H]``."""
        tokens = hidden.reshape(-1, WIDTH)
        _, weights, experts = self.gate(tokens)
        out: Tensor = self.experts(tokens, experts, weights)
        return out.view(hidden.shape)


class ListBlock(nn.Module):
    """Walks the list of its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Gate()
        self.ffn: Any = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, INSIDE), nn.GELU(), nn.Linear(INSIDE, WIDTH))
            for _ in range(EXPERTS)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """``[B, S, H]`` of ``[B, S, H]``."""
        tokens = hidden.reshape(-1, WIDTH)
        _, weights, experts = self.router(tokens)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.ffn):
            where, choice = (experts == number).nonzero(as_tuple=True)
            if len(where):
                rows = expert(tokens[where]) * weights[where, choice, None]
                out = out.index_add(0, where, rows)
        return out.view(hidden.shape)


def _elastic_list(block: ListBlock, hidden: Tensor) -> Tensor:
    tokens = hidden.reshape(-1, WIDTH)
    _, weights, experts = block.router(tokens)
    out: Tensor = block.ffn(tokens, experts, weights)
    return out.view(hidden.shape)


HAND_WRITTEN = {ListBlock: HandWritten(experts="ffn", forward=_elastic_list)}


class Model(nn.Module):
    """Three blocks, a shared expert beside, and the gates' logits of all of them."""

    def __init__(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([FusedBlock(), FusedBlock(), ListBlock()])
        self.shared_expert = nn.Linear(WIDTH, WIDTH)
        self.logits: list[Tensor] = []
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) / 2)
        for module in self.modules():
            if isinstance(module, Gate):
                module.register_forward_hook(lambda _m, _i, out: self.logits.append(out[0]))
        self.to(dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[B, S, H]`` of ``[B, S, H]``."""
        self.logits.clear()
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden + torch.tanh(self.shared_expert(hidden))


def batch(rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """What a rank brings, ``[2, S, H]``; rank 1 brings least."""
    generator = torch.Generator().manual_seed(50 + rank)
    return torch.randn(2, (5, 1, 7)[rank], WIDTH, generator=generator).to(dtype)


def loss(model: Model, hidden: Tensor) -> Tensor:
    """Of the output, and of how evenly gates spread: the square of their mean probabilities."""
    out = model(hidden)
    aux = torch.stack([logits.softmax(-1).mean(0).square().sum() for logits in model.logits])
    total: Tensor = out.square().mean() + aux.sum()
    return total
