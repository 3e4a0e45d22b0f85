"""Heads, columns and experts follow a loss together; memory is even."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from ckptd.core.serving.request_routing import ServedRequest, route_requests
from ckptd.core.serving.served_model import UnitKind
from ckptd.core.serving.server_layout import ServerLayout, move_server, place_server
from tests.ckptd.core.serving.models import decoder, total_spread


def kv_bytes(layout: ServerLayout, device: int, requests: Iterable[ServedRequest]) -> int:
    """KV on a device: of all its heads, and of shared heads for requests that are computed there."""
    heads = layout.heads
    mine = sum(len(heads.owned(device, layer)) for layer in range(heads.layers))
    held = sum(r.tokens * (mine + heads.layers * r.homes.count(device)) for r in requests)
    return held * layout.model.kv_token_bytes


def test_a_mixture_after_two_losses_and_back() -> None:
    model = decoder(
        6, 8, family="qwen3_moe", experts=10, expert_columns=4, expert_layers=(1, 2, 4, 5), columns=32
    )
    layout = place_server(model, range(8))
    assert {kind: p.layers for kind, p in layout.placements.items()} == {
        UnitKind.HEAD: 6,
        UnitKind.COLUMNS: 2,
        UnitKind.EXPERT: 4,
    }
    for lost, joined, slots in (([3], [], 1), ([6], [], 2), ([], [3, 6], 0)):
        layout = move_server(layout, lost=lost, joined=joined)
        assert layout.heads.slots == slots
        assert {p.devices for p in layout.placements.values()} == {layout.devices}
        cyclic = [p for kind, p in layout.placements.items() if kind is not UnitKind.HEAD]
        assert all(total_spread(p) <= 1 for p in cyclic)
    assert layout.devices == tuple(range(8))


def test_memory_is_even_within_one_head_of_one_request() -> None:
    """Seven devices, eight heads: in cyclic form over layers, in hybrid form over requests."""
    model = decoder(7, 8)
    given = [ServedRequest(str(i), 40, 10) for i in range(23)]
    cyclic, hybrid = place_server(model, range(7), hybrid=False), place_server(model, range(7))
    requests = route_requests(given, range(7), hybrid.heads.slots).requests
    every = 23 * 40 * 8 * 7 * model.kv_token_bytes
    of_cyclic = [kv_bytes(cyclic, d, given) for d in range(7)]
    of_hybrid = [kv_bytes(hybrid, d, requests) for d in range(7)]
    assert sum(of_cyclic) == sum(of_hybrid) == every
    assert max(of_cyclic) - min(of_cyclic) == 0
    assert max(of_hybrid) - min(of_hybrid) <= 40 * 7 * model.kv_token_bytes


def test_every_head_of_every_request_is_computed_by_one_device() -> None:
    model = decoder(3, 5)
    layout = move_server(place_server(model, range(4)), lost=[2])
    requests = route_requests(
        [ServedRequest(str(i), 5 * i, 10) for i in range(6)], layout.devices, layout.heads.slots
    ).requests
    for each in requests:
        for layer in range(3):
            for head in range(5):
                holder = layout.heads.holder(layer, head, each.homes)
                assert head in layout.heads.weights_of(holder, layer)
    assert sum(kv_bytes(layout, d, requests) for d in layout.devices) == (
        sum(each.tokens for each in requests) * 15 * model.kv_token_bytes
    )


def test_shared_heads_cost_weights_on_every_device() -> None:
    model = decoder(2, 8)
    layout = place_server(model, range(7))
    head, columns = model.unit_bytes(UnitKind.HEAD), model.unit_bytes(UnitKind.COLUMNS)
    total = sum(layout.weight_bytes(d) for d in range(7))
    assert total == 2 * (7 + 7) * head + 2 * 3 * columns


def test_a_server_needs_devices() -> None:
    with pytest.raises(ValueError, match="no device is left"):
        place_server(decoder(), [])
    with pytest.raises(ValueError, match=r"devices \[9\] are lost"):
        move_server(place_server(decoder(), [1, 2]), lost=[9])
