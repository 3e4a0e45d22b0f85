"""A model as a set of safetensors files in the layout of Hugging Face, from which a run may start.

The files are ``model.safetensors``, or ``model-00001-of-00002.safetensors`` and so on with
``model.safetensors.index.json``; tensors have the model's own names. Optimizer state, if present, is in files
``optimizer…`` with the same layout, as ``state.<parameter>.<key>`` and ``master.<parameter>``.

An import writes ``import.json`` last, which makes the set complete: it lists the files with a digest of each
tensor, and the options of parameter groups. A set without it (a downloaded one) can be read too; only the
contents of its headers are checked then.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec
import xxhash
from msgspec import Meta

from ckptd.storage.checkpoints.sealed_json import ManifestError, decode_sealed, seal_json
from ckptd.storage.image_format import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    HeaderError,
    TensorEntry,
    parse_safetensors_header,
)
from ckptd.storage.stores.objects import ObjectStore, Range

IMPORT_FORMAT = "ckptd.import/1"
MANIFEST = "import.json"
MODEL, OPTIMIZER = "model", "optimizer"
_MAX_JSON_BYTES = 256 << 20
# Attributes under which wrappers hold the wrapped module. A model's own names do not contain them, as in
# `torch.distributed.checkpoint.state_dict`.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_REPLICA = "module"


class SetError(ValueError):
    """The files are not a complete set, or were changed."""


@dataclass(frozen=True, slots=True)
class SetTensor:
    """A tensor of a set; ``offset`` counts from the beginning of its file; ``digest`` is empty if unknown."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int
    digest: bytes = b""


@dataclass(frozen=True, slots=True)
class SetFile:
    """A file of a set, as listed in ``import.json``: ``digests`` are those of its tensors in data order."""

    name: str
    size: int
    digests: tuple[bytes, ...]


class SetFiles(Protocol):
    """The place of a set's files."""

    @property
    def where(self) -> str:
        """The place, for messages."""

    def size(self, name: str) -> int | None:
        """The size of a file, None if it does not exist; raises SetError or StoreError if this fails."""

    def read(self, name: str, offset: int, into: memoryview) -> None:
        """Fill the buffer from a file; raises SetError or StoreError if this fails."""


class FolderFiles:
    """The files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.where = folder, str(folder)

    def size(self, name: str) -> int | None:
        path = self._folder / name
        try:
            return path.stat().st_size if path.is_file() else None
        except OSError as error:  # an index may name what cannot be a file's name
            raise SetError(f"cannot read {path}: {error.strerror}") from error

    def read(self, name: str, offset: int, into: memoryview) -> None:
        try:
            with (self._folder / name).open("rb", buffering=0) as file:
                while into:
                    done = os.preadv(file.fileno(), [into], offset)
                    if not done:
                        raise SetError(f"{self._folder / name} is too short")
                    offset, into = offset + done, into[done:]
        except OSError as error:
            raise SetError(f"cannot read {self._folder / name}: {error.strerror}") from error


class StoreFiles:
    """The objects below a prefix of a store."""

    def __init__(self, store: ObjectStore, prefix: str, where: str) -> None:
        self._store, self._prefix, self.where = store, prefix, where

    def size(self, name: str) -> int | None:
        info = self._store.info(self._prefix + name)
        return None if info is None else info.size

    def read(self, name: str, offset: int, into: memoryview) -> None:
        self._store.read_ranges(self._prefix + name, [Range(offset, into)])


@dataclass(frozen=True)
class ModelSet:
    """The contents of a set.

    Attributes:
        model: the tensors by the model's own names.
        optimizer: ``state.<parameter>.<key>`` and ``master.<parameter>``; may be empty.
        groups: options of the parameter group by parameter, if known.
        files: the names of all files except ``import.json``.
    """

    model: Mapping[str, SetTensor]
    optimizer: Mapping[str, SetTensor]
    groups: Mapping[str, Mapping[str, Any]]
    files: tuple[str, ...]
    _files: SetFiles = field(repr=False)

    def read(self, tensor: SetTensor, into: memoryview) -> None:
        """Read the tensor into ``into``, which has its size, and compare its digest if known.

        Raises:
            SetError: the bytes cannot be read, or were changed since the import.
        """
        if tensor.nbytes:
            self._files.read(tensor.file, tensor.offset, into)
        if tensor.digest and xxhash.xxh3_128_digest(into) != tensor.digest:
            raise SetError(f"{tensor.name} in {self._files.where}/{tensor.file} is damaged")


def open_set(files: SetFiles, *, single: str = "", complete: bool = False) -> ModelSet:
    """Open a set by its manifest, index or file name; reads the headers, not the tensors.

    Args:
        single: the name of the only file to open.
        complete: refuse a set without ``import.json``, whose files may still be uploading.
    Raises:
        SetError: there is no set, or it is not complete.
    """
    manifest = None if single else _read_manifest(files)
    if manifest is None and complete:
        raise SetError(f"{files.where} has no {MANIFEST}: nothing was imported, or not to the end")
    listed = {} if manifest is None else {file.name: file for file in manifest.files}
    if single:
        parts = {MODEL: [single], OPTIMIZER: []}
    elif manifest is not None:
        names = [file.name for file in manifest.files]
        parts = {part: [name for name in names if _part_of(name) == part] for part in (MODEL, OPTIMIZER)}
    else:
        parts = {part: _unlisted(files, part) for part in (MODEL, OPTIMIZER)}
    if not parts[MODEL]:
        raise SetError(
            f"{files.where} holds no {file_name(MODEL, 0, 1)} and no {index_name(MODEL)}: not a "
            "model in safetensors "
            "(`ckptctl import --format dcp` makes one of a checkpoint of torch.distributed)"
        )
    found = {part: _tensors(files, names, listed) for part, names in parts.items()}
    return ModelSet(
        found[MODEL],
        found[OPTIMIZER],
        {} if manifest is None else manifest.groups,
        (*parts[MODEL], *parts[OPTIMIZER]),
        files,
    )


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Each name without the wrappers of the model: compilation, recomputation, and data parallelism if it
    wraps the whole model.
    """
    plain = {name: ".".join([part for part in name.split(".") if part not in _WRAPPERS]) for name in names}
    while plain and all(name.startswith(_REPLICA + ".") for name in plain.values()):
        plain = {name: short.removeprefix(_REPLICA + ".") for name, short in plain.items()}
    return plain


def plan_shards(entries: Sequence[TensorEntry], max_bytes: int) -> list[list[TensorEntry]]:
    """Split the tensors, in order, into files of at most ``max_bytes``; a larger tensor is a file."""
    shards: list[list[TensorEntry]] = [[]]
    room = max_bytes
    for entry in entries:
        if shards[-1] and entry.nbytes > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(entry)
        room -= entry.nbytes
    return shards


def file_name(part: str, index: int, count: int) -> str:
    """The name of file number ``index`` (from 0) of ``count``."""
    if count == 1:
        return f"{part}.safetensors"
    return f"{part}-{index + 1:05d}-of-{count:05d}.safetensors"


def index_name(part: str) -> str:
    """The name of the index of several files."""
    return f"{part}.safetensors.index.json"


def render_index(weights: Mapping[str, str], total_bytes: int) -> bytes:
    """The index of several files: the file name of each tensor."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weights.items()))}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()


def render_import(
    files: Iterable[SetFile],
    *,
    source: str,
    groups: Mapping[str, Mapping[str, Any]],
    created_at_ns: int,
    tool: str,
) -> bytes:
    """The contents of ``import.json``."""
    return seal_json(
        {
            "format": IMPORT_FORMAT,
            "source": source,
            "created_at_ns": created_at_ns,
            "tool": tool,
            "files": [
                {"name": f.name, "size": f.size, "digests": [d.hex() for d in f.digests]} for f in files
            ],
            "groups": {name: dict(options) for name, options in groups.items()},
        }
    )


class _WireFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern=r"^(model|optimizer)(-[0-9]{5}-of-[0-9]{5})?\.safetensors$")]
    size: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    digests: list[Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]]


class _WireImport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Annotated[str, Meta(pattern=f"^{IMPORT_FORMAT}$")]
    source: str
    created_at_ns: int
    tool: str
    files: list[_WireFile]
    groups: dict[str, dict[str, Any]]
    digest: str


_decoder = msgspec.json.Decoder(_WireImport)


def _read_manifest(files: SetFiles) -> _WireImport | None:
    data = _read_small(files, MANIFEST)
    if data is None:
        return None
    try:
        return decode_sealed(data, _MAX_JSON_BYTES, _decoder)
    except ManifestError as error:
        raise SetError(f"{files.where}/{MANIFEST}: {error}") from error


def _read_small(files: SetFiles, name: str) -> bytes | None:
    size = files.size(name)
    if size is None:
        return None
    if size > _MAX_JSON_BYTES:
        raise SetError(f"{files.where}/{name} has {size} bytes, may have {_MAX_JSON_BYTES}")
    data = bytearray(size)
    if size:
        files.read(name, 0, memoryview(data))
    return bytes(data)


def _unlisted(files: SetFiles, part: str) -> list[str]:
    """The file names of one part of a set without a manifest."""
    data = _read_small(files, index_name(part))
    if data is None:
        name = file_name(part, 0, 1)
        return [name] if files.size(name) is not None else []
    where = f"{files.where}/{index_name(part)}"
    try:
        weights = json.loads(data)["weight_map"]
        names = sorted(set(weights.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SetError(f"{where} is not an index of safetensors files ({error!r})") from error
    for name in names:
        if not isinstance(name, str) or "/" in name or not name.endswith(".safetensors"):
            raise SetError(f"{where} names {name!r}, which is no safetensors file beside it")
    return names


def _part_of(name: str) -> str:
    return OPTIMIZER if name.startswith(OPTIMIZER) else MODEL


def _tensors(files: SetFiles, names: Iterable[str], listed: Mapping[str, _WireFile]) -> dict[str, SetTensor]:
    found: dict[str, SetTensor] = {}
    for name in names:
        for tensor in _file_tensors(files, name, listed.get(name)):
            if tensor.name in found:
                raise SetError(
                    f"{files.where} has {tensor.name} twice: in {found[tensor.name].file} and {name}"
                )
            found[tensor.name] = tensor
    return found


def _file_tensors(files: SetFiles, name: str, listed: _WireFile | None) -> list[SetTensor]:
    where = f"{files.where}/{name}"
    size = files.size(name)
    if size is None:
        raise SetError(f"{where} is missing")
    if listed is not None and listed.size != size:
        raise SetError(f"{where} has {size} bytes, {listed.size} were imported")
    if size < LENGTH_BYTES:
        raise SetError(f"{where} is too short for a safetensors file")
    length = bytearray(LENGTH_BYTES)
    files.read(name, 0, memoryview(length))
    header_len = int.from_bytes(length, "little")
    if header_len > min(size - LENGTH_BYTES, MAX_HEADER_BYTES):
        raise SetError(f"{where} is truncated, or no safetensors file")
    text = bytearray(header_len)
    files.read(name, LENGTH_BYTES, memoryview(text))
    try:
        header = parse_safetensors_header(text)
    except HeaderError as error:
        raise SetError(f"{where} is no whole safetensors file: {error}") from error
    if header.end != size:
        raise SetError(f"{where} has {size} bytes, its tensors end at {header.end}")
    tensors = [SetTensor(t.name, t.dtype, t.shape, name, t.offset, t.nbytes) for t in header.tensors]
    if listed is None:
        return tensors
    if len(listed.digests) != len(tensors):
        raise SetError(f"{where} has {len(tensors)} tensors, {len(listed.digests)} were imported")
    return [
        replace(tensor, digest=bytes.fromhex(digest))
        for tensor, digest in zip(tensors, listed.digests, strict=True)
    ]
