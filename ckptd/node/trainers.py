"""The trainers of this node: connections, admission as ranks, owner tokens, and ends of processes.

On the daemon's loop thread. The rules of admission are in `ckptd.core.sessions`.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import select
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

import ckptd
from ckptd.config.settings import given_settings
from ckptd.core.sessions import (
    Admitted,
    AttachWish,
    FailureTimes,
    ParkRequests,
    RankKey,
    Rejected,
    SessionTable,
    TrainerSession,
    decide_attach,
)
from ckptd.core.slots.segment_format import SlotHeader
from ckptd.core.slots.slots import SlotState
from ckptd.event_log import EventLog
from ckptd.memory.housekeeping import Housekeeper
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_store import SegmentStore
from ckptd.node.admin import openers
from ckptd.node.peering import Peering
from ckptd.node.reservations import segment_info
from ckptd.node_context import NodeContext
from ckptd.private_files import replace_private_file
from ckptd.transport import messages as m
from ckptd.transport.messages import RefusalCode
from ckptd.unpacking import unpack

logger = logging.getLogger(__name__)


class PidWatcher(Protocol):
    """Reports the ends of processes."""

    def watch(self, pid: int, ended: Callable[[], None]) -> bool:
        """Call ``ended`` once when the process ends; false if it cannot be watched.

        Raises:
            ProcessLookupError: it has ended already.
        """

    def has_ended(self, pid: int) -> bool:
        """Whether a watched process has ended, even if ``ended`` was not called yet."""

    def forget(self, pid: int) -> None:
        """Stop watching; nothing happens if the process was not watched."""


class PidfdWatcher:
    """Watches processes, children or not, of any user, through their pidfds."""

    def __init__(self, poller: zmq.Poller) -> None:
        self._poller = poller
        self._by_fd: dict[int, tuple[int, list[Callable[[], None]]]] = {}
        self._by_pid: dict[int, int] = {}

    def watch(self, pid: int, ended: Callable[[], None]) -> bool:
        if pid not in self._by_pid:
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                raise
            except OSError as error:  # an old kernel, or no descriptor is left
                logger.info("process %d cannot be watched: %s", pid, error)
                return False
            self._by_pid[pid] = fd
            self._by_fd[fd] = (pid, [])
            self._poller.register(fd, zmq.POLLIN)
        self._by_fd[self._by_pid[pid]][1].append(ended)
        return True

    def has_ended(self, pid: int) -> bool:
        fd = self._by_pid.get(pid)
        if fd is None:
            return False
        now = select.poll()  # not select(): the descriptor may be beyond its 1024
        now.register(fd, select.POLLIN)
        return bool(now.poll(0))

    def forget(self, pid: int) -> None:
        fd = self._by_pid.pop(pid, None)
        if fd is not None:
            del self._by_fd[fd]
            self._poller.unregister(fd)
            os.close(fd)

    def run(self, ready: Container[object], call: Callable[[Callable[[], None]], None]) -> None:
        """Call the callbacks of processes that have ended."""
        for fd in [fd for fd in self._by_fd if fd in ready]:
            pid, callbacks = self._by_fd[fd]
            self.forget(pid)
            for ended in callbacks:
                call(ended)


_MAX_STRANGERS = 4096  # connections that said Hello; the least recent one is forgotten first
_SILENT_S = 120.0  # a trainer that cannot be watched and owns nothing is gone after so long


class Trainers:
    """Sessions of attached trainers.

    Attributes:
        parks: requests to park, and their outcomes.
        park_events: events about parked state.
        failures: when trainers of each run ended, told to those that attach next.
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
        self.failures = FailureTimes()

    def tick(self, now_s: float) -> None:
        """End the sessions of trainers that are gone and could not be watched."""
        for session in self.sessions:
            if session.watched_by != "pidfd" and self._is_gone(session, now_s):
                self.gone(session, "its owner lock is free")
        self.parks.tick(now_s)
        self.park_events.tick()

    def ranks_of(self, job: str, run: str) -> list[int]:
        return [s.key.rank for s in self.sessions if (s.key.job, s.key.run) == (job, run)]

    def hello(self, identity: bytes, message: m.Hello, process: int) -> m.Reply:
        """Remember who a connection is; the answer describes this daemon."""
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

    def write_again(self) -> None:
        """Write down who owns which rank again: somebody has removed the folder of segments."""
        self._owners.write_again()

    def attach(self, identity: bytes, message: m.Attach, user: int | None = None) -> m.Reply:
        """Admit a trainer of this user as its rank, or refuse it with a reason."""
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
                f"{len(waiting)} files of {message.job}/{message.run} cannot be opened now, such as "
                f"{waiting[0]}: their content is not known yet",
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
        return self._admit(identity, hello, process, wish, decision, owner, user)

    def _admit(
        self,
        identity: bytes,
        hello: m.Hello,
        process: int,
        wish: AttachWish,
        decision: Admitted,
        before: TrainerSession | None,
        user: int | None,
    ) -> m.Reply:
        now_s = self._clock()
        # The process's own statement counts only if the kernel does not name the process.
        pid = process if process > 0 else hello.pid
        visible = process > 0 or (process < 0 and _same_pid_namespace(hello))
        session = TrainerSession(
            identity, pid, wish.key, wish, now_s, now_s, "owner-lock", writer_pid=hello.pid, user=user
        )
        try:
            if visible and self._watcher.watch(pid, partial(self._process_ended, session)):
                session.watched_by = "pidfd"
        except ProcessLookupError:  # nothing would tell its end, and it would keep the rank
            text = f"process {pid} has ended before its request to be {wish.key} was read"
            self._events.add("warning", f"refused.{RefusalCode.NO_SESSION}", text, wish.key)
            return m.Refused(RefusalCode.NO_SESSION, text, "")
        self.park_events.begun(session, before)
        # What this connection was before, and this process on another one.
        for other in (self.sessions.of_identity(identity), before):
            if other is not None:
                self.sessions.remove(other)
        self.sessions.add(session)
        live = {s.key for s in self.sessions}
        live |= {s.key for s in self._store.everything() if s.owned()}
        if unwritten := self._owners.enter(wish.key, wish.token, live):
            text = f"if this daemon is restarted {wish.key} cannot come back to it: {unwritten}"
            self._events.add("error", "owner_unwritten", text, wish.key)
        for note in decision.notes:
            self._events.add("info", "stale_run", note, wish.key)
        text = (
            f"process {pid} is {wish.key} of {wish.world_size}, with {len(decision.generations)} segments in "
            f"memory (watched by {session.watched_by})"
        )
        self._events.add("info", "attached", text, wish.key)
        got = [self._store.get(wish.key, generation) for generation in decision.generations]
        found = [segment for segment in got if segment is not None]
        auxiliary = [segment for segment in found if not segment.holds_snapshots]
        failure_ago_s, others_ended_ago_s = self.failures.ago_s(wish.key.job, wish.key.run, now_s)
        return m.Attached(
            segments=tuple(segment_info(segment) for segment in found if segment.holds_snapshots),
            quota_bytes=self._store.quota_bytes,
            # For snapshots: not the memory that this rank's own logs and parked states have.
            available_bytes=max(0, decision.available_bytes - sum(s.file_bytes for s in auxiliary)),
            replication_slack=self._peering.slack,
            persists=self._persists,
            logs=tuple(segment_info(s) for s in auxiliary if s.is_log),
            parked=tuple(segment_info(s) for s in auxiliary if s.descriptor.kind == "parked"),
            kv=tuple(segment_info(s) for s in auxiliary if s.descriptor.kind == "kv"),
            notes=decision.notes,
            failure_ago_s=failure_ago_s,
            others_ended_ago_s=others_ended_ago_s,
        )

    def left(self, session: TrainerSession) -> None:
        """A trainer detached in order."""
        self.failures.ended(session, self._clock(), in_order=True)
        self._retire(session)
        self.park_events.ended(session)

    def gone(self, session: TrainerSession, why: str) -> None:
        """A trainer ended without detaching: free what it was filling, seal what it had filled."""
        self.failures.ended(session, self._clock(), in_order=False)
        self._retire(session)
        text = f"process {session.pid} of {session.key} is gone ({why}) at step {session.step}"
        self._events.add("warning", "trainer_gone", text, session.key)
        self._peering.leave(session.key, final=False)
        for segment in self._store.all_of_rank(session.key):
            segment.end_quiet()
            self._housekeeper.settle(segment)
        self.park_events.ended(session)

    def _current_owner(self, wish: AttachWish) -> TrainerSession | None:
        """The live session of a rank; a session whose process has just ended is retired first."""
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

    def _retire(self, session: TrainerSession) -> None:
        self.sessions.remove(session)
        self._owners.remove(session.key)
        self.parks.gone(session.key)
        if not any(other.pid == session.pid for other in self.sessions):
            self._watcher.forget(session.pid)

    def _process_ended(self, session: TrainerSession) -> None:
        if self.sessions.of_identity(session.identity) is session:
            self.gone(session, "its process ended")

    def _is_gone(self, session: TrainerSession, now_s: float) -> bool:
        """For trainers that cannot be watched: the owner lock was held, and is free now."""
        if any(segment.owned() for segment in self._store.all_of_rank(session.key)):
            session.owner_seen = True
            return False
        return session.owner_seen or now_s - session.last_seen_s > _SILENT_S

    def _openers(self, key: RankKey) -> list[int]:
        """Other processes that have an owned segment of this rank open, for a refusal's message."""
        return openers([segment for segment in self._store.all_of_rank(key) if segment.owned()])


def _same_pid_namespace(hello: m.Hello) -> bool:
    return hello.pid_namespace in ("", pid_namespace())


def pid_namespace() -> str:
    """The kernel's name of this process's pid namespace; "" if it cannot be read."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


_Row = tuple[str, str, int, bytes]
_decoder = msgspec.msgpack.Decoder(list[_Row])
_LIMIT_BYTES = 64 << 20  # more than max_sessions can be


class OwnerTokens:
    """Proves which process owns which rank, by a token that only this process and its daemon know.

    A trainer makes a random token at its start, and shows it at each attach. A process that shows the token
    of a live rank is that rank's process on a new connection; any other is another process, whatever
    process id it claims and whatever locks it claims to hold.

    The tokens' SHA-256 digests are kept in ``.owners`` in the segment folder (mode 0600), so that a
    restarted daemon knows the owners of the segments that it adopts: msgpack of an array of ``[job, run,
    rank, sha256]``, replaced as a whole.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / ".owners"
        self._known = self._read()

    def prove(self, key: RankKey, token: bytes) -> bool:
        """Whether this is the token of the rank's owner."""
        known = self._known.get(key)
        return known is not None and token != b"" and hmac.compare_digest(known, _digest(token))

    def enter(self, key: RankKey, token: bytes, live: Container[RankKey]) -> str:
        """A process with this token is attached as a rank; returns an error if it was not written.

        Args:
            live: ranks that have an owner; digests of other ranks are dropped.
        """
        digest = _digest(token)
        if self._known.get(key) == digest:
            return ""
        self._known = {known: kept for known, kept in self._known.items() if known in live}
        self._known[key] = digest
        return self._write()

    def write_again(self) -> None:
        """Write the file again: somebody has removed its folder. Raises nothing."""
        if self._known:
            self._write()

    def remove(self, key: RankKey) -> None:
        if self._known.pop(key, None) is not None:
            self._write()

    def _read(self) -> dict[RankKey, bytes]:
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            with open(fd, "rb") as file:
                rows = unpack(_decoder, file.read(_LIMIT_BYTES), max_bytes=_LIMIT_BYTES)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            logger.warning("the owners of adopted segments are not known: %s", error)
            return {}
        return {RankKey(job, run, rank): digest for job, run, rank, digest in rows}

    def _write(self) -> str:
        rows = [(key.job, key.run, key.rank, digest) for key, digest in self._known.items()]
        try:
            # A power cut takes the segments, too.
            replace_private_file(self._path, msgspec.msgpack.encode(rows), synced=False)
        except OSError as error:
            logger.warning("the owners of ranks were not written to %s: %s", self._path, error)
            return str(error)
        return ""


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


_THERE = (SlotState.FILLED, SlotState.SEALED)


@dataclass(frozen=True, slots=True)
class _Left:
    session: TrainerSession
    segment: Segment
    index: int
    sequence: int


class ParkEvents:
    """Adds the event `parked` for a trainer that ended before it could send its notice.

    A trainer seals what it parks by itself, in a hurry: its process may be gone before its notice is read.
    So when a session ends, each state that its process parked without a notice gets an event, once; a state
    that is only filled gets it when it is sealed.
    """

    def __init__(self, store: SegmentStore, events: EventLog) -> None:
        self._store, self._events = store, events
        self._left: list[_Left] = []

    def begun(self, session: TrainerSession, before: TrainerSession | None) -> None:
        """A session begins; ``before``: the session of the same process on another connection.

        Parked states that exist already are of an earlier process, which may have had the same process id,
        unless this process says that it goes on.
        """
        if before is not None:
            session.parked_told = before.parked_told
        elif not session.wish.held:
            self.heard(session)

    def heard(self, session: TrainerSession) -> None:
        """The trainer sent its notice, after sealing what it parked."""
        found = [header.sequence for _, _, header in self._parked_by(session)]
        session.parked_told = max(found, default=session.parked_told)

    def ended(self, session: TrainerSession) -> None:
        """The trainer is gone or has left: report what it parked since its last notice."""
        self._left += [
            _Left(session, segment, index, header.sequence)
            for segment, index, header in self._parked_by(session)
            if header.sequence > session.parked_told
        ]
        self.tick()

    def tick(self) -> None:
        self._left = [left for left in self._left if self._waits(left)]

    def _waits(self, left: _Left) -> bool:
        if left.segment not in self._store.all_of_rank(left.session.key):
            return False
        header = left.segment.header(left.index)
        if header is None or header.sequence != left.sequence or header.state not in _THERE:
            return False
        if header.state is SlotState.FILLED:
            return True
        pid = left.session.pid
        text = f"parked at iteration {header.iteration}: process {pid} ended before it could report it"
        self._events.add("info", "parked", text, left.session.key)
        return False

    def _parked_by(self, session: TrainerSession) -> Iterator[tuple[Segment, int, SlotHeader]]:
        """States that this process has parked and not overwritten since."""
        for segment in self._store.all_of_rank(session.key):
            if segment.descriptor.kind == "parked":
                for index, header in segment.headers():
                    if header.state in _THERE and header.writer_pid == session.writer_pid:
                        yield segment, index, header
