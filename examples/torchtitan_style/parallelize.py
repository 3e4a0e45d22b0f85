"""From degrees of parallelism to a DeviceMesh, and from a mesh to a model that is sharded over it."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from examples.torchtitan_style.config import Parallelism
from examples.torchtitan_style.model import Transformer

__all__ = ["ParallelDims", "parallelize"]


@dataclass(frozen=True, slots=True)
class ParallelDims:
    """How the ranks are arranged."""

    dp_replicate: int
    dp_shard: int

    @classmethod
    def of(cls, config: Parallelism, world_size: int) -> ParallelDims:
        """Complete what is left open.

        Raises:
            ValueError: the degrees do not multiply to ``world_size``.
        """
        replicate, shard = (
            config.data_parallel_replicate_degree,
            config.data_parallel_shard_degree,
        )
        if shard == -1:
            shard = world_size // replicate
        if replicate * shard != world_size:
            raise ValueError(
                f"data_parallel_replicate_degree={replicate} x data_parallel_shard_degree={shard} is not the {world_size} ranks there are"
            )
        return cls(replicate, shard)

    def build_mesh(self, device_type: str) -> DeviceMesh:
        return init_device_mesh(
            device_type,
            (self.dp_replicate, self.dp_shard),
            mesh_dim_names=("dp_replicate", "dp_shard"),
        )

    def __str__(self) -> str:
        return f"dp_replicate={self.dp_replicate} dp_shard={self.dp_shard}"


def parallelize(model: Transformer, mesh: DeviceMesh) -> None:
    """FSDP2 over ``dp_shard``, HSDP where there are replicas too: each block by itself, the rest at the root."""
    over = mesh if mesh["dp_replicate"].size() > 1 else mesh["dp_shard"]
    for layer in model.layers:
        fully_shard(layer, mesh=over)
    fully_shard(model, mesh=over)
