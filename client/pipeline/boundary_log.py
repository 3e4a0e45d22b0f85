"""``BoundaryLog``: a log of the tensors that this rank sends to its pipeline neighbours, kept by the
daemon of its node (DESIGN §8).

A neighbour that lost its state can replay alone with this log. The log of an iteration is open from the
top of its step to the next; it counts when it is complete and sealed, like a snapshot. The first full
step shows the size of an iteration; the log then requests memory from the daemon, and each iteration
takes a slot that no promised suffix needs. An iteration without a free slot is not logged, but counted;
training never waits or fails because of the log.

A replay sends the same tensors again. If the log of the iteration exists, both are compared bit for bit;
if not, the log is written.

A `shared_value` (a gradient norm over all stages, say) is computed by all ranks together, once, and
recorded. A replay takes it from this rank's own record of the step, and an isolated rank from any rank's
log: it is the same on all ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ckptd.client import values
from ckptd.client.capture.comparison import Differences
from ckptd.client.daemon_link.rank_memory import RankMemory
from ckptd.client.log_lines import get_logger
from ckptd.client.model.communication import Communication
from ckptd.client.model.freezing import Tape
from ckptd.client.model.live_state import local
from ckptd.client.model.snapshot_layout import SAFETENSORS_DTYPES
from ckptd.client.pipeline.isolated_stage import IsolatedStage
from ckptd.client.pipeline.log_memory import Comparison, LogFill, LogMemory, Room, make_layouts
from ckptd.client.pipeline.log_reader import LogFacts, find_facts, recorded_facts
from ckptd.client.schedule.snapshot_plan import SnapshotPlan, human
from ckptd.client.stats import Stats
from ckptd.core.slots.boundary import RecordKey, SentKind
from ckptd.cuda.engine import CopyEngine, CopyItem
from ckptd.cuda.samples import SamplePlan

logger = get_logger(__name__)

_FAILURES_IN_A_ROW = 3
_MOST_DIFFERENCES = 4

# Kind, stage, micro-batch and index of a sent tensor.
_Where = tuple[SentKind, int, int, int]


class SilentLog:
    """The log of a disabled checkpointer: accepts the calls of a hand-written pipeline, records nothing."""

    def activation(
        self,
        tensor: Tensor,
        *,
        micro_batch: int,
        stage: int = 0,
        index: int = 0,
        dest: int | None = None,
    ) -> bool:
        """Records nothing; returns True: send it."""
        return True

    def gradient(
        self,
        tensor: Tensor,
        *,
        micro_batch: int,
        stage: int = 0,
        index: int = 0,
        dest: int | None = None,
    ) -> bool:
        """Records nothing; returns True: send it."""
        return True

    def receive_activation(
        self, buffer: Tensor, *, source: int, micro_batch: int, stage: int = 0, index: int = 0
    ) -> bool:
        """Fills nothing; returns False: receive it."""
        return False

    def receive_gradient(
        self, buffer: Tensor, *, source: int, micro_batch: int, stage: int = 0, index: int = 0
    ) -> bool:
        """Fills nothing; returns False: receive it."""
        return False


class BoundaryLog(SilentLog):
    """The boundary log of a rank; ``Checkpointer.boundary_log()`` and ``log_boundaries()`` create it.

    Args:
        memory: this rank's memory.
        engine: its own copy engine, so that boundaries do not wait for a snapshot's copies.
        plan: the schedule of captures, once it is known; None while nothing is captured.
        silent: returns whether tensors sent now are not logged (a rehearsal, a verification).
        limit_bytes: the largest size of the log; None: limited by the daemon's quota.
        replicate: whether the log has replicas on other nodes.
        communication: observes the communication of this rank; None: the rank is alone, or cannot
            be observed.
        alike: other ranks whose operators all equal those of this rank.
    Attributes:
        isolated: the ranks that run each iteration after a localized restart; None: all ranks run
            all iterations.
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
            raise ValueError(f"limit_bytes={limit_bytes}: pass a positive number of bytes, or None")
        if replicate is not True and replicate is not False:
            raise ValueError(f"replicate={replicate!r}: pass True or False")
        self._memory, self._engine, self._stats = memory, engine, stats
        self._plan, self._silent = plan, silent
        self._slots = LogMemory(memory, engine, stats, limit_bytes, replicate=replicate)
        self._layouts = make_layouts(memory.identity.metadata())
        # A hand-written pipeline may log from hooks, which run on the backward's thread.
        self._lock = threading.RLock()
        self._iteration: int | None = None
        self._fill: LogFill | None = None
        self._comparison: Comparison | None = None
        self._rounds: dict[_Where, int] = {}
        self._room, self._largest = Room(), Room()
        # A tensor was changed after it was sent: from now on copies precede all later work of the
        # device.
        self._in_order = False
        self._failures = self._skips_in_a_row = 0
        self._trouble = False  # in the current iteration
        self.given_up = False
        self.isolated: IsolatedStage | None = None
        self._communication, self._same_operators = communication, tuple(alike)
        here = recorded_facts(segment.descriptor.client for segment in memory.logs)
        self._known = memory.brought_facts or here
        self._num_values = 0

    # -- records ---------------------------------------------------------------------------------

    def activation(
        self,
        tensor: Tensor,
        *,
        micro_batch: int,
        stage: int = 0,
        index: int = 0,
        dest: int | None = None,
    ) -> bool:
        """Log an activation that is sent downstream; on CUDA, do not change it in place before the end
        of the step.

        Returns whether to send it: False while ``dest`` does not run this iteration with this rank
        (localized recovery).

        Args:
            stage: the sender's stage, if this rank has several.
            index: the number of the tensor among those sent for this micro-batch.
            dest: the rank that receives it, by one send; without it, the two ranks always recover together.
        Raises:
            ValueError: the call is outside a step of ``ckpt.steps()``, a number is negative, or the
                dtype is not supported.
        """
        return self._by_hand((SentKind.ACTIVATION, stage, micro_batch, index), tensor, dest)

    def gradient(
        self,
        tensor: Tensor,
        *,
        micro_batch: int,
        stage: int = 0,
        index: int = 0,
        dest: int | None = None,
    ) -> bool:
        """Log a gradient that is sent upstream; like ``activation``."""
        return self._by_hand((SentKind.GRADIENT, stage, micro_batch, index), tensor, dest)

    def receive_activation(
        self, buffer: Tensor, *, source: int, micro_batch: int, stage: int = 0, index: int = 0
    ) -> bool:
        """Fill ``buffer`` from the log of ``source`` if that rank does not run this iteration; returns
        True if so. Do not receive it then.

        Args:
            source: the rank that sends it, by one send.
            stage, index: the values with which the sender logged it.
        Raises:
            ValueError: a number is negative.
            CorruptionError: the log has no such activation, or one of another shape or dtype.
        """
        return self._receive((SentKind.ACTIVATION, stage, micro_batch, index), buffer, source)

    def receive_gradient(
        self, buffer: Tensor, *, source: int, micro_batch: int, stage: int = 0, index: int = 0
    ) -> bool:
        """Fill ``buffer`` with a gradient; like ``receive_activation``."""
        return self._receive((SentKind.GRADIENT, stage, micro_batch, index), buffer, source)

    def sent(
        self,
        kind: SentKind,
        stage: int,
        micro_batch: int,
        tensors: Sequence[Tensor],
        peers: Sequence[int] = (),
    ) -> None:
        """Log the tensors that a stage sends to ``peers``, in this order; never raises."""
        if self._silent():
            return
        if self._iteration is None:
            self._stats.log_outside += len(tensors)
            return
        if self._communication is not None:
            self._communication.sends(peers)
        self._record([((kind, stage, micro_batch, i), local(t)) for i, t in enumerate(tensors)])

    def receives(self, peers: Sequence[int]) -> None:
        """Record that a stage receives from each of these ranks; never raises."""
        if self._communication is not None and self._iteration is not None and not self._silent():
            self._communication.receives(peers)

    def joined(self, group: Any, why: str) -> None:
        """Record that all ranks of a process group recover together; never raises."""
        if self._communication is not None:
            self._communication.all_of(group, why)

    def aside(self) -> AbstractContextManager[None]:
        """Communication in the block does not count for the choice of ranks that recover together."""
        return nullcontext() if self._communication is None else self._communication.aside()

    def isolated_value(self, name: str) -> tuple[Any] | None:
        """The next shared value from a log, if not all ranks run this iteration; None: compute it.

        Raises:
            CorruptionError: no log that is read contains it.
        """
        if self.isolated is None or self._silent():
            return None
        return self.isolated.shared_value(name, self._num_values)

    def value(self, packed: bytes) -> None:
        """Log a shared value, with its name; never raises."""
        if self._silent() or self._iteration is None:
            return
        number, self._num_values = self._num_values, self._num_values + 1
        tensor = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        self._record([((SentKind.VALUE, 0, number, 0), tensor)])

    def _by_hand(self, where: _Where, tensor: Tensor, dest: int | None) -> bool:
        kind, stage, micro_batch, index = where
        _check_numbers(micro_batch=micro_batch, stage=stage, index=index, dest=dest or 0)
        if tensor.dtype not in SAFETENSORS_DTYPES:
            raise ValueError(
                f"log.{kind}(): the dtype {tensor.dtype} is not supported; send the tensor as another dtype"
            )
        if not self._silent() and not self.given_up:
            if self._iteration is None:
                raise ValueError(
                    f"log.{kind}() was called outside a step: call it in the body of the loop over "
                    "ckpt.steps()"
                )
            if dest is not None and self._communication is not None:
                self._communication.sends([dest])
            self._record([(where, local(tensor))])
        return dest is None or self.isolated is None or self.isolated.runs(dest)

    def _receive(self, where: _Where, buffer: Tensor, source: int) -> bool:
        kind, stage, micro_batch, index = where
        _check_numbers(source=source, micro_batch=micro_batch, stage=stage, index=index)
        # A rank that has stopped logging still reads logs: no other rank would send the tensor.
        if self._silent() or (self._iteration is None and not self.given_up):
            return False
        if self.isolated is not None and self.isolated.feed(buffer, kind, stage, micro_batch, index, source):
            return True
        self.receives([source])
        return False

    def _record(self, sent: Sequence[tuple[_Where, Tensor]]) -> None:
        """Copy these tensors to the log, or compare them with it; never raises."""
        with self._surviving(), self._lock:
            items: list[CopyItem] = []
            for where, tensor in sent:
                nth = self._rounds.get(where, 0)
                self._rounds[where] = nth + 1
                # A conjugate view has other values than its memory; copies and comparisons work on memory.
                key, data = RecordKey(*where, nth), tensor.detach().resolve_conj().resolve_neg()
                self._room.add(data.numel() * data.element_size())
                if self._comparison is not None:
                    self._comparison.add(key, data)
                elif self._fill is not None and (item := self._fill.place(key, data)) is not None:
                    items.append(item)
            if items and self._fill is not None:
                self._copy(self._fill, items)

    def _copy(self, fill: LogFill, items: Sequence[CopyItem]) -> None:
        """Start the copies. They hold references to the tensors until they end, so that their memory is
        not reused earlier.

        Some writes do not change a version counter (``x.data.mul_(…)``, a custom kernel). Therefore
        samples of the tensors are read first and compared with the finished copies
        (`ckptd.cuda.samples`). Synchronous copies need no comparison.
        """
        versions = [(i.tensor, _version(i.tensor)) for i in items]
        check = not self._in_order
        samples = None if self._engine.inline else SamplePlan(items, self._engine.device).draw(fill.iteration)
        errors: list[BaseException] = []

        def is_torn() -> bool:
            if check and any(_version(t) != v for t, v in versions):
                return True
            return samples is not None and bool(samples.unlike(fill.segment.memory.words, fill.base))

        def copied(error: BaseException | None) -> None:
            failed = error or next(iter(errors), None)
            why_not = "" if failed is None else f"copying failed: {failed}"
            if not why_not and is_torn():
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
        if self.isolated is not None:
            self.isolated.begin(step)
        all_run = self.isolated is None or self.isolated.over
        if self._communication is not None and all_run and not replaying:
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
        """End the step; never raises.

        Returns:
            The differences between a replayed step and its log. They are logged as a message, too;
                the caller decides what follows.
        """
        found = Differences()
        step = self._iteration
        if self._communication is not None:
            with self._surviving():
                self._communication.end()
        with self._surviving(), self._lock:
            self._iteration = None
            self._largest = self._largest.at_least(self._room)
            comparison, self._comparison = self._comparison, None
            if comparison is not None:
                found = comparison.end()
                self._stats.log_compared += comparison.compared
                self._stats.log_mismatches += len(found.texts)
            fill, self._fill = self._fill, None
            if fill is not None:
                self._end_fill(fill)
            if not self._trouble:
                self._failures = 0
        if found:
            self._log_differences(step, found.texts)
        return found

    def abandon(self) -> None:
        """The loop left the body early: discard the log of this step; never raises."""
        if self._communication is not None:
            self._communication.abandon()
        with self._lock:
            self._iteration = None
            self._drop_fill()

    def close(self) -> None:
        """Wait for copies in flight; the daemon keeps the log. Never raises."""
        self.abandon()
        if self._communication is not None:
            self._communication.close()
        if self.isolated is not None:
            self.isolated.close()
        self.given_up = True
        self._engine.close()

    def describe(self) -> str:
        """One line: the size of the log and its number of iterations, or the reason why there is none."""
        segment = self._slots.newest
        if segment is None:
            if self._slots.refused:
                return f"boundary log: none ({self._slots.refused})"
            return "boundary log: none yet; the first full captured step determines its size"
        total = human(self._stats.log_memory_bytes)
        more = "; replicated like snapshots" if segment.descriptor.replicated else ""
        more += f"; {self._slots.refused}" if self._slots.refused else ""
        return (
            f"boundary log: {total} for {segment.geometry.num_slots} iterations of at most "
            f"{human(segment.geometry.slot_bytes)}{more}"
        )

    def describe_domain(self) -> list[str]:
        """Lines about ranks across a boundary that recover together with this rank, if there are any."""
        facts = self._facts()
        return [] if facts is None else facts.warnings()

    def _facts(self) -> LogFacts | None:
        """The facts so far, with those of an earlier trainer: it may have observed rare communication."""
        rank = self._memory.identity.rank
        return find_facts(rank, self._communication, self._same_operators, self._known)

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
            self._skipped(fill.iteration, f"the step sent {need}, but a slot has room for {has}")
        else:
            self._skips_in_a_row = 0
        fill.end(keep=not fill.full)

    def _drop_fill(self) -> None:
        fill, self._fill, self._comparison = self._fill, None, None
        if fill is not None:
            fill.end(keep=False)

    def _finish(self, fill: LogFill) -> None:
        """All copies have arrived, on any thread: complete the log immediately, in case this process ends."""
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
        if session.connected:  # otherwise the session seals it
            session.filled(segment.generation, fill.index, fill.iteration)

    def _skipped(self, step: int, why: str) -> None:
        self._stats.log_skipped += 1
        self._skips_in_a_row += 1
        if self._skips_in_a_row & (self._skips_in_a_row - 1) == 0:
            logger.warning("iteration %d is not logged (%d in a row): %s", step, self._skips_in_a_row, why)

    def _log_differences(self, step: int | None, differences: Sequence[str]) -> None:
        shown = "; ".join(differences[:_MOST_DIFFERENCES])
        more = len(differences) - _MOST_DIFFERENCES
        text = (
            f"the replay of iteration {step} sent other tensors than its log contains: {shown}"
            f"{f'; and {more} more' if more > 0 else ''}. The model is not deterministic, or "
            "memory was corrupted"
        )
        logger.error("%s", text)
        self._memory.session.notice("error", "replay_mismatch", text)

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Keep errors of the log out of the user's loop; stop logging after several failures in a row."""
        try:
            yield
        except Exception as error:
            logger.error("logging boundaries failed", exc_info=error)
            self._stats.log_failed += 1
            self._failures, self._trouble = self._failures + 1, True
            with self._lock:
                self._drop_fill()
            if self._failures >= _FAILURES_IN_A_ROW:
                self.given_up, self._iteration = True, None
                text = f"stopped logging boundaries: {type(error).__name__}: {error}"
                logger.error("%s", text)
                self._memory.session.notice("error", "boundaries_not_logged", text)


def shared_value(name: str, compute: Callable[[], Any], tape: Tape, log: BoundaryLog | None) -> Any:
    """The result of ``compute``, or its recorded result from the first run of this step.

    Raises:
        ValueError: the value has a type that cannot be recorded.
        CorruptionError: not all ranks run this iteration, and no log that is read contains the value.
    """
    found = tape.recorded(name)
    if found is None and log is not None:
        found = log.isolated_value(name)
    if found is not None:
        value = found[0]
    else:
        with nullcontext() if log is None else log.aside():
            value = compute()
        tape.record(name, value)
    if log is not None:
        detached = value.detach() if hasattr(value, "detach") else value
        log.value(values.pack([name, detached], f"shared value {name!r}"))
    return value


def _check_numbers(**numbers: int) -> None:
    for name, number in numbers.items():
        if not 0 <= number < 10**9:
            raise ValueError(f"{name}={number}: numbers start at 0")


def _version(tensor: Any) -> int:
    """A counter that grows with every change in place; inference tensors have none."""
    return -1 if torch.is_inference(tensor) else int(tensor._version)
