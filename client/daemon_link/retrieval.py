"""Retrieval of the snapshots in a plan: local copies are verified, the daemon fetches the others, and replay
waits for them when it needs them (`Arrivals`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ckptd.client.daemon_link.mapped_segment import Generations, MappedSegment, SlotFile
from ckptd.client.daemon_link.session import Session
from ckptd.client.daemon_link.snapshot_image import SnapshotImage
from ckptd.client.log_lines import get_logger
from ckptd.client.ranks.collectives import TryAgain
from ckptd.client.stats import Stats
from ckptd.core.recovery.held import STORE_NODE
from ckptd.core.recovery.snapshot_tables import SnapshotToLoad
from ckptd.core.slots.segment_format import SegmentDescriptor, SlotHeader
from ckptd.core.slots.slots import SlotRecord, SlotState
from ckptd.errors import AttachRefused, DaemonUnavailable, SegmentError
from ckptd.holdings import fetch_piece
from ckptd.storage.image import DigestMismatch, ImageView, verify
from ckptd.storage.image_format import ImageError
from ckptd.transport.messages import FetchState, NodeCard, RefusalCode, SegmentInfo

logger = get_logger(__name__)

_POLL_S = 0.05
_ASK_S = 0.5
_STALLED_S = 60.0


@dataclass(frozen=True, slots=True)
class Retrieved:
    """The snapshots of this rank's part of a plan: local, or on their way.

    Attributes:
        own: this rank's own copies, by piece.
        asked_s: when the others were requested, by the performance counter.
    """

    own: Sequence[SlotRecord | None]
    fetched: SegmentInfo | None = None
    asked_s: float = 0.0

    def missing(self, pieces: Sequence[SnapshotToLoad]) -> list[SnapshotToLoad]:
        """Those of the plan's pieces that are not local, in the order in which they were requested."""
        return [piece for piece, mine in zip(pieces, self.own, strict=True) if mine is None]


class Retrieval:
    """Retrieves the snapshots of plans. It quarantines damaged local copies: the next plan excludes them."""

    def __init__(self, session: Session, segments: Generations) -> None:
        self._session, self._segments = session, segments

    def retrieve(
        self,
        pieces: Sequence[SnapshotToLoad],
        cards: tuple[NodeCard, ...],
        undo: ExitStack,
        *,
        apart: int = 0,
    ) -> Retrieved:
        """Verify the local pieces, and request the others.

        Args:
            cards: the addresses of the nodes.
            undo: gives back what was fetched.
            apart: so many of the first pieces are no part of the plan's chain. If one must be fetched, this
                waits for all: the run can do without it, and not without the others.
        Raises:
            TryAgain: not these pieces; another plan may do.
            AttachRefused: there is no memory for them.
        """
        own = [self._segments.own_copy(self._session.node_id, piece) for piece in pieces]
        missing = [piece for piece, mine in zip(pieces, own, strict=True) if mine is None]
        try:
            if self._verify([record for record in own if record is not None]):
                raise TryAgain
            if not missing:
                return Retrieved(own)
            asked_s = time.perf_counter()
            fetched = self._fetch(missing, cards)
            undo.callback(self._session.drop, fetched.generation)
            # What only storage has has no other copy: if it is damaged, all ranks must go back to
            # an older snapshot.
            wait = None in own[:apart] or any(only_stored(piece) for piece in missing)
            if wait and not self._arrives(fetched):
                raise TryAgain
        except AttachRefused as error:
            # If its holders are gone, others may have it. If there is no memory for it, there will be none.
            if error.code == RefusalCode.NOT_FOUND:
                raise TryAgain from error
            raise
        except DaemonUnavailable as error:
            raise TryAgain from error
        return Retrieved(own, fetched, asked_s)

    def descriptor_of(self, retrieved: Retrieved) -> SegmentDescriptor:
        """The descriptor of the segment that holds the newest piece, or receives it.

        Raises:
            DaemonUnavailable: the fetched segment was taken away.
        """
        own = retrieved.own[-1]
        if own is not None:
            return self._segments.of(own).descriptor
        if retrieved.fetched is None:
            raise DaemonUnavailable("nothing is brought here", operation="fetch")
        try:
            return SlotFile(Path(retrieved.fetched.path), "snapshots").descriptor
        except (OSError, SegmentError) as error:
            raise DaemonUnavailable(
                f"what is brought here cannot be read: {error}", operation="fetch"
            ) from error

    def _fetch(self, pieces: Sequence[SnapshotToLoad], cards: tuple[NodeCard, ...]) -> SegmentInfo:
        wanted = tuple(fetch_piece(piece, sealed_at_ns=time.time_ns()) for piece in pieces)
        try:
            return self._session.fetch(wanted, cards)
        except (AttachRefused, DaemonUnavailable) as error:
            logger.error("snapshots could not be brought to this node: %s", error)
            self._session.notice("error", "fetch_failed", str(error))
            raise

    def _arrives(self, segment: SegmentInfo) -> bool:
        """Wait for the whole fetch; False if it fails."""
        while True:
            state = self._session.fetch_state(segment.generation)
            if state.state != "running":
                return state.state == "done"
            time.sleep(_POLL_S)

    def _verify(self, records: Sequence[SlotRecord]) -> bool:
        """Check every digest of these slots; True if one failed (it is quarantined)."""
        bad = False
        with ThreadPoolExecutor(2, thread_name_prefix="ckptd-verify") as pool:
            for record in records:
                # Not the table's: the plan may be of older generations than the newest operator table.
                segment = self._segments.of(record)
                header = segment.header(record.index)
                slot = segment.slot(record.index)[: record.image_len]
                try:
                    if header is None:
                        raise ImageError("the slot header is damaged")
                    verify(slot, header.header_digest, map_fn=pool.map)
                except ImageError as error:
                    what = error.tensor if isinstance(error, DigestMismatch) else str(error)
                    text = (
                        f"slot {record.index} (iteration {record.iteration}) is damaged: "
                        f"{what}; quarantined, another copy or an older suffix is used"
                    )
                    logger.error("%s", text)
                    self._session.notice("error", "digest_mismatch", text)
                    segment.set_state(record.index, SlotState.QUARANTINED)
                    bad = True
        return bad


def only_stored(piece: SnapshotToLoad) -> bool:
    """Whether no node has this snapshot in its memory."""
    return all(source.node == STORE_NODE for source in piece.sources)


class KnowsFetches(Protocol):
    """The part of this rank's daemon session that is used here."""

    def fetch_state(self, generation: int) -> FetchState: ...


class Arrivals:
    """The snapshots that are being fetched into one segment, which is mapped already.

    Args:
        asked_s: when the daemon was asked for it, by the performance counter.
    """

    def __init__(
        self, session: KnowsFetches, segment: MappedSegment, stats: Stats, *, asked_s: float
    ) -> None:
        self._session, self._segment, self._stats = session, segment, stats
        self._asked_s = asked_s

    def image(self, index: int, record: SlotRecord) -> SnapshotImage:
        """The snapshot that is fetched into this slot; its view blocks until it has arrived."""
        segment = self._segment

        def view() -> ImageView:
            generation, iteration = segment.generation, record.iteration
            wait_until_sealed(self._session, generation, iteration, lambda: segment.header(index))
            self._stats.fetch_last_s = time.perf_counter() - self._asked_s
            self._stats.fetch_first_s = self._stats.fetch_first_s or self._stats.fetch_last_s
            return ImageView(segment.slot(index)[: record.image_len])

        base = segment.slot_base(index)
        return SnapshotImage(record.iteration, view, segment.memory, base, record.phase, record.anchors)


def wait_until_sealed(
    session: KnowsFetches,
    generation: int,
    iteration: int,
    header: Callable[[], SlotHeader | None],
) -> None:
    """Block until the daemon has sealed the slot with this header.

    Args:
        generation: into which the iteration is fetched.
    Raises:
        DaemonUnavailable: it cannot be fetched any more; a restart of the job plans anew.
    """
    asked_at, seen, moved_at = time.monotonic(), -1, time.monotonic()
    while True:
        found = header()
        if found is not None and found.state is SlotState.SEALED:
            return
        now = time.monotonic()
        if now >= asked_at + _ASK_S:
            asked_at = now
            done = _bytes_done(session, generation, iteration)
            if done != seen:
                seen, moved_at = done, now
            elif now > moved_at + _STALLED_S:
                text = f"iteration {iteration}: nothing arrived for {_STALLED_S:.0f} s"
                raise DaemonUnavailable(text, operation="fetch")
        time.sleep(0.002)


def _bytes_done(session: KnowsFetches, generation: int, iteration: int) -> int:
    try:
        state = session.fetch_state(generation)
    except AttachRefused as error:
        raise DaemonUnavailable(str(error), operation="fetch") from error
    if state.state == "failed":
        text = f"iteration {iteration} could not be brought here: {state.reason}"
        raise DaemonUnavailable(text, operation="fetch")
    return state.bytes_done
