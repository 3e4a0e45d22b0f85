"""Boundary logs: the names of the tensors in them, and the slot to fill next. Pure.

Each iteration of a rank fills one slot: a safetensors file with one tensor for each activation that was sent
downstream and each gradient that was sent upstream (``docs/boundary_logs.md``). The slots are those of
snapshots (`ckptd.core.slots.slots`), but epochs outdate them differently: *snapshot(t)* is the state before
step *t* and remains valid after a recovery at *t*; the tensors sent in step *t* do not, because the step is
run again (`outdated`).

A log stays as long as a recovery may need it: from the start of the oldest promised suffix (`needed_from`).
Soft promises give way when there is no other slot, as in the ring. Without a slot, the iteration is not
logged: training never waits.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from ckptd.core.slots.ring import NoSuffix, find_suffix
from ckptd.core.slots.slots import NO_EPOCHS, SlotRecord, SlotState, epoch_table

# Records begin at multiples of it, whatever their dtypes; padding between them is a tensor, too, since an
# image has no gaps.
DATA_ALIGNMENT = 64

_PADDING = "padding/"
_RECORD = re.compile(r"(activation|gradient|value)/(\d{1,9})/(\d{1,9})/(\d{1,9})/(\d{1,9})")
_HELD = (SlotState.FILLED, SlotState.SEALED)


class SentKind(StrEnum):
    """Tensors that cross a boundary between two pipeline stages, and values that all stages share."""

    ACTIVATION = "activation"  # downstream, by a forward
    GRADIENT = "gradient"  # upstream, by a backward
    VALUE = "value"  # a shared value: the ``micro_batch``-th of the iteration, msgpack of its name and itself


@dataclass(frozen=True, slots=True, order=True)
class RecordKey:
    """One tensor that was sent in an iteration.

    ``stage`` is the sender's; ``index`` counts its tensors of this micro-batch in the order of its send
    operations; ``round`` counts how often it sent this one earlier in the iteration (a step may run its
    schedule several times).
    """

    kind: SentKind
    stage: int
    micro_batch: int
    index: int = 0
    round: int = 0


@dataclass(frozen=True, slots=True)
class LogSlot:
    """The slot to fill next, or None, and the reason; ``releases`` is the iteration that is overwritten."""

    record: SlotRecord | None
    reason: str
    releases: int | None = None


def record_name(key: RecordKey) -> str:
    """The tensor's name in an image: ``activation/<stage>/<micro_batch>/<index>/<round>``,
    ``gradient/…`` or ``value/…``.
    """
    return f"{key.kind}/{key.stage}/{key.micro_batch}/{key.index}/{key.round}"


def parse_record_name(name: str) -> RecordKey | None:
    """The key of a record's name; None for the padding between records.

    Raises:
        ValueError: ``name`` is neither.
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
    """How many slots a log needs so that no iteration is missing while the chain of snapshots is unbroken.

    From the start of the newest suffix to the running iteration: ``window`` snapshots, ``every`` iterations
    apart, one that is not sealed yet, ``slack`` by which other ranks may lag, and the iteration itself; and
    one slot that is not needed any more but still being digested or read.
    """
    return (window + 1 + slack) * every + 2


def needed_from(
    snapshots: Iterable[SlotRecord],
    num_operators: int,
    *,
    promised: Container[tuple[int, int]] = (),
    epochs: Mapping[int, int] = NO_EPOCHS,
) -> int | None:
    """The first iteration that a recovery may replay: where the oldest promised suffix starts, or None."""
    records = list(snapshots)
    starts = [record.iteration for record in records if record.key in promised]
    suffix = find_suffix(records, num_operators, epochs=epochs)
    if not isinstance(suffix, NoSuffix):
        starts.append(suffix.start)
    return min(starts, default=None)


def outdated(record: SlotRecord, epochs: Mapping[int, int]) -> bool:
    """Whether a later epoch ran this iteration again."""
    return any(epoch > record.epoch and start <= record.iteration for epoch, start in epochs.items())


def logged_iterations(
    records: Iterable[SlotRecord], epochs: Mapping[int, int] = NO_EPOCHS
) -> dict[int, SlotRecord]:
    """The complete log of each iteration that counts: not outdated, and filled last."""
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
    """The slot of ``generation`` to fill next: an empty one, else one that no longer counts, else the oldest.

    Args:
        records: every slot of every generation of the log.
        needed_from: iterations from here on stay; None: nothing can be recovered yet, so none must.
        busy: slots (generation, index) that a reader holds.
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
