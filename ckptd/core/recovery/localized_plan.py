"""Localized recovery: only the ranks that lost their state replay. One pure function.

Survivors of a failure *park*: their nodes' memory holds their state before the interrupted step. All ranks
run together again from the newest iteration at which any rank was parked (``resume``). Until then each rank
runs *isolated*, from its own start:

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
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

import msgspec

from ckptd.core.recovery.held import HeldRecords, RunHoldings
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
from ckptd.core.recovery.snapshot_tables import (
    Copy,
    Group,
    Known,
    SnapshotToLoad,
    Sources,
    best_group,
    between,
    conflicts_text,
    groups_of,
    in_order,
    listed,
    newest_span,
    nodes_of,
    numbers_by_rank,
    record_of,
    whole_images,
)
from ckptd.core.slots.slots import epoch_table, stale_after

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
        start: its base, the first iteration that it runs; isolated until ``LocalizedPlan.resume``.
        exact_at: the first iteration in which it is dense.
        pieces: parked: its parked state; moved: its parked state, and its newest snapshot that is not after
            it; copied: the peer's parked state, its own snapshot; replays: its snapshots from ``start`` to
            ``exact_at``.
        feeds: logs of the neighbours that start later, in ascending order.
        values: logs of iterations before ``LocalizedPlan.together`` in which it is exact and no neighbour
            feeds it. Values that all ranks compute together cannot be computed there, but were logged. Empty
            if no log exists; needed only if a job has such values.
        unverified: why a rank that replays does not start one iteration earlier to verify all values that it
            loads; "" if it does.
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
    """Plan a recovery to the newest state that all ranks can reach, with replay only on ranks without state.

    Args:
        held: the inventories of the nodes; epochs count as for `plan_recovery`.
        facts: each rank's report of the ranks with which it communicates; ranks may be missing.
        homes: the node on which each rank will run; its copies are preferred.
        lost: nodes whose inventories do not count.
        verify_iterations: if not 0, ranks that replay start one iteration earlier, if its snapshots and logs
            exist.
    """
    left = held.without(lost)
    known = [in_order(each) for each in (left.snapshots, left.parked, left.logs)]
    epochs = epoch_table((r for each in known for h in each for r in h.records), held.begun)
    epoch = max(epochs, default=-1)
    ranks = _RankInventory(known[0], known[1], known[2], stale_after(epochs), world_size, homes)
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
    return _Assembly(ranks, relations, scope, resume).plan(epoch)


def _stands(domain: int, relations: Relations, held: _RankInventory, spans: DomainSpans) -> list[Stand]:
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
    domain: int, members: Sequence[int], iteration: int, held: _RankInventory, spans: DomainSpans
) -> bool:
    """Whether the domain continued after this iteration, and could replay from a later one."""
    if not all(held.went_past(rank, iteration) for rank in members):
        return False
    span = spans.newest((domain,), spans.last)
    return span is not None and span[0] > iteration


def _peers(
    members: Sequence[int], iteration: int, relations: Relations, held: _RankInventory
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


def _global_is_better(held: _RankInventory, resume: int, world_size: int) -> str | None:
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


class _RankInventory:
    """The parked states, snapshots and logs of each rank that count; merged on first use."""

    def __init__(
        self,
        snapshots: Known,
        parked: Known,
        logs: Known,
        limits: Mapping[int, int],
        world_size: int,
        homes: Mapping[int, str],
    ) -> None:
        self.homes = homes
        self.snapshots, self.parked, self.sent = snapshots, parked, logs
        self._limits = limits
        # The tensors sent in a step follow the state before it.
        self._log_limits = {epoch: last - 1 for epoch, last in limits.items()}
        self._snapshots_of, self._logs_of = numbers_by_rank(snapshots), numbers_by_rank(logs)
        self._groups: dict[int, Sequence[Group]] = {}
        self._logs: dict[int, dict[int, tuple[Copy, ...]]] = {}
        self.parks = {
            rank: parks
            for rank, numbers in numbers_by_rank(parked).items()
            if (parks := self._parks(numbers))
        }
        ranks = {*self._snapshots_of, *self._logs_of, *self.parks}
        self.beyond = sorted(rank for rank in ranks if not 0 <= rank < world_size)

    def groups(self, rank: int) -> Sequence[Group]:
        """The snapshots of a rank, by operator table."""
        if rank not in self._groups:
            numbers = self._snapshots_of.get(rank, ())
            self._groups[rank] = groups_of(numbers, self.snapshots, self._limits)
        return self._groups[rank]

    def snapshot(self, rank: int, iteration: int) -> tuple[Copy, ...] | None:
        """The copies of a rank's snapshot of an iteration."""
        found = [g for g in self.groups(rank) if iteration in g.newest]
        if not found:
            return None
        newest = max(found, key=lambda g: (g.newest[iteration].epoch, g.newest[iteration].sequence))
        return newest.copies[iteration]

    def fits(self, rank: int, peer: int, iteration: int) -> bool:
        """Whether a peer's parked state completes the rank's snapshot: they have the same operator table."""
        own = self.snapshot(rank, iteration)
        return own is not None and _table_of(self.snapshots[own[0][0]]) == self._parked_table(peer, iteration)

    def stays(self, rank: int, iteration: int) -> bool:
        """Whether the rank was parked on the node on which it will run, as far as that is known."""
        home = self.homes.get(rank)
        return home is None or home in nodes_of(self.parks[rank][iteration], self.parked)

    def goes_on(self, rank: int, iteration: int) -> bool:
        """Whether the rank was parked, and its ring exists or can begin with a snapshot."""
        if iteration not in self.parks.get(rank, ()):
            return False
        return self.stays(rank, iteration) or self.beginning(rank, iteration) is not None

    def beginning(self, rank: int, iteration: int) -> tuple[Copy, ...] | None:
        """Copies of the rank's newest snapshot up to an iteration, with the operators of its parked state."""
        table = self._parked_table(rank, iteration)
        found = (
            (t, group.copies[t])
            for group in self.groups(rank)
            for t in group.newest
            if t <= iteration and _table_of(self.snapshots[group.copies[t][0][0]]) == table
        )
        return max(found, default=(-1, None))[1]

    def _parked_table(self, rank: int, iteration: int) -> tuple[int, str]:
        return _table_of(self.parked[self.parks[rank][iteration][0][0]])

    def logs(self, rank: int) -> Mapping[int, tuple[Copy, ...]]:
        """The complete logs of a rank that count, by iteration."""
        if rank not in self._logs:
            numbers = self._logs_of.get(rank, ())
            self._logs[rank] = whole_images(numbers, self.sent, self._log_limits)
        return self._logs[rank]

    def has_log(self, rank: int, iteration: int) -> bool:
        """Whether a node holds the rank's log of an iteration."""
        return iteration in self.logs(rank)

    def went_past(self, rank: int, iteration: int, *, or_dense_at: bool = False) -> bool:
        """Whether the rank may have a snapshot after an iteration, or one of it that anchors all operators.

        A fast check that counts stale snapshots, too.
        """
        for number in self._snapshots_of.get(rank, ()):
            h = self.snapshots[number]
            everything = (1 << h.num_operators) - 1
            for r in h.records:
                if r.iteration < iteration or not r.sealed:
                    continue
                if r.iteration > iteration or (or_dense_at and r.anchors & everything == everything):
                    return True
        return False

    def _parks(self, numbers: Iterable[int]) -> dict[int, tuple[Copy, ...]]:
        """The parked states of a rank by iteration; each is complete by itself."""
        images = whole_images(numbers, self.parked, self._limits)
        return {t: copies for t, copies in images.items() if self._anchors_all(copies[0])}

    def _anchors_all(self, copy: Copy) -> bool:
        everything = (1 << self.parked[copy[0]].num_operators) - 1
        return record_of(copy, self.parked).anchors & everything == everything


def _table_of(held: HeldRecords) -> tuple[int, str]:
    """The operator table of its records."""
    return held.num_operators, held.operators_id


class _Assembly:
    """Builds the plan from the chosen starts."""

    def __init__(
        self,
        held: _RankInventory,
        relations: Relations,
        scope: RecoveryScope,
        resume: int,
    ) -> None:
        self._held, self._relations, self._scope = held, relations, scope
        self._resume = resume
        self._snapshots = Sources(held.snapshots, held.homes)
        self._parked = Sources(held.parked, held.homes, shared_load=self._snapshots)
        self._logs = Sources(held.sent, held.homes, shared_load=self._snapshots)
        # Read only on demand, so they do not count in the load of a node.
        self._values = Sources(held.sent, held.homes)
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
        """A log of each iteration with the values that all ranks computed together, if no log feeds it."""
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
        """The ranks that had completed an iteration that others run again; all if they are not known."""
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
