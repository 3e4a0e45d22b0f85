"""Moves replicas away from nodes that hold more than their share."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable

from ckptd.core.placement.bundles import Bundle
from ckptd.core.placement.nodes import UNBOUNDED, fair_share
from ckptd.core.placement.placement_facts import PlacedRank
from ckptd.core.placement.spreading import Spreading

__all__ = ["balance"]

_LEVELS_MAX = 4


def balance(spreading: Spreading) -> None:
    """Move replicas from nodes above the mean plus one ring to nodes with room in equally good domains."""
    load = spreading.load
    if not load:
        return
    relief = _Relief(spreading)
    share = fair_share(sum(load), spreading.ring.capacity)
    above = relief.lower(share + spreading.largest)
    for _ in range(_LEVELS_MAX):
        if not above:
            return
        # Domains or capacity force more than their share on these nodes: distribute it evenly among them.
        even = -(-sum(load[position] for position in above) // len(above))
        above = relief.lower(even + spreading.largest)
    relief.lower(share + spreading.largest)  # which may have freed room below, too


class _Relief:
    """Moves replicas from nodes above a level to nodes below it, with bounded effort.

    Moves only shrink the room, so a replica that found no place is not tried again: ``hopeless`` has
    the smallest size that failed, by the domains to avoid, and ``stuck`` the smallest size for which a
    node could not free enough room.
    """

    def __init__(self, spreading: Spreading) -> None:
        self.spreading = spreading
        self.ring = spreading.ring
        self.effort_left = 100_000 + 500 * len(spreading.load)
        self.level = 0
        self.num_moves = 0
        self.room: list[int] = []
        self.hopeless: dict[tuple[int, ...], int] = {}
        self.stuck: dict[int, int] = {}

    def lower(self, level: int) -> list[int]:
        """Lower nodes to the level, first by moves, then by exchanges; returns the nodes that
        stayed above it.
        """
        load = self.spreading.load
        self.level = level
        self.room = [position for position in range(len(load)) if self._has_room(position)]
        self.hopeless.clear()
        above = [position for position in range(len(load)) if load[position] > level]
        above = [source for source in above if not self._relieve(source, self._move)]
        num_moves = -1
        while above and self.room and num_moves < self.num_moves:
            num_moves = self.num_moves
            self.stuck.clear()
            above = [source for source in above if not self._relieve(source, self._exchange)]
        return above

    def _relieve(self, source: int, step: Callable[[Bundle, PlacedRank | None, int], bool]) -> bool:
        """Perform steps until the node is at the level; False if no step is left before that."""
        spreading = self.spreading
        while (excess := spreading.load[source] - self.level) > 0:
            # Replicas of the farthest ranks first: a change of membership preserves near pairs.
            held = sorted(
                spreading.held[source],
                key=lambda b: (-self.ring.distance(b.owner, source), b.ranks[0].rank),
            )
            items: list[tuple[Bundle, PlacedRank | None]] = [
                (bundle, None) for bundle in held if 0 < bundle.size <= 2 * excess
            ]
            items += [(bundle, facts) for bundle in held for facts in bundle.ranks if facts.ring_bytes]
            if not any(step(*item, source) for item in items):
                return False
        self._reopen(source)
        return True

    def _move(self, bundle: Bundle, facts: PlacedRank | None, source: int) -> bool:
        """Move the bundle, or one rank of it, to the next node that has room."""
        target = self._find(bundle, bundle.size if facts is None else facts.ring_bytes, source)
        if target is None:
            return False
        self._transfer(bundle, facts, source, target)
        return True

    def _exchange(self, bundle: Bundle, facts: PlacedRank | None, source: int) -> bool:
        """Move the bundle to a node without room, and another bundle of that node to one with room,
        if necessary.
        """
        if self._move(bundle, facts, source):
            return True
        size = bundle.size if facts is None else facts.ring_bytes
        others = [member for member in bundle.members if member != source]
        seen = self.ring.seen(others)
        allowed = self.ring.shared(source, seen)
        for middle in self.ring.clockwise(source):
            self.effort_left -= 1
            if self.effort_left <= 0:
                return False
            if size >= self.stuck.get(middle, UNBOUNDED) or middle in bundle.members:
                continue
            if self.ring.shared(middle, seen) > allowed:
                continue
            if self._vacate(middle, size):
                self._transfer(bundle, facts, source, middle)
                self._reopen(middle)
                return True
        return False

    def _reopen(self, position: int) -> None:
        """A node may have freed more than necessary: replicas that found no place before may fit now."""
        if self._has_room(position):
            self.hopeless.clear()
            self.stuck.clear()
            if position not in self.room:
                insort(self.room, position)

    def _vacate(self, position: int, size: int) -> bool:
        """Move a replica away to make room for ``size``; returns False without a change if none fits."""
        spreading = self.spreading
        most = self._most(position)
        for bundle in list(spreading.held[position]):
            for facts in (None, *bundle.ranks):
                leaving = bundle.size if facts is None else facts.ring_bytes
                fits = spreading.load[position] + size - leaving <= most
                if fits and self._move(bundle, facts, position):
                    return True
        self.stuck[position] = size
        return False

    def _transfer(self, bundle: Bundle, facts: PlacedRank | None, source: int, target: int) -> None:
        if facts is not None and len(bundle.ranks) > 1:
            bundle = self.spreading.split(bundle, facts)
        self.num_moves += 1
        self.spreading.move(bundle, source, target)
        if not self._has_room(target):
            self.room = [position for position in self.room if position != target]

    def _most(self, position: int) -> int:
        return min(self.level, self.ring.capacity[position])

    def _has_room(self, position: int) -> bool:
        spreading = self.spreading
        return spreading.load[position] + spreading.smallest <= self._most(position)

    def _find(self, bundle: Bundle, size: int, source: int) -> int | None:
        """The next node after the source with room for ``size``, in domains as good as the source's."""
        ring, load = self.ring, self.spreading.load
        self.effort_left -= 1
        if self.effort_left <= 0 or not self.room:
            return None
        others = [member for member in bundle.members if member != source]
        seen = ring.seen(others)
        allowed = ring.shared(source, seen)
        signature = (allowed, *sorted([ring.neighbourhood[member] for member in others]))
        if size >= self.hopeless.get(signature, UNBOUNDED):
            return None
        worse: set[int] = set()
        start = bisect_right(self.room, source)
        for index in range(start - len(self.room), start):
            self.effort_left -= 1
            position = self.room[index]
            if ring.neighbourhood[position] in worse or position in bundle.members:
                continue
            if ring.shared(position, seen) > allowed:
                worse.add(ring.neighbourhood[position])
            elif load[position] + size <= self._most(position):
                return position
        if worse.issuperset(ring.neighbourhood[member] for member in bundle.members):
            self.hopeless[signature] = size  # the reason is not other members, so it applies to all bundles
        return None
