"""Parked state of a peer, from this node or another, in memory of this process's own.

A *copied* rank has all operators alike with a peer that was parked: it takes tensors from there, and what is its own (buffers, random
state, the user's state, all step scalars) from its own snapshot of the same iteration.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckptd.client.arrival import wait_until_sealed
from ckptd.client.fed_logs import BringsLogs
from ckptd.client.replay import SnapshotImage
from ckptd.cuda.engine import HostMemory
from ckptd.errors import CorruptionError, SegmentError
from ckptd.memory import locks
from ckptd.memory.ring import SlotState
from ckptd.memory.segment_format import (
    SegmentDescriptor,
    SegmentGeometry,
    SlotHeader,
    parse_segment_file_name,
    read_prologue,
    read_slot_header,
    slot_lock_byte,
    slot_view,
)
from ckptd.recovery.holdings import fetch_piece
from ckptd.recovery.pieces import Piece
from ckptd.storage.image import ImageError, ImageView, verify
from ckptd.transport.messages import NodeCard

__all__ = ["CopiedImage", "ParkedCopy"]

_GRANT_S = 700.0  # longer than the session waits for memory to be made


class ParkedCopy(SnapshotImage):
    """A parked image in private memory."""

    def __init__(self, image: memoryview, piece: Piece) -> None:
        # Anonymous memory, aligned as in a segment: tensors are viewed in it.
        private = memoryview(mmap.mmap(-1, max(len(image), 1)))
        private[: len(image)] = image
        record = piece.record
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
    def read(cls, session: BringsLogs, piece: Piece, cards: tuple[NodeCard, ...]) -> ParkedCopy:
        """From a file on this node, or brought here by the daemon; waits until it is here.

        Raises:
            CorruptionError: no copy of it is what was sealed.
            AttachRefused: there is no memory for it, or nobody holds it any more.
            DaemonUnavailable: the daemon is away, or it cannot be brought here.
        """
        for source in piece.sources:
            name = source.segment
            if source.node != session.node_id or name != os.path.basename(name):
                continue
            try:
                with _File(Path(session.segment_dir, name)).image(source.index) as (image, told):
                    if (told.job, told.run) == session.run:  # a node has told this name
                        return cls(image, piece)
            except (OSError, SegmentError):
                continue  # the daemon may be able to read it
        return cls._brought(session, piece, cards)

    @classmethod
    def _brought(cls, session: BringsLogs, piece: Piece, cards: tuple[NodeCard, ...]) -> ParkedCopy:
        rank = parse_segment_file_name(piece.sources[0].segment, "parked").rank
        wanted = (fetch_piece(piece, sealed_at_ns=0),)
        info = session.fetch_for_reading(rank, "parked", wanted, cards).result(_GRANT_S)
        try:
            file = _File(Path(info.path))
            wait_until_sealed(session, info.generation, piece.record.iteration, file.header(0))
            with file.image(0) as (image, _):
                return cls(image, piece)
        finally:
            session.drop(info.generation)


class CopiedImage(SnapshotImage):
    """A peer's tensors with what is this rank's own, as one dense image.

    Args:
        peer: its parked image, which is changed.
        own: this rank's snapshot of the same iteration.
    """

    def __init__(self, peer: ParkedCopy, own: SnapshotImage) -> None:
        super().__init__(peer.iteration, peer.view, peer.memory, peer.base, peer.phase)
        self._peer, self._own = peer, own

    def scalars(self) -> dict[str, Any]:
        """Our own; but which parameters have no optimizer state is told with the tensors."""
        self._take_buffers()
        theirs, ours = self._peer.scalars(), self._own.scalars()
        return {**ours, "absent": theirs["absent"]}

    def _take_buffers(self) -> None:
        for source, entry in self._own.sources():
            if source.kind == "buffer":
                self.tensor(entry).copy_(self._own.tensor(entry))


class _File:
    """Somebody's parked states, mapped for reading.

    Raises:
        OSError: it cannot be opened.
        SegmentError: it holds no parked state.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._buffer = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ))
        finally:
            os.close(fd)
        self._geometry: SegmentGeometry
        self._told: SegmentDescriptor
        self._geometry, self._told = read_prologue(self._buffer)
        if self._told.kind != "parked":
            raise SegmentError(
                f"{path.name} holds {self._told.kind}", operation="read parked state"
            )

    def header(self, index: int) -> Callable[[], SlotHeader | None]:
        return lambda: read_slot_header(self._buffer, self._geometry, index)

    @contextmanager
    def image(self, index: int) -> Iterator[tuple[memoryview, SegmentDescriptor]]:
        """The image of a slot, which stays as it is in the body.

        Raises:
            SegmentError: nothing is sealed there.
        """
        with locks.lock_file(self._path, slot_lock_byte(index), exclusive=False) as taken:
            header = self.header(index)() if taken else None
            if header is None or header.state is not SlotState.SEALED:
                raise SegmentError(
                    f"slot {index} of {self._path.name} is being written",
                    operation="read parked state",
                )
            yield slot_view(self._buffer, self._geometry, index)[: header.image_len], self._told
