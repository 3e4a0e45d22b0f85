"""A grid of pipelines in which workers are missing, and what its stages cost.

D data-parallel pipelines have P stages each, and one *worker* runs one stage of one pipeline. Each pipeline
has M micro-batches in an iteration. All workers of a stage hold the same parameters, so any of them can run
any micro-batch at this stage.

The micro-batch ``m`` of pipeline ``d`` has the number ``d * M + m``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

__all__ = ["PipelineGrid", "StageCosts", "Worker", "grid_of_pipelines"]


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


def grid_of_pipelines(
    costs: Sequence[Sequence[StageCosts]],
    micro_batches: Sequence[int],
    failed: Iterable[tuple[int, int]] = (),
    *,
    staggered: bool = True,
) -> PipelineGrid:
    """A grid out of what each pipeline says of itself.

    Raises:
        ValueError: pipelines differ in stages, costs or micro-batches; or as `PipelineGrid`.
    """
    if not costs or len(micro_batches) != len(costs):
        raise ValueError(f"{len(costs)} pipelines, and {len(micro_batches)} numbers of micro-batches")
    for number, (a, b) in enumerate(pairwise(zip(costs, micro_batches, strict=True))):
        if len(a[0]) != len(b[0]):
            raise ValueError(
                f"pipeline {number} has {len(a[0])} stages, pipeline {number + 1} has {len(b[0])}: work "
                "can be re-routed only among pipelines with the same stages"
            )
        for stage, (mine, other) in enumerate(zip(a[0], b[0], strict=True)):
            if mine != other:
                raise ValueError(
                    f"stage {stage} costs {mine} in pipeline {number} and {other} in pipeline {number + 1}: "
                    "pass the same costs, the largest that were measured"
                )
        if a[1] != b[1]:
            raise ValueError(
                f"pipeline {number} has {a[1]} micro-batches, pipeline {number + 1} has {b[1]}: "
                "all must have as many"
            )
    return PipelineGrid(
        len(costs), tuple(costs[0]), micro_batches[0], frozenset(Worker(*w) for w in failed), staggered
    )
