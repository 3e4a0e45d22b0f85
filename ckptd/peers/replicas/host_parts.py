"""What the parts of a host share: whose memory it is, who works on it, and who is told."""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from ckptd.core.replication.known_runs import KnownRuns
from ckptd.core.replication.replicas import Promise
from ckptd.memory.image_digests import Vouch
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_maker import SegmentMaker
from ckptd.node_context import DigestThreads, NodeContext
from ckptd.peers.replicas.region_loans import Lending
from ckptd.peers.replicas.replica_store import ReplicaStore
from ckptd.transport import peer_messages as p
from ckptd.transport.messages import ReplayFailure
from ckptd.transport.verbs import Fabric
from ckptd.workers import Workers

__all__ = ["SLOWEST_BYTES_PER_S", "HostOwner", "HostParts", "HostWorkers", "LeaseOwner"]

logger = logging.getLogger(__name__)

SLOWEST_BYTES_PER_S = 4 << 20  # a peer slower than this has gone, as far as its slot is concerned


class HostOwner(Protocol):
    """What a host asks and tells the node that it belongs to."""

    def promise_of(self, job: str, run: str) -> tuple[int, Promise, int]:
        """What is known to be agreed on of a run: in which epoch, what, and the span."""

    def failures_of(self, job: str, run: str) -> tuple[ReplayFailure, ...]:
        """The replays of a run that did not reproduce."""

    def doubt(self, segment: Segment, index: int, sequence: int, /) -> None:
        """Have a slot verified soon, and quarantined if it is damaged."""


class LeaseOwner(Protocol):
    """What leases tell the host."""

    def learn_epoch(self, message: p.OpenReplica) -> None:
        """A peer opens a replica of this epoch.

        Raises:
            ValueError: no such epoch can follow the newest one.
            OSError: it cannot be written.
        """

    def remove(self, segment: Segment, why: str) -> None:
        """Free a replica's memory."""


@dataclass(frozen=True, slots=True)
class HostWorkers:
    """Who works for a host in threads."""

    verifiers: Workers
    """Verify what arrived. Not those that seal: no seal of a trainer here waits for a replica."""

    maker: SegmentMaker
    """Makes replicas, and gives their memory back."""

    settlers: Workers
    """Break off what peers do."""

    digests: DigestThreads = field(default_factory=DigestThreads)


@dataclass(frozen=True, slots=True)
class HostParts:
    """See the module."""

    node: NodeContext
    fabric: Fabric
    replicas: ReplicaStore
    workers: HostWorkers
    known: KnownRuns
    lending: Lending

    vouch: Vouch
    """Makes digests of images."""

    # Not from 1: a lease or ticket of an earlier boot must mean nothing.
    ids: Iterator[int] = field(default_factory=lambda: itertools.count(secrets.randbits(61)))

    @property
    def clock(self) -> Callable[[], float]:
        """Monotonic seconds."""
        return self.node.clock

    def failed(self, what: str, error: BaseException) -> None:
        """Report what did not work."""
        logger.error("%s failed", what, exc_info=error)
        self.node.events.add("error", "internal", f"{what}: {error!r}")
