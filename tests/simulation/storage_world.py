"""A job whose checkpoints go to an object storage that fails in parts, on a played clock.

Real are persister, cadence and tier (`ckptd.core.persister`, `ckptd.persistence.tier`), the store keeper with
all that it uses, retention, catalog and manifests, and the recovery plan. Played are the rest:

    played_threads   the keeper's threads, one at a time    storage_checks   what is promised (read this first)
    faulty_store     requests that fail, and their effects  storage_daemons  a machine, its daemon, its keeper
    storage_slots    its memory                             storage_recovery the job's end and return
    storage_world    trainers and fate (here)

Each seed has some of the kinds of faults (`STRIKES`), as in `tests.simulation.swarm`. Memory is simple here:
each rank's ring, and a copy of its newest snapshots on another machine that may lag; `replication_world` plays
replication.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from ckptd.config.settings import DaemonConfig
from ckptd.core.persister import PersistPhase
from ckptd.core.sessions import RankKey
from ckptd.core.slots.ring import Remedy, choose_slot
from ckptd.core.slots.slots import SlotRecord, SlotState
from ckptd.storage.image_format import TensorEntry
from tests.simulation.faulty_store import Bucket, Trouble
from tests.simulation.model import WorldConfig
from tests.simulation.played_threads import Threads
from tests.simulation.replication_world import played as played_out
from tests.simulation.storage_checks import State
from tests.simulation.storage_daemons import Machine, played
from tests.simulation.storage_recovery import StorageRecovery
from tests.simulation.swarm import Strike, coverage_key, strikes_of
from tests.storage.samples import JOB, RUN, Sample, make_sample

__all__ = ["PHASES", "STRIKES", "StorageWorld", "play_storage"]

PHASES = ("first", "steady", "storing", "no keeper", "returned", "recovering")
_ENTRIES = [TensorEntry(f"t{n}", "U8", (200,)) for n in range(3)]
_SHARE = 0.4  # of the kinds of faults that a seed has
_AIMED = 0.4  # of all strikes
_CHAOS_STEPS, _FIRST_STEPS, _PAUSE_STEPS = 110.0, 3.0, 5.0
_CALM_S = 24 * 3600.0  # within which all must be well again
_PAUSE_S = 2.2 * 24 * 3600.0  # longer than what retention waits for
_WRONG_NS = 4 * 3600 * 10**9


class StorageWorld(StorageRecovery):
    """One seed."""

    def __init__(self, seed: int, config: WorldConfig | None = None) -> None:
        self.config = config or WorldConfig()
        self.rng = random.Random(f"storage/{seed}")
        self.now_s, self.queue, self.count = 0.0, [], itertools.count(1)  # type: ignore[var-annotated]
        self._end_s, self._done = -1.0, lambda: False  # of `run_until`
        self.trace: list[str] = []
        self.seen: Counter[str] = Counter()
        self.threads = Threads(self)
        self.bucket = Bucket(self.threads, self, random.Random(f"store/{seed}"))
        self.calm = self.ending = False
        self.step_s = self.rng.choice((10.0, 60.0, 600.0, 1800.0))
        self.settings = dataclasses.replace(
            DaemonConfig(),
            store="memory://",
            persist_every=self.rng.randint(1, 5),
            persist_every_s=self.rng.choice((0.0, 0.0, 300.0)),
            persist_keep_last=self.rng.randint(1, 3),
            persist_keep_every=self.rng.choice((0, 0, 10)),
            persist_threads=2,
        )
        self._init_checks()
        self._make_machines()
        self._init_recovery()
        fate = random.Random(f"storage fate/{seed}")
        drawn = {fault for fault in STRIKES if fate.random() < _SHARE} | {fate.choice(sorted(STRIKES))}
        drawn = drawn if self.config.among is None else set(self.config.among)
        self.fates = strikes_of(
            f"storage strikes/{seed}", drawn, _CHAOS_STEPS, first=_FIRST_STEPS, pause=_PAUSE_STEPS
        )
        self.faults = drawn if self.config.faults is None else set(self.config.faults)

    def _make_machines(self) -> None:
        names = [f"n{i}" for i in range(min(self.rng.randint(1, 3), self.config.most_nodes))]
        wrong = self.rng.random() < 0.3
        self.machines = {
            name: Machine(name, self, wrong_ns=self.rng.randint(-_WRONG_NS, _WRONG_NS) if wrong else 0)
            for name in names
        }
        self.world_size = self.rng.randint(1, 4)
        self.homes = {rank: names[rank % len(names)] for rank in range(self.world_size)}
        longest, alike = self.rng.randint(1, 3), self.rng.random() < 0.6
        self.windows = [longest if alike else self.rng.randint(1, longest) for _ in self.homes]
        self.span = max(self.windows)
        self.spare = self.rng.choice((0, 1, self.span, 2 * self.span))
        self.lag = self.rng.choice((0, 1, 4, 9))
        self.drifts = self.rng.random() < 0.4

    @property
    def nodes(self) -> dict[str, Machine]:
        """As `tests.simulation.swarm` calls them."""
        return self.machines

    @property
    def phase(self) -> str:
        """What the job, and its newest epoch, are doing."""
        if not self.running:
            return "recovering"
        tiers = [self.machines[home].tier for home in self.homes.values()]
        if any(tier is None or not tier.keeper_pid for tier in tiers):
            return "no keeper"
        if any(c.epoch == self.epoch for c in self.complete):
            return "steady" if all(tier is None or tier.idle for tier in tiers) else "storing"
        return "returned" if self.complete else "first"

    # Time.

    def later(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (self.now_s + delay_s, next(self.count), what))

    def skips(self, delay_s: float) -> bool:
        """For `played_threads`: `run_until` would go on to that time next."""
        at_s = self.now_s + delay_s
        if at_s > self._end_s or (self.queue and self.queue[0][0] <= at_s) or self._done():
            return False
        self.now_s = at_s
        return True

    def run_until(self, end_s: float, done: Callable[[], bool] = lambda: False) -> None:
        self._end_s, self._done = end_s, done
        while self.queue and self.queue[0][0] <= end_s and not done():
            self.now_s, _, what = heapq.heappop(self.queue)
            what()
        self.now_s = self.now_s if done() else end_s

    def tell(self, text: str) -> None:
        self.trace.append(f"{self.now_s:10.1f} {text}")

    def tick(self) -> None:
        for machine in self.machines.values():
            if machine.tier is not None:
                machine.tier.tick()
        self.later(max(2.0, self.step_s / 4) * (40 if self.paused else 1), self.tick)

    # Trainers.

    def step(self, run_id: int) -> None:
        if run_id != self.run_id or not self.running:
            return
        if self.ending:
            return
        if self.paused:
            self.later(self.step_s, lambda: self.step(run_id))
            return
        state = (self.epoch, self.iteration)
        for rank in self.homes:
            late_s = self.rng.uniform(0.0, 0.9 * self.step_s) if self.drifts else 0.0
            self.later(late_s, lambda rank=rank: self._boundary(rank, state, run_id))  # type: ignore[misc]
        self.iteration += 1
        self.later(self.step_s, lambda: self.step(run_id))

    def _boundary(self, rank: int, state: State, run_id: int) -> None:
        """A rank takes its snapshot."""
        machine = self.machines[self.homes[rank]]
        if run_id != self.run_id or not self.running:
            return
        segment = self.own(rank)[-1]
        choice = choose_slot(
            segment.records,
            2,
            busy={slot.record.key for slot in segment.slots if slot.readers},
            generation=segment.generation,
            epochs={self.epoch: self.epoch_start},
        )
        if choice.index is None and choice.remedy is Remedy.GROW and len(segment.slots) < 4 * self.span + 6:
            segment.grow()  # in place, and not by a generation
        if choice.index is None or self.chance(0.01):
            self.seen["skipped"] += 1
            self.previous[rank] = -1
            return
        slot, iteration = segment.slots[choice.index], state[1]
        assert not slot.readers, f"rank {rank} fills slot {choice.index}, which is being read"
        self.sequence[rank] += 1
        anchors = (3, 1 << iteration % 2, (1, 2, 0)[iteration % 3])[self.windows[rank] - 1]
        slot.record = SlotRecord(
            segment.generation,
            choice.index,
            SlotState.SEALED,
            iteration,
            self.previous[rank],
            self.sequence[rank],
            100,
            anchors=anchors,
            epoch=self.epoch,
            epoch_start=self.epoch_start,
        )
        self.states[rank, *slot.record.fill] = state
        self.previous[rank] = iteration
        self._replicate(rank, slot.record)
        if machine.tier is not None:
            machine.tier.changed(RankKey(JOB, RUN, rank))

    def _replicate(self, rank: int, record: SlotRecord) -> None:
        """Another machine has the newest but some of a rank's snapshots."""
        others = [m for m in self.machines.values() if m.up and not m.away and m.name != self.homes[rank]]
        waiting = self.copies.setdefault(rank, [])
        waiting.append(record)
        if len(waiting) <= self.lag or not others:
            return
        machine = min(others, key=lambda m: m.name)
        found = next((s for s in machine.replicas if s.rank == rank), None)
        if found is None:
            found = machine.reserve(rank, 1000, 0, self.windows[rank])
            machine.replicas.append(found)
        found.add(waiting.pop(0), most=2 * self.span + 1)

    def sample(self, rank: int, record: SlotRecord) -> Sample:
        """The image of a snapshot."""
        place = rank, *record.fill
        if place not in self.samples:
            assert place in self.states, f"(s4) nobody recorded {place}"
            rng = random.Random(repr(place))
            seeds = {
                "t0": 0,
                "t1": rng.choice((1, record.iteration)),
            }  # one is frozen, and alike on all ranks
            self.samples[place] = make_sample(
                record.iteration,
                previous=record.previous,
                rank=rank,
                seeds=seeds,
                entries=_ENTRIES,
                anchors=record.anchors,
                epoch=record.epoch,
                epoch_start=record.epoch_start,
                sequence=record.sequence,
            )
        return self.samples[place]

    def chance(self, share: float) -> bool:
        return not self.calm and self.rng.random() < share

    # Faults.

    def aim(self, strike: Strike) -> None:
        """Let it happen, now or in the middle of the next upload."""
        if random.Random(strike.seed).random() < _AIMED:
            self.bucket.at_next.append(partial(self.strike, strike))
        else:
            self.strike(strike)

    def strike(self, strike: Strike) -> None:
        if self.calm:
            return
        self.seen[coverage_key(strike.fault, self.phase)] += 1
        self.fate = random.Random(strike.seed)
        name = self.fate.choice(sorted(self.machines))
        self.tell(f"strike {strike.number}: {strike.fault}: {name} ({self.phase})")
        STRIKES[strike.fault](self, self.machines[name])

    def trouble(self, machine: Machine | None = None, **how: float) -> None:
        """The store, or one machine's way to it, is so for a while."""
        at = self.bucket.trouble if machine is None else machine.trouble
        before = {name: getattr(Trouble(), name) for name in how}
        for name, value in how.items():
            setattr(at, name, value)

        def over() -> None:
            for name, value in before.items():
                setattr(at, name, value)

        self.later(self.fate.choice((1.0, 4.0, 15.0)) * self.step_s, over)

    def end_daemon(self, machine: Machine) -> None:
        if machine.tier is not None:
            machine.end_daemon()
            self.later(self.fate.uniform(1.0, 2.0 * self.step_s), lambda: self.start_daemon(machine))

    def kill_keeper(self, machine: Machine) -> None:
        """At one of its next requests, before or after that takes effect."""
        machine.trouble.dies_in = self.fate.randint(1, 12)

    def stop_keeper(self, machine: Machine) -> None:
        """It is killed if it does not answer for 45 s."""
        if machine.child is not None and machine.child.process is not None:
            machine.child.process.stopped_s = self.now_s + self.fate.uniform(5.0, 44.0)

    def lose(self, *machines: Machine) -> None:
        """Their memory is gone, and with it what they knew."""
        for machine in machines:
            machine.end_daemon()
            machine.up, machine.segments, machine.replicas, machine.epochs = False, [], [], {}
            machine.forgotten = -1
            self.later(self.fate.uniform(5.0, 3.0 * self.step_s), partial(self.replace, machine))
        self.stop_job(f"{[m.name for m in machines]} lost")

    def replace(self, machine: Machine) -> None:
        if not machine.up:
            machine.up = True
            self.start_daemon(machine)

    def part(self, machine: Machine) -> None:
        """The others go on without it, and it with its uploads."""
        if len(self.machines) > 1:
            machine.away = True
            self.later(self.fate.uniform(1.0, 20.0) * self.step_s, lambda: setattr(machine, "away", False))
            self.stop_job(f"{machine.name} cut off")

    def go_back(self, _: Machine) -> None:
        """A person wants an earlier state."""
        self.back = True
        self.stop_job("to go back")

    def pause(self, _: Machine) -> None:
        """The trainers stand still for days."""
        self.paused = True
        self.later(_PAUSE_S, lambda: setattr(self, "paused", False))

    # The play.

    def play(self) -> None:
        with played(self):
            try:
                self._play()
            finally:
                for machine in self.machines.values():
                    machine.end_daemon()
                self.threads.close()

    def _play(self) -> None:
        for machine in self.machines.values():
            machine.start_daemon()
        self.begin_anew(-1)
        self.later(0.0, self.tick)
        for strike in self.fates:
            left_out = self.config.strikes is not None and strike.number not in self.config.strikes
            if strike.fault in self.faults and not left_out:
                self.later(strike.at_s * self.step_s, partial(self.aim, strike))
        self.run_until(_CHAOS_STEPS * self.step_s)
        self.settle()
        self.end()

    def settle(self) -> None:
        """(s6) The store is well, and so are all machines."""
        self.tell("calm")
        self.calm, self.paused, self.bucket.trouble = True, False, Trouble()
        for machine in self.machines.values():
            machine.trouble, machine.away = Trouble(slow_s=0.0), False
            self.replace(machine)
            self.start_daemon(machine)
        begun = self.iteration
        done = lambda: self.running and (self._durable() > begun or self._fenced())
        self.run_until(self.now_s + _CALM_S, done)
        if self.from_memory and self._fenced():
            self.seen["fenced by another history"] += (
                1  # that machines began which were away; now all are there
            )
            self.stop_job("a person starts it again")
            self.run_until(self.now_s + _CALM_S, lambda: self.running)
            self.run_until(self.now_s + 60.0)  # all have joined
            begun = self.iteration
            self.run_until(self.now_s + _CALM_S, done)
        assert self._durable() > begun, f"(s6) {self.iteration} of epoch {self.epoch}: {self._told()}"

    def _fenced(self) -> bool:
        tiers = [self.machines[home].tier for home in self.homes.values()]
        cores = [rank.core for tier in tiers if tier is not None for rank in tier._ranks.values()]
        return any(core.phase is PersistPhase.FENCED for core in cores)

    def _durable(self) -> int:
        return max((c.end for c in self.complete if c.epoch == self.epoch), default=-1)

    def end(self) -> None:
        """(s6) Training ends; then all memory is lost, and the job is started once more."""
        self.ending, last = True, self.iteration - 1
        self.run_until(self.now_s + 2 * self.step_s)
        for rank, home in self.homes.items():
            tier = self.machines[home].tier
            assert tier is not None
            tier.leave(RankKey(JOB, RUN, rank))
        self.run_until(
            self.now_s + _CALM_S, lambda: all(m.tier.idle for m in self.machines.values() if m.tier)
        )
        newest = self.newest_complete()
        flushed = newest is not None and newest.end == last
        assert flushed, f"(s6) {last} is not flushed but {newest}: {self._told()}"
        self.ending = False
        self.lose(*self.machines.values())
        self.run_until(self.now_s + _CALM_S, lambda: self.running)
        assert self.running, "(s6) the job does not come back"

    def _told(self) -> Mapping[str, object]:
        return {m.name: m.tier.states() for m in self.machines.values() if m.tier is not None}


STRIKES: dict[str, Callable[[StorageWorld, Machine], None]] = {
    "requests fail": lambda w, m: w.trouble(fails=w.fate.choice((0.1, 0.6))),
    "answers lost": lambda w, m: w.trouble(lost=w.fate.choice((0.1, 0.5))),
    "effects late": lambda w, m: w.trouble(late=w.fate.choice((0.1, 0.4))),
    "listings break": lambda w, m: w.trouble(torn=w.fate.choice((0.1, 0.6))),
    "store slow": lambda w, m: w.trouble(slow_s=w.fate.choice((5.0, 60.0))),
    "store away": lambda w, m: w.trouble(away=1),
    "store refuses": lambda w, m: w.trouble(refuses=1),
    "store full": lambda w, m: w.trouble(full=1),
    "machine cut from store": lambda w, m: w.trouble(m, away=1),
    "machine slow": lambda w, m: w.trouble(m, slow_s=40.0, fails=0.2),
    "keeper dies": StorageWorld.kill_keeper,
    "keeper stopped": StorageWorld.stop_keeper,
    "daemon dies": StorageWorld.end_daemon,
    "trainer dies": lambda w, m: w.stop_job("a trainer died"),
    "machine lost": StorageWorld.lose,
    "all memory lost": lambda w, m: w.lose(*w.machines.values()),
    "machine parted": StorageWorld.part,
    "gone back": StorageWorld.go_back,
    "long pause": StorageWorld.pause,
}


def play_storage(seed: int, config: WorldConfig | None = None) -> StorageWorld:
    """The world of this seed, played to its end."""
    return played_out(StorageWorld(seed, config), f"storage seed {seed}")
