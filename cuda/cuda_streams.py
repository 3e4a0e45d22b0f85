"""The CUDA twin of ``CpuEngine``: copies on a side stream into registered (pinned) slots, small
tensors packed.

The host never blocks for a copy: ``wait`` makes the current stream wait for the side stream, so
that the optimizer's kernels run after the copies while the CPU goes on issuing work. A watcher
thread learns from an event when the bytes are there.
"""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ckptd.cuda.copy_transfers import PACK_BYTES, CopyTransfers, plan_transfers
from ckptd.cuda.engine import CopyItem, CopyList, HostMemory
from ckptd.cuda.samples import Samples

logger = logging.getLogger(__name__)

__all__ = ["CudaEngine"]


@dataclass(frozen=True, slots=True)
class _SampleBuffers:
    """What samples are read with: their index on the device, and where words go to there and in
    pinned memory, for two readings.
    """

    index: Tensor
    words: tuple[Tensor, Tensor]
    host: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, samples: Samples, device: torch.device) -> _SampleBuffers:
        index = torch.from_numpy(samples.index).pin_memory().to(device, non_blocking=True)
        pinned = (torch.empty(len(index), dtype=torch.int64, pin_memory=True) for _ in range(2))
        first, second = pinned
        return cls(index, (torch.empty_like(index), torch.empty_like(index)), (first, second))


@dataclass(frozen=True, slots=True)
class _Job:
    """A copy in flight: its first event where it is timed, its last one, and whom to tell. What it
    reads must live until it is over.
    """

    first: torch.cuda.Event | None
    last: torch.cuda.Event
    done: Callable[[BaseException | None], None] | None
    read: tuple[object, ...]


class CudaEngine:
    """Copies tensors of one CUDA device to and from registered host memory.

    Takes ``PACK_BYTES`` of the device's memory.

    Raises:
        RuntimeError: CUDA is not available.
    """

    host_waits = False
    inline = False
    last_copy_s = 0.0

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        # Made now: where a device hangs in a collective, an allocation may hang, too, and parking must not.
        self._pack = torch.empty(PACK_BYTES, dtype=torch.uint8, device=device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._last: torch.cuda.Event | None = None
        self._waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        # Weakly: what was prepared holds the tensors, and must not outlive a list whose tensors the
        # trainer has replaced.
        self._planned: dict[weakref.ref[CopyList], CopyTransfers] = {}
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._registered: dict[int, list[int]] = {}
        self._thread = threading.Thread(target=self._watch, name="ckptd-copy", daemon=True)
        self._thread.start()

    def register(self, memory: HostMemory, regions: Sequence[tuple[int, int]]) -> None:
        """Pin each region (a slot) with the driver; one huge registration may be refused where
        several are not.

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
                self._forget_error()
                raise RuntimeError(
                    f"cudaHostRegister of {nbytes} bytes failed with code {code}: check `ulimit "
                    "-l` and free memory (`ckptctl doctor`)"
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
        at_once: Sequence[CopyItem] = (),
    ) -> None:
        image = memory.tensor[base:]
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        first = torch.cuda.Event(enable_timing=True)
        first.record(self._stream)
        error: BaseException | None = None
        more: Sequence[CopyItem] = ()
        try:
            with torch.no_grad(), torch.cuda.stream(self._stream):
                if at_once:
                    self._transfers(at_once).send(image)
                    current.wait_event(self._stream.record_event())
                more = late()
                self._transfers(items).send(image)
                if more:
                    plan_transfers(more, self._pack).send(image)
        except Exception as caught:  # noqa: BLE001 - the trainer must survive a failed copy
            error = caught
        last = torch.cuda.Event(enable_timing=True, blocking=True)
        last.record(self._stream)
        self._last = last
        # Also after an error: what was given to the device before goes on reading.
        self._jobs.put(_Job(first, last, None if error else done, (tuple(items), more, at_once)))
        if error is not None:
            done(error)

    def read(self, samples: Samples, done: Callable[[BaseException | None], None]) -> None:
        """One gather on the current stream; its words cross on the side stream, and the watcher
        thread notes them.
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
        buffers: _SampleBuffers | None = samples.prepared
        nth = 0 if buffers is None else 1
        if buffers is None:
            buffers = samples.prepared = _SampleBuffers.of(samples, self.device)
        words, host = buffers.words[nth], buffers.host[nth]
        torch.index_select(samples.plan.span, 0, buffers.index, out=words)
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

        Returns the seconds that the device's stream stood still at earlier calls, as far as it has
        told since the last one.
        """
        stalled = self._stalls()
        if self._last is not None:
            stream = torch.cuda.current_stream(self.device)
            reached = torch.cuda.Event(enable_timing=True)
            reached.record(stream)
            stream.wait_event(self._last)
            self._waits.append((reached, self._last))
            self._last = None
        return stalled

    def restore(self, items: Sequence[CopyItem], memory: HostMemory, base: int) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.no_grad(), torch.cuda.stream(self._stream):
            plan_transfers(items, self._pack).receive(memory.tensor[base:])
        self._stream.synchronize()

    def close(self) -> None:
        self._stream.synchronize()
        for addresses in self._registered.values():
            for address in addresses:
                torch.cuda.cudart().cudaHostUnregister(address)
        self._registered.clear()
        self._jobs.put(None)
        self._thread.join(timeout=30)

    def _transfers(self, items: Sequence[CopyItem]) -> CopyTransfers:
        """Planned once for a list that is handed over again, which it is as long as the tensors are
        the same ones.
        """
        if not isinstance(items, CopyList):
            return plan_transfers(items, self._pack)
        key = weakref.ref(items, lambda gone: self._planned.pop(gone, None))
        if key not in self._planned:
            self._planned[key] = plan_transfers(items, self._pack)
        return self._planned[key]

    # -- beside the training thread ------------------------------------------------------------------

    def _stalls(self) -> float:
        """Seconds that streams waited in ``wait`` calls that are over."""
        total = 0.0
        while self._waits and all(event.query() for event in self._waits[0]):
            reached, copied = self._waits.popleft()
            total += max(0.0, reached.elapsed_time(copied) / 1e3)
        return total

    def _watch(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._report(job)
            except Exception:
                # It must live: a slot whose copy nobody reports would stay claimed for good.
                logger.exception("in the copy thread")
            del job  # nothing that was read is kept until the next copy

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

    def _forget_error(self) -> None:
        """The runtime keeps a refusal until somebody asks; the next kernel's launch check, the
        trainer's, would raise it.
        """
        try:
            self._pack[:1].zero_()
        except RuntimeError as error:
            logger.debug("the driver's refusal: %s", error)
