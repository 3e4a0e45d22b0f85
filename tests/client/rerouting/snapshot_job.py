"""As `rerouted_job`, with snapshots: `test_stage_snapshots` starts four of them, and starts them again.

``FOLDER``: where it writes. ``ENDPOINT<rank>``: of its daemon. A file ``die<rank>.<life>`` makes it kill
itself in the middle of an iteration, one ``restore<rank>.<life>`` while it loads snapshots, and one
``go<rank>.<life>`` when it is about to go on with snapshots after another one's loss. Lives are counted
from 1. ``REPLICAS``: of snapshots on other nodes. After iteration `HOLD` everybody waits for a file
``go_on``.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from functools import partial
from pathlib import Path
from typing import Never

import numpy as np
import torch
from torch import Tensor

from ckptd.client.options import DaemonOptions
from ckptd.client.recovery.replay import Replay
from ckptd.client.recovery.start import Resumption
from ckptd.client.rng_state import capture_rng
from ckptd.client.train_loop import LoopSide
from tests.client.rerouting.rerouted_job import (
    MICRO_BATCHES,
    batch,
    optimizer_of,
    stage_of,
    training_of,
)

__all__ = ["HOLD", "ITERATIONS", "Drawn", "begin_draws", "draw"]

ITERATIONS, HOLD = 160, 140
STEP_S = 0.04  # at least: snapshots begin once all stages have agreed on them, beside training
SLOW_S = 0.5  # while a test waits for what comes after seconds


class Drawn:
    """What the script draws outside of forwards, the same in all pipelines of a stage."""

    def __init__(self) -> None:
        self.total = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.total = state["total"]


def begin_draws(stage: int) -> None:
    torch.manual_seed(1000 + stage)
    np.random.seed(stage)
    random.seed(stage)


def draw(drawn: Drawn) -> None:
    drawn.total += float(torch.rand(1)) + float(np.random.rand()) + random.random()


def _die(*_: object) -> Never:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def main() -> None:
    torch.set_num_threads(1)
    folder, rank = Path(os.environ["FOLDER"]), int(os.environ["RANK"])
    with (folder / f"lives{rank}").open("a") as lives:
        lives.write(".")
    life = len((folder / f"lives{rank}").read_text())
    end = folder / f"die{rank}.{life}"
    if (folder / f"restore{rank}.{life}").exists():
        Replay.load_tensors = _die  # type: ignore[method-assign]
    go_on = LoopSide.go_on

    def may_die(loop: LoopSide, found: Resumption, step: int) -> None:
        if (folder / f"go{rank}.{life}").exists():
            _die()
        go_on(loop, found, step)

    LoopSide.go_on = may_die  # type: ignore[assignment, method-assign]
    # In each life its own: it has to get its state from elsewhere.
    module = stage_of(rank % 2 if life == 1 else 50 + 10 * life + rank)
    optimizer, schedule = optimizer_of(module)
    drawn = Drawn()
    begin_draws(rank % 2 if life == 1 else 50)
    training = training_of(rank, module, optimizer, {"schedule": schedule, "drawn": drawn})
    daemon = DaemonOptions(endpoint=os.environ[f"ENDPOINT{rank}"], replicas=int(os.environ["REPLICAS"]))
    training.protect("stages", daemon=daemon)

    def data(iteration: int, pipeline: int, micro_batch: int, *, sign: int) -> Tensor:
        if micro_batch == MICRO_BATCHES - 2 and end.exists():
            _die()
        return batch(iteration, pipeline, micro_batch) * sign

    progress = (folder / f"progress{rank}").open("a", buffering=1)

    def tell(iteration: int) -> None:
        found = training.checkpointer
        stats = {} if found is None else found.stats()
        told = {"life": life, "iteration": iteration, "missing": training.missing, "stats": stats}
        progress.write(json.dumps(told | {"resumed": None if found is None else found.resumed_from}) + "\n")

    for iteration, losses in training.iterations(
        ITERATIONS, lambda *each: (data(*each, sign=1),), partial(data, sign=-1)
    ):
        schedule.step()
        draw(drawn)
        time.sleep(SLOW_S if (folder / "slow").exists() else STEP_S)
        tell(iteration)
        with (folder / f"losses{rank}").open("a") as sink:
            sink.write(json.dumps([[iteration, *each, float(loss)] for each, loss in losses.items()]) + "\n")
        while iteration == HOLD and not (folder / "go_on").exists():
            time.sleep(0.01)
            if end.exists():
                _die()
    final = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
    final |= {"schedule": schedule.state_dict(), "drawn": drawn.state_dict(), "rng": capture_rng()}
    torch.save(final, folder / f"final{rank}.pt")


if __name__ == "__main__":
    main()
