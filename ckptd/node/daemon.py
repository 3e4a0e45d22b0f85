"""The daemon's shell: folders, socket, process watch, signals, and one loop around `Service`.

One thread serves everything; workers only digest, touch and unlink. What arrives on the socket is
data: whatever is not a message of ours is counted and, where it can be, answered. Only the folder
locks decide who is the daemon, so a socket file left behind by a killed one is no obstacle.

Lifetime: claim the folders, adopt segments, bind, READY=1; serve; on SIGTERM or SIGINT close the
socket (clients see it at once), seal what is filled, exit. A SIGKILL at any point costs nothing:
the segment files are the state.
"""

from __future__ import annotations

import getpass
import logging
import os
import queue
import resource
import select
import signal
import time
from collections.abc import Callable, Container, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType

import zmq

from ckptd.config.config_values import parse_memory
from ckptd.config.daemon_config import notify_settings
from ckptd.config.runtime_dir import (
    UnusableFolder,
    claim,
    forget_operator,
    give_to_group,
    group_number,
    mark_operated,
    node_name,
    private_folder,
)
from ckptd.config.settings import DaemonConfig
from ckptd.event_log import EventLog
from ckptd.memory.housekeeping import Housekeeper, SlotListener
from ckptd.memory.pages import filesystem_kind, is_in_memory
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_store import SegmentStore
from ckptd.node.daemon_handover import take_over
from ckptd.node.peering import Peering
from ckptd.node.sdnotify import Notifier
from ckptd.node.service import Service
from ckptd.node_context import DigestThreads, NodeContext, NodeWorkers
from ckptd.persistence.tier import StorageTier
from ckptd.transport.access.doorkeeper import fd_of_frame
from ckptd.transport.access.local_door import ENOUGH_DESCRIPTORS, LocalDoor, local_limits
from ckptd.transport.access.local_trust import check_way, own_users
from ckptd.transport.access.refusals import RefusalLog
from ckptd.transport.control.messages import Message, RefusalCode, Refused, Reply
from ckptd.transport.control.wire import MAX_BODY_BYTES, WireError, decode, encode, peer_process
from ckptd.transport.verbs import FabricCounters
from ckptd.units import format_bytes
from ckptd.workers import Workers

__all__ = ["Daemon", "physical_memory", "quota_bytes"]

logger = logging.getLogger(__name__)

_TICK_S = 1.0
_SOONEST_S = 0.01  # a retry that is due again at once must not spin
_BATCH = 256  # messages served before looking at anything else
_QUEUE = 1024  # messages kept per client that does not read
_BACKLOG = 1024  # connections that wait to be accepted: beyond, a client has to try again
_JOBS = 65_536  # a bound on slots waiting for a worker: more than there can be slots in use
_GARBAGE_LOG_S = 10.0


def default_digest_threads(cpus: int) -> int:
    """Half of a small machine's processors, four; on a large one, which has several GPUs to keep up
    with, an eighth, up to 16.
    """
    return max(1, min(4, cpus // 2), min(16, cpus // 8))


def raise_descriptor_limit() -> None:
    """Use all the descriptors that the system lets this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            logger.warning("the limit of open files stays at %d: %s", soft, error)


class Daemon(SlotListener):
    """One daemon; `run` serves until it is stopped.

    Raises:
        AlreadyRunning: another daemon uses one of the folders.
        UnusableFolder: a folder is not ours, or not in memory.
    """

    def __init__(self, config: DaemonConfig) -> None:
        self._config = config
        raise_descriptor_limit()
        self._group = group = group_number(config.trainer_group)
        runtime = private_folder(config.runtime_dir, "runtime folder", group)
        self._runtime = runtime
        marked = not config.started_by_trainer and mark_operated(runtime)
        try:
            self._claims = [take_over(runtime, "runtime folder", config)]
            folder = private_folder(config.segment_dir, "segment folder", group)
            self._claims.append(take_over(folder, "segment folder", config))
        except BaseException:
            if marked:
                forget_operator(runtime)
            raise
        _check_filesystem(folder, config.allow_disk_segments)
        quota = quota_bytes(config.memory, folder)
        self._events = EventLog(config.max_events)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        digesters = config.digest_threads or default_digest_threads(os.cpu_count() or 1)
        pool = ThreadPoolExecutor(digesters, "digest") if digesters > 1 else None
        self._sealers = Workers("seal", min(2, digesters), _JOBS, self._wake)
        self._slow = Workers("slow", 2, _JOBS, self._wake)
        store = SegmentStore(
            folder,
            quota,
            config.node_id or node_name(runtime),
            mlock=config.mlock,
            hugepages=config.hugepages,
            group=group,
        )
        self._housekeeper = Housekeeper(
            config, store, self._events, self._sealers, self._slow, pool, self
        )
        self._poller = zmq.Poller()
        self._watcher = _PidfdWatcher(self._poller)
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        node = NodeContext(config, store, self._events, self._post)
        digests = DigestThreads(None if pool is None else pool.map, digesters)
        workers = NodeWorkers(self._sealers, self._slow, digests)
        self._peering = Peering(node, workers, doubt=self._housekeeper.doubt)
        self._tier = self._make_tier(node) if config.store else None
        self._service = Service(
            node,
            self._housekeeper,
            self._slow,
            self._watcher,
            self._peering,
            self._tier,
            stop=self.stop,
        )
        store.remake_folder = self._remake_folder
        address, watchdog_s = notify_settings()
        self._notifier = Notifier(address)
        self._beat_s = min(_TICK_S, watchdog_s / 2) if watchdog_s else _TICK_S
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._door: LocalDoor | None = None
        self._refusals = RefusalLog(FabricCounters(), self._turned_away)
        self._stop_reason = ""
        self._interrupted = False
        self._garbage_logged_s = float("-inf")
        logger.info("quota %s in %s, %d digest threads", format_bytes(quota), folder, digesters)

    def _make_tier(self, node: NodeContext) -> StorageTier:
        peering = self._peering
        tier = StorageTier(
            node,
            ranks_of=lambda job, run: self._service.trainers.ranks_of(job, run),
            span_of=peering.span_of,
            replicas=peering.replicas,
        )
        peering.use_store(tier.link)
        return tier

    # -- from the housekeeper --------------------------------------------------------------------

    def snapshot_sealed(self, segment: Segment) -> None:
        """It goes to peers and to storage."""
        self._peering.sealed(segment)
        if self._tier is not None:
            self._tier.changed(segment.key)

    def log_sealed(self, segment: Segment) -> None:
        """It goes to peers."""
        self._peering.log_sealed(segment)

    def slot_damaged(self, segment: Segment) -> None:
        """If it is a replica's, its sender must send it again."""
        self._peering.damaged(segment)

    def replicas(self) -> Iterable[Segment]:
        """Replicas are scrubbed, too."""
        return self._peering.replicas.everything()

    # -- its life --------------------------------------------------------------------------------

    def stop(self, why: str) -> None:
        """End the loop soon; safe in a signal handler."""
        self._stop_reason = self._stop_reason or why
        self._wake()

    def run(self) -> None:
        """Serve until a signal, or until nobody has been here for `idle_exit_s`."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._housekeeper.start(time.monotonic())
        self._peering.adopt()
        self._socket = self._bind()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._events.add("info", "started", f"process {os.getpid()} serves {self._config.listen}")
        self._check_descriptors()
        self._notifier.send("READY=1", f"STATUS=serving {self._config.listen}")
        try:
            self._serve()
        finally:
            self._close()

    def _check_descriptors(self) -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit != resource.RLIM_INFINITY and limit < ENOUGH_DESCRIPTORS:
            self._events.add(
                "warning",
                "few_descriptors",
                f"this daemon may open {limit} files; with fewer than {ENOUGH_DESCRIPTORS} somebody who opens connections faster "
                "than they are closed can end it. Raise the hard limit of open files (LimitNOFILE=, ulimit -n)",
            )

    def _remake_folder(self) -> None:
        """The segment folder was removed under us.

        Raises:
            AlreadyRunning: another daemon has made it anew, and uses it.
            UnusableFolder: it cannot be made.
        """
        folder = private_folder(self._config.segment_dir, "segment folder", self._group)
        self._claims.append(claim(folder, "segment folder", self._config.listen))
        self._events.add(
            "error",
            "segment_folder_removed",
            f"somebody removed the segment folder {folder}; it is made again. The usual cause is logind, which removes all of a user in "
            "/dev/shm when the last login ends: run the daemon as a system user, set RemoveIPC=no in /etc/systemd/logind.conf, or "
            f"`loginctl enable-linger {getpass.getuser()}`; `ckptctl doctor` looks for it",
        )

    def _serve(self) -> None:
        next_tick_s = 0.0
        while not self._stop_reason:
            now_s = time.monotonic()
            if now_s >= next_tick_s:
                next_tick_s = now_s + self._beat_s
                self._tick()
                self._notifier.send("WATCHDOG=1")
                if 0 < self._config.idle_exit_s < self._service.idle_s:
                    self.stop(f"idle for {self._config.idle_exit_s:g} s")
            until_s = min(next_tick_s, max(self._due(now_s), now_s + _SOONEST_S))
            self._wait(max(0.0, until_s - time.monotonic()))

    def _due(self, now_s: float) -> float:
        """What peers wait for until now; returns when to come back."""
        due: list[float] = []
        self._guarded(lambda: due.append(self._peering.wake(now_s)))
        return due[0] if due else float("inf")

    def _tick(self) -> None:
        try:
            self._service.tick()
            for name, count in self._refusals.shown().items():
                self._events.counters[f"local.{name}"] = count
        # The loop must survive trouble with one segment: the others are still served.
        except Exception as error:
            logger.exception("the periodic work failed")
            self._events.add("error", "internal", f"periodic work: {error!r}")

    def _wait(self, timeout_s: float) -> None:
        """Serve what comes within the timeout."""
        ready = dict(self._poller.poll(int(timeout_s * 1000) + 1))
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        self._run_posted()
        self._guarded(self._sealers.collect)
        self._guarded(self._slow.collect)
        self._watcher.run(ready, self._guarded)
        if self._socket in ready:
            self._receive()

    def _post(self, work: Callable[[], None]) -> None:
        """Have something done soon on this thread; safe from any other."""
        self._posted.put(work)
        self._wake()

    def _turned_away(self, text: str) -> None:
        """A line about local connections, from any thread."""
        self._post(lambda: self._events.add("warning", "turned_away", f"local: {text}"))

    def _run_posted(self) -> None:
        for _ in range(self._posted.qsize()):
            self._guarded(self._posted.get_nowait())

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        # The loop must survive trouble with one peer or slot: the others, and the trainers, are still served.
        except Exception as error:
            logger.exception("a callback failed")
            self._events.add("error", "internal", f"a callback failed: {error!r}")

    def _receive(self) -> None:
        assert self._socket is not None
        assert self._door is not None
        for _ in range(_BATCH):
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            process = peer_process(frames[0])
            identity, *message_frames = [frame.bytes for frame in frames]
            try:
                envelope, message = decode(message_frames)
            except WireError as error:
                self._garbage(identity, error)
                continue
            self._door.heard(fd_of_frame(frames[-1]), process)
            self._handle(identity, envelope.id, message, process)

    def _handle(self, identity: bytes, message_id: int, message: Message, process: int) -> None:
        answer = partial(self._answer, identity, message_id)
        try:
            self._service.handle(identity, message, answer, process)
        # The loop must survive a bug in one handler: snapshots of other ranks depend on it.
        except Exception as error:
            logger.exception("serving %s failed", type(message).__name__)
            self._events.add("error", "internal", f"{type(message).__name__}: {error!r}")
            answer(Refused(RefusalCode.INTERNAL, f"{error!r}", "see the daemon's log"))

    def _answer(self, identity: bytes, message_id: int, reply: Reply) -> None:
        if self._socket is None:
            return  # stopping: the client has seen the connection end
        try:
            frames = encode(message_id, reply)
        except WireError as error:
            hint = "ask for less, for example for one rank or without operator names"
            refused = Refused(RefusalCode.INTERNAL, f"the answer is too large: {error}", hint)
            frames = encode(message_id, refused)
        try:
            self._socket.send_multipart([identity, *frames], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            self._events.count("answers_dropped")
            logger.info("an answer could not be delivered: %s", error)

    def _garbage(self, identity: bytes, error: WireError) -> None:
        """Count it, log it now and then, and answer if there is somebody to answer."""
        self._events.count(f"garbage.{error.code}")
        now_s = time.monotonic()
        if now_s - self._garbage_logged_s > _GARBAGE_LOG_S:
            self._garbage_logged_s = now_s
            self._events.add("warning", "garbage", f"not a message of ours: {error}")
        if error.envelope is not None and -(1 << 63) <= error.envelope.id < 1 << 63:
            other_version = error.code == "protocol"
            code = RefusalCode.PROTOCOL if other_version else RefusalCode.BAD_MESSAGE
            hint = "run the same ckptd version on both sides" if other_version else ""
            self._answer(identity, error.envelope.id, Refused(code, str(error), hint))

    def _bind(self) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.SNDHWM, _QUEUE)
        socket.setsockopt(zmq.RCVHWM, _QUEUE)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_BODY_BYTES)
        socket.setsockopt(zmq.BACKLOG, _BACKLOG)
        path = Path(self._config.listen.removeprefix("ipc://"))
        limits = local_limits(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._door = LocalDoor(socket, limits, self._refusals, path=str(path))
        try:
            check_way(str(path.parent), own_users())
            before = os.umask(0o177)  # nobody else connects, not even before the mode is set
            try:
                socket.bind(self._config.listen)
            finally:
                os.umask(before)
            if self._group is not None:
                give_to_group(path, self._group, 0o660)
            self._door.start(0)
        except (OSError, zmq.ZMQError) as error:
            self._door.stop()
            socket.close(linger=0)
            raise UnusableFolder(f"cannot listen on {self._config.listen}: {error}") from error
        return socket

    def _close(self) -> None:
        """Stop listening, seal what is filled, give everything back; bounded."""
        assert self._socket is not None
        self._notifier.send("STOPPING=1")
        self._events.add("info", "stopping", self._stop_reason or "an error")
        self._poller.unregister(self._socket)
        assert self._door is not None
        self._door.stop()
        self._socket.close(linger=0)
        self._socket = None
        deadline = time.monotonic() + self._config.drain_timeout_s
        self._housekeeper.seal_all()
        while self._busy() and time.monotonic() < deadline:
            self._wait(0.1)
            if self._tier is not None:
                self._guarded(self._tier.tick)  # else what failed is not tried again
        if left := self._housekeeper.queued:
            logger.warning("%d slots are not sealed yet; the next start does it", left)
        if self._tier is not None:
            if not self._tier.idle:
                logger.warning("a checkpoint is not stored yet; after the next start it is")
            self._tier.close()
        self._peering.close()
        self._sealers.close(timeout_s=1.0)
        self._slow.close(timeout_s=1.0)
        self._context.term()
        _remove_socket(self._config.listen)
        if self._interrupted:
            forget_operator(self._runtime)
        logger.info("stopped: %s", self._stop_reason)

    def _busy(self) -> bool:
        """Whether something is under way that an orderly stop waits for."""
        return self._housekeeper.queued > 0 or not (self._tier is None or self._tier.idle)

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        # Who stops it at a terminal does not run it any more; SIGTERM comes before an upgrade, too.
        self._interrupted = number == signal.SIGINT
        self.stop(signal.Signals(number).name)


class _PidfdWatcher:
    """Learns of the end of any process of this user, child or not, through its pidfd."""

    def __init__(self, poller: zmq.Poller) -> None:
        self._poller = poller
        self._by_fd: dict[int, tuple[int, list[Callable[[], None]]]] = {}
        self._by_pid: dict[int, int] = {}

    def watch(self, pid: int, ended: Callable[[], None]) -> bool:
        """Call `ended` once when the process ends; false if it cannot be watched."""
        if pid not in self._by_pid:
            try:
                fd = os.pidfd_open(pid)
            except OSError as error:  # gone already, another namespace, or an old kernel
                logger.info("process %d cannot be watched: %s", pid, error)
                return False
            self._by_pid[pid] = fd
            self._by_fd[fd] = (pid, [])
            self._poller.register(fd, zmq.POLLIN)
        self._by_fd[self._by_pid[pid]][1].append(ended)
        return True

    def has_ended(self, pid: int) -> bool:
        """Has a watched process ended?"""
        fd = self._by_pid.get(pid)
        if fd is None:
            return False
        now = select.poll()  # not select(): the descriptor may be beyond its 1024
        now.register(fd, select.POLLIN)
        return bool(now.poll(0))

    def forget(self, pid: int) -> None:
        """No longer watch; nothing happens if it was not watched."""
        fd = self._by_pid.pop(pid, None)
        if fd is not None:
            del self._by_fd[fd]
            self._poller.unregister(fd)
            os.close(fd)

    def run(self, ready: Container[object], call: Callable[[Callable[[], None]], None]) -> None:
        """Have everybody called back who waits for a process that has ended."""
        for fd in [fd for fd in self._by_fd if fd in ready]:
            pid, callbacks = self._by_fd[fd]
            self.forget(pid)
            for ended in callbacks:
                call(ended)


def physical_memory() -> int:
    """Bytes this process may use: what is built in, or less if a memory cgroup says so."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue  # no such cgroup version here
        if text.isdigit():
            total = min(total, int(text))
    return total


def quota_bytes(memory: str, folder: Path) -> int:
    """The quota that a `memory` setting means for segments in this folder."""
    value = parse_memory(memory)
    if isinstance(value, int):
        return value
    info = os.statvfs(folder)
    return int(value * min(physical_memory(), info.f_blocks * info.f_frsize))


def _check_filesystem(folder: Path, allow_disk: bool) -> None:
    kind = filesystem_kind(folder)
    if is_in_memory(kind) or allow_disk:
        return
    raise UnusableFolder(
        f"the segment folder {folder} is on a filesystem of {kind}, not in memory; choose a "
        "folder under /dev/shm (CKPTD_SEGMENT_DIR), or set CKPTD_ALLOW_DISK_SEGMENTS=true"
    )


def _remove_socket(endpoint: str) -> None:
    path = endpoint.removeprefix("ipc://")
    if path.startswith("/"):
        Path(path).unlink(missing_ok=True)
