"""A cluster in one process: replication, the floor and recovery under seeded faults, on a simulated clock.

Real are the cores: `ckptd.replication`, `ckptd.replicas`, `ckptd.ring`, `ckptd.recovery`. Played are machines,
memory, daemons, the network, trainers in lockstep, and fate. A snapshot's content is a value: which state
of which history it is, for which rank; so a wrong, torn or mixed byte is seen at once. Histories form a
tree: a recovery at iteration e branches off there.

After every event `_watch` asserts what ``docs/replication.md`` promises; see there for (a) to (e), and
`settle` for (f). The promise of the floor F, exactly:

    A floor counts as announced as long as a member of the run knows it. When F was announced, each rank that counts had *holders*: the targets that its replicator counted.
    As long as no newer floor is announced and no recovery went below F: every holder whose memory still
    exists holds the rank's complete suffix that ends at F. Lose any nodes, of which at most r have not
    been lost yet: if each rank is left one such holder, or its own node with a suffix that ends at F (a
    trainer's ring may have given it away: training does not wait), and every rank counts, then a plan
    exists and ends at F or later. A node that is cut off is lost for the time being.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from ckptd import replication as rep
from ckptd.recovery import HeldRecords, NoRecovery, Piece, RecoveryPlan, plan_recovery
from ckptd.replicas import (
    Deny,
    Promise,
    admit,
    promised,
    protect_from,
    removable,
    spanning_suffix,
    stale_slots,
)
from ckptd.replication import Replicator, SnapshotKey, key_of
from ckptd.ring import (
    Remedy,
    SlotRecord,
    SlotState,
    check_transition,
    choose_slot,
    droppable_generations,
    epoch_table,
    is_stale,
    newest_by_iteration,
    slots_for_window,
)

__all__ = ["World", "WorldConfig", "play"]

SLACK = 2
DEADLINE_S = 4.0
TICKET_S = 5.0
STEP_S = 1.0
TORN = ("torn",)
Content = tuple[object, ...]
REPLICATION = rep.ReplicationConfig(answer_s=2.0, retry_max_s=2.0, quota_s=1.0, quota_max_s=2.0)


def digest_of(content: Content) -> bytes:
    return hashlib.blake2b(repr(content).encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class WorldConfig:
    """What a seed is played with; the defaults are what the tests play."""

    chaos_s: float = 32.0
    quiet_s: float = 12.0
    interval_floor: bool = True
    "False: the floor is the smallest newest end, whatever the others hold (shows why it may not be)."
    unique_epochs: bool = True
    "False: one more than the highest epoch seen (shows why it may not be)."


@dataclass(slots=True)
class Slot:
    """One slot of a segment: its header and its bytes."""

    record: SlotRecord
    content: Content = TORN
    readers: int = 0


@dataclass(slots=True)
class Segment:
    """A segment file."""

    name: str
    rank: int
    own: bool
    origin: str
    generation: int
    slots: list[Slot]
    num_operators: int

    @property
    def records(self) -> tuple[SlotRecord, ...]:
        return tuple(slot.record for slot in self.slots)

    def move(self, index: int, state: SlotState, **header: object) -> None:
        slot = self.slots[index]
        check_transition(slot.record.state, state)
        slot.record = replace(slot.record, state=state, **header)  # type: ignore[arg-type]


@dataclass(slots=True)
class Ticket:
    """A granted slot; it dies with its daemon, its lease, or the deadline."""

    segment: Segment
    index: int
    lease: int
    record: SlotRecord


@dataclass(slots=True)
class Transfer:
    """A put of a sender."""

    key: SnapshotKey
    node: str
    over: bool = False


@dataclass(slots=True)
class Daemon:
    """What one start of a daemon has in its memory."""

    boot: int
    replicators: dict[int, Replicator] = field(default_factory=dict)
    leases: dict[int, Segment] = field(default_factory=dict)
    tickets: dict[int, Ticket] = field(default_factory=dict)
    peers: dict[str, int] = field(default_factory=dict)  # node: boot, as far as it is reached
    holds: dict[tuple[int, SnapshotKey], Slot] = field(default_factory=dict)
    puts: dict[tuple[int, str], Transfer] = field(default_factory=dict)
    joined: int = -1  # epoch
    reports: dict[str, Report] = field(default_factory=dict)  # at the root
    woken_s: dict[int, float] = field(default_factory=dict)

    def die(self) -> None:
        self.leases.clear()
        self.tickets.clear()


@dataclass(slots=True)
class Node:
    """A machine. Its segments and the promise written beside them survive its daemon."""

    name: str
    up: bool = True
    life: int = 0
    daemon: Daemon | None = None
    segments: dict[str, Segment] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)
    promise: Promise = field(default_factory=Promise)
    promise_epoch: int = -1
    before: tuple[int, int] = (-1, -1)  # the floor of an epoch before: that epoch, the floor
    delay_s: float = 0.1
    full: bool = False
    corrupts: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """What a node says upwards; ``holders`` is for the checks alone."""

    epoch: int
    sequence: int
    below: int | None
    above: int
    carried: tuple[int, int]  # the newest floor known: of which epoch, and the floor
    holders: dict[int, tuple[tuple[str, int], ...]]


@dataclass(frozen=True, slots=True)
class Announced:
    """A floor and who vouched for it: per rank (node, life)."""

    floor: int
    epoch: int
    holders: dict[int, tuple[tuple[str, int], ...]]


class World:
    """One seed."""

    def __init__(self, seed: int, config: WorldConfig | None = None) -> None:
        self.seed, self.config = seed, config or WorldConfig()
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.count = itertools.count(1)
        self.trace: list[str] = []
        self.seen: Counter[str] = Counter()
        self.calm = False
        names = [f"n{i}" for i in range(self.rng.randint(3, 6))]
        self.nodes = {name: Node(name) for name in names}
        spares = self.rng.randint(0, 1) if len(names) > 3 else 0
        self.homes: dict[int, str] = {}
        for name in names[: len(names) - spares]:
            for _ in range(self.rng.randint(1, 2) if len(names) < 5 else 1):
                self.homes[len(self.homes)] = name
        self.world_size = len(self.homes)
        most = self.rng.randint(1, 4)
        alike = self.rng.random() < 0.6
        self.windows = [most if alike else self.rng.randint(1, most) for _ in self.homes]
        self.span = max(self.windows)
        self.replicas = self.rng.randint(1, 2)
        self.cut: set[str] = set()
        self.epoch, self.epoch_start = 0, -1
        self.parents: dict[tuple[int, int], tuple[int, int] | None] = {}  # state: the one before
        self.truth: dict[tuple[int, int, int, int], Content] = {}  # fill: content
        self.history: list[tuple[int, int]] = []  # states by iteration, of the live history
        self.iteration = 0
        self.last: dict[int, int] = {}
        self.sequence: Counter[int] = Counter()
        self.running = False
        self.run_id = 0
        self.announced: Announced | None = None
        self.changed = True
        for node in self.nodes.values():
            node.daemon = Daemon(next(self.count))
        # By opener: node, boot, rank, and the target: what the last `Opened` said, and of which life.
        self.leases: dict[tuple[str, int, int, str, int], int] = {}
        self.lives: dict[tuple[str, int, int, str], int] = {}
        self.later(1.0, self.heartbeat)
        self._start_job(-1)

    # -- time --------------------------------------------------------------------------------------

    def later(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (self.now_s + delay_s, next(self.count), what))

    def run_until(self, end_s: float) -> None:
        while self.queue and self.queue[0][0] <= end_s:
            self.now_s, _, what = heapq.heappop(self.queue)
            what()
            self._watch()
        self.now_s = end_s

    def tell(self, text: str) -> None:
        self.trace.append(f"{self.now_s:8.3f} {text}")

    # -- network -----------------------------------------------------------------------------------

    def reaches(self, a: str, b: str) -> bool:
        return self.nodes[a].up and self.nodes[b].up and not ({a, b} & self.cut)

    def delay(self, a: str, b: str) -> float:
        most = max(self.nodes[a].delay_s, self.nodes[b].delay_s)
        return self.rng.uniform(0.01, 0.05 if self.calm else most)

    def send(self, a: str, b: str, deliver: Callable[[Daemon], None]) -> None:
        """A message: late, lost, doubled, out of order."""
        copies = 1
        if not self.calm:
            draw = self.rng.random()
            copies = 0 if draw < 0.04 else 2 if draw < 0.07 else 1

        def arrive() -> None:
            daemon = self.nodes[b].daemon
            if daemon is not None and self.reaches(a, b):
                deliver(daemon)

        for _ in range(copies):
            self.later(self.delay(a, b), arrive)

    def ask(
        self,
        a: str,
        rank: int,
        b: str,
        serve: Callable[[Daemon], rep.Event],
    ) -> None:
        """A request of rank's replicator on node a to b; the answer is an event for it."""
        asker = self.nodes[a].daemon
        assert asker is not None
        boot = asker.boot

        def served(daemon: Daemon) -> None:
            event = serve(daemon)

            def answered(back: Daemon) -> None:
                if back.boot == boot:
                    self.replicate(a, rank, event)

            self.send(b, a, answered)

        self.send(a, b, served)

    def links_changed(self) -> None:
        """Who cannot be reached is found dead after the deadline; who can, is found soon."""
        for a, b in itertools.permutations(self.nodes, 2):
            if self.nodes[a].daemon is not None:
                self.later(DEADLINE_S, lambda a=a, b=b: self.look(a, b))  # type: ignore[misc]
                self.later(self.rng.uniform(0.1, 1.0), lambda a=a, b=b: self.look(a, b, True))  # type: ignore[misc]

    def look(self, a: str, b: str, good_news_only: bool = False) -> None:
        daemon, other = self.nodes[a].daemon, self.nodes[b].daemon
        if daemon is None:
            return
        boot = other.boot if other is not None and self.reaches(a, b) else -1
        known = daemon.peers.get(b, boot)
        if boot == -1:
            if not good_news_only and known != -1:
                daemon.peers[b] = -1
                self._tell_all(a, rep.PeerLost(b, "deadline"))
            return
        daemon.peers[b] = boot
        if known not in (-1, boot):
            self._tell_all(a, rep.PeerLost(b, "restarted"))
        if known != boot:
            self._tell_all(a, rep.PeerBack(b))

    def _tell_all(self, node: str, event: rep.Event) -> None:
        daemon = self.nodes[node].daemon
        for rank in list(daemon.replicators if daemon is not None else ()):
            self.replicate(node, rank, event)

    # -- the daemon's shell around the replicator ----------------------------------------------------

    def replicate(self, name: str, rank: int, event: rep.Event) -> None:
        daemon = self.nodes[name].daemon
        replicator = daemon.replicators.get(rank) if daemon is not None else None
        if daemon is None or replicator is None:
            return
        before = replicator.replicated
        for effect in replicator.handle(event, now_s=self.now_s):
            self.perform(name, daemon, rank, effect)
        if replicator.replicated != before:
            self.report(name)
        wake_s = replicator.wake_at_s
        if wake_s is not None and daemon.woken_s.get(rank) != wake_s:
            daemon.woken_s[rank] = wake_s
            self.later(max(0.001, wake_s - self.now_s), lambda: self._tick(name, rank, daemon))

    def _tick(self, name: str, rank: int, daemon: Daemon) -> None:
        if self.nodes[name].daemon is daemon:
            daemon.woken_s.pop(rank, None)
            self.replicate(name, rank, rep.Tick())

    def perform(self, name: str, daemon: Daemon, rank: int, effect: rep.Effect) -> None:
        match effect:
            case rep.Open(node, generation):
                source = self._own(name, rank, generation)
                if source is not None:
                    found, pair = source, self._epoch_of(name)
                    self.ask(name, rank, node, lambda d: self.serve_open(d, node, found, pair))
            case rep.Begin(node, key, record):
                lease = self._lease(name, rank, node, key.generation)
                self.ask(name, rank, node, lambda d: self.serve_begin(d, node, lease, key, record))
            case rep.Put(node, key, _, grant):
                self._put(name, daemon, rank, node, key, grant)
            case rep.Seal(node, key, grant):
                self.ask(name, rank, node, lambda d: self.serve_seal(d, node, grant, key))
            case rep.Abort(node, key, grant):
                transfer = daemon.puts.get((rank, node))
                if transfer is not None and transfer.key == key:
                    self.later(0.01, lambda: self._ended(name, daemon, rank, transfer, False))
                self.send(name, node, lambda d: self.end_ticket(d, grant))
            case rep.Hold(key, record):
                segment = self._own(name, rank, key.generation)
                slot = segment.slots[record.index] if segment is not None else None
                if slot is not None and slot.record.sealed and key_of(slot.record) == key:
                    assert (rank, key) not in daemon.holds
                    slot.readers += 1
                    daemon.holds[rank, key] = slot
                else:
                    self.seen["hold failed"] += 1
            case rep.Release(key):
                held = daemon.holds.pop((rank, key), None)
                if held is not None:
                    held.readers -= 1
            case rep.Note(_, kind, message):
                self.seen[kind] += 1
                self.tell(f"{name} r{rank} {kind}: {message}")

    def _own(self, name: str, rank: int, generation: int) -> Segment | None:
        for segment in self.nodes[name].segments.values():
            if segment.own and segment.rank == rank and segment.generation == generation:
                return segment
        return None

    def _epoch_of(self, name: str) -> tuple[int, int]:
        """The epoch that the node takes part in, or did last, and its start."""
        epochs = self.nodes[name].epochs
        newest = max(epochs, default=0)
        return newest, epochs.get(newest, -1)

    def _lease(self, name: str, rank: int, node: str, generation: int) -> int:
        """The shell keeps the leases; here they are found where `Opened` left them."""
        return self.leases.get((name, self._boot(name), rank, node, generation), -1)

    def _boot(self, name: str) -> int:
        daemon = self.nodes[name].daemon
        return -1 if daemon is None else daemon.boot

    def _put(
        self, name: str, daemon: Daemon, rank: int, node: str, key: SnapshotKey, grant: object
    ) -> None:
        """A transfer: tries again until it is acknowledged, ends exactly once."""
        transfer = Transfer(key, node)
        assert (rank, node) not in daemon.puts
        daemon.puts[rank, node] = transfer
        slot = daemon.holds.get((rank, key))
        if slot is None:
            self.later(0.01, lambda: self._ended(name, daemon, rank, transfer, False))
            return
        until_s = self.now_s + DEADLINE_S

        def attempt() -> None:
            if transfer.over or self.nodes[name].daemon is not daemon:
                return
            if self.now_s > until_s:
                self._ended(name, daemon, rank, transfer, False)
                return
            content = slot.content
            if self.nodes[node].corrupts and self.rng.random() < 0.5:
                content = ("flipped", *content)

            def arrived(there: Daemon) -> None:
                ticket = there.tickets.get(grant)  # type: ignore[call-overload]
                if ticket is not None:
                    ticket.segment.slots[ticket.index].content = content
                self.send(
                    node, name, lambda _: self._ended(name, daemon, rank, transfer, bool(ticket))
                )

            self.send(name, node, arrived)
            self.later(0.6, attempt)

        self.later(0.05, attempt)

    def _ended(self, name: str, daemon: Daemon, rank: int, transfer: Transfer, ok: bool) -> None:
        if transfer.over or self.nodes[name].daemon is not daemon:
            return
        transfer.over = True
        del daemon.puts[rank, transfer.node]
        self.replicate(name, rank, rep.PutEnded(transfer.node, transfer.key, ok, "put"))

    # -- the daemon's shell around the host -----------------------------------------------------------

    def serve_open(
        self, daemon: Daemon, at: str, source: Segment, epoch: tuple[int, int]
    ) -> rep.Event:
        node, name = self.nodes[at], f"{source.origin}.rep"
        self._learn_epoch(node, *epoch)
        segment = node.segments.get(name)
        if segment is None:
            if node.full:
                self.seen["quota"] += 1
                return rep.OpenRefused(at, source.generation, "quota", "no memory")
            slots = [
                Slot(SlotRecord(source.generation, i, SlotState.FREE))
                for i in range(len(source.slots))
            ]
            segment = Segment(
                name, source.rank, False, source.origin, source.generation, slots,
                source.num_operators,
            )  # fmt: skip
            node.segments[name] = segment
        for lease in [x for x, leased in daemon.leases.items() if leased is segment]:
            self.end_lease(daemon, lease)
        self.free_stale(node, source.rank)
        lease = next(self.count)
        daemon.leases[lease] = segment
        held = tuple(r for r in segment.records if r.sealed)
        self._remember_lease(source, at, lease)
        return rep.Opened(at, source.generation, lease, held)

    def _remember_lease(self, source: Segment, at: str, lease: int) -> None:
        for name, node in self.nodes.items():
            if source.name in node.segments and node.daemon is not None:
                opener = name, node.daemon.boot, source.rank, at
                self.leases[*opener, source.generation] = lease
                self.lives[opener] = self.nodes[at].life

    def serve_begin(
        self, daemon: Daemon, at: str, lease: int, key: SnapshotKey, record: SlotRecord
    ) -> rep.Event:
        node, segment = self.nodes[at], daemon.leases.get(lease)
        if segment is None:
            return rep.BeginRefused(at, key, "unknown", "no such lease")
        self._learn_epoch(node, record.epoch, record.epoch_start)
        for ticket in [n for n, t in daemon.tickets.items() if t.lease == lease]:
            self.end_ticket(daemon, ticket)
        number, table = self.beside(node, segment)
        busy = {(number, i) for i, slot in enumerate(segment.slots) if slot.readers}
        answer = admit(
            record, table, segment.num_operators, generation=number,
            promise=node.promise, epochs=node.epochs, span=self.span, busy=busy,
        )  # fmt: skip
        if isinstance(answer, Deny):
            self.seen[answer.code] += 1
            return rep.BeginRefused(at, key, answer.code, answer.reason)
        old = segment.slots[answer.index].record
        kept = promised(
            table, segment.num_operators, promise=node.promise, epochs=node.epochs, span=self.span
        )
        assert (
            not old.sealed
            or (number, answer.index) not in kept
            or is_stale(old, epoch_table([record], node.epochs))
        ), f"(d) {at} gives away iteration {old.iteration}, which is promised"
        if old.sealed and is_stale(old, node.epochs):
            segment.move(answer.index, SlotState.FREE)
        header = replace(record, index=answer.index, state=old.state)
        segment.slots[answer.index].record = replace(
            header, state=segment.slots[answer.index].record.state
        )
        segment.move(answer.index, SlotState.FILLING)
        segment.slots[answer.index].content = TORN
        ticket = next(self.count)
        daemon.tickets[ticket] = Ticket(segment, answer.index, lease, record)
        self.later(TICKET_S, lambda: self.end_ticket(daemon, ticket))
        self.changed = True
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
        self.changed = True
        return rep.SealedThere(at, key)

    def end_ticket(self, daemon: Daemon, grant: object) -> None:
        ticket = daemon.tickets.pop(grant, None)  # type: ignore[call-overload]
        if ticket is not None:
            ticket.segment.move(ticket.index, SlotState.FREE)

    def end_lease(self, daemon: Daemon, lease: int) -> None:
        del daemon.leases[lease]
        for number in [n for n, t in daemon.tickets.items() if t.lease == lease]:
            self.end_ticket(daemon, number)

    def group(self, node: Node, rank: int) -> dict[str, list[SlotRecord]]:
        """A rank's replicas, each with a number of its own in place of its generation."""
        segments = [s for s in node.segments.values() if s.rank == rank and not s.own]
        return {
            segment.name: [replace(record, generation=number) for record in segment.records]
            for number, segment in enumerate(segments)
        }

    def beside(self, node: Node, segment: Segment) -> tuple[int, list[SlotRecord]]:
        group = self.group(node, segment.rank)
        table = [record for records in group.values() for record in records]
        return list(group).index(segment.name), table

    def free_stale(self, node: Node, rank: int) -> None:
        group = self.group(node, rank)
        names = list(group)
        table = [record for records in group.values() for record in records]
        for number, index in stale_slots(table, node.epochs):
            node.segments[names[number]].move(index, SlotState.FREE)
            self.changed = True

    def clean(self, node: Node) -> None:
        """What the host does now and then."""
        leased = {s.name for s in (node.daemon.leases.values() if node.daemon else ())}
        for rank in range(self.world_size):
            self.free_stale(node, rank)
            group = {
                name: (self.windows[rank], records)
                for name, records in self.group(node, rank).items()
            }
            for name, _ in removable(group, node.promise, epochs=node.epochs, span=self.span):
                if name not in leased:
                    self.seen["replica removed"] += 1
                    del node.segments[name]
                    self.changed = True

    def _learn_epoch(self, node: Node, epoch: int, start: int) -> None:
        """In a newer epoch everything is kept until its first announcement; the old floor is handed up."""
        node.epochs = epoch_table((), node.epochs) | {epoch: start}
        if epoch > node.promise_epoch:
            if node.promise.floor >= 0:
                node.before = node.promise_epoch, node.promise.floor
            node.promise_epoch, node.promise = epoch, Promise()

    def carried(self, node: Node) -> tuple[int, int]:
        """(epoch, floor) of the newest floor known here, unless its history was left before it."""
        if node.promise.floor >= 0:
            return node.promise_epoch, node.promise.floor
        epoch, floor = node.before
        left = any(e > epoch and start < floor for e, start in node.epochs.items())
        return (-1, -1) if left else node.before

    # -- the floor: a tree of one level --------------------------------------------------------------

    def members(self) -> list[str]:
        return sorted(set(self.homes.values()))

    def report(self, name: str) -> None:
        daemon = self.nodes[name].daemon
        if daemon is None or daemon.joined != self.epoch or name not in self.members():
            return
        node = self.nodes[name]
        found = {rank: core.replicated for rank, core in daemon.replicators.items()}
        runs = [run for run in found.values() if run is not None]
        holders = {
            rank: tuple(
                (state.node, self.lives.get((name, daemon.boot, rank, state.node), -1))
                for state in daemon.replicators[rank].states(now_s=self.now_s)
                if state.counted
            )
            for rank, run in found.items()
            if run is not None
        }
        report = Report(
            daemon.joined,
            next(self.count),
            min((run.last for run in runs), default=None),
            max([node.promise.horizon, *(run.first for run in runs)]),
            self.carried(node),
            holders,
        )
        root = self.members()[0]
        if root == name:
            self.on_report(daemon, name, report)
        else:
            self.send(name, root, lambda d: self.on_report(d, name, report))

    def on_report(self, daemon: Daemon, sender: str, report: Report) -> None:
        root, members = self.members()[0], self.members()
        if self.nodes[root].daemon is not daemon or daemon.joined != report.epoch != -1:
            return
        known = daemon.reports.get(sender)
        if known is not None and (known.epoch, known.sequence) >= (report.epoch, report.sequence):
            return
        daemon.reports[sender] = report
        reports = [daemon.reports.get(member) for member in members]
        told = [r for r in reports if r is not None and r.epoch == self.epoch]
        if len(told) < len(members):
            return
        promise = self.nodes[root].promise
        horizon = max([promise.horizon, *(r.above for r in told)])
        below = min((r.below for r in told if r.below is not None), default=-1)
        # A floor that was announced in the epoch before may be known to others only (found by seed 20073).
        epochs = self.nodes[root].epochs
        floors = [
            (epoch, floor)
            for epoch, floor in (r.carried for r in told)
            if not any(e > epoch and start < floor for e, start in epochs.items())
        ]
        floor = max([promise.floor, max(floors, default=(-1, -1))[1]])
        if below > floor and (below >= horizon or not self.config.interval_floor):
            floor = below
            holders = {rank: h for r in told for rank, h in r.holders.items()}
            self.announced = Announced(floor, report.epoch, holders)
            self.tell(f"floor {floor} horizon {horizon}")
            self.seen["floor moved"] += 1
        fresh = Promise(floor, horizon if self.config.interval_floor else -1)
        if fresh != promise:
            self.announce(root, fresh, report.epoch)

    def announce(self, root: str, promise: Promise, epoch: int) -> None:
        self.on_floor(root, promise, epoch)
        for member in self.members():
            if member != root:
                self.send(root, member, lambda _, m=member: self.on_floor(m, promise, epoch))  # type: ignore[misc]

    def on_floor(self, name: str, promise: Promise, epoch: int) -> None:
        node = self.nodes[name]
        if epoch != node.promise_epoch:
            return
        old = node.promise
        node.promise = Promise(max(old.floor, promise.floor), max(old.horizon, promise.horizon))
        if node.promise != old:
            self.clean(node)
            if node.promise.horizon != old.horizon:
                self.report(name)

    def heartbeat(self) -> None:
        for name in self.members():
            self.report(name)
        root = self.members()[0]
        if self.nodes[root].daemon is not None:
            self.announce(root, self.nodes[root].promise, self.nodes[root].promise_epoch)
        self.later(1.0, self.heartbeat)

    # -- trainers --------------------------------------------------------------------------------------

    def step(self, run_id: int) -> None:
        """One iteration of all ranks."""
        if run_id != self.run_id or not self.running:
            return
        state = (self.epoch, self.iteration)
        if self.iteration > self.epoch_start:
            self.parents[state] = self.history[-1] if self.history else None
            self.history.append(state)
            for rank in self.homes:
                self.snapshot(rank, state)
        self.iteration += 1
        self.later(STEP_S, lambda: self.step(run_id))

    def own_segments(self, rank: int) -> list[Segment]:
        node = self.nodes[self.homes[rank]]
        return sorted(
            (s for s in node.segments.values() if s.own and s.rank == rank),
            key=lambda s: s.generation,
        )

    def snapshot(self, rank: int, state: tuple[int, int]) -> None:
        for _ in range(4):
            found = self._slot(rank)
            if not isinstance(found, Remedy):
                break
            if found is Remedy.GROW and (self.calm or self.rng.random() < 0.5):
                self.reserve(rank)
            elif found is Remedy.WAIT:
                self.seal_filled(rank)
            else:
                break
        if isinstance(found, Remedy):
            self.seen["skipped"] += 1
            return
        if not self.calm and self.rng.random() < 0.01:
            self.seen["skipped"] += 1
            return
        self._fill(rank, *found, state)

    def _slot(self, rank: int) -> tuple[Segment, int] | Remedy:
        segments = self.own_segments(rank)
        node = self.nodes[self.homes[rank]]
        records = [record for segment in segments for record in segment.records]
        busy = {slot.record.key for segment in segments for slot in segment.slots if slot.readers}
        protect = protect_from(
            records, self.windows[rank], promise=node.promise, epochs=node.epochs, span=self.span
        )
        choice = choose_slot(
            records, self.windows[rank], busy=busy, generation=segments[-1].generation,
            protect_from=protect, epochs=node.epochs,
        )  # fmt: skip
        if choice.overrides_floor:
            self.seen["overrode"] += 1
        return choice.remedy if choice.index is None else (segments[-1], choice.index)

    def _fill(self, rank: int, segment: Segment, index: int, state: tuple[int, int]) -> None:
        iteration, window = self.iteration, self.windows[rank]
        self.sequence[rank] += 1
        linked = self.last.get(rank) == iteration - 1
        content: Content = (rank, iteration, state)
        segment.slots[index].content = TORN
        if segment.slots[index].record.sealed:
            segment.move(index, SlotState.FREE)  # stale, or given away
        segment.move(
            index, SlotState.FILLING, iteration=iteration,
            previous=iteration - 1 if linked else -1, sequence=self.sequence[rank],
            image_len=100, anchors=1 << iteration % window, epoch=self.epoch,
            epoch_start=self.epoch_start, header_digest=digest_of(content),
        )  # fmt: skip
        segment.slots[index].content = content
        segment.move(index, SlotState.FILLED)
        self.truth[rank, iteration, self.epoch, self.sequence[rank]] = content
        self.last[rank] = iteration
        run_id = self.run_id
        slow = 0.3 if self.calm else self.rng.choice((0.2, 0.5, 0.9))
        self.later(self.rng.uniform(0.01, slow), lambda: self.seal(rank, segment, index, run_id))
        self.changed = True

    def seal(self, rank: int, segment: Segment, index: int, run_id: int) -> None:
        filled = segment.slots[index].record.state is SlotState.FILLED
        if run_id == self.run_id and filled and self.nodes[self.homes[rank]].up:
            segment.move(index, SlotState.SEALED)
            self.changed = True
            self.tell_slots(self.homes[rank], rank)

    def seal_filled(self, rank: int) -> None:
        for segment in self.own_segments(rank):
            for slot in segment.slots:
                if slot.record.state is SlotState.FILLED:
                    segment.move(slot.record.index, SlotState.SEALED)
        self.tell_slots(self.homes[rank], rank)

    def tell_slots(self, name: str, rank: int) -> None:
        segments = [s for s in self.nodes[name].segments.values() if s.own and s.rank == rank]
        records = tuple(record for segment in segments for record in segment.records)
        self.replicate(name, rank, rep.Slots(records, self.windows[rank]))

    def reserve(self, rank: int, generation: int | None = None) -> Segment:
        name = self.homes[rank]
        node, segments = self.nodes[name], self.own_segments(rank)
        if generation is None:
            generation = segments[-1].generation + 1 if segments else 0
        for old in droppable_generations(
            [record for segment in segments for record in segment.records],
            self.windows[rank], generation, protect_from=node.promise.floor, epochs=node.epochs,
        ):  # fmt: skip
            for segment in segments:
                if segment.generation == old and not any(s.readers for s in segment.slots):
                    del node.segments[segment.name]
        origin = f"r{rank}~g{generation}~{name}.{next(self.count)}"
        num = slots_for_window(self.span, SLACK)
        slots = [Slot(SlotRecord(generation, i, SlotState.FREE)) for i in range(num)]
        segment = Segment(
            f"{origin}.seg", rank, True, origin, generation, slots, self.windows[rank]
        )
        node.segments[segment.name] = segment
        self.seen["reserved"] += 1
        return segment

    # -- recovery --------------------------------------------------------------------------------------

    def holdings(self, without: Collection[str] = ()) -> list[HeldRecords]:
        return [
            HeldRecords(
                name, segment.name, segment.own, segment.rank, segment.num_operators, "ops", 128,
                tuple(r for r in segment.records if r.sealed),
            )
            for name, node in sorted(self.nodes.items())
            if node.up and name not in without
            for segment in node.segments.values()
        ]  # fmt: skip

    def stop_job(self, why: str) -> None:
        self.tell(f"job stops: {why}")
        if self.running:
            self.running = False
            self.run_id += 1
            self.later(self.rng.uniform(1.0, 3.0), lambda run=self.run_id: self.recover(run))  # type: ignore[misc]

    def recover(self, run_id: int) -> None:
        if run_id != self.run_id or self.running:
            return
        usable = [n for n, node in self.nodes.items() if node.up and n not in self.cut]
        if len(usable) < 2:
            self.later(1.0, lambda: self.recover(run_id))
            return
        for name in usable:
            if self.nodes[name].daemon is None:
                self.start_daemon(name)
            for segment in self.nodes[name].segments.values():  # the trainers are dead
                for slot in segment.slots:
                    if segment.own and slot.record.state is SlotState.FILLED:
                        segment.move(slot.record.index, SlotState.SEALED)
        away = [name for name in self.nodes if name not in usable]
        homes = self._new_homes(usable)
        held = self.holdings(away)
        plan = plan_recovery(held, self.world_size, homes=homes)
        self.check_promise(away, plan)
        self.seen["recovered" if isinstance(plan, RecoveryPlan) else "began anew"] += 1
        highest = plan.epoch
        if self.config.unique_epochs:
            highest = max(highest, int(self.now_s * 100))
        self._resume(plan, homes, highest + 1)

    def _new_homes(self, usable: list[str]) -> dict[int, str]:
        homes = {}
        permuted = self.rng.random() < 0.2
        for rank, name in self.homes.items():
            stays = name in usable and not permuted
            empty = [n for n in usable if n not in self.homes.values()]
            homes[rank] = name if stays else self.rng.choice(empty or usable)
        if len(set(homes.values())) < 2:
            homes[0] = next(n for n in usable if n != homes[0])
        return homes

    def _resume(self, plan: RecoveryPlan | NoRecovery, homes: dict[int, str], epoch: int) -> None:
        end = plan.end if isinstance(plan, RecoveryPlan) else -1
        self.tell(f"recovery: epoch {epoch} from {end}: {plan.reason}; homes {homes}")
        if self.announced is not None and end < self.announced.floor:
            self.announced = None
        self.homes, self.epoch, self.epoch_start = homes, epoch, end
        self._forget_unknown()
        if isinstance(plan, RecoveryPlan):
            piece = plan.per_rank[0][-1]
            source = piece.sources[0]
            content = self.nodes[source.node].segments[source.segment].slots[source.index].content
            self.history = self._history_of(content[2])  # type: ignore[arg-type]
            self.check_plan(plan)
            for rank, pieces in plan.per_rank.items():
                self._fetch(rank, pieces, end)
        else:
            self.history = []
            for rank in homes:
                for segment in self.own_segments(rank):
                    del self.nodes[homes[rank]].segments[segment.name]
        self._start_job(end)

    def _history_of(self, state: tuple[int, int]) -> list[tuple[int, int]]:
        found = [state]
        while (before := self.parents[found[-1]]) is not None:
            found.append(before)
        return found[::-1]

    def _copy_of(self, piece: Piece) -> Slot:
        """Any of its sources."""
        source = self.rng.choice(piece.sources)
        there = self.nodes[source.node].segments[source.segment].slots[source.index]
        return Slot(there.record, there.content)

    def _fetch(self, rank: int, pieces: Iterable[Piece], end: int) -> None:
        """Map what lies here, else copy it into a new generation; free what came later here."""
        home = self.homes[rank]
        node = self.nodes[home]
        own = {segment.name for segment in self.own_segments(rank)}
        wanted = list(pieces)
        self.sequence[rank] = max(p.record.sequence for p in wanted)
        self.last[rank] = end
        here = all(any(s.node == home and s.segment in own for s in p.sources) for p in wanted)
        if not here:
            self.seen["fetched"] += 1
            copies = [self._copy_of(piece) for piece in wanted]  # `reserve` may drop a source
            segment = self.reserve(rank)
            for index, there in enumerate(copies):
                segment.slots[index].content = there.content
                segment.slots[index].record = replace(
                    there.record, generation=segment.generation, index=index
                )
                self.check_copy(segment, index)
        for segment in self.own_segments(rank):
            for slot in segment.slots:
                known = epoch_table((), node.epochs) | {self.epoch: end}
                record = slot.record
                if record.sealed and (record.iteration > end or is_stale(record, known)):
                    segment.move(record.index, SlotState.FREE)

    def _start_job(self, end: int) -> None:
        self.running, self.run_id = True, self.run_id + 1
        self.iteration = end + 1
        self.changed = True
        if end < 0:
            self.last.clear()
        for rank in self.homes:
            if not self.own_segments(rank):
                self.reserve(rank)
        for name in self.nodes:
            self.join(name)
        run_id = self.run_id
        self.later(self.rng.uniform(0.1, 1.0), lambda: self.step(run_id))

    def join(self, name: str) -> None:
        """The ranks of this node tell its daemon who takes part."""
        node = self.nodes[name]
        daemon = node.daemon
        if daemon is None or not node.up or name in self.cut:
            return
        ranks = [rank for rank, home in self.homes.items() if home == name]
        for rank in list(daemon.replicators):
            if rank not in ranks:
                self.replicate(name, rank, rep.Targets(()))
        if not ranks:
            return
        self._learn_epoch(node, self.epoch, self.epoch_start)
        daemon.joined = (
            -1
        )  # no report may tell of a rank that has not joined yet (found by seed 259)
        for rank in ranks:
            if rank not in daemon.replicators:
                daemon.replicators[rank] = Replicator(REPLICATION)
            targets = self.placement(rank)
            for event in (
                rep.Joined(self.epoch, self.epoch_start, self.span),
                rep.Targets(targets),
            ):
                self.replicate(name, rank, event)
            for target in targets:
                if daemon.peers.get(target) == -1:
                    self.replicate(name, rank, rep.PeerLost(target, "known to be lost"))
            self.tell_slots(name, rank)
        for peer in self.nodes:
            if peer != name:
                self.look(name, peer, True)
        daemon.joined = self.epoch
        self.report(name)

    def placement(self, rank: int) -> tuple[str, ...]:
        """Any other members; a pure function of members, rank and epoch, as the real one is of more."""
        others = [m for m in self.members() if m != self.homes[rank]]
        random.Random(f"{self.seed} {self.epoch // 7} {rank}").shuffle(others)
        return tuple(sorted(others[: self.replicas]))

    # -- faults ----------------------------------------------------------------------------------------

    def crash_daemon(self, name: str) -> None:
        node = self.nodes[name]
        if node.daemon is None:
            return
        self.seen["daemon crashed"] += 1
        self.tell(f"{name}: daemon crashes")
        node.daemon.die()
        node.daemon = None
        for segment in node.segments.values():
            for slot in segment.slots:
                slot.readers = 0
        self.later(self.rng.uniform(0.2, 6.0), lambda: self.start_daemon(name))
        self.links_changed()

    def start_daemon(self, name: str) -> None:
        node = self.nodes[name]
        if node.daemon is not None or not node.up:
            return
        self.tell(f"{name}: daemon starts")
        for segment in node.segments.values():
            for slot in segment.slots:
                if slot.record.state is SlotState.FILLING or (
                    not segment.own and slot.record.state is SlotState.FILLED
                ):
                    segment.move(slot.record.index, SlotState.FREE)
        node.daemon = Daemon(next(self.count))
        node.daemon.peers = dict.fromkeys((n for n in self.nodes if n != name), -1)
        for peer in node.daemon.peers:
            if self.reaches(name, peer) and (other := self.nodes[peer].daemon) is not None:
                node.daemon.peers[peer] = other.boot
        self.changed = True
        if self.running:
            self.join(name)
        self.links_changed()

    def destroy(self, name: str) -> None:
        node = self.nodes[name]
        if not node.up:
            return
        self.seen["destroyed"] += 1
        self.tell(f"{name}: destroyed")
        if node.daemon is not None:
            node.daemon.die()
        node.up, node.life, node.daemon = False, node.life + 1, None
        node.segments, node.epochs = {}, {}
        node.promise, node.promise_epoch, node.before = Promise(), -1, (-1, -1)
        self.changed = True
        self._forget_unknown()
        self.later(self.rng.uniform(3.0, 10.0), lambda: self.replace_machine(name))
        self.links_changed()
        if name in self.homes.values():
            self.stop_job(f"{name} destroyed")

    def _forget_unknown(self) -> None:
        """A floor that no member knows (any more) was announced to nobody."""
        told = self.announced
        known = max(self.carried(self.nodes[name])[1] for name in self.members())
        if told is not None and known < told.floor:
            self.announced = None

    def replace_machine(self, name: str) -> None:
        if not self.nodes[name].up:
            self.nodes[name].up = True
            self.start_daemon(name)

    def cut_off(self, name: str, seconds: float, job_too: bool) -> None:
        self.seen["cut off"] += 1
        self.tell(f"{name}: cut off for {seconds:.1f} s{' with its ranks' if job_too else ''}")
        self.cut.add(name)
        self.links_changed()
        self.later(seconds, lambda: self.heal(name))
        if job_too and name in self.homes.values():
            self.stop_job(f"{name} cut off")

    def heal(self, name: str) -> None:
        if name in self.cut:
            self.tell(f"{name}: healed")
            self.cut.discard(name)
            self.links_changed()
            if self.running:
                self.later(0.1, lambda: self.rejoin(name))

    def rejoin(self, name: str) -> None:
        daemon = self.nodes[name].daemon
        if self.running and daemon is not None and daemon.joined != self.epoch:
            self.join(name)

    def fault(self) -> None:
        name = self.rng.choice(sorted(self.nodes))
        draw = self.rng.random()
        node = self.nodes[name]
        if draw < 0.25:
            self.crash_daemon(name)
        elif draw < 0.35:
            self.destroy(name)
            if self.rng.random() < 0.2:
                self.destroy(self.rng.choice(sorted(self.nodes)))
        elif draw < 0.60:
            self.cut_off(name, self.rng.uniform(0.5, 2.5 * DEADLINE_S), self.rng.random() < 0.3)
        elif draw < 0.72:
            node.delay_s = self.rng.choice((0.1, 0.5, 2.0))
        elif draw < 0.80:
            node.full = not node.full
        elif draw < 0.90:
            node.corrupts = not node.corrupts
        else:
            self.stop_job("a trainer died")
        self.later(self.rng.expovariate(1 / 3.5), self.fault)

    # -- invariants --------------------------------------------------------------------------------------

    def _watch(self) -> None:
        if not self.changed:
            return
        self.changed = False
        self.check_holders()
        if self.rng.random() < 0.25:
            lost = self.rng.sample(sorted(self.nodes), self.rng.randint(0, self.replicas))
            lost += self.cut
            plan = plan_recovery(self.holdings(lost), self.world_size)
            self.check_promise(lost, plan)
            if isinstance(plan, RecoveryPlan):
                self.check_plan(plan)

    def check_copy(self, segment: Segment, index: int) -> None:
        """(a) A sealed copy is the primary's snapshot, byte by byte."""
        slot = segment.slots[index]
        record = slot.record
        fill = segment.rank, record.iteration, record.epoch, record.sequence
        assert record.sealed
        assert slot.content == self.truth[fill], f"(a) {segment.name} slot {index}: {slot.content}"

    def check_plan(self, plan: RecoveryPlan) -> None:
        """(b) The pieces are one history: at each iteration one state of all ranks, each the next's past."""
        states: dict[int, set[tuple[int, int]]] = {}
        for rank, pieces in plan.per_rank.items():
            for iteration, piece in enumerate(pieces, start=plan.start):
                for source in piece.sources:
                    slot = self.nodes[source.node].segments[source.segment].slots[source.index]
                    assert slot.content[:2] == (rank, iteration), f"(b) {source}: {slot.content}"
                    states.setdefault(iteration, set()).add(slot.content[2])  # type: ignore[arg-type]
        path = []
        for iteration in range(plan.start, plan.end + 1):
            assert len(states[iteration]) == 1, f"(b) mixed at {iteration}: {states[iteration]}"
            path.append(states[iteration].pop())
        for before, after in itertools.pairwise(path):
            assert self.parents[after] == before, f"(b) {after} does not follow {before}"

    def check_holders(self) -> None:
        """(c, d) Who vouched for the floor holds its suffix. (e) is that slots are a list of fixed length."""
        told = self.announced
        if told is None:
            return
        for rank, holders in told.holders.items():
            for name, life in holders:
                node = self.nodes[name]
                if node.up and node.life == life:
                    assert self.holds(node, rank, told.floor, own=False), (
                        f"(c) {name} does not hold rank {rank} up to the floor {told.floor}"
                    )

    def holds(self, node: Node, rank: int, end: int, *, own: bool) -> bool:
        records = [
            record
            for segment in node.segments.values()
            if segment.rank == rank and segment.own is own
            for record in segment.records
        ]
        newest = newest_by_iteration(records, node.epochs)
        return spanning_suffix(newest, self.windows[rank], self.span, end=end) is not None

    def check_promise(self, lost: Collection[str], plan: RecoveryPlan | NoRecovery) -> None:
        """(c) as the module says it."""
        told = self.announced
        if told is None or any(rank not in told.holders for rank in self.homes):
            return
        for rank in self.homes:
            left = any(
                self.nodes[name].up and self.nodes[name].life == life and name not in lost
                for name, life in told.holders[rank]
            )
            home = self.homes[rank]
            own = home not in lost and self.nodes[home].up
            if not left and not (own and self.holds(self.nodes[home], rank, told.floor, own=True)):
                return
        self.seen["promise checked"] += 1
        assert isinstance(plan, RecoveryPlan), f"(c) floor {told.floor}, but {plan.reason}"
        assert plan.end >= told.floor, f"(c) floor {told.floor}, but only {plan.end}: {plan.reason}"

    # -- the play --------------------------------------------------------------------------------------

    def settle(self) -> None:
        """(f) Nothing happens any more: replication catches up, and what is unneeded goes."""
        self.calm = True
        for name, node in self.nodes.items():
            node.delay_s, node.full, node.corrupts = 0.05, False, False
            self.heal(name)
            if not node.up:
                self.replace_machine(name)
            self.start_daemon(name)
        self.tell("calm")
        self.run_until(self.now_s + self.config.quiet_s)
        assert self.running, "(f) the job does not come back"
        newest = self.iteration - 1
        counting = [
            core.replicated
            for name in self.members()
            for core in (self.nodes[name].daemon or Daemon(0)).replicators.values()
        ]
        floor = self.nodes[self.members()[0]].promise.floor
        late = newest - floor
        assert late <= 3, f"(f) floor {floor}, newest {newest}, replicated {counting}"
        for node in self.nodes.values():
            replicas = Counter(s.rank for s in node.segments.values() if not s.own)
            assert max(replicas.values(), default=0) <= 6, f"(e) {node.name}: {replicas}"

    def play(self) -> None:
        self.later(self.rng.uniform(0.5, 6.0), self.fault)
        self.run_until(self.config.chaos_s)
        self.queue = [entry for entry in self.queue if entry[2] != self.fault]
        heapq.heapify(self.queue)
        self.settle()


def play(seed: int, config: WorldConfig | None = None) -> World:
    """The world of this seed, played to its end; a broken promise carries the seed and the trace."""
    world = World(seed, config)
    try:
        world.play()
    except Exception as error:
        error.add_note("\n".join(world.trace[-60:]))
        error.add_note(f"seed {seed}, time {world.now_s:.3f}, {dict(world.seen)}")
        raise
    return world
