"""An abstract job of pipeline stages: what it computes, what nodes would hold of it, and whether a
localized plan brings it back.

Everything that a rank has is a number, a hash of all that it was made of. So a rank that is fed
from a stale log, that loads a wrong snapshot, or that starts an iteration too early ends with other
numbers than the job had.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ckptd.core.recovery.held import HeldRecords
from ckptd.core.recovery.localized_plan import LocalizedPlan, RankKind
from ckptd.core.recovery.recovery_facts import RankFacts
from ckptd.core.recovery.snapshot_tables import SnapshotToLoad
from ckptd.core.slots.slots import SlotRecord, SlotState

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Shape:
    """Who talks to whom: domains of ranks, and which domains exchange boundaries (rank by rank, in turn)."""

    domains: tuple[Numbers, ...]
    beside: tuple[tuple[int, int], ...]
    replicated: tuple[bool, ...]  # by domain: all members alike, or each its own shard
    window: int
    nodes: tuple[str, ...]  # by rank

    @property
    def world_size(self) -> int:
        return sum(map(len, self.domains))

    @cached_property
    def _domain_of(self) -> dict[int, int]:
        return {rank: d for d, members in enumerate(self.domains) for rank in members}

    def domain_of(self, rank: int) -> int:
        return self._domain_of[rank]

    @cached_property
    def _neighbours(self) -> dict[int, Numbers]:
        return {rank: self._next_to(rank) for rank in self._domain_of}

    def neighbours(self, rank: int) -> Numbers:
        return self._neighbours[rank]

    def _next_to(self, rank: int) -> Numbers:
        found = set()
        for pair in self.beside:
            for mine, other in (pair, pair[::-1]):
                a, b = self.domains[mine], self.domains[other]
                count = max(len(a), len(b))
                found |= {b[i % len(b)] for i in range(count) if a[i % len(a)] == rank}
        return tuple(sorted(found))

    def facts(self, rank: int) -> RankFacts:
        d = self.domain_of(rank)
        alike = self.domains[d] if self.replicated[d] else (rank,)
        return RankFacts(self.neighbours(rank), self.domains[d], alike)


@dataclass(frozen=True)
class State:
    """Of one rank: each operator's full state, and its random generator."""

    full: Numbers
    rng: int

    @cached_property
    def compute(self) -> Numbers:
        return tuple([hash((f, 11)) for f in self.full])


def first_state(shape: Shape) -> list[State]:
    def of(rank: int) -> State:
        d = shape.domain_of(rank)
        whose = d if shape.replicated[d] else 100 + rank
        return State(tuple(hash((whose, o)) for o in range(shape.window)), hash((rank, 13)))

    return [of(rank) for rank in range(shape.world_size)]


def sent_by(compute: Numbers, rng: int, iteration: int, salt: int) -> int:
    return hash((compute, rng, iteration, salt))


def gradient(shape: Shape, rank: int, local: Mapping[int, int]) -> int:
    return hash(tuple(local[m] for m in shape.domains[shape.domain_of(rank)]))


class History:
    """The states at the top of every iteration, and what was sent in each; ``salt`` makes one
    history differ from another.
    """

    def __init__(self, shape: Shape, salts: Sequence[int], states: list[list[State]] | None = None) -> None:
        self.shape = shape
        self.states: list[list[State]] = [first_state(shape)] if states is None else states
        self.salts = salts
        for iteration in range(len(self.states) - 1, len(salts)):
            self.states.append(self._step(iteration))

    def sent(self, rank: int, iteration: int) -> int:
        state = self.states[iteration][rank]
        return sent_by(state.compute, state.rng, iteration, self.salts[iteration])

    def _step(self, iteration: int) -> list[State]:
        shape, ranks = self.shape, range(self.shape.world_size)
        sent = [self.sent(r, iteration) for r in ranks]
        local = {r: hash((sent[r], *(sent[n] for n in shape.neighbours(r)))) for r in ranks}
        return [
            advanced(self.states[iteration][r].full, gradient(shape, r, local), rng)
            for r, rng in ((r, self.states[iteration][r].rng) for r in ranks)
        ]


def advanced(full: Sequence[int], grad: int, rng: int) -> State:
    return State(tuple([hash((f, grad, o)) for o, f in enumerate(full)]), hash((rng, 12)))


@dataclass
class Store:
    """What nodes hold, as holdings and as content."""

    window: int
    segments: dict[str, dict[tuple[str, int, bool], list[SlotRecord]]] = field(
        default_factory=lambda: {"seg": {}, "parked": {}, "boundary": {}}
    )
    content: dict[tuple[str, str, int], Any] = field(default_factory=dict)

    def put(
        self,
        kind: str,
        node: str,
        rank: int,
        content: Any,
        *,
        iteration: int,
        epoch: tuple[int, int],
        own: bool = True,
        previous: int | None = None,
    ) -> None:
        """Seal an image of ``iteration`` in a slot on ``node``; ``epoch``: number and start."""
        records = self.segments[kind].setdefault((node, rank, own), [])
        everything = (1 << self.window) - 1
        anchors = {"seg": 1 << iteration % self.window, "parked": everything, "boundary": 0}[kind]
        record = SlotRecord(
            generation=0,
            index=len(records),
            state=SlotState.SEALED,
            iteration=iteration,
            previous=iteration - 1 if previous is None else previous,
            sequence=iteration,
            image_len=10,
            anchors=anchors,
            phase=iteration % self.window,
            epoch=epoch[0],
            epoch_start=epoch[1],
            header_digest=hash((len(kind), content)).to_bytes(16, "little", signed=True),
        )
        records.append(record)
        self.content[node, self._name(kind, rank, own), record.index] = content

    def holdings(self, kind: str) -> list[HeldRecords]:
        count = 1 if kind == "boundary" else self.window
        return [
            HeldRecords(node, self._name(kind, rank, own), own, rank, count, "t", 4096, tuple(records))
            for (node, rank, own), records in self.segments[kind].items()
        ]

    def read(self, piece: SnapshotToLoad, lost: set[str]) -> Any:
        """What all its copies hold."""
        found = {self.content[s.node, s.segment, s.index] for s in piece.sources}
        assert len(found) == 1, f"copies of {piece.record} differ"
        assert not {s.node for s in piece.sources} & lost
        return found.pop()

    @staticmethod
    def _name(kind: str, rank: int, own: bool) -> str:
        return f"r{rank}.{kind}" if own else f"r{rank}~copy.{kind}"


def recorded(history: History, rank: int, iteration: int) -> tuple[State, Numbers]:
    """A snapshot: only what it anchors, and the generator, may be read from the state; compute
    weights are there of all.
    """
    state = history.states[iteration][rank]
    return state, state.compute


class Execution:
    """Runs a plan iteration by iteration, as the ranks of a restart would."""

    def __init__(
        self, shape: Shape, store: Store, plan: LocalizedPlan, salts: Sequence[int], lost: set[str]
    ) -> None:
        self._shape, self._store, self._plan, self._salts = shape, store, plan, salts
        self._lost = lost
        self._full: dict[int, list[int | None]] = {}  # None: frozen
        self._compute: dict[int, list[int]] = {}
        self._rng: dict[int, int] = {}

    def run(self) -> list[State]:
        """The states of all ranks where they meet."""
        ranks = range(self._shape.world_size)
        assert sorted(self._plan.per_rank) == list(ranks)
        first = min(plan.start for plan in self._plan.per_rank.values())
        for iteration in range(first, self._plan.resume + 1):
            for rank in ranks:
                self._top(rank, iteration)
            if iteration < self._plan.resume:
                self._step(iteration)
        return [self._dense(rank) for rank in ranks]

    def _dense(self, rank: int) -> State:
        full = self._full[rank]
        assert all(f is not None for f in full), f"rank {rank} is not dense"
        return State(tuple(f for f in full if f is not None), self._rng[rank])

    def _runs(self, rank: int, iteration: int) -> bool:
        return self._plan.per_rank[rank].start <= iteration

    def _top(self, rank: int, iteration: int) -> None:
        """Load what is loaded at the top of this iteration."""
        plan = self._plan.per_rank[rank]
        if iteration == plan.start:
            self._full[rank] = [None] * self._shape.window
            self._compute[rank] = [0] * self._shape.window
        if plan.kind is RankKind.REPLAYS:
            if plan.start <= iteration <= plan.exact_at:
                self._load_snapshot(rank, plan.pieces, iteration)
        elif iteration == plan.start:
            state: State = self._store.read(plan.pieces[0], self._lost)
            assert plan.exact_at == plan.start == plan.pieces[0].record.iteration
            self._full[rank], self._compute[rank] = list(state.full), list(state.compute)
            self._rng[rank] = state.rng
            if plan.kind is RankKind.COPIED:
                assert plan.pieces[1].record.iteration == plan.start
                own: State = self._store.read(plan.pieces[1], self._lost)[0]
                self._rng[rank] = own.rng
        if iteration == plan.exact_at:
            self._dense(rank)

    def _load_snapshot(self, rank: int, pieces: Sequence[SnapshotToLoad], iteration: int) -> None:
        found = [p for p in pieces if p.record.iteration == iteration]
        if not found:
            return
        (piece,) = found
        state, compute = self._store.read(piece, self._lost)
        if iteration == self._plan.per_rank[rank].start:
            self._rng[rank] = state.rng
        assert self._rng[rank] == state.rng, f"rank {rank}, iteration {iteration}: generator"
        for o in range(self._shape.window):
            if self._full[rank][o] is not None:
                assert self._compute[rank][o] == compute[o], f"rank {rank}, iteration {iteration}"
                continue
            self._compute[rank][o] = compute[o]
            if piece.record.anchors >> o & 1:
                self._full[rank][o] = state.full[o]

    def _step(self, iteration: int) -> None:
        running = [r for r in self._plan.per_rank if self._runs(r, iteration)]
        salt = self._salts[iteration]
        sent = {r: sent_by(tuple(self._compute[r]), self._rng[r], iteration, salt) for r in running}
        local = {}
        for rank in running:
            received = [
                sent[n] if n in sent else self._fed(rank, n, iteration) for n in self._shape.neighbours(rank)
            ]
            local[rank] = hash((sent[rank], *received))
        for rank in running:
            grad = gradient(self._shape, rank, local)  # KeyError: it waits for one who does not run
            self._advance(rank, grad)

    def _fed(self, rank: int, neighbour: int, iteration: int) -> int:
        feeds = [f for f in self._plan.per_rank[rank].feeds if f.neighbour == neighbour]
        assert len(feeds) == 1, f"rank {rank} waits for rank {neighbour} in iteration {iteration}"
        (feed,) = feeds
        assert feed.first <= iteration < feed.end
        piece = feed.pieces[iteration - feed.first]
        assert piece.record.iteration == iteration
        content: int = self._store.read(piece, self._lost)
        return content

    def _advance(self, rank: int, grad: int) -> None:
        full = self._full[rank]
        for o, f in enumerate(full):
            if f is not None:
                full[o] = hash((f, grad, o))
                self._compute[rank][o] = hash((full[o], 11))
        self._rng[rank] = hash((self._rng[rank], 12))


@dataclass
class World:
    """A job that failed, and what is left of it."""

    shape: Shape
    store: Store
    truth: History
    facts: dict[int, RankFacts]
    lost: set[str]
    epoch: int  # the newest


def random_world(rng: random.Random, *, domains_max: int = 5) -> World:
    """A job of 2 to 5 domains (or fewer) in a row or a ring, with abandoned histories, gaps, old
    parks, and lost nodes.
    """
    shape = random_shape(rng, domains_max)
    length = rng.randint(5, 9)  # the last iteration of which there may be a state
    left_at = rng.choice([None, rng.randint(1, length - 1)])
    salts = [7] * length
    truth = History(shape, salts)
    store = Store(shape.window)
    epochs = [(5, -1)]
    if left_at is not None:
        abandoned = History(shape, [7] * left_at + [8] * (length - left_at))
        for rank in range(shape.world_size):
            _fill(store, rng, abandoned, rank, range(left_at, length + 1), epochs[0], 0.7, stale=True)
        epochs.append((6, left_at))
    stop = length - 1
    for members in shape.domains:
        ends_at = stop + rng.randint(0, 1)
        mixed = rng.random() < 0.15
        for rank in members:
            mine = stop + rng.randint(0, 1) if mixed else ends_at
            _fill_rank(store, rng, truth, rank, mine, epochs)
    lost = {n for n in set(shape.nodes) if rng.random() < 0.2}
    facts = {
        r: shape.facts(r)
        for r in range(shape.world_size)
        if shape.nodes[r] not in lost and rng.random() < 0.95
    }
    return World(shape, store, truth, facts, lost, epochs[-1][0])


def random_shape(rng: random.Random, domains_max: int) -> Shape:
    count = rng.randint(2, domains_max)
    domains: list[Numbers] = []
    for _ in range(count):
        first = sum(map(len, domains))
        domains.append(tuple(range(first, first + rng.choice([1, 1, 2, 2, 3]))))
    beside = [(d, d + 1) for d in range(count - 1)]
    if rng.random() < 0.2 and count > 2:
        beside.append((0, count - 1))
    world_size = sum(map(len, domains))
    per_node = rng.choice([1, 1, 2])
    return Shape(
        tuple(domains),
        tuple(beside),
        tuple(rng.random() < 0.6 for _ in domains),
        rng.choice([1, 2, 2, 3, 3]),
        tuple(f"n{r // per_node}" for r in range(world_size)),
    )


def _fill_rank(
    store: Store,
    rng: random.Random,
    truth: History,
    rank: int,
    stop: int,
    epochs: Sequence[tuple[int, int]],
) -> None:
    """What a rank that was cut off in iteration ``stop`` left behind, in the history that counts."""
    left_at = epochs[-1][1] if len(epochs) > 1 else None
    kept = rng.choice([1.0, 0.95, 0.8])
    if left_at is not None:
        _fill(store, rng, truth, rank, range(left_at + 1), epochs[0], kept)
        # A rank that ran apart before `left_at` recorded in the new epoch.
        since = max(0, left_at - rng.choice([-1, 0, 0, 2]))
        _fill(store, rng, truth, rank, range(since, stop + 1), epochs[1], kept)
    else:
        _fill(store, rng, truth, rank, range(stop + 1), epochs[0], kept)
    node = truth.shape.nodes[rank]
    for iteration, likely in ((rng.randint(0, stop), 0.15), (stop, 0.85)):
        if rng.random() < likely:
            epoch = epochs[0] if left_at is not None and iteration <= left_at else epochs[-1]
            state = truth.states[iteration][rank]
            store.put("parked", node, rank, state, iteration=iteration, epoch=epoch)


def _fill(
    store: Store,
    rng: random.Random,
    history: History,
    rank: int,
    iterations: range,
    epoch: tuple[int, int],
    kept: float,
    *,
    stale: bool = False,
) -> None:
    """Snapshots of these iterations; logs of them but the last, unless they are stale."""
    nodes = history.shape.nodes
    for t in iterations:
        beyond = t == iterations[-1]
        previous = -1 if rng.random() < 0.05 else None
        for node, own, likely in ((nodes[rank], True, kept), (rng.choice(nodes), False, 0.4)):
            if not (stale and t == iterations[0]) and rng.random() < likely:
                content = recorded(history, rank, t)
                store.put(
                    "seg",
                    node,
                    rank,
                    content,
                    iteration=t,
                    epoch=epoch,
                    own=own,
                    previous=previous,
                )
            if not beyond and rng.random() < likely:
                sent = history.sent(rank, t)
                store.put("boundary", node, rank, sent, iteration=t, epoch=epoch, own=own)
        if stale and rng.random() < 0.1:
            state = history.states[t][rank]
            if t > iterations[0]:
                store.put("parked", nodes[rank], rank, state, iteration=t, epoch=epoch)
