"""From a model and measured speeds to a plan (`ckptd.client.schedule.snapshot_plan`): a schedule, a
segment geometry, and one static copy plan per phase.

The window is the smallest whose largest snapshot can be copied between the top of the loop and the
optimizer's step (MoEvement Algorithm 1, corrected: bytes, not operator counts; the time until the
optimizer's step, not the iteration), and whose ring fits the memory that the daemon grants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ckptd.client.log_lines import get_logger
from ckptd.client.model.live_state import LiveState, local
from ckptd.client.model.operators import Operator, ParameterRows, split_operator
from ckptd.client.model.replicated_params import EVERY_RANK, NOTHING_SHARED, ReplicatedParams
from ckptd.client.model.snapshot_layout import member_bytes
from ckptd.client.schedule.snapshot_plan import (
    SnapshotPlan,
    fixed_bytes,
    operator_costs,
    schedule_of,
)
from ckptd.core.schedule import (
    OperatorCost,
    Ordering,
    Schedule,
    max_piece_bytes,
    order_operators,
    plan_aligned,
    plan_schedule,
)

__all__ = ["MAX_WINDOW", "PlanInputs", "TrainingSpeed", "make_plan", "most_pieces", "plan_together"]

logger = get_logger(__name__)

MAX_WINDOW = 64
# What ranks share is cut until each rank's part is that many pieces, so that parts come out alike;
# but not into more than so many altogether (each is named in every step's scalars), nor into
# smaller ones. Not by the window: owners outlive its changes.
_PIECES_PER_SHARE = 32
_MAX_PIECES = 4096
_MIN_PIECE_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class TrainingSpeed:
    """Measured: seconds from the loop's top to the optimizer's step, seconds per iteration, bytes
    per second of copying.
    """

    copy_window_s: float
    iteration_s: float
    bandwidth: float

    def budget_bytes(self, max_overhead: float | None) -> int:
        """How much may be copied per step; ``max_overhead`` bounds copies that take the trainer's
        own cores.
        """
        seconds = 0.8 * self.copy_window_s
        if max_overhead is not None:
            seconds = min(seconds, max_overhead * self.iteration_s)
        return int(seconds * self.bandwidth)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """What a plan follows from, besides the model.

    Attributes:
        window: None: the smallest that fits.
        every: a dense policy takes a snapshot every so many iterations.
        budget_bytes: the most that may be copied per step; None: no limit.
        available_bytes: the memory that there is for the ring; None: no limit.
        popularity: of each operator; None: each as popular as the others.
        slack: slots beyond what one node needs.
        sharing: what several ranks have alike and one of them captures.
        before: the plan that this one follows. Other ranks may go over to theirs at another
            iteration, or not at all, so owners (and, with the same window, phases) stay what they
            were, and where operators are cut in another way than before, every rank captures all of
            them.
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


def make_plan(binding: LiveState, operators: Sequence[Operator], inputs: PlanInputs) -> SnapshotPlan:
    """Plan the smallest window that fits the budget and the memory; the schedule's reason says what decided.

    Raises:
        ValueError: no window's ring fits ``available_bytes``; the message has the numbers.
    """
    fixed = fixed_bytes(binding, inputs.scalars_capacity)
    whole = operator_costs(binding, operators, inputs.compute_dtypes)
    worthwhile = _worthwhile_window(inputs.sharing.mean_costs(operators, whole), fixed)
    wanted = 1 if inputs.policy == "dense" else inputs.window
    tried = []
    candidates = [wanted] if wanted is not None else [None, *range(2, MAX_WINDOW + 1)]
    while candidates:
        candidate = candidates.pop(0)
        plan = _plan_once(binding, operators, inputs, candidate)
        if candidate is None and not plan.schedule.fits and plan.schedule.window > worthwhile:
            # No window fits, so the largest was planned: most of its length buys next to nothing
            # and lengthens recovery.
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


def _worthwhile_window(costs: Sequence[OperatorCost], fixed: int) -> int:
    """The window at which the largest snapshot is within a half of what every snapshot holds anyway."""
    floor = fixed + sum(c.compute_bytes for c in costs)
    extra = sum(c.anchor_bytes - c.compute_bytes for c in costs)
    return max(1, min(MAX_WINDOW, -(-2 * extra // max(floor, 1))))


def _plan_once(
    binding: LiveState, operators: Sequence[Operator], inputs: PlanInputs, window: int | None
) -> SnapshotPlan:
    compute_dtypes, sharing, before = inputs.compute_dtypes, inputs.sharing, inputs.before
    policy, budget_bytes, popularity = inputs.policy, inputs.budget_bytes, inputs.popularity
    fixed = fixed_bytes(binding, inputs.scalars_capacity)
    parts = list(operators)
    costs = sharing.mean_costs(parts, operator_costs(binding, parts, compute_dtypes))
    order = order_operators(costs, popularity or [0.0] * len(costs), inputs.ordering)
    planner = plan_aligned if policy == "aligned" else plan_schedule
    schedule = planner(
        costs,
        budget_bytes=budget_bytes,
        fixed_bytes=fixed,
        order=order,
        max_window=MAX_WINDOW,
        window=window,
    )
    limit = max_piece_bytes(costs, _split_window(costs, schedule, fixed, budget_bytes), fixed)
    if (limit is not None and schedule.window > 1) or sharing.replicas:
        alone = limit if schedule.window > 1 else None
        parts = _split(binding, parts, alone, compute_dtypes, sharing)
        if len(parts) != len(operators):
            costs = sharing.mean_costs(parts, operator_costs(binding, parts, compute_dtypes))
            popular = _popularity_of(parts, operators, popularity)
            order = order_operators(costs, popular, inputs.ordering)
            schedule = planner(
                costs,
                budget_bytes=budget_bytes,
                fixed_bytes=fixed,
                order=order,
                max_window=MAX_WINDOW,
                window=window,
            )
    if before is not None and before.shares and _only_costs_differ(before, parts, schedule, policy):
        # Found out here only, it may be (state of this rank's own experts): what others anchor with
        # it stays in its phases.
        schedule = schedule_of(costs, before.schedule.phases, fixed, policy)
    plan = SnapshotPlan(
        parts,
        costs,
        schedule,
        policy,
        compute_dtypes,
        inputs.identity,
        inputs.scalars_capacity,
        inputs.every,
    )
    plan.slack, plan.budget_bytes = inputs.slack, budget_bytes
    if before is None:
        whole = operator_costs(binding, parts, compute_dtypes)
        plan.owners = sharing.owners(parts, whole, schedule.phases)
    else:
        plan.owners = _owners_as_before(before, parts)
    plan.measure_slots(binding)
    return plan


def _only_costs_differ(
    before: SnapshotPlan, operators: Sequence[Operator], schedule: Schedule, policy: str
) -> bool:
    alike = [(op.name, op.members) for op in before.operators] == [(op.name, op.members) for op in operators]
    return alike and policy == before.policy_name and schedule.window == before.schedule.window


def _owners_as_before(before: SnapshotPlan, operators: Sequence[Operator]) -> list[int]:
    """Who captured these operators; every rank, where any that was shared is cut otherwise now."""
    pairs = zip(before.operators, before.owners, strict=False)
    owner_of = {(op.name, op.members): owner for op, owner in pairs if owner != EVERY_RANK}
    owners = [owner_of.pop((op.name, op.members), EVERY_RANK) for op in operators]
    return [] if owner_of else owners


def _split_window(
    costs: Sequence[OperatorCost], schedule: Schedule, fixed: int, budget_bytes: int | None
) -> int:
    """For which window large operators are split: where none fits, the smallest that would if all
    could be cut evenly.
    """
    if schedule.fits or budget_bytes is None:
        return schedule.window
    floor = fixed + sum(c.compute_bytes for c in costs)
    extra = sum(c.anchor_bytes - c.compute_bytes for c in costs)
    if budget_bytes <= floor:
        return schedule.window
    return min(MAX_WINDOW, max(schedule.window, -(-extra // (budget_bytes - floor))))


def most_pieces(sharing: ReplicatedParams, operators: Sequence[Operator]) -> int:
    """How many more operators there are at most once what is shared is cut."""
    groups = sharing.groups(operators)
    return sum(min(len(g.ranks) * _PIECES_PER_SHARE, _MAX_PIECES) for g in groups)


def _split(
    binding: LiveState,
    operators: Sequence[Operator],
    limit: int | None,
    compute_dtypes: Mapping[str, torch.dtype],
    sharing: ReplicatedParams,
) -> list[Operator]:
    """Cut what is larger than ``limit``, and what is shared into pieces that can be spread evenly
    over its ranks.
    """
    shapes = {name: tuple(local(p).shape) for name, p in binding.params.items()}

    def anchored(member: ParameterRows) -> int:
        return member_bytes(binding, member, compute_dtypes, anchored=True)

    def stored(member: ParameterRows) -> int:
        # Not what an anchor takes: all ranks must cut alike, also where one has not seen yet all
        # that its optimizer keeps.
        param = local(binding.params[member.param])
        start, stop = member.range(binding.num_rows(member.param))
        return param.numel() * param.element_size() * (stop - start) // max(binding.num_rows(member.param), 1)

    shared: dict[int, int] = {}
    for group, indices in sharing.groups(operators).items():
        total = sum(stored(m) for i in indices for m in operators[i].members)
        even = total // min(len(group.ranks) * _PIECES_PER_SHARE, _MAX_PIECES)
        shared.update(dict.fromkeys(indices, max(even, _MIN_PIECE_BYTES)))
    found: list[Operator] = []
    for i, op in enumerate(operators):
        bytes_of, most = (stored, shared[i]) if i in shared else (anchored, limit)
        if most is None:
            found.append(op)
        else:
            found += split_operator(op, shapes, bytes_of, most, binding.rows_allowed)
    return found


def _popularity_of(
    parts: Sequence[Operator], operators: Sequence[Operator], popularity: Sequence[float] | None
) -> list[float]:
    known = {op.name: p for op, p in zip(operators, popularity or [0.0] * len(operators), strict=True)}
    return [known.get(part.name, 0.0) for part in parts]


def plan_together(
    plan: SnapshotPlan,
    binding: LiveState,
    scalars_capacity: int,
    coming: Sequence[Sequence[Sequence[int]]],
    sharing: ReplicatedParams = NOTHING_SHARED,
) -> SnapshotPlan:
    """The same schedule for state that has grown: what one of several ranks may change by itself.

    Args:
        coming: phases to which the ranks have agreed to go over; slots have room for them, too.
    """
    whole = operator_costs(binding, plan.operators, plan.compute_dtypes)
    costs = sharing.mean_costs(plan.operators, whole)
    fixed = fixed_bytes(binding, scalars_capacity)
    now, *later = (
        schedule_of(costs, phases, fixed, plan.policy_name) for phases in (plan.schedule.phases, *coming)
    )
    alike = replace(
        plan,
        costs=costs,
        schedule=now,
        scalars_capacity=scalars_capacity,
        upload_slots=0,
        _policy=None,
        _phases={},
        _state=None,
    )
    alike.measure_slots(binding)
    growth = max(schedule.peak_bytes for schedule in (now, *later)) - now.peak_bytes
    alike.slot_bytes += -(-growth // 4096) * 4096
    return alike
