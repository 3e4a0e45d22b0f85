"""What every part of one daemon shares: made once, when it starts."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ckptd.config.settings import DaemonConfig
from ckptd.event_log import EventLog
from ckptd.memory.segment_store import SegmentStore
from ckptd.storage.image import DigestMap
from ckptd.workers import Workers

__all__ = ["DigestThreads", "NodeContext", "NodeWorkers", "Post"]

Post = Callable[[Callable[[], None]], None]


@dataclass(frozen=True, slots=True)
class NodeContext:
    """What a node is: its settings, its memory, its log and its time."""

    config: DaemonConfig

    store: SegmentStore
    """The segments of this node's ranks."""

    events: EventLog

    post: Post
    """Has something done soon on the daemon's loop thread; safe from any other."""

    boot_id: str = field(default_factory=lambda: secrets.token_hex(8))
    """New at each start."""

    clock: Callable[[], float] = time.monotonic
    """Monotonic seconds."""

    @property
    def node_id(self) -> str:
        """The name of this node."""
        return self.store.node_id


@dataclass(frozen=True, slots=True)
class DigestThreads:
    """How many threads digest one image."""

    map_fn: DigestMap | None = None
    """Spreads the tensors of an image over threads; None: one thread digests them all."""

    count: int = 1
    """Threads of one cryptographic digest."""


@dataclass(frozen=True, slots=True)
class NodeWorkers:
    """The threads of a daemon beside its loop."""

    sealers: Workers
    """Digest what trainers filled and what fetches brought."""

    slow: Workers
    """Make and remove memory."""

    digests: DigestThreads = field(default_factory=DigestThreads)
