"""What a replayed iteration costs, against an ordinary one, by the share of frozen operators.

Real recoveries, by the public interface alone: a run with a window of W snapshots is closed and attached
again by a fresh model, which replays W - 1 iterations. In the i-th of them (from 0) the schedule has
activated i + 1 of W phases, so a share of 1 - (i + 1) / W of the bytes is frozen. An iteration's time is
the loop's body and the boundary after it, self-verification and loading included; loading the very first
snapshot is restore, which `bench.restore` measures. Ordinary iterations take a snapshot each.
"""

from __future__ import annotations

import gc
import os
import time
from collections import defaultdict
from typing import Any

import torch

from bench.common import (
    MoEStack,
    emit,
    forget,
    in_shared_environment,
    median,
    own_daemon,
    parser,
)
from ckptd.client import Checkpointer, RunOptions, SnapshotOptions

__all__ = ["main", "recover_once"]

Times = dict[int, list[tuple[float, float]]]  # share of frozen bytes in percent: (body, boundary) ms
SHARES = (0, 50, 90)
JOB = "bench-replay"


def _attach(
    args: Any, endpoint: str, *, fused: bool, run: str, seed: int
) -> tuple[MoEStack, torch.optim.Optimizer, Checkpointer]:
    torch.manual_seed(seed)
    model = MoEStack(
        width=args.width,
        hidden=2 * args.width,
        num_experts=args.experts,
        num_layers=args.layers,
        fused=fused,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ckpt = Checkpointer(
        model,
        optimizer,
        run=RunOptions(job=JOB, name=run),
        daemon=endpoint,
        snapshots=SnapshotOptions(window=args.window),
    )
    return model, optimizer, ckpt


def _iterations(
    args: Any,
    model: MoEStack,
    optimizer: torch.optim.Optimizer,
    ckpt: Checkpointer,
    count: int,
) -> list[tuple[bool, float, float]]:
    """Up to `count` iterations: whether it was replayed, milliseconds in the body, in the boundary."""
    out: list[tuple[bool, float, float]] = []
    steps = iter(ckpt.steps(10**9))
    next(steps)
    for _ in range(count):
        replaying = bool(ckpt.replaying)
        begun = time.perf_counter()
        model(torch.randn(args.tokens, args.width)).backward()
        optimizer.step()
        optimizer.zero_grad()
        body = time.perf_counter()
        next(steps)
        out.append((replaying, 1e3 * (body - begun), 1e3 * (time.perf_counter() - body)))
    return out


def recover_once(args: Any, endpoint: str, *, fused: bool, run: str) -> Times:
    """Train, close, attach afresh, replay; the times by share of frozen bytes, -1 for ordinary ones."""
    model, optimizer, ckpt = _attach(args, endpoint, fused=fused, run=run, seed=0)
    warm = _iterations(args, model, optimizer, ckpt, 3 * args.window + 4)
    ckpt.close()
    del model, optimizer, ckpt
    gc.collect()  # views into the segment keep it mapped, and its owner lock held
    times: Times = defaultdict(list)
    times[-1] = [(body, boundary) for _, body, boundary in warm[-args.window :]]
    model, optimizer, ckpt = _attach(args, endpoint, fused=fused, run=run, seed=1)
    for index, (replaying, body, boundary) in enumerate(
        _iterations(args, model, optimizer, ckpt, args.window + 4)
    ):
        # The iterations right behind a replay are the ones with no operator frozen.
        share = round(100 * (1 - (index + 1) / args.window)) if replaying else 0
        times[share].append((body, boundary))
    if not any(share > 0 for share in times):
        raise RuntimeError("nothing was replayed: the second attach did not find the first's snapshots")
    print(f"{'fused' if fused else 'ModuleList':<11} {ckpt.stats()['replayed_steps']:.0f} replayed")
    ckpt.close()
    del model, optimizer, ckpt
    gc.collect()
    forget(endpoint, JOB, run)
    return times


def summarise(rounds: list[Times], prefix: str) -> dict[str, float | int | str]:
    pooled: Times = defaultdict(list)
    for times in rounds:
        for share, pairs in times.items():
            pooled[share] += pairs
    normal_ms = median([body + boundary for body, boundary in pooled[-1]])
    metrics: dict[str, float | int | str] = {f"{prefix}iteration_ms": normal_ms}
    for wanted in SHARES:
        share = min((s for s in pooled if s >= 0), key=lambda s: abs(s - wanted))
        pairs = pooled[share]
        whole = median([body + boundary for body, boundary in pairs])
        metrics[f"{prefix}replay_cost_{wanted}_frozen"] = whole / normal_ms
        metrics[f"{prefix}replay_body_cost_{wanted}_frozen"] = median([body for body, _ in pairs]) / normal_ms
        metrics[f"{prefix}replay_boundary_ms_{wanted}_frozen"] = median([b for _, b in pairs])
    return metrics


def main() -> None:
    in_shared_environment()
    options = parser(__doc__)
    options.add_argument("--window", type=int, default=10)
    options.add_argument("--width", type=int, default=256)
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--experts", type=int, default=16)
    options.add_argument("--tokens", type=int, default=4096)
    options.add_argument("--threads", type=int, default=min(4, len(os.sched_getaffinity(0))))
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    found: dict[bool, list[Times]] = {False: [], True: []}
    with own_daemon(memory_mib=4096) as endpoint:
        for number in range(args.rounds):
            for fused in (False, True) if number % 2 == 0 else (True, False):
                run = f"{'fused' if fused else 'list'}-{number}"
                found[fused].append(recover_once(args, endpoint, fused=fused, run=run))
    metrics = summarise(found[False], "") | summarise(found[True], "fused_")
    metrics |= {"window": args.window, "tokens": args.tokens, "threads": args.threads}
    emit("replay", metrics, as_json=args.json)


if __name__ == "__main__":
    main()
