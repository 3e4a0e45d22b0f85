"""Names and plans of images: each entry's name says where its bytes come from, and nothing is left
out or held twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ckptd.client import values
from ckptd.client.model import snapshot_layout
from ckptd.client.model.live_state import LiveState
from ckptd.client.model.operators import Operator, ParameterRows, discover_operators
from ckptd.client.model.snapshot_layout import (
    CapturedOperators,
    EntrySource,
    PhasePlan,
    StateTable,
    build_phase,
    entry_name,
    member_bytes,
    parse_entry_name,
)
from ckptd.core.snapshot_policy import Level, OperatorKind
from tests.e2e.precision_cases import CONFIGURATIONS, stored_case

PART = st.text("abcz_0123456789", min_size=1, max_size=6)
NAMES = st.lists(PART, min_size=1, max_size=4).map(".".join)
ROWS = st.none() | st.tuples(st.integers(0, 99), st.integers(1, 99))


@given(st.sampled_from(["param", "master", "optim"]), NAMES, PART, ROWS)
def test_names_round_trip(kind: str, name: str, key: str, rows: tuple[int, int] | None) -> None:
    start, stop = rows if rows is not None else (None, None)
    source = EntrySource(kind, name, key if kind == "optim" else "", start, stop, torch.bfloat16)
    assert parse_entry_name(entry_name(source), torch.bfloat16) == source


@given(NAMES)
def test_buffer_names_round_trip(name: str) -> None:
    source = EntrySource("buffer", name, dtype=torch.int64)
    assert parse_entry_name(entry_name(source), torch.int64) == source


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (EntrySource("param", "a.weight"), "a.weight"),
        (EntrySource("param", "a.weight", "", 2, 4), "a.weight[2:4]"),
        (EntrySource("master", "a.weight"), "master/a.weight"),
        (EntrySource("optim", "a.weight", "exp_avg", 0, 1), "optim/exp_avg/a.weight[0:1]"),
        (EntrySource("buffer", "a.mean"), "buffer/a.mean"),
        (EntrySource("packed", "F32"), "ckptd.optim_scalars/F32"),
    ],
    ids=["param", "rows", "master", "optim", "buffer", "packed"],
)
def test_names_are_those_of_the_format(source: EntrySource, name: str) -> None:
    """docs/architecture.md §3."""
    assert entry_name(source) == name
    assert parse_entry_name(name, torch.float32) == source


class Model(nn.Module):
    """A fused tensor of four experts, a plain weight, a scalar, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.zeros(4, 2, 3))
        self.dense = nn.Linear(2, 2, bias=False)
        self.temperature = nn.Parameter(torch.ones(()))
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("nothing", None)


EXPERTS = [Operator(f"e{i}", OperatorKind.EXPERT, (ParameterRows("fused", i, i + 1),)) for i in range(4)]
OPERATORS = [
    *EXPERTS,
    Operator("dense", OperatorKind.DENSE, (ParameterRows("dense.weight"), ParameterRows("temperature"))),
]


def binding(**options: Any) -> LiveState:
    model = Model()
    return LiveState(model, [torch.optim.AdamW(model.parameters(), **options)], None)


def plan(bound: LiveState, anchored: Iterable[int], **changes: Any) -> PhasePlan:
    others = set(range(len(OPERATORS))).difference(anchored)
    operators = {"compute": others} | {
        name: changes.pop(name) for name in ("compute", "states") if name in changes
    }
    arguments: dict[str, Any] = {
        "phase": 0,
        "compute_dtypes": {},
        "identity": {"job": "j", "run": "r", "rank": "0", "world_size": "1"},
        "scalars_capacity": 1024,
        "state": StateTable.of(bound),
    }
    return build_phase(bound, OPERATORS, CapturedOperators(anchored, **operators), **(arguments | changes))


def test_entries_that_phases_have_in_common_are_bounded_and_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = binding()
    phases: list[set[int]] = [{0}, {1}, {0, 1}, {0}]
    alone = [plan(bound, phase).layout for phase in phases]
    monkeypatch.setattr(snapshot_layout, "_MOST_ENTRIES", 3)
    table = StateTable.of(bound)
    assert [plan(bound, phase, state=table).layout for phase in phases] == alone
    assert 0 < len(table._entries) <= 3


def shapes(found: PhasePlan, prefix: str = "") -> dict[str, tuple[int, ...]]:
    return {e.name: e.shape for e in found.layout.entries if e.name.startswith(prefix)}


def test_adjacent_rows_of_one_level_share_an_entry() -> None:
    found = shapes(plan(binding(), {1, 2}))
    assert {n: s for n, s in found.items() if n.startswith("fused")} == {
        "fused[0:1]": (1, 2, 3),
        "fused[1:3]": (2, 2, 3),
        "fused[3:4]": (1, 2, 3),
    }
    assert found["optim/exp_avg/fused[1:3]"] == (2, 2, 3)
    assert "optim/exp_avg/fused[0:1]" not in found


def test_all_rows_of_one_level_are_the_whole_tensor() -> None:
    assert shapes(plan(binding(), set(range(5))), "fused") == {"fused": (4, 2, 3)}
    assert shapes(plan(binding(), {4}), "fused") == {"fused": (4, 2, 3)}


def test_an_anchor_has_everything_and_compute_only_weights() -> None:
    found = shapes(plan(binding(amsgrad=True), {4}))
    assert {n for n in found if "dense.weight" in n} == {
        "dense.weight",
        "optim/exp_avg/dense.weight",
        "optim/exp_avg_sq/dense.weight",
        "optim/max_exp_avg_sq/dense.weight",
    }
    assert not [n for n in found if n.startswith("optim/") and "fused" in n]


def test_buffers_scalars_and_zero_dimensional_state_are_in_every_snapshot() -> None:
    for anchored in ({0}, {4}):
        found = shapes(plan(binding(), anchored))
        assert found["buffer/count"] == (3,)
        assert "buffer/nothing" not in found
        assert found["ckptd.scalars"] == (1024,)
        assert "ckptd.optim_layout" in found
        # Three `step` tensors, and the whole state of the 0-dimensional parameter (two moments).
        assert found["ckptd.optim_scalars/F32"] == (5,)


def test_frozen_weights_take_the_precision_that_suffices_anchors_their_own() -> None:
    found = {
        e.name: e.dtype
        for e in plan(
            binding(),
            {1},
            compute_dtypes={"fused": torch.bfloat16, "dense.weight": torch.bfloat16},
        ).layout.entries
    }
    assert found["fused[1:2]"] == "F32"
    assert found["fused[2:4]"] == "BF16"
    assert found["dense.weight"] == "BF16"
    assert found["temperature"] == "F32"


def test_operators_that_are_neither_anchored_nor_compute_are_left_out() -> None:
    """The snapshots of a paper-aligned window shrink in this way."""
    assert set(shapes(plan(binding(), {0}, compute={1}), "fused")) == {"fused[0:1]", "fused[1:2]"}


def test_masters_are_anchored_too() -> None:
    model = Model().bfloat16()
    masters = {n: p.detach().float() for n, p in model.named_parameters()}
    bound = LiveState(model, [torch.optim.AdamW(list(masters.values()))], masters)
    found = {e.name: e.dtype for e in plan(bound, {0}).layout.entries}
    assert found["fused[0:1]"] == "BF16"
    assert found["master/fused[0:1]"] == "F32"
    assert found["optim/exp_avg/fused[0:1]"] == "F32"
    assert "master/dense.weight" not in found


def test_sources_offsets_and_entries_agree() -> None:
    found = plan(binding(), {0, 4})
    assert len(found.sources) == len(found.offsets) == len(found.layout.entries)
    for source, offset, entry in zip(found.sources, found.offsets, found.layout.entries, strict=True):
        assert offset == found.layout.offset_of(entry.name)
        assert offset % max(1, entry.nbytes // max(1, torch.Size(entry.shape).numel())) == 0
        if source is not None:
            assert entry_name(source) == entry.name


def test_plans_of_one_phase_are_the_same_layout_and_of_others_are_not() -> None:
    bound = binding()
    assert plan(bound, {0}).layout.layout_id == plan(bound, {0}).layout.layout_id
    assert plan(bound, {0}).layout.layout_id != plan(bound, {1}).layout.layout_id


@pytest.mark.parametrize("level", [Level.ANCHOR, Level.COMPUTE, Level.STATE])
def test_sizes_of_members_add_up_to_the_entries(level: Level) -> None:
    bound = binding()
    every = range(len(OPERATORS))
    levels: dict[str, Any] = {"compute": every if level is Level.COMPUTE else ()}
    if level is Level.STATE:
        levels["states"] = every
    found = plan(bound, every if level is Level.ANCHOR else (), **levels)
    held = sum(e.nbytes for e in found.layout.entries if not e.name.startswith(("buffer/", "ckptd.")))
    told = sum(member_bytes(bound, m, {}, level) for op in OPERATORS for m in op.members)
    assert told == held


def test_rows_of_a_tensor_whose_state_is_not_per_row_are_a_bug_of_ours() -> None:
    model = Model()
    bound = LiveState(model, [torch.optim.Adafactor(model.parameters())], None)
    with pytest.raises(AssertionError, match="fused"):
        plan(bound, {0})


def test_the_order_of_state_keys_is_the_optimizers_own() -> None:
    layout = values.unpack(StateTable.of(binding()).static)
    assert layout["keys"]["dense.weight"] == ["step", "exp_avg", "exp_avg_sq"]
    assert layout["scalars"]["dense.weight"] == {"step": ["F32", True]}
    assert layout["packed"]["F32"][0] == ["fused", "step"]


def test_a_dtype_that_no_image_can_hold_is_named() -> None:
    model = Model()
    model.register_buffer("odd", torch.zeros(2, dtype=torch.complex128))
    bound = LiveState(model, [torch.optim.AdamW(model.parameters())], None)
    with pytest.raises(ValueError, match=r"buffer/odd has dtype torch\.complex128"):
        plan(bound, {0})


@pytest.mark.parametrize(
    ("configuration", "anchor", "compute"),
    [
        ("fp16", "F16 F16 F16 F16", "F16"),
        ("fp8_fp32", "F8_E4M3 F32 F32 F32", "F8_E4M3"),
        ("fp8_fp16", "F8_E4M3 F16 F32 F32", "F8_E4M3"),
        ("fp8_lm", "F8_E4M3 F16 F8_E4M3 F16", "F8_E4M3"),
        ("fp8_masters", "F8_E4M3 F8_E4M3 F8_E4M3 F16", "F8_E4M3"),
    ],
)
def test_bytes_are_those_of_low_precision(configuration: str, anchor: str, compute: str) -> None:
    """The configurations of MoEvement's table 7: weight, master and both moments in their own dtypes."""
    job, name = stored_case(1, CONFIGURATIONS[configuration]), "blocks.0.mix.weight"
    job.step(0, lambda point: None)
    bound = LiveState(job.model, job.optimizers, job.options["masters"])
    operators = discover_operators(job.model, rows_allowed=bound.rows_allowed)
    everything = set(range(len(operators)))
    numel = bound.params[name].numel()
    for anchored, level, dtypes in (
        (everything, Level.ANCHOR, anchor.split()),
        (set(), Level.COMPUTE, compute.split()),
    ):
        found = build_phase(
            bound,
            operators,
            CapturedOperators(anchored, everything - anchored),
            state=StateTable.of(bound),
            phase=0,
            compute_dtypes={},
            identity={"job": "j", "run": "r", "rank": "0", "world_size": "1"},
            scalars_capacity=1024,
        )
        entries = [e for e in found.layout.entries if e.name.endswith(name)]
        assert sorted(e.dtype for e in entries) == sorted(dtypes)
        size = sum({"F8_E4M3": 1, "F16": 2, "F32": 4}[dtype] for dtype in dtypes) * numel
        assert sum(e.nbytes for e in entries) == size == member_bytes(bound, ParameterRows(name), {}, level)
