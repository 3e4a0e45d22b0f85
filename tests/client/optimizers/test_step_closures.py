"""``optimizer.step(closure)``: what must be done before weights change is done after the closure,
and before the update.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckptd.client import Checkpointer, RecoveryOptions, RunOptions, SnapshotOptions
from ckptd.client.optimizers.step_closures import before_update


class Watched:
    """An optimizer with our pre-hook, and what happened in its steps."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.ones(2))
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0)
        self.events: list[str] = []
        self.seen: list[float] = []
        self.optimizer.register_step_pre_hook(self._before)

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        return before_update(args, kwargs, self._work)

    def _work(self, loss: Any) -> None:
        assert self.weight.grad is not None
        self.events.append("work")
        self.seen.append(self.weight.detach()[0].item())

    def closure(self) -> Tensor:
        self.events.append("closure")
        self.optimizer.zero_grad()
        loss = self.weight.sum()
        loss.backward()
        return loss


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(lambda w: w.optimizer.step(w.closure), id="by position"),
        pytest.param(lambda w: w.optimizer.step(closure=w.closure), id="by name"),
    ],
)
def test_a_closure_comes_first(step: Callable[[Watched], Any]) -> None:
    watched = Watched()
    loss = step(watched)
    assert watched.events == ["closure", "work"]
    assert watched.seen == [1.0], "the weights are those that the closure saw"
    assert loss.item() == 2.0, "the closure's result is the step's"
    assert torch.equal(watched.weight, torch.zeros(2))


@pytest.mark.parametrize("arguments", [(), (None,)])
def test_without_a_closure_it_is_done_at_once(arguments: tuple[None, ...]) -> None:
    watched = Watched()
    watched.closure()
    watched.optimizer.step(*arguments)
    assert watched.events == ["closure", "work"]
    assert watched.seen == [1.0]


def test_a_replay_with_closures_freezes_what_is_frozen(endpoint: str) -> None:
    """While an operator is frozen, the optimizer must not see its gradients; with a closure they
    exist only within ``step``.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    frozen_with_gradient = 0

    def run_step(step: int) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(torch.full((2, 4), 0.1 * step)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    run = uuid.uuid4().hex[:8]
    with Checkpointer(
        model,
        optimizer,
        run=RunOptions(job="unit", name=run),
        daemon=endpoint,
        snapshots=SnapshotOptions(window=3),
        recovery=RecoveryOptions(freeze="drop"),
    ) as ckpt:
        for step in ckpt.steps(8):
            run_step(step)

        def watched(step: int) -> None:
            nonlocal frozen_with_gradient
            before = {p: len(optimizer.state.get(p, {})) for p in model.parameters()}
            run_step(step)
            # The optimizer begins to keep state for whatever it is given a gradient of.
            frozen_with_gradient += sum(
                not had and len(optimizer.state.get(p, {})) > 0 for p, had in before.items()
            )

        certificate = ckpt.verify(watched)
    assert certificate.identical, str(certificate)
    assert frozen_with_gradient == 0
