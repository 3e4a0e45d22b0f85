"""What of a rank is replicated: its snapshots, or its boundary log. The same core and the same
messages serve both.

A ring says which segments are sent, and how their slots look to the core.
"""

from __future__ import annotations

from typing import Protocol

from ckptd.core.replication.log_replicas import as_sent, as_whole, oldest_held
from ckptd.core.replication.target import Slots
from ckptd.core.sessions import RankKey
from ckptd.core.slots.ring import SlotRecord
from ckptd.memory.inventory import log_records, records_of
from ckptd.memory.segment_store import SegmentStore

__all__ = ["LogRing", "ReplicatedRing", "SnapshotRing"]


class ReplicatedRing(Protocol):
    """One of these of one rank."""

    def slots(self) -> Slots | None:
        """What is sealed now; None as long as there never was anything."""

    def told(self, record: SlotRecord) -> SlotRecord:
        """A slot that a target says it holds, as the core is to see it."""

    def oldest(self, generation: int) -> int:
        """What a target is told with each slot of a generation (`BeginSlot.oldest`)."""


class SnapshotRing:
    """A rank's snapshots."""

    def __init__(self, store: SegmentStore, key: RankKey) -> None:
        self._store, self._key = store, key
        self._num_operators = 0

    def slots(self) -> Slots | None:
        segments = self._store.of_rank(self._key)
        if segments:
            self._num_operators = segments[-1].descriptor.num_operators
        if not self._num_operators:
            return None
        records = tuple(r for r in records_of(segments) if r.sealed)
        num_slots = max((s.geometry.num_slots for s in segments[-1:]), default=0)
        return Slots(records, self._num_operators, num_slots)

    def told(self, record: SlotRecord) -> SlotRecord:
        return record

    def oldest(self, generation: int) -> int:
        """A host of snapshots goes by what the run has promised."""
        return -1


class LogRing:
    """A rank's boundary log, where it asks for replicas."""

    def __init__(self, store: SegmentStore, key: RankKey) -> None:
        self._store, self._key = store, key
        self._seen = False

    def slots(self) -> Slots | None:
        self._seen = self._seen or bool(self._store.replicated_logs_of(self._key))
        return Slots(as_sent(self._records()), 1) if self._seen else None

    def told(self, record: SlotRecord) -> SlotRecord:
        return as_whole(record)

    def oldest(self, generation: int) -> int:
        return oldest_held(self._records(), generation)

    def _records(self) -> list[SlotRecord]:
        segments = self._store.replicated_logs_of(self._key)
        return [record for segment in segments for record in log_records(segment)]
