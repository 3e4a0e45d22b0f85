"""One rank of the elastic training, started by torchrun with a range of nodes; ckptd is the
`ElasticJob` and its four calls.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from ckptd.client import RunOptions
from ckptd.client.elastic.job import ElasticJob, GlobalBatches, PlacementOptions
from ckptd.demo.data import load_corpus
from examples.moe_elastic.model import CONTEXT, EXPERTS, LAYERS, Model

__all__ = ["main"]

CORPUS_BYTES = 400_000
PATIENCE_S = 60
Write = Callable[..., None]


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One rank of an elastic training.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=0.0, help="more time for each step")
    parser.add_argument("--hurry", type=Path, help="no more of that once this file exists")
    parser.add_argument("--batch-size", type=int, default=32, help="of all ranks together")
    parser.add_argument("--slots", type=int, default=4, help="experts of a layer on a rank")
    parser.add_argument("--threshold", type=int, default=2)
    parser.add_argument("--daemon", default="auto")
    parser.add_argument("--run", default="elastic")
    parser.add_argument("--log", type=Path, required=True, help="folder of the event logs")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    torch.set_num_threads(1)
    began = time.time()
    # A peer that lost power closes no connection: this is how long the others wait for it before
    # they start again.
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=PATIENCE_S))
    host = os.environ.get("CKPTD_NODE_ID", "alone")
    with (args.log / f"{host}.jsonl").open("a", buffering=1) as log:

        def write(event: str, **told: object) -> None:
            line = {"event": event, "host": host, "rank": dist.get_rank(), "time_s": time.time()}
            log.write(json.dumps({**line, **told}) + "\n")

        write("met", began_s=began, ranks=dist.get_world_size())
        train(args, write)
    dist.barrier()
    dist.destroy_process_group()


def train(args: argparse.Namespace, write: Write) -> None:
    job = ElasticJob(
        dict.fromkeys(LAYERS, EXPERTS),
        slots=args.slots,
        run=RunOptions(job="demo", name=args.run),
        daemon=None if args.daemon == "none" else args.daemon,
        placement=PlacementOptions(threshold=args.threshold),
    )
    held = {name: job.experts(name) for name in LAYERS}
    write("world", number=job.plan.number, start=job.start, reason=job.plan.reason, held=held)
    # Nothing right can come from the initialisation where there is a state to go on from.
    model = Model(job, seed=7 if job.start == 0 else time.time_ns() % 1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.7)
    ckpt = job.checkpointer(model, optimizer, {"scheduler": scheduler})
    job.check_replicas()
    write("loaded", seconds=job.seconds)
    corpus = load_corpus(CORPUS_BYTES).long()
    windows = corpus.unfold(0, CONTEXT + 1, 1)
    batches = GlobalBatches(len(windows), args.batch_size, seed=1)
    for step in job.steps(args.steps):
        batch = windows[batches.mine(step, job.rank, job.world_size)]
        # Of the mean over the global batch, this rank's part.
        loss = cross_entropy(model(batch[:, :-1]), batch[:, -1], reduction="sum") / args.batch_size
        write("half", step=step, floor=job.floor, park=ckpt.stats().get("park_memory_bytes", 0))
        if args.step_ms and not (args.hurry and args.hurry.exists()):
            time.sleep(args.step_ms / 1e3)  # a step of a larger model
        loss.backward()
        job.sum_gradients()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        write("step", step=step, loss=float(total))
    job.check_replicas()
    write("finished", stats=ckpt.stats())
    job.close()


if __name__ == "__main__":
    main()
