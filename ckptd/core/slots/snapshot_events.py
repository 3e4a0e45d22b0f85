"""What replication and persistence have in common: a rank's snapshots, and the slots that are held
while one is sent (pure).

Both bring sealed snapshots out of the ring of one local rank: to peers
(`ckptd.core.replication.replicator`) or to storage (`ckptd.core.persistence.persister`). Both hold
a slot while it is read, so that the trainer passes over it. Each has events and effects of its own
beside these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ckptd.core.slots.ring import SlotRecord

__all__ = ["Hold", "Joined", "Note", "Release", "SnapshotKey", "Tick", "key_of"]


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
