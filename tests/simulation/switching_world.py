"""Ranks that train, snapshot and agree on changes through a store, under seeded delays, losses,
deaths and restarts.

What is real: the machine (`ckptd.core.switching`) and every access to the store
(`ckptd.core.switching`), interleaved one by one. What is simulated: time, training (in
lockstep or running apart), the store, and the trainer's part: making memory, which may take long or
be refused.

The promise, checked at each snapshot: of one epoch, no two ranks snapshot an iteration by different
schedules. A schedule is named by the changes that have been applied, and by when they began.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from ckptd.core.switching import (
    Add,
    Apply,
    Change,
    CompareAndSwap,
    Delete,
    Discard,
    Get,
    Has,
    Prepare,
    Prepared,
    RequestFailed,
    Stage,
    Steps,
    Switching,
    Unable,
    accesses,
)

__all__ = ["World", "WorldConfig", "play"]


@dataclass(frozen=True)
class WorldConfig:
    """How much goes wrong; by default nothing does, and everything is quick."""

    ranks: int = 3
    iterations: int = 400
    lockstep: bool = True
    slow_messages: float = 0.0  # the share of accesses that take seconds
    lost: float = 0.0  # the share of accesses that fail; half of them were done
    store_dies_s: float = 0.0  # from this time on none is answered
    refusals: float = 0.0  # the share of preparations that are refused
    deaths: int = 0  # each ends the epoch: all ranks begin the next one, some iterations back
    stops: float = 0.0  # the share of steps that take many times as long
    machine: type[Switching] = Switching
    margin_s: float = 1.0


def chaos(rng: random.Random) -> WorldConfig:
    """Much goes wrong, in any mixture."""
    return WorldConfig(
        ranks=rng.choice([2, 2, 3, 4, 6]),
        iterations=rng.randint(100, 500),
        lockstep=rng.random() < 0.7,
        slow_messages=rng.choice([0.0, 0.05, 0.3]),
        lost=rng.choice([0.0, 0.0, 0.02, 0.1]),
        store_dies_s=rng.choice([0.0, 0.0, 0.0, rng.uniform(2, 40)]),
        refusals=rng.choice([0.0, 0.1, 0.5]),
        deaths=rng.choice([0, 0, 1, 3]),
        stops=rng.choice([0.0, 0.01, 0.1]),
        margin_s=rng.choice([0.01, 0.1, 1.0, 5.0]),
    )


@dataclass
class _Rank:
    number: int
    machine: Switching
    iteration: int
    # The changes applied so far, each with its iteration, and those that are known to come.
    applied: list[tuple[int, int]] = field(default_factory=list)
    preparing: int = -1
    ready_at_s: float = 0.0


class World:
    """One seed's history."""

    def __init__(self, seed: int, config: WorldConfig) -> None:
        self.rng, self.config = random.Random(seed), config
        self.now_s = 0.0
        self.seen: Counter[str] = Counter()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._epoch = -1
        self._deaths = sorted(self.rng.randint(10, config.iterations) for _ in range(config.deaths))
        self._furthest = 0
        self._begin_epoch(0)

    def play(self) -> Counter[str]:
        """Until every rank has done all iterations."""
        while self._events and self._unfinished:
            self.now_s, _, work = heapq.heappop(self._events)
            work()
        return self.seen

    # -- epochs --------------------------------------------------------------------------------------

    def _begin_epoch(self, iteration: int) -> None:
        """All processes are new, and so is the prefix of their keys."""
        self._epoch += 1
        self._events.clear()
        self._unfinished = self.config.ranks if iteration < self.config.iterations else 0
        self._store: dict[str, bytes] = {}
        self.schedules: dict[int, tuple[tuple[int, int], ...]] = {}
        self._ranks = [
            _Rank(
                number,
                self.config.machine(patience_s=20, apart_s=1, apart_max_s=8),
                iteration,
            )
            for number in range(self.config.ranks)
        ]
        for rank in self._ranks:
            self._after(self._step_s(), lambda rank=rank: self._top(rank))  # type: ignore[misc]
            self._after(self.rng.random(), lambda rank=rank: self._beside(rank))  # type: ignore[misc]

    def _after(self, delay_s: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._order), work))

    def _step_s(self) -> float:
        slow = self.rng.random() < self.config.stops
        return self.rng.uniform(0.05, 0.15) * (self.rng.uniform(10, 100) if slow else 1)

    # -- training ------------------------------------------------------------------------------------

    def _top(self, rank: _Rank) -> None:
        """The top of an iteration; in lockstep nobody is more than one ahead."""
        if rank.iteration >= self.config.iterations:
            return
        if self._deaths and rank.iteration >= self._deaths[0]:
            back = max(0, rank.iteration - self.rng.randint(1, 20))
            self._deaths.pop(0)
            self.seen["died"] += 1
            self.seen[f"died while {rank.machine.stage}"] += 1
            self._begin_epoch(back)
            return
        if self.config.lockstep and any(r.iteration < rank.iteration for r in self._ranks):
            self._after(0.03, lambda: self._top(rank))
            return
        self._boundary(rank)
        rank.iteration += 1
        self._unfinished -= rank.iteration >= self.config.iterations
        self._after(self._step_s(), lambda: self._top(rank))

    def _boundary(self, rank: _Rank) -> None:
        for effect in rank.machine.boundary(rank.iteration, iteration_s=0.1):
            match effect:
                case Prepare():
                    self._prepare(rank, effect)
                case Apply():
                    assert effect.at <= rank.iteration
                    rank.applied.append((effect.number, effect.at))
                    self.seen["switched"] += 1
                    self.seen["switched late"] += effect.at < rank.iteration
                case Discard():
                    rank.preparing = -1
                    self.seen["dropped"] += 1
                    self.seen["dropped: late"] += "before it heard" in effect.why
                    self.seen["dropped: refused"] += "no memory" in effect.why
                    self.seen["dropped: patience"] += "ready within" in effect.why
        if self.rng.random() < 0.05:
            change = Change(f"rank {rank.number} at {rank.iteration}")
            margin_s = self.config.margin_s
            wished = rank.machine.wish(change, margin_s=margin_s, now_s=self.now_s)
            self.seen["wished"] += wished
        if rank.machine.knows(rank.iteration):
            self._snapshot(rank)
        else:
            self.seen["left out"] += 1

    def _prepare(self, rank: _Rank, effect: Prepare) -> None:
        if rank.preparing != effect.number:
            rank.preparing = effect.number
            rank.ready_at_s = self.now_s + self.rng.choice([0.0, 0.3, self.rng.uniform(0, 8)])
        if self.now_s < rank.ready_at_s:
            return
        refused = self.rng.random() < self.config.refusals
        event = Unable(effect.number, "no memory") if refused else Prepared(effect.number)
        rank.machine.handle(event, now_s=self.now_s)

    def _snapshot(self, rank: _Rank) -> None:
        """What counts at this iteration: the changes with an iteration up to it."""
        schedule = tuple(change for change in rank.applied if change[1] <= rank.iteration)
        others = self.schedules.setdefault(rank.iteration, schedule)
        assert schedule == others, (
            f"rank {rank.number} snapshots iteration {rank.iteration} by {schedule}, another by {others}"
        )
        self.seen["snapshots"] += 1

    # -- beside training -----------------------------------------------------------------------------

    def _beside(self, rank: _Rank) -> None:
        ask = rank.machine.ask(self.now_s)
        if ask is None:
            self._after(0.1, lambda: self._beside(rank))
            return
        self._drive(rank, accesses(ask, self.config.ranks), None)

    def _drive(self, rank: _Rank, steps: Steps, answer: bytes | int | None) -> None:
        """Send an answer; the next access reaches the store a little later, and its answer comes later still."""
        try:
            access = next(steps) if answer is None else steps.send(answer)
        except StopIteration as done:
            if done.value is not None:
                rank.machine.handle(done.value, now_s=self.now_s)
            self._after(self.rng.uniform(0.01, 0.1), lambda: self._beside(rank))
            return
        lost = self.rng.random() < self.config.lost
        dead = 0 < self.config.store_dies_s <= self.now_s
        if dead or (lost and self.rng.random() < 0.5):
            self._fail(rank)
            return

        def reach() -> None:
            found = self._access(access)
            if lost:  # it was done, and nobody knows
                self._fail(rank)
            else:
                self._after(self._message_s(), lambda: self._drive(rank, steps, found))

        self._after(self._message_s(), reach)

    def _fail(self, rank: _Rank) -> None:
        self.seen["access failed"] += 1
        rank.machine.handle(RequestFailed(), now_s=self.now_s)
        self._after(self.rng.uniform(0.1, 1.0), lambda: self._beside(rank))

    def _message_s(self) -> float:
        slow = self.rng.random() < self.config.slow_messages
        return self.rng.uniform(0.5, 8.0) if slow else self.rng.uniform(0.0005, 0.01)

    def _access(self, access: Add | CompareAndSwap | Has | Get | Delete) -> bytes | int:
        store, key = self._store, access.key
        match access:
            case Add():
                store[key] = str(int(store.get(key, b"0")) + 1).encode()
                return int(store[key])
            case CompareAndSwap():
                if store.get(key, b"") == access.old:
                    store[key] = access.new
                return store.get(key, access.old)
            case Has():
                return int(key in store)
            case Get():
                return store.get(key, b"")
            case Delete():
                return int(store.pop(key, None) is not None)

    # -- looking -------------------------------------------------------------------------------------

    @property
    def applied(self) -> list[list[tuple[int, int]]]:
        """By rank: the changes of this epoch, and from which iterations on they count."""
        return [rank.applied for rank in self._ranks]

    @property
    def stages(self) -> list[Stage]:
        """By rank."""
        return [rank.machine.stage for rank in self._ranks]


def play(seed: int, config: WorldConfig | None = None) -> World:
    """A whole history; without ``config`` one of chaos."""
    world = World(seed, config or chaos(random.Random(seed)))
    world.play()
    return world
