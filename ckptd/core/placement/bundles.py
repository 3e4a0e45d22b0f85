"""Ranks that choose their targets together, and the live copies that they need not send."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ckptd.core.placement.nodes import NodeRing, hash_of
from ckptd.core.placement.placement_facts import PlacedRank

__all__ = ["Bundle", "bundles_of"]


@dataclass(slots=True, eq=False)
class Bundle:
    """Ranks of one node that go the same way. ``members``: their node, live copies, and then targets."""

    ranks: list[PlacedRank]
    members: list[int]
    num_copies: int
    size: int

    @property
    def owner(self) -> int:
        return self.members[0]

    def split(self, facts: PlacedRank) -> Bundle:
        """Take one rank out into a bundle of its own."""
        self.ranks.remove(facts)
        self.size -= facts.ring_bytes
        return Bundle([facts], list(self.members), self.num_copies, facts.ring_bytes)


def bundles_of(ring: NodeRing, ranks: Sequence[PlacedRank], wanted: int) -> list[Bundle]:
    """The ranks of each node that have the same live copies, in the order in which they choose."""
    groups: dict[str, set[int]] = defaultdict(set)
    for facts in ranks:
        groups[facts.state_group].add(ring.position[facts.node])
    places = {group: tuple(sorted(nodes)) for group, nodes in groups.items() if group}
    copies: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
    bundles: dict[tuple[int, ...], Bundle] = {}
    for facts in ranks:
        owner = ring.position[facts.node]
        key = (owner, places.get(facts.state_group, ()))
        if key not in copies:
            copies[key] = _live_copies(ring, *key, wanted)
        members = (owner, *copies[key])
        bundle = bundles.setdefault(members, Bundle([], list(members), len(members) - 1, 0))
        bundle.ranks.append(facts)
        bundle.size += facts.ring_bytes
    order = [hash_of("order", name) for name in ring.names]
    return sorted(bundles.values(), key=lambda b: (order[b.owner], b.ranks[0].rank))


def _live_copies(ring: NodeRing, owner: int, group: tuple[int, ...], wanted: int) -> tuple[int, ...]:
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
