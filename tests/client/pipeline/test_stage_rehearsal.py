"""A pipeline schedule's rehearsal leaves no trace in a resumed run, and is no forward of a step."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, schedules
from torch.nn.parallel import DistributedDataParallel

from ckptd.client.capture.ddp_buckets import Buckets
from ckptd.client.model.live_state import LiveState
from ckptd.client.pipeline.stage_hooks import (
    _warn_unknown,
    callables_of,
    rehearsal_tap,
    without_trace,
)
from ckptd.client.rng_state import capture_rng


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


@contextlib.contextmanager
def noting(told: list[str], who: str = "") -> Iterator[None]:
    told.append(f"{who}begin")
    yield
    told.append(f"{who}end")


def run_two_steps(model: Counting, kind: Any = ScheduleGPipe) -> list[str]:
    """What happened, in order: rehearsals begin and end, and calls of the model."""
    told: list[str] = []

    model.register_forward_pre_hook(lambda m, a: told.append("call"))
    stage = PipelineStage(model, 0, 1, torch.device("cpu"))
    schedule = kind(stage, n_microbatches=2, loss_fn=lambda y, t: (y - t).pow(2).sum())
    with rehearsal_tap(lambda: noting(told)):
        for _ in range(2):
            schedule.step(torch.ones(2, 3), target=torch.zeros(2, 3))
    schedule.step(torch.ones(2, 3), target=torch.zeros(2, 3))
    return told


@pytest.mark.usefixtures("alone")
def test_the_rehearsal_is_told_from_the_micro_batches() -> None:
    """The second step has nothing to find out, and after the tap is gone nothing is told."""
    told = run_two_steps(Counting())
    assert told == ["begin", "call", "end", "call", "call", "begin", "end", *["call"] * 4]


@pytest.mark.usefixtures("alone")
def test_the_rehearsal_of_an_older_torch_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the method has another name, and stands in the class for a single stage: the tap found
    nothing and said nothing.
    """
    shared = schedules._PipelineSchedule._initialize_pp_stages

    def separate(self: Any, args: Any, kwargs: Any, target: Any, *_: Any) -> None:
        if not hasattr(self, "_stage_initialized"):
            shared(self, [self._stage], args, kwargs, target, False, False)
            self._stage_initialized = True

    monkeypatch.delattr(schedules._PipelineSchedule, "_initialize_pp_stages")
    monkeypatch.setattr(schedules.PipelineScheduleSingle, "_initialize_stage", separate)
    assert run_two_steps(Counting())[:6] == ["begin", "call", "end", "call", "call", "begin"]
    assert schedules.PipelineScheduleSingle._initialize_stage is separate


def test_several_stages_of_an_older_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    multi: Any = schedules.PipelineScheduleMulti
    monkeypatch.delattr(schedules._PipelineSchedule, "_initialize_pp_stages")
    monkeypatch.setattr(multi, "_initialize_stages", lambda self, args: told.append("rehearsal"))
    with rehearsal_tap(lambda: noting(told)):
        multi._initialize_stages(object(), ())
    assert told == ["begin", "rehearsal", "end"]


def test_a_torch_that_does_it_in_none_of_these_ways_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_unknown.cache_clear()
    monkeypatch.delattr(schedules._PipelineSchedule, "_initialize_pp_stages")
    monkeypatch.delattr(schedules.PipelineScheduleSingle, "_initialize_stage")
    monkeypatch.delattr(schedules.PipelineScheduleMulti, "_initialize_stages")
    for _ in range(2):
        with rehearsal_tap(contextlib.nullcontext):
            pass
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert torch.__version__ in caplog.text
    _warn_unknown.cache_clear()


@pytest.mark.usefixtures("alone")
def test_pipelining_may_be_imported_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpointer was created first, and the tap did nothing. Two of them: each is told, and
    leaves no finder behind.
    """
    name, found = schedules.__name__, list(sys.meta_path)
    monkeypatch.setattr(torch.distributed.pipelining, "schedules", schedules)  # put back at the end
    monkeypatch.delitem(sys.modules, name)
    one, two = ExitStack(), ExitStack()
    told: list[str] = []
    one.enter_context(rehearsal_tap(lambda: noting(told, "one ")))
    two.enter_context(rehearsal_tap(lambda: noting(told, "two ")))
    again: Any = importlib.import_module(name)
    assert again is not schedules
    rehearsal = again._PipelineSchedule._initialize_pp_stages
    run_two_steps(Counting(), again.ScheduleGPipe)
    assert told == 3 * ["two begin", "one begin", "one end", "two end"]
    one.close()
    assert again._PipelineSchedule._initialize_pp_stages is rehearsal
    two.close()
    assert again._PipelineSchedule._initialize_pp_stages is not rehearsal
    assert sys.meta_path == found


def test_a_tap_that_ended_follows_no_import(monkeypatch: pytest.MonkeyPatch) -> None:
    name = schedules.__name__
    monkeypatch.setattr(torch.distributed.pipelining, "schedules", schedules)
    monkeypatch.delitem(sys.modules, name)
    with rehearsal_tap(contextlib.nullcontext):
        pass
    again: Any = importlib.import_module(name)
    assert not hasattr(again._PipelineSchedule._initialize_pp_stages, "__wrapped__")


def test_of_two_checkpointers_the_first_may_end_first() -> None:
    """Torch's own method came back for the second, and the first's dead tap for good."""
    base: Any = schedules._PipelineSchedule
    original = base._initialize_pp_stages
    one, two = ExitStack(), ExitStack()
    told: list[str] = []
    one.enter_context(rehearsal_tap(lambda: noting(told, "one ")))
    two.enter_context(rehearsal_tap(lambda: noting(told, "two ")))
    one.close()
    schedule = SimpleNamespace(_has_backward=False)
    assert base._initialize_pp_stages(schedule, [], (), {}, None, True, False) == (True, False)
    assert told == ["two begin", "two end"]
    two.close()
    assert base._initialize_pp_stages is original


def test_nothing_stays_of_what_runs_without_trace() -> None:
    model = Counting()
    binding = LiveState(model, [torch.optim.SGD(model.parameters(), lr=0.1)], None)
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


@pytest.mark.usefixtures("alone")
def test_a_wrapper_goes_on_sending_buffers_or_not_as_it_did() -> None:
    """A new DDP wrapper broadcasts buffers in its first forward. In a pipeline, whose forwards are
    in ``no_sync``, none does.

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
