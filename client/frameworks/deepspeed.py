"""Integration with DeepSpeed: ``ckpt = checkpointer(engine, ...)`` in your own training loop.

DeepSpeed's ZeRO optimizer (stages 1 and 2) is not a torch optimizer: it is around one, which updates this
data-parallel rank's parts of flat fp32 copies of the parameters. ckptd captures what the torch optimizer
updates, the model's weights, and the engine's counters. The integrations with Accelerate and with
transformers' ``Trainer`` pass their engine to `of_engine`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Unpack

import torch
import torch.distributed as dist

try:
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from deepspeed.utils import groups as deepspeed_groups
except ImportError as missing:
    raise ModuleNotFoundError(
        f"ckptd.client.frameworks.deepspeed needs deepspeed ({missing}): pip install deepspeed"
    ) from missing

from ckptd.client.capture.step_state import HoldsGradients, Stateful
from ckptd.client.checkpointer import Checkpointer
from ckptd.client.frameworks.step_driver import whole_state
from ckptd.client.options import (
    CheckpointerOptions,
    LayoutOptions,
    OptionGroups,
    SnapshotOptions,
    check_keywords,
)

_LARGEST_STAGE = 2
# Of an engine's configuration: what then computes steps, or holds state, in places that hooks cannot see.
_REFUSED = {
    "zero_cpu_offload": "offload_optimizer keeps state in host memory that DeepSpeed updates itself",
    "zero_offload_param": "offload_param moves weights to host memory or disks",
    "random_ltd_enabled": "random_ltd draws which tokens it leaves out",
}
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
# Of a loss scaler: everything that its update_scale() changes.
_OF_A_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def checkpointer(
    engine: DeepSpeedEngine,
    state: Mapping[str, Stateful] | None = None,
    **options: Unpack[OptionGroups],
) -> Checkpointer:
    """Create a ``Checkpointer`` for what ``deepspeed.initialize`` returned; loop over its ``steps``.

    An iteration of ``steps`` has all micro-batches of an update (``gradient_accumulation_steps`` calls of
    ``engine.backward`` and ``engine.step``), or one of them: in between no snapshot is taken. The
    learning-rate scheduler, the loss scaler and the engine's counters are captured, too. What data-parallel
    ranks hold alike is captured by one of them. With ZeRO each snapshot is dense, since a rank's part of the
    flat parameters belongs to no operator.

    Args:
        engine: with ZeRO stage 0, 1 or 2, before its first step.
        state: your own objects. Pass the data loader to ``ckpt.batches``.
        options: ``run=``, ``daemon=``, ``snapshots=``, ``recovery=`` and ``layout=``, as for
            ``Checkpointer``.
    Raises:
        TypeError: a keyword is not one of ``Checkpointer``, or a group has another type.
        ValueError: the engine's configuration prevents an exact resumption; the message says what to do.
    """
    check_keywords("checkpointer()", options)
    return of_engine(engine, {}, state or {}, CheckpointerOptions.of(options))


def of_engine(
    engine: Any,
    own: Mapping[str, Stateful],
    given: Mapping[str, Stateful],
    groups: CheckpointerOptions,
) -> Checkpointer:
    """The `checkpointer` of an engine, also of one that another library made.

    Args:
        own: what the integration captures itself.
        given: the user's objects.
    Raises:
        ValueError: see `checkpointer`.
    """
    inner = check_engine(engine)
    told, ranks = groups.run.world_size, dist.get_world_size()
    if told not in (None, ranks):
        raise ValueError(
            f"this run is of world_size={told}, and DeepSpeed trains with {ranks} ranks: leave out "
            "RunOptions(world_size=), or name Accelerate's backend where it finds none, as on a CPU: "
            "InitProcessGroupKwargs(backend='gloo'), or PartialState(backend='gloo') before the arguments "
            "of a Trainer"
        )
    of_deepspeed: dict[str, Stateful] = {"deepspeed": _EngineState(engine)}
    if engine.lr_scheduler is not None:
        of_deepspeed["deepspeed_scheduler"] = engine.lr_scheduler
    chosen = replace(groups, layout=_layout(groups.layout, engine))
    if engine.zero_optimization():
        # The torch optimizer is stepped once for each of its groups, and sees only that one in its step.
        chosen = replace(
            chosen,
            recovery=replace(chosen.recovery, rehearse=False),
            snapshots=_dense(chosen.snapshots),
        )
    whole = whole_state({**own, **of_deepspeed}, given)
    return Checkpointer(engine.module, inner, whole, **chosen.keywords())


def check_engine(engine: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside, if it and the model are all that the next step depends on.

    Raises:
        ValueError: there is more; the message says what, and what to do.
    """
    if not isinstance(engine, DeepSpeedEngine):
        raise ValueError(  # noqa: TRY004 - one kind of error for all that users pass
            f"engine= is a {type(engine).__name__}: pass what deepspeed.initialize returned first"
        )
    if isinstance(engine, PipelineEngine):
        raise ValueError(  # noqa: TRY004 - as above
            "ckptd cannot capture DeepSpeed's pipeline engine, whose train_batch() runs all of a step: use "
            "torch.distributed.pipelining with ckptd.client.Checkpointer"
        )
    stage = engine.zero_optimization_stage()
    if stage > _LARGEST_STAGE:
        raise ValueError(
            f"ckptd cannot capture ZeRO stage {stage}, which keeps weights in parts that hooks cannot see: "
            "use stage 1 or 2, or torch's FSDP2 with ckptd.client.Checkpointer"
        )
    for setting, why in _REFUSED.items():
        if getattr(engine, setting, bool)():
            raise ValueError(f"ckptd cannot capture this configuration of DeepSpeed: {why}; turn it off")
    if engine.dp_world_size != dist.get_world_size():
        raise ValueError(
            f"{dist.get_world_size()} ranks, of which {engine.dp_world_size} are data-parallel: ckptd "
            "captures DeepSpeed without tensor, sequence and pipeline parallelism only"
        )
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    if not isinstance(inner, torch.optim.Optimizer):
        raise ValueError(  # noqa: TRY004 - as above
            f"ckptd cannot capture {type(engine.optimizer).__name__}, which is around no torch optimizer"
        )
    return inner


def _dense(given: SnapshotOptions) -> SnapshotOptions:
    """With several updates in a step, and parts of flat parameters, every snapshot has everything."""
    if given.policy in ("partial", "selected") or given.window not in (None, 1):
        raise ValueError(
            "with ZeRO each snapshot is dense, since a rank's part of the flat parameters belongs to no "
            "operator: leave out policy= and window= of SnapshotOptions"
        )
    return given if given.policy == "dense" else replace(given, window=1)


def _layout(given: LayoutOptions, engine: Any) -> LayoutOptions:
    layout = given
    if layout.replicated is None:
        layout = replace(layout, replicated=dict(_replicated(engine)) or None)
    if layout.masters is None:
        # By value, a part that happens to be a whole parameter would be taken for its fp32 weights, on one
        # rank alone.
        layout = replace(layout, masters=dict(_masters(engine)))
    return layout


def _replicated(engine: Any) -> Iterator[tuple[str, dist.ProcessGroup]]:
    """Parameters that several ranks hold, with the group of these ranks."""
    for name, param in engine.module.named_parameters():
        # DeepSpeed marks parameters of experts so: their gradients are reduced among fewer ranks.
        if getattr(param, "allreduce", True):
            group = engine.data_parallel_group
        else:
            group = deepspeed_groups._get_expert_data_parallel_group(param.group_name)
        if dist.get_world_size(group) > 1:
            yield name, group


def _masters(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """fp32 weights of whole parameters, which the optimizer without ZeRO has. ZeRO has parts of flat ones."""
    names = {id(param): name for name, param in engine.module.named_parameters()}
    of_model = getattr(engine.optimizer, "fp16_groups", ())
    copies = getattr(engine.optimizer, "fp32_groups", ())
    for params, mains in zip(of_model, copies, strict=False):
        for param, main in zip(params, mains, strict=True):
            yield names[id(param)], main


class _EngineState(HoldsGradients):
    """The engine's counters, and its loss scaler."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    @property
    def gradients_wait(self) -> bool:
        """ZeRO keeps the gradients of the micro-batches before the last one of an update."""
        engine = self._engine
        last = engine._is_gradient_accumulation_boundary
        if last is not None:
            # Accelerate sets this before each backward, and calls engine.step() only where it is True: so
            # micro_steps counts updates.
            return not last
        return bool(engine.micro_steps % engine.gradient_accumulation_steps())

    def state_dict(self) -> dict[str, Any]:
        found = {name: getattr(self._engine, name) for name in _COUNTERS}
        found["boundary"] = self._engine._is_gradient_accumulation_boundary
        scaler = self._scaler()
        return {**found, "scaler": {n: getattr(scaler, n) for n in _OF_A_SCALER if hasattr(scaler, n)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in _COUNTERS:
            setattr(self._engine, name, state[name])
        if state["boundary"] is not None:
            self._engine.set_gradient_accumulation_boundary(state["boundary"])
        scaler = self._scaler()
        for name, value in state["scaler"].items():
            setattr(scaler, name, value)

    def _scaler(self) -> Any:
        """Of ZeRO an object; the optimizer without ZeRO may have it, or be it."""
        return getattr(self._engine.optimizer, "loss_scaler", self._engine.optimizer)
