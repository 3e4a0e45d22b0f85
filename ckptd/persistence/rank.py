"""The shell around `ckptd.persistence.core`: performs what it decides for one local rank.

Lives on the daemon's loop thread. A slot is held by a read lock of a description of its own while it is uploaded, so that the
trainer passes it over; the store keeper takes one more, for the case that this daemon dies before it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from ckptd.events import EventLog
from ckptd.memory import locks
from ckptd.memory.inventory import records_of
from ckptd.memory.ring import SlotRecord, SlotState
from ckptd.memory.segment_format import slot_lock_byte
from ckptd.memory.segments import SegmentStore
from ckptd.persistence import wire as w
from ckptd.persistence.child import AWAY, StoreChild
from ckptd.persistence.core import (
    Commit,
    CommitFailed,
    Committed,
    Durable,
    Effect,
    Event,
    Flush,
    Forgotten,
    Hold,
    Joined,
    Lost,
    Note,
    Persister,
    PersistState,
    Release,
    Slots,
    Store,
    Stored,
    StoreFailed,
    Tick,
)
from ckptd.replication.events import SnapshotKey
from ckptd.sessions import RankKey

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
        world_size: int,
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
        self._world_size = world_size
        self._store, self._child, self._events = store, child, events
        self._span, self._clock = span, clock
        self._epoch, self._epoch_start = -1, -1
        self._held: dict[SnapshotKey, int] = {}
        self._opened = self._opening = self._refused = self._closed = self._flush = False
        self._open_at_s = 0.0
        self._seen: tuple[int, float] | None = None  # iteration, when: for the pace of training
        self._had_segments = False

    def join(self, epoch: int, epoch_start: int) -> None:
        """Another history has begun, or the same goes on."""
        if (epoch, epoch_start) != (self._epoch, self._epoch_start):
            self._epoch, self._epoch_start = epoch, epoch_start
            self._opened = self._refused = self._flush = False
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
        self.feed(Slots(records, segments[-1].descriptor.num_operators, total))
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
            if self.key.rank == 0:
                text = f"checkpoint {message.end} is durable on all {self._world_size} ranks"
                self._events.add("info", "persisted", text, self.key)
        else:
            self.core.cadence.note_left_alone(message.end)
            text = f"checkpoint {message.end} does not count: {message.missing}"
            self._events.add("warning", "persist_incomplete", text, self.key)

    def state(self) -> PersistState:
        """For `ckptctl status`."""
        return self.core.state()

    @property
    def over(self) -> bool:
        """Whether its memory was given back. A rank that has just joined has none yet."""
        return self._had_segments and not self._store.of_rank(self.key)

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way."""
        return not self._opened or (self.core.idle and not self._flush)

    def close(self) -> None:
        """Let all slots go."""
        self._closed = True
        for key in list(self._held):
            self._release(key)

    def feed(self, event: Event) -> None:
        """An event, and what follows from it."""
        if self._closed:
            return
        for effect in self.core.handle(event, now_s=self._clock()):
            self._perform(effect)

    # -- the store keeper ------------------------------------------------------------------------

    def _open(self) -> None:
        if self._opening or self._epoch < 0:
            return
        self._opening = True
        self._open_at_s = self._clock() + _OPEN_AGAIN_S
        message = w.OpenRank(
            self._child.next_id(), self._name, self._world_size, self._epoch, self._epoch_start
        )
        self._child.ask(message, partial(self._was_opened, self._epoch), self._not_opened)

    def _was_opened(self, epoch: int, reply: w.Opened) -> None:
        self._opening = False
        if epoch != self._epoch:
            self._open()
            return
        self._opened = True
        self._tell_epoch()
        self.feed(Durable(reply.committed))
        self.changed()

    def _not_opened(self, code: str, reason: str) -> None:
        self._opening = False
        if code == AWAY:
            return  # it is started again, and asked again
        self._refused = code == w.FailureCode.FENCED
        level, again = ("error", "") if self._refused else ("warning", "; trying again")
        text = f"nothing of {self.key} is made durable: {reason}{again}"
        self._events.add(level, f"persist.{code}", text, self.key)

    def _tell_epoch(self) -> None:
        if self._opened:
            self.feed(Joined(self._epoch, self._epoch_start, self._span()))

    # -- effects ---------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Hold):
            self._hold(effect.key, effect.record)
        elif isinstance(effect, Release):
            self._release(effect.key)
        elif isinstance(effect, Store):
            self._ask_to_store(effect.key, effect.record)
        elif isinstance(effect, Commit):
            self._ask_to_commit(effect)
        elif isinstance(effect, Note):
            self._events.add(effect.level, effect.kind, effect.message, self.key)

    def _ask_to_store(self, key: SnapshotKey, record: SlotRecord) -> None:
        segment = self._store.get(self.key, key.generation)
        if segment is None or key not in self._held:
            self.feed(Lost(key))
            return
        message = w.StoreSlot(
            self._child.next_id(),
            self._name,
            w.SnapshotId(*key),
            str(segment.path),
            record.index,
        )

        def stored(reply: w.StoredSlot) -> None:
            self._events.count("persisted_bytes", reply.uploaded_bytes)
            self._events.count("persist_spared_bytes", reply.size_bytes - reply.uploaded_bytes)
            self.feed(Stored(key, reply.size_bytes, reply.uploaded_bytes))

        def refused(code: str, reason: str) -> None:
            if code == w.FailureCode.LOST:
                self.feed(Lost(key))
            elif code != AWAY:  # of that `keeper_died` tells
                self.feed(StoreFailed(key, reason))

        self._child.ask(message, stored, refused)

    def _ask_to_commit(self, effect: Commit) -> None:
        segment = self._store.get(self.key, effect.keys[-1].generation)
        if segment is None:
            self.feed(CommitFailed(effect.end, "its generation was dropped"))
            return
        told = segment.descriptor
        message = w.CommitRank(
            self._child.next_id(),
            self._name,
            self._world_size,
            self._epoch,
            self._epoch_start,
            effect.start,
            effect.end,
            effect.stride,
            [w.SnapshotId(*key) for key in effect.keys],
            segment.raw_descriptor(),
            segment.geometry.slot_bytes,
            told.window,
            segment.geometry.num_slots,
        )

        def refused(code: str, reason: str) -> None:
            if code == w.FailureCode.UNKNOWN:
                self.feed(Forgotten())
            elif code != AWAY:
                self.feed(CommitFailed(effect.end, reason))

        self._child.ask(message, lambda _: self.feed(Committed(effect.end)), refused)

    # -- slots -----------------------------------------------------------------------------------

    def _hold(self, key: SnapshotKey, record: SlotRecord) -> None:
        """Keep the trainer from reusing the slot; if it was quicker, the core is told when it asks to store."""
        segment = self._store.get(self.key, key.generation)
        if segment is None or key in self._held:
            return
        fd = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
        if locks.try_lock(fd, slot_lock_byte(record.index), exclusive=False):
            header = segment.header(record.index)
            sealed = header is not None and header.state is SlotState.SEALED
            if sealed and header is not None and header.sequence == key.sequence:
                self._held[key] = fd
                return
        os.close(fd)

    def _release(self, key: SnapshotKey) -> None:
        fd = self._held.pop(key, None)
        if fd is not None:
            os.close(fd)

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
