"""A slot's record: its state, the snapshot in it, and the history to which that snapshot belongs. Pure.

The state word lies in memory that several processes share. Only
`ckptd.core.slots.segment_format.set_slot_state` writes it, under the slot's lock.

Each recovery begins an *epoch*: another history, which leaves the previous one at ``epoch_start``
(``docs/replication.md`` section 2). A record of an older epoch after that iteration is *stale*: its history
was abandoned, and it may still lie where nobody could free it at the time.

An epoch is a number of 32 bits: the upper 20 count the epochs before it, the lower 12 were drawn by lot by
its ranks. So two recoveries that did not know of each other, because the nodes of one were away, begin
different epochs without a clock.

Replication and persistence both send sealed snapshots out of the ring of a local rank, and hold a slot while
it is read, so that the trainer skips it. The key of a snapshot and the events and effects that both use are
here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import NamedTuple, Self

from ckptd.core.state_machine import Transitions
from ckptd.errors import LocalProtocolError


class SlotState(IntEnum):
    """The state of a slot; the numbers are those of the file format."""

    meaning: str

    FREE = 0, "holds nothing that could be recovered"
    FILLING = 1, "its writer holds the lock and copies a snapshot into it"
    FILLED = 2, "the image is complete; its digests are not made yet"
    SEALED = 3, "complete and digested: the only state that recovery sees"
    QUARANTINED = 4, "a digest failed, or no replay reproduces it"

    def __new__(cls, value: int, meaning: str = "") -> Self:
        state = int.__new__(cls, value)
        state._value_, state.meaning = value, meaning
        return state


class SlotEvent(StrEnum):
    """What happens to a slot."""

    FILL = "fill"
    COMPLETE = "complete"
    SEAL = "seal"
    ARRIVE = "arrive"
    CLEAR = "clear"
    QUARANTINE = "quarantine"
    TAKE_BACK = "take back"


TRANSITIONS = Transitions(
    "slot",
    {
        (SlotState.FREE, SlotEvent.FILL): SlotState.FILLING,
        (SlotState.FILLING, SlotEvent.COMPLETE): SlotState.FILLED,
        # A copy of a sealed snapshot of another node or of storage; its digests match.
        (SlotState.FILLING, SlotEvent.ARRIVE): SlotState.SEALED,
        # The writer died, the image is damaged, or it is not needed any more.
        (SlotState.FILLING, SlotEvent.CLEAR): SlotState.FREE,
        (SlotState.FILLED, SlotEvent.SEAL): SlotState.SEALED,
        (SlotState.FILLED, SlotEvent.CLEAR): SlotState.FREE,
        # Reuse of a slot that no promise needs (`ckptd.core.slots.ring`).
        (SlotState.SEALED, SlotEvent.FILL): SlotState.FILLING,
        (SlotState.SEALED, SlotEvent.QUARANTINE): SlotState.QUARANTINED,
        # Abandoned by a restore to an older iteration.
        (SlotState.SEALED, SlotEvent.CLEAR): SlotState.FREE,
        (SlotState.QUARANTINED, SlotEvent.FILL): SlotState.FILLING,
        (SlotState.QUARANTINED, SlotEvent.TAKE_BACK): SlotState.SEALED,
    },
)


def check_transition(old: SlotState, new: SlotState) -> None:
    """Raise `LocalProtocolError` unless a slot may go from ``old`` to ``new``."""
    allowed = TRANSITIONS.following(old)
    if new not in allowed:
        names = ", ".join(sorted(state.name.lower() for state in allowed))
        raise LocalProtocolError(
            f"a slot cannot go from {old.name.lower()} to {new.name.lower()}",
            operation="slot transition",
            hint=f"From {old.name.lower()} it can only become {names}",
        )


NO_EPOCHS: Mapping[int, int] = MappingProxyType({})


_DRAWN_BITS = 12
DRAWN_EPOCHS = 1 << _DRAWN_BITS
"""As many different epochs may follow one."""
_MAX_EPOCH = (1 << 32) - 1
_MOST_AHEAD = 1024  # epochs, hence recoveries, that a node may have missed
_MOST_UNKNOWN = 3 << 30  # for a node that knows nothing of a run: a quarter of all epochs is left in any case


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """The header of one slot; ``anchors`` is a bitmask over operator ids.

    ``header_digest`` is that of the image: 16 bytes, or empty where it was not read. ``audited``: the step
    that leads to it was computed again, with the same bits.
    """

    generation: int
    index: int
    state: SlotState
    iteration: int = -1
    previous: int = -1
    sequence: int = 0
    image_len: int = 0
    layout_id: int = 0
    anchors: int = 0
    phase: int = 0
    epoch: int = 0
    epoch_start: int = -1
    header_digest: bytes = b""
    audited: bool = field(default=False, compare=False)  # no part of the header

    @property
    def sealed(self) -> bool:
        """Whether recovery may use it."""
        return self.state is SlotState.SEALED

    @property
    def key(self) -> tuple[int, int]:
        """(generation, index): the place of the slot."""
        return self.generation, self.index

    @property
    def fill(self) -> tuple[int, int, int]:
        """(iteration, epoch, sequence): the place of its snapshot in the rank's history."""
        return self.iteration, self.epoch, self.sequence


def epoch_after(highest: int, drawn: int) -> int:
    """The epoch that follows the highest known one (-1: none).

    Args:
        drawn: by lot, the same on all ranks, below `DRAWN_EPOCHS`.
    Raises:
        ValueError: no number is left.
    """
    assert 0 <= drawn < DRAWN_EPOCHS
    epoch = ((max(highest, 0) >> _DRAWN_BITS) + 1 << _DRAWN_BITS) + drawn
    if epoch > _MAX_EPOCH:
        raise ValueError(
            f"no epoch follows {highest}: give the job another run=, or `ckptctl forget` this one "
            "on all nodes"
        )
    return epoch


def epoch_can_follow(epoch: int, highest: int) -> bool:
    """Whether a node that knows no epoch above ``highest`` accepts this one from a peer.

    A single message must not use up the numbers.
    """
    return epoch <= (_MOST_UNKNOWN if highest < 0 else highest + (_MOST_AHEAD << _DRAWN_BITS))


def other_histories(
    epochs: Iterable[int],
    follows: Mapping[int, int],
    *,
    empty: Collection[int] = (),
    complete: bool = False,
) -> set[int]:
    """Those of these epochs that do not belong to the history that counts.

    A history is an epoch, the epoch that it follows, and so on. There are several if nodes that were away
    continued from some past by themselves. The history with the longest past counts; among equally long ones,
    one whose last epoch has records; then the lot decides. If no node is missing, histories without records
    of their own come last. Nothing of the other histories counts, not even records from before an epoch that
    does.

    Args:
        follows: the epoch before an epoch, where known; else the highest of these epochs with a shorter past.
        empty: epochs without records, and without those at which they began.
        complete: every node that may hold something has answered.
    """
    known = {*epochs}
    if not known:
        return set()
    held = known.difference(empty)

    def newest_held(epoch: int) -> int:
        past = past_of(epoch, known, follows) if complete else ()
        return max((e for e in past if e in held), default=-1)

    newest = max(known, key=lambda e: (newest_held(e), e >> _DRAWN_BITS, e in held, e))
    return known.difference(past_of(newest, known, follows))


def past_of(epoch: int, known: Collection[int], follows: Mapping[int, int]) -> list[int]:
    """The epoch and its predecessors, newest first; each has a shorter past, hence lower upper bits."""
    past = [epoch]
    while True:
        last = past[-1]
        shorter = (e for e in known if e >> _DRAWN_BITS < last >> _DRAWN_BITS)
        before = follows.get(last, -1)
        if not 0 <= before < last:
            before = max(shorter, default=-1)
        if before < 0:
            return past
        past.append(before)


def epoch_table(records: Iterable[SlotRecord], known: Mapping[int, int] = NO_EPOCHS) -> dict[int, int]:
    """The start of every epoch of ``known`` and of the headers, whatever their slots' state.

    Of two starts of one epoch the smaller one counts: it makes more records stale, never wrong ones visible.
    """
    table = dict(known)
    for record in records:
        start = table.get(record.epoch)
        if start is None or record.epoch_start < start:
            table[record.epoch] = record.epoch_start
    return table


def least_starts(*told: Mapping[int, int]) -> dict[int, int]:
    """The union of several tables of starts; of two starts of one epoch the smaller one counts."""
    table: dict[int, int] = {}
    for starts in told:
        for epoch, start in starts.items():
            table[epoch] = min(start, table.get(epoch, start))
    return table


def stale_after(epochs: Mapping[int, int]) -> dict[int, int]:
    """The iteration after which the records of an epoch are stale, for every epoch except the last."""
    limits: dict[int, int] = {}
    left: int | None = None
    for epoch in sorted(epochs, reverse=True):
        if left is not None:
            limits[epoch] = left
        left = epochs[epoch] if left is None else min(left, epochs[epoch])
    return limits


def is_stale(record: SlotRecord, epochs: Mapping[int, int]) -> bool:
    """Whether a later epoch began before the record's iteration."""
    return any(epoch > record.epoch and start < record.iteration for epoch, start in epochs.items())


def live(records: Iterable[SlotRecord], epochs: Mapping[int, int] = NO_EPOCHS) -> list[SlotRecord]:
    """The records that are not stale, in their order, given their own epochs and ``epochs``."""
    found = list(records)
    table = epoch_table(found, epochs)
    if len(table) < 2:
        return found
    limits = stale_after(table)
    return [r for r in found if r.epoch not in limits or r.iteration <= limits[r.epoch]]


class SnapshotKey(NamedTuple):
    """Identifies a snapshot of a rank: no two fills have the same key."""

    generation: int
    iteration: int
    epoch: int
    sequence: int


def key_of(record: SlotRecord) -> SnapshotKey:
    """The key of the snapshot in a slot."""
    # Past the constructor of the named tuple, which takes twice as long: each event makes dozens of them.
    key = record.generation, record.iteration, record.epoch, record.sequence
    return tuple.__new__(SnapshotKey, key)


# -- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """The run continues in this epoch: older histories end at ``epoch_start``.

    ``span``: the largest window of all ranks: the snapshots of the longest suffix.
    """

    epoch: int
    epoch_start: int
    span: int = 1


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


# -- effects -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hold:
    """Take the read lock of the local slot, and check that it still holds this snapshot."""

    key: SnapshotKey
    record: SlotRecord


@dataclass(frozen=True, slots=True)
class Release:
    """Give the read lock back: the snapshot is not being sent any more."""

    key: SnapshotKey


@dataclass(frozen=True, slots=True)
class Note:
    """An entry for the event log; ``level`` is info, warning or error."""

    level: str
    kind: str
    message: str
