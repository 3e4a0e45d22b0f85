"""What policies cost, against sums by hand and against each other."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from ckptd.core.advice.job_shape import MODELS, PRECISIONS, Layout, RankShape, rank_shape
from ckptd.core.advice.outlook import (
    Conditions,
    dense_outlook,
    partial_outlook,
    replay_share,
    window_outlook,
)
from ckptd.core.schedule import plan_aligned, plan_schedule
from ckptd.core.snapshot_policy import OperatorCost, OperatorKind

EIGHT = RankShape(tuple(OperatorCost(f"e{i}", OperatorKind.EXPERT, 700, 100) for i in range(8)), (1.0,) * 8)
CONDITIONS = Conditions(2.0, 600.0, link_Bps=1e4, network_Bps=1e3, replicas=1, restart_s=3.0)
QWEN = rank_shape(MODELS["qwen3-30b-a3b"], Layout(64, 4, 8), PRECISIONS["bf16-mixed"])


def test_dense_by_hand() -> None:
    found = dense_outlook(EIGHT, CONDITIONS, 10)
    assert (found.snapshot_bytes, found.mean_bytes) == (5600, 560.0)
    assert found.stall_s == pytest.approx(2e-4 / 10)
    assert (found.lag_s, found.load_s, found.replay_s) == (5.6, 5.6, 0.0)
    assert found.lost_s == 10 / 2 * 2.0 + 5.6
    assert found.recovery_s == found.lost_s + 3.0 + 5.6
    assert found.memory_bytes == 3 * 5600 * 2
    assert found.replication_Bps == 280
    assert not found.behind
    assert found.ettr == pytest.approx(1 / (1 + 1e-5) / (1 + found.recovery_s / 600))
    assert dense_outlook(EIGHT, CONDITIONS, 2).behind


MIXED = RankShape((OperatorCost("dense", OperatorKind.DENSE, 1000, 100), *EIGHT.operators), (1.0,) * 9)


def test_partial_by_hand() -> None:
    """MoC-System's equation 6: everything but the experts, and K / E of these."""
    found = partial_outlook(MIXED, CONDITIONS, 4, every=2)
    assert (found.snapshot_bytes, found.mean_bytes) == (1000 + 2 / 8 * 5600, 1200.0)
    assert (found.load_s, found.replay_s) == (6.6, 0.0)
    assert found.lost_s == 2 / 2 * 2.0 + found.lag_s
    assert found.memory_bytes == (4 + 2) * 2400 * 2
    # A failure every 600 s loses the updates of 2 * (4 - 1) / 2 iterations of 2 s.
    assert found.lost_share == 6 / 606
    assert str(found.choice) == "partial, W=4, every 2"
    dense = RankShape((OperatorCost("dense", OperatorKind.DENSE, 1000, 100),), (1.0,))
    with pytest.raises(ValueError, match="this rank has none"):
        partial_outlook(dense, CONDITIONS, 2)


def test_fewer_experts_are_quicker_and_lose_more() -> None:
    """The shape of MoC-System's figure 15: each halving of K about doubles what is lost."""
    found = [partial_outlook(MIXED, CONDITIONS, window) for window in (1, 2, 4, 8)]
    assert [each.lost_share for each in found] == sorted(each.lost_share for each in found)
    assert found[0].lost_share == 0.0
    assert [each.snapshot_bytes for each in found] == [6600, 3800, 2400, 1700]


def test_sliding_by_hand() -> None:
    found = window_outlook(EIGHT, CONDITIONS, "sliding", 4)
    assert found.snapshot_bytes == 8 * 100 + 2 * 600  # compute weights of all, the rest of two anchors
    assert found.memory_bytes == (4 + 2) * 2000 * 2
    assert found.load_s == 4 * 2000 / 1e3
    assert found.lost_s == 0.5 * 2.0 + 2.0
    # 1, 2 and 3 of 4 parts compute all; the others leave out a third.
    assert found.replay_s == pytest.approx(3 * 2.0 * (1 - 0.5 / 3))


def test_aligned_by_hand() -> None:
    found = window_outlook(EIGHT, CONDITIONS, "aligned", 4)
    assert found.snapshot_bytes == 2 * 700 + 6 * 100
    assert found.load_s == (4 * 1400 + (6 + 4 + 2) * 100) / 1e3
    assert found.lost_s == 4 / 2 * 2.0 + 2.0
    assert found.memory_bytes == 9 * 2000 * 2


def test_a_stage_that_replays_alone() -> None:
    """Six micro-batches over three stages: 6 / 8 of the time. All but the cut-off iteration is its replay."""
    logged = replace(CONDITIONS, alone=6 / 8)
    for policy, window in (("sliding", 4), ("aligned", 4), ("sliding", 1)):
        assert policy in ("sliding", "aligned")
        plain, alone = (window_outlook(EIGHT, c, policy, window) for c in (CONDITIONS, logged))  # type: ignore[arg-type]
        assert alone.lost_s == 0.5 * 2.0
        assert alone.replay_s == pytest.approx(6 / 8 * (plain.replay_s + plain.lost_s - 1.0))
        assert (alone.load_s, alone.stall_s) == (plain.load_s, plain.stall_s)
        assert alone.ettr > plain.ettr
    # Half of 10 iterations, one half of which nobody has to repeat, and what had not reached the peer.
    assert dense_outlook(EIGHT, logged, 10).replay_s == pytest.approx(6 / 8 * (4.5 * 2.0 + 5.6))
    assert partial_outlook(MIXED, logged, 4) == partial_outlook(MIXED, CONDITIONS, 4)


def test_copies_that_are_not_hidden_stall() -> None:
    slow = replace(CONDITIONS, link_Bps=2000.0)
    assert dense_outlook(EIGHT, slow, 1).stall_s == pytest.approx(2e-4 + 2.8 - 1.8)
    assert window_outlook(EIGHT, slow, "sliding", 4).stall_s == pytest.approx(2e-4)
    dragging = replace(CONDITIONS, drag=0.1)
    assert dense_outlook(EIGHT, dragging, 1).stall_s == pytest.approx(2e-4 + 0.1 * 0.56)


def test_a_window_of_one_is_a_dense_snapshot_of_every_iteration() -> None:
    dense = dense_outlook(QWEN, CONDITIONS, 1)
    for policy in ("sliding", "aligned"):
        found = window_outlook(QWEN, CONDITIONS, policy, 1)
        assert replace(found, choice=dense.choice, load_s=dense.load_s) == dense


@pytest.mark.parametrize("policy", ["sliding", "aligned"])
def test_wider_windows_have_smaller_snapshots_and_longer_replays(policy: str) -> None:
    assert policy in ("sliding", "aligned")
    found = [window_outlook(QWEN, CONDITIONS, policy, window) for window in (1, 2, 4, 8, 16)]  # type: ignore[arg-type]
    for narrow, wide in itertools.pairwise(found):
        assert wide.snapshot_bytes < narrow.snapshot_bytes
        assert wide.replay_s > narrow.replay_s


def test_aligned_replays_less_where_dense_parts_thaw_last() -> None:
    """Between two thirds, where all is frozen, and all; the paper's skipping saves a third of a frozen part."""
    order = range(len(QWEN.operators))
    aligned = plan_aligned(QWEN.operators, budget_bytes=None, order=order, window=6)
    sliding = plan_schedule(QWEN.operators, budget_bytes=None, order=order, window=6)
    dense_last = window_outlook(QWEN, CONDITIONS, "aligned", 6).replay_s / (5 * 2.0)
    shares = [replay_share(schedule, QWEN.compute, 5) for schedule in (sliding, aligned)]
    assert 2 / 3 < dense_last < shares[0] < shares[1] < 1


def test_nothing_is_replayed_without_a_window() -> None:
    alone = plan_schedule(QWEN.operators, budget_bytes=None, order=range(len(QWEN.operators)), window=1)
    assert replay_share(alone, QWEN.compute, 1) == 1.0
    assert replay_share(alone, [0.0] * len(QWEN.compute), 1) == 1.0


def test_what_is_replayed_to_compare_only() -> None:
    """A sliding window begins one snapshot earlier, a dense snapshot at the one before; aligned ones do not."""
    comparing = replace(CONDITIONS, verify_iterations=4)
    plain, more = (window_outlook(EIGHT, c, "sliding", 4) for c in (CONDITIONS, comparing))
    # Of 1, 2, 3 and at last all 4 phases, frozen operators save a third.
    assert more.replay_s == pytest.approx(2.0 * sum(1 - (1 - n / 4) / 3 for n in (1, 2, 3, 4)))
    assert plain.replay_s == pytest.approx(2.0 * sum(1 - (1 - n / 4) / 3 for n in (1, 2, 3)))
    assert more.load_s == plain.load_s + 2.0
    assert window_outlook(EIGHT, comparing, "aligned", 4) == window_outlook(EIGHT, CONDITIONS, "aligned", 4)
    assert [dense_outlook(EIGHT, comparing, every).replay_s for every in (1, 4, 5)] == [2.0, 8.0, 0.0]


@pytest.mark.parametrize("name", ["iteration_s", "mtbf_s", "link_Bps", "network_Bps", "replicas"])
@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan])
def test_conditions_that_cannot_be_are_refused(name: str, value: float) -> None:
    changed: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=f"{name} is {value:g}; it must be above 0"):
        replace(CONDITIONS, **changed)


@pytest.mark.parametrize("name", ["restart_s", "drag", "alone"])
def test_some_may_be_nothing(name: str) -> None:
    allowed: dict[str, Any] = {name: 0.0}
    refused: dict[str, Any] = {name: -1.0}
    replace(CONDITIONS, **allowed)
    with pytest.raises(ValueError, match=f"{name} is -1; it must be 0 or more"):
        replace(CONDITIONS, **refused)
