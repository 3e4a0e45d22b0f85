"""This node among the others: who can be reached, which runs it takes part in, what it fetches.

Everything here runs on the daemon's loop thread; the fabric's threads hand over what arrives
through `post`. Without a peer listener nothing is connected and snapshots stay on this node;
fetching still works for what lies here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec

from ckptd.core.recovery.held import STORE_NODE
from ckptd.core.replication.access import RunAccess
from ckptd.core.replication.replicas import Promise
from ckptd.core.sessions import RankKey
from ckptd.core.slots.ring import SlotState
from ckptd.memory.replay_failures import Quarantine
from ckptd.memory.segment_file import Adopted, Segment, tell_adopted
from ckptd.memory.segment_store import SegmentMaker
from ckptd.memory.slot_digests import Doubt, ImageDigests
from ckptd.node_context import NodeContext, NodeWorkers
from ckptd.peers.fabric import FabricWatch, QuietGate, make_fabric, static_peers
from ckptd.peers.peer_link import Holder, PeerLink
from ckptd.peers.peer_nodes import Neighbours
from ckptd.peers.peer_requests import PeerInbox, RunGuard
from ckptd.peers.replica_leases import HostWorkers
from ckptd.peers.replica_server import Host, local_holdings
from ckptd.peers.replica_store import ReplicaStore
from ckptd.peers.run_news import RecordUpdates, RunNews, RunSurvey
from ckptd.peers.run_records import RunRecords
from ckptd.peers.runs import Run
from ckptd.persistence.store_link import StoreLink
from ckptd.restore.fetches import Fetches
from ckptd.transport.control import peer_messages as p
from ckptd.transport.control.messages import (
    Drill,
    DrillReport,
    GetHoldings,
    Holdings,
    HostedReplica,
    Join,
    Member,
    NodeCard,
    Peers,
    ReplayFailure,
    RunSeen,
    SeeRun,
)
from ckptd.transport.verbs import Fabric
from ckptd.workers import Workers

__all__ = ["Peering"]

logger = logging.getLogger(__name__)

_RUN_IDLE_S = 3600.0  # a run that joined and has had no segment here since
_WAITS = 16_384  # more than tickets and reads together


class Peering:
    """Connections, runs, replicas and fetches of one daemon.

    Raises:
        UnusableFolder: the peer listener cannot be opened, or its security is not configured.
    """

    def __init__(self, node: NodeContext, workers: NodeWorkers, *, doubt: Doubt) -> None:
        store, events = node.store, node.events
        self._node, self._config, self._store, self._events = node, node.config, store, events
        self._clock, self.doubt = node.clock, doubt
        self.maker = SegmentMaker(store, events, workers.slow, node.clock)
        self.replicas = ReplicaStore(store)
        self.quarantine = Quarantine(
            store.folder,
            events,
            segments=lambda job, run: (
                *store.all_of_run(job, run),
                *self.replicas.all_of_run(job, run),
            ),
            damaged=self._quarantined,
        )
        self.runs: dict[tuple[str, str], Run] = {}
        self.records = RunRecords(store.folder, events)
        self._quiet = QuietGate()
        self._inbox = PeerInbox(node, self._serve)
        self.fabric: Fabric | None = make_fabric(
            node.config, node.node_id, self._inbox.arrived, self._quiet, self._turned_away
        )
        self._watch = None if self.fabric is None else FabricWatch(self.fabric, node)
        self._static = static_peers(node.config)
        access = RunAccess(
            node.node_id,
            [card.node for card in self._static],
            record_of=self.records.of,
            holds=self._holds,
            everybody=node.config.peer_access == "trusted",
        )
        self._guard = RunGuard(access, events, record_of=self.records.of, clock=node.clock)
        self.neighbours = Neighbours(node, self.fabric, self)
        self._news = RunNews(node, self.records, link=self.neighbours.link, note_epoch=self._note_epoch)
        self._updates = RecordUpdates(
            node.node_id,
            record_of=self.records.of,
            reach=self._reach,
            learn=self._news.learn,
            clock=node.clock,
        )
        self._stored: StoreLink | None = None
        self.fetches = Fetches(node, self.maker, self.replicas, workers, link=self._holder, doubt=doubt)
        self._digesters = self._own_workers("image-digest")
        self._digests = ImageDigests(
            self._digesters,
            events,
            threads=workers.digests.count,
            map_fn=workers.digests.map_fn,
            doubt=doubt,
        )
        self._settlers = self._own_workers("settle")
        self.host: Host | None = None
        if self.fabric is not None:
            self.host = Host(
                node,
                self.fabric,
                self.replicas,
                HostWorkers(self._digesters, self.maker, self._settlers, workers.digests),
                owner=self,
                vouch=self._digests.want,
                records=self.records,
            )

    def _own_workers(self, name: str) -> Workers:
        """Two threads; what they have done is collected on the loop thread."""
        made = Workers(name, 2, _WAITS, lambda: self._node.post(made.collect))
        return made

    @property
    def slack(self) -> int:
        """Slots that a trainer's ring should have for snapshots that wait for peers."""
        return 0 if self.fabric is None else self._config.replication_slack

    def join(self, key: RankKey, message: Join) -> str:
        """A local rank tells who takes part in its run. Returns why it is refused, or "".

        Raises:
            OSError: that cannot be written beside the segments, where it must be before the first
                snapshot is taken.
        """
        message = self._with_static_peers(message)
        record = self.records.of(key.job, key.run)
        if record is not None and message.epoch < record.epoch:
            return f"epoch {message.epoch} of {key} is over: epoch {record.epoch} has begun here"
        self.records.joined(key.job, key.run, message)  # before anything of this epoch can be lost
        self.neighbours.meet(member.card for member in message.members)
        run = self.runs.get((key.job, key.run))
        if run is None:
            run = self.runs[key.job, key.run] = Run(
                key.job,
                key.run,
                self._node,
                link=self.neighbours.link,
                vouch=self._digests.want,
            )
        if refused := run.join(key, message):
            return refused
        self._take_note(run)
        self._tell_idle(run)
        self._note_epoch(key.job, key.run, message.epoch, message.epoch_start)
        for node in self.neighbours.lost:  # before this epoch began, and still
            run.peer_lost(node, "it has not answered for long")
        return ""

    def see_run(self, message: SeeRun, answer: Callable[[RunSeen], None]) -> None:
        """What is held of a run: here, and on nodes that took part before and have no rank now."""
        self.neighbours.meet(self._static)
        self.admit(message.job, message.run, message.known)
        RunSurvey(
            GetHoldings(message.job, message.run, nodes=message.known),
            self.holdings(message.job, message.run),
            self._static,
            self._reach,
            partial(self._with_stored, message, answer) if message.storage else answer,
            known=message.known,
            refused=self._survey_refused,
        )

    def admit(self, job: str, run: str, nodes: Iterable[str]) -> None:
        """A local trainer, or the operator, says that these nodes take part in a start of the run."""
        self._guard.access.admit(job, run, nodes, now_s=self._clock())

    def _survey_refused(self, node: str, reason: str) -> None:
        self._events.add("warning", "peer_refused", f"{node} does not tell what it holds: {reason}")

    def _reach(self, cards: Sequence[NodeCard]) -> list[tuple[NodeCard, PeerLink, float]]:
        self.neighbours.meet(cards)
        return self.neighbours.to_ask(cards)

    def _with_stored(self, message: SeeRun, answer: Callable[[RunSeen], None], seen: RunSeen) -> None:
        """And what is durable."""
        if self._stored is None:
            answer(seen)
            return

        def failed(code: str, reason: str) -> None:
            self._events.add("error", "store_silent", f"{message.job}/{message.run}: {reason}")
            answer(msgspec.structs.replace(seen, silent=(*seen.silent, STORE_NODE)))

        marks = sorted(self.quarantine.marks(message.job, message.run))
        self._stored.ask(
            GetHoldings(message.job, message.run, tuple(marks)),
            Holdings,
            lambda h: answer(msgspec.structs.replace(seen, holdings=(*seen.holdings, h))),
            failed,
        )

    def use_store(self, link: StoreLink) -> None:
        """What is durable can be had from there."""
        self._stored = link

    def span_of(self, job: str, run: str) -> int:
        """How many snapshots the longest suffix of a run has, as far as it is known here."""
        found = self.runs.get((job, run))
        return 1 if found is None else found.span

    def _holder(self, node: str) -> Holder | None:
        """Whoever may hold snapshots: a node, or storage."""
        return self._stored if node == STORE_NODE else self.neighbours.link(node)

    def drill(self, message: Drill, answer: Callable[[DrillReport], None]) -> None:
        """Rehearse the recovery of a rank from other nodes than its own."""
        key = RankKey(message.job, message.run, message.rank)
        self.see_run(SeeRun(message.job, message.run), self.fetches.drill(key, answer))

    def sealed(self, segment: Segment) -> None:
        """A snapshot of one of our ranks was sealed."""
        run = self.runs.get((segment.key.job, segment.key.run))
        if run is not None:
            run.sealed(segment.key.rank)
            self._take_note(run)

    def log_sealed(self, segment: Segment) -> None:
        """A slot of a boundary log of one of our ranks was sealed."""
        run = self.runs.get((segment.key.job, segment.key.run))
        if run is not None and segment.descriptor.replicated:
            run.logged(segment.key.rank)

    def changed(self, key: RankKey) -> None:
        """What there is of one of our ranks changed: a snapshot was sealed, or a generation, of
        whatever kind, went.
        """
        run = self.runs.get((key.job, key.run))
        if run is not None:
            run.sealed(key.rank)
            run.logged(key.rank)

    def damaged(self, segment: Segment) -> None:
        """A slot here was quarantined: if it is a replica's, its sender must send it again."""
        if self.host is not None:
            self.host.damaged(segment)

    def _quarantined(self, segment: Segment) -> None:
        """Snapshots here do not count any more."""
        self.damaged(segment)
        self.changed(segment.key)

    def leave(self, key: RankKey, *, final: bool) -> None:
        """A trainer ended. Its snapshots stay, and go on to peers, unless its run is over."""
        self.fetches.leave(key)
        if final:
            self.forget(key.job, key.run)

    def knows(self, job: str, run: str) -> bool:
        """Whether anything but that it was forgotten is known of who takes part in a run."""
        record = self.records.of(job, run)
        return record is not None and (record.lost or record.newest_epoch > record.forgotten)

    def forget(self, job: str, run: str) -> int:
        """End a run here and free its replicas; returns their bytes."""
        found = self.runs.pop((job, run), None)
        if found is not None:
            self._end(found)
        self.records.forget(job, run)
        self.quarantine.forget(job, run)
        self._guard.access.forget(job, run)
        freed = 0
        self.replicas.forget_waiting(job, run)
        for segment in self.replicas.all_of_run(job, run):
            freed += segment.file_bytes
            if self.host is not None:
                self.host.remove(segment, "its run was forgotten")
        return freed

    def holdings(self, job: str, run: str) -> Holdings:
        """Everything sealed that this node holds of a run."""
        record, failures = self.records.of(job, run), self.quarantine.failures(job, run)
        return local_holdings(self._store, self.replicas, job, run, record, failures)

    @property
    def fabric_counters(self) -> dict[str, int]:
        """Of the fabric; none without a peer listener."""
        return {} if self._watch is None else self._watch.counters

    def status(self) -> Peers:
        """Everything `ckptctl peers` shows."""
        now_s = self._clock()
        card = self.neighbours.card
        return Peers(
            node=card.node,
            endpoint=card.endpoint,
            public_key=card.public_key,
            peers=self.neighbours.status(now_s),
            ranks=tuple(s for run in self.runs.values() for s in run.status(now_s)),
            replicas=tuple(_hosted(segment) for segment in self.replicas.everything()),
            counters=self.fabric_counters,
            encryption="" if self.fabric is None else self.fabric.encryption,
        )

    def adopt(self) -> None:
        """Take over the replicas that an earlier daemon left; what it had brought for trainers to
        read goes.
        """
        self.fetches.copies.sweep()
        self.records.adopt()
        self._updates.adopted([(record.job, record.run) for record in self.records])
        self.quarantine.adopt()
        self._adopted(self.replicas.adopt())

    def _adopt_waiting(self) -> None:
        found = self.replicas.adopt_waiting()
        if found != Adopted():
            self._adopted(found)

    def _adopted(self, found: Adopted) -> None:
        tell_adopted(self._events, found)
        for segment, index in found.damaged:
            text = f"{segment.path.name} slot {index} had a damaged header and is free now"
            self._events.add("error", "slot_damaged", text, segment.key)
        for segment in found.segments:
            self._events.add("info", "replica_adopted", segment.path.name, segment.key)
        for record in self.records:
            for epoch, start, _ in record.epochs:
                self._note_epoch(record.job, record.run, epoch, start)

    def _note_epoch(self, job: str, run: str, epoch: int, start: int) -> None:
        if self.host is not None:
            self.host.note_epoch(job, run, epoch, start)

    def waits_for(self, job: str, run: str) -> list[str]:
        """The files of a run that are here, and could not be taken over yet: nobody can tell what
        is in them.
        """
        return self._store.waits_for(job, run) + self.replicas.waits_for(job, run)

    def tick(self, now_s: float) -> None:
        """Hellos, deadlines, and what time brings to runs, replicas and fetches."""
        self._guarded("adopt", self._adopt_waiting)
        self._guarded("quiet", lambda: self._quiet.watch(self._store))
        self._guarded("neighbours", lambda: self.neighbours.tick(now_s))
        for run in list(self.runs.values()):
            self._guarded(f"run {run.job}/{run.run}", partial(self._tick_run, run, now_s))
        if self.host is not None:
            self._guarded("replicas", partial(self.host.tick, now_s))
        retain_s = self._config.retain_detached_s
        self._guarded("records", lambda: self.records.expire(now_s, retain_s, self._is_wanted))
        self._guarded("updates", self._updates.tick)
        self._guarded("fetches", self.fetches.tick)
        self._guarded("quarantine", self.quarantine.tick)
        if self._watch is not None:
            self._watch.tick(now_s)

    def wake(self, now_s: float) -> float:
        """Between ticks: try again what is due; returns when to come back (infinity: at the next tick)."""
        return min((run.wake(now_s) for run in self.runs.values()), default=float("inf"))

    def close(self) -> None:
        """End everything; what peers have here of us they lose with the fabric."""
        self.fetches.close()
        for run in self.runs.values():
            run.close()
        if self.fabric is not None:
            self.fabric.close()
        if self.host is not None:  # last: nothing touches its slots any more
            self.host.close()
        self._settlers.close(timeout_s=0.0)
        self._digesters.close(timeout_s=0.0)

    def _tick_run(self, run: Run, now_s: float) -> None:
        run.tick()
        self._take_note(run)
        self._tell_idle(run)
        if now_s - run.joined_at_s > _RUN_IDLE_S and not self._store.of_run(run.job, run.run):
            # Its segments expired long ago. Replicas of others stay: the host knows when they may go.
            del self.runs[run.job, run.run]
            self._end(run)

    def _is_wanted(self, job: str, run: str) -> bool:
        """Whether anything of a run is here."""
        return (job, run) in self.runs or self._holds(job, run)

    def _holds(self, job: str, run: str) -> bool:
        return bool(self._store.all_of_run(job, run) or self.replicas.all_of_run(job, run))

    def _take_note(self, run: Run) -> None:
        """Keep beside the segments what the next daemon must know of a run."""
        try:
            if run.recoverable:
                self.records.note_recoverable(run.job, run.run)
            if run.has_own_floor:
                self.records.note_floor(run.job, run.run)
        except OSError as error:  # tried again at the next tick
            self._events.count("run_records_failed")
            logger.warning("the record of %s/%s cannot be written: %s", run.job, run.run, error)

    def _tell_idle(self, run: Run) -> None:
        """One of the nodes that have ranks tells the others who takes part."""
        if run.speaks:
            self._news.tell(run.job, run.run)

    def _end(self, run: Run) -> None:
        """No longer replicate a run; peers need not keep its replicas for us."""
        self._news.ended(run.job, run.run)
        run.close()
        self.neighbours.tell_all(p.EndRun(run.job, run.run))

    def _guarded(self, what: str, work: Callable[[], None]) -> None:
        try:
            work()
        # Trouble with one run or replica must not keep the others from being looked after.
        except Exception as error:
            logger.exception("the periodic work failed: %s", what)
            self._events.add("error", "internal", f"periodic work, {what}: {error!r}")

    def _with_static_peers(self, message: Join) -> Join:
        """The configured nodes take part in every run, without ranks."""
        known = {member.card.node for member in message.members}
        lent = tuple(Member(card, ()) for card in self._static if card.node not in known)
        return msgspec.structs.replace(message, members=(*message.members, *lent))

    # -- neighbours ------------------------------------------------------------------------------

    def needed_nodes(self) -> set[str]:
        """The nodes that take part in a run of this node, and those that are configured."""
        members = (member.card.node for run in self.runs.values() for member in run.members)
        return {card.node for card in self._static} | set(members)

    def node_lost(self, node: str, reason: str) -> None:
        """A node does not answer: others take over what it was to do."""
        if self.host is not None:
            self.host.peer_gone(node)
        self.fetches.peer_lost(node)
        for run in self.runs.values():
            run.peer_lost(node, reason)

    def node_back(self, node: str) -> None:
        """It answers again."""
        for run in self.runs.values():
            run.peer_back(node)

    def node_restarted(self, node: str, boot_id: str) -> None:
        """Another daemon answers there; its new life may have come to us before we noticed."""
        if self.host is not None:
            self.host.peer_gone(node, but_boot=boot_id)
        for run in self.runs.values():
            run.peer_restarted(node)

    # -- from the fabric -------------------------------------------------------------------------

    def _turned_away(self, text: str) -> None:
        """On a thread of the fabric."""
        self._node.post(lambda: self._events.add("warning", "turned_away", text))

    def _serve(self, peer: str, body: bytes, answer: Callable[[bytes], None]) -> None:
        try:
            message = p.decode_peer(body)
        except ValueError as error:
            self._events.count("peer_garbage")
            answer(p.encode_peer(p.PeerRefused("bad_message", str(error)[:4000])))
            return
        reply = partial(_encoded, answer)
        refused = self._guard.refusal(peer, message)
        if refused is not None:
            reply(refused)
            self._updates.refused(message)
        elif isinstance(message, p.PeerHello):
            if self.host is not None:
                self.host.heard(peer, message.boot_id)
            reply(self.neighbours.welcome(message, self.replicas.free_bytes))
        elif isinstance(message, p.Floor):
            self._floor_message(peer, message)
            reply(p.PeerDone())
        elif isinstance(message, p.TellRun):
            reply(self._news.learn_from_member(peer, message.record))
        elif self.host is None or not self.host.serve(peer, message, reply):
            text = f"{type(message).__name__} is no request"
            reply(p.PeerRefused("bad_message", text))

    def _floor_message(self, peer: str, message: p.Floor) -> None:
        """A boot that may be over tells nothing; what a new one tells comes again with its next heartbeat."""
        run = self.runs.get((message.job, message.run))
        if run is None:
            return
        if message.boot_id != self.neighbours.boot_of(peer):
            self._events.count("floor.other_boot")
            self.neighbours.look_at(peer)
            return
        run.floor_message(peer, message)

    # -- for the host ----------------------------------------------------------------------------

    def promise_of(self, job: str, run: str) -> tuple[int, Promise, int]:
        """What is known to be agreed on of a run: in which epoch, what, and the span."""
        found = self.runs.get((job, run))
        return (-1, Promise(), 1) if found is None else (found.epoch, found.promise, found.span)

    def failures_of(self, job: str, run: str) -> tuple[ReplayFailure, ...]:
        """The replays of a run that did not reproduce."""
        return self.quarantine.failures(job, run)


def _hosted(segment: Segment) -> HostedReplica:
    told = segment.descriptor
    sealed = [h.iteration for _, h in segment.headers() if h.state is SlotState.SEALED]
    return HostedReplica(
        segment.path.name,
        told.job,
        told.run,
        told.rank,
        segment.file_bytes,
        len(sealed),
        max(sealed, default=-1),
        told.kind,
    )


def _encoded(answer: Callable[[bytes], None], reply: p.PeerReply) -> None:
    answer(p.encode_peer(reply))
