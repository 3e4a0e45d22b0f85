"""Layouts of large problems, quickly: cores of nodes that share experts in every layer, the rest by load.

A *core* is a set of nodes in distinct domains. In every layer each node of a core holds all of that
core's experts, so these are lost only with the whole core; the cores are disjoint and the same in
all layers. Experts are taken in ascending order of replicas, as in maximum rank overlap
(`expert_layout`), and a core has as many nodes as the least replicated of its experts in any layer.

- **Domains.** The nodes of one set of domains form one core for each of their nodes: few sets of
  domains are lethal, and few sets of nodes.
- **Balance.** Experts of as many replicas are interchangeable: the heavy ones are dealt out over the
  cores. If the experts of a core are still too heavy for a limit, the core takes fewer in that layer,
  and the other slots of its nodes get replicas of others. Only cores that need it give up overlap.
- **The rest.** The other replicas go to the other slots, the heaviest to the nodes that have least to
  do, on nodes without that expert. Experts for which no core is left are so often replicated
  (``horizon``) that no judged loss takes them.

All numbers are integers; nothing is drawn at random.

Complexity: O(L * (R log R + cores)) for R replicas of a layer, and one array ``[L, N, E]``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ckptd.core.elastic.expert_layout import LayoutProblem

Ints = NDArray[np.int64]

# Rounds of exchanges for replicas that met their own expert: of 400 in a layer of 8,192 about 5 are needed.
_EXCHANGES = 24
_SINGLY = 500_000  # replicas looked at afterwards, for those that are still where they should not be
# Domains of as many nodes leave one out of all cores: it takes the place of the first that is lost, and what
# it gives up for that is held by many.
SPARE_FROM = 8
_STRIDE = 7919  # a prime, so that partners of one replica differ from round to round


@dataclass(frozen=True, slots=True)
class CoreProblem:
    """What is to be laid out.

    Args:
        nodes: the replicas, their tokens, and the slots of each node.
        domains: ``[N]``, the number of each node's domain.
        ranks: ``[N]``, of each node.
        horizon: no judged loss takes more domains.
        across: the nodes, one of each domain after the other.
    """

    nodes: LayoutProblem
    domains: Ints
    ranks: Ints
    horizon: int
    across: Ints = field(init=False, repr=False)

    def __post_init__(self) -> None:
        nodes = np.argsort(self.domains, kind="stable")
        ordered = self.domains[nodes]
        inner = np.arange(len(nodes)) - np.searchsorted(ordered, ordered)
        object.__setattr__(self, "across", nodes[np.argsort(inner, kind="stable")])


class _Core(NamedTuple):
    """``nodes``; in layer l it has the experts at ``start[l] … stop[l]`` of the layer's order."""

    nodes: Ints
    start: Ints
    stop: Ints


def lay_out_cores(problem: CoreProblem, limit_L: Ints | None) -> NDArray[np.int32]:
    """``[L, N, E]``: all replicas.

    Args:
        limit_L: of the busiest rank's tokens in each layer, in the fixed point of the shares; cores keep
            to it, the result nearly. None: no limit.
    """
    replicas_LE = problem.nodes.replicas
    num_layers, num_experts = replicas_LE.shape
    order_LE = _order(problem.nodes)
    cores = list(_cores(problem, order_LE, limit_L))
    counts = np.zeros((num_layers, len(problem.domains), num_experts), dtype=np.int32)
    for layer in range(num_layers):
        for core in cores:
            experts = order_LE[layer, core.start[layer] : core.stop[layer]]
            counts[layer, core.nodes[:, None], experts] = 1
        settle(problem, layer, counts[layer])
    return counts


# --- cores -------------------------------------------------------------------------------------------------


def _order(problem: LayoutProblem) -> Ints:
    """``[L, E]``: experts by replicas; of as many replicas so that heavy and light ones alternate, with
    the whole range within each run of as many experts as a unit has slots.
    """
    plain_LE = np.lexsort((-problem.shares, problem.replicas), axis=1)
    replicas_LE = np.take_along_axis(problem.replicas, plain_LE, axis=1)
    num_experts = replicas_LE.shape[1]
    at_E = np.arange(num_experts)
    new_LE = np.diff(replicas_LE, axis=1, prepend=0) > 0
    first_LE = np.maximum.accumulate(np.where(new_LE, at_E, 0), axis=1)
    ends_LE = np.roll(new_LE, -1, axis=1)
    ends_LE[:, -1] = True
    last_LE = np.minimum.accumulate(np.where(ends_LE, at_E, num_experts)[:, ::-1], axis=1)[:, ::-1]
    runs_LE = -(-(last_LE - first_LE + 1) // int(problem.capacity.max()))
    inner_LE = at_E - first_LE
    dealt_LE = np.lexsort((inner_LE, inner_LE % runs_LE, first_LE), axis=1)
    return np.asarray(np.take_along_axis(plain_LE, dealt_LE, axis=1), dtype=np.int64)


def _cores(problem: CoreProblem, order_LE: Ints, limit_L: Ints | None) -> Iterator[_Core]:
    """Cores for all experts that a judged loss could take, as far as there is room."""
    replicas_LE = np.take_along_axis(problem.nodes.replicas, order_LE, axis=1)
    room = _Room(problem, order_LE, limit_L)
    domains = _by_size(problem)
    level = len(domains) if limit_L is not None else _level(problem, replicas_LE, domains)
    start, used, before = np.zeros(len(order_LE), dtype=np.int64), 0, -1
    num_experts = order_LE.shape[1]
    while (left := start < num_experts).any():
        wanted = int(replicas_LE[left, start[left]].min())
        # A larger core would only leave less choice for the rest.
        size = min(wanted, level, 2 * problem.horizon, len(domains))
        if used and used + size > len(domains) and len(domains) - used <= problem.horizon:
            # Another round: what slots are left in these domains.
            if wanted > problem.horizon or int(start.sum()) == before:
                return
            used, before = 0, int(start.sum())
        size = min(size, len(domains) - used)
        chosen = domains[used : used + size]
        rows = min(map(len, chosen))
        for row in range(rows - (limit_L is not None and rows >= SPARE_FROM)):
            nodes = np.array([domain[row] for domain in chosen], dtype=np.int64)
            stop = room.take(start, nodes)
            yield _Core(nodes, start, stop)
            start = stop
        used += size


def _by_size(problem: CoreProblem) -> list[Ints]:
    """The nodes of each domain, those with most slots first; the largest domains first."""
    slots = problem.nodes.capacity
    found = []
    for domain in range(int(problem.domains.max()) + 1):
        nodes = np.flatnonzero(problem.domains == domain)
        found.append(nodes[np.argsort(-slots[nodes], kind="stable")])
    return sorted(found, key=lambda nodes: -int(slots[nodes].sum()))


def _level(problem: CoreProblem, replicas_LE: Ints, domains: list[Ints]) -> int:
    """The most domains of a core, so that all cores that a judged loss could take find room."""
    wanted = replicas_LE.min(axis=0).tolist()
    room = [int(problem.nodes.capacity[nodes].sum()) for nodes in domains]

    def fits(level: int) -> bool:
        start = used = 0
        while start < len(wanted) and wanted[start] <= problem.horizon:
            used += min(wanted[start], level)
            if used > len(room):
                return False
            start += room[used - 1]
        return True

    levels = range(1, len(room) + 1)
    return max(bisect_left(levels, True, key=lambda level: not fits(level)), int(wanted[0]))


class _Room:
    """What the nodes have taken in each layer, and how many experts a core of them can take."""

    def __init__(self, problem: CoreProblem, order_LE: Ints, limit_L: Ints | None) -> None:
        shares_LE = np.take_along_axis(problem.nodes.shares, order_LE, axis=1)
        first = np.zeros((len(order_LE), 1), dtype=np.int64)
        self._upto = np.concatenate([first, np.cumsum(shares_LE, axis=1)], axis=1)
        self._limit_L, self._ranks = limit_L, problem.ranks
        replicas_LE = problem.nodes.replicas
        # What another replica weighs, on average.
        self._other_L = (problem.nodes.shares * replicas_LE).sum(axis=1) // replicas_LE.sum(axis=1)
        self._slots = np.tile(problem.nodes.capacity, (len(order_LE), 1))
        self._tokens = np.zeros_like(self._slots)

    def take(self, start: Ints, nodes: Ints) -> Ints:
        """Where the core of these nodes ends in each layer; they have its experts from now on."""
        layers, num_experts = np.arange(len(start)), self._upto.shape[1] - 1
        slots_L = self._slots[:, nodes].min(axis=1)
        if self._limit_L is None:
            stop = np.minimum(start + slots_L, num_experts)
        else:
            stop = self._within(start, slots_L, nodes)
        self._slots[:, nodes] -= (stop - start)[:, None]
        self._tokens[:, nodes] += (self._upto[layers, stop] - self._upto[layers, start])[:, None]
        return np.asarray(stop, dtype=np.int64)

    def _within(self, start: Ints, slots_L: Ints, nodes: Ints) -> Ints:
        """As many that the nodes keep to the limit if the rest of their slots gets average replicas."""
        assert self._limit_L is not None
        num_experts, most = self._upto.shape[1] - 1, int(slots_L.max())
        number = np.arange(most + 1)
        stops_LB = np.minimum(start[:, None] + np.minimum(number, slots_L[:, None]), num_experts)
        tokens_LB = np.take_along_axis(self._upto, stops_LB, axis=1)
        tokens_LB = tokens_LB - np.take_along_axis(self._upto, start[:, None], axis=1)
        tokens_LB += (slots_L[:, None] - (stops_LB - start[:, None])) * self._other_L[:, None]
        limit_L = self._limit_L * int(self._ranks[nodes].min()) - self._tokens[:, nodes].max(axis=1)
        fits_LB = tokens_LB <= limit_L[:, None]
        fits_LB[:, :2] = True  # one expert on all nodes of a core is as safe as it can be
        best_L = most - fits_LB[:, ::-1].argmax(axis=1)
        return np.asarray(stops_LB[np.arange(len(start)), best_L])


# --- the rest ----------------------------------------------------------------------------------------------


def settle(problem: CoreProblem, layer: int, counts: NDArray[np.int32]) -> None:
    """Place the replicas of one layer that ``counts`` ``[N, E]`` lacks, in place.

    In rounds over the nodes: a node with v empty slots takes part in the last v rounds. The replicas go
    in descending order of their tokens; within a round the node that has least gets the heaviest. Then
    replicas on nodes that have their expert already change places.
    """
    shares_E = problem.nodes.shares[layer]
    left_E = problem.nodes.replicas[layer] - counts.sum(axis=0)
    vacant_N = problem.nodes.capacity - counts.sum(axis=1)
    total = int(left_E.sum())
    if not total:
        return
    tokens_N = counts @ shares_E
    by_weight = np.lexsort((-left_E, -shares_E))
    experts = np.repeat(by_weight, left_E[by_weight])
    nodes = np.empty_like(experts)
    rounds, begin = int(vacant_N.max()), 0
    for index in range(rounds):
        there = problem.across[vacant_N[problem.across] >= rounds - index]
        there = there[np.argsort(tokens_N[there], kind="stable")][: total - begin]
        end = begin + len(there)
        nodes[begin:end] = there
        tokens_N[there] += shares_E[experts[begin:end]]
        begin = end
    _separate(counts, nodes, experts)


def _separate(counts: NDArray[np.int32], nodes: Ints, experts: Ints) -> None:
    """Put these replicas into ``counts``, after exchanges that leave few on a node with their expert."""
    fixed = counts[nodes, experts] > 0
    np.add.at(counts, (nodes, experts), 1)
    num_nodes, num_experts = counts.shape
    bad = np.flatnonzero(counts[nodes, experts] > 1)
    # Of several in one place one may stay, unless a core is there.
    stays = np.zeros(len(bad), dtype=np.bool_)
    stays[np.unique(nodes[bad] * num_experts + experts[bad], return_index=True)[1]] = True
    bad = bad[~stays | fixed[bad]]
    # An expert of more replicas than nodes is on some twice.
    twice_E = np.maximum(counts.sum(axis=0) - num_nodes, 0)
    for turn in range(_EXCHANGES):
        bad = bad[(np.bincount(experts[bad], minlength=num_experts) > twice_E)[experts[bad]]]
        if not len(bad):
            return
        # Replicas are sorted by their tokens: near ones weigh about as much.
        offset = _STRIDE * (turn // 2 + 1) % max(len(nodes) // 8, 1) + 1
        other = (bad + (offset if turn % 2 else -offset)) % len(nodes)
        at, back = (nodes[other], experts[bad]), (nodes[bad], experts[other])
        fits = np.flatnonzero((counts[at] == 0) & (counts[back] == 0))
        fits = fits[_alone(bad[fits], other[fits])]
        fits = fits[_alone(*((where[0] * num_experts + where[1])[fits] for where in (at, back)))]
        here, there = bad[fits], other[fits]
        for gone in (here, there):
            np.add.at(counts, (nodes[gone], experts[gone]), -1)
        experts[here], experts[there] = experts[there], experts[here]
        counts[nodes[here], experts[here]] += 1
        counts[nodes[there], experts[there]] += 1
        bad = np.delete(bad, fits)
    for index in bad[: _SINGLY // len(nodes)].tolist():
        at, back = (nodes, experts[index]), (nodes[index], experts)
        fits = np.flatnonzero((counts[at] == 0) & (counts[back] == 0))
        if len(fits):
            other = int(fits[np.abs(fits - index).argmin()])
            for one, expert in ((index, experts[other]), (other, experts[index])):
                counts[nodes[one], experts[one]] -= 1
                counts[nodes[one], expert] += 1
            experts[index], experts[other] = experts[other], experts[index]


def _alone(first: Ints, second: Ints) -> NDArray[np.bool_]:
    """True for pairs of numbers that occur in no pair before."""
    once = np.zeros(2 * len(first), dtype=np.bool_)
    once[np.unique(np.concatenate([first, second]), return_index=True)[1]] = True
    return np.asarray(once[: len(first)] & once[len(first) :])
