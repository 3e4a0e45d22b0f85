"""A plan that breaks a promise is found out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptd.core.reroute.pipeline_grid import StageCosts
from ckptd.core.reroute.reroute_plan import PlanKind, ReroutePlan, plan_reroute
from tests.ckptd.core.reroute.grids import grid
from tests.ckptd.core.reroute.plan_check import check_plan

TIGHT = StageCosts(1, 1, 1, activation_bytes=1, kept_bytes=1, memory_bytes=2)


@pytest.fixture
def plan() -> ReroutePlan:
    return plan_reroute(grid(2, 2, 3, (0, 1), cost=TIGHT))


def _with(plan: ReroutePlan, at: int, order: object, begins: object = None) -> ReroutePlan:
    orders, times = list(plan.orders), list(plan.begins_s)
    orders[at] = order  # type: ignore[call-overload]
    if begins is not None:
        times[at] = begins  # type: ignore[call-overload]
    return replace(plan, orders=tuple(orders), begins_s=tuple(times))


def test_what_is_found(plan: ReroutePlan) -> None:
    check_plan(plan)
    own = plan.orders[0]
    with pytest.raises(ValueError, match="exactly once"):
        check_plan(_with(plan, 0, own[:-1]))
    with pytest.raises(ValueError, match="runs phase 2 of"):
        check_plan(_with(plan, 0, own[::-1]))
    with pytest.raises(ValueError, match="is missing, and has"):
        check_plan(_with(plan, 2, own))
    with pytest.raises(ValueError, match=r"begins .* before .* has arrived"):
        check_plan(_with(plan, 3, plan.orders[3], tuple(t - 1 for t in plan.begins_s[3])))
    with pytest.raises(ValueError, match="while it is busy"):
        check_plan(_with(plan, 0, own, (0.0,) * len(own)))
    with pytest.raises(ValueError, match="and takes"):
        check_plan(replace(plan, iteration_s=100.0))
    with pytest.raises(ValueError, match="is less than the bound"):
        check_plan(replace(plan, iteration_s=1.0))
    less = (replace(TIGHT, memory_bytes=1),) * 2
    with pytest.raises(ValueError, match="holds 2 bytes, more than 1"):
        check_plan(replace(plan, grid=replace(plan.grid, costs=less)))
    with pytest.raises(ValueError, match="routed elsewhere"):
        check_plan(replace(plan, route=((0,) * 6, (0,) * 6)))
    with pytest.raises(ValueError, match="without a survivor are"):
        check_plan(replace(plan, kind=PlanKind.RECOVER))
