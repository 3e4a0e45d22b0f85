"""The weights of a served model, read by ranges from its safetensors files, unit by unit.

A folder is what `save_pretrained` writes: ``config.json`` and files of tensors. Nothing is read but what a
device needs (`ckptd.core.serving.served_model.byte_runs`): each unit's part of a tensor becomes a tensor of
its own, so that a unit is computed with the same shapes and addresses aligned alike on every device.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import weakref
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from ckptd.client.log_lines import get_logger
from ckptd.core.serving.loss_plan import WeightFetch
from ckptd.core.serving.served_model import ByteRuns, ServedModel, UnitKind, byte_runs, model_of_config
from ckptd.core.serving.server_layout import ServerLayout
from ckptd.cuda.quiet_threads import start_quiet

logger = get_logger(__name__)

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_LENGTH = struct.Struct("<Q")
_HEADER_MAX = 100 << 20  # as the format's own library
_SAMPLES, _SAMPLE_BYTES = 64, 4096
_MLP_BLOCKS = 16

UnitWeights = tuple[Tensor, ...]
"""Of a unit, in the order of `ServedModel.split_tensors`; see `UNIT_TENSORS` of the decoder."""


class _File(NamedTuple):
    path: Path
    fd: int
    size: int
    data_at: int


class ModelFiles:
    """The files of a model.

    Args:
        folder: with ``config.json`` and ``*.safetensors``.
        column_block: how many columns of a dense MLP are one unit; 0: so many that there are 16 or
            more.
    Attributes:
        config: as it was read.
        model: its sizes.
        dtype: of all weights, and of computing.
        read_bytes: how much has been read so far.
    Raises:
        ValueError: the model cannot be split, is not known, or a file is none of its kind.
        OSError: a file cannot be read.
    """

    def __init__(self, folder: Path, *, column_block: int = 0) -> None:
        self.folder = folder
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self._files: dict[str, _File] = {}
        self._header: dict[str, Mapping[str, Any]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            self._open(path)
        if not self._header:
            raise ValueError(f"{folder} has no *.safetensors: save the model with save_pretrained first")
        kinds = {str(each["dtype"]) for each in self._header.values()}
        if len(kinds) > 1 or not kinds <= _DTYPES.keys():
            raise ValueError(f"weights of {sorted(kinds)}: all must be of one kind, {', '.join(_DTYPES)}")
        self.dtype = _DTYPES[kinds.pop()]
        columns = int(self.config.get("intermediate_size") or 0)
        self.model: ServedModel = model_of_config(
            self.config,
            element_bytes=self.dtype.itemsize,
            column_block=column_block or _column_block(columns),
        )
        self.read_bytes = 0
        self._counting = threading.Lock()

    def _open(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, fd)
        size = os.fstat(fd).st_size
        length = _LENGTH.unpack(os.pread(fd, _LENGTH.size, 0))[0] if size >= _LENGTH.size else 0
        if not 0 < length <= min(_HEADER_MAX, size - _LENGTH.size):
            raise ValueError(f"{path.name} is no safetensors file: its header has {length} bytes")
        file = _File(path, fd, size, _LENGTH.size + length)
        header = json.loads(os.pread(fd, length, _LENGTH.size))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if entry["data_offsets"][1] > size - file.data_at:
                raise ValueError(f"{path.name} is cut: {name} ends behind its end")
            self._files[name] = file
        self._header.update(header)

    @cached_property
    def identity(self) -> str:
        """Tells this model's weights from those of others: of all names, shapes and sizes, and of samples.

        Not a digest of all bytes, which would take seconds for each device at each start.
        """
        digest = xxhash.xxh3_128(json.dumps(self._header, sort_keys=True).encode())
        for file in dict.fromkeys(self._files[name] for name in sorted(self._files)):
            room = max(0, file.size - _SAMPLE_BYTES)
            for number in range(_SAMPLES + 1):
                digest.update(os.pread(file.fd, _SAMPLE_BYTES, room * number // _SAMPLES))
        return digest.hexdigest()

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return name in self._header

    def tensor(self, name: str) -> Tensor:
        """A whole tensor.

        Raises:
            ValueError: there is none.
        """
        if name not in self._header:
            raise ValueError(f"{self.folder} has no {name}: it is of another model, or a part is missing")
        begin, end = self._header[name]["data_offsets"]
        shape = self._header[name]["shape"]
        return self._read(ByteRuns(name, begin, end - begin, end - begin, 1)).view(self.dtype).view(shape)

    def unit(self, kind: UnitKind, layer: int, unit: int) -> UnitWeights:
        """The weights of one unit.

        Raises:
            ValueError: the layer has no such unit, or the files are of another model.
        """
        found = []
        for runs in byte_runs(self.model, kind, layer, [unit], self._header):
            flat = self._read(runs).view(self.dtype)
            row = len(self._header[runs.name]["shape"]) > 1 and runs.count == 1
            width = self._header[runs.name]["shape"][-1] if row else runs.size // self.dtype.itemsize
            found.append(flat if len(self._header[runs.name]["shape"]) == 1 else flat.view(-1, width))
        return tuple(found)

    def _read(self, runs: ByteRuns) -> Tensor:
        # Not mapped: a file that somebody cuts meanwhile is an error here, and not the end of the process.
        file, read = self._files[runs.name], torch.empty(runs.total, dtype=torch.uint8)
        into, done = memoryview(read.numpy().data), 0
        for offset, size in runs:
            at, end = file.data_at + offset - done, done + size
            while done < end:  # at most 2 GiB come at once
                count = os.preadv(file.fd, [into[done:end]], at + done)
                if not count:
                    raise ValueError(f"{file.path} was cut: {runs.name} is not whole any more")
                done += count
        with self._counting:
            self.read_bytes += runs.total
        return read

    def load_ahead(self) -> None:
        """Have the kernel read all files, so that ranges of them are in memory when they are needed."""
        for file in dict.fromkeys(self._files.values()):
            os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_WILLNEED)


def _column_block(columns: int) -> int:
    """The largest that divides the columns into 16 units or more."""
    return next((columns // n for n in range(_MLP_BLOCKS, columns + 1) if columns % n == 0), 1)


class DeviceWeights:
    """The weights that one device has: each unit is read when it is asked for first, or before, in a thread.

    Args:
        device: to which they go.
    """

    def __init__(self, files: ModelFiles, device: torch.device | str = "cpu") -> None:
        self.files, self.device = files, torch.device(device)
        self._whole: dict[str, Tensor] = {}
        self._units: dict[tuple[UnitKind, int, int], UnitWeights] = {}
        self._changing = threading.Lock()  # of what is there; reading is done outside

    def whole(self, name: str) -> Tensor:
        """A tensor that every device has."""
        if name not in self._whole:
            self._whole[name] = self.files.tensor(name).to(self.device)
        return self._whole[name]

    def unit(self, kind: UnitKind, layer: int, unit: int) -> UnitWeights:
        """Of a unit; from the files if this device does not have them yet."""
        at = (kind, layer, unit)
        found = self._units.get(at)
        if found is None:
            read = tuple(each.to(self.device) for each in self.files.unit(*at))
            with self._changing:
                found = self._units.setdefault(at, read)
        return found

    def begin_reading(self, fetches: Iterable[WeightFetch]) -> None:
        """Read these in a thread, in their order: layers that a token passes first come first."""
        wanted = [(each.kind, each.layer, unit) for each in fetches for unit in each.units]

        def read() -> None:
            try:
                for at in wanted:
                    self.unit(*at)
            except (OSError, ValueError) as error:  # whoever needs the unit reads it again, and raises
                logger.error("weights cannot be read ahead: %s", error)

        if wanted:
            start_quiet(read, name="ckptd-weights")

    def keep(self, layout: ServerLayout, device: int) -> None:
        """Give up those that a device of this layout does not have."""
        needed = {
            (kind, layer, unit)
            for kind, placed in layout.placements.items()
            for row, layer in enumerate(layout.model.layers_of(kind))
            for unit in placed.weights_of(device, row)
        }
        with self._changing:
            self._units = {at: units for at, units in self._units.items() if at in needed}

    @property
    def held_bytes(self) -> int:
        """Of units on this device."""
        with self._changing:
            return sum(each.nbytes for units in self._units.values() for each in units)
