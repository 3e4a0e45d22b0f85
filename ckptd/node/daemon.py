"""The daemon's process: folders, socket, signals, and one loop around `Service`.

One thread serves everything; workers only digest, touch and unlink. Bytes on the socket that are no message
are counted and, where possible, answered. Only the folder locks decide which process is the daemon, so the
socket file of a killed daemon is no obstacle.

Lifetime: claim the folders, adopt segments, bind, READY=1; serve; on SIGTERM, SIGINT or SIGHUP close the
socket (clients see it at once), seal what is filled, exit. A SIGKILL at any point loses nothing: the segment
files are the state.
"""

from __future__ import annotations

import getpass
import logging
import os
import queue
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import zmq

from ckptd.config.daemon_config import (
    ConfigError,
    handed_files,
    notify_settings,
    traces_wanted,
    user_quotas,
)
from ckptd.config.runtime_dir import (
    AlreadyRunning,
    UnusableFolder,
    claim,
    forget_operator,
    group_number,
    is_claimed,
    keep_log_place,
    keep_node_name,
    mark_operated,
    node_name,
    private_folder,
)
from ckptd.config.settings import DaemonConfig
from ckptd.core.sessions import RankKey
from ckptd.core.slots.segment_format import RECORD_ENDS
from ckptd.errors import DaemonUnavailable
from ckptd.event_log import EventLog
from ckptd.launch import connect
from ckptd.memory.housekeeping import Housekeeper, SlotListener
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_store import FolderListener, SegmentStore
from ckptd.memory.slot_digests import SealOutcome
from ckptd.memory.user_files import close_files
from ckptd.node.node_limits import (
    check_descriptors,
    check_filesystem,
    check_quota,
    default_digest_threads,
    quota_bytes,
    raise_descriptor_limit,
)
from ckptd.node.peering import Peering
from ckptd.node.service import Service
from ckptd.node.trainer_socket import TrainerSocket
from ckptd.node.trainers import PidfdWatcher
from ckptd.node_context import DigestThreads, NodeContext, NodeWorkers
from ckptd.persistence.tier import StorageTier
from ckptd.transport.messages import Done, StepAside
from ckptd.transport.wire import RefusedError, RequestTimeout, WireError
from ckptd.units import format_bytes
from ckptd.workers import Workers

if TYPE_CHECKING:
    from ckptd.node.node_pages import NodePages
    from ckptd.node.recovery_traces import RecoveryTraces

logger = logging.getLogger(__name__)


_TICK_S = 1.0
_SOONEST_S = 0.01  # a retry that is due again at once must not spin
# In the runtime folder, until all segments of a removed folder are written again.
_REMOVED = "segments-removed"
_JOBS = 65_536  # a bound on slots waiting for a worker: more than there can be slots in use


class Daemon(SlotListener, FolderListener):
    """One daemon; `run` serves until it is stopped.

    Args:
        check: raises ConfigError if the settings of this moment are unusable; for SIGHUP, which ends the
            daemon if this is None.
    Attributes:
        restarts: it was stopped by SIGHUP, to begin again with the settings of this moment.
    Raises:
        AlreadyRunning: another daemon uses one of the folders.
        UnusableFolder: a folder belongs to another user, or is not in memory.
        ConfigError: metrics are to be served, or traces sent, and their library is not installed.
    """

    def __init__(self, config: DaemonConfig, check: Callable[[], object] | None = None) -> None:
        self._config, self._check = config, check
        self.restarts = self._reload_asked = False
        raise_descriptor_limit()
        self._group = group = group_number(config.trainer_group)
        users, unknown = user_quotas(config)
        runtime = private_folder(config.runtime_dir, "runtime folder", group)
        self._runtime = runtime
        marked = not config.started_by_trainer and mark_operated(runtime)
        try:
            self._claims = [take_over(runtime, "runtime folder", config)]
            self._removed = runtime / _REMOVED
            if not Path(config.segment_dir).exists():
                self._removed.touch(0o600)
            folder = private_folder(config.segment_dir, "segment folder", group)
            self._claims.append(take_over(folder, "segment folder", config))
        except BaseException:
            if marked:
                forget_operator(runtime)
            raise
        if not config.started_by_trainer:
            keep_log_place(runtime)
        check_filesystem(folder, config.allow_disk_segments)
        if users is not None:
            close_files(folder)
        quota = quota_bytes(config.memory, folder)
        check_quota(quota, folder)
        self._events = EventLog(config.max_events)
        for name in unknown:
            text = f"user_quotas: no user of this node has the name {name!r}; user_quota applies"
            self._events.add("warning", "unknown_user", text)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        digesters = config.digest_threads or default_digest_threads(os.cpu_count() or 1)
        pool = ThreadPoolExecutor(digesters, "digest") if digesters > 1 else None
        self._sealers = Workers("seal", min(2, digesters), _JOBS, self._wake)
        self._slow = Workers("slow", 2, _JOBS, self._wake)
        address, watchdog_s = notify_settings()
        self._notifier = Notifier(address)
        store = SegmentStore(
            folder,
            quota,
            config.node_id or node_name(runtime),
            mlock=config.mlock,
            hugepages=config.hugepages,
            group=group,
            users=users,
            listener=self,
        )
        self._store = store
        self._take_handed(store)
        self._housekeeper = Housekeeper(config, store, self._events, self._sealers, self._slow, pool, self)
        self._poller = zmq.Poller()
        self._watcher = PidfdWatcher(self._poller)
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        node = NodeContext(config, store, self._events, self._post)
        digests = DigestThreads(None if pool is None else pool.map, digesters)
        workers = NodeWorkers(self._sealers, self._slow, digests)
        self._peering = Peering(node, workers, doubt=self._housekeeper.doubts.add)
        self._tier = self._make_tier(node) if config.store else None
        self._traces = self._send_traces(node)
        self._service = Service(
            node,
            self._housekeeper,
            self._watcher,
            self._peering,
            self._tier,
            stop=self.stop,
            traces=None if self._traces is None else self._traces.tell,
        )
        self._beat_s = min(_TICK_S, watchdog_s / 2) if watchdog_s else _TICK_S
        self._trainers = TrainerSocket(node, group, self._service.handle)
        self._pages = self._serve_pages(node) if config.metrics or config.dash else None
        self._fresh: dict[RankKey, Segment] = {}
        self._runtime_trouble = ""
        self._stop_reason = ""
        self._interrupted = False
        logger.info("quota %s in %s, %d digest threads", format_bytes(quota), folder, digesters)

    def _take_handed(self, store: SegmentStore) -> None:
        """If the segment folder was removed, and no daemon has written all of it again, do so with what
        systemd kept. What finds no room stays with systemd, for the next start.
        """
        removed, self._some_wait = self._removed.exists(), False
        for name, fd in handed_files():
            try:
                if removed and store.put_back(name, fd):
                    text = f"somebody removed {name}; the service manager kept it, and it is written again"
                    if not name.endswith(RECORD_ENDS):
                        text += ". A trainer that has it open is unprotected until it is restarted"
                    self._events.add("error", "segment_rescued", text)
            except FileExistsError as error:
                self._events.add("error", "segment_vanished", f"{name} was removed, and is lost: {error}")
            except OSError as error:
                self._some_wait = True
                text = f"{name} was removed, and cannot be written again now: {error}. The service manager "
                text += f"keeps it: make room in {store.folder}, and restart the daemon"
                self._events.add("error", "segment_waits", text)
                continue
            finally:
                os.close(fd)
            self._notifier.keep(name, None)  # the adopted file is kept from then on
        self._all_written_again()

    def _all_written_again(self) -> None:
        if not self._some_wait:
            self._removed.unlink(missing_ok=True)

    def _make_tier(self, node: NodeContext) -> StorageTier:
        peering = self._peering
        tier = StorageTier(
            node,
            ranks_of=lambda job, run: self._service.trainers.ranks_of(job, run),
            span_of=peering.runs.span_of,
            replicas=peering.replicas,
        )
        peering.use_store(tier.link)
        return tier

    def _serve_pages(self, node: NodeContext) -> NodePages:
        # Only here, and it imports more only where it is needed: most daemons serve nothing.
        from ckptd.node.node_pages import NodePages

        try:
            pages = NodePages(node, self._group, self._service.view)
        except ModuleNotFoundError as error:
            text = f"metrics = {self._config.metrics!r} needs the package {error.name}"
            raise ConfigError(
                f"{text}: run `pip install 'ckptd[metrics]'`, or leave metrics empty"
            ) from error
        for name, text in pages.said.items():
            self._events.add("info", name, text)
        return pages

    def _send_traces(self, node: NodeContext) -> RecoveryTraces | None:
        endpoint = traces_wanted(self._config)
        if endpoint is None:
            return None
        try:
            # Only here: its libraries take memory that most daemons do not need.
            from ckptd.node.recovery_traces import RecoveryTraces

            return RecoveryTraces(node, endpoint)
        except ModuleNotFoundError as error:
            extra = "otel-grpc" if endpoint.startswith("grpc") else "otel"
            text = f"traces of recoveries need the package {error.name}: run `pip install 'ckptd[{extra}]'`"
            if not self._config.otel_endpoint:  # the variables may be there for other programs
                self._events.add("info", "no_traces", text)
                return None
            raise ConfigError(
                f"otel_endpoint = {self._config.otel_endpoint!r}: {text}, or leave otel_endpoint empty"
            ) from error

    # -- from the housekeeper --------------------------------------------------------------------

    def snapshot_sealed(self, segment: Segment) -> None:
        """Send it to peers and to storage, soon.

        Each look reads all slots of the rank, and after a pause many are sealed at once.
        """
        if not self._fresh:
            self._post(self._tell_sealed)
        self._fresh[segment.key] = segment

    def _tell_sealed(self) -> None:
        fresh, self._fresh = self._fresh, {}
        for key, segment in fresh.items():
            self._guarded(partial(self._peering.runs.sealed, segment))
            if self._tier is not None:
                self._guarded(partial(self._tier.changed, key))

    def digested(self, segment: Segment, outcome: SealOutcome) -> None:
        """Compare it with the snapshots of the ranks that should hold the same values."""
        self._peering.audit.digested(segment, outcome)

    def log_sealed(self, segment: Segment) -> None:
        """Send it to peers."""
        self._peering.runs.log_sealed(segment)

    def slot_damaged(self, segment: Segment) -> None:
        """The sender of a replica must send it again."""
        self._peering.damaged(segment)

    def replicas(self) -> Iterable[Segment]:
        return self._peering.replicas.everything()

    # -- from the segment store ------------------------------------------------------------------

    def keep_file(self, name: str, fd: int | None) -> None:
        """Put it into the service manager's store of descriptors."""
        self._notifier.keep(name, fd)

    def remake_folder(self) -> None:
        """Make and claim the segment folder again: somebody removed it.

        Raises:
            AlreadyRunning: another daemon has made the folder, and uses it.
            UnusableFolder: it cannot be made.
        """
        self._removed.touch(0o600)
        folder = private_folder(self._config.segment_dir, "segment folder", self._group)
        self._claims.append(claim(folder, "segment folder", self._config.listen))
        text = (
            f"somebody removed the segment folder {folder}; it is made again. The usual cause is logind, "
            "which removes a user's files in /dev/shm when the last login ends: run the daemon as a system "
            "user, set RemoveIPC=no in /etc/systemd/logind.conf, or run "
            f"`loginctl enable-linger {getpass.getuser()}`; `ckptctl doctor` checks it"
        )
        self._events.add("error", "segment_folder_removed", text)
        self._peering.write_again()
        self._service.trainers.write_again()

    # -- its life --------------------------------------------------------------------------------

    def stop(self, why: str) -> None:
        """End the loop soon; safe in a signal handler."""
        self._stop_reason = self._stop_reason or why
        self._wake()

    def run(self) -> None:
        """Serve until a signal, or until no trainer has been here for ``idle_exit_s``."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        self._housekeeper.start(time.monotonic())
        self._peering.adopt()
        self._poller.register(self._trainers.open(), zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._events.add("info", "started", f"process {os.getpid()} serves {self._config.listen}")
        check_descriptors(self._events)
        self._notifier.send("READY=1", f"STATUS=serving {self._config.listen}")
        try:
            self._serve()
        finally:
            self._close()

    def _serve(self) -> None:
        next_tick_s = 0.0
        while not self._stop_reason:
            now_s = time.monotonic()
            if self._reload_asked:
                self._reload()
            if now_s >= next_tick_s:
                next_tick_s = now_s + self._beat_s
                self._tick()
                self._notifier.send("WATCHDOG=1")
                if 0 < self._config.idle_exit_s < self._service.idle_s:
                    self.stop(f"idle for {self._config.idle_exit_s:g} s")
            until_s = min(next_tick_s, max(self._due(now_s), now_s + _SOONEST_S))
            self._wait(max(0.0, until_s - time.monotonic()))

    def _reload(self) -> None:
        """Stop, to begin again with other settings; go on with these if the others are unusable."""
        self._reload_asked = False
        assert self._check is not None
        try:
            self._check()
        except ConfigError as error:
            logger.error("SIGHUP: the settings stay as they are: %s", error)
            self._events.add("error", "not_reloaded", f"the settings stay as they are: {error}")
            return
        self.restarts = True
        self.stop("SIGHUP")

    def _due(self, now_s: float) -> float:
        """Retry what is due for peers; returns when to come back."""
        due: list[float] = []
        self._guarded(lambda: due.append(self._peering.runs.wake(now_s)))
        return due[0] if due else float("inf")

    def _tick(self) -> None:
        try:
            self._service.tick()
            self._look_at_runtime()
            self._all_written_again()
            for name, count in self._trainers.refused.items():
                self._events.counters[f"local.{name}"] = count
        # The loop must survive trouble with one segment: the others are still served.
        except Exception as error:
            logger.exception("the periodic work failed")
            self._events.add("error", "internal", f"periodic work: {error!r}")

    def _look_at_runtime(self) -> None:
        """Make the runtime folder and its socket again if somebody has removed them.

        logind removes a user's runtime folder at the end of the last login, and others clean /tmp.
        """
        if self._trainers.in_place():
            return
        what = f"somebody removed {self._config.listen}"
        try:
            self._remake_runtime()
        except (AlreadyRunning, UnusableFolder, OSError) as error:
            if str(error) != self._runtime_trouble:
                self._runtime_trouble = str(error)
                text = f"{what}, so that nobody can connect, and it cannot be made again now: {error}"
                self._events.add("error", "runtime_folder_removed", text)
            return
        self._runtime_trouble = ""
        text = (
            f"{what}; it is made again. The usual causes are logind, which removes the folder of "
            "XDG_RUNTIME_DIR when a user's last login ends, and programs that clean /tmp: set "
            "CKPTD_RUNTIME_DIR, or run the daemon as a system user. Keys in this folder (keys_dir) are lost"
        )
        self._events.add("error", "runtime_folder_removed", text)

    def _remake_runtime(self) -> None:
        runtime = private_folder(self._config.runtime_dir, "runtime folder", self._group)
        if not is_claimed(runtime, self._claims[0]):
            fresh = claim(runtime, "runtime folder", self._config.listen)
            os.close(self._claims[0])
            self._claims[0] = fresh
        if not self._config.node_id:
            keep_node_name(runtime, self._store.node_id)
        if not self._config.started_by_trainer:
            mark_operated(runtime)
        self._trainers.listen_again()

    def _wait(self, timeout_s: float) -> None:
        """Serve events that come within the timeout."""
        ready = dict(self._poller.poll(int(timeout_s * 1000) + 1))
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        self._run_posted()
        self._guarded(self._sealers.collect)
        self._guarded(self._slow.collect)
        self._watcher.run(ready, self._guarded)
        if self._trainers.socket in ready:
            self._trainers.receive()

    def _post(self, work: Callable[[], None]) -> None:
        """Call a function soon on this thread; safe from any thread."""
        self._posted.put(work)
        self._wake()

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

    def _close(self) -> None:
        """Stop listening, seal what is filled, release everything; bounded in time."""
        monotonic_us = time.monotonic_ns() // 1000
        self._notifier.send(
            *(["RELOADING=1", f"MONOTONIC_USEC={monotonic_us}"] if self.restarts else ["STOPPING=1"])
        )
        self._events.add("info", "stopping", self._stop_reason or "an error")
        self._poller.unregister(self._trainers.socket)
        self._trainers.close()
        if self._pages is not None:
            self._pages.close()
        if self._traces is not None:
            self._traces.end()
        deadline = time.monotonic() + self._config.drain_timeout_s
        self._housekeeper.seal_all()
        while self._busy() and time.monotonic() < deadline:
            self._wait(0.1)
            if self._tier is not None:
                self._guarded(self._tier.tick)  # retries what failed
        if left := self._housekeeper.queued:
            logger.warning("%d slots are not sealed yet; the next start does it", left)
        if self._tier is not None:
            if not self._tier.idle:
                logger.warning("a checkpoint is not stored yet; after the next start it is")
            self._tier.close()
        self._peering.close()
        self._sealers.close(timeout_s=1.0)
        self._slow.close(timeout_s=1.0)
        self._trainers.end()
        if self._traces is not None:
            self._traces.close()
        if self._interrupted:
            forget_operator(self._runtime)
        logger.info("stopped: %s", self._stop_reason)

    def _busy(self) -> bool:
        """Whether an orderly stop has to wait for seals or uploads."""
        return self._housekeeper.queued > 0 or not (self._tier is None or self._tier.idle)

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP and self._check is not None:
            self._reload_asked = True
            self._wake()
            return
        # An operator who presses Ctrl-C does not run it any more; SIGTERM may precede an upgrade.
        self._interrupted = number == signal.SIGINT
        self.restarts = False
        self.stop(signal.Signals(number).name)


_ASK_S = 2.0
_LOOK_S = 0.1
_BEYOND_DRAIN_S = 5.0


def take_over(folder: Path, what: str, config: DaemonConfig) -> int:
    """Lock a folder; a daemon that a trainer started is asked to end, and waited for.

    It leaves its memory. One that ends anyway is waited for, too.

    Raises:
        AlreadyRunning: another daemon uses the folder, and goes on.
    """
    deadline = time.monotonic() + config.drain_timeout_s + _BEYOND_DRAIN_S
    warned = False
    while True:
        try:
            return claim(folder, what, config.listen)
        except AlreadyRunning as error:
            if config.started_by_trainer or not _goes(error) or time.monotonic() > deadline:
                raise
            if not warned:
                warned = True
                logger.warning("waiting for the end of the daemon that uses the %s %s", what, folder)
        time.sleep(_LOOK_S)


def _goes(holder: AlreadyRunning) -> bool:
    """Ask the lock's holder to end; false if it refuses. A silent one is starting or ending."""
    if not holder.endpoint:
        return False  # it has just started, or its version does not write the endpoint
    try:
        with connect(holder.endpoint, _ASK_S) as client:
            client.ask(StepAside(), Done)
    except RequestTimeout:
        return True
    except (RefusedError, WireError, DaemonUnavailable) as error:
        logger.info("the daemon on %s does not make way: %s", holder.endpoint, error)
        return False
    return True


class Notifier:
    """Sends lines such as READY=1 to systemd's notification socket; without a socket it does nothing."""

    def __init__(self, address: str | None) -> None:
        self._address: str | None = None
        if address:
            # A leading @ stands for the zero byte of Linux' abstract namespace.
            self._address = "\0" + address[1:] if address.startswith("@") else address

    def keep(self, name: str, fd: int | None) -> None:
        """Have a file kept for the next start (systemd's FileDescriptorStoreMax=); None: not any more."""
        if self._address is None:
            return
        self.send("FDSTOREREMOVE=1", f"FDNAME={name}")  # also before it comes: a reload sends it again
        if fd is None:
            return
        try:
            # A description of its own: the locks of this daemon must end with it.
            own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            logger.warning("%s is not kept by the service manager: %s", name, error)
            return
        self.send("FDSTORE=1", f"FDNAME={name}", fd=own)
        os.close(own)

    def send(self, *lines: str, fd: int | None = None) -> None:
        """Send lines, and a descriptor, in one datagram; a manager that does not listen is only logged."""
        if self._address is None:
            return
        told = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fd.to_bytes(4, sys.byteorder))]
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.setblocking(False)
                sock.sendmsg(["\n".join(lines).encode()], told, 0, self._address)
        except OSError as error:
            logger.warning("service manager not notified of %s: %s", lines[0], error)
