"""Swarm testing: each seed has a random subset of all kinds of faults, so that those which are common do not
hide what the rare ones show by themselves.

A *condition* holds from the start (clocks that differ, ranks that are apart). A *strike* is one fault at one
time. All strikes are drawn at the start, each with a seed of its own: one can be left out, and those that are
left are as before (`tests.simulation.shrinker`). Which fault met which phase of the job is counted in
``seen``, as "fault x phase".
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ckptd.core.slots.slots import SlotRecord, SlotState
from tests.simulation.model import (
    DEADLINE_S,
    DaemonDied,
    Hint,
    Node,
    Record,
    Rotten,
    Segment,
    Slot,
    WorldConfig,
)
from tests.simulation.replication_world import World, played
from tests.simulation.torn_hints import torn

__all__ = ["CONDITIONS", "PHASES", "STRIKES", "Strike", "Swarm", "coverage_key", "play_swarm", "strikes_of"]

PHASES = ("first", "steady", "lagging", "degraded", "returned", "recovering")
_SHARE = 0.35  # of the kinds of faults that a seed has
_CHAOS_S = 22.0
_FIRST_S = 2.0
_PAUSE_S = 2.2  # the mean between two strikes


class Strike(NamedTuple):
    """One fault: its number, its kind, when it happens, and what its details are drawn from."""

    number: int
    fault: str
    at_s: float
    seed: int


def coverage_key(fault: str, phase: str) -> str:
    """Under which name it is counted that the fault met the phase."""
    return f"{fault} x {phase}"


class Swarm(World):
    """One seed with the faults that it draws, or those of ``config``."""

    def __init__(self, seed: int, config: WorldConfig | None = None) -> None:
        told = config or WorldConfig()
        fate = random.Random(f"{seed}/fate")
        drawn = {fault for fault in (*CONDITIONS, *STRIKES) if fate.random() < _SHARE}
        drawn.add(fate.choice(sorted(STRIKES)))
        drawn = drawn if told.among is None else set(told.among)
        self.faults = drawn if told.faults is None else set(told.faults)
        chaos_s = min(told.chaos_s, _CHAOS_S)
        self.fates = strikes_of(f"{seed}/strikes", drawn & STRIKES.keys(), chaos_s)
        super().__init__(seed, dataclasses.replace(told, chaos_s=chaos_s))
        self.growth_refused = 0.0
        self.breaks = 0.0
        self.lost = self.doubled = 0.0
        for condition in sorted(self.faults & CONDITIONS.keys()):
            CONDITIONS[condition](self, random.Random(f"{seed}/{condition}"))

    def _make_nodes(self) -> None:
        super()._make_nodes()
        least = 1 if self.alone else 2 if self.replicas < 2 else 3
        for name in list(self.nodes)[max(least, self.config.most_nodes) :]:
            del self.nodes[name]

    @property
    def phase(self) -> str:
        """What the job is doing."""
        floor = self.known_floor()
        if not self.running:
            return "recovering"
        if floor < max(self.epoch_start, 0):
            return "first" if self.epoch_start < 0 else "returned"
        daemons = [self.nodes[name].daemon for name in set(self.homes.values())]
        if any(daemon is None or daemon.run.dead for daemon in daemons):
            return "degraded"
        return "steady" if self.iteration - floor <= 4 else "lagging"

    def play(self) -> None:
        for strike in self.fates:
            left_out = self.config.strikes is not None and strike.number not in self.config.strikes
            if strike.fault in self.faults and not left_out:
                self.later(strike.at_s, lambda strike=strike: self.strike(strike))  # type: ignore[misc]
        self.run_until(self.config.chaos_s)
        self.settle()

    def strike(self, strike: Strike) -> None:
        """Let it happen."""
        if self.calm:
            return
        for fault in (strike.fault, *sorted(self.faults & CONDITIONS.keys())):
            self.seen[coverage_key(fault, self.phase)] += 1
        self.tell(f"strike {strike.number}: {strike.fault} ({self.phase})")
        rng = random.Random(strike.seed)
        name = rng.choice(sorted(self.nodes))
        STRIKES[strike.fault](self, self.nodes[name], rng)

    def until(self, seconds: float, begin: Callable[[bool], None]) -> None:
        """A state of a machine that ends after a while."""
        begin(True)
        self.later(seconds, lambda: begin(False))

    # Daemons.

    def lose_record(self, node: Node, rng: random.Random) -> None:
        """The daemon dies, and its record of the run cannot be read afterwards."""
        self.crash_daemon(node.name)
        if node.up:
            node.record = Record(lost=True)

    def freeze(self, node: Node, rng: random.Random) -> None:
        """The daemon is stopped with its sockets open; when it goes on it has heard of nobody for as long."""
        lasts_s = rng.uniform(0.3, 3.0 * DEADLINE_S)
        daemon = node.daemon
        node.frozen_s = max(node.frozen_s, self.now_s + lasts_s)
        self.links_changed()

        def thaw() -> None:
            self.links_changed()
            if node.daemon is None or node.daemon is not daemon or lasts_s < DEADLINE_S:
                return
            for peer in sorted(self.nodes):
                if peer != node.name and peer not in daemon.lost:
                    daemon.lost.add(peer)
                    self.peer_lost(node.name, peer)

        self.later(lasts_s + 0.002, thaw)

    def tear_hint(self, node: Node, rng: random.Random) -> None:
        """The daemon dies between two stores of its next hint, or of its first one in the next epoch."""
        node.tears, node.tears_late = True, rng.random() < 0.5

    def write_hint(self, name: str, segment: Segment, hint: Hint) -> None:
        node = self.nodes[name]
        if not node.tears or (node.tears_late and hint.epoch == segment.hint.epoch):
            segment.hint = hint
            return
        node.tears = False
        segment.hint = torn(segment.hint, hint, self.rng)
        self.seen["hint torn"] += 1
        self.tell(f"{name}: {segment.name} has {segment.hint}, and should have {hint}")
        self.crash_daemon(name)
        raise DaemonDied

    # Memory.

    def some_sealed(self, node: Node, rng: random.Random) -> tuple[Segment, Slot] | None:
        """Any sealed slot of the machine, of a rank or of a replica."""
        found = [
            (segment, slot)
            for segment in node.segments.values()
            for slot in segment.slots
            if slot.record.sealed and not slot.rotten
        ]
        return rng.choice(found) if found else None

    def rot(self, node: Node, rng: random.Random) -> None:
        """Bits of a sealed image flip."""
        if (hit := self.some_sealed(node, rng)) is not None:
            hit[1].content = Rotten(("flipped", *hit[1].content))
            self._damage(node, *hit)

    def tear_header(self, node: Node, rng: random.Random) -> None:
        """The header of a sealed slot does not match its checksum any more, so the slot counts as free."""
        if (hit := self.some_sealed(node, rng)) is not None:
            segment, slot = hit
            self._damage(node, segment, slot)
            index = slot.record.index
            segment.write(index, SlotRecord(slot.record.generation, index, SlotState.FREE))

    def _damage(self, node: Node, segment: Segment, slot: Slot) -> None:
        self.any_rot = self.changed = True
        node.damaged.append((node.life, segment.rank, slot.record.iteration))
        self.tell(f"{node.name}: {segment.name} slot {slot.record.index} is damaged")

    # Links.

    def cut_one_way(self, node: Node, rng: random.Random) -> None:
        """What the machine sends does not arrive at some others, or what they send does not arrive here."""
        others = [name for name in sorted(self.nodes) if name != node.name]
        some = rng.sample(others, rng.randint(1, len(others))) if others else []
        outwards = rng.random() < 0.5
        links = {(node.name, name) if outwards else (name, node.name) for name in some}

        def cut(on: bool) -> None:
            self.one_way = self.one_way | links if on else self.one_way - links
            self.links_changed()

        self.until(rng.uniform(0.5, 2.5 * DEADLINE_S), cut)

    # Conditions.

    def set_clocks(self, rng: random.Random) -> None:
        """Each machine's clock shows another time, and runs at another speed."""
        for name in sorted(self.nodes):
            self.nodes[name].clock_s = rng.uniform(0.0, 100_000.0)
            self.nodes[name].drift = rng.uniform(-0.1, 0.1)

    def let_ranks_drift(self, rng: random.Random) -> None:
        """A rank is up to so many seconds, hence iterations, behind another one."""
        self.drift_s = rng.choice((0.7, 1.5, 3.0))

    def fill_slowly(self, rng: random.Random) -> None:
        """A trainer that dies leaves a slot half filled."""
        self.fill_s = rng.uniform(0.1, 0.8)

    def break_chains(self, rng: random.Random) -> None:
        """Now and then a rank takes no snapshot."""
        self.breaks = rng.choice((0.012, 0.05, 0.15))

    def refuse_growth(self, rng: random.Random) -> None:
        """There may be no memory for further generations."""
        self.growth_refused = rng.choice((0.4, 0.95))

    def lose_messages(self, rng: random.Random) -> None:
        """Messages are lost, or come twice."""
        self.lost, self.doubled = rng.choice(((0.04, 0.03), (0.15, 0.1)))


def strikes_of(
    seed: str, faults: Iterable[str], chaos_s: float, *, first: float = _FIRST_S, pause: float = _PAUSE_S
) -> list[Strike]:
    """Strikes of these kinds, ``pause`` apart on average."""
    rng = random.Random(seed)
    kinds = sorted(faults)
    found: list[Strike] = []
    at_s = first + rng.expovariate(1.0 / pause)
    while at_s < chaos_s:
        found.append(Strike(len(found), rng.choice(kinds), at_s, rng.getrandbits(32)))
        at_s += rng.expovariate(1.0 / pause)
    return found


def _destroy(world: Swarm, node: Node, rng: random.Random) -> None:
    if world.replicas or rng.random() < 0.3:
        world.destroy(node.name)


def _destroy_two(world: Swarm, node: Node, rng: random.Random) -> None:
    _destroy(world, node, rng)
    _destroy(world, world.nodes[rng.choice(sorted(world.nodes))], rng)


def _cut(world: Swarm, node: Node, rng: random.Random) -> None:
    world.cut_off(node.name, rng.uniform(0.5, 2.5 * DEADLINE_S), rng.random() < 0.3)


def _slow(world: Swarm, node: Node, rng: random.Random) -> None:
    node.delay_s = rng.choice((0.5, 1.0, 2.0))
    world.later(rng.uniform(3.0, 12.0), lambda: setattr(node, "delay_s", 0.1))


def _for_a_while(attribute: str) -> Callable[[Swarm, Node, random.Random], None]:
    def begin(world: Swarm, node: Node, rng: random.Random) -> None:
        world.until(rng.uniform(1.0, 10.0), lambda on: setattr(node, attribute, on))

    return begin


def _halt(world: Swarm, node: Node, rng: random.Random) -> None:
    node.halted_s = max(node.halted_s, world.now_s + rng.uniform(0.3, 6.0))


STRIKES: dict[str, Callable[[Swarm, Node, random.Random], None]] = {
    "daemon dies": lambda world, node, rng: world.crash_daemon(node.name),
    "record lost": Swarm.lose_record,
    "daemon frozen": Swarm.freeze,
    "hint torn": Swarm.tear_hint,
    "trainer dies": lambda world, node, rng: world.stop_job("a trainer died"),
    "trainers frozen": _halt,
    "machine lost": _destroy,
    "two machines lost": _destroy_two,
    "cut off": _cut,
    "cut one way": Swarm.cut_one_way,
    "slow links": _slow,
    "corrupt transfers": _for_a_while("corrupts"),
    "quota": _for_a_while("full"),
    "tmpfs full": _for_a_while("no_space"),
    "no descriptors": _for_a_while("few_files"),
    "image rots": Swarm.rot,
    "header rots": Swarm.tear_header,
}
CONDITIONS: dict[str, Callable[[Swarm, random.Random], None]] = {
    "clocks differ": Swarm.set_clocks,
    "ranks apart": Swarm.let_ranks_drift,
    "slow fills": Swarm.fill_slowly,
    "broken chains": Swarm.break_chains,
    "growth refused": Swarm.refuse_growth,
    "messages lost": Swarm.lose_messages,
}


def play_swarm(seed: int, config: WorldConfig | None = None) -> Swarm:
    """The world of this seed, played to its end."""
    return played(Swarm(seed, config), f"swarm seed {seed}")
