"""What other ranks hold, brought to this node for a trainer to read: files that nobody else comes
upon (docs/replication.md §7).

A rank that runs apart reads its neighbours' boundary logs. Such a copy is laid out as the segment
that it is a copy of, descriptor and magic included, whatever kind that is: who can read that can
read it. Only its name is its own,

    <job>~<run>~r<rank of the reader>~c<number>.fetched

and no kind of segment has this suffix. So it is no generation of any rank: neither its ring nor its
log, not told to other nodes, not served to them, not scrubbed, not adopted. It counts as its
reader's memory, and goes when the reader drops it or is gone; what an earlier daemon left is
removed. Its number stands where a generation would in messages, and is beyond all generations there
are.

All methods belong to the daemon's loop thread.
"""

from __future__ import annotations

import itertools
import secrets
from dataclasses import dataclass, replace

from ckptd.core.sessions import AttachWish, RankKey, SegmentFacts
from ckptd.core.slots.segment_format import SegmentDescriptor, encode_descriptor, plan_geometry
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_store import SegmentPlan, SegmentStore

__all__ = ["ReadingCopies"]

_SUFFIX = ".fetched"
_FIRST_NUMBER = 1 << 30  # a rank has not so many generations


@dataclass(frozen=True, slots=True)
class _Copy:
    """One copy, and what its reader attached as; ``segment`` is None while it is made."""

    wish: AttachWish
    plan: SegmentPlan
    segment: Segment | None = None


class ReadingCopies:
    """By reader and number."""

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        self._copies: dict[tuple[RankKey, int], _Copy] = {}
        # Not the same numbers after a restart: a trainer that asks for what an earlier daemon made
        # must learn that it is gone.
        self._numbers = itertools.count(_FIRST_NUMBER + secrets.randbelow(_FIRST_NUMBER // 2))
        store.other_facts = self._facts

    @property
    def used_bytes(self) -> int:
        """What they take of the quota, those still being made included."""
        return sum(copy.plan.geometry.total_bytes for copy in self._copies.values())

    def sweep(self) -> None:
        """Remove what an earlier daemon left: whoever reads it has it mapped, and who waits for
        more must ask again.
        """
        for path in self._store.folder.glob(f"*{_SUFFIX}"):
            path.unlink(missing_ok=True)

    def plan(
        self, reader: RankKey, descriptor: SegmentDescriptor, num_slots: int, slot_bytes: int
    ) -> tuple[int, SegmentPlan]:
        """Lay out a copy for this reader; nothing is promised yet.

        Raises:
            ValueError: numbers that no segment can have.
        """
        geometry = plan_geometry(num_slots, slot_bytes, len(encode_descriptor(descriptor)))
        number = next(self._numbers)
        name = f"{reader.job}~{reader.run}~r{reader.rank}~c{number}{_SUFFIX}"
        return number, SegmentPlan(descriptor, geometry, self._store.folder / name)

    def promise(self, wish: AttachWish, number: int, plan: SegmentPlan) -> None:
        """Count its bytes as used from now on, by the rank that attached so."""
        self._copies[wish.key, number] = _Copy(wish, plan)

    def cancel(self, reader: RankKey, number: int) -> None:
        """It came to nothing."""
        self._copies.pop((reader, number), None)

    def enter(self, reader: RankKey, number: int, segment: Segment) -> None:
        """It is there."""
        key = reader, number
        self._copies[key] = replace(self._copies[key], segment=segment)

    def get(self, reader: RankKey, number: int) -> Segment | None:
        """A copy that is there."""
        copy = self._copies.get((reader, number))
        return None if copy is None else copy.segment

    def named(self, name: str) -> Segment | None:
        """The copy in this file."""
        made = (copy.segment for copy in self._copies.values())
        return next((s for s in made if s is not None and s.path.name == name), None)

    def of(self, reader: RankKey) -> list[int]:
        """The numbers of a reader's copies that are there."""
        return [
            n
            for (key, n), copy in self._copies.items()
            if key == reader and copy.segment is not None
        ]

    def remove(self, reader: RankKey, number: int) -> Segment:
        """Unlink and forget a copy that is there; its memory is free once nobody maps it any more."""
        segment = self._copies.pop((reader, number)).segment
        assert segment is not None, "it is there"
        segment.path.unlink(missing_ok=True)
        return segment

    def _facts(self) -> list[SegmentFacts]:
        """For the admission of ranks: memory of the reader's that is not offered to it."""
        return [
            SegmentFacts(
                key=reader,
                generation=number,
                world_size=copy.wish.world_size,
                topology=copy.wish.topology,
                layout_version=copy.wish.layout_version,
                total_bytes=copy.plan.geometry.total_bytes,
                owned=False,
                ready=False,
            )
            for (reader, number), copy in self._copies.items()
        ]
