"""What an export must know of a run and cannot see in a snapshot; told in the segment's descriptor."""

from __future__ import annotations

from typing import Any

from ckptd.client.model.live_state import LiveState
from ckptd.client.model.parameter_names import named_modules, named_parameters

__all__ = ["export_facts"]


def export_facts(binding: LiveState) -> dict[str, Any]:
    """For the trainer's part of a descriptor (`ckptd.export.source.facts_of` reads it).

    ``transient_buffers``: buffers that the model's state dict leaves out. ``aliases``: further
    names of tied parameters.
    ``groups``: (optimizer, group) of each parameter, where there is more than one group.
    """
    model = binding.model
    transient = [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in named_modules(model)
        for name in module._non_persistent_buffers_set
    ]
    first = {id(param): name for name, param in binding.params.items()}
    aliases = {
        name: first[id(param)]
        for name, param in named_parameters(model, remove_duplicate=False)
        if name != first[id(param)]
    }
    several = sum(len(o.param_groups) for o in binding.optimizers) > 1
    groups = {name: list(owner) for name, owner in binding.owner.items()} if several else {}
    return {"transient_buffers": transient, "aliases": aliases, "groups": groups}
