"""The daemon's answer to each message, and its periodic work.

A `Service` lives on the daemon's loop thread and never blocks: workers do what may take long (making
a segment, digesting, unlinking), and their results come back through `collect`. The rules of
admission are in `ckptd.core.sessions`; the truth about memory is in the segment files.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ckptd.core.recovery.quarantine import open_failures
from ckptd.core.recovery.recovery_phases import (
    RecoveryHistograms,
    ToldStart,
    first_phase,
    phases_in_metrics,
)
from ckptd.core.sessions import TrainerSession, wrong_members
from ckptd.holdings import policy_of
from ckptd.memory.housekeeping import Housekeeper
from ckptd.node.admin import Admin, ElasticFacts, NodeView
from ckptd.node.peering import Peering
from ckptd.node.reservations import Answer, Reservations
from ckptd.node.trainers import PidWatcher, Trainers
from ckptd.node.user_access import UserAccess
from ckptd.node_context import NodeContext
from ckptd.persistence.tier import StorageTier
from ckptd.restore.store_restore import StoreRestore
from ckptd.transport import messages as m
from ckptd.transport.messages import RefusalCode
from ckptd.units import format_bytes

_RECOVERED, _STARTED = "recovery_phases", "start_phases"
_CLOCK_OFF_S = 3600.0  # a trainer's unix time that is farther from ours is none
_MAX_UNANSWERED = 64  # requests of one connection; a client has one at a time, and some that it gave up


class Service:
    """Serves messages by `handle`, and does the periodic work in `tick`.

    Args:
        tier: None where no store is configured.
        traces: takes what trainers tell of their starts; None: nobody wants it.
        stop: ends this daemon for a reason; called when it makes way for another one.
    """

    def __init__(
        self,
        node: NodeContext,
        housekeeper: Housekeeper,
        watcher: PidWatcher,
        peering: Peering,
        tier: StorageTier | None = None,
        *,
        stop: Callable[[str], None],
        traces: Callable[[ToldStart], None] | None = None,
    ) -> None:
        self._traces = traces
        store, events, clock = node.store, node.events, node.clock
        self._node, self._tier, self._stop = node, tier, stop
        self._store, self._events, self._clock = store, events, clock
        self._housekeeper, self._peering = housekeeper, peering
        self.trainers = Trainers(node, housekeeper, watcher, peering)
        self.sessions = self.trainers.sessions
        self._reservations = Reservations(
            node,
            peering,
            attached=lambda session: self.sessions.of_identity(session.identity) is session,
        )
        link = None if tier is None else tier.link
        self._store_restore = StoreRestore(link, store, peering.maker, peering.fetches, housekeeper)
        store.promised = self.sessions.promised
        self._users = UserAccess(apart=node.config.isolate_users)
        self._admin = admin = Admin(node, self.sessions, housekeeper, peering, tier)
        self._unanswered: Counter[bytes] = Counter()
        self._elastic = ElasticFacts()
        self._recoveries = RecoveryHistograms()
        self._busy_s = clock()
        # Messages of attached trainers.
        self._of_session: dict[type, Callable[[TrainerSession, Any, Answer], m.Reply | None]] = {
            m.Reserve: self._reservations.reserve,
            m.ReserveBeside: self._reservations.reserve,
            m.Filled: self._filled,
            m.Drop: self._drop,
            m.Report: self._report,
            m.Notice: self._notice,
            m.ParkOutcome: self._park_outcome,
            m.TellElastic: self._tell_elastic,
            m.Detach: self._detach,
            m.Join: self._join,
            m.TellReplay: self._tell_replay,
            m.Fetch: self._reservations.fetch,
            m.GetFetch: lambda session, message, _: self._reservations.fetch_state(session, message),
        }
        # Messages of any connection.
        self._of_anybody: dict[type, Callable[[Any, Answer], m.Reply | None]] = {
            m.SeeRun: peering.see_run,
            m.GetPeers: lambda _message, _: peering.status(),
            m.Drill: peering.drill,
            m.GetStatus: lambda _message, _: admin.status(),
            m.GetSnapshots: lambda message, _: admin.snapshots(message),
            m.GetElastic: self._see_elastic,
            m.GetDurableWorlds: lambda message, _: self._store_restore.look(message),
            m.BringStored: lambda message, _: self._store_restore.restore(message),
            m.Park: self._park,
            m.StepAside: self._step_aside,
            m.Unquarantine: lambda message, _: admin.unquarantine(message),
            m.TellAudit: lambda message, _: admin.audits.tell(message, self._clock()),
            m.AdmitNodes: self._admit_nodes,
        }

    def handle(
        self, identity: bytes, message: m.Message, answer: Answer, process: int = -1, user: int | None = None
    ) -> None:
        """Serve one message; `answer` is called once, now or later, or never for a one-way message.

        Args:
            process: the sender, as `peer_process` returns it.
            user: its user, as the kernel says; None: unknown, and an operator.
        """
        session = self.sessions.of_identity(identity)
        if (refused := self._users.refusal(user, message, session)) is not None:
            answer(refused)
            return
        if isinstance(message, m.Hello):
            answer(self.trainers.hello(identity, message, process))
            return
        if session is not None:
            session.last_seen_s = self._clock()
        serve = self._handler(identity, message, session, user)
        answered = self._counted(identity, message, self._narrowed(user, message, answer))
        if answered is None:
            text = f"{_MAX_UNANSWERED} requests of this connection are not answered yet"
            answer(m.Refused(RefusalCode.BUSY, text, "wait for the answers"))
            return
        reply = serve(answered)
        if reply is not None:
            answered(reply)

    def _narrowed(self, user: int | None, message: m.Message, answer: Answer) -> Answer:
        return lambda reply: answer(self._users.narrowed(user, message, reply))

    def _handler(
        self, identity: bytes, message: m.Message, session: TrainerSession | None, user: int | None
    ) -> Callable[[Answer], m.Reply | None]:
        """The function that serves a message; it returns the answer, or gives it later."""
        kind = type(message)
        if isinstance(message, m.Attach):
            return lambda _: self.trainers.attach(identity, message, user)
        if isinstance(message, m.GetEvents):
            return lambda _: self._admin.events(message, self._users.sees(user))
        if isinstance(message, m.Forget):
            return lambda _: self._forget(message, user)
        if isinstance(message, m.Ping):
            return lambda _: self._ping(session)
        if (of_anybody := self._of_anybody.get(kind)) is not None:
            return partial(of_anybody, message)
        if (of_session := self._of_session.get(kind)) is None:
            text = f"{kind.__name__} is for clients, not for a daemon"
            return lambda _: m.Refused(RefusalCode.BAD_MESSAGE, text)
        if session is None:
            return lambda _: _no_session(kind.__name__)
        return partial(of_session, session, message)

    def _counted(self, identity: bytes, message: m.Message, answer: Answer) -> Answer | None:
        """The answer, counted until it is given; None if too many answers are outstanding."""
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
        """Do the periodic work of trainers, segments, peers and storage."""
        now_s = self._clock()
        self.trainers.tick(now_s)
        self._housekeeper.tick(now_s, {(s.key.job, s.key.run) for s in self.sessions})
        self._peering.tick(now_s)
        if self._tier is not None:
            self._tier.tick()
        if len(self.sessions) or any(s.detached_at_s is None for s in self._store.everything()):
            self._busy_s = now_s

    def view(self, since: int) -> NodeView:
        """What this node does at this moment, with the newest events after ``since``."""
        return self._admin.view(self._recoveries, self._elastic.seen("", "", self._clock()), since)

    @property
    def idle_s(self) -> float:
        """Seconds since the last trainer was attached."""
        return self._clock() - self._busy_s

    # -- trainers --------------------------------------------------------------------------------

    def _step_aside(self, _message: m.StepAside, _: Answer) -> m.Reply:
        if not self._node.config.started_by_trainer:
            text = "this daemon was started by an operator"
            return m.Refused(RefusalCode.BUSY, text, "stop it where it was started")
        self._events.add("warning", "stepped_aside", "an operator starts a daemon in its place")
        self._stop("an operator starts a daemon in its place")
        return m.Done("it ends, and leaves the memory")

    def _filled(self, session: TrainerSession, message: m.Filled, _: Answer) -> m.Reply | None:
        segment = self._store.get(session.key, message.generation)
        if segment is None or message.slot >= segment.geometry.num_slots:
            return m.Refused(
                RefusalCode.NOT_FOUND,
                f"{session.key} has no slot {message.slot} in generation {message.generation}",
            )
        self._housekeeper.seal(segment, message.slot)
        return None

    def _drop(self, session: TrainerSession, message: m.Drop, _: Answer) -> m.Reply:
        read = self._peering.fetches.drop_copy(session.key, message.generation)
        if read is not None:
            return m.Done(f"freed {format_bytes(read)}")
        segment = self._store.get(session.key, message.generation)
        if segment is None:
            text = f"{session.key} has no generation {message.generation}"
            return m.Refused(RefusalCode.NOT_FOUND, text)
        self._housekeeper.remove(segment, "its trainer no longer needs it")
        self._peering.runs.changed(session.key)
        return m.Done(f"freed {format_bytes(segment.file_bytes)}")

    def _report(self, session: TrainerSession, message: m.Report, _: Answer) -> m.Reply | None:
        session.step, session.metrics = message.step, message.metrics
        if session.told_start is not None:
            (kind, text), session.told_start = session.told_start, None
            self._started(session, kind == _RECOVERED, text)
        return None

    def _started(self, session: TrainerSession, recovery: bool, text: str) -> None:
        """A trainer's start is over, and its phases are known."""
        key, durations = session.key, phases_in_metrics(session.metrics)
        if recovery:
            self._recoveries.observe(durations)
        if self._traces is None:
            return
        segments = self._store.of_rank(key)
        self._traces(
            ToldStart(
                key.job,
                key.run,
                key.rank,
                session.wish.world_size,
                epoch=_count_in(session.metrics, "epoch"),
                iteration=session.step,
                recovery=recovery,
                began_with=first_phase(text),
                durations=durations,
                ended_ns=_unix_ns(session.metrics.get("first_new_step_at", 0.0)),
                tier=_tier_in(session.metrics),
                policy=policy_of(segments[-1].descriptor) if segments else "",
            )
        )

    def _notice(self, session: TrainerSession, message: m.Notice, _: Answer) -> m.Reply | None:
        self._events.add(message.level, message.kind, message.message, session.key, by_trainer=True)
        if message.kind == "parked":
            self.trainers.park_events.heard(session)
        if message.kind in (_RECOVERED, _STARTED):
            session.told_start = message.kind, message.message
        return None

    def _park(self, message: m.Park, answer: Answer) -> None:
        asked = [
            s.key for s in self.sessions if message.job in ("", s.key.job) and message.run in ("", s.key.run)
        ]
        for key in asked:
            self._events.add("info", "park_asked", f"{key} is asked to park", key)
        self.trainers.parks.ask(asked, self._clock() + message.wait_s, answer)

    def _park_outcome(self, session: TrainerSession, message: m.ParkOutcome, _: Answer) -> m.Reply | None:
        self.trainers.parks.outcome(session.key, message.number, message.iteration, message.reason)
        return None

    def _tell_elastic(self, session: TrainerSession, message: m.TellElastic, _: Answer) -> m.Reply | None:
        self._elastic.tell(session.key, message.elastic, self._clock())
        return None

    def _see_elastic(self, message: m.GetElastic, _: Answer) -> m.Reply:
        return self._elastic.seen(message.job, message.run, self._clock())

    def _admit_nodes(self, message: m.AdmitNodes, _: Answer) -> m.Reply:
        if not self._peering.concerns(message.job, message.run):
            text = f"nothing of {message.job}/{message.run} is here, and this node knows no member of it"
            return m.Refused(RefusalCode.NOT_FOUND, text)
        self._peering.access.admit(message.job, message.run, message.nodes, now_s=self._clock())
        names = ", ".join(message.nodes)
        return m.Done(f"{names} may act on {message.job}/{message.run} for an hour")

    def _forget(self, message: m.Forget, user: int | None) -> m.Reply:
        reply = self._admin.forget(message, self._users.sees(user))
        if isinstance(reply, m.Done):
            self._elastic.forget(message.job, message.run)
            self._admin.audits.forget(message.job, message.run)
            self.trainers.failures.forget(message.job, message.run)
        return reply

    def _detach(self, session: TrainerSession, message: m.Detach, _: Answer) -> m.Reply:
        self.trainers.left(session)
        final = ", and its run is over" if message.final else ""
        self._events.add("info", "detached", f"process {session.pid} left {session.key}{final}", session.key)
        self._peering.leave(session.key, final=message.final)
        # Snapshots that no replay reproduced must not replace durable ones.
        doubted = open_failures(self._peering.quarantine.failures(session.key.job, session.key.run))
        if self._tier is not None and not message.final and not doubted:
            self._tier.leave(session.key)
        if message.final:
            self._elastic.forget(session.key.job, session.key.run)
            for segment in self._store.all_of_rank(session.key):
                self._housekeeper.remove(segment, "its run is over")
        return m.Done()

    # -- peers -----------------------------------------------------------------------------------

    def _join(self, session: TrainerSession, message: m.Join, _: Answer) -> m.Reply:
        if wrong := wrong_members(message.members, session.wish.world_size):
            text = f"the members of the run of {session.key} are impossible: {wrong}"
            self._events.add("warning", "refused.members", text, session.key)
            return m.Refused(RefusalCode.BAD_MESSAGE, text, "every rank must name the same nodes, each once")
        try:
            refused = self._peering.runs.join(session.key, message)
        except OSError as error:
            text = f"the members of {session.key.job}/{session.key.run} cannot be written: {error}"
            self._events.add("error", "run_not_recorded", text, session.key)
            return m.Refused(
                RefusalCode.SEGMENT_FS,
                text,
                f"make room on the filesystem of {self._store.folder}; it is tried again, and "
                "until then nothing is replicated",
            )
        if refused:
            self._events.add("warning", "refused.stale_epoch", refused, session.key)
            return m.Refused(
                RefusalCode.STALE_EPOCH,
                refused,
                "the job was recovered again meanwhile: end this trainer, and start it with the others",
            )
        if self._tier is not None:
            self._tier.join(session.key, session.wish.world_size, message.epoch, message.epoch_start)
        return m.Done()

    def _tell_replay(self, session: TrainerSession, message: m.TellReplay, _: Answer) -> m.Reply:
        self._peering.quarantine.tell(session.key.job, session.key.run, message.failure)
        return m.Done()

    def _ping(self, session: TrainerSession | None) -> m.Reply:
        if session is None:
            return m.Pong(self._node.boot_id, attached=False)
        key, tier = session.key, self._tier
        return m.Pong(
            self._node.boot_id,
            attached=True,
            park=self.trainers.parks.number_for(key),
            replicated=self._peering.runs.replicated_up_to(key),
            durable=-1 if tier is None else tier.durable_up_to(key),
        )


def _count_in(metrics: Mapping[str, float], name: str) -> int:
    """A counter of a trainer as a whole number; -1: it is absent or none."""
    value = metrics.get(name, -1.0)
    return int(value) if 0 <= value < 1 << 53 else -1


def _unix_ns(reported_s: float) -> int:
    """A unix time of a trainer, or now if that can be none."""
    now_s = time.time()
    return round((reported_s if abs(reported_s - now_s) < _CLOCK_OFF_S else now_s) * 1e9)


def _tier_in(metrics: Mapping[str, float]) -> str:
    """The farthest tier from which the snapshots of a trainer's last recovery came."""
    if _count_in(metrics, "from_storage") > 0:
        return "storage"
    return "peers" if _count_in(metrics, "from_peers") > 0 else "memory"


def _no_session(what: str) -> m.Refused:
    return m.Refused(
        RefusalCode.NO_SESSION,
        f"{what} without a session",
        "attach first; a restarted daemon knows its segments and not its trainers",
    )
