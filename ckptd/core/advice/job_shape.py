"""A job in numbers: the operators of one rank, their bytes in a snapshot, and their part of the compute.

A rank captures its share of what several ranks hold: each operator once over its replicas. So a snapshot of
the job has every parameter once, however the ranks are laid out; the layout decides how evenly that is
spread.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import MappingProxyType

from ckptd.core.snapshot_policy import OperatorCost, OperatorKind


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The parameters of a transformer, counted from its published configuration.

    Args:
        layers: those with routed experts; if ``experts`` is 0, all.
        dense: parameters of such a layer that every token uses: attention, norms, shared experts.
        router: parameters of its gate.
        experts: routed experts of a layer, and ``active``, how many a token uses.
        expert: parameters of an expert.
        other: embeddings, head, and layers without routed experts.
    """

    layers: int
    dense: int
    other: int
    experts: int = 0
    active: int = 0
    expert: int = 0
    router: int = 0

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.other + self.layers * (self.dense + self.router + self.experts * self.expert)

    @property
    def active_parameters(self) -> int:
        """Those that a token uses."""
        return self.other + self.layers * (self.dense + self.router + self.active * self.expert)


def _ffn(hidden: int, inner: int) -> int:
    return 3 * hidden * inner


def _attention(hidden: int, heads: int, kv_heads: int, head: int = 128) -> int:
    return 2 * hidden * heads * head + 2 * hidden * kv_heads * head


def _embeddings(hidden: int, vocabulary: int) -> int:
    return 2 * hidden * vocabulary


# Multi-head latent attention of DeepSeek-V3: query and key-value projections of low rank, and the output's.
_MLA = 7168 * 1536 + 1536 * 24576 + 7168 * 576 + 512 * 32768 + 16384 * 7168

MODELS = MappingProxyType(
    {
        "deepseek-moe-16b": ModelShape(
            27,
            _attention(2048, 16, 16) + 2 * _ffn(2048, 1408),
            _embeddings(2048, 102400) + _attention(2048, 16, 16) + _ffn(2048, 10944),
            64,
            6,
            _ffn(2048, 1408),
            2048 * 64,
        ),
        "deepseek-v3": ModelShape(
            58,
            _MLA + _ffn(7168, 2048),
            _embeddings(7168, 129280) + 3 * (_MLA + _ffn(7168, 18432)),
            256,
            8,
            _ffn(7168, 2048),
            7168 * 256,
        ),
        "llama3-8b": ModelShape(32, _attention(4096, 32, 8) + _ffn(4096, 14336), _embeddings(4096, 128256)),
        "llama3-70b": ModelShape(80, _attention(8192, 64, 8) + _ffn(8192, 28672), _embeddings(8192, 128256)),
        "mixtral-8x7b": ModelShape(
            32,
            _attention(4096, 32, 8),
            _embeddings(4096, 32000),
            8,
            2,
            _ffn(4096, 14336),
            4096 * 8,
        ),
        "qwen3-30b-a3b": ModelShape(
            48,
            _attention(2048, 32, 4),
            _embeddings(2048, 151936),
            128,
            8,
            _ffn(2048, 768),
            2048 * 128,
        ),
        "qwen3-235b-a22b": ModelShape(
            94,
            _attention(4096, 64, 4),
            _embeddings(4096, 151936),
            128,
            8,
            _ffn(4096, 1536),
            4096 * 128,
        ),
    }
)


_PARTS = 64


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of a parameter: of the weights that compute, and of all its state."""

    compute: int
    state: int


PRECISIONS = MappingProxyType(
    {
        "bf16-mixed": Precision(2, 14),  # bf16 weights, float32 masters and two moments
        "bf16": Precision(2, 6),  # weights and two moments, all bf16
        "fp32": Precision(4, 12),
        "fp8-mixed": Precision(1, 13),  # fp8 weights, float32 masters and two moments
        "fp8-bf16": Precision(1, 11),  # fp8 weights, bf16 masters, float32 moments
        "fp8-low": Precision(1, 6),  # fp8 weights, bf16 masters, fp8 and bf16 moments
        "fp8": Precision(1, 4),  # fp8 weights, which are their masters, fp8 and bf16 moments
    }
)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a job is laid out.

    Args:
        gpus: ranks of the job.
        stages: of a pipeline.
        expert_ranks: ranks that share the experts of a layer.

    Raises:
        ValueError: the numbers do not fit each other.
    """

    gpus: int
    stages: int = 1
    expert_ranks: int = 1

    def __post_init__(self) -> None:
        if min(self.gpus, self.stages, self.expert_ranks) < 1:
            raise ValueError(
                f"{self.gpus} GPUs, {self.stages} stages, {self.expert_ranks} ranks of experts: each must be "
                "1 or more"
            )
        if self.gpus % (self.stages * self.expert_ranks):
            raise ValueError(
                f"{self.gpus} GPUs are no multiple of {self.stages} stages x {self.expert_ranks} ranks of "
                "experts"
            )


@dataclass(frozen=True, slots=True)
class RankShape:
    """What a rank captures.

    Attributes:
        operators: with their bytes in its snapshots.
        compute: of each operator, the parameters that compute, for each token of the rank. Only their ratio
            counts.
        num_experts: of a whole layer, and ``experts_here``, how many of them the rank has; 0: not known.
        selectable: one rank decides of each of its experts, so the policy "selected" chooses among them.
        expert_ranks: ranks that hold the same experts. Each is captured whole by one of them; ``operators``
            have the mean.
        dense_bytes: of a snapshot with all state; summed up once, for each choice that is rated asks for it.
    """

    operators: tuple[OperatorCost, ...]
    compute: tuple[float, ...]
    num_experts: int = 0
    experts_here: int = 0
    selectable: bool = False
    expert_ranks: int = 1
    dense_bytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dense_bytes", sum(operator.anchor_bytes for operator in self.operators))


def rank_shape(model: ModelShape, layout: Layout, precision: Precision) -> RankShape:
    """The rank with the most state: of a stage with one layer more than others, if there are such, and with
    half of what is outside the layers.

    Raises:
        ValueError: fewer layers than stages, or experts that the ranks cannot share evenly.
    """
    if layout.stages > model.layers:
        raise ValueError(f"{layout.stages} stages of a model with {model.layers} layers")
    if model.experts % layout.expert_ranks or (not model.experts and layout.expert_ranks > 1):
        raise ValueError(
            f"{model.experts} experts of a layer cannot be shared evenly by {layout.expert_ranks} ranks"
        )
    replicas = layout.gpus // layout.stages
    found = list(_operators(model, layout, precision, replicas))
    return RankShape(
        tuple(operator for operator, _ in found),
        tuple(compute for _, compute in found),
        model.experts,
        model.experts // layout.expert_ranks,
        model.experts > 0,
        replicas // layout.expert_ranks,
    )


def measured_shape(dense_bytes: int, snapshot_bytes: int, window: int) -> RankShape:
    """A rank of which two sizes are known: equal parts, of which each computes as much.

    Args:
        dense_bytes: of all its state.
        snapshot_bytes: of one snapshot in a sliding window of this length. In a window of 1 it says nothing
            of the compute weights; then state is taken to be seven times as large, as with bf16 weights.
    Raises:
        ValueError: a snapshot is larger than all state.
    """
    if not 0 < snapshot_bytes <= dense_bytes:
        raise ValueError(f"snapshots of {snapshot_bytes} bytes, of {dense_bytes} bytes of state")
    compute = dense_bytes / 7
    if window > 1:
        compute = max(0.0, (snapshot_bytes - dense_bytes / window) / (1 - 1 / window))
    part = OperatorCost(
        "part", OperatorKind.DENSE, dense_bytes // _PARTS, min(int(compute), dense_bytes) // _PARTS
    )
    return RankShape((part,) * _PARTS, (1.0,) * _PARTS)


def measured_partial_shape(
    dense_bytes: int, snapshot_bytes: int, window: int, num_experts: int = 0
) -> RankShape:
    """A rank with partial snapshots of which two sizes are known: what every snapshot has, and experts.

    Args:
        dense_bytes: of all its state.
        snapshot_bytes: of one snapshot, with one of ``window`` parts of the experts; ``window`` is above 1.
        num_experts: of the largest layer; 0: not known.
    Raises:
        ValueError: a snapshot is larger than all state.
    """
    if not 0 < snapshot_bytes <= dense_bytes:
        raise ValueError(f"snapshots of {snapshot_bytes} bytes, of {dense_bytes} bytes of state")
    experts = min(dense_bytes, math.ceil((dense_bytes - snapshot_bytes) * window / (window - 1)))
    always = OperatorCost("always", OperatorKind.DENSE, dense_bytes - experts, 0)
    expert = OperatorCost("expert", OperatorKind.EXPERT, experts // _PARTS, 0, layer=0)
    return RankShape((always, *(expert,) * _PARTS), (1.0,) * (1 + _PARTS), num_experts, num_experts)


def _operators(
    model: ModelShape, layout: Layout, precision: Precision, replicas: int
) -> Iterator[tuple[OperatorCost, float]]:
    def operator(name: str, kind: OperatorKind, parameters: float, copies: int, layer: int) -> OperatorCost:
        share = parameters / copies
        return OperatorCost(
            name, kind, math.ceil(share * precision.state), math.floor(share * precision.compute), layer=layer
        )

    other = model.other if layout.stages == 1 else model.other / 2
    yield operator("other", OperatorKind.DENSE, other, replicas, -1), other
    for layer in range(math.ceil(model.layers / layout.stages)):
        yield operator(f"{layer}.dense", OperatorKind.DENSE, model.dense, replicas, layer), model.dense
        if model.router:
            yield operator(f"{layer}.gate", OperatorKind.GATE, model.router, replicas, layer), model.router
        for expert in range(model.experts // layout.expert_ranks if model.experts else 0):
            name, copies = f"{layer}.experts.{expert}", replicas // layout.expert_ranks
            cost = operator(name, OperatorKind.EXPERT, model.expert, copies, layer)
            # It computes for tokens of all ranks that share the experts, others for those of their rank.
            yield cost, model.expert * model.active / model.experts * layout.expert_ranks
