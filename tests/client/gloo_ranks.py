"""Some ranks of a gloo process group, each a process of this machine, that run a function."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

import tests.forked  # noqa: F401 - says what the ranks begin with

__all__ = ["run_in_ranks"]

# On a machine with other work.
_PATIENCE_S = 400.0


def run_in_ranks(work: Callable[..., None], world_size: int, folder: Path, *args: Any) -> None:
    """Call ``work(rank, *args)`` in each; a function of a module. The first that fails ends the others.

    Args:
        folder: where the ranks meet; nobody met there before.
    """
    context = start_processes(
        _rank,
        (work, world_size, str(folder), args),
        world_size,
        join=False,
        start_method="forkserver",
    )
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while not context.join(timeout=5):
            assert time.monotonic() < deadline, "the ranks hang"
    finally:
        for process in context.processes:
            process.kill()
            process.join()


def _rank(rank: int, work: Callable[..., None], world_size: int, folder: str, args: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=60),
    )
    work(rank, *args)
