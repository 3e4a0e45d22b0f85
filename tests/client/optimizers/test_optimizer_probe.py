"""What an optimizer does is found by experiment: every one of torch's, and inventions that must be refused."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ckptd.client.model.live_state import LiveState
from ckptd.client.optimizers.optimizer_probe import (
    ProbeResult,
    StateSpec,
    clone_optimizer,
    observe_state,
    probe_optimizer,
    state_specs,
    unwrap_optimizer,
)
from ckptd.client.rng_state import capture_rng
from tests.e2e.precision_cases import LowAdam

Factory = Callable[[Any], torch.optim.Optimizer]
optim = torch.optim


def probe(optimizer: torch.optim.Optimizer, ndim: int = 2, dtype: torch.dtype = torch.float32) -> ProbeResult:
    return probe_optimizer(
        optimizer, optimizer.param_groups[0], ndim=ndim, dtype=dtype, device=torch.device("cpu")
    )


def made(factory: Factory, ndim: int = 2) -> torch.optim.Optimizer:
    return factory([nn.Parameter(torch.randn((3,) * ndim))])


ELEMENTWISE: dict[str, Factory] = {
    "adadelta": lambda ps: optim.Adadelta(ps),
    "adagrad": lambda ps: optim.Adagrad(ps, lr_decay=0.1),
    "adam": lambda ps: optim.Adam(ps),
    "adamw": lambda ps: optim.AdamW(ps),
    "adamw_amsgrad": lambda ps: optim.AdamW(ps, amsgrad=True),
    "adamw_foreach": lambda ps: optim.AdamW(ps, foreach=True),
    "adamw_fused": lambda ps: optim.AdamW(ps, fused=True),
    "adamax": lambda ps: optim.Adamax(ps),
    "asgd": lambda ps: optim.ASGD(ps),
    "nadam": lambda ps: optim.NAdam(ps, decoupled_weight_decay=True),
    "radam": lambda ps: optim.RAdam(ps),
    "rmsprop": lambda ps: optim.RMSprop(ps, momentum=0.9, centered=True),
    "rprop": lambda ps: optim.Rprop(ps),
    "sgd": lambda ps: optim.SGD(ps, lr=0.1),
    "sgd_momentum": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "sgd_fused": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "tensor_lr": lambda ps: optim.AdamW(ps, lr=torch.tensor(1e-3), foreach=False),
    "warm_up_from_zero": lambda ps: optim.AdamW(ps, lr=0.0),
}


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("name", list(ELEMENTWISE))
def test_elementwise_optimizers_can_be_cut_into_rows(name: str, ndim: int) -> None:
    found = probe(made(ELEMENTWISE[name], ndim), ndim)
    assert (found.independent, found.rowwise) == (True, True), found.reason


@pytest.mark.parametrize("name", list(ELEMENTWISE))
def test_a_scalar_parameter_has_no_rows(name: str) -> None:
    found = probe(made(ELEMENTWISE[name], 0), 0)
    assert (found.independent, found.rowwise) == (True, False), found.reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    assert probe(made(lambda ps: optim.AdamW(ps)), dtype=dtype).rowwise


@pytest.mark.parametrize("ndim", [2, 3])
def test_adafactor_divides_by_a_norm_of_the_whole_tensor(ndim: int) -> None:
    found = probe(made(lambda ps: optim.Adafactor(ps), ndim), ndim)
    assert (found.independent, found.rowwise) == (True, False)
    assert "not per row" in found.reason


def test_muon_orthogonalises_the_whole_matrix() -> None:
    optimizer = optim.Muon([nn.Parameter(torch.randn(3, 3))])
    found = probe(optimizer)
    assert (found.independent, found.rowwise) == (True, False)


def test_a_rank_that_the_optimizer_rejects_is_said() -> None:
    found = probe(optim.Muon([nn.Parameter(torch.randn(3, 3))]), ndim=3)
    assert not found.independent
    assert "Muon cannot be stepped on a stand-in of rank 3" in found.reason


def test_every_optimizer_of_torch_is_in_these_tests() -> None:
    """A new one in a new version deserves a look."""
    here = {type(made(f)).__name__ for f in ELEMENTWISE.values()}
    here |= {"Adafactor", "Muon", "LBFGS", "SparseAdam", "Optimizer"}
    assert {n for n in dir(optim) if isinstance(getattr(optim, n), type)} <= here


# -- refused -------------------------------------------------------------------------------------


class Prodigy(torch.optim.Optimizer):
    """Its step size comes from a sum over all parameters (as in Prodigy and D-Adaptation)."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0, "d": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            group["d"] = max(group["d"], 1e-2 * sum(p.grad.norm().item() for p in params))
            for p in params:
                p.sub_(p.grad, alpha=group["lr"] * group["d"])


class ClipsGlobally(torch.optim.SGD):
    """Clips by the norm of all gradients inside its step (as LAMB implementations do)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        nn.utils.clip_grads_with_norm_(
            [p for g in self.param_groups for p in g["params"]], 0.1, nn.utils.get_total_norm(grads)
        )
        super().step()


class RoundsStochastically(torch.optim.SGD):
    """Adds noise from the global generator: what one parameter draws depends on who drew before it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(torch.rand_like(p), alpha=1e-4)


class CountsParameters(torch.optim.SGD):
    """Its update depends on how many parameters there are."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / len(group["params"]))


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        (Prodigy, "Prodigy: the update of one parameter depends on other parameters' gradients"),
        (lambda ps: ClipsGlobally(ps, lr=0.1), "ClipsGlobally: .* other parameters' gradients"),
        (
            lambda ps: RoundsStochastically(ps, lr=0.1),
            "RoundsStochastically: .* whether other parameters have gradients",
        ),
        (
            lambda ps: CountsParameters(ps, lr=0.1),
            "CountsParameters: .* which other parameters there are",
        ),
        (lambda ps: optim.LBFGS(ps), "LBFGS cannot be stepped on a stand-in of rank 2"),
        (lambda ps: optim.SparseAdam(ps), "SparseAdam cannot be stepped .*dense gradients"),
    ],
    ids=["prodigy", "clips", "rounds", "counts", "lbfgs", "sparse_adam"],
)
def test_refused_with_what_was_seen(factory: Factory, reason: str) -> None:
    found = probe(made(factory))
    assert not found.independent
    assert not found.rowwise
    assert re.search(reason, found.reason), found.reason


class RowNormalised(torch.optim.SGD):
    """Divides by a norm over dimension 0: independent per parameter, not per row."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / (1 + p.grad.norm(dim=0)))


class Thresholds(torch.optim.SGD):
    """Behaves elementwise until a gradient is large: only an experiment with large ones sees the dependence."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / max(1.0, p.grad.norm().item() / 10))


@pytest.mark.parametrize("kind", [RowNormalised, Thresholds])
def test_dependence_between_rows_is_seen(kind: type[torch.optim.SGD]) -> None:
    found = probe(made(lambda ps: kind(ps, lr=0.1)))
    assert (found.independent, found.rowwise) == (True, False)


# -- it leaves no trace --------------------------------------------------------------------------


def test_the_users_generators_parameters_state_and_hooks_are_untouched() -> None:
    param = nn.Parameter(torch.randn(3, 3))
    optimizer = RoundsStochastically([param], lr=0.1, momentum=0.9)
    param.grad = torch.ones_like(param)
    optimizer.step()
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    weight, momentum = param.detach().clone(), optimizer.state[param]["momentum_buffer"].clone()
    grad, group = param.grad, dict(optimizer.param_groups[0])
    torch.rand(1), np.random.rand(), random.random()
    rng = capture_rng()
    probe(optimizer)
    assert capture_rng() == rng
    assert torch.equal(param, weight)
    assert param.grad is grad
    assert torch.equal(optimizer.state[param]["momentum_buffer"], momentum)
    assert len(optimizer.state) == 1
    assert optimizer.param_groups[0] == group
    assert calls == []


def test_generators_are_restored_even_when_the_probe_fails() -> None:
    class Breaks(optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            torch.rand(1), np.random.rand(), random.random()
            raise RuntimeError("no kernel")

    optimizer = made(lambda ps: Breaks(ps, lr=0.1))
    rng = capture_rng()
    found = probe(optimizer)
    assert capture_rng() == rng
    assert found.reason.endswith("RuntimeError: no kernel")


def test_options_that_the_step_changes_are_the_clones_own() -> None:
    """Prodigy writes into its group: a tensor or list in the options must not be shared with the clone."""
    optimizer = Prodigy([nn.Parameter(torch.randn(3, 3))])
    optimizer.param_groups[0]["scale"] = torch.ones(())
    optimizer.param_groups[0]["log"] = []
    clone = clone_optimizer(optimizer, optimizer.param_groups[0], [nn.Parameter(torch.ones(2))])
    clone.param_groups[0]["scale"].add_(1)
    clone.param_groups[0]["log"].append(1)
    assert optimizer.param_groups[0]["scale"] == 1
    assert optimizer.param_groups[0]["log"] == []


def test_a_scheduler_wraps_step_in_the_instance_and_the_probe_does_not_call_it() -> None:
    """``lr_scheduler`` replaces ``optimizer.step`` by a counter bound to the original: stepping a
    clone through it would step the user's optimizer.
    """
    param = nn.Parameter(torch.randn(3, 3))
    optimizer = optim.AdamW([param], lr=0.1)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 5)
    assert "step" in vars(optimizer)
    param.grad = torch.ones_like(param)
    before = param.detach().clone()
    assert probe(optimizer).rowwise
    assert torch.equal(param, before)
    assert len(optimizer.state) == 0
    optimizer.step()
    scheduler.step()
    assert optimizer._opt_called  # type: ignore[attr-defined]


# -- state ---------------------------------------------------------------------------------------


def test_state_is_classified() -> None:
    param = torch.zeros(2, 3)
    state: dict[str, Any] = {
        "step": torch.tensor(1.0),
        "exp_avg": torch.zeros(2, 3, dtype=torch.bfloat16),
        "row_var": torch.zeros(2, 1),
        "count": 3,
        "later": None,
    }
    assert state_specs(param, state) == (
        StateSpec("step", "scalar", torch.float32, on_host=True),
        StateSpec("exp_avg", "like", torch.bfloat16),
        StateSpec("row_var", "tensor", torch.float32, (2, 1)),
        StateSpec("count", "python"),
        StateSpec("later", "none"),
    )


def test_a_scalar_parameters_state_is_scalar() -> None:
    assert [s.kind for s in state_specs(torch.zeros(()), {"m": torch.zeros(())})] == ["scalar"]


def test_the_state_to_come_is_known_before_the_first_step() -> None:
    found = probe(made(lambda ps: optim.AdamW(ps, amsgrad=True)))
    assert [(s.key, s.kind) for s in found.state] == [
        ("step", "scalar"),
        ("exp_avg", "like"),
        ("exp_avg_sq", "like"),
        ("max_exp_avg_sq", "like"),
    ]


def test_shapes_of_factored_state_are_observed_on_the_true_shape() -> None:
    param = nn.Parameter(torch.randn(5, 7))
    optimizer = optim.Adafactor([param])
    rng = capture_rng()
    specs = {s.key: s for s in observe_state(optimizer, optimizer.param_groups[0], param)}
    assert specs["row_var"].shape == (5, 1)
    assert specs["col_var"].shape == (1, 7)
    assert len(optimizer.state) == 0
    assert param.grad is None
    assert capture_rng() == rng


# -- wrappers ------------------------------------------------------------------------------------


class Wrapper:
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


def test_wrappers_are_opened() -> None:
    inner = made(lambda ps: optim.SGD(ps, lr=0.1))
    assert unwrap_optimizer(Wrapper(Wrapper(inner))) is inner


def test_an_optimizer_that_was_never_initialized_as_one_is_looked_into() -> None:
    """torch's PostLocalSGDOptimizer is one by its class, and has no hooks."""
    inner = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)

    class Uninitialized(torch.optim.SGD):
        def __init__(self) -> None:
            self.optim, self.param_groups = inner, inner.param_groups

    assert unwrap_optimizer(Uninitialized()) is inner


def test_what_is_no_optimizer_is_named() -> None:
    with pytest.raises(ValueError, match=r"Tensor is not a torch\.optim\.Optimizer"):
        unwrap_optimizer(Tensor())


def test_a_wrapper_of_itself_is_not_followed_for_ever() -> None:
    wrapper = Wrapper(None)
    wrapper.optimizer = wrapper
    with pytest.raises(ValueError, match=r"Wrapper is not a torch\.optim\.Optimizer"):
        unwrap_optimizer(wrapper)


def test_dependent_optimizers_are_reported_once_each() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    binding = LiveState(model, [Prodigy(model.parameters())], None)
    assert len(binding.dependent()) == 1
    assert LiveState(model, [optim.AdamW(model.parameters())], None).dependent() == []


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_masters_in_fp8(dtype: torch.dtype) -> None:
    """There is no arithmetic in these dtypes; the probe's own failed."""
    optimizer = LowAdam([nn.Parameter(torch.zeros(2, 2).to(dtype))], 0.1, dtype, torch.float16)
    found = probe(optimizer, dtype=dtype)
    assert (found.independent, found.rowwise) == (True, False), found.reason
    moments = {s.key: s.dtype for s in found.state if s.kind == "like"}
    assert moments == {"first": dtype, "second": torch.float16}
