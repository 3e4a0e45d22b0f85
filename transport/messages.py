"""The messages between trainers, daemons and ``ckptctl``: closed, typed, validated on both sides.

Every message is a frozen tagged struct. A `Request` is answered by exactly one `Reply` (`Refused` is one). A
`OneWay` is answered only if it cannot be served, by `Refused`. Messages carry descriptions (a path, a slot
number), never tensor bytes. Import the module as ``m``.

`PROTOCOL_VERSION` grows when the meaning or the shape of any message changes. It travels in the envelope
(`ckptd.transport.wire`), so a peer of another version is refused by its number and not by a parse error.
Messages between daemons are in `ckptd.transport.peer_messages`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

PROTOCOL_VERSION = 3

# -- Fields, and structs that several messages share ---------------------------------------------

Name = Annotated[str, Meta(pattern=r"^(?!\.\.?\Z)[A-Za-z0-9._-]{1,64}\Z")]
Rank = Annotated[int, Meta(ge=0, lt=1 << 24)]
WorldSize = Annotated[int, Meta(ge=1, lt=1 << 24)]
Window = Annotated[int, Meta(ge=1, le=1 << 15)]
NumOperators = Annotated[int, Meta(ge=0, le=1 << 20)]  # bitmaps over operators have this width
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Generation = Annotated[int, Meta(ge=0, lt=1 << 31)]
SlotIndex = Annotated[int, Meta(ge=0, lt=1 << 16)]
NumSlots = Annotated[int, Meta(ge=1, le=1 << 16)]
Epoch = Annotated[int, Meta(ge=0, lt=1 << 32)]
KnownEpoch = Annotated[int, Meta(ge=-1, lt=1 << 32)]  # -1: none is known
Iteration = Annotated[int, Meta(ge=-1, lt=1 << 62)]
Text = Annotated[str, Meta(max_length=4096)]
ShortText = Annotated[str, Meta(max_length=256)]
Metrics = Annotated[dict[ShortText, float], Meta(max_length=256)]
Blob = Annotated[bytes, Meta(max_length=16 << 20)]
HeaderBytes = Annotated[bytes, Meta(min_length=112, max_length=112)]
ImageDigest = Annotated[str, Meta(pattern=r"^(blake3|sha256):[0-9a-f]{64}\Z")]
KnownImageDigest = Annotated[str, Meta(pattern=r"^((blake3|sha256):[0-9a-f]{64})?\Z")]  # "": none is known
Labels = Annotated[dict[ShortText, ShortText], Meta(max_length=32)]


class RefusalCode(StrEnum):
    """Why the daemon refuses; the values of `Refused.code`."""

    PROTOCOL = "protocol"  # another protocol version
    BAD_MESSAGE = "bad_message"  # not one of ours, or its values are out of range
    NO_SESSION = "no_session"  # attach first (the daemon was restarted, or has never seen this connection)
    RANK_TAKEN = "rank_taken"  # a live process owns this rank
    TOPOLOGY = "topology"  # same job, run and rank, but another world size or topology
    LAYOUT_VERSION = "layout_version"  # the segments were written by another client layout
    QUOTA = "quota"  # the daemon's memory quota is too small
    USER_QUOTA = "user_quota"  # the memory quota of the job's user is too small
    NOT_MEMBER = "not_member"  # the user of the process is not in the daemon's trainer_group
    FOREIGN = "foreign"  # another user's job, or no user's
    SEGMENT_FS = "segment_fs"  # the filesystem under the segments is too small
    BAD_DESCRIPTOR = "bad_descriptor"  # a segment descriptor that contradicts the session
    NOT_FOUND = "not_found"  # no such job, run or generation
    IN_USE = "in_use"  # a live trainer still owns it
    DAEMON_DIFFERS = "daemon_differs"  # its settings are not those that the trainer expects
    STALE_EPOCH = "stale_epoch"  # the run has been recovered again since
    NOT_READY = "not_ready"  # the memory cannot be read yet: ask again
    BUSY = "busy"  # too many requests of this peer in progress: try again
    CLOSING = "closing"  # the daemon is shutting down
    INTERNAL = "internal"  # a bug of ours; the daemon's log has the traceback


class NodeCard(Struct, frozen=True, tag=True):
    """How peers reach a node, and its memory quota (0: unknown).

    ``endpoint`` is "" if the daemon has no peer listener; ``public_key`` is Z85, or "".
    """

    node: Name
    endpoint: Text = ""
    public_key: ShortText = ""
    labels: Labels = {}
    boot_id: ShortText = ""
    memory_bytes: Count = 0


class Member(Struct, frozen=True, tag=True):
    """One node of a run, the ranks on it, and the bytes of each rank's ring."""

    card: NodeCard
    ranks: Annotated[tuple[Rank, ...], Meta(max_length=1 << 16)]
    ring_bytes: Annotated[tuple[Count, ...], Meta(max_length=1 << 16)] = ()


class RunRecord(Struct, frozen=True, tag=True):
    """The members of a run, as a node knows them across restarts of its daemon (docs/replication.md section
    2a).

    Args:
        members: those of ``epoch``.
        former: nodes of earlier epochs; they may hold what this epoch cannot replace until its history
            has a floor.
        epochs: of each known epoch, its first iteration and the epoch that it follows (-1: unknown).
        recoverable: a suffix of this history was complete once, of every rank of this node or of every
            rank.
        forgotten: this epoch and all earlier ones were forgotten by command.
        lost: the file was damaged, so the members are unknown.
        chosen: of the `Join` of ``epoch``.
        durable: the newest checkpoint of this history that all ranks have in storage, as far as it was seen.
    """

    job: Name
    run: Name
    epoch: KnownEpoch = -1
    epoch_start: Iteration = -1
    members: tuple[Member, ...] = ()
    former: tuple[NodeCard, ...] = ()
    epochs: tuple[tuple[Epoch, Iteration, KnownEpoch], ...] = ()
    recoverable: bool = False
    forgotten: KnownEpoch = -1
    lost: bool = False
    chosen: Iteration = -1
    durable: Iteration = -1

    @property
    def cards(self) -> tuple[NodeCard, ...]:
        """How to reach all members and former members."""
        return (*(member.card for member in self.members), *self.former)

    @property
    def newest_epoch(self) -> int:
        """The highest known epoch; -1: none."""
        return max(self.epoch, self.forgotten, *(epoch for epoch, _, _ in self.epochs), -1)


class HeldSlot(Struct, frozen=True, tag=True):
    """One sealed snapshot: its slot, its header, and the operators that it anchors (bitmap,
    little-endian). ``audited``: an audit has come to its bits.
    """

    slot: SlotIndex
    header: HeaderBytes
    anchors: Blob
    audited: bool = False


class HeldSegment(Struct, frozen=True, tag=True):
    """A segment of one rank. ``own`` is false for a replica; ``origin`` names the primary that it copies (or
    is).

    ``facts``: of a boundary log, the ranks with which its rank communicates in a step
    (`ckptd.core.recovery.recovery_facts.facts_to_wire`). ``partial``: its snapshots are of the policy
    ``partial``.
    """

    name: ShortText
    rank: Rank
    own: bool
    origin: ShortText
    generation: Generation
    world_size: WorldSize
    window: Window
    num_operators: NumOperators
    operators_id: ShortText
    slot_bytes: Count
    num_slots: NumSlots
    slots: tuple[HeldSlot, ...]
    facts: Blob = b""
    partial: bool = False


class SegmentInfo(Struct, frozen=True, tag=True):
    """One segment file that the trainer may map."""

    path: Text
    generation: Generation
    slot_bytes: Count
    num_slots: NumSlots


class RankMismatch(Struct, frozen=True, tag=True):
    """What one rank recomputed differently: the number of differences, and the first one in words.

    ``expected`` and ``got`` are digests of the recorded and of the recomputed values, over all differences.
    """

    rank: Rank
    what: Text
    count: Count
    expected: ShortText
    got: ShortText


class ReplayFailure(Struct, frozen=True, tag=True):
    """A replay that did not reproduce the recorded values of ``iteration``, and the verdict
    (`ckptd.core.recovery.quarantine.ReplayVerdict`).

    Args:
        snapshots: iteration, epoch and start of that epoch of every snapshot that the replay had used,
            oldest first.
        ranks: the first ranks that differ.
        result: equal for replays with the same result on all ranks.
        freezing: the freezing policy of the replay.
    """

    iteration: Iteration
    snapshots: Annotated[
        tuple[tuple[Iteration, Epoch, Iteration], ...], Meta(min_length=1, max_length=1 << 16)
    ]
    ranks: Annotated[tuple[RankMismatch, ...], Meta(max_length=16)]
    result: ShortText
    freezing: ShortText
    verdict: ShortText
    reason: Text = ""


class AuditDifference(Struct, frozen=True, tag=True):
    """What the audit of a step computed otherwise than the trainer did.

    Args:
        iteration: of the snapshot that has the recorded value.
        what: the value in words; of a tensor with its operator.
        param: the parameter whose tensor it is; "" if it is none.
        elements: how many a tensor has; 0: it is none, or has another shape.
        differing: how many of them have other bits.
        bits: how many bits differ in all of them.
        ratio: the largest difference, as a multiple of the largest recorded magnitude.
    """

    iteration: Iteration
    what: Text
    param: Text = ""
    elements: Count = 0
    differing: Count = 0
    bits: Count = 0
    ratio: float = 0.0


class AuditReport(Struct, frozen=True, tag=True):
    """What one rank of an audit found; it leaves this in the audit's folder, and ends.

    Args:
        start: the iteration of the snapshot from which the replay began.
        end: that of the snapshot with which it ended.
        compared: the number of compared tensors.
        replay_s: seconds that the replayed steps took.
        changed: how this machine differs from the one that recorded, in what can change bits; "" if it
            does not.
        result: equal for audits that came to the same values; "" if nothing differs.
        num_differences: of which ``differences`` has the largest.
    """

    rank: Rank
    world_size: Annotated[int, Meta(ge=1, lt=1 << 24)]
    start: Iteration
    end: Iteration
    compared: Count
    replay_s: float
    changed: Text
    result: ShortText
    num_differences: Count
    differences: Annotated[tuple[AuditDifference, ...], Meta(max_length=1 << 10)]


class Holdings(Struct, frozen=True, tag=True):
    """All sealed slots that a node holds of a run, and the highest epoch of the run that it knows (-1: none).

    An epoch may have begun without a sealed slot; then no segment shows it.
    """

    node: Name
    segments: tuple[HeldSegment, ...]
    epoch: KnownEpoch = -1
    logs: tuple[HeldSegment, ...] = ()  # boundary logs; separate, so that no planner uses them as snapshots
    parked: tuple[HeldSegment, ...] = ()  # parked states; separate for the same reason
    record: RunRecord | None = None  # None: this node does not know the run
    failures: tuple[ReplayFailure, ...] = ()  # replays that did not reproduce
    durable: Iteration = -1  # of a checkpoint that all ranks have in storage, as far as this node saw it


# -- All clients ---------------------------------------------------------------------------------


# -- All clients ---------------------------------------------------------------------------------


class Hello(Struct, frozen=True, tag=True):
    """The first message of a connection: software version, process id, role.

    The daemon asks the kernel for the process behind the connection; a process that it cannot see (in a
    container, say) is watched by its owner lock. Where libzmq does not tell, ``pid`` counts if
    ``pid_namespace`` (the target of the link /proc/self/ns/pid) is the daemon's.
    """

    version: ShortText
    pid: Annotated[int, Meta(ge=1, lt=1 << 31)]
    role: ShortText = "trainer"
    pid_namespace: ShortText = ""


class Ping(Struct, frozen=True, tag=True):
    """Ask whether the daemon lives, and whether this connection has a session."""


class GetHoldings(Struct, frozen=True, tag=True):
    """Ask what a node holds of a run, of its own and of other ranks. (Between daemons.)

    Args:
        left_out: iteration and epoch of quarantined snapshots. Storage skips checkpoints with one of them
            and offers older ones.
        nodes: those of a start in progress. If the asking node is a member, they may act on the run too.
        every_rank: of storage, what all ranks have there; else what those have that are attached here.
    """

    job: Name
    run: Name
    left_out: Annotated[tuple[tuple[Iteration, Epoch], ...], Meta(max_length=1 << 16)] = ()
    nodes: Annotated[tuple[Name, ...], Meta(max_length=1 << 16)] = ()
    every_rank: bool = False


class SeeRun(Struct, frozen=True, tag=True):
    """Ask what is held of a run, on this node and on nodes of earlier epochs that are not in ``known``.

    ``storage``: include durable checkpoints if this node has a store. They appear as the node ".store", which
    is in ``silent`` if it does not answer. ``every_rank``: what all ranks have there, not only those that are
    attached here. ``patient``: wait for nodes without a sign of life as long as for others.
    """

    job: Name
    run: Name
    known: Annotated[tuple[Name, ...], Meta(max_length=1 << 20)] = ()
    storage: bool = False
    patient: bool = False
    every_rank: bool = False


class Welcome(Struct, frozen=True, tag=True):
    """The daemon that answers. ``boot_id`` is new at every start of the daemon.

    ``started_by_trainer``: it makes way for a daemon started by ``ckptd run``. ``settings``: the settings
    that a trainer may compare with its own environment, as text, without credentials.
    """

    version: str
    node_id: str
    pid: int
    segment_dir: str
    boot_id: str = ""
    card: NodeCard | None = None
    started_by_trainer: bool = False
    settings: dict[str, str] = {}


class RunSeen(Struct, frozen=True, tag=True):
    """The holdings of this node and of others that answered in time, with the cards of the others."""

    holdings: tuple[Holdings, ...]
    cards: tuple[NodeCard, ...]
    members: tuple[Member, ...] = ()  # of the run, as far as this daemon knows
    silent: tuple[Name, ...] = ()  # asked, without an answer in time


class Done(Struct, frozen=True, tag=True):
    """The request was carried out; ``message`` says what was done where that is not obvious."""

    message: str = ""


class Pong(Struct, frozen=True, tag=True):
    """``attached`` is false if this connection has no session (attach again).

    ``park``: the number of a park request that this trainer has not answered; 0: none. ``replicated`` and
    ``durable``: the iterations at which this rank could resume from the best other node that answers, and
    from storage; -1: at none.
    """

    boot_id: str
    attached: bool
    park: int = 0
    replicated: Iteration = -1
    durable: Iteration = -1


class Refused(Struct, frozen=True, tag=True):
    """The request was refused: why, and what to do."""

    code: str
    message: str
    hint: str = ""


# -- Trainer to daemon ---------------------------------------------------------------------------


class Attach(Struct, frozen=True, tag=True):
    """Ask to own one rank of a run.

    Args:
        needed_bytes: all the segment memory that the rank expects to hold.
        needed_text: how that sum is composed ("34 slots of 1.2 GiB").
        held: generations whose owner lock the asking process holds already, as it does when the daemon
            was restarted.
        token: random, one for each process. With the token of the rank's live owner, this is that owner
            on a new connection, and ``held`` is believed; with another one the rank is taken.
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
    token: Annotated[bytes, Meta(max_length=64)] = b""


class Reserve(Struct, frozen=True, tag=True):
    """Ask for the next generation: ``num_slots`` slots of ``slot_bytes``, ready to be mapped.

    ``descriptor`` is the msgpack of a `ckptd.core.slots.segment_format.SegmentDescriptor`. The daemon checks
    its identity against the session and fills in generation, node id and creation time.
    """

    slot_bytes: Annotated[int, Meta(ge=1, lt=1 << 62)]
    num_slots: NumSlots
    descriptor: Blob


class ReserveBeside(Struct, frozen=True, tag=True):
    """Like `Reserve`, for an auxiliary segment (boundary log, parked state, backup of KV), as the descriptor
    says.

    A message of its own, so that a daemon that knows only snapshots refuses it.
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
    """The trainer's own counters, shown by ``ckptctl status``."""

    step: Iteration
    metrics: Metrics


class ParkOutcome(Struct, frozen=True, tag=True):
    """The result of the park request ``number`` of a `Pong`: the parked iteration, or -1 and the reason."""

    number: Count
    iteration: Iteration
    reason: Text = ""


class Notice(Struct, frozen=True, tag=True):
    """An entry for the daemon's event log."""

    level: Annotated[str, Meta(pattern="^(info|warning|error)$")]
    kind: ShortText
    message: Text


class Detach(Struct, frozen=True, tag=True):
    """Orderly end of a session; ``final``: the run is over and its memory may be freed."""

    final: bool = False


class TellReplay(Struct, frozen=True, tag=True):
    """A replay of this session's run did not reproduce the recorded values. None: one did, and the run goes
    on from there.
    """

    failure: ReplayFailure | None = None


class Join(Struct, frozen=True, tag=True):
    """The members of the run of this session's rank; the same from every rank.

    Args:
        epoch: the number of recoveries of the run.
        epoch_start: where this epoch's history leaves the older ones (-1: at their beginning).
        replicas: the number of copies that the trainer asks for; -1: the daemon's configuration decides.
        follows: the highest epoch known to any member before (-1: unknown). A node whose last epoch was
            another one does not know what was agreed on since.
        chosen: the iteration to which this start was told to go back, whether or not it did so (-1: none).
    """

    epoch: Epoch
    epoch_start: Iteration
    members: Annotated[tuple[Member, ...], Meta(max_length=1 << 20)]
    replicas: Annotated[int, Meta(ge=-1, le=64)] = -1
    follows: KnownEpoch = -1
    chosen: Iteration = -1


class FetchSource(Struct, frozen=True, tag=True):
    """A node that holds a snapshot, and the slot."""

    node: Name
    segment: ShortText
    slot: SlotIndex


class FetchPiece(Struct, frozen=True, tag=True):
    """One snapshot to fetch, and its holders, the preferred one first."""

    header: HeaderBytes
    sources: Annotated[tuple[FetchSource, ...], Meta(min_length=1, max_length=256)]


class Fetch(Struct, frozen=True, tag=True):
    """Fetch these snapshots of the session's rank into a new generation: piece i into slot i, in this order.

    Answered by `Reserved` as soon as the segment exists; each slot is sealed when its image is complete and
    verified.

    With a ``kind`` ("log", ...) the pieces are slots of segments of that kind, of rank ``rank`` of the same
    run. The trainer reads them and they become no part of its memory: `GetFetch` and `Drop` take the
    generation of the answer, and it is freed with the session.
    """

    pieces: Annotated[tuple[FetchPiece, ...], Meta(min_length=1, max_length=1 << 16)]
    cards: Annotated[tuple[NodeCard, ...], Meta(max_length=1 << 20)] = ()
    kind: ShortText = ""
    rank: Annotated[int, Meta(ge=-1, lt=1 << 24)] = -1


class GetFetch(Struct, frozen=True, tag=True):
    """Ask for the progress of the fetch into this generation."""

    generation: Generation


# -- Daemon to trainer ---------------------------------------------------------------------------


class FetchState(Struct, frozen=True, tag=True):
    """``state`` is running, done or failed (``reason`` says why); ``by_node``: bytes from each node."""

    state: str
    reason: str
    pieces_done: int
    bytes_done: int
    bytes_total: int
    by_node: dict[str, int]


class Attached(Struct, frozen=True, tag=True):
    """The rank is yours: its segments, oldest generation first, and the memory left for it.

    Args:
        replication_slack: additional slots that its ring should have for replication.
        persists: snapshots go to storage, so the ring should hold one more suffix, which may stay while
            it is uploaded.
        logs: the rank's boundary logs, oldest generation first.
        parked: its parked states, oldest generation first.
        kv: its backups of a server's KV, oldest generation first.
        notes: what this node has of the job that the rank does not get.
        failure_ago_s: for how long the daemon has known that a trainer of the run on this node was dead, the
            first one at the last failure; -1: it knows of no failure since it was started.
        others_ended_ago_s: for how long the last of the run's other trainers on this node has been gone; -1:
            there was no other, or no failure.
    """

    segments: tuple[SegmentInfo, ...]
    quota_bytes: int
    available_bytes: int
    replication_slack: int = 0
    persists: bool = False
    logs: tuple[SegmentInfo, ...] = ()
    parked: tuple[SegmentInfo, ...] = ()
    notes: tuple[str, ...] = ()
    failure_ago_s: float = -1.0
    others_ended_ago_s: float = -1.0
    kv: tuple[SegmentInfo, ...] = ()


class Reserved(Struct, frozen=True, tag=True):
    """The new generation, pre-touched; ``mlocked``: it is also locked in memory."""

    segment: SegmentInfo
    mlocked: bool = False


# -- ckptctl to daemon ---------------------------------------------------------------------------


class GetStatus(Struct, frozen=True, tag=True):
    """Ask for everything ``ckptctl status`` shows."""


class GetSnapshots(Struct, frozen=True, tag=True):
    """Ask for the slot tables; an empty ``job`` or ``run`` and rank -1 mean all.

    ``operators`` adds the operator names of each rank (large with many experts).
    """

    job: ShortText = ""
    run: ShortText = ""
    rank: Annotated[int, Meta(ge=-1, lt=1 << 24)] = -1
    operators: bool = False


class GetEvents(Struct, frozen=True, tag=True):
    """Ask for events with a sequence number above ``since``, oldest first, at most ``limit``."""

    since: Count = 0
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 1000


class Forget(Struct, frozen=True, tag=True):
    """Free the memory of a run that no trainer owns."""

    job: Name
    run: Name


class Unquarantine(Struct, frozen=True, tag=True):
    """Revoke the verdicts of this run's replays: snapshots quarantined here can be recovered again."""

    job: Name
    run: Name


class AuditedSnapshot(Struct, frozen=True, tag=True):
    """The snapshot of a rank with which an audited step ended, by its header digest."""

    rank: Rank
    header_digest: Annotated[bytes, Meta(min_length=16, max_length=16)]


class TellAudit(Struct, frozen=True, tag=True):
    """`ckptctl audit` has computed a step of this run again.

    Args:
        start: the iteration from which it was computed.
        end: the iteration of the snapshots that were compared.
        passed: everything has the recorded bits.
        certain: if not, whether the trainer's values are wrong for certain.
        differing: the ranks that differ.
    """

    job: Name
    run: Name
    start: Iteration
    end: Iteration
    epoch: Epoch
    passed: bool
    certain: bool
    verdict: Text
    snapshots: Annotated[tuple[AuditedSnapshot, ...], Meta(max_length=1 << 16)]
    differing: Annotated[tuple[Rank, ...], Meta(max_length=1 << 16)] = ()


class StepAside(Struct, frozen=True, tag=True):
    """Make way for a daemon that an operator starts: shut down in order and leave the memory. Only daemons
    that trainers started accept it.
    """


class AdmitNodes(Struct, frozen=True, tag=True):
    """Let nodes act on a run for an hour: long enough for their ranks to join it."""

    job: Name
    run: Name
    nodes: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=1 << 16)]


class Park(Struct, frozen=True, tag=True):
    """Have the attached trainers of a job, or of one run of it, park; empty names mean all. Answered after
    ``wait_s`` at the latest.
    """

    job: ShortText = ""
    run: ShortText = ""
    wait_s: Annotated[float, Meta(ge=0, le=3600)] = 60.0


class GetPeers(Struct, frozen=True, tag=True):
    """Ask for everything ``ckptctl peers`` shows."""


class Drill(Struct, frozen=True, tag=True):
    """Rehearse a recovery: fetch what this rank would need from nodes other than its own, verify it, and drop
    it.
    """

    job: Name
    run: Name
    rank: Rank


# -- Daemon to ckptctl ---------------------------------------------------------------------------


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
    """Progress of a local rank's snapshots towards storage (iterations: -1 is none yet)."""

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
    """Uploads to storage. ``url`` is without user and password; ``keeper_pid`` is 0 while no store keeper
    runs.
    """

    url: str
    keeper_pid: int
    uploaded_bytes: int
    spared_bytes: int  # in storage already, and not uploaded again
    ranks: tuple[DurableRank, ...] = ()


class UserStatus(Struct, frozen=True, tag=True):
    """The memory of one user on this node, with replicas of its jobs; ``quota_bytes`` 0: no limit."""

    user: int
    used_bytes: int
    quota_bytes: int


class Status(Struct, frozen=True, tag=True):
    """What ``ckptctl status`` shows. ``users`` is empty where the daemon does not keep users apart."""

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
    users: tuple[UserStatus, ...] = ()
    audits: tuple[RunAudit, ...] = ()


class RunAudit(Struct, frozen=True, tag=True):
    """The audits of a run since this daemon was started.

    Args:
        passed, failed: how many.
        newest: the iteration of the newest audited snapshot; -1: none.
        newest_failed: that of the newest one that is wrong; -1: none.
        verdict: of the last audit.
        ago_s: seconds since it.
    """

    job: str
    run: str
    passed: int
    failed: int
    newest: int
    newest_failed: int
    verdict: str
    ago_s: float


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
    audited: bool = False  # an audit came to the bits of this snapshot


class ExpertLoss(Struct, frozen=True, tag=True):
    """The tokens of one rank whose updates of an expert recoveries from partial snapshots have lost."""

    expert: str
    tokens: float


class RankSnapshots(Struct, frozen=True, tag=True):
    """The slots of one rank, of all its generations, and what can be recovered from them."""

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
    policy: str = ""  # of the newest generation; "" if its trainer recorded none
    # Of partial snapshots, by the newest one: the PLT of all recoveries of the run, and what they have lost
    # of this rank's experts, the most first.
    plt: float = 0.0
    lost: tuple[ExpertLoss, ...] = ()


class RankParked(Struct, frozen=True, tag=True):
    """The iteration at which a rank is parked; -1: it is not, and why."""

    job: str
    run: str
    rank: int
    iteration: int
    reason: str = ""


class Parks(Struct, frozen=True, tag=True):
    """The results of `Park`, of every trainer that was asked."""

    ranks: tuple[RankParked, ...]


class RunFailures(Struct, frozen=True, tag=True):
    """The replays of a run that did not reproduce the recorded values."""

    job: str
    run: str
    failures: tuple[ReplayFailure, ...]


class Snapshots(Struct, frozen=True, tag=True):
    """What ``ckptctl snapshots`` shows."""

    ranks: tuple[RankSnapshots, ...]
    replays: tuple[RunFailures, ...] = ()


class TargetStatus(Struct, frozen=True, tag=True):
    """One target of a rank's replication. ``current_up_to``: the end of its newest complete suffix (-1:
    none).
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
    """One local rank's replication, and the floor of its run (-1: none yet).

    ``wanted``: the number of targets if no node were lost.
    """

    job: str
    run: str
    rank: int
    epoch: int
    floor: int
    targets: tuple[TargetStatus, ...]
    kind: ShortText = "snapshots"  # or its boundary log
    wanted: Count = 0


class PeerStatus(Struct, frozen=True, tag=True):
    """One other node; ``answered``: it has, once at least."""

    node: str
    endpoint: str
    labels: dict[str, str]
    alive: bool
    silent_s: float
    free_bytes: int
    answered: bool = True


class HostedReplica(Struct, frozen=True, tag=True):
    """One replica that this node hosts."""

    name: str
    job: str
    run: str
    rank: int
    total_bytes: int
    sealed: int
    newest_iteration: int
    kind: ShortText = "snapshots"


class ComparedRanks(Struct, frozen=True, tag=True):
    """Ranks that should hold the same values, whose snapshots this node compares.

    Args:
        iteration: the newest one that was compared; -1: none yet.
        differing: some of the tensors that differ; ``num_differing``: how many do.
        diverged: what is not the same on the ranks, and not as by a fault: ``param``, ``master``, or
            ``optim/<key>``.
    """

    job: str
    run: str
    ranks: tuple[int, ...]
    iteration: int
    differing: tuple[str, ...] = ()
    num_differing: int = 0
    diverged: tuple[str, ...] = ()


class Peers(Struct, frozen=True, tag=True):
    """What ``ckptctl peers`` shows. ``endpoint`` is "" if this daemon has no peer listener.

    ``encryption``: the cipher of snapshots between nodes, or "plaintext".
    """

    node: str
    endpoint: str
    public_key: str
    peers: tuple[PeerStatus, ...]
    ranks: tuple[ReplicationStatus, ...]
    replicas: tuple[HostedReplica, ...]
    counters: dict[str, int]
    encryption: str = ""
    compared: tuple[ComparedRanks, ...] = ()


class DrillReport(Struct, frozen=True, tag=True):
    """The result of a drill. ``compared``: bytes that were also compared with the primary, if that is on this
    node.
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
    """One event; ``seq`` grows by one with each."""

    seq: int
    time_ns: int
    level: str
    kind: str
    message: str
    job: str = ""
    run: str = ""
    rank: int = -1


class Events(Struct, frozen=True, tag=True):
    """A page of events; ``first_seq`` is the oldest one still kept."""

    events: tuple[EventInfo, ...]
    first_seq: int
    last_seq: int


# -- Elastic jobs --------------------------------------------------------------------------------

# -- Elastic jobs --------------------------------------------------------------------------------

Loads = Annotated[tuple[Annotated[tuple[Count, ...], Meta(max_length=1 << 16)], ...], Meta(max_length=4096)]


class ElasticNode(Struct, frozen=True, forbid_unknown_fields=True):
    """A node of an elastic job.

    Args:
        name: of its daemon.
        slots: replicas of experts that it holds in each layer.
        ranks: the number of its ranks, which share the slots.
        labels: such as ``{"rack": "A"}``; ``Elastic.domain`` names the one whose nodes fail together.
        holds: for each layer the experts that it holds now, one entry for each replica; empty: none, or
            unknown.
        bytes_per_s: its bandwidth in each direction; 0: unknown.
    """

    name: Name
    slots: Annotated[int, Meta(ge=1, le=1 << 20)]
    ranks: Annotated[int, Meta(ge=1, le=1 << 20)] = 1
    labels: Labels = {}
    holds: Loads = ()
    bytes_per_s: Count = 0


class ElasticWhen(Struct, frozen=True, forbid_unknown_fields=True):
    """What decides when experts are placed anew
    (`ckptd.core.elastic.rebalance_policy.TimesConfig`).

    Args:
        placed_step: the step of the last placement.
        expert_s: the part of a step's time that grows with the tokens of the busiest rank; 0: not
            measured.
        pause_s: the cost of a new placement besides its transfers; 0: not measured.
        remaining_steps: until the end of training; -1: unknown.
    """

    check_steps: Annotated[int, Meta(ge=1)] = 50
    every_steps: Count = 0
    horizon_steps: Annotated[int, Meta(ge=1)] = 1000
    margin: Annotated[float, Meta(ge=0)] = 0.5
    placed_step: Iteration = -1
    expert_s: Annotated[float, Meta(ge=0)] = 0.0
    pause_s: Annotated[float, Meta(ge=0)] = 0.0
    remaining_steps: Iteration = -1


class Elastic(Struct, frozen=True, forbid_unknown_fields=True):
    """The nodes of an elastic job, the load of its experts, and their placement. The JSON form is the input
    file of ``ckptctl elastic``.

    Args:
        loads: for each layer the tokens routed to each expert in the newest period.
        nodes: in the order of the plan.
        step: the step of this report; -1: none.
        threshold: the number of nodes on which every expert shall be.
        max_straggler: bound of the busiest rank over the mean; 0: none.
        domain: the label whose value fails together; "": each node by itself.
        expert_bytes: of a replica, for each expert of each layer, or one row with one number for all;
            empty: unknown.
        layers: their names.
        history: loads of earlier periods, the oldest first.
        method, reason: how the placement was found, and why it was made.
        when: what decides about the next one.
    """

    loads: Loads
    nodes: Annotated[tuple[ElasticNode, ...], Meta(min_length=1, max_length=1 << 16)]
    step: Iteration = -1
    threshold: Annotated[int, Meta(ge=1, le=1 << 16)] = 2
    max_straggler: Annotated[float, Meta(ge=0)] = 0.0
    domain: ShortText = ""
    expert_bytes: Loads = ()
    layers: Annotated[tuple[ShortText, ...], Meta(max_length=4096)] = ()
    history: Annotated[tuple[Loads, ...], Meta(max_length=64)] = ()
    method: Text = ""
    reason: Text = ""
    when: ElasticWhen = ElasticWhen()


class TellElastic(Struct, frozen=True, tag=True):
    """A trainer reports its job's placement. The daemon keeps the newest one of each run, uninterpreted."""

    elastic: Elastic


class GetElastic(Struct, frozen=True, tag=True):
    """Ask for the placements reported to this node; empty names mean all."""

    job: ShortText = ""
    run: ShortText = ""


class ElasticTold(Struct, frozen=True):
    """The report of rank ``rank`` of a run, ``ago_s`` seconds old."""

    job: str
    run: str
    rank: int
    ago_s: float
    elastic: Elastic


class SeenElastic(Struct, frozen=True, tag=True):
    """The newest report of every run that was asked for."""

    told: tuple[ElasticTold, ...]


class GetDurableWorlds(Struct, frozen=True, tag=True):
    """Ask for the durable checkpoints of an elastic run's incarnations. Repeat it until the answer is not
    ``running``.

    Args:
        asker: names this question: another name has the store read again.
        again: asked by a start that has found a checkpoint to be damaged.
    """

    job: Name
    run: Name
    asker: ShortText
    again: bool = False


class DurableWorld(Struct, frozen=True):
    """A committed checkpoint of an incarnation; ``sizes``: the approximate bytes of each of its ranks."""

    world: Count
    iteration: Iteration
    sizes: tuple[Count, ...]


class DurableWorlds(Struct, frozen=True, tag=True):
    """``configured`` is false if the daemon has no store; ``running``: the store has not answered yet.

    Args:
        worlds: the numbers of all incarnations, also of those without a committed checkpoint.
        checkpoints: the newest ones of the latest incarnations, newest first.
        damaged: world and iteration of the checkpoints that this node has found to be damaged.
    """

    configured: bool
    worlds: tuple[Count, ...] = ()
    checkpoints: tuple[DurableWorld, ...] = ()
    damaged: tuple[tuple[Count, Iteration], ...] = ()
    running: bool = False


class BringStored(Struct, frozen=True, tag=True):
    """Load the parts of these ranks of a committed checkpoint into this node's memory, unless that is in
    progress.

    Repeat it until it is over: the answer is `Brought`. No trainer has to be attached as these ranks.
    """

    job: Name
    run: Name
    iteration: Iteration
    ranks: Annotated[tuple[Rank, ...], Meta(min_length=1, max_length=1 << 20)]


class Brought(Struct, frozen=True, tag=True):
    """``state`` is running, done, failed (``reason`` says why; an older checkpoint may do), or refused: there
    is no memory for any.
    """

    state: str
    reason: str
    bytes_done: int
    bytes_total: int


# -- All of them ---------------------------------------------------------------------------------

Request = (
    Hello
    | Attach
    | Reserve
    | ReserveBeside
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
    | GetElastic
    | GetDurableWorlds
    | BringStored
    | Park
    | AdmitNodes
    | Forget
    | TellReplay
    | StepAside
    | Unquarantine
    | TellAudit
)
OneWay = Filled | Report | Notice | ParkOutcome | TellElastic
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
    | Parks
    | Events
    | SeenElastic
    | DurableWorlds
    | Brought
)
Message = Request | OneWay | Reply
