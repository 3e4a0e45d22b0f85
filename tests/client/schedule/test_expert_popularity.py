"""Counting tokens per expert: by hooks, once per token, for lists and for fused experts."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from ckptd.client.model.operators import Operator, discover_operators
from ckptd.client.schedule.expert_popularity import TokenCounter
from ckptd.core.schedule import Ordering


class Listed(nn.Module):
    """Sends token ``t`` to expert ``t % 3``."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.arange(len(x)) % 3
        return torch.cat([e(x[chosen == i]) for i, e in enumerate(self.experts) if (chosen == i).any()])


class FusedExperts(nn.Module):
    """Called as Hugging Face calls them: hidden states, chosen experts, their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 3
        self.down_proj = nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return (torch.einsum("td,tkdf->tkf", x, self.down_proj[chosen]) * weights[..., None]).sum(1)


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = FusedExperts()

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.tensor([[0, 2], [0, 1], [0, 2]])
        weights = torch.tensor([[0.75, 0.25], [0.5, 0.5], [1.0, 0.0]])
        out: Tensor = self.experts(x, chosen=chosen, weights=weights)
        return out


def counter(model: nn.Module, ordering: Ordering = Ordering.HARD) -> tuple[TokenCounter, list[Operator]]:
    operators = discover_operators(model, rows_allowed=lambda name: True)
    return TokenCounter(model, operators, ordering), operators


def counts(found: tuple[TokenCounter, list[Operator]]) -> dict[str, float]:
    popular = found[0].popularity(found[1])
    return {
        op.name.rpartition(".")[2]: value
        for op, value in zip(found[1], popular, strict=True)
        if op.expert is not None
    }


def test_listed_experts_count_their_rows() -> None:
    model = Listed()
    found = counter(model)
    model(torch.ones(7, 4))
    assert counts(found) == {"0": 3.0, "1": 2.0, "2": 2.0}


def test_fused_experts_count_the_choices() -> None:
    model = Fused()
    found = counter(model)
    model(torch.ones(3, 4))
    assert counts(found) == {"0": 3.0, "1": 1.0, "2": 2.0}


def test_choices_of_experts_on_other_ranks_count_for_none_here() -> None:
    """Of a sharded tensor this rank has the first two experts; tokens of the third once counted for
    the second.
    """
    model = Fused()
    operators = [
        op
        for op in discover_operators(model, rows_allowed=lambda name: True)
        if op.expert is None or op.expert[1] < 2
    ]
    found = TokenCounter(model, operators, Ordering.HARD), operators
    model(torch.ones(3, 4))
    assert counts(found) == {"0": 3.0, "1": 1.0}


def test_soft_counts_are_the_gates_weights() -> None:
    model = Fused()
    found = counter(model, Ordering.SOFT)
    model(torch.ones(3, 4))
    assert counts(found) == {"0": 2.25, "1": 0.5, "2": 0.25}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", [Listed, Fused])
def test_recomputation_is_not_counted_again(kind: type[nn.Module], reentrant: bool) -> None:
    """Checkpointing runs the forward a second time inside the backward."""
    model = kind()
    found = counter(model)
    x = torch.ones(3, 4, requires_grad=True)
    checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert sum(counts(found).values()) == (3 if kind is Listed else 6)


def test_what_is_no_expert_has_no_popularity() -> None:
    model = Listed()
    found, operators = counter(model)
    model(torch.ones(3, 4))
    popular = found.popularity(operators)
    assert [v for op, v in zip(operators, popular, strict=True) if op.expert is None] == [0.0]


def test_disabled_it_counts_nothing() -> None:
    """Replayed steps were counted when they first ran."""
    model = Fused()
    found = counter(model)
    found[0].enabled = False
    model(torch.ones(3, 4))
    assert set(counts(found).values()) == {0.0}


def test_closed_it_leaves_no_hook_and_copies_never_count() -> None:
    model = Listed()
    found = counter(model)
    twin = copy.deepcopy(model)
    twin(torch.ones(3, 4))
    assert set(counts(found).values()) == {0.0}
    found[0].close()
    assert not any(m._forward_pre_hooks for m in model.modules())


def compiled_block(model: nn.Module) -> nn.Module:
    block = torch.compile(model, fullgraph=True, backend="eager")
    assert isinstance(block, nn.Module)
    return block


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(fullgraph=True, backend="eager")
    return model


@pytest.mark.parametrize("compiled", [compiled_block, compiled_in_place])
def test_a_compiled_block_runs_as_if_nobody_counted(
    compiled: Callable[[nn.Module], nn.Module],
) -> None:
    """Its graph was to hold our hook as well, and with ``fullgraph=True`` that was an error at the
    first step.
    """
    model = nn.Sequential(Fused())
    expected = model(torch.ones(3, 4))
    counting, operators = counter(model)
    model[0] = compiled(model[0])
    assert torch.equal(model(torch.ones(3, 4)), expected)
    assert not any(counting.popularity(operators))
    counting.close()


def test_a_first_forward_in_inference_mode_or_of_shapes_only_spoils_no_later_one() -> None:
    """The counter was made there: the first training step added to it and raised."""
    model = Fused()
    counting, operators = counter(model)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.ones(3, 4))
    with torch.inference_mode():
        model(torch.ones(3, 4))
    model(torch.ones(3, 4)).sum().backward()
    assert sum(counting.popularity(operators)) == 12
    counting.close()


def test_a_model_that_cannot_be_counted_trains_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Fused()
    counting, operators = counter(model)
    counting._fused = {}  # whatever it is that the hook stumbles over
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
    assert not any(counting.popularity(operators))
    assert caplog.text.count("not counted any more") == 1
    counting.close()


class SomeOfThem(nn.Module):
    """The experts that a rank of an elastic layer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 9
        self.experts = nn.ModuleDict({str(n): nn.Linear(4, 4) for n in (3, 7)})

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.experts["3"](x[:1]), self.experts["7"](x[1:])])


def test_experts_count_by_their_number_in_the_layer() -> None:
    model = SomeOfThem()
    operators = discover_operators(model, rows_allowed=lambda name: True)
    counter = TokenCounter(model, operators, Ordering.HARD)
    model(torch.zeros(5, 4))
    assert dict(zip([op.name for op in operators], counter.popularity(operators), strict=True)) == {
        "experts.3": 1.0,
        "experts.7": 4.0,
    }
