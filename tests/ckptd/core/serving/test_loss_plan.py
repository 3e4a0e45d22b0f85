"""Plans are played on devices with memories: whatever is lost or returns, every request has all of its KV."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from ckptd.core.serving.loss_plan import DevicePlan, plan_devices
from ckptd.core.serving.request_routing import ServedRequest, route_requests
from ckptd.core.serving.served_model import UnitKind
from ckptd.core.serving.server_layout import ServerLayout, place_server
from ckptd.core.serving.unit_placement import UnitPlacement
from tests.ckptd.core.serving.models import decoder, total_spread

MIXTURE: dict[str, Any] = {"family": "qwen3_moe", "experts": 5, "expert_columns": 6, "expert_layers": (1,)}


class Server:
    """Devices with memories and a backup of whole blocks, which plans are played on."""

    def __init__(self, layout: ServerLayout, requests: list[ServedRequest], draws: random.Random) -> None:
        self.layout, self.draws = layout, draws
        self.kv: dict[int, dict[tuple[str, int, int], int]] = defaultdict(dict)
        self.weights: dict[int, set[tuple[UnitKind, int, int]]] = defaultdict(set)
        self.backup: dict[tuple[str, int, int], int] = {}
        for device in layout.devices:
            self.weights[device] = self.wanted_weights(device)
        self.requests = route_requests(requests, layout.devices, layout.heads.slots).requests
        self.compute()

    def wanted_weights(self, device: int) -> set[tuple[UnitKind, int, int]]:
        return {
            (kind, layer, unit)
            for kind, placed in self.layout.placements.items()
            for row, layer in enumerate(self.layout.model.layers_of(kind))
            for unit in placed.weights_of(device, row)
        }

    def keys(self, request: ServedRequest) -> list[tuple[int, tuple[str, int, int]]]:
        """The device of each head of each layer."""
        model, heads = self.layout.model, self.layout.heads
        return [
            (heads.holder(layer, head, request.homes), (request.id, layer, head))
            for layer in range(model.layers)
            for head in range(model.kv_heads)
        ]

    def compute(self) -> None:
        """Some tokens of each request; some blocks of 4 tokens are backed up."""
        after = []
        for request in self.requests:
            more = self.draws.randint(0, min(9, request.remaining))
            request = replace(request, tokens=request.tokens + more, remaining=request.remaining - more)
            for device, key in self.keys(request):
                self.kv[device][key] = request.tokens
                blocks = self.draws.randint(0, request.tokens // 4)
                self.backup[key] = max(self.backup.get(key, 0), 4 * blocks)
            after.append(request)
        self.requests = tuple(after)

    def change(self, lost: list[int], joined: list[int]) -> DevicePlan:
        plan = plan_devices(
            self.layout,
            self.requests,
            lambda *key: self.backup[key],
            lost=lost,
            joined=joined,
            even_within=self.draws.choice([None, 0.1]),
        )
        for device in lost:
            self.kv[device], self.weights[device] = {}, set()
        self.layout, self.requests = plan.after, plan.requests
        self.check_what_serves_already(plan)
        received: dict[int, dict[tuple[str, int, int], int]] = defaultdict(dict)
        for fetch in plan.kv:
            key = (fetch.request, fetch.layer, fetch.head)
            there = self.backup if fetch.source is None else self.kv[fetch.source]
            assert there[key] >= fetch.tokens > 0
            assert self.kv[fetch.target].get(key, 0) == 0, "it has this already"
            received[fetch.target][key] = fetch.tokens
        for device, kv in received.items():
            self.kv[device] |= kv
        for need in plan.weights:
            units = {(need.kind, need.layer, unit) for unit in need.units}
            assert not units & self.weights[need.device], "it has these already"
            self.weights[need.device] |= units
        for device in plan.after.devices:
            self.weights[device] &= self.wanted_weights(device)
            assert self.weights[device] == self.wanted_weights(device)
        needed: dict[int, dict[tuple[str, int, int], int]] = defaultdict(dict)
        for request in self.requests:
            for device, key in self.keys(request):
                assert self.kv[device].get(key, 0) >= request.tokens
                needed[device][key] = request.tokens
        self.kv = needed
        return plan

    def check_what_serves_already(self, plan: DevicePlan) -> None:
        for request in self.requests:
            have = all(self.kv[device].get(key, 0) >= request.tokens for device, key in self.keys(request))
            assert (request.id in plan.ready) == (have and request.id not in plan.recomputed)
        for layer in range(plan.after.model.layers):
            missing = [
                unit
                for device in plan.after.devices
                for unit in self.wanted_weights(device) - self.weights[device]
                if unit[1] == layer
            ]
            assert (layer in plan.ready_layers) == (not missing)


@pytest.mark.parametrize("hybrid", [False, True])
def test_all_losses_and_returns_of_up_to_5_devices(hybrid: bool) -> None:
    """Each order of two losses, tokens between them, then both come back, together or one by one."""
    draws = random.Random(2)
    for n, kv_heads in itertools.product(range(2, 6), (1, 2, 3, 5)):
        layout = place_server(decoder(3, kv_heads, **MIXTURE), range(n), hybrid=hybrid)
        for lost in itertools.permutations(range(n), min(2, n - 1)):
            requests = [ServedRequest(str(i), 0, draws.randint(1, 30)) for i in range(3)]
            server = Server(layout, requests, draws)
            total = {each.id: each.final_tokens for each in requests}
            for device in lost:
                server.change([device], [])
                server.compute()
            for joined in [list(lost)] if draws.randint(0, 1) else [[d] for d in lost]:
                plan = server.change([], joined)
                assert not plan.recomputed
                assert plan.kv_bytes(backup=True) == 0
                server.compute()
            assert {each.id: each.final_tokens for each in server.requests} == total


def rows_of(before: UnitPlacement, n: int) -> set[tuple[int, ...]]:
    """All rows of a placement on the first n devices, in the same form."""
    base, rest = divmod(before.units, n)
    if before.hybrid:
        owners = [d for d in range(n) for _ in range(base)] + [-1 - slot for slot in range(rest)]
        return set(itertools.permutations(owners))
    every = itertools.product(range(n), repeat=before.units)
    return {row for row in every if all(base <= row.count(d) <= base + 1 for d in range(n))}


def least_kv(before: ServerLayout, given: list[ServedRequest], n: int) -> int:
    """Bytes that the best of all placements and routings on the first n devices moves."""
    best = None
    for rows in itertools.product(rows_of(before.heads, n), repeat=before.model.layers):
        after = UnitPlacement(tuple(range(n)), rows, before.heads.hybrid)
        if total_spread(after) > 1:
            continue
        units = 0
        for request in given:
            moved = [
                sum(
                    before.heads.holder(layer, head, request.homes) != after.holder(layer, head, homes)
                    for layer in range(after.layers)
                    for head in range(after.units)
                )
                for homes in itertools.product(range(n), repeat=after.slots)
            ]
            units += min(moved) * request.tokens
        best = units if best is None else min(best, units)
    assert best is not None
    return best * before.model.kv_token_bytes


@pytest.mark.parametrize("hybrid", [False, True])
def test_no_placement_and_routing_moves_less_kv_after_losses(hybrid: bool) -> None:
    """The last device is lost, then the next. Each choice of devices for shared heads has a request."""
    for n, kv_heads, layers in ((2, 3, 2), (3, 2, 2), (3, 4, 2), (3, 5, 1), (4, 3, 1), (4, 5, 1)):
        layout = place_server(decoder(layers, kv_heads), range(n), hybrid=hybrid)
        for left in range(n - 1, max(0, n - 3), -1):
            homes = itertools.product(layout.devices, repeat=layout.heads.slots)
            given = [ServedRequest(str(i), 8, 5, each) for i, each in enumerate(homes)]
            plan = plan_devices(layout, given, lambda *_: 8, lost=[left])
            least = least_kv(layout, given, left)
            assert plan.kv_bytes(backup=True) + plan.kv_bytes(backup=False) == least
            layout = plan.after


def test_one_of_eight_devices_is_lost() -> None:
    """A head of each layer becomes shared: devices read its weights, and its KV from the backup."""
    model = decoder(4, 8, columns=56)
    layout = place_server(model, range(8))
    given = [ServedRequest(str(i), 10, 5) for i in range(7)] + [ServedRequest("new", 0, 5)]
    plan = plan_devices(layout, given, lambda *_: 8, lost=[3])
    assert plan.after.heads.shared(0) == (3,)
    assert sorted(each.homes[0] for each in plan.requests if each.tokens) == [0, 1, 2, 4, 5, 6, 7]
    assert plan.kv_bytes(backup=True) == 7 * 8 * 4 * model.kv_token_bytes
    assert plan.kv_bytes(backup=False) == 0
    assert plan.recomputed == {str(i): 2 for i in range(7)}
    assert plan.ready == ("new",)
    heads = [need for need in plan.weights if need.kind is UnitKind.HEAD]
    assert len(heads) == 7 * 4
    assert [need.layer for need in plan.weights] == sorted(need.layer for need in plan.weights)
    assert plan.reason == (
        "devices [3] lost: 8 requests go on with 7 devices, 0 wait; KV: 3.5 KiB from the backup, 0 B from "
        "other devices, 14 tokens of 7 requests computed again; weights: 14.77 KiB to read"
    )
    head, block = model.unit_bytes(UnitKind.HEAD), model.unit_bytes(UnitKind.COLUMNS)
    assert plan.weight_bytes == 7 * 4 * head + 7 * block


def test_a_request_is_computed_again_from_its_least_backed_up_token() -> None:
    """Nothing behind that token is moved: of one without a backup nothing at all."""
    layout = place_server(decoder(2, 3), range(3), hybrid=False)
    given = [ServedRequest("a", 10, 5), ServedRequest("b", 10, 5)]
    plan = plan_devices(layout, given, lambda r, layer, _: 0 if r == "b" else 8 - 4 * layer, lost=[2])
    assert {fetch.tokens for fetch in plan.kv} == {4}
    assert {fetch.request for fetch in plan.kv} == {"a"}
    assert plan.recomputed == {"a": 6, "b": 10}
    assert [(each.tokens, each.remaining) for each in plan.requests] == [(4, 11), (0, 15)]
    assert plan.ready == ()


def test_requests_that_had_nothing_on_the_lost_device_go_on_at_once() -> None:
    """One KV head on three devices is data-parallel as a whole."""
    layout = place_server(decoder(2, 1), range(3))
    given = [ServedRequest(str(i), 9, 5, (i,)) for i in range(3)]
    plan = plan_devices(layout, given, lambda *_: 8, lost=[1])
    assert plan.ready == ("0", "2")
    assert {fetch.request for fetch in plan.kv} == {"1"}
    assert not [need for need in plan.weights if need.kind is UnitKind.HEAD]


def test_those_with_least_to_receive_are_first() -> None:
    layout = place_server(decoder(2, 4), range(4))
    given = [ServedRequest("long", 40, 5), ServedRequest("short", 4, 5), ServedRequest("other", 12, 5)]
    plan = plan_devices(layout, given, lambda *_: 99, lost=[0])
    assert list(dict.fromkeys(fetch.request for fetch in plan.kv)) == ["short", "other", "long"]


def test_without_room_a_request_waits_and_holds_nothing() -> None:
    three = place_server(decoder(2, 1), range(3))
    given = [ServedRequest(str(i), 9, 6, (i,)) for i in range(3)]
    plan = plan_devices(three, given, lambda *_: 8, lost=[1], room_tokens=20)
    assert [(each.id, each.tokens, each.remaining, each.homes) for each in plan.waiting] == [("1", 0, 15, ())]
    assert not plan.kv
    assert plan.ready == ("0", "2")


def test_a_request_without_its_devices_is_refused() -> None:
    layout = place_server(decoder(2, 4), range(3))
    with pytest.raises(
        ValueError, match=r"'a' has devices \[\] for 1 shared heads of each layer; .* \[0, 1, 2\]"
    ):
        plan_devices(layout, [ServedRequest("a", 3, 3)], lambda *_: 0, lost=[1])
    with pytest.raises(ValueError, match=r"'a' has devices \[7\] for 1 shared"):
        plan_devices(layout, [ServedRequest("a", 3, 3, (7,))], lambda *_: 0, lost=[1])
