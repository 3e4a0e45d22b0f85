"""What the training thread waits for one snapshot, against the checkpointing that comes with torch.

Each variant checkpoints the same model and optimizer once per iteration of the same loop. The wait is
clocked from outside, in the same way for all: for ckptd, the time to come out of the top of the loop plus
the time between a hook that runs before ckptd's own optimizer hook and one that runs after it; for the
peers, the duration of their save call. Asynchronous peers start each save with the one before finished,
which is kinder to them than training would be. One core is left free for copying (torch runs on
`--threads`, by default one less than there are).
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    async_save,
    save,
)

from bench.common import (
    GB,
    MIB,
    build_stack,
    clock_ms,
    emit,
    in_shared_environment,
    interleave,
    median,
    own_daemon,
    parser,
    scratch_folder,
    state_bytes,
)
from ckptd.client import Checkpointer, RunOptions, SnapshotOptions

__all__ = ["OuterClock", "Peers", "main"]


class OuterClock:
    """Time that passes between two optimizer pre-hooks: one before, one after those of ckptd.

    Hooks run in the order of registration: call `before` ahead of building the Checkpointer, `after`
    behind it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._entered_s = 0.0
        self.waited_ms = 0.0

    def before(self) -> None:
        def enter(*_: Any) -> None:
            self._entered_s = time.perf_counter()

        self._optimizer.register_step_pre_hook(enter)

    def after(self) -> None:
        def leave(*_: Any) -> None:
            self.waited_ms = 1e3 * (time.perf_counter() - self._entered_s)

        self._optimizer.register_step_pre_hook(leave)


class Peers:
    """The savers that torch ships, each as a call whose duration is the stall."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, *, process: bool
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._folder = folder
        self._pending: Future[Any] | None = None
        self.savers: dict[str, Callable[[], None]] = {
            "torch.save": self._torch_save,
            "dcp.save": self._dcp_save,
            "dcp.async_save (thread)": lambda: self._async_save("thread"),
        }
        if process:
            self.savers["dcp.async_save (process)"] = lambda: self._async_save("process")

    def _state(self) -> dict[str, Any]:
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def _torch_save(self) -> None:
        torch.save(self._state(), self._folder / "torch_save.pt")

    def _dcp_save(self) -> None:
        save(self._state(), checkpoint_id=self._folder / "dcp")

    def _async_save(self, kind: str) -> None:
        response = async_save(
            self._state(),
            checkpoint_id=self._folder / f"async_{kind}",
            async_checkpointer_type=AsyncCheckpointerType(kind),
        )
        assert isinstance(response, Future)
        self._pending = response

    def settle(self) -> None:
        """Wait for what a save left running in the background; not part of any stall."""
        if self._pending is not None:
            self._pending.result(timeout=600)
            self._pending = None


def main() -> None:
    in_shared_environment()
    options = parser(__doc__)
    options.add_argument("--state-mib", type=int, default=1024, help="weights and optimizer state")
    options.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    options.add_argument("--tokens", type=int, default=256, help="per iteration, 8 experts share")
    options.add_argument("--settle", type=int, default=48, help="iterations before measuring")
    options.add_argument("--window", type=int, default=None, help="default: measured by ckptd")
    options.add_argument("--dir", type=Path, default=None, help="where the peers write")
    options.add_argument("--no-process", action="store_true", help="leave out the process peer")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    with own_daemon(memory_mib=args.state_mib * 6 + 64) as endpoint, scratch_folder() as scratch:
        metrics = measure(args, endpoint, args.dir or Path(scratch))
    emit("stall", metrics, as_json=args.json)


def measure(args: Any, endpoint: str, folder: Path) -> dict[str, float | int | str]:
    model = build_stack(args.state_mib)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    clock = OuterClock(optimizer)
    clock.before()
    ckpt = Checkpointer(
        model,
        optimizer,
        run=RunOptions(job="bench-stall", name="r1"),
        daemon=endpoint,
        snapshots=SnapshotOptions(window=args.window),
    )
    clock.after()
    steps = iter(ckpt.steps(10**9))
    inputs = torch.randn(args.tokens, model.width)
    ours_top: list[float] = []
    ours_hook: list[float] = []
    compute: list[float] = []

    def compute_phase() -> None:
        model(inputs).backward()

    def ours() -> float:
        top_ms = clock_ms(lambda: next(steps))
        compute.append(clock_ms(compute_phase))
        optimizer.step()
        optimizer.zero_grad()
        ours_top.append(top_ms)
        ours_hook.append(clock.waited_ms)
        return top_ms + clock.waited_ms

    # Optimizer state comes to be; ckptd measures, settles on its window, and on where copies run
    # (about 40 steps).
    for _ in range(args.settle):
        ours()
    peers = Peers(model, optimizer, folder, process=not args.no_process)
    variants: dict[str, Callable[[], float]] = {"ckptd": ours}
    logging.disable(logging.INFO)  # the process peer logs every request
    with process_group(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the peers' deprecations are not ours to fix

        def peer(saver: Callable[[], None]) -> Callable[[], float]:
            def once() -> float:
                compute_phase()
                stall_ms = clock_ms(saver)
                peers.settle()
                optimizer.zero_grad()
                return stall_ms

            return once

        for name, saver in peers.savers.items():
            variants[name] = peer(saver)
        samples = interleave(variants, rounds=args.rounds)
    # The peers' files are written by now; a few undisturbed iterations in a row show the steady state.
    before = ckpt.stats()
    steady = [ours() for _ in range(max(8, 2 * args.rounds))]
    samples["ckptd"] = steady
    stats = ckpt.stats()
    ckpt.close()
    best = min((name for name in samples if name != "ckptd"), key=lambda n: median(samples[n]))
    dense = state_bytes(model, optimizer)
    metrics: dict[str, float | int | str] = {
        "stall_vs_best_peer": median(steady) / median(samples[best]),
        "stall_worst_vs_best_peer": max(steady) / median(samples[best]),
        "best_peer": best,
    }
    for name, values in samples.items():
        label = "".join(c if c.isalnum() else "_" for c in name).strip("_").replace("__", "_")
        metrics[f"stall_ms_{label}"] = median(values)
        metrics[f"stall_ms_max_{label}"] = max(values)
    metrics |= {
        "stall_ms_top_of_loop": median(ours_top[-len(steady) :]),
        "stall_ms_before_step": median(ours_hook[-len(steady) :]),
        "stall_ms_reported": (stats["stall_ms_sum"] - before["stall_ms_sum"])
        / max(1.0, stats["steps"] - before["steps"]),
        "compute_ms": median(compute),
        "snapshot_bytes": int(stats["snapshot_bytes"]),
        "dense_bytes": int(stats["dense_bytes"]),
        "snapshot_bytes_vs_dense": stats["snapshot_bytes"] / stats["dense_bytes"],
        "state_mib": dense / MIB,
        "threads": args.threads,
        "bytes_per_s_needed_gb": stats["snapshot_bytes"] / GB / (median(compute) / 1e3),
        "peers_wrote_to": "temporary folder" if args.dir is None else "--dir",
        "rounds": args.rounds,
    }
    if len(os.sched_getaffinity(0)) <= args.threads:
        metrics["note"] = "no core was free for copying"
    return metrics


@contextmanager
def process_group(folder: Path) -> Iterator[None]:
    """A process group of one: `async_save` insists on one with a CPU backend."""
    rendezvous = f"file://{folder.resolve()}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
