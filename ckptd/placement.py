"""Which nodes hold whose replicas: one pure function of a run's nodes and ranks.

Every daemon computes it from the same members and gets the same answer, whatever the order of its
input. In the order of what gives way last:

1. a replica is never on its rank's own node, and no node holds two of one rank;
2. no node is given more than its capacity;
3. the copies of a rank (its own, and every replica) lie in as many domains of the most significant label as
   there are, then of the next label, and so on; what cannot be had so is named in a warning;
4. no node receives more than the mean and one rank's ring, where 1 to 3 allow it;
5. a node that comes or goes changes the targets of few ranks.

How. Nodes stand on a ring in the order of a hash of their names, which a change of the membership leaves as
it is. Each takes the first nodes clockwise that lie in new domains and have room under a limit near the
mean, the nearest pairs first: all take their first target, then all their second. Where all that is eligible
is full, the limit of just that is raised by what is needed. At last, nodes above the mean and one ring
hand on what others can take. With many more domains than replicas, a node that goes concerns the few
before it; with hardly more (two or three zones), room has to be handed on from zone to zone, which
concerns the ranks of a few times the root of the number of nodes.

All ranks of one node go to the same peers, unless capacity or the balance splits them. What each node
receives is the same either way, and so is the time to restore a lost node, since its own link is the
narrow one. But there are fewer connections, and fewer sets of replicas + 1 nodes whose simultaneous loss takes
all copies of a rank: that is the reason behind Gemini's groups (SOSP '23). Groups of replicas + 1 would
have fewer such sets still than our one for each node, but a node that comes or goes moves all their borders.

Ranks of the same ``state_group`` hold the same state (MoEtion §5.1: data-parallel peers), so a live one on
another node is a copy that need not be sent. It counts only if no usable node would lie in better
domains: redundancy that fails with the same rack is no reason to send nothing.

Sizes are bytes; ``domains`` are label keys, most significant first. A domain is named by the labels from the
most significant on, so that rack 1 of zone a is not rack 1 of zone b; a node without a label is a domain of
its own.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckptd.units import format_bytes

__all__ = ["DOMAINS", "NodeFacts", "Placement", "RankFacts", "plan_placement"]

DOMAINS = ("zone", "rack", "host")
_WARNINGS_MAX = 32
_LEVELS_MAX = 4
_ALL = -1  # the domain of all nodes
_UNBOUNDED = 1 << 80


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A node that can hold replicas. ``capacity_bytes``: what it takes from others; None: any amount."""

    node: str
    labels: Mapping[str, str] = field(default_factory=dict)
    capacity_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class RankFacts:
    """A rank, its node, what a replica of it takes, and whose live state equals its own ("": nobody's)."""

    rank: int
    node: str
    ring_bytes: int
    state_group: str = ""


@dataclass(frozen=True, slots=True)
class Placement:
    """Who holds whose replicas, and what that does not give.

    Attributes:
        targets: of every rank, the nodes of its replicas, in the order in which they were chosen; () for
            the ranks of dead nodes, which nobody could send.
        received_bytes: of every usable node, the sizes of all the replicas it holds.
        warnings: each a sentence on some ranks or nodes, at most 32.
        reason: one line for the log.
    """

    targets: Mapping[int, tuple[str, ...]]
    received_bytes: Mapping[str, int]
    warnings: tuple[str, ...]
    reason: str


def plan_placement(
    nodes: Sequence[NodeFacts],
    ranks: Sequence[RankFacts],
    *,
    replicas: int,
    domains: tuple[str, ...] = DOMAINS,
    without: Container[str] = (),
) -> Placement:
    """Place ``replicas`` replicas of every rank; see the module.

    Args:
        without: the nodes that are dead: they hold nothing, and their ranks count for nothing.
    Raises:
        ValueError: a node or a rank twice, a rank on an unknown node, a negative number.
    """
    _check(nodes, ranks, replicas)
    ring = _Ring([facts for facts in nodes if facts.node not in without], domains)
    live = [facts for facts in ranks if facts.node in ring.position]
    wanted = max(0, min(replicas, len(ring.names) - 1))
    bundles = _bundles(ring, sorted(live, key=lambda facts: facts.rank), wanted)
    spreading = _Spreading(ring, max((facts.ring_bytes for facts in live), default=0))
    spreading.place(bundles, wanted)
    spreading.balance()
    return _placement(spreading, ranks, replicas, domains)


class _Ring:
    """The usable nodes in the order of their hashes, by position, and the domains they lie in."""

    def __init__(self, nodes: Iterable[NodeFacts], domains: tuple[str, ...]) -> None:
        ordered = sorted(nodes, key=lambda facts: (_hash("ring", facts.node), facts.node))
        self.names = [facts.node for facts in ordered]
        self.position = {name: position for position, name in enumerate(self.names)}
        self.capacity = [
            _UNBOUNDED if facts.capacity_bytes is None else facts.capacity_bytes
            for facts in ordered
        ]
        paths = [_domain_paths(facts, domains) for facts in ordered]
        ids: dict[tuple[int, tuple[str | None, ...]], int] = {}
        # One number for each domain of any level, so that a set of them answers what two nodes share.
        self.keys = [
            tuple(ids.setdefault((level, path), len(ids)) for level, path in enumerate(of))
            for of in paths
        ]
        self.domain_name = {number: path[-1] for (_, path), number in ids.items()}
        self.open_nodes: dict[int, int] = defaultdict(int)
        for keys in self.keys:
            for key in keys:
                self.open_nodes[key] += 1
        self.num_domains = [
            len({keys[level] for keys in self.keys}) for level in range(len(domains))
        ]
        self.open_domains = list(self.num_domains)
        # Nodes of one neighbourhood are alike to all others: the domains that they share with anybody.
        self.neighbourhood = [
            tuple(key for key in keys if self.open_nodes[key] > 1) for keys in self.keys
        ]

    def close(self, position: int) -> None:
        """The node takes nothing more: a domain of such nodes is none that could be chosen."""
        for level, key in enumerate(self.keys[position]):
            self.open_nodes[key] -= 1
            self.open_domains[level] -= not self.open_nodes[key]

    def clockwise(self, start: int) -> Iterator[int]:
        """All positions but ``start``, beginning behind it."""
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

    def has_unseen(self, nodes_in: Counter[int], positions: Iterable[int], least: int) -> bool:
        """Whether some node of those counted shares no domain at the levels that ``least`` leaves free."""
        for level in range(len(self.num_domains)):
            if not least >> (len(self.num_domains) - 1 - level) & 1:
                used = {self.keys[position][level] for position in positions}
                if sum(nodes_in[key] for key in used) >= nodes_in[_ALL]:
                    return False
        return True

    def least_shared(self, seen: set[int], positions: Iterable[int]) -> int:
        """What `shared` is at the least for a node that is open: 0 if each level has a domain left."""
        bits = 0
        for level, available in enumerate(self.open_domains):
            used = {self.keys[position][level] for position in positions}
            bits = bits << 1 | (available <= sum(self.open_nodes[key] > 0 for key in used))
        return bits


@dataclass(slots=True, eq=False)
class _Bundle:
    """Ranks of one node that go the same way. ``members``: their node, live copies, and then targets."""

    ranks: list[RankFacts]
    members: list[int]
    num_copies: int
    size: int

    @property
    def owner(self) -> int:
        return self.members[0]

    def split(self, facts: RankFacts) -> _Bundle:
        """Take one rank out into a bundle of its own."""
        self.ranks.remove(facts)
        self.size -= facts.ring_bytes
        return _Bundle([facts], list(self.members), self.num_copies, facts.ring_bytes)


class _Spreading:
    """The replicas on their way to nodes: loads, limits, and who holds which bundle."""

    def __init__(self, ring: _Ring, largest: int) -> None:
        self.ring = ring
        self.largest = largest
        self.bundles: list[_Bundle] = []
        self.load = [0] * len(ring.names)
        self.limit = [0] * len(ring.names)
        self.held: list[list[_Bundle]] = [[] for _ in ring.names]
        self.smallest = 0
        self.full: set[int] = set()
        self.skipped: set[int] = set()

    def place(self, bundles: list[_Bundle], wanted: int) -> None:
        """Give each bundle its targets: one for all, then the next for all."""
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
            waiting = self._choose_nearest(waiting)
            while waiting:
                waiting = [left for bundle in waiting for left in self._choose(bundle)]

    def _choose_nearest(self, waiting: Sequence[_Bundle]) -> list[_Bundle]:
        """Targets in the best domains and under the limits, the nearest pairs first; who found none."""
        ring, num_nodes = self.ring, len(self.load)
        before = {bundle: len(bundle.members) for bundle in waiting}
        smallest = min((bundle.size for bundle in waiting), default=0)
        wishes = []
        for bundle in waiting:
            seen = ring.seen(bundle.members)
            wishes.append((bundle, seen, ring.least_shared(seen, bundle.members)))
        for distance in range(1, num_nodes):
            if not distance % 64:
                below = self._below_limit(smallest)
                wishes = [
                    wish for wish in wishes if ring.has_unseen(below, wish[0].members, wish[2])
                ]
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
        """Of each domain, how many of its nodes have room for ``size`` under their limits."""
        keys = self.ring.keys
        free = [p for p, load in enumerate(self.load) if load + size <= self.limit[p]]
        nodes_in = Counter(key for position in free for key in keys[position])
        nodes_in[_ALL] = len(free)
        return nodes_in

    def _choose(self, bundle: _Bundle) -> list[_Bundle]:
        """Find the bundle its next target; what comes back has to be tried again, in smaller parts."""
        ring, size = self.ring, bundle.size
        seen = ring.seen(bundle.members)
        least = ring.least_shared(seen, bundle.members)
        best = 1 << len(ring.num_domains)
        candidates: list[int] = []
        for position in ring.clockwise(bundle.owner):
            if position in self.full or position in bundle.members:
                continue
            if self.load[position] + size > ring.capacity[position]:
                self.skipped.add(position)
                continue
            shared = ring.shared(position, seen)
            if shared == least and self.load[position] + size <= self.limit[position]:
                self._give(bundle, position)
                return []
            if shared < best:
                best, candidates = shared, []
            if shared == best:
                candidates.append(position)
        if len(bundle.ranks) > 1 and (best > least or not candidates):
            return self._separate(bundle)
        if candidates:
            self._give(bundle, self._raise_limit(candidates, size))
        return []

    def _raise_limit(self, candidates: Sequence[int], size: int) -> int:
        """Where all candidates are at their limits, raise these just so far that one has room; which one."""
        level = min(self.load[position] for position in candidates) + size
        for position in candidates:
            self.limit[position] = max(self.limit[position], level)
        return next(p for p in candidates if self.load[p] + size <= self.limit[p])

    def _separate(self, bundle: _Bundle) -> list[_Bundle]:
        """No node has room for all of it: rank by rank, it may still find its place."""
        parts = [self._split(bundle, facts) for facts in bundle.ranks[1:]]
        return [bundle, *parts]

    def _split(self, bundle: _Bundle, facts: RankFacts) -> _Bundle:
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
            self.full.add(position)
            self.skipped.add(position)
            self.ring.close(position)

    def balance(self) -> None:
        """Move what is above the mean and one ring to nodes that can take it in as good domains."""
        if not self.load:
            return
        relief = _Relief(self)
        share = _fair_share(sum(self.load), self.ring.capacity)
        above = relief.lower(share + self.largest)
        for _ in range(_LEVELS_MAX):
            if not above:
                return
            # Domains or capacity put more than its share on these: at least they have it evenly.
            even = -(-sum(self.load[position] for position in above) // len(above))
            above = relief.lower(even + self.largest)
        relief.lower(share + self.largest)  # which may have made room below as well

    def move(self, bundle: _Bundle, source: int, target: int) -> None:
        bundle.members[bundle.members.index(source, 1 + bundle.num_copies)] = target
        self.held[source].remove(bundle)
        self.held[target].append(bundle)
        self.load[source] -= bundle.size
        self.load[target] += bundle.size


class _Relief:
    """Moves from nodes above a level to nodes below it, with a bound on what is tried.

    Moves only shrink the room, so what found no place once is not tried again: ``hopeless`` has the
    smallest size that failed, by the domains it had to avoid.
    """

    def __init__(self, spreading: _Spreading) -> None:
        self.spreading = spreading
        self.ring = spreading.ring
        self.effort_left = 100_000 + 500 * len(spreading.load)
        self.level = 0
        self.num_moves = 0
        self.room: list[int] = []
        self.hopeless: dict[tuple[object, ...], int] = {}

    def lower(self, level: int) -> list[int]:
        """Bring nodes down to the level, first by moves, then by exchanges; who stayed above it."""
        load = self.spreading.load
        self.level = level
        self.room = [position for position in range(len(load)) if self._has_room(position)]
        self.hopeless.clear()
        above = [position for position in range(len(load)) if load[position] > level]
        above = [source for source in above if not self._relieve(source, self._move)]
        num_moves = -1
        while above and num_moves < self.num_moves:
            num_moves = self.num_moves
            above = [source for source in above if not self._relieve(source, self._exchange)]
        return above

    def _relieve(self, source: int, step: Callable[[_Bundle, RankFacts | None, int], bool]) -> bool:
        """Take steps until the node is down at the level; False if none is left before."""
        spreading = self.spreading
        while (excess := spreading.load[source] - self.level) > 0:
            # Those from the farthest away first: nearness is what a change of membership preserves.
            held = sorted(
                spreading.held[source],
                key=lambda b: (-self.ring.distance(b.owner, source), b.ranks[0].rank),
            )
            items: list[tuple[_Bundle, RankFacts | None]] = [
                (bundle, None) for bundle in held if 0 < bundle.size <= 2 * excess
            ]
            items += [
                (bundle, facts) for bundle in held for facts in bundle.ranks if facts.ring_bytes
            ]
            if not any(step(*item, source) for item in items):
                return False
        self._reopen(source)
        return True

    def _move(self, bundle: _Bundle, facts: RankFacts | None, source: int) -> bool:
        """Move the bundle, or one rank of it, to the next node that has room."""
        target = self._find(bundle, bundle.size if facts is None else facts.ring_bytes, source)
        if target is None:
            return False
        self._transfer(bundle, facts, source, target)
        return True

    def _exchange(self, bundle: _Bundle, facts: RankFacts | None, source: int) -> bool:
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
            if middle in bundle.members or self.ring.shared(middle, seen) > allowed:
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
        return False

    def _transfer(self, bundle: _Bundle, facts: RankFacts | None, source: int, target: int) -> None:
        if facts is not None and len(bundle.ranks) > 1:
            bundle = self.spreading._split(bundle, facts)
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
        """The next node behind the source with room for ``size``, in domains as good as the source's."""
        ring, load = self.ring, self.spreading.load
        others = [member for member in bundle.members if member != source]
        seen = ring.seen(others)
        allowed = ring.shared(source, seen)
        signature = (allowed, *sorted(ring.neighbourhood[member] for member in others))
        if self.effort_left <= 0 or size >= self.hopeless.get(signature, _UNBOUNDED):
            return None
        worse: set[tuple[int, ...]] = set()
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


def _check(nodes: Sequence[NodeFacts], ranks: Sequence[RankFacts], replicas: int) -> None:
    known = {facts.node for facts in nodes}
    if len(known) < len(nodes) or len({facts.rank for facts in ranks}) < len(ranks):
        raise ValueError("a node or a rank is given twice")
    if replicas < 0 or any(
        facts.capacity_bytes is not None and facts.capacity_bytes < 0 for facts in nodes
    ):
        raise ValueError("the number of replicas or a capacity is negative")
    for facts in ranks:
        if facts.node not in known or facts.ring_bytes < 0:
            raise ValueError(f"rank {facts.rank}: node {facts.node!r}, {facts.ring_bytes} bytes")


def _hash(salt: str, name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=8, person=salt.encode()).digest()


def _fair_share(total: int, capacity: Sequence[int]) -> int:
    """What each node receives if all receive the same, but none more than its capacity; rounded up."""
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


def _bundles(ring: _Ring, ranks: Sequence[RankFacts], wanted: int) -> list[_Bundle]:
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
    order = [_hash("order", name) for name in ring.names]
    return sorted(bundles.values(), key=lambda b: (order[b.owner], b.ranks[0].rank))


def _live_copies(ring: _Ring, owner: int, group: tuple[int, ...], wanted: int) -> tuple[int, ...]:
    """The nodes of live ranks with the same state that count as replicas, clockwise from the owner."""
    members = [owner]
    start = bisect_right(group, owner)
    for position in (*group[start:], *group[:start]):
        if len(members) > wanted:
            break
        seen = ring.seen(members)
        if position not in members and ring.shared(position, seen) == ring.least_shared(
            seen, members
        ):
            members.append(position)
    return tuple(members[1:])


def _placement(
    spreading: _Spreading, ranks: Sequence[RankFacts], replicas: int, domains: tuple[str, ...]
) -> Placement:
    ring = spreading.ring
    targets: dict[int, tuple[str, ...]] = {
        facts.rank: () for facts in sorted(ranks, key=lambda f: f.rank)
    }
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
    return Placement(targets, received, _warnings(spreading, replicas, domains), reason)


def _warnings(spreading: _Spreading, replicas: int, domains: tuple[str, ...]) -> tuple[str, ...]:
    """What is not guaranteed, one sentence for all the ranks it is true of."""
    about: dict[str, list[int]] = defaultdict(list)
    for bundle in spreading.bundles:
        for text in _shortcomings(spreading, bundle, replicas, domains):
            about[text] += [facts.rank for facts in bundle.ranks]
    lines = [(sorted(ranks), text) for text, ranks in about.items()]
    texts = [f"{_some('rank', ranks)}: {text}" for ranks, text in sorted(lines)]
    if spreading.skipped:
        names = sorted(spreading.ring.names[position] for position in spreading.skipped)
        texts.insert(
            0, f"{_some('node', names)}: skipped, without room for all that was meant for it"
        )
    texts[:0] = _uneven(spreading)
    if len(texts) > _WARNINGS_MAX:
        more = len(texts) - _WARNINGS_MAX + 1
        texts[_WARNINGS_MAX - 1 :] = [f"and {more} more warnings like these"]
    return tuple(texts)


def _uneven(spreading: _Spreading) -> Iterator[str]:
    """Whether domains, or nodes that own much, put more than twice its share on somebody."""
    most = max(spreading.load, default=0)
    share = _fair_share(sum(spreading.load), spreading.ring.capacity)
    if most > 2 * share + spreading.largest:
        name = spreading.ring.names[spreading.load.index(most)]
        yield (
            f"node {name}: receives {format_bytes(most)} where {format_bytes(share)} would be even, "
            "since few nodes lie in other domains; a capacity bounds it"
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
    """A few of the items by name, and how many there are."""
    if len(items) == 1:
        return f"{noun} {items[0]}"
    shown = ", ".join(map(str, items[:4]))
    return f"{noun}s {shown}" + (f", … ({len(items)} in all)" if len(items) > 4 else "")
