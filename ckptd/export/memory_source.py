"""Snapshots in this node's memory as the source of an export: selected, held and verified, with the
parameters that other ranks captured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ckptd.core.export.export_errors import ExportError
from ckptd.core.export.joining import JoinedSnapshot, RankImage, join, lacking
from ckptd.core.export.wording import ranges
from ckptd.export.held_slots import (
    SealedSlot,
    held,
    open_segments,
    rank_image,
    sealed_slots,
    verify_slot,
)
from ckptd.export.ranks_here import (
    RanksHere,
    SharesMissing,
    Whereabouts,
    first_whole,
    why_missing,
)
from ckptd.export.source import CHUNK_BYTES, Origin, facts_of
from ckptd.memory.segment_file import Segment
from ckptd.storage.image import ImageView
from ckptd.storage.image_format import ImageTensor

__all__ = ["SlotSource", "nobody_knows", "open_slot"]


class SlotSource:
    """A verified snapshot in slots that are locked against reuse (a `TensorSource`).

    Args:
        views: the images that contain its tensors, by rank.
    """

    def __init__(self, origin: Origin, joined: JoinedSnapshot, views: Mapping[int, ImageView]) -> None:
        self.origin, self.facts = origin, joined.facts
        self.tensors: Sequence[ImageTensor] = joined.tensors
        self.scalars_len = views[origin.rank].scalars_len
        self._ranks, self._views = joined.ranks, views

    def prepare(self, order: Sequence[ImageTensor]) -> None:
        """Do nothing: the snapshot is in memory."""

    def chunks(self, tensor: ImageTensor) -> Iterator[memoryview]:
        """See `TensorSource.chunks`; they were verified before."""
        data = self._views[self._ranks[tensor.name]].data(tensor.name)
        for begin in range(0, len(data), CHUNK_BYTES):
            yield data[begin : begin + CHUNK_BYTES]


def nobody_knows(job: str, run: str, iteration: int) -> Mapping[int, Sequence[str]]:
    """A `Whereabouts` without a daemon: the nodes of other ranks' snapshots are not known."""
    return {}


@contextmanager
def open_slot(
    segment_dir: Path,
    iteration: int | None,
    *,
    job: str | None = None,
    run: str | None = None,
    rank: int | None = None,
    whereabouts: Whereabouts = nobody_knows,
) -> Iterator[SlotSource]:
    """Lock the snapshot of ``iteration`` until the end of the block (None: the newest one that this node
    holds completely).

    Args:
        segment_dir: the folder of the segments; no daemon is needed.
        job, run, rank: needed if several of them have such a snapshot.
        whereabouts: returns the nodes that may hold missing parts.
    Raises:
        ExportError: no snapshot matches, or several do, or parts of it are only in other nodes' memory.
        DamagedSnapshot: its digests do not match.
    """
    with ExitStack() as opened:
        segments, problems = open_segments(sorted(segment_dir.glob("*.seg")))
        for segment in segments:
            opened.callback(segment.close)
        if not segments:
            why = "; ".join(problems) if problems else "the folder contains no segment"
            raise ExportError(f"nothing to export in {segment_dir}: {why}")
        slots = _choose(segments, iteration, job, run, rank)
        here = RanksHere(segment_dir, segments, opened)
        yield _first_whole(slots, here, opened, whereabouts)


def _first_whole(
    slots: Sequence[SealedSlot], here: RanksHere, opened: ExitStack, whereabouts: Whereabouts
) -> SlotSource:
    """The first of these snapshots that this node holds completely; ``opened`` releases it.

    Raises:
        ExportError: none is complete; the reason is that of the first one.
    """
    first: SharesMissing | None = None
    for slot in slots:
        try:
            return opened.enter_context(_whole(slot, here))
        except SharesMissing as missing:
            first = first or missing
    assert first is not None, "there is a slot at least"
    raise why_missing(first, whereabouts)


@contextmanager
def _whole(slot: SealedSlot, here: RanksHere) -> Iterator[SlotSource]:
    """A snapshot with the parameters that other ranks captured for it, held and verified.

    Raises:
        SharesMissing: this node lacks some of them; nothing was read yet.
    """
    descriptor = slot.segment.descriptor
    with held(slot) as view, ExitStack() as others:
        facts = facts_of(descriptor.client, descriptor.rank)
        lacks = lacking(view.entries, facts.shares)
        copies = here.copies(slot, lacks)
        verify_slot(slot)
        views: dict[int, ImageView] = {descriptor.rank: view}
        images: dict[int, RankImage] = {}
        for rank, found in copies.items():
            copy, views[rank] = others.enter_context(first_whole(found))
            images[rank] = rank_image(views[rank], here.of(copy.segment.key))
        own = rank_image(view, here.own(slot.segment.key))
        joined = join(descriptor.rank, own, facts, lacks, images)
        origin = Origin(
            descriptor.job,
            descriptor.run,
            descriptor.rank,
            descriptor.world_size,
            slot.header.iteration,
            "memory",
            tuple(images),
        )
        yield SlotSource(origin, joined, views)


def _choose(
    segments: Sequence[Segment],
    iteration: int | None,
    job: str | None,
    run: str | None,
    rank: int | None,
) -> list[SealedSlot]:
    """The sealed slot that the arguments select; without an iteration all of the rank, newest first."""
    asked = [
        s
        for s in segments
        if job in (None, s.key.job) and run in (None, s.key.run) and rank in (None, s.key.rank)
    ]
    slots = sealed_slots(asked)
    found = [slot for slot in slots if iteration in (None, slot.header.iteration)]
    if not found:
        known = {slot.header.iteration for slot in slots}
        text = f"in memory are {ranges(known)}" if known else "there is none at all"
        which = "" if iteration is None else f" of iteration {iteration}"
        raise ExportError(f"no sealed snapshot{which} matches; {text}")
    keys = sorted({slot.segment.key for slot in found})
    if len(keys) > 1:
        names = "; ".join(map(str, keys))
        what = "snapshots are" if iteration is None else f"iteration {iteration} is"
        raise ExportError(f"{what} there for {names}: choose --job --run --rank")
    newest: dict[int, SealedSlot] = {}
    for slot in sorted(found, key=lambda slot: slot.header.sequence):
        newest[slot.header.iteration] = slot
    return [newest[number] for number in sorted(newest, reverse=True)]
