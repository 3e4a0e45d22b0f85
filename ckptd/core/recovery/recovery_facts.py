"""The facts of each rank about its communication in a step, completed for ranks without facts. Pure.

A rank records its facts with its boundary log. The neighbour relation is symmetric, so the neighbours of a
lost rank follow from the facts of the others. A *domain* contains all ranks that are joined by other
communication within a step, directly or through other ranks; each rank reports those that it knows, and the
domains are the connected components. Whether two lost ranks communicate with each other or belong to one
domain does not follow. They are therefore treated as one domain: its ranks start at the same iteration, so no
log of the tensors sent within it is needed. A domain that is too large costs replay, never exactness.

The facts of a rank that lost its node, or whose node is only asked, come from the descriptors of its log and
of the log's replicas (`facts_from_logs`). Those of the newest generation count, because facts grow. A replica
may belong to an older generation; its facts are used only if it contains tensors that the rank sent shortly
before the end. A rank without such a log has no facts, which costs replay but no exactness.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import Meta

from ckptd.core.recovery.held import HeldRecords
from ckptd.core.recovery.snapshot_tables import listed
from ckptd.core.slots.boundary import outdated
from ckptd.core.slots.slots import epoch_table, live
from ckptd.errors import RemoteProtocolError
from ckptd.unpacking import unpack


class RankFacts(msgspec.Struct, frozen=True):
    """The facts of one rank; each list is in ascending order.

    Args:
        neighbours: ranks with which it exchanges tensors that boundary logs contain.
        domain: ranks with which it communicates otherwise within a step, as far as it knows.
        alike: ranks whose operators all equal its own.

    A list may contain the rank itself; on the wire it does, so that ranks of one domain have equal lists,
    which are sent once.
    """

    neighbours: tuple[int, ...]
    domain: tuple[int, ...]
    alike: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Relations:
    """The completed facts of all ranks.

    Args:
        domains: the ranks of each domain, ascending; every rank is in one domain.
        domain_of: the domain of each rank.
        neighbours: the neighbours of each rank, as far as any rank reported them.
        unreported: ranks without facts.
        facts: the facts of the other ranks.
    """

    domains: Sequence[tuple[int, ...]]
    domain_of: Sequence[int]
    neighbours: Sequence[tuple[int, ...]]
    unreported: tuple[int, ...]
    facts: Mapping[int, RankFacts]
    _adjacent: dict[int, list[int]] = field(default_factory=dict, repr=False, compare=False)

    def adjacent(self, domain: int) -> list[int]:
        """The other domains with a neighbour of this one's ranks, ascending."""
        if domain not in self._adjacent:
            ranks = self.domains[domain]
            found = {self.domain_of[other] for rank in ranks for other in self.neighbours[rank]}
            self._adjacent[domain] = sorted(found - {domain})
        return self._adjacent[domain]

    def have_same_operators(self, rank: int, other: int) -> bool:
        """Whether all operators of both ranks are equal, according to their facts: one says so, and none
        contradicts.
        """
        claims = [
            _among(whom, self.facts[by].alike)
            for by, whom in ((rank, other), (other, rank))
            if by in self.facts
        ]
        return bool(claims) and all(claims)


def relate(facts: Mapping[int, RankFacts], world_size: int) -> Relations | str:
    """Complete the facts of all ranks; returns the reason as text if the facts cannot be used."""
    if not facts:
        return "no rank reported with which ranks it communicates (is the boundary log enabled?)"
    beyond = _beyond(facts, world_size)
    if beyond:
        return f"the facts name {listed('rank', beyond)}, beyond world size {world_size}"
    neighbours = _neighbours(facts, world_size)
    if isinstance(neighbours, str):
        return neighbours
    unreported = tuple(rank for rank in range(world_size) if rank not in facts)
    domains, domain_of = _domains(facts, unreported, world_size)
    return Relations(domains, domain_of, neighbours, unreported, facts)


def _among(rank: int, ranks: Sequence[int]) -> bool:
    """Whether ``rank`` is in a sorted list, which may have thousands of entries."""
    at = bisect_left(ranks, rank)
    return at < len(ranks) and ranks[at] == rank


def _beyond(facts: Mapping[int, RankFacts], world_size: int) -> list[int]:
    """Ranks beyond the world size; the lists are sorted, so their last entries suffice."""
    named = set(facts)
    for own in facts.values():
        for ranks in (own.neighbours, own.domain, own.alike):
            named.update(ranks[:1] + ranks[-1:])
    return sorted(rank for rank in named if not 0 <= rank < world_size)


def _neighbours(facts: Mapping[int, RankFacts], world_size: int) -> Sequence[tuple[int, ...]] | str:
    """The neighbours by rank; those of a rank without facts are the ranks that named it."""
    found: list[list[int]] = [[] for _ in range(world_size)]
    for rank in sorted(facts):
        for other in facts[rank].neighbours:
            if other in facts and rank not in facts[other].neighbours:
                return (
                    f"rank {rank} reports that it exchanges boundaries with rank {other}, but "
                    f"rank {other} reports the opposite"
                )
            if other not in facts:
                found[other].append(rank)
        found[rank] = [other for other in facts[rank].neighbours if other != rank]
    return [tuple(others) for others in found]


def _domains(
    facts: Mapping[int, RankFacts], unreported: Sequence[int], world_size: int
) -> tuple[Sequence[tuple[int, ...]], Sequence[int]]:
    """The domains (connected components), and the domain of each rank. Tuples that ranks share count once."""
    leader = list(range(world_size))

    def find(rank: int) -> int:
        while leader[rank] != rank:
            leader[rank] = leader[leader[rank]]
            rank = leader[rank]
        return rank

    def join(ranks: Iterable[int], rank: int) -> None:
        root = find(rank)
        for other in ranks:
            if leader[other] != root:
                leader[find(other)] = root

    seen: set[int] = set()
    for rank, own in facts.items():
        new = id(own.domain) not in seen
        seen.add(id(own.domain))
        join(own.domain if new else own.domain[:1], rank)
    join(unreported, unreported[0] if unreported else 0)  # to be safe: see the module
    members: dict[int, list[int]] = {}
    for rank in range(world_size):
        members.setdefault(find(rank), []).append(rank)
    domains = [tuple(ranks) for ranks in members.values()]
    domain_of = [-1] * world_size
    for number, ranks in enumerate(domains):
        for rank in ranks:
            domain_of[rank] = number
    return domains, domain_of


# -- on the wire: equal lists once, as arithmetic progressions, because a domain may be every eighth
# of 16,384 ranks -----------------

_Count = Annotated[int, Meta(ge=0, lt=1 << 24)]
_MAX_BYTES = 1 << 30  # limit of one node's facts
_MAX_RANKS = 1 << 24  # as of a segment's descriptor
# Ten bytes can stand for all ranks that there can be. This suffices for 24 lists of 43,690 ranks.
_MAX_LISTED = 1 << 20


class _WireFacts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    lists: list[list[tuple[_Count, _Count, _Count]]]  # runs: first, step, how many
    ranks: list[tuple[_Count, _Count, _Count, _Count]]  # rank; which lists


def facts_to_wire(facts: Mapping[int, RankFacts]) -> bytes:
    """Encode the facts of some ranks as msgpack for the exchange between ranks.

    Raises:
        ValueError: a list is not ascending.
    """
    numbers: dict[tuple[int, ...], int] = {}

    def number(ranks: tuple[int, ...]) -> int:
        return numbers.setdefault(ranks, len(numbers))

    ranks = [
        (
            rank,
            number(own.neighbours),
            number(_with(rank, own.domain)),
            number(_with(rank, own.alike)),
        )
        for rank, own in sorted(facts.items())
    ]
    return msgspec.msgpack.encode(_WireFacts([_runs(ranks) for ranks in numbers], ranks))


def facts_from_wire(payloads: Iterable[bytes]) -> dict[int, RankFacts]:
    """Decode the outputs of `facts_to_wire` of all nodes; equal lists become one object.

    Raises:
        RemoteProtocolError: a payload is malformed, or contradicts itself.
    """
    facts: dict[int, RankFacts] = {}
    once: dict[tuple[int, ...], tuple[int, ...]] = {}
    for payload in payloads:
        try:
            wire = unpack(_decoder, payload, max_bytes=_MAX_BYTES)
            listed = sum(count for runs in wire.lists for _, _, count in runs)
            if listed > _MAX_LISTED:
                raise ValueError(f"it lists {listed} ranks, may list {_MAX_LISTED}")
            lists = [once.setdefault(ranks, ranks) for ranks in map(_ranks, wire.lists)]
            for rank, neighbours, domain, alike in wire.ranks:
                facts[rank] = RankFacts(lists[neighbours], lists[domain], lists[alike])
        except (ValueError, IndexError) as error:
            raise RemoteProtocolError(
                f"a node's report of its ranks' communication cannot be read ({error})",
                operation="plan recovery",
                hint="Check that all ranks run the same version of ckptd",
            ) from error
    return facts


class _LogFacts(msgspec.Struct, frozen=True):
    neighbours: list[_Count]
    domain: list[_Count]
    alike: list[_Count]


class _LogPayload(msgspec.Struct, frozen=True):
    """The field of the trainer's part of a log's descriptor that is read here; it has others."""

    facts: _LogFacts | None = None


_log_decoder = msgspec.msgpack.Decoder(_LogPayload)


def facts_of_log(client: bytes) -> RankFacts | None:
    """The facts in the trainer's part of a boundary log's descriptor.

    None if it has none, or in an unknown form: then the rank counts as one without facts, which costs
    replay but no exactness.
    """
    try:
        own = unpack(_log_decoder, client).facts
    except ValueError:
        return None
    if own is None:
        return None
    lists = [tuple(sorted(set(ranks))) for ranks in (own.neighbours, own.domain, own.alike)]
    return RankFacts(*lists)


def _with(rank: int, ranks: tuple[int, ...]) -> tuple[int, ...]:
    return ranks if _among(rank, ranks) else tuple(sorted((*ranks, rank)))


def _runs(ranks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Ascending ranks as progressions."""
    if any(second <= first for first, second in pairwise(ranks)):
        raise ValueError(f"the ranks {list(ranks[:8])} are not ascending")
    runs: list[tuple[int, int, int]] = []
    at = 0
    while at < len(ranks):
        step = ranks[at + 1] - ranks[at] if at + 1 < len(ranks) else 1
        end = at + 1
        while end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        runs.append((ranks[at], step, end - at))
        at = end
    return runs


def _ranks(runs: Iterable[tuple[int, int, int]]) -> tuple[int, ...]:
    found: list[int] = []
    for first, step, count in runs:
        if (
            step < 1
            or count < 1
            or first + step * (count - 1) >= _MAX_RANKS
            or (found and first <= found[-1])
        ):
            raise ValueError(f"the ranks from {first} on, {count} in steps of {step}")
        found.extend(range(first, first + step * count, step))
    return tuple(found)


_decoder = msgspec.msgpack.Decoder(_WireFacts)


# A rank's last completed step may be the one before the last; and its newest log may not have been sealed.
_AT_MOST_BEFORE = 2


def facts_from_logs(
    ranks: Collection[int], logs: Iterable[HeldRecords], parked: Iterable[HeldRecords]
) -> dict[int, RankFacts]:
    """The facts by rank, from each rank's newest log, if it reaches the newest iteration at which
    any rank was parked.

    Args:
        ranks: the ranks that cannot report themselves; other logs, possibly thousands, are not read.
        logs: the boundary logs that nodes hold, including replicas.
        parked: the parked states that they hold; without any, no facts are needed.
    Raises:
        RemoteProtocolError: the facts of a log cannot be read.
    """
    if not ranks:
        return {}
    known, parks = list(logs), list(parked)
    epochs = epoch_table(r for each in (known, parks) for h in each for r in h.records)
    ends = [r.iteration for h in parks for r in live(h.records, epochs) if r.sealed]
    if not ends:
        return {}
    least = max(ends) - _AT_MOST_BEFORE
    newest: dict[int, tuple[Sequence[int], bytes]] = {}
    for h in (h for h in known if h.facts and h.rank in ranks):
        filled = [
            (r.epoch, r.iteration, r.sequence)
            for r in h.records
            if r.sealed and r.iteration >= least and not outdated(r, epochs)
        ]
        if filled:
            newest[h.rank] = max(newest.get(h.rank, ((), b"")), (max(filled), h.facts))
    found = facts_from_wire(fact for _, fact in newest.values())
    return {rank: facts for rank, facts in found.items() if rank in newest}
