"""Whether a plan may be run: every micro-batch once, in an order that is possible, within memory (pure).

It knows nothing of how plans are made: it plays the orders of a plan, action by action.
"""

from __future__ import annotations

import math
from collections import Counter

from ckptd.core.reroute.pipeline_grid import PipelineGrid, lower_bound_s
from ckptd.core.reroute.reroute_plan import PlanKind, ReroutePlan

__all__ = ["check_plan", "played_s"]


def check_plan(plan: ReroutePlan) -> None:
    """Check all that a plan promises.

    Raises:
        ValueError: it breaks a promise; says which and where.
    """
    if plan.kind is PlanKind.RECOVER:
        if not plan.grid.lost_stages or plan.orders:
            raise ValueError(f"{plan.reason}: but stages without a survivor are {plan.grid.lost_stages}")
        return
    grid = plan.grid
    for at, order in enumerate(plan.orders):
        stage, pipeline = divmod(at, grid.pipelines)
        if order and (pipeline, stage) in grid.failed:
            raise ValueError(f"worker {(pipeline, stage)} is missing, and has {len(order)} actions")
        _check_memory(grid, stage, order)
    for stage in range(grid.stages):
        workers = range(stage * grid.pipelines, (stage + 1) * grid.pipelines)
        counted = Counter((kind, b) for at in workers for kind, b in plan.orders[at])
        wanted = {(kind, b) for kind in range(3) for b in range(grid.total)}
        if set(counted) != wanted or max(counted.values()) > 1:
            raise ValueError(f"stage {stage} does not run each phase of each micro-batch exactly once")
        for at in workers:
            wrong = [b for _, b in plan.orders[at] if plan.route[stage][b] != at % grid.pipelines]
            if wrong:
                raise ValueError(
                    f"worker {at % grid.pipelines} of stage {stage} runs {wrong[0]}, routed elsewhere"
                )
    if plan.iteration_s < lower_bound_s(grid) * (1 - 1e-9):
        raise ValueError(
            f"{plan.iteration_s} s for an iteration is less than the bound, {lower_bound_s(grid)} s"
        )
    played = played_s(plan)
    if not math.isclose(played, plan.iteration_s, rel_tol=1e-6):
        raise ValueError(f"the plan says {plan.iteration_s} s for an iteration, and takes {played} s")


def played_s(plan: ReroutePlan) -> float:
    """Seconds of an iteration in which each action begins when the plan says.

    Raises:
        ValueError: an action begins before its worker is free, or before what it needs is there.
    """
    grid, D = plan.grid, plan.grid.pipelines
    ended: dict[tuple[int, int, int], float] = {}
    last = [0.0] * grid.stages
    for at, (order, begins) in enumerate(zip(plan.orders, plan.begins_s, strict=True)):
        stage, cost, free = at // D, grid.costs[at // D], 0.0
        for (kind, b), begin in zip(order, begins, strict=True):
            if begin < free - 1e-9:
                raise ValueError(f"worker {at % D} of stage {stage} begins {(kind, b)} while it is busy")
            free = ended[kind, stage, b] = begin + (cost.forward_s, cost.input_s, cost.weight_s)[kind]
            last[stage] = max(last[stage], free)
    for at, (order, begins) in enumerate(zip(plan.orders, plan.begins_s, strict=True)):
        for action, begin in zip(order, begins, strict=True):
            if (needed := _needed(grid, at // D, *action)) is None:
                continue
            what, link_s = needed
            if begin < ended[what] + link_s - 1e-9:
                raise ValueError(f"stage {at // D} begins {action} at {begin} s, before {what} has arrived")
    ready = [t + cost.reduce_s for t, cost in zip(last, grid.costs, strict=True)]
    if not grid.staggered:
        return max(ready) + max(cost.optimizer_s for cost in grid.costs)
    return max(
        ready[at // D] + grid.costs[at // D].optimizer_s - begins[0]
        for at, begins in enumerate(plan.begins_s)
        if begins
    )


def _needed(grid: PipelineGrid, stage: int, kind: int, b: int) -> tuple[tuple[int, int, int], float] | None:
    """The action whose result is needed, and how long it takes to arrive."""
    if kind == 0:
        return ((0, stage - 1, b), grid.costs[stage - 1].transfer_s) if stage else None
    if kind == 1 and stage + 1 < grid.stages:
        return (1, stage + 1, b), grid.costs[stage].transfer_s
    return (kind - 1, stage, b), 0.0


def _check_memory(grid: PipelineGrid, stage: int, order: tuple[tuple[int, int], ...]) -> None:
    cost, state, used = grid.costs[stage], dict[int, int](), 0
    for kind, b in order:
        if state.get(b, -1) != kind - 1:
            raise ValueError(f"stage {stage} runs phase {kind} of {b} after phase {state.get(b)}")
        state[b] = kind
        used += cost.activation_bytes if kind == 0 else 0
        if cost.memory_bytes is not None and used > cost.memory_bytes:
            raise ValueError(f"stage {stage} holds {used} bytes, more than {cost.memory_bytes}")
        used -= cost.activation_bytes - cost.kept_bytes if kind == 1 else cost.kept_bytes if kind == 2 else 0
