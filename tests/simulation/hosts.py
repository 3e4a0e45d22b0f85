"""The daemon's shell around the replica host: `ckptd.peers.replica_leases`,
`ckptd.peers.slot_grants` and `ckptd.peers.replica_server`, in short.
"""

from __future__ import annotations

from dataclasses import replace

from ckptd.core.replication import target as rep
from ckptd.core.replication.replicas import Deny, Promise, admit, promised, removable, stale_slots
from ckptd.core.slots.slots import SlotRecord, SlotState, SnapshotKey, check_transition, epoch_table, is_stale
from tests.simulation.checks import Checks
from tests.simulation.model import (
    JOB,
    LEASE_IDLE_S,
    TICKET_S,
    TORN,
    Daemon,
    Lease,
    Node,
    Segment,
    Slot,
    Ticket,
    digest_of,
)

__all__ = ["Hosts"]


class Hosts(Checks):
    """Replicas for peers."""

    def serve_open(
        self,
        daemon: Daemon,
        at: str,
        peer: str,
        boot: int,
        source: Segment,
        epoch: tuple[int, int, int],
    ) -> rep.Event:
        self.note_epoch(daemon, at, *epoch[:2])
        node, span = self.nodes[at], epoch[2]
        if node.few_files:
            self.seen["no descriptor"] += 1
            return rep.OpenRefused(at, source.generation, "fs", "too many open files")
        num_slots = max(len(source.slots), 2 * max(source.num_operators, span))
        rings = [s for s in node.segments.values() if not s.own and s.primary == source.name]
        wide = [ring for ring in rings if len(ring.slots) >= num_slots]
        if not wide:
            if node.full or node.no_space:
                self.seen["quota"] += 1
                return rep.OpenRefused(at, source.generation, "quota", "no memory")
            self.seen["widened"] += bool(rings)
            wide = [self._make_ring(node, source, num_slots, len(rings))]
            rings += wide
        number = self._lease(daemon, at, peer, boot, wide[-1], rings)
        held = tuple([r for ring in rings for r in ring.sealed])
        return rep.TargetOpened(at, source.generation, number, held, f"{daemon.boot}")

    def _lease(
        self, daemon: Daemon, at: str, peer: str, boot: int, segment: Segment, rings: list[Segment]
    ) -> int:
        for number, known in daemon.leases.items():
            if (known.peer, known.boot) == (peer, boot) and known.segment is segment:
                known.used_s = self.clock(at)
                return number
        daemon.leases = {
            number: lease
            for number, lease in daemon.leases.items()
            if (lease.peer, lease.boot) != (peer, boot) or lease.segment not in rings
        }
        number = next(self.count)
        daemon.leases[number] = Lease(peer, boot, segment, self.clock(at))
        return number

    def _make_ring(self, node: Node, source: Segment, num_slots: int, number: int) -> Segment:
        slots = [Slot(SlotRecord(source.generation, i, SlotState.FREE)) for i in range(num_slots)]
        name = f"{source.name}.rep{number}"
        node.segments[name] = Segment(
            name, source.rank, False, source.name, source.generation, slots, source.num_operators
        )
        return node.segments[name]

    def serve_begin(
        self,
        daemon: Daemon,
        at: str,
        lease: int,
        key: SnapshotKey,
        record: SlotRecord,
        told: tuple[int, Promise, int],
    ) -> rep.Event:
        node, found = self.nodes[at], daemon.leases.get(lease)
        if found is None:
            return rep.BeginRefused(at, key, "unknown", "no such lease")
        found.used_s = self.clock(at)
        segment = found.segment
        told_epoch, told_promise, told_span = told
        daemon.known.learn(*JOB, told_epoch, told_promise, told_span)
        promise, span = daemon.known.promise(*JOB)
        epochs = daemon.known.epochs(*JOB)
        number, table = self.beside(node, segment)
        filling = {(number, t.index) for t in daemon.tickets.values() if t.segment is segment}
        answer = admit(
            record,
            table,
            segment.num_operators,
            generation=number,
            promise=promise,
            epochs=epochs,
            span=span,
            busy=filling,
        )
        if isinstance(answer, Deny):
            self.seen[answer.code] += 1
            return rep.BeginRefused(at, key, answer.code, answer.reason)
        old = segment.slots[answer.index].record
        if old.sealed:
            self.changed = True
            known = epoch_table([record], epochs)
            kept = promised(table, segment.num_operators, promise=promise, epochs=known, span=span)
            assert (number, answer.index) not in kept or is_stale(old, known), (
                f"(d) {at} gives away iteration {old.iteration}, which is promised"
            )
            if is_stale(old, known):
                segment.move(answer.index, SlotState.FREE)
        state = segment.slots[answer.index].record.state
        check_transition(state, SlotState.FILLING)
        filling_record = replace(record, index=answer.index, state=SlotState.FILLING)
        segment.slots[answer.index] = Slot(filling_record, TORN)
        segment.write(answer.index, filling_record)
        ticket = next(self.count)
        daemon.tickets[ticket] = Ticket(found.peer, found.boot, segment, answer.index, lease, record)
        self.local(at, TICKET_S, lambda: self.end_ticket(daemon, ticket))
        return rep.Granted(at, key, ticket)

    def serve_seal(self, daemon: Daemon, at: str, grant: object, key: SnapshotKey) -> rep.Event:
        ticket = daemon.tickets.pop(grant, None)  # type: ignore[call-overload]
        if ticket is None:
            return rep.SealRefused(at, key, "unknown", "no such ticket")
        segment, index = ticket.segment, ticket.index
        segment.move(index, SlotState.FILLED)
        if digest_of(segment.slots[index].content) != ticket.record.header_digest:
            segment.move(index, SlotState.FREE)
            self.seen["digest"] += 1
            return rep.SealRefused(at, key, "digest", "another digest")
        segment.move(index, SlotState.SEALED)
        self.check_copy(segment, index)
        self.seen["replicated"] += 1
        return rep.SealedThere(at, key)

    def end_ticket(self, daemon: Daemon, grant: object) -> None:
        ticket = daemon.tickets.pop(grant, None)  # type: ignore[call-overload]
        if ticket is not None:
            ticket.segment.move(ticket.index, SlotState.FREE)

    def end_peer(self, daemon: Daemon, peer: str, but_boot: int) -> None:
        """A peer is gone: what it has here ends, but for what this boot of it has begun."""
        for number, ticket in list(daemon.tickets.items()):
            if ticket.peer == peer and ticket.boot != but_boot:
                self.end_ticket(daemon, number)
        daemon.leases = {n: v for n, v in daemon.leases.items() if v.peer != peer or v.boot == but_boot}

    # Replicas that lie beside one another.

    def group(self, node: Node, rank: int) -> dict[str, tuple[SlotRecord, ...]]:
        """A rank's replicas, each with a number of its own in place of its generation."""
        segments = [s for s in node.segments.values() if s.rank == rank and not s.own]
        return {segment.name: segment.numbered(number) for number, segment in enumerate(segments)}

    def beside(self, node: Node, segment: Segment) -> tuple[int, list[SlotRecord]]:
        group = self.group(node, segment.rank)
        table = [record for records in group.values() for record in records]
        return list(group).index(segment.name), table

    def note_epoch(self, daemon: Daemon, at: str, epoch: int, start: int) -> None:
        """What a recovery abandoned is freed."""
        self.nodes[at].record.learn(epoch, start)
        if not daemon.known.note_epoch(*JOB, epoch, start):
            return
        node, epochs = self.nodes[at], daemon.known.epochs(*JOB)
        for rank in self.homes:
            group = self.group(node, rank)
            names = list(group)
            table = [record for records in group.values() for record in records]
            for number, index in stale_slots(table, epochs):
                node.segments[names[number]].move(index, SlotState.FREE)
                self.changed = True

    def clean(self, daemon: Daemon, at: str) -> None:
        """What the host does now and then."""
        node = self.nodes[at]
        now_s = self.clock(at)
        in_use = {v.segment.name for v in daemon.leases.values() if now_s - v.used_s < LEASE_IDLE_S} | {
            t.segment.name for t in daemon.tickets.values()
        }
        promise, span = daemon.known.promise(*JOB)
        epochs = daemon.known.epochs(*JOB)
        for rank, trainer in self.trainers.items():
            group = {name: (trainer.window, r) for name, r in self.group(node, rank).items()}
            if in_use.issuperset(group):
                continue
            is_open = not in_use.isdisjoint(group)
            for name, _ in removable(group, promise, epochs=epochs, span=span, is_open=is_open):
                if name not in in_use:
                    gone = node.segments.pop(name)
                    self.seen["replica removed"] += 1
                    self.changed = True
                    for number in [n for n, v in daemon.leases.items() if v.segment is gone]:
                        del daemon.leases[number]
        present = any(not s.own for s in node.segments.values())
        daemon.known.forget_promises(lambda job, run: not present)
