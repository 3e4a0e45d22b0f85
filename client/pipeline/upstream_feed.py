"""The logs of neighbours for an isolated rank: read on this node, or fetched by the daemon during the
run.

A log on this node is read in place: its slots are held from the start, so that their owner, which may be
running again, does not reuse them. Other logs are fetched in batches into read-only copies
(`Session.fetch_for_reading`), at most two per neighbour: the one that is read and the next one. All
tensors are verified before they are returned. A damaged local log is fetched like a remote one: the
daemon takes the damaged tensors from other copies, if there are any.

The memory of a batch is bounded; if less is available, batches become smaller, down to one iteration. A
restarted daemon does not know earlier requests: they are repeated, and copies that had arrived stay
readable.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from ckptd.client.daemon_link.retrieval import wait_until_sealed
from ckptd.client.daemon_link.session import Session
from ckptd.client.log_lines import get_logger
from ckptd.client.pipeline.log_reader import LogFile
from ckptd.core.recovery.localized_plan import Feed, RankPlan
from ckptd.core.recovery.snapshot_tables import SnapshotToLoad
from ckptd.core.slots.boundary import RecordKey
from ckptd.core.slots.segment_format import slot_lock_byte
from ckptd.core.slots.slots import SlotRecord
from ckptd.errors import AttachRefused, CorruptionError, DaemonUnavailable, SegmentError
from ckptd.holdings import fetch_piece
from ckptd.memory import locks
from ckptd.transport.messages import FetchState, NodeCard, RefusalCode, SegmentInfo

logger = get_logger(__name__)


_BATCH_BYTES = 128 << 20
_BATCHES = 2  # per neighbour: one is read, the next is being fetched
_AWAY_S = 60.0  # a restart of the daemon takes much less
_AGAIN_S = 0.5
_GRANT_S = 700.0  # longer than the session waits for memory
_NO_MEMORY = (RefusalCode.QUOTA, RefusalCode.USER_QUOTA, RefusalCode.SEGMENT_FS)
_NOTHING_NEW = FetchState("running", "", 0, 0, 0, {})


class FedLogs:
    """The logged iterations of neighbours, in order; for one thread.

    Args:
        logged: by neighbour (a rank) and iteration, with all their copies.
        cards: the addresses of the nodes that hold the logs.
        batch_bytes: the size of one batch of one neighbour; a larger iteration is fetched alone.
    Raises:
        AttachRefused: no memory is available for the first logs, or no node holds them any more;
            nothing is left behind.
        DaemonUnavailable: the daemon does not answer.
    """

    def __init__(
        self,
        session: Session,
        logged: Mapping[int, Mapping[int, SnapshotToLoad]],
        cards: tuple[NodeCard, ...] = (),
        *,
        batch_bytes: int = _BATCH_BYTES,
    ) -> None:
        self._feeds = {
            neighbour: _Feed(session, neighbour, of, cards, batch_bytes) for neighbour, of in logged.items()
        }
        try:
            for feed in self._feeds.values():
                feed.begin()
        except BaseException:
            self.close()
            raise

    def __call__(self, neighbour: int, iteration: int) -> dict[RecordKey, Tensor]:
        """All tensors that ``neighbour`` sent in an iteration, in host memory owned by the caller.

        Blocks until they have arrived. Frees older logs of this neighbour.

        Raises:
            KeyError: the iteration is not logged, or has been freed.
            DaemonUnavailable: no copy is reachable any more; a restart of the job makes a new plan.
            AttachRefused: no memory is available, or none of its holders answers.
        """
        feed = self._feeds.get(neighbour)
        if feed is None:
            known = ", ".join(map(str, sorted(self._feeds))) or "none"
            raise KeyError(f"rank {neighbour} is not fed from logs; fed neighbours: {known}")
        return feed.read(iteration)

    def close(self) -> None:
        """Release everything, after the last iteration or a failed recovery."""
        for feed in self._feeds.values():
            feed.close()


class _Forgotten(Exception):
    """The daemon was restarted and does not know the fetch."""


@dataclass(slots=True, eq=False)
class _Batch:
    """Iterations that are fetched into one copy, in slot order. ``ahead``: before they are needed."""

    iterations: list[int]
    answer: Future[SegmentInfo]
    ahead: bool
    info: SegmentInfo | None = None
    file: LogFile | None = None


class _Held:
    """A slot of this node that does not change until ``close``; ``image`` None: it was reused."""

    def __init__(self, file: LogFile, record: SlotRecord) -> None:
        self._file, self._record = file, record
        self.fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        _HELD.add(self)
        taken = locks.try_lock(self.fd, slot_lock_byte(record.index), exclusive=False)
        self.image = file.image(record) if taken else None

    def tensors(self) -> dict[RecordKey, Tensor]:
        assert self.image is not None
        return self._file.tensors(self._record, self.image)

    def close(self) -> None:
        self.image = None
        if self in _HELD:
            _HELD.discard(self)
            os.close(self.fd)


_HELD: weakref.WeakSet[_Held] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """Close the locks in a forked child, which would otherwise keep the slots locked during its life."""
    for held in list(_HELD):
        held.close()


os.register_at_fork(after_in_child=_after_fork_in_child)


class _Feed:
    """The logs of one neighbour."""

    def __init__(
        self,
        session: Session,
        neighbour: int,
        logged: Mapping[int, SnapshotToLoad],
        cards: tuple[NodeCard, ...],
        batch_bytes: int,
    ) -> None:
        self._session, self._neighbour, self._cards = session, neighbour, cards
        self._logged = dict(sorted(logged.items()))
        self._batch_bytes, self._most = batch_bytes, len(logged)
        self._files: dict[str, LogFile | None] = {}
        self._here: dict[int, _Held] = {}
        self._left: deque[int] = deque()  # to be fetched, but not requested yet
        self._batches: list[_Batch] = []

    def begin(self) -> None:
        """Hold the local logs, and request the first of the others."""
        for iteration, log in self._logged.items():
            held = self._hold(log)
            if held is None:
                self._left.append(iteration)
            else:
                self._here[iteration] = held
        if self._left:
            self._granted(self._left[0])

    def read(self, iteration: int) -> dict[RecordKey, Tensor]:
        log = self._logged.get(iteration)
        if log is None:
            known = ", ".join(map(str, self._logged)) or "none"
            raise KeyError(
                f"the log of rank {self._neighbour} of iteration {iteration} is not available (any "
                f"more); available: {known}"
            )
        self._give_up_before(iteration)
        held = self._here.get(iteration)
        if held is not None:
            try:
                return held.tensors()
            except CorruptionError as error:
                self._damaged_here(iteration, error)
        return self._read_fetched(iteration, log)

    def close(self) -> None:
        for held in self._here.values():
            held.close()
        self._here.clear()
        self._logged.clear()
        self._left.clear()
        for batch in self._batches:
            self._drop(batch)
        self._batches.clear()

    # -- on this node ----------------------------------------------------------------------------

    def _hold(self, log: SnapshotToLoad) -> _Held | None:
        """A usable copy on this node, or None."""
        for source in log.sources:
            file = self._file(source.segment) if source.node == self._session.node_id else None
            if file is None:
                continue
            try:
                held = _Held(file, replace(log.record, index=source.index))
            except OSError as error:
                logger.info("%s cannot be held: %s", source.segment, error)
                continue
            if held.image is not None:
                return held
            held.close()  # it has been overwritten
        return None

    def _file(self, name: str) -> LogFile | None:
        """A log of the neighbour on this node; None if this process cannot read it. The daemon may."""
        if name not in self._files:
            self._files[name] = self._open(name)
        return self._files[name]

    def _open(self, name: str) -> LogFile | None:
        if name != os.path.basename(name):  # the name comes from another node
            return None
        try:
            file = self._mapped(os.path.join(self._session.segment_dir, name))
        except (OSError, SegmentError) as error:
            logger.info("%s is not read directly: %s", name, error)
            return None
        whose = file.descriptor.job, file.descriptor.run, file.descriptor.rank
        return file if whose == (*self._session.run, self._neighbour) else None

    def _damaged_here(self, iteration: int, error: CorruptionError) -> None:
        """Fetch a damaged local log like a remote one: the daemon repairs it from other copies."""
        text = (
            f"the log of rank {self._neighbour} of iteration {iteration} is damaged on this "
            f"node; fetching other copies: {error}"
        )
        logger.error("%s", text)
        self._session.notice("error", "digest_mismatch", text)
        self._here.pop(iteration).close()
        self._ask([iteration], ahead=False)

    def _mapped(self, path: str) -> LogFile:
        file = LogFile(Path(path))
        file.keep_from_children()
        return file

    # -- fetched ---------------------------------------------------------------------------------

    def _read_fetched(self, iteration: int, log: SnapshotToLoad) -> dict[RecordKey, Tensor]:
        while True:
            batch = self._granted(iteration, patience_s=_AWAY_S)
            if self._left and len(self._batches) < _BATCHES:
                self._ask_next(ahead=True)
            try:
                return self._arrived(batch, iteration, log)
            except _Forgotten as error:
                logger.warning("%s", self._lost(iteration, f"{error}; requesting it again"))
                self._put_back(batch)

    def _arrived(self, batch: _Batch, iteration: int, log: SnapshotToLoad) -> dict[RecordKey, Tensor]:
        assert batch.info is not None
        try:
            file = batch.file = batch.file or self._mapped(batch.info.path)
        except FileNotFoundError as error:
            raise _Forgotten("the daemon was restarted") from error
        except (OSError, SegmentError) as error:
            raise self._lost(iteration, str(error)) from error
        index = batch.iterations.index(iteration)
        wait_until_sealed(self, batch.info.generation, iteration, lambda: file.header(index))
        record = replace(log.record, index=index)
        image = file.image(record)  # nobody overwrites it
        if image is None:
            raise self._lost(iteration, "the daemon removed its copy")
        try:
            return file.tensors(record, image)
        except CorruptionError as error:  # it was correct when it arrived
            raise self._lost(iteration, str(error)) from error

    def fetch_state(self, generation: int) -> FetchState:
        """The state of a fetch; an absent daemon may be back soon."""
        if not all(batch.answer.done() for batch in self._batches):
            return _NOTHING_NEW
        try:
            return self._session.fetch_state(generation)
        except DaemonUnavailable:
            return _NOTHING_NEW
        except AttachRefused as error:
            raise _Forgotten(str(error)) from error

    def _granted(self, iteration: int, *, patience_s: float = 0.0) -> _Batch:
        """The batch with this iteration, after the daemon has granted its memory."""
        until_s = time.monotonic() + patience_s
        while True:
            batch = self._batch_of(iteration)
            try:
                batch.info = batch.answer.result(_GRANT_S)
                return batch
            except TimeoutError as error:
                raise self._lost(iteration, "the daemon does not grant memory for it") from error
            except DaemonUnavailable:
                self._put_back(batch)
                if time.monotonic() > until_s:
                    raise
                time.sleep(_AGAIN_S)
            except AttachRefused as error:
                self._put_back(batch)
                alone = len(batch.iterations) == 1
                # Memory that was in use at the first request may be free now.
                if error.code not in _NO_MEMORY or (alone and not batch.ahead):
                    raise
                self._most = max(1, len(batch.iterations) // 2)
                logger.info("fetching logs %d iterations at a time: %s", self._most, error)

    def _put_back(self, batch: _Batch) -> None:
        """A batch failed: its iterations that are still needed are requested again."""
        self._batches.remove(batch)
        self._left.extendleft(i for i in reversed(batch.iterations) if i in self._logged)

    def _batch_of(self, iteration: int) -> _Batch:
        while True:
            for batch in self._batches:
                if iteration in batch.iterations:
                    return batch
            self._ask_next(ahead=False)

    def _ask_next(self, *, ahead: bool) -> None:
        """Request as many of the next iterations as fit into a batch."""
        taken = [self._left.popleft()]
        size = self._logged[taken[0]].record.image_len
        while self._left and len(taken) < self._most:
            size += self._logged[self._left[0]].record.image_len
            if size > self._batch_bytes:
                break
            taken.append(self._left.popleft())
        self._ask(taken, ahead=ahead)

    def _ask(self, iterations: list[int], *, ahead: bool) -> None:
        logged = [self._logged[i] for i in iterations]
        wanted = tuple(fetch_piece(p, sealed_at_ns=time.time_ns()) for p in logged)
        answer = self._session.fetch_for_reading(self._neighbour, "log", wanted, self._cards)
        self._batches.append(_Batch(iterations, answer, ahead))

    def _give_up_before(self, iteration: int) -> None:
        for older in [i for i in self._logged if i < iteration]:
            del self._logged[older]
            held = self._here.pop(older, None)
            if held is not None:
                held.close()
        while self._left and self._left[0] < iteration:
            self._left.popleft()
        for batch in [b for b in self._batches if b.iterations[-1] < iteration]:
            self._batches.remove(batch)
            self._drop(batch)

    def _drop(self, batch: _Batch) -> None:
        """Release the copy of a batch, even if it is granted only later."""
        batch.file = None

        def granted(answer: Future[SegmentInfo]) -> None:
            if answer.exception() is None:
                self._session.drop(answer.result().generation)

        batch.answer.add_done_callback(granted)

    def _lost(self, iteration: int, why: str) -> DaemonUnavailable:
        return DaemonUnavailable(
            f"no copy of the log of rank {self._neighbour} of iteration {iteration} is available: {why}",
            operation="fetch",
        )


class ValueLogs:
    """Logs with shared values; for one thread. ``close`` releases the fetched logs.

    Args:
        mine: this rank's part of the plan.
        feeds: the logs that feed the rank.
        cards: the addresses of the nodes that hold the logs.
    """

    def __init__(
        self,
        session: Session,
        mine: RankPlan,
        feeds: FedLogs,
        cards: tuple[NodeCard, ...] = (),
    ) -> None:
        self._session, self._mine, self._feeds, self._cards = session, mine, feeds, cards
        self._asked: tuple[int, FedLogs] | None = None  # of the iteration that runs

    def __call__(self, iteration: int) -> Mapping[RecordKey, Tensor]:
        """A log of this iteration; empty if there is none.

        Raises:
            DaemonUnavailable: no copy is reachable any more.
            AttachRefused: no memory is available, or none of its holders answers.
        """
        for feed in self._mine.feeds:
            if feed.first <= iteration < feed.end:
                return self._feeds(feed.neighbour, iteration)
        for feed in self._mine.values:
            if feed.first <= iteration < feed.end:
                return self._other(feed, iteration)(feed.neighbour, iteration)
        return {}

    def _other(self, feed: Feed, iteration: int) -> FedLogs:
        """The log of a rank that does not feed this one."""
        if self._asked is None or self._asked[0] != iteration:
            self.close()
            logged = {feed.neighbour: {iteration: feed.pieces[iteration - feed.first]}}
            self._asked = iteration, FedLogs(self._session, logged, self._cards)
        return self._asked[1]

    def close(self) -> None:
        """Release the fetched log."""
        asked, self._asked = self._asked, None
        if asked is not None:
            asked[1].close()
