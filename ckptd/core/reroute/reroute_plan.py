"""Who runs which micro-batch of a grid with missing workers, and in which order (SlipStream; pure).

The micro-batches of a missing worker go to the other workers of its stage, evenly. They run there in
bubbles of the schedule, of which there are more because the backward pass has two phases, and because each
stage makes its optimizer's step by itself. All other micro-batches stay where they are, unless changing
that is faster.

`plan_reroute` never returns a plan that is slower than dropping each pipeline with a hole (the others run
its micro-batches from end to end): that is one of its candidates. A stage without a survivor is a case for
recovery.

Source: SlipStream (arXiv:2405.14009), of which the abstract was available: routing to data-parallel peers,
decoupled backward and staggered optimizer. Schedules, bounds and tie-breaking here are our own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from ckptd.core.bubbles import ActionKind
from ckptd.core.reroute.list_scheduling import Order, Policy, Route, Timetable
from ckptd.core.reroute.order_search import ROUNDING, best_of, improve, policies
from ckptd.core.reroute.pipeline_grid import PipelineGrid, Worker, lower_bound_s

_KINDS = (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
SMALL = 250  # actions, until which better orders are looked for: it takes some tenths of a second
LARGE = 20_000  # actions, from which on a policy takes tenths of a second
CHANGES = 800
NEAR = 0.02  # of the bound: what is enough for a large grid


class PlanKind(StrEnum):
    """What survivors do."""

    UNDISTURBED = "undisturbed"
    REROUTE = "reroute"
    DROP = "drop"
    RECOVER = "recover"


@dataclass(frozen=True, slots=True)
class PlannedAction:
    """A computation of a worker.

    Attributes:
        pipeline, micro_batch: whose work it is.
        begins_s: since the begin of the iteration.
    """

    kind: ActionKind
    pipeline: int
    micro_batch: int
    begins_s: float


@dataclass(frozen=True, slots=True)
class ReroutePlan:
    """An iteration of the survivors.

    Attributes:
        route: ``[P][D * M]``, who runs what; empty for a recovery.
        orders: of worker ``s * D + d``; see `actions`.
        iteration_s: predicted; of the staggered optimizer from one iteration's begin to the next one's.
        bound_s: no schedule is faster.
        dropped_s: predicted for dropping each pipeline with a hole; None: no pipeline is whole, or the plan
            is at least as fast as the lower bound of that, so it was not scheduled.
        reason: for logs.
    """

    grid: PipelineGrid
    kind: PlanKind
    reason: str
    route: Route = ()
    orders: tuple[Order, ...] = ()
    begins_s: tuple[tuple[float, ...], ...] = ()
    iteration_s: float = 0.0
    bound_s: float = 0.0
    dropped_s: float | None = None

    def actions(self, worker: tuple[int, int]) -> tuple[PlannedAction, ...]:
        """What a worker (pipeline, stage) runs, in this order; nothing for a missing one."""
        if self.kind is PlanKind.RECOVER:
            return ()
        at, count = worker[1] * self.grid.pipelines + worker[0], self.grid.micro_batches
        return tuple(
            PlannedAction(_KINDS[kind], *divmod(b, count), begins)
            for (kind, b), begins in zip(self.orders[at], self.begins_s[at], strict=True)
        )

    def runs_on(self, pipeline: int, micro_batch: int, stage: int) -> Worker:
        """Who runs a micro-batch at a stage.

        Raises:
            ValueError: the plan is a recovery.
        """
        if self.kind is PlanKind.RECOVER:
            raise ValueError(self.reason)
        return Worker(self.route[stage][pipeline * self.grid.micro_batches + micro_batch], stage)

    def guests(self, worker: tuple[int, int]) -> tuple[tuple[int, int], ...]:
        """Micro-batches (pipeline, number) of other pipelines that a worker runs, by their forwards."""
        forwards = [a for a in self.actions(worker) if a.kind is ActionKind.FORWARD]
        return tuple((a.pipeline, a.micro_batch) for a in forwards if a.pipeline != worker[0])


def plan_reroute(grid: PipelineGrid) -> ReroutePlan:
    """Plan an iteration without the missing workers.

    Takes milliseconds for some thousand actions, and tenths of a second for 200,000.
    """
    if grid.lost_stages:
        lost = ", ".join(map(str, grid.lost_stages))
        return ReroutePlan(
            grid,
            PlanKind.RECOVER,
            f"nobody has the parameters of stage {lost}: all of its {grid.pipelines} workers are lost, so "
            "its state must be recovered from snapshots",
        )
    bound_s = lower_bound_s(grid)
    route, table = _fastest(grid, bound_s)
    kind, dropped_s = PlanKind.REROUTE if grid.failed else PlanKind.UNDISTURBED, None
    if grid.failed and grid.whole:
        dropped_grid = _without_holed(grid)
        dropped_bound_s = lower_bound_s(dropped_grid)
        if table.period_s > dropped_bound_s * (1 + ROUNDING):
            other_route, other = _fastest(dropped_grid, dropped_bound_s)
            dropped_s = other.period_s
            if other.period_s < table.period_s:
                kind, route, table = PlanKind.DROP, other_route, other
    return ReroutePlan(
        grid,
        kind,
        _reason(grid, kind, route, table.period_s, bound_s),
        route,
        table.orders,
        table.begins_s,
        table.period_s,
        bound_s,
        dropped_s,
    )


def drop_pipelines(grid: PipelineGrid) -> ReroutePlan:
    """The plan that drops every pipeline with a hole; the others run all micro-batches.

    Workers of dropped pipelines have no actions, but get the sum of gradients, so they can help again later.

    Raises:
        ValueError: no pipeline is whole.
    """
    if not grid.whole:
        raise ValueError(
            f"each of the {grid.pipelines} pipelines lost a worker: none can be dropped for the others"
        )
    plan = plan_reroute(_without_holed(grid))
    reason = _reason(grid, PlanKind.DROP, plan.route, plan.iteration_s, plan.bound_s)
    return replace(plan, grid=grid, kind=PlanKind.DROP, reason=reason, dropped_s=plan.iteration_s)


def _without_holed(grid: PipelineGrid) -> PipelineGrid:
    gone = set(range(grid.pipelines)) - set(grid.whole)
    return replace(grid, failed=frozenset(Worker(d, s) for d in gone for s in range(grid.stages)))


def _fastest(grid: PipelineGrid, bound_s: float) -> tuple[Route, Timetable]:
    route = _even_route(grid)
    actions = 3 * grid.total * grid.stages
    if actions > LARGE:
        chosen: tuple[Policy, ...] = (Policy(ahead=grid.total), Policy(ahead=grid.stages))
        return route, best_of(grid, route, _sequence(grid, 0.5), chosen, bound_s * (1 + NEAR))
    enough_s = bound_s * (1 + ROUNDING)
    tried = []
    for shift in (0.5, -0.5) if grid.failed else (0.5,):
        sequence = _sequence(grid, shift)
        found = best_of(grid, route, sequence, policies(grid), enough_s)
        if found.period_s <= enough_s:
            return route, found
        tried.append((found.period_s, shift, sequence, found))
    _, _, sequence, best = min(tried, key=lambda each: each[:2])
    return improve(grid, route, sequence, best, bound_s, CHANGES) if actions <= SMALL else (route, best)


def _even_route(grid: PipelineGrid) -> Route:
    """Only what must move moves: in turn to each survivor, in the order of micro-batches."""
    route = []
    for s in range(grid.stages):
        there = grid.survivors(s)
        missing = [d for d in range(grid.pipelines) if d not in set(there)]
        at = [b // grid.micro_batches for b in range(grid.total)]
        moved = [d * grid.micro_batches + m for m in range(grid.micro_batches) for d in missing]
        for number, b in enumerate(moved):
            at[b] = there[number % len(there)]
        route.append(tuple(at))
    return tuple(route)


def _sequence(grid: PipelineGrid, shift: float) -> list[int]:
    """By micro-batch; those of pipelines with a hole by ``shift`` later."""
    count = grid.micro_batches
    later = {d: shift for d, _ in grid.failed}
    return sorted(range(grid.total), key=lambda b: (b % count + later.get(b // count, 0.0), b // count))


def _reason(grid: PipelineGrid, kind: PlanKind, route: Route, iteration_s: float, bound_s: float) -> str:
    moved = sum(at != b // grid.micro_batches for stage in route for b, at in enumerate(stage))
    over = iteration_s / bound_s - 1
    time = f"{iteration_s:.4g} s for an iteration, " + (
        "which no schedule beats" if over <= ROUNDING else f"{100 * over:.1f} % above the lower bound"
    )
    if kind is PlanKind.UNDISTURBED:
        return f"no worker is missing: {time}"
    lost = f"{len(grid.failed)} of {grid.pipelines * grid.stages} workers missing"
    if kind is PlanKind.DROP:
        whole = len(grid.whole)
        return f"{lost}: the {whole} whole pipelines run all micro-batches: {time}"
    few = (
        f"; {grid.micro_batches} micro-batches of each pipeline are fewer than its {grid.stages} stages, "
        "so bubbles do not hold much"
        if grid.micro_batches < grid.stages
        else ""
    )
    return f"{lost}: {moved} micro-batches run at other workers of their stage: {time}{few}"
