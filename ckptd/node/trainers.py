"""The trainers of this node: who says hello, who is admitted as which rank, and who is gone.

On the daemon's loop thread. The rules of admission are in `ckptd.core.sessions`.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from functools import partial

import ckptd
from ckptd.config.settings import given_settings
from ckptd.core.park_requests import ParkRequests
from ckptd.core.sessions import (
    Admitted,
    AttachWish,
    RankKey,
    Rejected,
    SessionTable,
    TrainerSession,
    decide_attach,
)
from ckptd.memory.housekeeping import Housekeeper
from ckptd.node.admin import openers
from ckptd.node.park_events import ParkEvents
from ckptd.node.peering import Peering
from ckptd.node.process_watch import PidWatcher
from ckptd.node.rank_owners import OwnerTokens
from ckptd.node.reservations import segment_info
from ckptd.node_context import NodeContext
from ckptd.transport import messages as m
from ckptd.transport.messages import RefusalCode

__all__ = ["Trainers"]

_MAX_STRANGERS = 4096  # connections that said Hello; the least recent one is forgotten first
_SILENT_S = 120.0  # a trainer that cannot be watched and owns nothing is gone after so long


class Trainers:
    """Sessions of attached trainers.

    Attributes:
        parks: requests to park, and what came of them.
        park_events: what is told of parked state.
    """

    def __init__(
        self, node: NodeContext, housekeeper: Housekeeper, watcher: PidWatcher, peering: Peering
    ) -> None:
        self._node, self._store, self._events = node, node.store, node.events
        self._clock, self._persists = node.clock, bool(node.config.store)
        self._housekeeper, self._watcher, self._peering = housekeeper, watcher, peering
        self.sessions = SessionTable(node.config.max_sessions)
        self.parks, self.park_events = ParkRequests(), ParkEvents(node.store, node.events)
        self._hellos: OrderedDict[bytes, tuple[m.Hello, int]] = OrderedDict()
        self._owners = OwnerTokens(node.store.folder)

    def tick(self, now_s: float) -> None:
        """Find those that ended and cannot be watched."""
        for session in self.sessions:
            if session.watched_by != "pidfd" and self._is_gone(session, now_s):
                self.gone(session, "its owner lock is free")
        self.parks.tick(now_s)
        self.park_events.tick()

    def ranks_of(self, job: str, run: str) -> list[int]:
        """The ranks of a run that are attached here."""
        return [s.key.rank for s in self.sessions if (s.key.job, s.key.run) == (job, run)]

    def hello(self, identity: bytes, message: m.Hello, process: int) -> m.Reply:
        """A process says who it is; see `Service.handle`."""
        self._hellos[identity] = message, process
        self._hellos.move_to_end(identity)
        while len(self._hellos) > _MAX_STRANGERS:
            self._hellos.popitem(last=False)
        return m.Welcome(
            version=ckptd.__version__,
            node_id=self._store.node_id,
            pid=os.getpid(),
            segment_dir=str(self._store.folder),
            boot_id=self._node.boot_id,
            card=self._peering.neighbours.card,
            started_by_trainer=self._node.config.started_by_trainer,
            settings=given_settings(self._node.config),
        )

    def attach(self, identity: bytes, message: m.Attach) -> m.Reply:
        """Admit a trainer as its rank, or tell it why not."""
        hello, process = self._hellos.get(identity, (None, -1))
        if hello is None:
            return m.Refused(RefusalCode.NO_SESSION, "Attach without Hello", "say Hello first")
        self._housekeeper.look_at_folder(self._clock())
        key = RankKey(message.job, message.run, message.rank)
        wish = AttachWish(
            key,
            message.world_size,
            message.topology,
            message.layout_version,
            message.needed_bytes,
            message.needed_text,
            frozenset(message.held) if self._owners.prove(key, message.token) else frozenset(),
            message.token,
        )
        if waiting := self._peering.waits_for(message.job, message.run):
            return m.Refused(
                RefusalCode.NOT_READY,
                f"{len(waiting)} files of {message.job}/{message.run} cannot be opened now, such "
                f"as {waiting[0]}: "
                "what is in them is not known yet",
                "`ckptctl events` says why (segment_waits); `ckptctl forget` gives them up",
            )
        owner = self._current_owner(wish)
        if owner is None and len(self.sessions) >= self.sessions.limit:
            return m.Refused(
                RefusalCode.QUOTA,
                f"{self.sessions.limit} trainers are attached already",
                "raise CKPTD_MAX_SESSIONS",
            )
        taken_by = None
        if owner is not None and not self._owners.prove(key, wish.token):
            taken_by = owner.pid
        decision = decide_attach(
            wish,
            self._store.facts(),
            self._store.memory,
            owner_pid=taken_by,
            open_in=self._openers(key),
        )
        if isinstance(decision, Rejected):
            self._events.add("warning", f"refused.{decision.code}", decision.message, key)
            return m.Refused(decision.code, decision.message, decision.hint)
        if owner is not None:
            self.sessions.remove(owner)  # the same process, on a new connection
        return self._admit(identity, hello, process, wish, decision, owner)

    def _admit(
        self,
        identity: bytes,
        hello: m.Hello,
        process: int,
        wish: AttachWish,
        decision: Admitted,
        before: TrainerSession | None,
    ) -> m.Reply:
        previous = self.sessions.of_identity(identity)
        if previous is not None:
            self.sessions.remove(previous)
        now_s = self._clock()
        # What the process says of itself only counts where the kernel does not say who it is.
        pid = process if process > 0 else hello.pid
        visible = process > 0 or (process < 0 and _same_pid_namespace(hello))
        session = TrainerSession(
            identity, pid, wish.key, wish, now_s, now_s, "owner-lock", writer_pid=hello.pid
        )
        self.park_events.begun(session, before)
        if visible and self._watcher.watch(pid, partial(self._process_ended, session)):
            session.watched_by = "pidfd"
        self.sessions.add(session)
        live = {s.key for s in self.sessions}
        live |= {s.key for s in self._store.everything() if s.owned()}
        if unwritten := self._owners.enter(wish.key, wish.token, live):
            text = f"if this daemon is restarted {wish.key} cannot come back to it: {unwritten}"
            self._events.add("error", "owner_unwritten", text, wish.key)
        for note in decision.notes:
            self._events.add("info", "stale_run", note, wish.key)
        self._events.add(
            "info",
            "attached",
            f"process {pid} is {wish.key} of {wish.world_size}, with "
            f"{len(decision.generations)} segments in memory (watched by {session.watched_by})",
            wish.key,
        )
        got = [self._store.get(wish.key, generation) for generation in decision.generations]
        found = [segment for segment in got if segment is not None]
        beside = [segment for segment in found if not segment.holds_snapshots]
        return m.Attached(
            segments=tuple(segment_info(segment) for segment in found if segment.holds_snapshots),
            quota_bytes=self._store.quota_bytes,
            # For snapshots: what this rank's own logs and parked states take is not to be had for them.
            available_bytes=max(0, decision.available_bytes - sum(s.file_bytes for s in beside)),
            replication_slack=self._peering.slack,
            persists=self._persists,
            logs=tuple(segment_info(s) for s in beside if s.is_log),
            parked=tuple(segment_info(s) for s in beside if not s.is_log),
            notes=decision.notes,
        )

    def gone(self, session: TrainerSession, why: str) -> None:
        """A trainer ended without a word: free what it was filling, seal what it had filled."""
        self.retire(session)
        self._events.add(
            "warning",
            "trainer_gone",
            f"process {session.pid} of {session.key} is gone ({why}) at step {session.step}",
            session.key,
        )
        self._peering.leave(session.key, final=False)
        for segment in self._store.all_of_rank(session.key):
            segment.end_quiet()
            self._housekeeper.settle(segment)
        self.park_events.ended(session)

    def _current_owner(self, wish: AttachWish) -> TrainerSession | None:
        """The live session of a rank; one whose process has just ended is retired first."""
        owner = self.sessions.of_rank(wish.key)
        if owner is None or self._owners.prove(wish.key, wish.token):
            return owner
        if owner.watched_by == "pidfd" and self._watcher.has_ended(owner.pid):
            self.gone(owner, "its process ended")
            return None
        if owner.watched_by != "pidfd" and self._is_gone(owner, self._clock()):
            self.gone(owner, "its owner lock is free")
            return None
        return owner

    def retire(self, session: TrainerSession) -> None:
        """Its session is over."""
        self.sessions.remove(session)
        self._owners.remove(session.key)
        self.parks.gone(session.key)
        if not any(other.pid == session.pid for other in self.sessions):
            self._watcher.forget(session.pid)

    def _process_ended(self, session: TrainerSession) -> None:
        if self.sessions.of_identity(session.identity) is session:
            self.gone(session, "its process ended")

    def _is_gone(self, session: TrainerSession, now_s: float) -> bool:
        """For trainers that cannot be watched: the owner lock was there and is there no more."""
        if any(segment.owned() for segment in self._store.all_of_rank(session.key)):
            session.owner_seen = True
            return False
        return session.owner_seen or now_s - session.last_seen_s > _SILENT_S

    def _openers(self, key: RankKey) -> list[int]:
        """Processes that have an owned segment of this rank open, for a refusal's message."""
        return openers([segment for segment in self._store.all_of_rank(key) if segment.owned()])


def _same_pid_namespace(hello: m.Hello) -> bool:
    """A pid from another container means another process here."""
    return hello.pid_namespace in ("", pid_namespace())


def pid_namespace() -> str:
    """The kernel's name of this process' pid namespace; empty where it cannot be read."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
