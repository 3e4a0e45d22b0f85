"""Orders of rows: all ranks' routes together, without a process group."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ckptd.client.elastic.layer.dispatch_planning import Dispatcher
from ckptd.client.elastic.layer.token_rows import Order, Route, plan_route, reorder, spread

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
