"""Devices exchange what they have, as threads and as processes' groups; a loss ends every wait."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest
import torch

from ckptd.client.rerouting.epoch_group import EpochLine, meet
from ckptd.client.serving.device_group import (
    DeviceGroup,
    GlooDevices,
    ThreadDevices,
    gather_bytes,
    gather_numbers,
)
from ckptd.restart_line import HostEnd, JobStart
from tests.ckptd.restart_ends import inherited_end
from tests.ports import free_port

DEVICES = (1, 2, 5)


def exchange(seat: Callable[[int], DeviceGroup]) -> dict[int, object]:
    found: dict[int, object] = {}

    def work(device: int) -> None:
        group, got = seat(device), torch.zeros(2)
        rows = group.gather(torch.full((2, 3), float(device)))
        if device == 5:
            group.send(torch.full((2,), 5.0), 1, 0)
        elif device == 1:
            group.receive(got, 5, 0)
        found[device] = (
            group.devices,
            [float(row[1, 2]) for row in rows],
            gather_numbers(group, [device, 10 * device]),
            gather_bytes(group, b"x" * (device - 1)),
            gather_bytes(group, b""),
            got.tolist(),
        )

    threads = [threading.Thread(target=work, args=(device,)) for device in DEVICES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def expected(device: int) -> object:
    got = [5.0, 5.0] if device == 1 else [0.0, 0.0]
    numbers = [[1, 10], [2, 20], [5, 50]]
    return (DEVICES, [1.0, 2.0, 5.0], numbers, [b"", b"x", b"xxxx"], [b""] * 3, got)


def test_threads() -> None:
    assert exchange(ThreadDevices(DEVICES).seat) == {device: expected(device) for device in DEVICES}


def test_processes_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    for name, text in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{free_port()}",
        "GLOO_SOCKET_IFNAME": "lo",
    }.items():
        monkeypatch.setenv(name, text)
    host = HostEnd.make()
    with inherited_end(host, monkeypatch) as end:
        line = EpochLine(end, 0)
        host.receive()
        assert host.offer(os.getpid(), JobStart("start"))
        found = exchange(lambda device: GlooDevices(meet(line, device, DEVICES, 60.0)))
    host.close()
    assert found == {device: expected(device) for device in DEVICES}


def test_a_loss_ends_every_wait() -> None:
    place, errors = ThreadDevices([0, 1, 2]), list[str]()

    def gather() -> None:
        try:
            place.seat(0).gather(torch.zeros(1))
        except ConnectionResetError as error:
            errors.append(f"{error}")

    def receive() -> None:
        try:
            place.seat(1).receive(torch.zeros(1), 2, 0)
        except ConnectionResetError as error:
            errors.append(f"{error}")

    threads = [threading.Thread(target=each) for each in (gather, receive)]
    for thread in threads:
        thread.start()
    place.lose()
    for thread in threads:
        thread.join()
    assert errors == ["a device is lost"] * 2
