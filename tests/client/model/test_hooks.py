"""Patches of torch stack, and are undone in any order: two checkpointers may live at once and end
as they like.
"""

from __future__ import annotations

import copy
import functools
import pickle
import threading
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckptd.client import Checkpointer, RecoveryOptions, RunOptions, SnapshotOptions
from ckptd.client.model.hooks import ModuleHook, before_update, layered


def adding(word: str) -> Callable[..., Any]:
    def layer(below: Callable[..., list[str]], *args: Any) -> list[str]:
        return [word, *below(*args)]

    return layer


class Holder:
    """Has every kind of function that is stood in for."""

    @staticmethod
    def static(x: str) -> list[str]:
        return [x]

    def method(self, x: str) -> list[str]:
        assert isinstance(self, Holder)
        return [x]


def of_module() -> tuple[Any, str, Callable[[], list[str]]]:
    module = SimpleNamespace(function=lambda x: [x])
    return module, "function", lambda: module.function("x")


def of_static() -> tuple[Any, str, Callable[[], list[str]]]:
    return Holder, "static", lambda: Holder.static("x")


def of_class() -> tuple[Any, str, Callable[[], list[str]]]:
    return Holder, "method", lambda: Holder().method("x")


def of_object() -> tuple[Any, str, Callable[[], list[str]]]:
    holder = Holder()
    return holder, "method", lambda: holder.method("x")


@pytest.mark.parametrize("kind", [of_module, of_static, of_class, of_object])
@pytest.mark.parametrize("first_out", ["a", "b"])
def test_any_order_of_leaving(
    kind: Callable[[], tuple[Any, str, Callable[[], list[str]]]], first_out: str
) -> None:
    holder, name, call = kind()
    before = dict(vars(holder))
    users = {"a": ExitStack(), "b": ExitStack()}
    for word, user in users.items():
        user.enter_context(layered(holder, name, adding(word)))
    assert call() == ["b", "a", "x"]
    users.pop(first_out).close()
    ((left, user),) = users.items()
    assert call() == [left, "x"]
    user.close()
    assert dict(vars(holder)) == before


def test_the_same_layer_twice_is_two_users() -> None:
    holder, name, call = of_module()
    layer = adding("a")
    with layered(holder, name, layer):
        with layered(holder, name, layer):
            assert call() == ["a", "a", "x"]
        assert call() == ["a", "x"]


def test_somebody_elses_patch_above_is_left_alone() -> None:
    """It may have copied our mark, as ``functools.wraps`` does. Who comes later lies above it; what
    stays below it is inert.
    """
    holder, name, call = of_module()
    with layered(holder, name, adding("a")):
        ours = holder.function

        @functools.wraps(ours)
        def theirs(x: str) -> list[str]:
            return ["theirs", *ours(x)]

        holder.function = theirs
        with layered(holder, name, adding("b")):
            assert call() == ["b", "theirs", "a", "x"]
        assert holder.function is theirs
    assert holder.function is theirs
    assert call() == ["theirs", "x"]
    with layered(holder, name, adding("c")):
        assert call() == ["c", "theirs", "x"]


class Owner:
    """Like a checkpointer, it holds what can be neither copied nor pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls = 0

    def called(self, module: nn.Module, args: object) -> None:
        self.calls += 1


def test_only_the_module_itself_calls() -> None:
    owner, module = Owner(), nn.Linear(2, 2)
    module.register_forward_pre_hook(ModuleHook(owner.called))
    twins = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    module(torch.ones(2))
    assert owner.calls == 1
    for twin in twins:
        assert torch.equal(twin(torch.ones(2)), module(torch.ones(2)))
    assert owner.calls == 3


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
