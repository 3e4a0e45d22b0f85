"""A byte-level model with two mixture layers: eight bytes in, the next one out. In double
precision, so that runs with other numbers of ranks, which add up in other orders, can be compared
over hundreds of steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

__all__ = ["CONTEXT", "EXPERTS", "LAYERS", "MakesLayers", "Model"]

CONTEXT, WIDTH, HIDDEN = 8, 24, 32
EXPERTS = 8
LAYERS = ("blocks.0.moe", "blocks.1.moe")


class MakesLayers(Protocol):
    """Who spreads experts over ranks: an `ElasticJob`."""

    def layer(self, name: str, make_expert: Callable[[int], nn.Module]) -> nn.Module:
        """The mixture layer of that name: ``layer(tokens, experts, weights)``."""


class Expert(nn.Module):
    """Drawn from its number alone: all replicas of it begin alike."""

    def __init__(self, base: int, number: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        generator = torch.Generator().manual_seed(1000 + base + number)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.15)
        self.double()

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.down(torch.relu(self.up(rows)))
        return found


class Block(nn.Module):
    """A gate, and the experts that it chooses two of for each token."""

    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.moe = moe

    def forward(self, tokens: Tensor) -> Tensor:
        inside = self.norm(tokens)
        weights, chosen = self.gate(inside).softmax(-1).topk(2)
        found: Tensor = tokens + self.moe(inside, chosen, weights)
        return found


class Model(nn.Module):
    """Its dense part is drawn from ``seed``: any, where there is a state to go on from."""

    def __init__(self, job: MakesLayers, seed: int) -> None:
        super().__init__()
        layers = [job.layer(name, partial(Expert, 100 * i)) for i, name in enumerate(LAYERS)]
        torch.manual_seed(seed)
        self.embed = nn.Embedding(256, WIDTH)
        self.mix = nn.Linear(CONTEXT * WIDTH, WIDTH)
        self.blocks = nn.ModuleList(map(Block, layers))
        self.head = nn.Linear(WIDTH, 256)
        self.double()

    def forward(self, windows: Tensor) -> Tensor:
        """``[n, 256]``: logits of the byte that follows each window ``[n, CONTEXT]``."""
        tokens = torch.tanh(self.mix(self.embed(windows).flatten(1)))
        for block in self.blocks:
            tokens = block(tokens)
        found: Tensor = self.head(tokens)
        return found
