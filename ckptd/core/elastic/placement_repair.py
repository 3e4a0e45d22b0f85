"""A placement that keeps what nodes hold, and fetches only what the new numbers of replicas need.

After a loss most nodes are still there, with their experts. Instead of placing all anew, the holes
are filled:

1. Replicas beyond an expert's new number are *surplus*: their slots may be used at no cost.
2. Experts that lack replicas are grouped by the nodes that still hold them: what a lost node had in
   common with the rest of its core. One node takes the place of the lost one, in all layers, so that
   no more sets of nodes are lethal than before. It is the node that has to give up least: first
   surplus, then experts with many other holders. In a domain that keeps the set of domains, if there
   is one.
3. Other missing replicas go to free or surplus slots, on the nodes that have least to do; and so do
   the replicas that were given up in step 2. Surplus that is left is given up by the busiest holders.
   Experts of few replicas stay on, or come to, sets of nodes and domains that others have, too.
4. In layers whose busiest rank has too much, replicas change places, those first that are fetched anyway.

The caller compares the result with a placement made from scratch (`expected_losses` is the measure for
large ones). No placement with the same numbers of replicas on distinct nodes can move fewer than
``Moves.least``: an expert is held by ``h`` nodes, and ``d - h`` others must fetch it.

Complexity: O(R log R) array operations for R replicas for each lost node, and O(N) for each replica
that is fetched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb

import numpy as np
from numpy.typing import NDArray

from ckptd.core.elastic.allocation import busiest
from ckptd.core.elastic.core_layout import CoreProblem, settle
from ckptd.core.elastic.elastic_types import ExpertPlacement
from ckptd.core.elastic.survival import minimal_sets

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# What it costs to leave an expert with so few holders, in replicas moved: a quarter for each holder more.
_RARE = [1 << max(20 - 2 * holders, 0) for holders in range(11)]
FEW = 4  # replicas: experts with more are hardly ever lost whole,
MANY_UNITS = 48  # among so many domains; among fewer the double counts as few
OFTEN = 8  # a set that so many times fewer experts have than the most frequent one is an accident
SETS_MAX = 256  # of one size
# Other nodes of 1,024 that take a part of what a lost node had. Each may make one more pair lethal, and of
# fewer nodes so many more losses take a given pair: a quarter of 512, none of 256.
HELPERS = 15
EXCHANGES_MAX = 64  # in a layer
SINGLY_MAX = 512  # replicas that a layer lacks; of more, those of often replicated experts go by `settle`


@dataclass(frozen=True, slots=True)
class Moves:
    """The replicas that nodes fetch for a placement.

    Args:
        moved: experts that a node of the placement does not hold, counted once for each node.
        least: no placement that has every expert on as many nodes moves fewer.
    """

    moved: int
    least: int


def count_moves(placement: ExpertPlacement, held: ExpertPlacement) -> Moves:
    """Compare a placement with what its nodes hold.

    Raises:
        ValueError: placements of different shapes.
    """
    if placement.counts.shape != held.counts.shape:
        raise ValueError(f"a placement of shape {placement.counts.shape}, held are {held.counts.shape}")
    wanted, has = placement.counts > 0, held.counts > 0
    lacks_LE = wanted.sum(axis=1) - has.sum(axis=1)
    return Moves(int((wanted & ~has).sum()), int(np.maximum(lacks_LE, 0).sum()))


def expected_losses(sets_MU: Bools, lost: int) -> Fraction:
    """How many of these sets are lost whole, on average, when ``lost`` units are: an upper bound of the
    probability that one is.
    """
    num_units = sets_MU.shape[1]
    sizes = np.bincount(sets_MU.sum(axis=1))
    ways = sum(
        int(number) * comb(num_units - size, lost - size)
        for size, number in enumerate(sizes.tolist())
        if size <= lost
    )
    return Fraction(ways, comb(num_units, lost))


def small_sets(placement: ExpertPlacement, units: Ints, lost: int) -> Bools:
    """``[M, U]``: the minimal sets of units whose loss loses an expert, without those so large that all of
    them together are lost with ``lost`` units less than once in a thousand times.
    """
    num_layers, num_nodes, num_experts = placement.counts.shape
    num_units = int(units.max()) + 1
    rows = num_layers * num_experts
    size = 1
    while size < lost and 1000 * rows * comb(num_units - size, lost - size) > comb(num_units, lost):
        size += 1
    held_LEN = (placement.counts > 0).transpose(0, 2, 1)
    if num_units < num_nodes:
        order = np.argsort(units, kind="stable")
        starts = np.searchsorted(units[order], np.arange(num_units))
        held_LEN = np.logical_or.reduceat(held_LEN[:, :, order], starts, axis=2)
    held_MU = held_LEN.reshape(-1, num_units)
    return minimal_sets(held_MU[held_MU.sum(axis=1) <= size])


def repaired(
    problem: CoreProblem, held_LNE: Bools, limit_L: Ints | None, *, exchanged: int = FEW
) -> NDArray[np.int32]:
    """``[L, N, E]``: the placement; see the module. Slots and replicas are kept to, the caller checks the
    rest.

    Args:
        limit_L: of the busiest rank's tokens in each layer, in the fixed point of the shares; None: none.
        exchanged: for balance only experts of more replicas change places.
    """
    work = _Repair(problem, held_LNE)
    work.replace_lost_nodes()
    work.rare.learn()
    counts = np.empty(held_LNE.shape, dtype=np.int32)
    for layer in range(len(held_LNE)):
        work.fill(layer)
        work.give_up_surplus(layer)
        counts[layer] = work.has[layer]
        settle(problem, layer, counts[layer])
    if limit_L is not None:
        _balance(problem, counts, held_LNE, limit_L, exchanged)
    return counts


class _Rare:
    """The sets of nodes, and of domains, whose loss loses experts of few replicas.

    A set counts as known if many experts have it: what a lost node leaves behind makes no set known.
    """

    def __init__(self, has_LNE: Bools, wanted_LE: Ints, domains: Ints, few: int) -> None:
        self._has, self._wanted, self._domains, self._few = has_LNE, wanted_LE, domains, few
        self._by_node: list[frozenset[int]] = []
        self._by_domain: list[frozenset[int]] = []
        self._flat = len(np.unique(domains)) == len(domains)

    def is_rare(self, layer: int, expert: int) -> bool:
        return int(self._wanted[layer, expert]) <= self._few

    def learn(self) -> None:
        """Note the sets of all experts that have what they need."""
        nodes, domains = Counter[frozenset[int]](), Counter[frozenset[int]]()
        for layer, expert in np.argwhere(self._wanted <= self._few).tolist():
            held = self._nodes(layer, expert)
            if len(held) == self._wanted[layer, expert]:
                nodes[held] += 1
                domains[self._of_domains(held)] += 1
        self._by_node, self._by_domain = _known(nodes, self._few), _known(domains, self._few)

    def news(self, layer: int, expert: int, *, less: int = -1, more: int = -1) -> tuple[bool, bool]:
        """For domains, then for nodes: True if the expert's set, with a node less or more, is not known."""
        held = (self._nodes(layer, expert) - {less}) | ({more} if more >= 0 else frozenset())
        new = not _covered(held, self._by_node)
        return (new if self._flat else not _covered(self._of_domains(held), self._by_domain)), new

    def partners(self, layer: int, expert: int) -> Ints:
        """The domains any of which makes the expert's set a known one; empty if it is, or none does."""
        held = self._of_domains(self._nodes(layer, expert))
        if _covered(held, self._by_domain):
            return np.zeros(0, dtype=np.int64)
        missing = (one - held for one in self._by_domain)
        return np.array(sorted({min(one) for one in missing if len(one) == 1}), dtype=np.int64)

    def _nodes(self, layer: int, expert: int) -> frozenset[int]:
        return frozenset(np.flatnonzero(self._has[layer, :, expert]).tolist())

    def _of_domains(self, nodes: frozenset[int]) -> frozenset[int]:
        return nodes if self._flat else frozenset(self._domains[list(nodes)].tolist())


def _known(sets: Counter[frozenset[int]], few: int) -> list[frozenset[int]]:
    """Those of many experts that contain no other one, smallest first."""
    kept: list[frozenset[int]] = []
    for size in range(1, few + 1):
        mine = sorted(((-n, sorted(one)) for one, n in sets.items() if len(one) == size))
        often = [frozenset(one) for n, one in mine if -n * OFTEN >= -mine[0][0]]
        kept += [one for one in often[:SETS_MAX] if not _covered(one, kept)]
    return kept


def _covered(held: frozenset[int], sets: Sequence[frozenset[int]]) -> bool:
    return any(one <= held for one in sets)


class _Repair:
    """``has`` ``[L, N, E]`` and what follows from it, changed together."""

    def __init__(self, problem: CoreProblem, held_LNE: Bools) -> None:
        self.problem = problem
        self.slots = problem.nodes.capacity
        self.shares = problem.nodes.shares
        self.domains = problem.domains
        # More replicas than nodes lie twice on some: that needs no fetch, and `settle` does it.
        self.wanted = np.minimum(problem.nodes.replicas, len(self.slots))
        self.has = held_LNE.copy()
        self.holders = self.has.sum(axis=1)
        self.used = self.has.sum(axis=2)
        self.few = FEW if len(np.unique(self.domains)) >= MANY_UNITS else 2 * FEW
        self.rare = _Rare(self.has, self.wanted, self.domains, self.few)
        self.rare.learn()
        for layer, node in np.argwhere(self.used > self.slots).tolist():
            self._make_room(layer, node, 0)

    # --- the place of a lost node ------------------------------------------------------------------------

    def replace_lost_nodes(self) -> None:
        """Step 2."""
        for rows, common in self._broken():
            self._take_over(rows, common)

    def _broken(self) -> Iterator[tuple[Ints, Bools]]:
        """Experts that lack a holder, as rows of ``[L * E]``, by the smallest set of holders they share."""
        num_experts = self.wanted.shape[1]
        lacks = (self.holders < self.wanted) & (self.wanted <= 2 * self.few) & (self.holders > 0)
        rows = np.flatnonzero(lacks)
        if not len(rows):
            return
        held = self.has[rows // num_experts, :, rows % num_experts]
        while len(rows) > 1:
            with_each = held.sum(axis=0)
            most = int(with_each.max())
            if most < 2:
                return
            with_it = held[:, int(with_each.argmax())]
            common = 10 * held[with_it].sum(axis=0) >= 9 * most
            inside = (held | ~common).all(axis=1)
            yield rows[inside], common
            rows, held = rows[~inside], held[~inside]

    def _take_over(self, rows: Ints, common: Bools) -> None:
        """One node gets these experts; a few others get those for which it would give up what is needed."""
        num_experts = self.wanted.shape[1]
        layers, experts = rows // num_experts, rows % num_experts
        order = np.lexsort((experts, self.holders[layers, experts], layers))
        layers, experts = layers[order], experts[order]
        partners = np.zeros(0, dtype=np.int64)
        rarest = np.lexsort((experts, layers, self.holders[layers, experts]))[0]
        if self.rare.is_rare(int(layers[rarest]), int(experts[rarest])):
            partners = self.rare.partners(int(layers[rarest]), int(experts[rarest]))
        if len(partners):
            # Room in these domains is dear, and often replicated experts are safe anywhere.
            few = self.wanted[layers, experts] <= self.few
            layers, experts = layers[few], experts[few]
        open_N = ~np.isin(self.domains, self.domains[common])
        if len(partners):
            open_N &= np.isin(self.domains, partners)
        if not open_N.any():
            return
        present, need = np.unique(layers, return_counts=True)
        price = np.zeros(len(self.slots), dtype=np.int64)
        for layer, number in zip(present.tolist(), need.tolist(), strict=True):
            price += self._price(layer, number)
        nodes = np.flatnonzero(open_N)
        first = int(nodes[price[nodes].argmin()])
        total = np.sum([self._spare(layer, slice(None)) for layer in present.tolist()], axis=0)
        helpers = nodes[np.argsort(-total[nodes], kind="stable")].tolist()
        most = min(HELPERS * len(self.slots) ** 2 >> 20, HELPERS)
        helpers = [node for node in helpers if node != first][:most]
        for layer in present.tolist():
            left = experts[layers == layer]
            left = left[self.holders[layer, left] < self.wanted[layer, left]].tolist()
            for node in (first, *helpers):
                left = self._give(layer, node, left, int(self._spare(layer, node)))
            self._give(layer, first, left, int(self.slots[first]))

    def _give(self, layer: int, node: int, experts: list[int], most: int) -> list[int]:
        """The node gets so many of the experts; returns the others."""
        here = [expert for expert in experts if not self.has[layer, node, expert]][:most]
        self._make_room(layer, node, len(here), keep=experts)
        here = here[: int(self.slots[node] - self.used[layer, node])]
        for expert in here:
            self._add(layer, node, expert)
        return [expert for expert in experts if expert not in here]

    def _spare(self, layer: int, nodes: int | slice) -> Ints:
        """``[N]`` (or of one node): slots that are free, or hold surplus."""
        surplus = (self.holders[layer] > self.wanted[layer]) & (self.wanted[layer] > self.few)
        held = self.has[layer, nodes][..., surplus].sum(axis=-1)
        return np.asarray(self.slots[nodes] - self.used[layer, nodes] + held)

    def _price(self, layer: int, number: int) -> Ints:
        """``[N]``: the cost of so many slots on each node."""
        cost_E = self._cost_of(layer)
        short = number - (self.slots - self.used[layer])
        node, expert = np.nonzero(self.has[layer])
        order = np.lexsort((cost_E[expert], node))
        node, cost = node[order], cost_E[expert[order]]
        begins = np.searchsorted(node, np.arange(len(self.slots)))
        rank = np.arange(len(node)) - begins[node]
        out = np.zeros(len(self.slots), dtype=np.int64)
        np.add.at(out, node, np.where(rank < short[node], cost, 0))
        return out

    def _cost_of(self, layer: int) -> Ints:
        """``[E]``: the cost of giving up one replica: none for surplus, else a fetch, more if it is rare."""
        rest = self.holders[layer] - 1
        rare = np.array([*_RARE, 0], dtype=np.int64)[np.clip(rest, 0, len(_RARE))]
        spare = (self.holders[layer] > self.wanted[layer]) & (self.wanted[layer] > self.few)
        return np.where(spare, 0, 1 + rare)

    def _make_room(self, layer: int, node: int, number: int, keep: Sequence[int] | Ints = ()) -> None:
        """Empty so many slots of a node, the cheapest ones."""
        while int(self.slots[node] - self.used[layer, node]) < number:
            experts = np.setdiff1d(np.flatnonzero(self.has[layer, node]), np.asarray(keep, dtype=np.int64))
            if not len(experts):
                return
            cost = self._cost_of(layer)[experts]
            self._drop(layer, node, int(experts[cost.argmin()]))

    # --- other replicas ----------------------------------------------------------------------------------

    def fill(self, layer: int, *, again: bool = False) -> None:
        """Step 3: what is missing."""
        lacks_E = self.wanted[layer] - self.holders[layer]
        if int(np.maximum(lacks_E, 0).sum()) > SINGLY_MAX:
            lacks_E = np.where(self.wanted[layer] > self.problem.horizon, np.minimum(lacks_E, 0), lacks_E)
        # Which replica a rare expert gives up is not decided by where a slot is wanted.
        surplus = np.where(self.wanted[layer] > self.few, np.maximum(-lacks_E, 0), 0)
        if not again:
            # Those that lack nothing, but would be on a known set with one node for another.
            for expert in np.flatnonzero((lacks_E <= 0) & (self.wanted[layer] <= self.few)).tolist():
                if len(self.rare.partners(layer, expert)):
                    lacks_E[expert], surplus[expert] = 1, 0
        experts = np.flatnonzero(lacks_E > 0)
        tokens = self.has[layer] @ self.shares[layer]
        for expert in experts[np.argsort(self.holders[layer, experts], kind="stable")].tolist():
            for _ in range(int(lacks_E[expert])):
                node = self._node_for(layer, expert, tokens, surplus)
                if node < 0:
                    break
                self._use(layer, node, tokens, surplus)
                tokens[node] += self.shares[layer, expert]
                self._add(layer, node, expert)
        if not again and (self.holders[layer] < self.wanted[layer]).any():
            self.fill(layer, again=True)  # those that had to make room

    def _node_for(self, layer: int, expert: int, tokens: Ints, surplus: Ints) -> int:
        """Where the expert's next replica goes; -1: nowhere."""
        has = self.has[layer]
        if self.rare.is_rare(layer, expert):
            partners = self.rare.partners(layer, expert)
            there = np.flatnonzero(np.isin(self.domains, partners) & ~has[:, expert])
            if len(there):
                new = np.array([self.rare.news(layer, expert, more=n)[1] for n in there.tolist()])
                price = self._price(layer, 1)[there] + new * _RARE[self.few]
                return int(there[np.lexsort((tokens[there], price))[0]])
        free = self.slots > self.used[layer]
        spare = has[:, surplus > 0].any(axis=1) if surplus.any() else np.zeros_like(free)
        there = np.flatnonzero((free | spare) & ~has[:, expert])
        if not len(there):
            return -1
        if int(self.holders[layer, expert]) <= self.problem.horizon:
            new = there[~np.isin(self.domains[there], self.domains[has[:, expert]])]
            there = new if len(new) else there
        return int(there[tokens[there].argmin()])

    def _use(self, layer: int, node: int, tokens: Ints, surplus: Ints) -> None:
        """Empty a slot, if none is: of surplus, or else of what costs least."""
        if self.slots[node] > self.used[layer, node]:
            return
        experts = np.flatnonzero(self.has[layer, node])
        cost = np.where(surplus[experts] > 0, 0, self._cost_of(layer)[experts])
        given = int(experts[np.lexsort((-self.shares[layer, experts], cost))[0]])
        surplus[given] = max(surplus[given] - 1, 0)
        tokens[node] -= self.shares[layer, given]
        self._drop(layer, node, given)

    def give_up_surplus(self, layer: int) -> None:
        """Step 3: what is left over."""
        tokens = self.has[layer] @ self.shares[layer]
        for expert in np.flatnonzero(self.holders[layer] > self.wanted[layer]).tolist():
            while self.holders[layer, expert] > self.wanted[layer, expert]:
                nodes = np.flatnonzero(self.has[layer, :, expert])
                if self.wanted[layer, expert] <= 2 * self.few:
                    # Rather than to make a set of domains or of nodes lethal that was not.
                    news = [self.rare.news(layer, expert, less=n) for n in nodes.tolist()]
                    nodes = nodes[[one == min(news) for one in news]]
                node = int(nodes[tokens[nodes].argmax()])
                tokens[node] -= self.shares[layer, expert]
                self._drop(layer, node, expert)

    # --- changes -----------------------------------------------------------------------------------------

    def _add(self, layer: int, node: int, expert: int) -> None:
        self.has[layer, node, expert] = True
        self.holders[layer, expert] += 1
        self.used[layer, node] += 1

    def _drop(self, layer: int, node: int, expert: int) -> None:
        self.has[layer, node, expert] = False
        self.holders[layer, expert] -= 1
        self.used[layer, node] -= 1


# --- balance -----------------------------------------------------------------------------------------------


def _balance(
    problem: CoreProblem, counts: NDArray[np.int32], held_LNE: Bools, limit_L: Ints, few: int
) -> None:
    """Step 4: the layers that have most too much first, until their sum is within the limits; then, if some
    layers cannot be, others make up for them.
    """
    most_L = busiest(counts, problem.nodes.shares, problem.ranks)
    for lower in range(5):
        aim_L = limit_L - limit_L * lower // 100
        for layer in np.argsort(aim_L - most_L, kind="stable").tolist():
            if int(most_L.sum()) <= int(limit_L.sum()) or most_L[layer] <= aim_L[layer]:
                break
            exchanges = _Exchanges(problem, layer, counts[layer], held_LNE[layer], few)
            most_L[layer] = exchanges.until(int(aim_L[layer]))


class _Exchanges:
    """Exchanges between the busiest node of a layer and others; changes ``counts`` ``[N, E]``."""

    def __init__(
        self, problem: CoreProblem, layer: int, counts: NDArray[np.int32], held: Bools, few: int
    ) -> None:
        self._counts, self._held = counts, held
        self._shares, self._ranks = problem.nodes.shares[layer], problem.ranks
        self._tokens = counts @ self._shares
        self._may = problem.nodes.replicas[layer] > few

    def until(self, limit: int) -> int:
        """Exchange until no rank has more than the limit, or nothing helps; returns the most of a rank."""
        for _ in range(EXCHANGES_MAX):
            node = int((self._tokens // self._ranks).argmax())
            found = None
            if self._tokens[node] // self._ranks[node] > limit:
                found = self._best(node, limit)
            if found is None:
                break
            mine, other, theirs = found
            for unit, gives, gets in ((node, mine, theirs), (other, theirs, mine)):
                self._counts[unit, gives] -= 1
                self._counts[unit, gets] += 1
                self._tokens[unit] += self._shares[gets] - self._shares[gives]
        return int((self._tokens // self._ranks).max())

    def _best(self, node: int, limit: int) -> tuple[int, int, int] | None:
        """An expert of the node, another node and its expert, which together bring least to fetch."""
        counts, shares, held = self._counts, self._shares, self._held
        best: tuple[int, int, int, int, int] | None = None
        others, theirs = np.nonzero((counts == 1) & self._may & (counts[node] == 0))
        for mine in np.flatnonzero((counts[node] == 1) & self._may).tolist():
            less = shares[mine] - shares[theirs]
            fits = (less > 0) & (counts[others, mine] == 0)
            at = np.flatnonzero(fits & ((self._tokens[others] + less) // self._ranks[others] <= limit))
            if not len(at):
                continue
            cost = held[others[at], theirs[at]].astype(np.int64) - held[others[at], mine]
            cost += int(held[node, mine]) - held[node, theirs[at]]
            # One that is enough, or the one that helps most.
            short = np.maximum((self._tokens[node] - less[at]) // self._ranks[node] - limit, 0)
            one = int(np.lexsort((at, cost, short))[0])
            key = (int(short[one]), int(cost[one]), mine, int(others[at[one]]), int(theirs[at[one]]))
            best = key if best is None else min(best, key)
        return None if best is None else best[2:]
