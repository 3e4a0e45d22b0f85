"""A worker for ``test_barrier_loss``: it comes to a barrier, and to a second one; in the first life
one host's does not, and waits to be lost.

What happened stands in ``<folder>/<host>.jsonl``.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import torch.distributed as dist

from ckptd.client.identity import Identity
from ckptd.client.ranks.collectives import exchange
from ckptd.errors import DaemonUnavailable


def main(folder: Path, late_rank: int, world_size: int) -> None:
    dist.init_process_group("gloo")
    identity = Identity("job", "run", dist.get_rank(), dist.get_world_size())
    host = os.environ["TEST_CLUSTER_HOST"].rpartition(".")[2]

    def tell(event: str, why: str = "") -> None:
        with (folder / f"{host}.jsonl").open("a") as log:
            line = {"event": event, "why": why, "rank": identity.rank, "of": identity.world_size}
            log.write(json.dumps(line) + "\n")

    exchange(identity, b"first")
    tell("begun")
    if identity.world_size == world_size and identity.rank == late_rank:
        threading.Event().wait()
    try:
        exchange(identity, b"second")
    except DaemonUnavailable as error:
        tell("failed", str(error))
        raise
    tell("met")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
