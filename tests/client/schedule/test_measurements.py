"""Readings of a made-up clock."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from ckptd.client.model.operators import Operator, discover_operators
from ckptd.client.pipeline.stage_hooks import callables_of
from ckptd.client.schedule.measurements import (
    CopyMode,
    CopyModeChooser,
    PrecisionProbe,
    ReorderPace,
    StepTiming,
    TokenCounter,
)
from ckptd.core.schedule import Ordering


def _steps(
    pace: StepTiming, count: int, *, boundary: float, wait: float, forward: float, rest: float
) -> None:
    now = 100.0
    for _ in range(count):
        pace.top(now)
        now += boundary
        pace.boundary_over(now)
        now += forward
        pace.waited(wait)
        now += wait
        pace.optimizer_begins(now)
        now += rest


def test_what_is_ours_is_not_counted_as_room_for_copies() -> None:
    pace = StepTiming()
    _steps(pace, 5, boundary=0.25, wait=0.5, forward=4.0, rest=1.0)
    assert pace.copy_window_s == 4.0
    assert pace.iteration_s == 5.75


def test_preparation_is_no_steps_stall() -> None:
    pace = StepTiming()
    pace.top(10.0)
    pace.prepared(2.0)
    pace.boundary_over(12.5)
    assert pace.boundary_s == 0.5


def test_a_devices_wait_and_sealing_take_nothing_from_the_hosts_time() -> None:
    pace, now = StepTiming(), 100.0
    for _ in range(21):
        pace.top(now)
        assert (pace.device_s, pace.sealing_s) == (0.0, 0.0)
        pace.sealed(0.5)
        pace.boundary_over(now + 0.5)
        pace.device_waited(1.0)
        pace.optimizer_begins(now + 2.5)
        now += 6.0
    assert pace.copy_window_s == 2.0
    assert (pace.device_s, pace.sealing_s) == (1.0, 0.5)


def test_the_first_step_has_no_predecessor() -> None:
    pace = StepTiming()
    assert pace.top(1.0) is None
    assert pace.top(3.0) == 2.0


INLINE, IN_BUBBLES = CopyMode.INLINE, CopyMode.IN_BUBBLES


def settle(chooser: CopyModeChooser, time_of: Callable[[CopyMode, int], float]) -> int:
    """Feed it until it decides; how many iterations that took."""
    for count in range(1, 1000):
        chooser.note(time_of(chooser.mode, count))
        if chooser.decided:
            return count
    raise AssertionError("never decided")


@pytest.mark.parametrize(("inline_s", "chosen"), [(0.8, True), (1.0, False), (0.995, False), (1.2, False)])
def test_inline_must_win_clearly(inline_s: float, chosen: bool) -> None:
    chooser = CopyModeChooser()
    settle(chooser, lambda mode, _: inline_s if mode is INLINE else 1.0)
    assert (chooser.mode is INLINE) is chosen
    assert "beside training: 1000.00 ms" in chooser.reason


def test_all_are_tried_in_turn_so_that_drift_cancels() -> None:
    for modes in ((CopyMode.BESIDE, INLINE), (CopyMode.BESIDE, INLINE, IN_BUBBLES)):
        chooser = CopyModeChooser(modes)
        tried: list[CopyMode] = []

        def slower_and_slower(mode: CopyMode, count: int, tried: list[CopyMode] = tried) -> float:
            tried.append(mode)
            return count + (-20.0 if mode is INLINE else 0.0)

        settle(chooser, slower_and_slower)
        assert {tried.count(mode) for mode in modes} == {len(tried) // len(modes)}
        assert tried[0] is CopyMode.BESIDE
        assert chooser.mode is INLINE


def test_the_fastest_of_three_is_kept() -> None:
    seconds = {CopyMode.BESIDE: 1.0, INLINE: 0.9, IN_BUBBLES: 0.8}
    chooser = CopyModeChooser(tuple(seconds))
    settle(chooser, lambda mode, _: seconds[mode])
    assert chooser.mode is IN_BUBBLES


def test_single_outliers_do_not_decide() -> None:
    chooser = CopyModeChooser()
    settle(chooser, lambda mode, count: 100.0 if count % 6 == 2 else (0.8 if mode is INLINE else 1.0))
    assert chooser.mode is INLINE


def test_a_decision_holds_and_is_looked_at_again() -> None:
    chooser = CopyModeChooser(again_after=5)
    settle(chooser, lambda mode, _: 0.5 if mode is INLINE else 1.0)
    assert chooser.mode is INLINE
    for _ in range(5):
        assert chooser.decided
        chooser.note(1.0)
    assert not chooser.decided
    settle(chooser, lambda mode, _: 1.5 if mode is INLINE else 1.0)
    assert chooser.mode is CopyMode.BESIDE


def test_what_an_earlier_trainer_decided_is_not_tried_again_until_it_is_old() -> None:
    chooser = CopyModeChooser(again_after=5)
    assert chooser.take_over(INLINE)
    assert [chooser.note(1.0) for _ in range(4)] == [INLINE] * 4
    assert not chooser.take_over(CopyMode.BESIDE), "it has decided"
    assert chooser.mode is INLINE
    assert settle(chooser, lambda mode, _: 1.5 if mode is INLINE else 1.0)
    assert chooser.mode is CopyMode.BESIDE


def test_a_mode_that_is_not_to_be_tried_is_not_taken_over() -> None:
    chooser = CopyModeChooser((CopyMode.BESIDE, IN_BUBBLES))
    assert not chooser.take_over(INLINE)
    assert (chooser.mode, chooser.decided) == (CopyMode.BESIDE, False)


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


@pytest.mark.parametrize("model", [Listed(), Fused()])
def test_an_evaluation_does_not_count(model: nn.Module) -> None:
    found = counter(model)
    model.eval()
    with torch.no_grad():
        model(torch.ones(3, 4))
    assert set(counts(found).values()) == {0.0}


@pytest.mark.parametrize("make", [Listed, Fused])
def test_counts_go_on_from_those_of_an_earlier_life(make: type[nn.Module]) -> None:
    """And many tokens are counted exactly."""
    before, _ = counter(make())
    before.resume({"experts": [2.0**40, 0.0, 1.0]})
    model = make()
    after, _ = counter(model)
    after.resume(before.totals())
    model(torch.ones(3, 4))
    plain, _ = counter(fresh := make())
    fresh(torch.ones(3, 4))
    counted = [float(n) for n in plain.totals()["experts"]]
    assert [float(n) for n in after.totals()["experts"]] == [2.0**40 + counted[0], counted[1], 1 + counted[2]]


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


def test_a_step_towards_another_order_waits_until_the_last_one_is_paid_for() -> None:
    pace = ReorderPace(0.002)
    assert pace.due(100.0, 3.0), "what was spent on the first order does not count"
    pace.begins(100.0, 3.0)
    assert pace.due(101.0, 3.0), "all of its plans were there"
    assert not pace.due(109.9, 3.02)
    assert pace.due(110.1, 3.02)
    pace.begins(110.1, 3.02)
    assert pace.due(110.2, 3.02)
