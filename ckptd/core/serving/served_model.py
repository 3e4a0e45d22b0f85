"""What of a decoder model can be split over devices, and which bytes of its weights each part is (pure).

Three kinds of units are split (see `unit_placement`):

* a *head*: a KV head of a layer with the query heads that read it (grouped-query attention). A query head
  never leaves its KV head, so no KV is there twice.
* a *block of columns*: ``column_block`` neighbouring columns of a dense MLP's inner dimension.
* an *expert* of a mixture, whole.

Everything else (embeddings, norms, routers) is on every device. A weight ``[out, in]`` is split along its
rows where the unit is on its output side (q, k, v, gate, up), and along its columns where the unit is on its
input side (o, down). So rows of a unit are one range of bytes, and columns are one range in each row.

Names and shapes are those of Hugging Face's checkpoints of the families in `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import Any

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""``model_type`` of the configurations whose tensors have names that are known here."""


class UnitKind(StrEnum):
    """What is placed."""

    HEAD = "head"
    COLUMNS = "columns"
    EXPERT = "expert"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A decoder model; sizes are counts, not bytes.

    Args:
        family: one of `FAMILIES`, for the names of tensors.
        layers: L.
        query_heads, kv_heads, head_dim: of attention in each layer.
        hidden: width of the residual stream.
        element_bytes: of an element of weights and of KV.
        columns: inner dimension of a dense MLP; 0 if no layer has one.
        column_block: how many columns are placed together.
        experts: of a layer with a mixture.
        expert_columns: inner dimension of an expert.
        expert_layers: numbers of layers with a mixture, ascending; the others have a dense MLP.
        attention_bias: q, k and v have biases.
    Raises:
        ValueError: it cannot be split so; says which numbers do not fit.
    """

    family: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    element_bytes: int = 2
    columns: int = 0
    column_block: int = 1
    experts: int = 0
    expert_columns: int = 0
    expert_layers: tuple[int, ...] = ()
    attention_bias: bool = False

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"the tensors of {self.family!r} are not known: {', '.join(FAMILIES)} are")
        for name in (
            *("layers", "query_heads", "kv_heads", "head_dim", "hidden", "element_bytes", "column_block"),
            *(("columns",) if self.dense_layers else ()),
            *(("experts", "expert_columns") if self.expert_layers else ()),
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.query_heads % self.kv_heads:
            raise ValueError(
                f"{self.query_heads} query heads do not divide among {self.kv_heads} KV heads: the heads of "
                "this model cannot be split"
            )
        if self.columns % self.column_block:
            raise ValueError(
                f"{self.columns} columns of the MLP are not a multiple of column_block {self.column_block}"
            )
        if list(self.expert_layers) != sorted(set(self.expert_layers) & set(range(self.layers))):
            raise ValueError(
                f"expert_layers {self.expert_layers}: pass numbers of the {self.layers} layers, ascending"
            )

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with a dense MLP."""
        return tuple(layer for layer in range(self.layers) if layer not in self.expert_layers)

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of one token, in one head of one layer."""
        return 2 * self.head_dim * self.element_bytes

    def layers_of(self, kind: UnitKind) -> tuple[int, ...]:
        """The layers of the model that have such units: row i of a placement is the i-th of these."""
        if kind is UnitKind.HEAD:
            return tuple(range(self.layers))
        return self.dense_layers if kind is UnitKind.COLUMNS else self.expert_layers

    def units_of(self, kind: UnitKind) -> int:
        """How many units each of these layers has."""
        if kind is UnitKind.HEAD:
            return self.kv_heads
        return self.columns // self.column_block if kind is UnitKind.COLUMNS else self.experts

    def unit_bytes(self, kind: UnitKind) -> int:
        """The weights of one unit of one layer, of a kind that the model has."""
        tensors = self.split_tensors(kind, self.layers_of(kind)[0])
        return sum(runs.total for tensor in tensors for runs in tensor.byte_runs([0]))

    def split_tensors(self, kind: UnitKind, layer: int) -> tuple[SplitTensor, ...]:
        """The tensors of a layer that have units of a kind.

        Raises:
            ValueError: the layer has none.
        """
        if layer not in self.layers_of(kind):
            raise ValueError(f"layer {layer} has no {kind} units")
        prefix, size = f"model.layers.{layer}.", self.element_bytes
        if kind is UnitKind.HEAD:
            return self._head_tensors(prefix + "self_attn.")
        if kind is UnitKind.COLUMNS:
            rows, columns = (self.columns, self.hidden), (self.hidden, self.columns)
            block, count = self.column_block, self.units_of(kind)
            return (
                SplitTensor(f"{prefix}mlp.gate_proj.weight", rows, 0, block, size, count),
                SplitTensor(f"{prefix}mlp.up_proj.weight", rows, 0, block, size, count),
                SplitTensor(f"{prefix}mlp.down_proj.weight", columns, 1, block, size, count),
            )
        inner, hidden = self.expert_columns, self.hidden
        mixtral = self.family == "mixtral"
        names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        block_name = "block_sparse_moe" if mixtral else "mlp"
        return tuple(
            SplitTensor(
                f"{prefix}{block_name}.experts.{e}.{name}.weight", (rows, columns), 0, rows, size, 1, e
            )
            for e in range(self.experts)
            for name, rows, columns in zip(
                names, (inner, inner, hidden), (hidden, hidden, inner), strict=True
            )
        )

    def _head_tensors(self, prefix: str) -> tuple[SplitTensor, ...]:
        size, count, hidden = self.element_bytes, self.kv_heads, self.hidden
        group, dim = self.query_heads // self.kv_heads * self.head_dim, self.head_dim
        found = []
        for name, unit in (("q", group), ("k", dim), ("v", dim)):
            rows = unit * count
            found.append(SplitTensor(f"{prefix}{name}_proj.weight", (rows, hidden), 0, unit, size, count))
            if self.attention_bias:
                found.append(SplitTensor(f"{prefix}{name}_proj.bias", (rows,), 0, unit, size, count))
        out = (hidden, group * count)
        return (*found, SplitTensor(f"{prefix}o_proj.weight", out, 1, group, size, count))


@dataclass(frozen=True, slots=True)
class ByteRuns:
    """Ranges of bytes at even distances: ``count`` times ``size``, every ``stride``, from ``offset`` on."""

    name: str
    offset: int
    size: int
    stride: int
    count: int

    @property
    def total(self) -> int:
        """Bytes."""
        return self.size * self.count

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Offset and size of each range."""
        return ((self.offset + i * self.stride, self.size) for i in range(self.count))


@dataclass(frozen=True, slots=True)
class SplitTensor:
    """A tensor in whose rows or columns units follow each other.

    Attributes:
        shape: ``[rows, columns]`` or ``[rows]``, row-major without gaps.
        dim: along which units follow each other.
        unit: rows or columns of one.
        element_bytes: of an element.
        count: how many units it has.
        first: number of its first unit.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    unit: int
    element_bytes: int
    count: int
    first: int = 0

    def byte_runs(self, units: Iterable[int]) -> tuple[ByteRuns, ...]:
        """Where units are, from the tensor's begin on; neighbours are one range. Other units are left out."""
        rows, columns = self.shape[0], self.shape[1] if len(self.shape) > 1 else 1
        row_bytes = columns * self.element_bytes
        unit_bytes = self.unit * (row_bytes if self.dim == 0 else self.element_bytes)
        found = []
        mine = sorted({u - self.first for u in units if 0 <= u - self.first < self.count})
        for _, group in groupby(enumerate(mine), lambda each: each[1] - each[0]):
            near = [unit for _, unit in group]
            offset, size = near[0] * unit_bytes, len(near) * unit_bytes
            if self.dim == 0 or size == row_bytes:
                whole = size if self.dim == 0 else size * rows
                found.append(ByteRuns(self.name, offset, whole, whole, 1))
            else:
                found.append(ByteRuns(self.name, offset, size, row_bytes, rows))
        return tuple(found)


def byte_runs(
    model: ServedModel, kind: UnitKind, layer: int, units: Iterable[int], header: Mapping[str, Any]
) -> tuple[ByteRuns, ...]:
    """What to read of a safetensors file for units of a layer.

    Args:
        header: of the file, by tensor: ``shape`` and ``data_offsets``.
    Returns:
        Offsets from the begin of the file's data, tensor by tensor.
    Raises:
        ValueError: the layer has no such unit, or the file lacks a tensor or has another one of its name.
    """
    tensors, wanted, found = model.split_tensors(kind, layer), tuple(units), []
    if strange := sorted(set(wanted) - set(range(model.units_of(kind)))):
        raise ValueError(f"{kind} units {strange} of layer {layer}: it has {model.units_of(kind)}")
    for tensor in tensors:
        runs = tensor.byte_runs(wanted)
        if not runs:
            continue
        if tensor.name not in header:
            raise ValueError(f"the file has no {tensor.name}: it is of another model, or another part of it")
        begin, end = header[tensor.name]["data_offsets"]
        shape, size = tuple(header[tensor.name]["shape"]), tensor.element_bytes
        for each in tensor.shape:
            size *= each
        if shape != tensor.shape or end - begin != size:
            raise ValueError(
                f"{tensor.name} has shape {list(shape)} and {end - begin} bytes in the file; the model that "
                f"is served has {list(tensor.shape)} and {size}: the file is of another model"
            )
        found += [ByteRuns(r.name, begin + r.offset, r.size, r.stride, r.count) for r in runs]
    return tuple(found)


def model_of_config(
    config: Mapping[str, Any], *, element_bytes: int = 2, column_block: int = 1
) -> ServedModel:
    """Read a Hugging Face ``config.json``.

    Raises:
        ValueError: the family is not known, its heads share one compressed KV, or sizes do not fit.
    """
    family = str(config.get("model_type"))
    if config.get("kv_lora_rank"):
        raise ValueError(
            f"the heads of {family!r} cannot be split: all read one compressed KV (kv_lora_rank "
            f"{config['kv_lora_rank']})"
        )
    if family not in FAMILIES:
        raise ValueError(f"the tensors of {family!r} are not known: {', '.join(FAMILIES)} are")
    if config.get("mlp_bias"):
        raise ValueError(f"the MLP of this {family!r} has biases (mlp_bias), which are not split yet")
    try:
        layers, heads, hidden = (
            int(config[key]) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")
        )
        columns = int(config["intermediate_size"])
        expert_layers: tuple[int, ...] = ()
        experts, inner = 0, 0
        if family == "mixtral":
            experts, inner, expert_layers = int(config["num_local_experts"]), columns, tuple(range(layers))
        elif family == "qwen3_moe":
            name = "num_experts" if "num_experts" in config else "num_local_experts"
            experts, inner = int(config[name]), int(config["moe_intermediate_size"])
            dense, step = set(config.get("mlp_only_layers") or ()), int(config.get("decoder_sparse_step", 1))
            expert_layers = tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)
    except KeyError as e:
        raise ValueError(f"the configuration of {family!r} has no {e.args[0]}: pass the whole of it") from e
    return ServedModel(
        family=family,
        layers=layers,
        query_heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        hidden=hidden,
        element_bytes=element_bytes,
        columns=columns if len(expert_layers) < layers else 0,
        column_block=column_block,
        experts=experts,
        expert_columns=inner,
        expert_layers=expert_layers,
        attention_bias=family == "qwen2" or bool(config.get("attention_bias")),
    )
