"""What all parts of one daemon share; made once, at its start."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ckptd.config.settings import DaemonConfig
from ckptd.event_log import EventLog
from ckptd.memory.segment_store import SegmentStore
from ckptd.storage.image import DigestMap
from ckptd.workers import Workers

logger = logging.getLogger(__name__)

Post = Callable[[Callable[[], None]], None]


@dataclass(frozen=True, slots=True)
class NodeContext:
    """What a node is: its settings, its memory, its log and its time."""

    config: DaemonConfig

    store: SegmentStore
    """The segments of this node's ranks."""

    events: EventLog

    post: Post
    """Calls a function soon on the daemon's loop thread; safe from any thread."""

    boot_id: str = field(default_factory=lambda: secrets.token_hex(8))
    """New at each start."""

    clock: Callable[[], float] = time.monotonic
    """Monotonic seconds."""

    @property
    def node_id(self) -> str:
        """The name of this node."""
        return self.store.node_id

    def guarded(self, what: str, work: Callable[[], None]) -> None:
        """Do periodic work; an error is logged and reported as an event."""
        try:
            work()
        # Trouble with one run or replica must not keep the others from being looked after.
        except Exception as error:
            logger.exception("the periodic work failed: %s", what)
            self.events.add("error", "internal", f"periodic work, {what}: {error!r}")

    def failed(self, what: str, error: BaseException) -> None:
        """Log an error, and report it as an event."""
        logger.error("%s failed", what, exc_info=error)
        self.events.add("error", "internal", f"{what}: {error!r}")


@dataclass(frozen=True, slots=True)
class DigestThreads:
    """How many threads digest one image."""

    map_fn: DigestMap | None = None
    """Spreads the tensors of an image over threads; None: one thread digests them all."""

    count: int = 1
    """Threads of one cryptographic digest."""


@dataclass(frozen=True, slots=True)
class NodeWorkers:
    """The threads of a daemon besides its loop."""

    sealers: Workers
    """Digest what trainers filled and what fetches brought."""

    slow: Workers
    """Make and remove memory."""

    digests: DigestThreads = field(default_factory=DigestThreads)
