"""One target of a rank's replication: its states, its events and effects, and what follows from each. Pure.

`ckptd.core.replication.replicator.Replicator` owns the targets of a rank and describes what the shell
guarantees. Each target is sent one snapshot at a time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from enum import StrEnum

from ckptd.core.replication.copies import NO_INTERVAL, Lag, TargetCopies
from ckptd.core.slots.slots import Hold, Joined, Note, Release, SlotRecord, SnapshotKey, Tick, key_of
from ckptd.core.state_machine import MachineState, Transitions
from ckptd.errors import LocalProtocolError


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
    FAIL = "fail"  # the request was refused, or failed
    CANCEL = "cancel"
    STOP = "stop"  # no lease there counts any more


TRANSITIONS = Transitions(
    "replication",
    {
        (Phase.CLOSED, TargetEvent.OPEN): Phase.OPENING,
        (Phase.CLOSED, TargetEvent.STOP): Phase.CLOSED,
        (Phase.OPENING, TargetEvent.OPENED): Phase.IDLE,
        (Phase.OPENING, TargetEvent.FAIL): Phase.IDLE,
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
_WAITS_FOR_ANSWER = (Phase.OPENING, Phase.BEGINNING, Phase.SEALING)
_READS_SLOT = (Phase.BEGINNING, Phase.PUTTING, Phase.CANCELLING)


# -- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Targets:
    """The placement of this rank's replicas; `Joined` comes first.

    ``missing``: a node that would be among them is away, and may hold the only copy elsewhere.
    """

    nodes: tuple[str, ...]
    missing: bool = False


@dataclass(frozen=True, slots=True)
class Slots:
    """The primary's slots of all generations after a change; ``num_slots``: of the current generation."""

    records: tuple[SlotRecord, ...]
    num_operators: int
    num_slots: int = 0


@dataclass(frozen=True, slots=True)
class Agreed:
    """The run's `ckptd.core.replication.replicas.Promise`; a run of one rank gets none."""

    floor: int
    horizon: int


@dataclass(frozen=True, slots=True)
class TargetOpened:
    """The node has a replica of ``generation``, and holds these snapshots of it sealed."""

    node: str
    generation: int
    lease: int
    held: tuple[SlotRecord, ...]
    boot_id: str = ""  # of the daemon that answered


@dataclass(frozen=True, slots=True)
class OpenRefused:
    """The node gave no lease; ``code`` as in `PeerRefused`, or "timeout"."""

    node: str
    generation: int
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Granted:
    """The node gave a slot for this snapshot; ``grant`` belongs to the shell and is only compared."""

    node: str
    key: SnapshotKey
    grant: object


@dataclass(frozen=True, slots=True)
class BeginRefused:
    """The node gave no slot; ``code``: busy, held, stale, unknown, or any other."""

    node: str
    key: SnapshotKey
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class PutEnded:
    """The transfer is over, and reads no byte of the slot any more."""

    node: str
    key: SnapshotKey
    ok: bool
    reason: str


@dataclass(frozen=True, slots=True)
class SealedThere:
    """The node verified the snapshot and shows it to recovery."""

    node: str
    key: SnapshotKey


@dataclass(frozen=True, slots=True)
class SealRefused:
    """The node did not seal the snapshot; ``code`` is digest, recompute, unknown, or any other."""

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


_OfTarget = (
    TargetOpened
    | OpenRefused
    | Granted
    | BeginRefused
    | PutEnded
    | SealedThere
    | SealRefused
    | PeerLost
    | PeerBack
)
Event = Joined | Targets | Slots | Agreed | Tick | _OfTarget


# -- effects -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenTarget:
    """Ask the node to make or find its replica of this generation."""

    node: str
    generation: int


@dataclass(frozen=True, slots=True)
class Begin:
    """Ask the node for a slot for this snapshot."""

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
    """Every byte has arrived: ask the node to verify and to seal it."""

    node: str
    key: SnapshotKey
    grant: object


@dataclass(frozen=True, slots=True)
class Abort:
    """Cancel the put, if one runs, and give the grant back."""

    node: str
    key: SnapshotKey
    grant: object


Effect = OpenTarget | Begin | Put | Seal | Abort | Hold | Release | Note


# -- the machine ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplicationConfig:
    """Bounds of waiting, in seconds. After each failure in a row the next wait doubles, up to its bound."""

    busy_s: float = 0.05
    "After a refusal because every slot is promised: the floor moves within a snapshot or two."
    busy_max_s: float = 1.0
    quota_s: float = 5.0
    "After a refusal for want of memory, which changes rarely."
    quota_max_s: float = 60.0
    retry_s: float = 0.2
    "After every other failure."
    retry_max_s: float = 10.0
    answer_s: float = 30.0
    "How long a request may stay unanswered; to seal is to digest a whole image."
    stalled_s: float = 120.0
    "A target that is behind and has sealed nothing for this long no longer holds the floor back."
    digest_refusals: int = 3
    "After this many in a row the local copy is suspected, and the snapshot is skipped."

    def __post_init__(self) -> None:
        for spec in fields(self):
            if not getattr(self, spec.name) > 0:
                raise ValueError(f"{spec.name} must be positive, not {getattr(self, spec.name)}")


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
    boot_id: str  # of the daemon that reported its holdings; "": none yet


class Turn:
    """What the targets of a rank share: the time and the effects of this turn, and who reads which slot."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.effects: list[Effect] = []
        self.readers: Counter[SnapshotKey] = Counter()  # targets for which a local slot is held

    def begin(self, now_s: float) -> None:
        """Start a turn without effects."""
        self.now_s, self.effects = now_s, []

    def note(self, level: str, kind: str, message: str) -> None:
        """Add an entry for the event log."""
        self.effects.append(Note(level, kind, message))

    def hold(self, record: SlotRecord) -> None:
        """One more target reads this slot; the first one holds it."""
        key = key_of(record)
        self.readers[key] += 1
        if self.readers[key] == 1:
            self.effects.append(Hold(key, record))

    def release(self, key: SnapshotKey) -> None:
        """One target fewer reads this slot; the last one releases it."""
        self.readers[key] -= 1
        if not self.readers[key]:
            del self.readers[key]
            self.effects.append(Release(key))


class ReplicationTarget:
    """One target node: what is known of it, and what goes on with it.

    Attributes:
        wanted: the placement names it; if not, it is dropped as soon as its put has ended.
        copies: what it holds.
        record: the snapshot that is being sent.
    """

    def __init__(self, node: str, copies: TargetCopies, config: ReplicationConfig, turn: Turn) -> None:
        self.node, self.copies = node, copies
        self._config, self._turn = config, turn
        self.phase = Phase.CLOSED
        self.wanted = self._alive = True
        self.no_memory = self._stalled = False
        self.record: SlotRecord | None = None
        self._grant: object = None
        self._generation = -1  # being opened
        self._boot_id = ""  # of the daemon that reported its holdings
        self._since_s = turn.now_s  # of the last progress, or of the last time with nothing to send
        self._asked_s = self._retry_at_s = 0.0
        self._failures = self._unknowns = self._digest_refusals = 0
        self._stale = False  # it refuses our snapshots: another history counts there
        self._reason = ""

    @property
    def counted(self) -> bool:
        """Whether the floor waits for it."""
        return self.could_count and not self._stalled

    @property
    def could_count(self) -> bool:
        """Whether it answers and takes replicas, however slowly."""
        return self.wanted and self._alive and not self.no_memory

    @property
    def key(self) -> SnapshotKey | None:
        """The snapshot that is being sent."""
        return None if self.record is None else key_of(self.record)

    @property
    def read_key(self) -> SnapshotKey | None:
        """The snapshot whose local slot is held for this target."""
        return self.key if self.phase in _READS_SLOT else None

    @property
    def is_over(self) -> bool:
        """Whether it can be dropped: not wanted, and no put is running."""
        return not self.wanted and self.phase is not Phase.CANCELLING

    @property
    def wake_at_s(self) -> float | None:
        """When the next tick is due; None: not before an event."""
        if not (self.wanted and self._alive):
            return None
        if self.phase in _WAITS_FOR_ANSWER:
            return self._asked_s + self._config.answer_s
        if self.phase in (Phase.CLOSED, Phase.IDLE) and self.copies.next_to_send() is not None:
            return self._retry_at_s
        return None

    @property
    def alive(self) -> bool:
        """Whether its node answers."""
        return self._alive

    def state(self, now_s: float) -> TargetState:
        """For ``ckptctl peers``."""
        return TargetState(
            self.node,
            self.phase,
            self._alive,
            self.counted,
            len(self.copies.held),
            self.copies.run.last,
            self.copies.lag(),
            max(0.0, self._retry_at_s - now_s),
            self._reason,
            self._boot_id,
        )

    def validate(self) -> None:
        """The invariants after each event."""
        sending = self.phase in _READS_SLOT or self.phase is Phase.SEALING
        assert sending == (self.record is not None), f"{self.node} is {self.phase} with {self.record}"
        assert sending or self._grant is None, f"{self.node} is {self.phase} and has a grant"
        assert self.wanted or self.phase is Phase.CANCELLING, f"{self.node} is no target any more"
        assert self._alive or self.phase in (Phase.CLOSED, Phase.CANCELLING), f"{self.node} is lost"
        assert self.copies.held or self.copies.run == NO_INTERVAL, (
            f"{self.node} holds nothing, and is current"
        )

    def handle(self, event: _OfTarget) -> None:
        """Take note of an event. Answers to requests that no longer stand are ignored."""
        match event:
            case PutEnded():
                self._put_ended(event)
            case Granted():
                self._granted(event)
            case PeerLost(reason=reason):
                self._lose(reason)
            case PeerBack():
                self._return()
            case TargetOpened() | OpenRefused():
                if self.phase is not Phase.OPENING or event.generation != self._generation:
                    return
                if isinstance(event, TargetOpened):
                    self._opened(event)
                else:
                    self._open_refused(event)
            case BeginRefused() if self._waits_in(Phase.BEGINNING, event.key):
                self._begin_refused(event)
            case SealedThere() if self._waits_in(Phase.SEALING, event.key):
                self._on(TargetEvent.SEALED)
                self._progress(event.key)
            case SealRefused() if self._waits_in(Phase.SEALING, event.key):
                self._seal_refused(event)

    def want(self) -> None:
        """The placement names it again, while its last put is being cancelled."""
        if not self.wanted:
            self.wanted, self._since_s = True, self._turn.now_s
            self.copies.counts_otherwise()

    def drop(self) -> None:
        """The placement does not name it any more."""
        if self.wanted:
            self.wanted = False
            self.stop("not a target any more")

    def stop(self, reason: str) -> None:
        """End what is going on, and believe nothing any more."""
        self._reason = reason
        self._forget()
        if self.phase is Phase.PUTTING:
            self.cancel(reason)
        elif self.phase is not Phase.CANCELLING:
            if self.phase is Phase.SEALING:
                self._abort()
            self._let_go(TargetEvent.STOP)

    def cancel(self, reason: str) -> None:
        """Cancel the put that is running."""
        self._on(TargetEvent.CANCEL)
        self._reason = reason
        self._abort()

    def advance(self) -> None:
        """Do whatever can be done next, now."""
        now_s, effects = self._turn.now_s, self._turn.effects
        self._check_time()
        if not (self.wanted and self._alive) or self.phase not in (Phase.CLOSED, Phase.IDLE):
            return
        record = self.copies.next_to_send()
        if record is None:
            self._since_s = now_s  # nothing to send is no stall
            return
        if now_s < self._retry_at_s:
            return
        self._asked_s = now_s
        if record.generation not in self.copies.opened:
            self._generation = record.generation
            self._on(TargetEvent.OPEN)
            effects.append(OpenTarget(self.node, record.generation))
            return
        self._on(TargetEvent.BEGIN)
        self.record = record
        self.copies.doubt_newer(record)
        self._turn.hold(record)
        effects.append(Begin(self.node, key_of(record), record))

    # -- opening -------------------------------------------------------------------------------------

    def _opened(self, event: TargetOpened) -> None:
        self._on(TargetEvent.OPENED)
        if event.boot_id != self._boot_id:
            # Its machine may have been replaced, and this answer may precede the news of it: every other
            # generation is opened again.
            self._forget()
            self._boot_id = event.boot_id
        self.no_memory = False
        self.copies.believe(event.generation, event.held)

    def _open_refused(self, event: OpenRefused) -> None:
        if event.code == "quota" and not self.no_memory:
            self.no_memory = True
            self.copies.doubt_all()
            text = f"{self.node} has no memory for a replica: {event.reason}"
            self._turn.note("warning", "replication_refused", text)
        # The leases of other generations still stand.
        self._on(TargetEvent.FAIL if self.copies.opened else TargetEvent.STOP)
        self._back_off(event.code, event.reason)

    def _unknown(self, reason: str) -> None:
        """The host does not know the lease: it was restarted, and may have lost everything."""
        self.copies.held.clear()
        self.copies.recount()
        self._reopen(reason, at_once=self._unknowns == 0)
        self._unknowns += 1

    def _reopen(self, reason: str, *, at_once: bool = False) -> None:
        """Ask again what the target holds."""
        self.copies.opened.clear()
        self._let_go(TargetEvent.STOP)
        if at_once:
            self._reason = reason
        else:
            self._back_off("unknown", reason)

    # -- sending -------------------------------------------------------------------------------------

    def _granted(self, event: Granted) -> None:
        if not self._waits_in(Phase.BEGINNING, event.key):
            came_twice = self.key == event.key and self._grant == event.grant
            if not came_twice:
                self._turn.effects.append(Abort(event.node, event.key, event.grant))
            return
        assert self.record is not None
        record = self.copies.here(self.record)
        if record is None:
            self._let_go(TargetEvent.FAIL)
            self._turn.effects.append(Abort(event.node, event.key, event.grant))
            return
        self._on(TargetEvent.GRANTED)
        self._grant, self.record = event.grant, record
        self._turn.effects.append(Put(event.node, event.key, record, event.grant))

    def _begin_refused(self, event: BeginRefused) -> None:
        if event.code == "unknown":
            self._unknown(event.reason)
            return
        self._let_go(TargetEvent.FAIL)
        match event.code:
            case "held":
                self._progress(event.key)
            case "gone":
                # The ring moved on after its table was read, as a small ring does all the time: the
                # snapshots that are left are sent at once.
                self.copies.lose(event.key)
            case "stale":
                self.copies.skip(event.key)
                self._note_stale(event.key.iteration)
            case _:
                self._back_off(event.code, event.reason)

    def _note_stale(self, iteration: int) -> None:
        if self._stale:
            return
        self._stale = True
        self._turn.note(
            "warning",
            "replication_stale",
            f"{self.node} refuses iteration {iteration}: it knows of another history of this run, which "
            "counts. Ranks that a restart replaces end by themselves. If training goes on, a node that was "
            "away has come back with that history: this job's snapshots have no replicas there, and its next "
            "start goes on from the other history (ckptctl whatif)",
        )

    def _put_ended(self, event: PutEnded) -> None:
        if self.phase not in (Phase.PUTTING, Phase.CANCELLING) or self.key != event.key:
            raise put_not_begun(event)
        self._turn.release(event.key)
        if self.phase is Phase.CANCELLING:
            self._on(TargetEvent.FAIL if self.copies.opened else TargetEvent.STOP)
        elif event.ok:
            self._on(TargetEvent.DELIVERED)
            self._asked_s = self._turn.now_s
            self._turn.effects.append(Seal(event.node, event.key, self._grant))
        else:
            self._abort()
            self._on(TargetEvent.FAIL)
            self._back_off("put", event.reason)

    def _seal_refused(self, event: SealRefused) -> None:
        if event.code == "unknown":
            self._unknown(event.reason)
            return
        self._on(TargetEvent.FAIL)
        if event.code == "recompute" and not self._failures:
            self._failures = 1  # it could not be computed from gradients there: it goes whole, at once
            return
        self._back_off(event.code, event.reason)
        if event.code != "digest":
            return
        self._digest_refusals += 1
        if self._digest_refusals >= self._config.digest_refusals:
            self.copies.skip(event.key)
            self._digest_refusals = 0
            text = (
                f"{self.node} refused iteration {event.key.iteration} for its digest again and again: its "
                f"copy on this node is suspected, and passed over ({event.reason})"
            )
            self._turn.note("error", "snapshot_suspected", text)

    def _progress(self, key: SnapshotKey) -> None:
        self._failures = self._unknowns = self._digest_refusals = 0
        self._stalled, self._since_s, self._reason = False, self._turn.now_s, ""
        self._retry_at_s = 0.0
        self.copies.add(key)

    # -- stopping and waiting ------------------------------------------------------------------------

    def _lose(self, reason: str) -> None:
        if self._alive:
            self._turn.note("warning", "replication_peer_lost", f"{self.node}: {reason}")
        self._alive = False
        self.stop(reason)

    def _return(self) -> None:
        if not self._alive:
            self._alive, self._since_s, self._reason = True, self._turn.now_s, ""
            self.no_memory = self._stalled = False
            self.copies.counts_otherwise()

    def _check_time(self) -> None:
        """Give up a request that stays unanswered; stop counting a target that makes no progress."""
        waited_s = self._turn.now_s - self._asked_s
        if self.phase in _WAITS_FOR_ANSWER and waited_s >= self._config.answer_s:
            self._reopen(f"no answer for {waited_s:.1f} s while {self.phase}")
        quiet_s = self._turn.now_s - self._since_s
        too_quiet = quiet_s >= self._config.stalled_s
        if too_quiet and self.counted and self.copies.next_to_send() is not None:
            self._stalled = True
            self.copies.doubt_all()
            text = f"{self.node} sealed nothing for {quiet_s:.0f} s ({self._reason or 'slow'})"
            self._turn.note("warning", "replication_stalled", text)

    def _back_off(self, code: str, reason: str) -> None:
        config = self._config
        bounds = {
            "busy": (config.busy_s, config.busy_max_s),
            "quota": (config.quota_s, config.quota_max_s),
        }
        first_s, most_s = bounds.get(code, (config.retry_s, config.retry_max_s))
        delay_s = min(most_s, first_s * 2 ** min(self._failures, 20))
        self._failures += 1
        self._retry_at_s = self._turn.now_s + delay_s
        self._reason = f"{code}: {reason}"

    def _forget(self) -> None:
        self.copies.forget()
        self._boot_id = ""
        self._failures = self._unknowns = self._digest_refusals = 0
        self._stale = False
        self._retry_at_s = 0.0

    def _let_go(self, event: TargetEvent) -> None:
        """Send nothing any more; release a slot that was held for a `Begin`."""
        if self.phase is Phase.BEGINNING and self.record is not None:
            self._turn.release(key_of(self.record))
        self._on(event)

    def _abort(self) -> None:
        assert self.record is not None
        self._turn.effects.append(Abort(self.node, key_of(self.record), self._grant))

    def _waits_in(self, phase: Phase, key: SnapshotKey) -> bool:
        return self.phase is phase and self.key == key

    def _on(self, event: TargetEvent) -> None:
        """Make a transition; forget the snapshot where none is being sent."""
        self.phase = TRANSITIONS.after(self.phase, event, node=self.node)
        if self.phase in (Phase.CLOSED, Phase.IDLE):
            self.record = self._grant = None


def put_not_begun(event: PutEnded) -> LocalProtocolError:
    """The shell reported the end of a put that was not begun."""
    return LocalProtocolError(
        "a put ended that was not begun",
        operation="replicate",
        ids={"node": event.node, "iteration": event.key.iteration},
    )
