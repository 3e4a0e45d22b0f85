"""What happens to a rank's way to storage and what it wants done: the events and effects of
`ckptd.core.persistence.persister`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptd.core.slots.ring import SlotRecord
from ckptd.core.slots.snapshot_events import Hold, Joined, Note, Release, SnapshotKey, Tick

__all__ = [
    "Commit",
    "CommitFailed",
    "Committed",
    "Durable",
    "Effect",
    "Event",
    "Fenced",
    "Flush",
    "Forgotten",
    "SlotReused",
    "SlotTables",
    "SnapshotStored",
    "Store",
    "StoreFailed",
]


# -- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Durable:
    """All ranks have this checkpoint of this history in storage."""

    end: int


@dataclass(frozen=True, slots=True)
class SlotTables:
    """The rank's slot tables after a change; ``total`` counts the slots of all generations,
    whatever is in them.
    """

    records: tuple[SlotRecord, ...]
    num_operators: int
    total: int


@dataclass(frozen=True, slots=True)
class SnapshotStored:
    """A snapshot is in storage; so many bytes of it had to travel."""

    key: SnapshotKey
    uploaded_bytes: int


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """It is not, and trying again at once is of no use."""

    key: SnapshotKey
    reason: str


@dataclass(frozen=True, slots=True)
class SlotReused:
    """The trainer was quicker than we: the slot holds something else."""

    key: SnapshotKey


@dataclass(frozen=True, slots=True)
class Committed:
    """Our manifest of the checkpoint whose last snapshot is this one is in storage."""

    key: SnapshotKey


@dataclass(frozen=True, slots=True)
class CommitFailed:
    """It is not."""

    key: SnapshotKey
    reason: str


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Who stores was restarted, and knows nothing any more of what it has stored and is not committed."""


@dataclass(frozen=True, slots=True)
class Fenced:
    """The store shows that somebody else writes under our names: nothing more is stored until
    another epoch is joined.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Flush:
    """Persist the newest suffix, due or not: the rank has ended in order, or somebody asked."""


Event = (
    Joined
    | Durable
    | SlotTables
    | SnapshotStored
    | StoreFailed
    | SlotReused
    | Committed
    | CommitFailed
    | Forgotten
    | Fenced
    | Flush
    | Tick
)


# -- effects -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Store:
    """Bring this snapshot, which is held, to storage."""

    key: SnapshotKey
    record: SlotRecord


@dataclass(frozen=True, slots=True)
class Commit:
    """All snapshots of the checkpoint, oldest first, are stored: write the manifest."""

    end: int
    stride: int
    keys: tuple[SnapshotKey, ...]


Effect = Hold | Release | Store | Commit | Note
