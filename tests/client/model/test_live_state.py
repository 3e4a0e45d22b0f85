"""Every tensor of the training state by name; master weights found by value; mistakes named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from ckptd.client.model.live_state import (
    LiveState,
    find_masters,
    is_compiled,
    local,
    named_buffers,
    named_modules,
    named_parameters,
    names_with_wrappers,
)
from ckptd.client.model.operators import discover_operators
from ckptd.client.schedule.snapshot_plan import export_facts
from tests.client.doubled import Doubled
from tests.e2e.precision_cases import Blocks

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

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
    def test_of_any_lower_precision(self, dtype: torch.dtype) -> None:
        masters = [torch.randn(3, 3), torch.randn(3, 3).bfloat16()]
        params: dict[str, Tensor] = {"a": masters[1].to(dtype), "b": masters[0].to(dtype)}
        found = find_masters(params, owned(masters))
        assert found.get("b") is masters[0]
        assert (found.get("a") is masters[1]) == (dtype.itemsize == 1)

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


class Net(nn.Module):
    """Has a part of its own that is called ``module``, a buffer, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.BatchNorm1d(2)])
        self.head = nn.Linear(2, 2)
        self.head.weight = self.module.weight


def wrapped() -> nn.Module:
    net = Net()
    net.layers[0] = checkpoint_wrapper(net.layers[0])
    net.layers[1] = torch.compile(net.layers[1], backend="eager")  # type: ignore[assignment]
    return DistributedDataParallel(net)


@pytest.mark.parametrize("remove_duplicate", [True, False])
def test_a_bare_model_has_the_names_that_torch_gives(remove_duplicate: bool) -> None:
    net = Net()
    for ours, theirs in (
        (named_parameters, net.named_parameters),
        (named_buffers, net.named_buffers),
    ):
        found = list(ours(net, remove_duplicate=remove_duplicate))
        assert [n for n, _ in found] == [n for n, _ in theirs(remove_duplicate=remove_duplicate)]
    assert [n for n, _ in named_modules(net)] == [n for n, _ in net.named_modules()]


@pytest.mark.usefixtures("alone")
def test_wrappers_leave_no_trace_in_names() -> None:
    """Data parallelism around all, recomputation around one layer, compiling around another; a part
    named ``module`` stays.
    """
    model, bare = wrapped(), Net()
    assert "module.layers.0._checkpoint_wrapped_module.weight" in dict(model.named_parameters())
    assert [n for n, _ in named_parameters(model)] == [n for n, _ in bare.named_parameters()]
    assert [n for n, _ in named_buffers(model)] == [n for n, _ in bare.named_buffers()]
    assert [n for n, _ in named_modules(model)] == [n for n, _ in bare.named_modules()]
    plain = names_with_wrappers(model)
    assert plain["module.layers.1._orig_mod.bias"] == "layers.1.bias"
    operators = discover_operators(model, rows_allowed=lambda name: True)
    assert {m.param for op in operators for m in op.members} == set(plain.values())


@pytest.mark.usefixtures("alone")
def test_a_binding_finds_live_tensors_by_plain_names() -> None:
    model = wrapped()
    masters = {n: p.detach().clone() for n, p in model.named_parameters() if n.endswith("head.bias")}
    rest = [p for n, p in model.named_parameters() if not n.endswith("head.bias")]
    binding = LiveState(model, [torch.optim.SGD([*rest, *masters.values()], lr=0.1)], masters)
    assert list(binding.masters) == ["head.bias"]  # given as `module.head.bias`
    places, leaf = binding.buffer_places()["layers.1.running_mean"]
    assert places[leaf] is binding.buffers()["layers.1.running_mean"]
    assert export_facts(binding)["aliases"] == {"head.weight": "module.weight"}


def test_places_are_the_same_until_a_dictionary_of_the_optimizer_is_another() -> None:
    linear, norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
    model = nn.Sequential(linear, norm)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    binding = LiveState(model, [optimizer], None)
    places = binding.places()
    assert places.states["0.weight"] is optimizer.state[linear.weight]
    held, key = places.buffers["1.running_mean"]
    assert held[key] is norm.running_mean
    optimizer.step()
    assert binding.places() is places
    optimizer.state[linear.weight] = dict(optimizer.state[linear.weight])
    assert binding.places(again=False) is places, "nobody has looked"
    assert binding.places().states["0.weight"] is optimizer.state[linear.weight]
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    binding.refresh()
    assert "extra/0.1.0" in binding.places().states


def test_groups_that_a_program_adds_while_it_trains() -> None:
    """A process that starts again does not come to that step: it gets them as they were recorded."""

    def begin() -> tuple[LiveState, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
        return LiveState(model, [optimizer], None), optimizer

    there, optimizer = begin()
    before = there.group_key()
    optimizer.add_param_group({"params": [there.params["0.weight"], there.params["0.bias"]], "lr": 0.5})
    assert there.refresh() == []
    recorded = export_facts(there)["groups"]
    here, other = begin()
    here.add_groups(recorded)
    assert here.group_key() == there.group_key() != before
    assert here.owner == there.owner
    here.add_groups(recorded)  # they are there
    assert len(other.param_groups) == 2
    here.drop_groups([1])
    assert here.group_key() == before
    assert set(here.owner) == {"1.weight", "1.bias"}
    other.add_param_group({"params": [here.params["0.weight"]]})  # by the loop, in a replay
    here.see_groups()
    assert here.owner["0.weight"] == (0, 1)


def test_a_parameter_that_the_model_never_had_is_told() -> None:
    binding = LiveState(
        model := nn.Linear(2, 2), [optimizer := torch.optim.SGD(model.parameters(), lr=0.1)], None
    )
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert binding.refresh() == ["extra/0.1.0"]
    other = nn.Linear(2, 2)
    here = LiveState(other, [torch.optim.SGD(other.parameters(), lr=0.1)], None)
    here.add_groups(export_facts(binding)["groups"])
    assert here.group_key() == (2,)


def test_a_lazy_module_is_named() -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"0\.weight has no shape yet: call the model once"):
        LiveState(model, [torch.optim.SGD(model.parameters(), lr=0.1)], None)


def test_compiling_around_all_is_told_from_compiling_a_part() -> None:
    assert is_compiled(torch.compile(Net(), backend="eager"))  # type: ignore[arg-type]
    part = Net()
    part.head = torch.compile(part.head, backend="eager")  # type: ignore[assignment]
    assert not is_compiled(part)


class KeepsBlocks(torch.optim.SGD):
    """Its momentum is in blocks where that pays, as in 8-bit optimizers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None and p.numel() >= 4096:
                self.state[p]["scale"] = torch.ones(p.numel() // 256)
        super().step(closure)


@pytest.mark.parametrize(("width", "allowed"), [(64, True), (1024, False)])
def test_rows_that_share_a_scale_are_not_captured_separately(width: int, allowed: bool) -> None:
    """Known before the first update, by a larger stand-in than those of the probe: experts were cut into rows,
    and the first snapshot that had some of them alone failed.
    """
    model = nn.Linear(width, 8)
    binding = LiveState(model, [KeepsBlocks(model.parameters(), lr=0.1, momentum=0.9)], None)
    assert binding.rows_allowed("weight") == allowed
    assert binding.state("weight") == {}


class OneTensor(Doubled):
    """A weight that is another tensor, and is cast in its own way in a forward."""

    @classmethod
    def __torch_dispatch__(cls, *called: Any) -> Any:
        assert called[0] is torch.ops.aten.detach.default
        return OneTensor(called[2][0].half)


def test_a_weight_that_is_another_tensor_is_captured_as_that() -> None:
    model = nn.Module()
    data = torch.ones(3)
    model.w = nn.Parameter(OneTensor(data))
    binding = LiveState(model, [torch.optim.SGD(model.parameters(), lr=0.1)], None)
    assert local(binding.params["w"]).data_ptr() == data.data_ptr()


def test_a_weight_that_is_made_of_several_tensors_is_refused() -> None:
    """Copied from its address, which is 0, it ended the process."""
    model = nn.Module()
    model.register_buffer("w", Blocks(torch.ones(8, dtype=torch.float8_e4m3fn), torch.ones(1)))
    with pytest.raises(ValueError, match=r"w is a Blocks, made of several tensors"):
        LiveState(model, [torch.optim.SGD([torch.zeros(1)], lr=0.1)], None)
