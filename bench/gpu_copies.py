"""Ways to get a snapshot's bytes across the link, each alone and while a model trains, in one run.

The load is a synthetic iteration: matrix products, and after some of them the size of a `nonzero` comes to
the host, as in a mixture of experts. The ways take turns, round by round:

* `burst`: one copy;
* `chunks_<n>m`: chunks of n MiB with a kernel between, which makes the copy engine look at other streams;
* `paced_<n>m`: these with pauses on the device, so that they end with the load; `host_paced_<n>m`: a thread
  issues a chunk when the one before has arrived and a pause has passed;
* `gather_<n>sm`: a kernel of n programs stores into mapped pinned memory, past the copy engine (Triton);
* `batch_<n>m`: `cudaMemcpyBatchAsync` (cuda-python), source order *stream*; `..._overlap` with the driver's hint
  to prefer overlap with kernels.

What this machine lacks is named as skipped. For each: `gb_per_s` alone and `beside` the load, `vs_link` (one
large pinned copy), `slowdown` of the load, `small_copy_delay_us` of an 8-byte copy of another stream,
`overrun_ms`, which the copies need after the load's end, and `host_ms` of the thread that issues them. At the end the best one under a bound on the slowdown,
and the plan that `ckptd.cuda.copy_plan` makes of this device's points. `--device cpu` runs the same rounds
with copies in host memory; its numbers say nothing about a device.
"""

from __future__ import annotations

import argparse
import json
import mmap
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from bench.common import (
    GB,
    MIB,
    Metric,
    clock_ms,
    emit,
    in_shared_environment,
    median,
    parser,
    percentile,
    table,
)
from bench.gpu import Capture, SmallCopy
from ckptd.cuda.copy_plan import (
    DEFAULT_PLAN,
    ChunkPoint,
    CopyCurve,
    CopyPlan,
    SizePoint,
    choose_copy_plan,
)
from ckptd.cuda.cuda_engine import make_engine
from ckptd.cuda.engine import CopyItem, CopyList, HostMemory

__all__ = [
    "Candidate",
    "Result",
    "Rounds",
    "Sample",
    "best_of",
    "chunk_layout",
    "main",
    "pause_us",
    "summarize",
]

CHUNKS_MIB = (1, 2, 4, 16)
PACED_MIB = (1, 4)
GATHER_PROGRAMS = (4, 8, 16)
BATCH_MIB = (4, 16)
SLOWDOWN_MAX = 0.01
# Of the load's time, over which paced copies are spread.
PACE_FRACTION = 0.9
SIDE_PRIORITY = 0
# The device is kept busy for so long while the host issues copies, so that these and the load begin together.
GATE_MS = 40.0
POINT_SIZES = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
POINT_BYTES = 256 << 20
POINT_TENSORS = 2048
ALL_PACKED, ALL_DIRECT = 1 << 40, 1
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


@dataclass(slots=True)
class Rounds:
    """What was measured of one candidate, round by round."""

    alone_ms: list[float] = field(default_factory=list)
    beside: list[Sample] = field(default_factory=list)
    delays_us: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Result:
    """One candidate: medians over its rounds.

    Args:
        slowdown: what the load takes longer than without copies, as a fraction; each round by itself.
        overrun_ms: what the copies take longer than the load.
        host_ms: of the training thread, to issue the copies; not in the slowdown.
        small_copy_delay_us: None where no small copy was clocked.
    """

    name: str
    gb_per_s: float
    vs_link: float
    beside_gb_per_s: float
    slowdown: float
    slowdown_p99: float
    overrun_ms: float
    host_ms: float
    small_copy_delay_us: float | None
    small_copy_delay_p99_us: float | None


def summarize(
    name: str,
    rounds: Rounds,
    *,
    total_bytes: int,
    link_gb_per_s: float,
    load_ms: Sequence[float],
    idle_us: Sequence[float] = (),
) -> Result:
    """
    Args:
        load_ms: of the load without copies, in the same rounds.
        idle_us: small copies on an idle device.
    """
    rate = total_bytes / GB / (median(rounds.alone_ms) / 1e3)
    slowdowns = [s.load_ms / plain - 1.0 for s, plain in zip(rounds.beside, load_ms, strict=True)]
    delay = p99 = None
    if rounds.delays_us and idle_us:
        base = median(idle_us)
        delay, p99 = median(rounds.delays_us) - base, percentile(rounds.delays_us, 0.99) - base
    return Result(
        name=name,
        gb_per_s=rate,
        vs_link=rate / link_gb_per_s,
        beside_gb_per_s=total_bytes / GB / (median([s.copy_ms for s in rounds.beside]) / 1e3),
        slowdown=median(slowdowns),
        slowdown_p99=percentile(slowdowns, 0.99),
        overrun_ms=max(0.0, median([s.copy_ms - s.load_ms for s in rounds.beside])),
        host_ms=median([s.host_ms for s in rounds.beside]),
        small_copy_delay_us=delay,
        small_copy_delay_p99_us=p99,
    )


def best_of(results: Sequence[Result], *, slowdown_max: float) -> tuple[Result, str]:
    """The candidate to take, and why.

    Of those that slow the load by at most ``slowdown_max`` the one that keeps training waiting least after the
    load's end, then the fastest beside it; if there is none, the one that slows it least.

    Raises:
        ValueError: there is no result.
    """
    if not results:
        raise ValueError("nothing was measured: there is no candidate to choose")
    kept = [r for r in results if r.slowdown <= slowdown_max]
    if not kept:
        least = min(results, key=lambda r: (r.slowdown, r.overrun_ms))
        text = f"none keeps the slowdown within {slowdown_max:.1%}; {least.name} has the least, {least.slowdown:.1%}"
        return least, text
    best = min(kept, key=lambda r: (r.overrun_ms, -r.beside_gb_per_s))
    text = (
        f"{best.name}: slowdown {best.slowdown:.1%} within {slowdown_max:.1%}, {best.beside_gb_per_s:.1f} GB/s beside "
        f"the load, {best.overrun_ms:.1f} ms after its end; {len(kept)} of {len(results)} keep the bound"
    )
    return best, text


def chunk_points(results: Sequence[Result]) -> tuple[ChunkPoint, ...]:
    """Of the candidates with a kernel between their chunks: what a plan is made of."""
    found = []
    for result in results:
        head, _, size = result.name.partition("_")
        if head == "chunks" and result.small_copy_delay_us is not None:
            delay = max(0.0, result.small_copy_delay_us)
            found.append(ChunkPoint(int(size.removesuffix("m")) * MIB, result.gb_per_s, delay))
    return tuple(sorted(found, key=lambda point: point.chunk_bytes))


# --- candidates ------------------------------------------------------------------------------------------


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


@dataclass(slots=True)
class Measured:
    rounds: dict[str, Rounds]
    load_ms: list[float] = field(default_factory=list)
    idle_us: list[float] = field(default_factory=list)

    def results(self, total_bytes: int, *, link: str = "burst") -> list[Result]:
        """One large pinned copy, the candidate ``link``, is what the others are compared with."""
        rate = total_bytes / GB / (median(self.rounds[link].alone_ms) / 1e3)
        return [
            summarize(
                name,
                rounds,
                total_bytes=total_bytes,
                link_gb_per_s=rate,
                load_ms=self.load_ms,
                idle_us=self.idle_us,
            )
            for name, rounds in self.rounds.items()
        ]


def measure(place: Place, candidates: Sequence[Candidate], *, rounds: int, warmup: int = 1) -> Measured:
    """All candidates in turn, in alternating order, so that drift hits each of them alike."""
    found = Measured({c.name: Rounds() for c in candidates})
    for candidate in candidates:
        place.check(candidate)  # raises: nothing is measured where bytes do not arrive
    found.idle_us = place.idle_us()
    for number in range(-warmup, rounds):
        ordered = list(candidates) if number % 2 == 0 else list(reversed(candidates))
        plain = place.beside(None).load_ms
        for candidate in ordered:
            alone, beside = place.alone_ms(candidate), place.beside(candidate)
            delays = place.delays_us(candidate)
            if number >= 0:
                kept = found.rounds[candidate.name]
                kept.alone_ms.append(alone)
                kept.beside.append(beside)
                kept.delays_us += delays
        if number >= 0:
            # Before and after the others: the load's own drift within the round.
            found.load_ms.append((plain + place.beside(None).load_ms) / 2)
    return found


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
class GatherStore:
    """A kernel of ``programs`` blocks that reads the source and stores into mapped pinned memory."""

    name: str
    source: Tensor
    target: Tensor
    programs: int
    kernel: Any

    def begin(self) -> None:
        words = self.source.numel() // 8
        # A pinned host tensor is a pointer that the device can use, as Triton's launcher asks the driver.
        self.kernel[(self.programs,)](
            self.source.view(torch.int64), self.target.view(torch.int64), words, BLOCK=1024, num_warps=8
        )

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
        self._left = torch.randn(width, width, dtype=torch.bfloat16, device="cuda")
        self._right = torch.randn(width, width, dtype=torch.bfloat16, device="cuda")
        self._out = torch.empty_like(self._left)
        self._chosen = torch.rand(8192, device="cuda") < 0.1
        self._products = products

    def iterate(self) -> None:
        for _ in range(self._products):
            torch.mm(self._left, self._right, out=self._out)
            torch.mm(self._right, self._left, out=self._out)
            self._chosen.nonzero()


class DevicePlace:
    """One device: its current stream trains, a side stream copies."""

    def __init__(self, total_bytes: int, load: Load) -> None:
        self.source = torch.randint(0, 256, (total_bytes,), dtype=torch.uint8, device="cuda")
        self.target = torch.zeros(total_bytes, dtype=torch.uint8, pin_memory=True)
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


def device_candidates(place: DevicePlace) -> tuple[list[Candidate], dict[str, str]]:
    """What this machine can do, and what it lacks, by name."""
    source, target = place.source, place.target
    pad = torch.empty(1, dtype=torch.uint8, device="cuda")
    total = source.numel()
    burst = Chunks("burst", source, target, total)
    found: list[Candidate] = [burst]
    found += [Chunks(f"chunks_{m}m", source, target, m * MIB, pad) for m in CHUNKS_MIB]
    place.beside(None)
    load_ms = median([place.beside(None).load_ms for _ in range(3)])
    rate = total / GB / (median([place.alone_ms(burst) for _ in range(3)]) / 1e3)
    clock = place.cycles_per_us
    for m in PACED_MIB:
        pause = pause_us(total, m * MIB, gb_per_s=rate, over_ms=PACE_FRACTION * load_ms)
        found.append(Chunks(f"paced_{m}m", source, target, m * MIB, cycles=max(1, int(pause * clock))))
        found.append(HostPaced(f"host_paced_{m}m", source, target, m * MIB, pause / 1e6))
    skipped: dict[str, str] = {}
    for group, make in GROUPS.items():
        lacks = probe(group)
        if lacks:
            skipped[group] = lacks
        else:
            found += make(place)
    return found, skipped


def gather_candidates(place: DevicePlace) -> list[Candidate]:
    from bench.gpu_store_kernel import store_kernel

    return [
        GatherStore(f"gather_{n}sm", place.source, place.target, n, store_kernel) for n in GATHER_PROGRAMS
    ]


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
    "gather": gather_candidates,
    "batch": batch_candidates,
}


def probe(group: str) -> str:
    """Why this machine has none of these candidates; empty if it has.

    Tried in a process of its own: a kernel that fails spoils the device's context for all that comes after.
    """
    command = [sys.executable, "-m", "bench.gpu_copies", "--probe", group]
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


# --- the device's curve --------------------------------------------------------------------------------------


def size_point(size_bytes: int, *, direct: bool, rounds: int, plan: CopyPlan) -> SizePoint:
    """The engine's copies of tensors of one size, all direct or all packed."""
    count = max(4, min(POINT_TENSORS, POINT_BYTES // size_bytes))
    threshold = ALL_DIRECT if direct else ALL_PACKED
    engine = make_engine(
        torch.device("cuda"), plan=CopyPlan(threshold, plan.chunk_bytes, plan.curve, 0.0, True, "")
    )
    memory = HostMemory(memoryview(mmap.mmap(-1, count * size_bytes)))
    memory.tensor.fill_(1)
    engine.register(memory, [(0, count * size_bytes)])
    tensors = [torch.empty(size_bytes, dtype=torch.uint8, device="cuda") for _ in range(count)]
    items = CopyList(
        CopyItem(t, None, None, torch.uint8, i * size_bytes, size_bytes) for i, t in enumerate(tensors)
    )
    host_us, rates = [], []
    try:
        for number in range(rounds + 2):
            torch.cuda.synchronize()
            capture = Capture()
            begun = time.perf_counter()
            engine.begin(items, memory, 0, capture.done)
            took_s = time.perf_counter() - begun
            engine.wait()
            capture.wait()
            if number >= 2:
                host_us.append(1e6 * took_s / count)
                rates.append(count * size_bytes / GB / engine.last_copy_s)
    finally:
        engine.release(memory)
        engine.close()
    return SizePoint(size_bytes, median(host_us), median(rates))


def curve_of(results: Sequence[Result], link_gb_per_s: float, *, rounds: int, plan: CopyPlan) -> CopyCurve:
    def points(*, direct: bool) -> tuple[SizePoint, ...]:
        return tuple(size_point(size, direct=direct, rounds=rounds, plan=plan) for size in POINT_SIZES)

    return CopyCurve(
        device=torch.cuda.get_device_name(0),
        link_gb_per_s=link_gb_per_s,
        direct=points(direct=True),
        packed=points(direct=False),
        chunks=chunk_points(results),
    )


def plan_metrics(plan: CopyPlan) -> dict[str, Metric]:
    return {"plan_small_bytes": plan.small_bytes, "plan_chunk_bytes": plan.chunk_bytes, "plan": plan.reason}


# --- all of it -----------------------------------------------------------------------------------------------


def metrics_of(results: Sequence[Result]) -> dict[str, Metric]:
    return {
        f"{key}_{result.name}": value
        for result in results
        for key, value in asdict(result).items()
        if key != "name" and value is not None
    }


def show(results: Sequence[Result]) -> str:
    def text(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    header = [
        "way",
        "GB/s",
        "of link",
        "beside",
        "slowdown",
        "p99",
        "overrun ms",
        "host ms",
        "small copy us",
        "p99",
    ]
    rows = [
        [
            r.name,
            f"{r.gb_per_s:.1f}",
            f"{r.vs_link:.3f}",
            f"{r.beside_gb_per_s:.1f}",
            f"{r.slowdown:+.2%}",
            f"{r.slowdown_p99:+.2%}",
            f"{r.overrun_ms:.1f}",
            f"{r.host_ms:.2f}",
            text(r.small_copy_delay_us, ".1f"),
            text(r.small_copy_delay_p99_us, ".1f"),
        ]
        for r in results
    ]
    return table(header, rows)


def main() -> None:
    in_shared_environment()
    options = parser(__doc__)
    options.set_defaults(rounds=20)
    options.add_argument("--size-mib", type=int, default=1024, help="of a snapshot")
    options.add_argument("--products", type=int, default=64, help="of the load, each with a small copy")
    options.add_argument("--width", type=int, default=4096, help="of the load's matrices")
    options.add_argument("--slowdown-max", type=float, default=SLOWDOWN_MAX)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--probe", choices=tuple(GROUPS), help=argparse.SUPPRESS)
    options.add_argument("--curve", type=Path, help="write the device's measured curve here, as JSON")
    args = options.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here: nothing is measured (--device cpu copies in host memory)")
        return
    if args.probe is not None:
        try_out(args.probe)
        return
    emit("gpu_copies", run(args), as_json=args.json)


def run(args: argparse.Namespace) -> dict[str, Metric]:
    total = args.size_mib * MIB
    place: Place
    if args.device == "cpu":
        host = place = HostPlace(total, args.products, args.width)
        candidates, skipped = host.candidates(), {"paced, gather, batch": "only on a device"}
    else:
        device = place = DevicePlace(total, Load(args.products, args.width))
        candidates, skipped = device_candidates(device)
    for name, reason in skipped.items():
        print(f"skipped: {name}: {reason}", flush=True)
    measured = measure(place, candidates, rounds=args.rounds)
    results = measured.results(total)
    print(show(results), flush=True)
    best, why = best_of(results, slowdown_max=args.slowdown_max)
    print(f"best: {why}", flush=True)
    metrics = metrics_of(results) | {"load_ms": median(measured.load_ms), "best": best.name, "why": why}
    metrics |= {f"skipped_{name.split(',')[0]}": reason for name, reason in skipped.items()}
    if args.device == "cuda":
        emit("gpu_copies", metrics, as_json=args.json)  # what is known by now
        metrics |= measured_plan(results, args)
    return metrics


def measured_plan(results: Sequence[Result], args: argparse.Namespace) -> dict[str, Metric]:
    """The plan of this device's own points, beside the one that the engine has now."""
    link = next(r.gb_per_s for r in results if r.name == "burst")
    curve = curve_of(results, link, rounds=min(10, args.rounds), plan=DEFAULT_PLAN)
    if args.curve is not None:
        args.curve.parent.mkdir(parents=True, exist_ok=True)
        args.curve.write_text(json.dumps(asdict(curve), indent=1) + "\n")
    plan = choose_copy_plan(curve)
    print(plan.reason, flush=True)
    found = plan_metrics(plan)
    for kind, points in (("direct", curve.direct), ("packed", curve.packed)):
        for point in points:
            label = f"{kind}_{point.size_bytes >> 10}k"
            found |= {f"host_us_{label}": point.host_us, f"gb_per_s_{label}": point.gb_per_s}
    return found


if __name__ == "__main__":
    main()
