"""The ways across the link that `bench.gpu_copies` measures, and the places in which it measures them.

A *place* runs a candidate alone, beside a load, and with small copies beside it: on a device, or with copies in
host memory, which tries the benchmark itself. As a program: tries out the candidates of one group.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from bench import gpu
from bench.common import GB, MIB, clock_ms, median
from bench.gpu import SmallCopy
from ckptd.cuda.store_kernel import StoreKernel, Tiles, store_kernel

__all__ = [
    "Candidate",
    "DevicePlace",
    "HostCopy",
    "HostPlace",
    "Load",
    "Place",
    "Sample",
    "chunk_layout",
    "device_candidates",
    "pause_us",
    "probe",
]

CHUNKS_MIB = (1, 2, 4, 16)
PACED_MIB = (1, 4)
STORE_BLOCKS = (1, 2, 4, 8, 16)
BATCH_MIB = (4, 16)
# Of the load's time, over which paced copies are spread.
PACE_FRACTION = 0.9
SIDE_PRIORITY = 0
# The device is kept busy for so long while the host issues copies, so that these and the load begin together.
GATE_MS = 40.0
JOIN_S = 60.0
PROBE_S = 120.0
PROBE_BYTES = 64 * MIB


# --- what needs no device --------------------------------------------------------------------------------


def chunk_layout(total_bytes: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """Offsets and lengths of consecutive chunks; the last one may be shorter."""
    if total_bytes < 1 or chunk_bytes < 1:
        raise ValueError(f"{total_bytes} bytes in chunks of {chunk_bytes} are no layout")
    return [(at, min(chunk_bytes, total_bytes - at)) for at in range(0, total_bytes, chunk_bytes)]


def pause_us(total_bytes: int, chunk_bytes: int, *, gb_per_s: float, over_ms: float) -> float:
    """The pause after each chunk with which all of them take ``over_ms``; 0 if they do anyway."""
    pauses = len(chunk_layout(total_bytes, chunk_bytes)) - 1
    spare_us = 1e3 * over_ms - total_bytes / gb_per_s / 1e3
    return max(0.0, spare_us / pauses) if pauses else 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One capture beside the load: milliseconds of the load, of the copies from their begin on, and of the
    thread that issues them.
    """

    load_ms: float
    copy_ms: float
    host_ms: float = 0.0


class Candidate(Protocol):
    """A way to copy the whole source to the target."""

    name: str

    def begin(self) -> None:
        """Start the copy; on a device, on the side stream, which is current."""

    def join(self) -> None:
        """Return when everything is issued; the bytes may still be on their way."""


class Place(Protocol):
    """Where candidates are measured."""

    def alone_ms(self, candidate: Candidate) -> float: ...
    def beside(self, candidate: Candidate | None) -> Sample: ...
    def delays_us(self, candidate: Candidate) -> list[float]: ...
    def idle_us(self) -> list[float]: ...
    def check(self, candidate: Candidate) -> None: ...


# --- on the host: the same rounds without a device ---------------------------------------------------------


@dataclass(slots=True)
class HostCopy:
    """Copies in a thread, in chunks."""

    name: str
    source: Tensor
    target: Tensor
    chunk_bytes: int
    _thread: threading.Thread | None = None

    def begin(self) -> None:
        self._thread = threading.Thread(target=self._copy, name="copy", daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        for at, length in chunk_layout(self.source.numel(), self.chunk_bytes):
            self.target[at : at + length].copy_(self.source[at : at + length])

    def join(self) -> None:
        assert self._thread is not None, "join() before begin()"
        join(self._thread)


class HostPlace:
    """Copies in host memory beside matrix products of the host."""

    def __init__(self, total_bytes: int, products: int, width: int) -> None:
        self.source = torch.arange(total_bytes, dtype=torch.int64).to(torch.uint8)
        self.target = torch.zeros_like(self.source)
        self._matrix = torch.randn(width, width)
        self._products = products

    def candidates(self) -> list[Candidate]:
        total = self.source.numel()
        chunks = [HostCopy(f"chunks_{m}m", self.source, self.target, m * MIB) for m in CHUNKS_MIB]
        return [HostCopy("burst", self.source, self.target, total), *chunks]

    def alone_ms(self, candidate: Candidate) -> float:
        begun = time.perf_counter()
        candidate.begin()
        candidate.join()
        return 1e3 * (time.perf_counter() - begun)

    def beside(self, candidate: Candidate | None) -> Sample:
        begun = time.perf_counter()
        host_ms = 0.0 if candidate is None else clock_ms(candidate.begin)
        for _ in range(self._products):
            torch.mm(self._matrix, self._matrix)
        load_ms = 1e3 * (time.perf_counter() - begun)
        if candidate is not None:
            candidate.join()
        return Sample(load_ms, 1e3 * (time.perf_counter() - begun), host_ms)

    def delays_us(self, candidate: Candidate) -> list[float]:
        """The host has no copy engine for which small copies wait."""
        return []

    def idle_us(self) -> list[float]:
        return []

    def check(self, candidate: Candidate) -> None:
        self.target.zero_()
        self.alone_ms(candidate)
        compare(candidate.name, self.source, self.target)


def join(thread: threading.Thread) -> None:
    thread.join(JOIN_S)
    if thread.is_alive():
        raise RuntimeError(f"copies did not end within {JOIN_S:g} s")


def compare(name: str, source: Tensor, target: Tensor) -> None:
    """A rate counts only if the bytes arrive."""
    if not torch.equal(source, target):
        raise RuntimeError(f"{name}: what arrived is not what was sent")


# --- on a device -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Chunks:
    """Copies of ``chunk_bytes`` with a kernel between, and pauses on the device if ``cycles`` are given."""

    name: str
    source: Tensor
    target: Tensor
    chunk_bytes: int
    pad: Tensor | None = None
    cycles: int = 0

    def begin(self) -> None:
        for at, length in chunk_layout(self.source.numel(), self.chunk_bytes):
            self.target[at : at + length].copy_(self.source[at : at + length], non_blocking=True)
            if self.pad is not None:
                self.pad.zero_()
            if self.cycles:
                torch.cuda._sleep(self.cycles)  # type: ignore[no-untyped-call]

    def join(self) -> None:
        """Everything was issued by ``begin``."""


@dataclass(slots=True)
class HostPaced:
    """A thread issues each chunk when the one before has arrived and a pause has passed."""

    name: str
    source: Tensor
    target: Tensor
    chunk_bytes: int
    pause_s: float
    _thread: threading.Thread | None = None
    _failed: list[BaseException] = field(default_factory=list)

    def begin(self) -> None:
        stream = torch.cuda.current_stream()
        self._thread = threading.Thread(target=self._run, args=(stream,), name="copy", daemon=True)
        self._thread.start()

    def _run(self, stream: torch.cuda.Stream) -> None:
        try:
            with torch.cuda.stream(stream):
                for at, length in chunk_layout(self.source.numel(), self.chunk_bytes):
                    self.target[at : at + length].copy_(self.source[at : at + length], non_blocking=True)
                    arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                    arrived.record()
                    arrived.synchronize()
                    time.sleep(self.pause_s)
        except Exception as error:  # noqa: BLE001 - raised again by `join`, in the caller's thread
            self._failed.append(error)

    def join(self) -> None:
        assert self._thread is not None, "join() before begin()"
        join(self._thread)
        if self._failed:
            raise RuntimeError(f"{self.name}: a chunk could not be copied") from self._failed.pop()


@dataclass(slots=True)
class Store:
    """The engine's kernel with so many blocks, which stores past the copy engine."""

    name: str
    target: Tensor
    blocks: int
    kernel: StoreKernel
    tiles: Tiles

    def begin(self) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self.kernel.store(self.tiles, self.target.data_ptr(), stream, blocks=self.blocks)

    def join(self) -> None:
        """It is one launch."""


@dataclass(slots=True)
class Batch:
    """``cudaMemcpyBatchAsync``: all chunks by one call."""

    name: str
    source: Tensor
    target: Tensor
    chunk_bytes: int
    runtime: Any
    overlap: bool = False

    def begin(self) -> None:
        layout = chunk_layout(self.source.numel(), self.chunk_bytes)
        attributes = self.runtime.cudaMemcpyAttributes()
        # Never *any*: the source would be read after training has gone on to change it.
        order = self.runtime.cudaMemcpySrcAccessOrder
        attributes.srcAccessOrder = order.cudaMemcpySrcAccessOrderStream
        if self.overlap:
            attributes.flags = int(self.runtime.cudaMemcpyFlags.cudaMemcpyFlagPreferOverlapWithCompute)
        code, *_ = self.runtime.cudaMemcpyBatchAsync(
            [self.target.data_ptr() + at for at, _ in layout],
            [self.source.data_ptr() + at for at, _ in layout],
            [length for _, length in layout],
            len(layout),
            [attributes],
            [0],
            1,
            torch.cuda.current_stream().cuda_stream,
        )
        if int(code):
            raise RuntimeError(f"{self.name}: cudaMemcpyBatchAsync failed with {code}")

    def join(self) -> None:
        """It is one call."""


class Load:
    """An iteration: ``products`` products of square bf16 matrices, each followed by the size of a `nonzero`."""

    def __init__(self, products: int, width: int) -> None:
        self._left = torch.randn(width, width, dtype=torch.bfloat16, device=gpu.DEVICE)
        self._right = torch.randn(width, width, dtype=torch.bfloat16, device=gpu.DEVICE)
        self._out = torch.empty_like(self._left)
        self._chosen = torch.rand(8192, device=gpu.DEVICE) < 0.1
        self._products = products

    def iterate(self) -> None:
        for _ in range(self._products):
            torch.mm(self._left, self._right, out=self._out)
            torch.mm(self._right, self._left, out=self._out)
            self._chosen.nonzero()


class DevicePlace:
    """One device: its current stream trains, a side stream copies."""

    def __init__(self, total_bytes: int, load: Load) -> None:
        self.source = torch.randint(0, 256, (total_bytes,), dtype=torch.uint8, device=gpu.DEVICE)
        self.target = torch.zeros(total_bytes, dtype=torch.uint8, pin_memory=gpu.PINNED)
        self.cycles_per_us = cycles_per_us()
        self._gate_cycles = int(1e3 * GATE_MS * self.cycles_per_us)
        self._stream = torch.cuda.Stream(priority=SIDE_PRIORITY)  # type: ignore[no-untyped-call]
        self._load = load
        self._small = SmallCopy()
        self._expected = self.source.cpu()

    def _gate(self) -> torch.cuda.Event:
        """Keeps the idle device busy for a while, in which the host issues copies; the event is at its end."""
        torch.cuda.synchronize()
        torch.cuda._sleep(self._gate_cycles)  # type: ignore[no-untyped-call]
        begun = _event()
        begun.record()
        return begun

    def _copy(self, candidate: Candidate) -> tuple[float, Callable[[], torch.cuda.Event]]:
        """Begins a copy on the side stream, behind the gate: milliseconds of the host, and what joins the copy
        and gives its last event.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            host_ms = clock_ms(candidate.begin)

        def joined() -> torch.cuda.Event:
            candidate.join()
            last = _event()
            last.record(self._stream)
            return last

        return host_ms, joined

    def alone_ms(self, candidate: Candidate) -> float:
        begun = self._gate()
        last = self._copy(candidate)[1]()
        last.synchronize()
        return float(begun.elapsed_time(last))

    def beside(self, candidate: Candidate | None) -> Sample:
        begun, over = self._gate(), _event()
        host_ms, joined = (0.0, None) if candidate is None else self._copy(candidate)
        self._load.iterate()
        over.record()
        last = over if joined is None else joined()
        torch.cuda.synchronize()
        return Sample(begun.elapsed_time(over), begun.elapsed_time(last), host_ms)

    def delays_us(self, candidate: Candidate) -> list[float]:
        """Of small copies from the begin of the copies to their end."""
        self._gate()
        _, joined = self._copy(candidate)
        found: list[float] = []
        failed: list[BaseException] = []
        over = threading.Event()

        def join_it() -> None:
            try:
                joined().synchronize()
            except Exception as error:  # noqa: BLE001 - raised again below, in the caller's thread
                failed.append(error)
            finally:
                over.set()

        # A candidate with a thread of its own is joined beside the small copies.
        thread = threading.Thread(target=join_it, name="join", daemon=True)
        thread.start()
        found.append(self._small.us())
        while not over.is_set():
            found.append(self._small.us())
        join(thread)
        if failed:
            raise RuntimeError(f"{candidate.name}: its copies could not be joined") from failed[0]
        return found

    def idle_us(self) -> list[float]:
        torch.cuda.synchronize()
        return [self._small.us() for _ in range(200)]

    def check(self, candidate: Candidate) -> None:
        self.target.zero_()
        self.alone_ms(candidate)
        compare(candidate.name, self._expected, self.target)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def cycles_per_us() -> float:
    """Of the clock that `torch.cuda._sleep` counts."""
    cycles = 20_000_000
    times = []
    for _ in range(3):
        begun, over = _event(), _event()
        begun.record()
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        over.record()
        over.synchronize()
        times.append(1e3 * begun.elapsed_time(over))
    return cycles / median(times)


def device_candidates(
    place: DevicePlace, *, pace_ms: float | None = None
) -> tuple[list[Candidate], dict[str, str]]:
    """What this machine can do, and what it lacks, by name.

    Args:
        pace_ms: the time over which paced copies are spread; None: most of the load's.
    """
    source, target = place.source, place.target
    pad = torch.empty(1, dtype=torch.uint8, device=gpu.DEVICE)
    total = source.numel()
    burst = Chunks("burst", source, target, total)
    found: list[Candidate] = [burst]
    found += [Chunks(f"chunks_{m}m", source, target, m * MIB, pad) for m in CHUNKS_MIB]
    place.beside(None)
    load_ms = median([place.beside(None).load_ms for _ in range(3)])
    rate = total / GB / (median([place.alone_ms(burst) for _ in range(3)]) / 1e3)
    over_ms = PACE_FRACTION * load_ms if pace_ms is None else pace_ms
    for m in PACED_MIB:
        pause = pause_us(total, m * MIB, gb_per_s=rate, over_ms=over_ms)
        cycles = max(1, int(pause * place.cycles_per_us))
        found.append(Chunks(f"paced_{m}m", source, target, m * MIB, cycles=cycles))
        found.append(HostPaced(f"host_paced_{m}m", source, target, m * MIB, pause / 1e6))
    skipped: dict[str, str] = {}
    for group, make in GROUPS.items():
        lacks = probe(group)
        if lacks:
            skipped[group] = lacks
        else:
            found += make(place)
    return found, skipped


def store_candidates(place: DevicePlace) -> list[Candidate]:
    kernel = store_kernel(torch.cuda.current_device())
    if kernel is None:
        raise RuntimeError("the driver takes no kernel that stores into host memory")
    tiles = Tiles.of([place.source], [0], place.source.device)
    return [Store(f"store_{n}", place.target, n, kernel, tiles) for n in STORE_BLOCKS]


def batch_candidates(place: DevicePlace) -> list[Candidate]:
    from cuda.bindings import runtime

    if not hasattr(runtime, "cudaMemcpyBatchAsync"):
        raise RuntimeError("this cuda-python has no cudaMemcpyBatchAsync (it came with CUDA 12.8)")
    found = [Batch(f"batch_{m}m", place.source, place.target, m * MIB, runtime) for m in BATCH_MIB]
    if hasattr(runtime, "cudaMemcpyFlags"):
        first = BATCH_MIB[0]
        found.append(
            Batch(f"batch_{first}m_overlap", place.source, place.target, first * MIB, runtime, overlap=True)
        )
    return list(found)


GROUPS: dict[str, Callable[[DevicePlace], list[Candidate]]] = {
    "store": store_candidates,
    "batch": batch_candidates,
}


def probe(group: str) -> str:
    """Why this machine has none of these candidates; empty if it has.

    Tried in a process of its own: a kernel that fails spoils the device's context for all that comes after.
    """
    command = [sys.executable, "-m", "bench.gpu_candidates", group]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        return f"its trial did not end within {PROBE_S:g} s"
    if done.returncode == 0:
        return ""
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1] if lines else f"its trial ended with code {done.returncode}"


def try_out(group: str) -> None:
    place = DevicePlace(PROBE_BYTES, Load(1, 64))
    for candidate in GROUPS[group](place):
        place.check(candidate)


if __name__ == "__main__":
    try_out(sys.argv[1])
