"""The scope of a localized recovery: which ranks resume from a parked state, and which replay. Pure.

The unit is the *domain*, whose members start at the same iteration. A domain **stands** at an iteration at
which each of its members has a parked state, or can copy that of a peer. A domain that stands nowhere
**replays**; adjacent domains that replay start at the same iteration. Before the iteration *resume* each
domain runs isolated: in iteration i a rank communicates with the neighbours that have started by then, and
reads the logs of the others.

Every domain starts as late as possible. That may need a log that no node holds: rank r runs iteration i,
its neighbour n would start later, and n's log of i is missing. Since r cannot start later, n must start
at i or before in every plan: its domain gets a *limit*. Limits only fall, so the search ends, and its
result has the latest possible start of every domain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ckptd.core.recovery.recovery_facts import Relations
from ckptd.core.recovery.snapshot_tables import Group, best_group, between, common, covering_starts, listed

# The snapshots of a rank, by operator table.
GroupsOf = Callable[[int], Sequence[Group]]
# Whether a node holds a rank's log of an iteration.
HasLog = Callable[[int, int], bool]


@dataclass(frozen=True, slots=True)
class Stand:
    """An iteration at which all ranks of a domain can resume; ``peers`` maps each member without a parked
    state to the rank whose state it copies.
    """

    iteration: int
    peers: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class DomainStart:
    """The start of a domain, and the iteration from which it is dense and exact; ``stand`` is None if
    the domain replays.
    """

    start: int
    exact_at: int
    stand: Stand | None


@dataclass(frozen=True, slots=True)
class Widening:
    """The reason for an earlier start of a domain: ``reader`` needs the log of ``sender`` of
    ``iteration``, and no node holds it.
    """

    reader: int
    sender: int
    iteration: int


@dataclass(frozen=True, slots=True)
class RecoveryScope:
    """The start of each domain; by domain, the last reason for an earlier start, and the reason why the
    values that it loads are not all verified.
    """

    places: Sequence[DomainStart]
    widened: Mapping[int, Widening]
    unverified: Mapping[int, str] = field(default_factory=dict)


def settle(
    relations: Relations,
    stands: Sequence[Sequence[Stand]],
    spans: DomainSpans,
    has_log: HasLog,
    resume: int,
) -> RecoveryScope | str:
    """The latest possible start of every domain, or the reason why some domain cannot start.

    Args:
        stands: the stands of each domain, newest first; none after ``resume``.
        spans: the spans that domains can replay, up to ``resume``.
    """
    return _Settling(relations, stands, spans, has_log, resume).run()


def verified(
    scope: RecoveryScope,
    relations: Relations,
    spans: DomainSpans,
    has_log: HasLog,
    why_not: str = "",
) -> RecoveryScope:
    """The same scope, with a start one iteration earlier for domains that replay, so that the values of
    their first snapshot are verified.

    Only if it costs no other domain anything: the previous snapshot exists, and nodes hold every log
    of that iteration that they need.

    Args:
        why_not: the reason why verification is not wanted; it then applies to all domains.
    """
    places, unverified = list(scope.places), dict[int, str]()
    done: set[int] = set()
    for first, place in enumerate(scope.places):
        if place.stand is not None or first in done:
            continue
        component = _component(relations, first, lambda domain: scope.places[domain].stand is None)
        done.update(component)
        lack = why_not or _lack_before(place, component, scope, relations, spans, has_log)
        for domain in component:
            if lack:
                unverified[domain] = lack
            else:
                places[domain] = DomainStart(place.start - 1, place.exact_at, None)
    return RecoveryScope(places, scope.widened, unverified)


def _component(relations: Relations, domain: int, replays: Callable[[int], bool]) -> list[int]:
    """The domains that replay together with this one: all that domains that replay connect with it."""
    found, left = {domain: None}, [domain]
    while left:
        for other in relations.adjacent(left.pop()):
            if other not in found and replays(other):
                found[other] = None
                left.append(other)
    return list(found)


def _lack_before(
    place: DomainStart,
    component: Sequence[int],
    scope: RecoveryScope,
    relations: Relations,
    spans: DomainSpans,
    has_log: HasLog,
) -> str:
    """The reason why these domains cannot start one iteration before ``place``; "" if they can."""
    before = place.start - 1
    if not spans.fit(component, before, place.exact_at):
        what = f"no snapshots of iteration {before} that lead to those of {place.start}"
        return f"the ranks that replay have {what}"
    for domain in component:
        for rank in relations.domains[domain]:
            for other in relations.neighbours[rank]:
                theirs = scope.places[relations.domain_of[other]]
                if theirs.stand is not None and theirs.start > before and not has_log(other, before):
                    return lacking(Widening(rank, other, before))
    return ""


class DomainSpans:
    """The spans that domains can replay together, exact at an iteration that is not after ``last``.

    Like `ckptd.core.recovery.snapshot_tables.newest_span`, except that the newest start, which needs the
    least replay, precedes the newest end, because all run on to a common iteration anyway.
    """

    def __init__(self, domains: Sequence[Sequence[int]], groups_of: GroupsOf, last: int) -> None:
        self._domains, self._groups_of, self.last = domains, groups_of, last
        self._starts: dict[tuple[int, int], frozenset[int]] = {}
        self._ends: dict[int, frozenset[int]] = {}
        self._phases: dict[tuple[int, int, int], Mapping[int, int] | None] = {}

    def newest(self, domains: Iterable[int], limit: int) -> tuple[int, int] | None:
        """The common (start, end) of these domains with the newest start that is not after ``limit``."""
        members = sorted(domains)
        best: tuple[int, int] | None = None
        for end in sorted(frozenset.intersection(*map(self._ends_of, members)), reverse=True):
            if best is not None and end <= best[0]:
                break  # nothing that ends here starts later
            starts = frozenset.intersection(*(self._starts_of(d, end) for d in members))
            start = max((start for start in starts if start <= limit), default=None)
            if start is None or (best is not None and start <= best[0]):
                continue
            if self._in_phase(members, start, end):
                best = start, end
        return best

    def fit(self, domains: Iterable[int], start: int, end: int) -> bool:
        """Whether these domains can replay together from ``start`` to ``end``."""
        members = sorted(domains)
        starts = all(start in self._starts_of(domain, end) for domain in members)
        return starts and self._in_phase(members, start, end)

    def _ends_of(self, domain: int) -> frozenset[int]:
        if domain not in self._ends:
            each = (
                {t for group in self._groups_of(rank) for t in group.newest if t <= self.last}
                for rank in self._domains[domain]
            )
            self._ends[domain] = common(each)
        return self._ends[domain]

    def _starts_of(self, domain: int, end: int) -> frozenset[int]:
        if (domain, end) not in self._starts:
            each = (
                set[int]().union(*(covering_starts(g, end) for g in self._groups_of(rank)))
                for rank in self._domains[domain]
            )
            self._starts[domain, end] = common(each)
        return self._starts[domain, end]

    def _in_phase(self, domains: Sequence[int], start: int, end: int) -> bool:
        phases: dict[int, int] = {}
        for domain in domains:
            mine = self._phases_of(domain, start, end)
            if mine is None or any(phases.setdefault(t, p) != p for t, p in mine.items()):
                return False
        return True

    def _phases_of(self, domain: int, start: int, end: int) -> Mapping[int, int] | None:
        """The phases of a domain by iteration; None if its members were in different phases."""
        key = (domain, start, end)
        if key not in self._phases:
            phases: dict[int, int] = {}
            equal = all(
                phases.setdefault(record.iteration, record.phase) == record.phase
                for rank in self._domains[domain]
                for record in between(best_group(self._groups_of(rank), start, end), start, end)
            )
            self._phases[key] = phases if equal else None
        return self._phases[key]


class _Settling:
    """One search. ``_limits`` only fall, and a domain that replays continues to replay."""

    def __init__(
        self,
        relations: Relations,
        stands: Sequence[Sequence[Stand]],
        spans: DomainSpans,
        has_log: HasLog,
        resume: int,
    ) -> None:
        self._relations, self._stands, self._spans = relations, stands, spans
        self._has_log, self._resume = has_log, resume
        count = len(relations.domains)
        self._limits = [resume] * count
        self._places: list[DomainStart | None] = [None] * count
        self._widened: dict[int, Widening] = {}
        self._spans_of: dict[frozenset[int], tuple[int, DomainStart]] = {}  # with the limit it is for

    def run(self) -> RecoveryScope | str:
        changed = set(range(len(self._places)))
        while changed:
            moved = self._place(changed)
            if isinstance(moved, str):
                return moved
            changed = self._widen(moved)
        places = [place for place in self._places if place is not None]
        assert len(places) == len(self._places)
        return RecoveryScope(places, self._widened)

    def _place(self, changed: Iterable[int]) -> set[int] | str:
        """Give these domains, and those that replay with them, a start; returns those whose start changed."""
        moved = set()
        for domain in changed:
            stands = (s for s in self._stands[domain] if s.iteration <= self._limits[domain])
            stand = next(stands, None)
            place = None if stand is None else DomainStart(stand.iteration, stand.iteration, stand)
            if place != self._places[domain]:
                self._places[domain] = place  # None: it replays
                moved.add(domain)
        seen: set[int] = set()
        for domain in [d for d in changed if self._places[d] is None]:
            if domain in seen:
                continue
            component = frozenset(_component(self._relations, domain, self._replays))
            seen |= component
            place = self._replayed(component)
            if place is None:
                return self._cannot_replay(component)
            for each in component:
                if self._places[each] != place:
                    self._places[each] = place
                    moved.add(each)
        return moved

    def _replays(self, domain: int) -> bool:
        place = self._places[domain]
        return place is None or place.stand is None

    def _replayed(self, component: frozenset[int]) -> DomainStart | None:
        limit = min(self._limits[domain] for domain in component)
        known = self._spans_of.get(component)
        if known is not None and known[0] == limit:
            return known[1]
        span = self._spans.newest(component, limit)
        if span is None:
            return None
        place = DomainStart(*span, None)
        self._spans_of[component] = limit, place
        return place

    def _cannot_replay(self, component: Iterable[int]) -> str:
        members = sorted(rank for d in component for rank in self._relations.domains[d])
        limited = min(component, key=lambda d: (self._limits[d], d))
        text = (
            f"{listed('rank', members)} must replay, but have no complete suffix in common "
            f"that starts at {self._limits[limited]} or before and ends at {self._resume} or before"
        )
        if limited in self._widened:
            text += f" ({lacking(self._widened[limited])})"
        return text

    def _widen(self, moved: Iterable[int]) -> set[int]:
        """Limit the domains whose logs do not contain what a moved domain needs.

        A domain moves to an earlier start: the readers of its logs need no more of them than before.
        """
        limited = set()
        for domain in moved:
            for rank in self._relations.domains[domain]:
                for other in self._relations.neighbours[rank]:
                    widening = self._lacking(rank, other)
                    if widening is not None and self._limit(widening):
                        limited.add(self._relations.domain_of[other])
        return limited

    def _lacking(self, reader: int, sender: int) -> Widening | None:
        """The first iteration of ``sender`` that ``reader`` needs and of which no node holds the log."""
        for iteration in range(self._start(reader), min(self._start(sender), self._resume)):
            if not self._has_log(sender, iteration):
                return Widening(reader, sender, iteration)
        return None

    def _start(self, rank: int) -> int:
        place = self._places[self._relations.domain_of[rank]]
        assert place is not None
        return place.start

    def _limit(self, widening: Widening) -> bool:
        domain = self._relations.domain_of[widening.sender]
        if widening.iteration >= self._limits[domain]:
            return False
        self._limits[domain] = widening.iteration
        self._widened[domain] = widening
        return True


def lacking(widening: Widening) -> str:
    """A widening as text."""
    return (
        f"rank {widening.reader} needs the log of rank {widening.sender} of iteration "
        f"{widening.iteration}, which no node holds"
    )
