"""What the pieces of a fetch share: their means, and their job (docs/replication.md §7)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from ckptd.event_log import EventLog
from ckptd.memory.segment_file import Segment
from ckptd.memory.slot_doubts import Doubt
from ckptd.node_context import DigestThreads
from ckptd.peers.holder import Holder
from ckptd.restore.descriptor_search import LocalSource
from ckptd.transport import peer_messages as p
from ckptd.transport.verbs import Fault
from ckptd.workers import Workers

__all__ = ["CopyDoubts", "FetchTools", "Job"]

logger = logging.getLogger(__name__)

_MAX_UNTOLD = 1024
_NO_ANSWER = (Fault.DEADLINE, Fault.CANCELLED)


class CopyDoubts:
    """Has copies verified in which a fetch found something wrong, on this node and on others. Unless
    they are quarantined, the next plan asks for them again.

    A node that does not answer is told again at each tick, also when the fetch is long over.

    Args:
        here: has a slot of this node verified.
        link: the connection to a node, None if its address is not known.
    """

    def __init__(self, here: Doubt, link: Callable[[str], Holder | None], events: EventLog) -> None:
        self.here = here
        self._link, self._events = link, events
        self._untold: dict[tuple[str, p.DoubtSlot], bool] = {}  # True: it is being asked

    def elsewhere(self, node: str, message: p.DoubtSlot) -> None:
        """Tell the node that holds this copy."""
        if len(self._untold) >= _MAX_UNTOLD:
            del self._untold[next(iter(self._untold))]
            self._events.count("doubts_dropped")
        if not self._untold.get((node, message)):
            self._ask(node, message)

    def tick(self) -> None:
        """Tell those again that did not answer."""
        for (node, message), asking in list(self._untold.items()):
            if not asking:
                self._ask(node, message)

    def _ask(self, node: str, message: p.DoubtSlot) -> None:
        link = self._link(node)
        if link is None:
            self._untold.pop((node, message), None)
            logger.warning("%s has left: nobody verifies %s there", node, message.name)
            return
        self._untold[node, message] = True
        link.ask(
            message,
            p.PeerDone,
            lambda _: self._told(node, message),
            lambda code, reason: self._not_told(node, message, code, reason),
        )

    def _told(self, node: str, message: p.DoubtSlot) -> None:
        self._untold.pop((node, message), None)

    def _not_told(self, node: str, message: p.DoubtSlot, code: str, reason: str) -> None:
        if code not in _NO_ANSWER:
            logger.warning("%s does not verify %s: %s", node, message.name, reason)
            self._untold.pop((node, message), None)
        elif (node, message) in self._untold:
            self._untold[node, message] = False


@dataclass(frozen=True, slots=True)
class FetchTools:
    """What all pieces of a job need.

    Args:
        segment: into whose slots they go.
        node: our own.
        link: the connection to a node, None if its address is not known; the only way to holders elsewhere.
        local: segments of this very node.
        doubts: told which copies did not match their digests.
        verifiers: workers that digest.
        stored: whether storage is asked for what no copy has that the plan knows.
    """

    segment: Segment
    node: str
    link: Callable[[str], Holder | None]
    local: LocalSource
    doubts: CopyDoubts
    verifiers: Workers
    digests: DigestThreads
    events: EventLog
    clock: Callable[[], float]
    stored: bool = True


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
