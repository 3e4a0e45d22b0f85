"""The buckets in which ``DistributedDataParallel`` reduces gradients.

With three ranks or more they determine the bits: the order in which the ranks' values are added follows
from a gradient's place in its bucket. DDP first lays gradients out in the model's order, and after its
first iteration in the order in which they became ready. A resumed process would reduce its first
iteration with the first layout again. So the layout is recorded, and restored before the first replayed
step.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckptd.client.log_lines import get_logger
from ckptd.client.ranks.collectives import Collectives

logger = get_logger(__name__)

_OTHER_BUCKETS = (
    "DistributedDataParallel's gradient buckets are not those of the run so far; with three ranks or more "
    "the first replayed iteration may differ in its last bits, which replay would report"
)
# The indices of a wrapper's parameters, bucket by bucket.
Layout = list[list[int]]
# Reasons by the wrapper's path.
Failures = dict[str, str]

# The internals of torch that this module needs, by owner.
_OF_REDUCER = (
    "_rebuild_buckets",
    "prepare_for_backward",
    "_remove_autograd_hooks",
    "_set_static_graph",
)
_OF_WRAPPER = (
    "_build_params_for_reducer",
    "_build_debug_param_to_name_mapping",
    "_ddp_init_helper",
    "_get_ddp_logging_data",
    "_comm_hooks",
    "bucket_bytes_cap",
)
# The beginning of the names of what communication hooks keep, among the objects of `state=`.
OF_A_HOOK = "ckptd.hook/"
_OF_MODULE = ("_compute_bucket_assignment_by_size", "_register_comm_hook")


class _Able(msgspec.Struct, frozen=True):
    """What a rank can do with its wrapper. All ranks must use one way, because each way communicates.

    Attributes:
        obstacle: why the wrapper cannot get buckets at all; empty if it can.
        unnoticed: nobody else notices a backward pass with zero gradients.
        bound: why it cannot get a new reducer; empty if it can.
    """

    num_parameters: int = 0
    obstacle: str = ""
    unnoticed: bool = False
    bound: str = ""


class _RankFacts(msgspec.Struct, frozen=True):
    """What a rank knows, by the wrapper's path."""

    layouts: dict[str, Layout] = {}
    wrappers: dict[str, _Able] = {}


class _Plan(msgspec.Struct, frozen=True):
    """How a wrapper gets its buckets, equal on every rank of its process group.

    Attributes:
        backward: by a backward pass with zero gradients; otherwise by a new reducer.
    """

    layout: Layout
    ranks: list[int]
    backward: bool
    bound: str


class Buckets:
    """The buckets of every DDP wrapper around the model or within it."""

    def __init__(self, model: nn.Module, captured: Collection[object] = ()) -> None:
        self._wrappers = _wrappers_of(model)
        self._known: dict[str, Layout] = {}
        # Wrappers that will not be rebuilt any more.
        self._settled: set[str] = set()
        # Wrappers that are not in the snapshot.
        self._unrecorded: set[str] = set()
        _warn_of_hooks(self._wrappers, set(map(id, captured)))

    def layouts(self) -> dict[str, Layout]:
        """The layouts known by now, by the wrapper's path.

        DDP reports a layout an iteration or two after it has rebuilt its buckets, and never if it
        does not rebuild them (``find_unused_parameters``).
        """
        for path, wrapper in self._wrappers.items():
            if path not in self._settled and (layout := _rebuilt(wrapper)):
                self._known[path] = layout
                self._settled.add(path)
        return self._known

    def senders(self) -> list[str]:
        """The wrappers whose next forward begins with a broadcast of buffers.

        Not those whose last forward was in ``no_sync``. In a pipeline all are, except for what a new
        wrapper begins with; then buffers differ by replica.
        """
        return [p for p, wrapper in self._wrappers.items() if wrapper.require_forward_param_sync]

    def send_next(self, recorded: Collection[str]) -> None:
        """Let the next forward of these wrappers, and of no others, begin with that broadcast.

        A wrapper that the snapshot does not know (added, or renamed since) is left as it is.
        """
        strangers = sorted(set(recorded) - set(self._wrappers))
        for path, wrapper in self._wrappers.items():
            if path in recorded:
                wrapper.require_forward_param_sync = True
            elif strangers or path in self._unrecorded:
                logger.warning(
                    "the snapshot does not know the DistributedDataParallel wrapper %s (unmatched "
                    "in it: %s): it is left as it is. "
                    "Wrap the model as it was wrapped when the snapshot was taken",
                    _quoted(path),
                    ", ".join(map(_quoted, strangers)) or "none",
                )
            else:
                wrapper.require_forward_param_sync = False

    def put_back(self, recorded: Mapping[str, Layout], ranks: Collectives) -> None:
        """Let the wrappers reduce as when the snapshots were taken. A collective call.

        The layout of the first rank in a wrapper's process group counts, as in DDP's own rebuild. A
        wrapper that cannot get it stays as it is, on all ranks, with a warning.

        Raises:
            RuntimeError: on every rank; a rank's reducer stopped half-way and could not be replaced.
        """
        able = {path: _able(wrapper) for path, wrapper in self._wrappers.items()}
        everyone = ranks.gather(_RankFacts(dict(recorded), able), _RankFacts)
        if not any(facts.wrappers for facts in everyone):
            return
        plans = self._plans(everyone)
        failures = self._carry_out(plans, ranks)
        if not any(failures):
            return
        # After an unfinished backward pass a reducer cannot begin another one.
        again = {
            path: msgspec.structs.replace(plan, backward=False)
            for path, plan in plans.items()
            if plan.backward and _failed(failures, path, plan)
        }
        if any(self._carry_out(again, ranks)):
            raise RuntimeError(
                f"DistributedDataParallel could not be given the buckets of the run so far ({failures}), nor "
                "a new reducer. Remove hooks from its parameters until the Checkpointer is made, or start "
                "without the snapshot"
            )

    def _plans(self, everyone: list[_RankFacts]) -> dict[str, _Plan]:
        """Plans by wrapper, equal in its process group; warns of wrappers without one."""
        plans = {}
        for path, wrapper in self._wrappers.items():
            ranks = dist.get_process_group_ranks(wrapper.process_group)
            group = [everyone[rank] for rank in ranks if rank < len(everyone)]
            if len(group) < len(ranks):
                continue
            obstacle, plan = _plan(path, ranks, group)
            if _is_unrecorded(path, wrapper, group):
                self._unrecorded.add(path)
                obstacle = f"the snapshot does not know the wrapper {_quoted(path)}"
            if obstacle:
                logger.warning("%s: %s", _OTHER_BUCKETS, obstacle)
            elif plan is not None:
                plans[path] = plan
        return plans

    def _carry_out(self, plans: Mapping[str, _Plan], ranks: Collectives) -> list[Failures]:
        """Returns failures by rank; a collective call.

        A new reducer stays only if all ranks of its process group have one.
        """
        failed: Failures = {}
        before: dict[str, tuple[Any, Any]] = {}
        for path, plan in plans.items():
            wrapper = self._wrappers[path]
            try:
                if plan.backward:
                    _rebuild(wrapper, plan.layout)
                else:
                    before[path] = _begin_with(wrapper, plan)
            except Exception as error:  # noqa: BLE001 - the other ranks wait to hear of it
                failed[path] = f"{type(error).__name__}: {error}"
        failures = ranks.gather(failed, Failures)
        for path, plan in plans.items():
            reasons = _failed(failures, path, plan)
            if path in before:
                _settle_reducer(self._wrappers[path], before[path], keep=not reasons)
            if not reasons:
                self._known[path] = plan.layout
                if plan.backward:
                    self._settled.add(path)
            elif not plan.backward:
                logger.warning("%s: %s", _OTHER_BUCKETS, reasons[0])
        return failures


def _quoted(path: str) -> str:
    return repr(path) if path else "around the model"


def _failed(failures: list[Failures], path: str, plan: _Plan) -> list[str]:
    """The reasons of the ranks of this wrapper's process group."""
    return [failures[rank][path] for rank in plan.ranks if path in failures[rank]]


def _is_unrecorded(path: str, wrapper: Any, group: list[_RankFacts]) -> bool:
    """True if there are layouts, but none of this wrapper although DDP would report one."""
    known = set[str]().union(*(facts.layouts for facts in group))
    return bool(known) and path not in known and not _never_rebuilt(wrapper)


def _plan(path: str, ranks: list[int], group: list[_RankFacts]) -> tuple[str, _Plan | None]:
    """The obstacle, or the plan; neither if a rank of the process group does not know the buckets."""
    layouts = [facts.layouts[path] for facts in group if path in facts.layouts]
    if len(layouts) < len(ranks):
        return "", None
    able = [facts.wrappers[path] for facts in group if path in facts.wrappers]
    if len(able) < len(ranks):
        return f"a rank has no wrapper {_quoted(path)}", None
    order = sorted(itertools.chain(*layouts[0]))
    backward = all(each.unnoticed for each in able)
    for each in able:
        if each.obstacle:
            return each.obstacle, None
        if not backward and each.bound:
            return each.bound, None
        if order != list(range(each.num_parameters)):
            return f"{len(order)} parameters were reduced, {each.num_parameters} are now", None
    bound = next((each.bound for each in able if each.bound), "")
    return "", _Plan(layouts[0], ranks, backward, bound)


def _never_rebuilt(wrapper: Any) -> bool:
    return bool(wrapper.find_unused_parameters and not wrapper.static_graph)


def _rebuilt(wrapper: Any) -> Layout:
    """The rebuilt buckets; empty before the rebuild, or before DDP reports it."""
    if _never_rebuilt(wrapper) or wrapper.logger is None:
        return []
    text: str = wrapper._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")
    return [[int(index) for index in bucket.split()] for bucket in text.split(",") if bucket]


def _able(wrapper: Any) -> _Able:
    """Never raises, because the other ranks wait for the answer."""
    missing = [name for name in _OF_WRAPPER if not hasattr(wrapper, name)]
    missing += [name for name in _OF_REDUCER if not hasattr(wrapper.reducer, name)]
    missing += [name for name in _OF_MODULE if not hasattr(dist, name)]
    if missing:
        return _Able(obstacle=f"this version of torch has no {', '.join(missing)}")
    try:
        parameters, sparse = wrapper._build_params_for_reducer()
        obstacle = "it has sparse gradients" if any(sparse) else ""
        unnoticed = not (wrapper.static_graph or _never_rebuilt(wrapper) or _is_hooked(wrapper, parameters))
        return _Able(len(parameters), obstacle, unnoticed, _bound(wrapper, parameters))
    except Exception as error:  # noqa: BLE001 - all ranks get it, and warn
        return _Able(obstacle=f"{type(error).__name__}: {error}")


def _is_hooked(wrapper: Any, parameters: list[Any]) -> bool:
    """True if a backward pass would run user code, which may step an optimizer or change loaded state."""
    return bool(wrapper._comm_hooks) or any(
        p._backward_hooks or p._post_accumulate_grad_hooks or hasattr(p, "_in_backward_optimizers")
        for p in parameters
    )


def _bound(wrapper: Any, parameters: list[Any]) -> str:
    """The setting of this wrapper's reducer that a new one cannot have; empty if there is none."""
    if getattr(wrapper, "mixed_precision", None) is not None:
        return "a wrapper with mixed precision cannot get a new reducer"
    if wrapper._get_ddp_logging_data().get("comm_hook") and not wrapper._comm_hooks:
        return "a wrapper with a built-in communication hook cannot get a new reducer"
    if wrapper.static_graph and wrapper._comm_hooks:
        # In its first iteration a static reducer shows its hook all buckets as bucket 0; with one
        # bucket that is also the last.
        return "a static graph with a communication hook"
    if wrapper._lazy_init_ran and any(hasattr(p, "_in_backward_optimizers") for p in parameters):
        return (
            "a wrapper that steps optimizers in its backward pass cannot get a new reducer "
            "after its first forward"
        )
    return ""


def _rebuild(wrapper: Any, layout: Layout) -> None:
    """Send zero gradients through the reducer in this order, so that it rebuilds its buckets."""
    parameters, _ = wrapper._build_params_for_reducer()
    kept = [p.grad for p in parameters]
    try:
        for param in parameters:
            param.grad = None
        wrapper.reducer.prepare_for_backward([])
        for index in itertools.chain(*layout):
            param = parameters[index]
            torch.autograd.backward(param, torch.zeros_like(param))
        wrapper._has_rebuilt_buckets = wrapper.reducer._rebuild_buckets()
    finally:
        for param, grad in zip(parameters, kept, strict=True):
            param.grad = grad


def _begin_with(wrapper: Any, plan: _Plan) -> tuple[Any, Any]:
    """Replace the reducer by one with these buckets; returns the old reducer and logger.

    It needs no backward pass. A static reducer must not get one: it learns its graph from the first
    that it sees. After the first real one the buckets are rebuilt in that order, which is the same
    unless the graph has changed.
    """
    if plan.bound:
        raise RuntimeError(plan.bound)
    before = wrapper.reducer, wrapper.logger
    try:
        _make_reducer(wrapper, plan.layout)
    except BaseException:
        _settle_reducer(wrapper, before, keep=False)
        raise
    return before


def _make_reducer(wrapper: Any, layout: Layout) -> None:
    parameters, sparse = wrapper._build_params_for_reducer()
    names = wrapper._build_debug_param_to_name_mapping(parameters)
    name = "_compute_bucket_assignment_by_size"
    computed = getattr(dist, name)
    limits = [wrapper.bucket_bytes_cap] * len(layout)
    # The wrapper reverses what it computes.
    setattr(dist, name, lambda *_: (layout[::-1], limits))
    try:
        wrapper._ddp_init_helper(parameters, sparse, names, wrapper.static_graph)
    finally:
        setattr(dist, name, computed)
    if wrapper.static_graph:
        wrapper.reducer._set_static_graph()
        wrapper.logger._set_static_graph()
    for hook, state in wrapper._comm_hooks:
        wrapper.logger._set_comm_hook_name(hook.__qualname__)
        dist._register_comm_hook(wrapper.reducer, state, hook)  # type: ignore[attr-defined]


def _settle_reducer(wrapper: Any, before: tuple[Any, Any], *, keep: bool) -> None:
    """Let only one of the new and the old reducer see gradients: the new one if ``keep``."""
    if keep:
        before[0]._remove_autograd_hooks()
        wrapper._has_rebuilt_buckets = False
    elif wrapper.reducer is not before[0]:
        wrapper.reducer._remove_autograd_hooks()
        wrapper.reducer, wrapper.logger = before


def hook_states(model: nn.Module) -> dict[str, Any]:
    """What communication hooks of DDP keep, by a name: PowerSGD's error feedback, for example."""
    return {
        f"{OF_A_HOOK}{path}{number or ''}": state
        for path, wrapper in _wrappers_of(model).items()
        for number, (_, state) in enumerate(wrapper._comm_hooks)
        if state is not None and not isinstance(state, dist.ProcessGroup)
    }


def _wrappers_of(model: nn.Module) -> dict[str, Any]:
    return {
        path: module for path, module in model.named_modules() if isinstance(module, DistributedDataParallel)
    }


def _warn_of_hooks(wrappers: Mapping[str, Any], captured: Collection[int]) -> None:
    """A communication hook may keep state that no snapshot can hold."""
    for wrapper in wrappers.values():
        for hook, state in wrapper._comm_hooks:
            known = state is None or isinstance(state, dist.ProcessGroup) or id(state) in captured
            if not known:
                logger.warning(
                    "the communication hook %s keeps a %s: a resumed run is exact only if that is in state=",
                    getattr(hook, "__qualname__", hook),
                    type(state).__name__,
                )
