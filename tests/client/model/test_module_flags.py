"""Flags that a schedule sets once."""

from __future__ import annotations

import torch
from torch import nn

from ckptd.client import values
from ckptd.client.model.live_state import LiveState
from ckptd.client.model.module_flags import ModuleFlags


def model_with_flags(*, frozen: bool = False) -> tuple[nn.Sequential, ModuleFlags]:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].requires_grad_(not frozen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, ModuleFlags(LiveState(model, [optimizer], None))


def test_what_was_set_in_a_step_comes_back() -> None:
    before, flags = model_with_flags(frozen=True)
    assert flags.state_dict() == {}
    before[0].requires_grad_(True)
    before[1].eval()
    after, here = model_with_flags(frozen=True)
    here.load_state_dict(values.unpack(values.pack(flags.state_dict())))
    assert (after[0].weight.requires_grad, after[0].bias.requires_grad) == (True, True)
    assert [module.training for module in after.modules()] == [True, True, False]


def test_what_the_script_says_otherwise_counts() -> None:
    """Nothing was recorded of flags that had not changed."""
    _, flags = model_with_flags()
    after, here = model_with_flags(frozen=True)
    here.load_state_dict(flags.state_dict())
    assert not after[0].weight.requires_grad


def test_going_back_in_a_process() -> None:
    """Its start is still that of the program."""
    model, flags = model_with_flags()
    recorded = flags.state_dict()
    model.eval()
    model[0].requires_grad_(False)
    again = ModuleFlags(LiveState(model, [torch.optim.SGD(model.parameters(), lr=0.1)], None))
    again.begin_as(flags)
    again.load_state_dict(recorded)
    assert model[0].weight.requires_grad
    assert all(module.training for module in model.modules())
