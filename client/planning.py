"""From a model and measured speeds to a schedule, a segment geometry, and one static copy plan per phase.

The window is the smallest whose largest snapshot can be copied between the top of the loop and the optimizer's step
(MoEvement Algorithm 1, corrected: bytes, not operator counts; the time until the optimizer's step, not the iteration), and
whose ring fits the memory that the daemon grants.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ckptd.client import values
from ckptd.client.binding import Binding, local
from ckptd.client.export_facts import export_facts
from ckptd.client.layout import PhasePlan, StateTable, build_phase, member_bytes
from ckptd.client.operators import Member, Operator, split_operator
from ckptd.client.sharing import EVERY_RANK, NOTHING_SHARED, Sharing
from ckptd.memory.segment_format import SegmentGeometry
from ckptd.schedules.schedule import (
    AlignedPolicy,
    DensePolicy,
    OperatorCost,
    OperatorKind,
    Ordering,
    PhaseLevels,
    PolicyKind,
    Schedule,
    SlidingPolicy,
    SnapshotPolicy,
    max_piece_bytes,
    order_operators,
    plan_aligned,
    plan_schedule,
)

__all__ = [
    "Plan",
    "TrainingSpeed",
    "captured_once",
    "fixed_bytes",
    "make_plan",
    "most_pieces",
    "operator_costs",
    "plan_alike",
    "plan_from_payload",
    "schedule_of",
    "signature",
    "signature_difference",
]

logger = logging.getLogger(__name__)

MAX_WINDOW = 64
_SLOT_SLACK = 64 << 10
# What ranks share is cut until each rank's part is that many pieces, so that parts come out alike; but not into more than so many
# altogether (each is named in every step's scalars), nor into smaller ones. Not by the window: owners outlive its changes.
_PIECES_PER_SHARE = 32
_MAX_PIECES = 4096
_MIN_PIECE_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class TrainingSpeed:
    """Measured: seconds from the loop's top to the optimizer's step, seconds per iteration, bytes per second of copying."""

    copy_window_s: float
    iteration_s: float
    bandwidth: float

    def budget_bytes(self, max_overhead: float | None) -> int:
        """How much may be copied per step; ``max_overhead`` bounds copies that take the trainer's own cores."""
        seconds = 0.8 * self.copy_window_s
        if max_overhead is not None:
            seconds = min(seconds, max_overhead * self.iteration_s)
        return int(seconds * self.bandwidth)


@dataclass
class Plan:
    """What is captured when, and how large the ring is for it.

    ``costs``: what each operator takes in this rank's snapshots; of what several ranks share, this rank's part in the mean.
    """

    operators: list[Operator]
    costs: list[OperatorCost]
    schedule: Schedule
    policy_name: str
    compute_dtypes: dict[str, torch.dtype]
    identity: dict[str, str]
    scalars_capacity: int
    every: int = 1
    slot_bytes: int = 0
    num_slots: int = 0
    # Slots beyond what one node needs, for snapshots that wait for peers.
    slack: int = 0
    # Of `num_slots`, those that are there so that a suffix can stay while it is uploaded; snapshots go on without them.
    upload_slots: int = 0
    # What may be copied per step, as it was measured (or agreed on); it decides where large operators are split.
    budget_bytes: int | None = None
    # The rank that captures each operator; empty: this one, all of them.
    owners: list[int] = field(default_factory=list)
    _policy: SnapshotPolicy | None = None
    _phases: dict[int, tuple[PhasePlan, bool] | None] = field(default_factory=dict)
    _state: StateTable | None = None

    @property
    def policy(self) -> SnapshotPolicy:
        if self._policy is None:
            self._policy = self._make_policy()
        return self._policy

    def _make_policy(self) -> SnapshotPolicy:
        if self.policy_name == "aligned":
            return AlignedPolicy(self.schedule)
        if self.policy_name == "dense":
            return DensePolicy(len(self.operators), self.every)
        return SlidingPolicy(self.schedule)

    @property
    def left_out(self) -> frozenset[int]:
        """The operators that another rank captures."""
        mine = (EVERY_RANK, int(self.identity["rank"]))
        return frozenset(i for i, owner in enumerate(self.owners) if owner not in mine)

    @property
    def order_capacity(self) -> int:
        """What a phase may take, by `costs`, in another order; equal on ranks that share, whose slots differ a little."""
        peak = self.schedule.peak_bytes
        return peak + peak // 50 if self.shares else self.slot_bytes

    def takes(self, binding: Binding, phases: Sequence[Sequence[int]]) -> int:
        """What this rank's largest snapshot takes, were these the phases."""
        left_out = self.left_out
        whole = operator_costs(binding, self.operators, self.compute_dtypes)
        extra = [
            0 if i in left_out else c.anchor_bytes - c.compute_bytes for i, c in enumerate(whole)
        ]
        plans = [p for i in range(self.span) if (p := self.phase_plan(binding, i)) is not None]
        always = max(p.layout.image_len - sum(extra[i] for i in p.anchored) for p, _ in plans)
        return always + max(sum(extra[i] for i in phase) for phase in phases)

    @property
    def shares(self) -> bool:
        """Whether ranks rely on each other: some operator is captured by one of several that have it."""
        return any(owner != EVERY_RANK for owner in self.owners)

    @property
    def span(self) -> int:
        """After how many snapshots the phases repeat."""
        return self.every if self.policy_name == "dense" else self.schedule.window

    def use(self, schedule: Schedule) -> None:
        """Go on with another order of the same operators."""
        self.schedule = schedule
        self._policy = self._state = None
        self._phases.clear()

    def use_phases(self, phases: Sequence[Sequence[int]]) -> None:
        """Go on with recorded phases (a reorder after the segment was made)."""
        floor = self.schedule.phase_bytes[0] - sum(
            self.costs[i].anchor_bytes - self.costs[i].compute_bytes
            for i in self.schedule.phases[0]
        )
        fixed = floor - sum(c.compute_bytes for c in self.costs)
        self.use(schedule_of(self.costs, phases, fixed, self.policy_name))

    def phase_plan(self, binding: Binding, ordinal: int) -> tuple[PhasePlan, bool] | None:
        """The copy plan of the ``ordinal``-th snapshot, and whether a chain begins with it; None where none is taken."""
        key = ordinal % self.span
        if key not in self._phases:
            levels = self.policy.levels_for(ordinal)
            self._phases[key] = (
                None if levels is None else (self._build(binding, levels), levels.begins_chain)
            )
        return self._phases[key]

    def _build(self, binding: Binding, levels: PhaseLevels) -> PhasePlan:
        if self._state is None:
            self._state = StateTable.of(binding)
        return build_phase(
            binding,
            self.operators,
            state=self._state,
            phase=levels.phase,
            anchored=levels.anchored,
            compute=levels.compute,
            compute_dtypes=self.compute_dtypes,
            identity=self.identity,
            scalars_capacity=self.scalars_capacity,
            left_out=self.left_out,
        )

    def everything(self, binding: Binding) -> PhasePlan:
        """The layout of an image that anchors all this rank has, whoever captures it otherwise: of parked state."""
        if self._state is None:
            self._state = StateTable.of(binding)
        return build_phase(
            binding,
            self.operators,
            state=self._state,
            phase=0,
            anchored=range(len(self.operators)),
            compute=(),
            compute_dtypes=self.compute_dtypes,
            identity=self.identity,
            scalars_capacity=self.scalars_capacity,
        )

    def measure_slots(self, binding: Binding) -> None:
        """Fix the geometry: the largest image of a window, and enough slots for a suffix and what is in flight."""
        plans = [p for i in range(self.span) if (p := self.phase_plan(binding, i)) is not None]
        largest = max(p.layout.image_len for p, _ in plans)
        slack = (
            0 if self.schedule.window == 1 else largest // 50 + _SLOT_SLACK
        )  # a reorder shifts bytes between phases
        self.slot_bytes = -(-(largest + slack) // 4096) * 4096
        self.num_slots = self.policy.num_slots + self.slack

    def capture_all(self, binding: Binding) -> None:
        """Leave nothing to other ranks. Operators and phases stay, so that ranks which leave theirs to this one find them here."""
        self.owners = []
        self._phases.clear()
        self.measure_slots(binding)

    def make_room_for_uploads(self, available_bytes: int) -> None:
        """Slots for one more suffix, as far as there is memory for them."""
        left = available_bytes // self.slot_bytes - self.num_slots
        self.upload_slots = max(0, min(self.policy.window, left))
        self.num_slots += self.upload_slots

    def leave_no_room_for_uploads(self) -> None:
        """As few slots as snapshots need."""
        self.num_slots -= self.upload_slots
        self.upload_slots = 0

    def payload(self, binding: Binding) -> bytes:
        """The trainer's part of the segment descriptor: all that a fresh process needs to read the ring."""
        return values.pack(
            {
                "operators": [
                    [
                        op.name,
                        str(op.kind),
                        op.layer,
                        op.group,
                        list(op.expert) if op.expert else None,
                        [[m.param, m.start, m.stop] for m in op.members],
                    ]
                    for op in self.operators
                ],
                "owners": self.owners,
                "signature": signature(binding),
                "phases": [list(p) for p in self.schedule.phases],
                "policy": self.policy_name,
                "every": self.every,
                "budget_bytes": self.budget_bytes,
                "compute_dtypes": {k: str(v)[6:] for k, v in self.compute_dtypes.items()},
                "scalars_capacity": self.scalars_capacity,
                "torch": str(torch.__version__),
                "threads": torch.get_num_threads(),
                **export_facts(binding),
            },
            "descriptor",
        )


def operator_costs(
    binding: Binding, operators: Sequence[Operator], compute_dtypes: Mapping[str, torch.dtype]
) -> list[OperatorCost]:
    """What each operator takes in a snapshot, anchored and not."""
    return [
        OperatorCost(
            name=op.name,
            kind=op.kind,
            anchor_bytes=sum(
                member_bytes(binding, m, compute_dtypes, anchored=True) for m in op.members
            ),
            compute_bytes=sum(
                member_bytes(binding, m, compute_dtypes, anchored=False) for m in op.members
            ),
            group=op.group,
        )
        for op in operators
    ]


def fixed_bytes(binding: Binding, scalars_capacity: int) -> int:
    """What every snapshot holds besides operators: buffers and step scalars."""
    return scalars_capacity + sum(
        local(b).numel() * b.element_size() for b in binding.buffers().values()
    )


def make_plan(
    binding: Binding,
    operators: Sequence[Operator],
    *,
    policy: str,
    window: int | None,
    every: int,
    budget_bytes: int | None,
    available_bytes: int | None,
    popularity: Sequence[float] | None,
    ordering: Ordering,
    compute_dtypes: dict[str, torch.dtype],
    identity: dict[str, str],
    scalars_capacity: int,
    slack: int = 0,
    sharing: Sharing = NOTHING_SHARED,
    before: Plan | None = None,
) -> Plan:
    """Plan the smallest window that fits the budget and the memory; the schedule's reason says what decided.

    Args:
        sharing: what several ranks have alike and one of them captures.
        before: the plan that this one follows. Other ranks may go over to theirs at another iteration, or not at all, so owners
            (and, with the same window, phases) stay what they were, and where operators are cut in another way than before, every rank captures all of them.
    Raises:
        ValueError: no window's ring fits ``available_bytes``; the message has the numbers.
    """
    fixed = fixed_bytes(binding, scalars_capacity)
    whole = operator_costs(binding, operators, compute_dtypes)
    worthwhile = _worthwhile_window(sharing.mean_costs(operators, whole), fixed)
    wanted = 1 if policy == "dense" else window
    tried = []
    candidates = [wanted] if wanted is not None else [None, *range(2, MAX_WINDOW + 1)]
    while candidates:
        candidate = candidates.pop(0)
        plan = _plan_once(
            binding,
            operators,
            policy,
            candidate,
            every,
            budget_bytes,
            fixed,
            popularity,
            ordering,
            compute_dtypes,
            identity,
            scalars_capacity,
            slack,
            sharing,
            before,
        )
        if candidate is None and not plan.schedule.fits and plan.schedule.window > worthwhile:
            # No window fits, so the largest was planned: most of its length buys next to nothing and lengthens recovery.
            logger.info("%s; window %d is used", plan.schedule.reason, worthwhile)
            candidates.insert(0, worthwhile)
            continue
        needed = plan.slot_bytes * plan.num_slots
        if available_bytes is None or needed <= available_bytes:
            return plan
        tried.append(f"W={plan.schedule.window}: {plan.num_slots} slots of {plan.slot_bytes} bytes")
        if wanted is None and plan.schedule.window >= len(operators):
            break
    raise ValueError(
        f"no ring fits the {available_bytes} bytes that the daemon has left ({'; '.join(tried[:4])}); raise CKPTD_MEMORY or `ckptctl forget` old runs"
    )


def _worthwhile_window(costs: Sequence[OperatorCost], fixed: int) -> int:
    """The window at which the largest snapshot is within a half of what every snapshot holds anyway."""
    floor = fixed + sum(c.compute_bytes for c in costs)
    extra = sum(c.anchor_bytes - c.compute_bytes for c in costs)
    return max(1, min(MAX_WINDOW, -(-2 * extra // max(floor, 1))))


def _plan_once(
    binding: Binding,
    operators: Sequence[Operator],
    policy: str,
    window: int | None,
    every: int,
    budget_bytes: int | None,
    fixed: int,
    popularity: Sequence[float] | None,
    ordering: Ordering,
    compute_dtypes: dict[str, torch.dtype],
    identity: dict[str, str],
    scalars_capacity: int,
    slack: int,
    sharing: Sharing,
    before: Plan | None,
) -> Plan:
    parts = list(operators)
    costs = sharing.mean_costs(parts, operator_costs(binding, parts, compute_dtypes))
    order = order_operators(costs, popularity or [0.0] * len(costs), ordering)
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
            order = order_operators(costs, popular, ordering)
            schedule = planner(
                costs,
                budget_bytes=budget_bytes,
                fixed_bytes=fixed,
                order=order,
                max_window=MAX_WINDOW,
                window=window,
            )
    if before is not None and before.shares and _only_costs_differ(before, parts, schedule, policy):
        # Found out here only, it may be (state of this rank's own experts): what others anchor with it stays in its phases.
        schedule = schedule_of(costs, before.schedule.phases, fixed, policy)
    plan = Plan(parts, costs, schedule, policy, compute_dtypes, identity, scalars_capacity, every)
    plan.slack, plan.budget_bytes = slack, budget_bytes
    if before is None:
        whole = operator_costs(binding, parts, compute_dtypes)
        plan.owners = sharing.owners(parts, whole, schedule.phases)
    else:
        plan.owners = _owners_as_before(before, parts)
    plan.measure_slots(binding)
    return plan


def _only_costs_differ(
    before: Plan, operators: Sequence[Operator], schedule: Schedule, policy: str
) -> bool:
    alike = [(op.name, op.members) for op in before.operators] == [
        (op.name, op.members) for op in operators
    ]
    return alike and policy == before.policy_name and schedule.window == before.schedule.window


def _owners_as_before(before: Plan, operators: Sequence[Operator]) -> list[int]:
    """Who captured these operators; every rank, where any that was shared is cut otherwise now."""
    pairs = zip(before.operators, before.owners, strict=False)
    owner_of = {(op.name, op.members): owner for op, owner in pairs if owner != EVERY_RANK}
    owners = [owner_of.pop((op.name, op.members), EVERY_RANK) for op in operators]
    return [] if owner_of else owners


def _split_window(
    costs: Sequence[OperatorCost], schedule: Schedule, fixed: int, budget_bytes: int | None
) -> int:
    """For which window large operators are split: where none fits, the smallest that would if all could be cut evenly."""
    if schedule.fits or budget_bytes is None:
        return schedule.window
    floor = fixed + sum(c.compute_bytes for c in costs)
    extra = sum(c.anchor_bytes - c.compute_bytes for c in costs)
    if budget_bytes <= floor:
        return schedule.window
    return min(MAX_WINDOW, max(schedule.window, -(-extra // (budget_bytes - floor))))


def most_pieces(sharing: Sharing, operators: Sequence[Operator]) -> int:
    """How many more operators there are at most once what is shared is cut."""
    groups = sharing.groups(operators)
    return sum(min(len(g.ranks) * _PIECES_PER_SHARE, _MAX_PIECES) for g in groups)


def _split(
    binding: Binding,
    operators: Sequence[Operator],
    limit: int | None,
    compute_dtypes: Mapping[str, torch.dtype],
    sharing: Sharing,
) -> list[Operator]:
    """Cut what is larger than ``limit``, and what is shared into pieces that can be spread evenly over its ranks."""
    shapes = {name: tuple(local(p).shape) for name, p in binding.params.items()}

    def anchored(member: Member) -> int:
        return member_bytes(binding, member, compute_dtypes, anchored=True)

    def stored(member: Member) -> int:
        # Not what an anchor takes: all ranks must cut alike, also where one has not seen yet all that its optimizer keeps.
        param = local(binding.params[member.param])
        start, stop = member.range(binding.num_rows(member.param))
        return (
            param.numel()
            * param.element_size()
            * (stop - start)
            // max(binding.num_rows(member.param), 1)
        )

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
    known = {
        op.name: p for op, p in zip(operators, popularity or [0.0] * len(operators), strict=True)
    }
    return [known.get(part.name, 0.0) for part in parts]


def plan_from_payload(
    binding: Binding,
    payload: bytes,
    identity: dict[str, str],
    geometry: SegmentGeometry,
    sharing: Sharing = NOTHING_SHARED,
) -> Plan:
    """The plan under which a segment was written, for this process's live tensors."""
    told: dict[str, Any] = values.unpack(payload)
    operators = [
        Operator(
            name,
            OperatorKind(kind),
            tuple(Member(*m) for m in members),
            layer,
            group,
            tuple(expert) if expert else None,
        )
        for name, kind, layer, group, expert, members in told["operators"]
    ]
    compute_dtypes = {k: getattr(torch, v) for k, v in told["compute_dtypes"].items()}
    costs = sharing.mean_costs(operators, operator_costs(binding, operators, compute_dtypes))
    capacity = told["scalars_capacity"]
    schedule = schedule_of(costs, told["phases"], fixed_bytes(binding, capacity), told["policy"])
    return Plan(
        operators,
        costs,
        schedule,
        told["policy"],
        compute_dtypes,
        identity,
        capacity,
        told["every"],
        geometry.slot_bytes,
        geometry.num_slots,
        budget_bytes=told["budget_bytes"],
        owners=list(told.get("owners", ())),
    )


def captured_once(payload: bytes) -> bool:
    """Whether, under the plan of a segment, each operator is captured by one of the ranks that have it: these have compared its values."""
    owners = values.unpack(payload).get("owners", ())
    return bool(owners) and all(owner != EVERY_RANK for owner in owners)


def plan_alike(
    plan: Plan,
    binding: Binding,
    scalars_capacity: int,
    coming: Sequence[Sequence[Sequence[int]]],
    sharing: Sharing = NOTHING_SHARED,
) -> Plan:
    """The same schedule for state that has grown: what one of several ranks may change by itself.

    Args:
        coming: phases to which the ranks have agreed to go over; slots have room for them, too.
    """
    whole = operator_costs(binding, plan.operators, plan.compute_dtypes)
    costs = sharing.mean_costs(plan.operators, whole)
    fixed = fixed_bytes(binding, scalars_capacity)
    now, *later = (
        schedule_of(costs, phases, fixed, plan.policy_name)
        for phases in (plan.schedule.phases, *coming)
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


def schedule_of(
    costs: Sequence[OperatorCost], phases: Sequence[Sequence[int]], fixed: int, policy: str
) -> Schedule:
    """The schedule with these phases, as it was recorded."""
    floor = fixed + sum(c.compute_bytes for c in costs)
    found = []
    for phase in phases:
        found.append(floor + sum(costs[i].anchor_bytes - costs[i].compute_bytes for i in phase))
        if policy == "aligned":  # what was anchored is in none of the window's later snapshots
            floor -= sum(costs[i].compute_bytes for i in phase)
    sizes = tuple(found)
    return Schedule(
        window=len(phases),
        phases=tuple(tuple(p) for p in phases),
        phase_bytes=sizes,
        peak_bytes=max(sizes),
        dense_bytes=fixed + sum(c.anchor_bytes for c in costs),
        fits=True,
        reason="as recorded in the segment",
        policy=PolicyKind.ALIGNED if policy == "aligned" else PolicyKind.SLIDING,
    )


def signature(binding: Binding) -> list[list[Any]]:
    """Names, dtypes and shapes of everything that is captured."""
    rows: list[list[Any]] = [
        ["optimizer", str(i), type(o).__name__, [len(o.param_groups)]]
        for i, o in enumerate(binding.optimizers)
    ]
    for name, param in binding.params.items():
        rows.append(["parameter", name, str(param.dtype)[6:], list(local(param).shape)])
        rows += [
            [_STATE.format(s.key), name, str(s.dtype)[6:], list(s.shape or local(param).shape)]
            for s in sorted(binding.specs(name), key=lambda s: s.key)
            if s.kind in ("like", "tensor")
        ]
    rows += [
        ["master weights of", n, str(m.dtype)[6:], list(local(m).shape)]
        for n, m in binding.masters.items()
    ]
    rows += [
        ["buffer", n, str(b.dtype)[6:], list(local(b).shape)] for n, b in binding.buffers().items()
    ]
    return rows


_STATE = "optimizer state {!r} of"


def signature_difference(
    recorded: Sequence[Sequence[Any]], here: Sequence[Sequence[Any]], limit: int = 5
) -> str:
    """The first differences in words; empty if there are none.

    Optimizer state that was recorded and is not known here is no difference: some optimizers begin to keep it later.
    """
    before = {(kind, name): (dtype, tuple(shape)) for kind, name, dtype, shape in recorded}
    now = {(kind, name): (dtype, tuple(shape)) for kind, name, dtype, shape in here}
    found = []
    for key in dict.fromkeys([*before, *now]):
        late = key not in now and key[0].startswith("optimizer state")
        if before.get(key) != now.get(key) and not late:
            old, new = (_words(d.get(key)) for d in (before, now))
            found.append(f"{key[0]} {key[1]}: {old} in the snapshot, {new} here")
    more = f"; and {len(found) - limit} more" if len(found) > limit else ""
    return "; ".join(found[:limit]) + more


def _words(value: tuple[str, tuple[int, ...]] | None) -> str:
    return "absent" if value is None else f"{value[0]}{list(value[1])}"
