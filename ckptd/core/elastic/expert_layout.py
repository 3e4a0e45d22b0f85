"""Layouts of experts on units (nodes or domains): groups that share their units, and the rest dealt out.

Source: maximum rank overlap (MRO) of Lazarus (§4.1). Experts in ascending order of replicas form
groups of as many as a unit has slots; a group gets as many units as its first member has replicas,
and each of them holds the whole group. Then a group is lost only with all units of its first member.

``Shape`` describes a family of layouts:

- ``groups`` of them get units of their own, the other experts are dealt out over the remaining slots:
  all groups is MRO, none is the spread layout, a number between pays where no strict MRO exists.
- If the groups ask for more units than there are, the largest are cut first (*levelled*, ``level``
  0), the best for disjoint groups; a number cuts at that many. At the number of units it is the
  truncation of the paper: the last group takes the rest.
- ``bundle`` experts are dealt out together, so that fewer different sets of units arise.
- ``even`` slots of every unit take the most replicated experts, in turn. MRO leaves these to the
  units that the others do not need, which then compute almost all; two or three slots set aside undo
  that, for somewhat smaller groups.

All layers have one order of units, the largest first, and the same groups by rank. Group g of every
layer contains the same *core*: as many units as the least replicated layer gives it. More units of
another layer come from a pool behind the cores. So only the loss of cores can lose the job: as if
there were one layer. Remaining slots take the remaining replicas: on a unit without the expert if
there is one, the hottest on the units with least to do.

Complexity: O(units * experts) for a layer in array operations; one loop over layers and over groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ckptd.core.elastic.allocation import domain_slots
from ckptd.core.elastic.elastic_types import Cluster

SEPARATED_MAX = 256  # replicas of one layer that are moved off units that already hold their expert
SCANNED = 1024  # replicas looked at together


@dataclass(frozen=True, slots=True)
class LayoutProblem:
    """``replicas`` and ``shares`` (tokens of one replica) are ``[L, E]``, ``capacity`` is ``[U]``."""

    replicas: NDArray[np.int64]
    shares: NDArray[np.int64]
    capacity: NDArray[np.int64]

    @property
    def uniform(self) -> bool:
        return bool((self.capacity == self.capacity[0]).all())


@dataclass(frozen=True, slots=True)
class Shape:
    """A layout of the family; see the module."""

    groups: int
    level: int = 0
    bundle: int = 1
    even: int = 0


class _Group(NamedTuple):
    """Ranks ``start … stop`` of every layer, with ``units`` ``[L]``: the number of units in each layer."""

    start: int
    stop: int
    units: NDArray[np.int64]

    @property
    def core(self) -> int:
        return int(self.units.min())


def num_groups(problem: LayoutProblem) -> int:
    """The number of groups if all units are as large as the largest."""
    return -(-int(problem.replicas.shape[1]) // int(problem.capacity.max()))


def strict_exists(problem: LayoutProblem) -> bool:
    """True if every layer has a strict MRO: units of one size, enough of them for every group."""
    if not problem.uniform:
        return False
    num_units = len(problem.capacity)
    ascending_LE = np.sort(np.minimum(problem.replicas, num_units), axis=1)
    representatives_LG = ascending_LE[:, :: int(problem.capacity[0])]
    return bool((representatives_LG.sum(axis=1) <= num_units).all())


def lay_out(problem: LayoutProblem, shape: Shape) -> NDArray[np.int32]:
    """``[L, U, E]``: all replicas in the layout of that shape.

    The replicas must fit the slots, and each unit must have more than ``even``. The caller checks
    that every expert is on enough distinct units.
    """
    num_layers, num_experts = problem.replicas.shape
    order_LE = ascending(problem)
    units = np.argsort(-problem.capacity, kind="stable")
    counts = np.zeros((num_layers, len(units), num_experts), dtype=np.int32)
    hot = _evenly_placed(problem, order_LE, shape.even)
    groups = _groups(problem, order_LE[:, : num_experts - hot], shape)
    offset = 0
    for group in groups:  # the cores, of all layers at once
        where = units[offset : offset + group.core]
        experts_LB = order_LE[:, group.start : group.stop]
        counts[np.arange(num_layers)[:, None, None], where[:, None], experts_LB[:, None, :]] = 1
        offset += group.core
    for layer in range(num_layers):
        filling = _Filling(problem, layer, counts[layer], units)
        safe = _beyond_the_cores(filling, order_LE[layer], groups, layer, offset, shape.even)
        filling.take_stock()
        filling.deal_out(order_LE[layer, num_experts - hot :][::-1], 1)
        filling.deal_out(order_LE[layer, safe : num_experts - hot][::-1], shape.bundle)
        filling.fill_up()
    return counts


def _evenly_placed(problem: LayoutProblem, order_LE: NDArray[np.int64], even: int) -> int:
    """The number of the most replicated experts that fit the slots set aside, in every layer."""
    ascending_LE = np.take_along_axis(problem.replicas, order_LE, axis=1)
    taken_LE = np.cumsum(ascending_LE[:, ::-1], axis=1)
    return int((taken_LE <= even * len(problem.capacity)).all(axis=0).sum())


def complete(problem: LayoutProblem, counts: NDArray[np.int32]) -> None:
    """Place the remaining replicas, in ``counts``."""
    units = np.argsort(-problem.capacity, kind="stable")
    for layer in range(len(counts)):
        filling = _Filling(problem, layer, counts[layer], units)
        filling.take_stock()
        filling.fill_up()


def spread_out(problem: LayoutProblem) -> NDArray[np.int32]:
    """Round robin: the replicas of expert after expert go to one unit after the other."""
    num_layers, num_experts = problem.replicas.shape
    units = np.arange(len(problem.capacity))
    counts = np.zeros((num_layers, len(units), num_experts), dtype=np.int32)
    for layer in range(num_layers):
        filling = _Filling(problem, layer, counts[layer], units)
        filling.take_stock()
        filling.deal_out(np.arange(num_experts), 1)
        filling.fill_up()
    return counts


# --- groups ----------------------------------------------------------------------------------------------


def ascending(problem: LayoutProblem) -> NDArray[np.int64]:
    """``[L, E]``: experts by replicas, then by load, then by number."""
    order = np.lexsort((problem.shares, problem.replicas), axis=1)
    return np.asarray(order, dtype=np.int64)


def _groups(problem: LayoutProblem, order_LE: NDArray[np.int64], shape: Shape) -> list[_Group]:
    ascending_LE = np.take_along_axis(problem.replicas, order_LE, axis=1)
    capacity = np.sort(problem.capacity)[::-1] - shape.even
    limit_L = _levels(problem, ascending_LE, shape)
    out: list[_Group] = []
    start, offset = 0, 0
    left_L = np.full(len(ascending_LE), len(capacity), dtype=np.int64)
    while start < ascending_LE.shape[1] and len(out) < shape.groups:
        units_L = np.minimum(np.minimum(ascending_LE[:, start], limit_L), left_L)
        core = int(units_L.min())
        if not core:
            break
        stop = min(start + int(capacity[offset + core - 1]), ascending_LE.shape[1])
        out.append(_Group(start, stop, units_L))
        left_L = left_L - units_L
        start, offset = stop, offset + core
    return _topped_up(out, ascending_LE, left_L, shape)


def _levels(problem: LayoutProblem, ascending_LE: NDArray[np.int64], shape: Shape) -> NDArray[np.int64]:
    """``[L]``: the most units of a group, so that all groups find room (if units are equal)."""
    num_units = len(problem.capacity)
    if shape.level or not problem.uniform:
        return np.full(len(ascending_LE), shape.level or num_units, dtype=np.int64)
    wanted_LG = ascending_LE[:, :: int(problem.capacity[0]) - shape.even][:, : shape.groups]
    levels = np.full(len(ascending_LE), num_units, dtype=np.int64)
    for layer in np.flatnonzero(wanted_LG.sum(axis=1) > num_units):
        fits = [n for n in range(1, num_units + 1) if np.minimum(wanted_LG[layer], n).sum() <= num_units]
        levels[layer] = max(fits, default=1)
    return levels


def _topped_up(
    groups: list[_Group], ascending_LE: NDArray[np.int64], left_L: NDArray[np.int64], shape: Shape
) -> list[_Group]:
    """The last groups that were cut get one each of the units that levelling left over."""
    if shape.level:
        return groups
    for index in reversed(range(len(groups))):
        group = groups[index]
        more_L = (group.units < ascending_LE[:, group.start]) & (left_L > 0)
        groups[index] = group._replace(units=group.units + more_L)
        left_L = left_L - more_L
    return groups


def _beyond_the_cores(
    filling: _Filling,
    order_E: NDArray[np.int64],
    groups: list[_Group],
    layer: int,
    pool: int,
    even: int,
) -> int:
    """Place the groups of a layer on their units beyond the cores; returns the number of ranks in groups."""
    for group in groups:
        extra = int(group.units[layer]) - group.core
        for unit in filling.units[pool : pool + extra].tolist():
            room = int(filling.capacity[unit]) - even
            filling.counts[unit, order_E[group.start : group.stop][:room]] = 1
        pool += extra
    return groups[-1].stop if groups else 0


# --- filling ---------------------------------------------------------------------------------------------


class _Filling:
    """The remaining slots and replicas of one layer; fills ``counts`` ``[U, E]`` in place."""

    def __init__(
        self,
        problem: LayoutProblem,
        layer: int,
        counts: NDArray[np.int32],
        units: NDArray[np.int64],
    ) -> None:
        self.counts = counts
        self.units = units
        self.capacity = problem.capacity
        self.replicas = problem.replicas[layer]
        self.shares = problem.shares[layer]
        self.left = self.replicas
        self.vacant = problem.capacity

    def take_stock(self) -> None:
        self.left = self.replicas - self.counts.sum(axis=0)
        self.vacant = self.capacity - self.counts.sum(axis=1)

    def deal_out(self, experts: NDArray[np.int64], bundle: int) -> None:
        """Deal these experts out in bundles of consecutive ones, as far as bundles fit."""
        bundles = [experts[i : i + bundle] for i in range(0, len(experts), bundle)]
        least = np.array([int(self.left[part].min()) for part in bundles], dtype=np.int64)
        where = _rounds(self.units, self.vacant // bundle)
        which = np.repeat(np.arange(len(bundles)), least)[: len(where)]
        for member in range(bundle):
            inside = np.array([len(part) > member for part in bundles], dtype=np.bool_)[which]
            taken = np.array([part[min(member, len(part) - 1)] for part in bundles], dtype=np.int64)
            pairs = (where[: len(which)][inside], taken[which[inside]])
            self._put(*pairs)

    def _put(self, units: NDArray[np.int64], experts: NDArray[np.int64]) -> None:
        np.add.at(self.counts, (units, experts), 1)
        self.vacant = self.vacant - np.bincount(units, minlength=len(self.vacant))
        self.left = self.left - np.bincount(experts, minlength=len(self.left))

    def fill_up(self) -> None:
        """Place the rest: experts that could hit their own units first, then all others, then mend."""
        fixed = self.counts.copy()
        self._those_with_room_at_home()
        tokens = self.counts @ self.shares
        units = self.units[np.lexsort((tokens[self.units], -self.vacant[self.units]))]
        experts = np.lexsort((-self.shares, -self.left))
        where = _rounds(units, self.vacant)
        which = np.repeat(experts, self.left[experts])
        self._put(where[: len(which)], which)
        self._separate(fixed)

    def _those_with_room_at_home(self) -> None:
        """Place experts whose own units have room: dealing could put them there a second time."""
        vacant = self.vacant > 0
        at_home = (self.counts[vacant] > 0).any(axis=0) & (self.left > 0)
        experts = np.flatnonzero(at_home)
        for expert in experts[np.argsort(-self.left[experts], kind="stable")].tolist():
            open_U = self.units[(self.vacant * (self.counts[:, expert] == 0))[self.units] > 0]
            widest = open_U[np.argsort(-self.vacant[open_U], kind="stable")]
            chosen = widest[: int(self.left[expert])]
            self.counts[chosen, expert] += 1
            self.vacant[chosen] -= 1
            self.left[expert] -= len(chosen)

    def _separate(self, fixed: NDArray[np.int32]) -> None:
        """Move second replicas of an expert off a unit, by exchange if necessary."""
        held = (self.counts > 0).sum(axis=0)
        crowded = np.flatnonzero(held < np.minimum(self.replicas, len(self.units)))
        twice = np.argwhere(self.counts[:, crowded] > 1)[:SEPARATED_MAX]
        if not len(twice):
            return
        movable = np.argwhere(self.counts > fixed)
        open_U = np.bincount(movable[:, 0], minlength=len(self.vacant)) + self.vacant > 0
        stuck = ~(self.counts[open_U] == 0).any(axis=0)  # on every unit that could take it
        for unit, column in twice.tolist():
            expert = int(crowded[column])
            while self.counts[unit, expert] > 1 and not stuck[expert]:
                if not self._exchanged(unit, expert, movable, fixed):
                    break

    def _exchanged(
        self, unit: int, expert: int, movable: NDArray[np.int64], fixed: NDArray[np.int32]
    ) -> bool:
        """Move one replica to a unit without that expert; a displaced replica comes back."""
        empty = np.flatnonzero((self.counts[:, expert] == 0) & (self.vacant > 0))
        if len(empty):
            self._move(unit, int(empty[0]), expert)
            return True
        for begin in range(0, len(movable), SCANNED):
            part = movable[begin : begin + SCANNED]
            units, experts = part[:, 0], part[:, 1]
            fits = (self.counts[units, expert] == 0) & (self.counts[unit, experts] == 0)
            fits &= self.counts[units, experts] > fixed[units, experts]
            if fits.any():
                index = begin + int(fits.argmax())
                other, stranger = movable[index].tolist()
                self._move(unit, other, expert)
                self._move(other, unit, stranger)
                movable[index] = unit, stranger
                return True
        return False

    def _move(self, unit: int, other: int, expert: int) -> None:
        self.counts[unit, expert] -= 1
        self.counts[other, expert] += 1
        self.vacant[unit] += 1
        self.vacant[other] -= 1


def _rounds(units: NDArray[np.int64], slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """Units in their order, once for each slot: all with a first slot, then all with a second, and so on."""
    counts = slots[units]
    most = int(counts.max(initial=0))
    if not most:
        return units[:0]
    return np.concatenate([units[counts > index] for index in range(most)])


def domain_problem(cluster: Cluster, problem: LayoutProblem) -> LayoutProblem:
    """The same replicas on domains instead of nodes."""
    return LayoutProblem(problem.replicas, problem.shares, domain_slots(cluster))


def layouts(
    problem: LayoutProblem, threshold: int, *, whole_family: bool, balanced: bool
) -> Iterator[tuple[str, NDArray[np.int32]]]:
    """The candidates, each ``[L, U, E]``, with their names: probably best ones first.

    Args:
        threshold: minimum number of units of every expert.
        whole_family: every shape, instead of a few.
        balanced: of the few, also those that give up recovery for balance.
    """
    shapes = _family(problem, threshold) if whole_family else _few(problem, balanced=balanced)
    for shape in shapes:
        yield _name(problem, shape), lay_out(problem, shape)
    yield "spread", spread_out(problem)


def _few(problem: LayoutProblem, *, balanced: bool) -> list[Shape]:
    groups, slots = num_groups(problem), int(problem.capacity.min())
    out = [Shape(groups), Shape(groups, len(problem.capacity))]
    if balanced:
        evens = {max(slots // 4, 1), slots // 2, slots * 3 // 4} & set(range(1, slots))
        out += [Shape(2 * groups, 0, 1, even) for even in sorted(evens)]
        out += [Shape(groups // 4), Shape(0)]
    return out


def _family(problem: LayoutProblem, threshold: int) -> list[Shape]:
    units, slots = len(problem.capacity), int(problem.capacity.min())
    levels = dict.fromkeys([0, units] if problem.uniform else [units, threshold, min(2 * threshold, units)])
    most = -(-problem.replicas.shape[1] // slots)  # groups, if all units are as small as the smallest
    bundles = [b for b in range(1, slots + 1) if slots % b == 0]
    return [
        *(Shape(most, level) for level in levels),
        *(Shape(n, level, b) for n in range(most - 1, 0, -1) for level in levels for b in bundles),
        *(Shape(0, 0, bundle) for bundle in bundles),
        *(Shape(problem.replicas.shape[1], 0, 1, even) for even in range(1, slots)),
    ]


def _name(problem: LayoutProblem, shape: Shape) -> str:
    if not shape.groups:
        return f"dealt out in bundles of {shape.bundle}"
    cut = "truncated" if shape.level else "levelled"
    name = f"{cut} maximum rank overlap"
    if shape.even:
        return f"{name} beside {shape.even} slots of the most replicated"
    if shape.groups < num_groups(problem):
        name += f" of {shape.groups} groups, the rest dealt out in bundles of {shape.bundle}"
    return name


def within_domains(
    cluster: Cluster, problem: LayoutProblem, counts_LDE: NDArray[np.int32]
) -> NDArray[np.int32]:
    """``[L, N, E]``: the replicas of each domain on its nodes, by maximum rank overlap."""
    num_layers, _, num_experts = counts_LDE.shape
    out = np.zeros((num_layers, cluster.num_nodes, num_experts), dtype=np.int32)
    ids = cluster.domain_ids
    for domain in range(counts_LDE.shape[1]):
        nodes = np.flatnonzero(ids == domain)
        if len(nodes) == 1:
            out[:, nodes[0]] = counts_LDE[:, domain]
            continue
        for layer in range(num_layers):
            present = np.flatnonzero(counts_LDE[layer, domain])
            if not len(present):
                continue
            replicas = counts_LDE[layer, domain, present].astype(np.int64)[None]
            inner = LayoutProblem(replicas, problem.shares[layer, present][None], cluster.slots[nodes])
            laid = lay_out(inner, Shape(num_groups(inner)))[0]
            out[layer, nodes[:, None], present] = laid
    return out


def guaranteed(cluster: Cluster, problem: LayoutProblem, nodes_wanted: int) -> NDArray[np.int32]:
    """A placement that keeps the promise of the allocation: the experts in turn, node after node.

    Proof. A node takes ``min(slots, E)`` experts in a row, all different. A domain with E such
    slots or more gets every expert; the smaller domains come last, and none of them gets an expert
    twice. So every expert gets ``floor(sum of min(slots, E) / E)`` nodes, and as many domains by
    the same sum over domains: the promise of ``allocation.reachable_threshold``. Of these nodes, the
    first in each domain are taken first.
    """
    num_layers, num_experts = problem.replicas.shape
    ids = cluster.domain_ids
    small = domain_problem(cluster, problem).capacity[ids] < num_experts
    line = np.lexsort((ids, small))
    places = np.repeat(line, np.minimum(cluster.slots, num_experts)[line])
    counts = np.zeros((num_layers, cluster.num_nodes, num_experts), dtype=np.int32)
    order_LE = ascending(problem)
    for turn in range(num_experts):
        nodes = places[turn::num_experts]
        _, first = np.unique(ids[nodes], return_index=True)
        others = np.setdiff1d(np.arange(len(nodes)), first)
        chosen = nodes[np.concatenate([np.sort(first), others])[:nodes_wanted]]
        counts[np.arange(num_layers)[:, None], chosen, order_LE[:, turn, None]] = 1
    complete(problem, counts)
    return counts
