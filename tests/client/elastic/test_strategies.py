"""Optimizers on replicas and on shards, and blocks of models, on three ranks of gloo, against what
is not replicated and in one place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.client.elastic.block_models import (
    HAND_WRITTEN,
    PLACEMENT,
    Model,
    batch,
    loss,
)
from tests.client.elastic.mixtures import Batch, Case, batches, expert, reference_output
from tests.client.elastic.ranks import Found
from tests.client.elastic.strategy_ranks import (
    OPTIMIZERS,
    PLACEMENTS,
    RANKS,
    TRAINED,
    run_all,
)
from tests.client.gloo_ranks import run_in_ranks

# Of sums of a few dozen products in other orders, over five steps.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("strategies")
    run_in_ranks(run_all, RANKS, folder, str(folder))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


@pytest.fixture(autouse=True)
def _alone() -> None:
    torch.set_num_threads(1)


def _reference(case: Case, optimizer: str) -> Iterator[list[list[Tensor]]]:
    """The weights of all experts after each step."""
    experts = nn.ModuleList([expert(n, case.dtype) for n in range(case.num_experts)])
    made = OPTIMIZERS[optimizer](experts.parameters())
    for step in range(len(PLACEMENTS)):
        _backward(case, experts, step)
        made.step()
        made.zero_grad()
        yield [[p.detach().clone() for p in one.parameters()] for one in experts]


def _backward(case: Case, experts: nn.ModuleList, step: int) -> None:
    divisor = RANKS if case.reduce == "mean" else 1
    for micro_batch in range(case.micro_batches):
        for one in batches(case, 10 * step + micro_batch):
            used = Batch(one.tokens, one.experts, one.weights, one.target)
            out = reference_output(list(experts), used, used.tokens)
            ((out * used.target).sum() / divisor).backward()


# -- strategies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRAINED)
def test_shards_train_as_optimizers_on_replicas_do_bit_for_bit(found: list[Found], name: str) -> None:
    """Over five steps with four placements: sums are added in one order in both."""
    for one in found:
        for step, (replicas, shards) in enumerate(
            zip(one[name]["replicas"], one[name]["shards"], strict=True)
        ):
            assert _equal(shards, replicas), f"step {step}"


@pytest.mark.parametrize("name", [n for n, (case, _) in TRAINED.items() if case.dtype in TOLERANCES])
def test_shards_train_as_what_is_not_replicated(found: list[Found], name: str) -> None:
    case, optimizer = TRAINED[name]
    tolerance = TOLERANCES[case.dtype]
    for step, wanted in enumerate(_reference(case, optimizer)):
        for rank, one in enumerate(found):
            here = one[name]["shards"][step]
            assert list(here) == [e for e, n in enumerate(PLACEMENTS[step][rank]) if n]
            for number, params in here.items():
                for param, right in zip(params, wanted[number], strict=True):
                    assert torch.allclose(param, right, rtol=tolerance, atol=tolerance)


def test_many_rounds_exchange_what_one_does(found: list[Found]) -> None:
    for rank, one in enumerate(found):
        assert _equal(one["_rounds"]["trained"], one["AdamW"]["shards"])
        wanted = dict(Model(torch.float32).state_dict())
        assert _equal(one["_rounds"]["full"], {} if rank else wanted)


def test_an_expert_without_tokens_is_not_touched(found: list[Found]) -> None:
    """No weight decay, no momentum; and it moves all the same."""
    name = "an expert without tokens"
    first = [p.detach() for p in expert(2, torch.float64).parameters()]
    held = [one[name]["shards"][step].get(2) for one in found for step in range(len(PLACEMENTS))]
    assert sum(one is not None for one in held) == sum(
        each[r][2] > 0 for each in PLACEMENTS for r in range(RANKS)
    )
    assert all(_equal(one, first) for one in held if one is not None)
    others = found[0][name]["shards"][-1][0]
    assert not _equal(others, [p.detach() for p in expert(0, torch.float64).parameters()])


def test_masters_are_trained_and_rounded_into_the_weights(found: list[Found]) -> None:
    case, _ = TRAINED["bfloat16"]
    whole: dict[str, Tensor] = {
        name: torch.cat([one["_masters"]["shards"][name] for one in found])
        for name in found[0]["_masters"]["shards"]
    }
    rounded_apart = 0
    for one in found:
        for number, params in one["_masters"]["weights"].items():
            module = expert(number, case.dtype)
            for (name, like), param in zip(module.named_parameters(), params, strict=True):
                master = whole[f"shards.experts.{number}.{name}"]
                assert master.dtype is torch.float32
                flat = master[: like.numel()]
                assert torch.equal(flat.to(torch.bfloat16).view(like.shape), param)
                rounded_apart += int((flat.to(torch.bfloat16).float() != flat).sum())
    assert rounded_apart, "the masters know more than the weights"


def test_the_norm_over_all_experts_counts_each_of_them_once(found: list[Found]) -> None:
    case, _ = TRAINED["SGD with momentum"]
    experts = nn.ModuleList([expert(n, case.dtype) for n in range(case.num_experts)])
    _backward(case, experts, 0)
    wanted = sum(p.grad.square().sum() for p in experts.parameters() if p.grad is not None)
    for one in found:
        assert torch.allclose(one["_norm"], torch.as_tensor(wanted), rtol=1e-12)


def test_gradients_that_are_reduced_in_parts_add_up(found: list[Found]) -> None:
    for one in found:
        parts, whole = one["_parts"]
        assert parts.keys() == whole.keys()
        assert len(whole) == 5 * 3
        for name, grad in whole.items():
            assert torch.allclose(parts[name], grad, rtol=1e-12, atol=1e-12)


def test_experts_outside_the_module_tree_follow_train_and_eval(found: list[Found]) -> None:
    for one in found:
        assert one["_modes"] == [{False}, {False}, {True}]


def test_shards_are_saved_and_cut_for_another_number_of_ranks(found: list[Found]) -> None:
    for rank, one in enumerate(found):
        saved = one["_saved"]
        for key in ("kept", "again"):
            assert _equal(saved[f"on from {key}"], saved["on"]), f"rank {rank}, {key}"
        assert "these are the shards of rank" in saved["of another rank"]
        assert "were cut for 5 ranks, and there are 3: recut() them" in saved["of five ranks"]
    kept, five = found[0]["_saved"]["kept"], found[0]["_saved"]["five"]
    name = "shards.moe.experts.3.0.weight"
    numel = kept[0][0]["_extra_state"]["numels"][name]
    assert numel == 48
    assert [len(one[name]) for one, _ in five] == [10] * 5
    for states in (kept, five):
        place = states[0][0]["_extra_state"]["places"][name]
        assert all(len(s["state"][place]["exp_avg"]) == len(w[name]) for w, s in states)
    assert torch.equal(
        torch.cat([w[name] for w, _ in kept])[:numel], torch.cat([w[name] for w, _ in five])[:numel]
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no layers", "layers must be an ElasticExperts or a dict of them"),
        ("other layers", "rank 2: other layers or masters than rank 0"),
        ("not elementwise", "must update each element by itself, and does not"),
        ("other options", "rank 2: other options of the optimizer than rank 0"),
        ("no optimizer", "rank 1: make_optimizer returned a NoneType"),
        ("a user's error", "rank 0: ZeroDivisionError"),
        ("strange parameters", "holds 9 other parameters"),
        ("buffers", "expert 0 of 'experts' has buffers"),
        ("gradients", "has a gradient: call zero_grad() before"),
        ("as before", "True"),
        ("twice", "has ExpertShards already"),
        ("summed", "call step() of these instead of sync_gradients()"),
        ("converted", "convert or move the model before they are made"),
        ("other placements", "other placements than rank 0"),
        ("one places", "rank 1: other placements than rank 0"),
        ("no holder", "no rank holds expert 4"),
        ("more layers", "placements of 2 layers, and there are 1"),
        ("no such layer", "there is no layer 'moe'; names are like 'experts'"),
        ("more experts", "has the shape (3, 6), and the layer (3, 5)"),
        ("unchanged", "True"),
        ("no pattern", "rank 1: there is no expert of 'experts' of which the module could be"),
        ("other form", "has other parameters than the expert: pass make_expert="),
        ("fine afterwards", "True"),
    ],
)
def test_all_ranks_are_told_what_cannot_be_done(found: list[Found], name: str, words: str) -> None:
    told = [one["_refused"][name] for one in found]
    assert len(set(told)) == 1, "all ranks raise the same error"
    assert words in told[0]


# -- blocks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_model_with_elastic_blocks_equals_the_model(found: list[Found], dtype: torch.dtype) -> None:
    """Gradients of all parameters and of the input, and the gates' logits, of which the loss has a part."""
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4}[dtype]
    model = Model(dtype)
    whole: dict[str, Tensor] = {}
    for rank, one in enumerate(found):
        here = one["_blocks"][str(dtype)]
        model.zero_grad()
        hidden = batch(rank, dtype).requires_grad_()
        loss(model, hidden).backward()
        assert hidden.grad is not None
        assert torch.allclose(here["hidden"], hidden.grad, rtol=tolerance, atol=tolerance)
        for logits, right in zip(here["logits"], model.logits, strict=True):
            assert torch.allclose(logits, right, rtol=tolerance, atol=tolerance)
        for name, param in model.named_parameters():
            if "experts." in name or "ffn." in name:
                # Of a list, an expert without tokens of this rank has none.
                part = torch.zeros_like(param) if param.grad is None else param.grad
                whole[name] = whole.get(name, torch.zeros_like(param)) + part / RANKS
            else:
                assert param.grad is not None
                assert torch.allclose(here["grads"][name], param.grad, rtol=tolerance, atol=tolerance)
    for one in found:
        _check_experts(one["_blocks"][str(dtype)]["grads"], whole, tolerance)


def _check_experts(grads: dict[str, Tensor], whole: dict[str, Tensor], tolerance: float) -> None:
    checked = 0
    for name, grad in grads.items():
        path, _, rest = name.partition(".experts.experts." if "blocks.2" not in name else ".ffn.experts.")
        if not rest:
            continue
        number, _, leaf = rest.partition(".")
        if "blocks.2" in name:
            wanted = whole[f"{path}.ffn.{number}.{leaf}"]
        else:
            wanted = whole[f"{path}.experts.{leaf}"][int(number)]
        assert torch.allclose(grad, wanted, rtol=tolerance, atol=tolerance), name
        checked += 1
    assert checked >= 6


def test_the_full_state_is_that_of_the_model_and_goes_back(found: list[Found]) -> None:
    wanted = Model(torch.float32).state_dict()
    for rank, one in enumerate(found):
        full = one["_blocks"]["full"]
        assert _equal(full, dict(wanted) if rank == 1 else {})
        assert one["_blocks"]["loaded"]
        assert "the state has no 'blocks.1.experts.down_proj'" in one["_blocks"]["lacking"]
        assert one["_blocks"]["names"] == ["blocks.0.experts", "blocks.1.experts", "blocks.2.ffn"]


def test_with_shards_the_models_parameters_are_those_of_the_dense_part(found: list[Found]) -> None:
    dense = [n for n, _ in Model().named_parameters() if "experts" not in n and "ffn" not in n]
    before = Model(torch.float32).state_dict()
    for rank, one in enumerate(found):
        sharded = one["_blocks"]["sharded"]
        assert sharded["dense"] == dense
        assert sharded["placed"]
        assert len(sharded["names"]) == 4 * (2 + 2 + 4)
        assert "shards.blocks.2.ffn.3.0.weight" in sharded["names"]
        assert "load before they are made" in sharded["load"]
        if rank:
            assert sharded["full"] == {}
            continue
        assert sharded["full"].keys() == before.keys()
        for name, value in sharded["full"].items():
            assert torch.equal(value, before[name]) == (name in dense), name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("other weights", "have different weights: load them from one source"),
        ("other placement", "another model or placement than rank 0"),
        ("other reduce", "another placement than rank 0"),
        ("one rank's trouble", "rank 0: replicas_LRE places 2 layers, and the model has 3 mixture"),
        ("no holder", "no rank holds expert 1"),
    ],
)
def test_all_ranks_are_told_why_blocks_are_not_replaced(found: list[Found], name: str, words: str) -> None:
    told = {one["_blocks_refused"][name] for one in found}
    assert len(told) == 1, "all ranks raise the same error"
    assert words in told.pop()


def test_the_models_of_the_tests_have_what_they_test() -> None:
    assert len(PLACEMENT) == len(Model().blocks)
    assert [type(one) for one in Model().blocks][-1] in HAND_WRITTEN


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return len(one) == len(other) and all(_equal(a, b) for a, b in zip(one, other, strict=True))
