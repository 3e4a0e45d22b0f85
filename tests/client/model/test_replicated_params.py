"""What several ranks have alike: who says so, who captures it, and what happens where ranks do not agree."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptd.client.model import replicated_params as sharing_module
from ckptd.client.model.live_state import LiveState
from ckptd.client.model.operators import Operator, ParameterRows, discover_operators
from ckptd.client.model.replicated_params import (
    EVERY_RANK,
    NOTHING_SHARED,
    Replicas,
    ReplicatedParams,
    agree_on_sharing,
    find_replicas,
)
from ckptd.client.model.snapshot_layout import parse_entry_name
from ckptd.client.options import SnapshotOptions
from ckptd.client.ranks.collectives import Collectives
from ckptd.client.schedule.partial_schedule import PartialTurns
from ckptd.client.schedule.planner import PlanInputs, make_plan, most_pieces, needed_memory
from ckptd.client.schedule.schedule_change import table_digest
from ckptd.client.schedule.snapshot_plan import (
    SnapshotPlan,
    captured_once,
    operator_costs,
    plan_from_payload,
)
from ckptd.core.schedule import Ordering
from ckptd.core.slots.segment_format import ReplicaGroup, plan_geometry
from ckptd.core.snapshot_policy import OperatorKind
from tests.client.doubled import Doubled
from tests.client.rank_threads import outcomes

with warnings.catch_warnings():
    # torch's own: its module still uses torch.jit.script.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer

BOTH = Replicas((0, 1), None)


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """This is rank 1 of four; the others are imagined."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.dense = nn.Linear(width, 4 * width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))


class FusedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.ones(4, 8, 8))


class FusedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(8, 8)
        self.experts = FusedExperts()


def bound(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> LiveState:
    return LiveState(model, [optimizer or torch.optim.AdamW(model.parameters())], None)


def ranks_of(binding: LiveState, told: dict[str, Any] | None = None) -> dict[str, tuple[int, ...]]:
    return {name: found.ranks for name, found in find_replicas(binding, told).items()}


@pytest.mark.usefixtures("four_ranks")
class TestWhoSaysSo:
    def test_ddp_tells_its_group_and_what_it_leaves_alone(self) -> None:
        model = Net()
        DDP._set_params_and_buffers_to_ignore_for_model(model, ["experts.0.weight"])
        found = ranks_of(bound(DDP(model)))
        assert found["dense.weight"] == (0, 1, 2, 3)
        assert "experts.0.weight" not in found
        assert len(found) == len(list(model.parameters())) - 1

    def test_a_wrapper_over_one_rank_within_another_hides_nothing(self) -> None:
        mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("data", "alone"))
        model = Net()
        setattr(model, "dense", DDP(model.dense, process_group=mesh["alone"].get_group()))  # noqa: B010
        found = ranks_of(bound(DDP(model)))
        assert len(found) == len(list(model.parameters()))
        assert set(found.values()) == {(0, 1, 2, 3)}

    def test_under_hsdp_the_ranks_with_the_same_shard(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = Net()
        fully_shard(model, mesh=mesh)
        assert set(ranks_of(bound(model)).values()) == {(1, 3)}

    def test_under_fsdp_nobody(self) -> None:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        model = Net()
        fully_shard(model, mesh=mesh)
        assert ranks_of(bound(model)) == {}

    def test_without_a_wrapper_what_the_user_tells(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
        told = {"experts.*": mesh["data"], "dense.*": dist.group.WORLD}
        found = ranks_of(bound(Net()), told)
        assert found["experts.2.bias"] == (1, 3)
        assert found["dense.weight"] == (0, 1, 2, 3)

    def test_the_user_knows_better_than_the_wrapper(self) -> None:
        """Experts whose gradients a hook of the user's leaves alone, say: a group of one takes them out."""
        mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("data", "alone"))
        found = ranks_of(bound(DDP(Net())), {"experts.*": mesh["alone"]})
        assert set(found) == {"dense.weight", "dense.bias"}

    def test_what_an_optimizer_spreads_over_ranks_is_not_alike(self) -> None:
        model = DDP(Net())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
        assert ranks_of(bound(model, optimizer)) == {}

    def test_a_rank_of_another_number_in_its_process_group_shares_nothing(self) -> None:
        """Who owns what goes by the job's ranks, who sends by those of the group."""
        binding = bound(DDP(Net()))
        assert find_replicas(binding, None, rank=2) == {}
        assert set(find_replicas(binding, None, rank=1)) == set(binding.params)

    def test_a_pattern_that_matches_nothing_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"replicated\['expert.*names look like 'dense.weight'"):
            find_replicas(bound(Net()), {"expert.*": dist.group.WORLD})

    def test_what_is_no_group_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"replicated\['dense.*pass a process group"):
            find_replicas(bound(Net()), {"dense.*": 4})


def sharing_of(binding: LiveState, own_bytes: dict[int, int] | None = None) -> ReplicatedParams:
    return ReplicatedParams(dict.fromkeys(binding.params, BOTH), own_bytes or {})


def planned(binding: LiveState, sharing: ReplicatedParams, rank: int = 0, **changes: Any) -> SnapshotPlan:
    operators = discover_operators(binding.model, rows_allowed=binding.rows_allowed)
    options: dict[str, Any] = {
        "policy": "sliding",
        "window": 2,
        "every": 1,
        "budget_bytes": None,
        "available_bytes": None,
        "popularity": None,
        "ordering": Ordering.HARD,
        "compute_dtypes": {},
        "identity": {"job": "j", "run": "r", "rank": str(rank), "world_size": "2"},
        "scalars_capacity": 4096,
    }
    return make_plan(binding, operators, PlanInputs(sharing=sharing, **(options | changes)))


def selecting(binding: LiveState, sharing: ReplicatedParams, rank: int, **changes: Any) -> SnapshotPlan:
    """With partial snapshots, for which experts are selected."""
    operators = discover_operators(binding.model, rows_allowed=binding.rows_allowed)
    turns = PartialTurns.of(SnapshotOptions(policy="selected"), operators, rank, 2, sharing)
    return planned(binding, sharing, rank, policy="partial", turns=turns, **changes)


def captured(plan: SnapshotPlan, binding: LiveState, ordinal: int) -> set[tuple[str, str, int | None]]:
    """Parameters, masters and optimizer state in a snapshot."""
    built = plan.phase_plan(binding, ordinal)
    assert built is not None
    sources = [parse_entry_name(e.name, torch.float32) for e in built[0].layout.entries]
    return {
        (s.kind + s.key, s.name, s.start)
        for s in sources
        if s.kind in ("param", "master", "optim") and not s.name.startswith("ckptd.")
    }


class TestPlans:
    def test_values_were_compared_where_each_operator_is_captured_once(self) -> None:
        """Replicas by their wrappers may differ (local SGD): to copy one's parked state to the
        other would change it.
        """
        binding = bound(Net())
        plan = planned(binding, sharing_of(binding))
        assert captured_once(plan.payload(binding))
        plan.capture_all(binding)
        assert not captured_once(plan.payload(binding))
        some = planned(binding, sharing_of(binding))
        some.owners[0] = EVERY_RANK
        assert not captured_once(some.payload(binding))
        assert not captured_once(planned(binding, NOTHING_SHARED).payload(binding))

    def test_together_two_ranks_capture_what_one_would_and_nothing_twice(self) -> None:
        binding = bound(Net())
        plans = [planned(binding, sharing_of(binding), rank) for rank in range(2)]
        assert plans[0].owners == plans[1].owners
        for ordinal in range(2):
            first, second = (captured(plan, binding, ordinal) for plan in plans)
            assert first & second == set()
            alone = replace(plans[0], owners=[], _phases={}, _policy=None, _state=None)
            assert {(k, n) for k, n, _ in first | second} == {
                (k, n) for k, n, _ in captured(alone, binding, ordinal)
            }

    def test_snapshots_are_half_as_large_and_alike(self) -> None:
        """Slots of 3/4 would be a poor spread; a few KiB of header and scalars are in each."""
        binding = bound(Net(width=64))
        alone = planned(binding, NOTHING_SHARED).slot_bytes
        first, second = (planned(binding, sharing_of(binding), r).slot_bytes for r in range(2))
        assert abs(first - second) < 0.15 * first
        assert max(first, second) < 0.65 * alone

    def test_a_dense_operator_is_cut_so_that_it_can_be_spread(self) -> None:
        binding = bound(Net(width=64))
        plan = planned(binding, sharing_of(binding), policy="dense")
        assert any(op.name.startswith("dense") and "/" in op.name for op in plan.operators)

    def test_no_more_pieces_than_room_is_made_for(self) -> None:
        """Their numbers are among the step scalars, whose room is fixed with the first plan."""
        binding = bound(Net(width=512))
        sharing = sharing_of(binding)
        operators = discover_operators(binding.model, rows_allowed=binding.rows_allowed)
        found = planned(binding, sharing).operators
        assert len(operators) < len(found) <= len(operators) + most_pieces(sharing, operators)

    def test_a_fresh_process_knows_the_owners(self) -> None:
        binding = bound(Net())
        plan = planned(binding, sharing_of(binding))
        again = plan_from_payload(
            binding,
            plan.payload(binding),
            plan.identity,
            plan_geometry(plan.num_slots, plan.slot_bytes, 4096),
            sharing_of(binding),
        )
        assert again.owners == plan.owners
        assert set(plan.owners) == {0, 1}
        assert again.costs == plan.costs

    def test_owners_stay_when_a_rank_plans_anew(self) -> None:
        """Its peers may go over at another iteration: what was rank 1's at one must be rank 1's at the next."""
        binding = bound(Net())
        first = planned(binding, sharing_of(binding))
        other = sharing_of(binding, {0: 1 << 30, 1: 0})
        assert planned(binding, other).owners != first.owners
        assert planned(binding, other, before=first).owners == first.owners

    def test_phases_stay_when_a_rank_alone_plans_anew(self) -> None:
        """Its own experts' optimizer began to keep more. What it shares would be anchored at
        another time than on its peers.
        """
        model = Net()
        shared = {"dense.weight": BOTH, "dense.bias": BOTH}
        rest = [p for n, p in model.named_parameters() if n not in shared]

        def binding(kept: type[torch.optim.Optimizer]) -> LiveState:
            dense = torch.optim.AdamW([model.dense.weight, model.dense.bias])
            first = torch.optim.SGD(rest[:2], lr=0.1)
            return LiveState(model, [dense, first, kept(rest[2:], lr=0.1)], None)  # type: ignore[call-arg]

        first = planned(binding(torch.optim.SGD), ReplicatedParams(shared))
        more = binding(torch.optim.AdamW)
        assert planned(more, ReplicatedParams(shared)).schedule.phases != first.schedule.phases
        again = planned(more, ReplicatedParams(shared), before=first)
        assert again.schedule.phases == first.schedule.phases
        assert again.owners == first.owners
        assert again.slot_bytes > first.slot_bytes

    def test_where_operators_are_cut_anew_everybody_captures_all(self) -> None:
        binding = bound(Net(width=64))
        first = planned(binding, sharing_of(binding))
        other = [*first.operators[1:], replace(first.operators[0], name="of another cut")]
        again = planned(binding, sharing_of(binding), before=replace(first, operators=other))
        assert again.left_out == frozenset()

    def test_owners_outlive_a_change_of_the_window(self) -> None:
        """Were they lost with it, a wider window would make snapshots larger: every rank would
        capture everything.
        """
        binding = bound(Net(width=64))
        first = planned(binding, sharing_of(binding))
        for window in (1, 5):
            again = planned(binding, sharing_of(binding), window=window, before=first)
            assert again.schedule.window == window
            assert again.owners == first.owners

    def test_in_another_order_ranks_that_share_take_the_same_steps(self) -> None:
        """Their slots differ by a few bytes; what decides how far an order may go must not."""
        binding = bound(Net(width=64))
        first, second = (planned(binding, sharing_of(binding), r, window=4) for r in range(2))
        assert first.order_capacity == second.order_capacity
        assert table_digest(first) == table_digest(second)
        for plan in (first, second):
            assert plan.takes(binding, plan.schedule.phases) <= plan.slot_bytes
            everything = [range(len(plan.operators))]
            assert plan.takes(binding, everything) > plan.slot_bytes

    def test_who_captures_all_after_all_has_what_others_leave_to_it(self) -> None:
        """In one group its plan was another; in a second group it was the same, and the others rely
        on what they were told.
        """
        binding = bound(Net(width=64))
        sharing = sharing_of(binding)
        others, plan = planned(binding, sharing, 0), planned(binding, sharing, 1)
        before = plan.slot_bytes
        assert set(plan.owners) == {0, 1}
        plan.capture_all(binding)
        assert not plan.shares
        assert plan.operators == others.operators
        assert plan.schedule == others.schedule
        assert plan.slot_bytes > before
        for ordinal in range(2):
            left = {o for i in others.left_out for o in others.operators[i].members}
            names = {name for kind, name, _ in captured(plan, binding, ordinal) if kind == "param"}
            assert {m.param for m in left} <= names

    def test_fingerprints_tell_other_phases_and_owners(self) -> None:
        binding = bound(Net())
        sharing = sharing_of(binding)
        plan = planned(binding, sharing)

        def told(phases: Any, owners: list[int]) -> int:
            return sharing.fingerprints(plan.operators, phases, owners)[BOTH]

        same = told(plan.schedule.phases, plan.owners)
        assert 0 <= same < 1 << 63
        assert told(plan.schedule.phases, plan.owners) == same
        assert told(plan.schedule.phases[::-1], plan.owners) != same
        assert told(plan.schedule.phases, plan.owners[::-1]) != same
        of = plan.operators, plan.schedule.phases, plan.owners
        assert sharing.fingerprints(*of, selectable={0})[BOTH] != same

    def test_experts_that_are_selected_stay_whole_and_are_shared_out_evenly(self) -> None:
        """What is no expert is shared out by bytes, as ever."""
        binding = bound(Net(width=64))
        sharing = sharing_of(binding, {0: 1 << 20, 1: 0})
        plans = [selecting(binding, sharing, rank) for rank in range(2)]
        assert plans[0].owners == plans[1].owners
        experts = [i for i, op in enumerate(plans[0].operators) if op.expert is not None]
        assert len(experts) == 4 == len(selecting(binding, NOTHING_SHARED, 0).operators) - 1
        assert sorted(plans[0].owners[i] for i in experts) == [0, 0, 1, 1]
        assert {owner for i, owner in enumerate(plans[0].owners) if i not in experts} == {1}
        for plan in plans:
            assert plan.selectable == set(experts)
            assert len(plan.selected_here) == 2
            assert plan.selection_text == (
                "all 4 experts of this rank are selected by tokens at risk (2 of them by other ranks that "
                "hold them, too)"
            )
        assert plans[0].selected_here.isdisjoint(plans[1].selected_here)

    @pytest.mark.usefixtures("four_ranks")
    @pytest.mark.parametrize("fused", [True, False])
    def test_experts_of_which_each_rank_has_a_part_take_turns(self, fused: bool) -> None:
        """Ranks with the other parts would select these at other times. Fused ones are rows of a shard."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = FusedNet() if fused else Net()
        fully_shard(model, mesh=mesh)
        binding = bound(model)
        sharing = ReplicatedParams(find_replicas(binding, None))
        plan = selecting(binding, sharing, 1)
        experts = [i for i, op in enumerate(plan.operators) if op.expert is not None]
        assert {plan.owners[i] for i in experts} == {1, 3}
        assert len(plan.selectable) == (2 if fused else 0)

    @pytest.mark.parametrize("chosen", [None, frozenset[int]()])
    def test_what_others_select_no_suffix_of_this_rank_waits_for(self, chosen: frozenset[int] | None) -> None:
        binding = bound(Net())
        plan = selecting(binding, sharing_of(binding), 0)
        others = plan.selectable & plan.left_out
        for ordinal in range(2):
            built = plan.phase_plan(binding, ordinal, chosen)
            assert built is not None
            assert others <= built[0].anchored
            entries = {parse_entry_name(e.name, torch.float32).name for e in built[0].layout.entries}
            assert not entries & {m.param for i in others for m in plan.operators[i].members}

    def test_slots_have_room_for_the_experts_of_this_rank(self) -> None:
        """One of its two in each snapshot, though of all four two have their turn together."""
        binding = bound(Net(width=64))
        for rank in range(2):
            plan = selecting(binding, sharing_of(binding), rank)
            assert [plan.selected_room(phase) for phase in range(2)] == [1, 1]
            built = [plan.phase_plan(binding, 0, frozenset({i})) for i in plan.selected_here]
            sizes = [each[0].layout.image_len for each in built if each is not None]
            assert max(sizes) <= plan.slot_bytes <= 1.1 * max(sizes) + 70_000
            assert plan.num_slots == 2 * 2 + 2

    def test_a_longer_window_has_fewer_experts_in_a_snapshot(self) -> None:
        """Owners stay, and of the two experts of each one has its turn in each snapshot."""
        binding = bound(Net(width=128))
        sharing = sharing_of(binding)
        first = [selecting(binding, sharing, rank, window=1) for rank in range(2)]
        longer = [selecting(binding, sharing, r, window=2, before=p) for r, p in enumerate(first)]
        for before, plan in zip(first, longer, strict=True):
            assert plan.owners == before.owners
            assert (before.selected_room(0), plan.selected_room(0), plan.selected_room(1)) == (2, 1, 1)
            assert plan.slot_bytes < before.slot_bytes
        assert longer[0].schedule.phases == longer[1].schedule.phases

    def test_the_least_memory_has_room_for_whole_experts(self) -> None:
        """One in each of ten slots, though four snapshots of two ranks have place for each twice."""
        binding = bound(Net(width=64))
        operators = discover_operators(binding.model, rows_allowed=binding.rows_allowed)
        options, sharing = SnapshotOptions(policy="selected", window=4), sharing_of(binding)
        need = needed_memory(binding, operators, options, sharing)
        plan = selecting(binding, sharing, 0, window=4)
        assert need.size_bytes <= plan.num_slots * plan.slot_bytes
        whole = operator_costs(binding, operators, {})
        (expert,) = {c.anchor_bytes for c in whole if c.kind is OperatorKind.EXPERT}
        turns = needed_memory(binding, operators, SnapshotOptions(policy="partial", window=4), sharing)
        assert need.size_bytes == pytest.approx(10 * (turns.size_bytes / 6 + expert / 2), rel=0.01)

    def test_whoever_captures_all_lets_experts_take_turns(self) -> None:
        """Others may rely on it, or keep their own: both need all of them in the same snapshots."""
        binding = bound(Net())
        plan = selecting(binding, sharing_of(binding), 0)
        plan.capture_all(binding)
        assert plan.selectable == frozenset()
        assert plan.selection_text.startswith("EXPERTS TAKE TURNS")
        assert plan.policy.window == 2
        again = selecting(binding, sharing_of(binding), 0, before=plan)
        assert again.selectable == frozenset()

    def test_a_run_that_changes_to_selected_experts_keeps_its_owners(self) -> None:
        binding = bound(Net(width=64))
        sharing = sharing_of(binding)
        before = planned(binding, sharing)
        again = selecting(binding, sharing, 0, before=before)
        assert again.owners == before.owners
        assert len(again.selectable) == 4

    def test_a_run_that_changes_from_selected_experts_keeps_its_owners(self) -> None:
        binding = bound(Net(width=64))
        sharing = sharing_of(binding)
        before = selecting(binding, sharing, 0)
        again = planned(binding, sharing, before=before)
        assert again.owners == before.owners
        assert set(again.owners) == {0, 1}

    def test_an_operator_of_mixed_parameters_is_each_ranks_own(self) -> None:
        sharing = ReplicatedParams({"a": BOTH, "b": Replicas((0, 1, 2), None)})
        mixed = Operator("x", OperatorKind.DENSE, (ParameterRows("a"), ParameterRows("b")))
        partly = Operator("y", OperatorKind.DENSE, (ParameterRows("a"), ParameterRows("c")))
        whole = Operator("z", OperatorKind.DENSE, (ParameterRows("a"),))
        assert [sharing.group_of(op) for op in (mixed, partly, whole)] == [None, None, BOTH]

    def test_alike_are_those_who_have_all_operators(self) -> None:
        three = Replicas((0, 1, 2), None)
        of = {name: Operator(name, OperatorKind.DENSE, (ParameterRows(name),)) for name in "abc"}
        sharing = ReplicatedParams({"a": BOTH, "b": three})
        assert sharing.ranks_with_same_operators([of["b"]], 1) == (0, 2)
        assert sharing.ranks_with_same_operators([of["a"], of["b"]], 1) == (0,)
        assert sharing.ranks_with_same_operators(list(of.values()), 1) == ()
        assert sharing.ranks_with_same_operators([], 1) == ()

    def test_daemons_learn_what_is_replicated_on_which_ranks(self) -> None:
        three = Replicas((0, 1, 2), None)
        sharing = ReplicatedParams({"b": three, "a": BOTH, "c": three})
        assert sharing.replica_groups() == (ReplicaGroup((0, 1), ("a",)), ReplicaGroup((0, 1, 2), ("b", "c")))
        assert NOTHING_SHARED.replica_groups() == ()

    def test_a_descriptor_can_hold_what_daemons_learn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is cut, since a descriptor that is refused would leave the job without snapshots."""
        monkeypatch.setattr(sharing_module, "MAX_GROUP_RANKS", 2)
        monkeypatch.setattr(sharing_module, "MAX_REPLICA_GROUPS", 1)
        groups = {"a": Replicas((0, 1, 2), None), "b": BOTH, "c": Replicas((0, 2), None)}
        assert ReplicatedParams(groups).replica_groups() == (ReplicaGroup((0, 1), ("b",)),)

    def test_what_is_shared_costs_each_its_part(self) -> None:
        binding = bound(Net())
        operators = discover_operators(binding.model, rows_allowed=binding.rows_allowed)
        whole = operator_costs(binding, operators, {})
        part = ReplicatedParams({"dense.weight": BOTH, "dense.bias": BOTH}).mean_costs(operators, whole)
        for before, after in zip(whole, part, strict=True):
            halves = 2 if before.name == "dense" else 1
            assert after.anchor_bytes == before.anchor_bytes // halves


class TestAgreeOnSharing:
    def both(self, *models: nn.Module) -> list[ReplicatedParams]:
        def work(model: nn.Module, ranks: Collectives) -> ReplicatedParams:
            binding = bound(model)
            return agree_on_sharing(binding, dict.fromkeys(binding.params, BOTH), 7, ranks)

        found = outcomes([partial(work, model) for model in models])
        assert all(isinstance(f, ReplicatedParams) for f in found), found
        return found  # type: ignore[return-value]

    def test_equal_values_are_shared(self) -> None:
        model = Net()
        for sharing in self.both(model, model):
            assert len(sharing.replicas) == len(list(model.parameters()))
            assert sharing.own_bytes == {0: 7, 1: 7}

    @pytest.mark.parametrize("shared", [True, False])
    def test_who_restarts_in_its_process_shares_what_it_has_shared(self, shared: bool) -> None:
        """Its weights are those of a step that was cut off, and a new rank's those of the program."""
        stays, new = bound(Net()), bound(Net())
        replicas = dict.fromkeys(stays.params, BOTH)
        before = ReplicatedParams(replicas if shared else {})

        def work(binding: LiveState, last: ReplicatedParams | None, ranks: Collectives) -> ReplicatedParams:
            return agree_on_sharing(binding, replicas, 7, ranks, before=last)

        found = outcomes([partial(work, stays, before), partial(work, new, None)])
        assert [f.replicas for f in found if isinstance(f, ReplicatedParams)] == [before.replicas] * 2

    def test_one_bit_that_differs_is_noticed_on_both(self, caplog: pytest.LogCaptureFixture) -> None:
        first, second = Net(), Net()
        second.load_state_dict(first.state_dict())
        with torch.no_grad():
            bits = second.experts[3].bias.view(torch.int32)  # type: ignore[operator]
            bits[5] ^= 1
        assert [s.replicas for s in self.both(first, second)] == [{}, {}]
        assert "should be replicated over 2 ranks, but are not the same on rank" in caplog.text

    def test_values_that_changed_places_are_noticed(self) -> None:
        first, second = Net(), Net()
        second.load_state_dict(first.state_dict())
        with torch.no_grad():
            second.dense.weight.copy_(first.dense.weight.flip(0))
        assert [s.replicas for s in self.both(first, second)] == [{}, {}]

    @pytest.mark.parametrize("lr", [0.0, 1e-3])
    def test_what_began_alike_and_is_trained_apart_is_noticed_after_the_first_update(self, lr: float) -> None:
        """One seed on all ranks makes anything alike at the start. A warm-up begins with a learning
        rate of zero: the weights are alike then, but not what the optimizer keeps.
        """
        told = []
        for gradient in (1.0, 1.0, 2.0):
            torch.manual_seed(0)
            model = Net()
            optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
            binding = bound(model, optimizer)
            before = sharing_of(binding).checksums(binding)
            for param in model.parameters():
                param.grad = torch.full_like(param, gradient)
            optimizer.step()
            told.append((before, sharing_of(binding).checksums(binding)))
        assert told[0] == told[1]
        assert told[0][0] == told[2][0]
        assert told[0][1] != told[2][1]

    def test_fingerprints_tell_other_values(self) -> None:
        binding = bound(Net())
        sharing, plan = sharing_of(binding), planned(binding, sharing_of(binding))

        def told(values: str) -> int:
            return sharing.fingerprints(plan.operators, plan.schedule.phases, plan.owners, {BOTH: values})[
                BOTH
            ]

        assert told("a") == told("a")
        assert told("a") != told("b")

    @pytest.mark.parametrize("shape", [(1, 1000), (1000, 1), (10, 100), (1000,)])
    @pytest.mark.parametrize("turned", [False, True])
    def test_summing_takes_little_memory_whatever_the_size(
        self, shape: tuple[int, ...], turned: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A sum of 16-bit words widens all of its input to 64 bits: of a large parameter, four
        times what the device holds of it.
        """
        monkeypatch.setattr(sharing_module, "_SUMMED_AT_ONCE", 100)
        model = nn.Module()
        values = torch.ones(shape, dtype=torch.bfloat16)
        model.w = nn.Parameter(values.t().contiguous().t() if turned else values)
        binding = bound(model)
        with torch.profiler.profile(profile_memory=True) as profile:
            sharing_of(binding).checksums(binding)
        largest = max(event.cpu_memory_usage for event in profile.events() or ())
        assert 0 < largest <= 100 * 8 + 1024

    @pytest.mark.parametrize(
        "dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]
    )
    def test_values_of_any_type_have_a_checksum(self, dtype: torch.dtype) -> None:
        def told(last: float) -> dict[Replicas, str]:
            model = nn.Module()
            values = torch.tensor([1.0, 0.0, last]).to(dtype)
            model.w = nn.Parameter(values, requires_grad=False)
            model.one = nn.Parameter(values[2], requires_grad=False)
            binding = bound(model, torch.optim.SGD([torch.zeros(1)], lr=0.1))
            return sharing_of(binding).checksums(binding)

        assert told(1.0) == told(1.0)
        assert told(1.0) != told(0.0)

    @pytest.mark.parametrize("count", [1, 3, 8, 1001])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex128])
    def test_a_checksum_is_of_every_bit_and_not_of_the_place_in_memory(
        self, dtype: torch.dtype, count: int
    ) -> None:
        def told(values: torch.Tensor) -> dict[Replicas, str]:
            model = nn.Module()
            model.w = nn.Parameter(values, requires_grad=False)
            binding = bound(model, torch.optim.SGD([torch.zeros(1)], lr=0.1))
            return sharing_of(binding).checksums(binding)

        values = torch.randint(0, 100, (count,)).to(dtype)
        elsewhere = torch.cat([values[:1], values])[1:]
        assert elsewhere.storage_offset() == 1
        assert told(elsewhere) == told(values)
        for byte in (0, -1):
            flipped = values.clone()
            flipped.view(torch.uint8)[byte] ^= 1
            assert told(flipped) != told(values)

    @pytest.mark.parametrize("count", [3, 1000, 100_000])
    def test_an_exchange_of_two_parameters_is_noticed(self, count: int) -> None:
        def told(first: torch.Tensor, second: torch.Tensor) -> dict[Replicas, str]:
            model = nn.Module()
            model.a, model.b = nn.Parameter(first), nn.Parameter(second)
            binding = bound(model, torch.optim.SGD(model.parameters(), lr=0.1))
            return sharing_of(binding).checksums(binding)

        first, second = torch.randn(count), torch.randn(count)
        assert told(first, second) == told(first.clone(), second.clone())
        assert told(first, second) != told(second, first)

    def test_more_small_parameters_than_are_summed_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sharing_module, "_SUMMED_AT_ONCE", 10)

        def told(changed: int) -> dict[Replicas, str]:
            model = nn.Module()
            for number in range(30):
                value = torch.full((4,), float(number + (number == changed)))
                setattr(model, f"w{number}", nn.Parameter(value))
            binding = bound(model, torch.optim.SGD(model.parameters(), lr=0.1))
            return sharing_of(binding).checksums(binding)

        assert len({told(changed)[BOTH] for changed in range(31)}) == 31

    def test_optimizer_state_that_is_made_of_other_tensors_has_a_checksum(self) -> None:
        """torchao's 8-bit moments answer to no operation but their own: with DDP no snapshot was
        ever taken, after three errors in the log.
        """

        def told(last: float) -> dict[Replicas, str]:
            model = nn.Module()
            model.w = nn.Parameter(torch.ones(3))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.state[model.w]["moment"] = Doubled(torch.tensor([1.0, 0.0, last]))
            binding = bound(model, optimizer)
            return sharing_of(binding).checksums(binding)

        assert told(1.0) == told(1.0)
        assert told(1.0) != told(2.0)

    def test_a_rank_that_does_not_share_takes_the_others_out(self) -> None:
        binding = bound(Net())

        def work(replicas: dict[str, Replicas], ranks: Collectives) -> ReplicatedParams:
            return agree_on_sharing(binding, replicas, 0, ranks)

        wants = dict.fromkeys(binding.params, BOTH)
        first, second = outcomes([lambda e: work(wants, e), lambda e: work({}, e)])
        assert isinstance(first, ReplicatedParams)
        assert isinstance(second, ReplicatedParams)
        assert first.replicas == second.replicas == {}
        plan = planned(binding, first)
        assert plan.left_out == frozenset()
        assert set(plan.owners) == {EVERY_RANK}
