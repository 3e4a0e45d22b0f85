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

from ckptd.core.sessions import AttachWish, RankKey
from ckptd.core.slots.segment_format import SegmentDescriptor, encode_descriptor, plan_geometry
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_store import Purpose, SegmentPlan, SegmentStore

__all__ = ["ReadingCopies"]

_SUFFIX = ".fetched"
_FIRST_NUMBER = 1 << 30  # a rank has not so many generations


class ReadingCopies:
    """The names and numbers of copies; their memory is the store's."""

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        # Not the same numbers after a restart: a trainer that asks for what an earlier daemon made
        # must learn that it is gone.
        self._numbers = itertools.count(_FIRST_NUMBER + secrets.randbelow(_FIRST_NUMBER // 2))

    def sweep(self) -> None:
        """Remove what an earlier daemon left: whoever reads it has it mapped, and who waits for
        more must ask again.
        """
        for path in self._store.folder.glob(f"*{_SUFFIX}"):
            path.unlink(missing_ok=True)

    def plan(
        self, wish: AttachWish, descriptor: SegmentDescriptor, num_slots: int, slot_bytes: int
    ) -> SegmentPlan:
        """Lay out a copy for the rank that attached so; nothing is promised yet.

        Raises:
            ValueError: numbers that no segment can have.
        """
        geometry = plan_geometry(num_slots, slot_bytes, len(encode_descriptor(descriptor)))
        number, reader = next(self._numbers), wish.key
        name = f"{reader.job}~{reader.run}~r{reader.rank}~c{number}{_SUFFIX}"
        path = self._store.folder / name
        return SegmentPlan(descriptor, geometry, path, Purpose.COPY, wish, number)

    def get(self, reader: RankKey, number: int) -> Segment | None:
        """A copy that is there."""
        return self.of(reader).get(number)

    def of(self, reader: RankKey) -> dict[int, Segment]:
        """A reader's copies that are there, by number."""
        return {
            plan.number: segment
            for plan, segment in self._store.plans_for(Purpose.COPY)
            if plan.charged_to == reader and segment is not None
        }
