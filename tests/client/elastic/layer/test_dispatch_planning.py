"""Which form of the dispatcher serves a device, and what happens where the kernels are of no use."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ckptd.client.elastic.layer import dispatch_planning
from ckptd.client.elastic.layer.dispatch_planning import Dispatcher
from ckptd.client.elastic.layer.token_rows import Order, RowCounts, plan_route
from ckptd.cuda.dispatch import DeviceDispatcher, DeviceSends, KernelsUnavailable
from tests.ckptd.core.elastic.forms import NEEDS_CUDA

REPLICAS = np.array([[2, 1, 0, 1, 0], [0, 1, 1, 1, 0], [1, 0, 0, 1, 1], [0, 0, 0, 1, 1]])
NODES = np.array([0, 1, 0, 1])
COUNTS = torch.tensor([[9, 0, 3, 1, 7], [2, 2, 2, 2, 2], [0, 0, 0, 0, 5], [4, 0, 8, 1, 1]])


class _Kernels:
    """Stands for the GPU form: the CPU's answer, off by some tokens."""

    def __init__(self, off: int) -> None:
        self._off = off

    def plan(self, counts: Tensor) -> _Kernels:
        self._counts = counts
        return self

    def share(self, rank: int) -> tuple[DeviceSends, Tensor]:
        share = Dispatcher(REPLICAS, NODES, rank).share(self._counts)
        return DeviceSends(share.tokens_RE, share.first_RE), share.received_RE + self._off


def _tried(made: object, monkeypatch: pytest.MonkeyPatch) -> DeviceDispatcher | None:
    def make(*args: Any, **options: Any) -> object:
        if isinstance(made, Exception):
            raise made
        return made

    monkeypatch.setattr(dispatch_planning, "DeviceDispatcher", make)
    return Dispatcher(REPLICAS, NODES, 2)._tried(COUNTS)


def test_kernels_that_give_the_same_numbers_are_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels: Any = _Kernels(off=0)
    assert _tried(kernels, monkeypatch) is kernels
    assert not caplog.records


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (KernelsUnavailable("Triton is not installed"), "do not run on cpu: Triton is not inst"),
        (_Kernels(off=1), "gave other numbers"),
    ],
)
def test_kernels_of_no_use_leave_it_to_the_cpu_with_a_warning(
    made: object,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert _tried(made, monkeypatch) is None
    (record,) = caplog.records
    assert "tokens are dispatched by the CPU" in record.getMessage()
    assert message in record.getMessage()


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.parametrize("nodes", [None, NODES])
def test_on_a_device_the_same_rows_go_the_same_ways(nodes: Any) -> None:
    for rank in range(len(REPLICAS)):
        dispatcher = Dispatcher(REPLICAS, nodes, rank)
        here, there = dispatcher.share(COUNTS), dispatcher.share(COUNTS.cuda())
        assert dispatcher._on_device[COUNTS.cuda().device] is not None
        _assert_same(here, there)
        experts = torch.repeat_interleave(torch.arange(5), COUNTS[rank])
        experts = experts[torch.randperm(len(experts))][:, None]
        expected, found = plan_route(experts, here), plan_route(experts.cuda(), there)
        assert (found.sends, found.receives) == (expected.sends, expected.receives)
        assert found.computes == expected.computes
        _assert_same_order(found.sent, expected.sent)
        _assert_same_order(found.by_expert, expected.by_expert)


@pytest.mark.gpu
@NEEDS_CUDA
def test_a_device_without_usable_kernels_is_planned_for_by_the_cpu_every_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any, **options: Any) -> object:
        raise KernelsUnavailable("no compiler")

    monkeypatch.setattr(dispatch_planning, "DeviceDispatcher", refuse)
    dispatcher = Dispatcher(REPLICAS, NODES, 1)
    for _ in range(2):
        share = dispatcher.share(COUNTS.cuda())
        assert share.tokens_RE.device.type == "cpu"
        _assert_same(dispatcher.share(COUNTS), share)
        experts = torch.arange(5).repeat_interleave(2)[:, None]
        assert plan_route(experts.cuda(), share).sent.index.device.type == "cuda"
    assert len(caplog.records) == 1, "said once"


def _assert_same(expected: RowCounts, found: RowCounts) -> None:
    assert torch.equal(found.tokens_RE.cpu(), expected.tokens_RE)
    assert torch.equal(found.first_RE.cpu(), expected.first_RE)
    assert torch.equal(found.received_RE.cpu(), expected.received_RE)


def _assert_same_order(found: Order, expected: Order) -> None:
    assert torch.equal(found.index.cpu(), expected.index)
    assert torch.equal(found.inverse.cpu(), expected.inverse)
