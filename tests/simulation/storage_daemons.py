"""A machine with memory, the daemon's third tier, and its store keeper, for `tests.simulation.storage_world`.

Real are `ckptd.persistence.tier` with its persisters, and `ckptd.persistence.keeper` with all that it uses;
played are their threads and clocks (`played`), the slots that they read, and the process between them
(`PlayedChild`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

from ckptd.config.settings import DaemonConfig
from ckptd.core.recovery.held import HeldRecords
from ckptd.core.sessions import RankKey
from ckptd.core.slots.slots import SlotRecord, SlotState
from ckptd.event_log import EventLog
from ckptd.holdings import operators_id
from ckptd.node_context import NodeContext
from ckptd.persistence import keeper, rank_store, run_in_store, run_store, tier
from ckptd.persistence import keeper_wire as w
from ckptd.persistence.keeper_client import AWAY
from ckptd.persistence.run_in_store import SharedLook
from ckptd.storage.checkpoints.upload_plan import PartLimits, plan_upload
from ckptd.storage.stores.resilience import Resilient, RetryTiming
from tests.ckptd import running
from tests.simulation.faulty_store import Bucket, StoreClient, Trouble
from tests.simulation.played_threads import PlayedPool, PlayedThreading, PlayedTime, Process, Threads
from tests.simulation.storage_slots import PlayedFiles, PlayedHolds, Segment, Slot
from tests.storage.samples import JOB, RUN, Sample

__all__ = ["Machine", "World", "played"]

_OPERATORS = 2
_AGAIN_S, _AGAIN_MOST_S = 0.5, 30.0  # until a keeper is started again


class World(Protocol):
    """What a machine needs of its world."""

    threads: Threads
    bucket: Bucket
    settings: DaemonConfig
    now_s: float
    world_size: int
    span: int
    seen: Counter[str]

    def later(self, delay_s: float, what: Callable[[], None]) -> None: ...
    def skips(self, delay_s: float) -> bool: ...
    def sample(self, rank: int, record: SlotRecord) -> Sample: ...
    def homes_on(self, name: str) -> list[int]: ...
    def heard(self, message: object) -> None: ...


@dataclass(eq=False)
class Machine:
    """Its segments survive its daemon, and so does what it knows of epochs."""

    name: str
    world: World
    wrong_ns: int = 0  # by how much its clock is wrong
    up: bool = True
    away: bool = False  # from the other machines; not from the store
    segments: list[Segment] = field(default_factory=list)
    replicas: list[Segment] = field(default_factory=list)
    epochs: dict[int, tuple[int, int]] = field(default_factory=dict)  # its start, and which it follows
    forgotten: int = -1  # the newest epoch of what a person gave up
    trouble: Trouble = field(default_factory=lambda: Trouble(slow_s=0.0))
    tier: tier.StorageTier | None = None
    child: PlayedChild | None = None
    events: EventLog = field(default_factory=lambda: EventLog(1000))
    buffers: dict[str, bytearray] = field(default_factory=dict)

    def sample(self, rank: int, record: SlotRecord) -> Sample:
        """The image of a snapshot."""
        return self.world.sample(rank, record)

    # As a `SegmentStore`.

    @property
    def node_id(self) -> str:
        return self.name

    def of_rank(self, key: RankKey) -> list[Segment]:
        return [segment for segment in self.segments if segment.rank == key.rank]

    def mark_of(self, key: RankKey) -> object:
        return [(segment.generation, tuple(segment.records)) for segment in self.of_rank(key)]

    def get(self, key: RankKey, generation: int) -> Segment | None:
        return next((s for s in self.of_rank(key) if s.generation == generation), None)

    def reserve(self, rank: int, generation: int, num_slots: int, window: int) -> Segment:
        """A further segment; who calls adds it to what there is."""
        told = running.descriptor(
            JOB,
            RUN,
            rank,
            world_size=self.world.world_size,
            generation=generation,
            window=window,
            num_operators=_OPERATORS,
        )
        slots = [Slot(SlotRecord(generation, i, SlotState.FREE)) for i in range(num_slots)]
        path = Path(f"/played/{self.name}/r{rank}~g{generation}")
        return Segment(rank, generation, slots, told, path)

    def held(self) -> list[HeldRecords]:
        """What it holds, for a recovery."""
        return [
            HeldRecords(
                self.name,
                str(segment.path),
                segment not in self.replicas,
                segment.rank,
                _OPERATORS,
                operators_id(segment.descriptor),
                segment.slot_bytes,
                tuple(
                    replace(r, header_digest=self.world.sample(segment.rank, r).header_digest)
                    for r in segment.records
                    if r.sealed
                ),
            )
            for segment in (*self.segments, *self.replicas)
        ]

    # Its daemon.

    def start_daemon(self) -> None:
        if self.tier is not None or not self.up:
            return
        clock = lambda: self.world.now_s
        post = lambda what: self.world.later(0.0, what)
        node = NodeContext(self.world.settings, self, self.events, post, clock=clock)  # type: ignore[arg-type]
        with patch.object(tier, "StoreChild", partial(PlayedChild, self)):
            self.tier = tier.StorageTier(
                node,
                ranks_of=lambda job, run: self.world.homes_on(self.name),
                span_of=lambda job, run: self.world.span,
                replicas=(),
            )

    def end_daemon(self) -> None:
        if self.tier is not None:
            self.tier.close()
            self.tier = None

    def wall_ns(self) -> int:
        return self.world.bucket.time_ns() + self.wrong_ns


class PlayedChild:
    """`ckptd.persistence.keeper_client.StoreChild` with a keeper whose threads are played."""

    def __init__(self, machine: Machine, configure: w.Configure, owner: Any, **_: object) -> None:
        self._machine, self._configure, self._owner = machine, configure, owner
        self._world = machine.world
        self._numbers = itertools.count(1)
        self._asked: dict[int, tuple[Callable[[Any], None], Callable[[str, str], None]]] = {}
        self._process: Process | None = None
        self._keeper: keeper.Keeper | None = None
        self._again_s, self._start_s = _AGAIN_S, 0.0
        self._closed = False
        machine.child = self
        self._start()

    @property
    def pid(self) -> int:
        return 0 if self._process is None else 1

    @property
    def process(self) -> Process | None:
        """The keeper's; None if it is not running."""
        return self._process

    def next_id(self) -> int:
        return next(self._numbers)

    def ask(self, message: Any, done: Callable[[Any], None], refused: Callable[[str, str], None]) -> None:
        if self._process is None:
            self._world.later(0.0, lambda: refused(AWAY, "the store keeper is not running"))
            return
        self._asked[message.id] = done, refused
        self.tell(message)

    def tell(self, message: Any) -> None:
        process, served = self._process, self._keeper
        if process is not None and served is not None:
            self._world.later(0.01, lambda: served.handle(message) if process.alive else None)

    def tick(self) -> None:
        if self._process is None and not self._closed and self._world.now_s >= self._start_s:
            self._start()

    def close(self) -> None:
        self._closed = True
        self._asked.clear()
        self.kill()

    def kill(self) -> None:
        """The keeper dies, wherever it is."""
        process, self._process, self._keeper = self._process, None, None
        if process is None:
            return
        self._world.threads.kill(process)
        self._start_s = self._world.now_s + self._again_s
        self._again_s = min(2 * self._again_s, _AGAIN_MOST_S)
        asked, self._asked = self._asked, {}
        if not self._closed:
            for _, refused in asked.values():
                refused(AWAY, "the store keeper is gone")
            self._owner.keeper_died("it was killed")

    def _start(self) -> None:
        process, world = Process(), self._world
        self._process = process
        client = StoreClient(world.bucket, lambda: self._machine.trouble, self.kill)
        pool = lambda most, **_: PlayedPool(world.threads, process, most)
        with (
            patch.object(keeper, "open_store", lambda *_: client),
            patch.object(keeper, "ThreadPoolExecutor", pool),
            patch.object(keeper, "SlotFiles", partial(PlayedFiles, self._machine)),
        ):
            send = lambda message: self._sent(process, message)
            self._keeper = keeper.Keeper(self._configure, send, wall_ns=self._machine.wall_ns)

    def _sent(self, process: Process, message: Any) -> None:
        if process.alive:
            self._world.later(0.01, lambda: self._arrived(process, message))

    def _arrived(self, process: Process, message: Any) -> None:
        if process is not self._process:
            return
        self._world.heard(message)
        match message:
            case w.KeeperEvent():
                assert message.kind != "internal", message.message
                self._world.seen[f"told: {message.kind}"] += 1
                self._owner.keeper_event(message)
            case w.Settled():
                self._owner.settled(message)
            case w.RankFenced():
                self._owner.fenced(message)
            case _ if message.id in self._asked:
                done, refused = self._asked.pop(message.id)
                if isinstance(message, w.KeeperFailed):
                    assert message.code != w.FailureCode.INTERNAL, message.reason
                    refused(message.code, message.reason)
                else:
                    done(message)


@contextmanager
def played(world: World) -> Iterator[None]:
    """The product's threads and clocks are the world's meanwhile."""
    threading, now = PlayedThreading(world.threads), PlayedTime(world)
    timing = RetryTiming(now.monotonic, world.threads.pause, world.bucket.rng)
    replaced: list[tuple[Any, str, Any]] = [
        (keeper, "threading", threading),
        (keeper, "Resilient", partial(Resilient, timing=timing)),
        (rank_store, "threading", threading),
        (rank_store, "time", now),
        (rank_store, "plan_upload", partial(plan_upload, limits=PartLimits(64))),
        (run_in_store, "threading", threading),
        (run_in_store, "time", now),
        (run_store, "threading", threading),
        (run_store, "secrets", now),
        (run_store, "SharedLook", partial(SharedLook, clock=now.monotonic)),
        (tier, "SlotHolds", PlayedHolds),
        (tier, "records_of", lambda segments: [r for s in segments for r in s.records]),
    ]
    with ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(patch.object(owner, name, value))
        yield
