"""One run as this node sees it: its members, the targets of its replicas, and its floor.

Connects the pure cores (placement, floor, one replicator per local rank) with the daemon's loop thread.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from ckptd.core.placement import NodeFacts, PlacedRank, ReplicaPlacement, plan_placement
from ckptd.core.replication.copies import Interval
from ckptd.core.replication.floor import (
    NOTHING_CARRIED,
    Carried,
    FloorKind,
    FloorMessage,
    FloorTree,
)
from ckptd.core.replication.log_replicas import LogReplicator
from ckptd.core.replication.replicas import Promise
from ckptd.core.replication.replicator import Replicator
from ckptd.core.sessions import RankKey
from ckptd.core.slots.segment_format import RingHint
from ckptd.errors import RemoteProtocolError
from ckptd.memory.segment_store import Mark
from ckptd.memory.slot_digests import Vouch
from ckptd.node_context import NodeContext
from ckptd.peers.peer_link import PeerLink
from ckptd.peers.sender import LogRing, RankReplication, ReplicatedRing, SnapshotRing
from ckptd.transport.messages import Join, Member, ReplicationStatus, TargetStatus
from ckptd.transport.peer_messages import Floor

logger = logging.getLogger(__name__)

_MOST = (1 << 16) - 1  # of a number in the hints
_LOOKS = 3

LinkTo = Callable[[str], PeerLink | None]


class Run:
    """Membership, placement, floor and replication of one run on this node.

    Attributes:
        ranks: the replication of each local rank's snapshots.
        logs: the replication of its boundary log, to the same targets.
        dead: members that do not answer.
        promise: what all ranks have agreed to keep; ``span``: the snapshots in the longest suffix.

    Args:
        link: the connection to a node, None if its address is not known.
        vouch: makes digests of images.
    """

    def __init__(self, job: str, run: str, node: NodeContext, *, link: LinkTo, vouch: Vouch) -> None:
        self.job, self.run = job, run
        self._node, self._store, self._link, self._vouch = node, node.store, link, vouch
        self.epoch, self.epoch_start = -1, -1
        self.members: tuple[Member, ...] = ()
        self.ranks: dict[int, RankReplication] = {}
        self.logs: dict[int, RankReplication] = {}
        self.dead: set[str] = set()
        self.placement = ReplicaPlacement({}, {}, (), "nobody has joined yet")
        self.promise = Promise()
        self.span = 1
        self.joined_at_s = node.clock()
        self._asked_replicas = -1
        self._undisturbed: Mapping[int, Sequence[str]] = {}
        self._tree: FloorTree | None = None
        self._carried = NOTHING_CARRIED
        self._agreeing = False
        # By rank: its slots when all of it was reported, and those of its log when they were last looked at.
        self._reported: dict[int, Mark] = {}
        self._logged: dict[int, Mark] = {}

    @property
    def members_id(self) -> str:
        return "" if self._tree is None else f"{self.epoch}/{self._tree.members_id}"

    @property
    def _own_ranks(self) -> list[int]:
        return [r for m in self.members if m.card.node == self._store.node_id for r in m.ranks]

    @property
    def _num_ranks(self) -> int:
        return sum(len(member.ranks) for member in self.members)

    @property
    def recoverable(self) -> bool:
        """True once a suffix of every rank of this node, or of every rank, is known to be complete."""
        here = [r in self.ranks and self.ranks[r].core.own.last >= 0 for r in self._own_ranks]
        return self.promise.floor >= 0 or (bool(here) and all(here))

    @property
    def has_own_floor(self) -> bool:
        """True once all members can go back to a snapshot of this epoch, without any earlier member."""
        return self.epoch >= 0 and self.promise.floor > self.epoch_start

    @property
    def speaks(self) -> bool:
        """Whether this is the node that sends the run's record to members without ranks."""
        working = [m.card.node for m in self.members if m.ranks and m.card.node not in self.dead]
        return self._store.node_id == min(working, default="")

    def join(self, key: RankKey, message: Join) -> str:
        """A local rank says who takes part; every rank of the node says the same.

        Returns why it is refused, or "".
        """
        self.joined_at_s = self._node.clock()
        self._reported.clear()
        self._logged.clear()
        if message.epoch < self.epoch:
            return f"epoch {message.epoch} of {key} is over: epoch {self.epoch} has begun here"
        current = (self.epoch, self.epoch_start, self.members)
        if current != (message.epoch, message.epoch_start, message.members):
            self._begin(message)
        if key.rank not in self.ranks:
            core = Replicator(aim=self._aim_of(key.rank))
            self.ranks[key.rank] = self._replication(key, core, SnapshotRing(self._store, key))
            self.logs[key.rank] = self._replication(key, LogReplicator(), LogRing(self._store, key))
            self.ranks[key.rank].begin(self.promise if self._num_ranks > 1 else None)
        self._retarget()
        self.ranks[key.rank].changed()
        self.logs[key.rank].changed()
        self.progressed(key.rank)
        return ""

    def _replication(self, key: RankKey, core: Replicator, ring: ReplicatedRing) -> RankReplication:
        return RankReplication(key, core, ring, self._node, self, link=self._link, vouch=self._vouch)

    @property
    def _replications(self) -> list[RankReplication]:
        return [*self.ranks.values(), *self.logs.values()]

    def sealed(self, rank: int) -> None:
        if rank in self.ranks:
            self.ranks[rank].changed()

    def logged(self, rank: int) -> None:
        """A slot of this rank's log was sealed, or a generation of it went."""
        if rank in self.logs:
            self.logs[rank].changed()

    def peer_lost(self, node: str, reason: str) -> None:
        if any(node == m.card.node for m in self.members) and node not in self.dead:
            self.dead.add(node)
            for replication in self._replications:
                replication.peer_lost(node, reason)
            self._retarget()

    def peer_back(self, node: str) -> None:
        if node in self.dead:
            self.dead.discard(node)
            self._retarget()
        for replication in self._replications:
            replication.peer_back(node)

    def peer_restarted(self, node: str) -> None:
        """Its new daemon knows neither our leases nor the numbers of its own floor messages."""
        if self._tree is not None:
            self._tree.restarted(node)
        for replication in self._replications:
            replication.peer_restarted(node)

    def tick(self) -> None:
        for rank, replication in self.ranks.items():
            self._tick_rank(rank, replication)
        for rank, log in self.logs.items():
            mark = self._store.mark_of(self._key(rank), logs=True)
            if self._logged.get(rank) != mark:
                self._logged[rank] = mark
                log.changed()
            log.tick()
        if self._tree is not None:
            self._send(self._tree.resend(now_s=self._node.clock()))
        self._protect()

    def _tick_rank(self, rank: int, replication: RankReplication) -> None:
        """Look at a rank's slots, unless nothing has changed since all of it was reported.

        Segments stay for long after their trainers have ended.
        """
        mark = self._store.mark_of(self._key(rank))
        if self._reported.get(rank) == mark:
            replication.tick()
            return
        replication.changed()  # a trainer seals its own slots while the daemon is away
        replication.tick()
        if self.progressed(rank):
            self._reported[rank] = mark

    def wake(self, now_s: float) -> float:
        """Retry what is due; returns when to call again (infinity: not at all)."""
        due = float("inf")
        for replication in self._replications:
            at_s = replication.core.wake_at_s
            if at_s is not None and at_s <= now_s:
                replication.tick()
                at_s = replication.core.wake_at_s
            due = due if at_s is None else min(due, at_s)
        return due

    def status(self, now_s: float) -> list[ReplicationStatus]:
        """Every local rank, and its log where that is replicated, for `ckptctl peers`."""
        snapshots = [self._status(r, "snapshots", now_s) for _, r in sorted(self.ranks.items())]
        logged = (rank for rank in sorted(self.logs) if self._store.replicated_logs_of(self._key(rank)))
        return snapshots + [self._status(self.logs[rank], "log", now_s) for rank in logged]

    def _status(self, replication: RankReplication, kind: str, now_s: float) -> ReplicationStatus:
        targets = tuple(
            TargetStatus(
                t.node,
                t.phase,
                t.alive,
                t.counted,
                t.held,
                t.current_up_to,
                t.lag.iterations,
                t.lag.bytes,
                t.reason,
            )
            for t in replication.core.states(now_s=now_s)
        )
        rank, floor = replication.key.rank, self.promise.floor
        wanted = len(self._undisturbed.get(rank, ()))
        return ReplicationStatus(self.job, self.run, rank, self.epoch, floor, targets, kind, wanted)

    def _key(self, rank: int) -> RankKey:
        return RankKey(self.job, self.run, rank)

    def close(self) -> None:
        for replication in self._replications:
            replication.close()
        self.ranks.clear()
        self.logs.clear()

    # -- for replications ------------------------------------------------------------------------

    def joined(self) -> tuple[int, int, int]:
        return max(self.epoch, 0), self.epoch_start, self.span

    def promised(self) -> tuple[int, int, int, int]:
        return self.promise.floor, self.promise.horizon, self.span, self.epoch

    def progressed(self, rank: int) -> bool:
        """What is replicated of a rank may have changed: report it to the floor tree, if that is possible."""
        if self._tree is None or rank not in self.ranks:
            return False
        if secured := self._secured(rank):
            word = self.ranks[rank].core.word
            self._send(self._tree.set_rank(rank, word.last, first=word.first, span=self._window(rank)))
        else:
            self._reported.pop(rank, None)  # the next tick tries again
        self._agreed()
        self._protect_rank(rank)
        return secured

    # -- membership ------------------------------------------------------------------------------

    def _begin(self, message: Join) -> None:
        if self.epoch < 0:
            self._remember(alone=sum(len(member.ranks) for member in message.members) == 1)
        if self.promise.floor >= 0:
            self._carried = max(self._carried, Carried(self.epoch, self.promise.floor))
        if message.epoch != self.epoch:
            self.close()  # what is under way belongs to the old history
            if not self._goes_on_from_carried(message):
                self._carried, self.span = NOTHING_CARRIED, 1
            # It is a floor of this history, too; the largest that any node knows counts.
            self._carried = Carried(message.epoch, self._carried.floor)
            # The horizon is unknown: every complete suffix from the floor on is kept until the new
            # tree has agreed.
            self.promise = Promise(self._carried.floor)
        self.epoch, self.epoch_start = message.epoch, message.epoch_start
        self.members, self._asked_replicas = message.members, message.replicas
        self.dead.clear()
        names = [member.card.node for member in self.members if member.ranks]
        self._tree = self._plant(names)
        listed = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
        text = f"{self.job}/{self.run}: epoch {self.epoch}, {len(names)} nodes: {listed}"
        self._node.events.add("info", "run_joined", text)

    def _goes_on_from_carried(self, message: Join) -> bool:
        """Whether the carried floor holds in this epoch: its history includes that floor.

        A node that took no part in the previous epoch does not know where that one began.
        """
        epoch, floor = self._carried
        if epoch >= message.epoch:
            return True
        return floor <= message.epoch_start and message.follows in (epoch, -1)

    def _remember(self, *, alone: bool) -> None:
        """Read what an earlier daemon knew of the floor from the hints of our ranks."""
        for segment in self._store.of_run(self.job, self.run):
            hint = segment.ring_hint
            self._carried = max(self._carried, Carried(hint.epoch, hint.floor))
            self.span = 1 if alone else max(self.span, hint.span)

    def _plant(self, names: list[str]) -> FloorTree | None:
        if self._store.node_id not in names:
            return None
        return FloorTree(
            names,
            self._store.node_id,
            ranks=self._own_ranks,
            started=time.monotonic_ns(),  # compared within this boot of the daemon only
            epoch=self.epoch,
            carried=self._carried,
        )

    def _retarget(self) -> None:
        before = self.placement
        self.placement = self._place(self.dead)
        self._undisturbed = (self._place(set()) if self.dead else self.placement).targets
        for rank, replication in self.ranks.items():
            # Even if the targets are the same: the replication may be new (another epoch or rank).
            missing = not self.dead.isdisjoint(self._undisturbed.get(rank, ()))
            replication.set_targets(self.placement.targets.get(rank, ()), missing=missing)
            self.logs[rank].set_targets(self.placement.targets.get(rank, ()))
        for warning in self.placement.warnings:
            if warning not in before.warnings:
                self._node.events.add("warning", "placement", f"{self.job}/{self.run}: {warning}")

    def _place(self, without: set[str]) -> ReplicaPlacement:
        wanted = self._asked_replicas if self._asked_replicas >= 0 else self._node.config.replicas
        reachable = [m for m in self.members if m.card.endpoint]
        nodes = [NodeFacts(m.card.node, m.card.labels, _capacity(m)) for m in reachable]
        ranks = [
            PlacedRank(rank, m.card.node, max(1, size))
            for m in reachable
            for rank, size in zip(m.ranks, itertools.chain(m.ring_bytes, itertools.repeat(0)), strict=False)
        ]
        domains = tuple(name for name in self._node.config.domains.split(",") if name)
        return plan_placement(nodes, ranks, replicas=wanted, domains=domains, without=without)

    # -- the floor -------------------------------------------------------------------------------

    def floor_message(self, sender: str, message: Floor) -> None:
        """A neighbour in the tree sends its minimum, or the floor."""
        if self._tree is None or message.members_id != self.members_id:
            return  # of another membership: the next heartbeat settles it
        try:
            self._send(self._heard(self._tree, sender, message))
        except RemoteProtocolError as error:
            self._node.events.count("floor.garbage")
            logger.info("%s", error)
        self._agreed()

    def _heard(self, tree: FloorTree, sender: str, message: Floor) -> list[FloorMessage]:
        if message.carried_epoch > self.epoch:
            raise RemoteProtocolError(
                f"a floor of epoch {message.carried_epoch}, in epoch {self.epoch}",
                operation="floor",
                ids={"from": sender},
            )
        if message.kind == FloorKind.BELOW:
            return tree.on_below(
                sender,
                message.value,
                message.sequence,
                horizon=message.horizon,
                span=message.span,
                counted=message.counted,
                carried=Carried(message.carried_epoch, message.carried_floor),
            )
        return tree.on_floor(message.value, horizon=message.horizon, span=message.span)

    def _secured(self, rank: int) -> bool:
        """Protect what is promised here by hints, then read the slots again; false if they change too fast.

        A trainer that has read the older hints may be about to overwrite a slot. It holds the
        slot's lock then, and reads the hints again once it has the lock. So, in the order hints,
        locks, headers: either the daemon sees the lock, or the trainer sees the hints, or the
        header says that the slot is gone.
        """
        replication = self.ranks[rank]
        for _ in range(_LOOKS):
            aim = replication.core.aim
            self._protect_rank(rank)
            segments = self._store.of_rank(self._key(rank))
            taken = any(segment.gives_away() for segment in segments)
            replication.read_slots()
            if replication.core.aim == aim and not taken:
                return True
        return False  # the ring changes too fast: try again at the next snapshot or tick

    def _window(self, rank: int) -> int:
        if self._num_ranks == 1:
            return 1  # no other rank's start depends on it
        segments = self._store.of_rank(self._key(rank))
        return max((s.descriptor.window for s in segments), default=1)

    def _send(self, messages: Iterable[FloorMessage]) -> None:
        for sent in messages:
            link = self._link(sent.to_node)
            if link is not None:
                link.tell(
                    Floor(
                        self.job,
                        self.run,
                        self.members_id,
                        sent.kind,
                        sent.value,
                        sent.sequence,
                        sent.horizon,
                        sent.span,
                        sent.counted,
                        *sent.carried,
                        link.boot_id,
                    )
                )

    def _agreed(self) -> None:
        """Adopt what the tree knows, until nothing more follows from it."""
        if self._agreeing:
            return  # the outer call looks again
        self._agreeing = True
        try:
            while self._tree is not None and self._adopt(self._tree):
                self._protect()
        finally:
            self._agreeing = False

    def _adopt(self, tree: FloorTree) -> bool:
        """Adopt what the tree knows; true if the promise grew. A promise never shrinks."""
        fresh = Promise(max(self.promise.floor, tree.floor), max(self.promise.horizon, tree.horizon))
        if tree.span > self.span:
            self.span = tree.span
            for replication in self.ranks.values():
                replication.rejoined()
        if fresh == self.promise:
            return False
        self.promise = fresh
        if self._num_ranks > 1:
            for replication in self.ranks.values():
                replication.agreed(fresh)
        return True

    def _protect(self) -> None:
        for rank in self.ranks:
            self._protect_rank(rank)

    def _protect_rank(self, rank: int) -> None:
        core, promise = self.ranks[rank].core, self.promise
        hint = RingHint(
            promise.floor,
            max(promise.horizon, core.aim.first),
            min(self.span, _MOST),
            min(core.behind, _MOST),
            max(self.epoch, 0),
            core.aim.last,
        )
        for segment in self._store.of_rank(self._key(rank)):
            segment.protect(hint)

    def _aim_of(self, rank: int) -> Interval:
        """What an earlier daemon promised in this epoch, from the hints; else the start of the epoch."""
        hints = [segment.ring_hint for segment in self._store.of_rank(self._key(rank))]
        aims = [Interval(h.horizon, h.aim) for h in hints if h.span and h.epoch == self.epoch]
        return max(aims, key=lambda aim: aim.last, default=Interval(-1, self.epoch_start))


def _capacity(member: Member) -> int | None:
    """The memory that a node has for replicas; None if its card does not say how much it has."""
    memory = member.card.memory_bytes
    return max(0, memory - sum(member.ring_bytes)) if memory else None
