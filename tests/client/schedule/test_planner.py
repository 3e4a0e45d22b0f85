"""From a model and measured speeds to windows, rings and descriptors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ckptd.client.model.live_state import LiveState
from ckptd.client.model.operators import discover_operators
from ckptd.client.optimizers.optimizer_probe import StateSpec
from ckptd.client.options import PartialOptions, SnapshotOptions
from ckptd.client.schedule.partial_schedule import PartialTurns
from ckptd.client.schedule.planner import PlanInputs, TrainingSpeed, make_plan, plan_together
from ckptd.client.schedule.snapshot_plan import (
    SnapshotPlan,
    plan_from_payload,
    recorded_specs,
    signature,
    signature_difference,
)
from ckptd.core.schedule import Ordering
from ckptd.core.slots.segment_format import plan_geometry
from ckptd.core.snapshot_policy import OperatorKind

IDENTITY = {"job": "j", "run": "r", "rank": "0", "world_size": "1"}


class MoE(nn.Module):
    """Eight equal experts and a dense layer of many times their size."""

    def __init__(self, experts: int = 8, width: int = 16, dense: int = 32) -> None:
        super().__init__()
        self.dense = nn.Linear(width, dense * width)
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))


def bound(**options: Any) -> LiveState:
    model = MoE(**options)
    return LiveState(model, [torch.optim.AdamW(model.parameters())], None)


def planned(binding: LiveState, **changes: Any) -> SnapshotPlan:
    operators = discover_operators(binding.model, rows_allowed=binding.rows_allowed)
    options: dict[str, Any] = {
        "policy": "sliding",
        "window": None,
        "every": 1,
        "budget_bytes": None,
        "available_bytes": None,
        "popularity": None,
        "ordering": Ordering.HARD,
        "compute_dtypes": {},
        "identity": IDENTITY,
        "scalars_capacity": 4096,
    }
    return make_plan(binding, operators, PlanInputs(**(options | changes)))


class TestSpeed:
    def test_the_time_until_the_optimizers_step_is_for_copies(self) -> None:
        assert TrainingSpeed(0.1, 0.2, 1e9).budget_bytes(None) == 100_000_000

    def test_copies_on_the_trainers_own_cores_are_bounded_by_overhead(self) -> None:
        assert TrainingSpeed(0.1, 0.2, 1e9).budget_bytes(0.03) == 6_000_000


class TestWindow:
    def test_without_a_limit_everything_is_anchored_at_once(self) -> None:
        assert planned(bound()).schedule.window == 1

    def test_the_smallest_window_that_fits_the_budget(self) -> None:
        binding = bound(dense=1)
        dense = planned(binding).schedule.dense_bytes
        plan = planned(binding, budget_bytes=dense // 2)
        assert plan.schedule.window > 1
        assert plan.schedule.peak_bytes <= dense // 2
        smaller = planned(binding, window=plan.schedule.window - 1)
        assert smaller.schedule.peak_bytes > dense // 2

    def test_a_budget_that_only_a_split_operator_meets(self) -> None:
        """Whole, the dense part alone is over the budget whatever the window; in pieces it is not."""
        binding = bound()
        dense = planned(binding).schedule.dense_bytes
        plan = planned(binding, budget_bytes=dense // 2)
        assert plan.schedule.fits, plan.schedule.reason
        assert plan.schedule.peak_bytes <= dense // 2

    def test_a_budget_below_the_compute_weights_is_met_by_none_and_said(self) -> None:
        plan = planned(bound(), budget_bytes=1000)
        assert not plan.schedule.fits
        assert "1,000" in plan.schedule.reason

    def test_a_dense_part_larger_than_a_phase_is_split(self) -> None:
        """Otherwise it alone would set the peak of every window."""
        plan = planned(bound(), window=6)
        parts = [op for op in plan.operators if op.name.startswith("dense/")]
        assert len(parts) > 1
        assert plan.schedule.window == 6
        anchor = sum(c.anchor_bytes - c.compute_bytes for c in plan.costs)
        heaviest = max(c.anchor_bytes - c.compute_bytes for c in plan.costs)
        assert heaviest <= anchor / 6 * 1.5

    def test_experts_stay_whole(self) -> None:
        plan = planned(bound(), window=20)
        assert sum(op.kind is OperatorKind.EXPERT for op in plan.operators) == 8

    def test_popular_experts_come_late(self) -> None:
        binding = bound()
        names = [o.name for o in discover_operators(binding.model, rows_allowed=lambda n: True)]
        popularity = [9.0 if n == "experts.0" else float(n.startswith("experts")) for n in names]
        plan = planned(binding, window=4, popularity=popularity)
        last = {plan.operators[i].name for i in plan.schedule.phases[-1]}
        assert "experts.0" in last

    def test_a_ring_that_fits_no_memory_says_the_numbers(self) -> None:
        with pytest.raises(
            ValueError,
            match=r"no ring fits the 1000 bytes .*W=1: \d+ slots of \d+ bytes.*CKPTD_MEMORY",
        ):
            planned(bound(), available_bytes=1000)

    def test_a_larger_window_is_taken_where_memory_is_short(self) -> None:
        binding = bound(width=256, dense=1)  # large against the slack of a slot
        one = planned(binding)
        room = one.slot_bytes * one.num_slots - 1
        assert planned(binding, available_bytes=room).schedule.window > 1

    def test_slots_hold_the_largest_image_of_the_window(self) -> None:
        binding = bound()
        plan = planned(binding, window=5)
        for ordinal in range(plan.span):
            found = plan.phase_plan(binding, ordinal)
            assert found is not None
            assert found[0].layout.image_len <= plan.slot_bytes
        assert plan.slot_bytes % 4096 == 0

    def test_every_operator_is_anchored_once_in_any_window(self) -> None:
        binding = bound()
        plan = planned(binding, window=5)
        for start in range(5):
            phases = [plan.phase_plan(binding, start + i) for i in range(5)]
            anchored = [i for p in phases if p is not None for i in p[0].anchored]
            assert sorted(anchored) == list(range(len(plan.operators)))


def partial_turns(binding: LiveState, scope: str = "both") -> PartialTurns:
    operators = discover_operators(binding.model, rows_allowed=binding.rows_allowed)
    options = SnapshotOptions(policy="partial", partial=PartialOptions(scope=scope))  # type: ignore[arg-type]
    found = PartialTurns.of(options, operators, 0, 1)
    assert found is not None
    return found


class TestPartial:
    @pytest.mark.parametrize("scope", ["both", "weights", "optimizer"])
    def test_plans_know_the_bytes_of_their_snapshots(self, scope: str) -> None:
        binding = bound()
        turns = partial_turns(binding, scope)
        plan = planned(binding, policy="partial", window=4, turns=turns)
        layouts = [found[0].layout for i in range(4) if (found := plan.phase_plan(binding, i))]
        sizes = [layout.image_len for layout in layouts]
        headers = [size - told for size, told in zip(sizes, plan.schedule.phase_bytes, strict=True)]
        assert max(headers) < 12_288
        assert max(headers) - min(headers) < 64
        both = planned(binding, policy="partial", window=4, turns=partial_turns(binding))
        assert plan.schedule.peak_bytes >= both.schedule.peak_bytes
        assert plan.schedule.peak_bytes < plan.schedule.dense_bytes

    def test_experts_stay_whole_however_small_the_budget(self) -> None:
        binding = bound(dense=1)
        plan = planned(binding, policy="partial", budget_bytes=1000, turns=partial_turns(binding))
        assert plan.schedule.window > 1
        assert len(plan.operators) == 10

    def test_a_budget_below_what_is_always_saved_is_said(self) -> None:
        """The window is not stretched for it: no window fits."""
        binding = bound(dense=4)
        turns = partial_turns(binding)
        always = planned(binding, policy="partial", window=8, turns=turns).schedule.peak_bytes
        plan = planned(binding, policy="partial", budget_bytes=always // 4, turns=turns)
        assert not plan.schedule.fits
        assert "so no number of experts fits" in plan.schedule.reason
        assert plan.schedule.window < 8

    @pytest.mark.parametrize(
        ("world_size", "selection", "num_experts", "told"),
        [
            (1, "turns", None, ""),
            (1, "model", None, "all 8 experts of this rank are selected by tokens at risk"),
            (2, "layer", 16, "all 8 experts of this rank are selected by tokens at risk"),
            (2, "model", None, "EXPERTS TAKE TURNS, none is selected by tokens at risk"),
            (4, "model", 16, "EXPERTS TAKE TURNS, none is selected by tokens at risk"),
        ],
    )
    def test_a_plan_says_whether_experts_are_selected(
        self, world_size: int, selection: str, num_experts: int | None, told: str
    ) -> None:
        """Where they may have replicas they take turns, whatever the script asks for."""
        binding = bound()
        turns = replace(
            partial_turns(binding),
            options=PartialOptions(selection=selection, num_experts=num_experts),  # type: ignore[arg-type]
            world_size=world_size,
        )
        plan = planned(binding, policy="partial", window=4, turns=turns)
        assert plan.selection_text.startswith(told)
        assert bool(plan.selection_text) == bool(told)
        assert bool(plan.selectable) == told.startswith("all")
        if plan.selectable:
            plan.selectable = frozenset(sorted(plan.selectable)[:3])
            assert plan.selection_text.startswith("3 of 8 experts of this rank are selected")

    def test_turns_go_on_where_they_were_when_the_interval_changes(self) -> None:
        binding = bound()
        plan = planned(binding, policy="partial", window=4, every=3, turns=partial_turns(binding))
        phases: list[int] = []

        def take(*ordinals: int) -> None:
            found = (plan.phase_plan(binding, i) for i in ordinals)
            phases.extend(each[0].phase for each in found if each is not None)

        take(*range(11))  # snapshots 0, 3, 6 and 9
        first = plan.next_ordinal(11, 2)
        plan.use_interval(2)
        take(*range(first, first + 5))
        assert phases == [0, 1, 2, 3, 0, 1, 2]
        assert [plan.next_ordinal(i, 5) for i in (0, 1, 2, 3)] == [0, 5, 5, 10]

    def test_a_fresh_process_reads_it_back(self) -> None:
        binding = bound()
        turns = partial_turns(binding, "optimizer")
        plan = planned(binding, policy="partial", window=4, every=3, turns=turns)
        plan.asked = "partial"
        geometry = plan_geometry(plan.num_slots, plan.slot_bytes, 4096)
        found = plan_from_payload(binding, plan.payload(binding), IDENTITY, geometry)
        assert found.scope == plan.scope == "optimizer"
        assert (found.lossy, found.asked, found.span) == (True, "partial", 12)
        assert found.schedule.phases == plan.schedule.phases
        assert found.schedule.phase_bytes == plan.schedule.phase_bytes
        assert found.ordinal_of(2) == 6
        layouts = [
            [None if (p := each.phase_plan(binding, i)) is None else p[0].layout.layout_id for i in range(12)]
            for each in (plan, found)
        ]
        assert layouts[0] == layouts[1]
        assert sum(layout is not None for layout in layouts[0]) == 4


@pytest.mark.parametrize("policy", ["sliding", "aligned", "dense"])
def test_a_fresh_process_reads_the_plan_from_the_descriptor(policy: str) -> None:
    binding = bound()
    plan = planned(binding, policy=policy, window=None if policy == "dense" else 3)
    again = plan_from_payload(
        bound(),
        plan.payload(binding),
        IDENTITY,
        plan_geometry(plan.num_slots, plan.slot_bytes, 100),
    )
    assert again.operators == plan.operators
    assert again.costs == plan.costs
    assert again.schedule.phases == plan.schedule.phases
    assert again.schedule.phase_bytes == plan.schedule.phase_bytes
    for ordinal in range(plan.span):
        a, b = plan.phase_plan(binding, ordinal), again.phase_plan(bound(), ordinal)
        assert a is not None
        assert b is not None
        assert a[0].layout.layout_id == b[0].layout.layout_id
        assert a[1] == b[1]


class TestSignature:
    def test_the_same_model_has_no_difference_before_and_after_its_first_step(self) -> None:
        binding = bound()
        before = signature(binding)
        for p in binding.params.values():
            p.grad = torch.zeros_like(p)
        binding.optimizers[0].step()
        assert signature_difference(before, signature(binding)) == ""

    def test_shapes_dtypes_and_names(self) -> None:
        here = bound(experts=9, width=8)
        text = signature_difference(signature(bound()), signature(here))
        assert "parameter dense.weight: float32[512, 16] in the snapshot, float32[256, 8] here" in text
        assert text.count(";") == 5
        assert "more" in text.rpartition("; and ")[2]

    def test_what_only_one_side_has_is_absent_on_the_other(self) -> None:
        text = signature_difference(signature(bound(experts=8)), signature(bound(experts=9)))
        assert "parameter gate.weight: float32[8, 16] in the snapshot, float32[9, 16] here" in text
        more = signature_difference(signature(bound(experts=8)), signature(bound(experts=9)), limit=100)
        assert "parameter experts.8.weight: absent in the snapshot, float32[16, 16] here" in more

    def test_another_optimizer_shows_by_its_name(self) -> None:
        model = MoE()
        sgd = LiveState(model, [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)], None)
        text = signature_difference(signature(bound()), signature(sgd))
        assert text == "optimizer 0: AdamW[1] in the snapshot, SGD[1] here"

    def test_what_a_probe_sees_of_the_state_is_no_difference(self) -> None:
        """An optimizer with 8-bit state for large tensors showed fp32 state to the probe, whose
        tensors are small: a run with snapshots was refused as that of another model.
        """
        recorded, here = signature(bound()), signature(bound())
        for row in recorded:
            if row[0] == "optimizer state 'exp_avg' of":
                row[2:] = ["uint8", [3]]
        assert signature_difference(recorded, here) == ""
        specs = recorded_specs(bound(), recorded)["dense.weight"]
        assert StateSpec("exp_avg", "tensor", torch.uint8, (3,)) in specs
        assert StateSpec("exp_avg_sq", "like", torch.float32) in specs


class TestAlike:
    """What one of several ranks may plan anew by itself."""

    def test_it_keeps_operators_and_phases(self) -> None:
        binding = bound()
        plan = planned(binding, window=4)
        alike = plan_together(plan, binding, 100_000, ())
        assert alike.schedule.phases == plan.schedule.phases
        assert alike.operators == plan.operators
        assert alike.slot_bytes >= plan.slot_bytes + 100_000 - 4096 - 4096
        assert alike.num_slots == plan.num_slots

    def test_slots_have_room_for_phases_that_come(self) -> None:
        """All ranks have agreed on an order that puts the largest operators together."""
        binding = bound(width=64)
        plan = planned(binding, window=4)
        all_at_once = [plan.schedule.order, [], [], []]
        alike = plan_together(plan, binding, 4096, [all_at_once])
        alike.use_phases(all_at_once)
        found = alike.phase_plan(binding, 0)
        assert found is not None
        assert found[0].layout.image_len <= alike.slot_bytes
        narrow = plan_together(plan, binding, 4096, ())
        assert found[0].layout.image_len > narrow.slot_bytes
