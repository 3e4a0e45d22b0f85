"""A tiny data-parallel worker for the tests of torchrun across hosts: no ckptd, only gloo and DDP.

It trains until the file `stop` appears (rank 0 looks, all ranks end after the same step) and writes
one JSON line per event to `<folder>/<rank>.jsonl`: `life` when the ranks have met, `step`, and
`end` with a digest of the weights, which must be the same on all ranks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEP_S = 0.02


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with (folder / f"{rank}.jsonl").open("a", buffering=1) as log:

        def write(event: str, **fields: object) -> None:
            host = os.environ["TEST_CLUSTER_HOST"].rpartition(".")[2]
            log.write(json.dumps({"event": event, "host": host, "time_s": time.time(), **fields}) + "\n")

        write("life", world_size=dist.get_world_size(), pid=os.getpid())
        model = train(folder, write)
        weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        write("end", digest=xxhash.xxh3_64_hexdigest(weights))
    # The wrapper goes before the group: held by it last, the group's end waits for its threads with
    # the interpreter's lock held.
    del model
    dist.destroy_process_group()


def train(folder: Path, write: object) -> nn.Module:
    assert callable(write)
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(100 + dist.get_rank())
    stop, step = torch.zeros(1), 0
    while not stop.item():
        loss = model(torch.randn(8, 64, generator=data)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        stop[0] = float(dist.get_rank() == 0 and (folder / "stop").exists())
        dist.all_reduce(stop)
        write("step", step=step)
        step += 1
        time.sleep(STEP_S)  # so that some seconds of training are not a hundred thousand lines
    return model


if __name__ == "__main__":
    main(Path(sys.argv[1]))
