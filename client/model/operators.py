"""Operators: the units that a snapshot captures, found in a model without help.

An operator is one expert, one gate, or one dense (non-expert) part of a layer. It is a list of
members, each a whole parameter or a range of rows (along dimension 0) of a fused ``[num_experts,
...]`` parameter. Every parameter of the model belongs to operators completely and exactly once;
tied parameters are one parameter.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

from ckptd.client.model.live_state import named_modules, named_parameters
from ckptd.core.schedules.schedule import OperatorKind

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Grouping", "Operator", "ParameterRows", "discover_operators", "split_operator"]

type_grouping = Callable[[str, "Tensor"], "str | None"]
Grouping = Mapping[str, Sequence[str]] | type_grouping

# Names under which the field's models keep the module that routes tokens to experts.
_GATE_NAMES = frozenset({"gate", "router", "gating", "switch", "wg", "gate_network", "shared_expert_gate"})
_COUNT_ATTRIBUTES = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "n_experts",
    "num_routed_experts",
)


@dataclass(frozen=True, slots=True)
class ParameterRows:
    """A whole parameter (``start is None``) or its rows ``[start, stop)`` along dimension 0.

    Of a sharded parameter, what is meant is this rank's shard, and its rows are counted from the
    shard's first.
    """

    param: str
    start: int | None = None
    stop: int | None = None

    @property
    def whole(self) -> bool:
        return self.start is None

    def range(self, total: int) -> tuple[int, int]:
        """Its rows, where the whole parameter has ``total``."""
        return (0, total) if self.start is None or self.stop is None else (self.start, self.stop)


@dataclass(frozen=True, slots=True)
class Operator:
    """One expert, gate, or dense part of a layer."""

    name: str
    kind: OperatorKind
    members: tuple[ParameterRows, ...]
    layer: str = ""
    # Which fused tensor group its rows belong to: kept together in time by the schedule, because a
    # weight gradient is skipped only when every row of the tensor is frozen.
    group: str | None = None
    # (name of the module whose calls count tokens, index of the expert in it).
    expert: tuple[str, int] | None = None


def discover_operators(
    model: nn.Module, *, rows_allowed: Callable[[str], bool], grouping: Grouping | None = None
) -> list[Operator]:
    """Partition the parameters of ``model`` into operators.

    Args:
        model: any module; parameters are named as in ``client.names``, without wrappers.
        rows_allowed: whether the optimizer's update of this parameter is independent per row; where
            it is not, a fused tensor becomes one operator instead of one per expert.
        grouping: the user's own grouping, first match wins: ``{operator name: [parameter name
            pattern, ...]}`` or a function ``(name, parameter) -> operator name | None``. What it
            leaves is grouped automatically.
    Raises:
        ValueError: a pattern of ``grouping`` matches no parameter.
    """
    params: dict[str, Tensor] = dict(named_parameters(model))
    taken: set[str] = set()
    operators = _grouped(params, grouping, taken)
    for container in _expert_containers(model, params):
        operators += container.operators(params, taken, rows_allowed)
    operators += _dense_operators(params, taken)
    order = {name: i for i, name in enumerate(params)}
    return sorted(operators, key=lambda op: order[op.members[0].param] + (op.members[0].start or 0) * 1e-9)


def _grouped(params: Mapping[str, Tensor], grouping: Grouping | None, taken: set[str]) -> list[Operator]:
    if grouping is None:
        return []
    found: dict[str, list[ParameterRows]] = {}
    if callable(grouping):
        for name, param in params.items():
            op = grouping(name, param)
            if op is not None:
                found.setdefault(op, []).append(ParameterRows(name))
                taken.add(name)
    else:
        for op, patterns in grouping.items():
            for pattern in patterns:
                matches = [n for n in params if n not in taken and fnmatch.fnmatchcase(n, pattern)]
                if not matches:
                    raise ValueError(
                        f"operators[{op!r}]: pattern {pattern!r} matches no (remaining) parameter; "
                        f"names look like {next(iter(params), '<none>')!r}"
                    )
                found.setdefault(op, []).extend(ParameterRows(n) for n in matches)
                taken.update(matches)
    return [
        Operator(name, OperatorKind.DENSE, tuple(ms), layer=_layer_of(ms[0].param))
        for name, ms in found.items()
    ]


@dataclass(frozen=True, slots=True)
class _ExpertContainer:
    """A module that holds experts, either as children (``fused`` false) or as rows of its parameters.

    ``numbers``: which experts of the layer may be here. An expert is named by its number, wherever
    it is: so replicas on several ranks, and what is recorded of them, go by one name.
    """

    name: str
    numbers: Sequence[int]
    fused: bool
    gates: tuple[str, ...]

    def operators(
        self, params: Mapping[str, Tensor], taken: set[str], rows_allowed: Callable[[str], bool]
    ) -> list[Operator]:
        found = self._fused(params, taken, rows_allowed) if self.fused else self._listed(params, taken)
        for gate in self.gates:
            names = [n for n in params if n.startswith(gate + ".") and n not in taken]
            if names:
                taken.update(names)
                found.append(
                    Operator(
                        gate,
                        OperatorKind.GATE,
                        tuple(map(ParameterRows, names)),
                        layer=_layer_of(gate),
                    )
                )
        return found

    def _listed(self, params: Mapping[str, Tensor], taken: set[str]) -> list[Operator]:
        found = []
        for index in self.numbers:
            prefix = f"{self.name}.{index}."
            names = [n for n in params if n.startswith(prefix) and n not in taken]
            if names:
                taken.update(names)
                found.append(
                    Operator(
                        prefix[:-1],
                        OperatorKind.EXPERT,
                        tuple(map(ParameterRows, names)),
                        layer=_layer_of(self.name),
                        expert=(self.name, index),
                    )
                )
        return found

    def _fused(
        self, params: Mapping[str, Tensor], taken: set[str], rows_allowed: Callable[[str], bool]
    ) -> list[Operator]:
        names = [
            n for n in _own(params, self.name) if n not in taken and _is_fused(params[n], len(self.numbers))
        ]
        held = {n: _experts_held(params[n]) for n in names if rows_allowed(n)}
        taken.update(names)
        found = [
            Operator(n, OperatorKind.EXPERT, (ParameterRows(n),), layer=_layer_of(n))
            for n in names
            if not held.get(n)
        ]
        return found + [
            Operator(
                f"{self.name}.{index}",
                OperatorKind.EXPERT,
                tuple(
                    ParameterRows(n, index - rows.start, index - rows.start + 1)
                    for n, rows in held.items()
                    if index in rows
                ),
                layer=_layer_of(self.name),
                group=self.name,
                expert=(self.name, index),
            )
            for index in self.numbers
            if any(index in rows for rows in held.values())
        ]


def _expert_containers(model: nn.Module, params: Mapping[str, Tensor]) -> Iterator[_ExpertContainer]:
    """Modules that hold experts: by name, by a sibling that routes to as many targets, and by shape."""
    modules = dict(named_modules(model))
    for name, module in modules.items():
        leaf = name.rpartition(".")[2].lower()
        gates = _sibling_gates(modules, name)
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            numbers = _listed_experts(modules, name, gates)
            if numbers is not None:
                yield _ExpertContainer(name, numbers, False, gates)
        elif "expert" in leaf or any("expert" in n for n, _ in module.named_parameters(recurse=False)):
            count = _fused_count(modules, name, gates, [params[n] for n in _own(params, name)])
            if count is not None:
                yield _ExpertContainer(name, range(count), True, gates)


def _listed_experts(modules: Mapping[str, nn.Module], name: str, gates: Sequence[str]) -> list[int] | None:
    """The numbers of the experts that are children of this module; None where there is no evidence
    that they are experts.

    A rank of an elastic layer holds some of them, a single one, or none: then the module above says
    how many there are.
    """
    keys = [key for key, _ in modules[name].named_children()]
    # Keyed by name, or by what is no number of an expert ("01"): its parts are grouped as dense.
    if not all(key.isdecimal() and str(int(key)) == key for key in keys):
        return None
    numbers = [int(key) for key in keys]
    stated = _stated_counts(modules.get(name.rpartition(".")[0]))
    totals = [count for count in stated if len(numbers) < count and max(numbers, default=0) < count]
    if len(keys) < (0 if totals else 2):
        return None
    if keys and not _same_shapes(list(modules[name].children())):
        return None
    if "expert" in name.rpartition(".")[2].lower():
        return numbers
    routed = any(_routes_to(modules[g], count) for g in gates for count in (len(keys), *totals))
    return numbers if routed else None


def _stated_counts(module: nn.Module | None) -> list[int]:
    """How many experts a module says that there are."""
    return [
        int(value)
        for attribute in _COUNT_ATTRIBUTES
        if isinstance(value := getattr(module, attribute, None), int)
    ]


def _fused_count(
    modules: Mapping[str, nn.Module], name: str, gates: Sequence[str], own: Sequence[Tensor]
) -> int | None:
    """How many experts the parameters of this module are fused over; None where there is no
    evidence of fusion.
    """
    leading = {p.shape[0] for p in own if p.ndim >= 3}
    parent = modules.get(name.rpartition(".")[0])
    stated = _stated_counts(modules[name]) + _stated_counts(parent)
    for count in stated:
        if count >= 2 and count in leading:
            return count
    routed = [c for c in leading if c >= 2 and any(_routes_to(modules[g], c) for g in gates)]
    return routed[0] if len(routed) == 1 else None


def _experts_held(param: Tensor) -> range:
    """Which experts' rows of a fused parameter are here; empty where its local rows are not one
    range of the whole's.
    """
    start, count = 0, param.shape[0]
    for axis, placement in enumerate(getattr(param, "placements", ())):
        if type(placement).__name__ == "_StridedShard":
            return range(0)
        if placement.is_shard(0):
            mesh = param.device_mesh  # type: ignore[attr-defined]
            # As torch.chunk cuts: the last shards are smaller, or empty.
            size = -(-count // mesh.size(axis))
            first = min(size * mesh.get_local_rank(axis), count)
            start, count = start + first, min(size, count - first)
    local = param.to_local() if hasattr(param, "to_local") else param
    return range(start, start + count) if local.shape[0] == count else range(0)


def _is_fused(param: Tensor, num_experts: int) -> bool:
    return param.ndim >= 2 and param.shape[0] == num_experts


def _sibling_gates(modules: Mapping[str, nn.Module], name: str) -> tuple[str, ...]:
    """Beside it; or, where the module above is a layer of experts and nothing else (as of an
    elastic mixture), beside that.
    """
    parent = name.rpartition(".")[0]
    above = modules.get(parent)
    if above is not None and _stated_counts(above) and list(above.children()) == [modules[name]]:
        parent = parent.rpartition(".")[0]
    prefix = parent + "." if parent else ""
    return tuple(g for leaf in sorted(_GATE_NAMES) if (g := prefix + leaf) in modules and g != name)


def _routes_to(gate: nn.Module, count: int) -> bool:
    return any(count in p.shape for p in gate.parameters())


def _same_shapes(children: Sequence[nn.Module]) -> bool:
    shapes = [[(n, p.shape) for n, p in c.named_parameters()] for c in children]
    return bool(shapes[0]) and all(s == shapes[0] for s in shapes)


def _own(params: Mapping[str, Tensor], module: str) -> list[str]:
    prefix = module + "." if module else ""
    return [n for n in params if n.startswith(prefix) and "." not in n[len(prefix) :]]


def _layer_of(name: str) -> str:
    """The path up to its first numeric component (``model.layers.3``), or the owning module's path."""
    parts = name.split(".")
    for i, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ".".join(parts[:-1]) or name


def _dense_operators(params: Mapping[str, Tensor], taken: set[str]) -> list[Operator]:
    layers: dict[str, list[ParameterRows]] = {}
    for name in params:
        if name not in taken:
            layers.setdefault(_layer_of(name), []).append(ParameterRows(name))
    return [
        Operator(
            f"{layer}.dense" if layer.rpartition(".")[2].isdigit() else layer,
            OperatorKind.DENSE,
            tuple(ms),
            layer=layer,
        )
        for layer, ms in layers.items()
    ]


def split_operator(
    op: Operator,
    shapes: Mapping[str, Sequence[int]],
    bytes_of: Callable[[ParameterRows], int],
    max_bytes: int,
    rows_allowed: Callable[[str], bool],
) -> list[Operator]:
    """Cut an operator larger than ``max_bytes`` into pieces, between its tensors and, where the
    optimizer is elementwise, between rows of one tensor. Pieces that cannot be cut further stay
    larger.
    """
    if op.kind is OperatorKind.EXPERT or bytes_of_all(op, bytes_of) <= max_bytes:
        return [op]
    ranges: list[ParameterRows] = []
    for member in op.members:
        rows = shapes[member.param][0] if shapes[member.param] else 1
        count = min(rows, -(-bytes_of(member) // max(max_bytes, 1)))
        if count <= 1 or not member.whole or not rows_allowed(member.param):
            ranges.append(member)
            continue
        cuts = [rows * i // count for i in range(count + 1)]
        ranges += [ParameterRows(member.param, a, b) for a, b in itertools.pairwise(cuts)]
    parts: list[list[ParameterRows]] = [[]]
    for span in ranges:
        if parts[-1] and sum(map(bytes_of, parts[-1])) + bytes_of(span) > max_bytes:
            parts.append([])
        parts[-1].append(span)
    if len(parts) == 1:
        return [op]
    return [replace(op, name=f"{op.name}/{i}", members=tuple(part)) for i, part in enumerate(parts)]


def bytes_of_all(op: Operator, bytes_of: Callable[[ParameterRows], int]) -> int:
    return sum(map(bytes_of, op.members))
