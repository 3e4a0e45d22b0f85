"""A server whose devices are threads: steps, losses and returns at chosen moments."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ckptd.client.serving.device_group import DeviceGroup, ThreadDevices
from ckptd.client.serving.generation import GenerationRequest
from ckptd.client.serving.kv_backup import KvBackup, backup_bytes, format_backup
from ckptd.client.serving.serving_device import EngineOptions, ServingDevice, SettledEpoch
from ckptd.client.serving.weight_files import DeviceWeights, ModelFiles
from ckptd.core.serving.kv_backup_index import BackupGeometry

__all__ = ["DyingGroup", "ThreadedServer"]


class DyingGroup:
    """A place in a group whose device dies at its n-th word from now on.

    Args:
        words: gathers and sends until then; None: it lives.
    """

    def __init__(self, place: ThreadDevices, device: int, words: int | None) -> None:
        self._place, self._seat, self._left = place, place.seat(device), words
        self.devices = place.devices

    def _speak(self) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                self._place.lose()
                raise SystemExit

    def gather(self, own: Tensor) -> list[Tensor]:
        self._speak()
        return self._seat.gather(own)

    def send(self, tensor: Tensor, device: int, tag: int) -> None:
        self._speak()
        self._seat.send(tensor, device, tag)

    def receive(self, tensor: Tensor, device: int, tag: int) -> None:
        self._speak()
        self._seat.receive(tensor, device, tag)


class ThreadedServer:
    """Devices of one process.

    Args:
        nodes: the node of each device; all are on one if it is not given.
    Attributes:
        answers: tokens of requests that have ended, as each device knows them.
        memories: of the backup, by node.
        settled: of the last epoch, by device.
    """

    def __init__(
        self,
        folder: Path,
        devices: Iterable[int],
        *,
        stripes: int = 0,
        nodes: Mapping[int, str] | None = None,
        block_tokens: int = 4,
        piece_tokens: int = 8,
        column_block: int = 0,
        **options: Any,
    ) -> None:
        self._folder, self._column_block = folder, column_block
        self._options = EngineOptions(block_tokens=block_tokens, piece_tokens=piece_tokens, **options)
        self.files = self._open()
        self._nodes, self._geometry = nodes or {}, None
        self.memories: dict[str, memoryview] = {}
        if stripes:
            model = self.files.model
            sizes = (model.layers, model.kv_heads, model.kv_token_bytes, block_tokens)
            one = model.layers * model.kv_heads * model.kv_token_bytes * block_tokens
            self._geometry = BackupGeometry(self.files.identity, *sizes, quota_bytes=stripes * one)
        self.devices = {device: self._device(device) for device in devices}
        self.settled: dict[int, SettledEpoch] = {}
        self._epoch = 0

    def _open(self) -> ModelFiles:
        return ModelFiles(self._folder, column_block=self._column_block)

    def _device(self, device: int) -> ServingDevice:
        files, backup = self._open(), None
        if self._geometry is not None:
            backup = self._backup(self._nodes.get(device, ""), self._geometry)
        return ServingDevice(device, DeviceWeights(files), self._options, backup)

    def _backup(self, node: str, geometry: BackupGeometry) -> KvBackup:
        if node not in self.memories:
            self.memories[node] = memoryview(bytearray(backup_bytes(geometry)))
            format_backup(self.memories[node], geometry)
        return KvBackup(self.memories[node], self.files.dtype, self.files.model.head_dim, node)

    def come_back(self, device: int) -> None:
        """Start a device anew, with empty memory."""
        assert device not in self.devices
        self.devices[device] = self._device(device)

    def lose(self, *devices: int) -> None:
        """Between two steps."""
        for device in devices:
            backup = self.devices.pop(device).backup
            if backup is not None:
                backup.close()

    def lose_node(self, node: str) -> None:
        """With its devices and its memory, between two steps."""
        self.lose(*(device for device in list(self.devices) if self._nodes.get(device, "") == node))
        del self.memories[node]

    def lose_memory(self, node: str) -> None:
        """Its devices go on with an empty one."""
        assert self._geometry is not None
        del self.memories[node]
        for number, device in self.devices.items():
            if self._nodes.get(number, "") == node:
                device.attach(self._backup(node, self._geometry))

    def drain(self) -> None:
        """Wait until all blocks are in the memory of the nodes that computed them."""
        for device in self.devices.values():
            if device.backup is not None:
                device.backup.drain()

    @property
    def answers(self) -> dict[str, tuple[int, ...]]:
        found = [dict(device.answers) for device in self.devices.values()]
        newest = max(found, key=len)
        assert all(each.items() <= newest.items() for each in found)
        return newest

    def serve(
        self,
        requests: Collection[GenerationRequest] = (),
        *,
        steps: int | None = None,
        dies: tuple[int, int] | None = None,
    ) -> None:
        """Settle, and serve until all requests have ended.

        Args:
            steps: or for so many steps.
            dies: a device, and after how many of its words; the others end with what they have then.
        """
        self._epoch += 1
        place = ThreadDevices(self.devices)
        errors: list[BaseException] = []

        def work(device: int) -> None:
            victim, words = dies or (-1, 0)
            group = DyingGroup(place, device, words if device == victim else None)
            try:
                self._work(self.devices[device], group, list(requests), steps)
            except ConnectionResetError:
                if dies is None:
                    errors.append(RuntimeError("a device was lost that should live"))
            except BaseException as error:  # noqa: BLE001 - shown by the test
                place.lose()
                if not isinstance(error, SystemExit):
                    errors.append(error)

        threads = [threading.Thread(target=work, args=(device,)) for device in self.devices]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        if dies is not None:
            self.lose(dies[0])

    def _work(
        self,
        device: ServingDevice,
        group: DeviceGroup,
        requests: list[GenerationRequest],
        steps: int | None,
    ) -> None:
        self.settled[device.device] = device.settle(group, self._epoch)
        first = group.devices[0] == device.device
        count = 0
        while count != steps:
            known = {*(device.state.requests if device.state else ()), *device.answers}
            inbox = [each for each in requests if each.id not in known] if first else []
            device.step(group, inbox, word=self._epoch)
            count += 1
            assert device.state is not None
            if steps is None and not device.state.requests:
                return

    def close(self) -> None:
        for device in self.devices.values():
            if device.backup is not None:
                device.backup.close()
