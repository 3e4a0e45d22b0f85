"""Fingerprints of batches: they show that a replayed step trains on another batch before its weights
differ.

A fingerprint is the xxh3 hash of the contents of a batch on the host. Its cost is bounded: a tensor or
array of more than 64 KiB is sampled at fixed places (64 KiB in evenly spaced blocks, including the
first and last bytes), and at most 4096 values are read. A batch that differs in a few bytes of a large
tensor may have the same fingerprint; a batch with newly drawn random numbers has not. A tensor on a
device counts only with its shape and dtype, because reading it would make the training thread wait for
the device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

__all__ = ["Fingerprint", "fingerprint"]

_WHOLE_BYTES = 1 << 16
_BLOCKS = 16
_VALUES = 4096
_DEPTH = 12
_PLAIN = (type(None), bool, int, float, complex, np.generic)


@dataclasses.dataclass(frozen=True, slots=True)
class Fingerprint:
    """``value``: 63 bits. ``devices``: the devices of tensors whose contents it does not cover."""

    value: int
    devices: tuple[str, ...] = ()


def fingerprint(batch: Any) -> Fingerprint:
    """The fingerprint of a batch of tensors, arrays, numbers, strings, and mappings, sequences and objects
    of these; any other value counts with its type.
    """
    reader = _Reader()
    reader.read(batch, 0)
    return Fingerprint(reader.digest.intdigest() >> 1, tuple(sorted(reader.devices)))


class _Reader:
    def __init__(self) -> None:
        self.digest = xxhash.xxh3_64()
        self.devices: set[str] = set()
        self._left = _VALUES

    def read(self, value: Any, depth: int) -> None:
        self._left -= 1
        self.digest.update(f"{type(value).__qualname__};".encode())
        if self._left < 0 or depth > _DEPTH:
            return
        if isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, np.ndarray):
            self._array(value)
        elif isinstance(value, _PLAIN):
            self.digest.update(repr(value).encode())
        elif isinstance(value, str | bytes | bytearray):
            self._text(value.encode() if isinstance(value, str) else bytes(value))
        else:
            self._parts(value, depth)

    def _parts(self, value: Any, depth: int) -> None:
        if isinstance(value, Mapping):
            for key, part in value.items():
                self.read(key, depth + 1)
                self.read(part, depth + 1)
        elif isinstance(value, list | tuple):
            self.digest.update(len(value).to_bytes(8, "little"))
            for part in value[: max(self._left, 0)]:
                self.read(part, depth + 1)
        elif dataclasses.is_dataclass(value) or hasattr(value, "__dict__"):
            fields = getattr(value, "__dict__", None)
            if fields is None:
                fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            for name, part in fields.items():
                self.digest.update(name.encode())
                self.read(part, depth + 1)

    def _text(self, text: bytes) -> None:
        self.digest.update(len(text).to_bytes(8, "little"))
        self.digest.update(text if len(text) <= _WHOLE_BYTES else text[: _WHOLE_BYTES // 2])
        if len(text) > _WHOLE_BYTES:
            self.digest.update(text[-_WHOLE_BYTES // 2 :])

    def _tensor(self, tensor: Tensor) -> None:
        self.digest.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        if tensor.device.type != "cpu":
            self.devices.add(str(tensor.device))
            return
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            return
        plain = tensor.detach().as_subclass(Tensor).resolve_conj().resolve_neg()
        if not plain.is_contiguous():
            plain = _thinned(plain, tensor.element_size()).contiguous()
        if plain.numel():
            self._bytes(plain.reshape(-1).view(torch.uint8).numpy())

    def _array(self, array: np.ndarray[Any, Any]) -> None:
        self.digest.update(f"{array.dtype.str}{list(array.shape)}".encode())
        if array.dtype.hasobject:
            return
        plain = array if array.flags.c_contiguous else _thinned(array, array.itemsize)
        if plain.size:
            self._bytes(np.ascontiguousarray(plain).reshape(-1).view(np.uint8))

    def _bytes(self, raw: np.ndarray[Any, Any]) -> None:
        """Hash all bytes, or evenly spaced blocks."""
        if raw.nbytes <= _WHOLE_BYTES:
            self.digest.update(raw.data)
            return
        size = _WHOLE_BYTES // _BLOCKS
        last = raw.nbytes - size
        for at in range(_BLOCKS):
            start = last * at // (_BLOCKS - 1)
            self.digest.update(raw[start : start + size].data)


def _thinned(value: Any, itemsize: int) -> Any:
    """A tensor or array that is not contiguous: all of it, or evenly spaced elements, so that few are
    copied.
    """
    most, steps = _WHOLE_BYTES // itemsize, [1] * len(value.shape)
    while math.prod(-(-n // s) for n, s in zip(value.shape, steps, strict=True)) > most:
        widest = max(range(len(steps)), key=lambda d: -(-value.shape[d] // steps[d]))
        steps[widest] *= 2
    return value[tuple(slice(None, None, s) for s in steps)]
