"""What the daemon answers to each message, and what it does as time passes.

A `Service` lives on the daemon's loop thread and never blocks: what may take long (making a
segment, digesting, unlinking) goes to workers, whose results come back through `collect`. The
rules of admission are in `ckptd.core.sessions`; the truth about memory is in the segment files.
"""

from __future__ import annotations

import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import ckptd
from ckptd.config.settings import given_settings
from ckptd.core.park_requests import ParkRequests
from ckptd.core.recovery.quarantine import open_failures
from ckptd.core.sessions import (
    Admitted,
    AttachWish,
    RankKey,
    Rejected,
    SessionTable,
    TrainerSession,
    decide_attach,
    wrong_members,
)
from ckptd.memory.housekeeping import Housekeeper
from ckptd.node.admin import Admin, openers
from ckptd.node.elastic_placements import ElasticFacts
from ckptd.node.park_events import ParkEvents
from ckptd.node.peering import Peering
from ckptd.node.rank_owners import OwnerTokens
from ckptd.node.segment_maker import Answer, Reserving, segment_info
from ckptd.node_context import NodeContext
from ckptd.persistence.tier import StorageTier
from ckptd.restore.remote_copies import ForReading
from ckptd.restore.store_restore import Bringing
from ckptd.transport.control import messages as m
from ckptd.transport.control.messages import RefusalCode
from ckptd.units import format_bytes
from ckptd.workers import Workers

__all__ = ["PidWatcher", "Service"]

logger = logging.getLogger(__name__)

_MAX_STRANGERS = 4096  # connections that said Hello; the least recent one is forgotten first
_MAX_UNANSWERED = (
    64  # requests of one connection; a client has one at a time, and some that it gave up
)
_SILENT_S = 120.0  # a trainer that cannot be watched and owns nothing is gone after so long


class PidWatcher(Protocol):
    """Tells the service when a process ends."""

    def watch(self, pid: int, ended: Callable[[], None]) -> bool:
        """Call `ended` once when the process ends; false if it cannot be watched."""

    def has_ended(self, pid: int) -> bool:
        """Has a watched process ended, even if `ended` was not called yet?"""

    def forget(self, pid: int) -> None:
        """No longer call."""


class Service:
    """The daemon's sessions and segments behind one `handle` and one `tick`.

    Args:
        node: its folder is claimed and its segments are adopted by `start`.
        slow: workers for making and removing segments.
        housekeeper: seals, settles, scrubs and expires.
        tier: what becomes durable, where there is a store.
        stop: ends this daemon, told why; called when it makes way for another.
    """

    def __init__(
        self,
        node: NodeContext,
        housekeeper: Housekeeper,
        slow: Workers,
        watcher: PidWatcher,
        peering: Peering,
        tier: StorageTier | None = None,
        *,
        stop: Callable[[str], None],
    ) -> None:
        store, events, clock = node.store, node.events, node.clock
        self._node, self._tier, self._stop = node, tier, stop
        self._store, self._events, self._clock = store, events, clock
        self._housekeeper, self._watcher, self._peering = housekeeper, watcher, peering
        self.sessions = SessionTable(node.config.max_sessions)
        self._reserving = Reserving(store, events, slow, peering, clock)
        self._for_reading = ForReading(
            store,
            peering.fetches,
            events,
            slow,
            meet=peering.meet,
            memory=lambda: peering.memory,
            attached=lambda session: self.sessions.of_identity(session.identity) is session,
        )
        self._bringing = Bringing(
            None if tier is None else tier.link,
            store,
            peering.fetches,
            housekeeper,
            events,
            slow,
            memory=lambda: peering.memory,
            clock=clock,
        )
        peering.keep_room_for(self.sessions.promised)
        self._admin = admin = Admin(node, self.sessions, housekeeper, peering, tier)
        self._hellos: OrderedDict[bytes, tuple[m.Hello, int]] = OrderedDict()
        self._owners = OwnerTokens(store.folder)
        self._unanswered: Counter[bytes] = Counter()
        self._parks, self._park_events = ParkRequests(), ParkEvents(store, events)
        self._elastic = ElasticFacts()
        self._busy_s = clock()
        self._handlers: dict[type, Callable[[bytes, Any, Answer], m.Reply | None]] = {
            m.Attach: self._attach,
            m.Reserve: self._reserve,
            m.ReserveBeside: self._reserve,
            m.Filled: self._filled,
            m.Drop: self._drop,
            m.Report: self._report,
            m.Notice: self._notice,
            m.ParkOutcome: self._park_outcome,
            m.TellElastic: self._tell_elastic,
            m.Detach: self._detach,
            m.Ping: self._ping,
            m.SeeRun: self._see_run,
            m.GetPeers: lambda _identity, _message, _answer: peering.status(),
            m.Drill: self._drill,
            m.Join: self._join,
            m.TellReplay: self._tell_replay,
            m.Fetch: self._fetch,
            m.GetFetch: self._fetch_state,
            m.GetStatus: lambda _identity, _message, _answer: admin.status(),
            m.GetSnapshots: lambda _identity, message, _answer: admin.snapshots(message),
            m.GetEvents: lambda _identity, message, _answer: admin.events(message),
            m.GetElastic: self._see_elastic,
            m.GetDurableWorlds: lambda _identity, message, _: self._bringing.look(message),
            m.BringStored: lambda _identity, message, _: self._bringing.bring(message),
            m.Park: self._park,
            m.Forget: self._forget,
            m.StepAside: self._step_aside,
            m.Unquarantine: lambda _identity, message, _: admin.unquarantine(message),
            m.AdmitNodes: self._admit_nodes,
        }

    def handle(
        self, identity: bytes, message: m.Message, answer: Answer, process: int = -1
    ) -> None:
        """Serve one message; `answer` is called once, now or later, or never for a one-way one.

        Args:
            process: that sent it, as `peer_process` has it.
        """
        if isinstance(message, m.Hello):
            answer(self._hello(identity, message, process))
            return
        handler = self._handlers.get(type(message))
        if handler is None:
            name = type(message).__name__
            answer(m.Refused(RefusalCode.BAD_MESSAGE, f"{name} is for clients, not for a daemon"))
            return
        if (session := self.sessions.of_identity(identity)) is not None:
            session.last_seen_s = self._clock()
        answered = self._counted(identity, message, answer)
        if answered is None:
            text = f"{_MAX_UNANSWERED} requests of this connection are not answered yet"
            answer(m.Refused(RefusalCode.BUSY, text, "wait for the answers"))
            return
        reply = handler(identity, message, answered)
        if reply is not None:
            answered(reply)

    def _counted(self, identity: bytes, message: m.Message, answer: Answer) -> Answer | None:
        """The answer, which is counted until it is given; None if too many are wanted already."""
        if isinstance(message, m.OneWay):
            return answer
        if self._unanswered[identity] >= _MAX_UNANSWERED:
            return None
        self._unanswered[identity] += 1
        waits = True

        def answered(reply: m.Reply) -> None:
            nonlocal waits
            if waits:
                waits = False
                self._unanswered[identity] -= 1
                if not self._unanswered[identity]:
                    del self._unanswered[identity]
            answer(reply)

        return answered

    def tick(self) -> None:
        """What time brings: dead owners, expired runs, slots that wait, the scrub."""
        now_s = self._clock()
        for session in self.sessions:
            if session.watched_by != "pidfd" and self._is_gone(session, now_s):
                self.trainer_gone(session, "its owner lock is free")
        self._housekeeper.tick(now_s, {(s.key.job, s.key.run) for s in self.sessions})
        self._peering.tick(now_s)
        self._parks.tick(now_s)
        self._park_events.tick()
        if self._tier is not None:
            self._tier.tick()
        if len(self.sessions) or any(s.detached_at_s is None for s in self._store.everything()):
            self._busy_s = now_s

    @property
    def idle_s(self) -> float:
        """For how long no trainer has been here."""
        return self._clock() - self._busy_s

    def trainer_gone(self, session: TrainerSession, why: str) -> None:
        """A trainer ended without a word: free what it was filling, seal what it had filled."""
        self._retire(session)
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
        self._park_events.ended(session)

    # -- trainers --------------------------------------------------------------------------------

    def _hello(self, identity: bytes, message: m.Hello, process: int) -> m.Reply:
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
            card=self._peering.card,
            started_by_trainer=self._node.config.started_by_trainer,
            settings=given_settings(self._node.config),
        )

    def _step_aside(self, identity: bytes, _message: m.StepAside, _: Answer) -> m.Reply:
        if not self._node.config.started_by_trainer:
            text = "this daemon was started by an operator"
            return m.Refused(RefusalCode.BUSY, text, "stop it where it was started")
        self._events.add("warning", "stepped_aside", "an operator starts a daemon in its place")
        self._stop("an operator starts a daemon in its place")
        return m.Done("it ends, and leaves the memory")

    def _attach(self, identity: bytes, message: m.Attach, _: Answer) -> m.Reply:
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
                f"{len(waiting)} files of {message.job}/{message.run} cannot be opened now, such as {waiting[0]}: "
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
            self._peering.memory,
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
        self._park_events.begun(session, before)
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
            persists=self._tier is not None,
            logs=tuple(segment_info(s) for s in beside if s.is_log),
            parked=tuple(segment_info(s) for s in beside if not s.is_log),
            notes=decision.notes,
        )

    def _reserve(
        self, identity: bytes, message: m.Reserve | m.ReserveBeside, answer: Answer
    ) -> m.Reply | None:
        session = self.sessions.of_identity(identity)
        if session is None:
            return _no_session(type(message).__name__)
        return self._reserving.reserve(session, message, answer)

    def _filled(self, identity: bytes, message: m.Filled, _: Answer) -> m.Reply | None:
        session = self.sessions.of_identity(identity)
        if session is None:
            return _no_session("Filled")
        segment = self._store.get(session.key, message.generation)
        if segment is None or message.slot >= segment.geometry.num_slots:
            return m.Refused(
                RefusalCode.NOT_FOUND,
                f"{session.key} has no slot {message.slot} in generation {message.generation}",
            )
        self._housekeeper.seal(segment, message.slot)
        return None

    def _drop(self, identity: bytes, message: m.Drop, _: Answer) -> m.Reply:
        session = self.sessions.of_identity(identity)
        if session is None:
            return _no_session("Drop")
        read = self._peering.fetches.drop_copy(session.key, message.generation)
        if read is not None:
            return m.Done(f"freed {format_bytes(read)}")
        segment = self._store.get(session.key, message.generation)
        if segment is None:
            text = f"{session.key} has no generation {message.generation}"
            return m.Refused(RefusalCode.NOT_FOUND, text)
        self._housekeeper.remove(segment, "its trainer no longer needs it")
        self._peering.changed(session.key)
        return m.Done(f"freed {format_bytes(segment.file_bytes)}")

    def _report(self, identity: bytes, message: m.Report, _: Answer) -> m.Reply | None:
        session = self.sessions.of_identity(identity)
        if session is None:
            return _no_session("Report")
        session.step, session.metrics = message.step, message.metrics
        return None

    def _notice(self, identity: bytes, message: m.Notice, _: Answer) -> m.Reply | None:
        session = self.sessions.of_identity(identity)
        if session is None:
            return _no_session("Notice")
        self._events.add(message.level, message.kind, message.message, session.key)
        if message.kind == "parked":
            self._park_events.heard(session)
        return None

    def _park(self, _identity: bytes, message: m.Park, answer: Answer) -> None:
        asked = [
            s.key
            for s in self.sessions
            if message.job in ("", s.key.job) and message.run in ("", s.key.run)
        ]
        for key in asked:
            self._events.add("info", "park_asked", f"{key} is asked to park", key)
        self._parks.ask(asked, self._clock() + message.wait_s, answer)

    def _park_outcome(self, identity: bytes, message: m.ParkOutcome, _: Answer) -> m.Reply | None:
        session = self.sessions.of_identity(identity)
        if session is None:
            return _no_session("ParkOutcome")
        self._parks.outcome(session.key, message.number, message.iteration, message.reason)
        return None

    def _tell_elastic(self, identity: bytes, message: m.TellElastic, _: Answer) -> m.Reply | None:
        session = self.sessions.of_identity(identity)
        if session is None:
            return _no_session("TellElastic")
        self._elastic.tell(session.key, message.elastic, self._clock())
        return None

    def _see_elastic(self, _identity: bytes, message: m.GetElastic, _: Answer) -> m.Reply:
        return self._elastic.seen(message.job, message.run, self._clock())

    def _admit_nodes(self, _identity: bytes, message: m.AdmitNodes, _: Answer) -> m.Reply:
        self._peering.admit(message.job, message.run, message.nodes)
        names = ", ".join(message.nodes)
        return m.Done(f"{names} may act on {message.job}/{message.run} for an hour")

    def _forget(self, _identity: bytes, message: m.Forget, _: Answer) -> m.Reply:
        reply = self._admin.forget(message)
        if isinstance(reply, m.Done):
            self._elastic.forget(message.job, message.run)
        return reply

    def _detach(self, identity: bytes, message: m.Detach, _: Answer) -> m.Reply:
        session = self.sessions.of_identity(identity)
        if session is None:
            return _no_session("Detach")
        self._retire(session)
        self._park_events.ended(session)
        final = ", and its run is over" if message.final else ""
        self._events.add(
            "info", "detached", f"process {session.pid} left {session.key}{final}", session.key
        )
        self._peering.leave(session.key, final=message.final)
        # What a replay did not reproduce is not to replace what is durable.
        doubted = open_failures(self._peering.quarantine.failures(session.key.job, session.key.run))
        if self._tier is not None and not message.final and not doubted:
            self._tier.leave(session.key)
        if message.final:
            self._elastic.forget(session.key.job, session.key.run)
            for segment in self._store.all_of_rank(session.key):
                self._housekeeper.remove(segment, "its run is over")
        return m.Done()

    # -- peers -----------------------------------------------------------------------------------

    def _see_run(self, _identity: bytes, message: m.SeeRun, answer: Answer) -> None:
        self._peering.see_run(message, answer)

    def _drill(self, _identity: bytes, message: m.Drill, answer: Answer) -> None:
        self._peering.drill(message, answer)

    def _join(self, identity: bytes, message: m.Join, _: Answer) -> m.Reply:
        session = self.sessions.of_identity(identity)
        if session is None:
            return _no_session("Join")
        if wrong := wrong_members(message.members, session.wish.world_size):
            text = f"who takes part in the run of {session.key} cannot be: {wrong}"
            self._events.add("warning", "refused.members", text, session.key)
            return m.Refused(RefusalCode.BAD_MESSAGE, text, "every rank tells the same nodes, once")
        try:
            refused = self._peering.join(session.key, message)
        except OSError as error:
            text = (
                f"who takes part in {session.key.job}/{session.key.run} cannot be written: {error}"
            )
            self._events.add("error", "run_not_recorded", text, session.key)
            return m.Refused(
                RefusalCode.SEGMENT_FS,
                text,
                f"make room on the filesystem of {self._store.folder}; it is tried again, and until then nothing is replicated",
            )
        if refused:
            self._events.add("warning", "refused.stale_epoch", refused, session.key)
            return m.Refused(
                RefusalCode.STALE_EPOCH,
                refused,
                "the job was recovered again meanwhile: end this trainer, and start it with the others",
            )
        if self._tier is not None:
            self._tier.join(
                session.key, session.wish.world_size, message.epoch, message.epoch_start
            )
        return m.Done()

    def _tell_replay(self, identity: bytes, message: m.TellReplay, _: Answer) -> m.Reply:
        session = self.sessions.of_identity(identity)
        if session is None:
            return _no_session("TellReplay")
        self._peering.quarantine.tell(session.key.job, session.key.run, message.failure)
        return m.Done()

    def ranks_of(self, job: str, run: str) -> list[int]:
        """The ranks of a run that are attached here."""
        return [s.key.rank for s in self.sessions if (s.key.job, s.key.run) == (job, run)]

    def _fetch(self, identity: bytes, message: m.Fetch, answer: Answer) -> m.Reply | None:
        session = self.sessions.of_identity(identity)
        if session is None:
            return _no_session("Fetch")
        if message.kind:
            return self._for_reading.begin(session, message, answer)
        return self._reserving.fetch(session, message, answer)

    def _fetch_state(self, identity: bytes, message: m.GetFetch, _: Answer) -> m.Reply:
        session = self.sessions.of_identity(identity)
        if session is None:
            return _no_session("GetFetch")
        return self._reserving.fetch_state(session, message)

    def _ping(self, identity: bytes, _message: m.Ping, _: Answer) -> m.Reply:
        session = self.sessions.of_identity(identity)
        wanted = 0 if session is None else self._parks.number_for(session.key)
        return m.Pong(self._node.boot_id, session is not None, wanted)

    # -- helpers ---------------------------------------------------------------------------------

    def _current_owner(self, wish: AttachWish) -> TrainerSession | None:
        """The live session of a rank; one whose process has just ended is retired first."""
        owner = self.sessions.of_rank(wish.key)
        if owner is None or self._owners.prove(wish.key, wish.token):
            return owner
        if owner.watched_by == "pidfd" and self._watcher.has_ended(owner.pid):
            self.trainer_gone(owner, "its process ended")
            return None
        if owner.watched_by != "pidfd" and self._is_gone(owner, self._clock()):
            self.trainer_gone(owner, "its owner lock is free")
            return None
        return owner

    def _retire(self, session: TrainerSession) -> None:
        self.sessions.remove(session)
        self._owners.remove(session.key)
        self._parks.gone(session.key)
        if not any(other.pid == session.pid for other in self.sessions):
            self._watcher.forget(session.pid)

    def _process_ended(self, session: TrainerSession) -> None:
        if self.sessions.of_identity(session.identity) is session:
            self.trainer_gone(session, "its process ended")

    def _is_gone(self, session: TrainerSession, now_s: float) -> bool:
        """For trainers that cannot be watched: the owner lock was there and is there no more."""
        if any(segment.owned() for segment in self._store.all_of_rank(session.key)):
            session.owner_seen = True
            return False
        return session.owner_seen or now_s - session.last_seen_s > _SILENT_S

    def _openers(self, key: RankKey) -> list[int]:
        """Processes that have an owned segment of this rank open, for a refusal's message."""
        return openers([segment for segment in self._store.all_of_rank(key) if segment.owned()])


def _no_session(what: str) -> m.Refused:
    return m.Refused(
        RefusalCode.NO_SESSION,
        f"{what} without a session",
        "attach first; a restarted daemon knows its segments and not its trainers",
    )


def _same_pid_namespace(hello: m.Hello) -> bool:
    """A pid from another container means another process here."""
    return hello.pid_namespace in ("", pid_namespace())


def pid_namespace() -> str:
    """The kernel's name of this process' pid namespace; empty where it cannot be read."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
