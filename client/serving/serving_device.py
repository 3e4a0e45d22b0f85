"""One device of a tensor-parallel server: its steps, and how it goes on when devices are lost or come back.

All devices do the same in the same order, from what all have gathered. A *step* is: hear of new requests,
compute one piece of each open one, take a token where a request has come to its end. `settle` comes before
the first step of each epoch, whoever was lost or has come back:

1. all tell what they know. The state with the fewest commits counts: all others have been there;
2. all plan alike (`plan_devices`): where heads, columns and experts are from now on, and from where what
   is missing comes;
3. KV of lost devices is read from the backup, KV that moves is sent by those that have it;
4. weights are read in a thread, the first layers first; a layer that comes sooner waits for its own.

What a device has and does not need any more is given up only after all have begun the first step: until then
another loss may bring everybody back to the state before.

Source: FailSafe (arXiv:2511.14116), of which the abstract was available: this engine is our own.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from ckptd.client.log_lines import get_logger
from ckptd.client.serving.decoder import Decoder, Piece
from ckptd.client.serving.device_group import DeviceGroup, gather_bytes, gather_numbers
from ckptd.client.serving.generation import GenerationRequest, RequestState, ServerState, sample
from ckptd.client.serving.kv_backup import KvBackup
from ckptd.client.serving.kv_cache import KvCache
from ckptd.client.serving.kv_copies import KvCopies
from ckptd.client.serving.weight_files import DeviceWeights
from ckptd.core.serving.loss_plan import DevicePlan, KvFetch, WeightFetch, plan_devices
from ckptd.core.serving.request_routing import route_requests
from ckptd.core.serving.server_layout import ServerLayout, place_server
from ckptd.errors import LocalProtocolError
from ckptd.unpacking import unpack

logger = get_logger(__name__)

_ANSWERS = 4096  # of ended requests, for clients that ask again
_KV = 0  # a tag
_decoder = msgspec.msgpack.Decoder(list[GenerationRequest])


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How a server computes; the same on all devices.

    Attributes:
        block_tokens: of a block of the backup. What is in no whole block yet is computed again after a loss.
        piece_tokens: of a piece of a prompt; a multiple of ``block_tokens``.
        hybrid: heads that do not divide are computed by each request's own device (`place_server`).
        ordered: answers do not depend on the number of devices (`Decoder`).
        use_backup: after a loss, read KV from the backup; else all of it is computed again.
        backup_copies: on how many other nodes a node's blocks are, too (`KvCopies`).
        unit_s: see `Decoder`.
    """

    block_tokens: int = 8
    piece_tokens: int = 32
    hybrid: bool = True
    ordered: bool = True
    use_backup: bool = True
    backup_copies: int = 0
    unit_s: float = 0.0

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens is {self.block_tokens}: it must be at least 1")
        if self.piece_tokens < 1 or self.piece_tokens % self.block_tokens:
            raise ValueError(
                f"piece_tokens is {self.piece_tokens}: it must be a multiple of block_tokens, "
                f"{self.block_tokens}"
            )
        if self.backup_copies < 0:
            raise ValueError(f"backup_copies is {self.backup_copies}: it must not be negative")
        if self.unit_s < 0:
            raise ValueError(f"unit_s is {self.unit_s}: it must not be negative")


class Heard(NamedTuple):
    """What all have said at the begin of a step.

    Attributes:
        newest: epoch of which any has heard.
        stop: any wants the server to end.
        tokens: that were generated, by request.
    """

    newest: int
    stop: bool
    tokens: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SettledEpoch:
    """How an epoch has begun.

    Attributes:
        plan: None: nothing had to change.
        seconds: that it took this device.
        backup_bytes: KV that this device has read from the backup.
        node_bytes: of it, from the memory of other nodes.
        peer_bytes: KV that it has received from devices that computed it.
        recomputed: tokens that all compute again, of all requests.
    """

    plan: DevicePlan | None
    seconds: float
    backup_bytes: int = 0
    node_bytes: int = 0
    peer_bytes: int = 0
    recomputed: int = 0


class ServingDevice:
    """A device.

    Args:
        device: its number.
        backup: None: KV of lost devices is computed again.
        compute: where it computes.
    Attributes:
        state: None before the first epoch.
        answers: tokens of requests that have ended, the newest last.
    Raises:
        ValueError: the model's configuration has what is not computed, or the backup is of another model.
    """

    def __init__(
        self, device: int, weights: DeviceWeights, options: EngineOptions, backup: KvBackup | None = None
    ) -> None:
        self.device, self.options, self.weights = device, options, weights
        self.model = weights.files.model
        self.cache = KvCache(self.model, weights.files.dtype, weights.device)
        self._decoder = Decoder(device, weights, self.cache, ordered=options.ordered, unit_s=options.unit_s)
        self.backup: KvBackup | None = None
        self.copies: KvCopies | None = None
        if backup is not None:
            self.attach(backup)
        self.state: ServerState | None = None
        self.answers: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._confirmed, self._base = False, b""  # of the state; and the one before, as bytes

    def attach(self, backup: KvBackup) -> None:
        """Use a backup from now on; in place of another one, if that one's memory is gone.

        Raises:
            ValueError: it is of another model, or has blocks of another size.
        """
        backup.geometry.check_model(self.model, self.weights.files.identity)
        if backup.block_tokens != self.options.block_tokens:
            raise ValueError(
                f"the backup has blocks of {backup.block_tokens} tokens, the server of "
                f"{self.options.block_tokens}: begin a backup of its own"
            )
        if self.backup is not None:
            self.backup.drain()
            backup.use(self.backup.table(), 0)
            self.backup.close()
        self.backup = backup
        self.copies = KvCopies(self.device, backup, self.options.backup_copies)

    def check(self, request: GenerationRequest) -> None:
        """Check what a client asks for, before it is told to others.

        Raises:
            ValueError: it cannot be served.
        """
        request.check(int(self.weights.files.config["vocab_size"]))

    # -- a step ----------------------------------------------------------------------------------

    def step(
        self,
        group: DeviceGroup,
        inbox: Sequence[GenerationRequest] = (),
        *,
        word: int = 0,
        stop: bool = False,
    ) -> Heard:
        """Hear of what is new, and compute the next piece of each open request.

        Args:
            inbox: requests that have come to this device.
            word: the newest epoch that this device has heard of. If any has heard of one after `settle`,
                nothing is computed: all have something else to do first.
            stop: the server should end.
        """
        assert self.state is not None, "settle() comes before step()"
        payload = msgspec.msgpack.encode(list(inbox)) if inbox else b""
        sizes = self.copies.ready() if self.copies is not None else []
        heads = gather_numbers(group, [word, len(payload), int(stop), *sizes])
        if self.copies is not None:
            self.copies.exchange(group, [row[3:] for row in heads])
        brought = gather_bytes(group, payload) if any(size for _, size, *_ in heads) else []
        # All have come here, so nobody goes back to before the last forward, or before the last epoch.
        self._confirm()
        self._end_finished()
        for each in brought:
            if each:
                self._begin(unpack(_decoder, each))
        self.state.commits += 1
        newest, stopping = max(word for word, *_ in heads), any(stop for _, _, stop, *_ in heads)
        if newest > self.state.epoch or stopping:
            return Heard(newest, stopping, {})
        return Heard(newest, stopping, self._compute(group))

    def _begin(self, requests: list[GenerationRequest]) -> None:
        state = self.state
        assert state is not None
        for request in requests:
            if request.id in state.requests:
                continue  # it was sent to another device, too
            state.requests[request.id] = RequestState(request=request)
            self.cache.begin(request.id, request.most_tokens)
            if self.backup is not None and request.backed_up:
                self.backup.index.begin(request.id, request.most_tokens)
        layout = state.layout
        routing = route_requests([r.served for r in state.open], layout.devices, layout.heads.slots)
        for routed in routing.requests:
            state.requests[routed.id].homes = routed.homes

    def _end_finished(self) -> None:
        assert self.state is not None
        for name, each in list(self.state.requests.items()):
            if each.finished:
                del self.state.requests[name]
                self._forget(each)
                self.answers[name] = tuple(each.tokens)
        while len(self.answers) > _ANSWERS:
            self.answers.popitem(last=False)

    def _forget(self, each: RequestState) -> None:
        self.cache.end(each.request.id)
        if self.backup is not None and each.request.backed_up:
            self.backup.end(each.request.id)

    def _compute(self, group: DeviceGroup) -> dict[str, int]:
        state = self.state
        assert state is not None
        going = state.open
        pieces = [
            Piece(r.request.id, r.computed, r.next_tokens(self.options.piece_tokens), r.homes) for r in going
        ]
        if not pieces:
            return {}
        logits = self._decoder.forward(pieces, state.layout, group)
        found = {}
        for request, piece, last in zip(going, pieces, logits, strict=True):
            request.computed = piece.end
            if piece.end == request.known:
                found[request.request.id] = token = sample(last, request.request, piece.end)
                request.tokens.append(token)
        state.commits += 1
        for request in going:
            self._back_up(request)
        return found

    def _back_up(self, each: RequestState) -> None:
        if self.backup is None or not each.request.backed_up:
            return
        assert self.state is not None
        layout, name = self.state.layout, each.request.id

        def heads() -> list[tuple[int, int, Tensor]]:
            homes, mine = each.homes, self.device
            return [
                (layer, head, self.cache.head(name, layer, head))
                for layer, owners in enumerate(layout.heads.owners)
                for head, owner in enumerate(owners)
                if (homes[-1 - owner] if owner < 0 else owner) == mine
            ]

        self.backup.back_up(name, each.computed, heads)

    # -- an epoch --------------------------------------------------------------------------------

    def settle(self, group: DeviceGroup, epoch: int) -> SettledEpoch:
        """Come to the same state as all others that are there, with all that it takes to go on.

        The new state counts once all are in its first step; each device keeps what it had before until then.
        So if another device is lost meanwhile, all begin again from a state that each of them has.

        Args:
            epoch: a number that is larger than that of each earlier call.
        Raises:
            LocalProtocolError: devices that should know the same do not.
        """
        begun = time.perf_counter()
        before, keepers = self._agree(group)
        self.state, self._confirmed, self._base = None, False, b""  # until this has come to its end
        if self.backup is not None and self.copies is not None:
            table = before.backup if before is not None else None
            self.backup.use(table, epoch, self.copies.meet(group, table))
        for name in set(self.cache.requests()) - set(before.requests if before is not None else ()):
            self.cache.end(name)  # it was begun by a step that does not count, or nobody knows it any more
        if before is None:
            layout = place_server(self.model, group.devices, hybrid=self.options.hybrid)
            self.state = ServerState(layout, epoch)
            self.weights.begin_reading(_all_weights(layout, self.device))
            return SettledEpoch(None, time.perf_counter() - begun)
        if self.device in keepers:
            self._base = before.encode()
        for each in before.requests.values():
            self.cache.begin(each.request.id, each.request.most_tokens)
        there = before.layout.devices
        plan = plan_devices(
            before.layout,
            [each.served for each in before.open],
            self._backed_up,
            lost=[d for d in there if d not in keepers],
            joined=[d for d in group.devices if d not in there or d not in keepers],
        )
        backup_bytes, node_bytes, kept = self._read_backup(group, plan)
        peer_bytes = self._move_kv(group, plan)
        recomputed = self._enter(before, plan, gather_numbers(group, kept) if kept else [], epoch)
        if self.copies is not None:
            self.copies.begin()
        if plan.lost or plan.joined:
            logger.info("device %d: %s", self.device, plan.reason)
        seconds = time.perf_counter() - begun
        return SettledEpoch(plan, seconds, backup_bytes, node_bytes, peer_bytes, recomputed)

    def _agree(self, group: DeviceGroup) -> tuple[ServerState | None, set[int]]:
        """The state from which all go on, and the devices that have it; None: nobody has any."""
        if self.state is not None and self.backup is not None:
            self.backup.drain()
            self.state.backup = self.backup.table()
        own = self.state.encode() if self.state is not None else b""
        base, new = (own, b"") if self._confirmed else (self._base, own)
        bases = gather_bytes(group, base)
        news = gather_bytes(group, new)
        every = [
            tuple(ServerState.decode(each, self.model) if each else None for each in pair)
            for pair in zip(bases, news, strict=True)
        ]
        # An epoch counts if one device has seen all in its first step; the others need not know that.
        newest = max((base.epoch for base, _ in every if base is not None), default=-1)
        known = {
            device: state
            for device, pair in zip(group.devices, every, strict=True)
            for state in pair
            if state is not None and state.epoch == newest
        }
        if not known:
            return None, set()
        before = min(known.values(), key=lambda state: state.commits)
        ahead = max(state.commits for state in known.values()) - before.commits
        twins = {s.encode() for s in known.values() if s.commits == before.commits}
        if ahead > 1 or len(twins) > 1:
            raise LocalProtocolError(
                f"devices {sorted(known)} should know the same: they are up to {ahead} commits apart, and "
                f"{len(twins)} different states have {before.commits}",
                operation="settle",
                ids={"device": self.device},
            )
        return before, set(known)

    def _enter(self, before: ServerState, plan: DevicePlan, told: list[list[int]], epoch: int) -> int:
        """Go on by a plan; returns how many tokens are computed again. ``told``: right ones, by device."""
        state = replace(before, layout=plan.after, epoch=epoch, commits=before.commits + 1)
        recomputed = 0
        for at, each in enumerate(plan.requests):
            request = state.requests[each.id]
            kept = request.from_piece(min(row[at] for row in told), self.options.piece_tokens)
            request.homes = each.homes
            recomputed += request.computed - kept
            if kept < request.computed:
                request.computed = kept
                if self.backup is not None and request.request.backed_up:
                    self.backup.keep(each.id, kept)
        self.weights.begin_reading(w for w in plan.weights if w.device == self.device)
        self.state, self._confirmed = state, False
        return recomputed

    def _backed_up(self, request: str, layer: int, head: int) -> int:
        if self.backup is None or not self.options.use_backup:
            return 0
        return self.backup.index.tokens(request, layer, head)

    def _read_backup(self, group: DeviceGroup, plan: DevicePlan) -> tuple[int, int, list[int]]:
        """Read what was lost; bytes, of them bytes of other nodes, and each request's right tokens."""
        kept = {each.id: each.tokens for each in plan.requests}
        lost = [each for each in plan.kv if each.source is None]
        if not lost:
            return 0, 0, list(kept.values())
        assert self.copies is not None, "a plan without a backup reads none"
        right, received = self.copies.read(
            group, lost, lambda each: self.cache.head(each.request, each.layer, each.head)
        )
        tokens = sum(right[each.request] for each in lost if each.target == self.device)
        return tokens * self.model.kv_token_bytes, received, list((kept | right).values())

    def _move_kv(self, group: DeviceGroup, plan: DevicePlan) -> int:
        """Send and receive what moves: one message for each pair of devices, in the same order everywhere."""
        pairs: dict[tuple[int, int], list[KvFetch]] = {}
        for each in plan.kv:
            if each.source is not None:
                pairs.setdefault((each.source, each.target), []).append(each)
        received = 0
        for (source, target), fetches in sorted(pairs.items()):
            if self.device not in (source, target):
                continue
            views = [self.cache.tokens(e.request, e.layer, e.head, 0, e.tokens) for e in fetches]
            if self.device == source:
                group.send(torch.cat([view.flatten() for view in views]).cpu(), target, _KV)
                continue
            flat = torch.empty(sum(view.numel() for view in views), dtype=self.weights.files.dtype)
            group.receive(flat, source, _KV)
            received += flat.nbytes
            for view, part in zip(views, flat.split([view.numel() for view in views]), strict=True):
                view.copy_(part.view(view.shape))
        return received

    def _confirm(self) -> None:
        """All are in the first step of an epoch: what belongs to the time before is not needed any more."""
        if self._confirmed:
            return
        self._confirmed, self._base = True, b""
        state = self.state
        assert state is not None

        def needed(name: str, layer: int, head: int) -> bool:
            homes = state.requests[name].homes
            return state.layout.heads.holder(layer, head, homes) == self.device

        for request in state.requests.values():
            if request.finished:
                self.cache.end(request.request.id)
        self.cache.keep(needed)
        self.weights.keep(state.layout, self.device)


def _all_weights(layout: ServerLayout, device: int) -> list[WeightFetch]:
    """All units of a device, by layer."""
    model = layout.model
    return [
        WeightFetch(device, kind, layer, tuple(sorted(placed.weights_of(device, row))))
        for kind, placed in layout.placements.items()
        for row, layer in enumerate(model.layers_of(kind))
    ]
