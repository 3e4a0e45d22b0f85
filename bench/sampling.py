"""What it costs a step to compare samples of every tensor, which keeps torn snapshots from being sealed.

One training run takes a snapshot at every iteration, in blocks with and without the comparison
that alternate: same process, same tensors. All times are processor time of the training thread, since
other programs disturb it least. ``extra`` compares the blocks; ``fraction`` is the time within the calls
of the comparison against an iteration without it, which tells more where blocks differ by chance.

Three models: many small tensors (the worst case: each has at least eight samples), few large ones,
and a mixture of experts.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bench.common import (
    MIB,
    build_stack,
    emit,
    forget,
    in_shared_environment,
    interleave,
    median,
    own_daemon,
    parser,
    state_bytes,
)
from ckptd.client import Checkpointer, RunOptions, SnapshotOptions
from ckptd.client.capture.live_tensors import CopySplit
from ckptd.cuda.engine import CpuEngine
from ckptd.cuda.samples import SamplePlan, Samples

__all__ = ["Clock", "main", "measure"]


class Clock:
    """Processor time of some calls, of the training thread and of others; turns samples on and off.

    The methods are those of the classes themselves: there is no option that turns the comparison off.
    """

    def __init__(self) -> None:
        self.on = True
        self.training_ms = self.beside_ms = 0.0
        self.most_samples = self.most_tensors = 0
        self._training = threading.get_ident()
        self._depth = threading.local()
        draw = CopySplit.sample

        def sample(split: CopySplit, number: int, engine: CpuEngine) -> Samples:
            if not self.on:
                return SamplePlan((), engine.device).draw(number)
            samples = draw(split, number, engine)
            self.most_samples = max(self.most_samples, len(samples.index))
            self.most_tensors = max(self.most_tensors, len(samples.plan))
            return samples

        self._patch(CopySplit, "sample", sample)
        for owner, name in ((CpuEngine, "read"), (Samples, "changed"), (Samples, "unlike")):
            self._patch(owner, name, getattr(owner, name))

    def _patch(self, owner: type, name: str, call: Callable[..., Any]) -> None:
        def clocked(*args: Any) -> Any:
            if getattr(self._depth, "inside", False):  # one of them calls another
                return call(*args)
            self._depth.inside = True
            begun = time.thread_time()
            try:
                return call(*args)
            finally:
                self._depth.inside = False
                took_ms = 1e3 * (time.thread_time() - begun)
                if threading.get_ident() == self._training:
                    self.training_ms += took_ms
                else:
                    self.beside_ms += took_ms

        setattr(owner, name, clocked)


class ManySmall(nn.Module):
    """A stack of narrow blocks: two matrices, two biases and a norm each."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.width = width
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(num_blocks)
        )

    def forward(self, x_ND: Tensor) -> Tensor:
        for block in self.blocks:
            x_ND = x_ND + block(x_ND)
        loss: Tensor = x_ND.square().mean()
        return loss


class FewLarge(nn.Module):
    """Square matrices, and nothing else."""

    def __init__(self, width: int, num_matrices: int) -> None:
        super().__init__()
        self.width = width
        self.matrices = nn.ParameterList(torch.randn(width, width) / width for _ in range(num_matrices))

    def forward(self, x_ND: Tensor) -> Tensor:
        for matrix in self.matrices:
            x_ND = x_ND + (x_ND @ matrix).tanh()
        loss: Tensor = x_ND.square().mean()
        return loss


def measure(args: Any, clock: Clock, model: Any, name: str, endpoint: str) -> dict[str, float]:
    """Train with and without; milliseconds are of one iteration, and of the training thread's processor time."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    clock.on, clock.most_samples, clock.most_tensors = True, 0, 0
    ckpt = Checkpointer(
        model,
        optimizer,
        run=RunOptions(job=f"bench-sampling-{name}", name="r1"),
        daemon=endpoint,
        snapshots=SnapshotOptions(window=args.window),
    )
    steps = iter(ckpt.steps(10**9))
    inputs = torch.randn(args.tokens, model.width)

    def iterate() -> None:
        next(steps)
        model(inputs).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(args.settle):
        iterate()
    calls_ms, beside_ms, plain_ms = [], [], []

    def block(on: bool) -> float:
        clock.on = on
        clock.training_ms = clock.beside_ms = 0.0
        begun, wall = time.thread_time(), time.perf_counter()
        for _ in range(args.block):
            iterate()
        took_ms: float = 1e3 * (time.thread_time() - begun) / args.block
        if on:
            calls_ms.append(clock.training_ms / args.block)
            beside_ms.append(clock.beside_ms / args.block)
        else:
            plain_ms.append(1e3 * (time.perf_counter() - wall) / args.block)
        return took_ms

    variants: dict[str, Callable[[], float]] = {
        "with": lambda: block(True),
        "without": lambda: block(False),
    }
    found = interleave(variants, rounds=args.rounds)
    stats = ckpt.stats()
    ckpt.close()
    forget(endpoint, f"bench-sampling-{name}", "r1")
    pairs = list(zip(found["with"], found["without"], strict=True))
    return {
        "fraction": median(calls_ms) / median(found["without"]),
        "extra": median([ours / plain - 1.0 for ours, plain in pairs]),
        "extra_of_fastest": min(found["with"]) / min(found["without"]) - 1.0,
        "calls_ms": median(calls_ms),
        "calls_beside_ms": median(beside_ms),
        "iteration_ms": median(found["without"]),
        "iteration_wall_ms": median(plain_ms),
        "tensors": clock.most_tensors,
        "samples": clock.most_samples,
        "state_mib": state_bytes(model, optimizer) / MIB,
        "torn": stats.get("torn", 0.0),
    }


def main() -> None:
    in_shared_environment()
    options = parser(__doc__)
    options.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    options.add_argument("--tokens", type=int, default=256, help="per iteration")
    options.add_argument("--settle", type=int, default=48, help="iterations before measuring")
    options.add_argument("--block", type=int, default=8, help="iterations between two changes")
    options.add_argument("--window", type=int, default=None, help="default: measured by ckptd")
    options.add_argument("--blocks", type=int, default=160, help="of the model with small tensors")
    options.add_argument("--large", type=int, default=8, help="matrices of the model with large ones")
    options.add_argument("--moe-mib", type=int, default=96, help="state of the mixture of experts")
    options.add_argument("--large-width", type=int, default=1024)
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    clock = Clock()
    models: dict[str, Any] = {
        "small": ManySmall(64, args.blocks),
        "large": FewLarge(args.large_width, args.large),
        "moe": build_stack(args.moe_mib),
    }
    metrics: dict[str, float | int | str] = {}
    with own_daemon(memory_mib=2048) as endpoint:
        for name, model in models.items():
            found = measure(args, clock, model, name, endpoint)
            metrics |= {f"{name}_{key}": value for key, value in found.items()}
    emit("sampling", metrics | {"threads": args.threads, "rounds": args.rounds}, as_json=args.json)


if __name__ == "__main__":
    main()
