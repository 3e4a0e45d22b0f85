"""Ranks exchange what they know over the job's own process group, so that each computes the same plan."""

from __future__ import annotations

import torch.distributed as dist

from ckptd.client.identity import Identity

__all__ = ["exchange"]


def exchange(identity: Identity, payload: bytes) -> list[bytes]:
    """What every rank has to say, in the order of ranks; a collective call if there are several.

    Raises:
        ValueError: several ranks, and ``torch.distributed`` is not initialised with as many.
    """
    if identity.world_size == 1:
        return [payload]
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            f"world_size={identity.world_size}, but torch.distributed is not initialised: call init_process_group() before Checkpointer, "
            "or pass world_size=1 and a distinct rank= or job= for independent trainers"
        )
    if dist.get_world_size() != identity.world_size:
        raise ValueError(
            f"world_size={identity.world_size}, but the process group has {dist.get_world_size()} ranks"
        )
    gathered: list[bytes | None] = [None] * identity.world_size
    dist.all_gather_object(gathered, payload)
    return [data or b"" for data in gathered]
