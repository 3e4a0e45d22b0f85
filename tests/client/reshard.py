"""One of two ranks: loads an exported checkpoint into shards with stock torch, and compares the
whole with what was live.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def main(checkpoint: Path, folder: Path) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    _compare(checkpoint, folder, world_size)
    # Whatever still knows the group would keep it, and its threads, until the interpreter ends:
    # that aborted now and then.
    gc.collect()
    dist.destroy_process_group()


def _compare(checkpoint: Path, folder: Path, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    expected = torch.load(folder / "expected.pt")
    shards = {
        name: distribute_tensor(torch.zeros_like(tensor), mesh, [Shard(0)])
        if tensor.ndim
        else torch.zeros_like(tensor)
        for name, tensor in expected.items()
    }
    load({"model": shards}, checkpoint_id=checkpoint)
    for name, tensor in expected.items():
        found = shards[name]
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        assert torch.equal(whole, tensor), name
