"""``ElasticExperts`` on four ranks of gloo, against one layer that holds all experts and computes all tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ckptd.client.elastic import ElasticExperts
from tests.client.elastic.layer_ranks import CASES, SPREAD, run_all
from tests.client.elastic.mixtures import (
    Batch,
    Block,
    Case,
    batches,
    descend,
    expert,
    reference_output,
)
from tests.client.elastic.ranks import Found
from tests.client.gloo_ranks import run_in_ranks
from tests.long import long

RANKS = 4
# Of sums of a few dozen products, in other orders.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("layer")
    run_in_ranks(run_all, RANKS, folder, str(folder))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


@pytest.fixture(autouse=True)
def _alone() -> None:
    torch.set_num_threads(1)


def _reference(case: Case) -> list[Found]:
    """What each rank should find."""
    experts = [expert(n, case.dtype, trained=case.trained) for n in range(case.num_experts)]
    found: list[Found] = [{"outs": [], "inputs": []} for _ in case.tokens]
    for micro_batch in range(case.micro_batches):
        brought = batches(case, micro_batch)
        whole = Batch(*(torch.cat([getattr(b, name) for b in brought]) for name in Batch.__annotations__))
        out = whole.tokens
        for _ in range(case.layers):
            out = reference_output(experts, whole, out)
        if out.requires_grad:
            (out * whole.target).sum().backward()
        for one, batch, part in zip(found, brought, out.detach().split(list(case.tokens)), strict=True):
            one["outs"].append(part)
            one["inputs"].append((batch.tokens.grad, batch.weights.grad))
    divisor = len(case.tokens) if case.reduce == "mean" else 1
    for one, held in zip(found, case.replicas, strict=True):
        one["experts"] = {
            n: [None if p.grad is None else p.grad / divisor for p in experts[n].parameters()]
            for n, replicas in enumerate(held)
            if replicas
        }
    return found


def _close(found: Any, wanted: Any, dtype: torch.dtype) -> bool:
    """Whether both have the same structure, and tensors that are equal but for the order of sums."""
    if isinstance(wanted, Tensor):
        tolerance = TOLERANCES[dtype]
        return isinstance(found, Tensor) and torch.allclose(found, wanted, rtol=tolerance, atol=tolerance)
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(_close(found[key], wanted[key], dtype) for key in wanted)
    if isinstance(wanted, Sequence):
        return len(found) == len(wanted) and all(
            _close(f, w, dtype) for f, w in zip(found, wanted, strict=True)
        )
    return found is None and wanted is None


@pytest.mark.parametrize("name", CASES)
def test_it_equals_the_layer_that_is_not_replicated(found: list[Found], name: str) -> None:
    """Outputs, gradients of tokens and weights, and of every replica of every expert."""
    case = CASES[name]
    for rank, wanted in zip(case.members, _reference(case), strict=True):
        here = found[rank][name][0]
        for what in ("outs", "inputs", "experts"):
            assert _close(here[what], wanted[what], case.dtype), f"{what} of rank {rank}"


@pytest.mark.parametrize("name", CASES)
def test_a_repeat_has_the_same_bits_and_so_have_all_replicas(found: list[Found], name: str) -> None:
    gradients: dict[int, list[Tensor | None]] = {}
    for rank in CASES[name].members:
        first, second = found[rank][name]
        assert _equal(first, second)
        for number, grads in first["experts"].items():
            assert _equal(gradients.setdefault(number, grads), grads)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return all(_equal(a, b) for a, b in zip(one, other, strict=True))
    return one is None and other is None


def test_the_comparison_notices_what_is_sent_or_summed_twice(found: list[Found]) -> None:
    """The negative control."""
    wanted = _reference(SPREAD)
    twice = [one["_faults"]["sent twice"] for one in found]
    assert not _close(twice[0]["outs"], wanted[0]["outs"], SPREAD.dtype)
    assert not _close(twice[0]["inputs"], wanted[0]["inputs"], SPREAD.dtype)
    again = [one["_faults"]["summed twice"] for one in found]
    for here, right in zip(again, wanted, strict=True):
        assert _close(here["outs"], right["outs"], SPREAD.dtype)
        assert not _close(here["experts"], right["experts"], SPREAD.dtype)


def test_an_expert_that_no_token_asked_for_has_no_gradient(found: list[Found]) -> None:
    """Else an optimizer would let its momentum and its weights decay."""
    name = "an expert without tokens"
    grads = [found[rank][name][0]["experts"].get(2) for rank in range(RANKS)]
    assert [one for one in grads if one is not None] == [[None] * 3]
    for rank in (2, 3):
        assert found[rank][name][0]["experts"][4] == [None] * 3


@long
def test_beside_ddp_all_gradients_are_of_the_mean_of_the_losses(found: list[Found]) -> None:
    case = CASES["mean"]
    experts = nn.ModuleList([expert(n, case.dtype) for n in range(case.num_experts)])

    class Together(nn.Module):
        def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            batch = Batch(tokens, chosen, weights, tokens)
            return reference_output(list(experts), batch, tokens)

    model = Block(Together())
    for batch in batches(case):
        (model(batch.tokens) * batch.target).sum().div(RANKS).backward()
    wanted = {n: p.grad for n, p in model.named_parameters()}
    wanted |= {f"experts.experts.{n}": p.grad for n, p in experts.named_parameters()}
    for one in found:
        here = one["_beside_ddp"]
        assert _close(here, {name: wanted[name] for name in here}, case.dtype)
        assert {"dense.weight", "gate.weight"} < here.keys()


def test_a_layer_that_is_converted_sums_in_its_new_dtype(found: list[Found]) -> None:
    experts = [expert(n, torch.float32).double() for n in range(SPREAD.num_experts)]
    for batch in batches(SPREAD):
        (reference_output(experts, batch, batch.tokens) * batch.target).sum().backward()
    for one in found:
        for number, grads in one["_converted"].items():
            wanted = [param.grad for param in experts[number].parameters()]
            assert _close(grads, wanted, torch.float64)


def test_training_keeps_replicas_equal_and_as_without_them(found: list[Found]) -> None:
    experts = nn.ModuleList([expert(n, SPREAD.dtype) for n in range(SPREAD.num_experts)])
    for step in range(3):
        experts.zero_grad()
        for batch in batches(SPREAD, step):
            (reference_output(list(experts), batch, batch.tokens) * batch.target).sum().backward()
        descend(experts)
    for rank, one in enumerate(found):
        for number, params in one["_training"]["weights"].items():
            for here, wanted in zip(params, experts[number].parameters(), strict=True):
                assert torch.allclose(here, wanted, rtol=1e-9, atol=1e-9), (rank, number)


def test_a_replica_that_differs_is_named_on_all_ranks(found: list[Found]) -> None:
    for one in found:
        assert "expert 3=ranks [0, 1, 2, 3]" in one["_training"]["damaged"]


def test_weights_that_were_changed_by_gradients_not_summed_are_noticed(found: list[Found]) -> None:
    for one in found:
        told = one["_misuse"]["not summed"]
        assert all(f"rank {rank}: " in told for rank in range(RANKS))
        assert "call sync_gradients() after each backward" in told


def test_gradients_that_would_be_summed_again_are_noticed(found: list[Found]) -> None:
    for one in found:
        assert "call zero_grad() before the next backward" in one["_misuse"]["not zeroed"]
        assert not one["_misuse"]["zeroed in place"]
        first, second = one["_misuse"]["second call"]
        assert _equal(first, second)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no holder", "no rank holds expert 1"),
        ("other placement", "rank 3: another placement than rank 0"),
        ("other nodes", "another placement than rank 0"),
        ("other reduce", "rank 1: another placement than rank 0"),
        ("no such reduce", "rank 1: reduce='max': choose 'mean' or 'sum'"),
        ("too few rows", "rank 0: replicas_RE has the shape (3, 2)"),
        ("floats", "rank 0: replicas_RE must be integers"),
        ("too few nodes", "nodes names the nodes of 1 ranks, and there are 4"),
        ("other modules", "rank 1: replicas_RE places expert 1 here, but experts has no such"),
        ("no modules", "rank 1: experts must be a dict"),
        ("other parameters", "rank 2: expert 1 has other parameters than on rank 1"),
        ("other weights", "the replicas of expert 0 on ranks [0, 2] have different weights"),
        ("shared parameter", "rank 2: experts 0 and 1 share the parameter 0.weight"),
    ],
)
def test_all_ranks_are_told_why_the_layer_cannot_be_made(found: list[Found], name: str, words: str) -> None:
    told = {one["_refused"][name] for one in found}
    assert len(told) == 1, "all ranks raise the same error"
    assert words in told.pop()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no such expert", "rank 1: a token is routed to an expert that there is not"),
        ("negative", "rank 1: a token is routed to an expert that there is not"),
        ("other rows", "rank 1: experts are not a tensor [T, K]"),
        ("float experts", "rank 1: experts are not a tensor [T, K]"),
        ("one dimension", "rank 1: experts are not a tensor [T, K]"),
        ("other weights", "rank 1: weights are not floating point of the shape of experts"),
        ("three dimensions", "rank 1: tokens are not a tensor [T, H]"),
        ("other width", "other widths (rank 0: 6, rank 1: 2, rank 2: 6, rank 3: 6)"),
        ("other dtype", "other dtypes (rank 0: torch.float64, rank 1: torch.float32"),
        ("without gradients", "some run it with gradients, some without"),
        ("fine afterwards", ""),
    ],
)
def test_all_ranks_are_told_why_a_call_cannot_be_computed(found: list[Found], name: str, words: str) -> None:
    told = {one["_bad_inputs"][name] for one in found}
    assert len(told) == 1, "all ranks raise the same error"
    assert words in told.pop() if words else told == {""}


def test_loads_are_those_of_all_ranks_since_the_last_call_while_training(
    found: list[Found],
) -> None:
    routed = torch.cat([b.experts for step in range(2) for b in batches(SPREAD, step)])
    counts = torch.bincount(routed.flatten(), minlength=SPREAD.num_experts)
    for one in found:
        assert torch.equal(one["_loads"]["loads"], counts)
        assert torch.equal(one["_loads"]["evaluated"], torch.zeros_like(counts))


def test_without_a_process_group_it_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="call init_process_group"):
        ElasticExperts(nn.ModuleList([nn.Identity()]), np.array([[1]]))
