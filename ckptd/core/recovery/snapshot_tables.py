"""Each rank's merged inventory, the spans that all ranks can replay together, and the sources to load. Pure.

`Tables` have for each rank and iteration the snapshot that counts, with all its copies. A *span* is a (start,
end) of iterations: from the snapshots of start to end every rank becomes exact at end. `Sources` orders the
copies of each snapshot. `ckptd.core.recovery.global_plan` defines the snapshots that count; parked states and
logs are merged in the same way (`ckptd.core.recovery.localized_plan`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import msgspec

from ckptd.core.durable_experts import have_gaps
from ckptd.core.recovery.held import STORE_NODE, HeldRecords
from ckptd.core.slots.ring import chain_from, ways_to
from ckptd.core.slots.slots import SlotRecord, SlotState
from ckptd.units import format_bytes

_MOST_CONFLICTS = 3

# Plain tuples of numbers, because a large job has hundreds of thousands of them, and the garbage collector
# should not track them.
Copy = tuple[int, int]  # index into the known inventories, and index of the record
Identity = tuple[int, int, int, bytes]  # iteration, epoch, sequence, header digest
Copies = dict[Identity, tuple[Copy, ...]]
Known = Sequence[HeldRecords]


class Group(NamedTuple):
    """The snapshots of one rank with one operator table: for each iteration the one that counts.

    ``partial``: there may be images of several durable checkpoints.
    """

    num_operators: int
    newest: dict[int, SlotRecord]
    copies: dict[int, tuple[Copy, ...]]
    conflicts: dict[int, str]  # by iteration: which snapshots claim it, and which one counts
    partial: bool


Tables = Mapping[int, Sequence[Group]]  # by rank; the groups in the order of operators_id


def in_order(held: Iterable[HeldRecords]) -> list[HeldRecords]:
    """Sort by rank, node and segment, without duplicates: the plan must not depend on the order of
    reports.
    """
    once: dict[tuple[int, str, str], HeldRecords] = {}
    for h in held:
        once.setdefault((h.rank, h.node, h.segment), h)
    return [once[place] for place in sorted(once)]


def numbers_by_rank(known: Known) -> dict[int, list[int]]:
    """The indices of the known inventories by rank."""
    numbers: dict[int, list[int]] = {}
    for number, h in enumerate(known):
        numbers.setdefault(h.rank, []).append(number)
    return numbers


def tables_of(known: Known, limits: Mapping[int, int]) -> Tables:
    """The snapshots of each rank; ranks without snapshots are absent.

    Args:
        limits: for each abandoned epoch, the iteration after which its records do not count.
    """
    tables = {rank: groups_of(numbers, known, limits) for rank, numbers in numbers_by_rank(known).items()}
    return {rank: groups for rank, groups in tables.items() if groups}


def groups_of(numbers: Iterable[int], known: Known, limits: Mapping[int, int]) -> Sequence[Group]:
    """The snapshots of one rank by operator table; tables without records are absent."""
    merged: dict[tuple[str, int, str], Copies] = {}
    partial = set[tuple[str, int, str]]()
    for number in numbers:
        h = known[number]
        # No snapshot in memory continues such a chain, and its images have less than those in memory.
        alone = h.segment if h.node == STORE_NODE and h.partial and _skips(h.records) else ""
        key = h.operators_id, h.num_operators, alone
        if h.partial:
            partial.add(key)
        _merge(number, h.records, limits, merged.setdefault(key, {}))
    return [
        _group(merged[key], key[1], known, partial=key in partial) for key in sorted(merged) if merged[key]
    ]


def _skips(chain: Sequence[SlotRecord]) -> bool:
    """Whether a chain of partial snapshots is of several durable checkpoints: each image has some experts
    only, and all ranks must take the same images.

    Args:
        chain: in the order of iterations.
    """
    return have_gaps([(record.iteration, record.sequence) for record in chain])


def whole_images(
    numbers: Iterable[int], known: Known, limits: Mapping[int, int]
) -> dict[int, tuple[Copy, ...]]:
    """By iteration, the copies of images that are complete by themselves: logs, parked states."""
    copies: Copies = {}
    for number in numbers:
        _merge(number, known[number].records, limits, copies)
    return _group(copies, 0, known, partial=False).copies


def _merge(number: int, records: Sequence[SlotRecord], limits: Mapping[int, int], copies: Copies) -> None:
    """Add the recoverable snapshots of a segment."""
    for at, record in enumerate(records):
        if record.state is not SlotState.SEALED:
            continue
        epoch = record.epoch
        if epoch in limits and record.iteration > limits[epoch]:
            continue  # stale
        identity = (record.iteration, epoch, record.sequence, record.header_digest)
        copies[identity] = (*copies.get(identity, ()), (number, at))


def _group(copies: Copies, num_operators: int, known: Known, *, partial: bool) -> Group:
    """Choose the snapshot of each iteration that counts."""
    claims: dict[int, list[Identity]] = {}
    for identity in copies:
        claims.setdefault(identity[0], []).append(identity)
    best: dict[int, Identity] = {}
    conflicts: dict[int, str] = {}
    for iteration, claimed in claims.items():
        best[iteration] = claimed[0]
        if len(claimed) == 1:
            continue
        last = max(i[:3] for i in claimed)
        same = [i for i in claimed if i[:3] == last]
        winner = best[iteration] = max(same, key=lambda i: _weight(i, copies[i], known))
        if any(i is not winner and not _is_reduced(i, winner, copies, known) for i in same):
            conflicts[iteration] = _conflict(winner, copies, known)
    chosen = {iteration: copies[identity] for iteration, identity in best.items()}
    newest = {iteration: record_of(found[0], known) for iteration, found in chosen.items()}
    return Group(num_operators, newest, chosen, conflicts, partial)


def record_of(copy: Copy, known: Known) -> SlotRecord:
    """The record of a copy."""
    number, at = copy
    return known[number].records[at]


def nodes_of(copies: Iterable[Copy], known: Known) -> list[str]:
    """The nodes that hold these copies, sorted."""
    return sorted({known[number].node for number, _ in copies})


def _is_reduced(one: Identity, whole: Identity, copies: Copies, known: Known) -> bool:
    """Whether one image anchors less than another of the same snapshot: it was reduced for storage."""
    fewer, more = (record_of(copies[i][0], known).anchors for i in (one, whole))
    return fewer != more and not fewer & ~more


def _weight(identity: Identity, copies: Sequence[Copy], known: Known) -> tuple[int, bool, bool, int, bytes]:
    """Of two snapshots with the same place in the history, the one with the larger weight counts."""
    own = any(known[number].own for number, _ in copies)
    return (
        record_of(copies[0], known).anchors.bit_count(),
        any(record_of(copy, known).audited for copy in copies),
        own,
        len(nodes_of(copies, known)),
        identity[3],
    )


def _conflict(winner: Identity, copies: Copies, known: Known) -> str:
    iteration, epoch, sequence, _ = winner
    claimed = [copy for i, found in copies.items() if i[:3] == winner[:3] for copy in found]
    return (
        f"{listed('node', nodes_of(claimed, known))} hold different snapshots of iteration "
        f"{iteration} (epoch {epoch}, sequence {sequence}); that of "
        f"{listed('node', nodes_of(copies[winner], known))} counts"
    )


def listed(what: str, items: Collection[object]) -> str:
    """For a message: ``rank 3``, or ``ranks 1, 2, …``."""
    shown = ", ".join(map(str, list(items)[:8])) + (", …" if len(items) > 8 else "")
    return f"{what} {shown}" if len(items) == 1 else f"{what}s {shown}"


def conflicts_text(conflicts: Sequence[str]) -> str:
    """For a message: the first conflicts between inventories, and the number of others."""
    more = len(conflicts) - _MOST_CONFLICTS
    text = "".join(f"; {conflict}" for conflict in conflicts[:_MOST_CONFLICTS])
    return text + (f"; and {more} more of this kind" if more > 0 else "")


def newest_span(tables: Tables) -> tuple[int, int] | None:
    """The span with the newest end."""
    return next(all_spans(tables), None)


def span_to(tables: Tables, end: int) -> tuple[int, int] | None:
    """The span that ends at ``end``."""
    start = common_start(tables, end)
    return None if start is None or not _in_phase(tables, start, end) else (start, end)


def all_spans(tables: Tables) -> Iterator[tuple[int, int]]:
    """The spans of all iterations at which all ranks can resume, newest first."""
    for end in common_ends(tables):
        if (span := span_to(tables, end)) is not None:
            yield span


def _in_phase(tables: Tables, start: int, end: int) -> bool:
    """Whether every rank recorded the same phases of the schedule from ``start`` to ``end``, and, where
    partial snapshots of a chain are missing, all ranks lack the same ones.
    """
    phases: dict[int, int] = {}
    listed: set[tuple[int, ...]] = set()
    any_skips = False
    for groups in tables.values():
        group = best_group(groups, start, end)
        chain = between(group, start, end)
        if any(phases.setdefault(record.iteration, record.phase) != record.phase for record in chain):
            return False
        any_skips = any_skips or (group.partial and _skips(chain[::-1]))
        listed.add(tuple([record.iteration for record in chain]))
    return len(listed) == 1 or not any_skips


def one_before(tables: Tables, start: int, end: int, *, within: int) -> int | str:
    """The newest iteration before ``start`` from which every rank can replay to it, or the reason why
    there is none.

    A replay from there computes the values that a replay from ``start`` loads, so that they can be
    verified. If the snapshot of ``start`` anchors all operators, any older one of its epoch that does,
    too, is suitable; else only the one before it.

    Args:
        start: a start of all ranks, from which they are exact at ``end``.
        within: the limit of additional iterations to replay.
    """
    shared: set[int] | None = None
    phases: dict[int, set[int]] = {}
    for rank, groups in sorted(tables.items()):
        group = best_group(groups, start, end)
        before = ways_to(group.newest, start, group.num_operators)
        if not before:
            return f"no snapshot of rank {rank} before iteration {start} leads to that of iteration {start}"
        for iteration in before:
            phases.setdefault(iteration, set()).add(group.newest[iteration].phase)
        shared = before if shared is None else shared & before
    if not shared:
        return f"the ranks have no snapshot before iteration {start} in common"
    newest = max(shared)
    if start - newest > within:
        return f"the previous snapshot is {start - newest} iterations older, and verify_iterations={within}"
    if len(phases[newest]) > 1:
        return f"before iteration {start} the ranks were in different phases of their schedules"
    return newest


def is_whole(group: Group, iteration: int) -> bool:
    """Whether the snapshot of ``iteration`` alone anchors all operators."""
    everything = (1 << group.num_operators) - 1
    return group.newest[iteration].anchors & everything == everything


def between(group: Group, start: int, end: int) -> list[SlotRecord]:
    """The snapshots from ``end`` back to ``start``."""
    return [r for r in chain_from(group.newest[end], group.newest) if r.iteration >= start]


def common_ends(tables: Tables) -> list[int]:
    """The iterations, newest first, of which every rank has a snapshot."""
    ends = (set(chain.from_iterable(group.newest for group in groups)) for groups in tables.values())
    return sorted(common(ends), reverse=True)


def common_start(tables: Tables, end: int) -> int | None:
    """The newest iteration from which a chain up to ``end`` anchors all operators of every rank."""
    starts = (
        set(chain.from_iterable(covering_starts(group, end) for group in groups))
        for groups in tables.values()
    )
    return max(common(starts), default=None)


def common(sets: Iterable[set[int]]) -> frozenset[int]:
    """The intersection of the sets; stops when it is empty."""
    found: set[int] | None = None
    for each in sets:
        found = each if found is None else found & each
        if not found:
            break
    return frozenset(found or ())


def covering_starts(group: Group, end: int) -> set[int]:
    """The iterations from which the chain up to ``end`` anchors all operators."""
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


def has_suffix(groups: Sequence[Group]) -> bool:
    """Whether any chain of these snapshots anchors all operators."""
    return any(covering_starts(group, end) for group in groups for end in group.newest)


def best_group(groups: Sequence[Group], start: int, end: int) -> Group:
    """The operator table that was written last, of those with snapshots over the whole span.

    Of several, the one with the fewest: a chain of durable images is the same on all ranks.
    """
    if len(groups) == 1:
        return groups[0]
    fit = [group for group in groups if start in covering_starts(group, end)]

    def rating(group: Group) -> tuple[int, int, int]:
        newest = group.newest[end]
        return newest.epoch, newest.sequence, -len(between(group, start, end))

    return max(fit, key=rating)


# A large job has hundreds of thousands of sources. Structs that the garbage collector does not track are
# created five times as fast and do not trigger it (they cannot be part of a cycle).
class SnapshotCopy(msgspec.Struct, frozen=True, gc=False):
    """The place of a copy of a snapshot: slot ``index`` of a segment on a node."""

    node: str
    segment: str
    index: int


class SnapshotToLoad(msgspec.Struct, frozen=True, gc=False):
    """One snapshot to load and all its copies; ``record`` is the record of the first, preferred copy."""

    record: SlotRecord
    sources: tuple[SnapshotCopy, ...]


class Sources:
    """Orders the copies of each snapshot so that the load of all nodes is about equal.

    Args:
        known: the inventories to which the numbers in copies refer.
        homes: the node on which each rank will run.
        shared_load: another instance, to whose load the requests of this one are added.
    """

    def __init__(self, known: Known, homes: Mapping[int, str], shared_load: Sources | None = None) -> None:
        self._known, self._homes = known, homes
        # Bytes for which a node is the preferred source.
        self._load: Counter[str] = shared_load._load if shared_load else Counter()
        self.moved: Counter[int] = shared_load.moved if shared_load else Counter()  # bytes by rank
        self._stored: Counter[int] = shared_load._stored if shared_load else Counter()  # of them from storage

    def ordered(self, rank: int, copies: Sequence[Copy]) -> SnapshotToLoad:
        """The copies for ``rank``: first those of its home (its own segment before a replica), then
        the others in turn.
        """
        home = self._homes.get(rank)
        if len(copies) == 1:
            if self._known[copies[0][0]].node != home:
                self._charge(rank, copies[0])
            return SnapshotToLoad(record_of(copies[0], self._known), (self._source(copies[0]),))
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
        return SnapshotToLoad(record_of(ordered[0], self._known), sources)

    def moves(self) -> str:
        """For a message: the bytes that are transferred, if the homes are known."""
        ranks = [rank for rank in self.moved if rank in self._homes]
        if not ranks:
            return ""
        text = ""
        sent = {rank: self.moved[rank] - self._stored[rank] for rank in ranks}
        for how, sizes in (("from other nodes", sent), ("from storage", self._stored)):
            some = [rank for rank in ranks if sizes[rank]]
            if some:
                size = format_bytes(sum(sizes[rank] for rank in some))
                text += f"; {size} of {listed('rank', some)} {'comes' if len(some) == 1 else 'come'} {how}"
        return text

    def _charge(self, rank: int, copy: Copy) -> None:
        size = record_of(copy, self._known).image_len
        self._load[self._known[copy[0]].node] += size
        self.moved[rank] += size
        if self._known[copy[0]].node == STORE_NODE:
            self._stored[rank] += size

    def _source(self, copy: Copy) -> SnapshotCopy:
        held = self._known[copy[0]]
        return SnapshotCopy(held.node, held.segment, held.records[copy[1]].index)
