"""Demand served by owners of limited capacity: which owner serves how many units of what.

A small kind of flow problem, solved exactly with integers. `feasible` asks whether capacities
suffice, by a maximum flow (SciPy's Dinic). Where they do not, its minimum cut is a set of kinds
whose owners together have too little: a certificate from which the caller knows how much is
lacking. `nearest` serves everything with as many units as possible from near owners: a flow of
least cost by the primal-dual method on top of the same maximum flow. Its number of rounds is the
length of the longest exchange that pays, usually below ten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

__all__ = ["Crowded", "Near", "Network", "feasible", "nearest"]

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_SOURCE, _SINK, _FIRST = 0, 1, 2


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """Who could serve what.

    Args:
        units: ``[K]``, how many of each kind are asked for; below 2^31 together.
        kind, owner: the edges, each pair once: this owner has this kind.
        num_owners: owners are counted from 0.
    """

    units: Ints
    kind: Ints
    owner: Ints
    num_owners: int


@dataclass(frozen=True, slots=True, eq=False)
class Near:
    """The same demand in parts, for each of which some owners are near.

    Args:
        units: ``[P]``, units of each part; those of a kind add up to the network's.
        kind: ``[P]``, what each part asks for.
        part, owner: the near pairs, each once; the owner has the part's kind.
    """

    units: Ints
    kind: Ints
    part: Ints
    owner: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Crowded:
    """Some kinds are had by ``owners`` only, who have not enough for the ``units`` of these kinds."""

    owners: Bools
    units: int


def feasible(network: Network, capacity: Ints) -> Ints | Crowded:
    """Units over each edge such that all is served within the capacities; or which owners are too
    few for what.

    Args:
        capacity: ``[num_owners]``, units that each owner serves at most.
    """
    kinds = _FIRST + np.arange(len(network.units))
    owners = _FIRST + len(kinds) + np.arange(network.num_owners)
    wanted = int(network.units.sum())
    edges = _Edges(_FIRST + len(kinds) + len(owners))
    edges.add(np.full(len(kinds), _SOURCE), kinds, network.units)
    between = edges.add(kinds[network.kind], owners[network.owner], wanted)
    edges.add(owners, np.full(len(owners), _SINK), np.minimum(capacity, wanted))
    graph = edges.graph()
    graph.augment(graph.all)
    if graph.served == wanted:
        return graph.over(between)
    reached = graph.reached(graph.all)
    return Crowded(reached[owners], int(network.units[reached[kinds]].sum()))


def nearest(network: Network, near: Near, capacity: Ints) -> tuple[Ints, Ints]:
    """Serve everything, as much as possible from near: units over the network's edges, and over the
    near pairs.

    Raises:
        ValueError: the capacities do not suffice; ask :func:`feasible` first.
    """
    parts = _FIRST + np.arange(len(near.units))
    kinds = _FIRST + len(parts) + np.arange(len(network.units))
    owners = _FIRST + len(parts) + len(kinds) + np.arange(network.num_owners)
    wanted = int(near.units.sum())
    edges = _Edges(_FIRST + len(parts) + len(kinds) + len(owners))
    edges.add(np.full(len(parts), _SOURCE), parts, near.units)
    edges.add(parts, kinds[near.kind], wanted, cost=1)
    from_far = edges.add(kinds[network.kind], owners[network.owner], wanted)
    from_near = edges.add(parts[near.part], owners[near.owner], wanted)
    edges.add(owners, np.full(len(owners), _SINK), np.minimum(capacity, wanted))
    graph = edges.graph()
    price = np.zeros(graph.size, dtype=np.int64)
    while True:
        cheap = graph.cost + price[graph.tail] - price[graph.head] == 0
        graph.augment(cheap)
        if graph.served == wanted:
            return graph.over(from_far), graph.over(from_near)
        if not graph.reached(graph.all)[_SINK]:
            raise ValueError("the capacities do not suffice for everything")
        # All costs are integers, so every way on from what is reached costs at least one more.
        price += ~graph.reached(cheap)


class _Edges:
    """Edges of a graph of ``size`` vertices, put together."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._parts: list[tuple[Ints, Ints, Ints, Ints]] = []
        self._number = 0

    def add(self, tail: Ints, head: Ints, capacity: Ints | int, cost: int = 0) -> slice:
        """Add edges; returns which they are."""
        number = len(tail)
        self._parts.append((tail, head, np.broadcast_to(capacity, number), np.full(number, cost)))
        self._number += number
        return slice(self._number - number, self._number)

    def graph(self) -> _Graph:
        tail, head, capacity, cost = (np.concatenate(list(x)) for x in zip(*self._parts, strict=True))
        return _Graph(self._size, tail, head, capacity, cost)


class _Graph:
    """The residual graph: every edge once in its direction and once against it, with what is left of it."""

    def __init__(self, size: int, tail: Ints, head: Ints, capacity: Ints, cost: Ints) -> None:
        self.size = size
        self.tail, self.head = np.concatenate([tail, head]), np.concatenate([head, tail])
        self.cost = np.concatenate([cost, -cost])
        self.all = np.ones(len(self.tail), dtype=np.bool_)
        self.served = 0
        self._left = np.concatenate([capacity, np.zeros_like(capacity)])
        self._half = len(tail)

    def augment(self, usable: Bools) -> None:
        """Send as much as possible over the usable edges."""
        # SciPy counts in 32 bits; no edge has more than everything.
        result = maximum_flow(self._matrix(usable, self._left.astype(np.int32)), _SOURCE, _SINK)
        if not result.flow_value:
            return
        self.served += int(result.flow_value)
        flow = result.flow.tocoo()
        there = self._forward(flow.row, flow.col, flow.data)
        self._left[: self._half] -= there
        self._left[self._half :] += there

    def reached(self, usable: Bools) -> Bools:
        """Which vertices can get more from the source over usable edges."""
        graph = self._matrix(usable, np.ones(len(self.tail), dtype=np.int32))
        out = np.zeros(self.size, dtype=np.bool_)
        out[breadth_first_order(graph, _SOURCE, return_predecessors=False)] = True
        return out

    def over(self, edges: slice) -> Ints:
        """Units over each of these edges."""
        return self._left[self._half :][edges]

    def _forward(self, tail: NDArray[Any], head: NDArray[Any], flow: NDArray[Any]) -> Ints:
        """What of a flow goes over each of our edges, negative where it goes against it."""
        key = tail.astype(np.int64) * self.size + head
        order = np.argsort(key, kind="stable")
        asked = self.tail[: self._half] * self.size + self.head[: self._half]
        at = order[np.minimum(np.searchsorted(key, asked, sorter=order), len(key) - 1)]
        return np.where(key[at] == asked, flow[at], 0).astype(np.int64)

    def _matrix(self, usable: Bools, weight: NDArray[np.int32]) -> csr_array[np.int32]:
        edges = np.flatnonzero(usable & (self._left > 0))
        return csr_array((weight[edges], (self.tail[edges], self.head[edges])), shape=(self.size, self.size))
