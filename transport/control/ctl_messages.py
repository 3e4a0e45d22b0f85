"""What `ckptctl` and a daemon say to each other."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ckptd.transport.control.message_parts import (
    Count,
    Name,
    Rank,
    ReplayFailure,
    ShortText,
)

__all__ = [
    "AdmitNodes",
    "Drill",
    "DrillReport",
    "DurableRank",
    "DurableStatus",
    "EventInfo",
    "Events",
    "Forget",
    "GetEvents",
    "GetPeers",
    "GetSnapshots",
    "GetStatus",
    "HostedReplica",
    "Park",
    "Parks",
    "PeerStatus",
    "Peers",
    "RankParked",
    "RankSnapshots",
    "ReplicationStatus",
    "RunFailures",
    "SegmentStatus",
    "SessionStatus",
    "SlotInfo",
    "Snapshots",
    "Status",
    "StepAside",
    "TargetStatus",
    "Unquarantine",
]

# -- ckptctl -> daemon ---------------------------------------------------------------------------


class GetStatus(Struct, frozen=True, tag=True):
    """Ask for everything `ckptctl status` shows."""


class GetSnapshots(Struct, frozen=True, tag=True):
    """Ask for the slot tables; empty `job` or `run` and rank -1 mean all.

    `operators` adds the operator names of each rank (large for many experts).
    """

    job: ShortText = ""
    run: ShortText = ""
    rank: Annotated[int, Meta(ge=-1, lt=1 << 24)] = -1
    operators: bool = False


class GetEvents(Struct, frozen=True, tag=True):
    """Ask for events with a sequence number above `since`, oldest first, at most `limit`."""

    since: Count = 0
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 1000


class Forget(Struct, frozen=True, tag=True):
    """Free the memory of a run that no trainer owns."""

    job: Name
    run: Name


class Unquarantine(Struct, frozen=True, tag=True):
    """Take back what was concluded of this run's replays: what they had quarantined here can be
    recovered again.
    """

    job: Name
    run: Name


class StepAside(Struct, frozen=True, tag=True):
    """Make way for a daemon that an operator starts: end in order, and leave the memory. Refused by
    all but those that trainers started.
    """


class AdmitNodes(Struct, frozen=True, tag=True):
    """Let nodes act on a run for an hour: long enough for their ranks to join it."""

    job: Name
    run: Name
    nodes: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=1 << 16)]


class Park(Struct, frozen=True, tag=True):
    """Have the attached trainers of a job, or of one run of it, park; empty names mean all.
    Answered after `wait_s` at the latest.
    """

    job: ShortText = ""
    run: ShortText = ""
    wait_s: Annotated[float, Meta(ge=0, le=3600)] = 60.0


class GetPeers(Struct, frozen=True, tag=True):
    """Ask for everything `ckptctl peers` shows."""


class Drill(Struct, frozen=True, tag=True):
    """Rehearse: bring what a recovery of this rank would need here, from other nodes than its own,
    verify it, and drop it.
    """

    job: Name
    run: Name
    rank: Rank


# -- daemon -> ckptctl ---------------------------------------------------------------------------


class SegmentStatus(Struct, frozen=True, tag=True):
    """One segment as the daemon sees it."""

    job: str
    run: str
    rank: int
    world_size: int
    generation: int
    path: str
    total_bytes: int
    slot_bytes: int
    num_slots: int
    states: dict[str, int]  # slot state -> number of slots
    newest_iteration: int  # -1: none
    window: int
    num_operators: int
    owned: bool  # a live process holds the owner lock
    mlocked: bool
    detached_s: float  # for how long no trainer has owned it; 0 while owned
    node_id: str
    created_at_ns: int
    kind: str = "snapshots"  # or "log": a boundary log; or "parked"


class SessionStatus(Struct, frozen=True, tag=True):
    """One attached trainer."""

    job: str
    run: str
    rank: int
    world_size: int
    pid: int
    step: int
    metrics: dict[str, float]
    segments: int
    segment_bytes: int
    promised_bytes: int
    attached_s: float
    watched_by: str  # "pidfd" or "owner-lock"


class DurableRank(Struct, frozen=True, tag=True):
    """How far a local rank's snapshots are on their way to storage (iterations: -1 is none yet)."""

    job: str
    run: str
    rank: int
    committed: int
    lag_iterations: int  # how far the newest snapshot in memory is ahead of it
    under_way: int
    stored: int  # snapshots of the checkpoint that is under way, which are in storage
    of: int
    stride: int  # its multiples are stored
    skipped: int
    abandoned: int
    uploaded_bytes: int
    last_s: float  # how long the last checkpoint took
    reason: str  # why the last one was abandoned; "" after one that was stored


class DurableStatus(Struct, frozen=True, tag=True):
    """What goes to storage. ``url`` is without user and password; ``keeper_pid`` is 0 while no
    store keeper runs.
    """

    url: str
    keeper_pid: int
    uploaded_bytes: int
    spared_bytes: int  # in storage already, and not uploaded again
    ranks: tuple[DurableRank, ...] = ()


class Status(Struct, frozen=True, tag=True):
    """What `ckptctl status` shows."""

    version: str
    node_id: str
    boot_id: str
    pid: int
    uptime_s: float
    endpoint: str
    runtime_dir: str
    segment_dir: str
    quota_bytes: int
    used_bytes: int
    promised_bytes: int
    fs_total_bytes: int
    fs_available_bytes: int
    rss_anon_bytes: int  # the daemon's own memory
    rss_file_bytes: int  # libraries
    rss_shmem_bytes: int  # segment pages mapped at this moment; shared, counted once by the kernel
    seal_queue: int
    sessions: tuple[SessionStatus, ...]
    segments: tuple[SegmentStatus, ...]
    counters: dict[str, int]
    durable: DurableStatus | None = None  # None where no store is configured


class SlotInfo(Struct, frozen=True, tag=True):
    """One slot's header, with the anchors of its image (little-endian bitmap over operators)."""

    generation: int
    slot: int
    state: str
    iteration: int
    previous: int
    sequence: int
    image_len: int
    phase: int
    filled_at_ns: int
    sealed_at_ns: int
    digest_ns: int
    writer_pid: int
    anchors: bytes


class RankSnapshots(Struct, frozen=True, tag=True):
    """The slots of one rank (over all its generations) and what can be recovered from them."""

    job: str
    run: str
    rank: int
    world_size: int
    window: int
    num_operators: int
    slots: tuple[SlotInfo, ...]
    suffix: tuple[int, int]  # first and last iteration of the recoverable suffix; (-1, -1): none
    reason: str
    operators: tuple[str, ...] = ()
    log: tuple[SlotInfo, ...] = ()  # the slots of its boundary log
    parked: tuple[SlotInfo, ...] = ()  # the slots of its parked states
    # The snapshot from which a replay computes what the suffix begins with; -1: there is none.
    before: int = -1


class RankParked(Struct, frozen=True, tag=True):
    """At which iteration a rank is parked; -1: it is not, and why."""

    job: str
    run: str
    rank: int
    iteration: int
    reason: str = ""


class Parks(Struct, frozen=True, tag=True):
    """What came of `Park`, for every trainer that was asked."""

    ranks: tuple[RankParked, ...]


class RunFailures(Struct, frozen=True, tag=True):
    """The replays of a run that did not reproduce what was recorded."""

    job: str
    run: str
    failures: tuple[ReplayFailure, ...]


class Snapshots(Struct, frozen=True, tag=True):
    """What `ckptctl snapshots` shows."""

    ranks: tuple[RankSnapshots, ...]
    replays: tuple[RunFailures, ...] = ()


class TargetStatus(Struct, frozen=True, tag=True):
    """One target of a rank's replication. ``current_up_to`` is the end of its newest complete
    suffix (-1: none).
    """

    node: str
    phase: str
    alive: bool
    counted: bool  # whether the floor waits for it
    held: int
    current_up_to: int
    lag_iterations: int
    lag_bytes: int
    reason: str


class ReplicationStatus(Struct, frozen=True, tag=True):
    """One local rank's replication, and the floor of its run (-1: none yet)."""

    job: str
    run: str
    rank: int
    epoch: int
    floor: int
    targets: tuple[TargetStatus, ...]
    kind: ShortText = "snapshots"  # or its boundary log


class PeerStatus(Struct, frozen=True, tag=True):
    """One other node."""

    node: str
    endpoint: str
    labels: dict[str, str]
    alive: bool
    silent_s: float
    free_bytes: int


class HostedReplica(Struct, frozen=True, tag=True):
    """One replica that lies here."""

    name: str
    job: str
    run: str
    rank: int
    total_bytes: int
    sealed: int
    newest_iteration: int
    kind: ShortText = "snapshots"


class Peers(Struct, frozen=True, tag=True):
    """What `ckptctl peers` shows. ``endpoint`` is "" where this daemon has no peer listener.

    ``encryption`` is what snapshots are encrypted with between nodes, "plaintext" if with nothing.
    """

    node: str
    endpoint: str
    public_key: str
    peers: tuple[PeerStatus, ...]
    ranks: tuple[ReplicationStatus, ...]
    replicas: tuple[HostedReplica, ...]
    counters: dict[str, int]
    encryption: str = ""


class DrillReport(Struct, frozen=True, tag=True):
    """How a drill went. ``compared`` counts bytes that were also compared with the primary, where
    that lies on this node.
    """

    recoverable: bool
    reason: str
    start: int = -1
    end: int = -1
    seconds: float = 0.0
    bytes: int = 0
    compared: int = 0
    by_node: dict[str, int] = {}


class EventInfo(Struct, frozen=True, tag=True):
    """One thing that happened; `seq` grows by one with each."""

    seq: int
    time_ns: int
    level: str
    kind: str
    message: str
    job: str = ""
    run: str = ""
    rank: int = -1


class Events(Struct, frozen=True, tag=True):
    """A page of events; `first_seq` is the oldest one still kept."""

    events: tuple[EventInfo, ...]
    first_seq: int
    last_seq: int
