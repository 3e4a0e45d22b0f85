"""Optimizers of elastic jobs that keep what no ``state_dict`` of AdamW has: their steps depend on
it, so a rank that lacks it goes another way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tests.e2e.precision_cases import BlockAdam

__all__ = ["OPTIMIZERS", "kept_by"]


class Counting(torch.optim.SGD):
    """Counts in an attribute, keeps a dict, an entry of no parameter, and the last gradients of
    each parameter in a list.
    """

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, lr=0.02)
        self.calls = 0
        self.scales = {"last": 1.0, "of": {"steps": 0}}
        self.all_params = list(self.param_groups[0]["params"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        self.scales = {"last": 1 / self.calls, "of": {"steps": self.calls}}
        state: dict[Any, Any] = self.state
        state["sum"] = state.get("sum", 0.0) + 1 / self.calls
        for param in self.all_params:
            if param.grad is None:
                continue
            past = state[param].setdefault("past", [])
            past.append(param.grad.clone())
            del past[:-3]
            param.grad = torch.stack(past).sum(0) * (1 + 1 / self.calls + state["sum"] / 100)
        super().step()


class ByPosition(Counting):
    """And what it keeps of a parameter lies where that stands in the list of all."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.sizes: list[float] = [float(param.detach().sum()) for param in self.all_params]
        super().step()


class OfItsRank(Counting):
    """Keeps something that is another value on each rank."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.greatest = max(float(param.detach().max()) for param in self.all_params)
        super().step()


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "": lambda params: torch.optim.AdamW(params, lr=0.02),
    "another rate": lambda params: torch.optim.AdamW(params, lr=0.05),
    "counting": Counting,
    "by position": ByPosition,
    "of its rank": OfItsRank,
    "blocks": lambda params: BlockAdam(params, 0.02),
}


def kept_by(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What it keeps of no parameter."""
    names = ("calls", "scales")
    found = {name: getattr(optimizer, name) for name in names if hasattr(optimizer, name)}
    found |= {str(k): v for k, v in optimizer.state.items() if not isinstance(k, Tensor)}
    if isinstance(optimizer, Counting):
        own = [id(param) for param in optimizer.param_groups[0]["params"]]
        found["its list is its own"] = [id(param) for param in optimizer.all_params] == own
    return found
