"""The buckets in which ``DistributedDataParallel`` reduces gradients: with three ranks or more they are part of the bits.

In which order the ranks' values are added follows from where in which bucket a gradient lies. DDP first lays gradients out by the
model's order, and after its first iteration anew, by the order in which they became ready. A process that resumes would reduce its
first iteration by the first layout again. So the layout is recorded, and put back before the first replayed step.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckptd.client import values
from ckptd.client.agreement import Exchange

__all__ = ["Buckets"]

logger = logging.getLogger(__name__)

_OTHER_BUCKETS = (
    "DistributedDataParallel's gradient buckets are not those of the run so far; with three ranks or more the first replayed "
    "iteration may differ in its last bits, which replay would report"
)
# The indices of a wrapper's parameters, bucket by bucket.
Layout = list[list[int]]


class Buckets:
    """Those of every DDP wrapper around the model or within it."""

    def __init__(self, model: nn.Module) -> None:
        self._wrappers = {
            path: module
            for path, module in model.named_modules()
            if isinstance(module, DistributedDataParallel)
        }
        self._known: dict[str, Layout] = {}
        _warn_of_hooks(self._wrappers)

    def layouts(self) -> dict[str, Layout]:
        """What is known by now, by the wrapper's path.

        DDP tells an iteration or two after it has rebuilt its buckets, and never where it does not (``find_unused_parameters``).
        """
        for path, wrapper in self._wrappers.items():
            if path not in self._known and (layout := _rebuilt(wrapper)):
                self._known[path] = layout
        return self._known

    def senders(self) -> list[str]:
        """The wrappers whose next forward begins with a broadcast of buffers: not those whose last one was in ``no_sync``.

        In a pipeline all are, but for what a new wrapper begins with; then buffers differ by replica.
        """
        return [p for p, wrapper in self._wrappers.items() if wrapper.require_forward_param_sync]

    def send_next(self, recorded: Collection[str]) -> None:
        """Let the next forward of these wrappers, and of no others, begin so."""
        for path, wrapper in self._wrappers.items():
            wrapper.require_forward_param_sync = path in recorded

    def put_back(self, recorded: Mapping[str, Layout], meet: Exchange) -> None:
        """Let the wrappers reduce as they did when the snapshots were taken. A collective call.

        The layout that counts is that of the first rank in a wrapper's process group: DDP, too, rebuilds by that one's.
        """
        everyone = [values.unpack(told) for told in meet(values.pack(dict(recorded), "buckets"))]
        for path, wrapper in self._wrappers.items():
            ranks = dist.get_process_group_ranks(wrapper.process_group)
            told = [everyone[rank].get(path) for rank in ranks if rank < len(everyone)]
            if None in told or len(told) < len(ranks):
                continue
            obstacle = _obstacle(wrapper, told[0])
            if obstacle:
                logger.warning("%s: %s", _OTHER_BUCKETS, obstacle)
            elif wrapper.static_graph:
                _begin_with(wrapper, told[0])
            else:
                _rebuild(wrapper, told[0])
            self._known[path] = told[0]


def _rebuilt(wrapper: Any) -> Layout:
    """The buckets as rebuilt; empty while they are not, or DDP has not told it yet."""
    never = wrapper.find_unused_parameters and not wrapper.static_graph
    if never or wrapper.logger is None:
        return []
    text: str = wrapper._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")
    return [[int(index) for index in bucket.split()] for bucket in text.split(",") if bucket]


def _obstacle(wrapper: Any, layout: Layout) -> str:
    """Why this wrapper cannot be given these buckets; empty if it can."""
    parameters, sparse = wrapper._build_params_for_reducer()
    order = list(itertools.chain(*layout))
    if not hasattr(wrapper.reducer, "_rebuild_buckets"):
        return "this version of torch does not let us rebuild them"
    if any(sparse):
        return "it has sparse gradients"
    if wrapper.static_graph and wrapper._comm_hooks:
        return "a static graph with a communication hook"
    if sorted(order) != list(range(len(parameters))):
        return f"{len(order)} parameters were reduced, {len(parameters)} are now"
    return ""


def _rebuild(wrapper: Any, layout: Layout) -> None:
    """Send zero gradients through the reducer in this order, as one backward pass, and let it lay out its buckets by that."""
    parameters, _ = wrapper._build_params_for_reducer()
    kept = [p.grad for p in parameters]
    for param in parameters:
        param.grad = None
    wrapper.reducer.prepare_for_backward([])
    for index in itertools.chain(*layout):
        param = parameters[index]
        torch.autograd.backward(param, torch.zeros_like(param))
    wrapper._has_rebuilt_buckets = wrapper.reducer._rebuild_buckets()
    for param, grad in zip(parameters, kept, strict=True):
        param.grad = grad


def _begin_with(wrapper: Any, layout: Layout) -> None:
    """A reducer that begins with these buckets.

    A static one learns its graph from the first backward pass that it sees, so that must be a real one; after it, the buckets
    are rebuilt by the order of a graph that does not change.
    """
    parameters, sparse = wrapper._build_params_for_reducer()
    names = wrapper._build_debug_param_to_name_mapping(parameters)
    wrapper.reducer._remove_autograd_hooks()
    name = "_compute_bucket_assignment_by_size"
    computed = getattr(dist, name)
    limits = [wrapper.bucket_bytes_cap] * len(layout)
    # The wrapper reverses what it computes.
    setattr(dist, name, lambda *_: (layout[::-1], limits))
    try:
        wrapper._ddp_init_helper(parameters, sparse, names, True)
    finally:
        setattr(dist, name, computed)
    wrapper.reducer._set_static_graph()
    wrapper.logger._set_static_graph()


def _warn_of_hooks(wrappers: Mapping[str, Any]) -> None:
    """A communication hook may keep state (error feedback) that no snapshot of ours can find by itself."""
    for wrapper in wrappers.values():
        for hook, state in wrapper._comm_hooks:
            if state is not None and not isinstance(state, dist.ProcessGroup):
                logger.warning(
                    "the communication hook %s keeps a %s: a resumed run is exact only if that is in state=",
                    getattr(hook, "__qualname__", hook),
                    type(state).__name__,
                )
