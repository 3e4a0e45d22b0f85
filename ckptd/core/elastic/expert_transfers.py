"""The source of each missing expert: which owner sends it to which node (docs/elastic.md, section 6).

The job waits for the owner that sends longest: that time is minimised, then the replicas over the
borders of domains. An expert without a live owner comes from its snapshot in the memory tier.

Method. For replicas of equal size: a flow from the missing experts over their owners, whose capacity
is what they can send in a given time. The time starts at a lower bound. If the flow does not serve
everything, its minimum cut is a set of owners that need longer under any assignment; the time rises
to the minimum that they need. So the first time that suffices is the least. Replicas of different
sizes (NP-hard: machine scheduling with eligible sets) are assigned from the largest to the smallest,
each size on top of the load so far; then each size again, given all others, until that shortens
nothing. Each size is optimal given the others, but all together need not be. Above eight sizes,
sizes within a factor of two are planned as one.

The flows are exact, on integers. `_feasible` is a maximum flow (SciPy's Dinic). `_nearest` is a flow
of least cost by the primal-dual method on top of it; its rounds are the length of the longest
exchange that pays, usually below ten. Of several optima the solver's order decides, so ranks agree
if they run the same SciPy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from ckptd.core.elastic.elastic_types import Cluster, ExpertPlacement, integers
from ckptd.core.elastic.mapping import checked_bytes, where
from ckptd.errors import ElasticError

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

SNAPSHOT = -1
"""As a source: no live node has the expert."""

_NS = 10**9
_BYTES_PER_S = 10**9  # if not measured: a byte takes a nanosecond
_MOST_SIZES = 8
_MOST_PASSES = 8
_SOURCE, _SINK, _FIRST = 0, 1, 2  # vertices of a flow


@dataclass(frozen=True, slots=True, eq=False)
class TransferPlan:
    """Transfers: arrays of the same length, ordered by layer, expert and receiver.

    Args:
        source: the node that sends the expert, or :data:`SNAPSHOT`.
        receiver: the node that lacks it.
        size_bytes: of each.
        sent_bytes: ``[N]``, by each node.
        received_bytes: ``[N]``, by each node from other nodes.
        snapshot_bytes: ``[N]``, by each node from snapshots.
        cross_domain_bytes: sent to other domains.
        predicted_s: the longest time of a node to send, or to receive all it gets, at its own speed.
    """

    layer: Ints
    expert: Ints
    source: Ints
    receiver: Ints
    size_bytes: Ints
    sent_bytes: Ints
    received_bytes: Ints
    snapshot_bytes: Ints
    cross_domain_bytes: int
    predicted_s: float


@dataclass(frozen=True, slots=True, eq=False)
class _Missing:
    """The missing experts, ordered by layer, expert and receiver; ``key``: layer and expert as one number."""

    key: Ints
    receiver: Ints
    size_bytes: Ints


def plan_transfers(
    wanted: ExpertPlacement,
    held: ExpertPlacement,
    cluster: Cluster,
    expert_bytes: ArrayLike,
    *,
    alive: ArrayLike | None = None,
    bytes_per_s: ArrayLike | None = None,
) -> TransferPlan:
    """Assign a source to every missing expert; see the module.

    Args:
        wanted: the new placement, its nodes in the order of the cluster's (:meth:`NodeMapping.apply`).
        held: the old placement, of the same nodes. Nodes that leave may still send: they are part of the
            cluster and want nothing.
        expert_bytes: ``[L, E]``, bytes of one replica of each expert.
        alive: ``[N]`` of bool, the nodes that can send; None: all of them.
        bytes_per_s: ``[N]``, each node's speed of sending and receiving; None: 1 GB/s each.
    Raises:
        ValueError: shapes that do not fit each other, speeds below one.
        ElasticError: a node that is not alive wants an expert.
    """
    if wanted.counts.shape != held.counts.shape or wanted.num_nodes != cluster.num_nodes:
        raise ValueError(
            f"wanted {wanted.counts.shape}, held {held.counts.shape}, a cluster of {cluster.num_nodes} "
            "nodes: all three tell of the same layers, nodes and experts"
        )
    bytes_LE = checked_bytes(expert_bytes, wanted)
    alive_N = _alive(alive, wanted)
    speeds = _speeds(bytes_per_s, cluster.num_nodes)
    missing = _missing(wanted, held, bytes_LE)
    owners = _Owners(held, alive_N)
    parts = _sizes(missing.size_bytes, owners.some(missing.key))
    source = _LoadSharing(owners, cluster.domain_ids, speeds).share_all(missing, parts)
    return _summary(missing, source, cluster, speeds, wanted.num_experts)


def _alive(alive: ArrayLike | None, wanted: ExpertPlacement) -> Bools:
    if alive is None:
        return np.ones(wanted.num_nodes, dtype=np.bool_)
    alive_N = np.asarray(alive)
    if alive_N.dtype != np.bool_ or alive_N.shape != (wanted.num_nodes,):
        raise ValueError(f"alive must be {wanted.num_nodes} bools, not {alive!r}")
    wants = wanted.used.any(axis=0)
    if (wants & ~alive_N).any():
        raise ElasticError(
            "a node that is not alive is to hold experts",
            operation="transfers",
            ids={"node": int(np.flatnonzero(wants & ~alive_N)[0])},
            hint="Plan again for the nodes that are left",
        )
    return alive_N


def _speeds(bytes_per_s: ArrayLike | None, num_nodes: int) -> list[int]:
    if bytes_per_s is None:
        return [_BYTES_PER_S] * num_nodes
    speeds = integers(bytes_per_s, "bytes_per_s", ndim=1)
    if len(speeds) != num_nodes or int(speeds.min(initial=1)) < 1:
        raise ValueError(f"bytes_per_s must be {num_nodes} numbers of at least 1, not {speeds}")
    return [int(speed) for speed in speeds]


def _missing(wanted: ExpertPlacement, held: ExpertPlacement, bytes_LE: Ints) -> _Missing:
    layer, receiver, expert = where((wanted.counts > 0) & (held.counts == 0))
    order = np.lexsort((receiver, expert, layer))
    layer, receiver, expert = layer[order], receiver[order], expert[order]
    return _Missing(layer * wanted.num_experts + expert, receiver, bytes_LE[layer, expert])


class _Owners:
    """The live nodes that hold each expert: ``nodes[first[key]:first[key + 1]]``, ascending."""

    def __init__(self, held: ExpertPlacement, alive_N: Bools) -> None:
        layer, node, expert = where(held.counts > 0)
        live = alive_N[node]
        key = (layer * held.num_experts + expert)[live]
        order = np.argsort(key, kind="stable")
        self.nodes = node[live][order]
        number = np.bincount(key, minlength=held.num_layers * held.num_experts)
        self.first = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(number)])

    def some(self, key: Ints) -> Bools:
        """True for each that has an owner."""
        return self.first[key + 1] > self.first[key]

    def edges(self, key: Ints) -> tuple[Ints, Ints]:
        """Every pair of an index into ``key`` and an owner of it, in order."""
        number = self.first[key + 1] - self.first[key]
        index = np.repeat(np.arange(len(key)), number)
        begins = np.repeat(self.first[key] - (np.cumsum(number) - number), number)
        return index, self.nodes[begins + np.arange(len(index))]


def _sizes(size_bytes: Ints, owned: Bools) -> list[Ints]:
    """The indices of replicas to plan together, largest first: of one size, or within a factor of two."""
    sizes, kind = np.unique(size_bytes, return_inverse=True)
    if len(sizes) > _MOST_SIZES:
        _, kind = np.unique([int(size).bit_length() for size in size_bytes], return_inverse=True)
    last = int(kind.max(initial=-1))
    parts = [np.flatnonzero((kind == number) & owned) for number in range(last, -1, -1)]
    return [part for part in parts if len(part)]


class _LoadSharing:
    """Assigns replicas to owners, one size after the other, on top of their load so far."""

    def __init__(self, owners: _Owners, domains: Ints, speeds: list[int]) -> None:
        self._owners = owners
        self._domains = domains
        self._speeds = speeds
        self._load_bytes = [0] * len(speeds)
        self._domains_are_nodes = len(np.unique(domains)) == len(domains)

    def share_all(self, missing: _Missing, parts: list[Ints]) -> Ints:
        """The source of every missing replica; one that is in no part has none."""
        source = np.full(len(missing.key), SNAPSHOT, dtype=np.int64)
        for part in parts:
            source[part] = self._share(missing, part)
        best = source.copy(), self._busiest_ns()
        for _ in range(_MOST_PASSES if len(parts) > 1 else 0):
            for part in parts:
                self._lay_on(source[part], -missing.size_bytes[part])
                source[part] = self._share(missing, part)
            if self._busiest_ns() >= best[1]:
                break
            best = source.copy(), self._busiest_ns()
        return best[0]

    def _share(self, missing: _Missing, part: Ints) -> Ints:
        """The source of each replica of ``part``, which is ordered by key and receiver."""
        size = max(1, int(missing.size_bytes[part].max()))
        keys, units = np.unique(missing.key[part], return_counts=True)
        kind, owner = self._owners.edges(keys)
        network = _Network(units, kind, owner, len(self._domains))
        capacity, over = self._shortest(network, size)
        domain = self._domains[missing.receiver[part]]
        source = (
            np.repeat(owner, over)  # edges and replicas have the same order
            if self._domains_are_nodes
            else self._in_domains(network, capacity, keys, missing.key[part], domain)
        )
        self._lay_on(source, missing.size_bytes[part])
        return source

    def _in_domains(self, network: _Network, capacity: Ints, keys: Ints, key: Ints, domain: Ints) -> Ints:
        """The source of each replica within the capacities, as many as possible in their own domain."""
        # Receivers of one domain are equal: a part is an expert that a domain lacks.
        span = len(self._domains)
        parts, part_of, units = np.unique(key * span + domain, return_inverse=True, return_counts=True)
        at_home = keys[network.kind] * span + self._domains[network.owner]
        part = np.minimum(np.searchsorted(parts, at_home), len(parts) - 1)
        pairs = np.flatnonzero(parts[part] == at_home)
        pairs = pairs[np.argsort(part[pairs], kind="stable")]
        near = _Near(units, np.searchsorted(keys, parts // span), part[pairs], network.owner[pairs])
        far_units, near_units = _nearest(network, near, capacity)
        # The first of each part have near sources; near pairs are ordered by part, edges by kind.
        order = np.argsort(part_of, kind="stable")
        served = np.zeros(len(parts), dtype=np.int64)
        np.add.at(served, near.part, near_units)
        begins = np.repeat(np.cumsum(units) - units, units)
        is_near = np.arange(len(key)) - begins < np.repeat(served, units)
        source = np.empty(len(key), dtype=np.int64)
        source[order[is_near]] = np.repeat(near.owner, near_units)
        source[order[~is_near]] = np.repeat(network.owner, far_units)
        return source

    def _lay_on(self, source: Ints, size_bytes: Ints) -> None:
        for node, sent in enumerate(_sums(source, size_bytes, len(self._load_bytes)).tolist()):
            self._load_bytes[node] += sent

    def _busiest_ns(self) -> int:
        return max(
            -(-load * _NS // speed) for load, speed in zip(self._load_bytes, self._speeds, strict=True)
        )

    def _shortest(self, network: _Network, size: int) -> tuple[Ints, Ints]:
        """The capacity of each owner in the least time that suffices, and units over each edge."""
        everyone = np.zeros(network.num_owners, dtype=np.bool_)
        everyone[network.owner] = True
        crowded = _Crowded(everyone, int(network.units.sum()))
        level_ns = self._busiest_ns()
        while True:
            level_ns = self._needed_ns(level_ns, size, crowded)
            capacity = self._capacity(level_ns, size, everyone)
            outcome = _feasible(network, capacity)
            if not isinstance(outcome, _Crowded):
                return capacity, outcome
            crowded = outcome

    def _needed_ns(self, level_ns: int, size: int, crowded: _Crowded) -> int:
        """The least time, from ``level_ns`` on, in which the crowded owners can send their units."""
        owners = np.flatnonzero(crowded.owners).tolist()
        sent = sum(self._load_bytes[node] for node in owners) + crowded.units * size
        low = max(level_ns, -(-sent * _NS // sum(self._speeds[node] for node in owners)))
        # By then every owner can send one more, which covers rounding.
        high = low - (-size * _NS // min(self._speeds[node] for node in owners))
        while low < high:
            middle = (low + high) // 2
            if int(self._capacity(middle, size, crowded.owners).sum()) < crowded.units:
                low = middle + 1
            else:
                high = middle
        return low

    def _capacity(self, level_ns: int, size: int, which: Bools) -> Ints:
        """Further replicas of that size that each owner can send until then, in Python's integers."""
        out = np.zeros(len(which), dtype=np.int64)
        for node in np.flatnonzero(which).tolist():
            room = level_ns * self._speeds[node] // _NS - self._load_bytes[node]
            out[node] = min(max(room // size, 0), 1 << 40)
        return out


def _summary(
    missing: _Missing, source: Ints, cluster: Cluster, speeds: list[int], num_experts: int
) -> TransferPlan:
    nodes = cluster.num_nodes
    lost = source == SNAPSHOT
    size, receiver = missing.size_bytes, missing.receiver
    sent = _sums(source[~lost], size[~lost], nodes)
    received = _sums(receiver[~lost], size[~lost], nodes)
    snapshot = _sums(receiver[lost], size[lost], nodes)
    domains = cluster.domain_ids
    crossing = ~lost & (domains[source] != domains[receiver])
    busiest_s = max(
        max(out, arriving + restored) / speed
        for out, arriving, restored, speed in zip(
            sent.tolist(), received.tolist(), snapshot.tolist(), speeds, strict=True
        )
    )
    layer, expert = np.divmod(missing.key, num_experts)
    return TransferPlan(
        layer=layer,
        expert=expert,
        source=source,
        receiver=receiver,
        size_bytes=size,
        sent_bytes=sent,
        received_bytes=received,
        snapshot_bytes=snapshot,
        cross_domain_bytes=int(size[crossing].sum()),
        predicted_s=busiest_s,
    )


def _sums(index: Ints, size_bytes: Ints, length: int) -> Ints:
    out = np.zeros(length, dtype=np.int64)
    np.add.at(out, index, size_bytes)
    return out


# -- flows -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Network:
    """A demand and the owners that can serve it.

    Args:
        units: ``[K]``, the demand of each kind; below 2^31 together.
        kind, owner: the edges, each pair once: this owner has this kind.
        num_owners: owners are counted from 0.
    """

    units: Ints
    kind: Ints
    owner: Ints
    num_owners: int


@dataclass(frozen=True, slots=True, eq=False)
class _Near:
    """The same demand in parts, each with some near owners.

    Args:
        units: ``[P]``, units of each part; those of a kind add up to the network's.
        kind: ``[P]``, of each part.
        part, owner: the near pairs, each once; the owner has the part's kind.
    """

    units: Ints
    kind: Ints
    part: Ints
    owner: Ints


@dataclass(frozen=True, slots=True, eq=False)
class _Crowded:
    """Only ``owners`` have some kinds, and their capacity is below the ``units`` of these kinds."""

    owners: Bools
    units: int


def _feasible(network: _Network, capacity: Ints) -> Ints | _Crowded:
    """Units over each edge that serve all demand within ``capacity``; or the owners that do not suffice."""
    kinds = _FIRST + np.arange(len(network.units))
    owners = _FIRST + len(kinds) + np.arange(network.num_owners)
    wanted = int(network.units.sum())
    graph = _Graph(
        _FIRST + len(kinds) + len(owners),
        (_SOURCE, kinds, network.units, 0),
        (kinds[network.kind], owners[network.owner], wanted, 0),
        (owners, _SINK, np.minimum(capacity, wanted), 0),
    )
    graph.augment(graph.all)
    if graph.served == wanted:
        return graph.over(1)
    reached = graph.reached(graph.all)
    return _Crowded(reached[owners], int(network.units[reached[kinds]].sum()))


def _nearest(network: _Network, near: _Near, capacity: Ints) -> tuple[Ints, Ints]:
    """Serve all demand, near owners first: units over the network's edges, and over the near pairs."""
    parts = _FIRST + np.arange(len(near.units))
    kinds = _FIRST + len(parts) + np.arange(len(network.units))
    owners = _FIRST + len(parts) + len(kinds) + np.arange(network.num_owners)
    wanted = int(near.units.sum())
    graph = _Graph(
        _FIRST + len(parts) + len(kinds) + len(owners),
        (_SOURCE, parts, near.units, 0),
        (parts, kinds[near.kind], wanted, 1),
        (kinds[network.kind], owners[network.owner], wanted, 0),
        (parts[near.part], owners[near.owner], wanted, 0),
        (owners, _SINK, np.minimum(capacity, wanted), 0),
    )
    price = np.zeros(graph.size, dtype=np.int64)
    while True:
        cheap = graph.cost + price[graph.tail] - price[graph.head] == 0
        graph.augment(cheap)
        if graph.served == wanted:
            return graph.over(2), graph.over(3)
        if not graph.reached(graph.all)[_SINK]:
            raise ValueError("the capacities do not suffice for everything")
        # All costs are integers: every edge out of the reached vertices costs at least one more.
        price += ~graph.reached(cheap)


class _Graph:
    """The residual graph: every edge in its direction and against it, with its remaining capacity."""

    def __init__(self, size: int, *edges: tuple[Ints | int, Ints | int, Ints | int, int]) -> None:
        groups = [np.broadcast_arrays(*group) for group in edges]
        tail, head, capacity, cost = (np.concatenate(each) for each in zip(*groups, strict=True))
        ends = np.cumsum([len(group[0]) for group in groups]).tolist()
        self._groups = [slice(end - len(group[0]), end) for end, group in zip(ends, groups, strict=True)]
        self.size = size
        self.tail, self.head = np.concatenate([tail, head]), np.concatenate([head, tail])
        self.cost = np.concatenate([cost, -cost])
        self.all = np.ones(len(self.tail), dtype=np.bool_)
        self.served = 0
        self._left = np.concatenate([capacity, np.zeros_like(capacity)])
        self._half = len(tail)

    def augment(self, usable: Bools) -> None:
        """Send as much as possible over the usable edges."""
        # SciPy counts in 32 bits; no edge has more than the whole demand.
        result = maximum_flow(self._matrix(usable, self._left.astype(np.int32)), _SOURCE, _SINK)
        if not result.flow_value:
            return
        self.served += int(result.flow_value)
        flow = result.flow.tocoo()
        there = self._forward(flow.row, flow.col, flow.data)
        self._left[: self._half] -= there
        self._left[self._half :] += there

    def reached(self, usable: Bools) -> Bools:
        """The vertices that can get more from the source over usable edges."""
        graph = self._matrix(usable, np.ones(len(self.tail), dtype=np.int32))
        out = np.zeros(self.size, dtype=np.bool_)
        out[breadth_first_order(graph, _SOURCE, return_predecessors=False)] = True
        return out

    def over(self, group: int) -> Ints:
        """Units over each edge of a group."""
        return self._left[self._half :][self._groups[group]]

    def _forward(self, tail: NDArray[Any], head: NDArray[Any], flow: NDArray[Any]) -> Ints:
        """The part of a flow over each of our edges, negative against its direction."""
        key = tail.astype(np.int64) * self.size + head
        order = np.argsort(key, kind="stable")
        asked = self.tail[: self._half] * self.size + self.head[: self._half]
        at = order[np.minimum(np.searchsorted(key, asked, sorter=order), len(key) - 1)]
        return np.where(key[at] == asked, flow[at], 0).astype(np.int64)

    def _matrix(self, usable: Bools, weight: NDArray[np.int32]) -> csr_array[np.int32]:
        edges = np.flatnonzero(usable & (self._left > 0))
        return csr_array((weight[edges], (self.tail[edges], self.head[edges])), shape=(self.size, self.size))
