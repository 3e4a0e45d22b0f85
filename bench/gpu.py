"""On a GPU: what a snapshot every iteration costs, against the same loop without, the link, and
torch's own saves.

A mixture of experts with bf16 weights, fp32 masters and AdamW; each run is a process of its own,
and they take turns block by block on one device. `overhead_fraction_cuda` is what an iteration
takes longer with ckptd, which chooses its window; `window8` has one of eight from the start, and
`dense` takes everything every time. `overhead_p99_fraction_cuda` compares the 99th percentile of
iterations, as the device's events clock them, with that of the plain run. `--largest` measures
both with the largest model that fits, each run with the device to itself.

`capture_vs_link_cuda`: the rate at which snapshots cross the link while the model trains, against
one large pinned copy on an idle device. `capture_vs_link` and `restore_vs_link`: 400 tensors of
mixed sizes by the copy engine alone, each round against such a copy of that direction.
`small_copy_delay_us`: what an 8-byte copy to the host, of another stream, waits longer while those
are captured (`chunk_us` is the time of one chunk). `begin_us_per_tensor`: what the training thread
spends on handing over a snapshot of many small or large tensors.

`attach_s` is the time of the constructor for a new run, `first_snapshot_s` until it has a
snapshot, `resume_s` the constructor's in a process that resumes. Peers save the same state: their
stall is the time of the call, with the device idle and memory warm. `stall_vs_best_peer_cuda` is
ckptd's stall by its own account over the best peer's, `added_vs_best_peer_cuda` what its
iterations take longer, by the clock. Each part that fails is named; the others are still measured.
`--device cpu` trains on the host, to try the benchmark itself: then its name is `gpu_twin`.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import mmap
import os
import random
import shutil
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

from bench.common import (
    GB,
    Metric,
    clock_ms,
    copy_gb_per_s,
    emit,
    in_shared_environment,
    interleave,
    median,
    own_daemon,
    parser,
    percentile,
    table,
)
from bench.overhead import LINK_BYTES, Job, Worker, fraction, pinned_link_gb_per_s
from ckptd.cuda.copy_plan import DEFAULT_PLAN, CopyPlan
from ckptd.cuda.cuda_engine import make_engine
from ckptd.cuda.engine import CopyEngine, CopyItem, CopyList, HostMemory
from ckptd.demo.data import load_corpus
from ckptd.demo.model import MoEConfig, MoETransformer

__all__ = [
    "Capture",
    "Mixed",
    "SmallCopy",
    "add_model_options",
    "config_of",
    "layers_that_fit",
    "main",
    "mixed_sizes",
    "model_options",
    "settle",
    "use_chunks",
]

# Where the copy engine is measured; a test of this module puts the host in its place.
DEVICE, PINNED = "cuda", True
MAX_SETTLE_S = 90.0
LAST_WORDS_S = 900.0  # peers save many times
WARMUP = 2  # blocks
KINDS = {"ckptd": "sliding", "fixed": "fixed", "dense": "dense"}
LABELS = {"ckptd": "cuda", "fixed": "cuda_window8", "dense": "cuda_dense"}
MIXED_TENSORS, MIXED_BYTES = 400, 4 << 30
LEAST_BYTES, MOST_BYTES = 16 << 10, 64 << 20
PROBES_IDLE = 200
CAPTURE_S = 60.0
MODEL_OPTIONS = ("width", "layers", "experts", "batch_size", "settle", "chunk_mib")
CONTEXT = 128  # of bench.overhead's loader
# Bytes on the device for each parameter: bf16 weight and gradient, fp32 master, gradient and two moments, and
# what AdamW computes with; on the host: weight, master and moments in each of three snapshots of everything.
DEVICE_BYTES_EACH, HOST_BYTES_EACH = 24, 3 * 14
ACTIVATION_BYTES_EACH = 64  # for each token, channel and layer, with room
RESERVE_BYTES = 3 << 30


def add_model_options(options: argparse.ArgumentParser) -> None:
    """The model and the daemon's memory: for the run of this benchmark and of others on its model."""
    options.add_argument("--batch-size", type=int, default=64)
    options.add_argument("--width", type=int, default=1024)
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--experts", type=int, default=16)
    options.add_argument("--settle", type=int, default=60, help="iterations before measuring")
    options.add_argument("--memory-gib", type=int, default=88, help="of the daemon, in /dev/shm")
    options.add_argument("--chunk-mib", type=int, default=0, help="of copies; 0: of the engine's plan")


def model_options(args: Any) -> list[str]:
    """The same ones for a process of one run."""
    return [
        part for name in MODEL_OPTIONS for part in (f"--{name.replace('_', '-')}", str(getattr(args, name)))
    ]


def config_of(args: Any) -> MoEConfig:
    return MoEConfig(
        width=args.width,
        num_layers=args.layers,
        num_heads=max(1, args.width // 64),
        num_experts=args.experts,
        expert_hidden=2 * args.width,
    )


# --- processes of one run each ---------------------------------------------------------------------


def work(args: Any) -> None:
    """Settles, then answers each line on stdin, a number of iterations, with milliseconds for each."""
    logging.basicConfig(level=logging.INFO)  # what the plan of copies predicts, beside what is measured
    torch.set_num_threads(1)
    use_chunks(args.chunk_mib)
    job = Job(device=args.device, batch_size=args.batch_size, corpus=load_corpus(), config=config_of(args))
    endpoint, _, kind = args.worker.partition("#")
    if endpoint == "peers":
        print(json.dumps(peers(job, args.saves)), flush=True)
        return
    begun = time.perf_counter()
    times: dict[str, float] = {}
    if endpoint != "plain":
        attach(job, endpoint, kind.removeprefix("resume-"))
        times["attach_wall_s"] = time.perf_counter() - begun
    if not kind.startswith("resume-"):
        times["first_snapshot_s"] = times.get("attach_wall_s", 0.0) + settle(job, args.settle)
        print("ready", flush=True)
        for line in sys.stdin:
            print(*job.block_ms(int(line)), *job.each_ms, flush=True)
    if job.ckpt is not None:
        resumed = job.ckpt.resumed_from
        times["resumed_from"] = -1 if resumed is None else resumed
        print(json.dumps(job.ckpt.stats() | times), flush=True)
        job.ckpt.close()


def use_chunks(mib: int) -> None:
    """Engines of this process copy in chunks of so many MiB."""
    if mib:
        assert make_engine.__kwdefaults__ is not None
        make_engine.__kwdefaults__["plan"] = replace(DEFAULT_PLAN, chunk_bytes=mib << 20)


def attach(job: Job, endpoint: str, kind: str) -> None:
    window = 8 if kind == "fixed" else None
    job.attach(
        run=f"gpu-{kind}", daemon=endpoint, window=window, policy="dense" if kind == "dense" else "sliding"
    )


def settle(job: Job, at_least: int) -> float:
    """Until snapshots are being taken in memory that is all there, and the window has not changed
    for so long. Returns the seconds until the first snapshot.
    """
    begun, window, done, first_s = time.monotonic(), 0.0, 0, 0.0
    while True:
        stats = {} if job.ckpt is None else job.ckpt.stats()
        if stats and stats["window"] != window:
            window, done = stats["window"], 0
            print(f"window {window:g}", file=sys.stderr, flush=True)
        if stats and stats["snapshots"] and not first_s:
            first_s = time.monotonic() - begun
        taken = job.ckpt is None or stats["snapshots"] >= 4 * stats["window"] + 8
        if done >= at_least and taken:
            return first_s
        if time.monotonic() - begun > MAX_SETTLE_S:
            if stats and stats["snapshots"]:
                print(f"not settled within {MAX_SETTLE_S:g} s: {stats}", file=sys.stderr, flush=True)
                return first_s
            raise RuntimeError(f"no snapshot within {MAX_SETTLE_S:g} s: {stats}")
        job.iterate()
        done += 1


def worker(args: Any, role: str) -> Worker:
    command = [sys.executable, "-m", "bench.gpu", "--worker", role, *model_options(args)]
    command += ["--saves", str(args.saves), "--device", args.device]
    made, begun = Worker(command), time.monotonic()
    if role != "peers" and "#resume-" not in role:
        made.read()
        print(f"{role.partition('#')[2] or role}: ready after {time.monotonic() - begun:.0f} s", flush=True)
    return made


def last_words(of: Worker) -> dict[str, Any]:
    said = of.close(LAST_WORDS_S)
    return dict(json.loads(said)) if said else {}


def peers(job: Job, saves: int) -> dict[str, float]:
    """Milliseconds that training waits for a save of the whole state, by kind of save; of those after
    a first one.
    """
    for _ in range(3):
        job.iterate()
    state = {
        "model": dict(job.model.state_dict()),
        "masters": dict(job.masters),
        "optimizer": job.optimizer.state_dict(),
    }
    found: dict[str, float] = {}
    # In memory: their stall is not to depend on a disk.
    with (
        tempfile.TemporaryDirectory(prefix="ckptd-peers-", dir="/dev/shm") as folder,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # the peers' deprecations are not ours to fix
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)

        def dcp(name: str, stager: DefaultStager | None) -> Future[Any]:
            response = async_save(state, checkpoint_id=f"{folder}/{name}", async_stager=stager)
            future = response.upload_completion if isinstance(response, AsyncSaveResponse) else response
            assert isinstance(future, Future)
            return future

        savers: dict[str, Callable[[], Future[Any] | None]] = {
            "dcp_async_save": lambda: dcp("async_save", None),
            "torch_save": lambda: torch.save(state, f"{folder}/state.pt"),
        }
        if job.device == "cuda":
            pinned = DefaultStager(StagingOptions(use_pinned_memory=True, use_async_staging=False))
            savers["dcp_async_save_pinned"] = lambda: dcp("async_save_pinned", pinned)
        for name, save in savers.items():
            times: list[float] = []
            for _ in range(saves + 1):
                job.iterate()
                if job.device == "cuda":
                    torch.cuda.synchronize()
                begun = time.perf_counter()
                pending = save()
                times.append(1e3 * (time.perf_counter() - begun))
                if pending is not None:
                    pending.result(timeout=600)
            found[f"stall_ms_{name}"] = median(times[1:])
            found[f"stall_ms_first_{name}"] = times[0]
        dist.destroy_process_group()
    return found


# --- the training thread's part ------------------------------------------------------------------------


def begin_us(count: int, numel: int, *, rounds: int) -> tuple[float, float]:
    """Microseconds of the training thread per tensor, and the GB/s of the copies: a snapshot of
    ``count`` fp32 tensors.
    """
    engine = make_engine(torch.device(DEVICE))
    nbytes = 4 * numel
    memory = HostMemory(memoryview(mmap.mmap(-1, count * nbytes)))
    engine.register(memory, [(0, count * nbytes)])
    tensors = [torch.randn(numel, device=DEVICE) for _ in range(count)]
    # As the client hands them over: planned once.
    items = CopyList(
        CopyItem(t, None, None, torch.float32, i * nbytes, nbytes) for i, t in enumerate(tensors)
    )
    times: list[float] = []
    rates: list[float] = []
    for _ in range(rounds + 2):
        torch.cuda.synchronize()
        capture = Capture()
        begin = functools.partial(engine.begin, items, memory, 0, capture.done)
        times.append(clock_ms(begin))
        engine.wait()
        capture.wait()
        rates.append(count * nbytes / GB / engine.last_copy_s)
    last = memory.view(items[-1].offset, nbytes, torch.float32, (numel,))
    if not torch.equal(last, tensors[-1].cpu()):
        raise RuntimeError("what arrived is not what was sent")
    engine.release(memory)
    engine.close()
    return 1e3 * median(times[2:]) / count, median(rates[2:])


def register_gb_per_s(size_bytes: int = 4 << 30) -> float:
    """How fast memory that is there already is pinned, which the trainer waits for once."""
    memory = HostMemory(memoryview(mmap.mmap(-1, size_bytes)))
    memory.tensor.fill_(1)
    engine = make_engine(torch.device(DEVICE))
    took_ms = clock_ms(lambda: engine.register(memory, [(0, size_bytes)]))
    engine.release(memory)
    engine.close()
    return size_bytes / GB / (took_ms / 1e3)


def handing_over(rounds: int) -> dict[str, Metric]:
    found: dict[str, Metric] = {"register_gb_per_s": register_gb_per_s()}
    rows = []
    for count, numel in ((4096, 1024), (4096, 65_536), (512, 1 << 20)):
        us, rate = begin_us(count, numel, rounds=rounds)
        found[f"begin_us_per_tensor_{4 * numel >> 10}k"] = us
        found[f"copy_gb_per_s_{4 * numel >> 10}k"] = rate
        rows.append([f"{count} x {4 * numel >> 10} KiB", f"{us:.2f}", f"{rate:.1f}"])
    print(table(["tensors", "us per tensor", "GB/s"], rows))
    return found


# --- the copy engine alone, on tensors of many sizes -------------------------------------------------------


def mixed_sizes(count: int, total_bytes: int, *, seed: int = 0) -> list[int]:
    """``count`` sizes in bytes, multiples of 64 that sum up to about ``total_bytes``: as many of each order of
    magnitude from 16 KiB to 64 MiB, before they are scaled to the sum.
    """
    draw = random.Random(seed)
    raw = [LEAST_BYTES * (MOST_BYTES / LEAST_BYTES) ** draw.random() for _ in range(count)]
    scale = total_bytes / sum(raw)
    return [max(64, int(size * scale) // 64 * 64) for size in raw]


class Capture:
    """One capture by the engine; ``done`` is for the engine to call."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: BaseException | None = None

    def done(self, error: BaseException | None) -> None:
        self._error = error
        self._over.set()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def wait(self) -> None:
        """Until its copies are complete.

        Raises:
            RuntimeError: they failed, or take longer than a minute.
        """
        if not self._over.wait(CAPTURE_S):
            raise RuntimeError(f"a capture did not end within {CAPTURE_S:g} s")
        if self._error is not None:
            raise RuntimeError("a capture failed") from self._error


@dataclass(slots=True)
class Mixed:
    """Tensors of many sizes on the device, and registered memory for them."""

    engine: CopyEngine
    memory: HostMemory
    items: CopyList

    @classmethod
    def make(cls, count: int, total_bytes: int) -> Self:
        sizes = mixed_sizes(count, total_bytes)
        engine = make_engine(torch.device(DEVICE))
        memory = HostMemory(memoryview(mmap.mmap(-1, sum(sizes))))
        memory.tensor.fill_(1)  # the pages are there
        engine.register(memory, [(0, sum(sizes))])
        items, offset = CopyList(), 0
        for size in sizes:
            tensor = torch.randn(size // 4, device=DEVICE)
            items.append(CopyItem(tensor, None, None, torch.float32, offset, size))
            offset += size
        return cls(engine, memory, items)

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)

    def close(self) -> None:
        self.engine.release(self.memory)
        self.engine.close()

    def capture_gb_per_s(self) -> float:
        self.begin().wait()
        self.engine.wait()
        return self.nbytes / GB / self.engine.last_copy_s

    def begin(self) -> Capture:
        """Begin a capture on an idle device."""
        capture = Capture()
        torch.cuda.synchronize()
        self.engine.begin(self.items, self.memory, 0, capture.done)
        return capture

    def restore_gb_per_s(self) -> float:
        torch.cuda.synchronize()
        took_ms = clock_ms(lambda: self.engine.restore(self.items, self.memory, 0))
        return self.nbytes / GB / (took_ms / 1e3)

    def check(self) -> None:
        """A rate counts only if the bytes arrive, in both directions."""
        self.begin().wait()
        self.engine.wait()
        for item in self.items:
            there = self.memory.view(item.offset, item.nbytes, torch.float32, item.tensor.shape)
            if not torch.equal(there, item.tensor.cpu()):
                raise RuntimeError(f"what arrived at byte {item.offset} is not what was sent")
        before = [item.tensor.clone() for item in self.items]
        for item in self.items:
            item.tensor.zero_()
        self.engine.restore(self.items, self.memory, 0)
        if not all(torch.equal(i.tensor, b) for i, b in zip(self.items, before, strict=True)):
            raise RuntimeError("what was restored is not what was captured")


class SmallCopy:
    """A copy of eight bytes to the host for which the host waits, as for the size of a `nonzero`.

    By the host's clock. Events around the copy do not tell: the first of them waits for its turn, too.
    """

    def __init__(self) -> None:
        self._source = torch.ones(1, dtype=torch.int64, device=DEVICE)
        self._target = torch.zeros(1, dtype=torch.int64, pin_memory=PINNED)
        self._stream = torch.cuda.current_stream()

    def us(self) -> float:
        """Microseconds until the bytes are there."""

        def once() -> None:
            self._target.copy_(self._source, non_blocking=True)
            self._stream.synchronize()

        return 1e3 * clock_ms(once)


def h2d_link_gb_per_s() -> float:
    """The best of a few large host-to-device copies out of pinned memory."""
    source = torch.ones(LINK_BYTES, dtype=torch.uint8, pin_memory=PINNED)
    target = torch.empty(LINK_BYTES, dtype=torch.uint8, device=DEVICE)

    def once() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    return LINK_BYTES / GB / (min(clock_ms(once) for _ in range(6)) / 1e3)


def copies_alone(
    rounds: int, *, count: int = MIXED_TENSORS, total_bytes: int = MIXED_BYTES
) -> dict[str, Metric]:
    """Capture and restore against the link, and what a small copy waits meanwhile."""
    mixed = Mixed.make(count, total_bytes)
    try:
        mixed.check()
        samples = interleave(
            {
                "d2h": pinned_link_gb_per_s,
                "capture": mixed.capture_gb_per_s,
                "h2d": h2d_link_gb_per_s,
                "restore": mixed.restore_gb_per_s,
            },
            rounds=rounds,
        )
        small = SmallCopy()
        idle = [small.us() for _ in range(PROBES_IDLE)]
        during: list[float] = []
        for _ in range(rounds):
            capture = mixed.begin()
            during.append(small.us())
            while not capture.over:
                during.append(small.us())
            capture.wait()
            mixed.engine.wait()  # not before: the current stream, with its small copies, would wait, too
    finally:
        mixed.close()
    d2h = median(samples["d2h"])
    return {
        "capture_vs_link": _ratio(samples, "capture", "d2h"),
        "capture_gb_per_s": median(samples["capture"]),
        "restore_vs_link": _ratio(samples, "restore", "h2d"),
        "restore_gb_per_s": median(samples["restore"]),
        "link_h2d_gb_per_s": median(samples["h2d"]),
        **delays(idle, during),
        "chunk_us": _chunk_bytes() / d2h / 1e3,
        "mixed_tensors": count,
    }


def _chunk_bytes() -> int:
    """Of this process's engines."""
    plan: CopyPlan = (make_engine.__kwdefaults__ or {})["plan"]
    return plan.chunk_bytes


def _ratio(samples: Mapping[str, list[float]], ours: str, link: str) -> float:
    """The median of each round's own ratio."""
    return median([a / b for a, b in zip(samples[ours], samples[link], strict=True)])


def delays(idle: list[float], during: list[float]) -> dict[str, Metric]:
    """What small copies take longer than on an idle device; microseconds."""
    base = median(idle)
    return {
        "small_copy_us_idle": base,
        "small_copy_delay_us": median(during) - base,
        "small_copy_delay_p99_us": percentile(during, 0.99) - base,
        "small_copy_delay_max_us": max(during) - base,
        "small_copies_during": len(during),
    }


# --- the largest model that fits ---------------------------------------------------------------------------


def layers_that_fit(config: MoEConfig, *, tokens: int, device_bytes: int, host_bytes: int) -> int:
    """How many layers of this width the device can train and the host can hold three snapshots of.

    Raises:
        ValueError: not one fits.
    """
    counts = []
    for layers in (1, 2):
        with torch.device("meta"):
            sized = MoEConfig(
                width=config.width,
                num_layers=layers,
                num_heads=config.num_heads,
                num_experts=config.num_experts,
                expert_hidden=config.expert_hidden,
            )
            counts.append(sum(p.numel() for p in MoETransformer(sized).parameters()))
    each, rest = counts[1] - counts[0], 2 * counts[0] - counts[1]
    activations = ACTIVATION_BYTES_EACH * tokens * config.width
    on_device = (device_bytes - RESERVE_BYTES - DEVICE_BYTES_EACH * rest) // (
        DEVICE_BYTES_EACH * each + activations
    )
    on_host = (host_bytes - HOST_BYTES_EACH * rest) // (HOST_BYTES_EACH * each)
    layers = min(on_device, on_host)
    if layers < 1:
        raise ValueError(
            f"no layer of width {config.width} with {config.num_experts} experts fits {device_bytes / GB:.1f} GB "
            f"of the device and {host_bytes / GB:.1f} GB of the host"
        )
    return layers


def largest(args: Any) -> dict[str, Metric]:
    """The same comparison with the device to each run alone, one after the other."""
    free, _ = torch.cuda.mem_get_info()
    quota = min(args.memory_gib << 30, int(0.9 * shutil.disk_usage("/dev/shm").free))
    args.layers = layers_that_fit(
        config_of(args), tokens=args.batch_size * CONTEXT, device_bytes=free, host_bytes=quota
    )
    print(f"the largest model that fits has {args.layers} layers", flush=True)
    plain, _ = alone(args, "plain")
    with own_daemon(memory_mib=quota >> 20) as endpoint:
        ours, told = alone(args, f"{endpoint}#sliding")
    return {
        "overhead_fraction_cuda_largest": median(ours) / median(plain) - 1.0,
        "overhead_p99_fraction_cuda_largest": percentile(ours, 0.99) / percentile(plain, 0.99) - 1.0,
        "iteration_ms_plain_largest": median(plain),
        "iteration_ms_cuda_largest": median(ours),
        "layers_largest": args.layers,
        "dense_gb_largest": told["dense_bytes"] / GB,
        "first_snapshot_s_largest": told["first_snapshot_s"],
        **of_stats("cuda_largest", told),
    }


def alone(args: Any, role: str) -> tuple[list[float], dict[str, Any]]:
    """Milliseconds of each iteration of one run, and what it says last."""
    one = worker(args, role)
    for _ in range(WARMUP + args.rounds):
        one.block_ms(args.block)
    return [ms for block in one.blocks[WARMUP:] for ms in block], last_words(one)


# --- all of it ---------------------------------------------------------------------------------------------


def of_stats(label: str, told: Mapping[str, float]) -> dict[str, Metric]:
    """What the client says of itself."""
    return {
        f"stall_ms_{label}": told["stall_ms_mean"],
        f"window_{label}": told["window"],
        f"snapshot_gb_{label}": told["snapshot_bytes"] / GB,
        f"capture_gb_per_s_{label}": told["capture_gb_per_s"],
        f"left_out_{label}": told["no_slot"] + told["torn"] + told["failed"],
        f"sealed_by_trainer_{label}": told["sealed_here"],
    }


def training(args: Any, link_gb_per_s: float) -> dict[str, Metric]:
    """Runs without and with ckptd in turns, then a process that resumes one of them."""
    found: dict[str, Metric] = {}
    kinds = {name: KINDS[name] for name in args.kinds}
    with own_daemon(memory_mib=args.memory_gib << 10) as endpoint:
        roles = {"plain": "plain"} | {name: f"{endpoint}#{kind}" for name, kind in kinds.items()}
        workers = {name: worker(args, role) for name, role in roles.items()}
        variants = {name: (lambda one=one: one.block_ms(args.block)) for name, one in workers.items()}
        samples = interleave(variants, rounds=args.rounds, warmup=WARMUP, limit_s=args.limit_s)
        each = {name: [ms for b in one.blocks[WARMUP:] for ms in b] for name, one in workers.items()}
        stats = {name: last_words(one) for name, one in workers.items()}
        resumed = last_words(worker(args, f"{endpoint}#resume-{next(iter(kinds.values()))}"))
    for name in kinds:
        label, told = LABELS[name], stats[name]
        print(name, {key: value for key, value in told.items() if value}, flush=True)
        found |= {
            f"overhead_fraction_{label}": fraction({**samples, "ckptd": samples[name]}),
            f"overhead_p99_fraction_{label}": percentile(each[name], 0.99) / percentile(each["plain"], 0.99)
            - 1,
            f"iteration_ms_{label}": median(samples[name]),
            f"iteration_p99_ms_{label}": percentile(each[name], 0.99),
            **of_stats(label, told),
            f"capture_vs_link_{label}": told["capture_gb_per_s"] / link_gb_per_s,
        }
    first = stats[next(iter(kinds))]
    return found | {
        "rounds": len(samples["plain"]),
        "iteration_ms_plain": median(samples["plain"]),
        "iteration_p99_ms_plain": percentile(each["plain"], 0.99),
        "dense_gb": first["dense_bytes"] / GB,
        "attach_s": first["attach_wall_s"],
        "first_snapshot_s": first["first_snapshot_s"],
        **of_resumption(resumed),
    }


def of_resumption(resumed: Mapping[str, float]) -> dict[str, Metric]:
    if resumed.get("resumed_from", -1) < 0:
        raise RuntimeError(f"a fresh process did not resume: {resumed}")
    return {
        "resume_s": resumed["attach_wall_s"],
        "resume_restore_s": resumed["restore_s"],
        "resume_restored_gb": resumed["restored_bytes"] / GB,
    }


def against_peers(metrics: Mapping[str, Metric], found: Mapping[str, float]) -> dict[str, Metric]:
    """What ckptd's stall is of the best peer's."""
    best = min((name for name in found if not name.startswith("stall_ms_first_")), key=lambda n: found[n])
    out: dict[str, Metric] = {**found, "best_peer": best.removeprefix("stall_ms_")}
    for label in LABELS.values():
        if f"stall_ms_{label}" in metrics:
            added = float(metrics[f"iteration_ms_{label}"]) - float(metrics["iteration_ms_plain"])
            out[f"stall_vs_best_peer_{label}"] = float(metrics[f"stall_ms_{label}"]) / found[best]
            out[f"added_vs_best_peer_{label}"] = added / found[best]
    return out


class Parts:
    """The metrics of one part after the other. One that fails is named, and does not end the others."""

    def __init__(self, bench: str, *, as_json: bool) -> None:
        self.metrics: dict[str, Metric] = {"cores": len(os.sched_getaffinity(0))}
        self.failed: list[str] = []
        self._bench, self._as_json = bench, as_json

    def add(self, name: str, part: Callable[[], Mapping[str, Metric]]) -> None:
        begun = time.monotonic()
        try:
            self.metrics |= part()
        except Exception as error:  # noqa: BLE001 - a device may be there for half an hour only
            traceback.print_exc()
            self.failed.append(name)
            self.metrics[f"failed_{name}"] = f"{type(error).__name__}: {error}"[:300]
        print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)
        # What is known by now: a run that is cut off has its last line.
        emit(self._bench, self.metrics, as_json=self._as_json)


def smoke(rounds: int) -> dict[str, Metric]:
    """In some seconds: bytes go to registered memory and back."""
    return copies_alone(rounds, count=40, total_bytes=64 << 20)


def main() -> None:
    in_shared_environment()
    options = parser(__doc__)
    add_model_options(options)
    options.set_defaults(rounds=20)
    options.add_argument("--block", type=int, default=20, help="iterations between two changes")
    options.add_argument("--saves", type=int, default=20, help="of each peer")
    options.add_argument("--limit-s", type=float, default=float("inf"), help="of the rounds of training")
    options.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=list(KINDS), help="of snapshots")
    options.add_argument("--no-peers", action="store_true", help="leave out torch's saves")
    options.add_argument(
        "--smoke", action="store_true", help="only whether the engine works, in some seconds"
    )
    options.add_argument("--largest", action="store_true", help="only the largest model that fits")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--worker", help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here: nothing is measured (--device cpu trains on the host)")
        return
    if args.worker is not None:
        work(args)
        return
    parts = Parts("gpu" if args.device == "cuda" else "gpu_twin", as_json=args.json)
    measure(args, parts)
    if parts.failed:
        sys.exit(f"failed: {', '.join(parts.failed)}")


def measure(args: Any, parts: Parts) -> None:
    on_device = args.device == "cuda"
    use_chunks(args.chunk_mib)
    if args.smoke:
        parts.add("smoke", lambda: smoke(args.rounds))
        return
    link = pinned_link_gb_per_s() if on_device else copy_gb_per_s(LINK_BYTES, threads=1)
    if args.largest:
        parts.add("largest", lambda: largest(args) | {"link_gb_per_s": link})
        return
    if on_device:
        parts.add("copies", lambda: copies_alone(args.rounds) | {"link_gb_per_s": link})
        torch.cuda.empty_cache()
    parts.add("training", lambda: training(args, link))
    if not args.no_peers:
        parts.add("peers", lambda: against_peers(parts.metrics, last_words(worker(args, "peers"))))
    if on_device:
        parts.add("handing_over", lambda: handing_over(args.rounds))


if __name__ == "__main__":
    main()
