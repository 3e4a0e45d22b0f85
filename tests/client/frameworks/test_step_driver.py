"""A loop that is not ours: steps are begun once each, a late start is kept, and trainings of one
process have names of their own.
"""

from __future__ import annotations

import uuid

import pytest
import torch
from torch import nn

from ckptd.client import Checkpointer
from ckptd.client.frameworks.step_driver import (
    StepDriver,
    check_checkpointer_options,
    name_of_this_training,
)


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
    names = [name_of_this_training(job, "r") for _ in range(3)]
    assert names == [(job, "r"), (job, "r.2"), (job, "r.3")]
    assert name_of_this_training(job, "other") == (job, "other")


def test_a_long_name_stays_a_name() -> None:
    job, run = uuid.uuid4().hex, "r" * 64
    assert name_of_this_training(job, run)[1] == run
    assert name_of_this_training(job, run)[1] == "r" * 58 + ".2"


@pytest.mark.parametrize("name", ["windw", "model", "optimizer"])
def test_an_option_that_checkpointer_does_not_take(name: str) -> None:
    with pytest.raises(ValueError, match=f"unknown {name}.*window"):
        check_checkpointer_options({name: 1, "window": 4})
