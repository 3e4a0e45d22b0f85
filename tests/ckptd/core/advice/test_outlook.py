"""What policies cost, against sums by hand and against each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from ckptd.core.advice.job_shape import MODELS, PRECISIONS, Layout, RankShape, rank_shape
from ckptd.core.advice.outlook import (
    EQUAL_ETTR,
    Conditions,
    PolicyOutlook,
    at_mtbf,
    dense_outlook,
    partial_outlook,
    persisting,
    replay_share,
    selected_outlook,
    window_outlook,
)
from ckptd.core.durable_experts import DurableTurns, Listed, choose_durable
from ckptd.core.partial_experts import iterations_at_risk
from ckptd.core.schedule import order_operators, plan_aligned, plan_schedule
from ckptd.core.snapshot_policy import OperatorCost, OperatorKind

EIGHT = RankShape(tuple(OperatorCost(f"e{i}", OperatorKind.EXPERT, 700, 100) for i in range(8)), (1.0,) * 8)
CONDITIONS = Conditions(2.0, 600.0, link_Bps=1e4, network_Bps=1e3, replicas=1, restart_s=3.0)
QWEN = rank_shape(MODELS["qwen3-30b-a3b"], Layout(64, 4, 8), PRECISIONS["bf16-mixed"])


def test_dense_by_hand() -> None:
    found = dense_outlook(EIGHT, CONDITIONS, 10)
    assert (found.snapshot_bytes, found.mean_bytes) == (5600, 560.0)
    assert found.stall_s == pytest.approx(2e-4 / 10)
    assert (found.lag_s, found.load_s, found.replay_s) == (0.56 + 5.6, 5.6, 0.0)
    assert found.lost_s == 10 / 2 * 2.0 + found.lag_s
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


def test_selected_by_hand() -> None:
    """As many bytes as partial snapshots, twice the window in memory, and what the selection leaves."""
    turns, selected = (rate(MIXED, CONDITIONS, 4, 2) for rate in (partial_outlook, selected_outlook))
    assert selected.memory_bytes == (2 * 4 + 2) * 2400 * 2
    same = replace(selected, choice=turns.choice, memory_bytes=turns.memory_bytes)
    assert same == turns, "tokens are even"
    assert str(selected.choice) == "selected, W=4, every 2"
    uneven = selected_outlook(MIXED, replace(CONDITIONS, skew=0.25), 4, 2)
    assert uneven.older_iterations == 2 * iterations_at_risk(8, 0.25, 4)
    assert uneven.lost_share < 0.8 * selected.lost_share
    assert replace(uneven, older_iterations=3.0, lost_share=selected.lost_share) == selected
    dense = RankShape((OperatorCost("dense", OperatorKind.DENSE, 1000, 100),), (1.0,))
    with pytest.raises(ValueError, match="this rank has none"):
        selected_outlook(dense, CONDITIONS, 2)


def test_sliding_by_hand() -> None:
    found = window_outlook(EIGHT, CONDITIONS, "sliding", 4)
    assert found.snapshot_bytes == 8 * 100 + 2 * 600  # compute weights of all, the rest of two anchors
    assert found.memory_bytes == (4 + 2) * 2000 * 2
    assert found.load_s == 4 * 2000 / 1e3
    assert found.lost_s == 0.5 * 2.0 + 0.2 + 2.0
    # 1, 2 and 3 of 4 parts compute all; the others leave out a third.
    assert found.replay_s == pytest.approx(3 * 2.0 * (1 - 0.5 / 3))


def test_aligned_by_hand() -> None:
    found = window_outlook(EIGHT, CONDITIONS, "aligned", 4)
    assert found.snapshot_bytes == 2 * 700 + 6 * 100
    assert found.load_s == (4 * 1400 + (6 + 4 + 2) * 100) / 1e3
    assert found.lost_s == 4 / 2 * 2.0 + 0.2 + 2.0
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
    # Half of 10 iterations, one half of which nobody has to repeat, and what had not reached host and peer.
    assert dense_outlook(EIGHT, logged, 10).replay_s == pytest.approx(6 / 8 * (4.5 * 2.0 + 0.56 + 5.6))
    assert partial_outlook(MIXED, logged, 4) == partial_outlook(MIXED, CONDITIONS, 4)


def test_copies_that_are_not_hidden_stall() -> None:
    slow = replace(CONDITIONS, link_Bps=2000.0)
    assert dense_outlook(EIGHT, slow, 1).stall_s == pytest.approx(2e-4 + 2.8 - 1.8)
    assert window_outlook(EIGHT, slow, "sliding", 4).stall_s == pytest.approx(2e-4)
    dragging = replace(CONDITIONS, drag=0.1)
    assert dense_outlook(EIGHT, dragging, 1).stall_s == pytest.approx(2e-4 + 0.1 * 0.56)
    top = replace(CONDITIONS, top_s=0.01)
    assert window_outlook(EIGHT, top, "sliding", 4).stall_s == pytest.approx(0.01)
    assert dense_outlook(EIGHT, top, 10).stall_s == pytest.approx(0.001), (
        "a snapshot, not an iteration, costs it"
    )


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


@pytest.mark.parametrize(
    ("models", "shared", "sizes", "first", "last"),
    [
        (("qwen3-30b-a3b", "deepseek-moe-16b"), False, (1.165, 1.495), (0.89, 0.90), (0.765, 0.79)),
        (("qwen3-30b-a3b", "deepseek-moe-16b"), True, (0.885, 0.965), (0.89, 0.90), (0.765, 0.79)),
        (("mixtral-8x7b",), False, (0.775, 0.93), (0.725, 0.755), (0.94, 0.955)),
        (("mixtral-8x7b",), True, (0.795, 0.995), (0.725, 0.755), (0.94, 0.955)),
    ],
)
def test_what_the_order_of_aligned_windows_changes(
    models: tuple[str, ...],
    shared: bool,
    sizes: tuple[float, float],
    first: tuple[float, float],
    last: tuple[float, float],
) -> None:
    """As docs/policies.md has it: dense parts first or last, captured by each rank or by 8 ranks together."""
    for name, window in itertools.product(models, range(4, 9)):
        model = MODELS[name]
        alone = replace(model, experts=model.experts // 8), Layout(1)
        rank = rank_shape(*((model, Layout(8, 1, 8)) if shared else alone), PRECISIONS["bf16-mixed"])
        schedules = [
            plan_aligned(
                rank.operators,
                budget_bytes=None,
                order=order_operators(rank.operators, [0.0] * len(rank.operators), dense_last=dense_last),
                window=window,
            )
            for dense_last in (False, True)
        ]
        replays = [replay_share(schedule, rank.compute, window - 1) for schedule in schedules]
        assert sizes[0] < schedules[0].peak_bytes / schedules[1].peak_bytes < sizes[1]
        assert first[0] < replays[0] < first[1]
        assert last[0] < replays[1] < last[1]


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


STORED = replace(CONDITIONS, storage_Bps=100.0, loss_mtbf_s=1e6)


def stored(outlook: PolicyOutlook) -> tuple[int, int, float, float]:
    """The shortest interval, the bytes and the length of an upload, and the load."""
    found = outlook.storage
    assert found is not None
    assert found.upload_s == found.upload_bytes / 100
    return found.shortest, found.upload_bytes, found.load_s, found.replay_s


def test_durable_checkpoints_by_hand() -> None:
    """Whole windows are stored and loaded; intervals hold an upload and a quarter of it."""
    sliding = window_outlook(EIGHT, STORED, "sliding", 4)
    # 80 s, so 100 s of iterations of 2 s and a little stall.
    assert stored(sliding) == (50, 8000, 80.0, sliding.replay_s)
    assert sliding.memory_bytes == ((4 + 2) * 2 + 4) * 2000
    aligned = window_outlook(EIGHT, STORED, "aligned", 4)
    assert stored(aligned)[:3] == (44, 6800, 68.0)  # 42.5 iterations, and whole windows
    dense = dense_outlook(EIGHT, STORED, 10)
    assert stored(dense) == (40, 5600, 56.0, 0.0)
    assert dense.memory_bytes == (3 * 2 + 1) * 5600
    whole = partial_outlook(MIXED, STORED, 4, every=2)
    assert stored(whole) == (42, 6600, 66.0, 0.0)
    part = partial_outlook(MIXED, STORED, 4, every=2, parts=1)
    assert stored(part) == (16, 1000 + 5600 / 4, 66.0, 0.0)
    assert str(part.choice) == "partial, W=4, every 2, stores 1 of 4 parts"
    assert partial_outlook(MIXED, STORED, 4, every=2, parts=4) == whole
    assert window_outlook(EIGHT, CONDITIONS, "sliding", 4).storage is None
    with pytest.raises(ValueError, match="5 of 4 parts of the experts"):
        partial_outlook(MIXED, STORED, 4, parts=5)


def test_losses_of_all_copies_by_hand() -> None:
    part = partial_outlook(MIXED, replace(STORED, loss_mtbf_s=6000.0), 4, every=2, parts=1)
    found = persisting(part, replace(STORED, loss_mtbf_s=6000.0), 24)
    assert found.storage is not None
    assert found.storage.lost_s == pytest.approx(24 / 2 * (2.0 + 1e-4) + 24.0)
    assert found.loss_s == found.storage.lost_s + 3.0 + 66.0
    assert found.ettr == pytest.approx(
        1 / (1 + found.stall_s / 2) / (1 + found.recovery_s / 600 + found.loss_s / 6000)
    )
    # Experts are 3 iterations older than everything else; three parts of four are of earlier checkpoints.
    assert found.storage.lost_iterations == 3 + 24 * (1 + 2 + 3) / 4
    lost = (3 / 600 + 39 / 6000) * 2.0
    assert found.lost_share == pytest.approx(lost / (1 + lost))
    with pytest.raises(ValueError, match="a durable checkpoint every 8 iterations"):
        persisting(part, STORED, 8)
    with pytest.raises(ValueError, match="a durable checkpoint every 8 iterations, with None"):
        persisting(partial_outlook(MIXED, CONDITIONS, 4), CONDITIONS, 8)


@cache
def ages(window: int, parts: int, every: int, between: int) -> list[float]:
    """By how much experts of durable checkpoints are older than these, on average over the experts: as
    `choose_durable` has it, one checkpoint after the other.
    """
    turns = DurableTurns(parts, window, limit=None)

    def listed(iterations: Iterable[int]) -> list[Listed]:
        return [Listed(i, i // every % window) for i in iterations]

    last: list[Listed] = []
    found = []
    for end in range(between * window, between * window * 9, between):
        now = listed(range(end - (window - 1) * every, end + 1, every))
        chosen = choose_durable(last, now, window, turns)
        last = now if chosen is None else listed(chosen.iterations)
        copies = {each.phase: each.iteration for each in reversed(last)}
        for each in last[:-1]:  # the newest is bare if another image has its experts
            copies[each.phase] = each.iteration
        found.append(sum(end - copy for copy in copies.values()) / window)
    return found[len(found) // 2 :]


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(
    ("window", "parts"), [(w, p) for w in (2, 3, 4, 6, 8, 12) for p in range(1, w + 1) if w % p == 0]
)
def test_lost_updates_are_those_of_the_copies_that_are_stored(window: int, parts: int, every: int) -> None:
    """Where parts go into windows, and windows into intervals, without a remainder: over a whole turn."""
    for between in (window * every, 5 * window * every):
        found = partial_outlook(MIXED, replace(STORED, storage_Bps=1e9), window, every, parts)
        storage = persisting(found, STORED, between).storage
        turn = ages(window, parts, every, between)[-(window // parts) :]
        assert storage is not None
        stored = sum(turn) / len(turn)
        if (window, parts, between) == (2, 1, 2 * every):
            # Two consecutive snapshots, of which one is bare, would look like a plain window: more is stored.
            assert stored < storage.lost_iterations
        else:
            assert storage.lost_iterations == pytest.approx(stored)


def test_storage_that_is_of_no_use_is_rated_all_the_same() -> None:
    found = window_outlook(EIGHT, replace(STORED, storage_Bps=1e-6), "sliding", 4)
    assert found.storage is not None
    assert 0 < found.ettr < EQUAL_ETTR
    assert found.storage.every == found.storage.shortest


@pytest.mark.parametrize("loss_mtbf_s", [2e3, 1e5, 1e7])
def test_durable_checkpoints_are_as_rare_as_nobody_notices(loss_mtbf_s: float) -> None:
    conditions = replace(STORED, loss_mtbf_s=loss_mtbf_s)
    for outlook in (
        window_outlook(EIGHT, conditions, "sliding", 4),
        window_outlook(EIGHT, conditions, "aligned", 4),
        dense_outlook(EIGHT, conditions, 10),
        partial_outlook(MIXED, conditions, 4),
    ):
        found = outlook.storage
        assert found is not None
        rated = [
            persisting(outlook, conditions, every)
            for every in range(found.shortest, found.every + 2 * found.multiple, found.multiple)
        ]
        near = [each for each in rated if each.ettr >= rated[0].ettr - EQUAL_ETTR]
        assert outlook == near[-1]
        assert rated[0].ettr == max(each.ettr for each in rated)
        again = at_mtbf(at_mtbf(outlook, replace(conditions, mtbf_s=60.0)), conditions)
        assert again == outlook


def test_durable_checkpoints_come_once_a_day_however_rare_losses_are() -> None:
    found = window_outlook(EIGHT, replace(STORED, loss_mtbf_s=1e12), "sliding", 4)
    assert found.storage is not None
    assert found.storage.every == int(86400 / (2.0 + found.stall_s))


def test_durable_checkpoints_are_more_frequent_where_too_much_would_be_lost() -> None:
    conditions = Conditions(2.0, 6000.0, 1e4, 1e3, storage_Bps=1e4, loss_mtbf_s=1e6)
    found = partial_outlook(MIXED, conditions, 8, parts=1)
    assert found.storage is not None
    assert found.storage.every > found.storage.shortest
    often = replace(conditions, loss_mtbf_s=3e3)
    found = partial_outlook(MIXED, often, 8, parts=1)
    assert found.storage is not None
    assert found.storage.every == found.storage.shortest == 8
    assert persisting(found, often, 16).lost_share > found.lost_share


def test_storage_and_losses_belong_together() -> None:
    text = "what storage is good for follows from both"
    for storage_Bps, loss_mtbf_s in ((1e9, math.inf), (0.0, 1e6)):
        with pytest.raises(ValueError, match=text):
            replace(CONDITIONS, storage_Bps=storage_Bps, loss_mtbf_s=loss_mtbf_s)
    for value in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=f"loss_mtbf_s is {value:g}; it must be above 0"):
            replace(STORED, loss_mtbf_s=value)


@pytest.mark.parametrize("name", ["iteration_s", "mtbf_s", "link_Bps", "network_Bps", "replicas"])
@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan])
def test_conditions_that_cannot_be_are_refused(name: str, value: float) -> None:
    changed: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=f"{name} is {value:g}; it must be above 0"):
        replace(CONDITIONS, **changed)


@pytest.mark.parametrize("name", ["restart_s", "drag", "alone", "storage_Bps", "skew", "top_s"])
def test_some_may_be_nothing(name: str) -> None:
    allowed: dict[str, Any] = {name: 0.0}
    refused: dict[str, Any] = {name: -1.0}
    replace(CONDITIONS, **allowed)
    with pytest.raises(ValueError, match=f"{name} is -1; it must be 0 or more"):
        replace(CONDITIONS, **refused)
