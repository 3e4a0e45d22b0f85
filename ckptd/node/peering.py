"""This node among others: connections, runs, replicas and fetches of one daemon.

Everything here runs on the daemon's loop thread; the fabric's threads pass requests on through
`NodeContext.post`. Without a peer listener, the node has no connections and snapshots stay on it;
fetches still work for what this node holds itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from ckptd.core.recovery.held import STORE_NODE
from ckptd.core.replication.known_runs import RunAccess
from ckptd.core.sessions import RankKey
from ckptd.core.slots.slots import SlotState
from ckptd.holdings import begun_epochs
from ckptd.memory.replay_failures import Quarantine
from ckptd.memory.segment_file import Adopted, Segment, tell_adopted
from ckptd.memory.segment_store import SegmentMaker
from ckptd.memory.slot_digests import Doubt, ImageDigests
from ckptd.node_context import NodeContext, NodeWorkers
from ckptd.peers.fabric import FabricWatch, QuietGate, make_fabric, static_peers
from ckptd.peers.peer_link import Holder
from ckptd.peers.peer_nodes import AskNode, Neighbours
from ckptd.peers.peer_requests import PeerInbox, RunGuard
from ckptd.peers.replica_audit import ReplicaAudit
from ckptd.peers.replica_leases import HostWorkers
from ckptd.peers.replica_server import Host, local_holdings
from ckptd.peers.replica_store import ReplicaStore
from ckptd.peers.run_directory import RunDirectory
from ckptd.peers.run_records import RunRecords
from ckptd.peers.run_survey import RecordUpdates, RunSurvey
from ckptd.persistence.store_link import StoreLink
from ckptd.recompute.recomputation import Recomputation
from ckptd.restore.fetches import Fetches
from ckptd.transport import peer_messages as p
from ckptd.transport.messages import (
    Drill,
    DrillReport,
    GetHoldings,
    Holdings,
    HostedReplica,
    NodeCard,
    Peers,
    RunSeen,
    SeeRun,
)
from ckptd.transport.verbs import Fabric
from ckptd.workers import Workers

_WAITS = 16_384  # more than tickets and reads together


class Peering:
    """Connects the parts of a daemon that deal with other nodes.

    Attributes:
        runs: the runs in which this node takes part.
        access: who may act on which run.
        records: who takes part in each run, in files.
        replicas: other nodes' snapshots.
        quarantine: snapshots that no replay reproduces.
        audit: compares the snapshots of ranks that should hold the same values.

    Raises:
        UnusableFolder: the peer listener cannot be opened, or its security is not configured.
    """

    def __init__(self, node: NodeContext, workers: NodeWorkers, *, doubt: Doubt) -> None:
        store, events = node.store, node.events
        self._node, self._config, self._store, self._events = node, node.config, store, events
        self.maker = SegmentMaker(store, events, workers.slow, node.clock)
        self.replicas = ReplicaStore(store)
        self.quarantine = Quarantine(
            store.folder,
            events,
            segments=self.segments_of,
            damaged=self._quarantined,
        )
        self.records = RunRecords(store.folder, events, store.keep_file)
        self._quiet = QuietGate()
        inbox = PeerInbox(node, self._serve)
        self.fabric: Fabric | None = make_fabric(
            node.config, node.node_id, inbox.arrived, self._quiet, self._turned_away
        )
        self._watch = None if self.fabric is None else FabricWatch(self.fabric, node)
        self._static = static_peers(node.config)
        self.access = RunAccess(
            node.node_id,
            [card.node for card in self._static],
            record_of=self.records.of,
            holds=self._holds,
            everybody=node.config.peer_access == "trusted",
        )
        self._guard = RunGuard(self.access, events, record_of=self.records.of, clock=node.clock)
        self._digesters, self._settlers = self._own_workers("image-digest"), self._own_workers("settle")
        digests = ImageDigests(
            self._digesters,
            events,
            threads=workers.digests.count,
            map_fn=workers.digests.map_fn,
            doubt=doubt,
        )
        self.neighbours = Neighbours(node, self.fabric, self)
        self.runs = RunDirectory(
            node,
            self.records,
            self.neighbours,
            vouch=digests.want,
            static=self._static,
            note_epoch=self._note_epoch,
            durable_of=self._durable_of,
        )
        self.audit = ReplicaAudit(
            node.node_id,
            events,
            members_of=self.runs.members_of,
            epoch_of=self.runs.epoch_of,
            link=self.neighbours.link,
        )
        self._updates = RecordUpdates(
            node.node_id,
            record_of=self.records.of,
            reach=self._reach,
            learn=self.runs.learn,
            clock=node.clock,
        )
        self._stored: StoreLink | None = None
        self.fetches = Fetches(node, self.maker, self.replicas, workers, link=self._holder, doubt=doubt)
        self._recomputation = Recomputation(node)
        self.host: Host | None = None
        if self.fabric is not None:
            self.host = Host(
                node,
                self.fabric,
                self.replicas,
                HostWorkers(
                    self._digesters,
                    self.maker,
                    self._settlers,
                    digests.want,
                    doubt,
                    workers.digests,
                    self._recomputation,
                ),
                records=self.records,
                promise_of=self.runs.promise_of,
                holdings=self.holdings,
                may_act=self._may_act,
            )

    def _may_act(self, peer: str, job: str, run: str) -> bool:
        return not self.access.objection(peer, job, run, now_s=self._node.clock())

    def _own_workers(self, name: str) -> Workers:
        """Two threads; their results are collected on the loop thread."""
        made = Workers(name, 2, _WAITS, lambda: self._node.post(made.collect))
        return made

    @property
    def slack(self) -> int:
        """The slots of a trainer's ring that are for snapshots waiting to be replicated."""
        return 0 if self.fabric is None else self._config.replication_slack

    # -- what is held of a run -------------------------------------------------------------------

    def holdings(self, job: str, run: str) -> Holdings:
        """Everything sealed that this node holds of a run."""
        record, failures = self.records.of(job, run), self.quarantine.failures(job, run)
        # An earlier daemon may have seen it.
        durable = max(self._durable_of(job, run), -1 if record is None else record.durable)
        return local_holdings(self._store, self.replicas, job, run, record, failures, durable)

    def _durable_of(self, job: str, run: str) -> int:
        return -1 if self._stored is None else self._stored.durable_of(job, run)

    def see_run(self, message: SeeRun, answer: Callable[[RunSeen], None]) -> None:
        """Answer with what is held of a run: here, on its present and former nodes, and in storage."""
        self.neighbours.meet(self._static)
        self.access.admit(message.job, message.run, message.known, now_s=self._node.clock())
        RunSurvey(
            GetHoldings(message.job, message.run, nodes=message.known),
            self.holdings(message.job, message.run),
            self._static,
            partial(self._reach, patient=message.patient),
            partial(self._add_stored, message, answer) if message.storage else answer,
            known=message.known,
            refused=self._survey_refused,
        )

    def _survey_refused(self, node: str, reason: str) -> None:
        self._events.add("warning", "peer_refused", f"{node} refuses to report what it holds: {reason}")

    def _reach(self, cards: Sequence[NodeCard], *, patient: bool = False) -> list[tuple[NodeCard, AskNode]]:
        self.neighbours.meet(cards)
        return self.neighbours.to_ask(cards, patient=patient)

    def _add_stored(self, message: SeeRun, answer: Callable[[RunSeen], None], seen: RunSeen) -> None:
        """Add what is in storage."""
        if self._stored is None:
            answer(seen)
            return

        def failed(code: str, reason: str) -> None:
            self._events.add("error", "store_silent", f"{message.job}/{message.run}: {reason}")
            answer(msgspec.structs.replace(seen, silent=(*seen.silent, STORE_NODE)))

        marks = sorted(self.quarantine.marks(message.job, message.run))
        self._stored.find(
            GetHoldings(message.job, message.run, tuple(marks), every_rank=message.every_rank),
            begun_epochs(seen),
            lambda h: answer(msgspec.structs.replace(seen, holdings=(*seen.holdings, h))),
            failed,
        )

    def use_store(self, link: StoreLink) -> None:
        """Look for snapshots in storage, too."""
        self._stored = link

    def _holder(self, node: str) -> Holder | None:
        return self._stored if node == STORE_NODE else self.neighbours.link(node)

    def drill(self, message: Drill, answer: Callable[[DrillReport], None]) -> None:
        """Rehearse the recovery of a rank from other nodes than its own."""
        key = RankKey(message.job, message.run, message.rank)
        self.see_run(SeeRun(message.job, message.run, patient=True), self.fetches.drill(key, answer))

    # -- segments and runs of this node ----------------------------------------------------------

    def damaged(self, segment: Segment) -> None:
        """A slot here was quarantined: the sender of a replica must send it again."""
        if self.host is not None:
            self.host.leases.damaged(segment)

    def _quarantined(self, segment: Segment) -> None:
        self.damaged(segment)
        self.runs.changed(segment.key)

    def leave(self, key: RankKey, *, final: bool) -> None:
        """A trainer ended. Its snapshots stay and are still replicated, unless its run is over."""
        self.fetches.leave(key)
        if final:
            self.forget(key.job, key.run)

    def knows(self, job: str, run: str) -> bool:
        """Whether a run has a record that says more than that the run was forgotten."""
        record = self.records.of(job, run)
        return record is not None and (record.lost or record.newest_epoch > record.forgotten)

    def forget(self, job: str, run: str) -> int:
        """End a run here and free its replicas; returns their bytes."""
        self.runs.end(job, run)
        self.records.forget(job, run)
        self.quarantine.forget(job, run)
        self.access.forget(job, run)
        freed = 0
        self.replicas.forget_waiting(job, run)
        for segment in self.replicas.all_of_run(job, run):
            freed += segment.file_bytes
            if self.host is not None:
                self.host.remove(segment, "its run was forgotten")
        return freed

    def waits_for(self, job: str, run: str) -> list[str]:
        """Files of a run that are here and cannot be opened yet, so that nobody knows their content."""
        return self._store.waits_for(job, run) + self.replicas.waits_for(job, run)

    def adopt(self) -> None:
        """Take over an earlier daemon's replicas and records; remove its copies for readers."""
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

    def _holds(self, job: str, run: str) -> bool:
        return bool(self._store.all_of_run(job, run) or self.replicas.all_of_run(job, run))

    def write_again(self) -> None:
        """Write the files of runs again: somebody has removed the folder of segments."""
        self.records.write_again()
        self.quarantine.write_again()

    def concerns(self, job: str, run: str) -> bool:
        """Whether anything of a run is here, or who takes part in it is known."""
        here = self._holds(job, run) or bool(self.waits_for(job, run))
        return here or bool(self.access.members(job, run))

    def _is_wanted(self, job: str, run: str) -> bool:
        """Whether the record of a run is kept: it has joined, or something of it is here."""
        return (job, run) in self.runs.by_name or self._holds(job, run)

    # -- for the operator ------------------------------------------------------------------------

    @property
    def fabric_counters(self) -> dict[str, int]:
        """Counters of the fabric; empty without a peer listener."""
        return {} if self._watch is None else self._watch.counters

    def segments_of(self, job: str, run: str) -> tuple[Segment, ...]:
        """Every segment of a run here, replicas included."""
        return (*self._store.all_of_run(job, run), *self.replicas.all_of_run(job, run))

    def status(self) -> Peers:
        """Everything that `ckptctl peers` shows."""
        now_s = self._node.clock()
        card = self.neighbours.card
        return Peers(
            node=card.node,
            endpoint=card.endpoint,
            public_key=card.public_key,
            peers=self.neighbours.status(now_s),
            ranks=tuple(s for run in self.runs.by_name.values() for s in run.status(now_s)),
            replicas=tuple(_hosted(segment) for segment in self.replicas.everything()),
            counters=self.fabric_counters,
            encryption="" if self.fabric is None else self.fabric.encryption,
            compared=self.audit.status(),
        )

    # -- as time passes --------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Do the periodic work of each part; a part that fails does not keep the others from theirs."""
        guarded, retain_s = self._node.guarded, self._config.retain_detached_s
        guarded("adopt", self._adopt_waiting)
        guarded("quiet", lambda: self._quiet.watch(self._store))
        guarded("neighbours", lambda: self.neighbours.tick(now_s))
        self.runs.tick(now_s)
        self.audit.keep(self.runs.by_name)
        if self.host is not None:
            guarded("replicas", partial(self.host.tick, now_s))
            guarded("recomputation", partial(self._recomputation.tick, now_s))
        guarded("records", lambda: self.records.expire(now_s, retain_s, self._is_wanted))
        guarded("access", lambda: self.access.tick(now_s))
        guarded("updates", self._updates.tick)
        guarded("fetches", self.fetches.tick)
        guarded("quarantine", self.quarantine.tick)
        if self._watch is not None:
            self._watch.tick(now_s)

    def close(self) -> None:
        """End everything; what peers hold open here ends with the fabric."""
        self.fetches.close()
        self.runs.close()
        if self.fabric is not None:
            self.fabric.close()
        self._recomputation.close()
        if self.host is not None:  # last: nothing touches its slots any more
            self.host.close()
        self._settlers.close(timeout_s=0.0)
        self._digesters.close(timeout_s=0.0)

    # -- listener of the neighbours --------------------------------------------------------------

    def needed_nodes(self) -> set[str]:
        """Nodes whose connections are kept although they do not answer."""
        return self.runs.nodes()

    def node_lost(self, node: str, reason: str) -> None:
        """A node does not answer: others take over its part."""
        if self.host is not None:
            self.host.peer_gone(node)
        self.fetches.peer_lost(node)
        self.runs.peer_lost(node, reason)

    def node_back(self, node: str) -> None:
        """A lost node answers again."""
        self.runs.peer_back(node)

    def node_restarted(self, node: str, boot_id: str) -> None:
        """Another daemon answers there; requests of this boot may have come before we noticed."""
        if self.host is not None:
            self.host.peer_gone(node, but_boot=boot_id)
        self.runs.peer_restarted(node)

    # -- from the fabric -------------------------------------------------------------------------

    def _turned_away(self, text: str) -> None:
        """On a thread of the fabric."""
        self._node.post(lambda: self._events.add("warning", "turned_away", text))

    def _serve(self, peer: str, body: bytes, answer: Callable[[bytes], None]) -> None:
        """Serve a request of a peer; each one is checked by the guard first."""

        def reply(message: p.PeerReply) -> None:
            answer(p.encode_peer(message))

        try:
            message = p.decode_peer(body)
        except ValueError as error:
            self._events.count("peer_garbage")
            reply(p.PeerRefused("bad_message", str(error)[:4000]))
            return
        refused = self._guard.refusal(peer, message)
        if refused is not None:
            reply(refused)
            self._updates.refused(message)
        elif isinstance(message, p.PeerHello):
            if self.host is not None:
                self.host.leases.heard(peer, message.boot_id)
            reply(self.neighbours.welcome(peer, message, self.replicas.free_bytes))
        elif isinstance(message, p.Floor):
            self.runs.floor_message(peer, message)
            reply(p.PeerDone())
        elif isinstance(message, p.TellDigests):
            reply(self.audit.heard(peer, message))
        elif isinstance(message, p.TellRun):
            reply(self.runs.learn_from_member(peer, message.record))
        elif self.host is None or not self.host.serve(peer, message, reply):
            text = f"{type(message).__name__} is no request"
            reply(p.PeerRefused("bad_message", text))


def _hosted(segment: Segment) -> HostedReplica:
    descriptor = segment.descriptor
    sealed = [h.iteration for _, h in segment.headers() if h.state is SlotState.SEALED]
    return HostedReplica(
        segment.path.name,
        descriptor.job,
        descriptor.run,
        descriptor.rank,
        segment.file_bytes,
        len(sealed),
        max(sealed, default=-1),
        descriptor.kind,
    )
