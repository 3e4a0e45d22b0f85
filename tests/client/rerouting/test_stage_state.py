"""A stage's state is put back bit for bit, and read by another worker of the stage."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckptd.client.rerouting.stage_state import StageState, check_not_tied

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


class Pipeline:
    """What the stages of a pipeline would send each other."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules, self._meet = modules, Barrier(len(modules))
        self._sent: list[list[bytes]] = [[] for _ in modules]

    def _exchange(self, stage: int, payload: bytes) -> list[bytes]:
        self._sent[stage].append(payload)
        self._meet.wait(10)
        return [sent[len(self._sent[stage]) - 1] for sent in self._sent]

    def check(self) -> list[str]:
        """The refusal of each stage; "": it has none."""

        def of(stage: int) -> str:
            try:
                check_not_tied(self._modules[stage], partial(self._exchange, stage))
            except ValueError as error:
                return str(error)
            return ""

        with ThreadPoolExecutor(len(self._modules)) as pool:
            return list(pool.map(of, range(len(self._modules))))


def test_an_embedding_that_is_tied_over_stages_is_named_on_all() -> None:
    first, middle, last = (nn.Module() for _ in range(3))
    first.embed, middle.layer, last.head = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6, bias=False)
    assert Pipeline([first, middle, last]).check() == [""] * 3
    last.head.weight = nn.Parameter(first.embed.weight.detach().clone())
    for told in Pipeline([first, middle, last]).check():
        assert "embed.weight of stage 0 and head.weight of stage 2 have the same values" in told
    with torch.no_grad():
        last.head.weight[0, 0] += 1
    assert Pipeline([first, middle, last]).check() == [""] * 3, "they are trained apart"


def test_stages_that_begin_alike_have_nothing_tied_without_an_embedding() -> None:
    """Each stage was made after the same seed; and one stage may have both."""
    alike = [nn.Linear(4, 4), nn.Linear(4, 4)]
    alike[1].load_state_dict(alike[0].state_dict())
    both = nn.Module()
    both.embed, both.head = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
    both.head.weight = both.embed.weight
    assert Pipeline([both, *alike]).check() == [""] * 3
