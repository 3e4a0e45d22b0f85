"""Which experts a rank's partial snapshots hold, and options that no model can meet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckptd.client.model.operators import Operator, ParameterRows
from ckptd.client.model.replicated_params import Replicas, ReplicatedParams
from ckptd.client.options import PartialOptions, SnapshotOptions
from ckptd.client.schedule.partial_schedule import (
    PartialTurns,
    check_experts,
    durable_text,
    durable_turns,
    experts_alone,
    scope_of,
)
from ckptd.core.durable_experts import DurableTurns
from ckptd.core.partial_experts import LOST_TOKENS_LIMIT, rotation
from ckptd.core.snapshot_policy import OperatorCost, OperatorKind, PartialScope

NO_PARTS: set[int] = set()


def operators(experts: int, layers: int = 2) -> list[Operator]:
    found = [Operator("dense", OperatorKind.DENSE, (ParameterRows("dense"),))]
    for layer in range(layers):
        found += [
            Operator(
                f"{layer}.{i}", OperatorKind.EXPERT, (ParameterRows(f"{layer}.{i}"),), expert=(f"{layer}", i)
            )
            for i in range(experts)
        ]
    return found


def options(**partial: Any) -> SnapshotOptions:
    return SnapshotOptions(policy="partial", partial=PartialOptions(**partial))


def turns(number: int, rank: int = 0, world_size: int = 1, **partial: Any) -> PartialTurns:
    found = PartialTurns.of(options(**partial), operators(number), rank, world_size)
    assert found is not None
    return found


def test_other_policies_have_no_turns() -> None:
    assert PartialTurns.of(SnapshotOptions(), operators(4), 0, 1) is None
    assert scope_of(SnapshotOptions()) is None
    assert scope_of(options(scope="weights")) is PartialScope.WEIGHTS
    check_experts(operators(0), SnapshotOptions())


@pytest.mark.parametrize(
    ("experts", "partial", "message"),
    [
        (0, {}, "no experts were found in this model"),
        (4, {"experts": 5}, "experts=5: 0 has 4 experts; pass at most as many"),
        (4, {"num_experts": 3}, "num_experts=3: 0 has 4 experts on this rank alone"),
        (4, {"persist_experts": 5}, "persist_experts=5: 0 has 4 experts; pass at most as many"),
    ],
)
def test_what_no_model_can_meet_is_refused(experts: int, partial: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_experts(operators(experts), options(**partial))


def test_a_snapshot_has_at_least_one_expert_of_a_layer() -> None:
    """A window is K = E / W; a longer one had snapshots without an expert of some layers."""
    for policy in ("partial", "selected"):
        check_experts(operators(4), SnapshotOptions(policy=policy, window=4))
        with pytest.raises(ValueError, match="window=5: 0 has 4 experts, and a snapshot has at least one"):
            check_experts(operators(4), SnapshotOptions(policy=policy, window=5))
    more = PartialOptions(num_experts=8)
    check_experts(operators(4), SnapshotOptions(policy="partial", window=8, partial=more))
    with pytest.raises(ValueError, match="window=9: 0 has 8 experts"):
        check_experts(operators(4), SnapshotOptions(policy="partial", window=9, partial=more))


def test_k_may_exceed_the_experts_of_one_rank() -> None:
    check_experts(operators(2), options(experts=4, num_experts=8))


@pytest.mark.parametrize(
    ("partial", "window"),
    [({}, None), ({"experts": 1}, 8), ({"experts": 3}, 3), ({"experts": 2, "num_experts": 64}, 32)],
)
def test_k_is_a_window(partial: dict[str, Any], window: int | None) -> None:
    assert turns(8, **partial).window == window


def test_without_a_limit_the_wanted_window_is_used_at_once() -> None:
    assert turns(8, lost_tokens_limit=None).window_within(0, 99.0, 8, every=1) == 8
    assert turns(8).window_within(0, 0.0, 8, every=1) == 1
    assert turns(8).window_within(10_000, 0.0, 8, every=1) == 8
    assert turns(8).window_within(10_000, 0.0, 8, every=200) == 4
    assert turns(8).window_within(10_000, 375.0, 8, every=1) == 1


def planned(found: PartialTurns, budget: int | None, window: int | None = None) -> Any:
    parts = found.operators
    costs = [OperatorCost(op.name, op.kind, 100, 100 if op.expert is None else 0) for op in parts]
    return found.schedule(parts, costs, fixed_bytes=0, budget_bytes=budget, window=window)


def test_the_smallest_window_whose_snapshots_fit() -> None:
    assert planned(turns(8), None).window == 1
    assert planned(turns(8), 500).window == 4
    nothing_fits = planned(turns(8), 50)
    assert nothing_fits.window == 8
    assert not nothing_fits.fits
    assert planned(turns(8), 50, window=2).window == 2


def test_ranks_with_other_experts_take_turns() -> None:
    one, other = (planned(turns(2, rank, num_experts=4), None, window=4) for rank in range(2))
    assert one.phases != other.phases
    assert {len(phase) for phase in other.phases[1:]} == {1}


def test_only_experts_of_which_one_rank_decides_are_selected() -> None:
    """No other rank has them, or the ranks that have them share them."""

    def selectable(found: PartialTurns, owners: list[int] | None = None, parts: set[int] = NO_PARTS) -> int:
        return len(found.selectable(found.operators, owners or [], parts))

    assert selectable(turns(4)) == 0
    assert selectable(turns(4, selection="model")) == 8
    assert selectable(turns(4, world_size=2, selection="model")) == 0
    assert selectable(turns(4, world_size=2, selection="model", num_experts=8)) == 8
    assert selectable(turns(4, world_size=4, selection="model", num_experts=8)) == 0
    shared = turns(4, world_size=4, selection="model", num_experts=8)
    assert selectable(shared, [-1, 0, 1, *[-1] * 6]) == 2
    assert selectable(shared, [0, 0, 1, 0, 1, 0, 1, 0, 1]) == 8
    assert selectable(shared, [0, 0, 1, 0, 1, 0, 1, 0, 1], {2, 3}) == 6
    assert selectable(turns(4, world_size=4), [0, 0, 1, 0, 1, 0, 1, 0, 1]) == 0


def test_of_a_layer_with_fewer_experts_than_others_nothing_is_certain() -> None:
    """Both ranks may have the same."""
    parts = [op for op in operators(4) if op.name not in ("1.2", "1.3")]
    names = {parts[i].name for i in experts_alone(parts, 2, 8)}
    assert names == {f"0.{i}" for i in range(4)}
    assert len(experts_alone(parts, 1, None)) == 6
    assert experts_alone(parts, 2, None) == frozenset()


def test_an_expert_of_several_operators_takes_turns() -> None:
    """They may have several owners."""
    whole = operators(2, layers=1)
    cut = [*whole[:2], replace(whole[1], name="0.0/1"), whole[2]]
    assert turns(2, world_size=2, selection="model").selectable(cut, [0, 0, 1, 1]) == {3}


@pytest.mark.parametrize(
    ("groups", "places"),
    [
        ([(0, 2), (1, 3)], [0, 1, 0, 1]),  # replicas are far from each other
        ([(0, 1), (2, 3)], [0, 0, 1, 1]),  # replicas have consecutive numbers
        ([(4, 6), (5, 7)], [4, 5, 4, 5]),  # of a second stage: places count modulo those of the layer
    ],
)
def test_replicas_take_the_same_turns(groups: list[tuple[int, ...]], places: list[int]) -> None:
    parts = operators(2)
    names = [op.name for op in parts if op.expert is not None]
    first = min(rank for ranks in groups for rank in ranks)
    found = {}
    for ranks in groups:
        sharing = ReplicatedParams(dict.fromkeys(names, Replicas(ranks, None)))
        for rank in ranks:
            of = PartialTurns.of(options(num_experts=4), parts, rank, 4, sharing)
            assert of is not None
            found[rank] = of
    assert [found[first + n].rank for n in range(4)] == places
    planned_by = {rank: planned(of, None, window=4).phases for rank, of in found.items()}
    for one, other in groups:
        assert planned_by[one] == planned_by[other]
    assert planned_by[groups[0][0]] != planned_by[groups[1][0]]


def test_owners_that_are_dealt_for_one_window_have_even_snapshots_in_each() -> None:
    """A run begins with all experts in each snapshot, and its owners stay. What is no expert is in each."""
    ranks, layers, experts = 4, 12, 8
    size = {"embedding": 240}
    for layer in range(layers):
        size |= {f"layers.{layer}.attention": 60, f"layers.{layer}.gate": 6, f"layers.{layer}.norm": 1}
        size |= {f"layers.{layer}.experts.{i}": 100 for i in range(experts)}
    parts = []
    for name in size:
        container, found, index = name.partition(".experts.")
        kind, expert = (OperatorKind.EXPERT, (container, int(index))) if found else (OperatorKind.DENSE, None)
        parts.append(Operator(name, kind, (ParameterRows(name),), expert=expert))
    costs = [OperatorCost(op.name, op.kind, size[op.name], 0 if op.expert else size[op.name]) for op in parts]
    sharing = ReplicatedParams({op.name: Replicas(tuple(range(ranks)), None) for op in parts})
    owners = sharing.owners(parts, costs, [range(len(parts))], partial=True)
    for window in (1, 2, 4, 8):
        turns = rotation([op.expert for op in parts], window)
        captured: dict[tuple[int, int], int] = {}
        for op, owner, turn in zip(parts, owners, turns, strict=True):
            for phase in range(window) if op.expert is None else [turn]:
                captured[phase, owner] = captured.get((phase, owner), 0) + size[op.name]
        for phase in range(window):
            of_ranks = [captured[phase, rank] for rank in range(ranks)]
            # Dealt by bytes over all: up to 1.39 times.
            assert max(of_ranks) < 1.05 * sum(of_ranks) / ranks


def test_durable_checkpoints_store_whole_parts_of_the_experts_and_say_so() -> None:
    assert durable_turns(options(), operators(4)) is None
    assert durable_turns(SnapshotOptions(), operators(4)) is None
    found = durable_turns(options(persist_experts=3), operators(8))
    assert found == DurableTurns(3, 8, LOST_TOKENS_LIMIT)
    told = durable_text(found, 4)
    assert "STORES 2 OF 4 PARTS of the experts (persist_experts=3 of 8 in a layer)" in told
    assert "each expert is stored at least once in 3 checkpoints; as many more as keep a PLT" in told
    assert durable_text(found, 1) == "a durable checkpoint stores all 8 experts of a layer"
    spread = durable_turns(options(persist_experts=3, num_experts=16, lost_tokens_limit=None), operators(8))
    assert spread == DurableTurns(3, 16, None)
