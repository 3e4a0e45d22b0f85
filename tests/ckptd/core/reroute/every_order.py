"""The fastest schedule of a tiny grid without a staggered optimizer, by trying every order on every worker.

There an action that begins later than it could makes nothing faster, so orders are all that there is to try.
"""

from __future__ import annotations

import math

from ckptd.core.reroute.pipeline_grid import PipelineGrid

__all__ = ["fastest_s"]

Action = tuple[int, int, int]  # phase, stage, micro-batch


def fastest_s(grid: PipelineGrid) -> float:
    """Seconds of an iteration."""
    assert not grid.staggered
    return _Search(grid).run() + max(c.optimizer_s for c in grid.costs)


class _Search:
    def __init__(self, grid: PipelineGrid) -> None:
        self.grid, self.best = grid, math.inf
        self.seen: set[tuple[object, ...]] = set()
        self.ended: dict[Action, float] = {}
        self.runs: dict[tuple[int, int], int] = {}  # stage and micro-batch: the pipeline whose worker runs it
        self.free = {(d, s): 0.0 for s in range(grid.stages) for d in grid.survivors(s)}
        self.used = dict.fromkeys(self.free, 0)

    def run(self) -> float:
        self._go_on()
        return self.best

    def _go_on(self) -> None:
        grid = self.grid
        ready = max(self.free[w] + grid.costs[w[1]].reduce_s for w in self.free)
        if len(self.ended) == 3 * grid.stages * grid.total:
            self.best = min(self.best, ready)
            return
        state = (frozenset(self.ended.items()), frozenset(self.runs.items()))
        if ready >= self.best or self._hopeless() or state in self.seen:
            return
        self.seen.add(state)
        for s in range(grid.stages):
            for b in range(grid.total):
                self._try(s, b)

    def _hopeless(self) -> bool:
        """The survivors of a stage cannot be done in time, even if they share what is left evenly."""
        for s, cost in enumerate(self.grid.costs):
            left = self.grid.total * cost.work_s
            for phase, took in enumerate((cost.forward_s, cost.input_s, cost.weight_s)):
                left -= took * sum((phase, s, b) in self.ended for b in range(self.grid.total))
            free = [self.free[d, s] for d in self.grid.survivors(s)]
            if (sum(free) + left) / len(free) + cost.reduce_s >= self.best:
                return True
        return False

    def _try(self, s: int, b: int) -> None:
        grid, cost = self.grid, self.grid.costs[s]
        phase = next((p for p in range(3) if (p, s, b) not in self.ended), None)
        at = None if phase is None else self._arrival(phase, s, b)
        if phase is None or at is None:
            return
        where = [self.runs[s, b]] if phase else grid.survivors(s)
        change = (cost.activation_bytes, cost.kept_bytes - cost.activation_bytes, -cost.kept_bytes)[phase]
        for d in where:
            if change > 0 and cost.memory_bytes is not None and self.used[d, s] + change > cost.memory_bytes:
                continue
            before = self.free[d, s]
            end = max(before, at) + (cost.forward_s, cost.input_s, cost.weight_s)[phase]
            self.free[d, s] = self.ended[phase, s, b] = end
            self.used[d, s] += change
            self.runs[s, b] = d
            self._go_on()
            self.free[d, s] = before
            self.used[d, s] -= change
            del self.ended[phase, s, b]
            if not phase:
                del self.runs[s, b]

    def _arrival(self, phase: int, s: int, b: int) -> float | None:
        costs = self.grid.costs
        if phase == 0:
            needed, link = (0, s - 1, b), costs[s - 1].transfer_s
            if s == 0:
                return 0.0
        elif phase == 1 and s + 1 < len(costs):
            needed, link = (1, s + 1, b), costs[s].transfer_s
        else:
            needed, link = (phase - 1, s, b), 0.0
        return self.ended[needed] + link if needed in self.ended else None
