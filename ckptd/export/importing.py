"""A model from elsewhere as what a run starts from: rewritten as a set of safetensors files that is
checked by digests.

``import.json`` is written last: what has none is no starting point. See `ckptd.storage.model_set`.
"""

from __future__ import annotations

import mmap
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ckptd
from ckptd.core.export.export_errors import DamagedSnapshot, ExportError
from ckptd.export.dcp_wire import Ask, Contents, ReadJob
from ckptd.export.exports import DEFAULT_SHARD_BYTES, Watch, unwatched
from ckptd.export.files import check_target, new_folder
from ckptd.export.safetensors_files import Moved, write_part, write_synced
from ckptd.export.torch_process import Child, running
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
    open_set,
    render_import,
)
from ckptd.storage.stores.objects import ObjectStore

__all__ = [
    "IMPORT_FORMATS",
    "ImportReport",
    "ImportSource",
    "import_prefix",
    "import_to_folder",
    "import_to_store",
    "open_import",
]

IMPORT_FORMATS = ("safetensors", "dcp")

_CHILD = "ckptd.client.interchange.dcp_import"
_METADATA = {"format": "pt"}


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What was imported; ``start_from`` is what a `Checkpointer` is told."""

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
        """The options of parameter groups by parameter, where they are known."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What whoever imports it should know."""

    def entries(self, part: str) -> list[TensorEntry]:
        """The tensors of the model, or of the optimizer's state."""

    def data_of(self, part: str, name: str) -> Iterable[memoryview]:
        """The bytes of one of them."""


@contextmanager
def open_import(
    path: Path, *, kind: str = "safetensors", model_key: str = "", optimizer_key: str = ""
) -> Iterator[ImportSource]:
    """A model at a path, of a kind that whoever asks has named: what lies there decides nothing.

    Args:
        kind: ``safetensors``, a folder or a file; or ``dcp``, a checkpoint of torch.distributed,
            which holds pickles.
        model_key, optimizer_key: under which keys of such a checkpoint they are.
    Raises:
        ExportError: it is not of that kind.
    """
    if kind == "dcp":
        if not (path / ".metadata").is_file():
            raise ExportError(f"{path} holds no .metadata: no checkpoint of torch.distributed")
        with running(_CHILD) as child:
            child.say(ReadJob(str(path.absolute()), model_key, optimizer_key))
            yield _DcpSource(child)
        return
    single = path.name if path.is_file() else ""
    try:
        found = open_set(FolderFiles(path.parent if single else path), single=single)
    except SetError as error:
        raise ExportError(str(error)) from error
    yield _HfSource(found)


def import_prefix(job: str, run: str) -> str:
    """Below which an import lies in a store."""
    return f"{run_prefix(job, run)}import/"


def import_to_folder(
    source: ImportSource, target: Path, *, force: bool = False, watch: Watch = unwatched
) -> ImportReport:
    """Write the set to a folder.

    Raises:
        ExportError: the target exists, or there is no room.
        DamagedSnapshot: what is imported is damaged; nothing is left.
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
        ExportError: there is one already.
        StoreError: the store failed; what it has got is no starting point, and is replaced by the
            next import.
    """
    prefix = import_prefix(job, run)
    if store.info(prefix + MANIFEST) is not None:
        if not force:
            raise ExportError(f"{shown_url}/{prefix} holds an import already; pass --force to replace it")
        store.delete([prefix + MANIFEST])  # first of all: from here on it is none any more
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
    """Write the set file by file, its manifest last; how many files it has."""
    files: list[SetFile] = []
    for part in (MODEL, OPTIMIZER):
        entries = sorted(source.entries(part), key=lambda e: -DTYPE_SIZE[e.dtype])
        if entries:
            written = write_part(
                folder,
                part,
                entries,
                lambda name, part=part: source.data_of(part, name),  # type: ignore[misc]
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


class _HfSource:
    """A set of safetensors files; one of ours may have optimizer state."""

    kind = "hf"
    notes: tuple[str, ...] = ()

    def __init__(self, found: ModelSet) -> None:
        self._set = found
        self.groups = found.groups

    def entries(self, part: str) -> list[TensorEntry]:
        tensors = self._tensors(part).values()
        return [TensorEntry(t.name, t.dtype, t.shape) for t in tensors]

    def data_of(self, part: str, name: str) -> Iterator[memoryview]:
        tensor = self._tensors(part)[name]
        into = memoryview(bytearray(tensor.nbytes))
        try:
            self._set.read(tensor, into)
        except SetError as error:
            raise DamagedSnapshot(str(error)) from error
        yield into

    def _tensors(self, part: str) -> Mapping[str, Any]:
        return self._set.model if part == MODEL else self._set.optimizer


class _DcpSource:
    """A checkpoint that a child with torch reads."""

    kind = "dcp"

    def __init__(self, child: Child) -> None:
        self._child = child
        told = child.hear(Contents)
        self.groups, self.notes = told.groups, tuple(told.notes)
        self._found = {
            part: {t.name: (i, TensorEntry(t.name, t.dtype, t.shape)) for i, t in numbered}
            for part in (MODEL, OPTIMIZER)
            for numbered in [
                [(i, t) for i, t in enumerate(told.tensors) if (t.kind == "model") == (part == MODEL)]
            ]
        }

    def entries(self, part: str) -> list[TensorEntry]:
        return [entry for _, entry in self._found[part].values()]

    def data_of(self, part: str, name: str) -> Iterator[memoryview]:
        index, entry = self._found[part][name]
        self._child.say(Ask(index))
        into = memoryview(bytearray(entry.nbytes))
        self._child.receive(into)
        yield into


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
