"""Hooks on the stages of ``torch.distributed.pipelining`` that observe the tensors they send, and on the
run in which a schedule learns the shapes of its stages.

A schedule asks a stage for its send operations once per micro-batch and direction; these contain the
tensors. The hooks replace these two methods on the instances, and the methods that return receive
operations, which show with which ranks a stage communicates.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckptd.client.capture.stage_shapes import sends_dtensors
from ckptd.client.log_lines import get_logger
from ckptd.client.model.hooks import layered
from ckptd.client.model.live_state import LiveState, local
from ckptd.client.pipeline.boundary_log import BoundaryLog
from ckptd.client.pipeline.isolated_stage import hooked
from ckptd.client.rng_state import capture_rng, restore_rng
from ckptd.core.slots.boundary import SentKind

logger = get_logger(__name__)


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
    for stage in stages:
        for name in _METHODS:
            stack.enter_context(hooked(stage, name, log, _sending))
        for name in _RECEIVING:
            stack.enter_context(hooked(stage, name, log, _receiving))
    return stack


def _sending(log: BoundaryLog, stage: Any, name: str, micro_batch: int, operations: list[Any]) -> list[Any]:
    tensors = [operation.tensor for operation in operations]
    peers = [operation.peer for operation in operations]
    log.sent(_METHODS[name], int(stage.stage_index), micro_batch, tensors, peers)
    if micro_batch == 0 and sends_dtensors(stage):
        log.joined(stage.group, f"DTensors cross the boundaries of stage {stage.stage_index}")
    return operations


def _receiving(log: BoundaryLog, stage: Any, name: str, micro_batch: int, operations: list[Any]) -> list[Any]:
    log.receives([operation.peer for operation in operations])
    return operations


SCHEDULES = "torch.distributed.pipelining.schedules"

# The methods of schedules that rehearse: the first in newer versions of torch, the others (for one stage,
# for several) in older ones.
_SHARED = "_initialize_pp_stages"
_SEPARATE = ("_initialize_stage", "_initialize_stages")


@contextmanager
def rehearsal_tap(around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Wrap every rehearsal in ``around``, even if pipelining is imported only in the body."""

    def tapped(below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with around():
            return below(*args, **kwargs)

    with ExitStack() as stack:

        def tap(schedules: ModuleType) -> None:
            for base, name in _rehearsals(schedules):
                stack.enter_context(layered(base, name, tapped))

        imported = sys.modules.get(SCHEDULES)
        if imported is not None:
            tap(imported)
        else:
            # Not imported here, because that takes seconds, and most runs have no pipeline.
            watch = _ImportWatch(tap)
            sys.meta_path.insert(0, watch)
            stack.callback(watch.remove)
        yield


def _rehearsals(schedules: ModuleType) -> list[tuple[type, str]]:
    """The classes and methods that rehearse in this torch, each where it is first defined."""
    classes = [c for c in vars(schedules).values() if isinstance(c, type)]

    def defining(name: str) -> list[tuple[type, str]]:
        having = [c for c in classes if name in vars(c)]
        return [(c, name) for c in having if not any(name in vars(b) for b in c.__mro__[1:])]

    found = defining(_SHARED) or [each for name in _SEPARATE for each in defining(name)]
    if not found:
        _warn_unknown(torch.__version__)
    return found


@functools.cache  # once for each process
def _warn_unknown(version: str) -> None:
    logger.warning(
        "torch %s: %s has none of %s; if a pipeline schedule learns shapes in its first step, a "
        "resumed run may differ from "
        "the recorded one: give its stages example inputs and outputs",
        version,
        SCHEDULES,
        ", ".join((_SHARED, *_SEPARATE)),
    )


class _ImportWatch(MetaPathFinder):
    """A finder that reports the import of the schedules' module; it finds no module itself."""

    def __init__(self, imported: Callable[[ModuleType], None]) -> None:
        # Weak: sys.meta_path must not keep a checkpointer that was not closed.
        self._imported = weakref.ref(imported)

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != SCHEDULES or self not in sys.meta_path:
            return None
        # Only the finders after this one: another checkpointer's watch would ask this one again.
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                self._follow(spec.loader)
                return spec
        return None

    def _follow(self, loader: Any) -> None:
        execute = loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            imported = self._imported()
            if imported is not None and self in sys.meta_path:  # the tap may have ended meanwhile
                imported(module)

        loader.exec_module = executed


@contextmanager
def without_trace(binding: LiveState) -> Iterator[None]:
    """Restore buffers and random state after the body, in which a schedule learns the shapes of its stages.

    Without example inputs it runs each stage once on uninitialized memory, in the first step of every
    process, so a resumed one does so in the middle of the run: buffers (tokens counted by a router, running
    statistics) and generators that torch does not fork would differ from the recorded state.

    After a forward outside ``no_sync`` DDP expects a backward. None follows, so DDP would take that of
    the first micro-batch, reduce its gradients alone, and sum in another order than in all steps but
    the first of a process.
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
    """The modules whose calls are the model's forwards; the children of a container that cannot be called."""
    if isinstance(model, nn.ModuleList | nn.ModuleDict) and len(model):
        return [m for child in model.children() for m in callables_of(child)]
    return [model]
