"""What neighbours sent, for a rank that runs apart from them: read here, or brought here by the
daemon while it runs.

A log that lies on this node is read where it is: its slots are held from the beginning, so that
their owner, which may be running again, passes over them. The others come in batches, into copies
that are only read (`Session.fetch_for_reading`): of each neighbour there are two at most, the one
that is read and the one after it. All is verified before it is handed out. What is damaged here is
brought like what is not here: the daemon takes the damaged tensors from other copies, if there are
any.

The memory that a batch takes is bounded; where there is less, batches become smaller, down to one
iteration. A daemon that is restarted has forgotten what it was bringing: it is asked again, and
what had arrived stays readable.
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
from typing import Protocol

from torch import Tensor

from ckptd.client.daemon_link.segment_arrival import KnowsFetches, wait_until_sealed
from ckptd.client.log_lines import get_logger
from ckptd.client.pipeline.log_reader import LogFile
from ckptd.core.recovery.global_plan import SnapshotToLoad
from ckptd.core.slots.boundary import RecordKey
from ckptd.core.slots.ring import SlotRecord
from ckptd.core.slots.segment_format import slot_lock_byte
from ckptd.errors import AttachRefused, CorruptionError, DaemonUnavailable, SegmentError
from ckptd.holdings import fetch_piece
from ckptd.memory import locks
from ckptd.transport.control.messages import (
    FetchPiece,
    FetchState,
    NodeCard,
    RefusalCode,
    SegmentInfo,
)

__all__ = ["BringsLogs", "FedLogs"]

logger = get_logger(__name__)

_BATCH_BYTES = 128 << 20
_BATCHES = 2  # of one neighbour: one is read, the next is on its way
_AWAY_S = 60.0  # a daemon that is restarted is back long before
_AGAIN_S = 0.5
_GRANT_S = 700.0  # longer than the session waits for memory to be made
_NO_MEMORY = (RefusalCode.QUOTA, RefusalCode.SEGMENT_FS)
_NOTHING_NEW = FetchState("running", "", 0, 0, 0, {})


class BringsLogs(KnowsFetches, Protocol):
    """This rank's session with its daemon, as far as it is asked here."""

    node_id: str
    segment_dir: str

    @property
    def run(self) -> tuple[str, str]: ...

    def fetch_for_reading(
        self, rank: int, kind: str, pieces: tuple[FetchPiece, ...], cards: tuple[NodeCard, ...] = ()
    ) -> Future[SegmentInfo]: ...

    def drop(self, generation: int) -> None: ...

    def notice(self, level: str, kind: str, message: str) -> None: ...


class FedLogs:
    """Logged iterations of neighbours, in the order of iterations; for one thread.

    Args:
        pieces: by neighbour (a rank) and iteration, with all their copies.
        cards: how the nodes that hold them are reached.
        batch_bytes: how much is brought at a time, of one neighbour; an iteration that is larger comes alone.
    Raises:
        AttachRefused: there is no memory for the first of them, or nobody holds them any more; nothing is left behind.
        DaemonUnavailable: the daemon is away.
    """

    def __init__(
        self,
        session: BringsLogs,
        pieces: Mapping[int, Mapping[int, SnapshotToLoad]],
        cards: tuple[NodeCard, ...] = (),
        *,
        batch_bytes: int = _BATCH_BYTES,
    ) -> None:
        self._feeds = {
            neighbour: _Feed(session, neighbour, of, cards, batch_bytes)
            for neighbour, of in pieces.items()
        }
        try:
            for feed in self._feeds.values():
                feed.begin()
        except BaseException:
            self.close()
            raise

    def __call__(self, neighbour: int, iteration: int) -> dict[RecordKey, Tensor]:
        """Everything that ``neighbour`` sent in an iteration, as tensors in host memory that are
        the caller's.

        Waits until it is here. What is older of this neighbour is given up by it.

        Raises:
            KeyError: it is not among the pieces, or has been given up.
            DaemonUnavailable: no copy of it can be had any more; a restart of the job plans anew.
            AttachRefused: there is no memory for it, or none of its holders answers.
        """
        feed = self._feeds.get(neighbour)
        if feed is None:
            known = ", ".join(map(str, sorted(self._feeds))) or "none"
            raise KeyError(f"nothing is fed from rank {neighbour}; neighbours are: {known}")
        return feed.read(iteration)

    def close(self) -> None:
        """Give everything back: the rank is through, or recovery has failed."""
        for feed in self._feeds.values():
            feed.close()


class _Forgotten(Exception):
    """The daemon was restarted and knows nothing of what it was bringing."""


@dataclass(slots=True, eq=False)
class _Batch:
    """Iterations that come into one copy, in the order of its slots. ``ahead``: asked for before it
    was needed.
    """

    iterations: list[int]
    answer: Future[SegmentInfo]
    ahead: bool
    info: SegmentInfo | None = None
    file: LogFile | None = None


class _Held:
    """A slot of this node that stays as it is until ``close``; ``image`` is None if it is another
    one already.

    Raises:
        OSError: its file is gone.
    """

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
    """A data loader's worker shares our locks: it would keep the slots from their owner for as long
    as it lives.
    """
    for held in list(_HELD):
        held.close()


os.register_at_fork(after_in_child=_after_fork_in_child)


class _Feed:
    """What one neighbour sent."""

    def __init__(
        self,
        session: BringsLogs,
        neighbour: int,
        pieces: Mapping[int, SnapshotToLoad],
        cards: tuple[NodeCard, ...],
        batch_bytes: int,
    ) -> None:
        self._session, self._neighbour, self._cards = session, neighbour, cards
        self._pieces = dict(sorted(pieces.items()))
        self._batch_bytes, self._most = batch_bytes, len(pieces)
        self._files: dict[str, LogFile | None] = {}
        self._here: dict[int, _Held] = {}
        self._left: deque[int] = deque()  # to be brought, and not asked for yet
        self._batches: list[_Batch] = []

    def begin(self) -> None:
        """Hold what is here, and have the first of the others granted."""
        for iteration, piece in self._pieces.items():
            held = self._hold(piece)
            if held is None:
                self._left.append(iteration)
            else:
                self._here[iteration] = held
        if self._left:
            self._granted(self._left[0])

    def read(self, iteration: int) -> dict[RecordKey, Tensor]:
        piece = self._pieces.get(iteration)
        if piece is None:
            known = ", ".join(map(str, self._pieces)) or "none"
            raise KeyError(
                f"what rank {self._neighbour} sent in iteration {iteration} is not fed (any more); there are: {known}"
            )
        self._give_up_before(iteration)
        held = self._here.get(iteration)
        if held is not None:
            try:
                return held.tensors()
            except CorruptionError as error:
                self._damaged_here(iteration, error)
        return self._read_brought(iteration, piece)

    def close(self) -> None:
        for held in self._here.values():
            held.close()
        self._here.clear()
        self._pieces.clear()
        self._left.clear()
        for batch in self._batches:
            self._drop(batch)
        self._batches.clear()

    # -- on this node ----------------------------------------------------------------------------

    def _hold(self, piece: SnapshotToLoad) -> _Held | None:
        """A copy on this node, if one is as it should be."""
        for source in piece.sources:
            file = self._file(source.segment) if source.node == self._session.node_id else None
            if file is None:
                continue
            try:
                held = _Held(file, replace(piece.record, index=source.index))
            except OSError as error:
                logger.info("%s cannot be held: %s", source.segment, error)
                continue
            if held.image is not None:
                return held
            held.close()  # it has been overwritten since
        return None

    def _file(self, name: str) -> LogFile | None:
        """A log of the neighbour on this node; None if it cannot be read from here. Then the daemon may."""
        if name not in self._files:
            self._files[name] = self._open(name)
        return self._files[name]

    def _open(self, name: str) -> LogFile | None:
        job, run = self._session.run
        if name != os.path.basename(name):  # a node has told this name
            return None
        try:
            file = self._mapped(os.path.join(self._session.segment_dir, name))
        except (OSError, SegmentError) as error:
            logger.info("%s is not read directly: %s", name, error)
            return None
        descriptor = file.descriptor
        return (
            file
            if (descriptor.job, descriptor.run, descriptor.rank) == (job, run, self._neighbour)
            else None
        )

    def _damaged_here(self, iteration: int, error: CorruptionError) -> None:
        """Have it brought like the others: what is wrong in it is taken from other copies."""
        text = f"what rank {self._neighbour} sent in iteration {iteration} is damaged here, other copies are asked for: {error}"
        logger.error("%s", text)
        self._session.notice("error", "digest_mismatch", text)
        self._here.pop(iteration).close()
        self._ask([iteration], ahead=False)

    def _mapped(self, path: str) -> LogFile:
        file = LogFile(Path(path))
        file.keep_from_children()
        return file

    # -- brought here ----------------------------------------------------------------------------

    def _read_brought(self, iteration: int, piece: SnapshotToLoad) -> dict[RecordKey, Tensor]:
        while True:
            batch = self._granted(iteration, patience_s=_AWAY_S)
            if self._left and len(self._batches) < _BATCHES:
                self._ask_next(ahead=True)
            try:
                return self._arrived(batch, iteration, piece)
            except _Forgotten as error:
                logger.warning("%s", self._lost(iteration, f"{error}; it is asked again"))
                self._put_back(batch)

    def _arrived(
        self, batch: _Batch, iteration: int, piece: SnapshotToLoad
    ) -> dict[RecordKey, Tensor]:
        assert batch.info is not None
        try:
            file = batch.file = batch.file or self._mapped(batch.info.path)
        except FileNotFoundError as error:
            raise _Forgotten("the daemon was restarted") from error
        except (OSError, SegmentError) as error:
            raise self._lost(iteration, str(error)) from error
        index = batch.iterations.index(iteration)
        wait_until_sealed(self, batch.info.generation, iteration, lambda: file.header(index))
        record = replace(piece.record, index=index)
        image = file.image(record)  # nobody overwrites it
        if image is None:
            raise self._lost(iteration, "its copy was taken away")
        try:
            return file.tensors(record, image)
        except CorruptionError as error:  # it was right when it arrived
            raise self._lost(iteration, str(error)) from error

    def fetch_state(self, generation: int) -> FetchState:
        """As the session says. While it asks for memory it can ask nothing else, and a daemon that
        is away may be back soon.
        """
        if not all(batch.answer.done() for batch in self._batches):
            return _NOTHING_NEW
        try:
            return self._session.fetch_state(generation)
        except DaemonUnavailable:
            return _NOTHING_NEW
        except AttachRefused as error:
            raise _Forgotten(str(error)) from error

    def _granted(self, iteration: int, *, patience_s: float = 0.0) -> _Batch:
        """The batch with this iteration, when the daemon has made its memory."""
        until_s = time.monotonic() + patience_s
        while True:
            batch = self._batch_of(iteration)
            try:
                batch.info = batch.answer.result(_GRANT_S)
                return batch
            except TimeoutError as error:
                raise self._lost(iteration, "the daemon makes no memory for it") from error
            except DaemonUnavailable:
                self._put_back(batch)
                if time.monotonic() > until_s:
                    raise
                time.sleep(_AGAIN_S)
            except AttachRefused as error:
                self._put_back(batch)
                alone = len(batch.iterations) == 1
                # What was read when it was asked for ahead of its time may be free now.
                if error.code not in _NO_MEMORY or (alone and not batch.ahead):
                    raise
                self._most = max(1, len(batch.iterations) // 2)
                logger.info("logs are brought %d iterations at a time: %s", self._most, error)

    def _put_back(self, batch: _Batch) -> None:
        """It came to nothing: what is still wanted of it is to be asked for again."""
        self._batches.remove(batch)
        self._left.extendleft(i for i in reversed(batch.iterations) if i in self._pieces)

    def _batch_of(self, iteration: int) -> _Batch:
        while True:
            for batch in self._batches:
                if iteration in batch.iterations:
                    return batch
            self._ask_next(ahead=False)

    def _ask_next(self, *, ahead: bool) -> None:
        """Ask for as many of the next iterations as fit into a batch."""
        taken = [self._left.popleft()]
        size = self._size_of(taken[0])
        while self._left and len(taken) < self._most:
            size += self._size_of(self._left[0])
            if size > self._batch_bytes:
                break
            taken.append(self._left.popleft())
        self._ask(taken, ahead=ahead)

    def _size_of(self, iteration: int) -> int:
        return self._pieces[iteration].record.image_len

    def _ask(self, iterations: list[int], *, ahead: bool) -> None:
        pieces = [self._pieces[i] for i in iterations]
        wanted = tuple(fetch_piece(p, sealed_at_ns=time.time_ns()) for p in pieces)
        answer = self._session.fetch_for_reading(self._neighbour, "log", wanted, self._cards)
        self._batches.append(_Batch(iterations, answer, ahead))

    def _give_up_before(self, iteration: int) -> None:
        for older in [i for i in self._pieces if i < iteration]:
            del self._pieces[older]
            held = self._here.pop(older, None)
            if held is not None:
                held.close()
        while self._left and self._left[0] < iteration:
            self._left.popleft()
        for batch in [b for b in self._batches if b.iterations[-1] < iteration]:
            self._batches.remove(batch)
            self._drop(batch)

    def _drop(self, batch: _Batch) -> None:
        """Give its copy back, also one that is granted only afterwards."""
        batch.file = None

        def granted(answer: Future[SegmentInfo]) -> None:
            if answer.exception() is None:
                self._session.drop(answer.result().generation)

        batch.answer.add_done_callback(granted)

    def _lost(self, iteration: int, why: str) -> DaemonUnavailable:
        return DaemonUnavailable(
            f"what rank {self._neighbour} sent in iteration {iteration} cannot be had: {why}",
            operation="fetch",
        )
