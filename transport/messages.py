"""The words that trainer, daemon and `ckptctl` exchange: closed, typed, validated on both sides.

Every message is a frozen tagged struct. A `Request` is answered by exactly one `Reply`, or by
`Refused`; a `OneWay` is answered only if it cannot be served, and then by `Refused`. Control
messages carry descriptions (a path, a slot number), never tensor bytes.

`PROTOCOL_VERSION` grows when the meaning or the shape of any message changes. It travels in the
envelope (`ckptd.transport.wire`), so that a peer of another version is refused by name and not
by a parse error.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

__all__ = [
    "PROTOCOL_VERSION",
    "Attach",
    "Attached",
    "Detach",
    "Done",
    "Drill",
    "DrillReport",
    "Drop",
    "EventInfo",
    "Events",
    "Fetch",
    "FetchPiece",
    "FetchSource",
    "FetchState",
    "Filled",
    "Forget",
    "GetEvents",
    "GetFetch",
    "GetHoldings",
    "GetPeers",
    "GetSnapshots",
    "GetStatus",
    "HeldSegment",
    "HeldSlot",
    "Hello",
    "Holdings",
    "HostedReplica",
    "Join",
    "Member",
    "Message",
    "NodeCard",
    "Notice",
    "OneWay",
    "PeerStatus",
    "Peers",
    "Ping",
    "Pong",
    "RankSnapshots",
    "RefusalCode",
    "Refused",
    "ReplicationStatus",
    "Reply",
    "Report",
    "Request",
    "Reserve",
    "Reserved",
    "RunSeen",
    "SeeRun",
    "SegmentInfo",
    "SegmentStatus",
    "SessionStatus",
    "SlotInfo",
    "Snapshots",
    "Status",
    "TargetStatus",
    "Welcome",
]

PROTOCOL_VERSION = 2

Name = Annotated[str, Meta(pattern=r"^(?!\.\.?\Z)[A-Za-z0-9._-]{1,64}\Z")]
Rank = Annotated[int, Meta(ge=0, lt=1 << 24)]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Generation = Annotated[int, Meta(ge=0, lt=1 << 31)]
SlotIndex = Annotated[int, Meta(ge=0, lt=1 << 16)]
NumSlots = Annotated[int, Meta(ge=1, le=1 << 16)]
Iteration = Annotated[int, Meta(ge=-1, lt=1 << 62)]
Text = Annotated[str, Meta(max_length=4096)]
ShortText = Annotated[str, Meta(max_length=256)]
Metrics = Annotated[dict[ShortText, float], Meta(max_length=256)]
Blob = Annotated[bytes, Meta(max_length=16 << 20)]


class RefusalCode(StrEnum):
    """Why the daemon says no. `Refused.code` is one of these words."""

    PROTOCOL = "protocol"  # another protocol version
    BAD_MESSAGE = "bad_message"  # not one of ours, or its values are out of range
    NO_SESSION = "no_session"  # attach first (the daemon was restarted, or never knew you)
    RANK_TAKEN = "rank_taken"  # a live process owns this rank
    TOPOLOGY = "topology"  # same job, run and rank, but another world size or topology
    LAYOUT_VERSION = "layout_version"  # the segments were written by another client layout
    QUOTA = "quota"  # the daemon's memory quota is too small
    SEGMENT_FS = "segment_fs"  # the filesystem under the segments is too small
    BAD_DESCRIPTOR = "bad_descriptor"  # a segment descriptor that contradicts the session
    NOT_FOUND = "not_found"  # no such job, run or generation
    IN_USE = "in_use"  # a live trainer still owns it
    CLOSING = "closing"  # the daemon is shutting down
    INTERNAL = "internal"  # a bug of ours; the daemon's log has the traceback


HeaderBytes = Annotated[bytes, Meta(min_length=112, max_length=112)]
Labels = Annotated[dict[ShortText, ShortText], Meta(max_length=32)]


class NodeCard(Struct, frozen=True, tag=True):
    """How peers reach a node. ``endpoint`` is "" where its daemon has no peer listener; ``public_key`` is Z85 or ""."""

    node: Name
    endpoint: Text = ""
    public_key: ShortText = ""
    labels: Labels = {}
    boot_id: ShortText = ""


class Member(Struct, frozen=True, tag=True):
    """One node of a run and the ranks that live on it, with the bytes of each rank's ring."""

    card: NodeCard
    ranks: tuple[Rank, ...]
    ring_bytes: tuple[Count, ...] = ()


class HeldSlot(Struct, frozen=True, tag=True):
    """One sealed snapshot: where it lies, its header, and which operators it anchors (bitmap, little-endian)."""

    slot: SlotIndex
    header: HeaderBytes
    anchors: Blob


class HeldSegment(Struct, frozen=True, tag=True):
    """A segment of one rank. ``own`` is false for a replica; ``origin`` names the primary that it copies (or is)."""

    name: ShortText
    rank: Rank
    own: bool
    origin: ShortText
    generation: Generation
    world_size: int
    window: int
    num_operators: Count
    operators_id: ShortText
    slot_bytes: Count
    num_slots: NumSlots
    slots: tuple[HeldSlot, ...]


class SegmentInfo(Struct, frozen=True, tag=True):
    """One segment file that the trainer may map."""

    path: Text
    generation: Generation
    slot_bytes: Count
    num_slots: NumSlots


# -- trainer -> daemon ---------------------------------------------------------------------------


class Hello(Struct, frozen=True, tag=True):
    """First words of a connection: software version, process id, and what one is.

    `pid_namespace` is the target of the link /proc/self/ns/pid. With another one than the
    daemon's the pid means nothing there, and the trainer is watched by its owner lock.
    """

    version: ShortText
    pid: Annotated[int, Meta(ge=1, lt=1 << 31)]
    role: ShortText = "trainer"
    pid_namespace: ShortText = ""


class Attach(Struct, frozen=True, tag=True):
    """Ask to own one rank of a run.

    `needed_bytes` is all the segment memory the rank expects to hold and `needed_text` says how
    that sum comes about ("34 slots of 1.2 GiB"); `held` lists the generations whose owner lock
    the asking process already holds, as it does when the daemon was restarted under it.
    """

    job: Name
    run: Name
    rank: Rank
    world_size: Annotated[int, Meta(ge=1, lt=1 << 24)]
    topology: Text
    layout_version: Annotated[int, Meta(ge=0, lt=1 << 31)]
    needed_bytes: Count
    needed_text: Text = ""
    held: Annotated[tuple[Generation, ...], Meta(max_length=4096)] = ()


class Reserve(Struct, frozen=True, tag=True):
    """Ask for the next generation: `num_slots` slots of `slot_bytes`, ready to be mapped.

    `descriptor` is the msgpack of a `ckptd.segment_format.SegmentDescriptor`; the daemon checks
    its identity against the session and fills in generation, node id and creation time.
    """

    slot_bytes: Annotated[int, Meta(ge=1, lt=1 << 62)]
    num_slots: NumSlots
    descriptor: Blob


class Filled(Struct, frozen=True, tag=True):
    """A slot is filled; the daemon may digest and seal it."""

    generation: Generation
    slot: SlotIndex
    iteration: Iteration


class Drop(Struct, frozen=True, tag=True):
    """The trainer no longer needs this generation."""

    generation: Generation


class Report(Struct, frozen=True, tag=True):
    """The trainer's own counters, shown by `ckptctl status`."""

    step: Iteration
    metrics: Metrics


class Notice(Struct, frozen=True, tag=True):
    """Something worth keeping in the daemon's event log; level is info, warning or error."""

    level: Annotated[str, Meta(pattern="^(info|warning|error)$")]
    kind: ShortText
    message: Text


class Detach(Struct, frozen=True, tag=True):
    """Orderly end of a session; `final` says that the run is over and its memory may be freed."""

    final: bool = False


class Ping(Struct, frozen=True, tag=True):
    """Are you there, and do you still know me?"""


class GetHoldings(Struct, frozen=True, tag=True):
    """What does this node hold of a run, its own ranks' and others'? (Between daemons.)"""

    job: Name
    run: Name


class SeeRun(Struct, frozen=True, tag=True):
    """What is held of a run, here and on the nodes that took part in it before and are not among ``known``?"""

    job: Name
    run: Name
    known: Annotated[tuple[Name, ...], Meta(max_length=1 << 20)] = ()


class Join(Struct, frozen=True, tag=True):
    """Who takes part in the run that this session's rank is of; the same from every rank.

    ``epoch`` counts the recoveries of the run; its history goes back to ``epoch_start`` and no further into older ones
    (-1: to nothing). ``replicas`` is how many copies the trainer asks for; -1 leaves it to the daemon's configuration.
    """

    epoch: Count
    epoch_start: Iteration
    members: Annotated[tuple[Member, ...], Meta(max_length=1 << 20)]
    replicas: Annotated[int, Meta(ge=-1, le=64)] = -1


class FetchSource(Struct, frozen=True, tag=True):
    """Who holds a snapshot, and where."""

    node: Name
    segment: ShortText
    slot: SlotIndex


class FetchPiece(Struct, frozen=True, tag=True):
    """One snapshot to bring here, and its holders, the preferred one first."""

    header: HeaderBytes
    sources: Annotated[tuple[FetchSource, ...], Meta(min_length=1, max_length=256)]


class Fetch(Struct, frozen=True, tag=True):
    """Bring these snapshots of the session's rank here, into a new generation: piece i into slot i, in this order.

    Answered by `Reserved` as soon as the segment is there; each slot is sealed when its image is complete and verified.
    """

    pieces: Annotated[tuple[FetchPiece, ...], Meta(min_length=1, max_length=1 << 16)]
    cards: Annotated[tuple[NodeCard, ...], Meta(max_length=1 << 20)] = ()


class GetFetch(Struct, frozen=True, tag=True):
    """How far is the fetch into this generation?"""

    generation: Generation


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


class GetPeers(Struct, frozen=True, tag=True):
    """Ask for everything `ckptctl peers` shows."""


class Drill(Struct, frozen=True, tag=True):
    """Rehearse: bring what a recovery of this rank would need here, from other nodes than its own, verify it, and drop it."""

    job: Name
    run: Name
    rank: Rank


# -- daemon -> trainer ---------------------------------------------------------------------------


class Welcome(Struct, frozen=True, tag=True):
    """Who answers. `boot_id` is new at every start of the daemon."""

    version: str
    node_id: str
    pid: int
    segment_dir: str
    boot_id: str = ""
    card: NodeCard | None = None


class Holdings(Struct, frozen=True, tag=True):
    """Everything sealed that this node holds of a run."""

    node: Name
    segments: tuple[HeldSegment, ...]


class RunSeen(Struct, frozen=True, tag=True):
    """The holdings of this node and of others that answered in time, with how to reach these others."""

    holdings: tuple[Holdings, ...]
    cards: tuple[NodeCard, ...]
    members: tuple[Member, ...] = ()  # of the run, as far as this daemon was told


class FetchState(Struct, frozen=True, tag=True):
    """``state`` is running, done or failed (``reason`` says why); bytes per node they came from."""

    state: str
    reason: str
    pieces_done: int
    bytes_done: int
    bytes_total: int
    by_node: dict[str, int]


class Attached(Struct, frozen=True, tag=True):
    """The rank is yours: its segments, oldest generation first, and the memory left for it.

    ``replication_slack``: slots that its ring should have beyond what one node needs.
    """

    segments: tuple[SegmentInfo, ...]
    quota_bytes: int
    available_bytes: int
    replication_slack: int = 0


class Reserved(Struct, frozen=True, tag=True):
    """The new generation, pre-touched; `mlocked` says whether it is also locked in memory."""

    segment: SegmentInfo
    mlocked: bool = False


class Done(Struct, frozen=True, tag=True):
    """It is done; `message` says what was done where that is not obvious."""

    message: str = ""


class Pong(Struct, frozen=True, tag=True):
    """I am here. `attached` is false when this connection has no session (attach again)."""

    boot_id: str
    attached: bool


class Refused(Struct, frozen=True, tag=True):
    """No, and why, and what to do about it."""

    code: str
    message: str
    hint: str = ""


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


class Snapshots(Struct, frozen=True, tag=True):
    """What `ckptctl snapshots` shows."""

    ranks: tuple[RankSnapshots, ...]


class TargetStatus(Struct, frozen=True, tag=True):
    """One target of a rank's replication. ``current_up_to`` is the end of its newest complete suffix (-1: none)."""

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


class Peers(Struct, frozen=True, tag=True):
    """What `ckptctl peers` shows. ``endpoint`` is "" where this daemon has no peer listener."""

    node: str
    endpoint: str
    public_key: str
    peers: tuple[PeerStatus, ...]
    ranks: tuple[ReplicationStatus, ...]
    replicas: tuple[HostedReplica, ...]
    counters: dict[str, int]


class DrillReport(Struct, frozen=True, tag=True):
    """How a drill went. ``compared`` counts bytes that were also compared with the primary, where that lies on this node."""

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


Request = (
    Hello
    | Attach
    | Reserve
    | Drop
    | Detach
    | Ping
    | SeeRun
    | GetPeers
    | Drill
    | Join
    | Fetch
    | GetFetch
    | GetStatus
    | GetSnapshots
    | GetEvents
    | Forget
)
OneWay = Filled | Report | Notice
Reply = (
    Welcome
    | Attached
    | Reserved
    | Done
    | Pong
    | Refused
    | RunSeen
    | Peers
    | DrillReport
    | FetchState
    | Status
    | Snapshots
    | Events
)
Message = Request | OneWay | Reply
