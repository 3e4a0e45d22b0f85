"""Memory of this node that peers use: loans of slots, and leases on replicas (docs/replication.md §4, §5).

A *loan* makes one slot reachable by peers through a region. A *lease* keeps a replica open for the
peer that fills it. `HostParts` is what all parts of a host share.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from ckptd.core.replication.known_runs import KnownRuns
from ckptd.core.sessions import RankKey
from ckptd.core.slots.segment_format import SegmentDescriptor, decode_descriptor, set_slot_state
from ckptd.core.slots.slots import SlotState
from ckptd.core.users import owner_of
from ckptd.errors import SegmentError
from ckptd.memory.inventory import held_slots
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_store import SegmentMaker, SegmentPlan
from ckptd.memory.slot_digests import Doubt, Vouch
from ckptd.node_context import DigestThreads, NodeContext
from ckptd.peers.peer_link import AnswerPeer
from ckptd.peers.replica_store import ReplicaStore, same_primary
from ckptd.recompute.recomputation import Recomputation
from ckptd.transport import peer_messages as p
from ckptd.transport.messages import RefusalCode, Refused
from ckptd.transport.verbs import Fabric, Region
from ckptd.units import format_bytes
from ckptd.workers import Workers

SLOWEST_BYTES_PER_S = 4 << 20  # a slower peer counts as gone, and its slot is taken back
_MAX_LEASES = 65_536
_MAX_BOOTS = 4  # of one peer, with a lease on one replica: the newest are kept
_IDLE_S = 60.0  # longer than the pause of a sender that has something to send
_SILENT_S = 60.0
_SNAPSHOTS_FIRST_S = 120.0  # longer than the pause of a sender of snapshots that was refused
_PEER_CODES: dict[str, str] = {RefusalCode.IN_USE: "busy", RefusalCode.INTERNAL: "internal"}


@dataclass(slots=True, eq=False)
class Loan:
    """A slot and the region over it; ``fd`` holds the slot's lock."""

    segment: Segment
    index: int
    fd: int
    region: Region


@dataclass(slots=True, eq=False)
class _Waiting:
    loan: Loan
    then: Callable[[], None]
    broken_off: bool = False  # a worker is breaking transfers off, or has done so


class RegionLoans:
    """Takes loans back without waiting for any peer.

    A loan is LENT → ENDING (peers cannot reach the slot any more, but one of them may still be
    writing or reading a chunk) → over. Only then the slot is unlocked and gets its state. A worker
    breaks off what this process can break off, which takes a second at most; the rest (another
    process in the middle of a copy, libzmq) is looked at again at each tick. So a peer that has
    stopped blocks neither the loop nor a worker.

    Args:
        settlers: workers that only break transfers off: making memory must not wait behind them.
        still_here: whether a segment has not been removed meanwhile.
        failed: called with what did not work, and the error.
    """

    def __init__(
        self,
        settlers: Workers,
        *,
        still_here: Callable[[Segment], bool],
        failed: Callable[[str, BaseException], None],
    ) -> None:
        self._settlers, self._still_here, self._failed = settlers, still_here, failed
        self._ending: set[Loan] = set()
        self._waiting: list[_Waiting] = []

    def quiet(self, loan: Loan, then: Callable[[], None]) -> None:
        """Make the slot unreachable; call ``then`` once no peer touches it, now or later."""
        if loan.region.revoke():
            then()
            return
        waiting = _Waiting(loan, then)
        self._waiting.append(waiting)
        self._break_off(waiting)

    def end(self, loan: Loan, state: SlotState | None) -> None:
        """Give the slot this state (None: as it is) and unlock it, once no peer touches it."""
        self._ending.add(loan)
        self.quiet(loan, lambda: self._over(loan, state))

    def abandon(self, loan: Loan, state: SlotState | None) -> None:
        """Like `end`, now or never: a slot that a peer still touches stays locked until this process ends."""
        if loan.region.revoke():
            self._over(loan, state)

    def slots_of(self, segment: Segment) -> set[int]:
        return {loan.index for loan in self._ending if loan.segment is segment}

    def tick(self) -> None:
        """Look again; start what found all workers busy."""
        for waiting in list(self._waiting):
            self._look(waiting)
            if not waiting.broken_off and waiting in self._waiting:
                self._break_off(waiting)

    def _break_off(self, waiting: _Waiting) -> None:
        # After an error the slot stays locked and filling until no peer touches it: nothing may be written
        # under a reader.
        waiting.broken_off = self._settlers.submit(
            waiting.loan.region.break_off,
            lambda _: self._look(waiting),
            lambda error: self._failed("breaking off a transfer", error),
        )

    def _look(self, waiting: _Waiting) -> None:
        if waiting in self._waiting and waiting.loan.region.revoke():
            self._waiting.remove(waiting)
            waiting.then()

    def _over(self, loan: Loan, state: SlotState | None) -> None:
        self._ending.discard(loan)
        if state is not None and self._still_here(loan.segment):
            set_slot_state(loan.segment.buffer, loan.segment.geometry, loan.index, state)
        os.close(loan.fd)


@dataclass(frozen=True, slots=True)
class HostWorkers:
    """The threads that work for a host."""

    verifiers: Workers
    """Verify what arrived. Not those that seal: no seal of a local trainer waits for a replica."""

    maker: SegmentMaker
    """Makes replicas, and gives their memory back."""

    settlers: Workers
    """Break transfers off."""

    vouch: Vouch
    """Makes digests of images."""

    doubt: Doubt
    """Has a slot verified soon, and quarantined if it is damaged."""

    digests: DigestThreads = field(default_factory=DigestThreads)

    recomputation: Recomputation | None = None
    """Computes snapshots from gradients; None: all come whole."""


@dataclass(frozen=True, slots=True)
class HostParts:
    """What the parts of a host share."""

    node: NodeContext
    fabric: Fabric
    replicas: ReplicaStore
    workers: HostWorkers
    known: KnownRuns
    loans: RegionLoans

    # Random, so that a lease or ticket of an earlier boot means nothing.
    ids: Iterator[int] = field(default_factory=lambda: itertools.count(secrets.randbits(61)))


@dataclass(slots=True)
class _Lease:
    peer: str
    boot_id: str
    segment: Segment
    used_s: float
    heard_s: float  # when its peer last used it or said hello


class ReplicaLeases:
    """Opens replicas for peers, and makes them where there are none.

    A lease is good until its peer is gone, and means nothing to a later boot of either side. A
    lease that has not been used for a while does not keep a replica that nothing else needs: its
    peer opens it again. A lease whose peer is silent does not keep a replica from expiring: nobody
    may ever report that this peer is gone.

    Snapshots come first: a replica of snapshots that finds no memory gets the memory of replicas of
    boundary logs, and for a while no further log is accepted. But a peer that brings snapshots ends only
    logs of runs on which it may act, of the same user where users are kept apart.

    Args:
        may_act: whether a peer may act on a run.
        learn_epoch: called before a peer learns what is held; raises ValueError for an epoch that
            cannot follow the newest one, OSError if the epoch cannot be written.
        remove: frees a replica's memory.
    """

    def __init__(
        self,
        host: HostParts,
        *,
        may_act: Callable[[str, str, str], bool],
        learn_epoch: Callable[[p.OpenReplica], None],
        remove: Callable[[Segment, str], None],
    ) -> None:
        self._host, self._node, self._replicas = host, host.node, host.replicas
        self._may_act, self._learn_epoch, self._remove = may_act, learn_epoch, remove
        # By peer and job: until when logs wait for its snapshots.
        self._short: dict[tuple[str, str], float] = {}
        self._leases: dict[int, _Lease] = {}
        self._on: dict[str, dict[int, _Lease]] = {}  # the same by file
        self._building: dict[str, list[tuple[str, p.OpenReplica, AnswerPeer]]] = {}

    def open(self, peer: str, message: p.OpenReplica, answer: AnswerPeer) -> None:
        """Find or make the replica, and answer with a lease on it, now or later."""
        try:
            descriptor = decode_descriptor(message.descriptor)
            if not (descriptor.holds_snapshots or (descriptor.is_log and descriptor.replicated)):
                asked = "boundary logs are not replicated unless their rank asks for it"
                raise ValueError(asked if descriptor.is_log else "parked state is not replicated")
            num_slots = _slots_for(message, descriptor)
            plan = self._replicas.plan(descriptor, num_slots, message.slot_bytes, message.origin)
        except (SegmentError, ValueError) as error:
            answer(p.PeerRefused("bad_message", str(error)))
            return
        named = (descriptor.job, descriptor.run, descriptor.rank)
        if named != (message.job, message.run, message.rank):
            answer(p.PeerRefused("bad_message", f"the descriptor is of {named}"))
            return
        try:
            # First, so that slots which the epoch abandoned are not reported as held.
            self._learn_epoch(message)
        except ValueError as error:
            answer(p.PeerRefused("bad_message", str(error)))
            return
        except OSError as error:
            answer(p.PeerRefused("quota", f"the epoch of {plan.key} cannot be written: {error}"))
            return
        rings = self._replicas.rings_of(descriptor)
        wide = [ring for ring in rings if ring.geometry.num_slots >= num_slots]
        if wide:
            answer(self._lease(peer, message.boot_id, wide[-1], rings))
            return
        waiting = self._building.setdefault(plan.path.name, [])
        waiting.append((peer, message, answer))
        if len(waiting) == 1:
            self._build(plan, peer)

    def use(self, number: int, peer: str) -> tuple[Segment, str] | None:
        """The replica of a lease, and its peer's boot; None if this peer has no such lease."""
        lease = self._leases.get(number)
        if lease is None or lease.peer != peer:
            return None
        lease.used_s = lease.heard_s = self._node.clock()
        return lease.segment, lease.boot_id

    def heard(self, peer: str, boot_id: str) -> None:
        """This boot of a peer said hello: its leases are alive although it may have nothing to send."""
        now_s = self._node.clock()
        for lease in self._leases.values():
            if (lease.peer, lease.boot_id) == (peer, boot_id):
                lease.heard_s = now_s

    def is_open(self, segment: Segment, now_s: float) -> bool:
        return any(now_s - lease.heard_s < _SILENT_S for lease in self._leases_on(segment).values())

    def in_use(self, segment: Segment, now_s: float) -> bool:
        return any(now_s - lease.used_s < _IDLE_S for lease in self._leases_on(segment).values())

    def peer_gone(self, peer: str, boot_id: str) -> None:
        """End the leases of a peer, except those of this boot of it ("": all)."""
        self._end(lambda v: v.peer == peer and (not boot_id or v.boot_id != boot_id))

    def run_ended(self, peer: str, job: str, run: str) -> None:
        """A peer does not replicate this run any more."""
        self._end(lambda v: v.peer == peer and (v.segment.key.job, v.segment.key.run) == (job, run))

    def damaged(self, segment: Segment) -> None:
        """A slot of it was quarantined: the peers that fill rings of this primary must open them again."""
        self._end(lambda v: same_primary(v.segment.descriptor, segment.descriptor))

    def removed(self, segment: Segment) -> None:
        for number in self._leases_on(segment):
            del self._leases[number]
        self._on.pop(segment.path.name, None)

    def close(self) -> None:
        self._leases.clear()
        self._on.clear()

    def _leases_on(self, segment: Segment) -> dict[int, _Lease]:
        return self._on.get(segment.path.name, {})

    def _end(self, over: Callable[[_Lease], bool]) -> None:
        for number in [n for n, lease in self._leases.items() if over(lease)]:
            self._end_one(number)

    def _end_one(self, number: int) -> None:
        name = self._leases.pop(number).segment.path.name
        del self._on[name][number]
        if not self._on[name]:
            del self._on[name]

    def _lease(self, peer: str, boot_id: str, segment: Segment, rings: list[Segment]) -> p.PeerReply:
        held = tuple(slot for ring in rings for slot in held_slots(ring))
        now_s = self._node.clock()
        own = {n: lease for n, lease in self._leases_on(segment).items() if lease.peer == peer}
        for number, known in own.items():
            if known.boot_id == boot_id:
                known.used_s = known.heard_s = now_s
                return p.ReplicaOpened(number, held, self._node.boot_id)  # it asks again what is held
        # The lease on a ring that became too narrow ends; the ring goes when no promise needs it.
        for ring in rings:
            for number, lease in list(self._leases_on(ring).items()):
                if (lease.peer, lease.boot_id) == (peer, boot_id):
                    self._end_one(number)
        # A peer has one boot at a time, and says which. One that claims another each time fills no table.
        for number in sorted(own, key=lambda n: own[n].heard_s)[: max(0, len(own) - _MAX_BOOTS + 1)]:
            self._end_one(number)
        if len(self._leases) >= _MAX_LEASES:
            return p.PeerRefused("busy", "too many replicas are open")
        number = next(self._host.ids)
        lease = _Lease(peer, boot_id, segment, now_s, now_s)
        self._leases[number] = self._on.setdefault(segment.path.name, {})[number] = lease
        return p.ReplicaOpened(number, held, self._node.boot_id)

    # -- making one ------------------------------------------------------------------------------

    def _build(self, plan: SegmentPlan, peer: str) -> None:
        maker = self._host.workers.maker
        refusal = maker.refusal(plan)
        if plan.descriptor.is_log:
            refusal = refusal or self._kept_for_snapshots(plan.key)
        elif refusal is not None and refusal.code != RefusalCode.USER_QUOTA:  # nothing of others makes room
            self._short[peer, plan.key.job] = self._node.clock() + _SNAPSHOTS_FIRST_S
            if self._made_room(plan, peer):
                self._refuse(plan, p.PeerRefused("busy", "room is being made: try again"))
                return
        if refusal is not None:
            self._node.events.add("warning", "replica_refused", refusal.message, plan.key)
        else:
            made, refused = partial(self._made, plan), partial(self._refused, plan)
            refusal = maker.make(plan, made=made, refused=refused)
        if refusal is not None:
            self._refused(plan, refusal)

    def _kept_for_snapshots(self, log: RankKey) -> Refused | None:
        """Why a log is refused although there is memory for it."""
        now_s = self._node.clock()
        self._short = {who: until_s for who, until_s in self._short.items() if now_s < until_s}
        if not any(self._gives_way(log, job, peer) for peer, job in self._short):
            return None
        text = "memory is wanted for replicas of snapshots, which come first"
        return Refused(RefusalCode.QUOTA, text, "raise its CKPTD_MEMORY")

    def _made_room(self, plan: SegmentPlan, peer: str) -> bool:
        """Remove replicas of logs if that makes room for this one of snapshots; false if it would not.

        First those that nobody fills any more.
        """
        missing, now_s = plan.geometry.total_bytes - self._replicas.free_bytes, self._node.clock()
        logs = [log for log in self._replicas.logs() if self._gives_way(log.key, plan.key.job, peer)]
        logs.sort(key=lambda log: (self.is_open(log, now_s), -log.file_bytes))
        if sum(log.file_bytes for log in logs) < missing:
            return False
        for log in logs:
            if missing > 0:
                missing -= log.file_bytes
                self._remove(log, f"the replica of the snapshots of {plan.key} needs its memory")
        return True

    def _gives_way(self, log: RankKey, job: str, peer: str) -> bool:
        """Whether a log makes room for snapshots of this job that this peer brings."""
        same_user = not self._node.config.isolate_users or owner_of(log.job) == owner_of(job)
        return same_user and self._may_act(peer, log.job, log.run)

    def _made(self, plan: SegmentPlan, segment: Segment) -> None:
        size = format_bytes(segment.file_bytes)
        self._node.events.add("info", "replica_opened", f"{segment.path.name} ({size})", plan.key)
        for peer, message, answer in self._building.pop(plan.path.name, []):
            self.open(peer, message, answer)  # again: it may want a wider one by now

    def _refused(self, plan: SegmentPlan, refusal: Refused) -> None:
        code = _PEER_CODES.get(refusal.code, "quota")
        self._refuse(plan, p.PeerRefused(code, refusal.message[:4000], refusal.hint))

    def _refuse(self, plan: SegmentPlan, reply: p.PeerReply) -> None:
        for _, _, answer in self._building.pop(plan.path.name, []):
            answer(reply)


def _slots_for(message: p.OpenReplica, descriptor: SegmentDescriptor) -> int:
    """Room for two suffixes: over a gap, the old one stays until the new one is complete."""
    if descriptor.is_log:
        return message.num_slots
    return max(message.num_slots, 2 * max(descriptor.window, message.span))
