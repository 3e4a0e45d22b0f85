"""The store keeper: the daemon's child process for object storage.

It is started as ``python -m ckptd.persistence.keeper <fd>``, receives requests over that inherited socket,
and exits when the other end closes. The next keeper resumes all work, because everything that counts is in
the store. The keeper makes no decisions about persistence; the daemon does
(`ckptd.core.persister`).
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from ckptd.persistence import keeper_wire as w
from ckptd.persistence.rank_store import Overtaken, RankStore, SlotFiles, SlotLost, UnknownSnapshot
from ckptd.persistence.run_in_store import RunInStore
from ckptd.persistence.run_store import FencedOff, RunStore, StoredWorlds
from ckptd.printable import TextFormatter
from ckptd.storage.checkpoints.reader import SignedStore, SnapshotDamaged
from ckptd.storage.checkpoints.retention import RetentionPolicy
from ckptd.storage.checkpoints.sealed_json import ManifestError
from ckptd.storage.checkpoints.signing import ManifestSigner, Signers
from ckptd.storage.stores.objects import Damaged, ObjectMissing, StoreError
from ckptd.storage.stores.open_store import open_store
from ckptd.storage.stores.resilience import Circuit, NoticeKind, Resilient, RetryPolicy, StoreNotice

logger = logging.getLogger(__name__)

_READERS = 4
# Pauses between a manifest of this node and the looks for the manifests of the other ranks.
_LOOKS_S = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
# The times within which writers and collectors act, and on which the others rely (docs/format.md §7, §8).
_GRACE_S = 24 * 3600.0
_SETTLE_S = 600.0
_STALE_UPLOAD_S = 24 * 3600.0

_Key = tuple[str, str, int, int]  # job, run, end, epoch


class _UploadPacer:
    """Limits uploads to ``bytes_per_s`` on average (0: no limit). Thread-safe."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def wait(self) -> None:
        """Sleep until earlier uploads are within the limit."""
        if self._rate > 0:
            with self._lock:
                left_s = self._free_at_s - time.monotonic()
            if left_s > 0:
                time.sleep(left_s)

    def spend(self, size_bytes: int) -> None:
        if self._rate > 0:
            with self._lock:
                self._free_at_s = max(self._free_at_s, time.monotonic()) + size_bytes / self._rate


@dataclass(slots=True)
class _Waiting:
    """The ranks of this node that wrote their manifests of a checkpoint, until all manifests exist."""

    names: list[w.RankName] = field(default_factory=list)
    looks: int = 0
    turn: int = 0  # number of the scheduled look; earlier ones are cancelled


class Keeper:
    """Serves one daemon.

    Args:
        send: sends a message to the daemon; called by several threads; must not raise.
        settle_s: how long a checkpoint must have been committed before it replaces others.
        wall_ns: this node's clock, which may be wrong.
    Raises:
        StoreError, ValueError: the store cannot be opened, or a key for signatures is unusable.
    """

    def __init__(
        self,
        configure: w.Configure,
        send: Callable[[Struct], None],
        *,
        settle_s: float = _SETTLE_S,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        # First what may fail, as long as there are no threads to end.
        self._signer = ManifestSigner.load(Path(configure.sign_with)) if configure.sign_with else None
        opened = open_store(configure.url, configure.options, configure.backend)
        if configure.signers:
            opened = SignedStore(opened, Signers.load(Path(configure.signers)))
        self._configure, self.send, self._wall_ns = configure, send, wall_ns
        self._pool = ThreadPoolExecutor(configure.threads, thread_name_prefix="store")
        self._reads = ThreadPoolExecutor(_READERS, thread_name_prefix="read")
        self._helpers = ThreadPoolExecutor(configure.threads, thread_name_prefix="help")
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="aside")
        self._files = SlotFiles()
        self._pacer = _UploadPacer(configure.bytes_per_s)
        self._lock = threading.Lock()
        self._runs: dict[tuple[str, str], RunStore] = {}
        self._swept: set[tuple[str, str]] = set()
        self._waiting: dict[_Key, _Waiting] = {}  # used by the thread of `_aside` alone
        policy = RetryPolicy(attempts=1000, deadline_s=configure.deadline_s)
        self._store = Resilient(opened, policy, Circuit(), url=configure.url, notify=self._circuit_reported)
        retain = configure.retain
        self._policy = RetentionPolicy(
            keep_last=retain.last,
            keep_every=retain.every,
            keep_younger_than_ns=int(retain.for_s * 1e9),
            grace_ns=int(_GRACE_S * 1e9),
            settle_ns=int(settle_s * 1e9),
        )
        self._worlds = StoredWorlds(self._store, self._run, self._policy)

    def handle(self, message: Any) -> None:
        """Start the requested work; another thread sends the answer."""
        match message:
            case w.OpenRank():
                self._submit(self._reads, self._open, message)
            case w.StoreSlot():
                self._submit(self._pool, self._put, message)
            case w.CommitRank():
                self._submit(self._reads, self._commit, message)
            case w.FindStored():
                self._submit(self._reads, self._find, message)
            case w.FindWorlds():
                self._submit(self._reads, self._worlds.find, message)
            case w.OfferStored():
                self._submit(self._reads, self._offer, message)
            case w.ReadRange():
                self._submit(self._reads, self._read, message)
            case w.DoubtStored():
                self._reads.submit(lambda: self._run_of(message.segment).doubt(message.segment))
            case _:
                logger.error("%s is not for a store keeper", type(message).__name__)

    # -- requests --------------------------------------------------------------------------------

    def _open(self, message: w.OpenRank) -> Struct:
        name = message.rank
        run = self._run(name.job, name.run)
        committed = run.open(message)
        if (name.job, name.run) not in self._swept:
            self._swept.add((name.job, name.run))
            self._aside.submit(self._guarded, partial(self._sweep, run))
        return w.RunOpened(message.id, committed)

    def _put(self, message: w.StoreSlot) -> Struct:
        run, rank = self._opened(message.rank)
        newer = self._files.newer(message.newer)
        hold = self._files.hold(message.path, message.index, message.snapshot)
        with run.turn(message.snapshot.iteration), hold as slot:
            self._pacer.wait()
            plan = rank.plan(
                message.checkpoint, lambda: self._files.of_checkpoint(message.newest, message.another)
            )
            done = rank.put(message.snapshot, slot, newer, plan)
            self._pacer.spend(done.uploaded_bytes)
        self._files.forget_removed()
        return w.StoredSlot(message.id, done.size_bytes, done.uploaded_bytes, done.for_later)

    def _commit(self, message: w.CommitRank) -> Struct:
        name = message.rank
        run, rank = self._opened(name)
        if name.rank == 0:
            self._worlds.mark(name.job, name.run, message.descriptor)
        epoch = rank.commit(message).checkpoint.epoch
        self._aside.submit(self._guarded, partial(self._settle, run, name, message.end, epoch))
        return w.Answer(message.id)

    def _find(self, message: w.FindStored) -> Struct:
        run = self._run(message.job, message.run)
        found, epoch = run.find(message.ranks, begun=message.begun, left_out=frozenset(message.left_out))
        return w.Found(message.id, found, epoch)

    def _offer(self, message: w.OfferStored) -> Struct:
        run = self._run(message.job, message.run)
        return w.Found(message.id, run.offer(message.end, message.ranks))

    def _read(self, message: w.ReadRange) -> Struct:
        into = self._files.writable(message.path, message.file_offset, message.length)
        self._run_of(message.segment).read(message.segment, message.index, message.offset, into)
        return w.Answer(message.id)

    def _opened(self, name: w.RankName) -> tuple[RunStore, RankStore]:
        run = self._run(name.job, name.run)
        rank = run.rank(name.rank)
        if rank is None:
            raise UnknownSnapshot(f"rank {name.rank} of {name.job}/{name.run} was not opened")
        return run, rank

    def _run(self, job: str, run: str) -> RunStore:
        with self._lock:
            found = self._runs.get((job, run))
            if found is None:
                at = RunInStore(
                    self._store,
                    job,
                    run,
                    map_fn=self._helpers.map,
                    report=self._report,
                    read_back=self._configure.read_back,
                    signer=self._signer,
                    wall_ns=self._wall_ns,
                )
                found = self._runs[job, run] = RunStore(at, self._policy)
            return found

    def _run_of(self, segment: str) -> RunStore:
        job, run, _ = segment.split("/", 2)
        return self._run(job, run)

    def _submit(self, pool: ThreadPoolExecutor, work: Callable[[Any], Struct], message: Any) -> None:
        pool.submit(lambda: self.send(_outcome(message.id, partial(work, message))))

    # -- work after a manifest, on the thread of `_aside` ------------------------------------------

    def _settle(self, run: RunStore, name: w.RankName, end: int, epoch: int) -> None:
        """After a rank's manifest, look for those of the others, once for all ranks of this node."""
        key = name.job, name.run, end, epoch
        waiting = self._waiting.setdefault(key, _Waiting())
        waiting.names.append(name)
        waiting.looks = 0
        all_here = len(waiting.names) >= run.num_ranks
        self._look_in(0.0 if all_here else _LOOKS_S[0], run, key)

    def _look_in(self, pause_s: float, run: RunStore, key: _Key) -> None:
        """Look after a pause, unless another rank of this node commits before."""
        waiting = self._waiting[key]
        waiting.turn += 1
        look = partial(self._guarded, partial(self._look, run, key, waiting.turn))
        if not pause_s:
            look()
            return
        timer = threading.Timer(pause_s, lambda: self._aside.submit(look) and None)
        timer.daemon = True
        timer.start()

    def _look(self, run: RunStore, key: _Key, turn: int) -> None:
        """Report to the waiting ranks once all manifests exist or the last look has passed; then collect."""
        waiting = self._waiting.get(key)
        if waiting is None or waiting.turn != turn:
            return
        *_, end, epoch = key
        del self._waiting[key]  # unless this was not the last look
        try:
            complete, missing = run.settled(end, epoch)
        except FencedOff as error:
            for name in waiting.names:
                self.send(w.RankFenced(name, error.epoch, str(error)))
            return
        except StoreError:
            # Whether it counts is not known: the ranks are told when the store answers again.
            self._waiting[key] = waiting
            self._look_in(_LOOKS_S[min(waiting.looks, len(_LOOKS_S) - 1)], run, key)
            waiting.looks = min(waiting.looks + 1, len(_LOOKS_S) - 1)
            raise
        if not complete and waiting.looks < len(_LOOKS_S):
            self._waiting[key] = waiting
            waiting.looks += 1
            self._look_in(_LOOKS_S[waiting.looks - 1], run, key)
            return
        for name in waiting.names:
            self.send(w.Settled(name, end, epoch, complete, missing))
        if complete and any(name.rank == 0 for name in waiting.names):
            run.retention.collect()
            self._worlds.retain(run.at.job, run.at.run)

    def _sweep(self, run: RunStore) -> None:
        """Abort the unfinished uploads of writers that died."""
        ended = self._store.abort_uploads(f"{run.at.title}/", _STALE_UPLOAD_S)
        if ended > 0:
            self._report("info", "uploads_aborted", f"{run.at.title}: {ended}")

    def _guarded(self, work: Callable[[], object]) -> None:
        try:
            work()
        except (StoreError, ManifestError) as error:
            self._report("warning", "store_trouble", str(error))
        # Nobody waits for this thread, so its errors must be reported here.
        except Exception as error:
            logger.exception("looking after the store failed")
            self._report("error", "internal", f"looking after the store failed: {error!r}")

    def _report(self, level: str, kind: str, text: str) -> None:
        self.send(w.KeeperEvent(level, kind, text))

    def _circuit_reported(self, notice: StoreNotice) -> None:
        level = "error" if notice.kind is NoticeKind.PAUSED else "info"
        self._report(level, f"store_{notice.kind}", notice.text)


def _outcome(number: int, work: Callable[[], Struct]) -> Struct:
    """The answer to a request, or the reason why it failed; never raises."""
    try:
        return work()
    except SlotLost as error:
        return w.KeeperFailed(number, w.FailureCode.LOST, str(error))
    except FencedOff as error:
        return w.KeeperFailed(number, w.FailureCode.FENCED, str(error))
    except Overtaken as error:
        return w.KeeperFailed(number, w.FailureCode.STORE, str(error))
    except (ObjectMissing, Damaged) as error:
        return w.KeeperFailed(number, w.FailureCode.DAMAGED, f"{type(error).__name__}: {error}")
    except (StoreError, ManifestError, SnapshotDamaged) as error:
        return w.KeeperFailed(number, w.FailureCode.STORE, f"{type(error).__name__}: {error}")
    except LookupError as error:
        return w.KeeperFailed(number, w.FailureCode.UNKNOWN, str(error))
    # The daemon waits for an answer, whatever failed here.
    except Exception as error:
        logger.exception("the store keeper failed")
        return w.KeeperFailed(number, w.FailureCode.INTERNAL, repr(error))


class _Opening:
    """Creates the keeper at the first request for which its store opens; logs each new reason once."""

    def __init__(self, configure: w.Configure, send: Callable[[Struct], None]) -> None:
        self._configure, self._send = configure, send
        self._keeper: Keeper | None = None
        self._reason = ""

    def handle(self, message: Any) -> None:
        try:
            self._keeper = self._keeper or Keeper(self._configure, self._send)
        except (StoreError, ValueError) as error:
            self._refuse(message, f"the store cannot be opened: {error}")
            return
        self._keeper.handle(message)

    def _refuse(self, message: Any, reason: str) -> None:
        if reason != self._reason:
            logger.error("%s", reason)
            self._reason = reason
        if (number := getattr(message, "id", None)) is not None:
            self._send(w.KeeperFailed(number, w.FailureCode.STORE, reason))


def _next(channel: w.Channel) -> Any:
    """The next message; None once the daemon is gone, whether it closed the connection or died."""
    try:
        return channel.receive()
    except OSError as error:
        logger.info("the daemon is gone: %s", error)
        return None


def _send(channel: w.Channel, message: Struct) -> None:
    """Send to the daemon; exit if it is gone, because nobody waits for the work in progress."""
    try:
        channel.send(message)
    except OSError as error:
        logger.info("the daemon is gone: %s", error)
        os._exit(0)  # from any thread, since others may wait for a store that does not answer


def main(argv: list[str]) -> int:
    """Serve the daemon at the other end of the inherited descriptor until it is gone."""
    handler = logging.StreamHandler()
    handler.setFormatter(TextFormatter("ckptd store keeper: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)  # the keeper ends with the daemon, not with its terminal
    channel = w.Channel(socket.socket(fileno=int(argv[1])), w.decode_to_keeper)
    configure = _next(channel)
    if configure is None:
        return 0
    assert isinstance(configure, w.Configure)
    send = partial(_send, channel)
    keeper = _Opening(configure, send)
    while (message := _next(channel)) is not None:
        if isinstance(message, w.KeeperPing):
            send(w.KeeperPong())
        else:
            keeper.handle(message)
    os._exit(0)  # threads may wait for a store that does not answer


if __name__ == "__main__":
    sys.exit(main(sys.argv))
