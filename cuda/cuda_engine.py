"""The copy engine of CUDA devices: copies on a side stream into registered (pinned) slots, small tensors
packed.

The training thread orders the side stream after its own and goes on; a thread of the engine issues the
copies. Where the driver takes it, one kernel stores all dense tensors into registered memory
(`ckptd.cuda.store_kernel`). Otherwise large ones cross the link by themselves, and runs of small ones through
a pack, as casts do in any case. A list of copies is planned once and reused at every boundary for which it is
handed over again.

The host never blocks for a copy: ``wait`` makes the current stream wait for the side stream, so the
optimizer's kernels run after the copies while the CPU goes on issuing work. A watcher thread learns from an
event when the bytes are there.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ckptd.cuda.copy_plan import DEFAULT_PLAN, CopyPlan
from ckptd.cuda.driver import ignore_captures
from ckptd.cuda.engine import CopyEngine, CopyItem, CopyList, CpuEngine, HostMemory
from ckptd.cuda.quiet_threads import quietly, start_quiet
from ckptd.cuda.samples import Samples
from ckptd.cuda.store_kernel import StoreKernel, Tiles, store_kernel

logger = logging.getLogger(__name__)

# Bytes cross the link in stretches of at most the plan's chunk. A copy engine stays with one stream while
# that has a copy ready, whatever its priority: the trainer's own small copies (the size of a `nonzero`, an
# `item`) would wait for the whole snapshot. A kernel between two copies makes the engine look at the other
# streams. Observed by TorchRec, https://github.com/meta-pytorch/torchrec/pull/4315 and /4339.
# Alignment of a pack's address: items are as aligned in the pack as in the image.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Pack:
    """Adjacent blocks of the image that cross the link together.

    Args:
        places: views of the pack, one for each of ``tensors``, with its shape and the image's dtype.
        lead: offset in the pack at which it begins, in bytes.
    """

    places: list[Tensor]
    tensors: list[Tensor]
    offset: int
    nbytes: int
    lead: int


@dataclass(slots=True)
class CopyTransfers:
    """The transfers of one list of items, which may be in any order.

    Args:
        pack: ``uint8``, on the device: ``packs`` go through it, one after the other on one stream.
        direct: flat ``uint8`` views of tensors on the device, or of parts of them, that need no pack.
        stretches: the slices of ``direct`` that cross the link at a stretch.
        sizes: of the bytes before, of and between them in the image, alternately, from ``begin`` on.
        host: items that are in host memory already.
        kernel: sends ``direct``, where there is one.
    """

    pack: Tensor
    direct: list[Tensor] = field(default_factory=list)
    stretches: list[slice] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    begin: int = 0
    packs: list[Pack] = field(default_factory=list)
    host: list[CopyItem] = field(default_factory=list)
    kernel: StoreKernel | None = None
    _tiles: Tiles | None = None

    def send(self, image: Tensor, stream: int = 0) -> None:
        """Copy to host memory (``uint8``, which begins with the image), on the current stream.

        Args:
            stream: the driver's name of it, for the kernel.
        """
        for item in self.host:
            view = item.view()
            _place(item, view, image).copy_(view)
        if self.kernel is not None:
            self.kernel.store(self.tiles, image.data_ptr(), stream)
        else:
            places = self._places(image)
            for part in self.stretches:
                torch._foreach_copy_(places[part], self.direct[part], non_blocking=True)
                self.pack[-1:].zero_()  # the kernel between two copies; nothing else uses this byte
        # Last: while the others cross, the host issues these, each by several calls.
        for pack in self.packs:
            torch._foreach_copy_(pack.places, pack.tensors)
            image[pack.offset : pack.offset + pack.nbytes].copy_(
                self.pack[pack.lead : pack.lead + pack.nbytes], non_blocking=True
            )

    def receive(self, image: Tensor) -> None:
        """Copy from host memory into the tensors, on the current stream."""
        for item in self.host:
            view = item.view()
            view.copy_(_place(item, view, image))
        places = self._places(image)
        for part in self.stretches:
            torch._foreach_copy_(self.direct[part], places[part], non_blocking=True)
        for pack in self.packs:
            self.pack[pack.lead : pack.lead + pack.nbytes].copy_(
                image[pack.offset : pack.offset + pack.nbytes], non_blocking=True
            )
            torch._foreach_copy_(pack.tensors, pack.places)

    @property
    def tiles(self) -> Tiles:
        """Of ``direct``, for the kernel; sent to the device once."""
        if self._tiles is None:
            begins = itertools.accumulate(self.sizes[:-1], initial=self.begin)
            places = list(begins)[1::2] if self.sizes else []
            self._tiles = Tiles.of(self.direct, places, self.pack.device)
        return self._tiles

    def _places(self, image: Tensor) -> list[Tensor]:
        """The place of each of ``direct`` in the image."""
        if not self.direct:
            return []
        end = self.begin + sum(self.sizes)
        return list(image[self.begin : end].split_with_sizes(self.sizes)[1::2])


def _place(item: CopyItem, view: Tensor, image: Tensor) -> Tensor:
    raw = image[item.offset : item.offset + item.nbytes]
    return raw.view(item.dtype).view(view.shape)


@dataclass(frozen=True, slots=True)
class _Block:
    view: Tensor
    offset: int
    nbytes: int


def plan_transfers(
    items: Sequence[CopyItem],
    pack: Tensor,
    *,
    small_bytes: int = DEFAULT_PLAN.small_bytes,
    kernel: StoreKernel | None = None,
) -> CopyTransfers:
    """The transfers for ``items``, which do not overlap.

    Args:
        pack: ``uint8``, on the device: small and cast items go through it, in parts if they are larger.
        small_bytes: dense tensors from this size on need no pack; nor do those that have no neighbour.
        kernel: sends tensors of any size without a pack, if they are dense.
    Raises:
        RuntimeError, ValueError: an item's bytes do not fit its shape, or those of two dense ones
            overlap.
    """
    planner = _Planner(CopyTransfers(pack, kernel=kernel))
    least = small_bytes if kernel is None else 0
    for item in sorted((i for i in items if i.nbytes), key=lambda i: i.offset):
        view = item.view().detach()
        if view.numel() * item.dtype.itemsize != item.nbytes:
            raise ValueError(f"{tuple(view.shape)} of {item.dtype} are not {item.nbytes} bytes")
        if view.device.type != pack.device.type:
            planner.found.host.append(item)
        elif view.dtype is item.dtype and item.nbytes >= least and view.is_contiguous():
            planner.send_directly(view, item.offset)
        else:
            planner.send_packed(view, item)
    return planner.transfers()


class _Planner:
    """Collects the transfers of items that come in the order of their offsets."""

    def __init__(self, found: CopyTransfers) -> None:
        self.found = found
        self._run: list[tuple[_Block, torch.dtype]] = []  # neighbours, for one pack
        self._limit = found.pack.numel() - _ALIGNMENT
        self._end: int | None = None  # of the direct copies so far

    def transfers(self) -> CopyTransfers:
        self._end_run()
        found = self.found
        found.stretches = _stretches([t.numel() for t in found.direct], found.pack.numel())
        return found

    def send_directly(self, view: Tensor, offset: int) -> None:
        self._end_run()
        self._add(view, offset)

    def send_packed(self, view: Tensor, item: CopyItem) -> None:
        run, limit = self._run, self._limit
        for block in _blocks(view, item.dtype, item.offset, limit):
            if run and not _joins(run, block, limit):
                self._end_run()
            run.append((block, item.dtype))

    def _end_run(self) -> None:
        run = self._run
        if len(run) == 1 and run[0][0].view.dtype is run[0][1] and run[0][0].view.is_contiguous():
            # A pack of one tensor would be a kernel more, and calls of the host.
            self._add(run[0][0].view, run[0][0].offset)
        elif run:
            self.found.packs.append(_packed(run, self.found.pack))
        run.clear()

    def _add(self, view: Tensor, offset: int) -> None:
        """A direct copy, in parts."""
        found, end = self.found, self._end
        if end is None:
            found.begin = end = offset
        if offset < end:
            raise ValueError(f"two items overlap at byte {offset}")
        for part in view.view(-1).view(torch.uint8).split(found.pack.numel()):
            found.direct.append(part)
            found.sizes += [offset - end, part.numel()]
            end = offset = offset + part.numel()
        self._end = end


def _stretches(sizes: Sequence[int], limit: int) -> list[slice]:
    """Neighbours of at most ``limit`` bytes together; none is longer than that by itself."""
    found: list[slice] = []
    first = total = 0
    for i, size in enumerate(sizes):
        if total and total + size > limit:
            found.append(slice(first, i))
            first, total = i, 0
        total += size
    if total:
        found.append(slice(first, len(sizes)))
    return found


def _joins(run: list[tuple[_Block, torch.dtype]], block: _Block, limit: int) -> bool:
    """Whether this block follows the run immediately, and fits."""
    first, last = run[0][0], run[-1][0]
    adjacent = last.offset + last.nbytes == block.offset
    return adjacent and block.offset + block.nbytes - first.offset <= limit


def _packed(run: list[tuple[_Block, torch.dtype]], pack: Tensor) -> Pack:
    first, last = run[0][0], run[-1][0]
    lead = first.offset % _ALIGNMENT
    shift = lead - first.offset
    places = [
        pack[p.offset + shift : p.offset + shift + p.nbytes].view(dtype).view(p.view.shape)
        for p, dtype in run
    ]
    nbytes = last.offset + last.nbytes - first.offset
    return Pack(places, [p.view for p, _ in run], first.offset, nbytes, lead)


def _blocks(view: Tensor, dtype: torch.dtype, offset: int, limit: int) -> Iterator[_Block]:
    """Parts of at most ``limit`` bytes, each dense in the image."""
    nbytes = view.numel() * dtype.itemsize
    if nbytes <= limit:
        yield _Block(view, offset, nbytes)
    elif view.is_contiguous():
        flat = view.view(-1)
        step = limit // dtype.itemsize
        for start in range(0, flat.numel(), step):
            part = flat[start : start + step]
            yield _Block(part, offset + start * dtype.itemsize, part.numel() * dtype.itemsize)
    elif view.shape[0] == 1:
        yield from _blocks(view[0], dtype, offset, limit)
    else:
        row = nbytes // view.shape[0]
        rows = max(1, limit // row)
        for start in range(0, view.shape[0], rows):
            yield from _blocks(view[start : start + rows], dtype, offset + start * row, limit)


@dataclass(frozen=True, slots=True)
class _SampleBuffers:
    """Buffers for reading samples twice; allocating pinned memory for each would take milliseconds."""

    index: tuple[Tensor, Tensor]
    words: tuple[Tensor, Tensor]
    host: tuple[Tensor, Tensor]

    @classmethod
    def make(cls, size: int, device: torch.device) -> _SampleBuffers:
        def pinned() -> Tensor:
            return torch.empty(size, dtype=torch.int64, pin_memory=device.type == "cuda")

        def on_device() -> Tensor:
            return torch.empty(size, dtype=torch.int64, device=device)

        return cls((pinned(), on_device()), (on_device(), on_device()), (pinned(), pinned()))

    def take(self, samples: Samples) -> None:
        """Send the index of these samples to the device, on the current stream."""
        host, there = self.index
        host.numpy()[:] = samples.index
        there.copy_(host, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Job:
    """A copy in flight: its first event if it is timed, its last event, its callback, its sources, which must
    live until it is over, and the bytes of each if its time is to be logged.
    """

    first: torch.cuda.Event | None
    last: torch.cuda.Event
    done: Callable[[BaseException | None], None] | None
    read: tuple[object, ...]
    sizes: tuple[int, ...] = ()
    host_s: float = 0.0
    plan: CopyPlan | None = None  # None: the kernel has sent them


@dataclass(slots=True)
class _Order:
    """Copies to issue, and their first and last event; `issued` is set when the last one is recorded."""

    items: Sequence[CopyItem]
    memory: HostMemory
    image: Tensor
    done: Callable[[BaseException | None], None]
    late: Callable[[], Sequence[CopyItem]]
    at_once: Sequence[CopyItem]
    first: torch.cuda.Event
    last: torch.cuda.Event
    transfers: CopyTransfers | None = None
    repeated: bool = False
    error: BaseException | None = None
    issued: threading.Event = field(default_factory=threading.Event)


class CudaEngine:
    """Copies tensors of one CUDA device to and from registered host memory. Takes memory of the device for
    one chunk of ``plan``.

    Args:
        plan: how tensors cross the link; what it predicts for a snapshot is logged once, with what was
            measured.
    Raises:
        RuntimeError: CUDA is not available.
    """

    host_waits = False
    inline = False
    last_copy_s = 0.0

    def __init__(self, device: torch.device, plan: CopyPlan = DEFAULT_PLAN) -> None:
        self.device = device
        self._plan = plan
        self._compared = False
        self._stream = torch.cuda.Stream(device)
        # Made now: on a device that hangs in a collective an allocation may hang too, and parking must not.
        self._pack = torch.empty(plan.chunk_bytes, dtype=torch.uint8, device=device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._last: torch.cuda.Event | None = None
        self._waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        # Weak keys: a plan holds the tensors, and must not outlive a list whose tensors the trainer has
        # replaced.
        self._planned: dict[weakref.ref[CopyList], CopyTransfers] = {}
        self._buffers: dict[int, list[_SampleBuffers]] = {}
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._open: _Order | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._registered: dict[int, list[int]] = {}
        self._issuer = start_quiet(self._issue_all, name="ckptd-issue")
        self._watcher = start_quiet(self._watch, name="ckptd-copy")

    def register(self, memory: HostMemory, regions: Sequence[tuple[int, int]]) -> None:
        """Pin each region (a slot) with the driver, which may refuse one huge registration where several
        pass.

        Raises:
            RuntimeError: the driver refuses; the message has its code and what to check.
        """
        cudart = torch.cuda.cudart()
        done: list[int] = []
        for offset, nbytes in regions:
            code = int(cudart.cudaHostRegister(memory.address + offset, nbytes, 0))
            if code != 0:
                for address in done:
                    cudart.cudaHostUnregister(address)
                self._forget_error()
                raise RuntimeError(
                    f"cudaHostRegister of {nbytes} bytes failed with code {code}: check `ulimit "
                    "-l` and free memory (`ckptctl doctor`)"
                )
            done.append(memory.address + offset)
        self._registered[memory.address] = done

    def release(self, memory: HostMemory) -> None:
        """Unpin; waits for copies in flight."""
        self._issued()
        self._stream.synchronize()
        for address in self._registered.pop(memory.address, []):
            torch.cuda.cudart().cudaHostUnregister(address)

    def prepare(self, items: CopyList, memory: HostMemory) -> None:
        with torch.no_grad():
            self._transfers(items, memory)

    def begin(
        self,
        items: Sequence[CopyItem],
        memory: HostMemory,
        base: int,
        done: Callable[[BaseException | None], None],
        late: Callable[[], Sequence[CopyItem]] = tuple,
        at_once: Sequence[CopyItem] = (),
    ) -> None:
        self._issued()
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        first = torch.cuda.Event(enable_timing=True)
        first.record(self._stream)
        last = torch.cuda.Event(enable_timing=True, blocking=True)
        image = memory.tensor[base:]
        order = _Order(items, memory, image, done, late, at_once, first, last)
        # The first time the transfers are planned, too.
        order.repeated = isinstance(items, CopyList) and weakref.ref(items) in self._planned
        try:
            with torch.no_grad(), torch.cuda.stream(self._stream):
                # Here and not by the other thread: the addresses are those of this moment.
                order.transfers = self._transfers(items, memory)
                if at_once:
                    self._transfers(at_once, memory).send(image, self._stream.cuda_stream)
                    current.wait_event(self._stream.record_event())
        except Exception as caught:  # noqa: BLE001 - the trainer must survive a failed copy
            order.error = caught
        self._open, self._last = order, last
        self._orders.put(order)

    def read(self, samples: Samples, done: Callable[[BaseException | None], None]) -> None:
        """One gather on the current stream; its words cross on the side stream, and the watcher thread stores
        them.
        """
        error: BaseException | None = None
        try:
            if samples.can_be_read():
                self._gather(samples, done)
                return
        except Exception as caught:  # noqa: BLE001 - the trainer must survive it
            error = caught
        done(error)

    def _gather(self, samples: Samples, done: Callable[[BaseException | None], None]) -> None:
        self._issued()
        buffers: _SampleBuffers | None = samples.prepared
        nth = 0 if buffers is None else 1
        if buffers is None:
            buffers = samples.prepared = self._buffers_for(samples)
            buffers.take(samples)
        words, host = buffers.words[nth], buffers.host[nth]
        torch.index_select(samples.plan.span, 0, buffers.index[1], out=words)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            host.copy_(words, non_blocking=True)
        last = torch.cuda.Event(blocking=True)
        last.record(self._stream)

        def finished(error: BaseException | None) -> None:
            if error is None:
                samples.found.append(host.numpy().view(np.uint64))
            done(error)

        self._jobs.put(_Job(None, last, finished, (samples,)))

    def wait(self) -> float:
        """Order the current stream after the copies; the host does not block.

        Returns the seconds that the device's stream stood still at earlier calls, as far as they are known by
        now, and those for which this call waited until the copies were issued.
        """
        stalled = self._issued() + self._stalls()
        if self._last is not None:
            stream = torch.cuda.current_stream(self.device)
            reached = torch.cuda.Event(enable_timing=True)
            reached.record(stream)
            stream.wait_event(self._last)
            self._waits.append((reached, self._last))
            self._last = None
        return stalled

    def restore(self, items: Sequence[CopyItem], memory: HostMemory, base: int) -> None:
        self._issued()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.no_grad(), torch.cuda.stream(self._stream):
            self._plan_transfers(items, None).receive(memory.tensor[base:])
        self._stream.synchronize()

    def close(self) -> None:
        self._orders.put(None)
        self._issuer.join(timeout=30)
        self._stream.synchronize()
        for addresses in self._registered.values():
            for address in addresses:
                torch.cuda.cudart().cudaHostUnregister(address)
        self._registered.clear()
        self._jobs.put(None)
        self._watcher.join(timeout=30)

    def _transfers(self, items: Sequence[CopyItem], memory: HostMemory) -> CopyTransfers:
        """Planned once for a list that is handed over again, as it is while its tensors are the same."""
        if not isinstance(items, CopyList):
            # Not by the kernel, whose tiles are memory of the device: parking copies where the device hangs.
            return self._plan_transfers(items, None)
        kernel = self._kernel_for(memory)
        key = weakref.ref(items, lambda gone: self._planned.pop(gone, None))
        found = self._planned.get(key)
        if found is None or found.kernel is not kernel:
            found = self._planned[key] = self._plan_transfers(items, kernel)
        return found

    def _plan_transfers(self, items: Sequence[CopyItem], kernel: StoreKernel | None) -> CopyTransfers:
        return plan_transfers(items, self._pack, small_bytes=self._plan.small_bytes, kernel=kernel)

    def _kernel_for(self, memory: HostMemory) -> StoreKernel | None:
        """The kernel stores into registered memory only."""
        number = self._pack.device.index or 0
        return store_kernel(number) if memory.address in self._registered else None

    def _buffers_for(self, samples: Samples) -> _SampleBuffers:
        """Buffers for these samples as long as they live; the watcher holds them until they are used."""
        free = self._buffers.setdefault(len(samples.index), [])
        buffers = free.pop() if free else _SampleBuffers.make(len(samples.index), self.device)
        weakref.finalize(samples, free.append, buffers).atexit = False
        return buffers

    def _issued(self) -> float:
        """Wait until the copies that were begun are issued; returns the seconds."""
        order, self._open = self._open, None
        if order is None or order.issued.is_set():
            return 0.0
        begun = time.perf_counter()
        order.issued.wait()
        return time.perf_counter() - begun

    # -- the thread that issues copies ---------------------------------------------------------------

    def _issue_all(self) -> None:
        ignore_captures()
        while (order := quietly(self._orders.get)) is not None:
            try:
                job = self._issue(order)
            except Exception as error:
                # The thread must live: the trainer waits for it. And a slot whose copy nobody reports would
                # stay claimed for ever.
                logger.exception("in the thread that issues copies")
                order.error, job = order.error or error, None
            if job is not None:
                self._jobs.put(job)
            order.issued.set()
            if order.error is not None:
                self._refuse(order, order.error)
            del order, job  # releases the sources before the next one

    def _issue(self, order: _Order) -> _Job:
        """Give the copies to the device; an error of theirs is left in the order."""
        items, more = order.items, list[CopyItem]()
        begun = time.perf_counter()
        if order.transfers is not None and order.error is None:
            try:
                with torch.no_grad(), torch.cuda.stream(self._stream):
                    # Binds the device's context to this thread, which the driver's calls need.
                    self._pack[-1:].zero_()
                    more = list(order.late())
                    order.transfers.send(order.image, self._stream.cuda_stream)
                    if more:
                        self._transfers(more, order.memory).send(order.image, self._stream.cuda_stream)
            except Exception as caught:  # noqa: BLE001 - the trainer must survive a failed copy
                order.error = caught
        order.last.record(self._stream)
        host_s = time.perf_counter() - begun
        # Also after an error: work given to the device before goes on reading.
        read = (tuple(items), more, order.at_once)
        if order.transfers is None or order.error is not None:
            return _Job(order.first, order.last, None, read)
        sizes: tuple[int, ...] = ()
        if order.repeated and not self._compared:
            every = (*order.at_once, *items, *more)
            sizes, self._compared = tuple(item.nbytes for item in every if item.nbytes), True
        plan = self._plan if order.transfers.kernel is None else None
        return _Job(order.first, order.last, order.done, read, sizes, host_s, plan)

    @staticmethod
    def _refuse(order: _Order, error: BaseException) -> None:
        try:
            order.done(error)
        except Exception:
            logger.exception("in the thread that issues copies")

    # -- the thread that learns what has arrived -----------------------------------------------------

    def _stalls(self) -> float:
        """Seconds that streams waited in ``wait`` calls that are over."""
        total = 0.0
        while self._waits and all(event.query() for event in self._waits[0]):
            reached, copied = self._waits.popleft()
            total += max(0.0, reached.elapsed_time(copied) / 1e3)
        return total

    def _watch(self) -> None:
        ignore_captures()
        while (job := quietly(self._jobs.get)) is not None:
            try:
                self._report(job)
            except Exception:
                # The thread must live: a slot whose copy nobody reports would stay claimed for ever.
                logger.exception("in the copy thread")
            del job  # releases the sources before the next copy

    def _report(self, job: _Job) -> None:
        error: BaseException | None = None
        try:
            job.last.synchronize()
            if job.done is not None and job.first is not None:
                self.last_copy_s = job.first.elapsed_time(job.last) / 1e3
        except RuntimeError as caught:
            error = caught
        if job.done is not None:
            job.done(error)
        if job.sizes and error is None:
            logger.info("%s", describe_copies(job.plan, job.sizes, self.last_copy_s, job.host_s))

    def _forget_error(self) -> None:
        """Consume the driver's refusal, or the trainer's next kernel launch would raise it."""
        try:
            self._pack[:1].zero_()
        except RuntimeError as error:
            logger.debug("the driver's refusal: %s", error)


def describe_copies(plan: CopyPlan | None, sizes: Sequence[int], copy_s: float, host_s: float) -> str:
    """A line for the log: what was measured of a snapshot, and what the plan predicts.

    Args:
        plan: None: the kernel has sent it.
    """
    what = f"a snapshot of {len(sizes)} tensors, {sum(sizes) / 1e9:.2f} GB"
    measured = f"{1e3 * copy_s:.1f} ms of copying and {1e3 * host_s:.2f} ms to issue it"
    if plan is None:
        return f"{what}, by a kernel that stores into host memory: {measured}"
    predicted = plan.predict(sizes)
    return (
        f"{what}: {measured}, predicted {1e3 * predicted.copy_s:.1f} and {1e3 * predicted.host_s:.2f} ms; "
        f"{plan.reason}"
    )


def make_engine(device: torch.device, *, inline: bool = False, plan: CopyPlan = DEFAULT_PLAN) -> CopyEngine:
    """The engine for tensors on ``device``.

    Args:
        plan: of the copies of a CUDA device.
    Raises:
        ValueError: there is none for this kind of device.
    """
    if device.type == "cpu":
        return CpuEngine(inline=inline)
    if device.type == "cuda":
        return CudaEngine(device, plan)
    raise ValueError(f"no copy engine for device {device}: supported are cpu and cuda")
