"""One run as this node sees it: who takes part, who holds whose replicas, and how far everybody is.

Glue between the pure cores (placement, floor, one replicator per local rank) and the daemon's loop thread.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable

from ckptd.core.placement import NodeFacts, PlacedRank, ReplicaPlacement, plan_placement
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
from ckptd.core.replication.target import Interval
from ckptd.core.sessions import RankKey
from ckptd.core.slots.segment_hints import RingHint
from ckptd.errors import RemoteProtocolError
from ckptd.memory.slot_digests import Vouch
from ckptd.node_context import NodeContext
from ckptd.peers.peer_link import PeerLink
from ckptd.peers.sender import LogRing, RankReplication, ReplicatedRing, ReplicatedRun, SnapshotRing
from ckptd.transport.control.messages import Join, Member, ReplicationStatus, TargetStatus
from ckptd.transport.control.peer_messages import Floor

__all__ = ["Run"]

logger = logging.getLogger(__name__)

_MOST = (1 << 16) - 1
_LOOKS = 3

LinkTo = Callable[[str], PeerLink | None]


class Run:
    """Membership, placement, floor and replication of one run on this node.

    Args:
        link: the connection to a node, None if its address is not known.
        vouch: makes digests of images.
    """

    def __init__(
        self,
        job: str,
        run: str,
        node: NodeContext,
        *,
        link: LinkTo,
        vouch: Vouch,
    ) -> None:
        self.job, self.run = job, run
        self._node, self._store, self._link, self._vouch = node, node.store, link, vouch
        self.epoch, self.epoch_start = -1, -1
        self.members: tuple[Member, ...] = ()
        self.ranks: dict[int, RankReplication] = {}
        self.logs: dict[int, RankReplication] = {}  # by rank: its boundary log, on the same targets
        self.dead: set[str] = set()
        self.placement = ReplicaPlacement({}, {}, (), "nobody has joined yet")
        self.promise = Promise()
        self.span = 1
        self.joined_at_s = node.clock()
        self._asked_replicas = -1
        self._tree: FloorTree | None = None
        self._carried = NOTHING_CARRIED
        self._agreeing = False

    @property
    def epoch_pair(self) -> tuple[int, int]:
        return max(self.epoch, 0), self.epoch_start

    @property
    def members_id(self) -> str:
        return "" if self._tree is None else f"{self.epoch}/{self._tree.members_id}"

    @property
    def recoverable(self) -> bool:
        """Whether a suffix of every rank of this node, or of every rank, is known to be complete."""
        mine = [r for m in self.members if m.card.node == self._store.node_id for r in m.ranks]
        here = [r in self.ranks and self.ranks[r].core.own.last >= 0 for r in mine]
        return self.promise.floor >= 0 or (bool(here) and all(here))

    @property
    def has_own_floor(self) -> bool:
        """Whether this epoch's members can all go back to a snapshot of this epoch, and need no
        earlier member for that.
        """
        return self.epoch >= 0 and self.promise.floor > self.epoch_start

    @property
    def speaks(self) -> bool:
        """Whether this node is the one that tells members without ranks who takes part."""
        working = [m.card.node for m in self.members if m.ranks and m.card.node not in self.dead]
        return self._store.node_id == min(working, default="")

    def join(self, key: RankKey, message: Join) -> str:
        """A local rank tells who takes part; every rank of the node says the same. Returns why it
        is refused, else "".
        """
        self.joined_at_s = self._node.clock()
        told = (message.epoch, message.epoch_start, message.members)
        fresh = told != (self.epoch, self.epoch_start, self.members)
        if message.epoch < self.epoch:
            return f"epoch {message.epoch} of {key} is over: epoch {self.epoch} has begun here"
        if fresh:
            self._begin(message)
        if key.rank not in self.ranks:
            core, logs = Replicator(aim=self._aim_of(key.rank)), LogReplicator()
            ring, log = SnapshotRing(self._store, key), LogRing(self._store, key)
            self.ranks[key.rank] = self._replication(key, core, ring, _Snapshots(self, key.rank))
            self.logs[key.rank] = self._replication(key, logs, log, _Logs(self))
            self.ranks[key.rank].begin(self.promise if self._num_ranks > 1 else None)
        self._retarget()
        self.ranks[key.rank].changed()
        self.logs[key.rank].changed()
        self.progressed(key.rank)
        return ""

    def _replication(
        self, key: RankKey, core: Replicator, ring: ReplicatedRing, run: ReplicatedRun
    ) -> RankReplication:
        return RankReplication(key, core, ring, self._node, run, link=self._link, vouch=self._vouch)

    @property
    def _replications(self) -> list[RankReplication]:
        """Of snapshots and of logs."""
        return [*self.ranks.values(), *self.logs.values()]

    def sealed(self, rank: int) -> None:
        """A snapshot of this rank was sealed here, or a generation of it went."""
        if rank in self.ranks:
            self.ranks[rank].changed()

    def logged(self, rank: int) -> None:
        """The log of an iteration of this rank was sealed here, or a generation of it went."""
        if rank in self.logs:
            self.logs[rank].changed()

    def peer_lost(self, node: str, reason: str) -> None:
        if node in self._nodes() and node not in self.dead:
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
        """It is there, and knows nothing of our leases any more, nor how far it had counted its reports."""
        if self._tree is not None:
            self._tree.restarted(node)
        for replication in self._replications:
            replication.peer_restarted(node)

    def tick(self) -> None:
        for rank, replication in self.ranks.items():
            replication.changed()  # a trainer seals its own slots while we are away
            replication.tick()
            self.progressed(rank)
        for log in self.logs.values():
            log.changed()
            log.tick()
        if self._tree is not None:
            self._send(self._tree.resend(now_s=self._node.clock()))
        self._protect()

    def wake(self, now_s: float) -> float:
        """Try again what waited until now; returns when this is wanted next (infinity: not at all)."""
        due = float("inf")
        for replication in self._replications:
            at_s = replication.core.wake_at_s
            if at_s is not None and at_s <= now_s:
                replication.tick()
                at_s = replication.core.wake_at_s
            due = due if at_s is None else min(due, at_s)
        return due

    def floor_message(self, sender: str, message: Floor) -> None:
        """A neighbour in the tree tells its minimum or the floor."""
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

    def status(self, now_s: float) -> list[ReplicationStatus]:
        """Every local rank, for `ckptctl peers`; its log, too, where it is to be replicated."""
        told = [self._status(r, "snapshots", now_s) for _, r in sorted(self.ranks.items())]
        wanted = (rank for rank in sorted(self.logs) if self._store.replicated_logs_of(self._key(rank)))
        return told + [self._status(self.logs[rank], "log", now_s) for rank in wanted]

    def _status(self, replication: RankReplication, kind: str, now_s: float) -> ReplicationStatus:
        return ReplicationStatus(
            self.job,
            self.run,
            replication.key.rank,
            self.epoch,
            self.promise.floor,
            tuple(
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
            ),
            kind,
        )

    def _key(self, rank: int) -> RankKey:
        return RankKey(self.job, self.run, rank)

    def close(self) -> None:
        for replication in self._replications:
            replication.close()
        self.ranks.clear()
        self.logs.clear()

    # -- membership ------------------------------------------------------------------------------

    def _begin(self, message: Join) -> None:
        if self.epoch < 0:
            self._remember(alone=sum(len(member.ranks) for member in message.members) == 1)
        if self.promise.floor >= 0:
            self._carried = max(self._carried, Carried(self.epoch, self.promise.floor))
        if message.epoch != self.epoch:
            self.close()  # another history: what was under way belongs to the old one
            if not self._goes_on_from_carried(message):
                self._carried, self.span = NOTHING_CARRIED, 1
            # It is a floor of this history, too, and the largest that anybody knows counts.
            self._carried = Carried(message.epoch, self._carried.floor)
            # The horizon is unknown, so that every complete suffix from the floor on is kept until
            # the new tree has agreed.
            self.promise = Promise(self._carried.floor)
        self.epoch, self.epoch_start = message.epoch, message.epoch_start
        self.members, self._asked_replicas = message.members, message.replicas
        self.dead.clear()
        names = [member.card.node for member in self.members if member.ranks]
        self._tree = self._plant(names)
        self._node.events.add(
            "info",
            "run_joined",
            f"{self.job}/{self.run}: epoch {self.epoch}, {len(names)} nodes: {', '.join(names[:8])}"
            + (", …" if len(names) > 8 else ""),
        )

    def _goes_on_from_carried(self, message: Join) -> bool:
        """Whether what was agreed on before holds in this epoch: its history was not left before that floor.

        A node that did not take part in the epoch before this one does not know where that one began.
        """
        epoch, floor = self._carried
        if epoch >= message.epoch:
            return True
        return floor <= message.epoch_start and message.follows in (epoch, -1)

    def _remember(self, *, alone: bool) -> None:
        """What a daemon before this one knew of the floor stands beside the slots of our ranks."""
        for segment in self._store.of_run(self.job, self.run):
            hint = segment.ring_hint
            self._carried = max(self._carried, Carried(hint.epoch, hint.floor))
            self.span = 1 if alone else max(self.span, hint.span)

    def _plant(self, names: list[str]) -> FloorTree | None:
        ranks = [r for m in self.members if m.card.node == self._store.node_id for r in m.ranks]
        if self._store.node_id not in names:
            return None
        return FloorTree(
            names,
            self._store.node_id,
            ranks=ranks,
            started=time.monotonic_ns(),  # counts within this boot of the daemon: no clock that is set
            epoch=self.epoch,
            carried=self._carried,
        )

    def _nodes(self) -> list[str]:
        return [member.card.node for member in self.members]

    def _retarget(self) -> None:
        before = self.placement
        self.placement = self._place(self.dead)
        whole = self._place(set()) if self.dead else self.placement
        for rank, replication in self.ranks.items():
            # Also if they are the same: the replication may be new (another epoch, another rank).
            missing = not self.dead.isdisjoint(whole.targets.get(rank, ()))
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

    def progressed(self, rank: int) -> None:
        """What is replicated of a rank may have changed: tell the others how far it is."""
        if self._tree is None or rank not in self.ranks:
            return
        if self._secured(rank):
            told = self.ranks[rank].core.word
            self._send(self._tree.set_rank(rank, told.last, first=told.first, span=self._window(rank)))
        self._agreed()
        self._protect_rank(rank)

    def _secured(self, rank: int) -> bool:
        """Nothing of what is promised here goes from now on: tell the ring, then look once more at
        what is there.

        A trainer that had read the older hints may be about to overwrite a slot. It holds the
        slot's lock by then, and reads the hints once more when it has taken it. So in the order
        hints, locks, headers: either the lock is seen here, or the hints are seen there, or the
        header tells.
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
        return False  # the ring is quicker than we are: at the next snapshot, or tick

    def _window(self, rank: int) -> int:
        if self._num_ranks == 1:
            return 1  # there is nobody whose start it must have
        segments = self._store.of_rank(self._key(rank))
        return max((s.descriptor.window for s in segments), default=1)

    @property
    def _num_ranks(self) -> int:
        return sum(len(member.ranks) for member in self.members)

    def _send(self, messages: Iterable[FloorMessage]) -> None:
        for told in messages:
            link = self._link(told.to_node)
            if link is not None:
                link.tell(
                    Floor(
                        self.job,
                        self.run,
                        self.members_id,
                        told.kind,
                        told.value,
                        told.sequence,
                        told.horizon,
                        told.span,
                        told.counted,
                        *told.carried,
                        link.boot_id,
                    )
                )

    def _agreed(self) -> None:
        """Act on what the tree knows now, and on what that leads to."""
        if self._agreeing:
            return  # whoever does so looks again
        self._agreeing = True
        try:
            while self._tree is not None and self._adopt(self._tree):
                self._protect()
        finally:
            self._agreeing = False

    def _adopt(self, tree: FloorTree) -> bool:
        """Take over what the tree knows, whether that is news; an older promise is only ever added to."""
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
        """Tell the trainers' rings what should stay."""
        for rank in self.ranks:
            self._protect_rank(rank)

    def _protect_rank(self, rank: int) -> None:
        core, promise = self.ranks[rank].core, self.promise
        epoch, epoch_start = self.epoch_pair
        if promise.floor < 0 and epoch_start < 0:
            elsewhere = core.num_counted  # nothing is anywhere yet
        else:
            # Of the targets that count, some may yet have to receive the suffix of the floor. And
            # after a recovery there may be a floor that somebody else knows; it is told when the
            # new tree agrees.
            elsewhere = core.num_holding(promise.floor) if promise.floor >= 0 else 0
        hint = RingHint(
            promise.floor,
            max(promise.horizon, core.aim.first),
            min(self.span, _MOST),
            self._num_ranks > 1 and elsewhere < 2,
            min(core.behind, _MOST),
            epoch,
            core.aim.last,
        )
        for segment in self._store.of_rank(self._key(rank)):
            segment.protect(hint)

    def _aim_of(self, rank: int) -> Interval:
        """What a daemon before this one had promised to the others in this epoch, as it stands
        beside the slots; else where the epoch began.
        """
        told = [segment.ring_hint for segment in self._store.of_rank(self._key(rank))]
        aims = [Interval(h.horizon, h.aim) for h in told if h.span and h.epoch == self.epoch]
        return max(aims, key=lambda aim: aim.last, default=Interval(-1, self.epoch_start))


class _Snapshots(ReplicatedRun):
    """The run as the replication of one rank's snapshots sees it."""

    def __init__(self, run: Run, rank: int) -> None:
        self._run, self._rank = run, rank

    def joined(self) -> tuple[int, int, int]:
        return (*self._run.epoch_pair, self._run.span)

    def promised(self) -> tuple[int, int, int, int]:
        promise = self._run.promise
        return promise.floor, promise.horizon, self._run.span, self._run.epoch

    def progressed(self) -> None:
        self._run.progressed(self._rank)


class _Logs(_Snapshots):
    """The run as the replication of boundary logs sees it: no suffix, and no floor that waits for them."""

    def __init__(self, run: Run) -> None:
        super().__init__(run, -1)

    def joined(self) -> tuple[int, int, int]:
        return (*self._run.epoch_pair, 1)

    def progressed(self) -> None:
        """Nothing waits for a log."""


def _capacity(member: Member) -> int | None:
    """What a node can take from others beside its own ranks; None if it has not told its memory."""
    memory = member.card.memory_bytes
    return max(0, memory - sum(member.ring_bytes)) if memory else None
