"""A worker of two pipelines of two stages, under a host: `test_rerouted_training` starts four of them.

``FOLDER``: where it writes, and where a file ``go_on`` lets everybody go on after iteration `HOLD`.
``DIES``: rank and iteration, with a colon: it kills itself in the middle of that, in its first life, or stops
if there is a file ``hangs``. While there is a file ``late``, it does not take part in a later one; while there is ``linger``, nobody ends.
"""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ckptd.client.capture.step_state import Stateful
from ckptd.client.rerouting.rerouted_training import ReroutedTraining
from ckptd.core.reroute.pipeline_grid import PipelineGrid, StageCosts

__all__ = [
    "HOLD",
    "ITERATIONS",
    "MICRO_BATCHES",
    "SEED",
    "batch",
    "loss_of",
    "optimizer_of",
    "stage_of",
    "training_of",
]

WIDTH, ROWS, MICRO_BATCHES, SEED = 8, 3, 4, 5
ITERATIONS, HOLD = 10, 5


def stage_of(index: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH))


def optimizer_of(
    module: nn.Module,
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def batch(iteration: int, pipeline: int, micro_batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * iteration + 100 * pipeline + micro_batch)
    return torch.randn(ROWS, WIDTH, generator=generator)


def training_of(
    rank: int, module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Stateful]
) -> ReroutedTraining:
    rows = torch.zeros(ROWS, WIDTH)
    return ReroutedTraining(
        module,
        optimizer,
        PipelineGrid(2, (StageCosts(1, 1, 1, 0.5, 0.1),) * 2, MICRO_BATCHES),
        examples=(rows.clone().requires_grad_(rank % 2 > 0), rows.clone().requires_grad_()),
        loss_fn=loss_of,
        state=state,
        seed=SEED,
    )


def main() -> None:
    torch.set_num_threads(1)
    folder, rank = Path(os.environ["FOLDER"]), int(os.environ["RANK"])
    first_life = not (folder / f"lives{rank}").exists()
    victim, its_iteration = map(int, os.environ["DIES"].split(":"))
    dies_at = its_iteration if first_life and rank == victim else -1
    while not first_life and (folder / "late").exists():
        time.sleep(0.01)
    module = stage_of(rank % 2 if first_life else 77)  # it has to get its state from elsewhere
    optimizer, schedule = optimizer_of(module)
    training = training_of(rank, module, optimizer, {"schedule": schedule})
    (folder / f"lives{rank}").touch()

    def data(iteration: int, pipeline: int, micro_batch: int, *, sign: int) -> Tensor:
        if iteration == dies_at and micro_batch == MICRO_BATCHES - 2:
            os.kill(os.getpid(), signal.SIGSTOP if (folder / "hangs").exists() else signal.SIGKILL)
        return batch(iteration, pipeline, micro_batch) * sign

    seen: dict[int, dict[tuple[int, int], float]] = {}
    missing: dict[int, tuple[int, ...]] = {}
    for iteration, losses in training.iterations(
        ITERATIONS, lambda *each: (data(*each, sign=1),), partial(data, sign=-1)
    ):
        schedule.step()
        seen[iteration] = {each: float(loss) for each, loss in losses.items()}
        missing[iteration] = training.missing
        while iteration == HOLD and not (folder / "go_on").exists():
            time.sleep(0.01)
    while (folder / "linger").exists():
        time.sleep(0.01)
    state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state | {"losses": seen, "missing": missing}, folder / f"final{rank}.pt")


if __name__ == "__main__":
    main()
