"""What ``torch.distributed.pipelining`` does to a stage beside the steps, and which modules it calls.

In its first step a schedule whose stages were made without example inputs and outputs runs every stage once, on whatever is in
memory, to learn shapes. A process that resumes does so again, in the middle of the run: what it leaves in buffers (tokens
counted by a router, running statistics) and in generators that torch does not fork would not be what was recorded.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckptd.client.binding import Binding, local
from ckptd.client.rng import capture_rng, restore_rng

__all__ = ["callables_of", "rehearsal_tap", "without_trace"]


@contextmanager
def rehearsal_tap(around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Put ``around`` around every such rehearsal; nothing where pipelining was not imported."""
    schedules = sys.modules.get("torch.distributed.pipelining.schedules")
    base: Any = getattr(schedules, "_PipelineSchedule", None)
    original = getattr(base, "_initialize_pp_stages", None)
    if original is None:
        yield
        return

    @functools.wraps(original)
    def tapped(*args: Any, **kwargs: Any) -> Any:
        with around():
            return original(*args, **kwargs)

    base._initialize_pp_stages = tapped
    try:
        yield
    finally:
        base._initialize_pp_stages = original


@contextmanager
def without_trace(binding: Binding) -> Iterator[None]:
    """Put buffers and random state back to what they were before the body.

    A forward outside ``no_sync`` tells DDP to expect a backward. None comes, so DDP would take the first micro-batch's for it,
    reduce that one's gradients by themselves, and sum in another order than in all steps but a process's first.
    """
    rng = capture_rng()
    buffers = {name: local(b).clone() for name, b in binding.buffers().items()}
    with ExitStack() as stack:
        for module in binding.model.modules():
            if isinstance(module, DistributedDataParallel):
                stack.enter_context(module.no_sync())
        yield
    now = binding.buffers()
    with torch.no_grad():
        for name, before in buffers.items():
            local(now[name]).copy_(before)
    restore_rng(rng)


def callables_of(model: nn.Module) -> list[nn.Module]:
    """The modules whose calls are the model's forwards: a plain container's children, as it cannot be called itself."""
    if isinstance(model, nn.ModuleList | nn.ModuleDict) and len(model):
        return [m for child in model.children() for m in callables_of(child)]
    return [model]
