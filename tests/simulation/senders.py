"""The daemon's shell around the replicator of a rank: `ckptd.peers.sender`, in short."""

from __future__ import annotations

from ckptd.core.replication import target as rep
from ckptd.core.slots.slots import Hold, Note, Release, SnapshotKey, Tick, key_of
from tests.simulation.hosts import Hosts
from tests.simulation.model import DEADLINE_S, Daemon, Segment, Sender, Transfer

__all__ = ["Senders"]


class Senders(Hosts):
    """Performs what the replicators want done."""

    def progressed(self, name: str, daemon: Daemon, rank: int) -> None:
        """What is replicated of a rank may have changed."""
        raise NotImplementedError

    def feed(self, name: str, daemon: Daemon, rank: int, sender: Sender, *events: rep.Event) -> None:
        """Events that belong together, and what follows from them."""
        if sender.closed or self.nodes[name].daemon is not daemon:
            return
        before = sender.core.word, sender.core.aim
        for event in events:
            self.handle(name, daemon, rank, sender, event)
        if (sender.core.word, sender.core.aim) != before:
            self.progressed(name, daemon, rank)
        wake_s = sender.core.wake_at_s
        if wake_s is not None and sender.woken_s != wake_s:
            sender.woken_s = wake_s
            delay_s = max(0.001, wake_s - self.clock(name))
            self.local(name, delay_s, lambda: self.feed(name, daemon, rank, sender, Tick()))

    def feed_all(self, name: str, daemon: Daemon, event: rep.Event) -> None:
        for rank, sender in list(daemon.run.senders.items()):
            self.feed(name, daemon, rank, sender, event)

    def tell_slots(self, name: str, daemon: Daemon, rank: int, sender: Sender) -> None:
        """The rank's slots changed."""
        self.feed(name, daemon, rank, sender, self.slots_of(name, rank))

    def slots_of(self, name: str, rank: int) -> rep.Slots:
        """As they are now."""
        mine = [s for s in self.nodes[name].segments.values() if s.own and s.rank == rank]
        records = tuple([record for s in mine for record in s.sealed])
        num_slots = len(max(mine, key=lambda s: s.generation).slots) if mine else 0
        return rep.Slots(records, self.trainers[rank].window, num_slots)

    def handle(self, name: str, daemon: Daemon, rank: int, sender: Sender, event: rep.Event) -> None:
        """One event, of which nobody is told."""
        for effect in sender.core.handle(event, now_s=self.clock(name)):
            self._perform(name, daemon, rank, sender, effect)

    def close_sender(self, name: str, sender: Sender) -> None:
        """Stop: transfers are cancelled, slots let go, here and on the targets."""
        sender.closed = True
        for node, grant in sorted(sender.granted):
            self._give_back(name, sender, node, grant)
        for transfer in sender.puts.values():
            transfer.over = True
        for slot in sender.holds.values():
            slot.readers -= 1
        sender.holds.clear()

    def _perform(self, name: str, daemon: Daemon, rank: int, sender: Sender, effect: rep.Effect) -> None:
        match effect:
            case rep.OpenTarget(node, generation):
                self._open(name, daemon, rank, sender, node, generation)
            case rep.Begin():
                self._begin(name, daemon, rank, sender, effect)
            case rep.Put(node, key, _, grant):
                self._put(name, daemon, rank, sender, node, key, grant)
            case rep.Seal(node, key, grant):
                self._seal(name, daemon, rank, sender, node, key, grant)
            case rep.Abort(node, key, grant):
                transfer = sender.puts.get(node)
                if transfer is not None and transfer.key == key:
                    ended = lambda: self._ended(name, daemon, rank, sender, transfer, False)
                    self.later(0.01, ended)
                self._give_back(name, sender, node, grant)
            case Hold(key, record):
                segment = self._own(name, rank, key.generation)
                slots = [] if segment is None else segment.slots  # maybe another of that number
                slot = slots[record.index] if record.index < len(slots) else None
                if slot is not None and slot.record.sealed and key_of(slot.record) == key:
                    assert key not in sender.holds
                    slot.readers += 1
                    sender.holds[key] = slot
                else:
                    self.seen["hold failed"] += 1
            case Release(key):
                held = sender.holds.pop(key, None)
                if held is not None:
                    held.readers -= 1
            case Note(_, kind, message):
                self.seen[kind] += 1
                self.tell(f"{name} r{rank} {kind}: {message}")

    def _own(self, name: str, rank: int, generation: int) -> Segment | None:
        for segment in self.nodes[name].segments.values():
            if segment.own and segment.rank == rank and segment.generation == generation:
                return segment
        return None

    def _open(self, name: str, daemon: Daemon, rank: int, sender: Sender, node: str, generation: int) -> None:
        source, run = self._own(name, rank, generation), daemon.run
        if source is None:
            gone = rep.OpenRefused(node, generation, "away", "the generation is gone")
            self.later(0.001, lambda: self.feed(name, daemon, rank, sender, gone))
            return
        epoch = max(run.epoch, 0), run.epoch_start, run.span

        def opened(event: rep.Event, life: int) -> None:
            if isinstance(event, rep.TargetOpened):
                sender.leases[node, generation] = event.lease
                sender.lives[event.boot_id] = life
            self.feed(name, daemon, rank, sender, event)

        self.ask(
            name,
            node,
            lambda d: self.serve_open(d, node, name, daemon.boot, source, epoch),
            opened,
        )

    def _begin(self, name: str, daemon: Daemon, rank: int, sender: Sender, effect: rep.Begin) -> None:
        node, key, run = effect.node, effect.key, daemon.run
        lease = sender.leases.get((node, key.generation))
        if lease is None or key not in sender.holds:
            code = "unreachable" if key in sender.holds else "gone"
            refused = rep.BeginRefused(node, key, code, "the snapshot is gone")
            self.later(0.001, lambda: self.feed(name, daemon, rank, sender, refused))
            return
        told = run.epoch, run.promise, run.span

        def granted(event: rep.Event, life: int) -> None:
            if isinstance(event, rep.Granted):
                assert isinstance(event.grant, int)
                sender.granted.add((node, event.grant))
                if sender.closed:
                    self._give_back(name, sender, node, event.grant)
            self.feed(name, daemon, rank, sender, event)

        self.ask(
            name,
            node,
            lambda d: self.serve_begin(d, node, lease, key, effect.record, told),
            granted,
        )

    def _seal(
        self,
        name: str,
        daemon: Daemon,
        rank: int,
        sender: Sender,
        node: str,
        key: SnapshotKey,
        grant: object,
    ) -> None:
        def answered(event: rep.Event, life: int) -> None:
            if isinstance(event, rep.SealedThere):
                sender.granted.discard((node, grant))
            else:
                self._give_back(name, sender, node, grant)
            self.feed(name, daemon, rank, sender, event)

        self.ask(name, node, lambda d: self.serve_seal(d, node, grant, key), answered)

    def _give_back(self, name: str, sender: Sender, node: str, grant: object) -> None:
        sender.granted.discard((node, grant))
        self.send(name, node, lambda d: self.end_ticket(d, grant))

    def _put(
        self,
        name: str,
        daemon: Daemon,
        rank: int,
        sender: Sender,
        node: str,
        key: SnapshotKey,
        grant: object,
    ) -> None:
        """A transfer: tries again until it is acknowledged, ends exactly once."""
        transfer = Transfer(key, node)
        assert node not in sender.puts
        sender.puts[node] = transfer
        slot = sender.holds.get(key)
        if slot is None:
            self.later(0.01, lambda: self._ended(name, daemon, rank, sender, transfer, False))
            return
        until_s = self.now_s + DEADLINE_S

        def attempt() -> None:
            if transfer.over or self.nodes[name].daemon is not daemon:
                return
            if self.now_s > until_s:
                self._ended(name, daemon, rank, sender, transfer, False)
                return
            content = slot.content
            if self.nodes[node].corrupts and self.rng.random() < 0.5:
                content = ("flipped", *content)

            def arrived(there: Daemon) -> None:
                ticket = there.tickets.get(grant)  # type: ignore[call-overload]
                if ticket is not None:
                    ticket.segment.slots[ticket.index].content = content
                self.send(
                    node,
                    name,
                    lambda _: self._ended(name, daemon, rank, sender, transfer, bool(ticket)),
                )

            self.send(name, node, arrived)
            self.local(name, 0.8, attempt)

        self.local(name, 0.02, attempt)

    def _ended(
        self, name: str, daemon: Daemon, rank: int, sender: Sender, transfer: Transfer, ok: bool
    ) -> None:
        if transfer.over or self.nodes[name].daemon is not daemon:
            return
        transfer.over = True
        del sender.puts[transfer.node]
        self.feed(name, daemon, rank, sender, rep.PutEnded(transfer.node, transfer.key, ok, "put"))
