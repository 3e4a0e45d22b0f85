"""The experts of one snapshot after another, selected by what was counted at the top of the one before."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import nn

from ckptd.client.model.live_state import LiveState
from ckptd.client.model.operators import discover_operators
from ckptd.client.model.replicated_params import Replicas, ReplicatedParams
from ckptd.client.options import PartialOptions, SnapshotOptions
from ckptd.client.schedule.expert_selection import ExpertSelection
from ckptd.client.schedule.partial_schedule import PartialTurns
from ckptd.client.schedule.planner import PlanInputs, make_plan
from ckptd.core.partial_experts import select_by_risk
from ckptd.core.schedule import Ordering

WINDOW, EXPERTS, LAYERS = 4, 4, 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(EXPERTS))


class Run:
    """Snapshots of a rank, one at a time; ``given`` has the tokens so far, by container."""

    def __init__(self, selection: str, *, every: int = 1, window: int = WINDOW, captured: Any = None) -> None:
        model = nn.ModuleList(Layer() for _ in range(LAYERS))
        binding = LiveState(model, [torch.optim.SGD(model.parameters(), lr=0.1)], None)
        operators = discover_operators(model, rows_allowed=binding.rows_allowed)
        of: Any = {"selection": selection, "lost_tokens_limit": None}
        options = SnapshotOptions(policy="partial", every=every, partial=PartialOptions(**of))
        inputs = PlanInputs(
            policy="partial",
            window=window,
            every=every,
            budget_bytes=None,
            available_bytes=None,
            popularity=None,
            ordering=Ordering.HARD,
            compute_dtypes={},
            identity={"job": "j", "run": "r", "rank": "0", "world_size": "1"},
            scalars_capacity=4096,
            turns=PartialTurns.of(options, operators, 0, 1),
        )
        self.plan = make_plan(binding, operators, inputs)
        self.found = ExpertSelection(self.plan, captured or {})
        self.binding, self.every = binding, every
        self.given = {f"{layer}.experts": [0.0] * EXPERTS for layer in range(LAYERS)}
        self.step = 0

    def snapshot(self, *, filled: bool = True, follows: bool = True) -> set[str]:
        """The experts of the next snapshot."""
        ordinal = self.step
        chosen = self.found.experts(ordinal)
        layout = self.plan.phase_plan(self.binding, ordinal, chosen)
        assert layout is not None
        anchored = layout[0].anchored
        given = {name: torch.tensor(counts) for name, counts in self.given.items()}
        self.found.begun(self.step, ordinal, anchored, given, follows=follows and self.step > 0)
        if filled:
            self.found.filled(self.step)
        self.step += self.every
        operators = self.plan.operators
        return {op.name for i, op in enumerate(operators) if i in anchored and op.expert is not None}

    def first_window(self) -> list[set[str]]:
        return [self.snapshot() for _ in range(WINDOW)]


def test_first_every_expert_has_its_turn() -> None:
    run = Run("model")
    run.given["0.experts"][3] = 1e6
    found = run.first_window()
    assert len(set().union(*found)) == EXPERTS * LAYERS
    assert all(len(each) == LAYERS for each in found)


def test_then_those_with_the_most_tokens_since_they_were_captured() -> None:
    run = Run("model")
    run.first_window()
    run.given["0.experts"] = [0.0, 100.0, 0.0, 90.0]
    run.snapshot()  # was chosen before these were counted
    assert run.snapshot() == {"0.experts.1", "0.experts.3"}
    run.given["1.experts"][2] = 5.0
    run.snapshot()
    assert "1.experts.2" in run.snapshot()


def test_further_experts_fill_the_room_that_turns_leave() -> None:
    """Eight experts in three snapshots: turns of three, three and two. All three may be as large."""
    run = Run("model", window=3)
    turns = [run.snapshot() for _ in range(3)]
    assert sorted(map(len, turns)) == [2, 3, 3]
    slots = run.plan.slot_bytes
    for _ in range(9):
        run.given["0.experts"][0] += 5
        assert len(run.snapshot()) == 3
    layouts = [
        run.plan.phase_plan(run.binding, n, run.found.experts(n)) for n in range(run.step, run.step + 3)
    ]
    assert all(found is not None and found[0].layout.image_len <= slots for found in layouts)


def test_of_each_layer_as_many_as_take_turns() -> None:
    run = Run("layer")
    run.first_window()
    run.given = {"0.experts": [0.0, 100.0, 0.0, 90.0], "1.experts": [1.0, 0.0, 2.0, 0.0]}
    run.snapshot()
    assert run.snapshot() == {"0.experts.1", "1.experts.2"}


def test_none_is_left_out_for_longer_than_the_ring_holds() -> None:
    run = Run("model", every=2)
    snapshots = run.first_window()
    for _ in range(40):
        run.given["0.experts"][0] += 50
        run.given["0.experts"][1] += 40
        snapshots.append(run.snapshot())
    longest = run.plan.policy.window
    assert longest == 2 * WINDOW
    assert run.plan.num_slots == longest + 2
    for start in range(len(snapshots) - longest):
        assert len(set().union(*snapshots[start : start + longest])) == EXPERTS * LAYERS
    assert sum("0.experts.0" in each for each in snapshots) > 20


def test_a_snapshot_that_comes_before_the_last_one_is_complete_is_chosen_at_once() -> None:
    run = Run("model")
    run.first_window()
    run.given["0.experts"] = [0.0, 100.0, 0.0, 90.0]
    run.snapshot()
    before = run.snapshot(filled=False)
    assert before == {"0.experts.1", "0.experts.3"}
    # It is as old as the others now, though what it held was not counted.
    assert len(run.snapshot()) == LAYERS


def test_a_chain_that_begins_anew_has_every_expert_first() -> None:
    run = Run("model")
    run.first_window()
    run.given["0.experts"][0] = 1e6
    again = [run.snapshot(follows=False), *(run.snapshot() for _ in range(WINDOW - 1))]
    assert len(set().union(*again)) == EXPERTS * LAYERS


def test_tokens_count_from_where_a_recovery_took_the_expert() -> None:
    """After it, what was lost is not at risk any more."""
    run = Run("model", captured={("0.experts", 1): 100.0})
    run.given["0.experts"] = [0.0, 100.0, 50.0, 0.0]
    run.first_window()
    run.given["0.experts"] = [0.0, 110.0, 70.0, 0.0]
    run.snapshot()
    assert run.snapshot() == {"0.experts.1", "0.experts.2"}


def test_slots_are_large_enough_for_any_selection() -> None:
    run = Run("model")
    for phase in range(WINDOW):
        layout = run.plan.phase_plan(run.binding, phase, frozenset())
        assert layout is not None
        assert layout[0].layout.image_len < run.plan.slot_bytes
    run.first_window()
    for _ in range(20):
        run.given["0.experts"][run.step % EXPERTS] += 10
        run.snapshot()
    assert (
        max(found[0].layout.image_len for found in run.plan._phases.values() if found is not None)
        <= run.plan.slot_bytes
    )


class Replicas4:
    """Four ranks that hold the same experts: each is given tokens of its own, and selects what it owns."""

    RANKS = (0, 1, 2, 3)

    def __init__(self, window: int, selection: str = "model") -> None:
        model = nn.ModuleList(Layer() for _ in range(LAYERS))
        binding = LiveState(model, [torch.optim.SGD(model.parameters(), lr=0.1)], None)
        operators = discover_operators(model, rows_allowed=binding.rows_allowed)
        sharing = ReplicatedParams(dict.fromkeys(binding.params, Replicas(self.RANKS, None)))
        of: Any = {"selection": selection, "lost_tokens_limit": None}
        options = SnapshotOptions(policy="partial", partial=PartialOptions(**of))
        self.binding = binding
        self.plans = []
        for rank in self.RANKS:
            inputs = PlanInputs(
                policy="partial",
                window=window,
                every=1,
                budget_bytes=None,
                available_bytes=None,
                popularity=None,
                ordering=Ordering.HARD,
                compute_dtypes={},
                identity={"job": "j", "run": "r", "rank": str(rank), "world_size": "4"},
                scalars_capacity=4096,
                sharing=sharing,
                turns=PartialTurns.of(options, operators, rank, 4, sharing),
            )
            self.plans.append(make_plan(binding, operators, inputs))
        self.found = [ExpertSelection(plan, {}) for plan in self.plans]
        self.given = [{f"{n}.experts": [0.0] * EXPERTS for n in range(LAYERS)} for _ in self.RANKS]
        self.step = 0

    def snapshot(self) -> list[set[int]]:
        """By rank, the experts that it captures."""
        taken = []
        for rank, (plan, found) in enumerate(zip(self.plans, self.found, strict=True)):
            layout = plan.phase_plan(self.binding, self.step, found.experts(self.step))
            assert layout is not None
            given = {name: torch.tensor(counts) for name, counts in self.given[rank].items()}
            found.begun(self.step, self.step, layout[0].anchored, given, follows=self.step > 0)
            found.filled(self.step)
            assert layout[0].layout.image_len <= plan.slot_bytes
            taken.append(set(layout[0].anchored & plan.selected_here))
        self.step += 1
        return taken


@pytest.mark.parametrize("window", [1, 2, 4])
def test_each_rank_selects_among_the_experts_that_it_owns(window: int) -> None:
    """Those with the most of the tokens that this rank was given since it has captured them. What other ranks
    were given does not count.
    """
    ranks = Replicas4(window)
    owned = [sorted(plan.selected_here) for plan in ranks.plans]
    experts = [i for i, op in enumerate(ranks.plans[0].operators) if op.expert is not None]
    assert sorted(itertools.chain(*owned)) == experts, "each has one owner"
    assert {len(of) for of in owned} == {EXPERTS * LAYERS // 4}
    longest, rng = ranks.plans[0].policy.window, random.Random(window)
    last = [dict.fromkeys(of, -1) for of in owned]
    seen, then = ([dict.fromkeys(of, 0.0) for of in owned] for _ in range(2))
    for number in range(40):
        for counts in (counts for of in ranks.given for counts in of.values()):
            counts[0] += rng.randrange(100)
            counts[number % EXPERTS] += rng.randrange(20)
        for rank, (plan, taken) in enumerate(zip(ranks.plans, ranks.snapshot(), strict=True)):
            if all(at >= 0 for at in last[rank].values()):
                at_risk = [seen[rank][i] - then[rank][i] for i in owned[rank]]
                ages = [number - last[rank][i] for i in owned[rank]]
                rooms = [plan.selected_room(number + ahead) for ahead in range(window)]
                assert max(ages) <= longest
                chosen = select_by_risk(at_risk, ages, rooms, longest)
                assert taken == {owned[rank][place] for place in chosen}
            for i in owned[rank]:
                name, index = plan.operators[i].expert or ("", 0)
                seen[rank][i] = ranks.given[rank][name][index]
                if i in taken:
                    last[rank][i], then[rank][i] = number, seen[rank][i]


@pytest.mark.parametrize("selection", ["model", "layer"])
def test_no_expert_is_left_out_by_all_of_its_ranks(selection: str) -> None:
    ranks = Replicas4(2, selection)
    taken = []
    for _ in range(20):
        for of in ranks.given:
            of["0.experts"][0] += 50
        taken.append(ranks.snapshot())
    longest = ranks.plans[0].policy.window
    for start in range(len(taken) - longest):
        for rank, plan in enumerate(ranks.plans):
            suffix = (each[rank] for each in taken[start : start + longest])
            assert set().union(*suffix) == plan.selected_here
