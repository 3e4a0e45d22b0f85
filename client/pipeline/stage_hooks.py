"""Hooks on the stages of ``torch.distributed.pipelining`` that observe the tensors they send.

A schedule asks a stage for its send operations once per micro-batch and direction; these contain the
tensors. The hooks replace these two methods on the instances, and the methods that return receive
operations, which show with which ranks a stage communicates.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

from ckptd.client.capture.stage_shapes import sends_dtensors
from ckptd.client.model.hooks import layered
from ckptd.client.pipeline.boundary_log import BoundaryLog
from ckptd.core.slots.boundary import SentKind

__all__ = ["listen", "stages_of"]

_METHODS = {"get_fwd_send_ops": SentKind.ACTIVATION, "get_bwd_send_ops": SentKind.GRADIENT}
_RECEIVING = ("get_fwd_recv_ops", "get_bwd_recv_ops")


def stages_of(what: Any) -> list[Any]:
    """The stages of a schedule, of several schedules, or the given stages themselves.

    Raises:
        ValueError: ``what`` contains no stage.
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
        "in your own pipeline, call activation() and gradient() of boundary_log()"
    )


def listen(stages: Iterable[Any], log: BoundaryLog) -> ExitStack:
    """Log the tensors that these stages send until the result is closed."""
    stack = ExitStack()
    # Weak: a stage must not keep the log, and so the rank's memory, of a checkpointer that was not
    # closed.
    reference = weakref.ref(log)
    for stage in stages:
        for name, kind in _METHODS.items():
            hook = partial(_sending, reference, kind, stage)
            stack.enter_context(layered(stage, name, hook))
        for name in _RECEIVING:
            stack.enter_context(layered(stage, name, partial(_receiving, reference)))
    return stack


def _sending(
    reference: weakref.ref[BoundaryLog],
    kind: SentKind,
    stage: Any,
    below: Callable[[int], list[Any]],
    micro_batch: int,
) -> list[Any]:
    operations = below(micro_batch)
    log = reference()
    if log is not None:
        tensors = [operation.tensor for operation in operations]
        peers = [operation.peer for operation in operations]
        log.sent(kind, int(stage.stage_index), micro_batch, tensors, peers)
        if micro_batch == 0 and sends_dtensors(stage):
            log.joined(stage.group, f"DTensors cross the boundaries of stage {stage.stage_index}")
    return operations


def _receiving(
    reference: weakref.ref[BoundaryLog], below: Callable[[int], list[Any]], micro_batch: int
) -> list[Any]:
    operations = below(micro_batch)
    log = reference()
    if log is not None:
        log.receives([operation.peer for operation in operations])
    return operations
