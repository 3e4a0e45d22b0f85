"""Checkpoints of `torch.distributed.checkpoint`, written and read through a child process with torch.

The child communicates over pipes and ends with the block that uses it. Messages (`dcp_wire`) are lines
of JSON; the bytes of tensors follow them, with a length that both sides know. The child's stderr is
shown only if it fails.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import msgspec

from ckptd.core.export_plan import ExportError, ExportPlan, Whole, plan_export
from ckptd.export.dcp_wire import Ask, Contents, DcpTensor, ReadJob, WriteJob, Wrote
from ckptd.export.exports import (
    ExportReport,
    Moved,
    Watch,
    check_target,
    converted_chunks,
    new_folder,
    report_of,
    unwatched,
)
from ckptd.export.source import TensorSource
from ckptd.storage.image_format import ImageTensor, TensorEntry
from ckptd.storage.model_set import MODEL, OPTIMIZER

_WRITER = "ckptd.client.interchange.dcp_export"
_READER = "ckptd.client.interchange.dcp_import"
_ENTRIES = "ckptd."  # step scalars and the packing of optimizer state, which only the client reads
_END_S = 30.0
_MAX_LINE = 1 << 30

_T = TypeVar("_T")


# -- export ---------------------------------------------------------------------------------------


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
    entries = [t for t in source.tensors if t.name.startswith(_ENTRIES)] if source.facts.dense else []
    total = sum(whole.entry.nbytes for whole in wholes)
    source.prepare([*entries, *plan.pieces])
    with new_folder(target, total, force=force) as folder, watch("exporting", total) as moved:
        wrote = _write(source, plan, entries, folder, moved)
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
    source: TensorSource, plan: ExportPlan, entries: Sequence[ImageTensor], folder: Path, moved: Moved
) -> Wrote:
    """Send the child the tensors that it asks for, until it has written all."""
    wholes = [*plan.model, *plan.optimizer]
    job = WriteJob(
        str(folder),
        [*map(_dcp_tensor, wholes), *(DcpTensor("entry", e.name, e.dtype, e.shape) for e in entries)],
        dict(plan.names),
        dict(plan.aliases),
        dict(source.facts.groups),
        source.scalars_len,
    )
    with _running(_WRITER) as child:
        child.say(job)
        while (asked := child.hear(Ask)).done is None:
            if asked.index < len(wholes):
                for data in converted_chunks(source, wholes[asked.index]):
                    child.send(data)
                    moved(len(data))
            else:
                for data in source.chunks(entries[asked.index - len(wholes)]):
                    child.send(data)
        return asked.done


def _dcp_tensor(whole: Whole) -> DcpTensor:
    kind = "master" if whole.key == "master" else "optim" if whole.key else "model"
    return DcpTensor(kind, whole.name, whole.dtype, whole.shape, whole.param, whole.key)


# -- import ---------------------------------------------------------------------------------------


@contextmanager
def open_dcp(folder: Path, model_key: str, optimizer_key: str) -> Iterator[DcpSource]:
    """Open a checkpoint as the source of an import.

    Raises:
        ExportError: it is no such checkpoint, or the child refuses it.
    """
    if not (folder / ".metadata").is_file():
        raise ExportError(f"{folder} is no checkpoint of torch.distributed: it has no .metadata")
    with _running(_READER) as child:
        child.say(ReadJob(str(folder.absolute()), model_key, optimizer_key))
        yield DcpSource(child)


class DcpSource:
    """A checkpoint that a child with torch reads (an `ImportSource`)."""

    kind = "dcp"

    def __init__(self, child: _Child) -> None:
        self._child = child
        contents = child.hear(Contents)
        self.groups: Mapping[str, Mapping[str, Any]] = contents.groups
        self.notes = tuple(contents.notes)
        self._found: dict[str, dict[str, tuple[int, TensorEntry]]] = {MODEL: {}, OPTIMIZER: {}}
        for index, tensor in enumerate(contents.tensors):
            part = MODEL if tensor.kind == "model" else OPTIMIZER
            self._found[part][tensor.name] = index, TensorEntry(tensor.name, tensor.dtype, tensor.shape)

    def entries(self, part: str) -> list[TensorEntry]:
        """See `ImportSource.entries`."""
        return [entry for _, entry in self._found[part].values()]

    def data_of(self, part: str, name: str) -> Iterator[memoryview]:
        """See `ImportSource.data_of`."""
        index, entry = self._found[part][name]
        self._child.say(Ask(index))
        into = memoryview(bytearray(entry.nbytes))
        self._child.receive(into)
        yield into


# -- the child ------------------------------------------------------------------------------------


class _Child:
    """A running ``python -m <module>``."""

    def __init__(self, module: str, process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._module, self._process, self._errors = module, process, errors
        self._input = process.stdin
        self._output = cast("io.BufferedReader", process.stdout)

    def say(self, message: msgspec.Struct) -> None:
        """Send a message."""
        self.send(memoryview(msgspec.json.encode(message) + b"\n"))

    def send(self, data: memoryview) -> None:
        """Send bytes that the child waits for."""
        try:
            while data:
                data = data[self._input.write(data) :]
            self._input.flush()
        except OSError as error:
            raise self._ended() from error

    def hear(self, kind: type[_T]) -> _T:
        """Receive a message."""
        line = self._output.readline(_MAX_LINE)
        if not line.endswith(b"\n"):
            raise self._ended()
        try:
            return msgspec.json.decode(line, type=kind)
        except msgspec.MsgspecError as error:
            raise ExportError(f"{self._module} sent a malformed message ({error})") from error

    def receive(self, into: memoryview) -> None:
        """Fill the buffer with bytes that were requested from the child."""
        while into:
            done = self._output.readinto(into)
            if not done:
                raise self._ended()
            into = into[done:]

    def _ended(self) -> ExportError:
        """The error of a child that has ended, with the last line of its stderr."""
        code = self._process.wait(_END_S)
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        words = lines[-1] if lines else "without a message"  # of a traceback: the exception
        return ExportError(f"{self._module} ended with status {code}: {words}")


@contextmanager
def _running(module: str) -> Iterator[_Child]:
    """Run ``python -m <module>`` until the end of the block: its normal end, or a kill after an error."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            # -P: do not import files of the current folder, such as a downloaded torch.py.
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        try:
            yield _Child(module, process, errors)
            assert process.stdin is not None
            process.stdin.close()
            if process.wait(_END_S):
                raise ExportError(f"{module} ended with status {process.returncode}")
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    # Data for a process that has ended are not needed any more.
                    with suppress(BrokenPipeError):
                        pipe.close()
