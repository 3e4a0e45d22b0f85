"""A loop that is not ours: steps are begun once each, a late start is kept, and trainings of one
process have names of their own.
"""

from __future__ import annotations

import uuid
from dataclasses import replace

import torch
from torch import nn

from ckptd.client import Checkpointer, RunOptions
from ckptd.client.frameworks.step_driver import StepDriver, name_of_this_training


def off() -> Checkpointer:
    model = nn.Linear(2, 2)
    return Checkpointer(model, torch.optim.SGD(model.parameters()), daemon=None)


def test_a_step_begins_once() -> None:
    ckpt = off()
    driver = StepDriver(ckpt, 5)
    seen = []
    for step in (0, 0, 1, 1, 1, 2):  # micro-batches of one step
        driver.top(step)
        seen.append(ckpt.step)
    assert seen == [0, 0, 1, 1, 1, 2]


def test_it_begins_where_the_library_begins() -> None:
    ckpt = off()
    driver = StepDriver(ckpt, 10, start=7)
    driver.top(7)
    assert ckpt.step == 7
    driver.top(8)
    assert ckpt.step == 8


def test_after_the_end_nothing_happens() -> None:
    ckpt = off()
    driver = StepDriver(ckpt, 2)
    driver.top(0)
    driver.finish(1)
    reached = ckpt.step
    driver.top(reached + 1)
    assert ckpt.step == reached


def test_a_second_training_has_another_name() -> None:
    job = uuid.uuid4().hex
    given = RunOptions(name="r", job=job, rank=1, world_size=2)
    names = [name_of_this_training(given) for _ in range(3)]
    assert names == [replace(given, name=name) for name in ("r", "r.2", "r.3")]
    other = replace(given, name="other")
    assert name_of_this_training(other) == other


def test_a_long_name_stays_a_name() -> None:
    run = RunOptions(name="r" * 64, job=uuid.uuid4().hex)
    assert name_of_this_training(run).name == run.name
    assert name_of_this_training(run).name == "r" * 58 + ".2"
