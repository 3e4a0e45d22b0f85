"""A model file out of one snapshot in memory: `ckptctl export`.

One snapshot holds the compute weights of every operator (of anchored ones, their parameter), so
one slot is a whole model at that iteration. The slot's read lock is held while it is verified and
copied. Slices `<param>[a:b]` are joined to the tensor they are rows of. A parameter that is
anchored here in another dtype than it computes in is converted, if another snapshot in memory
shows what that is. The file appears complete and synced, or not at all.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckptd import locks
from ckptd.errors import SegmentError
from ckptd.ring import SlotState
from ckptd.segment_format import SlotHeader, slot_lock_byte
from ckptd.segments import Segment, open_segment
from ckptd.storage.image import DTYPE_SIZE, ImageError, ImageTensor, ImageView, verify
from ckptd.units import format_bytes

__all__ = ["DamagedSnapshot", "ExportError", "ExportReport", "convert", "export", "plan_tensors"]

_SLICE = re.compile(r"(?P<name>.*)\[(?P<begin>\d+):(?P<end>\d+)\]", re.DOTALL)
_OURS = ("master/", "optim/", "ckptd.")
_BUFFER = "buffer/"
_CHUNK_BYTES = 16 << 20
_ALIGNMENT = 64


class ExportError(RuntimeError):
    """The model cannot be written; says why and what to do."""


class DamagedSnapshot(ExportError):
    """The snapshot is there and is not what was sealed."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was written."""

    path: str
    job: str
    run: str
    rank: int
    iteration: int
    tensors: int
    size_bytes: int
    converted: int


@dataclass(frozen=True, slots=True)
class _Whole:
    """One tensor of the exported file and the pieces of the image that it is made of, in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[ImageTensor, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_SIZE[self.dtype]


def export(
    segment_dir: Path,
    iteration: int,
    target: Path,
    *,
    job: str | None = None,
    run: str | None = None,
    rank: int | None = None,
    force: bool = False,
) -> ExportReport:
    """Write the model of `iteration` as one safetensors file.

    Args:
        segment_dir: where the segments are; no daemon is needed.
        job, run, rank: needed where more than one has a snapshot of that iteration.
        force: replace the target if it exists.
    Raises:
        ExportError: no such snapshot, an ambiguous one, no room, or the target exists.
        DamagedSnapshot: its digests do not match.
    """
    if target.exists() and not force:
        raise ExportError(f"{target} exists already; pass --force to replace it")
    segments = _open_all(segment_dir)
    try:
        wanted = _choose(segments, iteration, job, run, rank)
        alike = [s for s in segments if s.key == wanted[0].key]
        return _export_slot(*wanted, _compute_dtypes(alike), target, force=force)
    finally:
        for segment in segments:
            segment.close()


def plan_tensors(view: Iterable[ImageTensor], compute: Mapping[str, str]) -> list[_Whole]:
    """The model's whole tensors out of an image's, by descending item size, then name.

    Args:
        compute: dtype in which a tensor of the image computes, where known.
    Raises:
        ExportError: slices that do not make a whole.
    """
    groups: dict[str, list[tuple[int, int, ImageTensor]]] = {}
    for tensor in view:
        if tensor.name.startswith(_OURS):
            continue
        match = _SLICE.fullmatch(tensor.name)
        name = match["name"] if match else tensor.name
        rows = (int(match["begin"]), int(match["end"])) if match else (-1, -1)
        groups.setdefault(name, []).append((*rows, tensor))
    wholes = [_join(name, sorted(parts, key=_first_row), compute) for name, parts in groups.items()]
    names = [whole.name for whole in wholes]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ExportError(f"a parameter and a buffer are both called {', '.join(twice)}")
    return sorted(wholes, key=lambda whole: (-DTYPE_SIZE[whole.dtype], whole.name))


def convert(data: memoryview, source: str, target: str) -> memoryview:
    """Floats in another float dtype, rounded to nearest even as a GPU does; NaN stays NaN.

    Raises:
        ExportError: a pair that is not supported.
    """
    if source == target:
        return data
    import numpy as np  # only where something is converted: `ckptctl` starts faster without

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


def _open_all(folder: Path) -> list[Segment]:
    found: list[Segment] = []
    problems: list[str] = []
    for path in sorted(folder.glob("*.seg")):
        try:
            found.append(open_segment(path, readonly=True))
        except (OSError, ValueError, SegmentError) as error:
            problems.append(f"{path.name}: {error}")
    if not found:
        why = "; ".join(problems) if problems else "no segment is there"
        raise ExportError(f"nothing to export in {folder}: {why}")
    return found


def _choose(
    segments: Sequence[Segment],
    iteration: int,
    job: str | None,
    run: str | None,
    rank: int | None,
) -> tuple[Segment, int, SlotHeader]:
    """The one sealed slot that is meant."""
    asked = [
        s
        for s in segments
        if job in (None, s.key.job) and run in (None, s.key.run) and rank in (None, s.key.rank)
    ]
    slots = [(s, i, h) for s in asked for i, h in s.headers() if h.state is SlotState.SEALED]
    found = [slot for slot in slots if slot[2].iteration == iteration]
    if not found:
        known = sorted({header.iteration for _, _, header in slots})
        text = f"in memory are {_ranges(known)}" if known else "there is none at all"
        raise ExportError(f"no sealed snapshot of iteration {iteration} as asked for; {text}")
    keys = sorted({segment.key for segment, _, _ in found})
    if len(keys) > 1:
        names = "; ".join(map(str, keys))
        raise ExportError(f"iteration {iteration} is there for {names}: choose --job --run --rank")
    return max(found, key=lambda slot: slot[2].sequence)


def _compute_dtypes(segments: Iterable[Segment]) -> dict[str, str]:
    """For each tensor the smallest dtype in which any snapshot of this rank holds it.

    Where it is not anchored a snapshot holds it as it computes, and that is never the larger one.
    """
    dtypes: dict[str, str] = {}
    for segment in segments:
        for index, header in segment.headers():
            if header.state is not SlotState.SEALED:
                continue
            try:
                view = ImageView(segment.image(index, header))
            except ImageError:
                continue  # damaged or being overwritten: it only could have told us a dtype
            for tensor in view:
                known = dtypes.setdefault(tensor.name, tensor.dtype)
                if DTYPE_SIZE[tensor.dtype] < DTYPE_SIZE[known]:
                    dtypes[tensor.name] = tensor.dtype
    return dtypes


def _export_slot(
    segment: Segment,
    index: int,
    header: SlotHeader,
    compute: Mapping[str, str],
    target: Path,
    *,
    force: bool,
) -> ExportReport:
    with locks.lock_file(segment.path, slot_lock_byte(index), exclusive=False) as taken:
        if not taken or segment.header(index) != header:
            raise ExportError(
                f"iteration {header.iteration} has just been overwritten; choose a newer one"
            )
        image = segment.image(index, header)
        try:
            verify(image, header.header_digest)
        except ImageError as error:
            raise DamagedSnapshot(
                f"the snapshot of iteration {header.iteration} is damaged: {error}"
            ) from error
        view = ImageView(image)
        wholes = plan_tensors(view, compute)
        prefix = _header(wholes, segment, header)
        size = len(prefix) + sum(whole.nbytes for whole in wholes)
        with _appears_complete(target, size, force=force) as fd:
            _write(fd, memoryview(prefix))
            for whole in wholes:
                for data in _data(view, whole):
                    _write(fd, data)
    key = segment.key
    converted = sum(any(p.dtype != whole.dtype for p in whole.pieces) for whole in wholes)
    return ExportReport(
        str(target), key.job, key.run, key.rank, header.iteration, len(wholes), size, converted
    )


def _join(
    name: str, parts: Sequence[tuple[int, int, ImageTensor]], compute: Mapping[str, str]
) -> _Whole:
    dtypes = {compute.get(tensor.name, tensor.dtype) for _, _, tensor in parts}
    dtype = min(dtypes, key=lambda kind: (DTYPE_SIZE[kind], kind))
    exported = name.removeprefix(_BUFFER)
    pieces = tuple(tensor for _, _, tensor in parts)
    if parts[0][0] < 0:
        if len(parts) > 1:
            raise ExportError(f"{name} is in the snapshot both whole and in slices")
        return _Whole(exported, dtype, pieces[0].shape, pieces)
    row = 0
    for begin, end, tensor in parts:
        if begin != row or tensor.shape[:1] != (end - begin,):
            raise ExportError(f"the slices of {name} do not join at row {row}")
        if tensor.shape[1:] != pieces[0].shape[1:]:
            raise ExportError(f"the slices of {name} differ in shape")
        row = end
    return _Whole(exported, dtype, (row, *pieces[0].shape[1:]), pieces)


def _first_row(part: tuple[int, int, ImageTensor]) -> int:
    return part[0]


def _header(wholes: Sequence[_Whole], segment: Segment, header: SlotHeader) -> bytes:
    key = segment.key
    table: dict[str, object] = {
        "__metadata__": {
            "format": "pt",
            "ckptd.job": key.job,
            "ckptd.run": key.run,
            "ckptd.rank": str(key.rank),
            "ckptd.iteration": str(header.iteration),
        }
    }
    offset = 0
    for whole in wholes:
        table[whole.name] = {
            "dtype": whole.dtype,
            "shape": list(whole.shape),
            "data_offsets": [offset, offset + whole.nbytes],
        }
        offset += whole.nbytes
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _data(view: ImageView, whole: _Whole) -> Iterator[memoryview]:
    for piece in whole.pieces:
        data = view.data(piece.name)
        for begin in range(0, len(data), _CHUNK_BYTES):
            yield convert(data[begin : begin + _CHUNK_BYTES], piece.dtype, whole.dtype)


@contextmanager
def _appears_complete(target: Path, size: int, *, force: bool) -> Iterator[int]:
    """A descriptor to write to; the target appears, synced, when the block ends well."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
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
        _sync_folder(target.parent)
    except FileExistsError as error:
        raise ExportError(f"{target} has just appeared; pass --force to replace it") from error
    except OSError as error:
        raise ExportError(_why_not_written(error, target, size)) from error
    finally:
        os.close(fd)
        temporary.unlink(missing_ok=True)


def _reserve_space(fd: int, size: int) -> None:
    """Find out now that it does not fit, where the filesystem can tell."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise


def _why_not_written(error: OSError, target: Path, size: int) -> str:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return f"cannot write {target}: {error.strerror or error}"
    info = os.statvfs(target.parent)
    free = format_bytes(info.f_bavail * info.f_frsize)
    return f"{target} needs {format_bytes(size)}, its filesystem has {free} left; nothing was kept"


def _write(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges: 1, 3 to 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in runs)
