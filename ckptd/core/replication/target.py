"""One target of a rank's replication: its states, the legal transitions, and the bounds of waiting.

Users import them from `ckptd.core.replication.replicator`, which decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import NamedTuple

from ckptd.core.slots.ring import SlotRecord
from ckptd.core.slots.slots import (
    Hold,
    Joined,
    Note,
    Release,
    SnapshotKey,
    Tick,
    key_of,
)
from ckptd.core.state_machine import MachineState, Transitions

__all__ = [
    "ASKING",
    "HOLDING",
    "NO_INTERVAL",
    "TRANSITIONS",
    "Abort",
    "Agreed",
    "Begin",
    "BeginRefused",
    "Effect",
    "Event",
    "Granted",
    "Interval",
    "Lag",
    "OpenRefused",
    "OpenTarget",
    "PeerBack",
    "PeerLost",
    "Phase",
    "Put",
    "PutEnded",
    "ReplicationConfig",
    "ReplicationTarget",
    "Seal",
    "SealRefused",
    "SealedThere",
    "Slots",
    "TargetEvent",
    "TargetOpened",
    "TargetState",
    "Targets",
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


# -- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Targets:
    """The placement: the nodes that shall hold this rank's replicas. `Joined` comes before it.

    ``missing``: a node that would be one of them is away, and what it holds may be all that there
    is elsewhere.
    """

    nodes: tuple[str, ...]
    missing: bool = False


@dataclass(frozen=True, slots=True)
class Slots:
    """The primary's slot tables (all generations) after a seal or another change.

    ``num_slots``: how many the generation has that is filled now.
    """

    records: tuple[SlotRecord, ...]
    num_operators: int
    num_slots: int = 0


@dataclass(frozen=True, slots=True)
class Agreed:
    """What the run agreed on, as far as this node knows
    (`ckptd.core.replication.replicas.Promise`). A run of one rank needs none of it.
    """

    floor: int
    horizon: int


@dataclass(frozen=True, slots=True)
class TargetOpened:
    """The replica of ``generation`` is there; ``held`` is what it holds sealed, with that
    generation. ``boot_id``: of the daemon there.
    """

    node: str
    generation: int
    lease: int
    held: tuple[SlotRecord, ...]
    boot_id: str = ""


@dataclass(frozen=True, slots=True)
class OpenRefused:
    """No replica; ``code`` as in `PeerRefused`, or "timeout"."""

    node: str
    generation: int
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Granted:
    """A slot for this snapshot; ``grant`` is the shell's own and only compared here."""

    node: str
    key: SnapshotKey
    grant: object


@dataclass(frozen=True, slots=True)
class BeginRefused:
    """No slot; ``code``: busy, held, stale, unknown, or any other."""

    node: str
    key: SnapshotKey
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class PutEnded:
    """The transfer is over and touches no byte any more."""

    node: str
    key: SnapshotKey
    ok: bool
    reason: str


@dataclass(frozen=True, slots=True)
class SealedThere:
    """The target verified the snapshot and shows it to recovery."""

    node: str
    key: SnapshotKey


@dataclass(frozen=True, slots=True)
class SealRefused:
    """The target did not seal; ``code`` is digest, unknown, or any other."""

    node: str
    key: SnapshotKey
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The node did not answer within the deadline."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeerBack:
    """The node answers (again)."""

    node: str


# -- effects -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenTarget:
    """Make or find the replica of this generation on the node."""

    node: str
    generation: int


@dataclass(frozen=True, slots=True)
class Begin:
    """Ask for a slot for this snapshot."""

    node: str
    key: SnapshotKey
    record: SlotRecord


@dataclass(frozen=True, slots=True)
class Put:
    """Send the image into the granted region."""

    node: str
    key: SnapshotKey
    record: SlotRecord
    grant: object


@dataclass(frozen=True, slots=True)
class Seal:
    """Every byte is there: let the target verify and seal it."""

    node: str
    key: SnapshotKey
    grant: object


@dataclass(frozen=True, slots=True)
class Abort:
    """Cancel the put, if one runs, and give the grant back."""

    node: str
    key: SnapshotKey
    grant: object


Event = (
    Joined
    | Targets
    | Slots
    | Agreed
    | TargetOpened
    | OpenRefused
    | Granted
    | BeginRefused
    | PutEnded
    | SealedThere
    | SealRefused
    | PeerLost
    | PeerBack
    | Tick
)
Effect = OpenTarget | Begin | Put | Seal | Abort | Hold | Release | Note
