"""The end of a job and its return: what its ranks do together when they start
(`ckptd.client.recovery.global_recovery`, in short).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from ckptd.core.recovery.global_plan import NoRecovery, RecoveryPlan, plan_recovery
from ckptd.core.recovery.held import HeldRecords
from ckptd.core.recovery.snapshot_tables import SnapshotCopy, SnapshotToLoad
from ckptd.core.slots.ring import NoSuffix, find_suffix
from ckptd.core.slots.slots import DRAWN_EPOCHS, SlotState, epoch_after
from tests.simulation.model import Holder, Slot, State, Tip
from tests.simulation.training import Training

__all__ = ["Recovering"]


class Recovering(Training):
    """Killing all trainers, and starting them again."""

    others: set[int]  # epochs that the history of the last recovery does not go back to

    def start_daemon(self, name: str) -> None:
        raise NotImplementedError

    def stop_job(self, why: str) -> None:
        self.tell(f"job stops: {why}")
        if self.running:
            self.running = False
            self.run_id += 1
            self.later(self.rng.uniform(1.0, 3.0), lambda run=self.run_id: self.recover(run))  # type: ignore[misc]

    def recover(self, run_id: int) -> None:
        if run_id != self.run_id or self.running:
            return
        usable = [n for n, node in self.nodes.items() if node.up and n not in self.cut]
        if len(usable) < min(2, len(self.nodes)):
            self.later(1.0, lambda: self.recover(run_id))
            return
        for name in usable:
            if self.nodes[name].daemon is None:
                self.start_daemon(name)
            for segment in self.nodes[name].segments.values():  # the trainers are dead
                for slot in segment.slots:
                    if segment.own and slot.record.state is SlotState.FILLED:
                        segment.move(slot.record.index, SlotState.SEALED)
                    elif segment.own and slot.record.state is SlotState.FILLING:
                        segment.move(slot.record.index, SlotState.FREE)
                        self.seen["died while filling"] += 1
        away = [name for name in self.nodes if name not in usable]
        homes = self._new_homes(usable)
        held, begun, self.others = self.told(away)
        plan = plan_recovery(held, len(self.homes), homes=homes, epochs=begun)
        self.seen["other history"] += bool(self.others)
        self.check_promise(away, plan, self.others)
        while isinstance(plan, RecoveryPlan) and self._put_aside(plan):
            held, begun, self.others = self.told(away)
            plan = plan_recovery(held, len(self.homes), homes=homes, epochs=begun)
        if isinstance(plan, NoRecovery) and self._worth_waiting(held, usable):
            self.tell(f"waits for {away}: {plan.reason}")
            self.seen["waited"] += 1
            self.later(1.0, lambda: self.recover(run_id))
            return
        self.seen["recovered" if isinstance(plan, RecoveryPlan) else "began anew"] += 1
        self.follows = plan.epoch
        epoch = epoch_after(self.follows, self.rng.randrange(DRAWN_EPOCHS))
        if any(epoch >> 12 == known >> 12 for known in self.pasts):
            self.seen["epoch taken twice"] += 1
        for name in usable if isinstance(plan, NoRecovery) else ():
            self.nodes[name].record.names.clear()  # by command, where anything is left
        self._resume(plan, homes, epoch)

    def _put_aside(self, plan: RecoveryPlan) -> bool:
        """Quarantine the snapshots of which no copy is as it was sealed; whether there are any."""
        found = False
        for pieces in plan.per_rank.values():
            for piece in pieces:
                if all(self._slot_of(source).rotten for source in piece.sources):
                    found = True
                    self.seen["snapshot lost to rot"] += 1
                    for source in piece.sources:
                        segment = self.nodes[source.node].segments[source.segment]
                        segment.move(source.index, SlotState.QUARANTINED)
        return found

    def _slot_of(self, source: SnapshotCopy) -> Slot:
        return self.nodes[source.node].segments[source.segment].slots[source.index]

    def _worth_waiting(self, held: Iterable[HeldRecords], usable: Collection[str]) -> bool:
        """Nobody begins anew while somebody is silent who may hold what is missing, as far as those
        who answer know.
        """
        records = [self.nodes[name].record for name in usable]
        known = {name for record in records for name in record.names}
        if not known and any(record.lost for record in records):
            known = {*self.nodes}  # nobody knows who else there is, so a person decides
        silent = [name for name in known - {*usable} if self.nodes[name].up]
        complete = any(not isinstance(find_suffix(h.records, h.num_operators), NoSuffix) for h in held)
        return bool(silent) and complete

    def _new_homes(self, usable: list[str]) -> dict[int, str]:
        homes = {}
        permuted = self.rng.random() < 0.2
        for rank, name in self.homes.items():
            stays = name in usable and not permuted
            empty = [n for n in usable if n not in self.homes.values()]
            homes[rank] = name if stays else self.rng.choice(empty or usable)
        return homes

    def _resume(self, plan: RecoveryPlan | NoRecovery, homes: dict[int, str], epoch: int) -> None:
        end = plan.end if isinstance(plan, RecoveryPlan) else -1
        self.tell(f"recovery: epoch {epoch} from {end}: {plan.reason}; homes {homes}")
        past = self.pasts.get(self.follows, {0: -1})
        if end < self.highest or self.epoch not in past:  # or nobody who is left knows of that one
            self.announced, self.highest = None, end
        self.homes, self.epoch, self.epoch_start = homes, epoch, end
        self.tip = None
        self.epochs = self.pasts[epoch] = past | {epoch: end}
        if isinstance(plan, RecoveryPlan):
            slots = [self._slot_of(source) for source in plan.per_rank[0][-1].sources]
            content = next(slot.content for slot in slots if not slot.rotten)
            self.history = self._history_of(content[2])  # type: ignore[arg-type]
            self.check_plan(plan)
            copies = {r: [self._copy_of(p) for p in of] for r, of in plan.per_rank.items()}
            for rank, pieces in plan.per_rank.items():
                self._load(rank, pieces, copies[rank], end)
            where = sorted(set(homes.values()))
            self.tip = Tip(end, tuple(Holder(n, self.nodes[n].life, True) for n in where))
        else:
            self.history = []
            for rank in homes:
                for segment in self.own_segments(rank):
                    del self.nodes[homes[rank]].segments[segment.name]
        self.start_job(end)

    def _history_of(self, state: State) -> list[State]:
        found = [state]
        while (before := self.parents[found[-1]]) is not None:
            found.append(before)
        return found[::-1]

    def _copy_of(self, piece: SnapshotToLoad) -> Slot:
        """Any of its sources that is as it was sealed."""
        there = self._slot_of(self.rng.choice([s for s in piece.sources if not self._slot_of(s).rotten]))
        return Slot(there.record, there.content)

    def _load(self, rank: int, pieces: Iterable[SnapshotToLoad], copies: list[Slot], end: int) -> None:
        """Map what lies here, else copy it into a new generation; free what came later here."""
        home, trainer = self.homes[rank], self.trainers[rank]
        own = {(home, segment.name) for segment in self.own_segments(rank)}
        wanted = list(pieces)
        trainer.sequence = max(p.record.sequence for p in wanted)
        trainer.previous = end
        here = [
            any((s.node, s.segment) in own and not self._slot_of(s).rotten for s in p.sources) for p in wanted
        ]
        if not all(here):
            self.seen["fetched"] += 1
            segment = self.reserve(rank, max(self.first_size(rank), len(copies) + 2 + self.slack))
            for index, there in enumerate(copies):
                segment.slots[index].content = there.content
                segment.write(index, replace(there.record, generation=segment.generation, index=index))
                self.check_copy(segment, index)
        for segment in self.own_segments(rank):
            for slot in segment.slots:
                record = slot.record
                if record.sealed and (record.iteration > end or record.epoch in self.others):
                    segment.move(record.index, SlotState.FREE)

    def start_job(self, end: int) -> None:
        self.running, self.run_id = True, self.run_id + 1
        self.iteration = end + 1
        self.changed = True
        working = {
            name: tuple(r for r, home in self.homes.items() if home == name)
            for name in sorted(set(self.homes.values()))
        }
        idle = {
            name: ()
            for name, node in self.nodes.items()
            if name not in working and node.up and name not in self.cut and node.segments
        }
        self.members = {**working, **idle}
        for rank, trainer in self.trainers.items():
            trainer.coming = trainer.retry_at = 0
            trainer.free_s = 0.0
            trainer.due.clear()
            if end < 0:
                trainer.previous = -1
            found = self.own_segments(rank)
            if not found:
                self.reserve(rank, self.first_size(rank))
            trainer.num_slots = len(self.own_segments(rank)[-1].slots)
        for name in working:
            self.join_all(name)
        run_id = self.run_id
        # A trainer waits for its daemon's answer to the join.
        self.later(self.rng.uniform(0.4, 1.0), lambda: self.step(run_id))

    def join_all(self, name: str) -> None:
        """The ranks of a node tell its daemon who takes part, each when it comes to it."""
        daemon, epoch = self.nodes[name].daemon, self.epoch
        if daemon is not None and self.running:
            for rank in self.members.get(name, ()):
                delay_s = self.rng.uniform(0.01, 0.4)
                self.later(delay_s, lambda rank=rank: self.join(name, daemon, rank, epoch))  # type: ignore[misc]
