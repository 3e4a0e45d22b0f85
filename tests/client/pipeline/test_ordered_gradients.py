"""Parts, and their sum in one order: two workers that are threads, with queues between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ckptd.client.pipeline.ordered_gradients import GradientParts, Part, parts_of, sum_parts


def test_parts_are_sums_from_the_first_micro_batch_on() -> None:
    assert parts_of([(0, 0), (1, 0), (0, 1), (1, 2)]) == ((0, 0), (1, 0), (1, 2))
    assert parts_of([(2, 1), (2, 3)]) == ((2, 1), (2, 3))
    assert parts_of([]) == ()


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(5, dtype=torch.float64))]


def gradient(pipeline: int, number: int, param: int) -> Tensor | None:
    """Of sizes so different that sums in another order have other bits; some are missing."""
    if param == 1 and (pipeline + number) % 3 == 0:
        return None
    generator = torch.Generator().manual_seed(100 * pipeline + 10 * number + param)
    like = parameters()[param]
    scale = 10.0 ** ((3 * pipeline + 5 * number) % 7)
    return (torch.randn(like.shape, generator=generator, dtype=torch.float64) * scale).to(like.dtype)


def summed(order: Mapping[int, Sequence[Part]], *, pipelines: int, micro_batches: int) -> list[list[Any]]:
    """Gradients on each worker in the end, from the micro-batches that it runs."""
    queues = {(a, b): Queue[Tensor]() for a in order for b in order}
    parts = {w: parts_of(run) for w, run in order.items()}

    def work(worker: int) -> list[Any]:
        params = parameters()
        held = GradientParts(params)
        for pipeline, number in order[worker]:
            for i, param in enumerate(params):
                param.grad = gradient(pipeline, number, i)
            held.take(pipeline, number)
        assert sorted(held.held) == list(parts[worker])

        def exchange(out: Mapping[int, list[Tensor]], into: Mapping[int, list[Tensor]]) -> None:
            for to, tensors in out.items():
                for tensor in tensors:
                    queues[worker, to].put(tensor.clone())
            for sender, tensors in into.items():
                for tensor in tensors:
                    tensor.copy_(queues[sender, worker].get(timeout=60))

        sum_parts(
            params, held.held, parts, worker, exchange, micro_batches=micro_batches, pipelines=pipelines
        )
        return [p.grad for p in params]

    with ThreadPoolExecutor(len(order)) as pool:
        return list(pool.map(work, order))


def wanted(param: int, *, pipelines: int, micro_batches: int) -> Tensor | None:
    total = None
    for d in range(pipelines):
        own = None
        for m in range(micro_batches):
            grad = gradient(d, m, param)
            if grad is not None:
                own = grad if own is None else own + grad
        if own is not None:
            own = own / micro_batches
            total = own if total is None else total + own
    return None if total is None else total / pipelines


@pytest.mark.parametrize(
    "order",
    [
        {0: [(0, m) for m in range(4)], 1: [(1, m) for m in range(4)], 2: [(2, m) for m in range(4)]},
        {
            0: [(0, 0), (1, 0), (0, 1), (0, 2), (1, 2), (0, 3)],
            2: [(2, 0), (1, 1), (2, 1), (2, 2), (1, 3), (2, 3)],
        },
        {1: [(d, m) for m in range(4) for d in (2, 0, 1)]},
    ],
)
def test_the_sum_does_not_depend_on_who_ran_what(order: dict[int, list[Part]]) -> None:
    for grads in summed(order, pipelines=3, micro_batches=4):
        for i, grad in enumerate(grads):
            expected = wanted(i, pipelines=3, micro_batches=4)
            assert expected is not None
            assert torch.equal(grad, expected)


def test_one_sum_is_in_the_order_of_the_schedule() -> None:
    params = parameters()[:1]
    held = GradientParts(params, separate=False)
    for pipeline, number in [(1, 0), (0, 0), (1, 1)]:
        params[0].grad = gradient(pipeline, number, 0)
        held.take(pipeline, number)
        assert params[0].grad is None
    a, b, c = (gradient(*each, 0) for each in [(1, 0), (0, 0), (1, 1)])
    assert a is not None
    assert b is not None
    assert c is not None
    (kept,) = held.held.values()
    assert kept[0] is not None
    assert torch.equal(kept[0], (a + b) + c)


def test_a_peer_with_other_parameters_is_refused() -> None:
    params = parameters()[:1]

    def exchange(out: Mapping[int, list[Tensor]], into: Mapping[int, list[Tensor]]) -> None:
        """The peer's digest is another one."""
        (message,), (answer,) = out[1], into[1]
        answer.copy_(message + 1)

    grads: list[Tensor | None] = [torch.zeros(3, 2)]
    with pytest.raises(ValueError, match="other parameters in pipeline 1 than in pipeline 0"):
        sum_parts(
            params, {(0, 0): grads}, {0: [(0, 0)], 1: [(1, 0)]}, 0, exchange, micro_batches=1, pipelines=2
        )
