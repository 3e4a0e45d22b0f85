"""The daemon's answers to `ckptctl`: status, snapshots, events, elastic placements, and forgetting a run."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, field

import ckptd
from ckptd.core.recovery.recovery_phases import RecoveryHistograms
from ckptd.core.sessions import MemoryFacts, RankKey, SessionTable, TrainerSession, bytes_of_user, users_of
from ckptd.memory import inventory, locks
from ckptd.memory.housekeeping import Housekeeper
from ckptd.memory.segment_file import Segment
from ckptd.node.peering import Peering
from ckptd.node.step_audits import StepAudits
from ckptd.node_context import NodeContext
from ckptd.persistence.tier import StorageTier
from ckptd.storage.stores.store_base import public_url
from ckptd.transport import messages as m
from ckptd.transport.messages import Elastic, ElasticTold, RefusalCode, SeenElastic
from ckptd.units import count_of, format_bytes

_EVENTS_IN_VIEW = 500
RUNS_MAX = 16  # a placement of 64 layers on 1,024 nodes is some megabytes


class ElasticFacts:
    """The last placement that an elastic job reported, by run; of too many runs, the most recent.

    No recovery needs it, so it is kept in this process only; trainers report it anew with each
    measured load.
    """

    def __init__(self) -> None:
        self._reports: OrderedDict[tuple[str, str], tuple[int, float, Elastic]] = OrderedDict()

    def tell(self, key: RankKey, elastic: Elastic, now_s: float) -> None:
        """Replace the report of a run; any of its ranks may send one."""
        run = key.job, key.run
        self._reports[run] = key.rank, now_s, elastic
        self._reports.move_to_end(run)
        while len(self._reports) > RUNS_MAX:
            self._reports.popitem(last=False)

    def forget(self, job: str, run: str) -> None:
        """Drop the report of a run that is over."""
        self._reports.pop((job, run), None)

    def seen(self, job: str, run: str, now_s: float) -> SeenElastic:
        """The reports, by name; empty names mean all."""
        return SeenElastic(
            tuple(
                ElasticTold(name, its_run, rank, max(0.0, now_s - at_s), elastic)
                for (name, its_run), (rank, at_s, elastic) in sorted(
                    self._reports.items(), key=lambda item: item[0]
                )
                if job in ("", name) and run in ("", its_run)
            )
        )


@dataclass(frozen=True, slots=True)
class NodeView:
    """What metrics and page are made of: the answers that `ckptctl` gets, all of one moment."""

    status: m.Status
    peers: m.Peers
    snapshots: m.Snapshots
    recoveries: RecoveryHistograms
    events: m.Events = field(default_factory=lambda: m.Events((), 1, 0))
    elastic: m.SeenElastic = field(default_factory=lambda: m.SeenElastic(()))


class Admin:
    """Reads sessions, segments and events; only `forget` and `unquarantine` make changes."""

    def __init__(
        self,
        node: NodeContext,
        sessions: SessionTable,
        housekeeper: Housekeeper,
        peering: Peering,
        tier: StorageTier | None,
    ) -> None:
        self._node, self._store, self._events = node, node.store, node.events
        self._sessions, self._housekeeper = sessions, housekeeper
        self._peering, self._tier, self._clock = peering, tier, node.clock
        self._started_s = node.clock()
        self.audits = StepAudits(node.events, segments=peering.segments_of)

    def status(self) -> m.Status:
        """Everything that `ckptctl status` shows."""
        now_s = self._clock()
        promised = self._sessions.promised()
        memory = self._store.memory
        anon, file, shmem = inventory.own_memory()
        return m.Status(
            version=ckptd.__version__,
            node_id=self._store.node_id,
            boot_id=self._node.boot_id,
            pid=os.getpid(),
            uptime_s=now_s - self._started_s,
            endpoint=self._node.config.listen,
            runtime_dir=self._node.config.runtime_dir,
            segment_dir=str(self._store.folder),
            quota_bytes=self._store.quota_bytes,
            used_bytes=self._store.used_bytes,
            promised_bytes=sum(promised.values()),
            fs_total_bytes=memory.fs_total_bytes,
            fs_available_bytes=memory.fs_available_bytes,
            rss_anon_bytes=anon,
            rss_file_bytes=file,
            rss_shmem_bytes=shmem,
            seal_queue=self._housekeeper.queued,
            sessions=tuple(self._session_status(session, now_s) for session in self._sessions),
            segments=tuple(inventory.segment_status(s, now_s) for s in self._store.everything()),
            counters={**self._events.counters, **self._peering.fabric_counters},
            durable=None if self._tier is None else self._durable(self._tier),
            users=self._users(memory),
            audits=self.audits.reports(now_s),
        )

    def _users(self, memory: MemoryFacts) -> tuple[m.UserStatus, ...]:
        if memory.quotas is None:
            return ()
        facts = self._store.facts()
        return tuple(
            m.UserStatus(user, bytes_of_user(user, facts, memory), memory.quotas.of(user))
            for user in users_of(facts, memory)
        )

    def view(self, recoveries: RecoveryHistograms, elastic: m.SeenElastic, since: int) -> NodeView:
        """Everything of this moment, with the newest events after ``since``, for another thread."""
        snapshots = self.snapshots(m.GetSnapshots())
        since = max(since, self._events.last_seq - _EVENTS_IN_VIEW)
        events = self._events.page(since, _EVENTS_IN_VIEW)
        peers = self._peering.status()
        return NodeView(self.status(), peers, snapshots, deepcopy(recoveries), events, elastic)

    def _durable(self, tier: StorageTier) -> m.DurableStatus:
        counters = self._events.counters
        return m.DurableStatus(
            url=public_url(self._node.config.store),
            keeper_pid=tier.keeper_pid,
            uploaded_bytes=counters["persisted_bytes"],
            spared_bytes=counters["persist_spared_bytes"],
            ranks=tuple(
                m.DurableRank(key.job, key.run, key.rank, **asdict(state))
                for key, state in tier.states().items()
            ),
        )

    def _session_status(self, session: TrainerSession, now_s: float) -> m.SessionStatus:
        segments = self._store.all_of_rank(session.key)
        return m.SessionStatus(
            job=session.key.job,
            run=session.key.run,
            rank=session.key.rank,
            world_size=session.wish.world_size,
            pid=session.pid,
            step=session.step,
            metrics=dict(session.metrics),
            segments=len(segments),
            segment_bytes=sum(segment.file_bytes for segment in segments),
            promised_bytes=session.wish.needed_bytes,
            attached_s=now_s - session.attached_at_s,
            watched_by=session.watched_by,
        )

    def snapshots(self, message: m.GetSnapshots) -> m.Snapshots:
        """The slot tables of ranks; empty names, and rank -1, mean all."""
        keys = {
            segment.key
            for segment in self._store
            if message.job in ("", segment.key.job)
            and message.run in ("", segment.key.run)
            and message.rank in (-1, segment.key.rank)
        }
        return m.Snapshots(
            tuple(
                inventory.rank_snapshots(self._store.all_of_rank(key), operators=message.operators)
                for key in sorted(keys)
            ),
            tuple(self._peering.quarantine.reports(message.job, message.run)),
        )

    def events(self, message: m.GetEvents, sees: Callable[[str], bool]) -> m.Events:
        """A page of the event log, of the jobs that may be seen."""
        return self._events.page(message.since, message.limit, sees)

    def unquarantine(self, message: m.Unquarantine) -> m.Done | m.Refused:
        """Lift the quarantine of a run's snapshots, and verify their digests once more."""
        name = f"{message.job}/{message.run}"
        if not self._peering.quarantine.failures(message.job, message.run):
            return m.Refused(RefusalCode.NOT_FOUND, f"no failed replay of {name} is known here")
        if refused := self._in_use(message.job, message.run):
            return refused
        slots = self._peering.quarantine.lift(message.job, message.run)
        for segment, index, sequence in slots:
            self._housekeeper.doubts.add(segment, index, sequence)
        text = f"{name}: {len(slots)} snapshots of this node are no longer quarantined"
        self._events.add("warning", "unquarantined", text)
        return m.Done(text)

    def _in_use(self, job: str, run: str) -> m.Refused | None:
        """A refusal if the run has live trainers."""
        alive = [s for s in self._sessions if (s.key.job, s.key.run) == (job, run)]
        owned = [segment for segment in self._store.all_of_run(job, run) if segment.owned()]
        if not alive and not owned:
            return None
        pids = sorted({s.pid for s in alive} | set(openers(owned)))
        return m.Refused(
            RefusalCode.IN_USE,
            f"{job}/{run} has live trainers: process {', '.join(map(str, pids)) or 'unknown'}",
            "end them first",
        )

    def forget(self, message: m.Forget, sees: Callable[[str], bool]) -> m.Done | m.Refused:
        """Free a run that no trainer owns; a refusal names only jobs that may be seen."""
        segments = self._store.all_of_run(message.job, message.run)
        name = f"{message.job}/{message.run}"
        if refused := self._in_use(message.job, message.run):
            return refused
        bad = self._store.remove_bad(message.job, message.run)
        known = self._peering.knows(message.job, message.run)
        replicas = self._peering.forget(message.job, message.run)
        if not segments and not bad and not replicas and not known:
            told = (s.key for s in self._store.everything() if sees(s.key.job))
            runs = sorted({f"{key.job}/{key.run}" for key in told})
            held = f"in memory are {', '.join(runs)}" if runs else "nothing is in memory"
            return m.Refused(RefusalCode.NOT_FOUND, f"no segments of {name}; {held}")
        size = sum(segment.file_bytes for segment in segments) + replicas
        for segment in segments:
            self._housekeeper.remove(segment, "forgotten by request")
        freed = f"freed {format_bytes(size)} in {count_of(len(segments), 'segment')}"
        put_aside = f" and {count_of(bad, 'damaged file')}" if bad else ""
        who = ", and forgot the members of the run" if known else ""
        return m.Done(f"{freed}{put_aside}{who}")


def openers(segments: list[Segment]) -> list[int]:
    """Processes, other than the daemon's, that have these files open, as far as this user can see them."""
    return sorted({pid for segment in segments for pid in locks.other_holders_of(segment.path)})
