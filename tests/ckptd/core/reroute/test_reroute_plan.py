"""Plans keep their promises, are as fast as any schedule on small grids, and near the bound on large ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from ckptd.core.bubbles import ActionKind
from ckptd.core.reroute.pipeline_grid import PipelineGrid, StageCosts, Worker, lower_bound_s
from ckptd.core.reroute.reroute_plan import PlanKind, ReroutePlan, drop_pipelines, plan_reroute
from tests.ckptd.core.reroute.every_order import fastest_s
from tests.ckptd.core.reroute.grids import UNIT, any_grid, grid, small_grids
from tests.ckptd.core.reroute.plan_check import check_plan

# Nor can any schedule reach the bound here: two survivors of stage 1 would have to be busy all the time,
# three micro-batches each, so that stage 2 gets two in each of three units that follow each other, and each
# of them would have to pass its forward and first backward phase there at once: that takes four workers,
# and there are three.
UNREACHABLE = grid(3, 3, 2, (2, 1))


@pytest.mark.parametrize("staggered", [True, False])
def test_on_every_small_grid_no_schedule_is_faster(staggered: bool) -> None:
    """All 444 with equal durations: the plan takes no longer than the lower bound, but for one."""
    above = []
    found_grids = list(small_grids())
    assert len(found_grids) == 444
    for found in found_grids:
        plan = plan_reroute(replace(found, staggered=staggered))
        check_plan(plan)
        if plan.iteration_s > plan.bound_s + 1e-9:
            above.append((found, plan.iteration_s - plan.bound_s))
    assert above == ([(UNREACHABLE, 1.0)] if staggered else [])


@pytest.mark.parametrize(
    "tiny",
    [
        grid(2, 2, 1, (0, 1), cost=StageCosts(1, 2, 1, 0.5, 0.3, 0.2), staggered=False),
        grid(2, 2, 1, (0, 0), (1, 1), cost=StageCosts(2, 1, 3, 0.5, 0.3), staggered=False),
        grid(1, 2, 2, cost=StageCosts(1, 1, 1, 0, 0.5, 0, 2, 1, 3), staggered=False),
        grid(1, 3, 2, cost=StageCosts(1, 1, 2, 0, 0.25, 0, 2, 1, 2), staggered=False),
        grid(2, 1, 2, (1, 0), cost=StageCosts(1, 1, 1, 0.5, 0, 0, 2, 1, 2), staggered=False),
        grid(3, 2, 1, (0, 0), cost=StageCosts(1, 1, 1, 0.5, 0, 0, 1, 1, 1), staggered=False),
    ],
)
def test_tiny_grids_are_as_fast_as_the_best_of_every_order(tiny: PipelineGrid) -> None:
    """Also where memory or links are scarce, where the lower bound may not be reached."""
    best = fastest_s(tiny)
    plan = plan_reroute(tiny)
    check_plan(plan)
    assert plan.iteration_s == pytest.approx(best)
    assert plan.bound_s <= best + 1e-9


@settings(max_examples=40)
@given(any_grid())
def test_plans_keep_their_promises(drawn: PipelineGrid) -> None:
    """Each phase of each micro-batch once, results before they are used, memory kept, the predicted time,
    the bound; and never slower than dropping pipelines.
    """
    plan = plan_reroute(drawn)
    check_plan(plan)
    if drawn.lost_stages:
        assert plan.kind is PlanKind.RECOVER
        return
    assert plan.iteration_s >= lower_bound_s(drawn) - 1e-9
    if drawn.failed and drawn.whole:
        assert plan.iteration_s <= drop_pipelines(drawn).iteration_s + 1e-9


@pytest.mark.parametrize(
    "failed", [[], [(0, 3)], [(0, 3), (5, 3), (9, 0), (15, 7)], [(i, i % 8) for i in range(10)]]
)
@pytest.mark.parametrize("cost", [UNIT, StageCosts(1, 1.3, 0.9, 0.5, 0.2, 0.1)])
def test_large_grids_are_near_the_bound(failed: list[tuple[int, int]], cost: StageCosts) -> None:
    plan = plan_reroute(grid(16, 8, 24, *failed, cost=cost))
    check_plan(plan)
    assert plan.iteration_s <= 1.05 * plan.bound_s


def test_only_work_of_the_missing_worker_moves_and_evenly() -> None:
    plan = plan_reroute(grid(3, 4, 8, (1, 2)))
    moved = [
        (d, m, s)
        for s in range(4)
        for d in range(3)
        for m in range(8)
        if plan.runs_on(d, m, s) != Worker(d, s)
    ]
    assert moved == [(1, m, 2) for m in range(8)]
    assert sorted(len(plan.guests((d, 2))) for d in range(3)) == [0, 4, 4]
    assert not plan.actions((1, 2))
    kinds = [a.kind for a in plan.actions((0, 2))]
    assert [kinds.count(kind) for kind in ActionKind if kind != ActionKind.BACKWARD] == [12, 12, 12]
    assert plan.reason.startswith(
        "1 of 12 workers missing: 8 micro-batches run at other workers of their stage: "
    )


def test_a_stage_without_a_survivor_is_a_case_for_recovery() -> None:
    plan = plan_reroute(grid(2, 3, 4, (0, 1), (1, 1)))
    check_plan(plan)
    assert plan.kind is PlanKind.RECOVER
    assert "stage 1" in plan.reason
    assert plan.actions((0, 0)) == ()
    with pytest.raises(ValueError, match="recovered from snapshots"):
        plan.runs_on(0, 0, 0)


def test_dropping_needs_a_whole_pipeline() -> None:
    with pytest.raises(ValueError, match="each of the 2 pipelines lost a worker"):
        drop_pipelines(grid(2, 2, 4, (0, 0), (1, 1)))
    dropped = drop_pipelines(grid(2, 2, 4, (0, 0)))
    check_plan(dropped)
    assert dropped.kind is PlanKind.DROP
    assert dropped.iteration_s >= plan_reroute(grid(2, 2, 4, (0, 0))).iteration_s
    assert not dropped.actions((0, 1))


def test_few_micro_batches_are_told_of() -> None:
    assert (
        "2 micro-batches of each pipeline are fewer than its 4 stages"
        in plan_reroute(grid(2, 4, 2, (0, 1))).reason
    )


def test_memory_is_what_the_plan_holds() -> None:
    scarce = StageCosts(1, 1, 1, 0.5, activation_bytes=10, kept_bytes=10, memory_bytes=30)
    plan = plan_reroute(grid(2, 3, 8, (0, 1), cost=scarce))
    assert max(_most_held(plan, (d, s)) for d in range(2) for s in range(3)) == 3


def _most_held(plan: ReroutePlan, worker: tuple[int, int]) -> int:
    """The most micro-batches whose forward has begun, and whose second phase has not ended."""
    held = most = 0
    for action in plan.actions(worker):
        held += action.kind is ActionKind.FORWARD
        most = max(most, held)
        held -= action.kind is ActionKind.BACKWARD_WEIGHT
    return most
