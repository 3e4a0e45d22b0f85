"""The CUDA twin of ``CpuEngine``: copies on a side stream into registered (pinned) slots, small tensors packed.

The host never blocks for a copy: ``wait`` makes the current stream wait for the side stream, so that the optimizer's kernels
run after the copies while the CPU goes on issuing work. A watcher thread learns from an event when the bytes are there.

Tensors below ``_SMALL`` bytes that lie next to each other in the image are gathered into a staging buffer on the device and
cross the link as one transfer; so are tensors that must be cast.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ckptd.cuda.engine import CopyItem, HostMemory

__all__ = ["CudaEngine"]

# Below this a transfer is dominated by its launch (about 5 us at 25 to 50 GB/s).
_SMALL = 256 << 10
# A packed run is at most this long, which bounds the device memory that packing takes.
_RUN = 32 << 20


@dataclass(frozen=True, slots=True)
class _Run:
    """Adjacent items that cross the link together; ``direct`` needs no staging."""

    items: tuple[CopyItem, ...]
    offset: int
    nbytes: int
    direct: bool


# First and last event of a copy, and whom to tell.
_Job = tuple[torch.cuda.Event, torch.cuda.Event, Callable[[BaseException | None], None]]


class CudaEngine:
    """Copies tensors of one CUDA device to and from registered host memory.

    Raises:
        RuntimeError: CUDA is not available.
    """

    host_waits = False
    last_copy_s = 0.0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._staging: dict[int, Tensor] = {}
        self._last: torch.cuda.Event | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._registered: dict[int, list[int]] = {}
        self._thread = threading.Thread(target=self._watch, name="ckptd-copy", daemon=True)
        self._thread.start()

    def register(self, memory: HostMemory, regions: Sequence[tuple[int, int]]) -> None:
        """Pin each region (a slot) with the driver; one huge registration may be refused where several are not.

        Raises:
            RuntimeError: the driver refuses; the message has its code and what to look at.
        """
        cudart = torch.cuda.cudart()
        done: list[int] = []
        for offset, nbytes in regions:
            code = int(cudart.cudaHostRegister(memory.address + offset, nbytes, 0))
            if code != 0:
                for address in done:
                    cudart.cudaHostUnregister(address)
                raise RuntimeError(
                    f"cudaHostRegister of {nbytes} bytes failed with code {code}: check `ulimit -l` and free memory (`ckptctl doctor`)"
                )
            done.append(memory.address + offset)
        self._registered[memory.address] = done

    def release(self, memory: HostMemory) -> None:
        """Unpin; waits for copies in flight."""
        self._stream.synchronize()
        for address in self._registered.pop(memory.address, []):
            torch.cuda.cudart().cudaHostUnregister(address)

    def begin(
        self,
        items: Sequence[CopyItem],
        memory: HostMemory,
        base: int,
        done: Callable[[BaseException | None], None],
        late: Callable[[], Sequence[CopyItem]] = tuple,
    ) -> None:
        ready = torch.cuda.current_stream(self._device).record_event()
        self._stream.wait_event(ready)
        first = torch.cuda.Event(enable_timing=True)
        first.record(self._stream)
        try:
            with torch.no_grad(), torch.cuda.stream(self._stream):
                for index, run in enumerate(_runs([*items, *late()])):
                    self._send(run, index, memory, base)
        except RuntimeError as error:
            done(error)
            return
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(self._stream)
        self._last = event
        self._jobs.put((first, event, done))

    def wait(self) -> float:
        """Order the current stream after the copies; the host does not block."""
        started = time.perf_counter()
        if self._last is not None:
            torch.cuda.current_stream(self._device).wait_event(self._last)
        return time.perf_counter() - started

    def restore(self, items: Sequence[CopyItem], memory: HostMemory, base: int) -> None:
        with torch.no_grad():
            for item in items:
                view = item.view()
                source = memory.view(base + item.offset, item.nbytes, item.dtype, view.shape)
                view.copy_(source, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        self._stream.synchronize()
        for addresses in self._registered.values():
            for address in addresses:
                torch.cuda.cudart().cudaHostUnregister(address)
        self._registered.clear()
        self._jobs.put(None)
        self._thread.join(timeout=30)

    def _send(self, run: _Run, index: int, memory: HostMemory, base: int) -> None:
        if run.direct:
            item = run.items[0]
            view = item.view()
            memory.view(base + item.offset, item.nbytes, item.dtype, view.shape).copy_(
                view, non_blocking=True
            )
            return
        staging = self._staging_of(index, run.nbytes)
        targets = [
            staging[i.offset - run.offset : i.offset - run.offset + i.nbytes]
            .view(i.dtype)
            .view(i.view().shape)
            for i in run.items
            if i.nbytes
        ]
        torch._foreach_copy_(targets, [i.view() for i in run.items if i.nbytes])
        memory.tensor[base + run.offset : base + run.offset + run.nbytes].copy_(
            staging[: run.nbytes], non_blocking=True
        )

    def _staging_of(self, index: int, nbytes: int) -> Tensor:
        """A device buffer per run of the plan, kept: reuse on one stream needs no waiting."""
        found = self._staging.get(index)
        if found is None or found.numel() < nbytes:
            found = self._staging[index] = torch.empty(
                nbytes, dtype=torch.uint8, device=self._device
            )
        return found

    def _watch(self) -> None:
        while (job := self._jobs.get()) is not None:
            first, event, done = job
            error: BaseException | None = None
            try:
                event.synchronize()
                self.last_copy_s = first.elapsed_time(event) / 1e3
            except RuntimeError as caught:
                error = caught
            done(error)


def _runs(items: Sequence[CopyItem]) -> list[_Run]:
    """Group items, which are in the order of their offsets or not, into transfers."""
    runs: list[_Run] = []
    pending: list[CopyItem] = []

    def flush() -> None:
        if pending:
            first, last = pending[0], pending[-1]
            runs.append(
                _Run(tuple(pending), first.offset, last.offset + last.nbytes - first.offset, False)
            )
            pending.clear()

    for item in sorted(items, key=lambda i: i.offset):
        direct = (
            item.tensor.dtype is item.dtype
            and item.nbytes >= _SMALL
            and item.view().is_contiguous()
        )
        host = item.tensor.device.type == "cpu"
        if direct or host:
            flush()
            runs.append(_Run((item,), item.offset, item.nbytes, True))
            continue
        adjacent = pending and pending[-1].offset + pending[-1].nbytes == item.offset
        small_enough = pending and item.offset + item.nbytes - pending[0].offset <= _RUN
        if pending and not (adjacent and small_enough):
            flush()
        pending.append(item)
    flush()
    return runs
