"""The segments of this rank that this process has mapped, oldest generation first.

Generations whose operator tables differ (a replanned window may split operators differently) cannot
share a suffix, so the ring sees only those that agree with the newest; older ones are kept until
the newest holds a complete suffix by itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

from ckptd.client.daemon_link.mapped_segment import MappedSegment, SlotTable
from ckptd.core.recovery.global_plan import SnapshotToLoad
from ckptd.core.slots.ring import NoSuffix, SlotRecord, droppable_generations, find_suffix
from ckptd.holdings import operators_id

__all__ = ["Generations"]


class Generations:
    """All of them, and which belong together."""

    def __init__(self) -> None:
        self._segments: list[MappedSegment] = []

    def __iter__(self) -> Iterator[MappedSegment]:
        """A copy: the session's thread looks at them, too, while generations come and go."""
        return iter(list(self._segments))

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def newest(self) -> MappedSegment | None:
        return self._segments[-1] if self._segments else None

    @property
    def total_bytes(self) -> int:
        return sum(segment.geometry.total_bytes for segment in self._segments)

    def add(self, segment: MappedSegment) -> None:
        self._segments.append(segment)

    def order_by_use(self) -> None:
        """The one that was filled last is the newest, whatever was reserved later and not used yet."""
        self._segments.sort(key=MappedSegment.last_filled)

    def remove(self, segment: MappedSegment) -> None:
        self._segments.remove(segment)

    def current(self) -> list[MappedSegment]:
        """The newest, and those right before it that have its operator table."""
        alike: list[MappedSegment] = []
        for segment in reversed(self._segments):
            if _table_of(segment) != _table_of(self._segments[-1]):
                break
            alike.insert(0, segment)
        return alike

    def newer_than_table(self, table: tuple[int, str]) -> list[MappedSegment]:
        """Those newer than the newest one with this operator table (number of operators, id); none
        if no one has it.
        """
        newer: list[MappedSegment] = []
        for segment in reversed(self._segments):
            if _table_of(segment) == table:
                return newer
            newer.append(segment)
        return []

    def of_another_window(self, used: MappedSegment) -> list[MappedSegment]:
        """Those newer than ``used`` that were made for another window: what goes on from there
        would not fit their slots.
        """

        def made_for(segment: MappedSegment) -> tuple[int, int]:
            return segment.descriptor.window, segment.geometry.slot_bytes

        newer = self._segments[self._segments.index(used) + 1 :]
        return [segment for segment in newer if made_for(segment) != made_for(used)]

    def unneeded(self, table: SlotTable, num_operators: int, *, connected: bool) -> list[MappedSegment]:
        """Those that no suffix needs, neither one of this rank nor one to which the ranks may have
        to go back together.

        Args:
            table: of the newest, and those that have its operator table.
            connected: whether the daemon can tell how far the other ranks are.
        """
        records, epochs = table.records(), table.epochs
        every = SlotTable(list(self._segments), epoch=table.epoch, epoch_start=table.epoch_start)
        hint, keeps = every.ring_hint, every.is_hard(connected=connected)
        numbers = droppable_generations(
            records,
            num_operators,
            self.current()[-1].generation,
            protected=table.promised(records, num_operators, hard=True) if keeps else (),
            epochs=epochs,
        )
        if not isinstance(find_suffix(records, num_operators, epochs=epochs), NoSuffix):
            older = [s for s in self._segments if s not in table.segments]
            numbers |= {s.generation for s in older if not (keeps and _holds_from(s, hint.floor))}
        return [s for s in self._segments if s.generation in numbers]

    def own_copy(self, node: str, piece: SnapshotToLoad) -> SlotRecord | None:
        """The record of this rank's own copy of a piece, if it is mapped."""
        by_name = {os.path.basename(segment.path): segment for segment in self._segments}
        for at in piece.sources:
            if at.node == node and at.segment in by_name:
                segment = by_name[at.segment]
                return replace(piece.record, generation=segment.generation, index=at.index)
        return None

    def of(self, record: SlotRecord) -> MappedSegment:
        """The segment in which a record lies."""
        return next(s for s in self._segments if s.generation == record.generation)

    def close(self) -> None:
        """Give up ownership of all; the daemon keeps the memory."""
        for segment in self._segments:
            segment.close()
        self._segments = []


def _table_of(segment: MappedSegment) -> tuple[int, str]:
    return segment.descriptor.num_operators, operators_id(segment.descriptor)


def _holds_from(segment: MappedSegment, iteration: int) -> bool:
    """Whether it holds a snapshot of that iteration or a later one."""
    return any(r.sealed and r.iteration >= iteration for r in SlotTable([segment]).records())
