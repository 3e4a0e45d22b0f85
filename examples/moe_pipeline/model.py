"""The transformer of `examples.moe_text` cut into pipeline stages.

Each stage's gates have a load-balancing loss of their own, which never leaves the stage: it is
added to the gradients on the way back, so that a stage sends its output and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ckptd.demo.model import Block, MoEConfig

__all__ = ["CONFIG", "Stage", "build_stage"]

CONFIG = MoEConfig(
    context=64,
    width=64,
    num_heads=4,
    num_layers=1,
    num_experts=4,
    expert_hidden=128,
)


class _AddLoss(torch.autograd.Function):
    """Gives its first argument on, and lets `weight * loss` take part in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, weight: float) -> Tensor:
        ctx.weight, ctx.like = weight, loss
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], torch.full_like(ctx.like, ctx.weight), None


class Stage(nn.Module):
    """Stage `index` of `count`: the first embeds bytes, the last predicts them, each has its own layers.

    Bytes int64 `[B, T]` or activations `[B, T, D]` in; activations or logits `[B, T, 256]` out.
    """

    def __init__(self, config: MoEConfig, index: int, count: int) -> None:
        super().__init__()
        self.config = config
        first, last = index == 0, index == count - 1
        self.embedding = nn.Embedding(config.vocab_size, config.width) if first else None
        self.positions = nn.Embedding(config.context, config.width) if first else None
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width) if last else None
        self.head = nn.Linear(config.width, config.vocab_size, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None and self.positions is not None:
            x = self.embedding(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            x, balance = layer(x)
            x = _AddLoss.apply(x, balance, self.config.balance_weight)  # type: ignore[no-untyped-call]
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def build_stage(index: int, count: int, init_seed: int) -> Stage:
    """Weights that follow from the seed and the stage, not from which replica holds it."""
    torch.manual_seed(1000 * init_seed + index)
    return Stage(CONFIG, index, count)
