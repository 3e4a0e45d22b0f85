"""Safetensors files written tensor by tensor: one file, or a model's folder as Hugging Face lays it out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ckptd.export.files import created, reserve_space, write_all
from ckptd.storage.image_format import TensorEntry, render_header
from ckptd.storage.model_set import (
    SetFile,
    file_name,
    index_name,
    plan_shards,
    render_index,
)

__all__ = ["DataOf", "Moved", "Written", "write_part", "write_synced"]

# The bytes of the tensor with this name, in pieces.
DataOf = Callable[[str], Iterable[memoryview]]
# Told how many more bytes were written.
Moved = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Written:
    """The files of one part, and what they take."""

    files: tuple[SetFile, ...]
    size_bytes: int


def write_part(
    folder: Path,
    part: str,
    entries: Sequence[TensorEntry],
    data_of: DataOf,
    *,
    metadata: Mapping[str, str],
    max_bytes: int,
    moved: Moved,
    finished: Callable[[Path], None] = lambda path: None,
) -> Written:
    """Write tensors to ``<part>.safetensors`` in a folder, or to several files and their index.

    Args:
        entries: by descending item size, so that each tensor is aligned to its items.
        max_bytes: size of a file, unless one tensor alone is larger.
        finished: called with each file that is on disk, the index last; it may take the file away.
    """
    shards = plan_shards(entries, max_bytes)
    names = [file_name(part, i, len(shards)) for i in range(len(shards))]
    files = []
    for name, shard in zip(names, shards, strict=True):
        files.append(_write_file(folder / name, name, shard, data_of, metadata, moved))
        finished(folder / name)
    size = sum(written.size for written in files)
    if len(shards) > 1:
        weights = {e.name: n for n, shard in zip(names, shards, strict=True) for e in shard}
        index = render_index(weights, sum(entry.nbytes for entry in entries))
        write_synced(folder / index_name(part), index)
        finished(folder / index_name(part))
        size += len(index)
    return Written(tuple(files), size)


def write_synced(path: Path, data: bytes) -> None:
    """A small file, on disk when this returns (its name is not)."""
    with created(path) as fd:
        write_all(fd, memoryview(data))
        os.fsync(fd)


def _write_file(
    path: Path,
    name: str,
    entries: Sequence[TensorEntry],
    data_of: DataOf,
    metadata: Mapping[str, str],
    moved: Moved,
) -> SetFile:
    header = render_header(metadata, entries)
    size = len(header) + sum(entry.nbytes for entry in entries)
    digests = []
    with created(path) as fd:
        reserve_space(fd, size)
        write_all(fd, memoryview(header))
        for entry in entries:
            digest = xxhash.xxh3_128()
            for data in data_of(entry.name):
                digest.update(data)
                write_all(fd, data)
                moved(len(data))
            digests.append(digest.digest())
        os.fsync(fd)
    return SetFile(name, size, tuple(digests))
