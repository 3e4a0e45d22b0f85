"""Freezing operators while a window is replayed, and what must be recorded for it.

Two mechanisms, both exact (measured: docs/decisions/freezing.md):

* ``drop``: the user's code runs untouched; before the optimizer's step the gradients of frozen
  tensors are taken away. Exact for every wrapper and optimizer tried; saves the optimizer's time
  only.
* ``inputs``: additionally ``backward`` is asked for the active parameters' gradients only, which
  saves the frozen weights' gradient computation. Not possible under DDP or FSDP (their hooks expect
  every gradient) or reentrant checkpointing, and pointless where user code reads all gradients
  itself. Frozen parameters then get zero gradients, so that code that touches ``p.grad`` keeps
  working.

Either way, what depends on *all* gradients must come from the record where it cannot be recomputed:
the total norm used for clipping, and the loss scaler's ``found_inf``.
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

__all__ = ["BackwardLimiter", "Tape", "choose_freezing", "clip_norm_tap", "scaler_tap"]


class Tape:
    """Values that a repeat cannot recompute while operators are frozen, in the order in which a
    step asked for them.

    ``record`` notes the value while training and returns the recorded one while replaying.
    """

    def __init__(self) -> None:
        self._recording: list[tuple[str, Any]] = []
        # What the last `take` returned.
        self.last: tuple[tuple[str, Any], ...] = ()
        self._playing: list[tuple[str, Any]] | None = None
        self.substitute = False
        self.mismatches: list[str] = []

    @property
    def playing(self) -> bool:
        """Whether a step gets what was recorded."""
        return self._playing is not None

    def record(self, kind: str, value: Any) -> Any:
        """While training: keep ``value``. While replaying: the value that was kept at this point of
        the step.
        """
        if self._playing is None:
            self._recording.append((kind, _copy(value)))
            return value
        for i, (recorded_kind, recorded) in enumerate(self._playing):
            if recorded_kind == kind:
                del self._playing[i]
                return (
                    recorded.to(value.device)
                    if isinstance(value, Tensor) and isinstance(recorded, Tensor)
                    else recorded
                )
        return value

    def recorded(self, kind: str) -> tuple[Any] | None:
        """The value that was kept at this point of the step, where one is replayed that has it;
        None otherwise.
        """
        for i, (recorded_kind, recorded) in enumerate(self._playing or ()):
            if recorded_kind == kind:
                assert self._playing is not None
                del self._playing[i]
                return (recorded,)
        return None

    def take(self) -> list[tuple[str, Any]]:
        """What was recorded since the last call."""
        taken, self._recording = self._recording, []
        self.last = tuple(taken)
        return taken

    def put_back(self, taken: Iterable[tuple[str, Any]]) -> None:
        """Undo ``take``: what is recorded from now on follows it."""
        self._recording = [*taken, *self._recording]

    def play(self, recorded: Iterable[tuple[str, Any]] | None) -> None:
        """Answer from ``recorded`` from now on; None: go back to recording."""
        self._playing = None if recorded is None else [(k, v) for k, v in recorded]


def _copy(value: Any) -> Any:
    """The value as it is now: the caller may go on changing what it handed in."""
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


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

    Leaves that are no parameters need theirs: a pipeline stage sends that of its input to the stage
    before it. Falls back to a full backward in a step that uses reentrant checkpointing, which does
    not support it.
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
        given = inputs is not None
        wanted = [] if given else [t for t in _leaves(tensors) if id(t) not in without]
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
    """The freezing mechanism for this model and the reason, which is reported.

    With several ranks it is always ``drop`` unless asked otherwise: the wrapper that reduces
    gradients may stand around the module that we were given, and ranks that skip different
    gradients would hang or crash in its collectives.

    Args:
        masters: there are separate master weights.
        spread: other ranks keep part of the optimizer's state; then operators are frozen at other
            times on other ranks.
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
    return (
        "inputs",
        "no wrapper needs every gradient: weight gradients of frozen operators are skipped",
    )


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
