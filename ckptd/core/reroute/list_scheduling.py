"""Orders of actions by list scheduling: each worker takes the best action that it can begin (pure).

All workers run their micro-batches in one order of the whole grid. So a micro-batch never waits for one
that waits for it, whatever memory there is. A free worker takes, in this order: the first backward phase of
its next micro-batch, its next forward, the second backward phase that is due. A second phase is the only
thing that nobody waits for, so it fills the time in which the others are not possible.

Complexity: O(n log w) for n actions of w workers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from ckptd.core.reroute.pipeline_grid import PipelineGrid

Route = tuple[tuple[int, ...], ...]
"""``[P][D * M]``: the pipeline whose worker runs this micro-batch at this stage."""

Order = tuple[tuple[int, int], ...]
"""The actions of a worker: 0 (forward), 1 (input), 2 (weight), and the micro-batch's number."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How a free worker chooses.

    Attributes:
        ahead: micro-batches of stage s whose first backward phase may be open, beyond the P - s of 1F1B.
        patience: it rather waits than begins a second phase, if something else is to arrive within this
            part of it.
        backlog: second phases that may be due; with more, it begins one before a forward.
        forward_first: it begins a forward before a first backward phase.
    """

    ahead: int = 0
    patience: float = 0.0
    backlog: float = math.inf
    forward_first: bool = False


@dataclass(frozen=True, slots=True)
class Timetable:
    """When what runs.

    Attributes:
        orders: of each worker, by number ``s * D + d``; empty for those that are not there.
        begins_s: of each action in ``orders``.
        period_s: of an iteration.
    """

    orders: tuple[Order, ...]
    begins_s: tuple[tuple[float, ...], ...]
    period_s: float


def list_schedule(grid: PipelineGrid, route: Route, sequence: Sequence[int], policy: Policy) -> Timetable:
    """Schedule an iteration.

    Args:
        sequence: all micro-batches, in the order in which each worker runs those that it has.
    """
    D, P, total = grid.pipelines, grid.stages, grid.total
    workers = range(D * P)
    queue = _queues(grid, route, sequence)
    costs = grid.costs
    forward_t, input_t, weight_t = (
        [c.forward_s for c in costs], [c.input_s for c in costs], [c.weight_s for c in costs]
    )  # fmt: skip
    link = [c.transfer_s for c in costs]
    act, kept = [c.activation_bytes for c in costs], [c.kept_bytes for c in costs]
    memory = [math.inf if c.memory_bytes is None else float(c.memory_bytes) for c in costs]
    ahead = [max(1, P - s + policy.ahead) for s in range(P)]
    never = math.inf
    arrived_f = [[0.0 if s == 0 else never] * total for s in range(P)]
    arrived_i = [[never] * total for _ in range(P)]
    nf, ni, nw = [0] * len(workers), [0] * len(workers), [0] * len(workers)
    orders: list[list[tuple[int, int]]] = [[] for _ in workers]
    begins: list[list[float]] = [[] for _ in workers]
    free = [0.0] * len(workers)
    idle = [False] * len(workers)
    events = [(0.0, w) for w in workers if queue[w]]
    backlog, forward_first, patience = policy.backlog, policy.forward_first, policy.patience
    while events:
        now, w = heappop(events)
        if now < free[w]:
            continue
        s, q = w // D, queue[w]
        f, i, k, n = nf[w], ni[w], nw[w], len(q)
        at_i = arrived_i[s][q[i]] if i < f else never
        can_f = (
            f < n
            and f - i < ahead[s]
            and i - k <= backlog
            and (f - i + 1) * act[s] + (i - k) * kept[s] <= memory[s]
        )
        at_f = arrived_f[s][q[f]] if can_f else never
        if at_i <= now and not (forward_first and at_f <= now):
            b, kind, end = q[i], 1, now + input_t[s]
            ni[w] = i + 1
            if s:
                at = end + link[s - 1]
                arrived_i[s - 1][b] = at
                other = (s - 1) * D + route[s - 1][b]
                if idle[other]:
                    heappush(events, (at, other))
        elif at_f <= now:
            b, kind, end = q[f], 0, now + forward_t[s]
            nf[w] = f + 1
            if s + 1 < P:
                at = end + link[s]
                arrived_f[s + 1][b] = at
                other = (s + 1) * D + route[s + 1][b]
                if idle[other]:
                    heappush(events, (at, other))
            else:
                arrived_i[s][b] = end
        else:
            soon = min(at_i, at_f)
            if k < i and not (patience and soon < now + patience * weight_t[s]):
                b, kind, end = q[k], 2, now + weight_t[s]
                nw[w] = k + 1
            else:
                idle[w] = True
                if soon < never:
                    heappush(events, (soon, w))
                continue
        idle[w] = False
        orders[w].append((kind, b))
        begins[w].append(now)
        free[w] = end
        if nw[w] < n:
            heappush(events, (end, w))
    assert all(nw[w] == len(queue[w]) for w in workers), "micro-batches wait for each other"
    return Timetable(tuple(map(tuple, orders)), tuple(map(tuple, begins)), _period_s(grid, begins, free))


def _queues(grid: PipelineGrid, route: Route, sequence: Sequence[int]) -> list[list[int]]:
    """The micro-batches of each worker, in its order."""
    queue: list[list[int]] = [[] for _ in range(grid.pipelines * grid.stages)]
    for s, at in enumerate(route):
        for b in sequence:
            queue[s * grid.pipelines + at[b]].append(b)
    return queue


def _period_s(grid: PipelineGrid, begins: list[list[float]], free: list[float]) -> float:
    """From the begin of an iteration to the begin of the next."""
    D = grid.pipelines
    spans = []
    for s, cost in enumerate(grid.costs):
        there = [w for w in range(s * D, s * D + D) if begins[w]]
        begun = min(begins[w][0] for w in there) if grid.staggered else 0.0
        spans.append(max(free[w] for w in there) + cost.reduce_s - begun)
    if grid.staggered:
        return max(span + cost.optimizer_s for span, cost in zip(spans, grid.costs, strict=True))
    return max(spans) + max(cost.optimizer_s for cost in grid.costs)
