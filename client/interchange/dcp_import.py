"""The child process of ``ckptctl import --format dcp``: reads a ``torch.distributed.checkpoint``.

``ckptctl`` starts ``python -m ckptd.client.interchange.dcp_import``. A job comes on stdin; the contents
go to stdout, then the bytes of each tensor that is requested (``ckptd.export.dcp_wire``).

Such a checkpoint contains pickles: its ``.metadata``, and values that are no tensors. **None of them is
run.** Torch loads the values with ``weights_only``. The metadata is read here: a pickle names
callables, and a loader calls them, so every name must be in a closed set. An object of a class in that
set becomes an inert record without behavior; dtypes and sizes are torch's own. Torch's ``Metadata`` is
then built from the records, field by field, so that torch receives only strings, numbers, sizes and
dtypes of the file.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Self, TypeVar

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from ckptd.client.interchange.dcp_export import own_pipes
from ckptd.client.model.snapshot_layout import SAFETENSORS_DTYPES, buffer_of
from ckptd.export.dcp_wire import Ask, Contents, DcpTensor, ReadJob
from ckptd.units import first_of

_T = TypeVar("_T")
_DCP = "torch.distributed.checkpoint.metadata"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"  # as torch wrote it before 2.3
_MAX_BYTES = 1 << 30
_MEMO_SPARE = 1 << 10


class MetadataRefused(ValueError):
    """The file is no metadata, or names something that torch's own metadata does not contain."""


class _Sealed(type):
    """Refuses attributes of the class, which a pickle could set."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise MetadataRefused(f"it sets {name} of a class")


class _Record(metaclass=_Sealed):
    """One object of the file: its arguments, or its state."""

    __slots__ = ("state",)

    def __new__(cls, *args: Any) -> Self:
        found = super().__new__(cls)
        found.state = args
        return found

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Meta(_Record):
    """The whole metadata."""


class _Tensor(_Record):
    """A tensor, in chunks."""


class _Properties(_Record):
    """A tensor's dtype; its other fields are deprecated."""


class _Chunk(_Record):
    """A part of a tensor."""


class _Bytes(_Record):
    """A value that is no tensor."""


class _Index(_Record):
    """The name of a part."""


class _Stored(_Record):
    """The place of a part."""


class _Ignored(_Record):
    """Not needed by an import: memory format, layout, time and place of the save."""


_RECORDS: Mapping[tuple[str, str], type] = {
    (_DCP, "Metadata"): _Meta,
    (_DCP, "TensorStorageMetadata"): _Tensor,
    (_DCP, "TensorProperties"): _Properties,
    (_SHARDED, "TensorProperties"): _Properties,
    (_DCP, "ChunkStorageMetadata"): _Chunk,
    (_DCP, "BytesStorageMetadata"): _Bytes,
    (_DCP, "MetadataIndex"): _Index,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Stored,
    (_DCP, "StorageMeta"): _Ignored,
    (_DCP, "_MEM_FORMAT_ENCODING"): _Ignored,
    (_SHARDED, "MEM_FORMAT_ENCODING"): _Ignored,
    ("torch.serialization", "_get_layout"): _Ignored,
    ("builtins", "getattr"): _Ignored,  # how Python 3.11 names a member of an enumeration
    ("pathlib", "PosixPath"): _Ignored,
    ("pathlib._local", "PosixPath"): _Ignored,
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): OrderedDict,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _RECORDS.get((module, name))
        if found is not None:
            return found
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise MetadataRefused(f"it names {module}.{name}, which may run anything")


def read_dcp_metadata(folder: Path) -> Metadata:
    """Read the metadata of a checkpoint without running anything of it.

    Raises:
        MetadataRefused: `torch.distributed.checkpoint` does not write such a file.
        OSError: it cannot be read.
    """
    path = folder / ".metadata"
    if path.stat().st_size > _MAX_BYTES:
        raise MetadataRefused(f"{path} is refused: it has more than {_MAX_BYTES} bytes")
    try:
        content = path.read_bytes()
        _check_memo(content)
        return _built(_Unpickler(io.BytesIO(content)).load(), folder)
    except MetadataRefused as error:
        raise MetadataRefused(
            f"{path} is refused: {error}. Nothing of it was run. Import only what "
            "torch.distributed.checkpoint wrote, or have its owner make safetensors of it"
        ) from error
    # A damaged pickle can fail in any way that its instructions can.
    except Exception as error:
        raise MetadataRefused(f"{path} is no metadata of a checkpoint ({error!r})") from error


def _check_memo(content: bytes) -> None:
    """Refuse a pickle that numbers its values higher than a pickler would.

    An unpickler makes room for all lower numbers: for a file of eight bytes up to 64 GiB.
    """
    stored = 0
    for operation, number, _ in pickletools.genops(content):
        if "PUT" in operation.name or operation.name == "MEMOIZE":
            if number is not None and number > 2 * stored + _MEMO_SPARE:
                raise MetadataRefused(f"its value number {stored} has the number {number}")
            stored += 1


def _built(found: Any, folder: Path) -> Metadata:
    fields = _state(found, _Meta)
    entries = _expect(fields["state_dict_metadata"], dict)
    storage = _expect(fields["storage_data"], dict)
    return Metadata(
        state_dict_metadata={_expect(k, str): _entry(v) for k, v in entries.items()},
        storage_data={_index(k): _place(v, folder) for k, v in storage.items()},
        storage_meta=StorageMeta(),
    )


def _entry(found: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(found, _Bytes):
        return BytesStorageMetadata()
    fields = _state(found, _Tensor)
    properties = _expect(fields["properties"], _Properties).state
    dtype = properties.get("dtype") if isinstance(properties, dict) else properties[0]
    chunks = [_state(chunk, _Chunk) for chunk in _expect(fields["chunks"], list)]
    return TensorStorageMetadata(
        TensorProperties(dtype=_expect(dtype, torch.dtype)),
        _expect(fields["size"], torch.Size),
        [
            ChunkStorageMetadata(_expect(chunk["offsets"], torch.Size), _expect(chunk["sizes"], torch.Size))
            for chunk in chunks
        ],
    )


def _index(found: Any) -> MetadataIndex:
    fields = _state(found, _Index)
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _expect(fields["fqn"], str),
        None if offset is None else _expect(offset, torch.Size),
        None if index is None else _expect(index, int),
    )


def _place(found: Any, folder: Path) -> _StorageInfo:
    fields = _state(found, _Stored)
    name = _expect(fields["relative_path"], str)
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not name:
        raise MetadataRefused(f"it names {name!r}, which is not in {folder}")
    place = _StorageInfo(name, _expect(fields["offset"], int), _expect(fields["length"], int))
    if fields.get("transform_descriptors") is not None:  # older versions of torch have none
        place.transform_descriptors = [_expect(t, str) for t in fields["transform_descriptors"]]
    return place


def _state(found: Any, kind: type[_Record]) -> dict[str, Any]:
    """The fields of a record."""
    return _expect(_expect(found, kind).state, dict)


def _expect(found: Any, kind: type[_T]) -> _T:
    if not isinstance(found, kind):
        raise MetadataRefused(f"there is {type(found).__name__} where {kind.__name__} belongs")
    return found


_STATE, _GROUPS, _MASTER = "state.", "param_groups.", "master."
_MOST_NAMED = 5


class StoredState:
    """The model and the optimizer's state in a checkpoint."""

    def __init__(self, job: ReadJob) -> None:
        self._reader = _Reader(job.folder)
        self._stored = self._reader.read_metadata().state_dict_metadata
        self._model = _prefix(job.model_key)
        self._optimizer = _prefix(job.optimizer_key)
        self._keys: list[str] = []

    def contents(self) -> Contents:
        """The tensors, options and notes.

        Raises:
            ValueError: the checkpoint has no model under this key.
        """
        tensors, skipped = self._tensors()
        if not any(t.kind == "model" for t in tensors):
            some = ", ".join(sorted(self._stored)[:_MOST_NAMED])
            raise ValueError(f"no tensor under the key {self._model!r}; keys are like {some}")
        notes = []
        if skipped:
            notes.append(f"skipped: {first_of(skipped, _MOST_NAMED)}")
        return Contents(tensors, self._options(), notes)

    def tensor(self, index: int) -> Tensor:
        """The tensor with this index in the contents."""
        key = self._keys[index]
        found: Tensor = self._loaded([key])[key]
        return found

    def _tensors(self) -> tuple[list[DcpTensor], list[str]]:
        """The tensors, and the keys of skipped values."""
        tensors: list[DcpTensor] = []
        skipped: list[str] = []
        for key, stored in self._stored.items():
            kind, name = self._what(key)
            if kind and isinstance(stored, TensorStorageMetadata):
                dtype = stored.properties.dtype
                if dtype not in SAFETENSORS_DTYPES:
                    raise ValueError(f"{key} is {dtype}, which safetensors cannot hold")
                self._keys.append(key)
                tensors.append(DcpTensor(kind, name, SAFETENSORS_DTYPES[dtype], tuple(stored.size)))
            elif kind != "groups":
                skipped.append(key)
        return tensors, skipped

    def _what(self, key: str) -> tuple[str, str]:
        """The part that a key belongs to, and its name there; both empty: it belongs to none."""
        if self._optimizer and key.startswith(self._optimizer):
            name = key.removeprefix(self._optimizer)
            if name.startswith(_STATE):
                return "optim", name
            return ("groups", name) if name.startswith(_GROUPS) else ("", "")
        if key.startswith(_MASTER):
            return "master", key
        return ("model", key.removeprefix(self._model)) if key.startswith(self._model) else ("", "")

    def _options(self) -> dict[str, dict[str, Any]]:
        """Options by parameter, from either layout of an optimizer's state dict."""
        prefix = self._optimizer + _GROUPS
        keys = [k for k in self._stored if self._what(k)[0] == "groups"]
        loaded = self._loaded(keys)
        listed: dict[str, dict[str, Any]] = {}
        for key in keys:
            head, _, option = key.removeprefix(prefix).partition(".")
            if head.isdigit() and "." not in option:
                listed.setdefault(head, {})[option] = loaded.pop(key)
        found: dict[str, dict[str, Any]] = {}
        for group in listed.values():
            options = {k: _plain(v) for k, v in group.items() if k != "params"}
            found.update({name: dict(options) for name in group.get("params", ())})
        for key, value in loaded.items():
            name, _, option = key.removeprefix(prefix).rpartition(".")
            found.setdefault(name, {})[option] = _plain(value)
        return found

    def _loaded(self, keys: Iterable[str]) -> dict[str, Any]:
        stored = {key: self._stored[key] for key in keys}
        state = {
            key: torch.empty(each.size, dtype=each.properties.dtype)
            if isinstance(each, TensorStorageMetadata)
            else None
            for key, each in stored.items()
        }
        if not state:
            return {}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            # Not flattened: values that are no tensors would be loaded into a copy.
            planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
            try:
                load(state, storage_reader=self._reader, planner=planner, no_dist=True)
            except CheckpointException as error:
                raise error.failures[0][0] from None  # of the only rank
        return state


class _Planner(DefaultLoadPlanner):
    """Torch's planner, but it runs nothing to load a value that is no tensor."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        try:
            self.state_dict[key] = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            named = re.search(r"GLOBAL (\S+)", str(error))
            what = f" ({named[1]})" if named else ""
            raise ValueError(
                f"{key} is refused: it holds more than numbers, strings and tensors{what}. "
                'Nothing of it was run. Pass --optimizer-key "" to leave the optimizer out'
            ) from error


class _Reader(FileSystemReader):
    """Torch's reader, with the metadata of `read_dcp_metadata`."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self._metadata = read_dcp_metadata(Path(folder))

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return self._metadata


def _prefix(key: str) -> str:
    return key + "." if key else ""


def _plain(value: Any) -> Any:
    """The value as JSON can represent it: a learning rate may be a tensor."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def main() -> int:
    """Read the checkpoint of the job that comes on stdin."""
    given, output = own_pipes()
    stored = StoredState(msgspec.json.decode(given.readline(), type=ReadJob))
    output.write(msgspec.json.encode(stored.contents()) + b"\n")
    output.flush()
    for line in given:
        tensor = stored.tensor(msgspec.json.decode(line, type=Ask).index).contiguous()
        output.write(buffer_of(tensor))
        output.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
