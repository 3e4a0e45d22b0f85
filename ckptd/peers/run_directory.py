"""The runs in which this node takes part, and what it tells and learns about their members."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from ckptd.core.replication.replicas import Promise
from ckptd.core.sessions import RankKey, wrong_members
from ckptd.core.slots.slots import epoch_can_follow
from ckptd.memory.segment_file import Segment
from ckptd.memory.slot_digests import Vouch
from ckptd.node_context import NodeContext
from ckptd.peers.peer_nodes import Neighbours
from ckptd.peers.run_records import RunRecords
from ckptd.peers.runs import Run
from ckptd.transport import peer_messages as p
from ckptd.transport.messages import Join, Member, NodeCard, RunRecord

logger = logging.getLogger(__name__)

_RUN_IDLE_S = 3600.0  # a run without segments here is ended so long after its last join
_MAX_WORLD = 1 << 24  # ranks; the size of a run without a rank here is not known


class RunDirectory:
    """Runs by name, on the daemon's loop thread.

    Args:
        static: configured nodes; they take part in every run, without ranks.
        note_epoch: called with job, run, epoch and start of each epoch that this node learns of.
        durable_of: the newest checkpoint of a run that all ranks have in storage, as far as it was seen here;
            -1: none.
    """

    def __init__(
        self,
        node: NodeContext,
        records: RunRecords,
        neighbours: Neighbours,
        *,
        vouch: Vouch,
        static: Sequence[NodeCard],
        note_epoch: Callable[[str, str, int, int], None],
        durable_of: Callable[[str, str], int],
    ) -> None:
        self._node, self._records, self._neighbours = node, records, neighbours
        self._vouch, self._static, self._note_epoch = vouch, static, note_epoch
        self._durable_of = durable_of
        self.by_name: dict[tuple[str, str], Run] = {}
        self._known_epochs: dict[tuple[str, str], dict[str, int]] = {}  # by run and node: the epoch it knows

    def join(self, key: RankKey, message: Join) -> str:
        """A local rank says who takes part in its run. Returns why it is refused, or "".

        Raises:
            OSError: the record cannot be written, and it must be before the first snapshot.
        """
        message = self._with_static(message)
        record = self._records.of(key.job, key.run)
        if record is not None and message.epoch < record.epoch:
            return f"epoch {message.epoch} of {key} is over: epoch {record.epoch} has begun here"
        self._records.joined(key.job, key.run, message)  # before anything of this epoch can be lost
        self._neighbours.meet(member.card for member in message.members)
        run = self.by_name.get((key.job, key.run))
        if run is None:
            run = Run(key.job, key.run, self._node, link=self._neighbours.link, vouch=self._vouch)
            self.by_name[key.job, key.run] = run
        if refused := run.join(key, message):
            return refused
        self._record_progress(run)
        self._tell_members(run)
        self._note_epoch(key.job, key.run, message.epoch, message.epoch_start)
        for node in self._neighbours.lost:  # lost before this epoch began
            run.peer_lost(node, "it has not answered for long")
        return ""

    def _with_static(self, message: Join) -> Join:
        known = {member.card.node for member in message.members}
        added = tuple(Member(card, ()) for card in self._static if card.node not in known)
        return msgspec.structs.replace(message, members=(*message.members, *added))

    def span_of(self, job: str, run: str) -> int:
        """The number of snapshots in the longest suffix of a run, as far as it is known here."""
        found = self.by_name.get((job, run))
        return 1 if found is None else found.span

    def promise_of(self, job: str, run: str) -> tuple[int, Promise, int]:
        """Epoch, promise and span that the run has agreed on; epoch -1 if it has no rank here."""
        found = self.by_name.get((job, run))
        return (-1, Promise(), 1) if found is None else (found.epoch, found.promise, found.span)

    def replicated_up_to(self, key: RankKey) -> int:
        """The iteration at which a local rank could resume from another node alone; -1: at none."""
        found = self.by_name.get((key.job, key.run))
        rank = None if found is None else found.ranks.get(key.rank)
        return -1 if rank is None else rank.core.recoverable_up_to

    def members_of(self, job: str, run: str) -> tuple[Member, ...]:
        """The nodes of a run, with their ranks; empty if it has no rank here."""
        found = self.by_name.get((job, run))
        return () if found is None else tuple(found.members)

    def epoch_of(self, job: str, run: str) -> int:
        """The epoch that a rank of this node has joined; -1: none has."""
        return self.promise_of(job, run)[0]

    def nodes(self) -> set[str]:
        """The configured nodes, and those that take part in a run of this node."""
        members = (member.card.node for run in self.by_name.values() for member in run.members)
        return {card.node for card in self._static} | set(members)

    # -- of local ranks --------------------------------------------------------------------------

    def sealed(self, segment: Segment) -> None:
        run = self.by_name.get((segment.key.job, segment.key.run))
        if run is not None:
            run.sealed(segment.key.rank)
            self._record_progress(run)

    def log_sealed(self, segment: Segment) -> None:
        run = self.by_name.get((segment.key.job, segment.key.run))
        if run is not None and segment.descriptor.replicated:
            run.logged(segment.key.rank)

    def changed(self, key: RankKey) -> None:
        """Slots of a local rank were sealed or quarantined, or one of its generations went."""
        run = self.by_name.get((key.job, key.run))
        if run is not None:
            run.sealed(key.rank)
            run.logged(key.rank)

    # -- of peers --------------------------------------------------------------------------------

    def peer_lost(self, node: str, reason: str) -> None:
        for run in self.by_name.values():
            run.peer_lost(node, reason)

    def peer_back(self, node: str) -> None:
        for run in self.by_name.values():
            run.peer_back(node)

    def peer_restarted(self, node: str) -> None:
        for run in self.by_name.values():
            run.peer_restarted(node)

    def floor_message(self, peer: str, message: p.Floor) -> None:
        """Ignore messages of a boot that may be over; a new boot repeats its own with its next heartbeat."""
        run = self.by_name.get((message.job, message.run))
        if run is None:
            return
        if message.boot_id != self._neighbours.boot_of(peer):
            self._node.events.count("floor.other_boot")
            self._neighbours.look_at(peer)
            return
        run.floor_message(peer, message)

    def learn_from_member(self, peer: str, record: RunRecord) -> p.PeerReply:
        """Accept a record that a member sent of its own accord."""
        if peer not in {member.card.node for member in record.members}:
            return p.PeerRefused("bad_message", f"{peer} does not take part in it")
        return self.learn(peer, record)

    def learn(self, peer: str, record: RunRecord) -> p.PeerReply:
        """Accept a record from a present or former member, if it can be true."""
        if self._node.node_id not in {card.node for card in record.cards}:
            return p.PeerRefused("bad_message", f"{peer} and this node do not both take part in it")
        if wrong := wrong_members(record.members, _MAX_WORLD):
            return p.PeerRefused("bad_message", wrong)
        known = self._records.of(record.job, record.run)
        newest = -1 if known is None else known.newest_epoch
        if not epoch_can_follow(record.newest_epoch, newest):
            return p.PeerRefused("bad_message", f"epoch {record.newest_epoch} after {newest}")
        if known is None or record.epoch >= known.epoch:
            try:
                self._records.learned(record)
                self._note_epoch(record.job, record.run, record.epoch, record.epoch_start)
            except OSError as error:
                self._node.events.count("run_records_failed")
                return p.PeerRefused(
                    "busy", f"the record of {record.job}/{record.run} cannot be written: {error}"
                )
        return p.PeerDone()

    # -- as time passes --------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        for run in list(self.by_name.values()):
            self._node.guarded(f"run {run.job}/{run.run}", partial(self._tick_run, run, now_s))

    def _tick_run(self, run: Run, now_s: float) -> None:
        run.tick()
        # Not where a rank joins: what its run had in storage before is of another history then.
        self._record_progress(run, self._durable_of(run.job, run.run))
        self._tell_members(run)
        if now_s - run.joined_at_s > _RUN_IDLE_S and not self._node.store.of_run(run.job, run.run):
            # Its segments have expired. The host decides about replicas of other ranks.
            self.end(run.job, run.run)

    def wake(self, now_s: float) -> float:
        """Retry what is due between ticks; returns when to call again (infinity: at the next tick)."""
        return min((run.wake(now_s) for run in self.by_name.values()), default=float("inf"))

    def end(self, job: str, run: str) -> None:
        """Stop replicating a run; peers may drop the replicas that they keep for this node."""
        found = self.by_name.pop((job, run), None)
        if found is not None:
            self._known_epochs.pop((job, run), None)
            found.close()
            self._neighbours.tell_all(p.EndRun(job, run))

    def close(self) -> None:
        for run in self.by_name.values():
            run.close()

    def _record_progress(self, run: Run, durable: int = -1) -> None:
        """Write down what the next daemon must know of a run."""
        try:
            if run.recoverable:
                self._records.note_recoverable(run.job, run.run)
            if run.has_own_floor:
                self._records.note_floor(run.job, run.run)
            self._records.note_durable(run.job, run.run, durable)
        except OSError as error:  # tried again at the next tick
            self._node.events.count("run_records_failed")
            logger.warning("the record of %s/%s cannot be written: %s", run.job, run.run, error)

    def _tell_members(self, run: Run) -> None:
        """Send the record to members without ranks, and to former ones, until each has answered.

        A node that recovers the run without us must know of this epoch, or its own epoch would get
        a number that is not above ours. One of the nodes that have ranks speaks for all.
        """
        record = self._records.of(run.job, run.run)
        if not run.speaks or record is None:
            return
        known = self._known_epochs.setdefault((run.job, run.run), {})
        working = {member.card.node for member in record.members if member.ranks}
        for card in record.cards:
            link = self._neighbours.link(card.node)
            if card.node in working or link is None or known.get(card.node, -1) >= record.epoch:
                continue
            link.ask(
                p.TellRun(record),
                p.PeerDone,
                partial(self._knows, known, card.node, record.epoch),
                partial(self._does_not_know, card.node),
            )

    def _knows(self, known: dict[str, int], node: str, epoch: int, _: p.PeerDone) -> None:
        known[node] = max(epoch, known.get(node, -1))

    def _does_not_know(self, node: str, code: str, reason: str) -> None:
        self._node.events.count_refusal("tell_run", code)
        logger.debug("%s did not take the record of a run: %s", node, reason)
