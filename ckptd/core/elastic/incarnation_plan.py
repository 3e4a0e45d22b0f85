"""The plan of an incarnation: made by every rank for itself from what all have told, and the same on all
of them.

How many replicas, on which nodes, which machine is which node of the plan, and who gives what to
whom (`ckptd.core.elastic`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import msgspec
import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from ckptd.core.elastic.allocation import allocate, split_over_ranks, straggler_factor
from ckptd.core.elastic.elastic_types import Cluster, ExpertPlacement, Loads
from ckptd.core.elastic.expert_placement import place
from ckptd.core.elastic.expert_transfers import SNAPSHOT, plan_transfers
from ckptd.core.elastic.incarnations import Chosen, ExpertLayers, Unit, shard_gives
from ckptd.core.elastic.mapping import map_nodes
from ckptd.errors import LocalProtocolError

__all__ = [
    "Give",
    "Handover",
    "IncarnationPlan",
    "Seat",
    "nodes_of",
    "placement_of",
    "plan_handover",
    "plan_world",
    "replicas_by_load",
]


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


class Seat(msgspec.Struct, frozen=True):
    """Where a rank sits: its node, that node's failure domain, and its slots for experts in each layer."""

    node: str
    domain: str
    slots: int


@dataclass(frozen=True, slots=True, eq=False)
class IncarnationPlan:
    """A world.

    Args:
        number: of the world, above all before.
        start: the iteration at which it begins.
        nodes: their names, in the order in which ``node_of`` and the placement count them.
        node_of: the node of each rank.
        replicas_LRE: of each expert on each rank.
        handover: None where nothing is held: the job begins.
        reason: where it goes on, and with what guarantee, for the log.
    """

    number: int
    start: int
    nodes: tuple[str, ...]
    node_of: tuple[int, ...]
    cluster: Cluster
    placement: ExpertPlacement
    replicas_LRE: NDArray[np.int64]
    straggler: float
    handover: Handover | None
    reason: str

    @property
    def digest(self) -> str:
        """Equal on ranks that have made the same plan."""
        gives = () if self.handover is None else (self.handover.gives, self.handover.scalars)
        told = repr((self.number, self.start, self.nodes, self.node_of, self.replicas_LRE.shape, gives))
        return xxhash.xxh3_128_hexdigest(told.encode() + self.replicas_LRE.tobytes())


def nodes_of(seats: Sequence[Seat]) -> tuple[str, ...]:
    """The nodes, in the order of their first ranks."""
    return tuple(dict.fromkeys(seat.node for seat in seats))


def _check_equal(seats: Sequence[Seat], ranks: Sequence[int]) -> None:
    """The ranks of a node share its slots evenly: one with less room would get more than it has room for."""
    first = ranks[0]
    for rank in ranks:
        if seats[rank].slots != seats[first].slots:
            raise ValueError(
                f"rank {rank} was started with slots={seats[rank].slots}, rank {first} on the same "
                f"node {seats[first].node} with "
                f"slots={seats[first].slots}: ranks of one node have as many slots each"
            )


def plan_world(
    number: int,
    seats: Sequence[Seat],
    layers: ExpertLayers,
    loads_LE: Loads,
    chosen: Chosen | None,
    *,
    threshold: int,
    max_straggler: float | None,
    numels: Mapping[str, int] = _NO_SHARDS,
) -> IncarnationPlan:
    """Place the experts, and share out who gives what.

    Args:
        seats: of each rank.
        loads_LE: tokens that were routed to each expert.
        chosen: where the job goes on, its nodes numbered as `nodes_of` does; None: it begins.
        numels: how many elements each parameter has of which there are shards.
    Raises:
        ElasticError: there are fewer slots than experts.
        ValueError: ranks of one node have room for different numbers of experts.
    """
    nodes = nodes_of(seats)
    node_of = tuple(nodes.index(seat.node) for seat in seats)
    ranks = [[r for r, node in enumerate(node_of) if node == n] for n in range(len(nodes))]
    for of in ranks:
        _check_equal(seats, of)
    cluster = Cluster(
        np.array([sum(seats[r].slots for r in of) for of in ranks], dtype=np.int64),
        tuple(seats[of[0]].domain for of in ranks),
        tuple(map(len, ranks)),
    )
    allocation = allocate(loads_LE, cluster, threshold)
    plan = place(allocation, loads_LE, cluster, max_straggler=max_straggler)
    placement = plan.placement
    # Of shards the weights of all replicas are sent anew: no placement is nearer than another.
    if chosen is not None and not chosen.shards:
        held = ExpertPlacement(chosen.experts_LNE.astype(np.int32))
        placement = map_nodes(placement, held, cluster, chosen.expert_bytes_LE).apply(placement)
    replicas_LRE = _on_ranks(placement, cluster, loads_LE, node_of)
    handover = None
    if chosen is not None:
        handover = plan_handover(chosen, layers, replicas_LRE, node_of, numels)
    where = "the job begins" if chosen is None else f"goes on from {chosen.reason}"
    return IncarnationPlan(
        number,
        0 if chosen is None else chosen.iteration,
        nodes,
        node_of,
        cluster,
        placement,
        replicas_LRE,
        straggler_factor(placement, loads_LE, cluster),
        handover,
        f"{where}; {len(seats)} ranks on {len(nodes)} nodes, {allocation.reason}",
    )


def replicas_by_load(
    plan: IncarnationPlan, loads_LE: Loads, *, threshold: int, max_straggler: float | None
) -> NDArray[np.int64]:
    """``[L, R, E]``: where the experts would be placed on this world's ranks for these loads,
    whatever has to be sent for it.
    """
    allocation = allocate(loads_LE, plan.cluster, threshold)
    placed = place(allocation, loads_LE, plan.cluster, max_straggler=max_straggler)
    return _on_ranks(placed.placement, plan.cluster, loads_LE, plan.node_of)


def placement_of(plan: IncarnationPlan, replicas_LRE: Sequence[NDArray[np.int64]]) -> ExpertPlacement:
    """What the nodes of a world hold where its ranks hold these replicas."""
    on_ranks = np.stack(replicas_LRE)
    counts_LNE = np.zeros((len(on_ranks), len(plan.nodes), on_ranks.shape[2]), dtype=np.int32)
    for rank, node in enumerate(plan.node_of):
        counts_LNE[:, node] += on_ranks[:, rank].astype(np.int32)
    return ExpertPlacement(counts_LNE)


def _on_ranks(
    placement: ExpertPlacement, cluster: Cluster, loads_LE: Loads, node_of: Sequence[int]
) -> NDArray[np.int64]:
    """``[L, R, E]``: what the nodes hold, split over their ranks, wherever these stand."""
    by_node = split_over_ranks(placement, cluster, loads_LE)
    order = sorted(range(len(node_of)), key=lambda rank: (node_of[rank], rank))
    replicas_LRE = np.zeros(by_node.shape, dtype=np.int64)
    replicas_LRE[:, order] = by_node
    return replicas_LRE
