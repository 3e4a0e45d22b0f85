"""What the host of replicas decides: which slot a peer may fill here, and what may go (pure).

All replicas of one rank on one node are a *group*: a rank that moved, or needed another geometry, has
several for a while. Nothing here remembers anything; the slot tables and the promise are the input. Replicas
of different origin may have one generation number, so who calls gives each a number of its own.

The promise is what the run agreed on (``docs/replication.md`` section 6): the *floor*, of which every rank
holds a complete suffix in every promised copy, and the *horizon*: no iteration between floor and horizon
will ever become the floor, because some replica that was begun anew holds no suffix that ends there.
What a group keeps, whatever a peer wants (`promised`):

* the suffix that ends at the floor;
* every complete suffix that ends at the horizon (or the floor) or later: each of these ends may be the
  next floor, and its rank may have said so already;
* if it holds none of these (it was begun anew), its newest complete suffix.

A suffix has at least ``span`` snapshots here: all ranks load from one start, so a rank that needs fewer
than others (a smaller window) must keep as many as the others need.

While a snapshot is received, what links back from it stays too: that chain becomes the next suffix.
Therefore a group needs the slots of two suffixes to get over any gap, and of one suffix and the
floor's lag while there is none. If neither fits, the peer is told ``busy`` and tries again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ckptd.core.slots.ring import (
    SlotRecord,
    SlotState,
    Suffix,
    chain_from,
    epoch_table,
    is_stale,
    newest_by_iteration,
)

__all__ = [
    "Admit",
    "Deny",
    "Promise",
    "admit",
    "promised",
    "removable",
    "spanning_suffix",
    "stale_slots",
]

Key = tuple[int, int]
_NO_EPOCHS: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Promise:
    """What the run agreed on, as far as it is known here; -1: nothing yet."""

    floor: int = -1
    horizon: int = -1


@dataclass(frozen=True, slots=True)
class Admit:
    """The peer may fill this slot; ``releases`` is the iteration that is lost by it."""

    index: int
    reason: str
    releases: int | None = None


@dataclass(frozen=True, slots=True)
class Deny:
    """It may not: ``code`` is held, stale or busy, as in `PeerRefused`."""

    code: str
    reason: str


def admit(
    incoming: SlotRecord,
    records: Iterable[SlotRecord],
    num_operators: int,
    *,
    generation: int,
    promise: Promise,
    epochs: Mapping[int, int] = _NO_EPOCHS,
    span: int = 1,
    busy: Collection[Key] = (),
) -> Admit | Deny:
    """The slot of replica ``generation`` for this snapshot.

    Args:
        incoming: its header, with its anchors; generation, index and state do not matter.
        records: the slots of all replicas of the group that share the operator table.
        epochs: the epochs known to this node and their starts.
        span: how many snapshots the longest suffix among all ranks has.
        busy: slots (generation, index) that a reader holds.
    """
    table = list(records)
    known = epoch_table([*_told(table), incoming], epochs)
    if is_stale(incoming, known):
        return Deny("stale", f"{_named(incoming)} belongs to an abandoned history")
    own = [record for record in table if record.generation == generation]
    for record in own:
        if record.sealed and _same_fill(record, incoming):
            if record.header_digest == incoming.header_digest:
                return Deny("held", f"{_named(incoming)} is in slot {record.index}")
            return Admit(record.index, "what is here under this name is another image")
    if any(r.sealed and _same_fill(r, incoming) and r.header_digest == incoming.header_digest for r in table):
        # Of a rank that has moved since, say. A second copy would take a slot, and there may be
        # none until this one counts.
        return Deny("held", f"{_named(incoming)} is in another replica of this rank")
    ready = [record for record in own if record.key not in busy]
    empty = _empty(ready, known)
    if empty is not None:
        return empty
    kept = promised(table, num_operators, promise=promise, epochs=known, span=span, incoming=incoming)
    spare = [record for record in ready if record.sealed and record.key not in kept]
    if not spare:
        text = f"all {len(own)} slots are promised (floor {promise.floor}) or in use"
        return Deny("busy", text)
    oldest = min(spare, key=lambda record: (record.iteration, record.epoch, record.sequence))
    text = f"iteration {oldest.iteration} is not part of what is promised"
    return Admit(oldest.index, text, releases=oldest.iteration)


def promised(
    records: Iterable[SlotRecord],
    num_operators: int,
    *,
    promise: Promise,
    epochs: Mapping[int, int] = _NO_EPOCHS,
    span: int = 1,
    incoming: SlotRecord | None = None,
    up_to: int | None = None,
    tip: int = -1,
) -> set[Key]:
    """The sealed slots that stay; with ``incoming``, also those that it links to. See the module.

    Args:
        up_to: no suffix that ends later can become the floor before who holds these slots is told.
        tip: the suffix that ends here stays, too, until there is a floor there or later.
    """
    newest = newest_by_iteration(_told(records), epochs)
    at_floor = spanning_suffix(newest, num_operators, span, end=promise.floor)
    least = max(promise.floor, promise.horizon)
    suffixes = [at_floor, *_ends_from(newest, num_operators, span, least, up_to)]
    if tip > promise.floor:
        suffixes.append(spanning_suffix(newest, num_operators, span, end=tip))
    if not any(suffixes):
        suffixes = [spanning_suffix(newest, num_operators, span)]
    kept = [record for suffix in suffixes if suffix is not None for record in suffix.records]
    if incoming is not None:
        kept.extend(_around(incoming, newest, num_operators, span))
    return {record.key for record in kept}


def removable(
    group: Mapping[str, tuple[int, Sequence[SlotRecord]]],
    promise: Promise,
    *,
    epochs: Mapping[int, int] = _NO_EPOCHS,
    span: int = 1,
    is_open: bool = False,
) -> list[tuple[str, str]]:
    """The replicas that no promise needs, and why; who calls passes over those that a peer has open.

    Where a peer has one open, what its newest chain links to in others stays: the chain that is
    being built lies in several replicas where the primary's ring has grown.

    As long as there is no floor, only those go that hold nothing but abandoned histories.

    Args:
        group: by name: the number of operators, and the slots.
        is_open: whether a peer has one of them open.
    """
    found = []
    records = [record for _, slots in group.values() for record in slots]
    known = epoch_table(_told(records), epochs)
    for name, (num_operators, slots) in group.items():
        alike = [r for n, others in group.values() if n == num_operators for r in others]
        reason = _why_removable(slots, alike, num_operators, promise, known, span)
        if reason and not (is_open and _is_built_on(slots, alike, num_operators, known, span)):
            found.append((name, reason))
    return found


def stale_slots(records: Iterable[SlotRecord], epochs: Mapping[int, int] = _NO_EPOCHS) -> list[Key]:
    """The sealed slots that hold an abandoned history: to be freed."""
    table = list(_told(records))
    known = epoch_table(table, epochs)
    return [record.key for record in table if is_stale(record, known)]


def _is_built_on(
    slots: Sequence[SlotRecord],
    alike: Sequence[SlotRecord],
    num_operators: int,
    epochs: Mapping[int, int],
    span: int,
) -> bool:
    newest = newest_by_iteration(_told(alike), epochs)
    tip = _chain(newest[max(newest)], newest, num_operators, span) if newest else []
    return any(slot.key in {record.key for record in tip} for slot in slots)


def _why_removable(
    slots: Sequence[SlotRecord],
    alike: Sequence[SlotRecord],
    num_operators: int,
    promise: Promise,
    epochs: Mapping[int, int],
    span: int,
) -> str:
    newest = newest_by_iteration(_told(alike), epochs)
    live = {record.key for record in newest.values()}
    if not any(slot.key in live for slot in slots):
        return "it holds nothing that counts"
    if promise.floor < 0:
        return ""
    latest = spanning_suffix(newest, num_operators, span)
    if latest is not None and latest.end < promise.floor:
        return f"every replica that counts holds a suffix up to {promise.floor}"
    kept = promised(alike, num_operators, promise=promise, epochs=epochs, span=span)
    if latest is None or any(slot.key in kept for slot in slots):
        return ""
    return f"what is promised from iteration {latest.start} on lies in another replica"


def _told(records: Iterable[SlotRecord]) -> Iterator[SlotRecord]:
    """Those whose headers a peer wrote and that are complete (a free slot's header means nothing)."""
    return (record for record in records if record.sealed)


def _named(record: SlotRecord) -> str:
    return f"iteration {record.iteration} of epoch {record.epoch}"


def _same_fill(a: SlotRecord, b: SlotRecord) -> bool:
    return (a.iteration, a.epoch, a.sequence) == (b.iteration, b.epoch, b.sequence)


def _empty(ready: Sequence[SlotRecord], epochs: Mapping[int, int]) -> Admit | None:
    """A slot that holds nothing of use: stale, free or quarantined."""
    for record in ready:
        if record.sealed and is_stale(record, epochs):
            return Admit(record.index, f"{_named(record)} belongs to an abandoned history")
    for state in (SlotState.FREE, SlotState.QUARANTINED):
        for record in ready:
            if record.state is state:
                return Admit(record.index, f"slot is {state.name.lower()}")
    return None


def spanning_suffix(
    newest: Mapping[int, SlotRecord], num_operators: int, span: int = 1, *, end: int | None = None
) -> Suffix | None:
    """The complete suffix of ``span`` snapshots or more that ends at ``end``, else the newest; or None.

    Args:
        newest: the records that count (`newest_by_iteration`).
    """
    for iteration in sorted(newest, reverse=True) if end is None else [end]:
        if iteration in newest:
            chain = _chain(newest[iteration], newest, num_operators, span)
            if _complete(chain, num_operators) and len(chain) >= span:
                records = tuple(reversed(chain))
                text = f"iterations {records[0].iteration} to {iteration} anchor every operator"
                return Suffix(records, records[0].iteration, iteration, text)
    return None


def _ends_from(
    newest: Mapping[int, SlotRecord], num_operators: int, span: int, least: int, most: int | None
) -> Iterator[Suffix]:
    """The complete suffixes that end at iteration ``least`` or later, and at ``most`` or earlier,
    in order.
    """
    for iteration in sorted(newest):
        if iteration >= least and (most is None or iteration <= most):
            found = spanning_suffix(newest, num_operators, span, end=iteration)
            if found is not None:
                yield found


def _around(
    incoming: SlotRecord, newest: Mapping[int, SlotRecord], num_operators: int, span: int
) -> list[SlotRecord]:
    """What ``incoming`` links back to, and the newest chain if it is what was missing in it."""
    there = {**newest, incoming.iteration: incoming}
    tip = _chain(there[max(there)], there, num_operators, span)
    kept = _chain(incoming, there, num_operators, span)
    kept += tip if incoming in tip else []
    return [record for record in kept if record is not incoming]


def _chain(
    record: SlotRecord, newest: Mapping[int, SlotRecord], num_operators: int, span: int
) -> list[SlotRecord]:
    """What links back from ``record``, newest first, as far as a suffix that ends there needs."""
    chain = chain_from(record, newest)
    for length in range(span, len(chain)):
        if _complete(chain[:length], num_operators):
            return chain[:length]
    return chain


def _complete(chain: Iterable[SlotRecord], num_operators: int) -> bool:
    covered = 0
    for record in chain:
        covered |= record.anchors
    everything = (1 << num_operators) - 1
    return covered & everything == everything
