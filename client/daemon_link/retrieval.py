"""Getting this rank the snapshots of a plan: those that lie here are verified, the daemon is asked
for the others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ckptd.client.daemon_link.generations import Generations
from ckptd.client.daemon_link.session import Session
from ckptd.client.daemon_link.slot_file import SlotFile
from ckptd.client.log_lines import get_logger
from ckptd.client.ranks.collectives import TryAgain
from ckptd.core.recovery.global_plan import SnapshotToLoad
from ckptd.core.recovery.held import STORE_NODE
from ckptd.core.slots.ring import SlotRecord, SlotState
from ckptd.core.slots.segment_format import SegmentDescriptor
from ckptd.errors import AttachRefused, DaemonUnavailable, SegmentError
from ckptd.holdings import fetch_piece
from ckptd.storage.image import DigestMismatch, verify
from ckptd.storage.image_format import ImageError
from ckptd.transport.control.messages import NodeCard, RefusalCode, SegmentInfo

__all__ = ["Retrieval", "Retrieved"]

logger = get_logger(__name__)


_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Retrieved:
    """The snapshots of this rank's part of a plan: here, or on their way."""

    own: Sequence[SlotRecord | None]  # this rank's own copies, by piece
    fetched: SegmentInfo | None = None
    asked_s: float = 0.0  # when, by the performance counter


class Retrieval:
    """Has the snapshots of plans here. What is damaged here is quarantined, so that the next plan does
    without it.
    """

    def __init__(self, session: Session, segments: Generations) -> None:
        self._session, self._segments = session, segments

    def retrieve(
        self, pieces: Sequence[SnapshotToLoad], cards: tuple[NodeCard, ...], undo: ExitStack
    ) -> Retrieved:
        """Have the pieces here, or on their way.

        Args:
            undo: gives back what was fetched.
        Raises:
            TryAgain: not these pieces; another plan may do.
            AttachRefused: there is no memory for them.
        """
        node = self._session.node_id
        own = [self._segments.own_copy(node, piece) for piece in pieces]
        missing = [piece for piece, mine in zip(pieces, own, strict=True) if mine is None]
        try:
            if self._verify([record for record in own if record is not None]):
                raise TryAgain
            if not missing:
                return Retrieved(own)
            asked_s = time.perf_counter()
            fetched = self._fetch(missing, cards)
            undo.callback(self._session.drop, fetched.generation)
            # Of what only storage has there is no other copy: if it is damaged, all ranks must go
            # back to an older one.
            if any(_only_stored(piece) for piece in missing) and not self._arrives(fetched):
                raise TryAgain
        except AttachRefused as error:
            # Where its holders are gone, others may be there. Where there is no memory for it,
            # there will be none.
            if error.code == RefusalCode.NOT_FOUND:
                raise TryAgain from error
            raise
        except DaemonUnavailable as error:
            raise TryAgain from error
        return Retrieved(own, fetched, asked_s)

    def descriptor_of(self, retrieved: Retrieved) -> SegmentDescriptor:
        """Of the segment in which the newest piece lies, or to which it comes.

        Raises:
            DaemonUnavailable: what is being brought here was taken away.
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
        """Wait for all that was asked for; False if it cannot be had."""
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


def _only_stored(piece: SnapshotToLoad) -> bool:
    return all(source.node == STORE_NODE for source in piece.sources)
