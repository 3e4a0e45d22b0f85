"""Where the backup of a server's KV has which block, and what of it may be used (FailSafe; pure).

A *block* is the KV of ``block_tokens`` tokens in one head of one layer. The blocks of the same tokens in all
heads of all layers are a *stripe*. Memory is given to requests by stripes, because a block is of use only
with those of the same tokens in the other heads that were lost: tokens are computed again from the first one
that one of them lacks (`loss_plan`). All stripes have the same size, so none is ever moved, and a block's
place follows from its stripe, layer and head::

    offset = stripe * stripe_bytes + (layer * kv_heads + head) * block_bytes

A block is absent, then *written* by a device, then *finished*. Only finished blocks count. A request's end
frees its stripes, but for those in which a block is written or read just then: these are free when the last
one of these has ended. So no device ever writes into, and no reader ever sees, memory of another request.

If there is no stripe left, a request gets none, and has the blocks that it has. It may ask again: its next
stripe is always that of the tokens after those that it has.

The index knows no bytes and no digests; a segment kind that is built on it has both.

Source: FailSafe (arXiv:2511.14116), proactive backup of KV; its abstract was available. Stripes and their
    life are our own. Pages of KV: PagedAttention (SOSP '23).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptd.core.serving.served_model import ServedModel
from ckptd.errors import LocalProtocolError
from ckptd.units import format_bytes


@dataclass(frozen=True, slots=True)
class BackupGeometry:
    """The sizes of a backup.

    Args:
        model: an identity of the weights, such as their digest. KV of others is of no use.
        layers, kv_heads: of the model.
        kv_token_bytes: of one token in one head of one layer.
        block_tokens: of a block.
        quota_bytes: of all stripes.
    Raises:
        ValueError: a size is not positive, or the quota does not hold one stripe.
    """

    model: str
    layers: int
    kv_heads: int
    kv_token_bytes: int
    block_tokens: int
    quota_bytes: int

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "kv_token_bytes", "block_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.stripes < 1:
            raise ValueError(
                f"a quota of {format_bytes(self.quota_bytes)} does not hold {self.block_tokens} tokens, "
                f"which are {format_bytes(self.stripe_bytes)}: raise it, or take smaller blocks"
            )

    @property
    def block_bytes(self) -> int:
        """Of one block."""
        return self.block_tokens * self.kv_token_bytes

    @property
    def stripe_bytes(self) -> int:
        """Of the blocks of the same tokens."""
        return self.block_bytes * self.layers * self.kv_heads

    @property
    def stripes(self) -> int:
        """How many the quota holds."""
        return self.quota_bytes // self.stripe_bytes

    def check_length(self, request: str, most_tokens: int) -> None:
        """Check that a request could be backed up as a whole, if it were alone.

        Raises:
            ValueError: it is longer than the quota.
        """
        needed = most_tokens // self.block_tokens
        if needed > self.stripes:
            raise ValueError(
                f"request {request!r} may have {most_tokens} tokens, which are "
                f"{format_bytes(needed * self.stripe_bytes)} of KV; the quota of the backup is "
                f"{format_bytes(self.quota_bytes)}: raise it, or serve the request without a backup"
            )

    def check_model(self, model: ServedModel, identity: str) -> None:
        """Check that the backup is one of the model that is served.

        Raises:
            ValueError: it is of another model.
        """
        have = (self.layers, self.kv_heads, self.kv_token_bytes)
        want = (model.layers, model.kv_heads, model.kv_token_bytes)
        if self.model != identity or have != want:
            raise ValueError(
                f"the backup is of the model {self.model!r} ({have[0]} layers of {have[1]} KV heads, "
                f"{have[2]} bytes of a token in each), the server has {identity!r} ({want[0]}, {want[1]}, "
                f"{want[2]}): begin a backup of its own"
            )


class BlockPlace(NamedTuple):
    """A block of a request: that of tokens ``number * block_tokens`` and after."""

    request: str
    number: int
    layer: int
    head: int


@dataclass(slots=True)
class _Stripe:
    """Blocks by (layer, head), and how many read one now; ``dropped``: its request has no use for it."""

    index: int
    written: set[tuple[int, int]] = field(default_factory=set)
    finished: set[tuple[int, int]] = field(default_factory=set)
    read: Counter[tuple[int, int]] = field(default_factory=Counter)
    dropped: bool = False

    @property
    def used(self) -> bool:
        return bool(self.written) or any(self.read.values())


class KvBackupIndex:
    """Stripes of requests, from their first block to their end; one thread calls it."""

    def __init__(self, geometry: BackupGeometry) -> None:
        self.geometry = geometry
        self._stripe_bytes, self._block_bytes = geometry.stripe_bytes, geometry.block_bytes
        self._requests: dict[str, list[_Stripe]] = {}
        self._free = list(range(geometry.stripes - 1, -1, -1))
        self._taken: dict[int, _Stripe] = {}  # by index: all that are not free

    @classmethod
    def restored(
        cls,
        geometry: BackupGeometry,
        requests: Mapping[str, Sequence[int]],
        free: Sequence[int],
        finished: Mapping[int, Iterable[tuple[int, int]]] | None = None,
    ) -> KvBackupIndex:
        """An index with the stripes of another one (`stripes_of`, `free`).

        Args:
            finished: layer and head of the finished blocks of stripes; None: there are none.
        Raises:
            ValueError: a stripe is there twice, or missing.
        """
        index = cls(geometry)
        given = [stripe for stripes in requests.values() for stripe in stripes]
        if sorted([*given, *free]) != list(range(geometry.stripes)):
            raise ValueError(
                f"{len(given)} stripes of requests and {len(free)} free ones are not all there are"
            )
        found = finished or {}
        index._requests = {
            name: [_Stripe(stripe, finished=set(found.get(stripe, ()))) for stripe in own]
            for name, own in requests.items()
        }
        index._free = list(free)
        index._taken = {each.index: each for own in index._requests.values() for each in own}
        return index

    def stripes_of(self, request: str) -> tuple[int, ...]:
        """Numbers of its stripes, in the order of its blocks."""
        return tuple(stripe.index for stripe in self._stripes(request))

    def blocks_of(self, request: str) -> int:
        """How many stripes it has."""
        return len(self._stripes(request))

    @property
    def free(self) -> tuple[int, ...]:
        """Stripes that nobody has; the last one is given next."""
        return tuple(self._free)

    @property
    def used_bytes(self) -> int:
        """Of stripes that are not free, also those that wait for the end of a write or a read."""
        return len(self._taken) * self.geometry.stripe_bytes

    @property
    def requests(self) -> tuple[str, ...]:
        """Those that have begun and not ended."""
        return tuple(self._requests)

    def begin(self, request: str, most_tokens: int) -> None:
        """A request begins; it has no stripe yet.

        Args:
            most_tokens: that it may have in the end.
        Raises:
            ValueError: it is longer than the quota, so it could never be backed up as a whole.
            LocalProtocolError: it has begun already.
        """
        if request in self._requests:
            raise self._wrong("it has begun already", request)
        self.geometry.check_length(request, most_tokens)
        self._requests[request] = []

    def reserve(self, request: str) -> int | None:
        """Give a request its next stripe; the number of its blocks, or None if there is no stripe left."""
        stripes = self._stripes(request)
        if not self._free:
            return None
        stripe = _Stripe(self._free.pop())
        self._taken[stripe.index] = stripe
        stripes.append(stripe)
        return len(stripes) - 1

    def write(self, block: BlockPlace) -> int:
        """A device begins to write a block that is absent.

        Returns:
            Its offset in the backup, in bytes.
        Raises:
            LocalProtocolError: its stripe was not reserved, or it was written already.
        """
        stripe, at = self._stripe(block), (block.layer, block.head)
        if at in stripe.written or at in stripe.finished:
            raise self._wrong("the block is written or finished already", block.request, block)
        stripe.written.add(at)
        return self._offset(stripe, block)

    def write_heads(self, request: str, number: int, heads: Collection[tuple[int, int]]) -> list[int]:
        """As `write`, for blocks of the same tokens in several heads (layer, head): their offsets.

        Raises:
            LocalProtocolError: as `write`, and then none of them is written.
        """
        stripe, given = self._stripe(BlockPlace(request, number, 0, 0)), set(heads)
        layers, width = self.geometry.layers, self.geometry.kv_heads
        if len(given) < len(heads) or not all(
            0 <= layer < layers and 0 <= head < width for layer, head in given
        ):
            raise self._wrong("a head is named twice, or the model has none of its number", request)
        if twice := given & (stripe.written | stripe.finished):
            raise self._wrong(f"blocks {sorted(twice)} are written or finished already", request)
        stripe.written |= given
        first, step = stripe.index * self._stripe_bytes, self._block_bytes
        return [first + (layer * width + head) * step for layer, head in heads]

    def finish_heads(self, offset: int, heads: Collection[tuple[int, int]]) -> None:
        """As `finish`, for complete blocks of the stripe that is at an offset.

        Raises:
            LocalProtocolError: one of them is not written.
        """
        stripe, given = self._taken.get(offset // self._stripe_bytes), set(heads)
        if stripe is None or not given <= stripe.written:
            raise self._wrong(f"not all of {len(given)} blocks of the stripe at offset {offset} are written")
        stripe.written -= given
        stripe.finished |= given
        self._free_if_unused(stripe)

    def finish(self, offset: int, *, complete: bool = True) -> None:
        """The write of the block at an offset has ended.

        Args:
            complete: the block is whole. If not, its device died, say: the block is absent again.
        Raises:
            LocalProtocolError: no block is written there.
        """
        stripe, at = self._at(offset)
        if stripe is None or at not in stripe.written:
            raise self._wrong(f"no block is written at offset {offset}")
        stripe.written.remove(at)
        if complete:
            stripe.finished.add(at)
        self._free_if_unused(stripe)

    def read(self, block: BlockPlace) -> int:
        """A reader begins to read a finished block; its bytes stay until `done`, also if the request ends.

        Returns:
            Its offset in the backup, in bytes.
        Raises:
            LocalProtocolError: the block is not finished.
        """
        stripe, at = self._stripe(block), (block.layer, block.head)
        if at not in stripe.finished:
            raise self._wrong("the block is not finished", block.request, block)
        stripe.read[at] += 1
        return self._offset(stripe, block)

    def done(self, offset: int) -> None:
        """A read of the block at an offset has ended.

        Raises:
            LocalProtocolError: no block is read there.
        """
        stripe, at = self._at(offset)
        if stripe is None or not stripe.read[at]:
            raise self._wrong(f"no block is read at offset {offset}")
        stripe.read[at] -= 1
        self._free_if_unused(stripe)

    def tokens(self, request: str, layer: int, head: int) -> int:
        """How many tokens of a head, from the first on without a gap, are finished; 0 for unknown requests.

        This is what `plan_devices` asks.
        """
        count = 0
        for stripe in self._requests.get(request, ()):
            if (layer, head) not in stripe.finished:
                break
            count += 1
        return count * self.geometry.block_tokens

    def finished(self, request: str) -> Iterator[BlockPlace]:
        """All finished blocks of a request, by number."""
        for number, stripe in enumerate(self._stripes(request)):
            for layer, head in sorted(stripe.finished):
                yield BlockPlace(request, number, layer, head)

    def keep(self, request: str, tokens: int) -> None:
        """Only so many tokens of a request are what devices have; those after are computed again.

        Blocks of two computations of a token are not mixed: their bits may differ with the number of devices.
        """
        stripes = self._stripes(request)
        for stripe in stripes[tokens // self.geometry.block_tokens :]:
            self._drop(stripe)
        del stripes[tokens // self.geometry.block_tokens :]

    def end(self, request: str) -> None:
        """A request has ended: its blocks are evicted."""
        self.keep(request, 0)
        del self._requests[request]

    def _stripes(self, request: str) -> list[_Stripe]:
        if request not in self._requests:
            raise self._wrong("it has not begun, or has ended", request)
        return self._requests[request]

    def _stripe(self, block: BlockPlace) -> _Stripe:
        stripes, geometry = self._stripes(block.request), self.geometry
        if not (0 <= block.layer < geometry.layers and 0 <= block.head < geometry.kv_heads):
            raise self._wrong("the model has no such layer or head", block.request, block)
        if not 0 <= block.number < len(stripes):
            raise self._wrong(f"it has {len(stripes)} stripes", block.request, block)
        return stripes[block.number]

    def _offset(self, stripe: _Stripe, block: BlockPlace) -> int:
        number = block.layer * self.geometry.kv_heads + block.head
        return stripe.index * self._stripe_bytes + number * self._block_bytes

    def _at(self, offset: int) -> tuple[_Stripe | None, tuple[int, int]]:
        """The stripe, if it is not free, and the layer and head at an offset."""
        index, rest = divmod(offset, self._stripe_bytes)
        layer, head = divmod(rest // self._block_bytes, self.geometry.kv_heads)
        return self._taken.get(index), (layer, head)

    def _drop(self, stripe: _Stripe) -> None:
        stripe.dropped = True
        self._free_if_unused(stripe)

    def _free_if_unused(self, stripe: _Stripe) -> None:
        if stripe.dropped and not stripe.used:
            del self._taken[stripe.index]
            self._free.append(stripe.index)

    @staticmethod
    def _wrong(
        message: str, request: str | None = None, block: BlockPlace | None = None
    ) -> LocalProtocolError:
        ids = block._asdict() if block is not None else {"request": request} if request is not None else {}
        return LocalProtocolError(message, operation="back up KV", ids=ids)
