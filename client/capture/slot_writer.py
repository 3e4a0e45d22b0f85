"""Captures one snapshot: from the top of the loop to a filled slot.

The training thread claims a slot, gathers the step scalars and hands prepared copies to the engine;
everything else happens beside it. Three parties complete a snapshot:

* ``copies``: the engine has copied all tensors, and the copy holds the samples of the top;
* ``forward``: the model's first forward of the step begins, at which the random state is recorded once
  more (a data iterator created in the first step of a resumed run draws from the global generators, and
  replay must undo exactly that);
* ``sources``: the training thread has sampled the sources again, after the copies are complete: at the
  end of a forward, or before the optimizer's step at the latest.

The slot is declared filled once the first two have arrived, and its lock is kept until the third, so
that nobody seals what may be torn. A trainer that dies in between releases the lock, and the daemon
seals the slot without the last look. (On a device the copies may end only after the optimizer's step;
then all three come first.)

If a source changed while it was copied, the snapshot is discarded, not sealed: a torn copy must never
be recoverable. Version counters tell, and since not every write moves one, samples (``ckptd.cuda.samples``):
elements of each tensor are read at the top and compared with the finished copy and with the tensor
after it. From then on all tensors that differ are copied at once, before the top is over.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckptd.client import values
from ckptd.client.capture.gradient_recorder import GradientCopy
from ckptd.client.capture.live_tensors import CopySplit, LiveSources
from ckptd.client.daemon_link.mapped_segment import MappedSegment, SlotTable
from ckptd.client.daemon_link.session import Session
from ckptd.client.log_lines import get_logger
from ckptd.client.model.live_state import LiveState
from ckptd.client.model.snapshot_layout import SAFETENSORS_DTYPES, PhasePlan
from ckptd.core.slots.ring import choose_slot
from ckptd.core.slots.segment_format import RingHint, SlotHeader
from ckptd.core.slots.slots import SlotRecord, SlotState
from ckptd.cuda.engine import CopyEngine, CopyItem
from ckptd.cuda.samples import Samples
from ckptd.storage.image import ImageView
from ckptd.storage.image_format import ImageError
from ckptd.units import first_of

if TYPE_CHECKING:
    from ckptd.client.stats import Stats

logger = get_logger(__name__)

_DRAIN_S = 1.0
# A slot as large takes one thread longer to seal than the daemon's threads, which are waited for so long.
_WORTH_WAITING_BYTES = 64 << 20
_SEALING_PATIENCE_S, _SEALING_PAUSE_S = 2.0, 60.0
_LOOK_S = 0.5e-3
_NAMED = 3
# The training thread copies buffers up to this size: a native kernel may change them in the forward
# without incrementing their version (batch norm does), and a torn copy would go unnoticed.
SMALL_BUFFER_BYTES = 1 << 20


def write_image(
    segment: MappedSegment, index: int, plan: PhasePlan, header: SlotHeader, packed: bytes
) -> None:
    """Complete an image whose tensors are in place with its step scalars, and declare its slot filled."""
    slot = segment.slot(index)[: plan.layout.image_len]
    slot[plan.scalars_offset : plan.scalars_offset + len(packed)] = packed
    slot[plan.static_offset : plan.static_offset + len(plan.static)] = plan.static
    plan.layout.write_header(
        slot, iteration=header.iteration, previous=header.previous, scalars_len=len(packed)
    )
    filled = replace(header, state=SlotState.FILLED, filled_at_ns=time.time_ns())
    segment.write_header(index, filled)


def zero_missing(segment: MappedSegment, index: int, plan: PhasePlan, missing: Sequence[int]) -> None:
    """Zero the bytes of state that does not exist yet, which an older image left there."""
    base = segment.slot_base(index)
    for i in missing:
        start = base + plan.offsets[i]
        segment.memory.tensor[start : start + plan.layout.entries[i].nbytes].zero_()


@dataclass(eq=False)
class Fill:
    """A snapshot that is not complete yet: its slot, and the parties that have not arrived."""

    segment: MappedSegment
    index: int
    plan: PhasePlan
    header: SlotHeader
    scalars: dict[str, Any]
    split: CopySplit = field(init=False)
    samples: Samples = field(init=False)
    versions: list[int] = field(init=False)
    """Of what is copied beside training, at the top."""
    changed: set[str] = field(default_factory=set)
    """Names of tensors that were written before the optimizer's step."""
    changed_at_once: set[str] = field(default_factory=set)
    """The same of tensors that were copied at the top."""
    gradients: GradientCopy | None = None
    """What peers need to compute this snapshot from the one before."""
    error: BaseException | None = None
    looked: bool = False
    """True once the sources have been sampled for the last time."""
    declared: bool | None = None
    """Whether the image was written; None: not tried yet."""
    finishing: threading.Lock = field(default_factory=threading.Lock)
    _reported: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    # "sources" is a party of its own: only the training thread can say whether a source changed too early,
    # because it has finished what it has changed.
    _awaited: set[str] = field(default_factory=lambda: {"copies", "forward", "sources"})

    @property
    def torn(self) -> bool:
        return bool(self.changed or self.changed_at_once)

    @property
    def usable(self) -> bool:
        return self.error is None and not self.torn

    @property
    def key(self) -> tuple[int, int]:
        return self.segment.generation, self.index

    def arrive(self, party: str) -> set[str] | None:
        """Note an arrival; returns the parties still awaited, or None if it was noted before."""
        with self._lock:
            if party not in self._awaited:
                return None
            self._awaited.discard(party)
            return set(self._awaited)

    def awaits(self, party: str) -> bool:
        with self._lock:
            return party in self._awaited

    def first_report(self) -> bool:
        """True for the first caller, which reports the failure."""
        with self._lock:
            reported, self._reported = self._reported, True
            return not reported

    def check_versions(self) -> None:
        self.changed |= self.split.written(self.versions)

    def check_copy(self) -> None:
        """Compare the copy with the samples of the top."""
        image = self.segment.memory.words
        changed, at_once = self.split.names_of(self.samples.unlike(image, self.segment.slot_base(self.index)))
        self.changed |= changed
        self.changed_at_once |= at_once

    def check_sources(self) -> None:
        """Compare the sources, sampled again, with the top. Those copied at once may have changed since."""
        self.changed |= self.split.names_of(self.samples.changed())[0]


class Capture:
    """Fills slots, one at a time.

    Args:
        table: this rank's segments; the newest generation is filled.
        engine: copies for the device of the parameters.
        num_operators: the operators that a suffix must cover.
        filled: called, off the training thread, when a slot is filled.
        restless: names of tensors known to change before the optimizer's step (large buffers that a
            forward updates, tensors that user code writes to); added to.

    Attributes:
        need_generation: why the last ``begin`` found no slot.
        outgrown: the size of step scalars that did not fit; 0 if all did.
        crowded: True if the other ranks need the rest of the ring: the next snapshot may find no slot.
        seal_s: what the daemon took to seal the newest sealed slot, which had waited for it; 0: it had not.
    """

    def __init__(
        self,
        binding: LiveState,
        table: SlotTable,
        engine: CopyEngine,
        session: Session,
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
        self._prepared: tuple[LiveSources, CopySplit] | None = None
        self._replaced: object = None
        self._restless = restless
        self._small = {
            name
            for name, buffer in binding.buffers().items()
            if buffer.numel() * buffer.element_size() <= SMALL_BUFFER_BYTES
        }
        self._hopeless: set[str] = set()
        # Slots that may be declared filled, and must not be sealed yet.
        self._unsettled: set[tuple[int, int]] = set()
        self._newest_sealed = -1
        self._waits_again_at = 0.0
        self._claimed: tuple[MappedSegment, int] | None = None
        self._broken = False
        self._sealing_s = 0.0
        self.need_generation = ""
        self.outgrown = 0
        self.crowded = False
        self.seal_s = 0.0

    def prepare(self, plan: PhasePlan) -> None:
        """Plan beside training the copies of a snapshot under ``plan``: its `begin` only looks again."""
        sources = LiveSources(self._binding, plan)
        items = sources.prepare()
        split = CopySplit(sources, items, sources.packed_now(), self._restless | self._small)
        split.sample(0, self._engine)  # which plans the samples
        self._engine.prepare(split.steady, self._table.segments[-1].memory)
        self._prepared, self._replaced = (sources, split), None

    def begin(
        self,
        step: int,
        plan: PhasePlan,
        previous: int,
        scalars: dict[str, Any],
        gradients: GradientCopy | None = None,
    ) -> bool:
        """Start the snapshot of ``step``; False if no slot can be had (see ``need_generation``)."""
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
        fill = Fill(segment, index, plan, header, scalars, gradients=gradients)
        late, at_once = self._items(plan, fill)
        if gradients is not None and gradients.at_once:
            at_once = [*at_once, *gradients.items()]
        elif gradients is not None:
            late = _both(late, gradients)
        self._engine.read(fill.samples, lambda error: self._sampled(fill, error))
        self._fill = fill
        self._claimed = None
        self._unsettled.add(fill.key)
        self._engine.begin(
            fill.split.steady,
            segment.memory,
            segment.slot_base(index),
            lambda error: self._copied(fill, error),
            late,
            at_once,
        )
        if self._engine.inline:
            self._look(fill)  # what the training thread changes from here on does not matter
        return True

    def _items(self, plan: PhasePlan, fill: Fill) -> tuple[Callable[[], list[CopyItem]], Sequence[CopyItem]]:
        """Resolve the sources of ``fill``; returns copies to make later, and those to make at once."""
        started, sources = time.perf_counter(), self._sources.get(plan.phase)
        is_new = sources is None or sources.plan is not plan
        if sources is None or is_new:
            sources = self._new_sources(plan)
        items, packed = sources.items(), sources.packed_now()
        fill.scalars["absent"] = sources.absent
        zero_missing(fill.segment, fill.index, plan, sources.missing())
        at_once = self._restless | self._small
        split = self._splits.get(plan.phase)
        if split is None or not split.is_of(items, packed, at_once):
            split = self._splits[plan.phase] = CopySplit(sources, items, packed, at_once)
        fill.split, fill.versions = split, split.versions()
        fill.samples = split.sample(fill.header.sequence, self._engine)
        if is_new:
            self._stats.copy_plans_ms += (time.perf_counter() - started) * 1e3
        if split.packed_at_once:
            return list, [*split.restless, *sources.packed_items(packed)]
        return lambda: sources.packed_items(packed), split.restless

    def _new_sources(self, plan: PhasePlan) -> LiveSources:
        found, prepared = LiveSources(self._binding, plan), self._prepared
        if prepared is not None and prepared[0].plan is plan:
            # Those of before are freed at the next preparation: they are thousands of objects.
            self._replaced = self._sources.get(plan.phase), self._splits.get(plan.phase)
            found, self._splits[plan.phase] = prepared
        self._sources[plan.phase] = found
        return found

    def abort(self) -> None:
        """Give up a claimed slot whose copy has not begun; wait for one that has."""
        claimed, self._claimed = self._claimed, None
        self.settle()
        if claimed is not None:
            segment, index = claimed
            segment.set_state(index, SlotState.FREE)
            segment.unlock_slot(index)

    def take_broken(self) -> bool:
        """True if a snapshot failed after its begin since the last call, which breaks the chain."""
        broken, self._broken = self._broken, False
        return broken

    def take_sealing_s(self) -> float:
        """Seconds since the last call for which the training thread sealed slots or waited for the daemon."""
        taken, self._sealing_s = self._sealing_s, 0.0
        return taken

    # -- training thread -------------------------------------------------------------------------

    def first_forward(self, rng: Callable[[], dict[str, Any]]) -> None:
        """The step's first forward of the model begins."""
        fill = self._fill
        if fill is not None and "rng_forward" not in fill.scalars and fill.awaits("forward"):
            fill.scalars["rng_forward"] = rng()
            self._arrive(fill, "forward")

    def forward_ended(self) -> None:
        """A forward of the model ended.

        If the copies are complete, no later write of the step can tear them: the sources are sampled
        now, so that the snapshot is sealed and replicated while the step continues. A host that is
        ahead of its device leaves them to `settle`.
        """
        fill = self._fill
        if fill is not None and self._engine.host_waits and not fill.awaits("copies"):
            self._look(fill)

    def settle(self) -> float:
        """Wait until the sources may change again; returns the seconds waited."""
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
            self._report_failure(fill)
        return waited

    def _look(self, fill: Fill) -> None:
        """Sample the sources: the copies are complete, or later device work is ordered after them."""
        if fill.looked:
            return
        fill.looked = True
        if not self._engine.host_waits:
            fill.check_versions()

        def sampled(error: BaseException | None) -> None:
            self._sampled(fill, error)
            self._check(fill, fill.check_sources)
            self._arrive(fill, "sources")

        self._engine.read(fill.samples, sampled)

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
            if fill.gradients is not None:
                fill.gradients.copied()
        self._arrive(fill, "copies")

    @staticmethod
    def _check(fill: Fill, check: Callable[[], None]) -> None:
        try:
            check()
        except Exception as error:  # noqa: BLE001 - see the next line
            # An unchecked snapshot does not count; its slot must be given back.
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
        """Write the image and declare the slot filled; it stays locked."""
        with fill.finishing:
            if fill.declared is None:
                fill.declared = fill.usable and self._write_image(fill)

    def _complete(self, fill: Fill) -> None:
        """Unlock the slot for sealing; or free it, if the copy cannot be used."""
        self._declare(fill)
        self._report_failure(fill)  # of a device it may be known only now
        usable = bool(fill.declared) and fill.usable
        if not usable:
            fill.segment.set_state(fill.index, SlotState.FREE)
        fill.segment.unlock_slot(fill.index)
        self._unsettled.discard(fill.key)
        if usable:
            self._stats.snapshots += 1
            self._stats.snapshot_bytes = fill.plan.layout.image_len
            self._stats.snapshot_step = fill.header.iteration
            self._stats.captured_bytes += fill.plan.layout.image_len
            if self._engine.last_copy_s:
                self._stats.capture_gb_per_s = fill.plan.layout.image_len / self._engine.last_copy_s / 1e9
            self._filled(fill.segment, fill.index, fill.header.iteration)

    def _report_failure(self, fill: Fill) -> None:
        """Log why a snapshot failed, once: again after the chain has begun anew, it would break that, too."""
        if fill.usable or not fill.first_report():
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
        """From now on copy at once what changed beside training; what changed all the same has no remedy."""
        if fill.changed:
            self._restless |= fill.changed
            logger.warning(
                "snapshot of step %d discarded: %s changed before the optimizer's step, while it may be "
                "copied; from now on the training thread copies it at the top of each step, which takes "
                "longer. The usual cause is a write between the top and optimizer.step(), such as weight "
                "decay by p.data.mul_(): do it after optimizer.step(), or in the optimizer",
                step,
                first_of(sorted(fill.changed), _NAMED),
            )
        hopeless = fill.changed_at_once - self._hopeless
        if hopeless:
            self._hopeless |= hopeless
            logger.error(
                "snapshot of step %d discarded: %s changed while the training thread copied it, so "
                "another thread writes to it. There can be no snapshot of a step at whose top that "
                "happens: let the thread wait for the training loop",
                step,
                first_of(sorted(hopeless), _NAMED),
            )

    def _write_image(self, fill: Fill) -> bool:
        plan, reason = fill.plan, ""
        try:
            packed = values.pack(fill.scalars, "step scalars")
            if len(packed) <= plan.scalars_capacity:
                if fill.gradients is not None:
                    slot, header = fill.segment.slot(fill.index), fill.header
                    fill.gradients.write(
                        slot, header.image_len, iteration=header.iteration, sequence=header.sequence
                    )
                write_image(fill.segment, fill.index, plan, fill.header, packed)
                return True
            self.outgrown = len(packed)
            reason = f"step scalars grew to {len(packed)} bytes, {plan.scalars_capacity} are reserved"
        except values.UnsupportedValue as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - see the next line
            # The slot must be given back whatever was wrong with its content.
            reason = f"{type(error).__name__}: {error}"
        logger.error("snapshot of step %d dropped: %s", fill.header.iteration, reason)
        self._stats.failed += 1
        self._broken = True
        return False

    # -- claiming a slot -------------------------------------------------------------------------

    def _claim(self, segment: MappedSegment) -> int | None:
        """Lock a slot to overwrite; None if there is none (see ``need_generation``)."""
        busy: set[tuple[int, int]] = set()
        drained = False
        self.need_generation = ""
        for attempt in range(segment.geometry.num_slots + 2):
            promised = self._promised()
            records, taken = self._table.records(), busy | self._unsettled
            if not attempt:
                self._note_seals(records)
            choice = choose_slot(
                records,
                self._num_operators,
                busy=taken,
                generation=segment.generation,
                protected=self._table.promised(records, self._num_operators),
                epochs=self._table.epochs,
            )
            if choice.index is None:
                waiting = [r for r in records if r.state is SlotState.FILLED and r.key not in taken]
                if waiting:
                    started = time.perf_counter()
                    self._have_sealed(min(waiting, key=lambda r: r.sequence))
                    self._sealing_s += time.perf_counter() - started
                    continue
                if not drained and (self._unsettled or any(r.state is SlotState.FILLING for r in records)):
                    # Steps shorter than a thread switch outrun the thread that completes snapshots:
                    # let it catch up.
                    drained = True
                    self._session.flush(_DRAIN_S)
                    continue
                self._stats.no_slot += 1
                self.need_generation = choice.reason
                return None
            if not segment.try_lock_slot(choice.index):
                busy.add((segment.generation, choice.index))
                continue
            # A daemon that promises something from here on sees the lock (`Run._secured`); what it
            # wrote down before is read now.
            if self._promised() != promised:
                segment.unlock_slot(choice.index)
                continue
            self.crowded = promised is not None and not choice.left
            return choice.index
        self._stats.no_slot += 1
        self.need_generation = "every slot is being read"
        return None

    def _note_seals(self, records: Sequence[SlotRecord]) -> None:
        """Learn from the two newest sealed slots how long a slot takes that need not wait to be filled."""
        newest = max((r for r in records if r.sealed), key=attrgetter("sequence"), default=None)
        if newest is None or newest.sequence == self._newest_sealed:
            return
        self._newest_sealed, self.seal_s = newest.sequence, 0.0
        before = next((r for r in records if r.sealed and r.sequence == newest.sequence - 1), None)
        if before is None:
            return
        first, second = (self._table.segment(r.generation).header(r.index) for r in (before, newest))
        if first is not None and second is not None and second.filled_at_ns < first.sealed_at_ns:
            self.seal_s = max(0, second.sealed_at_ns - first.sealed_at_ns) / 1e9

    def _have_sealed(self, record: SlotRecord) -> None:
        """The daemon is away or behind, and a broken chain would cost a window: wait for it, or seal here.

        A large slot takes one thread longer than the daemon's threads. A small one takes less than to wait.
        """
        segment = self._table.segment(record.generation)
        began = time.monotonic()
        waits = record.image_len >= _WORTH_WAITING_BYTES and began >= self._waits_again_at
        while waits and self._session.connected:
            header = segment.header(record.index)
            if header is None or header.state is not SlotState.FILLED:
                return
            if time.monotonic() >= began + _SEALING_PATIENCE_S:  # it hangs: the next ones are not waited for
                self._waits_again_at = began + _SEALING_PAUSE_S
                break
            time.sleep(_LOOK_S)
        segment.seal(record.index)
        self._stats.sealed_here += 1

    def _promised(self) -> RingHint | None:
        """What must stay, without how far other ranks are behind; None if nothing must."""
        hint = self._table.ring_hint._replace(behind=0)
        return hint if hint.span and self._table.of_several_ranks else None


def _both(packed: Callable[[], list[CopyItem]], gradients: GradientCopy) -> Callable[[], list[CopyItem]]:
    """Packed state and gradients, when their turn comes."""
    return lambda: [*packed(), *gradients.items()]


# -- NaN in a filled slot --------------------------------------------------------------------------

# By dtype in an image: the bits of +inf, and the integer types of its size. Read as integers, positive
# NaNs exceed +inf as signed, negative ones exceed -inf as unsigned.
_INFINITIES = {
    SAFETENSORS_DTYPES[dtype]: (infinity, signed, unsigned)
    for dtype, infinity, signed, unsigned in (
        (torch.bfloat16, 0x7F80, np.int16, np.uint16),
        (torch.float16, 0x7C00, np.int16, np.uint16),
        (torch.float32, 0x7F800000, np.int32, np.uint32),
        (torch.float64, 0x7FF0000000000000, np.int64, np.uint64),
    )
}
_CHUNK_BYTES = 256 << 10  # stays in a core's cache for the second look


def nan_tensors(segment: MappedSegment, index: int) -> list[str]:
    """Names of the weights in this slot that hold a NaN; empty if the slot was reused meanwhile."""
    header = segment.header(index)
    if header is None:
        return []
    try:
        view = ImageView(segment.slot(index)[: header.image_len])
    except ImageError:
        return []  # being overwritten: there is nothing to look at any more
    found = [
        entry.name
        for entry in view
        if entry.dtype in _INFINITIES
        and entry.nbytes
        and not entry.name.startswith(("optim/", "buffer/", "ckptd."))
        and _holds_nan(view.data(entry.name), *_INFINITIES[entry.dtype])
    ]
    now = segment.header(index)
    return found if now is not None and now.sequence == header.sequence else []


def _holds_nan(data: memoryview, infinity: int, signed: Any, unsigned: Any) -> bool:
    # numpy, not torch: a second OpenMP team in this process makes the trainer's threads sleep at
    # every barrier.
    negative_infinity = infinity | 1 << (8 * np.dtype(signed).itemsize - 1)
    for start in range(0, len(data), _CHUNK_BYTES):
        part = data[start : start + _CHUNK_BYTES]
        if (
            int(np.frombuffer(part, signed).max()) > infinity
            or int(np.frombuffer(part, unsigned).max()) > negative_infinity
        ):
            return True
    return False
