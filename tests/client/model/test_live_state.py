"""Every tensor of the training state by name; master weights found by value; mistakes named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckptd.client.model.live_state import LiveState, find_masters

AdamW = torch.optim.AdamW


def bf16_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).bfloat16()


def masters_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().float().clone() for n, p in model.named_parameters()}


def owned(tensors: Any) -> list[tuple[Tensor, int, tuple[int, int]]]:
    return [(t, 0, (0, i)) for i, t in enumerate(tensors)]


class TestFindMasters:
    def test_by_shape_order_and_value(self) -> None:
        model = bf16_model()
        masters = masters_of(model)
        found = find_masters(dict(model.named_parameters()), owned(masters.values()))
        assert found.keys() == masters.keys()
        assert all(found[n] is masters[n] for n in masters)

    def test_whatever_order_the_optimizer_holds_them_in(self) -> None:
        model = bf16_model()
        masters = masters_of(model)
        found = find_masters(dict(model.named_parameters()), owned(reversed(masters.values())))
        assert all(found[n] is masters[n] for n in masters)

    def test_equal_values_pair_in_order(self) -> None:
        """Two norms, both all ones: the first of the model is the first of the optimizer."""
        model = nn.Sequential(nn.LayerNorm(3), nn.LayerNorm(3)).bfloat16()
        masters = masters_of(model)
        found = find_masters(dict(model.named_parameters()), owned(masters.values()))
        assert all(found[n] is masters[n] for n in masters)

    def test_a_master_that_does_not_round_to_its_parameter_is_not_taken(self) -> None:
        model = bf16_model()
        masters = masters_of(model)
        with torch.no_grad():
            masters["0.weight"][0, 0] += 1
        found = find_masters(dict(model.named_parameters()), owned(masters.values()))
        assert "0.weight" not in found
        assert len(found) == 3

    def test_parameters_held_by_the_optimizer_need_none(self) -> None:
        model = bf16_model()
        params = dict(model.named_parameters())
        extra = params["0.weight"].detach().float()
        assert find_masters(params, owned([*params.values(), extra])) == {}

    def test_fp32_models_have_none(self) -> None:
        model = nn.Linear(3, 3)
        assert find_masters(dict(model.named_parameters()), owned(masters_of(model).values())) == {}


class TestBinding:
    def test_masters_are_what_the_optimizer_updates(self) -> None:
        model = bf16_model()
        masters = masters_of(model)
        bound = LiveState(model, [AdamW(list(masters.values()))], None)
        assert bound.held("0.weight") is masters["0.weight"]
        assert set(bound.params) == set(masters)
        assert dict(bound.named_held()).keys() == masters.keys()
        assert not any(n.startswith("extra/") for n in bound.params)

    def test_what_the_model_does_not_know_is_extra(self) -> None:
        model = nn.Linear(2, 2)
        loose = nn.Parameter(torch.zeros(3))
        second = AdamW([loose])
        second.add_param_group({"params": [late := nn.Parameter(torch.zeros(3))]})
        bound = LiveState(model, [AdamW(model.parameters()), second], None)
        assert bound.params["extra/1.0.0"] is loose
        assert bound.params["extra/1.1.0"] is late
        assert bound.owner["extra/1.1.0"] == (1, 1)

    def test_a_parameter_without_optimizer_has_no_state(self) -> None:
        model = nn.Linear(2, 2)
        bound = LiveState(model, [AdamW([model.weight])], None)
        assert "bias" in bound.params
        assert "bias" not in bound.owner
        assert bound.state("bias") == {}
        assert bound.specs("bias") == ()
        assert bound.probe("bias") is None
        assert bound.rows_allowed("bias"), "nothing updates it, so rows are independent"

    def test_looking_at_state_creates_none(self) -> None:
        """``optimizer.state`` is a defaultdict: a careless read would make empty entries that are saved."""
        model = nn.Linear(2, 2)
        optimizer = AdamW(model.parameters())
        bound = LiveState(model, [optimizer], None)
        assert bound.state("weight") == {}
        bound.specs("weight")
        assert len(optimizer.state) == 0

    def test_specs_before_and_after_the_first_step_are_the_same(self) -> None:
        model = nn.Linear(2, 2)
        optimizer = AdamW(model.parameters())
        bound = LiveState(model, [optimizer], None)
        before = {n: bound.specs(n) for n in bound.params}
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert {n: bound.specs(n) for n in bound.params} == before

    def test_factored_state_is_known_in_its_true_shape(self) -> None:
        model = nn.Linear(5, 7)
        bound = LiveState(model, [torch.optim.Adafactor(model.parameters())], None)
        shapes = {s.key: s.shape for s in bound.specs("weight") if s.kind == "tensor"}
        assert shapes == {"row_var": (7, 1), "col_var": (1, 5)}

    def test_one_probe_serves_all_parameters_of_a_kind(self) -> None:
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
        bound = LiveState(model, [AdamW(model.parameters())], None)
        assert bound.probe("0.weight") is bound.probe("2.weight")
        assert bound.probe("0.weight") is not bound.probe("0.bias")

    def test_tied_parameters_appear_once(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        bound = LiveState(model, [AdamW(model.parameters())], None)
        assert list(bound.params) == ["0.weight", "0.bias", "1.bias"]

    def test_buffers_that_are_not_persistent_count_and_none_does_not(self) -> None:
        model = nn.Linear(2, 2)
        model.register_buffer("load", torch.zeros(2), persistent=False)
        model.register_buffer("absent", None)
        assert set(LiveState(model, [AdamW(model.parameters())], None).buffers()) == {"load"}


class TestErrors:
    def test_two_optimizers_for_one_parameter(self) -> None:
        model = nn.Linear(3, 2)
        with pytest.raises(ValueError, match=r"shape \(2, 3\) is held by two optimizers"):
            LiveState(model, [AdamW(model.parameters()), AdamW([model.weight])], None)

    def test_a_master_of_an_unknown_parameter(self) -> None:
        model = bf16_model()
        masters = masters_of(model)
        masters["no.such"] = masters.pop("0.weight")
        with pytest.raises(ValueError, match=r"masters\['no\.such'\]: .*names look like '0\.weight'"):
            LiveState(model, [AdamW(list(masters.values()))], masters)

    def test_a_master_of_another_shape(self) -> None:
        model = bf16_model()
        masters = masters_of(model) | {"0.weight": torch.zeros(2, 3)}
        with pytest.raises(ValueError, match=r"masters\['0\.weight'\] has shape \(2, 3\), .*\(3, 3\)"):
            LiveState(model, [AdamW(list(masters.values()))], masters)

    def test_a_master_that_no_optimizer_holds(self) -> None:
        model = bf16_model()
        masters = masters_of(model)
        optimizer = AdamW([m.clone() for m in masters.values()])
        with pytest.raises(ValueError, match=r"masters\['0\.weight'\] is in no optimizer"):
            LiveState(model, [optimizer], masters)


def test_state_for_blocks_of_rows_is_not_cut_into_rows() -> None:
    """8-bit optimizers keep fp32 state for tensors as small as a probe's. Their snapshots with a
    window failed, and were given up.
    """
    model = nn.Linear(4, 4)
    binding = LiveState(model, [torch.optim.AdamW(model.parameters())], None)
    assert binding.rows_allowed("weight")
    weight = binding.params["weight"]
    binding.optimizers[0].state[weight] = {
        "state1": torch.zeros(4, 4, dtype=torch.uint8),
        "absmax1": torch.ones(1),
    }
    assert not binding.rows_allowed("weight")
