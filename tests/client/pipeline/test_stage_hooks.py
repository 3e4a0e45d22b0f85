"""Listening to stages: every schedule's are found, all that is sent is told in order, and nothing
stays behind.
"""

from __future__ import annotations

import gc
import uuid
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptd.client import Checkpointer, RunOptions, SnapshotOptions
from ckptd.client.capture.stage_shapes import StageShapes, without_rehearsal
from ckptd.client.pipeline.boundary_log import BoundaryLog
from ckptd.client.pipeline.stage_hooks import listen, stages_of
from ckptd.core.slots.boundary import SentKind
from ckptd.core.slots.slots import SlotState
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
