"""What of one rank goes to storage, and when (pure: events in, effects out; DESIGN §5, §11).

A *checkpoint* is the complete suffix that ends at an iteration which the cadence names. Its
snapshots are held (the trainer passes over slots with a reader) and stored oldest first; what an
earlier checkpoint stored already is not stored again. When all are stored, this rank's manifest is
committed. One checkpoint is under way at a time: those that fall due meanwhile are skipped, and the
cadence takes longer strides.

The trainer never waits for storage, so what is held must not be what it needs next: beyond the
newest suffix the ring has some spare slots, and when more than those would be held, the checkpoint
is *overtaken*: it is given up. Is that so twice in a row, the next one is *firm*: it keeps its
slots, and for as long as it takes the ring may have none for new snapshots (training goes on all
the same, and the suffix that is held is complete). That is reported; more memory is the cure.

What fails in the store is retried there; what it finally refuses gives the checkpoint up, and the
newest that is due then (the same one, where nothing is trained any more) is tried after a while
that doubles each time. A flush stays due whatever becomes of it, until the newest suffix is stored
or there is none.

What is believed of the store holds for one epoch and one life of who stores: after either, nothing
is begun before the slots were told anew. Where the store shows that the names are another's
(`Fenced`), nothing is begun until another epoch is joined.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

from ckptd.core.replication.replicas import spanning_suffix
from ckptd.core.slots.ring import SlotRecord, newest_by_iteration
from ckptd.core.slots.slots import Hold, Joined, Note, Release, SnapshotKey, Tick, key_of
from ckptd.core.state_machine import MachineState, Transitions, validated

__all__ = [
    "TRANSITIONS",
    "Cadence",
    "Commit",
    "CommitFailed",
    "Committed",
    "Durable",
    "Effect",
    "Event",
    "Fenced",
    "Flush",
    "Forgotten",
    "PersistEvent",
    "PersistPhase",
    "PersistState",
    "Persister",
    "SlotReused",
    "SlotTables",
    "SnapshotStored",
    "Store",
    "StoreFailed",
]


_MAX_DOUBLINGS = 40
_HEADROOM = 1.25  # uploads shall take at most 1 / 1.25 of the time there is
_SHRINK_AT = 0.4  # a shorter stride must fit so well, or strides would go to and fro
_MEASURED = 9
_STRIKES = 2
_FOLLOW = 16  # so many checkpoints a rank keeps the longer stride of the others before it tries its own again


@dataclass(slots=True)
class Cadence:
    """Which iterations are persisted.

    Args:
        every: iterations between checkpoints that the user wants at least (1: as often as can be sustained).
        every_s: seconds between checkpoints that the user wants at least.
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
        """Multiples of it are persisted."""
        return self.every << max(self._doublings, self._followed)

    def due(self, iteration: int) -> bool:
        """Whether the suffix that ends at this iteration shall be persisted."""
        return iteration > 0 and iteration % self.stride == 0

    @property
    def iteration_s(self) -> float:
        """Seconds per iteration; 0 until measured."""
        return median(self._iterations_s) if self._iterations_s else 0.0

    def note_iterations(self, count: int, seconds: float) -> None:
        """``count`` iterations took so long."""
        if count > 0 and seconds > 0:
            self._iterations_s.append(seconds / count)
            self._adapt()

    def note_upload(self, seconds: float) -> None:
        """A checkpoint took so long, from its first byte to its manifest."""
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
        """The others did not persist this iteration, although they had the time."""
        current = max(self._doublings, self._followed)
        if iteration % (self.every << (current + 1)) == 0:
            return  # a longer stride would have taken it, too: their trouble is another
        self._strikes += 1
        if self._strikes >= _STRIKES:
            self._strikes = 0
            self._followed = min(current + 1, _MAX_DOUBLINGS)
            self._follow_left = _FOLLOW

    def _adapt(self) -> None:
        iteration_s = self.iteration_s
        if not iteration_s:
            return
        needed_s = max(self.every_s, _HEADROOM * max(self._uploads_s, default=0.0))
        while self._spacing_s(self._doublings) < needed_s and self._doublings < _MAX_DOUBLINGS:
            self._doublings += 1
        while self._doublings and needed_s <= self._shorter_fits_s():
            self._doublings -= 1

    def _shorter_fits_s(self) -> float:
        """What has to be at least needed for a stride half as long not to be taken."""
        shorter = self._spacing_s(self._doublings - 1)
        # The wish of the user is exact; what is measured varies.
        return shorter if not self._uploads_s else shorter * 2 * _SHRINK_AT

    def _spacing_s(self, doublings: int) -> float:
        return (self.every << doublings) * self.iteration_s


# -- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Durable:
    """All ranks have this checkpoint of this history in storage."""

    end: int


@dataclass(frozen=True, slots=True)
class SlotTables:
    """The rank's slot tables after a change; ``total`` counts the slots of all generations,
    whatever is in them.
    """

    records: tuple[SlotRecord, ...]
    num_operators: int
    total: int


@dataclass(frozen=True, slots=True)
class SnapshotStored:
    """A snapshot is in storage; so many bytes of it had to travel."""

    key: SnapshotKey
    uploaded_bytes: int


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """It is not, and trying again at once is of no use."""

    key: SnapshotKey
    reason: str


@dataclass(frozen=True, slots=True)
class SlotReused:
    """The trainer was quicker than we: the slot holds something else."""

    key: SnapshotKey


@dataclass(frozen=True, slots=True)
class Committed:
    """Our manifest of the checkpoint whose last snapshot is this one is in storage."""

    key: SnapshotKey


@dataclass(frozen=True, slots=True)
class CommitFailed:
    """It is not."""

    key: SnapshotKey
    reason: str


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Who stores was restarted, and knows nothing any more of what it has stored and is not committed."""


@dataclass(frozen=True, slots=True)
class Fenced:
    """The store shows that somebody else writes under our names: nothing more is stored until
    another epoch is joined.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Flush:
    """Persist the newest suffix, due or not: the rank has ended in order, or somebody asked."""


Event = (
    Joined
    | Durable
    | SlotTables
    | SnapshotStored
    | StoreFailed
    | SlotReused
    | Committed
    | CommitFailed
    | Forgotten
    | Fenced
    | Flush
    | Tick
)


# -- effects -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Store:
    """Bring this snapshot, which is held, to storage."""

    key: SnapshotKey
    record: SlotRecord


@dataclass(frozen=True, slots=True)
class Commit:
    """All snapshots of the checkpoint, oldest first, are stored: write the manifest."""

    end: int
    stride: int
    keys: tuple[SnapshotKey, ...]


Effect = Hold | Release | Store | Commit | Note


_FIRM_AFTER = 2
_BACKOFF_S, _BACKOFF_MAX_S = 5.0, 300.0
_LATE = 4  # iterations after which a suffix that is not complete will not be
_REMEMBERED = 4096  # snapshots that are known to be stored


class PersistPhase(MachineState):
    """How far one rank's way to storage is."""

    UNTOLD = "untold", "the slots were not told since the epoch began, or who stores was restarted"
    IDLE = "idle", "no checkpoint is under way"
    STORING = "storing", "the snapshots of a checkpoint are held, and stored"
    COMMITTING = "committing", "all are stored; the manifest is being written"
    FENCED = "fenced", "the store shows that the names are another's"


class PersistEvent(StrEnum):
    """What happens to it."""

    TOLD = "told"
    BEGIN = "begin"
    STORED = "stored"
    COMMITTED = "committed"
    ABANDON = "abandon"  # refused by the store, or overtaken by training
    FORGET = "forget"  # nothing is believed of the store any more
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
        # What falls due is told of all the same.
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


@dataclass(frozen=True, slots=True)
class PersistState:
    """For `ckptctl status` and metrics; -1: none yet.

    ``committed``: the newest checkpoint that all ranks are known to have in storage; the lag is
    counted from it.
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
    """The one that is under way; ``records`` are its snapshots, oldest first."""

    records: dict[SnapshotKey, SlotRecord]
    begun_s: float
    firm: bool
    held: set[SnapshotKey]
    flush: bool
    asked: set[SnapshotKey] = field(default_factory=set)

    @property
    def last(self) -> SnapshotKey:
        return next(reversed(self.records))

    @property
    def end(self) -> int:
        return self.last.iteration


class Persister:
    """Decides for one rank.

    Args:
        parallel: how many snapshots are on their way at a time.
    """

    def __init__(self, cadence: Cadence, *, parallel: int = 2) -> None:
        self.cadence = cadence
        self._parallel = parallel
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
        # The ends of what this rank has written its manifest of, and of what all ranks have.
        self._written = self._durable = -1
        self._skipped = self._abandoned = 0
        self._uploaded_bytes, self._last_s, self._reason = 0, 0.0, ""

    @validated
    def handle(self, event: Event, *, now_s: float) -> list[Effect]:
        """What follows from an event."""
        effects: list[Effect] = []
        match event:
            case Joined():
                self._join(event, effects)
            case Durable(end):
                self._durable, self._written = max(self._durable, end), max(self._written, end)
            case SlotTables():
                self._look(event, now_s, effects)
            case Flush():
                self._flush = self._phase is not PersistPhase.FENCED
            case SnapshotStored(key, uploaded_bytes):
                self._uploaded_bytes += uploaded_bytes
                self._note_stored(key)
                self._let_go(key, effects)
            case StoreFailed(key, reason):
                if self._wants(key):
                    self._fail(reason, now_s, effects)
            case SlotReused(key):
                if self._wants(key):
                    self._overtake(f"iteration {key.iteration} was overwritten", now_s, effects)
            case Committed(key):
                self._finish(key, now_s, effects)
            case CommitFailed(key, reason):
                if self._current is not None and self._current.last == key:
                    self._fail(reason, now_s, effects)
            case Forgotten():
                self._forget(effects)
            case Fenced(reason):
                self._fence(reason, effects)
            case Tick():
                pass
        self._go_on(now_s, effects)
        return effects

    @property
    def phase(self) -> PersistPhase:
        """Which state it is in; see the table."""
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

    def _on(self, event: PersistEvent, effects: list[Effect]) -> None:
        """Every transition goes through here; what was held for a checkpoint that ends is released."""
        self._phase = TRANSITIONS.after(self._phase, event)
        if self._phase not in _UNDER_WAY and self._current is not None:
            effects += [Release(key) for key in sorted(self._current.held)]
            self._current = None

    def _validate(self) -> None:
        """What is held is what has yet to be stored of the one checkpoint that is under way."""
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

    def _join(self, event: Joined, effects: list[Effect]) -> None:
        if (event.epoch, event.epoch_start) != (self._epoch, self._epoch_start):
            self._on(PersistEvent.JOIN, effects)
            self._forget_slots()  # some of it may be of a history that was left
            self._flush = False
            self._overtaken = self._failures = 0
            self._not_before_s, self._last_looked_at = 0.0, -1
            # What ends later is of a history that was left before it.
            self._written = self._written if self._written <= event.epoch_start else -1
            self._durable = self._durable if self._durable <= event.epoch_start else -1
        self._epoch, self._epoch_start, self._span = event.epoch, event.epoch_start, event.span

    def _forget_slots(self) -> None:
        """Nothing is begun before we are told of the slots again, and nothing is believed to be stored."""
        self._newest = {}
        self._stored.clear()

    def _look(self, event: SlotTables, now_s: float, effects: list[Effect]) -> None:
        known = {self._epoch: self._epoch_start} if self._epoch >= 0 else {}
        self._newest = newest_by_iteration(event.records, known)
        self._num_operators, self._total = event.num_operators, event.total
        self._on(PersistEvent.TOLD, effects)
        current = self._current
        if current is None or self._phase is PersistPhase.COMMITTING:
            return
        there = {key_of(record) for record in self._newest.values()}
        gone = [k for k in current.records if k not in there and k not in self._stored]
        if gone:
            self._overtake(f"iteration {gone[0].iteration} is gone from memory", now_s, effects)
        elif not current.firm and self._crowded(current):
            self._overtake("its slots are needed for newer snapshots", now_s, effects)

    def _crowded(self, current: _Checkpoint) -> bool:
        """Whether what is held, beside the newest suffix, leaves fewer slots than the trainer needs
        to go on.
        """
        newest = spanning_suffix(self._newest, self._num_operators, self._span)
        if newest is None:
            return False
        kept = {key_of(record) for record in newest.records}
        beyond = sum(key not in kept for key in current.held)
        return len(kept | current.held) + 2 > self._total and beyond > 0

    def _note_stored(self, key: SnapshotKey) -> None:
        self._stored[key] = None
        while len(self._stored) > _REMEMBERED:
            del self._stored[next(iter(self._stored))]

    def _finish(self, key: SnapshotKey, now_s: float, effects: list[Effect]) -> None:
        current = self._current
        if current is None or current.last != key:
            return  # committed all the same; this history does not wait for it
        self._last_s = now_s - current.begun_s
        self.cadence.note_upload(self._last_s)
        self._written, self._reason = current.end, ""
        self._overtaken = self._failures = 0
        self._not_before_s = 0.0
        self._on(PersistEvent.COMMITTED, effects)

    def _fail(self, reason: str, now_s: float, effects: list[Effect]) -> None:
        current = self._current
        assert current is not None
        pause_s = min(_BACKOFF_S * 2**self._failures, _BACKOFF_MAX_S)
        self._failures += 1
        self._not_before_s = now_s + pause_s
        self._try_again(current)
        self._abandon(current, f"{reason}; the next is tried in {pause_s:.0f} s or later", effects)

    def _try_again(self, failed: _Checkpoint) -> None:
        """Perhaps nothing falls due any more, because its trainer is gone: it is due until
        something newer is.
        """
        self._last_looked_at = min(self._last_looked_at, failed.end - 1)
        self._flush = self._flush or failed.flush

    def _forget(self, effects: list[Effect]) -> None:
        self._forget_slots()
        if self._current is not None:
            self._try_again(self._current)
        self._on(PersistEvent.FORGET, effects)

    def _fence(self, reason: str, effects: list[Effect]) -> None:
        if self._phase is not PersistPhase.FENCED:
            text = f"nothing more is made durable: {reason}"
            effects.append(Note("error", "persist.fenced", text))
        self._flush, self._reason = False, reason
        self._on(PersistEvent.FENCE, effects)

    def _overtake(self, reason: str, now_s: float, effects: list[Effect]) -> None:
        current = self._current
        assert current is not None
        self._overtaken += 1
        hint = "storage is slower than training and the ring has too few slots: give the daemon more memory"
        if current.flush:  # nothing falls due after it, so it is tried again
            self._fail(reason, now_s, effects)
        else:
            self._abandon(current, f"{reason} ({hint})", effects)

    def _abandon(self, current: _Checkpoint, reason: str, effects: list[Effect]) -> None:
        self._abandoned += 1
        self._reason = reason
        text = f"checkpoint {current.end} is not stored: {reason}"
        effects.append(Note("warning", "persist_abandoned", text))
        self._on(PersistEvent.ABANDON, effects)

    def _wants(self, key: SnapshotKey) -> bool:
        return self._current is not None and key in self._current.records

    def _let_go(self, key: SnapshotKey, effects: list[Effect]) -> None:
        if self._current is not None and key in self._current.held:
            self._current.held.discard(key)
            effects.append(Release(key))

    # -- what is next ----------------------------------------------------------------------------

    def _go_on(self, now_s: float, effects: list[Effect]) -> None:
        self._begin_due(now_s, effects)
        current = self._current
        if current is None or self._phase is PersistPhase.COMMITTING:
            return
        waiting = [key for key in current.records if key not in self._stored]
        if not waiting:
            self._on(PersistEvent.STORED, effects)
            effects.append(self._commit(current))
            return
        flying = sum(key in current.asked for key in waiting)
        for key in waiting:
            if flying >= self._parallel:
                return
            if key not in current.asked:
                current.asked.add(key)
                flying += 1
                effects.append(Store(key, current.records[key]))

    def _begin_due(self, now_s: float, effects: list[Effect]) -> None:
        end = self._due()
        if end is None:
            return
        if self._current is not None:
            self._skip(end)
            return
        if now_s < self._not_before_s:
            return
        suffix = spanning_suffix(self._newest, self._num_operators, self._span, end=end)
        if suffix is not None:
            self._last_looked_at = end
            self._begin(suffix.records, now_s, effects)
        # Until then one of its snapshots may still be being digested.
        elif max(self._newest) > end + _LATE:
            self._last_looked_at = end

    def _due(self) -> int | None:
        """The newest iteration that shall be persisted and was not looked at yet."""
        if self._phase in (PersistPhase.UNTOLD, PersistPhase.FENCED):
            return None
        if self._flush and self._current is None:
            newest = spanning_suffix(self._newest, self._num_operators, self._span)
            if newest is not None and newest.end > self._written:
                return newest.end
            self._flush = False  # it is stored already, or there is nothing
        first = max(self._last_looked_at, self._written) + 1
        return max((i for i in self._newest if i >= first and self.cadence.due(i)), default=None)

    def _skip(self, end: int) -> None:
        current = self._current
        assert current is not None
        if end > current.end:
            self._last_looked_at = end
            self._skipped += 1

    def _begin(self, records: Sequence[SlotRecord], now_s: float, effects: list[Effect]) -> None:
        by_key = {key_of(record): record for record in records}
        firm = self._overtaken >= _FIRM_AFTER
        held = {key for key in by_key if key not in self._stored}
        self._on(PersistEvent.BEGIN, effects)
        self._current = _Checkpoint(by_key, now_s, firm, held, self._flush)
        self._flush = False
        if firm:
            self._overtaken = 0
            text = (
                f"checkpoint {records[-1].iteration} keeps its slots until it is stored: newer "
                "snapshots may have to "
                "wait for it; more memory for the daemon would prevent that"
            )
            effects.append(Note("warning", "persist_firm", text))
        effects += [Hold(key, by_key[key]) for key in by_key if key in held]

    def _commit(self, current: _Checkpoint) -> Commit:
        return Commit(current.end, self.cadence.stride, tuple(current.records))
