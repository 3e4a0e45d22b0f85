"""Histograms: how many observations were at most as large as each bound. Pure.

Trainers report theirs among their counters, which are numbers by name. So a histogram has such a form, too:
``stall_le_0.001_s`` is the number of stalls of at most a millisecond.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate

# From a tenth of a millisecond, which no user notices, to a second, which everybody does.
STALL_BOUNDS_S = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)

Buckets = tuple[tuple[float, float], ...]
"""Each bound with the number of observations up to it."""


class Histogram:
    """Counts observations by ascending bounds.

    Attributes:
        count: all observations, also those above the last bound.
        total: the sum of their values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * len(self._bounds)
        self.count, self.total = 0, 0.0

    def observe(self, value: float) -> None:
        """Count a value for the first bound that is not below it."""
        index = bisect_left(self._bounds, value)
        if index < len(self._counts):
            self._counts[index] += 1
        self.count += 1
        self.total += value

    @property
    def buckets(self) -> Buckets:
        """The counts up to each bound."""
        return tuple(zip(self._bounds, accumulate(self._counts), strict=True))


def bucket_metrics(name: str, histogram: Histogram) -> dict[str, float]:
    """The buckets as counters with names."""
    return {_bucket_name(name, bound): float(count) for bound, count in histogram.buckets}


def buckets_in_metrics(name: str, bounds: Sequence[float], metrics: Mapping[str, float]) -> Buckets:
    """The buckets among named counters; empty if some are missing, as from a trainer of another version."""
    named = {bound: _bucket_name(name, bound) for bound in bounds}
    if not all(each in metrics for each in named.values()):
        return ()
    return tuple((bound, metrics[each]) for bound, each in named.items())


def _bucket_name(name: str, bound: float) -> str:
    return f"{name}_le_{bound:g}_s"
