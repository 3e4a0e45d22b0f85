"""Demands served by owners of limited capacity: which owner serves how many units of each demand.

A small kind of flow problem, solved exactly: source → demands → owners → sink, with integers throughout.
`feasible` is a maximum flow (SciPy's Dinic). Where it does not serve everything, its minimum cut is a set of
demands whose owners together have too little: a certificate from which the caller knows by how much.
`cheapest` serves everything along as few dear edges as possible: the primal-dual method on top of the same
maximum flow, whose number of rounds is the length of the longest exchange that pays, usually below ten.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

__all__ = ["Crowded", "Network", "Served", "cheapest", "feasible"]

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """Who could serve what.

    Args:
        units: ``[D]``, what each demand asks for; below 2^31 together.
        demand, owner: the edges; each demand and owner are named together once at most.
        dear: for each edge, whether it is to be avoided.
        num_owners: owners are counted from 0.
    """

    units: Ints
    demand: Ints
    owner: Ints
    dear: Bools
    num_owners: int


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """Everything is served: units over each edge of the network."""

    units: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Crowded:
    """Some demands can only be served by ``owners``, which have less than the ``units`` they ask for together."""

    owners: Bools
    units: int


def feasible(network: Network, capacity: Ints) -> Served | Crowded:
    """Serve all demands within the capacities, or say which owners are too few for what.

    Args:
        capacity: ``[num_owners]``, units that each owner serves at most.
    """
    graph = _Graph(network, capacity)
    graph.augment(np.ones(len(graph.tail), dtype=np.bool_))
    if graph.served == graph.wanted:
        return Served(graph.over_edges())
    reached = graph.reached(np.ones(len(graph.tail), dtype=np.bool_))
    demands, owners = reached[2 : 2 + len(network.units)], reached[2 + len(network.units) :]
    return Crowded(owners, int(network.units[demands].sum()))


def cheapest(network: Network, capacity: Ints) -> Served:
    """Serve all demands within the capacities over as few dear units as possible.

    Raises:
        ValueError: the capacities do not suffice; ask :func:`feasible` first.
    """
    graph = _Graph(network, capacity)
    price = np.zeros(2 + len(network.units) + network.num_owners, dtype=np.int64)
    while True:
        cheap = graph.cost + price[graph.tail] - price[graph.head] == 0
        graph.augment(cheap)
        if graph.served == graph.wanted:
            return Served(graph.over_edges())
        if not graph.reached(np.ones(len(graph.tail), dtype=np.bool_))[_SINK]:
            raise ValueError("the capacities do not suffice for all demands")
        # All costs are integers, so every way on from what is reached costs at least one more.
        price += ~graph.reached(cheap)


_SOURCE, _SINK = 0, 1


class _Graph:
    """The residual graph: every edge once in its direction and once against it, with what is left of it."""

    def __init__(self, network: Network, capacity: Ints) -> None:
        demands = 2 + np.arange(len(network.units))
        owners = 2 + len(demands) + np.arange(network.num_owners)
        tail = np.concatenate([np.full(len(demands), _SOURCE), demands[network.demand], owners])
        head = np.concatenate([demands, owners[network.owner], np.full(len(owners), _SINK)])
        cost = np.zeros(len(tail), dtype=np.int64)
        self._between = slice(len(demands), len(demands) + len(network.demand))
        cost[self._between] = network.dear
        self.wanted = int(network.units.sum())
        self.served = 0
        # No edge needs more than everything, and SciPy counts in 32 bits.
        left = np.concatenate(
            [network.units, network.units[network.demand], np.minimum(capacity, self.wanted)]
        )
        self.tail, self.head = np.concatenate([tail, head]), np.concatenate([head, tail])
        self.cost = np.concatenate([cost, -cost])
        self._left = np.concatenate([left, np.zeros_like(left)])
        self._size = 2 + len(demands) + len(owners)

    def augment(self, usable: Bools) -> None:
        """Send as much as possible over the usable edges."""
        graph = self._matrix(usable, self._left.astype(np.int32))
        result = maximum_flow(graph, _SOURCE, _SINK)
        if not result.flow_value:
            return
        self.served += int(result.flow_value)
        half = len(self.tail) // 2
        there = self._flow_over(result.flow.tocoo(), slice(0, half))
        self._left[:half] -= there
        self._left[half:] += there

    def _flow_over(self, flow: coo_array[np.int32], edges: slice) -> Ints:
        """The flow over each of those edges, negative where it goes against it."""
        key = flow.row.astype(np.int64) * self._size + flow.col
        order = np.argsort(key)
        asked = self.tail[edges] * self._size + self.head[edges]
        at = np.minimum(np.searchsorted(key, asked, sorter=order), len(key) - 1)
        found = key[order[at]] == asked
        return np.where(found, flow.data[order[at]], 0).astype(np.int64)

    def reached(self, usable: Bools) -> Bools:
        """Which vertices can get more from the source over usable edges."""
        graph = self._matrix(usable, np.ones(len(self.tail), dtype=np.int32))
        out = np.zeros(self._size, dtype=np.bool_)
        out[breadth_first_order(graph, _SOURCE, return_predecessors=False)] = True
        return out

    def over_edges(self) -> Ints:
        """Units over each edge between a demand and an owner."""
        return self._left[len(self.tail) // 2 :][self._between]

    def _matrix(self, usable: Bools, weight: NDArray[np.int32]) -> csr_array[np.int32]:
        edges = np.flatnonzero(usable & (self._left > 0))
        return csr_array(
            (weight[edges], (self.tail[edges], self.head[edges])), shape=(self._size, self._size)
        )
