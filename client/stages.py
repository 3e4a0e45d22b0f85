"""Listening to the stages of ``torch.distributed.pipelining``: what they are about to send.

A stage is asked for its send operations by its schedule, once per micro-batch and direction, and they hold the tensors. These two
methods are stood in for, on the instances alone; nothing else of torch is touched.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

from ckptd.client.boundary_log import BoundaryLog
from ckptd.client.patches import layered
from ckptd.memory.boundary import SentKind

__all__ = ["listen", "stages_of"]

_METHODS = {"get_fwd_send_ops": SentKind.ACTIVATION, "get_bwd_send_ops": SentKind.GRADIENT}


def stages_of(what: Any) -> list[Any]:
    """The stages of a schedule, of several of them, or those that were passed themselves.

    Raises:
        ValueError: there is none in it.
    """
    if all(hasattr(what, name) for name in (*_METHODS, "stage_index")):
        return [what]
    inside = getattr(what, "_stages", None) or getattr(what, "_stage", None)
    if inside is not None:
        return stages_of(inside)
    if isinstance(what, Iterable) and not isinstance(what, str | bytes):
        found = [stage for each in what for stage in stages_of(each)]
        if found:
            return found
    raise ValueError(
        f"log_boundaries({type(what).__name__}): pass a schedule or stages of torch.distributed.pipelining; "
        "in a pipeline of your own, call activation() and gradient() of boundary_log()"
    )


def listen(stages: Iterable[Any], log: BoundaryLog) -> ExitStack:
    """Log what these stages send until the result is closed."""
    stack = ExitStack()
    # Weak: a stage that lives on must not keep the log, and so the rank's memory, of a checkpointer that nobody closed.
    reference = weakref.ref(log)
    for stage in stages:
        for name, kind in _METHODS.items():
            told = partial(_sending, reference, kind, int(stage.stage_index))
            stack.enter_context(layered(stage, name, told))
    return stack


def _sending(
    reference: weakref.ref[BoundaryLog],
    kind: SentKind,
    stage: int,
    below: Callable[[int], list[Any]],
    micro_batch: int,
) -> list[Any]:
    operations = below(micro_batch)
    log = reference()
    if log is not None:
        log.sent(kind, stage, micro_batch, [operation.tensor for operation in operations])
    return operations
