"""Histograms, and their form among a trainer's counters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptd.core.histogram import STALL_BOUNDS_S, Histogram, bucket_metrics, buckets_in_metrics


def test_a_value_counts_for_every_bound_from_its_own_on() -> None:
    histogram = Histogram((1.0, 2.0, 5.0))
    for value in (0.5, 1.0, 1.5, 5.0, 7.0):
        histogram.observe(value)
    assert list(histogram.buckets) == [(1.0, 2), (2.0, 3), (5.0, 4)]
    assert (histogram.count, histogram.total) == (5, 15.0)


@given(st.lists(st.floats(0, 100)))
def test_buckets_are_what_counting_would_find(values: list[float]) -> None:
    histogram = Histogram(STALL_BOUNDS_S)
    for value in values:
        histogram.observe(value)
    assert histogram.buckets == tuple((b, sum(v <= b for v in values)) for b in STALL_BOUNDS_S)


def test_a_histogram_travels_among_counters() -> None:
    histogram = Histogram(STALL_BOUNDS_S)
    histogram.observe(0.003)
    found = bucket_metrics("stall", histogram)
    assert (found["stall_le_0.0025_s"], found["stall_le_0.005_s"]) == (0.0, 1.0)
    assert buckets_in_metrics("stall", STALL_BOUNDS_S, found | {"steps": 1.0}) == histogram.buckets


def test_a_histogram_with_other_bounds_is_not_read() -> None:
    found = bucket_metrics("stall", Histogram((1.0, 2.0)))
    assert buckets_in_metrics("stall", STALL_BOUNDS_S, found) == ()
