"""Routing of tokens: the orders of rows on all ranks together, without a process group, and the choice of the
dispatcher for a device.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ckptd.client.elastic.layer import token_routing
from ckptd.client.elastic.layer.token_routing import (
    Dispatcher,
    Order,
    Route,
    RowCounts,
    plan_route,
    reorder,
    spread,
)
from ckptd.cuda.dispatch import DeviceDispatcher, DeviceSends, KernelsUnavailable
from tests.ckptd.core.elastic.forms import NEEDS_CUDA

EXPERTS = 5
REPLICAS = [[2, 1, 0, 1, 0], [0, 1, 1, 1, 0], [1, 0, 0, 1, 1], [0, 0, 0, 1, 1]]


def _routes(seed: int, nodes: list[int] | None) -> tuple[list[Tensor], list[Route]]:
    """The experts that each rank's tokens want, and the ranks' routes."""
    generator = torch.Generator().manual_seed(seed)
    wanted = []
    for count in torch.randint(0, 9, (len(REPLICAS),), generator=generator).tolist():
        shares = torch.rand(max(1, count), EXPERTS, generator=generator)
        wanted.append(torch.multinomial(shares, 2, generator=generator)[:count])
    counts = torch.stack([torch.bincount(w.flatten(), minlength=EXPERTS) for w in wanted])
    replicas_RE, nodes_R = np.array(REPLICAS), None if nodes is None else np.array(nodes)
    return wanted, [
        plan_route(w, Dispatcher(replicas_RE, nodes_R, rank).share(counts)) for rank, w in enumerate(wanted)
    ]


@pytest.mark.parametrize("nodes", [None, [0, 1, 0, 1]])
@pytest.mark.parametrize("seed", range(8))
def test_every_pair_is_computed_once_by_a_holder_of_its_expert_in_the_stated_order(
    seed: int, nodes: list[int] | None
) -> None:
    wanted, routes = _routes(seed, nodes)
    computed: list[tuple[int, int]] = []
    for here, route in enumerate(routes):
        arrived = []
        for source, sender in enumerate(routes):
            begin = sum(sender.sends[:here])
            pairs = sender.sent.index[begin : begin + sender.sends[here]].tolist()
            assert len(pairs) == route.receives[source]
            arrived += [(source, pair) for pair in pairs]
        rows = [arrived[place] for place in route.by_expert.index.tolist()]
        computed += rows
        for expert, count in route.computes:
            own, rows = rows[:count], rows[count:]
            assert own == sorted(own), "by source, then pair"
            assert REPLICAS[here][expert]
            assert {int(wanted[source].flatten()[pair]) for source, pair in own} == {expert}
        assert not rows
    everything = [(r, p) for r, w in enumerate(wanted) for p in range(w.numel())]
    assert sorted(computed) == everything


def test_an_order_undone_is_the_order_before() -> None:
    order = Order.of(torch.tensor([2, 0, 1]))
    rows = torch.tensor([[10.0], [11.0], [12.0]])
    assert reorder(rows, order).flatten().tolist() == [12, 10, 11]
    assert torch.equal(reorder(reorder(rows, order), order.undone()), rows)


def test_gradients_go_the_other_way() -> None:
    """By finite differences; a token's is the sum over its choices."""
    order = Order.of(torch.tensor([3, 0, 5, 1, 4, 2]))
    tokens = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: spread(t, order, 2), (tokens,))
    rows = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r: reorder(r, order), (rows,))


DEVICE_REPLICAS = np.array([[2, 1, 0, 1, 0], [0, 1, 1, 1, 0], [1, 0, 0, 1, 1], [0, 0, 0, 1, 1]])
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
        share = Dispatcher(DEVICE_REPLICAS, NODES, rank).share(self._counts)
        return DeviceSends(share.tokens_RE, share.first_RE), share.received_RE + self._off


def _tried(made: object, monkeypatch: pytest.MonkeyPatch) -> DeviceDispatcher | None:
    def make(*args: Any, **options: Any) -> object:
        if isinstance(made, Exception):
            raise made
        return made

    monkeypatch.setattr(token_routing, "DeviceDispatcher", make)
    return Dispatcher(DEVICE_REPLICAS, NODES, 2)._tried(COUNTS)


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
    for rank in range(len(DEVICE_REPLICAS)):
        dispatcher = Dispatcher(DEVICE_REPLICAS, nodes, rank)
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

    monkeypatch.setattr(token_routing, "DeviceDispatcher", refuse)
    dispatcher = Dispatcher(DEVICE_REPLICAS, NODES, 1)
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
