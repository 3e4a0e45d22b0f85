"""A stage's state is put back bit for bit, and read by another worker of the stage."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckptd.client.rerouting.stage_state import StageState

Schedule = torch.optim.lr_scheduler.LambdaLR


def stage(width: int = 4, *, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, Schedule, StageState]:
    """In bfloat16, with an optimizer that keeps a wider state: its own ``load_state_dict`` would cast it."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    schedule = Schedule(optimizer, lambda step: 1 / (step + 1))
    return module, optimizer, schedule, StageState(module, optimizer, {"schedule": schedule})


def step(module: nn.Module, optimizer: torch.optim.Optimizer, schedule: Schedule) -> None:
    module(torch.randn(3, 4, dtype=torch.bfloat16)).float().square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    for state in optimizer.state.values():
        state["sum"] = state.get("sum", torch.zeros(())) + 1e-6  # in float32
    schedule.step()


def flat(state: StageState) -> list[Any]:
    found: list[Any] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            for key, each in value.items():
                found.append(key)
                walk(each)
        elif isinstance(value, list | tuple):
            for each in value:
                walk(each)
        elif isinstance(value, torch.Tensor):
            found.extend((value.dtype, value.tolist()))
        else:
            found.append(value)

    walk(state.copy())
    return found


@pytest.mark.parametrize("steps", [0, 2])
def test_a_step_is_taken_back(steps: int) -> None:
    """The first one, too: before it the optimizer has no state."""
    module, optimizer, schedule, state = stage()
    for _ in range(steps):
        step(module, optimizer, schedule)
    before, copied = flat(state), state.copy()
    step(module, optimizer, schedule)
    assert flat(state) != before
    state.restore(copied)
    assert flat(state) == before
    assert len(optimizer.state) == (4 if steps else 0)


def test_another_worker_of_the_stage_reads_it() -> None:
    module, optimizer, schedule, state = stage()
    step(module, optimizer, schedule)
    _, other, _, newcomer = stage(seed=1)
    packed = state.pack()
    newcomer.unpack(packed)
    assert flat(newcomer) == flat(state)
    assert next(iter(other.state.values()))["sum"].dtype is torch.float32
    before = copy.deepcopy(flat(newcomer))
    module(torch.randn(3, 4, dtype=torch.bfloat16))
    with torch.no_grad():
        next(module.parameters()).zero_()
    assert flat(newcomer) == before, "they share no memory"


def test_the_state_of_another_stage_is_refused() -> None:
    _, _, _, state = stage()
    module, optimizer, _, _ = stage(5)
    with pytest.raises(ValueError, match="the state is of another stage"):
        StageState(module, optimizer).unpack(state.pack())


def test_whoever_gets_the_state_goes_on_with_the_same_random_numbers() -> None:
    *_, state = stage()
    packed = state.pack()
    wanted = torch.rand(2).tolist(), np.random.rand(), random.random()
    torch.manual_seed(9)
    state.unpack(packed)
    assert (torch.rand(2).tolist(), np.random.rand(), random.random()) == wanted
