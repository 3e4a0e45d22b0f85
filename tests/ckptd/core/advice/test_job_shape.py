"""Models have the parameters that are published, and ranks share their state."""

from __future__ import annotations

import pytest

from ckptd.core.advice.job_shape import (
    MODELS,
    PRECISIONS,
    Layout,
    ModelShape,
    measured_partial_shape,
    measured_shape,
    rank_shape,
)
from ckptd.core.snapshot_policy import OperatorKind

# In billions, from the models' own cards: all, and those that a token uses.
PUBLISHED = {
    "deepseek-moe-16b": (16.4, 2.8),
    "deepseek-v3": (671, 37),
    "llama3-8b": (8.0, 8.0),
    "llama3-70b": (70.6, 70.6),
    "mixtral-8x7b": (46.7, 12.9),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235, 22),
}
TINY = ModelShape(layers=4, dense=100, other=40, experts=8, active=2, expert=30, router=6)


def test_sizes_of_partial_snapshots_tell_the_experts() -> None:
    """1,000 bytes in each, and an eighth of 8,000 of experts."""
    found = measured_partial_shape(9000, 2000, 8)
    kinds = [sum(op.anchor_bytes for op in found.operators if op.kind is kind) for kind in OperatorKind]
    assert dict(zip(OperatorKind, kinds, strict=True)) == {"expert": 8000, "gate": 0, "dense": 1000}
    with pytest.raises(ValueError, match="snapshots of 10000 bytes, of 9000 bytes of state"):
        measured_partial_shape(9000, 10000, 8)


def test_each_model_is_known() -> None:
    assert MODELS.keys() == PUBLISHED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_are_published(name: str) -> None:
    total, active = PUBLISHED[name]
    assert MODELS[name].parameters / 1e9 == pytest.approx(total, rel=0.005)
    assert MODELS[name].active_parameters / 1e9 == pytest.approx(active, rel=0.025)


@pytest.mark.parametrize(("gpus", "stages", "expert_ranks"), [(1, 1, 1), (8, 1, 8), (16, 2, 4), (8, 4, 2)])
def test_all_ranks_together_have_everything_once(gpus: int, stages: int, expert_ranks: int) -> None:
    precision = PRECISIONS["bf16-mixed"]
    rank = rank_shape(TINY, Layout(gpus, stages, expert_ranks), precision)
    per_stage = gpus // stages
    other = TINY.other if stages == 1 else TINY.other / 2
    stage = other + (TINY.parameters - TINY.other) / stages
    assert rank.dense_bytes == pytest.approx(stage * precision.state / per_stage, abs=len(rank.operators))


def test_operators_are_those_of_one_rank() -> None:
    rank = rank_shape(TINY, Layout(8, 2, 4), PRECISIONS["fp32"])
    kinds = [operator.kind for operator in rank.operators]
    assert kinds.count(OperatorKind.EXPERT) == 2 * 2  # two layers of the stage, two of eight experts
    assert kinds.count(OperatorKind.GATE) == 2
    assert kinds.count(OperatorKind.DENSE) == 1 + 2
    expert = rank.operators[kinds.index(OperatorKind.EXPERT)]
    assert (expert.anchor_bytes, expert.compute_bytes) == (30 * 12, 30 * 4)  # one replica
    assert rank.compute[kinds.index(OperatorKind.EXPERT)] == 4 * 30 * 2 / 8  # for tokens of four ranks


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("expert_ranks", [1, 2, 8])
def test_a_rank_computes_all_that_its_tokens_use(name: str, expert_ranks: int) -> None:
    """Experts of other ranks compute for its tokens, and its own for theirs. They counted for its own only."""
    model = MODELS[name]
    if not model.experts and expert_ranks > 1:
        pytest.skip("no experts to share")
    rank = rank_shape(model, Layout(16, 1, expert_ranks), PRECISIONS["bf16-mixed"])
    assert sum(rank.compute) == pytest.approx(model.active_parameters)


def test_a_stage_with_one_layer_more_counts() -> None:
    rank = rank_shape(TINY, Layout(3, 3), PRECISIONS["fp32"])
    assert max(operator.layer for operator in rank.operators) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout(0), "0 GPUs, 1 stages"),
        (lambda: Layout(12, 8), "12 GPUs are no multiple of 8 stages x 1"),
        (lambda: Layout(12, 2, 4), "12 GPUs are no multiple of 2 stages x 4 ranks"),
        (lambda: rank_shape(TINY, Layout(8, 8), PRECISIONS["bf16"]), "8 stages of a model with 4 layers"),
        (
            lambda: rank_shape(TINY, Layout(3, 1, 3), PRECISIONS["bf16"]),
            "8 experts of a layer cannot be shared",
        ),
        (
            lambda: rank_shape(MODELS["llama3-8b"], Layout(8, 1, 8), PRECISIONS["bf16"]),
            "0 experts of a layer cannot be shared",
        ),
    ],
)
def test_numbers_that_do_not_fit_are_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("window", [2, 4, 16])
def test_two_sizes_tell_how_much_computes(window: int) -> None:
    """100 bytes of weights in 700 of state: a snapshot has the weights, and a part of the rest."""
    found = measured_shape(7_000_000, 1_000_000 + 6_000_000 // window, window)
    assert found.dense_bytes == pytest.approx(7_000_000, rel=1e-4)
    assert sum(each.compute_bytes for each in found.operators) == pytest.approx(1_000_000, rel=1e-3)


def test_a_window_of_one_tells_nothing_of_the_weights() -> None:
    found = measured_shape(7_000_000, 7_000_000, 1)
    assert sum(each.compute_bytes for each in found.operators) == pytest.approx(1_000_000, rel=1e-3)
    for dense, snapshot in ((0, 0), (100, 0), (100, 200)):
        with pytest.raises(ValueError, match=f"snapshots of {snapshot} bytes, of {dense} bytes of state"):
            measured_shape(dense, snapshot, 1)
