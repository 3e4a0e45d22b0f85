"""One target of a rank's replication: its state, the legal transitions, and the bounds of waiting.

Users import them from `ckptd.core.replication.replicator`, which decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import NamedTuple

from ckptd.core.slots.ring import SlotRecord
from ckptd.core.slots.snapshot_events import SnapshotKey, key_of
from ckptd.errors import LocalProtocolError

__all__ = [
    "ASKING",
    "NO_INTERVAL",
    "TRANSITIONS",
    "Interval",
    "Lag",
    "Phase",
    "ReplicationConfig",
    "ReplicationTarget",
    "TargetState",
]


class Phase(StrEnum):
    """What a target is doing."""

    CLOSED = "closed"  # no lease, or a lost peer
    OPENING = "opening"
    IDLE = "idle"  # nothing to send, or waiting to try again
    BEGINNING = "beginning"
    PUTTING = "putting"
    CANCELLING = "cancelling"  # a put that must end before its slot may be released
    SEALING = "sealing"


TRANSITIONS: Mapping[Phase, frozenset[Phase]] = {
    Phase.CLOSED: frozenset({Phase.CLOSED, Phase.OPENING}),
    Phase.OPENING: frozenset({Phase.IDLE, Phase.CLOSED}),
    Phase.IDLE: frozenset({Phase.OPENING, Phase.BEGINNING, Phase.CLOSED}),
    Phase.BEGINNING: frozenset({Phase.PUTTING, Phase.IDLE, Phase.CLOSED}),
    Phase.PUTTING: frozenset({Phase.SEALING, Phase.CANCELLING, Phase.IDLE}),
    Phase.CANCELLING: frozenset({Phase.IDLE, Phase.CLOSED}),
    Phase.SEALING: frozenset({Phase.IDLE, Phase.CLOSED}),
}
ASKING = (Phase.OPENING, Phase.BEGINNING, Phase.SEALING)


@dataclass(frozen=True, slots=True)
class ReplicationConfig:
    """Bounds of waiting, in seconds. The n-th failure in a row waits twice as long as the one before."""

    busy_s: float = 0.05
    "After a refusal because every slot is promised: the floor moves within a snapshot or two."
    busy_max_s: float = 1.0
    "The bound of that."
    quota_s: float = 5.0
    "After a refusal for want of memory: that changes rarely."
    quota_max_s: float = 60.0
    "The bound of that."
    retry_s: float = 0.2
    "After every other failure."
    retry_max_s: float = 10.0
    "The bound of that."
    answer_s: float = 30.0
    "How long a question may stand; sealing digests a whole image."
    stalled_s: float = 120.0
    "A target that is behind and sealed nothing for so long does not hold the floor back any more."
    digest_refusals: int = 3
    "After so many in a row the local copy is suspected, and the snapshot is passed over."

    def __post_init__(self) -> None:
        for spec in fields(self):
            if not getattr(self, spec.name) > 0:
                raise ValueError(f"{spec.name} must be positive, not {getattr(self, spec.name)}")


class Interval(NamedTuple):
    """Complete suffixes end at every snapshot from iteration ``first`` to ``last``; -1, -1: at none."""

    first: int
    last: int


NO_INTERVAL = Interval(-1, -1)


class Lag(NamedTuple):
    """How far a target is behind the newest sealed snapshot."""

    iterations: int
    bytes: int


@dataclass(frozen=True, slots=True)
class TargetState:
    """One target, for ``ckptctl peers``."""

    node: str
    phase: Phase
    alive: bool
    counted: bool
    held: int
    current_up_to: int
    lag: Lag
    waiting_s: float
    reason: str
    boot_id: str  # of the daemon that told what it holds; "": nothing is believed yet


@dataclass(slots=True)
class ReplicationTarget:
    """What is known of, and going on with, one target node."""

    node: str
    since_s: float  # of the last progress, or of the time since which nothing was to do
    phase: Phase = Phase.CLOSED
    wanted: bool = True
    alive: bool = True
    no_memory: bool = False
    stalled: bool = False
    boot_id: str = ""  # of the daemon that told what it holds
    opened: set[int] = field(default_factory=set)
    held: set[SnapshotKey] = field(default_factory=set)
    skipped: set[SnapshotKey] = field(default_factory=set)
    run: Interval = NO_INTERVAL
    generation: int = -1  # being opened
    record: SlotRecord | None = None  # being sent
    grant: object = None
    asked_s: float = 0.0
    retry_at_s: float = 0.0
    failures: int = 0
    unknowns: int = 0
    digest_refusals: int = 0
    reason: str = ""
    planned: bool = False  # whether ``upcoming`` is what follows from what is known now
    upcoming: SlotRecord | None = None

    @property
    def counted(self) -> bool:
        """Whether the floor waits for it."""
        return self.wanted and self.alive and not self.no_memory and not self.stalled

    @property
    def key(self) -> SnapshotKey | None:
        return None if self.record is None else key_of(self.record)

    def go(self, phase: Phase) -> None:
        if phase not in TRANSITIONS[self.phase]:
            raise LocalProtocolError(
                f"a target cannot go from {self.phase} to {phase}",
                operation="replicate",
                ids={"node": self.node},
            )
        self.phase = phase

    def forget(self) -> None:
        """Believe nothing of it any more."""
        self.boot_id = ""
        self.opened.clear()
        self.held.clear()
        self.skipped.clear()
        self.planned = False
        self.run = NO_INTERVAL
        self.failures = self.unknowns = self.digest_refusals = 0
        self.retry_at_s = 0.0
