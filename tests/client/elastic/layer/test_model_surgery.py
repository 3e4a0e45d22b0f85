"""Mixture blocks of transformers' models, and models that are refused; on one rank, and on three in
a campaign.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ckptd.client.elastic import (
    HandWritten,
    elastic_layers,
    full_state_dict,
    load_full_state_dict,
    replace_moe_blocks,
)
from tests.client.elastic import hf_models
from tests.client.elastic.block_models import HAND_WRITTEN, FusedBlock, FusedExperts, Model
from tests.client.elastic.hf_models import (
    FAMILIES,
    OTHERS,
    UNKNOWN,
    losses,
    model_of,
    run_hf,
)
from tests.client.gloo_ranks import run_in_ranks
from tests.long import LONG, long

ALONE = [[[1, 2, 1, 1]]] * 3
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.05}


@pytest.fixture(scope="module", autouse=True)
def _group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One rank."""
    torch.set_num_threads(1)
    store = tmp_path_factory.mktemp("blocks") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _placement(model: nn.Module) -> Any:
    """Of as many blocks as the models here have."""
    return [[[1, 2, 1, 1]]] * sum(hf_models.is_experts(module) for module in model.modules())


# -- transformers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("family", [*FAMILIES, *(OTHERS if LONG else ())])
def test_a_model_of_transformers_is_the_same_with_elastic_blocks(family: str, dtype: torch.dtype) -> None:
    """Loss, logits, the gates' logits, the auxiliary loss, and all gradients."""
    before, after = model_of(family, dtype), model_of(family, dtype)
    layers = replace_moe_blocks(after, _placement(after))
    assert list(elastic_layers(after)) == list(layers)
    assert all(name.endswith(".mlp.experts") for name in layers)
    wanted, found = losses(before, rank=0), losses(after, rank=0)
    for layer in layers.values():
        layer.sync_gradients()
    assert found.keys() == wanted.keys()
    assert family not in ("mixtral", "qwen3_moe") or "router_logits.0" in found
    for name, value in wanted.items():
        _assert_close(found[name], value, dtype, name)
    grads = {n: p.grad for n, p in before.named_parameters()}
    here = {n: p.grad for n, p in after.named_parameters()}
    for name, grad in hf_models.fused_again(here, layers).items():
        _assert_close(grad, grads.pop(name), dtype, name)
    assert not grads


def _assert_close(found: Tensor | None, wanted: Tensor | None, dtype: torch.dtype, name: str) -> None:
    """Within summation error of the largest element."""
    assert found is not None, name
    assert wanted is not None, name
    assert found.dtype == wanted.dtype, name
    error = (found.double() - wanted.double()).abs().max()
    assert error <= TOLERANCES[dtype] * max(1.0, float(wanted.abs().max())), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_state_goes_to_transformers_and_back(family: str, tmp_path: Path) -> None:
    """Saved as transformers saves it, by the names of its files; and loaded into another placement."""
    model = model_of(family, torch.float32)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    layers = replace_moe_blocks(model, _placement(model))
    assert not any(name in model.state_dict() for name in wanted if ".experts." in name)
    full = full_state_dict(model)
    assert full.keys() == wanted.keys()
    assert all(torch.equal(full[name], value) for name, value in wanted.items())
    model.save_pretrained(tmp_path, state_dict=full)
    again = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in wanted.items())
    other = model_of(family, torch.float32, seed=1)
    assert len(replace_moe_blocks(other, _placement(other))) == len(layers)
    load_full_state_dict(other, again.state_dict())
    assert all(map(torch.equal, other.parameters(), model.parameters()))


@long
@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_transformers_on_three_ranks(family: str, tmp_path: Path) -> None:
    """Ranks have other batches; gradients are those of the mean of their losses."""
    run_in_ranks(run_hf, 3, tmp_path, family, str(tmp_path))
    whole: dict[str, Tensor] = {}
    for rank in range(3):
        model = model_of(family, torch.float64)
        wanted = losses(model, rank)
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        for name, value in wanted.items():
            _assert_close(found["losses"][name], value, torch.float64, name)
        for name, param in model.named_parameters():
            assert param.grad is not None
            if ".experts." in name:
                whole[name] = whole.get(name, torch.zeros_like(param)) + param.grad / 3
            else:
                _assert_close(found["grads"][name], param.grad, torch.float64, name)
    checked = 0
    for rank in range(3):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        for name, grad in found["grads"].items():
            path, _, rest = name.partition(".experts.experts.")
            if rest:
                number, _, leaf = rest.partition(".")
                wanted_row = whole[f"{path}.experts.{leaf}"][int(number)]
                _assert_close(grad, wanted_row, torch.float64, name)
                checked += 1
    assert checked >= 2 * 2 * 4


# -- what is refused -----------------------------------------------------------------------------------


@long
@pytest.mark.parametrize("family", UNKNOWN)
def test_models_of_transformers_of_other_forms_are_refused(family: str) -> None:
    model = model_of(family, torch.float32)
    with pytest.raises(ValueError, match="cannot be made elastic by itself: ") as told:
        replace_moe_blocks(model, _placement(model))
    assert "Experts)" in str(told.value)


class _Clamped(FusedExperts):
    """Of the same form, but gate and up are clamped."""

    def __init__(self) -> None:
        super().__init__()
        self.act_fn: Any = nn.SiLU()
        self.limit = 0.01

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """What the other computes, and a limit."""
        out = super().forward(hidden_states, top_k_index, top_k_weights)
        return out.clamp(max=self.limit)


class _OtherCall(FusedExperts):
    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """As Llama 4 calls them."""
        return hidden_states


class _Raising(FusedExperts):
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As transformers' does in float64."""
        raise RuntimeError("no such dtype")


class _Biased(FusedExperts):
    def __init__(self) -> None:
        super().__init__()
        self.down_proj_bias = nn.Parameter(torch.zeros(4, 8))


class _Transposed(FusedExperts):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(self.gate_up_proj.transpose(1, 2).contiguous())


class _List(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))


class _Tensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.zeros(4, 8, 8))


def _with(experts: nn.Module) -> Any:
    torch.manual_seed(0)
    block = FusedBlock()
    block.experts = experts
    for param in block.parameters():
        nn.init.normal_(param)
    return nn.Sequential(nn.Linear(8, 8), block)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear(4, 4), "no mixture block was found in Linear: pass blocks="),
        (_with(_Clamped()), r"'1.experts' \(_Clamped\) .* its expert 0 computes something else"),
        (_with(_OtherCall()), r"it is called with \(hidden_states\), not"),
        (_with(_Raising()), "it raised RuntimeError when it was tried: no such dtype"),
        (_with(_Biased()), "it also has down_proj_bias"),
        (_with(_Transposed()), r"are not \[E, 2F, H\] and \[E, H, F\]"),
        (_List(), "'experts' .ModuleList. cannot be made elastic by itself: its form is not one"),
        (nn.ModuleDict({"experts": _Tensors()}), "its form is not one that is known"),
        (_with(FusedExperts()), "places 3 layers, and the model has 1 mixture blocks, from '1.ex"),
    ],
)
def test_models_that_cannot_be_made_elastic_say_why(model: nn.Module, words: str) -> None:
    before = [id(module) for module in model.modules()]
    with pytest.raises(ValueError, match=words):
        replace_moe_blocks(model, ALONE)
    assert before == [id(module) for module in model.modules()]


def test_a_list_of_blocks_or_shared_experts_is_no_reason_to_refuse() -> None:
    model = _with(FusedExperts())
    model.append(nn.ModuleDict({"shared_experts": nn.ModuleList(nn.Linear(8, 8) for _ in "ab")}))
    assert list(replace_moe_blocks(model, ALONE[:1])) == ["1.experts"]


def test_what_would_be_lost_or_does_not_fit_is_refused() -> None:
    model = _with(FusedExperts())
    handle = model[1].experts.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"'1\.experts' has hooks, which would be lost"):
        replace_moe_blocks(model, ALONE[:1])
    handle.remove()
    with pytest.raises(ValueError, match="is of 5 experts, and it has 4"):
        replace_moe_blocks(model, [[[1, 1, 1, 1, 1]]])
    model[1].experts._is_expert_parallel = True
    with pytest.raises(ValueError, match="spread over ranks already"):
        replace_moe_blocks(model, ALONE[:1])
    model[1].experts._is_expert_parallel = False
    replace_moe_blocks(model, ALONE[:1])
    with pytest.raises(ValueError, match=r"'1\.experts' is elastic already"):
        replace_moe_blocks(model, ALONE[:1])


def test_hand_written_blocks_say_how_they_are_made() -> None:
    model = _List()
    told = {_List: HandWritten(experts="ffn")}
    with pytest.raises(ValueError, match="has no attribute 'ffn': tell where its experts are"):
        replace_moe_blocks(model, ALONE[:1], blocks=told)
    no_module: Any = int
    wrong = HandWritten(take=lambda experts, number: no_module(number))
    with pytest.raises(ValueError, match="expert 0 of 'experts' is a int, not a module"):
        replace_moe_blocks(model, ALONE[:1], blocks={_List: wrong})
    taken = HandWritten(take=lambda experts, number: experts[3 - number])
    want = [experts.weight for experts in model.experts][::-1]
    (layer,) = replace_moe_blocks(model, ALONE[:1], blocks={_List: taken}).values()
    assert all(map(torch.equal, (one.weight for one in layer.held_experts().values()), want))  # type: ignore[arg-type]


def test_replaced_tensors_are_freed() -> None:
    """A rank keeps its own experts' memory, not that of the tensors they were rows of."""
    model = _with(FusedExperts())
    replace_moe_blocks(model, ALONE[:1])
    for param in model[1].experts.parameters():
        assert param.untyped_storage().nbytes() == param.numel() * param.element_size()


def test_without_weights_yet_blocks_are_replaced_and_loaded_later() -> None:
    """On the meta device; the state is loaded by the names of the whole model."""
    with torch.device("meta"):
        model = _with(FusedExperts())
    replace_moe_blocks(model, ALONE[:1])
    model.to_empty(device="cpu")
    state = _with(FusedExperts()).state_dict()
    load_full_state_dict(model, state)
    full = full_state_dict(model)
    assert all(torch.equal(full[name], value) for name, value in state.items())
    with pytest.raises(ValueError, match="the model has no 'x'; 1 are strange"):
        load_full_state_dict(model, {**state, "x": torch.zeros(1)})
    short = {**state, "1.experts.down_proj": state["1.experts.down_proj"][:3]}
    with pytest.raises(ValueError, match=r"has the shape \[3, 8, 6\], not \[4, 8, 6\]"):
        load_full_state_dict(model, short)
    with pytest.raises(ValueError, match="its own state_dict"):
        full_state_dict(Model())
    with pytest.raises(ValueError, match="to=1: the group has 1 ranks"):
        full_state_dict(model, to=1)


def test_a_replaced_model_is_copied_whole() -> None:
    """Also the forward that was put in its place."""
    model = Model()
    replace_moe_blocks(model, ALONE, blocks=HAND_WRITTEN)
    block = model.blocks[2]
    assert block.forward.__self__ is block  # type: ignore[attr-defined]
    hidden = torch.randn(1, 3, 8, dtype=torch.float64)
    assert torch.allclose(model(hidden), Model()(hidden), rtol=1e-12, atol=1e-12)
