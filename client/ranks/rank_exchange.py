"""What every rank has to say, told to every rank: bytes over the job's process group, after all have come.

First the ranks come together (`meeting`). Then the bytes travel as tensors of the group's own
device, so that groups of NCCL alone serve, too. They are not sent through the store: it would have
to hand out *world size* squared payloads, from one machine. Nothing is pickled.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ckptd.client.identity import Identity
from ckptd.client.ranks.store_barrier import DEADLINE_S, StoreBarrier

__all__ = [
    "device_of",
    "exchange",
    "gather_bytes",
]

# What is gathered at once, over all ranks.
_ROUND_BYTES = 64 << 20

_meetings: StoreBarrier | None = None


def exchange(identity: Identity, payload: bytes, *, deadline_s: float = DEADLINE_S) -> list[bytes]:
    """What every rank has to say, in the order of ranks; a collective call if there are several.

    Raises:
        ValueError: several ranks, and ``torch.distributed`` is not initialised with as many.
        DaemonUnavailable: not all ranks came within ``deadline_s``, or one is gone; it is named.
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
    _meetings_of_job().meet(f"ckptd/{identity.job}/{identity.run}/exchange", deadline_s=deadline_s)
    return gather_bytes(payload, identity.world_size)


def _meetings_of_job() -> StoreBarrier:
    global _meetings  # of the process, as the process group is
    group = dist.distributed_c10d._get_default_group()
    if _meetings is None or not _meetings.are_of(group):
        if _meetings is not None:
            _meetings.close()
        _meetings = StoreBarrier(group)
    return _meetings


def gather_bytes(payload: bytes, world_size: int, group: Any = None) -> list[bytes]:
    """The payloads of all ranks, in their order; a collective call of the process group (default:
    that of all).
    """
    device = device_of(group)
    mine = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    sizes = [int(size) for size in _gathered(mine, world_size, group).flatten().tolist()]
    most = max(sizes)
    # In rounds, so that one long payload does not cost world size times its length of memory.
    width = max(1, min(most, _ROUND_BYTES // world_size))
    parts: list[list[bytes]] = [[] for _ in sizes]
    for start in range(0, most, width):
        length = min(width, most - start)
        piece = payload[start : start + length].ljust(length, b"\0")
        row = torch.frombuffer(bytearray(piece), dtype=torch.uint8).to(device)
        rows = _gathered(row, world_size, group).cpu().numpy()
        for rank, size in enumerate(sizes):
            if size > start:
                parts[rank].append(rows[rank, : size - start].tobytes())
    return [b"".join(found) for found in parts]


def _gathered(mine: Tensor, world_size: int, group: Any) -> Tensor:
    everything = torch.empty((world_size, mine.numel()), dtype=mine.dtype, device=mine.device)
    dist.all_gather(list(everything.unbind()), mine, group=group)
    return everything


def device_of(group: Any) -> torch.device:
    """A device whose tensors the process group can send."""
    backends = str(dist.get_backend_config(group))
    names = [pair.split(":")[0] for pair in backends.split(",")]
    if "cpu" in names:
        return torch.device("cpu")
    return torch.device(names[0], torch.accelerator.current_device_index())
