"""Placement of replicas on nodes, so that the job most likely survives the next losses (docs/elastic.md,
sections 2 and 5).

- If every layer has a strict maximum rank overlap (``expert_layout``), that is the plan. Several
  layers survive like one whose groups have the fewest units that any layer gives them.
- Otherwise (and if several layers are small enough to try) it is the best of a family of layouts,
  judged by one number for all layers together. A candidate that breaks the promise of the
  allocation is dropped; one always keeps it (``guaranteed``).
- For few units a search goes on from the best one, over all layers in turn (``placement_search``).
- A large problem gets one layout (``core_layout``): to lay out and judge a family takes seconds.
- A domain of several nodes is planned as one unit first, then the nodes within it among themselves. A
  single domain is no unit: nodes are.
- If nodes hold something, that is repaired (``placement_repair``), unless the plan is clearly better.

The value is the probability of surviving ``lost`` units that are lost together, or, by default, its
mean over 1 … U - 1 lost units. Beyond ``EXACT_UNITS`` units these are f, 2f, 4f and 8f, and sampled
where counting takes too much (``survival``). If domains have several nodes, the loss of single nodes
decides between equals, then the straggler factor. ``max_straggler`` bounds that factor: then the
plan is the most likely survivor under the bound, or the best balanced candidate if none is under it.
Values are integers and exact fractions: every rank finds the same plan.

Complexity: one layout is O(L * N * E) in array operations. Otherwise the number of candidates is
bounded (``WHOLE_FAMILY``), and the search by ``moves``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from math import comb, lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ckptd.core.elastic.allocation import (
    Allocation,
    busiest,
    domain_slots,
    reachable_threshold,
    token_shares,
)
from ckptd.core.elastic.core_layout import CoreProblem, lay_out_cores
from ckptd.core.elastic.elastic_types import Cluster, ExpertPlacement, Loads, checked_loads
from ckptd.core.elastic.expert_layout import (
    LayoutProblem,
    Shape,
    domain_problem,
    guaranteed,
    lay_out,
    layouts,
    num_groups,
    spread_out,
    strict_exists,
    within_domains,
)
from ckptd.core.elastic.placement_repair import FEW, expected_losses, repaired, small_sets
from ckptd.core.elastic.placement_search import Judge, improved
from ckptd.core.elastic.survival import (
    holder_sets,
    minimal_sets,
    sampled_survivors,
    surviving_masks,
    survivor_counts,
)
from ckptd.errors import ElasticError

MOVES = 2000  # of the search, over all layers: about 0.15 s
SEARCHED_UNITS = 10
EXACT_UNITS = 64
WHOLE_FAMILY = 20_000  # layers x units x experts up to which every shape is tried: about 1 s
SOME_FAMILY = 200_000  # layers x nodes x experts up to which a few shapes are tried: about 0.5 s
CORES = "maximum rank overlap in cores, the rest by load"
HEADROOM = Fraction(7, 10)  # of the excess that a bound allows: later losses make ranks busier
TIGHTENED = 3  # attempts to meet the bound on the straggler factor with one layout
REPAIRED = Fraction(1, 8)  # of the replicas may be missing, or all are placed anew
# What is held is kept if the mean chance to survive is so little below the best, and (without a bound) the
# busiest ranks have so little more to do, in parts of the whole.
TOLERANCE, BUSIER = Fraction(1, 50), Fraction(1, 100)
HORIZON = 8  # times the threshold: more domains lost together are not planned for in large problems
COUNTED_SETS, COUNTED_STATES = 100, 256  # of a large problem: at most 0.1 s
SAMPLES, SAMPLES_MIN = 4000, 200
SAMPLED_WORK = 1_000_000_000  # samples x units x sets for each number of lost units


@dataclass(frozen=True, slots=True, eq=False)
class PlacementPlan:
    """A placement, its method, and the minimum number of distinct nodes and domains of every expert.

    ``in_place``: it keeps what the nodes hold; do not map its nodes to others.
    """

    placement: ExpertPlacement
    method: str
    node_threshold: int
    domain_threshold: int
    in_place: bool = False


def place(
    allocation: Allocation,
    loads: ArrayLike,
    cluster: Cluster,
    *,
    lost: int | None = None,
    max_straggler: float | None = None,
    moves: int = MOVES,
    seed: int = 0,
    held: ExpertPlacement | None = None,
) -> PlacementPlan:
    """Place the replicas of an allocation on its nodes; see the module.

    Args:
        loads: ``[L, E]``, those of the allocation.
        lost: the number of units lost together to plan for; default: any number.
        max_straggler: the bound on the straggler factor, at least 1; default: none.
        moves: steps of the search, over all layers.
        held: the experts that the nodes of the cluster hold now.
    Raises:
        ValueError: arrays of different shapes, ``lost`` below 1 or not below the number of units, a
            bound below 1.
        ElasticError: the allocation is not for this cluster.
    """
    loads_LE = checked_loads(loads)
    if loads_LE.shape != allocation.replicas.shape:
        raise ValueError(
            f"loads of shape {loads_LE.shape}, an allocation of shape {allocation.replicas.shape}"
        )
    _check_fits(allocation, cluster)
    planner = _Planner(allocation, loads_LE, cluster, lost)
    units = len(planner.units.capacity)
    if lost is not None and not 1 <= lost < max(units, 2):
        raise ValueError(f"lost is {lost} of {units} units: plan for 1 to {units - 1}")
    if max_straggler is not None and not max_straggler >= 1:
        raise ValueError(f"max_straggler is {max_straggler}; the busiest is never below the mean")
    best = planner.from_scratch(max_straggler, moves, seed)
    if held is not None:
        if held.counts.shape != best.counts.shape:
            raise ValueError(f"held is of shape {held.counts.shape}, the plan of {best.counts.shape}")
        kept = planner.near(held, best, max_straggler)
        if kept is not None:
            return planner.plan(kept, in_place=True)
    return planner.plan(best)


def _check_fits(allocation: Allocation, cluster: Cluster) -> None:
    most = int(allocation.replicas.sum(axis=1).max())
    num_experts = allocation.replicas.shape[1]
    nodes, domains = allocation.node_threshold, allocation.domain_threshold
    fits = (
        most <= cluster.num_slots
        and reachable_threshold(cluster.slots, num_experts, nodes) == nodes
        and reachable_threshold(domain_slots(cluster), num_experts, domains) == domains
    )
    if not fits:
        raise ElasticError(
            f"{most} replicas, each expert on {nodes} nodes in {domains} domains, do not fit "
            f"{cluster.num_slots} slots on {cluster.num_nodes} nodes in {cluster.num_domains}",
            operation="place",
            hint="Allocate again for the nodes that are there",
        )


def spread(allocation: Allocation, cluster: Cluster) -> ExpertPlacement:
    """The baseline: replicas of expert after expert, round robin over the nodes.

    Raises:
        ElasticError: the allocation is not for this cluster.
    """
    _check_fits(allocation, cluster)
    replicas = allocation.replicas
    return ExpertPlacement(spread_out(LayoutProblem(replicas, np.zeros_like(replicas), cluster.slots)))


def compact(allocation: Allocation, cluster: Cluster) -> ExpertPlacement:
    """The baseline: replicas of expert after expert, each node filled before the next.

    Raises:
        ElasticError: the allocation is not for this cluster.
    """
    _check_fits(allocation, cluster)
    replicas = allocation.replicas
    num_layers, num_experts = replicas.shape
    counts = np.zeros((num_layers, cluster.num_nodes, num_experts), dtype=np.int32)
    nodes = np.repeat(np.arange(cluster.num_nodes), cluster.slots)
    for layer in range(num_layers):
        experts = np.repeat(np.arange(num_experts), replicas[layer])
        np.add.at(counts[layer], (nodes[: len(experts)], experts), 1)
    return ExpertPlacement(counts)


@dataclass(frozen=True, slots=True, order=True)
class _Value:
    """The value of a candidate, compared in this order."""

    units: Fraction
    nodes: Fraction
    least_busy: int


class _Candidate(NamedTuple):
    """``counts`` is ``[L, N, E]``."""

    name: str
    counts: NDArray[np.int32]


class _Planner:
    """One call of ``place``: the problem for nodes and for units, and the value of candidates."""

    def __init__(self, allocation: Allocation, loads_LE: Loads, cluster: Cluster, lost: int | None) -> None:
        shares, self.bits = token_shares(loads_LE, allocation.replicas)
        self.allocation = allocation
        self.cluster = cluster
        self.tokens = sum(sum(row) for row in loads_LE.tolist())
        # A single domain is lost as a whole: only the loss of nodes can be planned for.
        self.flat = cluster.num_domains in (1, cluster.num_nodes)
        self.ids = np.arange(cluster.num_nodes) if self.flat else cluster.domain_ids
        self.nodes = LayoutProblem(allocation.replicas, shares, cluster.slots)
        self.units = self.nodes if self.flat else domain_problem(cluster, self.nodes)
        self.ranks = np.array(cluster.ranks, dtype=np.int64)
        self.lost = lost
        size = self.units.replicas.size * len(self.units.capacity)
        self.small = size <= WHOLE_FAMILY
        # To judge a candidate takes long if single nodes are lost, too.
        self.large = self.nodes.replicas.size * cluster.num_nodes > (
            SOME_FAMILY if self.flat else WHOLE_FAMILY
        )

    def from_scratch(self, bound: float | None, moves: int, seed: int) -> _Candidate:
        """The best, whatever nodes hold."""
        if self.large:
            return self.by_cores(bound)
        strict = self.strict()
        if strict is not None and bound is None and not self.small:
            return strict
        allowed = None if bound is None else self.allowed(bound)
        best, likeliest = self.best(self.candidates(strict, bound), allowed)
        if self.searchable and moves > 0:
            starts = [best] if best is likeliest else [best, likeliest]
            each = -(-moves // len(starts))
            better = [self.searched(start, allowed=allowed, moves=each, seed=seed) for start in starts]
            best, _ = self.best([best, *better], allowed)
        return best

    def near(self, held: ExpertPlacement, best: _Candidate, bound: float | None) -> _Candidate | None:
        """What is held, repaired; None if that is not about as good as the best."""
        held_LNE = held.counts > 0
        lacks = np.maximum(self.nodes.replicas - held_LNE.sum(axis=1), 0).sum()
        if int(lacks) > self.nodes.replicas.sum() * REPAIRED:
            return None
        ours_L = busiest(best.counts, self.nodes.shares, self.ranks)
        limit_L = ours_L if bound is None else self._limits(Fraction(bound))
        most = int(int(ours_L.sum()) * (1 + BUSIER))
        if bound is not None:
            most = max(int(ours_L.sum()), self.allowed(bound))
        for few in [FEW] if self.large else [FEW, 0]:
            counts = repaired(self.core_problem(), held_LNE, limit_L, exchanged=few)
            busy = int(busiest(counts, self.nodes.shares, self.ranks).sum())
            if busy <= most and self._keeps(counts) and self._about_as_likely(counts, best.counts):
                return _Candidate("what is held, repaired", counts)
        return None

    def _about_as_likely(self, counts: NDArray[np.int32], best: NDArray[np.int32]) -> bool:
        if not self.large:
            ours, theirs = self._value(counts), self._value(best)
            return ours.units >= theirs.units - TOLERANCE and ours.nodes >= theirs.nodes - TOLERANCE
        for units in [self.ids] if self.flat else [self.ids, np.arange(self.cluster.num_nodes)]:
            numbers = self._numbers(int(units.max()) + 1) if self.lost is None else [self.lost]
            numbers = [k for k in numbers if k <= self.horizon] or [1]
            lost, least = (_losses(ExpertPlacement(c), units, numbers) for c in (counts, best))
            if lost > least + TOLERANCE * len(numbers):
                return False
        return True

    @property
    def horizon(self) -> int:
        """No more domains lost together are planned for."""
        if self.lost is not None:
            return self.lost
        first = self.allocation.node_threshold if self.flat else self.allocation.domain_threshold
        return max(1, min(max(self._numbers(len(self.units.capacity)), default=1), HORIZON * first))

    def core_problem(self) -> CoreProblem:
        return CoreProblem(self.nodes, self.ids, self.ranks, self.horizon)

    def _limits(self, factor: Fraction) -> NDArray[np.int64]:
        """``[L]``: the tokens of the busiest rank of each layer at that straggler factor."""
        tokens_L = (self.nodes.shares * self.nodes.replicas).sum(axis=1)
        return np.array([int(factor * t / self.cluster.num_ranks) for t in tokens_L.tolist()], dtype=np.int64)

    @property
    def searchable(self) -> bool:
        return 1 < len(self.units.capacity) <= SEARCHED_UNITS

    def strict(self) -> _Candidate | None:
        """The strict overlap of the units, if it exists and keeps the promise."""
        if not strict_exists(self.units):
            return None
        counts = self._on_nodes(lay_out(self.units, Shape(num_groups(self.units))))
        return _Candidate("strict maximum rank overlap", counts) if self._keeps(counts) else None

    def candidates(self, strict: _Candidate | None, bound: float | None) -> Iterator[_Candidate]:
        """Candidates that keep the promise; at least one."""
        if strict is not None:
            yield strict
            if bound is None and len(self.units.replicas) == 1:
                return
        none_yet = strict is None
        promised, balanced = self.allocation, bound is not None
        threshold = promised.node_threshold if self.flat else promised.domain_threshold
        laid_out = layouts(
            self.units,
            threshold,
            whole_family=self.small and (strict is None or balanced),
            balanced=balanced or self.small,
        )
        found = ((name, self._on_nodes(counts)) for name, counts in laid_out)
        flat = [] if self.flat else [("spread over nodes", spread_out(self.nodes))]
        for name, counts in chain(found, flat):
            if self._keeps(counts):
                none_yet = False
                yield _Candidate(name, counts)
        if not self.small:
            limit_L = None if bound is None else self._limits(1 + (Fraction(bound) - 1) * HEADROOM)
            counts = lay_out_cores(self.core_problem(), limit_L)
            if self._keeps(counts):
                none_yet = False
                yield _Candidate(CORES, counts)
        if none_yet or self.small:
            last = guaranteed(self.cluster, self.nodes, promised.node_threshold)
            yield _Candidate("dealt out in turn", last)

    def by_cores(self, bound: float | None) -> _Candidate:
        """The layout of `core_layout` under that bound; if none is, the best balanced one, or dealt out."""
        least, best = -1, None
        for candidate in self._core_layouts(bound):
            if not self._keeps(candidate.counts):
                continue
            busy = int(busiest(candidate.counts, self.nodes.shares, self.ranks).sum())
            if best is None or busy < least:
                least, best = busy, candidate
            if bound is None or busy <= self.allowed(bound):
                return best
        if best is None:
            counts = guaranteed(self.cluster, self.nodes, self.allocation.node_threshold)
            return _Candidate("dealt out in turn", counts)
        return best

    def _core_layouts(self, bound: float | None) -> Iterator[_Candidate]:
        problem, name = self.core_problem(), CORES
        if bound is None:
            if strict_exists(self.units):
                # Also the cores that hardly any loss takes whole: no other plan survives more likely.
                problem = replace(problem, horizon=len(self.units.capacity))
                name = "strict maximum rank overlap"
            yield _Candidate(name, lay_out_cores(problem, None))
            return
        factor, most = 1 + (Fraction(bound) - 1) * HEADROOM, self.allowed(bound)
        for _ in range(TIGHTENED):
            counts = lay_out_cores(problem, self._limits(factor))
            yield _Candidate(name, counts)
            factor *= Fraction(most, max(int(busiest(counts, self.nodes.shares, self.ranks).sum()), 1))
        counts = lay_out(self.units, Shape(0))
        yield _Candidate("dealt out in bundles of 1", self._on_nodes(counts))

    def best(self, found: Iterable[_Candidate], allowed: int | None) -> tuple[_Candidate, _Candidate]:
        """The first best candidate of those whose busiest ranks are allowed, and of all.

        If none is allowed, the best balanced one replaces the first. Only these are kept in memory.
        """
        tops: dict[str, tuple[tuple[int | _Value, ...], _Candidate]] = {}
        for candidate in found:
            value = self._value(candidate.counts)
            over = 0 if allowed is None else max(-value.least_busy - allowed, 0)
            for kind, rank in (("allowed", (-over, value)), ("all", (value,))):
                if kind not in tops or rank > tops[kind][0]:
                    tops[kind] = (rank, candidate)
        return tops["allowed"][1], tops["all"][1]

    def searched(self, start: _Candidate, *, allowed: int | None, moves: int, seed: int) -> _Candidate:
        """The local search, layer by layer, with the losses that the other layers survive."""
        counts_LUE, shares_LE = self._on_units(start.counts), self.units.shares
        promised = self.allocation
        least = promised.node_threshold if self.flat else promised.domain_threshold
        judge = Judge(self._weights(), self._unit_ranks(), self.units.capacity, least)
        pairs = zip(counts_LUE, shares_LE, strict=True)
        busy = [judge.busiest(*pair) for pair in pairs]
        survive = np.stack([surviving_masks(minimal_sets(layer.T > 0)) for layer in counts_LUE])
        for layer in range(len(counts_LUE)):
            counts_LUE[layer] = improved(
                judge,
                counts_LUE[layer],
                shares_LE[layer],
                np.asarray(np.delete(survive, layer, axis=0).all(axis=0)),
                limit=None if allowed is None else allowed - (sum(busy) - busy[layer]),
                doubles=True,
                moves=-(-moves // len(counts_LUE)),
                seed=seed + layer,
            )
            busy[layer] = judge.busiest(counts_LUE[layer], shares_LE[layer])
            survive[layer] = surviving_masks(minimal_sets(counts_LUE[layer].T > 0))
        better = self._on_nodes(counts_LUE)
        return _Candidate(f"{start.name}, searched on", better) if self._keeps(better) else start

    def plan(self, chosen: _Candidate, *, in_place: bool = False) -> PlacementPlan:
        placement = ExpertPlacement(chosen.counts)
        placement.check(self.cluster)
        return PlacementPlan(placement, chosen.name, *self._thresholds(chosen.counts), in_place)

    # --- between nodes and units ---------------------------------------------------------------------

    def _on_nodes(self, counts_LUE: NDArray[np.int32]) -> NDArray[np.int32]:
        return counts_LUE if self.flat else within_domains(self.cluster, self.nodes, counts_LUE)

    def _on_units(self, counts_LNE: NDArray[np.int32]) -> NDArray[np.int32]:
        if self.flat:
            return counts_LNE.copy()
        shape = (counts_LNE.shape[0], len(self.units.capacity), counts_LNE.shape[2])
        out = np.zeros(shape, dtype=np.int32)
        for node, unit in enumerate(self.ids.tolist()):
            out[:, unit] += counts_LNE[:, node]
        return out

    def _unit_ranks(self) -> NDArray[np.int64]:
        out = np.zeros(len(self.units.capacity), dtype=np.int64)
        np.add.at(out, self.ids, self.ranks)
        return out

    def _thresholds(self, counts_LNE: NDArray[np.int32]) -> tuple[int, int]:
        """The minimum numbers of nodes and domains of every expert, at most the requested threshold."""
        asked = self.allocation.threshold
        nodes = min(int((counts_LNE > 0).sum(axis=1).min()), asked)
        if self.flat:
            return nodes, min(nodes, self.cluster.num_domains)
        return nodes, min(int((self._on_units(counts_LNE) > 0).sum(axis=1).min()), asked)

    def _keeps(self, counts_LNE: NDArray[np.int32]) -> bool:
        nodes, domains = self._thresholds(counts_LNE)
        promised = self.allocation
        return nodes >= promised.node_threshold and domains >= promised.domain_threshold

    # --- the judge -----------------------------------------------------------------------------------

    def _value(self, counts_LNE: NDArray[np.int32]) -> _Value:
        placement = ExpertPlacement(counts_LNE)
        sets = holder_sets(placement, self.ids)
        busy = int(busiest(counts_LNE, self.nodes.shares, self.ranks).sum())
        units = self._mean_recovery(sets, self.lost)
        nodes = units if self.flat else self._mean_recovery(holder_sets(placement), None)
        return _Value(units, nodes, -busy)

    def _mean_recovery(self, held_MU: NDArray[np.bool_], lost: int | None) -> Fraction:
        num_units = held_MU.shape[1]
        numbers = self._numbers(num_units) if lost is None else [lost]
        if not numbers or numbers == [num_units]:
            return Fraction(0)
        counts = survivor_counts(held_MU, max(numbers))
        if counts is not None:
            chances = [Fraction(counts[k], comb(num_units, k)) for k in numbers]
        else:
            size = max(SAMPLES_MIN, min(SAMPLES, SAMPLED_WORK // held_MU.size))
            chances = [Fraction(sampled_survivors(held_MU, k, size, k), size) for k in numbers]
        return sum(chances, Fraction(0)) / len(chances)

    def _numbers(self, num_units: int) -> list[int]:
        """The numbers of lost units to judge by default."""
        if num_units <= EXACT_UNITS:
            return list(range(1, num_units))
        first = self.allocation.node_threshold if self.flat else self.allocation.domain_threshold
        return [n for n in (first, 2 * first, 4 * first, 8 * first) if n < num_units]

    def _weights(self) -> NDArray[np.int64]:
        """A weight of each set of lost units, so that their sum is the mean recovery times a constant."""
        num_units = len(self.units.capacity)
        numbers = self._numbers(num_units) if self.lost is None else [self.lost]
        total = lcm(*(comb(num_units, k) for k in numbers))
        by_size = np.zeros(num_units + 1, dtype=np.int64)
        by_size[numbers] = [total // comb(num_units, k) for k in numbers]
        return by_size[np.bitwise_count(np.arange(1 << num_units))]

    def allowed(self, factor: float) -> int:
        """The tokens of the busiest ranks, over all layers, at that straggler factor."""
        tokens = self.tokens << self.bits if self.bits >= 0 else self.tokens >> -self.bits
        return int(Fraction(factor) * tokens / self.cluster.num_ranks)


def _losses(placement: ExpertPlacement, units: NDArray[np.int64], numbers: list[int]) -> Fraction:
    """The probability of not surviving, summed over these numbers of lost units; where it takes too much to
    count, what is above it for sure.
    """
    sets = small_sets(placement, units, numbers[-1])
    if len(sets) <= COUNTED_SETS:
        survived = survivor_counts(sets, numbers[-1], COUNTED_STATES)
        if survived is not None:
            return sum((1 - Fraction(survived[k], comb(sets.shape[1], k)) for k in numbers), Fraction(0))
    return sum((min(expected_losses(sets, k), Fraction(1)) for k in numbers), Fraction(0))
