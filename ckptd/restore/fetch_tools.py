"""What the pieces of a fetch share: their means, and their job (docs/replication.md §7)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckptd.event_log import EventLog
from ckptd.memory.segment_file import Segment
from ckptd.peers.holder import Holder
from ckptd.restore.descriptor_search import LocalSource
from ckptd.storage.images.image import DigestMap
from ckptd.workers import Workers

__all__ = ["Doubt", "FetchTools", "Job"]

# Has a slot of this node verified soon, if it still holds the snapshot of this sequence.
Doubt = Callable[[Segment, int, int], None]


@dataclass(frozen=True, slots=True)
class FetchTools:
    """What all pieces of a job need.

    Args:
        segment: into whose slots they go.
        node: our own.
        link: the connection to a node, None if its address is not known; the only way to holders elsewhere.
        local: segments of this very node.
        doubt: told which of their slots did not match its digests.
        verifiers: workers that digest; `map_fn`, if given, spreads one image over threads, and ``threads`` of them make one digest.
        stored: whether storage is asked for what no copy has that the plan knows.
    """

    segment: Segment
    node: str
    link: Callable[[str], Holder | None]
    local: LocalSource
    doubt: Doubt
    verifiers: Workers
    map_fn: DigestMap | None
    threads: int
    events: EventLog
    clock: Callable[[], float]
    stored: bool


@dataclass(frozen=True, slots=True)
class Job:
    """What a piece asks and tells its job.

    Args:
        goes_on: false if the job is over, or has to end because its memory was given back.
        over: whether the job has ended.
        progressed: something may be possible that was not.
        failed: the job cannot be completed, for this reason.
    """

    goes_on: Callable[[], bool]
    over: Callable[[], bool]
    progressed: Callable[[], None]
    failed: Callable[[str], None]
