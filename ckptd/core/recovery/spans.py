"""The spans of iterations that all ranks can replay together, given their snapshots. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from ckptd.core.recovery.tables import Group, Tables
from ckptd.core.slots.ring import SlotRecord, chain_from, ways_to

__all__ = [
    "all_spans",
    "best_group",
    "between",
    "common_ends",
    "common_start",
    "covering_starts",
    "has_suffix",
    "in_phase",
    "is_whole",
    "newest_span",
    "one_before",
    "span_to",
]


def newest_span(tables: Tables) -> tuple[int, int] | None:
    """The newest (start, end) of all ranks."""
    for end in common_ends(tables):
        start = common_start(tables, end)
        if start is not None and in_phase(tables, start, end):
            return start, end
    return None


def span_to(tables: Tables, end: int) -> tuple[int, int] | None:
    """The span that ends at ``end``."""
    start = common_start(tables, end) if end in common_ends(tables) else None
    return (start, end) if start is not None and in_phase(tables, start, end) else None


def all_spans(tables: Tables) -> list[tuple[int, int]]:
    """The spans of all iterations at which all ranks can resume, newest first."""
    found = (span_to(tables, end) for end in common_ends(tables))
    return [span for span in found if span is not None]


def in_phase(tables: Tables, start: int, end: int) -> bool:
    """Whether every rank recorded the same phases of the schedule from ``start`` to ``end``."""
    phases: dict[int, int] = {}
    for groups in tables.values():
        for record in between(best_group(groups, start, end), start, end):
            if phases.setdefault(record.iteration, record.phase) != record.phase:
                return False
    return True


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
    common: set[int] | None = None
    phases: dict[int, set[int]] = {}
    for rank, groups in sorted(tables.items()):
        group = best_group(groups, start, end)
        before = ways_to(group.newest, start, group.num_operators)
        if not before:
            return f"no snapshot of rank {rank} before iteration {start} leads to that of iteration {start}"
        for iteration in before:
            phases.setdefault(iteration, set()).add(group.newest[iteration].phase)
        common = before if common is None else common & before
    if not common:
        return f"the ranks have no snapshot before iteration {start} in common"
    newest = max(common)
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
    common: set[int] | None = None
    for groups in tables.values():
        mine = set(chain.from_iterable(group.newest for group in groups))
        common = mine if common is None else common & mine
    return sorted(common or (), reverse=True)


def common_start(tables: Tables, end: int) -> int | None:
    """The newest iteration from which a chain up to ``end`` anchors all operators of every rank."""
    common: set[int] | None = None
    for groups in tables.values():
        starts: set[int] = set()
        for group in groups:
            starts |= covering_starts(group, end)
        common = starts if common is None else common & starts
        if not common:
            return None
    return max(common) if common else None


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
    """The operator table that was written last, of those with snapshots over the whole span."""
    if len(groups) == 1:
        return groups[0]
    fit = [group for group in groups if start in covering_starts(group, end)]
    return max(fit, key=lambda group: (group.newest[end].epoch, group.newest[end].sequence))
