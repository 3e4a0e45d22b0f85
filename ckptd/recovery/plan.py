"""From where every rank of a job resumes, and where each gets its snapshots: one pure function.

Each node tells what it holds of the run, its own ranks' snapshots and the replicas of others; the
ranks exchange these holdings, and each then computes the same plan from the same input, in whatever
order it came. Nobody has to be asked and nobody has to be alive.

The plan is a pair of iterations common to all ranks. Every rank loads its snapshot of *start*, replays
forward, and is dense and exact at *end*. Somewhere there is an unbroken chain of its snapshots over
exactly that span, and that chain anchors each of its operators. Over that span all ranks were in the same
phases of their schedules: an operator whose gradients are averaged over ranks must be frozen on all of them
in an iteration, or on none. Ranks differ in how far back their
operators reach (pipeline stages, other windows): the one that needs most decides where all of them
start. The newest *end* wins, then the newest *start*, which is the least to replay.

What counts as a snapshot (``docs/replication.md`` section 2):

* what a later epoch left behind, wherever that epoch is seen, is out;
* records of one rank and one operator table with equal (iteration, epoch, sequence, header digest) are
  copies of one snapshot, so a chain may be scattered over segments and nodes;
* of several snapshots of one iteration the one filled last counts. Should two claim the same place in
  the history, the trainer's own beats a replica, then the one on more nodes counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from ckptd.memory.ring import (
    SlotRecord,
    SlotState,
    chain_from,
    epoch_table,
    missing_operators,
    stale_after,
)
from ckptd.recovery.held import HeldRecords, from_wire, to_wire
from ckptd.units import format_bytes

__all__ = [
    "HeldRecords",
    "NoRecovery",
    "Piece",
    "RecoveryPlan",
    "Source",
    "complete_ranks",
    "from_wire",
    "plan_recovery",
    "to_wire",
]

_NO_HOMES: Mapping[int, str] = MappingProxyType({})
_CONFLICTS_TOLD = 3
_APART = "the ranks share snapshots, but were in different phases of their schedules"


# A large world has hundreds of thousands of sources: structs outside of the garbage collector's sight
# are made five times as fast, and do not set it off (they cannot be part of a cycle).
class Source(msgspec.Struct, frozen=True, gc=False):
    """Where a copy of a snapshot lies: slot ``index`` of a segment on a node."""

    node: str
    segment: str
    index: int


class Piece(msgspec.Struct, frozen=True, gc=False):
    """One snapshot to load and all its copies; ``record`` is that of the first, preferred one."""

    record: SlotRecord
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """Where all ranks resume; ``per_rank`` gives each its snapshots from start to end, oldest first.

    ``epoch`` is the highest seen (the recovery begins the next one), ``moved_bytes`` what each rank
    has to get because its home node does not hold it.
    """

    start: int
    end: int
    epoch: int
    per_rank: Mapping[int, tuple[Piece, ...]]
    replayed: int
    reason: str
    moved_bytes: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class NoRecovery:
    """Why there is no plan, and the highest epoch seen (-1: none).

    ``apart``: complete suffixes are there, of different schedules: the job cannot use them, and should not discard them.
    """

    reason: str
    epoch: int = -1
    apart: bool = False


def plan_recovery(
    held: Iterable[HeldRecords],
    world_size: int,
    *,
    homes: Mapping[int, str] = _NO_HOMES,
    lost: Container[str] = (),
) -> RecoveryPlan | NoRecovery:
    """The newest state that all ranks can reach together; see the module.

    Args:
        held: what the nodes hold; a segment that is told twice counts once.
        homes: the node on which each rank will run; its copies are preferred.
        lost: nodes that do not count.
    """
    known = _in_order(h for h in held if h.node not in lost)
    epochs = epoch_table(chain.from_iterable(h.records for h in known))
    epoch = max(epochs, default=-1)
    tables = _tables(known, stale_after(epochs))
    refusal = _not_ready(tables, world_size)
    if refusal is not None:
        return NoRecovery(refusal, epoch)
    span = _newest_span(tables)
    if span is None:
        apart = any(_common_start(tables, end) is not None for end in _common_ends(tables))
        return NoRecovery(_APART if apart else _no_span(tables, known), epoch, apart)
    return _plan(tables, *span, epoch, _Sources(known, homes))


def complete_ranks(held: Iterable[HeldRecords]) -> list[int]:
    """The ranks of which a complete suffix is held, whatever there is of the others: their run got somewhere."""
    known = _in_order(held)
    epochs = epoch_table(chain.from_iterable(h.records for h in known))
    tables = _tables(known, stale_after(epochs))
    return [rank for rank, groups in sorted(tables.items()) if _has_suffix(groups)]


# What is found and merged here is plain tuples of numbers, for the same reason as above.
_Copy = tuple[int, int]  # which of the known holdings, and which of its records
_Identity = tuple[int, int, int, bytes]  # iteration, epoch, sequence, header digest
_Copies = dict[_Identity, tuple[_Copy, ...]]
_Known = Sequence[HeldRecords]


class _Group(NamedTuple):
    """The snapshots of one rank under one operator table: per iteration the one that counts."""

    num_operators: int
    newest: dict[int, SlotRecord]
    copies: dict[int, tuple[_Copy, ...]]
    conflicts: dict[int, str]  # by iteration: which snapshots claim it, and which one counts


_Tables = Mapping[int, Sequence[_Group]]  # by rank; the groups in the order of operators_id


def _in_order(held: Iterable[HeldRecords]) -> list[HeldRecords]:
    """By rank, node and segment, each once: the plan must not depend on who tells what first."""
    once: dict[tuple[int, str, str], HeldRecords] = {}
    for h in held:
        once.setdefault((h.rank, h.node, h.segment), h)
    return [once[place] for place in sorted(once)]


def _tables(known: _Known, limits: Mapping[int, int]) -> _Tables:
    """What there is of each rank; a rank of which nothing is there is absent."""
    merged: dict[int, dict[tuple[str, int], _Copies]] = {}
    for number, h in enumerate(known):
        groups = merged.setdefault(h.rank, {})
        _merge(number, h.records, limits, groups.setdefault((h.operators_id, h.num_operators), {}))
    tables = {
        rank: [_group(groups[key], key[1], known) for key in sorted(groups) if groups[key]]
        for rank, groups in merged.items()
    }
    return {rank: groups for rank, groups in tables.items() if groups}


def _merge(
    number: int, records: Sequence[SlotRecord], limits: Mapping[int, int], copies: _Copies
) -> None:
    """Add the recoverable snapshots of a segment."""
    for at, record in enumerate(records):
        if record.state is not SlotState.SEALED:
            continue
        epoch = record.epoch
        if epoch in limits and record.iteration > limits[epoch]:
            continue  # stale
        identity = (record.iteration, epoch, record.sequence, record.header_digest)
        copies[identity] = (*copies.get(identity, ()), (number, at))


def _group(copies: _Copies, num_operators: int, known: _Known) -> _Group:
    """Decide which of the snapshots of an iteration counts."""
    best: dict[int, _Identity] = {}
    conflicts: dict[int, str] = {}
    for identity in copies:
        iteration = identity[0]
        other = best.setdefault(iteration, identity)
        if other is identity:
            continue
        if other[:3] == identity[:3]:
            best[iteration] = max(other, identity, key=lambda i: _weight(i, copies[i], known))
            conflicts[iteration] = _conflict(best[iteration], copies, known)
        elif identity > other:
            best[iteration] = identity
            conflicts.pop(iteration, None)
    chosen = {iteration: copies[identity] for iteration, identity in best.items()}
    newest = {iteration: _record(found[0], known) for iteration, found in chosen.items()}
    return _Group(num_operators, newest, chosen, conflicts)


def _record(copy: _Copy, known: _Known) -> SlotRecord:
    number, at = copy
    return known[number].records[at]


def _nodes(copies: Iterable[_Copy], known: _Known) -> list[str]:
    return sorted({known[number].node for number, _ in copies})


def _weight(identity: _Identity, copies: Iterable[_Copy], known: _Known) -> tuple[bool, int, bytes]:
    """Of two snapshots that claim the same place in the history, the heavier one counts."""
    own = any(known[number].own for number, _ in copies)
    return own, len(_nodes(copies, known)), identity[3]


def _conflict(winner: _Identity, copies: _Copies, known: _Known) -> str:
    iteration, epoch, sequence, _ = winner
    claimed = [copy for i, found in copies.items() if i[:3] == winner[:3] for copy in found]
    return (
        f"{_listed('node', _nodes(claimed, known))} tell of different snapshots of iteration "
        f"{iteration} (epoch {epoch}, sequence {sequence}); that of "
        f"{_listed('node', _nodes(copies[winner], known))} counts"
    )


def _not_ready(tables: _Tables, world_size: int) -> str | None:
    """Why these holdings cannot make a plan at all; None if they may."""
    if world_size < 1:
        return f"world size {world_size}"
    missing = [rank for rank in range(world_size) if rank not in tables]
    if missing:
        return f"no node holds a snapshot of {_listed('rank', missing)} (world size {world_size})"
    beyond = sorted(rank for rank in tables if not 0 <= rank < world_size)
    if beyond:
        return f"there are holdings of {_listed('rank', beyond)}, beyond world size {world_size}"
    return None


def _newest_span(tables: _Tables) -> tuple[int, int] | None:
    """The best (start, end)."""
    for end in _common_ends(tables):
        start = _common_start(tables, end)
        if start is not None and _in_phase(tables, start, end):
            return start, end
    return None


def _in_phase(tables: _Tables, start: int, end: int) -> bool:
    """Whether every rank recorded the same phases of the schedule from ``start`` to ``end``."""
    phases: dict[int, int] = {}
    for groups in tables.values():
        for record in _between(_best_group(groups, start, end), start, end):
            if phases.setdefault(record.iteration, record.phase) != record.phase:
                return False
    return True


def _between(group: _Group, start: int, end: int) -> list[SlotRecord]:
    """The snapshots from ``end`` back to ``start``."""
    return [r for r in chain_from(group.newest[end], group.newest) if r.iteration >= start]


def _common_ends(tables: _Tables) -> list[int]:
    """The iterations, newest first, of which there is a snapshot of every rank."""
    common: set[int] | None = None
    for groups in tables.values():
        mine = set(chain.from_iterable(group.newest for group in groups))
        common = mine if common is None else common & mine
    return sorted(common or (), reverse=True)


def _common_start(tables: _Tables, end: int) -> int | None:
    """The newest iteration from which a chain up to ``end`` anchors all of every rank."""
    common: set[int] | None = None
    for groups in tables.values():
        starts: set[int] = set()
        for group in groups:
            starts |= _covering_starts(group, end)
        common = starts if common is None else common & starts
        if not common:
            return None
    return max(common) if common else None


def _covering_starts(group: _Group, end: int) -> set[int]:
    """The iterations from which on the chain up to ``end`` anchors everything."""
    newest = group.newest.get(end)
    if newest is None:
        return set()
    everything = (1 << group.num_operators) - 1
    covered = 0
    starts = set()
    for record in chain_from(newest, group.newest):
        covered |= record.anchors
        if covered & everything == everything:
            starts.add(record.iteration)
    return starts


def _has_suffix(groups: Sequence[_Group]) -> bool:
    return any(_covering_starts(group, end) for group in groups for end in group.newest)


def _plan(tables: _Tables, start: int, end: int, epoch: int, sources: _Sources) -> RecoveryPlan:
    per_rank: dict[int, tuple[Piece, ...]] = {}
    conflicts: list[str] = []
    for rank, groups in sorted(tables.items()):
        group = _best_group(groups, start, end)
        wanted = [r.iteration for r in reversed(_between(group, start, end))]
        per_rank[rank] = tuple([sources.piece(rank, group.copies[i]) for i in wanted])
        if group.conflicts:
            told = [group.conflicts[i] for i in wanted if i in group.conflicts]
            conflicts += [f"rank {rank}: {text}" for text in told]
    reason = f"every rank can start at iteration {start} and is exact at {end}"
    last = max(max(group.newest) for groups in tables.values() for group in groups)
    if last > end:
        reason += f"; snapshots up to {last} are not complete on every rank"
    reason += sources.moves() + _told(conflicts)
    moved = {rank: sources.moved[rank] for rank in per_rank}
    return RecoveryPlan(start, end, epoch, per_rank, end - start, reason, moved)


def _best_group(groups: Sequence[_Group], start: int, end: int) -> _Group:
    """Of the operator tables under which the rank can be had: the one that was written last."""
    if len(groups) == 1:
        return groups[0]
    fit = [group for group in groups if start in _covering_starts(group, end)]
    return max(fit, key=lambda group: (group.newest[end].epoch, group.newest[end].sequence))


class _Sources:
    """Orders the copies of each piece so that no holder is asked for much more than another."""

    def __init__(self, known: _Known, homes: Mapping[int, str]) -> None:
        self._known, self._homes = known, homes
        self._load: Counter[str] = Counter()  # bytes for which a node is the first to be asked
        self.moved: Counter[int] = Counter()  # bytes by rank

    def piece(self, rank: int, copies: Sequence[_Copy]) -> Piece:
        """The home's copies first, its own segment before a replica; then the others in turn."""
        home = self._homes.get(rank)
        near = [copy for copy in copies if self._known[copy[0]].node == home]
        far = [copy for copy in copies if self._known[copy[0]].node != home]
        turn = rank % len(far) if far else 0
        far = far[turn:] + far[:turn]
        if len(near) > 1:
            near.sort(key=lambda copy: not self._known[copy[0]].own)
        if not near:
            far.sort(key=lambda copy: self._load[self._known[copy[0]].node])
            self._charge(rank, far[0])
        ordered = near + far
        sources = tuple([self._source(copy) for copy in ordered])
        return Piece(_record(ordered[0], self._known), sources)

    def moves(self) -> str:
        """What travels, where the homes are known."""
        ranks = [rank for rank in self.moved if rank in self._homes]
        if not ranks:
            return ""
        size = format_bytes(sum(self.moved[rank] for rank in ranks))
        return f"; {_listed('rank', ranks)} must get {size} from other nodes"

    def _charge(self, rank: int, copy: _Copy) -> None:
        size = _record(copy, self._known).image_len
        self._load[self._known[copy[0]].node] += size
        self.moved[rank] += size

    def _source(self, copy: _Copy) -> Source:
        held = self._known[copy[0]]
        return Source(held.node, held.segment, held.records[copy[1]].index)


def _told(conflicts: Sequence[str]) -> str:
    more = len(conflicts) - _CONFLICTS_TOLD
    text = "".join(f"; {conflict}" for conflict in conflicts[:_CONFLICTS_TOLD])
    return text + (f"; and {more} more of this kind" if more > 0 else "")


def _no_span(tables: _Tables, known: _Known) -> str:
    """Why no pair of iterations fits all ranks: one has no suffix, or they have none in common."""
    for rank, groups in sorted(tables.items()):
        if not _has_suffix(groups):
            return f"rank {rank}: {_incomplete(groups, known)}"
    ends = _common_ends(tables)
    if not ends:
        shown = sorted(tables)[:8]
        spans = {r: set(chain.from_iterable(group.newest for group in tables[r])) for r in shown}
        text = ", ".join(f"rank {r}: {min(span)} to {max(span)}" for r, span in spans.items())
        return f"the ranks have no iteration in common ({text})"
    return (
        f"the ranks share iterations up to {ends[0]}, but from none of them back does every rank's "
        "chain of snapshots anchor all its operators from a common start"
    )


def _incomplete(groups: Sequence[_Group], known: _Known) -> str:
    group = max(groups, key=lambda group: max(group.newest))
    newest = max(group.newest)
    missing = missing_operators(group.newest.values(), group.num_operators)
    where = _listed("node", _nodes(group.copies[newest], known))
    return (
        f"no node holds a complete suffix; newest is iteration {newest} on {where}, and the "
        f"snapshots up to it lack an anchor of {len(missing)} of {group.num_operators} operators"
    )


def _listed(what: str, items: Collection[object]) -> str:
    shown = ", ".join(map(str, list(items)[:8])) + (", …" if len(items) > 8 else "")
    return f"{what} {shown}" if len(items) == 1 else f"{what}s {shown}"
