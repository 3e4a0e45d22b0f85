"""Freezing operators while a window is replayed, and the values that must be recorded for it.

Two mechanisms, both exact (measured: docs/decisions/freezing.md):

* ``drop``: the user's code runs untouched; before the optimizer's step the gradients of frozen tensors
  are discarded. Exact for every wrapper and optimizer tried; saves the optimizer's time only.
* ``inputs``: additionally ``backward`` is asked for the active parameters' gradients only, which saves
  the frozen weights' gradient computation. Not possible under DDP or FSDP (their hooks expect every
  gradient) or reentrant checkpointing, and pointless if user code reads all gradients itself. Frozen
  parameters then get zero gradients, so that code that touches ``p.grad`` keeps working.

Either way, values that depend on *all* gradients must come from the record: the total norm used for
clipping, and the loss scaler's ``found_inf``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.utils import clip_grad

from ckptd.client.model.hooks import layered


class Tape:
    """Values that a repeat cannot recompute while operators are frozen, in the order of a step's requests.

    Attributes:
        last: what the last `take` returned.
    """

    def __init__(self) -> None:
        self._recording: list[tuple[str, Any]] = []
        self.last: tuple[tuple[str, Any], ...] = ()
        self._playing: list[tuple[str, Any]] | None = None

    @property
    def playing(self) -> bool:
        """True if a step gets recorded values."""
        return self._playing is not None

    def record(self, kind: str, value: Any) -> Any:
        """Keep ``value`` while training; return the value kept at this point of the step while replaying."""
        if self._playing is None:
            # As it is now: the caller may go on changing it.
            kept = value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
            self._recording.append((kind, kept))
            return value
        found = self.recorded(kind)
        if found is None:
            return value
        (recorded,) = found
        if isinstance(value, Tensor) and isinstance(recorded, Tensor):
            return recorded.to(value.device)
        return recorded

    def recorded(self, kind: str) -> tuple[Any] | None:
        """The value kept at this point of the replayed step; None if there is none, or while training."""
        playing = self._playing or []
        for i, (recorded_kind, recorded) in enumerate(playing):
            if recorded_kind == kind:
                del playing[i]
                return (recorded,)
        return None

    def take(self) -> list[tuple[str, Any]]:
        """The values recorded since the last call."""
        taken, self._recording = self._recording, []
        self.last = tuple(taken)
        return taken

    def put_back(self, taken: Iterable[tuple[str, Any]]) -> None:
        """Undo ``take``: later values follow these."""
        self._recording = [*taken, *self._recording]

    def play(self, recorded: Iterable[tuple[str, Any]] | None) -> None:
        """Answer from ``recorded`` from now on; None: record again."""
        self._playing = None if recorded is None else [(k, v) for k, v in recorded]


@contextmanager
def clip_norm_tap(tape: Tape) -> Iterator[None]:
    """Route the total norm inside ``clip_grad_norm_`` (however it was imported) through the tape."""

    def tapped(below: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        norm = below(*args, **kwargs)
        full = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        recorded = tape.record("total_norm", full)
        if recorded is full:
            return norm
        if full is not norm:
            return _replicated_like(norm, recorded)
        return recorded  # type: ignore[no-any-return]

    with layered(clip_grad, "_get_total_norm", tapped):
        yield


def _replicated_like(norm: Any, value: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(value, norm.device_mesh, [Replicate()] * norm.device_mesh.ndim)


@contextmanager
def scaler_tap(scaler: Any, tape: Tape) -> Iterator[None]:
    """Route a GradScaler's ``found_inf`` through the tape."""

    def tapped(below: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = below(*args, **kwargs)
        for device, value in found.items():
            recorded = tape.record(f"found_inf/{device}", value)
            if recorded is not value:
                value.copy_(recorded)
        return found

    with layered(scaler, "_unscale_grads_", tapped):
        yield


class BackwardLimiter:
    """While active, ``backward`` computes the gradients of all leaves of its graph but the frozen parameters.

    Other leaves need theirs: a pipeline stage sends that of its input to the stage before it. Falls
    back to a full backward in a step with reentrant checkpointing, which does not support it.
    """

    def __init__(self, params: Callable[[], tuple[list[Tensor], list[Tensor]]]) -> None:
        self._params = params
        self._patches = ExitStack()
        self.saw_reentrant = False

    def start(self) -> None:
        from torch.utils.checkpoint import CheckpointFunction

        self._patches.enter_context(layered(torch.autograd, "backward", self._backward))
        self._patches.enter_context(layered(CheckpointFunction, "forward", self._forward))

    def stop(self) -> None:
        self._patches.close()

    def _backward(
        self,
        below: Callable[..., None],
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: Any = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        _, frozen = self._params()
        without = {id(p) for p in frozen}
        wanted = [] if inputs is not None else [t for t in _leaves(tensors) if id(t) not in without]
        if self.saw_reentrant or not wanted:
            below(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
            return
        below(tensors, grad_tensors, retain_graph, create_graph, grad_variables, wanted)
        for param in frozen:
            if param.grad is None:
                param.grad = torch.zeros_like(param)

    def _forward(self, below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.saw_reentrant = True
        return below(*args, **kwargs)


def _leaves(tensors: Any) -> list[Tensor]:
    """The tensors into whose ``grad`` a full backward from these would accumulate."""
    roots = [tensors] if isinstance(tensors, Tensor | GradientEdge) else list(tensors)
    edges = [get_gradient_edge(r) if isinstance(r, Tensor) else r for r in roots]
    waiting = [edge.node for edge in edges]
    seen = set(waiting)
    found = []
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            found.append(node.variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found


def choose_freezing(
    model: nn.Module,
    *,
    masters: bool,
    wanted: str = "auto",
    world_size: int = 1,
    spread: bool = False,
) -> tuple[str, str]:
    """The freezing mechanism for this model, and the reason to report.

    With several ranks it is always ``drop`` unless asked otherwise: the wrapper that reduces gradients
    may stand around the module that we were given, and ranks that skip different gradients would hang
    or crash in its collectives.

    Args:
        masters: there are separate master weights.
        spread: other ranks keep part of the optimizer's state, and freeze operators at other times.
    Raises:
        ValueError: ``wanted`` is not one of auto, drop, inputs, or ``inputs`` cannot be exact for this model.
    """
    if wanted not in ("auto", "drop", "inputs"):
        raise ValueError(f"freeze={wanted!r}: choose 'auto', 'drop' or 'inputs'")
    obstacle = _inputs_obstacle(model, masters)
    if spread and not obstacle:
        obstacle = "each rank updates other parameters and needs the sum of all ranks' gradients"
    if wanted == "inputs" and obstacle:
        raise ValueError(f"freeze='inputs' would not be exact here: {obstacle}; use 'auto' or 'drop'")
    if wanted == "drop":
        return "drop", "asked for"
    if obstacle:
        return "drop", obstacle
    if world_size > 1 and wanted == "auto":
        return "drop", f"{world_size} ranks: gradients may be reduced over them"
    return "inputs", "no wrapper needs every gradient: weight gradients of frozen operators are skipped"


def _inputs_obstacle(model: nn.Module, masters: bool) -> str:
    if masters:
        return "separate master weights: user code reads every parameter's gradient"
    for module in model.modules():
        kind = type(module)
        if "DistributedDataParallel" in kind.__name__:
            return "DistributedDataParallel expects every gradient"
        if any(base.__name__ in ("FSDPModule", "FullyShardedDataParallel") for base in kind.__mro__):
            return "FSDP shards are not the graph's leaves"
    if any(hasattr(p, "to_local") for p in model.parameters()):
        return "parameters are DTensors"
    return ""
