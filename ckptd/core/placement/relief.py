"""Moving replicas off the nodes that hold more than their share."""

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
    """Move what is above the mean and one ring to nodes that can take it in as good domains."""
    load = spreading.load
    if not load:
        return
    relief = _Relief(spreading)
    share = fair_share(sum(load), spreading.ring.capacity)
    above = relief.lower(share + spreading.largest)
    for _ in range(_LEVELS_MAX):
        if not above:
            return
        # Domains or capacity put more than its share on these: at least they have it evenly.
        even = -(-sum(load[position] for position in above) // len(above))
        above = relief.lower(even + spreading.largest)
    relief.lower(share + spreading.largest)  # which may have made room below as well


class _Relief:
    """Moves from nodes above a level to nodes below it, with a bound on what is tried.

    Moves only shrink the room, so what found no place once is not tried again: ``hopeless`` has the
    smallest size that failed, by the domains it had to avoid, and ``stuck`` the one for which a
    node could not give away enough.
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
        """Bring nodes down to the level, first by moves, then by exchanges; who stayed above it."""
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
        """Take steps until the node is down at the level; False if none is left before."""
        spreading = self.spreading
        while (excess := spreading.load[source] - self.level) > 0:
            # Those from the farthest away first: nearness is what a change of membership preserves.
            held = sorted(
                spreading.held[source],
                key=lambda b: (-self.ring.distance(b.owner, source), b.ranks[0].rank),
            )
            items: list[tuple[Bundle, PlacedRank | None]] = [
                (bundle, None) for bundle in held if 0 < bundle.size <= 2 * excess
            ]
            items += [
                (bundle, facts) for bundle in held for facts in bundle.ranks if facts.ring_bytes
            ]
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
        """Move it to a node without room, of which something else moves to one that has, if it must."""
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
        """A node may have given more than it had to: then what was hopeless may fit there."""
        if self._has_room(position):
            self.hopeless.clear()
            self.stuck.clear()
            if position not in self.room:
                insort(self.room, position)

    def _vacate(self, position: int, size: int) -> bool:
        """Move something away so that ``size`` has room; False, and nothing happened, if nothing fits."""
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
        """The next node behind the source with room for ``size``, in domains as good as the source's."""
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
            self.hopeless[signature] = size  # not for want of other members: true of all bundles
        return None
