"""The copies of one rank's snapshots: in its own ring (`Copies`) and on each target (`TargetCopies`). Pure.

A target holds what it reported at its last opening, and what it sealed since. The complete suffixes that it
holds end at every snapshot of ``TargetCopies.run``. A target that was begun anew (a substitute, or one that
fell behind the local ring) holds none that ends earlier.

The ring *and* all targets that count must hold what the rank promises. The *aim* is the next such promise: a
few suffixes of the ring that are sent to the targets and that the ring keeps meanwhile, while its other slots
roll on. (A run of one rank needs no common start, so its ring has no aim.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from ckptd.core.replication.replicas import spanning_suffix, suffix_ends
from ckptd.core.slots.ring import Suffix, chain_from, newest_by_iteration
from ckptd.core.slots.slots import Joined, SlotRecord, SnapshotKey, epoch_table, key_of

# The floor advances by at least this many snapshots at a time; by more only if the ring has spare slots.
_REACH = 2

Table = Mapping[int, SlotRecord]  # the record that counts, by iteration


class Interval(NamedTuple):
    """Complete suffixes end at every snapshot from iteration ``first`` to ``last``; -1, -1: at none."""

    first: int
    last: int


NO_INTERVAL = Interval(-1, -1)


class Lag(NamedTuple):
    """How far a target is behind the newest sealed snapshot."""

    iterations: int
    bytes: int


class Copies:
    """The snapshots in the local ring. Nothing in it grows with time.

    Attributes:
        local: the sealed snapshots of the current history, by iteration.
        aim: the ends of the suffixes that may become the next floor; see `take_aim`.
        keeps_aim: the ring keeps the aim, so targets can be served by it.
        vouched: the newest end that this rank has promised in this epoch. Other nodes may know a floor
            there before this one does.
        blocked: a target does not take what the aim needs, and that promise forbids a shorter aim.
        version: another one whenever what is held here or on a target may be another, or who counts.

    Args:
        aim: that of the daemon before this one, in this epoch; other ranks may count on it.
        independent: each snapshot is complete without others (a boundary log).
    """

    def __init__(self, aim: Interval = NO_INTERVAL, *, independent: bool = False) -> None:
        self.local: dict[int, SlotRecord] = {}
        self.aim = aim
        self.keeps_aim = False
        self.vouched = aim.last
        self.blocked = False
        self.version = 0
        self.independent = independent
        self.targets: list[TargetCopies] = []
        self.known: dict[SnapshotKey, SlotRecord] = {}  # what the ring or a target holds
        self.num_slots = 0  # the most that were reported
        self._ring_slots = 0
        self._least_end = -1  # no suffix that ends earlier will become the floor
        self._num_operators = 0
        self._span = 1
        self._epochs: dict[int, int] = {}
        self._joined: dict[int, int] = {}
        self._own_ends: list[int] | None = None  # None: not computed yet
        self._local_keys: AbstractSet[SnapshotKey] = frozenset()
        self._table: tuple[SlotRecord, ...] = ()  # as it was told last
        self._whole: dict[int, bool] = {}  # by end: what `holds` found in this table

    # -- the local ring ------------------------------------------------------------------------------

    def join(self, event: Joined) -> bool:
        """Note the current epoch and span; False if both are known."""
        if self._joined == {event.epoch: event.epoch_start} and self._span == event.span:
            return False
        self._joined, self._span = {event.epoch: event.epoch_start}, event.span
        self._set_local(self.local.values())
        return True

    def take_table(self, records: Iterable[SlotRecord], num_operators: int, ring_slots: int) -> None:
        """Replace the local table; ``ring_slots`` is the number of slots in the current generation."""
        table = tuple(records)
        if (table, num_operators, ring_slots) == (self._table, self._num_operators, self._ring_slots):
            for target in self.targets:
                target.replan()  # what it needs follows from the floor, too
            return
        if num_operators != self._num_operators:  # what targets hold is of other operators
            self._num_operators = num_operators
            self.version += 1
            self.known.clear()
            for target in self.targets:
                target.held.clear()
                target.opened.clear()
        self._ring_slots = ring_slots
        self._set_local(table)

    def lose(self, key: SnapshotKey) -> None:
        """Remove a snapshot whose slot was reused since the table was read."""
        self._set_local([record for record in self.local.values() if key_of(record) != key])

    def here(self, record: SlotRecord) -> SlotRecord | None:
        """The same snapshot in the local ring; None if it is gone."""
        found = self.local.get(record.iteration)
        return found if found is not None and key_of(found) == key_of(record) else None

    def own_interval(self) -> Interval:
        """Where suffixes end that the ring holds now; it may have given older ones away."""
        ends = self._ends()
        return Interval(ends[0], ends[-1]) if ends else NO_INTERVAL

    def suffix(self, table: Table, end: int | None = None) -> Suffix | None:
        """The complete suffix that ends at ``end``, else the newest one."""
        return spanning_suffix(table, self._num_operators, self._span, end=end)

    def ends_in(self, table: Table, end: int) -> bool:
        """Whether a complete suffix ends there."""
        return suffix_ends(table, self._num_operators, self._span, end)

    def table_of(self, held: Iterable[SnapshotKey]) -> Table:
        """These snapshots by iteration, as far as they count."""
        return newest_by_iteration((self.known[key] for key in held if key in self.known), self._epochs)

    def _set_local(self, records: Iterable[SlotRecord]) -> None:
        self.version += 1
        self._table = table = tuple(records)
        self.num_slots = max(self.num_slots, len(table))
        self._epochs = epoch_table(table, self._joined)
        self.local = newest_by_iteration(table, self._epochs)
        self._own_ends = None
        self._whole.clear()
        local = {key_of(record): record for record in self.local.values()}
        self._local_keys = local.keys()
        self.known.update(local)
        for target in self.targets:
            target.recount()
            target.skipped &= local.keys()
        wanted = set(local).union(*(target.held for target in self.targets))
        self.known = {key: record for key, record in self.known.items() if key in wanted}

    def _ends(self) -> list[int]:
        if self._own_ends is None:
            self._own_ends = self._count_ends(self.local)
        return self._own_ends

    def _count_ends(self, table: Table) -> list[int]:
        """Where suffixes of the newest chain end, oldest first."""
        newest = self.suffix(table)
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

    # -- the aim -------------------------------------------------------------------------------------

    def take_aim(self, floor: int, horizon: int, counted: Sequence[TargetCopies]) -> None:
        """Choose what is to become the next floor, unless the present aim still stands.

        Other ranks may count on an aim, so it stands until the floor has reached it or the horizon has
        passed it. The first aim after a recovery is everything in the ring up to where the recovery went
        back to, also what is still to arrive: until the new tree has agreed, each of these may be a floor
        that another node knows.

        A new aim extends a little way from the floor, if what follows the floor is still in the ring.
        Otherwise it ends with the newest suffix and begins a little earlier, so that ranks that choose at
        about the same time have an iteration in common.

        Args:
            counted: the targets that count. The aim leaves out what one of them does not take, except what
                was promised already.
        """
        self._least_end = max(floor, horizon)
        usable = self.usable(counted)
        whole = self.aim.last >= 0 and self.holds(self.aim.last)
        if whole and counted and not self.ends_in(usable, self.aim.last):
            promised = max(floor, self.in_aim(counted).last, min(self.vouched, self.aim.last))
            self.aim = Interval(self.aim.first, promised)
            whole = self.aim.last >= 0
        ends = self._ends() if len(usable) == len(self.local) else self._count_ends(usable)
        to_arrive = self.aim.first < 0 and (not ends or ends[-1] < self.aim.last)
        stands = (whole or to_arrive) and self.aim.last > floor and self.aim.last >= horizon
        untaken = stands and whole and not self.ends_in(usable, self.aim.last)
        self.blocked = untaken and self.in_aim(counted).last < self.aim.last
        if stands:
            return
        later = [end for end in ends if end > floor and end >= horizon]
        if not later:
            if not whole:
                self.aim = NO_INTERVAL
        elif ends[0] <= self._least_end:
            self.aim = Interval(ends[0], later[: self.reach][-1])
        else:
            self.aim = Interval(later[-self.reach :][0], later[-1])

    def in_aim(self, targets: Sequence[TargetCopies]) -> Interval:
        """Where suffixes end, within the aim and without a gap, that the ring and all these targets hold.

        The last is -1 if there is none yet; no suffix that ends before the first will be promised.
        """
        ours = self._own_ends_in_aim()
        if not ours:
            return Interval(self.aim.first, -1)
        theirs = [True] * len(ours)
        for target in targets:
            theirs = [held and target.holds(end) for held, end in zip(theirs, ours, strict=True)]
        if not any(theirs):
            return Interval(ours[-1], -1)
        newest = theirs.index(True)
        oldest = theirs.index(False, newest) if False in theirs[newest:] else len(ours)
        return Interval(ours[oldest - 1], ours[newest])

    def holds(self, end: int) -> bool:
        """Whether the ring holds the suffix that ends there."""
        if end not in self._whole:
            self._whole[end] = self.ends_in(self.local, end)
        return self._whole[end]

    @property
    def reach(self) -> int:
        """By how many snapshots an aim may extend beyond the floor, and sending beyond the aim."""
        return max(_REACH, self._ring_slots - 2 * self._span - 2)

    @property
    def aim_ends(self) -> tuple[int, int]:
        """The first end of the aim that can still become the floor, and the last."""
        return max(self.aim.first, self._least_end), self.aim.last

    def usable(self, targets: Sequence[TargetCopies]) -> Table:
        """The snapshots that all these targets take."""
        passed = set[SnapshotKey]().union(*(target.skipped for target in targets))
        return {i: r for i, r in self.local.items() if key_of(r) not in passed} if passed else self.local

    def _own_ends_in_aim(self) -> list[int]:
        """The newest unbroken run of ends within the aim that the ring holds, newest first."""
        first, last = self.aim_ends
        ends: list[int] = []
        for end in sorted((e for e in self.local if first <= e <= last), reverse=True):
            linked = not ends or self.local[ends[-1]].previous == end
            if linked and self.holds(end):
                ends.append(end)
            elif ends:
                break
        return ends


class TargetCopies:
    """What one target holds of the rank's snapshots, and which one it needs next.

    Attributes:
        held: what it reported, and what it sealed since.
        skipped: local snapshots that it does not take.
        opened: the generations of which it has reported its holdings.
        run: where the complete suffixes end that it holds.
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self.held: set[SnapshotKey] = set()
        self.skipped: set[SnapshotKey] = set()
        self.opened: set[int] = set()
        self.run = NO_INTERVAL
        self._planned = False  # `_next` is up to date
        self._next: SlotRecord | None = None
        self._missing: list[SlotRecord] = []  # as `_needed`
        self._missing_of: tuple[int, Interval, tuple[int, int], bool] | None = None  # from what it follows
        self._table: Table | None = None  # None: not computed yet
        self._whole: dict[int, bool] = {}  # by end: what `holds` found in this table
        copies.targets.append(self)
        copies.version += 1

    def believe(self, generation: int, held: Iterable[SlotRecord]) -> None:
        """Replace what the target holds of a generation by what it reported."""
        told = {key_of(record): record for record in held if record.sealed}
        self._copies.known.update(told)
        self.held = {k for k in self.held if k.generation != generation} | told.keys()
        self.opened.add(generation)
        self.run = NO_INTERVAL
        self.recount()

    def add(self, key: SnapshotKey) -> None:
        """The target has sealed this snapshot."""
        self.held.add(key)
        self.recount()

    def skip(self, key: SnapshotKey) -> None:
        """The target does not take this snapshot."""
        self.skipped.add(key)
        self._copies.version += 1
        self.replan()

    def counts_otherwise(self) -> None:
        """The target counts, or does not count any more."""
        self._copies.version += 1

    def forget(self) -> None:
        """Believe nothing of the target any more."""
        self.held.clear()
        self.skipped.clear()
        self.opened.clear()
        self.run = NO_INTERVAL
        self._table = None
        self._copies.version += 1
        self.replan()

    def here(self, record: SlotRecord) -> SlotRecord | None:
        """The same snapshot in the local ring; None if it is gone."""
        return self._copies.here(record)

    def lose(self, key: SnapshotKey) -> None:
        """The snapshot is gone from the local ring."""
        self._copies.lose(key)

    def doubt_newer(self, record: SlotRecord) -> None:
        """Forget what is newer than ``record`` and in no complete suffix.

        Nothing links to such a snapshot, so the host may fill its slot. It is begun again in its turn; the
        host answers ``held`` if it still has it. The host of a boundary log gives away only what is older.
        """
        table = self.table()
        if self._copies.independent or max(table, default=-1) <= record.iteration:
            return
        found = self._copies.suffix(table)
        kept = set() if found is None else set(map(key_of, found.records))
        left = {k for k in self.held if k.iteration <= record.iteration or k in kept}
        if len(left) < len(self.held):
            self.held, self._table = left, None
            self._copies.version += 1
        self.replan()

    def doubt_all(self) -> None:
        """Open every generation again.

        The target does not count any more, so the floor goes on without it, and its host may give away
        what ends earlier. Of a ring that grew, it has several replicas and would report only the newest.
        """
        self.held.clear()
        self.opened.clear()
        self.recount()

    def recount(self) -> None:
        """Compute `run` anew, and forget what no promise needs."""
        self._table = None
        self.replan()
        self._copies.version += 1
        copies, table = self._copies, self.table()
        found = copies.suffix(table)
        keep: set[SnapshotKey] = set()
        if table:  # the newest chain, as far as a ring of this size can hold it
            tip = copies.suffix(table, max(table))
            chain = chain_from(table[max(table)], table)[: copies.num_slots]
            keep.update(map(key_of, chain if tip is None else tip.records))
        if found is None:
            self.run = NO_INTERVAL
        else:
            keep.update(map(key_of, found.records))
            self.run = self._run_up_to(found.end, table)
        local = copies._local_keys
        left = {key for key in self.held if key in local or key in keep}
        if len(left) < len(self.held):
            self.held, self._table = left, None

    def replan(self) -> None:
        """What follows next may have changed."""
        self._planned = False

    def table(self) -> Table:
        """The snapshots that it holds, by iteration."""
        if self._table is None:
            self._table, self._whole = self._copies.table_of(self.held), {}
        return self._table

    def holds(self, end: int) -> bool:
        """Whether it holds the suffix that ends there."""
        table = self.table()
        if end not in self._whole:
            self._whole[end] = self._copies.ends_in(table, end)
        return self._whole[end]

    def next_to_send(self) -> SlotRecord | None:
        """The snapshot to send next; None if the target has everything."""
        if not self._planned:
            self._planned = True
            needed = self._needed()
            self._next = next((r for r in needed if key_of(r) not in self.skipped), None)
        return self._next

    def lag(self) -> Lag:
        """How far it is behind the ring."""
        local = self._copies.local
        if not local:
            return Lag(0, 0)
        missing = self._needed()
        last = self.run.last if self.run.last >= 0 else min(local) - 1
        return Lag(max(0, max(local) - last), sum(r.image_len for r in missing))

    def _run_up_to(self, end: int, table: Table) -> Interval:
        """Walk back from the newest complete end for as long as every snapshot is one."""
        first = end
        for record in chain_from(table[end], table):
            if not self.holds(record.iteration):
                break
            first = record.iteration
            if 0 <= first == self.run.last:
                return Interval(self.run.first, end)  # known from the last time
        return Interval(first, end)

    def _needed(self) -> list[SlotRecord]:
        """Of the local snapshots that bring the target up to date, those that it does not hold, in order."""
        copies = self._copies
        follows = copies.version, copies.aim, copies.aim_ends, copies.keeps_aim
        if follows != self._missing_of:
            self._missing = [record for record in self._up_to_date() if key_of(record) not in self.held]
            self._missing_of = follows
        return self._missing

    def _up_to_date(self) -> list[SlotRecord]:
        """The local snapshots, in order, that bring the target up to date.

        It continues where the target is, if the next snapshot is still in the ring. Otherwise it begins
        with the suffix of the aim, which stays in the ring until the target has it, or the newest one.
        """
        copies = self._copies
        local = [copies.local[iteration] for iteration in sorted(copies.local)]
        if copies.independent:
            return local
        if copies.keeps_aim and copies.aim.last >= 0:
            aimed = [record for record in local if record.iteration <= copies.aim.last]
            if (done := copies.in_aim([self]).last) >= 0:
                # Beyond the aim no more than the ring usually still has when the floor gets there.
                beyond = local[len(aimed) :][: copies.reach]
                return [record for record in aimed + beyond if record.iteration > done]
            local = aimed
        found = self._first_suffix()
        tip = max(self.table(), default=-1)
        if tip >= 0 and (found is None or tip < found.start):
            newer = [record for record in local if record.iteration > tip]
            if not newer or newer[0].previous in (tip, -1):
                return newer
        if found is None:
            return local
        return [*found.records, *(r for r in local if r.iteration > found.end)]

    def _first_suffix(self) -> Suffix | None:
        """What a target without anything gets first."""
        copies, usable = self._copies, self._copies.usable([self])
        if copies.keeps_aim and copies.aim.last >= 0:
            for end in copies.aim_ends:
                if (found := copies.suffix(usable, end)) is not None:
                    return found
        return copies.suffix(usable)
