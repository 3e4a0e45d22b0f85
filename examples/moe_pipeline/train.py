"""Train the pipeline: an ordinary loop over `schedule.step`, in which a few lines are ckptd's.

torchrun starts one of these per rank. Rank `r` holds stage `r % stages` of replica `r // stages`:
stages exchange activations and gradients (1F1B), the replicas of a stage average their gradients.
Each rank logs to `<log>-r<rank>.jsonl`.

    torchrun --nproc-per-node 8 -m examples.moe_pipeline.train --stages 4 --steps 100
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from ckptd.client import Checkpointer, LayoutOptions, RecoveryOptions, RunOptions, SnapshotOptions
from ckptd.demo.data import ByteLoader, load_corpus
from ckptd.demo.train import TrainingLog, final_state, phase_counters, warmup_cosine
from examples.moe_pipeline.model import CONFIG, build_stage

__all__ = ["main"]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the example pipeline under torchrun.")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--init-seed", type=int, default=0, help="seed of the weights and dropout")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--rows", type=int, default=1, help="of a micro-batch")
    parser.add_argument("--run", default="r1")
    parser.add_argument("--daemon", default="auto", help="auto, none, or an endpoint")
    parser.add_argument("--window", type=int, default=4, help="snapshots per window")
    parser.add_argument("--no-park", action="store_true", help="survivors do not park their state")
    parser.add_argument("--log", type=Path, help="append one JSON line per event to this file")
    parser.add_argument("--final", type=Path, help="write the final state of each rank here")
    return parser.parse_args()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Pipeline:
    """This rank's stage, its optimizer, and the schedule that runs it with its neighbours'."""

    def __init__(self, args: argparse.Namespace) -> None:
        replicas = dist.get_world_size() // args.stages
        mesh = init_device_mesh("cpu", (replicas, args.stages), mesh_dim_names=("replica", "stage"))
        self.index: int = mesh.get_local_rank("stage")
        self.replica: int = mesh.get_local_rank("replica")
        self.is_first, self.is_last = self.index == 0, self.index == args.stages - 1
        self.model = build_stage(self.index, args.stages, args.init_seed)
        self.replicas = mesh.get_group("replica")
        stage = PipelineStage(
            self.model,
            self.index,
            args.stages,
            torch.device("cpu"),
            group=mesh.get_group("stage"),
        )
        self.schedule = Schedule1F1B(stage, n_microbatches=args.micro_batches, loss_fn=loss_of)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, weight_decay=0.05)
        self.lr = torch.optim.lr_scheduler.LambdaLR(self.optimizer, warmup_cosine(args.steps))
        # All stages of a replica draw the same batches: the first needs the inputs, the last the targets.
        self.loader = ByteLoader(
            load_corpus(),
            batch_size=args.micro_batches * args.rows,
            context=CONFIG.context,
            seed=7 + self.replica,
        )
        for seed_all in (torch.manual_seed, random.seed, np.random.seed):
            seed_all(1000 * args.init_seed + 100 + dist.get_rank())

    def iteration(self) -> float | None:
        """One training iteration; the mean loss over the micro-batches, which the last stage knows."""
        inputs, targets = next(self.loader)
        losses: list[Tensor] = []
        self.schedule.step(
            *((inputs,) if self.is_first else ()),
            target=targets if self.is_last else None,
            losses=losses if self.is_last else None,
        )
        self.average_gradients()
        self.optimizer.step()
        self.lr.step()
        self.optimizer.zero_grad()
        return float(torch.stack(losses).mean().detach()) if losses else None

    def average_gradients(self) -> None:
        """Over the replicas of this stage, in one piece."""
        params = list(self.model.parameters())
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=self.replicas)
        means = torch.split(flat / self.replicas.size(), [p.numel() for p in params])
        for param, mean in zip(params, means, strict=True):
            param.grad = mean.view_as(param)


def train(args: argparse.Namespace, log: TrainingLog) -> dict[str, Tensor]:
    """Run the loop to its end and return the complete final state of this rank."""
    pipeline = Pipeline(args)
    state: dict[str, Any] = {"lr": pipeline.lr, "loader": pipeline.loader}
    log.write("attaches")
    ckpt = Checkpointer(
        pipeline.model,
        pipeline.optimizer,
        state=state,
        run=RunOptions(job="pipeline", name=args.run),
        daemon=None if args.daemon == "none" else args.daemon,
        snapshots=SnapshotOptions(window=args.window),
        recovery=RecoveryOptions(park=False if args.no_park else None),
        layout=LayoutOptions(replicated={"*": pipeline.replicas}),
    )
    ckpt.log_boundaries(pipeline.schedule)
    log.write("attached", stage=pipeline.index, resumed_from=ckpt.resumed_from)
    phases: dict[str, float] = {}
    for step in ckpt.steps(args.steps):
        begun = time.perf_counter()
        replaying = bool(ckpt.replaying)
        log.write("begins", step=step, replaying=replaying)
        loss = pipeline.iteration()
        log.write(
            "step",
            step=step,
            loss=loss,
            norm=0.0,
            replaying=replaying,
            iteration_s=time.perf_counter() - begun,
        )
        if not phases and (phases := phase_counters(ckpt)):
            log.write("back", phases=phases)
    log.write("finished", resumed_from=ckpt.resumed_from, stats=ckpt.stats())
    final = final_state(pipeline.model, {}, pipeline.optimizer, state)
    for name, param in pipeline.model.named_parameters():
        for key, value in pipeline.optimizer.state[param].items():
            final[f"optim/{key}/{name}"] = torch.as_tensor(value)
    ckpt.close()
    return final


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if args.log is not None:
        args.log = args.log.with_name(f"{args.log.stem}-r{rank}{args.log.suffix}")
        # A rank that has lived before begins from another seed: nothing right can come from there.
        if args.log.exists():
            args.init_seed += args.log.read_bytes().count(b'"event": "attached"')
    seeds: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(seeds, args.init_seed)
    args.init_seed = max(seed for seed in seeds if seed is not None)
    log = TrainingLog(args.log, rank=rank)
    final = train(args, log)
    if args.final is not None:
        args.final.parent.mkdir(parents=True, exist_ok=True)
        torch.save(final, args.final.with_name(f"{args.final.stem}-r{rank}{args.final.suffix}"))
    log.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
