"""One rank of an elastic training for `bench.spot.real`: an `ElasticJob` that starts again from
disk when what its nodes hold is no whole state.

It writes its state to disk itself, every so many steps, and training waits for that. A start from
disk is the first world of another run; the steps before it are carried in the job's own state.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch.distributed as dist

from bench.spot.jobs import Log, Saves, Training, agreed, meet, options
from ckptd.client import RunOptions
from ckptd.client.capture.step_state import Stateful
from ckptd.client.elastic.job import ElasticJob
from ckptd.errors import ElasticError
from examples.moe_elastic.model import EXPERTS, LAYERS, Model

__all__ = ["main"]

_FOREVER = 10**9


class Before:
    """How many steps were done before this run of the job."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--slots", type=int, default=4, help="experts of a layer on a rank")
    parser.add_argument("--daemon", default="auto")
    args = parser.parse_args()
    log = meet(args)
    train(args, log)


def begin(args: argparse.Namespace, log: Log) -> ElasticJob:
    """The job as its nodes hold it; where they hold no whole state, another run of it, which holds
    nothing yet.
    """
    attempts: Path = args.saves / "attempts"
    attempts.mkdir(parents=True, exist_ok=True)
    while True:
        attempt = agreed(len(list(attempts.iterdir())))
        try:
            return ElasticJob(
                dict.fromkeys(LAYERS, EXPERTS),
                slots=args.slots,
                run=RunOptions(job="spot", name=f"spot.{attempt}"),
                daemon=args.daemon,
            )
        except ElasticError as error:  # on all ranks
            log.write("lost", why=str(error))
            if dist.get_rank() == 0:
                (attempts / str(attempt)).touch()


def train(args: argparse.Namespace, log: Log) -> None:
    saves, before = Saves(args.saves, log.life), Before()
    job = begin(args, log)
    training = Training(Model(job, seed=7), args)
    came_from = "memory"
    if job.start == 0:
        before.steps = agreed(saves.newest())
        came_from = "disk" if before.steps else "nothing"
        if before.steps:
            training.load(saves.read(before.steps))
    kept: dict[str, Stateful] = {"scheduler": training.scheduler, "before": before}
    job.checkpointer(training.model, training.optimizer, kept)
    job.check_replicas()
    told = False
    for number in job.steps(_FOREVER):
        step = before.steps + number
        if not told:
            log.write("ready", step=step, ranks=job.world_size, source=came_from, why=job.plan.reason)
            told = True
        loss = training.forward_backward(step, job.rank, job.world_size)
        dist.all_reduce(loss)  # before the step is done: who has done it needs nobody to tell of it
        job.sum_gradients()
        training.update()
        log.write("step", step=step, loss=float(loss))
        if (step + 1) % args.every == 0:
            log.write("saved", seconds=saves.write(step + 1, job.rank, training.state()))


if __name__ == "__main__":
    main()
