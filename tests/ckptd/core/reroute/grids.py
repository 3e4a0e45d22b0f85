"""Grids with missing workers, for tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from hypothesis import strategies as st

from ckptd.core.reroute.pipeline_grid import PipelineGrid, StageCosts, Worker

__all__ = ["UNIT", "any_grid", "grid", "small_grids"]

UNIT = StageCosts(1, 1, 1, optimizer_s=0.5)


def grid(
    pipelines: int,
    stages: int,
    micro_batches: int,
    *failed: tuple[int, int],
    cost: StageCosts = UNIT,
    **more: bool,
) -> PipelineGrid:
    missing = frozenset(Worker(*w) for w in failed)
    return PipelineGrid(pipelines, (cost,) * stages, micro_batches, missing, **more)


def small_grids() -> Iterator[PipelineGrid]:
    """All with up to 3 pipelines of 3 stages and 4 micro-batches, and a survivor of each stage;
    one of those that differ only in the order of pipelines.
    """
    for pipelines, stages in itertools.product((1, 2, 3), repeat=2):
        shapes = itertools.product((False, True), repeat=stages)
        for rows in itertools.combinations_with_replacement(shapes, pipelines):
            failed = [(d, s) for d, row in enumerate(rows) for s, lost in enumerate(row) if lost]
            for micro_batches in (1, 2, 3, 4):
                found = grid(pipelines, stages, micro_batches, *failed)
                if not found.lost_stages:
                    yield found


@st.composite
def any_grid(draw: st.DrawFn, most: int = 4) -> PipelineGrid:
    """With different stages, links, memory; also some that are lost."""
    pipelines, stages, micro_batches = (draw(st.integers(1, most)) for _ in range(3))
    seconds = st.sampled_from([0.0, 0.3, 1.0, 1.7])
    costs = []
    for _ in range(stages):
        act = draw(st.integers(1, 3))
        input_s, weight_s, optimizer_s, transfer_s, reduce_s = (draw(seconds) for _ in range(5))
        cost = StageCosts(
            draw(st.sampled_from([0.5, 1.0, 2.2])),
            input_s,
            weight_s,
            optimizer_s,
            transfer_s,
            reduce_s,
            activation_bytes=act,
            kept_bytes=draw(st.integers(0, act)),
        )
        room = draw(st.sampled_from([None, 1, 2, 5]))
        costs.append(cost if room is None else replace(cost, memory_bytes=room * act))
    workers = [Worker(d, s) for d in range(pipelines) for s in range(stages)]
    failed = draw(st.sets(st.sampled_from(workers), max_size=max(1, len(workers) // 2)))
    return PipelineGrid(pipelines, tuple(costs), micro_batches, frozenset(failed), draw(st.booleans()))
