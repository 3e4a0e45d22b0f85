"""The straggler factor against exact fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.core.elastic.elastic_types import Cluster, ExpertPlacement
from ckptd.core.elastic.placement.balance import straggler_by_layer, straggler_factor


@given(st.integers(0, 2**32), st.sampled_from([3, 1000, 2**40, 2**62]))
@settings(max_examples=30, deadline=None)
def test_it_is_the_busiest_rank_over_the_mean(seed: int, most: int) -> None:
    rng = np.random.default_rng(seed)
    shape = (2, int(rng.integers(1, 6)), int(rng.integers(1, 5)))
    counts = rng.integers(0, 3, shape).astype(np.int32)
    counts[:, 0] += counts.sum(axis=1) == 0
    loads = rng.integers(0, most, shape[::2])
    ranks = tuple(rng.integers(1, 4, shape[1]).tolist())
    cluster = Cluster(np.full(shape[1], 20), ranks=ranks)
    busy, means = [], []
    for layer in range(2):
        replicas = counts[layer].sum(axis=0).tolist()
        tokens = [
            sum(
                Fraction(int(loads[layer, e]), replicas[e]) * int(counts[layer, n, e])
                for e in range(shape[2])
            )
            / ranks[n]
            for n in range(shape[1])
        ]
        busy.append(max(tokens))
        means.append(Fraction(sum(loads[layer].tolist()), sum(ranks)))
    placement = ExpertPlacement(counts)
    wanted = [float(b / m) if m else 1.0 for b, m in zip(busy, means, strict=True)]
    assert straggler_by_layer(placement, loads, cluster) == pytest.approx(wanted, rel=1e-6)
    joint = float(sum(busy) / sum(means)) if sum(means) else 1.0
    assert straggler_factor(placement, loads, cluster) == pytest.approx(joint, rel=1e-6)


def test_loads_of_another_shape_are_refused() -> None:
    placement = ExpertPlacement(np.ones((1, 3, 2), dtype=np.int32))
    with pytest.raises(ValueError, match=r"loads of shape \(1, 3\) for 1 layers of 2 experts"):
        straggler_factor(placement, [[1, 2, 3]], Cluster.uniform(3, 2))
