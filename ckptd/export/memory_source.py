"""Snapshots in this node's memory: which one is meant, held and verified, with what other ranks
captured for it.
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
from ckptd.storage.images.image import ImageView
from ckptd.storage.images.image_format import ImageTensor

__all__ = ["SlotSource", "nobody_knows", "open_slot"]


class SlotSource:
    """A verified snapshot in slots that nobody reuses meanwhile (a `TensorSource`).

    Args:
        views: the images in which its tensors lie, by rank.
    """

    def __init__(
        self, origin: Origin, joined: JoinedSnapshot, views: Mapping[int, ImageView]
    ) -> None:
        self.origin, self.facts = origin, joined.facts
        self.tensors: Sequence[ImageTensor] = joined.tensors
        self.scalars_len = views[origin.rank].scalars_len
        self._ranks, self._views = joined.ranks, views

    def prepare(self, order: Sequence[ImageTensor]) -> None:
        """Nothing: it is in memory."""

    def chunks(self, tensor: ImageTensor) -> Iterator[memoryview]:
        """See `TensorSource.chunks`; they were verified before."""
        data = self._views[self._ranks[tensor.name]].data(tensor.name)
        for begin in range(0, len(data), CHUNK_BYTES):
            yield data[begin : begin + CHUNK_BYTES]


def nobody_knows(job: str, run: str, iteration: int) -> Mapping[int, Sequence[str]]:
    """No daemon is asked where other ranks' snapshots are."""
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
    """The snapshot of ``iteration``, locked until the end of the block (None: the newest one all of
    which is here).

    Args:
        segment_dir: where the segments are; no daemon is needed.
        job, run, rank: needed where more than one has such a snapshot.
        whereabouts: asked where other ranks' shares may be that are not here.
    Raises:
        ExportError: there is no such snapshot, or more than one, or other ranks' shares of it are in other nodes' memory.
        DamagedSnapshot: its digests do not match.
    """
    with ExitStack() as opened:
        segments, problems = open_segments(sorted(segment_dir.glob("*.seg")))
        for segment in segments:
            opened.callback(segment.close)
        if not segments:
            why = "; ".join(problems) if problems else "no segment is there"
            raise ExportError(f"nothing to export in {segment_dir}: {why}")
        slots = _choose(segments, iteration, job, run, rank)
        here = RanksHere(segment_dir, segments, opened)
        yield _first_whole(slots, here, opened, whereabouts)


def _first_whole(
    slots: Sequence[SealedSlot], here: RanksHere, opened: ExitStack, whereabouts: Whereabouts
) -> SlotSource:
    """Of the first of these snapshots all of which is here; ``opened`` ends it.

    Raises:
        ExportError: there is none; why not the first one.
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
    """A snapshot with all that other ranks captured for it, held and verified.

    Raises:
        SharesMissing: something is not here; nothing was read yet.
    """
    told = slot.segment.descriptor
    with held(slot) as view, ExitStack() as others:
        facts = facts_of(told.client, told.rank)
        lacks = lacking(view.entries, facts.shares)
        copies = here.copies(slot, lacks)
        verify_slot(slot)
        views: dict[int, ImageView] = {told.rank: view}
        images: dict[int, RankImage] = {}
        for rank, found in copies.items():
            copy, views[rank] = others.enter_context(first_whole(found))
            images[rank] = rank_image(views[rank], here.of(copy.segment.key))
        own = rank_image(view, here.own(slot.segment.key))
        joined = join(told.rank, own, facts, lacks, images)
        origin = Origin(
            told.job,
            told.run,
            told.rank,
            told.world_size,
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
    """The one sealed slot that is meant; without an iteration all of the rank, newest first."""
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
        raise ExportError(f"no sealed snapshot{which} as asked for; {text}")
    keys = sorted({slot.segment.key for slot in found})
    if len(keys) > 1:
        names = "; ".join(map(str, keys))
        what = "snapshots are" if iteration is None else f"iteration {iteration} is"
        raise ExportError(f"{what} there for {names}: choose --job --run --rank")
    newest: dict[int, SealedSlot] = {}
    for slot in sorted(found, key=lambda slot: slot.header.sequence):
        newest[slot.header.iteration] = slot
    return [newest[number] for number in sorted(newest, reverse=True)]
