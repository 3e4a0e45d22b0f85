"""Requests of a server, and what all of its devices know of them: the same on all, without a word.

Each device keeps the `ServerState`, and changes it by what all have gathered, so nobody is asked what comes
next. A state changes at two moments of a step only: when requests begin and end, and when a forward has
given its tokens. ``commits`` counts these. A device that is interrupted is at one of them, and since each
needs a word of all others, devices differ by one commit at most.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import torch
import xxhash
from torch import Tensor

from ckptd.core.serving.request_routing import ServedRequest
from ckptd.core.serving.served_model import ServedModel, UnitKind
from ckptd.core.serving.server_layout import ServerLayout
from ckptd.core.serving.unit_placement import UnitPlacement
from ckptd.unpacking import unpack

_MOST_TOKENS = 1 << 20
_LIMIT_BYTES = 1 << 30


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asks for; tokens are numbers.

    Attributes:
        id: a name of its own. The same request may be sent again, to any device.
        most: how many tokens it gets, unless ``stop`` comes before.
        temperature: 0 takes the likeliest token; else tokens are drawn.
        top: of so many likeliest tokens; 0: of all.
        seed: of draws. A token depends on it and on its position only.
        stop: tokens that end the answer.
        backed_up: its KV goes to the backup; else it is computed again after a loss.
    """

    id: str
    prompt: tuple[int, ...]
    most: int
    temperature: float = 0.0
    top: int = 0
    seed: int = 0
    stop: tuple[int, ...] = ()
    backed_up: bool = True

    @property
    def most_tokens(self) -> int:
        """Whose KV it may have in the end: the last token's is not computed."""
        return len(self.prompt) + self.most - 1

    def check(self, vocabulary: int) -> None:
        """Check what a client has sent.

        Raises:
            ValueError: it cannot be served by a model with so many tokens.
        """
        if not self.id or len(self.id) > 200:
            raise ValueError(f"a request's id has {len(self.id)} characters: 1 to 200")
        if not self.prompt or self.most < 1 or self.most_tokens > _MOST_TOKENS:
            raise ValueError(
                f"request {self.id!r} has {len(self.prompt)} tokens and asks for {self.most}: at least one "
                f"of each, and no more than {_MOST_TOKENS} together"
            )
        if strange := [each for each in self.prompt if not 0 <= each < vocabulary]:
            raise ValueError(f"request {self.id!r} has the token {strange[0]}: the model has {vocabulary}")
        if not 0.0 <= self.temperature < 1e4 or not 0 <= self.top <= _MOST_TOKENS:
            raise ValueError(f"request {self.id!r}: temperature {self.temperature}, top {self.top}")


class RequestState(msgspec.Struct, kw_only=True):
    """A request that is served.

    Attributes:
        tokens: that were generated.
        computed: tokens, of the prompt and generated ones, whose KV is there.
        homes: its devices for shared heads.
    """

    request: GenerationRequest
    tokens: list[int] = []
    computed: int = 0
    homes: tuple[int, ...] = ()

    @property
    def finished(self) -> bool:
        """It has all of its tokens; it ends with the next step."""
        tokens = self.tokens
        return bool(tokens) and (len(tokens) >= self.request.most or tokens[-1] in self.request.stop)

    @property
    def known(self) -> int:
        """How many tokens are known."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def served(self) -> ServedRequest:
        """For planners: what remains of it."""
        left = max(0, self.request.most_tokens - self.computed)
        return ServedRequest(self.request.id, self.computed, left, self.homes)

    def next_tokens(self, piece_tokens: int) -> tuple[int, ...]:
        """What is computed next: the prompt to the end of a piece, or one generated token.

        So each token is always computed with the same neighbours, also if that is done again.
        """
        prompt, begin = self.request.prompt, self.computed
        if begin < len(prompt):
            return prompt[begin : (begin // piece_tokens + 1) * piece_tokens]
        return (self.tokens[begin - len(prompt)],)

    def from_piece(self, kept: int, piece_tokens: int) -> int:
        """From where the tokens after ``kept`` are computed again: a piece of the prompt is computed as a
        whole.
        """
        return kept if kept >= len(self.request.prompt) else kept - kept % piece_tokens


class StripeTable(msgspec.Struct, kw_only=True):
    """Which stripes of the backup are whose (`KvBackup`); see there."""

    stripes: dict[str, list[int]] = {}
    free: list[int] = []
    tags: dict[int, int] = {}
    last_tag: int = 0

    @property
    def taken(self) -> list[int]:
        """Stripes of requests, in an order that is the same on all devices."""
        return [stripe for own in self.stripes.values() for stripe in own]


class _StateMessage(msgspec.Struct):
    """A `ServerState` as bytes."""

    epoch: int
    commits: int
    requests: list[RequestState]
    placements: dict[str, tuple[tuple[int, ...], tuple[tuple[int, ...], ...], bool]]
    backup: StripeTable | None


_decoder = msgspec.msgpack.Decoder(_StateMessage)


@dataclass(slots=True)
class ServerState:
    """What all devices of a server have in common.

    Attributes:
        epoch: in which devices have last come to a new layout.
        requests: by id, in the order in which they began.
        backup: None: there is none.
    """

    layout: ServerLayout
    epoch: int = 0
    commits: int = 0
    requests: dict[str, RequestState] = field(default_factory=dict)
    backup: StripeTable | None = None

    @property
    def open(self) -> list[RequestState]:
        """Requests that need another token."""
        return [each for each in self.requests.values() if not each.finished]

    def encode(self) -> bytes:
        """As bytes, for devices that lack it."""
        placements = {k.value: (p.devices, p.owners, p.hybrid) for k, p in self.layout.placements.items()}
        requests = list(self.requests.values())
        return msgspec.msgpack.encode(
            _StateMessage(self.epoch, self.commits, requests, placements, self.backup)
        )

    @classmethod
    def decode(cls, payload: bytes, model: ServedModel) -> ServerState:
        """What `encode` has made.

        Raises:
            ValueError: it is no such state.
        """
        told = unpack(_decoder, payload, max_bytes=_LIMIT_BYTES)
        placements = {UnitKind(kind): UnitPlacement(*each) for kind, each in told.placements.items()}
        layout = ServerLayout(model, placements)
        requests = {each.request.id: each for each in told.requests}
        return cls(layout, told.epoch, told.commits, requests, told.backup)


def sample(logits: Tensor, request: GenerationRequest, position: int) -> int:
    """The token at a position, given the logits of the one before: the same on all devices, at any time.

    Args:
        logits: ``[V]``, float32, on the CPU.
    """
    if request.temperature == 0.0:
        return int(logits.argmax())
    scaled = logits.double() / request.temperature
    if 0 < request.top < len(scaled):
        least = torch.topk(scaled, request.top).values[-1]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    sums = torch.softmax(scaled, -1).cumsum(-1)
    name = f"{request.seed}:{position}".encode()
    drawn = (xxhash.xxh3_64_intdigest(name) >> 11) / 2.0**53 * float(sums[-1])
    return min(int(torch.searchsorted(sums, drawn, right=True)), len(sums) - 1)
