"""What a `Checkpointer` protects: checks its arguments before any daemon is asked."""

from __future__ import annotations

import itertools
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ckptd.client import values
from ckptd.client.capture.ddp_buckets import hook_states
from ckptd.client.capture.object_attributes import ATTRIBUTES, ObjectAttributes, of_modules
from ckptd.client.capture.step_state import Stateful
from ckptd.client.capture.whole_objects import WholeObject, why_not_whole
from ckptd.client.data import BatchLedger
from ckptd.client.data.ledger import BATCHES
from ckptd.client.data.loaders import advice_for_state, check_in_state
from ckptd.client.identity import Identity, identify
from ckptd.client.log_lines import get_logger
from ckptd.client.model.buffer_shapes import BUFFERS, ChangedBuffers
from ckptd.client.model.freezing import choose_freezing
from ckptd.client.model.live_state import LiveState, local
from ckptd.client.model.module_flags import FLAGS, ModuleFlags
from ckptd.client.model.operators import Operator, ParameterRows, discover_operators
from ckptd.client.model.replicated_params import NOTHING_SHARED, ReplicatedParams, find_replicas
from ckptd.client.model.waiting_gradients import GRADIENTS, WaitingGradients
from ckptd.client.optimizers.optimizer_probe import unwrap_optimizer
from ckptd.client.options import CheckpointerOptions
from ckptd.client.ranks.collectives import Collectives
from ckptd.client.schedule.partial_schedule import check_experts
from ckptd.core.snapshot_policy import OperatorKind

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TrainingState:
    """A model, its optimizers and the user's objects on this rank of the job.

    Attributes:
        freezing: the mechanism that freezes operators in a replay, and the reason.
        sharing: replicated parameters. Derived from structure, so equal on all ranks.
    """

    binding: LiveState
    stateful: Mapping[str, Stateful]
    identity: Identity
    freezing: tuple[str, str]
    operators: list[Operator]
    sharing: ReplicatedParams

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        params = self.binding.params.values()
        return next((local(p).device for p in params), torch.device("cpu"))

    def begin_as(self, before: TrainingState) -> None:
        """This process begins once more: what counts as the start is what counted before."""
        self.binding.buffer_specs.clear()
        self.binding.buffer_specs.update(before.binding.buffer_specs)
        for name, item in self.stateful.items():
            if isinstance(item, ModuleFlags | WholeObject):
                item.begin_as(before.stateful[name])  # type: ignore[arg-type] # of the same kind


def examine(
    model: nn.Module,
    optimizer: Any,
    state: Mapping[str, Stateful] | None,
    options: CheckpointerOptions,
    ledger: BatchLedger | None = None,
) -> TrainingState:
    """Check the arguments of `Checkpointer`.

    Args:
        ledger: the loop's batches; captured with the user's objects.
    Raises:
        ValueError: an argument is unusable; the message says which and what to do.
    """
    layout, run = options.layout, options.run
    _check_model(model)
    stateful = check_state(state, whole=True)
    hooks = _states_of_hooks(model, state or {})
    stateful |= hooks
    whole = [item for item in stateful.values() if isinstance(item, WholeObject)]
    if ledger is not None:
        stateful[BATCHES] = ledger
    if layout.attributes:
        modules = {name: item for name, item in stateful.items() if isinstance(item, nn.Module)}
        stateful[ATTRIBUTES] = of_modules(model, modules)
    else:  # nor those of trainers and callbacks
        stateful = {name: item for name, item in stateful.items() if not isinstance(item, ObjectAttributes)}
    listed = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    _check_optimizers(listed)
    binding = LiveState(model, [unwrap_optimizer(o) for o in listed], layout.masters, listed)
    check_sharded(binding)
    _note_model_without_parameters(model, len(binding.params))
    stateful[BUFFERS] = ChangedBuffers(binding)
    stateful[GRADIENTS] = WaitingGradients(binding)
    if layout.attributes:
        stateful[FLAGS] = ModuleFlags(binding)
    for item in whole:
        try:
            item.know(binding, [*stateful.values(), *(other.value for other in whole)])
        except values.UnsupportedValue:
            if item not in hooks.values():
                raise
            # Nobody has asked for it; `Buckets` says that it is not captured.
            stateful = {name: other for name, other in stateful.items() if other is not item}
    if options.snapshots.of_experts is not None and options.recovery.park:
        raise ValueError(
            f"park=True and policy={options.snapshots.policy!r}: ranks that are parked go on only where the "
            "others are replayed, and partial snapshots are not replayed; pass one of them"
        )
    if not options.snapshots.dense and (reasons := binding.dependent()):
        raise ValueError(
            "sparse snapshots need an optimizer that updates each parameter independently: "
            f"{'; '.join(reasons)}. "
            "Pass snapshots=SnapshotOptions(policy='dense') to capture everything in every snapshot"
        )
    snapshots = options.snapshots
    of_experts = snapshots.of_experts
    lossy = snapshots.asked if of_experts is not None else ""
    if of_experts is not None and of_experts.persist_experts is not None:
        lossy += f" (persist_experts={of_experts.persist_experts})"
    identity = agreed_identity(identify(run.job, run.name, run.rank, run.world_size), lossy)
    freezing = choose_freezing(
        model,
        masters=bool(binding.masters),
        wanted=options.recovery.freeze,
        world_size=identity.world_size,
        spread=bool(binding.elsewhere),
    )
    operators = discover_operators(model, rows_allowed=binding.rows_allowed, grouping=layout.operators)
    check_experts(operators, options.snapshots)
    # One operator for each parameter that only an optimizer knows.
    operators += [
        Operator(n, OperatorKind.DENSE, (ParameterRows(n),), layer="extra")
        for n in binding.params
        if n.startswith("extra/")
    ]
    sharing = ReplicatedParams()
    if identity.world_size > 1 and _has_process_group() and dist.get_world_size() > 1:
        sharing = ReplicatedParams(find_replicas(binding, layout.replicated, identity.rank))
    return TrainingState(binding, stateful, identity, freezing, operators, sharing)


def _states_of_hooks(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Stateful]:
    """What communication hooks of DDP keep, unless it was passed."""
    passed = set(map(id, state.values()))
    return {
        name: kept if hasattr(kept, "state_dict") else WholeObject(name, kept)
        for name, kept in hook_states(model).items()
        if id(kept) not in passed and (hasattr(kept, "state_dict") or not why_not_whole(name, kept))
    }


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        parts = " (several models: nn.ModuleList([...]))" if isinstance(model, list | tuple) else ""
        raise ValueError(  # noqa: TRY004 - one kind of error for all values
            f"model is of type {type(model).__name__}, not a torch.nn.Module: pass "
            f"Checkpointer(model, optimizer){parts}"
        )
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    meta = [name for name, tensor in tensors if tensor.device.type == "meta"]
    if meta:
        raise ValueError(
            f"{len(meta)} parameters and buffers of the model are on the meta device ({meta[0]!r}): give "
            "them memory before the Checkpointer is created: model.to_empty(device=...), then initial values"
        )


def _note_model_without_parameters(model: nn.Module, count: int) -> None:
    """No error: tensors may be trained that no module has. More often the wrong module was passed."""
    if count and next(model.parameters(), None) is None:
        logger.warning(
            "the model (%s) has no parameters: snapshots hold the %d tensors of the optimizers, but no "
            "buffers and attributes of the module that has these tensors. Pass that module: "
            "Checkpointer(model, optimizer)",
            type(model).__name__,
            count,
        )


def _check_optimizers(optimizers: Sequence[Any]) -> None:
    if not optimizers:
        raise ValueError("the list of optimizers is empty: pass all optimizers that update the model")
    for optimizer in optimizers:
        if type(optimizer).__module__.startswith("megatron.") and not isinstance(optimizer, Optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} of Megatron-Core is around torch optimizers: create the "
                "Checkpointer by ckptd.client.frameworks.megatron.checkpointer(model, optimizer, ...)"
            )


def _has_process_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def agreed_identity(mine: Identity, lossy: str = "") -> Identity:
    """This rank with the names of rank 0: a script may lie in another place on another node.

    A collective call if there are several ranks.

    Args:
        lossy: the policy of partial snapshots, which all ranks take or none: no replay leads through them.
    Raises:
        ValueError: ranks were passed different names, or such policies; on every rank.
        DaemonUnavailable: a rank did not come.
    """
    # The first collective call reports a process group that several ranks lack.
    if mine.world_size == 1 or not _has_process_group() or dist.get_world_size() != mine.world_size:
        return mine
    # Under one name whatever the ranks are called, so that all come to the same barrier.
    ranks = Collectives.of_job(replace(mine, job="ckptd", run="names"), node=platform.node())
    found = ranks.gather((mine.job, mine.run, mine.origin, lossy), tuple[str, str, str, str])
    job, run, how, policy = found[0]
    for rank, (other_job, other_run, other_how, other_policy) in enumerate(found):
        if other_policy != policy:
            raise ValueError(
                f"rank 0 takes {policy or 'exact'} snapshots, and rank {rank} {other_policy or 'exact'} "
                "ones: pass all ranks the same policy= and partial="
            )
        if (other_job, other_run) != (job, run) and not other_how:
            raise ValueError(
                f"rank 0 is of job {job}, run {run}, and rank {rank} of job {other_job}, run "
                f"{other_run}: pass all ranks the same "
                "run=RunOptions(name=..., job=...), or world_size=1 in it for independent trainers"
            )
    return replace(mine, job=job, run=run, origin=how)


def check_state(state: Mapping[str, Any] | None, *, whole: bool = False) -> dict[str, Stateful]:
    """Check that everything in ``state=`` can be captured, now rather than at the first snapshot.

    Args:
        whole: capture objects without ``state_dict`` as a whole.
    """
    if state is not None and not isinstance(state, Mapping):
        raise ValueError(
            f"state= is a {type(state).__name__}; pass a dict of named objects, such as {{'sched': sched}}"
        )
    found = dict(state or {})
    for name, item in found.items():
        if whole and not hasattr(item, "state_dict") and not advice_for_state(item):
            if advice := why_not_whole(name, item):
                raise ValueError(f"state[{name!r}] is a {type(item).__name__} without state_dict(): {advice}")
            found[name] = WholeObject(name, item)
            continue
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(item, method, None)):
                advice = advice_for_state(item) or "pass objects with state_dict() and load_state_dict()"
                raise ValueError(  # noqa: TRY004 - one kind of error for all that users pass
                    f"state[{name!r}] is a {type(item).__name__} without {method}(): {advice}"
                )
        check_in_state(item)
        values.pack(item.state_dict(), f"state[{name!r}]")
    return found


# -- sharded and replicated parameters, as wrappers and DTensors say; never guessed from values -----


def placement_lines(binding: LiveState, given: ReplicatedParams = NOTHING_SHARED) -> list[str]:
    """Lines for ``describe()``: the number of parameters by placement, with one name each.

    Args:
        given: what ranks hold alike, those of ``LayoutOptions.replicated`` included.
    """
    replicated = dict(_replicated(binding.model))
    for name, over in given.replicas.items():
        how = f"replicated over {len(over.ranks)} ranks (LayoutOptions.replicated)"
        replicated.setdefault(id(binding.params[name]), how)
    groups: dict[str, list[str]] = {}
    for name, param in binding.params.items():
        default = "without a wrapper: each rank keeps its own"
        how = _of_dtensor(param) or replicated.get(id(param), default)
        groups.setdefault(how, []).append(name)
    lines = [f"parameters {how}: {len(names)} ({names[0]})" for how, names in groups.items()]
    for names, what in (
        (binding.elsewhere, "updated on another rank, which keeps their optimizer state"),
        (binding.inseparable, "anchored in every snapshot, because their update communicates"),
    ):
        if names:
            lines.append(f"{what}: {len(names)} ({min(names)})")
    return lines


def check_sharded(binding: LiveState) -> None:
    """Check that the model's FSDP2 parameters are the shards that the optimizer updates.

    Raises:
        ValueError: some are gathered now.
    """
    alone = [p for n, p in binding.params.items() if n.startswith("extra/") and hasattr(p, "to_local")]
    if alone and any(_is_fsdp(module) for module in binding.model.modules()):
        raise ValueError(
            f"{len(alone)} shards that the optimizer updates are not in the model: its parameters are "
            "gathered (a forward without backward leaves them so), or were not sharded yet when the "
            "optimizer got them; call reshard() on the FSDP modules before Checkpointer, and make the "
            "optimizer after fully_shard()"
        )


def _is_fsdp(module: nn.Module) -> bool:
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def _of_dtensor(param: Any) -> str:
    """Text such as ``sharded along 0 over 2 ranks (dp)``; empty if it is no DTensor."""
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
