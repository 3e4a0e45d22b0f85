"""Export of a snapshot as a safetensors file, or as a Hugging Face model folder.

The files and folders of models, also those of imports, are written tensor by tensor. They appear
complete and synced, or not at all.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ckptd.core.export_plan import ExportError, ExportPlan, Whole, plan_export, split_rows
from ckptd.export.source import Origin, TensorSource
from ckptd.private_files import sync_folder
from ckptd.storage.image_format import TensorEntry, render_header
from ckptd.storage.model_set import MODEL, SetFile, file_name, index_name, plan_shards, render_index
from ckptd.units import format_bytes

# Returns the bytes of the tensor with this name, in pieces.
DataOf = Callable[[str], Iterable[memoryview]]
# Called with the number of bytes that were written since the last call.
Moved = Callable[[int], None]
# Called with the name and the total bytes of an operation; yields a function that reports progress.
Watch = Callable[[str, int], AbstractContextManager[Moved]]

DEFAULT_SHARD_BYTES = 5 * 10**9
OLDER = "ckptd.older_experts"
"""Metadata of a model out of partial snapshots: by iteration, the tensors (or their rows) that are older."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
# Only a folder with a model (or a checkpoint) has these files. `--force` replaces no other folder.
_MODEL_FILES = ("model.safetensors", "model.safetensors.index.json", ".metadata")
# Files of a model folder besides weights: configuration, tokenizer, code.
_CONFIG_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken", ".py"})
_NOT_CONFIG = (".safetensors.index.json", ".bin.index.json", "import.json", "trainer_state.json")
_MAX_CONFIG_BYTES = 256 << 20


@contextmanager
def unwatched(what: str, total_bytes: int) -> Iterator[Moved]:
    """A watch that reports nothing."""
    yield lambda nbytes: None


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The result of an export.

    Attributes:
        place: the source of the snapshot: ``memory``, or the store's URL.
        joined_ranks: other ranks that captured a part of it.
        tensors: number of the model's tensors; ``optimizer_tensors``: of the optimizer's state.
        converted: number of tensors that were converted to compute precision.
        notes: notes for the user.
        older_tensors: number of tensors, or ranges of their rows, that are those of older snapshots.
    """

    path: str
    format: str
    job: str
    run: str
    rank: int
    iteration: int
    place: str
    tensors: int
    optimizer_tensors: int
    files: int
    size_bytes: int
    converted: int
    notes: tuple[str, ...] = ()
    joined_ranks: tuple[int, ...] = ()
    older_tensors: int = 0


def report_of(
    source: TensorSource,
    plan: ExportPlan,
    target: Path,
    kind: str,
    *,
    files: int,
    size: int,
    optimizer_tensors: int = 0,
    notes: tuple[str, ...] = (),
) -> ExportReport:
    """The report of an export."""
    origin = source.origin
    return ExportReport(
        path=str(target),
        format=kind,
        job=origin.job,
        run=origin.run,
        rank=origin.rank,
        iteration=origin.iteration,
        place=origin.place,
        tensors=len(plan.model),
        optimizer_tensors=optimizer_tensors,
        files=files,
        size_bytes=size,
        converted=sum(whole.converted for whole in plan.model),
        notes=(*notes, *([_older_note(origin)] if origin.older else [])),
        joined_ranks=origin.joined,
        older_tensors=len(origin.older),
    )


def _older_note(origin: Origin) -> str:
    oldest, newest = min(origin.older.values()), max(origin.older.values())
    return (
        f"{len(origin.older)} tensors or ranges of rows are those of older snapshots, of iterations {oldest} "
        f"to {newest}: this is not the model of one iteration. The metadata has them as {OLDER}"
    )


def export_file(
    source: TensorSource,
    target: Path,
    *,
    keep_prefix: bool = False,
    force: bool = False,
    watch: Watch = unwatched,
) -> ExportReport:
    """Write the model as one safetensors file.

    Raises:
        ExportError: the target exists, the disk is full, or the snapshot does not contain a whole model.
        DamagedSnapshot: the snapshot differs from the sealed one; no file is left behind.
    """
    check_target(target, force=force, folder=False)
    plan = plan_export(source.tensors, source.facts, keep_prefix=keep_prefix)
    header = render_header(_metadata(source.origin, plan), [whole.entry for whole in plan.model])
    total = sum(whole.entry.nbytes for whole in plan.model)
    size = len(header) + total
    source.prepare(plan.pieces)
    with _new_file(target, size, force=force) as fd, watch("exporting", total) as moved:
        _write_all(fd, memoryview(header))
        for whole in plan.model:
            for data in converted_chunks(source, whole):
                _write_all(fd, data)
                moved(len(data))
    return report_of(source, plan, target, "safetensors", files=1, size=size)


def export_hf(
    source: TensorSource,
    target: Path,
    *,
    config: Path | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    keep_prefix: bool = False,
    force: bool = False,
    watch: Watch = unwatched,
) -> ExportReport:
    """Write the model as a folder for ``from_pretrained``.

    Args:
        config: a ``config.json``, or a folder whose configuration and tokenizer are copied.
    Raises:
        ExportError, DamagedSnapshot: as `export_file`.
    """
    check_target(target, force=force, folder=True)
    copied = _config_files(config)
    plan = plan_export(source.tensors, source.facts, keep_prefix=keep_prefix)
    by_name = {whole.name: whole for whole in plan.model}
    total = sum(whole.entry.nbytes for whole in plan.model)
    source.prepare(plan.pieces)
    with new_folder(target, total, force=force) as folder, watch("exporting", total) as moved:
        written = write_part(
            folder,
            MODEL,
            [whole.entry for whole in plan.model],
            lambda name: converted_chunks(source, by_name[name]),
            metadata=_metadata(source.origin, plan),
            max_bytes=max_shard_bytes,
            moved=moved,
        )
        for name, data in copied.items():
            write_synced(folder / name, data)
    notes = () if "config.json" in copied else ("the folder has no config.json: pass --config",)
    return report_of(
        source, plan, target, "hf", files=len(written.files), size=written.size_bytes, notes=notes
    )


def _metadata(origin: Origin, plan: ExportPlan) -> Mapping[str, str]:
    found = {
        "format": "pt",
        "ckptd.job": origin.job,
        "ckptd.run": origin.run,
        "ckptd.rank": str(origin.rank),
        "ckptd.iteration": str(origin.iteration),
    }
    if origin.older:
        found[OLDER] = json.dumps(_exported_names(origin.older, plan), sort_keys=True)
    return found


def _exported_names(older: Mapping[str, int], plan: ExportPlan) -> dict[str, list[str]]:
    """By iteration, the tensors that are older, by the names and rows of the export."""
    found: dict[str, list[str]] = {}
    for name, iteration in older.items():
        param, rows = split_rows(name)
        exported = plan.names.get(param, param) + ("" if rows is None else f"[{rows[0]}:{rows[1]}]")
        found.setdefault(str(iteration), []).append(exported)
    return found


def _config_files(path: Path | None) -> dict[str, bytes]:
    """The files that are copied with the weights, by name."""
    if path is None:
        return {}
    try:
        if path.is_dir():
            found = {p.name: p for p in sorted(path.iterdir()) if _is_config(p)}
            if "config.json" not in found:
                raise ExportError(f"{path} has no config.json")
        else:
            found = {"config.json": path}
        return {name: file.read_bytes() for name, file in found.items()}
    except OSError as error:
        raise ExportError(f"cannot read {error.filename or path}: {error.strerror}") from error


def _is_config(path: Path) -> bool:
    return (
        path.suffix in _CONFIG_SUFFIXES
        and not path.name.endswith(_NOT_CONFIG)
        and path.is_file()
        and path.stat().st_size <= _MAX_CONFIG_BYTES
    )


# -- conversion -----------------------------------------------------------------------------------


def converted_chunks(source: TensorSource, whole: Whole) -> Iterator[memoryview]:
    """The bytes of a tensor to write, converted to its dtype."""
    for piece in whole.pieces:
        for data in source.chunks(piece):
            yield convert(data, piece.dtype, whole.dtype)


def convert(data: memoryview, source: str, target: str) -> memoryview:
    """Floats in another float dtype, rounded to nearest even as a GPU does; NaN stays NaN.

    Raises:
        ExportError: a pair that is not supported.
    """
    if source == target:
        return data
    import numpy as np  # not needed by other commands: `ckptctl` starts faster without it

    floats = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}
    if source in floats and target in floats:
        with np.errstate(over="ignore"):
            return np.frombuffer(data, floats[source]).astype(floats[target]).data.cast("B")
    if source != "F32" or target != "BF16":
        raise ExportError(f"a tensor is stored as {source} and computes in {target}: unsupported")
    bits = np.frombuffer(data, "<u4")
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    with np.errstate(over="ignore"):
        rounded = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype("<u2")
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    quiet = ((bits >> np.uint32(16)) | np.uint32(0x40)).astype("<u2")
    return np.where(nan, quiet, rounded).astype("<u2").data.cast("B")


# -- targets --------------------------------------------------------------------------------------


def check_target(target: Path, *, force: bool, folder: bool) -> None:
    """Return if the target may be written; called before the work starts.

    Raises:
        ExportError: it exists, or cannot be replaced.
    """
    if not target.exists() or (folder and target.is_dir() and not any(target.iterdir())):
        return
    if not force:
        raise ExportError(f"{target} exists already; pass --force to replace it")
    if target.is_dir() != folder:
        raise ExportError(f"{target} is {'a file' if folder else 'a folder'} and is not replaced")
    if folder and not _is_model(target):
        raise ExportError(f"{target} contains no model: --force does not replace it")


@contextmanager
def _new_file(target: Path, size: int, *, force: bool) -> Iterator[int]:
    """A descriptor to write ``size`` bytes to; the target appears, synced, when the block ends normally."""
    temporary = _sibling(target, "tmp")
    try:
        fd = _create(temporary)
    except OSError as error:
        raise ExportError(f"cannot write in {target.parent}: {error.strerror}") from error
    try:
        _reserve_space(fd, size)
        yield fd
        os.fsync(fd)
        if force:
            temporary.replace(target)
        else:
            os.link(temporary, target)  # unlike a rename it refuses to replace
        sync_folder(target.parent)
    except FileExistsError as error:
        raise ExportError(f"{target} has just appeared; pass --force to replace it") from error
    except OSError as error:
        raise ExportError(_why_not_written(error, target, size)) from error
    finally:
        os.close(fd)
        temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(target: Path, size: int, *, force: bool) -> Iterator[Path]:
    """A folder to fill with about ``size`` bytes; it becomes the target, synced, when the block ends
    normally. The caller syncs the files in it. A folder that is replaced is absent for a moment.

    Raises:
        ExportError: the folder cannot be written, or the target has appeared meanwhile.
    """
    temporary = _sibling(target, "tmp")
    try:
        temporary.mkdir(0o755)
    except OSError as error:
        raise ExportError(f"cannot write in {target.parent}: {error.strerror}") from error
    try:
        info = os.statvfs(temporary)
        if size > info.f_bavail * info.f_frsize:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield temporary
        sync_folder(temporary)
        _put_in_place(temporary, target, force=force)
        sync_folder(target.parent)
    except OSError as error:
        raise ExportError(_why_not_written(error, target, size)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _put_in_place(temporary: Path, target: Path, *, force: bool) -> None:
    check_target(target, force=force, folder=True)
    old = _sibling(target, "old")
    replaced = target.is_dir() and any(target.iterdir())
    if replaced:
        target.rename(old)
    try:
        temporary.rename(target)
    except OSError:
        if replaced:
            old.rename(target)
        raise
    if replaced:
        shutil.rmtree(old)


def _sibling(target: Path, suffix: str) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(6)}.{suffix}")


def _is_model(folder: Path) -> bool:
    no_folders = not any(entry.is_dir() for entry in folder.iterdir())
    return no_folders and any((folder / name).is_file() for name in _MODEL_FILES)


def _why_not_written(error: OSError, target: Path, size: int) -> str:
    if error.errno not in _NO_ROOM:
        return f"cannot write {target}: {error.strerror or error}"
    info = os.statvfs(target.parent)
    free = format_bytes(info.f_bavail * info.f_frsize)
    return f"{target} needs {format_bytes(size)}, its filesystem has {free} left; nothing was kept"


# -- writing --------------------------------------------------------------------------------------


def _write_all(fd: int, data: memoryview) -> None:
    """Write all of the data, with as many calls as that takes."""
    while data:
        data = data[os.write(fd, data) :]


def write_synced(path: Path, data: bytes) -> None:
    """Write and sync a small new file; its name is not synced."""
    with _created(path) as fd:
        _write_all(fd, memoryview(data))
        os.fsync(fd)


@dataclass(frozen=True, slots=True)
class Written:
    """The files of one part, and their total size with the index."""

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
        files.append(_write_file(folder / name, shard, data_of, metadata, moved))
        finished(folder / name)
    size = sum(written.size for written in files)
    if len(shards) > 1:
        weights = {e.name: n for n, shard in zip(names, shards, strict=True) for e in shard}
        index = render_index(weights, sum(entry.nbytes for entry in entries))
        write_synced(folder / index_name(part), index)
        finished(folder / index_name(part))
        size += len(index)
    return Written(tuple(files), size)


def _write_file(
    path: Path, entries: Sequence[TensorEntry], data_of: DataOf, metadata: Mapping[str, str], moved: Moved
) -> SetFile:
    header = render_header(metadata, entries)
    size = len(header) + sum(entry.nbytes for entry in entries)
    digests = []
    with _created(path) as fd:
        _reserve_space(fd, size)
        _write_all(fd, memoryview(header))
        for entry in entries:
            digest = xxhash.xxh3_128()
            for data in data_of(entry.name):
                digest.update(data)
                _write_all(fd, data)
                moved(len(data))
            digests.append(digest.digest())
        os.fsync(fd)
    return SetFile(path.name, size, tuple(digests))


@contextmanager
def _created(path: Path) -> Iterator[int]:
    fd = _create(path)
    try:
        yield fd
    finally:
        os.close(fd)


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)


def _reserve_space(fd: int, size: int) -> None:
    """Raise ENOSPC before the write, if the filesystem can reserve space."""
    if size == 0:
        return
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
