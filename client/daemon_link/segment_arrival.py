"""Snapshots that the daemon brings here from other nodes: mapped at once, waited for when replay
needs them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from ckptd.client.daemon_link.mapped_segment import MappedSegment
from ckptd.client.daemon_link.snapshot_image import SnapshotImage
from ckptd.client.stats import Stats
from ckptd.core.slots.ring import SlotRecord, SlotState
from ckptd.core.slots.segment_format import SlotHeader
from ckptd.errors import AttachRefused, DaemonUnavailable
from ckptd.storage.image import ImageView
from ckptd.transport.control.messages import FetchState

__all__ = ["Arrivals", "KnowsFetches", "wait_until_sealed"]

_ASK_S = 0.5
_STALLED_S = 60.0


class KnowsFetches(Protocol):
    """This rank's session with its daemon, as far as it is asked here."""

    def fetch_state(self, generation: int) -> FetchState: ...


class Arrivals:
    """What is being fetched into one segment.

    Args:
        asked_s: when the daemon was asked for it, by the performance counter.
    """

    def __init__(
        self, session: KnowsFetches, segment: MappedSegment, stats: Stats, *, asked_s: float
    ) -> None:
        self._session, self._segment, self._stats = session, segment, stats
        self._asked_s = asked_s

    def image(self, index: int, record: SlotRecord) -> SnapshotImage:
        """The snapshot that comes into this slot; looking at it waits until it is there."""
        segment = self._segment

        def view() -> ImageView:
            self._wait_for(index, record)
            self._stats.fetch_last_s = time.perf_counter() - self._asked_s
            self._stats.fetch_first_s = self._stats.fetch_first_s or self._stats.fetch_last_s
            return ImageView(segment.slot(index)[: record.image_len])

        return SnapshotImage(record.iteration, view, segment.memory, segment.slot_base(index), record.phase)

    def _wait_for(self, index: int, record: SlotRecord) -> None:
        segment = self._segment
        wait_until_sealed(self._session, segment.generation, record.iteration, lambda: segment.header(index))


def wait_until_sealed(
    session: KnowsFetches,
    generation: int,
    iteration: int,
    header: Callable[[], SlotHeader | None],
) -> None:
    """Until the daemon has sealed the slot with this header, of an iteration that is fetched into a
    generation.

    Raises:
        DaemonUnavailable: it cannot be brought here any more; a restart of the job plans anew.
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
                raise DaemonUnavailable(
                    f"iteration {iteration}: nothing arrived for {_STALLED_S:.0f} s",
                    operation="fetch",
                )
        time.sleep(0.002)


def _bytes_done(session: KnowsFetches, generation: int, iteration: int) -> int:
    try:
        state = session.fetch_state(generation)
    except AttachRefused as error:
        raise DaemonUnavailable(str(error), operation="fetch") from error
    if state.state == "failed":
        raise DaemonUnavailable(
            f"iteration {iteration} could not be brought here: {state.reason}",
            operation="fetch",
        )
    return state.bytes_done
