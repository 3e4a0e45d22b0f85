"""A pipeline whose stages are lost again and again: who is left parks, boundaries are logged, and a localized
plan brings the lost ones back.

Real are the gate between a copy and the optimizer (`ckptd.client.parking.parker.ParkGate`), which slot is taken
for a parked state and when one is freed (`ckptd.client.parking.park_memory`), and the plans
(`ckptd.core.recovery`). Played are machines, memory, steps and fate. What ranks compute is a number
(`tests.ckptd.core.recovery.pipeline_world`), so a state that is torn, stale, or fed from another history ends
with other numbers than the job had.

(p1) What a plan brings back is the state that the job had where all go on together.
(p2) A localized plan goes on no earlier than the global one would.
(p3) A state that was parked and counts stays until a newer one is sealed, or the floor and the rank's own suffix
     are beyond it.
(p4) After the loss of one machine there is a plan, if all ranks had run together for long enough before.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from ckptd.client.parking.park_memory import ParkMemory, parked_records
from ckptd.client.parking.parker import ParkGate
from ckptd.core.recovery.global_plan import NoRecovery, RecoveryPlan, plan_recovery
from ckptd.core.recovery.held import HeldRecords, RunHoldings
from ckptd.core.recovery.localized_plan import LocalizedPlan, plan_localized
from ckptd.core.recovery.snapshot_tables import SnapshotToLoad
from ckptd.core.slots.slots import DRAWN_EPOCHS, SlotRecord, SlotState, epoch_after
from tests.ckptd.core.recovery.pipeline_world import Execution, History, State, random_shape, recorded
from tests.simulation.model import WorldConfig
from tests.simulation.replication_world import played

__all__ = ["ParkingWorld", "play_parking"]

_LENGTH = 26  # iterations
_FAILS = 0.13  # how often the job is cut off in an iteration
_TORN = State((-1,), -1)
_GONE = [SlotRecord(0, index, SlotState.FREE) for index in range(64)]


@dataclass
class _Slot:
    record: SlotRecord
    content: Any


class Segment:
    """Slots of one kind, of one rank on one machine; those that were filled first are filled again first."""

    def __init__(self, rank: int, num_slots: int, num_operators: int) -> None:
        self.rank, self.generation, self._next = rank, 0, 0
        self.slots = [_Slot(record, None) for record in _GONE[:num_slots]]
        self.descriptor = SimpleNamespace(num_operators=num_operators)

    def records(self) -> list[SlotRecord]:
        return [slot.record for slot in self.slots]

    def free_slot(self, index: int) -> None:
        self.slots[index] = _Slot(_GONE[index], None)

    def turn(self) -> int:
        self._next += 1
        return (self._next - 1) % len(self.slots)


class _Parks(list[Segment]):
    """Of a rank's memory."""

    def of(self, record: SlotRecord) -> Segment:
        return self[0]


Place = tuple[str, str, int, bool]  # kind, machine, rank, own


class ParkingWorld:
    """One seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"parking/{seed}")
        self.seen: Counter[str] = Counter()
        self.trace: list[str] = []
        self.now_s = 0.0  # iterations
        self.shape = random_shape(self.rng, 4)
        self.ranks = range(self.shape.world_size)
        self.names = sorted({*self.shape.nodes, "spare"})
        self.homes = dict(enumerate(self.shape.nodes))
        self.salts = [self.rng.getrandbits(20) for _ in range(_LENGTH)]
        self.truth = History(self.shape, self.salts)
        self.memory: dict[Place, Segment] = {}
        self.away: set[str] = set()  # at the next recovery
        self.epochs: dict[int, int] = {}
        self.sequence = 0
        self.misses = self.rng.choice((0.0, 0.0, 0.05))  # what is not captured, logged or copied
        self.bases: dict[int, int] = {}
        self.floor, self.iteration = -1, 0
        self.gates = {rank: ParkGate("nothing has begun") for rank in self.ranks}
        self._begin(-1, dict.fromkeys(self.ranks, 0))

    # Memory.

    def segment(self, kind: str, machine: str, rank: int, *, own: bool) -> Segment:
        place = kind, machine, rank, own
        if place not in self.memory:
            size = 2 if kind == "parked" else self.shape.window + 4
            operators = 1 if kind == "log" else self.shape.window
            self.memory[place] = Segment(rank, size, operators)
        return self.memory[place]

    def put(self, segment: Segment, kind: str, index: int, iteration: int, content: Any) -> None:
        """Seal it."""
        self.sequence += 1
        window = self.shape.window
        anchors = {"seg": 1 << iteration % window, "parked": (1 << window) - 1, "log": 0}[kind]
        record = SlotRecord(
            0,
            index,
            SlotState.SEALED,
            iteration,
            iteration - 1,
            self.sequence,
            10,
            anchors=anchors,
            phase=iteration % window,
            epoch=self.epoch,
            epoch_start=self.epoch_start,
            header_digest=hash((len(kind), content)).to_bytes(16, "little", signed=True),
        )
        segment.slots[index] = _Slot(record, content)

    def record(self, kind: str, rank: int, iteration: int, content: Any) -> None:
        """In this rank's memory, and a copy of it on another machine."""
        home = self.homes[rank]
        other = self.names[(self.names.index(home) + 1) % len(self.names)]
        if self.rng.random() < self.misses:
            return
        own = self.segment(kind, home, rank, own=True)
        index = own.turn()
        self.put(own, kind, index, iteration, content)
        if self.rng.random() >= self.misses:
            copy = self.segment(kind, other, rank, own=False)
            at = copy.turn()
            copy.slots[at] = _Slot(replace(own.slots[index].record, index=at), content)

    def held(self, kind: str) -> list[HeldRecords]:
        return [
            HeldRecords(
                machine,
                f"{kind}/{rank}/{own}",
                own,
                rank,
                segment.descriptor.num_operators,
                "t",
                4096,
                tuple(r for r in segment.records() if r.sealed),
            )
            for (what, machine, rank, own), segment in self.memory.items()
            if what == kind and machine not in self.away
        ]

    def read(self, piece: SnapshotToLoad, lost: set[str]) -> Any:
        """What all copies hold, for an `Execution`."""
        found = set()
        for source in piece.sources:
            kind, rank, own = source.segment.split("/")
            segment = self.memory[kind, source.node, int(rank), own == "True"]
            found.add(segment.slots[source.index].content)
        assert len(found) == 1, f"(p1) copies of {piece.record} differ: {found}"
        return found.pop()

    # Steps.

    def _begin(self, start: int, bases: dict[int, int]) -> None:
        highest = max(self.epochs, default=-1)
        self.epoch, self.epoch_start = epoch_after(highest, self.rng.randrange(DRAWN_EPOCHS)), start
        self.epochs[self.epoch] = start
        self.bases, self.iteration = bases, min(bases.values())
        self.begun = max(bases.values())
        self.floor = min(self.floor, start)

    def step(self) -> None:
        """One iteration of the ranks that run it."""
        at, alone = self.iteration, min(self.iteration, max(self.bases.values()))
        for rank in self.ranks:
            if self.bases[rank] > at:
                continue
            self.tidy(rank)
            self.record("seg", rank, at, recorded(self.truth, rank, at))
            self.record("log", rank, at, self.truth.sent(rank, at))
        self.iteration += 1
        if alone == max(self.bases.values()) and self.rng.random() < 0.5:
            plan = plan_recovery(self.held("seg"), len(self.ranks), epochs=self.epochs)
            if isinstance(plan, RecoveryPlan) and plan.end > self.epoch_start:
                self.floor = max(self.floor, plan.end - self.rng.randint(0, 2))

    # Parking.

    def parks(self, rank: int) -> tuple[ParkMemory, Any]:
        """The product's rules for this rank's parked states, and its memory as they see it."""
        home = self.homes[rank]
        ring = self.segment("seg", home, rank, own=True)
        table = SimpleNamespace(
            epochs=self.epochs, records=ring.records, ring_hint=SimpleNamespace(floor=self.floor)
        )
        memory = SimpleNamespace(
            parks=_Parks([self.segment("parked", home, rank, own=True)]),
            table=table,
            num_operators=self.shape.window,
        )
        rules = ParkMemory.__new__(ParkMemory)
        rules._memory = memory  # type: ignore[assignment]
        return rules, memory

    def tidy(self, rank: int) -> None:
        """(p3): what is beyond the floor, or the rank's own suffix, stays."""
        rules, memory = self.parks(rank)
        before = parked_records(memory)
        rules.tidy()
        gone = [r for r in before if r not in parked_records(memory)]
        self.seen["parked state freed"] += len(gone)
        for record in gone:
            assert record.iteration < self.floor, f"(p3) {record} is freed, and the floor is {self.floor}"

    def park(self, rank: int, at: int) -> None:
        """The rank parks while it runs iteration ``at``, as far as its fate lets it."""
        gate, fate = self.gates[rank], self.rng.random()
        state, after = self.truth.states[at][rank], _TORN
        asked = object()
        gate.top(asked)  # type: ignore[arg-type]
        if self.rng.random() < 0.1:  # asked in the step before, and late
            gate.top(object())  # type: ignore[arg-type]
            state = after
        if fate > 0.9:
            assert gate.update() is None
            assert gate.awaited(0.0) is None, "an optimizer steps"
        if not gate.begin_copy(asked):  # type: ignore[arg-type]
            self.seen["not parked"] += 1
            return
        rules, memory = self.parks(rank)
        segment = memory.parks[0]
        counted = parked_records(memory)[-1:]
        index = rules._in_order(segment, segment.records())[0].index
        segment.free_slot(index)
        kept = [r for r in counted if r not in segment.records()]
        assert not kept, f"(p3) {kept} is overwritten before the next one is sealed"
        if fate < 0.3:
            self.seen["died while copying"] += 1
            gate.end_copy()
            return
        if fate < 0.5 and gate.update() is not None:  # the optimizer waits, and then goes on
            gate.abandon_copy()
            state = after
        if gate.end_copy():
            self.seen["copy discarded"] += 1
            return
        self.put(segment, "parked", index, at, state)
        self.seen["parked"] += 1

    # The end, and the return.

    def fail(self) -> None:
        """Machines are lost, or away; who is left parks."""
        stop = {d: self.iteration - self.rng.randint(0, 1) for d in range(len(self.shape.domains))}
        lost = set(self.rng.sample(self.names, self.rng.choice((0, 1, 1, 1, 2))))
        self.away = {name for name in self.names if name not in lost and self.rng.random() < 0.04}
        died = {rank for rank in self.ranks if self.rng.random() < 0.1}
        for rank in self.ranks:
            at = stop[self.shape.domain_of(rank)]
            runs = self.bases[rank] <= at <= self.iteration
            if self.homes[rank] not in lost and rank not in died and runs:
                self.park(rank, at)
        self.memory = {place: s for place, s in self.memory.items() if place[1] not in lost}
        self.trace.append(f"{self.iteration}: lost {lost}, away {self.away}, died {died}")
        for rank, home in self.homes.items():
            moves = self.rng.random() < (0.5 if home in lost else 0.1)
            if moves or home in self.away:
                self.homes[rank] = self.rng.choice([n for n in self.names if n not in self.away] or [home])
        self.recover(harm=len(lost | self.away))

    def recover(self, harm: int) -> None:
        held = RunHoldings(self.held("seg"), self.held("parked"), self.held("log"), self.epochs)
        facts = {rank: self.shape.facts(rank) for rank in self.ranks}
        whole = plan_recovery(held.snapshots, len(self.ranks), homes=self.homes, epochs=self.epochs)
        plan = plan_localized(held, facts, len(self.ranks), homes=self.homes)
        if isinstance(plan, LocalizedPlan):
            self.seen["localized"] += 1
            self.trace.append(f"localized to {plan.resume}: {plan.bases}")
            assert isinstance(whole, NoRecovery) or plan.resume >= whole.end, f"(p2) {plan.resume}, {whole}"
            found = Execution(self.shape, self, plan, self.salts, set()).run()  # type: ignore[arg-type]
            assert found == self.truth.states[plan.resume], f"(p1) another state of {plan.resume}"
            self.seen.update(f"rank {each.kind}" for each in plan.per_rank.values())
            end, bases = plan.resume, plan.bases
        elif isinstance(whole, RecoveryPlan):
            self.seen["global"] += 1
            self.trace.append(f"global to {whole.end}, for {plan.reason}")
            for rank, pieces in whole.per_rank.items():
                for piece in pieces:
                    there = self.read(piece, set())
                    wanted = recorded(self.truth, rank, piece.record.iteration)
                    assert there == wanted, f"(p1) rank {rank} loads another {piece.record.iteration}"
            end, bases = whole.end, dict.fromkeys(self.ranks, whole.end)
        else:
            self.trace.append(f"anew: {whole.reason}")
            self.seen["began anew"] += 1
            long = self.iteration - self.begun > 2 * self.shape.window + 2
            assert harm > 1 or self.misses or not long, f"(p4) one loss was too much: {whole.reason}"
            self.memory.clear()
            end, bases = 0, dict.fromkeys(self.ranks, 0)
        self.salts = self.salts[:end] + [self.rng.getrandbits(20) for _ in range(_LENGTH - end)]
        self.truth = History(self.shape, self.salts, self.truth.states[: end + 1])
        self._begin(end, bases)

    def play(self) -> None:
        for _ in range(4 * _LENGTH):
            self.now_s = float(self.iteration)
            if self.iteration >= _LENGTH - 1:
                return
            self.step()
            if self.rng.random() < _FAILS:
                self.fail()


def play_parking(seed: int, config: WorldConfig | None = None) -> ParkingWorld:
    """The world of this seed, played to its end."""
    return played(ParkingWorld(seed), f"parking seed {seed}")
