"""``BoundaryLog``: what this rank sends to its neighbours in the pipeline, kept by the daemon of
its node (DESIGN §8).

A neighbour that lost its state can then replay alone, fed from here. The log of an iteration is
open from the top of its step to the next; it counts when it is complete and sealed, like a
snapshot. Life: the first full step shows how much is sent, the daemon is asked for room, and from
then on each iteration takes a slot that no promised suffix needs. If there is no room, that
iteration is not logged, and counted; training never waits and never fails for it.

In replay the same is sent again. Where the log of the iteration is there, both are compared, bit
for bit; where not, it is written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ckptd.client.capture.comparison import Differences
from ckptd.client.daemon_link.communication_facts import LogFacts, find_facts, recorded_facts
from ckptd.client.daemon_link.rank_memory import RankMemory
from ckptd.client.log_lines import get_logger
from ckptd.client.model.communication import Communication
from ckptd.client.model.live_state import local
from ckptd.client.model.snapshot_layout import SAFETENSORS_DTYPES
from ckptd.client.pipeline.isolated_stage import IsolatedStage
from ckptd.client.pipeline.log_memory import LogMemory
from ckptd.client.pipeline.log_writer import Comparison, Layouts, LogFill, Room
from ckptd.client.pipeline.silent_log import SilentLog
from ckptd.client.schedule.describe import human
from ckptd.client.schedule.snapshot_plan import SnapshotPlan
from ckptd.client.stats import Stats
from ckptd.core.slots.boundary import RecordKey, SentKind
from ckptd.cuda.engine import CopyEngine, CopyItem
from ckptd.cuda.samples import SamplePlan, Samples

__all__ = ["BoundaryLog"]

logger = get_logger(__name__)

_FAILURES_IN_A_ROW = 3
_DIFFERENCES_TOLD = 4


class BoundaryLog(SilentLog):
    """Made by ``Checkpointer.boundary_log()`` or ``log_boundaries()``.

    Args:
        memory: this rank's memory.
        engine: copies of its own: boundaries are not to wait for a snapshot's copies.
        plan: what is captured when, as soon as that is known; None while nothing is captured.
        silent: whether what is sent now is not to be logged (a rehearsal, a verification).
        limit_bytes: the most that the log may take; None leaves it to the daemon's quota.
        replicate: whether the log is to have replicas on other nodes.
        communication: sees with whom this rank communicates; None: it is alone, or nothing can be told.
        alike: other ranks with which it has all operators alike.

    Attributes:
        apart: who is there in which iteration after a localized restart; None: everybody, always.
    """

    def __init__(
        self,
        memory: RankMemory,
        engine: CopyEngine,
        stats: Stats,
        *,
        plan: Callable[[], SnapshotPlan | None],
        silent: Callable[[], bool],
        limit_bytes: int | None = None,
        replicate: bool = False,
        communication: Communication | None = None,
        alike: Sequence[int] = (),
    ) -> None:
        if limit_bytes is not None and limit_bytes < 1:
            raise ValueError(
                f"limit_bytes={limit_bytes}: pass the bytes that the log may take, or None"
            )
        if replicate is not True and replicate is not False:
            raise ValueError(f"replicate={replicate!r}: pass True or False")
        self._memory, self._engine, self._stats = memory, engine, stats
        self._plan, self._silent = plan, silent
        self._slots = LogMemory(memory, engine, stats, limit_bytes, replicate=replicate)
        self._layouts = Layouts(memory.identity.metadata())
        # A hand-written pipeline may log from hooks, which run on the backward's thread.
        self._lock = threading.RLock()
        self._iteration: int | None = None
        self._fill: LogFill | None = None
        self._comparison: Comparison | None = None
        self._rounds: dict[tuple[SentKind, int, int, int], int] = {}
        self._room, self._largest = Room(), Room()
        # Something changed a tensor after it was sent: from then on copies come before whatever the
        # device does next.
        self._in_order = False
        self._failures = self._skips_in_a_row = 0
        self._trouble = False  # in the iteration that runs
        self.given_up = False
        self.apart: IsolatedStage | None = None
        self._communication, self._alike = communication, tuple(alike)
        here = recorded_facts(segment.descriptor.client for segment in memory.logs)
        self._known = memory.brought_facts or here
        self._num_values = 0

    # -- what is sent ----------------------------------------------------------------------------

    def activation(
        self,
        tensor: Tensor,
        *,
        micro_batch: int,
        stage: int = 0,
        index: int = 0,
        dest: int | None = None,
    ) -> bool:
        """Log an activation that is sent downstream; on CUDA, do not change it in place before the
        step is over.

        Returns whether it is to be sent: false while ``dest`` does not run this iteration with this
        rank (localized recovery).

        Args:
            stage: the sender's, where this rank has several.
            index: which of the tensors that are sent of this micro-batch.
            dest: the rank to which it is sent, by one send; if it is not said, the two ranks always recover together.
        Raises:
            ValueError: outside of a step of ``ckpt.steps()``, a negative number, or a dtype that cannot be kept.
        """
        self._by_hand(SentKind.ACTIVATION, tensor, stage, micro_batch, index, dest)
        return self._is_there(dest)

    def gradient(
        self,
        tensor: Tensor,
        *,
        micro_batch: int,
        stage: int = 0,
        index: int = 0,
        dest: int | None = None,
    ) -> bool:
        """Log a gradient that is sent upstream; as ``activation``."""
        self._by_hand(SentKind.GRADIENT, tensor, stage, micro_batch, index, dest)
        return self._is_there(dest)

    def receive_activation(
        self, buffer: Tensor, *, source: int, micro_batch: int, stage: int = 0, index: int = 0
    ) -> bool:
        """Whether ``buffer`` has been filled from the log of ``source``, which does not run this
        iteration: do not receive it then.

        Args:
            source: the rank that sends it, by one send.
            stage, index: as the sender has logged it.
        Raises:
            ValueError: a negative number.
            CorruptionError: the log has no such activation, or one of another shape or dtype.
        """
        return self._receive(SentKind.ACTIVATION, buffer, source, stage, micro_batch, index)

    def receive_gradient(
        self, buffer: Tensor, *, source: int, micro_batch: int, stage: int = 0, index: int = 0
    ) -> bool:
        """Whether ``buffer`` has been filled with a gradient; as ``receive_activation``."""
        return self._receive(SentKind.GRADIENT, buffer, source, stage, micro_batch, index)

    def sent(
        self,
        kind: SentKind,
        stage: int,
        micro_batch: int,
        tensors: Sequence[Tensor],
        peers: Sequence[int] = (),
    ) -> None:
        """A stage sends these to ``peers``, in this order; never raises."""
        if self._silent():
            return
        if self._iteration is None:
            self._stats.log_outside += len(tensors)
            return
        if self._communication is not None:
            self._communication.sends(peers)
        keyed = [((kind, stage, micro_batch, i), local(t)) for i, t in enumerate(tensors)]
        with self._surviving(), self._lock:
            self._record(keyed)

    def receives(self, peers: Sequence[int]) -> None:
        """A stage is to receive something from each of these; never raises."""
        if self._communication is not None and self._iteration is not None and not self._silent():
            self._communication.receives(peers)

    def joined(self, group: Any, why: str) -> None:
        """All of a process group recover together; never raises."""
        if self._communication is not None:
            self._communication.all_of(group, why)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is communicated in the body does not tell who recovers together."""
        if self._communication is None:
            yield
        else:
            with self._communication.aside():
                yield

    def isolated_value(self, name: str) -> tuple[Any] | None:
        """The next shared value where it cannot be computed, because not all ranks run this
        iteration; None: compute it.

        Raises:
            CorruptionError: no log that is read has it.
        """
        if self.apart is None or self._silent():
            return None
        return self.apart.shared_value(name, self._num_values)

    def value(self, packed: bytes) -> None:
        """Log a shared value, with its name; never raises."""
        if self._silent() or self._iteration is None:
            return
        number, self._num_values = self._num_values, self._num_values + 1
        tensor = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        with self._surviving(), self._lock:
            self._record([((SentKind.VALUE, 0, number, 0), tensor)])

    def _is_there(self, rank: int | None) -> bool:
        return rank is None or self.apart is None or self.apart.runs(rank)

    def _receive(
        self,
        kind: SentKind,
        buffer: Tensor,
        source: int,
        stage: int,
        micro_batch: int,
        index: int,
    ) -> bool:
        _check_numbers(source=source, micro_batch=micro_batch, stage=stage, index=index)
        # Who logs no more is fed all the same: nobody else would send it.
        if self._silent() or (self._iteration is None and not self.given_up):
            return False
        if self.apart is not None and self.apart.feed(
            buffer, kind, stage, micro_batch, index, source
        ):
            return True
        self.receives([source])
        return False

    def _by_hand(
        self,
        kind: SentKind,
        tensor: Tensor,
        stage: int,
        micro_batch: int,
        index: int,
        dest: int | None,
    ) -> None:
        _check_numbers(micro_batch=micro_batch, stage=stage, index=index, dest=dest or 0)
        if tensor.dtype not in SAFETENSORS_DTYPES:
            raise ValueError(
                f"log.{kind}(): {tensor.dtype} cannot be kept; send it as another dtype"
            )
        if self._silent() or self.given_up:
            return
        if self._iteration is None:
            raise ValueError(
                f"log.{kind}() outside of a step: what is sent belongs to the iteration of the loop over ckpt.steps()"
            )
        if dest is not None and self._communication is not None:
            self._communication.sends([dest])
        with self._surviving(), self._lock:
            self._record([((kind, stage, micro_batch, index), local(tensor))])

    def _record(self, sent: Sequence[tuple[tuple[SentKind, int, int, int], Tensor]]) -> None:
        items: list[CopyItem] = []
        for where, tensor in sent:
            nth = self._rounds.get(where, 0)
            self._rounds[where] = nth + 1
            # A conjugate is a mark on memory that holds something else; copied and compared is memory.
            key, data = RecordKey(*where, nth), tensor.detach().resolve_conj().resolve_neg()
            self._room.add(data.numel() * data.element_size())
            if self._comparison is not None:
                self._comparison.add(key, data)
            elif self._fill is not None and (item := self._fill.place(key, data)) is not None:
                items.append(item)
        if items and self._fill is not None:
            self._copy(self._fill, items)

    def _copy(self, fill: LogFill, items: Sequence[CopyItem]) -> None:
        """Begin the copies. They hold the tensors until they are over, so that nobody gets their
        memory before.

        Not every write moves a version counter (``x.data.mul_(…)``, a kernel of one's own), so
        elements of the tensors are read first, and compared with the finished copies
        (`ckptd.cuda.samples`). Where copies are complete when they have begun there is nothing to
        compare.
        """
        versions = [(i.tensor, _version(i.tensor)) for i in items]
        check = not self._in_order
        samples = (
            None
            if self._engine.inline
            else SamplePlan(items, self._engine.device).draw(fill.iteration)
        )
        errors: list[BaseException] = []

        def copied(error: BaseException | None) -> None:
            failed = error or next(iter(errors), None)
            why_not = "" if failed is None else f"copying failed: {failed}"
            if not why_not:
                counted = check and any(_version(t) != v for t, v in versions)
                if counted or (samples is not None and _is_torn(samples, fill)):
                    self._in_order = True
                    why_not = "a tensor was changed in place while it was copied"
            versions.clear()
            fill.copied(why_not)

        fill.copying()
        try:
            if samples is not None:
                self._engine.read(samples, lambda error: errors.append(error) if error else None)
            self._engine.begin(items, fill.segment.memory, fill.base, copied)
        except BaseException as error:
            copied(error)
            raise
        if self._in_order:
            self._engine.wait()

    # -- the life of a step ----------------------------------------------------------------------

    def begin(self, step: int, *, replaying: bool) -> None:
        """The top of ``step``; never raises."""
        if self.apart is not None:
            self.apart.begin(step)
        together = self.apart is None or self.apart.over
        if self._communication is not None and together and not replaying:
            with self._surviving():
                self._communication.begin()
        self._num_values = 0
        if self.given_up:
            return
        with self._surviving(), self._lock:
            self._iteration, self._trouble = step, False
            self._rounds.clear()
            self._room = Room()
            self._begin(step, replaying)

    def end(self) -> Differences:
        """The body of the step is over; never raises.

        Returns:
            What a replayed one sent otherwise than before. It is in the log, too; whoever calls decides what follows.
        """
        told = Differences()
        step = self._iteration
        if self._communication is not None:
            with self._surviving():
                self._communication.end()
        with self._surviving(), self._lock:
            self._iteration = None
            self._largest = self._largest.at_least(self._room)
            comparison, self._comparison = self._comparison, None
            if comparison is not None:
                told = comparison.end()
                self._stats.log_compared += comparison.compared
                self._stats.log_mismatches += len(told.texts)
            fill, self._fill = self._fill, None
            if fill is not None:
                self._end_fill(fill)
            if not self._trouble:
                self._failures = 0
        if told:
            self._tell(step, told.texts)
        return told

    def abandon(self) -> None:
        """The body was left in its middle: what it sent is not kept; never raises."""
        if self._communication is not None:
            self._communication.abandon()
        with self._lock:
            self._iteration = self._comparison = None
            fill, self._fill = self._fill, None
            if fill is not None:
                fill.end(keep=False)

    def close(self) -> None:
        """Wait for copies that are under way; the daemon keeps the log. Never raises."""
        self.abandon()
        if self._communication is not None:
            self._communication.close()
        if self.apart is not None:
            self.apart.close()
        self.given_up = True
        self._engine.close()

    def describe(self) -> str:
        """One line: how large it is and how many iterations it holds; or why there is none."""
        segment = self._slots.newest
        if segment is None:
            if self._slots.refused:
                return f"boundary log: none ({self._slots.refused})"
            return "boundary log: none yet, it is sized after the first full step that is captured"
        total = human(self._stats.log_memory_bytes)
        more = "; replicated as snapshots are" if segment.descriptor.replicated else ""
        more += f"; {self._slots.refused}" if self._slots.refused else ""
        return (
            f"boundary log: {total} for {segment.geometry.num_slots} iterations of at most "
            f"{human(segment.geometry.slot_bytes)}{more}"
        )

    def describe_domain(self) -> list[str]:
        """Lines on who recovers together with this rank though a boundary lies between them; none
        where nobody does.
        """
        facts = self._facts()
        return [] if facts is None else facts.warnings()

    def _facts(self) -> LogFacts | None:
        """What is known by now; from an earlier trainer, too, who may have seen what happens rarely."""
        rank = self._memory.identity.rank
        return find_facts(rank, self._communication, self._alike, self._known)

    def _begin(self, step: int, replaying: bool) -> None:
        slots = self._slots
        slots.collect(step)
        plan = self._plan()
        if plan is None:
            return
        slots.fit(plan, self._largest, step, self._facts())
        if slots.newest is None:
            return
        view = slots.verified(step) if replaying else None
        if view is not None:
            self._comparison = Comparison(view, step)
            return
        claimed = slots.claim(step)
        if isinstance(claimed, str):
            self._skipped(step, claimed)
            return
        index, header = claimed
        self._fill = LogFill(slots.newest, index, header, slots.data_offset, self._finish)

    def _end_fill(self, fill: LogFill) -> None:
        if fill.full:
            need = human(self._room.data_bytes)
            has = human(fill.segment.geometry.slot_bytes - self._slots.data_offset)
            self._skipped(fill.iteration, f"it sent {need}, a slot has room for {has}")
            fill.end(keep=False)
        else:
            self._skips_in_a_row = 0
            fill.end()

    def _finish(self, fill: LogFill) -> None:
        """All of it has arrived, on whatever thread; at once, so that it is there whenever this process ends."""
        stats, session, segment = self._stats, self._memory.session, fill.segment
        if not fill.write(self._layouts):
            if fill.crowded:
                self._largest = self._largest.at_least(Room(2 * fill.num_records))
            if fill.spoilt:
                logger.warning("iteration %d is not logged: %s", fill.iteration, fill.spoilt)
                stats.log_failed += 1
            return
        stats.log_iterations += 1
        stats.log_records += fill.num_records
        stats.log_bytes += fill.data_bytes
        if session.connected:  # otherwise the session's desk seals it
            session.filled(segment.generation, fill.index, fill.iteration)

    def _skipped(self, step: int, why: str) -> None:
        self._stats.log_skipped += 1
        self._skips_in_a_row += 1
        if self._skips_in_a_row & (self._skips_in_a_row - 1) == 0:
            logger.warning(
                "iteration %d is not logged (%d in a row): %s", step, self._skips_in_a_row, why
            )

    def _tell(self, step: int | None, differences: Sequence[str]) -> None:
        shown = "; ".join(differences[:_DIFFERENCES_TOLD])
        more = len(differences) - _DIFFERENCES_TOLD
        text = (
            f"replay of iteration {step} did not send what was logged when it ran first: {shown}"
            f"{f'; and {more} more' if more > 0 else ''}. The model is not deterministic, or memory was corrupted"
        )
        logger.error("%s", text)
        self._memory.session.notice("error", "replay_mismatch", text)

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Whatever goes wrong here must not reach the user's loop; after a few failures in a row
        nothing is logged any more.
        """
        try:
            yield
        except Exception as error:
            logger.error("logging boundaries failed", exc_info=error)
            self._stats.log_failed += 1
            self._failures, self._trouble = self._failures + 1, True
            with self._lock:
                fill, self._fill, self._comparison = self._fill, None, None
            if fill is not None:
                fill.end(keep=False)
            if self._failures >= _FAILURES_IN_A_ROW:
                self.given_up, self._iteration = True, None
                text = f"boundaries are not logged any more: {type(error).__name__}: {error}"
                logger.error("%s", text)
                self._memory.session.notice("error", "boundaries_not_logged", text)


def _check_numbers(**numbers: int) -> None:
    for name, number in numbers.items():
        if not 0 <= number < 10**9:
            raise ValueError(f"{name}={number}: count from 0")


def _is_torn(samples: Samples, fill: LogFill) -> bool:
    """Whether the copies do not hold what the tensors held when they were sent."""
    return bool(samples.unlike(fill.segment.memory.words, fill.base))


def _version(tensor: Any) -> int:
    """Grows with every change in place; what was made for inference has none."""
    return -1 if torch.is_inference(tensor) else int(tensor._version)
