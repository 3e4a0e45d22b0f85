"""The slot ring of one rank: which slots form a suffix, and which slot may be overwritten next. Pure.

The input is the slot records of all generations that share one operator table (ids in ``anchors`` mean
nothing across tables). The table in shared memory is the only state, so a restarted trainer or daemon decides
the same.

A *chain* is a sealed record, the record of its ``previous`` iteration, and so on. A *suffix* is the newest
end of a chain that anchors every operator, as short as possible. Of several records of one iteration the one
filled last (highest ``epoch``, then ``sequence``) counts. No function here sees a *stale* record
(`ckptd.core.slots.slots`); its slot is the first to be given away.

`choose_slot` never gives away (DESIGN 5, invariant 2):

* **the newest complete suffix**: it stays whole while its successor is filled, is digested, or dies;
* **the chain being built**: the chains of the newest sealed record and of each record that is filling or
  filled. When such a chain is complete, it is itself the newest suffix.

Everything else that is sealed is given away oldest first. The newest suffix of a chain that continues never
begins earlier than its predecessor did, so nothing that was given away is needed later.

``protected`` are the slots that a recovery together with the other ranks would need
(`ckptd.core.replication.replicas.promised`). They are never given away either: if there is nothing else,
there is no slot, and the snapshot is left out.

How many slots: with a window of W, one chain, and each operator anchored every W snapshots, the suffix takes
W slots, one snapshot is being filled and one digested, so W + 2 slots never run out (`slots_for_window`).
While a reorder has operators W + 1 snapshots apart, the suffix takes W + 1 slots, so a fill waits for the
digest before it (``Remedy.WAIT``). After a break (a snapshot was skipped, a slot quarantined) the ring must
hold the old suffix and the new chain: a small ring then answers ``Remedy.GROW``, and the caller reserves a
generation.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from ckptd.core.slots.slots import (
    NO_EPOCHS,
    SlotRecord,
    SlotState,
    live,
)
from ckptd.core.state_machine import validating

_IN_FLIGHT = (SlotState.FILLING, SlotState.FILLED)
_EMPTY = (SlotState.FREE, SlotState.QUARANTINED)


class Remedy(StrEnum):
    """What helps when no slot can be given."""

    NONE = "none"
    WAIT = "wait"  # until a digest is done, a reader releases its slot, or the floor moves
    GROW = "grow"  # reserve a generation: more slots are promised than exist


@dataclass(frozen=True, slots=True)
class Suffix:
    """Consecutive snapshots, oldest first, that anchor every operator."""

    records: tuple[SlotRecord, ...]
    start: int
    end: int
    reason: str


@dataclass(frozen=True, slots=True)
class NoSuffix:
    """The reason why nothing can be recovered."""

    reason: str


@dataclass(frozen=True, slots=True)
class SlotChoice:
    """The slot to fill next, or None; ``releases`` is the iteration that is overwritten.

    ``left``: how many more slots could be given.
    """

    index: int | None
    reason: str
    releases: int | None = None
    remedy: Remedy = Remedy.NONE
    left: int = 0


def slots_for_window(window: int, slack: int = 0) -> int:
    """How many slots a ring needs so that an unbroken chain never runs out of them.

    Ranks that train in lockstep are at most one snapshot apart, and the older end that they have in common is
    kept too. ``slack`` is how many snapshots the floor may lag before one that it needs is given away.
    """
    return window + 2 + slack


def most_slots(window: int, span: int, slack: int, *, returned: bool) -> int:
    """The slots of two suffixes: the limit to which a ring grows that must hold more than its own suffix.

    A floor that lags further is stuck, and then a further generation helps.

    Args:
        span: how many snapshots the longest suffix of all ranks has.
        returned: the suffix to which the run went back stays, too.
    """
    return (3 if returned else 2) * max(window, span) + 2 + slack


def newest_by_iteration(
    records: Iterable[SlotRecord], epochs: Mapping[int, int] = NO_EPOCHS
) -> dict[int, SlotRecord]:
    """The sealed record of each iteration that counts: not stale, and filled last."""
    return _newest(live(records, epochs))


def chain_from(record: SlotRecord, newest: Mapping[int, SlotRecord]) -> list[SlotRecord]:
    """``record`` and the chain of sealed records before it, newest first."""
    chain = [record]
    while True:
        last = chain[-1]
        before = newest.get(last.previous)
        if before is None or last.previous < 0 or last.previous >= last.iteration:
            return chain  # the last test ends a loop of links, which only damage can make
        chain.append(before)


def complete_chain(
    end: SlotRecord, newest: Mapping[int, SlotRecord], num_operators: int, span: int = 1
) -> list[SlotRecord] | None:
    """The shortest chain back from ``end``, newest first, with all anchors and ``span`` records or more."""
    everything = _all_operators(num_operators)
    covered = 0
    chain: list[SlotRecord] = []
    record: SlotRecord | None = end
    while record is not None:
        chain.append(record)
        covered |= record.anchors
        if len(chain) >= span and covered & everything == everything:
            return chain
        previous = record.previous
        record = newest.get(previous) if 0 <= previous < record.iteration else None
    return None


def find_suffix(
    records: Iterable[SlotRecord],
    num_operators: int,
    *,
    end: int | None = None,
    epochs: Mapping[int, int] = NO_EPOCHS,
) -> Suffix | NoSuffix:
    """The complete suffix that ends at ``end``, else the newest one; newer snapshots may exist."""
    return _find_suffix(newest_by_iteration(records, epochs), num_operators, end)


def ways_to(newest: Mapping[int, SlotRecord], iteration: int, num_operators: int) -> set[int]:
    """The iterations of ``newest`` from which a replay leads to the snapshot of ``iteration``."""
    found: set[int] = set()
    record = newest[iteration]
    everything = (1 << num_operators) - 1
    if 0 <= record.previous < iteration and record.previous in newest:
        found.add(record.previous)
    if record.anchors & everything == everything:
        # A snapshot of another epoch may not lead here: the run may have continued from another state than a
        # replay of it would compute.
        older = (r for i, r in newest.items() if i < iteration and r.epoch == record.epoch)
        found |= {r.iteration for r in older if r.anchors & everything == everything}
    return found


def choose_slot(
    records: Iterable[SlotRecord],
    num_operators: int,
    *,
    busy: Container[tuple[int, int]] = (),
    generation: int,
    protected: Container[tuple[int, int]] = (),
    epochs: Mapping[int, int] = NO_EPOCHS,
) -> SlotChoice:
    """The slot of ``generation`` to overwrite next; see the module for those that are never given away.

    Args:
        records: every slot of every generation that shares the operator table.
        busy: slots (generation, index) that a reader holds.
        protected: slots (generation, index) that the other ranks may need; they must be kept.
        epochs: starts of epochs known from elsewhere.
    """
    every = list(records)
    table = live(every, epochs)
    own = [record for record in every if record.generation == generation]
    ready = [record for record in own if record.key not in busy]
    kept = _kept(table, num_operators)
    alive = {record.key for record in table}
    unkept = [r for r in ready if r.sealed and r.key in alive and r.key not in kept]
    spare = [record for record in unkept if record.key not in protected]
    unpromised = [r for r in ready if r.state in _EMPTY or (r.sealed and r.key not in alive)]
    left = len(unpromised) + len(spare) - 1
    choice = _stale(ready, table) or _empty(ready)
    if choice is None and spare:
        choice = _give_away(spare)
    if choice is None:
        choice = _no_slot(table, num_operators, own, generation, protected)
    else:
        choice = replace(choice, left=max(0, left))
    if validating():
        _validate(choice, own, _newest(table), num_operators, busy, protected)
    return choice


def _validate(
    choice: SlotChoice,
    own: Sequence[SlotRecord],
    newest: Mapping[int, SlotRecord],
    num_operators: int,
    busy: Container[tuple[int, int]],
    needed: Container[tuple[int, int]],
) -> None:
    """Assert invariants 1 and 2 of DESIGN 5."""
    suffix = _find_suffix(newest, num_operators)
    promised = suffix.records if isinstance(suffix, Suffix) else ()
    covered = functools.reduce(operator.or_, (r.anchors for r in promised), 0)
    assert not promised or covered & _all_operators(num_operators) == _all_operators(num_operators)
    for before, record in itertools.pairwise(promised):
        assert record.previous == before.iteration, f"{record.key} does not follow {before.key}"
    assert all(record.sealed for record in promised), "a suffix of what is not sealed"
    chosen = next((r for r in own if r.index == choice.index), None)
    assert (choice.index is None) == (chosen is None)
    if chosen is None:
        assert choice.remedy is not Remedy.NONE, "no slot, and no remedy"
        return
    assert chosen not in promised, f"slot {chosen.key} of the newest suffix is given away"
    assert chosen.key not in busy, f"slot {chosen.key} is being read"
    assert chosen.state not in _IN_FLIGHT, f"slot {chosen.key} is {chosen.state.name}"
    stale = chosen.sealed and newest.get(chosen.iteration) is not chosen
    assert stale or not chosen.sealed or chosen.key not in needed, f"{chosen.key} is promised"
    assert chosen.sealed == (choice.releases is not None)


def droppable_generations(
    records: Iterable[SlotRecord],
    num_operators: int,
    current_generation: int,
    *,
    protected: Iterable[tuple[int, int]] = (),
    epochs: Mapping[int, int] = NO_EPOCHS,
) -> set[int]:
    """The generations, other than the current one, of which no suffix needs anything.

    Until a suffix is complete, every generation with a snapshot stays. So does one with a ``protected`` slot
    (generation, index).
    """
    every = list(records)
    table = live(every, epochs)
    others = {record.generation for record in every} - {current_generation}
    if isinstance(_find_suffix(_newest(table), num_operators), NoSuffix):
        needed = {r.generation for r in table if r.sealed or r.state in _IN_FLIGHT}
    else:
        needed = {generation for generation, _ in _kept(table, num_operators)}
    needed |= {generation for generation, _ in protected}
    return others - needed


def truncate(records: Iterable[SlotRecord], after_iteration: int) -> list[SlotRecord]:
    """The records to free after a restore to ``after_iteration``: the later ones.

    They must be free before the first snapshot after the restore, which starts another history.
    """
    held = (SlotState.SEALED, *_IN_FLIGHT)
    return [r for r in records if r.state in held and r.iteration > after_iteration]


def missing_operators(
    records: Iterable[SlotRecord], num_operators: int, *, end: int | None = None
) -> list[int]:
    """The operators, ascending, that the chain up to ``end`` (or the newest iteration) does not anchor."""
    newest = newest_by_iteration(records)
    covered = 0
    if newest:
        last = max(newest) if end is None else end
        for record in chain_from(newest[last], newest) if last in newest else ():
            covered |= record.anchors
    missing = _all_operators(num_operators) & ~covered
    bits = missing.to_bytes((num_operators + 7) // 8, "little")
    return [8 * at + bit for at, byte in enumerate(bits) if byte for bit in range(8) if byte >> bit & 1]


def _order(record: SlotRecord) -> tuple[int, int]:
    return record.epoch, record.sequence


def _newest(table: Iterable[SlotRecord]) -> dict[int, SlotRecord]:
    """As `newest_by_iteration`, without another search for stale records: it runs in the training thread."""
    newest: dict[int, SlotRecord] = {}
    for record in table:
        if record.state is SlotState.SEALED:
            known = newest.setdefault(record.iteration, record)
            if known is not record and _order(record) > _order(known):
                newest[record.iteration] = record
    return newest


def _stale(ready: Sequence[SlotRecord], table: Sequence[SlotRecord]) -> SlotChoice | None:
    """The slot of a stale snapshot; the oldest epoch goes first, because later ones show that it is stale."""
    alive = {record.key for record in table}
    stale = [record for record in ready if record.sealed and record.key not in alive]
    if not stale:
        return None
    oldest = min(stale, key=lambda record: (record.epoch, record.iteration, record.sequence))
    why = f"iteration {oldest.iteration} of epoch {oldest.epoch} belongs to an abandoned history"
    return SlotChoice(oldest.index, why, releases=oldest.iteration)


def _empty(ready: Sequence[SlotRecord]) -> SlotChoice | None:
    """The first slot that holds nothing recoverable."""
    for state in _EMPTY:
        indices = [record.index for record in ready if record.state is state]
        if indices:
            return SlotChoice(min(indices), f"slot is {state.name.lower()}")
    return None


def _give_away(spare: Sequence[SlotRecord]) -> SlotChoice:
    """The oldest of these sealed slots."""
    oldest = min(spare, key=lambda record: (record.iteration, *_order(record)))
    why = f"iteration {oldest.iteration} is not part of what is promised"
    return SlotChoice(oldest.index, why, releases=oldest.iteration)


def _all_operators(num_operators: int) -> int:
    return (1 << num_operators) - 1


def _suffix(newest_first: Sequence[SlotRecord], newest_iteration: int) -> Suffix:
    records = tuple(reversed(newest_first))
    start, end = records[0].iteration, records[-1].iteration
    reason = f"iterations {start} to {end} anchor every operator"
    if end != newest_iteration:
        reason += f"; newer snapshots, up to {newest_iteration}, do not yet"
    return Suffix(records, start, end, reason)


def _find_suffix(
    newest: Mapping[int, SlotRecord], num_operators: int, end: int | None = None
) -> Suffix | NoSuffix:
    if not newest:
        return NoSuffix("no sealed snapshot")
    if end is not None and end not in newest:
        return NoSuffix(f"no sealed snapshot of iteration {end}")
    ends = sorted(newest, reverse=True) if end is None else [end]
    for candidate in ends:
        chain = complete_chain(newest[candidate], newest, num_operators)
        if chain is not None:
            return _suffix(chain, ends[0])
    missing = missing_operators(newest.values(), num_operators, end=ends[0])
    return NoSuffix(
        f"the snapshots up to iteration {ends[0]} lack an anchor of {len(missing)} of "
        f"{num_operators} operators{_some(missing)}"
    )


def _kept(table: Sequence[SlotRecord], num_operators: int) -> set[tuple[int, int]]:
    """The slots of the newest complete suffix and of every chain that may become one."""
    newest = _newest(table)
    suffix = _find_suffix(newest, num_operators)
    kept = {record.key for record in suffix.records} if isinstance(suffix, Suffix) else set()
    tips = [record for record in table if record.state in _IN_FLIGHT]
    if newest:
        tips.append(newest[max(newest)])
    for tip in tips:
        chain = complete_chain(tip, newest, num_operators) or chain_from(tip, newest)
        kept.update(record.key for record in chain)
    return kept


def _no_slot(
    table: Sequence[SlotRecord],
    num_operators: int,
    own: Sequence[SlotRecord],
    generation: int,
    needed: Container[tuple[int, int]],
) -> SlotChoice:
    """The reason why no slot can be given, and the remedy."""
    if not own:
        reason = f"generation {generation} has no slots"
        return SlotChoice(None, reason, remedy=Remedy.GROW)
    settled = [
        replace(record, state=SlotState.SEALED) if record.state in _IN_FLIGHT else record for record in table
    ]
    kept = _kept(settled, num_operators)
    counts = ", ".join(
        f"{sum(record.state is state for record in own)} {state.name.lower()}"
        for state in (SlotState.SEALED, SlotState.FILLED, SlotState.FILLING)
    )
    alive = {record.key for record in settled}
    # A stale record that is still here is being read or digested.
    unkept = [r for r in settled if r.generation == generation and r.key not in kept]
    if any(r.key not in needed for r in unkept) or any(r.key not in alive for r in own):
        reason = f"all {len(own)} slots are in use ({counts}): wait for a digest or a reader"
        return SlotChoice(None, reason, remedy=Remedy.WAIT)
    if unkept:
        lowest = min(record.iteration for record in unkept)
        reason = (
            f"all {len(own)} slots ({counts}) are promised: the floor has not moved, and the other "
            f"ranks may need what is there from iteration {lowest} on"
        )
        return SlotChoice(None, reason, remedy=Remedy.WAIT)
    reason = (
        f"all {len(own)} slots ({counts}) are promised to the newest complete suffix or to the "
        "chain that will replace it: a new generation is needed"
    )
    return SlotChoice(None, reason, remedy=Remedy.GROW)


def _some(operators: Sequence[int], limit: int = 5) -> str:
    if not operators:
        return ""
    text = ", ".join(map(str, operators[:limit]))
    return f" (ids {text}{', …' if len(operators) > limit else ''})"
