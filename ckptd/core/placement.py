"""Which nodes hold whose replicas: one pure function of a run's nodes and ranks.

Every daemon computes it from the same members and gets the same answer, whatever the order of its input.
The goals, the most important first:

1. A replica is never on its rank's own node, and no node holds two of one rank.
2. No node is given more than its capacity.
3. The copies of a rank (its own, and every replica) lie in as many domains of the most significant label as
   exist, then of the next label, and so on; a warning names what cannot be had.
4. No node receives more than the mean and one rank's ring, where 1 to 3 allow it.
5. A node that comes or goes changes the targets of few ranks.

How. The nodes stand on a ring in the order of a hash of their names, which a change of the membership does
not affect. Each takes the first nodes clockwise that lie in new domains and have room under a limit near the
mean, the nearest pairs first: all take their first target, then all their second. Where all eligible nodes
are full, their limit is raised by what is needed. At last, nodes above the mean and one ring hand on what
others can take. With many more domains than replicas, a node that goes affects the few before it; with hardly
more (two or three zones), room has to be passed from zone to zone, which affects the ranks of a few times the
root of the number of nodes.

All ranks of one node go to the same peers, unless capacity or the balance splits them. What each node
receives is the same either way, and so is the time to restore a lost node, since its own link is the narrow
one. But there are fewer connections, and fewer sets of replicas + 1 nodes whose simultaneous loss takes all
copies of a rank: the reason for Gemini's groups (SOSP '23). Groups of replicas + 1 would have still fewer
such sets than one set for each node, but a node that comes or goes moves all their borders.

Ranks of the same ``state_group`` hold the same state (MoEtion §5.1: data-parallel peers), so a live one on
another node is a copy that need not be sent. It counts only if no usable node would lie in better domains:
redundancy that fails with the same rack is no reason to send nothing.

Sizes are bytes; ``domains`` are label keys, most significant first. A domain is named by the labels from the
most significant on, so rack 1 of zone a is not rack 1 of zone b; a node without a label is a domain of its
own.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckptd.units import format_bytes

DOMAINS = ("zone", "rack", "host")


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A node that can hold replicas of other nodes' ranks: at most ``capacity_bytes`` (None: no limit)."""

    node: str
    labels: Mapping[str, str] = field(default_factory=dict)
    capacity_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class PlacedRank:
    """A rank, its node, the size of a replica, and the group of ranks with equal live state ("": none)."""

    rank: int
    node: str
    ring_bytes: int
    state_group: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaPlacement:
    """The nodes of all replicas, and the shortcomings of the placement.

    Attributes:
        targets: the nodes of each rank's replicas, in the order of their choice; () for ranks of dead
            nodes, whose replicas no node could send.
        received_bytes: the total size of the replicas on each usable node.
        warnings: sentences about some ranks or nodes, at most 32.
        reason: one line for the log.
    """

    targets: Mapping[int, tuple[str, ...]]
    received_bytes: Mapping[str, int]
    warnings: tuple[str, ...]
    reason: str


def plan_placement(
    nodes: Sequence[NodeFacts],
    ranks: Sequence[PlacedRank],
    *,
    replicas: int,
    domains: tuple[str, ...] = DOMAINS,
    without: Container[str] = (),
) -> ReplicaPlacement:
    """Place ``replicas`` replicas of every rank; see the module.

    Args:
        without: dead nodes; neither they nor their ranks count.
    Raises:
        ValueError: a node or a rank is listed twice, a rank is on an unknown node, or a number is negative.
    """
    _check(nodes, ranks, replicas)
    ring = _NodeRing([facts for facts in nodes if facts.node not in without], domains)
    live = [facts for facts in ranks if facts.node in ring.position]
    wanted = max(0, min(replicas, len(ring.names) - 1))
    bundles = _bundles_of(ring, sorted(live, key=lambda facts: facts.rank), wanted)
    spreading = _Spreading(ring, max((facts.ring_bytes for facts in live), default=0))
    spreading.place(bundles, wanted)
    _balance(spreading)
    return _result(spreading, ranks, replicas, domains)


def _result(
    spreading: _Spreading, ranks: Sequence[PlacedRank], replicas: int, domains: tuple[str, ...]
) -> ReplicaPlacement:
    ring = spreading.ring
    targets: dict[int, tuple[str, ...]] = {facts.rank: () for facts in sorted(ranks, key=lambda f: f.rank)}
    for bundle in spreading.bundles:
        names = tuple(ring.names[p] for p in bundle.members[1 + bundle.num_copies :])
        targets.update((facts.rank, names) for facts in bundle.ranks)
    received = dict(sorted(zip(ring.names, spreading.load, strict=True)))
    num_targets = sum(map(len, targets.values()))
    most, mean = max(received.values(), default=0), sum(received.values()) // (len(received) or 1)
    reason = (
        f"{num_targets} replicas ({replicas} wanted) of {len(ranks)} ranks on {len(received)} nodes, "
        f"of which one receives {format_bytes(most)} at most, {format_bytes(mean)} on average"
    )
    return ReplicaPlacement(targets, received, _warnings_of(spreading, replicas, domains), reason)


def _check(nodes: Sequence[NodeFacts], ranks: Sequence[PlacedRank], replicas: int) -> None:
    known = {facts.node for facts in nodes}
    if len(known) < len(nodes) or len({facts.rank for facts in ranks}) < len(ranks):
        raise ValueError("a node or a rank is listed twice")
    if replicas < 0 or any(facts.capacity_bytes is not None and facts.capacity_bytes < 0 for facts in nodes):
        raise ValueError("the number of replicas or a capacity is negative")
    for facts in ranks:
        if facts.node not in known or facts.ring_bytes < 0:
            raise ValueError(f"rank {facts.rank}: node {facts.node!r}, {facts.ring_bytes} bytes")


# -- nodes and their domains -------------------------------------------------------------------------

_ALL = -1  # the domain of all nodes
_UNBOUNDED = 1 << 80


class _NodeRing:
    """The usable nodes in the order of their hashes, by position, and the domains they lie in."""

    def __init__(self, nodes: Iterable[NodeFacts], domains: tuple[str, ...]) -> None:
        ordered = sorted(nodes, key=lambda facts: (_hash_of("ring", facts.node), facts.node))
        self.names = [facts.node for facts in ordered]
        self.position = {name: position for position, name in enumerate(self.names)}
        self.capacity = [
            _UNBOUNDED if facts.capacity_bytes is None else facts.capacity_bytes for facts in ordered
        ]
        paths = [_domain_paths(facts, domains) for facts in ordered]
        ids: dict[tuple[int, tuple[str | None, ...]], int] = {}
        # One number for each domain of any level, so that sets show what two nodes share.
        self.keys = [
            tuple(ids.setdefault((level, path), len(ids)) for level, path in enumerate(of)) for of in paths
        ]
        self.domain_name = {number: path[-1] for (_, path), number in ids.items()}
        self.open_nodes: dict[int, int] = defaultdict(int)
        for keys in self.keys:
            for key in keys:
                self.open_nodes[key] += 1
        self.num_domains = [len({keys[level] for keys in self.keys}) for level in range(len(domains))]
        self.open_domains = list(self.num_domains)
        # Nodes of one neighbourhood are equivalent to all others: they share the same domains with them.
        level_of = {key: level for keys in self.keys for level, key in enumerate(keys)}
        hoods: dict[tuple[int, ...], int] = {}
        self.neighbourhood = [
            hoods.setdefault(tuple(key for key in keys if self.open_nodes[key] > 1), len(hoods))
            for keys in self.keys
        ]
        self._bits_of = [[(key, 1 << (len(domains) - 1 - level_of[key])) for key in hood] for hood in hoods]

    def close(self, position: int) -> None:
        """The node takes nothing more; a domain of closed nodes cannot be chosen."""
        for level, key in enumerate(self.keys[position]):
            self.open_nodes[key] -= 1
            self.open_domains[level] -= not self.open_nodes[key]

    def clockwise(self, start: int) -> Iterator[int]:
        """All positions except ``start``, beginning after it."""
        yield from range(start + 1, len(self.names))
        yield from range(start)

    def distance(self, start: int, end: int) -> int:
        return (end - start) % len(self.names)

    def seen(self, positions: Iterable[int]) -> set[int]:
        """The domains, of any level, in which these nodes lie."""
        return {key for position in positions for key in self.keys[position]}

    def shared(self, position: int, seen: set[int]) -> int:
        """The levels at which the node lies in a seen domain, as bits; the most significant counts most."""
        keys = self.keys[position]
        if seen.isdisjoint(keys):
            return 0
        bits = 0
        for key in keys:
            bits = bits << 1 | (key in seen)
        return bits

    def shared_by(self, seen: set[int]) -> list[int]:
        """The value of `shared` by neighbourhood, for nodes that are not among those seen."""
        return [sum([bit for key, bit in bits if key in seen]) for bits in self._bits_of]

    def has_unseen(self, nodes_in: Counter[int], positions: Iterable[int], least: int) -> bool:
        """Whether some counted node shares no domain at the levels that ``least`` leaves free."""
        for level in range(len(self.num_domains)):
            if not least >> (len(self.num_domains) - 1 - level) & 1:
                used = {self.keys[position][level] for position in positions}
                if sum(nodes_in[key] for key in used) >= nodes_in[_ALL]:
                    return False
        return True

    def least_shared(self, seen: set[int], positions: Iterable[int]) -> int:
        """The least value of `shared` of an open node: 0 if each level has a domain left."""
        bits = 0
        for level, available in enumerate(self.open_domains):
            used = {self.keys[position][level] for position in positions}
            bits = bits << 1 | (available <= sum(self.open_nodes[key] > 0 for key in used))
        return bits


def _hash_of(salt: str, name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=8, person=salt.encode()).digest()


def _fair_share(total: int, capacity: Sequence[int]) -> int:
    """The bytes of each node if all receive the same, but none more than its capacity; rounded up."""
    left = total
    for count, most in zip(range(len(capacity), 0, -1), sorted(capacity), strict=True):
        if most * count >= left:
            return -(-left // count)
        left -= most
    return max(capacity, default=0)


def _domain_paths(facts: NodeFacts, domains: tuple[str, ...]) -> list[tuple[str | None, ...]]:
    """The name of the node's domain at each level; a node without the label has its own."""
    values = [facts.labels.get(label) for label in domains]
    return [
        (facts.node,) if value is None else ("labels", *values[: level + 1])
        for level, value in enumerate(values)
    ]


@dataclass(slots=True, eq=False)
class _Bundle:
    """Ranks of one node with the same targets; ``members``: their node, live copies, then targets."""

    ranks: list[PlacedRank]
    members: list[int]
    num_copies: int
    size: int

    @property
    def owner(self) -> int:
        return self.members[0]

    def split(self, facts: PlacedRank) -> _Bundle:
        """Take one rank out into a bundle of its own."""
        self.ranks.remove(facts)
        self.size -= facts.ring_bytes
        return _Bundle([facts], list(self.members), self.num_copies, facts.ring_bytes)


def _bundles_of(ring: _NodeRing, ranks: Sequence[PlacedRank], wanted: int) -> list[_Bundle]:
    """The ranks of each node that have the same live copies, in the order in which they choose."""
    groups: dict[str, set[int]] = defaultdict(set)
    for facts in ranks:
        groups[facts.state_group].add(ring.position[facts.node])
    places = {group: tuple(sorted(nodes)) for group, nodes in groups.items() if group}
    copies: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
    bundles: dict[tuple[int, ...], _Bundle] = {}
    for facts in ranks:
        owner = ring.position[facts.node]
        key = (owner, places.get(facts.state_group, ()))
        if key not in copies:
            copies[key] = _live_copies(ring, *key, wanted)
        members = (owner, *copies[key])
        bundle = bundles.setdefault(members, _Bundle([], list(members), len(members) - 1, 0))
        bundle.ranks.append(facts)
        bundle.size += facts.ring_bytes
    order = [_hash_of("order", name) for name in ring.names]
    return sorted(bundles.values(), key=lambda b: (order[b.owner], b.ranks[0].rank))


def _live_copies(ring: _NodeRing, owner: int, group: tuple[int, ...], wanted: int) -> tuple[int, ...]:
    """The nodes of live ranks with the same state that count as replicas, clockwise from the owner."""
    members = [owner]
    start = bisect_right(group, owner)
    for position in (*group[start:], *group[:start]):
        if len(members) > wanted:
            break
        seen = ring.seen(members)
        if position not in members and ring.shared(position, seen) == ring.least_shared(seen, members):
            members.append(position)
    return tuple(members[1:])


class _Spreading:
    """The state of the placement: loads, limits, and the nodes of each bundle."""

    def __init__(self, ring: _NodeRing, largest: int) -> None:
        self.ring = ring
        self.largest = largest
        self.bundles: list[_Bundle] = []
        self.load = [0] * len(ring.names)
        self.limit = [0] * len(ring.names)
        self.held: list[list[_Bundle]] = [[] for _ in ring.names]
        self.smallest = 0
        self.open = list(range(len(ring.names)))  # nodes that can still take the smallest ring
        self.skipped: set[int] = set()
        self.lying_in: dict[tuple[int, ...], list[int]] = {}
        self.passed: dict[tuple[int, ...], int] = {}  # up to where equal bundles have looked

    def place(self, bundles: list[_Bundle], wanted: int) -> None:
        """Choose the targets: the first target of all bundles, then the second, and so on."""
        self.bundles = bundles
        self.smallest = min((f.ring_bytes for b in bundles for f in b.ranks), default=0)
        for position in range(len(self.load)):
            self._close_if_full(position)
        total = 0
        for turn in range(1, wanted + 1):
            waiting = [bundle for bundle in self.bundles if wanted - bundle.num_copies >= turn]
            total += sum(bundle.size for bundle in waiting)
            level = _fair_share(total, self.ring.capacity) + self.largest
            self.limit = [max(limit, level) for limit in self.limit]
            self.passed.clear()
            waiting = self._choose_nearest(waiting)
            while waiting:
                waiting = [left for bundle in waiting for left in self._choose(bundle)]

    def _choose_nearest(self, waiting: Sequence[_Bundle]) -> list[_Bundle]:
        """Choose targets in the best domains and under the limits, nearest first; returns what got none."""
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
        """By domain, the number of its nodes with room for ``size``: under their limits, and in all."""
        keys, capacity = self.ring.keys, self.ring.capacity
        free = [p for p in self.open if self.load[p] + size <= min(self.limit[p], capacity[p])]
        nodes_in = Counter(key for position in free for key in keys[position])
        nodes_in[_ALL] = len(free)
        return nodes_in

    def _choose(self, bundle: _Bundle) -> list[_Bundle]:
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

    def _next_under_limit(self, bundle: _Bundle, seen: set[int], least: int) -> int | None:
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

    def _with_room(self, bundle: _Bundle, seen: set[int]) -> tuple[int, list[int]]:
        """The best value of `_NodeRing.shared` among the nodes with room, and all nodes with that value."""
        load, capacity, size = self.load, self.ring.capacity, bundle.size
        hood, members = self.ring.neighbourhood, bundle.members
        order = _clockwise(self.open, bundle.owner, bundle.owner)
        room = [position for position in order if load[position] + size <= capacity[position]]
        if len(room) < len(order):
            self.skipped.update(set(order).difference(room))
        room = [position for position in room if position not in members]
        shared_by = self.ring.shared_by(seen)
        best = min([shared_by[h] for h in {hood[position] for position in room}], default=_UNBOUNDED)
        return best, [position for position in room if shared_by[hood[position]] == best]

    def _in_shared_domains(self, members: Sequence[int], seen: set[int], least: int) -> list[int]:
        """The nodes whose `_NodeRing.shared` is ``least``, by position; may include members."""
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

    def _separate(self, bundle: _Bundle) -> list[_Bundle]:
        """No node has room for the whole bundle: split it into ranks, which may still fit."""
        parts = [self.split(bundle, facts) for facts in bundle.ranks[1:]]
        return [bundle, *parts]

    def split(self, bundle: _Bundle, facts: PlacedRank) -> _Bundle:
        part = bundle.split(facts)
        self.bundles.append(part)
        for position in part.members[1 + part.num_copies :]:
            self.held[position].append(part)
        return part

    def _give(self, bundle: _Bundle, position: int) -> None:
        bundle.members.append(position)
        self.held[position].append(bundle)
        self.load[position] += bundle.size
        self._close_if_full(position)

    def _close_if_full(self, position: int) -> None:
        if self.load[position] + self.smallest > self.ring.capacity[position]:
            del self.open[bisect_left(self.open, position)]
            self.skipped.add(position)
            self.ring.close(position)

    def move(self, bundle: _Bundle, source: int, target: int) -> None:
        bundle.members[bundle.members.index(source, 1 + bundle.num_copies)] = target
        self.held[source].remove(bundle)
        self.held[target].append(bundle)
        self.load[source] -= bundle.size
        self.load[target] += bundle.size


def _clockwise(positions: list[int], owner: int, passed: int) -> list[int]:
    """The positions after ``passed``, in order, on the way around the ring from the owner to itself."""
    start, end = bisect_right(positions, passed), bisect_left(positions, owner)
    return positions[start:end] if passed < owner else positions[start:] + positions[:end]


_LEVELS_MAX = 4


def _balance(spreading: _Spreading) -> None:
    """Move replicas from nodes above the mean plus one ring to nodes with room in equally good domains."""
    load = spreading.load
    if not load:
        return
    relief = _Relief(spreading)
    share = _fair_share(sum(load), spreading.ring.capacity)
    above = relief.lower(share + spreading.largest)
    for _ in range(_LEVELS_MAX):
        if not above:
            return
        # Domains or capacity force more than their share on these nodes: distribute it evenly among them.
        even = -(-sum(load[position] for position in above) // len(above))
        above = relief.lower(even + spreading.largest)
    relief.lower(share + spreading.largest)  # the exchanges may have freed room below


class _Relief:
    """Moves replicas from nodes above a level to nodes below it, with bounded effort.

    Moves only shrink the room, so a replica that found no place is not tried again: ``hopeless`` has
    the smallest size that failed, by the domains to avoid, and ``stuck`` the smallest size for which a
    node could not free enough room.
    """

    def __init__(self, spreading: _Spreading) -> None:
        self.spreading = spreading
        self.ring = spreading.ring
        self.effort_left = 100_000 + 500 * len(spreading.load)
        self.level = 0
        self.num_moves = 0
        self.room: list[int] = []
        self.hopeless: dict[tuple[int, ...], int] = {}
        self.stuck: dict[int, int] = {}

    def lower(self, level: int) -> list[int]:
        """Lower nodes to the level, by moves, then by exchanges; returns those that stayed above it."""
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

    def _relieve(self, source: int, step: Callable[[_Bundle, PlacedRank | None, int], bool]) -> bool:
        """Perform steps until the node is at the level; False if no step is left before that."""
        spreading = self.spreading
        while (excess := spreading.load[source] - self.level) > 0:
            # Replicas of the farthest ranks first: a change of membership preserves near pairs.
            held = sorted(
                spreading.held[source],
                key=lambda b: (-self.ring.distance(b.owner, source), b.ranks[0].rank),
            )
            items: list[tuple[_Bundle, PlacedRank | None]] = [
                (bundle, None) for bundle in held if 0 < bundle.size <= 2 * excess
            ]
            items += [(bundle, facts) for bundle in held for facts in bundle.ranks if facts.ring_bytes]
            if not any(step(*item, source) for item in items):
                return False
        self._reopen(source)
        return True

    def _move(self, bundle: _Bundle, facts: PlacedRank | None, source: int) -> bool:
        """Move the bundle, or one rank of it, to the next node that has room."""
        target = self._find(bundle, bundle.size if facts is None else facts.ring_bytes, source)
        if target is None:
            return False
        self._transfer(bundle, facts, source, target)
        return True

    def _exchange(self, bundle: _Bundle, facts: PlacedRank | None, source: int) -> bool:
        """Move the bundle to a node without room, if need be by moving another one from there."""
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
            if size >= self.stuck.get(middle, _UNBOUNDED) or middle in bundle.members:
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

    def _transfer(self, bundle: _Bundle, facts: PlacedRank | None, source: int, target: int) -> None:
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

    def _find(self, bundle: _Bundle, size: int, source: int) -> int | None:
        """The next node after the source with room for ``size``, in domains as good as the source's."""
        ring, load = self.ring, self.spreading.load
        self.effort_left -= 1
        if self.effort_left <= 0 or not self.room:
            return None
        others = [member for member in bundle.members if member != source]
        seen = ring.seen(others)
        allowed = ring.shared(source, seen)
        signature = (allowed, *sorted([ring.neighbourhood[member] for member in others]))
        if size >= self.hopeless.get(signature, _UNBOUNDED):
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


_WARNINGS_MAX = 32


def _warnings_of(spreading: _Spreading, replicas: int, domains: tuple[str, ...]) -> tuple[str, ...]:
    """The missing guarantees, one sentence for all affected ranks."""
    about: dict[str, list[int]] = defaultdict(list)
    for bundle in spreading.bundles:
        for text in _shortcomings(spreading, bundle, replicas, domains):
            about[text] += [facts.rank for facts in bundle.ranks]
    lines = [(sorted(ranks), text) for text, ranks in about.items()]
    texts = [f"{_some('rank', ranks)}: {text}" for ranks, text in sorted(lines)]
    if spreading.skipped:
        names = sorted(spreading.ring.names[position] for position in spreading.skipped)
        texts.insert(
            0,
            f"{_some('node', names)}: skipped, because the capacity is too small for some replicas",
        )
    texts[:0] = _uneven(spreading)
    if len(texts) > _WARNINGS_MAX:
        more = len(texts) - _WARNINGS_MAX + 1
        texts[_WARNINGS_MAX - 1 :] = [f"and {more} more warnings like these"]
    return tuple(texts)


def _uneven(spreading: _Spreading) -> Iterator[str]:
    """A warning if domains or nodes with many ranks give a node more than twice its share."""
    most = max(spreading.load, default=0)
    share = _fair_share(sum(spreading.load), spreading.ring.capacity)
    if most > 2 * share + spreading.largest:
        name = spreading.ring.names[spreading.load.index(most)]
        yield (
            f"node {name}: receives {format_bytes(most)}, the even share is {format_bytes(share)}, "
            "because few nodes are in other domains; set a capacity to limit it"
        )


def _shortcomings(
    spreading: _Spreading, bundle: _Bundle, replicas: int, domains: tuple[str, ...]
) -> Iterator[str]:
    ring, members = spreading.ring, bundle.members
    if len(members) <= replicas:
        usable = len(ring.names)
        why = f"only {usable} nodes are usable" if usable <= replicas else "no other node has room"
        yield f"{len(members) - 1} of {replicas} replicas; {why}"
    for level, label in enumerate(domains):
        keys = [ring.keys[member][level] for member in members]
        shared = next((key for index, key in enumerate(keys) if key in keys[:index]), None)
        if shared is not None:
            distinct = len(set(keys))
            room = "" if distinct == ring.num_domains[level] else " with room"
            yield (
                f"no {_ordinal(distinct + 1)} {label}{room}; "
                f"a replica shares {label} {ring.domain_name[shared]}"
            )


def _ordinal(number: int) -> str:
    words = ("first", "second", "third", "fourth")
    return words[number - 1] if number <= len(words) else f"{number}th"


def _some(noun: str, items: Sequence[object]) -> str:
    """The first items by name, and the total number."""
    if len(items) == 1:
        return f"{noun} {items[0]}"
    shown = ", ".join(map(str, items[:4]))
    return f"{noun}s {shown}" + (f", … ({len(items)} in all)" if len(items) > 4 else "")
