"""The ``.metadata`` of a checkpoint of ``torch.distributed.checkpoint``, which is a pickle, read
without running anything.

A pickle names callables, and whoever loads it calls them. Here every name must be of a closed set.
A class of that set is read into an inert record that has no behaviour; dtypes and sizes are torch's
own. Torch's ``Metadata`` is then built out of the records, field by field, so what is in the file
reaches torch only as strings, numbers, sizes and dtypes.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Self, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

__all__ = ["MetadataRefused", "read_dcp_metadata"]

_T = TypeVar("_T")
_DCP = "torch.distributed.checkpoint.metadata"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"  # as torch wrote it before 2.3
_MAX_BYTES = 1 << 30


class MetadataRefused(ValueError):
    """The file names what no checkpoint of torch's own has, or is none."""


class _Sealed(type):
    """A pickle can set attributes, of classes, too."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise MetadataRefused(f"it sets {name} of a class")


class _Record(metaclass=_Sealed):
    """What the file says of one object: its arguments, or its state."""

    __slots__ = ("state",)

    def __new__(cls, *args: Any) -> Self:
        found = super().__new__(cls)
        found.state = args
        return found

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Meta(_Record):
    """The whole of it."""


class _Tensor(_Record):
    """A tensor, in chunks."""


class _Properties(_Record):
    """A tensor's dtype; what else stands there is deprecated."""


class _Chunk(_Record):
    """A part of a tensor."""


class _Bytes(_Record):
    """A value that is no tensor."""


class _Index(_Record):
    """The name of a part."""


class _Stored(_Record):
    """Where a part lies."""


class _Ignored(_Record):
    """What an import does not need: memory format, layout, when and where it was saved."""


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
    """What a checkpoint holds.

    Raises:
        MetadataRefused: the file is not what `torch.distributed.checkpoint` writes; nothing of it was run.
        OSError: it cannot be read.
    """
    path = folder / ".metadata"
    if path.stat().st_size > _MAX_BYTES:
        raise MetadataRefused(f"{path} is refused: it has more than {_MAX_BYTES} bytes")
    try:
        return _built(_Unpickler(io.BytesIO(path.read_bytes())).load(), folder)
    except MetadataRefused as error:
        raise MetadataRefused(
            f"{path} is refused: {error}. Nothing of it was run. Import only what "
            "torch.distributed.checkpoint wrote, or have its owner make safetensors of it"
        ) from error
    # A damaged pickle can fail in any way that its instructions can.
    except Exception as error:
        raise MetadataRefused(f"{path} is no metadata of a checkpoint ({error!r})") from error


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
