"""The backup of KV: pages in memory that outlives the server's processes, filled beside generation.

The pages are in a segment of the daemon (`ckptd.client.serving.kv_memory`), which all devices of a node map.
Which page is whose follows from the state that all devices have in common (`KvBackupIndex`): so nobody asks
for a page. A block has the same place in the memory of each node; a node has those that its devices have
computed, and copies from others (`ckptd.client.serving.kv_copies`). What a device that is gone had finished
is in the memory itself:

======== ======================= =================================================================
offset   size                    content
======== ======================= =================================================================
0        4096                    ``CKPTDKV1``, u32 length and u32 crc32 of a msgpack map with the
                                 sizes and the model (`BackupGeometry`), then that map
4096     16 for each block       u64 tag, u64 xxh3_64 of the block's bytes seeded with the tag;
                                 in the order of the blocks
next     stripes * stripe_bytes  blocks, by stripe, layer and head: keys, then values
page
======== ======================= =================================================================

All integers are little-endian. A *tag* is a number that a stripe gets each time it is given to a request, and
no other time. A block is finished if its tag is that of its stripe; bytes and digest come before it, so a
death in between leaves an older tag. Whoever reads a block compares its digest.

A thread copies blocks. Before its request ends, and before a loss is dealt with, all copies have ended.
"""

from __future__ import annotations

import math
import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from ckptd.client.daemon_link.connection import WorkerThread
from ckptd.client.log_lines import get_logger
from ckptd.client.serving.generation import StripeTable
from ckptd.core.serving.kv_backup_index import BackupGeometry, BlockPlace, KvBackupIndex
from ckptd.unpacking import unpack

logger = get_logger(__name__)

_MAGIC = b"CKPTDKV1"
_HEAD = struct.Struct("<8sII")
_HEAD_BYTES = _PAGE = 4096
_ENTRY = 16
_NAMED = 24  # bytes of a block's number, tag and digest in a message
_DRAIN_S = 60.0
_TAG_OF_EPOCH = 40  # bits: a tag of an epoch is larger than all of those before
_geometry_decoder = msgspec.msgpack.Decoder(BackupGeometry)


def _data_at(geometry: BackupGeometry) -> int:
    table = geometry.stripes * geometry.layers * geometry.kv_heads * _ENTRY
    return _HEAD_BYTES + -(-table // _PAGE) * _PAGE


def backup_bytes(geometry: BackupGeometry) -> int:
    """How much memory such a backup needs: its quota, and a table."""
    return _data_at(geometry) + geometry.stripes * geometry.stripe_bytes


def format_backup(buffer: memoryview, geometry: BackupGeometry) -> None:
    """Make an empty backup of a memory.

    Raises:
        ValueError: the memory is too small.
    """
    if len(buffer) < backup_bytes(geometry):
        raise ValueError(f"{len(buffer)} bytes are too few for a backup of {backup_bytes(geometry)}")
    payload = msgspec.msgpack.encode(asdict(geometry))
    buffer[: _HEAD.size] = bytes(_HEAD.size)  # no backup until the end of this call
    np.frombuffer(buffer, np.uint8, _data_at(geometry) - _HEAD_BYTES, _HEAD_BYTES)[:] = 0
    buffer[_HEAD.size : _HEAD.size + len(payload)] = payload
    buffer[: _HEAD.size] = _HEAD.pack(_MAGIC, len(payload), zlib.crc32(payload))


def geometry_of(buffer: memoryview) -> BackupGeometry:
    """The sizes of a backup, and of which model it is.

    Raises:
        ValueError: the memory has no backup, or a damaged one.
    """
    magic, length, crc = _HEAD.unpack_from(buffer)
    payload = bytes(buffer[_HEAD.size : _HEAD.size + length]) if length < _HEAD_BYTES - _HEAD.size else b""
    if magic != _MAGIC or zlib.crc32(payload) != crc:
        raise ValueError("there is no backup of KV in this memory, or its head is damaged")
    geometry = unpack(_geometry_decoder, payload)
    if len(buffer) < backup_bytes(geometry):
        raise ValueError(f"the backup needs {backup_bytes(geometry)} bytes, the memory has {len(buffer)}")
    return geometry


class TaggedBlocks(NamedTuple):
    """Blocks out of their memory: number, tag and digest of each, and their bytes."""

    named: list[list[int]]
    raw: Tensor


class KvBackup:
    """One device's view of the backup; all devices make the same calls in the same order.

    Args:
        buffer: formatted memory, the same for all devices of the node.
        dtype, head_dim: of KV.
        node: a name of the node whose memory this is.
    Attributes:
        index: which stripe is whose.
        fresh: number and tag of the blocks that this device has finished since somebody took them from here.
        copied_blocks, copied_bytes: by this device.
        damaged: blocks whose digest did not match.
    """

    def __init__(self, buffer: memoryview, dtype: torch.dtype, head_dim: int, node: str = "") -> None:
        self.node = node
        self.geometry = geometry = geometry_of(buffer)
        shape = (geometry.stripes, geometry.layers, geometry.kv_heads, 2)
        count = math.prod(shape)
        self._table = np.frombuffer(buffer, np.uint64, count, _HEAD_BYTES).reshape(shape)
        self._words = buffer[_HEAD_BYTES : _HEAD_BYTES + count * 8].cast("Q")  # a word is one store
        self._bytes = buffer[_data_at(geometry) :]
        self._block_bytes = geometry.block_bytes
        self._stripe_blocks = geometry.layers * geometry.kv_heads
        self._dtype, self._shape = dtype, (2, geometry.block_tokens, head_dim)
        self._raw = torch.frombuffer(
            buffer,
            dtype=torch.uint8,
            count=geometry.stripes * geometry.stripe_bytes,
            offset=_data_at(geometry),
        ).view(-1, self._block_bytes)
        self._blocks = self._raw.view(dtype).view(-1, *self._shape)
        self.index = KvBackupIndex(geometry)
        self._tags: dict[int, int] = {}
        self._last_tag = 0
        self._written: deque[tuple[int, int, list[int], list[int]]] = deque()
        self.fresh: deque[tuple[int, int]] = deque()
        self._open = 0
        self._closed = threading.Event()
        self._worker = WorkerThread("ckptd-kv", lambda: None, _failed, self._closed)
        self._worker.start()
        self.copied_blocks = self.copied_bytes = self.damaged = 0

    @property
    def block_tokens(self) -> int:
        """Of a block."""
        return self.geometry.block_tokens

    # -- what all devices have in common ----------------------------------------------------------

    def table(self) -> StripeTable:
        """Which stripe is whose, for a `ServerState`."""
        stripes = {each: list(self.index.stripes_of(each)) for each in self.index.requests}
        return StripeTable(
            stripes=stripes, free=list(self.index.free), tags=dict(self._tags), last_tag=self._last_tag
        )

    def use(self, table: StripeTable | None, epoch: int, finished: NDArray[np.bool_] | None = None) -> None:
        """Begin an epoch with stripes that belong to these requests, and with what is finished of them.

        Args:
            table: None: all stripes are free.
            finished: by any node, as `finished` has it of one; None: what is finished in this memory counts.
        """
        self.drain()
        table = table or StripeTable(free=list(KvBackupIndex(self.geometry).free))
        if finished is None:
            finished = self.finished(table)
        self._tags = dict(table.tags)
        self._last_tag = max(table.last_tag, epoch << _TAG_OF_EPOCH)
        self.fresh.clear()
        every = set(product(range(self.geometry.layers), range(self.geometry.kv_heads)))
        places = {
            stripe: every if row.all() else set(zip(*(at.tolist() for at in row.nonzero()), strict=True))
            for stripe, row in zip(table.taken, finished, strict=True)
        }
        self.index = KvBackupIndex.restored(self.geometry, table.stripes, table.free, places)

    def finished(self, table: StripeTable) -> NDArray[np.bool_]:
        """Which blocks this memory has, whichever device wrote them: by stripe (as `StripeTable.taken` has
        them), layer and head.
        """
        tags = np.array([table.tags[stripe] for stripe in table.taken], np.uint64)
        found: NDArray[np.bool_] = self._table[table.taken, :, :, 0] == tags[:, None, None]
        return found

    # -- life of a request ------------------------------------------------------------------------

    def back_up(
        self, request: str, computed: int, heads: Callable[[], list[tuple[int, int, Tensor]]]
    ) -> None:
        """Begin to copy the blocks that are complete now. Without a free stripe, try again later.

        Args:
            computed: tokens whose KV is there.
            heads: layer, head and KV (``[2, capacity, head_dim]``) of those that this device computes for the
                request; called if there is something to copy.
        """
        self.collect()
        have = self.index.blocks_of(request)
        while (have + 1) * self.block_tokens <= computed:
            number = self.index.reserve(request)
            if number is None:
                return
            stripe = self.index.stripes_of(request)[number]
            self._last_tag += 1
            self._tags[stripe] = self._last_tag
            self._copy(request, number, heads())
            have += 1

    def _copy(self, request: str, number: int, heads: list[tuple[int, int, Tensor]]) -> None:
        begin, end = number * self.block_tokens, (number + 1) * self.block_tokens
        tag, places = self._last_tag, [(layer, head) for layer, head, _ in heads]
        offsets = self.index.write_heads(request, number, places)
        if not places:
            return

        def copy() -> None:
            done, failed = list[int](), list[int]()
            for offset, (_, _, kv) in zip(offsets, heads, strict=True):
                block = offset // self._block_bytes
                try:
                    self._blocks[block].copy_(kv[:, begin:end])
                except RuntimeError as error:  # of a device, say: it is computed again if it is lost
                    logger.error("KV of request %s was not backed up: %s", request, error)
                    failed.append(offset)
                    continue
                self._words[2 * block + 1] = self._digest(offset, tag)
                self._words[2 * block] = tag
                done.append(block)
            self._written.append((tag, offsets[0], done, failed))

        self._open += 1
        if not self._worker.submit(copy):  # so much is waiting that generation waits, too
            self._worker.call(copy, _DRAIN_S)
        self.copied_blocks += len(places)
        self.copied_bytes += len(places) * self._block_bytes

    def _digest(self, offset: int, tag: int) -> int:
        return xxhash.xxh3_64_intdigest(self._bytes[offset : offset + self._block_bytes], seed=tag)

    def collect(self) -> None:
        """Notice copies that have ended: what they finished is in `fresh`."""
        while self._written:
            tag, offset, done, failed = self._written.popleft()
            heads = self.geometry.kv_heads
            self.index.finish_heads(offset, [divmod(each % self._stripe_blocks, heads) for each in done])
            for each in failed:
                self.index.finish(each, complete=False)
            self.fresh.extend((block, tag) for block in done)
            self._open -= 1

    def drain(self) -> None:
        """Wait until all copies have ended.

        Raises:
            TimeoutError: the thread hangs.
        """
        if self._open > len(self._written):
            self._worker.call(lambda: None, _DRAIN_S)
        self.collect()

    def keep(self, request: str, tokens: int) -> None:
        """Tokens of a request from here on are computed again."""
        self.drain()
        before = self.index.stripes_of(request)
        self.index.keep(request, tokens)
        for stripe in set(before).difference(self.index.stripes_of(request)):
            del self._tags[stripe]

    def end(self, request: str) -> None:
        """A request has ended: its pages are free."""
        self.keep(request, 0)
        self.index.end(request)

    # -- copies of other nodes --------------------------------------------------------------------

    def is_of(self, block: int, tag: int) -> bool:
        """Whether a block with this tag is still of a request."""
        return self._tags.get(block // self._stripe_blocks) == tag

    def tagged(self, stripe: int, layer: int, head: int) -> tuple[int, int]:
        """Number and tag of the block of a stripe that is of a request."""
        return stripe * self._stripe_blocks + layer * self.geometry.kv_heads + head, self._tags[stripe]

    def message_bytes(self, count: int) -> int:
        """How long `message` is with so many blocks."""
        return count * (_NAMED + self._block_bytes)

    def message(self, blocks: Sequence[int]) -> Tensor:
        """Blocks as they are in this memory: number, tag and digest of each, then their bytes."""
        named = np.empty((len(blocks), 3), np.uint64)
        named[:, 0] = blocks
        named[:, 1:] = self._table.reshape(-1, 2)[blocks]
        return torch.cat([torch.from_numpy(named).view(torch.uint8).flatten(), self._raw[blocks].flatten()])

    def blocks_of(self, message: Tensor) -> TaggedBlocks:
        """What `message` has made."""
        count = len(message) // self.message_bytes(1)
        named: NDArray[Any] = message[: count * _NAMED].numpy().view(np.uint64).reshape(count, 3)
        return TaggedBlocks(named.tolist(), message[count * _NAMED :].view(count, self._block_bytes))

    def add(self, message: Tensor) -> int:
        """Have another node's blocks in this memory, too; how many are new. Those of stripes that have been
        given away meanwhile do not count.
        """
        added = 0
        for (block, tag, digest), found in zip(*self.blocks_of(message), strict=True):
            if not self.is_of(block, tag) or self._words[2 * block] == tag:
                continue
            self._raw[block] = found
            self._words[2 * block + 1] = digest
            self._words[2 * block] = tag
            added += 1
        return added

    # -- recovery ---------------------------------------------------------------------------------

    def places(self, request: str, layer: int, head: int, numbers: Iterable[int]) -> list[int]:
        """Blocks in memory, given their numbers within a request.

        Raises:
            LocalProtocolError: one of them is not finished.
        """
        found = []
        for number in numbers:
            offset = self.index.read(BlockPlace(request, number, layer, head))
            self.index.done(offset)  # nobody else calls the index meanwhile
            found.append(offset // self._block_bytes)
        return found

    def read(
        self,
        request: str,
        layer: int,
        head: int,
        tokens: int,
        into: Tensor,
        *,
        numbers: Sequence[int] | None = None,
        found: TaggedBlocks | None = None,
    ) -> int:
        """Read the first tokens of a head.

        Args:
            tokens: that `KvBackupIndex.tokens` has promised.
            into: ``[2, capacity, head_dim]``.
            numbers: only these blocks of the request, ascending; None: all.
            found: these blocks, from another node; None: they are in this memory.
        Returns:
            How many tokens are right, as far as these blocks tell: all, if none is damaged.
        """
        size = self.block_tokens
        numbers = range(-(-tokens // size)) if numbers is None else numbers
        blocks = self.places(request, layer, head, numbers)
        named, raw = found or self.blocks_of(self.message(blocks))
        right, good = tokens, list[int]()
        seen: NDArray[np.uint8] = raw.numpy()
        for at, (number, block) in enumerate(zip(numbers, blocks, strict=True)):
            tag = self._tags[block // self._stripe_blocks]
            if named[at] != [block, tag, xxhash.xxh3_64_intdigest(seen[at], seed=tag)]:
                self.damaged += 1
                where = f"request {request}, tokens from {number * size} on, layer {layer}, head {head}"
                logger.error("the backup of %s is damaged: they are computed again", where)
                right = number * size
                break
            good.append(at)
        self._place(into, [numbers[at] for at in good], raw[good], right)
        return right

    def _place(self, into: Tensor, numbers: Sequence[int], raw: Tensor, right: int) -> None:
        """Put blocks where their tokens are, without those behind the right ones."""
        size = self.block_tokens
        kv = raw.view(self._dtype).view(-1, *self._shape).transpose(0, 1).flatten(1, 2)
        if list(numbers) == list(range(len(numbers))):
            into[:, : min(right, kv.shape[1])] = kv[:, :right].to(into.device)
            return
        at = (torch.tensor(numbers, dtype=torch.int64)[:, None] * size + torch.arange(size)).flatten()
        wanted = at < right
        into[:, at[wanted].to(into.device)] = kv[:, wanted].to(into.device)

    def close(self) -> None:
        """Copy no more. The memory stays."""
        self._closed.set()
        self._worker.join(_DRAIN_S)


def _failed(error: Exception) -> None:
    logger.error("KV was not backed up: %s", error)
