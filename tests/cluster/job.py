"""A small data-parallel job under ckptd for the tests of node loss: it takes seconds, and every
rank keeps its end state.

``python -m tests.cluster.job FOLDER [--total N] [--daemon auto|none] [--store FILE]`` trains a
model of `tests.e2e.cases` under DDP over gloo. Each rank appends JSON lines to
`<folder>/<rank>.jsonl`: `meeting` once the ranks have met, `attached` (with `resumed_from`) once it
goes on, `step` after each iteration; at its end it writes everything that must be identical to
`<folder>/<rank>.pt`. Steps are slow until the file `hurry` appears, so that a test has time to
strike.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ckptd.client import Checkpointer, RunOptions, SnapshotOptions
from tests.e2e.cases import Job, find_case
from tests.e2e.job import final_state

CASE = "drop"
STEP_S = 0.05

Write = Callable[..., None]


def main() -> None:
    parser = argparse.ArgumentParser(description="A small data-parallel job under ckptd.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--total", type=int, default=120)
    parser.add_argument("--window", type=int, default=3)
    parser.add_argument("--daemon", default="auto")
    parser.add_argument("--store", type=Path, help="meet at this file instead of torchrun's store")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    method = f"file://{args.store}" if args.store is not None else "env://"
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world_size)
    with (args.folder / f"{rank}.jsonl").open("a", buffering=1) as log:

        def write(event: str, **fields: object) -> None:
            host = os.environ.get("CKPTD_NODE_ID", "")
            told = {"event": event, "host": host, "time_s": time.time(), **fields}
            log.write(json.dumps(told) + "\n")

        write("meeting")
        train(args, rank, write)
    dist.destroy_process_group()


def train(args: argparse.Namespace, rank: int, write: Write) -> None:
    """Run to the end, from wherever the run is; every life is initialised otherwise."""
    lives = (args.folder / f"{rank}.jsonl").read_bytes().count(b'"meeting"')
    job = find_case(CASE)(lives)
    job.model = DistributedDataParallel(job.model, find_unused_parameters=True)
    job.state["data"].position = 10_000 * rank
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(98 + lives)
    job.ckpt = Checkpointer(
        job.model,
        job.optimizers,
        job.state,
        run=RunOptions(job="cluster", name="r"),
        daemon=None if args.daemon == "none" else args.daemon,
        snapshots=SnapshotOptions(window=args.window),
    )
    write("attached", resumed_from=job.ckpt.resumed_from)
    run_steps(args, job, write)
    finished = args.folder / f"{rank}.pt"
    torch.save(final_state(job), finished.with_suffix(".tmp"))
    finished.with_suffix(".tmp").rename(finished)
    job.ckpt.close()


def run_steps(args: argparse.Namespace, job: Job, write: Write) -> None:
    hurry = args.folder / "hurry"
    for step in job.ckpt.steps(args.total):
        if not hurry.exists():
            time.sleep(STEP_S)
        job.step(step, functools.partial(_nothing, step))
        write("step", step=step)


def _nothing(step: int, point: str) -> None:
    """The body's calls at its points: nobody dies by itself here."""


if __name__ == "__main__":
    main()
