"""What devices of a server say to each other, as far as the engine needs it: gather, send, receive.

`GlooDevices` are processes of one epoch (`ckptd.client.rerouting.epoch_group`). `ThreadDevices` are threads
of one process, for trying a layout out without processes, and for tests: the engine is the same.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ckptd.client.rerouting.epoch_group import EpochGroup


class DeviceGroup(Protocol):
    """One device's place among those that are there.

    Whatever waits raises RuntimeError, OSError or `Interrupted` if a device is lost meanwhile.
    """

    @property
    def devices(self) -> tuple[int, ...]:
        """Numbers of those that are there, ascending."""
        ...

    def gather(self, own: Tensor) -> Sequence[Tensor]:
        """What all devices have, in their order; all of one shape and type, on the CPU."""
        ...

    def send(self, tensor: Tensor, device: int, tag: int) -> None:
        """Send a tensor, and wait until it has left."""
        ...

    def receive(self, tensor: Tensor, device: int, tag: int) -> None:
        """Wait for a tensor."""
        ...


class GlooDevices:
    """Processes that have met in an epoch."""

    def __init__(self, group: EpochGroup) -> None:
        self._group = group
        self.devices = tuple(sorted(group.numbers))

    def gather(self, own: Tensor) -> list[Tensor]:
        rows = [torch.empty_like(own) for _ in self.devices]
        self._group.finish(self._group.group.allgather([rows], [own]))
        return rows

    def send(self, tensor: Tensor, device: int, tag: int) -> None:
        self._group.send(tensor, device, tag)

    def receive(self, tensor: Tensor, device: int, tag: int) -> None:
        self._group.receive(tensor, device, tag)


class ThreadDevices:
    """The meeting place of threads, each a device; `seat` is the place of one of them.

    Args:
        devices: their numbers.
    """

    def __init__(self, devices: Iterable[int]) -> None:
        self.devices = tuple(sorted(devices))
        self._rows: dict[int, Tensor] = {}
        self._barrier = threading.Barrier(len(self.devices))
        self._sent: dict[tuple[int, int, int], queue.SimpleQueue[Tensor | None]] = {
            (a, b, 0): queue.SimpleQueue() for a in self.devices for b in self.devices
        }

    def seat(self, device: int) -> _Seat:
        return _Seat(self, device)

    def lose(self) -> None:
        """A device is lost: all that wait for it leave with an error, as from a connection that is cut."""
        self._barrier.abort()
        for sent in self._sent.values():
            sent.put(None)


class _Seat:
    def __init__(self, place: ThreadDevices, device: int) -> None:
        self._place, self._device = place, device
        self.devices = place.devices

    def gather(self, own: Tensor) -> list[Tensor]:
        self._place._rows[self._device] = own.clone()
        self._await()
        rows = [self._place._rows[each] for each in self.devices]
        self._await()
        return rows

    def _await(self) -> None:
        try:
            self._place._barrier.wait()
        except threading.BrokenBarrierError:
            raise ConnectionResetError("a device is lost") from None

    def send(self, tensor: Tensor, device: int, tag: int) -> None:
        self._place._sent[self._device, device, tag].put(tensor.clone())

    def receive(self, tensor: Tensor, device: int, tag: int) -> None:
        found = self._place._sent[device, self._device, tag].get()
        if found is None:
            raise ConnectionResetError("a device is lost")
        tensor.copy_(found)


def gather_numbers(group: DeviceGroup, own: Sequence[int]) -> list[list[int]]:
    """Some numbers of each device, in their order; all have equally many."""
    return [row.tolist() for row in group.gather(torch.tensor(own, dtype=torch.int64))]


def gather_bytes(group: DeviceGroup, own: bytes) -> list[bytes]:
    """Some bytes of each device, in their order."""
    sizes = [size for (size,) in gather_numbers(group, [len(own)])]
    if not max(sizes):
        return [b""] * len(sizes)
    mine = torch.frombuffer(bytearray(own.ljust(max(sizes), b"\0")), dtype=torch.uint8)
    return [row[:size].numpy().tobytes() for row, size in zip(group.gather(mine), sizes, strict=True)]
