"""The plan of an incarnation, which every rank computes from the same reports.

How many replicas each expert has, on which nodes, which machine is which node of the plan, and
which rank gives which part of the state to whom. A rank reads what its own node holds. The rest
comes from ranks on nodes that hold it:

- experts as `plan_transfers` assigns them, so that the busiest sender finishes as early as possible;
- shards of experts range by range, as `shard_gives` cuts them; the weights of the replicas follow
  from the shards;
- dense units, largest first, each from the rank that has least to send so far;
- step scalars: rank r gets those of rank r of the incarnation before, or else those of the lowest
  rank that exists.

Complexity: that of `plan_transfers`, and O(units * ranks^2) for the dense part.

Shapes: ``L`` layers, ``N`` nodes, ``R`` ranks, ``E`` experts of a layer.
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
from ckptd.core.elastic.incarnations import ChosenState, ExpertLayers, Unit, shard_gives
from ckptd.core.elastic.mapping import place_near
from ckptd.core.elastic.placement_repair import count_moves
from ckptd.errors import LocalProtocolError

_NO_SHARDS: Mapping[str, int] = MappingProxyType({})


class Seat(msgspec.Struct, frozen=True):
    """The place of a rank: its node, that node's failure domain, and its expert slots in each layer."""

    node: str
    domain: str
    slots: int


@dataclass(frozen=True, slots=True, order=True)
class Give:
    """A unit that one rank sends to another, or, from itself, reads on its node."""

    source: int
    target: int
    unit: Unit


@dataclass(frozen=True, slots=True)
class Handover:
    """The transfer of a state to new ranks.

    Args:
        gives: ordered by source, target and unit.
        scalars: for each rank, the rank that reads its step scalars, and the rank of the incarnation
            before that recorded them.
        sent_bytes: of each rank, to others.
        expert_moves: replicas of experts that are sent.
        from_snapshots: experts that no node holds in a parked state, or not with all their shards.
    """

    gives: tuple[Give, ...]
    scalars: tuple[tuple[int, int], ...]
    sent_bytes: tuple[int, ...]
    expert_moves: int
    from_snapshots: int


@dataclass(frozen=True, slots=True, eq=False)
class IncarnationPlan:
    """The plan.

    Args:
        number: of the incarnation, higher than all before.
        start: its first iteration.
        nodes: their names, in the order in which ``node_of`` and the placement count them.
        node_of: the node of each rank.
        replicas_LRE: of each expert on each rank.
        handover: None where nothing is held: the job begins.
        reason: from which state the job continues and with which guarantee, for the log.
    """

    number: int
    start: int
    nodes: tuple[str, ...]
    node_of: tuple[int, ...]
    cluster: Cluster
    placement: ExpertPlacement
    replicas_LRE: NDArray[np.int32]
    straggler: float
    handover: Handover | None
    reason: str

    @property
    def digest(self) -> str:
        """Equal on ranks that have made the same plan."""
        gives = () if self.handover is None else (self.handover.gives, self.handover.scalars)
        facts = repr((self.number, self.start, self.nodes, self.node_of, self.replicas_LRE.shape, gives))
        hasher = xxhash.xxh3_128(facts.encode())
        for replicas_RE in self.replicas_LRE:
            hasher.update(np.ascontiguousarray(replicas_RE, dtype=np.int64).tobytes())
        return hasher.hexdigest()


def nodes_of(seats: Sequence[Seat]) -> tuple[str, ...]:
    """The nodes, in the order of their first ranks."""
    return tuple(dict.fromkeys(seat.node for seat in seats))


def plan_incarnation(
    number: int,
    seats: Sequence[Seat],
    layers: ExpertLayers,
    loads_LE: Loads,
    chosen: ChosenState | None,
    *,
    threshold: int,
    max_straggler: float | None,
    numels: Mapping[str, int] = _NO_SHARDS,
) -> IncarnationPlan:
    """Place the experts, and plan the transfer of the state.

    Args:
        seats: of each rank.
        chosen: the state, its nodes numbered as by `nodes_of`; None: the job begins.
        numels: elements of each parameter with shards.
    Raises:
        ElasticError: there are fewer slots than experts.
        ValueError: ranks of one node have different numbers of slots.
    """
    nodes, cluster, node_of = _cluster_of(seats)
    allocation = allocate(loads_LE, cluster, threshold)
    moved = ""
    # With shards, all replicas get new weights: no placement is nearer than another.
    if chosen is None or chosen.shards:
        placement = place(allocation, loads_LE, cluster, max_straggler=max_straggler).placement
    else:
        held = ExpertPlacement(chosen.experts_LNE.astype(np.int32))
        sizes_LE = chosen.expert_bytes_LE
        found = place_near(held, allocation, loads_LE, cluster, sizes_LE, max_straggler=max_straggler)
        placement = found.placement
        moves = count_moves(placement, held)
        moved = f"; nodes fetch {moves.moved} replicas of experts, at least {moves.least} were needed"
    replicas_LRE = _on_ranks(placement, cluster, loads_LE, node_of)
    start, handover, origin = 0, None, "the job begins"
    if chosen is not None:
        start, origin = chosen.iteration, f"goes on from {chosen.reason}"
        handover = plan_handover(chosen, layers, replicas_LRE, node_of, numels)
    return IncarnationPlan(
        number,
        start,
        nodes,
        node_of,
        cluster,
        placement,
        replicas_LRE,
        straggler_factor(placement, loads_LE, cluster),
        handover,
        f"{origin}; {len(seats)} ranks on {len(nodes)} nodes, {allocation.reason}{moved}",
    )


def _cluster_of(seats: Sequence[Seat]) -> tuple[tuple[str, ...], Cluster, tuple[int, ...]]:
    """The names of the nodes, the cluster of these, and the node of each rank."""
    nodes = nodes_of(seats)
    node_of = tuple(nodes.index(seat.node) for seat in seats)
    by_node = [[rank for rank, node in enumerate(node_of) if node == n] for n in range(len(nodes))]
    for first, *others in by_node:
        for rank in others:
            # Ranks share the slots of a node evenly: one with less room would get too many experts.
            if seats[rank].slots != seats[first].slots:
                raise ValueError(
                    f"rank {rank} was started with slots={seats[rank].slots}, rank {first} on the same "
                    f"node {seats[first].node} with slots={seats[first].slots}: ranks of one node have "
                    "as many slots each"
                )
    cluster = Cluster(
        np.array([sum(seats[rank].slots for rank in ranks) for ranks in by_node], dtype=np.int64),
        tuple(seats[ranks[0]].domain for ranks in by_node),
        tuple(map(len, by_node)),
    )
    return nodes, cluster, node_of


def replicas_by_load(
    plan: IncarnationPlan, loads_LE: Loads, *, threshold: int, max_straggler: float | None
) -> NDArray[np.int32]:
    """``[L, R, E]``: the placement on this incarnation's ranks for these loads, at whatever cost."""
    allocation = allocate(loads_LE, plan.cluster, threshold)
    placed = place(allocation, loads_LE, plan.cluster, max_straggler=max_straggler)
    return _on_ranks(placed.placement, plan.cluster, loads_LE, plan.node_of)


def placement_of(plan: IncarnationPlan, replicas_LRE: Sequence[NDArray[np.int32]]) -> ExpertPlacement:
    """The placement on nodes of these replicas on ranks."""
    on_ranks = np.stack(replicas_LRE)
    counts_LNE = np.zeros((len(on_ranks), len(plan.nodes), on_ranks.shape[2]), dtype=np.int32)
    for rank, node in enumerate(plan.node_of):
        counts_LNE[:, node] += on_ranks[:, rank].astype(np.int32)
    return ExpertPlacement(counts_LNE)


def _on_ranks(
    placement: ExpertPlacement, cluster: Cluster, loads_LE: Loads, node_of: Sequence[int]
) -> NDArray[np.int32]:
    """``[L, R, E]``: the replicas of the nodes, split over their ranks in whatever order these are."""
    by_node = split_over_ranks(placement, cluster, loads_LE)
    order = sorted(range(len(node_of)), key=lambda rank: (node_of[rank], rank))
    if order == list(range(len(order))):
        return by_node  # a copy for 16,384 ranks has a GiB
    replicas_LRE = np.empty_like(by_node)
    replicas_LRE[:, order] = by_node
    return replicas_LRE


# -- the transfer of the state -----------------------------------------------------------------------


def plan_handover(
    chosen: ChosenState,
    layers: ExpertLayers,
    replicas_LRE: ArrayLike,
    node_of: Sequence[int],
    numels: Mapping[str, int] = _NO_SHARDS,
) -> Handover:
    """Decide which rank gives what to whom; see the module.

    Args:
        replicas_LRE: the new placement.
        node_of: the node of each rank, numbered as in ``chosen``.
        numels: elements of each parameter with shards.
    """
    if chosen.shards:
        sent = [0] * len(node_of)
        gives = [Give(*give) for give in shard_gives(chosen, numels, node_of, sent)]
        moves, from_snapshots = 0, 0 if chosen.all_parked else chosen.expert_bytes_LE.size
    else:
        gives, sent, moves = _expert_gives(chosen, layers, replicas_LRE, node_of)
        from_snapshots = int((~chosen.parked_LNE.any(axis=1)).sum())
    gives += _dense_gives(chosen, layers, node_of, sent)
    return Handover(
        tuple(sorted(gives)),
        tuple(_scalars_of(rank, chosen, node_of) for rank in range(len(node_of))),
        tuple(sent),
        moves,
        from_snapshots,
    )


def _expert_gives(
    chosen: ChosenState, layers: ExpertLayers, replicas_LRE: ArrayLike, node_of: Sequence[int]
) -> tuple[list[Give], list[int], int]:
    """The transfers of experts, the bytes that each rank sends for them, and the replicas that are sent."""
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
    keys = zip(moves.layer.tolist(), moves.expert.tolist(), moves.receiver.tolist(), strict=True)
    source = dict(zip(keys, moves.source.tolist(), strict=True))
    gives: list[Give] = []
    for unit in chosen.holders:
        expert = layers.expert_of(unit.param)
        if expert is not None:
            layer, number = expert
            targets = np.flatnonzero(wanted.counts[layer, :, number]).tolist()
            gives += [Give(source.get((layer, number, to), to), to, unit) for to in targets]
    return gives, moves.sent_bytes.tolist(), len(source)


def _dense_gives(
    chosen: ChosenState, layers: ExpertLayers, node_of: Sequence[int], sent: list[int]
) -> list[Give]:
    """``sent`` is updated."""
    experts = {unit for unit in chosen.holders if layers.expert_of(unit.param)} | set(chosen.shards)
    dense = [unit for unit in chosen.holders if unit not in experts]
    found = []
    for unit in sorted(dense, key=lambda u: (-chosen.unit_bytes[u], u)):
        holding = [rank for rank, node in enumerate(node_of) if node in chosen.holders[unit]]
        for target, node in enumerate(node_of):
            source = target
            if node not in chosen.holders[unit]:
                source = min(holding, key=lambda rank: (sent[rank], rank))
                sent[source] += chosen.unit_bytes[unit]
            found.append(Give(source, target, unit))
    return found


def _scalars_of(rank: int, chosen: ChosenState, node_of: Sequence[int]) -> tuple[int, int]:
    """The rank that reads the step scalars for a rank, and the rank that recorded them."""
    recorder = rank if rank in chosen.scalars else min(chosen.scalars)
    nodes = chosen.scalars[recorder]
    if node_of[rank] in nodes:
        return rank, recorder
    return next(reader for reader, node in enumerate(node_of) if node in nodes), recorder
