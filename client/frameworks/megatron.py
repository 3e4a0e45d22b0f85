"""Integration with Megatron-Core: ``ckpt = checkpointer(model, optimizer, ...)`` in your own training loop.

A Megatron optimizer is not a torch optimizer: it is around one, which updates the model's parameters, fp32
copies of them, or this data-parallel rank's ranges of their flat buffers (the distributed optimizer). ckptd
captures what the torch optimizer updates, and the model's weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import nn

try:
    from megatron.core import parallel_state
    from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
except ImportError as missing:
    raise ModuleNotFoundError(
        f"ckptd.client.frameworks.megatron needs megatron-core ({missing}): pip install 'ckptd[megatron]'"
    ) from missing

from ckptd.client.capture.step_state import Stateful
from ckptd.client.checkpointer import Checkpointer
from ckptd.client.frameworks.step_driver import whole_state
from ckptd.client.options import CheckpointerOptions, LayoutOptions, OptionGroups, check_keywords

# Settings of OptimizerConfig with which the torch optimizer does not hold all that the next step depends on.
_REFUSED = {
    "use_precision_aware_optimizer": "the main weights lie inside of the fused optimizer",
    "optimizer_cpu_offload": "updates run on copies in host memory that hooks cannot see",
}


def checkpointer(
    model: nn.Module | Sequence[nn.Module],
    optimizer: MegatronOptimizer,
    state: Mapping[str, Stateful] | None = None,
    **options: Unpack[OptionGroups],
) -> Checkpointer:
    """Create a ``Checkpointer`` for what ``get_megatron_optimizer`` returned; loop over its ``steps``.

    The random states of tensor-parallel regions and the loss scalers are captured, too. Parameters that
    data-parallel ranks hold alike (of experts, expert-data-parallel ranks) are captured by one of them.

    Args:
        model: the module in Megatron's ``DistributedDataParallel``, or the list of the model's chunks.
        optimizer: what ``get_megatron_optimizer`` returned for this model.
        state: the ``OptimizerParamScheduler``, and your own objects. Pass the data loader to
            ``ckpt.batches``.
        options: ``run=``, ``daemon=``, ``snapshots=``, ``recovery=`` and ``layout=``, as for
            ``Checkpointer``.
    Raises:
        TypeError: a keyword is not one of ``Checkpointer``, or a group has another type.
        ValueError: an object prevents an exact resumption; the message says what to do.
    """
    check_keywords("checkpointer()", options)
    groups = CheckpointerOptions.of(options)
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    net = chunks[0] if len(chunks) == 1 else nn.ModuleList(chunks)
    parts = list(_parts(optimizer))
    optimizers = [_torch_optimizer(part) for part in parts]
    if not optimizers:
        raise ValueError("optimizer= updates no parameter of this rank, so ckptd has nothing to capture here")
    own: dict[str, Stateful] = {"megatron_rng": _TrackedRandomStates()}
    for number, part in enumerate(parts):
        scaler = getattr(part, "grad_scaler", None)
        if scaler is not None:
            own[f"megatron_scaler.{number}"] = scaler
    chosen = replace(groups, layout=_layout(groups.layout, net, parts))
    return Checkpointer(net, optimizers, whole_state(own, state or {}), **chosen.keywords())


def _parts(optimizer: Any) -> Iterator[Any]:
    """The optimizers of a chain that update parameters of this rank."""
    if isinstance(optimizer, ChainedOptimizer):
        for part in optimizer.chained_optimizers:
            yield from _parts(part)
    elif not isinstance(optimizer, MegatronOptimizer):
        raise ValueError(  # noqa: TRY004 - one kind of error for all that users pass
            f"optimizer= is a {type(optimizer).__name__}: pass what get_megatron_optimizer returned, or a "
            "torch optimizer to ckptd.client.Checkpointer"
        )
    elif not getattr(optimizer, "is_stub_optimizer", False):
        yield optimizer


def _torch_optimizer(part: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside, if it and the model are all that the next step depends on."""
    for setting, why in _REFUSED.items():
        if getattr(part.config, setting, False):
            raise ValueError(f"ckptd cannot capture OptimizerConfig.{setting}: {why}; set it to False")
    if getattr(getattr(part, "ddp_config", None), "use_megatron_fsdp", False):
        raise ValueError(
            "ckptd cannot capture Megatron-FSDP, whose shards lie in buffers of its own: use the distributed "
            "optimizer (use_distributed_optimizer=True), or torch's FSDP2 with ckptd.client.Checkpointer"
        )
    inner = part.optimizer
    if not isinstance(inner, torch.optim.Optimizer):
        raise ValueError(  # noqa: TRY004 - as above
            f"ckptd cannot capture {type(part).__name__}: it is around a {type(inner).__name__}, which is no "
            "torch optimizer"
        )
    return inner


def _layout(given: LayoutOptions, model: nn.Module, parts: Sequence[Any]) -> LayoutOptions:
    layout = given
    if layout.replicated is None:
        layout = replace(layout, replicated=dict(_replicated(model)) or None)
    if layout.masters is None:
        # By value, a range of the distributed optimizer that happens to be a whole parameter would be taken
        # for its fp32 weights, on one rank alone.
        layout = replace(layout, masters=dict(_masters(model, parts)))
    return layout


def _replicated(model: nn.Module) -> Iterator[tuple[str, dist.ProcessGroup]]:
    """Parameters that several ranks hold, with the group of these ranks."""
    if not parallel_state.model_parallel_is_initialized():
        return
    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    experts = parallel_state.get_expert_data_parallel_group()
    for name, param in model.named_parameters():
        # Megatron marks parameters of experts so: their gradients are reduced among fewer ranks.
        group = dense if getattr(param, "allreduce", True) else experts
        if dist.get_world_size(group) > 1:
            yield name, group


def _masters(model: nn.Module, parts: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """fp32 weights of whole parameters. The distributed optimizer has ranges, which no parameter owns."""
    names = {id(param): name for name, param in model.named_parameters()}
    for part in parts:
        copies = getattr(part, "fp32_from_float16_groups", ())
        for params, mains in zip(getattr(part, "float16_groups", ()), copies, strict=True):
            for param, main in zip(params, mains, strict=True):
                yield names[id(param)], main


class _TrackedRandomStates:
    """The random states of tensor-parallel regions, by name."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        states = get_cuda_rng_tracker().get_states()
        return {
            name: state.get_state() if isinstance(state, torch.Generator) else state.clone()
            for name, state in states.items()
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        tracker = get_cuda_rng_tracker()
        states = tracker.get_states()
        for name, found in state.items():
            generator = states.get(name)
            if isinstance(generator, torch.Generator):  # CUDA graphs refer to it
                generator.set_state(found)
            else:
                states[name] = found.clone()
        tracker.set_states(states)
