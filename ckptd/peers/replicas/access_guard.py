"""What a peer asks about a run, held against who may act on that run (docs/replication.md section 8).

Every request that names a run passes here before it is served. What goes on under a lease, a ticket
or a region was granted to one peer by such a request.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from ckptd.core.replication.access import RunAccess
from ckptd.core.sessions import RankKey
from ckptd.event_log import EventLog
from ckptd.transport import peer_messages as p
from ckptd.transport.messages import GetHoldings, RunRecord

__all__ = ["RunGuard"]

logger = logging.getLogger(__name__)

_EVENT_EVERY_S = 60.0
_MAX_TOLD = 4096  # peers and runs of which events were told lately

_Guarded = GetHoldings | p.OpenReplica | p.OpenRead | p.GetDescriptor | p.DoubtSlot | p.Floor


class RunGuard:
    """Refuses requests about runs whose sender has no business with them, and tells of it.

    Args:
        record_of: what is recorded of a run.
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
        self._told_s: dict[tuple[str, str, str, str], float] = {}
        self._since: Counter[tuple[str, str, str, str]] = Counter()

    def refusal(self, peer: str, message: p.PeerMessage) -> p.PeerRefused | None:
        """Why this is not served; None if it may be. What is granted to a member is noted."""
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
            # Of a run that nobody here knew, whoever brings it first; its members are told of later
            # (`TellRun`).
            self.access.admit(message.job, message.run, [peer], now_s=self._clock())
        elif isinstance(message, GetHoldings):
            self.access.admit(message.job, message.run, message.nodes, now_s=self._clock())
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
        """Why a replica of this rank does not come from this peer."""
        record = self._record_of(message.job, message.run)
        if record is None or message.epoch != record.epoch:
            return None  # another epoch than that of which members were told here: ranks may have moved
        if message.rank in _ranks_on(record, peer):
            return None
        why = f"rank {message.rank} does not run on {peer} in epoch {message.epoch}"
        what = f"wanted to replicate rank {message.rank} and was refused: {why}"
        self._tell("warning", "foreign_request", peer, message.job, message.run, what)
        return p.PeerRefused("forbidden", why)

    def _tell(self, level: str, kind: str, peer: str, job: str, run: str, what: str) -> None:
        """An event, once a minute for each peer and run, with how many more there were."""
        key, now_s = (kind, peer, job, run), self._clock()
        self._events.count(kind)
        if now_s - self._told_s.get(key, float("-inf")) < _EVENT_EVERY_S:
            self._since[key] += 1
            return
        if len(self._told_s) >= _MAX_TOLD:
            self._told_s.clear()
        self._told_s[key] = now_s
        more = f" ({self._since.pop(key, 0)} more since the last such event)"
        text = f"{peer} {what}" + (more if not more.startswith(" (0 ") else "")
        self._events.add(level, kind, f"{job}/{run}: {text}", RankKey(job, run, 0))


def _ranks_on(record: RunRecord, node: str) -> tuple[int, ...]:
    return next((m.ranks for m in record.members if m.card.node == node), ())
