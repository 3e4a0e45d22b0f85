"""Snapshots in this node's memory: which one is meant, held and verified."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ckptd.errors import SegmentError
from ckptd.exporting.errors import DamagedSnapshot, ExportError
from ckptd.exporting.plan import SnapshotFacts
from ckptd.exporting.source import CHUNK_BYTES, Origin, facts_of
from ckptd.memory import locks
from ckptd.memory.ring import SlotState
from ckptd.memory.segment_format import SlotHeader, slot_lock_byte
from ckptd.memory.segments import Segment, open_segment
from ckptd.storage.image import ImageError, ImageTensor, ImageView, verify

__all__ = ["SlotSource", "open_slot"]


class SlotSource:
    """A verified snapshot in a slot that nobody reuses meanwhile (a `TensorSource`)."""

    def __init__(self, origin: Origin, facts: SnapshotFacts, view: ImageView) -> None:
        self.origin, self.facts, self._view = origin, facts, view
        self.tensors: Sequence[ImageTensor] = view.entries
        self.scalars_len = view.scalars_len

    def prepare(self, order: Sequence[ImageTensor]) -> None:
        """Nothing: it is in memory."""

    def chunks(self, tensor: ImageTensor) -> Iterator[memoryview]:
        """See `TensorSource.chunks`; they were verified before."""
        data = self._view.data(tensor.name)
        for begin in range(0, len(data), CHUNK_BYTES):
            yield data[begin : begin + CHUNK_BYTES]


@contextmanager
def open_slot(
    segment_dir: Path,
    iteration: int | None,
    *,
    job: str | None = None,
    run: str | None = None,
    rank: int | None = None,
) -> Iterator[SlotSource]:
    """The snapshot of ``iteration`` (the newest one if None), locked until the end of the block.

    Args:
        segment_dir: where the segments are; no daemon is needed.
        job, run, rank: needed where more than one has such a snapshot.
    Raises:
        ExportError: there is no such snapshot, or more than one.
        DamagedSnapshot: its digests do not match.
    """
    segments = _open_all(segment_dir)
    try:
        segment, index, header = _choose(segments, iteration, job, run, rank)
        with locks.lock_file(segment.path, slot_lock_byte(index), exclusive=False) as taken:
            if not taken or segment.header(index) != header:
                raise ExportError(
                    f"iteration {header.iteration} has just been overwritten; choose a newer one"
                )
            view = _verified(segment, index, header)
            dense = view.anchors == (1 << view.num_operators) - 1
            alike = [s for s in segments if s.key == segment.key]
            facts = facts_of(segment.descriptor.client, dense=dense, alike=_images(alike))
            told = segment.descriptor
            origin = Origin(
                told.job, told.run, told.rank, told.world_size, header.iteration, "memory"
            )
            yield SlotSource(origin, facts, view)
    finally:
        for segment in segments:
            segment.close()


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
    iteration: int | None,
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
    known = sorted({header.iteration for _, _, header in slots})
    wanted = iteration if iteration is not None or not known else known[-1]
    found = [slot for slot in slots if slot[2].iteration == wanted]
    if not found:
        text = f"in memory are {_ranges(known)}" if known else "there is none at all"
        which = "" if iteration is None else f" of iteration {iteration}"
        raise ExportError(f"no sealed snapshot{which} as asked for; {text}")
    keys = sorted({segment.key for segment, _, _ in (slots if iteration is None else found)})
    if len(keys) > 1:
        names = "; ".join(map(str, keys))
        what = "snapshots are" if iteration is None else f"iteration {iteration} is"
        raise ExportError(f"{what} there for {names}: choose --job --run --rank")
    return max(found, key=lambda slot: slot[2].sequence)


def _verified(segment: Segment, index: int, header: SlotHeader) -> ImageView:
    image = segment.image(index, header)
    try:
        verify(image, header.header_digest)
        return ImageView(image)
    except ImageError as error:
        raise DamagedSnapshot(
            f"the snapshot of iteration {header.iteration} is damaged: {error}"
        ) from error


def _images(segments: Iterable[Segment]) -> Iterator[ImageView]:
    for segment in segments:
        for index, header in segment.headers():
            if header.state is SlotState.SEALED:
                try:
                    yield ImageView(segment.image(index, header))
                except ImageError:
                    continue  # damaged or being overwritten: it only could have told us a dtype


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges: 1, 3 to 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in runs)
