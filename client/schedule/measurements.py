"""What plans are based on: step times, the copy mode, sufficient dtypes, expert popularity.

``StepTiming`` and ``CopyModeChooser`` are pure: they are fed with clock readings in seconds.
``PrecisionProbe`` and ``TokenCounter`` watch the model's forwards; neither synchronises a device.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from ckptd.client.log_lines import get_logger
from ckptd.client.model.hooks import ModuleHook
from ckptd.client.model.live_state import local, named_modules
from ckptd.client.model.operators import Operator
from ckptd.client.schedule.snapshot_plan import SnapshotPlan
from ckptd.core.schedule import Ordering, needs_reorder, order_operators, reorder, update_popularity
from ckptd.core.snapshot_policy import Schedule

logger = get_logger(__name__)

_KEPT = 20

_BLOCK = 6
_BLOCKS_EACH = 3
# Inline stalls the trainer visibly, and in bubbles a snapshot is complete later: both must win clearly.
_MARGIN = 0.99


class StepTiming:
    """Durations of the last steps, and the waits of this one.

    ``now_s`` comes from any monotonic clock.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.boundary_s = 0.0
        self.wait_s = 0.0
        self.device_s = 0.0
        self.sealing_s = 0.0
        self._top_at = 0.0
        self._prepare_s = 0.0
        self._to_optimizer: deque[float] = deque(maxlen=_KEPT)
        self._iterations: deque[float] = deque(maxlen=_KEPT)

    def top(self, now_s: float) -> float | None:
        """Begin a step; returns the duration of the last one, None for the first."""
        last = now_s - self._top_at if self.steps else None
        if last is not None:
            self._iterations.append(last)
        self.steps += 1
        self._top_at = now_s
        self.wait_s = self.device_s = self.sealing_s = self._prepare_s = 0.0
        return last

    def boundary_over(self, now_s: float) -> None:
        """The user's code continues.

        Planning and reserving happen once (or after a change) and count as no step's stall.
        """
        self.boundary_s = now_s - self._top_at - self._prepare_s

    def prepared(self, seconds: float) -> None:
        """Note time of this boundary that planning or reserving took."""
        self._prepare_s += seconds

    def waited(self, seconds: float) -> None:
        """Note time for which the training thread waited for copies."""
        self.wait_s += seconds

    def device_waited(self, seconds: float) -> None:
        """Note time for which the device waited for copies while the training thread went on."""
        self.device_s += seconds

    def sealed(self, seconds: float) -> None:
        """Note time of this boundary in which training waited for slots to be sealed, or sealed them."""
        self.sealing_s += seconds

    def optimizer_begins(self, now_s: float) -> None:
        """The first optimizer step of this loop step begins: until here copies may run unnoticed."""
        self._to_optimizer.append(now_s - self._top_at - self.boundary_s - self.wait_s)

    @property
    def copy_window_s(self) -> float:
        """Median time from the end of the boundary to the optimizer's step."""
        return statistics.median(self._to_optimizer) if self._to_optimizer else 0.0

    @property
    def iteration_s(self) -> float:
        """Median duration of a step."""
        return statistics.median(self._iterations) if self._iterations else 0.0


class ReorderPace:
    """Says when to take the next step towards another order, by what the last one has cost.

    Args:
        share: of the time that steps may cost.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._began_s = -math.inf
        self._spent_s = 0.0

    def due(self, now_s: float, spent_s: float) -> bool:
        """Whether the last step is paid for.

        Args:
            spent_s: on copy plans so far.
        """
        return now_s >= self._began_s + (spent_s - self._spent_s) / self._share

    def begins(self, now_s: float, spent_s: float) -> None:
        """A step begins: what is spent from here on is its cost."""
        self._began_s, self._spent_s = now_s, spent_s


class CopyMode(StrEnum):
    """Where copies of host tensors run."""

    BESIDE = "beside training"
    INLINE = "in the training thread"
    IN_BUBBLES = "beside training, in bubbles of the pipeline"


class CopyModeChooser:
    """Tries each mode for ``_BLOCKS_EACH`` blocks in turn, then keeps the fastest.

    With a spare core a copying thread is free. Where training keeps every core busy it delays each
    parallel region by a scheduler's slice, and copying at the top of the loop is cheaper; or copying while
    a stage of a pipeline waits for others. Short alternating blocks cancel drift.

    Args:
        modes: the first is kept unless another one is clearly faster.
        again_after: the number of iterations for which a decision holds.
    """

    reason = "not measured yet"

    def __init__(
        self, modes: Sequence[CopyMode] = (CopyMode.BESIDE, CopyMode.INLINE), *, again_after: int = 2000
    ) -> None:
        self._modes = tuple(modes)
        self._again_after = again_after
        self._restart()
        self.mode = self._modes[0]

    def _restart(self) -> None:
        self._times: dict[CopyMode, list[float]] = {mode: [] for mode in self._modes}
        self._count = 0
        self.decided = False

    def take_over(self, mode: CopyMode) -> bool:
        """An earlier trainer of this rank has decided: its mode is kept as long as a decision holds.

        Returns:
            False, and nothing changes: the mode is not to be tried here, or a choice is made.
        """
        if mode not in self._modes or self.decided:
            return False
        self.mode, self.decided, self._count = mode, True, 0
        self.reason = "as the trainer before this one had measured"
        return True

    def note(self, iteration_s: float) -> CopyMode:
        """Note an iteration under the current mode; returns the mode of the next one."""
        position = self._count % _BLOCK
        if not self.decided and position:  # the first of a block still carries the other mode's copy
            self._times[self.mode].append(iteration_s)
        self._count += 1
        if self.decided:
            if self._count >= self._again_after:
                self._restart()
                self.mode = self._modes[0]
        elif self._count >= len(self._modes) * _BLOCKS_EACH * _BLOCK:
            self._decide()
        elif self._count % _BLOCK == 0:
            self.mode = self._modes[self._count // _BLOCK % len(self._modes)]
        return self.mode

    def _decide(self) -> None:
        found = {mode: statistics.median(times) for mode, times in self._times.items()}
        usual = self._modes[0]
        fastest = min(found, key=found.__getitem__)
        self.mode = fastest if found[fastest] < _MARGIN * found[usual] else usual
        self.decided, self._count = True, 0
        self.reason = ", ".join(f"{mode}: {s * 1e3:.2f} ms" for mode, s in found.items()) + " per iteration"


class PrecisionProbe:
    """Finds fp32 parameters that the forward reads only after rounding, under autocast.

    Such a parameter can be recorded in the autocast dtype while it is frozen: 2 bytes instead of 4.
    The probe watches the first forward under autocast at the dispatcher: every use of the
    parameter's storage (views aside) must be a cast to the autocast dtype. Embeddings, norms and
    fused experts with a kernel of their own typically keep fp32.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._params = {n: p for n, p in params.items() if local(p).dtype is torch.float32}
        self._mode: _Watch | None = None
        # Forwards that have begun and not ended: a container's children may call each other.
        self._depth = 0
        self._found: dict[str, torch.dtype] = {}
        self.done = not self._params

    def enter(self) -> None:
        """A forward of the model begins, maybe inside another one (training thread)."""
        if self.done:
            return
        self._depth += 1
        # Only the outermost is watched: what it reads after an inner one ended would be missed.
        if self._depth > 1:
            return
        device = local(next(iter(self._params.values()))).device.type
        if not torch.is_autocast_enabled(device):
            return
        storages = {local(p).untyped_storage().data_ptr(): n for n, p in self._params.items()}
        self._mode = _Watch(storages, torch.get_autocast_dtype(device))
        self._mode.__enter__()

    def leave(self) -> None:
        """A forward ended, however it ended. Calls without an ``enter`` do no harm."""
        self._depth = max(0, self._depth - 1)
        if self._depth or self._mode is None:
            return
        mode, self._mode = self._mode, None
        mode.__exit__(None, None, None)
        self.done = True
        self._found = {n: mode.dtype for n in mode.cast if n not in mode.read}

    def sufficient(self) -> dict[str, torch.dtype]:
        """The dtype that suffices while frozen, by parameter; empty before a forward under autocast."""
        return dict(self._found)


class _Watch(TorchDispatchMode):
    """Notes how parameter storages are used; changes nothing."""

    def __init__(self, storages: Mapping[int, str], dtype: torch.dtype) -> None:
        super().__init__()
        self._storages, self.dtype = storages, dtype
        self.cast: set[str] = set()
        self.read: set[str] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        names = {n for t in _tensors((args, kwargs)) if (n := self._name(t)) is not None}
        if names and not func.is_view:
            rounded = func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is self.dtype
            (self.cast if rounded else self.read).update(names)
        return func(*args, **kwargs)

    def _name(self, tensor: Tensor) -> str | None:
        try:
            return self._storages.get(tensor.untyped_storage().data_ptr())
        except (NotImplementedError, RuntimeError):
            return None  # a wrapper without storage is not one of the parameters


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in _tensors(v)]
    if isinstance(value, list | tuple):
        return [t for v in value for t in _tensors(v)]
    return []


class TokenCounter:
    """Counts tokens (``soft``: gate probabilities) per expert with forward hooks.

    Counts decide the order in which experts are anchored (popular ones late: they stay frozen longest in
    replay, MoEvement §3.5), and say what a failure loses of partial snapshots. They are those of training: a
    forward of a module in evaluation mode, without gradients, does not count.
    """

    def __init__(
        self,
        model: nn.Module,
        operators: Sequence[Operator],
        ordering: Ordering,
        capacities: Mapping[str, float] | None = None,
    ) -> None:
        self.enabled = True
        self._broken = False
        self._ordering, self._capacities = ordering, capacities
        # Counts by container: of experts that are modules, and of experts that are rows of one tensor.
        self._listed: dict[str, list[float]] = {}
        self._fused: dict[str, Tensor | None] = {}
        self._begins: dict[str, list[float]] = {}  # counts of fused experts in earlier lives
        self._seen: dict[str, list[float]] = {}
        self._smoothed: list[float] = []
        self._at_last_order: list[float] | None = None
        self._since_look = 0
        self._target: list[int] | None = None
        self._handles: list[RemovableHandle] = []
        sizes: dict[str, int] = {}
        for op in operators:
            if op.expert is not None:
                name, index = op.expert
                sizes[name] = max(sizes.get(name, 0), index + 1)
        modules = dict(named_modules(model))
        for name, size in sizes.items():
            module = modules.get(name)
            if isinstance(module, nn.ModuleList | nn.ModuleDict):
                self._listed[name] = [0.0] * size
                for key, child in module.named_children():  # of an elastic layer some only
                    self._hook(child, self._count_child(name, int(key)))
            elif module is not None:
                self._fused[name], self._begins[name] = None, [0.0] * size
                self._hook(module, self._count_fused(name, size))

    def _hook(self, module: nn.Module, count: Callable[..., None]) -> None:
        def guarded(*args: Any) -> None:
            # A forward inside a backward is checkpointing's recomputation: already counted.
            if self._broken or not self.enabled or torch._C._current_graph_task_id() != -1:
                return
            if not (args[0].training or torch.is_grad_enabled()):
                return  # an evaluation
            try:
                count(*args)
            except Exception as error:  # noqa: BLE001 - the user's forward must survive
                self._broken = True
                logger.warning(
                    "tokens are not counted any more, experts are anchored in the order of before: %r",
                    error,
                )

        self._handles.append(module.register_forward_pre_hook(ModuleHook(guarded), with_kwargs=True))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def totals(self) -> dict[str, Any]:
        """Counts by container since the run began: a list, or of fused experts a tensor on their device."""
        fused = {n: self._begins[n] if t is None else t.clone() for n, t in self._fused.items()}
        return {n: list(v) for n, v in self._listed.items()} | fused

    def resume(self, totals: Mapping[str, Sequence[float]]) -> None:
        """Go on from the counts of an earlier life."""
        for name, counts in totals.items():
            if name in self._listed:
                self._listed[name][:] = counts
            elif name in self._fused:
                self._fused[name], self._begins[name] = None, list(counts)

    def popularity(self, operators: Sequence[Operator]) -> list[float]:
        """Tokens per operator since the start (``decayed``: a moving average); 0 for non-experts."""
        totals = {
            **self._listed,
            **{n: t.tolist() for n, t in self._fused.items() if t is not None},
        }
        observed = [0.0] * len(operators)
        for i, op in enumerate(operators):
            if op.expert is not None and op.expert[0] in totals:
                name, index = op.expert
                before = self._seen[name][index] if name in self._seen else 0.0
                observed[i] = totals[name][index] - before
        self._seen = {n: list(v) for n, v in totals.items()}
        if len(self._smoothed) != len(observed):
            self._smoothed = [0.0] * len(observed)
        self._smoothed = update_popularity(self._smoothed, observed, ordering=self._ordering)
        return self._smoothed

    def reordered(self, plan: SnapshotPlan, capacity_bytes: int, *, every: int) -> Schedule | None:
        """A schedule one step closer to today's popularity; None keeps the order.

        Call it where a window begins. It looks at popularity about every ``every`` snapshots. After a
        sufficient change, each window takes one step until the order is reached: more than one step at
        once could leave an operator out of a suffix's reach.
        """
        self._since_look += plan.schedule.window
        if self._target is None and (self._at_last_order is None or self._since_look >= every):
            self._target = self._new_target(plan)
        if self._target is None:
            return None
        schedule = reorder(plan.schedule, plan.costs, self._target, capacity_bytes=capacity_bytes)
        if schedule.phases == plan.schedule.phases:
            self._target = None
            return None
        return schedule

    def new_order(self, plan: SnapshotPlan, *, every: int) -> tuple[int, ...]:
        """The order by today's popularity after a sufficient change; empty keeps the order.

        For several ranks, which change the order together. Call it where a window begins; it looks
        at popularity about every ``every`` snapshots.
        """
        self._since_look += plan.schedule.window
        if self._at_last_order is not None and self._since_look < every:
            return ()
        return tuple(self._new_target(plan) or ())

    def _new_target(self, plan: SnapshotPlan) -> list[int] | None:
        self._since_look = 0
        now = list(self.popularity(plan.operators))
        experts = [i for i, op in enumerate(plan.operators) if op.expert is not None]
        before = self._at_last_order
        if before is not None and not needs_reorder([before[i] for i in experts], [now[i] for i in experts]):
            return None
        self._at_last_order = now
        known = self._capacities
        capacities = None if known is None else [float(known.get(op.name, 1.0)) for op in plan.operators]
        aligned = plan.policy_name == "aligned"
        return order_operators(plan.costs, now, self._ordering, capacities=capacities, dense_last=aligned)

    def _count_child(self, name: str, index: int) -> Callable[..., None]:
        counts = self._listed[name]

        def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            first = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
            if first is not None:
                counts[index] += first.numel() / max(first.shape[-1], 1) if first.ndim else 1.0

        return count

    def _count_fused(self, name: str, size: int) -> Callable[..., None]:
        def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensors = [local(a) for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
            index = next((t for t in tensors if t.dtype in (torch.int64, torch.int32) and t.ndim >= 1), None)
            if index is None or type(index) is not Tensor:
                return  # none, or a fake one: somebody looks at shapes only
            with torch.inference_mode(False), torch.no_grad():
                total = self._fused[name]
                if total is None:
                    begins = torch.tensor(self._begins[name], dtype=torch.float64)
                    total = self._fused[name] = begins.to(index.device)
                flat = index.reshape(-1).long()
                weights = None
                if self._ordering is Ordering.SOFT:
                    weights = next(
                        (t for t in tensors if t.is_floating_point() and t.shape == index.shape), None
                    )
                # Exact for counts up to 2^53.
                ones = (
                    torch.ones_like(flat, dtype=torch.float64)
                    if weights is None
                    else weights.detach().reshape(-1).double()
                )
                if flat.numel():
                    # Experts of other ranks have indices beyond those that are counted.
                    total.scatter_add_(0, flat.clamp(0, size - 1), ones * (flat < size))

        return count
