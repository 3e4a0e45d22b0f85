"""How the ranks of a job reach each other where `torch.distributed` has no process group of them.

Workers of re-routed pipelines come and go, and are in no such group (`ckptd.client.rerouting`). Those of them
that capture snapshots are the ranks of a run all the same: their collective calls, and their agreements
beside training, go the way that is named here. As the default process group, it is one for the process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class JobLink:
    """The way to the other ranks.

    Attributes:
        world_size: of the run whose ranks it connects.
        exchange: sends this rank's payload, and returns those of all ranks, in their order. A collective
            call.
        store: of torch, the same for all ranks.
    """

    world_size: int
    exchange: Callable[[bytes], list[bytes]]
    store: Any


_link: JobLink | None = None


def job_link() -> JobLink | None:
    """The way that counts now; None: the default process group."""
    return _link


def use_job_link(link: JobLink | None) -> None:
    """From now on it counts in place of the default process group."""
    global _link
    _link = link
