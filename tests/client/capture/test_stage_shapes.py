"""What stages find out is kept as plain values, and put into new ones, which then ask nobody; in
both layouts of torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptd.client import values
from ckptd.client.capture.stage_shapes import StageShapes, shapes_of, without_rehearsal
from ckptd.client.pipeline.isolated_stage import IsolatedStage

MIDDLE: StageShapes = {
    "inputs": [[[1, 3], [3, 1], "float32", True], [[1], [1], "int64", False]],
    "outputs": [[[3, 1], [1, 1], "bfloat16", True]],
    "input_grads": [[[1, 3], [3, 1], "float32", False], None],
    "output_grads": [[[3, 1], [1, 1], "bfloat16", False]],
}


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """A world of three in which nobody else is, and nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
    yield
    dist.destroy_process_group()


def stage() -> PipelineStage:
    return PipelineStage(nn.Linear(2, 2), 1, 3, torch.device("cpu"))


def begin(found: Any) -> None:
    """What a schedule does with its stages in its first step; with a rehearsal, it would fail:
    nobody answers.
    """
    schedule = Schedule1F1B(found, n_microbatches=3, loss_fn=nn.MSELoss())
    schedule._initialize_stage((), {})


def test_before_the_first_step_nothing_is_known() -> None:
    assert shapes_of(stage()) is None


def test_a_stage_begins_without_asking_and_knows_the_same() -> None:
    found = stage()
    with without_rehearsal(found, values.unpack(values.pack(MIDDLE))):
        begin(found)
    assert shapes_of(found) == MIDDLE
    infos: Any = found.args_recv_info[2]
    assert [(tuple(info.buffer.shape), info.buffer.dtype) for info in infos] == [
        ((1, 3), torch.float32),
        ((1,), torch.int64),
    ]
    (back,) = found.grad_recv_info[0]
    assert (back.buffer.stride(), back.buffer.dtype) == ((1, 1), torch.bfloat16)
    assert not {"_warmup_forward_vote", "_warmup_backward_result"} & vars(found).keys()


def test_a_stage_of_which_nothing_is_recorded_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shapes of stage 1 were not recorded \(recorded: \[0, 2\]\)"):
        IsolatedStage([stage()], 1, {}, 5, lambda *_: {}, shapes={0: MIDDLE, 1: None, 2: MIDDLE})


class OlderStage:
    """The attributes that a stage of torch 2.11 has for this; checked against its source by hand."""

    def __init__(self) -> None:
        self.inputs_meta: tuple[Tensor, ...] | None = None
        self._outputs_meta: tuple[Tensor, ...] | None = None

    def _configure_outputs_meta(self, outputs: tuple[Tensor, ...]) -> None:
        assert self._outputs_meta is None, "it can be configured once"
        self._outputs_meta = outputs

    def _get_init_p2p_neighbors_ops(self) -> list[str]:
        return ["a message to each neighbour"]


def test_the_older_layout_knows_no_gradients_and_begins_with_no_messages() -> None:
    found = OlderStage()
    assert shapes_of(found) is None
    with without_rehearsal(found, MIDDLE):
        assert found._get_init_p2p_neighbors_ops() == []
    assert found._get_init_p2p_neighbors_ops() == ["a message to each neighbour"]
    assert found.inputs_meta is not None
    assert all(each.is_meta for each in found.inputs_meta)
    assert shapes_of(found) == {role: MIDDLE[role] for role in ("inputs", "outputs")}
    found.inputs_meta = (*found.inputs_meta, 3)  # type: ignore[arg-type]
    assert shapes_of(found) is None  # what is no tensor is not kept
    with without_rehearsal(found, MIDDLE):  # it was told by its user
        pass
