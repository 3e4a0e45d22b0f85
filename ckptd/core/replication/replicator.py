"""Replication of one rank's snapshots: what is sent to which target, in which order. Pure.

One `Replicator` per local rank. Its shell reports events and performs the effects that follow;
``docs/replication.md`` section 5 is the protocol. Each target goes through the phases of
`ckptd.core.replication.target` by itself. `ckptd.core.replication.copies` knows what each target holds,
what it needs next, and what the rank may promise to the other ranks.

The shell guarantees:

* A snapshot is held from before its `Begin` until its put is over. If its `Hold` failed (the slot was
  reused), the begin is refused, or the put ends at once, not ok.
* Exactly one `PutEnded` follows each `Put`, also after `Abort` (which cancels the transfer) and after
  `PeerLost`. Until then the slot stays held, because the fabric may still be reading it.
* `TargetOpened`, `Granted`, `SealedThere` and the refusals may come late, twice or never. An answer to a
  request that no longer stands is ignored; a grant that nobody waits for is given back by `Abort`.
* `Tick` comes at `wake_at_s`.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckptd.core.replication.copies import NO_INTERVAL, Copies, Interval, Lag, TargetCopies
from ckptd.core.replication.target import (
    Abort,
    Agreed,
    Effect,
    Event,
    Granted,
    Phase,
    PutEnded,
    ReplicationConfig,
    ReplicationTarget,
    Slots,
    Targets,
    TargetState,
    Turn,
    put_not_begun,
)
from ckptd.core.slots.slots import Joined, SnapshotKey, Tick
from ckptd.core.state_machine import validated

_Facts = tuple[int, Agreed | None, bool]  # see `Replicator._facts`


class Replicator:
    """One rank's replication in one epoch. Nothing in it grows with time.

    Args:
        aim: that of the daemon before this one, in this epoch; other ranks may count on it.
        independent: each snapshot is complete without others (a boundary log).
    """

    def __init__(
        self,
        config: ReplicationConfig | None = None,
        *,
        aim: Interval = NO_INTERVAL,
        independent: bool = False,
    ) -> None:
        self._config = config or ReplicationConfig()
        self._copies = Copies(aim, independent=independent)
        self._targets: dict[str, ReplicationTarget] = {}
        self._turn = Turn()
        self._agreed: Agreed | None = None
        self._missing = False
        self._word: Interval | None = None  # None: not computed since something changed
        self._word_of: _Facts | None = None
        self._settled: _Facts | None = (
            None  # of these the aim is known, and computing it again changes nothing
        )

    @validated
    def handle(self, event: Event, *, now_s: float) -> list[Effect]:
        """The effects of an event, in the order in which to perform them."""
        self._turn.begin(now_s)
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
            case _ if event.node in self._targets:
                self._targets[event.node].handle(event)
            case Granted():
                self._turn.effects.append(Abort(event.node, event.key, event.grant))
            case PutEnded():
                raise put_not_begun(event)
        self._drop_targets()
        self._take_aim()
        for target in self._targets.values():
            target.advance()
        facts = self._facts()
        if facts != self._word_of:
            self._word, self._word_of = None, facts
        return self._turn.effects

    @property
    def wake_at_s(self) -> float | None:
        """When the next `Tick` is due; None: not before an event."""
        times = [target.wake_at_s for target in self._targets.values()]
        return min([time for time in times if time is not None], default=None)

    # -- what the rank promises ----------------------------------------------------------------------

    @property
    def sole(self) -> bool:
        """Whether no target counts: the primary is the only promised copy."""
        return not self._counted()

    @property
    def own(self) -> Interval:
        """Where suffixes end that the primary holds."""
        return self._copies.own_interval()

    @property
    def replicated(self) -> Interval:
        """Where suffixes end that all targets hold that count, else the primary.

        ``first`` may exceed ``last``: the targets have no end in common yet.
        """
        runs = [target.copies.run for target in self._counted()] or [self.own]
        if any(run.last < 0 for run in runs):
            return NO_INTERVAL
        return Interval(max(run.first for run in runs), min(run.last for run in runs))

    @property
    def aim(self) -> Interval:
        """What may become the next floor once this rank promises it; see `word`."""
        return self._copies.aim

    @property
    def word(self) -> Interval:
        """Where suffixes end that this rank promises to the others; ``last`` is -1 if there are none yet,
        and none that ends before ``first`` will be promised.

        It is what the local ring and all targets that count hold, within the aim. With no target: the aim
        itself, if nothing can be elsewhere (no placement, no memory). But nothing while a target is away or
        stalled, because the floor would move from what that target may hold to what is nowhere else. A run of
        one rank has no aim, because it needs no common start: all that its targets hold.
        """
        if self._word is None:
            self._word = self._promisable()
        return self._word

    def _promisable(self) -> Interval:
        counted = self._counted()
        if self._agreed is None:
            return self.replicated
        stuck = any(t.wanted and not t.no_memory for t in self._targets.values())
        if not counted and (self._missing or stuck):
            return NO_INTERVAL
        if self._copies.blocked:
            # The horizon passes this aim, and comes back with the newest floor that the others know.
            return Interval(self._copies.aim.last + 1, -1)
        return self._copies.in_aim([target.copies for target in counted])

    # -- for display ---------------------------------------------------------------------------------

    @property
    def behind(self) -> int:
        """How many iterations the slowest target that could have everything is behind."""
        local = self._copies.local
        newest, before_oldest = max(local, default=-1), min(local, default=0) - 1
        ends = [t.copies.run.last for t in self._targets.values() if t.could_count]
        # A target is ahead where the newest snapshots here were quarantined.
        return max(0, max((newest - (end if end >= 0 else before_oldest) for end in ends), default=0))

    def current_up_to(self, node: str) -> int:
        """The end of the newest complete suffix on ``node``, or -1."""
        return self._targets[node].copies.run.last if node in self._targets else -1

    @property
    def recoverable_up_to(self) -> int:
        """The end of the newest complete suffix on the best target that answers, or -1."""
        ends = (t.copies.run.last for t in self._targets.values() if t.wanted and t.alive)
        return max(ends, default=-1)

    def lag(self, node: str) -> Lag:
        """How far ``node`` is behind."""
        return self._targets[node].copies.lag() if node in self._targets else Lag(0, 0)

    def states(self, *, now_s: float) -> tuple[TargetState, ...]:
        """The targets that the placement names, by name."""
        return tuple(t.state(now_s) for _, t in sorted(self._targets.items()) if t.wanted)

    # -- events --------------------------------------------------------------------------------------

    def _join(self, event: Joined) -> None:
        """In another history hosts may free what they held, so all are asked again."""
        if self._copies.join(event):
            for target in self._targets.values():
                target.stop("another epoch")

    def _place(self, nodes: Iterable[str]) -> None:
        wanted = set(nodes)
        for node in sorted(wanted):
            if node not in self._targets:
                copies = TargetCopies(self._copies)
                self._targets[node] = ReplicationTarget(node, copies, self._config, self._turn)
            self._targets[node].want()
        for node, target in self._targets.items():
            if node not in wanted:
                target.drop()

    def _take_table(self, told: Slots) -> None:
        self._copies.take_table(told.records, told.num_operators, told.num_slots)
        for target in self._targets.values():
            gone = target.record is not None and self._copies.here(target.record) is None
            if gone and target.phase is Phase.PUTTING:
                target.cancel("the snapshot is gone here")

    def _drop_targets(self) -> None:
        for target in [t for t in self._targets.values() if t.is_over]:
            del self._targets[target.node]
            self._copies.targets.remove(target.copies)

    def _take_aim(self) -> None:
        if self._agreed is None:
            return
        facts = self._facts()
        if facts == self._settled:
            return  # most events change nothing of what an aim follows from
        copies, kept, before = self._copies, self._copies.keeps_aim, self._copies.aim
        stood = before, copies.blocked, copies.vouched
        copies.keeps_aim = True
        counted = [target.copies for target in self._counted()]
        copies.take_aim(self._agreed.floor, self._agreed.horizon, counted)
        if not kept or copies.aim != before:
            for target in copies.targets:
                target.replan()
        word = self._promisable()
        copies.vouched = max(copies.vouched, word.last)
        if kept and stood == (copies.aim, copies.blocked, copies.vouched):
            self._settled = self._word_of = facts
            self._word = word
        else:
            self._settled = self._word_of = None

    def _facts(self) -> _Facts:
        """What the aim and the word follow from, besides what they were before."""
        return self._copies.version, self._agreed, self._missing

    def _counted(self) -> list[ReplicationTarget]:
        return [target for target in self._targets.values() if target.counted]

    def _validate(self) -> None:
        """A slot is held exactly while a target may read it."""
        targets = self._targets.values()
        read: dict[SnapshotKey, int] = {}
        for target in targets:
            if (key := target.read_key) is not None:
                read[key] = read.get(key, 0) + 1
        assert self._turn.readers == read, f"held for {self._turn.readers}, read for {read}"
        for target in targets:
            target.validate()
