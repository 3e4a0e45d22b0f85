"""One target of a rank's replication: its states, the legal transitions, and the bounds of waiting.

Users import them from `ckptd.core.replication.replicator`, which decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import NamedTuple

from ckptd.core.slots.ring import SlotRecord
from ckptd.core.slots.snapshot_events import SnapshotKey, key_of
from ckptd.core.state_machine import MachineState, Transitions

__all__ = [
    "ASKING",
    "HOLDING",
    "NO_INTERVAL",
    "TRANSITIONS",
    "Interval",
    "Lag",
    "Phase",
    "ReplicationConfig",
    "ReplicationTarget",
    "TargetEvent",
    "TargetState",
]


class Phase(MachineState):
    """What a target is doing."""

    CLOSED = "closed", "no lease, or a lost peer"
    OPENING = "opening", "asked for a lease, and for what it holds"
    IDLE = "idle", "nothing to send, or waiting to try again"
    BEGINNING = "beginning", "asked for a slot; the local one is held"
    PUTTING = "putting", "the image is on its way"
    CANCELLING = "cancelling", "a put that must end before the local slot may be released"
    SEALING = "sealing", "asked to verify the image and to seal it"


class TargetEvent(StrEnum):
    """What happens to one target."""

    OPEN = "open"
    OPENED = "opened"
    BEGIN = "begin"
    GRANTED = "granted"
    DELIVERED = "delivered"
    SEALED = "sealed"
    FAIL = "fail"  # what was asked comes to nothing
    CANCEL = "cancel"
    STOP = "stop"  # nothing is believed to be leased any more


TRANSITIONS = Transitions(
    "replication",
    {
        (Phase.CLOSED, TargetEvent.OPEN): Phase.OPENING,
        (Phase.CLOSED, TargetEvent.STOP): Phase.CLOSED,
        (Phase.OPENING, TargetEvent.OPENED): Phase.IDLE,
        (Phase.OPENING, TargetEvent.FAIL): Phase.CLOSED,
        (Phase.OPENING, TargetEvent.STOP): Phase.CLOSED,
        (Phase.IDLE, TargetEvent.OPEN): Phase.OPENING,
        (Phase.IDLE, TargetEvent.BEGIN): Phase.BEGINNING,
        (Phase.IDLE, TargetEvent.STOP): Phase.CLOSED,
        (Phase.BEGINNING, TargetEvent.GRANTED): Phase.PUTTING,
        (Phase.BEGINNING, TargetEvent.FAIL): Phase.IDLE,
        (Phase.BEGINNING, TargetEvent.STOP): Phase.CLOSED,
        (Phase.PUTTING, TargetEvent.DELIVERED): Phase.SEALING,
        (Phase.PUTTING, TargetEvent.FAIL): Phase.IDLE,
        (Phase.PUTTING, TargetEvent.CANCEL): Phase.CANCELLING,
        (Phase.CANCELLING, TargetEvent.FAIL): Phase.IDLE,
        (Phase.CANCELLING, TargetEvent.STOP): Phase.CLOSED,
        (Phase.SEALING, TargetEvent.SEALED): Phase.IDLE,
        (Phase.SEALING, TargetEvent.FAIL): Phase.IDLE,
        (Phase.SEALING, TargetEvent.STOP): Phase.CLOSED,
    },
)
ASKING = (Phase.OPENING, Phase.BEGINNING, Phase.SEALING)
HOLDING = (Phase.BEGINNING, Phase.PUTTING, Phase.CANCELLING)


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
    stale: bool = False  # it refuses what we have: another history counts there
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

    def on(self, event: TargetEvent) -> None:
        """Every transition goes through here; what is sent is forgotten where nothing is being sent."""
        self.phase = TRANSITIONS.after(self.phase, event, node=self.node)
        if self.phase in (Phase.CLOSED, Phase.IDLE):
            self.record = self.grant = None

    def forget(self) -> None:
        """Believe nothing of it any more."""
        self.boot_id = ""
        self.opened.clear()
        self.held.clear()
        self.skipped.clear()
        self.planned = False
        self.run = NO_INTERVAL
        self.failures = self.unknowns = self.digest_refusals = 0
        self.stale = False
        self.retry_at_s = 0.0
