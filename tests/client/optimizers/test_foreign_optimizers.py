"""Optimizers that nobody passed, and that update the model's weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ckptd.client.optimizers.foreign_optimizers import ForeignOptimizers

MODEL = nn.Linear(2, 2)


class Watch:
    def __init__(self, *known: Any) -> None:
        self.foreign = ForeignOptimizers(known, MODEL.parameters())
        self.handle = register_optimizer_step_post_hook(lambda optimizer, *_: self.foreign.stepped(optimizer))

    def step(self, *optimizers: torch.optim.Optimizer) -> tuple[str, bool]:
        for parameter in MODEL.parameters():
            parameter.grad = torch.ones_like(parameter)
        for optimizer in optimizers:
            optimizer.step()
        return self.foreign.top()


@pytest.fixture
def passed() -> torch.optim.Optimizer:
    return torch.optim.AdamW(MODEL.parameters())


@pytest.fixture
def watch(passed: torch.optim.Optimizer) -> Iterator[Watch]:
    made = Watch(passed)
    yield made
    made.handle.remove()


def test_one_that_takes_over(watch: Watch, passed: torch.optim.Optimizer) -> None:
    """After its first step it may live for that step only: no snapshot, and no word."""
    second = torch.optim.SGD(MODEL.parameters(), momentum=0.9)
    assert watch.step(passed) == ("", False)
    assert watch.step(second) == ("", True)
    assert watch.step(second) == ("SGD", False)


def test_one_of_each_step(watch: Watch, passed: torch.optim.Optimizer) -> None:
    """Also while a variable holds that of the step before."""
    kept = [torch.optim.SGD(MODEL.parameters(), momentum=0.9)]
    assert watch.step(kept[0], passed) == ("", True)
    for _ in range(3):
        kept.append(torch.optim.SGD(MODEL.parameters(), momentum=0.9))
        assert watch.step(kept[-1], passed) == ("", False)


def test_one_without_state_or_with_other_weights(watch: Watch) -> None:
    other = nn.Linear(2, 2)
    for parameter in other.parameters():
        parameter.grad = torch.ones_like(parameter)
    plain, elsewhere = torch.optim.SGD(MODEL.parameters()), torch.optim.AdamW(other.parameters())
    for _ in range(3):
        assert watch.step(plain, elsewhere) == ("", False)


def test_one_inside_of_what_was_passed() -> None:
    class Around:
        def __init__(self) -> None:
            self.parts = {"inner": [torch.optim.AdamW(MODEL.parameters())]}

    around = Around()
    watch = Watch(around)
    try:
        for _ in range(3):
            assert watch.step(around.parts["inner"][0]) == ("", False)
    finally:
        watch.handle.remove()
