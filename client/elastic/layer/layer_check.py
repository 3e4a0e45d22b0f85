"""Whether the ranks have made the same layer: asked once, when it is made.

A rank that finds something wrong must not stop alone: the others would wait for it in their next
collective. So each tells what it has, or what is wrong, and all of them raise the same error.

Replicas of one expert must begin as the same bits: each is given the same gradient, so whatever
differs at first differs for ever. That is what happens when every rank draws its own random
weights, so their digests are compared, too.

Shapes: ``R`` ranks, ``E`` experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch.distributed as dist
import xxhash
from numpy.typing import ArrayLike, NDArray
from torch import nn

from ckptd.client.model.snapshot_layout import buffer_of
from ckptd.client.ranks.collectives import Collectives, refused
from ckptd.core.elastic.elastic_types import integers

__all__ = [
    "LayerAgreement",
    "ParamShape",
    "agree",
    "check_replicas_RE",
    "differing_replicas",
    "digests_of",
    "shapes_of",
]

_WHAT = "ElasticExperts cannot be made"


class ParamShape(msgspec.Struct, frozen=True):
    """A parameter of an expert."""

    name: str
    size: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        out = 1
        for length in self.size:
            out *= length
        return out


class LayerAgreement(msgspec.Struct, frozen=True):
    """What all ranks have alike.

    Args:
        replicas_RE: replicas of each expert on each rank.
        nodes_R: the number of each rank's node; None: not told.
        shapes_E: the parameters of each expert, in the order of ``named_parameters()``.
    """

    replicas_RE: NDArray[np.int64]
    nodes_R: NDArray[np.int64] | None
    shapes_E: tuple[tuple[ParamShape, ...], ...]


class _LayerHere(msgspec.Struct, frozen=True):
    """What one rank has made."""

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
    """Check this rank's part of the layer, and that the others have made the same; a collective call.

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
    return LayerAgreement(replicas, nodes_R, _shapes(made, replicas.shape[1]))


def digests_of(module: nn.Module) -> str:
    """Of the bits of all parameters; empty while some have none (the meta device)."""
    digest = xxhash.xxh3_128()
    for param in module.parameters():
        if param.is_meta:
            return ""
        digest.update(buffer_of(param.detach().cpu().contiguous()))
    return digest.hexdigest()


def differing_replicas(weights: Sequence[Mapping[int, str]]) -> dict[int, list[int]]:
    """The experts whose replicas are not all the same bits, each with its holders.

    Args:
        weights: by rank, the digest of each expert that it holds; empty: not known.
    """
    found: dict[int, dict[int, str]] = {}
    for rank, held in enumerate(weights):
        for expert, digest in held.items():
            if digest:
                found.setdefault(expert, {})[rank] = digest
    return {e: sorted(by_rank) for e, by_rank in found.items() if len(set(by_rank.values())) > 1}


def check_replicas_RE(replicas_RE: ArrayLike, ranks: int) -> NDArray[np.int64]:
    """A placement of one layer on so many ranks.

    Raises:
        ValueError: it is none, or an expert has no holder.
    """
    replicas = integers(replicas_RE, "replicas_RE", ndim=2)
    if len(replicas) != ranks or not replicas.size:
        raise ValueError(
            f"replicas_RE has the shape {replicas.shape}: it needs a row for each of the {ranks} "
            "ranks of the process group, "
            "and a column for each expert"
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
                    "gradient would be summed twice; "
                    "give each expert its own, or share it outside the layer"
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


def shapes_of(module: nn.Module) -> tuple[ParamShape, ...]:
    """The parameters of an expert, in the order of ``named_parameters()``."""
    return tuple(
        ParamShape(name, tuple(param.shape), str(param.dtype).removeprefix("torch."))
        for name, param in module.named_parameters()
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
            f"ElasticExperts cannot be made: the replicas of expert {expert} on ranks {holders} "
            "have different weights: "
            "load them from one source, or draw them from a generator that is seeded by the expert's number"
        )


def _shapes(made: Sequence[_LayerHere], num_experts: int) -> tuple[tuple[ParamShape, ...], ...]:
    everywhere = {expert: shapes for one in made for expert, shapes in one.shapes.items()}
    return tuple(everywhere[expert] for expert in range(num_experts))


def _named(experts: Sequence[int]) -> str:
    return f"expert{'s' if len(experts) > 1 else ''} {', '.join(map(str, experts))}"
