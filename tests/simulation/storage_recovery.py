"""The end of a job and its return: from memory if a plan can be made of it, else with what is stored
(`ckptd.client.recovery.global_recovery`, in short).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ckptd.core.recovery.global_plan import NoRecovery, RecoveryPlan, plan_recovery, reachable
from ckptd.core.recovery.held import STORE_NODE, HeldRecords, History, history_of
from ckptd.core.sessions import RankKey
from ckptd.core.slots.ring import slots_for_window
from ckptd.core.slots.slots import DRAWN_EPOCHS, SlotRecord, epoch_after, epoch_table
from ckptd.holdings import held_from_segments
from ckptd.persistence import keeper_wire as w
from ckptd.storage.checkpoints.names import CheckpointId
from ckptd.transport.messages import GetHoldings, Holdings
from tests.simulation.storage_checks import State, StorageChecks
from tests.simulation.storage_daemons import Machine
from tests.simulation.storage_slots import Segment
from tests.storage.samples import JOB, RUN, Sample

__all__ = ["StorageRecovery"]

_PATIENCE_S = 900.0  # of a trainer that waits for what is stored


class StorageRecovery(StorageChecks):
    """Killing all trainers, and starting them again."""

    rng: random.Random
    now_s: float
    seen: Counter[str]
    machines: dict[str, Machine]
    homes: dict[int, str]
    windows: list[int]
    spare: int
    step_s: float
    calm: bool

    later: Callable[[float, Callable[[], None]], None]
    tell: Callable[[str], None]
    sample: Callable[[int, SlotRecord], Sample]
    step: Callable[[int], None]

    def _init_recovery(self) -> None:
        self.states: dict[tuple[int, int, int, int], State] = {}
        self.pasts: dict[int, State | None] = {}
        self.samples: dict[tuple[int, int, int, int], Sample] = {}
        self.copies: dict[int, list[SlotRecord]] = {}
        self.previous = dict.fromkeys(self.homes, -1)
        self.sequence = dict.fromkeys(self.homes, 0)
        self.generation = dict.fromkeys(self.homes, 0)
        self.epoch = self.epoch_start = self.iteration = -1
        self.running = self.paused = self.back = self.from_memory = False
        self.run_id = 0

    def homes_on(self, name: str) -> list[int]:
        return [rank for rank, home in self.homes.items() if home == name]

    def own(self, rank: int) -> list[Segment]:
        return self.machines[self.homes[rank]].of_rank(RankKey(JOB, RUN, rank))

    def start_daemon(self, machine: Machine) -> None:
        """Its ranks' trainers attach again."""
        if machine.tier is None and machine.up:
            machine.start_daemon()
            if self.running:
                self.later(self.rng.uniform(0.5, 3.0), lambda: self._join(machine))

    def _join(self, machine: Machine) -> None:
        if not self.running or machine.tier is None:
            return
        for rank in self.homes_on(machine.name):
            machine.tier.join(RankKey(JOB, RUN, rank), self.world_size, self.epoch, self.epoch_start)

    # The end.

    def stop_job(self, why: str) -> None:
        """Also a start that is under way: it may have counted on a machine that is gone."""
        self.tell(f"job stops: {why}")
        self.running = False
        self._again(self.rng.uniform(2.0, 20.0))

    def _again(self, seconds: float) -> None:
        self.run_id += 1
        self.later(seconds, partial(self.recover, self.run_id))

    # The return.

    def recover(self, run_id: int) -> None:
        if run_id != self.run_id or self.running:
            return
        usable = [m for m in self.machines.values() if m.up and not m.away]
        if not usable:
            self._again(5.0)
            return
        for machine in usable:
            self.start_daemon(machine)
        names = [m.name for m in usable]
        self.homes = {r: home if home in names else self.rng.choice(names) for r, home in self.homes.items()}
        held = [each for machine in usable for each in machine.held()]
        plan = self._plan(usable, held)
        if isinstance(plan, RecoveryPlan) and (self.back or plan.end >= self._durable_of(usable)):
            newer = any(c.end > plan.end for c in self.complete)
            self.seen["memory is older than what is durable, and no node knows"] += newer
            self._resume_from_memory(usable, plan)
        else:
            self.from_memory = False
            self.seen["memory is older than what is durable"] += isinstance(plan, RecoveryPlan)
            self._ask_stores(run_id, usable, held, plan)

    def _durable_of(self, usable: Sequence[Machine]) -> int:
        """As of the daemons' `Holdings`."""
        links = [m.tier.link for m in usable if m.tier is not None]
        return max((link.durable_of(JOB, RUN) for link in links), default=-1)

    def _resume_from_memory(self, usable: Sequence[Machine], plan: RecoveryPlan) -> None:
        self.from_memory = True
        self._resume(usable, plan)

    def _plan(self, usable: Sequence[Machine], held: Sequence[HeldRecords]) -> RecoveryPlan | NoRecovery:
        history = self._history(usable, held)
        counts = history.held(held)
        at = None
        if self.back:
            ends = reachable(counts, self.world_size, epochs=history.begun)
            at = self.rng.choice(ends)[1] if ends else None
        plan = plan_recovery(counts, self.world_size, homes=self.homes, epochs=history.begun, at=at)
        known = max([plan.epoch, *(max(m.epochs, default=m.forgotten) for m in usable)])
        self.highest, self.follows = known, plan.epoch if known in history.others else known
        return plan

    def _history(self, usable: Sequence[Machine], held: Sequence[HeldRecords]) -> History:
        epochs = [(e, start, follows) for m in usable for e, (start, follows) in m.epochs.items()]
        return history_of(held, epochs, complete=len(usable) == len(self.machines))

    def _begun(self, usable: Sequence[Machine], held: Sequence[HeldRecords]) -> dict[int, int]:
        """As `ckptd.holdings.begun_epochs`."""
        history = self._history(usable, held)
        records = (record for each in history.held(held) for record in each.records)
        return epoch_table(records, history.begun)

    def _ask_stores(
        self,
        run_id: int,
        usable: Sequence[Machine],
        held: Sequence[HeldRecords],
        of_memory: RecoveryPlan | NoRecovery,
    ) -> None:
        """Each machine with ranks looks into the store; if it does not answer, memory counts."""
        self.seen["store asked"] += 1
        asked = [m for m in usable if self.homes_on(m.name)]
        answers: dict[str, Holdings] = {}
        begun = self._begun(usable, held)
        wanted = self.newest_complete(begun)

        def answered(name: str, reply: Holdings) -> None:
            answers[name] = reply
            if run_id == self.run_id and len(answers) == len(asked):
                self._with_stored(usable, held, list(answers.values()), wanted)

        def refused(code: str, reason: str) -> None:
            if run_id != self.run_id or self.running:
                return
            self.tell(f"the store cannot be asked: {code}: {reason}")
            if isinstance(of_memory, RecoveryPlan):
                self._resume_from_memory(usable, of_memory)
            else:
                self._again(self.rng.uniform(5.0, 60.0))

        for machine in asked:
            assert machine.tier is not None
            done = partial(answered, machine.name)
            machine.tier.link.find(GetHoldings(JOB, RUN), begun, done, refused)
        self.later(_PATIENCE_S, lambda: refused("timeout", "") if len(answers) < len(asked) else None)

    def _with_stored(
        self,
        usable: Sequence[Machine],
        held: Sequence[HeldRecords],
        answers: Sequence[Holdings],
        wanted: CheckpointId | None,
    ) -> None:
        stored = {(h.node, h.segment): h for a in answers for h in held_from_segments(a.node, a.segments)}
        plan = self._plan(usable, [*held, *stored.values()])
        self.highest = max(self.highest, *(answer.epoch for answer in answers))
        if isinstance(plan, NoRecovery):
            if any(m.epochs for m in self.machines.values() if m.up):
                self._decide(usable)
                return
            self.check_return(wanted, None)
            self.seen["began anew"] += 1
            for machine in usable:
                machine.segments, machine.replicas = [], []
            self.begin_anew(self.highest)
            return
        if not self.back:
            self.check_return(wanted, self.state_of(0, plan.per_rank[0][-1].record))
        self.check_plan(plan)
        self._fetch(usable, plan)

    def _decide(self, usable: Sequence[Machine]) -> None:
        """The run got somewhere, and cannot go on: it waits for who is away; else a person gives up what is
        in memory.
        """
        if len(usable) == sum(m.up for m in self.machines.values()):
            self.seen["memory given up"] += 1
            self.tell("memory is given up")
            for machine in usable:
                assert machine.tier is not None
                machine.tier.forget(JOB, RUN)
                machine.forgotten = max(machine.epochs, default=machine.forgotten)
                machine.segments, machine.replicas, machine.epochs = [], [], {}
        self._again(10.0)

    def _fetch(self, usable: Sequence[Machine], plan: RecoveryPlan) -> None:
        """Read what only the store has."""
        run_id, left = self.run_id, 1
        self.seen["from the store"] += 1

        def arrived(_: object = None) -> None:
            nonlocal left
            left -= 1
            if not left and run_id == self.run_id:
                self._resume(usable, plan)

        def failed(code: str, reason: str) -> None:
            if run_id == self.run_id:
                self.seen["fetch failed"] += 1
                self.tell(f"fetch failed: {code}: {reason}")
                self._again(self.rng.uniform(1.0, 30.0))

        for rank, pieces in plan.per_rank.items():
            child = self.machines[self.homes[rank]].child
            for piece in pieces:
                if any(source.node != STORE_NODE for source in piece.sources):
                    continue
                source, record, path = piece.sources[0], piece.record, f"{rank}/{piece.record.iteration}"
                if child is None:
                    failed("away", "no daemon")
                    return
                left += 1
                buffers = self.machines[self.homes[rank]].buffers
                buffers[path] = bytearray(record.image_len)
                message = w.ReadRange(
                    child.next_id(), source.segment, source.index, 0, record.image_len, path, 0
                )

                def read(
                    _: object, rank: int = rank, record: SlotRecord = record, data: bytearray = buffers[path]
                ) -> None:
                    image = self.sample(rank, record).image
                    assert data == image, f"(s4) rank {rank} reads another image of {record.iteration}"
                    arrived()

                child.ask(message, read, failed)
        self.later(_PATIENCE_S, lambda: failed("timeout", "") if left else None)
        arrived()

    def _resume(self, usable: Sequence[Machine], plan: RecoveryPlan) -> None:
        self.check_plan(plan)
        self.seen["recovered"] += 1
        epoch = epoch_after(self.highest, self.rng.randrange(DRAWN_EPOCHS))
        end = plan.per_rank[0][-1].record
        self.tell(f"recovery: epoch {epoch} from {plan.end} of {end.epoch}: {plan.reason}")
        rings = {}
        for rank, pieces in plan.per_rank.items():
            records = [piece.record for piece in pieces]
            rings[rank] = records
            self.previous[rank] = plan.end
        for machine in usable:
            machine.segments = []
            for replica in machine.replicas:  # replication replaces what is of another history
                past = [s for s in replica.slots if self._goes_on(replica.rank, s.record, end)]
                replica.slots = past
        self._start(usable, epoch, plan.end, self.state_of(0, end), rings)

    def _goes_on(self, rank: int, record: SlotRecord, end: SlotRecord) -> bool:
        return self.is_past(self.state_of(rank, record), self.state_of(0, end))

    def begin_anew(self, highest: int) -> None:
        usable = [m for m in self.machines.values() if m.up and not m.away]
        epoch = epoch_after(highest, self.rng.randrange(DRAWN_EPOCHS))
        self.tell(f"epoch {epoch} from the beginning")
        self.follows = -1
        self.previous = dict.fromkeys(self.homes, -1)
        self._start(usable, epoch, -1, None, {rank: [] for rank in self.homes})

    def _start(
        self,
        usable: Sequence[Machine],
        epoch: int,
        end: int,
        past: State | None,
        rings: dict[int, list[SlotRecord]],
    ) -> None:
        assert epoch not in self.pasts or self.pasts[epoch] == past, "an epoch was drawn twice"
        self.epoch, self.epoch_start, self.iteration, self.back = epoch, end, end + 1, False
        self.pasts[epoch] = past
        self.copies.clear()
        for machine in usable:
            machine.epochs[epoch] = end, self.follows
        for rank, records in rings.items():
            self.generation[rank] += 1
            self.sequence[rank] = max([self.sequence[rank], *(r.sequence for r in records)])
            window = self.windows[rank]
            size = max(slots_for_window(window) + self.spare, len(records) + 2)
            machine = self.machines[self.homes[rank]]
            segment = machine.reserve(rank, self.generation[rank], size, window)
            machine.segments.append(segment)
            for slot, record in zip(segment.slots, records, strict=False):
                slot.record = replace(record, generation=segment.generation, index=slot.record.index)
        self.running, self.run_id = True, self.run_id + 1
        for machine in usable:
            self.later(self.rng.uniform(0.1, 2.0), partial(self._join, machine))
        self.later(self.step_s, partial(self.step, self.run_id))
