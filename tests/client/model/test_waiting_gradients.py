"""Which gradients wait at a top, and that they come back with a snapshot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckptd.client import values
from ckptd.client.model.live_state import LiveState
from ckptd.client.model.waiting_gradients import UnreducedGradients, WaitingGradients


class Adversaries:
    """The second optimizer steps in each step, the first at times only."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.ModuleDict({"g": nn.Linear(3, 3), "d": nn.Linear(3, 3)})
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in self.model.values()]
        self.waiting = WaitingGradients(LiveState(self.model, self.optimizers, None))

    def backward(self, name: str) -> None:
        self.model[name](torch.ones(2, 3)).square().sum().backward()

    def step(self, *numbers: int) -> None:
        for number in numbers:
            self.optimizers[number].step()
            self.waiting.updated(number)

    def top(self) -> dict[str, Tensor] | None:
        """What a snapshot at this top has."""
        found = self.waiting.state_dict()
        self.waiting.begin()
        return found

    def begin_to_know(self) -> None:
        """One step in which only one of them steps."""
        self.step(1)
        assert not self.waiting.can_be_captured, "what was used before is not known"
        self.waiting.begin()


def test_optimizers_that_all_step_need_nothing() -> None:
    job = Adversaries()
    for name in ("g", "d"):
        job.backward(name)
    job.step(0, 1)
    assert job.top() is None


def test_gradients_that_add_up_come_back() -> None:
    job = Adversaries()
    job.begin_to_know()
    job.backward("g")
    job.step(1)
    assert job.waiting.can_be_captured
    found = job.top()
    assert found is not None
    assert set(found) == {"param/g.weight", "param/g.bias"}
    again = Adversaries()
    again.waiting.load_state_dict(found)
    for name, recorded in found.items():
        live = again.model.get_parameter(name.removeprefix("param/")).grad
        assert live is not None
        assert torch.equal(live, recorded)
    again.step(1)
    assert values.pack(again.top()) == values.pack(found), "a replay compares them"


def test_gradients_that_were_used_do_not_wait() -> None:
    """They stay until ``zero_grad()``, for several steps; nothing depends on their values."""
    job = Adversaries()
    job.begin_to_know()
    job.backward("g")
    job.step(0, 1)
    job.top()
    job.step(1)
    assert not job.waiting.there_are
    assert job.top() == {}
    job.backward("g")  # without zero_grad: they add up
    job.step(1)
    assert job.waiting.there_are


def test_a_step_without_any_update_has_nothing() -> None:
    """The weights are those of the top before: a replay computes the gradients again."""
    job = Adversaries()
    job.begin_to_know()
    job.backward("g")
    assert job.top() == {}


def test_zeros_in_the_place_of_used_ones_do_not_wait() -> None:
    """A fresh process has them in place of gradients that the one before had used."""
    job = Adversaries()
    job.waiting.load_state_dict({})
    job.model["g"].weight.grad = torch.zeros(3, 3)
    job.waiting.begin_as({})
    job.step(1)
    assert job.top() == {}


@pytest.mark.usefixtures("alone")
def test_gradients_that_fsdp_has_not_reduced() -> None:
    """A micro-batch for each step of the loop: a snapshot between two of them lacked the first one's gradients,
    and its replay differed.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model: Any = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))
    waiting = UnreducedGradients(model)
    for last in (False, True):
        assert not waiting.there_are or last
        model.set_requires_gradient_sync(last)
        model(torch.ones(2, 4)).sum().backward()
        assert waiting.there_are is not last
