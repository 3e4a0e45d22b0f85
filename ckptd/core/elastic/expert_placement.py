"""Placement of replicas on nodes, so that the job most likely survives the next losses (docs/elastic.md,
section 2).

- If every layer has a strict maximum rank overlap (``expert_layout``), that is the plan. Several
  layers survive like one whose groups have the fewest units that any layer gives them.
- Otherwise (and if several layers are small enough to try) it is the best of a family of layouts,
  judged by one number for all layers together. A candidate that breaks the promise of the
  allocation is dropped; one always keeps it (``guaranteed``).
- For few units a local search improves the best one, over all layers in turn (``improved``).
- A domain of several nodes is planned as one unit first, then the nodes within it among themselves. A
  single domain is no unit: nodes are.

The value is the probability of surviving ``lost`` units that are lost together, or, by default, its
mean over 1 … U - 1 lost units. Beyond ``EXACT_UNITS`` units these are f, 2f, 4f and 8f, and sampled
where counting takes too much (``survival``). If domains have several nodes, the loss of single nodes
decides between equals, then the straggler factor. ``max_straggler`` bounds that factor: then the
plan is the most likely survivor under the bound, or the best balanced candidate if none is under it.
Values are integers and exact fractions: every rank finds the same plan.

Complexity: a strict plan is one layout, O(L * N * E) in array operations. Otherwise the number of
candidates is bounded (``WHOLE_FAMILY``), and the search by ``moves``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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
from ckptd.core.elastic.survival import (
    holder_sets,
    minimal_sets,
    sampled_survivors,
    surviving_masks,
    survivor_counts,
)
from ckptd.errors import ElasticError

__all__ = ["Judge", "PlacementPlan", "compact", "improved", "place", "spread"]


MOVES = 2000  # of the search, over all layers: about 0.1 s
SEARCHED_UNITS = 10
EXACT_UNITS = 64
WHOLE_FAMILY = 20_000  # layers x units x experts up to which every shape is tried: about 1 s
SAMPLES, SAMPLES_MIN = 4000, 200
SAMPLED_WORK = 1_000_000_000  # samples x units x sets for each number of lost units


@dataclass(frozen=True, slots=True, eq=False)
class PlacementPlan:
    """A placement, its method, and the minimum number of distinct nodes and domains of every expert."""

    placement: ExpertPlacement
    method: str
    node_threshold: int
    domain_threshold: int


def place(
    allocation: Allocation,
    loads: ArrayLike,
    cluster: Cluster,
    *,
    lost: int | None = None,
    max_straggler: float | None = None,
    moves: int = MOVES,
    seed: int = 0,
) -> PlacementPlan:
    """Place the replicas of an allocation on its nodes; see the module.

    Args:
        loads: ``[L, E]``, those of the allocation.
        lost: the number of units lost together to plan for; default: any number.
        max_straggler: the bound on the straggler factor, at least 1; default: none.
        moves: exchanges that the local search tries, over all layers.
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
    strict = planner.strict()
    if strict is not None and max_straggler is None and not planner.small:
        return planner.plan(strict)
    allowed = None if max_straggler is None else planner.allowed(max_straggler)
    best, likeliest = planner.best(planner.candidates(strict, allowed), allowed)
    if planner.searchable and moves > 0:
        starts = [best] if best is likeliest else [best, likeliest]
        runs = [(start, doubles) for start in starts for doubles in (False, True)]
        each = -(-moves // len(runs))
        better = [planner.searched(*run, allowed=allowed, moves=each, seed=seed) for run in runs]
        best, _ = planner.best([best, *better], allowed)
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
        self.small = self.units.replicas.size * len(self.units.capacity) <= WHOLE_FAMILY

    @property
    def searchable(self) -> bool:
        return 1 < len(self.units.capacity) <= SEARCHED_UNITS

    def strict(self) -> _Candidate | None:
        """The strict overlap of the units, if it exists and keeps the promise."""
        if not strict_exists(self.units):
            return None
        counts = self._on_nodes(lay_out(self.units, Shape(num_groups(self.units))))
        return _Candidate("strict maximum rank overlap", counts) if self._keeps(counts) else None

    def candidates(self, strict: _Candidate | None, allowed: int | None) -> Iterator[_Candidate]:
        """Candidates that keep the promise; at least one."""
        if strict is not None:
            yield strict
            if allowed is None and len(self.units.replicas) == 1:
                return
        none_yet = strict is None
        promised, balanced = self.allocation, allowed is not None
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
        if none_yet or self.small:
            last = guaranteed(self.cluster, self.nodes, promised.node_threshold)
            yield _Candidate("dealt out in turn", last)

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

    def searched(
        self, start: _Candidate, doubles: bool, *, allowed: int | None, moves: int, seed: int
    ) -> _Candidate:
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
                doubles=doubles,
                moves=-(-moves // len(counts_LUE)),
                seed=seed + layer,
            )
            busy[layer] = judge.busiest(counts_LUE[layer], shares_LE[layer])
            survive[layer] = surviving_masks(minimal_sets(counts_LUE[layer].T > 0))
        better = self._on_nodes(counts_LUE)
        return _Candidate(f"{start.name}, searched on", better) if self._keeps(better) else start

    def plan(self, chosen: _Candidate) -> PlacementPlan:
        placement = ExpertPlacement(chosen.counts)
        placement.check(self.cluster)
        return PlacementPlan(placement, chosen.name, *self._thresholds(chosen.counts))

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


# --- the search ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Judge:
    """``weights`` ``[2^U]`` of each set of lost units; ``ranks`` and ``capacity`` are ``[U]``. Every expert
    on ``least`` units stays on as many.
    """

    weights: NDArray[np.int64]
    ranks: NDArray[np.int64]
    capacity: NDArray[np.int64]
    least: int

    def busiest(self, counts_UE: NDArray[np.int32], shares_E: NDArray[np.int64]) -> int:
        return int((counts_UE @ shares_E // self.ranks).max())


class _Layer:
    """One layer's placement during the search; moves update its holders and tokens."""

    def __init__(
        self,
        judge: Judge,
        counts_UE: NDArray[np.int32],
        shares_E: NDArray[np.int64],
        others: NDArray[np.bool_],
        limit: int | None,
    ) -> None:
        self.judge = judge
        self.limit = limit
        self.counts = counts_UE
        self.shares = shares_E
        self.weights = np.where(others, judge.weights, 0)
        self.masks = np.arange(len(others), dtype=np.int64)
        self.lost_with: dict[int, NDArray[np.bool_]] = {}
        self.holders = [sum(1 << int(u) for u in np.flatnonzero(column)) for column in counts_UE.T]
        self.tokens = counts_UE @ shares_E

    def value(self) -> tuple[int, int, list[int]]:
        lost = np.zeros(len(self.masks), dtype=np.bool_)
        for holders in set(self.holders):
            if holders not in self.lost_with:
                self.lost_with[holders] = (self.masks & holders) == holders
            lost |= self.lost_with[holders]
        survived = int(self.weights.sum()) - int(self.weights[lost].sum())
        tokens = self.tokens // self.judge.ranks
        over = 0 if self.limit is None else int(np.maximum(tokens - self.limit, 0).sum())
        return -over, survived, [-n for n in sorted(tokens.tolist(), reverse=True)]

    def move(self, unit: int, other: int, expert: int) -> None:
        """One replica from ``unit`` to ``other``."""
        self.counts[unit, expert] -= 1
        self.counts[other, expert] += 1
        self.tokens[unit] -= self.shares[expert]
        self.tokens[other] += self.shares[expert]
        if not self.counts[unit, expert]:
            self.holders[expert] &= ~(1 << unit)
        self.holders[expert] |= 1 << other


def improved(
    judge: Judge,
    counts_UE: NDArray[np.int32],
    shares_E: NDArray[np.int64],
    others: NDArray[np.bool_],
    *,
    limit: int | None,
    doubles: bool,
    moves: int,
    seed: int,
) -> NDArray[np.int32]:
    """A placement of the same replicas that is not worse, after ``moves`` tries.

    A move exchanges up to a whole bundle of replicas between two units (what a group has in common
    moves together), or moves a replica to an empty slot. Some moves put a second replica of an
    expert on a unit, which frees a slot where others may overlap; they leave it ``least`` units.

    The value of a layer is a sum of integer weights over the losses that it and all other layers
    survive, then the loads of the units, the busiest first; an excess over ``limit`` counts before
    both. A move that does not make it worse is kept, so that plateaus are crossed. The moves come
    from raw words of a PCG64, the same on every rank.

    Complexity: O(2^U * distinct holder sets) for a move, so this is for few units.

    Args:
        others: ``[2^U]``, the losses that the other layers survive.
        limit: of the busiest unit's tokens, in the fixed point of the shares.
        doubles: True if an expert may get twice onto a unit.
    """
    layer = _Layer(judge, counts_UE.copy(), shares_E, others, limit)
    words = iter(np.random.PCG64(seed).random_raw(4 * moves).tolist())
    best = layer.value()
    for _ in range(moves):
        least = judge.least if doubles else len(counts_UE)
        change = _change(layer.counts, judge.capacity, least, [next(words) for _ in range(4)])
        for step in change:
            layer.move(*step)
        value = layer.value() if change else best
        if value < best:
            for unit, other, expert in reversed(change):
                layer.move(other, unit, expert)
        else:
            best = value
    return layer.counts


def _change(
    counts_UE: NDArray[np.int32], capacity_U: NDArray[np.int64], least: int, words: Sequence[int]
) -> list[tuple[int, int, int]]:
    """A random exchange as single moves; empty if the two units have nothing to exchange."""
    num_units = len(counts_UE)
    unit = words[0] % num_units
    other = (unit + 1 + words[1] % max(num_units - 1, 1)) % num_units
    here, there = counts_UE[unit] > 0, counts_UE[other] > 0
    may_double = (counts_UE > 0).sum(axis=0) > (least if words[2] & 256 else len(counts_UE))
    gives = np.flatnonzero(here & (~there | may_double)).tolist()
    takes = np.flatnonzero(there & ~here).tolist()
    empty = int(capacity_U[other] - counts_UE[other].sum())
    size = 1 + words[2] % 4
    first = _some(gives, size, words[3])
    back = _some(takes, max(len(first) - empty, 0), words[3] >> 20)
    first = first[: len(back) + empty]
    return [(unit, other, e) for e in first] + [(other, unit, e) for e in back]


def _some(items: list[int], size: int, word: int) -> list[int]:
    """Up to ``size`` of the items; half of the time adjacent ones, which often are of one group."""
    if not items or not size:
        return []
    start, stride = word % len(items), 1 if word >> 10 & 1 else 1 + (word >> 11) % len(items)
    chosen = {items[(start + index * stride) % len(items)] for index in range(size)}
    return sorted(chosen)
