"""Replacement of the mixture blocks of a model by elastic ones, and the state dict of the original model.

A block keeps its gate; its experts become an ``ElasticExperts`` with those of this rank. So what a
model makes of the gate's logits (an auxiliary loss) stays as it was.

**Fused experts** are rows of two tensors, as in transformers 5: Mixtral, Qwen2-MoE, Qwen3-MoE,
OLMoE, DeepSeek, GLM-4 and others. Such a module is recognised by its form, not by its class:
``gate_up_proj [E, 2F, H]``, ``down_proj [E, H, F]``, an activation, and a call with ``(tokens,
experts, weights)``, like that of ``ElasticExperts``. Four rows are computed to test that an expert is
``down(act(gate) * up)``: modules of the same form may clamp, scale, or interleave gate and up.
Nothing of transformers is imported. Blocks of other classes are described by ``HandWritten``.

All checks are made on all ranks before anything is changed; experts are copied out of the fused
tensors one layer at a time.

**The full state dict** has the names of the original model: experts are rows of its tensors
(``...experts.gate_up_proj``) or modules of its list (``...experts.3.w1.weight``). So
``model.save_pretrained(folder, state_dict=full)`` can save it, and the original model can load it.

Shapes: ``L`` blocks, ``R`` ranks, ``E`` experts of a block, ``H`` width of tokens, ``F`` width inside.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.nn import functional

from ckptd.client.elastic.layer.elastic_layer import ElasticExperts, common_device
from ckptd.client.elastic.layer.expert_tensors import expert_tensors_of, rounds_by_dtype
from ckptd.client.elastic.layer.layer_check import check_replicas_RE, shapes_of
from ckptd.client.elastic.layer.token_routing import all_to_all
from ckptd.client.ranks.collectives import Collectives


@dataclass(frozen=True, slots=True)
class HandWritten:
    """The form of the blocks of one class.

    Args:
        experts: the attribute of the block with its experts; becomes the ``ElasticExperts``.
        take: ``(value of that attribute, expert) -> module``, which maps ``[n, H]`` to ``[n, H]``
            and shares no parameter with the others; default: ``experts[expert]``, as of a
            ``ModuleList``.
        forward: ``(block, *arguments) -> output``, replaces the block's own: calls the attribute
            with ``(tokens [T, H], experts [T, K], weights [T, K])``. Not needed if the block
            already calls it so.
    """

    experts: str = "experts"
    take: Callable[[Any, int], nn.Module] | None = None
    forward: Callable[..., Any] | None = None


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of the model; ``how`` is None if its experts are fused."""

    name: str
    block: nn.Module
    attribute: str
    how: HandWritten | None

    @property
    def path(self) -> str:
        """Of its experts."""
        return f"{self.name}.{self.attribute}" if self.name else self.attribute

    @property
    def container(self) -> Any:
        return getattr(self.block, self.attribute)

    def take(self, expert: int) -> nn.Module:
        if self.how is None:
            return FusedExpert(self.container, expert)
        module = self.how.take(self.container, expert) if self.how.take else self.container[expert]
        if not isinstance(module, nn.Module):
            raise TypeError(f"expert {expert} of {self.path!r} is a {type(module).__name__}, not a module")
        return module

    def install(self, layer: ElasticExperts) -> None:
        if self.how is None:
            for module in layer.held_experts().values():
                assert isinstance(module, FusedExpert), "taken as such"
                module.own_rows()
            layer.fused = True
        setattr(self.block, self.attribute, layer)
        if self.how is not None and self.how.forward is not None:
            self.block.forward = MethodType(self.how.forward, self.block)
        layer.train(self.block.training)


def replace_moe_blocks(
    model: nn.Module,
    replicas_LRE: Sequence[ArrayLike] | NDArray[Any],
    *,
    group: Any = None,
    nodes: ArrayLike | None = None,
    reduce: Literal["mean", "sum"] = "mean",
    blocks: Mapping[type[Any], HandWritten] | None = None,
) -> dict[str, ElasticExperts]:
    """Replace the experts of every mixture block by an ``ElasticExperts``; a collective call.

    The model has all of its weights, the same on all ranks, and no optimizer, DDP or shards yet.
    Afterwards a rank has the parameters of its own experts only.

    Args:
        replicas_LRE: the placement of each block, in the order of ``model.named_modules()``: the
            result of ``split_over_ranks``.
        group: as for ``ElasticExperts``.
        nodes: as for ``ElasticExperts``.
        reduce: as for ``ElasticExperts``.
        blocks: the form of blocks of other classes.
    Returns:
        The layers by the name of the replaced module, such as ``model.layers.0.mlp.experts``.
    Raises:
        ValueError: on all ranks and before the model is changed: it has no known block, or a block
            of unknown form; the placement does not fit; ranks have different models or weights.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("no process group: call init_process_group() before replace_moe_blocks")
    found: list[_Block] = []
    experts: list[dict[int, nn.Module]] = []

    def say() -> bytes:
        found.extend(_find(model, blocks or {}))
        placements = _placements(found, replicas_LRE, group)
        rank = dist.get_rank(group)
        for block, replicas_RE in zip(found, placements, strict=True):
            held = np.nonzero(replicas_RE[rank])[0].tolist()
            experts.append({expert: block.take(expert) for expert in held})
        described = [f"{one.path} {type(one.block).__name__}" for one in found]
        return "\n".join([*described, *(repr(each.tolist()) for each in placements)]).encode()

    Collectives.of_group(group).check(
        say,
        bytes,
        what="the mixture blocks were not replaced",
        unlike="another model or placement than rank 0",
    )
    layers = [
        ElasticExperts(held, replicas_RE, group=group, nodes=nodes, reduce=reduce)
        for held, replicas_RE in zip(experts, replicas_LRE, strict=True)
    ]
    experts.clear()
    for block, layer in zip(found, layers, strict=True):
        block.install(layer)
    return {block.path: layer for block, layer in zip(found, layers, strict=True)}


def elastic_layers(model: nn.Module) -> dict[str, ElasticExperts]:
    """The elastic layers of a model by name, in its order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, ElasticExperts)}


# -- the blocks of a model ---------------------------------------------------------------------------


def _find(model: nn.Module, known: Mapping[type[Any], HandWritten]) -> list[_Block]:
    if there := elastic_layers(model):
        raise ValueError(f"{next(iter(there))!r} is elastic already")
    found: list[_Block] = []
    for name, module in model.named_modules():
        how = next((known[kind] for kind in type(module).__mro__ if kind in known), None)
        if how is not None:
            if not hasattr(module, how.experts):
                raise ValueError(
                    f"{name!r} ({type(module).__name__}) has no attribute {how.experts!r}: tell "
                    "where its experts are in HandWritten(experts=)"
                )
            found.append(_Block(name, module, how.experts, how))
    paths = [one.path for one in found]
    for name, module in model.named_modules():
        if not any(name == path or name.startswith(path + ".") for path in paths):
            found += _fused_block(model, name, module)
    if not found:
        raise ValueError(
            f"no mixture block was found in {type(model).__name__}: pass "
            f"blocks={{class: HandWritten(...)}} that tells how its blocks are made"
        )
    order = {name: place for place, (name, _) in enumerate(model.named_modules())}
    return sorted(found, key=lambda one: order[one.name])


def _fused_block(model: nn.Module, name: str, module: nn.Module) -> list[_Block]:
    """The block whose fused experts this module is, if any."""
    leaf = name.rpartition(".")[2]
    if _has_fused_names(module) and name:
        if problem := _fused_problem(module):
            raise _unknown(name, module, problem)
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            raise ValueError(
                f"{name!r} has hooks, which would be lost: replace the blocks before anything "
                "hooks them (a Checkpointer does)"
            )
        parent = name.rpartition(".")[0]
        return [_Block(parent, model.get_submodule(parent), leaf, None)]
    near = [part.lower() for part in name.split(".")[-2:]]
    if any("expert" in part and "shared" not in part for part in near) and _looks_like_experts(module):
        raise _unknown(name, module, "its form is not one that is known")
    return []


def _looks_like_experts(module: nn.Module) -> bool:
    """Several modules of one form, or tensors of three dimensions; a shared expert is neither."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        forms = [shapes_of(child) for child in module.children()]
        return len(forms) > 1 and bool(forms[0]) and all(form == forms[0] for form in forms)
    return any(param.ndim == 3 for param in module.parameters(recurse=False))


def _unknown(name: str, module: nn.Module, problem: str) -> ValueError:
    return ValueError(
        f"{name!r} ({type(module).__name__}) cannot be made elastic by itself: {problem}. "
        "Pass blocks={class of the block around it: HandWritten(...)} that tells how one expert is "
        "taken and called"
    )


def _placements(
    found: Sequence[_Block], replicas_LRE: Sequence[ArrayLike] | NDArray[Any], group: Any
) -> list[NDArray[np.int64]]:
    if len(replicas_LRE) != len(found):
        raise ValueError(
            f"replicas_LRE places {len(replicas_LRE)} layers, and the model has {len(found)} "
            f"mixture blocks, from {found[0].path!r} on"
        )
    placements = []
    for block, each in zip(found, replicas_LRE, strict=True):
        replicas_RE = check_replicas_RE(each, dist.get_world_size(group))
        count = _num_experts(block)
        if count is not None and count != replicas_RE.shape[1]:
            raise ValueError(
                f"the placement of {block.path!r} is of {replicas_RE.shape[1]} experts, and it has {count}"
            )
        placements.append(replicas_RE)
    return placements


def _num_experts(block: _Block) -> int | None:
    if block.how is None:
        return int(block.container.down_proj.shape[0])
    return len(block.container) if isinstance(block.container, nn.ModuleList) else None


# -- fused experts -----------------------------------------------------------------------------------

_NAMES = ("gate_up_proj", "down_proj")
_ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]
_ROWS = 4
# Tolerance between two ways to compute the same few products, in units of the dtype's rounding and
# relative to the largest output.
_ROUNDINGS = 64


class FusedExpert(nn.Module):
    """One of the fused experts of a module; its parameters are views of rows until ``own_rows``."""

    def __init__(self, experts: nn.Module, number: int) -> None:
        super().__init__()
        for name in _NAMES:
            whole = experts.get_parameter(name)
            row = nn.Parameter(whole.detach()[number], requires_grad=whole.requires_grad)
            self.register_parameter(name, row)
        self.act_fn: Any = experts.act_fn

    def forward(self, rows: Tensor) -> Tensor:
        """``[n, H]`` of ``[n, H]``."""
        gate, up = functional.linear(rows, self.get_parameter("gate_up_proj")).chunk(2, dim=-1)
        return functional.linear(self.act_fn(gate) * up, self.get_parameter("down_proj"))

    def own_rows(self) -> None:
        """Copy the rows, so that the module with all experts can be freed."""
        for param in self.parameters():
            param.data = param.data.clone()


def _has_fused_names(module: nn.Module) -> bool:
    return all(name in module._parameters for name in _NAMES)


def _fused_problem(module: nn.Module) -> str:
    """The reason why a module with the names of fused experts is not usable; empty if it is."""
    more = [n for n, _ in module.named_parameters() if n not in _NAMES]
    more += [n for n, _ in module.named_buffers()]
    if more:
        return f"it also has {', '.join(more[:3])}"
    if getattr(module, "_is_expert_parallel", False):
        return "it is spread over ranks already (expert parallelism)"
    gate_up, down = (module.get_parameter(name) for name in _NAMES)
    for name, param in zip(_NAMES, (gate_up, down), strict=True):
        if type(param) is not nn.Parameter:
            return f"{name} is a {type(param).__name__}: replace the blocks before parameters are sharded"
        if not param.is_floating_point() or param.ndim != 3:
            return f"{name} is {param.dtype} {list(param.shape)}, not floating point [E, ., .]"
    if gate_up.shape != (down.shape[0], 2 * down.shape[2], down.shape[1]):
        return (
            f"gate_up_proj {list(gate_up.shape)} and down_proj {list(down.shape)} are not [E, "
            "2F, H] and [E, H, F]"
        )
    arguments = list(inspect.signature(module.forward).parameters)
    if arguments != _ARGUMENTS:
        return f"it is called with ({', '.join(arguments)}), not ({', '.join(_ARGUMENTS)})"
    if not callable(getattr(module, "act_fn", None)):
        return "it has no act_fn"
    return "" if gate_up.is_meta else _other_result(module, gate_up)


@torch.no_grad()
def _other_result(module: nn.Module, gate_up: Tensor) -> str:
    """The difference of the first and last expert from ``FusedExpert``; empty if they compute the same."""
    count, width = gate_up.shape[0], gate_up.shape[2]
    # Some of each sign and size; no random generator is touched.
    grid = torch.linspace(-3, 3, _ROWS * width, dtype=torch.float64).sin() * 2
    rows = grid.view(_ROWS, width).to(gate_up)
    for number in sorted({0, count - 1}):
        experts = torch.full((_ROWS, 1), number, dtype=torch.int64, device=rows.device)
        try:
            wanted = module(rows, experts, rows.new_ones(_ROWS, 1))
        except Exception as error:  # noqa: BLE001
            # Not our code: whatever it raises, no comparison is possible.
            return f"it raised {type(error).__name__} when it was tried: {error}"
        found = FusedExpert(module, number)(rows)
        tolerance = _ROUNDINGS * torch.finfo(rows.dtype).eps * float(wanted.abs().max())
        if found.shape != wanted.shape or not bool(((found - wanted).abs() <= tolerance).all()):
            return f"its expert {number} computes something else than down(act(gate) * up)"
    return ""


# -- the full state dict -----------------------------------------------------------------------------

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
