"""Makes snapshot plans from the model, the user's options, measured speeds, and what ranks agreed on.

A plan (`ckptd.client.schedule.snapshot_plan`) is a schedule, a segment geometry, and one static copy
plan per phase. The window is the smallest whose largest snapshot can be copied between the top of the
loop and the optimizer's step (MoEvement Algorithm 1, corrected: bytes, not operator counts; the time
until the optimizer's step, not the iteration), and whose ring fits the memory that the daemon grants.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ckptd.client import values
from ckptd.client.daemon_link.rank_memory import MemoryNeed, RankMemory
from ckptd.client.log_lines import get_logger
from ckptd.client.model.live_state import LiveState, local
from ckptd.client.model.operators import Operator, ParameterRows, split_operator
from ckptd.client.model.replicated_params import EVERY_RANK, NOTHING_SHARED, ReplicatedParams
from ckptd.client.model.snapshot_layout import computable, member_bytes
from ckptd.client.options import MAX_WINDOW, SnapshotOptions
from ckptd.client.schedule.measurements import PrecisionProbe, StepTiming, TokenCounter
from ckptd.client.schedule.partial_schedule import PartialTurns, parts_of_experts, scope_of
from ckptd.client.schedule.snapshot_plan import SnapshotPlan, fixed_bytes, operator_costs, schedule_of
from ckptd.client.stats import Stats
from ckptd.core.schedule import (
    HEADROOM_ESTIMATED,
    HEADROOM_MEASURED,
    Ordering,
    least_loss_window,
    max_piece_bytes,
    order_operators,
    plan_aligned,
    plan_schedule,
    worthwhile_window,
)
from ckptd.core.snapshot_policy import Level, OperatorCost, PartialScope, Schedule
from ckptd.core.window_control import Shortage
from ckptd.cuda.engine import CopyEngine, measure_bandwidth
from ckptd.units import format_bytes

logger = get_logger(__name__)

# Shared operators are cut until each rank's share has this many pieces, so that shares come out
# equal; but into no more than _MAX_PIECES altogether (each is named in every step's scalars), and
# into none smaller than _MIN_PIECE_BYTES. The window does not matter: owners outlive its changes.
_PIECES_PER_SHARE = 32
_MAX_PIECES = 4096
_MIN_PIECE_BYTES = 16 << 10
_MIN_SCALARS = 64 << 10
# Other ranks learn a little later what one rank has sealed: slots for the meantime, where no peers
# ask for some anyway.
_RANKS_SLACK = 2
_NUMBER_BYTES = 5  # msgpack's longest for an operator's number


@dataclass(frozen=True, slots=True)
class TrainingSpeed:
    """Measured: seconds from the loop's top to the optimizer's step and per iteration, bytes per second."""

    copy_window_s: float
    iteration_s: float
    bandwidth: float

    def budget_bytes(self, max_overhead: float | None) -> int:
        """Bytes that may be copied per step.

        Args:
            max_overhead: the largest share of an iteration, for copies on the trainer's own cores.
        """
        seconds = self.copy_window_s
        if max_overhead is not None:
            seconds = min(seconds, max_overhead * self.iteration_s)
        return int(seconds * self.bandwidth)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """Everything besides the model that determines a plan.

    Attributes:
        window: None: the smallest that fits.
        every: iterations between two snapshots.
        budget_bytes: the most that may be copied per step; None: no limit.
        iteration_s: of an iteration without snapshots, if larger ones were measured to cost time; else 0.
        available_bytes: memory for the ring; None: no limit.
        popularity: of each operator; None: all are equally popular.
        slack: slots beyond what one node needs.
        sharing: what several ranks hold and one of them captures.
        before: the plan that this one follows. Other ranks may adopt theirs at another iteration,
            or not at all. So owners (and, with the same window, phases) stay, and if operators are
            cut otherwise than before, every rank captures all of them.
        turns: of partial snapshots; None for other policies.
    """

    policy: str
    window: int | None
    every: int
    budget_bytes: int | None
    available_bytes: int | None
    popularity: Sequence[float] | None
    ordering: Ordering
    compute_dtypes: dict[str, torch.dtype]
    identity: dict[str, str]
    scalars_capacity: int
    slack: int = 0
    sharing: ReplicatedParams = NOTHING_SHARED
    before: SnapshotPlan | None = None
    iteration_s: float = 0.0
    turns: PartialTurns | None = None
    gradients: bool = False

    @property
    def scope(self) -> PartialScope | None:
        """What partial snapshots hold of selected experts only; None for other policies."""
        return None if self.turns is None else PartialScope(self.turns.options.scope)

    @property
    def tight(self) -> PlanInputs:
        """With a budget that leaves room for rates that vary; what fits it is chosen first."""
        if self.budget_bytes is None:
            return self
        headroom = HEADROOM_MEASURED if self.iteration_s else HEADROOM_ESTIMATED
        return replace(self, budget_bytes=int(headroom * self.budget_bytes))

    def window_where_none_fits(self, costs: Sequence[OperatorCost], fixed: int) -> int:
        """The window whose snapshots exceed the budget at a reasonable price."""
        if not self.iteration_s or self.budget_bytes is None:
            return worthwhile_window(costs, fixed, MAX_WINDOW)
        return least_loss_window(
            costs, fixed, MAX_WINDOW, affordable_bytes=self.budget_bytes, iteration_s=self.iteration_s
        )


def make_plan(binding: LiveState, operators: Sequence[Operator], inputs: PlanInputs) -> SnapshotPlan:
    """Plan the smallest window that fits the budget and the memory; the schedule's reason says what decided.

    Raises:
        ValueError: no window's ring fits ``available_bytes``; the message has the numbers.
    """
    fixed = fixed_bytes(binding, inputs.scalars_capacity)
    whole = operator_costs(binding, operators, inputs.compute_dtypes, inputs.scope)
    worthwhile = inputs.window_where_none_fits(inputs.sharing.mean_costs(operators, whole), fixed)
    wanted = 1 if inputs.policy == "dense" else inputs.window
    tried = []
    candidates = [wanted] if wanted is not None else [None, *range(2, MAX_WINDOW + 1)]
    while candidates:
        candidate = candidates.pop(0)
        plan = _plan_once(binding, operators, inputs.tight if candidate is None else inputs, candidate)
        if candidate is None and not plan.schedule.fits:
            plan = _plan_once(binding, operators, inputs, None)
        if candidate is None and not plan.schedule.fits and plan.schedule.window > worthwhile:
            # The largest was planned: most of its length saves next to nothing and lengthens recovery.
            logger.info("%s; window %d is used", plan.schedule.reason, worthwhile)
            candidates.insert(0, worthwhile)
            continue
        needed = plan.slot_bytes * plan.num_slots
        if inputs.available_bytes is None or needed <= inputs.available_bytes:
            return plan
        tried.append(f"W={plan.schedule.window}: {plan.num_slots} slots of {plan.slot_bytes} bytes")
        if wanted is None and plan.schedule.window >= len(operators):
            break
    raise ValueError(
        f"no ring fits the {inputs.available_bytes} bytes that the daemon has left "
        f"({'; '.join(tried[:4])}); raise CKPTD_MEMORY or `ckptctl forget` old runs"
    )


def _plan_once(
    binding: LiveState, operators: Sequence[Operator], inputs: PlanInputs, window: int | None
) -> SnapshotPlan:
    compute_dtypes, sharing, before = inputs.compute_dtypes, inputs.sharing, inputs.before
    scope = inputs.scope
    fixed = fixed_bytes(binding, inputs.scalars_capacity)
    popularity = inputs.popularity or [0.0] * len(operators)

    selects = inputs.turns is not None and inputs.turns.selects

    def scheduled(parts: Sequence[Operator], popular: Sequence[float]) -> tuple[list[OperatorCost], Schedule]:
        costs = sharing.mean_costs(parts, operator_costs(binding, parts, compute_dtypes, scope))
        if inputs.turns is not None:
            return costs, inputs.turns.schedule(
                parts,
                costs,
                fixed_bytes=fixed,
                budget_bytes=inputs.budget_bytes,
                window=window,
                whole=sharing.experts(parts) if selects else (),
            )
        aligned = inputs.policy == "aligned"
        planner = plan_aligned if aligned else plan_schedule
        return costs, planner(
            costs,
            budget_bytes=inputs.budget_bytes,
            fixed_bytes=fixed,
            order=order_operators(costs, popular, inputs.ordering, dense_last=aligned),
            max_window=MAX_WINDOW,
            window=window,
        )

    parts = list(operators)
    costs, schedule = scheduled(parts, popularity)
    limit = None  # the parts of an expert would be of different iterations
    if scope is None:
        limit = max_piece_bytes(costs, _split_window(costs, schedule, fixed, inputs.budget_bytes), fixed)
    if (limit is not None and schedule.window > 1) or sharing.replicas:
        alone = limit if schedule.window > 1 else None
        parts = _split(binding, parts, alone, compute_dtypes, sharing)
        if len(parts) != len(operators):
            known = {op.name: p for op, p in zip(operators, popularity, strict=True)}
            costs, schedule = scheduled(parts, [known.get(part.name, 0.0) for part in parts])
    if before is not None and before.shares and _only_costs_differ(before, parts, schedule, inputs.policy):
        # Only this rank may have found the cause (state of its own experts): what other ranks
        # anchor with it stays in its phases.
        schedule = schedule_of(costs, before.schedule.phases, fixed, inputs.policy)
        selects = False
    plan = SnapshotPlan(
        parts,
        costs,
        schedule,
        inputs.policy,
        compute_dtypes,
        inputs.identity,
        inputs.scalars_capacity,
        inputs.every,
        slack=inputs.slack,
        budget_bytes=inputs.budget_bytes,
        scope=scope,
        with_gradients=inputs.gradients,
    )
    if before is None:
        whole = operator_costs(binding, parts, compute_dtypes, scope)
        partial = inputs.turns is not None
        plan.owners = sharing.owners(parts, whole, schedule.phases, partial=partial)
    else:
        plan.owners = _owners_as_before(before, parts)
    if inputs.turns is not None:
        plan.selection = inputs.turns.selection
        if selects:
            shared = [experts for _, experts in sharing.experts(parts)]
            plan.schedule = inputs.turns.of_owners(schedule, plan.owners, shared)
        plan.selectable = inputs.turns.selectable(parts, plan.owners, parts_of_experts(binding, parts))
    plan.measure_slots(binding)
    return plan


def _only_costs_differ(
    before: SnapshotPlan, operators: Sequence[Operator], schedule: Schedule, policy: str
) -> bool:
    same = [(op.name, op.members) for op in before.operators] == [(op.name, op.members) for op in operators]
    return same and policy == before.policy_name and schedule.window == before.schedule.window


def _owners_as_before(before: SnapshotPlan, operators: Sequence[Operator]) -> list[int]:
    """The same owners; none (every rank captures) if a shared operator is cut otherwise now."""
    pairs = zip(before.operators, before.owners, strict=False)
    owner_of = {(op.name, op.members): owner for op, owner in pairs if owner != EVERY_RANK}
    owners = [owner_of.pop((op.name, op.members), EVERY_RANK) for op in operators]
    return [] if owner_of else owners


def _split_window(
    costs: Sequence[OperatorCost], schedule: Schedule, fixed: int, budget_bytes: int | None
) -> int:
    """The window for which large operators are split; if none fits, the smallest for evenly cut ones."""
    if schedule.fits or budget_bytes is None:
        return schedule.window
    floor = fixed + sum(c.compute_bytes for c in costs)
    extra = sum(c.anchor_bytes - c.compute_bytes for c in costs)
    if budget_bytes <= floor:
        return schedule.window
    return min(MAX_WINDOW, max(schedule.window, -(-extra // (budget_bytes - floor))))


def most_pieces(sharing: ReplicatedParams, operators: Sequence[Operator]) -> int:
    """The most operators that cutting the shared ones adds."""
    return sum(_pieces_of(len(group.ranks)) for group in sharing.groups(operators))


def _pieces_of(num_ranks: int) -> int:
    return min(num_ranks * _PIECES_PER_SHARE, _MAX_PIECES)


def _split(
    binding: LiveState,
    operators: Sequence[Operator],
    limit: int | None,
    compute_dtypes: Mapping[str, torch.dtype],
    sharing: ReplicatedParams,
) -> list[Operator]:
    """Cut operators larger than ``limit``, and shared ones into pieces that spread evenly over ranks."""
    shapes = {name: tuple(local(p).shape) for name, p in binding.params.items()}

    def anchored(member: ParameterRows) -> int:
        return member_bytes(binding, member, compute_dtypes, Level.ANCHOR)

    def stored(member: ParameterRows) -> int:
        # Not the bytes of an anchor: all ranks must cut in the same places, also a rank that has
        # not seen yet everything that its optimizer keeps.
        param = local(binding.params[member.param])
        start, stop = member.range(binding.num_rows(member.param))
        return param.numel() * param.element_size() * (stop - start) // max(binding.num_rows(member.param), 1)

    shared: dict[int, int] = {}
    for group, indices in sharing.groups(operators).items():
        total = sum(stored(m) for i in indices for m in operators[i].members)
        even = total // _pieces_of(len(group.ranks))
        shared.update(dict.fromkeys(indices, max(even, _MIN_PIECE_BYTES)))
    found: list[Operator] = []
    for i, op in enumerate(operators):
        bytes_of, most = (stored, shared[i]) if i in shared else (anchored, limit)
        if most is None:
            found.append(op)
        else:
            found += split_operator(op, shapes, bytes_of, most, binding.rows_allowed)
    return found


def plan_together(
    plan: SnapshotPlan,
    binding: LiveState,
    scalars_capacity: int,
    coming: Sequence[Sequence[Sequence[int]]],
    sharing: ReplicatedParams = NOTHING_SHARED,
) -> SnapshotPlan:
    """The same schedule for state that has grown; one of several ranks may change this by itself.

    Args:
        coming: phases that the ranks have agreed to adopt later; slots have room for them, too.
    """
    whole = operator_costs(binding, plan.operators, plan.compute_dtypes, plan.scope)
    costs = sharing.mean_costs(plan.operators, whole)
    fixed = fixed_bytes(binding, scalars_capacity)
    now, *later = (
        schedule_of(costs, phases, fixed, plan.policy_name) for phases in (plan.schedule.phases, *coming)
    )
    found = replace(
        plan,
        costs=costs,
        schedule=now,
        scalars_capacity=scalars_capacity,
        upload_slots=0,
        _policy=None,
        _phases={},
        _state=None,
    )
    found.measure_slots(binding)
    growth = max(schedule.peak_bytes for schedule in (now, *later)) - now.peak_bytes
    found.slot_bytes += -(-growth // 4096) * 4096
    return found


# -- of one rank -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankContext:
    """What one rank plans and takes its snapshots with.

    Attributes:
        operators: as found in the model; a plan may cut them.
        sharing: what several ranks hold and one of them captures.
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
        """True if this rank is the only one."""
        return self.memory.identity.world_size == 1


class Planner:
    """Makes plans; reserves nothing.

    Args:
        scalars_sample: returns step scalars of the expected size.

    Attributes:
        policy: that of the next plan.
        turns: of partial snapshots; None for other policies.
        sharing: what one of several ranks captures; after a restore, as recorded.
        limits: bytes per step and bytes of memory that several ranks agreed on before their first
            plan; None: as measured here.
    """

    def __init__(
        self,
        context: RankContext,
        pace: StepTiming,
        scalars_sample: Callable[[], dict[str, Any]],
    ) -> None:
        self._context, self._pace, self._scalars_sample = context, pace, scalars_sample
        self._binding, self._operators = context.binding, list(context.operators)
        self.policy: str = context.options.planned
        identity = context.memory.identity
        self.turns = PartialTurns.of(
            context.options, self._operators, identity.rank, identity.world_size, context.sharing
        )
        self.sharing = context.sharing
        self.limits: tuple[int, int] | None = None
        self._bandwidth: float | None = None  # measured once: that takes the training thread some time
        self._told_turns = False

    @property
    def dense(self) -> bool:
        """True if the next plan takes dense snapshots."""
        return self.policy == "dense"

    @property
    def lossy(self) -> bool:
        """True if the next plan takes partial snapshots."""
        return self.policy == "partial"

    @property
    def window(self) -> int | None:
        """The user's window; None: the smallest that fits."""
        return self._context.options.window or (None if self.turns is None else self.turns.window)

    def measured(self) -> tuple[int, int, int]:
        """Bytes that this rank can copy per step, bytes of memory for it, its number of operators."""
        available = self._context.memory.session.available_bytes
        return self._measured_budget(), available, len(self._operators)

    def make(
        self,
        before: SnapshotPlan | None,
        *,
        window: int | None = None,
        policy: str = "",
        shortage: Shortage | None = None,
    ) -> SnapshotPlan:
        """A plan.

        Args:
            before: the plan in use.
            window: None: the user's.
            policy: of this plan only.
            shortage: what snapshots of the plan in use were measured to cost.
        Raises:
            ValueError: no plan is possible.
        """
        started = time.perf_counter()
        context, options = self._context, self._context.options
        if (policy or self.policy) == "partial" and self.turns is None:
            raise ValueError("this rank's script does not ask for partial snapshots")
        budget, available = self._limits(before)
        if shortage is not None:
            budget = shortage.affordable_bytes
        inputs = PlanInputs(
            policy=policy or self.policy,
            window=None if "dense" in (policy, self.policy) else window or self.window,
            every=self._every(before, policy or self.policy),
            budget_bytes=budget,
            available_bytes=available,
            # Each rank counts its own tokens, and all must have one order.
            popularity=context.counter.popularity(self._operators) if context.alone else None,
            ordering=Ordering(options.ordering),
            compute_dtypes=context.precision.sufficient(),
            identity=context.memory.identity.metadata(),
            scalars_capacity=self._scalars_capacity(),
            slack=max(context.memory.slack, 0 if context.alone else _RANKS_SLACK),
            sharing=self.sharing,
            before=before,
            iteration_s=0.0 if shortage is None else shortage.iteration_s,
            turns=self.turns if (policy or self.policy) == "partial" else None,
            gradients=options.to_peers == "gradients",
        )
        plan = make_plan(self._binding, self._operators, inputs)
        plan.asked = options.asked
        if context.memory.persists:
            plan.make_room_for_uploads(available)
        logger.info(
            "window W=%d, %d slots of %.1f MiB (dense %.1f MiB); %.1f MiB may be copied per step; %s",
            plan.schedule.window,
            plan.num_slots,
            plan.slot_bytes / 2**20,
            plan.schedule.dense_bytes / 2**20,
            budget / 2**20,
            "; ".join(filter(None, (plan.schedule.reason, plan.selection_text))),
        )
        if plan.selection_text and not plan.selectable and not self._told_turns:
            self._told_turns = True
            logger.warning("policy=%r: %s", options.asked, plan.selection_text)
        note_prepared(self._pace, context.stats, started)
        return plan

    def _every(self, before: SnapshotPlan | None, policy: str) -> int:
        """The interval in use stays, unless it is that of another policy. By a rule: what copies need."""
        if before is not None and before.policy_name == policy:
            return before.every
        options = self._context.options
        if options.interval_rule is None:
            return options.first_every
        costs = self.sharing.mean_costs(self._operators, operator_costs(self._binding, self._operators, {}))
        copied = self._speed().bandwidth * self._pace.iteration_s
        return max(1, math.ceil(sum(c.anchor_bytes for c in costs) / copied)) if copied else 1

    def make_common(self, plan: SnapshotPlan, orders: Sequence[Sequence[Sequence[int]]]) -> SnapshotPlan:
        """A plan with the schedule of another one, for what this rank has to capture now.

        Args:
            orders: other schedules that its slots must be large enough for.
        """
        found = plan_together(plan, self._binding, self._scalars_capacity(), orders, self.sharing)
        if found.shares and not self.sharing.replicas:
            found.capture_all(self._binding)
        if self._context.memory.persists:
            found.make_room_for_uploads(self._context.memory.session.available_bytes)
        return found

    def _limits(self, before: SnapshotPlan | None) -> tuple[int, int]:
        """The most bytes to copy per step, and the available memory."""
        available = self._context.memory.session.available_bytes
        budget: int | None = None
        if self.limits is not None:
            budget = self.limits[0]
            available = available if before is not None else min(available, self.limits[1])
        elif before is not None and not self._context.alone:
            budget = before.budget_bytes  # agreed on in an earlier life
        return self._measured_budget() if budget is None else budget, available

    def _measured_budget(self) -> int:
        on_cpu = all(local(p).device.type == "cpu" for p in self._binding.params.values())
        return self._speed().budget_bytes(self._context.options.max_overhead if on_cpu else None)

    def _speed(self) -> TrainingSpeed:
        tensors = [local(p) for p in self._binding.params.values()]
        if self._bandwidth is None:
            self._bandwidth = measure_bandwidth(tensors)
        return TrainingSpeed(self._pace.copy_window_s, self._pace.iteration_s, self._bandwidth)

    def _scalars_capacity(self) -> int:
        """Room for step scalars, which hold each operator's number (of a shared one, each piece's)."""
        packed = len(values.pack(self._scalars_sample(), "step scalars"))
        pieces = most_pieces(self.sharing, self._operators)
        return max(_MIN_SCALARS, 2 * packed + _NUMBER_BYTES * pieces)


def note_prepared(pace: StepTiming, stats: Stats, started_s: float) -> None:
    """Planning or reserving began then (performance counter) and is over; it is no part of a step."""
    took = time.perf_counter() - started_s
    pace.prepared(took)
    stats.prepare_ms += took * 1e3


def needed_memory(
    binding: LiveState,
    operators: Sequence[Operator],
    options: SnapshotOptions,
    sharing: ReplicatedParams,
) -> MemoryNeed:
    """The least memory that protects this rank, and its derivation; the daemon checks it at the attach."""
    whole = operator_costs(binding, operators, {}, scope_of(options))
    costs = sharing.mean_costs(operators, whole)
    anchor, compute = sum(c.anchor_bytes for c in costs), sum(c.compute_bytes for c in costs)
    windows = [1] if options.dense else [options.window or 0]
    if windows == [0]:
        windows = list(range(1, MAX_WINDOW + 1))
    of_experts, rings, least = options.of_experts, 1, 0
    if of_experts is not None and of_experts.selection != "turns":
        # Selected experts may be as old as two windows, and those that ranks share are captured whole.
        shared = {i for _, experts in sharing.experts(operators) for i in experts}
        rings = 2
        least = max((whole[i].anchor_bytes - whole[i].compute_bytes for i in shared), default=0)
    always = _MIN_SCALARS
    if options.to_peers == "gradients":
        held = (tensor for _, tensor in binding.named_held() if computable(tensor))
        always += sum(tensor.numel() * tensor.element_size() for tensor in held)
    sizes = {w: (rings * w + 2) * (compute + max((anchor - compute) // w, least) + always) for w in windows}
    best = min(sizes, key=lambda w: sizes[w])
    slots = rings * best + 2
    text = f"{slots} slots of {format_bytes(sizes[best] // slots)} for a window of {best}"
    return MemoryNeed(sizes[best], text)


def own_share_bytes(
    sharing: ReplicatedParams,
    operators: Sequence[Operator],
    binding: LiveState,
    options: SnapshotOptions,
) -> int:
    """Bytes of every snapshot of this rank besides what it shares with others."""
    shared = {i for indices in sharing.groups(operators).values() for i in indices}
    costs = operator_costs(binding, operators, {}, scope_of(options))
    return fixed_bytes(binding, 0) + sum(
        cost.anchor_bytes if options.dense else cost.compute_bytes
        for i, cost in enumerate(costs)
        if i not in shared
    )
