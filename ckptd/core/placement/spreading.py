"""Chooses the targets of every bundle, under limits that rise only if necessary."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence

from ckptd.core.placement.bundles import Bundle
from ckptd.core.placement.nodes import ALL, UNBOUNDED, NodeRing, fair_share
from ckptd.core.placement.placement_facts import PlacedRank

__all__ = ["Spreading"]


class Spreading:
    """The state of the placement: loads, limits, and the nodes of each bundle."""

    def __init__(self, ring: NodeRing, largest: int) -> None:
        self.ring = ring
        self.largest = largest
        self.bundles: list[Bundle] = []
        self.load = [0] * len(ring.names)
        self.limit = [0] * len(ring.names)
        self.held: list[list[Bundle]] = [[] for _ in ring.names]
        self.smallest = 0
        self.open = list(range(len(ring.names)))  # who may take the smallest ring still
        self.skipped: set[int] = set()
        self.lying_in: dict[tuple[int, ...], list[int]] = {}
        self.passed: dict[tuple[int, ...], int] = {}  # up to where bundles that are alike have looked

    def place(self, bundles: list[Bundle], wanted: int) -> None:
        """Choose the targets: the first target of all bundles, then the second, and so on."""
        self.bundles = bundles
        self.smallest = min((f.ring_bytes for b in bundles for f in b.ranks), default=0)
        for position in range(len(self.load)):
            self._close_if_full(position)
        total = 0
        for turn in range(1, wanted + 1):
            waiting = [bundle for bundle in self.bundles if wanted - bundle.num_copies >= turn]
            total += sum(bundle.size for bundle in waiting)
            level = fair_share(total, self.ring.capacity) + self.largest
            self.limit = [max(limit, level) for limit in self.limit]
            self.passed.clear()
            waiting = self._choose_nearest(waiting)
            while waiting:
                waiting = [left for bundle in waiting for left in self._choose(bundle)]

    def _choose_nearest(self, waiting: Sequence[Bundle]) -> list[Bundle]:
        """Choose targets in the best domains and under the limits, the nearest pairs first; returns
        the bundles without one.
        """
        ring, num_nodes = self.ring, len(self.load)
        before = {bundle: len(bundle.members) for bundle in waiting}
        smallest = min((bundle.size for bundle in waiting), default=0)
        wishes = []
        for bundle in waiting:
            seen = ring.seen(bundle.members)
            wishes.append((bundle, seen, ring.least_shared(seen, bundle.members)))
        for distance in range(1, num_nodes):
            if not distance % 32:
                below = self._below_limit(smallest)
                wishes = [wish for wish in wishes if ring.has_unseen(below, wish[0].members, wish[2])]
            if not wishes:
                break
            left = []
            for wish in wishes:
                bundle, seen, least = wish
                position = (bundle.members[0] + distance) % num_nodes
                filled = self.load[position] + bundle.size
                if (
                    filled <= self.limit[position]
                    and filled <= ring.capacity[position]
                    and ring.shared(position, seen) == least
                    and position not in bundle.members
                ):
                    self._give(bundle, position)
                else:
                    left.append(wish)
            wishes = left
        return [bundle for bundle in waiting if len(bundle.members) == before[bundle]]

    def _below_limit(self, size: int) -> Counter[int]:
        """For each domain, the number of its nodes with room for ``size``: under their limits, and
        in total.
        """
        keys, capacity = self.ring.keys, self.ring.capacity
        free = [p for p in self.open if self.load[p] + size <= min(self.limit[p], capacity[p])]
        nodes_in = Counter(key for position in free for key in keys[position])
        nodes_in[ALL] = len(free)
        return nodes_in

    def _choose(self, bundle: Bundle) -> list[Bundle]:
        """Choose the next target of a bundle; returns the bundles to try again, in smaller parts."""
        ring = self.ring
        seen = ring.seen(bundle.members)
        least = ring.least_shared(seen, bundle.members)
        position = self._next_under_limit(bundle, seen, least)
        if position is not None:
            self._give(bundle, position)
            return []
        best, candidates = self._with_room(bundle, seen)
        if len(bundle.ranks) > 1 and (best > least or not candidates):
            return self._separate(bundle)
        if candidates:
            self._give(bundle, self._raise_limit(candidates, bundle.size))
        return []

    def _next_under_limit(self, bundle: Bundle, seen: set[int], least: int) -> int | None:
        """The next node clockwise, in the best domains, with room under its limit.

        Loads only grow, so equal bundles skip the nodes that one of them has passed.
        """
        ring, size, members = self.ring, bundle.size, bundle.members
        key = (*members, size, least)
        among = self._in_shared_domains(members, seen, least)
        for position in _clockwise(among, bundle.owner, self.passed.get(key, bundle.owner)):
            filled = self.load[position] + size
            if (
                filled <= self.limit[position]
                and filled <= ring.capacity[position]
                and position not in members
            ):
                self.passed[key] = position - 1
                return position
        self.passed[key] = bundle.owner - 1
        return None

    def _with_room(self, bundle: Bundle, seen: set[int]) -> tuple[int, list[int]]:
        """The best value of `NodeRing.shared` among the nodes with room, and all nodes with that value."""
        load, capacity, size = self.load, self.ring.capacity, bundle.size
        hood, members = self.ring.neighbourhood, bundle.members
        order = _clockwise(self.open, bundle.owner, bundle.owner)
        room = [position for position in order if load[position] + size <= capacity[position]]
        if len(room) < len(order):
            self.skipped.update(set(order).difference(room))
        room = [position for position in room if position not in members]
        shared_by = self.ring.shared_by(seen)
        best = min([shared_by[h] for h in {hood[position] for position in room}], default=UNBOUNDED)
        return best, [position for position in room if shared_by[hood[position]] == best]

    def _in_shared_domains(self, members: Sequence[int], seen: set[int], least: int) -> list[int]:
        """The nodes whose `NodeRing.shared` is ``least``, by position; may include members."""
        hood = self.ring.neighbourhood
        key = (least, *sorted([hood[member] for member in members]))
        if key not in self.lying_in:
            shared_by = self.ring.shared_by(seen)
            self.lying_in[key] = [p for p in self.open if shared_by[hood[p]] == least]
        return self.lying_in[key]

    def _raise_limit(self, candidates: Sequence[int], size: int) -> int:
        """All candidates are at their limits: raise the limits until one has room, and return it."""
        level = min([self.load[position] for position in candidates]) + size
        for position in candidates:
            self.limit[position] = max(self.limit[position], level)
        self.passed.clear()
        return next(p for p in candidates if self.load[p] + size <= self.limit[p])

    def _separate(self, bundle: Bundle) -> list[Bundle]:
        """No node has room for the whole bundle: split it into ranks, which may still fit."""
        parts = [self.split(bundle, facts) for facts in bundle.ranks[1:]]
        return [bundle, *parts]

    def split(self, bundle: Bundle, facts: PlacedRank) -> Bundle:
        part = bundle.split(facts)
        self.bundles.append(part)
        for position in part.members[1 + part.num_copies :]:
            self.held[position].append(part)
        return part

    def _give(self, bundle: Bundle, position: int) -> None:
        bundle.members.append(position)
        self.held[position].append(bundle)
        self.load[position] += bundle.size
        self._close_if_full(position)

    def _close_if_full(self, position: int) -> None:
        if self.load[position] + self.smallest > self.ring.capacity[position]:
            del self.open[bisect_left(self.open, position)]
            self.skipped.add(position)
            self.ring.close(position)

    def move(self, bundle: Bundle, source: int, target: int) -> None:
        bundle.members[bundle.members.index(source, 1 + bundle.num_copies)] = target
        self.held[source].remove(bundle)
        self.held[target].append(bundle)
        self.load[source] -= bundle.size
        self.load[target] += bundle.size


def _clockwise(positions: list[int], owner: int, passed: int) -> list[int]:
    """The positions after ``passed``, in order, on the way around the ring from the owner to itself."""
    start, end = bisect_right(positions, passed), bisect_left(positions, owner)
    return positions[start:end] if passed < owner else positions[start:] + positions[:end]
