"""What the ranks of a layer compare: the layer when it is made, and the inputs of every call.

A rank that finds an error must not stop alone: the others would wait for it in their next
collective call. So each reports what it has or what is wrong, and all of them raise the same error.

Replicas of one expert must begin with the same bits: they get the same gradients, so an initial
difference stays. It occurs when every rank draws its own random weights; therefore their digests
are compared, too.

A call exchanges counts anyway, to plan which rank computes which tokens. They also carry what
would otherwise fail or hang on some ranks only: an unusable input, another width or dtype, a
forward without gradients.

Shapes: ``T`` tokens, ``K`` choices of each, ``H`` their width, ``R`` ranks, ``E`` experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import xxhash
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from ckptd.client.model.snapshot_layout import buffer_of
from ckptd.client.ranks.collectives import Collectives, refused
from ckptd.core.elastic.elastic_types import integers

_WHAT = "ElasticExperts cannot be made"


class ParamShape(msgspec.Struct, frozen=True):
    """A parameter of an expert."""

    name: str
    size: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        return math.prod(self.size)


class LayerAgreement(msgspec.Struct, frozen=True):
    """The facts that are equal on all ranks.

    Args:
        replicas_RE: replicas of each expert on each rank.
        nodes_R: the number of each rank's node; None: unknown.
        shapes_E: the parameters of each expert, in the order of ``named_parameters()``.
    """

    replicas_RE: NDArray[np.int64]
    nodes_R: NDArray[np.int64] | None
    shapes_E: tuple[tuple[ParamShape, ...], ...]


class _LayerHere(msgspec.Struct, frozen=True):
    """One rank's part of the layer: the digest of the placement, and its experts."""

    placement: str = ""
    shapes: dict[int, tuple[ParamShape, ...]] = {}
    weights: dict[int, str] = {}


def agree(
    experts: Mapping[int, nn.Module],
    replicas_RE: ArrayLike,
    nodes: ArrayLike | None,
    reduce: str,
    group: Any,
) -> LayerAgreement:
    """Check this rank's part of the layer, and that all ranks have made the same; a collective call.

    Args:
        reduce: "mean" or "sum".
    Raises:
        ValueError: on every rank, if any part is wrong or does not fit the others.
    """
    checked = list[tuple[NDArray[np.int64], NDArray[np.int64] | None]]()

    def make() -> _LayerHere:
        if reduce not in ("mean", "sum"):
            raise ValueError(f"reduce={reduce!r}: choose 'mean' or 'sum'")
        checked.append(_checked(experts, replicas_RE, nodes, group))
        return _layer_here(experts, *checked[0], reduce)

    made = Collectives.of_group(group).check(make, _LayerHere, what=_WHAT)
    _raise_unless_same(made)
    ((replicas, nodes_R),) = checked
    everywhere = {expert: shapes for one in made for expert, shapes in one.shapes.items()}
    return LayerAgreement(replicas, nodes_R, tuple(everywhere[e] for e in range(replicas.shape[1])))


def digests_of(module: nn.Module) -> str:
    """Of the bits of all parameters; empty on the meta device."""
    digest = xxhash.xxh3_128()
    for param in module.parameters():
        if param.is_meta:
            return ""
        digest.update(buffer_of(param.detach().cpu().contiguous()))
    return digest.hexdigest()


def shapes_of(module: nn.Module) -> tuple[ParamShape, ...]:
    """The parameters of an expert, in the order of ``named_parameters()``."""
    return tuple(
        ParamShape(name, tuple(param.shape), str(param.dtype).removeprefix("torch."))
        for name, param in module.named_parameters()
    )


def differing_replicas(weights: Sequence[Mapping[int, str]]) -> dict[int, list[int]]:
    """The experts whose replicas have different bits, each with its holders.

    Args:
        weights: by rank, the digest of each expert that it holds; empty: unknown.
    """
    found: dict[int, dict[int, str]] = {}
    for rank, held in enumerate(weights):
        for expert, digest in held.items():
            if digest:
                found.setdefault(expert, {})[rank] = digest
    return {e: sorted(by_rank) for e, by_rank in found.items() if len(set(by_rank.values())) > 1}


def check_replicas_RE(replicas_RE: ArrayLike, ranks: int) -> NDArray[np.int64]:
    """The placement of one layer on that many ranks, as an array.

    Raises:
        ValueError: it is no placement, or an expert has no holder.
    """
    replicas = integers(replicas_RE, "replicas_RE", ndim=2)
    if len(replicas) != ranks or not replicas.size:
        raise ValueError(
            f"replicas_RE has the shape {replicas.shape}: it needs a row for each of the {ranks} "
            "ranks of the process group, and a column for each expert"
        )
    if int(replicas.min()) < 0:
        raise ValueError("replicas_RE has negative numbers of replicas")
    lonely = np.nonzero(replicas.sum(axis=0) == 0)[0].tolist()
    if lonely:
        raise ValueError(f"no rank holds {_named(lonely)}: place at least one replica of every expert")
    return replicas


def _checked(
    experts: Mapping[int, nn.Module], replicas_RE: ArrayLike, nodes: ArrayLike | None, group: Any
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    ranks = dist.get_world_size(group)
    replicas = check_replicas_RE(replicas_RE, ranks)
    nodes_R = None if nodes is None else integers(nodes, "nodes", ndim=1)
    if nodes_R is not None and len(nodes_R) != ranks:
        raise ValueError(f"nodes names the nodes of {len(nodes_R)} ranks, and there are {ranks}")
    _check_experts(experts, np.nonzero(replicas[dist.get_rank(group)])[0].tolist())
    return replicas, nodes_R


def _check_experts(experts: Mapping[int, nn.Module], wanted: list[int]) -> None:
    if not isinstance(experts, Mapping) or not all(
        isinstance(module, nn.Module) for module in experts.values()
    ):
        raise ValueError("experts must be a dict of the expert's number and its module, or a ModuleList")
    if lacking := [expert for expert in wanted if expert not in experts]:
        raise ValueError(f"replicas_RE places {_named(lacking)} here, but experts has no such module")
    if more := [expert for expert in experts if expert not in wanted]:
        raise ValueError(
            f"experts has a module of {_named(more)}, of which replicas_RE places no replica here"
        )
    owner: dict[int, int] = {}
    for expert, module in experts.items():
        for name, param in module.named_parameters():
            if owner.setdefault(id(param), expert) != expert:
                raise ValueError(
                    f"experts {owner[id(param)]} and {expert} share the parameter {name}: its "
                    "gradient would be summed twice; give each expert its own, or share it outside "
                    "the layer"
                )


def _layer_here(
    experts: Mapping[int, nn.Module],
    replicas: NDArray[np.int64],
    nodes_R: NDArray[np.int64] | None,
    reduce: str,
) -> _LayerHere:
    digest = xxhash.xxh3_128(f"{reduce} {replicas.shape} {nodes_R is None} ".encode())
    digest.update(replicas.tobytes())
    if nodes_R is not None:
        digest.update(nodes_R.tobytes())
    return _LayerHere(
        placement=digest.hexdigest(),
        shapes={expert: shapes_of(module) for expert, module in experts.items()},
        weights={expert: digests_of(module) for expert, module in experts.items()},
    )


def _raise_unless_same(made: Sequence[_LayerHere]) -> None:
    others = [rank for rank, one in enumerate(made) if one.placement != made[0].placement]
    if others:
        trouble = (
            "another placement than rank 0 (replicas_RE, nodes and reduce must be the same on all ranks)"
        )
        raise refused(_WHAT, dict.fromkeys(others, trouble))
    first: dict[int, int] = {}
    for rank, one in enumerate(made):
        for expert, shapes in one.shapes.items():
            known = first.setdefault(expert, rank)
            if shapes != made[known].shapes[expert]:
                raise refused(_WHAT, {rank: f"expert {expert} has other parameters than on rank {known}"})
    for expert, holders in differing_replicas([one.weights for one in made]).items():
        raise ValueError(
            f"{_WHAT}: the replicas of expert {expert} on ranks {holders} have different weights: "
            "load them from one source, or draw them from a generator that is seeded by the expert's number"
        )


def _named(experts: Sequence[int]) -> str:
    return f"expert{'s' if len(experts) > 1 else ''} {', '.join(map(str, experts))}"


# -- the inputs of a call ----------------------------------------------------------------------------

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes of tokens and gradients; ranks exchange a dtype as its index here."""


class _Problem(IntEnum):
    """The reason why a rank cannot take part in a call."""

    NONE = 0
    TOKENS = 1
    EXPERTS = 2
    WEIGHTS = 3
    NO_SUCH_EXPERT = 4
    UNSUMMED = 5


_WORDS = {
    _Problem.TOKENS: "tokens are not a tensor [T, H] of float16, bfloat16, float32 or float64",
    _Problem.EXPERTS: (
        "experts are not a tensor [T, K] of int32 or int64, with a row for each token and a choice at least"
    ),
    _Problem.WEIGHTS: "weights are not floating point of the shape of experts, [T, K]",
    _Problem.NO_SUCH_EXPERT: "a token is routed to an expert that there is not: experts are numbered from 0",
    _Problem.UNSUMMED: (
        "an expert's weights were changed by a gradient that was not summed over its replicas, which "
        "now differ: call sync_gradients() after each backward, before the optimizer's step"
    ),
}

# The columns before the counts in a rank's row.
_PROBLEM, _WIDTH, _DTYPE, _GRAD_MODE, _TOKENS_LEARN, _EXPERTS_LEARN, _HEAD = range(7)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The facts of a call, the same on all ranks.

    Args:
        counts_RE: tokens of each rank for each expert.
        counts: the same on the device of this rank's tokens; its rows may not be contiguous.
        tokens_learn: the tokens of some rank need gradients.
        experts_learn: the outputs of some rank's experts do.
    """

    counts_RE: NDArray[np.int64]
    counts: Tensor
    tokens_learn: bool
    experts_learn: bool


def exchange_inputs(
    tokens_TH: Tensor,
    experts_TK: Tensor,
    weights_TK: Tensor,
    *,
    num_experts: int,
    trained: bool,
    unsummed: bool,
    group: Any,
) -> Inputs:
    """Exchange the facts of a call; a collective call.

    Args:
        trained: a parameter of this rank's experts needs a gradient.
        unsummed: its experts' weights were changed by gradients that were not summed.
    Raises:
        ValueError: on every rank, if any of them cannot go on; names the ranks and the reasons.
    """
    problem = _problem_of(tokens_TH, experts_TK, weights_TK)
    head = [problem, 0, 0, torch.is_grad_enabled(), 0, trained]
    if not problem:
        head[_WIDTH], head[_DTYPE] = tokens_TH.shape[1], DTYPES.index(tokens_TH.dtype)
        head[_TOKENS_LEARN] = tokens_TH.requires_grad
    if unsummed:
        head[_PROBLEM] = _Problem.UNSUMMED
    row = torch.zeros(_HEAD + num_experts, dtype=torch.int64, device=tokens_TH.device)
    row[:_HEAD] = torch.tensor([int(value) for value in head])
    if not head[_PROBLEM]:
        _count(experts_TK, row)
    everything = row.new_empty((dist.get_world_size(group), len(row)))
    dist.all_gather(list(everything.unbind()), row, group=group)
    return _agreed(everything.cpu().numpy(), everything)


def _problem_of(tokens_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> _Problem:
    if tokens_TH.ndim != 2 or tokens_TH.dtype not in DTYPES:
        return _Problem.TOKENS
    integer = experts_TK.dtype in (torch.int32, torch.int64)
    fits = experts_TK.ndim == 2 and len(experts_TK) == len(tokens_TH) and experts_TK.shape[1] > 0
    if not (integer and fits):
        return _Problem.EXPERTS
    if weights_TK.shape != experts_TK.shape or not weights_TK.is_floating_point():
        return _Problem.WEIGHTS
    return _Problem.NONE


def _count(experts_TK: Tensor, row: Tensor) -> None:
    """Write the number of pairs for each expert, or that a pair has none; does not wait for the device."""
    num_experts = len(row) - _HEAD
    wrong = ((experts_TK < 0) | (experts_TK >= num_experts)).any()
    row[_PROBLEM] = torch.where(wrong, int(_Problem.NO_SUCH_EXPERT), 0)
    ids = experts_TK.reshape(-1).to(torch.int64).clamp(0, num_experts - 1)
    row[_HEAD:].scatter_add_(0, ids, torch.ones_like(ids))


def _agreed(rows: NDArray[np.int64], on_device: Tensor) -> Inputs:
    troubled = {rank: _Problem(code) for rank, code in enumerate(rows[:, _PROBLEM].tolist()) if code}
    if troubled:
        words = "; ".join(f"rank {rank}: {_WORDS[why]}" for rank, why in troubled.items())
        raise ValueError(f"the layer of experts was not computed: {words}")
    _check_same(rows[:, _WIDTH].tolist(), "tokens have other widths", str)
    _check_same(rows[:, _DTYPE].tolist(), "tokens have other dtypes", lambda code: str(DTYPES[code]))
    _check_same(
        rows[:, _GRAD_MODE].tolist(),
        "some run it with gradients, some without",
        lambda on: "with" if on else "without",
    )
    learning = bool(rows[0, _GRAD_MODE])
    tokens_learn = learning and bool(rows[:, _TOKENS_LEARN].any())
    experts_learn = tokens_learn or (learning and bool(rows[:, _EXPERTS_LEARN].any()))
    return Inputs(rows[:, _HEAD:], on_device[:, _HEAD:], tokens_learn, experts_learn)


def _check_same(values: Sequence[int], trouble: str, word: Callable[[int], str]) -> None:
    if len(set(values)) > 1:
        shown = ", ".join(f"rank {rank}: {word(value)}" for rank, value in enumerate(values))
        raise ValueError(f"the layer of experts was not computed: the ranks disagree, {trouble} ({shown})")
