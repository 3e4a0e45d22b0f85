"""Capture: one snapshot, from the top of the loop to a filled slot.

The training thread chooses the slot, gathers the step scalars and hands a prepared list of copies
to the engine; everything else happens beside it. A slot is filled when two parties have arrived:
the copies, and the model's first forward of the step, at which the random state is recorded once
more (a data iterator created in the first step of a resumed run draws from the global generators,
and replay must undo exactly that). The later one writes the image. The third party is the training
thread, which reads the sources once more when the copies are complete: at the end of a forward, or
before the optimizer's step at the latest. Until then the slot's lock is kept, so that nobody seals
what may be torn; a trainer that dies in between releases it, and what was filled is sealed without
that last look. (On a device the copies may be over only after the optimizer's step, and all three
are awaited.)

If a source changed while it was copied, the snapshot is discarded, not sealed: a torn copy must
never be recoverable. That is told by version counters and, since not every write moves one, by
samples (``ckptd.cuda.samples``): elements of each tensor are read at the top and compared with the
finished copy and with the tensor after it. All tensors that differ are known from then on to change
beside training, and are copied at once, before the top is over.
"""

from __future__ import annotations

import operator
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ckptd.client import values
from ckptd.client.capture.live_tensors import LiveSources, PackedState
from ckptd.client.daemon_link.mapped_segment import MappedSegment, SlotTable
from ckptd.client.log_lines import get_logger
from ckptd.client.model.live_state import LiveState
from ckptd.client.model.snapshot_layout import SAFETENSORS_DTYPES, PhasePlan
from ckptd.core.slots.ring import SlotState, choose_slot
from ckptd.core.slots.segment_format import SlotHeader
from ckptd.core.slots.segment_hints import RingHint
from ckptd.cuda.engine import CopyEngine, CopyItem, CopyList
from ckptd.cuda.samples import SamplePlan, Samples
from ckptd.storage.images.image import ImageView
from ckptd.storage.images.image_format import ImageError

if TYPE_CHECKING:
    from ckptd.client.stats import Stats

__all__ = [
    "SMALL_BUFFER_BYTES",
    "Capture",
    "CopySplit",
    "Fill",
    "nan_tensors",
    "some",
    "write_image",
    "zero_missing",
]

logger = get_logger(__name__)


_DRAIN_S = 1.0
# Buffers up to this size are copied by the training thread: a native kernel may change them in the
# forward without counting up their version (batch norm does), so that a copy beside it could be
# torn and nobody would notice.
SMALL_BUFFER_BYTES = 1 << 20


def write_image(
    segment: MappedSegment, index: int, plan: PhasePlan, header: SlotHeader, packed: bytes
) -> None:
    """Complete an image whose tensors are in their places, with its step scalars, and declare its
    slot filled.
    """
    slot = segment.slot(index)[: plan.layout.image_len]
    slot[plan.scalars_offset : plan.scalars_offset + len(packed)] = packed
    slot[plan.static_offset : plan.static_offset + len(plan.static)] = plan.static
    plan.layout.write_header(
        slot, iteration=header.iteration, previous=header.previous, scalars_len=len(packed)
    )
    filled = replace(header, state=SlotState.FILLED, filled_at_ns=time.time_ns())
    segment.write_header(index, filled)


def zero_missing(segment: MappedSegment, index: int, plan: PhasePlan, missing: Sequence[int]) -> None:
    """State that does not exist yet is recorded as absent; its bytes are zero, not those of an
    older image.
    """
    base = segment.slot_base(index)
    for i in missing:
        start = base + plan.offsets[i]
        segment.memory.tensor[start : start + plan.layout.entries[i].nbytes].zero_()


class Fill:
    """A snapshot in the making: the slot it goes to, and who has yet to arrive.

    ``split``: what is copied. ``samples``: elements of it, to tell whether it was torn. Both come
    before the copies begin.
    """

    split: CopySplit
    samples: Samples

    def __init__(
        self,
        segment: MappedSegment,
        index: int,
        plan: PhasePlan,
        header: SlotHeader,
        scalars: dict[str, Any],
        awaited: set[str],
    ) -> None:
        self.segment, self.index, self.plan, self.header, self.scalars = (
            segment,
            index,
            plan,
            header,
            scalars,
        )
        self.versions: list[tuple[Tensor, int, str]] = []
        # Names of what was written to before the optimizer's step; and of what was, though it was
        # copied at the top.
        self.changed: set[str] = set()
        self.changed_at_once: set[str] = set()
        self.error: BaseException | None = None
        self.looked = False  # the sources have been looked at for the last time
        self.declared: bool | None = None  # whether an image was made of it; None: not tried yet
        self.finishing = threading.Lock()
        self._told = False
        self._lock = threading.Lock()
        self._awaited = awaited

    @property
    def torn(self) -> bool:
        return bool(self.changed or self.changed_at_once)

    @property
    def key(self) -> tuple[int, int]:
        return self.segment.generation, self.index

    def arrive(self, party: str) -> set[str] | None:
        """Note an arrival; who is still awaited, or None if it was noted before."""
        with self._lock:
            if party not in self._awaited:
                return None
            self._awaited.discard(party)
            return set(self._awaited)

    def tell(self) -> bool:
        """True for the one that is to tell that nothing comes of it."""
        with self._lock:
            told, self._told = self._told, True
            return not told

    def is_copied(self) -> bool:
        """True once the copies are complete and compared with the samples of the top."""
        with self._lock:
            return "copies" not in self._awaited

    def check_versions(self) -> None:
        self.changed |= {name for tensor, version, name in self.versions if tensor._version != version}

    def check_copy(self) -> None:
        """Whether the copy holds what was sampled at the top."""
        image = self.segment.memory.words
        changed, at_once = self.split.names_of(self.samples.unlike(image, self.segment.slot_base(self.index)))
        self.changed |= changed
        self.changed_at_once |= at_once

    def check_sources(self) -> None:
        """Whether the sources do, now that they have been sampled again. What was copied at once
        may have changed since.
        """
        self.changed |= self.split.names_of(self.samples.changed())[0]


class CopySplit:
    """One phase's copies: those that run beside training, and those of restless tensors, which do
    not; kept while they are the same.

    ``steady`` and ``restless`` are the two kinds, ``watched`` the tensors of the first with their
    names; ``packed_at_once``: packed state is of the second.
    """

    def __init__(
        self, sources: LiveSources, items: CopyList, packed: list[PackedState], at_once: set[str]
    ) -> None:
        named = sources.named
        self._items, self._at_once, self._packed = items, at_once, packed
        # By address: what has another name, too, is the same memory.
        addresses = {t.data_ptr() for t, name in named if name in at_once}
        kinds = [t.data_ptr() in addresses for t, _ in named]
        pairs = list(zip(items, named, kinds, strict=True))
        self.steady = CopyList(item for item, _, is_restless in pairs if not is_restless)
        self.restless = CopyList(item for item, _, is_restless in pairs if is_restless)
        self.watched = [of for _, of, is_restless in pairs if not is_restless]
        apart = sources.packed_separately(packed)
        self.packed_at_once = any(name in at_once for _, name in apart)
        self._names = [name for _, name in self.watched] + [name for _, name in apart]
        self._num_beside = len(self.watched if self.packed_at_once else self._names)
        self._names += [name for _, (_, name), is_restless in pairs if is_restless]
        self._sampled = [*self.steady, *(item for item, _ in apart), *self.restless]
        self._plan: SamplePlan | None = None

    def is_of(self, items: CopyList, packed: list[PackedState], at_once: set[str]) -> bool:
        """Whether it is the split of these."""
        return (
            self._items is items
            and self._at_once == at_once
            and all(
                all(map(operator.is_, mine.values, now.values))
                for mine, now in zip(self._packed, packed, strict=True)
            )
        )

    def sample(self, number: int, engine: CopyEngine) -> Samples:
        """Which elements are sampled in snapshot ``number``."""
        if self._plan is None:
            self._plan = SamplePlan(self._sampled, engine.device)
            self._sampled = []
        # `LiveSources.items` has just asked each of them where it is, and would have made others.
        return self._plan.draw(number, in_place=len(self.steady))

    def names_of(self, numbers: Iterable[int]) -> tuple[set[str], set[str]]:
        """The names of what is sampled: of what is copied beside training, and of what is copied at once."""
        beside = {self._names[n] for n in numbers if n < self._num_beside}
        return beside, {self._names[n] for n in numbers if n >= self._num_beside}


class Desk(Protocol):
    """The session with the daemon, as far as snapshots need it."""

    @property
    def connected(self) -> bool:
        """Whether the daemon is there: while it is away, it cannot tell what the other ranks still need."""
        ...

    def submit(self, work: Callable[[], Any]) -> bool:
        """Run a closure off the training thread; False if it cannot be taken."""
        ...

    def flush(self, timeout_s: float) -> object:
        """Wait until what was submitted is done, at most so many seconds."""
        ...


class Capture:
    """Fills slots, one at a time.

    Args:
        binding: where the live tensors are.
        table: this rank's segments; the newest generation is filled.
        engine: copies for the device of the parameters.
        num_operators: how many operators a suffix must cover.
        stats: counters to keep.
        session: does the work that is not for the training thread.
        filled: called, off the training thread, when a slot is filled.
        restless: names of what is known to change before the optimizer's step (large buffers that a
            forward updates, what user code writes to); added to.
    """

    def __init__(
        self,
        binding: LiveState,
        table: SlotTable,
        engine: CopyEngine,
        session: Desk,
        *,
        num_operators: int,
        stats: Stats,
        filled: Callable[[MappedSegment, int, int], None],
        restless: set[str],
    ) -> None:
        self._binding, self._table, self._engine = binding, table, engine
        self._num_operators, self._stats = num_operators, stats
        self._session, self._filled = session, filled
        self._fill: Fill | None = None
        self._sequence = table.next_sequence()
        self._sources: dict[int, LiveSources] = {}
        self._splits: dict[int, CopySplit] = {}
        # Buffers seen to change while they were copied are copied by the training thread instead.
        self._restless = restless
        self._small = {
            name
            for name, buffer in binding.buffers().items()
            if buffer.numel() * buffer.element_size() <= SMALL_BUFFER_BYTES
        }
        self._hopeless: set[str] = set()
        # Slots that may be declared filled, and are not to be sealed yet.
        self._unsettled: set[tuple[int, int]] = set()
        self._claimed: tuple[MappedSegment, int] | None = None
        self._broken = False
        self._sealing_s = 0.0
        self.need_generation = ""
        self.outgrown = 0
        # The ring was filled up by what the other ranks need: the next snapshot may find no slot.
        self.crowded = False

    def begin(self, step: int, plan: PhasePlan, previous: int, scalars: dict[str, Any]) -> bool:
        """Start the snapshot of ``step``; False if no slot can be had (``need_generation`` may say why)."""
        self.settle()
        segment = self._table.segments[-1]
        if plan.layout.image_len > segment.geometry.slot_bytes:
            self._stats.no_slot += 1
            self.need_generation = (
                f"a snapshot of {plan.layout.image_len} bytes does not fit "
                f"slots of {segment.geometry.slot_bytes}"
            )
            return False
        index = self._claim(segment)
        if index is None:
            return False
        header = SlotHeader(
            state=SlotState.FILLING,
            iteration=step,
            previous=previous,
            image_len=plan.layout.image_len,
            sequence=self._sequence,
            layout_id=plan.layout.layout_id,
            writer_pid=os.getpid(),
            phase=plan.phase,
            epoch=self._table.epoch,
            epoch_start=self._table.epoch_start,
        )
        self._sequence += 1
        self._claimed = segment, index
        segment.begin_filling(index, header)
        mask = sum(1 << i for i in plan.anchored)
        self._table.note_anchors(segment.generation, index, header.sequence, mask)
        # Only the training thread can say whether a source changed too early: it has made what it
        # has changed.
        fill = Fill(segment, index, plan, header, scalars, {"copies", "forward", "sources"})
        split, late, at_once = self._items(plan, fill)
        self._engine.read(fill.samples, lambda error: self._sampled(fill, error))
        self._fill = fill
        self._claimed = None
        self._unsettled.add(fill.key)
        self._engine.begin(
            split.steady,
            segment.memory,
            segment.slot_base(index),
            lambda error: self._copied(fill, error),
            late,
            at_once,
        )
        if self._engine.inline:
            self._look(fill)  # what the training thread changes from here on is no matter
        return True

    def abort(self) -> None:
        """Give up the slot that was claimed, if its copy has not begun; wait for one that has."""
        claimed, self._claimed = self._claimed, None
        self.settle()
        if claimed is not None:
            segment, index = claimed
            segment.set_state(index, SlotState.FREE)
            segment.unlock_slot(index)

    def take_broken(self) -> bool:
        """Whether a snapshot that was begun came to nothing since the last call: the chain is
        broken there.
        """
        broken, self._broken = self._broken, False
        return broken

    def take_sealing_s(self) -> float:
        """Seconds since the last call that the training thread spent on sealing what the daemon had
        not come to.
        """
        taken, self._sealing_s = self._sealing_s, 0.0
        return taken

    def first_forward(self, rng: Callable[[], dict[str, Any]]) -> None:
        """The step's first forward of the model is about to run (training thread)."""
        fill = self._fill
        if fill is not None and "rng_forward" not in fill.scalars and "forward" in fill._awaited:
            fill.scalars["rng_forward"] = rng()
            self._arrive(fill, "forward")

    def forward_ended(self) -> None:
        """A forward of the model is over (training thread).

        If the copies are complete, nothing that the step still writes can tear them: the sources
        are read now, so that the snapshot is sealed and replicated while the step goes on. A host
        that is ahead of its device leaves them to `settle`.
        """
        fill = self._fill
        if fill is not None and self._engine.host_waits and fill.is_copied():
            self._look(fill)

    def settle(self) -> float:
        """Wait until the sources may change again; returns the seconds waited (training thread)."""
        fill = self._fill
        if fill is None:
            return 0.0
        waited = self._engine.wait()
        started = time.perf_counter()
        self._look(fill)
        if self._engine.host_waits:
            waited += time.perf_counter() - started
        # A step without a forward of the model has nothing more to record.
        self._arrive(fill, "forward")
        self._fill = None
        if self._engine.host_waits:  # everything is known; else it will be
            self._tell(fill)
        return waited

    def _look(self, fill: Fill) -> None:
        """The copies are complete, or later device work is ordered after them: what do the sources
        hold now? (training thread)
        """
        if fill.looked:
            return
        fill.looked = True
        if not self._engine.host_waits:
            fill.check_versions()

        def seen(error: BaseException | None) -> None:
            self._sampled(fill, error)
            self._check(fill, fill.check_sources)
            self._arrive(fill, "sources")

        self._engine.read(fill.samples, seen)

    # -- beside the training thread --------------------------------------------------------------

    @staticmethod
    def _sampled(fill: Fill, error: BaseException | None) -> None:
        fill.error = fill.error or error

    def _copied(self, fill: Fill, error: BaseException | None) -> None:
        fill.error = fill.error or error
        if self._engine.host_waits:
            fill.check_versions()
        if fill.error is None:
            self._check(fill, fill.check_copy)
        self._arrive(fill, "copies")

    @staticmethod
    def _check(fill: Fill, check: Callable[[], None]) -> None:
        try:
            check()
        except Exception as error:  # noqa: BLE001 - see the next line
            # A snapshot that could not be checked is none; its slot must be given back.
            fill.error = fill.error or error

    def _arrive(self, fill: Fill, party: str) -> None:
        left = fill.arrive(party)
        if left == set():
            work = self._complete
        elif left == {"sources"} and self._engine.host_waits:
            work = self._declare
        else:
            return
        if not self._session.submit(lambda: work(fill)):
            work(fill)

    def _declare(self, fill: Fill) -> None:
        """Write the image, and declare the slot filled; it stays locked."""
        with fill.finishing:
            if fill.declared is None:
                fill.declared = fill.error is None and not fill.torn and self._write_image(fill)

    def _complete(self, fill: Fill) -> None:
        """Give the slot to whoever seals it; or free it, if what was copied cannot be used."""
        self._declare(fill)
        self._tell(fill)  # a device may tell only now
        usable = bool(fill.declared) and fill.error is None and not fill.torn
        if not usable:
            fill.segment.set_state(fill.index, SlotState.FREE)
        fill.segment.unlock_slot(fill.index)
        self._unsettled.discard(fill.key)
        if usable:
            self._stats.snapshots += 1
            self._stats.snapshot_bytes = fill.plan.layout.image_len
            if self._engine.last_copy_s:
                self._stats.capture_gb_per_s = fill.plan.layout.image_len / self._engine.last_copy_s / 1e9
            self._filled(fill.segment, fill.index, fill.header.iteration)

    def _tell(self, fill: Fill) -> None:
        """Say why nothing comes of a snapshot, once: told again after the chain has begun anew, it
        would break that, too.
        """
        if (fill.error is None and not fill.torn) or not fill.tell():
            return
        step = fill.header.iteration
        if fill.error is not None:
            logger.error("snapshot of step %d failed while copying: %s", step, fill.error)
            self._stats.failed += 1
        else:
            self._stats.torn += 1
            self._learn(step, fill)
        self._broken = True

    def _learn(self, step: int, fill: Fill) -> None:
        """What changed beside training is copied at once from now on. What changed all the same
        cannot be helped.
        """
        if fill.changed:
            self._restless |= fill.changed
            logger.warning(
                "snapshot of step %d discarded: %s changed before the optimizer's step, while it "
                "may be copied; from now on the "
                "training thread copies it at the top of each step, which takes longer. The usual "
                "cause is a write between the top and "
                "optimizer.step(), such as weight decay by p.data.mul_(): do it after "
                "optimizer.step(), or in the optimizer",
                step,
                some(fill.changed),
            )
        hopeless = fill.changed_at_once - self._hopeless
        if hopeless:
            self._hopeless |= hopeless
            logger.error(
                "snapshot of step %d discarded: %s changed while the training thread copied it, so "
                "another thread writes to it. There "
                "can be no snapshot of a step at whose top that happens: let the thread wait for "
                "the training loop",
                step,
                some(hopeless),
            )

    def _write_image(self, fill: Fill) -> bool:
        plan = fill.plan
        try:
            packed = values.pack(fill.scalars, "step scalars")
            if len(packed) > plan.scalars_capacity:
                self.outgrown = len(packed)
                return self._refuse(
                    fill,
                    f"step scalars grew to {len(packed)} bytes, {plan.scalars_capacity} are reserved",
                )
            write_image(fill.segment, fill.index, plan, fill.header, packed)
        except values.UnsupportedValue as error:
            return self._refuse(fill, str(error))
        except Exception as error:  # noqa: BLE001 - see the next line
            # The slot must be given back whatever was wrong with its content.
            return self._refuse(fill, f"{type(error).__name__}: {error}")
        return True

    def _refuse(self, fill: Fill, reason: str) -> bool:
        logger.error("snapshot of step %d dropped: %s", fill.header.iteration, reason)
        self._stats.failed += 1
        self._broken = True
        return False

    # -- choosing --------------------------------------------------------------------------------

    def _claim(self, segment: MappedSegment) -> int | None:
        busy: set[tuple[int, int]] = set()
        drained = False
        self.need_generation = ""
        for _ in range(segment.geometry.num_slots + 2):
            told = hard, _ = self._told()
            records, taken = self._table.records(), busy | self._unsettled
            choice = choose_slot(
                records,
                self._num_operators,
                busy=taken,
                generation=segment.generation,
                protected=self._table.promised(records, self._num_operators, hard=hard),
                hard=hard,
                epochs=self._table.epochs,
            )
            if choice.index is None:
                waiting = [
                    r for r in records if r.state is SlotState.FILLED and (r.generation, r.index) not in taken
                ]
                if waiting:
                    # The daemon is away or behind. Sealing takes milliseconds; a broken chain would
                    # cost a window.
                    oldest = min(waiting, key=lambda r: r.sequence)
                    started = time.perf_counter()
                    self._table.segment(oldest.generation).seal(oldest.index)
                    self._sealing_s += time.perf_counter() - started
                    self._stats.sealed_here += 1
                    continue
                if not drained and (self._unsettled or any(r.state is SlotState.FILLING for r in records)):
                    # Steps shorter than a thread switch outrun whoever finishes the snapshots: let
                    # it catch up.
                    drained = True
                    self._session.flush(_DRAIN_S)
                    continue
                self._stats.no_slot += 1
                self.need_generation = choice.reason
                return None
            if segment.try_lock_slot(choice.index):
                # A daemon that promises something from here on sees the lock (`Run._secured`); what
                # it wrote down before is read now.
                now = self._told()
                if now != told and now[0]:
                    segment.unlock_slot(choice.index)
                    continue
                self._stats.floor_overrides += choice.overrides_floor
                self.crowded = hard and not choice.left
                return choice.index
            busy.add((segment.generation, choice.index))
        self._stats.no_slot += 1
        self.need_generation = "every slot is being read"
        return None

    def _told(self) -> tuple[bool, RingHint]:
        """Whether what is promised must stay, and what that is; how far others are behind does not
        matter for it.
        """
        hard = self._table.is_hard(connected=self._session.connected)
        return hard, self._table.ring_hint._replace(behind=0)

    # -- sources ---------------------------------------------------------------------------------

    def _items(
        self, plan: PhasePlan, fill: Fill
    ) -> tuple[CopySplit, Callable[[], list[CopyItem]], list[CopyItem]]:
        """What is copied beside training; what of that is made later; and what is copied here and
        now, for it is restless.
        """
        sources = self._sources.get(plan.phase)
        if sources is None or sources.plan is not plan:
            sources = self._sources[plan.phase] = LiveSources(self._binding, plan)
        items, packed = sources.items(), sources.packed_now()
        fill.scalars["absent"] = sources.absent
        zero_missing(fill.segment, fill.index, plan, sources.missing())
        at_once = self._restless | self._small
        split = self._splits.get(plan.phase)
        if split is None or not split.is_of(items, packed, at_once):
            split = self._splits[plan.phase] = CopySplit(sources, items, packed, at_once)
        fill.versions = [(t, t._version, n) for t, n in split.watched]
        fill.split, fill.samples = split, split.sample(fill.header.sequence, self._engine)
        if split.packed_at_once:
            return split, list, [*split.restless, *sources.packed_items(packed)]
        return split, lambda: sources.packed_items(packed), split.restless


def some(names: set[str], most: int = 3) -> str:
    """The first names, and how many there are more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(sorted(names)[:most]) + more


_FLOATS = {
    name: dtype
    for dtype, name in SAFETENSORS_DTYPES.items()
    if dtype.is_floating_point and dtype.itemsize > 1
}

# Read as integers, positive NaNs are what exceeds +inf as signed, negative ones what exceeds -inf
# as unsigned.
_SIGNED = {2: np.int16, 4: np.int32, 8: np.int64}
_UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}
_INFINITY = {
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF0000000000000,
}
_CHUNK_BYTES = 256 << 10  # stays in a core's cache for the second look


def nan_tensors(segment: MappedSegment, index: int) -> list[str]:
    """Names of the weights in this slot that hold at least one NaN; empty if the slot was reused
    meanwhile.
    """
    header = segment.header(index)
    if header is None:
        return []
    try:
        view = ImageView(segment.slot(index)[: header.image_len])
    except ImageError:
        return []  # being overwritten: there is nothing to look at any more
    found = []
    for entry in view:
        dtype = _FLOATS.get(entry.dtype)
        if dtype is None or entry.name.startswith(("optim/", "buffer/", "ckptd.")) or not entry.nbytes:
            continue
        if dtype in _INFINITY and _holds_nan(view.data(entry.name), dtype):
            found.append(entry.name)
    now = segment.header(index)
    return found if now is not None and now.sequence == header.sequence else []


def _holds_nan(data: memoryview, dtype: torch.dtype) -> bool:
    # numpy, not torch: a second OpenMP team in this process makes the trainer's threads sleep at
    # every barrier.
    infinity, size = _INFINITY[dtype], dtype.itemsize
    negative_infinity = infinity | 1 << (8 * size - 1)
    for start in range(0, len(data), _CHUNK_BYTES):
        part = data[start : start + _CHUNK_BYTES]
        if (
            int(np.frombuffer(part, _SIGNED[size]).max()) > infinity
            or int(np.frombuffer(part, _UNSIGNED[size]).max()) > negative_infinity
        ):
            return True
    return False
