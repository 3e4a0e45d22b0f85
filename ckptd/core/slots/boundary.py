"""Boundary logs: how what was sent is named in them, and which slot is filled next. Pure.

Each iteration of a rank is one slot, its image a safetensors file with one tensor for each
activation that was sent downstream and each gradient that was sent upstream
(``docs/boundary_logs.md``). Slots are those of snapshots (`ckptd.core.slots.slots`), but epochs cut
otherwise: *snapshot(t)* is the state before step *t* and outlives a recovery at *t*; what was sent
during step *t* does not, because the step is run again (`outdated`).

A slot is given away only if nothing that may be recovered needs it: what was sent from the start of
the oldest promised suffix on (`needed_from`) stays. What is promised softly is given away when
there is nothing else, as in the ring. If there is no slot, that iteration is not logged. Training
never waits.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from ckptd.core.slots.ring import NoSuffix, find_suffix
from ckptd.core.slots.slots import NO_EPOCHS, SlotRecord, SlotState, epoch_table

__all__ = [
    "DATA_ALIGNMENT",
    "LogSlot",
    "RecordKey",
    "SentKind",
    "choose_log_slot",
    "logged_iterations",
    "needed_from",
    "outdated",
    "padding_name",
    "parse_record_name",
    "record_name",
    "slots_for_log",
]

# Records begin at multiples of it, whatever their dtypes; what is between them is a tensor, too,
# since an image has no gaps.
DATA_ALIGNMENT = 64

_PADDING = "padding/"
_RECORD = re.compile(r"(activation|gradient|value)/(\d{1,9})/(\d{1,9})/(\d{1,9})/(\d{1,9})")
_HELD = (SlotState.FILLED, SlotState.SEALED)


class SentKind(StrEnum):
    """What crosses a boundary between two pipeline stages, and what all of them were told alike."""

    ACTIVATION = "activation"  # downstream, by a forward
    GRADIENT = "gradient"  # upstream, by a backward
    VALUE = "value"  # a shared value: the ``micro_batch``-th of the iteration, msgpack of its name and itself


@dataclass(frozen=True, slots=True, order=True)
class RecordKey:
    """One tensor that was sent in an iteration.

    ``stage`` is the sender's; ``index`` counts the tensors that it sent of this micro-batch, in the
    order of its send operations; ``round`` counts how often it sent this one in the iteration
    before (a step may run its schedule several times).
    """

    kind: SentKind
    stage: int
    micro_batch: int
    index: int = 0
    round: int = 0


@dataclass(frozen=True, slots=True)
class LogSlot:
    """The slot to fill next, or None, and why; ``releases`` is the iteration whose log is lost by it."""

    record: SlotRecord | None
    reason: str
    releases: int | None = None


def record_name(key: RecordKey) -> str:
    """The tensor's name in an image: ``activation/<stage>/<micro_batch>/<index>/<round>``,
    ``gradient/…`` or ``value/…``.
    """
    return f"{key.kind}/{key.stage}/{key.micro_batch}/{key.index}/{key.round}"


def parse_record_name(name: str) -> RecordKey | None:
    """What `record_name` was called with; None for the padding between records.

    Raises:
        ValueError: ``name`` is of neither.
    """
    if name.startswith(_PADDING):
        return None
    match = _RECORD.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is no record of a boundary log")
    kind, *numbers = match.groups()
    return RecordKey(SentKind(kind), *map(int, numbers))


def padding_name(number: int) -> str:
    """The name of the ``number``-th padding in an image."""
    return f"{_PADDING}{number}"


def slots_for_log(window: int, every: int, slack: int) -> int:
    """How many iterations a log must hold so that none is missing while an unbroken chain of
    snapshots goes on.

    From the start of the newest suffix up to the iteration that runs: ``window`` snapshots,
    ``every`` iterations apart, one that is not sealed yet, ``slack`` by which other ranks may be
    behind, and the iteration itself; and one slot that nobody needs any more, but that is being
    digested or read.
    """
    return (window + 1 + slack) * every + 2


def needed_from(
    snapshots: Iterable[SlotRecord],
    num_operators: int,
    *,
    promised: Container[tuple[int, int]] = (),
    epochs: Mapping[int, int] = NO_EPOCHS,
) -> int | None:
    """The first iteration that a recovery may have to replay: where the oldest promised suffix
    begins; None: there is none.
    """
    records = list(snapshots)
    starts = [record.iteration for record in records if record.key in promised]
    suffix = find_suffix(records, num_operators, epochs=epochs)
    if not isinstance(suffix, NoSuffix):
        starts.append(suffix.start)
    return min(starts, default=None)


def outdated(record: SlotRecord, epochs: Mapping[int, int]) -> bool:
    """Whether a later epoch ran this iteration again, from the state before it on."""
    return any(epoch > record.epoch and start <= record.iteration for epoch, start in epochs.items())


def logged_iterations(
    records: Iterable[SlotRecord], epochs: Mapping[int, int] = NO_EPOCHS
) -> dict[int, SlotRecord]:
    """The complete log that counts for each iteration: not outdated, and the one filled last."""
    found = list(records)
    known = epoch_table(found, epochs)
    newest: dict[int, SlotRecord] = {}
    for record in found:
        if record.state not in _HELD or outdated(record, known):
            continue
        other = newest.get(record.iteration)
        if other is None or (record.epoch, record.sequence) > (other.epoch, other.sequence):
            newest[record.iteration] = record
    return newest


def choose_log_slot(
    records: Iterable[SlotRecord],
    generation: int,
    *,
    needed_from: int | None,
    busy: Container[tuple[int, int]] = (),
    epochs: Mapping[int, int] = NO_EPOCHS,
) -> LogSlot:
    """The slot of ``generation`` to overwrite next.

    First what holds nothing, then what no longer counts, then what was sent before ``needed_from``,
    the oldest first (None: the oldest of all, since nothing can be recovered yet).

    Args:
        records: every slot of every generation of the log.
        busy: slots (generation, index) that somebody reads.
        epochs: starts of epochs known from elsewhere.
    """
    every = list(records)
    counts = {record.key for record in logged_iterations(every, epochs).values()}
    ready = [r for r in every if r.generation == generation and r.key not in busy]
    for record in ready:
        if record.state in (SlotState.FREE, SlotState.QUARANTINED):
            return LogSlot(record, f"slot {record.index} is {record.state.name.lower()}")
    held = sorted((r for r in ready if r.state in _HELD), key=lambda r: (r.iteration, r.sequence))
    for record in held:
        if record.key not in counts:
            why = f"the log of iteration {record.iteration} in slot {record.index} no longer counts"
            return LogSlot(record, why)
    if held and (needed_from is None or held[0].iteration < needed_from):
        oldest = held[0]
        why = f"no promised suffix needs what was sent in iteration {oldest.iteration}"
        return LogSlot(oldest, why, releases=oldest.iteration)
    return LogSlot(None, f"every slot is needed from iteration {needed_from} on, or being read")
