"""What is sharded and what is replicated over ranks, as wrappers and DTensors tell; never guessed
from values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckptd.client.model.live_state import LiveState

__all__ = ["check_sharded", "placement_lines"]

_NO_WRAPPER = "told by no wrapper: each rank keeps its own"


def placement_lines(binding: LiveState) -> list[str]:
    """For ``describe()``: how many parameters are placed in which way, and one of them by name."""
    replicated = dict(_replicated(binding.model))
    groups: dict[str, list[str]] = {}
    for name, param in binding.params.items():
        how = _of_dtensor(param) or replicated.get(id(param), _NO_WRAPPER)
        groups.setdefault(how, []).append(name)
    lines = [f"parameters {how}: {len(names)} ({names[0]})" for how, names in groups.items()]
    if binding.elsewhere:
        lines.append(
            f"updated on another rank, which keeps their optimizer state: {len(binding.elsewhere)} "
            f"({min(binding.elsewhere)})"
        )
    if binding.inseparable:
        lines.append(
            "anchored in every snapshot, because their update communicates: "
            f"{len(binding.inseparable)} ({min(binding.inseparable)})"
        )
    return lines


def check_sharded(binding: LiveState) -> None:
    """The model's FSDP2 parameters are the shards that the optimizer updates.

    Raises:
        ValueError: some are gathered now.
    """
    extra = [p for n, p in binding.params.items() if n.startswith("extra/")]
    alone = [p for p in extra if hasattr(p, "to_local")]
    if alone and any(_is_fsdp(module) for module in binding.model.modules()):
        raise ValueError(
            f"{len(alone)} shards that the optimizer updates are not in the model: its parameters "
            "are gathered (a forward without "
            "backward leaves them so), or were not sharded yet when the optimizer got them; call "
            "reshard() on the FSDP modules "
            "before Checkpointer, and make the optimizer after fully_shard()"
        )


def _is_fsdp(module: nn.Module) -> bool:
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def _of_dtensor(param: Any) -> str:
    """``sharded along 0 over 2 ranks (dp)`` and the like; empty if it is no DTensor."""
    if not hasattr(param, "placements"):
        return ""
    mesh = param.device_mesh
    names = mesh.mesh_dim_names or [f"mesh axis {i}" for i in range(mesh.ndim)]
    return ", ".join(
        f"{_words(placement)} over {mesh.size(axis)} ranks ({names[axis]})"
        for axis, placement in enumerate(param.placements)
    )


def _words(placement: Any) -> str:
    if placement.is_replicate():
        return "replicated"
    return f"sharded along {placement.dim}" if hasattr(placement, "dim") else str(placement)


def _replicated(model: nn.Module) -> Iterator[tuple[int, str]]:
    """The parameters whose gradients a DDP wrapper reduces."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            how = f"replicated over {module.process_group.size()} ranks (DistributedDataParallel)"
            for name, param in module.module.named_parameters():
                if name not in module.parameters_to_ignore:
                    yield id(param), how
