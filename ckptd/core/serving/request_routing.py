"""Which device computes the shared heads of which request, by remaining work (FailSafe; pure).

In a hybrid placement r heads of each layer are shared (see `unit_placement`). Each of these r slots is
routed by itself, so one long request occupies several devices and not one. A slot goes to the device with
the least remaining work, the longest request first. Work is counted in reads of a token's KV: the i-th of
the tokens that remain reads those of all before it.

A request that has a device for a slot keeps it, because its KV is there. Slots whose device was lost, new
slots and new requests are routed. After a device came back, ``even_within`` moves some of the others to it.

Routed from scratch, the busiest device has at most 4/3 - 1/(3n) times the least possible work (Graham's bound
for the longest first).

Source: FailSafe (arXiv:2511.14116), fine-grained load-aware routing; its abstract was available. Counting and
    slots are our own. R. L. Graham, Bounds on multiprocessing timing anomalies (1969).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """A request that is served, or waits.

    Args:
        id: its name.
        tokens: whose KV was computed.
        remaining: tokens that are to be computed yet, of the prompt and, as an estimate, of the answer.
        homes: ``[r]``, the device that computes the shared head of each slot; empty if it was not routed.
    Raises:
        ValueError: a count is negative.
    """

    id: str
    tokens: int
    remaining: int
    homes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.tokens < 0 or self.remaining < 0:
            raise ValueError(
                f"request {self.id!r} has {self.tokens} tokens and {self.remaining} remaining: "
                "pass counts from 0 on"
            )

    @property
    def work(self) -> int:
        """Reads of a token's KV, in each head, until it ends."""
        return self.remaining * self.tokens + self.remaining * (self.remaining + 1) // 2

    @property
    def final_tokens(self) -> int:
        """Whose KV it holds in the end."""
        return self.tokens + self.remaining


@dataclass(frozen=True, slots=True)
class Routing:
    """Where requests go.

    Attributes:
        requests: those that are served, with a device for each slot, as they were passed.
        waiting: those for which devices have no room, without devices. One that is larger than the room of
            all devices waits until more of them are there.
        load: remaining work in shared heads of each device.
    """

    requests: tuple[ServedRequest, ...]
    waiting: tuple[ServedRequest, ...]
    load: Mapping[int, int]


def route_requests(
    requests: Iterable[ServedRequest],
    devices: Iterable[int],
    slots: int,
    *,
    room_tokens: int | None = None,
    even_within: float | None = None,
) -> Routing:
    """Give each slot of each request a device.

    Args:
        devices: those that are there; requests leave others.
        slots: r, shared heads of a layer.
        room_tokens: tokens of requests, counted once for each slot, whose KV fits on a device; None: enough.
        even_within: requests that have a device leave it while the busiest one exceeds the mean by more than
            this proportion, and a move to the idlest one helps. Their KV is copied. None: they stay.
    Raises:
        ValueError: there is no device, or a request is named twice.
    """
    given, there = list(requests), sorted(set(devices))
    if not there:
        raise ValueError("no device is left to route requests to")
    if len({each.id for each in given}) < len(given):
        raise ValueError("a request is there twice: each needs a name of its own")
    router = _Router(given, there, slots, room_tokens)
    waiting = {each.id for each in sorted(given, key=lambda r: (-r.work, r.id)) if not router.place(each)}
    if even_within is not None:
        router.even_out([each for each in given if each.id not in waiting], even_within)
    return Routing(
        tuple(replace(each, homes=router.homes_of(each)) for each in given if each.id not in waiting),
        tuple(replace(each, homes=()) for each in given if each.id in waiting),
        router.load,
    )


class _Router:
    """Loads while requests are routed."""

    def __init__(
        self, given: list[ServedRequest], there: list[int], slots: int, room_tokens: int | None
    ) -> None:
        self.load, self._held = dict.fromkeys(there, 0), dict.fromkeys(there, 0)
        self._room = math.inf if room_tokens is None else room_tokens
        self._homes: dict[str, list[int | None]] = {}
        for each in given:
            kept = [home if home in self.load else None for home in each.homes[:slots]]
            self._homes[each.id] = kept + [None] * (slots - len(kept))
            for home in kept:
                self._count(each, home, 1)

    def _count(self, request: ServedRequest, home: int | None, sign: int) -> None:
        if home is not None:
            self.load[home] += sign * request.work
            self._held[home] += sign * request.final_tokens

    def homes_of(self, request: ServedRequest) -> tuple[int, ...]:
        return tuple(home for home in self._homes[request.id] if home is not None)

    def place(self, request: ServedRequest) -> bool:
        """Give a device to each slot that has none; False: there is no room, and the request has none now."""
        homes = self._homes[request.id]
        for slot, home in enumerate(homes):
            if home is not None:
                continue
            fits = [d for d in self.load if self._held[d] + request.final_tokens <= self._room]
            if not fits:
                for each in homes:
                    self._count(request, each, -1)
                return False
            homes[slot] = min(fits, key=lambda d: (self.load[d], self._held[d], d))
            self._count(request, homes[slot], 1)
        return True

    def even_out(self, requests: list[ServedRequest], within: float) -> None:
        """Move slots from the busiest device to the idlest; each time the sum of squares of loads shrinks."""
        mean = sum(self.load.values()) / len(self.load)
        while True:
            idlest, busiest = (
                min(self.load, key=self.load.__getitem__),
                max(self.load, key=self.load.__getitem__),
            )
            gap = self.load[busiest] - self.load[idlest]
            movable = [
                (min(each.work, gap - each.work) / (1 + each.tokens), each.id, slot, each)
                for each in requests
                if 0 < each.work < gap and self._held[idlest] + each.final_tokens <= self._room
                for slot, home in enumerate(self._homes[each.id])
                if home == busiest
            ]
            if not movable or self.load[busiest] <= mean * (1 + within):
                return
            _, _, slot, request = max(movable, key=lambda found: found[:3])  # most work for the KV to copy
            self._count(request, busiest, -1)
            self._homes[request.id][slot] = idlest
            self._count(request, idlest, 1)
