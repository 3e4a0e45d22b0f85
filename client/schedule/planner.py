"""Makes this rank's plans: from the user's options, what was measured in the first steps, and what
the ranks agreed on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ckptd.client import values
from ckptd.client.daemon_link.rank_memory import MemoryNeed, RankMemory
from ckptd.client.log_lines import get_logger
from ckptd.client.model.live_state import LiveState, local
from ckptd.client.model.operators import Operator
from ckptd.client.model.precision import PrecisionProbe
from ckptd.client.model.replicated_params import ReplicatedParams
from ckptd.client.options import SnapshotOptions
from ckptd.client.schedule.expert_popularity import TokenCounter
from ckptd.client.schedule.planning import (
    MAX_WINDOW,
    PlanInputs,
    TrainingSpeed,
    make_plan,
    most_pieces,
    plan_together,
)
from ckptd.client.schedule.snapshot_plan import SnapshotPlan, fixed_bytes, operator_costs
from ckptd.client.schedule.step_timing import StepTiming
from ckptd.client.stats import Stats
from ckptd.core.schedule import Ordering
from ckptd.cuda.engine import CopyEngine, measure_bandwidth

__all__ = ["Planner", "RankContext", "needed_memory", "note_prepared", "own_share_bytes"]

logger = get_logger(__name__)

_MIN_SCALARS = 64 << 10
# What one rank has sealed the others hear of a little later: slots for the meantime, where no peers
# ask for some anyway.
_RANKS_SLACK = 2
_NUMBER_BYTES = 5  # msgpack's longest for an operator's number


@dataclass(frozen=True, slots=True)
class RankContext:
    """What the snapshots of one rank are planned and taken with: what is trained, where snapshots go,
    and what watches the steps.

    Attributes:
        operators: as they are found in the model; a plan may cut them.
        counter, precision: measure the forwards: how popular experts are, which dtypes suffice.
        sharing: what several ranks have alike and one of them captures.
    """

    binding: LiveState
    operators: Sequence[Operator]
    memory: RankMemory
    engine: CopyEngine
    options: SnapshotOptions
    stats: Stats
    counter: TokenCounter
    precision: PrecisionProbe
    sharing: ReplicatedParams

    @property
    def alone(self) -> bool:
        """Whether this rank is the only one."""
        return self.memory.identity.world_size == 1


class Planner:
    """Makes plans, and asks for nothing.

    Args:
        scalars_sample: step scalars of the size that they will have.

    Attributes:
        policy: that of the next plan.
        sharing: what is captured once; as it was told in an earlier life, where plans of that life
            are gone on with.
        limits: bytes per step and bytes of memory, as several ranks agreed on them before their
            first plan; None: as measured here.
    """

    def __init__(
        self,
        context: RankContext,
        pace: StepTiming,
        scalars_sample: Callable[[], dict[str, Any]],
    ) -> None:
        self._binding, self._operators = context.binding, list(context.operators)
        self._memory, self._alone = context.memory, context.alone
        self._stats, self._options = context.stats, context.options
        self._counter, self._precision = context.counter, context.precision
        self._pace, self._scalars_sample = pace, scalars_sample
        self.policy: str = context.options.policy
        self.sharing = context.sharing
        self.limits: tuple[int, int] | None = None

    @property
    def dense(self) -> bool:
        """Whether the next plan is one of dense snapshots."""
        return self.policy == "dense"

    def speed(self) -> TrainingSpeed:
        """Medians of what was measured so far."""
        tensors = [local(p) for p in self._binding.params.values()]
        return TrainingSpeed(
            copy_window_s=self._pace.copy_window_s,
            iteration_s=self._pace.iteration_s,
            bandwidth=measure_bandwidth(tensors),
        )

    def measured(self) -> tuple[int, int, int]:
        """What this rank can copy per step and the memory that it can have, in bytes; and how many
        operators it has.
        """
        budget, available = self._measured_budget(), self._memory.session.available_bytes
        return budget, available, len(self._operators)

    def make(
        self, before: SnapshotPlan | None, *, window: int | None = None, policy: str = ""
    ) -> SnapshotPlan:
        """A plan.

        Args:
            before: the one that is in use.
            window: as the user wants it, if not given.
            policy: of this plan only.
        Raises:
            ValueError: there can be none.
        """
        started = time.perf_counter()
        options = self._options
        budget, available = self._limits(before)
        inputs = PlanInputs(
            policy=policy or self.policy,
            window=None if "dense" in (policy, self.policy) else window or options.window,
            every=options.every,
            budget_bytes=budget,
            available_bytes=available,
            # Each rank counts its own tokens, and all must have one order.
            popularity=self._counter.popularity(self._operators) if self._alone else None,
            ordering=Ordering(options.ordering),
            compute_dtypes=self._precision.sufficient(),
            identity=self._memory.identity.metadata(),
            scalars_capacity=self._scalars_capacity(),
            slack=max(self._memory.slack, 0 if self._alone else _RANKS_SLACK),
            sharing=self.sharing,
            before=before,
        )
        plan = make_plan(self._binding, self._operators, inputs)
        if self._memory.persists:
            plan.make_room_for_uploads(available)
        logger.info(
            "window W=%d, %d slots of %.1f MiB (dense %.1f MiB); %.1f MiB may be copied per step; %s",
            plan.schedule.window,
            plan.num_slots,
            plan.slot_bytes / 2**20,
            plan.schedule.dense_bytes / 2**20,
            budget / 2**20,
            plan.schedule.reason,
        )
        note_prepared(self._pace, self._stats, started)
        return plan

    def make_common(self, plan: SnapshotPlan, orders: Sequence[Sequence[Sequence[int]]]) -> SnapshotPlan:
        """A plan by the schedule of another one, for what this rank has to capture now.

        Args:
            orders: other schedules that its slots must be large enough for.
        """
        alike = plan_together(plan, self._binding, self._scalars_capacity(), orders, self.sharing)
        if self._memory.persists:
            alike.make_room_for_uploads(self._memory.session.available_bytes)
        return alike

    def _limits(self, before: SnapshotPlan | None) -> tuple[int, int]:
        """The most that may be copied per step, and the memory that there is."""
        available = self._memory.session.available_bytes
        budget: int | None = None
        if self.limits is not None:
            budget = self.limits[0]
            available = available if before is not None else min(available, self.limits[1])
        elif before is not None and not self._alone:
            budget = before.budget_bytes  # agreed on in an earlier life
        return self._measured_budget() if budget is None else budget, available

    def _measured_budget(self) -> int:
        on_cpu = all(local(p).device.type == "cpu" for p in self._binding.params.values())
        return self.speed().budget_bytes(self._options.max_overhead if on_cpu else None)

    def _scalars_capacity(self) -> int:
        """Room for step scalars. Each operator's number is in them, of what is shared that of each piece."""
        packed = len(values.pack(self._scalars_sample(), "step scalars"))
        pieces = most_pieces(self.sharing, self._operators)
        return max(_MIN_SCALARS, 2 * packed + _NUMBER_BYTES * pieces)


def note_prepared(pace: StepTiming, stats: Stats, started_s: float) -> None:
    """Planning or reserving began then (by the performance counter) and is over: it is no part of a
    step's usual length.
    """
    took = time.perf_counter() - started_s
    pace.prepared(took)
    stats.prepare_ms += took * 1e3


def needed_memory(
    binding: LiveState,
    operators: Sequence[Operator],
    options: SnapshotOptions,
    sharing: ReplicatedParams,
) -> MemoryNeed:
    """The least memory with which this rank can be protected, for the daemon to check at the
    attach, and how it comes about.
    """
    costs = sharing.mean_costs(operators, operator_costs(binding, operators, {}))
    anchor, compute = sum(c.anchor_bytes for c in costs), sum(c.compute_bytes for c in costs)
    windows = [1] if options.dense else [options.window or 0]
    if windows == [0]:
        windows = list(range(1, MAX_WINDOW + 1))
    sizes = {w: (w + 2) * (compute + (anchor - compute) // w + _MIN_SCALARS) for w in windows}
    best = min(sizes, key=lambda w: sizes[w])
    text = f"{best + 2} slots of {sizes[best] // (best + 2)} bytes for a window of {best}"
    return MemoryNeed(sizes[best], text)


def own_share_bytes(
    sharing: ReplicatedParams,
    operators: Sequence[Operator],
    binding: LiveState,
    options: SnapshotOptions,
) -> int:
    """What every snapshot of this rank takes beside what it has in common with others."""
    shared = {i for indices in sharing.groups(operators).values() for i in indices}
    costs = operator_costs(binding, operators, {})
    return fixed_bytes(binding, 0) + sum(
        cost.anchor_bytes if options.dense else cost.compute_bytes
        for i, cost in enumerate(costs)
        if i not in shared
    )
