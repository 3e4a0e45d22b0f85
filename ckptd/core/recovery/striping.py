"""How one image is pulled from several holders at once: parts handed out as holders become free (pure).

The image is cut into parts. Every holder has a few in flight; whoever is done takes the next one,
so a fast holder delivers more and nobody has to be measured. A part that fails goes back to the
front of the queue. A holder without work takes over a part that another has been at for long (the
shell cancels that one first).

When all parts are there the image is verified, and `blame` is told every range that is wrong. It
cuts the parts at the edges of those ranges; what is right stays, whoever brought it. Each wrong
part is asked of another holder, and never again of one that brought it wrong; that holder stays
good for everything else. So copies that are damaged in different places make up a whole one.

A wrong range that lies in several parts (a large tensor) does not tell which of them is at fault.
When every holder had its turn at one of them, `ckptd.core.recovery.mixes` says which holder is to
bring which part, each combination once and so many at most.

Of a part that was taken over the bytes may be those of the cancelled transfer, which landed last:
then nobody is found wrong, once.

It ends. Cuts are made at edges of ranges only, so there are finitely many parts; who brought a part
wrong is not asked for that part again, but for the combinations, of which no range sees more than
`MIXES`, and none twice. So `blame` can be called finitely often before nothing is wrong or nobody
is left. What is accepted is what verified, whatever was asked of whom.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ckptd.core.recovery.mixes import next_mix

__all__ = ["PART_BYTES", "Cancel", "ImagePart", "Pull", "Span", "Stripes"]

PART_BYTES = 8 << 20
_IN_FLIGHT = 2  # per holder: the next request is on its way while one is served
_SLOW_FACTOR = 4.0
_SLOW_S = 1.0
_FIRST_S = 3.0  # the same before any part has arrived, when nobody knows what is usual
_FAILURES = 3  # of one holder in a row, after which it is not asked again
# Verifications in which something of one holder was wrong, after which it is asked only for what
# nobody else can bring. Two find all flipped bits, those of the header first; a third speaks of
# memory that changes as it is read, and each costs a pass over the image. To give the holder up
# altogether would lose bytes that may be the only ones, and is not needed for an end.
_WRONG_TIMES = 3

Holder = TypeVar("Holder", bound=Hashable)  # whatever names one copy of the image
Span = tuple[int, int]  # bytes [start, stop) of the image


@dataclass(frozen=True, slots=True)
class ImagePart:
    """Bytes ``[start, stop)`` of the image; ``index`` names the part, and is not its place."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Pull(Generic[Holder]):
    """Effect: get this part from this holder."""

    holder: Holder
    part: ImagePart


@dataclass(frozen=True, slots=True)
class Cancel(Generic[Holder]):
    """Effect: another holder takes this part over; end the transfer before it begins."""

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
    """One part: who brought it, and who cannot.

    ``wrong`` brought it wrong; ``cannot`` said that they cannot bring it; ``only``, if not None,
    has its turn in a combination.
    """

    part: ImagePart
    by: Holder | None = None
    wrong: set[Holder] = field(default_factory=set)
    cannot: set[Holder] = field(default_factory=set)
    only: Holder | None = None
    span: Span | None = None  # the wrong range whose parts are mixed, if each holder had its turn
    taken_over: int = 0
    excused: bool = (
        False  # it was wrong after it was taken over: whose bytes those were is not known
    )


class Stripes(Generic[Holder]):
    """One image's parts.

    Args:
        holders: the preferred one first.
        part_bytes: size of a part but for the last.
    """

    def __init__(
        self, size_bytes: int, holders: Sequence[Holder], *, part_bytes: int = PART_BYTES
    ) -> None:
        self._numbers = itertools.count()
        self._states: dict[int, _State[Holder]] = {}
        for start in range(0, max(size_bytes, 1), part_bytes):
            self._new(start, min(start + part_bytes, size_bytes))
        self._order = list(self._states.values())  # by where they lie
        self._todo = deque(self._states)
        self._missing = len(self._states)
        self._stuck: list[_State[Holder]] = []  # missing, and nobody may be asked
        self._tried: dict[Span, set[tuple[Holder, ...]]] = {}
        self._holders = {name: _Work() for name in holders}
        self._durations: deque[float] = deque(maxlen=32)
        self._look_for_stuck()

    @property
    def parts(self) -> list[ImagePart]:
        """All of them, as they lie; `blame` makes new ones."""
        return [state.part for state in self._order]

    @property
    def complete(self) -> bool:
        """Every part has been delivered."""
        return self._missing == 0

    @property
    def failed(self) -> bool:
        """Nobody is left who could deliver something that is missing."""
        return bool(self.hopeless())

    @property
    def bytes_by_holder(self) -> dict[Holder, int]:
        """What each has delivered, without what was wrong."""
        return {name: h.delivered_bytes for name, h in self._holders.items()}

    def holders_left(self) -> list[Holder]:
        return [name for name, holder in self._holders.items() if not holder.lost]

    def hopeless(self) -> list[ImagePart]:
        """What nobody is left to deliver."""
        spans = {state.span for state in self._stuck if state.span is not None}
        over = {None, *(span for span in spans if self._next_mix(span) is None)}
        return [state.part for state in self._stuck if state.span in over]

    def add_holder(self, holder: Holder) -> None:
        """One more that may be asked."""
        self._holders.setdefault(holder, _Work())
        self._look_for_stuck()

    def wanted_of(self, holder: Holder) -> list[ImagePart]:
        """What is missing, not under way, and may be asked of this holder."""
        return [self._states[i].part for i in self._todo if self._may(holder, self._states[i])]

    def bringers(self, span: Span) -> list[Holder]:
        """Who has delivered what lies there now."""
        found = [state.by for state in self._inside(span) if state.by is not None]
        return list(dict.fromkeys(found))

    def next_pulls(
        self, now_s: float, *, ready: Container[Holder] | None = None
    ) -> list[Pull[Holder] | Cancel[Holder]]:
        """What to start now; call after every event and about once a second.

        Args:
            ready: the holders that can be asked already; None for all.
        """
        self.mix()
        effects: list[Pull[Holder] | Cancel[Holder]] = []
        while (found := self._next_pull(ready)) is not None:
            name, index = found
            self._todo.remove(index)
            effects.append(self._start(name, self._states[index], now_s))
        return effects + self._take_over(now_s, ready)

    def claim(self, holder: Holder, part: ImagePart) -> None:
        """The part was brought from this holder without being asked for (a copy on the same node)."""
        self._todo.remove(part.index)
        self._arrived(holder, self._states[part.index])

    def delivered(self, holder: Holder, part: ImagePart, now_s: float) -> None:
        """The part has arrived whole (chunk digests held)."""
        work, state = self._holders[holder], self._states[part.index]
        since = work.in_flight.pop(part.index, None)
        if since is None or state.by is not None:
            return
        work.failures = 0
        self._durations.append(now_s - since)
        self._arrived(holder, state)

    def failed_part(
        self, holder: Holder, part: ImagePart, *, gone: bool = False
    ) -> list[ImagePart]:
        """The transfer failed; ``gone``: the holder cannot be asked again. Returns as `lose` does,
        if it is lost by that.
        """
        work = self._holders[holder]
        work.failures += 1
        self._requeue(holder, part)
        return self.lose(holder) if gone or work.failures >= _FAILURES else []

    def cannot(self, holder: Holder, part: ImagePart) -> None:
        """The holder has said that it will never deliver this part; it is asked for others as before."""
        state = self._states[part.index]
        state.cannot.add(holder)
        self._requeue(holder, part)
        if self._is_stuck(state) and state not in self._stuck:
            self._stuck.append(state)

    def lose(self, holder: Holder) -> list[ImagePart]:
        """The holder is not asked again; returns its parts in flight, which the shell cancels."""
        work = self._holders[holder]
        work.lost = True
        given_up = [self._states[index].part for index in work.in_flight]
        for part in reversed(given_up):
            self._requeue(holder, part)
        self._look_for_stuck()
        return given_up

    def blame(self, ranges: Iterable[Span]) -> dict[Span, list[Holder]]:
        """These bytes, disjoint, are not what was sealed: have them delivered again; returns who
        had delivered each range.

        To be called when the image is complete, with all that is wrong. A range in which nobody
        brought anything is left out.
        """
        assert self.complete, "what is missing cannot be wrong"
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
        """Where nobody is left for a part of a large range: have the range brought by the next
        combination of holders.
        """
        for span in {state.span for state in self._stuck if state.span is not None}:
            mix, members = self._next_mix(span), self._inside(span)
            if mix is None or any(s.by is None and s.part.index not in self._todo for s in members):
                continue  # none is left, or some of it is still under way
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
        """Have every part end where one of these edges is. Who brought the whole brought the
        pieces. Who had it wrong before, or could not bring it, may have a piece right.
        """
        cut: list[_State[Holder]] = []
        for state in self._order:
            start, stop = state.part.start, state.part.stop
            inner = edges[bisect_right(edges, start) : bisect_left(edges, stop)]
            if not inner:
                cut.append(state)
                continue
            del self._states[state.part.index]
            for a, b in itertools.pairwise([start, *inner, stop]):
                piece = self._new(a, b)
                piece.by, piece.taken_over = state.by, state.taken_over
                cut.append(piece)
        self._order = cut

    def _mixed(self, span: Span) -> Span:
        """What has to be mixed if this range is wrong: it, or a range that it was part of before
        (of a header whose length is wrong, no more than that is known).
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

    # -- who may be asked ------------------------------------------------------------------------

    def _may(self, holder: Holder, state: _State[Holder]) -> bool:
        if self._holders[holder].lost or holder in state.cannot:
            return False
        return holder == state.only if state.only is not None else holder not in state.wrong

    def _asked_first(self, holder: Holder, state: _State[Holder]) -> bool:
        """Whether it may be asked and, if it was wrong too often, nobody else may."""
        if not self._may(holder, state):
            return False
        return self._holders[holder].times_wrong < _WRONG_TIMES or not any(
            h.times_wrong < _WRONG_TIMES and self._may(name, state)
            for name, h in self._holders.items()
        )

    def _look_for_stuck(self) -> None:
        self._stuck = [state for state in self._order if self._is_stuck(state)]

    def _is_stuck(self, state: _State[Holder]) -> bool:
        return state.by is None and not any(self._may(name, state) for name in self._holders)

    def _next_mix(self, span: Span) -> tuple[Holder, ...] | None:
        """The next combination of holders for a range that was wrong; None if there is none."""
        unable = [member.cannot for member in self._inside(span)]
        return next_mix(unable, self.holders_left(), self._tried[span])

    # -- what is asked of whom -------------------------------------------------------------------

    def _free(self, ready: Container[Holder] | None) -> list[Holder]:
        """Who may have one more in flight, the freest first."""
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
        """One part that has been under way for much longer than usual, by a holder that has nothing to do."""
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
        """Parts that have been under way for too long, and by whom; the longest first."""
        limit = self._limit_s()
        slow = [
            (since, index, name)
            for name, h in self._holders.items()
            for index, since in h.in_flight.items()
            # Twice as long after each take-over: where all are slow, a part must not go to and fro for ever.
            if now_s - since > limit * 2 ** self._states[index].taken_over
        ]
        return [(index, name) for _, index, name in sorted(slow, key=lambda entry: entry[:2])]

    def _limit_s(self) -> float:
        """How long a part may be under way before another holder may have it."""
        if not self._durations:
            return _FIRST_S
        usual = sorted(self._durations)[len(self._durations) // 2]
        return max(_SLOW_S, _SLOW_FACTOR * usual)


def _start_of(state: _State[Holder]) -> int:
    return state.part.start
