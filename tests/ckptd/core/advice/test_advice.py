"""The advice is the best of all choices; named intervals are those of their papers."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from ckptd.core.advice.advice import (
    advise,
    arguments,
    ettr_curves,
    interval_by,
    mtbf_axis,
    settings,
)
from ckptd.core.advice.job_shape import MODELS, PRECISIONS, Layout, RankShape, rank_shape
from ckptd.core.advice.node_losses import NodeLosses
from ckptd.core.advice.outlook import (
    Choice,
    Conditions,
    PolicyOutlook,
    dense_outlook,
    partial_outlook,
    persisting,
    selected_outlook,
    window_outlook,
)
from ckptd.core.durable_experts import turns_of
from ckptd.core.interval_control import IntervalRule
from ckptd.core.partial_experts import LOST_TOKENS_LIMIT, iterations_at_risk
from ckptd.core.snapshot_policy import OperatorCost, OperatorKind
from tests.ckptd.core.advice.test_node_losses import taken
from tests.ckptd.core.advice.test_outlook import MIXED, ages
from tests.long import long

CONDITIONS = Conditions(2.0, 600.0, link_Bps=20e9, network_Bps=5e9)
QWEN = rank_shape(MODELS["qwen3-30b-a3b"], Layout(16, 1, 8), PRECISIONS["bf16-mixed"])


def everything(rank: RankShape, conditions: Conditions) -> list[PolicyOutlook]:
    windows = range(1, 65)
    return [
        *[window_outlook(rank, conditions, "sliding", window) for window in windows],
        *[window_outlook(rank, conditions, "aligned", window) for window in windows],
        *[dense_outlook(rank, conditions, every) for every in range(1, 3000)],
    ]


@pytest.mark.parametrize("seed", [0, 1, 5, *(pytest.param(n, marks=long) for n in (2, 3, 4, *range(6, 12)))])
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


def with_storage(
    window: int, parts: int, between: int, conditions: Conditions, sizes: tuple[int, int]
) -> tuple[float, float]:
    """The ETTR and the lost share of partial snapshots with these durable checkpoints, summed up here.

    Args:
        sizes: of what is no expert, and of all experts.
    """
    others, experts = sizes
    c = conditions
    upload_s = (others + parts / window * experts) / c.storage_Bps
    snapshot = others + -(-experts // window)
    stall_s = 2e-4 + max(0.0, snapshot / c.link_Bps - 0.9 * c.iteration_s)
    step_s = c.iteration_s + stall_s
    if between * step_s < 1.25 * upload_s or snapshot > c.network_Bps * c.iteration_s:
        return 0.0, 1.0
    dense = others + experts
    failure_s = 0.5 * c.iteration_s + snapshot / c.network_Bps + c.restart_s + dense / c.network_Bps
    loss_s = between / 2 * step_s + upload_s + c.restart_s + dense / c.storage_Bps
    older = ages(window, parts, 1, between)
    lost = (window - 1) / 2 / c.mtbf_s + sum(older) / len(older) / c.loss_mtbf_s
    lost *= c.iteration_s
    ettr = 1 / (1 + stall_s / c.iteration_s) / (1 + failure_s / c.mtbf_s + loss_s / c.loss_mtbf_s)
    return ettr, lost / (1 + lost)


@pytest.mark.parametrize("seed", range(6))
def test_partial_snapshots_with_storage_are_within_half_a_point_of_the_best_of_all(seed: int) -> None:
    """Over all windows, all numbers of parts that a durable checkpoint may store, and all intervals."""
    rng = random.Random(seed)
    expert = OperatorCost("e", OperatorKind.EXPERT, rng.choice([300, 1000, 3000]), 0, layer=0)
    dense = OperatorCost("d", OperatorKind.DENSE, 1000, 1000)
    rank = RankShape((dense, *[expert] * 8), (1.0,) * 9, 8, 8)
    conditions = Conditions(
        1.0, 10 ** rng.uniform(2, 4), 1e5, 3e4, storage_Bps=10 ** rng.uniform(2, 4), loss_mtbf_s=3e4
    )
    best = max(
        ettr
        for window in range(2, 9)
        for parts in range(1, window + 1)
        for between in (*range(1, 40), *range(40, 400, 20))
        for ettr, lost in [with_storage(window, parts, between, conditions, (1000, 8 * expert.anchor_bytes))]
        if lost <= LOST_TOKENS_LIMIT
    )
    found, *_ = advise(rank, conditions).lossy
    assert found.storage is not None
    assert found.ettr >= best - 0.005
    assert found.lost_share <= LOST_TOKENS_LIMIT
    parts = found.choice.parts or found.choice.window
    summed = with_storage(
        found.choice.window, parts, found.storage.every, conditions, (1000, 8 * expert.anchor_bytes)
    )
    assert summed == pytest.approx((found.ettr, found.lost_share), rel=1e-3)


@pytest.mark.parametrize("seed", range(6))
def test_exact_snapshots_with_storage_are_within_half_a_point_of_the_best_of_all(seed: int) -> None:
    rng = random.Random(seed)
    conditions = Conditions(
        2.0,
        10 ** rng.uniform(2.5, 4),
        link_Bps=10 ** rng.uniform(3, 5),
        network_Bps=10 ** rng.uniform(3, 4),
        storage_Bps=10 ** rng.uniform(1.5, 3.5),
        loss_mtbf_s=10 ** rng.uniform(4.5, 6.5),
    )
    windows = range(1, 1 + len(MIXED.operators))
    best = 0.0
    for each in (
        *[window_outlook(MIXED, conditions, "sliding", window) for window in windows],
        *[window_outlook(MIXED, conditions, "aligned", window) for window in windows],
        *[dense_outlook(MIXED, conditions, every) for every in range(1, 200)],
    ):
        storage = each.storage
        assert storage is not None
        if not each.behind:
            intervals = range(storage.shortest, storage.shortest + 50 * storage.multiple, storage.multiple)
            best = max(best, *[persisting(each, conditions, every).ettr for every in intervals])
    found = advise(MIXED, conditions).best
    assert found is not None
    assert found.ettr >= best - 0.005


LOST = NodeLosses(6, ((2, 2e4), (3, 1e5)), storage_Bps=500.0)


def summed(base: Conditions, replicas: int) -> Conditions:
    """Failures and losses with so many replicas: every loss of nodes is tried on the placement itself."""
    failures, losses = 1 / base.mtbf_s, 0.0
    for lost, mtbf_s in LOST.together:
        chance = Fraction(taken(LOST.nodes, lost, replicas), math.comb(LOST.nodes, lost))
        failures += float(1 - chance) / mtbf_s
        losses += float(chance) / mtbf_s
    if not losses:
        return replace(base, replicas=replicas, mtbf_s=1 / failures)
    base = replace(base, storage_Bps=LOST.storage_Bps, loss_mtbf_s=1 / losses)
    return replace(base, replicas=replicas, mtbf_s=1 / failures)


@pytest.mark.parametrize("seed", range(6))
def test_the_number_of_replicas_is_within_half_a_point_of_the_best_of_all(seed: int) -> None:
    """Over all numbers of replicas, windows, intervals of snapshots, and of durable checkpoints."""
    rng = random.Random(seed)
    base = Conditions(2.0, 10 ** rng.uniform(3, 5), 10 ** rng.uniform(4, 6), 10 ** rng.uniform(3.2, 4.5))
    memory_bytes = rng.choice([None, 80_000, 120_000])
    best: dict[int, float] = {}
    for replicas in (1, 2, 3):
        conditions = summed(base, replicas)
        for each in (
            *[window_outlook(MIXED, conditions, "sliding", window) for window in range(1, 10)],
            *[window_outlook(MIXED, conditions, "aligned", window) for window in range(1, 10)],
            *[dense_outlook(MIXED, conditions, every) for every in range(1, 200)],
        ):
            if each.behind or (memory_bytes is not None and each.memory_bytes > memory_bytes):
                continue
            found = [each.ettr]
            if (stored := each.storage) is not None:
                intervals = range(stored.shortest, stored.shortest + 50 * stored.multiple, stored.multiple)
                found = [persisting(each, conditions, every).ettr for every in intervals]
            best[replicas] = max(best.get(replicas, 0.0), *found)
    advice = advise(MIXED, base, memory_bytes=memory_bytes, losses=LOST)
    assert advice.best is not None
    assert advice.best.ettr >= max(best.values()) - 0.005
    # What each other number of replicas loses.
    named = {name: each for names, each in advice.others for name in names.split(", ")}
    for replicas, ettr in best.items():
        if replicas != advice.best.choice.replicas:
            other = named["1 replica" if replicas == 1 else f"{replicas} replicas"]
            assert other.choice.replicas == replicas
            assert ettr - 0.005 <= other.ettr <= ettr + 1e-9


def test_replicas_are_as_many_as_losses_are_worth() -> None:
    """Rare losses are worth no copy, frequent ones are; a full network and little memory forbid them."""
    conditions = Conditions(2.0, 1e4, 1e5, 1e5)

    def replicas(every_s: float, base: Conditions = conditions, memory_bytes: int | None = None) -> int:
        losses = NodeLosses(6, ((2, every_s),), storage_Bps=500.0)
        best = advise(MIXED, base, memory_bytes=memory_bytes, losses=losses).best
        assert best is not None
        return best.choice.replicas

    assert (replicas(1e9), replicas(1e4)) == (1, 2)
    assert replicas(1e4, memory_bytes=40_000) == 1
    assert replicas(1e4, replace(conditions, network_Bps=1100.0)) == 1


def test_selected_loses_less_than_turns_where_tokens_are_uneven() -> None:
    """With even tokens it loses what turns lose; its ring is larger."""
    alone = rank_shape(MODELS["qwen3-30b-a3b"], Layout(16, 1, 16), PRECISIONS["bf16-mixed"])
    assert (alone.selectable, alone.expert_ranks) == (True, 1)
    even = {each.choice.policy: each for each in advise(alone, CONDITIONS).lossy}
    assert even["partial"].lost_share == even["selected"].lost_share
    uneven = {each.choice.policy: each for each in advise(alone, replace(CONDITIONS, skew=0.1)).lossy}
    assert uneven["partial"] == even["partial"]
    assert uneven["selected"].lost_share < 0.6 * even["selected"].lost_share
    assert uneven["selected"].memory_bytes > uneven["partial"].memory_bytes


def test_ranks_that_hold_the_same_experts_capture_whole_ones() -> None:
    """48 layers of 8 experts, which 16 ranks share: each owns 24, and captures one at least."""
    conditions = replace(CONDITIONS, skew=0.1)
    shared = rank_shape(MODELS["qwen3-30b-a3b"], Layout(256, 1, 16), PRECISIONS["bf16-mixed"])
    assert (shared.selectable, shared.expert_ranks, shared.experts_here) == (True, 16, 8)
    (expert,) = {op.anchor_bytes for op in shared.operators if op.kind is OperatorKind.EXPERT}
    dense = shared.dense_bytes - 48 * 8 * expert
    for window, at_once, until_all in ((4, 6, 4), (8, 3, 8), (24, 1, 24), (48, 1, 24)):
        found = selected_outlook(shared, conditions, window)
        assert found.snapshot_bytes == dense + at_once * 16 * expert
        assert found.older_iterations == iterations_at_risk(128, 0.1, until_all)
        assert partial_outlook(shared, conditions, window).snapshot_bytes <= found.snapshot_bytes


def test_selected_takes_a_window_in_which_turns_lose_too_much() -> None:
    """In each iteration the network carries one expert of eight: taking turns they lose 3.5 iterations."""
    conditions = Conditions(2.0, 160.0, link_Bps=1e6, network_Bps=875.0)
    rank = replace(MIXED, selectable=True)
    assert {str(each.choice) for each in advise(rank, conditions).lossy} == {
        "partial, W=4, every 2",
        "selected, W=4, every 2",
    }
    found = advise(rank, replace(conditions, skew=0.25)).lossy[0]
    assert str(found.choice) == "selected, W=8"
    assert 0.03 < found.lost_share <= LOST_TOKENS_LIMIT < 3.5 * 2.0 / 167.0


@pytest.mark.parametrize(("network_Bps", "every"), [(6e9, 1), (2e9, 3), (1e9, 5)])
def test_partial_snapshots_are_as_frequent_as_the_network_carries(network_Bps: float, every: int) -> None:
    """4.2 GiB each: eight experts of a layer on this rank, and one of them in a snapshot."""
    alone = rank_shape(MODELS["qwen3-30b-a3b"], Layout(16, 1, 16), PRECISIONS["bf16-mixed"])
    conditions = Conditions(1.0, 600.0, 2e10, network_Bps, restart_s=3.0)
    found = {each.choice.policy: each for each in advise(alone, conditions).lossy}
    for policy in ("partial", "selected"):
        assert found[policy].choice == Choice(policy, 8, every)
        assert not found[policy].behind


@pytest.mark.parametrize(
    ("changes", "memory_bytes", "reason"),
    [
        ({"network_Bps": 5e7}, None, "of 7 choices 7 send more than the network carries, also every 16"),
        ({}, 2**30, "of 7 choices 7 need more than 1 GiB of memory"),
        ({"mtbf_s": 10.0}, None, "of 7 choices 7 lose more than 3.75% of all updates"),
    ],
)
def test_it_says_why_no_partial_snapshots_fit(
    changes: dict[str, Any], memory_bytes: int | None, reason: str
) -> None:
    """And what they have whichever experts are selected, which no window makes smaller."""
    alone = rank_shape(MODELS["qwen3-30b-a3b"], Layout(16, 1, 16), PRECISIONS["bf16-mixed"])
    conditions = Conditions(1.0, 600.0, 2e10, 6e9, restart_s=3.0)
    assert advise(alone, conditions).lossy_rejected == ""
    found = advise(alone, replace(conditions, **changes), memory_bytes=memory_bytes)
    assert found.lossy == ()
    for policy in ("partial", "selected"):
        assert (
            f"no {policy} snapshots, which have 1.256 GiB besides experts: {reason}" in found.lossy_rejected
        )
    dense_model = rank_shape(MODELS["llama3-8b"], Layout(16), PRECISIONS["bf16-mixed"])
    assert advise(dense_model, replace(conditions, **changes)).lossy_rejected == ""


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
    from ckptd.client.options import PartialOptions, SnapshotOptions

    found = advise(QWEN, CONDITIONS).best
    assert found is not None
    alone = rank_shape(MODELS["qwen3-30b-a3b"], Layout(16, 1, 1), PRECISIONS["bf16-mixed"])
    unknown = replace(alone, num_experts=0, experts_here=0)
    shared = PartialOptions(num_experts=128)
    for rank, choice, expected in [
        (QWEN, Choice("sliding", 4), SnapshotOptions(window=4)),
        (QWEN, Choice("aligned", 6), SnapshotOptions(policy="aligned", window=6)),
        (QWEN, Choice("dense", 1, 30), SnapshotOptions(policy="dense", every=30)),
        (QWEN, Choice("partial", 6), SnapshotOptions(policy="partial", window=6, partial=shared)),
        (alone, Choice("partial", 6, 2), SnapshotOptions(policy="partial", every=2, window=6)),
        (unknown, Choice("partial", 6, 1, 2), SnapshotOptions(policy="partial", window=6)),
        (QWEN, Choice("selected", 6), SnapshotOptions(policy="selected", window=6, partial=shared)),
    ]:
        text = arguments(replace(found, choice=choice), rank)
        assert text.startswith("snapshots=")
        names = {"SnapshotOptions": SnapshotOptions, "PartialOptions": PartialOptions}
        assert eval(text.removeprefix("snapshots="), names) == expected


def test_stored_parts_are_those_that_were_chosen() -> None:
    found = dense_outlook(QWEN, CONDITIONS, 1)
    for window, parts in ((w, p) for w in range(2, 65) for p in range(1, w)):
        text = arguments(replace(found, choice=Choice("partial", window, 1, parts)), QWEN)
        stored = int(text.partition("persist_experts=")[2].rstrip(")"))
        assert turns_of(stored, 128, window) == parts


def test_settings_are_those_of_durable_checkpoints() -> None:
    assert settings(dense_outlook(QWEN, replace(CONDITIONS, replicas=3), 5)) == {"replicas": 3}
    stored = dense_outlook(QWEN, replace(CONDITIONS, storage_Bps=1e9, loss_mtbf_s=1e6), 5)
    assert stored.storage is not None
    assert settings(stored) == {
        "replicas": 1,
        "persist_every": stored.storage.every,
        "persist_every_s": 0,
    }
    assert stored.storage.every % 5 == 0


@pytest.mark.parametrize(
    ("memory_bytes", "storage_Bps", "loss_mtbf_s"),
    [(None, 0, math.inf), (120 << 30, 0, math.inf), (150 << 30, 2e8, 3e5)],
)
def test_curves_are_what_is_advised_at_each_point(
    memory_bytes: int | None, storage_Bps: float, loss_mtbf_s: float
) -> None:
    conditions = Conditions(1.0, 600.0, 20e9, 12e9, storage_Bps=storage_Bps, loss_mtbf_s=loss_mtbf_s)
    mtbfs_s = (60.0, 600.0, 5000.0, 86400.0)
    curves = {c.name: c for c in ettr_curves(QWEN, conditions, mtbfs_s, memory_bytes=memory_bytes)}
    assert [name for name, curve in curves.items() if not curve.exact] == ["partial", "selected"]
    for n, mtbf_s in enumerate(mtbfs_s):
        found = advise(QWEN, replace(conditions, mtbf_s=mtbf_s), memory_bytes=memory_bytes)
        assert found.best is not None
        assert curves["sliding"].points[n] == found.best
        lossy = [curves[name].points[n] for name in ("partial", "selected")]
        assert sorted(map(repr, filter(None, lossy))) == sorted(map(repr, found.lossy))
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
