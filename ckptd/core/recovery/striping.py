"""Striped transfer of one image from several holders at once. Pure.

The image is cut into parts. Every holder has a few requests in flight; a holder that finishes takes the next
part, so fast holders deliver more without any measurement. A part that fails returns to the front of the
queue. A holder without work takes over a part that another one has been transferring for too long (the shell
cancels that transfer first).

When all parts have arrived, the image is verified, and the shell passes all wrong ranges to `blame`.
It cuts the parts at the edges of those ranges; correct bytes stay. Each wrong part is requested from
another holder, never again from one that delivered it wrong; that holder remains usable for other parts.
So copies with different damage form one whole image.

A wrong range in several parts (a large tensor) has one digest, which does not show which part is wrong. When
every holder has been tried for one of the parts, `next_mix` chooses the holder of each part, each combination
once, up to a limit. If each part is right at some holder, some combination is right. Likely ones come first:
all parts from one holder; all but one part from one holder, which repairs a copy with one flipped bit; and so
on.

The bytes of a part that was taken over may come from the cancelled transfer, which finished last. In
this case no holder is blamed, once.

The search terminates: cuts are only at edges of ranges, so the number of parts is finite. A holder that
delivered a part wrong is not asked for it again except in combinations, of which each range has at most
`MIXES`, each once. So `blame` is called finitely often before the image is correct or no holder is left.
An image is accepted only if it verifies.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Container, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

PART_BYTES = 8 << 20
_IN_FLIGHT = 2  # per holder: the next request is on its way while one is served
_SLOW_FACTOR = 4.0
_SLOW_S = 1.0
_FIRST_S = 3.0  # the same before any part has arrived, when no usual time is known
_FAILURES = 3  # consecutive failures of one holder, after which it is not asked again
# Verifications with wrong bytes of one holder, after which it is asked only for parts that no other
# holder can deliver. Two find all flipped bits, those of the header first; a third suggests memory that
# changes while it is read, and each costs a pass over the image. Dropping the holder completely could
# lose the only copy of some bytes, and is not needed for termination.
_WRONG_TIMES = 3

Holder = TypeVar("Holder", bound=Hashable)  # identifies one copy of the image
Span = tuple[int, int]  # bytes [start, stop) of the image


@dataclass(frozen=True, slots=True)
class ImagePart:
    """Bytes ``[start, stop)`` of the image; ``index`` identifies the part, and is not its position."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Pull(Generic[Holder]):
    """Effect: fetch this part from this holder."""

    holder: Holder
    part: ImagePart


@dataclass(frozen=True, slots=True)
class Cancel(Generic[Holder]):
    """Effect: another holder takes this part over; end this transfer first."""

    holder: Holder
    part: ImagePart


@dataclass(slots=True)
class _Work:
    in_flight: dict[int, float] = field(default_factory=dict)  # part -> since when
    failures: int = 0
    lost: bool = False
    delivered_bytes: int = 0
    times_wrong: int = 0


@dataclass(slots=True, eq=False)
class _State(Generic[Holder]):
    """One part: the holder that delivered it, and those that cannot.

    ``wrong`` holders delivered wrong bytes; ``cannot`` holders reported that they cannot deliver it;
    ``only``, if not None, is the holder that the current combination chooses.
    """

    part: ImagePart
    by: Holder | None = None
    wrong: set[Holder] = field(default_factory=set)
    cannot: set[Holder] = field(default_factory=set)
    only: Holder | None = None
    span: Span | None = None  # the wrong range whose parts are combined, if every holder has been tried
    taken_over: int = 0
    excused: bool = False  # it was wrong after it was taken over: the source of the bytes is not known


class Stripes(Generic[Holder]):
    """The parts of one image.

    Args:
        holders: the preferred one first.
        part_bytes: size of every part except the last.
    """

    def __init__(self, size_bytes: int, holders: Sequence[Holder], *, part_bytes: int = PART_BYTES) -> None:
        self._numbers = itertools.count()
        self._states: dict[int, _State[Holder]] = {}
        for start in range(0, max(size_bytes, 1), part_bytes):
            self._new(start, min(start + part_bytes, size_bytes))
        self._order = list(self._states.values())  # by position
        self._todo = deque(self._states)
        self._missing = len(self._states)
        self._stuck: list[_State[Holder]] = []  # missing, and no holder may be asked
        self._tried: dict[Span, set[tuple[Holder, ...]]] = {}
        self._holders = {name: _Work() for name in holders}
        self._durations: deque[float] = deque(maxlen=32)
        self._look_for_stuck()

    @property
    def parts(self) -> list[ImagePart]:
        """All parts by position; `blame` creates new ones."""
        return [state.part for state in self._order]

    @property
    def complete(self) -> bool:
        """Whether every part has been delivered."""
        return self._missing == 0

    @property
    def failed(self) -> bool:
        """Whether no remaining holder can deliver some missing part."""
        return bool(self.hopeless())

    @property
    def bytes_by_holder(self) -> dict[Holder, int]:
        """The bytes that each holder has delivered, without wrong ones."""
        return {name: h.delivered_bytes for name, h in self._holders.items()}

    def holders_left(self) -> list[Holder]:
        return [name for name, holder in self._holders.items() if not holder.lost]

    def hopeless(self) -> list[ImagePart]:
        """The parts that no remaining holder can deliver."""
        spans = {state.span for state in self._stuck if state.span is not None}
        over = {None, *(span for span in spans if self._next_mix(span) is None)}
        return [state.part for state in self._stuck if state.span in over]

    def add_holder(self, holder: Holder) -> None:
        """Add a holder."""
        self._holders.setdefault(holder, _Work())
        self._look_for_stuck()

    def wanted_of(self, holder: Holder) -> list[ImagePart]:
        """The missing parts that are not in flight and that this holder may be asked for."""
        return [self._states[i].part for i in self._todo if self._may(holder, self._states[i])]

    def bringers(self, span: Span) -> list[Holder]:
        """The holders that delivered the present bytes of a range."""
        found = [state.by for state in self._inside(span) if state.by is not None]
        return list(dict.fromkeys(found))

    def next_pulls(
        self, now_s: float, *, ready: Container[Holder] | None = None
    ) -> list[Pull[Holder] | Cancel[Holder]]:
        """The transfers to start now; call after every event and about once a second.

        Args:
            ready: the holders that accept requests already; None for all.
        """
        self.mix()
        effects: list[Pull[Holder] | Cancel[Holder]] = []
        while (found := self._next_pull(ready)) is not None:
            name, index = found
            self._todo.remove(index)
            effects.append(self._start(name, self._states[index], now_s))
        return effects + self._take_over(now_s, ready)

    def claim(self, holder: Holder, part: ImagePart) -> None:
        """The part was delivered by this holder without a request (a copy on the same node)."""
        self._todo.remove(part.index)
        self._arrived(holder, self._states[part.index])

    def delivered(self, holder: Holder, part: ImagePart, now_s: float) -> None:
        """The part has arrived completely (its chunk digests matched)."""
        work, state = self._holders[holder], self._states[part.index]
        since = work.in_flight.pop(part.index, None)
        if since is None or state.by is not None:
            return
        work.failures = 0
        self._durations.append(now_s - since)
        self._arrived(holder, state)

    def failed_part(self, holder: Holder, part: ImagePart, *, gone: bool = False) -> list[ImagePart]:
        """The transfer failed; ``gone``: the holder cannot be asked again. If the holder is lost by this,
        returns like `lose`.
        """
        work = self._holders[holder]
        work.failures += 1
        self._requeue(holder, part)
        return self.lose(holder) if gone or work.failures >= _FAILURES else []

    def cannot(self, holder: Holder, part: ImagePart) -> None:
        """The holder reported that it can never deliver this part; it is still asked for others."""
        state = self._states[part.index]
        state.cannot.add(holder)
        self._requeue(holder, part)
        if self._is_stuck(state) and state not in self._stuck:
            self._stuck.append(state)

    def lose(self, holder: Holder) -> list[ImagePart]:
        """Drop a holder; returns its parts in flight, which the shell must cancel."""
        work = self._holders[holder]
        work.lost = True
        given_up = [self._states[index].part for index in work.in_flight]
        for part in reversed(given_up):
            self._requeue(holder, part)
        self._look_for_stuck()
        return given_up

    def blame(self, ranges: Iterable[Span]) -> dict[Span, list[Holder]]:
        """Request these disjoint ranges again, because their bytes are not the sealed ones; returns the
        holders that had delivered each range.

        Call it when the image is complete, with all wrong ranges. The result omits ranges that no
        holder delivered.
        """
        assert self.complete, "a missing part cannot be wrong"
        spans = sorted(ranges)
        self._cut(sorted({edge for span in spans for edge in span}))
        blamed = {span: found for span in spans if (found := self.bringers(span))}
        mixed = {span: self._mixed(span) for span in blamed}
        for span in mixed.values():
            tried = self._tried.setdefault(span, set())
            tried.add(tuple(s.by for s in self._inside(span) if s.by is not None))
        for span in reversed(blamed):
            self._take_back(span, mixed[span])
        for name in {name for found in blamed.values() for name in found}:
            self._holders[name].times_wrong += 1
        self._look_for_stuck()
        return blamed

    def mix(self) -> None:
        """If no holder is left for a part of a large range, request the range from the next combination
        of holders.
        """
        for span in {state.span for state in self._stuck if state.span is not None}:
            mix, members = self._next_mix(span), self._inside(span)
            if mix is None or any(s.by is None and s.part.index not in self._todo for s in members):
                continue  # no combination is left, or some part is still in flight
            for member, name in zip(members, mix, strict=True):
                member.only = name
                if member.by is not None and member.by != name:
                    self._undeliver(member)
        if self._stuck:
            self._look_for_stuck()

    # -- parts -----------------------------------------------------------------------------------

    def _new(self, start: int, stop: int) -> _State[Holder]:
        part = ImagePart(next(self._numbers), start, stop)
        return self._states.setdefault(part.index, _State(part))

    def _arrived(self, holder: Holder, state: _State[Holder]) -> None:
        self._holders[holder].delivered_bytes += state.part.stop - state.part.start
        state.by = holder
        self._missing -= 1

    def _undeliver(self, state: _State[Holder]) -> None:
        assert state.by is not None
        self._holders[state.by].delivered_bytes -= state.part.stop - state.part.start
        state.by = None
        self._missing += 1
        self._todo.appendleft(state.part.index)

    def _requeue(self, holder: Holder, part: ImagePart) -> None:
        was_its = self._holders[holder].in_flight.pop(part.index, None) is not None
        if was_its and self._states[part.index].by is None:
            self._todo.appendleft(part.index)

    def _inside(self, span: Span) -> list[_State[Holder]]:
        begin = bisect_left(self._order, span[0], key=_start_of)
        return self._order[begin : bisect_left(self._order, span[1], key=_start_of)]

    def _cut(self, edges: Sequence[int]) -> None:
        """Cut the parts at these edges; new ones keep who delivered the old one, and none of its failures."""
        cut: list[_State[Holder]] = []
        for state in self._order:
            start, stop = state.part.start, state.part.stop
            inner = edges[bisect_right(edges, start) : bisect_left(edges, stop)]
            if not inner:
                cut.append(state)
                continue
            del self._states[state.part.index]
            for a, b in itertools.pairwise([start, *inner, stop]):
                part = self._new(a, b)
                part.by, part.taken_over = state.by, state.taken_over
                cut.append(part)
        self._order = cut

    def _mixed(self, span: Span) -> Span:
        """The range to combine if this range is wrong: itself, or a range that contained it before (a
        header with a wrong length is only known by that length).
        """
        known = (state.span for state in self._inside(span) if state.span is not None)
        return next((k for k in known if k[0] <= span[0] and span[1] <= k[1]), span)

    def _take_back(self, span: Span, mixed: Span) -> None:
        for state in reversed(self._inside(span)):
            assert state.by is not None
            if state.taken_over and not state.excused:
                state.taken_over, state.excused = 0, True
            else:
                state.wrong.add(state.by)
            state.span, state.only = mixed, None
            self._undeliver(state)

    # -- permitted holders ---------------------------------------------------------------------------

    def _may(self, holder: Holder, state: _State[Holder]) -> bool:
        if self._holders[holder].lost or holder in state.cannot:
            return False
        return holder == state.only if state.only is not None else holder not in state.wrong

    def _asked_first(self, holder: Holder, state: _State[Holder]) -> bool:
        """Whether the holder may be asked; if it was wrong too often, only if no other one may."""
        if not self._may(holder, state):
            return False
        return self._holders[holder].times_wrong < _WRONG_TIMES or not any(
            h.times_wrong < _WRONG_TIMES and self._may(name, state) for name, h in self._holders.items()
        )

    def _look_for_stuck(self) -> None:
        self._stuck = [state for state in self._order if self._is_stuck(state)]

    def _is_stuck(self, state: _State[Holder]) -> bool:
        return state.by is None and not any(self._may(name, state) for name in self._holders)

    def _next_mix(self, span: Span) -> tuple[Holder, ...] | None:
        """The next combination of holders for a range that was wrong; None if there is none."""
        unable = [member.cannot for member in self._inside(span)]
        return next_mix(unable, self.holders_left(), self._tried[span])

    # -- requests ------------------------------------------------------------------------------------

    def _free(self, ready: Container[Holder] | None) -> list[Holder]:
        """The holders that may have one more request in flight, the least busy first."""
        free = [
            (len(h.in_flight), number, name)
            for number, (name, h) in enumerate(self._holders.items())
            if not h.lost and len(h.in_flight) < _IN_FLIGHT and (ready is None or name in ready)
        ]
        return [name for _, _, name in sorted(free, key=lambda entry: entry[:2])]

    def _next_pull(self, ready: Container[Holder] | None) -> tuple[Holder, int] | None:
        if not self._todo:
            return None
        for name in self._free(ready):
            for index in self._todo:
                if self._asked_first(name, self._states[index]):
                    return name, index
        return None

    def _start(self, name: Holder, state: _State[Holder], now_s: float) -> Pull[Holder]:
        self._holders[name].in_flight[state.part.index] = now_s
        return Pull(name, state.part)

    def _take_over(
        self, now_s: float, ready: Container[Holder] | None
    ) -> list[Pull[Holder] | Cancel[Holder]]:
        """Let an idle holder take over a part that has been in flight for much longer than usual."""
        idle = [name for name in self._free(ready) if not self._holders[name].in_flight]
        if not idle:
            return []
        for index, slow in self._slow(now_s):
            state = self._states[index]
            able = next((name for name in idle if self._asked_first(name, state)), None)
            if able is not None:
                del self._holders[slow].in_flight[index]
                state.taken_over += 1
                return [Cancel(slow, state.part), self._start(able, state, now_s)]
        return []

    def _slow(self, now_s: float) -> list[tuple[int, Holder]]:
        """The parts that have been in flight for too long, with their holders; the longest first."""
        limit = self._limit_s()
        slow = [
            (since, index, name)
            for name, h in self._holders.items()
            for index, since in h.in_flight.items()
            # Double the limit after each take-over: if all holders are slow, a part must not
            # alternate between them for ever.
            if now_s - since > limit * 2 ** self._states[index].taken_over
        ]
        return [(index, name) for _, index, name in sorted(slow, key=lambda entry: entry[:2])]

    def _limit_s(self) -> float:
        """The time in flight after which another holder may take a part over."""
        if not self._durations:
            return _FIRST_S
        usual = sorted(self._durations)[len(self._durations) // 2]
        return max(_SLOW_S, _SLOW_FACTOR * usual)


def _start_of(state: _State[Holder]) -> int:
    return state.part.start


# Combinations per range. Each costs a pass over the image (0.1 s per 2 GB), and all of them are tried
# only if a recovery would fail otherwise. The limit covers all combinations for up to 7 parts of 2
# holders (56 MiB), 4 of 3, 3 of 4 or 5; and one damaged part in each of two copies of a tensor of 60
# parts (480 MiB).
MIXES = 128
_LOOKED_AT = 8 * MIXES  # `_mixes` yields a combination of n holders up to n times


def next_mix(
    cannot: Sequence[Container[Holder]],
    holders: Sequence[Holder],
    tried: Collection[tuple[Holder, ...]],
) -> tuple[Holder, ...] | None:
    """The holder of each part in the next combination; None if none is left, or too many were tried.

    Args:
        cannot: by part, the holders that cannot deliver it.
        holders: the remaining holders.
        tried: the combinations that were wrong.
    """
    if len(cannot) < 2 or len(tried) >= MIXES:
        return None  # for a single part each holder was tried already
    for mix in itertools.islice(_mixes(len(cannot), holders), _LOOKED_AT):
        if mix not in tried and not any(n in not_ for n, not_ in zip(mix, cannot, strict=True)):
            return mix
    return None


def _mixes(num_parts: int, holders: Sequence[Holder]) -> Iterator[tuple[Holder, ...]]:
    """All combinations, by the number of parts that do not come from the main holder; with duplicates."""
    for num_others in range(num_parts + 1 if len(holders) > 1 else 1):
        for holder in holders:
            others = [other for other in holders if other != holder]
            for places in itertools.combinations(range(num_parts), num_others):
                for chosen in itertools.product(others, repeat=num_others):
                    mix = [holder] * num_parts
                    for place, other in zip(places, chosen, strict=True):
                        mix[place] = other
                    yield tuple(mix)
