"""On a GPU: what a snapshot every iteration costs, against the same loop without, the link, and
torch's own asynchronous save.

A mixture of experts with bf16 weights, fp32 masters and AdamW; each run is a process of its own,
and they take turns block by block on one device. `overhead_fraction_cuda` is what an iteration
takes longer with ckptd, which chooses its window; `window8` has one of eight from the start, and
`dense` takes everything every time. `capture_vs_link`: the rate at which snapshots cross the link
while the model trains, against one large pinned copy on an idle device. Peers save the same state
once: their stall is the time of the call, with the device idle and memory warm.

`begin_us_per_tensor`: what the training thread spends on handing over a snapshot of many small or
large tensors.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import sys
import tempfile
import time
import warnings
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

from bench.common import (
    GB,
    clock_ms,
    emit,
    in_shared_environment,
    interleave,
    median,
    own_daemon,
    parser,
    table,
)
from bench.overhead import Job, Worker, fraction, pinned_link_gb_per_s
from ckptd.cuda.cuda_engine import make_engine
from ckptd.cuda.engine import CopyItem, HostMemory
from examples.moe_text.data import load_corpus
from examples.moe_text.model import MoEConfig

__all__ = ["main"]

MAX_SETTLE_S = 90.0
SAVES = 1


def config_of(args: Any) -> MoEConfig:
    return MoEConfig(
        width=args.width,
        num_layers=args.layers,
        num_heads=args.width // 64,
        num_experts=args.experts,
        expert_hidden=2 * args.width,
    )


# --- processes of one run each ---------------------------------------------------------------------


def work(args: Any) -> None:
    """Settles, then answers each line on stdin, a number of iterations, with milliseconds for each."""
    torch.set_num_threads(1)
    job = Job(device="cuda", batch_size=args.batch_size, corpus=load_corpus(), config=config_of(args))
    endpoint, _, kind = args.worker.partition("#")
    if endpoint == "peers":
        print(json.dumps(peers(job)), flush=True)
        return
    if endpoint != "plain":
        kinds: dict[str, dict[str, Any]] = {"dense": {"policy": "dense"}, "fixed": {"window": 8}}
        job.attach(run=f"gpu-{kind}", daemon=endpoint, **kinds.get(kind, {}))
    settle(job, args.settle)
    print("ready", flush=True)
    for line in sys.stdin:
        print(*job.block_ms(int(line)), flush=True)
    if job.ckpt is not None:
        print(json.dumps(job.ckpt.stats()), flush=True)
        job.ckpt.close()


def settle(job: Job, at_least: int) -> None:
    """Until snapshots are being taken in memory that is all there, and the window has not changed
    for so long.
    """
    begun, window, done = time.monotonic(), 0.0, 0
    while True:
        stats = {} if job.ckpt is None else job.ckpt.stats()
        if stats and stats["window"] != window:
            window, done = stats["window"], 0
            print(f"window {window:g}", file=sys.stderr, flush=True)
        taken = job.ckpt is None or stats["snapshots"] >= 4 * stats["window"] + 8
        if done >= at_least and taken:
            return
        if time.monotonic() - begun > MAX_SETTLE_S:
            raise RuntimeError(f"too few snapshots within {MAX_SETTLE_S:g} s: {stats}")
        job.iterate()
        done += 1


def worker(args: Any, role: str) -> Worker:
    command = [sys.executable, "-m", "bench.gpu", "--worker", role]
    for name in ("width", "layers", "experts", "batch_size", "settle"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    made, begun = Worker(command), time.monotonic()
    if role != "peers":
        made.read()
        print(f"{role.partition('#')[2] or role}: ready after {time.monotonic() - begun:.0f} s")
    return made


def last_words(of: Worker) -> dict[str, Any]:
    said = of.close()
    return dict(json.loads(said)) if said else {}


def peers(job: Job) -> dict[str, float]:
    """Milliseconds that training waits for a save of the whole state, by kind of save; of one after
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
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the peers' deprecations are not ours to fix
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        pinned = DefaultStager(StagingOptions(use_pinned_memory=True, use_async_staging=False))
        for name, stager in (("async_save", None), ("async_save_pinned", pinned)):
            times: list[float] = []
            for _ in range(SAVES + 1):
                job.iterate()
                torch.cuda.synchronize()
                begun = time.perf_counter()
                response = async_save(state, checkpoint_id=f"{folder}/{name}", async_stager=stager)
                times.append(1e3 * (time.perf_counter() - begun))
                future = response.upload_completion if isinstance(response, AsyncSaveResponse) else response
                assert isinstance(future, Future)
                future.result(timeout=600)
            found[f"stall_ms_dcp_{name}"] = median(times[1:])
            found[f"stall_ms_first_dcp_{name}"] = times[0]
        dist.destroy_process_group()
    return found


# --- the training thread's part ------------------------------------------------------------------------


def begin_us(count: int, numel: int, *, rounds: int) -> tuple[float, float]:
    """Microseconds of the training thread per tensor, and the GB/s of the copies: a snapshot of
    ``count`` fp32 tensors.
    """
    engine = make_engine(torch.device("cuda"))
    nbytes = 4 * numel
    memory = HostMemory(memoryview(mmap.mmap(-1, count * nbytes)))
    engine.register(memory, [(0, count * nbytes)])
    tensors = [torch.randn(numel, device="cuda") for _ in range(count)]
    items = [CopyItem(t, None, None, torch.float32, i * nbytes, nbytes) for i, t in enumerate(tensors)]
    times: list[float] = []
    rates: list[float] = []
    for _ in range(rounds + 2):
        torch.cuda.synchronize()
        times.append(clock_ms(lambda: engine.begin(items, memory, 0, lambda error: None)))
        engine.wait()
        torch.cuda.synchronize()
        time.sleep(0.02)  # the watcher has told
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
    engine = make_engine(torch.device("cuda"))
    took_ms = clock_ms(lambda: engine.register(memory, [(0, size_bytes)]))
    engine.release(memory)
    engine.close()
    return size_bytes / GB / (took_ms / 1e3)


def handing_over(rounds: int) -> dict[str, float]:
    found: dict[str, float] = {"register_gb_per_s": register_gb_per_s()}
    rows = []
    for count, numel in ((4096, 1024), (4096, 65_536), (512, 1 << 20)):
        us, rate = begin_us(count, numel, rounds=rounds)
        found[f"begin_us_per_tensor_{4 * numel >> 10}k"] = us
        found[f"copy_gb_per_s_{4 * numel >> 10}k"] = rate
        rows.append([f"{count} x {4 * numel >> 10} KiB", f"{us:.2f}", f"{rate:.1f}"])
    print(table(["tensors", "us per tensor", "GB/s"], rows))
    return found


def main() -> None:
    in_shared_environment()
    options = parser(__doc__)
    options.add_argument("--block", type=int, default=20, help="iterations between two changes")
    options.add_argument("--batch-size", type=int, default=64)
    options.add_argument("--width", type=int, default=1024)
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--experts", type=int, default=16)
    options.add_argument("--settle", type=int, default=60, help="iterations before measuring")
    options.add_argument("--memory-gib", type=int, default=88, help="of the daemon, in /dev/shm")
    options.add_argument("--no-peers", action="store_true", help="leave out torch's saves")
    options.add_argument("--worker", help=argparse.SUPPRESS)
    args = options.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing is measured")
        return
    if args.worker is not None:
        work(args)
        return
    metrics: dict[str, float | int | str] = {"link_gb_per_s": pinned_link_gb_per_s()}
    metrics |= handing_over(args.rounds)
    torch.cuda.empty_cache()
    with own_daemon(memory_mib=args.memory_gib << 10) as endpoint:
        kinds = {"ckptd": "sliding", "fixed": "fixed", "dense": "dense"}
        roles = {"plain": "plain"} | {name: f"{endpoint}#{kind}" for name, kind in kinds.items()}
        workers = {name: worker(args, role) for name, role in roles.items()}
        variants = {name: (lambda one=one: one.block_ms(args.block)) for name, one in workers.items()}
        samples = interleave(variants, rounds=args.rounds, warmup=2)
        stats = {name: last_words(one) for name, one in workers.items()}
    for name, label in (("ckptd", "cuda"), ("fixed", "cuda_window8"), ("dense", "cuda_dense")):
        told = stats[name]
        print(name, {key: value for key, value in told.items() if value}, flush=True)
        metrics |= {
            f"overhead_fraction_{label}": fraction({**samples, "ckptd": samples[name]}),
            f"iteration_ms_{label}": median(samples[name]),
            f"stall_ms_{label}": told["stall_ms_mean"],
            f"window_{label}": told["window"],
            f"snapshot_gb_{label}": told["snapshot_bytes"] / GB,
            f"capture_gb_per_s_{label}": told["capture_gb_per_s"],
            f"capture_vs_link_{label}": told["capture_gb_per_s"] / float(metrics["link_gb_per_s"]),
            f"left_out_{label}": told["no_slot"] + told["torn"] + told["failed"],
            f"sealed_by_trainer_{label}": told["sealed_here"],
        }
    metrics |= {
        "iteration_ms_plain": median(samples["plain"]),
        "dense_gb": stats["ckptd"]["dense_bytes"] / GB,
    }
    print(
        table(["metric", "value"], [[name, f"{value}"] for name, value in metrics.items()]),
        flush=True,
    )
    if not args.no_peers:
        metrics |= last_words(worker(args, "peers"))
    metrics["cores"] = len(os.sched_getaffinity(0))
    emit("gpu", metrics, as_json=args.json)


if __name__ == "__main__":
    main()
