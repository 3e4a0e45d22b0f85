"""Operators are found in models as people write them; every row of every parameter belongs to exactly one."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from ckptd.client.model.operators import (
    Grouping,
    Operator,
    ParameterRows,
    buffers_of_experts,
    discover_operators,
    split_operator,
)
from ckptd.core.snapshot_policy import OperatorKind

WIDTH, EXPERTS = 4, 3


class Listed(nn.Module):
    """A gate beside a list of experts."""

    def __init__(self, experts: str = "experts", gate: str = "gate") -> None:
        super().__init__()
        setattr(self, gate, nn.Linear(WIDTH, EXPERTS))
        setattr(self, experts, nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)))


class FusedExperts(nn.Module):
    """Rows of ``[num_experts, …]`` parameters, as in Hugging Face models."""

    def __init__(self, attribute: str | None = "num_experts") -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(EXPERTS, 6, WIDTH))
        self.down_proj = nn.Parameter(torch.zeros(EXPERTS, WIDTH, 3))
        self.down_proj_bias = nn.Parameter(torch.zeros(EXPERTS, WIDTH))
        if attribute is not None:
            setattr(self, attribute, EXPERTS)


class FusedMoE(nn.Module):
    def __init__(self, gate: str = "gate", attribute: str | None = "num_experts") -> None:
        super().__init__()
        setattr(self, gate, nn.Linear(WIDTH, EXPERTS, bias=False))
        self.experts = FusedExperts(attribute)


class Layer(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, WIDTH)
        self.mlp = mlp


class Model(nn.Module):
    def __init__(self, *mlps: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, WIDTH)
        self.layers = nn.ModuleList(Layer(m) for m in mlps)
        self.head = nn.Linear(WIDTH, 5)


def find(model: nn.Module, *, rows: bool = True, grouping: Grouping | None = None) -> list[Operator]:
    """The operators, after checking that they partition the model's parameters."""
    operators = discover_operators(model, rows_allowed=lambda name: rows, grouping=grouping)
    assert_partition(operators, dict(model.named_parameters()))
    return operators


def assert_partition(operators: list[Operator], params: dict[str, Tensor]) -> None:
    """Every row of every parameter belongs to exactly one operator, and names are unique."""
    covered = {n: torch.zeros(p.shape[0] if p.ndim else 1, dtype=torch.int) for n, p in params.items()}
    for op in operators:
        for member in op.members:
            start, stop = member.range(len(covered[member.param]))
            covered[member.param][start:stop] += 1
    assert all(bool((count == 1).all()) for count in covered.values())
    assert max(Counter(op.name for op in operators).values()) == 1


def names(operators: list[Operator], kind: OperatorKind) -> list[str]:
    return [op.name for op in operators if op.kind is kind]


def test_listed_experts_gates_and_dense_parts_per_layer() -> None:
    operators = find(Model(Listed(), Listed()))
    assert names(operators, OperatorKind.EXPERT) == [
        f"layers.{layer}.mlp.experts.{i}" for layer in range(2) for i in range(EXPERTS)
    ]
    assert names(operators, OperatorKind.GATE) == ["layers.0.mlp.gate", "layers.1.mlp.gate"]
    assert names(operators, OperatorKind.DENSE) == [
        "embed",
        "layers.0.dense",
        "layers.1.dense",
        "head",
    ]


def test_operators_come_in_the_order_of_the_model() -> None:
    model = Model(Listed(), FusedMoE())
    order = list(dict(model.named_parameters()))
    firsts = [order.index(op.members[0].param) for op in find(model)]
    assert firsts == sorted(firsts)


def test_an_expert_knows_where_its_tokens_are_counted() -> None:
    by_name = {op.name: op for op in find(Model(Listed(), FusedMoE()))}
    assert by_name["layers.0.mlp.experts.2"].expert == ("layers.0.mlp.experts", 2)
    assert by_name["layers.1.mlp.experts.1"].expert == ("layers.1.mlp.experts", 1)
    assert by_name["layers.0.mlp.gate"].expert is None


@pytest.mark.parametrize("gate", ["gate", "router", "gating", "switch", "wg"])
def test_experts_by_another_name_are_found_by_their_gate(gate: str) -> None:
    """A list with as many equal children as a sibling routes to holds experts, whatever it is called."""
    operators = find(Model(Listed(experts="branches", gate=gate)))
    assert len(names(operators, OperatorKind.EXPERT)) == EXPERTS
    assert names(operators, OperatorKind.GATE) == [f"layers.0.mlp.{gate}"]


def test_a_list_of_layers_is_not_a_list_of_experts() -> None:
    """Layers have equal shapes too: what makes experts is their name, or a gate that routes to them."""
    model = Model(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    assert names(find(model), OperatorKind.EXPERT) == []


def test_a_list_of_layers_beside_a_gate_of_another_width_is_not_experts() -> None:
    model = Model(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model.gate = nn.Linear(7, 9)
    assert names(find(model), OperatorKind.EXPERT) == []


def test_children_of_different_shapes_are_not_experts() -> None:
    moe = Listed()
    moe.experts = nn.ModuleList([nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 3)])
    assert names(find(Model(moe)), OperatorKind.EXPERT) == []


@pytest.mark.parametrize("attribute", ["num_experts", "num_local_experts", "n_routed_experts", None])
def test_fused_experts_are_slices(attribute: str | None) -> None:
    """One operator per row, over every fused tensor of the module; the number of rows is stated, or
    seen at the gate.
    """
    operators = find(Model(FusedMoE(attribute=attribute)))
    experts = [op for op in operators if op.kind is OperatorKind.EXPERT]
    assert [op.name for op in experts] == [f"layers.0.mlp.experts.{i}" for i in range(EXPERTS)]
    assert experts[1].members == tuple(
        ParameterRows(f"layers.0.mlp.experts.{n}", 1, 2)
        for n in ("gate_up_proj", "down_proj", "down_proj_bias")
    )
    assert {op.group for op in experts} == {"layers.0.mlp.experts"}


def test_where_rows_are_not_independent_a_fused_tensor_is_one_operator() -> None:
    operators = find(Model(FusedMoE()), rows=False)
    experts = [op for op in operators if op.kind is OperatorKind.EXPERT]
    assert len(experts) == 3
    assert all(len(op.members) == 1 and op.members[0].whole for op in experts)


def test_a_parameter_of_the_experts_module_that_is_not_per_expert_stays_whole() -> None:
    """JetMoE's ``experts`` holds a bias of the model's width and a router of its own."""
    moe = FusedMoE()
    moe.experts.bias = nn.Parameter(torch.zeros(WIDTH))
    moe.experts.router = nn.Linear(WIDTH, EXPERTS)
    by_member = {m: op for op in find(Model(moe)) for m in op.members}
    assert by_member[ParameterRows("layers.0.mlp.experts.bias")].kind is OperatorKind.DENSE
    assert by_member[ParameterRows("layers.0.mlp.experts.router.weight")].kind is OperatorKind.DENSE
    assert by_member[ParameterRows("layers.0.mlp.experts.down_proj", 0, 1)].kind is OperatorKind.EXPERT


def test_a_bias_as_wide_as_there_are_experts_is_not_cut() -> None:
    """A one-dimensional parameter whose length happens to be the number of experts is no fused tensor."""
    moe = FusedMoE()
    moe.experts.bias = nn.Parameter(torch.zeros(EXPERTS))
    assert ParameterRows("layers.0.mlp.experts.bias") in [m for op in find(Model(moe)) for m in op.members]


def test_shared_experts_are_dense() -> None:
    moe = FusedMoE()
    moe.shared_experts = nn.Linear(WIDTH, WIDTH)
    moe.shared_expert_gate = nn.Linear(WIDTH, 1, bias=False)
    operators = find(Model(moe))
    assert len(names(operators, OperatorKind.EXPERT)) == EXPERTS
    assert "layers.0.mlp.shared_expert_gate" in names(operators, OperatorKind.GATE)


def test_tied_parameters_are_one() -> None:
    model = Model(Listed())
    model.head.weight = model.embed.weight
    members = [m.param for op in find(model) for m in op.members]
    assert "embed.weight" in members
    assert "head.weight" not in members


def test_a_bare_parameter_at_the_root() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.inner = nn.Linear(2, 2)

    assert {op.name for op in find(Bare())} == {"scale", "inner"}


def test_no_parameters_no_operators() -> None:
    assert discover_operators(nn.ReLU(), rows_allowed=lambda name: True) == []


class TestGrouping:
    def test_patterns_first_match_wins_and_the_rest_is_automatic(self) -> None:
        grouping = {"attention": ["layers.*.attention.*"], "experts": ["layers.0.mlp.experts.*"]}
        operators = find(Model(Listed(), Listed()), grouping=grouping)
        by_name = {op.name: op for op in operators}
        assert len(by_name["attention"].members) == 4
        assert len(by_name["experts"].members) == 2 * EXPERTS
        assert names(operators, OperatorKind.EXPERT) == [f"layers.1.mlp.experts.{i}" for i in range(EXPERTS)]

    def test_a_function_of_name_and_parameter(self) -> None:
        def by_rank(name: str, param: Tensor) -> str | None:
            return "vectors" if param.ndim == 1 else None

        operators = {op.name: op for op in find(Model(FusedMoE()), grouping=by_rank)}
        assert {m.param for m in operators["vectors"].members} == {
            "layers.0.norm.weight",
            "layers.0.norm.bias",
            "layers.0.attention.bias",
            "head.bias",
        }

    def test_a_pattern_without_a_match_names_itself_and_an_example(self) -> None:
        with pytest.raises(ValueError, match=r"operators\['x'\]: pattern 'nothing\.\*' .*embed\.weight"):
            find(Model(Listed()), grouping={"x": ["nothing.*"]})

    def test_a_pattern_whose_parameters_are_taken_is_an_error(self) -> None:
        with pytest.raises(ValueError, match=r"'head\.weight' matches no"):
            find(Model(Listed()), grouping={"a": ["head.*"], "b": ["head.weight"]})


class TestSplitting:
    SHAPES = {"a": (10, 4), "b": (4,), "c": ()}  # noqa: RUF012

    def split(self, op: Operator, max_bytes: int, *, rows: bool = True) -> list[Operator]:
        def bytes_of(member: ParameterRows) -> int:
            total = torch.Size(self.SHAPES[member.param]).numel() * 4
            count = self.SHAPES[member.param][0] if self.SHAPES[member.param] else 1
            start, stop = member.range(count)
            return total * (stop - start) // count

        return split_operator(op, self.SHAPES, bytes_of, max_bytes, lambda name: rows)

    def dense(self, *params: str) -> Operator:
        return Operator("d", OperatorKind.DENSE, tuple(map(ParameterRows, params)))

    def test_between_tensors_and_rows(self) -> None:
        parts = self.split(self.dense("a", "b", "c"), 48)
        assert_partition(parts, {n: torch.zeros(s) for n, s in self.SHAPES.items()})
        assert [p.name for p in parts] == [f"d/{i}" for i in range(len(parts))]
        assert [(m.start, m.stop) for p in parts for m in p.members if m.param == "a"] == [
            (0, 2),
            (2, 5),
            (5, 7),
            (7, 10),
        ]

    def test_only_between_tensors_where_rows_depend_on_each_other(self) -> None:
        parts = self.split(self.dense("a", "b", "c"), 48, rows=False)
        assert [[m.param for m in p.members] for p in parts] == [["a"], ["b", "c"]]

    def test_what_fits_stays(self) -> None:
        op = self.dense("a", "b")
        assert self.split(op, 176) == [op]
        assert len(self.split(op, 175)) > 1

    def test_experts_stay_whole(self) -> None:
        op = Operator("e", OperatorKind.EXPERT, (ParameterRows("a"),))
        assert self.split(op, 1) == [op]

    def test_a_piece_that_cannot_be_cut_stays_larger(self) -> None:
        op = self.dense("c")
        assert self.split(op, 1) == [op]


class ElasticLike(nn.Module):
    """One rank's experts of a layer, by their numbers."""

    def __init__(self, held: list[int], num_experts: int = EXPERTS * 3) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.experts = nn.ModuleDict({str(n): nn.Linear(WIDTH, WIDTH) for n in held})


class Routed(nn.Module):
    def __init__(self, held: list[int]) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS * 3)
        self.moe = ElasticLike(held)


@pytest.mark.parametrize("held", [[3, 7], [5], [0, 1, 2], [8, 2]])
def test_experts_of_an_elastic_layer_go_by_their_number_in_the_layer(held: list[int]) -> None:
    """Whichever of them a rank holds: another rank that holds the same expert has it under the same name."""
    operators = find(Model(Routed(held)))
    found = {op.name: op for op in operators if op.kind is OperatorKind.EXPERT}
    assert sorted(found) == sorted(f"layers.0.mlp.moe.experts.{n}" for n in held)
    assert {op.expert for op in found.values()} == {("layers.0.mlp.moe.experts", n) for n in held}
    assert names(operators, OperatorKind.GATE) == ["layers.0.mlp.gate"]


def test_the_gate_of_an_elastic_layer_is_one_also_where_no_expert_is() -> None:
    """All ranks have the dense parts alike, under the same names."""
    operators = find(Model(Routed([])))
    assert names(operators, OperatorKind.EXPERT) == []
    assert names(operators, OperatorKind.GATE) == ["layers.0.mlp.gate"]


@pytest.mark.parametrize("keys", [("-1", "0"), ("01", "2"), ("a", "b"), ("²", "3")])
def test_what_is_keyed_by_no_numbers_is_no_layer_of_experts(keys: tuple[str, str]) -> None:
    model = nn.Module()
    model.experts = nn.ModuleDict({key: nn.Linear(WIDTH, WIDTH) for key in keys})
    assert names(find(model), OperatorKind.EXPERT) == []


def test_scales_belong_to_the_experts_whose_weights_they_scale() -> None:
    """Partial snapshots have an expert's weight and its scale of one iteration, or the weight has no meaning."""
    model = Model(Listed(), FusedMoE())
    params = dict(model.named_parameters())
    for path, shape in {
        "layers.0.mlp.experts.1.scale": (),
        "layers.1.mlp.experts.scales": (EXPERTS, 1),
        "layers.1.mlp.experts.calls": (),
        "layers.1.mlp.gate.load": (EXPERTS,),
    }.items():
        module, _, leaf = path.rpartition(".")
        model.get_submodule(module).register_buffer(leaf, torch.ones(shape))
    buffers = dict(model.named_buffers())
    for op in find(model):
        expected = []
        if op.name == "layers.0.mlp.experts.1":
            expected = [ParameterRows("layers.0.mlp.experts.1.scale")]
        elif op.expert is not None and op.expert[0] == "layers.1.mlp.experts":
            expected = [ParameterRows("layers.1.mlp.experts.scales", op.expert[1], op.expert[1] + 1)]
        assert buffers_of_experts([op], buffers, lambda name: len(params[name])) == expected
