"""Copies of finished KV on other nodes, and how lost KV is read wherever it is.

A server's devices may be on several nodes, each with a daemon and a memory of its own (`KvBackup`), in which
a block has the same place. If asked, each node's blocks are in the memory of others, too: then a node may be
lost with its daemon, its memory and its devices.

Copies travel from device to device, as KV that moves does, and not from daemon to daemon: a block is written
by a process that knows whose its stripe is at that moment, so nothing is granted, and nothing has to be
revoked when a stripe is given away. At the begin of a step all tell how many blocks they have for which node,
so each knows which messages come. A device sends a few MB a step at most; what is not sent yet is absent on
the other node.

After each loss and return all tell what their nodes have (`meet`). From that follows what is read from where,
and which blocks are on too few nodes and are copied again (`ckptd.core.serving.node_copies`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import reduce
from math import prod
from operator import or_

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ckptd.client.log_lines import get_logger
from ckptd.client.serving.device_group import DeviceGroup, gather_bytes
from ckptd.client.serving.generation import StripeTable
from ckptd.client.serving.kv_backup import KvBackup, TaggedBlocks
from ckptd.core.serving.loss_plan import KvFetch
from ckptd.core.serving.node_copies import ServerNodes, copies_to_make, nearest_holders

logger = get_logger(__name__)

_STEP_BYTES = 4 << 20  # of a device to each node
_KV = 0  # a tag
_Part = tuple[KvFetch, list[int]]
"""Some blocks of what a device needs, by their numbers."""


class KvCopies:
    """One device's part in copying.

    Args:
        copies: how many nodes have a block, besides the one that computed it.
    Attributes:
        nodes: where the devices are that are there.
        sent_blocks: that this device has sent to other nodes, besides what was read.
        added_blocks: that it has stored for other nodes.
    """

    def __init__(self, device: int, backup: KvBackup, copies: int) -> None:
        self._device, self._backup, self._copies = device, backup, copies
        self.nodes = ServerNodes(((device,),))
        self._node = 0
        self._stripes: list[int] = []
        self._held: list[int] = [0]
        self._waiting: dict[int, deque[tuple[int, int]]] = {}
        self.sent_blocks = self.added_blocks = 0

    @property
    def waiting(self) -> int:
        """How many copies are to be sent."""
        return sum(map(len, self._waiting.values()))

    # -- an epoch ---------------------------------------------------------------------------------

    def meet(self, group: DeviceGroup, table: StripeTable | None) -> NDArray[np.bool_]:
        """Hear who is on which node, and which blocks each node has.

        Args:
            table: the same on all devices.
        Returns:
            What any node has, for `KvBackup.use`.
        """
        backup, table = self._backup, table or StripeTable()
        backup.drain()
        told = gather_bytes(group, backup.node.encode())  # from here on, nobody copies
        names = dict(zip(group.devices, told, strict=True))
        self.nodes = ServerNodes.of({device: name.decode() for device, name in names.items()})
        self._node = self.nodes.node(self._device)
        if len(self.nodes) <= self._copies:
            logger.warning(
                "KV should be on %d nodes besides its own: there are %d", self._copies, len(self.nodes) - 1
            )
        self._waiting = {node: deque() for node in range(len(self.nodes)) if self._copies}
        self._stripes, own = table.taken, backup.finished(table)
        speaks = self.nodes.devices[self._node][0] == self._device
        rows = gather_bytes(group, np.packbits(own, bitorder="little").tobytes() if speaks else b"")
        speakers = [group.devices.index(devices[0]) for devices in self.nodes.devices]
        self._held = [int.from_bytes(rows[speaker], "little") for speaker in speakers]
        return self._array(reduce(or_, self._held))

    def _array(self, blocks: int) -> NDArray[np.bool_]:
        """Blocks by stripe, layer and head."""
        shape = len(self._stripes), self._backup.geometry.layers, self._backup.geometry.kv_heads
        bits = np.frombuffer(blocks.to_bytes(-(-prod(shape) // 8), "little"), np.uint8)
        return np.unpackbits(bits, count=prod(shape), bitorder="little").reshape(shape).astype(np.bool_)

    def begin(self) -> None:
        """The epoch goes on from here: copy what is on too few nodes, as far as requests still have it."""
        for (keeper, target), make in copies_to_make(self._held, self._copies).items():
            if keeper != self._node:
                continue
            known = {
                stripe
                for each in self._backup.index.requests
                for stripe in self._backup.index.stripes_of(each)
            }
            for row, layer, head in np.argwhere(self._array(make)).tolist():
                if self._stripes[row] not in known:
                    continue
                block, tag = self._backup.tagged(self._stripes[row], layer, head)
                if self.nodes.bearer(keeper, block) == self._device:
                    self._waiting[target].append((block, tag))

    # -- a step -----------------------------------------------------------------------------------

    def ready(self) -> list[int]:
        """How many blocks this device sends to each node in this step; nothing if nobody wants copies.

        Nothing may change between this and `exchange`.
        """
        self._backup.collect()
        fresh = self._backup.fresh
        if len(self.nodes) == 1 or not self._copies:
            fresh.clear()
            return []
        for node in self.nodes.next_nodes(self._node, self._copies):
            self._waiting[node].extend(fresh)
        fresh.clear()
        most = max(1, _STEP_BYTES // self._backup.geometry.block_bytes)
        return [self._next(self._waiting[node], most) for node in range(len(self.nodes))]

    def _next(self, waiting: deque[tuple[int, int]], most: int) -> int:
        """How many blocks at the front are sent next, without those whose request has ended."""
        there = list[tuple[int, int]]()
        while waiting and len(there) < most:
            if self._backup.is_of(*waiting[0]):
                there.append(waiting[0])
            waiting.popleft()
        waiting.extendleft(reversed(there))
        return len(there)

    def exchange(self, group: DeviceGroup, told: Sequence[Sequence[int]]) -> None:
        """Send and receive copies: one message for each pair of devices, in the same order everywhere.

        Args:
            told: what `ready` has given each device.
        """
        for source, counts in zip(group.devices, told, strict=True):
            for node, count in enumerate(counts):
                if not count:
                    continue
                target = self.nodes.partner(source, node)
                if self._device == source:
                    blocks = [self._waiting[node].popleft()[0] for _ in range(count)]
                    group.send(self._backup.message(blocks), target, _KV)
                    self.sent_blocks += count
                elif self._device == target:
                    self.added_blocks += self._backup.add(self._receive(group, source, count))

    def _receive(self, group: DeviceGroup, source: int, count: int) -> Tensor:
        message = torch.empty(self._backup.message_bytes(count), dtype=torch.uint8)
        group.receive(message, source, _KV)
        return message

    # -- recovery ---------------------------------------------------------------------------------

    def read(
        self, group: DeviceGroup, fetches: Sequence[KvFetch], into: Callable[[KvFetch], Tensor]
    ) -> tuple[dict[str, int], int]:
        """Read what was lost: where it is needed, or else from another node's device.

        Args:
            fetches: of all devices, from the backup.
            into: the place of what this device needs.
        Returns:
            How many tokens of each request are right, for those that this device reads; and bytes that came
            from other nodes.
        """
        backup, right, received = self._backup, dict[str, int](), 0

        def read(fetch: KvFetch, numbers: list[int] | None, found: TaggedBlocks | None = None) -> None:
            place = fetch.request, fetch.layer, fetch.head
            tokens = backup.read(*place, fetch.tokens, into(fetch), numbers=numbers, found=found)
            right[fetch.request] = min(right.get(fetch.request, fetch.tokens), tokens)

        own, others = self._sources(fetches)
        for fetch, numbers in own:
            read(fetch, numbers)
        for (bearer, target), parts in sorted(others.items()):
            if self._device == bearer:
                blocks = [
                    b for f, numbers in parts for b in backup.places(f.request, f.layer, f.head, numbers)
                ]
                group.send(backup.message(blocks), target, _KV)
            elif self._device == target:
                message = self._receive(group, bearer, sum(len(numbers) for _, numbers in parts))
                received += len(message)
                found, begin = backup.blocks_of(message), 0
                for fetch, numbers in parts:
                    end = begin + len(numbers)
                    read(fetch, numbers, TaggedBlocks(found.named[begin:end], found.raw[begin:end]))
                    begin = end
        return right, received

    def _sources(
        self, fetches: Sequence[KvFetch]
    ) -> tuple[list[tuple[KvFetch, list[int] | None]], dict[tuple[int, int], list[_Part]]]:
        """What this device reads from its own memory; and what comes from other nodes, by reader and user."""
        own = list[tuple[KvFetch, list[int] | None]]()
        others: dict[tuple[int, int], list[_Part]] = {}
        if len(self.nodes) == 1:
            return [(fetch, None) for fetch in fetches if fetch.target == self._device], others
        row_of = {stripe: row for row, stripe in enumerate(self._stripes)}
        nearest = [list(map(self._array, nearest_holders(self._held, n))) for n in range(len(self.nodes))]
        rows: dict[str, list[int]] = {}
        for fetch in fetches:
            if fetch.request not in rows:
                rows[fetch.request] = [row_of[s] for s in self._backup.index.stripes_of(fetch.request)]
            node = self.nodes.node(fetch.target)
            wanted = rows[fetch.request][: -(-fetch.tokens // self._backup.block_tokens)]
            for holder, blocks in enumerate(nearest[node]):
                numbers = np.flatnonzero(blocks[wanted, fetch.layer, fetch.head]).tolist()
                if numbers and holder != node:
                    bearer = self.nodes.bearer(holder, fetch.layer + fetch.head)
                    others.setdefault((bearer, fetch.target), []).append((fetch, numbers))
                elif numbers and fetch.target == self._device:
                    own.append((fetch, numbers))
        return own, others
