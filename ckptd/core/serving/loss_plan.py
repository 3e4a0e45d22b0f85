"""What a server needs after a loss or an arrival of devices, and from where (FailSafe; pure).

**KV.** A request's KV in a head of a layer is on the device that computes it. After a change of the
placement, what is on a device that is still there, and is not where it is needed, is copied from that device;
what was lost is read from the backup. A backup holds finished blocks, so it may end before the request does.
The tokens after that are computed again, in all layers, because attention of a layer needs the output of the
layer below. So a request is computed again from the *least* token on that one of its lost heads lacks, and
nothing behind that token is copied or read.

**Weights.** A device needs the weights of units that it did not have. They are read by ranges from a local
snapshot or the model's files (`served_model.byte_runs`), first the layers that a token passes first.

**What serves already.** Layers for which no device needs weights; requests that miss no KV, which are those
without any (new ones), and those of which nothing was lost and nothing moved (with fewer KV heads than
devices, those that are computed elsewhere). Others follow in the order in which they are complete: those
first for which the busiest device receives least.

The least bytes: the placement moves the fewest units (`move_units`), all units of a kind have the same size,
and a request keeps its devices for shared heads where it can.

Source: FailSafe (arXiv:2511.14116), proactive backup of KV and weight recovery on demand; its abstract was
    available. What is needed, and the order, are our own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from ckptd.core.serving.request_routing import ServedRequest, route_requests
from ckptd.core.serving.served_model import UnitKind
from ckptd.core.serving.server_layout import ServerLayout, move_server
from ckptd.units import format_bytes

BackedUp = Callable[[str, int, int], int]
"""Of a request, a layer and a KV head: how many tokens, from the first on without a gap, the backup has."""


@dataclass(frozen=True, slots=True)
class KvFetch:
    """KV that a device receives: of the first ``tokens`` tokens of a request, in a head of a layer.

    Attributes:
        source: the device that sends it; None: the backup.
        target: the device that needs it.
    """

    request: str
    layer: int
    head: int
    tokens: int
    source: int | None
    target: int


@dataclass(frozen=True, slots=True)
class WeightFetch:
    """Units of a layer of the model whose weights a device does not have."""

    device: int
    kind: UnitKind
    layer: int
    units: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """From one set of devices to another.

    Attributes:
        requests: those that are served afterwards, with their devices for shared heads; ``tokens`` are those
            that nobody computes again.
        waiting: those for which no device has room now; they have nothing on devices.
        kv, weights: what devices receive, in the order in which it is needed.
        recomputed: of each request of which tokens are computed again: how many.
        ready: requests that miss no KV.
        ready_layers: layers for which no device misses weights.
    """

    before: ServerLayout
    after: ServerLayout
    lost: tuple[int, ...]
    joined: tuple[int, ...]
    requests: tuple[ServedRequest, ...]
    waiting: tuple[ServedRequest, ...]
    kv: tuple[KvFetch, ...]
    weights: tuple[WeightFetch, ...]
    recomputed: dict[str, int]
    ready: tuple[str, ...]
    ready_layers: tuple[int, ...]

    def kv_bytes(self, *, backup: bool) -> int:
        """That are read from the backup, or sent by other devices."""
        tokens = sum(fetch.tokens for fetch in self.kv if (fetch.source is None) == backup)
        return tokens * self.after.model.kv_token_bytes

    @property
    def weight_bytes(self) -> int:
        """That are read."""
        return sum(len(each.units) * self.after.model.unit_bytes(each.kind) for each in self.weights)

    @property
    def reason(self) -> str:
        """What happened and what it takes, for logs."""
        what = [f"devices {list(self.lost)} lost"] * bool(self.lost)
        what += [f"devices {list(self.joined)} joined"] * bool(self.joined)
        again = f"{sum(self.recomputed.values())} tokens of {len(self.recomputed)} requests computed again"
        backup, peers = (format_bytes(self.kv_bytes(backup=each)) for each in (True, False))
        return (
            f"{', '.join(what) or 'no change'}: {len(self.requests)} requests go on with "
            f"{len(self.after.devices)} devices, {len(self.waiting)} wait; KV: {backup} from the backup, "
            f"{peers} from other devices, {again}; weights: {format_bytes(self.weight_bytes)} to read"
        )


def plan_devices(
    before: ServerLayout,
    requests: Iterable[ServedRequest],
    backed_up: BackedUp,
    *,
    lost: Collection[int] = (),
    joined: Collection[int] = (),
    room_tokens: int | None = None,
    even_within: float | None = None,
) -> DevicePlan:
    """Plan a loss, a return, or both at once.

    Args:
        requests: with the devices that they had; a request without tokens may have none.
        backed_up: what the backup has; asked only for KV that was lost.
        room_tokens, even_within: see `route_requests`.
    Raises:
        ValueError: devices that do not fit (`move_units`), or a request with tokens that has no device for a
            shared head.
    """
    given = list(requests)
    for each in given:
        strange = set(each.homes) - set(before.devices)
        if each.tokens and (len(each.homes) != before.heads.slots or strange):
            raise ValueError(
                f"request {each.id!r} has devices {list(each.homes)} for {before.heads.slots} shared heads "
                f"of each layer; the server has {list(before.devices)}"
            )
    after = move_server(before, lost=lost, joined=joined)
    left = [replace(each, homes=tuple(-1 if home in lost else home for home in each.homes)) for each in given]
    routing = route_requests(
        left, after.devices, after.heads.slots, room_tokens=room_tokens, even_within=even_within
    )
    moving = _moving_heads(before, after, frozenset(lost))
    served, ready, recomputed = [], [], {}
    needed: list[tuple[int, str, list[KvFetch]]] = []
    earlier = {each.id: each.homes for each in given}
    for request in routing.requests:
        kept, found = _kv_moves(moving, earlier[request.id], request, backed_up, frozenset(lost))
        again = request.tokens - kept
        if again:
            recomputed[request.id] = again
        served.append(replace(request, tokens=kept, remaining=request.remaining + again))
        if found and kept:
            busiest = max(Counter(target for *_, target in found).values()) * kept
            fetches = [
                KvFetch(request.id, layer, head, kept, source, target)
                for layer, head, source, target in found
            ]
            needed.append((busiest, request.id, fetches))
        elif not again:
            ready.append(request.id)
    weights = _weight_fetches(before, after, frozenset(lost))
    missing = {fetch.layer for fetch in weights}
    return DevicePlan(
        before,
        after,
        tuple(sorted(lost)),
        tuple(sorted(joined)),
        tuple(served),
        tuple(replace(each, tokens=0, remaining=each.final_tokens) for each in routing.waiting),
        tuple(fetch for *_, fetches in sorted(needed, key=lambda each: each[:2]) for fetch in fetches),
        weights,
        recomputed,
        tuple(ready),
        tuple(layer for layer in range(after.model.layers) if layer not in missing),
    )


def _moving_heads(
    before: ServerLayout, after: ServerLayout, lost: frozenset[int]
) -> list[tuple[int, int, int, int]]:
    """Layer, head, owner before and after; without heads that stay on their device whatever the request."""
    found = []
    for layer, rows in enumerate(zip(before.heads.owners, after.heads.owners, strict=True)):
        for head, (source, target) in enumerate(zip(*rows, strict=True)):
            if source != target or source < 0 or source in lost:
                found.append((layer, head, source, target))
    return found


def _kv_moves(
    moving: list[tuple[int, int, int, int]],
    earlier: tuple[int, ...],
    request: ServedRequest,
    backed_up: BackedUp,
    lost: frozenset[int],
) -> tuple[int, list[tuple[int, int, int | None, int]]]:
    """How many tokens a request keeps; and layer, head, source and target of KV that is needed elsewhere."""
    kept, found = request.tokens, list[tuple[int, int, int | None, int]]()
    if not kept:
        return 0, found
    for layer, head, had, has in moving:
        source = earlier[-1 - had] if had < 0 else had
        target = request.homes[-1 - has] if has < 0 else has
        if source in lost:
            kept = min(kept, backed_up(request.id, layer, head))
            found.append((layer, head, None, target))
        elif source != target:
            found.append((layer, head, source, target))
    return kept, found


def _weight_fetches(
    before: ServerLayout, after: ServerLayout, lost: frozenset[int]
) -> tuple[WeightFetch, ...]:
    """By layer, then by kind as a token passes them, then by device."""
    found = []
    for place, (kind, placed) in enumerate(after.placements.items()):
        layers, had = after.model.layers_of(kind), before.placements[kind]
        for row, layer in enumerate(layers):
            for device in placed.devices:
                has = frozenset[int]() if device in lost else had.weights_of(device, row)
                units = placed.weights_of(device, row) - has
                if units:
                    found.append(
                        (layer, place, device, WeightFetch(device, kind, layer, tuple(sorted(units))))
                    )
    return tuple(each[-1] for each in sorted(found, key=lambda each: each[:3]))
