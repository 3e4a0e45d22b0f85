"""The mapping of a plan's nodes to the machines of the cluster, so that least has to be fetched
(docs/elastic.md, section 5).

One mapping serves all layers: layers with different permutations would lose different experts. The
largest fetch of a machine is minimised, then the sum of all. A node may take the place of another if
it has the slots that the plan uses there and as many ranks (the load was divided for those), and if
the nodes of a domain of the plan go to the nodes of one domain: then the recovery probability stays.

Method. Bytes that node q fetches as p, for all pairs, by one product of sparse matrices. The least
possible largest fetch by binary search over thresholds, each a question for a perfect matching,
between the minimum of every row and column and the assignment of least sum; then the assignment of
least sum among the pairs within it (SciPy's shortest augmenting paths, an optimum, not greedy). If
domains have several nodes, the same is done twice: for the nodes within a pair of domains, and for
domains. A pair's exact value is only computed when an optimum for lower bounds uses it.

All numbers are integers below 2^53 that the solvers' doubles hold exactly. Of several optima the
solver's order decides, so ranks agree if they run the same SciPy.

Complexity: ``N^3`` in the worst case; measured in `bench.dispatch`.
Source: Lazarus §4.3 maps greedily, which may fetch more than leaving all as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array

from ckptd.core.elastic.allocation import Allocation
from ckptd.core.elastic.elastic_types import Cluster, ExpertPlacement, integers
from ckptd.core.elastic.expert_placement import PlacementPlan, place

Ints = NDArray[np.int64]
Costs = NDArray[np.float64]  # integers; inf where there is no way

_EXACT = 1 << 53


@dataclass(frozen=True, slots=True, eq=False)
class NodeMapping:
    """A mapping of plan nodes to cluster nodes, and its cost.

    Args:
        node_of: ``[N]``, the cluster's node for each node of the plan.
        fetched_bytes: ``[N]``, by each node of the cluster.
    """

    node_of: Ints
    fetched_bytes: Ints

    def apply(self, plan: ExpertPlacement) -> ExpertPlacement:
        """The plan, with its nodes in the order of the cluster's."""
        counts = np.empty_like(plan.counts)
        counts[:, self.node_of] = plan.counts
        return ExpertPlacement(counts)


def held_now(before: ExpertPlacement, was: ArrayLike) -> ExpertPlacement:
    """The experts that nodes hold now, given what they held as nodes of another cluster.

    Args:
        was: for each present node its number in ``before``; -1: it is new and holds nothing.
    Raises:
        ValueError: an unknown number, or the same for two nodes.
    """
    was_N = integers(was, "was", ndim=1)
    old = was_N[was_N >= 0]
    if len(old) != len(was_N[was_N != -1]) or len(np.unique(old)) != len(old):
        raise ValueError(f"was={was_N.tolist()}: each node was one that no other was, or -1: none before")
    if len(old) and int(old.max()) >= before.num_nodes:
        raise ValueError(f"was={was_N.tolist()}: there were {before.num_nodes} nodes")
    counts = np.zeros((before.num_layers, len(was_N), before.num_experts), dtype=np.int32)
    counts[:, was_N >= 0] = before.counts[:, old]
    return ExpertPlacement(counts)


def map_nodes(
    plan: ExpertPlacement, held: ExpertPlacement, cluster: Cluster, expert_bytes: ArrayLike
) -> NodeMapping:
    """Map the nodes of ``plan`` to those of ``cluster``; see the module.

    Args:
        plan: made for ``cluster``.
        held: by its nodes now (:func:`held_now`).
        expert_bytes: ``[L, E]``, bytes of one replica of each expert.
    Raises:
        ValueError: shapes that do not fit each other, negative bytes, or more than 2^53 bytes to fetch.
        ElasticError: the plan does not fit the cluster.
    """
    plan.check(cluster)
    costs = fetch_bytes(plan, held, expert_bytes)
    order = np.argsort(cluster.domain_ids, kind="stable")
    ranks = np.array(cluster.ranks)
    fits = (plan.used.max(axis=0)[:, None] <= cluster.slots) & (ranks[:, None] == ranks)
    open_costs = np.where(fits, costs, np.inf)[np.ix_(order, order)]
    columns = _Blocks(open_costs, cluster.domain_ids[order]).assign()
    node_of = np.empty_like(order)
    node_of[order] = order[columns]
    fetched = np.empty(len(order), dtype=np.int64)
    fetched[node_of] = costs[np.arange(len(order)), node_of]
    return NodeMapping(node_of, fetched)


def place_near(
    held: ExpertPlacement,
    allocation: Allocation,
    loads: ArrayLike,
    cluster: Cluster,
    expert_bytes: ArrayLike,
    *,
    max_straggler: float | None = None,
) -> PlacementPlan:
    """Place experts so that little has to be fetched: `place` with what is held, which is mended if that is
    about as good as a new placement; else a new one, whose nodes are mapped to those of the cluster.

    Args:
        held: by the cluster's nodes now (:func:`held_now`).
    Raises:
        ValueError, ElasticError: as for `place` and :func:`map_nodes`.
    """
    plan = place(allocation, loads, cluster, max_straggler=max_straggler, held=held)
    if plan.in_place:
        return plan
    mapped = map_nodes(plan.placement, held, cluster, expert_bytes).apply(plan.placement)
    return replace(plan, placement=mapped)


def fetch_bytes(plan: ExpertPlacement, held: ExpertPlacement, expert_bytes: ArrayLike) -> Ints:
    """``[N, N]``: bytes that node q (second index) fetches as node p of the plan.

    A node fetches an expert once, however many replicas of it the node gets.

    Raises:
        ValueError: as for :func:`map_nodes`.
    """
    if plan.counts.shape != held.counts.shape:
        raise ValueError(
            f"a plan of shape {plan.counts.shape}, held replicas of shape {held.counts.shape}: both "
            "tell of the same layers, nodes and experts"
        )
    bytes_LE = checked_bytes(expert_bytes, plan)
    needs = _distinct(plan, bytes_LE)
    needed_N = np.asarray(needs.sum(axis=1), dtype=np.int64)
    if sum(needed_N.tolist()) >= _EXACT:
        raise ValueError("the plan's experts have more than 2^53 bytes; count in larger units")
    shared = needs @ _distinct(held, np.ones_like(bytes_LE)).T
    return np.asarray(needed_N[:, None] - shared.toarray(), dtype=np.int64)


def checked_bytes(expert_bytes: ArrayLike, placement: ExpertPlacement) -> Ints:
    """Bytes of a replica of each expert as ``[L, E]``.

    Raises:
        ValueError: no integers, negative numbers, or another shape than the placement's.
    """
    array = integers(expert_bytes, "expert_bytes", ndim=2)
    if array.shape != (placement.num_layers, placement.num_experts):
        raise ValueError(
            f"expert_bytes of shape {array.shape} for {placement.num_layers} layers of "
            f"{placement.num_experts} experts"
        )
    if array.size and int(array.min()) < 0:
        raise ValueError("expert_bytes has negative numbers")
    return array


def where(mask: NDArray[np.bool_]) -> tuple[Ints, Ints, Ints]:
    """The indices of the set elements of ``[L, N, E]``, in order; five times as fast as ``np.nonzero``."""
    layer, node, expert = np.unravel_index(np.flatnonzero(mask), mask.shape)
    return layer, node, expert


def _distinct(placement: ExpertPlacement, weight_LE: Ints) -> csr_array[np.int64]:
    """``[N, L * E]``: an expert's weight where a node holds it."""
    layers, nodes, experts = placement.counts.shape
    layer, node, expert = where(placement.counts > 0)
    return csr_array(
        (weight_LE[layer, expert], (node, layer * experts + expert)),
        shape=(nodes, layers * experts),
    )


class _Blocks:
    """A square matrix of costs with the same groups of rows and columns; whole groups are assigned."""

    def __init__(self, costs: Costs, groups: Ints) -> None:
        _, self._starts, sizes = np.unique(groups, return_index=True, return_counts=True)
        self._ends = self._starts + sizes
        self._costs = costs
        self._equal_rows = sizes[:, None] == sizes
        self._single = (sizes == 1)[:, None] & self._equal_rows

    def assign(self) -> NDArray[np.intp]:
        """The column of each row: the largest cost first, then the sum."""
        largest = self._largest()
        self._costs = np.where(self._costs <= largest, self._costs, np.inf)
        rows, columns = self._lazily(np.add, linear_sum_assignment, _least_sum)
        out = np.empty(len(self._costs), dtype=np.intp)
        for i, j in zip(rows.tolist(), columns.tolist(), strict=True):
            inner = linear_sum_assignment(self._block(i, j))[1]
            out[self._starts[i] : self._ends[i]] = self._starts[j] + inner
        return out

    def _largest(self) -> float:
        """The least possible largest cost."""
        found = 0.0

        def solve(values: Costs) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
            nonlocal found
            found, columns = _bottleneck(values)
            return np.arange(len(values)), columns

        self._lazily(np.maximum, solve, lambda block: _bottleneck(block)[0])
        return found

    def _lazily(
        self,
        join: np.ufunc,
        solve: Callable[[Costs], tuple[NDArray[np.intp], NDArray[np.intp]]],
        exact: Callable[[Costs], float],
    ) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Assign groups to groups at least cost; the cost of a pair is ``exact`` of its block.

        An optimum of lower bounds that only uses exact values is an optimum of the exact values.
        """
        values = self._bounds(join)
        known = self._single.copy()
        while True:
            rows, columns = solve(values)
            unknown = np.flatnonzero(~known[rows, columns]).tolist()
            if not unknown:
                return rows, columns
            for at in unknown:
                i, j = rows[at], columns[at]
                values[i, j] = exact(self._block(i, j))
                known[i, j] = True

    def _bounds(self, join: np.ufunc) -> Costs:
        """A lower bound of each pair of groups: every row and every column takes one of its entries."""
        by_row = np.minimum.reduceat(self._costs, self._starts, axis=1)
        by_column = np.minimum.reduceat(self._costs, self._starts, axis=0)
        bound = np.maximum(
            join.reduceat(by_row, self._starts, axis=0),
            join.reduceat(by_column, self._starts, axis=1),
        )
        return np.where(self._equal_rows, bound, np.inf)

    def _block(self, i: int, j: int) -> Costs:
        return self._costs[self._starts[i] : self._ends[i], self._starts[j] : self._ends[j]]


def _least_sum(costs: Costs) -> float:
    """The least sum of an assignment, inf if there is none."""
    if _matching(np.isfinite(costs)) is None:
        return np.inf
    rows, columns = linear_sum_assignment(costs)
    return float(costs[rows, columns].sum())


def _bottleneck(costs: Costs) -> tuple[float, NDArray[np.intp]]:
    """The least possible largest cost of an assignment (inf if there is none), and its columns."""
    columns = _matching(np.isfinite(costs))
    if columns is None:
        return np.inf, np.arange(len(costs))
    rows = np.arange(len(costs))
    low = max(costs.min(axis=1).max(), costs.min(axis=0).max())
    columns = linear_sum_assignment(costs)[1]
    high = costs[rows, columns].max()
    candidates = np.unique(costs[(costs >= low) & (costs < high)])
    first, last = 0, len(candidates)  # the answer is among candidates[first:last], or high
    middle = 0  # the bound itself is often reached
    while first < last:
        better = _matching(costs <= candidates[middle])
        if better is None:
            first = middle + 1
        else:
            columns = better
            high = costs[rows, columns].max()
            last = int(np.searchsorted(candidates, high))
        middle = (first + last) // 2
    return float(high), columns


def _matching(allowed: NDArray[np.bool_]) -> NDArray[np.intp] | None:
    """The columns of a perfect matching over the allowed pairs, or None.

    As an assignment of zeros and ones: 15 to 50 ms for 1,024 nearly equal rows, for which SciPy's
    ``maximum_bipartite_matching`` takes many seconds.
    """
    rows, columns = linear_sum_assignment(~allowed)
    return columns if allowed[rows, columns].all() else None
