"""The state dict of a model as if no block had been replaced, from the experts of all ranks, and back.

Its names are those of the original model: experts are rows of its tensors
(``...experts.gate_up_proj``) or modules of its list (``...experts.3.w1.weight``). So
``model.save_pretrained(folder, state_dict=full)`` can save it, and the original model can load it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ckptd.client.elastic.layer.elastic_layer import ElasticExperts, common_device
from ckptd.client.elastic.layer.expert_tensors import expert_tensors_of, rounds_by_dtype
from ckptd.client.elastic.layer.model_surgery import elastic_layers
from ckptd.client.elastic.layer.token_routing import all_to_all
from ckptd.client.ranks.collectives import Collectives

__all__ = ["full_state_dict", "load_full_state_dict"]

_WHAT = "there is no full state dict"


def full_state_dict(model: nn.Module, *, to: int = 0) -> dict[str, Tensor]:
    """The whole state on rank ``to`` of the layers' process group, in host memory; empty on the other
    ranks. A collective call.

    Experts come from their first holders, all else from rank ``to``.

    Raises:
        ValueError: on all ranks: the model has no elastic layer, or ranks pass different models or ``to``.
    """
    layers = elastic_layers(model)
    if not layers:
        raise ValueError("the model has no elastic layer: its own state_dict() is the full one")
    group = next(iter(layers.values())).group
    Collectives.of_group(group).check(
        lambda: _checked_call(layers, to, group),
        bytes,
        what=_WHAT,
        unlike="another model or to= than rank 0",
    )
    device = common_device(layers.values(), group, what=_WHAT)
    state = _dense_part(model, layers) if dist.get_rank(group) == to else {}
    for name, layer in layers.items():
        found = _gathered(layer, to, device)
        if found:
            state.update(_named(name, layer, found))
    return state


def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load this rank's part of such a state, without communication. All ranks load the same state.

    Raises:
        ValueError: names or shapes do not fit; layers have ``ExpertShards``, which would overwrite it.
    """
    layers = elastic_layers(model)
    for name, layer in layers.items():
        if layer.is_sharded:
            raise ValueError(
                f"{name!r} has ExpertShards, whose next step would overwrite what is loaded: load "
                "before they are made"
            )
    dense = _dense_names(model, layers)
    wanted: dict[str, Tensor] = {}
    for name, layer in layers.items():
        for expert, module in layer.held_experts().items():
            for param_name, param in module.named_parameters():
                wanted[f"{name}.experts.{expert}.{param_name}"] = _row(
                    state, name, layer, expert, param_name, param
                )
    known = dense | {key for name, layer in layers.items() for key in _names(name, layer)}
    if lacking := sorted(known - state.keys()):
        raise ValueError(f"the state has no {lacking[0]!r}, and lacks {len(lacking)} in all")
    if strange := sorted(state.keys() - known):
        raise ValueError(f"the model has no {strange[0]!r}; {len(strange)} are strange in all")
    rest = model.state_dict()
    # Entries of experts that no full state has (buffers) stay as they are.
    experts = {key: wanted.get(key, value) for key, value in rest.items() if key not in known}
    model.load_state_dict({**{key: state[key] for key in dense}, **experts})


def _dense_names(model: nn.Module, layers: Mapping[str, ElasticExperts]) -> set[str]:
    prefixes = tuple(f"{name}.experts." for name in layers)
    return {key for key in model.state_dict() if not key.startswith(prefixes)}


def _dense_part(model: nn.Module, layers: Mapping[str, ElasticExperts]) -> dict[str, Any]:
    names = _dense_names(model, layers)
    return {
        key: value.detach().cpu() if isinstance(value, Tensor) else value
        for key, value in model.state_dict().items()
        if key in names
    }


def _gathered(layer: ElasticExperts, to: int, device: torch.device) -> dict[tuple[int, int], Tensor]:
    """On rank ``to``, this layer's parameters by expert and index; a collective call."""
    params = {e: list(m.parameters()) for e, m in layer.held_experts().items()}
    rank, ranks = dist.get_rank(layer.group), dist.get_world_size(layer.group)
    found: dict[tuple[int, int], Tensor] = {}
    for exchange, entries in rounds_by_dtype(
        expert_tensors_of(layer.agreed), layer.agreed, device, layer.group
    ):
        # By source, the first holder: the order of arrival.
        entries.sort(key=lambda entry: entry.holders[0])
        mine = [entry for entry in entries if entry.holders[0] == rank]
        row = exchange.row([params[entry.expert][entry.index].detach().reshape(-1) for entry in mine])
        sends, receives = [0] * ranks, [0] * ranks
        sends[to] = len(row)
        if rank == to:
            for entry in entries:
                receives[entry.holders[0]] += entry.numel
        received = all_to_all(row, sends, receives, layer.group)
        if rank == to:
            flats = received.cpu().split([entry.numel for entry in entries])
            for entry, flat in zip(entries, flats, strict=True):
                found[entry.key] = flat.view(layer.agreed.shapes_E[entry.expert][entry.index].size)
    return found


def _named(name: str, layer: ElasticExperts, found: Mapping[tuple[int, int], Tensor]) -> dict[str, Tensor]:
    shapes_E = layer.agreed.shapes_E
    if layer.fused:
        return {
            f"{name}.{shape.name}": torch.stack([found[e, index] for e in range(len(shapes_E))])
            for index, shape in enumerate(shapes_E[0])
        }
    return {
        f"{name}.{expert}.{shapes_E[expert][index].name}": tensor.clone()
        for (expert, index), tensor in sorted(found.items())
    }


def _names(name: str, layer: ElasticExperts) -> list[str]:
    shapes_E = layer.agreed.shapes_E
    if layer.fused:
        return [f"{name}.{shape.name}" for shape in shapes_E[0]]
    return [f"{name}.{e}.{shape.name}" for e, shapes in enumerate(shapes_E) for shape in shapes]


def _row(
    state: Mapping[str, Tensor],
    name: str,
    layer: ElasticExperts,
    expert: int,
    param_name: str,
    param: Tensor,
) -> Tensor:
    key = f"{name}.{param_name}" if layer.fused else f"{name}.{expert}.{param_name}"
    if key not in state:
        raise ValueError(f"the state has no {key!r}")
    whole = state[key]
    if layer.fused and (whole.ndim != param.ndim + 1 or len(whole) != layer.num_experts):
        raise ValueError(
            f"{key!r} has the shape {list(whole.shape)}, not {[layer.num_experts, *param.shape]}"
        )
    row = whole[expert] if layer.fused else whole
    if row.shape != param.shape:
        raise ValueError(f"{key!r} has the shape {list(whole.shape)}, which does not fit the layer")
    return row


def _checked_call(layers: Mapping[str, ElasticExperts], to: int, group: Any) -> bytes:
    if not 0 <= to < dist.get_world_size(group):
        raise ValueError(f"to={to}: the group has {dist.get_world_size(group)} ranks")
    return "\n".join([str(to), *layers]).encode()
