"""A plan: what is captured when, and how large the ring is for it; as it is recorded in a segment,
and read from there.

How one comes about is in `ckptd.client.schedule.planner`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ckptd.client import values
from ckptd.client.model.live_state import LiveState, local, named_modules, named_parameters
from ckptd.client.model.operators import Operator, ParameterRows
from ckptd.client.model.replicated_params import EVERY_RANK, NOTHING_SHARED, ReplicatedParams
from ckptd.client.model.snapshot_layout import PhasePlan, StateTable, build_phase, member_bytes
from ckptd.client.optimizers.optimizer_probe import StateSpec
from ckptd.core.schedules.schedule import (
    AlignedPolicy,
    DensePolicy,
    OperatorCost,
    OperatorKind,
    PhaseLevels,
    PolicyKind,
    Schedule,
    SlidingPolicy,
    SnapshotPolicy,
)
from ckptd.core.slots.segment_format import SegmentGeometry

__all__ = [
    "SnapshotPlan",
    "captured_once",
    "describe_table",
    "export_facts",
    "fixed_bytes",
    "operator_costs",
    "plan_from_payload",
    "recorded_specs",
    "schedule_of",
    "signature",
    "signature_difference",
]


_STATE_ROW = re.compile(r"optimizer state (.*) of")


def signature(binding: LiveState) -> list[list[Any]]:
    """Names, dtypes and shapes of everything that is captured."""
    rows: list[list[Any]] = [
        ["optimizer", str(i), type(o).__name__, [len(o.param_groups)]]
        for i, o in enumerate(binding.optimizers)
    ]
    for name, param in binding.params.items():
        rows.append(["parameter", name, str(param.dtype)[6:], list(local(param).shape)])
        rows += [
            [
                _STATE.format(s.key),
                name,
                str(s.dtype)[6:],
                list(local(param).shape if s.shape is None else s.shape),
            ]
            for s in sorted(binding.specs(name), key=lambda s: s.key)
            if s.kind in ("like", "tensor")
        ]
    rows += [
        ["master weights of", n, str(m.dtype)[6:], list(local(m).shape)] for n, m in binding.masters.items()
    ]
    rows += [["buffer", n, str(b.dtype)[6:], list(local(b).shape)] for n, b in binding.buffers().items()]
    return rows


_STATE = "optimizer state {!r} of"


def recorded_specs(binding: LiveState, recorded: Sequence[Sequence[Any]]) -> dict[str, tuple[StateSpec, ...]]:
    """The optimizer state tensors of a signature, by parameter."""
    found: dict[str, tuple[StateSpec, ...]] = {}
    for kind, name, dtype, shape in recorded:
        match = _STATE_ROW.fullmatch(kind)
        if match is None or name not in binding.owner:
            continue
        like = tuple(shape) == tuple(local(binding.held(name)).shape)
        spec = StateSpec(
            ast.literal_eval(match[1]),
            "like" if like else "tensor",
            getattr(torch, dtype),
            None if like else tuple(shape),
        )
        found[name] = (*found.get(name, ()), spec)
    return found


def signature_difference(
    recorded: Sequence[Sequence[Any]], here: Sequence[Sequence[Any]], limit: int = 5
) -> str:
    """The first differences in words; empty if there are none.

    Optimizer state is no difference: what was recorded decides what there is, and a probe need not
    have seen it.
    """
    before = {(kind, name): (dtype, tuple(shape)) for kind, name, dtype, shape in recorded}
    now = {(kind, name): (dtype, tuple(shape)) for kind, name, dtype, shape in here}
    found = []
    for key in dict.fromkeys([*before, *now]):
        if before.get(key) != now.get(key) and not _STATE_ROW.fullmatch(key[0]):
            old, new = (_words(d.get(key)) for d in (before, now))
            found.append(f"{key[0]} {key[1]}: {old} in the snapshot, {new} here")
    more = f"; and {len(found) - limit} more" if len(found) > limit else ""
    return "; ".join(found[:limit]) + more


def _words(value: tuple[str, tuple[int, ...]] | None) -> str:
    return "absent" if value is None else f"{value[0]}{list(value[1])}"


def export_facts(binding: LiveState) -> dict[str, Any]:
    """For the trainer's part of a descriptor (`ckptd.export.source.facts_of` reads it).

    ``transient_buffers``: buffers that the model's state dict leaves out. ``aliases``: further
    names of tied parameters.
    ``groups``: (optimizer, group) of each parameter, where there is more than one group.
    """
    model = binding.model
    transient = [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in named_modules(model)
        for name in module._non_persistent_buffers_set
    ]
    first = {id(param): name for name, param in binding.params.items()}
    aliases = {
        name: first[id(param)]
        for name, param in named_parameters(model, remove_duplicate=False)
        if name != first[id(param)]
    }
    several = sum(len(o.param_groups) for o in binding.optimizers) > 1
    groups = {name: list(owner) for name, owner in binding.owner.items()} if several else {}
    return {"transient_buffers": transient, "aliases": aliases, "groups": groups}


_SLOT_SLACK = 64 << 10


@dataclass
class SnapshotPlan:
    """What is captured when, and how large the ring is for it.

    ``costs``: what each operator takes in this rank's snapshots; of what several ranks share, this
    rank's part in the mean.
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
    # Of `num_slots`, those that are there so that a suffix can stay while it is uploaded; snapshots
    # go on without them.
    upload_slots: int = 0
    # What may be copied per step, as it was measured (or agreed on); it decides where large
    # operators are split.
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
        """What a phase may take, by `costs`, in another order; equal on ranks that share, whose
        slots differ a little.
        """
        peak = self.schedule.peak_bytes
        return peak + peak // 50 if self.shares else self.slot_bytes

    def takes(self, binding: LiveState, phases: Sequence[Sequence[int]]) -> int:
        """What this rank's largest snapshot takes, were these the phases."""
        left_out = self.left_out
        whole = operator_costs(binding, self.operators, self.compute_dtypes)
        extra = [0 if i in left_out else c.anchor_bytes - c.compute_bytes for i, c in enumerate(whole)]
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
            self.costs[i].anchor_bytes - self.costs[i].compute_bytes for i in self.schedule.phases[0]
        )
        fixed = floor - sum(c.compute_bytes for c in self.costs)
        self.use(schedule_of(self.costs, phases, fixed, self.policy_name))

    def phase_plan(self, binding: LiveState, ordinal: int) -> tuple[PhasePlan, bool] | None:
        """The copy plan of the ``ordinal``-th snapshot, and whether a chain begins with it; None
        where none is taken.
        """
        key = ordinal % self.span
        if key not in self._phases:
            levels = self.policy.levels_for(ordinal)
            self._phases[key] = (
                None if levels is None else (self._build(binding, levels), levels.begins_chain)
            )
        return self._phases[key]

    def _build(self, binding: LiveState, levels: PhaseLevels) -> PhasePlan:
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

    def state_specs(self, binding: LiveState) -> Mapping[str, tuple[StateSpec, ...]]:
        """The optimizer state that it captures as tensors, by parameter."""
        if self._state is None:
            self._state = StateTable.of(binding)
        return self._state.specs

    def everything(self, binding: LiveState) -> PhasePlan:
        """The layout of an image that anchors all this rank has, whoever captures it otherwise: of
        parked state.
        """
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

    def measure_slots(self, binding: LiveState) -> None:
        """Fix the geometry: the largest image of a window, and enough slots for a suffix and what
        is in flight.
        """
        plans = [p for i in range(self.span) if (p := self.phase_plan(binding, i)) is not None]
        largest = max(p.layout.image_len for p, _ in plans)
        slack = (
            0 if self.schedule.window == 1 else largest // 50 + _SLOT_SLACK
        )  # a reorder shifts bytes between phases
        self.slot_bytes = -(-(largest + slack) // 4096) * 4096
        self.num_slots = self.policy.num_slots + self.slack

    def capture_all(self, binding: LiveState) -> None:
        """Leave nothing to other ranks. Operators and phases stay, so that ranks which leave theirs
        to this one find them here.
        """
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

    def payload(self, binding: LiveState) -> bytes:
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
    binding: LiveState, operators: Sequence[Operator], compute_dtypes: Mapping[str, torch.dtype]
) -> list[OperatorCost]:
    """What each operator takes in a snapshot, anchored and not."""
    return [
        OperatorCost(
            name=op.name,
            kind=op.kind,
            anchor_bytes=sum(member_bytes(binding, m, compute_dtypes, anchored=True) for m in op.members),
            compute_bytes=sum(member_bytes(binding, m, compute_dtypes, anchored=False) for m in op.members),
            group=op.group,
        )
        for op in operators
    ]


def fixed_bytes(binding: LiveState, scalars_capacity: int) -> int:
    """What every snapshot holds besides operators: buffers and step scalars."""
    return scalars_capacity + sum(local(b).numel() * b.element_size() for b in binding.buffers().values())


def plan_from_payload(
    binding: LiveState,
    payload: bytes,
    identity: dict[str, str],
    geometry: SegmentGeometry,
    sharing: ReplicatedParams = NOTHING_SHARED,
) -> SnapshotPlan:
    """The plan under which a segment was written, for this process's live tensors."""
    told: dict[str, Any] = values.unpack(payload)
    binding.recall(recorded_specs(binding, told["signature"]))
    operators = [
        Operator(
            name,
            OperatorKind(kind),
            tuple(ParameterRows(*m) for m in members),
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
    return SnapshotPlan(
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
    """Whether, under the plan of a segment, each operator is captured by one of the ranks that have
    it: these have compared its values.
    """
    owners = values.unpack(payload).get("owners", ())
    return bool(owners) and all(owner != EVERY_RANK for owner in owners)


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


def describe_table(
    operators: Sequence[Operator],
    costs: Sequence[OperatorCost],
    schedule: Schedule | None,
    owners: Sequence[int],
    head: Sequence[str],
) -> str:
    """Operators with kind, bytes anchored and not, the phase in which they are anchored, and who
    captures them.

    Args:
        owners: the rank that captures each; negative (or none given): every rank that has it.
    """
    phase_of = schedule.phase_of if schedule is not None else None
    rows = [("operator", "kind", "params", "anchor", "compute", "phase", "captured by")]
    for i, (op, cost) in enumerate(zip(operators, costs, strict=True)):
        phase = str(phase_of[i]) if phase_of is not None else "-"
        rows.append(
            (
                op.name,
                str(op.kind),
                str(len(op.members)),
                human(cost.anchor_bytes),
                human(cost.compute_bytes),
                phase,
                f"rank {owners[i]}" if owners and owners[i] >= 0 else "each",
            )
        )
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(w) if c < 2 else cell.rjust(w)
            for c, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    total = (
        f"{len(operators)} operators, dense {human(sum(c.anchor_bytes for c in costs))}, "
        f"compute weights {human(sum(c.compute_bytes for c in costs))}"
    )
    return "\n".join([*head, lines[0], "-" * len(lines[0]), *lines[1:], total])


def human(size: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
