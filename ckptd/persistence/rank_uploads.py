"""The shell around `ckptd.core.persister`: performs what it decides for one local rank.

Lives on the daemon's loop thread. A slot is held by a read lock of a description of its own while
it is uploaded, so that the trainer passes it over; the store keeper takes one more, for the case
that this daemon dies before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from ckptd.core.persister import (
    Commit,
    CommitFailed,
    Committed,
    Durable,
    Effect,
    Event,
    Fenced,
    Flush,
    Forgotten,
    Persister,
    PersistState,
    SlotReused,
    SlotTables,
    SnapshotStored,
    Store,
    StoreFailed,
)
from ckptd.core.sessions import RankKey
from ckptd.core.slots.ring import SlotRecord, SlotState
from ckptd.core.slots.slots import Hold, Joined, Note, Release, SnapshotKey, Tick
from ckptd.event_log import EventLog
from ckptd.memory.inventory import records_of
from ckptd.memory.segment_store import SegmentStore
from ckptd.memory.slot_holds import SlotHolds
from ckptd.persistence import keeper_wire as w
from ckptd.persistence.keeper_client import AWAY, StoreChild

__all__ = ["RankPersistence"]

_OPEN_AGAIN_S = 5.0
_MEASURE_S = 1.0


class RankPersistence:
    """Brings one rank's snapshots to storage.

    Args:
        child: the store keeper.
        span: how many snapshots the longest suffix of all ranks has, as far as it is known.
    """

    def __init__(
        self,
        key: RankKey,
        core: Persister,
        store: SegmentStore,
        child: StoreChild,
        events: EventLog,
        *,
        span: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self.key, self.core = key, core
        self._name = w.RankName(key.job, key.run, key.rank)
        self._store, self._child, self._events = store, child, events
        self._span, self._clock = span, clock
        self._world_size, self._epoch, self._epoch_start = 1, -1, -1
        self._holds = SlotHolds(store, key)
        self._waiting: deque[Event] = deque()
        self._feeding = False
        self._opened = self._opening = self._refused = self._closed = self._flush = False
        self._open_failed = False
        self._open_at_s = 0.0
        self._seen: tuple[int, float] | None = None  # iteration, when: for the pace of training
        self._had_segments = False

    def join(self, world_size: int, epoch: int, epoch_start: int) -> None:
        """Another history has begun, or the same goes on.

        What is held of the old one is let go now, whenever the store will answer.
        """
        self._world_size = world_size
        if (epoch, epoch_start) != (self._epoch, self._epoch_start):
            self._epoch, self._epoch_start = epoch, epoch_start
            self._opened = self._refused = self._open_failed = self._flush = False
            self._seen = None
            self._open()
        self._tell_epoch()
        self.changed()

    def changed(self) -> None:
        """Slots of the rank were sealed, or came or went."""
        segments = self._store.of_rank(self.key)
        self._had_segments = self._had_segments or bool(segments)
        if not segments or not self._opened:
            return
        total = sum(segment.geometry.num_slots for segment in segments)
        found = records_of(segments)
        records = tuple(record for record in found if record.sealed)
        self._measure(records)
        self.feed(SlotTables(records, segments[-1].descriptor.num_operators, total))
        if self._flush and not any(record.state is SlotState.FILLED for record in found):
            self._flush = False
            self.feed(Flush())

    def flush(self) -> None:
        """Persist what is newest, once what the trainer filled last is sealed."""
        self._flush = True
        self.changed()

    def tick(self) -> None:
        """Time passed."""
        if not self._opened and not self._refused and self._clock() >= self._open_at_s:
            self._open()
        self.changed()  # a trainer seals its own slots while we are away
        self.feed(Tick())

    def keeper_died(self) -> None:
        """It knows nothing any more."""
        self._opened = self._opening = False
        self._open_at_s = self._clock() + 1.0
        self.feed(Forgotten())

    def settled(self, message: w.Settled) -> None:
        """All ranks have the checkpoint, or some did not come."""
        if message.complete:
            self.core.cadence.note_committed(message.end)
            if message.epoch == self._epoch:
                self.feed(Durable(message.end))
            if self.key.rank == 0:
                text = f"checkpoint {message.end} is durable on all {self._world_size} ranks"
                self._events.add("info", "persisted", text, self.key)
        else:
            self.core.cadence.note_left_alone(message.end)
            text = f"checkpoint {message.end} does not count: {message.missing}"
            self._events.add("warning", "persist_incomplete", text, self.key)

    def fenced(self, message: w.RankFenced) -> None:
        """After a manifest of ours a later history was seen."""
        if message.epoch > self._epoch:  # else we have joined it meanwhile
            self._fence(message.reason)

    def state(self) -> PersistState:
        """For `ckptctl status`."""
        return self.core.state()

    @property
    def over(self) -> bool:
        """Whether its memory was given back. A rank that has just joined has none yet."""
        return self._had_segments and not self._store.of_rank(self.key)

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way, or can be."""
        if self._refused or self._open_failed:
            return True
        return self.core.idle and not self._flush

    def close(self) -> None:
        """Let all slots go."""
        self._closed = True
        self._holds.release_all()

    def feed(self, event: Event) -> None:
        """An event, and what follows from it; an event that follows from an effect comes after all
        effects.
        """
        self._waiting.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._waiting and not self._closed:
                for effect in self.core.handle(self._waiting.popleft(), now_s=self._clock()):
                    self._perform(effect)
        finally:
            self._feeding = False

    # -- the store keeper ------------------------------------------------------------------------

    def _open(self) -> None:
        if self._opening or self._epoch < 0:
            return
        self._opening = True
        self._open_at_s = self._clock() + _OPEN_AGAIN_S
        epoch = self._epoch
        message = w.OpenRank(self._child.next_id(), self._name, epoch, self._epoch_start)
        self._child.ask(message, partial(self._was_opened, epoch), partial(self._not_opened, epoch))

    def _was_opened(self, epoch: int, reply: w.RunOpened) -> None:
        self._opening = self._open_failed = False
        if epoch != self._epoch:
            self._open()
            return
        self._opened = True
        self._tell_epoch()
        self.feed(Durable(reply.committed))
        self.changed()

    def _not_opened(self, epoch: int, code: str, reason: str) -> None:
        self._opening = False
        if code == AWAY:
            return  # it is started again, and asked again
        if epoch != self._epoch:
            self._open()  # the answer is about a history that was left
        elif code == w.FailureCode.FENCED:
            self._fence(reason)
        else:
            self._open_failed = True
            text = f"nothing of {self.key} is made durable: {reason}; trying again"
            self._events.add("warning", f"persist.{code}", text, self.key)

    def _fence(self, reason: str) -> None:
        """Somebody else writes under our names: nothing more is stored until another epoch is joined."""
        self._opened, self._refused, self._flush = False, True, False
        self.feed(Fenced(reason))

    def _tell_epoch(self) -> None:
        self.feed(Joined(self._epoch, self._epoch_start, self._span()))

    # -- effects ---------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Hold):
            if not self._holds.hold(effect.key, effect.record):
                self.feed(SlotReused(effect.key))
        elif isinstance(effect, Release):
            self._holds.release(effect.key)
        elif isinstance(effect, Store):
            self._ask_to_store(effect.key)
        elif isinstance(effect, Commit):
            self._ask_to_commit(effect)
        elif isinstance(effect, Note):
            self._events.add(effect.level, effect.kind, effect.message, self.key)

    def _ask_to_store(self, key: SnapshotKey) -> None:
        held = self._holds.get(key)
        if held is None:
            return  # the core was told when it could not be held
        message = w.StoreSlot(
            self._child.next_id(),
            self._name,
            w.SnapshotId(*key),
            str(held.segment.path),
            held.index,
        )

        def stored(reply: w.StoredSlot) -> None:
            self._events.count("persisted_bytes", reply.uploaded_bytes)
            self._events.count("persist_spared_bytes", reply.size_bytes - reply.uploaded_bytes)
            self.feed(SnapshotStored(key, reply.uploaded_bytes))

        def refused(code: str, reason: str) -> None:
            # Of the keeper's end `keeper_died` tells. What is lost although it is held is damaged,
            # or its file is gone.
            if code != AWAY:
                self.feed(StoreFailed(key, reason))

        self._child.ask(message, stored, refused)

    def _ask_to_commit(self, effect: Commit) -> None:
        last, epoch = effect.keys[-1], self._epoch
        segment = self._store.get(self.key, last.generation)
        if segment is None:
            self.feed(CommitFailed(last, "its generation was dropped"))
            return
        message = w.CommitRank(
            self._child.next_id(),
            self._name,
            self._world_size,
            effect.end,
            effect.stride,
            [w.SnapshotId(*key) for key in effect.keys],
            segment.raw_descriptor(),
            segment.geometry.slot_bytes,
            segment.descriptor.window,
            segment.geometry.num_slots,
        )

        def refused(code: str, reason: str) -> None:
            if code == w.FailureCode.UNKNOWN:
                self.feed(Forgotten())
            elif code == w.FailureCode.FENCED and epoch == self._epoch:
                self._fence(reason)
            elif code != AWAY:
                self.feed(CommitFailed(last, reason))

        self._child.ask(message, lambda _: self.feed(Committed(last)), refused)

    # -- the pace --------------------------------------------------------------------------------

    def _measure(self, records: tuple[SlotRecord, ...]) -> None:
        """How long an iteration takes, from how far the rank has come."""
        newest, now_s = max((r.iteration for r in records), default=-1), self._clock()
        if self._seen is None or newest < self._seen[0]:
            self._seen = newest, now_s
            return
        iteration, at_s = self._seen
        if newest > iteration and now_s - at_s >= _MEASURE_S:
            self.core.cadence.note_iterations(newest - iteration, now_s - at_s)
            self._seen = newest, now_s
