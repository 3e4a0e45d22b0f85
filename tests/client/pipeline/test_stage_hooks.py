"""Listening to stages: every schedule's are found, all that is sent is told in order, and nothing
stays behind.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
import uuid
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    schedules,
)
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptd.client import Checkpointer, RunOptions, SnapshotOptions
from ckptd.client.capture.ddp_buckets import Buckets
from ckptd.client.capture.stage_shapes import StageShapes, without_rehearsal
from ckptd.client.model.live_state import LiveState
from ckptd.client.pipeline.boundary_log import BoundaryLog
from ckptd.client.pipeline.stage_hooks import (
    _warn_unknown,
    callables_of,
    listen,
    rehearsal_tap,
    stages_of,
    without_trace,
)
from ckptd.client.rng_state import capture_rng
from ckptd.core.slots.boundary import SentKind
from ckptd.core.slots.ring import SlotState
from tests.option_groups import grouped


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """A world of two in which nobody else is, and nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def stage(index: int = 0, count: int = 2) -> PipelineStage:
    return PipelineStage(nn.Linear(2, 2), index, count, torch.device("cpu"))


class Told:
    """Takes what a log is told."""

    def __init__(self) -> None:
        self.sent_: list[tuple[SentKind, int, int, list[Tensor]]] = []

        self.peers: list[list[int]] = []

    def sent(
        self,
        kind: SentKind,
        stage: int,
        micro_batch: int,
        tensors: list[Tensor],
        peers: list[int],
    ) -> None:
        self.sent_.append((kind, stage, micro_batch, tensors))
        self.peers.append(peers)

    def receives(self, peers: list[int]) -> None:
        self.peers.append(peers)


def test_the_stages_of_whatever_is_passed() -> None:
    one, two = stage(0, 4), stage(2, 4)
    assert stages_of(one) == [one]
    assert stages_of([one, two]) == [one, two]
    assert stages_of(ScheduleGPipe(one, 2)) == [one]
    assert stages_of([Schedule1F1B(stage(0, 2), 2), two])[1] is two
    assert stages_of(ScheduleInterleaved1F1B([one, two], 2)) == [one, two]


@pytest.mark.parametrize("what", [nn.Linear(1, 1), None, "stage", [], 3], ids=repr)
def test_what_has_no_stage_is_refused_with_the_way_out(what: Any) -> None:
    with pytest.raises(ValueError, match=r"pass a schedule or stages .* call activation\(\)"):
        stages_of(what)


def test_both_directions_are_told_in_the_order_of_their_operations() -> None:
    found, told = stage(1, 3), Told()
    tensors = [torch.zeros(1), torch.ones(1)]
    found.act_send_info = {0: [2], 1: [2]}
    found.fwd_cache[3] = (tuple(tensors), [])
    with listen([found], told):  # type: ignore[arg-type]
        operations = found.get_fwd_send_ops(3)
        found.has_backward = False
        assert found.get_bwd_send_ops(3) == []
    assert [operation.tensor.data_ptr() for operation in operations] == [
        tensor.data_ptr() for tensor in tensors
    ]
    (forward, backward) = told.sent_
    assert forward[:3] == (SentKind.ACTIVATION, 1, 3)
    assert [t.data_ptr() for t in forward[3]] == [t.data_ptr() for t in tensors]
    assert backward == (SentKind.GRADIENT, 1, 3, [])


def test_afterwards_the_stage_is_as_it_was() -> None:
    found = stage()
    before = dict(vars(found))
    with listen([found], Told()):  # type: ignore[arg-type]
        assert vars(found).keys() - before.keys() == {
            f"get_{direction}_{what}_ops" for direction in ("fwd", "bwd") for what in ("send", "recv")
        }
    assert vars(found).keys() == before.keys()


def checkpointer(endpoint: str, **options: Any) -> Checkpointer:
    model = nn.Linear(2, 2)
    run = uuid.uuid4().hex[:8]
    return Checkpointer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        **grouped(
            **{
                "job": "stages",
                "run": run,
                "daemon": endpoint,
                "rank": 0,
                "world_size": 1,
                **options,
            }
        ),
    )


def test_a_stage_is_logged_once_and_close_undoes_it(endpoint: str) -> None:
    found = stage()
    with checkpointer(endpoint) as ckpt:
        log = ckpt.log_boundaries(ScheduleGPipe(found, 2))
        assert log is ckpt.boundary_log()
        assert "get_fwd_send_ops" in vars(found)
        with pytest.raises(ValueError, match="1 of these stages are logged already"):
            ckpt.log_boundaries(found)
    assert "get_fwd_send_ops" not in vars(found)


def test_off_nothing_is_listened_to() -> None:
    found = stage()
    checkpointer("", daemon=None).log_boundaries(found)
    assert "get_fwd_send_ops" not in vars(found)


def test_off_what_has_no_stage_is_refused_all_the_same() -> None:
    with pytest.raises(ValueError, match="pass a schedule or stages"):
        checkpointer("", daemon=None).log_boundaries(nn.Linear(1, 1))


def test_what_is_sent_outside_of_a_step_is_counted_and_no_error(endpoint: str) -> None:
    """An evaluation after the loop goes through the same stages."""
    found = stage()
    found.act_send_info = {0: [1]}
    found.fwd_cache[0] = ((torch.zeros(1),), [])
    with checkpointer(endpoint) as ckpt:
        ckpt.log_boundaries(found)
        assert len(found.get_fwd_send_ops(0)) == 1
        assert ckpt.stats()["log_outside"] == 1


def test_a_stage_that_lives_on_keeps_no_log(endpoint: str) -> None:
    """A checkpointer that nobody closed must be able to go, and its memory with it."""
    found, ckpt = stage(), checkpointer(endpoint)
    found.act_send_info = {0: [1]}
    found.fwd_cache[0] = ((torch.zeros(1),), [])
    log = ckpt.log_boundaries(found)
    assert isinstance(log, BoundaryLog)
    seen = weakref.ref(log)
    ckpt.close()
    del log, ckpt
    gc.collect()
    assert seen() is None
    assert len(found.get_fwd_send_ops(0)) == 1


def test_snapshots_keep_what_stages_have_found_out(endpoint: str) -> None:
    """A restart in which neighbours are not there cannot ask them."""
    found, model = stage(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shapes: StageShapes = {
        "inputs": [[[1, 2], [2, 1], "float32", True]],
        "outputs": [[[1, 2], [2, 1], "float32", True]],
    }
    ckpt = Checkpointer(
        *(model, optimizer),
        run=RunOptions(job="stages", name=uuid.uuid4().hex[:8], rank=0, world_size=1),
        daemon=endpoint,
        snapshots=SnapshotOptions(window=1),
    )
    with ckpt, without_rehearsal(found, shapes):
        ckpt.log_boundaries(found)
        Schedule1F1B(found, n_microbatches=2)._initialize_stage(torch.zeros(1, 2), {})
        for _ in ckpt.steps(8):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        memory = ckpt._memory
        assert memory is not None
        memory.settle_filled(10)
        sealed = [r for r in memory.table.records() if r.state is SlotState.SEALED]
        assert sealed
        for image in memory.images(sealed):
            assert image.scalars()["stages"] == {0: shapes}


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


@pytest.mark.usefixtures("world")
def test_the_rehearsal_is_told_from_the_micro_batches() -> None:
    """The second step has nothing to find out, and after the tap is gone nothing is told."""
    told = run_two_steps(Counting())
    assert told == ["begin", "call", "end", "call", "call", "begin", "end", *["call"] * 4]


@pytest.mark.usefixtures("world")
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


@pytest.mark.usefixtures("world")
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


@pytest.mark.usefixtures("world")
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
