"""The snapshots to load, with their copies in the order in which they are requested. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from ckptd.core.recovery.held import STORE_NODE
from ckptd.core.recovery.tables import Copy, Known, listed, record_of
from ckptd.core.slots.ring import SlotRecord
from ckptd.units import format_bytes

__all__ = ["SnapshotCopy", "SnapshotToLoad", "Sources"]


# A large job has hundreds of thousands of sources. Structs that the garbage collector does not track are
# created five times as fast and do not trigger it (they cannot be part of a cycle).
class SnapshotCopy(msgspec.Struct, frozen=True, gc=False):
    """The place of a copy of a snapshot: slot ``index`` of a segment on a node."""

    node: str
    segment: str
    index: int


class SnapshotToLoad(msgspec.Struct, frozen=True, gc=False):
    """One snapshot to load and all its copies; ``record`` is the record of the first, preferred copy."""

    record: SlotRecord
    sources: tuple[SnapshotCopy, ...]


class Sources:
    """Orders the copies of each snapshot so that the load of all nodes is about equal.

    Args:
        known: the inventories to which the numbers in copies refer.
        homes: the node on which each rank will run.
        shared_load: another instance, to whose load the requests of this one are added.
    """

    def __init__(self, known: Known, homes: Mapping[int, str], shared_load: Sources | None = None) -> None:
        self._known, self._homes = known, homes
        # Bytes for which a node is the preferred source.
        self._load: Counter[str] = shared_load._load if shared_load else Counter()
        self.moved: Counter[int] = shared_load.moved if shared_load else Counter()  # bytes by rank
        self._stored: Counter[int] = shared_load._stored if shared_load else Counter()  # of them from storage

    def ordered(self, rank: int, copies: Sequence[Copy]) -> SnapshotToLoad:
        """The copies for ``rank``: first those of its home (its own segment before a replica), then
        the others in turn.
        """
        home = self._homes.get(rank)
        near = [copy for copy in copies if self._known[copy[0]].node == home]
        far = [copy for copy in copies if self._known[copy[0]].node != home]
        turn = rank % len(far) if far else 0
        far = far[turn:] + far[:turn]
        if len(near) > 1:
            near.sort(key=lambda copy: not self._known[copy[0]].own)
        if not near:
            far.sort(key=lambda copy: self._load[self._known[copy[0]].node])
            self._charge(rank, far[0])
        ordered = near + far
        sources = tuple([self._source(copy) for copy in ordered])
        return SnapshotToLoad(record_of(ordered[0], self._known), sources)

    def moves(self) -> str:
        """For a message: the bytes that are transferred, if the homes are known."""
        ranks = [rank for rank in self.moved if rank in self._homes]
        if not ranks:
            return ""
        text = ""
        sent = {rank: self.moved[rank] - self._stored[rank] for rank in ranks}
        for how, sizes in (("from other nodes", sent), ("from storage", self._stored)):
            some = [rank for rank in ranks if sizes[rank]]
            if some:
                size = format_bytes(sum(sizes[rank] for rank in some))
                text += f"; {size} of {listed('rank', some)} {'comes' if len(some) == 1 else 'come'} {how}"
        return text

    def _charge(self, rank: int, copy: Copy) -> None:
        size = record_of(copy, self._known).image_len
        self._load[self._known[copy[0]].node] += size
        self.moved[rank] += size
        if self._known[copy[0]].node == STORE_NODE:
            self._stored[rank] += size

    def _source(self, copy: Copy) -> SnapshotCopy:
        held = self._known[copy[0]]
        return SnapshotCopy(held.node, held.segment, held.records[copy[1]].index)
