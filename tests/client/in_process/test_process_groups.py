"""A process leaves its groups and makes new ones: the old wrapper is of no use, and leaves nothing behind."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckptd.client.in_process.process_groups import abort_groups, calls_so_far, leave_groups
from ckptd.client.in_process.rank_links import RankLinks
from tests.client.gloo_ranks import run_in_ranks

WORLD = 2


def _step(net: nn.Module, model: nn.Linear, rank: int) -> float:
    net(torch.full((1, 2), float(rank + 1))).sum().backward()
    assert model.weight.grad is not None
    found = float(model.weight.grad[0, 0])
    model.zero_grad()
    return found


def _in_rank(rank: int, folder: str) -> None:
    model = nn.Linear(2, 2)
    before = DistributedDataParallel(model)
    assert _step(before, model, rank) == 1.5
    for life in range(2):
        leave_groups()
        assert not dist.is_initialized()
        assert calls_so_far() == -1
        assert _step(model, model, rank) == rank + 1, "the old wrapper still reduces"
        with pytest.raises(RuntimeError, match="is from before the restart"):
            before(torch.ones(1, 2))
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store-{life}",
            rank=rank,
            world_size=WORLD,
            timeout=datetime.timedelta(seconds=60),
        )
        counted = calls_so_far()
        dist.barrier()
        assert calls_so_far() > counted
        before = DistributedDataParallel(model)
        assert _step(before, model, rank) == 1.5
    abort_groups(RankLinks())  # gloo's groups have no abort that does anything
    assert _step(before, model, rank) == 1.5


@pytest.mark.slow
def test_groups_end_and_begin_again_in_a_process(tmp_path: Path) -> None:
    run_in_ranks(_in_rank, WORLD, tmp_path, str(tmp_path))


def test_a_process_without_groups_has_made_no_calls() -> None:
    assert calls_so_far() == -1
