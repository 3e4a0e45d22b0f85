"""What a run tells for its exports."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import nn

from ckptd.client.model.live_state import LiveState
from ckptd.client.model.operators import Operator, ParameterRows
from ckptd.client.schedule.snapshot_plan import (
    SnapshotPlan,
    describe_table,
    export_facts,
    human,
    operator_costs,
    schedule_of,
)
from ckptd.core.schedule import plan_schedule
from ckptd.core.snapshot_policy import OperatorCost, OperatorKind
from ckptd.export.source import facts_of
from tests.client.exporting import make_adamw, make_model

IDENTITY = {"job": "j", "run": "r", "rank": "0", "world_size": "1"}


def test_another_order_keeps_the_copy_plans_of_phases_that_stay() -> None:
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
    binding = LiveState(model, [torch.optim.AdamW(model.parameters())], None)
    operators = [
        Operator(f"{i}", OperatorKind.DENSE, (ParameterRows(f"{i}.weight"), ParameterRows(f"{i}.bias")))
        for i in range(6)
    ]
    costs = operator_costs(binding, operators, {})
    phases = [[0, 1], [2, 3], [4, 5]]
    for policy, kept in (("sliding", [True, False, False]), ("aligned", [False] * 3)):
        schedule = schedule_of(costs, phases, 0, policy)
        plan = SnapshotPlan(operators, costs, schedule, policy, {}, IDENTITY, 1024)
        before = [plan.phase_plan(binding, i) for i in range(3)]
        plan.use(schedule_of(costs, [[1, 0], [2, 4], [3, 5]], 0, policy))
        after = [plan.phase_plan(binding, i) for i in range(3)]
        assert [a is b for a, b in zip(before, after, strict=True)] == kept
        assert [found[0].anchored for found in after if found] == [{0, 1}, {2, 4}, {3, 5}]


def test_transient_buffers_ties_and_groups_are_told_and_understood() -> None:
    model = nn.ModuleDict({"inner": make_model(0)})
    params = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": params[1:]}, {"params": params[:1]}])
    told = export_facts(LiveState(model, [optimizer], None))
    facts = facts_of(msgspec.msgpack.encode(told), rank=0)
    assert facts.transient == {"inner.cache"}
    assert facts.aliases == {"inner.head.weight": "inner.embed.weight"}
    assert facts.groups["inner.embed.weight"] == (0, 1)
    assert facts.groups["inner.norm.bias"] == (0, 0)


def test_one_group_needs_no_telling() -> None:
    model = make_model(0)
    assert export_facts(LiveState(model, [make_adamw(model)], None))["groups"] == {}


OPERATORS = [
    Operator(
        "layers.0.experts.0",
        OperatorKind.EXPERT,
        (ParameterRows("w", 0, 1), ParameterRows("b", 0, 1)),
    ),
    Operator("layers.0.gate", OperatorKind.GATE, (ParameterRows("g"),)),
]
COSTS = [
    OperatorCost("layers.0.experts.0", OperatorKind.EXPERT, 12 << 20, 2 << 20),
    OperatorCost("layers.0.gate", OperatorKind.GATE, 3000, 500),
]


def test_one_row_per_operator_under_a_heading() -> None:
    schedule = plan_schedule(COSTS, budget_bytes=None, order=[1, 0], window=2)
    head, title, rule, *rows, total = describe_table(
        OPERATORS, COSTS, schedule, [3, -1], ["job j"]
    ).splitlines()
    assert head == "job j"
    assert title.split()[-3:] == ["phase", "captured", "by"]
    assert set(rule) == {"-"}
    assert [row.split() for row in rows] == [
        ["layers.0.experts.0", "expert", "2", "12.0", "MiB", "2.0", "MiB", "1", "rank", "3"],
        ["layers.0.gate", "gate", "1", "2.9", "KiB", "500", "B", "0", "each"],
    ]
    assert total == "2 operators, dense 12.0 MiB, compute weights 2.0 MiB"


def test_columns_line_up() -> None:
    lines = describe_table(OPERATORS, COSTS, None, [], []).splitlines()
    assert len({len(line.rstrip()) for line in lines[:-1]}) == 1


def test_before_a_schedule_there_are_no_phases() -> None:
    row = describe_table(OPERATORS, COSTS, None, [], []).splitlines()[2]
    assert row.split()[-2:] == ["-", "each"]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (5 << 20, "5.0 MiB"),
        (3 << 30, "3.0 GiB"),
        (5000 << 30, "4.9 TiB"),
    ],
)
def test_sizes(size: int, text: str) -> None:
    assert human(size) == text
