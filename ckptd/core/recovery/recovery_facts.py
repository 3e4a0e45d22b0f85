"""With whom each rank communicates in a step, told by itself; what follows for ranks that cannot tell. Pure.

A rank records its facts beside its boundary log. To be neighbours is symmetric, so what a lost rank
would have told of that follows from the others. A *domain* is all ranks that are joined by other
communication within a step, also by way of third ones; each rank tells whom it knows of, and the
domains are what comes together. What does not follow is whether two lost ranks talk to each other,
or belong to one domain. They are therefore taken for one domain: it starts together, hence nothing
need be known of what is sent within it. A domain that is too large costs replay, never exactness.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import Meta

from ckptd.core.recovery.tables import listed
from ckptd.errors import RemoteProtocolError
from ckptd.unpacking import unpack

__all__ = [
    "RankFacts",
    "Relations",
    "facts_from_wire",
    "facts_of_log",
    "facts_to_wire",
    "relate",
]


class RankFacts(msgspec.Struct, frozen=True):
    """What one rank knows of itself; each ascending.

    Args:
        neighbours: ranks with which it exchanges what boundary logs hold.
        domain: ranks with which it is joined by any other communication within a step, as far as it knows.
        alike: ranks with which it has all operators alike.

    Itself may be among them, and is on the wire: then lists of ranks that are joined are equal, and
    stand there once.
    """

    neighbours: tuple[int, ...]
    domain: tuple[int, ...]
    alike: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Relations:
    """The facts of all ranks, completed.

    Args:
        domains: the ranks of each, ascending; every rank is in one of them.
        domain_of: by rank, which domain.
        neighbours: by rank, as far as anybody told.
        untold: ranks that told nothing.
        facts: what the others told.
    """

    domains: Sequence[tuple[int, ...]]
    domain_of: Sequence[int]
    neighbours: Sequence[tuple[int, ...]]
    untold: tuple[int, ...]
    facts: Mapping[int, RankFacts]

    def alike(self, rank: int, other: int) -> bool:
        """Whether both have all operators alike, as far as they told: nobody contradicts, and one
        of them says so.
        """
        told = [
            _among(whom, self.facts[by].alike)
            for by, whom in ((rank, other), (other, rank))
            if by in self.facts
        ]
        return bool(told) and all(told)


def relate(facts: Mapping[int, RankFacts], world_size: int) -> Relations | str:
    """The facts of all ranks, or why nothing can be made of what was told."""
    if not facts:
        return "no rank told with whom it communicates (are boundaries logged?)"
    beyond = _beyond(facts, world_size)
    if beyond:
        return f"the facts name {listed('rank', beyond)}, beyond world size {world_size}"
    neighbours = _neighbours(facts, world_size)
    if isinstance(neighbours, str):
        return neighbours
    untold = tuple(rank for rank in range(world_size) if rank not in facts)
    domains, domain_of = _domains(facts, untold, world_size)
    return Relations(domains, domain_of, neighbours, untold, facts)


def _among(rank: int, ranks: Sequence[int]) -> bool:
    """Whether it is one of these, ascending and perhaps thousands."""
    at = bisect_left(ranks, rank)
    return at < len(ranks) and ranks[at] == rank


def _beyond(facts: Mapping[int, RankFacts], world_size: int) -> list[int]:
    """Ranks that cannot be; the lists are ascending, so their ends tell."""
    named = set(facts)
    for told in facts.values():
        for ranks in (told.neighbours, told.domain, told.alike):
            named.update(ranks[:1] + ranks[-1:])
    return sorted(rank for rank in named if not 0 <= rank < world_size)


def _neighbours(facts: Mapping[int, RankFacts], world_size: int) -> Sequence[tuple[int, ...]] | str:
    """By rank; those of a rank that told nothing are whoever named it."""
    found: list[list[int]] = [[] for _ in range(world_size)]
    for rank in sorted(facts):
        for other in facts[rank].neighbours:
            if other in facts and rank not in facts[other].neighbours:
                return f"rank {rank} says that it exchanges boundaries with rank {other}, which says that it does not"
            if other not in facts:
                found[other].append(rank)
        found[rank] = [other for other in facts[rank].neighbours if other != rank]
    return [tuple(others) for others in found]


def _domains(
    facts: Mapping[int, RankFacts], untold: Sequence[int], world_size: int
) -> tuple[Sequence[tuple[int, ...]], Sequence[int]]:
    """The domains, and which of them each rank is in: whoever is joined by way of others is joined.

    Ranks often tell one and the same tuple, of thousands of ranks: it is looked at once.
    """
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
    for rank, told in facts.items():
        new = id(told.domain) not in seen
        seen.add(id(told.domain))
        join(told.domain if new else told.domain[:1], rank)
    join(untold, untold[0] if untold else 0)  # to be safe: see the module
    members: dict[int, list[int]] = {}
    for rank in range(world_size):
        members.setdefault(find(rank), []).append(rank)
    domains = [tuple(ranks) for ranks in members.values()]
    domain_of = [-1] * world_size
    for number, ranks in enumerate(domains):
        for rank in ranks:
            domain_of[rank] = number
    return domains, domain_of


# -- on the wire: equal lists once, as arithmetic progressions, because a domain may be every eighth of 16,384 ranks -----------------

_Count = Annotated[int, Meta(ge=0, lt=1 << 24)]
_MAX_BYTES = 1 << 30  # what ranks exchange of one node
_MAX_RANKS = 1 << 24  # as of a segment's descriptor


class _WireFacts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    lists: list[list[tuple[_Count, _Count, _Count]]]  # runs: first, step, how many
    ranks: list[tuple[_Count, _Count, _Count, _Count]]  # rank; which lists


def facts_to_wire(facts: Mapping[int, RankFacts]) -> bytes:
    """Facts of some ranks as msgpack, to be exchanged between ranks.

    Raises:
        ValueError: a list is not ascending.
    """
    numbers: dict[tuple[int, ...], int] = {}

    def number(ranks: tuple[int, ...]) -> int:
        return numbers.setdefault(ranks, len(numbers))

    ranks = [
        (
            rank,
            number(told.neighbours),
            number(_with(rank, told.domain)),
            number(_with(rank, told.alike)),
        )
        for rank, told in sorted(facts.items())
    ]
    return msgspec.msgpack.encode(_WireFacts([_runs(ranks) for ranks in numbers], ranks))


def facts_from_wire(payloads: Iterable[bytes]) -> dict[int, RankFacts]:
    """The facts that `facts_to_wire` was given, by all nodes; equal lists are one object.

    Raises:
        RemoteProtocolError: a payload is none, or contradicts itself.
    """
    facts: dict[int, RankFacts] = {}
    once: dict[tuple[int, ...], tuple[int, ...]] = {}
    for payload in payloads:
        try:
            wire = unpack(_decoder, payload, max_bytes=_MAX_BYTES)
            lists = [once.setdefault(ranks, ranks) for ranks in map(_ranks, wire.lists)]
            for rank, neighbours, domain, alike in wire.ranks:
                facts[rank] = RankFacts(lists[neighbours], lists[domain], lists[alike])
        except (ValueError, IndexError) as error:
            raise RemoteProtocolError(
                f"what a node tells of whom its ranks communicate with cannot be read ({error})",
                operation="plan recovery",
                hint="Check that all ranks run the same version of ckptd",
            ) from error
    return facts


class _LogFacts(msgspec.Struct, frozen=True):
    neighbours: list[_Count]
    domain: list[_Count]
    alike: list[_Count]


class _LogPayload(msgspec.Struct, frozen=True):
    """What is read here of the trainer's part of a log's descriptor; there is more in it."""

    facts: _LogFacts | None = None


_log_decoder = msgspec.msgpack.Decoder(_LogPayload)


def facts_of_log(client: bytes) -> RankFacts | None:
    """The facts in the trainer's part of a boundary log's descriptor.

    None where it tells none, or in a way that is not known here: then its rank has told nothing,
    which costs replay and no exactness.
    """
    try:
        told = unpack(_log_decoder, client).facts
    except ValueError:
        return None
    if told is None:
        return None
    lists = [tuple(sorted(set(ranks))) for ranks in (told.neighbours, told.domain, told.alike)]
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
