"""What happens to a rank's replication and what it wants done: the events and effects of
`ckptd.core.replication.replicator`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptd.core.slots.ring import SlotRecord
from ckptd.core.slots.snapshot_events import (
    Hold,
    Joined,
    Note,
    Release,
    SnapshotKey,
    Tick,
)

__all__ = [
    "Abort",
    "Agreed",
    "Begin",
    "BeginRefused",
    "Effect",
    "Event",
    "Granted",
    "OpenRefused",
    "OpenTarget",
    "PeerBack",
    "PeerLost",
    "Put",
    "PutEnded",
    "Seal",
    "SealRefused",
    "SealedThere",
    "Slots",
    "TargetOpened",
    "Targets",
]


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
