"""The merged inventory of each rank: for each iteration the snapshot that counts, and all its copies.
Pure.

`ckptd.core.recovery.global_plan` defines the snapshots that count; parked states and logs are merged in
the same way (`ckptd.core.recovery.localized_plan`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from ckptd.core.recovery.held import HeldRecords
from ckptd.core.slots.ring import SlotRecord, SlotState

__all__ = [
    "Copy",
    "Group",
    "Known",
    "Tables",
    "conflicts_text",
    "groups_of",
    "in_order",
    "listed",
    "nodes_of",
    "numbers_by_rank",
    "record_of",
    "tables_of",
    "whole_images",
]

_MOST_CONFLICTS = 3

# Plain tuples of numbers, because a large job has hundreds of thousands of them, and the garbage collector
# should not track them.
Copy = tuple[int, int]  # index into the known inventories, and index of the record
Identity = tuple[int, int, int, bytes]  # iteration, epoch, sequence, header digest
Copies = dict[Identity, tuple[Copy, ...]]
Known = Sequence[HeldRecords]


class Group(NamedTuple):
    """The snapshots of one rank with one operator table: for each iteration the one that counts."""

    num_operators: int
    newest: dict[int, SlotRecord]
    copies: dict[int, tuple[Copy, ...]]
    conflicts: dict[int, str]  # by iteration: which snapshots claim it, and which one counts


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
    merged: dict[tuple[str, int], Copies] = {}
    for number in numbers:
        h = known[number]
        copies = merged.setdefault((h.operators_id, h.num_operators), {})
        _merge(number, h.records, limits, copies)
    return [_group(merged[key], key[1], known) for key in sorted(merged) if merged[key]]


def whole_images(
    numbers: Iterable[int], known: Known, limits: Mapping[int, int]
) -> dict[int, tuple[Copy, ...]]:
    """By iteration, the copies of images that are complete by themselves: logs, parked states."""
    copies: Copies = {}
    for number in numbers:
        _merge(number, known[number].records, limits, copies)
    return _group(copies, 0, known).copies


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


def _group(copies: Copies, num_operators: int, known: Known) -> Group:
    """Choose the snapshot of each iteration that counts."""
    best: dict[int, Identity] = {}
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
    newest = {iteration: record_of(found[0], known) for iteration, found in chosen.items()}
    return Group(num_operators, newest, chosen, conflicts)


def record_of(copy: Copy, known: Known) -> SlotRecord:
    """The record of a copy."""
    number, at = copy
    return known[number].records[at]


def nodes_of(copies: Iterable[Copy], known: Known) -> list[str]:
    """The nodes that hold these copies, sorted."""
    return sorted({known[number].node for number, _ in copies})


def _weight(identity: Identity, copies: Iterable[Copy], known: Known) -> tuple[bool, int, bytes]:
    """Of two snapshots with the same place in the history, the one with the larger weight counts."""
    own = any(known[number].own for number, _ in copies)
    return own, len(nodes_of(copies, known)), identity[3]


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
