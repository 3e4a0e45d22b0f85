"""Which rank gives which part of a state to whom, when a job goes on with other ranks.

What a rank needs and its own node holds, it reads there. The rest comes from ranks on nodes that hold it:

- experts: as `ckptd.core.elastic.expert_transfers` shares them out, so that the busiest sender is
  done as early as possible;
- shards of experts: range by range, as `ckptd.core.elastic.shard_owners` cuts them; the weights of
  the replicas follow from them;
- dense units: largest first, each from the rank that has least to send so far;
- step scalars: rank r gets those of rank r of the world before, if there are any, or else those of
  the lowest rank of which there are some.

All ranks compute the same from the same.

Complexity: that of `plan_transfers`, and O(units * ranks^2) for the dense part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ckptd.core.elastic.elastic_types import Cluster, ExpertPlacement
from ckptd.core.elastic.expert_transfers import SNAPSHOT, plan_transfers
from ckptd.core.elastic.incarnations import Chosen, ExpertLayers, Unit
from ckptd.core.elastic.shard_owners import shard_gives
from ckptd.errors import LocalProtocolError

__all__ = ["Give", "Handover", "plan_handover"]

_NO_SHARDS: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True, order=True)
class Give:
    """A unit goes from one rank to another; from itself: it reads it on its node."""

    source: int
    target: int
    unit: Unit


@dataclass(frozen=True, slots=True)
class Handover:
    """Everything that ranks give each other, ordered by source, target and unit.

    Args:
        gives: units.
        scalars: for each rank, which rank reads the step scalars for it, and of which rank of the
            world before they are.
        sent_bytes: of each rank, to others.
        expert_moves: how many replicas of experts travel.
        from_snapshots: how many of the experts no node holds in a parked state, or not all of their shards.
    """

    gives: tuple[Give, ...]
    scalars: tuple[tuple[int, int], ...]
    sent_bytes: tuple[int, ...]
    expert_moves: int
    from_snapshots: int


def plan_handover(
    chosen: Chosen,
    layers: ExpertLayers,
    replicas_LRE: ArrayLike,
    node_of: Sequence[int],
    numels: Mapping[str, int] = _NO_SHARDS,
) -> Handover:
    """Decide who gives what; see the module.

    Args:
        replicas_LRE: the new placement.
        node_of: the node of each rank, as numbered in what was chosen.
        numels: how many elements each parameter has of which there are shards.
    """
    if chosen.shards:
        sent = [0] * len(node_of)
        gives = [Give(*give) for give in shard_gives(chosen, numels, node_of, sent)]
        moves, from_snapshots = 0, 0 if chosen.all_parked else chosen.expert_bytes_LE.size
    else:
        gives, sent, moves = _moving_experts(chosen, layers, replicas_LRE, node_of)
        from_snapshots = int((~chosen.parked_LNE.any(axis=1)).sum())
    gives += _dense_gives(chosen, layers, node_of, sent)
    return Handover(
        tuple(sorted(gives)),
        tuple(_scalars_of(rank, chosen, node_of) for rank in range(len(node_of))),
        tuple(sent),
        moves,
        from_snapshots,
    )


def _moving_experts(
    chosen: Chosen, layers: ExpertLayers, replicas_LRE: ArrayLike, node_of: Sequence[int]
) -> tuple[list[Give], list[int], int]:
    """Who gives which expert, what each rank sends for that, and how many replicas travel."""
    wanted = ExpertPlacement(np.asarray(np.asarray(replicas_LRE) > 0, dtype=np.int32))
    nodes = np.array(node_of, dtype=np.int64)
    held = ExpertPlacement(chosen.experts_LNE[:, nodes].astype(np.int32))
    cluster = Cluster(
        np.full(len(nodes), layers.num_experts, dtype=np.int64),
        tuple(f"node-{node}" for node in node_of),
    )
    moves = plan_transfers(wanted, held, cluster, chosen.expert_bytes_LE)
    if (moves.source == SNAPSHOT).any():
        raise LocalProtocolError("an expert lies on a node that has no rank", operation="plan handover")
    sent = moves.sent_bytes.tolist()
    keys = zip(moves.layer.tolist(), moves.expert.tolist(), moves.receiver.tolist(), strict=True)
    source = dict(zip(keys, moves.source.tolist(), strict=True))
    return _expert_gives(chosen, layers, wanted.counts, source), sent, len(source)


def _expert_gives(
    chosen: Chosen,
    layers: ExpertLayers,
    wanted_LRE: NDArray[np.int32],
    source: dict[tuple[int, int, int], int],
) -> list[Give]:
    found = []
    for unit in chosen.holders:
        expert = layers.expert_of(unit.param)
        if expert is not None:
            layer, number = expert
            for target in np.flatnonzero(wanted_LRE[layer, :, number]).tolist():
                giver = source.get((layer, number, target), target)
                found.append(Give(giver, target, unit))
    return found


def _dense_gives(chosen: Chosen, layers: ExpertLayers, node_of: Sequence[int], sent: list[int]) -> list[Give]:
    """``sent`` is added to."""
    experts = {unit for unit in chosen.holders if layers.expert_of(unit.param)} | set(chosen.shards)
    dense = [unit for unit in chosen.holders if unit not in experts]
    found = []
    for unit in sorted(dense, key=lambda u: (-chosen.unit_bytes[u], u)):
        here = [rank for rank, node in enumerate(node_of) if node in chosen.holders[unit]]
        for target, node in enumerate(node_of):
            giver = target
            if node not in chosen.holders[unit]:
                giver = min(here, key=lambda rank: (sent[rank], rank))
                sent[giver] += chosen.unit_bytes[unit]
            found.append(Give(giver, target, unit))
    return found


def _scalars_of(rank: int, chosen: Chosen, node_of: Sequence[int]) -> tuple[int, int]:
    """Who reads the step scalars for a rank, and whose they are."""
    whose = rank if rank in chosen.scalars else min(chosen.scalars)
    nodes = chosen.scalars[whose]
    if node_of[rank] in nodes:
        return rank, whose
    return next(giver for giver, node in enumerate(node_of) if node in nodes), whose
