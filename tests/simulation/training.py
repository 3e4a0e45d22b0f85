"""The trainers of a job in lockstep: snapshots, generations, broken chains (`ckptd.client`, in short)."""

from __future__ import annotations

import contextlib

from ckptd.core.replication.replicas import Promise, promised
from ckptd.core.slots.ring import SlotChoice, choose_slot, droppable_generations, most_slots, slots_for_window
from ckptd.core.slots.slots import SlotRecord, SlotState
from tests.simulation.model import (
    SLACK,
    STEP_S,
    TORN,
    Content,
    DaemonDied,
    Hint,
    Segment,
    Slot,
    State,
    Trainer,
    digest_of,
)
from tests.simulation.runs import Runs

__all__ = ["Training"]

_MORE_SLOTS = 2
_RETRY_STEPS = 6


class Training(Runs):
    """One iteration of all ranks after another."""

    growth_refused: float
    breaks: float = 0.012  # how often a rank takes no snapshot, so that its chain begins anew
    drift_s: float = 0.0  # by how much a rank may be later than another one
    fill_s: float = 0.0  # how long a slot may be filled; 0: no process ends meanwhile

    def _init_training(self) -> None:
        self.iteration = 0
        self.run_id = 0
        self.history: list[State] = []  # by iteration, of the live history

    def step(self, run_id: int) -> None:
        """One iteration of all ranks."""
        if run_id != self.run_id or not self.running:
            return
        if self.iteration > self.epoch_start:
            state = (self.epoch, self.iteration)
            self.parents[state] = self.history[-1] if self.history else None
            self.history.append(state)
            for rank in self.homes:
                self._reach(rank, state)
        self.iteration += 1
        halted_s = max(self.nodes[name].halted_s for name in self.homes.values())
        free_s = max(trainer.free_s for trainer in self.trainers.values()) - self.drift_s
        self.later(max(STEP_S, halted_s - self.now_s, free_s - self.now_s), lambda: self.step(run_id))

    def _reach(self, rank: int, state: State) -> None:
        """A rank comes to the end of the iteration, now or later than the others."""
        trainer, run_id = self.trainers[rank], self.run_id
        if not self.drift_s and not trainer.due:
            self._boundary(rank, state)
            return
        late_s = self.rng.uniform(0.0, self.drift_s)  # and after the one before, also when all is calm
        trainer.free_s = max(self.now_s + late_s, trainer.free_s + 0.05)
        trainer.due.append(state)

        def come() -> None:
            if run_id == self.run_id:
                self._boundary(rank, trainer.due.pop(0))

        self.local(self.homes[rank], trainer.free_s - self.now_s, come, trainer=True)

    def _boundary(self, rank: int, state: State) -> None:
        trainer = self.trainers[rank]
        self._collect(rank, trainer)
        if self.chance(self.breaks):
            self.seen["missed"] += 1
            trainer.previous = -1
            return
        segment = self.own_segments(rank)[-1]
        choice = self._claim(rank, segment)
        if choice.index is None:
            self.seen["skipped"] += 1
            trainer.previous = -1
            self._drop_unneeded(rank)
            if not self._pending(rank, trainer) and state[1] >= trainer.retry_at:
                trainer.coming = trainer.num_slots
            return
        self.seen["snapshots"] += 1
        self._fill(rank, segment, choice.index, state)
        self._drop_unneeded(rank)
        self._maybe_grow(rank, trainer, crowded=self._keeps(self._hint(rank)) and not choice.left)

    def _hint(self, rank: int) -> Hint:
        told = [segment.hint for segment in self.own_segments(rank) if segment.hint.span]
        return max(told, key=lambda hint: (hint.floor, hint.horizon, hint.aim), default=Hint())

    def _keeps(self, hint: Hint) -> bool:
        """Whether there is something that must stay."""
        return len(self.homes) > 1 and bool(hint.span)

    def _returned(self, rank: int) -> bool:
        """Whether the run went back to an iteration, and has no floor there or later since."""
        hint = self._hint(rank)
        agreed = hint.epoch == self.epoch and hint.floor >= self.epoch_start
        return self.config.keeps_tip and self.epoch_start >= 0 and not agreed

    def _promised(self, rank: int, hint: Hint) -> set[tuple[int, int]]:
        records = [record for s in self.own_segments(rank) for record in s.records]
        if not self._keeps(hint):
            return set()
        return promised(
            records,
            self.trainers[rank].window,
            promise=Promise(hint.floor, hint.horizon),
            epochs={self.epoch: self.epoch_start},
            span=hint.span,
            up_to=hint.aim,
            tip=self.epoch_start if self._returned(rank) else -1,
        )

    def _claim(self, rank: int, segment: Segment) -> SlotChoice:
        window = self.trainers[rank].window
        while True:
            segments, hint = self.own_segments(rank), self._hint(rank)
            choice = choose_slot(
                [record for s in segments for record in s.records],
                window,
                busy={slot.record.key for s in segments for slot in s.slots if slot.readers},
                generation=segment.generation,
                protected=self._promised(rank, hint),
                epochs={self.epoch: self.epoch_start},
            )
            if choice.index is not None or not self._seal_filled(rank):
                return choice

    def _fill(self, rank: int, segment: Segment, index: int, state: State) -> None:
        iteration, trainer, run_id = state[1], self.trainers[rank], self.run_id
        trainer.sequence += 1
        content: Content = (rank, iteration, state)
        assert not segment.slots[index].readers, f"(d) rank {rank} fills slot {index}, which is being read"
        segment.slots[index].content = TORN
        if segment.slots[index].record.sealed:
            self.changed = True
            segment.move(index, SlotState.FREE)  # stale, or given away
        segment.move(
            index,
            SlotState.FILLING,
            iteration=iteration,
            previous=trainer.previous,
            sequence=trainer.sequence,
            image_len=100,
            anchors=1 << iteration % trainer.window,
            epoch=self.epoch,
            epoch_start=self.epoch_start,
            header_digest=digest_of(content),
        )
        self.truth[rank, iteration, self.epoch, trainer.sequence] = content
        trainer.previous = iteration

        def filled() -> None:
            if run_id == self.run_id and self.nodes[self.homes[rank]].up:
                segment.slots[index].content = content
                segment.move(index, SlotState.FILLED)
                slow = 0.3 if self.calm else self.rng.choice((0.2, 0.5, 0.9))
                sealed = lambda: self.seal_own(rank, segment, index, run_id)
                self.local(self.homes[rank], self.rng.uniform(0.01, slow), sealed, trainer=True)

        if self.fill_s and not self.calm:
            self.local(self.homes[rank], self.rng.uniform(0.0, self.fill_s), filled, trainer=True)
        else:
            filled()

    def seal_own(self, rank: int, segment: Segment, index: int, run_id: int) -> None:
        filled = segment.slots[index].record.state is SlotState.FILLED
        if run_id == self.run_id and filled and self.nodes[self.homes[rank]].up:
            segment.move(index, SlotState.SEALED)
            self._tell_daemon(rank)

    def _seal_filled(self, rank: int) -> bool:
        """Seal what is filled, as a trainer does that needs the slots; whether there was anything."""
        found = False
        for segment in self.own_segments(rank):
            for slot in segment.slots:
                if slot.record.state is SlotState.FILLED:
                    segment.move(slot.record.index, SlotState.SEALED)
                    found = True
        if found:
            self._tell_daemon(rank)
        return found

    def _tell_daemon(self, rank: int) -> None:
        home = self.homes[rank]
        daemon = self.nodes[home].daemon
        if daemon is not None and rank in daemon.run.senders:
            told = lambda: self.tell_slots(home, daemon, rank, daemon.run.senders[rank])
            if self.is_frozen(home):
                self.local(home, 0.0, lambda: told() if rank in daemon.run.senders else None)
                return
            with contextlib.suppress(DaemonDied):
                told()

    # Generations.

    def _pending(self, rank: int, trainer: Trainer) -> bool:
        most = 2 if len(self.homes) == 1 else 3
        return bool(trainer.coming) or len(self.own_segments(rank)) >= most

    def _maybe_grow(self, rank: int, trainer: Trainer, *, crowded: bool) -> None:
        needed = self._hint(rank).span + 2 + self.slack
        longer = needed > len(self.own_segments(rank)[-1].slots)
        asks = (longer or crowded) and not self._pending(rank, trainer)
        if asks and self.iteration >= trainer.retry_at:
            span, returned = self._hint(rank).span, self._returned(rank)
            most = most_slots(trainer.window, span, self.slack, returned=returned)
            more = trainer.num_slots + _MORE_SLOTS
            more = needed if longer else max(trainer.num_slots, min(more, most))
            trainer.num_slots = trainer.coming = more
            self.seen["grown"] += 1

    def _collect(self, rank: int, trainer: Trainer) -> None:
        """Go over to the generation that was asked for, if there is memory for it."""
        if not trainer.coming:
            return
        home = self.nodes[self.homes[rank]]
        away = home.daemon is None or home.no_space or self.is_frozen(home.name)
        if self.chance(self.growth_refused) or away:
            self.seen["growth refused"] += 1
            trainer.retry_at = self.iteration + _RETRY_STEPS
        else:
            self.reserve(rank, trainer.coming)
        trainer.coming = 0

    def reserve(self, rank: int, num_slots: int) -> Segment:
        name, segments = self.homes[rank], self.own_segments(rank)
        generation = segments[-1].generation + 1 if segments else 0
        slots = [Slot(SlotRecord(generation, i, SlotState.FREE)) for i in range(num_slots)]
        file = f"r{rank}~g{generation}~{name}.{next(self.count)}"
        segment = Segment(file, rank, True, file, generation, slots, self.trainers[rank].window)
        self.nodes[name].segments[file] = segment
        self.seen["reserved"] += 1
        return segment

    def _drop_unneeded(self, rank: int) -> None:
        segments = self.own_segments(rank)
        if len(segments) < 2:
            return
        hint, home = self._hint(rank), self.nodes[self.homes[rank]]
        records = [record for s in segments for record in s.records]
        window, epochs = self.trainers[rank].window, {self.epoch: self.epoch_start}
        unneeded = droppable_generations(
            records,
            window,
            segments[-1].generation,
            protected=self._promised(rank, hint),
            epochs=epochs,
        )
        for segment in segments:
            if segment.generation in unneeded and not any(s.readers for s in segment.slots):
                del home.segments[segment.name]
                self.changed = True
                self.seen["generation dropped"] += 1
        self._tell_daemon(rank)

    @property
    def slack(self) -> int:
        """A single rank without peers needs none."""
        return SLACK if len(self.nodes) > 1 or len(self.homes) > 1 else 0

    def first_size(self, rank: int) -> int:
        return slots_for_window(self.trainers[rank].window, self.slack)
