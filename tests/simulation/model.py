"""What there is in the simulated cluster: machines, daemons, segments, and what a snapshot's content is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ckptd.core.placement import ReplicaPlacement
from ckptd.core.replication.floor import NOTHING_CARRIED, Carried, FloorTree
from ckptd.core.replication.known_runs import KnownRuns
from ckptd.core.replication.replicas import Promise
from ckptd.core.replication.replicator import Replicator
from ckptd.core.replication.target import ReplicationConfig
from ckptd.core.slots.slots import SlotRecord, SlotState, SnapshotKey, check_transition

__all__ = [
    "DEADLINE_S",
    "FAN_OUT",
    "JOB",
    "LEASE_IDLE_S",
    "NO_PLACEMENT",
    "REPLICATION",
    "SLACK",
    "STEP_S",
    "TICKET_S",
    "TICK_S",
    "TORN",
    "Announced",
    "Content",
    "Daemon",
    "DaemonDied",
    "Hint",
    "Holder",
    "Lease",
    "Node",
    "Record",
    "Rotten",
    "RunSide",
    "Segment",
    "Sender",
    "Slot",
    "State",
    "Ticket",
    "Tip",
    "Trainer",
    "Transfer",
    "Vouched",
    "WorldConfig",
    "digest_of",
    "in_state",
]

SLACK = 2
DEADLINE_S = 4.0
TICKET_S = 5.0
LEASE_IDLE_S = 8.0
STEP_S = 1.0
TICK_S = 1.0
FAN_OUT = 2  # so that a handful of nodes is a tree of some depth
TORN = ("torn",)
JOB = ("job", "run")
REPLICATION = ReplicationConfig(answer_s=2.0, retry_max_s=2.0, quota_s=1.0, quota_max_s=2.0)
NO_PROMISE = Promise()
NO_PLACEMENT = ReplicaPlacement({}, {}, (), "nobody has joined yet")

Content = tuple[object, ...]
State = tuple[int, int]  # the state of the model after an iteration of an epoch


def in_state(record: SlotRecord, state: SlotState) -> SlotRecord:
    """As `dataclasses.replace`, in a third of its time: most headers that are written differ in this only."""
    return SlotRecord(
        record.generation,
        record.index,
        state,
        record.iteration,
        record.previous,
        record.sequence,
        record.image_len,
        record.layout_id,
        record.anchors,
        record.phase,
        record.epoch,
        record.epoch_start,
        record.header_digest,
        record.audited,
    )


def digest_of(content: Content) -> bytes:
    return hashlib.blake2b(repr(content).encode(), digest_size=16).digest()


class Rotten(tuple[object, ...]):
    """A content of which bits have flipped since it was sealed; nobody knows until its digest is made."""


@dataclass(frozen=True, slots=True)
class WorldConfig:
    """What a seed is played with; the defaults are what the tests play."""

    chaos_s: float = 25.0
    quiet_s: float = 15.0
    carries: bool = True
    "False: a new epoch, and a restarted root, know nothing of a floor (and span) of before."
    withholds: bool = True
    "False: a primary vouches by itself while its target is away."
    reads_anew: bool = True
    "False: a primary vouches for what its slots were told to hold last, not for what they hold now."
    keeps_tip: bool = True
    "False: what the last recovery went back to is no more to a primary than what the floor may be next."
    counts_span: bool = True
    "False: what was counted with a shorter span than the run's counts, too."
    among: frozenset[str] | None = None
    "The kinds of faults that a seed of `tests.simulation.swarm` has; None: a random subset of all."
    faults: frozenset[str] | None = None
    "Of these kinds, those that are left; None: all. What is left happens as with all."
    strikes: frozenset[int] | None = None
    "The numbers of the strikes that happen; None: all."
    most_nodes: int = 6


class DaemonDied(Exception):
    """A daemon ended in the middle of what it was doing."""


@dataclass(slots=True, eq=False)
class Slot:
    """One slot of a segment: its header and its bytes, which are not as they were sealed if ``rotten``."""

    record: SlotRecord
    content: Content = TORN
    readers: int = 0

    @property
    def rotten(self) -> bool:
        """Whether bits of a sealed slot have changed."""
        return isinstance(self.content, Rotten)


class Hint(NamedTuple):
    """What the daemon wrote beside a primary's slots: see `ckptd.core.slots.segment_format.RingHint`."""

    floor: int = -1
    horizon: int = -1
    span: int = 0
    epoch: int = 0
    aim: int = -1


NO_HINT = Hint()


@dataclass(slots=True, eq=False)
class Segment:
    """A segment file; a replica's ``primary`` is the name of what it is a copy of."""

    name: str
    rank: int
    own: bool
    primary: str
    generation: int
    slots: list[Slot]
    num_operators: int
    hint: Hint = NO_HINT
    _records: tuple[SlotRecord, ...] | None = None  # None: a header was written since
    _sealed: tuple[SlotRecord, ...] = ()
    _sealed_of: tuple[SlotRecord, ...] | None = None
    _numbered: tuple[SlotRecord, ...] = ()
    _numbered_of: tuple[SlotRecord, ...] | None = None
    _number: int = -1

    @property
    def records(self) -> tuple[SlotRecord, ...]:
        """The same object until a header is written, so that who has it sees at once that nothing changed."""
        if self._records is None:
            self._records = tuple([slot.record for slot in self.slots])
        return self._records

    @property
    def sealed(self) -> tuple[SlotRecord, ...]:
        """Those that a recovery may use; also the same object until one of these is another."""
        records = self.records
        if self._sealed_of is not records:
            sealed = tuple([record for record in records if record.state is SlotState.SEALED])
            self._sealed = self._sealed if sealed == self._sealed else sealed
            self._sealed_of = records
        return self._sealed

    def numbered(self, number: int) -> tuple[SlotRecord, ...]:
        """The headers with this number in place of their generation."""
        records = self.records
        if self._numbered_of is not records or self._number != number:
            self._numbered = tuple(
                [r if r.generation == number else replace(r, generation=number) for r in records]
            )
            self._numbered_of, self._number = records, number
        return self._numbered

    def write(self, index: int, record: SlotRecord) -> None:
        """The header of a slot: nobody else writes one."""
        self.slots[index].record = record
        self._records = None

    def move(self, index: int, state: SlotState, **header: object) -> None:
        before = self.slots[index].record
        check_transition(before.state, state)
        if header:
            self.write(index, replace(before, state=state, **header))  # type: ignore[arg-type]
        else:
            self.write(index, in_state(before, state))


@dataclass(slots=True, eq=False)
class Lease:
    """A replica that one boot of a peer has open."""

    peer: str
    boot: int
    segment: Segment
    used_s: float


@dataclass(slots=True, eq=False)
class Ticket:
    """A granted slot; it dies with its daemon, its peer, or the deadline."""

    peer: str
    boot: int
    segment: Segment
    index: int
    lease: int
    record: SlotRecord


@dataclass(slots=True, eq=False)
class Transfer:
    """A put of a sender."""

    key: SnapshotKey
    node: str
    over: bool = False


@dataclass(slots=True, eq=False)
class Sender:
    """The replication of one rank in one epoch: what `ckptd.peers.sender` has around the core."""

    core: Replicator
    leases: dict[tuple[str, int], int] = field(default_factory=dict)
    lives: dict[str, int] = field(default_factory=dict)  # of a target's machine, by boot of its daemon
    holds: dict[SnapshotKey, Slot] = field(default_factory=dict)
    puts: dict[str, Transfer] = field(default_factory=dict)
    granted: set[tuple[str, int]] = field(default_factory=set)
    woken_s: float = -1.0
    closed: bool = False


@dataclass(slots=True, eq=False)
class RunSide:
    """The run as one daemon sees it: the state of `ckptd.peers.runs.Run`."""

    epoch: int = -1
    epoch_start: int = -1
    members: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    senders: dict[int, Sender] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    placement: ReplicaPlacement = NO_PLACEMENT
    promise: Promise = NO_PROMISE
    carried: Carried = NOTHING_CARRIED
    span: int = 1
    tree: FloorTree | None = None
    agreeing: bool = False

    @property
    def members_id(self) -> str:
        return "" if self.tree is None else f"{self.epoch}/{self.tree.members_id}"


@dataclass(slots=True, eq=False)
class Daemon:
    """What one start of a daemon has in its memory."""

    boot: int
    known: KnownRuns
    run: RunSide = field(default_factory=RunSide)
    leases: dict[int, Lease] = field(default_factory=dict)
    tickets: dict[int, Ticket] = field(default_factory=dict)
    peers: dict[str, int] = field(default_factory=dict)  # node: the boot that was heard of last
    lost: set[str] = field(default_factory=set)
    trees: int = 0  # how many it has planted

    @classmethod
    def start(cls, boot: int) -> Daemon:
        run = RunSide()
        return cls(boot, KnownRuns(lambda job, name: (run.epoch, run.promise, run.span)), run)


@dataclass(slots=True)
class Record:
    """What a machine knows of the run over the lives of its daemon: `ckptd.peers.run_records`, in short."""

    epochs: dict[int, tuple[int, int]] = field(default_factory=dict)  # its start, and which it follows
    names: set[str] = field(default_factory=set)  # who takes part, or did
    lost: bool = False  # its file was damaged, so what it knew is not known

    def learn(self, epoch: int, start: int, follows: int = -1) -> None:
        known_start, known_follows = self.epochs.get(epoch, (start, follows))
        self.epochs[epoch] = min(start, known_start), max(follows, known_follows)


@dataclass(slots=True, eq=False)
class Node:
    """A machine. Its segments survive its daemon, and so does its record."""

    name: str
    labels: Mapping[str, str]
    capacity: int | None = None
    up: bool = True
    life: int = 0
    daemon: Daemon | None = None
    segments: dict[str, Segment] = field(default_factory=dict)
    record: Record = field(default_factory=Record)
    damaged: list[tuple[int, int, int]] = field(default_factory=list)  # at rest: life, rank, iteration
    delay_s: float = 0.1
    full: bool = False
    corrupts: bool = False
    clock_s: float = 0.0  # what its clock shows at the start
    drift: float = 0.0  # by which share its clock runs fast
    frozen_s: float = 0.0  # its daemon is stopped until then
    halted_s: float = 0.0  # its trainers are
    few_files: bool = False  # its daemon finds no descriptor
    no_space: bool = False  # its tmpfs is full
    tears: bool = False  # its daemon dies between two stores of a hint
    tears_late: bool = False  # of the first one of the next epoch


@dataclass(slots=True, eq=False)
class Trainer:
    """One rank's process: what `ckptd.client` remembers from step to step."""

    window: int
    num_slots: int
    previous: int = -1
    sequence: int = 0
    coming: int = 0  # slots of the generation that was asked for
    retry_at: int = 0
    free_s: float = 0.0  # when the boundary before is over
    due: list[State] = field(default_factory=list)  # boundaries that it has not come to, in their order


class Holder(NamedTuple):
    """A promised copy: of which machine, in which of its lives, and whether it is the primary."""

    node: str
    life: int
    own: bool


class Tip(NamedTuple):
    """The iteration from which the last recovery went on, and the machines of its ranks."""

    end: int
    homes: tuple[Holder, ...]


class Vouched(NamedTuple):
    """What a rank told the tree at some time, and in whose name."""

    epoch: int
    first: int
    last: int
    holders: tuple[Holder, ...]
    alone: str = ""  # why no other node could hold it


@dataclass(slots=True)
class Announced:
    """A floor, and by rank who vouched for it last."""

    floor: int
    holders: dict[int, tuple[Holder, ...]]
    alone: dict[int, str] = field(default_factory=dict)  # by rank: why no other node could hold it
