"""Which weights are read only after rounding: seen at the dispatcher, checked against the model's
own outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ckptd.client.model.precision import PrecisionProbe
from ckptd.client.pipeline.stage_hooks import callables_of


class Model(nn.Module):
    """One of each kind of reader."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)
        self.twice = nn.Linear(8, 8, bias=False)
        self.fused = nn.Parameter(torch.randn(3, 8, 8))
        self.sliced = nn.Parameter(torch.randn(3, 8, 8))
        self.scale = nn.Parameter(torch.ones(8))
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(8, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.linear(self.norm(self.embed(tokens)))
        x = self.twice(x) + F.linear(x, self.twice.weight * 3)
        x = (x @ self.fused).sum(0, keepdim=True)
        x = x @ self.sliced[1]
        logits: Tensor = self.head(x * self.scale)
        return logits


def watch(model: nn.Module, forward: Callable[[], Tensor], *, autocast: bool = True) -> PrecisionProbe:
    probe = PrecisionProbe(dict(model.named_parameters()))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        probe.enter()
        try:
            forward()
        finally:
            probe.leave()
    return probe


TOKENS = torch.tensor([[1, 2, 3]])


def test_linear_suffices_embedding_and_norm_do_not() -> None:
    model = Model()
    found = watch(model, lambda: model(TOKENS)).sufficient()
    assert set(found.values()) == {torch.bfloat16}
    assert {"linear.weight", "linear.bias", "head.weight", "fused", "sliced"} <= set(found)
    assert not {"embed.weight", "norm.weight", "norm.bias", "scale"} & set(found)


def test_a_weight_read_both_ways_does_not_suffice() -> None:
    model = Model()
    assert "twice.weight" not in watch(model, lambda: model(TOKENS)).sufficient()


def test_a_tied_head_does_not_suffice() -> None:
    """The linear layer would be content with bf16; the embedding reads all of fp32."""
    model = Model(tied=True)
    found = watch(model, lambda: model(TOKENS)).sufficient()
    assert "embed.weight" not in found
    assert "head.weight" not in found


def test_what_is_never_read_is_kept_as_it_is() -> None:
    model = Model()
    assert not {"unused.weight", "unused.bias"} & set(watch(model, lambda: model(TOKENS)).sufficient())


def test_rounding_what_suffices_changes_no_bit_of_the_output() -> None:
    """The claim itself, by brute force: round each parameter and look; the probe must find exactly
    those that do not matter.
    """
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for p in model.parameters():
            p.copy_(torch.randn_like(p))
        expected = model(TOKENS)
    found = watch(model, lambda: model(TOKENS)).sufficient()
    with torch.no_grad():
        for name, param in model.named_parameters():
            kept = param.clone()
            param.copy_(param.to(torch.bfloat16))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                same = torch.equal(model(TOKENS), expected)
            param.copy_(kept)
            if name in found:
                assert same, f"{name} was said to suffice in bfloat16, but its rounding shows"
            elif not name.startswith("unused"):
                assert not same, f"{name} would suffice in bfloat16"


def test_without_autocast_nothing_is_concluded_and_the_probe_waits() -> None:
    model = Model()
    probe = watch(model, lambda: model(TOKENS), autocast=False)
    assert probe.sufficient() == {}
    assert not probe.done


def test_the_first_forward_decides() -> None:
    model = Model()
    probe = watch(model, lambda: model(TOKENS))
    assert probe.done
    before = probe.sufficient()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        probe.enter()
        model.embed(TOKENS)
        probe.leave()
    assert probe.sufficient() == before


def test_a_forward_that_raises_leaves_no_mode_behind() -> None:
    model = Model()

    def broken() -> Tensor:
        model(TOKENS)
        raise RuntimeError("user code")

    with pytest.raises(RuntimeError, match="user code"):
        watch(model, broken)
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    assert _get_current_dispatch_mode() is None


class Decoder(nn.Module):
    """Calls its sibling, and reads its weight in fp32 afterwards."""

    def __init__(self, encoder: nn.Linear) -> None:
        super().__init__()
        self.shared = [encoder]
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.shared[0](x))
        return out.sum() + self.shared[0].weight.square().mean()


def watched_calls(model: nn.ModuleDict) -> PrecisionProbe:
    """With the hooks that a checkpointer sets on a container's children."""
    probe = PrecisionProbe(dict(model.named_parameters()))
    for module in callables_of(model):
        module.register_forward_pre_hook(lambda *_: probe.enter())
        module.register_forward_hook(lambda *_: probe.leave(), always_call=True)
    return probe


def test_a_forward_inside_a_forward_does_not_end_the_watch() -> None:
    """Children of a container called each other; what the outer one read after that went unseen,
    and was recorded rounded.
    """
    encoder = nn.Linear(8, 8)
    model = nn.ModuleDict({"encoder": encoder, "decoder": Decoder(encoder)})
    probe = watched_calls(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model["decoder"](torch.randn(2, 8))
    assert probe.done
    assert set(probe.sufficient()) == {
        "encoder.bias",
        "decoder.linear.weight",
        "decoder.linear.bias",
    }


class Late(nn.Module):
    """Turns autocast on around its sibling alone."""

    def __init__(self, encoder: nn.Linear) -> None:
        super().__init__()
        self.shared = [encoder]

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out: Tensor = self.shared[0](x)
        return out.sum() + self.shared[0].weight.square().mean()


def test_only_outermost_forwards_are_watched() -> None:
    """An inner one that is alone under autocast says nothing of what the outer one reads."""
    encoder = nn.Linear(8, 8)
    model = nn.ModuleDict({"encoder": encoder, "late": Late(encoder)})
    probe = watched_calls(model)
    model["late"](torch.randn(2, 8))
    assert not probe.done
    assert probe.sufficient() == {}


def test_an_end_that_had_no_beginning_is_none() -> None:
    """Recomputation inside a backward ends, but never began as a forward."""
    model = Model()
    probe = PrecisionProbe(dict(model.named_parameters()))
    probe.leave()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        probe.enter()
        model(TOKENS)
        probe.leave()
    assert probe.done
    assert "linear.weight" in probe.sufficient()


def test_a_model_without_fp32_has_nothing_to_watch() -> None:
    assert PrecisionProbe({"w": nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))}).done


def test_watching_changes_no_bit() -> None:
    model = Model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(TOKENS)
    seen: list[Tensor] = []

    def forward() -> Tensor:
        seen.append(model(TOKENS))
        return seen[0]

    watch(model, forward)
    assert torch.equal(seen[0], expected)
