"""Export of a snapshot as a safetensors file, or as a Hugging Face model folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptd.core.export.export_errors import ExportError
from ckptd.core.export.export_plan import ExportPlan, Whole, plan_export
from ckptd.export.model_files import (
    Watch,
    check_target,
    new_file,
    new_folder,
    unwatched,
    write_all,
    write_part,
    write_synced,
)
from ckptd.export.source import Origin, TensorSource
from ckptd.storage.images.safetensors_header import render_header
from ckptd.storage.model_set import MODEL

__all__ = [
    "DEFAULT_SHARD_BYTES",
    "ExportReport",
    "convert",
    "converted_chunks",
    "export_file",
    "export_hf",
    "report_of",
]

DEFAULT_SHARD_BYTES = 5 * 10**9
# Files of a model folder besides weights: configuration, tokenizer, code.
_CONFIG_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken", ".py"})
_NOT_CONFIG = (".safetensors.index.json", ".bin.index.json", "import.json", "trainer_state.json")
_MAX_CONFIG_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The result of an export.

    Attributes:
        place: the source of the snapshot: ``memory``, or the store's URL.
        joined_ranks: other ranks that captured a part of it.
        tensors: number of the model's tensors; ``optimizer_tensors``: of the optimizer's state.
        converted: number of tensors that were converted to compute precision.
        notes: notes for the user.
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
        notes=notes,
        joined_ranks=origin.joined,
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
    header = render_header(_metadata(source.origin), [whole.entry for whole in plan.model])
    total = sum(whole.entry.nbytes for whole in plan.model)
    size = len(header) + total
    source.prepare(plan.pieces)
    with new_file(target, size, force=force) as fd, watch("exporting", total) as moved:
        write_all(fd, memoryview(header))
        for whole in plan.model:
            for data in converted_chunks(source, whole):
                write_all(fd, data)
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
            metadata=_metadata(source.origin),
            max_bytes=max_shard_bytes,
            moved=moved,
        )
        for name, data in copied.items():
            write_synced(folder / name, data)
    notes = () if "config.json" in copied else ("the folder has no config.json: pass --config",)
    return report_of(
        source, plan, target, "hf", files=len(written.files), size=written.size_bytes, notes=notes
    )


def _metadata(origin: Origin) -> Mapping[str, str]:
    return {
        "format": "pt",
        "ckptd.job": origin.job,
        "ckptd.run": origin.run,
        "ckptd.rank": str(origin.rank),
        "ckptd.iteration": str(origin.iteration),
    }


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
