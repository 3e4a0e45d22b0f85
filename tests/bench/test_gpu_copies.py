"""What the copy candidates are measured with, on the host: layouts, statistics, the choice, and the rounds."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.gpu_candidates import HostCopy, HostPlace, Sample, chunk_layout, pause_us
from bench.gpu_copies import Measured, Result, Rounds, best_of, chunk_points, measure, summarize
from ckptd.cuda.copy_plan import ChunkPoint

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


@pytest.mark.parametrize(("total", "chunk"), [(1, 1), (10, 3), (9, 3), (5, 100), (64 * MIB + 1, MIB)])
def test_chunks_follow_each_other_and_leave_nothing_out(total: int, chunk: int) -> None:
    layout = chunk_layout(total, chunk)
    assert layout[0][0] == 0
    assert all(at + length == following for (at, length), (following, _) in itertools.pairwise(layout))
    assert sum(layout[-1]) == total
    assert all(length == chunk for _, length in layout[:-1])
    assert 0 < layout[-1][1] <= chunk


def test_no_layout_of_nothing() -> None:
    with pytest.raises(ValueError, match="0 bytes in chunks of 4 are no layout"):
        chunk_layout(0, 4)


def test_pauses_fill_the_time() -> None:
    """64 MB at 64 GB/s take 1 ms; of 10 ms, 9 are left for the 63 pauses between 64 chunks."""
    found = pause_us(64_000_000, 1_000_000, gb_per_s=64.0, over_ms=10.0)
    assert found == pytest.approx(9000 / 63)
    assert pause_us(64_000_000, 1_000_000, gb_per_s=64.0, over_ms=0.5) == 0.0
    assert pause_us(1000, 1000, gb_per_s=64.0, over_ms=10.0) == 0.0, "one chunk has no pause"


def test_a_candidate_in_numbers() -> None:
    rounds = Rounds(
        alone_ms=[10.0, 10.0, 30.0],
        beside=[Sample(105.0, 12.0, 1.0), Sample(210.0, 12.0, 2.0), Sample(100.0, 120.0, 9.0)],
        delays_us=[5.0] * 98 + [100.0, 200.0],
    )
    found = summarize(
        "x",
        rounds,
        total_bytes=500_000_000,
        link_gb_per_s=55.0,
        load_ms=[100.0, 200.0, 100.0],
        idle_us=[3.0, 2.0, 4.0],
    )
    assert found.gb_per_s == pytest.approx(50.0)
    assert found.vs_link == pytest.approx(50 / 55)
    assert found.beside_gb_per_s == pytest.approx(500 / 12)
    assert found.slowdown == pytest.approx(0.05)
    assert found.slowdown_p99 == pytest.approx(0.05)
    assert found.host_ms == 2.0
    assert found.overrun_ms == 0.0, "in the middle the copies end before the load"
    assert found.small_copy_delay_us == pytest.approx(2.0)
    assert found.small_copy_delay_p99_us == pytest.approx(97.0)


def result(name: str, slowdown: float, *, beside: float = 40.0, overrun: float = 0.0) -> Result:
    return Result(name, 50.0, 0.9, beside, slowdown, slowdown, overrun, 1.0, 10.0, 20.0)


def test_the_best_keeps_the_bound_then_ends_in_time_then_is_fast() -> None:
    fast, late, slow = result("fast", 0.05, beside=50), result("late", 0.0, overrun=3), result("slow", 0.009)
    quick = result("quick", 0.008, beside=45)
    best, why = best_of([fast, late, slow, quick], slowdown_max=0.01)
    assert best is quick
    assert why.endswith("3 of 4 keep the bound")
    best, why = best_of([fast, late], slowdown_max=0.01)
    assert best is late
    best, why = best_of([fast, result("worse", 0.06)], slowdown_max=0.01)
    assert best is fast
    assert why == "none keeps the slowdown within 1.0%; fast has the least, 5.0%"
    with pytest.raises(ValueError, match="nothing was measured"):
        best_of([], slowdown_max=0.01)


def test_points_for_a_plan_come_from_the_chunks_alone() -> None:
    found = chunk_points(
        [
            result("burst", 0.0),
            result("chunks_16m", 0.0),
            replace(result("chunks_2m", 0.0), small_copy_delay_us=-0.5),
            result("paced_1m", 0.0),
            replace(result("chunks_4m", 0.0), small_copy_delay_us=None),
        ]
    )
    assert found == (ChunkPoint(2 * MIB, 50.0, 0.0), ChunkPoint(16 * MIB, 50.0, 10.0))


def test_rounds_on_the_host() -> None:
    """Every candidate is measured in every round, alone and beside the load; its bytes arrive."""
    place = HostPlace(3 * MIB + 5, products=1, width=16)
    candidates = place.candidates()
    found = measure(place, candidates, rounds=3)
    assert isinstance(found, Measured)
    assert list(found.rounds) == ["burst", "chunks_1m", "chunks_2m", "chunks_4m", "chunks_16m"]
    assert all(len(r.alone_ms) == len(r.beside) == 3 for r in found.rounds.values())
    assert len(found.load_ms) == 3
    assert torch.equal(place.source, place.target)
    results = found.results(place.source.numel())
    assert next(r.vs_link for r in results if r.name == "burst") == 1.0
    assert all(r.small_copy_delay_us is None for r in results)


def test_a_way_that_loses_bytes_is_no_candidate() -> None:
    class Forgetful(HostCopy):
        def begin(self) -> None:
            super().begin()
            self.join()
            self.target[-1] = 7

    place = HostPlace(100, products=1, width=4)
    with pytest.raises(RuntimeError, match="forgetful: what arrived is not what was sent"):
        measure(place, [Forgetful("forgetful", place.source, place.target, 10)], rounds=1)
