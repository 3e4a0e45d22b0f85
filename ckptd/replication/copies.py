"""One rank's snapshots: those that are here, what each target holds of them, and which one a target lacks next (pure).

What a target holds is believed from what it told alone (`Copies.believe`, and a key added to ``Target.held`` before `Copies.recount`).
The complete suffixes that it holds end at the iterations of ``Target.run``, without a gap.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from ckptd.memory.ring import (
    SlotRecord,
    Suffix,
    chain_from,
    epoch_table,
    newest_by_iteration,
)
from ckptd.memory.snapshot_events import Joined, SnapshotKey, key_of
from ckptd.replication.replicas import spanning_suffix
from ckptd.replication.target import NO_INTERVAL, Interval, Lag, Target

__all__ = ["Copies"]


class Copies:
    """The local table, and beside it what targets hold; see the module. Nothing in it grows with time.

    Attributes:
        local: by iteration: sealed, of the living history, the one that counts.
    """

    def __init__(self) -> None:
        self.local: dict[int, SlotRecord] = {}
        self._known: dict[SnapshotKey, SlotRecord] = {}
        self._num_operators = 0
        self._num_slots = 0
        self._own: Interval | None = None  # what the primary holds; None until somebody asks
        self._span = 1
        self._epochs: dict[int, int] = {}
        self._joined: dict[int, int] = {}

    # What is learned.

    def join(self, event: Joined, targets: Collection[Target]) -> bool:
        """The run goes on in this epoch; whether that is another history, or another span, than before."""
        if self._joined == {event.epoch: event.epoch_start} and self._span == event.span:
            return False
        self._joined, self._span = {event.epoch: event.epoch_start}, event.span
        self._see(self.local.values(), targets)
        return True

    def take_table(
        self, records: Iterable[SlotRecord], num_operators: int, targets: Collection[Target]
    ) -> None:
        """The local ring as it is now."""
        if num_operators != self._num_operators:  # other operators: nothing that is held counts
            self._num_operators = num_operators
            self._known.clear()
            for target in targets:
                target.held.clear()
                target.opened.clear()
        self._see(records, targets)

    def believe(self, target: Target, generation: int, held: Iterable[SlotRecord]) -> None:
        """What a target told that it holds of this generation."""
        told = {key_of(record): record for record in held if record.sealed}
        self._known.update(told)
        target.held = {k for k in target.held if k.generation != generation} | told.keys()
        target.run = NO_INTERVAL  # counted anew, from what it told
        self.recount(target)

    def doubt_newer(self, target: Target, record: SlotRecord) -> None:
        """What comes after ``record`` there and is in no complete suffix: nothing links to it, so the host may fill its slot.

        It is begun once more in its turn; the host answers ``held`` if it has it still.
        """
        table = self._held_table(target)
        if max(table, default=-1) <= record.iteration:
            return
        found = spanning_suffix(table, self._num_operators, self._span)
        kept = set() if found is None else set(map(key_of, found.records))
        target.held = {k for k in target.held if k.iteration <= record.iteration or k in kept}
        target.planned = False

    def doubt_all(self, target: Target) -> None:
        """It does not count any more, so the floor goes on without it, and the host may give away what ends before: a ring that grew
        has several replicas there, and of the older ones nobody would tell. It is asked again for each."""
        target.held.clear()
        target.opened.clear()
        self.recount(target)

    def _see(self, records: Iterable[SlotRecord], targets: Collection[Target]) -> None:
        """Take these as the local table (or the epochs anew) and forget what nobody holds."""
        table = list(records)
        self._num_slots = max(self._num_slots, len(table))
        self._epochs = epoch_table(table, self._joined)
        self.local = newest_by_iteration(table, self._epochs)
        self._own = None
        local = {key_of(record): record for record in self.local.values()}
        self._known.update(local)
        for target in targets:
            self.recount(target)
            target.skipped &= local.keys()
        wanted = set(local).union(*(target.held for target in targets))
        self._known = {key: record for key, record in self._known.items() if key in wanted}

    # What is held, and what is next.

    def here(self, record: SlotRecord) -> SlotRecord | None:
        """This snapshot in the local ring; None if it is gone."""
        found = self.local.get(record.iteration)
        return found if found is not None and key_of(found) == key_of(record) else None

    def own_interval(self) -> Interval:
        """Where suffixes end that the local ring holds now: unlike a host it may have given the older ones away."""
        if self._own is None:
            self._own = self._count_own()
        return self._own

    def next_for(self, target: Target) -> SlotRecord | None:
        """The snapshot to send next; None if the target has everything."""
        if not target.planned:
            target.planned, target.upcoming = True, self._plan(target)
        return target.upcoming

    def lag(self, target: Target) -> Lag:
        """How far it is behind."""
        if not self.local:
            return Lag(0, 0)
        missing = [r for r in self.needed(target) if key_of(r) not in target.held]
        start = target.run.last if target.run.last >= 0 else min(self.local) - 1
        return Lag(max(0, max(self.local) - start), sum(r.image_len for r in missing))

    def recount(self, target: Target) -> None:
        """The interval of complete ends, from what is held; and forget what no promise needs."""
        target.planned = False
        table = self._held_table(target)
        found = spanning_suffix(table, self._num_operators, self._span)
        keep: set[SnapshotKey] = set()
        if table:  # the newest chain, as far as a ring of this size can hold it
            tip = spanning_suffix(table, self._num_operators, self._span, end=max(table))
            chain = chain_from(table[max(table)], table)[: self._num_slots]
            keep.update(map(key_of, chain if tip is None else tip.records))
        if found is not None:
            keep.update(map(key_of, found.records))
            target.run = self._run(found, table, target.run)
        else:
            target.run = NO_INTERVAL
        local = set(map(key_of, self.local.values()))
        target.held = {key for key in target.held if key in local or key in keep}

    def _held_table(self, target: Target) -> dict[int, SlotRecord]:
        records = (self._known[key] for key in target.held if key in self._known)
        return newest_by_iteration(records, self._epochs)

    def _count_own(self) -> Interval:
        newest = spanning_suffix(self.local, self._num_operators, self._span)
        if newest is None:
            return NO_INTERVAL
        everything = (1 << self._num_operators) - 1
        covered = 0
        oldest_first = reversed(chain_from(self.local[newest.end], self.local))
        for length, record in enumerate(oldest_first, start=1):
            covered |= record.anchors
            if covered & everything == everything and length >= self._span:
                return Interval(record.iteration, newest.end)
        return NO_INTERVAL

    def _run(self, newest: Suffix, table: Mapping[int, SlotRecord], old: Interval) -> Interval:
        """Walk back from the newest complete end for as long as every snapshot is one."""
        first = newest.end
        for record in chain_from(table[newest.end], table):
            here = spanning_suffix(table, self._num_operators, self._span, end=record.iteration)
            if here is None:
                break
            first = record.iteration
            if 0 <= first == old.last:
                first = old.first  # from here back it was known already
                break
        return Interval(first, newest.end)

    def _plan(self, target: Target) -> SlotRecord | None:
        for record in self.needed(target):
            key = key_of(record)
            if key not in target.held and key not in target.skipped:
                return record
        return None

    def needed(self, target: Target) -> list[SlotRecord]:
        """The local snapshots, in order, that bring the target up to date.

        It goes on where the target is, if what comes next is still here; otherwise it begins with the
        newest suffix.
        """
        local = [self.local[iteration] for iteration in sorted(self.local)]
        usable = {r.iteration: r for r in local if key_of(r) not in target.skipped}
        found = spanning_suffix(usable, self._num_operators, self._span)
        start = None if found is None else found.start
        tip = max(self._held_table(target), default=-1)
        if tip >= 0 and (start is None or tip < start):
            newer = [record for record in local if record.iteration > tip]
            if not newer or newer[0].previous in (tip, -1):
                return newer
        if found is not None:
            return [*found.records, *(r for r in local if r.iteration > found.end)]
        return local
