"""One slot as its header tells: its state, what it holds, and to which history that belongs.

The table below tells which state follows. The state word is in memory that several processes share: it
is written by `ckptd.core.slots.segment_format.set_slot_state` alone, under the slot's lock.

Each recovery begins an *epoch*: another history, which leaves the one before at ``epoch_start``
(``docs/replication.md`` section 2). A record of an older epoch that comes after that is *stale*: it
belongs to a history that was abandoned, and may still lie where nobody could free it at the time.

An epoch is a number of 32 bits: in the upper 20 how many epochs came before it, in the lower 12
what its ranks drew by lot. So two recoveries that did not know of each other, because the nodes of
one were away, begin different epochs. No clock enters into it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import NamedTuple, Self

from ckptd.core.state_machine import Transitions
from ckptd.errors import LocalProtocolError

__all__ = [
    "DRAWN_EPOCHS",
    "NO_EPOCHS",
    "TRANSITIONS",
    "Hold",
    "Joined",
    "Note",
    "Release",
    "SlotEvent",
    "SlotRecord",
    "SlotState",
    "SnapshotKey",
    "Tick",
    "check_transition",
    "epoch_after",
    "epoch_can_follow",
    "epoch_table",
    "is_stale",
    "key_of",
    "least_starts",
    "live",
    "other_histories",
    "stale_after",
]


class SlotState(IntEnum):
    """The state word of a slot; the numbers are those of the file format."""

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
        # A copy of what another node or storage holds sealed; its digests match.
        (SlotState.FILLING, SlotEvent.ARRIVE): SlotState.SEALED,
        # The writer died, the image is damaged, or it was copied in vain.
        (SlotState.FILLING, SlotEvent.CLEAR): SlotState.FREE,
        (SlotState.FILLED, SlotEvent.SEAL): SlotState.SEALED,
        (SlotState.FILLED, SlotEvent.CLEAR): SlotState.FREE,
        # Reuse, outside of every promise (`ckptd.core.slots.ring`).
        (SlotState.SEALED, SlotEvent.FILL): SlotState.FILLING,
        (SlotState.SEALED, SlotEvent.QUARANTINE): SlotState.QUARANTINED,
        # Abandoned by a restore to an older iteration.
        (SlotState.SEALED, SlotEvent.CLEAR): SlotState.FREE,
        (SlotState.QUARANTINED, SlotEvent.FILL): SlotState.FILLING,
        (SlotState.QUARANTINED, SlotEvent.TAKE_BACK): SlotState.SEALED,
    },
)


def check_transition(old: SlotState, new: SlotState) -> None:
    """Return if a slot may go from ``old`` to ``new``.

    Raises:
        LocalProtocolError: it may not.
    """
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
_MOST_AHEAD = 1024  # epochs that a node may have missed: so many recoveries without it
_MOST_UNKNOWN = (
    3 << 30
)  # to one who knows nothing of a run: a quarter of all is left to it whatever it is told


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """One slot as its header tells; ``anchors`` is a bitmask over operator ids.

    ``header_digest`` is that of the image, 16 bytes (empty where nobody asked for it).
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

    @property
    def sealed(self) -> bool:
        """Whether recovery may see it."""
        return self.state is SlotState.SEALED

    @property
    def key(self) -> tuple[int, int]:
        """(generation, index): which slot it is."""
        return self.generation, self.index


def epoch_after(highest: int, drawn: int) -> int:
    """The epoch that follows the highest one that is known (-1: none).

    Args:
        drawn: by lot, the same on all ranks, below `DRAWN_EPOCHS`.
    Raises:
        ValueError: there is no higher one.
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
    """Whether a peer may tell a node of this epoch that knows of none above ``highest``: one
    message must not use them up.
    """
    return epoch <= (_MOST_UNKNOWN if highest < 0 else highest + (_MOST_AHEAD << _DRAWN_BITS))


def other_histories(
    epochs: Iterable[int],
    follows: Mapping[int, int],
    *,
    empty: Collection[int] = (),
    complete: bool = False,
) -> set[int]:
    """The epochs, of these, that are not of the history that counts: nodes that were away went on
    from some past by themselves.

    A history is an epoch and all that it goes back to: the one that it follows, the one that this
    follows, and so on. The history with the longest past counts. Of equally long ones that counts
    whose last epoch something is held of, and then the lot decides. Where nobody is missing,
    histories of which nothing is left but what others have in common with them come last. Nothing
    of the others counts: not even what lies before the start of an epoch that does.

    Args:
        follows: the epoch before an epoch, where that is known. Where it is not, the highest of
            these epochs with a shorter past is taken for it.
        empty: epochs of which nothing is held.
        complete: all nodes have answered that may hold something.
    """
    known = {*epochs}
    if not known:
        return set()
    held = known.difference(empty)

    def newest_held(epoch: int) -> int:
        past = _past(epoch, known, follows) if complete else ()
        return max((e for e in past if e in held), default=-1)

    newest = max(known, key=lambda e: (newest_held(e), e >> _DRAWN_BITS, e in held, e))
    return known.difference(_past(newest, known, follows))


def _past(epoch: int, known: Collection[int], follows: Mapping[int, int]) -> list[int]:
    """The epoch and what it goes back to, newest first. Each has a shorter past than the one
    before, so the upper bits of its number are lower.
    """
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
    """The start of every epoch that a header, in whatever state its slot is, or ``known`` tells of.

    Of two starts of one epoch the smaller counts: that makes more stale, and nothing wrong visible.
    """
    table = dict(known)
    for record in records:
        start = table.get(record.epoch)
        if start is None or record.epoch_start < start:
            table[record.epoch] = record.epoch_start
    return table


def least_starts(*told: Mapping[int, int]) -> dict[int, int]:
    """Where epochs began, as several tell; of two starts of one epoch the smaller counts, as in
    `epoch_table`.
    """
    table: dict[int, int] = {}
    for starts in told:
        for epoch, start in starts.items():
            table[epoch] = min(start, table.get(epoch, start))
    return table


def stale_after(epochs: Mapping[int, int]) -> dict[int, int]:
    """For every epoch but the last: the iteration after which its records are stale."""
    limits: dict[int, int] = {}
    left: int | None = None
    for epoch in sorted(epochs, reverse=True):
        if left is not None:
            limits[epoch] = left
        left = epochs[epoch] if left is None else min(left, epochs[epoch])
    return limits


def is_stale(record: SlotRecord, epochs: Mapping[int, int]) -> bool:
    """Whether a later epoch left the record's history before its iteration."""
    return any(epoch > record.epoch and start < record.iteration for epoch, start in epochs.items())


def live(records: Iterable[SlotRecord], epochs: Mapping[int, int] = NO_EPOCHS) -> list[SlotRecord]:
    """The records that are not stale, in their order, by what they and ``epochs`` say together."""
    found = list(records)
    limits = stale_after(epoch_table(found, epochs))
    if not limits:
        return found
    return [r for r in found if r.epoch not in limits or r.iteration <= limits[r.epoch]]


class SnapshotKey(NamedTuple):
    """Which snapshot of the rank: no two fills have the same key."""

    generation: int
    iteration: int
    epoch: int
    sequence: int


def key_of(record: SlotRecord) -> SnapshotKey:
    """The key of the snapshot in a slot."""
    return SnapshotKey(record.generation, record.iteration, record.epoch, record.sequence)


# -- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """The run goes on in this epoch: older histories end at ``epoch_start``.

    ``span``: how many snapshots the longest suffix among all ranks has (the largest window).
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
    """Take the read lock of the local slot, and see that it still holds this snapshot."""

    key: SnapshotKey
    record: SlotRecord


@dataclass(frozen=True, slots=True)
class Release:
    """Give the read lock back: nobody is being sent this snapshot any more."""

    key: SnapshotKey


@dataclass(frozen=True, slots=True)
class Note:
    """Something for the event log; ``level`` is info, warning or error."""

    level: str
    kind: str
    message: str
