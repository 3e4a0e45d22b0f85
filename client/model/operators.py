"""Operators: the units that a snapshot captures, found in a model without help.

An operator is one expert, one gate, or one dense (non-expert) part of a layer. It is a list of members,
each a whole parameter or a range of rows (along dimension 0) of a fused ``[num_experts, ...]`` parameter.
Every parameter of the model belongs to operators completely and exactly once; tied parameters are one
parameter.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from ckptd.client.model.live_state import named_modules, named_parameters
from ckptd.core.snapshot_policy import OperatorKind

Grouping = Mapping[str, Sequence[str]] | Callable[[str, Tensor], str | None]

# Common names of the module that routes tokens to experts.
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

    Of a sharded parameter: of this rank's shard, counted from the shard's first row.
    """

    param: str
    start: int | None = None
    stop: int | None = None

    @property
    def whole(self) -> bool:
        return self.start is None

    def range(self, total: int) -> tuple[int, int]:
        """Its rows, if the whole parameter has ``total``."""
        return (0, total) if self.start is None or self.stop is None else (self.start, self.stop)


@dataclass(frozen=True, slots=True)
class Operator:
    """One expert, gate, or dense part of a layer."""

    name: str
    kind: OperatorKind
    members: tuple[ParameterRows, ...]
    layer: str = ""
    group: str | None = None
    """The fused tensor group of its rows. The schedule keeps a group together in time, because a weight
    gradient is skipped only when every row of the tensor is frozen."""
    expert: tuple[str, int] | None = None
    """(name of the module whose calls count tokens, index of the expert in it)."""


def discover_operators(
    model: nn.Module, *, rows_allowed: Callable[[str], bool], grouping: Grouping | None = None
) -> list[Operator]:
    """Partition the parameters of ``model``, named without wrappers, into operators.

    Args:
        rows_allowed: True if the optimizer updates each row of this parameter independently; otherwise
            a fused tensor becomes one operator instead of one per expert.
        grouping: the user's own grouping, first match wins: ``{operator name: [parameter name pattern,
            ...]}`` or a function ``(name, parameter) -> operator name | None``. Other parameters are
            grouped automatically.
    Raises:
        ValueError: a pattern of ``grouping`` matches no parameter.
    """
    params: dict[str, Tensor] = dict(named_parameters(model))
    taken: set[str] = set()
    operators = [
        _whole(name, OperatorKind.DENSE, names, _layer_of(names[0]))
        for name, names in _user_groups(params, grouping, taken).items()
    ]
    modules = dict(named_modules(model))
    for name, numbers, fused, gates in _expert_containers(modules, params):
        operators += (
            _fused_experts(name, numbers, params, taken, rows_allowed)
            if fused
            else _listed_experts(name, numbers, params, taken)
        )
        for gate in gates:
            if names := _take_below(gate, params, taken):
                operators.append(_whole(gate, OperatorKind.GATE, names, _layer_of(gate)))
    layers: dict[str, list[str]] = {}
    for name in params:
        if name not in taken:
            layers.setdefault(_layer_of(name), []).append(name)
    for layer, names in layers.items():
        dense = f"{layer}.dense" if layer.rpartition(".")[2].isdigit() else layer
        operators.append(_whole(dense, OperatorKind.DENSE, names, layer))
    order = {name: i for i, name in enumerate(params)}
    return sorted(operators, key=lambda op: order[op.members[0].param] + (op.members[0].start or 0) * 1e-9)


def _whole(
    name: str, kind: OperatorKind, params: Iterable[str], layer: str, expert: tuple[str, int] | None = None
) -> Operator:
    return Operator(name, kind, tuple(map(ParameterRows, params)), layer=layer, expert=expert)


def _take_below(module: str, params: Mapping[str, Tensor], taken: set[str]) -> list[str]:
    """The remaining parameters of this module, which are taken now."""
    prefix = f"{module}."
    names = [n for n in params if n.startswith(prefix) and n not in taken]
    taken.update(names)
    return names


def _user_groups(
    params: Mapping[str, Tensor], grouping: Grouping | None, taken: set[str]
) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    if callable(grouping):
        for name, param in params.items():
            op = grouping(name, param)
            if op is not None:
                found.setdefault(op, []).append(name)
                taken.add(name)
        return found
    for op, patterns in (grouping or {}).items():
        for pattern in patterns:
            matches = [n for n in params if n not in taken and fnmatch.fnmatchcase(n, pattern)]
            if not matches:
                raise ValueError(
                    f"operators[{op!r}]: pattern {pattern!r} matches no (remaining) parameter; "
                    f"names look like {next(iter(params), '<none>')!r}"
                )
            found.setdefault(op, []).extend(matches)
            taken.update(matches)
    return found


def buffers_of_experts(
    operators: Iterable[Operator], buffers: Mapping[str, Tensor], num_rows: Callable[[str], int]
) -> list[ParameterRows]:
    """The buffers that belong to the experts among these operators, such as scales of their weights.

    They are those of an expert's own module, and rows of those that a fused parameter has beside it.

    Args:
        num_rows: of a parameter.
    """
    found: dict[ParameterRows, None] = {}
    for op in (op for op in operators if op.expert is not None):
        for name, buffer in buffers.items():
            if name.startswith(f"{op.name}."):
                found[ParameterRows(name)] = None
            for m in (m for m in op.members if not m.whole):
                together = m.param.rpartition(".")[0] == name.rpartition(".")[0]
                if together and buffer.shape[:1] == (num_rows(m.param),):
                    found[ParameterRows(name, m.start, m.stop)] = None
    return list(found)


# -- experts ---------------------------------------------------------------------------------------


def _expert_containers(
    modules: Mapping[str, nn.Module], params: Mapping[str, Tensor]
) -> Iterator[tuple[str, Sequence[int], bool, tuple[str, ...]]]:
    """Modules that hold experts: name, experts' numbers, whether they are rows of its parameters, gates.

    Found by name, by a sibling that routes to as many targets, and by shape. An expert keeps the
    number that it has in the layer, on every rank: so replicas, and recordings of them, have one name.
    """
    for name, module in modules.items():
        leaf = name.rpartition(".")[2].lower()
        gates = _sibling_gates(modules, name)
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            numbers = _expert_numbers(modules, name, gates)
            if numbers is not None:
                yield name, numbers, False, gates
        elif "expert" in leaf or any("expert" in n for n, _ in module.named_parameters(recurse=False)):
            count = _fused_count(modules, name, gates, [params[n] for n in _own(params, name)])
            if count is not None:
                yield name, range(count), True, gates


def _listed_experts(
    container: str, numbers: Sequence[int], params: Mapping[str, Tensor], taken: set[str]
) -> list[Operator]:
    layer = _layer_of(container)
    return [
        _whole(f"{container}.{index}", OperatorKind.EXPERT, names, layer, expert=(container, index))
        for index in numbers
        if (names := _take_below(f"{container}.{index}", params, taken))
    ]


def _fused_experts(
    container: str,
    numbers: Sequence[int],
    params: Mapping[str, Tensor],
    taken: set[str],
    rows_allowed: Callable[[str], bool],
) -> list[Operator]:
    count, layer = len(numbers), _layer_of(container)
    names = [
        n
        for n in _own(params, container)
        if n not in taken and params[n].ndim >= 2 and params[n].shape[0] == count
    ]
    taken.update(names)
    held = {n: _experts_held(params[n]) for n in names if rows_allowed(n)}
    found = [_whole(n, OperatorKind.EXPERT, [n], _layer_of(n)) for n in names if not held.get(n)]
    for index in numbers:
        members = tuple(
            ParameterRows(n, index - rows.start, index - rows.start + 1)
            for n, rows in held.items()
            if index in rows
        )
        if members:
            name = f"{container}.{index}"
            found.append(
                Operator(name, OperatorKind.EXPERT, members, layer, container, expert=(container, index))
            )
    return found


def _expert_numbers(modules: Mapping[str, nn.Module], name: str, gates: Sequence[str]) -> list[int] | None:
    """The numbers of the experts among this module's children; None without evidence of experts.

    A rank of an elastic layer holds some of them, a single one, or none: then the module above says
    how many there are.
    """
    keys = [key for key, _ in modules[name].named_children()]
    # Children with other names, or with "01", which is no expert's number, are grouped as dense.
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
    """The numbers of experts that a module states."""
    return [
        int(value)
        for attribute in _COUNT_ATTRIBUTES
        if isinstance(value := getattr(module, attribute, None), int)
    ]


def _fused_count(
    modules: Mapping[str, nn.Module], name: str, gates: Sequence[str], own: Sequence[Tensor]
) -> int | None:
    """The number of experts fused in this module's parameters; None without evidence of fusion."""
    leading = {p.shape[0] for p in own if p.ndim >= 3}
    parent = modules.get(name.rpartition(".")[0])
    for count in _stated_counts(modules[name]) + _stated_counts(parent):
        if count >= 2 and count in leading:
            return count
    routed = [c for c in leading if c >= 2 and any(_routes_to(modules[g], c) for g in gates)]
    return routed[0] if len(routed) == 1 else None


def _experts_held(param: Tensor) -> range:
    """The experts whose rows of a fused parameter are here; empty unless the local rows are one range."""
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


def _sibling_gates(modules: Mapping[str, nn.Module], name: str) -> tuple[str, ...]:
    """Gates beside this module; or beside the module above, if that holds nothing else.

    The latter is the case in an elastic mixture.
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


def split_operator(
    op: Operator,
    shapes: Mapping[str, Sequence[int]],
    bytes_of: Callable[[ParameterRows], int],
    max_bytes: int,
    rows_allowed: Callable[[str], bool],
) -> list[Operator]:
    """Cut an operator larger than ``max_bytes``, between rows too where ``rows_allowed``.

    Pieces that cannot be cut further stay larger.
    """
    if op.kind is OperatorKind.EXPERT or sum(map(bytes_of, op.members)) <= max_bytes:
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
