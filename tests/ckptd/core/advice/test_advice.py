"""The advice is the best of all choices; named intervals are those of their papers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ckptd.core.advice.advice import (
    advise,
    arguments,
    ettr_curves,
    interval_by,
    mtbf_axis,
)
from ckptd.core.advice.job_shape import MODELS, PRECISIONS, Layout, RankShape, rank_shape
from ckptd.core.advice.outlook import Choice, Conditions, PolicyOutlook, dense_outlook, window_outlook
from ckptd.core.interval_control import IntervalRule

CONDITIONS = Conditions(2.0, 600.0, link_Bps=20e9, network_Bps=5e9)
QWEN = rank_shape(MODELS["qwen3-30b-a3b"], Layout(16, 1, 8), PRECISIONS["bf16-mixed"])


def everything(rank: RankShape, conditions: Conditions) -> list[PolicyOutlook]:
    windows = range(1, 65)
    return [
        *[window_outlook(rank, conditions, "sliding", window) for window in windows],
        *[window_outlook(rank, conditions, "aligned", window) for window in windows],
        *[dense_outlook(rank, conditions, every) for every in range(1, 3000)],
    ]


@pytest.mark.parametrize("seed", range(12))
def test_advice_is_within_half_a_point_of_the_best_of_all(seed: int) -> None:
    rng = random.Random(seed)
    name = rng.choice(list(MODELS))
    experts = MODELS[name].experts
    layout = Layout(64, rng.choice([1, 2, 4]), rng.choice([1, 8]) if experts else 1)
    rank = rank_shape(MODELS[name], layout, PRECISIONS[rng.choice(list(PRECISIONS))])
    conditions = Conditions(
        rng.uniform(0.5, 20), 10 ** rng.uniform(2, 5), 10 ** rng.uniform(9, 11), 10 ** rng.uniform(8.5, 10.5)
    )
    found = advise(rank, conditions)
    fitting = [each for each in everything(rank, conditions) if not each.behind]
    assert found.best is not None
    assert not found.best.behind
    assert found.best.ettr >= max(each.ettr for each in fitting) - 0.005
    assert all(found.best.ettr >= other.ettr - 1e-4 for _, other in found.others)


def test_where_dense_snapshots_fit_they_need_no_window() -> None:
    slow = replace(CONDITIONS, iteration_s=60.0)
    found = advise(QWEN, slow).best
    assert found is not None
    assert found.choice.window == 1
    assert found.stall_s < 1e-3


def test_where_they_do_not_a_window_is_better_than_an_interval() -> None:
    found = advise(QWEN, replace(CONDITIONS, network_Bps=12e9, iteration_s=1.0))
    assert found.best is not None
    assert found.best.choice.policy == "sliding"
    assert found.best.choice.window > 1
    dense = next(each for name, each in found.others if name.startswith("dense"))
    assert dense.ettr < found.best.ettr


def test_each_choice_is_listed_once_with_all_its_names() -> None:
    found = advise(QWEN, replace(CONDITIONS, iteration_s=60.0))
    choices = [each.choice for _, each in found.others]
    assert len(set(choices)) == len(choices)
    assert found.best is not None
    assert found.best.choice not in choices
    assert "dense, CheckFreq's interval, Gemini's interval, Young and Daly's interval" in dict(found.others)


def test_memory_bounds_the_choice() -> None:
    free = advise(QWEN, CONDITIONS).best
    assert free is not None
    bound = advise(QWEN, CONDITIONS, memory_bytes=free.memory_bytes - 1)
    assert bound.best is not None
    assert bound.best.memory_bytes < free.memory_bytes
    assert "of memory (the smallest: " in bound.rejected
    nothing = advise(QWEN, CONDITIONS, memory_bytes=1024)
    assert nothing.best is None
    assert "need more than 1 KiB of memory" in nothing.rejected
    assert "choices send more than the network carries" in nothing.rejected
    assert advise(QWEN, replace(CONDITIONS, iteration_s=60.0)).rejected == ""


def test_intervals_are_the_shortest_that_their_rule_allows() -> None:
    slow = replace(CONDITIONS, iteration_s=0.5, link_Bps=10e9)
    every = interval_by(IntervalRule.CHECKFREQ, QWEN, slow)
    assert (
        dense_outlook(QWEN, slow, every).stall_s <= 0.03 * 0.5 < dense_outlook(QWEN, slow, every - 1).stall_s
    )
    every = interval_by(IntervalRule.GEMINI, QWEN, slow)
    assert not dense_outlook(QWEN, slow, every).behind
    assert dense_outlook(QWEN, slow, every - 1).behind


def test_young_and_dalys_interval_loses_least() -> None:
    """Where what reaches the peers late, loads and restarts, does not depend on it."""
    slow = replace(CONDITIONS, iteration_s=0.5, link_Bps=5e9, mtbf_s=36_000.0)
    every = interval_by(IntervalRule.YOUNG_DALY, QWEN, slow)
    best = max(range(1, 3000), key=lambda n: dense_outlook(QWEN, slow, n).ettr)
    assert every > 10
    assert every == pytest.approx(best, rel=0.02)


def test_arguments_can_be_pasted() -> None:
    from ckptd.client.options import SnapshotOptions

    found = advise(QWEN, CONDITIONS).best
    assert found is not None
    for choice, expected in [
        (Choice("sliding", 4), SnapshotOptions(window=4)),
        (Choice("aligned", 6), SnapshotOptions(policy="aligned", window=6)),
        (Choice("dense", 1, 30), SnapshotOptions(policy="dense", every=30)),
    ]:
        text = arguments(replace(found, choice=choice))
        assert text.startswith("snapshots=")
        assert eval(text.removeprefix("snapshots="), {"SnapshotOptions": SnapshotOptions}) == expected


@pytest.mark.parametrize("memory_bytes", [None, 120 << 30])
def test_curves_are_what_is_advised_at_each_point(memory_bytes: int | None) -> None:
    conditions = Conditions(1.0, 600.0, link_Bps=20e9, network_Bps=12e9)
    mtbfs_s = (60.0, 600.0, 5000.0, 86400.0)
    curves = {c.name: c for c in ettr_curves(QWEN, conditions, mtbfs_s, memory_bytes=memory_bytes)}
    assert [name for name, curve in curves.items() if not curve.exact] == ["partial"]
    for n, mtbf_s in enumerate(mtbfs_s):
        found = advise(QWEN, replace(conditions, mtbf_s=mtbf_s), memory_bytes=memory_bytes)
        assert found.best is not None
        assert curves["sliding"].points[n] == found.best
        assert curves["partial"].points[n] == found.lossy
        others = {name: each for names, each in found.others for name in names.split(", ")}
        assert curves["aligned"].points[n] == others.get("aligned")
        for name in ("CheckFreq's interval", "Gemini's interval", "Young and Daly's interval"):
            fits = memory_bytes is None or others[name].memory_bytes <= memory_bytes
            assert curves[f"dense, {name}"].points[n] == (others[name] if fits else None)


def test_a_model_without_experts_has_no_partial_curve() -> None:
    dense = rank_shape(MODELS["llama3-8b"], Layout(8), PRECISIONS["bf16-mixed"])
    assert all(curve.exact for curve in ettr_curves(dense, CONDITIONS, [600.0]))


@pytest.mark.parametrize("mtbf_s", [5.0, 600.0, 86400.0, 1e6])
def test_the_axis_is_from_a_minute_to_a_day_and_has_the_mtbf(mtbf_s: float) -> None:
    axis = mtbf_axis(mtbf_s)
    assert (axis[0], axis[-1]) == (min(60.0, mtbf_s), max(86400.0, mtbf_s))
    assert mtbf_s in axis
    assert len(axis) in (64, 65)
    assert list(axis) == sorted(set(axis))
