"""What to load and where it lies: pieces, and in which order their copies are asked for. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from ckptd.core.recovery.held import STORE_NODE
from ckptd.core.recovery.tables import Copy, Known, listed, record_of
from ckptd.core.slots.ring import SlotRecord
from ckptd.units import format_bytes

__all__ = ["SnapshotCopy", "SnapshotToLoad", "Sources"]


# A large world has hundreds of thousands of sources: structs outside of the garbage collector's sight
# are made five times as fast, and do not set it off (they cannot be part of a cycle).
class SnapshotCopy(msgspec.Struct, frozen=True, gc=False):
    """Where a copy of a snapshot lies: slot ``index`` of a segment on a node."""

    node: str
    segment: str
    index: int


class SnapshotToLoad(msgspec.Struct, frozen=True, gc=False):
    """One snapshot to load and all its copies; ``record`` is that of the first, preferred one."""

    record: SlotRecord
    sources: tuple[SnapshotCopy, ...]


class Sources:
    """Orders the copies of each piece so that no holder is asked for much more than another.

    Args:
        known: what copies are numbers of.
        homes: the node on which each rank will run.
        beside: what is asked for here comes on top of what is asked for there.
    """

    def __init__(
        self, known: Known, homes: Mapping[int, str], beside: Sources | None = None
    ) -> None:
        self._known, self._homes = known, homes
        # Bytes for which a node is the first to be asked.
        self._load: Counter[str] = beside._load if beside else Counter()
        self.moved: Counter[int] = beside.moved if beside else Counter()  # bytes by rank
        self._stored: Counter[int] = beside._stored if beside else Counter()  # of them from storage

    def piece(self, rank: int, copies: Sequence[Copy]) -> SnapshotToLoad:
        """For ``rank``: the home's copies first, its own segment before a replica; then the others in turn."""
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
        """What travels, where the homes are known."""
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
