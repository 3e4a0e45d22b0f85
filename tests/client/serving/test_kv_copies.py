"""Blocks come to other nodes while nothing waits for them, and lost ones are read from whoever has them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import pytest
import torch

from ckptd.client.serving import kv_copies
from ckptd.client.serving.device_group import DeviceGroup, ThreadDevices, gather_numbers
from ckptd.client.serving.generation import StripeTable
from ckptd.client.serving.kv_backup import KvBackup, backup_bytes, format_backup
from ckptd.client.serving.kv_copies import KvCopies
from ckptd.core.serving.kv_backup_index import BackupGeometry
from ckptd.core.serving.loss_plan import KvFetch

DIM, BLOCK, TOKENS = 4, 2, 8
GEOMETRY = BackupGeometry("m", 1, 3, 2 * DIM * 4, BLOCK, quota_bytes=9 * 3 * BLOCK * 2 * DIM * 4)
KV = {head: torch.randn(2, 11, DIM, generator=torch.Generator().manual_seed(head)) for head in range(3)}
T = TypeVar("T")


def memory() -> memoryview:
    found = memoryview(bytearray(backup_bytes(GEOMETRY)))
    format_backup(found, GEOMETRY)
    return found


class Device:
    """A device that computes the head of its number."""

    def __init__(self, number: int, node: str, memory: memoryview, copies: int) -> None:
        self.number, self.node, self.memory = number, node, memory
        self.backup = KvBackup(memory, torch.float32, DIM, node)
        self.backup.index.begin("a", TOKENS)
        self.copies = KvCopies(number, self.backup, copies)

    def back_up(self, tokens: int) -> None:
        self.backup.back_up("a", tokens, lambda: [(0, self.number, KV[self.number])])

    def meet(self, group: DeviceGroup, table: StripeTable | None, epoch: int) -> None:
        self.backup.use(table, epoch, self.copies.meet(group, table))
        if table is None:
            self.backup.index.begin("a", TOKENS)
        self.copies.begin()

    def step(self, group: DeviceGroup) -> int:
        """How many copies still wait."""
        self.backup.drain()
        sizes = self.copies.ready()
        self.copies.exchange(group, gather_numbers(group, sizes) if sizes else [[] for _ in group.devices])
        return self.copies.waiting

    def has(self, head: int) -> int:
        """How many blocks of a head are in its memory."""
        return int(self.backup.finished(self.backup.table())[:, 0, head].sum())


class Server:
    def __init__(self, nodes: Mapping[int, str], copies: int) -> None:
        memories = {node: memory() for node in nodes.values()}
        self.devices = {n: Device(n, node, memories[node], copies) for n, node in nodes.items()}
        self._epoch = 0
        self.meet(None)

    def all(self, work: Callable[[Device, DeviceGroup], T]) -> dict[int, T]:
        """What each device does, all of them at once."""
        place, found = ThreadDevices(self.devices), dict[int, T]()

        def run(device: Device) -> None:
            try:
                found[device.number] = work(device, place.seat(device.number))
            except BaseException:
                place.lose()
                raise

        threads = [threading.Thread(target=run, args=(each,)) for each in self.devices.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == len(self.devices), "a device failed"
        return found

    def meet(self, table: StripeTable | None) -> None:
        self._epoch += 1
        self.all(lambda device, group: device.meet(group, table, self._epoch))

    def table(self) -> StripeTable:
        tables = [device.backup.table() for device in self.devices.values()]
        assert all(each == tables[0] for each in tables)
        return tables[0]

    def back_up(self, tokens: int = TOKENS) -> None:
        for device in self.devices.values():
            device.back_up(tokens)

    def step(self) -> int:
        return sum(self.all(lambda device, group: device.step(group)).values())

    def read(self, head: int, target: int, tokens: int = TOKENS) -> tuple[int, torch.Tensor]:
        """What a device reads of a head, and how many tokens of it are right."""
        into = torch.zeros(2, 11, DIM)
        fetches = [KvFetch("a", 0, head, tokens, None, target)]
        found = self.all(lambda device, group: device.copies.read(group, fetches, lambda _: into))
        return found[target][0]["a"], into

    def lose(self, number: int) -> None:
        self.devices.pop(number).backup.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    started = list[Server]()

    def begin(nodes: Mapping[int, str], copies: int = 1) -> Server:
        started.append(Server(nodes, copies))
        return started[-1]

    yield begin
    for server in started:
        for number in list(server.devices):
            server.lose(number)


def test_finished_blocks_come_to_the_next_node(start: Callable[..., Server]) -> None:
    server = start({0: "a", 1: "b", 2: "c"})
    server.back_up(5)
    assert server.step() == 0
    server.back_up(8)
    assert server.step() == 0
    assert [[server.devices[d].has(head) for head in range(3)] for d in range(3)] == [
        [4, 0, 4],
        [4, 4, 0],
        [0, 4, 4],
    ]
    assert [device.copies.sent_blocks for device in server.devices.values()] == [4, 4, 4]
    table = server.table()
    server.lose(1)
    server.meet(table)
    right, into = server.read(1, target=0)  # device 2 has it
    assert right == TOKENS
    assert torch.equal(into[:, :TOKENS], KV[1][:, :TOKENS])


def test_nobody_copies_what_nobody_asked_for(
    start: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    server = start({0: "a", 1: "b"}, copies=0)
    server.back_up()
    assert server.step() == 0
    assert server.devices[0].copies.ready() == []
    assert server.devices[0].has(1) == 0
    alone = start({0: "a", 1: "a"})
    assert "should be on 1 nodes besides its own: there are 0" in caplog.text
    alone.back_up()
    assert alone.step() == 0
    assert not alone.devices[0].backup.fresh


def test_copies_that_lag_are_absent_until_they_come(
    start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_copies, "_STEP_BYTES", GEOMETRY.block_bytes)
    server = start({0: "a", 1: "b"})
    server.back_up()
    assert server.step() == 2 * 3
    assert [server.devices[0].has(1), server.devices[1].has(0)] == [1, 1]
    while server.step():
        pass
    assert [server.devices[0].has(1), server.devices[1].has(0)] == [4, 4]


def test_blocks_of_requests_that_have_ended_are_not_copied(start: Callable[..., Server]) -> None:
    server = start({0: "a", 1: "b"})
    server.back_up()
    late = server.devices[0].backup
    late.drain()
    message = late.message([late.tagged(late.index.stripes_of("a")[0], 0, 0)[0]])
    for device in server.devices.values():
        device.backup.end("a")
    assert server.step() == 0
    assert server.devices[0].copies.sent_blocks == 0
    other = server.devices[1].backup
    assert other.add(message) == 0  # its stripe is free
    for device in server.devices.values():
        device.backup.index.begin("a", TOKENS)
        device.back_up(2)
    assert other.add(message) == 0  # or has another tag
    assert server.step() == 0
    server.meet(server.table())
    right, into = server.read(0, target=1, tokens=2)
    assert right == 2
    assert torch.equal(into[:, :2], KV[0][:, :2])


def test_a_node_that_is_back_gets_its_copies_again(start: Callable[..., Server]) -> None:
    server = start({0: "a", 1: "b", 2: "b"})
    server.back_up()
    server.step()
    table = server.table()
    for number in (1, 2):
        server.lose(number)
    server.devices[1] = Device(1, "b", memory(), 1)
    server.meet(table)
    assert server.devices[0].copies.waiting == 3 * 4  # also those of which node b had the originals
    assert server.step() == 0
    server.lose(0)
    server.meet(table)
    for head in range(3):
        right, into = server.read(head, target=1)
        assert right == TOKENS
        assert torch.equal(into[:, :TOKENS], KV[head][:, :TOKENS])


def test_a_head_is_read_from_several_nodes(start: Callable[..., Server]) -> None:
    """It was computed on one node first, then on another one."""
    server = start({0: "a", 1: "b", 2: "c"}, copies=0)
    server.back_up(4)
    for device in server.devices.values():  # head 0 goes to device 1
        moved = [(0, 0, KV[0])] if device.number == 1 else []
        device.backup.back_up("a", TOKENS, lambda moved=moved: moved)  # type: ignore[misc]
    server.meet(server.table())
    right, into = server.read(0, target=2)
    assert right == TOKENS
    assert torch.equal(into[:, :TOKENS], KV[0][:, :TOKENS])


@pytest.mark.parametrize("target", [0, 1])
def test_damage_is_noticed_by_who_reads(start: Callable[..., Server], target: int) -> None:
    """Of a copy on another node, and of one on its own."""
    server = start({0: "a", 1: "b", 2: "c"})
    server.back_up()
    server.step()
    backup = server.devices[0].backup  # it has copies of device 2
    block, _ = backup.tagged(backup.index.stripes_of("a")[2], 0, 2)
    stripes_at = len(server.devices[0].memory) - GEOMETRY.stripes * GEOMETRY.stripe_bytes
    server.devices[0].memory[stripes_at + block * GEOMETRY.block_bytes + 3] ^= 1
    table = server.table()
    server.lose(2)
    server.meet(table)
    right, into = server.read(2, target=target)
    assert right == 2 * BLOCK
    assert torch.equal(into[:, :right], KV[2][:, :right])
    assert server.devices[target].backup.damaged == 1
