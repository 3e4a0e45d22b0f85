"""The usable nodes on their ring, and the failure domains in which they lie."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from ckptd.core.placement.placement_facts import NodeFacts

__all__ = ["ALL", "UNBOUNDED", "NodeRing", "fair_share", "hash_of"]

ALL = -1  # the domain of all nodes
UNBOUNDED = 1 << 80


class NodeRing:
    """The usable nodes in the order of their hashes, by position, and the domains they lie in."""

    def __init__(self, nodes: Iterable[NodeFacts], domains: tuple[str, ...]) -> None:
        ordered = sorted(nodes, key=lambda facts: (hash_of("ring", facts.node), facts.node))
        self.names = [facts.node for facts in ordered]
        self.position = {name: position for position, name in enumerate(self.names)}
        self.capacity = [
            UNBOUNDED if facts.capacity_bytes is None else facts.capacity_bytes for facts in ordered
        ]
        paths = [_domain_paths(facts, domains) for facts in ordered]
        ids: dict[tuple[int, tuple[str | None, ...]], int] = {}
        # One number for each domain of any level, so that a set of them answers what two nodes share.
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
        # Nodes of one neighbourhood are alike to all others: the domains that they share with anybody.
        level_of = {key: level for keys in self.keys for level, key in enumerate(keys)}
        hoods: dict[tuple[int, ...], int] = {}
        self.neighbourhood = [
            hoods.setdefault(tuple(key for key in keys if self.open_nodes[key] > 1), len(hoods))
            for keys in self.keys
        ]
        self._bits_of = [[(key, 1 << (len(domains) - 1 - level_of[key])) for key in hood] for hood in hoods]

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

    def shared_by(self, seen: set[int]) -> list[int]:
        """What `shared` is, by neighbourhood, of nodes that are not among those seen."""
        return [sum([bit for key, bit in bits if key in seen]) for bits in self._bits_of]

    def has_unseen(self, nodes_in: Counter[int], positions: Iterable[int], least: int) -> bool:
        """Whether some node of those counted shares no domain at the levels that ``least`` leaves free."""
        for level in range(len(self.num_domains)):
            if not least >> (len(self.num_domains) - 1 - level) & 1:
                used = {self.keys[position][level] for position in positions}
                if sum(nodes_in[key] for key in used) >= nodes_in[ALL]:
                    return False
        return True

    def least_shared(self, seen: set[int], positions: Iterable[int]) -> int:
        """What `shared` is at the least for a node that is open: 0 if each level has a domain left."""
        bits = 0
        for level, available in enumerate(self.open_domains):
            used = {self.keys[position][level] for position in positions}
            bits = bits << 1 | (available <= sum(self.open_nodes[key] > 0 for key in used))
        return bits


def hash_of(salt: str, name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=8, person=salt.encode()).digest()


def fair_share(total: int, capacity: Sequence[int]) -> int:
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
