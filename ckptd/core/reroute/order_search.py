"""Better orders for small grids: routes and sequences that differ a little from the best so far (pure).

List scheduling with one sequence for all workers misses the bound on some small grids. A change is a
micro-batch that moves within the sequence, one that another worker of a stage runs, or two that change
places. A change that is not worse is kept. The draws are the same in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckptd.core.reroute.list_scheduling import Policy, Route, Timetable, list_schedule
from ckptd.core.reroute.pipeline_grid import PipelineGrid

ROUNDING = 1e-9  # of a bound: what sums of durations may be off


def policies(grid: PipelineGrid) -> tuple[Policy, ...]:
    """What is tried, from least memory to most."""
    far = grid.stages
    return (
        Policy(backlog=0),
        Policy(),
        Policy(ahead=1),
        Policy(ahead=far),
        Policy(ahead=grid.total),
        Policy(patience=0.6),
        Policy(ahead=far, patience=0.6),
        Policy(ahead=1, patience=1.0),
        Policy(ahead=grid.total, forward_first=True),
    )


def best_of(
    grid: PipelineGrid, route: Route, sequence: Sequence[int], chosen: Sequence[Policy], enough_s: float
) -> Timetable:
    """The fastest of some policies; the first that takes at most ``enough_s``."""
    best: Timetable | None = None
    for policy in chosen:
        found = list_schedule(grid, route, sequence, policy)
        if best is None or found.period_s < best.period_s:
            best = found
        if best.period_s <= enough_s:
            break
    assert best is not None
    return best


def improve(
    grid: PipelineGrid, route: Route, sequence: Sequence[int], found: Timetable, bound_s: float, changes: int
) -> tuple[Route, Timetable]:
    """Try so many changes, or until the bound is reached."""
    enough_s = bound_s * (1 + ROUNDING)
    draw, few = _draws(), (Policy(), Policy(ahead=grid.total))
    best = (route, found)
    current_s, order = found.period_s, list(sequence)
    for _ in range(changes):
        if best[1].period_s <= enough_s:
            break
        changed, moved = [list(at) for at in route], list(order)
        if draw(2):
            a, b = draw(grid.total), draw(grid.total)
            if draw(2):
                moved[a], moved[b] = moved[b], moved[a]
            else:
                moved.insert(b, moved.pop(a))
        else:
            s = draw(grid.stages)
            at, there = changed[s], grid.survivors(s)
            a, b = draw(grid.total), draw(grid.total)
            if draw(2):
                at[a] = there[draw(len(there))]
            else:
                at[a], at[b] = at[b], at[a]
        tried = tuple(map(tuple, changed))
        timetable = best_of(grid, tried, moved, few, enough_s)
        if timetable.period_s <= current_s:
            route, order, current_s = tried, moved, timetable.period_s
        if timetable.period_s < best[1].period_s:
            best = (tried, timetable)
    return best


def _draws() -> Callable[[int], int]:
    """Numbers below what is asked for, the same in every call: Knuth's linear congruential generator."""
    state = 0

    def draw(below: int) -> int:
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (state >> 33) % below

    return draw
