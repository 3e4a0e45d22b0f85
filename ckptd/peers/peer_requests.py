"""Requests of peers: how many may wait, and who may ask about which run (docs/replication.md §8)."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from ckptd.core.replication.known_runs import RunAccess
from ckptd.core.sessions import RankKey
from ckptd.event_log import EventLog
from ckptd.node_context import NodeContext
from ckptd.transport import peer_messages as p
from ckptd.transport.messages import GetHoldings, RunRecord
from ckptd.units import format_bytes

_MAX_UNSERVED = 1024  # requests of one peer: more than a node of hundreds of ranks has at a time
_MAX_UNSERVED_BYTES = 64 << 20  # of one peer: two of the largest
_MAX_ALL_UNSERVED_BYTES = 256 << 20  # of all peers together

_Answer = Callable[[bytes], None]


class PeerInbox:
    """Passes requests from a fabric's threads to the loop thread; bounded, for each peer and all together.

    Args:
        serve: called on the loop thread with each request.
    """

    def __init__(self, node: NodeContext, serve: Callable[[str, bytes, _Answer], None]) -> None:
        self._node, self._serve = node, serve
        self._unserved: Counter[str] = Counter()
        self._unserved_bytes: Counter[str] = Counter()
        self._lock = threading.Lock()

    def arrived(self, peer: str, body: bytes, answer: _Answer) -> None:
        """Queue a request, or refuse it (on a fabric's thread)."""
        with self._lock:
            full = self._too_many_wait(peer, len(body))
            if not full:
                self._unserved[peer] += 1
                self._unserved_bytes[peer] += len(body)
        if full:
            self._node.post(lambda: self._node.events.count("peer_busy"))
            answer(p.encode_peer(p.PeerRefused("busy", full, "try again")))
            return
        self._node.post(lambda: self._serve_next(peer, body, answer))

    def _too_many_wait(self, peer: str, size_bytes: int) -> str:
        """Why a request of this size gets no place; "" if it does. One request of each peer always does."""
        if not self._unserved[peer]:
            return ""
        if self._unserved[peer] >= _MAX_UNSERVED:
            return f"{_MAX_UNSERVED} requests of {peer} wait already"
        if self._unserved_bytes[peer] + size_bytes > _MAX_UNSERVED_BYTES:
            return f"{format_bytes(self._unserved_bytes[peer])} of requests of {peer} wait already"
        total = self._unserved_bytes.total()
        if total + size_bytes > _MAX_ALL_UNSERVED_BYTES:
            return f"{format_bytes(total)} of requests wait already"
        return ""

    def _serve_next(self, peer: str, body: bytes, answer: _Answer) -> None:
        with self._lock:
            self._unserved[peer] -= 1
            self._unserved_bytes[peer] -= len(body)
            if not self._unserved[peer]:
                del self._unserved[peer], self._unserved_bytes[peer]
        self._serve(peer, body, answer)


_EVENT_EVERY_S = 60.0
_MAX_REPORTED = 4096  # peers and runs with a recent event

_Guarded = GetHoldings | p.OpenReplica | p.OpenRead | p.GetDescriptor | p.DoubtSlot | p.Floor | p.TellDigests


class RunGuard:
    """Refuses requests about runs from nodes that may not act on them, and reports it.

    Every request that names a run is checked here before it is served. Leases, tickets and regions were
    granted to one peer by such a request.

    Args:
        record_of: the record of a run, or None.
    """

    def __init__(
        self,
        access: RunAccess,
        events: EventLog,
        *,
        record_of: Callable[[str, str], RunRecord | None],
        clock: Callable[[], float],
    ) -> None:
        self.access = access
        self._events, self._record_of, self._clock = events, record_of, clock
        self._reported_s: dict[tuple[str, str, str, str], float] = {}
        self._since: Counter[tuple[str, str, str, str]] = Counter()

    def refusal(self, peer: str, message: p.PeerMessage) -> p.PeerRefused | None:
        """Why a request is refused; None if it may be served. Members that it admits are noted."""
        if isinstance(message, p.TellRun):
            return self._refusal_of(peer, message.record.job, message.record.run, message)
        if not isinstance(message, _Guarded):
            return None
        refused = self._refusal_of(peer, message.job, message.run, message)
        if refused is None and isinstance(message, p.OpenReplica):
            refused = self._replica_refusal(peer, message)
        if refused is not None:
            return refused
        if isinstance(message, p.OpenReplica) and not self.access.members(message.job, message.run):
            # The first node that brings an unknown run is its member; its record follows (`TellRun`).
            self.access.admit(message.job, message.run, [peer], now_s=self._clock(), by=peer)
        elif isinstance(message, GetHoldings):
            self.access.admit(message.job, message.run, message.nodes, now_s=self._clock(), by=peer)
        elif isinstance(message, p.OpenRead):
            self._tell("info", "peer_reads", peer, message.job, message.run, "reads snapshots")
        return None

    def _refusal_of(self, peer: str, job: str, run: str, message: p.PeerMessage) -> p.PeerRefused | None:
        why = self.access.objection(peer, job, run, now_s=self._clock())
        if not why:
            return None
        what = f"asked for {type(message).__name__} and was refused: {why}"
        self._tell("warning", "foreign_request", peer, job, run, what)
        hint = f"if {peer} is to take part, run `ckptctl admit {job} {run} {peer}` on the node that refused"
        return p.PeerRefused("forbidden", why, hint)

    def _replica_refusal(self, peer: str, message: p.OpenReplica) -> p.PeerRefused | None:
        """Why this peer may not replicate this rank."""
        record = self._record_of(message.job, message.run)
        if record is None or message.epoch != record.epoch:
            return None  # the members of that epoch are not known here: ranks may have moved
        if message.rank in _ranks_on(record, peer):
            return None
        why = f"rank {message.rank} does not run on {peer} in epoch {message.epoch}"
        what = f"wanted to replicate rank {message.rank} and was refused: {why}"
        self._tell("warning", "foreign_request", peer, message.job, message.run, what)
        return p.PeerRefused("forbidden", why)

    def _tell(self, level: str, kind: str, peer: str, job: str, run: str, what: str) -> None:
        """Add an event at most once a minute for each peer and run, with the number of suppressed ones."""
        key, now_s = (kind, peer, job, run), self._clock()
        self._events.count(kind)
        if now_s - self._reported_s.get(key, float("-inf")) < _EVENT_EVERY_S:
            self._since[key] += 1
            return
        if len(self._reported_s) >= _MAX_REPORTED:
            self._reported_s.clear()
            self._since.clear()
        self._reported_s[key] = now_s
        more = f" ({self._since.pop(key, 0)} more since the last such event)"
        text = f"{peer} {what}" + (more if not more.startswith(" (0 ") else "")
        self._events.add(level, kind, f"{job}/{run}: {text}", RankKey(job, run, 0))


def _ranks_on(record: RunRecord, node: str) -> tuple[int, ...]:
    return next((m.ranks for m in record.members if m.card.node == node), ())
