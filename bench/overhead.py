"""Iteration time of the demo model with a snapshot every iteration, against the same loop without ckptd.

Two copies of the training run alternate in one process, block by block, so that both see the same
machine. On CPU all cores belong to the trainer as well: what the copies cost is what they take from it.
`overhead_floor_fraction_cpu` says how much that must be at least, from the bytes of a snapshot and the
measured copy bandwidth. On CUDA, `capture_vs_link` compares the rate of capture with that of one large
pinned copy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from bench.common import (
    GB,
    clock_ms,
    copy_gb_per_s,
    emit,
    in_shared_environment,
    interleave,
    median,
    own_daemon,
    parser,
)
from ckptd.client import Checkpointer
from examples.moe_text.data import ByteLoader, load_corpus
from examples.moe_text.model import MoEConfig, MoETransformer
from examples.moe_text.train import gradients_to_masters, masters_to_model

__all__ = ["Job", "main"]

PAUSE_S = 0.3
LINK_BYTES = 256 << 20


class Job:
    """One training run of the demo model, advanced block by block."""

    def __init__(self, *, device: str, batch_size: int, corpus: Tensor) -> None:
        torch.manual_seed(0)
        self.device = device
        model = MoETransformer(MoEConfig()).to(device)
        self.masters = {name: param.detach().clone() for name, param in model.named_parameters()}
        self.model = model.bfloat16()
        self.optimizer = torch.optim.AdamW(list(self.masters.values()), lr=1e-3)
        self.loader = ByteLoader(corpus, batch_size=batch_size, context=128, seed=7)
        self.steps: Iterator[int] = iter(range(10**9))
        self.ckpt: Checkpointer | None = None

    def attach(self, **options: Any) -> Checkpointer:
        """From here on this run is snapshotted at every iteration."""
        self.ckpt = Checkpointer(
            self.model,
            self.optimizer,
            state={"loader": self.loader},
            masters=self.masters,
            job="bench-overhead",
            **options,
        )
        self.steps = iter(self.ckpt.steps(10**9))
        return self.ckpt

    def iterate(self) -> None:
        next(self.steps)
        inputs, targets = (part.to(self.device) for part in next(self.loader))
        self.model(inputs, targets).backward()
        gradients_to_masters(self.model, self.masters)
        clip_grad_norm_(self.masters.values(), 1.0)
        self.optimizer.step()
        masters_to_model(self.model, self.masters)
        self.model.zero_grad()

    def block_ms(self, iterations: int) -> float:
        """Time per iteration over a block; the machine is left to settle afterwards."""
        begun = time.perf_counter()
        for _ in range(iterations):
            self.iterate()
        if self.device == "cuda":
            torch.cuda.synchronize()
        took_ms = 1e3 * (time.perf_counter() - begun) / iterations
        time.sleep(PAUSE_S)  # digests of this block must not be charged to the other run
        return took_ms


def compare(
    args: Any, device: str, endpoint: str, corpus: Tensor
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Milliseconds per iteration without and with us, and ckptd's own statistics."""
    plain = Job(device=device, batch_size=args.batch_size, corpus=corpus)
    snapshotted = Job(device=device, batch_size=args.batch_size, corpus=corpus)
    ckpt = snapshotted.attach(run=device, daemon=endpoint, window=args.window)
    variants: dict[str, Callable[[], float]] = {
        "plain": lambda: plain.block_ms(args.block),
        "ckptd": lambda: snapshotted.block_ms(args.block),
    }
    for _ in range(args.settle):  # ckptd measures, settles on its window, and on where copies run
        snapshotted.iterate()
    samples = interleave(variants, rounds=args.rounds, warmup=2)
    stats = ckpt.stats()
    ckpt.close()
    return samples, stats


def fraction(samples: dict[str, list[float]]) -> float:
    """Median over rounds of each round's own ratio: drift between rounds cancels."""
    pairs = zip(samples["plain"], samples["ckptd"], strict=True)
    return median([ours / plain - 1.0 for plain, ours in pairs])


def cuda_metrics(args: Any, endpoint: str, corpus: Tensor) -> dict[str, float | int | str]:
    samples, stats = compare(args, "cuda", endpoint, corpus)
    link = pinned_link_gb_per_s()
    return {
        "overhead_fraction_cuda": fraction(samples),
        "iteration_ms_plain_cuda": median(samples["plain"]),
        "iteration_ms_ckptd_cuda": median(samples["ckptd"]),
        "link_gb_per_s": link,
        "capture_gb_per_s": stats["capture_gb_per_s"],
        "capture_vs_link": stats["capture_gb_per_s"] / link,
    }


def pinned_link_gb_per_s() -> float:
    """The best of a few large device-to-host copies into pinned memory."""
    source = torch.empty(LINK_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)

    def once() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    return LINK_BYTES / GB / (min(clock_ms(once) for _ in range(6)) / 1e3)


def main() -> None:
    in_shared_environment()
    options = parser(__doc__)
    options.add_argument("--block", type=int, default=8, help="iterations between two changes")
    options.add_argument("--batch-size", type=int, default=12)
    options.add_argument("--threads", type=int, default=min(4, len(os.sched_getaffinity(0))))
    options.add_argument("--settle", type=int, default=48, help="iterations before measuring")
    options.add_argument("--window", type=int, default=None, help="default: measured by ckptd")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    corpus = load_corpus()
    with own_daemon(memory_mib=1024) as endpoint:
        samples, stats = compare(args, "cpu", endpoint, corpus)
        plain_ms = median(samples["plain"])
        bandwidth = copy_gb_per_s(64 << 20, threads=1)
        copy_ms = stats["snapshot_bytes"] / GB / bandwidth * 1e3
        metrics: dict[str, float | int | str] = {
            "overhead_fraction_cpu": fraction(samples),
            "overhead_floor_fraction_cpu": copy_ms / args.threads / plain_ms,
            "iteration_ms_plain": plain_ms,
            "iteration_ms_ckptd": median(samples["ckptd"]),
            "stall_ms_mean": stats["stall_ms_mean"],
            "snapshot_bytes": int(stats["snapshot_bytes"]),
            "snapshot_bytes_vs_dense": stats["snapshot_bytes"] / stats["dense_bytes"],
            "copy_gb_per_s_one_thread": bandwidth,
            "threads": args.threads,
            "rounds": args.rounds,
        }
        if torch.cuda.is_available():
            metrics |= cuda_metrics(args, endpoint, corpus)
        else:
            print("no CUDA device: overhead_fraction_cuda and capture_vs_link are not measured")
    emit("overhead", metrics, as_json=args.json)


if __name__ == "__main__":
    main()
