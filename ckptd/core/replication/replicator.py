"""Replication of one rank's snapshots: what is sent to which target, in which order (pure).

One `Replicator` per local rank. Its shell reports what happened (events) and performs what it answers
(effects); ``docs/replication.md`` section 5 is the protocol. Each target is served for itself, one snapshot
at a time: its phases, and what leads from one to another, are the table in
`ckptd.core.replication.target`.

What the shell guarantees:

* A snapshot is held from before its `Begin` until the put is over. If its `Hold` failed (the slot was
  reused), the begin is refused, or the put ends at once, not ok.
* Exactly one `PutEnded` for each `Put`, also after `Abort` (which cancels the transfer) and after `PeerLost`.
  Until then the slot stays held, because the fabric may still be reading it.
* `TargetOpened`, `Granted`, `SealedThere` and the refusals may come late, twice or never. What does
  not answer the question that stands is ignored; a grant that nobody waits for is given back by
  `Abort`.
* `Tick` comes when `wake_at_s` says so.

What a target holds (`ckptd.core.replication.copies`) is believed from `TargetOpened` and
`SealedThere` alone, and told anew after each of its restarts. The complete suffixes that it holds
end at the iterations ``first`` to ``last``, without a gap: a target that was begun anew (a
substitute, or one that fell behind the local ring) holds none that ends before ``first``, hence a
common end of all ranks exists only within every rank's interval.

Where fewer than two targets count, the primary is one of the promised copies (`Replicator.word`):
what the rank promises is held by its own ring *and* a target. So there is an *aim*, a few suffixes
of the ring that are brought to the target and that the ring keeps meanwhile, while it rolls on in
its other slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ckptd.core.replication.copies import Copies
from ckptd.core.replication.target import (
    ASKING,
    HOLDING,
    NO_INTERVAL,
    Abort,
    Agreed,
    Begin,
    BeginRefused,
    Effect,
    Event,
    Granted,
    Interval,
    Lag,
    OpenRefused,
    OpenTarget,
    PeerBack,
    PeerLost,
    Phase,
    Put,
    PutEnded,
    ReplicationConfig,
    ReplicationTarget,
    Seal,
    SealedThere,
    SealRefused,
    Slots,
    TargetEvent,
    TargetOpened,
    Targets,
    TargetState,
)
from ckptd.core.slots.ring import SlotRecord
from ckptd.core.slots.slots import Hold, Joined, Note, Release, SnapshotKey, Tick, key_of
from ckptd.core.state_machine import validated
from ckptd.errors import LocalProtocolError

__all__ = ["Replicator"]


class Replicator:
    """One rank's replication in one epoch; see the module. Nothing in it grows with time.

    Args:
        aim: of a daemon before this one, in this epoch; other ranks may count on it.
    """

    def __init__(
        self,
        config: ReplicationConfig | None = None,
        *,
        copies: Copies | None = None,
        aim: Interval = NO_INTERVAL,
    ) -> None:
        self._config = config or ReplicationConfig()
        self._targets: dict[str, ReplicationTarget] = {}
        self._copies = copies or Copies(aim)
        self._agreed: Agreed | None = None
        self._missing = False
        self._holders: dict[SnapshotKey, int] = {}
        self._effects: list[Effect] = []
        self._now_s = 0.0

    # What it tells.

    @property
    def sole(self) -> bool:
        """Whether no target counts: the primary is the only promised copy."""
        return not any(target.counted for target in self._targets.values())

    @property
    def behind(self) -> int:
        """How many iterations the slowest target that could have everything is behind."""
        local = self._copies.local
        newest = max(local, default=-1)
        slow = [t for t in self._targets.values() if t.wanted and t.alive and not t.no_memory]
        oldest = min(local, default=0) - 1
        # None is behind where the newest snapshots here were quarantined.
        return max(0, max((newest - (t.run.last if t.run.last >= 0 else oldest) for t in slow), default=0))

    @property
    def replicated(self) -> Interval:
        """Where suffixes end that every promised copy holds: all targets that count, else the primary.

        ``first`` may exceed ``last``: the targets have no end in common yet.
        """
        runs = [target.run for target in self._targets.values() if target.counted]
        runs = runs or [self._copies.own_interval()]
        if any(run.last < 0 for run in runs):
            return NO_INTERVAL
        return Interval(max(run.first for run in runs), min(run.last for run in runs))

    @property
    def replicated_up_to(self) -> int:
        """The newest iteration up to which every promised copy is current; -1: none yet."""
        return self.replicated.last

    @property
    def own(self) -> Interval:
        """Where suffixes end that the primary holds."""
        return self._copies.own_interval()

    @property
    def num_counted(self) -> int:
        """How many targets the floor waits for."""
        return sum(target.counted for target in self._targets.values())

    def num_holding(self, end: int) -> int:
        """How many of them hold the suffix that ends there."""
        counted = (target for target in self._targets.values() if target.counted)
        return sum(self._copies.holds(target, end) for target in counted)

    @property
    def aim(self) -> Interval:
        """What may become the next floor on the word of this rank; see `word`."""
        return self._copies.aim

    @property
    def word(self) -> Interval:
        """Where suffixes end that this rank promises to the others; -1 as the last: at none yet,
        and at none before ``first``.

        With two targets or more that count, what all of them hold. With one, what it and the local
        ring hold: the aim, as far as it has come. With none, the aim by itself where nothing could
        be elsewhere (no placement, no memory); but nothing while a target is away or stuck, because
        the floor would go on from what that may hold to what is nowhere else.
        """
        counted = [t for t in self._targets.values() if t.counted]
        if self._agreed is None or len(counted) > 1:
            return self.replicated
        stuck = any(t.wanted and not t.no_memory for t in self._targets.values())
        if not counted and (self._missing or stuck):
            return NO_INTERVAL
        if self._copies.blocked:  # the horizon goes beyond it, and comes back with what the others know
            return Interval(self._copies.aim.last + 1, -1)
        return self._copies.in_aim(counted[0] if counted else None)

    def current_up_to(self, node: str) -> int:
        """The end of the newest complete suffix on ``node``, or -1."""
        target = self._targets.get(node)
        return -1 if target is None else target.run.last

    def lag(self, node: str) -> Lag:
        """How far ``node`` is behind."""
        target = self._targets.get(node)
        return Lag(0, 0) if target is None else self._copies.lag(target)

    def states(self, *, now_s: float) -> tuple[TargetState, ...]:
        """All targets, by name."""
        return tuple(
            TargetState(
                t.node,
                t.phase,
                t.alive,
                t.counted,
                len(t.held),
                t.run.last,
                self.lag(t.node),
                max(0.0, t.retry_at_s - now_s),
                t.reason,
                t.boot_id,
            )
            for t in sorted(self._targets.values(), key=lambda t: t.node)
            if t.wanted
        )

    @property
    def wake_at_s(self) -> float | None:
        """When the next `Tick` is due; None: when something happened."""
        times = [self._wake_of(t) for t in self._targets.values()]
        due = [time for time in times if time is not None]
        return min(due) if due else None

    # What happens.

    @validated
    def handle(self, event: Event, *, now_s: float) -> list[Effect]:
        """What is to be done, in this order, because of ``event``."""
        self._now_s, self._effects = now_s, []
        match event:
            case Joined():
                self._join(event)
            case Targets(nodes, missing):
                self._missing = missing
                self._place(nodes)
            case Slots():
                self._take_table(event)
            case Agreed():
                self._agreed = event
            case Tick():
                pass
            case _:
                self._of_target(event)
        self._take_aim()
        for target in list(self._targets.values()):
            self._advance(target)
        return self._effects

    def _validate(self) -> None:
        """A slot is held exactly as long as somebody may read it; who holds nothing is current with
        nothing.
        """
        targets = self._targets.values()
        held = Counter(t.key for t in targets if t.phase in HOLDING)
        assert self._holders == held, f"held for {self._holders}, read for {held}"
        for t in targets:
            sending = t.phase in HOLDING or t.phase is Phase.SEALING
            assert sending == (t.record is not None), f"{t.node} is {t.phase} with {t.record}"
            assert sending or t.grant is None, f"{t.node} is {t.phase} and has a grant"
            assert t.wanted or t.phase is Phase.CANCELLING, f"{t.node} is no target any more"
            assert t.alive or t.phase in (Phase.CLOSED, Phase.CANCELLING), f"{t.node} is lost"
            assert t.held or t.run == NO_INTERVAL, f"{t.node} holds nothing, and is current"
        assert self.sole == (self.num_counted == 0)

    def _of_target(
        self,
        event: TargetOpened
        | OpenRefused
        | Granted
        | BeginRefused
        | PutEnded
        | SealedThere
        | SealRefused
        | PeerLost
        | PeerBack,
    ) -> None:
        target = self._targets.get(event.node)
        match event:
            case PutEnded():
                self._put_ended(target, event)
            case Granted():
                self._granted(target, event)
            case _ if target is None:
                return
            case TargetOpened() if target.phase is Phase.OPENING:
                self._opened(target, event)
            case OpenRefused() if target.phase is Phase.OPENING:
                if event.generation == target.generation:
                    self._open_refused(target, event)
            case BeginRefused() if target.phase is Phase.BEGINNING and event.key == target.key:
                self._begin_refused(target, event)
            case SealedThere() if target.phase is Phase.SEALING and event.key == target.key:
                self._sealed(target, event.key)
            case SealRefused() if target.phase is Phase.SEALING and event.key == target.key:
                self._seal_refused(target, event)
            case PeerLost(reason=reason):
                self._lose(target, reason)
            case PeerBack():
                self._return(target)
            case _:
                return  # an answer to a question that does not stand any more

    def _join(self, event: Joined) -> None:
        """Another history: hosts may free what was believed to be there, so all are asked anew."""
        if self._copies.join(event, self._targets.values()):
            for target in self._targets.values():
                self._stop(target, "another epoch")

    def _place(self, nodes: Iterable[str]) -> None:
        wanted = set(nodes)
        for node in sorted(wanted):
            target = self._targets.get(node)
            if target is None:
                self._targets[node] = ReplicationTarget(node, self._now_s)
            elif not target.wanted:
                target.wanted, target.since_s = True, self._now_s
        for target in list(self._targets.values()):
            if target.node not in wanted and target.wanted:
                target.wanted = False
                self._stop(target, "not a target any more")
                self._drop_if_done(target)

    def _take_aim(self) -> None:
        """With two targets that count the ring need not wait for either, so there is no aim but
        what was promised.
        """
        if self._agreed is None:
            return
        copies, kept, before = self._copies, self._copies.keeps_aim, self._copies.aim
        counted = [target for target in self._targets.values() if target.counted]
        copies.keeps_aim = len(counted) < 2
        if copies.keeps_aim:
            target = counted[0] if counted else None
            copies.take_aim(self._agreed.floor, self._agreed.horizon, target)
        else:
            copies.aim = Interval(-1, max(copies.aim.last, self.replicated.last))
        if copies.keeps_aim != kept or (kept and copies.aim != before):
            for target in self._targets.values():
                target.planned = False
        copies.vouched = max(copies.vouched, self.word.last)

    def _take_table(self, told: Slots) -> None:
        self._copies.take_table(
            told.records, told.num_operators, self._targets.values(), ring_slots=told.num_slots
        )
        for target in self._targets.values():
            gone = target.record is not None and self._copies.here(target.record) is None
            if gone and target.phase is Phase.PUTTING:
                self._cancel(target, "the snapshot is gone here")

    # One target: going on.

    def _advance(self, target: ReplicationTarget) -> None:
        """Whatever the target can do next, now."""
        self._watch(target)
        if not (target.wanted and target.alive) or target.phase not in (Phase.CLOSED, Phase.IDLE):
            return
        record = self._copies.next_for(target)
        if record is None:
            target.since_s = self._now_s  # nothing to do is no stall
            return
        if self._now_s < target.retry_at_s:
            return
        target.asked_s = self._now_s
        if record.generation not in target.opened:
            target.generation = record.generation
            target.on(TargetEvent.OPEN)
            self._effects.append(OpenTarget(target.node, record.generation))
            return
        target.on(TargetEvent.BEGIN)
        target.record = record
        self._copies.doubt_newer(target, record)
        self._hold(record)
        self._effects.append(Begin(target.node, key_of(record), record))

    def _watch(self, target: ReplicationTarget) -> None:
        """Time: questions that stand too long, and targets that get nowhere."""
        waited_s = self._now_s - target.asked_s
        if target.phase in ASKING and waited_s >= self._config.answer_s:
            self._reopen(target, f"no answer for {waited_s:.1f} s while {target.phase}")
        quiet_s = self._now_s - target.since_s
        if target.counted and quiet_s >= self._config.stalled_s and self._copies.next_for(target) is not None:
            target.stalled = True
            self._copies.doubt_all(target)
            text = f"{target.node} sealed nothing for {quiet_s:.0f} s ({target.reason or 'slow'})"
            self._effects.append(Note("warning", "replication_stalled", text))

    def _wake_of(self, target: ReplicationTarget) -> float | None:
        if not (target.wanted and target.alive):
            return None
        if target.phase in ASKING:
            return target.asked_s + self._config.answer_s
        if target.phase in (Phase.CLOSED, Phase.IDLE) and self._copies.next_for(target) is not None:
            return target.retry_at_s
        return None

    def _opened(self, target: ReplicationTarget, event: TargetOpened) -> None:
        if event.generation != target.generation:
            return
        target.on(TargetEvent.OPENED)
        if event.boot_id != target.boot_id:
            # Its machine may have been replaced, and nobody has told us yet: other generations are
            # opened anew, too.
            target.forget()
            target.boot_id = event.boot_id
        target.opened.add(event.generation)
        target.no_memory = False
        self._copies.believe(target, event.generation, event.held)

    def _open_refused(self, target: ReplicationTarget, event: OpenRefused) -> None:
        target.on(TargetEvent.FAIL)
        if event.code == "quota" and not target.no_memory:
            target.no_memory = True
            self._copies.doubt_all(target)
            text = f"{target.node} has no memory for a replica: {event.reason}"
            self._effects.append(Note("warning", "replication_refused", text))
        self._back_off(target, event.code, event.reason)

    def _granted(self, target: ReplicationTarget | None, event: Granted) -> None:
        waits = target is not None and target.phase is Phase.BEGINNING and target.key == event.key
        if target is None or not waits:
            mine = target is not None and target.key == event.key and target.grant == event.grant
            if not mine:  # else the same answer came twice
                self._effects.append(Abort(event.node, event.key, event.grant))
            return
        record = None if target.record is None else self._copies.here(target.record)
        if record is None:
            self._let_go(target, TargetEvent.FAIL)
            self._effects.append(Abort(event.node, event.key, event.grant))
            return
        target.on(TargetEvent.GRANTED)
        target.grant, target.record = event.grant, record
        self._effects.append(Put(event.node, event.key, record, event.grant))

    def _begin_refused(self, target: ReplicationTarget, event: BeginRefused) -> None:
        if event.code == "unknown":
            self._unknown(target, event.reason)
            return
        self._let_go(target, TargetEvent.FAIL)
        if event.code == "held":
            self._progress(target, event.key)
        elif event.code == "gone":
            # The ring has moved on since its table was read, as a ring with few slots does all the
            # time: what is there still goes at once.
            self._copies.lose(event.key, self._targets.values())
        elif event.code == "stale":
            target.skipped.add(event.key)
            target.planned = False
            if not target.stale:
                target.stale = True
                text = (
                    f"{target.node} refuses iteration {event.key.iteration}: it knows of another "
                    "history of this run, "
                    "which counts. Ranks that a restart replaces end by themselves. If training "
                    "goes on, a node that "
                    "was away has come back with that history: this job's snapshots have no "
                    "replicas there, and its "
                    "next start goes on from the other history (ckptctl whatif)"
                )
                self._effects.append(Note("warning", "replication_stale", text))
        else:
            self._back_off(target, event.code, event.reason)

    def _put_ended(self, target: ReplicationTarget | None, event: PutEnded) -> None:
        phase = None if target is None else target.phase
        putting = phase in (Phase.PUTTING, Phase.CANCELLING)
        if target is None or not putting or target.key != event.key:
            raise LocalProtocolError(
                "a put ended that was not begun",
                operation="replicate",
                ids={"node": event.node, "iteration": event.key.iteration},
            )
        self._release(event.key)
        if phase is Phase.CANCELLING:
            target.on(TargetEvent.FAIL if target.opened else TargetEvent.STOP)
            self._drop_if_done(target)
        elif event.ok:
            target.on(TargetEvent.DELIVERED)
            target.asked_s = self._now_s
            self._effects.append(Seal(event.node, event.key, target.grant))
        else:
            self._effects.append(Abort(event.node, event.key, target.grant))
            target.on(TargetEvent.FAIL)
            self._back_off(target, "put", event.reason)

    def _sealed(self, target: ReplicationTarget, key: SnapshotKey) -> None:
        target.on(TargetEvent.SEALED)
        self._progress(target, key)

    def _seal_refused(self, target: ReplicationTarget, event: SealRefused) -> None:
        if event.code == "unknown":
            self._unknown(target, event.reason)
            return
        target.on(TargetEvent.FAIL)
        self._back_off(target, event.code, event.reason)
        if event.code != "digest":
            return
        target.digest_refusals += 1
        if target.digest_refusals >= self._config.digest_refusals:
            target.skipped.add(event.key)
            target.planned = False
            target.digest_refusals = 0
            text = (
                f"{target.node} refused iteration {event.key.iteration} for its digest again and "
                f"again: its copy on this node is suspected, and passed over ({event.reason})"
            )
            self._effects.append(Note("error", "snapshot_suspected", text))

    # One target: stopping and starting again.

    def _lose(self, target: ReplicationTarget, reason: str) -> None:
        if target.alive:
            self._effects.append(Note("warning", "replication_peer_lost", f"{target.node}: {reason}"))
        target.alive = False
        self._stop(target, reason)

    def _return(self, target: ReplicationTarget) -> None:
        if not target.alive:
            target.alive, target.since_s, target.reason = True, self._now_s, ""
            target.no_memory = target.stalled = False

    def _stop(self, target: ReplicationTarget, reason: str) -> None:
        """Whatever runs ends, and nothing is believed any more."""
        target.reason = reason
        target.forget()
        if target.phase is Phase.PUTTING:
            self._cancel(target, reason)
        elif target.phase is not Phase.CANCELLING:
            if target.phase is Phase.SEALING and target.record is not None:
                self._effects.append(Abort(target.node, key_of(target.record), target.grant))
            self._let_go(target, TargetEvent.STOP)

    def _cancel(self, target: ReplicationTarget, reason: str) -> None:
        assert target.record is not None
        target.on(TargetEvent.CANCEL)
        target.reason = reason
        self._effects.append(Abort(target.node, key_of(target.record), target.grant))

    def _reopen(self, target: ReplicationTarget, reason: str, *, at_once: bool = False) -> None:
        """The lease is not known there (any more), or nobody can tell: ask what it holds."""
        target.opened.clear()
        self._let_go(target, TargetEvent.STOP)
        if at_once:
            target.reason = reason
        else:
            self._back_off(target, "unknown", reason)

    def _unknown(self, target: ReplicationTarget, reason: str) -> None:
        """The lease means nothing there: it was restarted, and may have lost everything that it
        ever told of.
        """
        target.held.clear()
        self._copies.recount(target)
        self._reopen(target, reason, at_once=target.unknowns == 0)
        target.unknowns += 1

    def _drop_if_done(self, target: ReplicationTarget) -> None:
        if not target.wanted and target.phase is not Phase.CANCELLING:
            del self._targets[target.node]

    def _let_go(self, target: ReplicationTarget, event: TargetEvent) -> None:
        """Nothing is being sent any more; a slot that was held for a `Begin` is released."""
        if target.phase is Phase.BEGINNING and target.record is not None:
            self._release(key_of(target.record))
        target.on(event)

    def _hold(self, record: SlotRecord) -> None:
        key = key_of(record)
        self._holders[key] = self._holders.get(key, 0) + 1
        if self._holders[key] == 1:
            self._effects.append(Hold(key, record))

    def _release(self, key: SnapshotKey) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self._effects.append(Release(key))

    def _back_off(self, target: ReplicationTarget, code: str, reason: str) -> None:
        config = self._config
        bounds = {
            "busy": (config.busy_s, config.busy_max_s),
            "quota": (config.quota_s, config.quota_max_s),
        }
        first_s, most_s = bounds.get(code, (config.retry_s, config.retry_max_s))
        delay_s = min(most_s, first_s * 2 ** min(target.failures, 20))
        target.failures += 1
        target.retry_at_s = self._now_s + delay_s
        target.reason = f"{code}: {reason}"

    def _progress(self, target: ReplicationTarget, key: SnapshotKey) -> None:
        target.held.add(key)
        target.failures = target.unknowns = target.digest_refusals = 0
        target.stalled, target.since_s, target.reason = False, self._now_s, ""
        target.retry_at_s = 0.0
        self._copies.recount(target)
