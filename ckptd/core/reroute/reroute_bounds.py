"""No schedule of a grid is faster than this: lower bounds of the iteration time (pure).

With n micro-batches, a worker of a stage needs at least

- the time of all its forwards and both backward phases;
- after its first forward the way through all later stages and back, before the first backward can begin;
  and after
  its last forward the same way, and that micro-batch's backwards;
- the time for which its activations are in memory, over the number that fit.

One worker of a stage has at least the mean number of micro-batches of its survivors, rounded up. What an
earlier stage sends first and gets back last includes all of this at a later stage.
"""

from __future__ import annotations

import math

from ckptd.core.reroute.pipeline_grid import PipelineGrid

__all__ = ["lower_bound_s"]


def lower_bound_s(grid: PipelineGrid) -> float:
    """Seconds that an iteration takes at the least, whoever runs what in which order.

    With a staggered optimizer: from one iteration's begin to the next one's, in a steady state.

    Raises:
        ValueError: a stage has no survivor.
    """
    if grid.lost_stages:
        raise ValueError(f"stage {grid.lost_stages[0]} has no survivor")
    costs, stages = grid.costs, range(grid.stages)
    loads = [math.ceil(grid.total / len(grid.survivors(s))) for s in stages]
    there = [0.0]  # from the begin at stage 0 to the arrival at each stage
    back = [0.0]  # from the end of the first backward phase of each stage to that of stage 0
    for cost in costs[:-1]:
        there.append(there[-1] + cost.forward_s + cost.transfer_s)
        back.append(back[-1] + cost.input_s + cost.transfer_s)
    whole_s, inner_s = [], []  # of a worker: until its last second phase, and until its last first phase
    for s, (cost, n) in enumerate(zip(costs, loads, strict=True)):
        beyond_s = sum(c.forward_s + c.input_s for c in costs[s + 1 :])
        beyond_s += 2 * sum(c.transfer_s for c in costs[s:-1])
        held_s = cost.forward_s + beyond_s + cost.input_s
        inner = max(
            n * (cost.forward_s + cost.input_s),
            cost.forward_s + beyond_s + n * cost.input_s,
            n * cost.forward_s + beyond_s + cost.input_s,
        )
        whole = max(n * cost.work_s, inner + cost.weight_s, held_s + n * cost.weight_s)
        whole = max(whole, cost.forward_s + beyond_s + n * (cost.input_s + cost.weight_s))
        if cost.memory_bytes is not None and cost.memory_bytes > 0:
            byte_s = n * (cost.activation_bytes * held_s + cost.kept_bytes * cost.weight_s)
            whole = max(whole, byte_s / cost.memory_bytes)
            inner = max(inner, n * cost.activation_bytes * held_s / cost.memory_bytes)
        whole_s.append(whole)
        inner_s.append(inner)
    found = []
    for s, cost in enumerate(costs):
        after_s = cost.reduce_s + cost.optimizer_s
        begun_s = there[s] if grid.staggered else 0.0
        if not grid.staggered:
            after_s = cost.reduce_s + max(c.optimizer_s for c in costs)
        found.append(there[s] - begun_s + whole_s[s] + after_s)
        found += [
            there[k] - begun_s + inner_s[k] + back[k] - back[s] + cost.weight_s + after_s
            for k in range(s + 1, grid.stages)
        ]
    return max(found)
