"""The ledger of a loop's batches: the positions of its loaders, and a fingerprint per iteration.

Both are in every snapshot. If a replayed iteration gets another batch than before the failure, the error
names the batch, not only the weights that differ after it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from torch import Tensor

from ckptd.client import values
from ckptd.client.log_lines import get_logger

logger = get_logger(__name__)

# Its name among the objects of `state=`.
BATCHES = "ckptd.batches"
# Number of iterations with a fingerprint: the longest usual suffix; about 20 bytes each.
_KEPT = 64
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
    """The xxh3 hash of tensors, arrays, numbers, strings, and mappings, sequences and objects of these.

    Any other value counts with its type. The cost is bounded: a tensor or array of more than 64 KiB is
    sampled at fixed places (64 KiB in evenly spaced blocks, including the first and last bytes), and at
    most 4096 values are read. A batch that differs in a few bytes of a large tensor may have the same
    fingerprint; a batch with newly drawn random numbers has not. A tensor on a device counts only with its
    shape and dtype, because reading it would make the training thread wait for the device.
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
    """All of a non-contiguous tensor or array, or evenly spaced elements, so that few are copied."""
    most, steps = _WHOLE_BYTES // itemsize, [1] * len(value.shape)
    while math.prod(-(-n // s) for n, s in zip(value.shape, steps, strict=True)) > most:
        widest = max(range(len(steps)), key=lambda d: -(-value.shape[d] // steps[d]))
        steps[widest] *= 2
    return value[tuple(slice(None, None, s) for s in steps)]


class Positioned(Protocol):
    """An iterator over data that can be moved to a recorded position."""

    def position(self) -> dict[str, Any] | None: ...

    def go_to(self, position: dict[str, Any] | None) -> None: ...


class BatchLedger:
    """The ledger of one checkpointer; an object for ``state=``."""

    def __init__(self) -> None:
        self._sources: list[Positioned] = []
        self._recorded: list[dict[str, Any] | None] = []
        self._seen: dict[int, list[int]] = {}
        self._step: int | None = None
        self._warned_of_device = False

    @property
    def begun(self) -> bool:
        """True once the first step has begun; batches fetched earlier belong to no step."""
        return self._step is not None

    def begin(self, step: int) -> None:
        """Mark the start of step ``step``."""
        self._step = step
        self._seen.pop(step, None)  # the loop left this step and entered it again
        while len(self._seen) >= _KEPT:
            del self._seen[min(self._seen)]

    def note(self, batch: Any) -> None:
        """Record a batch of the running step; call it before the batch is moved to a device."""
        if self._step is None:
            return
        found = fingerprint(batch)
        if found.devices and not self._warned_of_device:
            self._warned_of_device = True
            logger.info(
                "ckptd receives batches on %s and does not fingerprint their contents, because "
                "reading them would wait for the device",
                ", ".join(found.devices),
            )
        self._seen.setdefault(self._step, []).append(found.value)

    def add(self, source: Positioned) -> dict[str, Any] | None:
        """Add a source of batches; returns its recorded position. The order of calls identifies sources."""
        at = len(self._sources)
        self._sources.append(source)
        return self._recorded[at] if at < len(self._recorded) else None

    def state_dict(self) -> dict[str, Any]:
        positions = [source.position() for source in self._sources]
        # Until `batches` is called again, the recorded state is the current one.
        positions += self._recorded[len(positions) :]
        return {
            "positions": positions,
            "fingerprints": {step: list(found) for step, found in self._seen.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._recorded = list(state["positions"])
        self._seen = {step: list(found) for step, found in state["fingerprints"].items()}
        for at, source in enumerate(self._sources):
            source.go_to(self._recorded[at] if at < len(self._recorded) else None)

    def differences(self, recorded: dict[str, Any]) -> list[str]:
        """The differences from the recorded state, in words.

        Only the first batch that differs is named, because later differences may follow from it.
        """
        before: dict[int, list[int]] = recorded["fingerprints"]
        for step in sorted(before.keys() & self._seen.keys()):
            if before[step] != self._seen[step]:
                return [_other_batch(step, len(before[step]), len(self._seen[step]))]
        if values.equal(self.state_dict(), recorded):
            return []
        return ["the position in the data (was a batch fetched outside the body of the loop?)"]


def _other_batch(step: int, before: int, now: int) -> str:
    if before != now:
        return (
            f"the batch of iteration {step} differs from the one before the crash: it took {before} fetches "
            f"then and {now} now (check the number of accumulated micro-batches, and that every batch is "
            "fetched in the body of the loop)"
        )
    return (
        f"the batch of iteration {step} differs from the one before the crash. Usual causes: samples use a "
        "random generator that ckptd does not find (make it an attribute of the dataset, or use the global "
        "one of torch, numpy or Python); the dataset, batch size or number of workers has changed; files "
        "are listed in another order (sort them)"
    )
