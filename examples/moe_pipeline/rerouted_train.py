"""Train the pipeline of `examples.moe_pipeline` without a stop when workers die: what is ckptd's is the loop.

A host starts one of these per rank. Rank `r` holds stage `r % stages` of pipeline `r // stages`.

    RANK=0 WORLD_SIZE=8 … python -m ckptd.host --reroute -m examples.moe_pipeline.rerouted_train --stages 4

With ``--protect RUN`` one worker of each stage takes snapshots, from which the whole job comes back.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ckptd.client.rerouting.rerouted_training import ReroutedTraining
from ckptd.core.reroute.pipeline_grid import PipelineGrid, StageCosts
from ckptd.core.reroute.reroute_plan import ReroutePlan, drop_pipelines, plan_reroute
from ckptd.demo.data import load_corpus
from ckptd.demo.train import TrainingLog, warmup_cosine
from examples.moe_pipeline.model import CONFIG, build_stage

__all__ = ["PHASES", "main"]

PHASES = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
OTHER_S = 0.002  # what the planner takes for a transfer, a step and a sum
CORPUS_BYTES = 400_000
ROWS = 1  # of a micro-batch


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the example pipeline under hosts that re-route.")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--micro-batches", type=int, default=8, help="of each pipeline")
    parser.add_argument("--phase-ms", type=float, default=0.0, help="least time of each phase")
    parser.add_argument("--drop", action="store_true", help="drop each pipeline with a hole instead")
    parser.add_argument("--init-seed", type=int, default=0)
    parser.add_argument(
        "--protect", metavar="RUN", help="take snapshots; a job that is started again resumes"
    )
    parser.add_argument("--folder", type=Path, required=True, help="for logs and final states")
    return parser.parse_args()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Sender(nn.Module):
    """A stage whose output is no view: torch's backward in two phases detaches it in place."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.stage(x)).clone()


class MicroBatches:
    """Windows of text that follow from iteration, pipeline and number: any worker can ask for any."""

    def __init__(self) -> None:
        self._corpus = load_corpus(CORPUS_BYTES)

    def _window(self, iteration: int, pipeline: int, number: int, shift: int) -> Tensor:
        draw = torch.Generator().manual_seed(iteration * 10_000 + pipeline * 100 + number)
        starts = torch.randint(len(self._corpus) - CONFIG.context - 1, (ROWS,), generator=draw)
        return torch.stack([self._corpus[s + shift : s + shift + CONFIG.context] for s in starts]).long()

    def inputs(self, iteration: int, pipeline: int, number: int) -> tuple[Tensor]:
        return (self._window(iteration, pipeline, number, 0),)

    def targets(self, iteration: int, pipeline: int, number: int) -> Tensor:
        return self._window(iteration, pipeline, number, 1)


def examples_of(index: int, stages: int) -> tuple[Tensor, Tensor]:
    """What the stage gets and what it returns."""
    tokens = torch.zeros(ROWS, CONFIG.context, dtype=torch.int64)
    hidden = torch.zeros(ROWS, CONFIG.context, CONFIG.width, requires_grad=True)
    logits = torch.zeros(ROWS, CONFIG.context, CONFIG.vocab_size, requires_grad=True)
    return tokens if index == 0 else hidden, logits if index == stages - 1 else hidden.clone()


def last_as_on_a_device(stage: Any, least_s: float) -> None:
    """Each phase lasts so long at least: workers that share few cores then wait for each other as those would
    that have a device each.
    """
    for name in PHASES:
        setattr(stage, name, _lasting(getattr(stage, name), least_s))


def _lasting(below: Callable[..., Any], least_s: float) -> Callable[..., Any]:
    def lasting(*args: Any, **kwargs: Any) -> Any:
        until = time.perf_counter() + least_s
        result = below(*args, **kwargs)
        time.sleep(max(0.0, until - time.perf_counter()))
        return result

    return lasting


def dropping(grid: PipelineGrid) -> ReroutePlan:
    """As without re-routing: whole pipelines only."""
    return drop_pipelines(grid) if grid.failed else plan_reroute(grid)


def train(args: argparse.Namespace, log: TrainingLog) -> dict[str, Any]:
    """Run the loop to its end; the final state of this worker."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    index = rank % args.stages
    module = Sender(build_stage(index, args.stages, args.init_seed))
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine(args.iterations))
    phase_s = max(args.phase_ms / 1e3, OTHER_S)
    costs = StageCosts(phase_s, phase_s, phase_s, OTHER_S, OTHER_S, OTHER_S)
    training = ReroutedTraining(
        module,
        optimizer,
        PipelineGrid(world_size // args.stages, (costs,) * args.stages, args.micro_batches),
        examples=examples_of(index, args.stages),
        loss_fn=loss_of,
        state={"schedule": schedule},
        seed=17,
        plan=dropping if args.drop else plan_reroute,
    )
    if args.protect:
        training.protect(args.protect)
    last_as_on_a_device(training.stage, args.phase_ms / 1e3)
    log.write("ready")
    data = MicroBatches()
    for iteration, losses in training.iterations(args.iterations, data.inputs, data.targets):
        schedule.step()
        told = [[*each, float(loss)] for each, loss in losses.items()]
        log.write("step", step=iteration, losses=told, missing=training.missing)
    return {"model": module.state_dict(), "optimizer": optimizer.state_dict()}


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    log = TrainingLog(args.folder / f"rank-r{rank}.jsonl", rank=rank)
    # A worker that has lived before begins from another seed: nothing right can come from there.
    args.init_seed += (args.folder / f"rank-r{rank}.jsonl").read_bytes().count(b'"event": "ready"')
    torch.save(train(args, log), args.folder / f"rank-r{rank}.pt")
    log.close()


if __name__ == "__main__":
    main()
