"""How often each expert is used: token counts taken by hooks, without synchronising a device.

Counts decide only in which order experts are anchored (popular ones late: they stay frozen longest
in replay, MoEvement §3.5), so they need not be exact; they must be cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ckptd.client.log_lines import get_logger
from ckptd.client.model.live_state import local
from ckptd.client.model.module_hooks import ModuleHook
from ckptd.client.model.operators import Operator
from ckptd.client.model.parameter_names import named_modules
from ckptd.client.schedule.snapshot_plan import SnapshotPlan
from ckptd.core.schedule import (
    Ordering,
    Schedule,
    needs_reorder,
    order_operators,
    reorder,
    update_popularity,
)

__all__ = ["TokenCounter"]

logger = get_logger(__name__)


class TokenCounter:
    """Counts tokens (``soft``: gate probabilities) per expert of every container that the operators name."""

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
        self._listed: dict[str, list[float]] = {}
        self._fused: dict[str, Tensor | None] = {}
        self._sizes: dict[str, int] = {}
        self._seen: dict[str, list[float]] = {}
        self._smoothed: list[float] | None = None
        self._at_last_order: list[float] | None = None
        self._since_look = 0
        self._target: list[int] | None = None
        self._handles: list[RemovableHandle] = []
        modules = dict(named_modules(model))
        for op in operators:
            if op.expert is not None:
                name, index = op.expert
                self._sizes[name] = max(self._sizes.get(name, 0), index + 1)
        for name, size in self._sizes.items():
            module = modules.get(name)
            if isinstance(module, nn.ModuleList | nn.ModuleDict):
                self._listed[name] = [0.0] * size
                for key, child in module.named_children():  # of an elastic layer some only
                    self._count(child, self._count_child(name, int(key)))
            elif module is not None:
                self._fused[name] = None
                self._count(module, self._count_fused(name, size))

    def _count(self, module: nn.Module, count: Callable[..., None]) -> None:
        hook = ModuleHook(self._guarded(count))
        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _guarded(self, count: Callable[..., None]) -> Callable[..., None]:
        """It runs within the user's forward, which must survive it."""

        def guarded(*args: Any) -> None:
            if self._broken or not self._counts_now():
                return
            try:
                count(*args)
            except Exception as error:  # noqa: BLE001 - whatever a model hands to its experts
                self._broken = True
                logger.warning(
                    "tokens are not counted any more, experts are anchored in the order of before: %r",
                    error,
                )

        return guarded

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def popularity(self, operators: Sequence[Operator]) -> list[float]:
        """Per operator, since the start (``decayed``: as a moving average over the reads); 0 for
        what is no expert.
        """
        totals = {
            **self._listed,
            **{n: t.tolist() for n, t in self._fused.items() if t is not None},
        }
        fresh = {
            n: [now - before for now, before in zip(v, self._seen.get(n, [0.0] * len(v)), strict=True)]
            for n, v in totals.items()
        }
        self._seen = {n: list(v) for n, v in totals.items()}
        observed = [
            fresh.get(op.expert[0], [0.0] * (op.expert[1] + 1))[op.expert[1]] if op.expert else 0.0
            for op in operators
        ]
        if self._smoothed is None or len(self._smoothed) != len(observed):
            self._smoothed = [0.0] * len(observed)
        self._smoothed = update_popularity(self._smoothed, observed, ordering=self._ordering)
        return self._smoothed

    def reordered(self, plan: SnapshotPlan, capacity_bytes: int, *, every: int) -> Schedule | None:
        """Called where a window begins: a schedule one step closer to today's popularity; None to
        keep the order.

        Popularity is looked at about every ``every`` snapshots; once it changed enough, a step is
        taken at each window until the order is reached (more than a step at once could leave an
        operator out of a suffix's reach).
        """
        self._since_look += plan.schedule.window
        if self._target is None and (self._at_last_order is None or self._since_look >= every):
            self._target = self._new_target(plan)
            self._since_look = 0
        if self._target is None:
            return None
        schedule = reorder(plan.schedule, plan.costs, self._target, capacity_bytes=capacity_bytes)
        if schedule.phases == plan.schedule.phases:
            self._target = None
            return None
        return schedule

    def new_order(self, plan: SnapshotPlan, *, every: int) -> tuple[int, ...]:
        """Called where a window begins: the order by today's popularity, if that changed enough;
        empty to keep the order.

        For several ranks, which go over to it together; looked at about every ``every`` snapshots.
        """
        self._since_look += plan.schedule.window
        if self._at_last_order is not None and self._since_look < every:
            return ()
        self._since_look = 0
        return tuple(self._new_target(plan) or ())

    def _new_target(self, plan: SnapshotPlan) -> list[int] | None:
        now = list(self.popularity(plan.operators))
        experts = [i for i, op in enumerate(plan.operators) if op.expert is not None]
        before = self._at_last_order
        if before is not None and not needs_reorder([before[i] for i in experts], [now[i] for i in experts]):
            return None
        self._at_last_order = now
        return order_operators(
            plan.costs, now, self._ordering, capacities=self._capacity_list(plan.operators)
        )

    def _capacity_list(self, operators: Sequence[Operator]) -> list[float] | None:
        if self._capacities is None:
            return None
        return [float(self._capacities.get(op.name, 1.0)) for op in operators]

    def _counts_now(self) -> bool:
        # A forward that runs inside a backward is checkpointing's recomputation: already counted.
        return self.enabled and torch._C._current_graph_task_id() == -1

    def _count_child(self, name: str, index: int) -> Any:
        counts = self._listed[name]

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            first = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
            if first is not None:
                counts[index] += first.numel() / max(first.shape[-1], 1) if first.ndim else 1.0

        return hook

    def _count_fused(self, name: str, size: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensors = [local(a) for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
            index = next((t for t in tensors if t.dtype in (torch.int64, torch.int32) and t.ndim >= 1), None)
            if index is None or type(index) is not Tensor:
                return  # none, or a fake one: somebody looks at shapes only
            with torch.inference_mode(False), torch.no_grad():
                total = self._fused[name]
                if total is None:
                    total = self._fused[name] = torch.zeros(size, device=index.device)
                flat = index.reshape(-1).long()
                weights = next((t for t in tensors if t.is_floating_point() and t.shape == index.shape), None)
                soft = self._ordering is Ordering.SOFT and weights is not None
                ones = (
                    weights.detach().reshape(-1).float()
                    if soft and weights is not None
                    else torch.ones_like(flat, dtype=torch.float32)
                )
                if flat.numel():
                    # Experts that are not on this rank have indices beyond those that are counted.
                    total.scatter_add_(0, flat.clamp(0, size - 1), ones * (flat < size))

        return hook
