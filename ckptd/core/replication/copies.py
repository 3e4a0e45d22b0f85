"""One rank's snapshots: those that are here, what each target holds of them, and which one a target
lacks next (pure).

What a target holds is believed from what it told alone (`Copies.believe`, and a key added to
``ReplicationTarget.held`` before `Copies.recount`). The complete suffixes that it holds end at the
iterations of ``ReplicationTarget.run``, without a gap.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from ckptd.core.replication.replicas import spanning_suffix
from ckptd.core.replication.target import NO_INTERVAL, Interval, Lag, ReplicationTarget
from ckptd.core.slots.ring import (
    SlotRecord,
    Suffix,
    chain_from,
    epoch_table,
    newest_by_iteration,
)
from ckptd.core.slots.slots import Joined, SnapshotKey, key_of

__all__ = ["Copies"]

# A floor goes on by so many snapshots at a time at least; more than that only where there are slots
# beside them.
_REACH = 2


class Copies:
    """The local table, and beside it what targets hold; see the module. Nothing in it grows with time.

    Attributes:
        local: by iteration: sealed, of the living history, the one that counts.
        aim: suffixes of the local ring that end here are brought to the targets, and are the next
            that may become the floor: the ring gives none of them away meanwhile. See `take_aim`.
        keeps_aim: whether the local ring is told of the aim, so that targets can be served by it.
        vouched: the newest end of which this rank has given its word in this epoch. Others may know
            it as the floor before it is known here.
        blocked: the target does not take what the aim needs, and the aim cannot end earlier because
            of that word.
    """

    def __init__(self, aim: Interval = NO_INTERVAL) -> None:
        self.local: dict[int, SlotRecord] = {}
        self.aim = aim
        self.keeps_aim = False
        self.vouched = aim.last  # by the daemon before this one, or before the recovery
        self.blocked = False
        self._least_end = -1  # no suffix that ends before will become the floor
        self._ring_slots = 0
        self._known: dict[SnapshotKey, SlotRecord] = {}
        self._num_operators = 0
        self._num_slots = 0
        self._own: list[int] | None = None  # where the primary's suffixes end; None until somebody asks
        self._span = 1
        self._epochs: dict[int, int] = {}
        self._joined: dict[int, int] = {}

    # What is learned.

    def join(self, event: Joined, targets: Collection[ReplicationTarget]) -> bool:
        """The run goes on in this epoch; whether that is another history, or another span, than before."""
        if self._joined == {event.epoch: event.epoch_start} and self._span == event.span:
            return False
        self._joined, self._span = {event.epoch: event.epoch_start}, event.span
        self._see(self.local.values(), targets)
        return True

    def take_table(
        self,
        records: Iterable[SlotRecord],
        num_operators: int,
        targets: Collection[ReplicationTarget],
        *,
        ring_slots: int = 0,
    ) -> None:
        """The local ring as it is now, and how many slots are filled in turn."""
        self._ring_slots = ring_slots
        if num_operators != self._num_operators:  # other operators: nothing that is held counts
            self._num_operators = num_operators
            self._known.clear()
            for target in targets:
                target.held.clear()
                target.opened.clear()
        self._see(records, targets)

    def believe(self, target: ReplicationTarget, generation: int, held: Iterable[SlotRecord]) -> None:
        """What a target told that it holds of this generation."""
        told = {key_of(record): record for record in held if record.sealed}
        self._known.update(told)
        target.held = {k for k in target.held if k.generation != generation} | told.keys()
        target.run = NO_INTERVAL  # counted anew, from what it told
        self.recount(target)

    def doubt_newer(self, target: ReplicationTarget, record: SlotRecord) -> None:
        """What comes after ``record`` there and is in no complete suffix: nothing links to it, so
        the host may fill its slot.

        It is begun once more in its turn; the host answers ``held`` if it has it still.
        """
        table = self._held_table(target)
        if max(table, default=-1) <= record.iteration:
            return
        found = spanning_suffix(table, self._num_operators, self._span)
        kept = set() if found is None else set(map(key_of, found.records))
        target.held = {k for k in target.held if k.iteration <= record.iteration or k in kept}
        target.planned = False

    def doubt_all(self, target: ReplicationTarget) -> None:
        """It does not count any more, so the floor goes on without it, and the host may give away
        what ends before: a ring that grew has several replicas there, and of the older ones nobody
        would tell. It is asked again for each.
        """
        target.held.clear()
        target.opened.clear()
        self.recount(target)

    def lose(self, key: SnapshotKey, targets: Collection[ReplicationTarget]) -> None:
        """This snapshot was given away since the table was taken."""
        self._see([r for r in self.local.values() if key_of(r) != key], targets)

    def _see(self, records: Iterable[SlotRecord], targets: Collection[ReplicationTarget]) -> None:
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
        """Where suffixes end that the local ring holds now: unlike a host it may have given the
        older ones away.
        """
        ends = self._own_ends()
        return Interval(ends[0], ends[-1]) if ends else NO_INTERVAL

    def take_aim(self, floor: int, horizon: int, target: ReplicationTarget | None) -> None:
        """Choose what is to become the next floor, unless that is under way.

        After a recovery the first one is all that is here up to where the recovery went back to,
        also what is still on its way: until the new tree has agreed, each of these may be a floor
        that somebody else knows. An aim stands until the floor has reached it, or the horizon has
        passed it by: other ranks may count on it. So the ring holds the floor's suffix, the aim's,
        and rolls on with the slots that are left. The aim reaches a little way from the floor on,
        if what follows the floor is still here; otherwise it ends with the newest suffix, and
        begins a little before: ranks that choose at about the same time have an iteration in
        common.

        Args:
            target: the one that counts. What it does not take is no aim, but for what was promised
                already: that stays until the floor or the horizon has passed it by, for others may
                know of a floor there.
        """
        self._least_end = max(floor, horizon)
        usable = self._usable(target)
        whole = self.aim.last >= 0 and self._is_whole(self.aim.last)
        if whole and target is not None and not self._is_whole(self.aim.last, usable):
            promised = max(floor, self.in_aim(target).last, min(self.vouched, self.aim.last))
            self.aim = Interval(self.aim.first, promised)
            whole = self.aim.last >= 0
        ends = self._own_ends() if len(usable) == len(self.local) else self._count_ends(usable)
        coming = self.aim.first < 0 and (not ends or ends[-1] < self.aim.last)
        stands = (whole or coming) and self.aim.last > floor and self.aim.last >= horizon
        untaken = stands and whole and not self._is_whole(self.aim.last, usable)
        self.blocked = untaken and self.in_aim(target).last < self.aim.last
        if stands:
            return
        later = [end for end in ends if end > floor and end >= horizon]
        if later:
            reach = self._reach
            if ends[0] <= self._least_end:
                self.aim = Interval(ends[0], later[:reach][-1])
            else:
                self.aim = Interval(later[-reach:][0], later[-1])
        elif not whole:
            self.aim = NO_INTERVAL

    @property
    def _reach(self) -> int:
        return max(_REACH, self._ring_slots - 2 * self._span - 2)

    def holds(self, target: ReplicationTarget, end: int) -> bool:
        """Whether the target holds the suffix that ends there."""
        table = self._held_table(target)
        return spanning_suffix(table, self._num_operators, self._span, end=end) is not None

    def in_aim(self, target: ReplicationTarget | None) -> Interval:
        """Where suffixes end, within the aim and without a gap, that the local ring holds, and the
        target; the last is -1: at none yet, and never at one before the first.
        """
        mine: list[int] = []
        first = max(self.aim.first, self._least_end)
        for end in sorted((e for e in self.local if first <= e <= self.aim.last), reverse=True):
            linked = not mine or self.local[mine[-1]].previous == end
            if linked and self._is_whole(end):
                mine.append(end)
            elif mine:
                break
        if not mine:
            return Interval(self.aim.first, -1)
        if target is None:
            return Interval(mine[-1], mine[0])
        there = self._held_table(target)
        known = [self._is_whole(end, there) for end in mine]
        if not any(known):
            return Interval(mine[-1], -1)
        newest = known.index(True)
        oldest = known.index(False, newest) if False in known[newest:] else len(mine)
        return Interval(mine[oldest - 1], mine[newest])

    def next_for(self, target: ReplicationTarget) -> SlotRecord | None:
        """The snapshot to send next; None if the target has everything."""
        if not target.planned:
            target.planned, target.upcoming = True, self._plan(target)
        return target.upcoming

    def lag(self, target: ReplicationTarget) -> Lag:
        """How far it is behind."""
        if not self.local:
            return Lag(0, 0)
        missing = [r for r in self.needed(target) if key_of(r) not in target.held]
        start = target.run.last if target.run.last >= 0 else min(self.local) - 1
        return Lag(max(0, max(self.local) - start), sum(r.image_len for r in missing))

    def recount(self, target: ReplicationTarget) -> None:
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

    def _first_suffix(self, usable: Mapping[int, SlotRecord]) -> Suffix | None:
        """What a target that has nothing gets first."""
        if self.keeps_aim and self.aim.last >= 0:
            for end in (max(self.aim.first, self._least_end), self.aim.last):
                found = spanning_suffix(usable, self._num_operators, self._span, end=end)
                if found is not None:
                    return found
        return spanning_suffix(usable, self._num_operators, self._span)

    def _held_table(self, target: ReplicationTarget) -> dict[int, SlotRecord]:
        records = (self._known[key] for key in target.held if key in self._known)
        return newest_by_iteration(records, self._epochs)

    def _usable(self, target: ReplicationTarget | None) -> Mapping[int, SlotRecord]:
        """What is here, but for what the target does not take."""
        if target is None or not target.skipped:
            return self.local
        return {i: r for i, r in self.local.items() if key_of(r) not in target.skipped}

    def _is_whole(self, end: int, table: Mapping[int, SlotRecord] | None = None) -> bool:
        """Whether the local ring, or this part of it, holds the suffix that ends there."""
        table = self.local if table is None else table
        return spanning_suffix(table, self._num_operators, self._span, end=end) is not None

    def _own_ends(self) -> list[int]:
        """Where suffixes end that the local ring holds, of the newest chain, oldest first."""
        if self._own is None:
            self._own = self._count_ends(self.local)
        return self._own

    def _count_ends(self, table: Mapping[int, SlotRecord]) -> list[int]:
        newest = spanning_suffix(table, self._num_operators, self._span)
        if newest is None:
            return []
        everything = (1 << self._num_operators) - 1
        covered, ends = 0, []
        oldest_first = reversed(chain_from(table[newest.end], table))
        for length, record in enumerate(oldest_first, start=1):
            covered |= record.anchors
            if covered & everything == everything and length >= self._span:
                ends.append(record.iteration)
        return ends

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

    def _plan(self, target: ReplicationTarget) -> SlotRecord | None:
        for record in self.needed(target):
            key = key_of(record)
            if key not in target.held and key not in target.skipped:
                return record
        return None

    def needed(self, target: ReplicationTarget) -> list[SlotRecord]:
        """The local snapshots, in order, that bring the target up to date.

        It goes on where the target is, if what comes next is still here; otherwise it begins with
        the suffix of the aim, which stays here until the target has it, or the newest one.
        """
        local = [self.local[iteration] for iteration in sorted(self.local)]
        if self.keeps_aim and self.aim.last >= 0:
            aimed = [record for record in local if record.iteration <= self.aim.last]
            if (done := self.in_aim(target).last) >= 0:
                # Beyond the aim no more than what the ring still has, as a rule, when the floor comes to it.
                beyond = local[len(aimed) :][: self._reach]
                return [record for record in aimed + beyond if record.iteration > done]
            local = aimed
        usable = self._usable(target)
        found = self._first_suffix(usable)
        start = None if found is None else found.start
        tip = max(self._held_table(target), default=-1)
        if tip >= 0 and (start is None or tip < start):
            newer = [record for record in local if record.iteration > tip]
            if not newer or newer[0].previous in (tip, -1):
                return newer
        if found is not None:
            return [*found.records, *(r for r in local if r.iteration > found.end)]
        return local
