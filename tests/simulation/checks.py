"""What ``docs/replication.md`` promises, asserted on the cluster as it is.

(a) A sealed copy is the primary's snapshot, byte by byte.
(b) A plan's pieces are one history.
(c) The promise of the floor F. When F was announced, each rank had *holders*: its own primary (in a run
    of one rank only without targets), and the targets that its replicator counted; its latest word on
    F counts (of its newest epoch). As long as a daemon of the run knows of F, no newer floor is announced
    and no recovery went below F: every holder whose memory still exists holds the rank's complete
    suffix that ends at F. Lose any nodes, of which at most r have not been lost yet: if each rank
    is left one such holder, or its own node with a suffix that ends at F, then a plan exists for
    the job killed now, and ends at F or later. A node that is cut off is lost for the time being.
(g) The iteration to which a recovery went back is not lost before the new history has a floor there
    or later: as long as the memory of all nodes that have ranks exists, the job killed now comes
    back to it, or to a later one.
(h) The same for one loss, after every change, without excuses: where each rank has replicas, the loss of
    any one machine leaves a plan at the floor or later. What is waived is counted by reason ("waived"
    in ``seen``): another machine was lost before, no node has a place or memory for a replica, bits have
    changed at rest, nobody who is left knows the floor.
(d) No host gives a slot away that it promised to keep.
(e) What is not needed goes; (f) when all is calm, the floor follows the job. See `World.settle`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from ckptd.core.recovery.global_plan import NoRecovery, RecoveryPlan, plan_recovery
from ckptd.core.recovery.held import HeldRecords, history_of
from ckptd.core.replication.replicas import suffix_ends
from ckptd.core.slots.ring import newest_by_iteration
from ckptd.core.slots.slots import SlotRecord
from tests.simulation.model import (
    Announced,
    Content,
    Holder,
    Segment,
    State,
    Tip,
    Trainer,
    Vouched,
)
from tests.simulation.network import Network

__all__ = ["Checks"]

_CHECKED = 0.3  # of the changes: the rest is seen at the next one, as a rule
_VOUCHED_MAX = 64


class _Table(NamedTuple):
    """What a node has of a rank; ``ends``: whether a suffix ends there."""

    memory: list[tuple[SlotRecord, ...]]
    epochs: dict[int, int]
    newest: dict[int, SlotRecord]
    ends: dict[int, bool]


_Intact = tuple[  # as a `_Table`, and which slots are rotten
    list[tuple[SlotRecord, ...]], list[list[bool]], dict[int, int], dict[int, SlotRecord]
]


class _Shown(NamedTuple):
    """What a start sees on one node."""

    memory: list[tuple[Segment, tuple[SlotRecord, ...]]]
    epochs: list[tuple[int, int, int]]
    names: frozenset[str]
    lost: bool
    held: list[HeldRecords]


@dataclass(slots=True)
class _Told:
    """What a start sees on some nodes, and the plan that follows."""

    shown: list[_Shown]
    of: list[int]  # which objects these are
    held: list[HeldRecords]
    begun: dict[int, int]
    others: set[int]
    plan: RecoveryPlan | NoRecovery | None = None


class Checks(Network):
    """The job, as somebody sees it who sees everything."""

    homes: dict[int, str]
    trainers: dict[int, Trainer]
    replicas: int
    span: int

    def _init_job(self) -> None:
        self.epoch, self.epoch_start = 0, -1
        self.follows = -1  # the epoch before this one, as far as anybody knew
        self.epochs: dict[int, int] = {0: -1}
        self.pasts: dict[int, dict[int, int]] = {0: self.epochs}  # by epoch: those it goes back to
        self.parents: dict[State, State | None] = {}  # state: the one before
        self.truth: dict[tuple[int, int, int, int], Content] = {}  # fill: content
        self.announced: Announced | None = None
        self.highest = -1  # of all floors of the live history
        self.vouched: dict[int, list[Vouched]] = {}
        self.tip: Tip | None = None
        self.changed = True
        self.any_rot = False
        self.found: dict[tuple[str, int, int, bool], bool] = {}  # what `holds` found after this event
        self._tables: dict[tuple[str, int, bool], _Table] = {}
        self._intact: dict[tuple[str, int], _Intact] = {}
        self._shown: dict[str, _Shown] = {}
        self._told: dict[tuple[str, ...], _Told] = {}

    # What was said.

    def vouch(self, rank: int, fresh: Vouched) -> None:
        """A rank tells the tree how far it is: from now on its word is that of these holders."""
        known = self.vouched.setdefault(rank, [])
        if not known or known[-1] != fresh:
            known.append(fresh)
            del known[:-_VOUCHED_MAX]
            told = self.announced
            if told is not None and self._covers(fresh, told.floor):
                word = self._word(rank, told.floor)
                told.holders[rank], told.alone[rank] = word.holders, word.alone
                self.changed = True

    def _word(self, rank: int, floor: int) -> Vouched:
        """The rank's latest word on this floor: that of its newest epoch, for its home of before
        may not have heard that it moved.
        """
        said = [v for v in self.vouched.get(rank, ()) if self._covers(v, floor)]
        assert said, f"(c) floor {floor}, of which rank {rank} has never told"
        newest = max(v.epoch for v in said)
        return [v for v in said if v.epoch == newest][-1]

    def _covers(self, said: Vouched, floor: int) -> bool:
        """Whether it was said of this floor, in the live history, and that goes on from there or later."""
        if not said.first <= floor <= said.last or said.epoch not in self.epochs:
            return False
        return not any(e > said.epoch and start < floor for e, start in self.epochs.items())

    def drawn_away(self, others: Collection[int]) -> bool:
        """Whether another history counts than the live one.

        The nodes that knew of it were all away or destroyed when the live one began
        (docs/replication.md section 2). What the promises say of the live history then holds for
        the other one; so they are not asked, and that is counted.
        """
        if self.epoch not in others:
            return False
        elsewhere = [epoch for epoch in self.pasts if epoch not in self.epochs]
        unknown = [e for e in elsewhere if e >> 12 >= self.epoch >> 12]
        assert unknown, f"epoch {self.epoch} is of another history, and nothing says why: {others}"
        self.seen["drawn away"] += 1
        return True

    def known_floor(self) -> int:
        """The newest floor that a daemon of the run knows."""
        daemons = [self.nodes[name].daemon for name in set(self.homes.values())]
        runs = [daemon.run for daemon in daemons if daemon is not None]
        return max((max(r.promise.floor, r.carried.floor) for r in runs), default=-1)

    def announce(self, floor: int, epoch: int) -> None:
        """Some node has learned of this floor."""
        if epoch not in self.epochs:
            # A node that was cut off goes on with a history that the job no longer knows.
            assert epoch in self.pasts, f"epoch {epoch} is of no history"
            self.seen["floor of another history"] += 1
            return
        left = any(e > epoch and start < floor for e, start in self.epochs.items())
        if left or floor <= self.highest:
            return  # somebody heard late of what was announced before
        words = {rank: self._word(rank, floor) for rank in self.homes}
        holders = {rank: word.holders for rank, word in words.items()}
        alone = {rank: word.alone for rank, word in words.items()}
        self.announced, self.highest = Announced(floor, holders, alone), floor
        self.changed = True
        self.seen["floor moved"] += 1
        self.tell(f"floor {floor}")

    # What there is.

    def own_segments(self, rank: int) -> list[Segment]:
        node = self.nodes[self.homes[rank]]
        found = [s for s in node.segments.values() if s.own and s.rank == rank]
        return sorted(found, key=lambda s: s.generation)

    def _shown_by(self, name: str) -> _Shown:
        """What a start sees on one node: the same object for as long as nothing of it changes."""
        node, known = self.nodes[name], self._shown.get(name)
        memory = [(segment, segment.sealed) for segment in node.segments.values()]
        epochs = [(epoch, *told) for epoch, told in node.record.epochs.items()]
        names, lost = frozenset(node.record.names), node.record.lost
        if known is not None and known.memory == memory:
            if known.epochs == epochs and known.names == names and known.lost == lost:
                return known
            held = known.held
        else:
            held = [
                HeldRecords(name, s.name, s.own, s.rank, s.num_operators, "ops", 128, s.sealed)
                for s in node.segments.values()
            ]
        self._shown[name] = _Shown(memory, epochs, names, lost, held)
        return self._shown[name]

    def _seen_without(self, without: Collection[str]) -> _Told:
        answer = tuple([name for name in sorted(self.nodes) if self.nodes[name].up and name not in without])
        shown = [self._shown_by(name) for name in answer]
        known = self._told.get(answer)
        if known is not None and known.of == [*map(id, shown)]:
            return known
        held = [each for node in shown for each in node.held]
        epochs = [each for node in shown for each in node.epochs]
        names = {name for node in shown for name in node.names}
        whole = names.issubset(answer) and not any(node.lost for node in shown)
        history = history_of(held, epochs, complete=whole)
        told = _Told(
            shown, [*map(id, shown)], list(history.held(held)), dict(history.begun), set(history.others)
        )
        self._told[answer] = told
        return told

    def told(self, without: Collection[str] = ()) -> tuple[list[HeldRecords], dict[int, int], set[int]]:
        """What a start sees: what is held of the newest history, where its epochs began, and the
        epochs of others.
        """
        told = self._seen_without(without)
        return told.held, told.begun, told.others

    def plan_without(self, without: Collection[str]) -> tuple[RecoveryPlan | NoRecovery, set[int]]:
        """The plan of a start without these nodes, and the epochs of other histories."""
        told = self._seen_without(without)
        if told.plan is None:
            told.plan = plan_recovery(told.held, len(self.homes), epochs=told.begun)
        return told.plan, told.others

    def holds(self, name: str, rank: int, end: int, *, own: bool) -> bool:
        """Whether the suffix of the rank that ends there is on the node."""
        key = name, rank, end, own
        if key not in self.found:
            table = self._table(name, rank, own)
            if end not in table.ends:
                window = self.trainers[rank].window
                table.ends[end] = suffix_ends(table.newest, window, self.span, end)
            self.found[key] = table.ends[end]
        return self.found[key]

    def _table(self, name: str, rank: int, own: bool) -> _Table:
        """What a node has of a rank, and what is known of that."""
        segments = self.nodes[name].segments.values()
        memory = [s.records for s in segments if s.rank == rank and s.own is own]
        known = self._tables.get((name, rank, own))
        if known is not None and known.epochs is self.epochs and known.memory == memory:
            return known
        records = [record for of_segment in memory for record in of_segment]
        known = _Table(memory, self.epochs, newest_by_iteration(records, self.epochs), {})
        self._tables[name, rank, own] = known
        return known

    def holds_intact(self, name: str, rank: int, end: int) -> bool:
        """Whether a suffix of it is there that a recovery could use."""
        if not any(self.holds(name, rank, end, own=own) for own in (True, False)):
            return False
        if not self.any_rot:
            return True
        segments = [s for s in self.nodes[name].segments.values() if s.rank == rank]
        memory = [s.records for s in segments]
        rotten = [[slot.rotten for slot in s.slots] for s in segments]
        known = self._intact.get((name, rank))
        if known is None or known[0] != memory or known[1] != rotten or known[2] is not self.epochs:
            slots = [slot for s in segments for slot in s.slots]
            newest = newest_by_iteration([s.record for s in slots if not s.rotten], self.epochs)
            known = self._intact[name, rank] = memory, rotten, self.epochs, newest
        return suffix_ends(known[3], self.trainers[rank].window, self.span, end)

    def stands(self, holder: Holder) -> bool:
        """Whether the memory of then still exists."""
        node = self.nodes[holder.node]
        return node.up and node.life == holder.life

    # The checks.

    def watch(self) -> None:
        self.found.clear()
        if self.changed:
            self.changed = False
            self.check()
            self.found.clear()

    def check(self) -> None:
        """After an event that changed what there is, or what was said of it."""
        if self.announced is not None and self.known_floor() < self.announced.floor:
            self.announced = None  # it is as if it had not been announced
            self.seen["waived: nobody left knows the floor"] += 1
        self.check_holders()
        self.check_tip()
        self.check_losses()
        if self.announced is not None and self.rng.random() < _CHECKED:
            lost = self.rng.sample(sorted(self.nodes), self.rng.randint(0, self.replicas))
            lost += self.cut
            plan, others = self.plan_without(lost)
            self.check_promise(lost, plan, others)
            if isinstance(plan, RecoveryPlan):
                self.check_plan(plan)

    def check_copy(self, segment: Segment, index: int) -> None:
        """(a)"""
        slot = segment.slots[index]
        record = slot.record
        fill = segment.rank, record.iteration, record.epoch, record.sequence
        assert record.sealed
        assert slot.content == self.truth[fill], f"(a) {segment.name} slot {index}: {slot.content}"

    def check_plan(self, plan: RecoveryPlan) -> None:
        """(b): at each iteration one state of all ranks, each the next one's past."""
        states: dict[int, set[State]] = {}
        for rank, pieces in plan.per_rank.items():
            for piece in pieces:
                iteration = piece.record.iteration
                for source in piece.sources:
                    slot = self.nodes[source.node].segments[source.segment].slots[source.index]
                    if slot.rotten:
                        continue
                    assert slot.content[:2] == (rank, iteration), f"(b) {source}: {slot.content}"
                    states.setdefault(iteration, set()).add(slot.content[2])  # type: ignore[arg-type]
        path = []
        for iteration in sorted(states):
            assert len(states[iteration]) == 1, f"(b) mixed at {iteration}: {states[iteration]}"
            path.append(states[iteration].pop())
        for before, after in itertools.pairwise(path):
            past: State | None = after
            while past is not None and past[1] > before[1]:
                past = self.parents[past]
            assert past == before, f"(b) {after} does not follow {before}"

    def check_holders(self) -> None:
        """(c): who vouched for the floor holds its suffix."""
        told = self.announced
        if told is None:
            return
        for rank, holders in told.holders.items():
            for holder in holders:
                if not self.stands(holder) or (holder.own and len(self.homes) == 1):
                    continue  # a run of one rank needs no common start
                if self.holds(holder.node, rank, told.floor, own=holder.own):
                    continue
                if self._damaged(holder, rank, told.floor):
                    self.seen["waived: rot"] += 1
                    continue
                if self._agrees_alone(told.floor):
                    self.seen["waived: a daemon that was refused the epoch agrees with itself"] += 1
                    continue
                assert self.drawn_away(self.told()[2]), (
                    f"(c) {holder} does not hold rank {rank} up to the floor {told.floor}"
                )

    def _agrees_alone(self, floor: int) -> bool:
        """Whether the one daemon of all ranks has no memory for the epoch in which they are (so nothing is
        replicated), and has seen a newer floor of their snapshots, which it counts in the epoch before.
        """
        hosts = set(self.homes.values())
        daemon = self.nodes[next(iter(hosts))].daemon
        if len(hosts) > 1 or daemon is None or daemon.run.epoch >= self.epoch:
            return False
        agreed = daemon.run.promise.floor
        name = next(iter(hosts))
        return agreed > floor and all(self.holds(name, rank, agreed, own=True) for rank in self.homes)

    def check_tip(self) -> None:
        """(g)"""
        tip = self.tip
        if tip is None:
            return
        if self.known_floor() >= tip.end:
            self.tip = None
        elif all(self.stands(home) and home.node not in self.cut for home in tip.homes):
            plan, others = self.plan_without(self.cut)
            if self.drawn_away(others):
                return
            homes = self.homes.items()
            if self.any_rot and not all(self.holds_intact(home, r, tip.end) for r, home in homes):
                self.seen["waived: rot"] += 1
                self.tip = None
                return
            self.seen["tip checked"] += 1
            assert isinstance(plan, RecoveryPlan), f"(g) {tip.end} is lost: {plan.reason}"
            assert plan.end >= tip.end, f"(g) only {plan.end} is left, not {tip.end}: {plan.reason}"

    def check_losses(self) -> None:
        """(h): the loss of any one machine leaves a plan at the floor or later."""
        told = self.announced
        if told is None or not self.replicas:
            return
        floor = told.floor
        where = {rank: self._two_with(rank, floor) for rank in self.homes}
        for lost, node in self.nodes.items():
            lacking = [rank for rank, names in where.items() if not names - {lost}]
            if node.up:
                self.seen["losses asked"] += 1
            if not node.up or not lacking:
                continue
            plan, others = self.plan_without([lost])
            if isinstance(plan, RecoveryPlan) and plan.end >= floor and not self.any_rot:
                continue
            for rank in lacking:
                waived = self._waived(told, rank, lost)
                if not waived and self.drawn_away(others):
                    waived = "another history counts"
                assert waived, f"(h) without {lost} rank {rank} has nothing up to the floor {floor}: {told}"
                self.seen[f"waived: {waived}"] += 1

    def _two_with(self, rank: int, end: int) -> set[str]:
        """Up to two machines with a usable suffix that ends there: those first that should have it."""
        told = self.announced
        likely = [self.homes[rank], *(h.node for h in told.holders[rank])] if told is not None else []
        found: set[str] = set()
        for name in dict.fromkeys([*likely, *self.nodes]):
            if self.nodes[name].up and self.holds_intact(name, rank, end):
                found.add(name)
                if len(found) == 2:
                    break
        return found

    def _waived(self, told: Announced, rank: int, lost: str) -> str:
        """Why one more loss may cost the floor; "": it may not."""
        elsewhere = [holder for holder in told.holders[rank] if holder.node != lost]
        if not elsewhere:
            return told.alone.get(rank, "")
        if not any(self.stands(holder) for holder in elsewhere):
            return "another machine was lost before"
        standing = [holder for holder in elsewhere if self.stands(holder)]
        return "rot" if any(self._rotted(holder, rank, told.floor) for holder in standing) else ""

    def _rotted(self, holder: Holder, rank: int, floor: int) -> bool:
        """Whether its suffix up to the floor was damaged at rest; what is left of it may go afterwards."""
        return self._damaged(holder, rank, floor) and not self.holds_intact(holder.node, rank, floor)

    def _damaged(self, holder: Holder, rank: int, floor: int) -> bool:
        first = floor - max(self.span, self.trainers[rank].window)
        damaged = self.nodes[holder.node].damaged
        return any((life, of) == (holder.life, rank) and first < at <= floor for life, of, at in damaged)

    def check_promise(
        self, lost: Collection[str], plan: RecoveryPlan | NoRecovery, others: Collection[int]
    ) -> None:
        """(c): the job killed now, without these nodes."""
        told = self.announced
        if told is None or not all(self._is_left(told, rank, lost) for rank in self.homes):
            return
        if self.drawn_away(others):
            return
        self.seen["promise checked"] += 1
        assert isinstance(plan, RecoveryPlan), f"(c) floor {told.floor}, but {plan.reason}"
        assert plan.end >= told.floor, f"(c) floor {told.floor}, but only {plan.end}: {plan.reason}"

    def _is_left(self, told: Announced, rank: int, lost: Collection[str]) -> bool:
        home = self.homes[rank]
        there = home not in lost and self.nodes[home].up
        if there and self.holds(home, rank, told.floor, own=True):
            return True
        return any(self._counts(holder, rank, told.floor, lost) for holder in told.holders[rank])

    def _counts(self, holder: Holder, rank: int, floor: int, lost: Collection[str]) -> bool:
        there = self.stands(holder) and holder.node not in lost and not (holder.own and len(self.homes) == 1)
        return there and not self._rotted(holder, rank, floor)
