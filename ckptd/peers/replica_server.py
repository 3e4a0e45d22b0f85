"""Serving peers: replicas that they fill, and snapshots that they read (docs/replication.md §4, §5, §7).

A `Host` lives on the daemon's loop thread and never waits for a peer; workers make memory, verify,
and end transfers. What a peer holds here are *leases* (a replica segment, until we restart),
*tickets* (a slot being filled, locked against everybody else) and *reads* (a slot that may not be
reused). All three end with that boot of the peer, or when nothing happens for long; none of them
outlives this process.
"""

from __future__ import annotations

from collections.abc import Callable

from ckptd.core.replication.known_runs import KnownRuns
from ckptd.core.replication.log_replicas import outdated_slots, why_log_removable
from ckptd.core.replication.replicas import Promise, removable, stale_slots
from ckptd.core.slots.segment_format import set_slot_state, slot_lock_byte
from ckptd.core.slots.slots import SlotState, epoch_can_follow
from ckptd.memory import locks
from ckptd.memory.inventory import held_segment, log_records
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_store import SegmentStore
from ckptd.node_context import NodeContext
from ckptd.peers.peer_link import AnswerPeer
from ckptd.peers.replica_leases import HostParts, HostWorkers, RegionLoans, ReplicaLeases
from ckptd.peers.replica_store import ReplicaStore
from ckptd.peers.run_records import RunRecords
from ckptd.peers.slot_grants import ReadGrants, WriteGrants
from ckptd.transport import peer_messages as p
from ckptd.transport.messages import GetHoldings, Holdings, ReplayFailure, RunRecord
from ckptd.transport.verbs import Fabric
from ckptd.units import format_age, format_bytes


class Host:
    """What this node keeps and gives for its peers.

    Attributes:
        leases: the replicas that peers have open.

    Args:
        records: the records of runs; epochs that peers announce are added to them.
        promise_of: epoch, promise and span that a run has agreed on.
        holdings: everything sealed that this node holds of a run.
        may_act: whether a peer may act on a run.
    """

    def __init__(
        self,
        node: NodeContext,
        fabric: Fabric,
        replicas: ReplicaStore,
        workers: HostWorkers,
        *,
        records: RunRecords,
        promise_of: Callable[[str, str], tuple[int, Promise, int]],
        holdings: Callable[[str, str], Holdings],
        may_act: Callable[[str, str, str], bool],
    ) -> None:
        self._node, self._store, self._replicas = node, node.store, replicas
        self._records, self._holdings, self._doubt = records, holdings, workers.doubt
        self._maker = workers.maker
        self._used_s: dict[str, float] = {}
        self._known = KnownRuns(promise_of)
        self._loans = RegionLoans(workers.settlers, still_here=self._is_here, failed=node.failed)
        self._parts = HostParts(node, fabric, replicas, workers, self._known, self._loans)
        self._reads = ReadGrants(self._parts)
        self.leases = ReplicaLeases(
            self._parts, may_act=may_act, learn_epoch=self._learn_epoch, remove=self.remove
        )
        self._tickets = WriteGrants(self._parts, self.leases, self._reads)

    def serve(self, peer: str, message: p.PeerMessage, answer: AnswerPeer) -> bool:
        """Answer a message about snapshots, now or later; false if it is of another kind."""
        if isinstance(message, p.OpenReplica | GetHoldings):
            self._serve_whole(peer, message, answer)
        elif isinstance(message, p.BeginSlot):
            answer(self._tickets.begin(peer, message))
        elif isinstance(message, p.SealSlot):
            self._tickets.seal(peer, message, answer)
        elif isinstance(message, p.AbortSlot):
            self._tickets.abort(peer, message)
            answer(p.PeerDone())
        elif isinstance(message, p.OpenRead):
            answer(self._open_read(peer, message))
        elif isinstance(message, p.GetDigest):
            self._reads.digest(peer, message.region, answer)
        elif isinstance(message, p.CloseRead):
            self._reads.close_read(peer, message.region)
            answer(p.PeerDone())
        elif isinstance(message, p.DoubtSlot):
            self._doubted(message)
            answer(p.PeerDone())
        elif isinstance(message, p.EndRun):
            self.leases.run_ended(peer, message.job, message.run)
            answer(p.PeerDone())
        elif isinstance(message, p.GetDescriptor):
            answer(self._descriptor(message))
        else:
            return False
        return True

    def _serve_whole(self, peer: str, message: p.OpenReplica | GetHoldings, answer: AnswerPeer) -> None:
        """Answer from all files of a run."""
        if waiting := self._waiting(message):
            answer(p.PeerRefused("busy", f"{waiting} cannot be opened here now"))
        elif isinstance(message, p.OpenReplica):
            self.leases.open(peer, message, answer)
        else:
            answer(self._holdings(message.job, message.run))

    def _waiting(self, message: p.OpenReplica | GetHoldings) -> str:
        """A file of that run that cannot be opened now: without it, an answer would be wrong."""
        run = message.job, message.run
        return next(iter(self._store.waits_for(*run) + self._replicas.waits_for(*run)), "")

    def note_epoch(self, job: str, run: str, epoch: int, start: int) -> None:
        """Free the slots that this epoch of a run abandoned."""
        self._records.note_epoch(job, run, epoch, start)
        if not self._known.note_epoch(job, run, epoch, start):
            return
        known = self._known.epochs(job, run)
        for group in self._replicas.groups():
            if (group[0].key.job, group[0].key.run) == (job, run):
                records = self._replicas.group_records(group[0])
                for ordinal, index in stale_slots(records, known):
                    self._free(group[ordinal], index)
        for segment in self._replicas.logs():
            if (segment.key.job, segment.key.run) == (job, run):
                for index in outdated_slots(log_records(segment), known):
                    self._free(segment, index)

    def peer_gone(self, peer: str, *, but_boot: str = "") -> None:
        """A peer died: end everything that it holds here, except what this new boot of it has begun."""
        self._tickets.peer_gone(peer, but_boot)
        self._reads.peer_gone(peer, but_boot)
        self.leases.peer_gone(peer, but_boot)

    def tick(self, now_s: float) -> None:
        """End leases, tickets and reads that idle; remove replicas that nothing needs any more."""
        self._loans.tick()
        self._tickets.tick(now_s)
        self._reads.tick(now_s)
        for segment in self._replicas.everything():
            if not segment.in_place():
                text = f"somebody removed, replaced or cut short {segment.path.name}"
                self._node.events.add("error", "segment_vanished", text)
                self.remove(segment, "it is lost")
        for segment, why in self._unneeded(now_s) or self._expired(now_s):
            self.remove(segment, why)
        here = self._replicas.runs
        self._known.forget_promises(lambda job, run: (job, run) not in here)
        self._known.forget_epochs(
            lambda job, run: (job, run) not in here and self._records.of(job, run) is None
        )

    def remove(self, segment: Segment, why: str) -> None:
        """Free a replica's memory."""
        self._store.remove(segment)
        self._replicas.forget(segment)
        for part in (self._tickets, self._reads, self.leases):
            part.removed(segment)
        self._used_s.pop(segment.path.name, None)
        size = format_bytes(segment.file_bytes)
        self._node.events.add("info", "replica_removed", f"{segment.path.name} ({size}): {why}")
        self._maker.close(segment)

    def close(self) -> None:
        """Give up every lease, ticket and read; does not wait for peers."""
        for part in (self._tickets, self._reads, self.leases):
            part.close()

    # -- replicas --------------------------------------------------------------------------------

    def _learn_epoch(self, message: p.OpenReplica) -> None:
        record = self._records.of(message.job, message.run)
        newest = -1 if record is None else record.newest_epoch
        if not epoch_can_follow(message.epoch, newest):
            raise ValueError(f"epoch {message.epoch} after {newest}")
        self.note_epoch(message.job, message.run, message.epoch, message.epoch_start)

    def _is_here(self, segment: Segment) -> bool:
        return self._replicas.get(segment.path.name) is segment

    def _free(self, segment: Segment, index: int) -> None:
        with locks.lock_file(segment.path, slot_lock_byte(index), exclusive=True) as taken:
            if taken:
                set_slot_state(segment.buffer, segment.geometry, index, SlotState.FREE)
                self._node.events.count("replica.stale_freed")

    def _unneeded(self, now_s: float) -> list[tuple[Segment, str]]:
        found: list[tuple[Segment, str]] = []
        for group in self._replicas.groups():
            job, run = group[0].key.job, group[0].key.run
            promise, span = self._known.promise(job, run)
            epochs = self._known.epochs(job, run)
            slots = self._replicas.slots_of(group)
            is_open = any(self._in_use(segment, now_s) for segment in group)
            for name, why in removable(slots, promise, epochs=epochs, span=span, is_open=is_open):
                segment = self._replicas.get(name)
                if segment is not None and not self._in_use(segment, now_s):
                    found.append((segment, why))
        return found + self._unneeded_logs(now_s)

    def _unneeded_logs(self, now_s: float) -> list[tuple[Segment, str]]:
        found: list[tuple[Segment, str]] = []
        for segment in self._replicas.logs():
            job, run = segment.key.job, segment.key.run
            promise, span = self._known.promise(job, run)
            epochs = self._known.epochs(job, run)
            why = why_log_removable(log_records(segment), promise.floor, epochs=epochs, span=span)
            if why and not self._in_use(segment, now_s):
                found.append((segment, why))
        return found

    def _in_use(self, segment: Segment, now_s: float) -> bool:
        return self.leases.in_use(segment, now_s) or bool(self._tickets.slots_of(segment))

    def _expired(self, now_s: float) -> list[tuple[Segment, str]]:
        for segment in self._replicas.everything():
            wanted = self.leases.is_open(segment, now_s) or self._tickets.slots_of(segment)
            if wanted or segment.path.name not in self._used_s:
                self._used_s[segment.path.name] = now_s
        limit_s = self._node.config.retain_detached_s
        return [
            (segment, f"nobody has used it for {format_age(limit_s)}")
            for segment in self._replicas.everything()
            if limit_s and now_s - self._used_s[segment.path.name] > limit_s
        ]

    # -- reading ---------------------------------------------------------------------------------

    def _open_read(self, peer: str, message: p.OpenRead) -> p.PeerReply:
        segment = self._find(message.job, message.run, message.name)
        if segment is None:
            return p.PeerRefused("unknown", f"no segment {message.name} here")
        self._used_s[segment.path.name] = self._node.clock()
        return self._reads.open(peer, message, segment)

    def _doubted(self, message: p.DoubtSlot) -> None:
        segment = self._find(message.job, message.run, message.name)
        if segment is None or message.slot >= segment.geometry.num_slots:
            return
        if segment.sealed(message.slot, message.sequence) is not None:
            self._doubt(segment, message.slot, message.sequence)

    def _descriptor(self, message: p.GetDescriptor) -> p.PeerReply:
        segment = self._find(message.job, message.run, message.name)
        if segment is None:
            return p.PeerRefused("unknown", f"no segment {message.name} here")
        return p.Descriptor(segment.raw_descriptor(), segment.geometry.num_slots, segment.geometry.slot_bytes)

    def _find(self, job: str, run: str, name: str) -> Segment | None:
        # Logs and parked state, too: peers read them as they read snapshots.
        for segment in (*self._store.all_of_run(job, run), *self._replicas.all_of_run(job, run)):
            if segment.path.name == name:
                return segment
        return None


def local_holdings(
    store: SegmentStore,
    replicas: ReplicaStore,
    job: str,
    run: str,
    record: RunRecord | None,
    failures: tuple[ReplayFailure, ...] = (),
    durable: int = -1,
) -> Holdings:
    """Every sealed slot of a run on this node, its record, its failed replays, and what was seen durable."""
    own = [held_segment(s, own=True) for s in store.of_run(job, run)]
    others = [held_segment(s, own=False) for s in replicas.of_run(job, run)]
    logs = [held_segment(s, own=True) for s in store.logs_of_run(job, run)]
    logs += [held_segment(s, own=False) for s in replicas.all_of_run(job, run) if s.is_log]
    parked = [held_segment(s, own=True) for s in store.parks_of_run(job, run)]
    return Holdings(
        store.node_id,
        tuple(s for s in (*own, *others) if s.slots),
        -1 if record is None else record.newest_epoch,
        tuple(s for s in logs if s.slots),
        tuple(s for s in parked if s.slots),
        record,
        failures,
        durable,
    )
