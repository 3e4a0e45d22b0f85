"""A fingerprint of a batch: whether a repeated step trains on the same one is then seen before its
weights differ.

xxh3 over everything that the batch is made of, on the host. The cost is bounded: a tensor or array
of more than 64 KiB is sampled, always at the same places (64 KiB in evenly spaced pieces, the first
bytes and the last included), and no more than 4096 values are looked at. So a batch that differs in
few bytes of a large tensor may have the same fingerprint; one that was drawn anew has not. A tensor
on a device counts with its shape and dtype only: to read it, the training thread would have to wait
for the device.
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
_PIECES = 16
_VALUES = 4096
_DEPTH = 12
_PLAIN = (type(None), bool, int, float, complex, np.generic)


@dataclasses.dataclass(frozen=True, slots=True)
class Fingerprint:
    """``value``: 63 bits. ``devices``: where tensors lie whose content it does not cover."""

    value: int
    devices: tuple[str, ...] = ()


def fingerprint(batch: Any) -> Fingerprint:
    """Of tensors, arrays, numbers, strings, and mappings, sequences and objects of these; anything
    else counts with its type.
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
        """All of them, or evenly spaced pieces."""
        if raw.nbytes <= _WHOLE_BYTES:
            self.digest.update(raw.data)
            return
        size = _WHOLE_BYTES // _PIECES
        last = raw.nbytes - size
        for at in range(_PIECES):
            start = last * at // (_PIECES - 1)
            self.digest.update(raw[start : start + size].data)


def _thinned(value: Any, itemsize: int) -> Any:
    """Of a tensor or array that does not lie in one piece: all, or evenly spaced elements, so that
    few are copied.
    """
    most, steps = _WHOLE_BYTES // itemsize, [1] * len(value.shape)
    while math.prod(-(-n // s) for n, s in zip(value.shape, steps, strict=True)) > most:
        widest = max(range(len(steps)), key=lambda d: -(-value.shape[d] // steps[d]))
        steps[widest] *= 2
    return value[tuple(slice(None, None, s) for s in steps)]
