"""Many copies by one call of the driver: ``cuMemcpyBatchAsync`` (CUDA 12.8 and newer).

A call of torch for each tensor costs the host 9 to 14 us, a call for a chunk of them and the kernel behind it
some 30 us, each time with Python's lock given up and taken again. The driver takes addresses and lengths of any
number of copies at once, and ``ctypes`` leaves Python's lock to other threads meanwhile.

The order of the source's accesses is always *stream*: with *any* the driver might read a tensor after training
has gone on to change it, and a snapshot would be torn.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

__all__ = ["CopyTable", "DriverCopies", "driver_copies"]

logger = logging.getLogger(__name__)

_LIBRARY = "libcuda.so.1"
_FUNCTION = "cuMemcpyBatchAsync"

Addresses = npt.NDArray[np.uint64]


class _Location(ctypes.Structure):
    """``CUmemLocation``: a hint that counts for managed memory only."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """``CUmemcpyAttributes``."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


_IN_STREAM_ORDER = _Attributes(source_order=1)


@dataclass(frozen=True, slots=True)
class CopyTable:
    """Copies between tensors and places of an image, as the driver takes them.

    Args:
        tensors: addresses on the device, ``uint64``.
        places: offsets in the image, in bytes, ``uint64``.
        sizes: in bytes, ``uint64``.
    """

    tensors: Addresses
    places: Addresses
    sizes: Addresses

    @classmethod
    def of(cls, tensors: Sequence[Tensor], places: Sequence[int]) -> CopyTable:
        """Of dense tensors; each goes to one place."""
        return cls(
            np.array([t.data_ptr() for t in tensors], np.uint64),
            np.array(places, np.uint64),
            np.array([t.numel() * t.element_size() for t in tensors], np.uint64),
        )

    def __len__(self) -> int:
        return len(self.sizes)


class DriverCopies:
    """The driver's function.

    Args:
        function: ``cuMemcpyBatchAsync`` of CUDA 12.8: target and source addresses, sizes, their number,
            attributes and the first copy of each, their number, where it leaves the number of the copy that
            fails, the stream.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._first = ctypes.c_size_t(0)

    def to_host(self, table: CopyTable, part: slice, image: int, stream: int) -> None:
        """Copy ``part`` of the table to the image at the address ``image``, on a stream that is not the
        default one.

        Raises:
            RuntimeError: the driver refuses.
        """
        self._copy(image + table.places[part], table.tensors[part], table.sizes[part], stream)

    def to_device(self, table: CopyTable, image: int, stream: int) -> None:
        """Copy all of the image at the address ``image`` into the tensors.

        Raises:
            RuntimeError: the driver refuses.
        """
        self._copy(table.tensors, image + table.places, table.sizes, stream)

    def _copy(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> None:
        failed = ctypes.c_size_t(0)
        code = self._function(
            ctypes.c_void_p(targets.ctypes.data),
            ctypes.c_void_p(sources.ctypes.data),
            ctypes.c_void_p(sizes.ctypes.data),
            ctypes.c_size_t(len(sizes)),
            ctypes.byref(_IN_STREAM_ORDER),
            ctypes.byref(self._first),
            ctypes.c_size_t(1),
            ctypes.byref(failed),
            ctypes.c_void_p(stream),
        )
        if code != 0:
            raise RuntimeError(
                f"{_FUNCTION} failed with code {code} for copy {failed.value} of {len(sizes)}: "
                "an earlier error of the device, or memory that is not there any more"
            )


@functools.cache
def driver_copies() -> DriverCopies | None:
    """The function of this machine's driver; None if it has none (it is older than CUDA 12.8)."""
    try:
        function = getattr(ctypes.CDLL(_LIBRARY), _FUNCTION)
    except (OSError, AttributeError) as error:
        logger.info("tensors are copied by calls of torch, which take the host longer: %s", error)
        return None
    function.restype = ctypes.c_int
    return DriverCopies(function)
