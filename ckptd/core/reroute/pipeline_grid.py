"""A grid of pipelines in which workers are missing, and what its stages cost.

D data-parallel pipelines have P stages each, and one *worker* runs one stage of one pipeline. Each pipeline
has M micro-batches in an iteration. All workers of a stage hold the same parameters, so any of them can run
any micro-batch at this stage.

The micro-batch ``m`` of pipeline ``d`` has the number ``d * M + m``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple


class Worker(NamedTuple):
    """Who runs a stage of a pipeline."""

    pipeline: int
    stage: int


@dataclass(frozen=True, slots=True)
class StageCosts:
    """What one micro-batch costs at one stage; durations in seconds, as measured.

    Attributes:
        forward_s: of the forward.
        input_s: of the backward phase that computes gradients of the stage's inputs.
        weight_s: of the backward phase that computes gradients of its parameters.
        optimizer_s: of the optimizer's step.
        transfer_s: from the end of a forward until its result is at the next stage, and from the end of a
            backward there until the gradient is at this one.
        reduce_s: until the workers of the stage have summed up their gradients.
        activation_bytes: what a micro-batch holds from the begin of its forward to the end of its first
            backward phase.
        kept_bytes: what it holds from there to the end of its second backward phase.
        memory_bytes: for both, of each worker; None: enough for every micro-batch.
    """

    forward_s: float
    input_s: float
    weight_s: float
    optimizer_s: float = 0.0
    transfer_s: float = 0.0
    reduce_s: float = 0.0
    activation_bytes: int = 0
    kept_bytes: int = 0
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("forward_s", "input_s", "weight_s", "optimizer_s", "transfer_s", "reduce_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}: pass seconds from 0 on")
        if self.work_s <= 0:
            raise ValueError("a micro-batch takes no time at a stage: measure its durations first")
        if self.kept_bytes < 0 or self.activation_bytes < self.kept_bytes:
            raise ValueError(
                f"activation_bytes {self.activation_bytes} and kept_bytes {self.kept_bytes}: what is "
                "kept for the second backward phase is a part of the activations"
            )
        if self.memory_bytes is not None and self.memory_bytes < self.activation_bytes:
            raise ValueError(
                f"memory_bytes {self.memory_bytes} is less than the {self.activation_bytes} bytes of one "
                "micro-batch: no micro-batch could run"
            )

    @property
    def work_s(self) -> float:
        """Of a worker, for one micro-batch."""
        return self.forward_s + self.input_s + self.weight_s


@dataclass(frozen=True, slots=True)
class PipelineGrid:
    """What is planned for.

    Args:
        pipelines: D, their number.
        costs: of each of the P stages, the same in all pipelines.
        micro_batches: M, of each pipeline in an iteration.
        failed: workers that are not there.
        staggered: each stage makes its optimizer's step, and begins the next iteration, as soon as its own
            gradients are summed up. If not, all wait for all before the optimizer's step, as clipping by
            the norm over all stages must.
    Raises:
        ValueError: a number is not positive, or a failed worker is not in the grid.
    """

    pipelines: int
    costs: tuple[StageCosts, ...]
    micro_batches: int
    failed: frozenset[Worker] = field(default_factory=frozenset)
    staggered: bool = True

    def __post_init__(self) -> None:
        if min(self.pipelines, len(self.costs), self.micro_batches) < 1:
            raise ValueError(
                f"{self.pipelines} pipelines of {len(self.costs)} stages with {self.micro_batches} "
                "micro-batches: each must be at least 1"
            )
        outside = [w for w in self.failed if not (0 <= w[0] < self.pipelines and 0 <= w[1] < self.stages)]
        if outside:
            raise ValueError(
                f"worker {tuple(min(outside))} failed, but the grid has {self.pipelines} pipelines of "
                f"{self.stages} stages, numbered from 0"
            )

    @property
    def stages(self) -> int:
        """P, of each pipeline."""
        return len(self.costs)

    @property
    def total(self) -> int:
        """Micro-batches of all pipelines."""
        return self.pipelines * self.micro_batches

    def survivors(self, stage: int) -> tuple[int, ...]:
        """Pipelines whose worker of this stage is there."""
        return tuple(d for d in range(self.pipelines) if (d, stage) not in self.failed)

    @property
    def whole(self) -> tuple[int, ...]:
        """Pipelines that lost no worker."""
        holed = {d for d, _ in self.failed}
        return tuple(d for d in range(self.pipelines) if d not in holed)

    @property
    def lost_stages(self) -> tuple[int, ...]:
        """Stages without a survivor: nobody has their parameters."""
        return tuple(s for s in range(self.stages) if not self.survivors(s))


def lower_bound_s(grid: PipelineGrid) -> float:
    """Seconds that an iteration takes at the least, whoever runs what in which order.

    With n micro-batches, a worker of a stage needs at least

    - the time of all its forwards and both backward phases;
    - after its first forward the way through all later stages and back, before the first backward can begin;
      and after its last forward the same way, and that micro-batch's backwards;
    - the time for which its activations are in memory, over the number that fit.

    One worker of a stage has at least the mean number of micro-batches of its survivors, rounded up. What an
    earlier stage sends first and gets back last includes all of this at a later stage.

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
