"""How the segment of a rank looks that is on other nodes: asked of whoever holds a snapshot of it
(docs/replication.md §7).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ckptd.core.sessions import RankKey
from ckptd.core.slots.segment_format import SegmentDescriptor, decode_descriptor
from ckptd.errors import SegmentError
from ckptd.memory.segment_file import Segment
from ckptd.peers.holder import Holder
from ckptd.transport import peer_messages as p
from ckptd.transport.messages import FetchSource

__all__ = ["DescriptorSearch", "FoundDescriptor", "LocalSource"]

# Finds a segment of this node by name, for pieces that lie here already.
LocalSource = Callable[[str], Segment | None]


@dataclass(frozen=True, slots=True)
class FoundDescriptor:
    """How to make a segment like the one that is fetched."""

    descriptor: SegmentDescriptor
    num_slots: int
    slot_bytes: int


class DescriptorSearch:
    """Asks the holders of a snapshot, one after the other, for their segment's descriptor."""

    def __init__(
        self,
        node: str,
        key: RankKey,
        sources: Sequence[FetchSource],
        link: Callable[[str], Holder | None],
        local: LocalSource,
        found: Callable[[FoundDescriptor | str], None],
    ) -> None:
        self._node, self._key, self._link, self._local = node, key, link, local
        self._found = found
        self._left = list(sources)
        self._reasons: list[str] = []
        self._next()

    def _next(self) -> None:
        while self._left:
            source = self._left.pop(0)
            segment = self._local(source.segment) if source.node == self._node else None
            link = self._link(source.node)
            if segment is not None:
                geometry = segment.geometry
                self._found(FoundDescriptor(segment.descriptor, geometry.num_slots, geometry.slot_bytes))
                return
            if link is not None:
                link.ask(
                    p.GetDescriptor(self._key.job, self._key.run, source.segment),
                    p.Descriptor,
                    partial(self._told, source),
                    partial(self._refused, source.node),
                )
                return
            self._reasons.append(f"{source.node}: its address is not known")
        self._found(f"no holder of {self._key} answers ({'; '.join(self._reasons)})")

    def _told(self, source: FetchSource, reply: p.Descriptor) -> None:
        try:
            descriptor = decode_descriptor(reply.descriptor)
        except SegmentError as error:
            self._not_told(source.node, str(error))
            return
        self._found(FoundDescriptor(descriptor, reply.num_slots, reply.slot_bytes))

    def _refused(self, node: str, _code: str, reason: str) -> None:
        self._not_told(node, reason)

    def _not_told(self, node: str, reason: str) -> None:
        self._reasons.append(f"{node}: {reason}")
        self._next()
