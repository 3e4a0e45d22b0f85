"""Ranks exchange inventories over the job's own process group, so that each computes the same recovery plan."""

from __future__ import annotations

import torch.distributed as dist

from ckptd.client.identity import Identity
from ckptd.recovery import RankInventory, from_wire, to_wire

__all__ = ["exchange_inventories"]


def exchange_inventories(identity: Identity, inventory: RankInventory) -> dict[int, RankInventory]:
    """Every rank's inventory by rank; a collective call if there are several ranks.

    Raises:
        ValueError: several ranks, and ``torch.distributed`` is not initialised with as many.
    """
    if identity.world_size == 1:
        return {identity.rank: inventory}
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
    dist.all_gather_object(gathered, to_wire(inventory))
    return {rank: from_wire(data) for rank, data in enumerate(gathered) if data is not None}
