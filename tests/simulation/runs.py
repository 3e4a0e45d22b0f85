"""The run as each daemon sees it, with the real tree and the real placement:
`ckptd.peers.runs.Run`, in short.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from ckptd.core.placement import NodeFacts, PlacedRank, ReplicaPlacement, plan_placement
from ckptd.core.replication import target as rep
from ckptd.core.replication.copies import NO_INTERVAL, Interval
from ckptd.core.replication.floor import (
    ANY_SPAN,
    NOTHING_CARRIED,
    Carried,
    FloorKind,
    FloorMessage,
    FloorTree,
)
from ckptd.core.replication.replicas import Promise
from ckptd.core.replication.replicator import Replicator
from ckptd.core.slots.slots import Joined, Tick
from tests.simulation.model import (
    FAN_OUT,
    REPLICATION,
    TICK_S,
    Daemon,
    Hint,
    Holder,
    RunSide,
    Segment,
    Sender,
    Vouched,
)
from tests.simulation.senders import Senders

__all__ = ["Runs"]

_LOOKS = 3


class Runs(Senders):
    """Membership, placement and the floor."""

    def _init_runs(self) -> None:
        self.placements: dict[object, ReplicaPlacement] = {}
        self.members: dict[str, tuple[int, ...]] = {}
        self.running = False

    # Who takes part.

    def join(self, name: str, daemon: Daemon, rank: int, epoch: int) -> None:
        """A local rank tells who takes part."""
        late = epoch != self.epoch or not self.running or self.homes[rank] != name
        if late or self.nodes[name].daemon is not daemon:
            return
        if self.nodes[name].no_space:  # the record cannot be written, so the rank must ask again
            self.seen["join refused"] += 1
            self.local(name, 1.0, lambda: self.join(name, daemon, rank, epoch))
            return
        run, record = daemon.run, self.nodes[name].record
        record.lost = False
        record.learn(epoch, self.epoch_start, self.follows)
        record.names |= self.members.keys()
        self._tell_idle(name, epoch, self.epoch_start, self.follows)
        if (run.epoch, run.epoch_start, run.members) != (epoch, self.epoch_start, self.members):
            self._begin_epoch(name, daemon)
        if rank not in run.senders:
            sender = Sender(Replicator(REPLICATION, aim=self._aim_of(name, run, rank)))
            run.senders[rank] = sender
            joined = Joined(max(run.epoch, 0), run.epoch_start, run.span)
            self.handle(name, daemon, rank, sender, joined)
            self.handle(name, daemon, rank, sender, self.slots_of(name, rank))
            if len(self.homes) > 1:
                agreed = rep.Agreed(run.promise.floor, run.promise.horizon)
                self.handle(name, daemon, rank, sender, agreed)
        self._retarget(name, daemon)
        self.tell_slots(name, daemon, rank, run.senders[rank])
        self.progressed(name, daemon, rank)
        self.note_epoch(daemon, name, epoch, self.epoch_start)
        for node in sorted(daemon.lost):
            self.peer_lost(name, node)

    def _tell_idle(self, name: str, epoch: int, start: int, follows: int) -> None:
        """Nodes without ranks are told of an epoch, each again until it knows."""
        if self.epoch != epoch or self.nodes[name].daemon is None:
            return
        working = {node for node, ranks in self.members.items() if ranks}
        unaware = [n for n in self.nodes if n not in working and epoch not in self.nodes[n].record.epochs]
        for node in unaware:
            learn = partial(self.nodes[node].record.learn, epoch, start, follows)
            self.send(name, node, lambda _, learn=learn: learn())  # type: ignore[misc]
        if unaware:
            self.later(1.0, partial(self._tell_idle, name, epoch, start, follows))

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
            working,
            name,
            ranks=run.members[name],
            fan_out=FAN_OUT,
            started=started,
            epoch=run.epoch,
            carried=run.carried,
        )

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
        whole = self._place(run.members, set())
        for rank, sender in list(run.senders.items()):
            targets = run.placement.targets.get(rank, ())
            away = not run.dead.isdisjoint(whole.targets.get(rank, ()))
            joined = Joined(max(run.epoch, 0), run.epoch_start, run.span)
            self.feed(name, daemon, rank, sender, joined)
            missing = away and self.config.withholds
            self.feed(name, daemon, rank, sender, rep.Targets(targets, missing))

    def _place(self, members: Mapping[str, tuple[int, ...]], dead: set[str]) -> ReplicaPlacement:
        """The same for all that know the same, so it is worked out once."""
        key = tuple(members.items()), frozenset(dead)
        if key not in self.placements:
            nodes = [NodeFacts(name, self.nodes[name].labels, self.nodes[name].capacity) for name in members]
            ranks = [
                PlacedRank(rank, name, self.trainers[rank].window + 4)
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
        if self._secured(name, daemon, rank):
            self._tell_tree(name, run, rank)
        self._agreed(name, daemon)
        self._protect_rank(name, daemon, rank)

    def _secured(self, name: str, daemon: Daemon, rank: int) -> bool:
        """Nothing of what is promised goes from now on."""
        sender = daemon.run.senders[rank]
        for _ in range(_LOOKS if self.config.reads_anew else 0):
            aim = sender.core.aim
            self._protect_rank(name, daemon, rank)
            self.handle(name, daemon, rank, sender, self.slots_of(name, rank))
            if sender.core.aim == aim:
                return True
        return not self.config.reads_anew

    def _tell_tree(self, name: str, run: RunSide, rank: int) -> None:
        assert run.tree is not None
        told = run.senders[rank].core.word
        holders = self._holders(name, run.senders[rank])
        if run.span >= self.span:  # else the tree does not count it
            alone = self._alone(run, rank) if {holder.node for holder in holders} == {name} else ""
            self.vouch(rank, Vouched(run.epoch, told.first, told.last, holders, alone))
        windows = [s.num_operators for s in self.nodes[name].segments.values() if s.own and s.rank == rank]
        self._send(
            name,
            run,
            run.tree.set_rank(rank, told.last, first=told.first, span=max(windows, default=1)),
        )

    def _alone(self, run: RunSide, rank: int) -> str:
        """Why a rank may vouch by itself; "": it may not."""
        if not self._place(run.members, set()).targets.get(rank):
            return "no place"
        states = run.senders[rank].core.states(now_s=0.0)
        refuse = all(state.alive and not state.counted for state in states)  # nothing stalls as long as here
        return "no memory" if refuse else ""

    def _holders(self, name: str, sender: Sender) -> tuple[Holder, ...]:
        """The targets that count, and the primary; a run of one rank counts it only without targets."""
        states = sender.core.states(now_s=self.clock(name))
        found = [
            Holder(state.node, sender.lives.get(state.boot_id, -1), False)
            for state in states
            if state.counted
        ]
        if not found or len(self.homes) > 1:
            found.append(Holder(name, self.nodes[name].life, True))
        return tuple(found)

    def _aim_of(self, name: str, run: RunSide, rank: int) -> Interval:
        """What a daemon before this one had promised in this epoch, else where the epoch began."""
        mine = [s for s in self.nodes[name].segments.values() if s.own and s.rank == rank]
        hints = [s.hint for s in mine if s.hint.span and s.hint.epoch == run.epoch]
        if not self.config.carries:
            return NO_INTERVAL
        aims = [Interval(hint.horizon, hint.aim) for hint in hints]
        return max(aims, key=lambda aim: aim.last, default=Interval(-1, run.epoch_start))

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
                sender,
                message.value,
                message.sequence,
                horizon=horizon,
                span=span,
                counted=message.counted if self.config.counts_span else ANY_SPAN,
                carried=message.carried if self.config.carries else NOTHING_CARRIED,
            )
        else:
            answer = run.tree.on_floor(message.value, horizon=horizon, span=span)
        self._send(name, run, answer)
        self._agreed(name, daemon)

    def _agreed(self, name: str, daemon: Daemon) -> None:
        run = daemon.run
        if run.agreeing:
            return
        run.agreeing = True
        while self._adopt(name, daemon):
            self._protect(name, daemon)
        run.agreeing = False

    def _adopt(self, name: str, daemon: Daemon) -> bool:
        run = daemon.run
        assert run.tree is not None
        before, tree = run.promise, run.tree
        fresh = Promise(max(before.floor, tree.floor), max(before.horizon, tree.horizon))
        if tree.span > run.span:
            run.span = tree.span
            joined = Joined(max(run.epoch, 0), run.epoch_start, run.span)
            self.feed_all(name, daemon, joined)
        if fresh == before:
            return False
        run.promise = fresh
        if fresh.floor > before.floor:
            self.announce(fresh.floor, run.epoch)
        if len(self.homes) > 1:
            self.feed_all(name, daemon, rep.Agreed(fresh.floor, fresh.horizon))
        return True

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
            self._send(name, run, run.tree.resend(now_s=self.clock(name)))
        self._protect(name, daemon)
        self.clean(daemon, name)
        self.local(name, TICK_S, lambda: self.tick(name, daemon))

    # The rings of the trainers.

    def _protect(self, name: str, daemon: Daemon) -> None:
        for rank in daemon.run.senders:
            self._protect_rank(name, daemon, rank)

    def _protect_rank(self, name: str, daemon: Daemon, rank: int) -> None:
        run, core = daemon.run, daemon.run.senders[rank].core
        promise = run.promise
        horizon = max(promise.horizon, core.aim.first)
        hint = Hint(
            promise.floor,
            horizon,
            run.span,
            max(run.epoch, 0),
            core.aim.last,
        )
        for segment in self.nodes[name].segments.values():
            if segment.own and segment.rank == rank and segment.hint != hint:
                self.write_hint(name, segment, hint)

    def write_hint(self, name: str, segment: Segment, hint: Hint) -> None:
        """Store it beside the slots; `tests.simulation.swarm` may end the daemon in the middle."""
        segment.hint = hint
