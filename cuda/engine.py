"""Copy engines: tensors to and from a slot of host memory, off the training thread.

``CpuEngine`` copies in a background thread; ``CudaEngine`` (`ckptd.cuda.cuda_engine`) on a side stream into
registered (pinned) memory. Both have the interface of ``CopyEngine`` and pass the same tests. A copy is
asynchronous: the sources must not change between ``begin`` and the return of ``wait``.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ckptd.cuda.quiet_threads import quietly, start_quiet
from ckptd.cuda.samples import Samples

logger = logging.getLogger(__name__)

# Below torch's parallel grain (32,768 elements) an operation stays on the calling thread. Above it, a second
# OpenMP team in this process would make the trainer's threads sleep at every barrier instead of spinning (65
# % slower on two cores). torch's number of threads is not ours to change: that changes bits.
_SERIAL_NUMEL = 32_767

# The pieces of a copy that is paced take 0.1 to 0.3 ms each.
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CopyItem:
    """Rows ``[start, stop)`` of ``tensor`` (all if ``start`` is None) at ``offset`` bytes into the slot, as
    ``dtype``.
    """

    tensor: Tensor
    start: int | None
    stop: int | None
    dtype: torch.dtype
    offset: int
    nbytes: int

    def view(self) -> Tensor:
        return self.tensor if self.start is None else self.tensor[self.start : self.stop]


class CopyList(list[CopyItem]):
    """Copies that are handed over again unchanged: an engine may keep a plan for them while the list
    lives.
    """

    __slots__ = ("__weakref__",)
    # Compared by identity, not by content.
    __eq__ = object.__eq__
    __hash__ = object.__hash__  # type: ignore[assignment]


class HostMemory:
    """A mapped segment as the engines see it: its address, and typed tensor views of it."""

    def __init__(self, buffer: memoryview) -> None:
        self._array = np.frombuffer(buffer, dtype=np.uint8)
        self.address = int(self._array.ctypes.data)
        self.nbytes = int(self._array.nbytes)
        self.tensor = torch.from_numpy(self._array)
        self.words = self._array[: self.nbytes // 8 * 8].view(np.uint64)

    def view(self, offset: int, nbytes: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        raw = self.tensor[offset : offset + nbytes]
        if nbytes and offset % dtype.itemsize:
            raise ValueError(f"offset {offset} is not aligned to {dtype}")
        return raw.view(dtype).reshape(tuple(shape)) if nbytes else torch.empty(tuple(shape), dtype=dtype)


class CopyEngine(Protocol):
    """The operations that capture and restore need of a device."""

    # Where the sources are.
    device: torch.device
    # Whether ``wait`` blocks the host until the bytes have arrived (or only orders the device's work after
    # them).
    host_waits: bool
    # Whether copies are complete when ``begin`` returns; then only other threads run during them.
    inline: bool
    # Duration of the last completed copy, from its first byte to its last, in seconds.
    last_copy_s: float

    def register(self, memory: HostMemory, regions: Sequence[tuple[int, int]]) -> None:
        """Prepare (offset, length) regions of a mapped segment for copies: pin them, on CUDA."""

    def release(self, memory: HostMemory) -> None:
        """Undo ``register``; no copy may be in flight."""

    def prepare(self, items: CopyList, memory: HostMemory) -> None:
        """Plan copies that a later ``begin`` is given, so that it need not (any thread)."""

    def begin(
        self,
        items: Sequence[CopyItem],
        memory: HostMemory,
        base: int,
        done: Callable[[BaseException | None], None],
        late: Callable[[], Sequence[CopyItem]] = tuple,
        at_once: Sequence[CopyItem] = (),
    ) -> None:
        """Start copying ``items`` to the slot at ``base``; ``done(error)`` is called once, on any thread,
        before ``wait`` returns.

        Args:
            late: further items, called when their turn comes, on any thread.
            at_once: further items whose sources may change as soon as this returns: they are copied by
                then, or later device work is ordered after them.
        """

    def read(self, samples: Samples, done: Callable[[BaseException | None], None]) -> None:
        """Store in ``samples`` what the sources hold now (on a device: when the current stream gets here).

        ``done(error)`` is called once, on any thread, after the callbacks of earlier operations; the host
        does not wait for a device. Memory is allocated only when ``samples`` are read for the first time.
        """

    def wait(self) -> float:
        """Return when the sources may change again: the copy in flight is complete, or later device work is
        ordered after it.

        Returns the seconds that training waited: the calling thread in this call; or, where only the device
        waits, its stream at earlier calls, as far as known by now.
        """

    def restore(self, items: Sequence[CopyItem], memory: HostMemory, base: int) -> None:
        """Copy from the slot into the tensors; returns when they may be used."""

    def close(self) -> None:
        """Wait for the copy in flight and end the engine's threads."""


class CopyGate(Protocol):
    """Says when a copy in the background may go on."""

    enabled: bool

    def begin(self) -> None:
        """A copy begins (training thread)."""

    def plan(self, total_bytes: int) -> None:
        """It has so many bytes, and asks for its first piece next (copy thread)."""

    def admit(self, size_bytes: int) -> None:
        """Return when a piece of this size may be copied."""

    def copied(self, size_bytes: int, seconds: float) -> None:
        """A copy is complete, and took so long without the time in which it was held."""

    def hurry(self) -> None:
        """The trainer waits for the copy: from now on, hold nothing of it."""


class CpuEngine:
    """Copies host tensors in a background thread (``inline``: in the caller).

    Attributes:
        pacer: if it is enabled, copies in the background go piece by piece, when it says so.
    """

    device = torch.device("cpu")
    host_waits = True
    last_copy_s = 0.0
    pacer: CopyGate | None = None

    def __init__(self, *, inline: bool = False, restore_threads: int = 2) -> None:
        self.inline = inline
        self._restore_threads = restore_threads
        self._idle = threading.Event()
        self._idle.set()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = start_quiet(self._serve, name="ckptd-copy")

    def register(self, memory: HostMemory, regions: Sequence[tuple[int, int]]) -> None:
        """Nothing to pin."""

    def release(self, memory: HostMemory) -> None:
        """Nothing was pinned."""

    def prepare(self, items: CopyList, memory: HostMemory) -> None:
        """Nothing to plan."""

    def begin(
        self,
        items: Sequence[CopyItem],
        memory: HostMemory,
        base: int,
        done: Callable[[BaseException | None], None],
        late: Callable[[], Sequence[CopyItem]] = tuple,
        at_once: Sequence[CopyItem] = (),
    ) -> None:
        self.wait()
        failed = _attempt(lambda: _all_to_host(at_once, memory, base))
        pacer = self.pacer if self.pacer is not None and self.pacer.enabled and not self.inline else None

        def job() -> None:
            started, held_s = time.perf_counter(), [0.0]

            def copy() -> None:
                if pacer is None:
                    _all_to_host((*items, *late()), memory, base)
                else:
                    held_s[0] = _paced_to_host(items, late, memory, base, pacer)

            error = failed or _attempt(copy)
            if error is None:
                self.last_copy_s = time.perf_counter() - started - held_s[0]
            done(error)

        if self.inline:
            job()
            return
        if pacer is not None:
            pacer.begin()
        self._idle.clear()
        self._jobs.put(job)

    def read(self, samples: Samples, done: Callable[[BaseException | None], None]) -> None:
        def take() -> None:
            if samples.can_be_read():
                samples.found.append(np.take(samples.plan.span, samples.index))

        done(_attempt(take))

    def wait(self) -> float:
        if self._idle.is_set():
            return 0.0
        started = time.perf_counter()
        if self.pacer is not None:
            self.pacer.hurry()
        self._idle.wait()
        return time.perf_counter() - started

    def restore(self, items: Sequence[CopyItem], memory: HostMemory, base: int) -> None:
        self.wait()
        shares = _split(items, self._restore_threads)
        errors: list[BaseException] = []

        def run(share: Sequence[CopyItem]) -> None:
            try:
                for item in share:
                    _from_host(item, memory, base)
            except Exception as caught:  # noqa: BLE001 - re-raised in the caller below
                errors.append(caught)

        threads = [threading.Thread(target=run, args=(share,), name="ckptd-restore") for share in shares[1:]]
        for thread in threads:
            thread.start()
        run(shares[0])
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def close(self) -> None:
        if self.pacer is not None:
            self.pacer.hurry()
        self._jobs.put(None)
        self._thread.join(timeout=30)

    def _serve(self) -> None:
        while (job := quietly(self._jobs.get)) is not None:
            try:
                job()
            except Exception:
                logger.exception("in the copy thread")  # must live: the trainer waits for it at every step
            finally:
                self._idle.set()


def _split(items: Sequence[CopyItem], shares: int) -> list[list[CopyItem]]:
    """Contiguous shares of about equal bytes."""
    total = sum(i.nbytes for i in items)
    parts: list[list[CopyItem]] = [[] for _ in range(max(shares, 1))]
    seen = 0
    for item in items:
        parts[min(len(parts) - 1, seen * len(parts) // max(total, 1))].append(item)
        seen += item.nbytes
    return parts


def _address(item: CopyItem) -> int | None:
    """The address of the item's rows if they are one dense run of the image's dtype, else None."""
    tensor = item.tensor
    if tensor.dtype is not item.dtype or not tensor.is_contiguous():
        return None
    skipped = 0 if item.start is None else item.start * tensor.stride(0) * tensor.element_size()
    return tensor.data_ptr() + skipped


def _attempt(work: Callable[[], object]) -> BaseException | None:
    """The exception of ``work``, if any: the trainer must survive a failed copy."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - the caller decides
        return error
    return None


def _all_to_host(items: Sequence[CopyItem], memory: HostMemory, base: int) -> None:
    for item in items:
        _to_host(item, memory, base)


def _paced_to_host(
    items: Sequence[CopyItem],
    late: Callable[[], Sequence[CopyItem]],
    memory: HostMemory,
    base: int,
    pacer: CopyGate,
) -> float:
    """Copy piece by piece; returns the seconds for which the pacer held it."""
    every = (*items, *late())
    held_s, size_bytes, started = 0.0, sum(i.nbytes for i in every), time.perf_counter()
    pacer.plan(size_bytes)
    for piece in (piece for item in every for piece in _pieces(item)):
        asked = time.perf_counter()
        pacer.admit(piece.nbytes)
        held_s += time.perf_counter() - asked
        _to_host(piece, memory, base)
    pacer.copied(size_bytes, time.perf_counter() - started - held_s)
    return held_s


def _pieces(item: CopyItem) -> Iterator[CopyItem]:
    """Rows of at most ``_PIECE_BYTES`` together; a single row is not cut."""
    view = item.view()
    rows = view.shape[0] if view.dim() else 1
    if item.nbytes <= _PIECE_BYTES or rows <= 1:
        yield item
        return
    row_bytes = item.nbytes // rows
    step, first = max(1, _PIECE_BYTES // row_bytes), item.start or 0
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        yield CopyItem(
            item.tensor,
            first + start,
            first + stop,
            item.dtype,
            item.offset + start * row_bytes,
            (stop - start) * row_bytes,
        )


def _to_host(item: CopyItem, memory: HostMemory, base: int) -> None:
    source = _address(item)
    if source is not None:
        ctypes.memmove(memory.address + base + item.offset, source, item.nbytes)
        return
    view = item.view()
    target = memory.view(base + item.offset, item.nbytes, item.dtype, view.shape)
    with torch.no_grad():
        _copy_serially(target, view)


def _from_host(item: CopyItem, memory: HostMemory, base: int) -> None:
    address = _address(item)
    if address is not None:
        ctypes.memmove(address, memory.address + base + item.offset, item.nbytes)
        return
    view = item.view()
    source = memory.view(base + item.offset, item.nbytes, item.dtype, view.shape)
    with torch.no_grad():
        _copy_serially(view, source)


def _copy_serially(target: Tensor, source: Tensor) -> None:
    """``target.copy_(source)`` for any strides and dtypes, on the calling thread alone."""
    if target.numel() <= _SERIAL_NUMEL:
        target.copy_(source)
    elif target.is_contiguous() and source.is_contiguous():
        target, source = target.view(-1), source.view(-1)
        for start in range(0, source.numel(), _SERIAL_NUMEL):
            target[start : start + _SERIAL_NUMEL].copy_(source[start : start + _SERIAL_NUMEL])
    else:
        dim = max(range(target.dim()), key=lambda d: target.shape[d])
        rows = max(1, target.shape[dim] * _SERIAL_NUMEL // target.numel())
        for start in range(0, target.shape[dim], rows):
            length = min(rows, target.shape[dim] - start)
            _copy_serially(target.narrow(dim, start, length), source.narrow(dim, start, length))


def measure_bandwidth(tensors: Sequence[Tensor], *, limit_bytes: int = 128 << 20) -> float:
    """Bytes per second at which these tensors are copied to warm host memory: a sample of up to
    ``limit_bytes``.
    """
    sample: list[Tensor] = []
    total = 0
    for tensor in tensors:
        if total >= limit_bytes:
            break
        sample.append(tensor)
        total += tensor.numel() * tensor.element_size()
    if not total:
        return 1e9
    cuda = any(t.device.type == "cuda" for t in sample)
    targets = [torch.zeros_like(t, device="cpu", pin_memory=cuda, requires_grad=False) for t in sample]
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        for target, source in zip(targets, sample, strict=True):
            target.copy_(source.detach(), non_blocking=cuda)
        if cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return total / max(best, 1e-9)
