"""All ranks of a job under one name: a script may lie elsewhere on another node, and rank 0's names
are those of all.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import torch.distributed as dist

from ckptd.client.identity import Identity
from ckptd.client.ranks.rank_exchange import exchange

__all__ = ["agreed_identity"]


def agreed_identity(mine: Identity) -> Identity:
    """This rank under the names that rank 0 has; a collective call if there are several.

    Raises:
        ValueError: ranks were passed different names; on every rank.
        DaemonUnavailable: a rank did not come.
    """
    # What several ranks without a process group lack is told where they meet.
    there = dist.is_available() and dist.is_initialized()
    if mine.world_size == 1 or not there or dist.get_world_size() != mine.world_size:
        return mine
    # Under one name whatever the ranks are called: those that were given others meet, and hear of it.
    meeting = Identity("ckptd", "names", mine.rank, mine.world_size)
    payload = msgspec.msgpack.encode((mine.job, mine.run, mine.told))
    told = [
        msgspec.msgpack.decode(data, type=tuple[str, str, str])
        for data in exchange(meeting, payload)
    ]
    job, run, how = told[0]
    for rank, (other_job, other_run, other_how) in enumerate(told):
        if (other_job, other_run) != (job, run) and not other_how:
            raise ValueError(
                f"rank 0 is of job {job}, run {run}, and rank {rank} of job {other_job}, run {other_run}: pass all ranks the same "
                "job= and run=, or world_size=1 for independent trainers"
            )
    return replace(mine, job=job, run=run, told=how)
