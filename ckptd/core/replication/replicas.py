"""What the host of replicas decides: which slot a peer may fill, and which replicas may go. Pure.

All replicas of one rank on one node are a *group*: a rank that moved, or needed another geometry, has several
for a while. The slot tables and the promise are the only input. Replicas of different origin may have the
same generation number, so the caller numbers them itself.

The promise is what the run agreed on (``docs/replication.md`` section 6): every rank holds a complete suffix
that ends at the *floor*, in every promised copy; and no iteration between floor and *horizon* will become the
floor, because some replica that was begun anew holds no suffix that ends there. So a group keeps, whatever a
peer asks for (`promised`):

* the suffix that ends at the floor;
* every complete suffix that ends at the horizon (or the floor) or later: each of these ends may be the next
  floor, and its rank may have promised it already;
* its newest complete suffix, if it holds none of these (it was begun anew).

A suffix has at least ``span`` snapshots here. All ranks load from one start, so a rank that needs fewer than
others (a smaller window) must keep as many as the others need.

While a snapshot is received, the chain that it links back to stays too: that chain becomes the next suffix.
What is newer than a gap that is being filled gives way if nothing else does: the peer does not count on it
(`TargetCopies.doubt_newer`). A group therefore needs the slots of two suffixes to bridge any gap, and
otherwise those of one suffix and of the floor's lag. If neither fits, the peer is told ``busy`` and tries
again.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptd.core.slots.ring import Suffix, chain_from, complete_chain, newest_by_iteration
from ckptd.core.slots.slots import NO_EPOCHS, SlotRecord, SlotState, epoch_table, is_stale

Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Promise:
    """What the run agreed on, as far as it is known here; -1: nothing yet."""

    floor: int = -1
    horizon: int = -1


@dataclass(frozen=True, slots=True)
class Admit:
    """The peer may fill this slot; ``releases`` is the iteration that is overwritten."""

    index: int
    reason: str
    releases: int | None = None


@dataclass(frozen=True, slots=True)
class Deny:
    """The peer may not fill a slot: ``code`` is held, stale or busy, as in `PeerRefused`."""

    code: str
    reason: str


def admit(
    incoming: SlotRecord,
    records: Iterable[SlotRecord],
    num_operators: int,
    *,
    generation: int,
    promise: Promise,
    epochs: Mapping[int, int] = NO_EPOCHS,
    span: int = 1,
    busy: Collection[Key] = (),
) -> Admit | Deny:
    """Choose the slot of replica ``generation`` for a snapshot.

    Args:
        incoming: its header, with its anchors; generation, index and state do not matter.
        records: the slots of all replicas of the group that share the operator table.
        epochs: the epochs known to this node and their starts.
        span: how many snapshots the longest suffix among all ranks has.
        busy: slots (generation, index) that a reader holds.
    """
    table = list(records)
    known = epoch_table([*_sealed(table), incoming], epochs)
    name = _named(incoming)
    if is_stale(incoming, known):
        return Deny("stale", f"{name} belongs to an abandoned history")
    own = [record for record in table if record.generation == generation]
    same = [record for record in table if record.sealed and record.fill == incoming.fill]
    for record in same:
        if record.generation == generation:
            if record.header_digest == incoming.header_digest:
                return Deny("held", f"{name} is in slot {record.index}")
            return Admit(record.index, "what is here under this name is another image")
    if any(record.header_digest == incoming.header_digest for record in same):
        # The rank may have moved since. A second copy would take a slot, and there may be none until this
        # one counts.
        return Deny("held", f"{name} is in another replica of this rank")
    ready = [record for record in own if record.key not in busy]
    empty = _empty(ready, known)
    if empty is not None:
        return empty
    keeping = functools.partial(promised, table, num_operators, promise=promise, epochs=known, span=span)
    kept = keeping(incoming=incoming)
    spare = [record for record in ready if record.sealed and record.key not in kept]
    if spare:
        oldest = min(spare, key=lambda record: record.fill)
        text = f"iteration {oldest.iteration} is not part of what is promised"
        return Admit(oldest.index, text, releases=oldest.iteration)
    promised_now = keeping()
    newer = [r for r in ready if r.sealed and r.fill > incoming.fill and r.key not in promised_now]
    if newer:
        newest = max(newer, key=lambda record: record.fill)
        text = f"nothing links to iteration {newest.iteration} until {name} is here"
        return Admit(newest.index, text, releases=newest.iteration)
    return Deny("busy", f"all {len(own)} slots are promised (floor {promise.floor}) or in use")


def promised(
    records: Iterable[SlotRecord],
    num_operators: int,
    *,
    promise: Promise,
    epochs: Mapping[int, int] = NO_EPOCHS,
    span: int = 1,
    incoming: SlotRecord | None = None,
    up_to: int | None = None,
    tip: int = -1,
) -> set[Key]:
    """The sealed slots that stay; with ``incoming``, also those that it links to. See the module.

    Args:
        up_to: no suffix that ends later can become the floor before the owner of these slots learns of it.
        tip: the suffix that ends here stays, too, until there is a floor there or later.
    """
    newest = newest_by_iteration(_sealed(records), epochs)
    least = max(promise.floor, promise.horizon)
    ends = [end for end in sorted(newest) if end >= least and (up_to is None or end <= up_to)]
    if tip > promise.floor:
        ends.append(tip)
    suffixes = [spanning_suffix(newest, num_operators, span, end=end) for end in (promise.floor, *ends)]
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
    epochs: Mapping[int, int] = NO_EPOCHS,
    span: int = 1,
    is_open: bool = False,
) -> list[tuple[str, str]]:
    """The replicas that no promise needs, and why; the caller skips those that a peer has open.

    Until there is a floor, only replicas go that hold nothing but abandoned histories.

    Args:
        group: by name: the number of operators, and the slots.
        is_open: a peer has one of them open. Then replicas stay that the newest chain of the open one
            links to: where the primary's ring has grown, the chain that is being built lies in several.
    """
    found = []
    records = [record for _, slots in group.values() for record in slots]
    known = epoch_table(_sealed(records), epochs)
    for name, (num_operators, slots) in group.items():
        same_table = [r for n, others in group.values() if n == num_operators for r in others]
        newest = newest_by_iteration(_sealed(same_table), known)
        keys = {slot.key for slot in slots}
        if not any(record.key in keys for record in newest.values()):
            reason = "it holds nothing that counts"
        elif promise.floor < 0:
            continue
        else:
            kept = promised(same_table, num_operators, promise=promise, epochs=known, span=span)
            latest = spanning_suffix(newest, num_operators, span)
            if latest is not None and latest.end < promise.floor:
                reason = f"every replica that counts holds a suffix up to {promise.floor}"
            elif latest is not None and not keys & kept:
                reason = f"what is promised from iteration {latest.start} on lies in another replica"
            else:
                continue
        tip = _chain(newest[max(newest)], newest, num_operators, span) if is_open and newest else []
        if not any(record.key in keys for record in tip):
            found.append((name, reason))
    return found


def stale_slots(records: Iterable[SlotRecord], epochs: Mapping[int, int] = NO_EPOCHS) -> list[Key]:
    """The sealed slots that hold an abandoned history, to be freed."""
    table = list(_sealed(records))
    known = epoch_table(table, epochs)
    return [record.key for record in table if is_stale(record, known)]


def spanning_suffix(
    newest: Mapping[int, SlotRecord], num_operators: int, span: int = 1, *, end: int | None = None
) -> Suffix | None:
    """The complete suffix of at least ``span`` snapshots that ends at ``end``, else the newest one.

    Args:
        newest: the records that count (`newest_by_iteration`).
    """
    for iteration in sorted(newest, reverse=True) if end is None else [end]:
        if iteration in newest:
            chain = complete_chain(newest[iteration], newest, num_operators, span)
            if chain is not None:
                records = tuple(reversed(chain))
                text = f"iterations {records[0].iteration} to {iteration} anchor every operator"
                return Suffix(records, records[0].iteration, iteration, text)
    return None


def suffix_ends(newest: Mapping[int, SlotRecord], num_operators: int, span: int, end: int) -> bool:
    """Whether there is a suffix, as of `spanning_suffix`, that ends at ``end``."""
    last = newest.get(end)
    return last is not None and complete_chain(last, newest, num_operators, span) is not None


def _sealed(records: Iterable[SlotRecord]) -> Iterator[SlotRecord]:
    """The slots whose header counts: a peer wrote it, and the image is complete."""
    return (record for record in records if record.sealed)


def _named(record: SlotRecord) -> str:
    return f"iteration {record.iteration} of epoch {record.epoch}"


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


def _around(
    incoming: SlotRecord, newest: Mapping[int, SlotRecord], num_operators: int, span: int
) -> list[SlotRecord]:
    """The chain that ``incoming`` links back to, and the newest chain if ``incoming`` was missing in it."""
    there = {**newest, incoming.iteration: incoming}
    tip = _chain(there[max(there)], there, num_operators, span)
    kept = _chain(incoming, there, num_operators, span)
    kept += tip if incoming in tip else []
    return [record for record in kept if record is not incoming]


def _chain(
    record: SlotRecord, newest: Mapping[int, SlotRecord], num_operators: int, span: int
) -> list[SlotRecord]:
    """The chain back from ``record``, newest first, as far as a suffix that ends there needs it."""
    return complete_chain(record, newest, num_operators, span) or chain_from(record, newest)
