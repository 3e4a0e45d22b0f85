"""Global recovery: where all ranks resume, and the sources of their snapshots. One pure function.

Each node reports its inventory of the run: the snapshots of its own ranks, and replicas of others. The ranks
exchange these inventories, and each computes the same plan from the same input, in any order, without a
coordinator.

The plan is a pair of iterations common to all ranks. Every rank loads its snapshot of *start*,
replays forward, and is dense and exact at *end*. Some nodes hold an unbroken chain of its snapshots
over exactly that span, and the chain anchors each of its operators. Over the span all ranks were in
the same phases of their schedules, because an operator whose gradients are averaged over ranks must be
frozen on all of them in an iteration, or on none. Ranks differ in the length of their chains (pipeline
stages, other windows): the longest one decides the start of all. The newest *end* wins, then the newest
*start*, which needs the least replay. If the plan is to be *verified*, all ranks start one snapshot
earlier, if every rank has it: the replay then computes the values of the first snapshot, and compares
them with the recorded ones.

What counts as a snapshot (``docs/replication.md`` section 2):

* snapshots that a later epoch abandoned do not count, wherever that epoch is known from;
* records of one rank and one operator table with equal (iteration, epoch, sequence, header digest) are
  copies of one snapshot, so a chain may be spread over segments and nodes;
* of several snapshots of one iteration, the one filled last counts. If two have the same place in the
  history, an audited one counts, then the trainer's own before a replica, then the one on more nodes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType

from ckptd.core.recovery.held import HeldRecords
from ckptd.core.recovery.snapshot_tables import (
    Group,
    Known,
    SnapshotToLoad,
    Sources,
    Tables,
    all_spans,
    best_group,
    between,
    common_ends,
    common_start,
    conflicts_text,
    covering_starts,
    groups_of,
    has_suffix,
    in_order,
    is_whole,
    listed,
    newest_span,
    nodes_of,
    one_before,
    span_to,
    tables_of,
)
from ckptd.core.slots.ring import chain_from, missing_operators
from ckptd.core.slots.slots import NO_EPOCHS, epoch_table, stale_after

VERIFY_ITERATIONS = 16
"""The default of a trainer's ``verify_iterations``."""

_NO_HOMES: Mapping[int, str] = MappingProxyType({})
_DIFFERENT_SCHEDULES = "the ranks have snapshots in common, but were in different phases of their schedules"
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """The resumption of all ranks.

    Attributes:
        epoch: the highest known one; the recovery begins the next.
        per_rank: the snapshots of each rank from ``start`` to ``end``, oldest first.
        moved_bytes: the bytes that each rank must fetch because its home node does not hold them.
        needed: the first iteration whose snapshots are necessary; if ``start`` is earlier, the replay
            verifies all values that it loads.
        unverified: the reason why it does not; "" if it does.
        dense: the snapshots of ``start`` anchor all operators of every rank.
    """

    start: int
    end: int
    epoch: int
    per_rank: Mapping[int, tuple[SnapshotToLoad, ...]]
    replayed: int
    reason: str
    moved_bytes: Mapping[int, int]
    needed: int
    unverified: str = ""
    dense: bool = False


@dataclass(frozen=True, slots=True)
class NoRecovery:
    """The reason why no plan exists, and the highest known epoch (-1: none).

    ``different_schedules``: complete suffixes exist, but of different schedules; the job cannot use them, and
    should not discard them.
    """

    reason: str
    epoch: int = -1
    different_schedules: bool = False


def plan_recovery(
    held: Iterable[HeldRecords],
    world_size: int,
    *,
    homes: Mapping[int, str] = _NO_HOMES,
    lost: Container[str] = (),
    epochs: Mapping[int, int] = NO_EPOCHS,
    at: int | None = None,
    verify_iterations: int = 0,
) -> RecoveryPlan | NoRecovery:
    """Plan the recovery to the newest state that all ranks can reach, or to iteration ``at``; see the module.

    Args:
        held: the inventories of the nodes; a segment that is reported twice counts once.
        homes: the node on which each rank will run; its copies are preferred.
        lost: nodes whose inventories do not count.
        epochs: starts of epochs known from other sources (boundary logs, parked states).
        verify_iterations: the limit of additional iterations to replay, so that all loaded values
            are verified. If the snapshots for this are missing, the plan does without.
    """
    known = in_order(h for h in held if h.node not in lost)
    seen = epoch_table(chain.from_iterable(h.records for h in known), epochs)
    epoch = max(seen, default=-1)
    tables = tables_of(known, stale_after(seen))
    refusal = _not_ready(tables, world_size)
    if refusal is not None:
        return NoRecovery(refusal, epoch)
    span = newest_span(tables) if at is None else span_to(tables, at)
    if span is None and at is not None:
        return NoRecovery(f"iteration {at} is not available on all ranks; {_reported_spans(tables)}", epoch)
    if span is None:
        different_schedules = any(common_start(tables, end) is not None for end in common_ends(tables))
        return NoRecovery(
            _DIFFERENT_SCHEDULES if different_schedules else _no_span(tables, known),
            epoch,
            different_schedules,
        )
    return _plan(tables, *span, epoch, Sources(known, homes), verify_iterations)


def reachable(
    held: Iterable[HeldRecords],
    world_size: int,
    *,
    epochs: Mapping[int, int] = NO_EPOCHS,
    verify_iterations: int = 0,
) -> list[tuple[int, int]]:
    """Every iteration at which all ranks can resume, newest first, as (start of its replay, iteration).

    Args:
        verify_iterations: as for `plan_recovery`.
    """
    known = in_order(held)
    seen = epoch_table(chain.from_iterable(h.records for h in known), epochs)
    tables = tables_of(known, stale_after(seen))
    if _not_ready(tables, world_size) is not None:
        return []
    found = []
    for needed, end in all_spans(tables):
        before = one_before(tables, needed, end, within=verify_iterations)
        found.append((needed if isinstance(before, str) else before, end))
    return found


def newer_anchors(
    held: Iterable[HeldRecords],
    plan: RecoveryPlan,
    rank: int,
    *,
    homes: Mapping[int, str] = _NO_HOMES,
    epochs: Mapping[int, int] = NO_EPOCHS,
) -> tuple[SnapshotToLoad, ...]:
    """Partial snapshots of a rank outside the plan's chain, up to its end and newest first, that anchor
    operators later than the chain does (MoC-System, section 5.1: memory has newer experts than storage).

    What is newer than the plan's end does not count: an expert of iteration u > end would learn from the
    batches in between twice. Other ranks do not know of these snapshots, so nothing that several ranks hold
    must be taken from them.

    Args:
        held, homes, epochs: as of `plan_recovery`.
    """
    known, chained = in_order(held), plan.per_rank[rank]
    limits = stale_after(epoch_table(chain.from_iterable(h.records for h in known), epochs))
    at = chained[0].sources[0]
    of_rank = [i for i, h in enumerate(known) if h.rank == rank and h.partial]
    table = next(
        (
            known[i].operators_id
            for i in of_rank
            if (known[i].node, known[i].segment) == (at.node, at.segment)
        ),
        None,
    )
    alike = [i for i in of_rank if known[i].operators_id == table]
    found = [
        (record, group.copies[record.iteration])
        for group in groups_of(alike, known, limits)
        for record in group.newest.values()
        if record.iteration <= plan.end
    ]
    found.sort(key=lambda each: (each[0].iteration, each[0].anchors.bit_count()), reverse=True)
    left = [piece.record for piece in chained]
    sources, covered = Sources(known, homes), 0
    newer = []
    for record, copies in found:
        while left and left[-1].iteration >= record.iteration:
            covered |= left.pop().anchors
        if record.anchors & ~covered:
            newer.append(sources.ordered(rank, copies))
            covered |= record.anchors
    return tuple(newer)


def _reported_spans(tables: Tables) -> str:
    ends = [end for _, end in all_spans(tables)]
    shown = ", ".join(map(str, ends[:_SHOWN])) + (", …" if len(ends) > _SHOWN else "")
    return f"what can be gone back to is {shown}" if ends else "nothing can be gone back to"


def complete_suffixes(held: Iterable[HeldRecords]) -> dict[int, str]:
    """The newest complete suffix of each rank, and the nodes that hold its snapshots, for a message."""
    known = in_order(held)
    epochs = epoch_table(chain.from_iterable(h.records for h in known))
    found: dict[int, str] = {}
    for rank, groups in sorted(tables_of(known, stale_after(epochs)).items()):
        for group in groups:
            ends = (end for end in sorted(group.newest, reverse=True) if covering_starts(group, end))
            for end in ends:
                start = max(covering_starts(group, end))
                copies = [group.copies[r.iteration] for r in between(group, start, end)]
                nodes = nodes_of(chain.from_iterable(copies), known)
                found[rank] = f"iterations {start} to {end} on {listed('node', nodes)}"
                break
    return found


def _not_ready(tables: Tables, world_size: int) -> str | None:
    """The reason why these inventories cannot make a plan; None if they may."""
    if world_size < 1:
        return f"world size {world_size}"
    missing = [rank for rank in range(world_size) if rank not in tables]
    if missing:
        return f"no node holds a snapshot of {listed('rank', missing)} (world size {world_size})"
    beyond = sorted(rank for rank in tables if not 0 <= rank < world_size)
    if beyond:
        return f"nodes hold snapshots of {listed('rank', beyond)}, beyond world size {world_size}"
    return None


def _plan(
    tables: Tables, needed: int, end: int, epoch: int, sources: Sources, verify_iterations: int
) -> RecoveryPlan:
    before = (
        one_before(tables, needed, end, within=verify_iterations)
        if verify_iterations > 0
        else "verify_iterations=0"
    )
    start, unverified = (needed, before) if isinstance(before, str) else (before, "")
    per_rank: dict[int, tuple[SnapshotToLoad, ...]] = {}
    conflicts: list[str] = []
    dense = True
    for rank, groups in sorted(tables.items()):
        group = best_group(groups, needed, end)
        dense = dense and is_whole(group, start)
        wanted = [r.iteration for r in reversed(between(group, needed, end))]
        if start < needed:
            wanted.insert(0, start)
        per_rank[rank] = tuple([sources.ordered(rank, group.copies[i]) for i in wanted])
        if group.conflicts:
            found = [group.conflicts[i] for i in wanted if i in group.conflicts]
            conflicts += [f"rank {rank}: {text}" for text in found]
    what = f"the snapshots of iterations {start} to {end}" if start < end else "a snapshot"
    reason = (
        f"every rank has {what}, which hold{'' if start < end else 's'} the whole state of iteration {end}"
    )
    last = max(max(group.newest) for groups in tables.values() for group in groups)
    if last > end:
        reason += f"; snapshots up to {last} are not complete on every rank"
    reason += sources.moves() + conflicts_text(conflicts)
    moved = {rank: sources.moved[rank] for rank in per_rank}
    return RecoveryPlan(start, end, epoch, per_rank, end - start, reason, moved, needed, unverified, dense)


def _no_span(tables: Tables, known: Known) -> str:
    """Why no pair of iterations fits all ranks: a rank has no suffix, or they have none in common."""
    for rank, groups in sorted(tables.items()):
        if not has_suffix(groups):
            return f"rank {rank}: {_incomplete(groups, known)}"
    ends = common_ends(tables)
    if not ends:
        shown = sorted(tables)[:_SHOWN]
        spans = {r: set(chain.from_iterable(group.newest for group in tables[r])) for r in shown}
        text = ", ".join(f"rank {r}: {min(span)} to {max(span)}" for r, span in spans.items())
        return f"the ranks have no iteration in common ({text})"
    return (
        f"the ranks have iterations up to {ends[0]} in common, but their chains of snapshots have no common "
        f"start from which they anchor all operators ({_chains(tables, ends[0])})"
    )


def _chains(tables: Tables, end: int) -> str:
    """For a message: each rank's chain up to ``end``, and the newest start that anchors all operators."""
    texts = []
    for rank in sorted(tables)[:_SHOWN]:
        found = [group for group in tables[rank] if end in group.newest]
        chains = [[r.iteration for r in chain_from(g.newest[end], g.newest)] for g in found]
        starts = set(chain.from_iterable(covering_starts(group, end) for group in found))
        whole = f"whole from {max(starts)}" if starts else "not whole"
        texts.append(f"rank {rank}: {min(chain.from_iterable(chains))} to {end}, {whole}")
    return ", ".join(texts)


def _incomplete(groups: Sequence[Group], known: Known) -> str:
    group = max(groups, key=lambda group: max(group.newest))
    newest = max(group.newest)
    missing = missing_operators(group.newest.values(), group.num_operators)
    where = listed("node", nodes_of(group.copies[newest], known))
    return (
        f"no node holds a complete suffix; the newest snapshot is iteration {newest} on {where}, and the "
        f"snapshots up to it lack an anchor of {len(missing)} of {group.num_operators} operators"
    )
