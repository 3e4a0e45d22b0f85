"""How a job resumes so that only those who lost their state run again what was: one pure function.

Survivors of a failure *park*: their state before the step that was cut off lies in their nodes'
memory. The newest iteration that any rank was parked at is where all ranks run together again
(``resume``). Until there each rank runs *apart*, from a start of its own:

* **parked**: it goes on where it was parked. Stages of a pipeline end their steps at different
  times, so some are parked one step before ``resume``; they run that step again.
* **moved**: it was parked on another node than that on which it runs now; its state is brought, and
  a snapshot of its own, with which its ring begins there.
* **copied**: its peers, which have all of its operators alike, were parked; it takes its tensors
  from one of them, the rest from its own snapshot of that iteration.
* **replays**: it starts at a suffix of snapshots, as in a recovery of the whole job
  (`ckptd.core.recovery.global_plan`).

In iteration i a rank exchanges boundaries with the neighbours that have started by then; what the
others would send, it is fed from their logs of i. A log that is missing makes its sender start
earlier (`ckptd.core.recovery.scope`).

What counts is told in `ckptd.core.recovery.global_plan`; parked states count as snapshots do. A
recovery at e outdates logs of iterations from e on, but snapshots only after e, because what is
sent in step e comes after the state before it. A parked state of an iteration does not count where
its domain could replay from a later one: then its ranks went on after it.

There is no localized plan where it would be no better than the recovery of all ranks together.
``docs/localized_recovery.md`` has the reasons.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

import msgspec

from ckptd.core.recovery.held import RunHoldings
from ckptd.core.recovery.rank_inventory import RankHoldings
from ckptd.core.recovery.recovery_facts import RankFacts, Relations, relate
from ckptd.core.recovery.scope import (
    DomainSpans,
    DomainStart,
    RecoveryScope,
    Stand,
    lacking,
    settle,
    verified,
)
from ckptd.core.recovery.snapshot_sources import SnapshotToLoad, Sources
from ckptd.core.recovery.spans import best_group, between, newest_span
from ckptd.core.recovery.tables import (
    in_order,
    listed,
    told,
)
from ckptd.core.slots.ring import epoch_table, stale_after

__all__ = ["Feed", "LocalizedPlan", "NotLocalized", "RankKind", "RankPlan", "plan_localized"]

_NO_HOMES: Mapping[int, str] = MappingProxyType({})
_WIDENINGS_TOLD = 3
_LOGS_TRIED = 8


class RankKind(StrEnum):
    """Where a rank's state comes from."""

    PARKED = "parked"
    MOVED = "moved"
    COPIED = "copied"
    REPLAYS = "replays"


class Feed(msgspec.Struct, frozen=True, gc=False):
    """What ``neighbour`` sent in the iterations from ``first`` to before ``end``: one log per
    iteration, in order.
    """

    neighbour: int
    first: int
    end: int
    pieces: tuple[SnapshotToLoad, ...]


class RankPlan(msgspec.Struct, frozen=True, gc=False):
    """How one rank comes to the iteration at which all are together again.

    Args:
        start: its base, the iteration that it runs first; it runs apart until ``LocalizedPlan.resume``.
        exact_at: from here on it is dense.
        pieces: parked: its parked state; moved: its parked state, and its newest snapshot that is not after it; copied: the peer's parked
            state, its own snapshot; replays: its snapshots from ``start`` to ``exact_at``.
        feeds: by neighbour that starts later, ascending.
        values: logs of iterations before ``LocalizedPlan.together`` in which it is exact and no
            neighbour feeds it: nobody can compute there what all ranks compute together, but it was
            logged. As far as there are any; they are needed only where a job has such values.
        unverified: why a rank that replays does not begin an iteration earlier than it must, to
            compare all that it loads; "" where it does.
    """

    kind: RankKind
    start: int
    exact_at: int
    pieces: tuple[SnapshotToLoad, ...]
    feeds: tuple[Feed, ...]
    values: tuple[Feed, ...] = ()
    unverified: str = ""

    @property
    def snapshots(self) -> tuple[SnapshotToLoad, ...]:
        """Those of the pieces that are snapshots of its own."""
        match self.kind:
            case RankKind.PARKED:
                return ()
            case RankKind.MOVED | RankKind.COPIED:
                return self.pieces[1:]
            case RankKind.REPLAYS:
                return self.pieces

    @property
    def logs(self) -> dict[int, dict[int, SnapshotToLoad]]:
        """What it is fed, by neighbour and iteration."""
        return {
            f.neighbour: dict(zip(range(f.first, f.end), f.pieces, strict=True)) for f in self.feeds
        }


@dataclass(frozen=True, slots=True)
class LocalizedPlan:
    """Where all ranks are together again, and how each comes there; ``epoch`` and ``moved_bytes``
    as of `RecoveryPlan`.
    """

    resume: int
    epoch: int
    per_rank: Mapping[int, RankPlan]
    reason: str
    moved_bytes: Mapping[int, int]

    @property
    def bases(self) -> dict[int, int]:
        """By rank: its base, the iteration that it runs first."""
        return {rank: plan.start for rank, plan in self.per_rank.items()}

    @property
    def together(self) -> int:
        """The first iteration that every rank runs as it would without a failure; ``resume``, or
        one before it.
        """
        return max(plan.exact_at for plan in self.per_rank.values())


@dataclass(frozen=True, slots=True)
class NotLocalized:
    """Why all ranks should recover together (`ckptd.core.recovery.global_plan.plan_recovery`), and
    the highest epoch seen.
    """

    reason: str
    epoch: int = -1


def plan_localized(
    held: RunHoldings,
    facts: Mapping[int, RankFacts],
    world_size: int,
    *,
    homes: Mapping[int, str] = _NO_HOMES,
    lost: Container[str] = (),
    verify_iterations: int = 0,
) -> LocalizedPlan | NotLocalized:
    """The state nearest to the failure that all ranks can reach, while those who kept theirs run
    nothing again; see the module.

    Args:
        held: what the nodes hold; epochs count as for `ckptd.core.recovery.global_plan.plan_recovery`.
        facts: with whom each rank communicates, told by itself; ranks may be missing.
        homes: the node on which each rank will run; its copies are preferred.
        lost: nodes that do not count.
        verify_iterations: whether (not 0) those who replay begin one iteration earlier where all that takes is held.
    """
    left = held.without(lost)
    known = [in_order(each) for each in (left.snapshots, left.parked, left.logs)]
    epochs = epoch_table((r for each in known for h in each for r in h.records), held.begun)
    epoch = max(epochs, default=-1)
    ranks = RankHoldings(known[0], known[1], known[2], stale_after(epochs), world_size, homes)
    if world_size < 1 or ranks.beyond:
        what = (
            f"there are holdings of {listed('rank', ranks.beyond)}, beyond " if ranks.beyond else ""
        )
        return NotLocalized(f"{what}world size {world_size}", epoch)
    resume = max((t for parks in ranks.parks.values() for t in parks), default=None)
    if resume is None:
        return NotLocalized("no rank was parked", epoch)
    relations = relate(facts, world_size)
    if isinstance(relations, str):
        return NotLocalized(relations, epoch)
    spans = DomainSpans(relations.domains, ranks.groups, resume)
    stands = [_stands(d, relations, ranks, spans) for d in range(len(relations.domains))]
    if not any(stands):
        return NotLocalized("no rank can go on where it was parked: all replay", epoch)
    better = _better_together(ranks, resume, world_size)
    if better is not None:
        return NotLocalized(better, epoch)
    scope = settle(relations, stands, spans, ranks.has_log, resume)
    if isinstance(scope, str):
        return NotLocalized(scope, epoch)
    if all(place.stand is None for place in scope.places):
        return NotLocalized("every rank would replay" + _because(scope), epoch)
    why_not = "" if verify_iterations > 0 else "verify_iterations=0"
    scope = verified(scope, relations, spans, ranks.has_log, why_not)
    return _Assembly(ranks, relations, scope, homes, resume).plan(epoch)


def _stands(
    domain: int, relations: Relations, held: RankHoldings, spans: DomainSpans
) -> list[Stand]:
    """Where all of a domain can go on, newest first."""
    members = relations.domains[domain]
    parks = held.parks
    iterations = {t for rank in members if rank in parks for t in parks[rank]}
    stands = []
    for iteration in sorted(iterations, reverse=True):
        if _superseded(domain, members, iteration, held, spans):
            break  # so are those before
        peers = _peers(members, iteration, relations, held)
        if peers is not None:
            stands.append(Stand(iteration, peers))
    return stands


def _superseded(
    domain: int, members: Sequence[int], iteration: int, held: RankHoldings, spans: DomainSpans
) -> bool:
    """Whether the domain went on from there, and could replay from later on."""
    if not all(held.went_past(rank, iteration) for rank in members):
        return False
    span = spans.newest((domain,), spans.last)
    return span is not None and span[0] > iteration


def _peers(
    members: Sequence[int], iteration: int, relations: Relations, held: RankHoldings
) -> dict[int, int] | None:
    """From whom each member that was not parked there copies; None if one cannot."""
    there = [rank for rank in members if held.goes_on(rank, iteration)]
    going_on = frozenset(there)
    if len(there) == len(members):
        return {}
    peers: dict[int, int] = {}
    for rank in members:
        if rank in going_on:
            continue
        if not there:
            return None
        turn = len(peers) % len(there)  # each peer sends about as much
        in_turn = itertools.chain(there[turn:], there[:turn])
        alike = (other for other in in_turn if relations.alike(rank, other))
        peer = next((other for other in alike if held.fits(rank, other, iteration)), None)
        if peer is None:
            return None
        peers[rank] = peer
    return peers


def _better_together(held: RankHoldings, resume: int, world_size: int) -> str | None:
    """Why the recovery of all ranks together loses less, or does not make anybody run more; None if it does."""
    ranks = range(world_size)
    if not all(held.went_past(rank, resume, or_dense_at=True) for rank in ranks):
        return None  # some rank has neither of what would be needed
    span = newest_span({rank: held.groups(rank) for rank in ranks})
    if span is not None and span[1] > resume:
        return (
            f"all ranks are exact at {span[1]} from snapshots, later than any was parked ({resume})"
        )
    if span is not None and span[0] >= resume:
        return f"every rank has a snapshot of iteration {resume} that is complete by itself: none replays"
    return None


class _Assembly:
    """Makes the plan of what was decided."""

    def __init__(
        self,
        held: RankHoldings,
        relations: Relations,
        scope: RecoveryScope,
        homes: Mapping[int, str],
        resume: int,
    ) -> None:
        self._held, self._relations, self._scope = held, relations, scope
        self._resume = resume
        self._snapshots = Sources(held.snapshots, homes)
        self._parked = Sources(held.parked, homes, beside=self._snapshots)
        self._logs = Sources(held.sent, homes, beside=self._snapshots)
        # Looked at on demand only, so they weigh nothing.
        self._values = Sources(held.sent, homes)
        self._together = max(place.exact_at for place in scope.places)
        self._loggers: dict[int, Sequence[int]] = {}
        self._conflicts: list[str] = []

    def plan(self, epoch: int) -> LocalizedPlan:
        ranks = range(len(self._relations.domain_of))
        per_rank = {rank: self._rank(rank) for rank in ranks}
        moved = {rank: self._snapshots.moved[rank] for rank in ranks}
        return LocalizedPlan(self._resume, epoch, per_rank, self._reason(per_rank), moved)

    def _place(self, rank: int) -> DomainStart:
        return self._scope.places[self._relations.domain_of[rank]]

    def _rank(self, rank: int) -> RankPlan:
        place = self._place(rank)
        kind, pieces = self._state(rank, place)
        feeds = self._feeds(rank)
        values = self._values_of(rank, place, feeds)
        unverified = self._scope.unverified.get(self._relations.domain_of[rank], "")
        return RankPlan(kind, place.start, place.exact_at, pieces, feeds, values, unverified)

    def _state(self, rank: int, place: DomainStart) -> tuple[RankKind, tuple[SnapshotToLoad, ...]]:
        if place.stand is None:
            return RankKind.REPLAYS, self._suffix(rank, place)
        at = place.stand.iteration
        peer = place.stand.peers.get(rank, rank)
        state = self._parked.piece(rank, self._held.parks[peer][at])
        if peer == rank and self._held.stays(rank, at):
            return RankKind.PARKED, (state,)
        moved = peer == rank
        own = self._held.beginning(rank, at) if moved else self._held.snapshot(rank, at)
        assert own is not None, "else it would not stand there"
        kind = RankKind.MOVED if moved else RankKind.COPIED
        return kind, (state, self._snapshots.piece(rank, own))

    def _suffix(self, rank: int, place: DomainStart) -> tuple[SnapshotToLoad, ...]:
        group = best_group(self._held.groups(rank), place.start, place.exact_at)
        wanted = [r.iteration for r in reversed(between(group, place.start, place.exact_at))]
        self._conflicts += [
            f"rank {rank}: {group.conflicts[t]}" for t in wanted if t in group.conflicts
        ]
        return tuple([self._snapshots.piece(rank, group.copies[t]) for t in wanted])

    def _feeds(self, rank: int) -> tuple[Feed, ...]:
        start = self._place(rank).start
        feeds = []
        for neighbour in sorted(self._relations.neighbours[rank]):
            end = min(self._place(neighbour).start, self._resume)
            if start < end:
                logs = self._held.logs(neighbour)
                pieces = [self._logs.piece(rank, logs[t]) for t in range(start, end)]
                feeds.append(Feed(neighbour, start, end, tuple(pieces)))
        return tuple(feeds)

    def _values_of(self, rank: int, place: DomainStart, feeds: Sequence[Feed]) -> tuple[Feed, ...]:
        """A log of each iteration that tells what all ranks computed together, where none is fed."""
        found = []
        for iteration in range(place.exact_at, self._together):
            if any(feed.first <= iteration < feed.end for feed in feeds):
                continue
            near = _outwards(self._loggers_of(iteration), rank)
            tried = itertools.islice(near, _LOGS_TRIED)
            other = next((r for r in tried if self._held.has_log(r, iteration)), None)
            if other is not None:
                piece = self._values.piece(rank, self._held.logs(other)[iteration])
                found.append(Feed(other, iteration, iteration + 1, (piece,)))
        return tuple(found)

    def _loggers_of(self, iteration: int) -> Sequence[int]:
        """The ranks that were through with an iteration, which others run again; where they are not
        known, all.
        """
        if iteration not in self._loggers:
            ranks = range(len(self._relations.domain_of))
            later = [rank for rank in ranks if self._place(rank).start > iteration]
            self._loggers[iteration] = later or ranks
        return self._loggers[iteration]

    def _reason(self, per_rank: Mapping[int, RankPlan]) -> str:
        ways: dict[tuple[RankKind, int, int], list[int]] = {}
        for rank, plan in per_rank.items():
            ways.setdefault((plan.kind, plan.start, plan.exact_at), []).append(rank)
        texts = [_way(*way, ranks) for way, ranks in sorted(ways.items())]
        text = f"all ranks run together again from iteration {self._resume}: {', '.join(texts)}"
        if len(self._relations.untold) > 1:
            untold = listed("rank", self._relations.untold)
            text += f"; {untold} told nothing, and start together to be safe"
        text += _because(self._scope) + self._snapshots.moves()
        return text + told(self._conflicts)


def _outwards(ranks: Sequence[int], middle: int) -> Iterator[int]:
    """Ascending ranks, those near to ``middle`` first."""
    right = bisect_left(ranks, middle)
    left = right - 1
    while left >= 0 or right < len(ranks):
        nearer = left < 0 or (right < len(ranks) and ranks[right] - middle <= middle - ranks[left])
        yield ranks[right if nearer else left]
        left, right = (left, right + 1) if nearer else (left - 1, right)


def _way(kind: RankKind, start: int, exact_at: int, ranks: Sequence[int]) -> str:
    who = listed("rank", ranks)
    match kind:
        case RankKind.PARKED:
            return f"{who} parked at {start}"
        case RankKind.MOVED:
            return f"{who} parked at {start} on another node"
        case RankKind.COPIED:
            return f"{who} with a peer's state of {start}"
        case RankKind.REPLAYS:
            return f"{who} replaying from {start}, exact at {exact_at}"


def _because(scope: RecoveryScope) -> str:
    found = [lacking(scope.widened[domain]) for domain in sorted(scope.widened)]
    text = "".join(f"; {each}" for each in found[:_WIDENINGS_TOLD])
    more = len(found) - _WIDENINGS_TOLD
    return text + (f"; and {more} more of this kind" if more > 0 else "")
