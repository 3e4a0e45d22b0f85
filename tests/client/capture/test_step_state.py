"""Step scalars: what is gathered at the top of the loop goes back to where it came from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ckptd.client import values
from ckptd.client.capture.step_state import (
    apply_groups,
    gather_groups,
    grad_flags,
    zero_grads,
)
from ckptd.client.model.live_state import LiveState

AdamW = torch.optim.AdamW


def bound(model: nn.Module, **options: Any) -> LiveState:
    return LiveState(model, [AdamW(model.parameters(), **options)], None)


class TestGroups:
    def test_options_without_parameters_survive_the_wire(self) -> None:
        binding = bound(nn.Linear(2, 2), lr=0.5, betas=(0.8, 0.9))
        groups = values.unpack(values.pack(gather_groups(binding)))
        assert "params" not in groups[0][0]
        other = bound(nn.Linear(2, 2))
        apply_groups(other, groups)
        assert other.optimizers[0].param_groups[0]["lr"] == 0.5
        assert other.optimizers[0].param_groups[0]["betas"] == (0.8, 0.9)

    def test_a_tensor_learning_rate_is_filled_in_place(self) -> None:
        """A captured graph reads that very tensor."""
        binding = bound(nn.Linear(2, 2), lr=torch.tensor(0.5), foreach=False)
        groups = values.unpack(values.pack(gather_groups(binding)))
        live = binding.optimizers[0].param_groups[0]["lr"]
        live.fill_(9)
        apply_groups(binding, groups)
        assert binding.optimizers[0].param_groups[0]["lr"] is live
        assert live == 0.5

    def test_another_number_of_groups(self) -> None:
        model = nn.Linear(2, 2)
        two = LiveState(model, [AdamW([{"params": [p]} for p in model.parameters()])], None)
        with pytest.raises(ValueError, match=r"\[1\] here, \[2\] in the snapshot"):
            apply_groups(bound(nn.Linear(2, 2)), gather_groups(two))


class TestGradFlags:
    def test_zeros_come_back_where_there_was_a_gradient_and_only_there(self) -> None:
        """``zero_grad(set_to_none=False)`` leaves zeros, with which AdamW decays weights; a fresh
        process has None.
        """
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        binding = bound(model)
        binding.params["0.bias"].grad = torch.ones(2)
        binding.params["1.weight"].grad = torch.zeros(2, 2)
        flags = grad_flags(binding)
        other = bound(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        zero_grads(other, flags, ["0.weight", "0.bias", "1.weight"])
        assert [n for n, p in other.params.items() if p.grad is not None] == ["0.bias", "1.weight"]
        assert all(not p.grad.any() for p in other.params.values() if p.grad is not None)

    def test_only_the_named_ones(self) -> None:
        binding = bound(nn.Linear(2, 2))
        for p in binding.params.values():
            p.grad = torch.ones_like(p)
        flags = grad_flags(binding)
        for p in binding.params.values():
            p.grad = None
        zero_grads(binding, flags, ["bias"])
        assert [n for n, p in binding.params.items() if p.grad is not None] == ["bias"]

    def test_a_gradient_that_is_there_is_kept(self) -> None:
        binding = bound(nn.Linear(2, 2))
        kept = binding.params["weight"].grad = torch.ones(2, 2)
        zero_grads(binding, grad_flags(binding), ["weight"])
        assert binding.params["weight"].grad is kept

    def test_masters_have_flags_of_their_own(self) -> None:
        model = nn.Linear(2, 2).bfloat16()
        masters = {n: p.detach().float() for n, p in model.named_parameters()}
        binding = LiveState(model, [AdamW(list(masters.values()))], masters)
        masters["bias"].grad = torch.ones(2)
        flags = grad_flags(binding)
        masters["bias"].grad = None
        zero_grads(binding, flags, ["weight", "bias"])
        assert [n for n, m in masters.items() if m.grad is not None] == ["bias"]
        assert model.bias.grad is None


class Counts(torch.optim.SGD):
    """Keeps ``count`` as a Python int, as optimizers did before torch 1.12 and some still do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p]["count"] = self.state[p].get("count", 0) + 1
                p.sub_(p.grad)


def python_state_of(binding: LiveState) -> dict[str, dict[str, Any]]:
    binding.kept.look({})
    return binding.kept.python()


def test_plain_values_in_optimizer_state_are_found() -> None:
    model = nn.Linear(2, 2)
    binding = LiveState(model, [Counts(model.parameters())], None)
    assert python_state_of(binding) == {}
    model.weight.grad = torch.ones(2, 2)
    binding.optimizers[0].step()
    binding.optimizers[0].step()
    assert python_state_of(binding) == {"weight": {"count": 2}}
    assert python_state_of(bound(nn.Linear(2, 2))) == {}
