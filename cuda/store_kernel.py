"""Many copies to the host by one kernel of few blocks, which stores into registered memory itself.

The copy engine of a device stays with a stream as long as that has copies ready, and the training's own small
copies (the size of a `nonzero`, an `item`) wait; so copies are cut into chunks, each with a kernel behind it
and calls of the host: 26 ms for a GB in chunks of 4 MiB, measured on an H200. A kernel that stores past the
copy engine needs one launch for a whole snapshot, and small copies wait less beside it. Its stores
wait for the link most of the time, so a few blocks are enough, and other kernels run beside them.

The kernel is in `csrc/store_kernel.cu`, and as the driver compiles it in `csrc/store_kernel.ptx` (compute
capability 7.0 and newer; `make kernel` makes it): no compiler is needed where it runs.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.resources
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ckptd.cuda.driver import cuda_driver

logger = logging.getLogger(__name__)

# CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
_HOST_POINTERS = 91
_SOURCE, _NAME = "csrc/store_kernel.ptx", b"ckptd_store"
# On an H200, 4, 8 and 16 blocks all reach 0.93 of the link, and a small copy of another stream waits the less
# the fewer there are (bench/results/one_gpu_h200_202611.md).
_BLOCKS, _THREADS = 4, 512
_TILE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Tiles:
    """What the kernel takes: ``int64`` ``[count, 3]`` on the device: address, place in the image, bytes. The
    tensors must live as long.
    """

    rows: Tensor

    @classmethod
    def of(cls, tensors: Sequence[Tensor], places: Sequence[int], device: torch.device) -> Tiles:
        """Of dense tensors, each of which goes to one place: bytes from the begin of the image."""
        sizes = np.array([t.numel() * t.element_size() for t in tensors], np.int64)
        counts = -(-sizes // _TILE_BYTES)
        total = int(counts.sum())
        owner = np.repeat(np.arange(len(tensors)), counts)
        begin = (np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)) * _TILE_BYTES
        rows = np.empty((total, 3), np.int64)
        rows[:, 0] = np.array([t.data_ptr() for t in tensors], np.int64)[owner] + begin
        rows[:, 1] = np.array(places, np.int64)[owner] + begin
        rows[:, 2] = np.minimum(sizes[owner] - begin, _TILE_BYTES)
        return cls(torch.from_numpy(rows).to(device))

    def __len__(self) -> int:
        return len(self.rows)


class StoreKernel:
    """The kernel in the context of one device.

    Args:
        launch: ``cuLaunchKernel``.
        function: the kernel.
    """

    def __init__(self, launch: Any, function: ctypes.c_void_p) -> None:
        self._launch, self._function = launch, function

    def store(self, tiles: Tiles, image: int, stream: int, *, blocks: int = _BLOCKS) -> None:
        """Copy the tiles to the image at the address ``image``, which is registered memory.

        Raises:
            RuntimeError: the driver refuses.
        """
        if not len(tiles):
            return
        values = (
            ctypes.c_uint64(tiles.rows.data_ptr()),
            ctypes.c_uint32(len(tiles)),
            ctypes.c_uint64(image),
        )
        pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in values))
        one, none = ctypes.c_uint(1), ctypes.c_void_p(None)
        code = self._launch(
            self._function,
            *(ctypes.c_uint(min(blocks, len(tiles))), one, one),
            *(ctypes.c_uint(_THREADS), one, one),
            ctypes.c_uint(0),
            ctypes.c_void_p(stream),
            pointers,
            none,
        )
        if code != 0:
            raise RuntimeError(f"the kernel that copies to the host could not be launched: code {code}")


@functools.cache
def store_kernel(device: int) -> StoreKernel | None:
    """The kernel for the device of this number, whose context is current; None if the driver refuses it, or
    registered memory of the host has another address on the device.
    """
    driver = cuda_driver()
    if driver is None:
        return None
    text = importlib.resources.files("ckptd.cuda").joinpath(_SOURCE).read_bytes() + b"\0"
    usable = ctypes.c_int(0)
    code = driver.cuDeviceGetAttribute(ctypes.byref(usable), _HOST_POINTERS, device)
    if code != 0 or not usable.value:
        logger.info("device %d: no kernel copies to the host: it cannot use the host's addresses", device)
        return None
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    code = driver.cuModuleLoadData(ctypes.byref(module), text)
    code = code or driver.cuModuleGetFunction(ctypes.byref(function), module, _NAME)
    if code != 0:
        logger.info(
            "device %d: no kernel copies to the host: the driver refuses it with code %d", device, code
        )
        return None
    return StoreKernel(driver.cuLaunchKernel, function)
