"""Which snapshots of one rank go to storage, and when. Pure (DESIGN §5, §11).

A *checkpoint* is the complete suffix that ends at an iteration that the `Cadence` names. Its snapshots are
held (the trainer skips slots with a reader) and stored oldest first, except those that an earlier checkpoint
has stored. When all are stored, the rank's manifest is committed. One checkpoint is under way at a time:
those that fall due meanwhile are skipped, and the cadence takes longer strides.

The trainer never waits for storage, so a checkpoint must not hold the slots that the trainer needs next. If
it would hold more than the ring's spare slots beyond the newest suffix, the checkpoint is *overtaken*: given
up. After two in a row the next one is *firm*: it keeps its slots until it is stored, and meanwhile the ring
may have none for new snapshots (training continues, and the suffix that is held is complete). That is
reported; more memory is the remedy.

The store retries by itself. What it finally refuses ends the checkpoint. The newest one that is due then (the
same one, if training has stopped) is tried after a pause that doubles each time. A flush stays due until the
newest suffix is stored or there is none.

Beliefs about the store hold for one epoch and one life of the store keeper: after either, nothing begins
before the slots are reported again. If the store shows a later history of these names (`Fenced`), nothing
begins until another epoch is joined.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

from ckptd.core.replication.replicas import spanning_suffix
from ckptd.core.slots.ring import Suffix, newest_by_iteration
from ckptd.core.slots.slots import Hold, Joined, Note, Release, SlotRecord, SnapshotKey, Tick, key_of
from ckptd.core.state_machine import MachineState, Transitions, validated

_FIRM_AFTER = 2
_BACKOFF_S, _BACKOFF_MAX_S = 5.0, 300.0
_LATE = 4  # a suffix that is incomplete this many iterations later stays so
_REMEMBERED = 4096  # snapshots that are known to be stored


class PersistPhase(MachineState):
    """How far one rank's way to storage is."""

    UNTOLD = "untold", "the slots were not reported since the epoch began or the store keeper restarted"
    IDLE = "idle", "no checkpoint is under way"
    STORING = "storing", "the snapshots of a checkpoint are held, and stored"
    COMMITTING = "committing", "all are stored; the manifest is being written"
    FENCED = (
        "fenced",
        "the store shows a later history of these names: another job, or a recovery of this one",
    )


class PersistEvent(StrEnum):
    """What happens to it."""

    TOLD = "told"
    BEGIN = "begin"
    STORED = "stored"
    COMMITTED = "committed"
    ABANDON = "abandon"  # refused by the store, or overtaken by training
    FORGET = "forget"  # the store keeper was restarted
    FENCE = "fence"
    JOIN = "join"  # another epoch


TRANSITIONS = Transitions(
    "persistence",
    {
        (PersistPhase.UNTOLD, PersistEvent.TOLD): PersistPhase.IDLE,
        (PersistPhase.IDLE, PersistEvent.TOLD): PersistPhase.IDLE,
        (PersistPhase.IDLE, PersistEvent.BEGIN): PersistPhase.STORING,
        (PersistPhase.STORING, PersistEvent.TOLD): PersistPhase.STORING,
        (PersistPhase.STORING, PersistEvent.STORED): PersistPhase.COMMITTING,
        # The answer to an earlier try of the same checkpoint.
        (PersistPhase.STORING, PersistEvent.COMMITTED): PersistPhase.IDLE,
        (PersistPhase.STORING, PersistEvent.ABANDON): PersistPhase.IDLE,
        (PersistPhase.COMMITTING, PersistEvent.TOLD): PersistPhase.COMMITTING,
        (PersistPhase.COMMITTING, PersistEvent.COMMITTED): PersistPhase.IDLE,
        (PersistPhase.COMMITTING, PersistEvent.ABANDON): PersistPhase.IDLE,
        # Slots are reported all the same.
        (PersistPhase.FENCED, PersistEvent.TOLD): PersistPhase.FENCED,
        (PersistPhase.FENCED, PersistEvent.FORGET): PersistPhase.FENCED,
        **{(phase, PersistEvent.JOIN): PersistPhase.UNTOLD for phase in PersistPhase},
        **{(phase, PersistEvent.FENCE): PersistPhase.FENCED for phase in PersistPhase},
        **{
            (phase, PersistEvent.FORGET): PersistPhase.UNTOLD
            for phase in PersistPhase
            if phase is not PersistPhase.FENCED
        },
    },
)
_UNDER_WAY = (PersistPhase.STORING, PersistPhase.COMMITTING)


# -- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Durable:
    """All ranks have this checkpoint of this history in storage."""

    end: int


@dataclass(frozen=True, slots=True)
class SlotTables:
    """The rank's slots after a change; ``total`` counts those of all generations, in whatever state."""

    records: tuple[SlotRecord, ...]
    num_operators: int
    total: int


@dataclass(frozen=True, slots=True)
class SnapshotStored:
    """A snapshot is in storage; this many of its bytes were uploaded.

    ``for_later``: false if only the checkpoint that is under way can do with what is stored of it.
    """

    key: SnapshotKey
    uploaded_bytes: int
    for_later: bool = True


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """The snapshot is not in storage, and to try again at once is useless."""

    key: SnapshotKey
    reason: str


@dataclass(frozen=True, slots=True)
class SlotReused:
    """The trainer has overwritten the slot."""

    key: SnapshotKey


@dataclass(frozen=True, slots=True)
class Committed:
    """The manifest of the checkpoint whose last snapshot is this one is in storage."""

    key: SnapshotKey


@dataclass(frozen=True, slots=True)
class CommitFailed:
    """The manifest is not in storage."""

    key: SnapshotKey
    reason: str


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The store keeper was restarted: it knows nothing of snapshots that it stored and did not commit."""


@dataclass(frozen=True, slots=True)
class Fenced:
    """The store shows a later history of these names.

    Nothing more is stored until another epoch is joined.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Flush:
    """Persist the newest suffix, due or not: the rank has ended in order, or a user asked."""


_Answer = SnapshotStored | StoreFailed | SlotReused | Committed | CommitFailed
Event = Joined | Durable | SlotTables | _Answer | Forgotten | Fenced | Flush | Tick


# -- effects -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Store:
    """Upload this snapshot, whose slot is held.

    ``newer``: snapshots of the same checkpoint, newest first, that together anchor what any newer one has of
    it. If no replay leads through them, a recovery takes that from them. ``checkpoint``: all snapshots of it,
    oldest first, with their phases; empty if it is not one of those that ranks may begin by themselves.
    """

    key: SnapshotKey
    record: SlotRecord
    newer: tuple[SnapshotKey, ...] = ()
    checkpoint: tuple[tuple[SnapshotKey, int], ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Commit:
    """Write the manifest: all snapshots of the checkpoint (``keys``, oldest first) are stored."""

    end: int
    stride: int
    keys: tuple[SnapshotKey, ...]


Effect = Hold | Release | Store | Commit | Note


# -- the machine ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PersistState:
    """For `ckptctl status` and metrics; -1: none yet.

    ``committed``: the newest checkpoint that all ranks are known to have in storage; the lag is counted from
    it.
    """

    under_way: int
    stored: int
    of: int
    committed: int
    stride: int
    skipped: int
    abandoned: int
    lag_iterations: int
    uploaded_bytes: int
    last_s: float
    reason: str


@dataclass(slots=True)
class _Checkpoint:
    """The checkpoint that is under way; ``records`` are its snapshots, oldest first."""

    records: dict[SnapshotKey, SlotRecord]
    begun_s: float
    firm: bool
    held: set[SnapshotKey]
    flush: bool
    asked: set[SnapshotKey] = field(default_factory=set)
    own: set[SnapshotKey] = field(default_factory=set)  # stored for this checkpoint alone

    @property
    def last(self) -> SnapshotKey:
        return next(reversed(self.records))

    @property
    def end(self) -> int:
        return self.last.iteration

    def newer_than(self, key: SnapshotKey) -> tuple[SnapshotKey, ...]:
        """The newest snapshot, and those that anchor more of what this one does; `Store` has them."""
        left = self.records[key].anchors
        found: list[SnapshotKey] = []
        for other, record in reversed(self.records.items()):
            if other == key:
                break
            if not found or record.anchors & left:
                found.append(other)
                left &= ~record.anchors
        return tuple(found)


class Persister:
    """Decides for one rank; ``parallel`` snapshots are uploaded at a time."""

    def __init__(self, cadence: Cadence, *, parallel: int = 2) -> None:
        self.cadence = cadence
        self._parallel = parallel
        self._now_s = 0.0
        self._effects: list[Effect] = []
        self._epoch, self._epoch_start, self._span = -1, -1, 1
        self._newest: Mapping[int, SlotRecord] = {}
        self._num_operators = self._total = 0
        self._phase = PersistPhase.UNTOLD
        self._current: _Checkpoint | None = None
        self._stored: dict[SnapshotKey, None] = {}
        self._last_looked_at = -1
        self._flush = False
        self._overtaken = 0
        self._failures, self._not_before_s = 0, 0.0
        # The ends of the newest checkpoints that this rank has committed, and that all ranks have.
        self._written = self._durable = -1
        self._skipped = self._abandoned = 0
        self._uploaded_bytes, self._last_s, self._reason = 0, 0.0, ""

    @validated
    def handle(self, event: Event, *, now_s: float) -> list[Effect]:
        """The effects of an event, in the order in which to perform them."""
        self._now_s, self._effects = now_s, []
        match event:
            case Joined():
                self._join(event)
            case Durable(end):
                self._durable, self._written = max(self._durable, end), max(self._written, end)
            case SlotTables():
                self._take_tables(event)
            case Flush():
                self._flush = self._phase is not PersistPhase.FENCED
            case Forgotten():
                self._forget()
            case Fenced(reason):
                self._fence(reason)
            case Tick():
                pass
            case _:
                self._take_answer(event)
        self._begin_due()
        self._store_more()
        return self._effects

    def _take_answer(self, event: _Answer) -> None:
        """Take what the store or the ring reports of a snapshot, or of the whole checkpoint."""
        match event:
            case SnapshotStored(key, uploaded_bytes, for_later):
                self._uploaded_bytes += uploaded_bytes
                asked = self._current is not None and key in self._current.asked
                if for_later or asked:
                    self._note_stored(key)
                if self._current is not None and asked and not for_later:
                    self._current.own.add(key)
            case StoreFailed(key, reason):
                if self._wants(key):
                    self._fail(reason)
            case SlotReused(key):
                if self._wants(key):
                    self._overtake(f"iteration {key.iteration} was overwritten")
            case Committed(key):
                self._finish(key)
            case CommitFailed(key, reason):
                if self._current is not None and self._current.last == key:
                    self._fail(reason)

    @property
    def phase(self) -> PersistPhase:
        """The state of the machine."""
        return self._phase

    @property
    def idle(self) -> bool:
        """Whether nothing is under way or asked for."""
        return self._current is None and not self._flush

    def state(self) -> PersistState:
        """How far this rank is."""
        current, newest = self._current, max(self._newest, default=-1)
        stored = 0 if current is None else sum(key in self._stored for key in current.records)
        return PersistState(
            under_way=-1 if current is None else current.end,
            stored=stored,
            of=0 if current is None else len(current.records),
            committed=self._durable,
            stride=self.cadence.stride,
            skipped=self._skipped,
            abandoned=self._abandoned,
            lag_iterations=max(0, newest - self._durable) if self._durable >= 0 else newest + 1,
            uploaded_bytes=self._uploaded_bytes,
            last_s=self._last_s,
            reason=self._reason,
        )

    def _on(self, event: PersistEvent) -> None:
        """Make a transition; release the slots of a checkpoint that ends."""
        self._phase = TRANSITIONS.after(self._phase, event)
        if self._phase not in _UNDER_WAY and self._current is not None:
            self._effects += [Release(key) for key in sorted(self._current.held)]
            for key in self._current.own:
                self._stored.pop(key, None)
            self._current = None

    def _validate(self) -> None:
        """The slots that are held are those of the checkpoint that are not stored yet."""
        current, phase = self._current, self._phase
        assert (current is not None) == (phase in _UNDER_WAY), f"{phase} with {current}"
        assert phase is not PersistPhase.UNTOLD or not self._newest, "slots are believed in"
        assert phase is not PersistPhase.FENCED or not self._flush, "fenced, and to be flushed"
        assert self._durable <= self._written, "all ranks have what this one did not write"
        if current is None:
            return
        missing = {key for key in current.records if key not in self._stored}
        assert current.held == missing, f"held {current.held}, not stored {missing}"
        assert (phase is PersistPhase.COMMITTING) == (not missing), f"{phase}, lacks {missing}"
        assert len(current.asked & missing) <= self._parallel

    # -- events ----------------------------------------------------------------------------------

    def _join(self, event: Joined) -> None:
        if (event.epoch, event.epoch_start) != (self._epoch, self._epoch_start):
            self._on(PersistEvent.JOIN)
            self._forget_slots()  # some may belong to a history that was abandoned
            self._flush = False
            self._overtaken = self._failures = 0
            self._not_before_s, self._last_looked_at = 0.0, -1
            # Checkpoints that end later belong to a history that was abandoned.
            self._durable = self._durable if self._durable <= event.epoch_start else -1
            self._written = self._written if self._written <= event.epoch_start else self._durable
        self._epoch, self._epoch_start, self._span = event.epoch, event.epoch_start, event.span

    def _forget_slots(self) -> None:
        self._newest = {}
        self._stored.clear()

    def _take_tables(self, event: SlotTables) -> None:
        known = {self._epoch: self._epoch_start} if self._epoch >= 0 else {}
        self._newest = newest_by_iteration(event.records, known)
        self._num_operators, self._total = event.num_operators, event.total
        self._on(PersistEvent.TOLD)
        current = self._current
        if current is None or self._phase is PersistPhase.COMMITTING:
            return
        there = {key_of(record) for record in self._newest.values()}
        gone = [k for k in current.records if k not in there and k not in self._stored]
        if gone:
            self._overtake(f"iteration {gone[0].iteration} is gone from memory")
        elif not current.firm and self._crowded(current):
            self._overtake("its slots are needed for newer snapshots")

    def _crowded(self, current: _Checkpoint) -> bool:
        """Whether the held slots and the newest suffix leave too few for the trainer to continue."""
        newest = self._suffix()
        if newest is None:
            return False
        kept = {key_of(record) for record in newest.records}
        beyond = sum(key not in kept for key in current.held)
        return len(kept | current.held) + 2 > self._total and beyond > 0

    def _note_stored(self, key: SnapshotKey) -> None:
        self._stored[key] = None
        while len(self._stored) > _REMEMBERED:
            del self._stored[next(iter(self._stored))]
        if self._current is not None and key in self._current.held:
            self._current.held.discard(key)
            self._effects.append(Release(key))

    def _finish(self, key: SnapshotKey) -> None:
        current = self._current
        if current is None or current.last != key:
            return  # it is committed, but this history does not wait for it
        self._last_s = self._now_s - current.begun_s
        self.cadence.note_upload(self._last_s)
        self._written, self._reason = current.end, ""
        self._overtaken = self._failures = 0
        self._not_before_s = 0.0
        self._on(PersistEvent.COMMITTED)

    def _fail(self, reason: str) -> None:
        current = self._current
        assert current is not None
        pause_s = min(_BACKOFF_S * 2**self._failures, _BACKOFF_MAX_S)
        self._failures += 1
        self._not_before_s = self._now_s + pause_s
        self._try_again(current)
        self._abandon(current, f"{reason}; the next is tried in {pause_s:.0f} s or later")

    def _try_again(self, failed: _Checkpoint) -> None:
        """Keep it due until a newer one is: after the trainer's end no other falls due."""
        self._last_looked_at = min(self._last_looked_at, failed.end - 1)
        self._flush = self._flush or failed.flush

    def _forget(self) -> None:
        self._forget_slots()
        if self._current is not None:
            self._try_again(self._current)
        self._on(PersistEvent.FORGET)

    def _fence(self, reason: str) -> None:
        if self._phase is not PersistPhase.FENCED:
            self._effects.append(Note("error", "persist.fenced", f"nothing more is made durable: {reason}"))
        self._flush, self._reason = False, reason
        self._on(PersistEvent.FENCE)

    def _overtake(self, reason: str) -> None:
        current = self._current
        assert current is not None
        self._overtaken += 1
        hint = "storage is slower than training and the ring has too few slots: give the daemon more memory"
        if current.flush:  # no other falls due after it
            self._fail(reason)
        else:
            self._abandon(current, f"{reason} ({hint})")

    def _abandon(self, current: _Checkpoint, reason: str) -> None:
        self._abandoned += 1
        self._reason = reason
        text = f"checkpoint {current.end} is not stored: {reason}"
        self._effects.append(Note("warning", "persist_abandoned", text))
        self._on(PersistEvent.ABANDON)

    def _wants(self, key: SnapshotKey) -> bool:
        return self._current is not None and key in self._current.records

    # -- what is next ----------------------------------------------------------------------------

    def _store_more(self) -> None:
        current = self._current
        if current is None or self._phase is PersistPhase.COMMITTING:
            return
        waiting = [key for key in current.records if key not in self._stored]
        if not waiting:
            self._on(PersistEvent.STORED)
            self._effects.append(Commit(current.end, self.cadence.stride, tuple(current.records)))
            return
        free = self._parallel - sum(key in current.asked for key in waiting)
        # All ranks that store this iteration must decide the same; only a flush ends at an iteration that is
        # no multiple of `every`.
        expected = current.end % self.cadence.every == 0
        phases = tuple([(key, record.phase) for key, record in current.records.items() if expected])
        for key in [key for key in waiting if key not in current.asked][: max(0, free)]:
            current.asked.add(key)
            self._effects.append(Store(key, current.records[key], current.newer_than(key), phases))

    def _begin_due(self) -> None:
        end = self._due()
        if end is None:
            return
        if self._current is not None:
            if end > self._current.end:
                self._last_looked_at = end
                self._skipped += 1
            return
        if self._now_s < self._not_before_s:
            return
        suffix = self._suffix(end)
        if suffix is not None:
            self._last_looked_at = end
            self._begin(suffix.records)
        # Until then one of its snapshots may still be in the digest.
        elif max(self._newest) > end + _LATE:
            self._last_looked_at = end

    def _due(self) -> int | None:
        """The newest iteration that is due and was not looked at yet."""
        if self._phase in (PersistPhase.UNTOLD, PersistPhase.FENCED):
            return None
        if self._flush and self._current is None:
            newest = self._suffix()
            if newest is not None and newest.end > self._written:
                return newest.end
            self._flush = False  # it is stored already, or there is none
        first = max(self._last_looked_at, self._written) + 1
        return max((i for i in self._newest if i >= first and self.cadence.due(i)), default=None)

    def _begin(self, records: Sequence[SlotRecord]) -> None:
        by_key = {key_of(record): record for record in records}
        firm = self._overtaken >= _FIRM_AFTER
        held = {key for key in by_key if key not in self._stored}
        self._on(PersistEvent.BEGIN)
        self._current = _Checkpoint(by_key, self._now_s, firm, held, self._flush)
        self._flush = False
        if firm:
            self._overtaken = 0
            text = (
                f"checkpoint {records[-1].iteration} keeps its slots until it is stored: newer snapshots may "
                "have to wait for it; more memory for the daemon would prevent that"
            )
            self._effects.append(Note("warning", "persist_firm", text))
        self._effects += [Hold(key, by_key[key]) for key in by_key if key in held]

    def _suffix(self, end: int | None = None) -> Suffix | None:
        return spanning_suffix(self._newest, self._num_operators, self._span, end=end)


# -- the cadence ---------------------------------------------------------------------------------

_MAX_DOUBLINGS = 40
UPLOAD_HEADROOM = 1.25
"""Uploads may take at most 1 / 1.25 of the available time."""
_SHRINK_AT = 0.4  # how well a shorter stride must fit, lest strides alternate
_MEASURED = 9
_STRIKES = 2
_FOLLOW = 16  # checkpoints for which a rank keeps the longer stride of the others


@dataclass(slots=True)
class Cadence:
    """Which iterations are persisted. Times are given in; there is no clock.

    A checkpoint needs the same iteration on all ranks, and there is no leader. So every rank persists the
    iterations that are multiples of its *stride*, and a stride is ``every * 2**j``: the multiples of a larger
    stride are among those of a smaller one. Ranks with different measurements therefore meet at the multiples
    of the largest stride, without a message. What a faster rank uploads in between is never committed and is
    collected later; that this happens makes the rank take longer strides, too.

    Args:
        every: the user's minimum of iterations between checkpoints (1: as often as can be sustained).
        every_s: the user's minimum of seconds between checkpoints.
    """

    every: int = 1
    every_s: float = 0.0
    _doublings: int = 0
    _followed: int = 0  # the doublings that the other ranks seem to need
    _follow_left: int = 0
    _strikes: int = 0
    _iterations_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MEASURED))
    _uploads_s: deque[float] = field(default_factory=lambda: deque(maxlen=3))

    def __post_init__(self) -> None:
        if self.every < 1 or self.every_s < 0:
            raise ValueError(f"every {self.every} iterations, {self.every_s} s")

    @property
    def stride(self) -> int:
        """Its multiples are persisted."""
        return self.every << max(self._doublings, self._followed)

    @property
    def iteration_s(self) -> float:
        """Seconds per iteration; 0 until measured."""
        return median(self._iterations_s) if self._iterations_s else 0.0

    def due(self, iteration: int) -> bool:
        """Whether to persist the suffix that ends at this iteration."""
        return iteration > 0 and iteration % self.stride == 0

    def note_iterations(self, count: int, seconds: float) -> None:
        """``count`` iterations took ``seconds``."""
        if count > 0 and seconds > 0:
            self._iterations_s.append(seconds / count)
            self._adapt()

    def note_upload(self, seconds: float) -> None:
        """A checkpoint took ``seconds`` from its first byte to its manifest."""
        self._uploads_s.append(max(0.0, seconds))
        self._adapt()

    def note_committed(self, iteration: int) -> None:
        """All ranks have this checkpoint."""
        self._strikes = 0
        if self._follow_left:
            self._follow_left -= 1
            if not self._follow_left:
                self._followed = 0

    def note_left_alone(self, iteration: int) -> None:
        """The other ranks did not persist this iteration, although they had the time."""
        current = max(self._doublings, self._followed)
        if iteration % (self.every << (current + 1)) == 0:
            return  # a longer stride would have included it: the reason is another one
        self._strikes += 1
        if self._strikes >= _STRIKES:
            self._strikes = 0
            self._followed = min(current + 1, _MAX_DOUBLINGS)
            self._follow_left = _FOLLOW

    def _adapt(self) -> None:
        if not self.iteration_s:
            return
        needed_s = max(self.every_s, UPLOAD_HEADROOM * max(self._uploads_s, default=0.0))
        while self._spacing_s(self._doublings) < needed_s and self._doublings < _MAX_DOUBLINGS:
            self._doublings += 1
        # The user's wish is exact; measurements vary.
        margin = 2 * _SHRINK_AT if self._uploads_s else 1.0
        while self._doublings and needed_s <= self._spacing_s(self._doublings - 1) * margin:
            self._doublings -= 1

    def _spacing_s(self, doublings: int) -> float:
        return (self.every << doublings) * self.iteration_s
