"""The run as each daemon sees it, with the real tree and the real placement: `ckptd.peers.runs.Run`, in short."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckptd.memory.snapshot_events import Joined, Tick
from ckptd.placement import NodeFacts, Placement, RankFacts, plan_placement
from ckptd.replication import events as rep
from ckptd.replication.core import Replicator
from ckptd.replication.floor import (
    ANY_SPAN,
    NOTHING_CARRIED,
    Carried,
    FloorKind,
    FloorMessage,
    FloorTree,
)
from ckptd.replication.replicas import Promise
from tests.simulation.model import (
    FAN_OUT,
    REPLICATION,
    TICK_S,
    Daemon,
    Hint,
    Holder,
    RunSide,
    Sender,
    Vouched,
)
from tests.simulation.senders import Senders

__all__ = ["Runs"]


class Runs(Senders):
    """Membership, placement and the floor."""

    def _init_runs(self) -> None:
        self.placements: dict[object, Placement] = {}
        self.members: dict[str, tuple[int, ...]] = {}
        self.running = False

    # Who takes part.

    def join(self, name: str, daemon: Daemon, rank: int, epoch: int) -> None:
        """A local rank tells who takes part."""
        late = epoch != self.epoch or not self.running or self.homes[rank] != name
        if late or self.nodes[name].daemon is not daemon:
            return
        run, record = daemon.run, self.nodes[name].record
        record.learn(epoch, self.epoch_start, self.follows)
        record.names |= self.members.keys()
        if (run.epoch, run.epoch_start, run.members) != (epoch, self.epoch_start, self.members):
            self._begin_epoch(name, daemon)
        if rank not in run.senders:
            run.senders[rank] = Sender(Replicator(REPLICATION))
        self._retarget(name, daemon)
        self.tell_slots(name, daemon, rank, run.senders[rank])
        self.progressed(name, daemon, rank)
        self.note_epoch(daemon, name, epoch, self.epoch_start)
        for node in sorted(daemon.lost):
            self.peer_lost(name, node)

    def _begin_epoch(self, name: str, daemon: Daemon) -> None:
        run = daemon.run
        if run.epoch < 0 and self.config.carries:
            hints = [s.hint for s in self.nodes[name].segments.values() if s.own]
            run.carried = max([run.carried, *(Carried(h.epoch, h.floor) for h in hints)])
            run.span = max([run.span, *(h.span for h in hints)])
        if run.promise.floor >= 0 and self.config.carries:
            run.carried = max(run.carried, Carried(run.epoch, run.promise.floor))
        if self.epoch != run.epoch:
            self._close(name, run)
            epoch, floor = run.carried
            goes_on = floor <= self.epoch_start and self.follows in (epoch, -1)
            if epoch < self.epoch and not goes_on:
                run.carried = NOTHING_CARRIED  # that history was left before it, for all it knows
                run.span = 1
            run.carried = Carried(self.epoch, run.carried.floor)
            run.promise = Promise(run.carried.floor)
        run.epoch, run.epoch_start, run.members = self.epoch, self.epoch_start, self.members
        run.dead.clear()
        working = [node for node, ranks in run.members.items() if ranks]
        daemon.trees += 1
        started = daemon.trees << 20  # as in every life of a daemon
        run.tree = FloorTree(
            working, name, ranks=run.members[name], fan_out=FAN_OUT, started=started,
            epoch=run.epoch, carried=run.carried,
        )  # fmt: skip

    def _close(self, name: str, run: RunSide) -> None:
        for sender in run.senders.values():
            self.close_sender(name, sender)
        run.senders.clear()

    def peer_lost(self, name: str, peer: str) -> None:
        daemon = self.nodes[name].daemon
        assert daemon is not None
        self.end_peer(daemon, peer, -1)
        run = daemon.run
        if peer in run.members and peer not in run.dead:
            run.dead.add(peer)
            self.feed_all(name, daemon, rep.PeerLost(peer, "no answer for long"))
            self._retarget(name, daemon)

    def peer_back(self, name: str, peer: str) -> None:
        daemon = self.nodes[name].daemon
        assert daemon is not None
        if peer in daemon.run.dead:
            daemon.run.dead.discard(peer)
            self._retarget(name, daemon)
        self.feed_all(name, daemon, rep.PeerBack(peer))

    def peer_restarted(self, name: str, peer: str) -> None:
        daemon = self.nodes[name].daemon
        assert daemon is not None
        self.end_peer(daemon, peer, daemon.peers[peer])
        if daemon.run.tree is not None:
            daemon.run.tree.restarted(peer)
        lost, back = rep.PeerLost(peer, "its daemon was restarted"), rep.PeerBack(peer)
        for rank, sender in list(daemon.run.senders.items()):
            self.feed(name, daemon, rank, sender, lost, back)

    def _retarget(self, name: str, daemon: Daemon) -> None:
        run = daemon.run
        run.placement = self._place(run.members, run.dead)
        for rank, sender in list(run.senders.items()):
            targets = run.placement.targets.get(rank, ())
            joined = Joined(max(run.epoch, 0), run.epoch_start, run.span)
            self.feed(name, daemon, rank, sender, joined)
            self.feed(name, daemon, rank, sender, rep.Targets(targets))

    def _place(self, members: Mapping[str, tuple[int, ...]], dead: set[str]) -> Placement:
        """The same for all that know the same, so it is worked out once."""
        key = tuple(members.items()), frozenset(dead)
        if key not in self.placements:
            nodes = [
                NodeFacts(name, self.nodes[name].labels, self.nodes[name].capacity)
                for name in members
            ]
            ranks = [
                RankFacts(rank, name, self.trainers[rank].window + 4)
                for name, of in members.items()
                for rank in of
            ]
            self.placements[key] = plan_placement(
                nodes, ranks, replicas=self.replicas, domains=("zone", "rack"), without=dead
            )
        return self.placements[key]

    # The floor.

    def progressed(self, name: str, daemon: Daemon, rank: int) -> None:
        run = daemon.run
        if run.tree is None or rank not in run.senders:
            return
        sender = run.senders[rank]
        if sender.core.sole and self.config.reads_anew:
            self._protect_rank(name, daemon, rank)  # first: from here on nothing of it goes
            self.tell_slots(name, daemon, rank, sender)
        told = sender.core.replicated
        holders = self._holders(name, sender)
        if run.span >= self.span:  # else the tree does not count it
            self.vouch(rank, Vouched(run.epoch, told.first, told.last, holders))
        windows = [
            s.num_operators for s in self.nodes[name].segments.values() if s.own and s.rank == rank
        ]
        self._send(
            name,
            run,
            run.tree.set_rank(rank, told.last, first=told.first, span=max(windows, default=1)),
        )
        self._agreed(name, daemon)
        self._protect_rank(name, daemon, rank)

    def _holders(self, name: str, sender: Sender) -> tuple[Holder, ...]:
        if sender.core.sole:
            return (Holder(name, self.nodes[name].life, True),)
        states = sender.core.states(now_s=self.now_s)
        return tuple(
            Holder(state.node, sender.lives.get(state.node, -1), False)
            for state in states
            if state.counted
        )

    def _send(self, name: str, run: RunSide, messages: Iterable[FloorMessage]) -> None:
        tree_id, daemon = run.members_id, self.nodes[name].daemon
        assert daemon is not None
        by = name, daemon.boot
        for told in messages:
            node = told.to_node
            self.send(name, node, lambda d, t=told: self._floor_message(d, by, tree_id, t))  # type: ignore[misc]

    def _floor_message(
        self, daemon: Daemon, told_by: tuple[str, int], tree_id: str, message: FloorMessage
    ) -> None:
        run, name, (sender, boot) = daemon.run, message.to_node, told_by
        if run.tree is None or run.members_id != tree_id:
            return
        if daemon.peers.get(sender) != boot:
            self.look(name, sender)
            return
        horizon, span = message.horizon, message.span
        if message.kind is FloorKind.BELOW:
            answer = run.tree.on_below(
                sender, message.value, message.sequence, horizon=horizon, span=span,
                counted=message.counted if self.config.counts_span else ANY_SPAN,
                carried=message.carried if self.config.carries else NOTHING_CARRIED,
            )  # fmt: skip
        else:
            answer = run.tree.on_floor(message.value, horizon=horizon, span=span)
        self._send(name, run, answer)
        self._agreed(name, daemon)

    def _agreed(self, name: str, daemon: Daemon) -> None:
        run = daemon.run
        assert run.tree is not None
        before, tree = run.promise, run.tree
        fresh = Promise(max(before.floor, tree.floor), max(before.horizon, tree.horizon))
        if tree.span > run.span:
            run.span = tree.span
            joined = Joined(max(run.epoch, 0), run.epoch_start, run.span)
            self.feed_all(name, daemon, joined)
        if fresh != before:
            run.promise = fresh
            if fresh.floor > before.floor:
                self.announce(fresh.floor, run.epoch)
            self._protect(name, daemon)

    def tick(self, name: str, daemon: Daemon) -> None:
        """Once a second, for as long as this daemon lives."""
        if self.nodes[name].daemon is not daemon:
            return
        run = daemon.run
        for rank, sender in list(run.senders.items()):
            self.tell_slots(name, daemon, rank, sender)
            self.feed(name, daemon, rank, sender, Tick())
            self.progressed(name, daemon, rank)
        if run.tree is not None:
            self._send(name, run, run.tree.resend(now_s=self.now_s))
        self._protect(name, daemon)
        self.clean(daemon, name)
        self.later(TICK_S, lambda: self.tick(name, daemon))

    # The rings of the trainers.

    def _protect(self, name: str, daemon: Daemon) -> None:
        for rank in daemon.run.senders:
            self._protect_rank(name, daemon, rank)

    def _protect_rank(self, name: str, daemon: Daemon, rank: int) -> None:
        run = daemon.run
        sole = self._is_sole(
            run.senders[rank], run.promise.floor, after_recovery=run.epoch_start >= 0
        )
        sole = sole and self._together(name, run)
        for segment in self.nodes[name].segments.values():
            if segment.own and segment.rank == rank:
                promise, epoch = run.promise, max(run.epoch, 0)
                segment.hint = Hint(promise.floor, promise.horizon, run.span, sole, epoch)

    def _is_sole(self, sender: Sender, floor: int, *, after_recovery: bool) -> bool:
        """Whether no target is known to hold the suffix that ends at the floor."""
        told = sender.core.replicated
        held = not after_recovery if floor < 0 else told.first <= floor <= told.last
        return sender.core.sole or not (held or not self.config.hard_until_held)

    def _together(self, name: str, run: RunSide) -> bool:
        """Whether there are other ranks, and all their nodes can tell how far they are."""
        away = {node for node, ranks in run.members.items() if ranks and node != name}
        if away & run.dead:
            run.apart_s = self.now_s
            return False
        return sum(map(len, run.members.values())) > 1
