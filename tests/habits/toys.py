"""Trainings that show what the driver tells apart: one that is exact, one that is not, and one that
is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ckptd.client import Checkpointer
from tests.habits.leaves import names_of
from tests.habits.life import Life

__all__ = ["main"]


class Numbers:
    """Endless data with a position; ``forgets`` it, as a loader does that is not in ``state=``."""

    def __init__(self, *, forgets: bool, holds: Any = 0) -> None:
        self.at, self._forgets, self._holds = 0, forgets, holds

    def __next__(self) -> Tensor:
        self.at += 1
        return torch.randn(4, 6, generator=torch.Generator().manual_seed(self.at))

    def state_dict(self) -> dict[str, Any]:
        return {"at": 0 if self._forgets else self.at, "holds": self._holds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def main(argv: Sequence[str]) -> None:
    life = Life(argv)
    data = Numbers(forgets=life.row == "forgets", holds=object() if life.row == "refused" else 0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.1), nn.Linear(12, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ckpt = Checkpointer(model, optimizer, {"data": data}, **life.options())
    life.follow(ckpt)
    for step in ckpt.steps(life.steps):
        life.top(step)
        batch = next(data)
        life.batch(batch)
        optimizer.zero_grad()
        (model(batch) - batch).square().mean().backward()
        optimizer.step()
    life.end({"model": model.state_dict(), "optimizer": optimizer}, names_of(model=model))
