"""Storage as the daemon's third tier: uploads of every local rank (`RankPersistence`), and the link
through which recoveries read from the store (`StorageTier`). All on the daemon's loop thread.

A `RankPersistence` performs what `ckptd.core.persister` decides for one local rank. It holds a
slot by a read lock while the slot is uploaded, so that the trainer passes the slot over. The store keeper
takes a read lock of its own, in case this daemon dies first.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from ckptd.config.settings import DaemonConfig, parse_bytes
from ckptd.core.persister import (
    Cadence,
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
from ckptd.core.slots.slots import Hold, Joined, Note, Release, SlotRecord, SlotState, SnapshotKey, Tick
from ckptd.core.snapshot_policy import PolicyKind
from ckptd.holdings import policy_of
from ckptd.memory.inventory import records_of
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_store import Mark
from ckptd.memory.slot_holds import HeldSnapshot, SlotHolds
from ckptd.node_context import NodeContext
from ckptd.persistence import keeper_wire as w
from ckptd.persistence.keeper_client import AWAY, StoreChild
from ckptd.persistence.store_link import StoreLink

_OPEN_AGAIN_S = 5.0
_MEASURE_S = 1.0


class RankPersistence:
    """Uploads one rank's snapshots.

    Args:
        child: the store keeper.
        span: the number of snapshots of the longest known suffix of all ranks.
    """

    def __init__(
        self, key: RankKey, node: NodeContext, child: StoreChild, *, span: Callable[[], int]
    ) -> None:
        self.key = key
        self.core = Persister(Cadence(node.config.persist_every, node.config.persist_every_s))
        self._name = w.RankName(key.job, key.run, key.rank)
        self._store, self._child, self._events = node.store, child, node.events
        self._span, self._clock = span, node.clock
        self._world_size, self._epoch, self._epoch_start = 1, -1, -1
        self._holds = SlotHolds(node.store, key)
        self._waiting: deque[Event] = deque()
        self._feeding = False
        self._opened = self._opening = self._refused = self._closed = self._flush = False
        self._open_trouble = ""  # why the store cannot be opened
        self._open_at_s = 0.0
        self._seen: tuple[int, float] | None = None  # newest iteration, when: for the speed of training
        self._had_segments = False
        self._mark: Mark | None = None  # of the slots that were looked at last; None: look at them

    def join(self, world_size: int, epoch: int, epoch_start: int) -> None:
        """Join a history; releases the slots of an earlier one at once, without waiting for the store."""
        self._world_size = world_size
        if (epoch, epoch_start) != (self._epoch, self._epoch_start):
            self._epoch, self._epoch_start = epoch, epoch_start
            self._opened = self._refused = self._flush = False
            self._open_trouble = ""
            self._seen = self._mark = None
            self._open()
        self._feed_epoch()
        self.changed()

    @property
    def epoch(self) -> int:
        """That it has joined; -1: none."""
        return self._epoch

    def changed(self) -> None:
        """The slots or segments of the rank changed."""
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
        """Persist the newest suffix, once the last filled slot is sealed."""
        self._flush = True
        self.changed()

    def tick(self) -> None:
        if not self._opened and not self._refused and self._clock() >= self._open_at_s:
            self._open()
        mark = self._store.mark_of(self.key)
        if mark != self._mark or self._flush or not self.core.idle:
            self._mark = mark
            self.changed()  # trainers seal their own slots while the daemon is down
        self.feed(Tick())

    def keeper_died(self) -> None:
        """The next keeper has no state: open the rank again."""
        self._opened = self._opening = False
        self._open_at_s = self._clock() + 1.0
        self._forgotten()

    def _forgotten(self) -> None:
        self._mark = None  # the core forgets the slots, too
        self.feed(Forgotten())

    def settled(self, message: w.Settled) -> None:
        """All ranks have committed a checkpoint, or some did not in time."""
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
        """The store shows a later history."""
        if message.epoch > self._epoch:  # else this rank has joined it meanwhile
            self._fence(message.reason)

    def state(self) -> PersistState:
        state = self.core.state()
        return replace(state, reason=self._open_trouble) if self._open_trouble else state

    @property
    def over(self) -> bool:
        """Whether the rank's segments were removed. A rank that has just joined has none yet."""
        return self._had_segments and not self._store.of_rank(self.key)

    @property
    def idle(self) -> bool:
        """Whether nothing is being persisted, or can be."""
        if self._refused or self._open_trouble:
            return True
        return self.core.idle and not self._flush

    def close(self) -> None:
        self._closed = True
        self._holds.release_all()

    def feed(self, event: Event) -> None:
        """Handle an event and perform its effects; events caused by effects are handled after all of them."""
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
        self._opening, self._open_trouble = False, ""
        if epoch != self._epoch:
            self._open()
            return
        self._opened, self._mark = True, None
        self._feed_epoch()
        self.feed(Durable(reply.committed))
        self.changed()

    def _not_opened(self, epoch: int, code: str, reason: str) -> None:
        self._opening = False
        if code == AWAY:
            return  # the next keeper is asked again
        if epoch != self._epoch:
            self._open()  # the answer is about an earlier history
        elif code == w.FailureCode.FENCED:
            self._fence(reason)
        else:
            self._events.count("persist_not_opened")
            trouble = reason or code
            if trouble != self._open_trouble:
                text = f"nothing of {self.key} is made durable: {trouble}; trying again"
                self._events.add("warning", f"persist.{code}", text, self.key)
            self._open_trouble = trouble

    def _fence(self, reason: str) -> None:
        """Another job uses our names: store nothing until the rank joins another epoch."""
        self._opened, self._refused, self._flush = False, True, False
        self._open_trouble = ""  # the core tells the reason
        self.feed(Fenced(reason))

    def _feed_epoch(self) -> None:
        self.feed(Joined(self._epoch, self._epoch_start, self._span()))

    # -- effects ---------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Hold():
                if not self._holds.hold(effect.key, effect.record):
                    self.feed(SlotReused(effect.key))
            case Release():
                self._holds.release(effect.key)
            case Store():
                self._ask_to_store(effect)
            case Commit():
                self._ask_to_commit(effect)
            case Note():
                self._events.add(effect.level, effect.kind, effect.message, self.key)

    def _ask_to_store(self, effect: Store) -> None:
        key = effect.key
        held = self._holds.get(key)
        if held is None:
            return  # the core has received `SlotReused`
        message = w.StoreSlot(
            self._child.next_id(),
            self._name,
            key,
            str(held.segment.path),
            held.index,
            self._superseding(held, effect.newer),
            *self._checkpoint_of(held, effect),
        )

        def stored(reply: w.StoredSlot) -> None:
            self._events.count("persisted_bytes", reply.uploaded_bytes)
            self._events.count("persist_spared_bytes", reply.size_bytes - reply.uploaded_bytes)
            self.feed(SnapshotStored(key, reply.uploaded_bytes, reply.for_later))

        def refused(code: str, reason: str) -> None:
            # `keeper_died` handles the keeper's end. A held slot that is lost is damaged, or its file was
            # removed.
            if code != AWAY:
                self.feed(StoreFailed(key, reason))

        self._child.ask(message, stored, refused)

    def _superseding(self, held: HeldSnapshot, newer: Iterable[SnapshotKey]) -> tuple[w.SlotPlace, ...]:
        """The newer snapshots from which a recovery takes what they have; none if it replays them.

        Those that are stored already are left out: what they have is then stored again.
        """
        found = [(key, slot) for key in newer if (slot := self._holds.get(key)) is not None]
        segments = {slot.segment.path: slot.segment for slot in (held, *(slot for _, slot in found))}
        if any(policy_of(segment.descriptor) != PolicyKind.PARTIAL for segment in segments.values()):
            return ()
        return tuple([w.SlotPlace(key, str(slot.segment.path), slot.index) for key, slot in found])

    def _checkpoint_of(
        self, held: HeldSnapshot, effect: Store
    ) -> tuple[tuple[tuple[SnapshotKey, int], ...], w.SlotPlace | None, w.SlotPlace | None]:
        """Of partial snapshots, all of the checkpoint, and where the newest one and another one are."""
        if policy_of(held.segment.descriptor) != PolicyKind.PARTIAL or not effect.checkpoint:
            return (), None, None
        *older, newest = [self._place_of(key) for key, _ in effect.checkpoint]
        return effect.checkpoint, newest, next((place for place in older if place is not None), None)

    def _place_of(self, key: SnapshotKey) -> w.SlotPlace | None:
        """Where a snapshot is, if its slot is held."""
        held = self._holds.get(key)
        return None if held is None else w.SlotPlace(key, str(held.segment.path), held.index)

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
            list(effect.keys),
            segment.raw_descriptor(),
            segment.geometry.slot_bytes,
            segment.descriptor.window,
            segment.geometry.num_slots,
        )

        def refused(code: str, reason: str) -> None:
            if code == w.FailureCode.UNKNOWN:
                self._forgotten()
            elif code == w.FailureCode.FENCED and epoch == self._epoch:
                self._fence(reason)
            elif code != AWAY:
                self.feed(CommitFailed(last, reason))

        self._child.ask(message, lambda _: self.feed(Committed(last)), refused)

    def _measure(self, records: tuple[SlotRecord, ...]) -> None:
        """Measure the time per iteration, for the cadence."""
        newest, now_s = max((r.iteration for r in records), default=-1), self._clock()
        if self._seen is None or newest < self._seen[0]:
            self._seen = newest, now_s
            return
        iteration, at_s = self._seen
        if newest > iteration and now_s - at_s >= _MEASURE_S:
            self.core.cadence.note_iterations(newest - iteration, now_s - at_s)
            self._seen = newest, now_s


class StorageTier:
    """The daemon's use of its store, if one is configured.

    Args:
        ranks_of: the ranks of a run that are attached here.
        span_of: the number of snapshots of the longest suffix of a run.
        replicas: segments of other nodes, into which a drill may read.
    """

    def __init__(
        self,
        node: NodeContext,
        *,
        ranks_of: Callable[[str, str], Iterable[int]],
        span_of: Callable[[str, str], int],
        replicas: Iterable[Segment],
    ) -> None:
        self._node, self._span_of = node, span_of
        self._ranks: dict[RankKey, RankPersistence] = {}
        self._child = StoreChild(
            _configure(node.config), self, post=node.post, clock=node.clock, nice=node.config.nice
        )
        self.link = StoreLink(
            self._child,
            post=node.post,
            ranks_of=ranks_of,
            durable_of=self._durable_of,
            segments=lambda: (*node.store, *replicas),
            boot_id=node.boot_id,
        )

    def join(self, key: RankKey, world_size: int, epoch: int, epoch_start: int) -> None:
        """A local rank joins an epoch of its run."""
        rank = self._ranks.get(key)
        if rank is None:
            rank = self._ranks[key] = RankPersistence(
                key, self._node, self._child, span=lambda: self._span_of(key.job, key.run)
            )
        rank.join(world_size, epoch, epoch_start)

    def changed(self, key: RankKey) -> None:
        if key in self._ranks:
            self._ranks[key].changed()

    def leave(self, key: RankKey) -> None:
        """A trainer ended normally: persist its newest suffix."""
        if key in self._ranks:
            self._ranks[key].flush()

    def forget(self, job: str, run: str) -> None:
        """A run ended: stop persisting it. Its durable checkpoints stay."""
        for key in [k for k in self._ranks if (k.job, k.run) == (job, run)]:
            self._ranks.pop(key).close()

    def tick(self) -> None:
        self._child.tick()
        self.link.tick()
        for key, rank in list(self._ranks.items()):
            rank.tick()
            if rank.over:
                self._ranks.pop(key).close()

    @property
    def idle(self) -> bool:
        """Whether nothing is being persisted."""
        return all(rank.idle for rank in self._ranks.values())

    @property
    def keeper_pid(self) -> int:
        """The process id of the store keeper; 0 if it is not running."""
        return self._child.pid

    def states(self) -> dict[RankKey, PersistState]:
        """The state of every local rank."""
        return {key: rank.state() for key, rank in sorted(self._ranks.items())}

    def durable_up_to(self, key: RankKey) -> int:
        """The newest checkpoint of a local rank's run that all ranks have in storage; -1: none."""
        rank = self._ranks.get(key)
        return -1 if rank is None else rank.state().committed

    def _durable_of(self, job: str, run: str) -> int:
        """The same of a run. Its ranks' trainers may have ended; their segments are here."""
        ranks = [rank for key, rank in self._ranks.items() if (key.job, key.run) == (job, run)]
        # Of those that have yet to join, it may be of a history that was abandoned.
        newest = max((rank.epoch for rank in ranks), default=-1)
        return max((rank.state().committed for rank in ranks if rank.epoch == newest), default=-1)

    def close(self) -> None:
        """Stop; the next start resumes unfinished work."""
        for rank in self._ranks.values():
            rank.close()
        self._child.close()

    # -- from the store keeper -------------------------------------------------------------------

    def keeper_event(self, message: w.KeeperEvent) -> None:
        """Add an event or counter of the keeper to this daemon's log."""
        if message.level == "count":
            self._node.events.count(f"store.{message.kind}", message.amount)
        else:
            self._node.events.add(message.level, message.kind, message.message)

    def settled(self, message: w.Settled) -> None:
        rank = self._rank(message.rank)
        if rank is not None:
            rank.settled(message)

    def fenced(self, message: w.RankFenced) -> None:
        rank = self._rank(message.rank)
        if rank is not None:
            rank.fenced(message)

    def _rank(self, name: w.RankName) -> RankPersistence | None:
        return self._ranks.get(RankKey(name.job, name.run, name.rank))

    def keeper_died(self, reason: str) -> None:
        self._node.events.add("error", "store_keeper_died", reason)
        for rank in self._ranks.values():
            rank.keeper_died()


def _configure(config: DaemonConfig) -> w.Configure:
    return w.Configure(
        url=config.store,
        options=json.loads(config.store_options or "{}"),
        backend=config.store_backend,
        threads=config.persist_threads,
        bytes_per_s=parse_bytes(config.persist_bandwidth),
        deadline_s=config.store_deadline_s,
        read_back=config.persist_check == "full",
        retain=w.Retain(config.persist_keep_last, config.persist_keep_every, config.persist_keep_for_s),
        sign_with=config.keys_dir if config.store_sign else "",
        signers=config.keys_dir if config.store_signed_only else "",
    )
