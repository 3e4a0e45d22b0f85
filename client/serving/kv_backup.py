"""The backup of KV: pages in memory that outlives the server's processes, filled beside generation.

The pages are in a segment of the daemon (`ckptd.client.serving.kv_memory`), which all devices of a node map.
Which page is whose follows from the state that all devices have in common (`KvBackupIndex`): so nobody asks
for a page. What a device that is gone had finished is in the memory itself:

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
from collections.abc import Callable
from dataclasses import asdict
from itertools import product

import msgspec
import numpy as np
import torch
import xxhash
from torch import Tensor

from ckptd.client.daemon_link.connection import WorkerThread
from ckptd.client.log_lines import get_logger
from ckptd.client.serving.generation import StripeTable
from ckptd.core.serving.kv_backup_index import BackupGeometry, BlockPlace, KvBackupIndex
from ckptd.unpacking import unpack

__all__ = ["KvBackup", "backup_bytes", "format_backup", "geometry_of"]

logger = get_logger(__name__)

_MAGIC = b"CKPTDKV1"
_HEAD = struct.Struct("<8sII")
_HEAD_BYTES = _PAGE = 4096
_ENTRY = 16
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


class KvBackup:
    """One device's view of the backup; all devices make the same calls in the same order.

    Args:
        buffer: formatted memory, the same for all devices of the node.
        dtype, head_dim: of KV.
    Attributes:
        index: which stripe is whose.
        copied_blocks, copied_bytes: by this device.
        damaged: blocks whose digest did not match.
    """

    def __init__(self, buffer: memoryview, dtype: torch.dtype, head_dim: int) -> None:
        self.geometry = geometry = geometry_of(buffer)
        shape = (geometry.stripes, geometry.layers, geometry.kv_heads, 2)
        count = math.prod(shape)
        self._table = np.frombuffer(buffer, np.uint64, count, _HEAD_BYTES).reshape(shape)
        self._words = buffer[_HEAD_BYTES : _HEAD_BYTES + count * 8].cast("Q")  # a word is one store
        self._bytes = buffer[_data_at(geometry) :]
        self._block_bytes = geometry.block_bytes
        blocks = (count // 2, 2, geometry.block_tokens, head_dim)
        self._blocks = torch.frombuffer(
            buffer, dtype=dtype, count=math.prod(blocks), offset=_data_at(geometry)
        ).view(blocks)
        self.index = KvBackupIndex(geometry)
        self._tags: dict[int, int] = {}
        self._last_tag = 0
        self._written: deque[tuple[int, list[tuple[int, int]], list[int]]] = deque()
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

    def use(self, table: StripeTable | None, epoch: int) -> None:
        """Begin an epoch with stripes that belong to these requests, and with what is finished of them.

        Args:
            table: None: all stripes are free.
        """
        self.drain()
        table = table or StripeTable(free=list(KvBackupIndex(self.geometry).free))
        self._tags = dict(table.tags)
        self._last_tag = max(table.last_tag, epoch << _TAG_OF_EPOCH)
        finished = self._finished([stripe for own in table.stripes.values() for stripe in own])
        self.index = KvBackupIndex.restored(self.geometry, table.stripes, table.free, finished)

    def _finished(self, stripes: list[int]) -> dict[int, set[tuple[int, int]]]:
        """Layer and head of the blocks of these stripes that any device has finished."""
        tags = np.array([self._tags[stripe] for stripe in stripes], np.uint64)
        there = self._table[stripes, :, :, 0] == tags[:, None, None]
        every = set(product(range(self.geometry.layers), range(self.geometry.kv_heads)))
        return {
            stripe: every if row.all() else set(zip(*(at.tolist() for at in row.nonzero()), strict=True))
            for stripe, row in zip(stripes, there, strict=True)
        }

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
        self._collect()
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
            done, failed = [], []
            for offset, place, (_, _, kv) in zip(offsets, places, heads, strict=True):
                block = offset // self._block_bytes
                try:
                    self._blocks[block].copy_(kv[:, begin:end])
                except RuntimeError as error:  # of a device, say: it is computed again if it is lost
                    logger.error("KV of request %s was not backed up: %s", request, error)
                    failed.append(offset)
                    continue
                self._words[2 * block + 1] = self._digest(offset, tag)
                self._words[2 * block] = tag
                done.append(place)
            self._written.append((offsets[0], done, failed))

        self._open += 1
        if not self._worker.submit(copy):  # so much is waiting that generation waits, too
            self._worker.call(copy, _DRAIN_S)
        self.copied_blocks += len(places)
        self.copied_bytes += len(places) * self._block_bytes

    def _digest(self, offset: int, tag: int) -> int:
        return xxhash.xxh3_64_intdigest(self._bytes[offset : offset + self._block_bytes], seed=tag)

    def _collect(self) -> None:
        while self._written:
            offset, done, failed = self._written.popleft()
            self.index.finish_heads(offset, done)
            for each in failed:
                self.index.finish(each, complete=False)
            self._open -= 1

    def drain(self) -> None:
        """Wait until all copies have ended.

        Raises:
            TimeoutError: the thread hangs.
        """
        if self._open > len(self._written):
            self._worker.call(lambda: None, _DRAIN_S)
        self._collect()

    def keep(self, request: str, tokens: int) -> None:
        """Tokens of a request from here on are computed again."""
        self.drain()
        self.index.keep(request, tokens)

    def end(self, request: str) -> None:
        """A request has ended: its pages are free."""
        self.drain()
        self.index.end(request)

    # -- recovery ---------------------------------------------------------------------------------

    def read(self, request: str, layer: int, head: int, tokens: int, into: Tensor) -> int:
        """Read the first tokens of a head.

        Args:
            tokens: that `KvBackupIndex.tokens` has promised.
            into: ``[2, capacity, head_dim]``.
        Returns:
            How many of them are right: all, if no block is damaged.
        """
        right, numbers = tokens, list[int]()
        stripes = self.index.stripes_of(request)
        for number, begin in enumerate(range(0, tokens, self.block_tokens)):
            offset = self.index.read(BlockPlace(request, number, layer, head))
            block, tag = offset // self._block_bytes, self._tags[stripes[number]]
            whole = (self._words[2 * block], self._words[2 * block + 1]) == (tag, self._digest(offset, tag))
            self.index.done(offset)  # nobody else calls the index meanwhile
            if not whole:
                self.damaged += 1
                where = f"request {request}, tokens from {begin} on, layer {layer}, head {head}"
                logger.error("the backup of %s is damaged: they are computed again", where)
                right = begin
                break
            numbers.append(block)
        blocks = self._blocks[numbers].transpose(0, 1).flatten(1, 2)
        into[:, :right] = blocks[:, :right].to(into.device)
        return right

    def close(self) -> None:
        """Copy no more. The memory stays."""
        self._closed.set()
        self._worker.join(_DRAIN_S)


def _failed(error: Exception) -> None:
    logger.error("KV was not backed up: %s", error)
