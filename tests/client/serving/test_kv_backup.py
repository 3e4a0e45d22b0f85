"""Blocks are copied, found by other devices, verified and evicted; nothing half written is ever read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ckptd.client.serving.kv_backup import KvBackup, backup_bytes, format_backup, geometry_of
from ckptd.core.serving.kv_backup_index import BackupGeometry

DIM, BLOCK = 4, 2
GEOMETRY = BackupGeometry("m", 2, 3, 2 * DIM * 4, BLOCK, quota_bytes=5 * 6 * BLOCK * 2 * DIM * 4)
HEADS = [(layer, head) for layer in range(2) for head in range(3)]


@pytest.fixture
def memory() -> memoryview:
    found = memoryview(bytearray(backup_bytes(GEOMETRY)))
    format_backup(found, GEOMETRY)
    return found


class Device:
    """A device with some heads of one request."""

    def __init__(self, memory: memoryview, heads: list[tuple[int, int]]) -> None:
        self.backup = KvBackup(memory, torch.float32, DIM)
        self.backup.use(None, 1)
        self.kv = {at: torch.randn(2, 11, DIM) for at in heads}

    def heads(self) -> list[tuple[int, int, Tensor]]:
        return [(layer, head, kv) for (layer, head), kv in self.kv.items()]

    def back_up(self, request: str, computed: int) -> None:
        self.backup.back_up(request, computed, self.heads)


@pytest.fixture
def devices(memory: memoryview) -> Iterator[tuple[Device, Device]]:
    """Two that have begun the same request."""
    pair = Device(memory, HEADS[::2]), Device(memory, HEADS[1::2])
    for each in pair:
        each.backup.index.begin("a", 9)
    yield pair
    for each in pair:
        each.backup.close()


def test_a_device_finds_what_another_one_has_copied(devices: tuple[Device, Device]) -> None:
    ours, theirs = devices
    for each in devices:
        each.back_up("a", 3)
        each.back_up("a", 7)
        each.backup.drain()
    assert ours.backup.copied_blocks == theirs.backup.copied_blocks == 9
    assert ours.backup.table() == theirs.backup.table()
    assert ours.backup.index.tokens("a", *HEADS[1]) == 0  # it has not looked yet
    ours.backup.use(ours.backup.table(), 2)
    for (layer, head), kv in theirs.kv.items():
        assert ours.backup.index.tokens("a", layer, head) == 6
        into = torch.zeros(2, 11, DIM)
        assert ours.backup.read("a", layer, head, 5, into) == 5
        assert torch.equal(into[:, :5], kv[:, :5])
        assert not into[:, 5:].any()


def test_a_request_ends_and_its_pages_are_of_another_one(devices: tuple[Device, Device]) -> None:
    """What is left of the first one counts for nobody: its tags are older."""
    for each in devices:
        each.back_up("a", 10)
        each.backup.end("a")
        each.backup.index.begin("b", 9)
    ours, theirs = devices
    theirs.back_up("b", 4)
    ours.back_up("b", 2)
    for each in devices:
        each.backup.drain()
    ours.backup.use(theirs.backup.table(), 2)
    assert ours.backup.index.tokens("b", *HEADS[1]) == 4
    assert ours.backup.index.tokens("b", *HEADS[0]) == 2
    assert ours.backup.index.used_bytes == 2 * GEOMETRY.stripe_bytes


def test_without_a_free_page_a_request_waits_for_one(devices: tuple[Device, Device]) -> None:
    ours, _ = devices
    ours.backup.index.begin("b", 9)
    ours.back_up("b", 8)
    ours.back_up("a", 8)
    ours.backup.drain()
    assert ours.backup.index.tokens("a", *HEADS[0]) == 2
    ours.backup.end("b")
    ours.back_up("a", 8)
    ours.backup.drain()
    assert ours.backup.index.tokens("a", *HEADS[0]) == 8


def test_a_damaged_block_is_noticed(devices: tuple[Device, Device], memory: memoryview) -> None:
    ours, _ = devices
    ours.back_up("a", 6)
    ours.backup.drain()
    stripe = ours.backup.index.stripes_of("a")[1]
    layer, head = HEADS[2]
    at = len(memory) - 5 * GEOMETRY.stripe_bytes  # stripes are at the end
    at += stripe * GEOMETRY.stripe_bytes + (layer * 3 + head) * GEOMETRY.block_bytes
    memory[at] ^= 1
    into = torch.zeros(2, 11, DIM)
    assert ours.backup.read("a", layer, head, 6, into) == 2
    assert ours.backup.damaged == 1
    assert ours.backup.read("a", *HEADS[0], 6, into) == 6


def test_an_epoch_that_did_not_count_leaves_nothing_behind(devices: tuple[Device, Device]) -> None:
    """Blocks of stripes that were given after the state that counts: the same stripe has another tag then."""
    ours, _ = devices
    before = ours.backup.table()
    ours.back_up("a", 6)
    ours.backup.drain()
    ours.backup.use(before, 2)
    assert ours.backup.index.tokens("a", *HEADS[0]) == 0
    ours.kv = {HEADS[0]: ours.kv[HEADS[0]]}
    ours.back_up("a", 6)
    ours.backup.use(ours.backup.table(), 3)
    assert ours.backup.index.tokens("a", *HEADS[0]) == 6
    assert ours.backup.index.tokens("a", *HEADS[2]) == 0


def test_a_block_that_cannot_be_copied_is_absent(devices: tuple[Device, Device]) -> None:
    ours, _ = devices
    ours.kv[HEADS[2]] = torch.zeros(2, 0, DIM)  # there is nothing to copy
    ours.back_up("a", 4)
    ours.backup.drain()
    assert ours.backup.index.tokens("a", *HEADS[0]) == 4
    assert ours.backup.index.tokens("a", *HEADS[2]) == 0
    assert ours.backup.index.tokens("a", *HEADS[4]) == 4
    ours.backup.end("a")
    assert ours.backup.index.used_bytes == 0


def test_memory_without_a_backup_is_refused(memory: memoryview) -> None:
    assert geometry_of(memory) == GEOMETRY
    with pytest.raises(ValueError, match="are too few for a backup"):
        format_backup(memory[:-1], GEOMETRY)
    with pytest.raises(ValueError, match="the memory has"):
        geometry_of(memory[:-1])
    memory[20] ^= 1
    with pytest.raises(ValueError, match="its head is damaged"):
        KvBackup(memory, torch.float32, DIM)
    with pytest.raises(ValueError, match="there is no backup"):
        geometry_of(memoryview(bytes(8192)))
