"""Import of a model of another tool as the starting point of a run: rewritten as a set of safetensors
files that is verified by digests (`ckptd.storage.model_set`).

``import.json`` is written last: a set without it is no starting point.
"""

from __future__ import annotations

import mmap
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import ckptd
from ckptd.core.export_plan import DamagedSnapshot, ExportError
from ckptd.export.dcp import open_dcp
from ckptd.export.exports import (
    DEFAULT_SHARD_BYTES,
    Moved,
    Watch,
    check_target,
    new_folder,
    unwatched,
    write_part,
    write_synced,
)
from ckptd.storage.checkpoints.names import run_prefix
from ckptd.storage.image_format import DTYPE_SIZE, TensorEntry
from ckptd.storage.model_set import (
    MANIFEST,
    MODEL,
    OPTIMIZER,
    FolderFiles,
    ModelSet,
    SetError,
    SetFile,
    SetTensor,
    open_set,
    render_import,
)
from ckptd.storage.stores.objects import ObjectStore

IMPORT_FORMATS = ("safetensors", "dcp")

_METADATA = {"format": "pt"}


@dataclass(frozen=True, slots=True)
class ImportReport:
    """The result of an import; ``start_from`` is the value for `RecoveryOptions`."""

    start_from: str
    format: str
    tensors: int
    optimizer_tensors: int
    files: int
    size_bytes: int
    notes: tuple[str, ...]


class ImportSource(Protocol):
    """A model (and the state of its optimizer) to import."""

    @property
    def kind(self) -> str:
        """``hf`` or ``dcp``."""

    @property
    def groups(self) -> Mapping[str, Mapping[str, Any]]:
        """The options of parameter groups by parameter, as far as they are known."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user."""

    def entries(self, part: str) -> list[TensorEntry]:
        """The tensors of the model, or of the optimizer's state."""

    def data_of(self, part: str, name: str) -> Iterable[memoryview]:
        """The bytes of one of them."""


def open_import(
    path: Path, *, kind: str = "safetensors", model_key: str = "", optimizer_key: str = ""
) -> AbstractContextManager[ImportSource]:
    """Open the model at a path for a block. The caller names its format, which is never guessed from
    the files.

    Args:
        kind: ``safetensors``, a folder or a file; or ``dcp``, a checkpoint of torch.distributed,
            which contains pickles.
        model_key, optimizer_key: the keys of both in such a checkpoint.
    Raises:
        ExportError: the path does not have this format.
    """
    return open_dcp(path, model_key, optimizer_key) if kind == "dcp" else _open_safetensors(path)


@contextmanager
def _open_safetensors(path: Path) -> Iterator[_SafetensorsSource]:
    single = path.name if path.is_file() else ""
    try:
        found = open_set(FolderFiles(path.parent if single else path), single=single)
    except SetError as error:
        raise ExportError(str(error)) from error
    yield _SafetensorsSource(found)


class _SafetensorsSource:
    """A set of safetensors files; a set that ckptd wrote may have optimizer state."""

    kind = "hf"
    notes: tuple[str, ...] = ()

    def __init__(self, found: ModelSet) -> None:
        self._set = found
        self.groups = found.groups

    def entries(self, part: str) -> list[TensorEntry]:
        return [TensorEntry(t.name, t.dtype, t.shape) for t in self._tensors(part).values()]

    def data_of(self, part: str, name: str) -> Iterator[memoryview]:
        tensor = self._tensors(part)[name]
        into = memoryview(bytearray(tensor.nbytes))
        try:
            self._set.read(tensor, into)
        except SetError as error:
            raise DamagedSnapshot(str(error)) from error
        yield into

    def _tensors(self, part: str) -> Mapping[str, SetTensor]:
        return self._set.model if part == MODEL else self._set.optimizer


def import_to_folder(
    source: ImportSource, target: Path, *, force: bool = False, watch: Watch = unwatched
) -> ImportReport:
    """Write the set to a folder.

    Raises:
        ExportError: the target exists, or the disk is full.
        DamagedSnapshot: the source is damaged; no file is left behind.
    """
    check_target(target, force=force, folder=True)
    total = _total(source)
    with new_folder(target, total, force=force) as folder, watch("importing", total) as moved:
        files = _write(source, folder, moved, lambda path: None)
    return _report(source, str(target.absolute()), files, total)


def import_to_store(
    source: ImportSource,
    store: ObjectStore,
    shown_url: str,
    job: str,
    run: str,
    *,
    force: bool = False,
    watch: Watch = unwatched,
) -> ImportReport:
    """Store the set below the run's name.

    Raises:
        ExportError: the store has an import of this run.
        StoreError: the store failed; the objects stored so far are no starting point, and the next
            import replaces them.
    """
    prefix = f"{run_prefix(job, run)}import/"
    if store.info(prefix + MANIFEST) is not None:
        if not force:
            raise ExportError(f"{shown_url}/{prefix} holds an import already; pass --force to replace it")
        store.delete([prefix + MANIFEST])  # first: without it the rest is no starting point
    store.delete([info.key for info in store.list(prefix)])

    def put(path: Path) -> None:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
            memoryview(data) as view,
        ):
            store.put(prefix + path.name, [view])
        path.unlink()

    total = _total(source)
    with (
        tempfile.TemporaryDirectory(prefix="ckptctl-import-") as folder,
        watch("importing", total) as moved,
    ):
        files = _write(source, Path(folder), moved, put)
    return _report(source, f"{shown_url.rstrip('/')}/{prefix.rstrip('/')}", files, total)


def _write(source: ImportSource, folder: Path, moved: Moved, finished: Callable[[Path], None]) -> int:
    """Write the set file by file, its manifest last; returns the number of files without it."""
    files: list[SetFile] = []
    for part in (MODEL, OPTIMIZER):
        entries = sorted(source.entries(part), key=lambda e: -DTYPE_SIZE[e.dtype])
        if entries:
            written = write_part(
                folder,
                part,
                entries,
                partial(source.data_of, part),
                metadata=_METADATA,
                max_bytes=DEFAULT_SHARD_BYTES,
                moved=moved,
                finished=finished,
            )
            files += written.files
    manifest = render_import(
        files,
        source=source.kind,
        groups=source.groups,
        created_at_ns=time.time_ns(),
        tool=f"ckptd {ckptd.__version__}",
    )
    write_synced(folder / MANIFEST, manifest)
    finished(folder / MANIFEST)
    return len(files)


def _total(source: ImportSource) -> int:
    return sum(entry.nbytes for part in (MODEL, OPTIMIZER) for entry in source.entries(part))


def _report(source: ImportSource, start_from: str, files: int, total: int) -> ImportReport:
    return ImportReport(
        start_from=start_from,
        format=source.kind,
        tensors=len(source.entries(MODEL)),
        optimizer_tensors=len(source.entries(OPTIMIZER)),
        files=files,
        size_bytes=total,
        notes=source.notes,
    )
