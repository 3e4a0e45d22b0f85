"""A pipeline schedule's rehearsal leaves no trace in a resumed run, and is no forward of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from ckptd.client.binding import Binding
from ckptd.client.buckets import Buckets
from ckptd.client.rehearsal import callables_of, rehearsal_tap, without_trace
from ckptd.client.rng import capture_rng


class Counting(nn.Module):
    """Counts its calls in a buffer, and draws from numpy's generator, which torch does not fork."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        np.random.rand()
        out: Tensor = self.linear(x)
        return out


@pytest.fixture
def world(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run_two_steps(model: Counting) -> list[str]:
    """What happened, in order: rehearsals begin and end, and calls of the model."""
    told: list[str] = []

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        told.append("begin")
        yield
        told.append("end")

    model.register_forward_pre_hook(lambda m, a: told.append("call"))
    stage = PipelineStage(model, 0, 1, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda y, t: (y - t).pow(2).sum())
    with rehearsal_tap(around):
        for _ in range(2):
            schedule.step(torch.ones(2, 3), target=torch.zeros(2, 3))
    schedule.step(torch.ones(2, 3), target=torch.zeros(2, 3))
    return told


@pytest.mark.usefixtures("world")
def test_the_rehearsal_is_told_from_the_micro_batches() -> None:
    """The second step has nothing to find out, and after the tap is gone nothing is told."""
    told = run_two_steps(Counting())
    assert told == ["begin", "call", "end", "call", "call", "begin", "end", *["call"] * 4]


def test_nothing_stays_of_what_runs_without_trace() -> None:
    model = Counting()
    binding = Binding(model, [torch.optim.SGD(model.parameters(), lr=0.1)], None)
    rng = capture_rng()
    with without_trace(binding):
        model(torch.randn(2, 3))
        assert model.calls == 1
        assert capture_rng() != rng
    assert model.calls == 0
    assert capture_rng() == rng


def test_the_calls_of_a_container_are_those_of_its_children() -> None:
    """A list of virtual stages is passed as the model, and never called itself."""
    parts = [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))]
    assert callables_of(nn.ModuleList(parts)) == parts
    assert callables_of(nn.ModuleDict({"a": nn.ModuleList(parts)})) == parts
    assert callables_of(parts[1]) == [parts[1]]


@pytest.mark.usefixtures("world")
def test_a_wrapper_goes_on_sending_buffers_or_not_as_it_did() -> None:
    """A new DDP wrapper broadcasts buffers in its first forward. In a pipeline, whose forwards are in ``no_sync``, none does.

    So a resumed replica got the counts of the first one, and its replay never reproduced what was recorded.
    """
    before, resumed = (DistributedDataParallel(Counting()) for _ in range(2))
    buckets = Buckets(before)
    assert len(buckets.senders()) == 1
    with before.no_sync():
        before(torch.ones(2, 3))
    assert buckets.senders() == []
    Buckets(resumed).send_next(buckets.senders())
    assert not resumed.require_forward_param_sync
