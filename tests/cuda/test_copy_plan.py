"""The plan of copies that a device's curve gives: the recorded one of an H100, and small ones tried out whole."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from ckptd.cuda.copy_plan import (
    DEFAULT_PLAN,
    H100_CURVE,
    ChunkPoint,
    CopyCurve,
    CopyPlan,
    SizePoint,
    choose_copy_plan,
)

MIB = 1 << 20
RECORDED = Path(__file__).parents[1] / "testdata" / "cuda" / "h100_curve.json"
THRESHOLDS = (*(1 << shift for shift in range(12, 27)), 1 << 40)


def recorded() -> CopyCurve:
    found = json.loads(RECORDED.read_text())
    return CopyCurve(
        device=found["device"],
        link_gb_per_s=found["link_gb_per_s"],
        direct=tuple(SizePoint(**point) for point in found["direct"]),
        packed=tuple(SizePoint(**point) for point in found["packed"]),
    )


def test_the_constants_of_the_engine_are_those_of_the_recorded_curve() -> None:
    assert recorded() == H100_CURVE
    assert choose_copy_plan(recorded()) == DEFAULT_PLAN
    assert (DEFAULT_PLAN.small_bytes, DEFAULT_PLAN.chunk_bytes) == (4 * MIB, 16 * MIB)
    assert DEFAULT_PLAN.within_bound
    assert DEFAULT_PLAN.reason == (
        "NVIDIA H100 80GB HBM3: tensors are direct from 4096 KiB on; chunks of 16 MiB, for which a small copy "
        "waits 305 us (not measured, taken for a whole chunk), within 350 us"
    )


def test_a_training_thread_that_the_device_waits_for_packs_more() -> None:
    """A direct copy of 4 MiB wins 4 us of the link and costs 8 us more of the thread."""
    assert choose_copy_plan(H100_CURVE, host_weight=1.0).small_bytes == 16 * MIB


def test_sixty_four_small_copies_in_88_ms_bear_no_chunk() -> None:
    """So chunks alone do not bring the H100's case to one percent, if each waits for a whole one."""
    plan = choose_copy_plan(H100_CURVE, delay_us_max=0.01 * 88e3 / 64)
    assert plan.chunk_bytes == MIB
    assert not plan.within_bound
    assert "no chunk is within 14 us" in plan.reason


def test_predictions_agree_with_the_points_and_lie_between_them() -> None:
    for point in H100_CURVE.packed:
        found = DEFAULT_PLAN.predict([point.size_bytes] * 1000)
        assert found.copy_s == pytest.approx(1000 * point.size_bytes / point.gb_per_s / 1e9)
        assert found.host_s == pytest.approx(1000 * point.host_us / 1e6)
    large = DEFAULT_PLAN.predict([64 * MIB] * 64)
    assert large.copy_s == pytest.approx(4 * (1 << 30) / 52.1e9)
    assert large.host_s == pytest.approx(64 * 9.04e-6)
    times = [H100_CURVE.direct_us(size) for size in range(4 << 10, 8 * MIB, 64 << 10)]
    assert times == sorted(times)
    assert H100_CURVE.direct_us(1) == H100_CURVE.direct_us(4 << 10), "a launch takes what it takes"
    assert DEFAULT_PLAN.predict([]).copy_s == 0.0


def cost(curve: CopyCurve, sizes: list[int], small_bytes: int, weight: float) -> float:
    """Of a list of copies, from what the plan of that threshold predicts."""
    plan = CopyPlan(small_bytes, MIB, curve, 0.0, True, "")
    found = plan.predict(sizes)
    return found.copy_s + weight * found.host_s


@pytest.mark.parametrize("seed", range(40))
def test_no_other_crossover_costs_less(seed: int) -> None:
    """All thresholds, tried for small lists of sizes on curves drawn at random."""
    draw = random.Random(seed)

    def points() -> tuple[SizePoint, ...]:
        chosen = sorted(draw.sample(THRESHOLDS[:-1], draw.randint(1, 4)))
        return tuple(SizePoint(s, draw.uniform(0.1, 20), draw.uniform(0.1, 60)) for s in chosen)

    curve = CopyCurve("drawn", 60.0, points(), points())
    for weight, count in itertools.product((0.0, 0.3, 1.0), (1, 2, 5)):
        sizes = [draw.randint(1, 100 * MIB) for _ in range(count)]
        plan = choose_copy_plan(curve, sizes=sizes, host_weight=weight)
        costs = {t: cost(curve, sizes, t, weight) for t in THRESHOLDS}
        assert costs[plan.small_bytes] == pytest.approx(min(costs.values()))


def test_packs_for_everything_where_direct_copies_never_win() -> None:
    slow = replace(H100_CURVE, direct=(SizePoint(4 << 10, 10.0, 0.1),))
    plan = choose_copy_plan(slow)
    assert plan.small_bytes > 1 << 30
    assert "packed whatever their size" in plan.reason


def test_of_measured_chunks_the_fastest_that_keeps_the_bound() -> None:
    chunks = tuple(
        ChunkPoint(mib * MIB, rate, delay)
        for mib, rate, delay in (
            (1, 40.0, 12.0),
            (2, 47.0, 25.0),
            (4, 50.9, 45.0),
            (8, 51.0, 90.0),
            (16, 53.0, 170.0),
        )
    )
    curve = replace(H100_CURVE, chunks=chunks)
    best = {bound: choose_copy_plan(curve, delay_us_max=bound) for bound in (10.0, 20.0, 60.0, 100.0, 1000.0)}
    # With 100 us, 8 MiB are hardly faster than 4, and twice as long in the way.
    assert [plan.chunk_bytes // MIB for plan in best.values()] == [1, 1, 4, 4, 16]
    assert [plan.within_bound for plan in best.values()] == [False, True, True, True, True]
    assert "(measured)" in best[60.0].reason


def test_what_is_no_curve_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no point of packed copies"):
        replace(H100_CURVE, packed=())
    with pytest.raises(ValueError, match="the points of direct copies are not in the order of size"):
        replace(H100_CURVE, direct=H100_CURVE.direct[::-1])
    with pytest.raises(ValueError, match="the link's rate is 0 GB/s"):
        replace(H100_CURVE, link_gb_per_s=0)
    with pytest.raises(ValueError, match="pass a size and a rate above 0"):
        SizePoint(4096, 1.0, 0.0)
    with pytest.raises(ValueError, match="no negative delay"):
        ChunkPoint(4096, 1.0, -1.0)
    with pytest.raises(ValueError, match="the size of a tensor is not above 0"):
        choose_copy_plan(H100_CURVE, sizes=[4096, 0])
