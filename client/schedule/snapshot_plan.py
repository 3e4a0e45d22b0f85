"""A snapshot plan: what each snapshot captures, how large the ring is, and how both are recorded.

The plan travels in the segment's descriptor, from which a fresh process reads it back
(``plan_from_payload``). `ckptd.client.schedule.planner` makes plans.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ckptd.client import values
from ckptd.client.model.live_state import LiveState, local, named_modules, named_parameters
from ckptd.client.model.operators import Operator, ParameterRows
from ckptd.client.model.replicated_params import EVERY_RANK, NOTHING_SHARED, ReplicatedParams
from ckptd.client.model.snapshot_layout import (
    CapturedOperators,
    PhasePlan,
    StateTable,
    build_phase,
    gradient_room,
    member_bytes,
)
from ckptd.client.optimizers.optimizer_probe import StateSpec
from ckptd.core.partial_experts import Selection, rooms
from ckptd.core.slots.segment_format import SegmentGeometry
from ckptd.core.snapshot_policy import (
    AlignedPolicy,
    DensePolicy,
    Level,
    OperatorCost,
    OperatorKind,
    PartialPolicy,
    PartialScope,
    PolicyKind,
    Schedule,
    SlidingPolicy,
    SnapshotPolicy,
)
from ckptd.units import first_of

_SLOT_SLACK = 64 << 10
_OF_OTHER_EXPERTS = {
    PartialScope.BOTH: Level.ABSENT,
    PartialScope.OPTIMIZER: Level.COMPUTE,
    PartialScope.WEIGHTS: Level.STATE,
}
_STATE_ROW = re.compile(r"optimizer state (.*) of")


@dataclass
class SnapshotPlan:
    """What each snapshot captures, and the geometry of the ring."""

    operators: list[Operator]
    costs: list[OperatorCost]
    """Bytes of each operator in this rank's snapshots; of a shared operator, the mean over its ranks."""
    schedule: Schedule
    policy_name: str
    compute_dtypes: dict[str, torch.dtype]
    identity: dict[str, str]
    scalars_capacity: int
    every: int = 1
    slot_bytes: int = 0
    num_slots: int = 0
    slack: int = 0
    """Slots beyond what one node needs, for snapshots that wait for peers."""
    upload_slots: int = 0
    """Part of ``num_slots``: they keep a suffix during its upload. Snapshots do without them."""
    budget_bytes: int | None = None
    """Bytes that may be copied per step, measured or agreed on; decides where large operators are split."""
    owners: list[int] = field(default_factory=list)
    """The rank that captures each operator; empty: this rank captures all."""
    scope: PartialScope | None = None
    """What partial snapshots hold of selected experts only; None: the policy loses nothing."""
    selection: Selection = Selection.TURNS
    """Which experts a partial snapshot has."""
    selectable: frozenset[int] = frozenset()
    """The experts that are selected by tokens at risk, each by its owner; the others take turns."""
    asked: str = ""
    """What the script asked for, also where only dense snapshots are exact; "" if unknown."""
    with_gradients: bool = False
    """Slots have room for gradients behind the image, for peers."""
    group_key: tuple[int, ...] = ()
    """The optimizers' groups when a process found this plan; empty: it made the plan itself."""
    _policy: SnapshotPolicy | None = None
    _phases: dict[tuple[int, frozenset[int] | None], tuple[PhasePlan, bool]] = field(default_factory=dict)
    _state: StateTable | None = None
    _rooms: list[int] | None = None

    @property
    def policy(self) -> SnapshotPolicy:
        if self._policy is None:
            if self.policy_name == "aligned":
                self._policy = AlignedPolicy(self.schedule)
            elif self.policy_name == "dense":
                self._policy = DensePolicy(len(self.operators), self.every)
            elif self.scope is not None:
                always = [i for i, op in enumerate(self.operators) if op.expert is None]
                longest = (2 if self.selectable else 1) * self.schedule.window
                self._policy = PartialPolicy(
                    self.schedule, always, every=self.every, scope=self.scope, longest=longest
                )
            else:
                self._policy = SlidingPolicy(self.schedule)
        return self._policy

    @property
    def left_out(self) -> frozenset[int]:
        """The operators that another rank captures."""
        if not self.owners:
            return frozenset()
        mine = (EVERY_RANK, int(self.identity["rank"]))
        return frozenset(i for i, owner in enumerate(self.owners) if owner not in mine)

    @property
    def shares(self) -> bool:
        """True if one of several ranks captures some operator, so that ranks rely on each other."""
        return any(owner != EVERY_RANK for owner in self.owners)

    @property
    def selected_here(self) -> frozenset[int]:
        """The experts that this rank selects; other ranks select the rest of ``selectable``."""
        return self.selectable - self.left_out

    @property
    def span(self) -> int:
        """The number of snapshots after which the phases repeat."""
        if self.policy_name == "dense":
            return self.every
        return self.schedule.window * (self.every if self.lossy else 1)

    @property
    def lossy(self) -> bool:
        """True if a recovery from these snapshots loses updates of experts."""
        return self.scope is not None

    @property
    def selection_text(self) -> str:
        """How far experts are selected by tokens at risk, in words; "" if the script asks for turns."""
        if not self.lossy or self.selection is Selection.TURNS:
            return ""
        number = len({op.expert for op in self.operators if op.expert is not None})
        elsewhere = len(self.selectable & self.left_out)
        by_others = f" ({elsewhere} of them by other ranks that hold them, too)" if elsewhere else ""
        if len(self.selectable) == number:
            return f"all {number} experts of this rank are selected by tokens at risk{by_others}"
        if self.selectable:
            return (
                f"{len(self.selectable)} of {number} experts of this rank are selected by tokens at risk"
                f"{by_others}; the others, whose replicas or parts on other ranks would be captured at other "
                "times, take turns"
            )
        return (
            "EXPERTS TAKE TURNS, none is selected by tokens at risk: each may have a replica on another "
            "rank, or be a part of one. If ranks have replicas, say which: "
            "LayoutOptions(replicated={'*.experts.*': group}). If none has, pass num_experts= of a whole "
            "layer: the number of ranks times the experts on each"
        )

    def turns(self, ordinal: int) -> tuple[int, ...]:
        """The experts whose turn the ``ordinal``-th snapshot is."""
        phase = ordinal // self.every % self.schedule.window
        return tuple(i for i in self.schedule.phases[phase] if self.operators[i].expert is not None)

    def selected_room(self, ordinal: int) -> int:
        """For how many of the experts that this rank selects the ``ordinal``-th snapshot has room."""
        if self._rooms is None:
            every = [self.turns(self.ordinal_of(phase)) for phase in range(self.schedule.window)]
            elsewhere = self.left_out
            here = [[i for i in phase if i not in elsewhere] for phase in every]
            self._rooms = rooms(here, self.selected_here)
        return self._rooms[ordinal // self.every % self.schedule.window]

    def ordinal_of(self, phase: int) -> int:
        """The number of a snapshot of this phase in the schedule."""
        return phase * self.every if self.lossy else phase

    def use_interval(self, every: int) -> None:
        """Take a snapshot every so many iterations."""
        if every != self.every:
            self.every, self._policy, self._phases = every, None, {}

    def next_ordinal(self, ordinal: int, every: int) -> int:
        """The number of the next snapshot if the interval becomes ``every`` instead of the ``ordinal``-th."""
        return -(-ordinal // self.every) * every

    @property
    def order_capacity(self) -> int:
        """The most bytes, by `costs`, of a phase in another order.

        Equal on ranks that share operators, although their slots differ a little.
        """
        peak = self.schedule.peak_bytes
        return peak + peak // 50 if self.shares else self.slot_bytes

    def takes(self, binding: LiveState, phases: Sequence[Sequence[int]]) -> int:
        """Bytes of this rank's largest snapshot under these phases."""
        left_out = self.left_out
        whole = operator_costs(binding, self.operators, self.compute_dtypes, self.scope)
        extra = [0 if i in left_out else c.anchor_bytes - c.compute_bytes for i, c in enumerate(whole)]
        always = max(
            p.layout.image_len - sum(extra[i] for i in p.anchored) for p in self._phase_plans(binding)
        )
        return always + max(sum(extra[i] for i in phase) for phase in phases)

    def use(self, schedule: Schedule) -> None:
        """Continue with another order of the same operators."""
        before, self.schedule, self._policy, self._rooms = self.schedule, schedule, None, None
        pairs = enumerate(zip(before.phases, schedule.phases, strict=False))
        same = {phase for phase, (old, new) in pairs if {*old} == {*new}}
        if self.policy_name != "sliding" or before.window != schedule.window:
            same = set()  # a phase is more than the operators that it anchors
        # Copy plans of the others stay: to make them anew takes milliseconds on the training thread.
        self._phases = {key: found for key, found in self._phases.items() if key[0] in same}

    def use_phases(self, phases: Sequence[Sequence[int]]) -> None:
        """Continue with recorded phases, which a reorder made after the segment was created."""
        first, costs = self.schedule.phases[0], self.costs
        floor = self.schedule.phase_bytes[0] - sum(
            costs[i].anchor_bytes - costs[i].compute_bytes for i in first
        )
        fixed = floor - sum(c.compute_bytes for c in costs)
        self.use(schedule_of(costs, phases, fixed, self.policy_name))

    def phase_plan(
        self, binding: LiveState, ordinal: int, experts: frozenset[int] | None = None
    ) -> tuple[PhasePlan, bool] | None:
        """The copy plan of the ``ordinal``-th snapshot, and whether a chain begins with it.

        None if the policy takes no snapshot there.

        Args:
            experts: that a partial snapshot anchors; None: those whose turn it is.
        """
        if ordinal % self.every:
            return None
        phases = self._phases  # a thread beside training prepares the plans of selected experts
        key = ordinal % self.span, experts
        known = phases.get(key)
        if known is not None:
            return known
        levels = self.policy.levels_for(ordinal)
        assert levels is not None
        anchored, compute, state = levels.anchored, levels.compute, levels.state
        if experts is not None:
            every = {i for i, op in enumerate(self.operators) if op.expert is not None}
            anchored = tuple(every.symmetric_difference(range(len(self.operators))) | experts)
            rest = tuple(every - experts)
            compute, state = (rest if each else () for each in (compute, state))
        left_out = self.left_out
        if elsewhere := self.selectable & left_out:
            # When their owner captures them is not known here, and a suffix of this rank needs none of them.
            anchored = tuple(elsewhere.union(anchored))
            compute, state = (tuple(i for i in each if i not in elsewhere) for each in (compute, state))
        captured = CapturedOperators(anchored, compute, state, left_out)
        layout = self._layout(binding, levels.phase, captured)
        found = layout, levels.begins_chain
        if experts is not None and len(phases) > 2 * self.span:  # selections rarely come again
            phases = self._phases = {}
        phases[key] = found
        return found

    def _phase_plans(self, binding: LiveState) -> list[PhasePlan]:
        """Of each phase the largest plan."""
        plans = (
            self.phase_plan(binding, i, self._largest_experts(i)) for i in range(0, self.span, self.every)
        )
        return [found[0] for found in plans if found is not None]

    def _largest_experts(self, ordinal: int) -> frozenset[int] | None:
        if not self.selectable:
            return None
        turns, number, here = self.turns(ordinal), self.selected_room(ordinal), self.selected_here
        extra = [(c.compute_bytes - c.anchor_bytes, i) for i, c in enumerate(self.costs) if i in here]
        return frozenset(i for _, i in sorted(extra)[:number]).union(set(turns) - self.selectable)

    def everything(self, binding: LiveState) -> PhasePlan:
        """The layout of an image that anchors all operators of this rank, for parked state."""
        return self._layout(binding, 0, CapturedOperators(range(len(self.operators))))

    def state_specs(self, binding: LiveState) -> Mapping[str, tuple[StateSpec, ...]]:
        """The optimizer state that the plan captures as tensors, by parameter."""
        if self._state is None:
            self._state = StateTable.of(binding)
        return self._state.specs

    def _layout(self, binding: LiveState, phase: int, captured: CapturedOperators) -> PhasePlan:
        if self._state is None:
            self._state = StateTable.of(binding)
        return build_phase(
            binding,
            self.operators,
            captured,
            state=self._state,
            phase=phase,
            compute_dtypes=self.compute_dtypes,
            identity=self.identity,
            scalars_capacity=self.scalars_capacity,
        )

    def measure_slots(self, binding: LiveState) -> None:
        """Fix the geometry: slots for the largest image, enough for a suffix and what is in flight."""
        plans, room = self._phase_plans(binding), self.with_gradients
        largest = max(p.layout.image_len + (gradient_room(binding, p) if room else 0) for p in plans)
        # A reorder shifts bytes between phases.
        slack = 0 if self.schedule.window == 1 else largest // 50 + _SLOT_SLACK
        self.slot_bytes = -(-(largest + slack) // 4096) * 4096
        self.num_slots = self.policy.num_slots + self.slack

    def capture_all(self, binding: LiveState) -> None:
        """Leave nothing to other ranks.

        Operators and phases stay, so that ranks that leave theirs to this one find them here. What others
        hold, too, takes its turns: they may take it from this rank, or keep their own.
        """
        owners = dict(enumerate(self.owners))
        self.selectable = frozenset(i for i in self.selectable if owners.get(i, EVERY_RANK) == EVERY_RANK)
        self.owners, self._policy, self._rooms = [], None, None
        self._phases.clear()
        self.measure_slots(binding)

    def make_room_for_uploads(self, available_bytes: int) -> None:
        """Add slots for one more suffix, as far as memory allows."""
        left = available_bytes // self.slot_bytes - self.num_slots
        self.upload_slots = max(0, min(self.policy.window, left))
        self.num_slots += self.upload_slots

    def leave_no_room_for_uploads(self) -> None:
        """Keep only the slots that snapshots need."""
        self.num_slots -= self.upload_slots
        self.upload_slots = 0

    def payload(self, binding: LiveState) -> bytes:
        """The trainer's part of the segment descriptor: all that a fresh process needs to read the ring."""
        return values.pack(
            {
                "operators": [_packed_operator(op) for op in self.operators],
                "owners": self.owners,
                "signature": signature(binding),
                "phases": [list(p) for p in self.schedule.phases],
                "policy": self.policy_name,
                "every": self.every,
                "asked": self.asked,
                "selection": str(self.selection),
                "selectable": sorted(self.selectable),
                "scope": None if self.scope is None else str(self.scope),
                "budget_bytes": self.budget_bytes,
                "compute_dtypes": {k: str(v)[6:] for k, v in self.compute_dtypes.items()},
                "scalars_capacity": self.scalars_capacity,
                "torch": str(torch.__version__),
                "threads": torch.get_num_threads(),
                **export_facts(binding),
            },
            "descriptor",
        )


def _packed_operator(op: Operator) -> list[Any]:
    expert = list(op.expert) if op.expert else None
    members = [[m.param, m.start, m.stop] for m in op.members]
    return [op.name, str(op.kind), op.layer, op.group, expert, members]


def _unpacked_operator(packed: Sequence[Any]) -> Operator:
    name, kind, layer, group, expert, members = packed
    rows = tuple(ParameterRows(*member) for member in members)
    return Operator(name, OperatorKind(kind), rows, layer, group, tuple(expert) if expert else None)


def plan_from_payload(
    binding: LiveState,
    payload: bytes,
    identity: dict[str, str],
    geometry: SegmentGeometry,
    sharing: ReplicatedParams = NOTHING_SHARED,
) -> SnapshotPlan:
    """The plan under which a segment was written, for this process's live tensors."""
    recorded: dict[str, Any] = values.unpack(payload)
    binding.recall(recorded_specs(binding, recorded["signature"]))
    operators = [_unpacked_operator(packed) for packed in recorded["operators"]]
    compute_dtypes = {k: getattr(torch, v) for k, v in recorded["compute_dtypes"].items()}
    scope = recorded.get("scope")  # absent in what 0.4 recorded
    scope = None if scope is None else PartialScope(scope)
    costs = sharing.mean_costs(operators, operator_costs(binding, operators, compute_dtypes, scope))
    capacity, policy = recorded["scalars_capacity"], recorded["policy"]
    return SnapshotPlan(
        operators,
        costs,
        schedule_of(costs, recorded["phases"], fixed_bytes(binding, capacity), policy),
        policy,
        compute_dtypes,
        identity,
        capacity,
        recorded["every"],
        geometry.slot_bytes,
        geometry.num_slots,
        budget_bytes=recorded["budget_bytes"],
        owners=list(recorded.get("owners", ())),
        scope=scope,
        # Absent in what 0.4 recorded.
        asked=recorded.get("asked", ""),
        selection=Selection(recorded.get("selection", Selection.TURNS)),
        selectable=frozenset(recorded.get("selectable", ())),
        group_key=binding.group_key(),
    )


def captured_once(payload: bytes) -> bool:
    """True if, under a segment's plan, one of several ranks captures each operator.

    Those ranks have compared the operator's values.
    """
    owners = values.unpack(payload).get("owners", ())
    return bool(owners) and all(owner != EVERY_RANK for owner in owners)


# -- sizes -----------------------------------------------------------------------------------------


def operator_costs(
    binding: LiveState,
    operators: Sequence[Operator],
    compute_dtypes: Mapping[str, torch.dtype],
    scope: PartialScope | None = None,
) -> list[OperatorCost]:
    """Bytes of each operator in a snapshot: anchored, and as it is captured in other phases than its own.

    Args:
        scope: of partial snapshots; None: what is not anchored is captured as compute weights.
    """

    def size(op: Operator, level: Level) -> int:
        return sum(member_bytes(binding, m, compute_dtypes, level) for m in op.members)

    return [
        OperatorCost(
            name=op.name,
            kind=op.kind,
            anchor_bytes=size(op, Level.ANCHOR),
            compute_bytes=size(op, _level_otherwise(op, scope)),
            group=op.group,
        )
        for op in operators
    ]


def _level_otherwise(op: Operator, scope: PartialScope | None) -> Level:
    """How an operator is captured in other phases than its own."""
    if scope is None:
        return Level.COMPUTE
    return Level.ANCHOR if op.expert is None else _OF_OTHER_EXPERTS[scope]


def fixed_bytes(binding: LiveState, scalars_capacity: int) -> int:
    """Bytes of every snapshot besides operators: buffers and step scalars."""
    sizes = (math.prod(shape) * dtype.itemsize for shape, dtype in binding.buffer_specs.values())
    return scalars_capacity + sum(sizes)


def schedule_of(
    costs: Sequence[OperatorCost], phases: Sequence[Sequence[int]], fixed: int, policy: str
) -> Schedule:
    """The schedule with recorded phases."""
    floor = fixed + sum(c.compute_bytes for c in costs)
    sizes = []
    for phase in phases:
        sizes.append(floor + sum(costs[i].anchor_bytes - costs[i].compute_bytes for i in phase))
        if policy == "aligned":  # what was anchored is in none of the window's later snapshots
            floor -= sum(costs[i].compute_bytes for i in phase)
    return Schedule(
        window=len(phases),
        phases=tuple(tuple(p) for p in phases),
        phase_bytes=tuple(sizes),
        peak_bytes=max(sizes),
        dense_bytes=fixed + sum(c.anchor_bytes for c in costs),
        fits=True,
        reason="as recorded in the segment",
        policy=PolicyKind(policy) if policy in tuple(PolicyKind) else PolicyKind.SLIDING,
    )


# -- what a descriptor says of the model -----------------------------------------------------------


def export_facts(binding: LiveState) -> dict[str, Any]:
    """What an export needs and cannot see in a snapshot (`ckptd.export.source.facts_of` reads it).

    ``transient_buffers``: buffers outside the model's state dict. ``aliases``: further names of
    tied parameters. ``groups``: (optimizer, group) of each parameter, if there are several groups.
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


def signature(binding: LiveState) -> list[list[Any]]:
    """``[kind, name, dtype, shape]`` of everything captured.

    It tells a process whether a snapshot belongs to its model.
    """
    rows: list[list[Any]] = [
        ["optimizer", str(i), type(o).__name__, [len(o.param_groups)]]
        for i, o in enumerate(binding.optimizers)
    ]
    for name, param in binding.params.items():
        shape = list(local(param).shape)
        rows.append(["parameter", name, str(param.dtype)[6:], shape])
        for spec in sorted(binding.specs(name), key=lambda spec: spec.key):
            if spec.kind in ("like", "tensor"):
                state_shape = shape if spec.shape is None else list(spec.shape)
                rows.append([f"optimizer state {spec.key!r} of", name, str(spec.dtype)[6:], state_shape])
    masters = binding.masters.items()
    rows += [["master weights of", n, str(t.dtype)[6:], list(local(t).shape)] for n, t in masters]
    specs = binding.buffer_specs.items()
    rows += [["buffer", n, str(dtype)[6:], list(shape)] for n, (shape, dtype) in specs]
    return rows


def recorded_specs(binding: LiveState, recorded: Sequence[Sequence[Any]]) -> dict[str, tuple[StateSpec, ...]]:
    """The optimizer state tensors of a recorded signature, by parameter."""
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
    """The first differences of two signatures in words; empty if there are none.

    Optimizer state does not count: the recording decides which state exists, and a probe need not
    have seen it.
    """
    before = {(kind, name): (dtype, tuple(shape)) for kind, name, dtype, shape in recorded}
    now = {(kind, name): (dtype, tuple(shape)) for kind, name, dtype, shape in here}
    found = []
    for key in dict.fromkeys([*before, *now]):
        if before.get(key) != now.get(key) and not _STATE_ROW.fullmatch(key[0]):
            old, new = (_words(d.get(key)) for d in (before, now))
            found.append(f"{key[0]} {key[1]}: {old} in the snapshot, {new} here")
    return first_of(found, limit, between="; ")


def _words(value: tuple[str, tuple[int, ...]] | None) -> str:
    return "absent" if value is None else f"{value[0]}{list(value[1])}"


# -- as text ---------------------------------------------------------------------------------------


def describe_table(
    operators: Sequence[Operator],
    costs: Sequence[OperatorCost],
    schedule: Schedule | None,
    owners: Sequence[int],
    head: Sequence[str],
) -> str:
    """The table that ``Checkpointer.describe()`` prints, one row per operator.

    Args:
        owners: the rank that captures each operator; negative, or no owners: each rank that has it.
    """
    rows = [("operator", "kind", "params", "anchor", "compute", "phase", "captured by")]
    for i, (op, cost) in enumerate(zip(operators, costs, strict=True)):
        rows.append(
            (
                op.name,
                str(op.kind),
                str(len(op.members)),
                human(cost.anchor_bytes),
                human(cost.compute_bytes),
                "-" if schedule is None else str(schedule.phase_of[i]),
                f"rank {owners[i]}" if owners and owners[i] >= 0 else "each",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        names = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        numbers = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join(names + numbers))
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
