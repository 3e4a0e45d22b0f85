"""One rank of a small data-parallel job, as `tests.e2e.host_campaign` starts it under torchrun and hosts.

Its log, `<folder>/<rank>.jsonl`, tells of every life: what it was initialised from, each iteration when it
begins and when it is done, and the phases of its start with the number of tensors that its replay compared.
"""

from __future__ import annotations

import argparse
import random
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckptd.client import Checkpointer
from ckptd.demo.lab import read_events
from ckptd.demo.train import TrainingLog, phase_counters
from tests.e2e.cases import Job, find_case
from tests.e2e.job import final_state
from tests.option_groups import grouped

FIRST_SEED = 1


def seed_of_this_life(log: Path) -> int:
    """Another one for each life of the job; the same on all ranks, also where one died before it logged."""
    lives = sum(event["event"] == "life" for event in read_events(log))
    counts: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, lives)
    return FIRST_SEED + 1000 * max(count for count in counts if count is not None)


def distributed_job(case: str, seed: int) -> Job:
    job = find_case(case)(seed)
    job.model = DistributedDataParallel(job.model, find_unused_parameters=True)
    job.state["data"].position = 10_000 * dist.get_rank()
    for seed_all in (torch.manual_seed, random.seed, np.random.seed):
        seed_all(10 * seed + dist.get_rank())
    return job


def meet_again(job: Job, log: TrainingLog, path: Path) -> nn.Module:
    """What a rank that stays does for its next life: all collective calls before the `Checkpointer`."""
    dist.init_process_group("gloo")
    log.write("life", seed=seed_of_this_life(path))
    job.model = DistributedDataParallel(job.model.module, find_unused_parameters=True)
    return job.model


def train(job: Job, ckpt: Checkpointer, args: argparse.Namespace, log: TrainingLog) -> None:
    phases: dict[str, float] = {}
    before = (0, 0)
    for step in ckpt.steps(args.total):
        with ckpt.restartable():
            log.write("begins", step=step, replaying=bool(ckpt.replaying))
            time.sleep(args.step_ms / 1e3)
            job.step(step, lambda point: None)
            log.write("step", step=step)
            if phases != (phases := phase_counters(ckpt)):
                stats = ckpt.stats()
                done = int(stats["replayed_steps"]), int(stats["verified_tensors"])
                replayed, compared = done[0] - before[0], done[1] - before[1]
                log.write("back", phases=phases, replayed=replayed, compared=compared)
                before = done


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", required=True)
    parser.add_argument("--total", type=int, required=True)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--run", required=True)
    parser.add_argument("--daemon", required=True, help="an endpoint, or none")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--in-process", action="store_true", help="stay when another rank has failed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    path = args.folder / f"{dist.get_rank()}.jsonl"
    seed = seed_of_this_life(path)
    log = TrainingLog(path)
    log.write("life", seed=seed)
    job = distributed_job(args.case, seed)
    options = {"window": 4, "job": "host-campaign", "run": args.run, **job.options}
    options["daemon"] = None if args.daemon == "none" else args.daemon
    if args.in_process:
        options["in_process"] = partial(meet_again, job, log, path)
    ckpt = Checkpointer(job.model, job.optimizers, job.state, **grouped(**options))
    job.ckpt = ckpt
    job.start(ckpt)
    log.write("attached", resumed_from=ckpt.resumed_from)
    train(job, ckpt, args, log)
    torch.save(final_state(job), args.folder / f"{dist.get_rank()}.pt")
    log.write("finished")
    ckpt.close()
    log.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
