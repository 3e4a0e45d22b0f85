"""A job of two ranks whose first one, at some moment, cuts its own segment short; run as a process
of its own, which that may kill.

``python -m tests.ckptd.cutting SEED LENGTH ENDPOINT ENDPOINT``: prints the segment's path, then
records until it is over.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

from tests.ckptd.peers_harness import Job


def main() -> None:
    """Args: what moment, how many bytes are left, the daemons."""
    seed, length, *endpoints = sys.argv[1:]
    nodes: list[Any] = [
        SimpleNamespace(name=f"n{i}", endpoint=endpoint) for i, endpoint in enumerate(endpoints)
    ]
    net: Any = SimpleNamespace(nodes=nodes, seen_from=lambda name, said: said)
    job = Job(net, nodes, run=f"cut-{seed}", replicas=1, slot_bytes=8 << 20)
    job.start()
    path = job[0].memory.table.segments[-1].path
    sys.stdout.write(f"{path}\n")
    sys.stdout.flush()
    after_s = random.Random(int(seed)).uniform(0.05, 0.6)

    def cut() -> None:
        time.sleep(after_s)
        with open(path, "r+b") as file:
            os.ftruncate(file.fileno(), int(length))

    threading.Thread(target=cut, daemon=True).start()
    for iteration in range(1000):
        job[0].record(iteration, size=6 << 20)


if __name__ == "__main__":
    main()
