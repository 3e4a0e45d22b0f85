"""The layout of images: which tensors, in which order, from where; and the rows and bytes of tensors.

One ``PhasePlan`` per phase of the schedule is static: the same names, dtypes, shapes and offsets in
every snapshot of that phase. Adjacent rows of a fused tensor at the same level share one entry.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ckptd.client import values
from ckptd.client.model.live_state import LiveState, local
from ckptd.client.model.operators import Operator, ParameterRows
from ckptd.client.optimizers.optimizer_probe import StateSpec
from ckptd.core.snapshot_policy import Level
from ckptd.storage.gradient_block import block_bytes_max
from ckptd.storage.image import ImageLayout
from ckptd.storage.image_format import SCALARS, TensorEntry

SAFETENSORS_DTYPES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
# What a fresh process must know to rebuild optimizer state, the same in every image of a plan.
STATIC = "ckptd.optim_layout"
_PLAIN = (Tensor, torch.nn.Parameter)
# Prefix of an entry's name, by the kind of its source. `param` comes last: every name has its empty prefix.
_PREFIXES = {
    "master": "master/",
    "buffer": "buffer/",
    "packed": "ckptd.optim_scalars/",
    "optim": "optim/",
    "param": "",
}

# Parameter name -> ranges of its rows, merged and in order.
Rows = dict[str, list[tuple[int, int]]]
# (parameter, key) of each 0-dimensional optimizer state tensor, by dtype, in a stable order.
PackedOrder = Mapping[torch.dtype, list[tuple[str, str]]]


@dataclass(frozen=True, slots=True)
class EntrySource:
    """The source of an entry's bytes.

    ``kind``: param, master, optim, buffer, or packed (0-dimensional state).
    """

    kind: str
    name: str
    key: str = ""
    start: int | None = None
    stop: int | None = None
    dtype: torch.dtype = torch.float32

    @property
    def tensor_name(self) -> str:
        """The name of the whole live tensor; ``master/…`` or ``optim/…`` belongs to a parameter."""
        return self.name if self.kind in ("param", "buffer") else _whole_name(self)

    def range(self, total: int) -> tuple[int, int]:
        """Its rows, if the whole has ``total``."""
        return (0, total) if self.start is None or self.stop is None else (self.start, self.stop)


@dataclass(frozen=True, slots=True)
class PhasePlan:
    """The layout of one phase's image, and the source and offset of each of ``layout.entries``."""

    phase: int
    anchored: frozenset[int]
    layout: ImageLayout
    sources: tuple[EntrySource | None, ...]
    offsets: tuple[int, ...]
    scalars_offset: int
    scalars_capacity: int
    static_offset: int
    static: bytes
    packed: PackedOrder


_MOST_ENTRIES = 1 << 16

# A tensor of an image, and where its bytes come from.
Entry = tuple[TensorEntry, EntrySource]


def entry_name(source: EntrySource) -> str:
    rows = "" if source.start is None else f"[{source.start}:{source.stop}]"
    return f"{_whole_name(source)}{rows}"


def _whole_name(source: EntrySource) -> str:
    key = f"{source.key}/" if source.kind == "optim" else ""
    return f"{_PREFIXES[source.kind]}{key}{source.name}"


def parse_entry_name(name: str, dtype: torch.dtype) -> EntrySource:
    """The inverse of ``entry_name``."""
    kind = next(kind for kind, prefix in _PREFIXES.items() if name.startswith(prefix))
    name, key = name.removeprefix(_PREFIXES[kind]), ""
    if kind == "optim":
        key, _, name = name.partition("/")
    start = stop = None
    if name.endswith("]") and kind != "buffer":
        name, _, rows = name[:-1].rpartition("[")
        start, stop = map(int, rows.split(":"))
    return EntrySource(kind, name, key, start, stop, dtype)


def member_bytes(
    binding: LiveState,
    member: ParameterRows,
    compute_dtypes: Mapping[str, torch.dtype],
    level: Level,
) -> int:
    """Bytes of this member in a snapshot at this level."""
    name = member.param
    tensor = local(binding.params[name])
    share = 1.0
    if member.start is not None:
        assert member.stop is not None
        share = (member.stop - member.start) / max(tensor.shape[0], 1)
    if name in binding.elsewhere | binding.inseparable:
        level = Level.ANCHOR  # whatever the plan says
    if level is Level.ABSENT:
        return 0
    if level is Level.COMPUTE:
        return round(tensor.numel() * share) * compute_dtypes.get(name, tensor.dtype).itemsize
    total = 0
    if level is Level.ANCHOR:
        total += tensor.numel() * tensor.dtype.itemsize
        if name in binding.masters:
            total += tensor.numel() * binding.masters[name].dtype.itemsize
    for spec in binding.specs(name):
        if spec.kind == "like" and spec.dtype is not None:
            total += tensor.numel() * spec.dtype.itemsize
        elif spec.kind == "tensor" and spec.dtype is not None and spec.shape is not None:
            total += int(torch.Size(spec.shape).numel()) * spec.dtype.itemsize
    return round(total * share)


@dataclass(frozen=True, slots=True)
class StateTable:
    """The known optimizer state: the part of a plan that its phases have in common.

    What images have in common is made once: thousands of entries of a phase are those of other phases, too,
    and training waits for a phase's plan.
    """

    specs: Mapping[str, tuple[StateSpec, ...]]
    packed: PackedOrder
    static: bytes
    buffers: tuple[Entry, ...]
    _rows: dict[str, int] = field(default_factory=dict)
    _entries: dict[tuple[str, int, int, Level, torch.dtype | None], tuple[Entry, ...]] = field(
        default_factory=dict
    )

    @classmethod
    def of(cls, binding: LiveState) -> StateTable:
        specs_of = {name: binding.specs(name) for name in binding.owner}
        scalars: dict[str, dict[str, list[object]]] = {}
        packed: dict[torch.dtype, list[tuple[str, str]]] = {}
        for name, specs in specs_of.items():
            scalars[name] = {}
            for spec in specs:
                if spec.kind == "scalar" and spec.dtype is not None:
                    scalars[name][spec.key] = [SAFETENSORS_DTYPES[spec.dtype], spec.on_host]
                    packed.setdefault(spec.dtype, []).append((name, spec.key))
        layout = {
            "keys": {name: [spec.key for spec in specs] for name, specs in specs_of.items()},
            "scalars": scalars,
            "packed": {SAFETENSORS_DTYPES[d]: [list(pair) for pair in pairs] for d, pairs in packed.items()},
        }
        planned = binding.buffer_specs.items()
        buffers = tuple(_pair(EntrySource("buffer", n, dtype=kind), shape) for n, (shape, kind) in planned)
        return cls(specs_of, packed, values.pack(layout, STATIC), buffers)

    def num_rows(self, binding: LiveState, name: str) -> int:
        """Rows of this parameter on this rank."""
        found = self._rows.get(name)
        if found is None:
            found = self._rows[name] = binding.num_rows(name)
        return found

    def entries(
        self,
        binding: LiveState,
        name: str,
        rows: tuple[int, int, Level],
        dtype: torch.dtype | None,
    ) -> tuple[Entry, ...]:
        """Rows of a parameter at a level: those of its weights in ``dtype`` (None: its own), and state."""
        key = (name, *rows, dtype)
        found = self._entries.get(key)
        if found is None:
            if len(self._entries) >= _MOST_ENTRIES:  # of orders that are gone: rows of fused experts
                self._entries.clear()
            found = self._entries[key] = tuple(_entries_of(binding, self, name, *rows, dtype))
        return found


@dataclass(frozen=True, slots=True)
class CapturedOperators:
    """The operators in a snapshot, by their numbers.

    Args:
        anchored: with weights and optimizer state.
        compute: with the weights in which the model computes.
        states: with the optimizer's state alone.
        left_out: those that another rank captures at the same levels
            (``ckptd.client.model.replicated_params``).
    """

    anchored: Iterable[int]
    compute: Iterable[int] = ()
    states: Iterable[int] = ()
    left_out: frozenset[int] = frozenset()


def build_phase(
    binding: LiveState,
    operators: Sequence[Operator],
    captured: CapturedOperators,
    *,
    state: StateTable,
    phase: int,
    compute_dtypes: Mapping[str, torch.dtype],
    identity: Mapping[str, str],
    scalars_capacity: int,
) -> PhasePlan:
    """The plan of a snapshot."""
    levels: dict[str, list[_RowsAtLevel]] = {}
    anchored, compute, states = frozenset(captured.anchored), captured.compute, captured.states
    for level, indices in ((Level.ANCHOR, anchored), (Level.COMPUTE, compute), (Level.STATE, states)):
        for index in indices:
            for m in operators[index].members if index not in captured.left_out else ():
                start, stop = m.range(state.num_rows(binding, m.param))
                levels.setdefault(m.param, []).append((start, stop, level))
    # An update by another rank, or by all ranks together, cannot be recomputed from an older anchor
    # here: such parameters are in every snapshot.
    always = binding.elsewhere | binding.inseparable
    levels.update({n: [(0, state.num_rows(binding, n), Level.ANCHOR)] for n in always})
    pairs: list[tuple[TensorEntry, EntrySource | None]] = []
    for name in (n for n in binding.params if n in levels):
        for rows in _merge_levels(levels[name]):
            dtype = compute_dtypes.get(name) if rows[2] is Level.COMPUTE else None
            pairs += state.entries(binding, name, rows, dtype)
    pairs += state.buffers
    for dtype, names in state.packed.items():
        pairs.append(_pair(EntrySource("packed", SAFETENSORS_DTYPES[dtype], dtype=dtype), (len(names),)))
    pairs.append((TensorEntry(SCALARS, "U8", (scalars_capacity,)), None))
    pairs.append((TensorEntry(STATIC, "U8", (len(state.static),)), None))
    mask = sum(1 << i for i in anchored)
    layout = ImageLayout.build(
        [e for e, _ in pairs], identity=identity, num_operators=len(operators), anchors=mask
    )
    by_name = {e.name: s for e, s in pairs}
    return PhasePlan(
        phase=phase,
        anchored=anchored,
        layout=layout,
        sources=tuple(by_name[e.name] for e in layout.entries),
        offsets=tuple(layout.offset_of(e.name) for e in layout.entries),
        scalars_offset=layout.offset_of(SCALARS),
        scalars_capacity=scalars_capacity,
        static_offset=layout.offset_of(STATIC),
        static=state.static,
        packed=state.packed,
    )


_RowsAtLevel = tuple[int, int, Level]


def _merge_levels(ranges: list[_RowsAtLevel]) -> list[_RowsAtLevel]:
    if len(ranges) == 1:
        return ranges
    merged: list[_RowsAtLevel] = []
    for start, stop, level in sorted(ranges):
        if merged and merged[-1][1] == start and merged[-1][2] == level:
            merged[-1] = (merged[-1][0], stop, level)
        else:
            merged.append((start, stop, level))
    return merged


def _entries_of(
    binding: LiveState,
    state: StateTable,
    name: str,
    start: int,
    stop: int,
    level: Level,
    dtype: torch.dtype | None,
) -> list[Entry]:
    """Rows of a parameter in ``dtype`` (None: its own), at a level; an anchor has masters and state."""
    param = local(binding.params[name])
    whole = param.ndim == 0 or (start == 0 and stop == param.shape[0])
    if not (whole or 0 <= start < stop <= param.shape[0]):
        # What is copied by address must lie within the tensor, with `python -O` too.
        raise ValueError(f"{name}[{start}:{stop}] is not in a tensor of {tuple(param.shape)}")
    a, b = (None, None) if whole else (start, stop)
    shape = tuple(param.shape) if whole else (stop - start, *param.shape[1:])
    pairs = []
    if level is not Level.STATE:
        pairs.append(_pair(EntrySource("param", name, "", a, b, dtype or param.dtype), shape))
    if level is Level.COMPUTE:
        return pairs
    if name in binding.masters and level is not Level.STATE:
        pairs.append(_pair(EntrySource("master", name, "", a, b, binding.masters[name].dtype), shape))
    for spec in state.specs.get(name, ()):
        if spec.kind == "like" and spec.dtype is not None:
            pairs.append(_pair(EntrySource("optim", name, spec.key, a, b, spec.dtype), shape))
        elif spec.kind == "tensor" and spec.dtype is not None and spec.shape is not None:
            assert whole, f"{name}: rows of a parameter whose optimizer state is not per row"
            pairs.append(_pair(EntrySource("optim", name, spec.key, None, None, spec.dtype), spec.shape))
    return pairs


def _pair(source: EntrySource, shape: Iterable[int]) -> Entry:
    name, dtype = entry_name(source), source.dtype
    if dtype not in SAFETENSORS_DTYPES:
        raise ValueError(
            f"{name} has dtype {dtype}, which an image cannot hold; supported: "
            f"{', '.join(map(str, SAFETENSORS_DTYPES))}"
        )
    return TensorEntry(name, SAFETENSORS_DTYPES[dtype], tuple(int(n) for n in shape)), source


# -- rows ------------------------------------------------------------------------------------------


def merge(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same rows in order, with touching ranges merged."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and merged[-1][1] >= start:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def common(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The rows that are in both."""
    pairs = ((max(a, c), min(b, d)) for a, b in one for c, d in other)
    return [(a, b) for a, b in pairs if a < b]


def rows_of_piece(tensor: Tensor, piece: EntrySource) -> Tensor:
    """The rows of a whole tensor that a piece covers; all of it, if the piece names none."""
    return tensor if piece.start is None else tensor[piece.start : piece.stop]


def rows_within(recorded: Tensor, piece: EntrySource, source: EntrySource) -> Tensor:
    """The rows of ``recorded``, which holds those of ``source``, that a piece of it covers."""
    if piece.start is None or (piece.start, piece.stop) == (source.start, source.stop):
        return recorded
    first = source.start or 0
    return recorded[piece.start - first : piece.stop - first]  # type: ignore[operator]


# -- bytes -----------------------------------------------------------------------------------------


def buffer_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, in place, for as long as the tensor lives.

    Unlike with numpy, its storage can be resized afterwards, and every dtype works.

    Raises:
        ValueError: it is not contiguous: its bytes would be those of others.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of {tuple(tensor.shape)} is not contiguous")
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def free_bytes(device: torch.device) -> int:
    """Bytes that this process may still allocate on a device; on the host within its memory cgroup."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # Memory that torch has reserved and does not use serves as well.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    available = re.search(r"^MemAvailable:\s+(\d+) kB", _text_of("/proc/meminfo"), re.MULTILINE)
    free = int(available[1]) * 1024 if available else sys.maxsize
    limit, used = (_text_of(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if limit.isdigit() and used.isdigit():
        free = min(free, int(limit) - int(used))
    return max(free, 0)


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:  # no such file on this system, so no such limit
        return ""


# -- gradients behind an image -----------------------------------------------------------------------


def whole_states(plan: PhasePlan) -> dict[str, dict[str, str]]:
    """Parameters whose weight and state a snapshot holds whole: the image's tensor of each state, by key."""
    found: dict[str, dict[str, str]] = {}
    cut = set()
    for source in plan.sources:
        if source is None or source.kind not in ("param", "master", "optim"):
            continue
        if source.start is not None:
            cut.add(source.name)
        elif source.kind == "optim":
            found.setdefault(source.name, {})[source.key] = entry_name(source)
    whole = {source.name for source in plan.sources if source is not None and source.kind == "param"}
    return {name: states for name, states in found.items() if name in whole - cut}


def gradient_room(binding: LiveState, plan: PhasePlan) -> int:
    """Bytes of a slot behind an image, for the gradients of all that a peer might compute."""
    sizes = list(_sizes(binding, plan))
    return block_bytes_max(sizes, len({binding.owner[name] for name, _ in sizes})) if sizes else 0


def computable(tensor: Tensor) -> bool:
    """Whether a peer can compute with this weight or gradient: plain, contiguous, on the CPU."""
    return type(tensor) in _PLAIN and tensor.device.type == "cpu" and tensor.is_contiguous()


def _sizes(binding: LiveState, plan: PhasePlan) -> Iterator[tuple[str, int]]:
    for name in whole_states(plan):
        weight = binding.held(name)
        if computable(weight):
            yield name, weight.numel() * weight.element_size()
