"""Export of a snapshot as a checkpoint of `torch.distributed.checkpoint`, through a child process
with torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckptd.core.export.export_plan import ExportPlan, Whole, plan_export
from ckptd.export.dcp_wire import Ask, DcpTensor, WriteJob, Wrote
from ckptd.export.exports import (
    ExportReport,
    Watch,
    converted_chunks,
    report_of,
    unwatched,
)
from ckptd.export.files import check_target, new_folder
from ckptd.export.safetensors_files import Moved
from ckptd.export.source import TensorSource
from ckptd.export.torch_process import running
from ckptd.storage.image_format import ImageTensor

__all__ = ["export_dcp"]

_CHILD = "ckptd.client.interchange.dcp_export"
_ENTRIES = "ckptd."  # step scalars and the packing of optimizer state, which only the client reads


def export_dcp(
    source: TensorSource,
    target: Path,
    *,
    keep_prefix: bool = False,
    force: bool = False,
    watch: Watch = unwatched,
) -> ExportReport:
    """Write the model, and of a dense snapshot the optimizer's state, for stock ``dcp.load``.

    Keys are ``model.<name>`` and ``optim.state.<name>.<key>``, as of `get_model_state_dict` and
    `get_optimizer_state_dict`. Needs torch to be installed.

    Raises:
        ExportError, DamagedSnapshot: as `ckptd.export.exports.export_file`.
    """
    check_target(target, force=force, folder=True)
    plan = plan_export(source.tensors, source.facts, keep_prefix=keep_prefix, optimizer=True)
    wholes = [*plan.model, *plan.optimizer]
    entries = [t for t in source.tensors if t.name.startswith(_ENTRIES)]
    entries = entries if source.facts.dense else []
    total = sum(whole.entry.nbytes for whole in wholes)
    source.prepare([*entries, *plan.pieces])
    with new_folder(target, total, force=force) as folder, watch("exporting", total) as moved:
        wrote = _write(source, plan, wholes, entries, folder, moved)
        files = [path.stat().st_size for path in folder.iterdir()]
    return report_of(
        source,
        plan,
        target,
        "dcp",
        files=len(files),
        size=sum(files),
        optimizer_tensors=wrote.optimizer_tensors,
        notes=tuple(wrote.notes),
    )


def _write(
    source: TensorSource,
    plan: ExportPlan,
    wholes: list[Whole],
    entries: list[ImageTensor],
    folder: Path,
    moved: Moved,
) -> Wrote:
    """Send the child the tensors that it asks for, until it has written all."""
    job = WriteJob(
        str(folder),
        [_dcp_tensor(whole) for whole in wholes]
        + [DcpTensor("entry", e.name, e.dtype, e.shape) for e in entries],
        dict(plan.names),
        dict(plan.aliases),
        dict(source.facts.groups),
        source.scalars_len,
    )
    with running(_CHILD) as child:
        child.say(job)
        while (asked := child.hear(Ask)).done is None:
            for data in _bytes_of(source, wholes, entries, asked.index):
                child.send(data)
                moved(len(data) if asked.index < len(wholes) else 0)
        return asked.done


def _bytes_of(
    source: TensorSource, wholes: list[Whole], entries: list[ImageTensor], index: int
) -> Iterator[memoryview]:
    if index < len(wholes):
        return converted_chunks(source, wholes[index])
    return source.chunks(entries[index - len(wholes)])


def _dcp_tensor(whole: Whole) -> DcpTensor:
    kind = "master" if whole.key == "master" else "optim" if whole.key else "model"
    return DcpTensor(kind, whole.name, whole.dtype, whole.shape, whole.param, whole.key)
