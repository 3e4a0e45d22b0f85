"""A cluster in one process: replication, the floor and recovery under seeded faults, on a simulated clock.

Real are the cores: `ckptd.core.replication.replicator`, `ckptd.core.replication.replicas`,
`ckptd.core.replication.known_runs`, `ckptd.core.replication.floor`, `ckptd.core.placement`,
`ckptd.core.slots.ring` and `ckptd.core.recovery.global_plan`. Played are machines, memory, daemons,
the network, trainers in lockstep, and fate:

    network     time and messages        checks      what is promised (read this first)
    hosts       replicas for peers       senders     around a rank's replicator
    runs        membership, floor        training    snapshots and generations
    recovering  the job's end and return

Each is a layer over the one before it. A snapshot's content is a value: which state of which history it
is, for which rank; so a wrong, torn or mixed byte is seen at once. Histories form a tree: a recovery at
iteration e branches off there.
"""

from __future__ import annotations

import heapq
from collections import Counter
from typing import Protocol, TypeVar

from ckptd.core.slots.slots import SlotState
from tests.simulation.model import DEADLINE_S, TICK_S, Daemon, Node, Record, Trainer, WorldConfig
from tests.simulation.recovering import Recovering

__all__ = ["World", "WorldConfig", "play", "played"]


class Playable(Protocol):
    """A world that can be played."""

    now_s: float
    trace: list[str]
    seen: Counter[str]

    def play(self) -> None: ...


W = TypeVar("W", bound=Playable)
_LEAST_QUIET_S = 4.0  # of what follows the last fault, before one asks whether all is well


class World(Recovering):
    """One seed."""

    def __init__(self, seed: int, config: WorldConfig | None = None) -> None:
        super().__init__(seed, config or WorldConfig())
        self._make_nodes()
        self._make_ranks()
        self._init_job()
        self._init_runs()
        self._init_training()
        self.growth_refused = self.rng.choice((0.0, 0.0, 0.4, 0.95))
        self.capacity_matters = self.rng.random() < 0.2
        if self.capacity_matters:
            for node in self.nodes.values():
                node.capacity = self.rng.choice((None, 8, 14, 24))
        for name in self.nodes:
            self.start_daemon(name)
        self.start_job(-1)

    def _make_nodes(self) -> None:
        kind = self.rng.random()
        self.alone = kind < 0.08
        self.replicas = 0 if kind < 0.22 else self.rng.randint(1, 2)
        count = 1 if self.alone else self.rng.randint(2 if self.replicas < 2 else 3, 6)
        racks = self.rng.randint(1, 4)
        for number in range(count):
            labels = {"zone": f"{self.rng.randint(0, 1)}", "rack": f"{self.rng.randrange(racks)}"}
            kept = {k: v for k, v in labels.items() if self.rng.random() < 0.8}
            self.nodes[f"n{number}"] = Node(f"n{number}", kept)

    def _make_ranks(self) -> None:
        names = list(self.nodes)
        spares = self.rng.randint(0, 1) if len(names) > 3 else 0
        self.homes = {}
        for name in names[: len(names) - spares]:
            most = 4 if self.alone else 2 if len(names) < 5 else 1
            for _ in range(self.rng.randint(1, most)):
                self.homes[len(self.homes)] = name
        longest = self.rng.randint(1, 4)
        alike = self.rng.random() < 0.45
        windows = [longest if alike else self.rng.randint(1, longest) for _ in self.homes]
        self.span = max(windows)
        self.trainers = {rank: Trainer(window, 0) for rank, window in enumerate(windows)}

    # Faults.

    def crash_daemon(self, name: str) -> None:
        node = self.nodes[name]
        if node.daemon is None:
            return
        self.seen["daemon crashed"] += 1
        self.tell(f"{name}: daemon crashes")
        self._end_daemon(node)
        for segment in node.segments.values():
            for slot in segment.slots:
                slot.readers = 0
        self.later(self.rng.uniform(0.2, 6.0), lambda: self.start_daemon(name))
        self.links_changed()

    def _end_daemon(self, node: Node) -> None:
        if node.daemon is not None:
            node.daemon.tickets.clear()  # and what was to happen to them later does not
            node.daemon = None

    def start_daemon(self, name: str) -> None:
        node = self.nodes[name]
        if node.daemon is not None or not node.up:
            return
        self.tell(f"{name}: daemon starts")
        for segment in node.segments.values():
            for slot in segment.slots:
                state = slot.record.state
                if not segment.own and state in (SlotState.FILLING, SlotState.FILLED):
                    segment.move(slot.record.index, SlotState.FREE)
        daemon = node.daemon = Daemon.start(next(self.count))
        for epoch, (start, _) in node.record.epochs.items():
            self.note_epoch(daemon, name, epoch, start)
        for peer in self.nodes:
            if peer != name and (boot := self.boot_of(name, peer)) != -1:
                daemon.peers[peer] = boot
        self.later(self.rng.uniform(0.0, TICK_S), lambda: self.tick(name, daemon))
        if self.now_s:
            self.join_all(name)
        self.links_changed()

    def destroy(self, name: str) -> None:
        node = self.nodes[name]
        if not node.up:
            return
        self.seen["destroyed"] += 1
        self.tell(f"{name}: destroyed")
        self._end_daemon(node)
        node.up, node.life, node.segments = False, node.life + 1, {}
        node.record = Record()
        self.changed = True
        self.later(self.rng.uniform(3.0, 10.0), lambda: self.replace_machine(name))
        self.links_changed()
        if name in self.homes.values():
            self.stop_job(f"{name} destroyed")

    def replace_machine(self, name: str) -> None:
        if not self.nodes[name].up:
            self.nodes[name].up = True
            self.start_daemon(name)

    def cut_off(self, name: str, seconds: float, job_too: bool) -> None:
        self.seen["cut off"] += 1
        self.tell(f"{name}: cut off for {seconds:.1f} s{' with its ranks' if job_too else ''}")
        self.cut.add(name)
        self.links_changed()
        self.later(seconds, lambda: self.heal(name))
        if job_too and name in self.homes.values():
            self.stop_job(f"{name} cut off")

    def heal(self, name: str) -> None:
        if name in self.cut:
            self.tell(f"{name}: healed")
            self.cut.discard(name)
            self.links_changed()

    def fault(self) -> None:
        name = self.rng.choice(sorted(self.nodes))
        draw = self.rng.random()
        node = self.nodes[name]
        if draw < 0.25:
            self.crash_daemon(name)
        elif draw < 0.35:
            # Without replicas a machine that is lost is the end of the story: tell it less often.
            if self.replicas or self.rng.random() < 0.2:
                self.destroy(name)
                if self.rng.random() < 0.2:
                    self.destroy(self.rng.choice(sorted(self.nodes)))
        elif draw < 0.60:
            self.cut_off(name, self.rng.uniform(0.5, 2.5 * DEADLINE_S), self.rng.random() < 0.3)
        elif draw < 0.70:
            node.delay_s = self.rng.choice((0.1, 0.5, 2.0))
        elif draw < 0.78:
            node.full = not node.full
        elif draw < 0.86:
            node.corrupts = not node.corrupts
        else:
            self.stop_job("a trainer died")
        self.later(self.rng.expovariate(1 / 3.5), self.fault)

    # The play.

    def settle(self) -> None:
        """(f) Nothing happens any more: replication catches up, and what is unneeded goes (e)."""
        self.calm, self.drift_s = True, 0.0
        for name, node in self.nodes.items():
            node.delay_s, node.full, node.corrupts = 0.05, False, False
            node.few_files = node.no_space = node.tears = False
            node.frozen_s = node.halted_s = 0.0
            self.heal(name)
            self.replace_machine(name)
            self.start_daemon(name)
        if self.one_way:
            self.one_way.clear()
            self.links_changed()
        self.tell("calm")
        end_s, wrong = self.now_s + self.config.quiet_s, ""
        self.run_until(self.now_s + _LEAST_QUIET_S)
        while (wrong := self._unsettled()) and self.now_s < end_s:
            self.run_until(min(self.now_s + TICK_S, end_s))
        assert not wrong, wrong

    def _unsettled(self) -> str:
        """What is not yet as (e) and (f) say; "": nothing."""
        if not self.running:
            return "(f) the job does not come back"
        newest = self.iteration - 1
        if self.drawn_away(self.told()[2]):
            return ""  # hosts refuse what is stale by the other history
        for name in sorted(set(self.homes.values())):
            daemon = self.nodes[name].daemon
            assert daemon is not None
            if newest - daemon.run.promise.floor > 3:
                told = {r: s.core.replicated for r, s in daemon.run.senders.items()}
                return f"(f) {name}: {daemon.run.promise}, newest {newest}, {told}"
        for node in self.nodes.values():
            replicas = Counter(s.rank for s in node.segments.values() if not s.own)
            if max(replicas.values(), default=0) > 6:
                return f"(e) {node.name}: {replicas}"
        return ""

    def play(self) -> None:
        self.later(self.rng.uniform(0.5, 6.0), self.fault)
        self.run_until(self.config.chaos_s)
        self.queue = [entry for entry in self.queue if entry[2] != self.fault]
        heapq.heapify(self.queue)
        self.settle()


def played(world: W, what: str) -> W:
    """The world, played to its end; a broken promise carries ``what``, the time and the trace."""
    try:
        world.play()
    except Exception as error:
        error.add_note("\n".join(world.trace[-60:]))
        error.add_note(f"{what}, time {world.now_s:.3f}, {dict(world.seen)}")
        raise
    return world


def play(seed: int, config: WorldConfig | None = None) -> World:
    """The world of this seed, played to its end."""
    return played(World(seed, config), f"seed {seed}")
