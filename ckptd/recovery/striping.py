"""How one image is pulled from several holders at once: parts handed out as holders become free (pure).

The image is cut into parts. Every holder has a few in flight; whoever is done takes the next one, so a fast holder delivers more
and nobody has to be measured. A part that fails goes back to the front of the queue. Once no part is left, a holder without
work takes over a part that another has been at for long (the shell cancels that one first). Who delivered which bytes is
remembered until the image is verified: `blame` names the parts that overlap what did not match, takes them back, and never asks
their deliverers again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["PART_BYTES", "Cancel", "Part", "Pull", "Stripes"]

PART_BYTES = 8 << 20
_IN_FLIGHT = 2  # per holder: the next request is on its way while one is served
_SLOW_FACTOR = 4.0
_SLOW_S = 1.0
_FIRST_S = 3.0  # the same before any part has arrived, when nobody knows what is usual
_FAILURES = 3  # of one holder in a row, after which it is not asked again

Holder = TypeVar("Holder", bound=Hashable)  # whatever names one copy of the image


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes ``[start, stop)`` of the image."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Pull(Generic[Holder]):
    """Effect: get this part from this holder."""

    holder: Holder
    part: Part


@dataclass(frozen=True, slots=True)
class Cancel(Generic[Holder]):
    """Effect: another holder takes this part over; end the transfer before it begins."""

    holder: Holder
    part: Part


@dataclass(slots=True)
class _Work:
    in_flight: dict[int, float] = field(default_factory=dict)  # part -> since when
    failures: int = 0
    lost: bool = False
    delivered_bytes: int = 0


class Stripes(Generic[Holder]):
    """One image's parts.

    Args:
        holders: the preferred one first.
        part_bytes: size of a part but for the last.
    """

    def __init__(
        self, size_bytes: int, holders: Sequence[Holder], *, part_bytes: int = PART_BYTES
    ) -> None:
        self.parts = [
            Part(i, start, min(start + part_bytes, size_bytes))
            for i, start in enumerate(range(0, max(size_bytes, 1), part_bytes))
        ]
        self._todo = deque(self.parts)
        self._holders = {name: _Work() for name in holders}
        self._delivered: dict[int, Holder] = {}
        self._durations: deque[float] = deque(maxlen=32)
        self._taken_over: dict[int, int] = {}  # part -> how often

    @property
    def complete(self) -> bool:
        """Every part has been delivered."""
        return len(self._delivered) == len(self.parts)

    @property
    def failed(self) -> bool:
        """Nobody is left who could deliver what is missing."""
        return not self.complete and not any(not h.lost for h in self._holders.values())

    @property
    def bytes_by_holder(self) -> dict[Holder, int]:
        return {name: h.delivered_bytes for name, h in self._holders.items()}

    def holders_left(self) -> list[Holder]:
        return [name for name, holder in self._holders.items() if not holder.lost]

    def next_pulls(
        self, now_s: float, *, ready: Container[Holder] | None = None
    ) -> list[Pull[Holder] | Cancel[Holder]]:
        """What to start now; call after every event and about once a second.

        Args:
            ready: the holders that can be asked already; None for all.
        """
        effects: list[Pull[Holder] | Cancel[Holder]] = []
        while self._todo and (name := self._freest(ready)) is not None:
            effects.append(self._start(name, self._todo.popleft(), now_s))
        if not self._todo:
            effects += self._take_over(now_s, ready)
        return effects

    def claim(self, holder: Holder, part: Part) -> None:
        """The part was brought from this holder without being asked for (a copy on the same node)."""
        self._delivered[part.index] = holder
        self._holders[holder].delivered_bytes += part.stop - part.start
        if part in self._todo:
            self._todo.remove(part)

    def delivered(self, holder: Holder, part: Part, now_s: float) -> None:
        """The part has arrived whole (chunk digests held)."""
        state = self._holders[holder]
        since = state.in_flight.pop(part.index, None)
        if since is None or part.index in self._delivered:
            return
        state.failures = 0
        state.delivered_bytes += part.stop - part.start
        self._durations.append(now_s - since)
        self._delivered[part.index] = holder

    def failed_part(self, holder: Holder, part: Part, *, gone: bool = False) -> list[Part]:
        """The transfer failed; ``gone``: the holder cannot be asked again. Returns as `lose` does, if it is lost by that."""
        state = self._holders[holder]
        was_its = state.in_flight.pop(part.index, None) is not None
        state.failures += 1
        if was_its and part.index not in self._delivered:
            self._todo.appendleft(part)
        return self.lose(holder) if gone or state.failures >= _FAILURES else []

    def lose(self, holder: Holder) -> list[Part]:
        """The holder is not asked again; returns its parts in flight, which the shell cancels."""
        state = self._holders[holder]
        state.lost = True
        given_up = [self.parts[index] for index in state.in_flight]
        state.in_flight.clear()
        self._todo.extendleft(
            part for part in reversed(given_up) if part.index not in self._delivered
        )
        return given_up

    def blame(self, ranges: Iterable[tuple[int, int]]) -> list[Holder]:
        """These bytes are not what was sealed: fetch their parts again, from others; returns who delivered them."""
        spans = list(ranges)
        wrong = [p for p in self.parts if any(p.start < b and a < p.stop for a, b in spans)]
        liars = list(dict.fromkeys(self._delivered[p.index] for p in wrong))
        for name in liars:
            self.lose(name)
            # Whatever else it delivered is not to be believed either.
            wrong += [
                p for p in self.parts if self._delivered.get(p.index) == name and p not in wrong
            ]
        for part in sorted(wrong, key=lambda p: p.index, reverse=True):
            del self._delivered[part.index]
            self._todo.appendleft(part)
        return liars

    def _freest(self, ready: Container[Holder] | None) -> Holder | None:
        free = [
            (len(h.in_flight), number, name)
            for number, (name, h) in enumerate(self._holders.items())
            if not h.lost and len(h.in_flight) < _IN_FLIGHT and (ready is None or name in ready)
        ]
        return min(free)[2] if free else None

    def _start(self, name: Holder, part: Part, now_s: float) -> Pull[Holder]:
        self._holders[name].in_flight[part.index] = now_s
        return Pull(name, part)

    def _take_over(
        self, now_s: float, ready: Container[Holder] | None
    ) -> list[Pull[Holder] | Cancel[Holder]]:
        """One part that has been under way for much longer than usual, by a holder that has nothing to do."""
        idle = [
            name
            for name, h in self._holders.items()
            if not h.lost and not h.in_flight and (ready is None or name in ready)
        ]
        if not idle:
            return []
        limit = self._limit_s()
        slow = [
            (since, index, name)
            for name, h in self._holders.items()
            for index, since in h.in_flight.items()
            # Twice as long after each take-over: where all are slow, a part must not go to and fro for ever.
            if now_s - since > limit * 2 ** self._taken_over.get(index, 0)
        ]
        if not slow:
            return []
        _, index, name = min(slow, key=lambda entry: entry[:2])
        del self._holders[name].in_flight[index]
        self._taken_over[index] = self._taken_over.get(index, 0) + 1
        part = self.parts[index]
        return [Cancel(name, part), self._start(idle[0], part, now_s)]

    def _limit_s(self) -> float:
        """How long a part may be under way before another holder may have it."""
        if not self._durations:
            return _FIRST_S
        usual = sorted(self._durations)[len(self._durations) // 2]
        return max(_SLOW_S, _SLOW_FACTOR * usual)
