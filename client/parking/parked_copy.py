"""Parked state that is not in this rank's own memory, brought into memory of this process's own.

A rank that *moved* to another node takes along what it parked itself. A *copied* rank has all
operators alike with a peer that was parked: it takes tensors from there, and what is its own
(buffers, random state, the user's state, all step scalars) from its own snapshot of the same
iteration.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptd.client.daemon_link.segment_arrival import wait_until_sealed
from ckptd.client.daemon_link.slot_file import SlotFile
from ckptd.client.daemon_link.snapshot_image import SnapshotImage
from ckptd.client.log_lines import get_logger
from ckptd.client.pipeline.upstream_feed import BringsLogs
from ckptd.core.recovery.snapshot_sources import SnapshotCopy, SnapshotToLoad
from ckptd.core.slots.ring import SlotRecord
from ckptd.core.slots.segment_names import parse_segment_file_name
from ckptd.cuda.engine import HostMemory
from ckptd.errors import CorruptionError, DaemonUnavailable, SegmentError
from ckptd.holdings import fetch_piece
from ckptd.storage.image import ImageView, verify
from ckptd.storage.image_format import ImageError
from ckptd.transport.control.messages import NodeCard

__all__ = ["CopiedImage", "ParkedCopy"]

logger = get_logger(__name__)

_GRANT_S = 700.0  # longer than the session waits for memory to be made


class ParkedCopy(SnapshotImage):
    """A parked image in private memory.

    Raises:
        CorruptionError: it is not what was sealed.
    """

    def __init__(self, image: memoryview, record: SlotRecord) -> None:
        # Anonymous memory, aligned as in a segment: tensors are viewed in it.
        private = memoryview(mmap.mmap(-1, max(len(image), 1)))
        private[: len(image)] = image
        try:
            verify(private[: len(image)], record.header_digest)
            view = ImageView(private[: len(image)])
        except ImageError as error:
            raise CorruptionError(
                f"the state parked at iteration {record.iteration} is damaged: {error}",
                operation="read parked state",
            ) from error
        super().__init__(record.iteration, view, HostMemory(private), 0, record.phase)

    @classmethod
    def read(cls, session: BringsLogs, piece: SnapshotToLoad, cards: tuple[NodeCard, ...]) -> ParkedCopy:
        """From a file on this node, or brought here by the daemon; waits until it is here.

        What is damaged here is left to the daemon: it mends it from other copies, or puts it in quarantine.

        Raises:
            CorruptionError: what was brought is not what was sealed.
            AttachRefused: there is no memory for it, or nobody holds it any more.
            DaemonUnavailable: the daemon is away, or it cannot be brought here: no copy of it is
                whole, or can be reached.
        """
        for source in piece.sources:
            if source.node != session.node_id:
                continue
            try:
                found = cls._here(session, piece.record, source)
            except CorruptionError as error:
                text = f"{source.segment}: {error}; another copy is asked for"
                logger.error("%s", text)
                session.notice("error", "digest_mismatch", text)
                continue
            if found is not None:
                return found
        return cls._brought(session, piece, cards)

    @classmethod
    def _here(cls, session: BringsLogs, record: SlotRecord, source: SnapshotCopy) -> ParkedCopy | None:
        """None if it cannot be read in place; the daemon may be able to."""
        name = source.segment
        if name != os.path.basename(name):  # a node has told this name
            return None
        try:
            file = SlotFile(Path(session.segment_dir, name), "parked")
            if (file.descriptor.job, file.descriptor.run) != session.run:
                return None
            with file.held(replace(record, index=source.index)) as image:
                return None if image is None else cls(image, record)
        except (OSError, SegmentError) as error:
            logger.info("%s is not read directly: %s", name, error)
            return None

    @classmethod
    def _brought(cls, session: BringsLogs, piece: SnapshotToLoad, cards: tuple[NodeCard, ...]) -> ParkedCopy:
        record = piece.record
        rank = parse_segment_file_name(piece.sources[0].segment, "parked").rank
        wanted = (fetch_piece(piece, sealed_at_ns=0),)
        try:
            info = session.fetch_for_reading(rank, "parked", wanted, cards).result(_GRANT_S)
        except TimeoutError as error:
            raise DaemonUnavailable(
                "the daemon makes no memory for it", operation="read parked state"
            ) from error
        try:
            file = SlotFile(Path(info.path), "parked")
            wait_until_sealed(session, info.generation, record.iteration, lambda: file.header(0))
            # Nobody overwrites it; and the daemon may hold its slot for a moment after it is sealed.
            image = file.image(replace(record, index=0))
            if image is not None:
                return cls(image, record)
        except (OSError, SegmentError) as error:  # a daemon that is restarted removes it
            raise _taken_away(record) from error
        finally:
            session.drop(info.generation)
        raise _taken_away(record)


def _taken_away(record: SlotRecord) -> DaemonUnavailable:
    return DaemonUnavailable(
        f"the copy of the state parked at iteration {record.iteration} was taken away",
        operation="read parked state",
    )


class CopiedImage(SnapshotImage):
    """A peer's tensors with what is this rank's own, as one dense image; made when it is looked at first.

    Args:
        peer: its parked image, which is changed: this rank's buffers go where the peer's are.
        own: this rank's snapshot of the same iteration, which may be on its way.
    """

    def __init__(self, peer: ParkedCopy, own: SnapshotImage) -> None:
        super().__init__(peer.iteration, self._joined, peer.memory, peer.base, peer.phase)
        self._peer, self._own = peer, own

    def scalars(self) -> dict[str, Any]:
        """Our own; but which parameters have no optimizer state is told with the tensors."""
        theirs, ours = self._peer.scalars(), self._own.scalars()
        return {**ours, "absent": theirs["absent"]}

    def _joined(self) -> ImageView:
        self._take_buffers()
        return self._peer.view

    def _take_buffers(self) -> None:
        for source, entry in self._own.sources():
            if source.kind == "buffer":
                self._peer.tensor(entry).copy_(self._own.tensor(entry))
