"""Localized recovery: only the ranks that lost their state replay. One pure function.

Survivors of a failure *park*: their nodes' memory holds their state before the interrupted step. All
ranks run together again from the newest iteration at which any rank was parked (``resume``). Until then
each rank runs *isolated*, from its own start:

* **parked**: it resumes where it was parked. Stages of a pipeline end their steps at different times,
  so some are parked one step before ``resume``; they run that step again.
* **moved**: it was parked on another node than the one on which it runs now. Its state is fetched, and
  one of its snapshots, with which its ring begins there.
* **copied**: its peers, whose operators all equal its own, were parked. It takes its tensors from one
  of them, and the rest from its own snapshot of that iteration.
* **replays**: it starts at a suffix of snapshots, as in a global recovery
  (`ckptd.core.recovery.global_plan`).

In iteration i a rank exchanges boundaries with the neighbours that have started by then. For the others
it reads their logs of i. If a log is missing, its sender starts earlier (`ckptd.core.recovery.scope`).

`ckptd.core.recovery.global_plan` defines the snapshots that count; parked states follow the same rules. A
recovery at e outdates logs of iterations from e on, but snapshots only after e, because the tensors sent
in step e follow the state before it. A parked state does not count if its domain could replay from a
later iteration: its ranks continued after it.

No localized plan is made if it would not be better than the global recovery.
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
    conflicts_text,
    in_order,
    listed,
)
from ckptd.core.slots.ring import epoch_table, stale_after

__all__ = ["Feed", "LocalizedPlan", "NotLocalized", "RankKind", "RankPlan", "plan_localized"]

_NO_HOMES: Mapping[int, str] = MappingProxyType({})
_MOST_WIDENINGS = 3
_LOGS_TRIED = 8


class RankKind(StrEnum):
    """The source of a rank's state."""

    PARKED = "parked"
    MOVED = "moved"
    COPIED = "copied"
    REPLAYS = "replays"


class Feed(msgspec.Struct, frozen=True, gc=False):
    """The logs of the tensors that ``neighbour`` sent from iteration ``first`` to before ``end``: one per
    iteration, in order.
    """

    neighbour: int
    first: int
    end: int
    pieces: tuple[SnapshotToLoad, ...]


class RankPlan(msgspec.Struct, frozen=True, gc=False):
    """The path of one rank to the iteration from which all ranks run together.

    Args:
        start: its base, the first iteration that it runs; it runs isolated until ``LocalizedPlan.resume``.
        exact_at: the first iteration in which it is dense.
        pieces: parked: its parked state; moved: its parked state, and its newest snapshot that is
            not after it; copied: the peer's parked state, its own snapshot; replays: its snapshots
            from ``start`` to ``exact_at``.
        feeds: logs of the neighbours that start later, in ascending order.
        values: logs of iterations before ``LocalizedPlan.together`` in which it is exact and no
            neighbour feeds it. The values that all ranks compute together cannot be computed there, but
            they were logged. Empty if no log exists; needed only if a job has such values.
        unverified: the reason why a rank that replays does not start one iteration earlier to verify
            all values that it loads; "" if it does.
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
        """The pieces that are snapshots of this rank."""
        match self.kind:
            case RankKind.PARKED:
                return ()
            case RankKind.MOVED | RankKind.COPIED:
                return self.pieces[1:]
            case RankKind.REPLAYS:
                return self.pieces

    @property
    def logs(self) -> dict[int, dict[int, SnapshotToLoad]]:
        """The logs that feed it, by neighbour and iteration."""
        return {f.neighbour: dict(zip(range(f.first, f.end), f.pieces, strict=True)) for f in self.feeds}


@dataclass(frozen=True, slots=True)
class LocalizedPlan:
    """The iteration from which all ranks run together, and the path of each; ``epoch`` and ``moved_bytes``
    as in `RecoveryPlan`.
    """

    resume: int
    epoch: int
    per_rank: Mapping[int, RankPlan]
    reason: str
    moved_bytes: Mapping[int, int]

    @property
    def bases(self) -> dict[int, int]:
        """The base of each rank: the first iteration that it runs."""
        return {rank: plan.start for rank, plan in self.per_rank.items()}

    @property
    def together(self) -> int:
        """The first iteration that every rank runs as it would without a failure: ``resume``, or
        one before it.
        """
        return max(plan.exact_at for plan in self.per_rank.values())


@dataclass(frozen=True, slots=True)
class NotLocalized:
    """The reason why the recovery must be global (`ckptd.core.recovery.global_plan.plan_recovery`), and
    the highest known epoch.
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
    """Plan a recovery to the newest state that all ranks can reach, without replay on the ranks that kept
    their state; see the module.

    Args:
        held: the inventories of the nodes; epochs count as for
            `ckptd.core.recovery.global_plan.plan_recovery`.
        facts: each rank's own report of the ranks with which it communicates; ranks may be missing.
        homes: the node on which each rank will run; its copies are preferred.
        lost: nodes whose inventories do not count.
        verify_iterations: if not 0, ranks that replay start one iteration earlier, if all its
            snapshots and logs exist.
    """
    left = held.without(lost)
    known = [in_order(each) for each in (left.snapshots, left.parked, left.logs)]
    epochs = epoch_table((r for each in known for h in each for r in h.records), held.begun)
    epoch = max(epochs, default=-1)
    ranks = RankHoldings(known[0], known[1], known[2], stale_after(epochs), world_size, homes)
    if world_size < 1 or ranks.beyond:
        what = f"nodes hold state of {listed('rank', ranks.beyond)}, beyond " if ranks.beyond else ""
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
        return NotLocalized("no rank can resume where it was parked: all would replay", epoch)
    better = _global_is_better(ranks, resume, world_size)
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


def _stands(domain: int, relations: Relations, held: RankHoldings, spans: DomainSpans) -> list[Stand]:
    """The iterations at which all ranks of a domain can resume, newest first."""
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
    """Whether the domain continued after this iteration, and could replay from a later one."""
    if not all(held.went_past(rank, iteration) for rank in members):
        return False
    span = spans.newest((domain,), spans.last)
    return span is not None and span[0] > iteration


def _peers(
    members: Sequence[int], iteration: int, relations: Relations, held: RankHoldings
) -> dict[int, int] | None:
    """The peer from which each member without a parked state copies; None if a member has none."""
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
        equals = (other for other in in_turn if relations.have_same_operators(rank, other))
        peer = next((other for other in equals if held.fits(rank, other, iteration)), None)
        if peer is None:
            return None
        peers[rank] = peer
    return peers


def _global_is_better(held: RankHoldings, resume: int, world_size: int) -> str | None:
    """The reason why the global recovery loses no more and makes no rank run more; None if it does."""
    ranks = range(world_size)
    if not all(held.went_past(rank, resume, or_dense_at=True) for rank in ranks):
        return None  # some rank has neither a snapshot nor a parked state
    span = newest_span({rank: held.groups(rank) for rank in ranks})
    if span is not None and span[1] > resume:
        return f"snapshots make all ranks exact at {span[1]}, later than the newest parked state ({resume})"
    if span is not None and span[0] >= resume:
        return f"every rank has a complete snapshot of iteration {resume}: none replays"
    return None


class _Assembly:
    """Builds the plan from the chosen starts."""

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
        self._parked = Sources(held.parked, homes, shared_load=self._snapshots)
        self._logs = Sources(held.sent, homes, shared_load=self._snapshots)
        # Read only on demand, so they do not count in the load of a node.
        self._values = Sources(held.sent, homes)
        self._all_exact_at = max(place.exact_at for place in scope.places)
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
        state = self._parked.ordered(rank, self._held.parks[peer][at])
        if peer == rank and self._held.stays(rank, at):
            return RankKind.PARKED, (state,)
        moved = peer == rank
        own = self._held.beginning(rank, at) if moved else self._held.snapshot(rank, at)
        assert own is not None, "else it would not stand there"
        kind = RankKind.MOVED if moved else RankKind.COPIED
        return kind, (state, self._snapshots.ordered(rank, own))

    def _suffix(self, rank: int, place: DomainStart) -> tuple[SnapshotToLoad, ...]:
        group = best_group(self._held.groups(rank), place.start, place.exact_at)
        wanted = [r.iteration for r in reversed(between(group, place.start, place.exact_at))]
        self._conflicts += [f"rank {rank}: {group.conflicts[t]}" for t in wanted if t in group.conflicts]
        return tuple([self._snapshots.ordered(rank, group.copies[t]) for t in wanted])

    def _feeds(self, rank: int) -> tuple[Feed, ...]:
        start = self._place(rank).start
        feeds = []
        for neighbour in sorted(self._relations.neighbours[rank]):
            end = min(self._place(neighbour).start, self._resume)
            if start < end:
                logs = self._held.logs(neighbour)
                pieces = [self._logs.ordered(rank, logs[t]) for t in range(start, end)]
                feeds.append(Feed(neighbour, start, end, tuple(pieces)))
        return tuple(feeds)

    def _values_of(self, rank: int, place: DomainStart, feeds: Sequence[Feed]) -> tuple[Feed, ...]:
        """A log of each iteration with the values that all ranks computed together, if no log feeds
        the rank.
        """
        found = []
        for iteration in range(place.exact_at, self._all_exact_at):
            if any(feed.first <= iteration < feed.end for feed in feeds):
                continue
            near = _outwards(self._loggers_of(iteration), rank)
            tried = itertools.islice(near, _LOGS_TRIED)
            other = next((r for r in tried if self._held.has_log(r, iteration)), None)
            if other is not None:
                piece = self._values.ordered(rank, self._held.logs(other)[iteration])
                found.append(Feed(other, iteration, iteration + 1, (piece,)))
        return tuple(found)

    def _loggers_of(self, iteration: int) -> Sequence[int]:
        """The ranks that had completed an iteration that others run again; all ranks if they are not
        known.
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
        if len(self._relations.unreported) > 1:
            unreported = listed("rank", self._relations.unreported)
            text += f"; {unreported} reported no facts, and start together to be safe"
        text += _because(self._scope) + self._snapshots.moves()
        return text + conflicts_text(self._conflicts)


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
    text = "".join(f"; {each}" for each in found[:_MOST_WIDENINGS])
    more = len(found) - _MOST_WIDENINGS
    return text + (f"; and {more} more of this kind" if more > 0 else "")
